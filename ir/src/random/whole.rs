//! Test cases with branches: a whole random program as one version, with random assumptions in it.
//!
//! [`super::cases`] has traces as they are recorded; this module tests the passes that work on any
//! control flow. Everything is a function of the seed; tests and the mutation tests call [`case`]; no
//! lock.
//!
//! ```text
//! b1(v17 …): poll else a1; v30 = and.i64 v17, 7; v31 = eq.i64 v30, 0; assume v31 else a1; …
//! ```

use super::program::Program;
use super::trace::{Options, build_all};
use super::{Rng, generate};
use crate::eval::check::Limits;
use crate::op::Op;
use crate::opt::inject;
use crate::random::cases::Case;
use crate::reach::Point;
use crate::types::{BlockId, Operand, Ty, Value};
use crate::version::{Fact, Inst, Version};

/// A version of the program's first blocks, and states to try it on; `None` if the builder does not
/// support a block.
pub fn case(program: &mut Program, seed: u64) -> Option<Case> {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let options = Options { peel: false, older_anchor: rng.below(4) };
    let limit = 2 + rng.below(8);
    let mut trace = build_all(program, Program::pc(0), "t1", limit, options, &mut rng)?;
    if rng.one_in(2) {
        trace.context.facts.push(Fact::PrivateMemory);
    }
    assume_things(&mut trace, &mut rng);
    let states = (0..3).map(|_| (generate::state(&mut rng), generate::machine(&mut rng))).collect();
    Some(Case { trace, states, limits: Limits { steps: 2_000, forced: 12 } })
}

/// Adds assumptions at random points: that a value there equals, differs from or lies below a
/// random number.
fn assume_things(version: &mut Version, rng: &mut Rng) {
    for _ in 0..rng.below(8) {
        let block = BlockId(rng.below(version.blocks.len()) as u32);
        let body = &version.blocks[block.index()];
        let inst = rng.below(body.insts.len() + 1);
        let earlier = body.insts[..inst].iter().flat_map(|i| i.defs.clone());
        let (entry, params) = (version.blocks[0].params.clone(), body.params.clone());
        let known: Vec<Value> = earlier
            .chain(entry)
            .chain(params)
            .filter(|v| version.ty(*v).is_machine_int())
            .collect();
        // A value that is the same throughout the program, so that its predicate can be hoisted.
        let value =
            if rng.one_in(3) { version.blocks[0].params[rng.below(16)] } else { rng.pick(&known) };
        let ty = version.ty(value);
        let constant = Operand::Const(rng.interesting() & ty.mask());
        let mut operands = [value.into(), constant];
        if rng.one_in(3) {
            operands.reverse();
        }
        let mut insts = Vec::new();
        if rng.one_in(3) {
            let masked = version.value(ty);
            let mask = Operand::Const(rng.pick(&[1, 3, 7, 8, 0x18]));
            insts.push(Inst::new(Op::And, ty, Some(masked), &[value.into(), mask]));
            operands = [masked.into(), Operand::Const(0)];
        }
        let op = rng.pick(&[Op::Eq, Op::Ne, Op::Ne, Op::LtU, Op::LeU, Op::LtS, Op::LeS]);
        let predicate = version.value(Ty::I1);
        insts.push(Inst::new(op, ty, Some(predicate), &operands));
        let point = Point { block, inst: inst + insts.len() };
        version.blocks[block.index()].insts.splice(inst..inst, insts);
        // If no anchor reaches the point, the predicate is computed and not assumed.
        inject(version, point, predicate.into());
    }
}
