//! The machine that runs: dispatcher, interpreter, deopt, system calls, signals

pub mod config;
pub mod interp;
pub mod memory;
pub mod stats;
