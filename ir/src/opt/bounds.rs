//! Ranges of integer values, unsigned and signed at once: what comparisons with constants imply.
//!
//! [`Bounds`] is a plain value; [`super::simplify`] keeps one for each value with a known range,
//! [`super::known`] combines it with known bits. Invariant: a value that satisfies the comparisons
//! lies in the range (a test tries every i8 value); the range may be wider than necessary. No lock.
//!
//! ```text
//! Bounds::all(I8).below(LtU, 10)      v <u 10:     umin 0, umax 9; so smin 0, smax 9 too
//! ```

use crate::op::Op;
use crate::types::Ty;

/// A value v of type `ty` with `umin <= v <= umax` unsigned and `smin <= v <= smax` signed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bounds {
    pub umin: u64,
    pub umax: u64,
    pub smin: i64,
    pub smax: i64,
}

impl Bounds {
    /// Every value of the type.
    pub(super) fn all(ty: Ty) -> Bounds {
        let top = ty.mask() >> 1;
        Bounds { umin: 0, umax: ty.mask(), smin: !(top as i64), smax: top as i64 }
    }

    /// Just this value.
    pub(super) fn constant(c: u64, ty: Ty) -> Bounds {
        Bounds { umin: c, umax: c, smin: ty.sext(c), smax: ty.sext(c) }
    }

    /// Values of `ty` that are at most `max` unsigned.
    pub(super) fn at_most(max: u64, ty: Ty) -> Bounds {
        Bounds { umax: max.min(ty.mask()), ..Bounds::all(ty) }.agree(ty)
    }

    /// The only value in the range, if there is just one. An empty range, which arises after a
    /// guard that always fails, has none.
    pub(super) fn single(self) -> Option<u64> {
        (self.umin == self.umax).then_some(self.umin)
    }

    /// The range if also `v op c` holds, for a comparison `op`.
    pub(super) fn below(mut self, op: Op, c: u64, ty: Ty) -> Bounds {
        let s = ty.sext(c);
        match op {
            Op::LtU => self.umax = self.umax.min(c.saturating_sub(1)),
            Op::LeU => self.umax = self.umax.min(c),
            Op::LtS => self.smax = self.smax.min(s.saturating_sub(1)),
            Op::LeS => self.smax = self.smax.min(s),
            _ => {}
        }
        self.agree(ty)
    }

    /// The range if also `c op v` holds.
    pub(super) fn above(mut self, op: Op, c: u64, ty: Ty) -> Bounds {
        let s = ty.sext(c);
        match op {
            Op::LtU => self.umin = self.umin.max(c.saturating_add(1)),
            Op::LeU => self.umin = self.umin.max(c),
            Op::LtS => self.smin = self.smin.max(s.saturating_add(1)),
            Op::LeS => self.smin = self.smin.max(s),
            _ => {}
        }
        self.agree(ty)
    }

    /// The range if the value is not `c`.
    pub(super) fn exclude(mut self, c: u64, ty: Ty) -> Bounds {
        let s = ty.sext(c);
        if self.umin == c && c < self.umax {
            self.umin += 1;
        }
        if self.umax == c && c > self.umin {
            self.umax -= 1;
        }
        if self.smin == s && s < self.smax {
            self.smin += 1;
        }
        if self.smax == s && s > self.smin {
            self.smax -= 1;
        }
        self.agree(ty)
    }

    /// Carries the bounds of one signedness to the other: within one half of the number line both
    /// orders agree.
    pub(super) fn agree(mut self, ty: Ty) -> Bounds {
        let half = ty.mask() >> 1;
        if self.smin >= 0 {
            self.umin = self.umin.max(self.smin as u64);
            self.umax = self.umax.min(self.smax as u64);
        }
        if self.umax <= half {
            self.smin = self.smin.max(self.umin as i64);
            self.smax = self.smax.min(self.umax as i64);
        }
        self
    }

    /// The truth of a comparison between values in these ranges, if it is decided.
    pub(super) fn decide(op: Op, a: Bounds, b: Bounds) -> Option<bool> {
        let verdict = |yes: bool, no: bool| if yes { Some(true) } else { no.then_some(false) };
        match op {
            Op::LtU => verdict(a.umax < b.umin, a.umin >= b.umax),
            Op::LeU => verdict(a.umax <= b.umin, a.umin > b.umax),
            Op::LtS => verdict(a.smax < b.smin, a.smin >= b.smax),
            Op::LeS => verdict(a.smax <= b.smin, a.smin > b.smax),
            Op::Eq | Op::Ne => {
                let apart =
                    a.umax < b.umin || b.umax < a.umin || a.smax < b.smin || b.smax < a.smin;
                apart.then_some(op == Op::Ne)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every i8 value and constant: a range must contain each value that passes the comparison.
    #[test]
    fn ranges_contain_what_passes() {
        let ty = Ty::I8;
        let inside = |b: Bounds, v: u64| {
            b.umin <= v && v <= b.umax && b.smin <= ty.sext(v) && ty.sext(v) <= b.smax
        };
        for op in [Op::LtU, Op::LeU, Op::LtS, Op::LeS] {
            for c in 0..=255u64 {
                let (below, above) =
                    (Bounds::all(ty).below(op, c, ty), Bounds::all(ty).above(op, c, ty));
                for v in 0..=255u64 {
                    if crate::semantics::eval(op, ty, &[v, c]) != 0 {
                        assert!(inside(below, v), "{v} {op} {c}: {below:?}");
                    }
                    if crate::semantics::eval(op, ty, &[c, v]) != 0 {
                        assert!(inside(above, v), "{c} {op} {v}: {above:?}");
                    }
                    if v != c {
                        assert!(inside(Bounds::all(ty).exclude(c, ty), v));
                    }
                }
            }
        }
    }
}
