//! What the kernel and the processor's privileged side do for a program, done for a guest.
//!
//! | folder | what it does |
//! | --- | --- |
//! | [`entry`] | transfers control from the host to native code and back |
//! | [`syscall`] | system calls, and instructions that the kernel emulates or the processor traps |
//! | [`signal`] | signals: the handlers of the host, delivery to the guest, frames |
//! | [`process`] | threads, fork, execve, exit |

pub mod entry;
pub mod process;
mod release;
pub mod signal;
pub mod syscall;
