//! Ways out of native code into guest code in place.
//!
//! ```text
//!  0   mov  dword gs:[dispatch_selector], 0x101   system calls are blocked from now on
//! 12   jmp  PC                                    or: jmp [rip + 6]
//! 24   PC
//! ```
//!
//! The same store sets `went_in_place`, which is the next byte.
//!
//! A way out begins in canonical state and changes no register, so each offset stands for the guest
//! state at PC. They lie behind the stubs of system calls ([`super::call_stubs`]) and stay for good:
//! a thread that a signal has not interrupted may be in one at any time.
//!
//! Data: the slots, each written once, under the lock of the fragments, before anything leads
//! there.
//!
//! Example: a trace leaves to 0x401080 by the way out of 0x401080. A signal arrives before its
//! `jmp`: the guest's state is rip = 0x401080, and the registers are the guest's.

use dynasour_guest::context::offset;

use super::call_stubs;
use crate::changes::host;

/// Bytes of a way out and its alignment.
const SLOT: u64 = 32;
/// The offset of PC.
const PC: u64 = 24;
/// The offset of the jump.
const JUMP: u64 = 12;

/// Makes way out number `number`, which leads to `pc`. Returns its address; none if there is no
/// room, or if memory cannot be written.
pub fn make(number: u32, pc: u64) -> Option<u32> {
    let range = call_stubs::range();
    let at = range.start + call_stubs::WAYS_OUT + u64::from(number) * SLOT;
    if range.is_empty() || at + SLOT > range.end {
        return None;
    }
    let mut code = Vec::with_capacity(SLOT as usize);
    code.extend([0x65, 0xc7, 0x04, 0x25]);
    code.extend((offset::DISPATCH_SELECTOR as u32).to_le_bytes());
    code.extend([super::in_place::BLOCK, 1, 0, 0]);
    match i32::try_from(pc.wrapping_sub(at + JUMP + 5) as i64) {
        Ok(distance) => {
            code.push(0xe9);
            code.extend(distance.to_le_bytes());
        }
        Err(_) => {
            code.extend([0xff, 0x25]);
            code.extend(((PC - JUMP - 6) as u32).to_le_bytes());
        }
    }
    code.resize(PC as usize, 0xcc);
    code.extend(pc.to_le_bytes());
    // The slot is in the range, and nothing leads to it yet.
    let written = host::write_code(at, &code);
    written.then(|| u32::try_from(at).ok()).flatten()
}

/// The PC of the way out that a thread executes at this offset of the range; none if there are none
/// so far up. Async-signal-safe.
pub fn pc_at(offset: u64) -> Option<u64> {
    let slot = (offset / SLOT * SLOT).checked_sub(call_stubs::WAYS_OUT)?;
    let at = call_stubs::range().start + call_stubs::WAYS_OUT + slot + PC;
    // SAFETY: the thread executes this way out, so it is complete.
    Some(unsafe { (at as *const u64).read() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    #[test]
    fn a_way_out_blocks_calls_and_leads_to_its_pc() {
        call_stubs::map_once();
        for (number, pc) in [(0, 0x40_1080u64), (1, 0x7fff_1234_5678)] {
            let at = u64::from(make(number, pc).expect("room"));
            // SAFETY: the way out's bytes.
            let code = unsafe { std::slice::from_raw_parts(at as *const u8, PC as usize) };
            let mut decoder = Decoder::with_ip(64, code, at, DecoderOptions::NONE);
            let block = decoder.decode();
            assert_eq!(block.code(), iced_x86::Code::Mov_rm32_imm32);
            assert_eq!(block.immediate32(), 0x101);
            let jump = decoder.decode();
            assert_eq!(jump.ip(), at + JUMP);
            if number == 0 {
                assert_eq!(jump.near_branch_target(), pc);
            } else {
                assert_eq!(jump.ip_rel_memory_address(), at + PC);
            }
            for offset in [0, JUMP] {
                let state = call_stubs::guest_state(at + offset, 0).expect("a way out");
                assert_eq!((state.rip, state.rax, state.rcx), (pc, None, None));
            }
        }
        let slots = (1 << 20) / SLOT as u32;
        assert_eq!(make(slots, 0x1000), None);
    }
}
