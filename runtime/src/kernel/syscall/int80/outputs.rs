//! Which memory a 32-bit system call of the guest may write: [`crate::changes::outputs`] for the
//! i386 table.
//!
//! Pages of code are write-protected, and a call that writes to one fails with EFAULT; so the pages
//! are opened before the call. Ranges that are too large do no harm. Lists of buffers have 32-bit
//! words here. For all other arguments the rules are those of the corresponding 64-bit call.
//!
//! No data; [`super::System::pass_32`] calls [`outputs`] without locks. Another thread of the guest
//! may change a list of buffers between our read and the kernel's, as with 64-bit calls; then the
//! guest may get EFAULT.
//!
//! Example: `readv` with one buffer of 0x1000 bytes at 0x10000 yields 0x10000..0x11000, and 512
//! bytes at each argument.

use crate::changes::outputs::{Outputs, outputs as outputs_64};

use super::{word, words};

/// The longest list of buffers (`UIO_MAXIOV`, linux/uio.h): the kernel refuses longer ones.
const MOST_BUFFERS: u64 = 1024;

/// The ranges that the call `nr` may write, given its arguments.
pub(super) fn outputs(nr: u32, args: &[u64; 6]) -> Outputs {
    let [a, b, c, d, e, _] = *args;
    let (same, list) = match nr {
        3 => (libc::SYS_read, None),
        54 => (libc::SYS_ioctl, None),
        80 | 205 => (libc::SYS_getgroups, None),
        85 => (libc::SYS_readlink, None),
        82 => return old_select(a),
        142 => (libc::SYS_select, None),
        102 => return socketcall(a, b),
        103 => (libc::SYS_syslog, None),
        117 => return ipc(args),
        141 => (libc::SYS_getdents, None),
        145 | 333 | 378 => (-1, Some((b, c))),
        168 => (libc::SYS_poll, None),
        309 => (libc::SYS_ppoll, None),
        180 => (libc::SYS_pread64, None),
        183 => (libc::SYS_getcwd, None),
        218 => (libc::SYS_mincore, None),
        220 => (libc::SYS_getdents64, None),
        229 => (libc::SYS_getxattr, None),
        230 => (libc::SYS_lgetxattr, None),
        231 => (libc::SYS_fgetxattr, None),
        232 => (libc::SYS_listxattr, None),
        233 => (libc::SYS_llistxattr, None),
        234 => (libc::SYS_flistxattr, None),
        242 => (libc::SYS_sched_getaffinity, None),
        247 => (libc::SYS_io_getevents, None),
        248 => return io_submit(b, c),
        256 => (libc::SYS_epoll_wait, None),
        275 => (libc::SYS_get_mempolicy, None),
        280 | 419 => (libc::SYS_mq_timedreceive, None),
        288 => (libc::SYS_keyctl, None),
        308 => (libc::SYS_pselect6, None),
        337 | 417 => return messages(b, c),
        347 => (-1, Some((b, c))),
        348 => (-1, Some((d, e))),
        355 => (libc::SYS_getrandom, None),
        365 => (libc::SYS_getsockopt, None),
        371 => (libc::SYS_recvfrom, None),
        372 => return message(b),
        401 => (libc::SYS_msgrcv, None),
        _ => (-1, None),
    };
    // No 64-bit call has the number -1. For it `outputs_64` yields only the ranges of structures
    // to which the arguments may point.
    let mut out = outputs_64(same, args);
    if let Some((address, count)) = list {
        vectors(&mut out, address, count);
    }
    out
}

/// Adds a range, unless it is empty or begins at a null pointer.
fn add(out: &mut Outputs, address: u64, len: u64) {
    if address != 0 && len != 0 {
        out.push(address..address.saturating_add(len));
    }
}

/// Adds the buffers of an array of struct compat_iovec: address and length.
fn vectors(out: &mut Outputs, address: u64, count: u64) {
    for n in 0..count.min(MOST_BUFFERS) {
        let Ok([base, len]) = words(address.wrapping_add(8 * n)) else { break };
        add(out, base.into(), len.into());
    }
}

/// Adds the buffers of a struct compat_msghdr: name and its length, vectors and their number,
/// control data and its length, flags.
fn message_at(out: &mut Outputs, address: u64) {
    const SIZE: u64 = 28;
    add(out, address, SIZE);
    if let Ok([name, name_len, list, count, control, control_len]) = words(address) {
        add(out, name.into(), name_len.into());
        vectors(out, list.into(), count.into());
        add(out, control.into(), control_len.into());
    }
}

/// The buffers of one struct compat_msghdr.
fn message(address: u64) -> Outputs {
    let mut out = Outputs::new();
    message_at(&mut out, address);
    out
}

/// The buffers of an array of struct compat_mmsghdr: a message and its received length.
fn messages(address: u64, count: u64) -> Outputs {
    const SIZE: u64 = 32;
    let mut out = Outputs::new();
    for n in 0..count.min(MOST_BUFFERS) {
        let at = address.wrapping_add(n * SIZE);
        add(&mut out, at, SIZE);
        message_at(&mut out, at);
    }
    out
}

/// `socketcall`: the number of a function (linux/net.h) and the address of its arguments.
fn socketcall(function: u64, address: u64) -> Outputs {
    let arguments = |count: u64| {
        let mut all = [0; 6];
        for n in 0..count {
            all[n as usize] = word(address.wrapping_add(4 * n)).map_or(0, u64::from);
        }
        all
    };
    match function {
        10 => outputs_64(libc::SYS_recvfrom, &arguments(4)),
        12 => outputs_64(libc::SYS_recvfrom, &arguments(6)),
        15 => outputs_64(libc::SYS_getsockopt, &arguments(5)),
        17 => message(arguments(3)[1]),
        19 => messages(arguments(5)[1], arguments(5)[2]),
        // `socketpair` writes two descriptors; `accept`, `getsockname` and `getpeername` write an
        // address and its length.
        _ => outputs_64(-1, &arguments(5)),
    }
}

/// `ipc`: a function, then its arguments.
fn ipc(args: &[u64; 6]) -> Outputs {
    const MSGRCV: u64 = 12;
    let mut out = outputs_64(-1, args);
    if args[0] & 0xffff == MSGRCV {
        // Version 0 has the buffer's address in a structure.
        let buffer = match args[0] >> 16 {
            0 => word(args[4]).map_or(0, u64::from),
            _ => args[4],
        };
        add(&mut out, buffer, args[2].saturating_add(4));
    }
    // The fifth argument of `ipc` points to the argument of `semctl`, which is a pointer itself.
    // 512 bytes hold its structures (guess); a longer array of values may get EFAULT.
    add(&mut out, word(args[4]).map_or(0, u64::from), 512);
    out
}

/// `select` with its five arguments in a structure.
fn old_select(address: u64) -> Outputs {
    let Ok(arguments) = words::<5>(address) else { return Outputs::new() };
    let [a, b, c, d, e] = arguments.map(u64::from);
    outputs_64(libc::SYS_select, &[a, b, c, d, e, 0])
}

/// `io_submit`: an array of 32-bit addresses of struct iocb.
fn io_submit(count: u64, list: u64) -> Outputs {
    const READ: u32 = 0;
    const READ_VECTORS: u32 = 7;
    let mut out = Outputs::new();
    for n in 0..count.min(MOST_BUFFERS) {
        let Ok(block) = word(list.wrapping_add(4 * n)) else { break };
        // Words of struct iocb: the opcode is in the lower half of word 4, the buffer's address in
        // word 6, its length in word 8.
        let Ok(block) = words::<10>(block.into()) else { continue };
        let (buffer, len) = (u64::from(block[6]), u64::from(block[8]));
        match block[4] & 0xffff {
            READ => add(&mut out, buffer, len),
            READ_VECTORS => vectors(&mut out, buffer, len),
            _ => {}
        }
    }
    out
}
