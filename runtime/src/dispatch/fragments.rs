//! The fragment side of the dispatcher: which fragments exist, entering and leaving them, links, side traces.
//!
//! A region may have several fragments, oldest first; the first is entered, by the interpreter, by links and by the
//! lookup of indirect jumps. Ends and hot exits are linked, so that a steady guest never comes back here; a hot exit
//! to where no fragment starts begins a recording there. What is recorded is compiled for the state which that exit
//! leaves ([`EntryState::FromExit`]) and belongs to it alone; when several exits have wanted traces from one pc, the
//! next one makes a fragment of the region, which all others share.
//!
//! **Progress.** An exit whose target is its own fragment's pc may have failed without a guest instruction having
//! run. Unless [`Exit::progress`](dynasour_emitter::Exit::progress) says otherwise it is only ever linked to a *younger*
//! fragment of the region, so a chain of such exits ends, and at its end the interpreter runs an instruction. Every
//! other exit has run one. Younger versions carry no guards against aliasing, which are what fails at a head.
//!
//! **Signals.** The handler unlinks the fragment that it interrupts; lookups and the way in are beyond a fragment's
//! links, so a thread that is there is diverted. Whatever is linked to whatever, it comes out before it enters
//! another fragment.
//!
//! Under `--chaos` nothing is linked: every fragment must be entered from here, where its guards are forced.

use crate::config::{Chaos, RunConfig, Stage};
use crate::memory;
use crate::stats::{DeoptReason, Stats};
use dynasour_emitter::copy::{BlockId, Copied, LinkId};
use dynasour_emitter::{
    Config, Diversion, EmitError, Emitter, EntryState, ExitId, FragmentId, Left, PendingStore, SiteKind,
};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_ir::opt::{self, OptOptions};
use dynasour_ir::{Context, Fact, Version};
use dynasour_tracer::{AbortReason, Landing, Path, SpeculationPolicy, TraceShape, build};
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::time::Instant;
use thiserror::Error;

const PAGE_SHIFT: u32 = 12;

/// So many exits may have a trace of their own from one pc.
const OWN_TRACES: u32 = 3;

/// The emitter of this process, for signal handlers.
static EMITTER: AtomicPtr<Emitter> = AtomicPtr::new(std::ptr::null_mut());
/// One more than the fragment that a signal handler unlinked, or with [`BLOCK`] the copied block; 0 if none.
static UNLINKED: AtomicU32 = AtomicU32::new(0);
const BLOCK: u32 = 1 << 31;

fn emitter_in_handler() -> Option<&'static Emitter> {
    // SAFETY: the pointer is null or that of the emitter that the dispatcher owns until the process ends. A handler
    // asks only when the interrupted instruction is in the code cache, when nothing of the emitter is being changed.
    unsafe { EMITTER.load(Ordering::Relaxed).as_ref() }
}

/// Where a fault of a fragment's own continues. Async-signal-safe.
pub fn fragment_fault(host_rip: u64) -> Option<u64> {
    let emitter = emitter_in_handler().filter(|e| e.cache().range().contains(&host_rip))?;
    emitter.fault_exit(host_rip)
}

/// An asynchronous signal was accepted at `host_rip`: if that is in a fragment, it leaves at its next safe point.
/// Async-signal-safe.
pub fn signal_accepted(host_rip: u64) -> Option<Diversion> {
    let emitter = emitter_in_handler().filter(|e| e.cache().range().contains(&host_rip))?;
    let code = match emitter.fragment_at(host_rip) {
        Some(fragment) => {
            emitter.unlink_for_signal(fragment);
            fragment.0 + 1
        }
        None => match emitter.block_at(host_rip) {
            Some(block) => {
                emitter.unlink_block(block);
                (block.0 + 1) | BLOCK
            }
            None => 0,
        },
    };
    if code != 0 {
        let before = UNLINKED.swap(code, Ordering::Relaxed);
        if before != code {
            // A second signal: nobody is in the first one's code any more.
            relink(emitter, before);
        }
    }
    emitter.diversion(host_rip)
}

/// Undoes what a signal handler did to this code. Async-signal-safe.
fn relink(emitter: &Emitter, unlinked: u32) {
    match unlinked & !BLOCK {
        0 => {}
        n if unlinked & BLOCK != 0 => emitter.relink_block(BlockId(n - 1)),
        n => emitter.relink(FragmentId(n - 1)),
    }
}

/// The fragment side cannot be set up or has broken an invariant.
#[derive(Debug, Error)]
pub enum FragmentError {
    /// From the emitter.
    #[error(transparent)]
    Emit(#[from] EmitError),
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
    RecordSide,
    /// The runtime wanted control.
    Pending,
    /// The cache is full.
    Flush,
}

#[derive(Default)]
struct Region {
    fragments: Vec<FragmentId>,
}

/// Emitter, fragment tables, and what happened at exits.
pub struct Fragments {
    emitter: Box<Emitter>,
    regions: FxHashMap<u64, Region>,
    /// The exit that a side trace is being recorded for, and its target.
    side: Option<(ExitId, u64)>,
    /// How many exits have a trace of their own from this pc.
    side_traces: FxHashMap<u64, u32>,
    /// Times each unlinked exit was taken.
    taken: FxHashMap<ExitId, u32>,
    /// Pages of guest code that fragments were made from.
    pages: FxHashSet<u64>,
    /// Loop fragments, and whether they go through an indirect jump.
    loops: FxHashMap<FragmentId, bool>,
    /// Heads of loops whose indirect jump keeps going elsewhere.
    dispatching: FxHashSet<u64>,
    /// The last of these, if nobody has been told yet.
    new_dispatch: Option<u64>,
    private_memory: bool,
    chaos: Option<(Chaos, u64)>,
    /// Traces built so far, for naming and `--only-trace`.
    traces: u32,
    log_exits: bool,
    log_code: bool,
}

impl Fragments {
    /// An empty cache of the configured size.
    ///
    /// # Errors
    /// This machine lacks something, or there is no memory.
    pub fn new(config: &RunConfig) -> Result<Fragments, FragmentError> {
        let emitter = Box::new(Emitter::new(Config { cache_size: config.cache_size })?);
        EMITTER.store(std::ptr::from_ref(&*emitter).cast_mut(), Ordering::Relaxed);
        Ok(Fragments {
            emitter,
            regions: FxHashMap::default(),
            side: None,
            side_traces: FxHashMap::default(),
            taken: FxHashMap::default(),
            pages: FxHashSet::default(),
            loops: FxHashMap::default(),
            dispatching: FxHashSet::default(),
            new_dispatch: None,
            private_memory: true,
            chaos: config.chaos.map(|c| (c, c.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)),
            traces: 0,
            log_exits: config.log.contains(&Stage::Exit),
            log_code: config.log.contains(&Stage::Code),
        })
    }

    /// Was some fragment made from code in this range?
    pub fn is_made_from(&self, range: &Range<u64>) -> bool {
        if self.emitter.is_copied_from(range) {
            return true;
        }
        let pages = range.start >> PAGE_SHIFT..=range.end.saturating_sub(1) >> PAGE_SHIFT;
        if pages.end() - pages.start() > self.pages.len() as u64 {
            self.pages.iter().any(|p| pages.contains(p))
        } else {
            pages.into_iter().any(|p| self.pages.contains(&p))
        }
    }

    /// The code for the guest code at `pc`, copied now if need be; with `indirect`, indirect transfers will find it.
    pub fn copy(&mut self, pc: u64, code: &dyn Fetch, indirect: bool) -> Result<Copied, EmitError> {
        let copied = self.emitter.copy(pc, code)?;
        if indirect {
            self.emitter.register_copy(pc)?;
        }
        Ok(copied)
    }

    /// Runs copied code.
    pub fn enter_copy(&self, context: &mut ThreadContext, entry: u64) -> Left {
        // SAFETY: `context` is this thread's; `System::start` pointed GS at it; the caller has the entry from `copy`.
        let left = unsafe { self.emitter.enter_copy(context, entry) };
        relink(&self.emitter, UNLINKED.swap(0, Ordering::Relaxed));
        left
    }

    /// The guest pc that a block's exit leads to.
    pub fn copy_exit(&self, link: LinkId) -> Option<u64> {
        self.emitter.copy_exit(link)
    }

    /// The guest's state after a fault in a block; see [`Emitter::copy_state`].
    pub fn copy_state(&mut self, context: &mut ThreadContext, code: &dyn Fetch) -> bool {
        self.emitter.copy_state(context, code)
    }

    /// From now on traces may not assume `private_memory`. Must existing fragments go?
    pub fn lose_private_memory(&mut self) -> bool {
        std::mem::replace(&mut self.private_memory, false) && !self.regions.is_empty()
    }

    /// Drops every fragment.
    pub fn flush(&mut self) {
        self.emitter.flush_all();
        self.forget();
    }

    /// Fresh memory and no fragments, in a forked child.
    pub fn reset_after_fork(&mut self) -> Result<(), FragmentError> {
        self.forget();
        Ok(self.emitter.reset_after_fork()?)
    }

    fn forget(&mut self) {
        self.regions.clear();
        self.side = None;
        self.side_traces.clear();
        self.taken.clear();
        self.pages.clear();
        self.loops.clear();
        self.dispatching.clear();
        self.new_dispatch = None;
        UNLINKED.store(0, Ordering::Relaxed);
    }

    /// Runs the fragment at `context.rip` and what follows it in fragments.
    ///
    /// # Errors
    /// A broken invariant of ours.
    pub fn run(
        &mut self,
        context: &mut ThreadContext,
        policy: &dyn SpeculationPolicy,
        stats: &mut Stats,
    ) -> Result<After, FragmentError> {
        let Some(mut fragment) = self.first(context.rip) else { return Ok(After::Interpret) };
        loop {
            stats.fragment_entries += 1;
            let forced = self.force(fragment);
            // SAFETY: `context` is this thread's; `System::start` pointed GS at it.
            let left = unsafe { self.emitter.enter(context, fragment) }?;
            self.restore(forced);
            relink(&self.emitter, UNLINKED.swap(0, Ordering::Relaxed));
            let Left::Exit(exit) = left else { return Ok(After::Pending) };
            let deopt = self.emitter.deopt(exit, context)?;
            for store in &deopt.stores {
                perform(store);
            }
            if self.log_exits {
                eprintln!("dynasour: {fragment:?} left through {exit:?} ({:?}) to {:#x}", deopt.kind, context.rip);
            }
            let next = self.first(context.rip);
            match deopt.kind {
                SiteKind::End | SiteKind::EndIndirect => {
                    stats.fragment_ends += 1;
                    let Some(next) = next else { return Ok(After::CountHead) };
                    if deopt.kind == SiteKind::End && self.chaos.is_none() {
                        self.emitter.link(exit, next)?;
                        stats.links += 1;
                    }
                    fragment = next;
                }
                SiteKind::Guard => {
                    let chaos = self.chaos.is_some();
                    stats.deopt(if chaos { DeoptReason::Chaos } else { DeoptReason::Guard });
                    return if chaos { Ok(After::Interpret) } else { self.guard_failed(exit, policy, stats) };
                }
                SiteKind::Fault => {
                    stats.deopt(DeoptReason::Fault);
                    return Ok(After::Interpret);
                }
                SiteKind::Poll => {
                    stats.deopt(DeoptReason::Poll);
                    return Ok(After::Pending);
                }
            }
        }
    }

    /// A hot exit is linked to where it goes, or asks for a side trace from there.
    fn guard_failed(
        &mut self,
        exit: ExitId,
        policy: &dyn SpeculationPolicy,
        stats: &mut Stats,
    ) -> Result<After, FragmentError> {
        let taken = self.taken.entry(exit).or_default();
        *taken += 1;
        if *taken < policy.exit_threshold() {
            return Ok(After::Interpret);
        }
        *taken = 0;
        let Some(e) = self.emitter.exit(exit) else { return Ok(After::Interpret) };
        let (target, own) = (e.target, (!e.progress).then_some(e.fragment));
        if target.is_none() && self.loops.get(&e.fragment) == Some(&true) {
            let head = self.emitter.fragment(e.fragment).map(|f| f.pc);
            self.new_dispatch = head.filter(|pc| self.dispatching.insert(*pc));
        }
        let linked = match target {
            None => self.emitter.link_indirect_exit(exit),
            Some(pc) => match self.successor(own, pc) {
                Some(next) => self.emitter.link_exit(exit, next),
                None if self.is_full(pc, policy) => return Ok(After::Interpret),
                None => {
                    self.side = Some((exit, pc));
                    return Ok(After::RecordSide);
                }
            },
        };
        match linked {
            Ok(stub) => {
                stats.stubs += 1;
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
        match versions.iter().position(|f| Some(*f) == own) {
            Some(own) => versions.get(own + 1).copied(),
            None => versions.first().copied(),
        }
    }

    /// May another exit to `pc` have a trace of its own?
    fn wants_own_trace(&self, pc: u64) -> bool {
        !self.regions.contains_key(&pc) && self.side_traces.get(&pc).is_none_or(|n| *n < OWN_TRACES)
    }

    fn is_full(&self, pc: u64, policy: &dyn SpeculationPolicy) -> bool {
        self.regions.get(&pc).is_some_and(|r| r.fragments.len() >= policy.max_versions())
    }

    fn first(&self, pc: u64) -> Option<FragmentId> {
        self.regions.get(&pc)?.fragments.first().copied()
    }

    /// Does a fragment start at `pc`, and if so, what kind?
    pub fn at(&self, pc: u64) -> Option<Landing> {
        Some(match self.loops.get(&self.first(pc)?) {
            None => Landing::Ordinary,
            Some(_) if self.dispatching.contains(&pc) => Landing::Dispatch,
            Some(_) => Landing::Loop,
        })
    }

    /// A loop's head that [`Fragments::at`] says something new about since the last call.
    pub fn take_new_dispatch(&mut self) -> Option<u64> {
        self.new_dispatch.take()
    }

    /// Compiles a recorded path into a fragment of its head's region.
    pub fn compile(
        &mut self,
        path: &Path,
        config: &RunConfig,
        policy: &dyn SpeculationPolicy,
        stats: &mut Stats,
    ) -> Result<(), AbortReason> {
        if self.is_full(path.head, policy) {
            return Err(AbortReason::TooManyVersions);
        }
        let side =
            self.side.take().filter(|(_, pc)| *pc == path.head && self.wants_own_trace(*pc)).map(|(exit, _)| exit);
        let start = Instant::now();
        self.traces += 1;
        let number = self.traces;
        if config.only_traces.as_ref().is_some_and(|only| !only.contains(&number)) {
            return Err(AbortReason::NotSelected);
        }
        let facts = if self.private_memory { vec![Fact::PrivateMemory] } else { Vec::new() };
        let mut version = build::build(path, &format!("t{number}"), Context { facts }, policy).map_err(|e| e.0)?;
        log(config, Stage::Trace, || version.to_string());
        let first = !self.regions.contains_key(&path.head);
        let options = OptOptions { skip: config.skip_passes.clone(), alias_guards: first, ..OptOptions::default() };
        opt::optimise(&mut version, &options);
        log(config, Stage::Opt, || version.to_string());
        let (id, shared) = self.emit(&version, side).map_err(|error| match error {
            e if e.is_full() => AbortReason::Flushed,
            e => {
                log(config, Stage::Record, || format!("{}: {e}", version.name));
                AbortReason::Emitter
            }
        })?;
        log(config, Stage::Code, || self.emitter.listing(id).unwrap_or_default());
        if shared {
            self.regions.entry(path.head).or_default().fragments.push(id);
            if first && self.chaos.is_none() {
                self.emitter.register_entry(path.head, id).expect("the fragment was compiled for this pc");
            }
        } else {
            *self.side_traces.entry(path.head).or_default() += 1;
        }
        for step in &path.steps {
            let last = step.block.end.saturating_sub(1).max(step.block.pc);
            self.pages.extend(step.block.pc >> PAGE_SHIFT..=last >> PAGE_SHIFT);
        }
        if path.shape == TraceShape::Loop {
            self.loops.insert(id, path.jumps_indirectly());
            stats.loop_fragments += 1;
        }
        stats.fragments += 1;
        stats.trace_instructions += path.steps.iter().map(|s| u64::from(s.block.count)).sum::<u64>();
        if let Some(f) = self.emitter.fragment(id) {
            stats.code_bytes += (f.hot.end - f.hot.start) + (f.cold.end - f.cold.start);
        }
        stats.compile_nanoseconds += start.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// Compiles for the state of an exit, and makes the exit go there, or as a fragment of the region. Is it the
    /// region's?
    fn emit(&mut self, version: &Version, side: Option<ExitId>) -> Result<(FragmentId, bool), EmitError> {
        if let Some(exit) = side {
            match self.emitter.compile(version, EntryState::FromExit(exit)) {
                Ok(id) => {
                    self.emitter.attach(exit, id)?;
                    return Ok((id, false));
                }
                Err(error) if error.is_full() => return Err(error),
                // Perhaps too many values at once: the region's own fragment may do.
                Err(_) => {}
            }
        }
        Ok((self.emitter.compile(version, EntryState::Canonical)?, true))
    }

    /// Chaos: forces some guards of a fragment; gives back which.
    fn force(&mut self, fragment: FragmentId) -> Vec<ExitId> {
        let Some((chaos, random)) = &mut self.chaos else { return Vec::new() };
        let exits = self.emitter.fragment(fragment).map_or(0..0, |f| f.exits.clone());
        let mut forced = Vec::new();
        for exit in exits.map(ExitId) {
            if self.emitter.exit(exit).is_none_or(|e| e.kind != SiteKind::Guard) {
                continue;
            }
            // xorshift64*
            *random ^= *random >> 12;
            *random ^= *random << 25;
            *random ^= *random >> 27;
            let draw = random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
            if draw % u64::from(chaos.one_in) == 0 && self.emitter.force_guard(exit, true).is_ok() {
                forced.push(exit);
            }
        }
        forced
    }

    fn restore(&mut self, forced: Vec<ExitId>) {
        for exit in forced {
            self.emitter.force_guard(exit, false).expect("it was forced a moment ago");
        }
    }
}

/// Performs a deferred store. Its page was accessed in the same entry of the fragment, so it cannot fault unless an
/// invariant of ours is broken.
fn perform(store: &PendingStore) {
    let bytes = store.value.to_le_bytes();
    let size = store.size as usize;
    // SAFETY: the guest's own store, of which the trace's anchor says that it happens before the exit.
    let done = unsafe { memory::copy_out(store.address, &bytes[..size]) };
    assert_eq!(done, size, "a deferred store to {:#x} faulted", store.address);
}

fn log(config: &RunConfig, stage: Stage, text: impl FnOnce() -> String) {
    if config.log.contains(&stage) {
        eprintln!("dynasour: {}", text());
    }
}
