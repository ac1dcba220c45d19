//! Pass `hoist`: moves predicates that do not vary in a loop to a guard before the loop (sourir
//! 4.5, 7.1).
//!
//! An assume itself cannot move up, because it falls back to a state further down. Its *predicate*
//! can. The pass adds an assume of it before the loop, on an anchor that reaches the end of the
//! loop's preheader; transparency allows an assume at any such point. Then the loop's own assume is
//! redundant and is removed.
//!
//! ```text
//! b0: jump b1(v0)                  b0: v7 = eq.i64 v1, 5
//!                                      assume v7 else a9           a9: base at the version's entry
//!                                      jump b1(v0)
//! b1(v4): poll else a0             b1(v4): poll else a0
//!     v5 = eq.i64 v1, 5                v5 = eq.i64 v1, 5
//!     assume v5 else a1                …
//! ```
//!
//! Side conditions: the predicate does not vary in the loop, that is, pure operations
//! compute it from values defined outside; and an anchor reaches the end of the preheader. What
//! pays: the assume runs in every iteration, so the copy fails no more often than the original.
//!
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use super::inject::anchor_for;
use super::loops::{Loop, is_steady, loops, make_preheaders};
use crate::op::Op;
use crate::origin::Origins;
use crate::reach::{Cfg, Def, definitions};
use crate::types::{BlockId, Operand, Value};
use crate::version::{Inst, Version};
use rustc_hash::FxHashMap;

/// Most operations of a predicate that is hoisted (guess: they are repeated before the loop).
const MAX_OPERATIONS: usize = 6;

/// Runs the pass; returns how many predicates were hoisted.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if version.is_base() || version.blocks.is_empty() {
        return 0;
    }
    make_preheaders(version);
    let mut hoisted = 0;
    // A predicate moves out of one loop in each round; nested loops take several.
    while let Some(done) = round(version) {
        hoisted += done;
    }
    hoisted
}

/// Hoists all predicates of the first loop that has any; `None` if no loop has.
fn round(version: &mut Version) -> Option<usize> {
    let cfg = Cfg::new(version);
    for l in loops(version, &cfg) {
        let found = candidates(version, &cfg, &l);
        if found.is_empty() {
            continue;
        }
        let Some(before) = l.before(version) else { continue };
        let Some(anchor) = anchor_for(version, &cfg, before) else { continue };
        for (_, _, slice) in &found {
            let predicate = clone_slice(version, before.block, slice);
            let assume = Inst::assume(predicate, Some(anchor), slice.origins.clone());
            version.blocks[before.block.index()].insts.push(assume);
        }
        for (block, inst, _) in found.iter().rev() {
            version.blocks[block.index()].insts.remove(*inst);
        }
        return Some(found.len());
    }
    None
}

/// The operations of the loop that compute a predicate, operands first; the last one is the
/// predicate.
struct Slice {
    insts: Vec<Inst>,
    predicate: Operand,
    /// Of the assume.
    origins: Origins,
}

/// The assumes of a loop that run in every iteration and whose predicate does not vary, with the
/// operations that compute it.
fn candidates(version: &Version, cfg: &Cfg, l: &Loop) -> Vec<(BlockId, usize, Slice)> {
    let (varying, defs) = (l.varying(version), definitions(version));
    let mut found = Vec::new();
    for block in cfg.order.iter().filter(|b| l.contains[b.index()] && l.always_runs(cfg, **b)) {
        for (i, inst) in version.blocks[block.index()].insts.iter().enumerate() {
            if inst.op == Op::Assume
                && inst.args[0].as_const().is_none()
                && let Some(insts) = steady_slice(version, &defs, &varying, inst.args[0])
            {
                let (predicate, origins) = (inst.args[0], inst.origins.clone());
                found.push((*block, i, Slice { insts, predicate, origins }));
            }
        }
    }
    found
}

/// The pure operations of the loop that compute an operand from values that do not vary; `None` if
/// others are needed.
fn steady_slice(
    version: &Version,
    defs: &[Option<Def>],
    varying: &[bool],
    predicate: Operand,
) -> Option<Vec<Inst>> {
    let mut slice: Vec<Inst> = Vec::new();
    let mut work = vec![predicate];
    while let Some(o) = work.pop() {
        if is_steady(varying, o) {
            continue;
        }
        let Some(Def::Inst(point)) = o.as_value().and_then(|v| defs[v.index()]) else {
            return None;
        };
        let inst = &version.blocks[point.block.index()].insts[point.inst];
        if !inst.op.is_pure() || slice.len() == MAX_OPERATIONS {
            return None;
        }
        // An operation that is met again moves before all operations that use it.
        slice.retain(|known| known.defs != inst.defs);
        slice.push(inst.clone());
        work.extend(inst.args.iter().copied());
    }
    slice.reverse();
    Some(slice)
}

/// Appends a copy of the slice to a block; returns the copy of the predicate.
fn clone_slice(version: &mut Version, block: BlockId, slice: &Slice) -> Operand {
    let mut map: FxHashMap<Value, Operand> = FxHashMap::default();
    let renamed = |map: &FxHashMap<Value, Operand>, o: Operand| match o {
        Operand::Value(v) => map.get(&v).copied().unwrap_or(o),
        Operand::Const(_) => o,
    };
    for inst in &slice.insts {
        let mut copy = inst.clone();
        copy.args.iter_mut().for_each(|a| *a = renamed(&map, *a));
        for def in &mut copy.defs {
            let fresh = version.value(version.ty(*def));
            map.insert(*def, fresh.into());
            *def = fresh;
        }
        version.blocks[block.index()].insts.push(copy);
    }
    renamed(&map, slice.predicate)
}
