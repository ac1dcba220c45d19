//! Guest processes and threads: their state, making them, turning them into other programs, ending
//! them, and delivering their signals (docs/design.md, "Running a guest").
//!
//! | file | owns |
//! | --- | --- |
//! | [`system`] | [`System`]: the kernel's view of one guest thread |
//! | `shared` | `Process`: what the threads of a process share |
//! | `memory`, [`limits`] | the host's ranges, the program break, RLIMIT_AS |
//! | `seccomp` | filters, and calls that become signals |
//! | `report`, `own_files` | the descriptor for the final report; files of `/proc/self` that differ |
//! | `delivery` | signal frames: handlers begin and return |
//! | `clone`, `thread`, `companion`, `identity`, [`exec`] | new threads and processes, execve, ends |
//!
//! A guest thread calls its own [`System`] without a lock; `Process` locks each of its parts.

mod clone;
mod companion;
mod delivery;
pub mod exec;
pub(crate) mod guest_access;
mod identity;
pub mod limits;
pub(crate) mod memory;
pub(crate) mod own_files;
pub(crate) mod report;
pub(crate) mod seccomp;
mod shared;
pub mod system;
#[cfg(test)]
mod tests;
pub(crate) mod thread;

pub(crate) use companion::Place;
pub(crate) use identity::assume as assume_identity;
pub(crate) use shared::{InCommon, Process};
pub(crate) use system::Done;
pub use system::{Config, Engine, Inherited, Moved, Outcome, Registers, Segments, System};
use thread::exit_first;
pub use thread::{Ending, ThreadBody};

use crate::kernel::entry::{self, Call};

/// Ends the process with the guest's status. No destructors, no exit handlers: those of the host
/// are none of the guest's, and a vfork child's would be its parent's.
pub fn exit(status: i32) -> ! {
    loop {
        // SAFETY: ends the process.
        unsafe { entry::raw(&Call::new(libc::SYS_exit_group, &[status as u64])) };
    }
}

/// Writes to a descriptor as far as that goes. Output of ours must not change what becomes of the
/// guest.
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

/// Says why a guest cannot go on.
pub(crate) fn complain(text: &str) {
    write_all(libc::STDERR_FILENO, format!("dynasour: {text}\n").as_bytes());
}
