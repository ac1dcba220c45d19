//! Forced failures of guards (`--chaos`): drawn at random before a fragment is entered, undone
//! after native code has left.
//!
//! Under `--chaos` no link leads to a fragment (scope `Forced` of [`super::links::policy`]), so
//! each is entered from the runtime. A forced guard fails for every thread that executes it. So
//! only one thread at a time is in a fragment with forced guards; the others continue as if no
//! fragment started at their pc.
//!
//! Data: [`Forcing`], part of [`Fragments`]. The caller holds the lock of the fragments.
//!
//! Example: `--chaos 1/3` forces every third guard on average. A fragment with three guards is
//! entered. Its second guard is forced, so the guest leaves there. [`Fragments::restore`] makes the
//! guard test its predicate again.

use super::Fragments;
use crate::config::Chaos;
use dynasour_emitter::{ExitId, FragmentId, SiteKind};

/// The random choice of guards that are forced.
pub struct Forcing {
    /// One guard in this many, on average.
    one_in: u64,
    /// The state of the random number generator, never 0.
    random: u64,
    /// A thread is in a fragment with forced guards.
    is_busy: bool,
}

impl Forcing {
    pub fn new(chaos: Chaos) -> Forcing {
        // 2^64 divided by the golden ratio spreads small seeds over all bits.
        let random = chaos.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Forcing { one_in: u64::from(chaos.one_in), random, is_busy: false }
    }

    /// Is the next guard forced? The generator is xorshift64*.
    fn draw(&mut self) -> bool {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let drawn = self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        drawn.is_multiple_of(self.one_in)
    }

    /// In a forked child: no other thread is in a fragment.
    pub fn after_fork_child(&mut self) {
        self.is_busy = false;
    }
}

/// Guards that were forced for a thread that is about to enter their fragment.
#[derive(Debug)]
#[must_use]
pub struct Forced(Vec<ExitId>);

impl Fragments {
    /// Forces some guards of a fragment; none if another thread is in one with forced guards.
    pub(super) fn force(&mut self, fragment: FragmentId) -> Option<Forced> {
        let forcing = self.chaos.as_mut()?;
        if std::mem::replace(&mut forcing.is_busy, true) {
            return None;
        }
        let exits = self.emitter.fragment(fragment).map_or(0..0, |f| f.exits.clone());
        let guards: Vec<ExitId> = exits
            .map(ExitId)
            .filter(|exit| self.emitter.exit(*exit).is_some_and(|e| e.kind == SiteKind::Guard))
            .filter(|_| forcing.draw())
            .collect();
        let forced =
            guards.into_iter().filter(|exit| self.emitter.force_guard(*exit, true).is_ok());
        Some(Forced(forced.collect()))
    }

    /// Makes forced guards test their predicates again: the thread that they were forced for has
    /// left.
    pub(super) fn restore(&mut self, forced: Forced) {
        for exit in forced.0 {
            self.emitter.force_guard(exit, false).expect("it was forced a moment ago");
        }
        if let Some(forcing) = &mut self.chaos {
            forcing.is_busy = false;
        }
    }
}
