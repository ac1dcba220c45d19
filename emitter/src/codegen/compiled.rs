//! The result of code generation: [`CompiledCode`], code without an address, and the facts from
//! which a fragment is made.
//!
//! Positions in the code are offsets ([`At`]); exits are numbered from the fragment's first. Plain
//! data: one thread makes it without a lock, and [`Emitter::place`](crate::Emitter::place) takes
//! it.

use crate::codegen::encoded::Encoded;
use crate::codegen::mach::{SiteDraft, SiteKind};
use crate::record::Record;
use dynasour_guest::cost;
use dynasour_ir::opt::contexts::Contexts;
use dynasour_ir::{AnchorId, Version};
use smallvec::SmallVec;

/// A compiled version.
#[derive(Debug)]
pub struct CompiledCode {
    /// The guest pc of its region.
    pub(crate) region: u64,
    /// The version's name.
    pub(crate) name: String,
    /// Bytes, relocations, and where everything is.
    pub(crate) encoded: Encoded,
    /// It begins with a checked entry: it is entered in canonical state.
    pub(crate) has_checked_entry: bool,
    /// By number.
    pub(crate) sites: Vec<CompiledSite>,
    pub(crate) records: Vec<Record>,
    pub(crate) registers: Registers,
    /// See [`Fragment::uses_vector`](crate::Fragment::uses_vector).
    pub(crate) uses_vector: bool,
    /// The number of the word in which its loop counts the starts of iterations, if it has one of its own.
    pub(crate) own_word: Option<u32>,
    /// Is the extended state certainly in the processor at its exits?
    pub(crate) extended_live: bool,
    /// What it needs of the guest's registers, and what is known of them at its exits.
    pub(crate) contexts: Contexts,
}

/// Guest registers and the slots that hold their values.
pub(crate) type Borrowed = SmallVec<[(u8, u16); 8]>;

/// What registers and spill slots the code uses.
#[derive(Debug)]
pub(crate) struct Registers {
    /// Registers whose contents at exits are the code's own: bit n is register n.
    pub touched: u16,
    /// Borrowed registers, which it saves at entry, and their slots.
    pub saves: Borrowed,
    /// Registers whose guest values are in slots at its direct ends.
    pub restores: Borrowed,
    /// XMM registers that it borrows, each with the first of its slots.
    pub vectors: Borrowed,
    /// Spill slots that it adds to those of the exit it is entered from.
    pub spill_slots: u32,
    /// The first slot that nothing uses.
    pub end_of_slots: u32,
    /// Moves that the allocator inserted in hot code.
    pub hot_moves: u32,
}

/// A place in the code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct At {
    /// In the cold code?
    pub cold: bool,
    pub offset: u32,
}

impl At {
    /// Where a machine block is.
    pub fn of_block(encoded: &Encoded, block: usize) -> At {
        let (cold, offset) = encoded.blocks[block];
        At { cold, offset }
    }

    /// Its address, by those of the hot and of the cold code.
    pub fn address(self, (hot, cold): (u64, u64)) -> u64 {
        (if self.cold { cold } else { hot }) + u64::from(self.offset)
    }
}

/// A guard, safe point, possible fault or end, as it will be an [`Exit`](crate::Exit).
#[derive(Debug)]
pub(crate) struct CompiledSite {
    pub kind: SiteKind,
    pub anchor: AnchorId,
    /// The guest pc to continue at, unless it is computed.
    pub target: Option<u64>,
    /// The transfer that computed it.
    pub after: Option<u64>,
    pub progress: bool,
    pub record: Option<u32>,
    /// The IR instruction in the version as it was given: block and index; for an end, the number
    /// of instructions. None for instructions that were put before the version.
    pub position: Option<(u32, u32)>,
    /// Its cold code.
    pub cold: Option<At>,
}

impl CompiledSite {
    /// `added` instructions stand in the entry block before those of the version that was given.
    pub fn new(draft: &SiteDraft, version: &Version, cold: Option<At>, added: u32) -> CompiledSite {
        let anchor = &version.anchors[draft.anchor.index()];
        CompiledSite {
            kind: draft.kind,
            anchor: draft.anchor,
            target: anchor.target.as_const(),
            after: anchor.after,
            progress: draft.progress,
            record: draft.record.map(|record| record as u32),
            position: given(draft.position, added),
            cold,
        }
    }
}

/// A place in the version as it was given, before which `added` instructions stand.
pub(super) fn given(place: (u32, u32), added: u32) -> Option<(u32, u32)> {
    match place {
        (0, inst) => inst.checked_sub(added).map(|inst| (0, inst)),
        place => Some(place),
    }
}

impl CompiledCode {
    /// For machine instructions of the hot code, ascending: the offset, and block and index of the
    /// version's instruction that they are for. Empty unless the emitter
    /// [is watched](crate::Config::is_watched) or counts.
    pub fn positions(&self) -> &[(u32, (u32, u32))] {
        &self.encoded.positions
    }

    /// For each exit, in the order of their numbers, the IR instruction that it belongs to: block and index; none for
    /// those of instructions that were put before the version.
    pub fn exit_positions(&self) -> impl Iterator<Item = Option<(u32, u32)>> {
        self.sites.iter().map(|site| site.position)
    }

    /// What the code costs: its loop, if it has one, or else all from its entry to its end. What counts
    /// starts for a race costs nothing: it is there as long as the race.
    pub fn cost(&self) -> u32 {
        let code = &self.encoded;
        let range = match code.back_edges.first() {
            Some((field, head)) => code.blocks[*head].1 as usize..*field as usize + 4,
            None => code.entry.1 as usize..code.hot.len(),
        };
        let counting = code.starts.iter().map(|&(at, len)| at as usize..(at + len) as usize);
        let counting: u32 = counting
            .filter(|piece| range.contains(&piece.start))
            .map(|piece| cost::of_code(&code.hot[piece]).all)
            .sum();
        cost::of_code(&code.hot[range]).all - counting
    }
}
