//! [`Process`]: the state of system calls that all threads of one guest process share.
//!
//! Each part has a lock of its own, or is atomic; ranks of locks are in [`crate::sync`]. Threads
//! hold the process by an `Arc`. A vfork child and a companion have a process of their own that
//! shares the parts which the kernel shares.
//!
//! Example: `sigaction` in one thread locks `actions`; the next signal of any thread is delivered
//! by the new disposition.

use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::companion::Places;
use super::exec::Follow;
use super::thread::Threads;
use crate::changes::CodePages;
use crate::kernel::process::limits::Limit;
use crate::kernel::process::memory::Memory;
use crate::kernel::process::report::Report;
use crate::kernel::process::seccomp;
use crate::kernel::signal::{MAX_SIGNAL, SigAction};
use crate::sync::lock;

/// The guest's dispositions, by signal number.
pub(crate) type Actions = [SigAction; MAX_SIGNAL as usize + 1];

/// One guest process. A vfork child and a companion
/// ([`super::companion`]) have one of their own, with the same [`Memory`].
pub(crate) struct Process {
    executable: Arc<CStr>,
    follow: Option<Arc<Follow>>,
    actions: Arc<Mutex<Actions>>,
    memory: Arc<Mutex<Memory>>,
    pages: Arc<CodePages>,
    /// Shared by the processes that share descriptors.
    report: Arc<Mutex<Option<Report>>>,
    is_first: AtomicBool,
    delivered: AtomicU64,
    threads: Threads,
    seccomp: seccomp::Shared,
    address_space: Mutex<Option<Limit>>,
    /// Whether it is a vfork child.
    is_borrower: bool,
    /// Whether another process may run in the same memory at the same time.
    shares_memory: AtomicBool,
    places: Arc<Places>,
}

/// What a new process has in common with its maker, besides memory.
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
            places: Arc::default(),
        })
    }

    /// The process of a vfork child. It has copies of the parts that the kernel copies
    /// (dispositions unless they are shared) and the same address space.
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
            places: self.places.clone(),
        }
    }

    /// May another process run in the same memory at the same time? Then this process handles the
    /// signals that would end it, so that it never ends while it holds a lock.
    pub(crate) fn shares_memory(&self) -> bool {
        self.shares_memory.load(Ordering::Relaxed)
    }

    /// From now on another process runs in the same memory. Was it so before?
    pub(crate) fn share_memory(&self) -> bool {
        self.threads.share_memory();
        self.shares_memory.swap(true, Ordering::Relaxed)
    }

    /// The places on which companions run.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// The limit of the address space, if the guest has set another one than the kernel has.
    pub(crate) fn address_space(&self) -> MutexGuard<'_, Option<Limit>> {
        lock(&self.address_space)
    }

    /// The filters of system calls that one thread has set for all.
    pub(crate) fn seccomp(&self) -> &seccomp::Shared {
        &self.seccomp
    }

    /// The threads.
    pub(crate) fn threads(&self) -> &Threads {
        &self.threads
    }

    /// Whether it borrows its parent's memory.
    pub(crate) fn is_borrower(&self) -> bool {
        self.is_borrower
    }

    /// Holds every lock while `f` runs.
    pub(crate) fn with_locks<R>(&self, f: impl FnOnce() -> R) -> R {
        let _actions = self.actions();
        let _report = self.report();
        let _memory = self.memory();
        let _limit = self.address_space();
        self.places.held(|| self.threads.held(|| self.seccomp.held(f)))
    }

    /// Absolute path of the file the guest runs: what `/proc/self/exe` is to it.
    pub(crate) fn executable(&self) -> &Arc<CStr> {
        &self.executable
    }

    /// How the guest's `execve` goes on; `None` runs new programs natively.
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

    /// The descriptor of the report at the first process's end, if this process has it, too.
    pub(crate) fn report(&self) -> MutexGuard<'_, Option<Report>> {
        lock(&self.report)
    }

    /// Whether there is a report to make.
    pub(crate) fn reports(&self) -> bool {
        self.is_first() && self.report().is_some()
    }

    /// Whether this is the process that the user started.
    pub(crate) fn is_first(&self) -> bool {
        self.is_first.load(Ordering::Relaxed)
    }

    /// This is a forked child now, which has nothing to report, and memory of its own. Did the
    /// parent share memory, so that signals which end the process were handled?
    pub(crate) fn become_child(&self) -> bool {
        self.places.after_fork_child();
        self.is_first.store(false, Ordering::Relaxed);
        // The descriptor, which is a copy, is closed.
        let reported = self.report().take().is_some();
        self.shares_memory.swap(false, Ordering::Relaxed) || reported
    }

    /// A signal was delivered to a handler.
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
