//! The edges between interpreted blocks: where the interpreter stops because native code starts, a
//! head is hot, or a recording is complete.
//!
//! A block's `user` word says what is known of its pc: nothing native, a copied block, or one of
//! four kinds of fragments. While a recording is under way, native code is not entered: the path
//! goes through it. What is hot and what is recorded decides the tracer
//! ([`dynasour_tracer::TraceSelector`]).
//!
//! Data: [`Selector`], one for each thread, which alone uses it.
//!
//! Example: the interpreter passes a backward branch to 0x1000, whose `user` word is
//! [`NO_FRAGMENT`]: the head is counted. When it is hot, `edge` returns [`Selected::Hot`], and the
//! interpreter stops before the block.

use crate::config::RunConfig;
use crate::interp::{BlockEntry, EdgeKind, Policy, Watch};
use crate::memory;
use dynasour_guest::ThreadContext;
use dynasour_tracer::{
    AbortReason, DefaultPolicy, HeadKind, Landing, NextBlock, Selected, Surroundings, TraceSelector,
};

/// Nothing native starts at this block.
pub const NO_FRAGMENT: u32 = 0;
/// Its copy runs natively.
pub const COPIED_BLOCK: u32 = 1;
/// A linear fragment starts at this block.
pub const LINEAR_FRAGMENT: u32 = 2;
/// A loop fragment starts at this block.
pub const LOOP_FRAGMENT: u32 = 3;
/// A loop fragment starts at this block, and its indirect jump keeps going elsewhere.
pub const DISPATCH_FRAGMENT: u32 = 4;
/// A linear fragment starts at this block, and its indirect jump keeps going elsewhere.
pub const LINEAR_DISPATCH_FRAGMENT: u32 = 5;

/// The number of heads whose executions up to the threshold are not counted in a forked child
/// (guess: most children execute another program or end before a trace would have paid).
const UNCOUNTED_HEADS: u32 = 64;

/// Arrivals at a pc before its block is copied, where cold code is interpreted (guess; copying takes
/// about as long as interpreting a block eight times).
const WARM: u32 = 8;

/// What the interpreter asks at edges between blocks.
pub struct Selector {
    /// What is hot, and the recording under way.
    pub traces: TraceSelector,
    /// Executions of heads that are still to go by uncounted.
    uncounted: u32,
    /// Code in this range is never traced (the vDSO).
    untraced: std::ops::Range<u64>,
    /// Blocks are copied, and native heads are counted there.
    copies_blocks: bool,
    /// A block is copied only when it is warm.
    interprets_first: bool,
}

impl Selector {
    /// A selector that records heads as `config` says, and nothing in `untraced`.
    pub fn new(config: &RunConfig, untraced: std::ops::Range<u64>) -> Selector {
        let policy =
            DefaultPolicy { head_threshold: config.threshold(), placement: config.placement };
        let weighs = config.watches_paths().then_some(memory::fetch_code as _);
        Selector {
            traces: TraceSelector::new(policy, weighs),
            copies_blocks: config.copies_blocks(),
            interprets_first: config.interprets_first(),
            uncounted: 0,
            untraced,
        }
    }

    /// May traces be made of this block?
    pub fn may_trace(&self, block: &BlockEntry) -> bool {
        self.refuses(block).is_none()
    }

    /// Why traces may not be made of this block.
    fn refuses(&self, block: &BlockEntry) -> Option<AbortReason> {
        if self.untraced.contains(&block.pc) {
            Some(AbortReason::Vdso)
        } else if self.copies_blocks && block.is_checked() {
            // Native code goes on in blocks where a trace leaves, and blocks do not compare their
            // own code.
            Some(AbortReason::WritableCode)
        } else {
            None
        }
    }

    /// Leaves the first executions of heads uncounted, in a forked child.
    pub fn leave_heads_uncounted(&mut self) {
        self.uncounted = self.traces.policy.head_threshold.saturating_mul(UNCOUNTED_HEADS);
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
        if self.uncounted > 0 {
            self.uncounted -= 1;
            return None;
        }
        self.traces.count(to.pc, &context.gpr, kind)
    }

    /// While a recording is under way: the block `to` is executed next.
    fn executes(&mut self, context: &ThreadContext, to: &BlockEntry) -> Option<Selected> {
        let landing = match to.user {
            NO_FRAGMENT | COPIED_BLOCK if self.traces.heads.is_postponed(to.pc) => Landing::Short,
            LOOP_FRAGMENT => Landing::Loop,
            DISPATCH_FRAGMENT => Landing::Dispatch,
            LINEAR_DISPATCH_FRAGMENT => Landing::LinearDispatch,
            _ => Landing::Ordinary,
        };
        let refused = self.refuses(to);
        let next = NextBlock { pc: to.pc, landing, refused, lifted: &|| to.lifted() };
        self.traces.executes(&next, &surroundings(context))
    }
}

/// Does an edge lead to a trace head?
fn is_head(kind: EdgeKind, from: u64, to: u64) -> bool {
    match kind {
        EdgeKind::Taken { backward } => backward,
        EdgeKind::Call => true,
        // The handlers of an interpreter that each end with their own dispatch.
        EdgeKind::Indirect => to <= from,
        EdgeKind::FallThrough | EdgeKind::Ret => false,
    }
}

/// The guest has come to a block; the arrival counts `counts` times. Is the block warm now, so that
/// it is copied?
pub fn is_warm(block: &mut BlockEntry, counts: u32) -> bool {
    block.counter = block.counter.saturating_add(counts);
    block.counter >= WARM
}

/// The state that a recording may read.
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
        let all = self.traces.is_recording() || self.copies_blocks && !self.interprets_first;
        if all { Watch::All } else { Watch::Heads }
    }

    fn edge(
        &mut self,
        context: &ThreadContext,
        from: u64,
        to: &mut BlockEntry,
        kind: EdgeKind,
    ) -> Option<Selected> {
        if self.traces.is_recording() {
            return self.executes(context, to);
        }
        if to.user >= DISPATCH_FRAGMENT && self.traces.dispatch.wants_now(to.pc) {
            self.traces.start(to.lifted(), HeadKind::Other, Vec::new());
            return None;
        }
        if self.copies_blocks {
            let native = !to.is_checked()
                && (!self.interprets_first
                    || to.user != NO_FRAGMENT
                    || is_head(kind, from, to.pc) && is_warm(to, 1));
            return native.then_some(Selected::Native);
        }
        if to.user != NO_FRAGMENT {
            return Some(Selected::Native);
        }
        let head = if kind == EdgeKind::Call { HeadKind::Function } else { HeadKind::Other };
        if let Some(stable) = self.traces.take_again(to.pc) {
            self.traces.start(to.lifted(), head, stable);
            return None;
        }
        if is_head(kind, from, to.pc) { self.count(context, to, head) } else { None }
    }
}
