//! Which memory a system call of the guest may write.
//!
//! The kernel answers EFAULT if a page is write-protected, possibly after it has consumed the data
//! that it was to write. So guarded pages are opened before the call. Opening too many pages is
//! harmless, so two rules are enough:
//!
//! * every argument may point to a structure of [`STRUCTURE`] bytes (a stat, a timespec, an
//!   address, …);
//! * longer outputs are in the table of [`outputs`]: buffers with their lengths, lists of buffers,
//!   messages.
//!
//! Memory that the kernel writes after the call has returned (io_submit) is opened, too. Code that
//! is made from it before the kernel writes becomes stale unnoticed.
//!
//! Pure functions of the call and of guest memory: no data, no lock.

use std::ops::Range;

use smallvec::SmallVec;

use crate::memory;

/// The longest structure of fixed size that some call fills in: struct utsname has 390 bytes.
const STRUCTURE: u64 = 512;

/// Bytes that an ioctl may write: the structure can be longer than its request number says (guess).
const IOCTL: u64 = 16 << 10;

/// Buffers in one list of them (`UIO_MAXIOV`).
pub(super) const MOST_BUFFERS: u64 = 1024;

/// Ranges that may be written.
pub type Outputs = SmallVec<[Range<u64>; 8]>;

/// What the call `nr` may write, given its arguments.
pub fn outputs(nr: i64, args: &[u64; 6]) -> Outputs {
    let mut out = Outputs::new();
    for &address in args {
        add(&mut out, address, STRUCTURE);
    }
    let a = |n: usize| args[n];
    match nr {
        libc::SYS_read
        | libc::SYS_pread64
        | libc::SYS_recvfrom
        | libc::SYS_getdents
        | libc::SYS_getdents64
        | libc::SYS_readlink
        | libc::SYS_mq_timedreceive
        | libc::SYS_listxattr
        | libc::SYS_llistxattr
        | libc::SYS_flistxattr
        | libc::SYS_syslog => add(&mut out, a(1), a(2)),
        libc::SYS_msgrcv => add(&mut out, a(1), a(2).saturating_add(8)),
        libc::SYS_getrandom | libc::SYS_getcwd => add(&mut out, a(0), a(1)),
        libc::SYS_readlinkat | libc::SYS_getxattr | libc::SYS_lgetxattr | libc::SYS_fgetxattr => {
            add(&mut out, a(2), a(3));
        }
        libc::SYS_readv | libc::SYS_preadv | libc::SYS_preadv2 | libc::SYS_process_vm_readv => {
            vectors(&mut out, a(1), a(2));
        }
        // It may be this process's own.
        libc::SYS_process_vm_writev => vectors(&mut out, a(3), a(4)),
        libc::SYS_recvmsg => message(&mut out, a(1)),
        libc::SYS_recvmmsg => {
            const HEADER: u64 = 64; // struct mmsghdr
            for n in 0..a(2).min(MOST_BUFFERS) {
                add(&mut out, a(1).wrapping_add(n * HEADER), HEADER);
                message(&mut out, a(1).wrapping_add(n * HEADER));
            }
        }
        libc::SYS_poll | libc::SYS_ppoll => array(&mut out, a(0), a(1), 8),
        libc::SYS_select | libc::SYS_pselect6 => {
            for set in 1..4 {
                add(&mut out, a(set), u64::from(a(0) as u32) / 8 + 8);
            }
        }
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => {
            array(&mut out, a(1), a(2), 12)
        }
        libc::SYS_io_getevents | IO_PGETEVENTS => array(&mut out, a(3), a(2), 32),
        libc::SYS_io_submit => {
            const READ: u64 = 0;
            const READ_VECTORS: u64 = 7;
            for n in 0..a(1).min(MOST_BUFFERS) {
                let Some(block) = word(a(2).wrapping_add(8 * n)) else { break };
                // struct iocb: opcode in the third word's low half, then buffer and length from
                // byte 24 on.
                let (Some(operation), Some(buffer), Some(len)) = (
                    word(block.wrapping_add(16)),
                    word(block.wrapping_add(24)),
                    word(block.wrapping_add(32)),
                ) else {
                    continue;
                };
                match operation & 0xffff {
                    READ => add(&mut out, buffer, len),
                    READ_VECTORS => vectors(&mut out, buffer, len),
                    _ => {}
                }
            }
        }
        libc::SYS_getsockopt => {
            if let Some(len) = word(a(4)) {
                add(&mut out, a(3), len & 0xffff_ffff);
            }
        }
        libc::SYS_mincore => add(&mut out, a(2), a(1) / 4096 + 1),
        libc::SYS_getgroups => array(&mut out, a(1), a(0), 4),
        libc::SYS_sched_getaffinity => add(&mut out, a(2), a(1)),
        libc::SYS_get_mempolicy => add(&mut out, a(1), a(2) / 8 + 8),
        libc::SYS_ioctl => add(&mut out, a(2), IOCTL),
        libc::SYS_keyctl => add(&mut out, a(2), a(3)),
        libc::SYS_clone3 => {
            // struct clone_args: pidfd, child_tid and parent_tid are the words 1 to 3.
            for address in (1..4).filter_map(|n| word(a(0).wrapping_add(8 * n))) {
                add(&mut out, address, 4);
            }
        }
        _ => {}
    }
    out
}

const IO_PGETEVENTS: i64 = 333;

pub(super) fn add(out: &mut Outputs, address: u64, len: u64) {
    if address != 0 && len != 0 {
        out.push(address..address.saturating_add(len));
    }
}

fn array(out: &mut Outputs, address: u64, count: u64, size: u64) {
    add(out, address, u64::from(count as u32).saturating_mul(size));
}

/// The word at a guest address, if it can be read.
pub(super) fn word(address: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    (memory::copy_in(address, &mut bytes) == 8).then(|| u64::from_le_bytes(bytes))
}

/// An array of struct iovec.
pub(super) fn vectors(out: &mut Outputs, address: u64, count: u64) {
    for n in 0..count.min(MOST_BUFFERS) {
        let at = address.wrapping_add(16 * n);
        let (Some(base), Some(len)) = (word(at), word(at.wrapping_add(8))) else { break };
        add(out, base, len);
    }
}

/// A struct msghdr: name, length of the name, vectors, their number, control data, its length.
pub(super) fn message(out: &mut Outputs, address: u64) {
    let field = |n: u64| word(address.wrapping_add(8 * n)).unwrap_or(0);
    add(out, field(0), field(1) & 0xffff_ffff);
    vectors(out, field(2), field(3));
    add(out, field(4), field(5));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writes(nr: i64, args: &[u64], address: u64) -> bool {
        let mut all = [0; 6];
        all[..args.len()].copy_from_slice(args);
        outputs(nr, &all).iter().any(|range| range.contains(&address))
    }

    #[test]
    fn buffers_are_written_to_their_end() {
        assert!(writes(libc::SYS_read, &[0, 0x10000, 0x5000], 0x14fff));
        assert!(!writes(libc::SYS_read, &[0, 0x10000, 0x5000], 0x15000));
        assert!(!writes(libc::SYS_write, &[0, 0x10000, 0x5000], 0x14fff));
        assert!(writes(libc::SYS_getrandom, &[0x10000, 0x1000, 0], 0x10fff));
        assert!(writes(libc::SYS_poll, &[0x10000, 100, 0], 0x10000 + 799));
        assert!(writes(libc::SYS_newfstatat, &[0, 0x20000, 0x10000, 0], 0x10000 + 143));
        assert!(writes(libc::SYS_read, &[0, u64::MAX - 5, u64::MAX], u64::MAX - 1));
    }

    #[test]
    fn lists_of_buffers_are_followed() {
        crate::memory::test_handler::install();
        let vectors = [[0x10000u64, 0x1000], [0x50000, 0x2000]];
        let list = vectors.as_ptr() as u64;
        for address in [0x10fff, 0x51fff] {
            assert!(writes(libc::SYS_readv, &[0, list, 2], address));
            assert!(!writes(libc::SYS_writev, &[0, list, 2], address));
        }
        assert!(!writes(libc::SYS_readv, &[0, list, 1], 0x50000));
        let message = [0x70000u64, 128, list, 2, 0x90000, 0x1000, 0];
        let header = message.as_ptr() as u64;
        for address in [0x7007f, 0x51fff, 0x90fff] {
            assert!(writes(libc::SYS_recvmsg, &[0, header, 0], address));
        }
        // A list that is not there.
        assert!(!writes(libc::SYS_readv, &[0, 8, 1000], 0x10000));
    }
}
