//! When a trace races with its floor, and which of them runs now ([`dynasour_tracer::race`] has the
//! rules, [`super::fragments`] the links).
//!
//! ```text
//!                 trace installed          gate made             verdict
//!   Idle ──────────────────────► Waiting ───────────► Running ─────────────► Idle
//!     ▲                             │  there are other    │
//!     └─────────────────────────────┴── threads, the ─────┘
//!                                       trace is gone: kept
//! ```
//!
//! While a race runs, samples bring the thread out of native code ([`samples::bring_out`]), so that
//! it comes here at the end of each window. Nothing else is sampled, no head is recorded, and a
//! window in which a side trace was recorded is measured again.
//!
//! Only a process with one thread races: the links would change under the others, and they would
//! disturb the counts.
//!
//! Data: [`Racing`], part of the thread's [`Dispatcher`]. Invariant: a window begins after the links
//! have been changed, and its time is processor time of this thread. The thread is outside and holds
//! no lock but, briefly, that of the fragments.
//!
//! Example: a trace of 0x1000 was installed. At the next visit the gate is made and the trace leads;
//! 4 ms later a sample brings the thread out, `step_race` measures 40,000 starts, and leads links to
//! the floor.

use super::fragments::{Fragments, Racer};
use super::{Dispatcher, thread_time};
use crate::changes::patches;
use crate::config::{RaceMode, Sampling, Stage};
use crate::kernel::process::System;
use crate::kernel::signal::samples;
use dynasour_guest::ThreadContext;
use dynasour_tracer::race::{Judgement, Next, Race, Side, Verdict};
use std::sync::MutexGuard;

/// Nanoseconds of a window (guess: with fewer, changing the links costs too much; with more, a race
/// takes longer than its result is worth).
const WINDOW: u64 = 3_000_000;
/// Samples in a second of processor time while a race runs.
const HZ: u32 = 300;
/// Visits of the runtime before a race that cannot begin is given up (guess: its head gets no
/// patch).
const MOST_TRIES: u32 = 100;
/// Windows of a race whose verdict is forced.
const FORCED_WINDOWS: u32 = 6;

/// The race of a thread.
#[derive(Debug, Default)]
pub(super) enum Racing {
    /// There is none.
    #[default]
    Idle,
    /// It begins when it can. How often that was tried.
    Waiting(Racer, u32),
    /// It is under way.
    Running(Box<Running>),
}

/// A race under way.
#[derive(Debug)]
pub(super) struct Running {
    racer: Racer,
    race: Race,
    /// The processor time and the starts when the window began or was extended.
    since: u64,
    starts: u64,
    windows: u32,
    /// Did the race start the samples?
    samples: bool,
}

impl Racing {
    /// Is the window under way over?
    pub fn is_due(&self, mode: RaceMode) -> bool {
        match self {
            Racing::Running(running) => {
                mode != RaceMode::Measured || thread_time() - running.since >= WINDOW
            }
            Racing::Waiting(..) => true,
            Racing::Idle => false,
        }
    }

    /// Something else than guest code takes the thread's time: the window begins again.
    pub fn spoil(&mut self) {
        if let Racing::Running(running) = self {
            running.race.spoil();
            running.since = thread_time();
        }
    }

    /// The trace has got a side trace.
    pub fn changed(&mut self) {
        if let Racing::Running(running) = self {
            running.race.restart();
            running.since = thread_time();
        }
    }
}

impl Dispatcher {
    /// Is a race measured, or about to be, which is not to be disturbed?
    pub(super) fn race_is_measured(&self) -> bool {
        self.machine.config.race == RaceMode::Measured && !matches!(self.racing, Racing::Idle)
    }

    /// A trace was installed: it may be the racer.
    pub(super) fn trace_installed(&mut self) {
        let racer = self.machine.fragments().and_then(|mut fragments| fragments.racer());
        let own = match &self.racing {
            Racing::Idle => None,
            Racing::Waiting(racer, _) => Some(*racer),
            Racing::Running(running) => Some(running.racer),
        };
        match racer {
            _ if racer == own => self.racing.changed(),
            // A race that is over ends at its next step.
            Some(_) if own.is_some() && self.machine.config.race != RaceMode::Swap => {}
            Some(racer) => self.racing = Racing::Waiting(racer, 0),
            None => {}
        }
    }

    /// Begins a race, or ends a window of the one under way. The thread is outside.
    pub(super) fn step_race(&mut self, context: &ThreadContext, system: &System) {
        if !self.racing.is_due(self.machine.config.race) {
            return;
        }
        if self.selector.traces.is_recording() {
            return self.racing.spoil();
        }
        match std::mem::take(&mut self.racing) {
            Racing::Idle => {}
            Racing::Waiting(racer, tries) => self.begin_race(racer, tries, context, system),
            Racing::Running(running) => self.end_window(running, system),
        }
    }

    fn begin_race(&mut self, racer: Racer, tries: u32, context: &ThreadContext, system: &System) {
        let code = self.interp.code();
        let Some(mut fragments) = self.machine.fragments() else { return };
        if fragments.racer() != Some(racer) {
            return;
        }
        if patches::is_shared() || tries >= MOST_TRIES {
            return fragments.end_race(&racer, true, !patches::is_shared());
        }
        let is_ready = !self.machine.is_direct() || patches::leads_to_trace(racer.pc);
        let prepared = is_ready.then(|| fragments.prepare_race(&racer, &*code));
        match prepared {
            Some(Ok(true)) => {}
            // Not before its head has a patch; or the cache is full.
            None => return self.racing = Racing::Waiting(racer, tries + 1),
            Some(Err(_) | Ok(false)) => return fragments.end_race(&racer, true, true),
        }
        let by_visits = matches!(self.machine.config.sampling, Sampling::Every(_))
            || self.machine.config.race != RaceMode::Measured;
        let samples = !by_visits && !system.samples.are_running();
        if samples && !system.samples.start_event(context, HZ) {
            // Nothing brings the thread out at the end of a window.
            return fragments.end_race(&racer, true, true);
        }
        samples::set_bring_out(!by_visits);
        let race = Race::new(racer.pc);
        fragments.lead_race(&racer, race.side());
        let starts = fragments.starts();
        drop(fragments);
        let since = thread_time();
        let running = Running { racer, race, since, starts, windows: 0, samples };
        self.racing = Racing::Running(Box::new(running));
    }

    fn end_window(&mut self, mut running: Box<Running>, system: &System) {
        let machine = self.machine;
        let now = thread_time();
        let racer = running.racer;
        let fragments = machine.fragments();
        let Some(mut fragments) = fragments.filter(|_| !patches::is_shared()) else {
            if let Some(mut fragments) = machine.fragments() {
                fragments.end_race(&racer, true, false);
            }
            return Self::end_samples(&running, system);
        };
        if fragments.racer() != Some(racer) {
            drop(fragments);
            return Self::end_samples(&running, system);
        }
        let starts = fragments.starts();
        let next = match machine.config.race {
            RaceMode::Measured => {
                running.race.measured(starts.wrapping_sub(running.starts), now - running.since)
            }
            mode => running.forced(mode),
        };
        match next {
            Next::Extend => {}
            Next::Window(side) => fragments.lead_race(&racer, side),
            Next::Ended(judgement) => {
                Self::end_samples(&running, system);
                return self.judged(&racer, judgement, fragments);
            }
        }
        running.starts = fragments.starts();
        drop(fragments);
        running.since = thread_time();
        self.racing = Racing::Running(running);
    }

    /// The race has a verdict.
    fn judged(
        &mut self,
        racer: &Racer,
        judgement: Judgement,
        mut fragments: MutexGuard<'_, Fragments>,
    ) {
        let kept = judgement.verdict != Verdict::Floor;
        if judgement.verdict == Verdict::Trace {
            self.effort.note_win();
        }
        fragments.end_race(racer, kept, true);
        fragments.note_judgement(racer.pc, judgement);
        drop(fragments);
        self.machine.log(Stage::Record, || format!("race of {:#x}: {judgement:?}", racer.pc));
        if kept {
            return;
        }
        if self.machine.is_direct() {
            let _exclusive = self.machine.pages.exclusive();
            patches::take_back(&(racer.pc..racer.pc + 1));
        }
        self.selector.traces.heads.give_up(racer.pc, &self.selector.traces.policy);
        self.mark(racer.pc);
    }

    fn end_samples(running: &Running, system: &System) {
        samples::set_bring_out(false);
        if running.samples {
            system.samples.stop();
        }
    }
}

impl Running {
    /// What comes next if the verdict does not depend on measurements.
    fn forced(&mut self, mode: RaceMode) -> Next {
        self.windows += 1;
        let verdict = match mode {
            RaceMode::Trace => Verdict::Trace,
            RaceMode::Floor => Verdict::Floor,
            RaceMode::Swap | RaceMode::Measured | RaceMode::Off => {
                let sides = [Side::Floor, Side::Trace, Side::FloorTwice, Side::Trace];
                return Next::Window(sides[self.windows as usize % sides.len()]);
            }
        };
        match self.windows >= FORCED_WINDOWS {
            true => Next::Ended(Judgement { verdict, times: [0; 2], error: 0, rounds: 0 }),
            false if self.windows.is_multiple_of(2) => Next::Window(Side::Trace),
            false => Next::Window(Side::FloorTwice),
        }
    }
}
