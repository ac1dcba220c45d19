//! Selects traces: reacts to hot heads, records, and decides whether a recording is compiled at
//! once or observed first.
//!
//! ```text
//!            count: hot                path complete              short loop: postponed
//!   idle ───────────────► recording ─────────────────► probing ─────────────────► idle
//!    ▲                       │  ▲                         │ else, or not a short loop
//!    │ aborted               │  │ last iteration of        ▼
//!    └───────────────────────┘  │ its loop: again       observing how often the guest keeps to it
//!                               idle                      │        (only if paths are judged)
//!                                                         ▼
//!                                                      `Selected::Recorded`, or aborted: no gain
//! ```
//!
//! *Probing* a loop means to count the iterations of a few of its runs ([`crate::short_loops`]);
//! *observing* a path, to count how often the guest keeps to it ([`crate::survival`]), and to record other
//! iterations of a loop.
//!
//! Data: [`TraceSelector`]. Each thread has one and is the only one that uses it; no lock.
//! Invariant: at most one of recording, probing and observing is under way, and none changes what
//! the guest does.
//!
//! Example: the head 0x1000 is hot; `start` begins a recording with the block there. The
//! interpreter reports each block that comes next to `executes`. When 0x1000 comes again, the path
//! is complete, and if the loop is not a short one, `executes` returns it.

use crate::build::{Path, Step, TraceShape};
use crate::guests::DispatchHeads;
use crate::heads::{HeadTable, Heat};
use crate::policy::SpeculationPolicy;
use crate::recorder::{AbortReason, EndReason, HeadKind, Recorder, Recording, TargetKind};
use crate::short_loops::{Probe, Verdict};
use crate::survival::Survival;
use crate::worth::{self, Judge};
use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::predict::Surroundings;
use dynasour_ir::{Gpr, GuestTerm, Term};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;
use std::time::Instant;

/// How often a head is recorded again after its recording left its loop (guess; more waste time on
/// loops of which every recording would leave).
const REPEATS: u32 = 2;

/// So many times longer is a loop observed in which the guest has changed its ways (guess: a few milliseconds).
const PATIENCE: u32 = 8;

/// What the selector wants from the dispatcher.
#[derive(Debug)]
pub enum Selected {
    /// To continue in the native code that starts at rip.
    Native,
    /// To record the head at rip, which is hot, unless another thread has made its trace.
    Hot {
        /// Why the head is hot.
        kind: HeadKind,
        /// Registers that were the same at each sampled execution, and their values.
        stable: Vec<(Gpr, u64)>,
    },
    /// To compile this path, whose recording is complete.
    Recorded(Path, EndReason),
    /// To note that the recording of this head produced no trace.
    Aborted(u64, AbortReason),
}

/// The block that is executed next.
pub struct NextBlock<'a> {
    /// Its address.
    pub pc: u64,
    /// Which kind of fragment starts there, as far as the recorder must know it.
    pub target: TargetKind,
    /// Why the block cannot be part of a trace; `None` if it can.
    pub refused: Option<AbortReason>,
    /// Returns the block; it is lifted only if it is wanted.
    pub lifted: &'a dyn Fn() -> Arc<LiftedBlock>,
}

/// A recording under way.
struct Active {
    recorder: Recorder,
    /// The block being executed.
    block: Arc<LiftedBlock>,
}

/// Counts heads, records paths and decides about them, for one thread.
pub struct TraceSelector {
    /// The speculation policy.
    pub policy: Box<dyn SpeculationPolicy>,
    /// Counters of trace heads.
    pub heads: HeadTable,
    /// What is known of dispatch loops.
    pub dispatch: DispatchHeads,
    active: Option<Active>,
    /// The time at which the last recording began.
    started: Instant,
    /// A recorded loop whose runs are being observed before it is compiled.
    probe: Option<Probe>,
    /// A recorded path that is being observed before it is compiled.
    survival: Option<Survival>,
    /// Judges paths by what a trace of them would save; `None` if they are not judged.
    judge: Option<Judge>,
    /// Is the path that is being recorded judged?
    judges_path: bool,
    /// The most iterations of a loop that one trace holds.
    iterations: u32,
    /// Is it observed how often the guest keeps to the path that is being recorded, if there may be several?
    observes_path: bool,
    /// Is the path that is being recorded that of a function?
    is_function: bool,
    /// Heads whose loops are observed longer.
    changing: FxHashSet<u64>,
    /// Heads of loops that have been probed.
    probed: FxHashSet<u64>,
    /// A head whose recording left its loop, and its stable registers: it is recorded again when
    /// the guest reaches it next.
    record_again: Option<(u64, Vec<(Gpr, u64)>)>,
    /// How often a head was recorded again.
    repeats: FxHashMap<u64, u32>,
}

impl TraceSelector {
    /// A selector that has counted nothing. With `judge`, paths are judged by what a trace of them
    /// would save. A trace holds at most so many iterations of a loop.
    pub fn new(
        policy: Box<dyn SpeculationPolicy>,
        judge: Option<Judge>,
        iterations: u32,
    ) -> TraceSelector {
        let guest_loops = policy.placement().speculate_guest_loops();
        TraceSelector {
            dispatch: DispatchHeads::new(guest_loops, judge.is_some()),
            policy,
            heads: HeadTable::default(),
            active: None,
            started: Instant::now(),
            probe: None,
            survival: None,
            judge,
            judges_path: false,
            iterations,
            observes_path: false,
            is_function: false,
            changing: FxHashSet::default(),
            probed: FxHashSet::default(),
            record_again: None,
            repeats: FxHashMap::default(),
        }
    }

    /// Starts recording at a block that is about to be executed.
    /// `around` is the state there.
    pub fn start(
        &mut self,
        block: Arc<LiftedBlock>,
        kind: HeadKind,
        stable: Vec<(Gpr, u64)>,
        around: &Surroundings<'_>,
    ) {
        self.started = Instant::now();
        self.judges_path = self.judge.is_some();
        self.is_function = kind == HeadKind::Function;
        self.observes_path = self.judges_path || self.iterations > 1;
        let mut recorder = Recorder::new(block.pc, kind, stable, around.into(), &*self.policy);
        if kind == HeadKind::Other && self.dispatch.searches_at_once(block.pc) {
            recorder.return_to(block.pc, &self.dispatch);
        }
        self.active = Some(Active { recorder, block });
    }

    /// Makes the path that is being recorded be compiled without being judged.
    pub fn compile_unjudged(&mut self) {
        (self.judges_path, self.observes_path) = (false, false);
    }

    /// The guest has changed its ways in the loop at `head`, and may do so again: it is observed longer.
    pub fn observe_longer(&mut self, head: u64) {
        self.changing.insert(head);
    }

    /// The path that is being recorded leaves traces that begin at `head`. If those are of loops of an
    /// interpreted program, it goes on until it comes to one of them.
    pub fn return_to(&mut self, head: Option<u64>) {
        let (Some(head), Some(active)) = (head, &mut self.active) else { return };
        match self.dispatch.has_loops(head) {
            true => active.recorder.return_to(head, &self.dispatch),
            false => active.recorder.leave_region(head),
        }
    }

    /// Nanoseconds since the last recording began.
    pub fn recording_nanoseconds(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Is a recording, or the observation of a recorded path, under way?
    pub fn is_recording(&self) -> bool {
        self.active.is_some() || self.probe.is_some() || self.survival.is_some()
    }

    /// Counts an execution of the head at `pc`; a head that is to be recorded again is hot at once.
    pub fn arrive(&mut self, pc: u64, gpr: &[u64; 16], kind: HeadKind) -> Option<Selected> {
        match self.take_again(pc) {
            Some(stable) => Some(Selected::Hot { kind, stable }),
            None => self.count(pc, gpr, kind),
        }
    }

    /// The stable registers of the head at `pc`, if that head is to be recorded again now.
    pub fn take_again(&mut self, pc: u64) -> Option<Vec<(Gpr, u64)>> {
        self.record_again.take_if(|(head, _)| *head == pc).map(|(_, stable)| stable)
    }

    /// Counts an execution of the head at `pc`.
    pub fn count(&mut self, pc: u64, gpr: &[u64; 16], kind: HeadKind) -> Option<Selected> {
        let Heat::Hot { stable } = self.heads.count(pc, gpr, &*self.policy) else { return None };
        let stable = Gpr::all()
            .filter(|g| stable & (1 << g.number()) != 0)
            .map(|g| (g, gpr[g.number()]))
            .collect();
        Some(Selected::Hot { kind, stable })
    }

    /// Reports that the block `to` is executed next. A recording, a probe or an observation must be
    /// under way.
    pub fn executes(&mut self, to: &NextBlock<'_>, around: &Surroundings<'_>) -> Option<Selected> {
        if self.active.is_some() {
            return self.record(to, around);
        }
        if let Some(probe) = &mut self.probe {
            return match probe.arrive(to.pc) {
                Verdict::Undecided => None,
                verdict => self.conclude(verdict),
            };
        }
        let survival = self.survival.as_mut()?;
        let same_key = survival.head() != to.pc
            || survival.guest().is_none_or(|guest| {
                self.dispatch.key(to.pc, around).is_some_and(|key| key == guest.key)
            });
        if !survival.arrive(to, same_key, around) {
            return None;
        }
        let (path, end) = self.survival.take()?.into_recording();
        if self.promises(&path) {
            return Some(Selected::Recorded(path, end));
        }
        if path.guest.is_some() && !self.dispatch.tell_by_position(path.head) {
            self.dispatch.fail(path.head, true);
        }
        Some(Selected::Aborted(path.head, AbortReason::LeavesEarly))
    }

    /// Reports that the runtime executes the next instruction. A recording ends there.
    pub fn runtime_instruction(&mut self) -> Option<Selected> {
        if self.probe.is_some() {
            return self.conclude(Verdict::Long);
        }
        if let Some(survival) = &mut self.survival {
            survival.interrupted();
            return None;
        }
        let mut active = self.active.take()?;
        let head = active.recorder.head();
        Some(match active.recorder.runtime_instruction(&active.block) {
            Recording::Done(path, end) => return self.recorded(path, end),
            Recording::Aborted(reason) => Selected::Aborted(head, reason),
            Recording::Continue => unreachable!("a recording always ends at a runtime instruction"),
        })
    }

    /// Gives up the recording under way, if there is one, and returns its head.
    pub fn abandon(&mut self) -> Option<u64> {
        let survival = self.survival.take().map(|s| s.head());
        let probe = self.probe.take().map(|p| p.head()).or(survival);
        self.active.take().map(|a| a.recorder.head()).or(probe)
    }

    /// Continues the recording with the block `to`.
    fn record(&mut self, to: &NextBlock<'_>, around: &Surroundings<'_>) -> Option<Selected> {
        let active = self.active.as_mut()?;
        let head = active.recorder.head();
        let stepped = active.recorder.step_through(
            &active.block,
            to.pc,
            to.target,
            &mut self.dispatch,
            around,
        );
        let selected = match (stepped, to.refused) {
            (Recording::Continue, Some(reason)) => Selected::Aborted(head, reason),
            (Recording::Continue, None) => {
                active.block = (to.lifted)();
                active.recorder.prepare(&active.block, around);
                return None;
            }
            (Recording::Done(path, _), _) if self.is_last_iteration(&path) => {
                self.active = None;
                self.record_again = Some((head, path.stable));
                return None;
            }
            (Recording::Done(path, end), _) if self.probed.contains(&head) => {
                return self.recorded(path, end);
            }
            (Recording::Done(path, end), _) => match Probe::new(path, end) {
                Ok(probe) => {
                    self.active = None;
                    self.probe = Some(probe);
                    return None;
                }
                Err(recording) => return self.recorded(recording.0, recording.1),
            },
            (Recording::Aborted(reason), _) => Selected::Aborted(head, reason),
        };
        self.active = None;
        Some(selected)
    }

    /// A probe has decided whether its loop is compiled now. A short loop is left alone for as many
    /// executions as the loop around it needs to become hot.
    fn conclude(&mut self, verdict: Verdict) -> Option<Selected> {
        let probe = self.probe.take()?;
        self.probed.insert(probe.head());
        match verdict {
            Verdict::Short(trips) => {
                self.heads.postpone(probe.head(), trips + 2);
                None
            }
            Verdict::Undecided | Verdict::Long => {
                let (path, end) = probe.into_recording();
                self.recorded(path, end)
            }
        }
    }

    /// Decides about a recorded path: it is compiled now, observed first, or refused.
    fn recorded(&mut self, path: Path, end: EndReason) -> Option<Selected> {
        self.active = None;
        if path.guest.is_none() && self.dispatch.is_shared(path.head) {
            return Some(Selected::Aborted(path.head, AbortReason::NoGuestLoop));
        }
        let several = self.is_function && self.may_have_several(&path);
        let is_observed =
            self.judges_path || self.observes_path && (path.shape == TraceShape::Loop || several);
        if !is_observed {
            return Some(Selected::Recorded(path, end));
        }
        if !several && !self.promises(&path) {
            if path.guest.is_some() {
                self.dispatch.fail(path.head, true);
            }
            // Another recording may find a loop of an interpreted program.
            let may_be_guest = self.dispatch.closes(path.head)
                || path.jumps_indirectly() && self.dispatch.wants(path.head);
            let reason = if may_be_guest { AbortReason::NoGuestLoop } else { AbortReason::NoGain };
            return Some(Selected::Aborted(path.head, reason));
        }
        let patience = if self.changing.contains(&path.head) { PATIENCE } else { 1 };
        self.survival = Some(Survival::new(path, end, self.iterations as usize, patience, several));
        None
    }

    /// May a trace of several executions of the function be worth making, of which this path is one?
    fn may_have_several(&self, path: &Path) -> bool {
        let keeps_a_frame = |judge: Judge| worth::keeps_a_frame(path.head, judge.read);
        path.shape == TraceShape::Linear
            && self.iterations > 1
            && (path.calls_itself() || self.judge.is_some_and(keeps_a_frame))
    }

    /// May a trace of the path be worth making?
    fn promises(&self, path: &Path) -> bool {
        self.judge.is_none_or(|judge| judge.promises(path))
    }

    /// Does the path pass its own loop's branch and leave the loop, and is it to be recorded again?
    /// If the threshold is a multiple of the loop's trip count, each recording begins with the last
    /// iteration. The recording after it begins with another iteration, if there are several.
    fn is_last_iteration(&mut self, path: &Path) -> bool {
        let may_return = |step: &Step| match &step.block.version.blocks[0].term {
            Term::Guest(GuestTerm::Branch { taken, fall, .. }) => {
                *taken == path.head || *fall == path.head
            }
            _ => false,
        };
        let leaves = path.shape == TraceShape::Linear
            && path.steps.iter().any(|step| step.next != path.head && may_return(step));
        if !leaves {
            return false;
        }
        let repeats = self.repeats.entry(path.head).or_default();
        *repeats += 1;
        *repeats <= REPEATS
    }
}
