//! Test support: runs a test body alone in a forked child. There no other test's thread maps memory
//! at the same time, and no child of another test inherits a descriptor that keeps a program file
//! busy.

use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

/// Runs `body` in a child of its own and fails if it panics or crashes there.
pub(crate) fn in_child(body: impl FnOnce()) {
    // SAFETY: the child runs `body` and exits without returning; glibc keeps malloc usable across
    // fork, and the bodies use nothing else that another thread might hold.
    match unsafe { fork() }.expect("fork") {
        ForkResult::Child => {
            let status = i32::from(catch_unwind(AssertUnwindSafe(body)).is_err());
            // SAFETY: ends the child at once, without the parent's exit handlers.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(
                waitpid(child, None),
                Ok(WaitStatus::Exited(child, 0)),
                "the child's message is on stderr"
            );
        }
    }
}
