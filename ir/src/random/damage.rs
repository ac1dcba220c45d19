//! Damaged versions: random versions in which single parts have been changed at random. The
//! verifier must accept or refuse each without a panic.
//!
//! A damaged version may happen to be correct (a removed store, another constant). The evaluator
//! must run every version that the verifier accepts. Everything is a function of the random source;
//! tests and the fuzz target `verify` call [`damaged`]; no lock.
//!
//! ```text
//! assume v3 else a0       may become    assume v3 else a7    (a7 does not exist: rule anchor)
//! ```

use super::{Rng, version};
use crate::op::Op;
use crate::types::{AnchorId, BlockId, Gpr, Loc, NativeId, Operand, Ty, Value};
use crate::version::{Inst, Term, Version};

/// A random version with up to three damages.
pub fn damaged(rng: &mut Rng) -> Version {
    let mut v = if rng.one_in(4) { version::base(rng) } else { version::trace(rng) };
    for _ in 0..rng.below(4) {
        damage(rng, &mut v);
    }
    v
}

/// A number that is mostly below `n`, sometimes just outside and sometimes far.
fn index(rng: &mut Rng, n: usize) -> u32 {
    match rng.below(8) {
        0 => n as u32,
        1 if rng.one_in(4) => u32::MAX,
        _ => rng.below(n.max(1)) as u32,
    }
}

fn operand(rng: &mut Rng, values: usize) -> Operand {
    if rng.one_in(3) {
        Operand::Const(rng.interesting())
    } else {
        Operand::Value(Value(index(rng, values)))
    }
}

fn loc(rng: &mut Rng) -> Loc {
    match rng.below(6) {
        0 => Loc::Flags,
        1 => rng.pick(&[Loc::Vec(3), Loc::Df, Loc::FsBase, Loc::Mask(7), Loc::X87]),
        _ => Loc::Gpr(Gpr::new(rng.below(16) as u8)),
    }
}

/// Changes one randomly chosen part, if the version has such a part.
fn damage(rng: &mut Rng, v: &mut Version) {
    let values = v.types.len();
    let kind = rng.below(20);
    if kind >= 14 {
        return tables(rng, v, kind);
    }
    let block = rng.below(v.blocks.len().max(1));
    let (anchors, natives, blocks) = (v.anchors.len(), v.natives.len(), v.blocks.len());
    let Some(body) = v.blocks.get_mut(block) else { return };
    let count = body.insts.len();
    let at = rng.below(count.max(1));
    if kind == 13 {
        body.term = match rng.below(3) {
            0 => Term::Exit(AnchorId(index(rng, anchors))),
            1 => Term::Jump {
                to: BlockId(index(rng, blocks)),
                args: (0..rng.below(3)).map(|_| operand(rng, values)).collect(),
            },
            _ => body.term.clone(),
        };
        return Version::for_each_term_operand(&mut body.term, |o| {
            if rng.one_in(3) {
                *o = operand(rng, values);
            }
        });
    }
    if kind == 12 {
        let other = rng.below(count.max(1));
        return if count > 0 {
            body.insts.swap(at, other)
        };
    }
    let Some(inst) = body.insts.get_mut(at) else { return };
    match kind {
        0 | 1 => {
            let arg = rng.below(inst.args.len().max(1));
            if let Some(slot) = inst.args.get_mut(arg) {
                *slot = operand(rng, values);
            }
        }
        2 => inst.ty = rng.pick(&Ty::ALL),
        3 => inst.op = rng.pick(&version::pure_ops()),
        4 => {
            inst.op = rng.pick(&[
                Op::Load,
                Op::Store,
                Op::Assume,
                Op::Poll,
                Op::Print,
                Op::Read,
                Op::Native,
                Op::At,
            ])
        }
        5 => inst.op = if rng.one_in(2) { Op::Get(loc(rng)) } else { Op::Put(loc(rng)) },
        6 => inst.anchor = (!rng.one_in(3)).then(|| AnchorId(index(rng, anchors))),
        7 => inst.native = (!rng.one_in(3)).then(|| NativeId(index(rng, natives))),
        8 => drop(inst.args.pop()),
        9 => inst.args.push(operand(rng, values)),
        10 => inst.defs = (0..rng.below(3)).map(|_| Value(index(rng, values))).collect(),
        _ => {
            let copy: Inst = body.insts.remove(at);
            if rng.one_in(2) {
                let to = rng.below(count);
                body.insts.insert(to, copy);
            }
        }
    }
}

/// Damages outside the instructions.
fn tables(rng: &mut Rng, v: &mut Version, kind: usize) {
    let values = v.types.len();
    match kind {
        14 => {
            let at = rng.below(values.max(1));
            if let Some(ty) = v.types.get_mut(at) {
                *ty = rng.pick(&Ty::ALL);
            }
        }
        15 => {
            let block = rng.below(v.blocks.len().max(1));
            if let Some(block) = v.blocks.get_mut(block) {
                if rng.one_in(2) {
                    block.params.pop();
                } else {
                    block.params.push(Value(index(rng, values)));
                }
            }
        }
        16 => v.entry_locs.push(loc(rng)),
        17 => v.context.facts.reverse(),
        _ => {
            let at = rng.below(v.anchors.len().max(1));
            let Some(anchor) = v.anchors.get_mut(at) else { return };
            match rng.below(5) {
                0 => anchor.target = operand(rng, values),
                1 => anchor.varmap.push((loc(rng), operand(rng, values))),
                2 => drop(anchor.varmap.pop()),
                3 => drop(anchor.stores.pop()),
                _ => Version::for_each_anchor_operand(anchor, |o| {
                    if rng.one_in(4) {
                        *o = operand(rng, values);
                    }
                }),
            }
        }
    }
}
