//! Selection of pure integer operations whose results are demanded.
//!
//! No data of its own: methods of the selector ([`super`]), which belongs to one compilation.
//! Example: `add.i64 v1, 8` becomes `lea r, [r1 + 8]` if flags are not wanted from it.

use crate::codegen::lower::bases::is_wide;
use crate::codegen::lower::flags::alu_code;
use crate::codegen::lower::{Lower, LowerError};
use crate::codegen::mach::{Addr, AddrReg, Kind, Opnd, Ops, preg};
use crate::codegen::x86::{self, Alu, LOAD, Shift, Size};
use dynasour_ir::{Gpr, Inst, Op, Operand, Ty};
use iced_x86::{Code, Register};
use regalloc2::{Operand as RaOperand, VReg};
use smallvec::smallvec;

impl Lower<'_> {
    /// Computes `inst` into `d`.
    pub fn operation(&mut self, inst: &Inst, d: VReg) -> Result<(), LowerError> {
        let ty = inst.ty;
        let arg = |i: usize| inst.args[i];
        match inst.op {
            Op::Add => self.add(ty, arg(0), arg(1), d),
            Op::Sub => match self.imm(arg(1), ty) {
                Some(c)
                    if c != i64::from(i32::MIN)
                        && self.survey.resolve(arg(0)).as_const().is_none() =>
                {
                    self.add(ty, arg(0), Operand::Const((-c) as u64 & ty.mask()), d)
                }
                _ => self.alu(Alu::Sub, ty, arg(0), arg(1), d),
            },
            Op::And => self.commutative(Alu::And, ty, arg(0), arg(1), d),
            Op::Or => self.commutative(Alu::Or, ty, arg(0), arg(1), d),
            Op::Xor => self.commutative(Alu::Xor, ty, arg(0), arg(1), d),
            Op::Mul => self.multiply(ty, arg(0), arg(1), d),
            Op::MulHighU => self.multiply_high(false, ty, arg(0), arg(1), d),
            Op::MulHighS => self.multiply_high(true, ty, arg(0), arg(1), d),
            Op::Shl => self.shift(Shift::Shl, ty, arg(0), arg(1), d),
            Op::Shr => self.shift(Shift::Shr, ty, arg(0), arg(1), d),
            Op::Sar => self.shift(Shift::Sar, ty, arg(0), arg(1), d),
            Op::Rol => self.shift(Shift::Rol, ty, arg(0), arg(1), d),
            Op::Ror => self.shift(Shift::Ror, ty, arg(0), arg(1), d),
            Op::Not if ty == Ty::I1 => self.alu(Alu::Xor, Ty::I1, arg(0), Operand::Const(1), d),
            Op::Not => self.unary(x86::NOT[Size::wide(ty) as usize], Size::wide(ty), arg(0), d),
            Op::Neg => self.unary(x86::NEG[Size::wide(ty) as usize], Size::wide(ty), arg(0), d),
            Op::Bswap if ty == Ty::I64 => self.unary(Code::Bswap_r64, Size::B8, arg(0), d),
            Op::Bswap if ty == Ty::I32 => self.unary(Code::Bswap_r32, Size::B4, arg(0), d),
            Op::Bswap => {
                self.shift(Shift::Rol, ty, arg(0), Operand::Const(u64::from(ty.bits() / 2)), d)
            }
            Op::Popcnt => self.count(self.cpu.popcnt, x86::POPCNT, inst, d),
            Op::Clz => self.count(self.cpu.lzcnt, x86::LZCNT, inst, d),
            Op::Ctz => self.count(self.cpu.bmi1, x86::TZCNT, inst, d),
            Op::Zext(from) => self.extend(from, arg(0), false, ty, d),
            Op::Sext(from) => self.extend(from, arg(0), true, ty, d),
            Op::Trunc => {
                let r = self.reg(arg(0))?;
                self.and_imm(d, r, 1);
                Ok(())
            }
            Op::Insert8Low => self.insert(Ty::I8, arg(0), arg(1), d),
            Op::Insert16 => self.insert(Ty::I16, arg(0), arg(1), d),
            Op::Insert8High => {
                let (turned, filled) = (self.fresh(), self.fresh());
                let old = self.reg(arg(0))?;
                self.shift_by(Shift::Ror, Size::B8, turned, old, 8);
                self.insert_register(Ty::I8, turned, arg(1), filled)?;
                self.shift_by(Shift::Rol, Size::B8, d, filled, 8);
                Ok(())
            }
            Op::Eq | Op::Ne | Op::LtS | Op::LtU | Op::LeS | Op::LeU | Op::Cond(_) => {
                self.truth_value(inst, d)
            }
            Op::Select => self.select(ty, arg(0), arg(1), arg(2), d),
            Op::Flags(op) => self.packed_flags(inst, op, d),
            Op::FlagBits => self.flag_bits(arg(0), d),
            Op::Load | Op::Store | Op::Get(_) | Op::Put(_) | Op::At => {
                Err(LowerError::Malformed(format!("{} is not pure", inst.op)))
            }
            Op::Assume | Op::Poll | Op::Print | Op::Read | Op::Native => {
                Err(LowerError::Malformed(format!("{} is not pure", inst.op)))
            }
        }
    }

    /// `d = a op b` on registers.
    pub fn binary(&mut self, op: Alu, size: Size, d: VReg, a: VReg, b: VReg) {
        let ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(a), RaOperand::any_use(b)];
        self.x86(x86::alu_r_rm(op, size), &[Opnd::Op(0, size), Opnd::Op(2, size)], ops);
    }

    /// `d = a & mask` in 32 bits.
    pub fn and_imm(&mut self, d: VReg, a: VReg, mask: i64) {
        let ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(a)];
        let mask = Opnd::Imm(mask);
        self.x86(alu_code(Alu::And, Size::B4, &mask, false), &[Opnd::Op(0, Size::B4), mask], ops);
    }

    /// `d = a shifted by a constant`.
    pub fn shift_by(&mut self, op: Shift, size: Size, d: VReg, a: VReg, count: u8) {
        let ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(a)];
        self.x86(x86::shift_imm(op, size), &[Opnd::Op(0, size), Opnd::Imm(i64::from(count))], ops);
    }

    /// `d = a`; a 32-bit copy clears the upper half, as every 32-bit operation does.
    fn copy(&mut self, ty: Ty, d: VReg, a: VReg) {
        let size = Size::wide(ty);
        let ops = smallvec![RaOperand::reg_def(d), RaOperand::any_use(a)];
        self.x86(LOAD[size as usize], &[Opnd::Op(0, size), Opnd::Op(1, size)], ops);
    }

    /// A narrow register extended to 32 bits, without touching flags.
    pub fn extended(&mut self, r: VReg, ty: Ty, signed: bool) -> VReg {
        let d = self.fresh();
        let code = match (ty.bits(), signed) {
            (16, false) => Code::Movzx_r32_rm16,
            (16, true) => Code::Movsx_r32_rm16,
            (_, false) => Code::Movzx_r32_rm8,
            (_, true) => Code::Movsx_r32_rm8,
        };
        let ops = smallvec![RaOperand::reg_def(d), RaOperand::any_use(r)];
        self.x86(code, &[Opnd::Op(0, Size::B4), Opnd::Op(1, Size::of(ty))], ops);
        d
    }

    /// The operand in a register whose low 32 (or 64) bits are its extension.
    fn widened(&mut self, o: Operand, ty: Ty, signed: bool) -> Result<VReg, LowerError> {
        let r = match self.survey.resolve(o) {
            Operand::Const(c) => {
                return Ok(self.constant(if signed { ty.sext(c) as u64 } else { c & ty.mask() }));
            }
            Operand::Value(v) => self.demand(v)?,
        };
        Ok(if ty.bits() < 32 { self.extended(r, ty, signed) } else { r })
    }

    fn add(&mut self, ty: Ty, a: Operand, b: Operand, d: VReg) -> Result<(), LowerError> {
        let (a, b) = if self.survey.resolve(a).as_const().is_some() { (b, a) } else { (a, b) };
        let size = Size::wide(ty);
        let lea = if size == Size::B8 { Code::Lea_r64_m } else { Code::Lea_r32_m };
        let pinned = self.survey.resolve(a).as_value().is_some_and(|v| self.survey.is_pinned(v));
        if self.add_by_address(ty, a, b, d)? {
            return Ok(());
        }
        if let Some(c) = self.imm(b, ty)
            && self.lives_on(a)
        {
            let mut ops: Ops = smallvec![RaOperand::reg_def(d)];
            let base = if pinned {
                AddrReg::Rsp
            } else {
                let a = self.reg(a)?;
                ops.push(RaOperand::reg_use(a));
                AddrReg::Op(1)
            };
            let addr =
                Addr { base, index: AddrReg::None, scale: 1, disp: c as i32, seg: Register::None };
            self.x86(lea, &[Opnd::Op(0, size), Opnd::Mem(addr)], ops);
            return Ok(());
        }
        let same = Size::of(ty) == size;
        if self.imm(b, ty).is_none()
            && self.lives_on(a)
            && self.lives_on(b)
            && !(same && (self.fusable(a, ty).is_some() || self.fusable(b, ty).is_some()))
        {
            let (a, b) = (self.reg(a)?, self.reg(b)?);
            let ops =
                smallvec![RaOperand::reg_def(d), RaOperand::reg_use(a), RaOperand::reg_use(b)];
            let addr = Addr {
                base: AddrReg::Op(1),
                index: AddrReg::Op(2),
                scale: 1,
                disp: 0,
                seg: Register::None,
            };
            self.x86(lea, &[Opnd::Op(0, size), Opnd::Mem(addr)], ops);
            return Ok(());
        }
        if ty == Ty::I64
            && let Some(c) = self.survey.resolve(b).as_const().filter(|c| is_wide(*c))
            && self.bases.near(c).is_none()
            && let Some((base, distance)) = self.near_base(c.wrapping_neg())
            && distance != i32::MIN
        {
            return self.subtract_base(a, base, distance, d);
        }
        self.commutative(Alu::Add, ty, a, b, d)
    }

    /// `d := a - (base + distance)`
    fn subtract_base(
        &mut self,
        a: Operand,
        base: VReg,
        distance: i32,
        d: VReg,
    ) -> Result<(), LowerError> {
        let mut from = self.reg(a)?;
        if distance != 0 {
            let t = self.fresh();
            self.add_distance(t, from, -distance);
            from = t;
        }
        let ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(from), RaOperand::any_use(base)];
        let base = Opnd::Op(2, Size::B8);
        self.x86(alu_code(Alu::Sub, Size::B8, &base, false), &[Opnd::Op(0, Size::B8), base], ops);
        Ok(())
    }

    /// Selects `lea` where it does the work of several operations: `a + (b << n)`, with a constant
    /// or not.
    fn add_by_address(
        &mut self,
        ty: Ty,
        a: Operand,
        b: Operand,
        d: VReg,
    ) -> Result<bool, LowerError> {
        if !matches!(ty, Ty::I32 | Ty::I64) {
            return Ok(false);
        }
        let scaled = |l: &Self, o: Operand| -> Option<(Operand, u8)> {
            let v =
                l.survey.resolve(o).as_value().filter(|v| {
                    l.vregs[v.index()].is_none() && l.survey.hot_uses[v.index()] == 1
                })?;
            let inst = l.survey.inst_of(v).filter(|i| i.op == Op::Shl && i.ty == ty)?;
            let count =
                l.survey.resolve(inst.args[1]).as_const().filter(|c| (1..=3).contains(c))?;
            let x = l.survey.resolve(inst.args[0]);
            x.as_value().filter(|x| !l.survey.is_pinned(*x)).map(|_| (x, 1 << count))
        };
        let sum = |l: &Self, o: Operand| -> Option<(Operand, Operand)> {
            let v =
                l.survey.resolve(o).as_value().filter(|v| {
                    l.vregs[v.index()].is_none() && l.survey.hot_uses[v.index()] == 1
                })?;
            let inst = l.survey.inst_of(v).filter(|i| i.op == Op::Add && i.ty == ty)?;
            Some((inst.args[0], inst.args[1]))
        };
        // The constant, which may be this addition's or that of one of its operands.
        let (mut a, mut b, mut disp) = (a, b, 0);
        if let Some(c) = self.imm(b, ty) {
            let Some(parts) = sum(self, a) else { return Ok(false) };
            ((a, b), disp) = (parts, c);
        } else if let Some((x, c)) = sum(self, a).or_else(|| sum(self, b))
            && let Some(c) = self.imm(c, ty)
        {
            let other = if sum(self, a).is_some_and(|s| s.0 == x) { b } else { a };
            (a, b, disp) = (x, other, c);
        }
        if scaled(self, b).is_none() {
            (a, b) = (b, a);
        }
        let (index, scale) = match scaled(self, b) {
            Some(found) => found,
            None if disp != 0 => (b, 1),
            None => return Ok(false),
        };
        let is_value = |l: &Self, o: Operand| l.survey.resolve(o).as_value().is_some();
        let (base, index) = (self.survey.resolve(a), self.survey.resolve(index));
        let pinned = |l: &Self, o: Operand| o.as_value().is_some_and(|v| l.survey.is_pinned(v));
        let (base, index) =
            if scale == 1 && pinned(self, index) { (index, base) } else { (base, index) };
        if !is_value(self, base)
            || !is_value(self, index)
            || pinned(self, index)
            || i32::try_from(disp).is_err()
        {
            return Ok(false);
        }
        let mut ops: Ops = smallvec![RaOperand::reg_def(d)];
        let base = if pinned(self, base) {
            AddrReg::Rsp
        } else {
            let r = self.reg(base)?;
            ops.push(RaOperand::reg_use(r));
            AddrReg::Op((ops.len() - 1) as u8)
        };
        let r = self.reg(index)?;
        ops.push(RaOperand::reg_use(r));
        let index = AddrReg::Op((ops.len() - 1) as u8);
        let addr = Addr { base, index, scale, disp: disp as i32, seg: Register::None };
        let (code, size) =
            if ty == Ty::I64 { (Code::Lea_r64_m, Size::B8) } else { (Code::Lea_r32_m, Size::B4) };
        self.x86(code, &[Opnd::Op(0, size), Opnd::Mem(addr)], ops);
        Ok(true)
    }

    /// Puts the operand that is overwritten first: not a constant, not a load, not a value that
    /// later code demands.
    fn commutative(
        &mut self,
        op: Alu,
        ty: Ty,
        a: Operand,
        b: Operand,
        d: VReg,
    ) -> Result<(), LowerError> {
        let swap = self.survey.resolve(a).as_const().is_some()
            || self.fusable(a, ty).is_some()
            || (self.lives_on(a)
                && !self.lives_on(b)
                && self.survey.resolve(b).as_const().is_none()
                && self.fusable(b, ty).is_none());
        let (a, b) = if swap { (b, a) } else { (a, b) };
        self.alu(op, ty, a, b, d)
    }

    fn alu(&mut self, op: Alu, ty: Ty, a: Operand, b: Operand, d: VReg) -> Result<(), LowerError> {
        let size = Size::wide(ty);
        let a = self.reg(a)?;
        let mut ops: Ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(a)];
        let b = self.src(b, ty, size, &mut ops)?;
        self.x86(alu_code(op, size, &b, false), &[Opnd::Op(0, size), b], ops);
        Ok(())
    }

    fn unary(&mut self, code: Code, size: Size, a: Operand, d: VReg) -> Result<(), LowerError> {
        let a = self.reg(a)?;
        self.x86(code, &[Opnd::Op(0, size)], smallvec![Self::reuse(d, 1), RaOperand::reg_use(a)]);
        Ok(())
    }

    fn multiply(&mut self, ty: Ty, a: Operand, b: Operand, d: VReg) -> Result<(), LowerError> {
        let size = Size::wide(ty);
        let (a, b) = if self.survey.resolve(a).as_const().is_some() { (b, a) } else { (a, b) };
        if let Some(i) = self.imm(b, ty) {
            let mut ops: Ops = smallvec![RaOperand::reg_def(d)];
            let source = self.rm(a, ty, size, &mut ops)?;
            let short = i8::try_from(i).is_ok();
            let code = match (size, short) {
                (Size::B8, true) => Code::Imul_r64_rm64_imm8,
                (Size::B8, false) => Code::Imul_r64_rm64_imm32,
                (_, true) => Code::Imul_r32_rm32_imm8,
                (_, false) => Code::Imul_r32_rm32_imm32,
            };
            self.x86(code, &[Opnd::Op(0, size), source, Opnd::Imm(i)], ops);
            return Ok(());
        }
        let swap = self.fusable(a, ty).is_some() || (self.lives_on(a) && !self.lives_on(b));
        let (a, b) = if swap && self.fusable(b, ty).is_none() { (b, a) } else { (a, b) };
        let a = self.reg(a)?;
        let mut ops: Ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(a)];
        let b = self.rm(b, ty, size, &mut ops)?;
        self.x86(x86::IMUL[size as usize], &[Opnd::Op(0, size), b], ops);
        Ok(())
    }

    fn multiply_high(
        &mut self,
        signed: bool,
        ty: Ty,
        a: Operand,
        b: Operand,
        d: VReg,
    ) -> Result<(), LowerError> {
        if ty == Ty::I64 {
            let (a, b) = (self.reg(a)?, self.reg(b)?);
            let low = self.fresh();
            let (rax, rdx) = (preg(Gpr::RAX.number()), preg(Gpr::RDX.number()));
            let ops = smallvec![
                RaOperand::reg_use(b),
                RaOperand::reg_fixed_use(a, rax),
                RaOperand::reg_fixed_def(low, rax),
                RaOperand::reg_fixed_def(d, rdx),
            ];
            let code = if signed { Code::Imul_rm64 } else { Code::Mul_rm64 };
            self.x86(code, &[Opnd::Op(0, Size::B8)], ops);
            return Ok(());
        }
        let wide_to = if ty == Ty::I32 { Size::B8 } else { Size::B4 };
        let mut factor = |o: Operand| -> Result<VReg, LowerError> {
            if ty != Ty::I32 {
                return self.widened(o, ty, signed);
            }
            let r = self.reg(o)?;
            let t = self.fresh();
            let ops = smallvec![RaOperand::reg_def(t), RaOperand::any_use(r)];
            match signed {
                true => self.x86(
                    Code::Movsxd_r64_rm32,
                    &[Opnd::Op(0, Size::B8), Opnd::Op(1, Size::B4)],
                    ops,
                ),
                false => self.x86(
                    Code::Mov_r32_rm32,
                    &[Opnd::Op(0, Size::B4), Opnd::Op(1, Size::B4)],
                    ops,
                ),
            }
            Ok(t)
        };
        let (a, b) = (factor(a)?, factor(b)?);
        let product = self.fresh();
        let ops = smallvec![Self::reuse(product, 1), RaOperand::reg_use(a), RaOperand::any_use(b)];
        self.x86(x86::IMUL[wide_to as usize], &[Opnd::Op(0, wide_to), Opnd::Op(2, wide_to)], ops);
        self.shift_by(Shift::Shr, wide_to, d, product, ty.bits() as u8);
        Ok(())
    }

    fn shift(
        &mut self,
        op: Shift,
        ty: Ty,
        a: Operand,
        count: Operand,
        d: VReg,
    ) -> Result<(), LowerError> {
        let rotate = matches!(op, Shift::Rol | Shift::Ror);
        // Right shifts of narrow values need proper upper bits; rotates are done at the exact size.
        let size = if rotate { Size::of(ty) } else { Size::wide(ty) };
        let keeps = self.lives_on(a);
        let a = match op {
            Shift::Shr => self.widened(a, ty, false)?,
            Shift::Sar => self.widened(a, ty, true)?,
            _ => self.reg(a)?,
        };
        if let Operand::Const(c) = self.survey.resolve(count) {
            let c = match rotate {
                true => (c % u64::from(ty.bits())) as u8,
                false => c as u8 & if ty == Ty::I64 { 63 } else { 31 },
            };
            match c {
                0 => self.copy(ty, d, a),
                1..=3 if op == Shift::Shl && keeps => {
                    let ops = smallvec![RaOperand::reg_def(d), RaOperand::reg_use(a)];
                    let base = if c == 1 { AddrReg::Op(1) } else { AddrReg::None };
                    let scale = if c == 1 { 1 } else { 1 << c };
                    let addr =
                        Addr { base, index: AddrReg::Op(1), scale, disp: 0, seg: Register::None };
                    let code = if size == Size::B8 { Code::Lea_r64_m } else { Code::Lea_r32_m };
                    self.x86(code, &[Opnd::Op(0, size), Opnd::Mem(addr)], ops);
                }
                _ => self.shift_by(op, size, d, a, c),
            }
            return Ok(());
        }
        let c = self.reg(count)?;
        let free = match (op, size) {
            _ if !self.cpu.bmi2 => None,
            (Shift::Shl, Size::B4) => Some(Code::VEX_Shlx_r32_rm32_r32),
            (Shift::Shl, Size::B8) => Some(Code::VEX_Shlx_r64_rm64_r64),
            (Shift::Shr, Size::B4) => Some(Code::VEX_Shrx_r32_rm32_r32),
            (Shift::Shr, Size::B8) => Some(Code::VEX_Shrx_r64_rm64_r64),
            (Shift::Sar, Size::B4) => Some(Code::VEX_Sarx_r32_rm32_r32),
            (Shift::Sar, Size::B8) => Some(Code::VEX_Sarx_r64_rm64_r64),
            _ => None,
        };
        if let Some(code) = free {
            let ops =
                smallvec![RaOperand::reg_def(d), RaOperand::any_use(a), RaOperand::reg_use(c)];
            self.x86(code, &[Opnd::Op(0, size), Opnd::Op(1, size), Opnd::Op(2, size)], ops);
            return Ok(());
        }
        let rcx = RaOperand::reg_fixed_use(c, preg(Gpr::RCX.number()));
        let ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(a), rcx];
        self.x86(x86::shift_cl(op, size), &[Opnd::Op(0, size), Opnd::Phys(Register::CL)], ops);
        Ok(())
    }

    fn count(
        &mut self,
        has: bool,
        code: [Code; 4],
        inst: &Inst,
        d: VReg,
    ) -> Result<(), LowerError> {
        if !has {
            return Err(LowerError::Unsupported(format!("{} on this processor", inst.op)));
        }
        let ty = inst.ty;
        let size = Size::wide(ty);
        let mut a = self.widened(inst.args[0], ty, false)?;
        if inst.op == Op::Ctz && ty.bits() < 32 {
            let bounded = self.fresh();
            let bound = Opnd::Imm(1 << ty.bits());
            let ops = smallvec![Self::reuse(bounded, 1), RaOperand::reg_use(a)];
            self.x86(
                alu_code(Alu::Or, Size::B4, &bound, false),
                &[Opnd::Op(0, Size::B4), bound],
                ops,
            );
            a = bounded;
        }
        let narrow_clz = inst.op == Op::Clz && ty.bits() < 32;
        let result = if narrow_clz { self.fresh() } else { d };
        let ops = smallvec![RaOperand::reg_def(result), RaOperand::any_use(a)];
        self.x86(code[size as usize], &[Opnd::Op(0, size), Opnd::Op(1, size)], ops);
        if narrow_clz {
            let excess = Opnd::Imm(i64::from(32 - ty.bits()));
            let ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(result)];
            self.x86(
                alu_code(Alu::Sub, Size::B4, &excess, false),
                &[Opnd::Op(0, Size::B4), excess],
                ops,
            );
        }
        Ok(())
    }

    fn extend(
        &mut self,
        from: Ty,
        a: Operand,
        signed: bool,
        to: Ty,
        d: VReg,
    ) -> Result<(), LowerError> {
        if let Operand::Const(c) = self.survey.resolve(a) {
            let c = if signed { from.sext(c) as u64 & to.mask() } else { c & from.mask() };
            self.emit(Kind::Const(c), smallvec![RaOperand::reg_def(d)], None);
            return Ok(());
        }
        if from == Ty::I1 && signed {
            let r = self.reg(a)?;
            let bit = self.extended(r, Ty::I8, false);
            let size = Size::wide(to);
            let ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(bit)];
            self.x86(x86::NEG[size as usize], &[Opnd::Op(0, size)], ops);
            return Ok(());
        }
        let wide = Size::wide(to);
        let size = Size::of(from);
        let (code, to_size) = match (signed, size) {
            (false, _) => (LOAD[size as usize], Size::B4),
            (true, Size::B1) if wide == Size::B8 => (Code::Movsx_r64_rm8, wide),
            (true, Size::B2) if wide == Size::B8 => (Code::Movsx_r64_rm16, wide),
            (true, Size::B1) => (Code::Movsx_r32_rm8, wide),
            (true, Size::B2) => (Code::Movsx_r32_rm16, wide),
            (true, _) => (Code::Movsxd_r64_rm32, Size::B8),
        };
        let mut ops: Ops = smallvec![RaOperand::reg_def(d)];
        let source = self.rm(a, from, size, &mut ops)?;
        self.x86(code, &[Opnd::Op(0, to_size), source], ops);
        Ok(())
    }

    fn insert(&mut self, ty: Ty, old: Operand, new: Operand, d: VReg) -> Result<(), LowerError> {
        let old = self.reg(old)?;
        self.insert_register(ty, old, new, d)
    }

    /// `d = old` with its low bits replaced.
    fn insert_register(
        &mut self,
        ty: Ty,
        old: VReg,
        new: Operand,
        d: VReg,
    ) -> Result<(), LowerError> {
        let size = Size::of(ty);
        let mut ops: Ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(old)];
        let new = self.src(new, ty, size, &mut ops)?;
        let code = match (&new, size) {
            (Opnd::Imm(_), _) => x86::STORE_IMM[size as usize],
            (_, Size::B1) => Code::Mov_r8_rm8,
            _ => Code::Mov_r16_rm16,
        };
        self.x86(code, &[Opnd::Op(0, size), new], ops);
        Ok(())
    }

    fn truth_value(&mut self, inst: &Inst, d: VReg) -> Result<(), LowerError> {
        // The value is demanded, yet here it is to be computed: look at the operation, not at the
        // register.
        let v = inst.defs[0];
        let register = self.vregs[v.index()].take();
        let cond = self.condition(v.into());
        self.vregs[v.index()] = register;
        let ops = smallvec![RaOperand::reg_def(d)];
        self.x86(x86::SETCC[cond? as usize], &[Opnd::Op(0, Size::B1)], ops);
        Ok(())
    }

    fn select(
        &mut self,
        ty: Ty,
        c: Operand,
        a: Operand,
        b: Operand,
        d: VReg,
    ) -> Result<(), LowerError> {
        if let Operand::Const(c) = self.survey.resolve(c) {
            let chosen = self.reg(if c != 0 { a } else { b })?;
            self.copy(ty, d, chosen);
            return Ok(());
        }
        if ty == Ty::Flags {
            // Flags are kept in registers in packed form like any value.
            let (a, b) = (self.packed(a)?, self.packed(b)?);
            return self.conditional_move(c, Size::B4, a, b, d);
        }
        let (a, b) = (self.reg(a)?, self.reg(b)?);
        self.conditional_move(c, Size::wide(ty), a, b, d)
    }

    fn packed(&mut self, f: Operand) -> Result<VReg, LowerError> {
        match f {
            Operand::Value(v) => self.demand(v),
            Operand::Const(image) => Ok(self.constant(crate::record::pack_flags(image))),
        }
    }

    fn conditional_move(
        &mut self,
        c: Operand,
        size: Size,
        a: VReg,
        b: VReg,
        d: VReg,
    ) -> Result<(), LowerError> {
        let c = self.survey.resolve(c);
        let cond = self.condition(c)?;
        let code = x86::CMOVCC[usize::from(size == Size::B8)][cond as usize];
        let ops = smallvec![Self::reuse(d, 1), RaOperand::reg_use(b), RaOperand::any_use(a)];
        self.x86(code, &[Opnd::Op(0, size), Opnd::Op(2, size)], ops);
        Ok(())
    }
}
