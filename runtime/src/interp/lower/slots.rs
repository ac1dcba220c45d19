//! Allocates slots: where each value of the block lives.
//!
//! A value lives in a temporary or in the slot of a guest register. A value in a register's slot is
//! the register's content at that position, so it needs no operation. Before the register changes,
//! `protect` copies the value to a temporary if it is read later.
//!
//! Invariant: `in_gpr` lists each value that lives in a register's slot.
//!
//! Example: `xchg eax, ecx` gets both registers and puts each in the other. The put of eax first
//! copies the old eax to a temporary, from which the put of ecx reads it.

use super::{AccessSite, Desc, LowerError, Lowerer, Val};
use crate::interp::code::{self, Code, FlagState, Handler, OperandSource};
use dynasour_ir::{Loc, Op, Operand, Value};
use smallvec::SmallVec;

impl Lowerer<'_> {
    /// A new temporary. Temporaries are not used again in the same block.
    pub(super) fn temp(&mut self) -> Result<u16, LowerError> {
        if self.next_temp >= code::TEMPS_END {
            return Err(LowerError::TooLarge);
        }
        self.next_temp += 1;
        Ok(self.next_temp - 1)
    }

    /// Emits an operation that cannot fault.
    pub(super) fn emit(&mut self, run: Handler, d: u16, a: u16, b: u16, c: u16, imm: u64) {
        self.work.code.push(Code { run, imm, d, a, b, c });
    }

    /// Emits an operation that may fault.
    pub(super) fn emit_faulting(&mut self, code: Code) -> Result<(), LowerError> {
        if self.dirty {
            return Err(LowerError::Imprecise(self.pc));
        }
        let site = AccessSite {
            op: self.work.code.len() as u32,
            pc: self.pc,
            flags: self.work.descs[self.current_flags].state,
        };
        self.work.sites.push(site);
        self.work.code.push(code);
        Ok(())
    }

    /// Where the word of `operand` comes from.
    pub(super) fn source(&self, operand: Operand) -> Result<OperandSource, LowerError> {
        match operand {
            Operand::Const(c) => Ok(OperandSource::Const(c)),
            Operand::Value(v) => match self.work.vals.get(v.index()) {
                Some(Val::Slot(s, _)) => Ok(OperandSource::Slot(*s)),
                Some(Val::Const(c)) => Ok(OperandSource::Const(*c)),
                _ => Err(LowerError::Operand(v.to_string())),
            },
        }
    }

    /// A slot that holds the word of `source`.
    pub(super) fn slot_of(&mut self, source: OperandSource) -> Result<u16, LowerError> {
        match source {
            OperandSource::Slot(s) => Ok(s),
            OperandSource::Const(0) => Ok(code::ZERO),
            OperandSource::Const(c) => {
                let t = self.temp()?;
                self.emit(code::constant, t, 0, 0, 0, c);
                Ok(t)
            }
        }
    }

    /// A slot that holds the word of `operand`.
    pub(super) fn slot(&mut self, operand: Operand) -> Result<u16, LowerError> {
        let source = self.source(operand)?;
        self.slot_of(source)
    }

    /// Are the bits of the word of `operand` above its type zero?
    pub(super) fn is_clean(&self, operand: Operand) -> bool {
        match operand {
            Operand::Const(_) => true,
            Operand::Value(v) => {
                matches!(self.work.vals[v.index()], Val::Slot(_, true) | Val::Const(_))
            }
        }
    }

    /// Makes `v` live in `slot` from now on.
    pub(super) fn bind(&mut self, v: Value, slot: u16, clean: bool) {
        self.work.vals[v.index()] = Val::Slot(slot, clean);
        if slot < 16 && !self.work.in_gpr[slot as usize].contains(&v) {
            self.work.in_gpr[slot as usize].push(v);
        }
    }

    /// To be called before register `g` is overwritten at position `at`. If a value or a
    /// description in its slot is read after `at`, copies the slot to a temporary, in which they
    /// live then.
    pub(super) fn protect(&mut self, g: u16, at: usize) -> Result<(), LowerError> {
        let reads_slot = |d: &Desc| {
            d.until > at
                && matches!(d.state, FlagState::Known(_, s) if s.contains(&OperandSource::Slot(g)))
        };
        let values = self.work.in_gpr[g as usize].drain(..);
        let last_use = &self.work.last_use;
        let live: SmallVec<[Value; 8]> =
            values.filter(|v| last_use[v.index()].is_some_and(|u| u > at)).collect();
        if live.is_empty() && !self.work.descs.iter().any(reads_slot) {
            return Ok(());
        }
        let t = self.temp()?;
        self.emit(code::zext::<u64>, t, g, 0, 0, 0);
        for v in live {
            if let Val::Slot(_, clean) = self.work.vals[v.index()] {
                self.work.vals[v.index()] = Val::Slot(t, clean);
            }
        }
        for d in self.work.descs.iter_mut().filter(|d| reads_slot(d)) {
            if let FlagState::Known(_, sources) = &mut d.state {
                sources
                    .iter_mut()
                    .filter(|s| **s == OperandSource::Slot(g))
                    .for_each(|s| *s = OperandSource::Slot(t));
            }
        }
        Ok(())
    }

    /// The register in whose slot the result `v` of position `i` can be computed, because the same
    /// guest instruction puts `v` there. None if an operation between the two may fault, or reads
    /// or writes the register.
    fn put_register(&self, i: usize, v: Value) -> Option<u16> {
        let mut same: SmallVec<[Value; 4]> = SmallVec::from_slice(&[v]);
        let mut read = 0u16;
        let mut written = 0u16;
        for inst in &self.insts[i + 1..] {
            match inst.op {
                Op::At | Op::Load | Op::Store | Op::Native => return None,
                Op::Get(Loc::Gpr(g)) => read |= 1 << g.number(),
                Op::Zext(_) if matches!(inst.args[0], Operand::Value(a) if same.contains(&a)) => {
                    same.extend(inst.def())
                }
                Op::Put(Loc::Gpr(g)) => {
                    if matches!(inst.args[0], Operand::Value(a) if same.contains(&a)) {
                        let bit = 1 << g.number();
                        return ((read | written) & bit == 0).then_some(g.number() as u16);
                    }
                    written |= 1 << g.number();
                }
                _ => {}
            }
        }
        None
    }

    /// The slot for the result `v` of position `i`: a register's or a temporary. Handlers write
    /// results zero-extended, so the value is clean.
    pub(super) fn destination(&mut self, i: usize, v: Value) -> Result<u16, LowerError> {
        let slot = match self.put_register(i, v) {
            Some(g) => {
                self.protect(g, i)?;
                g
            }
            None => self.temp()?,
        };
        Ok(slot)
    }
}
