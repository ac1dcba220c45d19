//! Injects assumptions (sourir 3.4) at any point that an anchor reaches (4.4, unrestricted
//! deoptimisation).
//!
//! An assumption may stand at every point that some anchor reaches. Nothing outside SSA has
//! happened since the anchor's position, so going back to the position loses nothing. By
//! transparency taking the anchor is right whether or not the predicate holds. The varmap is a
//! snapshot of the state at the position, because SSA values do not change.
//!
//! ```text
//! anchor a0 = base.0x1000 [rax = v0]                 position: the poll
//! b1: poll else a0
//!     v1 = load.i64 [v0] !a0
//!     branch v2 then b2() else b3()
//! b2: assume eq.i64 v1, 1 else a0                    injected here: checked on this path only
//! ```
//!
//! If no anchor reaches the point, [`anchor_for`] makes one in two cases. (1) At the end of a block
//! that jumps, the state is that at the start of the next block. An anchor there, with arguments in
//! place of parameters, is an anchor here; so there always is one before a loop that begins with
//! its poll. (2) If nothing has happened since the version's entry, the entry is the point to go
//! back to: every location that anchors name has the value of its entry parameter.
//!
//! `hoist`, `licm`, `slots` and [`super::speculation`] call this module on a version that they own;
//! no data, no lock.

use crate::origin::{Origin, OriginKind, Origins};
use crate::reach::{Cfg, Point, Reach, ends_reach};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{AnchorId, BlockId, Loc, Operand, Ty};
use crate::version::{Anchor, Inst, Term, Version};

/// Finds an anchor that reaches `point`; of several the one whose position comes last, because
/// falling back to it repeats least. If there is none it makes an anchor for the start of the block
/// to which `point` jumps, or for the entry if nothing has happened since.
pub fn anchor_for(version: &mut Version, cfg: &Cfg, point: Point) -> Option<AnchorId> {
    if !cfg.is_reachable(point.block) {
        return None;
    }
    let reach = Reach::new(version, cfg);
    let position = |a: AnchorId| reach.positions[a.index()];
    let later = |a: AnchorId, b: AnchorId| match (position(a), position(b)) {
        (Some(x), Some(y)) if cfg.point_dominates(x, y) => b,
        _ => a,
    };
    let reaches = reach.anchors_at(point);
    let used = (0..version.anchors.len() as u32)
        .map(AnchorId)
        .filter(|a| reach.positions[a.index()].is_some());
    let near = used.filter(|a| holds(SideCondition::InjectReach, reaches.contains(a)));
    if let Some(youngest) = near.reduce(later) {
        return Some(youngest);
    }
    if let Some(next) = next_block_anchor(version, cfg, &reach, point) {
        return Some(version.anchor(next));
    }
    let named: Vec<Loc> = (0..Loc::SSA_COUNT)
        .map(Loc::from_ssa_index)
        .filter(|loc| {
            let used = version.anchors.iter().zip(&reach.positions).filter(|(_, p)| p.is_some());
            used.flat_map(|(a, _)| &a.varmap).any(|(l, _)| l == loc)
        })
        .collect();
    let untouched = holds(SideCondition::InjectUntouched, is_untouched(version, cfg, point));
    untouched.then(|| entry_anchor(version, &named))
}

/// Adds `assume predicate` at `point`, falling back to the anchor that [`anchor_for`] finds.
/// Returns `None` and changes nothing if the predicate is not available there or no anchor reaches
/// the point.
pub fn inject(version: &mut Version, point: Point, predicate: Operand) -> Option<AnchorId> {
    let cfg = Cfg::new(version);
    let defs = crate::reach::definitions(version);
    let available = match predicate {
        Operand::Const(c) => c <= 1,
        Operand::Value(v) => {
            version.types.get(v.index()) == Some(&Ty::I1)
                && defs[v.index()].is_some_and(|def| crate::reach::available(&cfg, def, point))
        }
    };
    if version.is_base()
        || !available
        || point.inst > version.blocks.get(point.block.index())?.insts.len()
    {
        return None;
    }
    let anchor = anchor_for(version, &cfg, point)?;
    let pc = version.anchors[anchor.index()].target.as_const().unwrap_or(version.region);
    let origin = Origin { kind: OriginKind::Value, pc, step: None };
    let assume = Inst::assume(predicate, Some(anchor), Origins::of(origin));
    version.blocks[point.block.index()].insts.insert(point.inst, assume);
    Some(anchor)
}

/// At the end of a block that jumps: the first anchor of the next block, in terms of values that
/// are available here.
fn next_block_anchor(version: &Version, cfg: &Cfg, reach: &Reach, point: Point) -> Option<Anchor> {
    let from = &version.blocks[point.block.index()];
    let Term::Jump { to, args } = &from.term else { return None };
    if point.inst != from.insts.len() {
        return None;
    }
    let next = &version.blocks[to.index()];
    let begins = |a: &usize| reach.positions[*a].filter(|p| p.block == *to).map(|p| p.inst);
    let (inst, first) = (0..version.anchors.len()).filter_map(|a| Some((begins(&a)?, a))).min()?;
    let quiet = !next.insts[..inst].iter().any(|inst| ends_reach(version, inst));
    if !holds(SideCondition::InjectHeader, quiet) {
        return None;
    }
    let defs = crate::reach::definitions(version);
    let mut known = true;
    let mut here = |o: &mut Operand| {
        let Operand::Value(v) = *o else { return };
        match next.params.iter().position(|p| *p == v) {
            Some(i) => *o = args[i],
            None => {
                known &= defs[v.index()].is_some_and(|def| crate::reach::available(cfg, def, point))
            }
        }
    };
    let mut anchor = Anchor { via: None, ..version.anchors[first].clone() };
    Version::for_each_anchor_operand(&mut anchor, &mut here);
    known.then_some(anchor)
}

/// Is every path from the entry to `point` free of effects outside SSA?
fn is_untouched(version: &Version, cfg: &Cfg, point: Point) -> bool {
    let quiet = |insts: &[Inst]| !insts.iter().any(|inst| ends_reach(version, inst));
    if !quiet(&version.blocks[point.block.index()].insts[..point.inst]) {
        return false;
    }
    let mut seen = vec![false; version.blocks.len()];
    let mut work: Vec<BlockId> = cfg.preds[point.block.index()].clone();
    while let Some(block) = work.pop() {
        if std::mem::replace(&mut seen[block.index()], true) || !cfg.is_reachable(block) {
            continue;
        }
        if !quiet(&version.blocks[block.index()].insts) {
            return false;
        }
        work.extend(&cfg.preds[block.index()]);
    }
    true
}

/// A new anchor at the version's entry that names these locations.
fn entry_anchor(version: &mut Version, named: &[Loc]) -> AnchorId {
    let varmap = named.iter().map(|loc| {
        let known = version.entry_locs.iter().position(|l| l == loc);
        let at = known.unwrap_or_else(|| {
            let param = version.value(loc.ty());
            version.entry_locs.push(*loc);
            version.blocks[0].params.push(param);
            version.entry_locs.len() - 1
        });
        (*loc, Operand::Value(version.blocks[0].params[at]))
    });
    let varmap = varmap.collect::<Vec<_>>();
    let pc = Operand::Const(version.region);
    version.anchor(Anchor::new(pc, varmap))
}
