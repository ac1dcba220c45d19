//! Who decides what terms alone do not show: an SMT solver, or nobody.
//!
//! **Callers.** A proof, which owns its solver. The implementation for Z3 is `z3`, behind the
//! feature `prove`.
//!
//! ```text
//! follows(hold: [not (eq rcx 60)], goal: lt.u 0 (rcx - 60))      Answer::Follows
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

/// Decides questions about terms.
pub trait Solver {
    /// Does the goal follow from the facts? All are truth values. With `arrays` memory is what its stores
    /// make of it; without, each load is any value.
    fn follows(&mut self, terms: &Terms, hold: &[Term], goal: Term, arrays: bool) -> Answer;
}

/// Decides nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nobody;

impl Solver for Nobody {
    fn follows(&mut self, _: &Terms, _: &[Term], _: Term, _: bool) -> Answer {
        Answer::Unknown
    }
}
