//! Pass `alias`: guards which assume that a store through a pointer misses a group of stack slots
//! or globals.
//!
//! `forward` and `sink` lose what they know of a slot at every store whose address they cannot
//! compare with the slot's. In `-O0` code, where the loop's variables live in memory, one array
//! store in each iteration undoes everything. A guard before the store, on the store's own anchor,
//! says that the store misses the whole group:
//!
//! ```text
//!                            v9 = sub.i64 v3, v5                   (pointer - rbp)
//!                            v10 = add.i64 v9, 8 + 8 - 1           (lowest slot at rbp - 8, w = 8)
//!                            v11 = le.u.i64 8 + 8 - 1, v10
//!                            assume v11 else a3
//! store.i64 [v3], v7 !a3     store.i64 [v3], v7 !a3
//! ```
//!
//! [`crate::alias`] has the arithmetic. A *group* holds slots at constant distances from one
//! loop-invariant address, without a gap in which an array could lie. A *span* holds accesses close
//! to each other through one pointer, loads too; one guard before the first access of a span serves
//! all of them, so that stores to the group can sink past the span.
//!
//! A guard that would fail in the state in which the version will be entered ([`crate::predict`]) is
//! not made: the two do alias.
//!
//! What pays: a guard whose address does not change in the loop costs nothing, because value
//! numbering removes it against its copy in the peeled iteration. Any other guard costs an
//! addition, a comparison and a never-taken branch in each iteration. So the pass makes at most as
//! many of these for a group as the loop has loads from the group.
//!
//! Invariants: `private_memory` holds, and the version is a loop ([`super::shape`]). The pass keeps
//! no data between runs; the caller owns the version, no lock.

use super::OptOptions;
use super::shape::{BODY, ENTRY, Shape, normalise};
use crate::alias::{Access, Addresses, Linear, Location, Values, access};
use crate::defs::Defs;
use crate::op::Op;
use crate::predict::{Prediction, predict, value_of};
use crate::types::{Operand, Ty, Value};
use crate::version::{Inst, Version};
use rustc_hash::FxHashSet;

/// Slots further apart than this, in bytes, belong to different groups (guess: a larger gap may
/// hold an array, whose stores would then fail the guard).
const MAX_GAP: u64 = 16;
/// Longest span in bytes (guess: a longer one fails its guard more often).
const MAX_SPAN: u32 = 64;
/// Most groups of a loop that get guards (guess: each group costs guards at each span).
const MAX_GROUPS: usize = 3;
/// Most guards for one group whose address varies in the loop (guess: they run in each iteration).
const MAX_VARYING: usize = 4;

/// Adjacent slots of one key, and what the loop does with them.
#[derive(Clone, Copy)]
struct Group {
    /// The range from the first slot to the end of the last.
    range: Location,
    loads: usize,
}

/// Runs the pass; returns how many guards it added.
pub(super) fn run(version: &mut Version, options: &OptOptions) -> usize {
    if !options.alias_guards
        || !version.context.private_memory()
        || normalise(version) != Some(Shape::Loop)
    {
        return 0;
    }
    let defs = Defs::of(version);
    let mut addresses = Addresses::default();
    let groups = worthwhile(version, &defs, &mut addresses);
    if groups.is_empty() {
        return 0;
    }
    // Values that the pass adds are not needed: guards compute them from others.
    let predicted = options.entry.as_ref().map_or_else(Vec::new, |entry| predict(version, entry));
    protect(version, ENTRY, &groups, &predicted, &mut addresses)
        + protect(version, BODY, &groups, &predicted, &mut addresses)
}

/// One access of a block.
struct BlockAccess {
    location: Location,
    /// Index of the instruction in the block.
    at: usize,
    write: bool,
    load: bool,
}

/// The accesses of a block with a known extent, in order. The flag is true if there is no write of
/// unknown extent and no barrier.
fn accesses(
    version: &Version,
    block: usize,
    defs: &Defs,
    addresses: &mut Addresses,
) -> (Vec<BlockAccess>, bool) {
    let values = Values { defs, replaced: &[] };
    let (mut list, mut complete) = (Vec::new(), true);
    for (at, inst) in version.blocks[block].insts.iter().enumerate() {
        let (size, write) = match access(version, inst) {
            Access::None | Access::ReadUnknown => continue,
            Access::Barrier => {
                complete = false;
                continue;
            }
            Access::Read(size) => (size, false),
            Access::Write(size) => (size, true),
        };
        match addresses.locate(&values, inst, size) {
            Some(location) => {
                list.push(BlockAccess { location, at, write, load: inst.op == Op::Load })
            }
            None => complete = false,
        }
    }
    (list, complete)
}

/// Accesses through one pointer, close to each other; at least one is a store.
struct Span {
    range: Location,
    /// Index of the first access in the block.
    first: usize,
    write: bool,
}

fn spans(accesses: &[BlockAccess]) -> Vec<Span> {
    let mut sorted: Vec<&BlockAccess> = accesses.iter().collect();
    sorted.sort_by_key(|p| (p.location.key, p.location.offset as i64));
    let mut spans: Vec<Span> = Vec::new();
    for BlockAccess { location, at, write, .. } in sorted {
        if let Some(last) = spans.last_mut()
            && let Some(size) = joined(&last.range, location)
            && size <= MAX_SPAN
        {
            last.range.size = size;
            last.first = last.first.min(*at);
            last.write |= write;
            continue;
        }
        spans.push(Span { range: *location, first: *at, write: *write });
    }
    spans.retain(|s| s.write);
    spans
}

/// The size of a range extended to a later location of the same key, if the gap between them is at
/// most [`MAX_GAP`].
fn joined(range: &Location, next: &Location) -> Option<u32> {
    let start = next.offset.wrapping_sub(range.offset);
    let close = range.key == next.key && start <= u64::from(range.size) + MAX_GAP;
    close.then(|| range.size.max((start + u64::from(next.size)) as u32))
}

/// The groups for which the guards pay.
fn worthwhile(version: &Version, defs: &Defs, addresses: &mut Addresses) -> Vec<Group> {
    let (body, true) = accesses(version, BODY, defs, addresses) else { return Vec::new() };
    let block = &version.blocks[BODY];
    let mut varies = vec![false; version.types.len()];
    block
        .params
        .iter()
        .chain(block.insts.iter().flat_map(|i| &i.defs))
        .for_each(|v| varies[v.index()] = true);
    let steady = |l: &Location| addresses.terms(l).iter().all(|(v, _)| !varies[v.index()]);

    let mut slots: Vec<&BlockAccess> = body.iter().filter(|p| steady(&p.location)).collect();
    slots.sort_by_key(|p| (p.location.key, p.location.offset as i64));
    let mut groups: Vec<Group> = Vec::new();
    for slot in slots {
        let loads = usize::from(slot.load);
        if let Some(last) = groups.last_mut()
            && let Some(size) = joined(&last.range, &slot.location)
        {
            last.range.size = size;
            last.loads += loads;
            continue;
        }
        groups.push(Group { range: slot.location, loads });
    }
    // A guard pays if the loop loads from the group and a span may overwrite it.
    let spans = spans(&body);
    groups.retain(|group| {
        let spoils =
            |l: &Location| l.key != group.range.key && !addresses.disjoint(l, &group.range);
        let spoilers = || spans.iter().filter(|s| spoils(&s.range));
        let varying = spoilers().filter(|s| !steady(&s.range)).count();
        let possible = spoilers().all(|s| addresses.difference(&s.range, &group.range).is_some());
        group.loads > 0
            && spoilers().count() > 0
            && possible
            && varying <= group.loads.min(MAX_VARYING)
    });
    groups.sort_by_key(|g| std::cmp::Reverse(g.loads));
    groups.truncate(MAX_GROUPS);
    groups
}

/// Puts the guards before the spans of a block. Returns the number of guards.
fn protect(
    version: &mut Version,
    block: usize,
    groups: &[Group],
    predicted: &Prediction,
    addresses: &mut Addresses,
) -> usize {
    let mut added = 0;
    let mut defs = Defs::of(version);
    let spans = spans(&accesses(version, block, &defs, addresses).0);
    let insts = std::mem::take(&mut version.blocks[block].insts);
    let mut out = Vec::with_capacity(insts.len());
    for (at, inst) in insts.into_iter().enumerate() {
        for span in spans.iter().filter(|s| s.first == at) {
            let Some(anchor) = inst.anchor else { continue };
            for group in groups {
                if group.range.key == span.range.key
                    || addresses.disjoint(&span.range, &group.range)
                {
                    continue;
                }
                let before = out.len();
                let Some(misses) = Misses::new(addresses, &span.range, group) else { continue };
                if misses.holds(predicted) == Some(false) {
                    continue;
                }
                let predicate = misses.emit(version, &mut out);
                if !is_defined(version, block, &out, before) {
                    // The values from which the group's address is computed are defined after this
                    // access: no guard.
                    out.truncate(before);
                    continue;
                }
                out[before..].iter().for_each(|i| defs.note(i));
                let mut assume = Inst::new(Op::Assume, Ty::I64, None, &[predicate]);
                assume.anchor = Some(anchor);
                out.push(assume);
                addresses.learn(&Values { defs: &defs, replaced: &[] }, predicate);
                added += 1;
            }
        }
        if inst.op == Op::Assume {
            addresses.learn(&Values { defs: &defs, replaced: &[] }, inst.args[0]);
        }
        out.push(inst);
    }
    version.blocks[block].insts = out;
    added
}

/// Is every operand of `out[from..]` defined before its use, in this block or an earlier one?
fn is_defined(version: &Version, block: usize, out: &[Inst], from: usize) -> bool {
    let earlier = version.blocks[..block].iter().flat_map(|b| &b.insts).chain(out);
    let params = version.blocks[..=block].iter().flat_map(|b| b.params.iter().copied());
    let defined: FxHashSet<Value> =
        earlier.flat_map(|i| i.defs.iter().copied()).chain(params).collect();
    out[from..]
        .iter()
        .flat_map(|i| &i.args)
        .filter_map(|a| a.as_value())
        .all(|v| defined.contains(&v))
}

/// The predicate "an access misses a group": `least <= sum`, unsigned.
struct Misses {
    least: u64,
    sum: Linear,
}

impl Misses {
    /// For the access at `location`. None if the two addresses cannot be compared, or need not.
    fn new(addresses: &Addresses, location: &Location, group: &Group) -> Option<Misses> {
        let mut sum = addresses.difference(location, &group.range)?;
        if sum.terms.is_empty() {
            return None;
        }
        let w = u64::from(location.size) - 1;
        sum.offset = sum.offset.wrapping_add(w);
        Some(Misses { least: u64::from(group.range.size) + w, sum })
    }

    /// Does it hold with these values? None if that is not known.
    fn holds(&self, values: &Prediction) -> Option<bool> {
        let sum = self.sum.terms.iter().try_fold(self.sum.offset, |sum, (v, factor)| {
            Some(sum.wrapping_add(value_of(values, (*v).into())?.wrapping_mul(*factor)))
        })?;
        Some(self.least <= sum)
    }

    /// Appends its computation.
    fn emit(&self, version: &mut Version, out: &mut Vec<Inst>) -> Operand {
        let mut emit = |op: Op, ty: Ty, args: &[Operand]| -> Operand {
            let v = version.value(ty);
            // Comparisons carry the type of their operands.
            out.push(Inst::new(op, Ty::I64, Some(v), args));
            v.into()
        };
        let sum = materialise(&self.sum, |op, args| emit(op, Ty::I64, args));
        emit(Op::LeU, Ty::I1, &[Operand::Const(self.least), sum])
    }
}

/// Instructions that compute a linear form with at least one term.
fn materialise(form: &Linear, mut emit: impl FnMut(Op, &[Operand]) -> Operand) -> Operand {
    let mut sum: Option<Operand> = None;
    // Positive terms first, so that the others can be subtracted.
    let mut terms = form.terms.clone();
    terms.sort_by_key(|(_, c)| (*c as i64) < 0);
    for (v, c) in terms {
        let negative = (c as i64) < 0;
        let magnitude = if negative { c.wrapping_neg() } else { c };
        let term = match magnitude {
            1 => v.into(),
            m => emit(Op::Mul, &[v.into(), Operand::Const(m)]),
        };
        sum = Some(match (sum, negative) {
            (None, false) => term,
            (None, true) => emit(Op::Neg, &[term]),
            (Some(s), false) => emit(Op::Add, &[s, term]),
            (Some(s), true) => emit(Op::Sub, &[s, term]),
        });
    }
    let sum = sum.unwrap_or(Operand::Const(0));
    match form.offset {
        0 => sum,
        offset => emit(Op::Add, &[sum, Operand::Const(offset)]),
    }
}
