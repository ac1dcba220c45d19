//! Following the next executing tail.
//!
//! The recorder is told of every block the interpreter finishes while it records. It stops at a cycle back to the
//! head (a loop), where another loop begins, at a system call or another instruction the runtime must do, or at
//! the length limit. What cannot be traced aborts with a named reason.

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
    /// The emitter refused the trace.
    Emitter,
    /// The code cache was flushed under the recording.
    Flushed,
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

/// What the dispatcher knows of the place control goes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Destination {
    /// Control goes there by a taken backward jump (not a call, not a return).
    pub backward: bool,
    /// A loop fragment starts there.
    pub loop_fragment: bool,
}

/// One recording in progress.
#[derive(Debug)]
pub struct Recorder {
    head: u64,
    stable: Vec<(dynasour_ir::Gpr, u64)>,
    steps: Vec<Step>,
    instructions: usize,
    limit: usize,
}

impl Recorder {
    /// Starts recording at `head`; `stable` are the registers that held these values at the sampled executions.
    pub fn new(head: u64, stable: Vec<(dynasour_ir::Gpr, u64)>, policy: &dyn SpeculationPolicy) -> Recorder {
        Recorder { head, stable, steps: Vec::new(), instructions: 0, limit: policy.max_instructions() }
    }

    /// The pc where the recording started.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The interpreter ran `block` to its end and goes to `next`.
    pub fn step(&mut self, block: &Rc<LiftedBlock>, next: u64, to: Destination) -> Recording {
        self.instructions += block.count as usize;
        self.steps.push(Step { block: Rc::clone(block), next });
        if next == self.head {
            return self.finish(TraceShape::Loop, EndReason::Cycle);
        }
        if to.loop_fragment || (to.backward && !self.is_fallthrough(block, next)) {
            return self.finish(TraceShape::Linear, EndReason::OtherHead);
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

    fn is_fallthrough(&self, block: &LiftedBlock, next: u64) -> bool {
        matches!(
            block.version.blocks[0].term,
            Term::Guest(GuestTerm::Branch { fall, taken, .. }) if fall == next && taken != next
        )
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
