//! In which order the loops of an interpreted program are tried, by where samples find the guest.
//!
//! The loops that start at one head are tried one after the other, and each that is not the right one costs its
//! entry guards. The oldest is tried first ([`super::links::policy::Rank`]). But the guest may be done with the
//! oldest: it has filled a table, and computes now. So samples are counted that interrupt these loops. A loop
//! in which none of [`SAMPLES`] was takes next to no time, so that it is not entered often either, and is set
//! back behind those that do ([`Fragments::set_back`]).
//!
//! Data: [`Orders`], part of [`Fragments`]. Invariant: the order of a region does not change while a trace of it
//! races. The caller holds the lock of the fragments.
//!
//! Example: the loops A and B start at the dispatch 0x1000. A was found first. B is executed, and at each
//! dispatch that is not A's A is tried, too. Of 64 samples all are in B: B is tried first from now on.

use super::Fragments;
use dynasour_emitter::FragmentId;
use rustc_hash::{FxHashMap, FxHashSet};

/// So many samples in the loops of a head decide (guess: a loop in which none of them was takes less than 5 % of the
/// time; too many leave it in front of the others for long).
const SAMPLES: u32 = 64;

/// Samples in the loops of interpreted programs, by their heads.
#[derive(Debug, Default)]
pub struct Orders(FxHashMap<u64, Tally>);

/// The samples in the loops of a head since their order was decided last.
#[derive(Debug, Default)]
struct Tally {
    samples: u32,
    found: FxHashSet<FragmentId>,
}

impl Orders {
    /// All fragments are dropped.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// A sample was in this loop of the head at `pc`. Returns the loops that samples were in since the order was
    /// decided last, if it is to be decided now.
    fn count(&mut self, pc: u64, id: FragmentId) -> Option<FxHashSet<FragmentId>> {
        let tally = self.0.entry(pc).or_default();
        tally.samples += 1;
        tally.found.insert(id);
        let is_enough = tally.samples >= SAMPLES;
        is_enough.then(|| self.0.remove(&pc)).flatten().map(|tally| tally.found)
    }
}

impl Fragments {
    /// A sample has interrupted a thread at this address in native code. Returns the head of loops whose order has
    /// changed.
    pub fn note_sample(&mut self, host_rip: u64) -> Option<u64> {
        let id = self.region_of(self.emitter.fragment_at(host_rip)?)?;
        let pc = self.emitter.fragment(id)?.pc;
        let is_among_loops = self.lives.shape(id).is_guest_loop
            && self.regions.get(&pc).is_some_and(|region| region.fragments.len() > 1);
        if self.retired || !is_among_loops || self.races.races(pc) {
            return None;
        }
        let found = self.orders.count(pc, id)?;
        let versions = &self.regions.get(&pc)?.fragments;
        let last = versions.iter().rposition(|id| found.contains(id))?;
        let idle: Vec<FragmentId> =
            versions[..last].iter().filter(|id| !found.contains(id)).copied().collect();
        if idle.is_empty() {
            return None;
        }
        self.set_back(pc, &idle);
        self.stats.set_back += idle.len() as u64;
        Some(pc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_decided_after_enough_samples() {
        let mut orders = Orders::default();
        for round in 0..2 {
            for n in 1..SAMPLES {
                assert!(orders.count(0x1000, FragmentId(n % 3)).is_none(), "{round} {n}");
                assert!(orders.count(u64::from(n), FragmentId(7)).is_none(), "another head");
            }
            let found = orders.count(0x1000, FragmentId(1)).expect("these are enough");
            let expected = [0, 1, 2].map(FragmentId);
            assert_eq!(found, expected.into_iter().collect());
            orders.clear();
        }
    }
}
