//! When a trace races with its floor, and which of them runs now ([`dynasour_tracer::race`] has the
//! rules, [`super::fragments`] the links).
//!
//! ```text
//!             a trace's turn              gate made             verdict
//!   Idle ──────────────────────► Waiting ───────────► Running ─────────────► Idle
//!     ▲                             │                     │
//!     └─────────────────────────────┴─────────────────────┘
//!                       the trace is gone: kept; put off: it waits
//! ```
//!
//! While a race runs, samples bring the thread out of native code ([`ThreadContext::comes_out`]), so that
//! it comes here at the end of each window. A window in which a side trace was recorded is measured again. Between
//! two windows the thread looks for what to trace next, as it does after other samples; a trace that is made of it
//! is installed when the race is over ([`super::compiling`]).
//!
//! A trace that loses is dropped, and its head *rests*: no trace is made there for a while, longer
//! each time. But if the trace had been kept before, the guest has changed, and another trace may be
//! made at once ([`Rests`]).
//!
//! Where starts are counted at a *gate apart* ([`super::fragments::Racer::gate_apart`]), code in place has
//! a patch there during the race, and none at the head while the floor runs. Elsewhere there is no patch
//! while the floor runs uncounted: then [`words`] may tell its starts. The patches of the traces that wait are taken
//! out whenever the floor runs.
//!
//! One race runs in the process, on one thread, whose starts and time are measured
//! (`super::fragments::turns`). Other threads go where the links and patches lead, too, and count in words
//! of their own.
//!
//! Data: [`Racing`] and [`Rests`], part of the thread's [`Dispatcher`]. Invariants: a window begins when native code
//! is entered after links and patches have been changed, and its time is processor time of this thread. A patch that was
//! taken out is written again only if no code was touched since, and while none can be, so what it leads to
//! has not been dropped. The thread is outside and holds no lock but, briefly, that of the fragments.
//!
//! Example: a trace of 0x1000 was installed. At the next visit the gate is made and the trace leads;
//! 4 ms later a sample brings the thread out, `step_race` measures 40,000 starts, and leads links to
//! the floor.

mod words;

use self::words::Words;
use super::fragments::{Fragments, Racer};
use super::{Dispatcher, real_time, thread_time};
use crate::changes::patches::{self, NewPatch};
use crate::config::{CompileThreads, RaceMode, Sampling, Stage};
use crate::kernel::process::System;
use dynasour_guest::ThreadContext;
use dynasour_tracer::TraceSelector;
use dynasour_tracer::race::{Judgement, Next, Race, Side, Verdict};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::atomic::Ordering;

/// Nanoseconds of a window (guess: with fewer, changing the links costs too much; with more, a race
/// takes longer than its result is worth).
const WINDOW: u64 = 3_000_000;
/// Samples in a second of processor time while a race runs.
const HZ: u32 = 300;
/// Samples in a second of processor time while heads rest and nothing else brings the thread out.
const RESTING_HZ: u32 = 2;
/// Visits of the runtime before a race that cannot begin is given up (guess: its head gets no
/// patch).
const MOST_TRIES: u32 = 100;
/// Windows of a race that begin again because a path was recorded (guess: more than a race may have if nothing
/// disturbs it).
const MOST_DISTURBANCES: u32 = 200;
/// Windows of a race whose verdict is forced.
const FORCED_WINDOWS: u32 = 6;

/// A race that never ends changes sides each time that its thread has looked at it so often: patches take longer than a
/// guest may have until its next signal.
const LOOKS: u32 = 4;

/// Nanoseconds for which a head rests whose trace has lost for the first time; twice as many the next
/// time (guess: it takes some hundredths of that to make and race another trace).
const REST: u64 = 1_000_000_000;
/// A head rests at most this many times [`REST`].
const LONGEST_REST: u64 = 64;
/// So often another trace may be made at once where one that had been kept has lost or is outdated
/// (guess; more follow each change of a guest that changes often).
const MOST_CHANGES: u32 = 16;

/// The heads whose traces have lost, and those whose traces were kept.
#[derive(Debug, Default)]
pub(super) struct Rests {
    kept: FxHashSet<u64>,
    heads: FxHashMap<u64, Rest>,
    /// No rest ends before this time.
    next: Option<u64>,
    /// Can nothing bring the thread out?
    nothing_samples: bool,
}

/// A head whose trace has lost.
#[derive(Debug, Default)]
struct Rest {
    losses: u32,
    /// How often a trace that had been kept has lost.
    changes: u32,
    /// When it ends, in nanoseconds of the thread's time, while it lasts.
    until: Option<u64>,
}

impl Rests {
    /// The trace at `pc` has lost at this time. If it was kept before, the guest has changed, or else it
    /// has been `extended` by side traces. Returns for how many nanoseconds the head rests.
    fn lost(&mut self, pc: u64, now: u64, extended: bool) -> u64 {
        let was_kept = self.kept.remove(&pc);
        if was_kept && !extended && self.may_change(pc) {
            return 0;
        }
        let rest = self.heads.entry(pc).or_default();
        let time = length(rest.losses);
        rest.losses += 1;
        let until = now.saturating_add(time);
        rest.until = Some(until);
        self.next = Some(self.next.map_or(until, |next| next.min(until)));
        time
    }

    /// The guest has changed, so that the trace at `pc`, which had been kept, is worth nothing. May another one be
    /// made at once?
    pub fn may_change(&mut self, pc: u64) -> bool {
        let rest = self.heads.entry(pc).or_default();
        let may = rest.changes < MOST_CHANGES;
        rest.changes += u32::from(may);
        self.kept.remove(&pc);
        may
    }

    /// The dispatcher is another thread's from now on, or that of a forked child. The thread's processor time
    /// begins at 0, and so do the rests.
    pub fn clock_begins_again(&mut self) {
        for rest in self.heads.values_mut().filter(|rest| rest.until.is_some()) {
            rest.until = Some(length(rest.losses - 1));
        }
        self.next = self.heads.values().filter_map(|rest| rest.until).min();
    }

    /// The heads whose rest has ended.
    fn ended(&mut self, now: u64) -> Vec<u64> {
        if self.next.is_none_or(|next| now < next) {
            return Vec::new();
        }
        let mut ended = Vec::new();
        for (pc, rest) in &mut self.heads {
            ended.extend(rest.until.take_if(|until| *until <= now).map(|_| *pc));
        }
        self.next = self.heads.values().filter_map(|rest| rest.until).min();
        ended
    }
}

/// For how many nanoseconds a head rests whose traces have lost so often before.
fn length(losses: u32) -> u64 {
    REST * LONGEST_REST.min(1 << losses.min(63))
}

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
    /// The guest's words at that time, and where they are.
    before: Vec<u32>,
    words: Words,
    windows: u32,
    /// How often the thread has looked at it.
    looks: u32,
    /// Did the race start the samples?
    samples: bool,
    /// The race has begun anew: the links may lead to the other side.
    anew: bool,
    /// Has nothing of the window been executed natively yet?
    is_fresh: bool,
    /// Was a path recorded, or looked for, in the window under way? That takes time.
    disturbed: bool,
    /// The windows that have begun again because of that.
    disturbances: u32,
    /// The patches that are taken out, because the floor runs without them: the heads of the traces to which they
    /// lead, and where they stood.
    out: Vec<(u64, (u64, NewPatch))>,
    /// [`Fragments::generation`] when the race began.
    generation: u64,
    /// [`Fragments::extensions`] when the race began: another thread may have extended the trace since.
    extensions: u64,
}

impl Racing {
    /// The thread looks at the race. Is the window under way over?
    pub fn is_due(&mut self, mode: RaceMode) -> bool {
        match self {
            Racing::Running(running) if mode == RaceMode::Swap => {
                running.looks += 1;
                running.looks.is_multiple_of(LOOKS)
            }
            Racing::Running(running) => !mode.measures() || thread_time() - running.since >= WINDOW,
            Racing::Waiting(..) => true,
            Racing::Idle => false,
        }
    }

    /// Native code is entered. If it is the first time in the window under way, the window begins now.
    pub fn enter_native(&mut self, context: &ThreadContext) {
        if let Racing::Running(running) = self
            && running.is_fresh
        {
            running.begin(context);
            (running.is_fresh, running.disturbed) = (false, false);
        }
    }

    /// Would a new trace of this head disturb the race under way?
    pub fn excludes(&self, head: u64) -> bool {
        matches!(self, Racing::Running(running) if running.racer.pc != head)
    }

    /// Something else than guest code takes the thread's time: the window begins again when that is over.
    pub fn disturb(&mut self) {
        if let Racing::Running(running) = self {
            running.disturbed = true;
        }
    }

    /// The trace has got a side trace, or its region another version.
    pub fn changed(&mut self) {
        if let Racing::Running(running) = self {
            running.race.restart();
            running.anew = true;
        }
    }
}

impl Dispatcher {
    /// Is there to be no patch at this head now, although it has a trace?
    pub(super) fn race_needs_no_patch(&self, head: u64) -> bool {
        let Racing::Running(running) = &self.racing else { return false };
        let fragments = self.machine.fragments();
        !running.racer.is_counted_at(head) && fragments.is_some_and(|f| f.is_on_floor(head))
    }

    /// Is a race measured, or about to be, which is not to be disturbed?
    pub(super) fn race_is_measured(&self) -> bool {
        self.machine.config.race.measures() && !matches!(self.racing, Racing::Idle)
    }

    /// Would a new trace of this head disturb a race that is measured?
    pub(super) fn race_excludes(&self, head: u64) -> bool {
        self.machine.config.race.measures() && self.racing.excludes(head)
    }

    /// A trace was installed: it may be the racer, or belong to it.
    pub(super) fn trace_installed(&mut self) {
        self.racing.changed();
        self.race_again = Some(0);
        let own = self.peer.id();
        let racer = self.machine.fragments().and_then(|mut fragments| {
            fragments.claim_racers(own);
            fragments.next_racer(own)
        });
        let current = match &self.racing {
            Racing::Idle => None,
            Racing::Waiting(racer, _) => Some(*racer),
            Racing::Running(running) => Some(running.racer),
        };
        match racer {
            // A race that is over ends at its next step.
            Some(_) if current.is_some() && self.machine.config.race != RaceMode::Swap => {}
            Some(racer) if current != Some(racer) => {
                if let Racing::Running(mut running) = std::mem::take(&mut self.racing) {
                    self.end_patches(&mut running);
                }
                self.racing = Racing::Waiting(racer, 0);
            }
            _ => {}
        }
    }

    /// Lets the next trace race, if none does. The thread is outside.
    pub(super) fn next_race(&mut self, fragments: &mut Fragments) {
        if matches!(self.racing, Racing::Idle) {
            if let Some(racer) = fragments.next_racer(self.peer.id()) {
                self.racing = Racing::Waiting(racer, 0);
            }
            if let Some(head) = fragments.take_put_off().filter(|_| self.machine.is_direct()) {
                self.entrances.want(head);
            }
        }
    }

    /// The thread ends: another one lets its traces race. The thread is outside.
    pub(super) fn leave_races(&mut self, context: &ThreadContext, system: &System) {
        if let Racing::Running(mut running) = std::mem::take(&mut self.racing) {
            self.end_running(&mut running, context, system);
        }
        if let Some(mut fragments) = self.machine.fragments() {
            fragments.leave_races(self.peer.id());
        }
    }

    /// In a forked child, whose code cache is empty and has no patches leading to it: there is no race, nor
    /// samples for it.
    pub(super) fn forget_race(&mut self, context: &ThreadContext) {
        if let Racing::Running(_) = std::mem::take(&mut self.racing) {
            context.comes_out.store(self.machine.brings_out(), Ordering::Relaxed);
        }
        self.rests.clock_begins_again();
    }

    /// Lets traces that were kept race again if they have got side traces since. The thread is outside.
    fn race_extended(&mut self) {
        if !matches!(self.racing, Racing::Idle)
            || self.race_again.is_none_or(|time| real_time() < time)
        {
            return;
        }
        if let Some(mut fragments) = self.machine.fragments() {
            self.race_again = fragments.race_extended();
            self.next_race(&mut fragments);
        }
    }

    /// The heads whose rest has ended may get traces again. The thread is outside.
    fn end_rests(&mut self, context: &ThreadContext, system: &System) {
        if self.rests.next.is_none() || !matches!(self.racing, Racing::Idle) {
            return;
        }
        for pc in self.rests.ended(thread_time()) {
            self.selector.traces.heads.forgive(pc);
            if !self.machine.config.samples()
                && let Some(mut fragments) = self.machine.fragments()
            {
                fragments.count_head_again(pc);
            }
        }
        // Perhaps there are samples anyway. Otherwise copied blocks may not come to the runtime for
        // long.
        if !self.machine.config.samples() {
            match self.rests.next {
                Some(_) if !system.samples.are_running() && !self.rests.nothing_samples => {
                    let may_open = !patches::is_shared();
                    let samples = system.samples.start_now(context, RESTING_HZ, may_open);
                    self.rests.nothing_samples = !samples;
                    context.comes_out.store(samples, Ordering::Relaxed);
                }
                Some(_) => {}
                None => {
                    context.comes_out.store(false, Ordering::Relaxed);
                    system.samples.stop();
                }
            }
        }
    }

    /// Begins a race, or ends a window of the one under way. The thread is outside.
    pub(super) fn step_race(&mut self, context: &ThreadContext, system: &System) {
        self.end_rests(context, system);
        self.race_extended();
        self.install_held_back();
        if !self.racing.is_due(self.machine.config.race) {
            return;
        }
        if self.selector.traces.is_recording() {
            return self.racing.disturb();
        }
        match std::mem::take(&mut self.racing) {
            Racing::Idle => {}
            Racing::Waiting(racer, tries) => self.begin_race(racer, tries, context, system),
            Racing::Running(running) => {
                self.end_window(running, context, system);
                match &self.racing {
                    Racing::Running(_) => self.look_around(system),
                    _ => self.install_held_back(),
                }
            }
        }
    }

    /// A window is about to begin. Looks for what to trace next before, if the helper thread would compile it.
    fn look_around(&mut self, system: &System) {
        let config = &self.machine.config;
        let by_time = !matches!(config.sampling, Sampling::Every(_));
        let helps = matches!(config.compile_threads(), CompileThreads::One | CompileThreads::Slow);
        if config.samples()
            && config.race.measures()
            && by_time
            && helps
            && self.compilations.has_no_head()
            && self.effort.is_affordable()
        {
            self.begin_attempt();
            self.begin_sample(system);
        }
    }

    fn begin_race(
        &mut self,
        mut racer: Racer,
        tries: u32,
        context: &ThreadContext,
        system: &System,
    ) {
        let code = self.interp.code();
        let Some(mut fragments) = self.machine.fragments() else { return };
        if fragments.racer() != Some(racer) {
            return;
        }
        if tries >= MOST_TRIES {
            return fragments.end_race(&racer, true);
        }
        if self.machine.is_direct() && !patches::enters_trace(racer.pc) {
            // Not before a patch leads to it.
            return self.racing = Racing::Waiting(racer, tries + 1);
        }
        if let Some(gate) = racer.gate_apart().filter(|_| self.machine.is_direct()) {
            drop(fragments);
            let can_count = self.patch(system, gate, false);
            let Some(locked) = self.machine.fragments() else { return };
            fragments = locked;
            if !can_count {
                racer = fragments.count_at_head(&racer);
            }
        }
        let mut prepared = fragments.is_counted(&racer) && fragments.racer() == Some(racer);
        prepared = prepared && fragments.prepare_race(&racer, &*code).unwrap_or(false);
        let by_visits = matches!(self.machine.config.sampling, Sampling::Every(_))
            || !self.machine.config.race.measures();
        if !self.machine.config.samples() {
            // Perhaps those that end rests.
            system.samples.stop();
        }
        let samples = prepared && !by_visits && !system.samples.are_running();
        let may_open = !patches::is_shared();
        if !prepared || samples && !system.samples.start_now(context, HZ, may_open) {
            // It cannot be counted, or nothing brings the thread out at the end of a window.
            fragments.end_race(&racer, true);
            drop(fragments);
            return self.close_gate(&racer);
        }
        context.comes_out.store(!by_visits, Ordering::Relaxed);
        let may_tell = racer.gate_apart().is_none();
        let race =
            Race::new(racer.pc, self.machine.config.race.rounds(), racer.is_promised, may_tell);
        let (side, generation) = (race.side(), fragments.generation());
        let extensions = fragments.extensions();
        drop(fragments);
        let mut running = Running {
            racer,
            race,
            since: 0,
            starts: 0,
            before: Vec::new(),
            words: Words::of(context),
            windows: 0,
            looks: 0,
            samples,
            anew: false,
            is_fresh: true,
            disturbed: false,
            disturbances: 0,
            out: Vec::new(),
            generation,
            extensions,
        };
        self.lead(&mut running, side, context);
        self.racing = Racing::Running(Box::new(running));
    }

    /// A window of this side begins: links and patches lead there.
    fn lead(&mut self, running: &mut Running, side: Side, context: &ThreadContext) {
        let racer = running.racer;
        self.put_patches_back(running);
        let heads = match side {
            Side::Trace => Vec::new(),
            _ => self.machine.fragments().map_or(Vec::new(), |f| f.heads_with(&racer)),
        };
        let has_patch = |head: u64| side != Side::FloorUncounted && racer.is_counted_at(head);
        if self.machine.is_direct() && heads.iter().any(|head| !has_patch(*head)) {
            let _exclusive = self.machine.pages.exclusive();
            let without = heads.iter().copied().filter(|head| !has_patch(*head));
            running.out.extend(without.filter_map(|head| Some((head, patches::take_out(head)?))));
        }
        let Some(mut fragments) = self.machine.fragments() else { return };
        if fragments.racer() != Some(racer) {
            // The end of the window finds that, too.
            return;
        }
        fragments.lead_race(&racer, side, heads, context);
        running.starts = fragments.starts(&racer, context);
        drop(fragments);
        running.begin(context);
    }

    /// The patches that were taken out are written again, where there is still a trace.
    fn put_patches_back(&mut self, running: &mut Running) {
        if running.out.is_empty() {
            return;
        }
        let _exclusive = self.machine.pages.exclusive();
        // Nothing that the patches lead to is dropped while the lock is held.
        let Some(fragments) = self.machine.fragments() else { return };
        let is_touched = fragments.generation() != running.generation;
        for (head, (site, patch)) in running.out.drain(..) {
            let has_trace = fragments.first_version(head).is_some();
            if has_trace && (is_touched || !self.patch_again(site, patch)) {
                self.entrances.want(head);
            }
        }
        patches::none_is_out();
    }

    /// The patch at a gate apart is taken back.
    fn close_gate(&self, racer: &Racer) {
        if let Some(gate) = racer.gate_apart().filter(|_| self.machine.is_direct()) {
            let _exclusive = self.machine.pages.exclusive();
            patches::take_back(&(gate..gate + 1));
        }
    }

    fn end_window(&mut self, mut running: Box<Running>, context: &ThreadContext, system: &System) {
        let now = thread_time();
        let racer = running.racer;
        let Some(mut fragments) = self.machine.fragments() else { return };
        let is_touched = !running.out.is_empty() && fragments.generation() != running.generation;
        let is_live = fragments.racer() == Some(racer) && !is_touched;
        if !is_live || !fragments.is_counted(&racer) {
            // A trace that has gone, or cannot be judged, or has to wait again.
            fragments.end_race(&racer, true);
            drop(fragments);
            return self.end_running(&mut running, context, system);
        }
        fragments.looked_at_race();
        if fragments.extensions() != running.extensions {
            running.extensions = fragments.extensions();
            if !std::mem::replace(&mut running.anew, true) {
                running.race.restart();
            }
        }
        let starts = fragments.starts(&racer, context);
        drop(fragments);
        let disturbed = std::mem::take(&mut running.disturbed);
        running.disturbances += u32::from(disturbed);
        let next = match self.machine.config.race {
            _ if std::mem::take(&mut running.anew) => Next::Window(running.race.side()),
            mode if mode.measures() && disturbed && running.disturbances <= MOST_DISTURBANCES => {
                running.race.spoil();
                Next::Extend
            }
            mode if mode.measures() => {
                let changes = running.words.changes(context, &running.before);
                let starts = starts.wrapping_sub(running.starts);
                running.race.measured(starts, now - running.since, &changes)
            }
            mode => running.forced(mode),
        };
        match next {
            Next::Extend => {
                running.starts = starts;
                running.begin(context);
            }
            Next::Window(side) => self.lead(&mut running, side, context),
            Next::Ended(judgement) => {
                self.judged(&racer, judgement);
                return self.end_running(&mut running, context, system);
            }
        }
        self.racing = Racing::Running(running);
    }

    /// A race is over: nothing is sampled for it any more, and a head with a trace has its patch.
    fn end_running(&mut self, running: &mut Running, context: &ThreadContext, system: &System) {
        context.comes_out.store(self.machine.brings_out(), Ordering::Relaxed);
        if running.samples {
            system.samples.stop();
        }
        self.end_patches(running);
    }

    /// No patch is written or taken out for a race any more.
    fn end_patches(&mut self, running: &mut Running) {
        self.close_gate(&running.racer);
        self.put_patches_back(running);
    }

    /// The race has a verdict.
    fn judged(&mut self, racer: &Racer, judgement: Judgement) {
        let Some(mut fragments) = self.machine.fragments() else { return };
        let kept = judgement.verdict != Verdict::Floor;
        self.effort.note_race(kept);
        let pc = racer.pc;
        let is_guest_loop = fragments.is_guest_loop(racer);
        fragments.end_race(racer, kept);
        fragments.note_judgement(pc, judgement);
        self.machine.log(Stage::Record, || format!("race of {pc:#x}: {judgement:?}"));
        if kept {
            self.rests.kept.insert(pc);
            return self.next_race(&mut fragments);
        }
        // It may be that it assumed too much.
        let assumed_less = is_guest_loop && self.selector.traces.dispatch.assume_less(pc);
        let rests = !assumed_less && self.rests.lost(pc, thread_time(), racer.extended > 0) > 0;
        self.next_race(&mut fragments);
        drop(fragments);
        if !rests {
            self.head_lost_trace(pc);
            return self.hasten_changed();
        }
        if self.machine.is_direct() {
            let _exclusive = self.machine.pages.exclusive();
            patches::take_back_from(pc);
        }
        let TraceSelector { heads, policy, .. } = &mut self.selector.traces;
        heads.give_up(pc, &**policy);
        self.mark(pc);
    }
}

impl Running {
    /// A window begins, or goes on, now, or when native code is entered.
    fn begin(&mut self, context: &ThreadContext) {
        self.is_fresh = true;
        self.before = self.words.read(context);
        self.since = thread_time();
    }

    /// What comes next if the verdict does not depend on measurements.
    fn forced(&mut self, mode: RaceMode) -> Next {
        self.windows += 1;
        let verdict = match mode {
            RaceMode::Trace => Verdict::Trace,
            RaceMode::Floor => Verdict::Floor,
            RaceMode::Swap | RaceMode::Measured | RaceMode::Rounds(_) | RaceMode::Off => {
                let uncounted = match self.racer.gate_apart() {
                    None => Side::FloorUncounted,
                    Some(_) => Side::FloorTwice,
                };
                let floors = [Side::Floor, Side::FloorTwice, uncounted];
                let floor = floors[self.windows as usize / 2 % floors.len()];
                let is_floor = self.windows.is_multiple_of(2);
                return Next::Window(if is_floor { floor } else { Side::Trace });
            }
        };
        match self.windows >= FORCED_WINDOWS {
            true => Next::Ended(Judgement {
                verdict,
                times: [0; 2],
                counted: [0; 2],
                is_told: false,
                error: 0,
                rounds: 0,
            }),
            false if self.windows.is_multiple_of(2) => Next::Window(Side::Trace),
            false => Next::Window(Side::FloorTwice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_rest_longer_each_time() {
        let mut rests = Rests::default();
        let times: Vec<u64> = (0..8).map(|_| rests.lost(0x1000, 0, false) / REST).collect();
        assert_eq!(times, [1, 2, 4, 8, 16, 32, 64, 64]);
        assert_eq!(rests.lost(0x2000, 5, false), REST);
        assert!(rests.ended(REST).is_empty());
        assert_eq!(rests.ended(REST + 5), [0x2000]);
        assert!(rests.ended(REST + 5).is_empty(), "it has ended");
        assert_eq!(rests.ended(u64::MAX), [0x1000]);
        assert_eq!(rests.next, None);
    }

    #[test]
    fn heads_rest_when_the_clock_begins_again() {
        let mut rests = Rests::default();
        for _ in 0..3 {
            rests.lost(0x1000, 100 * REST, false);
        }
        rests.lost(0x2000, 100 * REST, false);
        assert_eq!(rests.ended(101 * REST), [0x2000]);
        rests.clock_begins_again();
        assert!(rests.ended(4 * REST - 1).is_empty());
        assert_eq!(rests.ended(4 * REST), [0x1000]);
        assert_eq!(rests.next, None);
    }

    #[test]
    fn a_head_whose_trace_was_kept_does_not_rest() {
        let mut rests = Rests::default();
        for _ in 0..MOST_CHANGES {
            rests.kept.insert(0x1000);
            assert_eq!(rests.lost(0x1000, 0, false), 0);
        }
        rests.kept.insert(0x1000);
        assert_eq!(rests.lost(0x1000, 0, false), REST, "it changes all the time");
        rests.kept.insert(0x2000);
        assert_eq!(rests.lost(0x2000, 0, true), REST, "its side traces are to blame");
    }
}
