//! Fragments that rest: nothing leads to them, and whoever is inside comes out, but their code stays and they can be led to
//! again, as long as nothing is flushed.
//!
//! Links that led to a resting fragment lead to the runtime again; when it wakes they are made anew as they are taken. Its
//! own links are unlinked meanwhile, as for a signal.

use crate::emitter::{EmitError, Emitter};
use crate::fragment::{ExitId, FragmentId};
use rustc_hash::FxHashSet;
use std::sync::atomic::Ordering;

impl Emitter {
    /// Makes nothing lead to these fragments any more but the table of indirect jumps ([`Emitter::forget_entry`]).
    pub fn put_to_rest(&mut self, ids: &[FragmentId]) {
        let entries: FxHashSet<u64> = ids.iter().filter_map(|id| self.fragment(*id)).map(|f| f.entry).collect();
        for link in self.fragments().iter().flat_map(|f| f.links.iter()) {
            // A fragment's own back edge is no link into it from outside.
            if (link.exit.is_some() || link.record.is_some()) && entries.contains(&link.target()) {
                link.target.store(link.out, Ordering::Relaxed);
                self.cache().patch_rel32(link.field, link.out);
            }
        }
        for &id in ids {
            self.unlink_for_signal(id);
        }
    }

    /// A resting fragment can be run again.
    pub fn wake(&self, id: FragmentId) {
        self.relink(id);
    }

    /// A resting fragment that was [attached](Emitter::attach) to an exit can be run again, from there.
    ///
    /// # Errors
    /// There is no such exit or fragment.
    pub fn wake_attached(&self, exit: ExitId, id: FragmentId) -> Result<(), EmitError> {
        self.wake(id);
        self.attach(exit, id)
    }
}
