//! Locks of the runtime, and the order in which they are taken (`docs/design.md`, "Protocols").
//!
//! **Ranks.** A thread that holds a lock takes only locks further down this list. While it holds
//! one, it runs no guest code, waits for no other guest thread, and makes no system call for the
//! guest that may sleep.
//!
//! 1. signal actions ([`crate::kernel::process::Process::actions`])
//! 2. the descriptor for the report ([`crate::kernel::process::Process::report`])
//! 3. the guest's view of the address space ([`crate::kernel::process::Process::memory`]), then the
//!    limit on its size
//! 4. places of companions ([`crate::kernel::process`]), then free seats of threads
//!    ([`crate::kernel::process::thread`]), then filters of system calls
//!    ([`crate::kernel::syscall`])
//! 5. the exclusive right to change code. It is the exception: the thread that has it waits until
//!    the others have come out of guest code, for which they need none of the locks above
//! 6. resting dispatchers ([`crate::dispatch`])
//! 7. fragments
//! 8. which guest code was read
//! 9. the list of threads, and what was posted to each
//! 10. what is known of guest code ([`crate::changes::CodePages`])
//!
//! A fork in a process with threads holds them all, so that the child finds them free. A new lock
//! has a place here and in [`crate::kernel::process::Process::with_locks`] or
//! [`crate::kernel::process::Engine::with_locks`].
//!
//! A signal handler takes the fragments' lock and the lock of the code pages, and only if the
//! interrupted instruction is in the code cache: a thread never holds a lock there.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. A panic of a host thread ends the process, so no thread goes on with a poisoned lock.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
