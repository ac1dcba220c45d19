//! Assumptions that do not hold any more: the trace that makes them is dropped
//! ([`dynasour_tracer::assumptions`] has the idea).
//!
//! Data: none of its own; [`super::lives`] has what each version of a region assumes. Invariant: an
//! assumption is only looked at when an exit is hot; until then its guard leaves the trace each time
//! that it fails. The caller holds the lock of the fragments.
//!
//! Example: the loop of an interpreted program at the head 0x1000 assumes that the byte at 0x5012 is
//! 7. The program has been changed, and the guard's exit gets hot: [`Fragments::undo`] finds 9 there,
//! drops the version and returns 0x5012.

use super::{Fragments, SideRequest};
use crate::memory;
use crate::observe::events::Why;
use dynasour_emitter::FragmentId;
use dynasour_guest::ThreadContext;
use dynasour_tracer::{Assumption, GuestKey, Place};

/// Versions of a region that were dropped.
#[derive(Debug)]
pub struct Undone {
    /// Their head.
    pub head: u64,
    /// The keys of those that were loops of an interpreted program.
    pub keys: Vec<GuestKey>,
    /// Where values were assumed that are no longer there.
    pub places: Vec<Place>,
    /// There was no other version, so nothing starts at the head now.
    pub were_all: bool,
}

impl Fragments {
    /// The guest has left by a hot exit, with this state. If the version of the region that the exit
    /// belongs to has assumed what is not so, it is dropped, and with it the other versions there that
    /// assume the same. None if it has not.
    pub fn undo(&mut self, side: &SideRequest, context: &ThreadContext) -> Option<Undone> {
        if self.retired || side.generation != self.generation {
            return None;
        }
        let left = self.emitter.exit(side.exit)?.fragment;
        let version = self.region_of(left)?;
        let head = self.emitter.fragment(version)?.pc;
        // A guard at the entry has failed, so the registers are those at the head.
        let is_at_entry = left == version && side.pc == head;
        let gpr = is_at_entry.then_some(&context.gpr);
        let fails = |a: &&Assumption| !a.holds(gpr, memory::read_word);
        let assumed = self.lives.assumptions(version);
        let places: Vec<Place> = assumed.iter().filter(fails).map(|a| a.place).collect();
        if places.is_empty() {
            return None;
        }
        let region = self.regions.get(&head)?;
        let same =
            |id: &FragmentId| self.lives.assumptions(*id).iter().any(|a| places.contains(&a.place));
        let dropped: Vec<FragmentId> = region.fragments.iter().copied().filter(same).collect();
        let keys = dropped.iter().filter_map(|id| self.lives.key(*id).cloned()).collect();
        self.drop_versions(head, Why::AssumptionFailed, |_, id| dropped.contains(&id));
        self.stats.undone += places.len() as u64;
        Some(Undone { head, keys, places, were_all: self.first_version(head).is_none() })
    }
}
