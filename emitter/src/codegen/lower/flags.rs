//! Selection of flags.
//!
//! A `flags.OP` value is not computed where it is defined. Its operation is executed again right
//! before each consumer: [`Lower::host_flags`] leaves the value in the host's flags there. Only
//! three kinds of flags values live in registers, in packed form: parameters, flags of original
//! instructions, and values that are passed along edges.

use crate::codegen::lower::survey::Def;
use crate::codegen::lower::{Lower, LowerError};
use crate::codegen::mach::{Kind, Opnd, Ops, preg};
use crate::codegen::x86::{self, Alu, Shift, Size};
use crate::record::pack_flags;
use dynasour_ir::semantics::{AF, ARITH_FLAGS, CF, OF, PF, SF, ZF};
use dynasour_ir::{FlagOp, Gpr, Inst, Op, Operand, Ty, Value};
use iced_x86::Code;
use regalloc2::{Operand as RaOperand, VReg};
use smallvec::smallvec;

impl Lower<'_> {
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
        if let Some(inst) = self.survey.inst_of(v)
            && let Op::Flags(op) = inst.op
            && !self.survey.forced[v.index()]
            && !matches!(op, FlagOp::FromBits | FlagOp::SetCf)
        {
            let outer = self.may_fuse;
            self.may_fuse &=
                self.survey.hot_uses[v.index()] <= 1 && self.vregs[v.index()].is_none();
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
        let Def::Inst(b, i) = self.survey.defs[v.index()] else { return false };
        let block = &self.v.blocks[self.block];
        b as usize == self.block
            && block.insts[i as usize].op == Op::Native
            && !self.cur.iter().any(|m| m.destroys_flags())
            && block.insts[i as usize + 1..self.pos].iter().all(|between| {
                between.op.is_pure()
                    && between.def().is_some_and(|d| {
                        self.vregs[d.index()].is_none() && !self.survey.forced[d.index()]
                    })
            })
    }

    /// Executes the instruction whose flags are wanted, on scratch registers.
    fn execute_flags(
        &mut self,
        op: FlagOp,
        ty: Ty,
        args: &[Operand],
        mask: u64,
    ) -> Result<(), LowerError> {
        let count = args.get(1).and_then(|c| self.survey.resolve(*c).as_const());
        let count = count.map(|c| c & if ty == Ty::I64 { 63 } else { 31 });
        let set = flags_set(op, ty, count);
        if mask & !set != 0 {
            self.load_old_flags(op, args, mask & !set | if set == 0 { mask } else { 0 })?;
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
                let ops =
                    smallvec![Self::reuse(t, 1), RaOperand::reg_use(a), RaOperand::any_use(b)];
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
                let ops =
                    smallvec![Self::reuse(t, 1), RaOperand::reg_use(a), RaOperand::any_use(b)];
                self.x86(x86::IMUL[size as usize], &[Opnd::Op(0, size), Opnd::Op(2, size)], ops);
                Ok(())
            }
            FlagOp::MulU => self.flags_widening_multiply(x86::MUL[size as usize], ty, args),
            FlagOp::Bt => {
                let (size, a, b) =
                    (at_least_16(size), self.exact(args[0], ty)?, self.exact(args[1], ty)?);
                let ops = smallvec![RaOperand::reg_use(a), RaOperand::reg_use(b)];
                self.x86(x86::BT[size as usize], &[Opnd::Op(0, size), Opnd::Op(1, size)], ops);
                Ok(())
            }
            FlagOp::Bsf => self.flags_scan(x86::BSF, ty, args[0]),
            FlagOp::Bsr => self.flags_scan(x86::BSR, ty, args[0]),
            FlagOp::Tzcnt if !self.cpu.bmi1 => {
                Err(LowerError::Unsupported("tzcnt on this processor".into()))
            }
            FlagOp::Tzcnt => self.flags_scan(x86::TZCNT, ty, args[0]),
            FlagOp::Lzcnt if !self.cpu.lzcnt => {
                Err(LowerError::Unsupported("lzcnt on this processor".into()))
            }
            FlagOp::Lzcnt => self.flags_scan(x86::LZCNT, ty, args[0]),
            FlagOp::Popcnt if !self.cpu.popcnt => {
                Err(LowerError::Unsupported("popcnt on this processor".into()))
            }
            FlagOp::Popcnt => self.flags_scan(x86::POPCNT, ty, args[0]),
            FlagOp::FromBits | FlagOp::SetCf => {
                Err(LowerError::Malformed(format!("flags.{} executed", op.name())))
            }
        }
    }

    /// Before an instruction that keeps some of the wanted flags: loads the old ones in `wanted`.
    /// The next instruction must be that one: its operands are in registers afterwards.
    fn load_old_flags(
        &mut self,
        op: FlagOp,
        args: &[Operand],
        wanted: u64,
    ) -> Result<(), LowerError> {
        self.may_place = false;
        // Ask for the operands first: computing one between here and the old flags would destroy
        // those.
        for (i, arg) in args.iter().enumerate() {
            if Some(i) != op.old_operand() && arg.as_value().is_some() {
                self.reg(*arg)?;
            }
        }
        match op.old_operand() {
            Some(i) => self.host_flags(args[i], wanted),
            None => self.host_flags(Operand::Const(0), ARITH_FLAGS),
        }
    }

    fn flags_alu(&mut self, op: Alu, ty: Ty, a: Operand, b: Operand) -> Result<(), LowerError> {
        let size = Size::of(ty);
        let (a, b) = if self.survey.resolve(a).as_const().is_some() { (b, a) } else { (a, b) };
        let a = self.reg(a)?;
        let t = self.fresh();
        let mut ops: Ops = smallvec![Self::reuse(t, 1), RaOperand::reg_use(a)];
        let b = self.src(b, ty, size, &mut ops)?;
        self.x86(alu_code(op, size, &b, false), &[Opnd::Op(0, size), b], ops);
        Ok(())
    }

    fn flags_shift(
        &mut self,
        op: Shift,
        size: Size,
        args: &[Operand],
        count: Option<u64>,
    ) -> Result<(), LowerError> {
        let a = self.reg(args[0])?;
        let t = self.fresh();
        let mut ops: Ops = smallvec![Self::reuse(t, 1), RaOperand::reg_use(a)];
        match count {
            Some(0) => {}
            Some(n) => {
                self.x86(x86::shift_imm(op, size), &[Opnd::Op(0, size), Opnd::Imm(n as i64)], ops)
            }
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
    fn flags_widening_multiply(
        &mut self,
        code: Code,
        ty: Ty,
        args: &[Operand],
    ) -> Result<(), LowerError> {
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

    /// The operand with the bits above an i8 cleared (no flags), for operations that have no 8-bit
    /// form.
    fn exact(&mut self, o: Operand, ty: Ty) -> Result<VReg, LowerError> {
        let r = self.reg(o)?;
        Ok(if ty == Ty::I8 { self.extended(r, ty, false) } else { r })
    }

    /// CF := the low bit of a register; ZF stays.
    fn carry_from(&mut self, r: VReg) {
        self.x86(
            Code::Bt_rm32_imm8,
            &[Opnd::Op(0, Size::B4), Opnd::Imm(0)],
            smallvec![RaOperand::reg_use(r)],
        );
    }

    /// Host flags to their packed form in `d`.
    pub fn capture_flags(&mut self, d: VReg) {
        self.emit(
            Kind::CaptureFlags,
            smallvec![RaOperand::reg_fixed_def(d, preg(Gpr::RAX.number()))],
            None,
        );
    }

    /// The packed form to host flags.
    pub fn restore_flags(&mut self, packed: VReg) {
        let t = self.fresh();
        let rax = preg(Gpr::RAX.number());
        let ops =
            smallvec![RaOperand::reg_fixed_use(packed, rax), RaOperand::reg_fixed_def(t, rax)];
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

/// The flags that an operation sets whatever their values were before. A shift or rotation has this
/// masked count, if the count is constant.
fn flags_set(op: FlagOp, ty: Ty, count: Option<u64>) -> u64 {
    match op {
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
    }
}
