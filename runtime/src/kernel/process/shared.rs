//! [`Process`]: the state that all threads of one guest process share for system calls.
//!
//! Data: the guest's signal dispositions, its view of the address space, limits, filters of system
//! calls, threads, the descriptor for the report. Processes that share memory (a vfork child, a
//! companion) share some of these parts and have copies of others ([`Process::for_companion`]).
//!
//! Invariants: the address space, its code pages and its companions' seats belong to memory, so
//! processes that share memory share them. Dispositions and the report's descriptor are shared
//! exactly if the guest asked for it (`CLONE_SIGHAND`, `CLONE_FILES`).
//!
//! Called on guest threads; the signal handler does not come here. Each part that changes is atomic
//! or has a lock of its own. A thread that takes several locks takes them in the order of
//! [`Process::with_locks`].
//!
//! Example: a thread calls `sigaction`; it changes [`Process::actions`] under that lock, and the
//! other threads see the new disposition when a signal is delivered to them.

use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::companion::CompanionSeats;
use super::exec::Follow;
use super::thread::Threads;
use crate::changes::CodePages;
use crate::kernel::process::limits::Limit;
use crate::kernel::process::memory::Memory;
use crate::kernel::process::report::Report;
use crate::kernel::process::seccomp;
use crate::kernel::signal::{MAX_SIGNAL, SigAction};
use crate::sync::lock;
use dynasour_guest::space::MapEntry;

/// The guest's dispositions, by signal number.
pub(crate) type Actions = [SigAction; MAX_SIGNAL as usize + 1];

/// One guest process. A vfork child and a companion ([`super::companion`]) have one of their own,
/// with the same [`Memory`].
pub(crate) struct Process {
    executable: Arc<CStr>,
    follow: Option<Arc<Follow>>,
    actions: Arc<Mutex<Actions>>,
    memory: Arc<Mutex<Memory>>,
    pages: Arc<CodePages>,
    /// Shared with the processes that share descriptors.
    report: Arc<Mutex<Option<Report>>>,
    is_first: AtomicBool,
    delivered: AtomicU64,
    threads: Threads,
    seccomp: seccomp::Shared,
    address_space: Mutex<Option<Limit>>,
    /// Whether this is a vfork child.
    is_borrower: bool,
    /// Whether another process may run in the same memory at the same time.
    shares_memory: AtomicBool,
    companion_seats: Arc<CompanionSeats>,
}

/// The parts, besides memory, that a new process shares with its maker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InCommon {
    /// CLONE_SIGHAND
    pub actions: bool,
    /// CLONE_FILES
    pub descriptors: bool,
}

impl Process {
    /// The process that the user started.
    pub(crate) fn new(
        executable: CString,
        follow: Option<Follow>,
        actions: Actions,
        memory: Memory,
        address_space: Option<Limit>,
        pages: Arc<CodePages>,
        report: Option<Report>,
    ) -> Arc<Process> {
        Arc::new(Process {
            executable: executable.into(),
            follow: follow.map(Arc::new),
            actions: Arc::new(Mutex::new(actions)),
            memory: Arc::new(Mutex::new(memory)),
            pages,
            report: Arc::new(Mutex::new(report)),
            is_first: AtomicBool::new(true),
            delivered: AtomicU64::new(0),
            threads: Threads::new(),
            seccomp: seccomp::Shared::default(),
            address_space: Mutex::new(address_space),
            is_borrower: false,
            shares_memory: AtomicBool::new(false),
            companion_seats: Arc::default(),
        })
    }

    /// The process of a vfork child. It shares the address space, and the dispositions if
    /// `shared_actions` is set; the other parts are copies.
    pub(crate) fn for_vfork_child(&self, shared_actions: bool) -> Arc<Process> {
        let in_common = InCommon { actions: shared_actions, descriptors: false };
        Arc::new(Process {
            is_borrower: true,
            threads: Threads::new(),
            shares_memory: AtomicBool::new(self.shares_memory()),
            ..self.sharing_memory(in_common)
        })
    }

    /// The process of a companion.
    pub(crate) fn for_companion(&self, in_common: InCommon) -> Arc<Process> {
        Arc::new(self.sharing_memory(in_common))
    }

    fn sharing_memory(&self, in_common: InCommon) -> Process {
        let actions = if in_common.actions {
            self.actions.clone()
        } else {
            Arc::new(Mutex::new(*self.actions()))
        };
        Process {
            executable: self.executable.clone(),
            follow: self.follow.clone(),
            actions,
            memory: self.memory.clone(),
            pages: self.pages.clone(),
            report: if in_common.descriptors { self.report.clone() } else { Arc::default() },
            is_first: AtomicBool::new(false),
            delivered: AtomicU64::new(0),
            threads: self.threads.of_companion(),
            seccomp: seccomp::Shared::default(),
            address_space: Mutex::new(*self.address_space()),
            is_borrower: false,
            shares_memory: AtomicBool::new(true),
            companion_seats: self.companion_seats.clone(),
        }
    }

    /// Whether another process may run in the same memory at the same time. Then the host catches
    /// the signals that would end this process, and ends it itself while it holds no lock.
    pub(crate) fn shares_memory(&self) -> bool {
        self.shares_memory.load(Ordering::Relaxed)
    }

    /// Notes that from now on another process runs in the same memory. Returns whether that was
    /// noted before.
    pub(crate) fn share_memory(&self) -> bool {
        self.threads.share_memory();
        self.shares_memory.swap(true, Ordering::Relaxed)
    }

    /// The seats of companions of this address space.
    pub(crate) fn companion_seats(&self) -> &CompanionSeats {
        &self.companion_seats
    }

    /// The guest's limit of the address space, if it differs from the kernel's.
    pub(crate) fn address_space(&self) -> MutexGuard<'_, Option<Limit>> {
        lock(&self.address_space)
    }

    /// The filters of system calls that a thread has installed for all threads.
    pub(crate) fn seccomp(&self) -> &seccomp::Shared {
        &self.seccomp
    }

    /// The threads.
    pub(crate) fn threads(&self) -> &Threads {
        &self.threads
    }

    /// Whether this is a vfork child, which borrows its parent's memory.
    pub(crate) fn is_borrower(&self) -> bool {
        self.is_borrower
    }

    /// Holds every lock while `f` runs, for a fork.
    pub(crate) fn with_locks<R>(&self, f: impl FnOnce() -> R) -> R {
        let _actions = self.actions();
        let _report = self.report();
        let _memory = self.memory();
        let _limit = self.address_space();
        self.companion_seats
            .while_locked(|| self.threads.while_locked(|| self.seccomp.while_locked(f)))
    }

    /// The absolute path of the file that the guest runs; the guest sees it as `/proc/self/exe`.
    pub(crate) fn executable(&self) -> &Arc<CStr> {
        &self.executable
    }

    pub(crate) fn set_files(&mut self, executable: CString, maps: &[MapEntry]) {
        self.executable = executable.into();
        if let Some(follow) = self.follow.as_mut().and_then(Arc::get_mut) {
            follow.translator.found(maps);
        }
    }

    /// How the programs that the guest executes are translated; `None` runs them natively.
    pub(crate) fn follow(&self) -> Option<&Arc<Follow>> {
        self.follow.as_ref()
    }

    /// The dispositions.
    pub(crate) fn actions(&self) -> MutexGuard<'_, Actions> {
        lock(&self.actions)
    }

    /// The disposition of one signal.
    pub(crate) fn action(&self, signo: i32) -> SigAction {
        self.actions()[signo as usize]
    }

    /// The guest's view of the address space.
    pub(crate) fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.memory)
    }

    /// The address space's code pages.
    pub(crate) fn pages(&self) -> &CodePages {
        &self.pages
    }

    /// The descriptor for the report at the end of the first process, if this process has it, too.
    pub(crate) fn report(&self) -> MutexGuard<'_, Option<Report>> {
        lock(&self.report)
    }

    /// Whether this process makes a report at its end.
    pub(crate) fn reports(&self) -> bool {
        self.is_first() && self.report().is_some()
    }

    /// Whether this is the process that the user started.
    pub(crate) fn is_first(&self) -> bool {
        self.is_first.load(Ordering::Relaxed)
    }

    /// In a forked child, which reports nothing and has memory of its own. Returns whether the host
    /// caught the signals that would end the parent, which the child need not.
    pub(crate) fn become_child(&self) -> bool {
        self.companion_seats.after_fork_child();
        self.is_first.store(false, Ordering::Relaxed);
        // Dropping the report closes this process's copy of the descriptor.
        let reported = self.report().take().is_some();
        self.shares_memory.swap(false, Ordering::Relaxed) || reported
    }

    /// Counts a signal that was delivered to a handler.
    pub(crate) fn count_delivery(&self) {
        self.delivered.fetch_add(1, Ordering::Relaxed);
    }

    /// Signals delivered to handlers so far.
    pub(crate) fn delivered(&self) -> u64 {
        self.delivered.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn set_follow(this: &mut Arc<Process>, follow: Follow) {
        Arc::get_mut(this).expect("nobody else has it").follow = Some(Arc::new(follow));
    }
}
