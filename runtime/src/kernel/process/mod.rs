//! Guest processes and threads: their state, making them, executing other programs in them, ending
//! them, and delivering their signals (docs/design.md, "Running a guest").
//!
//! | file | owns |
//! | --- | --- |
//! | [`system`] | [`System`]: the kernel's view of one guest thread |
//! | `shared` | `Process`: what the threads of a process share |
//! | `memory`, [`limits`] | the host's ranges, the program break, RLIMIT_AS |
//! | `seccomp` | filters of system calls, and calls that become signals |
//! | `report` | the descriptor for the final report |
//! | `own_files` | files of `/proc/self` that the guest must see otherwise than the host |
//! | `others_executable` | the executables of other processes that run under the translator |
//! | `identity` | the name and command line that `/proc` shows of the process |
//! | `delivery` | signal frames: starting the guest's handlers and returning from them |
//! | `death` | the end of the process by a signal |
//! | `clone`, `thread`, `companion` | new threads and processes, and their ends |
//! | [`exec`] | executing another program |
//! | `guest_access` | reads and writes of guest memory for system calls |
//!
//! Locks: a guest thread calls its own [`System`] without a lock. Each part of `Process` that
//! changes has a lock of its own, which is held for one access or one call to the kernel. A fork of
//! a process that has had several threads holds all of them, in the order of
//! `Process::with_locks`.
//!
//! Example: a thread calls `clone` with the flags of `pthread_create`. The table in
//! `kernel/syscall` leads to `System::clone_call`, which takes a seat from `Process::threads`,
//! makes a host thread that runs on it, and returns the id of the new thread in rax.

mod clone;
mod companion;
mod death;
mod delivery;
pub mod exec;
pub(crate) mod guest_access;
pub(crate) mod helper;
mod identity;
pub mod limits;
pub(crate) mod memory;
mod others_executable;
pub(crate) mod own_files;
pub(crate) mod report;
pub(crate) mod seccomp;
mod shared;
mod stack_limit;
pub mod system;
#[cfg(test)]
mod tests;
pub(crate) mod thread;
pub mod translator;

pub(crate) use companion::CompanionSeat;
pub use death::Death;
pub(crate) use identity::assume as assume_identity;
pub use report::Reports;
pub(crate) use shared::{InCommon, Process};
pub(crate) use system::Done;
pub use system::{Config, Engine, Inherited, Moved, Outcome, Registers, Segments, System};
use thread::exit_first;
pub use thread::{Ending, ThreadBody};

use crate::kernel::entry::{self, Call};

/// Ends the process with the guest's status, without destructors and exit handlers: the C library
/// that would run them is the host's, and in a vfork child they would be its parent's.
pub fn exit(status: i32) -> ! {
    loop {
        // SAFETY: ends the process.
        unsafe { entry::raw(&Call::new(libc::SYS_exit_group, &[status as u64])) };
    }
}

/// Writes `bytes` to a descriptor and gives up at the first error: a failure to print the host's
/// messages must not change how the guest runs.
pub(crate) fn write_all(fd: i32, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let call =
            Call::new(libc::SYS_write, &[fd as u64, bytes.as_ptr() as u64, bytes.len() as u64]);
        // SAFETY: writes bytes of a slice.
        match unsafe { entry::raw(&call) } {
            written @ 1.. => bytes = bytes.get(written as usize..).unwrap_or_default(),
            error if error == -i64::from(libc::EINTR) => {}
            _ => return,
        }
    }
}

/// Prints on standard error why the guest cannot go on.
pub(crate) fn complain(text: &str) {
    write_all(libc::STDERR_FILENO, format!("dynasour: {text}\n").as_bytes());
}
