//! The fragments of a process: which exist, where they start, and what is done about their exits.
//!
//! | file | |
//! | --- | --- |
//! | [`transitions`] | into native code and out of it |
//! | [`links`] | which exit leads where; the versions of a region |
//! | [`install`] | a recorded path becomes a fragment |
//! | [`lives`] | the record of each fragment |
//! | [`order`] | which loop of an interpreted program is tried first |
//! | [`removal`] | guest code has changed |
//! | [`undo`] | an assumption does not hold any more |
//! | [`relocation`] | the code cache moves elsewhere |
//! | [`head_counting`] | counters of heads, and pauses of counting |
//! | [`chaos`] | guards that are forced to fail |
//! | [`telling`] | what subscribers to events are told |
//! | [`reporting`] | what statistics, the ledger and the perf map are told |
//!
//! A region may have several fragments, its *versions* ([`links::regions`]). The first version is
//! the one that the interpreter, links and the tables of indirect jumps enter. Ends and hot exits
//! are linked ([`links`]), so that a guest in a steady state does not come to the runtime. A hot
//! exit begins a recording if no fragment starts at its target. The side trace is compiled for the
//! state that this exit leaves ([`EntryState::FromExit`](dynasour_emitter::EntryState)), and only
//! this exit leads to it. When several exits have wanted traces from one pc, the next recording
//! makes a version of the region, which all others share ([`install`]).
//!
//! **Signals.** The handler of an asynchronous signal unlinks the fragment or block that it has
//! interrupted. Where that does not suffice (in lookups, and on the way into native code), the
//! handler diverts the thread. So the thread comes to the runtime before it enters another
//! fragment, and then links the fragment again. Other threads that came out of the unlinked
//! fragment meanwhile just enter it again.
//!
//! **Threads.** Data: [`Fragments`], one for the process, behind one lock, which no thread holds
//! while it executes guest code. A thread that runs native code, or has just left it, is *in the
//! cache* ([`super::peers`]), and nothing that it may need is freed. So dropping everything takes
//! two steps, [`Fragments::retire`] and [`Fragments::clear`], and so does dropping some fragments
//! ([`removal`]).
//!
//! Invariant: while everything is *retired*, no fragment or block is made and none is entered.
//! Under `--chaos` no link leads to a fragment: each is entered from the runtime, which forces its
//! guards.
//!
//! Example: the loop at 0x1000 is found by [`Fragments::find_code`] and entered. It leaves by its
//! end to 0x2000; [`Fragments::after_native`] returns [`Arrival::End`], and the next `find_code`
//! links the end to the fragment at 0x2000. From then on the guest goes from one to the other
//! without the runtime.

mod chaos;
mod entrances;
mod head_counting;
mod install;
mod links;
mod lives;
mod order;
mod race;
mod relocation;
mod removal;
mod reporting;
mod telling;
mod transitions;
mod turns;
mod undo;

use crate::changes::CodePages;
use crate::changes::host;
use crate::config::{RunConfig, Stage, Tier};
use crate::dispatch::select::judge;
use crate::kernel::entry::ways_out;
use crate::observe::events::{self, Event};
use crate::observe::stats::Stats;
use crate::observe::watch::WatchError;
use chaos::Forcing;
use dynasour_emitter::blocks::{BlockId, HeadCounts};
use dynasour_emitter::{Config, Diversion, EmitError, Emitter, ExitId, FragmentId, PendingStore};
use dynasour_guest::ThreadContext;
use dynasour_tracer::worth::Judge;
use head_counting::HeadCounting;
pub use links::StubWork;
use links::exits::Exits;
use links::regions::Region;
use lives::{Lives, Role};
use order::Orders;
pub use race::Racer;
use race::Races;
use reporting::Notes;
pub use reporting::SamplePlace;
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thiserror::Error;

pub use install::{Draft, Failure, Plan};
pub use removal::Touched;
pub use transitions::{AfterNative, Arrival, FoundCode, NativeEntry};
pub use undo::Undone;

/// In [`ThreadContext::unlinked`]: the number is that of a copied block, not of a fragment.
const BLOCK: u32 = 1 << 31;

/// Native code cannot be set up, or has broken an invariant.
#[derive(Debug, Error)]
pub enum FragmentError {
    /// The file of `--jitdump` cannot be made.
    #[error(transparent)]
    Watch(#[from] WatchError),
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

/// An exit for which a side trace is wanted or being recorded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SideRequest {
    exit: ExitId,
    /// The exit's target.
    pc: u64,
    /// [`Fragments::generation`] when the trace was wanted. If it has changed, the exit may be
    /// gone.
    generation: u64,
}

/// Which log lines the user wants to see.
struct Logs {
    exits: bool,
    worth: bool,
    code: bool,
}

impl Logs {
    fn new(config: &RunConfig) -> Logs {
        let wants = |stage| config.log.contains(&stage);
        Logs { exits: wants(Stage::Exit), worth: wants(Stage::Record), code: wants(Stage::Code) }
    }
}

/// All fragments and blocks of a process, and what is known of their exits; see the module.
pub struct Fragments {
    emitter: Box<Emitter>,
    /// The versions of each region, by its pc.
    regions: FxHashMap<u64, Region>,
    /// The number of exits that have a side trace of their own from this pc.
    side_traces: FxHashMap<u64, u32>,
    /// The state of each exit.
    exits: Exits,
    /// The record of each fragment.
    lives: Lives,
    pages: Arc<CodePages>,
    /// The pcs of fragments whose indirect jump has changing targets.
    dispatching: FxHashSet<u64>,
    /// The pc added last to `dispatching`, if no dispatcher has been told of it yet.
    new_dispatch: Option<u64>,
    /// May traces assume `private_memory`?
    private_memory: bool,
    /// The guards forced under `--chaos`; none in other runs.
    chaos: Option<Forcing>,
    /// Are guest blocks copied? Otherwise all code without a fragment is interpreted.
    copies: bool,
    /// Does guest code run in place? Then [`Fragments::copies`] is true, and native code leads to
    /// it as it would to blocks.
    in_place: bool,
    /// Refuses traces that cost more than they save; `None` if none are refused.
    judge: Option<Judge>,
    /// See [`race`].
    races: Races,
    /// See [`order`].
    orders: Orders,
    /// Traces built so far, for naming and `--only-trace`.
    traces: u32,
    logs: Logs,
    /// Incremented whenever something goes away that a compilation under way may rely on.
    generation: u64,
    /// Set from [`Fragments::retire`] to [`Fragments::clear`]: some threads may still be in the
    /// code that is to be dropped.
    retired: bool,
    /// See [`Fragments::count_heads`].
    heads: HeadCounts,
    counting: HeadCounting,
    notes: Notes,
    /// The guards that a subscriber to events knows by name.
    sites: telling::Sites,
    /// A resolved stub that the dispatcher is to compile.
    wanted_stub: Option<StubWork>,
    /// The number of changes of links since they were verified; see `fragments/links/verify.rs`.
    unverified: usize,
    /// Counts of what happened to fragments.
    pub stats: Stats,
}

impl Fragments {
    /// An empty cache of the configured size. Do indirect transfers name themselves?
    ///
    /// # Errors
    /// The processor lacks a feature, or there is no memory.
    pub fn new(
        config: &RunConfig,
        pages: Arc<CodePages>,
        names_transfers: bool,
    ) -> Result<Fragments, FragmentError> {
        let count = config.count.is_some();
        let rates = count || config.stats;
        let &RunConfig { cache_size, returns, entry_check, .. } = config;
        let emitter = relocation::emitter(Config {
            cache_size,
            count,
            rates,
            returns,
            entry_check,
            names_transfers,
            is_watched: config.is_watched(),
            way_out: (config.tier == Tier::Direct).then_some(ways_out::make as _),
        })?;
        if config.count.is_some() && !emitter.is_counting() {
            return Err(FragmentError::Counters);
        }
        Ok(Fragments {
            emitter: Box::new(emitter),
            regions: FxHashMap::default(),
            side_traces: FxHashMap::default(),
            exits: Exits::default(),
            lives: Lives::default(),
            pages,
            dispatching: FxHashSet::default(),
            new_dispatch: None,
            private_memory: true,
            chaos: config.chaos.map(Forcing::new),
            copies: config.copies_blocks(),
            in_place: config.tier == Tier::Direct,
            judge: config.weighs_traces().then(|| judge(config)),
            races: Races::new(config.races().then_some(config.race)),
            orders: Orders::default(),
            traces: 0,
            logs: Logs::new(config),
            generation: 0,
            retired: false,
            heads: HeadCounts::default(),
            counting: HeadCounting::default(),
            notes: Notes::new(config),
            sites: telling::Sites::default(),
            wanted_stub: None,
            unverified: 0,
            stats: Stats::default(),
        })
    }

    /// The addresses of the code cache.
    pub fn cache(&self) -> Range<u64> {
        self.emitter.cache().range()
    }

    /// All memory that native code needs: the guest must not map over it.
    pub fn memory(&self) -> Vec<Range<u64>> {
        self.emitter.memory()
    }

    /// Where a thread continues whose native code faulted at `host_rip`; none if that instruction
    /// may not fault. Async-signal-safe.
    pub fn fault_exit(&self, host_rip: u64) -> Option<u64> {
        self.emitter.fault_exit(host_rip)
    }

    /// The thread of `context` was interrupted by a signal at `host_rip`: unlinks its fragment or
    /// block, so that it comes to the runtime. Returns where it must continue if unlinking does not
    /// suffice. Async-signal-safe.
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
            // A signal before may have unlinked other code, which the thread has left since.
            self.relink(context.unlinked.swap(code, Ordering::Relaxed));
        }
        self.emitter.diversion(host_rip)
    }

    /// The thread of `context` has come to the runtime: links again what its signal handler has
    /// unlinked.
    fn relink_after_signal(&self, context: &ThreadContext) {
        self.relink(context.unlinked.swap(0, Ordering::Relaxed));
    }

    /// Links the fragment or block again that `unlinked` names, a value of
    /// [`ThreadContext::unlinked`]; 0 names none.
    fn relink(&self, unlinked: u32) {
        match unlinked & !BLOCK {
            0 => {}
            n if unlinked & BLOCK != 0 => self.emitter.relink_block(BlockId(n - 1)),
            n => self.emitter.relink(FragmentId(n - 1)),
        }
    }

    /// Changes when guest code is touched or everything is dropped.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// From now on traces may not assume `private_memory`. Must existing fragments be dropped?
    pub fn lose_private_memory(&mut self) -> bool {
        if !std::mem::replace(&mut self.private_memory, false) {
            return false;
        }
        self.generation += 1;
        // Resting fragments assume it, too, and could be woken.
        !self.lives.is_empty()
    }

    /// From the next [`Fragments::clear`] on indirect transfers store their pc: see
    /// [`Emitter::name_transfers`]. False if they do already.
    pub fn name_transfers(&mut self) -> bool {
        self.emitter.name_transfers()
    }

    /// Makes all native code lead to the runtime, so that every thread in it comes out. When they
    /// are out, the caller must [`Fragments::clear`]. `false` if another thread is doing that
    /// already.
    pub fn retire(&mut self) -> bool {
        if std::mem::replace(&mut self.retired, true) {
            return false;
        }
        self.stats.flushes += 1;
        events::emit(|| Event::Flush);
        self.emitter.retire_all();
        self.forget_fragments();
        self.links_changed();
        true
    }

    /// Drops all native code. Every thread has been outside the cache since [`Fragments::retire`].
    pub fn clear(&mut self) {
        self.close_ledger();
        self.emitter.flush_all();
        self.generation += 1;
        self.retired = false;
        self.links_changed();
    }

    /// In a forked child: drops everything, and takes fresh memory for the code cache.
    ///
    /// # Errors
    /// There is no memory.
    pub fn reset_after_fork(&mut self) -> Result<(), FragmentError> {
        self.stop_jitdump();
        self.close_ledger();
        self.forget_fragments();
        self.retired = false;
        self.chaos.iter_mut().for_each(Forcing::after_fork_child);
        Ok(self.emitter.reset_after_fork()?)
    }

    /// Forgets all fragments, whose code is about to be dropped.
    fn forget_fragments(&mut self) {
        self.generation += 1;
        self.regions.clear();
        self.side_traces.clear();
        self.exits.clear();
        self.lives.clear();
        self.sites.clear();
        self.dispatching.clear();
        self.new_dispatch = None;
        self.counting.clear();
        self.races.clear();
        self.orders.clear();
    }

    /// A pc for which [`Fragments::kind_at`] has changed to one with changing targets since the
    /// last call.
    pub fn take_new_dispatch(&mut self) -> Option<u64> {
        self.new_dispatch.take()
    }
}

/// Performs a deferred store. Its bytes were written before in the same entry of the fragment, so
/// it cannot fault unless another thread has unmapped the page since, or an invariant is broken.
///
/// # Errors
/// The memory cannot be written.
fn perform_store(store: &PendingStore) -> Result<(), FragmentError> {
    let bytes = store.value.to_le_bytes();
    let size = store.size as usize;
    // SAFETY: the guest performs this store before it comes to the exit; the trace's anchor has
    // deferred it.
    let done = unsafe { host::copy_out(store.address, &bytes[..size]) };
    if done == size { Ok(()) } else { Err(FragmentError::Store(store.address)) }
}
