//! Which blocks were made from which guest pages, so that a change of a page finds its blocks.
//!
//! Each block has one *node* for each page that it was made from. The nodes of a page are a doubly
//! linked list; the nodes of a block are a singly linked list, which begins at the block's `node`.
//! Nodes live in one array and are used again, so a block that comes and goes allocates nothing.
//!
//! Invariant: a page is in the index if and only if it has a node. The caller holds the emitter.
//!
//! Example: a block of the bytes 0x1ff0 to 0x2010 has two nodes, one in the list of page 1 and one
//! in the list of page 2. A store to 0x2800 removes the block, because it finds it by page 2.

use super::places::NONE;
use super::removal::put;
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Guest pages have 4 KiB (Intel SDM vol. 3, 4.5).
const PAGE_SHIFT: u32 = 12;

/// A node: one block in the list of one page.
struct Node {
    block: u32,
    /// The page's index in [`Pages::pages`].
    page: u32,
    /// The neighbours in the list of the page.
    next: u32,
    before: u32,
    /// The next node of the same block.
    other: u32,
}

/// The blocks of each guest page.
#[derive(Default)]
pub(super) struct Pages {
    index: FxHashMap<u64, u32>,
    /// Pages and their first nodes, [`NONE`] if there is none.
    pages: Vec<(u64, u32)>,
    nodes: Vec<Node>,
    /// Free indices of pages, and of nodes.
    free: [Vec<u32>; 2],
    /// The page that was looked up last, and its index.
    last: Option<(u64, u32)>,
}

impl Pages {
    /// Empty, with room for this number of nodes.
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

    /// Notes that a block was made from `source`. `node` is the first node of the block, or
    /// [`NONE`]. Returns the first node after this.
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
    pub fn remove(&mut self, mut node: u32) {
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
    pub fn any(&self, range: &Range<u64>) -> bool {
        self.known(range).next().is_some()
    }

    /// The blocks made from pages with bytes in `range`; some perhaps twice.
    pub fn blocks(&self, range: &Range<u64>) -> Vec<u32> {
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

/// The numbers of the pages that have bytes in `range`. An empty range counts as one byte.
fn pages(range: &Range<u64>) -> std::ops::RangeInclusive<u64> {
    let last = range.end.wrapping_sub(1).max(range.start);
    range.start >> PAGE_SHIFT..=last >> PAGE_SHIFT
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
}
