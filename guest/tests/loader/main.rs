//! The loader against the kernel: what it refuses, what it makes of scripts, and whether what it loads runs.
//!
//! A loaded program is run by simply jumping to it, natively, in a forked child: the loader's part of the work is
//! right if the program cannot tell the difference.

mod fuzz;
mod programs;
mod refusals;
mod scripts;
mod support;
