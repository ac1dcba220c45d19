//! The record of each fragment: its role, its shape, the guest bytes it was made from, its state.
//!
//! ```text
//!   placed ──► LIVE ─── a page was touched ───► RESTING ─── bytes differ, or too many ──► dropped
//!               ▲                                 │         rest in its role
//!               └── wanted again, same bytes ◄────┘
//! ```
//!
//! A page of code is *touched* when something is done to it that may change the code: a store to
//! data on the same page, a just-in-time compiler that writes a neighbouring function, mprotect
//! that makes the page writable and back. Most of these do not change a given fragment's code. So a
//! fragment whose page was touched is not dropped but *rests*: nothing leads to it. When its pc is
//! wanted again, its guest bytes are compared with those it was made from. If they are the same, it
//! is live again.
//!
//! Data: [`Lives`]. A dropped fragment has no record. Invariant: the list of a role holds exactly
//! the fragments of that role whose state is [`State::Resting`]. The caller holds the lock of the
//! fragments.
//!
//! Example: the region 0x1000 has the fragment 7. A store touches its page: 7 rests. Then an exit
//! leads to 0x1000: `wake(Role::Region(0x1000))` compares the bytes and returns 7.

use crate::changes::CodePages;
use crate::memory;
use dynasour_emitter::{ExitId, FragmentId};
use dynasour_guest::decode::Watched;
use dynasour_guest::space::PAGE;
use dynasour_ir::{Context, Fact};
use dynasour_tracer::{Assumption, GuestKey, Path, TraceShape};
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;

/// The most fragments that rest in one role (guess: each is compared when the role is wanted; too
/// low compiles traces again that could be woken). When there are more, the oldest is dropped.
const MAX_RESTING_PER_ROLE: usize = 4;

/// From where a fragment is entered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// From everything that leads to this pc: it is a version of the region there.
    Region(u64),
    /// From one exit of another fragment: it is that exit's side trace.
    SideTrace(ExitId),
}

/// What kind of path a fragment was made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shape {
    /// It is a loop, not a linear trace.
    pub is_loop: bool,
    /// The path goes through an indirect jump or call.
    pub jumps_indirectly: bool,
    /// The guest is an interpreter, and the path is a loop of the program that it interprets.
    pub is_guest_loop: bool,
}

/// Whether a fragment can be entered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Links and tables may lead to it.
    Live,
    /// A page that it was made from was touched: nothing leads to it.
    Resting,
}

/// All that is known of a fragment beside its code.
struct Life {
    role: Role,
    shape: Shape,
    state: State,
    /// The guest bytes it was made from.
    guest_bytes: Vec<GuestBytes>,
    /// What it assumes beyond its path.
    assumptions: Vec<Assumption>,
    /// The key of a loop of an interpreted program.
    key: Option<GuestKey>,
    /// Its group in the order of its region ([`super::links::policy::Rank`]).
    group: u32,
    /// Bytes of its native code.
    size: u64,
}

/// Guest bytes that a fragment was made from.
struct GuestBytes {
    start: u64,
    bytes: Box<[u8]>,
    /// The fragment itself compares them with memory at each entry.
    checked: bool,
}

/// The lives of all fragments.
#[derive(Default)]
pub struct Lives {
    by_fragment: FxHashMap<FragmentId, Life>,
    /// The fragments made from each page.
    by_page: FxHashMap<u64, Vec<FragmentId>>,
    /// The resting fragments of each role, the oldest first.
    resting: FxHashMap<Role, Vec<FragmentId>>,
    /// Bytes of native code of dropped fragments, whose memory is not used again before a flush.
    garbage: u64,
}

impl Lives {
    /// `fragment`, with `size` bytes of code, was made from the blocks of `path` and the memory of which
    /// its `context` has facts. These bytes have not changed since. It assumes this, and is live.
    pub fn add(
        &mut self,
        fragment: FragmentId,
        role: Role,
        path: &Path,
        context: &Context,
        assumptions: Vec<Assumption>,
        size: u64,
    ) {
        let mut ranges: Vec<(bool, Range<u64>)> = path
            .all_steps()
            .map(|step| {
                (step.block.checked.is_some(), step.block.pc..step.block.end.max(step.block.pc + 1))
            })
            .chain(context.facts.iter().filter_map(|fact| match *fact {
                Fact::MemEquals { ty, address, .. } => {
                    Some((false, address..address + u64::from(ty.bytes())))
                }
                _ => None,
            }))
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
        let guest_bytes = ranges.into_iter().map(|(checked, range)| {
            pages.extend((range.start / PAGE)..=((range.end - 1) / PAGE));
            let mut bytes = vec![0; (range.end - range.start) as usize];
            let len = memory::fetch_code(range.start, &mut bytes);
            bytes.truncate(len.max(1));
            GuestBytes { start: range.start, bytes: bytes.into_boxed_slice(), checked }
        });
        let in_region = matches!(role, Role::Region(_));
        let shape = Shape {
            is_loop: path.shape == TraceShape::Loop,
            jumps_indirectly: in_region && path.jumps_indirectly(),
            is_guest_loop: in_region && path.guest.is_some(),
        };
        let key = path.guest.as_ref().map(|guest| guest.key.clone());
        let guest_bytes = guest_bytes.collect();
        let (state, group) = (State::Live, 0);
        let life = Life { role, shape, state, guest_bytes, assumptions, key, group, size };
        self.by_fragment.insert(fragment, life);
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

    /// Makes the live fragments rest that were made from pages with bytes in `range`; returns them.
    pub fn touch(&mut self, range: &Range<u64>) -> Vec<(FragmentId, Role)> {
        let mut touched = Vec::new();
        for fragment in self.made_from(range) {
            let Some(life) = self.by_fragment.get_mut(&fragment) else { continue };
            if std::mem::replace(&mut life.state, State::Resting) == State::Resting {
                continue;
            }
            let role = life.role;
            let resting = self.resting.entry(role).or_default();
            resting.push(fragment);
            let oldest = (resting.len() > MAX_RESTING_PER_ROLE).then(|| resting.remove(0));
            if let Some(oldest) = oldest {
                self.drop(oldest);
            }
            touched.push((fragment, role));
        }
        touched
    }

    /// Makes the fragments live again that rest in this role and whose guest bytes have not
    /// changed; returns them. The others that rest in this role are dropped.
    pub fn wake(&mut self, role: Role, pages: &CodePages) -> Vec<FragmentId> {
        let Some(resting) = self.resting.remove(&role) else { return Vec::new() };
        let (same, changed): (Vec<_>, Vec<_>) = resting
            .into_iter()
            .partition(|id| self.by_fragment.get(id).is_some_and(|life| life.is_unchanged(pages)));
        changed.into_iter().for_each(|id| self.drop(id));
        for id in &same {
            self.by_fragment.entry(*id).and_modify(|life| life.state = State::Live);
        }
        same
    }

    /// Does a fragment rest in this role?
    pub fn rests(&self, role: Role) -> bool {
        self.resting.contains_key(&role)
    }

    /// Does this fragment compare its guest bytes itself?
    pub fn is_checked(&self, fragment: FragmentId) -> bool {
        self.by_fragment
            .get(&fragment)
            .is_some_and(|life| life.guest_bytes.iter().any(|part| part.checked))
    }

    /// The role of this fragment; none if it is a stub or was dropped.
    pub fn role(&self, fragment: FragmentId) -> Option<Role> {
        self.by_fragment.get(&fragment).map(|life| life.role)
    }

    /// What this fragment assumes beyond its path.
    pub fn assumptions(&self, fragment: FragmentId) -> &[Assumption] {
        self.by_fragment.get(&fragment).map_or(&[], |life| &life.assumptions)
    }

    /// The key of this fragment, if it is a loop of an interpreted program.
    pub fn key(&self, fragment: FragmentId) -> Option<&GuestKey> {
        self.by_fragment.get(&fragment)?.key.as_ref()
    }

    /// The shape of this fragment.
    pub fn shape(&self, fragment: FragmentId) -> Shape {
        self.by_fragment.get(&fragment).map_or(Shape::default(), |life| life.shape)
    }

    /// The group of this fragment in the order of its region.
    pub fn group(&self, fragment: FragmentId) -> u32 {
        self.by_fragment.get(&fragment).map_or(0, |life| life.group)
    }

    /// This fragment belongs to another group in the order of its region. The caller sorts the region.
    pub fn set_group(&mut self, fragment: FragmentId, group: u32) {
        self.by_fragment.entry(fragment).and_modify(|life| life.group = group);
    }

    /// Are there neither live nor resting fragments?
    pub fn is_empty(&self) -> bool {
        self.by_fragment.is_empty()
    }

    /// Bytes of code of dropped fragments.
    pub fn garbage(&self) -> u64 {
        self.garbage
    }

    /// Forgets all fragments.
    pub fn clear(&mut self) {
        *self = Lives::default();
    }

    /// Drops a fragment's record. If it rests, the caller has taken it off its role's list.
    pub fn drop(&mut self, fragment: FragmentId) {
        let Some(life) = self.by_fragment.remove(&fragment) else { return };
        self.garbage += life.size;
        for part in &life.guest_bytes {
            for page in part.start / PAGE..=(part.end() - 1) / PAGE {
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

impl GuestBytes {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

impl Life {
    /// Are its guest bytes in memory as they were, executable, and watched for changes from now on?
    fn is_unchanged(&self, pages: &CodePages) -> bool {
        self.guest_bytes.iter().all(|part| {
            let len = part.bytes.len();
            let mut now = vec![0; len];
            !pages.is_changing(&(part.start..part.end()))
                && pages.fetchable(part.start, len) == len
                && (part.checked
                    || pages.watch(part.start..part.end(), pages.moment()) != Watched::Impossible)
                && memory::fetch_code(part.start, &mut now) == len
                && now[..] == part.bytes[..]
        })
    }
}
