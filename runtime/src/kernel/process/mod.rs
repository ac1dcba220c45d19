//! Processes: making them, turning them into other programs, ending them (docs/design.md, "Running
//! a guest").

mod clone;
mod companion;
pub mod exec;
mod identity;
mod shared;
#[cfg(test)]
mod tests;
pub(crate) mod thread;

pub(crate) use companion::Place;
pub(crate) use identity::assume as assume_identity;
pub(crate) use shared::{InCommon, Process};
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
