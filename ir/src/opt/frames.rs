//! Pass `frames`: moves stores that nothing in the version reads into the anchors after them,
//! where they are performed only if control leaves (PIR's delayed environments; the frames of
//! inlined calls, sourir 4.3).
//!
//! ```text
//! store.i64 [v0 - 8], 0x1010 !a0              a1 = … stores [store.i64 [v0 - 8], 0x1010]
//! assume v1 else a1                           a2 = … stores [store.i64 [v0 - 8], 0x1010]
//! exit a2                                     assume v1 else a1
//!                                             exit a2
//! ```
//!
//! `sink` removes stores that die; this pass moves stores to exits that perform them. So it pays
//! only if the exits after a store are colder than the store, or are removed later. It is not part
//! of the pipeline.
//!
//! Side conditions (docs/design.md, "The IR"), in a version without branches and loops:
//! * (a) `private_memory` holds, or the store pushes a constant on the stack, which is a return
//!   address.
//! * (b) Every later access certainly misses the location. None is of unknown extent, and no fence,
//!   locked operation or event follows.
//! * (c) The location has been written before in this entry, so that performing the store cannot
//!   fault.
//! * No store is deferred yet. Then the first use of an anchor tells which stores came before it.
//!
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use super::shape::{ENTRY, Shape, normalise};
use crate::alias::{Access, Addresses, Location, Values, access};
use crate::defs::Defs;
use crate::op::Op;
use crate::side_conditions::{SideCondition, holds};
use crate::types::{Gpr, Loc, Operand, Ty};
use crate::version::{DeferredStore, Inst, Term, Version};

/// Runs the pass; returns the number of stores deferred.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    let fresh = !version.defers_stores();
    if version.is_base() || !fresh || normalise(version) != Some(Shape::Linear) {
        return 0;
    }
    let waiting = waiting(version);
    for at in waiting.iter().rev() {
        let store = version.blocks[ENTRY].insts.remove(*at);
        hand_over(version, *at, &store);
    }
    waiting.len()
}

/// The indices of the stores that may be deferred.
fn waiting(version: &Version) -> Vec<usize> {
    let defs = Defs::of(version);
    let values = Values { defs: &defs, replaced: &[] };
    let mut addresses = Addresses::default();
    let mut written: Vec<Location> = Vec::new();
    let mut pending: Vec<(usize, Location)> = Vec::new();
    for (i, inst) in version.blocks[ENTRY].insts.iter().enumerate() {
        if inst.op == Op::Assume {
            addresses.learn(&values, inst.args[0]);
        }
        let size = match access(version, inst) {
            Access::None => continue,
            Access::ReadUnknown | Access::Barrier => None,
            Access::Read(size) | Access::Write(size) => Some(size),
        };
        let Some(here) = size.and_then(|size| addresses.locate(&values, inst, size)) else {
            pending.retain(|_| holds(SideCondition::FramesBarrier, false));
            continue;
        };
        pending.retain(|(_, location)| {
            holds(SideCondition::FramesDisjoint, addresses.disjoint(location, &here))
        });
        if inst.op != Op::Store {
            continue;
        }
        let accessible =
            holds(SideCondition::FramesWritten, written.iter().any(|w| w.contains(&here)));
        let unseen = version.context.private_memory() || is_return_address(version, &values, inst);
        if accessible && holds(SideCondition::FramesPrivate, unseen) {
            pending.push((i, here));
        }
        written.push(here);
    }
    pending.into_iter().map(|(i, _)| i).collect()
}

/// Does this store push a constant on the stack?
fn is_return_address(version: &Version, values: &Values<'_>, store: &Inst) -> bool {
    let rsp = version.entry_locs.iter().position(|loc| *loc == Loc::Gpr(Gpr::RSP));
    let rsp = rsp.map(|i| Operand::Value(version.blocks[ENTRY].params[i]));
    store.ty == Ty::I64
        && store.args[1] == Operand::Const(0)
        && store.args[2].as_const().is_some()
        && Some(values.root(store.args[0]).0) == rsp
}

/// Moves a removed store to the anchors whose first use comes after it. In their lists it precedes
/// the stores that they defer already, which came after it.
fn hand_over(version: &mut Version, at: usize, store: &Inst) {
    let Some(mem) = store.mem else { return };
    let deferred =
        DeferredStore { ty: store.ty, mem, args: [store.args[0], store.args[1], store.args[2]] };
    let body = &version.blocks[ENTRY];
    let mut before = vec![false; version.anchors.len()];
    body.insts[..at].iter().filter_map(|i| i.anchor).for_each(|a| before[a.index()] = true);
    let mut behind = vec![false; version.anchors.len()];
    body.insts[at..].iter().filter_map(|i| i.anchor).for_each(|a| behind[a.index()] = true);
    if let Term::Exit(a) = body.term {
        behind[a.index()] = true;
    }
    for (i, anchor) in version.anchors.iter_mut().enumerate() {
        if behind[i] && !before[i] {
            anchor.stores.insert(0, deferred.clone());
        }
    }
}
