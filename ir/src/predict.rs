//! Predicts the values that code is about to compute, without executing it.
//!
//! Speculation needs to know what a path will see. While a recording searches for a loop of an
//! interpreted program, the recorder wants the values that each block loads and tests; and the
//! optimiser wants to know which of the guards that it could add would fail at once. So this module
//! evaluates IR on registers and memory: pure operations by [`semantics`], loads by reading guest
//! memory, stores in a list. A value that cannot be known (a native's result, a load after a native
//! that writes memory) is `None`.
//!
//! **Data.** One evaluation owns its values and stores; guest state is only read. **Invariant.**
//! The values are guesses that guards check, so no result depends on their being right; another
//! thread may change the memory at any time. **Callers.** The recorder, on the recording thread, and
//! the pass `alias`; no lock.
//!
//! ```text
//! v0 = get.i64 rbx             Some(0x10)
//! v1 = load.i32 [v0]           Some(7), read from guest memory
//! v2 = native n0 …             None
//! ```

use crate::version::{Effects, Inst, Segment, Term, Version};
use crate::{BlockId, Loc, Op, Operand, semantics};
use smallvec::SmallVec;

/// The state that code is about to be executed in.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// General registers by number.
    pub gpr: &'a [u64; 16],
    /// The rflags image.
    pub rflags: u64,
    /// FS and GS base.
    pub segments: [u64; 2],
    /// Reads up to eight bytes of guest memory, zero-extended; `None` if they cannot be read.
    pub read: &'a dyn Fn(u64, u32) -> Option<u64>,
}

/// The registers of a state, which can be kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Registers {
    /// General registers by number.
    pub gpr: [u64; 16],
    /// The rflags image.
    pub rflags: u64,
    /// FS and GS base.
    pub segments: [u64; 2],
}

impl Registers {
    /// This state, with the memory that `read` reads.
    pub fn with<'a>(&'a self, read: &'a dyn Fn(u64, u32) -> Option<u64>) -> Surroundings<'a> {
        Surroundings { gpr: &self.gpr, rflags: self.rflags, segments: self.segments, read }
    }
}

impl From<&Surroundings<'_>> for Registers {
    fn from(around: &Surroundings<'_>) -> Registers {
        Registers { gpr: *around.gpr, rflags: around.rflags, segments: around.segments }
    }
}

/// For each value of a version, its predicted value if there is one.
pub type Prediction = Vec<Option<u64>>;

/// Predicts the values of a version that is entered in the state `around` and goes from block to
/// block by jumps. Where a block comes for the second time, or control may go elsewhere, the
/// prediction ends.
pub fn predict(version: &Version, around: &Surroundings<'_>) -> Prediction {
    let mut e = Evaluation {
        around,
        values: vec![None; version.types.len()],
        gpr: around.gpr.map(Some),
        flags: Some(around.rflags & semantics::ARITH_FLAGS),
        stored: SmallVec::new(),
        memory_known: true,
    };
    let Some(entry) = version.blocks.first() else { return e.values };
    for (param, loc) in entry.params.iter().zip(&version.entry_locs) {
        e.values[param.index()] = e.location(*loc);
    }
    // Jumps lead to later blocks until they close a loop.
    let mut next = Some(BlockId(0));
    while let Some(this) = next {
        let block = &version.blocks[this.index()];
        for inst in &block.insts {
            e.inst(inst, |native| version.natives[native].effects);
        }
        next = match &block.term {
            Term::Jump { to, args } if to.index() > this.index() => {
                let args: SmallVec<[_; 16]> = args.iter().map(|a| e.operand(*a)).collect();
                for (param, value) in version.blocks[to.index()].params.iter().zip(args) {
                    e.values[param.index()] = value;
                }
                Some(*to)
            }
            _ => None,
        };
    }
    e.values
}

/// The predicted value of an operand.
pub fn value_of(values: &Prediction, operand: Operand) -> Option<u64> {
    match operand {
        Operand::Const(c) => Some(c),
        Operand::Value(v) => values.get(v.index()).copied().flatten(),
    }
}

/// The state of the evaluation, in the middle of the block. `None` stands for what is not known.
struct Evaluation<'a> {
    around: &'a Surroundings<'a>,
    values: Prediction,
    gpr: [Option<u64>; 16],
    flags: Option<u64>,
    /// Address, size and value of stores, oldest first.
    stored: SmallVec<[(u64, u32, Option<u64>); 4]>,
    /// False after a write of unknown bytes: then no load is known.
    memory_known: bool,
}

impl Evaluation<'_> {
    fn operand(&self, o: Operand) -> Option<u64> {
        value_of(&self.values, o)
    }

    fn location(&self, loc: Loc) -> Option<u64> {
        match loc {
            Loc::Gpr(g) => self.gpr[g.number()],
            Loc::Flags => self.flags,
            _ => None,
        }
    }

    fn address(&self, inst: &Inst) -> Option<u64> {
        let mem = inst.mem?;
        let segment = match mem.seg {
            None => 0,
            Some(Segment::Fs) => self.around.segments[0],
            Some(Segment::Gs) => self.around.segments[1],
        };
        let index = self.operand(inst.args[1])?.wrapping_mul(u64::from(mem.scale));
        let offset = self.operand(inst.args[0])?.wrapping_add(index).wrapping_add(mem.disp as u64);
        Some(segment.wrapping_add(offset))
    }

    fn load(&self, address: u64, size: u32) -> Option<u64> {
        if !self.memory_known {
            return None;
        }
        let overlaps = |at: u64, n: u32| {
            at.wrapping_sub(address) < u64::from(size) || address.wrapping_sub(at) < u64::from(n)
        };
        match self.stored.iter().rev().find(|s| overlaps(s.0, s.1)) {
            None => (self.around.read)(address, size),
            Some((at, n, value)) if (*at, *n) == (address, size) => *value,
            Some(_) => None,
        }
    }

    fn inst(&mut self, inst: &Inst, effects: impl Fn(usize) -> Effects) {
        let value = match inst.op {
            Op::Get(loc) => self.location(loc),
            Op::Put(Loc::Gpr(g)) => {
                self.gpr[g.number()] = self.operand(inst.args[0]);
                None
            }
            Op::Put(Loc::Flags) => {
                self.flags = self.operand(inst.args[0]);
                None
            }
            Op::Load => self
                .address(inst)
                .and_then(|a| self.load(a, inst.ty.bytes()))
                .map(|v| v & inst.ty.mask()),
            Op::Store => {
                let value = self.operand(inst.args[2]).map(|v| v & inst.ty.mask());
                match self.address(inst) {
                    Some(address) => self.stored.push((address, inst.ty.bytes(), value)),
                    None => self.memory_known = false,
                }
                None
            }
            Op::Native => {
                let wrote = inst.native.is_none_or(|n| {
                    effects(n.index()).intersects(Effects::WRITE | Effects::LOCKED)
                });
                self.memory_known &= !wrote;
                None
            }
            op if op.is_pure() => {
                let args: Option<SmallVec<[u64; 3]>> =
                    inst.args.iter().map(|a| self.operand(*a)).collect();
                args.map(|args| semantics::eval(op, inst.ty, &args))
            }
            _ => None,
        };
        if let Some(v) = inst.def() {
            self.values[v.index()] = value;
        }
    }
}
