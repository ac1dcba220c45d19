//! The machine that runs: dispatcher, interpreter, deopt, system calls, signals

pub mod census;
pub mod changes;
pub mod config;
mod dispatch;
pub mod entry;
pub mod heap;
pub mod interp;
pub mod memory;
mod perf_map;
pub mod process;
pub mod profile;
pub mod signal;
mod start;
pub mod stats;
mod sync;
pub mod syscall;

pub use start::{RunError, run};

#[cfg(test)]
mod testing;
