//! How the child of a vfork runs: a process in its suspended parent's memory, for the short time
//! until it executes another program or exits.
//!
//! The child uses the dispatcher and the peer of the parent's thread, which sleeps. It makes no
//! fragments, is not sampled and writes no report. Its code is interpreted, or runs in place under
//! `direct`: the child turns syscall user dispatch on for itself, with the selector of its own
//! context. A patch may lead it into a trace; what the trace's exit asks the runtime to compile is
//! not compiled.
//!
//! Data: [`ChildCalls`], which the child leaves to its parent, part of the thread's [`Dispatcher`]. Invariants: while the child runs, the peer names the child
//! ([`Peer::attach`](super::peers::Peer::attach)), so threads that call the peer's thread out of the
//! cache send the signal to the child. The child is *outside* when it executes another program, so
//! nobody calls it then; [`Dispatcher::vfork_child_is_gone`] makes the peer name the parent again.
//! The parent's own [`InPlace`] is not touched, because the kernel has kept the parent's dispatch.
//!
//! Called on the child's stack, in the child. No lock of the dispatcher's is held.
//!
//! Example: `posix_spawn` makes a child that asks for 62 dispositions and sets them, and calls execve. Under
//! `direct` each of these calls traps; interpreted, its blocks would be lifted first, which took 1 ms. They are
//! noted ([`ChildCalls`]), and at its next trap the parent counts them. After the second child it rewrites the site.

use super::Dispatcher;
use super::call_sites::Traps;
use super::fragments::Arrival;
use super::in_place::{InPlace, trap};
use super::stretch::Ended;
use crate::changes::patches;
use crate::interp::{NoPolicy, Stop};
use crate::kernel::entry::in_place::{self, Left};
use crate::kernel::process::{self, Death, Outcome, System};
use crate::observe::profile::{Phase, during};
use dynasour_guest::ThreadContext;
use dynasour_guest::context::TRAP_FLAG;
use dynasour_tracer::Selected;
use std::sync::atomic::Ordering;

/// The sites at which most calls of a child have trapped, and how often. What a child that is killed leaves
/// half-written is a wrong count.
#[derive(Debug, Default)]
pub(super) struct ChildCalls([Option<Traps>; SITES]);

/// Sites that are noted (guess: glibc's `posix_spawn` makes all but some ten of its calls at one).
const SITES: usize = 4;

impl ChildCalls {
    /// A call has trapped. Where all places are taken, the site with the fewest traps has one less (Misra and Gries's
    /// frequent items).
    fn note(&mut self, trapped: Traps) {
        let is_it = |site: &&mut Option<Traps>| site.is_some_and(|s| s.call == trapped.call);
        if let Some(Some(site)) = self.0.iter_mut().find(is_it) {
            *site = Traps { times: site.times.saturating_add(trapped.times), ..trapped };
        } else if let Some(free) = self.0.iter_mut().find(|site| site.is_none()) {
            *free = Some(trapped);
        } else if let Some(least) = self.0.iter_mut().min_by_key(|site| site.map(|s| s.times)) {
            *least = least
                .map(|site| Traps { times: site.times - 1, ..site })
                .filter(|site| site.times > 0);
        }
    }

    /// The sites, which are forgotten.
    pub fn take(&mut self) -> impl Iterator<Item = Traps> + use<> {
        std::mem::take(&mut self.0).into_iter().flatten()
    }
}

impl Dispatcher {
    /// Runs the child until its process executes another program or ends.
    pub(super) fn run_child_of_vfork(
        &mut self,
        context: &mut ThreadContext,
        system: &mut System,
    ) -> ! {
        let mut in_place = InPlace::default();
        self.peer.attach();
        loop {
            let runs_in_place = self.can_run_in_place(&mut in_place, context, system);
            let outcome = if !self.peer.enter(context) {
                // Notes are for the parent.
                self.peer.accept_note();
                self.forget_posted();
                Outcome::Continue
            } else if runs_in_place {
                self.child_in_place(context, system)
            } else {
                let stop = self.interp.run(context, &mut NoPolicy);
                self.peer.leave();
                self.handle_stop(context, system, stop)
            };
            match outcome {
                Outcome::Continue => self.drop_written(),
                Outcome::Exit(status) | Outcome::ThreadExit(status) => process::exit(status),
                Outcome::Killed(signo) => Death::of(signo, context, system).happen(),
            }
        }
    }

    /// The child is gone; it may have ended in any state. The parent's thread goes on.
    pub(super) fn vfork_child_is_gone(&mut self) {
        self.peer.reset_after_vfork();
        // The child may have accepted one.
        self.peer.leave_note();
        self.peer.attach();
        self.arrival = Arrival::default();
    }

    /// May the child's code run in place? Turns its syscall user dispatch on if it is off.
    fn can_run_in_place(
        &self,
        in_place: &mut InPlace,
        context: &ThreadContext,
        system: &System,
    ) -> bool {
        // The interpreter ends a single-stepped program as the kernel would, in place it would not. In place each call
        // stops the child with SIGSYS for its tracer, which is the parent, who sleeps.
        let is_possible = self.machine.is_direct()
            && !system.asked_for_tracer
            && context.gs_base == 0
            && context.rflags & TRAP_FLAG == 0
            && Self::unreachable(context).is_none();
        is_possible && {
            let sites = &self.machine.call_sites;
            sites.close_if_watched(system);
            in_place.is_on(context, !sites.is_closed())
        }
    }

    /// Runs the child's code in place, from interpreting, until something has to be handled.
    fn child_in_place(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        let ended = if context.pending.load(Ordering::Relaxed) != 0 {
            Some(Ended::Stopped(Stop::Pending))
        } else if patches::leads_to_trace(context.rip) {
            // The child may have left that trace without progress.
            self.interpret_one(context)
        } else {
            self.peer.enter_in_place();
            // SAFETY: the context is this process's, GS points to it, and dispatch is on. What
            // patches lead to is not dropped while the peer is in the cache.
            let left = during(Phase::Native, || unsafe { in_place::run(context) });
            let code = self.interp.code();
            self.after_native(None, left, context, &*code)
        };
        if !matches!(ended, Some(Ended::Outside)) {
            self.peer.leave();
        }
        match ended {
            Some(Ended::Stopped(stop)) => self.handle_stop(context, system, stop),
            // The site is counted by the parent: patching it would take locks that the parent's other
            // threads need even if the child is killed.
            Some(Ended::InPlace(Left::Call)) => {
                self.child_calls.note(trap(context));
                self.handle_stop(context, system, Stop::<Selected>::Syscall)
            }
            Some(Ended::InPlace(Left::Sample)) => Outcome::Continue,
            Some(Ended::InPlace(left)) => self.left_in_place(context, system, left),
            _ => Outcome::Continue,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_site_of_most_calls_is_noted() {
        let mut calls = ChildCalls::default();
        for n in 0..62 {
            calls.note(Traps { call: 0x1000, nr: 13, times: 1 });
            calls.note(Traps { call: 0x2000 + n, nr: n as u32, times: 1 });
            calls.note(Traps { call: 0x1000, nr: 13, times: 1 });
        }
        let noted: Vec<Traps> = calls.take().collect();
        assert!(noted.contains(&Traps { call: 0x1000, nr: 13, times: 124 }), "{noted:?}");
        assert!(noted.len() <= SITES);
        assert_eq!(calls.take().count(), 0, "they are taken once");
    }
}
