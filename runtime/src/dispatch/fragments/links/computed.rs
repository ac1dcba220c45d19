//! Exits with computed targets (of returns and indirect jumps that did not go where the trace
//! goes), in runs without copied blocks: to which fragment they are linked.
//!
//! A lookup in the tables costs more than a comparison, and needs canonical state. So if most of an
//! exit's failures go to one pc and a fragment starts there, the exit's stub compares the target
//! with that pc and leads to the fragment directly. Other targets leave by the stub's own guard.
//! That guard is an exit like others and may get such a stub, too. After [`MAX_COMPARING_STUBS`] of
//! them comes the lookup.
//!
//! Whether most failures go to one pc is found by a vote in constant space (Boyer and Moore). A
//! failure that goes to the candidate counts for it; another one counts against it. At zero the
//! next pc becomes the candidate.
//!
//! Data: [`Votes`], part of [`super::exits::Exits`]. The caller holds the lock of the fragments.
//!
//! Example: of 50 failures 45 went to 0x2000. Its votes are at least 40 ahead, which is more than
//! half of 50, so the stub compares with 0x2000.

use super::exits::Event;
use super::policy::{Destination, ExitOrigin};
use crate::dispatch::fragments::Fragments;
use dynasour_emitter::{ExitId, StubTarget};
use rustc_hash::FxHashMap;

/// The most stubs in a row that compare with a pc (guess: the lookup costs about as much as three
/// comparisons; higher makes targets that none of them expects slower).
const MAX_COMPARING_STUBS: usize = 2;

/// The candidate of an exit, and by how many votes it is ahead.
#[derive(Clone, Copy, Default)]
struct Candidate {
    pc: u64,
    ahead: u32,
}

/// The votes of all exits.
#[derive(Default)]
pub struct Votes(FxHashMap<ExitId, Candidate>);

impl Votes {
    /// Counts that an exit went to `pc`.
    pub fn vote(&mut self, exit: ExitId, pc: u64) {
        let candidate = self.0.entry(exit).or_default();
        match candidate.ahead {
            0 => *candidate = Candidate { pc, ahead: 1 },
            _ if candidate.pc == pc => candidate.ahead += 1,
            _ => candidate.ahead -= 1,
        }
    }

    /// The pc to which at least three of four of the last `times` failures went, if there is one. A
    /// new count begins.
    fn take(&mut self, exit: ExitId, times: u32) -> Option<u64> {
        let candidate = self.0.remove(&exit)?;
        (candidate.ahead >= times / 2).then_some(candidate.pc)
    }

    /// Forgets all votes.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl Fragments {
    /// Links an exit with a computed target that came to the runtime `times` times.
    pub(super) fn link_computed(&mut self, exit: ExitId, origin: ExitOrigin, times: u32) {
        let pc = self.exits.votes.take(exit, times);
        let stubs =
            std::iter::successors(Some(exit), |exit| Some(self.stub_of(*exit)?.origin)).count();
        if let Some(pc) = pc.filter(|_| stubs <= MAX_COMPARING_STUBS) {
            self.wake(pc);
            if let Some(next) = self.successor(exit, origin, pc) {
                let to = Destination::Fragment(pc, self.rank(next));
                return self.want_stub(exit, Event::Link, to, StubTarget::FragmentIf(next));
            }
        }
        self.link_to_tables(exit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pc_is_found_if_most_go_there() {
        let (mut votes, exit) = (Votes::default(), ExitId(3));
        (0..100).for_each(|n| votes.vote(exit, if n % 5 == 0 { n } else { 0x1000 }));
        assert_eq!(votes.take(exit, 100), Some(0x1000));
        assert_eq!(votes.take(exit, 100), None, "a new count");
        (0..100).for_each(|n| votes.vote(exit, n % 2));
        assert_eq!(votes.take(exit, 100), None);
    }
}
