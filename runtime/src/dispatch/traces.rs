//! Making traces: starts a recording when a head or an exit is hot, and compiles what was recorded.
//!
//! ```text
//!   counter or selector          exit
//!    ran out: `record_head`,    is hot:
//!    `Selected::Hot`           `record_side_trace`
//!            │                   │
//!            └────► record ◄─────┘        the interpreter, which tells the selector each block
//!                     │
//!          `Selected::Recorded` ──► `plan` (lock) ──► `compile` (no lock, perhaps on the helper thread)
//!                     │                              ──► `install` (lock)
//!          `Selected::Aborted`  ──► `failed`: the head is penalised or given up
//! ```
//!
//! Data: the selector, the effort and the allocator of the thread's [`Dispatcher`]. All of it runs
//! outside guest code, on the thread that found the head, which holds no lock but while it plans
//! and installs. Several threads may record the same head; the first to install it wins.
//!
//! Example: the head 0x1000 is hot. `selected` starts a recording; the interpreter comes back to
//! 0x1000, so the selector stops it with the path; it is compiled ([`super::compiling`]); `install` makes
//! a fragment, and `mark` tells the interpreter that one starts there.

use super::Dispatcher;
use super::compiling::{Compilation, Compiled};
use super::fragments::{Arrival, Failure, SideRequest, StubWork, Undone};
use super::select::{
    COPIED_BLOCK, DISPATCH_FRAGMENT, LINEAR_DISPATCH_FRAGMENT, LINEAR_FRAGMENT, LOOP_FRAGMENT,
    NO_FRAGMENT, surroundings,
};
use crate::changes::patches;
use crate::config::{Stage, Tier};
use crate::memory;
use crate::observe::events::{self, Event};
use crate::observe::profile::{Phase, during};
use dynasour_emitter::blocks::{CounterId, HeadCounts};
use dynasour_guest::ThreadContext;
use dynasour_tracer::{
    AbortReason, HeadKind, Path, Place, Selected, TargetKind, TraceSelector, worth,
};
use std::ops::Range;

/// The weight of an arrival at a block from native code or from outside; an arrival in the
/// interpreter has the weight 1 (guess: native code is warm, so what it leads to is probably warm,
/// too; too high copies code that runs once).
pub(super) const FROM_OUTSIDE: u32 = 4;
/// Exits for whose side traces there was no time; more are forgotten (guess: a thread has few at a time).
const MOST_TOO_DEAR: usize = 1024;

impl Dispatcher {
    /// Handles a stop that the selector asked for: starts a recording, compiles a recorded path, or
    /// notes that a recording failed. Native code is entered by the next stretch.
    pub(super) fn selected(&mut self, context: &ThreadContext, selected: Selected) {
        match selected {
            Selected::Native => {}
            Selected::Hot { kind, stable } => {
                let pc = context.rip;
                if self.compilations.has_head(pc) || self.is_too_dear(pc) {
                    return;
                }
                // Another thread may have made the fragment already.
                if self.machine.fragments().is_some_and(|mut f| f.find_version(pc).is_some()) {
                    self.mark(pc);
                } else if let Ok(entry) = self.interp.entry(pc) {
                    let around = surroundings(context);
                    self.selector.traces.start(entry.lifted(), kind, stable, &around);
                }
            }
            Selected::Recorded(path, end) => {
                self.machine.log(Stage::Record, || {
                    format!("recorded {:#x}, {} blocks, {end:?}", path.head, path.steps.len())
                });
                if let Some(mut fragments) = self.machine.fragments() {
                    fragments.stats.recorded(end);
                }
                if std::mem::take(&mut self.only_guest_loops) && path.guest.is_none() {
                    return self.selector.traces.dispatch.found_no_more(path.head);
                }
                let (head, is_guest_loop) = (path.head, path.guest.is_some());
                match self.plan(path) {
                    Ok(compilation) => self.compile(compilation),
                    Err(failure) => self.not_compiled(head, failure, is_guest_loop),
                }
            }
            Selected::Aborted(head, reason) => {
                if std::mem::take(&mut self.only_guest_loops) {
                    self.machine.log(Stage::Record, || format!("search at {head:#x}: {reason:?}"));
                    self.effort.note_result(false);
                    self.count_abort(None, reason);
                    if reason != AbortReason::TooDear {
                        self.selector.traces.dispatch.found_no_more(head);
                    }
                    return;
                }
                self.failed(head, Failure::Refused(reason), false);
                self.hasten_changed();
            }
        }
    }

    /// An attempt to make a trace begins: its time is not the guest's.
    pub(super) fn begin_attempt(&mut self) {
        self.effort.begin();
        self.selector.traces.dispatch.set_longest(self.effort.longest_path());
        self.racing.disturb();
    }

    /// Plans the compilation of a recorded path. Only planning and installing it take the lock of the
    /// fragments.
    fn plan(&mut self, path: Path) -> Result<Compilation, Failure> {
        let is_affordable = match self.side_request {
            Some(_) => self.may_compile_side(path.instructions()),
            None => self.effort.may_compile(path.instructions()),
        };
        if !is_affordable {
            if let Some(side) = self.side_request.take() {
                if self.too_dear.len() >= MOST_TOO_DEAR {
                    self.too_dear.clear();
                }
                self.too_dear.insert(side, path.instructions());
                self.postpone_side_trace(side);
            }
            return Err(Failure::Refused(AbortReason::TooDear));
        }
        let (config, policy, side) =
            (&self.machine.config, &*self.selector.traces.policy, self.side_request.take());
        let Some(mut fragments) = self.machine.fragments() else { return Err(Failure::Stale) };
        let mut plan = fragments.plan(&path, side, config, policy)?;
        plan.times.record = self.selector.traces.recording_nanoseconds();
        drop(fragments);
        if self.peer.is_posted() {
            // Guest code has changed, perhaps that of the path. (A change from now on makes the
            // plan stale, so that `install` fails.)
            return Err(Failure::Stale);
        }
        let draft = plan.build(&path, config, policy)?;
        Ok(Compilation { plan, path, draft, side })
    }

    /// Publishes what was compiled as a fragment.
    pub(super) fn install(&mut self, compiled: Compiled) {
        let Compiled { plan, path, code, side } = compiled;
        let (machine, head) = (self.machine, path.head);
        if code.is_ok() {
            self.effort.note_compiled(path.instructions(), plan.times.compiling());
        }
        let installed = code.and_then(|(version, code)| {
            let Some(mut fragments) = machine.fragments() else { return Err(Failure::Stale) };
            let config = &machine.config;
            during(Phase::Emit, || fragments.install(plan, &version, code, &path, config))
        });
        match installed {
            Ok(()) => {
                self.effort.note_result(true);
                self.selector.end_sample();
                self.machine.set_traced();
                self.trace_installed();
                self.mark(head);
                if side.is_none() {
                    self.entrances.made(&path, &*self.interp.code());
                }
            }
            Err(failure) => self.not_compiled(head, failure, path.guest.is_some()),
        }
    }

    /// No trace was made of a recorded path.
    fn not_compiled(&mut self, head: u64, failure: Failure, is_guest_loop: bool) {
        if is_guest_loop {
            self.guest_loop_failed(head, failure);
        }
        self.failed(head, failure, is_guest_loop);
        self.hasten_changed();
    }

    /// A head whose loops are told otherwise from now on becomes hot soon.
    pub(super) fn hasten_changed(&mut self) {
        if let Some(head) = self.selector.traces.dispatch.take_changed() {
            self.hasten(head);
        }
    }

    /// A head becomes hot soon.
    fn hasten(&mut self, head: u64) {
        let TraceSelector { heads, policy, .. } = &mut self.selector.traces;
        heads.forgive(head);
        heads.skip(head, u64::MAX, &**policy);
    }

    /// Is there still no time for the loop of an interpreted program that was found last at this head?
    fn is_too_dear(&self, head: u64) -> bool {
        let postponed = self.selector.traces.dispatch.postponed(head);
        postponed.is_some_and(|instructions| !self.effort.may_compile(instructions))
    }

    /// May a side trace of so many guest instructions be compiled now? A loop for which there is no time yet is
    /// made before.
    fn may_compile_side(&self, instructions: u64) -> bool {
        self.effort.may_compile_side(instructions, self.selector.traces.dispatch.waiting())
    }

    /// No trace was made for a loop of an interpreted program.
    fn guest_loop_failed(&mut self, head: u64, failure: Failure) {
        let dispatch = &mut self.selector.traces.dispatch;
        let may_come_later = match failure {
            Failure::Refused(AbortReason::TooDear) => true,
            // Perhaps an operand changes in the loop. The next trace of the head assumes none.
            Failure::Refused(AbortReason::Inconsistent) => dispatch.assume_less(head),
            // Perhaps it holds for one object only that the position comes from.
            Failure::Refused(AbortReason::NoGain) => dispatch.tell_by_position(head),
            _ => false,
        };
        match may_come_later {
            true => dispatch.postpone(head),
            false => dispatch.fail(head, true),
        }
    }

    /// No trace was made for `head`: counts the reason, and penalises the head if that is due to
    /// the path. If that is a loop of an interpreted program, another loop there may do better.
    fn failed(&mut self, head: u64, failure: Failure, is_guest_loop: bool) {
        let reason = match failure {
            Failure::Full | Failure::Stale => AbortReason::Flushed,
            Failure::Refused(reason) => reason,
        };
        self.machine.log(Stage::Record, || format!("gave up {head:#x}: {reason:?}"));
        if let Failure::Refused(reason) = failure
            && reason != AbortReason::NotSelected
        {
            self.effort.note_result(false);
        }
        self.count_abort(Some(head), reason);
        match failure {
            Failure::Full => self.overflowed(),
            // Another thread may have made a fragment there.
            Failure::Stale => self.mark_known(head),
            // The head gets hot again when there is more time.
            Failure::Refused(AbortReason::TooDear) => {}
            Failure::Refused(AbortReason::NoGain | AbortReason::BrokenPass) if !is_guest_loop => {
                self.selector.traces.heads.give_up(head, &*self.selector.traces.policy)
            }
            Failure::Refused(_) => self.selector.traces.heads.penalise(head),
        }
    }

    /// Compiles the resolved stub of an exit, without the lock, and installs it.
    pub(super) fn make_stub(&mut self, work: &StubWork) {
        let compiled = during(Phase::Emit, || work.compile(&mut self.allocator));
        if let Ok(stub) = &compiled
            && self.machine.config.verify_traces
        {
            work.verify(stub);
        }
        let full = self.machine.fragments().is_some_and(|mut f| f.install_stub(work, compiled));
        if full {
            self.overflowed();
        }
    }

    /// The code cache is full: drops everything.
    pub(super) fn overflowed(&mut self) {
        self.selector.traces.policy.cache_overflowed();
        self.flush();
        self.count_heads();
    }

    /// Sets the `user` word of the interpreter's block at `pc` to what starts there. The block is made if
    /// need be, so `pc` is where the guest is, or its code has not changed.
    pub(super) fn mark(&mut self, pc: u64) {
        let user = self.native_at(pc);
        if let Ok(entry) = self.interp.entry(pc) {
            entry.user = user;
        }
    }

    /// As [`Dispatcher::mark`], if there is such a block. There may be no code at `pc` any more.
    fn mark_known(&mut self, pc: u64) {
        let user = self.native_at(pc);
        if let Some(entry) = self.interp.known_entry(pc) {
            entry.user = user;
        }
    }

    /// What starts at `pc`, as a `user` word.
    fn native_at(&mut self, pc: u64) -> u32 {
        let copied = self.machine.config.interprets_first();
        let (kind, has_traces) = self
            .machine
            .fragments()
            .map_or((None, false), |f| (f.kind_at(pc), f.first_version(pc).is_some()));
        let user = match kind {
            None if copied && self.machine.fragments().is_some_and(|mut f| f.has_code(pc)) => {
                COPIED_BLOCK
            }
            None => NO_FRAGMENT,
            Some(TargetKind::Ordinary | TargetKind::Short) => LINEAR_FRAGMENT,
            Some(TargetKind::Loop) => LOOP_FRAGMENT,
            Some(TargetKind::Dispatch) => DISPATCH_FRAGMENT,
            Some(TargetKind::LinearDispatch) => LINEAR_DISPATCH_FRAGMENT,
        };
        // On the floor nothing starts there, but the loops that have traces are still known.
        if !has_traces {
            self.selector.traces.dispatch.forget(pc);
        }
        user
    }

    /// Drops all native code, and the recording under way, which may hold blocks of old code.
    pub(super) fn flush(&mut self) {
        self.abandon(AbortReason::Flushed);
        self.machine.flush(&self.peer);
        self.forget_fragments();
    }

    /// All fragments are gone: corrects the `user` words of this thread's blocks. Other threads
    /// correct theirs when they find no fragment to enter.
    pub(super) fn forget_fragments(&mut self) {
        self.selector.traces.dispatch.clear();
        self.interp.for_each_entry(|entry| entry.user = NO_FRAGMENT);
    }

    /// Drops this thread's interpreted blocks made from `range`, and the recording under way if
    /// there were any, since it may hold them.
    pub(super) fn forget_blocks(&mut self, range: &Range<u64>) {
        if self.interp.invalidate(range.start, range.end) {
            self.abandon(AbortReason::Flushed);
        }
    }

    /// Gives up the recording under way, if there is one.
    pub(super) fn abandon(&mut self, reason: AbortReason) {
        self.side_request = None;
        self.only_guest_loops = false;
        if let Some(head) = self.selector.traces.abandon() {
            self.count_abort(Some(head), reason);
        }
    }

    /// Counts that no trace was made for `head`; for none, if it is not known.
    fn count_abort(&self, head: Option<u64>, reason: AbortReason) {
        if let Some(pc) = head {
            events::emit(|| Event::Failed { pc, reason: format!("{reason:?}") });
        }
        if let Some(mut fragments) = self.machine.fragments() {
            fragments.stats.aborted(head, reason);
        }
    }

    /// The counter of the head at rip has left, after `executions` of the head. It leaves at each
    /// execution from now on, until it is set again. Starts a recording, or sets the counter.
    pub(super) fn record_head(
        &mut self,
        context: &ThreadContext,
        counter: CounterId,
        executions: u64,
    ) {
        let pc = context.rip;
        // In any case the head's block is executed next, not its counter or a fragment.
        self.arrival = Arrival::WithoutProgress;
        let Some(mut fragments) = self.machine.fragments() else { return };
        if fragments.first_version(pc).is_some() {
            // Another thread has made the fragment meanwhile. Or guards are forced (`--chaos`):
            // then fragments are only entered from the runtime.
            if self.machine.config.chaos.is_some() {
                self.arrival = Arrival::Ordinary;
            }
            fragments.lead_to_first(pc);
            drop(fragments);
            return self.mark(pc);
        }
        let kind = if fragments.is_function(pc) { HeadKind::Function } else { HeadKind::Other };
        if self.race_is_measured() || !self.effort.is_affordable() || self.compilations.has_head(pc)
        {
            // A race is not to be disturbed, the thread has used up its time for traces, or the head's
            // trace is being compiled. The head is tried again later, when the guest has run longer.
            return fragments.postpone(pc, counter, executions);
        }
        drop(fragments);
        let traces = &mut self.selector.traces;
        traces.heads.skip(pc, executions.saturating_sub(1), &*traces.policy);
        let traceable = match self.interp.entry(pc) {
            Ok(entry) if self.selector.may_trace(entry) => {
                Some(self.selector.traces.arrive(pc, &context.gpr, kind))
            }
            _ => None,
        };
        match traceable {
            Some(Some(selected)) => {
                self.begin_attempt();
                self.selected(context, selected);
            }
            Some(None) => {}
            None => return self.give_up_head(pc),
        }
        self.set_counter(pc, counter);
    }

    /// Sets a head's counter so that it leaves when the selector has to count the head again.
    fn set_counter(&mut self, pc: u64, counter: CounterId) {
        match self.selector.traces.heads.due(pc, &*self.selector.traces.policy) {
            Some(due) => {
                if let Some(mut fragments) = self.machine.fragments() {
                    fragments.set_counter(pc, counter, due);
                }
            }
            None => self.give_up_head(pc),
        }
    }

    /// The head at `pc` is not counted any more.
    fn give_up_head(&self, pc: u64) {
        if let Some(mut fragments) = self.machine.fragments() {
            fragments.stop_counting(pc);
        }
    }

    /// The guest comes to rip, a head of loops of an interpreted program, in none of those that have
    /// traces: starts a recording that searches for another one. A race may be under way: a trace is
    /// worth little while the loops around it have none.
    pub(super) fn search(&mut self, context: &ThreadContext) {
        self.arrival = Arrival::WithoutProgress;
        let pc = context.rip;
        let wanted = self.selector.traces.dispatch.wants_more(pc);
        let waits = self.compilations.has_head(pc) || self.is_too_dear(pc);
        if !wanted || waits || !self.effort.is_affordable() {
            return;
        }
        if let Ok(entry) = self.interp.entry(pc)
            && self.selector.may_trace(entry)
        {
            let around = surroundings(context);
            self.selector.traces.start(entry.lifted(), HeadKind::Other, Vec::new(), &around);
            self.begin_attempt();
            self.only_guest_loops = true;
        }
    }

    /// The exit that led to rip is hot: starts recording a side trace, unless code at rip may not
    /// be traced.
    pub(super) fn record_side_trace(&mut self, context: &ThreadContext, side: SideRequest) {
        self.arrival = Arrival::WithoutProgress;
        if self.compilations.has_exit(&side) {
            return;
        }
        let undone = self.machine.fragments().and_then(|mut f| f.undo(&side, context));
        if let Some(undone) = undone {
            return self.assumptions_undone(&undone);
        }
        if self.trace_is_outdated(&side) {
            return;
        }
        // At least, if its path was not recorded yet.
        let instructions = self.too_dear.get(&side).copied().unwrap_or(0);
        if !self.may_compile_side(instructions) {
            return self.postpone_side_trace(side);
        }
        let given_up =
            self.selector.traces.heads.is_blacklisted(context.rip, &*self.selector.traces.policy);
        match self.interp.entry(context.rip) {
            Ok(entry) if !given_up && self.selector.may_trace(entry) => {
                // A recording of kind `Exit` continues past a backward branch. Where code is interpreted
                // until it is hot, a side trace ends there, as any other trace does.
                let kind = if self.machine.config.copies_blocks() {
                    HeadKind::Exit
                } else {
                    HeadKind::Other
                };
                let around = surroundings(context);
                let region = self.machine.fragments().and_then(|f| f.region_head(&side));
                self.selector.traces.start(entry.lifted(), kind, Vec::new(), &around);
                self.selector.traces.compile_unjudged();
                self.selector.traces.return_to(region);
                self.begin_attempt();
                self.side_request = Some(side);
            }
            _ => {
                let stub = self.machine.fragments().and_then(|mut fragments| {
                    fragments.give_up(side);
                    fragments.take_wanted_stub()
                });
                if let Some(work) = stub {
                    self.make_stub(&work);
                }
            }
        }
    }

    /// Does the hot exit show that its loop goes other ways now than when it was recorded? Then its head is
    /// recorded anew.
    fn trace_is_outdated(&mut self, side: &SideRequest) -> bool {
        let rests = &mut self.rests;
        let outdated = self
            .machine
            .fragments()
            .and_then(|mut f| f.take_outdated(side, |head| rests.may_change(head)));
        let Some(head) = outdated else { return false };
        self.machine.log(Stage::Record, || format!("outdated: {head:#x}"));
        self.selector.traces.observe_longer(head);
        self.head_lost_trace(head);
        self.hasten(head);
        true
    }

    /// Assumptions of traces did not hold any more, and they were dropped: the head is to get a trace
    /// without them.
    fn assumptions_undone(&mut self, undone: &Undone) {
        self.machine.log(Stage::Record, || format!("assumptions do not hold: {undone:x?}"));
        let traces = &mut self.selector.traces;
        let mut addresses = Vec::new();
        for place in &undone.places {
            match *place {
                Place::Register(g) => traces.heads.undo(undone.head, g),
                Place::Memory { address, .. } => addresses.push(address),
            }
        }
        if !addresses.is_empty() {
            // Perhaps the loop is in another object now that the position comes from.
            traces.dispatch.tell_by_position(undone.head);
        }
        traces.dispatch.undo(undone.head, &undone.keys, addresses);
        if undone.were_all {
            self.head_lost_trace(undone.head);
        }
        self.hasten_changed();
    }

    /// The head has no trace any more, and may get another one.
    pub(super) fn head_lost_trace(&mut self, pc: u64) {
        if self.machine.is_direct() {
            let _exclusive = self.machine.pages.exclusive();
            patches::take_back_from(pc);
        } else if !self.machine.config.samples()
            && let Some(mut fragments) = self.machine.fragments()
        {
            fragments.count_head_again(pc);
        }
        self.selector.traces.heads.forgive(pc);
        self.mark(pc);
    }

    /// No side trace is made for an exit now: see [`super::fragments::Fragments::postpone_side_trace`].
    fn postpone_side_trace(&mut self, side: SideRequest) {
        let code = self.interp.code();
        let stub = self.machine.fragments().and_then(|mut fragments| {
            fragments.postpone_side_trace(side, &*code, &*self.selector.traces.policy);
            fragments.take_wanted_stub()
        });
        if let Some(work) = stub {
            self.make_stub(&work);
        }
    }

    /// Which heads copied blocks count, and up to which threshold. If threads are sampled, none.
    pub(super) fn native_heads(&self) -> HeadCounts {
        let threshold = match self.machine.config.tier {
            _ if self.machine.config.samples() => 0,
            Tier::Full | Tier::Dynamo if self.copies_blocks() => {
                self.selector.traces.heads.due(u64::MAX, &*self.selector.traces.policy).unwrap_or(1)
            }
            _ => 0,
        };
        let functions = if self.machine.config.measures_paths() { keeps_a_frame } else { |_| true };
        HeadCounts { threshold, functions }
    }
}

/// See [`worth::keeps_a_frame`].
fn keeps_a_frame(pc: u64) -> bool {
    worth::keeps_a_frame(pc, memory::fetch_code)
}
