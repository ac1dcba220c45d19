//! Runs a guest: the dispatcher, the interpreter, system calls, signals, processes and threads.
//!
//! [`run`] starts a guest. It makes one machine for the process (`dispatch`), which owns the code
//! cache. Each guest thread has a dispatcher, which runs the guest in native code or in the
//! interpreter (`interp`), and a `System` (`kernel`), which does for the guest what the kernel
//! would do.
//!
//! | module | what it is for |
//! | --- | --- |
//! | `dispatch` | chooses how guest code is executed; makes, links and drops fragments |
//! | [`interp`] | executes `base` |
//! | [`kernel`] | system calls, signals, processes and threads of the guest |
//! | [`changes`] | finds out when guest code changes |
//! | [`memory`] | the host's accesses to guest memory |
//! | [`observe`] | statistics, census, perf map |
//! | [`config`] | what the user asked for |
//!
//! The order of the locks is in `sync`. Example: `run(&config)` with the program `ls` runs `ls` and
//! returns only if `ls` could not be started.

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

pub use dynasour_emitter::silence_allocator;
pub use start::{RunError, run};

#[cfg(test)]
mod testing;
