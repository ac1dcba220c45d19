//! Returns through the processor's return stack.
//!
//! A return of copied code is an indirect jump of its own ([`crate::transfers::indirect`]).
//! Processors predict these well as long as there are not too many. A compiler has tens of
//! thousands of calls, more than their predictors hold, and each return that is not predicted costs
//! some thirty cycles. Natively the return stack predicts them. So in such a program each call of
//! the guest's is a call of the host's, too, and each return a return:
//!
//! ```text
//! call f:                                         ret:
//!       mov gs:[save], rcx                              mov gs:[save], rcx
//!       pext ecx, esp, [MASK]                           mov rcx, [rsp]
//!       mov dword gs:[LANDINGS + rcx*4], H              mov gs:[next_pc], rcx
//!       mov rcx, gs:[save]                              lea ecx, [rsp + 8]
//!       call L1                                         pext ecx, ecx, [MASK]
//! H:    mov rcx, gs:[next_pc]                           mov ecx, gs:[LANDINGS + rcx*4]
//!       lea rcx, [rcx - R]                              mov [rsp], rcx
//!       unless rcx is 0: M                              ret
//!       mov qword [rsp - 8], R
//!       mov rcx, gs:[save]
//!       (the guest's code at R)
//! M:    jmp miss
//! L1:   mov qword [rsp], R
//!       jmp <the block at f>
//! ```
//!
//! R is the guest's return address, H the *landing*. Each thread keeps the landings of its calls in
//! an array that some bits of the stack pointer index (`ThreadContext::landings`). That array is as
//! near in the caches as the stack. A table by return address, which all threads could share, would
//! use more words in a large program than the caches hold (measured: its look-ups took 24 % of a
//! compiler's time). A word without a landing holds *miss*, which goes on by
//! the tables of indirect jumps.
//!
//! The guest's stack holds R except for two moments: between a `call` and the store behind it, and
//! between the last store before a `ret` and the landing. A landing checks that it was meant and
//! puts R back. No flags are touched.
//!
//! Programs with few places to return to lose by it (measured: recursive `fib` takes 1.0 times
//! native without, 1.6 with), so it is turned on when there have been many
//! ([`Config`](crate::Config)).
//!
//! Data: [`ReturnStack`], the addresses of the shared stubs and the generation of landings. The
//! caller holds the emitter; functions that say so are async-signal-safe.
//!
//! **Landings of removed blocks.** Threads may still keep the landing of a block that was removed.
//! From the moment that nothing leads to the block any more, its landing always misses. Its memory
//! is used again when no thread keeps the landing: a thread whose landings are of an older
//! *generation* than [`Kept`] forgets all of them when it enters generated code.
//!
//! **Signals.** A thread that is interrupted between the look-up of a landing and the arrival there
//! is sent to *out_before*, which returns as the guest would have. A thread that is in a landing,
//! or in the stubs of this module, is sent to *out*.

use crate::asm::{Assembler, Mem, RCX, RSP};
use crate::cache::{Cache, CacheError};
use crate::codegen::piece::Piece;
use crate::transfers::indirect::{Displaced, Diversion};
use dynasour_guest::ThreadContext;
use dynasour_guest::context::{LANDINGS, offset};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

/// How copied blocks return.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Returns {
    /// Through the tables of indirect jumps, until there are many places to return to.
    #[default]
    Auto,
    /// Through the tables of indirect jumps.
    Table,
    /// Through the processor's return stack, if that is possible.
    Stack,
}

impl fmt::Display for Returns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Returns::Auto => "auto",
            Returns::Table => "table",
            Returns::Stack => "stack",
        })
    }
}

impl FromStr for Returns {
    type Err = String;

    fn from_str(s: &str) -> Result<Returns, String> {
        match s {
            "auto" => Ok(Returns::Auto),
            "table" => Ok(Returns::Table),
            "stack" => Ok(Returns::Stack),
            _ => Err("expected auto, table or stack".to_string()),
        }
    }
}

/// The lowest bit of the stack pointer that chooses a landing: return addresses have eight bytes.
const SHIFT: u32 = 3;
const MASK: u64 = (LANDINGS as u64 - 1) << SHIFT;
/// Bytes of `mov [rsp], rcx; ret`, with which a return ends.
pub(crate) const LAST: usize = 5;

/// The generation of landings that a thread may keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Kept {
    /// Unique in the process.
    generation: u64,
    /// The value of a word that keeps no landing.
    miss: u32,
}

impl Kept {
    fn new(miss: u32) -> Kept {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Kept { generation: NEXT.fetch_add(1, Ordering::Relaxed), miss }
    }

    /// Makes the thread forget landings of older generations. Called before it enters generated
    /// code.
    ///
    /// # Safety
    /// `context` is the calling thread's.
    pub unsafe fn prepare(self, context: *mut ThreadContext) {
        // SAFETY: only this thread uses these fields; there is no reference to the whole, parts of
        // which others may be reading.
        let (of, landings) = unsafe { (&mut (*context).landings_of, &mut (*context).landings) };
        if *of != self.generation {
            landings.fill(self.miss);
            *of = self.generation;
        }
    }
}

/// The stubs and the state that calls and returns share.
pub(crate) struct ReturnStack {
    /// The processor has `pext`, and there is a table within reach for returns that miss.
    is_possible: bool,
    stubs: Stubs,
    /// None: it is turned off.
    kept: Option<Kept>,
}

/// Addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Stubs {
    /// Leaves from before the guest's stack pointer has moved.
    out_before: u64,
    out: u64,
    /// As `out`, if the guest's stack cannot be written.
    out_as_is: u64,
    miss: u64,
    end: u64,
    mask: u64,
}

impl ReturnStack {
    /// Makes the stubs; returns through the stack are turned off. A return without a landing goes
    /// on through the table at `table`, or at `otherwise` if there is no table. `out` leaves, with
    /// rcx in its place in `stub_save`.
    pub fn new(
        cache: &mut Cache,
        has_pext: bool,
        table: Option<u32>,
        otherwise: u64,
        out: u64,
    ) -> Result<ReturnStack, CacheError> {
        let stubs = Stubs::generate(cache, table, otherwise, out)?;
        let is_possible = has_pext && table.is_some() && i32::try_from(cache.range().end).is_ok();
        Ok(ReturnStack { is_possible, stubs, kept: None })
    }

    /// In a forked child whose cache is fresh: makes the stubs again, at the same addresses, and
    /// turns returns through the stack off.
    pub fn reset_after_fork(
        &mut self,
        cache: &mut Cache,
        table: Option<u32>,
        otherwise: u64,
        out: u64,
    ) -> Result<(), CacheError> {
        let stubs = Stubs::generate(cache, table, otherwise, out)?;
        assert_eq!(stubs, self.stubs, "the stubs of a child differ from its parent's");
        self.kept = None;
        Ok(())
    }

    /// Do blocks that are made now return through the stack?
    pub fn is_on(&self) -> bool {
        self.kept.is_some()
    }

    /// Can this machine return through the stack?
    pub fn is_possible(&self) -> bool {
        self.is_possible
    }

    /// Turns returns through the stack on, if they are possible. No block may have been made.
    pub fn turn_on(&mut self) {
        self.kept = self.is_possible.then(|| Kept::new(self.stubs.miss as u32));
    }

    /// The generation of which a thread's landings must be when it enters generated code.
    pub fn kept(&self) -> Option<Kept> {
        self.kept
    }

    /// Begins a new generation: each thread forgets its landings when it enters generated code
    /// next.
    pub fn forget(&mut self) {
        if self.is_on() {
            self.turn_on();
        }
    }

    /// The address of the mask.
    pub fn mask(&self) -> u64 {
        self.stubs.mask
    }

    /// The stub to which a landing leads if another return address was meant, with rcx in its place
    /// in `stub_save`.
    pub fn miss(&self) -> u64 {
        self.stubs.miss
    }

    /// The last instruction but two of a return, in eight bytes: finds the landing (`mov ecx,
    /// gs:[LANDINGS + rcx*4]`), or the way out (`mov ecx, …`; the prefixes mean nothing).
    pub fn looks(&self, out: bool) -> [u8; 8] {
        let [a, b, c, d] =
            if out { self.stubs.out as u32 } else { offset::LANDINGS as u32 }.to_le_bytes();
        if out {
            [0x2e, 0x2e, 0x2e, 0xb9, a, b, c, d]
        } else {
            [0x65, 0x8b, 0x0c, 0x8d, a, b, c, d]
        }
    }

    /// The way out of a thread that is in a landing.
    pub fn diversion_in_landing(&self) -> Diversion {
        Diversion { rip: self.stubs.out, displaced: Displaced::None }
    }

    /// The way out of a thread that has looked its landing up and has not returned yet.
    pub fn diversion_before_return(&self) -> Diversion {
        Diversion { rip: self.stubs.out_before, displaced: Displaced::None }
    }

    /// The way out of a thread that is in the stubs. Async-signal-safe.
    pub fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        (self.stubs.out..self.stubs.end).contains(&host_rip).then(|| self.diversion_in_landing())
    }

    /// Where a fault in the stubs continues. The guest's stack is not writable any more.
    /// Async-signal-safe.
    pub fn fault_exit(&self, host_rip: u64) -> Option<u64> {
        (self.stubs.out..self.stubs.end).contains(&host_rip).then_some(self.stubs.out_as_is)
    }
}

impl Stubs {
    fn generate(
        cache: &mut Cache,
        table: Option<u32>,
        otherwise: u64,
        out: u64,
    ) -> Result<Stubs, CacheError> {
        const ROOM: usize = 96;
        let base = cache.alloc_hot(ROOM, 64)?;
        let mut bytes = Vec::with_capacity(ROOM);
        bytes.lea(RSP, Mem::at(RSP).plus(8));
        let out_at = base + bytes.len() as u64;
        let mut restore = Piece::default();
        restore.load(RCX, offset::NEXT_PC);
        restore.mov_to(Mem::at(RSP).plus(-8), RCX);
        let mut leave = Piece::default();
        leave.jump(out);
        let mut miss = restore.clone();
        match table {
            Some(table) => miss.jump_through(RCX, table),
            None => miss.jump(otherwise),
        }
        bytes.extend_from_slice(&restore.bytes);
        let out_as_is = base + bytes.len() as u64;
        bytes.extend_from_slice(&leave.placed(out_as_is));
        let miss_at = base + bytes.len() as u64;
        bytes.extend_from_slice(&miss.placed(miss_at));
        let end = base + bytes.len() as u64;
        bytes.int3(bytes.len().next_multiple_of(8) - bytes.len());
        let mask = base + bytes.len() as u64;
        bytes.extend_from_slice(&MASK.to_le_bytes());
        assert!(bytes.len() <= ROOM);
        cache.write(base, &bytes);
        Ok(Stubs { out_before: base, out: out_at, out_as_is, miss: miss_at, end, mask })
    }
}
