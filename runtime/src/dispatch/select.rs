//! The trace selector: what the dispatcher does at the edges between interpreted blocks.
//!
//! A block's `user` word says what is known of its pc: no fragment, a linear one, a loop, a
//! dispatch loop. While a recording is under way, fragments are not entered: the path goes through
//! them.

use super::worth;
use crate::config::RunConfig;
use crate::interp::{BlockEntry, EdgeKind, Policy, Watch};
use crate::memory;
use dynasour_guest::ThreadContext;
use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::{Gpr, GuestTerm, Term};
use dynasour_tracer::{
    AbortReason, DefaultPolicy, DispatchHeads, EndReason, HeadKind, HeadTable, Heat, Landing, Path,
    Probe, Recorder, Recording, Surroundings, Survival, TraceShape, Verdict,
};
use rustc_hash::{FxHashMap, FxHashSet};
use std::rc::Rc;
use std::time::Instant;

/// No fragment starts at this block.
pub const NO_FRAGMENT: u32 = 0;
/// Its copy runs natively.
pub const COPIED_BLOCK: u32 = 1;
/// A linear fragment starts at this block.
pub const LINEAR_FRAGMENT: u32 = 2;
/// A loop fragment starts at this block.
pub const LOOP_FRAGMENT: u32 = 3;
/// A loop fragment starts at this block whose indirect jump keeps going elsewhere.
pub const DISPATCH_FRAGMENT: u32 = 4;
/// Another fragment starts at this block whose indirect jump does.
pub const LINEAR_DISPATCH_FRAGMENT: u32 = 5;

/// How many heads' worth of executions a forked child leaves uncounted.
const RESTING_HEADS: u32 = 64;

/// So often a place is come to before it is copied, where cold code is interpreted.
const WARM: u32 = 8;

/// So often a head is recorded again whose recording left its loop.
const REPEATS: u32 = 2;

/// Why the selector stops the interpreter.
#[derive(Debug)]
pub enum Selected {
    /// A fragment starts at rip.
    Fragment,
    /// The head at rip is hot: it is to be recorded, unless somebody has.
    Hot {
        /// What kind of head.
        kind: HeadKind,
        /// Registers that were the same at each sampled execution, and their values.
        stable: Vec<(Gpr, u64)>,
    },
    /// A recording ended here.
    Recorded(Path, EndReason),
    /// A recording came to nothing.
    Aborted(u64, AbortReason),
}

struct Active {
    recorder: Recorder,
    /// The block being executed.
    block: Rc<LiftedBlock>,
}

/// Counts heads, enters fragments, records.
pub struct Selector {
    /// The speculation policy.
    pub policy: DefaultPolicy,
    /// Counters of trace heads.
    pub heads: HeadTable,
    /// What is known of dispatch loops.
    pub dispatch: DispatchHeads,
    active: Option<Active>,
    /// When the last recording began.
    started: Instant,
    /// A recorded loop whose runs are being watched before it is compiled.
    probe: Option<Probe>,
    /// A recorded path, while it is watched how well it is kept to.
    survival: Option<Survival>,
    /// Are paths judged by what they would save?
    weighs: bool,
    /// Is the one that is being recorded?
    judges: bool,
    /// Heads of loops that have been watched.
    watched: FxHashSet<u64>,
    /// A head whose recording left its loop: it is recorded again when it is reached next.
    again: Option<(u64, Vec<(Gpr, u64)>)>,
    /// How often a head was recorded again.
    repeats: FxHashMap<u64, u32>,
    /// Executions of heads that are still to go by uncounted.
    resting: u32,
    /// Code in this range is never traced (the vDSO).
    untraced: std::ops::Range<u64>,
    /// What is not recorded runs natively where it can, and is counted there.
    native: bool,
    /// But not before it is warm.
    interprets_first: bool,
}

impl Selector {
    /// A selector that records heads as `config` says, and nothing in `untraced`.
    pub fn new(config: &RunConfig, untraced: std::ops::Range<u64>) -> Selector {
        Selector {
            native: config.copies_blocks(),
            policy: DefaultPolicy {
                head_threshold: config.threshold(),
                placement: config.placement,
            },
            heads: HeadTable::default(),
            dispatch: DispatchHeads::new(config.placement.speculate_guest_loops()),
            active: None,
            started: Instant::now(),
            probe: None,
            survival: None,
            weighs: config.watches_paths(),
            interprets_first: config.interprets_first(),
            judges: false,
            watched: FxHashSet::default(),
            again: None,
            repeats: FxHashMap::default(),
            resting: 0,
            untraced,
        }
    }

    /// Starts recording at a block that is about to be executed.
    pub fn start(&mut self, block: Rc<LiftedBlock>, kind: HeadKind, stable: Vec<(Gpr, u64)>) {
        self.started = Instant::now();
        self.judges = self.weighs;
        self.active =
            Some(Active { recorder: Recorder::new(block.pc, kind, stable, &self.policy), block });
    }

    /// What is being recorded is compiled without more ado.
    pub fn believe(&mut self) {
        self.judges = false;
    }

    /// Nanoseconds since the last recording began.
    pub fn recording_nanoseconds(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Is a recording, or the watching of a recorded loop, under way?
    pub fn is_recording(&self) -> bool {
        self.active.is_some() || self.probe.is_some() || self.survival.is_some()
    }

    /// May traces be made of this block?
    pub fn may_trace(&self, block: &BlockEntry) -> bool {
        let untraceable = self.native && block.is_checked();
        !untraceable && !self.untraced.contains(&block.pc)
    }

    /// Counts the guest's arrival at a head that it reached natively.
    pub fn arrive(
        &mut self,
        context: &ThreadContext,
        to: &BlockEntry,
        kind: HeadKind,
    ) -> Option<Selected> {
        match self.again.take_if(|(head, _)| *head == to.pc) {
            Some((_, stable)) => Some(Selected::Hot { kind, stable }),
            None => self.count(context, to, kind),
        }
    }

    /// The interpreter stopped before an instruction that the runtime does: a recording ends there.
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

    /// Gives up the recording under way, if there is one; says where it started.
    pub fn abandon(&mut self) -> Option<u64> {
        let survival = self.survival.take().map(|s| s.head());
        let probe = self.probe.take().map(|p| p.head()).or(survival);
        self.active.take().map(|a| a.recorder.head()).or(probe)
    }

    fn record(&mut self, context: &ThreadContext, to: &BlockEntry) -> Option<Selected> {
        let active = self.active.as_mut()?;
        let head = active.recorder.head();
        let landing = match to.user {
            NO_FRAGMENT | COPIED_BLOCK if self.heads.is_postponed(to.pc) => Landing::Short,
            LOOP_FRAGMENT => Landing::Loop,
            DISPATCH_FRAGMENT => Landing::Dispatch,
            LINEAR_DISPATCH_FRAGMENT => Landing::LinearDispatch,
            _ => Landing::Ordinary,
        };
        let around = surroundings(context);
        let stepped = active.recorder.step_through(
            &active.block,
            to.pc,
            landing,
            &mut self.dispatch,
            &around,
        );
        let selected = match stepped {
            Recording::Continue if self.untraced.contains(&to.pc) => {
                Selected::Aborted(head, AbortReason::Vdso)
            }
            // Native code goes on in blocks where a trace leaves, and blocks do not look for
            // themselves.
            Recording::Continue if self.native && to.is_checked() => {
                Selected::Aborted(head, AbortReason::WritableCode)
            }
            Recording::Continue => {
                active.block = to.lifted();
                active.recorder.prepare(&active.block, &around);
                return None;
            }
            Recording::Done(path, _) if self.is_last_iteration(&path) => {
                self.active = None;
                self.again = Some((head, path.stable));
                return None;
            }
            Recording::Done(path, end) if self.watched.contains(&head) => {
                return self.recorded(path, end);
            }
            Recording::Done(path, end) => match Probe::new(path, end) {
                Ok(probe) => {
                    self.active = None;
                    self.probe = Some(probe);
                    return None;
                }
                Err(recording) => return self.recorded(recording.0, recording.1),
            },
            Recording::Aborted(reason) => Selected::Aborted(head, reason),
        };
        self.active = None;
        Some(selected)
    }

    /// What a probe knows decides whether its loop is compiled now. A short one is left alone for
    /// as many executions as the loop around it needs to become hot.
    fn conclude(&mut self, verdict: Verdict) -> Option<Selected> {
        let probe = self.probe.take()?;
        self.watched.insert(probe.head());
        match verdict {
            Verdict::Short(trips) => {
                self.heads.postpone(probe.head(), trips + 2);
                None
            }
            Verdict::Watch | Verdict::Long => {
                let (path, end) = probe.into_recording();
                self.recorded(path, end)
            }
        }
    }

    /// A path has been recorded: it is compiled now, or watched before, unless it promises nothing.
    fn recorded(&mut self, path: Path, end: EndReason) -> Option<Selected> {
        self.active = None;
        if !self.judges || path.guest.is_some() {
            return Some(Selected::Recorded(path, end));
        }
        if !worth::promises(&path) {
            return Some(Selected::Aborted(path.head, AbortReason::NoGain));
        }
        self.survival = Some(Survival::new(path, end));
        None
    }

    /// Leaves the first executions of heads uncounted, in a forked child: most execute another
    /// program or end before a trace would have paid for itself.
    pub fn rest(&mut self) {
        self.resting = self.policy.head_threshold.saturating_mul(RESTING_HEADS);
    }

    /// Does the path pass its own loop's branch and leave the loop? A threshold that is a multiple
    /// of the loop's trip count records just the last iteration. Trying again soon finds another,
    /// if there are several.
    fn is_last_iteration(&mut self, path: &Path) -> bool {
        let leaves = path.shape == TraceShape::Linear
            && path.steps.iter().any(|s| {
                s.next != path.head
                    && matches!(&s.block.version.blocks[0].term, Term::Guest(GuestTerm::Branch { taken, fall, .. })
                        if *taken == path.head || *fall == path.head)
            });
        if !leaves {
            return false;
        }
        let repeats = self.repeats.entry(path.head).or_default();
        *repeats += 1;
        *repeats <= REPEATS
    }

    /// Counts an execution of the trace head `to`, before which the guest stands.
    pub fn count(
        &mut self,
        context: &ThreadContext,
        to: &BlockEntry,
        kind: HeadKind,
    ) -> Option<Selected> {
        if !self.may_trace(to) {
            return None;
        }
        if self.resting > 0 {
            self.resting -= 1;
            return None;
        }
        let Heat::Hot { stable } = self.heads.count(to.pc, &context.gpr, &self.policy) else {
            return None;
        };
        let stable = Gpr::all()
            .filter(|g| stable & (1 << g.number()) != 0)
            .map(|g| (g, context.gpr[g.number()]))
            .collect();
        Some(Selected::Hot { kind, stable })
    }
}

/// Does an edge lead to a trace head?
fn is_head(kind: EdgeKind, from: u64, to: u64) -> bool {
    match kind {
        EdgeKind::Taken { backward } => backward,
        EdgeKind::Call => true,
        // As in an interpreter whose every handler dispatches.
        EdgeKind::Indirect => to <= from,
        EdgeKind::FallThrough | EdgeKind::Ret => false,
    }
}

/// The guest has come to a block in a way that counts so much. Has it often enough, so that a copy
/// is made of it?
pub fn is_warm(block: &mut BlockEntry, counts: u32) -> bool {
    block.counter = block.counter.saturating_add(counts);
    block.counter >= WARM
}

/// What a recording may look at.
fn surroundings(context: &ThreadContext) -> Surroundings<'_> {
    let read = &|address: u64, size: u32| {
        let mut bytes = [0; 8];
        let wanted = bytes.get_mut(..size as usize)?;
        (memory::copy_in(address, wanted) == size as usize).then(|| u64::from_le_bytes(bytes))
    };
    let segments = [context.fs_base, context.gs_base];
    Surroundings { gpr: &context.gpr, rflags: context.rflags, segments, read }
}

impl Policy for Selector {
    type Stop = Selected;

    fn watch(&self) -> Watch {
        let all = self.is_recording() || self.native && !self.interprets_first;
        if all { Watch::All } else { Watch::Heads }
    }

    fn edge(
        &mut self,
        context: &ThreadContext,
        from: u64,
        to: &mut BlockEntry,
        kind: EdgeKind,
    ) -> Option<Selected> {
        if self.active.is_some() {
            return self.record(context, to);
        }
        if let Some(probe) = &mut self.probe {
            return match probe.arrive(to.pc) {
                Verdict::Watch => None,
                verdict => self.conclude(verdict),
            };
        }
        if let Some(survival) = &mut self.survival {
            if !survival.arrive(to.pc) {
                return None;
            }
            let (path, end) = self.survival.take()?.into_recording();
            return Some(if worth::promises(&path) {
                Selected::Recorded(path, end)
            } else {
                Selected::Aborted(path.head, AbortReason::LeavesEarly)
            });
        }
        if to.user >= DISPATCH_FRAGMENT && self.dispatch.wants_now(to.pc) {
            self.start(to.lifted(), HeadKind::Other, Vec::new());
            return None;
        }
        if self.native {
            let native = !to.is_checked()
                && (!self.interprets_first
                    || to.user != NO_FRAGMENT
                    || is_head(kind, from, to.pc) && is_warm(to, 1));
            return native.then_some(Selected::Fragment);
        }
        if to.user != NO_FRAGMENT {
            return Some(Selected::Fragment);
        }
        if let Some((_, stable)) = self.again.take_if(|(head, _)| *head == to.pc) {
            let kind = if kind == EdgeKind::Call { HeadKind::Function } else { HeadKind::Other };
            self.start(to.lifted(), kind, stable);
            return None;
        }
        let head = if kind == EdgeKind::Call { HeadKind::Function } else { HeadKind::Other };
        if is_head(kind, from, to.pc) { self.count(context, to, head) } else { None }
    }
}
