//! Blocks that go one by one, because the guest code that they were made from has changed or gone.
//!
//! That takes two steps, since threads may be inside. [`Emitter::remove_copied`] makes nothing lead
//! into the blocks of some pages any more, nor out of them to anywhere but the runtime; what
//! belongs to them alone goes with them: their heads' counters and their checked entries. When
//! every thread has been outside since, [`Emitter::reclaim`] lets what they took be used again: an
//! entry of the arrays with the memory, the links and the number that belong to it, for something
//! that takes just as much. So the arrays keep their order, and code that comes and goes takes no
//! more than it takes once.
//!
//! Blocks with calls by the stack take a third: threads may keep their landings
//! ([`crate::transfers::stack_returns`]), which miss from the first step on. So they *rest* until
//! there are [`RESTING`] bytes of them, every thread forgets its landings, and has been outside
//! again.
//!
//! A place goes when it has no block and nothing leads to it.

use super::{ANYWHERE, Block, Blocks, NONE, PLACE, Place};
use crate::emitter::Emitter;
use crate::links::graph::FOREIGN;
use crate::transfers::indirect::Via;
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::atomic::Ordering;

const PAGE_SHIFT: u32 = 12;
/// So many bytes of blocks rest at most, or about that.
const RESTING: usize = 256 << 10;
/// All that is allocated is a multiple of this.
const GRAIN: usize = 16;

/// What something takes: what is free for one is free for all others with the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    /// Which array it is in, and what its code looks like.
    kind: u8,
    links: u8,
    /// Grains.
    hot: u16,
    cold: u16,
}

impl Key {
    const BLOCK: u8 = 0;
    /// Checked entries for the carrier 0.
    const CHECKS: u8 = 2;
    /// Of a counter.
    pub const COUNTER: Key = Key { kind: 1, links: 1, hot: 0, cold: 0 };

    /// Of a block with so many bytes, links, and bytes of cold memory.
    pub fn of_block(bytes: usize, links: usize, cold: usize) -> Key {
        let grains = |bytes: usize| bytes.div_ceil(GRAIN) as u16;
        Key { kind: Self::BLOCK, links: links as u8, hot: grains(bytes), cold: grains(cold) }
    }

    /// Of a checked entry.
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

/// What can be used again.
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
    /// An index that has what `key` says, if one is free.
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

    /// The blocks that have rested, if it is time for every thread to forget their landings.
    fn wake(&mut self) -> Option<Vec<u32>> {
        if self.resting_bytes < RESTING {
            return None;
        }
        self.resting_bytes = 0;
        Some(std::mem::take(&mut self.resting))
    }

    /// Where a place is gone, or behind all others.
    pub fn put_place(&mut self, places: &mut Vec<Place>, place: Place) -> u32 {
        put(places, &mut self.places, place)
    }
}

/// One block among those made from one page.
struct Node {
    block: u32,
    /// The page's index in [`Pages::pages`].
    page: u32,
    /// The neighbours among those of the page.
    next: u32,
    before: u32,
    /// The next node of the same block.
    other: u32,
}

/// What was made from which guest pages.
#[derive(Default)]
pub(super) struct Pages {
    index: FxHashMap<u64, u32>,
    /// Pages and their first nodes, [`NONE`] if there is none.
    pages: Vec<(u64, u32)>,
    nodes: Vec<Node>,
    /// Pages and nodes that are gone.
    free: [Vec<u32>; 2],
    /// The page that was looked up last, and its index.
    last: Option<(u64, u32)>,
}

impl Pages {
    /// Empty, with room for so many nodes.
    pub fn with_capacity(nodes: usize) -> Pages {
        Pages { nodes: Vec::with_capacity(nodes), ..Pages::default() }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.index.clear();
        self.pages.clear();
        self.nodes.clear();
        self.free.iter_mut().for_each(Vec::clear);
        self.last = None;
    }

    /// The index of a page that has nodes, or is about to have one.
    fn page(&mut self, page: u64) -> u32 {
        if let Some((last, index)) = self.last
            && last == page
        {
            return index;
        }
        let index = *self
            .index
            .entry(page)
            .or_insert_with(|| put(&mut self.pages, &mut self.free[0], (page, NONE)));
        self.last = Some((page, index));
        index
    }

    /// The block was made from `source`; `node` is the first of its nodes. Returns what is that
    /// then.
    pub fn add(&mut self, block: u32, source: &Range<u64>, mut node: u32) -> u32 {
        for page in pages(source) {
            let page = self.page(page);
            let first = self.pages[page as usize].1;
            if self.nodes.get(first as usize).is_some_and(|known| known.block == block) {
                continue;
            }
            let new = Node { block, page, next: first, before: NONE, other: node };
            node = put(&mut self.nodes, &mut self.free[1], new);
            if let Some(next) = self.nodes.get_mut(first as usize) {
                next.before = node;
            }
            self.pages[page as usize].1 = node;
        }
        node
    }

    /// Forgets a block by the first of its nodes.
    fn remove(&mut self, mut node: u32) {
        while let Some(&Node { page, next, before, other, .. }) = self.nodes.get(node as usize) {
            if let Some(next) = self.nodes.get_mut(next as usize) {
                next.before = before;
            }
            match self.nodes.get_mut(before as usize) {
                Some(before) => before.next = next,
                None => self.pages[page as usize].1 = next,
            }
            if next == NONE && before == NONE {
                self.index.remove(&self.pages[page as usize].0);
                self.free[0].push(page);
                self.last = None;
            }
            self.free[1].push(node);
            node = other;
        }
    }

    fn known<'p>(&'p self, range: &'p Range<u64>) -> Box<dyn Iterator<Item = u32> + 'p> {
        let wanted = pages(range);
        let first = |index: &u32| self.pages[*index as usize].1;
        if wanted.end() - wanted.start() > self.index.len() as u64 {
            Box::new(
                self.index
                    .iter()
                    .filter(move |(page, _)| wanted.contains(page))
                    .map(move |(_, index)| first(index)),
            )
        } else {
            Box::new(wanted.filter_map(move |page| self.index.get(&page).map(first)))
        }
    }

    /// Is some block made from a page with bytes in `range`?
    fn any(&self, range: &Range<u64>) -> bool {
        self.known(range).next().is_some()
    }

    /// The blocks made from pages with bytes in `range`; some perhaps twice.
    fn blocks(&self, range: &Range<u64>) -> Vec<u32> {
        let mut found = Vec::new();
        for first in self.known(range) {
            let nodes = std::iter::successors(self.nodes.get(first as usize), |node| {
                self.nodes.get(node.next as usize)
            });
            found.extend(nodes.map(|node| node.block));
        }
        found
    }
}

/// Where something is gone, or behind all others.
fn put<T>(all: &mut Vec<T>, free: &mut Vec<u32>, new: T) -> u32 {
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

fn pages(range: &Range<u64>) -> std::ops::RangeInclusive<u64> {
    let last = range.end.wrapping_sub(1).max(range.start);
    range.start >> PAGE_SHIFT..=last >> PAGE_SHIFT
}

/// What was removed and still takes its memory, until the next flush.
#[derive(Debug)]
#[must_use = "it takes memory until it is reclaimed"]
pub struct Doomed {
    blocks: Vec<u32>,
    /// Blocks that were removed long ago.
    rested: Vec<u32>,
    checks: Vec<u32>,
    places: Vec<u32>,
    /// [`Blocks::generation`] then.
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

    /// How many blocks were removed.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }
}

impl Blocks {
    /// A block is found by its pages no more.
    pub(super) fn forget_pages(&mut self, index: u32) {
        self.pages.remove(self.blocks[index as usize].node);
    }

    pub(crate) fn check_at(&self, offset: u32) -> Option<u32> {
        let i = self.checks.partition_point(|c| c.start() <= offset).checked_sub(1)?;
        Some(i as u32)
    }
}

impl Emitter {
    /// Is some block made from code in this range?
    pub fn is_copied_from(&self, range: &Range<u64>) -> bool {
        self.blocks.pages.any(range)
    }

    /// Bytes of blocks that are gone, for which there is no use yet.
    pub fn copied_garbage(&self) -> usize {
        self.blocks.free.bytes + self.blocks.free.resting_bytes
    }

    /// Makes nothing lead into the blocks made from pages with bytes in `range`, and whoever is
    /// inside come out. When all are, the caller [reclaims](Emitter::reclaim) them.
    pub fn remove_copied(&mut self, range: &Range<u64>) -> Doomed {
        let mut doomed =
            self.blocks.stale.take().unwrap_or_else(|| Doomed::new(self.blocks.generation));
        if let Some(rested) = self.blocks.free.wake() {
            self.indirect.returns_mut().forget();
            doomed.rested.extend(rested);
        }
        for index in self.blocks.pages.blocks(range) {
            let Block { node, place, pc, .. } = self.blocks.blocks[index as usize];
            if self.blocks.places[place as usize].made[0] != index {
                continue;
            }
            self.blocks.pages.remove(node);
            self.blocks.changes.remove(&pc);
            self.remove_place(place, &mut doomed);
        }
        doomed
    }

    /// Removes all that a place has, but for a fragment.
    pub(super) fn remove_place(&mut self, place: u32, doomed: &mut Doomed) {
        let base = self.blocks.base;
        let p = &mut self.blocks.places[place as usize];
        let (pc, made) = (p.pc, std::mem::replace(&mut p.made, [NONE; 2]));
        let (registered, has_checks) =
            (std::mem::take(&mut p.registered), std::mem::take(&mut p.has_checks));
        (p.block, p.prefix) = (0, 0);
        let is_gone = |entry: u32| {
            self.blocks.at(base + u64::from(entry)).is_some_and(|block| made.contains(&block))
        };
        let entry = Some(self.blocks.places[place as usize].entry)
            .filter(|entry| !is_gone(*entry))
            .unwrap_or(0);
        if registered != 0 {
            self.indirect.remove(pc);
        }
        if has_checks {
            for via in (0..Via::COUNT).filter_map(Via::from_index) {
                let offset = self.blocks.apart.remove(&(place, via));
                doomed.checks.extend(offset.and_then(|offset| self.blocks.check_at(offset)));
            }
        }
        self.blocks.lead(place, entry, &self.cache, &self.fragments);
        for index in made.into_iter().filter(|index| *index != NONE) {
            self.close_landing(index);
            self.blocks.unlink(index, &self.indirect, &self.cache);
            doomed.blocks.push(index);
        }
        doomed.places.push(place);
    }

    /// Lets what the doomed took be used again: every thread has been outside since they were
    /// removed.
    pub fn reclaim(&mut self, doomed: Doomed) {
        let blocks = &mut self.blocks;
        // Another thread has dropped everything since.
        if doomed.generation != blocks.generation {
            return;
        }
        let mut targets = doomed.places;
        let mut gone = doomed.rested;
        for index in doomed.blocks {
            let block = &blocks.blocks[index as usize];
            block.unlinked.store(0, Ordering::Relaxed);
            blocks.unlinked.fetch_sub(1, Ordering::Relaxed);
            if block.landings.is_empty() {
                gone.push(index);
            } else {
                blocks.free.let_rest(block.key, index);
            }
        }
        for index in gone {
            for number in blocks.links_of(index) {
                let link = &blocks.links[number];
                if link.place != ANYWHERE {
                    debug_assert_eq!(link.place & FOREIGN, 0);
                    targets.push(link.place & PLACE);
                }
                blocks.part(number as u32);
            }
            let block = &mut blocks.blocks[index as usize];
            block.len = 0;
            if block.counter != NONE {
                blocks.heads.free.push(block.counter);
            }
            blocks.free.add(block.key, index);
            blocks.own.remove(&index);
            blocks.words.remove(&index);
        }
        for index in doomed.checks {
            let (key, link) =
                (blocks.checks[index as usize].key(), blocks.checks[index as usize].link);
            blocks.part(link);
            blocks.free.add(key, index);
        }
        targets.into_iter().for_each(|place| blocks.drop_place(place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_know_their_blocks() {
        let mut pages = Pages::default();
        let ranges = [0x1000..0x1010, 0x1ff0..0x2010, 0x2010..0x2020, 0x7000..0x7001];
        let mut nodes: Vec<u32> =
            (0..).zip(&ranges).map(|(block, range)| pages.add(block, range, NONE)).collect();
        // A second piece of it, on the same page.
        nodes[3] = pages.add(3, &(0x7100..0x7110), nodes[3]);
        let of = |pages: &Pages, range: Range<u64>| {
            let mut found = pages.blocks(&range);
            found.sort_unstable();
            found
        };
        assert_eq!(of(&pages, 0x1fff..0x2000), [0, 1]);
        assert_eq!(of(&pages, 0x2000..0x2001), [1, 2]);
        assert_eq!(of(&pages, 0..u64::MAX), [0, 1, 1, 2, 3]);
        pages.remove(nodes[1]);
        assert_eq!((of(&pages, 0x1000..0x2000), of(&pages, 0x2000..0x3000)), (vec![0], vec![2]));
        pages.remove(nodes[2]);
        assert!(!pages.any(&(0x2000..0x3000)) && pages.any(&(0x2fff..0x8000)));
        let nodes_before = pages.nodes.len();
        for round in 0..100 {
            let node = pages.add(9, &(round << 12..(round + 3) << 12), NONE);
            pages.remove(node);
        }
        assert!(pages.nodes.len() <= nodes_before + 3 && pages.index.len() == 2);
    }

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
