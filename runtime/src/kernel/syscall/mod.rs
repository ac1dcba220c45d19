//! System calls of the guest: passed through, except those that touch what the translator owns
//! (docs/design.md, "Running a guest").
//!
//! | treatment | calls |
//! | --- | --- |
//! | signals, emulated and mirrored ([`signals`]) | `rt_sig*`, `sigaltstack`, `signalfd(4)`, the masks of `ppoll`, `pselect6`, `epoll_pwait(2)`, `io_pgetevents`, `io_uring_enter` |
//! | end the assumption that memory is private | `io_setup`, `io_uring_setup`, `userfaultfd` |
//! | address space ([`memory`]) | `brk`, `mmap`, `munmap`, `mprotect`, `pkey_mprotect`, `mremap`, `madvise`, `remap_file_pages`, `shmat`, `shmdt` |
//! | processes and threads ([`crate::kernel::process`]) | `fork`, `vfork`, `clone`, `clone3`, `execve(at)`, `exit`, `exit_group`, `set_tid_address` |
//! | the path of the executable ([`paths`]) | `open`, `stat`, `access`, `readlink` and their variants on `/proc/self/exe` |
//! | writes to `/proc/self/mem` ([`process_memory`]) | `write`, `pwrite64`, `writev`, `pwritev(2)` |
//! | what is kept for the report ([`crate::kernel::process::report`]) | `close`, `close_range`, `dup2`, `dup3`, SIGKILL to itself |
//! | the size of the address space ([`crate::kernel::process::limits`]) | `getrlimit`, `setrlimit`, `prlimit64` |
//! | registers of threads of the same memory ([`tracing`]) | `ptrace` |
//! | registers and switches ([`control`]) | `arch_prctl`, `prctl` |
//! | looked at before any of this, and never told to the kernel ([`crate::kernel::process::seccomp`]) | what `seccomp` and `prctl` set |
//! | 32-bit calls (`int 0x80`) | made as they are, or become 64-bit ones ([`int80`]) |
//! | refused with ENOSYS | `rseq`, `modify_ldt`, `set_thread_area`, x32 calls |
//! | everything else | as is |
//!
//! A call made for the guest lies in a window ([`crate::kernel::entry::windowed`]): a signal
//! accepted before it keeps it from being made, and the guest finds itself at the `syscall`
//! instruction again, after its handler.

mod control;
pub(crate) mod int80;
pub mod memory;
pub mod paths;
mod process_memory;
mod segments;
mod signals;
pub mod special;
pub mod tracing;
mod vsyscall;

use std::sync::atomic::Ordering;

use dynasour_guest::ThreadContext;

use crate::kernel::entry::{self, Call};
use crate::kernel::process::seccomp::ARCHITECTURE;
use crate::kernel::process::{Done, Engine, Outcome, System};
use crate::kernel::signal;

impl System {
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
    pub(crate) fn exit_thread(&self, context: &ThreadContext, status: i32) -> Done {
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
