//! The lifter against iced's tables, against its own invariants, and against the processor.
//!
//! Everything random is seeded. `DYNASOUR_SEED` sets the seed, `DYNASOUR_CASES` the number of cases
//! (a soak); a failure prints the line that replays it.

mod arena;
mod blocks;
mod classes;
mod eval;
mod generate;
mod modelled;
mod natives;
mod rng;
