//! Abstract values: a set of values of one type, described by a range (unsigned and signed) and by
//! known bits.
//!
//! [`Known`] is a plain value. [`super::facts`] keeps one for each value at each block;
//! [`Known::of`] computes the set that an operation makes of such sets. Invariant: whatever members
//! the operands have, the result is a member of the computed set, which may be larger than
//! necessary (`tests` tries all of i8). No lock.
//!
//! ```text
//! { v & 7 }        zeros: all bits but the low three; so also the range 0 to 7
//! { v & 7 } + 1    range 1 to 8
//! ```

use super::bounds::Bounds;
use crate::op::Op;
use crate::semantics;
use crate::types::Ty;

/// The values in the range whose bits in `zeros` are 0 and whose bits in `ones` are 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Known {
    pub bounds: Bounds,
    pub zeros: u64,
    pub ones: u64,
}

impl Known {
    /// Every value of the type.
    pub(super) fn all(ty: Ty) -> Known {
        Known { bounds: Bounds::all(ty), zeros: !ty.mask(), ones: 0 }
    }

    /// Just this one.
    pub(super) fn constant(c: u64, ty: Ty) -> Known {
        Known { bounds: Bounds::constant(c, ty), zeros: !c, ones: c }
    }

    /// The only member, if the description leaves just one.
    pub(super) fn single(&self) -> Option<u64> {
        self.bounds.single().or((self.zeros == !self.ones).then_some(self.ones))
    }

    /// Does the description contradict itself? Then control does not reach the point where it
    /// holds.
    pub(super) fn is_empty(&self) -> bool {
        let Bounds { umin, umax, smin, smax } = self.bounds;
        umin > umax || smin > smax || self.zeros & self.ones != 0
    }

    /// Can it be `v`?
    #[cfg(test)]
    pub(super) fn contains(&self, v: u64, ty: Ty) -> bool {
        let Bounds { umin, umax, smin, smax } = self.bounds;
        let s = ty.sext(v);
        umin <= v
            && v <= umax
            && smin <= s
            && s <= smax
            && v & self.zeros == 0
            && v & self.ones == self.ones
    }

    /// The values in either set (an upper bound).
    pub(super) fn join(&self, other: &Known) -> Known {
        let (a, b) = (self.bounds, other.bounds);
        Known {
            bounds: Bounds {
                umin: a.umin.min(b.umin),
                umax: a.umax.max(b.umax),
                smin: a.smin.min(b.smin),
                smax: a.smax.max(b.smax),
            },
            zeros: self.zeros & other.zeros,
            ones: self.ones & other.ones,
        }
    }

    /// The values in both sets.
    pub(super) fn meet(&self, other: &Known, ty: Ty) -> Known {
        let (a, b) = (self.bounds, other.bounds);
        let both = Known {
            bounds: Bounds {
                umin: a.umin.max(b.umin),
                umax: a.umax.min(b.umax),
                smin: a.smin.max(b.smin),
                smax: a.smax.min(b.smax),
            },
            zeros: self.zeros | other.zeros,
            ones: self.ones | other.ones,
        };
        both.reduced(ty)
    }

    /// The set without its range; the bits remain.
    pub(super) fn widened(&self, ty: Ty) -> Known {
        Known::all(ty).with_bits(self.zeros, self.ones, ty)
    }

    /// The members in the range.
    pub(super) fn within(&self, bounds: Bounds, ty: Ty) -> Known {
        self.meet(&Known { bounds, zeros: !ty.mask(), ones: 0 }, ty)
    }

    /// The members with these bits.
    pub(super) fn with_bits(&self, zeros: u64, ones: u64, ty: Ty) -> Known {
        self.meet(
            &Known { bounds: Bounds::all(ty), zeros: zeros | !ty.mask(), ones: ones & ty.mask() },
            ty,
        )
    }

    /// Derives bits from the range and a range from the bits.
    fn reduced(mut self, ty: Ty) -> Known {
        if self.is_empty() {
            return self;
        }
        let mask = ty.mask();
        let sign = mask ^ mask >> 1;
        let b = &mut self.bounds;
        b.umin = b.umin.max(self.ones);
        b.umax = b.umax.min(!self.zeros & mask);
        if self.zeros & sign != 0 {
            b.smin = b.smin.max(0);
        }
        if self.ones & sign != 0 {
            b.smax = b.smax.min(-1);
        }
        self.bounds = self.bounds.agree(ty);
        let b = self.bounds;
        if b.umin <= b.umax {
            // The leading bits that both ends share are those of everything between.
            let differ = b.umin ^ b.umax;
            let shared = if differ == 0 { u64::MAX } else { !(u64::MAX >> differ.leading_zeros()) };
            self.ones |= b.umin & shared;
            self.zeros |= !b.umin & shared;
        }
        self
    }

    /// The set of values with these bits.
    fn bits(zeros: u64, ones: u64, ty: Ty) -> Known {
        Known::all(ty).with_bits(zeros, ones, ty)
    }

    /// The set of results of an operation on operands in these sets. `types` are the operands'
    /// types.
    pub(super) fn of(op: Op, ty: Ty, result: Ty, args: &[Known], types: &[Ty]) -> Known {
        let top = || Known::all(result);
        if args.iter().any(Known::is_empty) {
            return top();
        }
        if !matches!(op, Op::Flags(_)) {
            let singles: Option<Vec<u64>> = args.iter().map(Known::single).collect();
            if let Some(values) = singles {
                return Known::constant(semantics::eval(op, ty, &values), result);
            }
        }
        match (op, args) {
            (Op::Add, [a, b]) => sum(a, b, 0, ty),
            (Op::Sub, [a, b]) => difference(a, b, ty),
            (Op::Neg, [a]) => difference(&Known::constant(0, ty), a, ty),
            (Op::And, [a, b]) => {
                let bits = Known::bits(a.zeros | b.zeros, a.ones & b.ones, ty);
                bits.within(Bounds::at_most(a.bounds.umax.min(b.bounds.umax), ty), ty)
            }
            (Op::Or, [a, b]) => Known::bits(a.zeros & b.zeros, a.ones | b.ones, ty),
            (Op::Xor, [a, b]) => Known::bits(
                a.zeros & b.zeros | a.ones & b.ones,
                a.zeros & b.ones | a.ones & b.zeros,
                ty,
            ),
            (Op::Not, [a]) => Known::bits(a.ones | !ty.mask(), a.zeros & ty.mask(), ty),
            (Op::Shl | Op::Shr | Op::Sar, [a, b]) => {
                b.single().map_or_else(top, |count| shifted(op, a, count, ty))
            }
            (Op::Zext(from), [a]) => {
                let b = a.bounds;
                let bounds =
                    Bounds { umin: b.umin, umax: b.umax, smin: b.umin as i64, smax: b.umax as i64 };
                Known { bounds, zeros: a.zeros | !from.mask(), ones: a.ones }
            }
            (Op::Sext(from), [a]) => extended(a, from, ty),
            (Op::Trunc, [a]) => {
                let low = Known::bits(a.zeros | !ty.mask(), a.ones & ty.mask(), ty);
                let fits = a.bounds.umax <= ty.mask();
                if fits { low.within(unsigned(a.bounds.umin, a.bounds.umax, ty), ty) } else { low }
            }
            (Op::Insert8Low | Op::Insert8High | Op::Insert16, [old, new]) => {
                let (width, at) = match op {
                    Op::Insert8Low => (0xff, 0),
                    Op::Insert8High => (0xff, 8),
                    _ => (0xffff, 0),
                };
                let (kept, part) = (!(width << at), |bits: u64| (bits & width) << at);
                let zeros = old.zeros & kept | part(new.zeros);
                Known::bits(zeros, old.ones & kept | part(new.ones), ty)
            }
            (Op::Eq | Op::Ne | Op::LtS | Op::LtU | Op::LeS | Op::LeU, [a, b]) => {
                let apart = a.ones & b.zeros | a.zeros & b.ones;
                let differ = matches!(op, Op::Eq | Op::Ne) && apart & ty.mask() != 0;
                let decided = if differ { Some(op == Op::Ne) } else { decide(op, a, b, types) };
                decided.map_or_else(top, |truth| Known::constant(u64::from(truth), Ty::I1))
            }
            (Op::Select, [c, a, b]) => match c.single() {
                Some(0) => *b,
                Some(_) => *a,
                None => a.join(b),
            },
            (Op::Popcnt | Op::Clz | Op::Ctz, _) => {
                top().within(Bounds::at_most(u64::from(ty.bits()), ty), ty)
            }
            _ => top(),
        }
    }
}

fn decide(op: Op, a: &Known, b: &Known, types: &[Ty]) -> Option<bool> {
    // i1 values are not ordered.
    if types.first() == Some(&Ty::I1) && !matches!(op, Op::Eq | Op::Ne) {
        return None;
    }
    Bounds::decide(op, a.bounds, b.bounds)
}

fn unsigned(umin: u64, umax: u64, ty: Ty) -> Bounds {
    Bounds { umin, umax, ..Bounds::all(ty) }.agree(ty)
}

/// The bits of `a + b + carry`, and its range if nothing overflows. A bit is known where both
/// operands and the carry into it are.
fn sum(a: &Known, b: &Known, carry: u64, ty: Ty) -> Known {
    let mask = ty.mask();
    let (low, high) = (
        a.ones.wrapping_add(b.ones).wrapping_add(carry),
        (!a.zeros & mask).wrapping_add(!b.zeros & mask).wrapping_add(carry),
    );
    let carries = !(high ^ a.zeros ^ b.zeros) | (low ^ a.ones ^ b.ones);
    let sure = (a.zeros | a.ones) & (b.zeros | b.ones) & carries;
    let bits = Known::bits(!high & sure, low & sure, ty);
    let (x, y) = (a.bounds, b.bounds);
    let mut bounds = Bounds::all(ty);
    if carry == 0 {
        if let Some(umax) = x.umax.checked_add(y.umax).filter(|u| *u <= mask) {
            (bounds.umin, bounds.umax) = (x.umin + y.umin, umax);
        }
        let signed = (x.smin.checked_add(y.smin), x.smax.checked_add(y.smax));
        if let (Some(smin), Some(smax)) = signed
            && fits(smin, ty)
            && fits(smax, ty)
        {
            (bounds.smin, bounds.smax) = (smin, smax);
        }
    }
    bits.within(bounds.agree(ty), ty)
}

fn fits(v: i64, ty: Ty) -> bool {
    ty.sext(v as u64 & ty.mask()) == v
}

fn difference(a: &Known, b: &Known, ty: Ty) -> Known {
    let mask = ty.mask();
    let complement = Known { bounds: Bounds::all(ty), zeros: b.ones | !mask, ones: b.zeros & mask };
    let bits = sum(a, &complement, 1, ty);
    let (x, y) = (a.bounds, b.bounds);
    let mut bounds = Bounds::all(ty);
    if x.umin >= y.umax {
        (bounds.umin, bounds.umax) = (x.umin - y.umax, x.umax - y.umin);
    }
    let signed = (x.smin.checked_sub(y.smax), x.smax.checked_sub(y.smin));
    if let (Some(smin), Some(smax)) = signed
        && fits(smin, ty)
        && fits(smax, ty)
    {
        (bounds.smin, bounds.smax) = (smin, smax);
    }
    bits.within(bounds.agree(ty), ty)
}

/// A shift by a known count, which the processor masks.
fn shifted(op: Op, a: &Known, count: u64, ty: Ty) -> Known {
    let count = (count & if ty.bits() == 64 { 63 } else { 31 }) as u32;
    if count == 0 {
        return *a;
    }
    let mask = ty.mask();
    if count >= ty.bits() {
        return if op == Op::Sar { Known::all(ty) } else { Known::constant(0, ty) };
    }
    match op {
        Op::Shl => {
            let zeros = (a.zeros & mask) << count & mask | ((1 << count) - 1) | !mask;
            Known::bits(zeros, a.ones << count & mask, ty)
        }
        Op::Shr => {
            let zeros = a.zeros >> count | !(mask >> count);
            let bits = Known::bits(zeros, a.ones >> count, ty);
            bits.within(unsigned(a.bounds.umin >> count, a.bounds.umax >> count, ty), ty)
        }
        _ => {
            let sext = |bits: u64| (ty.sext(bits & mask) >> count) as u64 & mask;
            let bits = Known::bits(sext(a.zeros) | !mask, sext(a.ones), ty);
            let bounds = Bounds {
                smin: a.bounds.smin >> count,
                smax: a.bounds.smax >> count,
                ..Bounds::all(ty)
            };
            bits.within(bounds.agree(ty), ty)
        }
    }
}

fn extended(a: &Known, from: Ty, ty: Ty) -> Known {
    let above = ty.mask() & !from.mask();
    let sign = from.mask() ^ from.mask() >> 1;
    let (mut zeros, mut ones) = (a.zeros & from.mask(), a.ones & from.mask());
    if zeros & sign != 0 {
        zeros |= above;
    }
    if ones & sign != 0 {
        ones |= above;
    }
    // i1 sign-extends to 0 or -1.
    let (smin, smax) = if from == Ty::I1 { (-1, 0) } else { (a.bounds.smin, a.bounds.smax) };
    let bounds = Bounds { smin, smax, ..Bounds::all(ty) }.agree(ty);
    Known::bits(zeros | !ty.mask(), ones, ty).within(bounds, ty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    fn some(rng: &mut Rng) -> Known {
        // A set with at least one member, made by the same functions as the analysis uses.
        let ty = Ty::I8;
        let witness = rng.below(256) as u64;
        let mut known = Known::all(ty);
        if rng.one_in(2) {
            let (a, b) = (rng.below(256) as u64, rng.below(256) as u64);
            known = known.within(unsigned(a.min(witness), b.max(witness), ty), ty);
        }
        if rng.one_in(2) {
            let mask = rng.bits() & 0xff;
            known = known.with_bits(!witness & mask, witness & mask, ty);
        }
        if rng.one_in(4) {
            let s = ty.sext(witness);
            let bounds = Bounds { smin: s.saturating_sub(3).max(-128), smax: s, ..Bounds::all(ty) };
            known = known.within(bounds, ty);
        }
        assert!(known.contains(witness, ty), "{witness} is in {known:?}");
        known
    }

    #[test]
    fn what_is_inserted_is_known_with_what_is_kept() {
        let kept = Known::bits(0xff0000, 0x12, Ty::I64);
        let of = |op, part, ty| {
            let said = Known::of(op, Ty::I64, Ty::I64, &[kept, Known::constant(part, ty)], &[]);
            (said.zeros, said.ones)
        };
        assert_eq!(of(Op::Insert8Low, 0x64, Ty::I8), (0xff009b, 0x64));
        assert_eq!(of(Op::Insert8High, 0x64, Ty::I8), (0xff9b00, 0x6412));
        assert_eq!(of(Op::Insert16, 0x164, Ty::I16), (0xfffe9b, 0x164));
        let anything = Known::of(
            Op::Insert8Low,
            Ty::I64,
            Ty::I64,
            &[Known::all(Ty::I64), Known::constant(0x64, Ty::I8)],
            &[],
        );
        assert_eq!((anything.zeros, anything.ones), (0x9b, 0x64));
    }

    /// All of i8: whatever the operands are, the result is a member of the set that the operation
    /// is said to give.
    #[test]
    fn results_are_among_what_is_said() {
        let ty = Ty::I8;
        let mut rng = Rng::new(7);
        let mut useful = 0;
        let binary = [Op::Add, Op::Sub, Op::And, Op::Or, Op::Xor, Op::Shl, Op::Shr, Op::Sar];
        let comparisons = [Op::Eq, Op::Ne, Op::LtS, Op::LtU, Op::LeS, Op::LeU];
        for round in 0..1500 {
            let (a, b) = (
                some(&mut rng),
                if round % 3 == 0 {
                    Known::constant(rng.below(40) as u64, ty)
                } else {
                    some(&mut rng)
                },
            );
            let inside =
                |k: &Known| (0..256u64).filter(|v| k.contains(*v, ty)).collect::<Vec<u64>>();
            let (left, right) = (inside(&a), inside(&b));
            for op in binary.into_iter().chain(comparisons) {
                let result = if comparisons.contains(&op) { Ty::I1 } else { ty };
                let said = Known::of(op, ty, result, &[a, b], &[ty, ty]);
                useful += usize::from(said != Known::all(result));
                for x in &left {
                    for y in &right {
                        let v = semantics::eval(op, ty, &[*x, *y]);
                        assert!(
                            said.contains(v, result),
                            "{op} {x} {y} = {v}, not in {said:?}\n{a:?}\n{b:?}"
                        );
                    }
                }
            }
            for (op, result) in [
                (Op::Not, ty),
                (Op::Neg, ty),
                (Op::Zext(ty), Ty::I32),
                (Op::Sext(ty), Ty::I32),
                (Op::Popcnt, ty),
            ] {
                let said = Known::of(op, result, result, &[a], &[ty]);
                for x in &left {
                    let v = semantics::eval(op, result, &[*x]);
                    assert!(said.contains(v, result), "{op} {x} = {v}, not in {said:?}\n{a:?}");
                }
            }
            let (joined, met) = (a.join(&b), a.meet(&b, ty));
            for v in 0..256 {
                let (in_a, in_b) = (a.contains(v, ty), b.contains(v, ty));
                assert!(!(in_a || in_b) || joined.contains(v, ty));
                assert!(!(in_a && in_b) || met.contains(v, ty));
            }
        }
        assert!(useful > 5_000, "{useful}");
    }

    #[test]
    fn truncation_keeps_low_bits() {
        let wide = Known::all(Ty::I32).with_bits(0x0f, 0x30, Ty::I32);
        let low = Known::of(Op::Trunc, Ty::I8, Ty::I8, &[wide], &[Ty::I32]);
        assert_eq!((low.zeros & 0xff, low.ones), (0x0f, 0x30));
        let bit = Known::of(Op::Sext(Ty::I1), Ty::I8, Ty::I8, &[Known::all(Ty::I1)], &[Ty::I1]);
        assert!(bit.contains(0, Ty::I8) && bit.contains(0xff, Ty::I8));
    }
}
