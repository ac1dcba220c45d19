//! The solver that proofs need: `ir prove` and `--prove-traces`.
//!
//! No data, no lock. Example: without the feature `prove` every use ends with [`MISSING`].

use anyhow::{Context, Result};
use dynasour_ir::prove::{Solver, solver};

/// What a user is told who asks for a proof of a build that has no solver.
pub const MISSING: &str = "this dynasour was built without a solver: install libz3-dev and build with \
                           `cargo build --release --features prove`";

/// The solver.
///
/// # Errors
/// This build has none.
pub fn needed() -> Result<Box<dyn Solver>> {
    solver().context(MISSING)
}
