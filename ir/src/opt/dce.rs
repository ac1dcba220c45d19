//! Pass `dce`: removes dead code, dead flags, dead block parameters, unused anchors and unused
//! natives.
//!
//! Live is: each instruction with an effect; each value that a live instruction or terminator uses;
//! each value that the varmap of a live instruction's anchor names (a varmap is an ordinary use).
//! Everything else is removed. Three kinds of instruction are live although nothing uses their
//! result: a load, because it may fault and some guests rely on the fault (null checks, safe
//! points); a native that may trap or that gives another result when repeated; and an `assume`.
//!
//! The pass keeps no data between runs; the caller owns the version, no lock. Other passes leave
//! unused anchors and natives for this one to remove.
//!
//! ```text
//! v4 = flags.add.i64 v1, v2       (no use of v4: removed)
//! v5 = load.i64 [v1] !a0          v5 = load.i64 [v1] !a0        (no use of v5: kept, it may fault)
//! ```

use super::OptOptions;
use super::params::drop_params;
use super::shape::normalise;
use crate::op::Op;
use crate::reach::{Def, definitions};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{AnchorId, NativeId, Operand};
use crate::version::{Effects, Inst, Term, Version};

/// Runs the pass; returns the number of instructions, parameters, anchors and natives removed.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    // A version with other branches has none of the shapes; this pass works on it all the same.
    normalise(version);
    if version.is_base() || version.blocks.is_empty() {
        return 0;
    }
    remove_dead(version) + remove_unused_tables(version)
}

/// Must this instruction stay although nothing uses its results?
pub(super) fn has_effect(version: &Version, inst: &Inst) -> bool {
    const HARMLESS: Effects = Effects::READ_STATE;
    match inst.op {
        Op::Native => match inst.native.and_then(|n| version.natives.get(n.index())) {
            Some(native) => !HARMLESS.contains(native.effects) || !native.writes.is_empty(),
            None => true,
        },
        _ => !inst.op.is_pure(),
    }
}

fn remove_dead(version: &mut Version) -> usize {
    let defs = definitions(version);
    let mut live: Vec<Vec<bool>> =
        version.blocks.iter().map(|b| vec![false; b.insts.len()]).collect();
    let mut live_value = vec![false; version.types.len()];
    let mut live_anchor = vec![false; version.anchors.len()];
    let mut work: Vec<Operand> = Vec::new();

    let mut mark_inst = |version: &Version, work: &mut Vec<Operand>, b: usize, i: usize| {
        if !std::mem::replace(&mut live[b][i], true) {
            let inst = &version.blocks[b].insts[i];
            work.extend(inst.args.iter().copied());
            if let Some(a) = inst.anchor
                && !holds(SideCondition::DceVarmapIsUse, false)
                && !std::mem::replace(&mut live_anchor[a.index()], true)
            {
                work.extend(version.anchors[a.index()].operands());
            }
        }
    };
    for (b, block) in version.blocks.iter().enumerate() {
        for (i, inst) in block.insts.iter().enumerate() {
            if !holds(SideCondition::DceEffects, !has_effect(version, inst)) {
                mark_inst(version, &mut work, b, i);
            }
        }
        match &block.term {
            Term::Exit(a) => work.extend(version.anchors[a.index()].operands()),
            Term::Guest(_) => work.extend(Version::term_operands(&block.term)),
            Term::Branch { cond, .. } => work.push(*cond),
            Term::Jump { .. } => {}
        }
    }
    while let Some(o) = work.pop() {
        let Operand::Value(v) = o else { continue };
        if std::mem::replace(&mut live_value[v.index()], true) {
            continue;
        }
        match defs[v.index()] {
            None => {}
            Some(Def::Inst(point)) => {
                mark_inst(version, &mut work, point.block.index(), point.inst)
            }
            Some(Def::Param(block, i)) => {
                let edges = version.blocks.iter().flat_map(|from| from.term.edges());
                work.extend(
                    edges
                        .filter(|(to, _)| *to == block)
                        .filter_map(|(_, args)| args.get(i).copied()),
                );
            }
        }
    }
    let mut removed = 0;
    for (block, live) in version.blocks.iter_mut().zip(&live) {
        let before = block.insts.len();
        let mut flags = live.iter();
        block.insts.retain(|_| *flags.next().unwrap_or(&true));
        removed += before - block.insts.len();
    }
    // The entry's parameters are the guest's state.
    for b in 1..version.blocks.len() {
        let keep: Vec<bool> =
            version.blocks[b].params.iter().map(|p| live_value[p.index()]).collect();
        let dead = keep.iter().filter(|k| !**k).count();
        if dead > 0 {
            drop_params(version, b, &keep);
        }
        removed += dead;
    }
    removed
}

/// Renumbers anchors and natives so that only used ones remain, in order of use.
fn remove_unused_tables(version: &mut Version) -> usize {
    let mut anchor_map: Vec<Option<AnchorId>> = vec![None; version.anchors.len()];
    let mut native_map: Vec<Option<NativeId>> = vec![None; version.natives.len()];
    let mut anchors = Vec::new();
    let mut natives = Vec::new();
    let (old_anchors, old_natives) = (&mut version.anchors, &mut version.natives);
    let mut rename_anchor = |a: &mut AnchorId| {
        let old = a.index();
        *a = *anchor_map[old].get_or_insert_with(|| {
            anchors.push(old_anchors[old].clone());
            AnchorId((anchors.len() - 1) as u32)
        });
    };
    let mut rename_native = |n: &mut NativeId| {
        let old = n.index();
        *n = *native_map[old].get_or_insert_with(|| {
            natives.push(old_natives[old].clone());
            NativeId((natives.len() - 1) as u32)
        });
    };
    for block in &mut version.blocks {
        for inst in &mut block.insts {
            inst.anchor.iter_mut().for_each(&mut rename_anchor);
            inst.native.iter_mut().for_each(&mut rename_native);
        }
        if let Term::Exit(a) = &mut block.term {
            rename_anchor(a);
        }
    }
    let removed = version.anchors.len() - anchors.len() + version.natives.len() - natives.len();
    version.anchors = anchors;
    version.natives = natives;
    removed
}
