//! Does a version do what `base` does, from every state? A proof, by symbolic execution and an SMT solver.
//!
//! The rule is that of [`crate::eval::check`]: a version may leave only in a state that `base` passes. It
//! is shown for every opportunity, taken or not, so a proof covers equivalence and assumption transparency
//! (sourir 5.4) together, as [`crate::validate`] does for the states that it tries.
//!
//! The version is cut at its entry and at the heads of its loops. From each cut it is executed on symbols
//! along every path to an exit or to a cut; `base` is executed beside it, as far as the facts that the
//! version has established show the way. At a loop's head `base` is in the state that the anchor of the
//! head's safe point rebuilds, whatever the parameters are: that is the invariant. What the loop has been
//! told by the code before it (values of memory that do not change) is tried as a further invariant and
//! dropped where an iteration does not keep it.
//!
//! ```text
//! entry     t1: v33 = rcx + 4; assume v33 != 64      base: rcx + 4 …, jne: decided by the assume
//!           opportunity a1 → 0x1420a [rcx = v33]     base passes 0x1420a with rcx + 4: equal
//! head b1   parameters are symbols; base is at 0x141f8 in the state of a2
//! ```
//!
//! | module | what |
//! | --- | --- |
//! | [`term`], [`normal`], [`flag_bits`] | expressions, memories |
//! | [`facts`] | what is known on a path, reading memory |
//! | [`frame`], [`equal`] | execution on terms; what has to be equal |
//! | [`spec`] | what is right: `base`, or another trace |
//! | [`questions`], [`mod@solver`], `z3` | what has to be asked |
//! | [`stopwatch`] | how long it takes |
//! | [`search`] | where what is right passes a state |
//! | [`simulate`], [`cuts`], [`relations`] | the proof; what is known at the heads of loops |
//! | [`code`], [`code_cuts`] | machine code against its version; its loops |
//! | [`refute`] | counterexamples |
//!
//! **What is assumed**: what the version's context says (often that no other thread writes memory; without
//! that fact what is loaded is anything, and the order of accesses counts), and that read-only memory stays as
//! it is. Natives are functions of what they declare to read. **Invariants.** What is *proven* is true under
//! these assumptions, if lifter, terms and solver are right; *refuted* comes with an entry state that the
//! evaluator shows to be a counterexample; everything else is *unknown*, with the reason. **Callers.**
//! `dynasour ir prove`, and whoever compiles a trace with `--prove-traces`; no lock.

mod code;
mod code_cuts;
mod cuts;
mod equal;
mod facts;
mod flag_bits;
mod frame;
mod normal;
mod questions;
mod refute;
mod relations;
#[cfg(all(test, feature = "prove"))]
mod rules;
mod search;
mod simulate;
mod solver;
mod spec;
mod stopwatch;
mod term;
#[cfg(test)]
mod tests;
#[cfg(feature = "prove")]
mod z3;

pub use code::{Provable, Word, prove_code};
pub use simulate::{Claim, Limits, Outcome, Right, Verdict, prove};
pub use solver::{Answer, Depth, Nobody, Solver, State};
#[cfg(feature = "prove")]
pub use z3::Z3;

/// The solver of this build; none without the feature `prove`.
pub fn solver() -> Option<Box<dyn Solver>> {
    #[cfg(feature = "prove")]
    return Some(Box::new(Z3::default()));
    #[cfg(not(feature = "prove"))]
    return None;
}
