//! Pass `licm`: moves an operation whose operands do not vary in a loop to the end of the loop's
//! preheader.
//!
//! ```text
//! b0: jump b1(v0)                             b0: v6 = add.i64 v1, v2
//!                                                 v7 = load.i64 [v6] !a9
//!                                                 jump b1(v0)
//! b1(v4): poll else a0                        b1(v4): poll else a0
//!     v6 = add.i64 v1, v2
//!     v7 = load.i64 [v6] !a0
//! ```
//!
//! Side conditions: the loop has a preheader, the operands do not vary, and the operation
//! is pure. A load moves under further conditions: `private_memory` holds; the load runs in every
//! iteration; no access in the loop may write its bytes; and an anchor reaches the end of the
//! preheader. If the load faults there, `base` runs from the anchor and finds out whether the guest
//! gets to the load.
//!
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use super::inject::anchor_for;
use super::loops::{Loop, is_steady, loops, make_preheaders};
use crate::alias::{Access, Addresses, Location, Values, access};
use crate::defs::Defs;
use crate::op::Op;
use crate::reach::Cfg;
use crate::side_conditions::{SideCondition, holds};
use crate::version::Version;

/// Runs the pass; returns the number of instructions moved.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if version.is_base() || version.blocks.is_empty() {
        return 0;
    }
    make_preheaders(version);
    let cfg = Cfg::new(version);
    loops(version, &cfg).iter().map(|l| hoist(version, &cfg, l)).sum()
}

fn hoist(version: &mut Version, cfg: &Cfg, l: &Loop) -> usize {
    let Some(before) = l.before(version) else { return 0 };
    let mut varying = l.varying(version);
    let mut moved = 0;
    let steady_loads = steady_loads(version, cfg, l);
    let anchor = if steady_loads.is_empty() { None } else { anchor_for(version, cfg, before) };
    let before = before.block;
    // In dominance order, so that the operands of an instruction have moved before it.
    for block in cfg.order.iter().filter(|b| l.contains[b.index()]) {
        let insts = std::mem::take(&mut version.blocks[block.index()].insts);
        let mut kept = Vec::with_capacity(insts.len());
        for (i, mut inst) in insts.into_iter().enumerate() {
            let steady = inst.args.iter().all(|a| is_steady(&varying, *a));
            let is_load = anchor.is_some() && steady_loads.contains(&(block.index(), i));
            if !steady || !(inst.op.is_pure() || is_load) {
                kept.push(inst);
                continue;
            }
            if is_load {
                inst.anchor = anchor;
            }
            inst.defs.iter().for_each(|d| varying[d.index()] = false);
            version.blocks[before.index()].insts.push(inst);
            moved += 1;
        }
        version.blocks[block.index()].insts = kept;
    }
    moved
}

/// The loads of a loop, by block and index, that run in every iteration and whose bytes nothing in
/// it writes.
fn steady_loads(version: &Version, cfg: &Cfg, l: &Loop) -> Vec<(usize, usize)> {
    if !holds(SideCondition::LicmPrivate, version.context.private_memory()) {
        return Vec::new();
    }
    let defs = Defs::of(version);
    let values = Values { defs: &defs, replaced: &[] };
    let mut addresses = Addresses::default();
    let (mut loads, mut writes): (Vec<(usize, usize, Location)>, Vec<Location>) =
        (Vec::new(), Vec::new());
    for block in cfg.order.iter().filter(|b| l.contains[b.index()]) {
        for (i, inst) in version.blocks[block.index()].insts.iter().enumerate() {
            match access(version, inst) {
                Access::None | Access::ReadUnknown => {}
                Access::Barrier if !holds(SideCondition::LicmBarrier, false) => return Vec::new(),
                Access::Barrier => {}
                Access::Read(size) => {
                    if inst.op == Op::Load
                        && l.always_runs(cfg, *block)
                        && let Some(location) = addresses.locate(&values, inst, size)
                    {
                        loads.push((block.index(), i, location));
                    }
                }
                Access::Write(size) => match addresses.locate(&values, inst, size) {
                    Some(location) => writes.push(location),
                    None => return Vec::new(),
                },
            }
        }
    }
    loads.retain(|(_, _, location)| {
        writes.iter().all(|w| holds(SideCondition::LicmDisjoint, addresses.disjoint(w, location)))
    });
    loads.into_iter().map(|(b, i, _)| (b, i)).collect()
}
