//! Who decides what terms alone do not show: an SMT solver, or nobody.
//!
//! **Callers.** A proof, which owns its solver. The implementation for Z3 is `z3`, behind the
//! feature `prove`.
//!
//! ```text
//! follows(hold: [not (eq rcx 60)], goal: lt.u 0 (rcx - 60), Depth::Terms)      Answer::Follows
//! ```

use super::term::{Term, Terms};
use crate::types::Loc;

/// The answer to a question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The goal is true wherever the facts are.
    Follows,
    /// In this state the facts are true and the goal is not, as far as terms say what memory holds.
    Refuted(State),
    /// Not decided: out of time, or nobody to ask.
    Unknown,
}

/// A state at the entry.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct State {
    /// Registers and flags that matter.
    pub locs: Vec<(Loc, u64)>,
    /// Address, bytes and value of what is loaded.
    pub words: Vec<(u64, u32, u64)>,
}

/// How much of what a term means is told to a solver. What is left out may be anything, so that what follows
/// from less follows from more, and is found sooner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Depth {
    /// Sums and products are any values, but the same wherever they are the same.
    Atoms,
    /// Loads are any values.
    Terms,
    /// Memory is what its stores make of it.
    Arrays,
}

/// Decides questions about terms.
pub trait Solver {
    /// Does the goal follow from the facts? All are truth values.
    fn follows(&mut self, terms: &Terms, hold: &[Term], goal: Term, depth: Depth) -> Answer;
}

/// Decides nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nobody;

impl Solver for Nobody {
    fn follows(&mut self, _: &Terms, _: &[Term], _: Term, _: Depth) -> Answer {
        Answer::Unknown
    }
}
