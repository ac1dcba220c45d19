//! The jumps of one fragment: where they lead, and how they are made to lead out.
//!
//! Data: [`Link::target`] and [`Fragment::unlinked`], which are atomics, because signal handlers
//! read and change them. Invariant: the state is changed first, then [`writer`] writes the jump. So
//! a handler that interrupts a change writes what the state says, and the change, which goes on
//! later, writes the same.
//!
//! Threads that hold the emitter call these functions. [`Fragment::unlink`] and
//! [`Fragment::relink`] may also be called in a signal handler.
//!
//! Example: the end of a fragment is linked to 0x2000_4000. A signal unlinks the fragment: the
//! count becomes 1, and all its jumps lead to their stubs. Meanwhile `lead` makes the end's target
//! 0x2000_8000 and writes nothing. `relink` makes the count 0 and writes the jump to 0x2000_8000.

use super::{Fragment, Link, fragment_at};
use crate::cache::{Cache, writer};
use std::sync::atomic::Ordering;

impl Fragment {
    /// Sets where one of its links leads while the fragment is linked.
    pub(crate) fn lead(&self, link: &Link, target: u64, cache: &Cache) {
        link.target.store(target, Ordering::Relaxed);
        if !self.is_unlinked() {
            writer::lead(cache, link.field, target);
        }
    }

    /// Do its links lead out at present?
    pub(crate) fn is_unlinked(&self) -> bool {
        self.unlinked.load(Ordering::Relaxed) != 0
    }

    /// Makes all its links lead out until [`Fragment::relink`] was called as often.
    pub(crate) fn unlink(&self, cache: &Cache) {
        self.unlinked.fetch_add(1, Ordering::Relaxed);
        self.links.iter().for_each(|link| writer::lead(cache, link.field, link.out));
    }

    /// Undoes one [`Fragment::unlink`].
    pub(crate) fn relink(&self, cache: &Cache) {
        if self.unlinked.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.links.iter().for_each(|link| writer::lead(cache, link.field, link.target()));
        }
    }
}

/// Sets the target of the fragment's link whose field is at `field`. The jump is written now, or
/// when the fragment is linked again.
pub(crate) fn set_target(fragments: &[Fragment], field: u64, target: u64, cache: &Cache) {
    let fragment = fragment_at(fragments, field).and_then(|id| fragments.get(id.0 as usize));
    let Some(fragment) = fragment else { return };
    if let Some(link) = fragment.links.iter().find(|l| l.field == field) {
        fragment.lead(link, target, cache);
    }
}
