//! Pass `slots`: promotes memory slots to SSA values over any control flow (PIR 4.2, scope
//! resolution).
//!
//! A slot is a location at a fixed distance from values that do not change, mostly on the stack.
//! Every access of the version must either be exactly the slot or certainly miss it. A load of the
//! slot becomes the value that reaches it: from a store on the way, from a block parameter where
//! paths meet, or from one load at the entry.
//!
//! ```text
//! b0: jump b1()                                   b0: v9 = load.i64 [v0 - 8] !a9; jump b1(v9)
//! b1: v3 = load.i64 [v0 - 8] !a1                  b1(v10):
//!     v4 = add.i64 v3, 1                              v4 = add.i64 v10, 1
//!     store.i64 [v0 - 8], v4 !a1                      store.i64 [v0 - 8], v4 !a1
//!     branch v5 then b1() else b2()                   branch v5 then b1(v4) else b2(v4)
//! ```
//!
//! The stores stay (`sink` and `frames` defer them). Unlike `forward` the pass needs no peeled
//! iteration and handles branches; it does not use alias guards.
//!
//! Side conditions:
//! * (a) `private_memory` holds.
//! * (b) Every access of the version is the slot itself, with one type, or misses it by a known
//!   distance. There is no write of unknown extent, fence or locked operation. Events and reads of
//!   unknown extent are allowed, because all stores are still performed in place.
//! * (c) The address is computed from entry parameters. The first load uses the anchor of the
//!   entry: if it faults there, `base` finds out whether the guest gets to the access.
//! * (d) The first load is removed if nothing uses it, unless a load that it replaces could have
//!   faulted first.
//!
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use super::inject::anchor_for;
use crate::alias::{Access, Addresses, Location, Values, access};
use crate::defs::Defs;
use crate::op::Op;
use crate::reach::{Cfg, Point};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{BlockId, Operand, Ty, Value};
use crate::version::rename;
use crate::version::{Inst, Version};

/// Most slots of a version that are promoted in one run (guess: each adds a parameter to every
/// block).
const MAX_SLOTS: usize = 16;

/// Runs the pass; returns the number of loads removed.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if version.is_base()
        || version.blocks.is_empty()
        || !holds(SideCondition::SlotsPrivate, version.context.private_memory())
    {
        return 0;
    }
    let cfg = Cfg::new(version);
    let slots = slots(version, &cfg);
    if slots.is_empty() {
        return 0;
    }
    let point = Point { block: BlockId(0), inst: 0 };
    let Some(anchor) = anchor_for(version, &cfg, point) else { return 0 };
    resolve(version, &cfg, &slots, anchor)
}

/// A slot that can be promoted.
struct Slot {
    location: Location,
    ty: Ty,
    /// An access to it whose operands are entry parameters or constants.
    like: Inst,
    /// Its accesses: block and index.
    at: Vec<(usize, usize)>,
    loads: usize,
}

fn slots(version: &Version, cfg: &Cfg) -> Vec<Slot> {
    let defs = Defs::of(version);
    let values = Values { defs: &defs, replaced: &[] };
    let mut addresses = Addresses::default();
    let entry = &version.blocks[0].params;
    let given = |o: &Operand| o.as_value().is_none_or(|v| entry.contains(&v));
    let mut found: Vec<Slot> = Vec::new();
    let mut others: Vec<Location> = Vec::new();
    for block in &cfg.order {
        for (i, inst) in version.blocks[block.index()].insts.iter().enumerate() {
            // The observer of an event finds all stores performed, and does not write private
            // memory.
            if matches!(inst.op, Op::Print | Op::Read) {
                continue;
            }
            let size = match access(version, inst) {
                Access::None | Access::ReadUnknown => continue,
                Access::Barrier if !holds(SideCondition::SlotsBarrier, false) => return Vec::new(),
                Access::Barrier => continue,
                Access::Read(size) | Access::Write(size) => size,
            };
            let Some(here) = addresses.locate(&values, inst, size) else { return Vec::new() };
            if !matches!(inst.op, Op::Load | Op::Store) {
                others.push(here);
                continue;
            }
            let (at, loads) = ((block.index(), i), usize::from(inst.op == Op::Load));
            let known = found.iter_mut().find(|s| s.location == here && s.ty == inst.ty);
            match known {
                Some(slot) => {
                    slot.at.push(at);
                    slot.loads += loads;
                    if !slot.like.args[..2].iter().all(given) {
                        slot.like = inst.clone();
                    }
                }
                None => found.push(Slot {
                    location: here,
                    ty: inst.ty,
                    like: inst.clone(),
                    at: vec![at],
                    loads,
                }),
            }
        }
    }
    let alone = |slot: &Slot| {
        let same = |l: &Location, ty: Option<Ty>| *l == slot.location && ty == Some(slot.ty);
        let all =
            found.iter().map(|s| (s.location, Some(s.ty))).chain(others.iter().map(|l| (*l, None)));
        all.into_iter().all(|(l, ty)| {
            same(&l, ty) || holds(SideCondition::SlotsAlone, addresses.disjoint(&l, &slot.location))
        })
    };
    let alone: Vec<bool> = found.iter().map(alone).collect();
    let mut alone = alone.iter();
    // A slot with a single access gains nothing.
    found.retain(|slot| {
        let worth = slot.loads > 0 && slot.at.len() > 1;
        *alone.next().unwrap_or(&false) && worth && slot.like.args[..2].iter().all(given)
    });
    found.truncate(MAX_SLOTS);
    found
}

/// Gives every block but the entry a parameter for each slot, and replaces the loads.
fn resolve(
    version: &mut Version,
    cfg: &Cfg,
    slots: &[Slot],
    anchor: crate::types::AnchorId,
) -> usize {
    let may_fault: Vec<bool> =
        slots.iter().map(|slot| loads_before_stores(version, cfg, slot)).collect();
    let mut table: Vec<Option<Operand>> = vec![None; version.types.len()];
    let mut first: Vec<Inst> = Vec::new();
    let mut initial: Vec<Value> = Vec::new();
    for slot in slots {
        let value = version.value(slot.ty);
        let mut load = Inst::new(Op::Load, slot.ty, Some(value), &slot.like.args[..2]);
        (load.mem, load.anchor) = (slot.like.mem, Some(anchor));
        first.push(load);
        initial.push(value);
    }
    let mut removed = 0;
    for block in &cfg.order {
        let b = block.index();
        let mut holds: Vec<Operand> = if b == 0 {
            initial.iter().map(|v| Operand::Value(*v)).collect()
        } else {
            let params: Vec<Value> = slots.iter().map(|s| version.value(s.ty)).collect();
            version.blocks[b].params.extend(&params);
            params.into_iter().map(Operand::Value).collect()
        };
        let insts = std::mem::take(&mut version.blocks[b].insts);
        let mut kept = Vec::with_capacity(insts.len());
        for (i, inst) in insts.into_iter().enumerate() {
            match slots.iter().position(|s| s.at.contains(&(b, i))) {
                Some(s) if inst.op == Op::Load => {
                    if let Some(def) = inst.def() {
                        table[def.index()] = Some(holds[s]);
                    }
                    removed += 1;
                    continue;
                }
                Some(s) => holds[s] = inst.args[2],
                None => {}
            }
            kept.push(inst);
        }
        version.blocks[b].insts = kept;
        version.blocks[b].term.edges_mut().for_each(|(_, args)| args.extend(&holds));
    }
    // The content of a slot may be a load that is itself replaced.
    version.for_each_operand(|o| {
        for _ in 0..table.len() {
            let next = rename(&table, *o);
            if next == *o {
                break;
            }
            *o = next;
        }
    });
    version.blocks[0].insts.splice(0..0, first);
    super::params::run(version, &OptOptions::default());
    let droppable = initial
        .iter()
        .zip(may_fault)
        .filter(|(_, may_fault)| holds(SideCondition::SlotsFirstLoad, !may_fault));
    let droppable: Vec<Value> = droppable.map(|(value, _)| *value).collect();
    drop_unused(version, &droppable);
    removed
}

/// Can a load of the slot be reached without a store to it before, so that it is the first access
/// that may fault? Then the load at the entry must stay, whether or not its value is used.
fn loads_before_stores(version: &Version, cfg: &Cfg, slot: &Slot) -> bool {
    let point = |(b, i): &(usize, usize)| Point { block: BlockId(*b as u32), inst: *i };
    let is_load = |(b, i): &&(usize, usize)| version.blocks[*b].insts[*i].op == Op::Load;
    let stores = || slot.at.iter().filter(|at| !is_load(at));
    slot.at
        .iter()
        .filter(is_load)
        .any(|load| !stores().any(|store| cfg.point_dominates(point(store), point(load))))
}

/// Removes the loads at the entry whose value is not used.
fn drop_unused(version: &mut Version, initial: &[Value]) {
    let mut used = vec![false; version.types.len()];
    version.for_each_operand(|o| {
        if let Operand::Value(v) = o {
            used[v.index()] = true;
        }
    });
    version.blocks[0]
        .insts
        .retain(|i| !i.def().is_some_and(|d| initial.contains(&d) && !used[d.index()]));
}
