//! The document that a counting run (`--count`) writes: each fragment that was made, how often each
//! part of it ran, and where control went when a guard failed.
//!
//! Data: [`Census`] and the records in it. The file is its JSON. The runtime makes it from the
//! [`ledger`](super::ledger); `dynasour explain` and `dynasour guards` read it.
//!
//! Invariants:
//! * The numbers are exact for a guest with one thread. Threads that run the same fragment at the
//!   same time lose counts; [`Census::exact`] is false then.
//! * [`Guard::failed`] is at most [`Guard::executed`], and the times in [`Guard::went`] add up to
//!   [`Guard::failed`].
//!
//! No lock: these are plain values. [`images`] reads `/proc/self/maps` and may be called by any
//! thread.
//!
//! Example: a guard was executed 1,000 times and failed 30 times. The first 10 failures came to the
//! runtime; then a side trace, fragment 7, was made for its exit. `went` is `[{to: runtime, times:
//! 10}, {to: fragment, fragment: 7, times: 20}]`.

use crate::observe::certificate::{Certificate, Proof};
use crate::observe::linker;
use dynasour_guest::space;
use dynasour_guest::symbols::MappedFile;
use dynasour_ir::OriginKind;
use nix::sys::mman::ProtFlags;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The version of the file's form; changed when readers of the old form would misread the new one.
pub const SCHEMA: u32 = 2;

/// What a counting run has counted.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Census {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The program, as the user named it.
    pub program: String,
    /// The program's arguments, without argv\[0\].
    pub args: Vec<String>,
    /// The name of the tier.
    pub tier: String,
    /// Executions of a head before it was recorded.
    pub threshold: u32,
    /// The name of the placement.
    pub policy: String,
    /// Optimiser passes that were run instead of the default ones.
    pub passes: Option<Vec<String>>,
    /// Optimiser passes that were left out.
    pub skipped_passes: Vec<String>,
    /// Is every number exact?
    pub exact: bool,
    /// Number of times that the runtime entered a fragment.
    pub runtime_entries: u64,
    /// Number of deoptimisations that came to the runtime, by reason.
    pub deopts: std::collections::BTreeMap<String, u64>,
    /// Nanoseconds spent on building, optimising and emitting versions.
    pub compile_ns: u64,
    /// The executable mappings of files at the end of the run, for symbols.
    pub images: Vec<Image>,
    /// The fragments in the order in which they were made.
    pub fragments: Vec<Fragment>,
}

/// Executable memory mapped from a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Image {
    /// The file.
    pub path: String,
    /// The address at which the mapping starts.
    pub start: u64,
    /// The address at which the mapping ends.
    pub end: u64,
    /// The offset in the file at which the mapping starts.
    pub offset: u64,
    /// Is it the dynamic linker of the program (the image that its PT_INTERP names)? What runs in it is
    /// the start of the program.
    #[serde(default)]
    pub is_linker: bool,
}

/// What a fragment was made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A version of its region, with a loop.
    Loop,
    /// A version of its region, linear.
    Linear,
    /// A side trace, linear.
    Side,
    /// A side trace with a loop.
    SideLoop,
    /// A resolved stub: it performs an exit's moves and stores and continues in canonical state.
    Stub,
}

/// One fragment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Fragment {
    /// Its index in [`Census::fragments`].
    pub id: u32,
    /// The name of its version, or `stub`.
    pub name: String,
    /// What it was made for.
    pub kind: Kind,
    /// The guest pc at which it starts.
    pub pc: u64,
    /// If it was made for an exit: the fragment of that exit, and the guards that leave by it.
    pub from: Option<From>,
    /// The recorded blocks, in order.
    pub path: Vec<PathStep>,
    /// Number of guest instructions in these blocks.
    pub guest_instructions: u64,
    /// If it is a loop of the program that the guest interprets: which one.
    #[serde(default)]
    pub interpreted: Option<Interpreted>,
    /// What it knows and needs of the guest's registers where it is entered.
    #[serde(default)]
    pub entrance: Entrance,
    /// Bytes of native code, on the path and off it. The code that counts is included.
    pub code_bytes: CodeBytes,
    /// Number of spill slots that it uses.
    pub spill_slots: u32,
    /// Number of moves that the register allocator inserted on the path.
    pub moves: u32,
    /// Nanoseconds that making it took.
    pub compile_ns: CompileTimes,
    /// What was compared with the recorded code, with `--verify-traces`: of the version, and of its machine
    /// code.
    pub certificates: [Option<Certificate>; 2],
    /// Is it proven to do what was recorded, with `--prove-traces`, and does its code do what it does?
    pub proofs: [Option<Proof>; 2],
    /// Number of times that it was entered.
    pub entered: u64,
    /// If it is a loop: number of times that the loop's head was reached, from the entry and by the
    /// back edge.
    pub iterations: Option<u64>,
    /// Its guards in the order of the version's text.
    pub guards: Vec<Guard>,
    /// The ends of its path.
    pub ends: Vec<End>,
    /// Number of times that it was left at a safe point, because a signal had arrived.
    pub polls: u64,
    /// Number of times that it was left by a fault.
    pub faults: u64,
    /// Was it dropped before the end of the run?
    pub dropped: bool,
    /// Text and native code, with `--count-detail`.
    pub detail: Option<Detail>,
}

/// What a fragment knows and needs of the guest's registers where it is entered.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Entrance {
    /// What holds there without a check, because only one exit leads there: facts in the text form of the IR.
    pub known: Vec<String>,
    /// What its guards check there, as far as it is about registers alone.
    pub needs: Vec<String>,
    /// Do they check more there, such as what is in memory, or how registers compare?
    pub needs_more: bool,
    /// Number of entries that one of its guards left before a guest instruction was executed.
    pub refused: u64,
    /// Its number among the versions of its region in the order in which they are tried, counted from 1, at the end
    /// of the run. None if nothing led there any more, or if it belongs to an exit.
    pub order: Option<u32>,
}

/// A loop of the program that the guest interprets.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Interpreted {
    /// The key of the loop: the values at the head from which the dispatch follows.
    pub key: Vec<u64>,
    /// Those of them that are in registers: the register and its value.
    pub registers: Vec<(String, u64)>,
    /// Is it told by positions alone, whatever objects they come from? If not, by these objects, too.
    #[serde(default)]
    pub is_by_position: bool,
    /// Are the operands of the interpreted program assumed, too?
    pub assumes_operands: bool,
}

/// The exit of another fragment for which a fragment was made ([`Fragment::from`]).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct From {
    /// The id of the fragment that has the exit.
    pub fragment: u32,
    /// The indices of its guards that leave by this exit.
    pub guards: Vec<u32>,
}

/// How control went from a recorded block to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Transfer {
    /// Past the block's end into the next block, or by a direct jump.
    Direct,
    /// By a conditional branch.
    Branch,
    /// By an indirect jump.
    Indirect,
    /// By a direct call.
    Call,
    /// By an indirect call.
    IndirectCall,
    /// By a return.
    Return,
    /// Not by native code: the runtime executes the instruction behind the block.
    Runtime,
}

/// One recorded block.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PathStep {
    /// The pc of its first instruction.
    pub pc: u64,
    /// The pc of its last instruction.
    pub last: u64,
    /// The address behind its last byte.
    pub end: u64,
    /// Number of its instructions.
    pub instructions: u32,
    /// How control left it.
    pub transfer: Transfer,
    /// The pc to which control went.
    pub next: u64,
    /// Its bytes in hexadecimal, with `--count-detail`.
    pub code: Option<String>,
}

/// Sizes of native code in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CodeBytes {
    /// Of the code on the path.
    pub hot: u64,
    /// Of the code of exits.
    pub cold: u64,
}

/// The times that making a fragment took, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct CompileTimes {
    /// Recording, the interpretation of the path included.
    pub record: u64,
    /// Building the version.
    pub build: u64,
    /// Optimising it.
    pub optimise: u64,
    /// Emitting it.
    pub emit: u64,
}

impl CompileTimes {
    /// All but the recording.
    pub fn compiling(&self) -> u64 {
        self.build + self.optimise + self.emit
    }
}

/// What a guard checks.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum GuardKind {
    /// The direction of a recorded branch.
    Branch,
    /// The target of an indirect jump or call.
    Target,
    /// The target of a return.
    Return,
    /// That a register or the result of a computation has a value that it had before.
    Value,
    /// That a word of memory has a value that it had before.
    Memory,
    /// That a store or load does not touch memory whose value is kept in a register.
    Alias,
    /// That the bytes of writable code have not changed.
    Code,
    /// What another version assumes at its entry, or where an interpreted program is.
    Context,
    /// Predicates of different kinds.
    Mixed,
}

impl std::convert::From<OriginKind> for GuardKind {
    fn from(kind: OriginKind) -> GuardKind {
        match kind {
            OriginKind::Branch => GuardKind::Branch,
            OriginKind::Target => GuardKind::Target,
            OriginKind::Return => GuardKind::Return,
            OriginKind::Value => GuardKind::Value,
            OriginKind::Memory => GuardKind::Memory,
            OriginKind::Alias => GuardKind::Alias,
            OriginKind::Code => GuardKind::Code,
            OriginKind::Context => GuardKind::Context,
        }
    }
}

/// Where one assumption of a guard comes from.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, JsonSchema,
)]
pub struct GuardOrigin {
    /// What it checks.
    pub kind: GuardKind,
    /// The pc of the guest instruction; of an alias guard, the one at which its access would be executed
    /// again.
    pub pc: u64,
    /// The number of its block on the recorded path, from 0. None for what a pass has assumed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub step: Option<u32>,
}

/// One guard.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Guard {
    /// Its index in [`Fragment::guards`].
    pub index: u32,
    /// What it checks.
    pub kind: GuardKind,
    /// The pc of the guest instruction that it is about; of a merged guard, of the first one.
    pub pc: u64,
    /// The same under all placements: kind, pc and step of its origins, such as `branch@401136.3`. Those of
    /// a merged guard are joined by `+`; guards of one trace that have the same origins are numbered.
    pub site: String,
    /// Where its assumptions come from; of a merged guard, those of all.
    pub origins: Vec<GuardOrigin>,
    /// Is it in the loop? False if it stands before the loop.
    pub in_loop: bool,
    /// Block and index of the assume in the version's final text.
    pub position: (u32, u32),
    /// The predicate as text of the IR. Values are replaced by their definitions.
    pub predicate: String,
    /// The predicate in English.
    pub english: String,
    /// The anchor to which a failure falls back.
    pub anchor: Anchor,
    /// Number of times that it was checked.
    pub executed: u64,
    /// Number of times that it did not hold.
    pub failed: u64,
    /// Where control went when it failed.
    pub went: Vec<Went>,
    /// The host addresses of its jump and of its cold code; 0 for one that it does not have.
    pub host: (u64, u64),
}

/// An anchor of a guard.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Anchor {
    /// Its name in the version.
    pub name: String,
    /// The guest pc to continue at, unless it is computed.
    pub target: Option<u64>,
    /// The anchor as text of the IR.
    pub text: String,
    /// In English: what each guest location holds when the anchor is taken, and which stores are
    /// performed.
    pub english: Vec<String>,
    /// Number of its deferred stores.
    pub stores: u32,
}

/// A destination of control, with the number of times that control went there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Went {
    /// The destination.
    #[serde(flatten)]
    pub to: To,
    /// The number of times.
    pub times: u64,
}

/// A destination of control that leaves a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "to", rename_all = "kebab-case")]
pub enum To {
    /// The runtime, which rebuilds the guest's state and continues.
    Runtime,
    /// A fragment or resolved stub.
    Fragment {
        /// Its id.
        fragment: u32,
    },
    /// A copied block.
    Block {
        /// The guest pc of the block.
        pc: u64,
    },
}

/// The end of a path.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct End {
    /// The guest pc at which execution continues, unless it is computed.
    pub target: Option<u64>,
    /// Number of times that control reached this end.
    pub executed: u64,
    /// Where control went. Ends in the runtime are counted. All others are attributed to the
    /// destination of the end's link when the fragment was dropped, or at the end of the run. An
    /// indirect end has no single destination: its lookups are not counted here.
    pub went: Vec<Went>,
}

/// What `--count-detail` adds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Detail {
    /// The version as built.
    pub built: String,
    /// By block and instruction of it: the address of the guest instruction that it was made for.
    pub pcs: Vec<Vec<u64>>,
    /// The optimised version, from which code was generated.
    pub optimised: String,
    /// Was the optimiser allowed to add guards against aliasing?
    pub alias_guards: bool,
    /// The host address of the fragment's entry.
    pub entry: u64,
    /// Native code on the path.
    pub hot: Code,
    /// Native code of exits.
    pub cold: Code,
    /// Host addresses on the path, ascending, each with block and index of the instruction of the
    /// optimised version whose code begins there.
    pub positions: Vec<(u64, u32, u32)>,
}

/// Bytes of native code.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Code {
    /// The host address of the first byte.
    pub at: u64,
    /// The bytes in hexadecimal.
    pub hex: String,
}

impl std::convert::From<Image> for MappedFile {
    fn from(image: Image) -> MappedFile {
        MappedFile {
            path: image.path.into(),
            start: image.start,
            end: image.end,
            offset: image.offset,
        }
    }
}

/// Is the guest address in the dynamic linker, by the images of a census?
pub fn is_in_linker(images: &[Image], pc: u64) -> bool {
    images.iter().any(|image| image.is_linker && (image.start..image.end).contains(&pc))
}

/// The executable mappings of files now, except those of dynasour's own executable.
pub fn images() -> Vec<Image> {
    let own = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let maps = space::maps().unwrap_or_default();
    let image = |map: space::MapEntry| {
        let executable = map.prot.contains(ProtFlags::PROT_EXEC);
        let path =
            map.path.filter(|path| executable && own != *path)?.to_string_lossy().into_owned();
        if !path.starts_with('/') || path.ends_with(" (deleted)") {
            return None;
        }
        let (start, end, offset) = (map.range.start, map.range.end, map.offset);
        Some(Image { path, start, end, offset, is_linker: linker::has(start) })
    };
    maps.into_iter().filter_map(image).collect()
}

/// The mappings of dynasour's own executable.
pub fn own_code() -> Vec<std::ops::Range<u64>> {
    let own = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let maps = space::maps().unwrap_or_default().into_iter();
    maps.filter(|map| map.path.as_deref() == Some(own.as_os_str())).map(|map| map.range).collect()
}

/// The length in bytes of the counting code at the beginning of `code`; none if there is none.
pub fn counter_length(code: &[u8]) -> Option<usize> {
    dynasour_emitter::counting::length_at(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_says_whether_it_is_the_linker() {
        let old = r#"{"path": "/bin/x", "start": 4096, "end": 8192, "offset": 0}"#;
        let image: Image = serde_json::from_str(old).expect("a file without the field is read");
        assert!(!image.is_linker);
        let linker = Image { is_linker: true, start: 8192, end: 12288, ..image.clone() };
        let is_in = |pc| is_in_linker(&[image.clone(), linker.clone()], pc);
        assert!(is_in(8192) && is_in(12287) && !is_in(4096) && !is_in(12288));
    }
}
