//! The dispatcher: the hub between interpreter, recorder, fragments and the kernel.
//!
//! ```text
//!            ┌────────────── interpret ◄─────────────┐
//!   hot head │      │ syscall, fault, special, trap  │ deopt (state rebuilt from the record)
//!            ▼      ▼                                │
//!         record   System ──► outcome            fragment ──► linked fragment ──► …
//!            │                                       ▲
//!            └──► build ──► optimise ──► emit ───────┘
//! ```
//!
//! One dispatcher runs one guest thread; what they share is the [`Machine`].
//!
//! Invariant: between any two of these the [`ThreadContext`] holds the exact guest state. After a
//! deoptimisation the interpreter executes at least one guest instruction before a fragment is
//! entered again, so progress is certain.

mod engine;
mod footprint;
mod fragments;
#[cfg(test)]
mod interleavings;
mod machine;
mod peers;
mod report;
mod resting;
mod select;
mod stops;
mod stretch;
mod traces;

use crate::changes::Code;
use crate::config::RunConfig;
use crate::interp::{Interp, Stop};
use crate::kernel::process::Ending;
use crate::kernel::signal::GuestFault;
use crate::kernel::syscall::{Engine, Outcome, System};
use crate::observe::profile;
use dynasour_emitter::codegen::Allocator;
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::MAX_LENGTH;
use dynasour_tracer::{AbortReason, Budget, Effort};
use footprint::NotedCode;
use fragments::{Arrival, FragmentError, SideRequest};
use peers::Peer;
use resting::IdleDispatcher;
use select::Selector;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use machine::{Machine, cache_end, fragment_fault, signal_accepted};

/// TF: a trap behind each instruction.
const TRAP_FLAG: u64 = 0x100;

/// Runs one guest thread.
pub struct Dispatcher {
    machine: &'static Machine,
    peer: Arc<Peer>,
    interp: Interp,
    selector: Selector,
    /// The exit for which a side trace is being recorded.
    side: Option<SideRequest>,
    /// What finding and making traces has cost.
    effort: Effort,
    /// Memory for compiling them.
    allocator: Allocator,
    /// How the guest came to where native code goes on.
    arrival: Arrival,
}

impl Dispatcher {
    /// A dispatcher for a new thread of the machine's guest.
    ///
    /// # Errors
    /// No memory.
    pub fn new(machine: &'static Machine) -> Result<Self, FragmentError> {
        let mut interp =
            Interp::with_code(Box::new(NotedCode::new(&machine.footprint, machine.pages.clone())));
        interp.reserve()?;
        let peer = Arc::new(Peer::default());
        machine.peers.add(peer.clone());
        let selector = Selector::new(&machine.config, machine.untraced.clone());
        let dispatcher = Dispatcher {
            machine,
            peer,
            interp,
            selector,
            side: None,
            effort: effort(&machine.config),
            allocator: Allocator::default(),
            arrival: Arrival::default(),
        };
        dispatcher.count_heads();
        Ok(dispatcher)
    }

    /// Does native code run that is not traces?
    fn copies_blocks(&self) -> bool {
        self.machine.config.copies_blocks()
    }

    /// Tells native code when heads are hot.
    fn count_heads(&self) {
        let heads = self.native_heads();
        if let Some(mut fragments) = self.machine.fragments() {
            fragments.count_heads(heads, self.machine.config.watches_paths());
        }
    }

    /// Runs the guest from `context` until its thread or its process ends.
    pub fn run(&mut self, context: &mut ThreadContext, system: &mut System) -> Ending {
        let _attention = profile::attend(&self.peer.clock);
        self.peer.attach();
        if self.copies_blocks() {
            self.peer.sample();
        }
        // A new thread's id is written for it before it comes here.
        self.drop_written();
        loop {
            if system.process.threads().is_stopping() {
                system.process.threads().stand_still(|| ());
            }
            let outcome = if !self.peer.enter(context) {
                self.forget_posted();
                Outcome::Continue
            } else if context.rflags & TRAP_FLAG != 0 {
                self.single_step(context, system)
            } else {
                self.stretch(context, system)
            };
            if let Some(ended) = self.ending(outcome, system) {
                self.abandon(AbortReason::Signal);
                return ended;
            }
            self.drop_written();
        }
    }

    /// The guest steps through itself: one instruction, and the trap behind it. None comes behind a
    /// system call, whose way back loads the flag anew.
    fn single_step(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        self.abandon(AbortReason::Signal);
        let pending = context.pending.load(Ordering::Relaxed) != 0;
        let stop = if pending { None } else { self.interp.run_one(context) };
        self.peer.leave();
        match stop {
            None if pending => system.deliver_pending(context),
            None => system.raise(context, GuestFault::single_step(context.rip)),
            Some(stop @ Stop::Special { pc }) => {
                let outcome = self.handle_stop(context, system, stop);
                // Not if it has raised a signal of its own.
                let is_behind = (1..=MAX_LENGTH as u64).contains(&context.rip.wrapping_sub(pc));
                match outcome {
                    Outcome::Continue if is_behind => {
                        system.raise(context, GuestFault::single_step(context.rip))
                    }
                    outcome => outcome,
                }
            }
            Some(stop) => self.handle_stop(context, system, stop),
        }
    }

    /// Forgets what other threads found out to be stale.
    fn forget_posted(&mut self) {
        for range in self.peer.take_stale() {
            self.forget_blocks(&range);
        }
    }

    /// Drops what was made from pages that the host has written to.
    fn drop_written(&mut self) {
        if !self.machine.pages.is_written() {
            return;
        }
        // If another thread is at it already, this one must not go on before that is done.
        let _exclusive = self.machine.pages.exclusive();
        for range in self.machine.pages.take_written() {
            self.drop_code(range);
        }
        self.machine.pages.dropped_written();
    }

    /// Says whether the thread or the process ends, and does what comes before that.
    fn ending(&mut self, outcome: Outcome, system: &mut System) -> Option<Ending> {
        let ending = match outcome {
            Outcome::Continue => return None,
            Outcome::ThreadExit(status) if !system.end_thread() => {
                return Some(Ending::Thread(status));
            }
            Outcome::ThreadExit(status) => Ending::Process(status),
            Outcome::Exit(status) => Ending::Process(status),
            Outcome::Killed(signo) => Ending::Killed(signo),
        };
        self.report(system);
        if system.process.shares_memory() {
            system.clear_tid();
            system.process.threads().stop_others(|| self.call_threads());
        }
        Some(ending)
    }
}

/// What finding and making traces may cost a thread.
fn effort(config: &RunConfig) -> Effort {
    let budget = if config.interprets_first() { Budget::EARLY } else { Budget::LATE };
    Effort::new(config.weighs_traces().then_some(budget), thread_time)
}

/// The calling thread's processor time in nanoseconds.
fn thread_time() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes to `time`, which is one.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Adds to a counter that only this thread writes.
fn count(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}
