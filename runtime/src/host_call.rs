//! System calls that the host makes for itself, past the C library.
//!
//! The C library's wrappers would set the host's `errno`, and some do more than the call. [`raw`]
//! returns the kernel's result as it is: a negative error number if the call failed.
//!
//! Calls on behalf of the guest are made by [`crate::kernel::entry::windowed`].
//! The module owns no data. No lock: any thread may call [`raw`], also in a signal handler.

use std::arch::asm;

/// A system call: its number and its arguments.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// The number (rax).
    pub nr: u64,
    /// The arguments, in the order of their registers: rdi, rsi, rdx, r10, r8, r9.
    pub args: [u64; 6],
}

impl Call {
    /// The call `nr` with `args` (at most six); the arguments not given are zero.
    pub fn new(nr: libc::c_long, args: &[u64]) -> Call {
        let mut call = Call { nr: nr as u64, args: [0; 6] };
        call.args[..args.len()].copy_from_slice(args);
        call
    }
}

/// Makes a system call for the host. Does not check for signals that are pending for the guest.
///
/// # Safety
/// The caller meets the conditions of the system call that it names.
pub unsafe fn raw(call: &Call) -> i64 {
    let [a, b, c, d, e, f] = call.args;
    let result: i64;
    // SAFETY: `syscall` changes rax, rcx and r11 besides what the call does, and the
    // caller vouches for the effects of the call.
    unsafe {
        asm!("syscall", inout("rax") call.nr => result, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, in("r9") f, out("rcx") _, out("r11") _, options(nostack));
    }
    result
}
