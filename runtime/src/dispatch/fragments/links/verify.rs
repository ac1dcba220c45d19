//! Links are verified in debug builds.
//!
//! After each change of links that the runtime makes, [`Fragments::links_changed`] counts it. The
//! verifier ([`dynasour_emitter::links::verify`]) runs when there have been as many changes as make
//! its time a fixed share of theirs: at each change while there are few links, and seldom while
//! there are many. At the end of each guest [`Fragments::verify_all_links`] runs it once more, over
//! the whole tables. A violation ends the process with SIGABRT (status 134), which fails every
//! test.
//!
//! The caller holds the lock of the fragments. Release builds do nothing here.

use crate::dispatch::fragments::Fragments;
use crate::kernel::process;
use crate::kernel::signal;
use dynasour_emitter::links::verify::Violation;

/// Links that are verified for each change, on average (guess: at some 50 ns for each, a fifth of a
/// microsecond a change; with 16, `signals_everything` with all guards forced took three times as
/// long).
const VERIFIED_PER_CHANGE: usize = 4;

impl Fragments {
    /// Links have been changed. All is as it should be again: between two steps of one change it
    /// may not be.
    pub(in crate::dispatch::fragments) fn links_changed(&mut self) {
        if cfg!(debug_assertions) {
            self.unverified += 1;
            if self.unverified * VERIFIED_PER_CHANGE >= self.emitter.links_to_verify() {
                self.unverified = 0;
                self.emitter.verify_links().unwrap_or_else(|violation| violated(&violation));
            }
        }
    }

    /// The guest ends.
    pub fn verify_all_links(&self) {
        if cfg!(debug_assertions) {
            self.emitter.verify_links_and_tables().unwrap_or_else(|violation| violated(&violation));
        }
    }
}

/// A broken invariant of ours.
fn violated(violation: &Violation) -> ! {
    process::complain(&format!("internal error: a link breaks a rule: {violation}"));
    signal::die(libc::SIGABRT);
}
