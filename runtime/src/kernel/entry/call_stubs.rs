//! Stubs for the system calls of guest code that runs in place.
//!
//! A site `mov eax, NR; syscall` of the guest's is rewritten to a jump to a stub of its own
//! (`crate::dispatch::call_sites`). A stub *makes* a call that is passed on to the kernel unchanged,
//! or *brings* a call to the runtime without a signal. All stubs lie in one range, from which syscall
//! user dispatch lets calls pass. A stub that makes the call:
//!
//! ```text
//!  0   mov  eax, NR                    the guest's own instruction
//!  5   syscall                         allowed here
//!  7   lea  rcx, [rax + EFAULT]        0 if the call has failed with EFAULT
//! 11   jrcxz  25
//! 13   mov  rcx, SITE + 7              what the guest's own syscall leaves there
//! 20   jmp  SITE + 7
//! 25   mov  ecx, [CLOSED]
//! 32   jrcxz  13
//! 34   mov  eax, NR                    a guarded page may be the reason: again, by the runtime
//! 39   jmp  SITE + 5
//! 60   SITE
//! ```
//!
//! A stub that brings the call to the runtime does what the signal handler does for a call that
//! traps ([`super::in_place`]):
//!
//! ```text
//!  0   mov  eax, NR                    the guest's own instruction
//!  5   mov  gs:[in_place_left], CALL
//! 18   mov  gs:[in_place_rip], SITE + 7
//! 31   mov  gs:[in_place_flags], 0
//! 44   mov  gs:[dispatch_selector], 0  system calls are allowed from now on
//! 53   jmp  [LEFT]                     stores the guest's registers
//! 60   SITE
//! ```
//!
//! No instruction changes flags, so r11 and the flags are what a call leaves. Each offset stands
//! for one exact state of the guest at the site ([`guest_state`]): a signal may interrupt a stub
//! anywhere, and the kernel restarts an interrupted call at offset 5 as it would at the site. In a
//! stub of the second kind the state behind the `mov` is that before the guest's own `syscall`.
//!
//! Data: the range, mapped once before the guest's first instruction and inherited by forked
//! children at the same addresses. It is unmapped if the guest wants its addresses. The first page
//! is data. It holds two words CLOSED: if one is nonzero, calls that have failed must come to the
//! runtime; and LEFT, the address of the host's code. One word CLOSED is for calls that read memory,
//! and is nonzero, too, where the memory may be hidden from them ([`crate::changes::hiding`]); the
//! other one is for the rest. They are written
//! under the lock of `crate::dispatch::call_sites`, read by signal handlers without it. Invariant:
//! nothing in the range but the five bytes of NR and the addresses of SITE derives from the guest.
//!
//! Example: a `getppid` at 0x401000 has a stub at 0x2f001000. A signal arrives at 0x2f001007: the
//! guest's state is rip = 0x401007, rcx = 0x401007, rax the result.

use dynasour_guest::space::PAGE;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::in_place::{ALLOW, Left};
use super::ways_out;
use crate::changes::{host, inputs};
use crate::protection_keys;
use dynasour_guest::context::offset;

/// Bytes of a stub and its alignment.
const SLOT: u64 = 64;
/// Bytes of the range (guess: some 16,000 sites; a program with more has its other calls trapped).
/// Behind the stubs there are the ways out ([`super::ways_out`]).
const SIZE: u64 = 2 << 20;
/// The offset of the ways out.
pub const WAYS_OUT: u64 = 1 << 20;
/// Where the range is tried first, and the distance of the addresses tried after that: in the low 2
/// GiB, as all guest images, apart from the code cache.
const FIRST: u64 = 0x2f00_0000;
const STEP: u64 = 0x0100_0000;
const LAST: u64 = 0x7000_0000;
/// Bytes of `mov eax, imm32`.
pub const MOV: u64 = 5;
/// Bytes of `syscall`.
pub const SYSCALL: u64 = 2;
/// The offset of the site's address in a stub.
const SITE: u64 = 60;
/// The offset from which on the call is to be made by the runtime.
const REPEATED: u64 = 34;
/// The offset in the range of the address of the host's code that stores the guest's registers.
const LEFT: u64 = 8;
/// The first byte behind the `mov` of a stub that brings the call to the runtime: a prefix.
const BRINGS: u8 = 0x65;

/// What a stub does with the call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It makes the call.
    Makes,
    /// It brings the call to the runtime.
    Brings,
}

/// The offsets of the words CLOSED: for calls that only write memory, and for others.
const WRITING: u32 = 0;
const READING: u32 = 4;

/// The start of the range; 0 if there is none.
static START: AtomicU64 = AtomicU64::new(0);

/// The range of the stubs; empty if there is none.
pub fn range() -> Range<u64> {
    match START.load(Ordering::Relaxed) {
        0 => 0..0,
        start => start..start + SIZE,
    }
}

/// Maps the range. Without memory for it there are no stubs.
pub fn map() {
    for at in (FIRST..LAST).step_by(STEP as usize) {
        // SAFETY: a fresh mapping where nothing is mapped.
        let mapped = unsafe {
            libc::mmap(
                at as *mut libc::c_void,
                SIZE as usize,
                libc::PROT_READ | libc::PROT_EXEC,
                libc::MAP_PRIVATE
                    | libc::MAP_ANONYMOUS
                    | libc::MAP_NORESERVE
                    | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        if mapped as u64 == at {
            // SAFETY: the first page of the new mapping.
            unsafe {
                libc::mprotect(mapped, PAGE as usize, libc::PROT_READ | libc::PROT_WRITE);
                ((at + LEFT) as *mut u64).write(super::in_place::left_address());
            }
            START.store(at, Ordering::Relaxed);
            return;
        }
    }
}

/// Unmaps the range. No thread executes a stub, and no site leads to one.
pub fn unmap() {
    let range = range();
    START.store(0, Ordering::Relaxed);
    // SAFETY: the range is this module's own, and not used any more.
    unsafe { libc::munmap(range.start as *mut libc::c_void, (range.end - range.start) as usize) };
}

/// The word CLOSED at this offset. There is a range.
fn closed(offset: u32) -> &'static AtomicU32 {
    // SAFETY: the range is mapped; its first page is only used for these words.
    unsafe { AtomicU32::from_ptr((START.load(Ordering::Relaxed) + u64::from(offset)) as *mut u32) }
}

/// From now on calls of stubs that fail with EFAULT are made again by the runtime.
pub fn close() {
    if !range().is_empty() {
        closed(WRITING).store(1, Ordering::SeqCst);
        closed(READING).store(1, Ordering::SeqCst);
    }
}

/// Makes stub number `n` for the call `nr` whose `mov` stands at `site`, in the low 2 GiB. Returns
/// its address; none if there is no room, or if memory cannot be written.
pub fn make(n: u64, site: u32, nr: u32, kind: Kind) -> Option<u64> {
    let range = range();
    let at = range.start + PAGE + n * SLOT;
    if range.is_empty() || at + SLOT > range.start + WAYS_OUT {
        return None;
    }
    let mut code = match kind {
        Kind::Makes => making(at, site, nr),
        Kind::Brings => bringing(site, nr),
    };
    code.resize(SITE as usize, 0xcc);
    code.extend(site.to_le_bytes());
    // The slot is in the range, and nothing leads to it yet.
    host::write_code(at, &code).then_some(at)
}

/// The code of a stub that brings the call to the runtime.
fn bringing(site: u32, nr: u32) -> Vec<u8> {
    let behind = site + (MOV + SYSCALL) as u32;
    let mut code = vec![0xb8];
    code.extend(nr.to_le_bytes());
    for (field, value) in [
        (offset::IN_PLACE_LEFT, Left::Brought as u32),
        (offset::IN_PLACE_RIP, behind),
        (offset::IN_PLACE_FLAGS, 0),
    ] {
        code.extend([BRINGS, 0x48, 0xc7, 0x04, 0x25]);
        code.extend((field as u32).to_le_bytes());
        code.extend(value.to_le_bytes());
    }
    code.extend([0x65, 0xc6, 0x04, 0x25]);
    code.extend((offset::DISPATCH_SELECTOR as u32).to_le_bytes());
    code.push(ALLOW);
    code.extend([0xff, 0x24, 0x25]);
    code.extend(((range().start + LEFT) as u32).to_le_bytes());
    code
}

/// The code of a stub at `at` that makes the call.
fn making(at: u64, site: u32, nr: u32) -> Vec<u8> {
    let behind = u64::from(site) + MOV + SYSCALL;
    let jump = |from: u64, to: u64| (to as i64 - (at + from + 5) as i64) as i32;
    let mut code: Vec<u8> = Vec::with_capacity(SLOT as usize);
    code.push(0xb8);
    code.extend(nr.to_le_bytes());
    code.extend([0x0f, 0x05]);
    code.extend([0x48, 0x8d, 0x48, libc::EFAULT as u8]);
    code.extend([0xe3, 25 - 13]);
    code.extend([0x48, 0xc7, 0xc1]);
    code.extend((behind as u32).to_le_bytes());
    code.push(0xe9);
    code.extend(jump(20, behind).to_le_bytes());
    code.extend([0x8b, 0x0c, 0x25]);
    let word = if inputs::may_be_hidden(i64::from(nr)) { READING } else { WRITING };
    if protection_keys::exist() {
        closed(READING).store(1, Ordering::SeqCst);
    }
    code.extend((range().start as u32 + word).to_le_bytes());
    code.extend([0xe3, (13i8 - 34) as u8]);
    code.push(0xb8);
    code.extend(nr.to_le_bytes());
    code.push(0xe9);
    code.extend(jump(39, u64::from(site) + MOV).to_le_bytes());
    code
}

/// If the thread was interrupted at `rip` by a signal that is not the guest's, and that has made
/// the call of a stub fail with EINTR: the guest's state before the call. Async-signal-safe.
pub fn before_call(rip: u64, rax: i64) -> Option<GuestState> {
    let range = range();
    let stubs = range.start + PAGE..range.start + WAYS_OUT;
    let behind = MOV + SYSCALL;
    if rax != -i64::from(libc::EINTR) || !stubs.contains(&rip) || rip % SLOT != behind {
        return None;
    }
    // The state at the second `mov`, which is before a call, too.
    guest_state(rip - behind + REPEATED)
}

/// The guest's state where a stub was interrupted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestState {
    /// The guest's rip.
    pub rip: u64,
    /// Its rax, if that differs from the register.
    pub rax: Option<u64>,
    /// Its rcx, if that differs from the register.
    pub rcx: Option<u64>,
}

/// The guest's state if the thread was interrupted in a stub or in a way out at `rip`.
/// Async-signal-safe.
pub fn guest_state(rip: u64) -> Option<GuestState> {
    let range = range();
    if !range.contains(&rip) {
        return None;
    }
    if let Some(pc) = ways_out::pc_at(rip - range.start) {
        return Some(GuestState { rip: pc, rax: None, rcx: None });
    }
    let offset = (rip - range.start) % SLOT;
    // SAFETY: the thread executes this stub, so it is complete.
    let (site, nr, brings) = unsafe {
        let stub = rip - offset;
        let site = ((stub + SITE) as *const u32).read();
        let nr = ((stub + 1) as *const u32).read_unaligned();
        (site, nr, ((stub + MOV) as *const u8).read() == BRINGS)
    };
    let (site, nr) = (u64::from(site), Some(u64::from(nr)));
    let behind = site + MOV + SYSCALL;
    Some(match offset {
        0 => GuestState { rip: site, rax: None, rcx: None },
        _ if brings => GuestState { rip: site + MOV, rax: None, rcx: None },
        5 => GuestState { rip: site + MOV, rax: None, rcx: None },
        REPEATED.. => GuestState { rip: site + MOV, rax: nr, rcx: Some(behind) },
        _ => GuestState { rip: behind, rax: None, rcx: Some(behind) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, FlowControl};

    #[test]
    fn each_instruction_of_a_stub_has_a_state_of_the_site() {
        map();
        let (site, nr) = (0x40_1000u32, 110);
        let at = make(7, site, nr, Kind::Makes).expect("room");
        // SAFETY: the stub's bytes.
        let code = unsafe { std::slice::from_raw_parts(at as *const u8, SITE as usize) };
        let mut offsets = Vec::new();
        let mut jumps = Vec::new();
        for inst in Decoder::with_ip(64, code, at, DecoderOptions::NONE) {
            if inst.code() == iced_x86::Code::Int3 {
                break;
            }
            offsets.push(inst.ip() - at);
            if inst.flow_control() != FlowControl::Next && inst.is_jmp_near() {
                jumps.push(inst.near_branch_target());
            }
        }
        assert_eq!(offsets, [0, 5, 7, 11, 13, 20, 25, 32, 34, 39]);
        assert_eq!(jumps, [0x40_1007, 0x40_1005]);
        let rips = offsets.iter().map(|o| guest_state(at + o).expect("a stub").rip);
        let behind = 0x40_1007;
        assert!(rips.eq([
            0x40_1000, 0x40_1005, behind, behind, behind, behind, behind, behind, 0x40_1005,
            0x40_1005
        ]));
        assert_eq!(guest_state(at + 34).and_then(|state| state.rax), Some(110));
        assert_eq!(guest_state(range().end), None);
        assert_eq!(before_call(at + 7, -4), guest_state(at + 34));
        assert_eq!((before_call(at + 7, -3), before_call(at + 5, -4)), (None, None));
        assert!(make(WAYS_OUT / SLOT, site, nr, Kind::Makes).is_none());
        assert_eq!(closed(WRITING).load(Ordering::Relaxed), 0);
    }
    #[test]
    fn a_stub_that_brings_a_call_has_the_state_before_it() {
        map();
        let (site, nr) = (0x40_1000u32, 9);
        let at = make(8, site, nr, Kind::Brings).expect("room");
        // SAFETY: the stub's bytes.
        let code = unsafe { std::slice::from_raw_parts(at as *const u8, SITE as usize) };
        let decoded: Vec<_> =
            Decoder::with_ip(64, code, at, DecoderOptions::NONE).into_iter().collect();
        let offsets: Vec<u64> = decoded.iter().map(|inst| inst.ip() - at).collect();
        assert_eq!(offsets, [0, 5, 18, 31, 44, 53]);
        assert_eq!(decoded[2].immediate32to64(), 0x40_1007);
        assert_eq!(decoded[5].memory_displacement64(), range().start + LEFT);
        let before = GuestState { rip: 0x40_1005, rax: None, rcx: None };
        assert_eq!(guest_state(at).map(|state| state.rip), Some(0x40_1000));
        assert!(offsets[1..].iter().all(|offset| guest_state(at + offset) == Some(before)));
    }
}
