//! The rewrite rules of pure operations. Each arm states what it rewrites.
//!
//! [`super::simplify`] folds constants and moves the constant of a commutative operation to the
//! right before it calls [`rewrite`]. A rule returns the operand or the smaller expression that
//! replaces the old one, and may build sub-expressions (`n.build`), which are numbered like any
//! other. Invariants: both sides compute the same value for all operands; a rule does not keep a
//! dead value alive unless it saves more than that costs, and then says so. No data of its own, no
//! lock.
//!
//! ```text
//! sub.i64 (add.i64 v1, 8), 8        v1
//! eq.i64 (xor.i64 v1, v2), 0        eq.i64 v1, v2
//! ```

use super::bounds::Bounds;
use super::conditions;
use super::simplify::{Numbering, Rewrite};
use crate::defs::Expr;
use crate::op::{FlagOp, Op};
use crate::types::{Operand, Ty};
use Operand::Const;

const ZERO: Operand = Const(0);

/// Applies one rule to `e`.
pub(super) fn rewrite(n: &mut Numbering, e: &Expr) -> Rewrite {
    let [a, b, c] = e.args;
    let mask = e.ty.mask();
    match e.op {
        Op::Add => add(n, e),
        Op::Sub => sub(n, e),
        Op::And => and(n, e),
        Op::Or => match b {
            ZERO => Rewrite::Done(a),
            Const(x) if x == mask => Rewrite::Done(b),
            _ if a == b => Rewrite::Done(a),
            _ => reassociate(n, e, |x, y| x | y),
        },
        Op::Xor => match b {
            ZERO => Rewrite::Done(a),
            Const(x) if x == mask => again(Op::Not, e.ty, &[a]),
            _ if a == b => Rewrite::Done(ZERO),
            _ => reassociate(n, e, |x, y| x ^ y),
        },
        Op::Mul => match b {
            ZERO => Rewrite::Done(ZERO),
            Const(1) => Rewrite::Done(a),
            Const(x) if x.is_power_of_two() => {
                again(Op::Shl, e.ty, &[a, Const(u64::from(x.trailing_zeros()))])
            }
            _ => Rewrite::Keep,
        },
        Op::MulHighU if b == ZERO || b == Const(1) => Rewrite::Done(ZERO),
        Op::MulHighS if b == ZERO => Rewrite::Done(ZERO),
        Op::MulHighU | Op::MulHighS => Rewrite::Keep,
        Op::Shl | Op::Shr | Op::Sar => shift(n, e),
        Op::Rol | Op::Ror => match b {
            Const(x) if x % u64::from(e.ty.bits()) == 0 => Rewrite::Done(a),
            _ => Rewrite::Keep,
        },
        Op::Not => not(n, e),
        Op::Neg => match n.def(a) {
            Some(Expr { op: Op::Neg, args: [x, ..], .. }) => Rewrite::Done(x),
            _ => Rewrite::Keep,
        },
        Op::Bswap => match n.def(a) {
            Some(Expr { op: Op::Bswap, args: [x, ..], .. }) => Rewrite::Done(x),
            _ => Rewrite::Keep,
        },
        Op::Popcnt | Op::Clz | Op::Ctz => Rewrite::Keep,
        Op::Zext(from) => zext(n, e, from),
        Op::Sext(from) => match n.def(a) {
            Some(Expr { op: Op::Sext(inner), args: [x, ..], .. }) => {
                again(Op::Sext(inner), e.ty, &[x])
            }
            Some(Expr { op: Op::Zext(inner), args: [x, ..], .. }) => {
                again(Op::Zext(inner), e.ty, &[x])
            }
            _ if bounds(n, a, from).umax <= from.mask() >> 1 => again(Op::Zext(from), e.ty, &[a]),
            _ => Rewrite::Keep,
        },
        Op::Trunc => trunc(n, e),
        Op::Insert8Low | Op::Insert8High | Op::Insert16 => insert(n, e),
        Op::Eq | Op::Ne => equality(n, e),
        Op::LtS | Op::LtU | Op::LeS | Op::LeU => order(n, e),
        Op::Select => match (a, n.def(a)) {
            (Const(0), _) => Rewrite::Done(c),
            (Const(_), _) => Rewrite::Done(b),
            _ if b == c => Rewrite::Done(b),
            (_, Some(Expr { op: Op::Not, args: [x, ..], .. })) => {
                again(Op::Select, e.ty, &[x, c, b])
            }
            _ if e.ty == Ty::I1 && b == Const(1) && c == ZERO => Rewrite::Done(a),
            _ if e.ty == Ty::I1 && b == ZERO && c == Const(1) => again(Op::Not, Ty::I1, &[a]),
            _ => Rewrite::Keep,
        },
        Op::Cond(cc) => conditions::rewrite(n, cc, a),
        Op::Flags(op) => flags(n, e, op),
        Op::FlagBits => match n.def(a) {
            Some(Expr { op: Op::Flags(FlagOp::FromBits), args: [x, ..], .. }) => {
                again(Op::And, Ty::I64, &[x, Const(crate::semantics::ARITH_FLAGS)])
            }
            _ => Rewrite::Keep,
        },
        Op::Load
        | Op::Store
        | Op::Get(_)
        | Op::Put(_)
        | Op::At
        | Op::Assume
        | Op::Poll
        | Op::Native => Rewrite::Keep,
        Op::Print | Op::Read => Rewrite::Keep,
    }
}

/// Replace the expression by this one and apply the rules again.
pub(super) fn again(op: Op, ty: Ty, args: &[Operand]) -> Rewrite {
    Rewrite::Again(Expr::new(op, ty, args))
}

/// The range of `o`, an operand of type `ty`.
pub(super) fn bounds(n: &Numbering, o: Operand, ty: Ty) -> Bounds {
    let Operand::Value(v) = o else {
        let Const(c) = o else { return Bounds::all(ty) };
        return Bounds::constant(c, ty);
    };
    if let Some(range) = n.range(v) {
        return range;
    }
    match n.def(o) {
        Some(Expr { op: Op::Zext(from), .. }) => Bounds::at_most(from.mask(), ty),
        Some(Expr { op: Op::Trunc, args: [Operand::Value(x), ..], .. }) => match n.range(x) {
            Some(Bounds { umin, umax, .. }) if umax <= ty.mask() => {
                Bounds { umin, umax, ..Bounds::all(ty) }.agree(ty)
            }
            _ => Bounds::all(ty),
        },
        Some(Expr { op: Op::And, args: [_, Const(c), _], .. }) => Bounds::at_most(c, ty),
        Some(Expr { op: Op::Shr, args: [_, Const(k), _], .. }) => {
            Bounds::at_most(ty.mask().checked_shr(shift_count(ty, k)).unwrap_or(0), ty)
        }
        Some(Expr { op: Op::Popcnt | Op::Clz | Op::Ctz, .. }) => {
            Bounds::at_most(u64::from(ty.bits()), ty)
        }
        _ => Bounds::all(ty),
    }
}

/// x86's masking of a shift count.
fn shift_count(ty: Ty, count: u64) -> u32 {
    (count & if ty.bits() == 64 { 63 } else { 31 }) as u32
}

/// `(x op c1) op c2` = `x op (c1 op c2)` for an associative `op`.
fn reassociate(n: &Numbering, e: &Expr, fold: impl Fn(u64, u64) -> u64) -> Rewrite {
    if let (Const(c2), Some(Expr { op, args: [x, Const(c1), _], .. })) =
        (e.args[1], n.def(e.args[0]))
        && op == e.op
    {
        return again(op, e.ty, &[x, Const(fold(c1, c2) & e.ty.mask())]);
    }
    Rewrite::Keep
}

/// `o` as the sum of a value and a constant.
fn root(n: &Numbering, o: Operand) -> (Operand, u64) {
    match n.def(o) {
        Some(Expr { op: Op::Add, args: [x, Const(c), _], .. }) => (x, c),
        _ => (o, 0),
    }
}

fn add(n: &mut Numbering, e: &Expr) -> Rewrite {
    let [a, b, _] = e.args;
    match b {
        ZERO => return Rewrite::Done(a),
        Const(_) => return reassociate(n, e, u64::wrapping_add),
        Operand::Value(_) => {}
    }
    for (x, y) in [(a, b), (b, a)] {
        match n.def(x) {
            // (p - y) + y = p
            Some(Expr { op: Op::Sub, args: [p, q, _], .. }) if q == y => return Rewrite::Done(p),
            Some(Expr { op: Op::Neg, args: [q, ..], .. }) => return again(Op::Sub, e.ty, &[y, q]),
            _ => {}
        }
    }
    Rewrite::Keep
}

fn sub(n: &mut Numbering, e: &Expr) -> Rewrite {
    let [a, b, _] = e.args;
    match (a, b) {
        (_, Const(c)) => return again(Op::Add, e.ty, &[a, Const(c.wrapping_neg() & e.ty.mask())]),
        (ZERO, _) => return again(Op::Neg, e.ty, &[b]),
        _ if a == b => return Rewrite::Done(ZERO),
        _ => {}
    }
    // The difference of two sums of one value and a constant.
    let ((x, c1), (y, c2)) = (root(n, a), root(n, b));
    if x == y {
        return Rewrite::Done(Const(c1.wrapping_sub(c2) & e.ty.mask()));
    }
    match n.def(a) {
        // (p + q) - q = p
        Some(Expr { op: Op::Add, args: [p, q, _], .. }) if q == b => return Rewrite::Done(p),
        Some(Expr { op: Op::Add, args: [p, q, _], .. }) if p == b => return Rewrite::Done(q),
        _ => {}
    }
    Rewrite::Keep
}

fn and(n: &mut Numbering, e: &Expr) -> Rewrite {
    let [a, b, _] = e.args;
    match b {
        ZERO => Rewrite::Done(ZERO),
        _ if a == b => Rewrite::Done(a),
        Const(c) if c == e.ty.mask() => Rewrite::Done(a),
        Const(c) if let Some(known) = n.bits(a, c) => Rewrite::Done(Const(known)),
        Const(c) => match n.def(a) {
            Some(Expr { op: Op::Zext(from), .. }) if c & from.mask() == from.mask() => {
                Rewrite::Done(a)
            }
            Some(Expr { op: Op::Insert8Low, args: [_, y, _], .. }) if c == 0xff => {
                again(Op::Zext(Ty::I8), Ty::I64, &[y])
            }
            Some(Expr { op: Op::Insert16, args: [_, y, _], .. }) if c == 0xffff => {
                again(Op::Zext(Ty::I16), Ty::I64, &[y])
            }
            _ => reassociate(n, e, |x, y| x & y),
        },
        Operand::Value(_) => Rewrite::Keep,
    }
}

fn shift(n: &mut Numbering, e: &Expr) -> Rewrite {
    let [a, b, _] = e.args;
    if a == ZERO {
        return Rewrite::Done(ZERO);
    }
    let Const(count) = b else {
        // The processor masks the count itself: `x << (c & 31)` = `x << c`.
        let masked = if e.ty.bits() == 64 { 63 } else { 31 };
        if let Some(Expr { op: Op::And, args: [x, Const(m), _], .. }) = n.def(b)
            && m & masked == masked
        {
            return again(e.op, e.ty, &[a, x]);
        }
        return Rewrite::Keep;
    };
    let count = shift_count(e.ty, count);
    if count == 0 {
        return Rewrite::Done(a);
    }
    if e.op != Op::Sar && count >= e.ty.bits() {
        return Rewrite::Done(ZERO);
    }
    match n.def(a) {
        // (x << j) << k = x << (j + k), and the same for the other shifts, while the sum is a legal
        // count.
        Some(Expr { op, args: [x, Const(inner), _], .. }) if op == e.op => {
            let sum = count + shift_count(e.ty, inner);
            if sum < e.ty.bits() {
                return again(op, e.ty, &[x, Const(u64::from(sum))]);
            }
        }
        // zext(x) >> (bits of x or more) = 0
        Some(Expr { op: Op::Zext(from), .. }) if e.op == Op::Shr && count >= from.bits() => {
            return Rewrite::Done(ZERO);
        }
        _ => {}
    }
    if b == Const(u64::from(count)) {
        Rewrite::Keep
    } else {
        again(e.op, e.ty, &[a, Const(u64::from(count))])
    }
}

fn not(n: &mut Numbering, e: &Expr) -> Rewrite {
    let Some(Expr { op, ty, args: [x, y, _] }) = n.def(e.args[0]) else { return Rewrite::Keep };
    if op == Op::Not {
        return Rewrite::Done(x);
    }
    if e.ty != Ty::I1 {
        return Rewrite::Keep;
    }
    match op {
        Op::Eq => again(Op::Ne, ty, &[x, y]),
        Op::Ne => again(Op::Eq, ty, &[x, y]),
        Op::LtS => again(Op::LeS, ty, &[y, x]),
        Op::LtU => again(Op::LeU, ty, &[y, x]),
        Op::LeS => again(Op::LtS, ty, &[y, x]),
        Op::LeU => again(Op::LtU, ty, &[y, x]),
        Op::Cond(cc) => again(Op::Cond(cc.negate()), ty, &[x]),
        _ => Rewrite::Keep,
    }
}

fn zext(n: &mut Numbering, e: &Expr, from: Ty) -> Rewrite {
    match n.def(e.args[0]) {
        Some(Expr { op: Op::Zext(inner), args: [x, ..], .. }) => again(Op::Zext(inner), e.ty, &[x]),
        // zext(trunc x) = x if the upper bits of x are 0.
        Some(Expr { op: Op::Trunc, args: [Operand::Value(v), ..], .. })
            if n.ty(v) == e.ty && bounds(n, v.into(), e.ty).umax <= from.mask() =>
        {
            Rewrite::Done(v.into())
        }
        _ => Rewrite::Keep,
    }
}

fn trunc(n: &mut Numbering, e: &Expr) -> Rewrite {
    let Operand::Value(v) = e.args[0] else { return Rewrite::Keep };
    if n.ty(v) == e.ty {
        return Rewrite::Done(v.into());
    }
    let Some(Expr { op, args: [x, y, _], .. }) = n.def(v.into()) else { return Rewrite::Keep };
    let bits = e.ty.bits();
    match op {
        Op::Trunc => again(Op::Trunc, e.ty, &[x]),
        Op::Zext(from) | Op::Sext(from) if from == e.ty => Rewrite::Done(x),
        Op::Zext(from) | Op::Sext(from) if from.bits() > bits => again(Op::Trunc, e.ty, &[x]),
        Op::Zext(from) => again(Op::Zext(from), e.ty, &[x]),
        Op::Sext(from) => again(Op::Sext(from), e.ty, &[x]),
        Op::Insert8Low if e.ty == Ty::I8 => Rewrite::Done(y),
        Op::Insert8High if e.ty == Ty::I8 => again(Op::Trunc, e.ty, &[x]),
        Op::Insert16 if e.ty == Ty::I16 => Rewrite::Done(y),
        Op::Insert16 if e.ty == Ty::I8 => again(Op::Trunc, e.ty, &[y]),
        // Reading ah: the second byte of what was inserted, or of what the insertion kept.
        Op::Shr if e.ty == Ty::I8 && y == Const(8) => match n.def(x) {
            Some(Expr { op: Op::Insert8High, args: [_, z, _], .. }) => Rewrite::Done(z),
            Some(Expr { op: Op::Insert8Low, args: [old, ..], .. }) => {
                let shifted = n.build(Op::Shr, Ty::I64, &[old, Const(8)]);
                again(Op::Trunc, e.ty, &[shifted])
            }
            _ => Rewrite::Keep,
        },
        // The low half of a masked value, when the mask keeps it whole.
        Op::And if y.as_const().is_some_and(|c| c & e.ty.mask() == e.ty.mask()) => {
            again(Op::Trunc, e.ty, &[x])
        }
        Op::And | Op::Or | Op::Xor => match (inserted(n, x, e.ty), y) {
            (Some(low), Const(c)) => again(op, e.ty, &[low, Const(c & e.ty.mask())]),
            _ => Rewrite::Keep,
        },
        _ => Rewrite::Keep,
    }
}

/// The low bits of `x`, if they are a part of this type that was inserted into it.
fn inserted(n: &Numbering, mut x: Operand, ty: Ty) -> Option<Operand> {
    loop {
        let Expr { op, args: [y, low, _], .. } = n.def(x)?;
        match op {
            Op::Insert8Low if ty == Ty::I8 => return Some(low),
            Op::Insert16 if ty == Ty::I16 => return Some(low),
            Op::Trunc => x = y,
            Op::Zext(from) | Op::Sext(from) if from.bits() >= ty.bits() => x = y,
            _ => return None,
        }
    }
}

/// Partial register writes: only the last write of each part counts.
fn insert(n: &mut Numbering, e: &Expr) -> Rewrite {
    let [old, new, _] = e.args;
    let replaced: u64 = match e.op {
        Op::Insert8Low => 0xff,
        Op::Insert8High => 0xff00,
        _ => 0xffff,
    };
    if let Const(c) = old
        && c & !replaced == 0
        && e.op != Op::Insert8High
    {
        let from = if e.op == Op::Insert8Low { Ty::I8 } else { Ty::I16 };
        return again(Op::Zext(from), Ty::I64, &[new]);
    }
    match n.def(old) {
        Some(Expr { op, args: [before, ..], .. })
            if op == e.op
                || e.op == Op::Insert16 && matches!(op, Op::Insert8Low | Op::Insert8High) =>
        {
            return again(e.op, Ty::I64, &[before, new]);
        }
        Some(Expr { op: Op::Zext(from), .. })
            if e.op != Op::Insert8High && from.mask() & !replaced == 0 =>
        {
            let from = if e.op == Op::Insert8Low { Ty::I8 } else { Ty::I16 };
            return again(Op::Zext(from), Ty::I64, &[new]);
        }
        _ => {}
    }
    // Writing back the part that is already there.
    match n.def(new) {
        Some(Expr { op: Op::Trunc, args: [x, ..], .. }) if x == old && e.op != Op::Insert8High => {
            Rewrite::Done(old)
        }
        _ => Rewrite::Keep,
    }
}

fn equality(n: &mut Numbering, e: &Expr) -> Rewrite {
    let [a, b, _] = e.args;
    let on_equal = e.op == Op::Eq;
    if a == b {
        return Rewrite::Done(Const(u64::from(on_equal)));
    }
    if let Some(truth) = Bounds::decide(e.op, bounds(n, a, e.ty), bounds(n, b, e.ty)) {
        return Rewrite::Done(Const(u64::from(truth)));
    }
    if e.ty == Ty::I1 {
        return match (b, on_equal) {
            (ZERO, true) | (Const(1), false) => again(Op::Not, Ty::I1, &[a]),
            (Const(_), _) => Rewrite::Done(a),
            _ => Rewrite::Keep,
        };
    }
    let def = n.def(a);
    match (def, b) {
        // x - y == 0 and x ^ y == 0 become x == y; the difference is dead if nothing else uses it.
        (Some(Expr { op: Op::Xor, args: [x, y, _], .. }), ZERO) => again(e.op, e.ty, &[x, y]),
        (Some(Expr { op: Op::Neg, args: [x, ..], .. }), ZERO) => again(e.op, e.ty, &[x, ZERO]),
        (Some(Expr { op: Op::Zext(from), args: [x, ..], .. }), Const(c)) if c <= from.mask() => {
            again(e.op, from, &[x, b])
        }
        (Some(Expr { op: Op::Sext(from), args: [x, ..], .. }), Const(c))
            if fits_signed(from, e.ty, c) =>
        {
            again(e.op, from, &[x, Const(c & from.mask())])
        }
        (Some(first), Operand::Value(_)) => match n.def(b) {
            Some(second)
                if first.op == second.op && matches!(first.op, Op::Zext(_) | Op::Sext(_)) =>
            {
                let (Op::Zext(from) | Op::Sext(from)) = first.op else { return Rewrite::Keep };
                again(e.op, from, &[first.args[0], second.args[0]])
            }
            _ => Rewrite::Keep,
        },
        // A truth value materialised by setcc and tested again: (c ? x : y) == x.
        (Some(Expr { op: Op::Select, args: [c, Const(x), Const(y)], .. }), Const(z)) if x != y => {
            match (z == x, z == y, on_equal) {
                (true, _, true) | (_, true, false) => Rewrite::Done(c),
                (true, _, false) | (_, true, true) => again(Op::Not, Ty::I1, &[c]),
                _ => Rewrite::Done(Const(u64::from(!on_equal))),
            }
        }
        _ => Rewrite::Keep,
    }
}

/// Is `c` (of type `to`) the sign extension of its low part in `from`?
fn fits_signed(from: Ty, to: Ty, c: u64) -> bool {
    from.sext(c & from.mask()) as u64 & to.mask() == c
}

fn order(n: &mut Numbering, e: &Expr) -> Rewrite {
    let [a, b, _] = e.args;
    if a == b {
        return Rewrite::Done(Const(u64::from(matches!(e.op, Op::LeS | Op::LeU))));
    }
    if e.ty == Ty::I1 {
        return Rewrite::Keep;
    }
    if let Some(truth) = Bounds::decide(e.op, bounds(n, a, e.ty), bounds(n, b, e.ty)) {
        return Rewrite::Done(Const(u64::from(truth)));
    }
    match (e.op, a, b) {
        // Unsigned comparisons with the ends of the range are equalities.
        (Op::LtU, _, Const(1)) | (Op::LeU, _, ZERO) => return again(Op::Eq, e.ty, &[a, ZERO]),
        (Op::LtU, ZERO, _) | (Op::LeU, Const(1), _) => return again(Op::Ne, e.ty, &[b, ZERO]),
        _ => {}
    }
    // Compare in the narrow type if both operands are extended from it. Zero-extended values
    // compare unsigned.
    let (narrow_a, narrow_b) = (extended(n, a, e.ty), extended(n, b, e.ty));
    let narrow = match (narrow_a, narrow_b) {
        (Some((op, x)), Some((other, y))) if op == other => Some((op, x, y)),
        (Some((op, x)), None) => constant_in(op, e.ty, b).map(|c| (op, x, c)),
        (None, Some((op, y))) => constant_in(op, e.ty, a).map(|c| (op, c, y)),
        _ => None,
    };
    match narrow {
        Some((Op::Zext(from), x, y)) => {
            let op = match e.op {
                Op::LtS => Op::LtU,
                Op::LeS => Op::LeU,
                other => other,
            };
            again(op, from, &[x, y])
        }
        Some((Op::Sext(from), x, y)) => again(e.op, from, &[x, y]),
        _ => Rewrite::Keep,
    }
}

/// The extension that defines `o`, and its operand.
fn extended(n: &Numbering, o: Operand, ty: Ty) -> Option<(Op, Operand)> {
    match n.def(o) {
        // i1 values are not ordered.
        Some(Expr { op: Op::Zext(Ty::I1) | Op::Sext(Ty::I1), .. }) => None,
        Some(Expr { op: op @ (Op::Zext(_) | Op::Sext(_)), ty: to, args: [x, ..] }) if to == ty => {
            Some((op, x))
        }
        _ => None,
    }
}

/// `o` in the type that `extension` extends to `ty`, if it is a constant in the range of that type.
fn constant_in(extension: Op, ty: Ty, o: Operand) -> Option<Operand> {
    let c = o.as_const()?;
    match extension {
        Op::Zext(from) => (c <= from.mask()).then_some(o),
        Op::Sext(from) => fits_signed(from, ty, c).then_some(Const(c & from.mask())),
        _ => None,
    }
}

fn flags(n: &mut Numbering, e: &Expr, op: FlagOp) -> Rewrite {
    let [a, b, c] = e.args;
    match op {
        // Without a carry in, adc and sbb are add and sub, flags included.
        FlagOp::Adc if c == ZERO => again(Op::Flags(FlagOp::Add), e.ty, &[a, b]),
        FlagOp::Sbb if c == ZERO => again(Op::Flags(FlagOp::Sub), e.ty, &[a, b]),
        // inc and dec read only CF of the old flags, and an earlier inc or dec has kept CF.
        FlagOp::Inc | FlagOp::Dec => match n.def(b) {
            Some(Expr {
                op: Op::Flags(FlagOp::Inc | FlagOp::Dec), args: [_, older, _], ..
            }) => again(e.op, e.ty, &[a, older]),
            _ => Rewrite::Keep,
        },
        FlagOp::Shl | FlagOp::Shr | FlagOp::Sar => match b {
            // A count of zero leaves the flags alone; any other count replaces all of them.
            Const(k) if shift_count(e.ty, k) == 0 => Rewrite::Done(c),
            _ => Rewrite::Keep,
        },
        FlagOp::FromBits => match n.def(a) {
            Some(Expr { op: Op::FlagBits, args: [x, ..], .. }) => Rewrite::Done(x),
            _ => Rewrite::Keep,
        },
        _ => Rewrite::Keep,
    }
}
