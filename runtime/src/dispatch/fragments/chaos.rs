//! Forced failures of guards (`--chaos`): drawn at random before a fragment is entered, undone
//! behind it.

use super::Fragments;
use dynasour_emitter::{ExitId, FragmentId, SiteKind};

impl Fragments {
    /// Chaos: forces some guards of a fragment; gives back which.
    pub(super) fn force(&mut self, fragment: FragmentId) -> Vec<ExitId> {
        let Some((chaos, random)) = &mut self.chaos else { return Vec::new() };
        let exits = self.emitter.fragment(fragment).map_or(0..0, |f| f.exits.clone());
        let mut forced = Vec::new();
        for exit in exits.map(ExitId) {
            if self.emitter.exit(exit).is_none_or(|e| e.kind != SiteKind::Guard) {
                continue;
            }
            // xorshift64*
            *random ^= *random >> 12;
            *random ^= *random << 25;
            *random ^= *random >> 27;
            let draw = random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
            if draw % u64::from(chaos.one_in) == 0 && self.emitter.force_guard(exit, true).is_ok() {
                forced.push(exit);
            }
        }
        forced
    }

    /// Lets forced guards test again.
    pub fn restore(&mut self, forced: Vec<ExitId>) {
        for exit in forced {
            self.emitter.force_guard(exit, false).expect("it was forced a moment ago");
        }
    }
}
