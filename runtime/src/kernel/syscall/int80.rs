//! `int 0x80`: system calls by their 32-bit numbers, which 64-bit programs may make, too.
//!
//! Arguments are the lower halves of rbx, rcx, rdx, rsi, rdi and rbp, the result is in rax, and no
//! other register changes. Most calls mean the same as one of the 64-bit ones with the same
//! arguments, and become that ([`SAME`]). Of those whose arguments or structures differ, some are
//! converted; others do not exist here.

use dynasour_guest::ThreadContext;

use super::seccomp::ARCHITECTURE_32;
use super::{Done, Engine, Outcome, System, guest_read, guest_write};
use crate::kernel::entry::Call;

/// The instruction.
const INT_80: [u8; 2] = [0xcd, 0x80];

/// Numbers of calls that take the same arguments: 32-bit, 64-bit.
const SAME: &[(u32, i64)] = &[
    (1, libc::SYS_exit),
    (2, libc::SYS_fork),
    (3, libc::SYS_read),
    (4, libc::SYS_write),
    (5, libc::SYS_open),
    (6, libc::SYS_close),
    (8, libc::SYS_creat),
    (9, libc::SYS_link),
    (10, libc::SYS_unlink),
    (12, libc::SYS_chdir),
    (15, libc::SYS_chmod),
    (20, libc::SYS_getpid),
    (27, libc::SYS_alarm),
    (29, libc::SYS_pause),
    (33, libc::SYS_access),
    (36, libc::SYS_sync),
    (37, libc::SYS_kill),
    (38, libc::SYS_rename),
    (39, libc::SYS_mkdir),
    (40, libc::SYS_rmdir),
    (41, libc::SYS_dup),
    (42, libc::SYS_pipe),
    (45, libc::SYS_brk),
    (54, libc::SYS_ioctl),
    (57, libc::SYS_setpgid),
    (60, libc::SYS_umask),
    (63, libc::SYS_dup2),
    (64, libc::SYS_getppid),
    (65, libc::SYS_getpgrp),
    (66, libc::SYS_setsid),
    (83, libc::SYS_symlink),
    (85, libc::SYS_readlink),
    (91, libc::SYS_munmap),
    (94, libc::SYS_fchmod),
    (96, libc::SYS_getpriority),
    (97, libc::SYS_setpriority),
    (118, libc::SYS_fsync),
    (122, libc::SYS_uname),
    (125, libc::SYS_mprotect),
    (132, libc::SYS_getpgid),
    (133, libc::SYS_fchdir),
    (143, libc::SYS_flock),
    (144, libc::SYS_msync),
    (147, libc::SYS_getsid),
    (148, libc::SYS_fdatasync),
    (150, libc::SYS_mlock),
    (151, libc::SYS_munlock),
    (152, libc::SYS_mlockall),
    (153, libc::SYS_munlockall),
    (158, libc::SYS_sched_yield),
    (168, libc::SYS_poll),
    (183, libc::SYS_getcwd),
    (190, libc::SYS_vfork),
    (198, libc::SYS_lchown),
    (199, libc::SYS_getuid),
    (200, libc::SYS_getgid),
    (201, libc::SYS_geteuid),
    (202, libc::SYS_getegid),
    (203, libc::SYS_setreuid),
    (204, libc::SYS_setregid),
    (205, libc::SYS_getgroups),
    (206, libc::SYS_setgroups),
    (207, libc::SYS_fchown),
    (208, libc::SYS_setresuid),
    (209, libc::SYS_getresuid),
    (210, libc::SYS_setresgid),
    (211, libc::SYS_getresgid),
    (212, libc::SYS_chown),
    (213, libc::SYS_setuid),
    (214, libc::SYS_setgid),
    (215, libc::SYS_setfsuid),
    (216, libc::SYS_setfsgid),
    (218, libc::SYS_mincore),
    (219, libc::SYS_madvise),
    (220, libc::SYS_getdents64),
    (224, libc::SYS_gettid),
    (238, libc::SYS_tkill),
    (252, libc::SYS_exit_group),
    (254, libc::SYS_epoll_create),
    (255, libc::SYS_epoll_ctl),
    (256, libc::SYS_epoll_wait),
    (258, libc::SYS_set_tid_address),
    (270, libc::SYS_tgkill),
    (291, libc::SYS_inotify_init),
    (292, libc::SYS_inotify_add_watch),
    (293, libc::SYS_inotify_rm_watch),
    (295, libc::SYS_openat),
    (296, libc::SYS_mkdirat),
    (301, libc::SYS_unlinkat),
    (302, libc::SYS_renameat),
    (303, libc::SYS_linkat),
    (304, libc::SYS_symlinkat),
    (305, libc::SYS_readlinkat),
    (306, libc::SYS_fchmodat),
    (307, libc::SYS_faccessat),
    (318, libc::SYS_getcpu),
    (319, libc::SYS_epoll_pwait),
    (323, libc::SYS_eventfd),
    (328, libc::SYS_eventfd2),
    (329, libc::SYS_epoll_create1),
    (330, libc::SYS_dup3),
    (331, libc::SYS_pipe2),
    (332, libc::SYS_inotify_init1),
    (340, libc::SYS_prlimit64),
    (344, libc::SYS_syncfs),
    (353, libc::SYS_renameat2),
    (355, libc::SYS_getrandom),
    (356, libc::SYS_memfd_create),
    (359, libc::SYS_socket),
    (360, libc::SYS_socketpair),
    (361, libc::SYS_bind),
    (362, libc::SYS_connect),
    (363, libc::SYS_listen),
    (364, libc::SYS_accept4),
    (367, libc::SYS_getsockname),
    (368, libc::SYS_getpeername),
    (369, libc::SYS_sendto),
    (371, libc::SYS_recvfrom),
    (373, libc::SYS_shutdown),
    (383, libc::SYS_statx),
    (403, libc::SYS_clock_gettime),
    (406, libc::SYS_clock_getres),
    (407, libc::SYS_clock_nanosleep),
    (410, libc::SYS_timerfd_gettime),
    (411, libc::SYS_timerfd_settime),
    (412, libc::SYS_utimensat),
    (414, libc::SYS_ppoll),
    (422, libc::SYS_futex),
    (423, libc::SYS_sched_rr_get_interval),
    (434, libc::SYS_pidfd_open),
    (436, libc::SYS_close_range),
    (437, libc::SYS_openat2),
    (439, libc::SYS_faccessat2),
];

/// The others that exist here.
mod converted {
    pub const WAITPID: u32 = 7;
    pub const EXECVE: u32 = 11;
    pub const TIME: u32 = 13;
    pub const LSEEK: u32 = 19;
    pub const GETTIMEOFDAY: u32 = 78;
    pub const TRUNCATE: u32 = 92;
    pub const FTRUNCATE: u32 = 93;
    pub const NANOSLEEP: u32 = 162;
    pub const MMAP2: u32 = 192;
    pub const CLOCK_GETTIME: u32 = 265;
    pub const CLOCK_GETRES: u32 = 266;
}

/// Whether the instruction at `pc` is a 32-bit system call.
pub(crate) fn is_at(pc: u64) -> bool {
    guest_read(pc) == Ok(INT_80)
}

/// A 32-bit number with sign as an argument.
fn signed(argument: u64) -> u64 {
    i64::from(argument as i32) as u64
}

/// The pointers of an array of 32-bit ones that ends with zero; the error is an errno.
fn pointers(address: u64) -> Result<Vec<u64>, i32> {
    const MOST: usize = 1 << 17;
    let mut pointers = Vec::new();
    if address == 0 {
        return Ok(vec![0]);
    }
    loop {
        let pointer = u32::from_le_bytes(guest_read(address + 4 * pointers.len() as u64)?);
        match pointer {
            0 => break,
            _ if pointers.len() == MOST => return Err(libc::E2BIG),
            pointer => pointers.push(pointer.into()),
        }
    }
    pointers.push(0);
    Ok(pointers)
}

/// The result of a call that has stored a time of two 64-bit words, of which the guest gets the
/// lower halves at `address`.
fn with_time(done: Done, address: u64, time: [i64; 2]) -> Done {
    if address == 0 || done != Done::Value(0) {
        return done;
    }
    let halves = time.map(|word| (word as u32).to_le_bytes());
    guest_write(address, halves.as_flattened()).map_or_else(Done::error, |()| done)
}

impl System {
    /// Performs the 32-bit system call at `pc`, as [`System::syscall`] performs others.
    pub(crate) fn syscall_32(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        pc: u64,
    ) -> Outcome {
        let g = &context.gpr;
        let args = [g[3], g[1], g[2], g[6], g[7], g[5]].map(|register| u64::from(register as u32));
        let call = Call { nr: u64::from(g[0] as u32), args };
        let kept = (g[1], g[11]);
        context.rip = pc + INT_80.len() as u64;
        let done = match self.screen(context, &call, ARCHITECTURE_32) {
            Some(done) => done,
            None => self.perform_32(context, engine, &call),
        };
        match done {
            Done::Value(value) => context.gpr[0] = value as u64,
            Done::Restart => context.rip = pc,
            Done::Registers => (context.gpr[1], context.gpr[11]) = kept,
            Done::Outcome(Outcome::Continue) => {}
            Done::Outcome(outcome) => return outcome,
        }
        self.after_call(context)
    }

    fn perform_32(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        call: &Call,
    ) -> Done {
        /// Anonymous and low: what a 32-bit call gives must be good for one.
        const LOW: u64 = libc::MAP_32BIT as u64;
        let nr = call.nr as u32;
        let [a, b, c, d, e, f] = call.args;
        if let Some(&(_, same)) = SAME.iter().find(|(number, _)| *number == nr) {
            return self.perform_writing(
                context,
                engine,
                &Call { nr: same as u64, args: call.args },
            );
        }
        let mut made =
            |nr, args: &[u64]| self.perform_writing(context, engine, &Call::new(nr, args));
        match nr {
            converted::WAITPID => made(libc::SYS_wait4, &[a, b, c, 0]),
            converted::LSEEK => made(libc::SYS_lseek, &[a, signed(b), c]),
            converted::TRUNCATE => made(libc::SYS_truncate, &[a, signed(b)]),
            converted::FTRUNCATE => made(libc::SYS_ftruncate, &[a, signed(b)]),
            converted::MMAP2 => made(libc::SYS_mmap, &[a, b, c, d | LOW, e, f << 12]),
            converted::EXECVE => match (pointers(b), pointers(c)) {
                (Ok(argv), Ok(envp)) => {
                    made(libc::SYS_execve, &[a, argv.as_ptr() as u64, envp.as_ptr() as u64])
                }
                (Err(errno), _) | (_, Err(errno)) => Done::error(errno),
            },
            converted::TIME => match made(libc::SYS_time, &[0]) {
                Done::Value(now) if a != 0 => {
                    let written = guest_write(a, &(now as u32).to_le_bytes());
                    written.map_or_else(Done::error, |()| Done::Value(now))
                }
                done => done,
            },
            converted::GETTIMEOFDAY => {
                let mut time = [0i64; 2];
                let place = if a == 0 { 0 } else { time.as_mut_ptr() as u64 };
                // The time zone has the same layout.
                with_time(made(libc::SYS_gettimeofday, &[place, b]), a, time)
            }
            converted::CLOCK_GETTIME | converted::CLOCK_GETRES => {
                let same = if nr == converted::CLOCK_GETTIME {
                    libc::SYS_clock_gettime
                } else {
                    libc::SYS_clock_getres
                };
                let mut time = [0i64; 2];
                // `clock_getres` takes none for an answer, `clock_gettime` says EFAULT.
                let place = if b == 0 { 0 } else { time.as_mut_ptr() as u64 };
                // A clock's number is signed.
                with_time(made(same, &[signed(a), place]), b, time)
            }
            converted::NANOSLEEP => {
                let half =
                    |at: u64| guest_read(a + at).map(|word| i64::from(i32::from_le_bytes(word)));
                let (Ok(seconds), Ok(nanoseconds)) = (half(0), half(4)) else {
                    return Done::error(libc::EFAULT);
                };
                let (wanted, mut left) = ([seconds, nanoseconds], [0i64; 2]);
                let places = [wanted.as_ptr() as u64, left.as_mut_ptr() as u64];
                let done = made(libc::SYS_nanosleep, &places);
                if done == Done::error(libc::EINTR) && b != 0 {
                    let halves = left.map(|half| (half as u32).to_le_bytes());
                    if let Err(errno) = guest_write(b, halves.as_flattened()) {
                        return Done::error(errno);
                    }
                }
                done
            }
            _ => {
                crate::kernel::process::complain(&format!(
                    "32-bit system call {nr} (int 0x80): not supported"
                ));
                Done::error(libc::ENOSYS)
            }
        }
    }
}
