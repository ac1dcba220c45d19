//! The dispatcher's loop: executes one *stretch* of guest code, up to the next event that has to be
//! handled outside guest code.
//!
//! ```text
//!             ┌───────────────────────────────────────────────────────┐
//!             ▼                                                       │
//!   next_execution ──► Native       run native code ──► after_native ─┤
//!   (what is there     Instruction  interpret one instruction ────────┤
//!    at rip?)          Interpret    interpret until native code ──────┤
//!                                   starts at an edge                 │
//!                      │ a system call, a fault, a signal, a hot head,
//!                      ▼ a finished recording, a full cache
//!                    Ended: handle_end
//! ```
//!
//! The loop is the same for all tiers; the tier decides what [`Dispatcher::next_execution`] finds:
//!
//! | tier | at rip there is |
//! | --- | --- |
//! | `interp` | nothing native: everything is interpreted |
//! | `copy` | a block, copied at its first execution |
//! | `full` | a fragment, a head's counter, or a block |
//! | `dynamo` | the same, but a block is copied when the guest has come to it a few times |
//! | `dynamo` in a study | a fragment or nothing |
//! | `direct` | a fragment, or the guest's own code, which runs in place |
//!
//! During a recording, all tiers interpret. An instruction that cannot be copied is interpreted by
//! itself. Code that changes often, on pages whose changes cannot be noticed, is interpreted too,
//! until the guest leaves it.
//!
//! Data: [`Dispatcher::arrival`], how the guest came to rip. Invariants: in the loop the thread's
//! context holds the exact guest state. A guest that may not have made progress does not enter a
//! fragment ([`Arrival::WithoutProgress`]). The thread is *in the cache* ([`super::peers`]) while
//! native code runs, *outside* in `handle_end`, and *interpreting* otherwise. The lock of the
//! fragments is not held while guest code runs.
//!
//! Example: rip is 0x1000, where a fragment starts. `next_execution` returns its entry; it runs,
//! and leaves by a guard to 0x1080; `after_native` rebuilds the registers; `next_execution` copies
//! the block at 0x1080, which runs into a system call: the stretch has ended.

use super::Dispatcher;
use super::fragments::{
    AfterNative, Arrival, FoundCode, Fragments, NativeEntry, SideRequest, StubWork,
};
use super::select::{COPIED_BLOCK, NO_FRAGMENT, is_warm};
use super::traces::FROM_OUTSIDE;
use crate::changes::patches;
use crate::interp::{NoPolicy, Stop, noncanonical};
use crate::kernel::entry::in_place::{self, Left};
use crate::kernel::process;
use crate::kernel::process::{Outcome, System};
use crate::kernel::signal;
use crate::kernel::x87_pointer;
use crate::observe::profile::{Phase, during};
use dynasour_emitter::ExitReason;
use dynasour_emitter::blocks::CounterId;
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_ir::Trap;
use dynasour_tracer::{AbortReason, HeadKind, Selected};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

/// How guest code is to be executed from rip on.
enum Execution {
    /// As native code. The thread counts as in the cache already, so the code is not dropped.
    Native(NativeEntry),
    /// One instruction by the interpreter.
    Instruction,
    /// By the interpreter, until the selector stops it.
    Interpret,
    /// Where it stands, by the processor.
    InPlace,
    /// Not at all: the stretch ends for this reason.
    Ended(Ended),
}

/// Why a stretch ended.
pub(super) enum Ended {
    /// The interpreter stopped.
    Stopped(Stop<Selected>),
    /// A head's counter ran out after this many executions of the head.
    Hot(CounterId, u64),
    /// An exit is hot: a side trace is wanted.
    HotExit(SideRequest),
    /// Another loop of an interpreted program is to be searched for.
    Search,
    /// A resolved stub is wanted for an exit.
    Stub(Box<StubWork>),
    /// The code cache is full.
    Full,
    /// Guest code in place was left.
    InPlace(Left),
    /// A window of a race is over, a race can begin, copied blocks were sampled, or a trace was
    /// compiled.
    Due,
    /// The thread is outside already, and other threads have posted ranges to it.
    Outside,
}

/// Where the guest has executed instructions that the runtime performs (system calls, `fnstenv`), some of
/// the places at least: no block begins there, so none is looked for. The instruction there is
/// interpreted, whatever it is by now.
pub(super) struct KnownStops([u64; KnownStops::MOST]);

impl KnownStops {
    /// The most places (guess; fewer make places with the same hash forget each other).
    const MOST: usize = 64;

    fn slot(pc: u64) -> usize {
        (pc ^ (pc >> 8)) as usize % Self::MOST
    }

    fn has(&self, pc: u64) -> bool {
        self.0[Self::slot(pc)] == pc
    }

    /// The instruction at `pc` was interpreted. Does the runtime perform it?
    fn note(&mut self, pc: u64, is_stop: bool) {
        if is_stop || self.has(pc) {
            self.0[Self::slot(pc)] = if is_stop { pc } else { u64::MAX };
        }
    }
}

impl Default for KnownStops {
    fn default() -> KnownStops {
        KnownStops([u64::MAX; KnownStops::MOST])
    }
}

impl Dispatcher {
    /// Executes one stretch of guest code, leaves guest code, and handles the stretch's end.
    pub(super) fn stretch(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        let outcome = match self.run_and_leave(context) {
            Ended::InPlace(left) => self.left_in_place(context, system, left),
            ended => match self.handle_end(context, ended) {
                Some(stop) => self.handle_stop(context, system, stop),
                None => Outcome::Continue,
            },
        };
        if !self.selector.traces.is_recording() && !self.selector.is_sampling() {
            self.effort.end();
        }
        outcome
    }

    /// Executes one stretch of guest code and leaves guest code. Returns why it stopped, if the
    /// runtime has to handle that; none if the guest continues. Guest code does not run in place.
    #[cfg(test)]
    pub(super) fn stretch_to_stop(
        &mut self,
        context: &mut ThreadContext,
    ) -> Option<Stop<Selected>> {
        let ended = self.run_and_leave(context);
        self.handle_end(context, ended)
    }

    /// Executes one stretch of guest code and leaves guest code.
    fn run_and_leave(&mut self, context: &mut ThreadContext) -> Ended {
        let ended = self.run_stretch(context);
        if !matches!(ended, Ended::Outside) {
            self.peer.leave();
        }
        ended
    }

    /// Executes guest code until something has to be handled outside.
    fn run_stretch(&mut self, context: &mut ThreadContext) -> Ended {
        let code = self.interp.code();
        // A stretch executes something before a race is looked at again.
        let mut progressed = false;
        loop {
            if context.pending.load(Ordering::Relaxed) != 0 {
                return Ended::Stopped(Stop::Pending);
            }
            if std::mem::replace(&mut progressed, true)
                && !self.selector.traces.is_recording()
                && (self.racing.is_due(self.machine.config.race)
                    || self.is_sampled(context)
                    || self.peer.is_notified())
            {
                return Ended::Due;
            }
            let execution = self.next_execution(context, &*code);
            if matches!(execution, Execution::Native(_) | Execution::InPlace) {
                // A sample is over that has found nothing.
                self.effort.end();
                self.racing.enter_native(context);
            }
            let ended = match execution {
                Execution::Native(entry) => {
                    let point = entry.point;
                    context.went_in_place.store(0, Ordering::Relaxed);
                    // SAFETY: `context` is this thread's, and GS points to it; the code is not
                    // dropped while this thread is in the cache.
                    let left = during(Phase::Native, || unsafe { point.run(context) });
                    self.after_native(Some(entry), left, context, &*code)
                }
                Execution::InPlace => {
                    self.peer.enter_in_place();
                    context.went_in_place.store(1, Ordering::Relaxed);
                    // SAFETY: the context is this thread's, GS points to it, and dispatch is on.
                    // What patches lead to is not dropped while this thread is in the cache.
                    let left = during(Phase::Native, || unsafe { in_place::run(context) });
                    self.after_native(None, left, context, &*code)
                }
                Execution::Instruction => {
                    let pc = context.rip;
                    let ended = self.interpret_one(context);
                    let is_stop =
                        matches!(ended, Some(Ended::Stopped(Stop::Syscall | Stop::Special { .. })));
                    self.known_stops.note(pc, is_stop);
                    ended
                }
                Execution::Interpret => match self.interpret(context) {
                    Stop::Policy(Selected::Native) => None,
                    stop => Some(Ended::Stopped(stop)),
                },
                Execution::Ended(ended) => Some(ended),
            };
            if let Some(ended) = ended {
                return ended;
            }
        }
    }

    /// How to execute the guest code at rip; makes native code if need be.
    fn next_execution(&mut self, context: &ThreadContext, code: &dyn Fetch) -> Execution {
        let machine = self.machine;
        if self.selector.traces.is_recording() || self.selector.is_sampling() {
            return Execution::Interpret;
        }
        if machine.is_direct() && !machine.is_traced() {
            return Self::in_place(context);
        }
        if self.known_stops.has(context.rip) && !machine.is_direct() {
            self.arrival = Arrival::default();
            return Execution::Instruction;
        }
        let Some(mut fragments) = machine.fragments() else { return Execution::Interpret };
        fragments.end_pauses();
        let (pc, arrival) = (context.rip, std::mem::take(&mut self.arrival));
        if machine.config.interprets_first()
            && arrival != Arrival::WithoutProgress
            && !fragments.has_code(pc)
            && self.is_cold(pc)
        {
            return Execution::Interpret;
        }
        match during(Phase::Translate, || fragments.find_code(pc, code, arrival)) {
            Ok(FoundCode::Native(entry)) => {
                if machine.is_direct() && !patches::enters_trace(pc) {
                    self.entrances.arrived(pc);
                }
                self.peer.enter_cache();
                Execution::Native(entry)
            }
            Ok(FoundCode::Instruction) => Execution::Instruction,
            // The patch at rip leads to a trace, which may not be entered now. Or rip is inside one.
            Ok(FoundCode::InPlace) if patches::is_replaced(pc) => Execution::Instruction,
            Ok(FoundCode::InPlace) => Self::in_place(context),
            Ok(FoundCode::Nothing) => {
                drop(fragments);
                self.nothing_native(context, arrival)
            }
            Err(error) if error.is_full() => Execution::Ended(Ended::Full),
            // An instruction that cannot be copied is interpreted.
            Err(_) => Execution::Instruction,
        }
    }

    /// Guest code at rip is executed in place, if it can be jumped to.
    fn in_place(context: &ThreadContext) -> Execution {
        match Self::unreachable(context) {
            Some(stop) => Execution::Ended(Ended::Stopped(stop)),
            None => Execution::InPlace,
        }
    }

    /// Counts an arrival at `pc`, where there is no native code. Is it still too cold to be copied?
    fn is_cold(&mut self, pc: u64) -> bool {
        let Ok(entry) = self.interp.entry(pc) else { return false };
        let is_warm = is_warm(entry, FROM_OUTSIDE);
        if is_warm && entry.user == NO_FRAGMENT {
            entry.user = COPIED_BLOCK;
        }
        !is_warm
    }

    /// Nothing native starts at rip, so it is interpreted. Without copied blocks, two things are
    /// done before. If the block's `user` word says that a fragment starts here, it is corrected.
    /// If the guest came by the end of a trace, rip is a head and is counted.
    fn nothing_native(&mut self, context: &ThreadContext, arrival: Arrival) -> Execution {
        if self.copies_blocks() {
            return Execution::Interpret;
        }
        let Ok(entry) = self.interp.entry(context.rip) else { return Execution::Interpret };
        if entry.user != NO_FRAGMENT {
            if arrival != Arrival::WithoutProgress {
                self.mark(context.rip);
            }
        } else if arrival.is_by_end()
            && let Some(selected) = self.selector.count(context, entry, HeadKind::Other)
        {
            return Execution::Ended(Ended::Stopped(Stop::Policy(selected)));
        }
        Execution::Interpret
    }

    /// Interprets until the interpreter or the selector stops.
    fn interpret(&mut self, context: &mut ThreadContext) -> Stop<Selected> {
        let is_recording = self.selector.traces.is_recording();
        let phase = if is_recording { Phase::Record } else { Phase::Interpret };
        during(phase, || match self.machine.has_fragments() {
            true => self.interp.run(context, &mut self.selector),
            false => self.interp.run(context, &mut NoPolicy).without_policy(),
        })
    }

    /// Interprets one instruction. None if it completed.
    pub(super) fn interpret_one(&mut self, context: &mut ThreadContext) -> Option<Ended> {
        let stop = during(Phase::Interpret, || self.interp.run_one(context));
        stop.map(|stop| Ended::Stopped(stop.without_policy()))
    }

    /// Native code has left: makes the guest's state exact, comes out of the cache, and interprets
    /// the next instruction if it may not be executed natively. Returns why the stretch ends; none
    /// if it continues.
    pub(super) fn after_native(
        &mut self,
        entry: Option<NativeEntry>,
        left: ExitReason,
        context: &mut ThreadContext,
        code: &dyn Fetch,
    ) -> Option<Ended> {
        if left == ExitReason::InPlace && entry.is_none() && !self.machine.is_traced() {
            return Some(Ended::InPlace(self.after_in_place(context)));
        }
        let Some(mut fragments) = self.machine.fragments() else {
            // A sample has kept the thread from entering guest code in place; there is no trace yet.
            return (!self.peer.enter(context)).then_some(Ended::Outside);
        };
        fragments.leave_native(entry, context);
        if left == ExitReason::InPlace {
            drop(fragments);
            return Some(Ended::InPlace(self.after_in_place(context)));
        }
        if context.went_in_place.load(Ordering::Relaxed) != 0 {
            // Guest code in place may have executed x87 instructions; no trace there does.
            x87_pointer::loaded(context);
        }
        let after = match fragments.after_native(left, context, &*self.selector.traces.policy) {
            Ok(after) => after,
            Err(error) => broken(&format!("leaving native code: {error}")),
        };
        make_exact(after, &mut fragments, context, code);
        let (dispatch, stub) = (fragments.take_new_dispatch(), fragments.take_wanted_stub());
        self.next_race(&mut fragments);
        drop(fragments);
        self.arrival = match after {
            AfterNative::Continue(arrival) => arrival,
            // At least one instruction is executed before a fragment is entered again.
            _ => Arrival::WithoutProgress,
        };
        // Whatever was posted, a refused transfer is not executed again: a call may have overwritten its
        // target.
        let is_refused = matches!(after, AfterNative::NonCanonical(_));
        if !is_refused && !self.peer.enter(context) {
            return Some(Ended::Outside);
        }
        if let Some(head) = dispatch {
            self.mark(head);
        }
        match after {
            AfterNative::Continue(_) => stub.map(|stub| Ended::Stub(Box::new(stub))),
            AfterNative::NonCanonical(pc) => {
                Some(Ended::Stopped(Stop::Trap { pc, trap: Trap::Protection }))
            }
            AfterNative::Fault | AfterNative::Interpret => {
                let ended = self.interpret_one(context);
                self.arrival = Arrival::Ordinary;
                ended
            }
            AfterNative::Hot(counter, executions) => Some(Ended::Hot(counter, executions)),
            AfterNative::HotExit(side) => Some(Ended::HotExit(side)),
            AfterNative::Search => Some(Ended::Search),
            AfterNative::Full => Some(Ended::Full),
        }
    }

    /// Handles the end of a stretch as far as it concerns recordings, traces and the cache. The
    /// thread is outside. Returns the stop that is left for the runtime; none if the guest
    /// continues.
    fn handle_end(&mut self, context: &mut ThreadContext, ended: Ended) -> Option<Stop<Selected>> {
        let stop = match ended {
            Ended::Stopped(stop) => stop,
            Ended::Hot(counter, executions) => {
                self.record_head(context, counter, executions);
                return None;
            }
            Ended::HotExit(side) => {
                self.record_side_trace(context, side);
                return None;
            }
            Ended::Search => {
                self.search(context);
                return None;
            }
            Ended::Stub(work) => {
                self.make_stub(&work);
                return None;
            }
            Ended::Full => {
                self.overflowed();
                return None;
            }
            // The caller has handled it.
            Ended::InPlace(_) | Ended::Due | Ended::Outside => return None,
        };
        match stop {
            Stop::Policy(selected) => {
                self.selected(context, selected);
                return None;
            }
            Stop::Syscall | Stop::Special { .. } => {
                if let Some(selected) = self.selector.traces.runtime_instruction() {
                    // The recording ends before this instruction, and is compiled now. The
                    // instruction is then performed as usual.
                    self.selected(context, selected);
                }
            }
            Stop::Fault { .. } | Stop::Trap { .. } | Stop::Broken(_) => {
                self.abandon(AbortReason::Fault);
            }
            Stop::Pending => self.abandon(AbortReason::Signal),
        }
        Some(stop)
    }
}

/// If native code has left in the middle of a guest instruction, makes `context` the state before
/// that instruction.
fn make_exact(
    after: AfterNative,
    fragments: &mut MutexGuard<'_, Fragments>,
    context: &mut ThreadContext,
    code: &dyn Fetch,
) {
    match after {
        AfterNative::Fault if !fragments.copy_state(context, code) => {
            broken("a copied block faulted whose code has changed unnoticed");
        }
        AfterNative::NonCanonical(from) => noncanonical::undo_transfer(context, from, code),
        _ => {}
    }
}

/// Ends the process: an invariant of dynasour's own is broken.
fn broken(what: &str) -> ! {
    process::complain(&format!("internal error: {what}"));
    signal::die(libc::SIGABRT);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dynasour_emitter::ExitReason;
    use dynasour_guest::ThreadContext;

    use super::super::{Dispatcher, Machine, interleavings};
    use crate::changes::CodePages;
    use crate::config::Tier;
    use crate::testing::in_child;

    #[test]
    fn places_are_known_until_something_else_is_executed_there() {
        let mut stops = super::KnownStops::default();
        assert!(!stops.has(0) && !stops.has(0x40_1000));
        stops.note(0x40_1000, true);
        stops.note(0x40_1007, false);
        assert!(stops.has(0x40_1000) && !stops.has(0x40_1007));
        stops.note(0x40_1000, false);
        assert!(!stops.has(0x40_1000));
        stops.note(0x40_1000, true);
        let same_slot = 0x40_1000 + (1 << 16);
        stops.note(same_slot, false);
        assert!(stops.has(0x40_1000), "nothing is forgotten for what is no stop");
        stops.note(same_slot, true);
        assert!(stops.has(same_slot) && !stops.has(0x40_1000));
    }

    #[test]
    fn a_thread_that_could_not_enter_guest_code_is_out_of_the_cache() {
        let status = in_child(|| {
            let pages = Arc::new(CodePages::default());
            let config = interleavings::config(Tier::Direct);
            let machine = Machine::new(&config, || 0..0, pages).expect("memory");
            let mut dispatcher = Dispatcher::new(machine).expect("memory");
            let mut context = ThreadContext::new();
            assert!(dispatcher.peer.enter(&mut context) && machine.fragments().is_none());
            let code = dispatcher.interp.code();
            for _ in 0..2 {
                dispatcher.peer.enter_in_place();
                let ended =
                    dispatcher.after_native(None, ExitReason::Aborted, &mut context, &*code);
                assert!(ended.is_none());
            }
            dispatcher.peer.leave_note();
            dispatcher.peer.enter_in_place();
            let ended = dispatcher.after_native(None, ExitReason::Aborted, &mut context, &*code);
            i32::from(!matches!(ended, Some(super::Ended::Outside)))
        });
        assert_eq!(status, 0);
    }
}
