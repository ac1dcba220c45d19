//! Pass `conjoin`: adjacent guards that fall back to the same anchor become one guard of both
//! predicates.
//!
//! ```text
//! assume eq.i64 v1, 0 else a0     v3 = or.i64 v1, v2
//! assume eq.i64 v2, 0 else a0     assume eq.i64 v3, 0 else a0      equalities share one test
//!
//! v5 = lt.u.i64 v1, v4            v5 = lt.u.i64 v1, v4
//! v6 = ne.i64 v2, 0               v6 = ne.i64 v2, 0
//! assume v5 else a0               v7 = and.i1 v5, v6
//! assume v6 else a0               assume v7 else a0                any other predicates: their and
//! ```
//!
//! The anchor leaves in the same state whichever of them failed. Counts of failed guards and side
//! traces do see a difference: both now belong to one exit. `delay` runs before this pass and makes
//! guards adjacent.
//!
//! Side condition: the anchor is the same. No instruction stands between the two guards,
//! so the first may be checked where the second stands. The caller owns the version; no data
//! between runs, no lock.

use super::OptOptions;
use crate::defs::{Defs, Expr};
use crate::op::Op;
use crate::side_conditions::{SideCondition, holds};
use crate::types::{Operand, Ty};
use crate::version::{Inst, Version};

/// Runs the pass; returns the number of assumes removed.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if version.is_base() {
        return 0;
    }
    let mut defs = Defs::of(version);
    let mut gone = 0;
    for block in 0..version.blocks.len() {
        let insts = std::mem::take(&mut version.blocks[block].insts);
        let mut out: Vec<Inst> = Vec::with_capacity(insts.len());
        for mut inst in insts {
            let joins = |before: &Inst| {
                before.op == Op::Assume
                    && inst.op == Op::Assume
                    && holds(SideCondition::ConjoinAnchor, before.anchor == inst.anchor)
            };
            if let Some(mut before) = out.pop_if(|before| joins(before)) {
                inst.args[0] =
                    conjunction(version, &mut defs, &mut out, before.args[0], inst.args[0]);
                before.origins.join(&inst.origins);
                inst.origins = before.origins;
                gone += 1;
            }
            out.push(inst);
        }
        version.blocks[block].insts = out;
    }
    gone
}

/// Appends the computation of `p` and `q`.
fn conjunction(
    version: &mut Version,
    defs: &mut Defs,
    out: &mut Vec<Inst>,
    p: Operand,
    q: Operand,
) -> Operand {
    let (first, second) = (defs.get(p), defs.get(q));
    let mut emit = |op: Op, ty: Ty, result: Ty, args: &[Operand]| -> Operand {
        let value = version.value(result);
        let inst = Inst::new(op, ty, Some(value), args);
        defs.note(&inst);
        out.push(inst);
        value.into()
    };
    match (first, second) {
        (
            Some(Expr { op: Op::Eq, ty, args: [a, b, _] }),
            Some(Expr { op: Op::Eq, ty: other, args: [c, d, _] }),
        ) if ty == other && ty.is_machine_int() => {
            let mut difference = |x: Operand, y: Operand| match y {
                Operand::Const(0) => x,
                _ => emit(Op::Xor, ty, ty, &[x, y]),
            };
            let differences = [difference(a, b), difference(c, d)];
            let either = emit(Op::Or, ty, ty, &differences);
            emit(Op::Eq, ty, Ty::I1, &[either, Operand::Const(0)])
        }
        _ => emit(Op::And, Ty::I1, Ty::I1, &[p, q]),
    }
}
