//! Selection of conditions, guards and flags.
//!
//! A `flags.OP` value is re-executed where somebody looks: [`Lower::host_flags`] leaves it in the host's flags,
//! right before its consumer. Only parameters, flags of original instructions, and values that are passed along edges
//! live in registers, in packed form.

use crate::lower::{Def, Lower, LowerError, anchor_of};
use crate::mach::{Kind, Opnd, Ops, SiteKind, preg};
use crate::record::pack_flags;
use crate::x86::{self, Alu, Shift, Size};
use dynasour_ir::semantics::{AF, ARITH_FLAGS, CF, OF, PF, SF, ZF};
use dynasour_ir::{Cond, FlagOp, Gpr, Inst, Op, Operand, Ty, Value};
use iced_x86::Code;
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
        match self.resolve(inst.args[0]) {
            Operand::Const(0) => {
                let site = self.site(SiteKind::Guard, anchor);
                self.emit(Kind::Always, Ops::new(), Some(site));
            }
            Operand::Const(_) => {}
            predicate => {
                self.may_place = true;
                let cond = self.condition(predicate);
                self.may_place = false;
                let cond = cond?;
                let site = self.site(SiteKind::Guard, anchor);
                self.emit(Kind::Jcc(cond.negate() as u8), Ops::new(), Some(site));
            }
        }
        Ok(())
    }

    /// Sets the host's flags such that the returned condition is the truth value `o`, which is not a constant.
    pub fn condition(&mut self, o: Operand) -> Result<Cond, LowerError> {
        let outer = self.may_fuse;
        let result = self.condition_inner(o);
        self.may_fuse = outer;
        result
    }

    fn condition_inner(&mut self, o: Operand) -> Result<Cond, LowerError> {
        if let Some(v) = o.as_value()
            && self.vregs[v.index()].is_none()
            && let Some(inst) = self.inst_of(v)
        {
            self.may_fuse &= self.hot_uses[v.index()] <= 1;
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
                    if inst.ty == Ty::I1 && inst.args[1] == Operand::Const(1) && inst.args[0].as_value().is_some() =>
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
        let ops = if a == b { smallvec![RaOperand::reg_use(a), RaOperand::reg_use(b)] } else { ops };
        self.x86(x86::TEST[size as usize], &[Opnd::Op(0, size), Opnd::Op(1, size)], ops);
    }

    /// Places a demanded value's own instruction *here* instead of at its definition, so that its flags serve too: the
    /// `dec` of `dec; jnz`, the `add` whose flags a trace end needs. Possible if nothing in between reads the value
    /// or may leave the fragment, for a record would want it.
    fn place_here(&mut self, d: Value) -> Result<bool, LowerError> {
        let (Some(r), Def::Inst(block, index)) = (self.vregs[d.index()], self.defs[d.index()]) else {
            return Ok(false);
        };
        let (block, index) = (block as usize, index as usize);
        if !self.may_place || block != self.block || index >= self.pos || self.placed[d.index()] || self.is_pinned(d) {
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
                // What nobody demanded yet, nobody in between can demand.
                match between.def() {
                    Some(v) if between.op.is_pure() && self.vregs[v.index()].is_none() && !self.forced[v.index()] => {
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
        let (a, b) = match self.resolve(inst.args[0]).as_const() {
            Some(_) if matches!(inst.op, Op::Add | Op::And | Op::Or | Op::Xor) => (inst.args[1], inst.args[0]),
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
            match self.resolve(b).as_const() {
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
        match self.available.get(&(op, ty, SmallVec::from_slice(args))) {
            Some(&d) => self.place_here(d),
            None => Ok(false),
        }
    }

    /// The value whose instruction also makes these flags.
    fn place_for_flags(&mut self, op: FlagOp, ty: Ty, args: &[Operand]) -> Result<bool, LowerError> {
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
        if self.resolve(a).as_const().is_some() && self.resolve(b).as_const().is_none() {
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
        if let (true, Some(c)) = (equality, self.resolve(b).as_const())
            && self.place_result(Op::Add, ty, &[a, Operand::Const(c.wrapping_neg() & ty.mask())])?
        {
            return Ok(cond);
        }
        if self.resolve(b) == Operand::Const(0) && (equality || matches!(cond, Cond::L | Cond::Ge)) {
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
                && let Some(Inst { op: Op::And, ty: and_ty, args, .. }) = self.inst_of(v)
                && *and_ty == ty
            {
                let (x, y) = (args[0], args[1]);
                self.may_fuse &= self.hot_uses[v.index()] <= 1;
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
    fn compare_operands(&mut self, ty: Ty, a: Operand, b: Operand) -> Result<(), LowerError> {
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
            let left = self.swallow(load, &mut ops)?;
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
    fn test_operands(&mut self, ty: Ty, a: Operand, b: Operand) -> Result<(), LowerError> {
        let (a, b) = if self.resolve(a).as_const().is_some() { (b, a) } else { (a, b) };
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
            && let Some(Inst { op: Op::Flags(op), ty, args, .. }) = self.inst_of(v)
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
                && let Some(&result) = self.available.get(&(op, *ty, args))
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
        match self.defs[v.index()] {
            Def::Inst(b, i) if b as usize == self.block => (i as usize) < self.pos,
            Def::Inst(0, _) => true,
            _ => false,
        }
    }

    /// Leaves the flags value `f` in the host's flags, at least the bits of `mask`.
    pub fn host_flags(&mut self, f: Operand, mask: u64) -> Result<(), LowerError> {
        let v = match f {
            Operand::Const(image) => {
                let packed = self.constant(pack_flags(image));
                self.restore_flags(packed);
                return Ok(());
            }
            Operand::Value(v) => v,
        };
        if let Some(inst) = self.inst_of(v)
            && let Op::Flags(op) = inst.op
            && !self.forced[v.index()]
            && !matches!(op, FlagOp::FromBits | FlagOp::SetCf)
        {
            let outer = self.may_fuse;
            self.may_fuse &= self.hot_uses[v.index()] <= 1 && self.vregs[v.index()].is_none();
            let result = self.execute_flags(op, inst.ty, &inst.args, mask);
            self.may_fuse = outer;
            return result;
        }
        if self.still_live(v) {
            return Ok(());
        }
        let packed = self.demand(v)?;
        self.restore_flags(packed);
        Ok(())
    }

    /// Are these the flags of an original instruction that nothing emitted since has destroyed?
    fn still_live(&self, v: Value) -> bool {
        let Def::Inst(b, i) = self.defs[v.index()] else { return false };
        let block = &self.v.blocks[self.block];
        b as usize == self.block
            && block.insts[i as usize].op == Op::Native
            && self.cur.iter().all(|m| matches!(m.kind, Kind::Const(_)))
            && block.insts[i as usize + 1..self.pos].iter().all(|between| {
                between.op.is_pure()
                    && between.def().is_some_and(|d| self.vregs[d.index()].is_none() && !self.forced[d.index()])
            })
    }

    /// Executes the instruction whose flags are wanted, on scratch registers.
    fn execute_flags(&mut self, op: FlagOp, ty: Ty, args: &[Operand], mask: u64) -> Result<(), LowerError> {
        let count = args.get(1).and_then(|c| self.resolve(*c).as_const());
        let count = count.map(|c| c & if ty == Ty::I64 { 63 } else { 31 });
        // The flags that the instruction sets whatever they were before.
        let set = match op {
            FlagOp::Inc | FlagOp::Dec => ARITH_FLAGS & !CF,
            FlagOp::Shl | FlagOp::Shr | FlagOp::Sar => match count {
                Some(0) | None => 0,
                Some(1) => ARITH_FLAGS & !AF,
                Some(n) if n < u64::from(ty.bits()) => CF | ZF | SF | PF,
                Some(_) => ZF | SF | PF,
            },
            FlagOp::Rol | FlagOp::Ror => match count {
                Some(0) | None => 0,
                Some(1) => CF | OF,
                Some(_) => CF,
            },
            FlagOp::Bt => CF,
            FlagOp::Bsf | FlagOp::Bsr => ZF,
            FlagOp::Tzcnt | FlagOp::Lzcnt => CF | ZF,
            FlagOp::MulS | FlagOp::MulU => CF | OF,
            _ => ARITH_FLAGS,
        };
        if mask & !set != 0 {
            self.may_place = false;
            // Ask for the operands first: computing one between here and the old flags would destroy those.
            for (i, arg) in args.iter().enumerate() {
                if Some(i) != op.old_operand() && arg.as_value().is_some() {
                    self.reg(*arg)?;
                }
            }
            match op.old_operand() {
                Some(i) => self.host_flags(args[i], mask & !set | if set == 0 { mask } else { 0 })?,
                None => self.host_flags(Operand::Const(0), ARITH_FLAGS)?,
            }
            // What follows must be the very instruction: its operands are registers by now.
        }
        if self.place_for_flags(op, ty, args)? {
            return Ok(());
        }
        let size = Size::of(ty);
        let alu = |op| move |l: &mut Self| l.flags_alu(op, ty, args[0], args[1]);
        match op {
            FlagOp::Add => alu(Alu::Add)(self),
            FlagOp::Sub => self.compare_operands(ty, args[0], args[1]),
            FlagOp::And => self.test_operands(ty, args[0], args[1]),
            FlagOp::Or => alu(Alu::Or)(self),
            FlagOp::Xor => alu(Alu::Xor)(self),
            FlagOp::Adc | FlagOp::Sbb => {
                let carry = self.reg(args[2])?;
                let a = self.reg(args[0])?;
                let b = self.reg(args[1])?;
                self.carry_from(carry);
                let t = self.fresh();
                let alu = if op == FlagOp::Adc { Alu::Adc } else { Alu::Sbb };
                let ops = smallvec![Self::reuse(t, 1), RaOperand::reg_use(a), RaOperand::any_use(b)];
                self.x86(x86::alu_r_rm(alu, size), &[Opnd::Op(0, size), Opnd::Op(2, size)], ops);
                Ok(())
            }
            FlagOp::Inc | FlagOp::Dec => {
                let a = self.reg(args[0])?;
                let t = self.fresh();
                let code = if op == FlagOp::Inc { x86::INC } else { x86::DEC };
                let ops = smallvec![Self::reuse(t, 1), RaOperand::reg_use(a)];
                self.x86(code[size as usize], &[Opnd::Op(0, size)], ops);
                Ok(())
            }
            FlagOp::Shl => self.flags_shift(Shift::Shl, size, args, count),
            FlagOp::Shr => self.flags_shift(Shift::Shr, size, args, count),
            FlagOp::Sar => self.flags_shift(Shift::Sar, size, args, count),
            // They are rotations by cl, and those by an immediate above 1 may leave another OF.
            FlagOp::Rol | FlagOp::Ror => {
                let rotate = if op == FlagOp::Rol { Shift::Rol } else { Shift::Ror };
                let count = count.filter(|n| *n <= 1 || mask & OF == 0);
                self.flags_shift(rotate, size, args, count)
            }
            FlagOp::MulS if ty == Ty::I8 => self.flags_widening_multiply(Code::Imul_rm8, ty, args),
            FlagOp::MulS => {
                let (a, b) = (self.reg(args[0])?, self.reg(args[1])?);
                let t = self.fresh();
                let ops = smallvec![Self::reuse(t, 1), RaOperand::reg_use(a), RaOperand::any_use(b)];
                self.x86(x86::IMUL[size as usize], &[Opnd::Op(0, size), Opnd::Op(2, size)], ops);
                Ok(())
            }
            FlagOp::MulU => self.flags_widening_multiply(x86::MUL[size as usize], ty, args),
            FlagOp::Bt => {
                let (size, a, b) = (at_least_16(size), self.exact(args[0], ty)?, self.exact(args[1], ty)?);
                let ops = smallvec![RaOperand::reg_use(a), RaOperand::reg_use(b)];
                self.x86(x86::BT[size as usize], &[Opnd::Op(0, size), Opnd::Op(1, size)], ops);
                Ok(())
            }
            FlagOp::Bsf => self.flags_scan(x86::BSF, ty, args[0]),
            FlagOp::Bsr => self.flags_scan(x86::BSR, ty, args[0]),
            FlagOp::Tzcnt if !self.cpu.bmi1 => Err(LowerError::Unsupported("tzcnt on this processor".into())),
            FlagOp::Tzcnt => self.flags_scan(x86::TZCNT, ty, args[0]),
            FlagOp::Lzcnt if !self.cpu.lzcnt => Err(LowerError::Unsupported("lzcnt on this processor".into())),
            FlagOp::Lzcnt => self.flags_scan(x86::LZCNT, ty, args[0]),
            FlagOp::Popcnt if !self.cpu.popcnt => Err(LowerError::Unsupported("popcnt on this processor".into())),
            FlagOp::Popcnt => self.flags_scan(x86::POPCNT, ty, args[0]),
            FlagOp::FromBits | FlagOp::SetCf => Err(LowerError::Malformed(format!("flags.{} executed", op.name()))),
        }
    }

    fn flags_alu(&mut self, op: Alu, ty: Ty, a: Operand, b: Operand) -> Result<(), LowerError> {
        let size = Size::of(ty);
        let (a, b) = if self.resolve(a).as_const().is_some() { (b, a) } else { (a, b) };
        let a = self.reg(a)?;
        let t = self.fresh();
        let mut ops: Ops = smallvec![Self::reuse(t, 1), RaOperand::reg_use(a)];
        let b = self.src(b, ty, size, &mut ops)?;
        self.x86(alu_code(op, size, &b, false), &[Opnd::Op(0, size), b], ops);
        Ok(())
    }

    fn flags_shift(&mut self, op: Shift, size: Size, args: &[Operand], count: Option<u64>) -> Result<(), LowerError> {
        let a = self.reg(args[0])?;
        let t = self.fresh();
        let mut ops: Ops = smallvec![Self::reuse(t, 1), RaOperand::reg_use(a)];
        match count {
            Some(0) => {}
            Some(n) => self.x86(x86::shift_imm(op, size), &[Opnd::Op(0, size), Opnd::Imm(n as i64)], ops),
            None => {
                let c = self.reg(args[1])?;
                ops.push(RaOperand::reg_fixed_use(c, preg(Gpr::RCX.number())));
                let cl = Opnd::Phys(iced_x86::Register::CL);
                self.x86(x86::shift_cl(op, size), &[Opnd::Op(0, size), cl], ops);
            }
        }
        Ok(())
    }

    /// A widening multiplication: the accumulator by an operand.
    fn flags_widening_multiply(&mut self, code: Code, ty: Ty, args: &[Operand]) -> Result<(), LowerError> {
        let (a, b) = (self.reg(args[0])?, self.reg(args[1])?);
        let (low, high) = (self.fresh(), self.fresh());
        let mut ops: Ops = smallvec![
            RaOperand::reg_use(b),
            RaOperand::reg_fixed_use(a, preg(Gpr::RAX.number())),
            RaOperand::reg_fixed_def(low, preg(Gpr::RAX.number())),
        ];
        if ty != Ty::I8 {
            ops.push(RaOperand::reg_fixed_def(high, preg(Gpr::RDX.number())));
        }
        self.x86(code, &[Opnd::Op(0, Size::of(ty))], ops);
        Ok(())
    }

    fn flags_scan(&mut self, code: [Code; 4], ty: Ty, a: Operand) -> Result<(), LowerError> {
        let size = at_least_16(Size::of(ty));
        let a = self.exact(a, ty)?;
        let t = self.fresh();
        let ops = smallvec![RaOperand::reg_def(t), RaOperand::any_use(a)];
        self.x86(code[size as usize], &[Opnd::Op(0, size), Opnd::Op(1, size)], ops);
        Ok(())
    }

    /// The operand with the bits above an i8 cleared (no flags), for operations that have no 8-bit form.
    fn exact(&mut self, o: Operand, ty: Ty) -> Result<VReg, LowerError> {
        let r = self.reg(o)?;
        Ok(if ty == Ty::I8 { self.extended(r, ty, false) } else { r })
    }

    /// CF := the low bit of a register; ZF stays.
    fn carry_from(&mut self, r: VReg) {
        self.x86(Code::Bt_rm32_imm8, &[Opnd::Op(0, Size::B4), Opnd::Imm(0)], smallvec![RaOperand::reg_use(r)]);
    }

    /// Host flags to their packed form in `d`.
    pub fn capture_flags(&mut self, d: VReg) {
        self.emit(Kind::CaptureFlags, smallvec![RaOperand::reg_fixed_def(d, preg(Gpr::RAX.number()))], None);
    }

    /// The packed form to host flags.
    pub fn restore_flags(&mut self, packed: VReg) {
        let t = self.fresh();
        let rax = preg(Gpr::RAX.number());
        let ops = smallvec![RaOperand::reg_fixed_use(packed, rax), RaOperand::reg_fixed_def(t, rax)];
        self.emit(Kind::RestoreFlags, ops, None);
    }

    /// Computes the packed form of a flags value into `d`, at its definition.
    pub fn packed_flags(&mut self, inst: &Inst, op: FlagOp, d: VReg) -> Result<(), LowerError> {
        match op {
            FlagOp::FromBits => {
                let x = self.reg(inst.args[0])?;
                let (high, of, bit) = (self.fresh(), self.fresh(), self.fresh());
                self.shift_by(Shift::Shl, Size::B4, high, x, 8);
                self.shift_by(Shift::Shr, Size::B4, of, x, 11);
                self.and_imm(bit, of, 1);
                self.binary(Alu::Or, Size::B4, d, high, bit);
            }
            FlagOp::SetCf => {
                let old = match inst.args[0] {
                    Operand::Value(v) => self.demand(v)?,
                    Operand::Const(image) => self.constant(pack_flags(image)),
                };
                let cf = self.reg(inst.args[1])?;
                let cf = self.extended(cf, Ty::I8, false);
                let (high, cleared) = (self.fresh(), self.fresh());
                self.shift_by(Shift::Shl, Size::B4, high, cf, 8);
                self.and_imm(cleared, old, !0x100);
                self.binary(Alu::Or, Size::B4, d, cleared, high);
            }
            _ => {
                self.may_place = true;
                let executed = self.execute_flags(op, inst.ty, &inst.args, ARITH_FLAGS);
                self.may_place = false;
                executed?;
                self.capture_flags(d);
            }
        }
        Ok(())
    }

    /// The rflags image of a flags value into `d`.
    pub fn flag_bits(&mut self, f: Operand, d: VReg) -> Result<(), LowerError> {
        let packed = match f {
            Operand::Const(image) => {
                let ops = smallvec![RaOperand::reg_def(d)];
                self.emit(Kind::Const(image & ARITH_FLAGS), ops, None);
                return Ok(());
            }
            Operand::Value(v) => self.demand(v)?,
        };
        let (high, low, of, bit) = (self.fresh(), self.fresh(), self.fresh(), self.fresh());
        self.shift_by(Shift::Shr, Size::B4, high, packed, 8);
        self.and_imm(low, high, (ARITH_FLAGS & 0xff) as i64);
        self.and_imm(of, packed, 1);
        self.shift_by(Shift::Shl, Size::B4, bit, of, 11);
        self.binary(Alu::Or, Size::B4, d, low, bit);
        Ok(())
    }
}

fn at_least_16(size: Size) -> Size {
    if size == Size::B1 { Size::B2 } else { size }
}

/// The encoding of an arithmetic instruction by its source operand.
pub(crate) fn alu_code(op: Alu, size: Size, source: &Opnd, memory_destination: bool) -> Code {
    match source {
        Opnd::Imm(i) if size != Size::B1 && i8::try_from(*i).is_ok() => x86::alu_rm_imm8(op, size),
        Opnd::Imm(_) => x86::alu_rm_imm(op, size),
        _ if memory_destination => x86::alu_rm_r(op, size),
        _ => x86::alu_r_rm(op, size),
    }
}
