//! The emitter: owner of all generated code.
//!
//! **Data.** [`Emitter`] holds the code cache, the stubs, fragments with their exits and links, the
//! tables of indirect jumps, and copied blocks. Its methods are in the modules of this folder:
//!
//! | module | methods |
//! | --- | --- |
//! | [`compile`] | requests for code generation |
//! | [`placing`] | compiled code becomes a fragment |
//! | [`copies`] | copied blocks: made, entered, removed, counted |
//! | [`links`] | which code leads where; the verifier |
//! | [`counts`] | what fragments have counted |
//! | [`race`] | a trace and its blocks by turns |
//! | [`listing`] | disassembly |
//!
//! A fragment's life: [`Emitter::place`] makes it of compiled code. [`Emitter::enter`] runs it
//! until it leaves by some exit. For a raw exit [`Emitter::deopt`] rebuilds the guest's state. An
//! exit that is taken often is [linked](Emitter::link) to another fragment. [`Emitter::flush_all`]
//! drops everything but the stubs, and all ids with it.
//!
//! **Who calls.** One thread at a time, under the runtime's lock. Threads run generated code
//! without it, through an [`EntryPoint`]. Signal handlers, which take no lock and allocate nothing,
//! may call [`Emitter::fragment_at`], [`Emitter::fault_exit`], [`Emitter::diversion`],
//! [`Emitter::unlink_for_signal`] and [`Emitter::relink`], and read the addresses in
//! [`Emitter::stubs`].

mod compile;
mod copies;
mod counts;
pub mod links;
mod listing;
mod placing;
pub mod race;

use crate::blocks::{self, Blocks, CounterId, LOADED, LinkId, WayOut};
use crate::cache::{Cache, writer};
use crate::codegen::Allocator;
use crate::codegen::mach::SiteKind;
use crate::cpu::Cpu;
pub use crate::error::EmitError;
use crate::fragment::counting::Counting;
use crate::fragment::{Exit, ExitId, Fragment, FragmentId, GuardJump, fragment_at, set_target};
use crate::record::PendingStore;
use crate::stubs::{self, ABORTED, Stubs};
use crate::transfers::entry_check::EntryCheck;
use crate::transfers::indirect::{Displaced, Diversion, InCheck, Indirect, MISSED, Via};
use crate::transfers::stack_returns::{Kept, Returns};
pub use compile::{CompiledStub, StubRequest, StubTarget};
use dynasour_guest::context::{TRAP_FLAG, ThreadContext};
use links::passages::Way;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// In which state a fragment is entered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryState {
    /// Every guest register in its own host register, flags in the host's flags.
    Canonical,
    /// In the state in which this guard's exit leaves: the version's entry parameters are the guest
    /// state at the exit's target. [`Emitter::attach`] then makes the exit go there.
    FromExit(ExitId),
}

/// How the emitter is set up.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of code cache.
    pub cache_size: usize,
    /// Do fragments count how often their parts run? See [`crate::fragment::counting`].
    pub count: bool,
    /// Do indirect transfers count how they find their destination? See [`Rates`](crate::Rates).
    pub rates: bool,
    /// How do copied blocks return?
    pub returns: Returns,
    /// How checked entries compare. `None` chooses the fastest comparison on this processor.
    pub entry_check: Option<EntryCheck>,
    /// Do indirect transfers name themselves? See [`Emitter::name_transfers`].
    pub names_transfers: bool,
    /// Is it noted which native code is for which IR instruction ([`CompiledCode::positions`]), and which
    /// blocks are new ([`Emitter::take_new_blocks`])? Counting fragments note the former anyway.
    ///
    /// [`CompiledCode::positions`]: crate::codegen::CompiledCode::positions
    pub is_watched: bool,
    /// If guest code runs in place, how native code leaves to it. Then no blocks are copied.
    pub way_out: Option<WayOut>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            cache_size: 64 << 20,
            count: false,
            rates: false,
            returns: Returns::Auto,
            entry_check: None,
            names_transfers: false,
            is_watched: false,
            way_out: None,
        }
    }
}

/// The meaning of an exit. `ctx` holds the guest's exact state now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Deopt {
    /// The exit.
    pub exit: ExitId,
    /// What kind of place it is.
    pub kind: SiteKind,
    /// The indirect jump, call or return that computed the pc, right before it; if one did.
    pub after: Option<u64>,
    /// Deferred stores to perform, oldest first.
    pub stores: SmallVec<[PendingStore; 4]>,
}

/// How a run of guest code ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExitReason {
    /// No guest code ran: the runtime wanted control.
    Aborted,
    /// Through this exit; call [`Emitter::deopt`].
    Exit(ExitId),
    /// Through this exit of a copied block, in canonical state; see [`Emitter::copy_exit`].
    Block(LinkId),
    /// A counter of the copy tier reached zero, in canonical state; see [`Emitter::counted`].
    Hot(CounterId),
    /// By an indirect transfer to `next_pc`, in canonical state.
    Indirect(Via),
    /// An instruction of a copied block faulted; see [`Emitter::copy_state`].
    Fault,
    /// The guest's code at `next_pc` has changed since the copied block was made from it; see
    /// [`Emitter::copied_stale`].
    Stale,
    /// Out of guest code that ran in place; the runtime knows why.
    InPlace,
}

impl ExitReason {
    /// The reason that an `exit_site` stands for.
    pub fn of(site: u64) -> ExitReason {
        if site == ABORTED {
            return ExitReason::Aborted;
        }
        const LAST_MISSED: u32 = MISSED + Via::COUNT as u32 - 1;
        match site as u32 {
            missed @ MISSED..=LAST_MISSED => ExitReason::Indirect(
                Via::from_index((missed - MISSED) as usize).unwrap_or(Via::Memory),
            ),
            blocks::FAULT => ExitReason::Fault,
            blocks::STALE => ExitReason::Stale,
            blocks::IN_PLACE_LEFT => ExitReason::InPlace,
            counter @ blocks::FIRST_COUNTER.. => {
                ExitReason::Hot(CounterId(counter - blocks::FIRST_COUNTER))
            }
            link @ blocks::FIRST_LINK.. => ExitReason::Block(LinkId(link - blocks::FIRST_LINK)),
            exit => ExitReason::Exit(ExitId(exit)),
        }
    }
}

/// Where to enter a fragment; good until a flush that does not wait for this thread.
#[derive(Clone, Copy, Debug)]
pub struct EntryPoint {
    pub(crate) stubs: u64,
    pub(crate) code: u64,
    /// The value for [`LOADED`]: the copied block that `code` goes on to.
    pub(crate) loaded: u64,
    /// The generation of which the thread's landings must be, if blocks return through the stack.
    pub(crate) kept: Option<Kept>,
}

impl EntryPoint {
    /// Runs the fragment, and whatever it is linked to, on the guest state in `ctx` until it
    /// leaves.
    ///
    /// # Safety
    /// The fragment has not been flushed. `ctx` is this thread's context and its GS base points
    /// there ([`crate::stubs::set_gs`]). The fragment runs guest code, with all that it may do to
    /// this address space.
    pub unsafe fn run(self, ctx: *mut ThreadContext) -> ExitReason {
        // SAFETY: the addresses are those of the stub and of a fragment of one emitter; the rest is
        // the caller's promise.
        let site = unsafe {
            if let Some(kept) = self.kept {
                kept.prepare(ctx);
            }
            (*ctx).stub_save[LOADED] = self.loaded;
            let site = stubs::enter(self.stubs, ctx, self.code);
            // A debugger that steps through the stubs leaves its TF there; the guest's own is never
            // set in native code.
            (*ctx).rflags &= !TRAP_FLAG;
            (*ctx).raw_flags &= !TRAP_FLAG;
            site
        };
        ExitReason::of(site)
    }
}

/// Compiler of versions and owner of their code.
pub struct Emitter {
    pub(crate) cache: Cache,
    pub(crate) cpu: Cpu,
    pub(crate) stubs: Stubs,
    pub(crate) fragments: Vec<Fragment>,
    pub(crate) exits: Vec<Exit>,
    pub(crate) passages: FxHashMap<Way, FragmentId>,
    pub(crate) indirect: Indirect,
    pub(crate) blocks: Blocks,
    /// For what is compiled and placed at once.
    pub(crate) allocator: Allocator,
    pub(crate) counting: Option<Counting>,
    /// Do indirect transfers name themselves from the next flush on?
    will_name: bool,
    /// [`Config::is_watched`].
    is_watched: bool,
    /// Between [`Emitter::retire_all`] and the next flush.
    pub(crate) retired: bool,
    /// Times that everything was dropped.
    pub(crate) epoch: u64,
}

impl Emitter {
    /// An emitter with an empty cache.
    pub fn new(config: Config) -> Result<Emitter, EmitError> {
        let cpu = Cpu::detect();
        let mut cache = Cache::new(config.cache_size)?;
        let stubs = Stubs::generate(&mut cache, &cpu)?;
        let entry_check = EntryCheck::on(&cpu, config.entry_check);
        let mut indirect =
            Indirect::new(&mut cache, stubs.leave_canonical, config.rates, entry_check, cpu.bmi2)?;
        indirect.name_transfers(config.names_transfers);
        let mut blocks =
            Blocks::new(&mut cache, &cpu, &stubs, &mut indirect, config.returns, config.way_out)?;
        if config.is_watched {
            blocks.note_new();
        }
        cache.set_floor();
        let counting = if config.count { Counting::new(&cache.range()) } else { None };
        Ok(Emitter {
            cache,
            cpu,
            stubs,
            fragments: Vec::new(),
            exits: Vec::new(),
            passages: FxHashMap::default(),
            indirect,
            blocks,
            allocator: Allocator::default(),
            counting,
            will_name: config.names_transfers,
            is_watched: config.is_watched,
            retired: false,
            epoch: 0,
        })
    }

    /// From the next flush on indirect jumps, calls and returns store their pc, so that
    /// [`Emitter::transfer`] can say which one led to an address without code. That costs a store
    /// each. False if they do already.
    pub fn name_transfers(&mut self) -> bool {
        self.will_name = true;
        !self.indirect.names_transfers()
    }

    /// Has [`Emitter::name_transfers`] been called?
    pub fn will_name_transfers(&self) -> bool {
        self.will_name
    }

    /// [`Config::is_watched`].
    pub fn is_watched(&self) -> bool {
        self.is_watched
    }

    /// The guest pc of the indirect jump, call or return by which native code has left, if they
    /// name themselves.
    pub fn transfer(&self, context: &ThreadContext) -> Option<u64> {
        (self.indirect.names_transfers() && context.transfer != 0).then_some(context.transfer)
    }

    /// The tables and stubs of indirect jumps.
    pub fn indirect(&self) -> &Indirect {
        &self.indirect
    }

    /// The transition stubs.
    pub fn stubs(&self) -> &Stubs {
        &self.stubs
    }

    /// The code cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// All memory of the emitter's: the guest must not map over it.
    pub fn memory(&self) -> Vec<std::ops::Range<u64>> {
        let tables = self.indirect.memory();
        let counts = self.counting.iter().map(Counting::memory);
        let fragments = self.cache.memory().into_iter().chain(tables).chain(counts);
        fragments.chain(self.blocks.memory()).collect()
    }

    /// All fragments since the last flush, by id.
    pub fn fragments(&self) -> &[Fragment] {
        &self.fragments
    }

    /// A fragment.
    pub fn fragment(&self, id: FragmentId) -> Option<&Fragment> {
        self.fragments.get(id.0 as usize)
    }

    /// An exit.
    pub fn exit(&self, id: ExitId) -> Option<&Exit> {
        self.exits.get(id.0 as usize)
    }

    /// Where to enter a fragment, for a thread that does not have the emitter while it is there.
    pub fn entry_point(&self, fragment: FragmentId) -> Result<EntryPoint, EmitError> {
        let code = self.fragment(fragment).ok_or(EmitError::Unknown)?.entry;
        Ok(EntryPoint {
            stubs: self.stubs.enter,
            code,
            loaded: 0,
            kept: self.indirect.returns().kept(),
        })
    }

    /// Runs a fragment: see [`EntryPoint::run`].
    ///
    /// # Safety
    /// The promise of [`EntryPoint::run`].
    pub unsafe fn enter(
        &self,
        ctx: *mut ThreadContext,
        fragment: FragmentId,
    ) -> Result<ExitReason, EmitError> {
        let entry = self.entry_point(fragment)?;
        // SAFETY: the caller's promise; nothing is flushed while `self` is borrowed.
        Ok(unsafe { entry.run(ctx) })
    }

    /// After a fragment left through `exit`: makes `gpr`, `rflags` and `rip` of `ctx` the guest's
    /// state at the exit's anchor. The caller performs the deferred stores it returns, in order.
    pub fn deopt(&self, exit: ExitId, ctx: &mut ThreadContext) -> Result<Deopt, EmitError> {
        let e = self.exit(exit).ok_or(EmitError::Unknown)?;
        let stores = match e.record {
            None => {
                ctx.rip = e.target.unwrap_or(ctx.next_pc);
                SmallVec::new()
            }
            Some(r) => self.fragments[e.fragment.0 as usize].records[r as usize].apply(ctx),
        };
        let after = e.after.filter(|_| e.target.is_none());
        Ok(Deopt { exit, kind: e.kind, after, stores })
    }

    /// The fragment whose code contains a host address. Async-signal-safe.
    pub fn fragment_at(&self, host_rip: u64) -> Option<FragmentId> {
        fragment_at(&self.fragments, host_rip)
    }

    /// Where a fault at `host_rip` continues: set rip there and return from the handler.
    /// Async-signal-safe.
    pub fn fault_exit(&self, host_rip: u64) -> Option<u64> {
        match self.fragment_at(host_rip) {
            Some(id) => self.fragments[id.0 as usize].fault_exit(host_rip),
            None => self
                .indirect
                .returns()
                .fault_exit(host_rip)
                .or_else(|| self.blocks.fault_exit(host_rip)),
        }
    }

    /// Makes every thread that is in generated code leave soon: no fragment or block leads to
    /// another any more. When all threads are out, [`Emitter::flush_all`] drops the code.
    pub fn retire_all(&mut self) {
        self.retired = true;
        self.indirect.clear();
        self.blocks.unlink_all(&self.indirect, &self.cache);
        (0..self.fragments.len() as u32).for_each(|f| self.unlink_for_signal(FragmentId(f)));
    }

    /// The way out of a thread that a signal has interrupted at `host_rip`, if unlinking does not
    /// make it leave. That is the case between the check of `pending` and the fragment, and between
    /// an indirect jump and its destination. Async-signal-safe.
    pub fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        if self.stubs.enter_window.contains(&host_rip) {
            return Some(Diversion { rip: self.stubs.abort, displaced: Displaced::None });
        }
        if let Some(diversion) = self
            .indirect
            .diversion(host_rip)
            .or_else(|| self.blocks.diversion(host_rip, &self.indirect, &self.cache))
        {
            return Some(diversion);
        }
        let fragment = self.fragment(self.fragment_at(host_rip)?)?;
        if fragment.checked.is_some_and(|checked| (checked..fragment.entry).contains(&host_rip)) {
            return Some(self.indirect.diversion_in_check(InCheck::Inside, Via::Memory));
        }
        let tail = fragment.tails.iter().find(|t| t.range.contains(&host_rip))?;
        let displaced = if host_rip >= tail.displaced { Displaced::Rcx } else { Displaced::None };
        Some(Diversion { rip: tail.out, displaced })
    }

    /// Makes a guard fail always (`on`), or lets it test again: `jcc rel32` <-> `nop; jmp rel32`,
    /// or a back edge that leads out. For chaos runs; no thread may be executing the fragment.
    pub fn force_guard(&self, exit: ExitId, on: bool) -> Result<(), EmitError> {
        match self.exit(exit).and_then(|e| e.jcc).ok_or(EmitError::Unknown)? {
            GuardJump::Leaves(address, condition) => {
                writer::force(
                    &self.cache,
                    address,
                    if on { [0x90, 0xe9] } else { [0x0f, 0x80 | condition] },
                );
            }
            GuardJump::BackEdge(field, _, out) if on => writer::lead(&self.cache, field, out),
            GuardJump::BackEdge(field, head, _) => {
                set_target(&self.fragments, field, head, &self.cache)
            }
        }
        Ok(())
    }

    /// Drops every fragment. No thread may be inside one.
    pub fn flush_all(&mut self) {
        self.retired = false;
        self.forget_fragments();
        self.indirect.clear();
        self.indirect.name_transfers(self.will_name);
        self.blocks.clear(&mut self.indirect);
        self.cache.flush();
    }

    fn forget_fragments(&mut self) {
        self.epoch += 1;
        self.fragments.clear();
        self.exits.clear();
        self.passages.clear();
    }

    /// In a forked child: fresh memory, no fragments, the stubs generated anew at the same place.
    pub fn reset_after_fork(&mut self) -> Result<(), EmitError> {
        self.retired = false;
        self.forget_fragments();
        self.cache.replace_after_fork()?;
        self.stubs = Stubs::generate(&mut self.cache, &self.cpu)?;
        self.indirect.reset_after_fork(&mut self.cache, self.stubs.leave_canonical)?;
        self.indirect.name_transfers(self.will_name);
        self.blocks.renew(&mut self.cache, &self.cpu, &self.stubs, &mut self.indirect)?;
        self.cache.set_floor();
        Ok(())
    }
}
