//! Jumps, calls and returns to what is no address (not canonical): the processor refuses them as it
//! does a load from there, so that a handler finds the state before the instruction, where here the
//! target has been taken already.
//!
//! The interpreter knows which instruction it was. Native code leaves for the runtime at the
//! target, which knows as soon as the guest has a handler that could see it
//! ([`dynasour_emitter::Emitter::name_transfers`]), goes back and refuses it there. It is not done
//! again: a call may have pushed its return address over what it goes through.

use dynasour_guest::ThreadContext;
use dynasour_guest::decode::{Decoded, Fetch, Reader};
use iced_x86::Code;

use crate::memory;

const RSP: usize = 4;
/// Bytes of a return address.
const WORD: u64 = 8;

/// Whether fetching from `address` is a general protection fault: how many bits of an address count
/// is the kernel's choice.
pub fn is_astray(address: u64) -> bool {
    const PROTECTION: u64 = 13;
    const FEWEST_BITS: u32 = 48;
    let unused = u64::BITS - FEWEST_BITS;
    (address as i64) << unused >> unused != address as i64
        && memory::fetch_code(address, &mut [0]) == 0
        && memory::last_fault().trapno == PROTECTION
}

/// The transfer that led to `rip`, if that is no address.
pub fn origin(context: &ThreadContext, transfer: Option<u64>) -> Option<u64> {
    transfer.filter(|_| is_astray(context.rip))
}

/// Goes back to before the indirect jump, call or return at `pc`.
pub fn undo(context: &mut ThreadContext, pc: u64, code: &dyn Fetch) {
    context.rip = pc;
    let Decoded::Inst(inst) = Reader::new(code).decode(pc) else { return };
    let taken = match inst.code() {
        Code::Retnq => WORD,
        Code::Retnq_imm16 => WORD + u64::from(inst.immediate16()),
        Code::Call_rm64 => WORD.wrapping_neg(),
        _ => 0,
    };
    context.gpr[RSP] = context.gpr[RSP].wrapping_sub(taken);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp::GuestCode;

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
