//! Predicts the values that code is about to compute, without executing it.
//!
//! Speculation needs to know what a path will see. While a recording searches for a loop of an
//! interpreted program, the recorder wants the values that each block loads and tests; and the
//! optimiser wants to know which of the guards that it could add would fail at once. So this module
//! evaluates IR on registers and memory: pure operations by [`semantics`], loads by reading guest
//! memory, stores in a list. A value that cannot be known (a load after a native that writes memory of
//! unknown extent) is `None`; natives' results are known if they were observed before.
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

use crate::alias::{Access, access};
use crate::version::{Inst, Native, Segment, Version};
use crate::{BlockId, Gpr, Loc, Op, Operand, semantics};
use iced_x86::{Mnemonic, Register};
use rustc_hash::FxHashMap;
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

/// Results that natives had when the code was observed: by the native's number, and the position among
/// its results. A copy of a native has its number.
pub type NativeResults = FxHashMap<(usize, usize), u64>;

/// Predicts the values of a version that is entered in the state `around` and goes from block to
/// later block; of a branch both ways are followed. Where a block comes for the second time, the
/// prediction ends. Of natives only divisions are predicted; what others compute is taken from
/// `results`.
pub fn predict(
    version: &Version,
    around: &Surroundings<'_>,
    results: &NativeResults,
) -> Prediction {
    let mut e = Evaluation {
        around,
        results,
        values: vec![None; version.types.len()],
        state: State {
            gpr: around.gpr.map(Some),
            flags: Some(around.rflags & semantics::ARITH_FLAGS),
            stored: SmallVec::new(),
            memory_known: true,
        },
    };
    let Some(entry) = version.blocks.first() else { return e.values };
    for (param, loc) in entry.params.iter().zip(&version.entry_locs) {
        e.values[param.index()] = e.location(*loc);
    }
    // Jumps lead to later blocks until they close a loop. Both ways of a branch are followed, the
    // second in the state at the branch.
    let mut next = vec![(BlockId(0), e.state.clone())];
    let mut seen = vec![false; version.blocks.len()];
    while let Some((this, state)) = next.pop() {
        if std::mem::replace(&mut seen[this.index()], true) {
            continue;
        }
        e.state = state;
        let block = &version.blocks[this.index()];
        for inst in &block.insts {
            e.inst(version, inst);
        }
        for (to, args) in block.term.edges().filter(|(to, _)| to.index() > this.index()) {
            let args: SmallVec<[_; 16]> = args.iter().map(|a| e.operand(*a)).collect();
            for (param, value) in version.blocks[to.index()].params.iter().zip(args) {
                e.values[param.index()] = value;
            }
            next.push((to, e.state.clone()));
        }
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
    results: &'a NativeResults,
    values: Prediction,
    state: State,
}

/// The guest's state. `None` stands for what is not known.
#[derive(Clone)]
struct State {
    gpr: [Option<u64>; 16],
    flags: Option<u64>,
    /// Address, size and value of stores, oldest first.
    stored: SmallVec<[(u64, u32, Option<u64>); 4]>,
    /// False after a write of unknown extent: then no load is known. A write to an unknown address
    /// probably misses what is loaded later.
    memory_known: bool,
}

impl Evaluation<'_> {
    fn operand(&self, o: Operand) -> Option<u64> {
        value_of(&self.values, o)
    }

    fn location(&self, loc: Loc) -> Option<u64> {
        match loc {
            Loc::Gpr(g) => self.state.gpr[g.number()],
            Loc::Flags => self.state.flags,
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
        if !self.state.memory_known {
            return None;
        }
        let overlaps = |at: u64, n: u32| {
            at.wrapping_sub(address) < u64::from(size) || address.wrapping_sub(at) < u64::from(n)
        };
        match self.state.stored.iter().rev().find(|s| overlaps(s.0, s.1)) {
            None => (self.around.read)(address, size),
            Some((at, n, value)) if (*at, *n) == (address, size) => *value,
            Some(_) => None,
        }
    }

    fn inst(&mut self, version: &Version, inst: &Inst) {
        let value = match inst.op {
            Op::Get(loc) => self.location(loc),
            Op::Put(Loc::Gpr(g)) => {
                self.state.gpr[g.number()] = self.operand(inst.args[0]);
                None
            }
            Op::Put(Loc::Flags) => {
                self.state.flags = self.operand(inst.args[0]);
                None
            }
            Op::Load => self
                .address(inst)
                .and_then(|a| self.load(a, inst.ty.bytes()))
                .map(|v| v & inst.ty.mask()),
            Op::Store => {
                let value = self.operand(inst.args[2]).map(|v| v & inst.ty.mask());
                if let Some(address) = self.address(inst) {
                    self.state.stored.push((address, inst.ty.bytes(), value));
                }
                None
            }
            Op::Native => {
                match (access(version, inst), self.address(inst)) {
                    (Access::None | Access::Read(_) | Access::ReadUnknown, _) => {}
                    (Access::Write(size), Some(address)) => {
                        self.state.stored.push((address, size, None));
                    }
                    (Access::Write(_), None) => {}
                    (Access::Barrier, _) => self.state.memory_known = false,
                }
                None
            }
            op if op.is_pure() => {
                let args: Option<SmallVec<[u64; 3]>> =
                    inst.args.iter().map(|a| self.operand(*a)).collect();
                args.map(|args| semantics::eval(op, inst.ty, &args))
            }
            _ => None,
        };
        if let Some(number) = inst.native {
            let native = &version.natives[number.index()];
            let divided = self.division(native, inst);
            for (n, v) in inst.defs.iter().enumerate() {
                let predicted = match (divided, native.gpr_out.get(n)) {
                    (Some([quotient, _]), Some(&Gpr::RAX)) => Some(quotient),
                    (Some([_, remainder]), Some(&Gpr::RDX)) => Some(remainder),
                    _ => None,
                };
                let observed = || self.results.get(&(number.index(), n)).copied();
                self.values[v.index()] = predicted.or_else(observed);
            }
        } else if let Some(v) = inst.def() {
            self.values[v.index()] = value;
        }
    }

    /// The quotient and the remainder, if the native is a division of 32 or 64 bits by a register whose
    /// operands are known and which does not trap.
    fn division(&self, native: &Native, inst: &Inst) -> Option<[u64; 2]> {
        let is_signed = match native.inst.mnemonic() {
            Mnemonic::Div => false,
            Mnemonic::Idiv => true,
            _ => return None,
        };
        let divisor = native.inst.op0_register();
        let operand = |register: Register| {
            let is_it = |g: &Gpr| g.number() == register.full_register().number();
            let n = native.gpr_in.iter().position(is_it)?;
            self.operand(*inst.args.get(n)?)
        };
        let [low, high] = [operand(Register::RAX)?, operand(Register::RDX)?];
        let divisor_value = operand(divisor)?;
        match (divisor.size(), is_signed) {
            (4, false) => {
                let dividend = high << 32 | low & u64::from(u32::MAX);
                let by = divisor_value & u64::from(u32::MAX);
                let quotient = u32::try_from(dividend.checked_div(by)?).ok()?;
                Some([quotient.into(), dividend % by])
            }
            (4, true) => {
                let dividend = (high << 32 | low & u64::from(u32::MAX)) as i64;
                let by = i64::from(divisor_value as i32);
                let quotient = i32::try_from(dividend.checked_div(by)?).ok()?;
                Some([u64::from(quotient as u32), u64::from((dividend % by) as u32)])
            }
            (8, false) => {
                let dividend = u128::from(high) << 64 | u128::from(low);
                let quotient = dividend.checked_div(divisor_value.into())?;
                let remainder = dividend % u128::from(divisor_value);
                Some([u64::try_from(quotient).ok()?, remainder as u64])
            }
            (8, true) => {
                let dividend = (u128::from(high) << 64 | u128::from(low)) as i128;
                let by = i128::from(divisor_value as i64);
                let quotient = i64::try_from(dividend.checked_div(by)?).ok()?;
                Some([quotient as u64, (dividend % by) as u64])
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::version;

    /// The values that a version computes which consists of one division.
    fn division(
        bytes: &str,
        signed: &str,
        size: &str,
        [rax, rdx, rcx]: [u64; 3],
    ) -> [Option<u64>; 2] {
        let text = format!(
            "region 0x1000 {{ version t1 {{
    native n0 = 0x1000 \"{bytes}\" in [rax, rcx, rdx] out [rax, rdx, rflags] effects [may_trap] ; {signed}div {size}
    anchor a0 = base.0x1000 []
    b0(v0: i64 = rax, v1: i64 = rcx, v2: i64 = rdx):
      v3, v4, v5 = native n0 v0, v1, v2 !a0 ; {signed}div {size}
      exit a0
  }} }}"
        );
        let version = version(&text).expect("a version");
        let mut gpr = [0; 16];
        (gpr[Gpr::RAX.number()], gpr[Gpr::RDX.number()], gpr[Gpr::RCX.number()]) = (rax, rdx, rcx);
        let nothing = |_, _| None;
        let around = Surroundings { gpr: &gpr, rflags: 0, segments: [0; 2], read: &nothing };
        let values = predict(&version, &around, &NativeResults::default());
        [values[3], values[4]]
    }

    #[test]
    fn divisions_are_predicted() {
        let minus = |n: u64| 0u64.wrapping_sub(n);
        let low = |n: u64| n & 0xffff_ffff;
        assert_eq!(division("f7 f1", "", "ecx", [17, 0, 5]), [Some(3), Some(2)]);
        assert_eq!(division("f7 f1", "", "ecx", [0, 7, 5]), [None, None], "too large");
        assert_eq!(
            division("f7 f9", "i", "ecx", [low(minus(17)), low(minus(1)), 5]),
            [Some(low(minus(3))), Some(low(minus(2)))]
        );
        assert_eq!(division("48 f7 f1", "", "rcx", [3, 1, 16]), [Some(1 << 60), Some(3)]);
        assert_eq!(
            division("48 f7 f9", "i", "rcx", [minus(9), minus(1), 2]),
            [Some(minus(4)), Some(minus(1))]
        );
        assert_eq!(division("48 f7 f9", "i", "rcx", [1, 0, 0]), [None, None], "by zero");
    }
}
