//! What a counting emitter has counted, and where its exits lead now: the questions of `explain`.
//!
//! The words that are counted in, and their meaning, are in [`crate::fragment::counting`]. This
//! module owns no data. The caller holds the emitter.
//!
//! Example: two guards share an anchor. [`Emitter::sharing`] names both exits for either of them,
//! because both leave by the same record.

use crate::emitter::Emitter;
use crate::fragment::counting::{Destination, Word};
use crate::fragment::{ExitId, FragmentRole, Link, fragment_at};

impl Emitter {
    /// Do fragments count?
    pub fn is_counting(&self) -> bool {
        self.counting.is_some()
    }

    /// Continues the counts of the emitter that this one replaces. Has made no fragment yet.
    pub fn continue_counts(&mut self, before: &Emitter) {
        if let (Some(counting), Some(before)) = (&mut self.counting, &before.counting) {
            counting.continue_from(before);
        }
    }

    /// The count in a word; 0 if nothing is counted.
    pub fn count(&self, word: Word) -> u64 {
        self.counting.as_ref().map_or(0, |c| c.get(word))
    }

    /// The exits that leave by the same record as this one, this one included.
    pub fn sharing(&self, exit: ExitId) -> Vec<ExitId> {
        let Some(e) = self.exit(exit) else { return Vec::new() };
        let exits = self.fragment(e.fragment).map_or(0..0, |f| f.exits.clone());
        let shares = |other: &ExitId| {
            self.exit(*other).is_some_and(|o| o.record.is_some() && o.record == e.record)
        };
        exits.map(ExitId).filter(shares).collect()
    }

    /// Where an exit leads now.
    pub fn destination(&self, exit: ExitId) -> Destination {
        let leads = |link: &&Link| link.target() != link.out;
        let link = self.borrowed_link(exit).filter(leads).or(self.link_of(exit).filter(leads));
        let Some(target) = link.map(Link::target) else { return Destination::Runtime };
        match fragment_at(&self.fragments, target) {
            Some(id) => match self.fragments[id.0 as usize].role {
                FragmentRole::Passage(to) => Destination::Fragment(to),
                FragmentRole::Trace | FragmentRole::Stub => Destination::Fragment(id),
            },
            None if self.block_at(target).is_some() => Destination::Block,
            None => Destination::Runtime,
        }
    }
}
