//! Operands: registers and their parts, effective addresses, immediates; reading and writing them.
//!
//! A *destination* is one whose address has been computed once, so that a read-modify-write
//! reads and writes the same bytes. Writes of 32-bit registers zero-extend; writes of 8 and 16 bits
//! keep the rest.

use dynasour_ir::{Builder, Gpr, Loc, Mem, Op, Operand, Segment, Ty};
use iced_x86::{Instruction, OpKind, Register};

/// Emits the meaning of one instruction.
pub(super) struct Emit<'e, 'v> {
    /// Where IR is appended.
    pub b: &'e mut Builder<'v>,
    /// The instruction.
    pub inst: &'e Instruction,
}

/// A memory operand: `mem` over `base` and `index`.
#[derive(Clone, Copy)]
pub(super) struct Address {
    pub mem: Mem,
    pub base: Operand,
    pub index: Operand,
}

/// The storage of an operand.
#[derive(Clone, Copy)]
pub(super) enum Destination {
    Reg(Register),
    Mem(Address),
}

pub(super) const ZERO: Operand = Operand::Const(0);

/// The full register that a general-purpose register is a part of.
pub(super) fn gpr(reg: Register) -> Gpr {
    Gpr::new(reg.full_register().number() as u8)
}

/// The integer type of a general-purpose register.
fn reg_ty(reg: Register) -> Ty {
    match reg.size() {
        1 => Ty::I8,
        2 => Ty::I16,
        4 => Ty::I32,
        _ => Ty::I64,
    }
}

fn is_high_byte(reg: Register) -> bool {
    matches!(reg, Register::AH | Register::CH | Register::DH | Register::BH)
}

impl Emit<'_, '_> {
    /// The type of a register or memory operand.
    pub fn ty(&self, operand: u32) -> Ty {
        match self.inst.op_kind(operand) {
            OpKind::Register => reg_ty(self.inst.op_register(operand)),
            _ => Ty::int_of_bytes(self.inst.memory_size().size() as u32).unwrap_or(Ty::I64),
        }
    }

    pub fn is_memory(&self, operand: u32) -> bool {
        self.inst.op_kind(operand) == OpKind::Memory
    }

    /// The immediate operand, truncated to `ty`.
    pub fn immediate(&self, operand: u32, ty: Ty) -> Operand {
        Operand::Const(self.inst.immediate(operand) & ty.mask())
    }

    pub fn read_reg(&mut self, reg: Register) -> Operand {
        let full = self.b.get_gpr(gpr(reg));
        if is_high_byte(reg) {
            let shifted = self.b.binary(Op::Shr, Ty::I64, full, Operand::Const(8));
            return self.b.trunc(Ty::I8, Ty::I64, shifted);
        }
        self.b.trunc(reg_ty(reg), Ty::I64, full)
    }

    pub fn write_reg(&mut self, reg: Register, v: Operand) {
        let full = match reg_ty(reg) {
            Ty::I64 => v,
            Ty::I32 => self.b.zext(Ty::I64, Ty::I32, v),
            narrow => {
                let old = self.b.get_gpr(gpr(reg));
                let op = match narrow {
                    Ty::I16 => Op::Insert16,
                    _ if is_high_byte(reg) => Op::Insert8High,
                    _ => Op::Insert8Low,
                };
                self.b.pure(op, Ty::I64, &[old, v])
            }
        };
        self.b.put(Loc::Gpr(gpr(reg)), full);
    }

    /// The memory operand's address, including the base of FS or GS.
    pub fn address(&mut self) -> Address {
        self.address_with_rsp(0)
    }

    /// The address as if rsp were larger by `rsp_bias` (`pop [rsp+8]` uses the incremented rsp).
    pub fn address_with_rsp(&mut self, rsp_bias: i64) -> Address {
        let mut address = self.offset(rsp_bias);
        match self.inst.memory_segment() {
            Register::FS => address.mem.seg = Some(Segment::Fs),
            Register::GS => {
                let gs = self.b.get(Loc::GsBase);
                address.base = match address.base {
                    ZERO => gs,
                    base => self.b.binary(Op::Add, Ty::I64, gs, base),
                };
            }
            _ => {}
        }
        address
    }

    /// The effective address without a segment base.
    fn offset(&mut self, rsp_bias: i64) -> Address {
        let inst = self.inst;
        let (base, index) = (inst.memory_base(), inst.memory_index());
        let absolute =
            |target| Address { mem: Mem::disp(0), base: Operand::Const(target), index: ZERO };
        match base {
            Register::RIP | Register::EIP => return absolute(inst.memory_displacement64()),
            _ => {}
        }
        let mut disp = inst.memory_displacement64() as i64;
        if matches!(base, Register::RSP | Register::ESP) {
            disp = disp.wrapping_add(rsp_bias);
        }
        let scale = inst.memory_index_scale() as u8;
        if base.is_gpr32() || index.is_gpr32() {
            // Address-size prefix: the sum is computed in 32 bits.
            let mut sum = Operand::Const(disp as u64 & Ty::I32.mask());
            if index != Register::None {
                let index = self.read_index(index, Ty::I32);
                let scaled = self.b.binary(
                    Op::Shl,
                    Ty::I32,
                    index,
                    Operand::Const(scale.trailing_zeros().into()),
                );
                sum = self.b.binary(Op::Add, Ty::I32, scaled, sum);
            }
            if base != Register::None {
                let base = self.read_reg(base);
                sum = self.b.binary(Op::Add, Ty::I32, base, sum);
            }
            let base = self.b.zext(Ty::I64, Ty::I32, sum);
            return Address { mem: Mem::disp(0), base, index: ZERO };
        }
        let mut part =
            |reg| if reg == Register::None { ZERO } else { self.read_index(reg, Ty::I64) };
        let (base, index) = (part(base), part(index));
        Address { mem: Mem { scale, disp, seg: None }, base, index }
    }

    /// A base or index register as wide as the address (`xlatb` indexes by al).
    fn read_index(&mut self, reg: Register, ty: Ty) -> Operand {
        let v = self.read_reg(reg);
        self.b.zext(ty, reg_ty(reg), v)
    }

    /// The address as one value, segment base not included.
    pub fn linear(&mut self, address: Address) -> Operand {
        let shift = Operand::Const(address.mem.scale.trailing_zeros().into());
        let mut sum = address.base;
        if address.index != ZERO {
            let scaled = match address.mem.scale {
                1 => address.index,
                _ => self.b.binary(Op::Shl, Ty::I64, address.index, shift),
            };
            sum = if sum == ZERO { scaled } else { self.b.binary(Op::Add, Ty::I64, sum, scaled) };
        }
        if address.mem.disp != 0 {
            sum = self.b.binary(Op::Add, Ty::I64, sum, Operand::Const(address.mem.disp as u64));
        }
        sum
    }

    /// `lea`: the effective address, truncated to `ty`.
    pub fn effective_address(&mut self, ty: Ty) -> Operand {
        let address = self.offset(0);
        let sum = self.linear(address);
        self.b.trunc(ty, Ty::I64, sum)
    }

    pub fn load(&mut self, ty: Ty, address: Address) -> Operand {
        self.b.load(ty, address.mem, address.base, address.index)
    }

    pub fn store(&mut self, ty: Ty, address: Address, v: Operand) {
        self.b.store(ty, address.mem, address.base, address.index, v);
    }

    pub fn destination(&mut self, operand: u32) -> Destination {
        match self.inst.op_kind(operand) {
            OpKind::Register => Destination::Reg(self.inst.op_register(operand)),
            _ => Destination::Mem(self.address()),
        }
    }

    pub fn read_destination(&mut self, destination: Destination, ty: Ty) -> Operand {
        match destination {
            Destination::Reg(reg) => self.read_reg(reg),
            Destination::Mem(address) => self.load(ty, address),
        }
    }

    pub fn write_destination(&mut self, destination: Destination, ty: Ty, v: Operand) {
        match destination {
            Destination::Reg(reg) => self.write_reg(reg, v),
            Destination::Mem(address) => self.store(ty, address, v),
        }
    }

    /// A source operand of type `ty`: register, memory, or immediate.
    pub fn read(&mut self, operand: u32, ty: Ty) -> Operand {
        match self.inst.op_kind(operand) {
            OpKind::Register => self.read_reg(self.inst.op_register(operand)),
            OpKind::Memory => {
                let address = self.address();
                self.load(ty, address)
            }
            _ => self.immediate(operand, ty),
        }
    }

    pub fn flags(&mut self) -> Operand {
        self.b.get(Loc::Flags)
    }

    pub fn put_flags(&mut self, v: Operand) {
        self.b.put(Loc::Flags, v);
    }
}
