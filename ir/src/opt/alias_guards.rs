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
//! [`crate::alias`] has the arithmetic, [`super::alias_plan`] says what is guarded: *groups* of
//! slots, whose address does not change in the loop, against *spans* of accesses through other
//! pointers. One guard before the first access of a span serves all of them.
//!
//! A guard that would fail in the state in which the version will be entered ([`crate::predict`]) is
//! not made: the two do alias.
//!
//! A guard whose addresses do not change in the loop is made before it, if they are known there:
//! then it holds in the loop, too.
//!
//! Invariants: `private_memory` holds, and the version is a loop ([`super::shape`]), perhaps with several
//! paths: then a guard on one path serves only what comes behind it. The pass keeps
//! no data between runs; the caller owns the version, no lock.

use super::OptOptions;
use super::alias_plan::{Forbidden, Plan};
use super::shape::{Shape, normalise};
use super::tree::Saved;
use crate::alias::{Addresses, Linear, Location, Values};
use crate::defs::Defs;
use crate::op::Op;
use crate::origin::{Origin, OriginKind, Origins};
use crate::predict::{Prediction, predict, value_of};
use crate::types::{Operand, Ty, Value};
use crate::version::{Inst, Version};
use rustc_hash::FxHashSet;

/// Runs the pass; returns how many guards it added.
pub(super) fn run(version: &mut Version, options: &OptOptions) -> usize {
    if !options.alias_guards
        || !version.context.private_memory()
        || !matches!(normalise(version), Some(Shape::Loop | Shape::Tree))
    {
        return 0;
    }
    let defs = Defs::of(version);
    let mut addresses = Addresses::default();
    // Values that the pass adds are not needed: guards compute them from others.
    let predicted = options
        .entry
        .as_ref()
        .map_or_else(Vec::new, |entry| predict(version, entry, &options.native_results));
    let plan = Plan::new(version, &defs, &mut addresses, &predicted);
    if plan.groups.is_empty() {
        return 0;
    }
    let mut pass =
        AliasGuards { plan, defs, addresses, predicted, made: FxHashSet::default(), added: 0 };
    let mut defined = Vec::new();
    let mut saved = Saved::new(version);
    for block in 0..version.blocks.len() {
        if let Some((guards, made, values)) = saved.enter(block) {
            pass.addresses.continue_with(guards);
            pass.made = made;
            defined = values;
        }
        pass.protect(version, block, &mut defined);
        saved.leave(version, block, || {
            (pass.addresses.guards(), pass.made.clone(), defined.clone())
        });
    }
    pass.added
}

struct AliasGuards {
    plan: Plan,
    defs: Defs,
    addresses: Addresses,
    predicted: Prediction,
    /// Spans and groups whose guards have been made, or cannot.
    made: FxHashSet<(usize, usize)>,
    added: usize,
}

impl AliasGuards {
    /// Puts the guards before the accesses of a block. `defined` says by number which values are
    /// defined.
    fn protect(&mut self, version: &mut Version, block: usize, defined: &mut Vec<bool>) {
        let insts = std::mem::take(&mut version.blocks[block].insts);
        defined.resize(version.types.len(), false);
        version.blocks[block].params.iter().for_each(|v| defined[v.index()] = true);
        let mut out = Vec::with_capacity(insts.len());
        for (at, inst) in insts.into_iter().enumerate() {
            if let Some(span) = self.plan.span(block, at).filter(|s| self.plan.wants(*s))
                && inst.anchor.is_some()
            {
                for group in 0..self.plan.groups.len() {
                    if !self.made.contains(&(span, group)) {
                        self.guard(version, span, group, &inst, defined, &mut out);
                    }
                }
            }
            if inst.op == Op::Assume {
                self.learn(inst.args[0]);
            }
            inst.defs.iter().for_each(|v| defined[v.index()] = true);
            out.push(inst);
        }
        version.blocks[block].insts = out;
    }

    /// Guards a span against a group before the access `inst`.
    fn guard(
        &mut self,
        version: &mut Version,
        span: usize,
        group: usize,
        inst: &Inst,
        defined: &[bool],
        out: &mut Vec<Inst>,
    ) {
        let range = self.plan.spans[span].range;
        let forbidden = self.plan.forbidden(span, &self.plan.groups[group], &self.addresses);
        for forbidden in forbidden {
            let Some(misses) = Misses::new(&self.addresses, &range, &forbidden) else { continue };
            if misses.holds(&self.predicted) == Some(false) {
                continue;
            }
            if !misses.sum.terms.iter().all(|(v, _)| defined[v.index()]) {
                // The values from which the group's address is computed are defined after this
                // access: perhaps before a later one.
                return;
            }
            let before = out.len();
            let predicate = misses.emit(version, out);
            out[before..].iter().for_each(|i| self.defs.note(i));
            out.push(Inst::assume(predicate, inst.anchor, origins_of(version, inst)));
            self.learn(predicate);
            self.added += 1;
        }
        self.made.insert((span, group));
    }

    fn learn(&mut self, predicate: Operand) {
        self.addresses.learn(&Values { defs: &self.defs, replaced: &[] }, predicate);
    }
}

/// The origins of a guard before an access.
fn origins_of(version: &Version, access: &Inst) -> Origins {
    let target = access.anchor.and_then(|anchor| version.anchors[anchor.index()].target.as_const());
    Origins::of(Origin {
        kind: OriginKind::Alias,
        pc: target.unwrap_or(version.region),
        step: None,
    })
}

/// The predicate "an access misses a group": `least <= sum`, unsigned.
struct Misses {
    least: u64,
    sum: Linear,
}

impl Misses {
    /// For the access at `location`. None if the two addresses cannot be compared, or need not, or
    /// if the access is longer than the bytes that are left.
    fn new(addresses: &Addresses, location: &Location, forbidden: &Forbidden) -> Option<Misses> {
        let mut sum = addresses.difference(location, &forbidden.start)?;
        if sum.terms.is_empty() {
            return None;
        }
        let w = u64::from(location.size) - 1;
        sum.offset = sum.offset.wrapping_add(w);
        Some(Misses { least: forbidden.size.checked_add(w)?, sum })
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

/// Instructions that compute a linear form with at least one term. What is subtracted is computed apart,
/// with the offset: it is that of a group, which does not change in the loop.
fn materialise(form: &Linear, mut emit: impl FnMut(Op, &[Operand]) -> Operand) -> Operand {
    let is_negative = |(_, c): &(Value, u64)| (*c as i64) < 0;
    let (negative, positive): (Vec<_>, Vec<_>) = form.terms.iter().copied().partition(is_negative);
    if negative.is_empty() {
        return sum(&positive, form.offset, &mut emit);
    }
    let negated: Vec<_> = negative.into_iter().map(|(v, c)| (v, c.wrapping_neg())).collect();
    let subtracted = sum(&negated, form.offset.wrapping_neg(), &mut emit);
    let added = sum(&positive, 0, &mut emit);
    emit(Op::Sub, &[added, subtracted])
}

/// Instructions that compute the sum of these terms, each a value times a factor, and the offset.
fn sum(
    terms: &[(Value, u64)],
    offset: u64,
    emit: &mut impl FnMut(Op, &[Operand]) -> Operand,
) -> Operand {
    let mut sum: Option<Operand> = None;
    for (v, c) in terms {
        let term = match c {
            1 => (*v).into(),
            c => emit(Op::Mul, &[(*v).into(), Operand::Const(*c)]),
        };
        sum = Some(sum.map_or(term, |sum| emit(Op::Add, &[sum, term])));
    }
    match (sum, offset) {
        (Some(sum), 0) => sum,
        (Some(sum), offset) => emit(Op::Add, &[sum, Operand::Const(offset)]),
        (None, offset) => Operand::Const(offset),
    }
}
