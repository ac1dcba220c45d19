//! For which guest instruction each line of the IR is, after each pass.
//!
//! The builder says it of the version as built. A pass keeps the numbers of the values that it keeps, and never
//! gives a number to another value. So a value that a pass makes is the only unknown: it is for the same
//! guest instruction as the one that it is a copy of (the same operation, in the same order), or else as its
//! first operand.
//!
//! Data: [`Origins`], of one trace. **Callers.** `explain`, after each pass; the watchers, once for the version that is
//! compiled. No lock.
//!
//! Example: `v21 = add.i64 v18, v19` was built for the `add` at 0x111cb. The copy `v33 = add.i64 v2, v7` of
//! the pass `peel` is for the same.

use dynasour_ir::{Inst, Op, Operand, Version};
use similar::{Algorithm, DiffOp, capture_diff_slices};
use std::collections::{BTreeMap, HashMap};

/// What the IR of one trace is for.
#[derive(Debug, Default)]
pub struct Origins {
    /// Guest addresses by the beginning of a line: the number of its value, or the whole line of an
    /// instruction that defines none.
    by_line: BTreeMap<String, u64>,
    /// By value.
    values: HashMap<u32, u64>,
    /// The instructions of the last version with a guest address, block by block.
    last: Vec<Vec<(Key, Option<u64>)>>,
}

/// What copies of an instruction have in common.
type Key = (String, bool);

impl Origins {
    /// Of the version as built; `pcs` has a guest address for each block and instruction.
    pub fn built(version: &Version, pcs: &[Vec<u64>]) -> Origins {
        let mut origins = Origins::default();
        let known = |block: usize, inst: usize| pcs.get(block)?.get(inst).copied();
        origins.add(version, known);
        origins
    }

    /// After another pass, or several.
    pub fn after(&mut self, version: &Version) {
        let mut found: HashMap<(usize, usize), u64> = HashMap::new();
        for (b, block) in version.blocks.iter().enumerate() {
            let unknown: Vec<usize> =
                (0..block.insts.len()).filter(|i| self.kept(&block.insts[*i]).is_none()).collect();
            let keys: Vec<Key> = unknown.iter().map(|i| key(&block.insts[*i])).collect();
            let copies = self.last.iter().map(|before| copied(before, &keys));
            let best = copies.max_by_key(|copied| copied.iter().flatten().count());
            for (i, pc) in unknown.iter().zip(best.unwrap_or_default()) {
                found.extend(pc.map(|pc| ((b, *i), pc)));
            }
        }
        self.add(version, |block, inst| found.get(&(block, inst)).copied());
    }

    /// The guest addresses by the beginning of a line.
    pub fn by_line(self) -> BTreeMap<String, u64> {
        self.by_line
    }

    /// By block and instruction of the last version: its guest address.
    pub fn of_last(&self) -> Vec<Vec<Option<u64>>> {
        self.last.iter().map(|block| block.iter().map(|(_, pc)| *pc).collect()).collect()
    }

    /// What an instruction was for before the pass, if the pass has kept its value.
    fn kept(&self, inst: &Inst) -> Option<u64> {
        inst.defs.iter().find_map(|v| self.values.get(&v.0)).copied()
    }

    fn of_operands(&self, inst: &Inst) -> Option<u64> {
        inst.args.iter().filter_map(|o| o.as_value()).find_map(|v| self.values.get(&v.0)).copied()
    }

    fn add(&mut self, version: &Version, known: impl Fn(usize, usize) -> Option<u64>) {
        self.last.clear();
        let text = version.to_string();
        let mut lines = text.lines().map(str::trim).skip_while(|line| !is_head(line));
        for (b, block) in version.blocks.iter().enumerate() {
            lines.next();
            let mut of_block = Vec::new();
            for (i, inst) in block.insts.iter().enumerate() {
                let line = lines.next().unwrap_or_default();
                // What a guard is for follows from its predicate. Its own place is where the placement
                // has moved it.
                let predicate = (inst.op == Op::Assume).then(|| self.of_operands(inst)).flatten();
                let native = inst.native.and_then(|n| version.natives.get(n.index()));
                let pc = self
                    .kept(inst)
                    .or(native.map(|native| native.inst.ip()))
                    .or(predicate)
                    .or_else(|| known(b, i))
                    .or_else(|| self.by_line.get(line).copied())
                    .or_else(|| self.of_operands(inst));
                if let Some(pc) = pc {
                    for def in &inst.defs {
                        self.values.entry(def.0).or_insert(pc);
                        self.by_line.entry(def.to_string()).or_insert(pc);
                    }
                    if inst.defs.is_empty() {
                        self.by_line.entry(line.to_string()).or_insert(pc);
                    }
                }
                of_block.push((key(inst), pc));
            }
            // The end of the block.
            lines.next();
            self.last.push(of_block);
        }
    }
}

/// Is this the first line of a block?
fn is_head(line: &str) -> bool {
    let digits =
        line.strip_prefix('b').map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    digits.is_some_and(|rest| rest.len() + 1 < line.len() && rest.starts_with(['(', ':']))
}

fn key(inst: &Inst) -> Key {
    let constants = inst.args.iter().any(|o| matches!(o, Operand::Const(_)));
    (format!("{}.{} {:?}", inst.op, inst.ty, inst.mem), constants)
}

/// The guest addresses of the instructions of `before` that `keys` are copies of.
fn copied(before: &[(Key, Option<u64>)], keys: &[Key]) -> Vec<Option<u64>> {
    let old: Vec<&Key> = before.iter().map(|(key, _)| key).collect();
    let new: Vec<&Key> = keys.iter().collect();
    let mut out = vec![None; keys.len()];
    for op in capture_diff_slices(Algorithm::Myers, &old, &new) {
        if let DiffOp::Equal { old_index, new_index, len } = op {
            for n in 0..len {
                out[new_index + n] = before[old_index + n].1;
            }
        }
    }
    out
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
        let mut origins = Origins::built(&built, &[vec![0x10, 0x14]]);
        let copied = version(
            "      v3 = add.i64 v0, 1\n      v4 = mul.i64 v3, v0\n      v1 = add.i64 v4, 1\n      \
             v2 = mul.i64 v1, v0\n      v5 = xor.i64 v2, v0\n",
        );
        origins.after(&copied);
        assert_eq!(
            origins.of_last(),
            [[Some(0x10), Some(0x14), Some(0x10), Some(0x14), Some(0x14)]]
        );
        assert_eq!(origins.by_line()["v4"], 0x14);
    }

    #[test]
    fn heads_of_blocks_are_known() {
        assert!(is_head("b0(v0: i64 = rax):") && is_head("b12:"));
        assert!(!is_head("branch v1 → b2") && !is_head("b:") && !is_head("base"));
    }
}
