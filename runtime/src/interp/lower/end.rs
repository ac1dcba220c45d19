//! Lowers the terminator of a block.
//!
//! The guest's flags must be in the record when the block ends. If the block has changed them, they
//! are recorded by an operation before the last one. A conditional branch that compares the words
//! of the flags' own description does both in one operation (`fused_branch`).
//!
//! Example: `cmp eax, ecx; jb l` ends in one operation. It records (`Sub`, i32, eax, ecx), compares
//! the two words and leaves by one of two links.

use super::{CALL_FLAGS, Compare, Decision, End, LowerError, Lowerer, Val};
use crate::interp::code::{self, FlagState, OperandSource};
use crate::interp::flags::Form;
use crate::interp::select;
use dynasour_ir::{Cond, GuestTerm, Operand};

impl Lowerer<'_> {
    /// Lowers the terminator.
    pub(super) fn term(&mut self, term: &GuestTerm) -> Result<End, LowerError> {
        if let GuestTerm::Branch { cond, taken, fall } = *term {
            self.branch(cond, self.jump_flags(taken))?;
            return Ok(End::Branch(taken, fall));
        }
        self.record_current_flags();
        let end = match *term {
            GuestTerm::Goto(Operand::Const(to)) => End::Goto(to),
            GuestTerm::Call { target: Operand::Const(to), .. } => End::Call(to),
            GuestTerm::Goto(target) => self.indirect(target, End::Indirect)?,
            GuestTerm::Call { target, .. } => self.indirect(target, End::CallIndirect)?,
            GuestTerm::Ret(target) => self.indirect(target, End::Ret)?,
            GuestTerm::Syscall { next } => End::Syscall(next),
            GuestTerm::Special { pc } => End::Special(pc),
            GuestTerm::Trap { pc, trap } => End::Trap(pc, trap),
            GuestTerm::Branch { .. } => return Err(LowerError::NotBase),
        };
        match end {
            End::Goto(to) => self.emit(code::end, self.jump_flags(to), 0, 0, 0, 0),
            End::Call(_) => self.emit(code::end, CALL_FLAGS, 0, 0, 0, 0),
            End::Syscall(_) | End::Special(_) | End::Trap(..) => {
                self.emit(code::end_stop, 0, 0, 0, 0, 0)
            }
            End::Indirect | End::CallIndirect | End::Ret | End::Branch(..) => {}
        }
        Ok(end)
    }

    /// The edge flags of a jump to `target`. The target of a backward jump is a trace head.
    fn jump_flags(&self, target: u64) -> u16 {
        if target <= self.pc { code::ANY_EDGE | code::HEAD_EDGE } else { code::ANY_EDGE }
    }

    /// Emits the end of a block whose target is a value.
    fn indirect(&mut self, target: Operand, end: End) -> Result<End, LowerError> {
        let a = self.slot(target)?;
        let flags = if end == End::CallIndirect { CALL_FLAGS } else { code::ANY_EDGE };
        self.emit(code::end_indirect, flags, a, 0, 0, 0);
        Ok(end)
    }

    /// Writes the guest's flags to the record, unless they are there.
    fn record_current_flags(&mut self) {
        let state = self.work.descs[self.current_flags].state;
        match state {
            FlagState::Record => {}
            FlagState::Known(kind, [OperandSource::Slot(a), b, _])
                if !matches!(kind.form(), Form::Host(_)) =>
            {
                match b {
                    OperandSource::Slot(b) => {
                        self.emit(code::record::<(), false>, 0, a, b, kind.0, 0)
                    }
                    OperandSource::Const(b) => {
                        self.emit(code::record::<(), true>, 0, a, 0, kind.0, b)
                    }
                }
            }
            FlagState::Known(..) => self.emit_state(code::record_state, 0, 0, state),
        }
    }

    /// Emits a conditional branch. `taken` are the flags of the edge that is followed if `cond`
    /// holds.
    fn branch(&mut self, cond: Operand, taken: u16) -> Result<(), LowerError> {
        let end = self.end();
        let i1 = match cond {
            Operand::Value(v) => match self.work.vals.get(v.index()) {
                Some(Val::Cond(cond, desc)) => {
                    let (cond, desc) = (*cond, *desc);
                    if self.fused_branch(cond, desc, taken)? {
                        return Ok(());
                    }
                    self.decide(end, cond, desc, None)?
                }
                _ => self.slot(cond)?,
            },
            Operand::Const(_) => self.slot(cond)?,
        };
        self.record_current_flags();
        self.emit(code::branch, taken, i1, 0, 0, 0);
        Ok(())
    }

    /// Emits a branch that compares and records the guest's flags in one operation, if there is
    /// such an operation. It must read the words of the flags' description; constants must fit in
    /// 32 bits, because two of them share `imm`.
    fn fused_branch(&mut self, cond: Cond, desc: usize, taken: u16) -> Result<bool, LowerError> {
        let (current, state) =
            (self.work.descs[self.current_flags].state, self.work.descs[desc].state);
        let FlagState::Known(kind, [flags_a, flags_b, _]) = current else { return Ok(false) };
        if current != state || matches!(kind.form(), Form::Host(_) | Form::Bits) {
            return Ok(false);
        }
        let Decision::Compare(Compare { op, swapped, ty, a, b }) = Self::decision(cond, state)
        else {
            return Ok(false);
        };
        let OperandSource::Slot(slot) = a else { return Ok(false) };
        if a != flags_a {
            return Ok(false);
        }
        let fits = |source: OperandSource| match source {
            OperandSource::Const(c) => i32::try_from(ty.sext(c)).ok(),
            OperandSource::Slot(_) => None,
        };
        match b {
            OperandSource::Slot(b) if flags_b == OperandSource::Slot(b) => {
                let run = select::branch(op, swapped, ty, false);
                self.emit(run, taken, slot, b, kind.0, 0);
            }
            _ => {
                let (Some(compared), Some(recorded)) = (fits(b), fits(flags_b)) else {
                    return Ok(false);
                };
                let imm = (recorded as u32 as u64) << 32 | u64::from(compared as u32);
                self.emit(select::branch(op, swapped, ty, true), taken, slot, 0, kind.0, imm);
            }
        }
        Ok(true)
    }
}
