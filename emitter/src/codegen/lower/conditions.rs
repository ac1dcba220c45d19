//! Selection of guards and conditions: which comparison sets the host's flags, and which condition
//! is read then.
//!
//! A comparison may be no instruction of its own. Where a value's own instruction sets the flags
//! that are wanted, that instruction is placed right before the guard instead of at its definition
//! ([`Lower::place_here`]): the `dec` of `dec; jnz`, the `add` whose flags a trace end needs.

use crate::codegen::lower::flags::alu_code;
use crate::codegen::lower::survey::Def;
use crate::codegen::lower::{Lower, LowerError, anchor_of};
use crate::codegen::mach::{Kind, Opnd, Ops, SiteKind};
use crate::codegen::x86::{self, Alu, Shift, Size};
use dynasour_ir::semantics::{CF, OF, PF, SF, ZF};
use dynasour_ir::{Cond, FlagOp, Inst, Op, Operand, Ty, Value};
use regalloc2::{Operand as RaOperand, VReg};
use smallvec::{SmallVec, smallvec};

/// The flags that a condition reads.
pub(crate) const fn flags_read(cond: Cond) -> u64 {
    match cond {
        Cond::O | Cond::No => OF,
        Cond::B | Cond::Ae => CF,
        Cond::E | Cond::Ne => ZF,
        Cond::Be | Cond::A => CF | ZF,
        Cond::S | Cond::Ns => SF,
        Cond::P | Cond::Np => PF,
        Cond::L | Cond::Ge => SF | OF,
        Cond::Le | Cond::G => ZF | SF | OF,
    }
}

impl Lower<'_> {
    /// A guard: leave if the predicate does not hold.
    pub fn guard(&mut self, inst: &Inst) -> Result<(), LowerError> {
        let anchor = anchor_of(inst)?;
        match self.survey.resolve(inst.args[0]) {
            Operand::Const(0) => {
                let site = self.site(SiteKind::Guard, anchor);
                self.emit(Kind::Always, Ops::new(), Some(site));
            }
            Operand::Const(_) => {}
            predicate => {
                let cond = self.predicate(predicate)?;
                let site = self.site(SiteKind::Guard, anchor);
                self.emit(Kind::Jcc(cond.negate() as u8), Ops::new(), Some(site));
            }
        }
        Ok(())
    }

    /// As [`Lower::condition`], for a jump that follows at once.
    pub fn predicate(&mut self, o: Operand) -> Result<Cond, LowerError> {
        self.may_place = true;
        let cond = self.condition(o);
        self.may_place = false;
        cond
    }

    /// Sets the host's flags such that the returned condition is the truth value `o`.
    pub fn condition(&mut self, o: Operand) -> Result<Cond, LowerError> {
        let outer = self.may_fuse;
        let result = self.condition_inner(o);
        self.may_fuse = outer;
        result
    }

    fn condition_inner(&mut self, o: Operand) -> Result<Cond, LowerError> {
        if let Some(v) = o.as_value()
            && self.vregs[v.index()].is_none()
            && let Some(inst) = self.survey.inst_of(v)
        {
            self.may_fuse &= self.survey.hot_uses[v.index()] <= 1;
            match inst.op {
                Op::Eq => return self.compare(Cond::E, inst.ty, inst.args[0], inst.args[1]),
                Op::Ne => return self.compare(Cond::Ne, inst.ty, inst.args[0], inst.args[1]),
                Op::LtS => return self.compare(Cond::L, inst.ty, inst.args[0], inst.args[1]),
                Op::LtU => return self.compare(Cond::B, inst.ty, inst.args[0], inst.args[1]),
                Op::LeS => return self.compare(Cond::Le, inst.ty, inst.args[0], inst.args[1]),
                Op::LeU => return self.compare(Cond::Be, inst.ty, inst.args[0], inst.args[1]),
                Op::Cond(cond) => return self.condition_of_flags(cond, inst.args[0]),
                Op::Not if inst.args[0].as_value().is_some() => {
                    return Ok(self.condition_inner(inst.args[0])?.negate());
                }
                Op::Xor
                    if inst.ty == Ty::I1
                        && inst.args[1] == Operand::Const(1)
                        && inst.args[0].as_value().is_some() =>
                {
                    return Ok(self.condition_inner(inst.args[0])?.negate());
                }
                _ => {}
            }
        }
        let r = self.reg(o)?;
        self.test(r, r, Size::B1);
        Ok(Cond::Ne)
    }

    fn test(&mut self, a: VReg, b: VReg, size: Size) {
        let ops = smallvec![RaOperand::any_use(a), RaOperand::reg_use(b)];
        let ops =
            if a == b { smallvec![RaOperand::reg_use(a), RaOperand::reg_use(b)] } else { ops };
        self.x86(x86::TEST[size as usize], &[Opnd::Op(0, size), Opnd::Op(1, size)], ops);
    }

    /// Places a demanded value's own instruction *here* instead of at its definition, so that its
    /// flags serve too: the `dec` of `dec; jnz`, the `add` whose flags a trace end needs. Possible
    /// if nothing in between reads the value or may leave the fragment, for a record would want it.
    fn place_here(&mut self, d: Value) -> Result<bool, LowerError> {
        let (Some(r), Def::Inst(block, index)) =
            (self.vregs[d.index()], self.survey.defs[d.index()])
        else {
            return Ok(false);
        };
        let (block, index) = (block as usize, index as usize);
        if !self.may_place
            || block != self.block
            || index >= self.pos
            || self.placed[d.index()]
            || self.survey.is_pinned(d)
        {
            return Ok(false);
        }
        let insts = &self.v.blocks[block].insts;
        let inst = &insts[index];
        let shift = match inst.op {
            Op::Add | Op::Sub | Op::And | Op::Or | Op::Xor => None,
            Op::Shl => Some(Shift::Shl),
            Op::Shr => Some(Shift::Shr),
            Op::Sar => Some(Shift::Sar),
            _ => return Ok(false),
        };
        let mut derived: SmallVec<[Value; 4]> = smallvec![d];
        for between in &insts[index + 1..self.pos] {
            if between.anchor.is_some() {
                return Ok(false);
            }
            if between.args.iter().filter_map(|a| a.as_value()).any(|a| derived.contains(&a)) {
                // A value that later code does not demand is demanded by no instruction in between
                // either.
                match between.def() {
                    Some(v)
                        if between.op.is_pure()
                            && self.vregs[v.index()].is_none()
                            && !self.survey.forced[v.index()] =>
                    {
                        derived.push(v);
                    }
                    _ => return Ok(false),
                }
            }
        }
        if self.cur.iter().any(|m| m.site.is_some() || m.ops.iter().any(|o| o.vreg() == r)) {
            return Ok(false);
        }
        let (ty, size) = (inst.ty, Size::of(inst.ty));
        let (a, b) = match self.survey.resolve(inst.args[0]).as_const() {
            Some(_) if matches!(inst.op, Op::Add | Op::And | Op::Or | Op::Xor) => {
                (inst.args[1], inst.args[0])
            }
            Some(_) => return Ok(false),
            None => (inst.args[0], inst.args[1]),
        };
        let alu = match inst.op {
            Op::Add => Alu::Add,
            Op::Sub => Alu::Sub,
            Op::And => Alu::And,
            Op::Or => Alu::Or,
            _ => Alu::Xor,
        };
        if let Some(shift) = shift {
            match self.survey.resolve(b).as_const() {
                Some(n) if n != 0 && n < u64::from(ty.bits()) => {
                    self.placed[d.index()] = true;
                    let a = self.reg(a)?;
                    self.shift_by(shift, size, r, a, n as u8);
                    return Ok(true);
                }
                _ => return Ok(false),
            }
        }
        self.placed[d.index()] = true;
        let a = self.reg(a)?;
        let mut ops: Ops = smallvec![Self::reuse(r, 1), RaOperand::reg_use(a)];
        let b = match self.imm(b, ty) {
            Some(i) => Opnd::Imm(i),
            None => {
                let b = self.reg(b)?;
                ops.push(RaOperand::any_use(b));
                Opnd::Op(2, size)
            }
        };
        self.x86(alu_code(alu, size, &b, false), &[Opnd::Op(0, size), b], ops);
        Ok(true)
    }

    /// Places the value that this operation makes, if there is one.
    fn place_result(&mut self, op: Op, ty: Ty, args: &[Operand]) -> Result<bool, LowerError> {
        match self.survey.available.get(&(op, ty, SmallVec::from_slice(args))) {
            Some(&d) => self.place_here(d),
            None => Ok(false),
        }
    }

    /// The value whose instruction also makes these flags.
    pub fn place_for_flags(
        &mut self,
        op: FlagOp,
        ty: Ty,
        args: &[Operand],
    ) -> Result<bool, LowerError> {
        let key = match op {
            FlagOp::Add => Op::Add,
            FlagOp::Sub => Op::Sub,
            FlagOp::And => Op::And,
            FlagOp::Or => Op::Or,
            FlagOp::Xor => Op::Xor,
            FlagOp::Shl => Op::Shl,
            FlagOp::Shr => Op::Shr,
            FlagOp::Sar => Op::Sar,
            _ => return Ok(false),
        };
        self.place_result(key, ty, &args[..2])
    }

    /// `cmp a, b` (or `test`), returning the condition to read.
    fn compare(&mut self, cond: Cond, ty: Ty, a: Operand, b: Operand) -> Result<Cond, LowerError> {
        let (mut a, mut b, mut cond) = (a, b, cond);
        if self.survey.resolve(a).as_const().is_some()
            && self.survey.resolve(b).as_const().is_none()
        {
            (a, b) = (b, a);
            cond = match cond {
                Cond::L => Cond::G,
                Cond::Le => Cond::Ge,
                Cond::B => Cond::A,
                Cond::Be => Cond::Ae,
                other => other,
            };
        }
        let size = Size::of(ty);
        let equality = matches!(cond, Cond::E | Cond::Ne);
        if self.place_result(Op::Sub, ty, &[a, b])? {
            return Ok(cond);
        }
        if let (true, Some(c)) = (equality, self.survey.resolve(b).as_const())
            && self.place_result(Op::Add, ty, &[a, Operand::Const(c.wrapping_neg() & ty.mask())])?
        {
            return Ok(cond);
        }
        if self.survey.resolve(b) == Operand::Const(0)
            && (equality || matches!(cond, Cond::L | Cond::Ge))
        {
            if let Some(v) = a.as_value()
                && self.v.ty(v) == ty
                && self.place_here(v)?
            {
                return Ok(match cond {
                    Cond::L => Cond::S,
                    Cond::Ge => Cond::Ns,
                    other => other,
                });
            }
            if matches!(cond, Cond::E | Cond::Ne)
                && let Some(v) = a.as_value()
                && self.vregs[v.index()].is_none()
                && let Some(Inst { op: Op::And, ty: and_ty, args, .. }) = self.survey.inst_of(v)
                && *and_ty == ty
            {
                let (x, y) = (args[0], args[1]);
                self.may_fuse &= self.survey.hot_uses[v.index()] <= 1;
                self.test_operands(ty, x, y)?;
                return Ok(cond);
            }
            if self.fusable(a, ty).is_none() {
                let r = self.reg(a)?;
                self.test(r, r, size);
                return Ok(if cond == Cond::L {
                    Cond::S
                } else if cond == Cond::Ge {
                    Cond::Ns
                } else {
                    cond
                });
            }
        }
        self.compare_operands(ty, a, b)?;
        Ok(cond)
    }

    /// `cmp a, b`
    pub fn compare_operands(&mut self, ty: Ty, a: Operand, b: Operand) -> Result<(), LowerError> {
        let size = Size::of(ty);
        let mut ops = Ops::new();
        if let Some(load) = self.fusable(a, ty) {
            let right = match self.imm(b, ty) {
                Some(i) => Opnd::Imm(i),
                None => {
                    let r = self.reg(b)?;
                    ops.push(RaOperand::reg_use(r));
                    Opnd::Op(0, size)
                }
            };
            let left = self.fuse(load, &mut ops)?;
            let code = alu_code(Alu::Cmp, size, &right, true);
            self.x86(code, &[left, right], ops);
            return Ok(());
        }
        let left = self.reg(a)?;
        ops.push(RaOperand::reg_use(left));
        let right = self.src(b, ty, size, &mut ops)?;
        let code = alu_code(Alu::Cmp, size, &right, false);
        self.x86(code, &[Opnd::Op(0, size), right], ops);
        Ok(())
    }

    /// `test a, b`
    pub fn test_operands(&mut self, ty: Ty, a: Operand, b: Operand) -> Result<(), LowerError> {
        let (a, b) = if self.survey.resolve(a).as_const().is_some() { (b, a) } else { (a, b) };
        let size = Size::of(ty);
        let mut ops = Ops::new();
        let right = match self.imm(b, ty) {
            Some(i) => Opnd::Imm(i),
            None => {
                let r = self.reg(b)?;
                ops.push(RaOperand::reg_use(r));
                Opnd::Op(0, size)
            }
        };
        let left = self.rm(a, ty, size, &mut ops)?;
        let code = if matches!(right, Opnd::Imm(_)) { x86::TEST_IMM } else { x86::TEST };
        self.x86(code[size as usize], &[left, right], ops);
        Ok(())
    }

    fn condition_of_flags(&mut self, cond: Cond, flags: Operand) -> Result<Cond, LowerError> {
        if let Some(v) = flags.as_value()
            && let Some(Inst { op: Op::Flags(op), ty, args, .. }) = self.survey.inst_of(v)
            && matches!(cond, Cond::E | Cond::Ne | Cond::S | Cond::Ns)
        {
            let key = match op {
                FlagOp::Add => Some((Op::Add, smallvec![args[0], args[1]])),
                FlagOp::Or => Some((Op::Or, smallvec![args[0], args[1]])),
                FlagOp::Xor => Some((Op::Xor, smallvec![args[0], args[1]])),
                FlagOp::Inc => Some((Op::Add, smallvec![args[0], Operand::Const(1)])),
                FlagOp::Dec => Some((Op::Sub, smallvec![args[0], Operand::Const(1)])),
                _ => None,
            };
            if let Some((op, args)) = key
                && let Some(&result) = self.survey.available.get(&(op, *ty, args))
                && self.is_before(result)
                && !self.placed[result.index()]
            {
                let r = self.demand(result)?;
                self.test(r, r, Size::of(*ty));
                return Ok(cond);
            }
        }
        self.host_flags(flags, flags_read(cond))?;
        Ok(cond)
    }

    /// Is the value defined before the instruction being selected, in this block or the entry?
    pub fn is_before(&self, v: Value) -> bool {
        match self.survey.defs[v.index()] {
            Def::Inst(b, i) if b as usize == self.block => (i as usize) < self.pos,
            Def::Inst(0, _) => true,
            _ => false,
        }
    }
}
