//! What happens at each edge between interpreted blocks: the interpreter continues, or it stops
//! because native code starts there, because a head is hot, or because a recording is complete.
//!
//! The `user` word of a block says what is known of its pc: [`NO_FRAGMENT`], [`COPIED_BLOCK`], or
//! one of four kinds of fragments. During a recording, native code is not entered, because the path
//! has to be recorded through it. The tracer decides what is hot and what is recorded
//! ([`dynasour_tracer::TraceSelector`]).
//!
//! Data: [`Selector`], one for each thread, which alone uses it; so it needs no lock. The fragments
//! may change at any time, so a `user` word may be out of date: the dispatcher asks
//! [`super::fragments`] before it enters anything, and corrects the word.
//!
//! Example: the interpreter passes a backward branch to 0x1000, whose `user` word is
//! [`NO_FRAGMENT`]: the head is counted. When it is hot, `edge` returns [`Selected::Hot`], and the
//! interpreter stops before the block.

use crate::config::{RunConfig, SAMPLED_EDGES, Tier};
use crate::interp::{BlockEntry, EdgeKind, Policy, Watch};
use crate::memory;
use dynasour_guest::ThreadContext;
use dynasour_tracer::sampled_calls::SampledCalls;
use dynasour_tracer::worth::Judge;
use dynasour_tracer::{
    AbortReason, HeadKind, NextBlock, Selected, Surroundings, TargetKind, TraceSelector,
};

/// `user` word: no native code is known to start at this block.
pub const NO_FRAGMENT: u32 = 0;
/// `user` word: the block is copied, or will be at its next execution.
pub const COPIED_BLOCK: u32 = 1;
/// `user` word: a linear fragment starts at this block.
pub const LINEAR_FRAGMENT: u32 = 2;
/// `user` word: a loop's fragment starts at this block.
pub const LOOP_FRAGMENT: u32 = 3;
/// `user` word: a loop's fragment starts at this block, and its indirect jump has changing targets.
pub const DISPATCH_FRAGMENT: u32 = 4;
/// `user` word: a linear fragment starts at this block, and its indirect jump has changing targets.
pub const LINEAR_DISPATCH_FRAGMENT: u32 = 5;

/// In a forked child this many thresholds of executions of heads are not counted (guess: most
/// children execute another program or end before a trace would have paid; too high delays the
/// traces of a child that runs long).
const UNCOUNTED_HEADS: u32 = 64;

/// Arrivals at a pc after which its block is copied, in runs that interpret first (guess: copying
/// takes about as long as interpreting a block eight times; too low copies code that runs once).
const WARM: u32 = 8;

/// The [`Policy`] that the interpreter asks at each edge between blocks.
pub struct Selector {
    /// The counts of heads, and the recording under way.
    pub traces: TraceSelector,
    /// The next executions of heads, this many, are not counted.
    uncounted: u32,
    /// Code in this range is never traced (the vDSO).
    untraced: fn() -> std::ops::Range<u64>,
    /// Guest blocks are copied, and heads are counted in the copies.
    copies_blocks: bool,
    /// A block is interpreted until it is warm (see [`is_warm`]), and copied then.
    interprets_first: bool,
    /// The number of edges that are still looked at for the sample under way; 0 if there is none.
    sampled: u32,
    /// The calls in these edges.
    calls: SampledCalls,
}

impl Selector {
    /// A selector with the thresholds of `config`, which records no code in the range that `untraced`
    /// returns.
    pub fn new(config: &RunConfig, untraced: fn() -> std::ops::Range<u64>) -> Selector {
        let weighs = config.measures_paths().then(|| judge(config));
        Selector {
            traces: TraceSelector::new(config.policy(), weighs, config.iterations()),
            copies_blocks: config.copies_blocks(),
            interprets_first: config.interprets_first(),
            sampled: 0,
            calls: SampledCalls::default(),
            uncounted: 0,
            untraced,
        }
    }

    /// The thread was sampled: the heads that it passes next are counted.
    pub fn begin_sample(&mut self) {
        self.sampled = SAMPLED_EDGES;
        self.calls.begin();
    }

    /// Are the heads counted that the thread passes, because it was sampled?
    pub fn is_sampling(&self) -> bool {
        self.sampled > 0
    }

    /// The sample is over.
    pub fn end_sample(&mut self) {
        self.sampled = 0;
    }

    /// For a sample: counts the head `to`, and ends when enough edges were looked at or when a
    /// fragment starts at `to`.
    fn sample(
        &mut self,
        context: &ThreadContext,
        from: u64,
        to: &BlockEntry,
        kind: EdgeKind,
    ) -> Option<Selected> {
        self.sampled -= 1;
        if to.user > COPIED_BLOCK {
            self.sampled = 0;
        }
        if self.sampled == 0 {
            return Some(Selected::Native);
        }
        if kind == EdgeKind::Call {
            self.calls.call();
        } else if is_head(kind, from, to.pc) {
            let calls = self.calls.pass(to.pc);
            if calls > 0 {
                self.traces.heads.skip(to.pc, u64::from(calls), &*self.traces.policy);
            }
        }
        self.pass_head(context, from, to, kind)
    }

    /// The guest passes an edge to a block without native code: counts it if it is a head, or
    /// records it again.
    fn pass_head(
        &mut self,
        context: &ThreadContext,
        from: u64,
        to: &BlockEntry,
        kind: EdgeKind,
    ) -> Option<Selected> {
        let head = if kind == EdgeKind::Call { HeadKind::Function } else { HeadKind::Other };
        if let Some(stable) = self.traces.take_again(to.pc) {
            self.traces.start(to.lifted(), head, stable, &surroundings(context));
            return None;
        }
        if is_head(kind, from, to.pc) { self.count(context, to, head) } else { None }
    }

    /// May traces be made of this block?
    pub fn may_trace(&self, block: &BlockEntry) -> bool {
        self.refuses(block).is_none()
    }

    /// Why traces may not be made of this block.
    fn refuses(&self, block: &BlockEntry) -> Option<AbortReason> {
        if (self.untraced)().contains(&block.pc) {
            Some(AbortReason::Vdso)
        } else if self.copies_blocks && block.is_checked() {
            // Plain stores may change this code unnoticed. Its copied block compares its guest
            // bytes at each entry; it is not traced.
            Some(AbortReason::WritableCode)
        } else {
            None
        }
    }

    /// In a forked child: the next executions of heads are not counted; see [`UNCOUNTED_HEADS`].
    pub fn leave_heads_uncounted(&mut self) {
        self.uncounted = self.traces.policy.head_threshold().saturating_mul(UNCOUNTED_HEADS);
    }

    /// Counts an execution of the trace head `to`, which the guest is about to execute.
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

    /// Tells the recording under way that the block `to` is executed next.
    fn executes(&mut self, context: &ThreadContext, to: &BlockEntry) -> Option<Selected> {
        let target = match to.user {
            NO_FRAGMENT | COPIED_BLOCK if self.traces.heads.is_postponed(to.pc) => {
                TargetKind::Short
            }
            LOOP_FRAGMENT => TargetKind::Loop,
            DISPATCH_FRAGMENT => TargetKind::Dispatch,
            LINEAR_DISPATCH_FRAGMENT => TargetKind::LinearDispatch,
            _ => TargetKind::Ordinary,
        };
        let refused = self.refuses(to);
        let next = NextBlock { pc: to.pc, target, refused, lifted: &|| to.lifted() };
        self.traces.executes(&next, &surroundings(context))
    }
}

/// Judges traces by what they replace.
pub fn judge(config: &RunConfig) -> Judge {
    Judge { read: memory::fetch_code, in_place: config.tier == Tier::Direct }
}

/// Does an edge of this kind from `from` to `to` lead to a trace head?
fn is_head(kind: EdgeKind, from: u64, to: u64) -> bool {
    match kind {
        EdgeKind::Taken { backward } => backward,
        EdgeKind::Call => true,
        // In a guest that is an interpreter, each handler may end with its own indirect jump to the
        // next handler. There is no backward branch then, so a backward indirect jump counts.
        EdgeKind::Indirect => to <= from,
        EdgeKind::FallThrough | EdgeKind::Ret => false,
    }
}

/// Counts an arrival at a block, with the weight `counts`. Returns whether the block is *warm* now:
/// then it is copied.
pub fn is_warm(block: &mut BlockEntry, counts: u32) -> bool {
    block.counter = block.counter.saturating_add(counts);
    block.counter >= WARM
}

/// The guest state that a recording may read.
pub fn surroundings(context: &ThreadContext) -> Surroundings<'_> {
    let read = &memory::read_word;
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
            self.traces.start(to.lifted(), HeadKind::Other, Vec::new(), &surroundings(context));
            return None;
        }
        if self.sampled > 0 {
            return self.sample(context, from, to, kind);
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
        self.pass_head(context, from, to, kind)
    }
}
