//! Removal of single blocks, because the guest code that they were made from has changed or gone.
//!
//! Threads may be inside, so a removal has two steps. [`Blocks::remove`] makes nothing lead into
//! the blocks of some pages any more, and makes their own links lead to the runtime. Their heads'
//! counters and their checked entries are removed with them. When every thread has been outside
//! since, [`Blocks::reclaim`] frees their *slots*: an entry of an array together with the memory,
//! the links and the number that belong to it. A slot is used again only for something of the same
//! [`Key`]. So the arrays keep their order by address, and code that comes and goes takes no more
//! memory than it takes once.
//!
//! Blocks that call through the stack need a third step: threads may keep their landings
//! ([`crate::transfers::stack_returns`]), which miss from the first step on. Such blocks *rest*
//! until there are [`RESTING`] bytes of them. Then every thread forgets its landings, and when it
//! has been outside again the slots are freed.
//!
//! Data: [`Free`], and [`Doomed`], which the caller keeps between the steps. Invariants: nothing
//! leads to a doomed block; a place is freed when it has no block and nothing leads to it. The
//! caller holds the emitter.
//!
//! Example: the guest stores into page 1, from which blocks A and B were made. The runtime removes
//! both, waits until each thread has been outside, and reclaims them. The next block with as many
//! bytes and links as A takes A's slot.

use super::places::{ANYWHERE, FOREIGN, NONE, PLACE, Place};
use super::{Block, Blocks};
use crate::cache::Cache;
use crate::fragment::Fragment;
use crate::transfers::indirect::{Indirect, Via};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Bytes of blocks that may rest before threads are made to forget their landings (guess). If it is
/// too low, threads forget landings that they need; if too high, removed blocks fill the cache.
const RESTING: usize = 256 << 10;
/// The sizes of slots in the cache are multiples of this many bytes.
const GRAIN: usize = 16;

/// The sizes of a slot. A free slot may be used for anything with the same key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    /// The array that the slot is in and the form of its code: [`Key::BLOCK`], a counter, or
    /// [`Key::CHECKS`] plus a carrier.
    kind: u8,
    links: u8,
    /// In units of [`GRAIN`].
    hot: u16,
    cold: u16,
}

impl Key {
    const BLOCK: u8 = 0;
    /// A checked entry for the carrier 0; those of other carriers follow.
    const CHECKS: u8 = 2;
    /// A gate.
    const GATE: u8 = Self::CHECKS + Via::COUNT as u8;
    /// The key of a counter.
    pub const COUNTER: Key = Key { kind: 1, links: 1, hot: 0, cold: 0 };

    /// The key of a gate with this number of bytes, of which a slot in the cache has exactly as many.
    pub fn of_gate(bytes: usize) -> Key {
        Key { kind: Self::GATE, links: 1, hot: bytes as u16, cold: 0 }
    }

    /// The key of a block with these numbers of bytes, links, and bytes of cold memory.
    pub fn of_block(bytes: usize, links: usize, cold: usize) -> Key {
        let grains = |bytes: usize| bytes.div_ceil(GRAIN) as u16;
        Key { kind: Self::BLOCK, links: links as u8, hot: grains(bytes), cold: grains(cold) }
    }

    /// The key of a checked entry.
    pub fn of_check(bytes: u8, via: Via) -> Key {
        Key { kind: Self::CHECKS + via.index() as u8, links: 1, hot: u16::from(bytes), cold: 0 }
    }

    fn bytes(self) -> usize {
        if self.kind == Self::BLOCK { self.hot() + self.cold() } else { 0 }
    }

    /// Bytes of a block's code.
    pub fn hot(self) -> usize {
        usize::from(self.hot) * GRAIN
    }

    /// Bytes of a block's cold memory.
    pub fn cold(self) -> usize {
        usize::from(self.cold) * GRAIN
    }
}

/// Free slots, and blocks that rest.
#[derive(Default)]
pub(crate) struct Free {
    /// Indices of blocks and checked entries.
    slots: FxHashMap<Key, Vec<u32>>,
    pub(crate) places: Vec<u32>,
    /// Bytes of blocks.
    bytes: usize,
    /// Indices of blocks that rest.
    resting: Vec<u32>,
    resting_bytes: usize,
}

impl Free {
    /// Takes a free slot of this key.
    pub fn slot(&mut self, key: Key) -> Option<u32> {
        let slot = self.slots.get_mut(&key)?.pop()?;
        self.bytes -= key.bytes();
        Some(slot)
    }

    fn add(&mut self, key: Key, slot: u32) {
        self.bytes += key.bytes();
        self.slots.entry(key).or_default().push(slot);
    }

    fn let_rest(&mut self, key: Key, block: u32) {
        self.resting_bytes += key.bytes();
        self.resting.push(block);
    }

    /// The blocks that rest, if there are enough of them that every thread should forget its
    /// landings.
    fn wake(&mut self) -> Option<Vec<u32>> {
        if self.resting_bytes < RESTING {
            return None;
        }
        self.resting_bytes = 0;
        Some(std::mem::take(&mut self.resting))
    }

    /// Puts a place into the slot of a free one, or behind all others. Returns its number.
    pub fn put_place(&mut self, places: &mut Vec<Place>, place: Place) -> u32 {
        put(places, &mut self.places, place)
    }
}

/// Puts `new` into a free slot, or behind all others. Returns its index.
pub(super) fn put<T>(all: &mut Vec<T>, free: &mut Vec<u32>, new: T) -> u32 {
    match free.pop() {
        Some(free) => {
            all[free as usize] = new;
            free
        }
        None => {
            all.push(new);
            all.len() as u32 - 1
        }
    }
}

/// Blocks that were removed and still take their memory. Good until the next flush.
#[derive(Debug)]
#[must_use = "it takes memory until it is reclaimed"]
pub struct Doomed {
    pub(super) blocks: Vec<u32>,
    /// Blocks that were removed earlier and have rested since.
    rested: Vec<u32>,
    checks: Vec<u32>,
    places: Vec<u32>,
    /// [`Blocks::generation`] at the removal.
    generation: u32,
}

impl Doomed {
    pub(super) fn new(generation: u32) -> Doomed {
        Doomed {
            blocks: Vec::new(),
            rested: Vec::new(),
            checks: Vec::new(),
            places: Vec::new(),
            generation,
        }
    }

    /// Was nothing removed?
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The number of removed blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }
}

impl Blocks {
    /// Forgets the pages of a block.
    pub(super) fn forget_pages(&mut self, index: u32) {
        self.pages.remove(self.blocks[index as usize].node);
    }

    pub(crate) fn check_at(&self, offset: u32) -> Option<u32> {
        let i = self.checks.partition_point(|c| c.start() <= offset).checked_sub(1)?;
        Some(i as u32)
    }
}

impl Blocks {
    /// Is some block made from a page with bytes in this range?
    pub(crate) fn are_made_from(&self, range: &Range<u64>) -> bool {
        self.pages.any(range)
    }

    /// Bytes of removed blocks that no new block has taken yet.
    pub(crate) fn garbage(&self) -> usize {
        self.free.bytes + self.free.resting_bytes
    }

    /// The first step of a removal, for all blocks that were made from pages with bytes in `range`.
    pub(crate) fn remove(
        &mut self,
        range: &Range<u64>,
        indirect: &mut Indirect,
        cache: &Cache,
        fragments: &[Fragment],
    ) -> Doomed {
        let mut doomed = self.stale.take().unwrap_or_else(|| Doomed::new(self.generation));
        if let Some(rested) = self.free.wake() {
            indirect.returns_mut().forget();
            doomed.rested.extend(rested);
        }
        self.not_displaced(|displaced| displaced.start < range.end && range.start < displaced.end);
        for index in self.pages.blocks(range) {
            let Block { node, place, pc, .. } = self.blocks[index as usize];
            if self.places[place as usize].made[0] != index {
                continue;
            }
            self.pages.remove(node);
            self.changes.remove(&pc);
            self.remove_place(place, &mut doomed, indirect, cache, fragments);
        }
        doomed
    }

    /// Removes a place's block, counter and checked entries. A fragment that the place leads to
    /// stays.
    pub(super) fn remove_place(
        &mut self,
        place: u32,
        doomed: &mut Doomed,
        indirect: &mut Indirect,
        cache: &Cache,
        fragments: &[Fragment],
    ) {
        let base = self.base;
        let p = &mut self.places[place as usize];
        let (pc, made) = (p.pc, std::mem::replace(&mut p.made, [NONE; 3]));
        let (registered, has_checks) =
            (std::mem::take(&mut p.registered), std::mem::take(&mut p.has_checks));
        (p.block, p.prefix) = (0, 0);
        let is_gone = |entry: u32| {
            self.at(base + u64::from(entry)).is_some_and(|block| made.contains(&block))
        };
        let entry =
            Some(self.places[place as usize].entry).filter(|entry| !is_gone(*entry)).unwrap_or(0);
        if registered != 0 {
            indirect.remove(pc);
        }
        if has_checks {
            for via in (0..Via::COUNT).filter_map(Via::from_index) {
                let offset = self.apart.remove(&(place, via));
                doomed.checks.extend(offset.and_then(|offset| self.check_at(offset)));
            }
        }
        self.lead(place, entry, cache, fragments);
        for index in made.into_iter().filter(|index| *index != NONE) {
            self.close_landing(index, cache);
            self.unlink(index, indirect, cache);
            doomed.blocks.push(index);
        }
        doomed.places.push(place);
    }

    /// The second step: lets the memory and the numbers of the doomed be used again. Every thread
    /// has been outside since the first step.
    pub(crate) fn reclaim(&mut self, doomed: Doomed) {
        // Another thread has dropped everything since.
        if doomed.generation != self.generation {
            return;
        }
        let mut targets = doomed.places;
        let mut gone = doomed.rested;
        for index in doomed.blocks {
            let block = &self.blocks[index as usize];
            block.unlinked.store(0, Ordering::Relaxed);
            self.unlinked.fetch_sub(1, Ordering::Relaxed);
            if block.landings.is_empty() {
                gone.push(index);
            } else {
                self.free.let_rest(block.key, index);
            }
        }
        for index in gone {
            for number in self.links_of(index) {
                let link = &self.links[number];
                if link.place != ANYWHERE {
                    debug_assert_eq!(link.place & FOREIGN, 0);
                    targets.push(link.place & PLACE);
                }
                self.part(number as u32);
            }
            let block = &mut self.blocks[index as usize];
            block.len = 0;
            if block.counter != NONE {
                self.heads.free.push(block.counter);
            }
            self.free.add(block.key, index);
            self.own.remove(&index);
            self.words.remove(&index);
        }
        for index in doomed.checks {
            let (key, link) = (self.checks[index as usize].key(), self.checks[index as usize].link);
            self.part(link);
            self.free.add(key, index);
        }
        targets.into_iter().for_each(|place| self.drop_place(place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_is_found_by_what_it_takes() {
        let mut free = Free::default();
        let key = Key::of_block(33, 2, 36);
        free.add(key, 7);
        assert_eq!(free.slot(Key::of_block(33, 3, 36)), None);
        assert_eq!(free.slot(Key::of_block(20, 2, 36)), None);
        assert_eq!(free.slot(Key::of_block(48, 2, 48)), Some(7));
        assert_eq!((free.slot(key), free.bytes), (None, 0));
    }
}
