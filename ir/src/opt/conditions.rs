//! Rewrites conditions of known flags as comparisons of the operands; most flags then are dead.
//!
//! The rules follow Intel SDM vol. 1, 3.4.3.1 and appendix B. With `r` the result of the operation
//! that set the flags, ZF is `r == 0`, SF is `r < 0` signed, CF is the unsigned carry, and SF != OF
//! is the sign of the *exact* result. A condition that needs PF or OF alone is kept: the emitter
//! reads it from the host's flags.
//!
//! [`super::rules`] calls [`rewrite`] for each `cond`, under the numbering of [`super::simplify`];
//! no data of its own, no lock. Invariant: the comparison is true exactly when the condition is.
//!
//! ```text
//! v8 = flags.sub.i64 v7, 100                  v9 = lt.s.i64 v7, 100
//! v9 = cond.l v8
//! ```

use super::rules::again;
use super::simplify::{Numbering, Rewrite};
use crate::defs::Expr;
use crate::op::{Cond, FlagOp, Op};
use crate::semantics::{ARITH_FLAGS, PF};
use crate::types::{Operand, Ty};
use Operand::Const;

const ZERO: Operand = Const(0);
const FALSE: Rewrite = Rewrite::Done(Const(0));
const TRUE: Rewrite = Rewrite::Done(Const(1));

/// Rewrites `cond.cc flags`.
pub(super) fn rewrite(n: &mut Numbering, cc: Cond, flags: Operand) -> Rewrite {
    let Some(Expr { op: Op::Flags(op), ty, args: [a, b, c] }) = n.def(flags) else {
        return Rewrite::Keep;
    };
    match op {
        FlagOp::Sub => subtraction(n, cc, ty, a, b),
        FlagOp::And => {
            let r = n.build(Op::And, ty, &[a, b]);
            logic(cc, ty, r)
        }
        FlagOp::Or => {
            let r = n.build(Op::Or, ty, &[a, b]);
            logic(cc, ty, r)
        }
        FlagOp::Xor => {
            let r = n.build(Op::Xor, ty, &[a, b]);
            logic(cc, ty, r)
        }
        FlagOp::Add => addition(n, cc, ty, a, b),
        FlagOp::Inc => match cc {
            Cond::B | Cond::Ae => again(Op::Cond(cc), Ty::I64, &[b]),
            _ => signed_sum(n, cc, ty, a, 1),
        },
        FlagOp::Dec => match cc {
            Cond::B | Cond::Ae => again(Op::Cond(cc), Ty::I64, &[b]),
            _ => signed_sum(n, cc, ty, a, ty.mask()),
        },
        FlagOp::Shl | FlagOp::Shr | FlagOp::Sar => shift(n, cc, ty, op, a, b),
        FlagOp::SetCf => match cc {
            Cond::B => Rewrite::Done(b),
            Cond::Ae => again(Op::Not, Ty::I1, &[b]),
            Cond::Be | Cond::A => Rewrite::Keep,
            _ => again(Op::Cond(cc), Ty::I64, &[a]),
        },
        // bt defines only CF; ZF is architecturally kept.
        FlagOp::Bt if matches!(cc, Cond::E | Cond::Ne) => again(Op::Cond(cc), Ty::I64, &[c]),
        // A scan of zero sets ZF; tzcnt and lzcnt of zero set CF; popcnt of zero sets ZF.
        FlagOp::Bsf | FlagOp::Bsr | FlagOp::Popcnt => zero_test(cc, Cond::E, Cond::Ne, ty, a),
        FlagOp::Tzcnt | FlagOp::Lzcnt => zero_test(cc, Cond::B, Cond::Ae, ty, a),
        FlagOp::Adc | FlagOp::Sbb | FlagOp::Rol | FlagOp::Ror | FlagOp::MulS | FlagOp::MulU => {
            Rewrite::Keep
        }
        // The bits of other flags with PF removed (andn on Intel's processors): any condition but
        // PF reads the other flags.
        FlagOp::FromBits if !matches!(cc, Cond::P | Cond::Np) => match n.def(a) {
            Some(Expr { op: Op::And, args: [bits, Const(kept), _], .. })
                if kept | PF == ARITH_FLAGS =>
            {
                match n.def(bits) {
                    Some(Expr { op: Op::FlagBits, args: [flags, ..], .. }) => {
                        again(Op::Cond(cc), Ty::I64, &[flags])
                    }
                    _ => Rewrite::Keep,
                }
            }
            _ => Rewrite::Keep,
        },
        FlagOp::Bt | FlagOp::FromBits => Rewrite::Keep,
    }
}

fn zero_test(cc: Cond, zero: Cond, nonzero: Cond, ty: Ty, a: Operand) -> Rewrite {
    match cc {
        _ if cc == zero => again(Op::Eq, ty, &[a, ZERO]),
        _ if cc == nonzero => again(Op::Ne, ty, &[a, ZERO]),
        _ => Rewrite::Keep,
    }
}

/// `cmp a, b` and `sub a, b`.
fn subtraction(n: &mut Numbering, cc: Cond, ty: Ty, a: Operand, b: Operand) -> Rewrite {
    // If the difference is computed anyway, testing it lets `a` die (a counter that runs to zero).
    let difference = match b {
        Const(c) => n.computed(Op::Add, ty, &[a, Const(c.wrapping_neg() & ty.mask())]),
        Operand::Value(_) => n.computed(Op::Sub, ty, &[a, b]),
    };
    match (cc, difference) {
        (Cond::E, Some(r)) if b != ZERO => return again(Op::Eq, ty, &[r, ZERO]),
        (Cond::Ne, Some(r)) if b != ZERO => return again(Op::Ne, ty, &[r, ZERO]),
        _ => {}
    }
    match cc {
        Cond::E => again(Op::Eq, ty, &[a, b]),
        Cond::Ne => again(Op::Ne, ty, &[a, b]),
        Cond::B => again(Op::LtU, ty, &[a, b]),
        Cond::Ae => again(Op::LeU, ty, &[b, a]),
        Cond::Be => again(Op::LeU, ty, &[a, b]),
        Cond::A => again(Op::LtU, ty, &[b, a]),
        Cond::L => again(Op::LtS, ty, &[a, b]),
        Cond::Ge => again(Op::LeS, ty, &[b, a]),
        Cond::Le => again(Op::LeS, ty, &[a, b]),
        Cond::G => again(Op::LtS, ty, &[b, a]),
        Cond::S | Cond::Ns => {
            let r = n.build(Op::Sub, ty, &[a, b]);
            sign(cc, ty, r)
        }
        Cond::O | Cond::No if b == ZERO => {
            if cc == Cond::O {
                FALSE
            } else {
                TRUE
            }
        }
        Cond::O | Cond::No | Cond::P | Cond::Np => Rewrite::Keep,
    }
}

fn sign(cc: Cond, ty: Ty, r: Operand) -> Rewrite {
    if cc == Cond::S { again(Op::LtS, ty, &[r, ZERO]) } else { again(Op::LeS, ty, &[ZERO, r]) }
}

/// The conditions of a result with CF = OF = 0: and, or, xor, test.
fn logic(cc: Cond, ty: Ty, r: Operand) -> Rewrite {
    match cc {
        Cond::O | Cond::B => FALSE,
        Cond::No | Cond::Ae => TRUE,
        Cond::E | Cond::Be => again(Op::Eq, ty, &[r, ZERO]),
        Cond::Ne | Cond::A => again(Op::Ne, ty, &[r, ZERO]),
        Cond::S | Cond::L => again(Op::LtS, ty, &[r, ZERO]),
        Cond::Ns | Cond::Ge => again(Op::LeS, ty, &[ZERO, r]),
        Cond::Le => again(Op::LeS, ty, &[r, ZERO]),
        Cond::G => again(Op::LtS, ty, &[ZERO, r]),
        Cond::P | Cond::Np => Rewrite::Keep,
    }
}

fn addition(n: &mut Numbering, cc: Cond, ty: Ty, a: Operand, b: Operand) -> Rewrite {
    match cc {
        Cond::B => {
            let r = n.build(Op::Add, ty, &[a, b]);
            again(Op::LtU, ty, &[r, a])
        }
        Cond::Ae => {
            let r = n.build(Op::Add, ty, &[a, b]);
            again(Op::LeU, ty, &[a, r])
        }
        _ => match b {
            Const(c) => signed_sum(n, cc, ty, a, c),
            Operand::Value(_) => match cc {
                Cond::E | Cond::Ne | Cond::S | Cond::Ns => {
                    let r = n.build(Op::Add, ty, &[a, b]);
                    result_test(cc, ty, r)
                }
                _ => Rewrite::Keep,
            },
        },
    }
}

/// Conditions of `a + c` that do not read CF.
fn signed_sum(n: &mut Numbering, cc: Cond, ty: Ty, a: Operand, c: u64) -> Rewrite {
    let negated = c.wrapping_neg() & ty.mask();
    match cc {
        Cond::E | Cond::Ne | Cond::S | Cond::Ns => {
            let r = n.build(Op::Add, ty, &[a, Const(c)]);
            result_test(cc, ty, r)
        }
        // The exact a + c < 0 is a < -c, if -c is representable.
        _ if ty.sext(negated) == ty.sext(c).wrapping_neg() && c != negated => match cc {
            Cond::L => again(Op::LtS, ty, &[a, Const(negated)]),
            Cond::Ge => again(Op::LeS, ty, &[Const(negated), a]),
            Cond::Le => again(Op::LeS, ty, &[a, Const(negated)]),
            Cond::G => again(Op::LtS, ty, &[Const(negated), a]),
            _ => Rewrite::Keep,
        },
        _ => Rewrite::Keep,
    }
}

fn result_test(cc: Cond, ty: Ty, r: Operand) -> Rewrite {
    match cc {
        Cond::E => again(Op::Eq, ty, &[r, ZERO]),
        Cond::Ne => again(Op::Ne, ty, &[r, ZERO]),
        Cond::S | Cond::Ns => sign(cc, ty, r),
        _ => Rewrite::Keep,
    }
}

/// Shifts by a known count other than zero set ZF and SF from the result.
fn shift(n: &mut Numbering, cc: Cond, ty: Ty, op: FlagOp, a: Operand, count: Operand) -> Rewrite {
    let Const(k) = count else { return Rewrite::Keep };
    if k & (if ty.bits() == 64 { 63 } else { 31 }) == 0
        || !matches!(cc, Cond::E | Cond::Ne | Cond::S | Cond::Ns)
    {
        return Rewrite::Keep;
    }
    let shift = match op {
        FlagOp::Shl => Op::Shl,
        FlagOp::Shr => Op::Shr,
        _ => Op::Sar,
    };
    let r = n.build(shift, ty, &[a, count]);
    result_test(cc, ty, r)
}
