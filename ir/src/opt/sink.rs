//! Pass `sink`: dead-store sinking: stores whose effect only an exit could show move into the
//! varmaps of the exits.
//!
//! A *deferred store* belongs to an anchor and is performed when the anchor is taken
//! (docs/design.md, "The IR"; PIR's delayed environments). Two kinds of store leave the hot path:
//!
//! * **overwritten**: a later store of the same block to the same bytes makes the store dead. The
//!   anchors whose use begins between the two perform it.
//! * **carried**: all stores of a loop to one location. The content of the location becomes a
//!   parameter of the loop, every anchor of the loop performs the store with the current content,
//!   and the loop itself writes nothing.
//!
//! ```text
//! b1(v6): poll !a0 [rcx = v6]         b1(v6): poll !a0 [rcx = v6] stores [store.i64 [v3 - 8], v6]
//!     v8 = add.i64 v6, 1                  v8 = add.i64 v6, 1
//!     store.i64 [v3 - 8], v8 !a0
//!     assume v9 else a1                   assume v9 else a1   with stores [store.i64 [v3 - 8], v8]
//!     jump b1(v8)                         jump b1(v8)
//! ```
//!
//! Side conditions:
//! * (a) `private_memory` holds.
//! * (b) Until the store is performed or dead, every access certainly misses it: by its offset, or
//!   by an alias guard passed before. Loads of the location have been forwarded. No access of
//!   unknown extent, fence or locked operation lies in between.
//! * (c) The location has been *written* earlier in this entry, so that performing the store cannot
//!   fault.
//! * No store is deferred yet. The stores before an anchor's first use are exactly those before its
//!   place in the guest program, because a store ends the reach of earlier anchors. That holds only
//!   as long as every store still stands in the version.
//!
//! The verifier checks (a) and (b) with the same oracle, [`crate::alias`]. The caller owns the
//! version; no data between runs, no lock.

use super::OptOptions;
use super::shape::{BODY, ENTRY, Shape, normalise};
use super::tree::{Saved, add_args, args, to_head};
use crate::alias::{Access, Addresses, Location, Values, access};
use crate::defs::Defs;
use crate::op::Op;
use crate::side_conditions::{SideCondition, holds};
use crate::types::{AnchorId, Operand, Value};
use crate::version::{DeferredStore, Inst, Term, Version};

/// Most locations of a loop that are carried (guess: each costs a register or a spill slot, and
/// work at each exit).
const MAX_CARRIED: usize = 16;
/// Most stores that wait at one time for a store that overwrites them (guess: the walk compares
/// each access with all of them).
const MAX_PENDING: usize = 32;

/// Runs the pass; returns the number of stores that left the hot path.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    let nothing_deferred = !version.defers_stores();
    if !holds(SideCondition::SinkPrivate, version.context.private_memory())
        || !holds(SideCondition::SinkOnce, nothing_deferred)
    {
        return 0;
    }
    let Some(shape) = normalise(version) else { return 0 };
    // An anchor may be used in both blocks: no store lies between its uses, so a loop that uses it
    // stores nothing.
    let overwritten = overwritten(version);
    let uses: Vec<Vec<(AnchorId, usize)>> =
        (0..version.blocks.len()).map(|b| first_uses(version, b)).collect();
    let mut sunk = 0;
    let mut gone: Vec<Vec<bool>> =
        version.blocks.iter().map(|b| vec![false; b.insts.len()]).collect();
    if shape != Shape::Linear {
        for slot in carried(version) {
            sunk += carry(version, &slot, &uses, &mut gone);
        }
    }
    for dead in overwritten {
        if !gone[dead.block][dead.store] {
            gone[dead.block][dead.store] = true;
            defer(version, &dead, &uses[dead.block]);
            sunk += 1;
        }
    }
    for (block, gone) in version.blocks.iter_mut().zip(&gone) {
        let mut flags = gone.iter();
        block.insts.retain(|_| !*flags.next().unwrap_or(&false));
    }
    sunk
}

/// The anchors of a block with the index of their first use; for an exit the index is the length of
/// the block.
fn first_uses(version: &Version, block: usize) -> Vec<(AnchorId, usize)> {
    let body = &version.blocks[block];
    let mut seen = vec![false; version.anchors.len()];
    let exit = match body.term {
        Term::Exit(anchor) => Some((anchor, body.insts.len())),
        Term::Jump { .. } | Term::Branch { .. } | Term::Guest(_) => None,
    };
    let uses = body.insts.iter().enumerate().filter_map(|(i, inst)| Some((inst.anchor?, i)));
    uses.chain(exit).filter(|(a, _)| !std::mem::replace(&mut seen[a.index()], true)).collect()
}

fn deferred(store: &Inst, value: Operand) -> Option<DeferredStore> {
    Some(DeferredStore {
        ty: store.ty,
        mem: store.mem?,
        args: [store.args[0], store.args[1], value],
    })
}

/// A location whose stores in the loop can be carried.
struct Carried {
    /// The store in the entry block that wrote the location; its operands are available in the
    /// loop.
    store: Inst,
    /// The content of the location at the end of the entry block.
    entry: Operand,
    /// The loop's stores to it: block, index and value, in order.
    stores: Vec<(usize, usize, Operand)>,
}

/// A candidate for being carried, while the loop is walked.
struct Candidate {
    location: Location,
    slot: Carried,
}

fn carried(version: &Version) -> Vec<Carried> {
    let defs = Defs::of(version);
    let values = Values { defs: &defs, replaced: &[] };
    let mut addresses = Addresses::default();
    let mut list = candidates(version, &values, &mut addresses);
    let mut saved = Saved::new(version);
    for (block, body) in version.blocks.iter().enumerate().skip(BODY) {
        if let Some(guards) = saved.enter(block) {
            addresses.continue_with(guards);
        }
        for (i, inst) in body.insts.iter().enumerate() {
            if inst.op == Op::Assume {
                addresses.learn(&values, inst.args[0]);
            }
            let size = match access(version, inst) {
                Access::None => continue,
                Access::ReadUnknown | Access::Barrier => return Vec::new(),
                Access::Read(size) | Access::Write(size) => size,
            };
            let Some(here) = addresses.locate(&values, inst, size) else { return Vec::new() };
            list.retain_mut(|c| {
                let ours = inst.op == Op::Store && inst.ty == c.slot.store.ty && here == c.location;
                if ours {
                    c.slot.stores.push((block, i, inst.args[2]));
                }
                ours || holds(
                    SideCondition::SinkCarriedDisjoint,
                    addresses.disjoint(&c.location, &here),
                )
            });
        }
        saved.leave(version, block, || addresses.guards());
    }
    list.truncate(MAX_CARRIED);
    list.into_iter().map(|c| c.slot).collect()
}

/// The locations that the loop stores to and whose content at the loop's start is known, pairwise
/// disjoint. Also learns the alias guards of the entry block.
fn candidates(version: &Version, values: &Values, addresses: &mut Addresses) -> Vec<Candidate> {
    let entry = &version.blocks[ENTRY].insts;
    entry.iter().filter(|i| i.op == Op::Assume).for_each(|i| addresses.learn(values, i.args[0]));
    let mut list: Vec<Candidate> = Vec::new();
    let body = version.blocks[BODY..].iter().flat_map(|block| &block.insts);
    for inst in body.filter(|i| i.op == Op::Store) {
        let Some(location) = addresses.locate(values, inst, inst.ty.bytes()) else { continue };
        if list.iter().any(|c| !addresses.disjoint(&c.location, &location)) {
            continue;
        }
        let Some((store, entry)) = content_at_end(version, values, addresses, &location, inst)
        else {
            continue;
        };
        list.push(Candidate { location, slot: Carried { store, entry, stores: Vec::new() } });
    }
    list
}

/// The store that determines the content of `location` at the end of the entry block, and the
/// value.
fn content_at_end(
    version: &Version,
    values: &Values,
    addresses: &mut Addresses,
    location: &Location,
    like: &Inst,
) -> Option<(Inst, Operand)> {
    for inst in version.blocks[ENTRY].insts.iter().rev() {
        match access(version, inst) {
            Access::None | Access::Read(_) | Access::ReadUnknown => {}
            Access::Barrier => return None,
            Access::Write(size) => {
                let here = addresses.locate(values, inst, size)?;
                if inst.op == Op::Store && inst.ty == like.ty && here == *location {
                    return Some((inst.clone(), inst.args[2]));
                }
                if !addresses.disjoint(&here, location) {
                    return None;
                }
            }
        }
    }
    None
}

/// Moves the stores of the loop to one location into the loop's anchors; `uses` are the first uses of
/// anchors by block.
fn carry(
    version: &mut Version,
    slot: &Carried,
    uses: &[Vec<(AnchorId, usize)>],
    gone: &mut [Vec<bool>],
) -> usize {
    if slot.stores.is_empty() {
        return 0;
    }
    let content = Content::of(version, slot);
    let param = carried_param(version, slot, &content);
    let value = |at: Option<Operand>| at.unwrap_or(param.into());
    for (block, uses) in uses.iter().enumerate().skip(BODY) {
        for (anchor, first) in uses {
            let store = deferred(&slot.store, value(content.before(slot, block, *first)));
            version.anchors[anchor.index()].stores.extend(store);
        }
    }
    slot.stores.iter().for_each(|(block, i, _)| gone[*block][*i] = true);
    slot.stores.len()
}

/// What a carried location holds in the blocks of the loop, if that is not the loop's parameter.
struct Content {
    /// By block: at its start.
    at_start: Vec<Option<Operand>>,
}

impl Content {
    fn of(version: &Version, slot: &Carried) -> Content {
        let mut content = Content { at_start: vec![None; version.blocks.len()] };
        for (block, body) in version.blocks.iter().enumerate().skip(BODY) {
            let at_end = content.before(slot, block, body.insts.len());
            let children = body.term.edges().filter(|(to, _)| to.index() != BODY);
            children.for_each(|(to, _)| content.at_start[to.index()] = at_end);
        }
        content
    }

    /// What it holds before an instruction.
    fn before(&self, slot: &Carried, block: usize, inst: usize) -> Option<Operand> {
        let here = slot.stores.iter().rev().find(|(b, i, _)| *b == block && *i < inst);
        here.map_or(self.at_start[block], |(_, _, value)| Some(*value))
    }
}

/// The parameter of the loop that is the location's content: an existing one with the same
/// arguments, or a new one.
fn carried_param(version: &mut Version, slot: &Carried, content: &Content) -> Value {
    let from = to_head(version);
    let at_ends: Vec<Option<Operand>> = from[1..]
        .iter()
        .map(|leaf| content.before(slot, *leaf, version.blocks[*leaf].insts.len()))
        .collect();
    let passes = |i: usize, param: Value| {
        let back = from[1..].iter().map(|leaf| args(version, *leaf)[i]);
        args(version, from[0])[i] == slot.entry
            && back.zip(&at_ends).all(|(arg, at_end)| arg == at_end.unwrap_or(param.into()))
            && version.ty(param) == slot.store.ty
    };
    let params = version.blocks[BODY].params.iter().enumerate();
    let existing = params.clone().find(|(i, param)| passes(*i, **param)).map(|(_, param)| *param);
    existing.unwrap_or_else(|| {
        let param = version.value(slot.store.ty);
        version.blocks[BODY].params.push(param);
        let back = at_ends.into_iter().map(|at_end| at_end.unwrap_or(param.into()));
        add_args(version, &from, [slot.entry].into_iter().chain(back));
        param
    })
}

/// A store that a later one of its block overwrites.
struct Overwritten {
    block: usize,
    store: usize,
    by: usize,
}

fn overwritten(version: &Version) -> Vec<Overwritten> {
    let defs = Defs::of(version);
    let values = Values { defs: &defs, replaced: &[] };
    let mut addresses = Addresses::default();
    let mut found = Vec::new();
    let mut written: Vec<Location> = Vec::new();
    let mut saved = Saved::new(version);
    for block in ENTRY..version.blocks.len() {
        if let Some((guards, before)) = saved.enter(block) {
            addresses.continue_with(guards);
            written = before;
        }
        // Stores that no access has touched yet.
        let mut pending: Vec<(usize, Location)> = Vec::new();
        for (i, inst) in version.blocks[block].insts.iter().enumerate() {
            if inst.op == Op::Assume {
                addresses.learn(&values, inst.args[0]);
            }
            let size = match access(version, inst) {
                Access::None => continue,
                Access::ReadUnknown | Access::Barrier => None,
                Access::Read(size) | Access::Write(size) => Some(size),
            };
            let Some(here) = size.and_then(|size| addresses.locate(&values, inst, size)) else {
                pending.retain(|_| holds(SideCondition::SinkBarrier, false));
                continue;
            };
            if inst.op == Op::Store {
                let covered = pending
                    .iter()
                    .filter(|(_, l)| holds(SideCondition::SinkCovered, here.contains(l)));
                found.extend(covered.map(|(k, _)| Overwritten { block, store: *k, by: i }));
            }
            pending.retain(|(_, l)| {
                holds(SideCondition::SinkPendingDisjoint, addresses.disjoint(l, &here))
            });
            if inst.op == Op::Store {
                // Only a location that has been written before may wait, because performing the
                // store must not fault.
                if holds(SideCondition::SinkWritten, written.iter().any(|w| w.contains(&here))) {
                    pending.push((i, here));
                } else if written.len() < MAX_PENDING {
                    written.push(here);
                }
                if pending.len() > MAX_PENDING {
                    pending.remove(0);
                }
            }
        }
        saved.leave(version, block, || (addresses.guards(), written.clone()));
    }
    found
}

/// Moves an overwritten store to the anchors that are taken before it is overwritten.
fn defer(version: &mut Version, dead: &Overwritten, uses: &[(AnchorId, usize)]) {
    let store = version.blocks[dead.block].insts[dead.store].clone();
    // The uses are sorted by the index of the first use.
    let between = uses.partition_point(|(_, first)| *first <= dead.store)..;
    for (anchor, _) in uses[between].iter().take_while(|(_, first)| *first <= dead.by) {
        version.anchors[anchor.index()].stores.extend(deferred(&store, store.args[2]));
    }
}
