//! System calls of the guest: passed through, except those that touch what the translator owns
//! (docs/design.md, "Running a guest").
//!
//! | treatment | calls |
//! | --- | --- |
//! | signals, emulated and mirrored ([`crate::kernel::signal`]) | `rt_sig*`, `sigaltstack`, `signalfd(4)`, the masks of `ppoll`, `pselect6`, `epoll_pwait(2)`, `io_pgetevents`, `io_uring_enter` |
//! | end the assumption that memory is private | `io_setup`, `io_uring_setup`, `userfaultfd` |
//! | address space ([`memory`]) | `brk`, `mmap`, `munmap`, `mprotect`, `pkey_mprotect`, `mremap`, `madvise`, `remap_file_pages`, `shmat`, `shmdt` |
//! | processes and threads ([`crate::kernel::process`]) | `fork`, `vfork`, `clone`, `clone3`, `execve(at)`, `exit`, `exit_group`, `set_tid_address` |
//! | the path of the executable ([`paths`]) | `open`, `stat`, `access`, `readlink` and their variants on `/proc/self/exe` |
//! | writes to `/proc/self/mem` ([`process_memory`]) | `write`, `pwrite64`, `writev`, `pwritev(2)` |
//! | what is kept for the report ([`report`]) | `close`, `close_range`, `dup2`, `dup3`, SIGKILL to itself |
//! | the size of the address space ([`limits`]) | `getrlimit`, `setrlimit`, `prlimit64` |
//! | registers of threads of the same memory ([`tracing`]) | `ptrace` |
//! | registers and switches ([`control`]) | `arch_prctl`, `prctl` |
//! | looked at before any of this, and never told to the kernel ([`seccomp`]) | what `seccomp` and `prctl` set |
//! | 32-bit calls (`int 0x80`) | made as they are, or become 64-bit ones ([`int80`]) |
//! | refused with ENOSYS | `rseq`, `modify_ldt`, `set_thread_area`, x32 calls |
//! | everything else | as is |
//!
//! A call made for the guest lies in a window ([`crate::kernel::entry::windowed`]): a signal
//! accepted before it keeps it from being made, and the guest finds itself at the `syscall`
//! instruction again, after its handler.

mod control;
pub(crate) mod int80;
pub mod limits;
pub mod memory;
pub mod paths;
mod process_memory;
pub(crate) mod report;
pub(crate) mod seccomp;
mod segments;
pub mod special;
pub mod tracing;
mod vsyscall;

use std::ffi::CString;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dynasour_guest::ThreadContext;
use dynasour_guest::space::Brk;

use crate::changes::{Code, CodePages};
use crate::kernel::entry::{self, Call};
use crate::kernel::process::exec::{Arguments, Follow};
use crate::kernel::process::{InCommon, Place, Process, ThreadBody};
use crate::kernel::signal::altstack::AltStack;
use crate::kernel::signal::{
    self, FaultHooks, MAX_SIGNAL, SIG_IGN, SigAction, SigSet, SignalState,
};

use limits::Limit;
use memory::{Memory, Moved};
use report::Report;
use seccomp::{ARCHITECTURE, Dispatch, Seccomp};
use special::Segments;
use tracing::Registers;

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
    dispatch: Option<Dispatch>,
    /// Where it runs, if it is the first thread of a companion.
    pub(crate) place: Option<Arc<Place>>,
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
            place: None,
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
        signal::xstate::reset(&mut context.xstate);
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
            place: None,
        }
    }

    /// Performs the system call at which the guest stands: `rip` is behind the instruction, the
    /// number in rax. Signals that arrived meanwhile are delivered.
    pub fn syscall(&mut self, context: &mut ThreadContext, engine: &mut dyn Engine) -> Outcome {
        const SYSCALL_LENGTH: u64 = 2;
        let g = &context.gpr;
        let call = Call { nr: g[0], args: [g[7], g[6], g[2], g[10], g[8], g[9]] };
        let done = if context.pending.load(Ordering::Relaxed) != 0 {
            Done::Restart
        } else if let Some(done) = self.screen(context, &call, ARCHITECTURE) {
            done
        } else {
            self.perform_writing(context, engine, &call)
        };
        match done {
            Done::Value(value) => {
                context.gpr[0] = value as u64;
                context.gpr[1] = context.rip;
                context.gpr[11] = context.rflags;
            }
            Done::Restart => {
                // As after a call that the kernel starts again.
                context.gpr[1] = context.rip;
                context.gpr[11] = context.rflags;
                context.rip = context.rip.wrapping_sub(SYSCALL_LENGTH);
            }
            Done::Registers | Done::Outcome(Outcome::Continue) => {}
            Done::Outcome(outcome) => return outcome,
        }
        self.after_call(context)
    }

    /// Delivers the signals that arrived during a call.
    fn after_call(&mut self, context: &mut ThreadContext) -> Outcome {
        let outcome = match context.pending.load(Ordering::Relaxed) {
            0 => Outcome::Continue,
            _ => self.deliver_pending(context),
        };
        self.resume_flag = 0;
        outcome
    }

    /// Performs a call that may write to pages of code.
    fn perform_writing(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        call: &Call,
    ) -> Done {
        if !self.process.pages().announces_outputs() {
            return self.perform(context, engine, call);
        }
        let process = self.process.clone();
        let _outputs =
            process.pages().announce_outputs(engine, i64::from(call.nr as u32), &call.args);
        self.perform(context, engine, call)
    }

    fn perform(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        call: &Call,
    ) -> Done {
        // The kernel looks at the low half only; bit 30 marks the x32 ABI.
        let nr = i64::from(call.nr as u32);
        if nr & 1 << 30 != 0 {
            return Done::error(libc::ENOSYS);
        }
        match nr {
            libc::SYS_rt_sigaction => self.rt_sigaction(engine, call),
            libc::SYS_rt_sigprocmask => self.rt_sigprocmask(context, call),
            libc::SYS_rt_sigreturn => self.sigreturn(context),
            libc::SYS_rt_sigpending => self.rt_sigpending(call),
            libc::SYS_rt_sigsuspend => self.rt_sigsuspend(context, call),
            libc::SYS_rt_sigtimedwait => self.rt_sigtimedwait(call),
            libc::SYS_sigaltstack => self.sigaltstack(context, call),
            libc::SYS_signalfd | libc::SYS_signalfd4 => self.signalfd(call),
            libc::SYS_rt_tgsigqueueinfo => self.rt_tgsigqueueinfo(call),
            libc::SYS_ppoll => self.with_mask_argument(context, call, 3),
            libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => {
                self.with_mask_argument(context, call, 4)
            }
            libc::SYS_pselect6 | SYS_IO_PGETEVENTS => self.pselect6(context, call),
            libc::SYS_io_uring_enter => self.io_uring_enter(context, call),
            // Nothing of the guest's can be under way.
            libc::SYS_restart_syscall => Done::error(libc::EINTR),

            libc::SYS_brk
            | libc::SYS_mmap
            | libc::SYS_munmap
            | libc::SYS_mprotect
            | libc::SYS_pkey_mprotect
            | libc::SYS_mremap
            | libc::SYS_madvise
            | libc::SYS_remap_file_pages
            | libc::SYS_shmat
            | libc::SYS_shmdt => self.memory_call(engine, nr, call),

            libc::SYS_io_setup | libc::SYS_io_uring_setup | libc::SYS_userfaultfd => {
                let done = self.pass(call);
                engine.private_memory_lost();
                done
            }

            libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3 => {
                self.clone_call(context, engine, call)
            }
            libc::SYS_execve | libc::SYS_execveat => self.exec_call(engine, call),
            libc::SYS_exit => self.exit_thread(context, call.args[0] as i32),
            libc::SYS_exit_group => Done::Outcome(Outcome::Exit(call.args[0] as i32)),
            libc::SYS_set_tid_address => {
                self.clear_at_end = call.args[0];
                self.pass(&Call::new(libc::SYS_gettid, &[]))
            }

            libc::SYS_open
            | libc::SYS_openat
            | libc::SYS_openat2
            | libc::SYS_stat
            | libc::SYS_newfstatat
            | libc::SYS_statx
            | libc::SYS_access
            | libc::SYS_faccessat
            | libc::SYS_faccessat2
            | libc::SYS_readlink
            | libc::SYS_readlinkat => self.path_call(engine, nr, call),

            libc::SYS_write
            | libc::SYS_pwrite64
            | libc::SYS_writev
            | libc::SYS_pwritev
            | libc::SYS_pwritev2 => self.write_call(engine, nr, call),

            libc::SYS_close | libc::SYS_close_range | libc::SYS_dup2 | libc::SYS_dup3 => {
                self.descriptor_call(nr, call)
            }
            libc::SYS_kill | libc::SYS_tkill | libc::SYS_tgkill if self.is_own_end(nr, call) => {
                Done::Outcome(Outcome::Killed(libc::SIGKILL))
            }

            libc::SYS_getrlimit | libc::SYS_setrlimit | libc::SYS_prlimit64 => {
                self.limit_call(nr, call).unwrap_or_else(|| self.pass(call))
            }

            libc::SYS_arch_prctl => {
                control::arch_prctl(context, call).unwrap_or_else(|| self.pass(call))
            }
            libc::SYS_prctl => {
                let switched =
                    self.seccomp_switch(call).or_else(|| control::prctl(call, self.clear_at_end));
                switched.unwrap_or_else(|| self.pass(call))
            }
            libc::SYS_seccomp => self.seccomp_call(call),
            libc::SYS_ptrace => self.ptrace_call(engine, call),
            libc::SYS_membarrier => control::membarrier(call, || self.pass(call)),

            // glibc does without rseq; the others would act on, or from, threads of the kernel or
            // of ours.
            libc::SYS_rseq
            | libc::SYS_modify_ldt
            | libc::SYS_set_thread_area
            | libc::SYS_get_thread_area
            | SYS_MAP_SHADOW_STACK => Done::error(libc::ENOSYS),

            _ => self.pass(call),
        }
    }

    /// `exit`: the thread's end, unless a signal comes first.
    fn exit_thread(&self, context: &ThreadContext, status: i32) -> Done {
        if self.process.is_borrower() {
            return Done::Outcome(Outcome::Exit(status));
        }
        // What is sent to the process from here on is for another thread.
        signal::set_kernel_mask(!signal::FIVE);
        if context.pending.load(Ordering::Relaxed) != 0 {
            // Delivering sets the mask.
            return Done::Restart;
        }
        Done::Outcome(Outcome::ThreadExit(status))
    }

    /// Performs a call as it stands.
    pub(crate) fn pass(&self, call: &Call) -> Done {
        // SAFETY: the guest's own call; what would touch the translator has been sorted out.
        match self.with_held_pending(call.nr, self.mask, || unsafe { entry::windowed(call) }) {
            entry::NOT_ENTERED => Done::Restart,
            value => Done::Value(value),
        }
    }
}

/// Calls that the libc crate does not name.
const SYS_IO_PGETEVENTS: i64 = 333;
const SYS_MAP_SHADOW_STACK: i64 = 453;

/// Reads `N` bytes of guest memory; the error is an errno.
pub(crate) fn guest_read<const N: usize>(address: u64) -> Result<[u8; N], i32> {
    let mut bytes = [0; N];
    if crate::memory::copy_in(address, &mut bytes) == N { Ok(bytes) } else { Err(libc::EFAULT) }
}

/// Writes guest memory; the error is an errno.
pub(crate) fn guest_write(address: u64, bytes: &[u8]) -> Result<(), i32> {
    // SAFETY: the guest names the place where it wants the answer.
    if unsafe { crate::changes::host::copy_out(address, bytes) } == bytes.len() {
        Ok(())
    } else {
        Err(libc::EFAULT)
    }
}

/// Reads a string of the guest's of at most `limit` bytes, terminator included; the error is an
/// errno: EFAULT, or `too_long`.
pub(crate) fn guest_string(address: u64, limit: usize, too_long: i32) -> Result<CString, i32> {
    let mut string = Vec::new();
    while string.len() < limit {
        let mut chunk = [0; 256];
        let want = chunk.len().min(limit - string.len());
        let got =
            crate::memory::copy_in(address.wrapping_add(string.len() as u64), &mut chunk[..want]);
        if let Some(end) = chunk[..got].iter().position(|&byte| byte == 0) {
            string.extend_from_slice(&chunk[..end]);
            return CString::new(string).map_err(|_| libc::EFAULT);
        }
        string.extend_from_slice(&chunk[..got]);
        if got < want {
            return Err(libc::EFAULT);
        }
    }
    Err(too_long)
}
