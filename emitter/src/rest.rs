//! Fragments that rest: nothing leads to them, and whoever is inside comes out, but their code stays and they can be led to
//! again, as long as nothing is flushed.
//!
//! Links that led to a resting fragment lead to the runtime again; when it wakes they are made anew as they are taken. Its
//! own links are unlinked meanwhile, as for a signal.

use crate::emitter::{EmitError, Emitter};
use crate::fragment::{ExitId, FragmentId};

impl Emitter {
    /// Makes nothing lead to these fragments any more but the table of indirect jumps ([`Emitter::forget_entry`]).
    pub fn put_to_rest(&mut self, ids: &[FragmentId]) {
        self.sever(ids);
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
