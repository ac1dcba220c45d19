//! Races between a trace and its floor: what links to the trace's head lead to meanwhile
//! ([`dynasour_tracer::race`] judges, [`super::super::race`] decides when).
//!
//! ```text
//!                made, kept before      its turn: it counts        the race is over
//!   no trace ──────────────► waiting ─────────────────► racer ─────────────────► kept
//!      ▲                        ▲                        │  ▲                     │
//!      │                        │       links lead to    │  │ links lead to       │
//!      │                        │           the floor    ▼  │ the trace           │
//!      │                        │                       on the floor              │
//!      │ lost: dropped          │                           │                     │
//!      └────────────────────────┼───────────────────────────┘                     │
//!                               └──────── a late exit: the guest has changed ─────┘
//! ```
//!
//! While a trace waits it is used. One that was kept races again when one of its exits is *late*: it
//! becomes hot after the verdict, and quickly. The guest does something else then than when the trace
//! was recorded and judged. If the trace is a loop, and a side trace is wanted for the exit, the loop
//! is recorded anew instead ([`Fragments::take_outdated`]): the iterations that come now become part of it.
//!
//! A race is one thread's ([`super::turns`]). Other threads that execute the trace or its floor go where the
//! links lead, and count in words of their own.
//!
//! Data: [`Races`], part of [`Fragments`]. Invariants: there is one racer at a time, since a thread has
//! one set of words to count in; no other trace counts in them. Nothing enters a trace whose head is *on
//! the floor* but exits of its own, which continue what has begun. While the racer's head is on the floor, so are those
//! of the traces that wait; so what is measured there is what there would be without traces that are not
//! judged. The caller holds the lock of the fragments.
//!
//! Example: the first trace of the loop at 0x1000 is made. Nobody races, so it is the racer, and
//! counts its starts. Twenty times links to 0x1000 lead to it, then to the gate of the block there,
//! and so on. It loses: it is dropped, and links lead to the block.

use super::turns::Turns;
use super::{Fragments, Role, SideRequest};
use crate::config::{RaceMode, RunConfig};
use crate::dispatch::peers::PeerId;
use crate::dispatch::real_time;
use crate::observe::events::Why;
use crate::observe::stats::RaceResult;
use dynasour_emitter::blocks::Count;
use dynasour_emitter::codegen::Request;
use dynasour_emitter::{EmitError, ExitId, FragmentId, StartKey, can_tell_start};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_ir::Gpr;
use dynasour_tracer::race::{Judgement, Side};
use dynasour_tracer::{GuestLoop, Path};
use rustc_hash::FxHashMap;

/// A trace that races with its floor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Racer {
    /// The head.
    pub pc: u64,
    fragment: FragmentId,
    starts: Starts,
    /// The model says that it is faster than its floor.
    pub is_promised: bool,
    /// [`Fragments::generation`] when it was made: numbers of fragments are used again.
    generation: u64,
    /// How often it has raced again because it had got side traces.
    pub extended: u32,
    /// The thread that runs its race.
    pub(super) thread: Option<PeerId>,
    /// The number of its turn.
    pub(super) turn: u64,
}

/// Where and by what the starts of a racer's iterations are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Starts {
    /// What tells a start at the head.
    key: Option<StartKey>,
    /// The pc of the gate, if it is not the head, and what tells a start there. At the head of an
    /// interpreter, which each instruction of the interpreted program passes, counting would take more
    /// time than what is measured. So it is counted where the loop's first dispatch leads.
    apart: Option<(u64, StartKey)>,
}

impl Racer {
    /// The pc of its gate, if it is not the head.
    pub fn gate_apart(&self) -> Option<u64> {
        self.starts.apart.map(|(gate, _)| gate)
    }

    /// Are its starts counted at this pc?
    pub fn is_counted_at(&self, pc: u64) -> bool {
        self.gate().0 == pc
    }

    /// A trace that has not raced. Nobody runs its race yet.
    fn new(
        pc: u64,
        fragment: FragmentId,
        starts: Starts,
        is_promised: bool,
        generation: u64,
    ) -> Racer {
        let (extended, thread, turn) = (0, None, 0);
        Racer { pc, fragment, starts, is_promised, generation, extended, thread, turn }
    }

    /// One for tests.
    #[cfg(test)]
    pub(super) fn example(pc: u64) -> Racer {
        Racer::new(pc, FragmentId(0), Starts { key: None, apart: None }, false, 0)
    }

    /// Does this thread run its race, or may it?
    pub(super) fn is_of(&self, own: PeerId) -> bool {
        self.thread.is_none_or(|thread| thread == own)
    }

    /// This thread does not run its race any more.
    pub(super) fn leave(&mut self, own: PeerId) {
        self.thread.take_if(|thread| *thread == own);
    }

    /// The pc of its gate, and what tells a start there.
    fn gate(&self) -> (u64, Option<StartKey>) {
        let Starts { key, apart } = self.starts;
        apart.map_or((self.pc, key), |(gate, key)| (gate, Some(key)))
    }
}

/// A register that tells a start at the head, and changes until the first dispatch by no more than this,
/// is the position in the interpreted program there, too (guess: an instruction and its operands).
const STRIDE: u64 = 64;

/// An exit is late if after the verdict it becomes hot within so many nanoseconds of real time
/// (guess: less often than once in some microseconds it costs little).
const LATE_WITHIN: u64 = 200_000;
/// If it has a counter, it is late if it was left once in so many ticks of the time stamp counter, some
/// microsecond: what the runtime does until there is the counter takes longer than [`LATE_WITHIN`].
const LATE_TICKS: u64 = 1 << 11;

/// A trace that was kept and has got side traces races again when it has got no more for so many
/// nanoseconds (guess: a race that begins before the next side trace begins anew).
const SETTLED: u64 = 30_000_000;
/// It races again so often at most (guess).
const MOST_EXTENDED: u32 = 3;

/// So many traces that wait are on the floor together with the racer, at most (guess: patches are taken out for each).
const MOST_BESIDE: usize = 3;

/// What is known of races.
#[derive(Debug, Default)]
pub struct Races {
    /// How traces race; `None` if they do not.
    mode: Option<RaceMode>,
    turns: Turns,
    /// The heads on the floor: the racer's, and those of traces that wait.
    on_floor: Vec<u64>,
    /// The head of the trace whose race was put off last, if nobody has asked for it yet.
    put_off: Option<u64>,
    /// Side traces, and versions of their regions, that racers have got during their races.
    extensions: u64,
    /// Traces that were kept.
    kept: FxHashMap<FragmentId, Racer>,
    /// Those of them that have got side traces since, and when.
    extended: FxHashMap<FragmentId, u64>,
    /// When the exits of kept traces were left for the first time since.
    left: FxHashMap<ExitId, u64>,
    /// The exit for which a side trace was asked last, if it is a late one.
    late: Option<ExitId>,
}

impl Races {
    /// No trace has raced yet; none does without a mode.
    pub fn new(mode: Option<RaceMode>) -> Races {
        Races { mode, ..Races::default() }
    }

    /// All fragments are dropped.
    pub fn clear(&mut self) {
        *self = Races::new(self.mode);
    }

    /// Is nothing to enter the trace at `pc`?
    pub fn is_on_floor(&self, pc: u64) -> bool {
        self.on_floor.contains(&pc)
    }

    /// Is a version of the region at `pc` the racer?
    pub(super) fn races(&self, pc: u64) -> bool {
        self.turns.racer().is_some_and(|racer| racer.pc == pc)
    }
}

/// What tells that the guest starts an iteration of the path: that it comes to the path's head and,
/// for a loop of an interpreted program, that a register has its value there. If no register tells
/// it, each passage of the head counts. Returns the register and the number of starts of an iteration.
fn start_key(path: &Path) -> (Option<StartKey>, i32) {
    let Some(guest) = &path.guest else { return (None, 1) };
    let tells = |(g, _): &StartKey| guest.telling & 1 << g.number() != 0 && can_tell_start(*g);
    let greens = guest.registers.iter().copied();
    let others = Gpr::all().map(|g| (g, path.entry.gpr[g.number()]));
    match greens.chain(others).find(tells) {
        Some(key) => (Some(key), 1),
        None => {
            // Of all iterations, since it is not known here which come how often.
            let passages = path.all_steps().filter(|step| step.block.pc == path.head).count();
            let each = passages / (1 + path.others.len());
            (None, i32::try_from(each).unwrap_or(i32::MAX))
        }
    }
}

impl Fragments {
    /// Makes the first trace of a region, which is about to be compiled for `request`, able to count
    /// its starts, if it is to race. Returns where and by what they are counted.
    pub(super) fn enter_race(
        &mut self,
        path: &Path,
        request: &mut Request,
        config: &RunConfig,
    ) -> Option<Starts> {
        let may_race = self.races.mode.is_some();
        let (key, each) = start_key(path);
        // A loop's own count is not in the version that the code is compared with. And it costs a load and a
        // store for each time that the loop is entered, after the race, too.
        let own = path.runs.is_some_and(|runs| runs.stays())
            && !config.verify_traces
            && !config.prove_traces;
        if !may_race || !self.emitter.count_starts(request, key, each, own) {
            return None;
        }
        // The closing handler is passed once in an iteration. And where the first dispatch of a loop leads
        // that is told by positions alone does not follow from its key.
        let counts_at_head = |guest: &GuestLoop| guest.is_closing || guest.is_by_position;
        let at_head = path.guest.as_deref().is_some_and(counts_at_head);
        let apart = key.filter(|_| !at_head).and_then(|(register, value)| {
            let (gate, registers) = path.first_target()?;
            let there = registers[register.number()]?;
            let is_position = there.wrapping_sub(value).wrapping_add(STRIDE) <= 2 * STRIDE;
            let is_free = gate != path.head && !self.regions.contains_key(&gate);
            (is_position && is_free).then_some((gate, (register, there)))
        });
        Some(Starts { key, apart })
    }

    /// The trace that can count its starts is installed.
    pub(super) fn note_racer(
        &mut self,
        pc: u64,
        fragment: FragmentId,
        starts: Starts,
        is_promised: bool,
    ) {
        if let Some(before) = self.racer().filter(|_| self.races.mode == Some(RaceMode::Swap)) {
            // A race that never ends gives way to the next one.
            self.end_race(&before, true);
        }
        let new = Racer::new(pc, fragment, starts, is_promised, self.generation);
        if !self.races.turns.enter(new, real_time()) {
            self.emitter.let_count_starts(fragment, false);
        }
    }

    /// The traces that nobody lets race belong to this thread.
    pub fn claim_racers(&mut self, own: PeerId) {
        self.races.turns.claim(own);
    }

    /// This thread ends: others let its traces race.
    pub fn leave_races(&mut self, own: PeerId) {
        self.races.kept.values_mut().for_each(|racer| racer.leave(own));
        if self.races.turns.leave(own) {
            self.put_off();
        }
    }

    /// The racer has to wait again.
    fn put_off(&mut self) {
        let Some(racer) = self.racer() else { return };
        self.stop_race(&racer);
        self.races.turns.wait(racer);
        self.races.put_off = Some(racer.pc);
        self.links_changed();
    }

    /// The head of a trace whose race was put off: code in place may have no patch there.
    pub fn take_put_off(&mut self) -> Option<u64> {
        self.races.put_off.take()
    }

    /// Changes when the racer gets a side trace, or its region another version.
    pub fn extensions(&self) -> u64 {
        self.races.extensions
    }

    /// The racer's thread has looked at its race.
    pub fn looked_at_race(&mut self) {
        self.races.turns.looked(real_time());
    }

    /// The racer, if it is still live.
    pub fn racer(&mut self) -> Option<Racer> {
        let racer = self.races.turns.racer()?;
        if !self.is_live_racer(&racer) {
            self.races.turns.end();
            self.lead_back(racer.pc);
            self.close_gate(&racer);
        }
        self.races.turns.racer()
    }

    /// Nothing is counted at a gate apart any more.
    fn close_gate(&mut self, racer: &Racer) {
        if let Some(gate) = racer.gate_apart().filter(|_| !self.retired) {
            self.lead_links(gate, self.first_version(gate));
            self.links_changed();
        }
    }

    /// No patch can stand where a racer's starts are to be counted: they are counted at its head.
    pub fn count_at_head(&mut self, racer: &Racer) -> Racer {
        let new = Racer { starts: Starts { apart: None, ..racer.starts }, ..*racer };
        self.races.turns.replace(racer, new);
        new
    }

    fn is_live_racer(&self, racer: &Racer) -> bool {
        let region = self.regions.get(&racer.pc);
        !self.retired && region.is_some_and(|region| region.fragments.contains(&racer.fragment))
    }

    /// The racer, if it is this thread's; if there is none, the first of those that wait has its turn. The
    /// caller is outside.
    pub fn next_racer(&mut self, own: PeerId) -> Option<Racer> {
        if self.races.turns.may_be_overdue(own) && self.races.turns.is_overdue(real_time()) {
            self.put_off();
        }
        if self.racer().is_none() {
            let mut turns = std::mem::take(&mut self.races.turns);
            let next = turns.next(own, real_time, |racer| self.is_live_racer(racer));
            self.races.turns = turns;
            let next = next?;
            self.races.kept.remove(&next.fragment);
            self.emitter.let_count_starts(next.fragment, true);
            self.links_changed();
        }
        self.races.turns.racer().filter(|racer| racer.is_of(own))
    }

    /// Makes the gate of the racer's floor. False if the race cannot be run.
    ///
    /// # Errors
    /// [`EmitError::is_full`]: the code cache is full.
    pub fn prepare_race(&mut self, racer: &Racer, code: &dyn Fetch) -> Result<bool, EmitError> {
        let (gate, key) = racer.gate();
        if !self.in_place {
            self.emitter.copy_block(racer.pc, code)?;
            self.emitter.copy_block(gate, code)?;
        }
        let made = self.emitter.make_gate(gate, key)?;
        self.links_changed();
        Ok(made)
    }

    /// Can the racer's starts still be counted? Not if a trace stands where its gate was.
    pub fn is_counted(&self, racer: &Racer) -> bool {
        racer.gate_apart().is_none_or(|gate| !self.regions.contains_key(&gate))
    }

    /// Starts that both sides of this racer's race have counted on this thread.
    pub fn starts(&self, racer: &Racer, context: &ThreadContext) -> u64 {
        self.emitter.starts(racer.fragment, context)
    }

    /// Is nothing to enter the trace at `pc`, because of a race?
    pub fn is_on_floor(&self, pc: u64) -> bool {
        self.races.is_on_floor(pc)
    }

    /// The heads that are to be on the floor while this racer is: its own, and those of traces that wait. They
    /// are not judged yet, and may be parts of what the racer replaces, or exist only because its exits lead there.
    pub fn heads_with(&self, racer: &Racer) -> Vec<u64> {
        let waiting = self.races.turns.waiting().map(|racer| racer.pc);
        let others = waiting.filter(|pc| *pc != racer.pc).take(MOST_BESIDE);
        std::iter::once(racer.pc).chain(others).collect()
    }

    /// Links to the racer's head lead to this side, and the other `heads` ([`Fragments::heads_with`]) are on the floor
    /// with it. The thread is the one that runs the race.
    pub fn lead_race(
        &mut self,
        racer: &Racer,
        side: Side,
        heads: Vec<u64>,
        context: &ThreadContext,
    ) {
        self.lead_back(racer.pc);
        if side == Side::Trace {
            self.close_gate(racer);
            return;
        }
        for pc in heads.iter().copied() {
            self.emitter.forget_entry(pc);
            let is_counted = side != Side::FloorUncounted && racer.is_counted_at(pc);
            if !is_counted {
                self.lead_links(pc, None);
            }
        }
        self.races.on_floor = heads;
        if side != Side::FloorUncounted {
            self.emitter.lead_to_gate(racer.gate().0, context, side == Side::FloorTwice);
        }
        self.links_changed();
    }

    /// No head is on the floor: links to it, and to the racer's, lead to its trace, if there is one.
    fn lead_back(&mut self, racer: u64) {
        let heads = std::mem::take(&mut self.races.on_floor);
        let others = heads.into_iter().filter(|pc| *pc != racer);
        for pc in std::iter::once(racer).chain(others) {
            if let Some(first) = self.first_version(pc) {
                self.register(pc, first);
            }
            self.lead_to_first(pc);
        }
        self.links_changed();
    }

    /// Nothing counts for this race any more, and no head is on the floor.
    fn stop_race(&mut self, racer: &Racer) {
        self.races.turns.end();
        self.emitter.let_count_starts(racer.fragment, false);
        self.close_gate(racer);
        self.lead_back(racer.pc);
    }

    /// The race is over. The trace is kept; or it is dropped, with the other versions of its region.
    pub fn end_race(&mut self, racer: &Racer, kept: bool) {
        if self.races.turns.racer().as_ref() != Some(racer) {
            return;
        }
        self.stop_race(racer);
        if kept {
            self.races.kept.insert(racer.fragment, *racer);
        } else {
            self.drop_versions(racer.pc, Why::LostRace, |_, _| true);
            self.dispatching.remove(&racer.pc);
        }
        self.links_changed();
    }

    /// Would a new version of this path be tried before a racer that is measured?
    pub(super) fn would_precede_racer(&self, path: &Path) -> bool {
        let racer = self.races.turns.racer().filter(|racer| racer.pc == path.head);
        self.races.mode.is_some_and(RaceMode::measures)
            && path.guest.is_some()
            && racer.is_some_and(|racer| !self.lives.shape(racer.fragment).is_guest_loop)
    }

    /// The region at `pc` has got another version. If the racer is there, it is measured together with it.
    pub(super) fn note_version(&mut self, pc: u64) {
        if self.races.races(pc) {
            self.races.extensions += 1;
        }
    }

    /// A side trace was attached. The verdict about the trace that it belongs to did not know it.
    pub(super) fn note_side_trace(&mut self, side: FragmentId) {
        if let Some(region) = self.region_of(side)
            && self.races.kept.get(&region).is_some_and(|racer| racer.extended < MOST_EXTENDED)
        {
            self.races.extended.insert(region, real_time());
        }
        if self
            .races
            .turns
            .racer()
            .is_some_and(|racer| self.region_of(side) == Some(racer.fragment))
        {
            self.races.extensions += 1;
        }
    }

    /// Traces that have got their side traces since they were kept are to race again. Returns when that
    /// has to be asked again.
    pub fn race_extended(&mut self) -> Option<u64> {
        let now = real_time();
        let Races { kept, extended, turns, .. } = &mut self.races;
        extended.retain(|region, since| {
            let is_settled = now.saturating_sub(*since) >= SETTLED;
            if is_settled && let Some(racer) = kept.remove(region) {
                turns.wait(Racer { extended: racer.extended + 1, ..racer });
            }
            !is_settled
        });
        extended.values().min().map(|since| since + SETTLED)
    }

    /// An exit was left, for the first time since it was made or linked.
    pub(super) fn note_left_once(&mut self, exit: ExitId) {
        if !self.races.kept.is_empty() {
            self.races.left.insert(exit, real_time());
        }
    }

    /// An exit is hot. Is it a late one of a trace that was kept? `count`: what its counter says, if it has
    /// one. If the verdict does not depend on time, neither does this.
    pub(super) fn is_late(&mut self, exit: ExitId, count: Option<&Count>) -> bool {
        let Some(since) = self.races.left.remove(&exit) else { return false };
        let is_quick = match count {
            Some(count) => count.ticks <= count.executions.saturating_mul(LATE_TICKS),
            None => real_time().saturating_sub(since) < LATE_WITHIN,
        };
        is_quick || !self.races.mode.is_some_and(RaceMode::measures)
    }

    /// The trace that this late exit belongs to races again, if it was kept.
    pub(super) fn race_again(&mut self, exit: ExitId) {
        if let Some(racer) = self.trace_of(exit).and_then(|id| self.races.kept.remove(&id)) {
            self.races.turns.wait(racer);
        }
    }

    /// A side trace is asked for a late exit.
    pub(super) fn note_late(&mut self, exit: ExitId) {
        self.races.late = Some(exit);
    }

    /// The guest has left by a hot exit. If it is a late one, its trace does not hold what the guest does now.
    /// If that is a loop, and with `may_drop`, the versions of its region are dropped, and their head is
    /// returned, which is to be recorded anew. Otherwise the trace races again.
    pub fn take_outdated(
        &mut self,
        side: &SideRequest,
        may_drop: impl FnOnce(u64) -> bool,
    ) -> Option<u64> {
        self.races.late.take_if(|exit| *exit == side.exit)?;
        if self.retired || side.generation != self.generation {
            return None;
        }
        let version = self.trace_of(side.exit)?;
        let pc = self.emitter.fragment(version)?.pc;
        // Numbers of fragments are used again.
        self.races.kept.get(&version).filter(|racer| racer.pc == pc)?;
        let shape = self.lives.shape(version);
        if !shape.is_loop || shape.is_guest_loop || !may_drop(pc) {
            self.race_again(side.exit);
            return None;
        }
        self.drop_versions(pc, Why::Outdated, |_, _| true);
        self.stats.outdated += 1;
        Some(pc)
    }

    /// The version of a region that an exit belongs to: it, or one of its side traces, is left there.
    fn trace_of(&self, exit: ExitId) -> Option<FragmentId> {
        self.region_of(self.emitter.exit(exit)?.fragment)
    }

    /// The head of the region that an exit belongs to, for which a side trace is wanted.
    pub fn region_head(&self, side: &SideRequest) -> Option<u64> {
        if side.generation != self.generation {
            return None;
        }
        Some(self.emitter.fragment(self.trace_of(side.exit)?)?.pc)
    }

    /// The version of a region that a fragment belongs to: itself, or the one that it is a side trace
    /// or stub of, directly or not.
    pub(super) fn region_of(&self, mut fragment: FragmentId) -> Option<FragmentId> {
        // Side traces of side traces: no chain of them is longer than the number of fragments.
        for _ in 0..=2 * self.traces {
            let parent = match (self.exits.stub(fragment), self.lives.role(fragment)) {
                (Some(stub), _) => stub.origin,
                (None, Some(Role::SideTrace(parent))) => parent,
                (None, Some(Role::Region(_))) => return Some(fragment),
                (None, None) => return None,
            };
            fragment = self.emitter.exit(parent)?.fragment;
        }
        None
    }

    /// Is the racer a loop of an interpreted program?
    pub fn is_guest_loop(&self, racer: &Racer) -> bool {
        self.lives.shape(racer.fragment).is_guest_loop
    }

    /// Notes a verdict for the statistics.
    pub fn note_judgement(&mut self, pc: u64, judgement: Judgement) {
        let result = RaceResult::new(pc, judgement);
        self.stats.attempts.raced(pc, result);
        self.stats.races.push(result);
    }
}
