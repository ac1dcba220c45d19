//! The kernel as one guest thread sees it ([`System`]), and what system calls ask of the machine
//! that runs guest code ([`Engine`]).

use std::ffi::CString;
use std::ops::Range;
use std::sync::Arc;

use dynasour_guest::ThreadContext;
use dynasour_guest::space::Brk;

use super::exec::{Arguments, Follow};
use super::limits::Limit;
use super::memory::Memory;
use super::report::Report;
use super::seccomp::{Dispatch, Seccomp};
use super::{CompanionSeat, InCommon, Process, ThreadBody};
use crate::changes::{Code, CodePages};
use crate::kernel::entry;
use crate::kernel::signal::altstack::AltStack;
use crate::kernel::signal::{
    self, FaultHooks, MAX_SIGNAL, SIG_IGN, SigAction, SigSet, SignalState,
};
use crate::kernel::xstate;

/// Memory of the host's that has gone elsewhere.
#[derive(Debug)]
pub struct Moved {
    /// The ranges that it left: they are free.
    pub from: Vec<Range<u64>>,
    /// The ranges that it took instead.
    pub to: Vec<Range<u64>>,
}

/// The general registers of a guest thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registers {
    /// In the order of their numbers.
    pub gpr: [u64; 16],
    /// The next instruction, behind a system call that is being made.
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

/// What system calls ask of the machine that runs guest code.
pub trait Engine: Code {
    /// The guest wants `range` to itself. If memory of the engine's is there that can be elsewhere,
    /// it is from now on.
    fn make_room(&mut self, _range: &Range<u64>) -> Option<Moved> {
        None
    }

    /// The process is about to become one that is not translated: the last chance to report.
    fn report(&mut self, system: &System);

    /// From now on other processes or devices may change memory that the guest reads.
    fn private_memory_lost(&mut self);

    /// From now on the guest can see what state a fault finds it in.
    fn faults_are_handled(&mut self);

    /// This is a new process with a copy of everything: give it caches of its own.
    fn after_fork_child(&mut self);

    /// Runs a child that shares all memory with its suspended parent, starting at `context.rip`,
    /// without making code. It ends by [`crate::kernel::process::exit`],
    /// [`crate::kernel::signal::die`] or a successful execve. Everything it allocates stays with
    /// the parent.
    fn run_vfork_child(&mut self, context: &mut ThreadContext, system: &mut System) -> !;

    /// In the parent: the child of [`Engine::run_vfork_child`] is gone, wherever it was.
    fn vfork_child_gone(&mut self);

    /// Makes the other threads of this process come out of guest code and system calls.
    fn call_threads(&mut self);

    /// The registers of a thread of this memory, which does not run, if they are in its context.
    fn registers_of(&self, tid: i32) -> Option<Registers>;

    /// What runs a new thread of this guest; `None` if there is no memory for it. `protect` is to
    /// be told of memory that the guest must not touch.
    fn new_thread(&mut self, protect: &dyn Fn(Range<u64>)) -> Option<Box<dyn ThreadBody>>;

    /// Calls `f` with every lock of the engine's held.
    fn with_locks(&mut self, f: &mut dyn FnMut());
}

/// What became of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It goes on at `context.rip`.
    Continue,
    /// It asked to exit with this status: [`crate::kernel::process::exit`].
    Exit(i32),
    /// The thread alone asked to exit with this status; its asynchronous signals are blocked.
    ThreadExit(i32),
    /// A signal kills it: [`crate::kernel::signal::die`].
    Killed(i32),
}

/// How a call ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Done {
    /// With this in rax.
    Value(i64),
    /// It was not made: a signal comes first.
    Restart,
    /// The registers say everything already.
    Registers,
    /// The registers say everything already; see there.
    Outcome(Outcome),
}

impl Done {
    pub(crate) fn error(errno: i32) -> Done {
        Done::Value(-i64::from(errno))
    }
}

/// What a [`System`] is told at the start.
pub struct Config {
    /// Absolute path of the file the guest runs (a script's interpreter): what `/proc/self/exe` is
    /// to it.
    pub executable: CString,
    /// How the guest's `execve` goes on; `None` runs new programs natively.
    pub follow: Option<Follow>,
    /// The guest's program break.
    pub brk: Brk,
    /// The first thread's stack.
    pub stack: Range<u64>,
    /// Whether there is something to report when the process ends.
    pub reports: bool,
    /// A file with the filters of system calls that the guest inherits.
    pub seccomp: Option<i32>,
    /// How large the address space may become, if the guest is to believe otherwise than the
    /// kernel.
    pub address_space: Option<Limit>,
    /// The address space's code pages.
    pub pages: Arc<CodePages>,
}

impl Config {
    /// Of a guest that runs `executable`, follows nothing, inherits nothing, and is not reported
    /// on.
    pub fn alone(executable: CString, brk: Brk) -> Config {
        Config {
            executable,
            follow: None,
            brk,
            stack: 0..0,
            reports: false,
            seccomp: None,
            address_space: None,
            pages: Arc::default(),
        }
    }
}

/// What the process had before anything of ours changed it.
pub struct Inherited {
    /// Dispositions by signal number.
    actions: [SigAction; MAX_SIGNAL as usize + 1],
    /// The signal mask.
    mask: SigSet,
}

impl Inherited {
    /// Records it. The first thing to do in a process.
    pub fn record() -> Inherited {
        let mut actions = [SigAction::default(); MAX_SIGNAL as usize + 1];
        for signo in 1..=MAX_SIGNAL {
            let action = signal::kernel_action(signo);
            // Handlers do not survive execve: what is not ignored is the default.
            if action.handler == SIG_IGN {
                actions[signo as usize] = SigAction { handler: SIG_IGN, ..SigAction::default() };
            }
        }
        Inherited { actions, mask: signal::kernel_mask() }
    }
}

/// The kernel as one guest thread sees it.
pub struct System {
    /// What it shares with the other threads.
    pub(crate) process: Arc<Process>,
    pub(crate) signals: Box<SignalState>,
    /// The thread's signal mask.
    pub(crate) mask: SigSet,
    /// The mask of an interrupted call that had its own; in effect until the signal is delivered.
    pub(crate) delivery_mask: Option<SigSet>,
    pub(crate) altstack: AltStack,
    /// Error code, exception number and page fault address of the last fault.
    pub(crate) fault: (u64, u64, u64),
    /// RF, between a return from a signal and the next guest instruction.
    pub(crate) resume_flag: u64,
    pub(crate) segments: Segments,
    /// Arguments of an execve under way: they must outlive a vfork child that does not return from
    /// it.
    pub(crate) exec_arguments: Option<Arguments>,
    /// A word that is cleared and woken when the thread ends (`set_tid_address`); 0 for none.
    pub(crate) clear_at_end: u64,
    /// What it may ask of the kernel.
    pub(crate) seccomp: Seccomp,
    /// Which of its calls are signals instead.
    pub(crate) dispatch: Option<Dispatch>,
    /// Where it runs, if it is the first thread of a companion.
    pub(crate) companion_seat: Option<Arc<CompanionSeat>>,
}

impl System {
    /// The state of the first thread of a new guest process.
    pub fn new(inherited: Inherited, config: Config) -> System {
        let report = config.reports.then(Report::new);
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
            mask: inherited.mask,
            delivery_mask: None,
            altstack: AltStack::of_new_process(),
            fault: (0, 0, 0),
            resume_flag: 0,
            segments: Segments::default(),
            exec_arguments: None,
            clear_at_end: 0,
            seccomp: config.seccomp.map_or_else(Seccomp::default, Seccomp::from_file),
            dispatch: None,
            companion_seat: None,
        }
    }

    /// Where the report of this process goes, if it has to make one: a descriptor that nobody else
    /// writes to now.
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

    /// The first thread is about to end, and needs nothing of the host's any more.
    pub fn leave(&self) {
        self.process.threads().leave();
    }

    /// Makes `context` this thread's and takes over the signals that are always the host's. From
    /// here on guest faults come back through the hooks. Also gives the context what a new process
    /// has in its extended state.
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
        xstate::reset(&mut context.xstate);
        self.attach(context);
        // SAFETY: the caller's promise.
        unsafe { entry::set_gs_base(context) };
        signal::install(hooks)?;
        self.mirror_all();
        self.inherits_blocked();
        signal::set_kernel_mask(signal::host_mask(self.mask));
        Ok(())
    }

    /// Makes `context` find this state in a signal handler.
    pub(crate) fn attach(&self, context: &mut ThreadContext) {
        context.host_fs_base = entry::fs_base();
        context.signals = std::ptr::from_ref(&*self.signals) as u64;
    }

    /// What a vfork child starts with: copies of what the kernel copies. The address space stays
    /// one.
    pub(crate) fn for_vfork_child(&self, shared_actions: bool) -> Box<System> {
        let process = self.process.for_vfork_child(shared_actions);
        Box::new(System { altstack: self.altstack, ..self.for_child(process) })
    }

    /// What a companion starts with: copies of what the kernel copies.
    pub(crate) fn for_companion(&self, in_common: InCommon, clear_at_end: u64) -> System {
        System { clear_at_end, ..self.for_child(self.process.for_companion(in_common)) }
    }

    /// What a new thread starts with.
    pub(crate) fn for_thread(&self, clear_at_end: u64) -> System {
        System { clear_at_end, ..self.for_child(self.process.clone()) }
    }

    fn for_child(&self, process: Arc<Process>) -> System {
        System {
            process,
            signals: SignalState::new(self.mask),
            mask: self.mask,
            delivery_mask: None,
            altstack: AltStack::default(),
            fault: self.fault,
            resume_flag: 0,
            segments: self.segments,
            exec_arguments: None,
            clear_at_end: 0,
            seccomp: self.seccomp.clone(),
            dispatch: None,
            companion_seat: None,
        }
    }
}
