//! Jumps, calls and returns to what is no address (not canonical): the processor refuses them as it does a load from there, so
//! that a handler finds the state before the instruction, where here the target has been taken already.
//!
//! The interpreter knows which instruction it was. Native code does not say; a call is found again by what it left on the stack.

use dynasour_guest::ThreadContext;
use dynasour_guest::decode::{Decoded, Fetch, Reader};
use iced_x86::{Code, Instruction, OpKind, Register};

use crate::memory;

const RSP: usize = 4;
/// Bytes of a return address.
const WORD: u64 = 8;

/// Whether fetching from `address` is a general protection fault: how many bits of an address count is the kernel's choice.
pub fn is_astray(address: u64) -> bool {
    const PROTECTION: u64 = 13;
    const FEWEST_BITS: u32 = 48;
    let unused = u64::BITS - FEWEST_BITS;
    (address as i64) << unused >> unused != address as i64
        && memory::copy_in(address, &mut [0]) == 0
        && memory::last_fault().trapno == PROTECTION
}

/// Puts the stack pointer back to before the indirect jump, call or return at `pc`.
pub fn undo(context: &mut ThreadContext, pc: u64, code: &dyn Fetch) {
    let Decoded::Inst(inst) = Reader::new(code).decode(pc) else { return };
    let taken = match inst.code() {
        Code::Retnq => WORD,
        Code::Retnq_imm16 => WORD + u64::from(inst.immediate16()),
        Code::Call_rm64 => WORD.wrapping_neg(),
        _ => 0,
    };
    context.gpr[RSP] = context.gpr[RSP].wrapping_sub(taken);
}

/// The call that led to `target` and has pushed its return address, if it was one.
pub fn find_call(context: &ThreadContext, target: u64, code: &dyn Fetch) -> Option<u64> {
    /// Lengths of indirect calls.
    const LENGTHS: std::ops::RangeInclusive<u64> = 2..=10;
    let back = word(context.gpr[RSP])?;
    LENGTHS.rev().map(|length| back.wrapping_sub(length)).find(|&pc| match Reader::new(code).decode(pc) {
        Decoded::Inst(inst) => inst.next_ip() == back && call_target(context, &inst) == Some(target),
        _ => false,
    })
}

/// Where an indirect call led, given the state behind it.
fn call_target(context: &ThreadContext, inst: &Instruction) -> Option<u64> {
    let register = |register: Register, _: usize, _: usize| match register {
        Register::ES | Register::CS | Register::SS | Register::DS => Some(0),
        Register::FS => Some(context.fs_base),
        Register::GS => Some(context.gs_base),
        Register::RSP => Some(context.gpr[RSP].wrapping_add(WORD)),
        other if other.is_gpr64() => Some(context.gpr[other.number()]),
        other if other.is_gpr32() => Some(u64::from(context.gpr[other.number()] as u32)),
        _ => None,
    };
    match (inst.code(), inst.op0_kind()) {
        (Code::Call_rm64, OpKind::Register) => register(inst.op0_register(), 0, 0),
        (Code::Call_rm64, OpKind::Memory) => word(inst.virtual_address(0, 0, register)?),
        _ => None,
    }
}

fn word(address: u64) -> Option<u64> {
    let mut bytes = [0; WORD as usize];
    (memory::copy_in(address, &mut bytes) == bytes.len()).then_some(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp::GuestCode;

    const ASTRAY: u64 = 0x1234_0000_0000_0000;

    /// The offset in `code` of the call found when `returns` bytes of it have been executed, of which rsp is the stack.
    fn found(code: &[u8], returns: usize, registers: &[(usize, u64)]) -> Option<u64> {
        let mut bytes = vec![0x90; 16];
        bytes.extend(code);
        bytes.resize(64, 0x90);
        let start = bytes.as_ptr() as u64 + 16;
        let stack = [start + returns as u64, ASTRAY];
        let mut context = ThreadContext::new();
        context.gpr[RSP] = stack.as_ptr() as u64;
        for &(register, value) in registers {
            context.gpr[register] = value;
        }
        find_call(&context, ASTRAY, &GuestCode).map(|pc| pc - start)
    }

    #[test]
    fn calls_are_found_by_their_return_address_and_target() {
        let memory = [0, ASTRAY];
        let at = memory.as_ptr() as u64;
        assert_eq!(found(&[0xff, 0xd0], 2, &[(0, ASTRAY)]), Some(0), "call rax");
        assert_eq!(found(&[0xff, 0xd0], 2, &[(0, 7)]), None);
        assert_eq!(found(&[0x41, 0xff, 0xd0], 3, &[(8, ASTRAY)]), Some(0), "call r8");
        assert_eq!(found(&[0xff, 0x53, 8], 3, &[(3, at)]), Some(0), "call [rbx + 8]");
        assert_eq!(found(&[0xff, 0x53, 0], 3, &[(3, at)]), None);
        assert_eq!(found(&[0xff, 0x14, 0x24], 3, &[]), Some(0), "call [rsp]");
        assert_eq!(found(&[0xff, 0xe0], 2, &[(0, ASTRAY)]), None, "jmp rax");
        assert_eq!(found(&[0xc3], 1, &[(0, ASTRAY)]), None, "ret");
    }

    #[test]
    fn the_stack_is_as_before() {
        let behind = |code: &[u8]| {
            let mut code = code.to_vec();
            code.resize(16, 0x90);
            let mut context = ThreadContext::new();
            context.gpr[RSP] = 0x1000;
            undo(&mut context, code.as_ptr() as u64, &GuestCode);
            context.gpr[RSP]
        };
        assert_eq!(behind(&[0xc3]), 0xff8);
        assert_eq!(behind(&[0xc2, 0x10, 0]), 0xfe8);
        assert_eq!(behind(&[0xff, 0xd0]), 0x1008);
        assert_eq!(behind(&[0xff, 0xe0]), 0x1000);
    }
}
