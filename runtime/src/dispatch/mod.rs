//! The dispatcher: runs a guest thread by turns in the interpreter, in native code and in the
//! runtime, and starts recordings of traces.
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
//! | file | |
//! | --- | --- |
//! | [`stretch`] | the loop that executes guest code, interpreted or native |
//! | [`in_place`] | guest code that runs where it stands |
//! | [`call_sites`], [`entrances`] | what is patched into it: hot system calls, entries of traces |
//! | [`interpreter_stops`] | what the runtime does when the interpreter stops |
//! | [`select`] | what happens at each edge between interpreted blocks |
//! | [`traces`] | recording and compiling traces |
//! | [`fragments`] | the fragments of the process, and the links between them |
//! | [`machine`], [`peers`] | what threads share, and how they wait for each other |
//! | [`native_code`] | when the fragments are made |
//! | [`footprint`] | which pages of guest code were read |
//! | [`engine`], [`idle_dispatchers`], [`report`] | system calls' requests, idle dispatchers, statistics |
//!
//! Data: a [`Dispatcher`] for each guest thread, and one [`Machine`], which they share.
//!
//! Invariants: whenever a thread goes from one of the boxes above to another, its
//! [`ThreadContext`] holds the exact guest state. After a deoptimisation at least one guest
//! instruction is executed (by the interpreter or in a copied block) before a fragment is entered
//! again, so that the guest makes progress.
//!
//! A dispatcher is used by its own thread only and needs no lock; the [`Machine`] has its own locks
//! (in the order of `crate::sync`).
//!
//! Example: the guest executes a loop at 0x1000. The interpreter executes it until its head is
//! hot; `traces` records one iteration and compiles it; `stretch` enters the fragment, which leaves
//! by a guard to 0x1080. The guest continues there in the interpreter, which stops at a system
//! call, and `stops` has the kernel perform it.

mod call_sites;
mod compiling;
mod engine;
mod entrances;
mod footprint;
mod fragments;
mod idle_dispatchers;
mod in_place;
#[cfg(test)]
mod interleavings;
mod interpreter_stops;
mod machine;
mod native_code;
mod peers;
mod race;
mod report;
mod sampling;
mod select;
mod stretch;
mod traces;
pub mod validation;
mod vfork_child;

use crate::changes::Code;
use crate::config::{RunConfig, Sampling};
use crate::interp::{Interp, Stop};
use crate::kernel::process::helper;
use crate::kernel::process::{Death, Ending, Engine, Outcome, System};
use crate::kernel::signal::GuestFault;
use crate::observe::profile;
use compiling::Compilations;
use dynasour_emitter::codegen::Allocator;
use dynasour_guest::ThreadContext;
use dynasour_guest::context::TRAP_FLAG;
use dynasour_guest::decode::MAX_LENGTH;
use dynasour_tracer::{AbortReason, Budget, Effort};
use entrances::Entrances;
use footprint::NotedCode;
use fragments::{Arrival, FragmentError, SideRequest};
use idle_dispatchers::IdleDispatcher;
use in_place::InPlace;
use peers::Peer;
use race::{Racing, Rests};
use rustc_hash::FxHashMap;
use select::Selector;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vfork_child::ChildCalls;

pub use machine::{Machine, cache_end, fragment_fault, signal_accepted};

/// Runs one guest thread.
pub struct Dispatcher {
    machine: &'static Machine,
    peer: Arc<Peer>,
    interp: Interp,
    selector: Selector,
    /// The exit for which a side trace is being recorded.
    side_request: Option<SideRequest>,
    /// The exits whose side traces would have taken more time than there was, and the guest instructions of
    /// their paths.
    too_dear: FxHashMap<SideRequest, u64>,
    /// The processor time that recording and compiling traces has taken, and its limit.
    effort: Effort,
    /// The code generator's working memory, kept from compilation to compilation.
    allocator: Allocator,
    /// The paths of this thread that the helper compiles.
    compilations: Compilations,
    /// How the guest came to the pc at which native code is to be entered next.
    arrival: Arrival,
    /// Where the guest has executed instructions that the runtime performs.
    known_stops: stretch::KnownStops,
    /// What the thread needs to run guest code in place.
    in_place: InPlace,
    /// The calls of a vfork's child.
    child_calls: ChildCalls,
    /// The heads that guest code in place is to be led to.
    entrances: Entrances,
    /// The race of the thread's newest trace.
    racing: Racing,
    rests: Rests,
    /// When traces that have got side traces may race again, in nanoseconds of real time.
    race_again: Option<u64>,
    /// The recording under way is for nothing else than a loop of an interpreted program.
    only_guest_loops: bool,
}

impl Dispatcher {
    /// A dispatcher for a new thread of the machine's guest.
    ///
    /// # Errors
    /// There is no memory for the interpreter's native functions.
    pub fn new(machine: &'static Machine) -> Result<Self, FragmentError> {
        let mut interp =
            Interp::with_code(Box::new(NotedCode::new(&machine.footprint, machine.pages.clone())));
        interp.reserve()?;
        let peer = Arc::new(Peer::default());
        machine.peers.add(peer.clone());
        let selector = Selector::new(&machine.config, machine.untraced);
        let dispatcher = Dispatcher {
            machine,
            peer,
            interp,
            selector,
            side_request: None,
            too_dear: FxHashMap::default(),
            effort: effort(&machine.config),
            allocator: Allocator::default(),
            compilations: Compilations::default(),
            arrival: Arrival::default(),
            known_stops: stretch::KnownStops::default(),
            in_place: InPlace::default(),
            child_calls: ChildCalls::default(),
            entrances: Entrances::default(),
            racing: Racing::default(),
            rests: Rests::default(),
            race_again: None,
            only_guest_loops: false,
        };
        dispatcher.count_heads();
        Ok(dispatcher)
    }

    /// Are guest blocks copied, so that native code other than traces runs?
    fn copies_blocks(&self) -> bool {
        self.machine.config.copies_blocks()
    }

    /// Tells the emitter which heads copied blocks count, and up to which threshold.
    fn count_heads(&self) {
        let heads = self.native_heads();
        let config = &self.machine.config;
        let by_time = config.measures_paths() && !matches!(config.sampling, Sampling::Every(_));
        if let Some(mut fragments) = self.machine.fragments() {
            fragments.count_heads(heads, by_time);
        }
    }

    /// Runs the guest from `context` until its thread or its process ends.
    pub fn run(&mut self, context: &mut ThreadContext, system: &mut System) -> Ending {
        let _attention = profile::attend(&self.peer.clock);
        self.peer.attach();
        self.in_place = InPlace::default();
        if self.copies_blocks() {
            self.peer.sample();
        }
        // `clone` has written the new thread's id to guest memory, perhaps to a page of code.
        self.drop_written();
        loop {
            if system.process.threads().is_stopping() {
                system.process.threads().stand_still(|| ());
            }
            self.prepare_in_place(context, system);
            self.step_race(context, system);
            let outcome = if !self.peer.enter(context) {
                // In this order: what is read of guest code now may be about to change, which was
                // posted then.
                self.take_compiled();
                self.forget_posted();
                Outcome::Continue
            } else if context.rflags & TRAP_FLAG != 0 {
                self.single_step(context, system)
            } else if self.in_place.is_approaching() {
                self.approach(context, system)
            } else {
                self.stretch(context, system)
            };
            if let Some(ended) = self.ending(outcome, context, system) {
                self.abandon(AbortReason::Signal);
                if let Ending::Thread(_) = ended {
                    // (A process that is killed has its own code back, and nobody patches it any more.)
                    self.leave_races(context, system);
                }
                self.in_place = InPlace::default();
                system.samples.stop();
                return ended;
            }
            self.drop_written();
        }
    }

    /// The guest has set the trap flag: executes one instruction, then raises the trap. No trap
    /// follows a system call, because the return from the kernel loads the flag anew.
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
                // If the instruction raised a signal, rip is in the handler and no trap follows.
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

    /// Drops this thread's blocks made from the ranges that other threads have posted.
    fn forget_posted(&mut self) {
        for range in self.peer.take_stale() {
            self.forget_blocks(&range);
        }
    }

    /// Drops all code made from pages that the host has written to.
    fn drop_written(&mut self) {
        if !self.machine.pages.is_written() {
            return;
        }
        // Another thread may be dropping it already. This thread must not execute guest code before
        // that is done, and the lock makes it wait.
        let _exclusive = self.machine.pages.exclusive();
        for range in self.machine.pages.take_written() {
            self.drop_code(range);
        }
        self.machine.pages.dropped_written();
    }

    /// How the thread or the process ends after `outcome`; none if the guest continues. Before the
    /// process ends, its report is written. If another process runs in the same memory, the other
    /// threads of this one are stopped too.
    fn ending(
        &mut self,
        outcome: Outcome,
        context: &ThreadContext,
        system: &mut System,
    ) -> Option<Ending> {
        let ending = match outcome {
            Outcome::Continue => return None,
            Outcome::ThreadExit(status) if !system.end_thread() => {
                return Some(Ending::Thread(status));
            }
            Outcome::ThreadExit(status) => Ending::Process(status),
            Outcome::Exit(status) => Ending::Process(status),
            Outcome::Killed(signo) => {
                // A core file is to have the guest's threads only.
                helper::turn_off();
                if !system.process.shares_memory() {
                    self.machine.give_code_back();
                    system.process.memory().hide_from_core_file();
                }
                Ending::Killed(Death::of(signo, context, system))
            }
        };
        self.report(system);
        if system.process.shares_memory() {
            system.clear_tid();
            system.process.threads().stop_others(|| self.call_threads());
        }
        Some(ending)
    }
}

/// The limit on the time that a thread may spend on recording and compiling traces.
fn effort(config: &RunConfig) -> Effort {
    let budget = match config.tier {
        _ if config.interprets_first() => Budget::EARLY,
        _ if config.samples() => Budget::SAMPLED,
        _ => Budget::LATE,
    };
    Effort::new(config.weighs_traces().then_some(budget), thread_time)
}

/// The calling thread's processor time in nanoseconds.
fn thread_time() -> u64 {
    clock_time(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Real time in nanoseconds, on all threads the same.
fn real_time() -> u64 {
    clock_time(libc::CLOCK_MONOTONIC)
}

fn clock_time(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes a timespec to `time`.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Adds to a counter that only this thread writes.
fn count(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}
