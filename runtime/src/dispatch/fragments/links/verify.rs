//! Links are verified in debug builds.
//!
//! [`Fragments::links_changed`] counts each change of links that the runtime makes. The verifier
//! ([`dynasour_emitter::links::verify`]) goes through all links, so it does not run at each change:
//! it runs when [`VERIFIED_PER_CHANGE`] times the changes since its last run reaches the number of
//! links. While there are few links that is at each change. At the end of each guest
//! [`Fragments::verify_all_links`] runs it once more, over the whole tables of indirect jumps, too.
//! A violation ends the process with SIGABRT (status 134), which fails every test.
//!
//! Data: the number of changes since the last run, in [`Fragments`]. The caller holds the lock of
//! the fragments. Release builds do nothing here.
//!
//! Example: there are 100 links. The verifier runs after the 25th change.

use crate::dispatch::fragments::Fragments;
use crate::kernel::process;
use crate::kernel::signal;
use dynasour_emitter::links::verify::Violation;

/// The number of links that are verified for each change, on average (guess: at some 50 ns for each
/// link, 0.2 µs for each change; measured: with 16 the test guest `signals_everything` with all
/// guards forced took three times as long; too low finds a violation late).
const VERIFIED_PER_CHANGE: usize = 4;

impl Fragments {
    /// A change of links is complete, so that the rules hold. (In the middle of a change they may
    /// not.)
    pub(in crate::dispatch::fragments) fn links_changed(&mut self) {
        if cfg!(debug_assertions) {
            self.unverified += 1;
            if self.unverified * VERIFIED_PER_CHANGE >= self.emitter.links_to_verify() {
                self.unverified = 0;
                self.emitter.verify_links().unwrap_or_else(|violation| violated(&violation));
            }
        }
    }

    /// Verifies all links and tables, at the end of a guest.
    pub fn verify_all_links(&self) {
        if cfg!(debug_assertions) {
            self.emitter.verify_links_and_tables().unwrap_or_else(|violation| violated(&violation));
        }
    }
}

/// Ends the process: a link breaks a rule, so an invariant of dynasour's own is broken.
fn violated(violation: &Violation) -> ! {
    process::complain(&format!("internal error: a link breaks a rule: {violation}"));
    signal::die(libc::SIGABRT);
}
