//! The 32-bit system calls by number and name, and how each is performed.
//!
//! The table is constant and needs no lock. It is sorted by number and names every call of Linux
//! 6.18's i386 table that Debian's `asm/unistd_32.h` names; a test compares it with that header if
//! the machine has one. A number that is not in the table goes to the kernel.
//!
//! The table becomes a text and a `match`. An array with pointers would be relocated whenever the
//! translator starts, a page fault for each of its pages.
//!
//! Example: the row of 5, `open`, names `files::open`, because the path may be `/proc/self/exe`.

use super::{files, memory, processes, signals};
use crate::kernel::entry::Call;
use crate::kernel::process::{Done, Engine, System};
use dynasour_guest::ThreadContext;

/// A function that performs one call. The call's arguments are the lower halves of the registers.
type Handler = fn(&mut System, &mut ThreadContext, &mut dyn Engine, &Call) -> Done;

/// How a call is performed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Treatment {
    /// By `int 0x80`: the kernel converts the structures, and the call touches no state that the
    /// translator owns.
    Kernel,
    /// As this 64-bit call, which [`System`] emulates, with the same arguments. The structures have
    /// the same layout in both.
    Same(i64),
    /// By a function that converts the structures and makes the 64-bit call that [`System`]
    /// emulates.
    Own(Handler),
    /// Not at all: the call fails with ENOSYS, and a message gives this reason.
    Refused(&'static str),
}

use Treatment::{Kernel, Own, Refused, Same};

/// Why a handler cannot return by a 32-bit call.
const FRAMES: &str = "the translator makes no 32-bit signal frames";
/// Why the guest cannot have segments of its own.
const SEGMENTS: &str = "descriptors of segments are the kernel's own state, and the translator \
                        runs no code through them";
/// Why there are no restartable sequences.
const RSEQ: &str = "the kernel would interrupt the translator's code instead of the guest's";
/// Why there are no shadow stacks.
const SHADOW: &str = "the translator's return addresses are not the guest's";
/// Why libraries cannot be mapped by the kernel.
const USELIB: &str = "the kernel would map a library where the translator may have memory";
/// Why waiting for events is not converted.
const EVENTS: &str = "waiting for events with a signal mask of its own is only translated for \
                      64-bit calls";

/// Defines the calls: the number of each, its name in the header, and how it is performed.
macro_rules! table {
    ($(($nr:literal, $name:literal, $treatment:expr),)*) => {
        /// Number and name of each call, a line each.
        const NAMES: &str = concat!($($nr, " ", $name, "\n"),*);

        /// How the call `nr` is performed; none if the table does not have it.
        fn known(nr: u32) -> Option<Treatment> {
            match nr {
                $($nr => Some($treatment),)*
                _ => None,
            }
        }
    };
}

#[rustfmt::skip]
table! {
    (0, "restart_syscall", Same(libc::SYS_restart_syscall)),
    (1, "exit", Same(libc::SYS_exit)),
    (2, "fork", Same(libc::SYS_fork)),
    (3, "read", Kernel),
    (4, "write", Same(libc::SYS_write)),
    (5, "open", Own(files::open)),
    (6, "close", Same(libc::SYS_close)),
    (7, "waitpid", Kernel),
    (8, "creat", Kernel),
    (9, "link", Kernel),
    (10, "unlink", Kernel),
    (11, "execve", Own(processes::execve)),
    (12, "chdir", Kernel),
    (13, "time", Kernel),
    (14, "mknod", Kernel),
    (15, "chmod", Kernel),
    (16, "lchown", Kernel),
    (17, "break", Kernel),
    (18, "oldstat", Own(files::oldstat)),
    (19, "lseek", Kernel),
    (20, "getpid", Kernel),
    (21, "mount", Kernel),
    (22, "umount", Kernel),
    (23, "setuid", Kernel),
    (24, "getuid", Kernel),
    (25, "stime", Kernel),
    (26, "ptrace", Own(processes::ptrace)),
    (27, "alarm", Kernel),
    (28, "oldfstat", Kernel),
    (29, "pause", Kernel),
    (30, "utime", Kernel),
    (31, "stty", Kernel),
    (32, "gtty", Kernel),
    (33, "access", Same(libc::SYS_access)),
    (34, "nice", Kernel),
    (35, "ftime", Kernel),
    (36, "sync", Kernel),
    (37, "kill", Same(libc::SYS_kill)),
    (38, "rename", Kernel),
    (39, "mkdir", Kernel),
    (40, "rmdir", Kernel),
    (41, "dup", Kernel),
    (42, "pipe", Kernel),
    (43, "times", Kernel),
    (44, "prof", Kernel),
    (45, "brk", Same(libc::SYS_brk)),
    (46, "setgid", Kernel),
    (47, "getgid", Kernel),
    (48, "signal", Own(signals::signal)),
    (49, "geteuid", Kernel),
    (50, "getegid", Kernel),
    (51, "acct", Kernel),
    (52, "umount2", Kernel),
    (53, "lock", Kernel),
    (54, "ioctl", Kernel),
    (55, "fcntl", Kernel),
    (56, "mpx", Kernel),
    (57, "setpgid", Kernel),
    (58, "ulimit", Kernel),
    (59, "oldolduname", Kernel),
    (60, "umask", Kernel),
    (61, "chroot", Kernel),
    (62, "ustat", Kernel),
    (63, "dup2", Same(libc::SYS_dup2)),
    (64, "getppid", Kernel),
    (65, "getpgrp", Kernel),
    (66, "setsid", Kernel),
    (67, "sigaction", Own(signals::sigaction)),
    (68, "sgetmask", Own(signals::sgetmask)),
    (69, "ssetmask", Own(signals::ssetmask)),
    (70, "setreuid", Kernel),
    (71, "setregid", Kernel),
    (72, "sigsuspend", Own(signals::sigsuspend)),
    (73, "sigpending", Own(signals::sigpending)),
    (74, "sethostname", Kernel),
    (75, "setrlimit", Own(memory::setrlimit)),
    (76, "getrlimit", Own(memory::getrlimit)),
    (77, "getrusage", Kernel),
    (78, "gettimeofday", Kernel),
    (79, "settimeofday", Kernel),
    (80, "getgroups", Kernel),
    (81, "setgroups", Kernel),
    (82, "select", Kernel),
    (83, "symlink", Kernel),
    (84, "oldlstat", Kernel),
    (85, "readlink", Same(libc::SYS_readlink)),
    (86, "uselib", Refused(USELIB)),
    (87, "swapon", Kernel),
    (88, "reboot", Kernel),
    (89, "readdir", Kernel),
    (90, "mmap", Own(memory::mmap)),
    (91, "munmap", Same(libc::SYS_munmap)),
    (92, "truncate", Kernel),
    (93, "ftruncate", Kernel),
    (94, "fchmod", Kernel),
    (95, "fchown", Kernel),
    (96, "getpriority", Kernel),
    (97, "setpriority", Kernel),
    (98, "profil", Kernel),
    (99, "statfs", Kernel),
    (100, "fstatfs", Kernel),
    (101, "ioperm", Kernel),
    (102, "socketcall", Kernel),
    (103, "syslog", Kernel),
    (104, "setitimer", Kernel),
    (105, "getitimer", Kernel),
    (106, "stat", Own(files::stat)),
    (107, "lstat", Kernel),
    (108, "fstat", Kernel),
    (109, "olduname", Kernel),
    (110, "iopl", Kernel),
    (111, "vhangup", Kernel),
    (112, "idle", Kernel),
    (113, "vm86old", Kernel),
    (114, "wait4", Kernel),
    (115, "swapoff", Kernel),
    (116, "sysinfo", Kernel),
    (117, "ipc", Own(memory::ipc)),
    (118, "fsync", Kernel),
    (119, "sigreturn", Refused(FRAMES)),
    (120, "clone", Own(processes::clone)),
    (121, "setdomainname", Kernel),
    (122, "uname", Kernel),
    (123, "modify_ldt", Refused(SEGMENTS)),
    (124, "adjtimex", Kernel),
    (125, "mprotect", Same(libc::SYS_mprotect)),
    (126, "sigprocmask", Own(signals::sigprocmask)),
    (127, "create_module", Kernel),
    (128, "init_module", Kernel),
    (129, "delete_module", Kernel),
    (130, "get_kernel_syms", Kernel),
    (131, "quotactl", Kernel),
    (132, "getpgid", Kernel),
    (133, "fchdir", Kernel),
    (134, "bdflush", Kernel),
    (135, "sysfs", Kernel),
    (136, "personality", Kernel),
    (137, "afs_syscall", Kernel),
    (138, "setfsuid", Kernel),
    (139, "setfsgid", Kernel),
    (140, "_llseek", Kernel),
    (141, "getdents", Kernel),
    (142, "_newselect", Kernel),
    (143, "flock", Kernel),
    (144, "msync", Kernel),
    (145, "readv", Kernel),
    (146, "writev", Own(files::writev)),
    (147, "getsid", Kernel),
    (148, "fdatasync", Kernel),
    (149, "_sysctl", Kernel),
    (150, "mlock", Kernel),
    (151, "munlock", Kernel),
    (152, "mlockall", Kernel),
    (153, "munlockall", Kernel),
    (154, "sched_setparam", Kernel),
    (155, "sched_getparam", Kernel),
    (156, "sched_setscheduler", Kernel),
    (157, "sched_getscheduler", Kernel),
    (158, "sched_yield", Kernel),
    (159, "sched_get_priority_max", Kernel),
    (160, "sched_get_priority_min", Kernel),
    (161, "sched_rr_get_interval", Kernel),
    (162, "nanosleep", Kernel),
    (163, "mremap", Own(memory::mremap)),
    (164, "setresuid", Kernel),
    (165, "getresuid", Kernel),
    (166, "vm86", Kernel),
    (167, "query_module", Kernel),
    (168, "poll", Kernel),
    (169, "nfsservctl", Kernel),
    (170, "setresgid", Kernel),
    (171, "getresgid", Kernel),
    (172, "prctl", Own(processes::prctl)),
    (173, "rt_sigreturn", Refused(FRAMES)),
    (174, "rt_sigaction", Own(signals::rt_sigaction)),
    (175, "rt_sigprocmask", Same(libc::SYS_rt_sigprocmask)),
    (176, "rt_sigpending", Same(libc::SYS_rt_sigpending)),
    (177, "rt_sigtimedwait", Own(signals::rt_sigtimedwait)),
    (178, "rt_sigqueueinfo", Kernel),
    (179, "rt_sigsuspend", Same(libc::SYS_rt_sigsuspend)),
    (180, "pread64", Kernel),
    (181, "pwrite64", Own(files::pwrite64)),
    (182, "chown", Kernel),
    (183, "getcwd", Kernel),
    (184, "capget", Kernel),
    (185, "capset", Kernel),
    (186, "sigaltstack", Own(signals::sigaltstack)),
    (187, "sendfile", Kernel),
    (188, "getpmsg", Kernel),
    (189, "putpmsg", Kernel),
    (190, "vfork", Same(libc::SYS_vfork)),
    (191, "ugetrlimit", Own(memory::ugetrlimit)),
    (192, "mmap2", Own(memory::mmap2)),
    (193, "truncate64", Kernel),
    (194, "ftruncate64", Kernel),
    (195, "stat64", Own(files::stat64)),
    (196, "lstat64", Kernel),
    (197, "fstat64", Kernel),
    (198, "lchown32", Kernel),
    (199, "getuid32", Kernel),
    (200, "getgid32", Kernel),
    (201, "geteuid32", Kernel),
    (202, "getegid32", Kernel),
    (203, "setreuid32", Kernel),
    (204, "setregid32", Kernel),
    (205, "getgroups32", Kernel),
    (206, "setgroups32", Kernel),
    (207, "fchown32", Kernel),
    (208, "setresuid32", Kernel),
    (209, "getresuid32", Kernel),
    (210, "setresgid32", Kernel),
    (211, "getresgid32", Kernel),
    (212, "chown32", Kernel),
    (213, "setuid32", Kernel),
    (214, "setgid32", Kernel),
    (215, "setfsuid32", Kernel),
    (216, "setfsgid32", Kernel),
    (217, "pivot_root", Kernel),
    (218, "mincore", Kernel),
    (219, "madvise", Same(libc::SYS_madvise)),
    (220, "getdents64", Kernel),
    (221, "fcntl64", Kernel),
    (224, "gettid", Kernel),
    (225, "readahead", Kernel),
    (226, "setxattr", Kernel),
    (227, "lsetxattr", Kernel),
    (228, "fsetxattr", Kernel),
    (229, "getxattr", Kernel),
    (230, "lgetxattr", Kernel),
    (231, "fgetxattr", Kernel),
    (232, "listxattr", Kernel),
    (233, "llistxattr", Kernel),
    (234, "flistxattr", Kernel),
    (235, "removexattr", Kernel),
    (236, "lremovexattr", Kernel),
    (237, "fremovexattr", Kernel),
    (238, "tkill", Same(libc::SYS_tkill)),
    (239, "sendfile64", Kernel),
    (240, "futex", Kernel),
    (241, "sched_setaffinity", Kernel),
    (242, "sched_getaffinity", Kernel),
    (243, "set_thread_area", Refused(SEGMENTS)),
    (244, "get_thread_area", Refused(SEGMENTS)),
    (245, "io_setup", Own(files::io_setup)),
    (246, "io_destroy", Kernel),
    (247, "io_getevents", Kernel),
    (248, "io_submit", Kernel),
    (249, "io_cancel", Kernel),
    (250, "fadvise64", Kernel),
    (252, "exit_group", Same(libc::SYS_exit_group)),
    (253, "lookup_dcookie", Kernel),
    (254, "epoll_create", Kernel),
    (255, "epoll_ctl", Kernel),
    (256, "epoll_wait", Kernel),
    (257, "remap_file_pages", Same(libc::SYS_remap_file_pages)),
    (258, "set_tid_address", Same(libc::SYS_set_tid_address)),
    (259, "timer_create", Kernel),
    (260, "timer_settime", Kernel),
    (261, "timer_gettime", Kernel),
    (262, "timer_getoverrun", Kernel),
    (263, "timer_delete", Kernel),
    (264, "clock_settime", Kernel),
    (265, "clock_gettime", Kernel),
    (266, "clock_getres", Kernel),
    (267, "clock_nanosleep", Kernel),
    (268, "statfs64", Kernel),
    (269, "fstatfs64", Kernel),
    (270, "tgkill", Same(libc::SYS_tgkill)),
    (271, "utimes", Kernel),
    (272, "fadvise64_64", Kernel),
    (273, "vserver", Kernel),
    (274, "mbind", Kernel),
    (275, "get_mempolicy", Kernel),
    (276, "set_mempolicy", Kernel),
    (277, "mq_open", Kernel),
    (278, "mq_unlink", Kernel),
    (279, "mq_timedsend", Kernel),
    (280, "mq_timedreceive", Kernel),
    (281, "mq_notify", Kernel),
    (282, "mq_getsetattr", Kernel),
    (283, "kexec_load", Kernel),
    (284, "waitid", Kernel),
    (286, "add_key", Kernel),
    (287, "request_key", Kernel),
    (288, "keyctl", Kernel),
    (289, "ioprio_set", Kernel),
    (290, "ioprio_get", Kernel),
    (291, "inotify_init", Kernel),
    (292, "inotify_add_watch", Kernel),
    (293, "inotify_rm_watch", Kernel),
    (294, "migrate_pages", Kernel),
    (295, "openat", Own(files::openat)),
    (296, "mkdirat", Kernel),
    (297, "mknodat", Kernel),
    (298, "fchownat", Kernel),
    (299, "futimesat", Kernel),
    (300, "fstatat64", Own(files::fstatat64)),
    (301, "unlinkat", Kernel),
    (302, "renameat", Kernel),
    (303, "linkat", Kernel),
    (304, "symlinkat", Kernel),
    (305, "readlinkat", Same(libc::SYS_readlinkat)),
    (306, "fchmodat", Kernel),
    (307, "faccessat", Same(libc::SYS_faccessat)),
    (308, "pselect6", Own(signals::pselect6)),
    (309, "ppoll", Own(signals::ppoll)),
    (310, "unshare", Kernel),
    (311, "set_robust_list", Kernel),
    (312, "get_robust_list", Kernel),
    (313, "splice", Kernel),
    (314, "sync_file_range", Kernel),
    (315, "tee", Kernel),
    (316, "vmsplice", Kernel),
    (317, "move_pages", Kernel),
    (318, "getcpu", Kernel),
    (319, "epoll_pwait", Same(libc::SYS_epoll_pwait)),
    (320, "utimensat", Kernel),
    (321, "signalfd", Same(libc::SYS_signalfd)),
    (322, "timerfd_create", Kernel),
    (323, "eventfd", Kernel),
    (324, "fallocate", Kernel),
    (325, "timerfd_settime", Kernel),
    (326, "timerfd_gettime", Kernel),
    (327, "signalfd4", Same(libc::SYS_signalfd4)),
    (328, "eventfd2", Kernel),
    (329, "epoll_create1", Kernel),
    (330, "dup3", Same(libc::SYS_dup3)),
    (331, "pipe2", Kernel),
    (332, "inotify_init1", Kernel),
    (333, "preadv", Kernel),
    (334, "pwritev", Own(files::pwritev)),
    (335, "rt_tgsigqueueinfo", Kernel),
    (336, "perf_event_open", Kernel),
    (337, "recvmmsg", Kernel),
    (338, "fanotify_init", Kernel),
    (339, "fanotify_mark", Kernel),
    (340, "prlimit64", Same(libc::SYS_prlimit64)),
    (341, "name_to_handle_at", Kernel),
    (342, "open_by_handle_at", Kernel),
    (343, "clock_adjtime", Kernel),
    (344, "syncfs", Kernel),
    (345, "sendmmsg", Kernel),
    (346, "setns", Kernel),
    (347, "process_vm_readv", Kernel),
    (348, "process_vm_writev", Kernel),
    (349, "kcmp", Kernel),
    (350, "finit_module", Kernel),
    (351, "sched_setattr", Kernel),
    (352, "sched_getattr", Kernel),
    (353, "renameat2", Kernel),
    (354, "seccomp", Own(processes::seccomp)),
    (355, "getrandom", Kernel),
    (356, "memfd_create", Kernel),
    (357, "bpf", Kernel),
    (358, "execveat", Own(processes::execveat)),
    (359, "socket", Kernel),
    (360, "socketpair", Kernel),
    (361, "bind", Kernel),
    (362, "connect", Kernel),
    (363, "listen", Kernel),
    (364, "accept4", Kernel),
    (365, "getsockopt", Kernel),
    (366, "setsockopt", Kernel),
    (367, "getsockname", Kernel),
    (368, "getpeername", Kernel),
    (369, "sendto", Kernel),
    (370, "sendmsg", Kernel),
    (371, "recvfrom", Kernel),
    (372, "recvmsg", Kernel),
    (373, "shutdown", Kernel),
    (374, "userfaultfd", Same(libc::SYS_userfaultfd)),
    (375, "membarrier", Same(libc::SYS_membarrier)),
    (376, "mlock2", Kernel),
    (377, "copy_file_range", Kernel),
    (378, "preadv2", Kernel),
    (379, "pwritev2", Own(files::pwritev2)),
    (380, "pkey_mprotect", Same(libc::SYS_pkey_mprotect)),
    (381, "pkey_alloc", Kernel),
    (382, "pkey_free", Kernel),
    (383, "statx", Same(libc::SYS_statx)),
    (384, "arch_prctl", Own(processes::arch_prctl)),
    (385, "io_pgetevents", Refused(EVENTS)),
    (386, "rseq", Refused(RSEQ)),
    (393, "semget", Kernel),
    (394, "semctl", Kernel),
    (395, "shmget", Kernel),
    (396, "shmctl", Kernel),
    (397, "shmat", Own(memory::shmat)),
    (398, "shmdt", Same(libc::SYS_shmdt)),
    (399, "msgget", Kernel),
    (400, "msgsnd", Kernel),
    (401, "msgrcv", Kernel),
    (402, "msgctl", Kernel),
    (403, "clock_gettime64", Kernel),
    (404, "clock_settime64", Kernel),
    (405, "clock_adjtime64", Kernel),
    (406, "clock_getres_time64", Kernel),
    (407, "clock_nanosleep_time64", Kernel),
    (408, "timer_gettime64", Kernel),
    (409, "timer_settime64", Kernel),
    (410, "timerfd_gettime64", Kernel),
    (411, "timerfd_settime64", Kernel),
    (412, "utimensat_time64", Kernel),
    (413, "pselect6_time64", Own(signals::pselect6_time64)),
    (414, "ppoll_time64", Same(libc::SYS_ppoll)),
    (416, "io_pgetevents_time64", Refused(EVENTS)),
    (417, "recvmmsg_time64", Kernel),
    (418, "mq_timedsend_time64", Kernel),
    (419, "mq_timedreceive_time64", Kernel),
    (420, "semtimedop_time64", Kernel),
    (421, "rt_sigtimedwait_time64", Own(signals::rt_sigtimedwait_time64)),
    (422, "futex_time64", Kernel),
    (423, "sched_rr_get_interval_time64", Kernel),
    (424, "pidfd_send_signal", Kernel),
    (425, "io_uring_setup", Own(files::io_uring_setup)),
    (426, "io_uring_enter", Same(libc::SYS_io_uring_enter)),
    (427, "io_uring_register", Kernel),
    (428, "open_tree", Kernel),
    (429, "move_mount", Kernel),
    (430, "fsopen", Kernel),
    (431, "fsconfig", Kernel),
    (432, "fsmount", Kernel),
    (433, "fspick", Kernel),
    (434, "pidfd_open", Kernel),
    (435, "clone3", Own(processes::clone3)),
    (436, "close_range", Same(libc::SYS_close_range)),
    (437, "openat2", Own(files::openat2)),
    (438, "pidfd_getfd", Kernel),
    (439, "faccessat2", Same(libc::SYS_faccessat2)),
    (440, "process_madvise", Kernel),
    (441, "epoll_pwait2", Same(libc::SYS_epoll_pwait2)),
    (442, "mount_setattr", Kernel),
    (443, "quotactl_fd", Kernel),
    (444, "landlock_create_ruleset", Kernel),
    (445, "landlock_add_rule", Kernel),
    (446, "landlock_restrict_self", Kernel),
    (447, "memfd_secret", Kernel),
    (448, "process_mrelease", Kernel),
    (449, "futex_waitv", Kernel),
    (450, "set_mempolicy_home_node", Kernel),
    (451, "cachestat", Kernel),
    (452, "fchmodat2", Kernel),
    (453, "map_shadow_stack", Refused(SHADOW)),
    (454, "futex_wake", Kernel),
    (455, "futex_wait", Kernel),
    (456, "futex_requeue", Kernel),
    (457, "statmount", Kernel),
    (458, "listmount", Kernel),
    (459, "lsm_get_self_attr", Kernel),
    (460, "lsm_set_self_attr", Kernel),
    (461, "lsm_list_modules", Kernel),
    (462, "mseal", Kernel),
    (463, "setxattrat", Kernel),
    (464, "getxattrat", Kernel),
    (465, "listxattrat", Kernel),
    (466, "removexattrat", Kernel),
    (467, "open_tree_attr", Kernel),
    (468, "file_getattr", Kernel),
    (469, "file_setattr", Kernel),
}

/// Number and name of each call.
fn names() -> impl Iterator<Item = (u32, &'static str)> {
    NAMES
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(nr, name)| Some((nr.parse().ok()?, name)))
}

/// The name of the call `nr`.
pub(super) fn name(nr: u32) -> &'static str {
    names().find(|(number, _)| *number == nr).map_or("unknown", |(_, name)| name)
}

/// How the call `nr` is performed.
pub(super) fn treatment(nr: u32) -> Treatment {
    known(nr).unwrap_or(Kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted() {
        assert_eq!(names().count(), NAMES.lines().count());
        assert!(names().is_sorted_by_key(|(number, _)| number));
        assert!(names().all(|(number, _)| known(number).is_some()));
    }

    #[test]
    fn every_call_of_the_header_is_named() {
        let headers =
            ["/usr/include/x86_64-linux-gnu/asm/unistd_32.h", "/usr/include/asm/unistd_32.h"];
        let Some(header) = headers.iter().find_map(|path| std::fs::read_to_string(path).ok())
        else {
            return;
        };
        for line in header.lines() {
            let Some(definition) = line.strip_prefix("#define __NR_") else { continue };
            let (called, number) = definition.split_once(' ').expect("a name and a number");
            let number = number.trim().parse().expect("a number");
            // A header of a newer kernel has more calls at the end.
            if names().last().is_some_and(|(last, _)| number <= last) {
                assert_eq!(name(number), called, "{number}");
            }
        }
    }

    #[test]
    fn reasons_are_sentences_that_say_something() {
        for (number, name) in names() {
            if let Refused(reason) = treatment(number) {
                assert!(reason.len() > 20, "{name}");
            }
        }
    }
}
