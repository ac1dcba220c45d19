//! Counters of trace heads: how often a head was executed as a block.
//!
//! A *head* is a place that a backward branch, a call or a fragment's exit leads to. Links to it
//! lead to its *counter*, a piece of code without a guest instruction that counts down a word of
//! data memory and goes on to the block, all registers and flags in place. When the word is one,
//! the counter leaves, at each execution until it is set again. Counting may pause: then links lead
//! to the block. When the head has a fragment, links lead there instead
//! ([`crate::blocks::places`]). Only an exit that may have made no progress still jumps to the
//! block then; if it entered the fragment again, the guest might stand still.
//!
//! Exits of fragments have counters of their own, between the exit's resolved stub and the block.
//!
//! Data: [`Heads`]. Invariant: a counter's link leads to the body of its place's block, so that no
//! counter is part of a cycle without a guest instruction. The caller holds the emitter; generated
//! code writes the words.
//!
//! Example: the block at 0x1040 ends with a backward branch to 0x1000, so 0x1000 is a head. Links
//! to it lead to a counter that is set to 50. The fiftieth execution leaves, and the runtime
//! records a trace.

use super::removal::Key;
use super::stack_returns::Landings;
use super::{BODY, Block, Blocks, FIRST_COUNTER, Link, NONE, STUB};
use crate::asm::{Assembler, Mem, RCX};
use crate::cache::words::Words;
use crate::cache::{Cache, CacheError};
use crate::cpu::ticks;
use crate::fragment::{ExitId, Fragment};
use crate::transfers::indirect::SAVE_RCX;
use dynasour_guest::context::LOOP_WORDS;
use dynasour_guest::context::offset;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Counters of 8 bytes (guess; if it is too low, later heads are not counted and get no traces).
const COUNTERS: usize = 1 << 16;

/// Identifies a counter, until the next flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterId(pub u32);

/// The subject of a counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// Executions of the head at this pc.
    Head(u64),
    /// Executions of this exit, which leads to the pc.
    Exit(ExitId, u64),
}

/// Which heads get counters, and how they are set.
#[derive(Clone, Copy, Debug)]
pub struct HeadCounts {
    /// Executions before its counter leaves for the first time; 0 if nothing is counted.
    pub threshold: u64,
    /// Is the place at this pc, which was found by a call, counted? Counting all of them would
    /// count nearly every function.
    pub functions: fn(u64) -> bool,
}

impl Default for HeadCounts {
    /// Nothing is counted.
    fn default() -> HeadCounts {
        HeadCounts { threshold: 0, functions: |_| true }
    }
}

/// A counter.
struct Counter {
    counts: Counted,
    /// The value to which it was set last, and the time stamp then.
    from: AtomicU64,
    since: AtomicU64,
}

/// Code that stands in front of a place's block: a counter, or a gate.
pub(super) struct Front<'c> {
    /// The code, up to its way out if it has one.
    pub code: Vec<u8>,
    /// The offset of the field of the jump to the block.
    pub field: usize,
    /// The ends of fields that are relative to them, with the words that they lead to.
    pub words: &'c [(usize, u64)],
    pub key: Key,
    /// The number of the counter by which it leaves, or [`NO_COUNTER`]: then it never leaves.
    pub number: usize,
}

/// See [`Front::number`].
pub(super) const NO_COUNTER: usize = NONE as usize;

/// The state of a counter that has left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Count {
    /// The subject.
    pub counts: Counted,
    /// Executions since the counter was set last. The number is too low if two threads have left by
    /// the counter at the same time and one of them has set it since.
    pub executions: u64,
    /// Ticks of the time stamp counter since then.
    pub ticks: u64,
}

/// All counters, and the heads that still need one.
pub(crate) struct Heads {
    words: Option<Words>,
    /// So many words of loops are in use ([`ThreadContext::loop_starts`](dynasour_guest::ThreadContext)).
    loops: u32,
    counters: Vec<Counter>,
    /// Numbers of removed counters.
    pub free: Vec<u32>,
    counts: HeadCounts,
    /// Heads whose blocks have no counter yet.
    pub found: Vec<u32>,
}

impl Heads {
    /// The addresses of the counters.
    pub fn memory(&self) -> Option<Range<u64>> {
        self.words.as_ref().map(Words::range)
    }

    pub fn new(cache: &Range<u64>) -> Heads {
        Heads {
            words: Words::new(cache, COUNTERS),
            loops: 0,
            counters: Vec::new(),
            free: Vec::new(),
            counts: HeadCounts::default(),
            found: Vec::new(),
        }
    }

    pub fn clear(&mut self) {
        self.loops = 0;
        self.counters.clear();
        self.free.clear();
        self.found.clear();
    }

    /// The subject of the counter of this number.
    pub fn counts_of(&self, counter: u32) -> Option<Counted> {
        self.counters.get(counter as usize).map(|counter| counter.counts)
    }

    /// The number of a word in which one loop counts from now on; none if all are in use.
    pub fn new_loop_word(&mut self) -> Option<u32> {
        let word = self.loops;
        ((word as usize) < LOOP_WORDS).then(|| {
            self.loops += 1;
            word
        })
    }

    pub fn are_counted(&self) -> bool {
        self.counts.threshold != 0
    }

    /// Sets which heads get counters from now on.
    pub fn count(&mut self, counts: HeadCounts) {
        self.counts = counts;
    }

    /// The executions that a counter has counted since it was set last. The counter has left.
    pub fn counted(&self, counter: CounterId) -> Option<Count> {
        let c = self.counters.get(counter.0 as usize)?;
        let ticks = ticks().saturating_sub(c.since.load(Ordering::Relaxed));
        let left = self.words.as_ref()?.get(counter.0 as usize);
        let executions = c.from.load(Ordering::Relaxed).saturating_sub(left) + 1;
        Some(Count { counts: c.counts, executions, ticks })
    }

    /// Lets a counter leave at the `n`th execution from now.
    pub fn set(&self, counter: CounterId, n: u64) {
        if let (Some(words), Some(c)) = (&self.words, self.counters.get(counter.0 as usize)) {
            c.from.store(n, Ordering::Relaxed);
            c.since.store(ticks(), Ordering::Relaxed);
            words.set(counter.0 as usize, n);
        }
    }
}

impl Blocks {
    /// Makes a counter in front of the block of `place`. Returns its offset in the cache; none if
    /// no more can be made.
    pub(crate) fn counter(
        &mut self,
        place: u32,
        counts: Counted,
        threshold: u64,
        cache: &mut Cache,
    ) -> Result<Option<u32>, CacheError> {
        const FIELD: usize = 39;
        let number =
            self.heads.free.last().map_or(self.heads.counters.len(), |free| *free as usize);
        let Some(words) = self.heads.words.as_ref().filter(|_| number < COUNTERS) else {
            return Ok(None);
        };
        let word = words.address(number);
        words.set(number, threshold);
        let mut code = Vec::with_capacity(80);
        let saved = offset::STUB_SAVE + 8 * SAVE_RCX;
        code.store(RCX, saved);
        code.mov_from(RCX, Mem::relative());
        let load = code.len();
        code.lea(RCX, Mem::at(RCX).plus(-1));
        // jrcxz over the way to the block. The new value is not stored if it is 0, so the word
        // stays 1, and other threads leave, too.
        code.jrcxz_over(21);
        code.mov_to(Mem::relative(), RCX);
        let store = code.len();
        code.load(RCX, saved);
        code.jmp();
        code.load(RCX, saved);
        debug_assert_eq!(code.len(), FIELD + 4 + 9);
        let words = [load, store].map(|end| (end, word));
        let front = Front { code, field: FIELD, words: &words, key: Key::COUNTER, number };
        let (start_offset, index) = self.put_in_front(place, front, cache)?;
        if matches!(counts, Counted::Head(_)) {
            self.places[place as usize].made[1] = index;
        }
        let counter =
            Counter { counts, from: AtomicU64::new(threshold), since: AtomicU64::new(ticks()) };
        match self.heads.free.pop() {
            Some(free) => self.heads.counters[free as usize] = counter,
            None => self.heads.counters.push(counter),
        }
        Ok(Some(start_offset))
    }

    /// Puts code in front of the block of `place`. Returns its offset in the cache and its index.
    pub(super) fn put_in_front(
        &mut self,
        place: u32,
        front: Front<'_>,
        cache: &mut Cache,
    ) -> Result<(u32, u32), CacheError> {
        let Front { mut code, field, words, key, number } = front;
        let leaves = if number == NO_COUNTER { 0 } else { STUB };
        let slot = self.free.slot(key);
        let (start, cold, first_link) = match slot.and_then(|slot| self.blocks.get(slot as usize)) {
            Some(gone) => (
                self.base + u64::from(gone.start),
                self.base + u64::from(gone.cold),
                gone.first_link,
            ),
            None => {
                let fits = |start: u64| (start + field as u64) % 8 <= 4;
                let start = cache.alloc_hot_where(code.len() + leaves, fits)?;
                (start, cache.alloc_cold(STUB)?, self.links.len() as u32)
            }
        };
        for &(end, word) in words {
            let relative = word.wrapping_sub(start + end as u64) as u32;
            code[end - 4..end].copy_from_slice(&relative.to_le_bytes());
        }
        let start_offset = (start - self.base) as u32;
        let link = Link::new(start_offset + field as u32, (cold - self.base) as u32, place | BODY);
        let relative = self.target(&link).wrapping_sub(start + field as u64 + 4) as u32;
        code[field..field + 4].copy_from_slice(&relative.to_le_bytes());
        if leaves != 0 {
            let at = start_offset + code.len() as u32;
            code.extend(self.stub_bytes(at, FIRST_COUNTER + number as u32));
        }
        let out = self.stub_bytes(link.out, super::FIRST_LINK + first_link);
        cache.write(start, &code);
        cache.write(cold, &out);
        match self.links.get_mut(first_link as usize) {
            Some(gone) => *gone = link,
            None => self.links.push(link),
        }
        self.join(first_link);
        let block = Block {
            pc: self.places[place as usize].pc,
            start: start_offset,
            len: code.len() as u16,
            prefix: 0,
            via: 0,
            links: 1,
            first_link,
            cold: (cold - self.base) as u32,
            counter: number as u32,
            place,
            node: NONE,
            landings: Landings::default(),
            key,
            unlinked: AtomicU32::new(0),
        };
        Ok((start_offset, self.put_block(slot, block)))
    }

    /// Makes a place a head: a link leads there backward, by a call (`called`) or from a fragment.
    pub(crate) fn found_head(&mut self, place: u32, called: bool) {
        let p = &mut self.places[place as usize];
        p.is_called |= called && !p.is_head;
        if !std::mem::replace(&mut p.is_head, true) {
            self.heads.found.push(place);
        }
    }

    /// Gives counters to the heads that were found and have blocks. If the cache is full, the head
    /// is not counted.
    pub(crate) fn count_found(&mut self, cache: &mut Cache, fragments: &[Fragment]) {
        while let Some(place) = self.heads.found.pop() {
            let Some(p) = self.places.get(place as usize) else { continue };
            if p.block == 0 || p.entry != p.block || !p.is_head {
                // A head without a block is found again when it gets one.
                continue;
            }
            if p.is_called && !(self.heads.counts.functions)(p.pc) {
                continue;
            }
            if let Ok(Some(entry)) =
                self.counter(place, Counted::Head(p.pc), self.heads.counts.threshold, cache)
            {
                self.lead(place, entry, cache, fragments);
            }
        }
    }
}

impl Blocks {
    /// The place at `pc` and the offset of its block.
    pub(crate) fn place_and_block(&self, pc: u64) -> Option<(u32, u32)> {
        let place = *self.by_pc.get(&pc)?;
        Some((place, self.places[place as usize].block))
    }

    /// The place at `pc`, the index of its counter, and the offset of its block, if the place is a
    /// head that has a counter.
    fn counter_of(&self, pc: u64) -> Option<(u32, u32, u32)> {
        let (place, block) = self.place_and_block(pc)?;
        let counter = self.places[place as usize].made[1];
        (counter != NONE).then_some((place, counter, block))
    }

    /// The place at `pc` and the offset of its block, if links to the place lead to its counter.
    pub(crate) fn counted_place(&self, pc: u64) -> Option<(u32, u32)> {
        let (place, counter, block) = self.counter_of(pc)?;
        let start = self.blocks[counter as usize].start;
        (self.places[place as usize].entry == start).then_some((place, block))
    }

    /// The place at `pc` and its counter with the counter's offset, if the place has a counter and
    /// links to the place lead to its block.
    pub(crate) fn paused_place(&self, pc: u64) -> Option<(u32, CounterId, u32)> {
        let (place, counter, block) = self.counter_of(pc)?;
        let Block { counter, start, .. } = self.blocks[counter as usize];
        (self.places[place as usize].entry == block).then_some((place, CounterId(counter), start))
    }

    /// Was the place at `pc` found by a call?
    pub(crate) fn is_called(&self, pc: u64) -> bool {
        self.by_pc.get(&pc).is_some_and(|place| self.places[*place as usize].is_called)
    }
}
