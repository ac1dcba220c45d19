//! Finds where each value is read, in one walk from the end of the block back, before any operation
//! is emitted. A value without a read is not computed. Flags that are overwritten before any use
//! get no description.
//!
//! Data: `last_use`, `uses` and `results` in the workspace. Invariant: at position `i` of the walk
//! they are complete for all values that are defined at or after `i`.
//!
//! Example: `add eax, 1; cmp eax, ecx; je l`. The put of the flags of `cmp` comes first in the
//! walk, so the flags of `add` have no use and get no description.

use super::{LowerError, Lowerer, can_fault};
use dynasour_ir::{FlagOp, GuestTerm, Inst, Loc, Op, Operand, Term, Value, Version};

impl Lowerer<'_> {
    /// The position of the terminator.
    pub(super) fn end(&self) -> usize {
        self.insts.len()
    }

    /// Notes that the instruction at position `at` reads `operand`.
    fn mark(&mut self, operand: Operand, at: usize) -> Result<(), LowerError> {
        if let Operand::Value(v) = operand {
            let slot = self
                .work
                .last_use
                .get_mut(v.index())
                .ok_or_else(|| LowerError::Operand(v.to_string()))?;
            *slot = Some(slot.map_or(at, |u| u.max(at)));
            self.work.uses[v.index()] += 1;
        }
        Ok(())
    }

    /// Finds the uses of all values. Flags that are overwritten before any use have no use, and do
    /// not count as a use of their operands.
    pub(super) fn find_uses(&mut self, term: &GuestTerm) -> Result<(), LowerError> {
        let end = self.end();
        for operand in Version::term_operands(&Term::Guest(term.clone())) {
            self.mark(operand, end)?;
        }
        let mut flags_seen = true;
        for i in (0..end).rev() {
            let inst = &self.insts[i];
            match inst.op {
                Op::Put(Loc::Flags) => {
                    if flags_seen {
                        self.mark(inst.args[0], i)?;
                    }
                    flags_seen = false;
                    continue;
                }
                Op::Flags(op) => {
                    if self.used(inst) {
                        let result = self.cheap_result(i);
                        self.work.results[i] = result;
                        match result {
                            Some(_) if matches!(op, FlagOp::And | FlagOp::Or | FlagOp::Xor) => {}
                            Some(_) => self.mark(inst.args[1], i)?,
                            None => inst.args.iter().try_for_each(|a| self.mark(*a, i))?,
                        }
                        if let Some(result) = result {
                            self.mark(result.into(), i)?;
                        }
                    }
                    continue;
                }
                // A condition that only the terminator reads is decided there.
                Op::Cond(_) if self.used(inst) => {
                    let only_end = inst.def().is_some_and(|v| {
                        self.work.uses[v.index()] == 1 && self.work.last_use[v.index()] == Some(end)
                    });
                    self.mark(inst.args[0], if only_end { end } else { i })?;
                    continue;
                }
                _ => {}
            }
            let wanted = !inst.op.is_pure() && !matches!(inst.op, Op::Get(_)) || self.used(inst);
            if wanted {
                inst.args.iter().try_for_each(|a| self.mark(*a, i))?;
            }
            if self.sees_flags(inst) {
                flags_seen = true;
            }
        }
        Ok(())
    }

    /// Is a result of `inst` read?
    fn used(&self, inst: &Inst) -> bool {
        inst.defs.iter().any(|v| self.work.last_use[v.index()].is_some())
    }

    /// Are the guest's current flags needed at `inst`: because it reads them, or because it may
    /// fault?
    fn sees_flags(&self, inst: &Inst) -> bool {
        can_fault(inst) || inst.op == Op::Get(Loc::Flags) && self.used(inst)
    }

    /// The result of the same guest instruction from which the flags that are made at `i` follow
    /// cheaply. None if no such operation comes before `i`, or its result is not read.
    fn cheap_result(&self, i: usize) -> Option<Value> {
        let inst = &self.insts[i];
        let Op::Flags(flag_op) = inst.op else { return None };
        let (op, b) = match flag_op {
            FlagOp::Add => (Op::Add, inst.args[1]),
            FlagOp::Sub => (Op::Sub, inst.args[1]),
            FlagOp::And => (Op::And, inst.args[1]),
            FlagOp::Or => (Op::Or, inst.args[1]),
            FlagOp::Xor => (Op::Xor, inst.args[1]),
            FlagOp::Inc => (Op::Add, Operand::Const(1)),
            FlagOp::Dec => (Op::Sub, Operand::Const(1)),
            _ => return None,
        };
        let same = |k: &&Inst| k.op == op && k.ty == inst.ty && k.args[..] == [inst.args[0], b];
        let found =
            self.insts[..i].iter().rev().take_while(|k| k.op != Op::At).find(same)?.def()?;
        // If only the flags would read the result, describing them by the operands is cheaper.
        self.work.last_use[found.index()].is_some().then_some(found)
    }

    /// The last position at which flags that are put at `i` may be needed.
    pub(super) fn observed_until(&self, i: usize) -> usize {
        let mut last = i;
        for (k, inst) in self.insts.iter().enumerate().skip(i + 1) {
            if inst.op == Op::Put(Loc::Flags) {
                return last;
            }
            if self.sees_flags(inst) {
                last = k;
            }
        }
        self.end()
    }
}
