//! Segment registers and their bases.
//!
//! Data: the guest's selectors are in [`Segments`], the bases of FS and GS in the context. The
//! host's segment registers never change. No lock: see [`super`].
//!
//! Example: `mov fs, eax` with 0x2b in eax stores the selector and sets FS's base to 0; with 0x5b
//! it raises a general protection fault.

use dynasour_guest::ThreadContext;
use iced_x86::{Code, Instruction, Mnemonic as M, OpKind, Register};

use super::{
    Refused, address, load, peek, protection, push, read_operand, read_register, store,
    write_register,
};
use crate::kernel::process::Segments;
use crate::kernel::signal::frame::{USER_CS, USER_DS};

/// Whether a data segment register may hold `selector`: null, or one of Linux's user segments
/// (asm/segment.h: 32-bit code, data, 64-bit code, the processor number).
fn is_loadable(selector: u16) -> bool {
    matches!(selector & !3, 0 | 0x20 | 0x28 | 0x30 | 0x78)
}

impl Segments {
    fn get(&self, register: Register) -> u16 {
        match register {
            Register::ES => self.es,
            Register::DS => self.ds,
            Register::FS => self.fs,
            Register::GS => self.gs,
            Register::CS => USER_CS,
            _ => USER_DS,
        }
    }

    /// Loads a selector. The base of FS or GS becomes 0, because all loadable segments start at 0.
    fn set(
        &mut self,
        context: &mut ThreadContext,
        register: Register,
        selector: u16,
    ) -> Result<(), Refused> {
        let allowed = match register {
            Register::SS => selector == USER_DS,
            Register::CS => false,
            _ => is_loadable(selector),
        };
        if !allowed {
            return Err(protection(u64::from(selector & !3)));
        }
        match register {
            Register::ES => self.es = selector,
            Register::DS => self.ds = selector,
            Register::FS => (self.fs, context.fs_base) = (selector, 0),
            Register::GS => (self.gs, context.gs_base) = (selector, 0),
            _ => {}
        }
        Ok(())
    }

    /// `mov`, `push`, `pop` of a segment register; `lfs`, `lgs`, `lss`.
    pub(super) fn execute(
        &mut self,
        context: &mut ThreadContext,
        inst: &Instruction,
    ) -> Result<(), Refused> {
        let register = |operand: u32| match inst.op_kind(operand) {
            OpKind::Register if inst.op_register(operand).is_segment_register() => {
                Some(inst.op_register(operand))
            }
            _ => None,
        };
        match inst.mnemonic() {
            M::Mov => match (register(0), register(1)) {
                (Some(segment), _) => {
                    let selector = read_operand(context, inst, 1, 2)? as u16;
                    self.set(context, segment, selector)
                }
                (None, Some(segment)) => {
                    write_word_operand(context, inst, 0, self.get(segment).into())
                }
                (None, None) => Err(Refused::Unsupported),
            },
            M::Push => {
                let segment = register(0).ok_or(Refused::Unsupported)?;
                push(context, stack_item(inst), self.get(segment).into())
            }
            M::Pop => {
                let segment = register(0).ok_or(Refused::Unsupported)?;
                let size = stack_item(inst);
                let selector = peek(context, size, 0)? as u16;
                self.set(context, segment, selector)?;
                context.gpr[4] = context.gpr[4].wrapping_add(size as u64);
                Ok(())
            }
            mnemonic => {
                let segment = match mnemonic {
                    M::Lfs => Register::FS,
                    M::Lgs => Register::GS,
                    _ => Register::SS,
                };
                let destination = inst.op0_register();
                let pointer = address(context, inst, 1)?;
                let offset = load(pointer, destination.size())?;
                let selector = load(pointer.wrapping_add(destination.size() as u64), 2)? as u16;
                self.set(context, segment, selector)?;
                write_register(context, destination, offset);
                Ok(())
            }
        }
    }
}

/// The bytes that a `push` or `pop` of a segment register moves rsp by.
fn stack_item(inst: &Instruction) -> usize {
    match inst.code() {
        Code::Pushw_FS | Code::Pushw_GS | Code::Popw_FS | Code::Popw_GS => 2,
        _ => 8,
    }
}

/// `rdfsbase`, `rdgsbase`
pub(super) fn write_base(context: &mut ThreadContext, inst: &Instruction, base: u64) {
    write_register(context, inst.op0_register(), base);
}

/// The operand of `wrfsbase` or `wrgsbase`, which must be canonical.
pub(super) fn new_base(context: &ThreadContext, inst: &Instruction) -> Result<u64, Refused> {
    let base = read_register(context, inst.op0_register());
    let canonical = (base as i64) << 16 >> 16 == base as i64;
    if canonical { Ok(base) } else { Err(protection(0)) }
}

/// Writes a 16-bit value: zero-extended to the size of a register operand, or two bytes of memory.
fn write_word_operand(
    context: &mut ThreadContext,
    inst: &Instruction,
    operand: u32,
    value: u64,
) -> Result<(), Refused> {
    match inst.op_kind(operand) {
        OpKind::Register => write_register(context, inst.op_register(operand), value),
        _ => store(address(context, inst, operand)?, 2, value)?,
    }
    Ok(())
}
