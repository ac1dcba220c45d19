//! The machine that runs: dispatcher, interpreter, deopt, system calls, signals

pub mod config;
pub mod entry;
pub mod interp;
pub mod memory;
pub mod process;
pub mod signal;
pub mod stats;
pub mod syscall;

#[cfg(test)]
mod testing;
