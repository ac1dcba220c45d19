//! The copy tier and the full tier: blocks of guest code as native code, in the full tier with
//! traces among them, and the interpreter for what cannot be copied and for recording.
//!
//! In the dynamo tier, unless a study wants nothing but traces there, a block is copied when the
//! guest has come to it a few times, and interpreted before that; otherwise it is as the full tier,
//! but traces are made early.
//!
//! A stretch lasts until the runtime has to do something outside: a system call, a fault, a signal,
//! a hot head. Instructions that blocks leave out are interpreted one by one; code that keeps
//! changing, other than by stores that are noticed, is interpreted until it is left.

use super::Dispatcher;
use super::fragments::{Arrival, Came, Failure, Side};
use super::select::{self, COPIED_BLOCK, NO_FRAGMENT};
use super::worth;
use crate::config::Tier;
use crate::interp::{Stop, astray};
use crate::kernel::process;
use crate::kernel::signal;
use crate::kernel::syscall::{Outcome, System};
use crate::observe::profile::{Phase, during};
use dynasour_emitter::Left;
use dynasour_emitter::blocks::{Copied, CounterId, HeadCounts};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_ir::Trap;
use dynasour_tracer::HeadKind;
use std::sync::atomic::Ordering;

/// How much it counts towards a copy that the guest comes to a place from native code, which is
/// warm itself, or from outside, instead of by interpreting.
const FROM_OUTSIDE: u32 = 4;

/// Why a stretch of native code ended.
enum Ended {
    /// With this stop of the interpreter's.
    Stopped(Stop<super::Selected>),
    /// At a hot head.
    Hot(CounterId, u64),
    /// At a hot exit.
    Side(Side),
    /// For want of room.
    Full,
    /// Because there is no native code.
    Gone,
    /// Outside already: there is something to attend to.
    Outside,
}

impl Dispatcher {
    /// One stretch of the copy tier or the full tier, from interpreting on.
    pub(super) fn copied(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        let ended = self.run_copied(context);
        if !matches!(ended, Ended::Outside) {
            self.peer.leave();
        }
        match ended {
            Ended::Stopped(Stop::Policy(selected)) => self.selected(context, selected),
            Ended::Stopped(stop) => return self.stopped(context, system, stop),
            Ended::Hot(counter, executions) => self.hot(context, counter, executions),
            Ended::Side(side) => self.hot_side(context, side),
            Ended::Full => self.overflowed(),
            Ended::Outside | Ended::Gone => {}
        }
        Outcome::Continue
    }

    fn run_copied(&mut self, context: &mut ThreadContext) -> Ended {
        let code = self.interp.code();
        loop {
            if context.pending.load(Ordering::Relaxed) != 0 {
                return Ended::Stopped(Stop::Pending);
            }
            let Some(mut fragments) = self.machine.fragments() else { return Ended::Gone };
            fragments.end_naps();
            if self.machine.config.chaos.is_some()
                && self.arrival != Arrival::WithoutProgress
                && let Some(fragment) = fragments.first(context.rip)
            {
                // Nothing leads into fragments, whose guards are forced on the way in.
                let Some(admission) = self.machine.admit() else {
                    self.arrival = Arrival::WithoutProgress;
                    continue;
                };
                let (entry, forced) = fragments.prepare_forced(fragment);
                self.peer.visit();
                drop(fragments);
                // SAFETY: as below.
                let left = during(Phase::Native, || unsafe { entry.run(context) });
                if let Some(mut fragments) = self.machine.fragments() {
                    fragments.restore(forced);
                }
                drop(admission);
                match self.came(left, context, &*code) {
                    Some(ended) => return ended,
                    None => continue,
                }
            }
            if self.machine.config.interprets_first()
                && self.arrival != Arrival::WithoutProgress
                && !fragments.has_code(context.rip)
            {
                drop(fragments);
                if self.is_cold(context.rip) {
                    self.arrival = Arrival::Anyhow;
                    match during(Phase::Interpret, || self.interp.run(context, &mut self.selector))
                    {
                        Stop::Policy(super::Selected::Fragment) => continue,
                        stop => return Ended::Stopped(stop),
                    }
                }
                fragments = match self.machine.fragments() {
                    Some(fragments) => fragments,
                    None => return Ended::Gone,
                };
            }
            let arrival = std::mem::take(&mut self.arrival);
            let copied =
                match during(Phase::Translate, || fragments.arrive(context.rip, &*code, arrival)) {
                    Ok(copied) => copied,
                    Err(error) if error.is_full() => return Ended::Full,
                    // Nothing that cannot be interpreted.
                    Err(_) => Copied::Instruction,
                };
            match copied {
                Copied::Entry(entry) => {
                    let way = fragments.way_to_copy(entry);
                    self.peer.visit();
                    drop(fragments);
                    // SAFETY: `context` is this thread's, and GS points to it; the code is not
                    // flushed while this thread is in the cache.
                    let left = during(Phase::Native, || unsafe { way.run(context) });
                    if let Some(ended) = self.came(left, context, &*code) {
                        return ended;
                    }
                }
                Copied::Instruction => {
                    drop(fragments);
                    if let Some(stop) = during(Phase::Interpret, || self.interp.run_one(context)) {
                        return Ended::Stopped(stop.without_policy());
                    }
                }
                Copied::Writable => {
                    drop(fragments);
                    match during(Phase::Interpret, || self.interp.run(context, &mut self.selector))
                    {
                        Stop::Policy(super::Selected::Fragment) => {}
                        stop => return Ended::Stopped(stop),
                    }
                }
            }
        }
    }

    /// Has the guest seldom come to `pc`, where there is no code?
    fn is_cold(&mut self, pc: u64) -> bool {
        let Ok(entry) = self.interp.entry(pc) else { return false };
        let is_warm = select::is_warm(entry, FROM_OUTSIDE);
        if is_warm && entry.user == NO_FRAGMENT {
            entry.user = COPIED_BLOCK;
        }
        !is_warm
    }

    /// Native code has left: makes the state exact, comes out of the cache, and does what can be
    /// done while interpreting.
    fn came(&mut self, left: Left, context: &mut ThreadContext, code: &dyn Fetch) -> Option<Ended> {
        let Some(mut fragments) = self.machine.fragments() else { return Some(Ended::Gone) };
        let came = match fragments.came(left, context, &self.selector.policy) {
            Ok(came) => came,
            Err(error) => broken(&format!("leaving native code: {error}")),
        };
        if came == Came::Fault && !fragments.copy_state(context, code) {
            broken("a copied block faulted whose code has changed unnoticed");
        }
        if let Came::Astray(from) = came {
            astray::undo(context, from, code);
        }
        let dispatch = fragments.take_new_dispatch();
        drop(fragments);
        self.arrival = match came {
            Came::On(arrival) => arrival,
            // Whatever comes in between.
            _ => Arrival::WithoutProgress,
        };
        if !self.peer.enter(context) {
            return Some(Ended::Outside);
        }
        if let Some(head) = dispatch {
            self.mark(head);
        }
        match came {
            Came::On(_) => None,
            Came::Astray(pc) => Some(Ended::Stopped(Stop::Trap { pc, trap: Trap::Protection })),
            Came::Fault | Came::Interpret => {
                let stop = during(Phase::Interpret, || self.interp.run_one(context));
                self.arrival = Arrival::Anyhow;
                stop.map(|stop| Ended::Stopped(stop.without_policy()))
            }
            Came::Hot(counter, executions) => Some(Ended::Hot(counter, executions)),
            Came::Side(side) => Some(Ended::Side(side)),
            Came::Full => Some(Ended::Full),
        }
    }

    /// The counter of the head at rip has left after so many executions, and leaves at each now.
    fn hot(&mut self, context: &ThreadContext, counter: CounterId, executions: u64) {
        let pc = context.rip;
        // Whatever comes of it, the block is executed before the head is counted again.
        self.arrival = Arrival::WithoutProgress;
        let Some(mut fragments) = self.machine.fragments() else { return };
        if fragments.first(pc).is_some() {
            // Somebody else has made it since; or, under chaos, it is only entered from here.
            if self.machine.config.chaos.is_some() {
                self.arrival = Arrival::Anyhow;
            }
            fragments.lead_to_first(pc);
            drop(fragments);
            return self.mark(pc);
        }
        let kind = if fragments.is_function(pc) { HeadKind::Function } else { HeadKind::Other };
        if !self.effort.is_affordable() {
            // Later, when the guest has had more time.
            return fragments.put_off(pc, counter, executions);
        }
        drop(fragments);
        let selector = &mut self.selector;
        selector.heads.skip(pc, executions.saturating_sub(1), &selector.policy);
        let traceable = match self.interp.entry(pc) {
            Ok(entry) if selector.may_trace(entry) => Some(selector.arrive(context, entry, kind)),
            _ => None,
        };
        match traceable {
            Some(Some(selected)) => {
                self.effort.begin();
                self.selected(context, selected);
            }
            Some(None) => {}
            None => return self.give_up_head(pc),
        }
        self.set_counter(pc, counter);
    }

    /// Lets a head's counter leave when it has to be counted next.
    fn set_counter(&mut self, pc: u64, counter: CounterId) {
        match self.selector.heads.due(pc, &self.selector.policy) {
            Some(due) => {
                if let Some(mut fragments) = self.machine.fragments() {
                    fragments.set_counter(pc, counter, due);
                }
            }
            None => self.give_up_head(pc),
        }
    }

    fn give_up_head(&self, pc: u64) {
        if let Some(mut fragments) = self.machine.fragments() {
            fragments.stop_counting(pc);
        }
    }

    /// The exit to rip is hot: its trace is recorded, if it may have one.
    fn hot_side(&mut self, context: &ThreadContext, side: Side) {
        self.arrival = Arrival::WithoutProgress;
        if !self.effort.is_affordable() {
            return;
        }
        let given_up = self.selector.heads.is_blacklisted(context.rip, &self.selector.policy);
        match self.interp.entry(context.rip) {
            Ok(entry) if !given_up && self.selector.may_trace(entry) => {
                self.selector.start(entry.lifted(), HeadKind::Exit, Vec::new());
                self.selector.believe();
                self.effort.begin();
                self.side = Some(side);
            }
            _ => {
                let full = self.machine.fragments().is_some_and(|mut f| f.give_up(side));
                if full {
                    self.failed(context.rip, Failure::Full);
                }
            }
        }
    }

    /// Which heads blocks count, and how far, before the runtime does.
    pub(super) fn native_heads(&self) -> HeadCounts {
        let threshold = match self.machine.config.tier {
            Tier::Full | Tier::Dynamo if self.copies() => {
                self.selector.heads.due(u64::MAX, &self.selector.policy).unwrap_or(1)
            }
            _ => 0,
        };
        let functions =
            if self.machine.config.watches_paths() { worth::keeps_a_frame } else { |_| true };
        HeadCounts { threshold, functions }
    }
}

/// A broken invariant of ours.
fn broken(what: &str) -> ! {
    process::complain(&format!("internal error: {what}"));
    signal::die(libc::SIGABRT);
}
