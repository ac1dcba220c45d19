//! Returns through the processor's return stack.
//!
//! A return of copied code is an indirect jump of its own ([`crate::indirect`]), which processors predict well as long as there are
//! not too many: a compiler has tens of thousands of calls, more than their predictors hold, and each return that is not
//! predicted costs some thirty cycles. Natively the return stack predicts them. So in such a program each call of the guest's is
//! a call of the host's, too, and each return a return:
//!
//! ```text
//! call f, at the start of a block of its own:      ret:
//!       call L1                                         mov gs:[save], rcx
//! H:    mov rcx, gs:[next_pc]                           mov rcx, [rsp]
//!       lea rcx, [rcx + 1 - R]                          mov gs:[next_pc], rcx
//!       loop M                                          pext ecx, ecx, [MASK]
//!       mov qword [rsp - 8], R                          mov ecx, [TABLE + rcx*4]
//!       mov rcx, gs:[save]                              mov [rsp], rcx
//!       jmp <the block at R>                            ret
//! M:    jmp miss
//! L1:   mov qword [rsp], R
//!       jmp <the block at f>
//! ```
//!
//! R is the guest's return address, H the *landing*, and the table says H for some bits of R; where it knows nothing, *miss*, which
//! goes on by the tables of indirect jumps. What the guest has on its stack is R but between a `call` and the store behind it, and
//! between the last store before a `ret` and the landing: landings check that they are meant and put R back. No flags are touched.
//!
//! Programs with few places to return to lose by it (recursive `fib`: 1.3 times native without, 1.6 with), so it is
//! turned on when there have been many ([`Config`](crate::Config)). Each address has one landing at most: that is why a call
//! begins a block.
//!
//! **Signals.** A thread that is interrupted between the look into the table and the landing goes out by *out_before*, which returns
//! as the guest would have; one that is in a landing, or in what is generated here, by *out*.

use crate::cache::{Cache, CacheError};
use crate::emitter::Diversion;
use crate::indirect::Displaced;
use crate::pieces::{Piece, RCX};
use crate::words::Words;
use dynasour_guest::context::offset;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// How copied blocks return.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Returns {
    /// Through the tables of indirect jumps, until there are many places to return to.
    #[default]
    Auto,
    /// Through the tables of indirect jumps.
    Table,
    /// Through the processor's return stack, where it can be done.
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

/// So many bits of a return address choose a word.
const BITS: u32 = 18;
/// From this one on: neighbouring calls have neighbouring words, so that few lines of the processor's caches hold them all, and
/// seldom the same one.
const SHIFT: u32 = 3;
const SLOTS: usize = 1 << BITS;
/// Two addresses of code, which is low, are in a word.
const WORDS: usize = SLOTS / 2;
const MASK: u64 = (SLOTS as u64 - 1) << SHIFT;
/// Bytes of `mov [rsp], rcx; ret`, with which a block ends that returns so.
pub(crate) const LAST: usize = 5;

/// The table and its stubs.
pub(crate) struct ReturnStack {
    /// The table, and behind it one all of whose words lead out; none if there is no room where displacements reach, or the
    /// processor has no `pext`.
    words: Option<Words>,
    stubs: Stubs,
    is_on: bool,
    /// Words that somebody has, some perhaps twice.
    taken: Vec<u32>,
}

/// Addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Stubs {
    /// Before the guest's stack pointer has moved.
    out_before: u64,
    out: u64,
    /// As `out`, where the guest's stack cannot be written.
    out_as_is: u64,
    miss: u64,
    end: u64,
    mask: u64,
}

/// What `pext` makes of an address.
fn slot(address: u64) -> usize {
    ((address & MASK) >> SHIFT) as usize
}

/// Where half a word is.
fn half(n: usize) -> (usize, u32) {
    (n / 2, 32 * (n % 2) as u32)
}

fn get(words: &Words, n: usize) -> u64 {
    let (word, shift) = half(n);
    words.get(word) >> shift & u64::from(u32::MAX)
}

/// Only one thread does it at a time; what reads finds the other half as it was.
fn put(words: &Words, n: usize, address: u64) {
    let (word, shift) = half(n);
    words.set(word, words.get(word) & !(u64::from(u32::MAX) << shift) | address << shift);
}

impl ReturnStack {
    /// Turned off. A return that finds nothing goes on by the table at `table`, or by `otherwise`; `out` leaves, with rcx in
    /// its place in `stub_save`.
    pub fn new(
        cache: &mut Cache,
        has_pext: bool,
        table: Option<u32>,
        otherwise: u64,
        out: u64,
    ) -> Result<ReturnStack, CacheError> {
        let words = if has_pext && table.is_some() { Words::new(&cache.range(), 2 * WORDS) } else { None };
        let words = words.filter(|words| i32::try_from(words.range().end).is_ok());
        let stubs = Stubs::generate(cache, table, otherwise, out)?;
        Ok(ReturnStack { words, stubs, is_on: false, taken: Vec::new() })
    }

    /// In a forked child whose cache is fresh: the stubs once more, at the same addresses. Turned off.
    pub fn reset_after_fork(
        &mut self,
        cache: &mut Cache,
        table: Option<u32>,
        otherwise: u64,
        out: u64,
    ) -> Result<(), CacheError> {
        let stubs = Stubs::generate(cache, table, otherwise, out)?;
        assert_eq!(stubs, self.stubs, "the stubs of a child differ from its parent's");
        self.is_on = false;
        self.taken.clear();
        Ok(())
    }

    /// Are there calls and returns of this kind?
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Can there be?
    pub fn is_possible(&self) -> bool {
        self.words.is_some()
    }

    /// From now on there are. Nothing may have been copied.
    pub fn turn_on(&mut self) {
        let Some(words) = &self.words else { return };
        words.populate();
        let twice = |address: u64| address << 32 | address;
        (0..WORDS).for_each(|n| words.set(n, twice(self.stubs.miss)));
        (WORDS..2 * WORDS).for_each(|n| words.set(n, twice(self.stubs.out)));
        self.is_on = true;
        self.taken.clear();
    }

    /// What a return's field holds for the table, and what it holds to lead out.
    pub fn tables(&self) -> Option<[u32; 2]> {
        let words = self.words.as_ref().filter(|_| self.is_on)?;
        Some([words.address(0) as u32, words.address(WORDS) as u32])
    }

    /// Where the mask is.
    pub fn mask(&self) -> u64 {
        self.stubs.mask
    }

    /// Where a landing leads that is not meant, with rcx in its place in `stub_save`.
    pub fn miss(&self) -> u64 {
        self.stubs.miss
    }

    /// Returns to `address` arrive at this landing.
    pub fn insert(&mut self, address: u64, landing: u64) {
        if let Some(words) = &self.words {
            let n = slot(address);
            put(words, n, landing);
            self.taken.push(n as u32);
        }
    }

    /// They do not any more.
    pub fn remove(&mut self, address: u64, landing: u64) {
        if let Some(words) = &self.words {
            let n = slot(address);
            if get(words, n) == landing {
                put(words, n, self.stubs.miss);
            }
        }
    }

    /// No return arrives at any landing any more.
    pub fn clear(&mut self) {
        if let Some(words) = &self.words {
            self.taken.drain(..).for_each(|n| put(words, n as usize, self.stubs.miss));
        }
    }

    /// The addresses of the table.
    pub fn memory(&self) -> Option<Range<u64>> {
        self.words.as_ref().map(Words::range)
    }

    /// How a thread gets out that is in a landing.
    pub fn diversion_in_landing(&self) -> Diversion {
        Diversion { rip: self.stubs.out, displaced: Displaced::None }
    }

    /// How a thread gets out that has looked into the table and not returned.
    pub fn diversion_before_return(&self) -> Diversion {
        Diversion { rip: self.stubs.out_before, displaced: Displaced::None }
    }

    /// How a thread gets out that is in the stubs. Async-signal-safe.
    pub fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        (self.stubs.out..self.stubs.end).contains(&host_rip).then(|| self.diversion_in_landing())
    }

    /// Where a fault in the stubs continues: what was returned from is not writable any more. Async-signal-safe.
    pub fn fault_exit(&self, host_rip: u64) -> Option<u64> {
        (self.stubs.out..self.stubs.end).contains(&host_rip).then_some(self.stubs.out_as_is)
    }
}

impl Stubs {
    fn generate(cache: &mut Cache, table: Option<u32>, otherwise: u64, out: u64) -> Result<Stubs, CacheError> {
        const ROOM: usize = 96;
        let base = cache.alloc_hot(ROOM, 64)?;
        // lea rsp, [rsp + 8]
        let mut bytes = vec![0x48, 0x8d, 0x64, 0x24, 0x08];
        let out_at = base + bytes.len() as u64;
        let mut restore = Piece::default();
        restore.load(RCX, offset::NEXT_PC);
        // mov [rsp - 8], rcx
        restore.put(&[0x48, 0x89, 0x4c, 0x24, 0xf8]);
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
        bytes.resize(bytes.len().next_multiple_of(8), 0xcc);
        let mask = base + bytes.len() as u64;
        bytes.extend_from_slice(&MASK.to_le_bytes());
        assert!(bytes.len() <= ROOM);
        cache.write(base, &bytes);
        Ok(Stubs { out_before: base, out: out_at, out_as_is, miss: miss_at, end, mask })
    }
}
