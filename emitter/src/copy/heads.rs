//! Trace heads: counted while they run as blocks, and handed over to fragments.
//!
//! A *head* is a place that a backward branch, a call or a fragment's exit leads to. Links to it lead to its *counter*, a
//! piece of code without a guest instruction that counts down a word of data memory and goes on to the block, all
//! registers and flags in place; from one on it leaves each time, until it is set again. Counting may pause: then links lead to the
//! block. When the head has a fragment, its links lead there instead, and its block is only reached by who may not enter the
//! fragment.
//!
//! Exits of fragments have counters of their own, between the exit's resolved stub and the block.

use super::remove::Key;
use super::returns::Landings;
use super::{BODY, Block, Blocks, FIRST_COUNTER, FOREIGN, Link, NONE, STUB};
use crate::asm::{Assembler, Mem, RCX};
use crate::cache::words::Words;
use crate::cache::{Cache, CacheError};
use crate::codegen::mach::SiteKind;
use crate::cpu::ticks;
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{ExitId, Fragment, FragmentId, LinkKind, fragment_at};
use crate::indirect::SAVE_RCX;
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
    /// How often that was executed since it was set last. If another thread has left by it at the same time and it was set since,
    /// hardly ever.
    pub executions: u64,
    /// Ticks of the time stamp counter since then.
    pub ticks: u64,
}

/// What is known of heads.
pub(super) struct Heads {
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

    pub fn are_counted(&self) -> bool {
        self.counts.threshold != 0
    }
}

impl Blocks {
    /// Makes a counter in front of the block of `place`. Returns its offset in the cache; none if no more can be made.
    fn counter(
        &mut self,
        place: u32,
        counts: Counted,
        threshold: u64,
        cache: &mut Cache,
    ) -> Result<Option<u32>, CacheError> {
        const FIELD: usize = 39;
        let number = self.heads.free.last().map_or(self.heads.counters.len(), |free| *free as usize);
        let Some(words) = self.heads.words.as_ref().filter(|_| number < COUNTERS) else { return Ok(None) };
        let word = words.address(number);
        words.set(number, threshold);
        let mut code = Vec::with_capacity(80);
        let saved = offset::STUB_SAVE + 8 * SAVE_RCX;
        code.store(RCX, saved);
        code.mov_from(RCX, Mem::relative());
        let load = code.len();
        code.lea(RCX, Mem::at(RCX).plus(-1));
        // jrcxz over the way to the block. The word is never 0: whoever comes next, by then or at the same time, leaves, too.
        code.jrcxz_over(21);
        code.mov_to(Mem::relative(), RCX);
        let store = code.len();
        code.load(RCX, saved);
        code.jmp();
        code.load(RCX, saved);
        debug_assert_eq!(code.len(), FIELD + 4 + 9);

        let slot = self.free.slot(Key::COUNTER);
        let (start, cold, first_link) = match slot.and_then(|slot| self.blocks.get(slot as usize)) {
            Some(gone) => (self.base + u64::from(gone.start), self.base + u64::from(gone.cold), gone.first_link),
            None => {
                let start = cache.alloc_hot_where(code.len() + STUB, |start| (start + FIELD as u64) % 8 <= 4)?;
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
        let counter = Counter { counts, from: AtomicU64::new(threshold), since: AtomicU64::new(ticks()) };
        match self.heads.free.pop() {
            Some(free) => self.heads.counters[free as usize] = counter,
            None => self.heads.counters.push(counter),
        }
        Ok(Some(start_offset))
    }

    /// A link leads to this place backward, by a call or from a fragment.
    pub(super) fn found_head(&mut self, place: u32, called: bool) {
        let p = &mut self.places[place as usize];
        p.is_called |= called && !p.is_head;
        if !std::mem::replace(&mut p.is_head, true) {
            self.heads.found.push(place);
        }
    }

    /// Gives the heads found lately their counters, as far as they have blocks. In a full cache they go uncounted.
    pub(super) fn count_found(&mut self, cache: &mut Cache, fragments: &[Fragment]) {
        while let Some(place) = self.heads.found.pop() {
            let Some(p) = self.places.get(place as usize) else { continue };
            if p.block == 0 || p.entry != p.block || !p.is_head {
                // Without a block it is met again when it gets one.
                continue;
            }
            if p.is_called && !(self.heads.counts.functions)(p.pc) {
                continue;
            }
            if let Ok(Some(entry)) = self.counter(place, Counted::Head(p.pc), self.heads.counts.threshold, cache) {
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
        self.blocks.by_pc.get(&pc).is_some_and(|place| self.blocks.places[*place as usize].is_called)
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

    /// The head at `pc`, if links lead to its block, is counted again, and leaves at the `n`th execution. Is it?
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

    /// Links to the fragment's pc lead to it from now on.
    pub fn lead_to(&mut self, fragment: FragmentId) -> Result<(), EmitError> {
        let f = self.fragment(fragment).ok_or(EmitError::Unknown)?;
        let (pc, entry) = (f.pc, (f.entry - self.blocks.base) as u32);
        let place = self.blocks.place(pc);
        self.lead_place(place, entry);
        let ends: Vec<ExitId> = self.ends_to(place).collect();
        ends.into_iter().try_for_each(|end| self.enter_borrowed(end, fragment))
    }

    fn lead_place(&mut self, place: u32, entry: u32) {
        if self.blocks.places.get(place as usize).is_some_and(|p| p.entry != entry) {
            self.blocks.lead(place, entry, &self.cache, &self.fragments);
            self.register_moved();
            self.ends_to(place).for_each(|end| self.unlink_borrowed(end));
        }
    }

    /// The ends of traces that are links to where links to a place lead. One that is bound to the place's block is not among
    /// them: it may come from the very fragment that the others lead to.
    fn ends_to(&self, place: u32) -> impl Iterator<Item = ExitId> {
        let links = &self.blocks.links;
        let first = links.get(self.blocks.places[place as usize].links as usize);
        let all = std::iter::successors(first, |link| links.get(link.next as usize));
        let fields = all
            .filter(|link| link.place & (FOREIGN | BODY) == FOREIGN)
            .map(|link| self.blocks.base + u64::from(link.field));
        fields.filter_map(|field| {
            let owner = self.fragment(self.fragment_at(field)?)?;
            owner.links.iter().find(|link| link.field == field).and_then(|link| match link.kind {
                LinkKind::End(exit) => Some(exit),
                _ => None,
            })
        })
    }

    /// Lets a trace's direct end continue where links to its target lead, now and later. The target is a head then.
    pub fn link_end(&mut self, exit: ExitId) -> Result<(), EmitError> {
        let e = self.exit(exit).filter(|e| e.kind == SiteKind::End).ok_or(EmitError::Unknown)?;
        let pc = e.target.ok_or(EmitError::Unknown)?;
        let place = self.blocks.place(pc);
        self.link_to(exit, place | FOREIGN)?;
        if self.blocks.heads.are_counted() {
            self.blocks.found_head(place, false);
            self.blocks.count_found(&mut self.cache, &self.fragments);
            self.register_moved();
        }
        Ok(())
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

    /// Makes a trace's end a link to `place`, if something is there.
    fn link_to(&mut self, exit: ExitId, place: u32) -> Result<(), EmitError> {
        let link = self.link_of(exit).ok_or(EmitError::Unknown)?;
        let (field, out, before) = (link.field, link.out, link.target());
        let base = self.blocks.base;
        let link = Link::new((field - base) as u32, (out - base) as u32, place);
        let target = self.blocks.target(&link);
        if before == target || target == out {
            return Ok(());
        }
        if before == out {
            let number = self.blocks.links.len() as u32;
            self.blocks.links.push(link);
            self.blocks.join(number);
        }
        set_target(&self.fragments, field, target, &self.cache);
        match self.fragment_at(target) {
            Some(fragment) => self.enter_borrowed(exit, fragment),
            None => Ok(()),
        }
    }

    /// [`Emitter::link_borrowed`]; in a full cache the end goes on in canonical state.
    fn enter_borrowed(&mut self, end: ExitId, fragment: FragmentId) -> Result<(), EmitError> {
        self.link_borrowed(end, fragment).or_else(|error| if error.is_full() { Ok(()) } else { Err(error) })
    }

    /// Lets a guard's exit continue in a resolved stub, and from there where links to its target lead; without
    /// `progress`, in the target's block, which must have been copied. With a threshold it is counted, in which case it
    /// continues in the block, too. Returns the stub.
    pub fn link_exit_to_copy(
        &mut self,
        exit: ExitId,
        block: bool,
        threshold: Option<u64>,
    ) -> Result<FragmentId, EmitError> {
        let pc = self.exit(exit).and_then(|e| e.target).ok_or(EmitError::Unknown)?;
        let place = self.blocks.place(pc);
        if (block || threshold.is_some()) && self.blocks.places[place as usize].block == 0 {
            return Err(EmitError::Unknown);
        }
        let (stub, end) = self.resolved(exit, pc)?;
        let counter = match threshold {
            Some(n) => self.blocks.counter(place, Counted::Exit(exit, pc), n, &mut self.cache)?,
            None => None,
        };
        match counter {
            Some(entry) => {
                let link = self.link_of(end).ok_or(EmitError::Unknown)?;
                let (field, target) = (link.field, self.blocks.base + u64::from(entry));
                set_target(&self.fragments, field, target, &self.cache);
            }
            None => {
                let body = if block || threshold.is_some() { BODY } else { 0 };
                self.link_to(end, place | FOREIGN | body)?;
            }
        }
        self.attach(exit, stub)?;
        Ok(stub)
    }

    /// The code of the block at `pc`, whatever links to it lead to.
    pub fn block_entry(&self, pc: u64) -> Option<u64> {
        let place = &self.blocks.places[*self.blocks.by_pc.get(&pc)? as usize];
        (place.block != 0).then(|| self.blocks.base + u64::from(place.block))
    }
}

/// Makes a patchable jump of a fragment's lead to `target`, from when the fragment is linked at all.
pub(super) fn set_target(fragments: &[Fragment], field: u64, target: u64, cache: &Cache) {
    let fragment = fragment_at(fragments, field).and_then(|id| fragments.get(id.0 as usize));
    let Some(fragment) = fragment else { return };
    if let Some(link) = fragment.links.iter().find(|l| l.field == field) {
        link.target.store(target, Ordering::Relaxed);
        if fragment.unlinked.load(Ordering::Relaxed) == 0 {
            cache.patch_rel32(field, target);
        }
    }
}
