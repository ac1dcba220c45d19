//! The loader against the kernel: which files it refuses, how it reads scripts, and whether a
//! loaded program runs.
//!
//! A loaded program is run natively, by a jump to its entry in a forked child. The loader is right
//! if the program behaves as if the kernel had loaded it.

mod fuzz;
mod programs;
mod refusals;
mod scripts;
mod support;
