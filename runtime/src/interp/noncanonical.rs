//! Indirect jumps, calls and returns to an address that is not canonical.
//!
//! The processor refuses such a transfer with a general protection fault, as it refuses a load from
//! such an address. A guest's signal handler therefore sees the state *before* the instruction.
//! Dynasour has taken the transfer already when it notices, so it must go back:
//!
//! * The interpreter knows which instruction it has just executed, and undoes that one.
//! * Native code leaves for the runtime with rip at the target. The runtime learns which
//!   instruction led there only once the guest has a handler that could see the difference
//!   ([`dynasour_emitter::Emitter::name_transfers`]); it then undoes that instruction.
//!
//! The transfer is undone ([`undo_transfer`]) and not executed again, because a call may have
//! overwritten its own target by pushing the return address.
//!
//! The module owns no data. The guest thread that took the transfer calls it, without a lock.
//!
//! Example: `ret` at 0x1000 with 1 << 63 on the stack, rsp = 0x8000. After the transfer rip is 1 <<
//! 63 and rsp 0x8008. [`undo_transfer`] sets rip to 0x1000 and rsp to 0x8000, and the guest gets
//! SIGSEGV there.

use dynasour_guest::ThreadContext;
use dynasour_guest::decode::{Decoded, Fetch, Reader};
use iced_x86::Code;

use crate::memory;

/// Number of the stack pointer among the general registers.
const RSP: usize = 4;
/// Bytes of a return address (manual: 64-bit mode).
const WORD: u64 = 8;

/// Whether fetching from `address` raises a general protection fault.
///
/// Addresses that 48 bits can hold are canonical everywhere. Whether longer ones are depends on the
/// number of page table levels that the kernel has chosen, so the processor is asked by a read.
pub fn is_noncanonical(address: u64) -> bool {
    /// Exception number of the general protection fault (manual: Intel SDM vol. 3, "Interrupt 13").
    const PROTECTION: u64 = 13;
    /// Bits of an address with four levels of page tables (manual: Intel SDM vol. 1, 3.3.7.1). Were
    /// it larger, a non-canonical target would be taken for a canonical one.
    const FEWEST_BITS: u32 = 48;
    let unused = u64::BITS - FEWEST_BITS;
    (address as i64) << unused >> unused != address as i64
        && memory::fetch_code(address, &mut [0]) == 0
        && memory::last_fault().trapno == PROTECTION
}

/// The pc of the transfer that led to `context.rip`, if the processor would have refused it.
/// `transfer` is the pc of the last indirect transfer, if the native code names it.
pub fn refused_transfer(context: &ThreadContext, transfer: Option<u64>) -> Option<u64> {
    transfer.filter(|_| is_noncanonical(context.rip))
}

/// Sets rip and rsp to what they were before the indirect jump, call or return at `pc`.
pub fn undo_transfer(context: &mut ThreadContext, pc: u64, code: &dyn Fetch) {
    context.rip = pc;
    let Decoded::Inst(inst) = Reader::new(code).decode(pc) else { return };
    let popped = match inst.code() {
        Code::Retnq => WORD,
        Code::Retnq_imm16 => WORD + u64::from(inst.immediate16()),
        Code::Call_rm64 => WORD.wrapping_neg(),
        _ => 0,
    };
    context.gpr[RSP] = context.gpr[RSP].wrapping_sub(popped);
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
            undo_transfer(&mut context, code.as_ptr() as u64, &GuestCode);
            context.gpr[RSP]
        };
        assert_eq!(behind(&[0xc3]), 0xff8);
        assert_eq!(behind(&[0xc2, 0x10, 0]), 0xfe8);
        assert_eq!(behind(&[0xff, 0xd0]), 0x1008);
        assert_eq!(behind(&[0xff, 0xe0]), 0x1000);
    }
}
