//! The integer instructions that are modelled as IR operations: moves, arithmetic, shifts,
//! multiplication, bits, conditions. Stack and control transfer are in `control`.
//!
//! Order within an instruction: all loads, then all stores, then all `put`s. So an instruction that
//! faults has changed nothing.

use super::class::is_nop;
use super::host;
use super::operand::{Address, Destination, Emit, ZERO, gpr};
use dynasour_ir::semantics::{ARITH_FLAGS, PF};
use dynasour_ir::{Cond, FlagOp, Gpr, Loc, Op, Operand, Ty, hostflags};
use iced_x86::{Code, ConditionCode, Mnemonic as M, Register};

/// SF, ZF, AF, PF, CF: the flags that lahf and sahf move.
const LAHF_FLAGS: u64 = 0xd5;
const OVERFLOW: u64 = 1 << 11;

/// What a two-operand arithmetic instruction does with its result: store it, or only set flags.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    Result,
    FlagsOnly,
}

/// The bit instructions beside `bt` itself.
#[derive(Clone, Copy)]
enum BitChange {
    None,
    Set,
    Reset,
    Complement,
}

impl Emit<'_, '_> {
    /// Emits the instruction if it belongs to this file; false if it does not.
    pub fn integer(&mut self) -> bool {
        match self.inst.mnemonic() {
            m if is_nop(m) => {}
            M::Mov => {
                let ty = self.ty(0);
                let v = self.read(1, ty);
                self.write(0, ty, v);
            }
            M::Movzx | M::Movsx | M::Movsxd => self.extend(),
            M::Movbe => {
                let ty = self.ty(0);
                let v = self.read(1, ty);
                let swapped = match ty {
                    Ty::I16 => self.b.binary(Op::Rol, ty, v, Operand::Const(8)),
                    _ => self.b.pure(Op::Bswap, ty, &[v]),
                };
                self.write(0, ty, swapped);
            }
            M::Xlatb => {
                let v = self.read(0, Ty::I8);
                self.write_reg(Register::AL, v);
            }
            M::Lea => {
                let ty = self.ty(0);
                let v = self.effective_address(ty);
                self.write(0, ty, v);
            }
            M::Add => self.arithmetic(Op::Add, FlagOp::Add, Keep::Result),
            M::Sub => self.arithmetic(Op::Sub, FlagOp::Sub, Keep::Result),
            M::And => self.arithmetic(Op::And, FlagOp::And, Keep::Result),
            M::Or => self.arithmetic(Op::Or, FlagOp::Or, Keep::Result),
            M::Xor => self.arithmetic(Op::Xor, FlagOp::Xor, Keep::Result),
            M::Cmp => self.arithmetic(Op::Sub, FlagOp::Sub, Keep::FlagsOnly),
            M::Test => self.arithmetic(Op::And, FlagOp::And, Keep::FlagsOnly),
            M::Adc => self.with_carry(Op::Add, FlagOp::Adc),
            M::Sbb => self.with_carry(Op::Sub, FlagOp::Sbb),
            M::Inc => self.step(Op::Add, FlagOp::Inc),
            M::Dec => self.step(Op::Sub, FlagOp::Dec),
            M::Neg => self.unary(|e, ty, a| {
                (e.b.pure(Op::Neg, ty, &[a]), Some(e.b.flags(FlagOp::Sub, ty, &[ZERO, a])))
            }),
            M::Not => self.unary(|e, ty, a| (e.b.pure(Op::Not, ty, &[a]), None)),
            M::Shl | M::Sal => self.shift(Op::Shl, FlagOp::Shl),
            M::Shr => self.shift(Op::Shr, FlagOp::Shr),
            M::Sar => self.shift(Op::Sar, FlagOp::Sar),
            M::Rol => self.rotate(Op::Rol, FlagOp::Rol),
            M::Ror => self.rotate(Op::Ror, FlagOp::Ror),
            M::Shlx => self.shift_without_flags(Op::Shl),
            M::Shrx => self.shift_without_flags(Op::Shr),
            M::Sarx => self.shift_without_flags(Op::Sar),
            M::Rorx => self.shift_without_flags(Op::Ror),
            M::Imul if self.inst.op_count() == 1 => {
                self.widening_multiply(Op::MulHighS, FlagOp::MulS)
            }
            M::Imul => self.multiply(),
            M::Mul => self.widening_multiply(Op::MulHighU, FlagOp::MulU),
            M::Cbw | M::Cwde | M::Cdqe => self.extend_accumulator(),
            M::Cwd | M::Cdq | M::Cqo => self.extend_into_rdx(),
            M::Bt => self.bit(BitChange::None),
            M::Bts => self.bit(BitChange::Set),
            M::Btr => self.bit(BitChange::Reset),
            M::Btc => self.bit(BitChange::Complement),
            M::Bswap => self.unary(|e, ty, a| (e.b.pure(Op::Bswap, ty, &[a]), None)),
            M::Bsf => self.scan(FlagOp::Bsf),
            M::Bsr => self.scan(FlagOp::Bsr),
            M::Tzcnt => self.count(Op::Ctz, |f, a| (FlagOp::Tzcnt, vec2(a, f))),
            M::Lzcnt => self.count(Op::Clz, |f, a| (FlagOp::Lzcnt, vec2(a, f))),
            M::Popcnt => self.count(Op::Popcnt, |_, a| (FlagOp::Popcnt, [a].into_iter().collect())),
            M::Andn => self.and_not(),
            M::Xchg => self.exchange(),
            M::Xadd => self.exchange_add(),
            M::Lahf => {
                let flags = self.flags();
                let bits = self.b.pure(Op::FlagBits, Ty::I64, &[flags]);
                let low = self.b.binary(Op::And, Ty::I64, bits, Operand::Const(LAHF_FLAGS));
                let image = self.b.binary(Op::Or, Ty::I64, low, Operand::Const(2));
                let ah = self.b.trunc(Ty::I8, Ty::I64, image);
                self.write_reg(Register::AH, ah);
            }
            M::Sahf => {
                let flags = self.flags();
                let bits = self.b.pure(Op::FlagBits, Ty::I64, &[flags]);
                let kept = self.b.binary(Op::And, Ty::I64, bits, Operand::Const(OVERFLOW));
                let ah = self.read_reg(Register::AH);
                let ah = self.b.zext(Ty::I64, Ty::I8, ah);
                let new = self.b.binary(Op::And, Ty::I64, ah, Operand::Const(LAHF_FLAGS));
                let image = self.b.binary(Op::Or, Ty::I64, kept, new);
                let flags = self.b.flags(FlagOp::FromBits, Ty::I64, &[image]);
                self.put_flags(flags);
            }
            M::Clc => self.set_carry(|_, _| Operand::Const(0)),
            M::Stc => self.set_carry(|_, _| Operand::Const(1)),
            M::Cmc => self.set_carry(|e, flags| e.b.cond(Cond::Ae, flags)),
            _ => return self.conditional(),
        }
        true
    }

    /// setcc and cmovcc.
    fn conditional(&mut self) -> bool {
        let Some(cond) = self.condition() else { return false };
        let flags = self.flags();
        let holds = self.b.cond(cond, flags);
        if self.inst.op_count() == 1 {
            let byte = self.b.zext(Ty::I8, Ty::I1, holds);
            self.write(0, Ty::I8, byte);
        } else {
            // The source is read whatever the condition; a 32-bit destination is always
            // zero-extended.
            let ty = self.ty(0);
            let new = self.read(1, ty);
            let old = self.read_reg(self.inst.op0_register());
            let v = self.b.select(ty, holds, new, old);
            self.write(0, ty, v);
        }
        true
    }

    /// The condition in the opcode, if it has one.
    pub fn condition(&self) -> Option<Cond> {
        match self.inst.condition_code() {
            ConditionCode::None => None,
            code => Cond::ALL.get(code as usize - 1).copied(),
        }
    }

    /// Writes an operand that is not read.
    fn write(&mut self, operand: u32, ty: Ty, v: Operand) {
        let destination = self.destination(operand);
        self.write_destination(destination, ty, v);
    }

    fn extend(&mut self) {
        let (to, from) = (self.ty(0), self.ty(1));
        let v = self.read(1, from);
        let wide = match self.inst.mnemonic() {
            M::Movzx => self.b.zext(to, from, v),
            _ => self.b.sext(to, from, v),
        };
        self.write(0, to, wide);
    }

    fn arithmetic(&mut self, op: Op, flag_op: FlagOp, keep: Keep) {
        let ty = self.ty(0);
        let destination = self.destination(0);
        let a = self.read_destination(destination, ty);
        let b = self.read(1, ty);
        if keep == Keep::Result {
            let v = self.b.binary(op, ty, a, b);
            let flags = self.b.flags(flag_op, ty, &[a, b]);
            self.write_destination(destination, ty, v);
            self.put_flags(flags);
        } else {
            let flags = self.b.flags(flag_op, ty, &[a, b]);
            self.put_flags(flags);
        }
    }

    fn with_carry(&mut self, op: Op, flag_op: FlagOp) {
        let ty = self.ty(0);
        let destination = self.destination(0);
        let a = self.read_destination(destination, ty);
        let b = self.read(1, ty);
        let old = self.flags();
        let carry = self.b.cond(Cond::B, old);
        let wide = self.b.zext(ty, Ty::I1, carry);
        let sum = self.b.binary(op, ty, a, b);
        let v = self.b.binary(op, ty, sum, wide);
        let flags = self.b.flags(flag_op, ty, &[a, b, carry]);
        self.write_destination(destination, ty, v);
        self.put_flags(flags);
    }

    /// Reads one operand, applies `f`, writes the result back, then writes the flags that `f`
    /// returned.
    fn unary(&mut self, f: impl FnOnce(&mut Self, Ty, Operand) -> (Operand, Option<Operand>)) {
        let ty = self.ty(0);
        let destination = self.destination(0);
        let a = self.read_destination(destination, ty);
        let (v, flags) = f(self, ty, a);
        self.write_destination(destination, ty, v);
        if let Some(flags) = flags {
            self.put_flags(flags);
        }
    }

    /// inc and dec, which keep CF.
    fn step(&mut self, op: Op, flag_op: FlagOp) {
        self.unary(|e, ty, a| {
            let old = e.flags();
            (e.b.binary(op, ty, a, Operand::Const(1)), Some(e.b.flags(flag_op, ty, &[a, old])))
        });
    }

    /// Shifts and rotates: the count is cl, an immediate or 1. A count of zero keeps the flags,
    /// which [`FlagOp`] implements.
    fn shift(&mut self, op: Op, flag_op: FlagOp) {
        self.unary(|e, ty, a| {
            let count = e.read(1, Ty::I8);
            let old = e.flags();
            (e.b.binary(op, ty, a, count), Some(e.b.flags(flag_op, ty, &[a, count, old])))
        });
    }

    /// As [`Self::shift`], except for rotating a register by an immediate where the manual leaves
    /// OF unchanged or undefined.
    fn rotate(&mut self, op: Op, flag_op: FlagOp) {
        let ty = self.ty(0);
        let mask = if ty == Ty::I64 { 63 } else { 31 };
        let leaves_overflow = !self.is_memory(0)
            && self.is_immediate(1)
            && self.inst.immediate(1) & mask > 1
            && hostflags::immediate_rotations_keep_overflow();
        if !leaves_overflow {
            return self.shift(op, flag_op);
        }
        self.unary(|e, ty, a| {
            let count = e.read(1, Ty::I8);
            let v = e.b.binary(op, ty, a, count);
            // CF is the bit that moved from one end to the other.
            let at = if op == Op::Rol { 0 } else { u64::from(ty.bits()) - 1 };
            let wide = e.b.zext(Ty::I64, ty, v);
            let moved = e.b.binary(Op::Shr, Ty::I64, wide, Operand::Const(at));
            let carry = e.b.trunc(Ty::I1, Ty::I64, moved);
            let old = e.flags();
            (v, Some(e.b.flags(FlagOp::SetCf, Ty::I64, &[old, carry])))
        });
    }

    fn shift_without_flags(&mut self, op: Op) {
        let ty = self.ty(0);
        let a = self.read(1, ty);
        let count = self.read(2, if op == Op::Ror { Ty::I8 } else { ty });
        let count = if op == Op::Ror { count } else { self.b.trunc(Ty::I8, ty, count) };
        let v = self.b.binary(op, ty, a, count);
        self.write(0, ty, v);
    }

    /// imul with a destination register.
    fn multiply(&mut self) {
        let ty = self.ty(0);
        let first = if self.inst.op_count() == 3 { 1 } else { 0 };
        let a = self.read(first, ty);
        let b = self.read(first + 1, ty);
        let v = self.b.binary(Op::Mul, ty, a, b);
        let old = self.flags();
        let flags = self.b.flags(FlagOp::MulS, ty, &[a, b, old]);
        self.write(0, ty, v);
        self.put_flags(flags);
    }

    /// mul and one-operand imul: the double-width product goes to ax or (e/r)dx:(e/r)ax.
    fn widening_multiply(&mut self, high: Op, flag_op: FlagOp) {
        let ty = self.ty(0);
        let b = self.read(0, ty);
        let rax = self.b.get_gpr(Gpr::RAX);
        let a = self.b.trunc(ty, Ty::I64, rax);
        let old = self.flags();
        let flags = self.b.flags(flag_op, ty, &[a, b, old]);
        if ty == Ty::I8 {
            let widen = if high == Op::MulHighS { Op::Sext(Ty::I8) } else { Op::Zext(Ty::I8) };
            let a = self.b.pure(widen, Ty::I16, &[a]);
            let b = self.b.pure(widen, Ty::I16, &[b]);
            let product = self.b.binary(Op::Mul, Ty::I16, a, b);
            self.write_reg(Register::AX, product);
        } else {
            let (low_reg, high_reg) = match ty {
                Ty::I16 => (Register::AX, Register::DX),
                Ty::I32 => (Register::EAX, Register::EDX),
                _ => (Register::RAX, Register::RDX),
            };
            let low = self.b.binary(Op::Mul, ty, a, b);
            let high = self.b.binary(high, ty, a, b);
            self.write_reg(low_reg, low);
            self.write_reg(high_reg, high);
        }
        self.put_flags(flags);
    }

    fn extend_accumulator(&mut self) {
        let (from_reg, from, to_reg, to) = match self.inst.mnemonic() {
            M::Cbw => (Register::AL, Ty::I8, Register::AX, Ty::I16),
            M::Cwde => (Register::AX, Ty::I16, Register::EAX, Ty::I32),
            _ => (Register::EAX, Ty::I32, Register::RAX, Ty::I64),
        };
        let v = self.read_reg(from_reg);
        let wide = self.b.sext(to, from, v);
        self.write_reg(to_reg, wide);
    }

    fn extend_into_rdx(&mut self) {
        let (from, to, ty) = match self.inst.mnemonic() {
            M::Cwd => (Register::AX, Register::DX, Ty::I16),
            M::Cdq => (Register::EAX, Register::EDX, Ty::I32),
            _ => (Register::RAX, Register::RDX, Ty::I64),
        };
        let v = self.read_reg(from);
        let sign = self.b.binary(Op::Sar, ty, v, Operand::Const(u64::from(ty.bits()) - 1));
        self.write_reg(to, sign);
    }

    /// bt, bts, btr, btc. A register index into memory addresses the whole address space as a bit
    /// string.
    fn bit(&mut self, change: BitChange) {
        let ty = self.ty(0);
        let mask = Operand::Const(u64::from(ty.bits()) - 1);
        let destination = match self.is_memory(0) && !self.is_immediate(1) {
            true => Destination::Mem(self.bit_string_element()),
            false => self.destination(0),
        };
        let a = self.read_destination(destination, ty);
        let index = self.read(1, ty);
        let index = self.b.binary(Op::And, ty, index, mask);
        let old = self.flags();
        let flags = self.b.flags(FlagOp::Bt, ty, &[a, index, old]);
        let bit = |e: &mut Self| {
            let count = e.b.trunc(Ty::I8, ty, index);
            e.b.binary(Op::Shl, ty, Operand::Const(1), count)
        };
        let v = match change {
            BitChange::None => None,
            BitChange::Set => {
                let bit = bit(self);
                Some(self.b.binary(Op::Or, ty, a, bit))
            }
            BitChange::Reset => {
                let bit = bit(self);
                let others = self.b.pure(Op::Not, ty, &[bit]);
                Some(self.b.binary(Op::And, ty, a, others))
            }
            BitChange::Complement => {
                let bit = bit(self);
                Some(self.b.binary(Op::Xor, ty, a, bit))
            }
        };
        if let Some(v) = v {
            self.write_destination(destination, ty, v);
        }
        self.put_flags(flags);
    }

    fn is_immediate(&self, operand: u32) -> bool {
        !self.is_memory(operand) && self.inst.op_kind(operand) != iced_x86::OpKind::Register
    }

    /// Address of the element of a bit string in memory that holds the bit selected by the index
    /// register. With an address-size prefix the sum of address and bit offset wraps at 32 bits.
    pub fn bit_string_element(&mut self) -> Address {
        let ty = self.ty(0);
        let mut address = self.address();
        let log2_bits = u64::from(ty.bits().trailing_zeros());
        let index = self.read(1, ty);
        let index = self.b.sext(Ty::I64, ty, index);
        let element = self.b.binary(Op::Sar, Ty::I64, index, Operand::Const(log2_bits));
        let bytes = self.b.binary(Op::Shl, Ty::I64, element, Operand::Const(log2_bits - 3));
        let linear = self.linear(address);
        let linear = self.b.binary(Op::Add, Ty::I64, linear, bytes);
        address.base = self.wrap_address(linear);
        address.index = ZERO;
        address.mem.scale = 1;
        address.mem.disp = 0;
        address
    }

    /// The number of the selected bit within its element.
    pub fn bit_string_index(&mut self) -> Operand {
        let ty = self.ty(0);
        let index = self.read(1, ty);
        let index = self.b.binary(Op::And, ty, index, Operand::Const(u64::from(ty.bits()) - 1));
        self.b.zext(Ty::I64, ty, index)
    }

    fn wrap_address(&mut self, linear: Operand) -> Operand {
        let (base, index) = (self.inst.memory_base(), self.inst.memory_index());
        let narrow = base == Register::EIP
            || base.is_gpr32()
            || index.is_gpr32()
            || (base == Register::None
                && index == Register::None
                && self.inst.memory_displ_size() == 4);
        if !narrow {
            return linear;
        }
        let low = self.b.trunc(Ty::I32, Ty::I64, linear);
        self.b.zext(Ty::I64, Ty::I32, low)
    }

    /// bsf and bsr: a zero source keeps the destination register.
    fn scan(&mut self, flag_op: FlagOp) {
        let ty = self.ty(0);
        let a = self.read(1, ty);
        let old_flags = self.flags();
        let flags = self.b.flags(flag_op, ty, &[a, old_flags]);
        let found = if flag_op == FlagOp::Bsf {
            self.b.pure(Op::Ctz, ty, &[a])
        } else {
            let zeros = self.b.pure(Op::Clz, ty, &[a]);
            self.b.binary(Op::Sub, ty, Operand::Const(u64::from(ty.bits()) - 1), zeros)
        };
        let dst = self.inst.op0_register();
        let zero = self.b.binary(Op::Eq, ty, a, ZERO);
        let full = self.b.get_gpr(gpr(dst));
        let old = if ty == Ty::I32 && !host::scan_of_zero_keeps_upper_half() {
            let low = self.b.trunc(Ty::I32, Ty::I64, full);
            self.b.zext(Ty::I64, Ty::I32, low)
        } else {
            full
        };
        let new = match ty {
            Ty::I16 => self.b.pure(Op::Insert16, Ty::I64, &[old, found]),
            _ => self.b.zext(Ty::I64, ty, found),
        };
        let v = self.b.select(Ty::I64, zero, old, new);
        self.b.put(Loc::Gpr(gpr(dst)), v);
        self.put_flags(flags);
    }

    /// tzcnt, lzcnt, popcnt.
    fn count(
        &mut self,
        op: Op,
        flags: impl FnOnce(Operand, Operand) -> (FlagOp, smallvec::SmallVec<[Operand; 2]>),
    ) {
        let ty = self.ty(0);
        let a = self.read(1, ty);
        let old = self.flags();
        let (flag_op, args) = flags(old, a);
        let v = self.b.pure(op, ty, &[a]);
        let flags = self.b.flags(flag_op, ty, &args);
        self.write(0, ty, v);
        self.put_flags(flags);
    }

    fn and_not(&mut self) {
        let ty = self.ty(0);
        let a = self.read(1, ty);
        let b = self.read(2, ty);
        let inverse = self.b.pure(Op::Not, ty, &[a]);
        let v = self.b.binary(Op::And, ty, inverse, b);
        let mut flags = self.b.flags(FlagOp::And, ty, &[inverse, b]);
        if host::andn_clears_parity() {
            let bits = self.b.pure(Op::FlagBits, Ty::I64, &[flags]);
            let bits = self.b.binary(Op::And, Ty::I64, bits, Operand::Const(ARITH_FLAGS & !PF));
            flags = self.b.flags(FlagOp::FromBits, Ty::I64, &[bits]);
        }
        self.write(0, ty, v);
        self.put_flags(flags);
    }

    /// xchg of two registers. (With memory it is implicitly locked, hence native.) F3 90 is pause.
    /// F3 41 90 exchanges rax with r8 on AMD's processors, but is pause on Intel's.
    fn exchange(&mut self) {
        let (x, y) = (self.inst.op0_register(), self.inst.op1_register());
        let pauses_perhaps =
            matches!(self.inst.code(), Code::Xchg_r16_AX | Code::Xchg_r32_EAX | Code::Xchg_r64_RAX)
                && x.full_register() == Register::R8
                && self.inst.has_rep_prefix();
        if pauses_perhaps && host::pause_names_no_register() {
            return;
        }
        let a = self.read_reg(x);
        let b = self.read_reg(y);
        self.write_reg(x, b);
        self.write_reg(y, a);
    }

    /// xadd without lock: the source gets the old destination, the destination the sum.
    fn exchange_add(&mut self) {
        let ty = self.ty(0);
        let destination = self.destination(0);
        let a = self.read_destination(destination, ty);
        let b = self.read(1, ty);
        let sum = self.b.binary(Op::Add, ty, a, b);
        let flags = self.b.flags(FlagOp::Add, ty, &[a, b]);
        let source = self.inst.op1_register();
        if let Destination::Mem(address) = destination {
            self.store(ty, address, sum);
            self.write_reg(source, a);
        } else {
            // The destination is written last, so it wins if both are one register.
            self.write_reg(source, a);
            self.write_destination(destination, ty, sum);
        }
        self.put_flags(flags);
    }

    fn set_carry(&mut self, carry: impl FnOnce(&mut Self, Operand) -> Operand) {
        let old = self.flags();
        let carry = carry(self, old);
        let flags = self.b.flags(FlagOp::SetCf, Ty::I64, &[old, carry]);
        self.put_flags(flags);
    }
}

fn vec2(a: Operand, b: Operand) -> smallvec::SmallVec<[Operand; 2]> {
    [a, b].into_iter().collect()
}
