//! Where exits with computed targets go: returns and indirect jumps that did not go where the trace went.
//!
//! The lookup that all targets share costs more than a comparison, and it needs canonical state. So when most of an
//! exit's failures go to one place, and a fragment starts there, its stub tests for that place and leads there directly;
//! what goes elsewhere leaves by the stub's own guard, which is an exit like others and may get such a stub, too. After
//! [`DEEPEST`] of them comes the lookup.
//!
//! Whether one place has most is found by a vote in constant space (Boyer and Moore): a failure that goes where the
//! candidate is counts for it, another one against it, and at zero the next becomes the candidate.

use super::Fragments;
use dynasour_emitter::{EmitError, ExitId, FragmentId};
use rustc_hash::FxHashMap;

/// Stubs in a row that test for a place.
const DEEPEST: usize = 2;

/// The candidate of an exit, and how many votes it is ahead.
#[derive(Clone, Copy, Default)]
struct Aim {
    pc: u64,
    ahead: u32,
}

/// The votes of all exits.
#[derive(Default)]
pub(super) struct Aims(FxHashMap<ExitId, Aim>);

impl Aims {
    /// An exit has gone to `pc`.
    pub fn went(&mut self, exit: ExitId, pc: u64) {
        let aim = self.0.entry(exit).or_default();
        match aim.ahead {
            0 => *aim = Aim { pc, ahead: 1 },
            _ if aim.pc == pc => aim.ahead += 1,
            _ => aim.ahead -= 1,
        }
    }

    /// Where most of the last `times` failures went, if three of four did; a new count begins.
    fn take(&mut self, exit: ExitId, times: u32) -> Option<u64> {
        let aim = self.0.remove(&exit)?;
        (aim.ahead >= times / 2).then_some(aim.pc)
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl Fragments {
    /// Links an exit with a computed target that was taken so many times; `own` as for [`Fragments::successor`].
    pub(super) fn link_computed(
        &mut self,
        exit: ExitId,
        own: Option<FragmentId>,
        times: u32,
    ) -> Result<FragmentId, EmitError> {
        let place = self.aims.take(exit, times);
        let stubs = std::iter::successors(Some(exit), |exit| Some(self.stub_of(*exit)?.origin)).count();
        if let Some(pc) = place.filter(|_| stubs <= DEEPEST) {
            self.wake(pc);
            if let Some(next) = self.successor(own, pc) {
                return self.emitter.link_exit_if(exit, next);
            }
        }
        self.emitter.link_indirect_exit(exit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_found_if_most_go_there() {
        let (mut aims, exit) = (Aims::default(), ExitId(3));
        (0..100).for_each(|n| aims.went(exit, if n % 5 == 0 { n } else { 0x1000 }));
        assert_eq!(aims.take(exit, 100), Some(0x1000));
        assert_eq!(aims.take(exit, 100), None, "a new count");
        (0..100).for_each(|n| aims.went(exit, n % 2));
        assert_eq!(aims.take(exit, 100), None);
    }
}
