//! Trace heads: counted while they run as blocks, and handed over to fragments.
//!
//! A *head* is a place that a backward branch, a call or a fragment's exit leads to. Links to it
//! lead to its *counter*, a piece of code without a guest instruction that counts down a word of
//! data memory and goes on to the block, all registers and flags in place. When the word is one,
//! the counter leaves, at each execution until it is set again. Counting may pause: then links lead
//! to the block. When the head has a fragment, links lead there instead ([`crate::links::graph`]);
//! then only exits that may have made no progress still jump to the block.
//!
//! Exits of fragments have counters of their own, between the exit's resolved stub and the block.
//!
//! Data: [`Heads`]. Invariant: a counter's link leads to the body of its place's block, so that no
//! counter is part of a cycle without a guest instruction. The caller holds the emitter; generated
//! code writes the words.
//!
//! Example: a loop at 0x1000 is found to be one when its backward branch is copied; links to it
//! lead to a counter that is set to 50; the fiftieth execution leaves, and the runtime records a
//! trace.

use super::remove::Key;
use super::stack_returns::Landings;
use super::{BODY, Block, Blocks, FIRST_COUNTER, Link, NONE, STUB};
use crate::asm::{Assembler, Mem, RCX};
use crate::cache::words::Words;
use crate::cache::{Cache, CacheError};
use crate::cpu::ticks;
use crate::emitter::Emitter;
use crate::fragment::{ExitId, Fragment};
use crate::transfers::indirect::SAVE_RCX;
use dynasour_guest::context::offset;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Counters that there can be.
const COUNTERS: usize = 1 << 16;

/// Identifies a counter, until the next flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterId(pub u32);

/// What a counter counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// Executions of the head at this pc.
    Head(u64),
    /// Executions of this exit, which leads to the pc.
    Exit(ExitId, u64),
}

/// Which heads are counted, and how far.
#[derive(Clone, Copy, Debug)]
pub struct HeadCounts {
    /// Executions before its counter leaves for the first time; 0 if nothing is counted.
    pub threshold: u64,
    /// Is the function at this pc counted? Nearly every place that is called would be.
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
    /// What it was set to last, and when.
    from: AtomicU64,
    since: AtomicU64,
}

/// What a counter has counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Count {
    /// Of what.
    pub counts: Counted,
    /// How often that was executed since it was set last. If another thread has left by it at the
    /// same time and it was set since, hardly ever.
    pub executions: u64,
    /// Ticks of the time stamp counter since then.
    pub ticks: u64,
}

/// What is known of heads.
pub(crate) struct Heads {
    words: Option<Words>,
    counters: Vec<Counter>,
    /// Numbers of counters that are gone.
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
            counters: Vec::new(),
            free: Vec::new(),
            counts: HeadCounts::default(),
            found: Vec::new(),
        }
    }

    pub fn clear(&mut self) {
        self.counters.clear();
        self.free.clear();
        self.found.clear();
    }

    /// What the counter of this number counts.
    pub fn counts_of(&self, counter: u32) -> Option<Counted> {
        self.counters.get(counter as usize).map(|counter| counter.counts)
    }

    pub fn are_counted(&self) -> bool {
        self.counts.threshold != 0
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
        // jrcxz over the way to the block. The word is never 0: a thread that comes at the same
        // time leaves, too.
        code.jrcxz_over(21);
        code.mov_to(Mem::relative(), RCX);
        let store = code.len();
        code.load(RCX, saved);
        code.jmp();
        code.load(RCX, saved);
        debug_assert_eq!(code.len(), FIELD + 4 + 9);

        let slot = self.free.slot(Key::COUNTER);
        let (start, cold, first_link) = match slot.and_then(|slot| self.blocks.get(slot as usize)) {
            Some(gone) => (
                self.base + u64::from(gone.start),
                self.base + u64::from(gone.cold),
                gone.first_link,
            ),
            None => {
                let start = cache
                    .alloc_hot_where(code.len() + STUB, |start| (start + FIELD as u64) % 8 <= 4)?;
                (start, cache.alloc_cold(STUB)?, self.links.len() as u32)
            }
        };
        for end in [load, store] {
            let relative = word.wrapping_sub(start + end as u64) as u32;
            code[end - 4..end].copy_from_slice(&relative.to_le_bytes());
        }
        let start_offset = (start - self.base) as u32;
        let link = Link::new(start_offset + FIELD as u32, (cold - self.base) as u32, place | BODY);
        let relative = self.target(&link).wrapping_sub(start + FIELD as u64 + 4) as u32;
        code[FIELD..FIELD + 4].copy_from_slice(&relative.to_le_bytes());
        let hot = self.stub_bytes(start_offset + code.len() as u32, FIRST_COUNTER + number as u32);
        code.extend(hot);
        let out = self.stub_bytes(link.out, super::FIRST_LINK + first_link);
        cache.write(start, &code);
        cache.write(cold, &out);
        match self.links.get_mut(first_link as usize) {
            Some(gone) => *gone = link,
            None => self.links.push(link),
        }
        self.join(first_link);
        let pc = self.places[place as usize].pc;
        let index = self.put_block(
            slot,
            Block {
                pc,
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
                key: Key::COUNTER,
                unlinked: AtomicU32::new(0),
            },
        );
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

    /// A link leads to this place backward, by a call or from a fragment.
    pub(crate) fn found_head(&mut self, place: u32, called: bool) {
        let p = &mut self.places[place as usize];
        p.is_called |= called && !p.is_head;
        if !std::mem::replace(&mut p.is_head, true) {
            self.heads.found.push(place);
        }
    }

    /// Gives the heads found lately their counters, as far as they have blocks. In a full cache
    /// they go uncounted.
    pub(crate) fn count_found(&mut self, cache: &mut Cache, fragments: &[Fragment]) {
        while let Some(place) = self.heads.found.pop() {
            let Some(p) = self.places.get(place as usize) else { continue };
            if p.block == 0 || p.entry != p.block || !p.is_head {
                // Without a block it is met again when it gets one.
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

impl Emitter {
    /// Which heads are counted from now on.
    pub fn count_heads(&mut self, counts: HeadCounts) {
        self.blocks.heads.counts = counts;
    }

    /// What a counter has counted that has left.
    pub fn counted(&self, counter: CounterId) -> Option<Count> {
        let c = self.blocks.heads.counters.get(counter.0 as usize)?;
        let ticks = ticks().saturating_sub(c.since.load(Ordering::Relaxed));
        let left = self.blocks.heads.words.as_ref()?.get(counter.0 as usize);
        let executions = c.from.load(Ordering::Relaxed).saturating_sub(left) + 1;
        Some(Count { counts: c.counts, executions, ticks })
    }

    /// Lets a counter leave at the `n`th execution from now. One that has left must be set again.
    pub fn set_counter(&self, counter: CounterId, n: u64) {
        let heads = &self.blocks.heads;
        if let (Some(words), Some(c)) = (&heads.words, heads.counters.get(counter.0 as usize)) {
            c.from.store(n, Ordering::Relaxed);
            c.since.store(ticks(), Ordering::Relaxed);
            words.set(counter.0 as usize, n);
        }
    }

    /// Is the place at `pc` a head because of a call?
    pub fn is_called(&self, pc: u64) -> bool {
        self.blocks
            .by_pc
            .get(&pc)
            .is_some_and(|place| self.blocks.places[*place as usize].is_called)
    }

    /// The head at `pc` is not counted any more: links lead to its block.
    pub fn stop_counting(&mut self, pc: u64) {
        let Some(place) = self.blocks.by_pc.get(&pc).copied() else { return };
        let block = self.blocks.places[place as usize].block;
        self.lead_place(place, block);
    }

    /// Links to the head at `pc` lead to its block, if they lead to its counter. Do they?
    pub fn pause_counting(&mut self, pc: u64) -> bool {
        let Some((place, counter)) = self.counter_of(pc) else { return false };
        let p = &self.blocks.places[place as usize];
        let (counted, block) = (p.entry == self.blocks.blocks[counter as usize].start, p.block);
        if counted {
            self.lead_place(place, block);
        }
        counted
    }

    /// The head at `pc`, if links lead to its block, is counted again, and leaves at the `n`th
    /// execution. Is it?
    pub fn count_again(&mut self, pc: u64, n: u64) -> bool {
        let Some((place, counter)) = self.counter_of(pc) else { return false };
        let p = &self.blocks.places[place as usize];
        let Block { counter, start, .. } = self.blocks.blocks[counter as usize];
        let pauses = p.entry == p.block;
        if pauses {
            self.set_counter(CounterId(counter), n);
            self.lead_place(place, start);
        }
        pauses
    }

    /// The place at `pc` and the block that is its counter.
    fn counter_of(&self, pc: u64) -> Option<(u32, u32)> {
        let place = *self.blocks.by_pc.get(&pc)?;
        let counter = self.blocks.places[place as usize].made[1];
        (counter != NONE).then_some((place, counter))
    }

    /// The place at `pc` is a head from now on: a trace goes on there, and not by a link.
    pub fn make_head(&mut self, pc: u64) {
        if self.blocks.heads.are_counted() {
            let place = self.blocks.place(pc);
            self.blocks.found_head(place, false);
            self.blocks.count_found(&mut self.cache, &self.fragments);
            self.register_moved();
        }
    }

    /// The code of the block at `pc`, whatever links to it lead to.
    pub fn block_entry(&self, pc: u64) -> Option<u64> {
        let place = &self.blocks.places[*self.blocks.by_pc.get(&pc)? as usize];
        (place.block != 0).then(|| self.blocks.base + u64::from(place.block))
    }
}
