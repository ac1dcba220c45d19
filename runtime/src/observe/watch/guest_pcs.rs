//! For which guest instruction native code is, where only the version as built says it of the IR.
//!
//! A pass keeps the numbers of the values that it keeps, and never gives a number to another value. So an
//! instruction that defines a value of the built version is for the same guest instruction as there. An
//! instruction that a pass has copied (peeling, unrolling) is for the same as the one that it is a copy of:
//! the same operation, in the same order. Anything else is for the same as its first operand. A guard is for
//! the instruction that it names itself.
//!
//! Data: [`Sources`], of one version as built; [`GuestPcs`], of the code of one fragment. No lock.
//!
//! Example: `v21 = add.i64 v18, v19` was built for the `add` at 0x111cb. The optimised version still has
//! v21, and its machine code begins at offset 0x30: [`GuestPcs`] has the pair (0x30, 0x111cb).

use dynasour_ir::{Inst, Operand, Value, Version};
use rustc_hash::FxHashMap;
use similar::{Algorithm, DiffOp, capture_diff_slices};

/// What copies of an instruction have in common: the operation, and whether it has a constant operand.
type Key = (String, bool);

/// For which guest instructions a version was built.
#[derive(Debug)]
pub struct Sources {
    /// By value.
    values: FxHashMap<Value, u64>,
    /// Of all instructions in order.
    keys: Vec<Key>,
    pcs: Vec<u64>,
}

impl Sources {
    /// Of the version as built; `pcs` has the address of a guest instruction for each block and
    /// instruction.
    pub fn of(version: &Version, pcs: &[Vec<u64>]) -> Sources {
        let mut sources =
            Sources { values: FxHashMap::default(), keys: Vec::new(), pcs: Vec::new() };
        for (block, pcs) in version.blocks.iter().zip(pcs) {
            for (inst, pc) in block.insts.iter().zip(pcs) {
                sources.values.extend(inst.defs.iter().map(|value| (*value, *pc)));
                sources.keys.push(key(inst));
                sources.pcs.push(*pc);
            }
        }
        sources
    }

    /// The guest address of each instruction of the optimised version, by block and instruction.
    pub fn pcs(&self, version: &Version) -> Vec<Vec<Option<u64>>> {
        let mut values = self.values.clone();
        let mut all = Vec::new();
        for block in &version.blocks {
            let mut pcs: Vec<Option<u64>> =
                block.insts.iter().map(|inst| self.known(version, inst)).collect();
            let unknown: Vec<usize> = (0..pcs.len()).filter(|i| pcs[*i].is_none()).collect();
            let keys: Vec<Key> = unknown.iter().map(|i| key(&block.insts[*i])).collect();
            for op in capture_diff_slices(Algorithm::Myers, &self.keys, &keys) {
                if let DiffOp::Equal { old_index, new_index, len } = op {
                    for n in 0..len {
                        pcs[unknown[new_index + n]] = Some(self.pcs[old_index + n]);
                    }
                }
            }
            for (pc, inst) in pcs.iter_mut().zip(&block.insts) {
                let mut operands = inst.args.iter().filter_map(|operand| operand.as_value());
                *pc = pc.or_else(|| operands.find_map(|value| values.get(&value).copied()));
                if let Some(pc) = *pc {
                    values.extend(inst.defs.iter().map(|value| (*value, pc)));
                }
            }
            all.push(pcs);
        }
        all
    }

    /// What the instruction says itself.
    fn known(&self, version: &Version, inst: &Inst) -> Option<u64> {
        let native = inst.native.and_then(|native| version.natives.get(native.index()));
        let defined = || inst.defs.iter().find_map(|value| self.values.get(value).copied());
        let origin = || inst.origins.iter().next().map(|origin| origin.pc);
        native.map(|native| native.inst.ip()).or_else(defined).or_else(origin)
    }
}

fn key(inst: &Inst) -> Key {
    let constant = inst.args.iter().any(|operand| matches!(operand, Operand::Const(_)));
    (format!("{}.{} {:?}", inst.op, inst.ty, inst.mem), constant)
}

/// Offsets in the code of a fragment, ascending, each with the address of the guest instruction that the
/// code from there on is for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GuestPcs(Vec<(u32, u64)>);

impl GuestPcs {
    /// By the positions of instructions of the version in its code, and their guest addresses.
    pub fn of(positions: &[(u32, (u32, u32))], pcs: &[Vec<Option<u64>>]) -> GuestPcs {
        let mut all: Vec<(u32, u64)> = Vec::new();
        for &(offset, (block, inst)) in positions {
            let pc = pcs.get(block as usize).and_then(|block| *block.get(inst as usize)?);
            if let Some(pc) = pc.filter(|pc| all.last().is_none_or(|last| last.1 != *pc)) {
                all.push((offset, pc));
            }
        }
        GuestPcs(all)
    }

    /// The pairs of offset and address.
    pub fn iter(&self) -> impl Iterator<Item = &(u32, u64)> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_ir::text;

    fn version(insts: &str) -> Version {
        let text = format!(
            "region 0x10 {{\n  version t1 {{\n    anchor a0 = base.0x10 []\n    \
             b0(v0: i64 = rax):\n{insts}      exit a0\n  }}\n}}\n"
        );
        text::version(&text).expect("a version")
    }

    #[test]
    fn copies_are_for_what_the_original_is_for() {
        let built = version("      v1 = add.i64 v0, 1\n      v2 = mul.i64 v1, v0\n");
        let sources = Sources::of(&built, &[vec![0x10, 0x14]]);
        let copied = version(
            "      v3 = add.i64 v0, 1\n      v4 = mul.i64 v3, v0\n      v1 = add.i64 v4, 1\n      \
             v2 = mul.i64 v1, v0\n      v5 = xor.i64 v2, v0\n",
        );
        let pcs = sources.pcs(&copied);
        assert_eq!(pcs, [[Some(0x10), Some(0x14), Some(0x10), Some(0x14), Some(0x14)]]);
        let positions = [(0, (0, 0)), (4, (0, 0)), (8, (0, 1)), (12, (0, 4)), (16, (7, 7))];
        assert_eq!(GuestPcs::of(&positions, &pcs), GuestPcs(vec![(0, 0x10), (8, 0x14)]));
    }
}
