//! The machine that runs: dispatcher, interpreter, deopt, system calls, signals

pub mod changes;
pub mod config;
mod dispatch;
pub mod heap;
mod host_call;
pub mod interp;
pub mod kernel;
pub mod memory;
pub mod observe;
mod protection_keys;
mod start;
mod sync;

pub use start::{RunError, run};

#[cfg(test)]
mod testing;
