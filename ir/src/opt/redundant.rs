//! Pass `redundant`: removes assumes whose predicate is known to hold, over any control flow.
//!
//! ```text
//! assume lt.u.i64 10, v1 else a0              assume lt.u.i64 10, v1 else a0
//! assume ne.i64 v1, 0 else a1                                                     v1 > 10 is not 0
//! ```
//!
//! Side condition: the predicate is known *before* the assume on every path, from
//! definitions, branches and other guards ([`super::facts`]), or an assume of the same value or of
//! an equal expression dominates it. Removing an assume never makes an anchor wrong, because it
//! only removes an occasion to take it. While anchors defer stores only an equal guard makes
//! another one redundant: the guard may be the proof that an access misses the stores.
//!
//! The analysis lives for one run; the caller owns the version, no lock.

use super::OptOptions;
use super::facts::Facts;
use crate::defs::{Defs, Expr};
use crate::op::Op;
use crate::reach::Cfg;
use crate::side_conditions::{SideCondition, holds};
use crate::types::{BlockId, Operand};
use crate::version::Version;
use rustc_hash::FxHashSet;

/// Runs the pass; returns the number of assumes removed.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if version.is_base() || version.blocks.is_empty() {
        return 0;
    }
    let cfg = Cfg::new(version);
    let mut gone: Vec<Vec<bool>> =
        version.blocks.iter().map(|b| vec![false; b.insts.len()]).collect();
    let facts = Facts::new(version, &cfg);
    let nothing_waits = !version.defers_stores();
    let by_facts = holds(SideCondition::RedundantNothingWaits, nothing_waits);
    for block in cfg.order.iter().filter(|_| by_facts) {
        facts.walk(*block, |point, env| {
            if let Some(inst) = version.blocks[block.index()].insts.get(point.inst)
                && inst.op == Op::Assume
                && holds(
                    SideCondition::RedundantKnown,
                    facts.constant(env, inst.args[0]).is_some_and(|c| c != 0),
                )
            {
                gone[block.index()][point.inst] = true;
            }
        });
    }
    repeated(version, &cfg, &mut gone);
    let mut removed = 0;
    for (block, gone) in version.blocks.iter_mut().zip(&gone) {
        let before = block.insts.len();
        let mut flags = gone.iter();
        block.insts.retain(|_| !*flags.next().unwrap_or(&false));
        removed += before - block.insts.len();
    }
    removed
}

/// Marks assumes of a predicate that a dominating assume has checked.
fn repeated(version: &Version, cfg: &Cfg, gone: &mut [Vec<bool>]) {
    let defs = Defs::of(version);
    // The predicates checked by the assumes that dominate the end of each block.
    let mut at_end: Vec<FxHashSet<Checked>> = vec![FxHashSet::default(); version.blocks.len()];
    for block in &cfg.order {
        let mut checked = cfg
            .parent(*block)
            .map_or_else(FxHashSet::default, |p: BlockId| at_end[p.index()].clone());
        for (i, inst) in version.blocks[block.index()].insts.iter().enumerate() {
            if inst.op != Op::Assume || gone[block.index()][i] {
                continue;
            }
            let value = !checked.insert(Checked::Value(inst.args[0]));
            let expr = defs.get(inst.args[0]).is_some_and(|e| !checked.insert(Checked::Expr(e)));
            gone[block.index()][i] = value || expr;
        }
        at_end[block.index()] = checked;
    }
}

/// A predicate that has been checked.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Checked {
    Value(Operand),
    Expr(Expr),
}
