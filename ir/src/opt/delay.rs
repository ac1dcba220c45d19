//! Pass `delay`: moves guards down (sourir 4.4), as far as their anchor reaches, and only onto the
//! paths that need them.
//!
//! An assume moves down over an instruction that neither has an effect nor can leave through
//! another anchor. It moves over a branch into both successors. An assume directly before an exit
//! through its own anchor is removed: control leaves in the same state either way.
//!
//! ```text
//! b0: …                                       b0: …
//!     assume v1 else a0
//!     v2 = add.i64 v0, 1                          v2 = add.i64 v0, 1
//!     branch v3 then b1() else b2()               branch v3 then b1() else b2()
//! b1: exit a0                                 b1: exit a0
//! b2: store.i64 [v2], 0 !a1                   b2: assume v1 else a0
//!                                                 store.i64 [v2], 0 !a1
//! ```
//!
//! Side conditions:
//! * (1) The assume does not pass an instruction that ends reach.
//! * (2) It does not pass a use of another anchor. A value that was computed because the guard
//!   holds may be wrong until the guard is checked, and the other anchor's varmap would show it.
//!   Uses of its own anchor are safe, because the anchor's position comes first. While anchors
//!   defer stores it does not pass a memory access either, because it may be the alias guard for
//!   that access.
//! * (3) It moves over a branch only if each successor is entered from this block alone, and then
//!   into every successor, because the branch itself may depend on the guard.
//!
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use crate::alias::{Access, access};
use crate::op::Op;
use crate::reach::{Cfg, ends_reach, may_fault};
use crate::side_conditions::{SideCondition, holds};
use crate::types::BlockId;
use crate::version::{Inst, Term, Version};

/// Runs the pass; returns the number of assumes moved or removed.
pub(super) fn run(version: &mut Version, options: &OptOptions) -> usize {
    if version.is_base() || version.blocks.is_empty() {
        return 0;
    }
    let cfg = Cfg::new(version);
    let deferring = version.defers_stores();
    let mut changes = 0;
    // In dominance order, so that an assume that has moved into a block moves on from there.
    for block in &cfg.order {
        changes += sink_within(version, *block, deferring, options);
        changes += leave(version, &cfg, *block);
    }
    changes
}

/// May an assume move down over `inst`? `deferring` says whether anchors defer stores.
fn passes(
    version: &Version,
    assume: &Inst,
    inst: &Inst,
    deferring: bool,
    options: &OptOptions,
) -> bool {
    let own = inst.anchor.is_none() || inst.anchor == assume.anchor;
    let own = holds(SideCondition::DelayAnchor, own);
    // The assume may be the guard that proves that the access misses a deferred store.
    let apart =
        holds(SideCondition::DelayDeferred, !deferring || access(version, inst) == Access::None);
    let harmless = options.delay_past_faults || !may_fault(version, inst);
    harmless
        && own
        && apart
        && holds(SideCondition::DelayEffect, !ends_reach(version, inst))
        && inst.op != Op::Poll
}

/// Moves each assume of a block down as far as possible; assumes that meet keep their order.
fn sink_within(
    version: &mut Version,
    block: BlockId,
    deferring: bool,
    options: &OptOptions,
) -> usize {
    let mut insts = std::mem::take(&mut version.blocks[block.index()].insts);
    let mut moved = 0;
    for i in (0..insts.len()).rev() {
        if insts[i].op != Op::Assume {
            continue;
        }
        let mut at = i;
        // Passing another assume of the same anchor changes nothing, so the move ends there.
        while let Some(next) = insts.get(at + 1)
            && next.op != Op::Assume
            && passes(version, &insts[at], next, deferring, options)
        {
            insts.swap(at, at + 1);
            at += 1;
        }
        moved += usize::from(at > i);
    }
    version.blocks[block.index()].insts = insts;
    moved
}

/// Moves the assumes at the end of a block into its successors, or drops them before an exit.
fn leave(version: &mut Version, cfg: &Cfg, block: BlockId) -> usize {
    let own = |to: BlockId| {
        to != block && holds(SideCondition::DelayOnlyEntry, cfg.preds[to.index()].len() == 1)
    };
    let successors: Vec<BlockId> =
        version.blocks[block.index()].term.edges().map(|(to, _)| to).collect();
    let mut changes = 0;
    while let Some(last) =
        version.blocks[block.index()].insts.last().filter(|i| i.op == Op::Assume).cloned()
    {
        match version.blocks[block.index()].term {
            Term::Exit(anchor) if last.anchor == Some(anchor) => {}
            Term::Branch { .. } if successors.iter().all(|to| own(*to)) => {
                for to in &successors {
                    version.blocks[to.index()].insts.insert(0, last.clone());
                }
            }
            _ => break,
        }
        version.blocks[block.index()].insts.pop();
        changes += 1;
    }
    changes
}
