//! The fragment side of the dispatcher: which fragments exist, entering and leaving them, links, side traces.
//!
//! A region may have several fragments: loops of an interpreted program, the newest first, then the others, the oldest
//! first. The first of all is entered, by the interpreter, by links and by the lookup of indirect jumps. Ends and hot exits are linked, so that a steady guest never comes back here; a hot exit
//! to where no fragment starts begins a recording there. What is recorded is compiled for the state which that exit
//! leaves ([`EntryState::FromExit`]) and belongs to it alone; when several exits have wanted traces from one pc, the
//! next one makes a fragment of the region, which all others share.
//!
//! **Progress.** An exit whose target is its own fragment's pc may have failed without a guest instruction having
//! run. Unless [`Exit::progress`](dynasour_emitter::Exit::progress) says otherwise it is only ever linked to a *later*
//! fragment of the region in that order, so a chain of such exits ends, and at its end the interpreter runs an instruction.
//! Every other exit has run one. Of the ordinary fragments only the oldest carries guards against aliasing, which are what
//! fails at a head.
//!
//! **Signals.** The handler unlinks the fragment that it interrupts; lookups and the way in are beyond a fragment's
//! links, so a thread that is there is diverted. Whatever is linked to whatever, it comes out before it enters
//! another fragment. The thread that was interrupted links the fragment again when it is out; others that come out of it
//! meanwhile just enter again.
//!
//! **Threads.** All of this is behind one lock, which nobody holds while guest code runs. A thread that is in fragments, or
//! comes from one, is *in the cache* ([`super::peers`]), and what it may need is kept until it is not: dropping all is
//! done in two steps, [`Fragments::retire`] and [`Fragments::clear`], and so is dropping some ([`removal`]).
//!
//! Under `--chaos` nothing is linked: every fragment must be entered from here, where its guards are forced.

mod aims;
mod chaos;
mod describe;
mod ledger;
mod mixed;
mod pace;
mod removal;
mod resting;
mod room;

use super::sources::{Role, Sources};
use super::worth;
use crate::census::CompileTimes;
use crate::config::{Chaos, RunConfig, Stage};
use crate::interp::astray;
use crate::invalidate::CodePages;
use crate::memory;
use crate::perf_map::Piece;
use crate::profile::{Phase, during};
use crate::stats::{DeoptReason, Stats};
use aims::Aims;
use dynasour_emitter::codegen::{self, Allocator, CompiledCode, Request};
use dynasour_emitter::copy::{BlockId, HeadCounts};
use dynasour_emitter::{
    Config, Diversion, EmitError, Emitter, EntryPoint, EntryState, ExitId, FragmentId, Left, PendingStore, SiteKind,
};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_ir::opt::OptOptions;
use dynasour_ir::{Context, Fact, Version};
use dynasour_tracer::{AbortReason, Landing, Path, SpeculationPolicy, TraceShape, build};
use ledger::{Ledger, Made};
use pace::Paces;
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use thiserror::Error;

pub use mixed::{Arrival, Came};
pub use removal::Touched;

/// So many exits may have a trace of their own from one pc.
const OWN_TRACES: u32 = 3;

/// In [`ThreadContext::unlinked`]: it is a copied block, not a fragment.
const BLOCK: u32 = 1 << 31;

/// The fragment side cannot be set up or has broken an invariant.
#[derive(Debug, Error)]
pub enum FragmentError {
    /// From the emitter.
    #[error(transparent)]
    Emit(#[from] EmitError),
    /// A deferred store cannot be performed.
    #[error("the memory of a deferred store to {0:#x} is gone")]
    Store(u64),
    /// No memory in reach of the code cache for what a counting run counts.
    #[error("no memory for counters in reach of the code cache")]
    Counters,
    /// From the interpreter.
    #[error("cannot map memory for the interpreter: {0}")]
    Memory(#[from] std::io::Error),
}

/// Where the guest stands after running fragments, and what should happen there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum After {
    /// Interpret on.
    Interpret,
    /// Interpret on; `rip` is a trace head and this counts as an execution of it.
    CountHead,
    /// The exit is hot: record a side trace from `rip`.
    RecordSide(Side),
    /// The runtime wanted control.
    Pending,
    /// The cache is full.
    Flush,
    /// No fragment starts there (any more).
    Nothing,
    /// `rip` is no address. The transfer at this pc led there, and is refused.
    Astray(u64),
}

/// What happens next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Another fragment is entered.
    Enter(FragmentId),
    /// The runtime goes on.
    After(After),
}

/// An exit for which a side trace is being recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Side {
    exit: ExitId,
    pc: u64,
    generation: u64,
}

/// A thread's way into a fragment.
#[derive(Debug)]
pub struct Way {
    fragment: FragmentId,
    /// Where to enter it.
    pub entry: EntryPoint,
    /// Guards that were made to fail.
    forced: Vec<ExitId>,
}

/// What a trace is compiled for.
pub struct Plan {
    name: String,
    facts: Vec<Fact>,
    /// Whether its head has no fragment yet.
    first: bool,
    side: Option<ExitId>,
    /// What the emitter was when the plan was made.
    request: Request,
    generation: u64,
    start: Instant,
    /// How long its parts have taken.
    pub times: CompileTimes,
    /// The version as built, if the book of a counting run wants it.
    built: Option<String>,
}

/// Why a trace came to nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The cache is full.
    Full,
    /// What it was made from or for is gone, or somebody else was faster.
    Stale,
    /// Something about the trace.
    Refused(AbortReason),
}

#[derive(Default)]
struct Region {
    fragments: Vec<FragmentId>,
}

/// A resolved stub.
#[derive(Clone, Copy)]
struct Stub {
    /// The exit it was made for.
    origin: ExitId,
    /// It goes on in the copied block at its pc, whatever else is there.
    in_block: bool,
}

/// Emitter, fragment tables, and what happened at exits.
pub struct Fragments {
    emitter: Box<Emitter>,
    regions: FxHashMap<u64, Region>,
    /// How many exits have a trace of their own from this pc.
    side_traces: FxHashMap<u64, u32>,
    /// Resolved stubs, by their fragments.
    stubs: FxHashMap<FragmentId, Stub>,
    /// Times each unlinked exit was taken.
    taken: FxHashMap<ExitId, u32>,
    /// Where exits with computed targets have gone.
    aims: Aims,
    /// What fragments were made from.
    sources: Sources,
    pages: Arc<CodePages>,
    /// Loop fragments.
    loops: FxHashSet<FragmentId>,
    /// Fragments of regions that go through an indirect jump or call.
    indirect: FxHashSet<FragmentId>,
    /// Fragments of loops of an interpreted program.
    guest_loops: FxHashSet<FragmentId>,
    /// Heads of loops whose indirect jump keeps going elsewhere.
    dispatching: FxHashSet<u64>,
    /// The last of these, if nobody has been told yet.
    new_dispatch: Option<u64>,
    private_memory: bool,
    chaos: Option<(Chaos, u64)>,
    /// Traces built so far, for naming and `--only-trace`.
    traces: u32,
    log_exits: bool,
    log_worth: bool,
    /// Are traces dropped that are not worth having?
    weighs: bool,
    log_code: bool,
    /// Counts the times when something that a compilation may rely on went away.
    generation: u64,
    /// Between [`Fragments::retire`] and [`Fragments::clear`].
    retired: bool,
    /// See [`Fragments::count_heads`].
    heads: HeadCounts,
    paces: Paces,
    /// Of a counting run.
    ledger: Option<Box<Ledger>>,
    /// Code that is gone, if it is to be named at the end.
    pieces: Option<Vec<Piece>>,
    /// What happened to fragments.
    pub stats: Stats,
}

impl Fragments {
    /// An empty cache of the configured size.
    ///
    /// # Errors
    /// This machine lacks something, or there is no memory.
    pub fn new(config: &RunConfig, pages: Arc<CodePages>) -> Result<Fragments, FragmentError> {
        let count = config.count.is_some();
        let rates = count || config.stats;
        let &RunConfig { cache_size, returns, entry_check, .. } = config;
        let emitter = room::emitter(Config { cache_size, count, rates, returns, entry_check, names_transfers: false })?;
        if config.count.is_some() && !emitter.is_counting() {
            return Err(FragmentError::Counters);
        }
        Ok(Fragments {
            emitter: Box::new(emitter),
            regions: FxHashMap::default(),
            side_traces: FxHashMap::default(),
            stubs: FxHashMap::default(),
            taken: FxHashMap::default(),
            aims: Aims::default(),
            sources: Sources::default(),
            pages,
            loops: FxHashSet::default(),
            indirect: FxHashSet::default(),
            guest_loops: FxHashSet::default(),
            dispatching: FxHashSet::default(),
            new_dispatch: None,
            private_memory: true,
            chaos: config.chaos.map(|c| (c, c.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)),
            traces: 0,
            log_worth: config.log.contains(&Stage::Record),
            weighs: config.weighs_traces(),
            log_exits: config.log.contains(&Stage::Exit),
            log_code: config.log.contains(&Stage::Code),
            generation: 0,
            retired: false,
            heads: HeadCounts::default(),
            paces: Paces::default(),
            pieces: config.perf_map.then(Vec::new),
            ledger: config.count.as_ref().map(|_| Box::default()),
            stats: Stats::default(),
        })
    }

    /// The addresses of the code cache.
    pub fn cache(&self) -> Range<u64> {
        self.emitter.cache().range()
    }

    /// Where a fault of a fragment's own continues. Async-signal-safe.
    pub fn fault_exit(&self, host_rip: u64) -> Option<u64> {
        self.emitter.fault_exit(host_rip)
    }

    /// The thread of `context` was interrupted at `host_rip` and is to come out. Async-signal-safe.
    pub fn divert(&self, host_rip: u64, context: &ThreadContext) -> Option<Diversion> {
        let code = match self.emitter.fragment_at(host_rip) {
            Some(fragment) => {
                self.emitter.unlink_for_signal(fragment);
                fragment.0 + 1
            }
            None => match self.emitter.block_at(host_rip) {
                Some(block) => {
                    self.emitter.unlink_block(block);
                    (block.0 + 1) | BLOCK
                }
                None => 0,
            },
        };
        if code != 0 {
            // After a second signal the thread is not in the first one's code any more.
            self.relink(context.unlinked.swap(code, Ordering::Relaxed));
        }
        self.emitter.diversion(host_rip)
    }

    /// A thread is out: undoes what its signal handler did.
    fn link_again(&self, context: &ThreadContext) {
        self.relink(context.unlinked.swap(0, Ordering::Relaxed));
    }

    fn relink(&self, unlinked: u32) {
        match unlinked & !BLOCK {
            0 => {}
            n if unlinked & BLOCK != 0 => self.emitter.relink_block(BlockId(n - 1)),
            n => self.emitter.relink(FragmentId(n - 1)),
        }
    }

    /// Lets indirect jumps find a fragment.
    fn register(&mut self, pc: u64, id: FragmentId) {
        if self.chaos.is_none() {
            self.emitter.register_entry(pc, id).expect("the fragment was compiled for this pc");
        }
    }

    /// The fragment that is entered at `pc`, woken if it rests.
    pub fn find(&mut self, pc: u64) -> Option<FragmentId> {
        self.wake(pc);
        self.first(pc)
    }

    /// The way to what [`Fragments::arrive`] gave.
    pub fn way_to_copy(&mut self, entry: u64) -> EntryPoint {
        self.stats.native_entries += 1;
        self.emitter.copy_entry_point(entry)
    }

    /// The guest's state after a fault in a block; see [`Emitter::copy_state`].
    pub fn copy_state(&mut self, context: &mut ThreadContext, code: &dyn Fetch) -> bool {
        self.emitter.copy_state(context, code)
    }

    /// From now on traces may not assume `private_memory`. Must existing fragments go?
    pub fn lose_private_memory(&mut self) -> bool {
        if !std::mem::replace(&mut self.private_memory, false) {
            return false;
        }
        self.generation += 1;
        // Those that rest assume it, too, and could be woken.
        !self.sources.is_empty()
    }

    /// From the next [`Fragments::clear`] on transfers name themselves: see [`Emitter::name_transfers`]. False if they do already.
    pub fn name_transfers(&mut self) -> bool {
        self.emitter.name_transfers()
    }

    /// Makes nothing lead into any fragment any more, and whoever is in one come out. When all are, somebody must
    /// [`Fragments::clear`]. `false` if another thread is about to do that already.
    pub fn retire(&mut self) -> bool {
        if std::mem::replace(&mut self.retired, true) {
            return false;
        }
        self.stats.flushes += 1;
        self.emitter.retire_all();
        self.forget();
        true
    }

    /// Drops all fragments after [`Fragments::retire`]: every thread has been outside since.
    pub fn clear(&mut self) {
        self.close_ledger();
        self.emitter.flush_all();
        self.generation += 1;
        self.retired = false;
    }

    /// Fresh memory and no fragments, in a forked child.
    pub fn reset_after_fork(&mut self) -> Result<(), FragmentError> {
        self.close_ledger();
        self.forget();
        self.retired = false;
        Ok(self.emitter.reset_after_fork()?)
    }

    fn forget(&mut self) {
        self.generation += 1;
        self.regions.clear();
        self.side_traces.clear();
        self.stubs.clear();
        self.taken.clear();
        self.aims.clear();
        self.sources.clear();
        self.loops.clear();
        self.indirect.clear();
        self.guest_loops.clear();
        self.dispatching.clear();
        self.new_dispatch = None;
        self.paces.clear();
    }

    /// The way into `fragment`. Nothing leads there but this: chaos forces some of its guards.
    ///
    /// # Errors
    /// A broken invariant of ours.
    pub fn prepare(&mut self, fragment: FragmentId) -> Result<Way, FragmentError> {
        self.stats.fragment_entries += 1;
        self.stats.native_entries += 1;
        let forced = self.force(fragment);
        Ok(Way { fragment, entry: self.emitter.entry_point(fragment)?, forced })
    }

    /// A thread has come out: makes its state exact, links the exit, says what next.
    ///
    /// # Errors
    /// A broken invariant of ours.
    pub fn left(
        &mut self,
        way: Way,
        left: Left,
        context: &mut ThreadContext,
        policy: &dyn SpeculationPolicy,
    ) -> Result<Next, FragmentError> {
        self.restore(way.forced);
        self.link_again(context);
        let exit = match left {
            Left::Exit(exit) => exit,
            Left::Indirect(_) => {
                context.rip = context.next_pc;
                self.stats.indirect.missed += 1;
                self.stats.fragment_ends += 1;
                if let Some(from) = astray::origin(context, self.emitter.transfer(context)) {
                    return Ok(Next::After(After::Astray(from)));
                }
                return Ok(self.find(context.rip).map_or(Next::After(After::CountHead), Next::Enter));
            }
            _ => return Ok(Next::After(After::Pending)),
        };
        self.note_left(exit);
        let deopt = self.emitter.deopt(exit, context)?;
        for store in &deopt.stores {
            perform(store)?;
        }
        if let Some(from) = astray::origin(context, deopt.after) {
            return Ok(Next::After(After::Astray(from)));
        }
        if self.log_exits {
            eprintln!("dynasour: {:?} left through {exit:?} ({:?}) to {:#x}", way.fragment, deopt.kind, context.rip);
        }
        Ok(Next::After(match deopt.kind {
            SiteKind::End | SiteKind::EndIndirect => {
                if let Some(stub) = self.stub_of(exit).filter(|_| deopt.kind == SiteKind::End) {
                    return self.left_stub(exit, stub.origin, context.rip);
                }
                self.stats.fragment_ends += 1;
                let Some(next) = self.find(context.rip) else { return Ok(Next::After(After::CountHead)) };
                if deopt.kind == SiteKind::End && self.chaos.is_none() {
                    return self.link_and_enter(exit, next);
                }
                return Ok(Next::Enter(next));
            }
            SiteKind::Guard if self.chaos.is_some() => {
                self.stats.deopt(DeoptReason::Chaos);
                After::Interpret
            }
            SiteKind::Guard => {
                self.stats.deopt(DeoptReason::Guard);
                self.guard_failed(exit, context.rip, policy)?
            }
            SiteKind::Fault => {
                self.stats.deopt(DeoptReason::Fault);
                After::Interpret
            }
            SiteKind::Poll => {
                self.stats.deopt(DeoptReason::Poll);
                After::Pending
            }
        }))
    }

    /// The stub that leaves by `exit`.
    fn stub_of(&self, exit: ExitId) -> Option<Stub> {
        self.stubs.get(&self.emitter.exit(exit)?.fragment).copied()
    }

    /// The resolved stub of `origin` has left by `exit`, since what it led to rests: it leads to what `origin` may lead to
    /// now, or not anywhere.
    fn left_stub(&mut self, exit: ExitId, origin: ExitId, pc: u64) -> Result<Next, FragmentError> {
        self.wake(pc);
        let own = self.emitter.exit(origin).and_then(|e| (!e.progress).then_some(e.fragment));
        match self.successor(own, pc) {
            Some(next) => self.link_and_enter(exit, next),
            None => {
                self.emitter.unlink(origin)?;
                Ok(Next::After(After::Interpret))
            }
        }
    }

    /// The end `exit` leads to `next` from now on, which is entered.
    fn link_and_enter(&mut self, exit: ExitId, next: FragmentId) -> Result<Next, FragmentError> {
        match self.emitter.link(exit, next) {
            Ok(()) => self.stats.links += 1,
            // No room for a passage.
            Err(error) if error.is_full() => return Ok(Next::After(After::Flush)),
            Err(error) => return Err(error.into()),
        }
        Ok(Next::Enter(next))
    }

    /// A hot exit is linked to where it goes, or asks for a side trace from there.
    fn guard_failed(&mut self, exit: ExitId, pc: u64, policy: &dyn SpeculationPolicy) -> Result<After, FragmentError> {
        if self.retired {
            return Ok(After::Interpret);
        }
        if self.wake_side(exit) {
            return Ok(After::Interpret);
        }
        let Some(e) = self.emitter.exit(exit) else { return Ok(After::Interpret) };
        let (target, own) = (e.target, (!e.progress).then_some(e.fragment));
        let taken = self.taken.entry(exit).or_default();
        *taken += 1;
        let times = *taken;
        if target.is_none() {
            self.aims.went(exit, pc);
        }
        if times < policy.exit_threshold() {
            return Ok(After::Interpret);
        }
        self.taken.insert(exit, 0);
        if target.is_none() && self.indirect.contains(&e.fragment) {
            let head = self.emitter.fragment(e.fragment).map(|f| f.pc);
            self.new_dispatch = head.filter(|pc| self.dispatching.insert(*pc));
        }
        if let Some(pc) = target {
            self.wake(pc);
        }
        let linked = match target {
            None => self.link_computed(exit, own, times),
            Some(pc) => match self.successor(own, pc) {
                Some(next) => self.emitter.link_exit(exit, next),
                None if self.is_full(pc, policy) => {
                    self.drop_changed(pc);
                    return Ok(After::Interpret);
                }
                None => return Ok(After::RecordSide(Side { exit, pc, generation: self.generation })),
            },
        };
        match linked {
            Ok(stub) => {
                self.stats.stubs += 1;
                self.note_stub(stub, exit);
                self.stubs.insert(stub, Stub { origin: exit, in_block: false });
                if self.log_code {
                    eprintln!("dynasour: stub of {exit:?}\n{}", self.emitter.listing(stub).unwrap_or_default());
                }
                Ok(After::Interpret)
            }
            Err(error) if error.is_full() => Ok(After::Flush),
            // The stub cannot be made (its stores need a register too many): the exit goes on to come here.
            Err(_) => Ok(After::Interpret),
        }
    }

    /// The fragment that an exit to `pc` may lead to without endangering progress; `own` is the exit's fragment if it
    /// may have made none.
    fn successor(&self, own: Option<FragmentId>, pc: u64) -> Option<FragmentId> {
        let versions = &self.regions.get(&pc)?.fragments;
        // A version that rests may be back before the exit is taken next.
        match own.filter(|own| self.sources.role(*own) == Some(Role::Region(pc))) {
            Some(own) => versions.iter().find(|version| self.rank(**version) > self.rank(own)).copied(),
            None => versions.first().copied(),
        }
    }

    /// May another exit to `pc` have a trace of its own?
    fn wants_own_trace(&self, pc: u64) -> bool {
        let has_region = self.regions.contains_key(&pc) || self.sources.rests(Role::Region(pc));
        !has_region && self.side_traces.get(&pc).is_none_or(|n| *n < OWN_TRACES)
    }

    fn is_full(&self, pc: u64, policy: &dyn SpeculationPolicy) -> bool {
        self.regions.get(&pc).is_some_and(|r| r.fragments.len() >= policy.max_versions())
    }

    /// The fragment that is entered at `pc`.
    pub fn first(&self, pc: u64) -> Option<FragmentId> {
        self.regions.get(&pc)?.fragments.first().copied()
    }

    /// Does a fragment start at `pc`, and if so, what kind?
    pub fn at(&self, pc: u64) -> Option<Landing> {
        let is_loop = self.loops.contains(&self.first(pc)?);
        Some(match (is_loop, self.dispatching.contains(&pc)) {
            (true, true) => Landing::Dispatch,
            (true, false) => Landing::Loop,
            (false, true) => Landing::LinearDispatch,
            (false, false) => Landing::Ordinary,
        })
    }

    /// A loop's head that [`Fragments::at`] says something new about since the last call.
    pub fn take_new_dispatch(&mut self) -> Option<u64> {
        self.new_dispatch.take()
    }

    /// What a recorded path is to be compiled for; `side` is the exit for which it was recorded. Whether the path is still
    /// good, the caller finds out after this.
    ///
    /// # Errors
    /// Nothing is to be compiled.
    pub fn plan(
        &mut self,
        path: &Path,
        side: Option<Side>,
        config: &RunConfig,
        policy: &dyn SpeculationPolicy,
    ) -> Result<Plan, Failure> {
        if self.retired {
            return Err(Failure::Stale);
        }
        // Loops of an interpreted program are counted by the recorder.
        if path.guest.is_none() && self.is_full(path.head, policy) {
            return Err(Failure::Refused(AbortReason::TooManyVersions));
        }
        let side = side.filter(|s| s.pc == path.head && s.generation == self.generation && self.wants_own_trace(s.pc));
        self.traces += 1;
        let number = self.traces;
        if config.only_traces.as_ref().is_some_and(|only| !only.contains(&number)) {
            return Err(Failure::Refused(AbortReason::NotSelected));
        }
        // An exit that no code can be made for has no trace of its own; the path may still be one of the region.
        let own = side.and_then(|s| Some((s.exit, self.emitter.request(s.pc, EntryState::FromExit(s.exit)).ok()?)));
        let (side, request) = match own {
            Some((exit, request)) => (Some(exit), request),
            None => (None, self.emitter.request(path.head, EntryState::Canonical).map_err(|_| Failure::Stale)?),
        };
        Ok(Plan {
            name: format!("t{number}"),
            facts: if self.private_memory { vec![Fact::PrivateMemory] } else { Vec::new() },
            first: !self.regions.contains_key(&path.head),
            side,
            request,
            generation: self.generation,
            start: Instant::now(),
            times: CompileTimes::default(),
            built: None,
        })
    }

    /// Makes a fragment of the code of a recorded path's optimised version.
    ///
    /// # Errors
    /// It came to nothing.
    pub fn install(
        &mut self,
        mut plan: Plan,
        version: &Version,
        code: CompiledCode,
        path: &Path,
        config: &RunConfig,
    ) -> Result<(), Failure> {
        let first = !self.regions.contains_key(&path.head);
        if plan.generation != self.generation || plan.first != first {
            return Err(Failure::Stale);
        }
        if !self.pays(code.cost(), path, plan.side.is_some()) {
            return Err(Failure::Refused(AbortReason::NoGain));
        }
        let placing = Instant::now();
        let id = self.place(&plan, code).map_err(|error| match error {
            e if e.is_full() => Failure::Full,
            EmitError::Stale => Failure::Stale,
            e => refused(config, version, &e),
        })?;
        plan.times.emit += nanoseconds(placing);
        let shared = plan.side.is_none();
        let (from, alias_guards) = (plan.side, plan.first || path.guest.is_some());
        self.note_made(id, Made { version, path, from, times: plan.times, built: plan.built, alias_guards });
        log(config, Stage::Code, || self.emitter.listing(id).unwrap_or_default());
        if shared {
            let guest = path.guest.is_some();
            let versions = &mut self.regions.entry(path.head).or_default().fragments;
            if !guest {
                versions.push(id);
            } else {
                // It is tried before the others, which its failing entry goes on to.
                if let Some(first) = versions.first() {
                    self.emitter.redirect(*first, id).expect("both are fragments");
                }
                versions.insert(0, id);
                self.guest_loops.insert(id);
            }
            if first || guest {
                self.register(path.head, id);
                if self.heads.threshold != 0 && self.chaos.is_none() {
                    self.emitter.lead_to(id).map_err(|_| Failure::Stale)?;
                }
            }
        } else {
            *self.side_traces.entry(path.head).or_default() += 1;
        }
        if shared && path.jumps_indirectly() {
            self.indirect.insert(id);
        }
        if self.chaos.is_none()
            && path.shape == TraceShape::Linear
            && let Some(last) = path.steps.last()
        {
            // Where it came to is where it goes on.
            self.emitter.make_head(last.next);
        }
        if path.shape == TraceShape::Loop {
            self.loops.insert(id);
            self.stats.loop_fragments += 1;
        }
        self.stats.fragments += 1;
        self.stats.trace_instructions += path.steps.iter().map(|s| u64::from(s.block.count)).sum::<u64>();
        let size = self.emitter.fragment(id).map_or(0, |f| (f.hot.end - f.hot.start) + (f.cold.end - f.cold.start));
        self.stats.code_bytes += size;
        let role = plan.side.map_or(Role::Region(path.head), Role::Side);
        self.sources.add(id, role, path, size);
        self.stats.compile_nanoseconds += plan.start.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// Places the plan's code, and makes the exit that it was compiled for go there.
    fn place(&mut self, plan: &Plan, code: CompiledCode) -> Result<FragmentId, EmitError> {
        let id = self.emitter.place(&plan.request, code)?;
        if let Some(exit) = plan.side {
            self.emitter.attach(exit, id)?;
        }
        Ok(id)
    }

    /// Is code of a path at this cost worth having?
    fn pays(&self, cost: u32, path: &Path, side: bool) -> bool {
        // What is between loops of an interpreted program goes with them.
        let between = path.steps.last().is_some_and(|last| self.dispatching.contains(&last.next));
        if !self.weighs || path.guest.is_some() || between {
            return true;
        }
        let pays = worth::pays(path, cost, side);
        if self.log_worth {
            eprintln!("dynasour: {:#x}, {:?} {}: {pays}", path.head, path.shape, worth::figures(path, cost));
        }
        pays
    }
}

impl Plan {
    /// Builds the path's version and optimises it: what takes time and needs no lock.
    ///
    /// # Errors
    /// Why that cannot be done.
    pub fn version(
        &mut self,
        path: &Path,
        config: &RunConfig,
        policy: &dyn SpeculationPolicy,
    ) -> Result<Version, Failure> {
        let context = Context { facts: self.facts.clone() };
        let building = Instant::now();
        let built = during(Phase::Record, || build::build(path, &self.name, context, policy));
        let mut version = built.map_err(|e| Failure::Refused(e.0))?;
        self.times.build = nanoseconds(building);
        self.built = config.count.as_ref().filter(|count| count.detail).map(|_| version.to_string());
        log(config, Stage::Trace, || version.to_string());
        let alias_guards = self.first || path.guest.is_some();
        let (passes, skip) = (config.passes.clone(), config.skip_passes.clone());
        let options = OptOptions { passes, skip, alias_guards, ..OptOptions::default() };
        let optimising = Instant::now();
        during(Phase::Optimise, || policy.placement().optimise(&mut version, &options));
        self.times.optimise = nanoseconds(optimising);
        log(config, Stage::Opt, || version.to_string());
        Ok(version)
    }

    /// Generates the version's code: for the state of the plan's exit, or, if that cannot be done, for a fragment of the region.
    /// It needs no lock.
    ///
    /// # Errors
    /// The version cannot be compiled.
    pub fn code(
        &mut self,
        version: &Version,
        allocator: &mut Allocator,
        config: &RunConfig,
    ) -> Result<CompiledCode, Failure> {
        let emitting = Instant::now();
        let mut compiled = codegen::compile(version, &self.request, allocator);
        if compiled.is_err() && self.side.take().is_some() {
            // Perhaps too many values were live at once. A fragment of the region does not hold the exit's.
            self.request = self.request.canonical();
            compiled = codegen::compile(version, &self.request, allocator);
        }
        self.times.emit = nanoseconds(emitting);
        compiled.map_err(|error| refused(config, version, &error))
    }
}

/// The emitter refuses the version.
fn refused(config: &RunConfig, version: &Version, error: &dyn std::error::Error) -> Failure {
    log(config, Stage::Record, || format!("{}: {error}", version.name));
    Failure::Refused(AbortReason::Emitter)
}

/// Performs a deferred store. Its page was accessed in the same entry of the fragment, so it cannot fault unless another
/// thread has taken it away since, or an invariant of ours is broken.
fn perform(store: &PendingStore) -> Result<(), FragmentError> {
    let bytes = store.value.to_le_bytes();
    let size = store.size as usize;
    // SAFETY: the guest's own store, of which the trace's anchor says that it happens before the exit.
    let done = unsafe { memory::copy_out(store.address, &bytes[..size]) };
    if done == size { Ok(()) } else { Err(FragmentError::Store(store.address)) }
}

fn nanoseconds(since: Instant) -> u64 {
    since.elapsed().as_nanos() as u64
}

fn log(config: &RunConfig, stage: Stage, text: impl FnOnce() -> String) {
    if config.log.contains(&stage) {
        eprintln!("dynasour: {}", text());
    }
}
