//! Loop-carried flags become loop-carried operands.
//!
//! Every iteration leaves flags behind that the varmaps of the next iteration's first anchors name, so the flags are
//! a parameter of the loop block, although hardly anybody looks. Kept as data they would have to be materialised on
//! every iteration. If all edges pass the flags of the *same operation*, its operands are passed instead and the
//! operation is repeated at the loop's head, where only exits use it and the emitter moves it into their cold code
//! (sourir 4.1: what can be recomputed on deoptimisation is not kept alive for it).
//!
//! ```text
//! b0: … jump b1(v5, flags.sub v5, 100)        b0: … jump b1(v5)
//! b1(v7, v8: flags): poll !a0 [rflags = v8]   b1(v7): v8 = flags.sub v7, 100; poll !a0 [rflags = v8]
//!     … jump b1(v9, flags.sub v9, 100)             … jump b1(v9)
//! ```
//!
//! Flags that something besides varmaps needs in the loop stay a parameter: the head's first *machine* instruction
//! must remain the poll.

use super::OptOptions;
use super::shape::{BODY, ENTRY, Shape, normalise};
use super::side::{Side, holds};
use crate::defs::{Defs, Expr};
use crate::op::{ArgTy, Op};
use crate::types::{Operand, Ty, Value};
use crate::version::{Inst, Term, Version};

/// Runs the pass; returns how many parameters it replaced.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if normalise(version) != Some(Shape::Loop) {
        return 0;
    }
    let mut replaced = 0;
    // One parameter a round, as one may be the operand of another, and flags may carry older flags with them (dec
    // keeps CF), so that replacing a parameter can make a new one.
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
        // Parameters added meanwhile stay.
        keep.resize(version.blocks[BODY].params.len(), true);
        super::params::drop_params(version, BODY, &keep);
        version.blocks[BODY].insts.splice(0..0, rebuilt);
    }
    count
}

/// The positions of the flags parameters that could be replaced and that no hot instruction needs.
fn unneeded(version: &Version, defs: &Defs) -> Vec<usize> {
    let body = &version.blocks[BODY];
    let same_op = |i: usize| match (defs.get(args(version, ENTRY)[i]), defs.get(args(version, BODY)[i])) {
        (Some(a), Some(b)) => {
            let same = a.op == b.op && a.ty == b.ty;
            // Without the condition still of one arity and of the same types, so that what is made can be printed and run.
            matches!(a.op, Op::Flags(_))
                && a.op.signature() == b.op.signature()
                && holds(Side::FlagsSameOperation, same)
        }
        _ => false,
    };
    let mut candidates: Vec<usize> =
        (0..body.params.len()).filter(|i| version.ty(body.params[*i]) == Ty::Flags && same_op(*i)).collect();
    // A parameter that is needed makes what it is passed needed, which may need another one.
    while !candidates.is_empty() {
        let mut needed = vec![false; version.types.len()];
        let mut need = |o: &Operand| {
            if let Operand::Value(v) = o {
                needed[v.index()] = true;
            }
        };
        let others = args(version, BODY).iter().enumerate().filter(|(i, _)| !candidates.contains(i));
        others.for_each(|(_, o)| need(o));
        body.insts.iter().filter(|i| !i.op.is_pure()).flat_map(|i| &i.args).for_each(need);
        for inst in body.insts.iter().rev().filter(|i| i.op.is_pure()) {
            if inst.defs.iter().any(|d| needed[d.index()]) {
                inst.args.iter().filter_map(|a| a.as_value()).for_each(|v| needed[v.index()] = true);
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

/// The operands for the loop's head: what both edges agree on, an existing parameter that is passed just these
/// two, or a new parameter.
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
        // Equal on both edges means defined in the entry block or constant: a value of the body cannot be
        // available at the end of the entry.
        if e == b {
            out.push(e);
            continue;
        }
        let pairs = args(version, ENTRY).iter().zip(args(version, BODY));
        let position =
            pairs.zip(&version.blocks[BODY].params).find(|((x, y), p)| **x == e && **y == b && version.ty(**p) == ty);
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
