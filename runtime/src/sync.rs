//! Locks of the runtime.
//!
//! **Ranks.** Whoever holds a lock takes only ones further down this list, and nobody waits for another guest thread, runs
//! guest code or performs a system call of the guest's that may sleep while holding one:
//!
//! 1. signal actions ([`crate::process::Process::actions`])
//! 2. the descriptor for the report ([`crate::process::Process::report`])
//! 3. the guest's view of the address space ([`crate::process::Process::memory`])
//! 4. places of companions ([`crate::process`]), then free seats of threads ([`crate::process::thread`])
//! 5. the exclusive right to change code: the exception. Who has it waits until the others have come out of guest code, for which
//!    they need none of the locks above
//! 6. resting dispatchers ([`crate::dispatch`])
//! 7. fragments
//! 8. which guest code was read
//! 9. the list of threads, and what was posted to each
//! 10. what is known of guest code ([`crate::changes::CodePages`])
//!
//! A fork in a process with threads holds them all, so that the child finds them free; a new lock has a place here and in
//! [`crate::process::Process::with_locks`] or [`crate::syscall::Engine::with_locks`].
//!
//! A signal handler takes the fragments' lock, and only when the interrupted instruction is in the code cache: a thread is
//! never there with a lock. The lock of the code pages is also taken after a fault of a store into guest memory.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. A panic of a host thread ends the process, so a poisoned lock is never seen by anybody who goes on.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
