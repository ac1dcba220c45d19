//! Processes: making them, turning them into other programs, ending them (DESIGN 7).

mod clone;
pub mod exec;
#[cfg(test)]
mod tests;

use crate::entry::{self, Call};

/// Ends the process with the guest's status. No destructors, no exit handlers: those of the host are none of the guest's,
/// and a vfork child's would be its parent's.
pub fn exit(status: i32) -> ! {
    loop {
        // SAFETY: ends the process.
        unsafe { entry::raw(&Call::new(libc::SYS_exit_group, &[status as u64])) };
    }
}

/// Says why a guest cannot go on.
pub(crate) fn complain(text: &str) {
    let line = format!("dynasour: {text}\n");
    // SAFETY: writes bytes of a local to stderr.
    unsafe { entry::raw(&Call::new(libc::SYS_write, &[2, line.as_ptr() as u64, line.len() as u64])) };
}
