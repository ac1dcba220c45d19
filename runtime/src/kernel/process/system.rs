//! [`System`]: the kernel as one guest thread sees it. [`Engine`]: what system calls need of the
//! dispatcher that runs the guest's code.
//!
//! Data: [`System`] holds the state that the kernel keeps for a thread and that the host emulates:
//! mask, alternate stack, last fault, filters. What the threads of a process share is in
//! [`Process`], behind its locks.
//!
//! Invariant: the kernel's mask of the thread is `host_mask(mask)` whenever the guest's code runs
//! and no accepted signal waits for its delivery.
//!
//! Called by the guest's own thread only, outside native code; no lock. Only [`SignalState`] is
//! also accessed by the signal handler that interrupts this thread.
//!
//! Example: `rt_sigprocmask` in the guest changes `System::mask`, and the kernel gets the same mask
//! without the six synchronous signals.

use std::ffi::CString;
use std::ops::Range;
use std::sync::Arc;

use dynasour_guest::ThreadContext;
use dynasour_guest::image::StackPlace;
use dynasour_guest::space::{Brk, MapEntry};

use super::exec::{Arguments, Follow};
use super::limits::Limit;
use super::memory::Memory;
use super::report::{Report, Reports};
use super::seccomp::{Dispatch, Seccomp};
use super::{CompanionSeat, InCommon, Process, ThreadBody};
use crate::changes::{Code, CodePages};
use crate::kernel::entry;
use crate::kernel::signal::altstack::AltStack;
use crate::kernel::signal::samples::Samples;
use crate::kernel::signal::{
    self, FaultHooks, MAX_SIGNAL, SIG_IGN, SigAction, SigInfo, SigSet, SignalState,
};
use crate::kernel::xstate;

/// Host memory that was moved to other addresses.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "the guest's view of the address space must learn of it: System::host_moved"]
pub struct Moved {
    /// The old ranges, which are unmapped now.
    pub from: Vec<Range<u64>>,
    /// The new ranges.
    pub to: Vec<Range<u64>>,
}

/// The general registers of a guest thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registers {
    /// General registers by encoding number.
    pub gpr: [u64; 16],
    /// The next instruction; during a system call, the one behind it.
    pub rip: u64,
    /// The flags.
    pub rflags: u64,
    /// The FS base and the GS base.
    pub bases: [u64; 2],
}

/// The selectors that a 64-bit process can load: ES, DS, FS, GS. CS and SS never change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Segments {
    pub(crate) es: u16,
    pub(crate) ds: u16,
    pub(crate) fs: u16,
    pub(crate) gs: u16,
}

/// What system calls need of the dispatcher that runs the guest's code.
pub trait Engine: Code {
    /// Moves the engine's memory out of `range`, which the guest wants to map. Returns what was
    /// moved, in this order; nothing if there is no memory of the engine's, or it cannot be moved.
    fn make_room(&mut self, _range: &Range<u64>) -> Vec<Moved> {
        Vec::new()
    }

    /// Makes the report: the process is about to execute a program that is not translated.
    fn report(&mut self, system: &System);

    /// Ends the assumption `private_memory`: from now on other threads, processes or devices may
    /// change memory that the guest reads.
    fn private_memory_lost(&mut self);

    /// Notes that from now on the guest handles faults, so it can see its state at a fault.
    fn faults_are_handled(&mut self);

    /// Notes that from now on a thread may wait in a fault that another one serves (userfaultfd(2)):
    /// signals of the host's would interrupt that, which the guest could see.
    fn faults_are_served(&mut self);

    /// In the child of a fork, which has a copy of everything: gives it caches of its own.
    fn after_fork_child(&mut self, context: &ThreadContext);

    /// Runs a vfork child from `context.rip` on, without generating code. The child shares all
    /// memory with its suspended parent. It ends by [`crate::kernel::process::exit`],
    /// [`crate::kernel::process::Death`] or a successful execve. What it has allocated stays allocated
    /// in the parent.
    fn run_vfork_child(&mut self, context: &mut ThreadContext, system: &mut System) -> !;

    /// In the parent: cleans up after the child of [`Engine::run_vfork_child`], which is gone.
    fn vfork_child_gone(&mut self);

    /// Makes the other threads of this process leave guest code and system calls.
    fn call_threads(&mut self);

    /// The registers of thread `tid`, which shares this memory and is not running. `None` if its
    /// context does not hold them.
    fn registers_of(&self, tid: i32) -> Option<Registers>;

    /// Makes thread `tid`, which shares this memory, come out of guest code and park before it would
    /// execute any. Returns the id of its process; none if there is no such thread.
    fn park(&self, tid: i32) -> Option<i32>;

    /// Is thread `tid` parked? Then it holds no lock.
    fn is_parked(&self, tid: i32) -> bool;

    /// Ends [`Engine::park`], which has found the thread.
    fn unpark(&self, tid: i32);

    /// A dispatcher for a new thread of this guest; `None` if there is no memory for it. Calls
    /// `protect` with memory that the guest must not touch.
    fn new_thread(&mut self, protect: &dyn Fn(Range<u64>)) -> Option<Box<dyn ThreadBody>>;

    /// Calls `f` with every lock of the engine's held.
    fn with_locks(&mut self, f: &mut dyn FnMut());
}

/// How the guest goes on after a system call, a fault or the delivery of a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The thread goes on at `context.rip`.
    Continue,
    /// The process asked to exit with this status: [`crate::kernel::process::exit`].
    Exit(i32),
    /// The thread alone asked to exit with this status; its asynchronous signals are blocked.
    ThreadExit(i32),
    /// This signal kills the process: [`crate::kernel::process::Death`].
    Killed(i32),
}

/// The result of a system call of the guest's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Done {
    /// The call was made; this value goes into rax.
    Value(i64),
    /// The call was not made, because a signal is pending. It is made after the delivery.
    Restart,
    /// The guest's registers are complete; nothing goes into rax.
    Registers,
    /// As [`Done::Registers`], and the guest goes on in this way.
    Outcome(Outcome),
}

impl Done {
    pub(crate) fn error(errno: i32) -> Done {
        Done::Value(-i64::from(errno))
    }
}

/// The configuration of a [`System`] at the start.
pub struct Config {
    /// Absolute path of the file that the guest runs (of a script, its interpreter). The guest sees
    /// it as `/proc/self/exe`.
    pub executable: CString,
    /// How the programs that the guest executes are translated; `None` runs them natively.
    pub follow: Option<Follow>,
    /// The guest's program break.
    pub brk: Brk,
    /// The first thread's stack.
    pub stack: StackPlace,
    /// What the process reports when it ends.
    pub reports: Reports,
    /// The descriptor of a file with the filters of system calls that the guest inherits.
    pub seccomp: Option<i32>,
    /// The guest's limit of the address space, if it differs from the kernel's.
    pub address_space: Option<Limit>,
    /// The address space's code pages.
    pub pages: Arc<CodePages>,
}

impl Config {
    /// The configuration of a guest that runs `executable`, executes other programs natively,
    /// inherits nothing and makes no report.
    pub fn alone(executable: CString, brk: Brk) -> Config {
        Config {
            executable,
            follow: None,
            brk,
            stack: StackPlace::default(),
            reports: Reports::Nothing,
            seccomp: None,
            address_space: None,
            pages: Arc::default(),
        }
    }
}

/// Dispositions and mask that the process had before the host changed them.
pub struct Inherited {
    /// Dispositions by signal number.
    actions: [SigAction; MAX_SIGNAL as usize + 1],
    /// The signal mask.
    mask: SigSet,
}

impl Inherited {
    /// Records the present state. Must be called before anything else in the process.
    pub fn record() -> Inherited {
        let mut actions = [SigAction::default(); MAX_SIGNAL as usize + 1];
        for signo in 1..=MAX_SIGNAL {
            let action = signal::kernel_action(signo);
            // Execve resets handlers, so a signal that is not ignored has its default action.
            if action.handler == SIG_IGN {
                actions[signo as usize] = SigAction { handler: SIG_IGN, ..SigAction::default() };
            }
        }
        Inherited { actions, mask: signal::kernel_mask() }
    }
}

/// The kernel as one guest thread sees it.
pub struct System {
    /// The state that all threads of the process share.
    pub(crate) process: Arc<Process>,
    /// The state that the thread shares with the signal handler.
    pub(crate) signals: Box<SignalState>,
    /// What samples the thread, if it runs guest code in place.
    pub(crate) samples: Samples,
    /// The thread's signal mask.
    pub(crate) mask: SigSet,
    /// The temporary mask of an interrupted call (such as sigsuspend). It is in effect until the
    /// signal has been delivered.
    pub(crate) delivery_mask: Option<SigSet>,
    pub(crate) altstack: AltStack,
    /// Error code, exception number and page fault address of the last fault.
    pub(crate) fault: (u64, u64, u64),
    /// The last signal that was found to kill the process, and the flags with which it does.
    pub(crate) killed_by: Option<(SigInfo, u64)>,
    /// RF as a signal frame has restored it, until the next guest instruction; 0 or the flag.
    pub(crate) resume_flag: u64,
    pub(crate) segments: Segments,
    /// The arguments of an execve under way. They are kept here and not on the stack, because a
    /// vfork child does not return from a successful call. Its parent, which owns the child's
    /// `System`, frees them.
    pub(crate) exec_arguments: Option<Arguments>,
    /// The address of a word that is cleared, and whose waiter is woken, when the thread ends
    /// (`set_tid_address`); 0 for none.
    pub(crate) clear_at_end: u64,
    /// The filters of its system calls.
    pub(crate) seccomp: Seccomp,
    /// Which of its calls become signals (`PR_SET_SYSCALL_USER_DISPATCH`).
    pub(crate) dispatch: Option<Dispatch>,
    /// Its seat, if it is the first thread of a companion.
    pub(crate) companion_seat: Option<Arc<CompanionSeat>>,
    /// It has made its parent its tracer (`PTRACE_TRACEME`).
    pub(crate) asked_for_tracer: bool,
}

impl System {
    /// The state of the first thread of a new guest process.
    pub fn new(inherited: Inherited, config: Config) -> System {
        let report = Report::new(config.reports);
        let memory = Memory::new(config.brk, config.stack);
        let limit = config.address_space;
        System {
            process: Process::new(
                config.executable,
                config.follow,
                inherited.actions,
                memory,
                limit,
                config.pages,
                report,
            ),
            signals: SignalState::new(inherited.mask),
            samples: Samples::default(),
            mask: inherited.mask,
            delivery_mask: None,
            altstack: AltStack::of_new_process(),
            fault: (0, 0, 0),
            killed_by: None,
            resume_flag: 0,
            segments: Segments::default(),
            exec_arguments: None,
            clear_at_end: 0,
            seccomp: config.seccomp.map_or_else(Seccomp::default, Seccomp::from_file),
            dispatch: None,
            companion_seat: None,
            asked_for_tracer: false,
        }
    }

    /// Is this the process that the user has started?
    pub fn is_first(&self) -> bool {
        self.process.is_first()
    }

    /// The descriptor for the report of this process, negative if only files are reported; none if it has to
    /// make no report.
    pub fn report_to(&self) -> Option<i32> {
        if !self.process.is_first() {
            return None;
        }
        self.process.report().as_ref().map(Report::descriptor)
    }

    /// Signals delivered to handlers so far.
    pub fn delivered(&self) -> u64 {
        self.process.delivered()
    }

    /// The last access of the first thread to the translator's data: it is about to end.
    pub fn leave(&self) {
        self.process.threads().leave();
    }

    /// Says which file the guest runs ([`Config::executable`]), and by this process's mappings which file the
    /// translator is. To be called before anybody shares the process.
    ///
    /// # Panics
    /// Somebody does.
    pub fn set_files(&mut self, executable: CString, maps: &[MapEntry]) {
        Arc::get_mut(&mut self.process).expect("nobody shares it").set_files(executable, maps);
    }

    /// Makes `context`, which is new, this thread's context, with the extended state of a new process. Installs
    /// the handlers of the signals that are always the host's; from here on a guest fault continues
    /// where the hooks say.
    ///
    /// # Errors
    /// No memory for the alternate signal stack.
    ///
    /// # Safety
    /// `context` and `self` must stay where they are while guest code, system calls or signal
    /// handlers run.
    pub unsafe fn start(
        &mut self,
        context: &mut ThreadContext,
        hooks: FaultHooks,
    ) -> std::io::Result<()> {
        debug_assert!(context.xstate.0[32..].iter().all(|byte| *byte == 0), "it is new");
        xstate::begin(&mut context.xstate);
        self.attach(context);
        // SAFETY: the caller's promise.
        unsafe { entry::set_gs_base(context) };
        signal::install(hooks, context)?;
        self.mirror_all();
        self.inherits_blocked();
        signal::set_kernel_mask(signal::host_mask(self.mask));
        Ok(())
    }

    /// Makes the signal handler, which gets `context`, find this thread's [`SignalState`].
    pub(crate) fn attach(&self, context: &mut ThreadContext) {
        context.host_fs_base = entry::fs_base();
        context.signals = std::ptr::from_ref(&*self.signals) as u64;
    }

    /// The state with which a vfork child starts: copies of what the kernel copies. The address
    /// space is shared.
    pub(crate) fn for_vfork_child(&self, shared_actions: bool) -> Box<System> {
        let process = self.process.for_vfork_child(shared_actions);
        Box::new(System { altstack: self.altstack, ..self.for_child(process) })
    }

    /// The state with which a companion starts: copies of what the kernel copies.
    pub(crate) fn for_companion(&self, in_common: InCommon, clear_at_end: u64) -> System {
        System { clear_at_end, ..self.for_child(self.process.for_companion(in_common)) }
    }

    /// The state with which a new thread starts.
    pub(crate) fn for_thread(&self, clear_at_end: u64) -> System {
        System { clear_at_end, ..self.for_child(self.process.clone()) }
    }

    fn for_child(&self, process: Arc<Process>) -> System {
        System {
            process,
            signals: SignalState::new(self.mask),
            samples: Samples::default(),
            mask: self.mask,
            delivery_mask: None,
            altstack: AltStack::default(),
            fault: self.fault,
            killed_by: None,
            resume_flag: 0,
            segments: self.segments,
            exec_arguments: None,
            clear_at_end: 0,
            seccomp: self.seccomp.clone(),
            dispatch: None,
            companion_seat: None,
            asked_for_tracer: false,
        }
    }
}
