//! Predicts the values that a block is about to compute, without executing it.
//!
//! While a recording searches for a loop of an interpreted program ([`crate::guests`]) it needs the
//! values that the path loads and tests. The interpreter does not keep them. So before the
//! interpreter executes a block, this module evaluates the block on the registers and memory that
//! it will find: pure operations by [`semantics`], loads by reading guest memory, stores in a list.
//! A value that cannot be known (a native's result, a load after a native that writes memory) is
//! `None`.
//!
//! **Data.** One evaluation owns its values and stores; guest state is only read. **Invariant.**
//! The values are guesses that the trace guards, so no result depends on their being right; another
//! thread may change the memory at any time. **Callers.** The recorder, on the recording thread; no
//! lock.
//!
//! ```text
//! v0 = get.i64 rbx             Some(0x10)
//! v1 = load.i32 [v0]           Some(7), read from guest memory
//! v2 = native n0 …             None
//! ```

use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::{Effects, Inst, Loc, Op, Operand, Segment, semantics};
use smallvec::SmallVec;

/// The state that a block is about to be executed in.
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

/// For each value of a base block, its predicted value if there is one.
pub type Observation = Vec<Option<u64>>;

/// Predicts the values of `block`.
pub fn observe(block: &LiftedBlock, around: &Surroundings<'_>) -> Observation {
    let version = &block.version;
    let mut e = Evaluation {
        around,
        values: vec![None; version.types.len()],
        gpr: around.gpr.map(Some),
        flags: Some(around.rflags & semantics::ARITH_FLAGS),
        stored: SmallVec::new(),
        memory_known: true,
    };
    for inst in &version.blocks[0].insts {
        e.inst(inst, |native| version.natives[native].effects);
    }
    e.values
}

/// The state of the evaluation, in the middle of the block. `None` stands for what is not known.
struct Evaluation<'a> {
    around: &'a Surroundings<'a>,
    values: Observation,
    gpr: [Option<u64>; 16],
    flags: Option<u64>,
    /// Address, size and value of stores, oldest first.
    stored: SmallVec<[(u64, u32, Option<u64>); 4]>,
    /// False after a write of unknown bytes: then no load is known.
    memory_known: bool,
}

impl Evaluation<'_> {
    fn operand(&self, o: Operand) -> Option<u64> {
        match o {
            Operand::Const(c) => Some(c),
            Operand::Value(v) => self.values[v.index()],
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
            Op::Get(Loc::Gpr(g)) => self.gpr[g.number()],
            Op::Get(Loc::Flags) => self.flags,
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
