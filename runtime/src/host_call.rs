//! System calls that the host makes for itself, past the C library.
//!
//! The C library's wrappers would set `errno`, of which host and guest have one each, and some do
//! more than the call. Calls on behalf of the guest are made by [`crate::kernel::entry::windowed`].
//! Any thread may call [`raw`], in a signal handler, too.

use std::arch::asm;

/// A system call: its number and its arguments.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// The number (rax).
    pub nr: u64,
    /// rdi, rsi, rdx, r10, r8, r9.
    pub args: [u64; 6],
}

impl Call {
    /// The call `nr` with `args`, the rest zero.
    pub fn new(nr: libc::c_long, args: &[u64]) -> Call {
        let mut call = Call { nr: nr as u64, args: [0; 6] };
        call.args[..args.len()].copy_from_slice(args);
        call
    }
}

/// Performs a system call of our own, whatever is pending.
///
/// # Safety
/// As for the call itself.
pub unsafe fn raw(call: &Call) -> i64 {
    let [a, b, c, d, e, f] = call.args;
    let result: i64;
    // SAFETY: `syscall` changes rax, rcx and r11 besides what the call does, which the caller
    // answers for.
    unsafe {
        asm!("syscall", inout("rax") call.nr => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") f, out("rcx") _, out("r11") _, options(nostack));
    }
    result
}
