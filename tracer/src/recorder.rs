//! Following the next executing tail.
//!
//! The recorder is told of every block the interpreter finishes while it records. It stops at a cycle back to the
//! head (a loop), where another loop begins, at a system call or another instruction the runtime must do, or at
//! the length limit. Calls are followed, but not into a function that is active already, nor into the head: a head
//! that a call reaches again is a function with several calls, not a loop. What cannot be traced aborts with a
//! named reason.

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
    stable: Vec<(dynasour_ir::Gpr, u64)>,
    steps: Vec<Step>,
    /// Functions entered by calls in the path and not left again.
    callees: Vec<u64>,
    instructions: usize,
    limit: usize,
}

impl Recorder {
    /// Starts recording at `head`; `stable` are the registers that held these values at the sampled executions.
    pub fn new(head: u64, stable: Vec<(dynasour_ir::Gpr, u64)>, policy: &dyn SpeculationPolicy) -> Recorder {
        Recorder {
            head,
            stable,
            steps: Vec::new(),
            callees: Vec::new(),
            instructions: 0,
            limit: policy.max_instructions(),
        }
    }

    /// The pc where the recording started.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The interpreter ran `block` to its end and goes to `next`, where a loop fragment starts or not.
    pub fn step(&mut self, block: &Rc<LiftedBlock>, next: u64, loop_fragment: bool) -> Recording {
        self.instructions += block.count as usize;
        self.steps.push(Step { block: Rc::clone(block), next });
        let recursion = self.follow_call(block, next);
        if next == self.head && !is_call(block) {
            return self.finish(TraceShape::Loop, EndReason::Cycle);
        }
        if loop_fragment || recursion || next == self.head || is_backward_jump(block, next) {
            return self.finish(TraceShape::Linear, EndReason::OtherHead);
        }
        if self.instructions >= self.limit {
            return self.finish(TraceShape::Linear, EndReason::Length);
        }
        Recording::Continue
    }

    /// Keeps the call stack of the path; is this a call of a function that is active already?
    fn follow_call(&mut self, block: &LiftedBlock, next: u64) -> bool {
        match &block.version.blocks[0].term {
            Term::Guest(GuestTerm::Call { .. }) => {
                let active = self.callees.contains(&next);
                self.callees.push(next);
                active
            }
            Term::Guest(GuestTerm::Ret(_)) => {
                self.callees.pop();
                false
            }
            _ => false,
        }
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

/// Does `block` end in a call?
fn is_call(block: &LiftedBlock) -> bool {
    matches!(block.version.blocks[0].term, Term::Guest(GuestTerm::Call { .. }))
}

/// Does `block` go to `next` by a taken direct jump (no call, no return) to an earlier address?
pub fn is_backward_jump(block: &LiftedBlock, next: u64) -> bool {
    next < block.end
        && match &block.version.blocks[0].term {
            Term::Guest(GuestTerm::Branch { taken, .. }) => *taken == next,
            Term::Guest(GuestTerm::Goto(target)) => target.as_const() == Some(next),
            _ => false,
        }
}
