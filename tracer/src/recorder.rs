//! Following the next executing tail.
//!
//! The recorder is told of every block the interpreter finishes while it records. It stops at a cycle back to the
//! head (a loop), where another loop begins, at a system call or another instruction the runtime must do, or at
//! the length limit. What cannot be traced aborts with a named reason.
//!
//! Calls are followed into functions even where a fragment starts, so that a loop's trace holds all it calls; but not
//! into a function that is active already, nor into the head: a head that a call reaches again is a function with
//! several calls, not a loop. The trace of a function that was hot by its calls ends where it returns, since the next
//! call comes from elsewhere.
//!
//! A loop whose first indirect jump keeps going elsewhere (an interpreter's dispatch) is no place to end: traces go on
//! through it and end at that jump, so that each opcode's handler has a dispatch of its own.

use crate::build::{Path, Step, TraceShape};
use crate::policy::SpeculationPolicy;
use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::{GuestTerm, Term};
use std::rc::Rc;

/// Why a recording produced no trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum AbortReason {
    /// The very first instruction must be done by the runtime, so there is nothing to compile.
    NothingToTrace,
    /// A guest instruction faulted while it was recorded.
    Fault,
    /// A signal arrived.
    Signal,
    /// A location that traces do not keep was used (a segment base).
    UnsupportedLocation,
    /// A guest instruction needs an anchor after its own effect.
    NoAnchor,
    /// Code in the vDSO: its loads must never be removed.
    Vdso,
    /// Plain stores may change the code.
    WritableCode,
    /// The emitter refused the trace.
    Emitter,
    /// The code cache was flushed under the recording.
    Flushed,
    /// The region has as many versions as it may have.
    TooManyVersions,
    /// The user asked for other traces only.
    NotSelected,
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
    /// The indirect jump of a dispatch loop.
    Dispatch,
}

/// What starts where control goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Landing {
    /// Nothing that matters.
    Ordinary,
    /// A loop's fragment.
    Loop,
    /// A loop's fragment whose indirect jump keeps going elsewhere.
    Dispatch,
}

/// Why a head is hot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadKind {
    /// A function, by its calls.
    Function,
    /// By jumps to it, or by fragments that leave to it.
    Other,
}

/// What the recorder says after each block.
#[derive(Debug)]
pub enum Recording {
    /// Go on.
    Continue,
    /// The path is complete.
    Done(Path, EndReason),
    /// Nothing came of it.
    Aborted(AbortReason),
}

/// One recording in progress.
#[derive(Debug)]
pub struct Recorder {
    head: u64,
    kind: HeadKind,
    stable: Vec<(dynasour_ir::Gpr, u64)>,
    steps: Vec<Step>,
    /// Functions entered by calls in the path and not left again.
    callees: Vec<u64>,
    instructions: usize,
    limit: usize,
    /// The path has come through a dispatch loop's head.
    dispatching: bool,
}

impl Recorder {
    /// Starts recording at `head`; `stable` are the registers that held these values at the sampled executions.
    pub fn new(
        head: u64,
        kind: HeadKind,
        stable: Vec<(dynasour_ir::Gpr, u64)>,
        policy: &dyn SpeculationPolicy,
    ) -> Recorder {
        Recorder {
            head,
            kind,
            stable,
            steps: Vec::new(),
            instructions: 0,
            limit: policy.max_instructions(),
            callees: Vec::new(),
            dispatching: false,
        }
    }

    /// The pc where the recording started.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The interpreter ran `block` to its end and goes to `next`, where `landing` starts.
    pub fn step(&mut self, block: &Rc<LiftedBlock>, next: u64, landing: Landing) -> Recording {
        self.instructions += block.count as usize;
        self.steps.push(Step { block: Rc::clone(block), next });
        let transfer = Transfer::of(block, next);
        let recursion = transfer == Transfer::Call && (next == self.head || self.callees.contains(&next));
        match transfer {
            Transfer::Call => self.callees.push(next),
            Transfer::Return if self.callees.pop().is_none() && self.kind == HeadKind::Function => {
                return self.finish(TraceShape::Linear, EndReason::Return);
            }
            _ => {}
        }
        if next == self.head && transfer != Transfer::Call {
            return self.finish(TraceShape::Loop, EndReason::Cycle);
        }
        match transfer {
            Transfer::Call if recursion => return self.finish(TraceShape::Linear, EndReason::OtherHead),
            Transfer::Jump { .. } if landing == Landing::Dispatch => self.dispatching = true,
            Transfer::Jump { backward } if backward || landing == Landing::Loop => {
                return self.finish(TraceShape::Linear, EndReason::OtherHead);
            }
            Transfer::Indirect if self.dispatching => return self.finish(TraceShape::Linear, EndReason::Dispatch),
            _ => {}
        }
        if self.instructions >= self.limit {
            return self.finish(TraceShape::Linear, EndReason::Length);
        }
        Recording::Continue
    }

    /// The interpreter ran `block` up to an instruction that the runtime must do.
    pub fn runtime_instruction(&mut self, block: &Rc<LiftedBlock>) -> Recording {
        if block.count <= 1 && self.steps.is_empty() {
            return Recording::Aborted(AbortReason::NothingToTrace);
        }
        if block.count > 1 {
            self.steps.push(Step { block: Rc::clone(block), next: block.pc });
        }
        self.finish(TraceShape::Linear, EndReason::Runtime)
    }

    fn finish(&mut self, shape: TraceShape, reason: EndReason) -> Recording {
        let path = Path {
            head: self.head,
            shape,
            steps: std::mem::take(&mut self.steps),
            stable: std::mem::take(&mut self.stable),
        };
        Recording::Done(path, reason)
    }
}

/// How control goes from one block to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transfer {
    /// By a direct jump, taken or not, or straight on; `backward` if it was taken to an earlier address.
    Jump {
        backward: bool,
    },
    /// By an indirect jump.
    Indirect,
    Call,
    Return,
}

impl Transfer {
    pub fn of(block: &LiftedBlock, next: u64) -> Transfer {
        match &block.version.blocks[0].term {
            Term::Guest(GuestTerm::Call { .. }) => Transfer::Call,
            Term::Guest(GuestTerm::Ret(_)) => Transfer::Return,
            Term::Guest(GuestTerm::Goto(target)) if target.as_const().is_none() => Transfer::Indirect,
            Term::Guest(GuestTerm::Branch { taken, .. }) => {
                Transfer::Jump { backward: *taken == next && next < block.end }
            }
            _ => Transfer::Jump { backward: next < block.end },
        }
    }
}
