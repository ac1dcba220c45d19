//! The data model of a version: blocks, instructions, anchors, contexts.
//!
//! Two kinds of version share these types (docs/design.md, "Words" and "The IR"):
//! * `base`: one lifted guest block. It reads and writes guest locations with `get`/`put`, marks
//!   each guest instruction with `at`, and ends in a [`Term::Guest`].
//! * traces: SSA over block parameters, without `get`/`put`/`at`. Control leaves only through
//!   anchors. The parameters of the entry block are the guest state at entry;
//!   [`Version::entry_locs`] names their locations.
//!
//! **Data.** A [`Version`] owns tables of value types, blocks, anchors and natives; instructions
//! refer to them by index. **Invariants** are the verifier's ([`crate::verify`]). **Callers.**
//! Any code that owns or borrows a version; no lock, because a version that threads share is never
//! changed.
//!
//! ```text
//! version t1 {                                        types: [i64, i64]
//!   anchor a0 = base.0x40 [rax = v1]                  anchors[0]: target 0x40, varmap [(rax, v1)]
//!   b0(v0: i64 = rax):                                blocks[0].params: [v0], entry_locs: [rax]
//!     v1 = add.i64 v0, 1                              blocks[0].insts[0]
//!     exit a0 }                                       blocks[0].term
//! ```

use crate::op::Op;
use crate::origin::Origins;
use crate::types::{AnchorId, BlockId, Gpr, Loc, NativeId, Operand, Ty, Value};
use bitflags::bitflags;
use iced_x86::Instruction;
use smallvec::SmallVec;

/// A segment override that matters in 64-bit mode.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Segment {
    /// Relative to the FS base.
    Fs,
    /// Relative to the GS base.
    Gs,
}

/// The part of an x86 address that is not an operand: `seg:[base + index*scale + disp]`.
/// An absent base or index is the operand `Const(0)`; arithmetic wraps at 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Mem {
    /// 1, 2, 4 or 8.
    pub scale: u8,
    /// Added to the sum, 64-bit wrapping.
    pub disp: i64,
    /// Segment whose base is added, if any.
    pub seg: Option<Segment>,
}

impl Mem {
    /// `[base + disp]`
    pub const fn disp(disp: i64) -> Mem {
        Mem { scale: 1, disp, seg: None }
    }
}

/// One instruction. Which fields are used depends on `op`, see [`Op`].
#[derive(Clone, PartialEq, Debug)]
pub struct Inst {
    /// What it does.
    pub op: Op,
    /// The type suffix; `Ty::I64` where `op` has none.
    pub ty: Ty,
    /// The values it defines: at most one, except for `native`.
    pub defs: SmallVec<[Value; 1]>,
    /// The operands. For `load`/`store`: base, index, then the stored value.
    pub args: SmallVec<[Operand; 3]>,
    /// The address shape of `load`, `store`, and of a `native` with an explicit memory operand.
    pub mem: Option<Mem>,
    /// The anchor to fall back to: always on `assume` and `poll`, and in a trace on every
    /// instruction that may fault.
    pub anchor: Option<AnchorId>,
    /// The original instruction of a `native`.
    pub native: Option<NativeId>,
    /// Where an `assume` comes from.
    pub origins: Origins,
}

impl Inst {
    /// An instruction with operands and (maybe) a result, and nothing else.
    pub fn new(op: Op, ty: Ty, def: Option<Value>, args: &[Operand]) -> Inst {
        Inst {
            op,
            ty,
            defs: def.into_iter().collect(),
            args: SmallVec::from_slice(args),
            mem: None,
            anchor: None,
            native: None,
            origins: Origins::default(),
        }
    }

    /// If `predicate` is false, control leaves through `anchor`.
    pub fn assume(predicate: Operand, anchor: Option<AnchorId>, origins: Origins) -> Inst {
        let inst = Inst::new(Op::Assume, Ty::I64, None, &[predicate]);
        Inst { anchor, origins, ..inst }
    }

    /// The one value it defines.
    pub fn def(&self) -> Option<Value> {
        self.defs.first().copied()
    }
}

bitflags! {
    /// What a `native` instruction does besides computing its declared results.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Effects: u16 {
        /// Reads memory.
        const READ = 1;
        /// Writes memory.
        const WRITE = 2;
        /// Its memory accesses are not just the explicit memory operand (string operations,
        /// gathers, fxsave…).
        const UNKNOWN_EXTENT = 4;
        /// Orders memory (mfence, lfence, sfence).
        const FENCE = 8;
        /// A locked read-modify-write.
        const LOCKED = 16;
        /// Two executions may give different results (rdtsc, rdrand, cpuid).
        const NO_REPEAT = 32;
        /// May raise an exception besides a memory fault (divide error, SIMD and x87 floating
        /// point, alignment).
        const MAY_TRAP = 64;
        /// Writes state that is not an SSA value: vector, mask, x87, MXCSR, DF. Ends an anchor's
        /// reach.
        const STATE = 128;
        /// Reads state that is not an SSA value (so it may not move across `STATE`).
        const READ_STATE = 256;
        /// On a fault part of the work is done and registers say how far (rep string, gather,
        /// scatter). So it has all registers and flags that it writes as operands, too.
        const RESTARTABLE = 512;
    }
}

/// What happens to the explicit memory operand of a [`Native`], if it has one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Split {
    /// The native accesses memory itself.
    #[default]
    No,
    /// A load has read the operand; its value is the native's first operand.
    Loaded,
    /// The native computes what it would store, as its only result; a store writes it.
    Stored,
}

impl Split {
    /// What a native does not do whose memory operand another instruction accesses.
    pub const EXCLUDES: Effects = Effects::READ
        .union(Effects::WRITE)
        .union(Effects::UNKNOWN_EXTENT)
        .union(Effects::LOCKED)
        .union(Effects::RESTARTABLE);
}

/// An original guest instruction with its register and memory operands made explicit.
///
/// `Inst::args` holds: base and index if it [has an address](Native::has_address), or the value that was
/// loaded; then one operand per `gpr_in`; then the flags if `flags_in`. `Inst::defs` holds one value
/// per `gpr_out`, then the flags if `flags_out`; or the value to be stored. A register that is written
/// partially or conditionally is also read. Vector, mask, x87 registers and MXCSR are used in place. The
/// registers of the explicit memory operand are *not* in `gpr_in` (unless read otherwise too).
#[derive(Clone, PartialEq, Debug)]
pub struct Native {
    /// The decoded instruction, `ip()` its guest pc, `len()` its length.
    pub inst: Instruction,
    /// Size in bytes of the explicit memory operand, if there is one (0: address only or unknown
    /// extent).
    pub mem_size: Option<u32>,
    /// Who accesses it.
    pub split: Split,
    /// Registers read, other than as memory base or index.
    pub gpr_in: SmallVec<[Gpr; 4]>,
    /// Registers written, as full 64-bit values.
    pub gpr_out: SmallVec<[Gpr; 2]>,
    /// Reads flags, or leaves some of them unchanged.
    pub flags_in: bool,
    /// Writes flags.
    pub flags_out: bool,
    /// Vector registers read or written, by number: bit n is zmm-n.
    pub vec_read: u32,
    /// Vector registers written.
    pub vec_write: u32,
    /// In-place locations written (`Vec`, `Mask`, `X87`, `Mxcsr`, `Df`).
    pub writes: SmallVec<[Loc; 2]>,
    /// Everything else it does.
    pub effects: Effects,
}

impl Native {
    /// Does an instruction with it have an address?
    pub fn has_address(&self) -> bool {
        self.mem_size.is_some() && self.split == Split::No
    }

    /// The type of the value that stands for the memory operand of a native that does not access it.
    pub fn split_ty(&self) -> Option<Ty> {
        let size = self.mem_size.filter(|_| self.split != Split::No)?;
        Ty::int_of_bytes(size)
    }

    /// How many of the operands come before those of `gpr_in`.
    pub fn leading_args(&self) -> usize {
        match self.split {
            Split::No => 2 * usize::from(self.mem_size.is_some()),
            Split::Loaded => 1,
            Split::Stored => 0,
        }
    }
}

/// A store that has been moved out of the hot path and is performed, in order, when its anchor is
/// taken.
#[derive(Clone, PartialEq, Debug)]
pub struct DeferredStore {
    /// Type of the stored value.
    pub ty: Ty,
    /// The address shape.
    pub mem: Mem,
    /// Base, index, value.
    pub args: [Operand; 3],
}

/// A point from which deoptimisation is possible: the `base` pc at which to continue, and how to
/// rebuild the state there.
///
/// `target`, `varmap` and `stores` always describe the way to `base`. `via` is an alternative:
/// another version of the region in which control may continue, so that only the assumptions of
/// this version are undone (sourir 3.3).
#[derive(Clone, PartialEq, Debug)]
pub struct Anchor {
    /// The guest pc to continue at: a constant, except after an indirect jump.
    pub target: Operand,
    /// The pc of the indirect jump, call or return directly before the anchor that computes the
    /// target. Control is at this pc if the target is not an executable address.
    pub after: Option<u64>,
    /// Guest location -> operand, sorted by location. Locations not named are in place.
    pub varmap: Vec<(Loc, Operand)>,
    /// Stores to perform, oldest first.
    pub stores: Vec<DeferredStore>,
    /// A label in another version at which control may continue, before anything above is done.
    pub via: Option<Box<Via>>,
    /// How often the guest has come to the region again on the way here, by calls. Races count that; it has
    /// no other meaning.
    pub passes: u32,
}

/// A label in another version of the region: the *position* of one of its anchors (see
/// [`crate::reach`]), and the values that are live there in terms of this version's operands.
#[derive(Clone, PartialEq, Debug)]
pub struct Via {
    /// The other version's name.
    pub version: String,
    /// Its anchor.
    pub anchor: AnchorId,
    /// Values of the other version -> operands of this one, sorted by value. Every value live at
    /// the label is listed.
    pub values: Vec<(Value, Operand)>,
}

/// How control leaves a `base` block.
#[derive(Clone, PartialEq, Debug)]
pub enum GuestTerm {
    /// Go to a pc: constant for direct jumps and fall-through, a value for indirect ones.
    Goto(Operand),
    /// Conditional branch: i1 condition, taken pc, fall-through pc.
    Branch {
        /// i1
        cond: Operand,
        /// pc if the condition holds
        taken: u64,
        /// pc if not
        fall: u64,
    },
    /// A call; the return address is already pushed.
    Call {
        /// pc of the callee
        target: Operand,
        /// pc of the instruction after the call
        ret: u64,
    },
    /// A return to the popped address.
    Ret(Operand),
    /// `syscall`; `next` is the pc after it. The runtime writes rcx, r11 and rax.
    Syscall {
        /// pc after the instruction
        next: u64,
    },
    /// An instruction that the runtime emulates in Rust (rd/wrfsbase, popf of special bits, xsave
    /// family, …).
    Special {
        /// pc of the instruction
        pc: u64,
    },
    /// An instruction that raises a signal: undefined opcode, privileged, int3, bytes that cannot
    /// be fetched.
    Trap {
        /// pc of the instruction
        pc: u64,
        /// Which trap.
        trap: Trap,
    },
}

/// Traps that an instruction raises whatever its operands are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Trap {
    /// #UD: SIGILL.
    Undefined,
    /// #GP of a privileged or refused instruction: SIGSEGV with si_code SI_KERNEL and address 0.
    Protection,
    /// int3: SIGTRAP, pc after the instruction.
    Breakpoint,
    /// The code bytes cannot be read or executed: SIGSEGV (or SIGBUS) at the first unreadable byte.
    Fetch,
}

/// An edge from the end of a block to the start of another.
#[derive(Clone, PartialEq, Debug)]
pub struct Edge {
    /// Target block.
    pub to: BlockId,
    /// One operand per parameter.
    pub args: Vec<Operand>,
}

/// How a block ends.
#[derive(Clone, PartialEq, Debug)]
pub enum Term {
    /// To another block of the version, with arguments for its parameters.
    Jump {
        /// Target block.
        to: BlockId,
        /// One operand per parameter.
        args: Vec<Operand>,
    },
    /// To one of two blocks of the version. Traces of one path have none; versions that hold several
    /// paths do.
    Branch {
        /// i1
        cond: Operand,
        /// If it holds.
        then: Edge,
        /// If not.
        otherwise: Edge,
    },
    /// Leave the version through an anchor: the normal end of a trace.
    Exit(AnchorId),
    /// The end of a `base` block.
    Guest(GuestTerm),
}

impl Term {
    /// The edges to other blocks of the version: target and operands.
    pub fn edges(&self) -> impl Iterator<Item = (BlockId, &[Operand])> {
        let (first, second) = match self {
            Term::Jump { to, args } => (Some((*to, &args[..])), None),
            Term::Branch { then, otherwise, .. } => {
                (Some((then.to, &then.args[..])), Some((otherwise.to, &otherwise.args[..])))
            }
            Term::Exit(_) | Term::Guest(_) => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// The edges to other blocks of the version, to be changed.
    pub fn edges_mut(&mut self) -> impl Iterator<Item = (&mut BlockId, &mut Vec<Operand>)> {
        let (first, second) = match self {
            Term::Jump { to, args } => (Some((to, args)), None),
            Term::Branch { then, otherwise, .. } => (
                Some((&mut then.to, &mut then.args)),
                Some((&mut otherwise.to, &mut otherwise.args)),
            ),
            Term::Exit(_) | Term::Guest(_) => (None, None),
        };
        first.into_iter().chain(second)
    }
}

/// A straight run of instructions with parameters at its start.
#[derive(Clone, PartialEq, Debug)]
pub struct Block {
    /// Parameters; the entry block's are the guest state at entry.
    pub params: Vec<Value>,
    /// Body, in order.
    pub insts: Vec<Inst>,
    /// Its end.
    pub term: Term,
}

/// One conjunct of a context: a fact about a register at entry, or a monitored fact.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Fact {
    /// A guest register holds this value at entry.
    RegEquals(Gpr, u64),
    /// A guest register holds a value from `min` to `max` at entry, unsigned.
    RegInRange {
        /// Which.
        gpr: Gpr,
        /// The smallest.
        min: u64,
        /// The largest.
        max: u64,
    },
    /// Some bits of a guest register are known at entry: those of `mask` are as in `value`, which
    /// has no others. An aligned address is such a fact.
    RegBits {
        /// Which.
        gpr: Gpr,
        /// The known bits.
        mask: u64,
        /// What they are.
        value: u64,
    },
    /// Monitored: no other thread, process or device writes the guest's private memory
    /// (docs/design.md, "The IR").
    PrivateMemory,
    /// Monitored: memory at a fixed address holds this value as long as nothing writes there. A
    /// write there while the version runs first makes the version fall back (sourir 7.2); the hot
    /// path has no check.
    MemEquals {
        /// i8 to i64.
        ty: Ty,
        /// A linear address.
        address: u64,
        /// What is there.
        value: u64,
    },
}

impl Fact {
    /// Does this fact imply the other?
    pub fn implies(&self, other: &Fact) -> bool {
        match (*self, *other) {
            (Fact::RegEquals(g, v), Fact::RegInRange { gpr, min, max }) => {
                g == gpr && (min..=max).contains(&v)
            }
            (
                Fact::RegInRange { gpr: g, min: low, max: high },
                Fact::RegInRange { gpr, min, max },
            ) => g == gpr && min <= low && high <= max,
            (Fact::RegInRange { gpr: g, min, max }, Fact::RegEquals(gpr, v)) => {
                g == gpr && min == v && max == v
            }
            (Fact::RegEquals(g, v), Fact::RegBits { gpr, mask, value }) => {
                g == gpr && v & mask == value
            }
            (Fact::RegBits { gpr: g, mask: m, value: v }, Fact::RegBits { gpr, mask, value }) => {
                g == gpr && mask & !m == 0 && v & mask == value
            }
            (ours, theirs) => ours == theirs,
        }
    }

    /// The register that it is about, if it is about one.
    pub fn register(&self) -> Option<Gpr> {
        match *self {
            Fact::RegEquals(gpr, _) | Fact::RegInRange { gpr, .. } | Fact::RegBits { gpr, .. } => {
                Some(gpr)
            }
            Fact::PrivateMemory | Fact::MemEquals { .. } => None,
        }
    }

    /// `value` of its register, changed so that the fact holds.
    pub fn fit(&self, value: u64) -> u64 {
        match *self {
            Fact::RegEquals(_, known) => known,
            Fact::RegInRange { min, max, .. } => value.clamp(min, max),
            Fact::RegBits { mask, value: known, .. } => value & !mask | known,
            Fact::PrivateMemory | Fact::MemEquals { .. } => value,
        }
    }

    /// Can this fact and the other not both hold?
    pub fn excludes(&self, other: &Fact) -> bool {
        match (*self, *other) {
            (Fact::RegEquals(g, v), Fact::RegEquals(gpr, value)) => g == gpr && v != value,
            (Fact::RegEquals(g, v), Fact::RegInRange { gpr, min, max })
            | (Fact::RegInRange { gpr, min, max }, Fact::RegEquals(g, v)) => {
                g == gpr && !(min..=max).contains(&v)
            }
            (
                Fact::RegInRange { gpr: g, min: low, max: high },
                Fact::RegInRange { gpr, min, max },
            ) => g == gpr && (high < min || max < low),
            (Fact::RegEquals(g, v), Fact::RegBits { gpr, mask, value })
            | (Fact::RegBits { gpr, mask, value }, Fact::RegEquals(g, v)) => {
                g == gpr && v & mask != value
            }
            (Fact::RegBits { gpr: g, mask: m, value: v }, Fact::RegBits { gpr, mask, value }) => {
                g == gpr && (v ^ value) & m & mask != 0
            }
            _ => false,
        }
    }
}

/// A predicate on guest state that must hold on entry: the conjunction of its facts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Context {
    /// Sorted, without repetition.
    pub facts: Vec<Fact>,
}

impl Context {
    /// Does `self` imply `other` (every fact of `other` follows from one of ours)? The partial
    /// order of contexts.
    pub fn implies(&self, other: &Context) -> bool {
        other.facts.iter().all(|theirs| self.facts.iter().any(|ours| ours.implies(theirs)))
    }

    /// Can `self` and `other` not both hold?
    pub fn excludes(&self, other: &Context) -> bool {
        self.facts.iter().any(|ours| other.facts.iter().any(|theirs| ours.excludes(theirs)))
    }

    /// The monitored fact that a write of `size` bytes at `address` would break.
    pub fn broken_by_write(&self, address: u64, size: u32) -> Option<Fact> {
        self.facts.iter().copied().find(|fact| match *fact {
            Fact::MemEquals { ty, address: at, .. } => {
                address.wrapping_sub(at) < u64::from(ty.bytes())
                    || at.wrapping_sub(address) < u64::from(size)
            }
            _ => false,
        })
    }

    /// The address of a fact about memory, if the context has one.
    pub fn watched(&self) -> Option<u64> {
        self.facts.iter().find_map(|fact| match fact {
            Fact::MemEquals { address, .. } => Some(*address),
            _ => None,
        })
    }

    /// May the passes use `private_memory`?
    pub fn private_memory(&self) -> bool {
        self.facts.contains(&Fact::PrivateMemory)
    }
}

/// One executable form of a region.
#[derive(Clone, PartialEq, Debug)]
pub struct Version {
    /// `base`, `t1`, `t2`, …
    pub name: String,
    /// The guest pc of the region.
    pub region: u64,
    /// Has a pass used facts that hold only because control came from the entry (guards passed,
    /// facts of the context, results of loads)? Then control may not enter it elsewhere:
    /// [`crate::opt::continuation`] takes *fresh* versions only.
    pub optimised: bool,
    /// What must hold on entry.
    pub context: Context,
    /// The type of each value.
    pub types: Vec<Ty>,
    /// Blocks; the first is the entry.
    pub blocks: Vec<Block>,
    /// For each parameter of a trace's entry block, the guest location whose value it is.
    pub entry_locs: Vec<Loc>,
    /// Anchors.
    pub anchors: Vec<Anchor>,
    /// Original instructions.
    pub natives: Vec<Native>,
}

impl Version {
    /// A version with no blocks yet.
    pub fn new(name: &str, region: u64) -> Version {
        Version {
            name: name.to_string(),
            region,
            optimised: false,
            context: Context::default(),
            types: Vec::new(),
            blocks: Vec::new(),
            entry_locs: Vec::new(),
            anchors: Vec::new(),
            natives: Vec::new(),
        }
    }

    /// A new value of type `ty`.
    pub fn value(&mut self, ty: Ty) -> Value {
        self.types.push(ty);
        Value((self.types.len() - 1) as u32)
    }

    /// The type of a value.
    pub fn ty(&self, v: Value) -> Ty {
        self.types[v.index()]
    }

    /// A new anchor.
    pub fn anchor(&mut self, anchor: Anchor) -> AnchorId {
        self.anchors.push(anchor);
        AnchorId((self.anchors.len() - 1) as u32)
    }

    /// Does an anchor defer stores, which are performed only if it is taken?
    pub fn defers_stores(&self) -> bool {
        self.anchors.iter().any(|a| !a.stores.is_empty())
    }

    /// Is this a `base` version (does it end in guest control flow)?
    pub fn is_base(&self) -> bool {
        self.blocks.iter().any(|b| matches!(b.term, Term::Guest(_)))
    }

    /// Calls `f` on every operand of an anchor: target, varmap, deferred stores, label. A varmap is
    /// an ordinary use.
    pub fn for_each_anchor_operand(anchor: &mut Anchor, mut f: impl FnMut(&mut Operand)) {
        f(&mut anchor.target);
        anchor.varmap.iter_mut().for_each(|(_, o)| f(o));
        anchor.stores.iter_mut().flat_map(|s| s.args.iter_mut()).for_each(&mut f);
        anchor.via.iter_mut().flat_map(|via| &mut via.values).for_each(|(_, o)| f(o));
    }

    /// Calls `f` on every operand of a terminator (anchors' operands are visited with the anchors).
    pub fn for_each_term_operand(term: &mut Term, mut f: impl FnMut(&mut Operand)) {
        match term {
            Term::Jump { args, .. } => args.iter_mut().for_each(f),
            Term::Branch { cond, then, otherwise } => {
                f(cond);
                then.args.iter_mut().chain(&mut otherwise.args).for_each(f);
            }
            Term::Exit(_) => {}
            Term::Guest(
                GuestTerm::Goto(o)
                | GuestTerm::Branch { cond: o, .. }
                | GuestTerm::Call { target: o, .. }
                | GuestTerm::Ret(o),
            ) => f(o),
            Term::Guest(
                GuestTerm::Syscall { .. } | GuestTerm::Special { .. } | GuestTerm::Trap { .. },
            ) => {}
        }
    }

    /// Calls `f` on every operand of the version, in instructions, terminators and anchors alike.
    pub fn for_each_operand(&mut self, mut f: impl FnMut(&mut Operand)) {
        for block in &mut self.blocks {
            block.insts.iter_mut().flat_map(|i| i.args.iter_mut()).for_each(&mut f);
            Self::for_each_term_operand(&mut block.term, &mut f);
        }
        self.anchors.iter_mut().for_each(|a| Self::for_each_anchor_operand(a, &mut f));
    }

    /// The operands of a terminator.
    pub fn term_operands(term: &Term) -> SmallVec<[Operand; 4]> {
        let mut out = SmallVec::new();
        Self::for_each_term_operand(&mut term.clone(), |o| out.push(*o));
        out
    }
}

impl Anchor {
    /// An anchor without deferred stores that leads to `base`.
    pub fn new(target: Operand, varmap: Vec<(Loc, Operand)>) -> Anchor {
        Anchor { target, after: None, varmap, stores: Vec::new(), via: None, passes: 0 }
    }

    /// Every operand, in order: target, varmap, deferred stores, label.
    pub fn operands(&self) -> impl Iterator<Item = Operand> + '_ {
        std::iter::once(self.target)
            .chain(self.varmap.iter().map(|(_, o)| *o))
            .chain(self.stores.iter().flat_map(|s| s.args))
            .chain(self.via.iter().flat_map(|via| &via.values).map(|(_, o)| *o))
    }
}

/// Renames operands by a table from value to operand; values beyond the table stay.
pub(crate) fn rename(table: &[Option<Operand>], o: Operand) -> Operand {
    match o {
        Operand::Value(v) => table.get(v.index()).copied().flatten().unwrap_or(o),
        Operand::Const(_) => o,
    }
}

/// May `name` stand unquoted in the text form?
pub(crate) fn is_identifier(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}
