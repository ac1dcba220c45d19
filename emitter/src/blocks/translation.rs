//! A translated block that has no address yet: its bytes, and the fields in them that depend on the
//! address.
//!
//! Data: [`Translation`]; the translator owns one and uses it again. Invariant: all fields are
//! offsets in `bytes`, so the same translation may be placed anywhere at a multiple of eight.
//! [`Translation::resolve`] writes the displacements when the block has its address; the jumps of
//! exits are written when the links exist.
//!
//! Example: `jmp 0x2000` at the end of a block is an [`ExitJump`] whose field are the last four
//! bytes; `mov rax, [rip + 8]` is a [`Relative`] to a guest address.

use super::stack_returns::Call;
use super::word_jumps::Word;
use crate::codegen::loop_alignment::{self, LINE};
use crate::transfers::indirect::Via;
use smallvec::SmallVec;
use std::ops::Range;

/// From `at` on the host code belongs to the guest instruction at `pc`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mark {
    pub at: u32,
    pub pc: u64,
    /// This register's guest value is in this word of `stub_save`.
    pub saved: Option<(u8, usize)>,
    /// Has the instruction pushed eight bytes already?
    pub pushed: bool,
    /// The last instruction before it that set the x87 pointer, if that is not in the context yet.
    pub x87_pc: Option<u64>,
}

/// Where an exit leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Leads {
    /// To this guest pc.
    To(u64),
    /// To the guest's own code at this pc, in place.
    InPlace(u64),
    /// To the pc in `next_pc`: the field is that of a tail.
    Indirect(Via),
    /// To the landing of a call: the field is in the instruction that looks the landing up.
    Return,
}

impl Leads {
    /// Does the link have a stub of its own, by which it leads out?
    pub fn has_stub(self) -> bool {
        matches!(self, Leads::To(_) | Leads::InPlace(_))
    }
}

/// The 32-bit field of an exit's jump, which lies within eight aligned bytes if the block is
/// aligned.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExitJump {
    pub field: u32,
    pub leads: Leads,
    /// It leads to a trace head: backward (false) or by a call (true).
    pub head: Option<bool>,
}

/// A disp32 field that refers to memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Relative {
    pub field: u32,
    /// Offset of the end of its instruction.
    pub end: u32,
    pub to: Referent,
}

/// What a disp32 field refers to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Referent {
    /// A guest address.
    Address(u64),
    /// A word of the block's constants.
    Constant(u32),
    /// This offset in the block's code; the field holds the address itself.
    Own(u32),
}

/// A translated block.
#[derive(Default)]
pub(super) struct Translation {
    pub bytes: Vec<u8>,
    /// The beginning of the host code of each guest instruction, if the translator makes marks.
    pub marks: Vec<Mark>,
    pub exits: SmallVec<[ExitJump; 4]>,
    pub relatives: SmallVec<[Relative; 4]>,
    /// Return addresses that do not fit into an immediate.
    pub constants: SmallVec<[u64; 1]>,
    /// The guest memory that it was made from: code, and constants that it jumps through.
    pub sources: SmallVec<[Range<u64>; 2]>,
    /// The word of memory that its last jump or call goes through.
    pub word: Option<Word>,
    /// Bytes of its checked entry.
    pub prefix: u32,
    /// Offsets of the code that compares its guest bytes.
    pub check: Range<u32>,
    /// The return address of the call that it ends with.
    pub returns_to: Option<u64>,
    /// Its call by the stack.
    pub call: Option<Call>,
    /// Where its return by the stack ends; 0 if it has none.
    pub returns: u32,
    /// Guest instructions.
    pub count: u32,
    /// Basic blocks of the guest's among them.
    pub basic_blocks: u32,
}

impl Translation {
    /// If the block at `pc` jumps to its own start: the offset from a line of the instruction cache
    /// at which it should stand.
    pub fn loop_offset(&self, pc: u64) -> Option<usize> {
        let back_edge =
            self.exits.iter().rfind(|exit| matches!(exit.leads, Leads::To(to) if to == pc))?;
        let prefix = self.prefix as usize;
        let code = self.bytes.get(prefix..back_edge.field as usize + 4)?;
        // The fields are padded for a start at any multiple of eight.
        let starts = (0..LINE).step_by(8);
        let entry =
            loop_alignment::offset_among(code, starts.map(|start| (start + prefix) % LINE))?;
        Some((entry + LINE - prefix % LINE) % LINE)
    }

    /// Writes the displacements of a block that will stand at `start`, with its constants at
    /// `constants`.
    pub fn resolve(&mut self, start: u64, constants: u64) {
        for r in &self.relatives {
            let end = start + u64::from(r.end);
            let target = match r.to {
                Referent::Address(address) => address,
                Referent::Constant(n) => constants + 8 * u64::from(n),
                Referent::Own(at) => (start + u64::from(at)).wrapping_add(end),
            };
            let relative = target.wrapping_sub(end) as u32;
            let field = r.field as usize;
            self.bytes[field..field + 4].copy_from_slice(&relative.to_le_bytes());
        }
    }
}
