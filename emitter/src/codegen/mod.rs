//! Code generation: a version goes in, bytes and relocations come out (docs/design.md, "Code
//! generation").
//!
//! [`compile`] selects instructions, allocates registers and encodes. It is a function of the
//! version and of a [`Request`]; it reads no cache and no table, takes no lock and knows no
//! address. Whatever depends on where the code will stand is a
//! [`Relocation`](crate::codegen::encoded::Relocation) of the [`CompiledCode`], which
//! [`Emitter::place`](crate::Emitter::place) resolves.
//!
//! **Data.** The request is a copy of the few facts about the emitter that decide which
//! instructions are made: features of the processor, how indirect jumps look, whether fragments
//! count, and for a side trace the state that the exit leaves in.
//!
//! **Invariants.** (1) The same version and request give the same bytes. (2) A request is good for
//! one *epoch* of the emitter, that is, until everything is dropped: exits are named by numbers
//! that start over then. `place` refuses an old request.
//!
//! **Locks.** [`Emitter::request`](crate::Emitter::request) and `place` need the emitter, and so
//! the lock around it. [`compile`] needs neither; each thread passes an [`Allocator`] of its own.
//!
//! ```text
//! // With the lock, a few hundred nanoseconds:
//! let request = emitter.request(version.region, EntryState::Canonical)?;
//! // Without it, up to a millisecond:
//! let code = codegen::compile(&version, &request, &mut allocator)?;
//! // With the lock, some microseconds:
//! let fragment = emitter.place(&request, code)?;
//! ```

pub(crate) mod compiled;

pub(crate) mod count;
pub(crate) mod encode;
pub(crate) mod encoded;
pub(crate) mod exit_entry;
pub(crate) mod exit_moves;
pub(crate) mod instruction;
pub(crate) mod lifted;
pub(crate) mod loop_alignment;
pub(crate) mod loop_starts;
pub(crate) mod lower;
pub mod mach;
pub(crate) mod passage;
pub(crate) mod passes;
pub(crate) mod piece;
mod registers;
pub(crate) mod vectors;
pub(crate) mod x86;

pub use compiled::CompiledCode;
pub use lifted::LiftedCode;
pub use registers::{Allocator, silence_allocator};

use crate::codegen::count::Starts;
use crate::codegen::encode::{Surroundings, encode};
use crate::codegen::encoded::Homes;
use crate::codegen::exit_entry::EntryLocations;
use crate::codegen::exit_moves::Exits;
use crate::codegen::instruction::location;
use crate::codegen::lower::{LowerError, Selected, lower};
use crate::codegen::mach::MFunc;
use crate::codegen::piece::Piece;
use crate::codegen::vectors::VECTOR_SLOTS;
use crate::cpu::Cpu;
use crate::record::Record;
use compiled::{At, CompiledSite, Registers};
use dynasour_guest::context::SCRATCH_WORDS;
use dynasour_ir::opt::contexts::{Contexts, contexts};
use dynasour_ir::{Context, Gpr, Version};
use regalloc2::{Function, Output, RegAllocError, RegClass};
use smallvec::SmallVec;

/// The first spill slots belong to the sixteen registers by number: a borrowed register waits in
/// the slot of its number.
const REGISTER_SLOTS: u32 = 16;

/// Why a version cannot be compiled. Another version may be.
#[derive(thiserror::Error, Debug)]
pub enum CodegenError {
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
}

/// What code generation is told about the emitter for one version; made by
/// [`Emitter::request`](crate::Emitter::request).
#[derive(Clone, Debug)]
pub struct Request {
    pub(crate) host: Host,
    pub(crate) entry: FragmentEntry,
    /// How often the emitter had dropped everything when this was made.
    pub(crate) epoch: u64,
}

impl Request {
    /// What holds of the guest's registers whenever the code is entered, because only one exit leads there.
    pub fn known(&self) -> Context {
        match &self.entry {
            FragmentEntry::FromExit(exit) => exit.known.clone(),
            FragmentEntry::Canonical => Context::default(),
        }
    }

    /// The same request for a version that is entered in canonical state.
    pub fn canonical(&self) -> Request {
        Request { entry: FragmentEntry::Canonical, ..self.clone() }
    }
}

/// What all fragments of an emitter have in common.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    /// The processor's features.
    pub cpu: Cpu,
    /// How a trace end goes where `next_pc` says.
    pub tail: Piece,
    /// Where indirect jumps to the fragment arrive. Fragments that are not entered in canonical
    /// state have no use for it.
    pub checked: Piece,
    /// Do fragments count what they execute ([`crate::fragment::counting`])?
    pub counts: bool,
    /// Is the IR instruction of each machine instruction noted?
    pub is_watched: bool,
    /// How the trace counts starts, if there is a race.
    pub starts: Option<count::Starts>,
    /// Do indirect ends store which transfer they are?
    pub names_transfers: bool,
}

/// The state in which a fragment is entered: [`EntryState`](crate::EntryState) with the data that
/// it stands for.
#[derive(Clone, Debug)]
pub(crate) enum FragmentEntry {
    Canonical,
    FromExit(Box<ExitState>),
}

/// A copy of what the emitter knows of a guard's exit: the state that it leaves in.
#[derive(Clone, Debug)]
pub(crate) struct ExitState {
    pub record: Record,
    /// What holds of the guest's registers there.
    pub known: Context,
    /// Registers that hold the fragment's own values: bit n is register n.
    pub touched: u16,
    /// Spill slots below this one hold values.
    pub end_of_slots: u32,
    /// The extended state is in the processor.
    pub extended_live: bool,
}

/// Compiles a version whose region the request was made for. The facts of its context are not checked
/// in the code: the caller lets nothing lead to the fragment when they may not hold.
///
/// # Errors
/// The version cannot be compiled for this state; see [`CodegenError`].
pub fn compile(
    version: &Version,
    request: &Request,
    allocator: &mut Allocator,
) -> Result<CompiledCode, CodegenError> {
    if loop_starts::names_a_word(version) {
        let what = "an access to an address that is not canonical";
        return Err(LowerError::Unsupported(what.into()).into());
    }
    let mut code = match &request.entry {
        FragmentEntry::Canonical => canonical(version, &request.host, allocator),
        FragmentEntry::FromExit(exit) => {
            let (version, places) =
                exit_entry::side_trace(version, &exit.record, exit.touched, exit.end_of_slots);
            generate(&version, &places, exit.extended_live, &request.host, allocator)
        }
    }?;
    code.contexts = contexts(version);
    Ok(code)
}

/// Compiles a version that is entered in canonical state.
fn canonical(
    version: &Version,
    host: &Host,
    allocator: &mut Allocator,
) -> Result<CompiledCode, CodegenError> {
    if let Some(counting) = host.starts.and_then(|starts| loop_starts::counting(version, &starts)) {
        let entry = EntryLocations { added: loop_starts::ADDED, ..EntryLocations::default() };
        if let Ok(code) = generate(&counting, &entry, false, host, allocator) {
            return Ok(code);
        }
    }
    let starts = host.starts.map(|starts| Starts { own: None, ..starts });
    let host = Host { starts, ..host.clone() };
    generate(version, &EntryLocations::default(), false, &host, allocator)
}

/// Compiles the resolved stub of an exit, in the region `pc`: see [`exit_entry::stub`].
///
/// # Errors
/// The stub cannot be compiled; see [`CodegenError`].
pub(crate) fn compile_stub(
    pc: u64,
    only: Option<u64>,
    exit: &ExitState,
    host: &Host,
    allocator: &mut Allocator,
) -> Result<CompiledCode, CodegenError> {
    let (version, places) =
        exit_entry::stub(pc, &exit.record, only, exit.touched, exit.end_of_slots);
    generate(&version, &places, exit.extended_live, host, allocator)
}

/// Compiles for a state at entry; `live` says that the extended state is loaded then.
pub(crate) fn generate(
    version: &Version,
    entry: &EntryLocations,
    live: bool,
    host: &Host,
    allocator: &mut Allocator,
) -> Result<CompiledCode, CodegenError> {
    let Selected {
        blocks,
        sites,
        records,
        record_ops,
        num_vregs,
        touched,
        uses_vector,
        free_vectors,
    } = lower(version, host.cpu, entry)?;
    let function = MFunc::new(blocks, &sites, record_ops, num_vregs);
    let out = allocator.run(&function, touched, free_vectors)?;
    let first_slot = entry.first_slot.max(REGISTER_SLOTS);
    let exits = Exits::of(&function, out);
    let vectors = exits.used_registers(&function, out, RegClass::Float);
    let first_vector = first_slot + out.num_spillslots as u32;
    let end_of_slots = first_vector + VECTOR_SLOTS * vectors.count_ones();
    if end_of_slots as usize > SCRATCH_WORDS {
        return Err(CodegenError::Slots(end_of_slots as usize));
    }
    let borrowed =
        exits.used_registers(&function, out, RegClass::Int) & !touched & !entry.saved_registers();
    let mut homes = homes(borrowed, entry, (uses_vector && !live).then_some(host.cpu.xstate_mask));
    let slots = (first_vector as u16..).step_by(VECTOR_SLOTS as usize);
    homes.vectors = (0..16).filter(|r| vectors & 1 << r != 0).zip(slots).collect();
    let mut records: Vec<Record> = records.into_iter().map(|(_, record)| record).collect();
    finish_records(&mut records, &function, out, &exits, first_slot as u16, &homes);
    let leaving: Vec<u16> =
        records.iter_mut().map(|record| vectors::in_slots(record, &homes.vectors)).collect();
    let checked = entry.is_canonical().then_some(&host.checked);
    let passes = if host.starts.is_some() { passes::of(version) } else { Vec::new() };
    let around = Surroundings {
        first_slot: first_slot as u16,
        host,
        checked,
        homes: &homes,
        exits: &exits,
        leaving: &leaving,
        passes: &passes,
    };
    let mut encoded = encode(&function, out, around)?;
    encoded.positions.retain_mut(|(_, position)| {
        let given = compiled::given(*position, entry.added);
        *position = given.unwrap_or_default();
        given.is_some()
    });
    let site = |(draft, split): (_, &Option<usize>)| {
        CompiledSite::new(
            draft,
            version,
            split.map(|block| At::of_block(&encoded, block)),
            entry.added,
        )
    };
    let sites = sites.iter().zip(&function.split_of).map(site).collect();
    Ok(CompiledCode {
        region: version.region,
        name: version.name.clone(),
        has_checked_entry: checked.is_some(),
        sites,
        records,
        registers: Registers {
            touched: touched | borrowed | entry.saved_registers(),
            saves: homes.save,
            restores: homes.restore,
            vectors: homes.vectors,
            spill_slots: out.num_spillslots as u32,
            end_of_slots,
            hot_moves: hot_moves(&function, out),
        },
        uses_vector,
        extended_live: live || uses_vector,
        own_word: host.starts.and_then(|starts| starts.own),
        contexts: Contexts::default(),
        encoded,
    })
}

/// Where the guest's registers wait that the fragment borrows: saved at entry, and in their slots
/// ever after.
fn homes(borrowed: u16, entry: &EntryLocations, extended: Option<u64>) -> Homes {
    let restore = SmallVec::from_slice(&entry.saved);
    let mut homes = Homes { extended, restore, ..Homes::default() };
    for r in (0..16u8).filter(|r| borrowed & 1 << r != 0) {
        homes.save.push((r, u16::from(r)));
        homes.restore.push((r, u16::from(r)));
    }
    homes
}

/// Replaces the operands of records by the places that the allocator chose.
fn finish_records(
    records: &mut [Record],
    function: &MFunc,
    out: &Output,
    exits: &Exits,
    first_slot: u16,
    homes: &Homes,
) {
    for (i, record) in records.iter_mut().enumerate() {
        if let Some(block) = function.record_block[i] {
            let inst = function.block_insns(regalloc2::Block::new(block)).first();
            let allocs = out.inst_allocs(inst);
            record.finish(|n| location(exits.place(i, allocs[usize::from(n)]), first_slot));
        }
        for &(r, slot) in &homes.save {
            record.add_saved(Gpr::new(r), slot);
        }
    }
}

/// Moves that the allocator inserted in hot code.
fn hot_moves(f: &MFunc, out: &Output) -> u32 {
    let end = f.block_insns(regalloc2::Block::new(f.hot_blocks - 1)).last();
    out.edits.iter().filter(|(point, _)| point.inst() <= end).count() as u32
}
