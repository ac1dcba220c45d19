//! Several iterations of a loop in one trace, or several executions of a function.
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
//! The executions of a function are such a tree, too, whose leaves are exits. The tree begins behind the entry,
//! and nothing stands before it.
//!
//! An iteration that parts at a direct branch needs no guard there. One that parts at an indirect jump
//! assumes its own target behind the branch. Iterations of an interpreted program's loop also part where a
//! value is promoted that was not the same in them, such as the place to which a function returns: the
//! trace branches by the value, and each way knows its own.
//!
//! Data: [`Iterations`], the paths of one build. Invariant: as for a single path ([`super`]). Behind a
//! branch no anchor of before it is used, so that each block of the tree has its own anchors.

use super::body::{Body, Partial, Place, target_kind};
use super::{BuildError, Path, Step, TraceShape, base_insts, instructions, written_operands};
use crate::recorder::AbortReason;
use dynasour_ir::{Block, BlockId, Edge, Gpr, GuestTerm, Op, Operand, Term, Ty, Value};

/// The iterations of a path, the main one first.
pub(super) struct Iterations<'p> {
    steps: Vec<&'p [Step]>,
    /// The number of the first step of each, counted through all.
    first: Vec<usize>,
    head: u64,
    greens: &'p [(Gpr, u64)],
    /// Do they lead back to the head?
    is_loop: bool,
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
        Iterations {
            steps,
            first,
            head: path.head,
            greens,
            is_loop: path.shape == TraceShape::Loop,
        }
    }

    /// The steps of each, with the number of the first one.
    pub fn all(&self) -> impl Iterator<Item = (&'p [Step], usize)> + '_ {
        self.steps.iter().copied().zip(self.first.iter().copied())
    }

    /// Where the n-th step of an iteration goes.
    fn next(&self, iteration: usize, n: usize) -> Option<u64> {
        self.steps[iteration].get(n).map(|step| step.next)
    }

    /// What the instruction of this number in the n-th step of an iteration was observed to compute.
    fn result(&self, iteration: usize, n: usize, index: usize) -> Option<u64> {
        result(self.steps[iteration].get(n)?, index)
    }

    /// Divides a group of iterations by where the n-th step of the first goes.
    fn divide(&self, group: &[usize], n: usize) -> (Vec<usize>, Vec<usize>) {
        let next = self.next(group[0], n);
        group.iter().partition(|iteration| self.next(**iteration, n) == next)
    }
}

/// What the instruction of this number was observed to compute.
pub(super) fn result(step: &Step, index: usize) -> Option<u64> {
    let def = base_insts(step).get(index)?.def()?;
    *step.observed.as_ref()?.get(def.index())?
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

fn edge(to: usize) -> Edge {
    Edge { to: BlockId(to as u32), args: Vec::new() }
}

/// A branch whose other way is not known yet.
fn branch(cond: Operand, then: usize) -> Term {
    Term::Branch { cond, then: edge(then), otherwise: edge(then) }
}

impl Body<'_, '_> {
    /// Translates all iterations, from the loop's head on, whose block has these parameters.
    pub fn iterations(
        &mut self,
        params: Vec<Value>,
        iterations: &Iterations<'_>,
    ) -> Result<(), BuildError> {
        let all: Vec<usize> = (0..iterations.steps.len()).collect();
        self.grow(params, iterations, &all, 0, None)
    }

    /// Translates a group of iterations that have not parted, from the n-th step on, of which a part may be
    /// translated already.
    fn grow(
        &mut self,
        params: Vec<Value>,
        iterations: &Iterations<'_>,
        group: &[usize],
        n: usize,
        mut begun: Option<Partial>,
    ) -> Result<(), BuildError> {
        let main = group[0];
        for (n, step) in iterations.steps[main].iter().enumerate().skip(n) {
            self.step_index = iterations.first[main] + n;
            let mut part = begun.take().unwrap_or_else(|| Partial::of(step));
            if let Some(index) = self.differs(iterations, group, n, part.next) {
                self.instructions_until(step, &mut part, Some(index))?;
                return self.part_by_value(params, iterations, group, n, (part, index));
            }
            self.instructions_until(step, &mut part, None)?;
            let term = part.end(step);
            let (same, others) = iterations.divide(group, n);
            if others.is_empty() {
                let ends = !iterations.is_loop && n + 1 == iterations.steps[main].len();
                if let Some(exit) = self.terminator(&term, step.next, ends)? {
                    self.finish(params, Term::Exit(exit));
                    return Ok(());
                }
                if !iterations.is_loop {
                    self.note_pass(step);
                }
                continue;
            }
            return self.part(params, iterations, &term, (&same, &others), n);
        }
        self.assume_greens(iterations.head, iterations.greens)?;
        let args = written_operands(self.written, &self.state);
        self.finish(params, Term::Jump { to: BlockId(1), args });
        Ok(())
    }

    /// The first instruction of the n-th step, from number `from` on, whose result is promoted and was not the
    /// same in all iterations of the group.
    fn differs(
        &self,
        iterations: &Iterations<'_>,
        group: &[usize],
        n: usize,
        from: usize,
    ) -> Option<usize> {
        let step = iterations.steps[group[0]].get(n).filter(|_| group.len() > 1)?;
        (from..base_insts(step).len()).find(|&index| {
            self.is_promoted(index) && {
                let mut results = group.iter().filter_map(|&i| iterations.result(i, n, index));
                let first = results.next();
                results.any(|result| Some(result) != first)
            }
        })
    }

    /// Iterations part within the n-th step: by the result of the instruction of this number, which was
    /// translated last.
    fn part_by_value(
        &mut self,
        params: Vec<Value>,
        iterations: &Iterations<'_>,
        group: &[usize],
        n: usize,
        (mut part, index): (Partial, usize),
    ) -> Result<(), BuildError> {
        let main = group[0];
        let step = &iterations.steps[main][n];
        self.step_index = iterations.first[main] + n;
        if !part.is_of(step) {
            return Err(BuildError(AbortReason::Inconsistent));
        }
        let value = group.iter().find_map(|&i| iterations.result(i, n, index));
        let (same, others): (Vec<usize>, Vec<usize>) = group
            .iter()
            .partition(|&&i| iterations.result(i, n, index).is_none_or(|r| Some(r) == value));
        let Some(value) = value.filter(|_| !others.is_empty()) else {
            self.promote_last(step, &mut part, index)?;
            return self.grow(params, iterations, group, n, Some(part));
        };
        let cond = self.is_result(step, &part, index, value)?;
        let this = self.builder.version.blocks.len();
        self.finish(params, branch(cond, this + 1));
        let before = self.place();
        let mut known = part.clone();
        known.set_result(step, index, value);
        self.grow(Vec::new(), iterations, &same, n, Some(known))?;
        self.go_otherwise(this, before);
        self.part_by_value(Vec::new(), iterations, &others, n, (part, index))
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
        self.finish(params, branch(cond, this + 1));
        let before = self.place();
        self.grow(Vec::new(), iterations, same, n + 1, None)?;
        self.go_otherwise(this, before);
        let (same, others) = iterations.divide(others, n);
        if !others.is_empty() {
            return self.part(Vec::new(), iterations, term, (&same, &others), n);
        }
        // An iteration that is the beginning of another has no such step: it does not part here.
        let next = iterations.next(same[0], n).ok_or(inconsistent)?;
        if let Some(target) = target {
            self.assume_target(target_kind(term), target, next);
        }
        self.grow(Vec::new(), iterations, &same, n + 1, None)
    }

    /// The translation goes on where the branch at the end of block `this` goes otherwise, in the state
    /// `before`.
    fn go_otherwise(&mut self, this: usize, before: Place) {
        let second = edge(self.builder.version.blocks.len());
        if let Term::Branch { otherwise, .. } = &mut self.builder.version.blocks[this].term {
            *otherwise = second;
        }
        self.go_to(before);
    }

    /// Ends the block that is being made.
    fn finish(&mut self, params: Vec<Value>, term: Term) {
        let (insts, pcs) = self.take_insts();
        self.block_pcs.push(pcs);
        self.builder.version.blocks.push(Block { params, insts, term });
        self.forget_anchor();
    }
}
