//! Lowers flags and conditions. Flags become descriptions; a condition is decided in the cheapest
//! way, which often is one comparison of the words that the description names.
//!
//! Data: the descriptions are in the workspace. A description is valid until its last use
//! (`Desc::until`); until then `protect` keeps its slots unchanged.
//!
//! Example: `cmp eax, ecx; jb l` has the description (`Sub`, i32, eax, ecx). Condition `b` is
//! decided by the unsigned comparison `eax < ecx`.

use super::{Compare, Decision, Desc, LowerError, Lowerer, Val};
use crate::interp::code::{self, FlagState, Handler, OperandSource};
use crate::interp::flags::{Form, Kind, shift_ignores_old};
use crate::interp::select;
use dynasour_ir::{Cond, FlagOp, Inst, Op, Operand, Ty, Value};

impl Lowerer<'_> {
    /// The description of the flags that `operand` is.
    pub(super) fn flag_state(&self, operand: Operand) -> Result<FlagState, LowerError> {
        match operand {
            Operand::Value(v) => match self.work.vals.get(v.index()) {
                Some(Val::Flags(d)) => Ok(self.work.descs[*d].state),
                _ => Err(LowerError::Operand(v.to_string())),
            },
            Operand::Const(_) => Err(LowerError::Operand(operand.to_string())),
        }
    }

    /// Emits an operation that reads the flags described by `state`.
    pub(super) fn emit_state(&mut self, run: Handler, d: u16, c: u16, state: FlagState) {
        self.tables.states.push(Box::new(state));
        let table = self.tables.states.last().map_or(0, |s| std::ptr::from_ref(&**s) as u64);
        self.emit(run, d, 0, 0, c, table);
    }

    /// The rflags image of the flags that `operand` is.
    pub(super) fn flag_bits(&mut self, operand: Operand) -> Result<OperandSource, LowerError> {
        match self.flag_state(operand)? {
            FlagState::Known(kind, [a, _, _]) if kind.form() == Form::Bits => Ok(a),
            state => {
                let t = self.temp()?;
                self.emit_state(code::flag_bits, t, 0, state);
                Ok(OperandSource::Slot(t))
            }
        }
    }

    /// Makes the description of the flags `v`.
    pub(super) fn new_desc(&mut self, v: Value, form: Form, ty: Ty, sources: [OperandSource; 3]) {
        let until = self.work.last_use[v.index()].unwrap_or(0);
        self.work.descs.push(Desc { state: FlagState::Known(Kind::new(form, ty), sources), until });
        self.work.vals[v.index()] = Val::Flags(self.work.descs.len() - 1);
    }

    /// Lowers instruction `i`, which makes flags `v` by `op`.
    pub(super) fn flags(
        &mut self,
        i: usize,
        op: FlagOp,
        inst: &Inst,
        v: Value,
    ) -> Result<(), LowerError> {
        let zero = OperandSource::Const(0);
        let old_carry = |this: &mut Self| -> Result<OperandSource, LowerError> {
            let state = this.flag_state(inst.args[1])?;
            let t = this.temp()?;
            this.emit_state(code::condition, t, Cond::B as u16, state);
            Ok(OperandSource::Slot(t))
        };
        if let Some(result) = self.work.results[i] {
            let r = self.source(result.into())?;
            let (form, b) = match op {
                FlagOp::Add => (Form::AddResult, self.source(inst.args[1])?),
                FlagOp::Sub => (Form::SubResult, self.source(inst.args[1])?),
                FlagOp::Inc => (Form::Inc, old_carry(self)?),
                FlagOp::Dec => (Form::Dec, old_carry(self)?),
                _ => (Form::Logic, zero),
            };
            self.new_desc(v, form, inst.ty, [r, b, zero]);
            return Ok(());
        }
        let mut sources = [zero; 3];
        match op {
            FlagOp::Sub => {
                sources[0] = self.source(inst.args[0])?;
                sources[1] = self.source(inst.args[1])?;
                self.new_desc(v, Form::Sub, inst.ty, sources);
            }
            FlagOp::FromBits => {
                sources[0] = self.source(inst.args[0])?;
                self.new_desc(v, Form::Bits, Ty::I64, sources);
            }
            FlagOp::And if inst.args[0] == inst.args[1] => {
                sources[0] = self.source(inst.args[0])?;
                self.new_desc(v, Form::Logic, inst.ty, sources);
            }
            FlagOp::And => {
                // For `test` the result is computed in a temporary, so that a condition is one
                // comparison with zero.
                let (mut a, mut b) = (self.source(inst.args[0])?, self.source(inst.args[1])?);
                if matches!(a, OperandSource::Const(_)) {
                    std::mem::swap(&mut a, &mut b);
                }
                let a = self.slot_of(a)?;
                let t = self.temp()?;
                let run = select::binary(Op::And, inst.ty, matches!(b, OperandSource::Const(_)));
                let run = run.ok_or_else(|| LowerError::Unsupported(inst.op.to_string()))?;
                let (b, imm) = match b {
                    OperandSource::Slot(s) => (s, 0),
                    OperandSource::Const(c) => (0, c),
                };
                self.emit(run, t, a, b, 0, imm);
                self.new_desc(v, Form::Logic, inst.ty, [OperandSource::Slot(t), zero, zero]);
            }
            _ => {
                let (ty, old) = (inst.ty, op.old_operand());
                for (k, operand) in inst.args.iter().enumerate() {
                    let ignores_old = |count| matches!(count, OperandSource::Const(n) if shift_ignores_old(op, ty, n));
                    sources[k] = if Some(k) != old {
                        self.source(*operand)?
                    } else if k == 2 && ignores_old(sources[1]) {
                        zero
                    } else {
                        self.flag_bits(*operand)?
                    };
                }
                self.new_desc(v, Form::Host(op), inst.ty, sources);
            }
        }
        Ok(())
    }

    /// The cheapest way to decide `cond` of flags in `state`.
    pub(super) fn decision(cond: Cond, state: FlagState) -> Decision {
        let FlagState::Known(kind, [a, b, _]) = state else { return Decision::State };
        let ty = kind.ty();
        let zero = OperandSource::Const(0);
        let compare = |op, swapped, a, b| Decision::Compare(Compare { op, swapped, ty, a, b });
        let on_result = match cond {
            Cond::E => compare(Op::Eq, false, a, zero),
            Cond::Ne => compare(Op::Ne, false, a, zero),
            Cond::S => compare(Op::LtS, false, a, zero),
            Cond::Ns => compare(Op::LeS, true, a, zero),
            _ => Decision::State,
        };
        match kind.form() {
            Form::Sub => match cond {
                Cond::E => compare(Op::Eq, false, a, b),
                Cond::Ne => compare(Op::Ne, false, a, b),
                Cond::B => compare(Op::LtU, false, a, b),
                Cond::Ae => compare(Op::LeU, true, a, b),
                Cond::Be => compare(Op::LeU, false, a, b),
                Cond::A => compare(Op::LtU, true, a, b),
                Cond::L => compare(Op::LtS, false, a, b),
                Cond::Ge => compare(Op::LeS, true, a, b),
                Cond::Le => compare(Op::LeS, false, a, b),
                Cond::G => compare(Op::LtS, true, a, b),
                Cond::S if b == zero => compare(Op::LtS, false, a, zero),
                Cond::Ns if b == zero => compare(Op::LeS, true, a, zero),
                Cond::S | Cond::Ns | Cond::O | Cond::No | Cond::P | Cond::Np => Decision::State,
            },
            Form::Logic => match cond {
                Cond::E | Cond::Be => compare(Op::Eq, false, a, zero),
                Cond::Ne | Cond::A => compare(Op::Ne, false, a, zero),
                Cond::S | Cond::L => compare(Op::LtS, false, a, zero),
                Cond::Ns | Cond::Ge => compare(Op::LeS, true, a, zero),
                Cond::Le => compare(Op::LeS, false, a, zero),
                Cond::G => compare(Op::LtS, true, a, zero),
                Cond::B | Cond::O => Decision::Always(false),
                Cond::Ae | Cond::No => Decision::Always(true),
                Cond::P | Cond::Np => Decision::State,
            },
            Form::AddResult => match cond {
                Cond::B => compare(Op::LtU, false, a, b),
                Cond::Ae => compare(Op::LeU, true, a, b),
                _ => on_result,
            },
            Form::SubResult | Form::Inc | Form::Dec => on_result,
            Form::Bits | Form::Host(_) => Decision::State,
        }
    }

    /// Lowers instruction `i`, which computes the condition `v` of flags. A condition that only the
    /// terminator reads is left to the terminator.
    pub(super) fn cond(
        &mut self,
        i: usize,
        cond: Cond,
        inst: &Inst,
        v: Value,
    ) -> Result<(), LowerError> {
        let Operand::Value(f) = inst.args[0] else {
            return Err(LowerError::Operand(inst.args[0].to_string()));
        };
        let Val::Flags(desc) = self.work.vals[f.index()] else {
            return Err(LowerError::Operand(f.to_string()));
        };
        if self.work.uses[v.index()] == 1 && self.work.last_use[v.index()] == Some(self.end()) {
            self.work.vals[v.index()] = Val::Cond(cond, desc);
            return Ok(());
        }
        self.decide(i, cond, desc, Some(v)).map(|_| ())
    }

    /// Computes a condition into the slot of `v`, or into a temporary; returns the slot.
    pub(super) fn decide(
        &mut self,
        i: usize,
        cond: Cond,
        desc: usize,
        v: Option<Value>,
    ) -> Result<u16, LowerError> {
        let d = match v {
            Some(v) => self.destination(i, v)?,
            None => self.temp()?,
        };
        let state = self.work.descs[desc].state;
        match Self::decision(cond, state) {
            Decision::Always(holds) => self.emit(code::constant, d, 0, 0, 0, u64::from(holds)),
            Decision::State => self.emit_state(code::condition, d, cond as u16, state),
            Decision::Compare(Compare { op, swapped, ty, a, b }) => {
                let run = select::compare(op, swapped, ty, matches!(b, OperandSource::Const(_)));
                let a = self.slot_of(a)?;
                let (b, imm) = match b {
                    OperandSource::Slot(s) => (s, 0),
                    OperandSource::Const(c) => (0, c),
                };
                self.emit(run, d, a, b, 0, imm);
            }
        }
        if let Some(v) = v {
            self.bind(v, d, true);
        }
        Ok(d)
    }
}
