//! [`Encoded`]: machine code without an address. It has the bytes, the fields that depend on the
//! address (relocations), and the offsets of exits, guards, faults and polls.
//!
//! Plain data, made by [`encode`](mod@super::encode) without a lock. Invariant: every offset lies
//! in the bytes of its part, hot or cold. Example: a fault at offset 12 of the hot code has an
//! entry (12, site).

use crate::asm::Asm;
use crate::codegen::count::What;
use crate::codegen::mach::Site;
use smallvec::SmallVec;

/// What a field of four bytes holds. All but [`Target::Exit`] are addresses, relative to the
/// field's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// A machine block.
    Block(usize),
    /// The unlinked stub of a trace end.
    Unlinked(u32),
    /// An offset in the fragment's hot code.
    Hot(u32),
    /// An offset in the fragment's cold code.
    Cold(u32),
    /// The code behind a trace end that gives back what the fragment borrowed.
    Restored(u32),
    /// The stub that leaves with raw registers.
    LeaveRaw,
    /// The stub that leaves with canonical registers.
    LeaveCanonical,
    /// An address that does not change while the emitter exists.
    Address(u64),
    /// The word in which this is counted.
    Word(What),
    /// The number of this site's exit, not relative to anything.
    Exit(u32),
}

/// A field of four bytes that is filled in when the code has its place.
#[derive(Clone, Copy, Debug)]
pub struct Relocation {
    /// In cold code?
    pub cold: bool,
    /// Offset of the field.
    pub at: u32,
    /// What it holds.
    pub target: Target,
}

/// Encoded code that has no place yet.
#[derive(Debug, Default)]
pub struct Encoded {
    /// Hot bytes.
    pub hot: Vec<u8>,
    /// Cold bytes.
    pub cold: Vec<u8>,
    /// What the start of the hot code must be aligned to.
    pub alignment: usize,
    /// In the hot code: the offset of the checked entry, and of the entry behind it. The same if
    /// there is no checked one. Before it is padding.
    pub entry: (u32, u32),
    /// In the hot code: the offset behind the instructions that save registers, and the one behind
    /// those that load the extended state.
    pub inside: (u32, u32),
    /// The fields that depend on where the code stands.
    pub relocations: Vec<Relocation>,
    /// Offset of each machine block: (in cold code, offset).
    pub blocks: Vec<(bool, u32)>,
    /// For each faulting instruction: its offset in the hot code and its site.
    pub faults: Vec<(u32, Site)>,
    /// For each native: its offset in the hot code, and the guest's pc.
    pub natives: Vec<(u32, u64)>,
    /// If it counts or is watched, for the machine instructions in the hot code: the offset, and block and index of
    /// the IR instruction that it is for.
    pub positions: Vec<(u32, (u32, u32))>,
    /// The guards.
    pub guards: Vec<EncodedGuard>,
    /// Offsets of the rel32 fields of back edges in the hot code, with the machine block they lead
    /// to.
    pub back_edges: Vec<(u32, usize)>,
    /// The trace ends.
    pub ends: Vec<EncodedEnd>,
    /// The records of which some site is emitted.
    pub records: Vec<EncodedRecord>,
    /// For each poll: its site, the offset of its cold code, and its block.
    pub polls: Vec<(Site, u32, usize)>,
    /// For each trace end: offset of its unlinked stub in the cold code.
    pub unlinked: Vec<(u32, u32)>,
    /// The tails of indirect trace ends.
    pub tails: Vec<EncodedTail>,
    /// What counts starts in the hot code: offset and bytes.
    pub starts: Vec<(u32, u32)>,
}

/// A trace end.
///
/// A direct end of a fragment that borrows registers has two jumps. The one in the hot code leads
/// to a fragment that expects the guest's values in their slots, or to cold code that gives the
/// registers back. That cold code ends with the second jump, in canonical state.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncodedEnd {
    /// Its site.
    pub site: u32,
    /// In the hot code: offset of the rel32 field of the jump with registers in their slots, and in
    /// the cold code the offset of what gives them back.
    pub borrowed: Option<(u32, u32)>,
    /// Is the jump in canonical state in the cold code?
    pub cold: bool,
    /// Offset of that jump's rel32 field.
    pub at: u32,
    /// In the hot code: the offset of an indirect end's tail.
    pub tail: Option<u32>,
}

/// A guard in the hot code.
#[derive(Clone, Copy, Debug)]
pub struct EncodedGuard {
    /// Offset of its `jcc`'s first byte.
    pub at: u32,
    /// Its site.
    pub site: Site,
    /// Its `jcc` is a loop's back edge; the `jmp` behind it leaves.
    pub back_edge: bool,
    /// Offset of the rel32 field that leaves, if it can be patched and its record describes the
    /// state there.
    pub way_out: Option<u32>,
}

/// The jump of a record in the cold code, by offsets.
#[derive(Clone, Copy, Debug)]
pub struct EncodedRecord {
    /// Index of the record.
    pub record: usize,
    /// Its rel32 field.
    pub at: u32,
    /// The code that leaves to the runtime, if it is in this fragment.
    pub out: Option<u32>,
}

/// A tail ([`crate::transfers::indirect`]) in the hot code, by offsets.
#[derive(Clone, Copy, Debug)]
pub struct EncodedTail {
    /// The site of its trace end.
    pub site: u32,
    /// Its first instruction.
    pub start: u32,
    /// The first instruction before which rcx is displaced.
    pub displaced: u32,
    /// Behind its last instruction.
    pub end: u32,
}

impl Encoded {
    /// Takes the bytes and relocations of both parts, which are complete.
    pub fn finish(&mut self, hot: Asm<Target>, cold: Asm<Target>) {
        for (cold, code) in [(false, hot), (true, cold)] {
            let (bytes, relocations) = code.finish();
            *(if cold { &mut self.cold } else { &mut self.hot }) = bytes;
            self.relocations.extend(relocations.into_iter().map(|r| Relocation {
                cold,
                at: r.at,
                target: r.target,
            }));
        }
    }

    /// The offset of a trace end's unlinked stub in the cold code.
    pub fn unlinked_stub(&self, site: u32) -> u32 {
        self.unlinked.iter().find(|(s, _)| *s == site).map_or(0, |(_, at)| *at)
    }
}

/// Guest state that is not in its home while the fragment runs: pairs of a register and its slot.
#[derive(Debug, Default)]
pub struct Homes {
    /// The fragment uses the extended state, of these components: it is loaded at entry unless it
    /// is there already.
    pub extended: Option<u64>,
    /// Saved at entry.
    pub save: SmallVec<[(u8, u16); 8]>,
    /// Restored where the trace ends.
    pub restore: SmallVec<[(u8, u16); 8]>,
    /// XMM registers, each with the first of its [slots](super::vectors): saved at entry, and restored on every
    /// way out.
    pub vectors: SmallVec<[(u8, u16); 8]>,
}
