//! What a counting run (`--count`) says: each fragment that was made, how often each part of it
//! ran, and where failures went.
//!
//! The file is JSON of a [`Census`]. Numbers are exact for guests with one thread; threads that run
//! one fragment at once lose counts, which [`Census::exact`] says. `failed` is never above
//! `executed`, and the times of [`Guard::went`] add up to `failed`.

use dynasour_guest::space;
use dynasour_guest::symbols::MappedFile;
use nix::sys::mman::ProtFlags;
use serde::{Deserialize, Serialize};

/// The form of the file that this is.
pub const SCHEMA: u32 = 1;

/// A counting run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Census {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The program as given.
    pub program: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// The tier.
    pub tier: String,
    /// Executions of a head before it was recorded.
    pub threshold: u32,
    /// Name of the guard placement.
    pub policy: String,
    /// Optimiser passes that were run instead of the default ones.
    pub passes: Option<Vec<String>>,
    /// Optimiser passes that were left out.
    pub skipped_passes: Vec<String>,
    /// Is every number exact?
    pub exact: bool,
    /// Times that a fragment was entered from the runtime.
    pub runtime_entries: u64,
    /// Deoptimisations that came to the runtime, by reason.
    pub deopts: std::collections::BTreeMap<String, u64>,
    /// Nanoseconds building, optimising and emitting.
    pub compile_ns: u64,
    /// What is mapped from files and executable at the end, for symbols.
    pub images: Vec<Image>,
    /// In the order in which they were made.
    pub fragments: Vec<Fragment>,
}

/// Executable memory mapped from a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Image {
    /// The file.
    pub path: String,
    /// Where the mapping starts.
    pub start: u64,
    /// Where it ends.
    pub end: u64,
    /// Where in the file it starts.
    pub offset: u64,
}

/// What a fragment was made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A loop of its region.
    Loop,
    /// A path that ends, of its region.
    Linear,
    /// A path that ends, for one exit of another fragment.
    Side,
    /// A loop for one exit of another fragment.
    SideLoop,
    /// The moves from an exit's state to where it goes on.
    Stub,
}

/// One fragment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Fragment {
    /// Its place in [`Census::fragments`].
    pub id: u32,
    /// The name of its version, or `stub`.
    pub name: String,
    /// What it was made for.
    pub kind: Kind,
    /// The guest pc it starts at.
    pub pc: u64,
    /// The fragment whose exit it was made for, and that one's guards that come here.
    pub from: Option<From>,
    /// The recorded blocks, in order.
    pub path: Vec<Step>,
    /// Guest instructions in them.
    pub guest_instructions: u64,
    /// Bytes of native code (with counters), on the path and off it.
    pub code_bytes: CodeBytes,
    /// Spill slots it uses.
    pub spill_slots: u32,
    /// Moves that the register allocator inserted on the path.
    pub moves: u32,
    /// Nanoseconds it took to make.
    pub compile_ns: CompileTimes,
    /// Times that it was entered.
    pub entered: u64,
    /// Times that its loop's head was reached, from the entry and by the back edge, if it is a
    /// loop.
    pub iterations: Option<u64>,
    /// Guards in the order of the code.
    pub guards: Vec<Guard>,
    /// Where the path ends.
    pub ends: Vec<End>,
    /// Times that it was left at its safe point, because a signal wanted out.
    pub polls: u64,
    /// Times that it was left by a fault.
    pub faults: u64,
    /// Was it dropped before the end of the run?
    pub dropped: bool,
    /// Text and code, if they were asked for.
    pub detail: Option<Detail>,
}

/// See [`Fragment::from`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct From {
    /// Which fragment.
    pub fragment: u32,
    /// Indices of its guards.
    pub guards: Vec<u32>,
}

/// How control went from a recorded block to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transfer {
    /// Over the block's end, or by a direct jump.
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
    /// Not at all: the runtime does what comes there.
    Runtime,
}

/// One recorded block.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Step {
    /// Its first instruction.
    pub pc: u64,
    /// Its last instruction.
    pub last: u64,
    /// The byte behind it.
    pub end: u64,
    /// Instructions in it.
    pub instructions: u32,
    /// How control left it.
    pub transfer: Transfer,
    /// Where it went.
    pub next: u64,
    /// Its bytes in hexadecimal, with details.
    pub code: Option<String>,
}

/// Sizes of native code.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CodeBytes {
    /// On the path.
    pub hot: u64,
    /// Exits.
    pub cold: u64,
}

/// Nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
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

/// What a guard checks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuardKind {
    /// The direction of a recorded branch.
    Branch,
    /// The target of an indirect jump, call or return.
    Target,
    /// A register that kept its value at the entry.
    Value,
    /// A store or load misses slots that live in registers.
    Alias,
    /// Writable code is what it was.
    Code,
    /// Several of these at once, of different kinds.
    Mixed,
}

/// One guard.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Guard {
    /// Its place in [`Fragment::guards`].
    pub index: u32,
    /// What it checks.
    pub kind: GuardKind,
    /// The guest instruction that it is about, as far as that is known: else where its anchor
    /// continues.
    pub pc: u64,
    /// Is it in the loop, and not before it?
    pub in_loop: bool,
    /// Block and index of the assume in the version's final text.
    pub place: (u32, u32),
    /// The predicate as text of the IR, values expanded.
    pub predicate: String,
    /// The same in words.
    pub words: String,
    /// Where failures fall back to.
    pub anchor: Anchor,
    /// Times that it was checked.
    pub executed: u64,
    /// Times that it did not hold.
    pub failed: u64,
    /// Where these went.
    pub went: Vec<Went>,
    /// Host addresses of its jump and of its cold code; 0 if it has none.
    pub host: (u64, u64),
}

/// An anchor of a guard.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Anchor {
    /// Its name in the version.
    pub name: String,
    /// The guest pc to continue at, unless it is computed.
    pub target: Option<u64>,
    /// As text of the IR.
    pub text: String,
    /// What each location holds then, and the stores that are performed.
    pub words: Vec<String>,
    /// How many of these are deferred stores.
    pub stores: u32,
}

/// Where control went, and how often.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Went {
    /// Where.
    #[serde(flatten)]
    pub to: To,
    /// How often.
    pub times: u64,
}

/// See [`Went`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "to", rename_all = "kebab-case")]
pub enum To {
    /// To the runtime, which rebuilds the guest's state and interprets on.
    Runtime,
    /// To a fragment or stub.
    Fragment {
        /// Which.
        fragment: u32,
    },
    /// To a copied block.
    Block {
        /// The guest's pc there.
        pc: u64,
    },
}

/// The end of a path.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct End {
    /// The guest pc, unless it is computed.
    pub target: Option<u64>,
    /// Times that the path came to its end.
    pub executed: u64,
    /// Where it went on: to the runtime so often, else where it led at the end of the run. Indirect
    /// ends go where their lookup says, which is not counted.
    pub went: Vec<Went>,
}

/// What `--count-detail` adds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Detail {
    /// The version as built.
    pub built: String,
    /// The version as it was emitted.
    pub optimised: String,
    /// Could the optimiser add guards against aliasing?
    pub alias_guards: bool,
    /// Where it is entered.
    pub entry: u64,
    /// Native code on the path.
    pub hot: Code,
    /// Native code of exits.
    pub cold: Code,
}

/// Bytes of native code.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Code {
    /// Where they stood.
    pub at: u64,
    /// In hexadecimal.
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

/// What is mapped from files and executable now, the translator itself left out.
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
        Some(Image { path, start: map.range.start, end: map.range.end, offset: map.offset })
    };
    maps.into_iter().filter_map(image).collect()
}

/// The length of the code that counts, if `code` starts with it.
pub fn counter_length(code: &[u8]) -> Option<usize> {
    dynasour_emitter::counting::length_at(code)
}
