//! Pass `chain`: regroups an associative operation around a loop so that the operand that is ready
//! last is used last.
//!
//! A loop cannot run faster than its longest chain of operations from a parameter to the
//! parameter's next value. Suppose that the next value is `late ∘ soon`, where `late` is ready
//! last, and that the next iteration begins with `value ∘ other`. Then two operations follow `late`
//! before the iteration can go on. The operation is associative, so one is enough: `late ∘ (soon ∘
//! other)`. For this, `late` and `soon` both are passed around the loop. The parameter itself
//! remains for its other uses, mostly exits.
//!
//! ```text
//! b0: … jump b1(v0)                       b0: … jump b1(v0, v0, 0)
//! b1(v1): v2 = xor.i32 v1, v9             b1(v1, v6, v7): v8 = xor.i32 v7, v9; v2 = xor.i32 v6, v8
//!     v3 = load.i32 [… v2 …]                  v3 = load.i32 [… v2 …]
//!     v4 = shr.i32 v1, 8                      v4 = shr.i32 v1, 8
//!     v5 = xor.i32 v3, v4                     v5 = xor.i32 v3, v4
//!     … jump b1(v5)                           … jump b1(v5, v3, v4)
//! ```
//!
//! What pays: the pass costs one operation and up to two registers. So it regroups only where the
//! chain limits the loop: where the processor could execute all other instructions of the loop
//! during the chain's latency ([`OptOptions::chain_width`]).
//!
//! Invariants: the version is a loop ([`super::shape`]), and the operation is add, xor or or. The
//! caller owns the version; no data between runs, no lock.

use super::OptOptions;
use super::shape::{BODY, ENTRY, Shape, normalise};
use crate::op::Op;
use crate::types::{Operand, Value};
use crate::version::{Inst, Term, Version};
use smallvec::SmallVec;

/// Most chains regrouped in one loop (guess: each makes two parameters, so more cost registers).
const MOST: usize = 2;

/// Runs the pass; returns how many chains it regrouped.
pub(super) fn run(version: &mut Version, options: &OptOptions) -> usize {
    if normalise(version) != Some(Shape::Loop) {
        return 0;
    }
    let mut regrouped = 0;
    while regrouped < MOST
        && let Some(chain) =
            (0..version.blocks[BODY].params.len()).find_map(|param| find(version, param, options))
    {
        regroup(version, &chain);
        regrouped += 1;
    }
    regrouped
}

/// A parameter whose next value is `late ∘ soon`, and the index of the instruction `parameter ∘
/// other` on which `late` depends.
struct Chain {
    param: usize,
    late: Operand,
    soon: Operand,
    first: usize,
    other: Operand,
}

/// The neutral element of an operation whose operands may be regrouped; `None` for any other
/// operation.
fn neutral(op: Op) -> Option<u64> {
    match op {
        Op::Add | Op::Xor | Op::Or => Some(0),
        _ => None,
    }
}

/// Latency of an operation in cycles (manual: typical of current x86 cores; wrong values only make
/// the pass choose other chains).
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
    let last =
        body.insts.iter().find(|i| i.def() == Some(next)).filter(|i| neutral(i.op).is_some())?;
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
        let other =
            same.then(|| if inst.args[0] == value { inst.args[1] } else { inst.args[0] })?;
        let leads_to_late = waits(inst.def()?, first + 1)(late).is_some();
        (after_param(other).is_none() && leads_to_late).then_some(Chain {
            param,
            late,
            soon,
            first,
            other,
        })
    })
}

fn regroup(version: &mut Version, chain: &Chain) {
    let inst = version.blocks[BODY].insts[chain.first].clone();
    let neutral = Operand::Const(neutral(inst.op).expect("its operation is that of a chain"));
    let (late, soon, both) =
        (version.value(inst.ty), version.value(inst.ty), version.value(inst.ty));
    version.blocks[BODY].params.extend([late, soon]);
    for block in [ENTRY, BODY] {
        let Term::Jump { args, .. } = &mut version.blocks[block].term else {
            unreachable!("a loop's blocks jump")
        };
        let parts =
            if block == ENTRY { [args[chain.param], neutral] } else { [chain.late, chain.soon] };
        args.extend(parts);
    }
    let insts = &mut version.blocks[BODY].insts;
    insts[chain.first].args = SmallVec::from_slice(&[late.into(), both.into()]);
    insts.insert(chain.first, Inst::new(inst.op, inst.ty, Some(both), &[soon.into(), chain.other]));
}
