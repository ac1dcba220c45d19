//! The guest's system calls. The kernel gets each call unchanged, except calls that touch state
//! which the translator owns or emulates (docs/design.md, "Running a guest").
//!
//! * Signals, emulated and mirrored to the kernel ([`signals`]): `rt_sig*`, `sigaltstack`,
//!   `signalfd(4)`, and the signal masks of `ppoll`, `pselect6`, `epoll_pwait(2)`,
//!   `io_pgetevents` and `io_uring_enter`.
//! * Calls that end the assumption `private_memory`: `io_setup`, `io_uring_setup`,
//!   `userfaultfd`, some calls of [`memory`].
//! * Address space ([`memory`]): `brk`, `mmap`, `munmap`, `mprotect`, `pkey_mprotect`, `mremap`,
//!   `madvise`, `remap_file_pages`, `shmat`, `shmdt`.
//! * Processes and threads ([`crate::kernel::process`]): `fork`, `vfork`, `clone`, `clone3`,
//!   `execve(at)`, `exit`, `exit_group`, `set_tid_address`.
//! * Paths of files in `/proc/self` ([`paths`]): `open`, `stat`, `access`, `readlink` and their
//!   variants.
//! * Writes to `/proc/self/mem` ([`process_memory`]): `write`, `pwrite64`, `writev`, `pwritev(2)`.
//! * Descriptors and signals that would lose the report ([`crate::kernel::process::report`]):
//!   `close`, `close_range`, `dup2`, `dup3`, SIGKILL sent by the process to itself.
//! * Size of the address space ([`crate::kernel::process::limits`]) and of the first thread's stack
//!   (`crate::kernel::process::stack_limit`): `getrlimit`, `setrlimit`, `prlimit64`.
//! * Registers of threads that share the memory ([`tracing`]): `ptrace`.
//! * Registers and switches of the process ([`control`]): `arch_prctl`, `prctl`, `membarrier`.
//! * Seccomp filters ([`crate::kernel::process::seccomp`]): the guest's filters judge each call
//!   before any of the above; the kernel never sees them.
//! * 32-bit calls, `int 0x80` ([`int80`]): made as they are, or converted to 64-bit calls.
//! * Refused with ENOSYS: `rseq`, `modify_ldt`, `set_thread_area`, `get_thread_area`,
//!   `map_shadow_stack`, x32 calls.
//!
//! Data: none; the state is in [`System`] and in the process that it points to.
//!
//! Invariant: the guest's own call is made in a *window* ([`crate::kernel::entry::windowed`]). If
//! the host's handler accepts a signal before the window ends, the call is not made. The guest then
//! runs its signal handler and comes to the `syscall` instruction again.
//!
//! The dispatcher calls [`System::syscall`] on the guest's thread, outside native code, and holds
//! no lock.
//!
//! Example: a guest calls `read`. The list above does not name it, so `pass` makes the call in a
//! window. If SIGALRM arrives before the kernel is entered, `pass` returns `Done::Restart`: `rip`
//! goes back by the two bytes of `syscall`, and the signal is delivered.

mod control;
pub(crate) mod int80;
pub mod memory;
mod passed_on;
pub mod paths;
mod process_memory;
mod segments;
mod signals;
pub mod special;
pub mod tracing;
mod vsyscall;

use std::sync::atomic::Ordering;

use dynasour_guest::ThreadContext;

use crate::changes::{hiding, inputs};
use crate::kernel::entry::{self, Call};
use crate::kernel::process::helper;
use crate::kernel::process::limits::sets_stack_limit;
use crate::kernel::process::seccomp::ARCHITECTURE;
use crate::kernel::process::{Done, Engine, Outcome, System};
use crate::kernel::signal::gate::{Closed, Extent};

impl System {
    /// Performs the guest's system call, then delivers the signals that arrived during the call.
    /// `rip` is behind the `syscall` instruction, and rax has the number of the call.
    pub fn syscall(&mut self, context: &mut ThreadContext, engine: &mut dyn Engine) -> Outcome {
        const SYSCALL_LENGTH: u64 = 2;
        let g = &context.gpr;
        let call = Call { nr: g[0], args: [g[7], g[6], g[2], g[10], g[8], g[9]] };
        let done = if context.pending.load(Ordering::Relaxed) != 0 {
            Done::Restart
        } else if let Some(done) = self.screen(context, &call, ARCHITECTURE) {
            done
        } else {
            self.perform_reading(context, engine, &call)
        };
        match done {
            Done::Value(value) => {
                context.gpr[0] = value as u64;
                context.gpr[1] = context.rip;
                context.gpr[11] = context.rflags;
            }
            Done::Restart => {
                // The same registers as after a call that the kernel restarts.
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

    /// Performs a call, and shows it the guest's own code where patches are hidden.
    fn perform_reading(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        call: &Call,
    ) -> Done {
        let nr = i64::from(call.nr as u32);
        if hiding::is_ended_by(nr) {
            hiding::stop();
        }
        inputs::show(nr, &call.args);
        loop {
            let done = self.perform_writing(context, engine, call);
            let has_faulted = done == Done::error(libc::EFAULT);
            if !has_faulted || !inputs::show_after_fault(nr, &call.args) {
                return done;
            }
        }
    }

    /// Performs a call, and opens the write-protected pages of code to which it may write.
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
        // The parent of a vfork child rests the helper already.
        let rests = needs_no_helper(nr) && !self.process.is_borrower();
        let _rest = rests.then(helper::rest);
        if rests
            && matches!(nr, libc::SYS_unshare | libc::SYS_setns)
            && self.process.threads().is_alone()
            && !self.process.shares_memory()
        {
            helper::wait_until_alone();
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
            // The kernel has no interrupted call of the guest that it could restart.
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

            libc::SYS_io_setup | libc::SYS_io_uring_setup => {
                let done = self.pass(call);
                engine.private_memory_lost();
                done
            }
            libc::SYS_userfaultfd => {
                let done = self.pass(call);
                if matches!(done, Done::Value(0..)) {
                    engine.private_memory_lost();
                    engine.faults_are_served();
                }
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

            _ => self.perform_other(context, engine, nr, call),
        }
    }

    /// The calls about paths, descriptors, limits and switches; all others are made as they are.
    fn perform_other(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        nr: i64,
        call: &Call,
    ) -> Done {
        match nr {
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

            libc::SYS_tkill | libc::SYS_tgkill => {
                self.suicide(context, nr, call).unwrap_or_else(|| self.pass(call))
            }

            libc::SYS_getrlimit | libc::SYS_setrlimit | libc::SYS_prlimit64 => {
                let done = self.limit_call(nr, call).unwrap_or_else(|| self.pass(call));
                if sets_stack_limit(nr, call) {
                    self.fit_stack(engine);
                }
                done
            }

            libc::SYS_arch_prctl => {
                let done = control::arch_prctl(context, &mut self.segments, call);
                done.unwrap_or_else(|| self.pass(call))
            }
            libc::SYS_prctl => {
                let switched =
                    self.seccomp_switch(call).or_else(|| control::prctl(call, self.clear_at_end));
                switched.unwrap_or_else(|| self.pass(call))
            }
            libc::SYS_seccomp => self.seccomp_call(call),
            libc::SYS_ptrace => self.ptrace_call(engine, call),
            libc::SYS_membarrier => control::membarrier(call, || self.pass(call)),

            // glibc works without rseq, with which the kernel would interrupt the translator's code
            // instead of the guest's. The other calls would change the segments or the shadow stack
            // of the translator.
            libc::SYS_rseq
            | libc::SYS_modify_ldt
            | libc::SYS_set_thread_area
            | libc::SYS_get_thread_area
            | SYS_MAP_SHADOW_STACK => Done::error(libc::ENOSYS),

            _ => self.pass(call),
        }
    }

    /// `exit`: the thread ends, unless a signal that has arrived must be delivered first.
    pub(crate) fn exit_thread(&self, context: &ThreadContext, status: i32) -> Done {
        if self.process.is_borrower() {
            return Done::Outcome(Outcome::Exit(status));
        }
        // From here on the kernel gives signals that are sent to the process to other threads.
        match Closed::close(context, Extent::Asynchronous) {
            Some(_) => Done::Outcome(Outcome::ThreadExit(status)),
            None => Done::Restart,
        }
    }

    /// Has the kernel perform a call with the guest's own number and arguments.
    pub(crate) fn pass(&self, call: &Call) -> Done {
        // SAFETY: the guest's own call; calls that would touch the translator do not come here.
        match self.with_held_pending(call.nr, self.mask, || unsafe { entry::windowed(call) }) {
            entry::NOT_ENTERED => Done::Restart,
            value => Done::Value(value),
        }
    }
}

/// Would the kernel do something else while the process has another thread, or would that thread keep
/// rights that the guest gives up? (`clone_call` rests the helper by itself.)
fn needs_no_helper(nr: i64) -> bool {
    matches!(
        nr,
        libc::SYS_unshare
            | libc::SYS_setns
            | libc::SYS_setuid
            | libc::SYS_setgid
            | libc::SYS_setreuid
            | libc::SYS_setregid
            | libc::SYS_setresuid
            | libc::SYS_setresgid
            | libc::SYS_setfsuid
            | libc::SYS_setfsgid
            | libc::SYS_setgroups
            | libc::SYS_capset
            | libc::SYS_prctl
            | libc::SYS_seccomp
            | libc::SYS_landlock_restrict_self
    )
}

// Numbers of calls that the libc crate does not name (asm/unistd_64.h).
const SYS_IO_PGETEVENTS: i64 = 333;
const SYS_MAP_SHADOW_STACK: i64 = 453;
