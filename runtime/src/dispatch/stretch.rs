//! The dispatcher's loop: one *stretch* of guest code, in whatever form it is executed.
//!
//! ```text
//!        ┌────────────────────────────────────────────────────────────┐
//!        ▼                                                            │
//!   destination ──► Native       run fragments and blocks ──► came ───┤
//!   (what is there  Instruction  interpret one instruction ───────────┤
//!    at rip?)       Interpret    interpret until the selector says  ──┤
//!                                that native code starts there        │
//!                      │ a system call, a fault, a signal, a hot head,
//!                      ▼ a finished recording, a full cache
//!                    Ended: what is to be done outside
//! ```
//!
//! The loop is the same for all tiers; a tier decides what [`Dispatcher::next_execution`] finds:
//!
//! | tier | at rip there is |
//! | --- | --- |
//! | `interp` | nothing native: all is interpreted |
//! | `copy` | a block, copied at its first execution |
//! | `full` | a fragment, a head's counter, or a block |
//! | `dynamo` | the same, but a block is copied when the guest has come to it a few times |
//! | `dynamo` in a study | a fragment or nothing |
//!
//! While a recording is under way, all tiers interpret. An instruction that blocks leave out is
//! interpreted by itself; code that keeps changing, other than by stores that are noticed, is
//! interpreted until the guest leaves it.
//!
//! Data: [`Dispatcher::arrival`], how the guest came to rip. Invariants: in the loop the thread's
//! context holds the exact guest state; a guest that may not have made progress does not enter a
//! fragment ([`Arrival::WithoutProgress`]). The thread is interpreting ([`super::peers`]) between
//! steps and in the cache while native code runs; the lock of the fragments is held by
//! `destination` and `came` only.
//!
//! Example: rip is 0x1000, where a fragment starts. `destination` gives the way into it; it runs,
//! and leaves by a guard to 0x1080; `came` rebuilds the registers; `destination` copies the block at
//! 0x1080, which runs into a system call: the stretch has ended.

use super::Dispatcher;
use super::fragments::{AfterNative, Arrival, FoundCode, Fragments, NativeEntry, SideRequest};
use super::select::{COPIED_BLOCK, NO_FRAGMENT, is_warm};
use super::traces::FROM_OUTSIDE;
use crate::interp::{NoPolicy, Stop, noncanonical};
use crate::kernel::process;
use crate::kernel::signal;
use crate::kernel::syscall::{Outcome, System};
use crate::observe::profile::{Phase, during};
use dynasour_emitter::Left;
use dynasour_emitter::blocks::CounterId;
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_ir::Trap;
use dynasour_tracer::{AbortReason, HeadKind, Selected};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

/// How guest code is executed from rip on.
enum Execution {
    /// As native code, which this thread may enter: it counts as in the cache.
    Native(NativeEntry),
    /// One instruction by the interpreter.
    Instruction,
    /// By the interpreter, until it comes to native code.
    Interpret,
    /// Not before this has been done.
    Ended(Ended),
}

/// Why a stretch ended.
enum Ended {
    /// The interpreter stopped.
    Stopped(Stop<Selected>),
    /// A head's counter ran out after this many executions.
    Hot(CounterId, u64),
    /// An exit is hot.
    HotExit(SideRequest),
    /// The cache is full.
    Full,
    /// The thread is outside already, and has to attend to something.
    Outside,
}

impl Dispatcher {
    /// One stretch of guest code, and then what the runtime has to do outside.
    pub(super) fn stretch(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        let ended = self.run_stretch(context);
        if !matches!(ended, Ended::Outside) {
            self.peer.leave();
        }
        let outcome = self.handle_end(context, system, ended);
        if !self.selector.traces.is_recording() {
            self.effort.end();
        }
        outcome
    }

    fn run_stretch(&mut self, context: &mut ThreadContext) -> Ended {
        let code = self.interp.code();
        loop {
            if context.pending.load(Ordering::Relaxed) != 0 {
                return Ended::Stopped(Stop::Pending);
            }
            let ended = match self.next_execution(context, &*code) {
                Execution::Native(entry) => {
                    let point = entry.point;
                    // SAFETY: `context` is this thread's, and GS points to it; the code is not
                    // dropped while this thread is in the cache.
                    let left = during(Phase::Native, || unsafe { point.run(context) });
                    self.after_native(entry, left, context, &*code)
                }
                Execution::Instruction => self.interpret_one(context),
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

    /// What there is to execute at rip.
    fn next_execution(&mut self, context: &ThreadContext, code: &dyn Fetch) -> Execution {
        let machine = self.machine;
        if self.selector.traces.is_recording() {
            return Execution::Interpret;
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
                self.peer.enter_cache();
                Execution::Native(entry)
            }
            Ok(FoundCode::Instruction) => Execution::Instruction,
            Ok(FoundCode::Nothing) => {
                drop(fragments);
                self.nothing_native(context, arrival)
            }
            Err(error) if error.is_full() => Execution::Ended(Ended::Full),
            // Whatever cannot be copied can be interpreted.
            Err(_) => Execution::Instruction,
        }
    }

    /// Has the guest seldom come to `pc`, where there is no code?
    fn is_cold(&mut self, pc: u64) -> bool {
        let Ok(entry) = self.interp.entry(pc) else { return false };
        let is_warm = is_warm(entry, FROM_OUTSIDE);
        if is_warm && entry.user == NO_FRAGMENT {
            entry.user = COPIED_BLOCK;
        }
        !is_warm
    }

    /// Nothing native starts at rip. Beside the interpreter the end of a trace leads to a head,
    /// which is counted; and the interpreter is told if it thought that a fragment starts there.
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

    /// Interprets until something has to be done.
    fn interpret(&mut self, context: &mut ThreadContext) -> Stop<Selected> {
        let is_recording = self.selector.traces.is_recording();
        let phase = if is_recording { Phase::Record } else { Phase::Interpret };
        during(phase, || match self.machine.has_fragments() {
            true => self.interp.run(context, &mut self.selector),
            false => self.interp.run(context, &mut NoPolicy).without_policy(),
        })
    }

    /// Interprets one instruction.
    fn interpret_one(&mut self, context: &mut ThreadContext) -> Option<Ended> {
        let stop = during(Phase::Interpret, || self.interp.run_one(context));
        stop.map(|stop| Ended::Stopped(stop.without_policy()))
    }

    /// Native code has left: makes the state exact, comes out of the cache, and does what can be
    /// done while interpreting.
    fn after_native(
        &mut self,
        entry: NativeEntry,
        left: Left,
        context: &mut ThreadContext,
        code: &dyn Fetch,
    ) -> Option<Ended> {
        let mut fragments = self.machine.fragments()?;
        fragments.out(entry, context);
        let after = match fragments.after_native(left, context, &self.selector.traces.policy) {
            Ok(after) => after,
            Err(error) => broken(&format!("leaving native code: {error}")),
        };
        make_exact(after, &mut fragments, context, code);
        let dispatch = fragments.take_new_dispatch();
        drop(fragments);
        self.arrival = match after {
            AfterNative::Continue(arrival) => arrival,
            // A fragment is not entered again before an instruction was executed.
            _ => Arrival::WithoutProgress,
        };
        if !self.peer.enter(context) {
            return Some(Ended::Outside);
        }
        if let Some(head) = dispatch {
            self.mark(head);
        }
        match after {
            AfterNative::Continue(_) => None,
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
            AfterNative::Full => Some(Ended::Full),
        }
    }

    /// Does what a stretch ended for. The thread is outside.
    fn handle_end(
        &mut self,
        context: &mut ThreadContext,
        system: &mut System,
        ended: Ended,
    ) -> Outcome {
        let stop = match ended {
            Ended::Stopped(stop) => stop,
            Ended::Hot(counter, executions) => {
                self.record_head(context, counter, executions);
                return Outcome::Continue;
            }
            Ended::HotExit(side) => {
                self.record_side_trace(context, side);
                return Outcome::Continue;
            }
            Ended::Full => {
                self.overflowed();
                return Outcome::Continue;
            }
            Ended::Outside => return Outcome::Continue,
        };
        match stop {
            Stop::Policy(selected) => {
                self.selected(context, selected);
                return Outcome::Continue;
            }
            Stop::Syscall | Stop::Special { .. } => {
                if let Some(selected) = self.selector.traces.runtime_instruction() {
                    // The trace ends before this instruction; the fragment is for the next time.
                    self.selected(context, selected);
                }
            }
            Stop::Fault { .. } | Stop::Trap { .. } | Stop::Broken(_) => {
                self.abandon(AbortReason::Fault);
            }
            Stop::Pending => self.abandon(AbortReason::Signal),
        }
        self.handle_stop(context, system, stop)
    }
}

/// Native code has left in the middle of an instruction: goes back to before it.
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

/// A broken invariant of ours.
fn broken(what: &str) -> ! {
    process::complain(&format!("internal error: {what}"));
    signal::die(libc::SIGABRT);
}
