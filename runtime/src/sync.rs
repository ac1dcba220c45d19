//! The locks of the runtime, and the order in which they are taken (`docs/design.md`,
//! "Protocols").
//!
//! Data: none. The locks belong to the modules in the list.
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
//!    ([`crate::kernel::process::thread`]), then seccomp filters ([`crate::kernel::syscall`])
//! 5. the exclusive right to change code. It is the exception to the rule about waiting: the thread
//!    that has it waits until the other threads have come out of guest code. They need none of the
//!    locks above for that
//! 6. idle dispatchers ([`crate::dispatch`])
//! 7. what is kept for fragments that are made later
//!    ([`crate::dispatch`]), then the fragments
//! 8. sites of system calls, then patches ([`crate::changes::patches`]), then the footprint: which
//!    guest code was read ([`crate::dispatch`])
//! 9. the list of threads, then the changes that were posted to each thread
//! 10. the state of pages of guest code ([`crate::changes::CodePages`])
//!
//! The lock of the helper thread ([`crate::kernel::process`]) is taken by a thread that holds no other, and
//! held while the helper is started or waited for, which takes no other lock meanwhile. What the helper
//! has compiled lies behind a lock that is held for nothing else.
//!
//! A fork in a process with threads holds all of them, so that they are free in the child. A new
//! lock gets a rank in this list, and is taken in [`crate::kernel::process::Process::with_locks`]
//! or in [`crate::kernel::process::Engine::with_locks`].
//!
//! A signal handler takes the fragments' lock and the lock of the code pages, and it does so only
//! if the interrupted instruction is in the code cache: no thread holds a lock there.
//!
//! Example: a thread that holds lock 3 may take lock 7. A thread that holds lock 7 and needs lock 3
//! must release lock 7 first.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`. Poisoning is ignored: a panic of a host thread ends the process, so no thread
/// uses the data afterwards.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
