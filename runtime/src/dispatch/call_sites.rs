//! Sites of system calls in guest code that runs in place: which are hot, and which are rewritten
//! to jump to a stub (`crate::kernel::entry::call_stubs`).
//!
//! ```text
//!   trapped n times ──► observed ──► patched ──► taken back: its code is about to change
//!                          ▲            ├──────► all taken back, once: calls that may write memory
//!                          └────────────┤        must come to the runtime
//!                                       └──────► all taken back, for good: all calls must
//! ```
//!
//! A *site* is a `syscall` and the instructions beside it that the patch displaces. The patch takes
//! five bytes:
//!
//! | it begins with | and also overwrites | example |
//! | --- | --- | --- |
//! | 5 bytes or more before the `syscall` | nothing | `mov eax, 110` in glibc's `getppid` |
//! | the `syscall` | 3 bytes of the instruction behind | `xor eax, eax; syscall; cmp rax, -4096` in `read` |
//! | 4 or 3 bytes before it | bytes of the `syscall`, which then traps | `mov rdi, rbx; syscall; ret` |
//! | 2 bytes before it | the `syscall`, and the first byte of the instruction behind | `mov edi, edi; syscall; nop` |
//!
//! The stub executes copies of the displaced instructions. So these must be instructions that do
//! the same anywhere ([`is_movable`]).
//!
//! The bytes before the `syscall` do not say where the instruction there begins. Where a patch cannot
//! begin with the `syscall`, the runtime *observes* it: the interpreter executes the thread's next
//! instructions until it comes to the `syscall` again ([`Approach`]). A `mov eax, NR` need not be
//! observed if the bytes before it are no beginning of a longer instruction that ends there, too.
//!
//! A stub makes one call, whose number it knows, if the runtime passes it on unchanged
//! ([`System::passes_on`]); once a page was guarded, only if the call writes no memory. Otherwise the stub brings the
//! call to the runtime, without the signal, if the instruction before the call sets the number, or if the patch
//! begins with the `syscall`, and then whatever the number is. A site whose calls are made, and whose number is not set
//! there, has a chain of stubs, up to [`MOST_NUMBERS`]. All other
//! calls trap, or are brought to the runtime if the patch begins with the `syscall`; calls that are brought, though a
//! stub could make them, are counted like traps.
//!
//! Data: [`CallSites`], one for the process, behind a lock of its own (number 8 in the order of
//! `crate::sync`, before the patches). Invariants: each call that a stub makes is one that the
//! runtime passes on unchanged. The bytes of a patched site are constant
//! ([`crate::changes::patches`]).
//!
//! Called by threads outside guest code.
//!
//! Example: a loop calls `read`, whose code is `xor eax, eax; syscall; cmp rax, -4096` at 0x401000.
//! After its 128th trap from 0x401002, the bytes there become `e9 .. cc .. ..`, a jump to a
//! trampoline, from which a jump leads to a stub at 0x2f001080. That makes the call if rax is 0; if
//! not, the stub at 0x2f001000 brings it to the runtime.

use crate::changes::CodePages;
use crate::changes::patches::{self, LEN, NewPatch, Purpose};
use crate::changes::trampolines;
use crate::kernel::entry::call_stubs::{self, Kind, SYSCALL, Stub};
use crate::kernel::process::System;
use crate::memory;
use crate::sync::lock;
use dynasour_guest::decode::{Bytes, Decoded, MAX_LENGTH, Reader};
use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind, Register};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::entrances::reserve_trampoline;

/// Traps of a site at which it is rewritten (guess: rewriting takes about as long as this many
/// traps; too high loses time at each new site, too low rewrites sites that run a few times). A site
/// that could not be rewritten is tried again whenever the number of its traps has doubled, so this
/// is a power of two.
const HOT: u32 = 16;
/// Traps of the first site at which it is rewritten (measured: the decoder of instructions makes its
/// tables when it is used for the first time, which takes 0.4 ms, as long as some 100 traps; most
/// short commands end before). A power of two.
const FIRST: u32 = 128;
/// Traps of a site at which it is observed (measured: the interpreter makes each instruction that it
/// executes for the first time, which takes some 10 µs, and a trap takes 1 to 4 µs. With 16, `ls`
/// took 0.7 ms longer). A power of two.
const OBSERVED: u32 = 256;
/// Traps of a site after which it is tried no more (guess).
const GIVEN_UP: u32 = 1 << 16;
/// The most sites that are counted (guess; each takes some 16 bytes).
const MOST_COUNTED: usize = 1 << 16;
/// The most stubs of one site (guess: each takes less than a nanosecond when it is passed over).
const MOST_NUMBERS: u32 = 4;
/// The fewest instructions that are interpreted to observe a site (guess; each takes some 0.2 µs, or 10
/// if it is the first time). More are half the number of its traps.
const FEWEST_STEPS: u32 = 64;
/// From so many traps on more are interpreted, [`STEPS_FOR_A_TRAP`] of them for each, which takes about as
/// long as the traps did: a program may compute for long between two calls (`openssl dgst` executes 100,000
/// instructions for each `read`).
const PATIENT: u32 = 1 << 13;
const STEPS_FOR_A_TRAP: u32 = 16;
/// The length and the opcode of `mov eax, imm32`.
const MOV: u64 = 5;
const MOV_OPCODE: u8 = 0xb8;

/// See the module.
#[derive(Default)]
pub struct CallSites {
    sites: Mutex<Sites>,
    /// Is there, or has there been, a hot site?
    begun: AtomicBool,
    /// Do stubs make no more calls that may write memory?
    watches_outputs: AtomicBool,
    /// Are sites rewritten no more?
    closed: AtomicBool,
}

#[derive(Default)]
struct Sites {
    /// How often each site has trapped, by the address of its `syscall`.
    traps: FxHashMap<u64, u32>,
    /// The patched sites, by the same.
    patched: FxHashMap<u64, Patched>,
    /// Stubs made so far.
    stubs: u64,
}

/// A patched site.
#[derive(Clone, Copy, Debug)]
struct Patched {
    /// Where the patch stands.
    start: u64,
    /// The decision of its first stub, if that has one.
    decision: Option<u64>,
    /// How many stubs it has that make calls of a known number.
    numbers: u32,
    /// Where the runtime gets its calls ([`Stub::again`]).
    again: u64,
}

/// Traps of a site.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traps {
    /// The address of the `syscall`.
    pub call: u64,
    /// The number of the last call.
    pub nr: u32,
    /// How many traps.
    pub times: u32,
}

/// Is a site to be rewritten, or to be tried again, whose traps are now so many, the last `times` of them new?
fn is_due(traps: u32, times: u32, hot: u32) -> bool {
    let before = traps.saturating_sub(times);
    let is_next = before < hot || before.checked_ilog2() != traps.checked_ilog2();
    (hot..=GIVEN_UP).contains(&traps) && is_next
}

/// The observation of a hot site: the thread is interpreted until it comes to its `syscall` again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Approach {
    /// The address of the `syscall`.
    pub call: u64,
    /// The number with which the site was found to be hot.
    nr: u32,
    /// The address of the instruction that was executed last.
    last: u64,
    /// How many more instructions are interpreted.
    steps: u32,
}

impl Approach {
    fn new(call: u64, nr: u32, traps: u32) -> Approach {
        let steps = match traps {
            0..PATIENT => (traps / 2).max(FEWEST_STEPS),
            PATIENT.. => traps.saturating_mul(STEPS_FOR_A_TRAP),
        };
        Approach { call, nr, last: 0, steps }
    }

    /// The instruction at `pc` was executed. Returns the observation that goes on, if it does.
    pub fn passed(self, pc: u64) -> Option<Approach> {
        let steps = self.steps - 1;
        (steps > 0).then_some(Approach { last: pc, steps, ..self })
    }

    /// Where the instruction before the `syscall` begins, if the thread executes that next; none if
    /// what was executed before does not end there.
    fn start(self) -> Option<u64> {
        let is_near = (1..=MAX_LENGTH as u64).contains(&self.call.wrapping_sub(self.last));
        is_near.then_some(self.last)
    }
}

/// What a patch of a site displaces.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Plan {
    own: [u8; LEN],
    inner: u8,
    before: Vec<u8>,
    after: Vec<u8>,
    /// Does the instruction before the call set the number?
    sets_number: bool,
    end: u64,
}

impl Plan {
    /// The plan for the `syscall` at `call`, which is made with the number `nr`, if the instruction
    /// at `start` is the one before it, or the `syscall` itself. None if the site cannot be patched.
    fn of(start: u64, call: u64, nr: u32) -> Option<Plan> {
        const MOST: usize = 2 * MAX_LENGTH + SYSCALL as usize;
        let mut bytes = [0; MOST];
        let there = memory::fetch_code(start, &mut bytes);
        Plan::from_bytes(&bytes[..there], start, call, nr)
    }

    /// As [`Plan::of`], for these bytes at `start`.
    fn from_bytes(bytes: &[u8], start: u64, call: u64, nr: u32) -> Option<Plan> {
        let code = Bytes { start, bytes };
        let mut reader = Reader::new(&code);
        let mut movable = |pc: u64| match reader.decode(pc) {
            Decoded::Inst(inst) => is_movable(&inst).then_some(inst.len()),
            _ => None,
        };
        let length = if start == call { 0 } else { movable(start)? };
        let behind = length + SYSCALL as usize;
        if start + length as u64 != call || bytes.get(length..behind)? != [0x0f, 0x05] {
            return None;
        }
        let before = bytes[..length].to_vec();
        let sets = number_set_by(&before);
        if sets.is_some_and(|sets| sets != nr) {
            return None;
        }
        let after = match behind < LEN {
            true => movable(start + behind as u64)?,
            false => 0,
        };
        let lengths = [length, SYSCALL as usize, after];
        Some(Plan {
            own: bytes.get(..LEN)?.try_into().ok()?,
            inner: patches::inner_boundaries(lengths.into_iter().filter(|length| *length > 0))?,
            before,
            after: bytes[behind..behind + after].to_vec(),
            sets_number: sets.is_some(),
            end: start + (behind + after) as u64,
        })
    }
}

/// The number to which this instruction sets rax, whatever was there.
fn number_set_by(inst: &[u8]) -> Option<u32> {
    match *inst {
        [MOV_OPCODE, a, b, c, d] => Some(u32::from_le_bytes([a, b, c, d])),
        // The immediate is extended by its sign.
        [0x48, 0xc7, 0xc0, a, b, c, d] if d < 0x80 => Some(u32::from_le_bytes([a, b, c, d])),
        [0x31 | 0x33, 0xc0] => Some(0),
        _ => None,
    }
}

/// Does a copy of this instruction at any other address do exactly the same, and go on to the
/// next? Either it is executed completely or, if it faults, not at all.
fn is_movable(inst: &Instruction) -> bool {
    use Mnemonic as M;
    let is_plain = matches!(
        inst.mnemonic(),
        M::Mov
            | M::Movzx
            | M::Movsx
            | M::Movsxd
            | M::Lea
            | M::Xor
            | M::And
            | M::Or
            | M::Add
            | M::Sub
            | M::Cmp
            | M::Test
            | M::Inc
            | M::Dec
            | M::Neg
            | M::Not
            | M::Shl
            | M::Shr
            | M::Sar
            | M::Cdqe
            | M::Cdq
            | M::Nop
    );
    let is_movable = |operand: u32| match inst.op_kind(operand) {
        OpKind::Register => inst.op_register(operand).is_gpr(),
        OpKind::Memory => !inst.is_ip_rel_memory_operand() && inst.memory_segment() != Register::GS,
        OpKind::Immediate8
        | OpKind::Immediate16
        | OpKind::Immediate32
        | OpKind::Immediate64
        | OpKind::Immediate8to16
        | OpKind::Immediate8to32
        | OpKind::Immediate8to64
        | OpKind::Immediate32to64 => true,
        _ => false,
    };
    is_plain
        && inst.flow_control() == FlowControl::Next
        && !inst.has_lock_prefix()
        && !inst.has_rep_prefix()
        && !inst.has_repne_prefix()
        && (0..inst.op_count()).all(is_movable)
}

/// Where a patch can begin of the `syscall` at `call`, which is made with the number `nr`, if that
/// need not be observed.
fn known_start(call: u64, nr: u32) -> Option<u64> {
    if is_mov(call, nr) {
        return Some(call - MOV);
    }
    Plan::of(call, call, nr).is_some().then_some(call)
}

/// Is the instruction before the `syscall` at `call` `mov eax, nr`? Without observation that is
/// known only if no longer instruction can end there.
fn is_mov(call: u64, nr: u32) -> bool {
    let mut bytes = [0; MAX_LENGTH];
    let mut can_fetch = |length: &usize| {
        memory::fetch_code(call.wrapping_sub(*length as u64), &mut bytes[..*length]) == *length
    };
    // Perhaps nothing is mapped before the page of the site.
    let longest = (MOV as usize..=MAX_LENGTH).rev().find(|length| can_fetch(length));
    longest.is_some_and(|length| ends_with_mov(&bytes[..length], nr))
}

/// Is the last instruction of `before` `mov eax, nr`, wherever the others begin?
fn ends_with_mov(before: &[u8], nr: u32) -> bool {
    let ends = |start: usize| {
        let code = Bytes { start: 0, bytes: &before[start..] };
        let decoded = Reader::new(&code).decode(0);
        matches!(decoded, Decoded::Inst(inst)
            if start + inst.len() == before.len() && !would_fault(&inst, nr))
    };
    let Some(mov) = before.len().checked_sub(MOV as usize) else { return false };
    number_set_by(&before[mov..]) == Some(nr) && before[mov] == MOV_OPCODE && !(0..mov).any(ends)
}

/// Would this instruction have faulted, since rax has the number `nr` behind it? It accesses memory
/// at [rax + nr], where none can be mapped, and does not change rax: its other operand is rdi, r15
/// or bh. (Padding that ends with `00`, and `mov eax, 110`, are an `add [rax+110], bh`, too.)
fn would_fault(inst: &Instruction, nr: u32) -> bool {
    use Mnemonic as M;
    /// Linux maps nothing below, unless it is told to (`vm.mmap_min_addr`).
    const PAGE: u32 = 4096;
    let leaves_rax = matches!(
        inst.mnemonic(),
        M::Add | M::Or | M::Adc | M::Sbb | M::And | M::Sub | M::Xor | M::Cmp | M::Mov | M::Test
    );
    leaves_rax
        && (0..inst.op_count()).any(|operand| inst.op_kind(operand) == OpKind::Memory)
        && inst.memory_base() == Register::RAX
        && inst.memory_index() == Register::None
        && inst.memory_segment() == Register::DS
        && inst.memory_displacement64() == u64::from(nr)
        && nr < PAGE / 2
}

impl Sites {
    /// Makes a stub. Returns its address, if there is room.
    fn make(&mut self, stub: &Stub) -> Option<u64> {
        let at = call_stubs::make(self.stubs, stub)?;
        self.stubs += 1;
        Some(at)
    }
}

impl CallSites {
    /// The guest's `syscall` of `trapped` has trapped. If the site is hot, rewrites it, or returns how it
    /// is to be observed before.
    pub fn trapped(&self, trapped: Traps, system: &System, pages: &CodePages) -> Option<Approach> {
        if self.is_closed() {
            return None;
        }
        let Traps { call, nr, times } = trapped;
        let traps = self.count(call, times);
        let hot = if self.begun.load(Ordering::Relaxed) { HOT } else { FIRST };
        if !is_due(traps, times, hot) || system.watches_calls() {
            return None;
        }
        self.begun.store(true, Ordering::Relaxed);
        let patched = lock(&self.sites).patched.get(&call).copied();
        match patched.map(|patched| patched.start).or_else(|| known_start(call, nr)) {
            Some(start) => self.patch(start, call, nr, system, pages),
            None if traps >= OBSERVED => return Some(Approach::new(call, nr, traps)),
            None => {}
        }
        None
    }

    /// The guest's `syscall` of `brought` was brought to the runtime. If a stub could make it, that is counted as a trap.
    pub fn brought(&self, brought: Traps, system: &System, pages: &CodePages) {
        if self.kind(brought.nr) == Kind::Makes {
            // A patched site need not be observed.
            let _ = self.trapped(brought, system, pages);
        }
    }

    /// Counts traps at `call`. Returns how often it has trapped.
    fn count(&self, call: u64, times: u32) -> u32 {
        let mut sites = lock(&self.sites);
        if sites.traps.len() >= MOST_COUNTED {
            sites.traps.clear();
        }
        let traps = sites.traps.entry(call).or_default();
        *traps = traps.saturating_add(times);
        *traps
    }

    /// The observation has come to the `syscall` of the site. Rewrites that, if it can be.
    pub fn observed(&self, approach: Approach, system: &System, pages: &CodePages) {
        if let Some(start) = approach.start()
            && !self.is_closed()
            && !system.watches_calls()
        {
            self.patch(start, approach.call, approach.nr, system, pages);
        }
    }

    /// Where the patch of the site of the `syscall` at `call` begins, if there is one.
    pub fn start_of(&self, call: u64) -> Option<u64> {
        let start = lock(&self.sites).patched.get(&call)?.start;
        patches::leads_to_stub(start).then_some(start)
    }

    /// Rewrites the site of the `syscall` at `call` from `start` on, or adds a stub for `nr` to it. If it
    /// cannot be rewritten, it is not tried again.
    fn patch(&self, start: u64, call: u64, nr: u32, system: &System, pages: &CodePages) {
        let is_patched = self.try_patch(start, call, nr, system, pages);
        let mut sites = lock(&self.sites);
        if is_patched.is_some() {
            // The traps of other numbers are counted from now on.
            sites.traps.remove(&call);
        } else if System::passes_on(i64::from(nr)) {
            sites.traps.insert(call, GIVEN_UP);
        }
    }

    /// What a stub does with the call `nr`.
    fn kind(&self, nr: u32) -> Kind {
        let makes = match self.watches_outputs.load(Ordering::SeqCst) {
            true => System::writes_no_memory,
            false => System::passes_on,
        };
        if makes(i64::from(nr)) { Kind::Makes } else { Kind::Brings }
    }

    fn try_patch(
        &self,
        start: u64,
        call: u64,
        nr: u32,
        system: &System,
        pages: &CodePages,
    ) -> Option<()> {
        let plan = Plan::of(start, call, nr)?;
        let site = u32::try_from(start).ok()?;
        let trampoline = match plan.inner {
            0 => None,
            inner => Some(reserve_trampoline(system, start, inner)?),
        };
        // No other thread is about to change this code.
        let _exclusive = pages.exclusive();
        let mut sites = lock(&self.sites);
        let is_unchanged = Plan::of(start, call, nr).as_ref() == Some(&plan);
        if self.is_closed() || !is_unchanged || !patches::may_stand(pages, &(start..plan.end)) {
            return None;
        }
        // The patch may have been taken back because its page was read.
        let known =
            sites.patched.get(&call).copied().filter(|known| patches::leads_to_stub(known.start));
        let kind = self.kind(nr);
        match known {
            // Another thread has patched it meanwhile.
            Some(known) if known.start != start => return None,
            // It has one number, or brings this one already.
            Some(known) if known.decision.is_none() && start != call => return None,
            Some(_) if kind == Kind::Brings => return None,
            Some(known) if known.numbers >= MOST_NUMBERS => return None,
            None if patches::are_in(&(start..plan.end)) => return None,
            _ => {}
        }
        if kind == Kind::Brings && !plan.sets_number && start != call {
            return None;
        }
        let Plan { before, after, .. } = &plan;
        let stub = Stub { site, before, kind, number: nr, miss: None, again: call, after };
        let again = match known {
            Some(known) => known.again,
            None if start == call => sites.make(&Stub { kind: Kind::Brings, ..stub })?,
            None => call,
        };
        let next = known.and_then(|known| known.decision).unwrap_or(again);
        let miss = (!plan.sets_number).then_some(next);
        let stub = match kind {
            // Whatever the number.
            Kind::Brings if start == call => again,
            Kind::Brings | Kind::Makes => sites.make(&Stub { miss, again, ..stub })?,
        };
        let to = match trampoline {
            Some(at) if trampolines::write(at, start, stub) => at,
            Some(_) => return None,
            None => stub,
        };
        if known.is_some() {
            sites.patched.remove(&call);
            patches::take_back(&(start..start + 1));
        }
        let Plan { own, inner, end, .. } = plan;
        let patch = NewPatch { purpose: Purpose::Call, end, own, inner, to };
        patches::write(start, patch).then(|| {
            let decision = miss
                .filter(|_| kind == Kind::Makes)
                .map(|_| call_stubs::decision(stub, call - start));
            let numbers = known.map_or(0, |known| known.numbers) + u32::from(kind == Kind::Makes);
            sites.patched.insert(call, Patched { start, decision, numbers, again });
        })
    }

    /// Takes the patches in `range` back: its code is about to change. Those of calls may be made
    /// again.
    pub fn take_back(&self, range: &Range<u64>) {
        let starts = patches::take_back(range);
        if !starts.is_empty() {
            let mut sites = lock(&self.sites);
            let is_over = |_: &u64, site: &mut Patched| starts.contains(&site.start);
            let calls: Vec<u64> = sites.patched.extract_if(is_over).map(|(call, _)| call).collect();
            for call in calls {
                sites.traps.remove(&call);
            }
        }
    }

    /// Takes all patches of calls back if the calls of this thread must come to the runtime: for good, or, if only
    /// those must that may write memory, once.
    pub fn close_if_watched(&self, system: &System) {
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        if system.watches_calls() {
            self.close();
        } else if !self.watches_outputs.load(Ordering::Relaxed) && system.watches_outputs() {
            self.watches_outputs.store(true, Ordering::SeqCst);
            call_stubs::close();
            // A site that is being patched is patched before this.
            let mut sites = lock(&self.sites);
            patches::take_back_calls();
            sites.patched.clear();
            sites.traps.clear();
        }
    }

    /// Takes all patches of calls back for good.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        call_stubs::close();
        // A site that is being patched is patched before this.
        let _sites = lock(&self.sites);
        patches::take_back_calls();
    }

    /// Do all calls come to the runtime, for good?
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Calls `f` with the lock held, for a fork.
    pub fn while_locked(&self, f: impl FnOnce()) {
        let _sites = lock(&self.sites);
        patches::while_locked(f);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(bytes: &[u8], length: u64, nr: u32) -> Option<Plan> {
        Plan::from_bytes(bytes, 0x40_1000, 0x40_1000 + length, nr)
    }

    #[test]
    fn a_mov_alone_is_displaced() {
        let bytes = [0xb8, 110, 0, 0, 0, 0x0f, 0x05, 0xc3];
        let mov = plan(&bytes, 5, 110).expect("it can be patched");
        assert_eq!((mov.inner, mov.sets_number, mov.end), (0, true, 0x40_1007));
        assert_eq!((&mov.before[..], &mov.after[..]), (&bytes[..5], &[][..]));
        assert_eq!(plan(&bytes, 5, 39), None, "another number");
        assert_eq!(plan(&bytes[..6], 5, 110), None, "cannot be fetched");
        let bytes = [0x48, 0xc7, 0xc0, 39, 0, 0, 0, 0x0f, 0x05];
        let mov = plan(&bytes, 7, 39).expect("it can be patched");
        assert_eq!((mov.inner, mov.sets_number, mov.end), (0, true, 0x40_1009));
    }

    #[test]
    fn a_short_instruction_is_displaced_with_what_is_behind() {
        // `xor eax, eax; syscall; cmp rax, -4096; ja`.
        let bytes = [0x31, 0xc0, 0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x77, 0x10];
        let read = plan(&bytes, 2, 0).expect("it can be patched");
        assert_eq!((read.inner, read.sets_number, read.end), (0b10100, true, 0x40_100a));
        assert_eq!((&read.before[..], &read.after[..]), (&bytes[..2], &bytes[4..10]));
        assert_eq!(plan(&bytes, 2, 1), None, "another number");
        let ret = [0x31, 0xc0, 0x0f, 0x05, 0xc3, 0x90];
        assert_eq!(plan(&ret, 2, 0), None, "a return cannot be moved");
        // `xor edi, edi; syscall; nop`.
        let other = plan(&[0x31, 0xff, 0x0f, 0x05, 0x90], 2, 39).expect("it can be patched");
        assert_eq!((other.inner, other.sets_number, other.end), (0b10100, false, 0x40_1005));
        // `mov rdi, rbx; syscall; ret`.
        let go = plan(&[0x48, 0x89, 0xdf, 0x0f, 0x05, 0xc3], 3, 39).expect("it can be patched");
        assert_eq!((go.inner, go.sets_number, go.end), (0b01000, false, 0x40_1005));
        // `lea rdi, [rsp+8]` would have 5 bytes; `mov rdi, [rbp+8]` has 4.
        let four = plan(&[0x48, 0x8b, 0x7d, 8, 0x0f, 0x05, 0xc3], 4, 39).expect("as before");
        assert_eq!((four.inner, four.end), (0b10000, 0x40_1006));
        assert_eq!(plan(&[0x58, 0x0f, 0x05, 0x90, 0x90], 1, 39), None, "`pop rax`");
    }

    #[test]
    fn a_patch_may_begin_with_the_call() {
        // `syscall; cmp rax, -4096; ja`.
        let bytes = [0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x77, 0x10];
        let read = plan(&bytes, 0, 7).expect("it can be patched");
        assert_eq!((read.inner, read.sets_number, read.end), (0b00100, false, 0x40_1008));
        assert_eq!((&read.before[..], &read.after[..]), (&[][..], &bytes[2..8]));
        // `syscall; nop; cmp`, `syscall; je`: too short, and not movable.
        assert_eq!(plan(&[0x0f, 0x05, 0x90, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff], 0, 7), None);
        assert_eq!(plan(&[0x0f, 0x05, 0x0f, 0x84, 0, 0, 0, 0], 0, 7), None);
        assert_eq!(plan(&bytes[2..], 0, 7), None, "no call");
    }

    #[test]
    fn instructions_that_depend_on_their_place_stay() {
        let movable = |bytes: &[u8]| {
            let code = Bytes { start: 0x40_1000, bytes };
            match Reader::new(&code).decode(0x40_1000) {
                Decoded::Inst(inst) => is_movable(&inst),
                other => panic!("{other:?}"),
            }
        };
        assert!(movable(&[0x4c, 0x8b, 0x4c, 0x24, 0x08]), "mov r9, [rsp+8]");
        assert!(movable(&[0x64, 0x8b, 0x04, 0x25, 0x10, 0, 0, 0]), "mov eax, fs:[16]");
        assert!(!movable(&[0x65, 0x8b, 0x04, 0x25, 0x10, 0, 0, 0]), "mov eax, gs:[16]");
        assert!(!movable(&[0x8b, 0x05, 0x10, 0, 0, 0]), "mov eax, [rip+16]");
        assert!(!movable(&[0x48, 0x8d, 0x05, 0x10, 0, 0, 0]), "lea rax, [rip+16]");
        assert!(!movable(&[0xe8, 0, 0, 0, 0]), "call");
        assert!(!movable(&[0x74, 0x10]), "je");
        assert!(!movable(&[0x0f, 0x05]), "syscall");
        assert!(!movable(&[0x8e, 0xe8]), "mov gs, ax");
        assert!(!movable(&[0xf3, 0x48, 0xa5]), "rep movsq");
        assert!(!movable(&[0xf0, 0x01, 0x07]), "lock add [rdi], eax");
        assert!(!movable(&[0xd9, 0x07]), "fld dword [rdi]");
        assert!(!movable(&[0xf3, 0x48, 0x0f, 0xae, 0xdf]), "wrgsbase rdi");
        assert!(!movable(&[0x9d]), "popfq");
    }

    #[test]
    fn a_mov_may_be_the_end_of_a_longer_instruction() {
        let getppid = [0xf3, 0x0f, 0x1e, 0xfa, 0xb8, 110, 0, 0, 0];
        assert!(ends_with_mov(&getppid, 110), "endbr64; mov eax, 110");
        assert!(!ends_with_mov(&getppid, 39) && ends_with_mov(&getppid[4..], 110));
        assert!(!ends_with_mov(&getppid[5..], 110), "cannot be fetched");
        assert!(!ends_with_mov(&[0x41, 0xb8, 110, 0, 0, 0], 110), "mov r8d, 110");
        assert!(!ends_with_mov(&[0x8d, 0xb8, 110, 0, 0, 0], 110), "lea edi, [rax+110]");
        assert!(!ends_with_mov(&[0x8d, 0x84, 0xb8, 110, 0, 0, 0], 110), "lea eax, [rax+rdi*4+110]");
        assert!(!ends_with_mov(&[0x48, 0xbf, 1, 2, 3, 0xb8, 110, 0, 0, 0], 110), "mov rdi, imm64");
        assert!(ends_with_mov(&[0x00, 0xb8, 110, 0, 0, 0], 110), "add [rax+110], bh");
        assert!(ends_with_mov(&[0x48, 0x83, 0xec, 0x18, 0xb8, 110, 0, 0, 0], 110), "sub rsp, 24");
        assert!(!ends_with_mov(&[0x65, 0x00, 0xb8, 110, 0, 0, 0], 110), "add gs:[rax+110], bh");
        assert!(!ends_with_mov(&[0xb9, 110, 0, 0, 0], 110), "mov ecx, 110");
    }

    #[test]
    fn an_observation_ends_at_the_call_or_after_its_steps() {
        let approach = Approach::new(0x1005, 39, 16);
        assert_eq!(approach.start(), None);
        let next = approach.passed(0x1000).expect("63 more");
        assert_eq!(next.start(), Some(0x1000));
        assert_eq!(next.passed(0x1005).and_then(Approach::start), None);
        let mut steps = 0;
        let mut rest = Some(approach);
        while let Some(now) = rest {
            rest = now.passed(0x2000);
            steps += 1;
        }
        assert_eq!(steps, FEWEST_STEPS);
        assert_eq!(Approach::new(0, 39, PATIENT - 1).steps, PATIENT / 2 - 1);
        assert_eq!(Approach::new(0, 39, PATIENT).steps, PATIENT * STEPS_FOR_A_TRAP);
        assert!(HOT.is_power_of_two() && GIVEN_UP.is_power_of_two());
    }

    #[test]
    fn a_site_is_due_when_its_traps_have_doubled() {
        let due = |times: u32| -> Vec<u32> {
            (1..=200).map(|n| n * times).filter(|traps| is_due(*traps, times, 16)).collect()
        };
        assert_eq!(due(1), [16, 32, 64, 128]);
        assert_eq!(due(10), [20, 40, 70, 130, 260, 520, 1030]);
        assert_eq!(due(124)[..3], [124, 248, 372]);
        assert!(!is_due(2 * GIVEN_UP, 1, 16), "it is given up");
    }
}
