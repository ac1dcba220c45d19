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
//! Invariant: between any two of these the [`ThreadContext`] holds the exact guest state. After a deoptimisation the
//! interpreter executes at least one guest instruction before a fragment is entered again, so progress is certain.

mod copy;
mod fragments;
mod select;

use crate::config::{RunConfig, Stage, Tier};
use crate::interp::{ExecutableCode, Interp, NoPolicy, Stop};
use crate::memory;
use crate::process;
use crate::signal::{self, GuestFault};
use crate::stats::Stats;
use crate::syscall::{Engine, Outcome, System};
use dynasour_guest::ThreadContext;
use dynasour_ir::Trap;
use dynasour_tracer::{AbortReason, HeadKind, Landing, SpeculationPolicy};
use fragments::{After, Fragments};
use select::{DISPATCH_FRAGMENT, LINEAR_FRAGMENT, LOOP_FRAGMENT, NO_FRAGMENT, Selected, Selector};

pub use fragments::{FragmentError, fragment_fault, signal_accepted};
use std::ops::Range;

/// Runs one guest process.
pub struct Dispatcher<'c> {
    config: &'c RunConfig,
    interp: Interp,
    selector: Selector,
    /// The fragment side; none when everything is interpreted.
    fragments: Option<Fragments>,
    stats: Stats,
}

impl<'c> Dispatcher<'c> {
    /// A dispatcher for the first guest process. Code in `untraced` (the vDSO) is only interpreted.
    ///
    /// # Errors
    /// The code cache could not be made.
    pub fn new(config: &'c RunConfig, untraced: Range<u64>) -> Result<Self, FragmentError> {
        let fragments = match config.tier {
            Tier::Interp => None,
            Tier::Dynamo | Tier::Copy => Some(Fragments::new(config)?),
        };
        let mut interp = Interp::with_code(Box::new(ExecutableCode::default()));
        interp.reserve()?;
        Ok(Dispatcher {
            config,
            interp,
            selector: Selector::new(config.threshold, untraced),
            fragments,
            stats: Stats::default(),
        })
    }

    /// Runs the guest from `context` until its process ends.
    pub fn run(&mut self, context: &mut ThreadContext, system: &mut System) -> ! {
        loop {
            let outcome = match self.fragments {
                None => {
                    let stop = self.interp.run(context, &mut NoPolicy);
                    self.stopped(context, system, stop)
                }
                Some(_) if self.config.tier == Tier::Copy => self.copied(context, system),
                Some(_) => self.traced(context, system),
            };
            self.settle(outcome, system);
        }
    }

    /// One stretch of the dynamo tier: interpret until the selector or the runtime wants something, and do that.
    fn traced(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        let stop = self.interp.run(context, &mut self.selector);
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

    /// Does what the selector stopped for.
    fn selected(&mut self, context: &mut ThreadContext, selected: Selected) {
        match selected {
            Selected::Fragment => self.enter(context),
            Selected::Recorded(path, end) => {
                self.stats.recorded(end);
                self.log(Stage::Record, || format!("recorded {:#x}, {} blocks, {end:?}", path.head, path.steps.len()));
                let Some(fragments) = &mut self.fragments else { return };
                match fragments.compile(&path, self.config, &self.selector.policy, &mut self.stats) {
                    Ok(()) => self.mark(path.head),
                    Err(reason) => self.aborted(path.head, reason),
                }
            }
            Selected::Aborted(head, reason) => self.aborted(head, reason),
        }
    }

    fn aborted(&mut self, head: u64, reason: AbortReason) {
        self.log(Stage::Record, || format!("gave up {head:#x}: {reason:?}"));
        self.stats.aborted(reason);
        if reason == AbortReason::Flushed {
            self.overflowed();
        } else {
            self.selector.heads.penalise(head);
        }
    }

    /// The code cache is full.
    fn overflowed(&mut self) {
        self.selector.policy.cache_overflowed();
        self.flush();
    }

    /// Runs fragments from `rip` on, and prepares what is to happen where they leave.
    fn enter(&mut self, context: &mut ThreadContext) {
        let Some(fragments) = &mut self.fragments else { return };
        let after = match fragments.run(context, &self.selector.policy, &mut self.stats) {
            Ok(after) => after,
            Err(error) => {
                process::complain(&format!("internal error leaving a fragment: {error}"));
                signal::die(libc::SIGABRT);
            }
        };
        if let Some(head) = fragments.take_new_dispatch() {
            self.mark(head);
        }
        match after {
            After::Interpret | After::Pending => {}
            After::Flush => self.overflowed(),
            After::CountHead => {
                if let Ok(entry) = self.interp.entry(context.rip) {
                    self.selector.count(context, entry, HeadKind::Other);
                }
            }
            After::RecordSide => {
                if self.selector.heads.is_blacklisted(context.rip, &self.selector.policy) {
                    return;
                }
                if let Ok(entry) = self.interp.entry(context.rip)
                    && !entry.writable
                {
                    self.selector.start(entry.lifted(), HeadKind::Other, Vec::new());
                }
            }
        }
    }

    /// Makes the interpreter's block at `pc` say what fragment starts there.
    fn mark(&mut self, pc: u64) {
        let user = match self.fragments.as_ref().and_then(|f| f.at(pc)) {
            None => NO_FRAGMENT,
            Some(Landing::Ordinary) => LINEAR_FRAGMENT,
            Some(Landing::Loop) => LOOP_FRAGMENT,
            Some(Landing::Dispatch) => DISPATCH_FRAGMENT,
        };
        if let Ok(entry) = self.interp.entry(pc) {
            entry.user = user;
        }
    }

    /// Drops all fragments, and a recording that may have been made from old code.
    fn flush(&mut self) {
        self.abandon(AbortReason::Flushed);
        if let Some(fragments) = &mut self.fragments {
            fragments.flush();
            self.stats.flushes += 1;
        }
        self.interp.for_each_entry(|entry| entry.user = NO_FRAGMENT);
    }

    fn log(&self, stage: Stage, text: impl FnOnce() -> String) {
        if self.config.log.contains(&stage) {
            eprintln!("dynasour: {}", text());
        }
    }

    fn abandon(&mut self, reason: AbortReason) {
        if self.selector.abandon().is_some() {
            self.stats.aborted(reason);
        }
    }

    /// Does what the interpreter stopped for, other than the selector's wishes.
    fn stopped<P>(&mut self, context: &mut ThreadContext, system: &mut System, stop: Stop<P>) -> Outcome {
        match stop {
            Stop::Syscall => {
                self.stats.syscalls += 1;
                if self.config.log.contains(&Stage::Syscall) {
                    let g = &context.gpr;
                    eprintln!("dynasour: syscall {} ({:#x}, {:#x}, {:#x})", g[0], g[7], g[6], g[2]);
                }
                system.syscall(context, self)
            }
            Stop::Special { pc } => system.special(context, pc),
            Stop::Trap { pc, trap } => {
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
            Stop::Fault { pc, info } => system.raise(context, GuestFault::noted(pc, &info)),
            Stop::Pending => system.deliver_pending(context),
            Stop::Policy(_) => Outcome::Continue,
            Stop::Broken(error) => {
                process::complain(&format!("internal error at guest pc {:#x}: {error}", context.rip));
                Outcome::Killed(libc::SIGABRT)
            }
        }
    }

    /// Ends the process if the outcome says so.
    fn settle(&mut self, outcome: Outcome, system: &System) {
        match outcome {
            Outcome::Continue => {}
            Outcome::Exit(status) => {
                self.report(system);
                process::exit(status)
            }
            Outcome::Killed(signo) => {
                self.report(system);
                signal::die(signo)
            }
        }
    }

    /// The table and the file of statistics, for the process that the user started.
    fn write_report(&mut self, system: &System) {
        let Some(to) = system.report_to() else { return };
        self.stats.blocks = self.interp.block_count() as u64;
        self.stats.blacklisted = self.selector.heads.blacklisted(&self.selector.policy) as u64;
        self.stats.signals = system.delivered();
        let mut text = String::new();
        if let Some(path) = &self.config.stats_json {
            let json = serde_json::to_string_pretty(&self.stats).expect("statistics are plain data");
            if let Err(error) = std::fs::write(path, json + "\n") {
                text = format!("dynasour: cannot write {}: {error}\n", path.display());
            }
        }
        if self.config.stats {
            text.push_str(&self.stats.table());
        }
        process::write_all(to, text.as_bytes());
    }
}

/// What fetching an instruction at `addr`, where that is not possible, raises.
fn fetch_fault(addr: u64) -> GuestFault {
    match memory::copy_in(addr, &mut [0]) {
        0 => GuestFault::fetch(addr, &memory::last_fault()),
        // It is there: what is missing is the right to execute it.
        _ => GuestFault::not_executable(addr),
    }
}

impl Engine for Dispatcher<'_> {
    fn invalidate(&mut self, range: Range<u64>) {
        if self.interp.invalidate(range.start, range.end) {
            // A recording may hold what these blocks were.
            self.abandon(AbortReason::Flushed);
        }
        if self.fragments.as_ref().is_some_and(|f| f.is_made_from(&range)) {
            self.flush();
        }
    }

    fn report(&mut self, system: &System) {
        // A reader that has gone or a limit on files must not change how the guest ends.
        let mask = signal::kernel_mask();
        signal::set_kernel_mask(!0);
        self.write_report(system);
        signal::set_kernel_mask(mask);
    }

    fn private_memory_lost(&mut self) {
        if self.fragments.as_mut().is_some_and(|f| f.lose_private_memory()) {
            self.flush();
        }
    }

    fn after_fork_child(&mut self) {
        self.selector.rest();
        self.abandon(AbortReason::Flushed);
        self.interp.for_each_entry(|entry| entry.user = NO_FRAGMENT);
        let interpreter = self.interp.unshare_after_fork().map_err(|e| e.to_string());
        let fragments = self.fragments.as_mut().map_or(Ok(()), |f| f.reset_after_fork().map_err(|e| e.to_string()));
        if let Err(error) = interpreter.and(fragments) {
            process::complain(&format!("cannot make a code cache for a forked child: {error}"));
            signal::die(libc::SIGABRT);
        }
    }

    fn run_vfork_child(&mut self, context: &mut ThreadContext, system: &mut System) -> ! {
        // All memory is the suspended parent's, this dispatcher included: make nothing, report nothing.
        loop {
            let stop = self.interp.run(context, &mut NoPolicy);
            match self.stopped(context, system, stop) {
                Outcome::Continue => {}
                Outcome::Exit(status) => process::exit(status),
                Outcome::Killed(signo) => signal::die(signo),
            }
        }
    }
}
