//! Faults that passes could make, put into the optimised versions of random traces: who notices?
//!
//! For each kind of fault a row is printed: how many were made; how many the verifier refuses; how many of the
//! others this validation finds, and how many taking every anchor from three states (the checker, which does
//! what `--chaos` does) finds; how many are refuted by a proof; how many are *harmless*: proven to change
//! nothing (a store that is overwritten, a guard that always holds). With the feature `prove` the proofs
//! have a solver. What is proven although somebody has found it to be wrong would be a fault of the prover.
//!
//! `cargo test --release -p dynasour-ir --features prove --lib validate::faults -- --nocapture` prints the
//! table of docs/proof.md.

use super::Limits;
use super::tests::{agrees, each};
use crate::op::{Cond, Op};
use crate::opt::{OptOptions, optimise_with};
use crate::prove::{Claim, Limits as ProofLimits, Nobody, Right, Verdict, prove, solver};
use crate::random::Rng;
use crate::random::cases::{self, passes};
use crate::types::{AnchorId, Operand, Ty, Value};
use crate::verify::verify;
use crate::version::{Anchor, DeferredStore, Inst, Term, Version};
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Puts one fault into a version; false if there is no place for it.
type Fault = (&'static str, fn(&mut Version, &mut Rng) -> bool);

/// An element that a fault may hit.
fn one<'a, T>(items: &'a mut [T], rng: &mut Rng) -> Option<&'a mut T> {
    if items.is_empty() { None } else { Some(&mut items[rng.below(items.len())]) }
}

/// Block and position of an instruction that fits.
fn place(v: &Version, rng: &mut Rng, fits: impl Fn(&Inst) -> bool) -> Option<(usize, usize)> {
    let blocks = v.blocks.iter().enumerate();
    let all: Vec<(usize, usize)> = blocks
        .flat_map(|(b, block)| block.insts.iter().enumerate().map(move |(i, inst)| (b, i, inst)))
        .filter(|(.., inst)| fits(inst))
        .map(|(b, i, _)| (b, i))
        .collect();
    (!all.is_empty()).then(|| rng.pick(&all))
}

/// Changes an instruction that fits.
fn change(
    v: &mut Version,
    rng: &mut Rng,
    fits: impl Fn(&Inst) -> bool,
    f: impl FnOnce(&mut Inst, &mut Rng),
) -> bool {
    let Some((block, at)) = place(v, rng, fits) else { return false };
    let inst = &mut v.blocks[block].insts[at];
    let before = inst.clone();
    f(inst, rng);
    *inst != before
}

/// Removes an instruction that fits.
fn remove(v: &mut Version, rng: &mut Rng, fits: impl Fn(&Inst) -> bool) -> bool {
    let Some((block, at)) = place(v, rng, fits) else { return false };
    v.blocks[block].insts.remove(at);
    true
}

/// Replaces the operation of an instruction.
fn replace(v: &mut Version, rng: &mut Rng, pairs: &[(Op, Op)]) -> bool {
    let other = |op: Op| {
        let pair = pairs.iter().find(|(a, b)| op == *a || op == *b)?;
        Some(if op == pair.0 { pair.1 } else { pair.0 })
    };
    change(v, rng, |i| other(i.op).is_some(), |i, _| i.op = other(i.op).unwrap_or(i.op))
}

/// Another value of the same type that is used somewhere.
fn another(v: &Version, rng: &mut Rng, value: Value) -> Option<Operand> {
    let all = (0..v.types.len() as u32).map(Value);
    let alike: Vec<Value> = all.filter(|x| *x != value && v.ty(*x) == v.ty(value)).collect();
    (!alike.is_empty()).then(|| Operand::Value(rng.pick(&alike)))
}

/// Replaces one operand by another value of its type.
fn confuse(v: &mut Version, rng: &mut Rng, fits: impl Fn(&Inst) -> bool) -> bool {
    let Some((block, at)) = place(v, rng, fits) else { return false };
    let args = v.blocks[block].insts[at].args.clone();
    let Some(arg) = (0..args.len()).find(|i| args[*i].as_value().is_some()) else { return false };
    let Some(value) = args[arg].as_value() else { return false };
    let Some(other) = another(v, rng, value) else { return false };
    v.blocks[block].insts[at].args[arg] = other;
    true
}

/// Anchors that something uses.
fn anchors(v: &Version) -> Vec<AnchorId> {
    let insts = v.blocks.iter().flat_map(|b| &b.insts).filter_map(|i| i.anchor);
    let exits = v.blocks.iter().filter_map(|b| match b.term {
        Term::Exit(anchor) => Some(anchor),
        _ => None,
    });
    let mut all: Vec<AnchorId> = insts.chain(exits).collect();
    all.sort();
    all.dedup();
    all
}

/// Changes an anchor that fits.
fn anchor(
    v: &mut Version,
    rng: &mut Rng,
    fits: impl Fn(&Anchor) -> bool,
    f: impl FnOnce(&mut Anchor, &mut Rng),
) -> bool {
    let mut used = anchors(v);
    used.retain(|a| fits(&v.anchors[a.index()]));
    let Some(id) = one(&mut used, rng).copied() else { return false };
    let before = v.anchors[id.index()].clone();
    f(&mut v.anchors[id.index()], rng);
    v.anchors[id.index()] != before
}

/// Changes a deferred store.
fn deferred(v: &mut Version, rng: &mut Rng, f: impl FnOnce(&mut DeferredStore, &mut Rng)) -> bool {
    anchor(
        v,
        rng,
        |a| !a.stores.is_empty(),
        |a, rng| {
            if let Some(store) = one(&mut a.stores, rng) {
                f(store, rng);
            }
        },
    )
}

fn is_constant(inst: &Inst) -> bool {
    inst.op.is_pure() && inst.args.iter().any(|a| a.as_const().is_some())
}

/// The edges back to a block that comes earlier.
fn back_edge(v: &mut Version, rng: &mut Rng, f: impl FnOnce(&mut [Operand], &[Value])) -> bool {
    let params: Vec<Vec<Value>> = v.blocks.iter().map(|b| b.params.clone()).collect();
    for (at, block) in v.blocks.iter_mut().enumerate() {
        for (to, args) in block.term.edges_mut() {
            if to.index() <= at && !args.is_empty() {
                let before = args.clone();
                let _ = &rng;
                f(args, &params[to.index()]);
                return *args != before;
            }
        }
    }
    false
}

const FAULTS: [Fault; 38] = [
    ("a guard is lost", |v, rng| remove(v, rng, |i| i.op == Op::Assume)),
    ("a guard assumes the opposite", |v, rng| {
        let Some((block, at)) = place(v, rng, |i| i.op == Op::Assume) else { return false };
        let opposite = v.value(Ty::I1);
        let cond = v.blocks[block].insts[at].args[0];
        v.blocks[block].insts[at].args[0] = opposite.into();
        v.blocks[block].insts.insert(at, Inst::new(Op::Not, Ty::I1, Some(opposite), &[cond]));
        true
    }),
    ("a guard stands after the next instruction", |v, rng| {
        let Some((block, at)) = place(v, rng, |i| i.op == Op::Assume) else { return false };
        let insts = &mut v.blocks[block].insts;
        if at + 1 == insts.len() || insts[at + 1].op == Op::Assume {
            return false;
        }
        insts.swap(at, at + 1);
        true
    }),
    ("a guard has another anchor", |v, rng| {
        let mut used = anchors(v);
        let Some(other) = one(&mut used, rng).copied() else { return false };
        change(v, rng, |i| i.op == Op::Assume, |i, _| i.anchor = Some(other))
    }),
    ("an access has another anchor", |v, rng| {
        let mut used = anchors(v);
        let Some(other) = one(&mut used, rng).copied() else { return false };
        change(v, rng, |i| matches!(i.op, Op::Load | Op::Store), |i, _| i.anchor = Some(other))
    }),
    ("a comparison with another constant", |v, rng| {
        let compares = |i: &Inst| {
            matches!(i.op, Op::Eq | Op::Ne | Op::LtS | Op::LtU | Op::LeS | Op::LeU)
                && is_constant(i)
                && i.ty != Ty::I1
        };
        change(v, rng, compares, |i, _| {
            let mask = i.ty.mask();
            for arg in &mut i.args {
                if let Operand::Const(c) = arg {
                    *c = c.wrapping_add(1) & mask;
                }
            }
        })
    }),
    ("signed for unsigned", |v, rng| replace(v, rng, &[(Op::LtS, Op::LtU), (Op::LeS, Op::LeU)])),
    ("less for less or equal", |v, rng| replace(v, rng, &[(Op::LtS, Op::LeS), (Op::LtU, Op::LeU)])),
    ("equal for not equal", |v, rng| replace(v, rng, &[(Op::Eq, Op::Ne)])),
    ("another condition of the flags", |v, rng| {
        change(
            v,
            rng,
            |i| matches!(i.op, Op::Cond(_)),
            |i, rng| {
                i.op = Op::Cond(rng.pick(&Cond::ALL));
            },
        )
    }),
    ("a sum for a difference", |v, rng| replace(v, rng, &[(Op::Add, Op::Sub)])),
    ("and for or", |v, rng| replace(v, rng, &[(Op::And, Op::Or)])),
    ("left for right", |v, rng| replace(v, rng, &[(Op::Shl, Op::Shr), (Op::Rol, Op::Ror)])),
    ("a logical shift for an arithmetic one", |v, rng| replace(v, rng, &[(Op::Shr, Op::Sar)])),
    ("zeros for the sign", |v, rng| {
        let extends = |i: &Inst| matches!(i.op, Op::Zext(ty) | Op::Sext(ty) if ty != Ty::I1);
        change(v, rng, extends, |i, _| {
            i.op = match i.op {
                Op::Zext(from) => Op::Sext(from),
                Op::Sext(from) => Op::Zext(from),
                op => op,
            };
        })
    }),
    ("the operands of a difference are exchanged", |v, rng| {
        change(v, rng, |i| i.op == Op::Sub, |i, _| i.args.swap(0, 1))
    }),
    ("the operands of a selection are exchanged", |v, rng| {
        change(v, rng, |i| i.op == Op::Select, |i, _| i.args.swap(1, 2))
    }),
    ("another constant in a computation", |v, rng| {
        let computes = |i: &Inst| {
            is_constant(i)
                && matches!(i.op, Op::Add | Op::And | Op::Or | Op::Xor | Op::Mul)
                && i.ty != Ty::I1
        };
        change(v, rng, computes, |i, _| {
            let mask = i.ty.mask();
            for arg in &mut i.args {
                if let Operand::Const(c) = arg {
                    *c = (*c ^ 1) & mask;
                }
            }
        })
    }),
    ("another value in a computation", |v, rng| confuse(v, rng, |i| i.op.is_pure())),
    ("a store is lost", |v, rng| remove(v, rng, |i| i.op == Op::Store)),
    ("a store to another address", |v, rng| {
        change(
            v,
            rng,
            |i| i.op == Op::Store,
            |i, rng| {
                let by = rng.pick(&[1, -1, 8, -8]);
                i.mem.iter_mut().for_each(|m| m.disp += by);
            },
        )
    }),
    ("a store of another value", |v, rng| {
        let Some((block, at)) = place(v, rng, |i| i.op == Op::Store) else { return false };
        let stored = v.blocks[block].insts[at].args[2];
        let other = match stored {
            Operand::Const(c) => Operand::Const(c ^ 1),
            Operand::Value(value) => match another(v, rng, value) {
                Some(other) => other,
                None => return false,
            },
        };
        v.blocks[block].insts[at].args[2] = other;
        true
    }),
    ("a store twice", |v, rng| {
        let Some((block, at)) = place(v, rng, |i| i.op == Op::Store) else { return false };
        let end = v.blocks[block].insts.len();
        let copy = v.blocks[block].insts[at].clone();
        v.blocks[block].insts.insert(end, copy);
        true
    }),
    ("a store after the next access", |v, rng| {
        let Some((block, at)) = place(v, rng, |i| i.op == Op::Store) else { return false };
        let insts = &mut v.blocks[block].insts;
        let accesses = |i: &Inst| matches!(i.op, Op::Load | Op::Store | Op::Native);
        let Some(next) = (at + 1..insts.len()).find(|n| accesses(&insts[*n])) else { return false };
        let store = insts.remove(at);
        insts.insert(next, store);
        true
    }),
    ("a load from another address", |v, rng| {
        change(
            v,
            rng,
            |i| i.op == Op::Load,
            |i, rng| {
                let by = rng.pick(&[1, -1, 8, -8]);
                i.mem.iter_mut().for_each(|m| m.disp += by);
            },
        )
    }),
    ("a load is the one before", |v, rng| {
        let loads = |i: &Inst| i.op == Op::Load;
        let Some((block, at)) = place(v, rng, loads) else { return false };
        let insts = &v.blocks[block].insts;
        let Some(before) = insts[..at].iter().rev().find(|i| loads(i)) else { return false };
        let (ty, value) = (insts[at].ty, before.defs[0]);
        if before.ty != ty {
            return false;
        }
        let inst = &mut v.blocks[block].insts[at];
        *inst = Inst::new(Op::Or, ty, Some(inst.defs[0]), &[value.into(), Operand::Const(0)]);
        true
    }),
    ("a load before the last store", |v, rng| {
        let Some((block, at)) = place(v, rng, |i| i.op == Op::Load) else { return false };
        let insts = &mut v.blocks[block].insts;
        let Some(to) = insts[..at].iter().rposition(|i| i.op == Op::Store) else { return false };
        let load = insts.remove(at);
        insts.insert(to, load);
        true
    }),
    ("a native is lost", |v, rng| remove(v, rng, |i| i.op == Op::Native && i.defs.is_empty())),
    ("an anchor of another pc", |v, rng| {
        anchor(
            v,
            rng,
            |a| a.target.as_const().is_some(),
            |a, rng| {
                let by = rng.pick(&[16, -16i64]) as u64;
                if let Operand::Const(pc) = a.target {
                    a.target = Operand::Const(pc.wrapping_add(by));
                }
            },
        )
    }),
    ("a register of an anchor is another value", |v, rng| {
        let values: Vec<Value> = (0..v.types.len() as u32).map(Value).collect();
        let of: Vec<Value> = values.into_iter().filter(|x| v.ty(*x) == Ty::I64).collect();
        anchor(
            v,
            rng,
            |a| !a.varmap.is_empty(),
            |a, rng| {
                if let Some((loc, operand)) = one(&mut a.varmap, rng)
                    && loc.ty() == Ty::I64
                {
                    *operand = rng.pick(&of).into();
                }
            },
        )
    }),
    ("two registers of an anchor are exchanged", |v, rng| {
        anchor(
            v,
            rng,
            |a| a.varmap.len() > 2,
            |a, rng| {
                let at = rng.below(a.varmap.len() - 1);
                if a.varmap[at].0.ty() == a.varmap[at + 1].0.ty() {
                    let (x, y) = (a.varmap[at].1, a.varmap[at + 1].1);
                    (a.varmap[at].1, a.varmap[at + 1].1) = (y, x);
                }
            },
        )
    }),
    ("an anchor lacks a register", |v, rng| {
        anchor(
            v,
            rng,
            |a| !a.varmap.is_empty(),
            |a, rng| {
                let at = rng.below(a.varmap.len());
                a.varmap.remove(at);
            },
        )
    }),
    ("an anchor lacks a deferred store", |v, rng| {
        anchor(
            v,
            rng,
            |a| !a.stores.is_empty(),
            |a, rng| {
                let at = rng.below(a.stores.len());
                a.stores.remove(at);
            },
        )
    }),
    ("a deferred store to another address", |v, rng| {
        deferred(v, rng, |store, rng| store.mem.disp += rng.pick(&[1, -1, 8, -8]))
    }),
    ("a deferred store of another value", |v, rng| {
        deferred(v, rng, |store, rng| {
            store.args[2] = Operand::Const(rng.interesting() & store.ty.mask());
        })
    }),
    ("a loop keeps the value of a parameter", |v, rng| {
        let at = rng.below(8);
        back_edge(v, rng, |args, params| {
            let at = at % args.len();
            args[at] = params[at].into();
        })
    }),
    ("two values of a loop are exchanged", |v, rng| {
        let (at, types) = (rng.below(8), v.types.clone());
        back_edge(v, rng, |args, params| {
            let (x, y) = (at % args.len(), (at + 1) % args.len());
            if types[params[x].index()] == types[params[y].index()] {
                args.swap(x, y);
            }
        })
    }),
    ("a branch goes the other way", |v, _| {
        v.blocks.iter_mut().any(|block| match &mut block.term {
            Term::Branch { then, otherwise, .. } if then != otherwise => {
                std::mem::swap(then, otherwise);
                true
            }
            _ => false,
        })
    }),
];

/// Random programs for each kind.
const PROGRAMS: u64 = 60;

/// What happened to the versions with one kind of fault: how many were made, refused by the verifier, found
/// by validation, found with every anchor taken, refuted, proven, and none of these.
type Row = [u64; 7];

/// Makes a fault of one kind in many versions.
fn row((name, fault): Fault) -> Row {
    let mut row = Row::default();
    for seed in 0..PROGRAMS {
        each(seed, |program, case, head| {
            if case.states[0].1.has_peer() {
                return;
            }
            let mut version = case.trace.clone();
            let names = passes(&mut Rng::new(!seed ^ head));
            optimise_with(&mut version, &names, &OptOptions::default());
            if !fault(&mut version, &mut Rng::new(seed ^ head)) {
                return;
            }
            row[0] += 1;
            if verify(&version).is_err() {
                row[1] += 1;
                return;
            }
            let validated = agrees(program, case, &version, Limits::default()).is_err();
            let taken = cases::agrees(program, case, &version).is_err();
            let right = Right::Program(program);
            let claim = Claim { right, version: &version, constants: &[] };
            let mut solver = solver().unwrap_or_else(|| Box::new(Nobody));
            let outcome = prove(claim, &mut *solver, ProofLimits::default());
            let proven = outcome.verdict == Verdict::Proven;
            let refuted = matches!(outcome.verdict, Verdict::Refuted { .. });
            assert!(
                !(proven && (validated || taken)),
                "{name}, seed {seed}, {names:?}: proven, but it is wrong:\n{version}"
            );
            row[2] += u64::from(validated);
            row[3] += u64::from(taken);
            row[4] += u64::from(refuted);
            row[5] += u64::from(proven);
            row[6] += u64::from(!proven && !validated);
        });
    }
    row
}

#[test]
fn faults_of_passes_are_found() {
    // Each processor takes the next kind that nobody has taken.
    let next = AtomicUsize::new(0);
    let mut rows = vec![Row::default(); FAULTS.len()];
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(fault) = FAULTS.get(at) else { return done };
            done.push((at, row(*fault)));
        }
    };
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..processors).map(|_| scope.spawn(work)).collect();
        for (at, row) in workers.into_iter().flat_map(|w| w.join().expect("no proof is wrong")) {
            rows[at] = row;
        }
    });
    println!("made, verifier, validation, every anchor taken, refuted, harmless (proven), left");
    let mut sum = Row::default();
    for ((name, _), row) in FAULTS.iter().zip(rows) {
        println!("| {name} | {} |", row.map(|n| n.to_string()).join(" | "));
        sum = std::array::from_fn(|i| sum[i] + row[i]);
        assert!(row[0] > 0, "{name}: there was no place for it");
    }
    println!("| all | {} |", sum.map(|n| n.to_string()).join(" | "));
    let [made, refused, found, .., harmless, _] = sum;
    let real = made - harmless;
    println!("{} of {real} that matter are found before a trace is used", refused + found);
    assert!(10 * (refused + found) > 8 * real, "{} of {real}", refused + found);
}
