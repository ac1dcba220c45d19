//! Which memory a system call of the guest reads, where pages with patches are hidden
//! ([`super::hiding`]).
//!
//! The kernel does not read a hidden page: the call fails with EFAULT, or transfers less than the
//! guest has asked for. So there are three rules:
//!
//! * Calls that may have done something before they come to the page are in the table of
//!   [`inputs`]. The pages that they read are shown before the call.
//! * Another call that has failed with EFAULT is made once more if one of its arguments leads to a
//!   hidden page, or if it is one of those that follow addresses in memory ([`follows_addresses`]):
//!   nothing was done yet.
//! * Calls that read nothing through pointers are never made again ([`only_writes`]): these may
//!   have taken something from a queue before they failed.
//!
//! Functions of the call and of guest memory: no data, no lock but that of the patches.
//!
//! Example: `write(1, main, 100)`, with a patch in `main`. The page is shown, and 100 bytes of the
//! guest's own are written.

use super::hiding;
use super::outputs::{self, Outputs as Ranges, add};

/// Bytes that an argument which points somewhere may point to: as long as a path (`PATH_MAX`).
const POINTED_TO: u64 = 4096;

/// What the call `nr` reads, of the calls that may do a part of their work before they read it.
fn inputs(nr: i64, args: &[u64; 6]) -> Ranges {
    const SET: u64 = 8; // the kernel's sigset_t
    const TIME: u64 = 16; // struct timespec
    let mut ranges = Ranges::new();
    let a = |n: usize| args[n];
    let mut read = |address: u64, len: u64| add(&mut ranges, address, len);
    match nr {
        libc::SYS_write | libc::SYS_pwrite64 => read(a(1), a(2)),
        libc::SYS_sendto => {
            read(a(1), a(2));
            read(a(4), u64::from(a(5) as u32));
        }
        libc::SYS_mq_timedreceive => read(a(4), TIME),
        libc::SYS_rt_sigtimedwait => {
            read(a(0), SET);
            read(a(2), TIME);
        }
        libc::SYS_epoll_pwait => read(a(4), SET),
        libc::SYS_epoll_pwait2 => {
            read(a(3), TIME);
            read(a(4), SET);
        }
        libc::SYS_writev | libc::SYS_pwritev | libc::SYS_pwritev2 | libc::SYS_vmsplice => {
            lists(&mut ranges, a(1), a(2));
        }
        // The buffers cannot be written if they are in hidden pages.
        libc::SYS_readv | libc::SYS_preadv | libc::SYS_preadv2 => list(&mut ranges, a(1), a(2)),
        // The other process may be this one.
        libc::SYS_process_vm_readv => {
            list(&mut ranges, a(1), a(2));
            lists(&mut ranges, a(3), a(4));
        }
        libc::SYS_process_vm_writev => {
            lists(&mut ranges, a(1), a(2));
            list(&mut ranges, a(3), a(4));
        }
        libc::SYS_sendmsg | libc::SYS_recvmsg => message(&mut ranges, a(1)),
        libc::SYS_sendmmsg | libc::SYS_recvmmsg => {
            const HEADER: u64 = 64; // struct mmsghdr
            for n in 0..a(2).min(outputs::MOST_BUFFERS) {
                message(&mut ranges, a(1).wrapping_add(n * HEADER));
            }
            if nr == libc::SYS_recvmmsg {
                add(&mut ranges, a(4), TIME);
            }
        }
        _ => {}
    }
    ranges
}

/// An array of struct iovec.
fn list(ranges: &mut Ranges, address: u64, count: u64) {
    add(ranges, address, 16 * count.min(outputs::MOST_BUFFERS));
}

/// An array of struct iovec, and the buffers.
fn lists(ranges: &mut Ranges, address: u64, count: u64) {
    list(ranges, address, count);
    outputs::vectors(ranges, address, count);
}

/// A struct msghdr, and what it leads to.
fn message(ranges: &mut Ranges, address: u64) {
    const HEADER: u64 = 56; // struct msghdr
    add(ranges, address, HEADER);
    let field = |n: u64| outputs::word(address.wrapping_add(8 * n)).unwrap_or(0);
    list(ranges, field(2), field(3));
    outputs::message(ranges, address);
}

/// Has the call read nothing through pointers if it has failed with EFAULT, or nothing that
/// [`inputs`] does not name? What it may have taken from a queue is lost.
fn only_writes(nr: i64) -> bool {
    matches!(
        nr,
        libc::SYS_read
            | libc::SYS_pread64
            | libc::SYS_readv
            | libc::SYS_preadv
            | libc::SYS_preadv2
            | libc::SYS_recvfrom
            | libc::SYS_recvmsg
            | libc::SYS_recvmmsg
            | libc::SYS_accept
            | libc::SYS_accept4
            | libc::SYS_wait4
            | libc::SYS_waitid
            | libc::SYS_getdents
            | libc::SYS_getdents64
            | libc::SYS_msgrcv
            | libc::SYS_mq_timedreceive
            | libc::SYS_rt_sigtimedwait
            | libc::SYS_epoll_wait
            | libc::SYS_epoll_pwait
            | libc::SYS_epoll_pwait2
            | libc::SYS_pipe
            | libc::SYS_pipe2
            | libc::SYS_socketpair
    )
}

/// May the call read memory to which its arguments lead only by way of other memory, apart from
/// the calls of [`inputs`]?
fn follows_addresses(nr: i64) -> bool {
    matches!(
        nr,
        libc::SYS_execve
            | libc::SYS_execveat
            | libc::SYS_ioctl
            | libc::SYS_fcntl
            | libc::SYS_setsockopt
            | libc::SYS_prctl
            | libc::SYS_seccomp
            | libc::SYS_bpf
            | libc::SYS_clone3
            | libc::SYS_ptrace
            | libc::SYS_keyctl
            | libc::SYS_quotactl
            | libc::SYS_mount
            | libc::SYS_pselect6
            | libc::SYS_move_pages
            | libc::SYS_perf_event_open
            | 449 // futex_waitv (asm/unistd_64.h)
    )
}

/// May a call of a stub ([`System::passes_on`]) fail with EFAULT because what it reads is hidden?
///
/// [`System::passes_on`]: crate::kernel::process::System
pub fn may_be_hidden(nr: i64) -> bool {
    matches!(
        nr,
        libc::SYS_write
            | libc::SYS_pwrite64
            | libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_fcntl
            | libc::SYS_ioctl
            | libc::SYS_poll
            | libc::SYS_select
            | libc::SYS_epoll_ctl
            | libc::SYS_sendto
            | libc::SYS_sendmsg
            | libc::SYS_recvmsg
            | libc::SYS_futex
            | libc::SYS_nanosleep
            | libc::SYS_clock_nanosleep
    )
}

/// The call `nr` is about to be made: shows the hidden pages that it reads. Returns whether there
/// were any.
pub fn show(nr: i64, args: &[u64; 6]) -> bool {
    let mut any = false;
    // What was hidden may lead on.
    while hiding::any() && hiding::show(&inputs(nr, args)) {
        any = true;
    }
    any
}

/// The call `nr` has failed with EFAULT. May hidden pages have been the reason? Then it is to be
/// made again: these are shown now.
pub fn show_after_fault(nr: i64, args: &[u64; 6]) -> bool {
    if !hiding::any() {
        return false;
    }
    if show(nr, args) {
        return true;
    }
    if only_writes(nr) {
        return false;
    }
    let mut pointed_to = Ranges::new();
    args.iter().for_each(|address| add(&mut pointed_to, *address, POINTED_TO));
    hiding::show(&pointed_to) || follows_addresses(nr) && hiding::show_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(nr: i64, args: &[u64], address: u64) -> bool {
        let mut all = [0; 6];
        all[..args.len()].copy_from_slice(args);
        inputs(nr, &all).iter().any(|range| range.contains(&address))
    }

    #[test]
    fn buffers_are_read_to_their_end() {
        assert!(reads(libc::SYS_write, &[1, 0x10000, 0x5000], 0x14fff));
        assert!(!reads(libc::SYS_write, &[1, 0x10000, 0x5000], 0x15000));
        assert!(!reads(libc::SYS_read, &[1, 0x10000, 0x5000], 0x10000));
        assert!(reads(libc::SYS_sendto, &[1, 0, 0, 0, 0x10000, 16], 0x1000f));
        assert!(!reads(libc::SYS_getpid, &[0x10000, 0x10000, 0x10000], 0x10000));
    }

    #[test]
    fn lists_are_read_and_followed() {
        memory_faults_are_errors();
        let vectors = [[0x10000u64, 0x1000], [0x50000, 0x2000]];
        let list = vectors.as_ptr() as u64;
        for address in [0x10fff, 0x51fff, list, list + 31] {
            assert!(reads(libc::SYS_writev, &[0, list, 2], address));
        }
        assert!(reads(libc::SYS_readv, &[0, list, 2], list + 16));
        assert!(!reads(libc::SYS_readv, &[0, list, 2], 0x10000));
        let message = [0x70000u64, 128, list, 2, 0x90000, 0x1000, 0];
        let header = message.as_ptr() as u64;
        for address in [header + 55, list + 31, 0x7007f, 0x51fff, 0x90fff] {
            assert!(reads(libc::SYS_sendmsg, &[0, header, 0], address));
        }
    }

    fn memory_faults_are_errors() {
        crate::memory::test_handler::install();
    }

    #[test]
    fn without_hidden_pages_no_call_is_made_again() {
        assert!(!show(libc::SYS_write, &[1, 0x10000, 0x5000, 0, 0, 0]));
        assert!(!show_after_fault(libc::SYS_nanosleep, &[0; 6]));
        assert!(only_writes(libc::SYS_read) && !only_writes(libc::SYS_write));
    }
}
