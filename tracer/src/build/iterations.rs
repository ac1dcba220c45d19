//! Several iterations of a loop in one trace.
//!
//! An iteration has the blocks of the main path up to the one where it *parts* from it, or from another
//! iteration that has parted before. There the trace branches; each way goes on to the loop's head by
//! itself. So the blocks form a tree ([`dynasour_ir::opt`], shape `Tree`). The main path comes first
//! everywhere. It also stands before the loop, as the first iteration: what that establishes holds in the
//! loop (pass `peel`, which knows no branches).
//!
//! ```text
//! main:   a → b → c → head          b0: a, b, c with guards; jump b1
//! other:  a → b → d → head          b1: poll; a, b; branch then b2 else b3     b2: c; jump b1
//!                                                                             b3: d; jump b1
//! ```
//!
//! An iteration that parts at a direct branch needs no guard there. One that parts at an indirect jump
//! assumes its own target behind the branch.
//!
//! Data: [`Iterations`], the paths of one build. Invariant: as for a single path ([`super`]). Behind a
//! branch no anchor of before it is used, so that each block of the tree has its own anchors.

use super::body::{Body, target_kind};
use super::{BuildError, Path, Step, instructions, written_operands};
use crate::recorder::AbortReason;
use dynasour_ir::{Block, BlockId, Edge, Gpr, GuestTerm, Op, Operand, Term, Ty, Value};

/// The iterations of a path, the main one first.
pub(super) struct Iterations<'p> {
    steps: Vec<&'p [Step]>,
    /// The number of the first step of each, counted through all.
    first: Vec<usize>,
    head: u64,
    greens: &'p [(Gpr, u64)],
}

impl<'p> Iterations<'p> {
    pub fn of(path: &'p Path) -> Iterations<'p> {
        let others = path.others.iter().map(|steps| &steps[..]);
        let steps: Vec<&[Step]> = std::iter::once(&path.steps[..]).chain(others).collect();
        let first = steps
            .iter()
            .scan(0, |next, steps| Some(std::mem::replace(next, *next + steps.len())))
            .collect();
        let greens = path.guest.as_ref().map_or(&[][..], |guest| &guest.registers);
        Iterations { steps, first, head: path.head, greens }
    }

    /// The steps of each, with the number of the first one.
    pub fn all(&self) -> impl Iterator<Item = (&'p [Step], usize)> + '_ {
        self.steps.iter().copied().zip(self.first.iter().copied())
    }

    /// Where the n-th step of an iteration goes.
    fn next(&self, iteration: usize, n: usize) -> Option<u64> {
        self.steps[iteration].get(n).map(|step| step.next)
    }

    /// Divides a group of iterations by where the n-th step of the first goes.
    fn divide(&self, group: &[usize], n: usize) -> (Vec<usize>, Vec<usize>) {
        let next = self.next(group[0], n);
        group.iter().partition(|iteration| self.next(**iteration, n) == next)
    }
}

/// The number of the step at which two iterations part; none if one is the beginning of the other.
pub(crate) fn parts_at(a: &[Step], b: &[Step]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a.next != b.next)
}

/// The guest instructions of the other iterations that the trace holds besides those of the path.
pub(super) fn extra_instructions(path: &Path) -> u64 {
    let mut before = vec![&path.steps[..]];
    let mut extra = 0;
    for other in &path.others {
        let shared = before.iter().filter_map(|steps| parts_at(steps, other)).max();
        extra += shared.map_or(0, |n| instructions(&other[n + 1..]));
        before.push(other);
    }
    extra
}

impl Body<'_, '_> {
    /// Translates all iterations, from the loop's head on, whose block has these parameters.
    pub fn iterations(
        &mut self,
        params: Vec<Value>,
        iterations: &Iterations<'_>,
    ) -> Result<(), BuildError> {
        let all: Vec<usize> = (0..iterations.steps.len()).collect();
        self.grow(params, iterations, &all, 0)
    }

    /// Translates a group of iterations that have not parted, from the n-th step on.
    fn grow(
        &mut self,
        params: Vec<Value>,
        iterations: &Iterations<'_>,
        group: &[usize],
        n: usize,
    ) -> Result<(), BuildError> {
        let main = group[0];
        for (n, step) in iterations.steps[main].iter().enumerate().skip(n) {
            self.step_index = iterations.first[main] + n;
            let (same, others) = iterations.divide(group, n);
            if others.is_empty() {
                self.block(step, false)?;
                continue;
            }
            let term = self.instructions(step)?;
            return self.part(params, iterations, &term, (&same, &others), n);
        }
        self.assume_greens(iterations.head, iterations.greens)?;
        let args = written_operands(self.written, &self.state);
        self.finish(params, Term::Jump { to: BlockId(1), args });
        Ok(())
    }

    /// The iterations part behind the n-th step, which ends in `term`.
    fn part(
        &mut self,
        params: Vec<Value>,
        iterations: &Iterations<'_>,
        term: &GuestTerm,
        (same, others): (&[usize], &[usize]),
        n: usize,
    ) -> Result<(), BuildError> {
        let inconsistent = BuildError(AbortReason::Inconsistent);
        let next = iterations.next(same[0], n).ok_or(inconsistent)?;
        let target = match *term {
            GuestTerm::Branch { .. } => None,
            GuestTerm::Goto(target) | GuestTerm::Ret(target) | GuestTerm::Call { target, .. } => {
                Some(target)
            }
            _ => return Err(inconsistent),
        };
        let cond = match (term, target) {
            (GuestTerm::Branch { cond, taken, .. }, _) if next == *taken => *cond,
            (GuestTerm::Branch { cond, .. }, _) if cond.as_value().is_some() => self.negate(*cond),
            (_, Some(target)) if target.as_value().is_some() => {
                self.builder.binary(Op::Eq, Ty::I64, target, Operand::Const(next))
            }
            _ => return Err(inconsistent),
        };
        if cond.as_const().is_some() {
            return Err(inconsistent);
        }
        let this = self.builder.version.blocks.len();
        let edge = |to: usize| Edge { to: BlockId(to as u32), args: Vec::new() };
        self.finish(params, Term::Branch { cond, then: edge(this + 1), otherwise: edge(this + 1) });
        let before = self.place();
        self.grow(Vec::new(), iterations, same, n + 1)?;
        let second = edge(self.builder.version.blocks.len());
        if let Term::Branch { otherwise, .. } = &mut self.builder.version.blocks[this].term {
            *otherwise = second;
        }
        self.go_to(before);
        let (same, others) = iterations.divide(others, n);
        if !others.is_empty() {
            return self.part(Vec::new(), iterations, term, (&same, &others), n);
        }
        // An iteration that is the beginning of another has no such step: it does not part here.
        let next = iterations.next(same[0], n).ok_or(inconsistent)?;
        if let Some(target) = target {
            self.assume_target(target_kind(term), target, next);
        }
        self.grow(Vec::new(), iterations, &same, n + 1)
    }

    /// Ends the block that is being made.
    fn finish(&mut self, params: Vec<Value>, term: Term) {
        let (insts, pcs) = self.take_insts();
        self.block_pcs.push(pcs);
        self.builder.version.blocks.push(Block { params, insts, term });
        self.forget_anchor();
    }
}
