//! Pass `flagparams`: loop-carried flags become loop-carried operands.
//!
//! Every iteration leaves flags which the varmaps of the next iteration's first anchors name. So
//! the flags are a parameter of the loop block, although only exits read them. Kept as data they
//! would have to be materialised in every iteration. If all edges pass the flags of the *same
//! operation*, the pass passes its operands instead and repeats the operation at the loop's head.
//! Only exits use it there, so the emitter moves it into their cold code (sourir 4.1: a value that
//! can be recomputed on deoptimisation is not kept alive for it).
//!
//! ```text
//! b0: … jump b1(v5, flags.sub v5, 100)       b0: … jump b1(v5)
//! b1(v7, v8: flags): poll !a0 [rflags = v8]  b1(v7): v8 = flags.sub v7, 100; poll !a0 …
//!     … jump b1(v9, flags.sub v9, 100)            … jump b1(v9)
//! ```
//!
//! Flags that something other than varmaps reads in the loop stay a parameter: the first *machine*
//! instruction of the head must remain the poll. The version is a loop ([`super::shape`]) that the
//! caller owns; no data between runs, no lock. The pass runs last, because simplifying the head
//! again would undo it.

use super::OptOptions;
use super::shape::{BODY, Shape, normalise};
use super::tree::{add_args, args, to_head};
use crate::defs::{Defs, Expr};
use crate::op::{ArgTy, Op};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{Operand, Ty};
use crate::version::{Inst, Term, Version};
use smallvec::SmallVec;

/// Runs the pass; returns the number of parameters replaced.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if !matches!(normalise(version), Some(Shape::Loop | Shape::Tree)) {
        return 0;
    }
    let from = to_head(version);
    let mut replaced = 0;
    // One parameter in each round, because one may be the operand of another. Flags may carry older
    // flags (dec keeps CF), so replacing a parameter can make a new one; eight rounds are a guess
    // that bounds this.
    for _ in 0..8 {
        let now = round(version, &from);
        replaced += now;
        if now == 0 {
            break;
        }
    }
    replaced
}

/// The argument of a parameter on each way to the loop's head.
fn passed(version: &Version, from: &[usize], param: usize) -> SmallVec<[Operand; 2]> {
    from.iter().map(|block| args(version, *block)[param]).collect()
}

fn round(version: &mut Version, from: &[usize]) -> usize {
    let defs = Defs::of(version);
    let candidates = unneeded(version, &defs, from);
    let mut keep = vec![true; version.blocks[BODY].params.len()];
    let mut rebuilt = Vec::new();
    if let Some(&i) = candidates.first() {
        let exprs: Option<Vec<Expr>> =
            passed(version, from, i).into_iter().map(|o| defs.get(o)).collect();
        let Some(exprs) = exprs else { return 0 };
        let param = version.blocks[BODY].params[i];
        let args = operands(version, from, &exprs);
        rebuilt.push(Inst::new(exprs[0].op, exprs[0].ty, Some(param), &args));
        keep[i] = false;
    }
    let count = rebuilt.len();
    if count > 0 {
        // Parameters added in this round stay.
        keep.resize(version.blocks[BODY].params.len(), true);
        super::params::drop_params(version, BODY, &keep);
        version.blocks[BODY].insts.splice(0..0, rebuilt);
    }
    count
}

/// The positions of the flags parameters that can be replaced and that no hot instruction reads.
fn unneeded(version: &Version, defs: &Defs, from: &[usize]) -> Vec<usize> {
    let head = &version.blocks[BODY];
    let same_op = |i: usize| {
        let exprs: Option<SmallVec<[Expr; 2]>> =
            passed(version, from, i).into_iter().map(|o| defs.get(o)).collect();
        let Some(exprs) = exprs else { return false };
        exprs.windows(2).all(|pair| {
            let (a, b) = (pair[0], pair[1]);
            let same = a.op == b.op && a.ty == b.ty;
            // Side condition off (in tests): still require one arity and the same types,
            // so that the result can be printed and run.
            matches!(a.op, Op::Flags(_))
                && a.op.signature() == b.op.signature()
                && holds(SideCondition::FlagsSameOperation, same)
        })
    };
    let mut candidates: Vec<usize> = (0..head.params.len())
        .filter(|i| version.ty(head.params[*i]) == Ty::Flags && same_op(*i))
        .collect();
    // A needed parameter makes its arguments needed, and these may need another parameter.
    while !candidates.is_empty() {
        let mut needed = vec![false; version.types.len()];
        let mut need = |o: &Operand| {
            if let Operand::Value(v) = o {
                needed[v.index()] = true;
            }
        };
        for leaf in &from[1..] {
            let others = args(version, *leaf).iter().enumerate();
            others.filter(|(i, _)| !candidates.contains(i)).for_each(|(_, o)| need(o));
        }
        for body in &version.blocks[BODY..] {
            body.insts.iter().filter(|i| !i.op.is_pure()).flat_map(|i| &i.args).for_each(&mut need);
            if let Term::Branch { cond, .. } = &body.term {
                need(cond);
            }
        }
        let insts = version.blocks[BODY..].iter().rev().flat_map(|body| body.insts.iter().rev());
        for inst in insts.filter(|i| i.op.is_pure()) {
            if inst.defs.iter().any(|d| needed[d.index()]) {
                inst.args
                    .iter()
                    .filter_map(|a| a.as_value())
                    .for_each(|v| needed[v.index()] = true);
            }
        }
        let before = candidates.len();
        candidates.retain(|i| !needed[head.params[*i].index()]);
        if candidates.len() == before {
            break;
        }
    }
    candidates
}

/// The operands at the loop's head: an operand that all edges share, an existing parameter that is
/// passed these operands, or a new parameter. `exprs` are the flags on each edge.
fn operands(version: &mut Version, from: &[usize], exprs: &[Expr]) -> Vec<Operand> {
    let (op, same) = (exprs[0].op, exprs[0].ty);
    let types = op.signature().0.iter().map(|a| match a {
        ArgTy::Same => same,
        ArgTy::Is(ty) => *ty,
    });
    let mut out = Vec::new();
    for (k, ty) in types.enumerate() {
        let wanted: SmallVec<[Operand; 2]> = exprs.iter().map(|e| e.args[k]).collect();
        // An operand that is equal on all edges is a constant or defined in the entry block: a
        // value of the body is not available at the end of the entry.
        if wanted.iter().all(|o| *o == wanted[0]) {
            out.push(wanted[0]);
            continue;
        }
        let mut params = version.blocks[BODY].params.iter().enumerate();
        let existing = params
            .find(|(i, p)| version.ty(**p) == ty && passed(version, from, *i) == wanted)
            .map(|(_, p)| *p);
        let param = existing.unwrap_or_else(|| {
            let param = version.value(ty);
            version.blocks[BODY].params.push(param);
            add_args(version, from, wanted);
            param
        });
        out.push(param.into());
    }
    out
}
