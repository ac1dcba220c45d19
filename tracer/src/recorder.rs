//! Records a trace: the state machine that follows the path which the guest executes next.
//!
//! The interpreter reports each block that it finishes while a recording is active. A recording
//! ends where the path returns to its head (a loop), where another loop begins, before a system
//! call or another instruction that the runtime executes, or at the length limit. A path that
//! cannot be traced is aborted with a named reason. The *target* of a transfer says which kind of
//! fragment starts at its target.
//!
//! * **Calls** are followed into the function even if a fragment starts there, so that the trace of
//!   a loop holds everything that the loop calls. A recursive function is followed
//!   some levels deep ([`crate::calls`]). A call of the head is followed only if the head was hot by its calls;
//!   another head that a call reaches again is a function with several callers, not a loop. The trace of a
//!   function that was hot by its calls ends where the function returns, because the next call comes from
//!   elsewhere.
//! * **Paths from an exit** may continue for up to [`MOST_AFTER_BACKWARD`] instructions after a
//!   backward branch, if they reach a loop's fragment. An example is the bottom of a `while` that
//!   jumps back to its body. Otherwise the path ends at the branch. What follows then belongs to
//!   another trace, which begins with all values in their guest locations.
//! * **Loops with parts behind them**: a path goes on through a backward branch to a place where it had not been,
//!   and ends at the branch only if it then goes round another loop, comes to a fragment, or is too long.
//! * **Short loops** that always run the same number of times ([`crate::short_loops`]) are followed
//!   to their end, so that the trace holds all their iterations.
//! * **Dispatch loops**, whose first indirect jump has changing targets, do not end a recording. It
//!   goes on through them in search of a loop of the interpreted program ([`crate::guests`]), and then
//!   until this loop comes round at the handler that closes it ([`crate::closing`]). If there is none the
//!   trace ends at that jump, so that each opcode's handler has a dispatch of its own.
//!
//! **Data.** [`Recorder`] owns the steps of one recording. **Invariant.** The steps are the blocks
//! that the guest executed, in order; after each step the recorder decides whether the recording
//! ends. **Callers.** [`crate::selector`], for the interpreter of the recording thread; the
//! recorder belongs to that thread, no lock.
//!
//! ```text
//! head 0x10: step(0x10 → 0x20), step(0x20 → 0x10)       Done(Path { shape: Loop, 2 steps }, Cycle)
//! ```

use crate::build::{Path, Step, TraceShape};
use crate::calls::Calls;
use crate::closing::{Dispatched, closing_handler};
use crate::guests::{self, DispatchHeads, Green, GuestLoop, Key};
use crate::policy::SpeculationPolicy;
use crate::short_loops;
use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::predict::{NativeResults, Prediction, Registers, Surroundings, predict};
use dynasour_ir::{GuestTerm, Loc, Op, Operand, Term};
use std::sync::Arc;

/// Why a recording produced no trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum AbortReason {
    /// The runtime must execute the first instruction, so there is nothing to compile.
    NothingToTrace,
    /// A guest instruction faulted while it was recorded.
    Fault,
    /// A signal arrived.
    Signal,
    /// The path uses a location that traces do not keep (a segment base).
    UnsupportedLocation,
    /// A guest instruction needs an anchor after its own effect.
    NoAnchor,
    /// The code is in the vDSO, whose loads must never be removed.
    Vdso,
    /// Guest code runs in place, where it could see that an x87 instruction was executed elsewhere.
    X87InPlace,
    /// Compiling the path would take more time than may be spent now.
    TooDear,
    /// Plain stores may change the code.
    WritableCode,
    /// The emitter refused the trace.
    Emitter,
    /// The code cache was flushed during the recording.
    Flushed,
    /// The region has as many versions as the policy allows.
    TooManyVersions,
    /// The user has excluded this trace (`--only-trace`).
    NotSelected,
    /// The trace would save less than it costs, compared with the copied blocks ([`crate::worth`]).
    NoGain,
    /// The guest leaves the path too often.
    LeavesEarly,
    /// The path goes through a dispatch loop, but no loop of an interpreted program was found.
    NoGuestLoop,
    /// The observed values contradict the recorded path, or the loop's second iteration.
    Inconsistent,
    /// It was shown that the trace does not do what was recorded (`--prove-traces`).
    Refuted,
    /// A pass of the program that runs the guest has left an invalid version ([`dynasour_ir::opt::OwnPass`]).
    BrokenPass,
}

/// Why a recording ended in a trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum EndReason {
    /// Control came back to the head.
    Cycle,
    /// A backward branch to another head, or the start of another fragment.
    OtherHead,
    /// A system call, a special instruction or a trap comes next.
    Runtime,
    /// The length limit.
    Length,
    /// The return of the function that the trace began with.
    Return,
    /// The indirect jump of a dispatch loop (see the module's header).
    Dispatch,
    /// The interpreted program has gone round a loop.
    GuestLoop,
    /// The head of a dispatch loop, where traces of loops of the interpreted program begin.
    DispatchHead,
}

/// Which fragment starts at the pc to which control goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TargetKind {
    /// None, or one that does not end a recording.
    Ordinary,
    /// A loop's fragment.
    Loop,
    /// A loop's fragment whose first indirect jump has changing targets.
    Dispatch,
    /// A linear trace's fragment whose first indirect jump has changing targets.
    LinearDispatch,
    /// None, and the pc is the head of a short loop, which the recording follows to its end.
    Short,
}

/// Why a head is hot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadKind {
    /// It is a function that is often called.
    Function,
    /// It is the target of jumps, or of exits of fragments.
    Other,
    /// It is the target of one exit, from which a side trace is recorded.
    Exit,
}

/// The recorder's answer after each block.
#[derive(Debug)]
pub enum Recording {
    /// The recording goes on.
    Continue,
    /// The path is complete.
    Done(Path, EndReason),
    /// The recording produced no path.
    Aborted(AbortReason),
}

/// Where a recording ends if its search finds nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Ending {
    /// The number of steps until then.
    steps: usize,
    shape: TraceShape,
    reason: EndReason,
}

/// One recording in progress.
#[derive(Debug)]
pub struct Recorder {
    head: u64,
    kind: HeadKind,
    /// See [`Path::stable`].
    stable: Vec<(dynasour_ir::Gpr, u64)>,
    /// The state at the head.
    entry: Registers,
    steps: Vec<Step>,
    /// The functions that are active.
    calls: Calls,
    /// Guest instructions of the steps.
    instructions: usize,
    /// The recording ends when it has this many instructions.
    limit: usize,
    /// Set when the path has taken a backward branch and goes on: the numbers of steps and instructions until
    /// then.
    backward: Option<(usize, usize)>,
    /// Has the path passed the head of a dispatch loop?
    dispatching: bool,
    /// The search for a loop of the interpreted program.
    search: Option<Search>,
    /// Where the recording would have ended without its search, if that began at the recording's
    /// own head.
    ending: Option<Ending>,
    /// The predicted values of the block that is being executed.
    observation: Option<Prediction>,
}

/// Most guest instructions between a backward branch and the loop that the exit has left (guess;
/// too few end paths at the branch, too many record code that belongs to another trace).
const MOST_AFTER_BACKWARD: usize = 40;
/// Most guest instructions of a search for a loop of an interpreted program (guess; bounds the
/// memory and time of a recording).
const SEARCH_LIMIT: usize = 20_000;
/// Most guest instructions of a loop of an interpreted program that becomes a trace (guess: a
/// longer trace compiles for too long and leaves early).
const GUEST_LIMIT: usize = 10_000;
/// A loop that goes through fewer dispatches is an ordinary loop, unless its head is known as a
/// dispatch head.
const LEAST_DISPATCHES: usize = 2;

/// A search for a loop of an interpreted program.
#[derive(Debug)]
struct Search {
    /// The dispatch loop's head.
    head: u64,
    /// The executions of the head so far.
    passages: Vec<Passage>,
    /// The number of steps at the first dispatch, and the block that dispatched.
    dispatched: Option<(usize, u64)>,
    /// Does the head have traces of such loops already?
    has_loops: bool,
    /// The states after the dispatches so far.
    dispatches: Vec<Dispatched>,
    /// Is the head the recording's own, and not known as a dispatch head?
    own: bool,
    /// Is the head the handler that closes a loop, which was found at the recording's own head?
    is_closing: bool,
}

impl Search {
    fn new(head: u64, own: bool, heads: &DispatchHeads) -> Search {
        let has_loops = heads.has_loops(head);
        Search {
            head,
            passages: Vec::new(),
            dispatched: None,
            has_loops,
            dispatches: Vec::new(),
            own,
            is_closing: false,
        }
    }

    /// Does a transfer of this kind, which leads to the head, continue a loop? A call does if an interpreter
    /// calls its handlers.
    fn arrives(&self, transfer: Transfer) -> bool {
        self.is_closing || self.has_loops || transfer != Transfer::Call
    }
}

/// One execution of the dispatch head, and the state there.
#[derive(Debug)]
struct Passage {
    /// The number of steps until then.
    steps: usize,
    /// The number of instructions until then.
    instructions: usize,
    /// The general registers.
    gpr: [u64; 16],
    /// The values of the greens, if the greens are known.
    key: Option<Key>,
}

impl Recorder {
    /// Starts recording at `head`; `stable` are the registers that held these values at the sampled
    /// executions.
    pub fn new(
        head: u64,
        kind: HeadKind,
        stable: Vec<(dynasour_ir::Gpr, u64)>,
        entry: Registers,
        policy: &dyn SpeculationPolicy,
    ) -> Recorder {
        Recorder {
            head,
            kind,
            stable,
            entry,
            steps: Vec::new(),
            instructions: 0,
            limit: policy.max_instructions(),
            calls: Calls::new(head, kind == HeadKind::Function),
            backward: None,
            dispatching: false,
            search: None,
            ending: None,
            observation: None,
        }
    }

    /// The recording goes on until it comes to a loop of an interpreted program that starts at `head`, or has
    /// gone round one there.
    pub fn return_to(&mut self, head: u64, heads: &DispatchHeads) {
        self.search = Some(Search::new(head, true, heads));
    }

    /// The path leaves the traces that begin at this head.
    pub fn leave_region(&mut self, head: u64) {
        self.calls.leave_region(head);
    }

    /// The pc where the recording started.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Reports that the interpreter has executed `block` to its end and goes to `next`, where a
    /// fragment of the kind `target` starts.
    pub fn step(&mut self, block: &Arc<LiftedBlock>, next: u64, target: TargetKind) -> Recording {
        self.instructions += block.count as usize;
        self.steps.push(Step { block: Arc::clone(block), next, observed: self.observation.take() });
        let transfer = Transfer::of(block, next);
        let recursion = transfer == Transfer::Call && !self.calls.may_follow(next);
        match transfer {
            Transfer::Call => self.calls.call(next),
            Transfer::Return if self.calls.ret() => {
                if self.search.is_some() {
                    return self.end_search();
                }
                return self.finish(TraceShape::Linear, EndReason::Return);
            }
            _ => {}
        }
        if self.search.is_some() {
            // During a search `at_dispatch_head` and `between_passages` decide where the path ends.
            if self.searches_at_own_head() && self.ending.is_none() {
                let steps = self.steps.len();
                self.ending = self
                    .usual_end(next, transfer, target, recursion)
                    .map(|(shape, reason)| Ending { steps, shape, reason });
            }
            return Recording::Continue;
        }
        if let Some(backward) = self.backward
            && (next != self.head || transfer == Transfer::Call)
        {
            return match self.kind {
                HeadKind::Exit => self.after_backward_branch(transfer, target, backward),
                HeadKind::Function | HeadKind::Other => {
                    self.round_from_behind(next, recursion, target, backward.0)
                }
            };
        }
        match self.usual_end(next, transfer, target, recursion) {
            Some((shape, reason)) => self.finish(shape, reason),
            None => Recording::Continue,
        }
    }

    /// Does the path end here, after its last step went to `next` by `transfer`, if there is no
    /// search? With `recursion`, a function was called that is not followed.
    fn usual_end(
        &mut self,
        next: u64,
        transfer: Transfer,
        target: TargetKind,
        recursion: bool,
    ) -> Option<(TraceShape, EndReason)> {
        if next == self.head && transfer != Transfer::Call {
            return Some((TraceShape::Loop, EndReason::Cycle));
        }
        if self.dispatching && self.steps.last().is_some_and(guests::dispatches) {
            return Some((TraceShape::Linear, EndReason::Dispatch));
        }
        match transfer {
            Transfer::Call if recursion => {
                return Some((TraceShape::Linear, EndReason::OtherHead));
            }
            Transfer::Jump { .. } if target == TargetKind::Dispatch => self.dispatching = true,
            Transfer::Jump { .. } if target == TargetKind::Short && self.may_pass(next) => {}
            Transfer::Jump { backward: true }
                if target == TargetKind::Ordinary
                    && (self.kind == HeadKind::Exit
                        || self.search.is_none() && !self.has_passed(next)) =>
            {
                self.backward = Some((self.steps.len(), self.instructions));
            }
            Transfer::Jump { backward } if backward || target == TargetKind::Loop => {
                return Some((TraceShape::Linear, EndReason::OtherHead));
            }
            _ => {}
        }
        (self.instructions >= self.limit).then_some((TraceShape::Linear, EndReason::Length))
    }

    /// Is a search under way that began at the recording's own head, because the path left it by an
    /// indirect jump?
    fn searches_at_own_head(&self) -> bool {
        self.search.as_ref().is_some_and(|search| search.own)
    }

    /// As [`Recorder::step`], but goes on through dispatch loops in search of loops of an
    /// interpreted program. `around` is the state at `next`.
    pub fn step_through(
        &mut self,
        block: &Arc<LiftedBlock>,
        next: u64,
        target: TargetKind,
        heads: &mut DispatchHeads,
        around: &Surroundings<'_>,
    ) -> Recording {
        let transfer = Transfer::of(block, next);
        let arrives = transfer != Transfer::Call;
        let dispatches = matches!(target, TargetKind::Dispatch | TargetKind::LinearDispatch);
        let search = if self.search.is_some() {
            None
        } else if dispatches && arrives && heads.wants(next) {
            Some((next, false))
        } else {
            // This may be the handler of an interpreter: each time the interpreted program comes
            // to it, its state is looked at.
            let may_be_handler = self.kind == HeadKind::Other
                && guests::may_be_dispatch(block)
                && heads.wants(self.head);
            may_be_handler.then_some((self.head, true))
        };
        let is_behind = self.backward.is_some() && self.kind != HeadKind::Exit;
        if let Some((head, own)) = search.filter(|_| !is_behind) {
            self.search = Some(Search::new(head, own, heads));
        }
        if let Some(search) = self.search.as_mut().filter(|s| s.own && s.head == next && dispatches)
        {
            // The head has a fragment already, so a path without a loop of the interpreted program
            // is of no use.
            search.own = false;
            self.ending = None;
        }
        let target = match target {
            // A path behind its loop ends where a search would begin.
            _ if is_behind && search.is_some() => TargetKind::Loop,
            TargetKind::LinearDispatch => TargetKind::Ordinary,
            target => target,
        };
        let recording = self.step(block, next, target);
        if let Some(Step { block, observed: Some(observed), .. }) = self.steps.last_mut() {
            note_results(block, observed, around);
        }
        if let (Some(search), Some(step)) = (&mut self.search, self.steps.last())
            && guests::dispatches(step)
        {
            let (steps, gpr) = (self.steps.len(), *around.gpr);
            search.dispatches.push(Dispatched { steps, gpr });
        }
        match (&recording, &self.search) {
            (Recording::Continue, Some(search))
                if search.head == next && search.arrives(transfer) =>
            {
                self.at_dispatch_head(heads, around)
            }
            (Recording::Continue, Some(_)) => self.between_passages(heads),
            _ => recording,
        }
    }

    /// Reports the block that is executed next, and the state before it. During a search the
    /// block's values are predicted.
    pub fn prepare(&mut self, block: &LiftedBlock, around: &Surroundings<'_>) {
        if self.search.is_some() {
            self.observation = Some(observe(block, around));
        }
    }

    /// The path has reached the head of the search: it ends if it has gone round a loop of the
    /// interpreted program.
    fn at_dispatch_head(
        &mut self,
        heads: &mut DispatchHeads,
        around: &Surroundings<'_>,
    ) -> Recording {
        let Some(search) = &mut self.search else { return Recording::Continue };
        let head = search.head;
        let key = heads.key(head, around);
        if key.as_ref().is_some_and(|k| heads.knows(head, k)) {
            if self.instructions > GUEST_LIMIT || search.is_closing {
                return self.end_search();
            }
            return self.finish(TraceShape::Linear, EndReason::DispatchHead);
        }
        let earlier = search.passages.iter().rposition(|p| p.key.is_some() && p.key == key);
        if let (Some(earlier), Some(key)) = (earlier, &key) {
            let from = &search.passages[earlier];
            let (steps, instructions) = (from.steps, self.instructions - from.instructions);
            let dispatches =
                self.steps[steps..].iter().filter(|s| guests::may_be_dispatch(&s.block));
            let is_plain = search.own && dispatches.count() < LEAST_DISPATCHES;
            if is_plain || instructions > GUEST_LIMIT {
                return self.search_failed(heads);
            }
            if heads.postpone_if_dear(head, instructions as u64) {
                return match self.head == head {
                    true => Recording::Aborted(AbortReason::TooDear),
                    false => self.end_search(),
                };
            }
            let passages: Vec<(usize, &Key)> = search.passages[earlier..]
                .iter()
                .filter_map(|passage| Some((passage.steps, passage.key.as_ref()?)))
                .collect();
            let closing = match search.own && !search.is_closing && !heads.closes(head) {
                true => closing_handler(&self.steps, steps, &search.dispatches, &passages),
                false => None,
            };
            if let Some(handler) = closing.filter(|pc| *pc != head && heads.wants(*pc)) {
                return self.go_on_to(handler, heads);
            }
            if !heads.add(head, key.clone()) {
                return self.search_failed(heads);
            }
            if search.is_closing {
                heads.set_closing(head);
            }
            let differing = |p: &Passage| {
                (0..16).filter(|&g| p.gpr[g] != around.gpr[g]).fold(0, |set, g| set | 1 << g)
            };
            let stable = !search.passages.iter().map(differing).fold(0u16, |set, d| set | d);
            let telling = |p: &Passage| {
                let is_here = p.key.as_ref() == Some(key);
                let tells = |g: &usize| (p.gpr[*g] == around.gpr[*g]) == is_here;
                (0..16).filter(tells).fold(0u16, |set, g| set | 1 << g)
            };
            let with_key = search.passages.iter().filter(|p| p.key.is_some());
            let telling = with_key.map(telling).fold(u16::MAX, |all, set| all & set);
            let registers =
                heads.greens(head).iter().zip(key).filter_map(|(green, value)| match green {
                    Green::Register(g) => Some((*g, *value)),
                    Green::Slot(..) => None,
                });
            let dispatch = search.dispatched.map_or(0, |(_, pc)| pc);
            let more = guests::more_registers(
                &self.steps[steps..],
                around.gpr,
                stable,
                heads.greens(head),
            );
            let registers = registers.chain(more).collect();
            let assumes_operands = heads.assumes_operands(head);
            let guest = GuestLoop {
                key: key.clone(),
                greens: heads.greens(head).to_vec(),
                registers,
                stable,
                telling,
                is_by_position: heads.is_by_position(head),
                assumes_operands,
                undone: heads.undone(head),
                dispatch,
                is_closing: search.is_closing,
            };
            let steps = self.steps.split_off(steps);
            let path = Path {
                head,
                shape: TraceShape::Loop,
                steps,
                stable: Vec::new(),
                guest: Some(Box::new(guest)),
                entry: Box::new(around.into()),
                others: Vec::new(),
                runs: None,
            };
            return Recording::Done(path, EndReason::GuestLoop);
        }
        let (steps, instructions) = (self.steps.len(), self.instructions);
        search.passages.push(Passage { steps, instructions, gpr: *around.gpr, key });
        Recording::Continue
    }

    /// A loop was found that is closed by this handler: the recording goes on until it comes round there.
    fn go_on_to(&mut self, handler: u64, heads: &mut DispatchHeads) -> Recording {
        heads.set_shared(self.head);
        self.search = Some(Search { is_closing: true, ..Search::new(handler, true, heads) });
        self.ending = None;
        self.instructions = 0;
        self.steps.clear();
        Recording::Continue
    }

    /// The path is between two passages of the head: it ends if the search is hopeless.
    fn between_passages(&mut self, heads: &mut DispatchHeads) -> Recording {
        let (Some(search), Some(step)) = (&mut self.search, self.steps.last()) else {
            return Recording::Continue;
        };
        if guests::dispatches(step) {
            search.dispatched.get_or_insert((self.steps.len(), step.block.pc));
            if search.passages.len() > 1 && heads.greens(search.head).is_empty() {
                let first = &search.passages[0];
                if !heads.find_greens(search.head, &self.steps[first.steps..], &first.gpr) {
                    return self.search_failed(heads);
                }
            }
        }
        if self.instructions > SEARCH_LIMIT {
            return self.search_failed(heads);
        }
        Recording::Continue
    }

    /// The search has found no loop of an interpreted program.
    fn search_failed(&mut self, heads: &mut DispatchHeads) -> Recording {
        if let Some(search) = &self.search
            && !search.has_loops
        {
            heads.fail(search.head, false);
        }
        self.end_search()
    }

    /// Ends the search and returns the part of the path that is useful without it.
    fn end_search(&mut self) -> Recording {
        let Some(search) = self.search.take() else { return Recording::Continue };
        if search.own {
            let Some(Ending { steps, shape, reason }) = self.ending.take() else {
                return Recording::Aborted(AbortReason::NoGuestLoop);
            };
            self.steps.truncate(steps);
            return self.finish(shape, reason);
        }
        let first = search.passages.first().map_or(0, |p| p.steps);
        if self.head == search.head || first == 0 {
            return Recording::Aborted(AbortReason::NoGuestLoop);
        }
        // If the head already has traces of such loops, the path ends at the head, where those
        // begin.
        let (steps, reason) = match search.dispatched {
            Some((steps, _)) if !search.has_loops => (steps, EndReason::Dispatch),
            _ => (first, EndReason::DispatchHead),
        };
        self.steps.truncate(steps);
        self.finish(TraceShape::Linear, reason)
    }

    /// May the path go on through the short loop at `head`? Not if it has reached the loop's head
    /// more often than two runs would, because the loop is not short this time.
    fn may_pass(&self, head: u64) -> bool {
        self.steps.iter().filter(|s| s.next == head).count()
            <= 2 * short_loops::MOST_ITERATIONS as usize
    }

    /// Does one of the path's blocks start here?
    fn has_passed(&self, pc: u64) -> bool {
        self.steps.iter().any(|step| step.block.pc == pc)
    }

    /// The path has taken a backward branch, after so many steps, to a place where it had not been. Compilers put parts
    /// of a loop that they think are executed seldom behind it, from where the guest jumps back into the loop. So the
    /// path goes on if it comes to its own head then. If it goes round another loop or comes to a fragment, it ends at
    /// the branch.
    fn round_from_behind(
        &mut self,
        next: u64,
        recursion: bool,
        target: TargetKind,
        steps: usize,
    ) -> Recording {
        let is_inner_loop = self.has_passed(next);
        let is_too_long = self.instructions >= self.limit;
        if target == TargetKind::Ordinary && !recursion && !is_inner_loop && !is_too_long {
            return Recording::Continue;
        }
        self.steps.truncate(steps);
        self.finish(TraceShape::Linear, EndReason::OtherHead)
    }

    /// The path of an exit has taken a backward branch. If it then reaches a loop's fragment soon,
    /// it ends there; otherwise it ends at the branch. A trace that began at the target of the
    /// branch would not know which values the exit's fragment has in registers.
    fn after_backward_branch(
        &mut self,
        transfer: Transfer,
        target: TargetKind,
        (steps, instructions): (usize, usize),
    ) -> Recording {
        let near = self.instructions - instructions <= MOST_AFTER_BACKWARD;
        match (transfer, target) {
            (Transfer::Jump { .. }, TargetKind::Loop) => {}
            (Transfer::Jump { .. } | Transfer::Return, TargetKind::Dispatch) => {}
            (Transfer::Jump { backward: false } | Transfer::Return, TargetKind::Ordinary)
                if near =>
            {
                return Recording::Continue;
            }
            _ => self.steps.truncate(steps),
        }
        self.finish(TraceShape::Linear, EndReason::OtherHead)
    }

    /// Reports that the interpreter has executed `block` up to an instruction that the runtime
    /// executes.
    pub fn runtime_instruction(&mut self, block: &Arc<LiftedBlock>) -> Recording {
        if block.count <= 1 && self.steps.is_empty() {
            return Recording::Aborted(AbortReason::NothingToTrace);
        }
        if self.searches_at_own_head() && self.ending.is_none() {
            self.search = None;
        }
        if self.search.is_some() {
            return self.end_search();
        }
        if let Some((steps, _)) = self.backward {
            self.steps.truncate(steps);
            return self.finish(TraceShape::Linear, EndReason::OtherHead);
        }
        if block.count > 1 {
            self.steps.push(Step { block: Arc::clone(block), next: block.pc, observed: None });
        }
        self.finish(TraceShape::Linear, EndReason::Runtime)
    }

    fn finish(&mut self, shape: TraceShape, reason: EndReason) -> Recording {
        let path = Path {
            head: self.head,
            shape,
            steps: std::mem::take(&mut self.steps),
            stable: std::mem::take(&mut self.stable),
            guest: None,
            entry: Box::new(self.entry),
            others: Vec::new(),
            runs: None,
        };
        Recording::Done(path, reason)
    }
}

/// The values that a block is predicted to compute, which is executed next in the state `around`.
pub(crate) fn observe(block: &LiftedBlock, around: &Surroundings<'_>) -> Prediction {
    predict(&block.version, around, &NativeResults::default())
}

/// The block has been executed, and this is the state after it: notes the values in registers that were
/// not predicted, such as results of natives.
pub(crate) fn note_results(
    block: &LiftedBlock,
    observed: &mut Prediction,
    around: &Surroundings<'_>,
) {
    let mut seen = 0u16;
    for inst in block.version.blocks[0].insts.iter().rev() {
        if let (Op::Put(Loc::Gpr(g)), Some(Operand::Value(v))) = (inst.op, inst.args.first())
            && seen & 1 << g.number() == 0
        {
            seen |= 1 << g.number();
            observed[v.index()].get_or_insert(around.gpr[g.number()]);
        }
    }
}

/// The kind of a transfer from one block to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transfer {
    /// A direct jump or branch, taken or not, or the next block in order; `backward` if it was
    /// taken to an earlier address.
    Jump { backward: bool },
    /// An indirect jump.
    Indirect,
    /// A direct or indirect call.
    Call,
    /// A return.
    Return,
}

impl Transfer {
    /// The transfer at the end of `block`, which went to `next`.
    pub fn of(block: &LiftedBlock, next: u64) -> Transfer {
        match &block.version.blocks[0].term {
            Term::Guest(GuestTerm::Call { .. }) => Transfer::Call,
            Term::Guest(GuestTerm::Ret(_)) => Transfer::Return,
            Term::Guest(GuestTerm::Goto(target)) if target.as_const().is_none() => {
                Transfer::Indirect
            }
            Term::Guest(GuestTerm::Branch { taken, .. }) => {
                Transfer::Jump { backward: *taken == next && next < block.end }
            }
            _ => Transfer::Jump { backward: next < block.end },
        }
    }
}
