//! What fragments were made from, and fragments that rest because some of it was touched.
//!
//! A page of code changes for many reasons that do not concern a given fragment: data beside it, a
//! neighbour that is compiled, protections that a just-in-time compiler takes away and gives back.
//! So a fragment whose page was touched is not dropped but *rests*: nothing leads to it. When its
//! pc is wanted again its guest bytes are compared with those it was made from; if they are the
//! same, it comes back.

use crate::changes::CodePages;
use crate::memory;
use dynasour_emitter::{ExitId, FragmentId};
use dynasour_guest::decode::Watched;
use dynasour_guest::space::PAGE;
use dynasour_tracer::Path;
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;

/// So many fragments of one pc rest; the oldest goes when there are more.
const MOST_RESTING: usize = 4;

/// Who enters a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// Everybody who goes to this pc.
    Region(u64),
    /// One exit of another fragment.
    Side(ExitId),
}

/// The guest bytes of one fragment.
struct Source {
    role: Role,
    pieces: Vec<Piece>,
    /// Bytes of code.
    size: u64,
}

struct Piece {
    start: u64,
    bytes: Box<[u8]>,
    /// The fragment looks for itself whether they are still there.
    checked: bool,
}

/// See the module.
#[derive(Default)]
pub struct Sources {
    of: FxHashMap<FragmentId, Source>,
    by_page: FxHashMap<u64, Vec<FragmentId>>,
    resting: FxHashMap<Role, Vec<FragmentId>>,
    garbage: u64,
}

impl Sources {
    /// `fragment` was made from the blocks of `path`, whose bytes have not changed since they were
    /// recorded.
    pub fn add(&mut self, fragment: FragmentId, role: Role, path: &Path, size: u64) {
        let mut ranges: Vec<(bool, Range<u64>)> = path
            .steps
            .iter()
            .map(|step| {
                (step.block.checked.is_some(), step.block.pc..step.block.end.max(step.block.pc + 1))
            })
            .collect();
        ranges.sort_unstable_by_key(|(checked, range)| (*checked, range.start));
        ranges.dedup_by(|next, range| {
            let joins = next.0 == range.0 && next.1.start <= range.1.end;
            if joins {
                range.1.end = range.1.end.max(next.1.end);
            }
            joins
        });
        let mut pages = FxHashSet::default();
        let pieces = ranges.into_iter().map(|(checked, range)| {
            pages.extend((range.start / PAGE)..=((range.end - 1) / PAGE));
            let mut bytes = vec![0; (range.end - range.start) as usize];
            let len = memory::fetch_code(range.start, &mut bytes);
            bytes.truncate(len.max(1));
            Piece { start: range.start, bytes: bytes.into_boxed_slice(), checked }
        });
        self.of.insert(fragment, Source { role, pieces: pieces.collect(), size });
        for page in pages {
            self.by_page.entry(page).or_default().push(fragment);
        }
    }

    /// The fragments made from pages with bytes in `range`, resting ones too.
    pub fn made_from(&self, range: &Range<u64>) -> Vec<FragmentId> {
        if range.is_empty() || self.by_page.is_empty() {
            return Vec::new();
        }
        let pages = range.start / PAGE..=(range.end - 1) / PAGE;
        let few = pages.end() - pages.start() < self.by_page.len() as u64;
        let mut found: Vec<FragmentId> = if few {
            pages.filter_map(|page| self.by_page.get(&page)).flatten().copied().collect()
        } else {
            self.by_page
                .iter()
                .filter(|(page, _)| pages.contains(page))
                .flat_map(|(_, ids)| ids)
                .copied()
                .collect()
        };
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The fragments made from pages with bytes in `range` that do not rest yet: they do from now
    /// on.
    pub fn touch(&mut self, range: &Range<u64>) -> Vec<(FragmentId, Role)> {
        let mut touched = Vec::new();
        for fragment in self.made_from(range) {
            let Some(role) = self.of.get(&fragment).map(|source| source.role) else { continue };
            let resting = self.resting.entry(role).or_default();
            if resting.contains(&fragment) {
                continue;
            }
            resting.push(fragment);
            let oldest = (resting.len() > MOST_RESTING).then(|| resting.remove(0));
            if let Some(oldest) = oldest {
                self.drop_source(oldest);
            }
            touched.push((fragment, role));
        }
        touched
    }

    /// The resting fragments in this role whose bytes are what they were: they rest no more. Those
    /// whose bytes are not can never come back.
    pub fn wake(&mut self, role: Role, pages: &CodePages) -> Vec<FragmentId> {
        let Some(resting) = self.resting.remove(&role) else { return Vec::new() };
        let (same, changed): (Vec<_>, Vec<_>) = resting
            .into_iter()
            .partition(|id| self.of.get(id).is_some_and(|source| source.is_there(pages)));
        changed.into_iter().for_each(|id| self.drop_source(id));
        same
    }

    /// Does something rest in this role?
    pub fn rests(&self, role: Role) -> bool {
        self.resting.contains_key(&role)
    }

    /// Does this fragment look for itself whether its code is still there?
    pub fn is_checked(&self, fragment: FragmentId) -> bool {
        self.of.get(&fragment).is_some_and(|source| source.pieces.iter().any(|piece| piece.checked))
    }

    /// Who enters this fragment.
    pub fn role(&self, fragment: FragmentId) -> Option<Role> {
        self.of.get(&fragment).map(|source| source.role)
    }

    /// Are there no fragments, not even such that rest?
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Bytes of code that is never entered again.
    pub fn garbage(&self) -> u64 {
        self.garbage
    }

    /// Everything is gone.
    pub fn clear(&mut self) {
        *self = Sources::default();
    }

    /// This fragment never comes back.
    pub fn drop_source(&mut self, fragment: FragmentId) {
        let Some(source) = self.of.remove(&fragment) else { return };
        self.garbage += source.size;
        for piece in &source.pieces {
            for page in piece.start / PAGE..=(piece.end() - 1) / PAGE {
                if let Some(ids) = self.by_page.get_mut(&page) {
                    ids.retain(|id| *id != fragment);
                    if ids.is_empty() {
                        self.by_page.remove(&page);
                    }
                }
            }
        }
    }
}

impl Piece {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

impl Source {
    /// Are its bytes in memory, to stay, executable, and watched?
    fn is_there(&self, pages: &CodePages) -> bool {
        self.pieces.iter().all(|piece| {
            let len = piece.bytes.len();
            let mut now = vec![0; len];
            !pages.is_changing(&(piece.start..piece.end()))
                && pages.fetchable(piece.start, len) == len
                && (piece.checked
                    || pages.watch(piece.start..piece.end(), pages.moment()) != Watched::Impossible)
                && memory::fetch_code(piece.start, &mut now) == len
                && now[..] == piece.bytes[..]
        })
    }
}
