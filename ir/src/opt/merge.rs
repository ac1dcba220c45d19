//! Pass `merge`: predicate strengthening and merging (sourir 3.4): two guards of one value in a
//! block become one.
//!
//! ```text
//! assume ne.i64 v1, 0 else a0        assume lt.u.i64 10, v1 else a0       the stronger one
//! …                                  …
//! assume lt.u.i64 10, v1 else a1
//!
//! assume le.s.i64 0, v1 else a0      assume lt.u.i64 v1, 100 else a0      one comparison
//! assume lt.s.i64 v1, 100 else a1
//!
//! assume eq.i64 (v1 & 1), 0 else a0  assume eq.i64 (v1 & 7), 0 else a0    bits are one mask
//! assume eq.i64 (v1 & 6), 0 else a1
//! ```
//!
//! The merged guard stands at the point of the first, on the anchor of the first: adding a
//! predicate to an assume is always right (Lemma 5.7). It implies both predicates and dominates the
//! second guard, which is redundant.
//!
//! Side conditions:
//! * The merged predicate is exactly the conjunction, and is about the value of the first
//!   predicate, which is available there.
//! * No anchor defers a store. Either guard may be the proof that an access misses the store, in
//!   the only form that the alias oracle reads.
//!
//! What pays: both guards are in one block, so control that passes the first also reaches the
//! second unless something else fails.
//!
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use crate::defs::{Defs, Expr};
use crate::op::Op;
use crate::origin::Origins;
use crate::side_conditions::{SideCondition, holds};
use crate::types::{Operand, Ty, Value};
use crate::version::{Inst, Version};
use rustc_hash::FxHashMap;

/// Runs the pass; returns the number of assumes removed.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    let nothing_waits = !version.defers_stores();
    if version.is_base() || !holds(SideCondition::MergeNothingWaits, nothing_waits) {
        return 0;
    }
    let mut merged = 0;
    for block in 0..version.blocks.len() {
        // A merged guard may merge with a guard that neither of its parts merged with, so repeat.
        loop {
            let now = merge_block(version, block);
            merged += now;
            if now == 0 {
                break;
            }
        }
    }
    merged
}

/// The statement of an assume about a value of type `ty`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Says {
    /// `start <= value <= start + span`, counted upwards from `start` modulo the type; covers
    /// signed and unsigned ranges.
    In { start: u64, span: u64 },
    /// Every value but this one.
    Not(u64),
    /// The bits of `mask` have the value `value`.
    Bits { mask: u64, value: u64 },
}

/// An assume that stays, with the conjunction of the statements merged into it.
struct Kept {
    at: usize,
    value: Value,
    ty: Ty,
    says: Says,
    /// The origins of the assumes whose statements have been merged into it.
    grown: Vec<Origins>,
}

/// Merges each assume of a block into the first one that it can merge with; returns the number of
/// assumes removed.
fn merge_block(version: &mut Version, block: usize) -> usize {
    let defs = Defs::of(version);
    let mut kept: Vec<Kept> = Vec::new();
    let mut of_value: FxHashMap<(Value, Ty), Vec<usize>> = FxHashMap::default();
    let mut gone: Vec<usize> = Vec::new();
    for (at, inst) in
        version.blocks[block].insts.iter().enumerate().filter(|(_, i)| i.op == Op::Assume)
    {
        let Some((value, ty, says)) = meaning(&defs, inst.args[0]) else { continue };
        let same = of_value.entry((value, ty)).or_default();
        let of_type: Vec<usize>;
        let candidates = match holds(SideCondition::MergeSameValue, false) {
            true => {
                of_type = (0..kept.len()).filter(|k| kept[*k].ty == ty).collect();
                &of_type
            }
            false => &*same,
        };
        let both = |k: &usize| conjunction(kept[*k].says, says, ty).map(|both| (*k, both));
        match candidates.iter().find_map(both) {
            Some((k, both)) => {
                kept[k].says = both;
                kept[k].grown.push(inst.origins.clone());
                gone.push(at);
            }
            None => {
                same.push(kept.len());
                kept.push(Kept { at, value, ty, says, grown: Vec::new() });
            }
        }
    }
    let insts =
        if gone.is_empty() { Vec::new() } else { std::mem::take(&mut version.blocks[block].insts) };
    let (mut kept, mut leaving) =
        (kept.iter().filter(|k| !k.grown.is_empty()).peekable(), gone.iter().peekable());
    for (at, mut inst) in insts.into_iter().enumerate() {
        if leaving.next_if(|gone| **gone == at).is_some() {
            continue;
        }
        if let Some(k) = kept.next_if(|k| k.at == at) {
            inst.args[0] = predicate(version, block, k);
            k.grown.iter().for_each(|origins| inst.origins.join(origins));
        }
        version.blocks[block].insts.push(inst);
    }
    gone.len()
}

/// The statement that a predicate makes about one value.
fn meaning(defs: &Defs, predicate: Operand) -> Option<(Value, Ty, Says)> {
    let Expr { op, ty, args: [a, b, _] } = defs.get(predicate)?;
    if !ty.is_machine_int() {
        return None;
    }
    let (mask, top) = (ty.mask(), ty.mask() >> 1);
    let low = top.wrapping_add(1) & mask;
    let range =
        |from: u64, to: u64| Says::In { start: from & mask, span: to.wrapping_sub(from) & mask };
    match (op, a, b) {
        (Op::Eq, x, Operand::Const(c)) => {
            match defs.get(x) {
                Some(Expr {
                    op: Op::And, args: [Operand::Value(v), Operand::Const(m), _], ..
                }) if c & !m == 0 => Some((v, ty, Says::Bits { mask: m, value: c })),
                _ => Some((x.as_value()?, ty, range(c, c))),
            }
        }
        (Op::Ne, Operand::Value(v), Operand::Const(c)) => Some((v, ty, Says::Not(c))),
        // Comparisons that are always true or always false are left to other passes.
        (Op::LtU, Operand::Value(v), Operand::Const(c)) if c > 0 => Some((v, ty, range(0, c - 1))),
        (Op::LeU, Operand::Value(v), Operand::Const(c)) => Some((v, ty, range(0, c))),
        (Op::LtU, Operand::Const(c), Operand::Value(v)) if c < mask => {
            Some((v, ty, range(c + 1, mask)))
        }
        (Op::LeU, Operand::Const(c), Operand::Value(v)) => Some((v, ty, range(c, mask))),
        (Op::LtS, Operand::Value(v), Operand::Const(c)) if c != low => {
            Some((v, ty, range(low, c.wrapping_sub(1))))
        }
        (Op::LeS, Operand::Value(v), Operand::Const(c)) => Some((v, ty, range(low, c))),
        (Op::LtS, Operand::Const(c), Operand::Value(v)) if c != top => {
            Some((v, ty, range(c.wrapping_add(1), top)))
        }
        (Op::LeS, Operand::Const(c), Operand::Value(v)) => Some((v, ty, range(c, top))),
        _ => None,
    }
}

/// A statement that holds exactly if both do, if there is one.
fn conjunction(first: Says, second: Says, ty: Ty) -> Option<Says> {
    let mask = ty.mask();
    let inside = |start: u64, span: u64, c: u64| c.wrapping_sub(start) & mask <= span;
    match (first, second) {
        (Says::In { start, span }, Says::Not(c)) | (Says::Not(c), Says::In { start, span }) => {
            if !inside(start, span, c) {
                return Some(Says::In { start, span });
            }
            // The excluded value is an end of the range: shorten the range.
            if span == 0 {
                None
            } else if c == start {
                Some(Says::In { start: start.wrapping_add(1) & mask, span: span - 1 })
            } else if c == start.wrapping_add(span) & mask {
                Some(Says::In { start, span: span - 1 })
            } else {
                None
            }
        }
        (Says::In { start: s1, span: n1 }, Says::In { start: s2, span: n2 }) => {
            // The ranges are arcs of a circle. They meet in one arc if exactly one of them contains
            // the start of the other, or if one lies in the other.
            let (second_starts_in_first, first_starts_in_second) =
                (inside(s1, n1, s2), inside(s2, n2, s1));
            match (second_starts_in_first, first_starts_in_second) {
                (true, false) => {
                    let room = n1 - (s2.wrapping_sub(s1) & mask);
                    Some(Says::In { start: s2, span: n2.min(room) })
                }
                (false, true) => {
                    let room = n2 - (s1.wrapping_sub(s2) & mask);
                    Some(Says::In { start: s1, span: n1.min(room) })
                }
                (true, true) if s1 == s2 => Some(Says::In { start: s1, span: n1.min(n2) }),
                // They meet in two arcs or not at all.
                (true, true) | (false, false) => None,
            }
        }
        (Says::Bits { mask: m1, value: c1 }, Says::Bits { mask: m2, value: c2 })
            if (c1 ^ c2) & m1 & m2 == 0 =>
        {
            Some(Says::Bits { mask: m1 | m2, value: c1 | c2 })
        }
        (Says::Not(a), Says::Not(b)) if a == b => Some(Says::Not(a)),
        _ => None,
    }
}

/// Appends the computation of the predicate for the statement.
fn predicate(version: &mut Version, block: usize, kept: &Kept) -> Operand {
    let ty = kept.ty;
    let emit = |version: &mut Version, op: Op, result: Ty, args: &[Operand]| -> Operand {
        let def = version.value(result);
        version.blocks[block].insts.push(Inst::new(op, ty, Some(def), args));
        def.into()
    };
    let (mask, top) = (ty.mask(), ty.mask() >> 1);
    let low = top.wrapping_add(1) & mask;
    let x = Operand::Value(kept.value);
    match kept.says {
        Says::In { start, span: 0 } => emit(version, Op::Eq, Ty::I1, &[x, Operand::Const(start)]),
        Says::In { start: 0, span } => emit(version, Op::LeU, Ty::I1, &[x, Operand::Const(span)]),
        Says::In { start, span } if start.wrapping_add(span) & mask == mask => {
            emit(version, Op::LeU, Ty::I1, &[Operand::Const(start), x])
        }
        Says::In { start, span } if start == low => {
            emit(version, Op::LeS, Ty::I1, &[x, Operand::Const(start.wrapping_add(span) & mask)])
        }
        Says::In { start, span } if start.wrapping_add(span) & mask == top => {
            emit(version, Op::LeS, Ty::I1, &[Operand::Const(start), x])
        }
        Says::In { start, span } => {
            let from_start =
                emit(version, Op::Add, ty, &[x, Operand::Const(start.wrapping_neg() & mask)]);
            emit(version, Op::LeU, Ty::I1, &[from_start, Operand::Const(span)])
        }
        Says::Not(c) => emit(version, Op::Ne, Ty::I1, &[x, Operand::Const(c)]),
        Says::Bits { mask, value } => {
            let bits = emit(version, Op::And, ty, &[x, Operand::Const(mask)]);
            emit(version, Op::Eq, Ty::I1, &[bits, Operand::Const(value)])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(says: Says, v: u64, ty: Ty) -> bool {
        match says {
            Says::In { start, span } => v.wrapping_sub(start) & ty.mask() <= span,
            Says::Not(c) => v != c,
            Says::Bits { mask, value } => v & mask == value,
        }
    }

    /// All of i8: the conjunction of two statements holds exactly where both do.
    #[test]
    fn conjunctions_are_exact() {
        let ty = Ty::I8;
        let mut rng = crate::random::Rng::new(3);
        let mut merged = 0;
        for _ in 0..20_000 {
            let mut some = || match rng.below(4) {
                0 => Says::Not(rng.below(256) as u64),
                1 => {
                    let mask = rng.bits() & 0xff;
                    Says::Bits { mask, value: rng.bits() & mask }
                }
                _ => Says::In { start: rng.below(256) as u64, span: rng.below(256) as u64 },
            };
            let (a, b) = (some(), some());
            let Some(both) = conjunction(a, b, ty) else { continue };
            merged += 1;
            for v in 0..256 {
                assert_eq!(
                    holds(both, v, ty),
                    holds(a, v, ty) && holds(b, v, ty),
                    "{v}: {a:?} and {b:?} as {both:?}"
                );
            }
        }
        assert!(merged > 5_000, "{merged}");
    }

    /// All of i8: a comparison means what the operation computes.
    #[test]
    fn meanings_are_exact() {
        let ty = Ty::I8;
        let x = Operand::Value(Value(0));
        let mut meant = 0;
        for op in [Op::Eq, Op::Ne, Op::LtS, Op::LtU, Op::LeS, Op::LeU] {
            for c in 0..256 {
                for args in [[x, Operand::Const(c)], [Operand::Const(c), x]] {
                    let mut defs = Defs::default();
                    defs.set(Value(1), Expr::new(op, ty, &args));
                    let Some((_, _, says)) = meaning(&defs, Value(1).into()) else { continue };
                    meant += 1;
                    for v in 0..256 {
                        let values = args.map(|a| a.as_const().unwrap_or(v));
                        let truth = crate::semantics::eval(op, ty, &values) != 0;
                        assert_eq!(holds(says, v, ty), truth, "{op} {args:?} of {v}: {says:?}");
                    }
                }
            }
        }
        assert!(meant > 2_000, "{meant}");
    }
}
