//! Calls that guest code in place may make without the runtime (`crate::dispatch::call_sites`).
//!
//! Data: none. Invariant: [`System::perform`] passes each call of the list on unchanged, unless
//! [`System::watches_calls`], or the call may write memory and [`System::watches_outputs`].
//!
//! Example: `lseek` is in the list. `mmap` is not, because the runtime keeps account of the address
//! space.
//!
//! [`System::perform`]: crate::kernel::process::System

use crate::kernel::process::System;

impl System {
    /// Is the call `nr` passed on to the kernel unchanged? The list has those that programs make
    /// often.
    pub fn passes_on(nr: i64) -> bool {
        let may_write = matches!(
            nr,
            libc::SYS_read
                | libc::SYS_pread64
                | libc::SYS_readv
                | libc::SYS_fstat
                | libc::SYS_getdents64
                | libc::SYS_fcntl
                | libc::SYS_ioctl
                | libc::SYS_poll
                | libc::SYS_select
                | libc::SYS_epoll_wait
                | libc::SYS_recvfrom
                | libc::SYS_recvmsg
                | libc::SYS_futex
                | libc::SYS_nanosleep
                | libc::SYS_clock_nanosleep
                | libc::SYS_clock_gettime
                | libc::SYS_gettimeofday
                | libc::SYS_times
                | libc::SYS_getrusage
                | libc::SYS_getrandom
        );
        may_write || Self::writes_no_memory(nr)
    }

    /// Is `nr` a call that is passed on, and by which the kernel never writes to the guest's memory?
    pub fn writes_no_memory(nr: i64) -> bool {
        matches!(
            nr,
            libc::SYS_write
                | libc::SYS_pwrite64
                | libc::SYS_writev
                | libc::SYS_lseek
                | libc::SYS_epoll_ctl
                | libc::SYS_eventfd2
                | libc::SYS_sendto
                | libc::SYS_sendmsg
                | libc::SYS_sched_yield
                | libc::SYS_getpid
                | libc::SYS_gettid
                | libc::SYS_getppid
                | libc::SYS_getuid
                | libc::SYS_geteuid
                | libc::SYS_getgid
                | libc::SYS_getegid
        )
    }

    /// Must all calls of this thread come to the runtime? It may have filters, descriptors that lead to guest
    /// memory, or a signalfd that shows emulated signals.
    pub fn watches_calls(&self) -> bool {
        !self.seccomp.is_off()
            || self.dispatch.is_some()
            || self.process.pages().is_written_as_file()
            || Self::reads_from_file()
    }

    /// Must those calls come to the runtime that may write memory? There may be guarded pages, to which the kernel
    /// could not write.
    pub fn watches_outputs(&self) -> bool {
        self.process.pages().has_guards()
    }
}
