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

mod copy;
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
mod sources;
mod worth;

use crate::changes::{Code, Store};
use crate::config::{Stage, Tier};
use crate::interp::{Interp, NoPolicy, Stop, astray};
use crate::kernel::process::{self, Ending};
use crate::kernel::signal::{self, GuestFault};
use crate::kernel::syscall::{Engine, Outcome, System, int80};
use crate::memory::{self, FaultInfo};
use crate::observe::profile::{self, Phase, during};
use dynasour_emitter::codegen::Allocator;
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::MAX_LENGTH;
use dynasour_ir::Trap;
use dynasour_tracer::{AbortReason, HeadKind, Landing, Path, SpeculationPolicy};
use footprint::Noted;
use fragments::{After, Arrival, Failure, FragmentError, Next, Side};
use peers::Peer;
use select::{
    COPIED_BLOCK, DISPATCH_FRAGMENT, LINEAR_DISPATCH_FRAGMENT, LINEAR_FRAGMENT, LOOP_FRAGMENT,
    NO_FRAGMENT, Selected, Selector,
};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use worth::Effort;

use resting::Resting;

pub use machine::{Machine, fragment_fault, signal_accepted};

/// TF: a trap behind each instruction.
const TRAP_FLAG: u64 = 0x100;

/// Runs one guest thread.
pub struct Dispatcher {
    machine: &'static Machine,
    peer: Arc<Peer>,
    interp: Interp,
    selector: Selector,
    /// The exit for which a side trace is being recorded.
    side: Option<Side>,
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
            Interp::with_code(Box::new(Noted::new(&machine.footprint, machine.pages.clone())));
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
            effort: Effort::new(&machine.config),
            allocator: Allocator::default(),
            arrival: Arrival::default(),
        };
        dispatcher.count_heads();
        Ok(dispatcher)
    }

    /// Does native code run that is not traces?
    fn copies(&self) -> bool {
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
        if self.copies() {
            self.peer.sample();
        }
        // A new thread's id is written for it before it comes here.
        self.drop_written();
        loop {
            if system.process.threads().is_stopping() {
                system.process.threads().stand_still(|| ());
            }
            let outcome = if !self.peer.enter(context) {
                self.attend();
                Outcome::Continue
            } else if context.rflags & TRAP_FLAG != 0 {
                self.stepped(context, system)
            } else {
                match self.machine.config.tier {
                    Tier::Interp => {
                        let stop =
                            during(Phase::Interpret, || self.interp.run(context, &mut NoPolicy));
                        self.peer.leave();
                        self.stopped(context, system, stop)
                    }
                    Tier::Dynamo if !self.copies() => self.traced(context, system),
                    _ if self.selector.is_recording() => {
                        let outcome = self.traced(context, system);
                        if !self.selector.is_recording() {
                            self.effort.end();
                        }
                        outcome
                    }
                    _ => self.copied(context, system),
                }
            };
            if let Some(ended) = self.settle(outcome, system) {
                self.abandon(AbortReason::Signal);
                return ended;
            }
            self.drop_written();
        }
    }

    /// The guest steps through itself: one instruction, and the trap behind it. None comes behind a
    /// system call, whose way back loads the flag anew.
    fn stepped(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        self.abandon(AbortReason::Signal);
        let pending = context.pending.load(Ordering::Relaxed) != 0;
        let stop = if pending { None } else { self.interp.run_one(context) };
        self.peer.leave();
        match stop {
            None if pending => system.deliver_pending(context),
            None => system.raise(context, GuestFault::single_step(context.rip)),
            Some(stop @ Stop::Special { pc }) => {
                let outcome = self.stopped(context, system, stop);
                // Not if it has raised a signal of its own.
                let is_behind = (1..=MAX_LENGTH as u64).contains(&context.rip.wrapping_sub(pc));
                match outcome {
                    Outcome::Continue if is_behind => {
                        system.raise(context, GuestFault::single_step(context.rip))
                    }
                    outcome => outcome,
                }
            }
            Some(stop) => self.stopped(context, system, stop),
        }
    }

    /// Forgets what other threads found out to be stale.
    fn attend(&mut self) {
        for range in self.peer.take_stale() {
            self.forget_blocks(&range);
        }
    }

    /// One stretch with fragments, from interpreting on: interpret until the selector or the
    /// runtime wants something, and do that, outside.
    fn traced(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        let phase = if self.selector.is_recording() { Phase::Record } else { Phase::Interpret };
        let stop = during(phase, || self.interp.run(context, &mut self.selector));
        if let Stop::Policy(Selected::Fragment) = stop
            && !self.copies()
        {
            let after = self.fragments(context);
            self.peer.leave();
            if let After::Astray(pc) = after {
                astray::undo(context, pc, &*self.interp.code());
                return self.stopped(
                    context,
                    system,
                    Stop::<Selected>::Trap { pc, trap: Trap::Protection },
                );
            }
            self.after(context, after);
            return Outcome::Continue;
        }
        self.peer.leave();
        match stop {
            Stop::Policy(selected) => {
                self.selected(context, selected);
                Outcome::Continue
            }
            Stop::Syscall | Stop::Special { .. } => {
                if let Some(selected) = self.selector.runtime_instruction() {
                    // The trace ends before this instruction; the fragment is for the next time.
                    self.selected(context, selected);
                }
                self.stopped(context, system, stop)
            }
            Stop::Fault { .. } | Stop::Trap { .. } | Stop::Broken(_) => {
                self.abandon(AbortReason::Fault);
                self.stopped(context, system, stop)
            }
            Stop::Pending => {
                self.abandon(AbortReason::Signal);
                self.stopped(context, system, stop)
            }
        }
    }

    /// Does what the selector stopped for, except running fragments.
    fn selected(&mut self, context: &ThreadContext, selected: Selected) {
        match selected {
            Selected::Fragment => {}
            Selected::Hot { kind, stable } => {
                let pc = context.rip;
                // Another thread may have been faster.
                if self.machine.fragments().is_some_and(|mut f| f.find(pc).is_some()) {
                    self.mark(pc);
                } else if let Ok(entry) = self.interp.entry(pc) {
                    self.selector.start(entry.lifted(), kind, stable);
                }
            }
            Selected::Recorded(path, end) => {
                self.machine.log(Stage::Record, || {
                    format!("recorded {:#x}, {} blocks, {end:?}", path.head, path.steps.len())
                });
                if let Some(mut fragments) = self.machine.fragments() {
                    fragments.stats.recorded(end);
                }
                match self.compile(&path) {
                    Ok(()) => {
                        self.effort.came_to(true);
                        self.mark(path.head);
                    }
                    Err(failure) => {
                        if path.guest.is_some() {
                            self.selector.dispatch.fail(path.head, true);
                        }
                        self.failed(path.head, failure);
                    }
                }
            }
            Selected::Aborted(head, reason) => self.failed(head, Failure::Refused(reason)),
        }
    }

    /// Compiles a recorded path into a fragment. Only the plan and the placing of the code need the
    /// lock.
    fn compile(&mut self, path: &Path) -> Result<(), Failure> {
        let (config, policy, side) =
            (&self.machine.config, &self.selector.policy, self.side.take());
        let Some(mut fragments) = self.machine.fragments() else { return Err(Failure::Stale) };
        let mut plan = fragments.plan(path, side, config, policy)?;
        plan.times.record = self.selector.recording_nanoseconds();
        drop(fragments);
        if self.peer.is_posted() {
            // The path may be made from what has changed. (What changes from now on spoils the
            // plan.)
            return Err(Failure::Stale);
        }
        let version = plan.version(path, config, policy)?;
        let code = during(Phase::Emit, || plan.code(&version, &mut self.allocator, config))?;
        let Some(mut fragments) = self.machine.fragments() else { return Err(Failure::Stale) };
        during(Phase::Emit, || fragments.install(plan, &version, code, path, config))
    }

    fn failed(&mut self, head: u64, failure: Failure) {
        let reason = match failure {
            Failure::Full | Failure::Stale => AbortReason::Flushed,
            Failure::Refused(reason) => reason,
        };
        self.machine.log(Stage::Record, || format!("gave up {head:#x}: {reason:?}"));
        if let Failure::Refused(reason) = failure
            && reason != AbortReason::NotSelected
        {
            self.effort.came_to(false);
        }
        self.count_abort(reason);
        match failure {
            Failure::Full => self.overflowed(),
            // There may be a fragment of somebody else's by now.
            Failure::Stale => self.mark(head),
            Failure::Refused(AbortReason::NoGain) => {
                self.selector.heads.give_up(head, &self.selector.policy)
            }
            Failure::Refused(_) => self.selector.heads.penalise(head),
        }
    }

    /// The code cache is full.
    fn overflowed(&mut self) {
        self.selector.policy.cache_overflowed();
        self.flush();
        self.count_heads();
    }

    /// Runs fragments from `rip` on.
    fn fragments(&mut self, context: &mut ThreadContext) -> After {
        match self.run_fragments(context) {
            Ok(after) => after,
            Err(error) => {
                process::complain(&format!("internal error leaving a fragment: {error}"));
                signal::die(libc::SIGABRT);
            }
        }
    }

    fn run_fragments(&mut self, context: &mut ThreadContext) -> Result<After, FragmentError> {
        // Who is not admitted interprets: whoever is may be waiting for what this thread does.
        let Some(_admission) = self.machine.admit() else { return Ok(After::Interpret) };
        let Some(mut fragments) = self.machine.fragments() else { return Ok(After::Nothing) };
        let Some(mut fragment) = fragments.find(context.rip) else { return Ok(After::Nothing) };
        let mut visiting = false;
        loop {
            let way = fragments.prepare(fragment)?;
            if !visiting {
                self.peer.visit();
                visiting = true;
            }
            drop(fragments);
            // SAFETY: `context` is this thread's, and GS points to it; the fragment is not flushed
            // while this thread is in the cache.
            let left = during(Phase::Native, || unsafe { way.entry.run(context) });
            let Some(again) = self.machine.fragments() else { return Ok(After::Nothing) };
            fragments = again;
            match fragments.left(way, left, context, &self.selector.policy)? {
                Next::Enter(next) => fragment = next,
                Next::After(after) => {
                    let dispatch = fragments.take_new_dispatch();
                    drop(fragments);
                    if let Some(head) = dispatch {
                        self.mark(head);
                    }
                    return Ok(after);
                }
            }
        }
    }

    /// Prepares what is to happen where fragments have left.
    fn after(&mut self, context: &ThreadContext, after: After) {
        match after {
            After::Interpret | After::Pending | After::Astray(_) => {}
            After::Nothing => self.mark(context.rip),
            After::Flush => self.overflowed(),
            After::CountHead => {
                if let Ok(entry) = self.interp.entry(context.rip)
                    && let Some(selected) = self.selector.count(context, entry, HeadKind::Other)
                {
                    self.selected(context, selected);
                }
            }
            After::RecordSide(side) => {
                if self.selector.heads.is_blacklisted(context.rip, &self.selector.policy) {
                    return;
                }
                if let Ok(entry) = self.interp.entry(context.rip) {
                    self.selector.start(entry.lifted(), HeadKind::Other, Vec::new());
                    self.side = Some(side);
                }
            }
        }
    }

    /// Makes the interpreter's block at `pc` say what fragment starts there.
    fn mark(&mut self, pc: u64) {
        let copied = self.machine.config.interprets_first();
        let user = match self.machine.fragments().and_then(|f| f.at(pc)) {
            None if copied && self.machine.fragments().is_some_and(|mut f| f.has_code(pc)) => {
                COPIED_BLOCK
            }
            None => NO_FRAGMENT,
            Some(Landing::Ordinary | Landing::Short) => LINEAR_FRAGMENT,
            Some(Landing::Loop) => LOOP_FRAGMENT,
            Some(Landing::Dispatch) => DISPATCH_FRAGMENT,
            Some(Landing::LinearDispatch) => LINEAR_DISPATCH_FRAGMENT,
        };
        if user <= COPIED_BLOCK {
            self.selector.dispatch.forget(pc);
        }
        if let Ok(entry) = self.interp.entry(pc) {
            entry.user = user;
        }
    }

    /// Drops all fragments, and a recording that may have been made from old code.
    fn flush(&mut self) {
        self.abandon(AbortReason::Flushed);
        self.machine.flush(&self.peer);
        self.forget_fragments();
    }

    /// All fragments are gone. Other threads find out when they enter one.
    fn forget_fragments(&mut self) {
        self.selector.dispatch.clear();
        self.interp.for_each_entry(|entry| entry.user = NO_FRAGMENT);
    }

    /// Drops this thread's blocks made from `range`, and a recording that may hold what they were.
    fn forget_blocks(&mut self, range: &Range<u64>) {
        if self.interp.invalidate(range.start, range.end) {
            self.abandon(AbortReason::Flushed);
        }
    }

    fn abandon(&mut self, reason: AbortReason) {
        self.side = None;
        if self.selector.abandon().is_some() {
            self.count_abort(reason);
        }
    }

    fn count_abort(&self, reason: AbortReason) {
        if let Some(mut fragments) = self.machine.fragments() {
            fragments.stats.aborted(reason);
        }
    }

    /// Does what the interpreter stopped for, other than the selector's wishes.
    fn stopped<P>(
        &mut self,
        context: &mut ThreadContext,
        system: &mut System,
        stop: Stop<P>,
    ) -> Outcome {
        if let Stop::Special { pc } | Stop::Trap { pc, .. } | Stop::Fault { pc, .. } = stop
            && context.pending.load(Ordering::Relaxed) != 0
        {
            // The signal came first: the instruction is for later.
            context.rip = pc;
            return system.deliver_pending(context);
        }
        match stop {
            Stop::Syscall => {
                count(&self.peer.syscalls, 1);
                if self.machine.config.log.contains(&Stage::Syscall) {
                    let g = &context.gpr;
                    eprintln!("dynasour: syscall {} ({:#x}, {:#x}, {:#x})", g[0], g[7], g[6], g[2]);
                }
                during(Phase::Syscall, || system.syscall(context, self))
            }
            Stop::Special { pc } if int80::is_at(pc) => {
                count(&self.peer.syscalls, 1);
                during(Phase::Syscall, || system.syscall_32(context, self, pc))
            }
            Stop::Special { pc } => during(Phase::Syscall, || system.special(context, pc)),
            Stop::Trap { pc, trap } => {
                if let Trap::Fetch = trap
                    && let Some(outcome) = system.vsyscall(context, pc)
                {
                    return outcome;
                }
                let fault = match trap {
                    Trap::Undefined => GuestFault::undefined(pc),
                    Trap::Protection => GuestFault::protection(0),
                    Trap::Breakpoint => {
                        context.rip = pc + 1;
                        GuestFault::breakpoint()
                    }
                    Trap::Fetch => fetch_fault(self.interp.first_unfetchable(pc)),
                };
                system.raise(context, fault)
            }
            Stop::Fault { info, .. } if self.opened_by_fault(&info) => self.repeat(context, system),
            Stop::Fault { pc, info } => {
                let fault = GuestFault::noted(context, pc, &info);
                system.raise(context, fault)
            }
            Stop::Pending => system.deliver_pending(context),
            Stop::Policy(_) => Outcome::Continue,
            Stop::Broken(error) => {
                process::complain(&format!(
                    "internal error at guest pc {:#x}: {error}",
                    context.rip
                ));
                Outcome::Killed(libc::SIGABRT)
            }
        }
    }

    /// Was this fault only ours? Then its page is open now, and whatever was made from it is gone.
    fn opened_by_fault(&mut self, fault: &FaultInfo) -> bool {
        let machine = self.machine;
        match machine.pages.announce_store(fault) {
            Store::Refused => false,
            Store::Open => true,
            Store::Guarded(change) => {
                change.quiesce(self).perform(|| ()).0.publish(self, []);
                true
            }
        }
    }

    /// The instruction at rip wrote to a page of code that is open now: runs it again, by itself,
    /// since it may have changed the next one.
    fn repeat(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        if !self.peer.enter(context) {
            // It faults again, or does not, when it is tried next.
            self.attend();
            return Outcome::Continue;
        }
        let stop = self.interp.run_one(context);
        self.peer.leave();
        stop.map_or(Outcome::Continue, |stop| self.stopped(context, system, stop))
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
    fn settle(&mut self, outcome: Outcome, system: &mut System) -> Option<Ending> {
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

/// Adds to a counter that only this thread writes.
fn count(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

/// What fetching an instruction at `addr`, where that is not possible, raises.
fn fetch_fault(addr: u64) -> GuestFault {
    match memory::fetch_code(addr, &mut [0]) {
        0 => GuestFault::fetch(addr, &memory::last_fault()),
        // It is there: what is missing is the right to execute it.
        _ => GuestFault::not_executable(addr),
    }
}
