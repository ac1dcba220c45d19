//! The fragment side of the dispatcher: which fragments exist, entering and leaving them.
//!
//! A region may have several fragments, its *versions* ([`links::regions`]); the first is entered,
//! by the interpreter, by links and by the tables of indirect jumps. Ends and hot exits are linked
//! ([`links`]), so that a steady guest never comes back here; a hot exit to where no fragment
//! starts begins a recording there. What is recorded is compiled for the state that this exit
//! leaves ([`EntryState::FromExit`](dynasour_emitter::EntryState)) and belongs to it alone; when
//! several exits have wanted traces from one pc, the next one makes a version of the region, which
//! all others share ([`install`]).
//!
//! **Signals.** The handler unlinks the fragment that it interrupts; lookups and the way in are
//! beyond a fragment's links, so a thread that is there is diverted. Whatever is linked to
//! whatever, it comes out before it enters another fragment. The thread that was interrupted links
//! the fragment again when it is out; others that come out of it meanwhile just enter again.
//!
//! **Threads.** All of this is behind one lock, which no thread holds while guest code runs. A
//! thread that is in fragments, or comes from one, is *in the cache* ([`super::peers`]), and what
//! it may need is kept until it is not: dropping all is done in two steps, [`Fragments::retire`]
//! and [`Fragments::clear`], and so is dropping some ([`removal`]).
//!
//! Under `--chaos` no fragment is linked to: each must be entered from here, where its guards are
//! forced.
//!
//! Example: the loop at 0x1000 is entered by [`Fragments::prepare`], leaves by its end to 0x2000,
//! and [`Fragments::left`] finds a fragment there: the end is linked, and the next time the guest
//! goes from one to the other without the runtime.

mod chaos;
mod head_counting;
mod install;
mod links;
mod lives;
mod notes;
mod removal;
mod room;
mod transitions;

use crate::changes::CodePages;
use crate::changes::host;
use crate::config::{RunConfig, Stage};
use crate::observe::stats::Stats;
use chaos::Forcing;
use dynasour_emitter::blocks::{BlockId, HeadCounts};
use dynasour_emitter::{Config, Diversion, EmitError, Emitter, ExitId, FragmentId, PendingStore};
use dynasour_guest::ThreadContext;
use head_counting::HeadCounting;
pub use links::StubWork;
use links::exits::Exits;
use links::regions::Region;
use lives::{Lives, Role};
use notes::Notes;
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thiserror::Error;

pub use install::Failure;
pub use removal::Touched;
pub use transitions::{AfterNative, Arrival, FoundCode, NativeEntry};

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

/// An exit for which a side trace is being recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SideRequest {
    exit: ExitId,
    pc: u64,
    generation: u64,
}

/// Which stages the user wants to see.
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

/// Emitter, fragment tables, and what happened at exits.
pub struct Fragments {
    emitter: Box<Emitter>,
    regions: FxHashMap<u64, Region>,
    /// How many exits have a trace of their own from this pc.
    side_traces: FxHashMap<u64, u32>,
    /// What is done about each exit.
    exits: Exits,
    /// The life of each fragment.
    lives: Lives,
    pages: Arc<CodePages>,
    /// Heads of loops whose indirect jump keeps going elsewhere.
    dispatching: FxHashSet<u64>,
    /// The last of these that no dispatcher has been told of yet.
    new_dispatch: Option<u64>,
    private_memory: bool,
    /// Under chaos.
    chaos: Option<Forcing>,
    /// Are guest blocks copied? Else fragments run beside the interpreter.
    copies: bool,
    /// Are traces refused that cost more than they save?
    weighs: bool,
    /// Traces built so far, for naming and `--only-trace`.
    traces: u32,
    logs: Logs,
    /// Counts the times when something that a compilation may rely on went away.
    generation: u64,
    /// Between [`Fragments::retire`] and [`Fragments::clear`].
    retired: bool,
    /// See [`Fragments::count_heads`].
    heads: HeadCounts,
    counting: HeadCounting,
    notes: Notes,
    /// A resolved stub that the dispatcher is to compile.
    wanted_stub: Option<StubWork>,
    /// Changes of links since they were verified; see `fragments/links/verify.rs`.
    unverified: usize,
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
        let emitter = room::emitter(Config {
            cache_size,
            count,
            rates,
            returns,
            entry_check,
            names_transfers: false,
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
            weighs: config.weighs_traces(),
            traces: 0,
            logs: Logs::new(config),
            generation: 0,
            retired: false,
            heads: HeadCounts::default(),
            counting: HeadCounting::default(),
            notes: Notes::new(config),
            wanted_stub: None,
            unverified: 0,
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
    fn relink_after_signal(&self, context: &ThreadContext) {
        self.relink(context.unlinked.swap(0, Ordering::Relaxed));
    }

    fn relink(&self, unlinked: u32) {
        match unlinked & !BLOCK {
            0 => {}
            n if unlinked & BLOCK != 0 => self.emitter.relink_block(BlockId(n - 1)),
            n => self.emitter.relink(FragmentId(n - 1)),
        }
    }

    /// From now on traces may not assume `private_memory`. Must existing fragments go?
    pub fn lose_private_memory(&mut self) -> bool {
        if !std::mem::replace(&mut self.private_memory, false) {
            return false;
        }
        self.generation += 1;
        // Those that rest assume it, too, and could be woken.
        !self.lives.is_empty()
    }

    /// From the next [`Fragments::clear`] on transfers name themselves: see
    /// [`Emitter::name_transfers`]. False if they do already.
    pub fn name_transfers(&mut self) -> bool {
        self.emitter.name_transfers()
    }

    /// Makes nothing lead into any fragment any more, and whoever is in one come out. When all are,
    /// somebody must [`Fragments::clear`]. `false` if another thread is about to do that already.
    pub fn retire(&mut self) -> bool {
        if std::mem::replace(&mut self.retired, true) {
            return false;
        }
        self.stats.flushes += 1;
        self.emitter.retire_all();
        self.forget_fragments();
        self.links_changed();
        true
    }

    /// Drops all fragments after [`Fragments::retire`]: every thread has been outside since.
    pub fn clear(&mut self) {
        self.close_ledger();
        self.emitter.flush_all();
        self.generation += 1;
        self.retired = false;
        self.links_changed();
    }

    /// Fresh memory and no fragments, in a forked child.
    pub fn reset_after_fork(&mut self) -> Result<(), FragmentError> {
        self.close_ledger();
        self.forget_fragments();
        self.retired = false;
        self.chaos.iter_mut().for_each(Forcing::after_fork_child);
        Ok(self.emitter.reset_after_fork()?)
    }

    fn forget_fragments(&mut self) {
        self.generation += 1;
        self.regions.clear();
        self.side_traces.clear();
        self.exits.clear();
        self.lives.clear();
        self.dispatching.clear();
        self.new_dispatch = None;
        self.counting.clear();
    }

    /// A loop's head that [`Fragments::at`] says something new about since the last call.
    pub fn take_new_dispatch(&mut self) -> Option<u64> {
        self.new_dispatch.take()
    }
}

/// Performs a deferred store. Its page was accessed in the same entry of the fragment, so it cannot
/// fault unless another thread has taken it away since, or an invariant of ours is broken.
fn perform_store(store: &PendingStore) -> Result<(), FragmentError> {
    let bytes = store.value.to_le_bytes();
    let size = store.size as usize;
    // SAFETY: the guest's own store, of which the trace's anchor says that it happens before the
    // exit.
    let done = unsafe { host::copy_out(store.address, &bytes[..size]) };
    if done == size { Ok(()) } else { Err(FragmentError::Store(store.address)) }
}
