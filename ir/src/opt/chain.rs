//! Chains of one operation around a loop, regrouped so that what comes last enters last.
//!
//! A loop can go round no faster than the chain of operations that leads from a parameter to its next value. Where that value
//! is `late ∘ soon`, and the next iteration begins with `value ∘ other`, the iteration waits for two operations after `late`.
//! They are associative, so one is enough: `late ∘ (soon ∘ other)`, for which both parts are passed around the loop. The
//! parameter stays for whatever else needs it: exits, mostly.
//!
//! ```text
//! b0: … jump b1(v0)                           b0: … jump b1(v0, v0, 0)
//! b1(v1): v2 = xor.i32 v1, v9                 b1(v1, v6, v7): v8 = xor.i32 v7, v9; v2 = xor.i32 v6, v8
//!     v3 = load.i32 [… v2 …]                      v3 = load.i32 [… v2 …]
//!     v4 = shr.i32 v1, 8                          v4 = shr.i32 v1, 8
//!     v5 = xor.i32 v3, v4                         v5 = xor.i32 v3, v4
//!     … jump b1(v5)                               … jump b1(v5, v3, v4)
//! ```
//!
//! It costs an operation and up to two registers, so it is done only where the loop waits for the chain: where processors could
//! execute all of the loop's instructions meanwhile.

use super::OptOptions;
use super::shape::{BODY, ENTRY, Shape, normalise};
use crate::op::Op;
use crate::types::{Operand, Value};
use crate::version::{Inst, Term, Version};
use smallvec::SmallVec;

/// So many chains of a loop are looked at; each makes two parameters.
const MOST: usize = 2;

/// Runs the pass; returns how many chains it regrouped.
pub(super) fn run(version: &mut Version, options: &OptOptions) -> usize {
    if normalise(version) != Some(Shape::Loop) {
        return 0;
    }
    let mut regrouped = 0;
    while regrouped < MOST
        && let Some(chain) = (0..version.blocks[BODY].params.len()).find_map(|param| find(version, param, options))
    {
        regroup(version, &chain);
        regrouped += 1;
    }
    regrouped
}

/// A parameter whose next value is `late ∘ soon`, and the instruction `parameter ∘ other` on which `late` depends.
struct Chain {
    param: usize,
    late: Operand,
    soon: Operand,
    first: usize,
    other: Operand,
}

/// May operands of this operation be regrouped? If so, what leaves its other operand as it is?
fn neutral(op: Op) -> Option<u64> {
    match op {
        Op::Add | Op::Xor | Op::Or => Some(0),
        _ => None,
    }
}

/// How long a result lets wait, in cycles.
fn latency(op: Op) -> u32 {
    match op {
        Op::Load => 4,
        Op::Mul => 3,
        Op::Trunc => 0,
        _ => 1,
    }
}

fn find(version: &Version, param: usize, options: &OptOptions) -> Option<Chain> {
    let body = &version.blocks[BODY];
    let Term::Jump { args, .. } = &body.term else { return None };
    let (value, next) = (Operand::Value(body.params[param]), args[param].as_value()?);
    let last = body.insts.iter().find(|i| i.def() == Some(next)).filter(|i| neutral(i.op).is_some())?;
    let waits = |from: Value, since: usize| {
        let mut ready: Vec<Option<u32>> = vec![None; version.types.len()];
        ready[from.index()] = Some(0);
        for inst in &body.insts[since..] {
            let args = inst.args.iter().filter_map(|a| ready[a.as_value()?.index()]).max();
            let done = args.map(|at| at + latency(inst.op));
            inst.defs.iter().for_each(|d| ready[d.index()] = done);
        }
        move |o: Operand| o.as_value().and_then(|v| ready[v.index()])
    };
    let after_param = waits(body.params[param], 0);
    let whole = after_param(next.into())?;
    if (whole as usize).saturating_mul(options.chain_width) < body.insts.len() {
        return None;
    }
    let (a, b) = (last.args[0], last.args[1]);
    let (late, soon) = if after_param(a) > after_param(b) { (a, b) } else { (b, a) };
    if after_param(soon) == after_param(late) {
        return None;
    }
    body.insts.iter().enumerate().find_map(|(first, inst)| {
        let same = inst.op == last.op && inst.ty == last.ty && inst.args.contains(&value);
        let other = same.then(|| if inst.args[0] == value { inst.args[1] } else { inst.args[0] })?;
        let leads_to_late = waits(inst.def()?, first + 1)(late).is_some();
        (after_param(other).is_none() && leads_to_late).then_some(Chain { param, late, soon, first, other })
    })
}

fn regroup(version: &mut Version, chain: &Chain) {
    let inst = version.blocks[BODY].insts[chain.first].clone();
    let neutral = Operand::Const(neutral(inst.op).expect("its operation is that of a chain"));
    let (late, soon, both) = (version.value(inst.ty), version.value(inst.ty), version.value(inst.ty));
    version.blocks[BODY].params.extend([late, soon]);
    for block in [ENTRY, BODY] {
        let Term::Jump { args, .. } = &mut version.blocks[block].term else { unreachable!("a loop's blocks jump") };
        let parts = if block == ENTRY { [args[chain.param], neutral] } else { [chain.late, chain.soon] };
        args.extend(parts);
    }
    let insts = &mut version.blocks[BODY].insts;
    insts[chain.first].args = SmallVec::from_slice(&[late.into(), both.into()]);
    insts.insert(chain.first, Inst::new(inst.op, inst.ty, Some(both), &[soon.into(), chain.other]));
}
