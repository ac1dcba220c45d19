//! Single instructions of selection: an iced [`Code`] and operands become an iced [`Instruction`],
//! with registers and slots as the allocator chose them.
//!
//! Pure functions: no data, no lock. Example: `add` of operands 0 and 2, of which the allocator has
//! put the first into rbx and the second into slot 3, becomes `add rbx, gs:[scratch + 24]`.

use crate::asm::{Asm, Assembler};
use crate::codegen::encoded::Target;
use crate::codegen::mach::{Addr, AddrReg, Opnd, Place};
use crate::codegen::x86::{Size, register};
use crate::record::Location;
use dynasour_guest::context::offset;
use dynasour_ir::Native;
use dynasour_ir::split::Form;
use iced_x86::{Code, IcedError, Instruction, MemoryOperand, OpKind, Register};
use regalloc2::{Allocation, RegClass};

/// Stores a register in a slot.
pub fn save(code: &mut Asm<Target>, r: u8, s: u16) {
    code.store(r, slot(s));
}

/// Loads a register from a slot.
pub fn restore(code: &mut Asm<Target>, r: u8, s: u16) {
    code.load(r, slot(s));
}

/// A register by its number.
fn r64(r: u8) -> Register {
    register(usize::from(r), Size::B8)
}

/// Where the allocator put something.
pub fn location(a: Allocation, first_slot: u16) -> Location {
    match (a.as_reg(), a.as_stack()) {
        (Some(r), _) if r.class() == RegClass::Float => Location::Vector(r.hw_enc() as u8),
        (Some(r), _) => Location::Reg(r.hw_enc() as u8),
        (_, Some(s)) => Location::Slot(first_slot + s.index() as u16),
        _ => Location::Operand(0),
    }
}

/// The field of a spill slot.
pub fn slot(s: u16) -> usize {
    offset::SCRATCH + 8 * usize::from(s)
}

/// The same as iced's operand.
fn slot_operand(s: u16) -> MemoryOperand {
    MemoryOperand::new(Register::None, Register::None, 1, slot(s) as i64, 8, false, Register::GS)
}

fn memory(addr: &Addr, allocs: &[Allocation]) -> MemoryOperand {
    let reg = |r: AddrReg| match r {
        AddrReg::None => Register::None,
        AddrReg::Rsp => Register::RSP,
        AddrReg::Op(i) => match location(allocs[usize::from(i)], 0) {
            Location::Reg(r) => r64(r),
            _ => Register::None,
        },
    };
    let (base, index) = (reg(addr.base), reg(addr.index));
    let displ_size = match base {
        Register::None => 8,
        _ if addr.disp == 0 => 0,
        _ => 1,
    };
    MemoryOperand::new(
        base,
        index,
        u32::from(addr.scale),
        i64::from(addr.disp),
        displ_size,
        false,
        addr.seg,
    )
}

fn set_memory(inst: &mut Instruction, m: &MemoryOperand) {
    inst.set_memory_base(m.base);
    inst.set_memory_index(m.index);
    inst.set_memory_index_scale(m.scale);
    inst.set_memory_displacement64(m.displacement as u64);
    inst.set_memory_displ_size(m.displ_size);
    inst.set_segment_prefix(m.segment_prefix);
}

/// Makes a register or a spill slot operand `n`.
fn set_place(inst: &mut Instruction, n: u32, place: Location, size: Size) -> Result<(), IcedError> {
    let register = match place {
        Location::Slot(s) => {
            inst.try_set_op_kind(n, OpKind::Memory)?;
            set_memory(inst, &slot_operand(s));
            return Ok(());
        }
        Location::Reg(r) => register(usize::from(r), size),
        Location::Vector(r) => xmm(r),
        Location::Operand(_) | Location::Flags => return Ok(()),
    };
    inst.try_set_op_kind(n, OpKind::Register)?;
    inst.try_set_op_register(n, register)
}

/// An XMM register by its number.
fn xmm(r: u8) -> Register {
    Register::XMM0 + u32::from(r)
}

/// One instruction from its code and operands.
pub fn build(
    code: Code,
    operands: &[Opnd],
    allocs: &[Allocation],
    first_slot: u16,
) -> Result<Instruction, IcedError> {
    let mut inst = Instruction::default();
    inst.set_code(code);
    for (n, operand) in operands.iter().enumerate() {
        let n = n as u32;
        match operand {
            Opnd::Phys(r) => {
                inst.try_set_op_kind(n, OpKind::Register)?;
                inst.try_set_op_register(n, *r)?;
            }
            Opnd::Mem(addr) => {
                inst.try_set_op_kind(n, OpKind::Memory)?;
                set_memory(&mut inst, &memory(addr, allocs));
            }
            Opnd::Op(i, size) => {
                set_place(&mut inst, n, location(allocs[usize::from(*i)], first_slot), *size)?;
            }
            Opnd::Imm(i) => {
                let kind = immediate_kind(code, n);
                inst.try_set_op_kind(n, kind)?;
                match kind {
                    OpKind::Immediate8 => inst.set_immediate8(*i as u8),
                    OpKind::Immediate16 => inst.set_immediate16(*i as u16),
                    OpKind::Immediate32 => inst.set_immediate32(*i as u32),
                    OpKind::Immediate8to16 => inst.set_immediate8to16(*i as i16),
                    OpKind::Immediate8to32 => inst.set_immediate8to32(*i as i32),
                    OpKind::Immediate8to64 => inst.set_immediate8to64(*i),
                    _ => inst.set_immediate32to64(*i),
                }
            }
        }
    }
    Ok(inst)
}

/// How operand `n` of this instruction, its last and an immediate, is encoded. (The table of opcode
/// descriptions says so as well, but takes a millisecond to make.)
fn immediate_kind(code: Code, n: u32) -> OpKind {
    let probe = match n {
        0 => Instruction::with1(code, 0i32),
        1 => Instruction::with2(code, Register::None, 0i32),
        _ => Instruction::with3(code, Register::None, Register::None, 0i32),
    };
    match probe.map(|inst| inst.op_kind(n)) {
        Ok(
            kind @ (OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
            | OpKind::Immediate16
            | OpKind::Immediate32
            | OpKind::Immediate32to64),
        ) => kind,
        _ => OpKind::Immediate8,
    }
}

/// `insertps`: element 0 of the source becomes element 0, and the others zero.
const LOW_ELEMENT_ONLY: i64 = 0b1110;

/// An original instruction with its explicit memory operand replaced.
pub fn rebuild(
    original: &Native,
    place: Place,
    allocs: &[Allocation],
    first_slot: u16,
) -> Result<Instruction, IcedError> {
    let mut inst = original.inst;
    let of = |i: u8| location(allocs[usize::from(i)], first_slot);
    match place {
        Place::Nothing => {}
        Place::Memory(addr) => set_memory(&mut inst, &memory(&addr, allocs)),
        Place::General(i) => {
            let size = if original.mem_size == Some(8) { Size::B8 } else { Size::B4 };
            set_place(&mut inst, 1, of(i), size)?;
        }
        Place::Vector(i) => {
            if let Location::Vector(_) = of(i) {
                inst.set_code(match original.form() {
                    Some(Form::Vector(code) | Form::Either(code)) => code,
                    // A move between registers.
                    Some(Form::General | Form::Store) | None => Code::Movaps_xmm_xmmm128,
                });
            }
            set_place(&mut inst, 1, of(i), Size::B8)?;
        }
        Place::Result(i, is_clean) => {
            let operands = [Opnd::Op(i, Size::B8), Opnd::Phys(inst.op1_register())];
            inst = match original.mem_size {
                _ if is_clean => build(Code::Movaps_xmm_xmmm128, &operands, allocs, first_slot)?,
                Some(8) | None => build(Code::Movq_xmm_xmmm64, &operands, allocs, first_slot)?,
                Some(_) => {
                    let [to, from] = operands;
                    let operands = [to, from, Opnd::Imm(LOW_ELEMENT_ONLY)];
                    build(Code::Insertps_xmm_xmmm32_imm8, &operands, allocs, first_slot)?
                }
            };
        }
    }
    Ok(inst)
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::OpCodeOperandKind as K;

    /// The descriptions of all general-purpose instructions that the emitter makes with immediates
    /// say the same.
    #[test]
    fn kinds_of_immediates_are_those_of_the_descriptions() {
        let mut checked = 0;
        for code in Code::values() {
            let description = code.op_code();
            let general = description.is_instruction()
                && description.encoding() == iced_x86::EncodingKind::Legacy;
            if !general || description.op_count() > 3 {
                continue;
            }
            // Elsewhere than at the end only `enter` has one, which the emitter does not make.
            if let Some(n) = description.op_count().checked_sub(1) {
                let expected = match description.op_kind(n) {
                    K::imm8sex16 => OpKind::Immediate8to16,
                    K::imm8sex32 => OpKind::Immediate8to32,
                    K::imm8sex64 => OpKind::Immediate8to64,
                    K::imm16 => OpKind::Immediate16,
                    K::imm32 => OpKind::Immediate32,
                    K::imm32sex64 => OpKind::Immediate32to64,
                    K::imm8 => OpKind::Immediate8,
                    _ => continue,
                };
                let second = n > 0 && matches!(description.op_kind(n - 1), K::imm16 | K::imm8);
                if !second {
                    assert_eq!(immediate_kind(code, n), expected, "{code:?} {n}");
                    checked += 1;
                }
            }
        }
        assert!(checked > 100, "{checked}");
    }
}
