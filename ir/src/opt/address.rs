//! Folds address arithmetic into the x86 memory operand `[base + index*scale + disp]`.
//!
//! [`super::simplify`] calls [`fold`] on each load, store and deferred store that it walks over,
//! under its own numbering; no other data, no lock. Invariants: the address that the operand
//! computes does not change, modulo 2^64, and the displacement fits the sign-extended 32 bits that
//! an instruction can encode as long as a base or an index remains.
//!
//! ```text
//! v1 = add.i64 v0, 8
//! v2 = shl.i64 v9, 2
//! load.i32 [v1 + v2*1]                        load.i32 [v0 + v9*4 + 8]
//! ```

use super::simplify::Numbering;
use crate::defs::Expr;
use crate::op::Op;
use crate::types::Operand;
use crate::version::Mem;
use Operand::Const;

const NONE: Operand = Const(0);

/// Folds definitions of `base` and `index` into `mem`. Returns whether anything changed.
pub(super) fn fold(n: &Numbering, mem: &mut Mem, base: &mut Operand, index: &mut Operand) -> bool {
    let mut changed = false;
    // Each round removes an addition or a shift from the operands. Eight rounds (guess) are more
    // than a compiler's address has; a longer chain is folded in part.
    for _ in 0..8 {
        if !round(n, mem, base, index) {
            break;
        }
        changed = true;
    }
    changed
}

fn round(n: &Numbering, mem: &mut Mem, base: &mut Operand, index: &mut Operand) -> bool {
    if let Const(c) = *index
        && c != 0
    {
        let disp = mem.disp.wrapping_add((c as i64).wrapping_mul(i64::from(mem.scale)));
        if encodable(disp) || base.as_const().is_some() {
            (mem.disp, *index, mem.scale) = (disp, NONE, 1);
            return true;
        }
    }
    if *index == NONE && mem.scale != 1 {
        mem.scale = 1;
        return true;
    }
    if let Const(c) = *base
        && c != 0
    {
        let disp = mem.disp.wrapping_add(c as i64);
        if encodable(disp) || *index == NONE {
            (mem.disp, *base) = (disp, NONE);
            return true;
        }
    }
    // An index alone is made the base; twice an index becomes base plus index.
    if *base == NONE && *index != NONE && mem.scale <= 2 {
        if mem.scale == 1 {
            (*base, *index) = (*index, NONE);
        } else {
            (*base, mem.scale) = (*index, 1);
        }
        return true;
    }
    match n.def(*base) {
        Some(Expr { op: Op::Add, args: [x, Const(c), _], .. }) => {
            let disp = mem.disp.wrapping_add(c as i64);
            if encodable(disp) {
                (mem.disp, *base) = (disp, x);
                return true;
            }
        }
        Some(Expr { op: Op::Add, args: [x, y, _], .. }) if *index == NONE => {
            (*base, *index, mem.scale) = (x, y, 1);
            return true;
        }
        Some(Expr { op: Op::Shl, args: [x, Const(k @ 1..=3), _], .. }) if *index == NONE => {
            (*base, *index, mem.scale) = (NONE, x, 1 << k);
            return true;
        }
        // The base is the shifted operand of base + index*1: exchange them.
        Some(Expr { op: Op::Shl, args: [x, Const(k @ 1..=3), _], .. }) if mem.scale == 1 => {
            (*base, *index, mem.scale) = (*index, x, 1 << k);
            return true;
        }
        _ => {}
    }
    match n.def(*index) {
        Some(Expr { op: Op::Add, args: [x, Const(c), _], .. }) => {
            let disp = mem.disp.wrapping_add((c as i64).wrapping_mul(i64::from(mem.scale)));
            if encodable(disp) {
                (mem.disp, *index) = (disp, x);
                return true;
            }
        }
        Some(Expr { op: Op::Shl, args: [x, Const(k @ 1..=3), _], .. }) if mem.scale << k <= 8 => {
            (*index, mem.scale) = (x, mem.scale << k);
            return true;
        }
        _ => {}
    }
    false
}

/// Does it fit the sign-extended 32-bit displacement?
fn encodable(disp: i64) -> bool {
    i32::try_from(disp).is_ok()
}
