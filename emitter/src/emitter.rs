//! The emitter: compiles versions into the cache, links fragments, and reads states back at exits.
//!
//! Life of a fragment: [`Emitter::compile`] makes it; [`Emitter::enter`] runs it until some exit; for a raw exit
//! [`Emitter::deopt`] rebuilds the guest's state; a warm exit is [`Emitter::link`]ed to another fragment.
//! [`Emitter::flush_all`] drops everything but the stubs, and with it all ids.
//!
//! Called from signal handlers (no allocation, no locks): [`Emitter::fragment_at`], [`Emitter::fault_exit`],
//! [`Emitter::diversion`], [`Emitter::unlink_for_signal`], [`Emitter::relink`], and the addresses in [`Emitter::stubs`].

use crate::cache::{Cache, CacheError};
use crate::copy::{self, Blocks, CounterId, LOADED, LinkId};
use crate::counting::{Counting, Tally};
use crate::cpu::Cpu;
use crate::encode::{Surroundings, encode};
use crate::encoded::{Encoded, EncodedGuard, Homes, Target};
use crate::entry_check::EntryCheck;
use crate::exits::Exits;
use crate::fragment::{Exit, ExitId, Fragment, FragmentId, FragmentRole, GuardJump, Tail, fragment_at};
use crate::indirect::{Displaced, Indirect, MISSED, Via};
use crate::instruction::location;
use crate::links::passages::Way;
use crate::links::{graph, writer};
use crate::lower::{LowerError, Selected, lower};
use crate::mach::{MFunc, Site, SiteKind, preg};
use crate::record::{PendingStore, Record};
use crate::returns::{Kept, Returns};
use crate::splice::{self, EntryPlaces};
use crate::stubs::{self, ABORTED, StubError, Stubs};
use dynasour_guest::context::{SCRATCH_WORDS, ThreadContext};
use dynasour_ir::{Gpr, Version};
use regalloc2::{Algorithm, Function, MachineEnv, Output, PReg, RegAllocError, RegallocOptions};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::AtomicU32;

const TRAP_FLAG: u64 = 0x100;

/// Why a version could not be emitted. [`EmitError::is_full`] asks for a flush; anything else refuses this version.
#[derive(thiserror::Error, Debug)]
pub enum EmitError {
    /// The cache is full or cannot be mapped.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The stubs cannot be generated on this machine.
    #[error(transparent)]
    Stub(#[from] StubError),
    /// Selection refused.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The register allocator gave up.
    #[error("register allocation failed: {0}")]
    Registers(RegAllocError),
    /// The register allocator found constraints that cannot be met.
    #[error("register allocation panicked")]
    Allocator,
    /// More values are live at once than there are spill slots.
    #[error("the trace needs {0} spill slots")]
    Slots(usize),
    /// The encoder refused an instruction.
    #[error("cannot encode: {0}")]
    Encode(#[from] iced_x86::IcedError),
    /// No such exit or fragment, or not of the kind the call is for.
    #[error("no such exit or fragment")]
    Unknown,
}

impl EmitError {
    /// Would it fit into an empty cache?
    pub fn is_full(&self) -> bool {
        matches!(self, EmitError::Cache(CacheError::Full))
    }
}

/// In which state a fragment is entered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryState {
    /// Every guest register in its own host register, flags in the host's flags.
    Canonical,
    /// As this guard's exit leaves: the version's entry parameters are the guest state at the exit's target.
    /// [`Emitter::attach`] then makes the exit go there.
    FromExit(ExitId),
}

/// How the emitter is set up.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of code cache.
    pub cache_size: usize,
    /// Do fragments count how often what runs? See [`crate::counting`].
    pub count: bool,
    /// Do indirect transfers count how they find where they go? See [`Rates`](crate::Rates).
    pub rates: bool,
    /// How do copied blocks return?
    pub returns: Returns,
    /// How do entries check that they are what was meant? None: as is fastest on this processor.
    pub entry_check: Option<EntryCheck>,
    /// Do indirect transfers name themselves? See [`Emitter::name_transfers`].
    pub names_transfers: bool,
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
        }
    }
}

/// What an exit means, with `ctx` now holding the guest's exact state.
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
pub enum Left {
    /// Nothing ran: the runtime wanted control.
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
    /// A copied block, at `next_pc`, is not what stands in memory any more; see [`Emitter::copied_stale`].
    Stale,
}

/// How to get a thread out that a signal found where no link leads to the runtime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Diversion {
    /// Where it continues.
    pub rip: u64,
    /// These registers first get their values back.
    pub displaced: Displaced,
}

/// The register allocator's memory.
#[derive(Default)]
struct Allocator(regalloc2::Ctx);

// SAFETY: what it shares, it shares within itself: all references to its arena are its own fields. So it can go from
// thread to thread as a whole.
unsafe impl Send for Allocator {}

/// Where to enter a fragment; good until a flush that does not wait for this thread.
#[derive(Clone, Copy, Debug)]
pub struct EntryPoint {
    pub(crate) stubs: u64,
    pub(crate) code: u64,
    /// What [`LOADED`] is to hold: the copied block that `code` goes on to.
    pub(crate) loaded: u64,
    /// What the thread's landings must be from, if there are returns by the stack.
    pub(crate) kept: Option<Kept>,
}

impl EntryPoint {
    /// Runs the fragment, and whatever it is linked to, on the guest state in `ctx` until it leaves.
    ///
    /// # Safety
    /// The fragment has not been flushed. `ctx` is this thread's context and its GS base points there
    /// ([`crate::stubs::set_gs`]). The fragment runs guest code, with all that it may do to this address space.
    pub unsafe fn run(self, ctx: *mut ThreadContext) -> Left {
        // SAFETY: the addresses are those of the stub and of a fragment of one emitter; the rest is the caller's promise.
        let site = unsafe {
            if let Some(kept) = self.kept {
                kept.prepare(ctx);
            }
            (*ctx).stub_save[LOADED] = self.loaded;
            let site = stubs::enter(self.stubs, ctx, self.code);
            // A debugger that steps through the stubs leaves its TF there; the guest's own is never set in native code.
            (*ctx).rflags &= !TRAP_FLAG;
            (*ctx).raw_flags &= !TRAP_FLAG;
            site
        };
        if site == ABORTED {
            return Left::Aborted;
        }
        const LAST_MISSED: u32 = MISSED + Via::COUNT as u32 - 1;
        match site as u32 {
            missed @ MISSED..=LAST_MISSED => {
                Left::Indirect(Via::from_index((missed - MISSED) as usize).unwrap_or(Via::Memory))
            }
            copy::FAULT => Left::Fault,
            copy::STALE => Left::Stale,
            counter @ copy::FIRST_COUNTER.. => Left::Hot(CounterId(counter - copy::FIRST_COUNTER)),
            link @ copy::FIRST_LINK.. => Left::Block(LinkId(link - copy::FIRST_LINK)),
            exit => Left::Exit(ExitId(exit)),
        }
    }
}

/// Compiler of versions and owner of their code.
pub struct Emitter {
    pub(crate) cache: Cache,
    cpu: Cpu,
    pub(crate) stubs: Stubs,
    pub(crate) fragments: Vec<Fragment>,
    pub(crate) exits: Vec<Exit>,
    pub(crate) passages: FxHashMap<Way, FragmentId>,
    pub(crate) indirect: Indirect,
    pub(crate) blocks: Blocks,
    allocator: Allocator,
    pub(crate) counting: Option<Counting>,
    /// Do indirect transfers name themselves from the next flush on?
    will_name: bool,
    /// Between [`Emitter::retire_all`] and the next flush.
    pub(crate) retired: bool,
}

impl Emitter {
    /// An emitter with an empty cache.
    pub fn new(config: Config) -> Result<Emitter, EmitError> {
        let cpu = Cpu::detect();
        let mut cache = Cache::new(config.cache_size)?;
        let stubs = Stubs::generate(&mut cache, &cpu)?;
        let entry_check = EntryCheck::on(&cpu, config.entry_check);
        let mut indirect = Indirect::new(&mut cache, stubs.leave_canonical, config.rates, entry_check, cpu.bmi2)?;
        indirect.name_transfers(config.names_transfers);
        let blocks = Blocks::new(&mut cache, &cpu, &stubs, &mut indirect, config.returns)?;
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
            retired: false,
        })
    }

    /// From the next flush on indirect jumps, calls and returns name themselves, so that [`Emitter::transfer`] knows which one
    /// it was that led nowhere. That costs a store each. False if they do already.
    pub fn name_transfers(&mut self) -> bool {
        self.will_name = true;
        !self.indirect.names_transfers()
    }

    /// Has [`Emitter::name_transfers`] been called?
    pub fn will_name_transfers(&self) -> bool {
        self.will_name
    }

    /// The guest pc of the indirect jump, call or return by which native code has left, if they name themselves.
    pub fn transfer(&self, context: &ThreadContext) -> Option<u64> {
        (self.indirect.names_transfers() && context.transfer != 0).then_some(context.transfer)
    }

    /// What indirect jumps share.
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
        self.cache.memory().into_iter().chain(tables).chain(self.blocks.memory()).collect()
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

    /// Compiles a trace. [`EmitError::is_full`] asks the caller to [`Emitter::flush_all`] and try again.
    pub fn compile(&mut self, version: &Version, entry: EntryState) -> Result<FragmentId, EmitError> {
        match entry {
            EntryState::Canonical => self.compile_at(version, &EntryPlaces::default(), false),
            EntryState::FromExit(exit) => {
                let (fragment, record) = self.warm_record(exit)?;
                let live = fragment.extended_live;
                let (version, places) = splice::side_trace(version, record, fragment.touched, fragment.end_of_slots);
                self.compile_at(&version, &places, live)
            }
        }
    }

    /// The fragment and record of a guard's exit.
    pub(crate) fn warm_record(&self, exit: ExitId) -> Result<(&Fragment, &Record), EmitError> {
        let e = self.exit(exit).filter(|e| e.kind == SiteKind::Guard).ok_or(EmitError::Unknown)?;
        let fragment = self.fragment(e.fragment).ok_or(EmitError::Unknown)?;
        let record = e.record.and_then(|r| fragment.records.get(r as usize)).ok_or(EmitError::Unknown)?;
        Ok((fragment, record))
    }

    /// Compiles for a state at entry; `live` says that the extended state is loaded then.
    pub(crate) fn compile_at(
        &mut self,
        version: &Version,
        entry: &EntryPlaces,
        live: bool,
    ) -> Result<FragmentId, EmitError> {
        let selected = lower(version, self.cpu, entry)?;
        self.finish(version, selected, entry, live)
    }

    fn finish(
        &mut self,
        version: &Version,
        selected: Selected,
        entry: &EntryPlaces,
        live: bool,
    ) -> Result<FragmentId, EmitError> {
        let Selected { blocks, sites, mut records, record_ops, num_vregs, touched, uses_vector } = selected;
        let first_slot = entry.first_slot.max(REGISTER_SLOTS);
        let function = MFunc::new(blocks, &sites, record_ops, num_vregs);
        let env = MachineEnv {
            preferred_regs_by_class: [registers(touched), Vec::new(), Vec::new()],
            non_preferred_regs_by_class: [registers(!touched & ALLOCATABLE), Vec::new(), Vec::new()],
            scratch_by_class: [None; 3],
            fixed_stack_slots: Vec::new(),
        };
        let validate_ssa = cfg!(debug_assertions);
        let options = RegallocOptions { verbose_log: false, validate_ssa, algorithm: Algorithm::Ion };
        // regalloc2 panics when constraints cannot be met. That would be a bug of ours, but not one to end a guest for:
        // the trace is given up. The allocator's memory is put back only when all went well.
        let mut allocator = std::mem::take(&mut self.allocator);
        let run = || regalloc2::run_with_ctx(&function, &env, &options, &mut allocator.0).map(|_| ());
        let out = match panic::catch_unwind(AssertUnwindSafe(run)) {
            Ok(done) => done.map(|()| &allocator.0.output).map_err(EmitError::Registers)?,
            Err(cause) if cfg!(debug_assertions) => panic::resume_unwind(cause),
            Err(_) => return Err(EmitError::Allocator),
        };
        let end_of_slots = first_slot + out.num_spillslots as u32;
        // Borrowed registers are saved at entry and in their slots ever after.
        let mut homes = Homes {
            extended: (uses_vector && !live).then_some(self.cpu.xstate_mask),
            save: SmallVec::new(),
            restore: SmallVec::from_slice(&entry.saved),
        };
        let exits = Exits::of(&function, out);
        let borrowed = exits.used_registers(&function, out) & !touched & !entry.saved_registers();
        for r in (0..16u8).filter(|r| borrowed & 1 << r != 0) {
            homes.save.push((r, u16::from(r)));
            homes.restore.push((r, u16::from(r)));
        }
        if end_of_slots as usize > SCRATCH_WORDS {
            return Err(EmitError::Slots(end_of_slots as usize));
        }
        for (i, (_, record)) in records.iter_mut().enumerate() {
            if let Some(block) = function.record_block[i] {
                let inst = function.block_insns(regalloc2::Block::new(block)).first();
                let allocs = out.inst_allocs(inst);
                record.finish(|n| location(exits.place(i, allocs[usize::from(n)]), first_slot as u16));
            }
            for &(r, slot) in &homes.save {
                record.add_saved(Gpr::new(r), slot);
            }
        }
        let first_site = self.exits.len() as u32;
        let checked = entry.is_canonical().then(|| self.indirect.checked_entry(version.region, Via::Memory));
        let words = self.counting.as_mut().and_then(|c| c.run(sites.len()));
        let around = Surroundings {
            first_slot: first_slot as u16,
            first_site: u64::from(first_site),
            indirect: &self.indirect,
            checked: checked.as_ref(),
            homes: &homes,
            words,
            exits: &exits,
        };
        let code = encode(&function, out, around)?;
        let (spill_slots, hot_moves) = (out.num_spillslots as u32, hot_moves(&function, out));
        self.allocator = allocator;
        let mark = self.cache.mark();
        let placed = self.place(&code);
        let (hot, cold) = placed.inspect_err(|_| self.cache.rewind(mark))?;
        let address = |block: usize| {
            let (in_cold, at) = code.blocks[block];
            (if in_cold { cold } else { hot }) + u64::from(at)
        };
        let mut faults: Vec<(u64, u64)> = code
            .faults
            .iter()
            .filter_map(|(at, site)| Some((hot + u64::from(*at), address(function.split_of[site.0 as usize]?))))
            .collect();
        faults.sort_unstable();
        let host = |site: Site| {
            let guard = code.guards.iter().find(|g| g.site == site).map(|g| g.at);
            let at = guard.or_else(|| code.faults.iter().find(|f| f.1 == site).map(|f| f.0));
            (at.map_or(0, |at| hot + u64::from(at)), function.split_of[site.0 as usize].map_or(0, address))
        };
        let tally = words.map(|run| Box::new(Tally::new(run, first_site, &sites, entry.added, host)));
        let id = FragmentId(self.fragments.len() as u32);
        let way = |site: Site| {
            let (site, split) = (&sites[site.0 as usize], function.split_of[site.0 as usize]?);
            Some((site.record? as u32, address(split)))
        };
        let links = self.links(&code, (hot, cold), first_site, way);
        let tails = code.tails.iter().map(|t| Tail {
            range: hot + u64::from(t.start)..hot + u64::from(t.end),
            displaced: hot + u64::from(t.displaced),
            out: cold + u64::from(code.unlinked_stub(t.site)),
        });
        let tails = tails.collect();
        self.exits.extend(sites.iter().map(|s| Exit {
            fragment: id,
            kind: s.kind,
            anchor: s.anchor,
            target: version.anchors[s.anchor.index()].target.as_const(),
            after: version.anchors[s.anchor.index()].after,
            progress: s.progress,
            record: s.record.map(|r| r as u32),
            jcc: None,
        }));
        for &EncodedGuard { at, site, back_edge, .. } in &code.guards {
            let jump = if back_edge {
                let head = code.back_edges.iter().find(|b| b.0 == at + 2).map(|b| address(b.1));
                let out = function.split_of[site.0 as usize].map(address);
                head.zip(out).map(|(head, out)| GuardJump::BackEdge(hot + u64::from(at) + 2, head, out))
            } else {
                Some(GuardJump::Leaves(hot + u64::from(at), code.hot[at as usize + 1] & 15))
            };
            self.exits[(first_site + site.0) as usize].jcc = jump;
        }
        self.fragments.push(Fragment {
            pc: version.region,
            version: version.name.clone(),
            entry: hot + u64::from(code.entry.1),
            checked: checked.map(|_| hot + u64::from(code.entry.0)),
            hot: hot..hot + code.hot.len() as u64,
            cold: cold..cold + code.cold.len() as u64,
            exits: first_site..self.exits.len() as u32,
            spill_slots,
            end_of_slots,
            hot_moves,
            uses_vector,
            touched: touched | borrowed | entry.saved_registers(),
            saves: homes.save,
            restores: homes.restore,
            inside: (hot + u64::from(code.inside.0), hot + u64::from(code.inside.1)),
            role: FragmentRole::Trace,
            is_resting: false,
            extended_live: live || uses_vector,
            records: records.into_iter().map(|(_, r)| r).collect(),
            faults: faults.into(),
            links,
            tails,
            tally,
            unlinked: AtomicU32::new(0),
        });
        Ok(id)
    }

    /// Finds room for encoded code, resolves its jumps and copies it into the cache.
    pub(crate) fn place(&mut self, code: &Encoded) -> Result<(u64, u64), EmitError> {
        let hot = self.cache.alloc_hot(code.hot.len(), code.alignment)?;
        let cold = self.cache.alloc_cold(code.cold.len())?;
        let (mut hot_bytes, mut cold_bytes) = (code.hot.clone(), code.cold.clone());
        for fixup in &code.fixups {
            let target = match fixup.target {
                Target::Block(b) => {
                    let (in_cold, at) = code.blocks[b];
                    (if in_cold { cold } else { hot }) + u64::from(at)
                }
                Target::Unlinked(site) => cold + u64::from(code.unlinked_stub(site)),
                Target::Hot(at) => hot + u64::from(at),
                Target::Cold(at) => cold + u64::from(at),
                Target::Restored(site) => {
                    let end = code.ends.iter().find(|e| e.site == site).and_then(|e| e.borrowed);
                    cold + end.map_or(0, |(_, at)| u64::from(at))
                }
                Target::LeaveRaw => self.stubs.leave_raw,
                Target::LeaveCanonical => self.stubs.leave_canonical,
                Target::Address(address) => address,
                Target::Word(word) => self.counting.as_ref().map_or(0, |c| c.address(word)),
            };
            let (bytes, base) = if fixup.cold { (&mut cold_bytes, cold) } else { (&mut hot_bytes, hot) };
            let at = fixup.at as usize;
            let rel = target.wrapping_sub(base + u64::from(fixup.at) + 4) as u32;
            bytes[at..at + 4].copy_from_slice(&rel.to_le_bytes());
        }
        self.cache.write(hot, &hot_bytes);
        self.cache.write(cold, &cold_bytes);
        Ok((hot, cold))
    }

    /// Where to enter a fragment, for a thread that does not have the emitter while it is there.
    pub fn entry_point(&self, fragment: FragmentId) -> Result<EntryPoint, EmitError> {
        let code = self.fragment(fragment).ok_or(EmitError::Unknown)?.entry;
        Ok(EntryPoint { stubs: self.stubs.enter, code, loaded: 0, kept: self.indirect.returns().kept() })
    }

    /// Runs a fragment: see [`EntryPoint::run`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn enter(&self, ctx: *mut ThreadContext, fragment: FragmentId) -> Result<Left, EmitError> {
        let entry = self.entry_point(fragment)?;
        // SAFETY: the caller's promise; nothing is flushed while `self` is borrowed.
        Ok(unsafe { entry.run(ctx) })
    }

    /// After a fragment left through `exit`: makes `gpr`, `rflags` and `rip` of `ctx` the guest's state at the
    /// exit's anchor. The caller performs the deferred stores it returns, in order.
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

    /// Where a fault at `host_rip` continues: set rip there and return from the handler. Async-signal-safe.
    pub fn fault_exit(&self, host_rip: u64) -> Option<u64> {
        match self.fragment_at(host_rip) {
            Some(id) => self.fragments[id.0 as usize].fault_exit(host_rip),
            None => self.indirect.returns().fault_exit(host_rip).or_else(|| self.copy_fault(host_rip)),
        }
    }

    /// Makes every thread that is in some fragment leave soon, for good: nothing leads from fragment to fragment any more.
    /// What is left to do then is [`Emitter::flush_all`], when all are out.
    pub fn retire_all(&mut self) {
        self.retired = true;
        self.indirect.clear();
        self.blocks.unlink_all(&self.indirect, &self.cache);
        (0..self.fragments.len() as u32).for_each(|f| self.unlink_for_signal(FragmentId(f)));
    }

    /// Where a thread that a signal found at `host_rip` must be sent to come out: from the way into a fragment, after
    /// its check of `pending`, and from the way of an indirect jump, which is beyond the fragment's links.
    /// Async-signal-safe.
    pub fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        if self.stubs.enter_window.contains(&host_rip) {
            return Some(Diversion { rip: self.stubs.abort, displaced: Displaced::None });
        }
        if let Some(diversion) = self.indirect.diversion(host_rip).or_else(|| self.copy_diversion(host_rip)) {
            return Some(diversion);
        }
        let fragment = self.fragment(self.fragment_at(host_rip)?)?;
        if fragment.checked.is_some_and(|checked| (checked..fragment.entry).contains(&host_rip)) {
            return Some(self.indirect.diversion_in_check(0, Via::Memory));
        }
        let tail = fragment.tails.iter().find(|t| t.range.contains(&host_rip))?;
        let displaced = if host_rip >= tail.displaced { Displaced::Rcx } else { Displaced::None };
        Some(Diversion { rip: tail.out, displaced })
    }

    /// Makes a guard fail always (`on`), or lets it test again: `jcc rel32` <-> `nop; jmp rel32`, or a back edge that
    /// leads out. For chaos runs; no thread may be executing the fragment.
    pub fn force_guard(&self, exit: ExitId, on: bool) -> Result<(), EmitError> {
        match self.exit(exit).and_then(|e| e.jcc).ok_or(EmitError::Unknown)? {
            GuardJump::Leaves(address, condition) => {
                writer::force(&self.cache, address, if on { [0x90, 0xe9] } else { [0x0f, 0x80 | condition] });
            }
            GuardJump::BackEdge(field, _, out) if on => writer::lead(&self.cache, field, out),
            GuardJump::BackEdge(field, head, _) => graph::set_target(&self.fragments, field, head, &self.cache),
        }
        Ok(())
    }

    /// Drops every fragment. No thread may be inside one.
    pub fn flush_all(&mut self) {
        self.retired = false;
        self.fragments.clear();
        self.exits.clear();
        self.passages.clear();
        self.indirect.clear();
        self.indirect.name_transfers(self.will_name);
        self.blocks.clear(&mut self.indirect);
        self.cache.flush();
    }

    /// In a forked child: fresh memory, no fragments, the stubs generated anew at the same place.
    pub fn reset_after_fork(&mut self) -> Result<(), EmitError> {
        self.retired = false;
        self.fragments.clear();
        self.exits.clear();
        self.passages.clear();
        self.cache.replace_after_fork()?;
        self.stubs = Stubs::generate(&mut self.cache, &self.cpu)?;
        self.indirect.reset_after_fork(&mut self.cache, self.stubs.leave_canonical)?;
        self.indirect.name_transfers(self.will_name);
        self.blocks.renew(&mut self.cache, &self.cpu, &self.stubs, &mut self.indirect)?;
        self.cache.set_floor();
        Ok(())
    }
}

/// The first spill slots are those of the registers by number.
const REGISTER_SLOTS: u32 = 16;

/// All general registers but the stack pointer, which stays the guest's.
const ALLOCATABLE: u16 = !(1 << 4);

fn registers(set: u16) -> Vec<PReg> {
    (0..16).filter(|n| set & 1 << n != 0).map(preg).collect()
}

fn hot_moves(f: &MFunc, out: &Output) -> u32 {
    let end = f.block_insns(regalloc2::Block::new(f.hot_blocks - 1)).last();
    out.edits.iter().filter(|(point, _)| point.inst() <= end).count() as u32
}
