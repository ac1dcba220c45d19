//! Stubs for the system calls of guest code that runs in place.
//!
//! A *site* is a `syscall` and an instruction beside it. It is rewritten to a jump to a stub of
//! its own (`crate::dispatch::call_sites`). A stub *makes* a call that is passed on to the kernel
//! unchanged, or *brings* a call to the runtime without a signal. All stubs lie in one range, from
//! which syscall user dispatch lets calls pass. CALL is the address of the site's `syscall`. A stub
//! that makes the call:
//!
//! ```text
//!          BEFORE                      a copy of the instruction before the call, if displaced
//!   ┌ ─ ─  lea  rcx, [rax - NR]        the decision: is it the call that this stub makes?
//!   │      jrcxz make
//!   │      mov  rcx, CALL + 2          no: AGAIN, or the site's next stub
//!   └ ─ ─  jmp  MISS
//!   make:  syscall                     allowed here
//!          lea  rcx, [rax + EFAULT]    0 if the call has failed with EFAULT
//!          jrcxz fault
//!   go:    mov  rcx, CALL + 2          what the guest's own syscall leaves there
//!          AFTER                       a copy of the instruction behind the call, if displaced
//!          jmp  CALL + 2 + AFTER
//!   fault: mov  ecx, [CLOSED]
//!          jrcxz go
//!          mov  eax, NR                a guarded page may be the reason: again, by the runtime
//!          jmp  AGAIN
//! ```
//!
//! If BEFORE alone sets eax, and to NR, there is no decision. AFTER is there if the jump to the stub
//! has overwritten bytes behind the call. AGAIN is CALL, unless the jump to the stub stands there;
//! then it is another stub of the site, which brings the call to the runtime.
//!
//! A stub that brings the call to the runtime does what the signal handler does for a call that
//! traps ([`super::in_place`]):
//!
//! ```text
//!          BEFORE
//!          mov  gs:[in_place_left], Brought    or BroughtInside, if AFTER is displaced
//!          mov  gs:[in_place_rip], CALL + 2
//!          mov  gs:[in_place_flags], 0
//!          mov  gs:[dispatch_selector], 0   system calls are allowed from now on
//!          jmp  [LEFT]                      stores the guest's registers
//! ```
//!
//! Apart from the copies no instruction changes flags, so r11 and the flags are what a call leaves.
//! Each offset stands for one exact state of the guest at the site ([`guest_state`]): a signal may
//! interrupt a stub anywhere, and the kernel restarts an interrupted call at `make` as it would at
//! the site. From the decision's second instruction on, the guest's own rcx is lost; the state is
//! then that of a call that the kernel is about to restart, where rcx is CALL + 2 already. In a stub
//! that brings a call the state behind BEFORE is that before the guest's own `syscall`.
//!
//! Data: the range, mapped once before the guest's first instruction and inherited by forked
//! children at the same addresses. It is unmapped if the guest wants its addresses. The first page
//! is data. It holds two words CLOSED: if one is nonzero, calls that have failed must come to the
//! runtime; and LEFT, the address of the host's code. One word CLOSED is for calls that read memory,
//! and is nonzero, too, where the memory may be hidden from them ([`crate::changes::hiding`]); the
//! other one is for the rest. They are written under the lock of `crate::dispatch::call_sites`, and
//! read by stubs without it. Invariant: what derives from the guest in the range is the number, addresses of the site, and the two
//! copies, which are instructions that only compute and move (`crate::dispatch::call_sites`).
//!
//! Example: a `mov eax, 110; syscall` at 0x401000 has a stub at 0x2f001000. A signal arrives at
//! 0x2f001007: the guest's state is rip = 0x401007, rcx = 0x401007, rax the result.

use dynasour_guest::space::{Layout, PAGE};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::in_place::{ALLOW, Left};
use super::ways_out;
use crate::changes::{host, inputs};
use crate::protection_keys;
use dynasour_guest::context::offset;

/// Bytes of a stub and its alignment.
const SLOT: u64 = 128;
/// Bytes of the range (guess: some 8,000 sites; a program with more has its other calls trapped).
/// Behind the stubs there are the ways out ([`super::ways_out`]).
const SIZE: u64 = 2 << 20;
/// The offset of the ways out.
pub const WAYS_OUT: u64 = 1 << 20;
/// The distance of the addresses that are tried ([`Layout::stubs`]): in the low 2 GiB, as all guest images.
const STEP: u64 = 0x0100_0000;
const LAST: u64 = 0x7fff_0000;
/// Bytes of `syscall`.
pub const SYSCALL: u64 = 2;
/// Bytes of the decision, and its offsets in it.
const DECISION: u64 = 21;
const DECIDED: u64 = 7;
const MISSED: u64 = 9;
/// Bytes from the call to AFTER, `syscall` included.
const TO_AFTER: u64 = 15;
/// Bytes of `jmp rel32`.
const JUMP: u64 = 5;
/// Bytes from `fault` to the second setting of the number.
const TO_REPEATED: u64 = 9;
/// The offsets of a stub's record: bytes of BEFORE, bytes of AFTER, its form, NR, and the address of
/// the site.
const BEFORE_LENGTH: u64 = 117;
const AFTER_LENGTH: u64 = 118;
const FORM: u64 = 119;
const NUMBER: u64 = 120;
const SITE: u64 = 124;
/// The bits of the form: there is a decision; the stub brings the call to the runtime.
const DECIDES_BIT: u8 = 1;
const BRINGS_BIT: u8 = 2;

/// The offset in the range of the address of the host's code that stores the guest's registers.
const LEFT: u64 = 8;
/// The offsets of the words CLOSED: for calls that only write memory, and for others.
const WRITING: u32 = 0;
const READING: u32 = 4;

/// What a stub does with the call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It makes the call.
    Makes,
    /// It brings the call to the runtime.
    Brings,
}

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
    for at in (Layout::current().stubs()..=LAST - SIZE).step_by(STEP as usize) {
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
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: the first page of the new mapping, which nothing refers to.
            unsafe {
                if libc::mprotect(mapped, PAGE as usize, rights) != 0 {
                    libc::munmap(mapped, SIZE as usize);
                    return;
                }
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

/// What a stub does.
#[derive(Clone, Copy, Debug)]
pub struct Stub<'a> {
    /// The address of the first displaced instruction, in the low 2 GiB.
    pub site: u32,
    /// The instruction before the call, if that is displaced: it does not depend on its address, and
    /// goes on to the next one.
    pub before: &'a [u8],
    /// What the stub does with the call.
    pub kind: Kind,
    /// The number of the call.
    pub number: u32,
    /// Where the guest goes on if rax has another number ([`decision`], or `again`); none if the
    /// instruction before the call sets the number.
    pub miss: Option<u64>,
    /// Where the runtime gets the call: the guest's own `syscall`, or a stub that brings it.
    pub again: u64,
    /// The instruction behind the call that the jump to the stub has displaced, as `before`; may be
    /// empty.
    pub after: &'a [u8],
}

/// Makes stub number `n`. Returns its address; none if there is no room, or if memory cannot be
/// written.
pub fn make(n: u64, stub: &Stub) -> Option<u64> {
    let range = range();
    let at = range.start + PAGE + n * SLOT;
    if range.is_empty() || at + SLOT > range.start + WAYS_OUT {
        return None;
    }
    let mut code = match stub.kind {
        Kind::Makes => making(at, stub),
        Kind::Brings => bringing(stub),
    };
    debug_assert!(code.len() as u64 <= BEFORE_LENGTH, "instructions have at most 15 bytes");
    code.resize(BEFORE_LENGTH as usize, 0xcc);
    let decides = stub.miss.map_or(0, |_| DECIDES_BIT);
    let brings = if stub.kind == Kind::Brings { BRINGS_BIT } else { 0 };
    code.extend([stub.before.len() as u8, stub.after.len() as u8, decides | brings]);
    code.extend(stub.number.to_le_bytes());
    code.extend(stub.site.to_le_bytes());
    // The slot is in the range, and nothing leads to it yet.
    host::write_code(at, &code).then_some(at)
}

/// The code of a stub that brings the call to the runtime.
fn bringing(stub: &Stub) -> Vec<u8> {
    let behind = stub.site + (stub.before.len() as u64 + SYSCALL) as u32;
    let left = if stub.after.is_empty() { Left::Brought } else { Left::BroughtInside };
    let mut code = stub.before.to_vec();
    for (field, value) in [
        (offset::IN_PLACE_LEFT, left as u32),
        (offset::IN_PLACE_RIP, behind),
        (offset::IN_PLACE_FLAGS, 0),
    ] {
        code.extend([0x65, 0x48, 0xc7, 0x04, 0x25]);
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
fn making(at: u64, stub: &Stub) -> Vec<u8> {
    let call = u64::from(stub.site) + stub.before.len() as u64;
    let behind = call + SYSCALL;
    let number = stub.number.to_le_bytes();
    let mut code: Vec<u8> = Vec::with_capacity(SLOT as usize);
    let jump = |code: &mut Vec<u8>, to: u64| {
        let end = at + code.len() as u64 + JUMP;
        code.push(0xe9);
        code.extend((to.wrapping_sub(end) as i32).to_le_bytes());
    };
    let set_rcx = |code: &mut Vec<u8>| {
        code.extend([0x48, 0xc7, 0xc1]);
        code.extend((behind as u32).to_le_bytes());
    };
    code.extend(stub.before);
    if let Some(miss) = stub.miss {
        code.extend([0x48, 0x8d, 0x88]);
        code.extend((stub.number as i32).wrapping_neg().to_le_bytes());
        code.extend([0xe3, (DECISION - MISSED) as u8]);
        set_rcx(&mut code);
        jump(&mut code, miss);
    }
    code.extend([0x0f, 0x05]);
    code.extend([0x48, 0x8d, 0x48, libc::EFAULT as u8]);
    code.extend([0xe3, (7 + stub.after.len() as u64 + JUMP) as u8]);
    let go = code.len();
    set_rcx(&mut code);
    code.extend(stub.after);
    jump(&mut code, behind + stub.after.len() as u64);
    code.extend([0x8b, 0x0c, 0x25]);
    let word = if inputs::may_be_hidden(i64::from(stub.number)) { READING } else { WRITING };
    if protection_keys::exist() {
        closed(READING).store(1, Ordering::SeqCst);
    }
    code.extend((range().start as u32 + word).to_le_bytes());
    let end = code.len() + 2;
    code.extend([0xe3, (go as i64 - end as i64) as u8]);
    code.push(0xb8);
    code.extend(number);
    jump(&mut code, stub.again);
    code
}

/// The address of the decision of the stub at `stub`, whose instruction before the call has this
/// length.
pub fn decision(stub: u64, before: u64) -> u64 {
    stub + before
}

/// What is recorded of a stub.
struct Record {
    /// The stub's address.
    at: u64,
    /// The addresses of the first displaced instruction, of the `syscall`, and behind that.
    site: u64,
    call: u64,
    behind: u64,
    number: u64,
    decides: bool,
    brings: bool,
    /// The offsets of the stub's `syscall` and of what follows AFTER.
    make: u64,
    after_end: u64,
}

/// The record of the stub that a thread executes at `rip`; none if it executes none.
/// Async-signal-safe.
fn record(rip: u64) -> Option<Record> {
    let range = range();
    if !(range.start + PAGE..range.start + WAYS_OUT).contains(&rip) {
        return None;
    }
    let at = rip / SLOT * SLOT;
    // SAFETY: the thread executes this stub, so it is complete.
    let bytes = unsafe { &*(at as *const [u8; SLOT as usize]) };
    let byte = |offset: u64| u64::from(bytes[offset as usize]);
    let word = |offset: u64| (0..4).fold(0, |word, n| word | byte(offset + n) << (8 * n));
    let before = byte(BEFORE_LENGTH);
    let form = bytes[FORM as usize];
    let (decides, brings) = (form & DECIDES_BIT != 0, form & BRINGS_BIT != 0);
    let (site, make) = (word(SITE), before + if decides { DECISION } else { 0 });
    Some(Record {
        at,
        site,
        call: site + before,
        behind: site + before + SYSCALL,
        number: word(NUMBER),
        decides,
        brings,
        make,
        after_end: make + TO_AFTER + byte(AFTER_LENGTH),
    })
}

impl Record {
    /// The guest's state at `offset` of the stub. `rcx` is the register's value there.
    fn state(&self, offset: u64, rcx: u64) -> GuestState {
        let before = self.call - self.site;
        let (rip, rax, rcx) = if offset < before {
            (self.site + offset, None, None)
        } else if self.brings {
            (self.call, None, None)
        } else if offset < self.make {
            let is_lost = offset >= before + DECIDED;
            (self.call, None, is_lost.then_some(self.behind))
        } else if offset == self.make {
            // The kernel has come back here to restart the call: rcx is the stub's own.
            let is_restarted = rcx == self.at + self.make + SYSCALL;
            (self.call, None, (self.decides || is_restarted).then_some(self.behind))
        } else if offset < self.make + TO_AFTER {
            (self.behind, None, Some(self.behind))
        } else if offset <= self.after_end {
            (self.behind + (offset - self.make - TO_AFTER), None, None)
        } else if offset < self.repeated() {
            // `fault`: AFTER has not been executed.
            (self.behind, None, Some(self.behind))
        } else {
            (self.call, Some(self.number), Some(self.behind))
        };
        GuestState { rip, rax, rcx }
    }

    /// The offset from which on the call is to be made by the runtime.
    fn repeated(&self) -> u64 {
        self.after_end + JUMP + TO_REPEATED
    }
}

/// If the thread was interrupted at `rip` by a signal that is not the guest's, and that has made
/// the call of a stub fail with EINTR: the guest's state before the call. Async-signal-safe.
pub fn before_call(rip: u64, rax: i64) -> Option<GuestState> {
    if rax != -i64::from(libc::EINTR) {
        return None;
    }
    let record = record(rip)?;
    // The state at the second setting of the number, which is before a call, too.
    (!record.brings && rip == record.at + record.make + SYSCALL)
        .then(|| record.state(record.repeated(), 0))
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

/// The guest's state if the thread was interrupted in a stub or in a way out at `rip`, with this
/// value of rcx. Async-signal-safe.
pub fn guest_state(rip: u64, rcx: u64) -> Option<GuestState> {
    let range = range();
    if !range.contains(&rip) {
        return None;
    }
    if let Some(pc) = ways_out::pc_at(rip - range.start) {
        return Some(GuestState { rip: pc, rax: None, rcx: None });
    }
    let record = record(rip)?;
    Some(record.state(rip - record.at, rcx))
}

/// As [`map`], once for all tests of this process, which run at the same time.
#[cfg(test)]
pub fn map_once() {
    static MAPPED: std::sync::Once = std::sync::Once::new();
    MAPPED.call_once(map);
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Code, Decoder, DecoderOptions, Instruction};

    /// The instructions of the stub at `at`.
    fn instructions(at: u64) -> Vec<Instruction> {
        // SAFETY: the stub's bytes.
        let code = unsafe { std::slice::from_raw_parts(at as *const u8, BEFORE_LENGTH as usize) };
        let decoder = Decoder::with_ip(64, code, at, DecoderOptions::NONE);
        decoder.into_iter().take_while(|inst| inst.code() != Code::Int3).collect()
    }

    /// The state of each instruction of the stub at `at`, with its text.
    fn states(at: u64, rcx: u64) -> Vec<(String, u64, Option<u64>, Option<u64>)> {
        let state = |inst: &Instruction| {
            let state = guest_state(inst.ip(), rcx).expect("a stub");
            (format!("{:?}", inst.mnemonic()), state.rip, state.rax, state.rcx)
        };
        instructions(at).iter().map(state).collect()
    }

    /// Where the jumps of the stub at `at` lead.
    fn jumps(at: u64) -> Vec<u64> {
        let is_jump = |inst: &Instruction| inst.is_jmp_near().then(|| inst.near_branch_target());
        instructions(at).iter().filter_map(is_jump).collect()
    }

    fn row(
        name: &str,
        rip: u64,
        rax: Option<u64>,
        rcx: Option<u64>,
    ) -> (String, u64, Option<u64>, Option<u64>) {
        (name.to_owned(), rip, rax, rcx)
    }

    #[test]
    fn each_instruction_of_a_stub_has_a_state_of_the_site() {
        map_once();
        let before = [0xb8, 110, 0, 0, 0];
        let stub = Stub {
            site: 0x40_1000,
            before: &before,
            kind: Kind::Makes,
            number: 110,
            miss: None,
            again: 0x40_1005,
            after: &[],
        };
        let at = make(7, &stub).expect("room");
        let (call, behind) = (0x40_1005, 0x40_1007);
        let lost = Some(behind);
        let all = [
            row("Mov", 0x40_1000, None, None),
            row("Syscall", call, None, None),
            row("Lea", behind, None, lost),
            row("Jrcxz", behind, None, lost),
            row("Mov", behind, None, lost),
            row("Jmp", behind, None, None),
            row("Mov", behind, None, lost),
            row("Jrcxz", behind, None, lost),
            row("Mov", call, Some(110), lost),
            row("Jmp", call, Some(110), lost),
        ];
        assert_eq!(states(at, 1), all);
        assert_eq!(jumps(at), [behind, call]);
        // A restarted call.
        let state = guest_state(at + 5, at + 7).expect("a stub");
        assert_eq!((state.rip, state.rcx), (call, lost));
        assert_eq!(guest_state(range().end, 0), None);
        let again = before_call(at + 7, -4).expect("ended by a signal");
        assert_eq!((again.rip, again.rax, again.rcx), (call, Some(110), lost));
        assert_eq!((before_call(at + 7, -3), before_call(at + 5, -4)), (None, None));
        assert!(make(WAYS_OUT / SLOT, &stub).is_none());
        assert_eq!(closed(WRITING).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_displaced_instruction_is_executed_behind_the_call() {
        map_once();
        // `xor eax, eax; syscall; cmp rax, -4096`.
        let after = [0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff];
        let stub = Stub {
            site: 0x40_2000,
            before: &[0x31, 0xc0],
            kind: Kind::Makes,
            number: 0,
            miss: None,
            again: 0x40_2002,
            after: &after,
        };
        let at = make(8, &stub).expect("room");
        let (call, behind) = (0x40_2002, 0x40_2004);
        let lost = Some(behind);
        let all = [
            row("Xor", 0x40_2000, None, None),
            row("Syscall", call, None, None),
            row("Lea", behind, None, lost),
            row("Jrcxz", behind, None, lost),
            row("Mov", behind, None, lost),
            row("Cmp", behind, None, None),
            row("Jmp", behind + 6, None, None),
            row("Mov", behind, None, lost),
            row("Jrcxz", behind, None, lost),
            row("Mov", call, Some(0), lost),
            row("Jmp", call, Some(0), lost),
        ];
        assert_eq!(states(at, 1), all);
        let found = instructions(at);
        assert_eq!(found[6].near_branch_target(), behind + 6);
        assert_eq!(found[3].near_branch_target(), found[7].ip(), "a failed call");
        assert_eq!(found[8].near_branch_target(), found[4].ip(), "not closed");
        let again = before_call(at + 4, -4).expect("ended by a signal");
        assert_eq!((again.rip, again.rax), (call, Some(0)));
    }

    #[test]
    fn a_stub_decides_by_the_number_in_rax() {
        map_once();
        // `mov r9, [rsp+8]; syscall`.
        let before = [0x4c, 0x8b, 0x4c, 0x24, 0x08];
        let (call, behind) = (0x40_3005, 0x40_3007);
        let stub = Stub {
            site: 0x40_3000,
            before: &before,
            kind: Kind::Makes,
            number: 39,
            miss: Some(call),
            again: call,
            after: &[],
        };
        let first = make(9, &stub).expect("room");
        let miss = Some(decision(first, 5));
        let at = make(10, &Stub { number: 318, miss, ..stub }).expect("room");
        let lost = Some(behind);
        let all = [
            row("Mov", 0x40_3000, None, None),
            row("Lea", call, None, None),
            row("Jrcxz", call, None, lost),
            row("Mov", call, None, lost),
            row("Jmp", call, None, lost),
            row("Syscall", call, None, lost),
            row("Lea", behind, None, lost),
            row("Jrcxz", behind, None, lost),
            row("Mov", behind, None, lost),
            row("Jmp", behind, None, None),
            row("Mov", behind, None, lost),
            row("Jrcxz", behind, None, lost),
            row("Mov", call, Some(318), lost),
            row("Jmp", call, Some(318), lost),
        ];
        assert_eq!(states(at, 1), all);
        let found = instructions(at);
        assert_eq!(found[1].memory_displacement64() as i64, -318);
        assert_eq!(found[2].near_branch_target(), found[5].ip());
        assert_eq!(Some(found[4].near_branch_target()), miss);
        assert_eq!(instructions(first)[4].near_branch_target(), call);
        assert_eq!(instructions(first)[1].ip(), first + 5);
        let again = before_call(found[6].ip(), -4).expect("ended by a signal");
        assert_eq!((again.rip, again.rax), (call, Some(318)));
    }

    #[test]
    fn a_stub_whose_patch_begins_with_the_call_has_another_bring_it_again() {
        map_once();
        // `syscall; cmp rax, -4096`.
        let (call, behind) = (0x40_5000, 0x40_5002);
        let brings = Stub {
            site: 0x40_5000,
            before: &[],
            kind: Kind::Brings,
            number: 39,
            miss: None,
            again: call,
            after: &[0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff],
        };
        let again = make(12, &brings).expect("room");
        let made = instructions(again);
        assert_eq!(made[0].immediate32(), Left::BroughtInside as u32);
        assert_eq!(made[1].immediate32(), behind as u32);
        let before = GuestState { rip: call, rax: None, rcx: None };
        assert!(made.iter().all(|inst| guest_state(inst.ip(), 0) == Some(before)));
        let makes = Stub { kind: Kind::Makes, miss: Some(again), again, ..brings };
        let at = make(13, &makes).expect("room");
        let lost = Some(behind);
        let all = [
            row("Lea", call, None, None),
            row("Jrcxz", call, None, lost),
            row("Mov", call, None, lost),
            row("Jmp", call, None, lost),
            row("Syscall", call, None, lost),
            row("Lea", behind, None, lost),
            row("Jrcxz", behind, None, lost),
            row("Mov", behind, None, lost),
            row("Cmp", behind, None, None),
            row("Jmp", behind + 6, None, None),
            row("Mov", behind, None, lost),
            row("Jrcxz", behind, None, lost),
            row("Mov", call, Some(39), lost),
            row("Jmp", call, Some(39), lost),
        ];
        assert_eq!(states(at, 1), all);
        assert_eq!(jumps(at), [again, behind + 6, again]);
    }

    #[test]
    fn a_stub_that_brings_a_call_has_the_state_before_it() {
        map_once();
        let before = [0xb8, 9, 0, 0, 0];
        let stub = Stub {
            site: 0x40_4000,
            before: &before,
            kind: Kind::Brings,
            number: 9,
            miss: None,
            again: 0x40_4005,
            after: &[],
        };
        let at = make(11, &stub).expect("room");
        let found = instructions(at);
        let offsets: Vec<u64> = found.iter().map(|inst| inst.ip() - at).collect();
        assert_eq!(offsets, [0, 5, 18, 31, 44, 53]);
        assert_eq!(found[2].immediate32to64(), 0x40_4007);
        assert_eq!(found[5].memory_displacement64(), range().start + LEFT);
        let before = GuestState { rip: 0x40_4005, rax: None, rcx: None };
        assert_eq!(guest_state(at, 0).map(|state| state.rip), Some(0x40_4000));
        assert!(offsets[1..].iter().all(|offset| guest_state(at + offset, 0) == Some(before)));
        assert_eq!(before_call(at + 7, -4), None);
    }
}
