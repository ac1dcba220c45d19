//! Data about placed code: fragments, their exits and links, and the tables that signal handlers
//! read.
//!
//! Data: the emitter owns one [`Fragment`] for each piece of code that was compiled, and one
//! [`Exit`] for each way out of one; ids are indices into its arrays. A fragment's [`Link`]s are
//! its patchable jumps ([`links`] writes them), its [`counting::Tally`] says what it counts.
//!
//! Invariants. (1) Hot code ascends with the id and cold code descends, so [`fragment_at`] finds a
//! fragment by an address with a binary search. (2) After a fragment was published only atomics,
//! `is_resting` and `role` change, so a signal handler may read the rest at any time.
//!
//! Who calls: threads that hold the emitter; [`fragment_at`] and [`Fragment::fault_exit`] also in
//! signal handlers.
//!
//! Example: a load of the trace at 0x1000 faults at host address 0x2000_1234. [`fragment_at`] finds
//! the fragment, `faults` has a pair with that address, and the handler continues at the cold code
//! of the pair, which leaves through the anchor of the load.

pub mod counting;
mod links;

pub(crate) use crate::codegen::compiled::Borrowed;
use crate::codegen::mach::SiteKind;
use crate::record::Record;
use counting::Tally;
use dynasour_ir::AnchorId;
use dynasour_ir::opt::contexts::Contexts;
pub(crate) use links::set_target;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A fragment of the cache. Ids are dense and start over after a flush.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct FragmentId(pub u32);

/// An exit of some fragment, the value of `ThreadContext::exit_site`. Ids start over after a flush.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ExitId(pub u32);

/// One way by which control leaves a fragment.
#[derive(Clone, Debug)]
pub struct Exit {
    /// The fragment it leaves.
    pub fragment: FragmentId,
    /// What kind of place it is.
    pub kind: SiteKind,
    /// The anchor it leaves through.
    pub anchor: AnchorId,
    /// The guest pc to continue at, unless it is computed.
    pub target: Option<u64>,
    /// [`Anchor::after`](dynasour_ir::Anchor::after), if it is.
    pub after: Option<u64>,
    /// Has the guest certainly executed an instruction between the fragment's entry and this exit?
    /// That is known if there is an effect in between, because no anchor reaches over an effect.
    pub progress: bool,
    /// Index into the fragment's records; trace ends have none.
    pub(crate) record: Option<u32>,
    /// A guard's `jcc`.
    pub(crate) jcc: Option<GuardJump>,
}

/// How a guard tests, and how it is made to fail.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GuardJump {
    /// A `jcc` at this address leaves if this condition holds. To fail always it becomes a `jmp`.
    Leaves(u64, u8),
    /// A back edge that goes on if its condition holds: addresses of its rel32 field, of the loop's
    /// head, and of the guard's cold code. To fail always it is made to lead to the cold code.
    BackEdge(u64, u64, u64),
}

/// Which jump of its fragment a link is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LinkKind {
    /// To the head of a loop inside.
    BackEdge,
    /// Of this trace end, in canonical state.
    End(ExitId),
    /// Of this trace end, where the borrowed registers are still in their slots.
    Borrowed(ExitId),
    /// Of this record, in the state that it describes.
    Record(u32),
    /// Of a guard with this record, in the same state. It leads where the record's link does, or to
    /// the guard's cold code, which goes there.
    Guard(u32),
}

/// A patchable jump.
#[derive(Debug)]
pub(crate) struct Link {
    pub kind: LinkKind,
    /// Address of the rel32 field.
    pub field: u64,
    /// Where it leads while the fragment is unlinked.
    pub out: u64,
    /// Where it leads while the fragment is linked.
    pub target: AtomicU64,
}

impl Link {
    pub fn target(&self) -> u64 {
        self.target.load(Ordering::Relaxed)
    }
}

/// The tail of an indirect trace end. It stands behind the fragment's links, so unlinking does not
/// reach a thread inside.
#[derive(Clone, Debug)]
pub(crate) struct Tail {
    /// Its addresses.
    pub range: Range<u64>,
    /// The address from which on rcx is displaced.
    pub displaced: u64,
    /// The end's unlinked stub.
    pub out: u64,
}

/// The purpose of a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FragmentRole {
    /// It executes guest instructions.
    Trace,
    /// It makes the state of an exit canonical and goes on from there.
    Stub,
    /// It moves borrowed registers on the way to this fragment, to which it belongs.
    Passage(FragmentId),
}

/// One piece of emitted code.
#[derive(Debug)]
pub struct Fragment {
    /// The guest pc of its region.
    pub pc: u64,
    /// The name of the version it was made from.
    pub version: String,
    /// The address to enter it at, in canonical state.
    pub entry: u64,
    /// Where indirect jumps to its pc arrive, right before `entry`; if it has such a place.
    pub checked: Option<u64>,
    /// Addresses of the hot code.
    pub hot: Range<u64>,
    /// Addresses of the cold code.
    pub cold: Range<u64>,
    /// Its exits.
    pub exits: Range<u32>,
    /// Words of `scratch` it uses.
    pub spill_slots: u32,
    /// The first word of `scratch` that neither this fragment uses nor the fragment from whose exit
    /// it was compiled.
    pub(crate) end_of_slots: u32,
    /// Moves the register allocator inserted in hot code.
    pub hot_moves: u32,
    /// Does it read or write vector, mask, x87 state or MXCSR?
    pub uses_vector: bool,
    /// Host registers whose contents at exits are the fragment's own: bit n is register n.
    pub touched: u16,
    /// The borrowed registers that it saves at entry, with their slots. Each register has a slot of
    /// its own, so a value that one fragment saved may stay there for the next.
    pub(crate) saves: Borrowed,
    /// The registers whose guest values are in slots at its direct ends.
    pub(crate) restores: Borrowed,
    /// Addresses at which it is entered with its registers saved already: without and with the
    /// extended state loaded.
    pub(crate) inside: (u64, u64),
    /// Its purpose.
    pub(crate) role: FragmentRole,
    /// Does it rest? Then nothing may lead to it
    /// ([`Emitter::put_to_rest`](crate::Emitter::put_to_rest)).
    pub(crate) is_resting: bool,
    /// Is the extended state certainly in the processor at its exits?
    pub(crate) extended_live: bool,
    /// What it needs of the guest's registers, and what is known of them at its exits.
    pub contexts: Contexts,
    pub(crate) records: Vec<Record>,
    /// Host address of a faulting instruction -> cold address, sorted.
    pub(crate) faults: Box<[(u64, u64)]>,
    /// All patchable jumps.
    pub(crate) links: Box<[Link]>,
    pub(crate) tails: Box<[Tail]>,
    /// What its words count, if it counts.
    pub tally: Option<Box<Tally>>,
    /// The code that counts its starts while a race judges it, if it can race.
    pub(crate) starts: StartCounts,
    /// Unlinkings that have not been undone. While there are any, its links lead out.
    pub(crate) unlinked: AtomicU32,
}

/// The code that counts the starts of a fragment ([`crate::emitter::race`]).
#[derive(Debug, Default)]
pub(crate) struct StartCounts {
    /// Where each piece stands, and its length. While it does not count, the jump at its beginning leads
    /// over it.
    pub(crate) pieces: Box<[(u64, u32)]>,
    /// The number of the word in which its loop counts instead, always.
    pub(crate) own_word: Option<u32>,
    /// Does it count now?
    pub(crate) is_counting: bool,
}

impl Fragment {
    /// The cold code that a fault of the instruction at `host_rip` continues at. Async-signal-safe.
    pub fn fault_exit(&self, host_rip: u64) -> Option<u64> {
        let i = self.faults.binary_search_by_key(&host_rip, |f| f.0).ok()?;
        Some(self.faults[i].1)
    }
}

/// Finds the fragment whose code contains an address. Async-signal-safe.
pub(crate) fn fragment_at(fragments: &[Fragment], address: u64) -> Option<FragmentId> {
    let hot = fragments.partition_point(|f| f.hot.start <= address);
    if hot > 0 && fragments[hot - 1].hot.contains(&address) {
        return Some(FragmentId(hot as u32 - 1));
    }
    let cold = fragments.partition_point(|f| f.cold.start > address);
    (cold < fragments.len() && fragments[cold].cold.contains(&address))
        .then_some(FragmentId(cold as u32))
}
