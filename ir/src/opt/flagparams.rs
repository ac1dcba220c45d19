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
use super::shape::{BODY, ENTRY, Shape, normalise};
use crate::defs::{Defs, Expr};
use crate::op::{ArgTy, Op};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{Operand, Ty, Value};
use crate::version::{Inst, Term, Version};

/// Runs the pass; returns the number of parameters replaced.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if normalise(version) != Some(Shape::Loop) {
        return 0;
    }
    let mut replaced = 0;
    // One parameter in each round, because one may be the operand of another. Flags may carry older
    // flags (dec keeps CF), so replacing a parameter can make a new one; eight rounds are a guess
    // that bounds this.
    for _ in 0..8 {
        let now = round(version);
        replaced += now;
        if now == 0 {
            break;
        }
    }
    replaced
}

fn args(version: &Version, block: usize) -> &[Operand] {
    match &version.blocks[block].term {
        Term::Jump { args, .. } => args,
        Term::Branch { .. } | Term::Exit(_) | Term::Guest(_) => &[],
    }
}

fn round(version: &mut Version) -> usize {
    let defs = Defs::of(version);
    let candidates = unneeded(version, &defs);
    let mut keep = vec![true; version.blocks[BODY].params.len()];
    let mut rebuilt = Vec::new();
    if let Some(&i) = candidates.first() {
        let (entry, back) = (args(version, ENTRY)[i], args(version, BODY)[i]);
        let (Some(first), Some(second)) = (defs.get(entry), defs.get(back)) else { return 0 };
        let param = version.blocks[BODY].params[i];
        let args = operands(version, &first, &second);
        rebuilt.push(Inst::new(first.op, first.ty, Some(param), &args));
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
fn unneeded(version: &Version, defs: &Defs) -> Vec<usize> {
    let body = &version.blocks[BODY];
    let same_op =
        |i: usize| match (defs.get(args(version, ENTRY)[i]), defs.get(args(version, BODY)[i])) {
            (Some(a), Some(b)) => {
                let same = a.op == b.op && a.ty == b.ty;
                // Side condition off (in tests): still require one arity and the same types,
                // so that the result can be printed and run.
                matches!(a.op, Op::Flags(_))
                    && a.op.signature() == b.op.signature()
                    && holds(SideCondition::FlagsSameOperation, same)
            }
            _ => false,
        };
    let mut candidates: Vec<usize> = (0..body.params.len())
        .filter(|i| version.ty(body.params[*i]) == Ty::Flags && same_op(*i))
        .collect();
    // A needed parameter makes its arguments needed, and these may need another parameter.
    while !candidates.is_empty() {
        let mut needed = vec![false; version.types.len()];
        let mut need = |o: &Operand| {
            if let Operand::Value(v) = o {
                needed[v.index()] = true;
            }
        };
        let others =
            args(version, BODY).iter().enumerate().filter(|(i, _)| !candidates.contains(i));
        others.for_each(|(_, o)| need(o));
        body.insts.iter().filter(|i| !i.op.is_pure()).flat_map(|i| &i.args).for_each(need);
        for inst in body.insts.iter().rev().filter(|i| i.op.is_pure()) {
            if inst.defs.iter().any(|d| needed[d.index()]) {
                inst.args
                    .iter()
                    .filter_map(|a| a.as_value())
                    .for_each(|v| needed[v.index()] = true);
            }
        }
        let before = candidates.len();
        candidates.retain(|i| !needed[body.params[*i].index()]);
        if candidates.len() == before {
            break;
        }
    }
    candidates
}

/// The operands at the loop's head: an operand that both edges share, an existing parameter that is
/// passed these two operands, or a new parameter.
fn operands(version: &mut Version, entry: &Expr, back: &Expr) -> Vec<Operand> {
    let types: Vec<Ty> = entry
        .op
        .signature()
        .0
        .iter()
        .map(|a| match a {
            ArgTy::Same => entry.ty,
            ArgTy::Is(ty) => *ty,
        })
        .collect();
    let mut out = Vec::new();
    for (k, ty) in types.into_iter().enumerate() {
        let (e, b) = (entry.args[k], back.args[k]);
        // An operand that is equal on both edges is a constant or defined in the entry block: a
        // value of the body is not available at the end of the entry.
        if e == b {
            out.push(e);
            continue;
        }
        let pairs = args(version, ENTRY).iter().zip(args(version, BODY));
        let position = pairs
            .zip(&version.blocks[BODY].params)
            .find(|((x, y), p)| **x == e && **y == b && version.ty(**p) == ty);
        let param = match position {
            Some((_, param)) => *param,
            None => add_param(version, ty, e, b),
        };
        out.push(param.into());
    }
    out
}

fn add_param(version: &mut Version, ty: Ty, entry: Operand, back: Operand) -> Value {
    let param = version.value(ty);
    version.blocks[BODY].params.push(param);
    for (block, arg) in [(ENTRY, entry), (BODY, back)] {
        if let Term::Jump { args, .. } = &mut version.blocks[block].term {
            args.push(arg);
        }
    }
    param
}
