//! The vsyscall page, at the top of the address space. Programs older than the vDSO call
//! `gettimeofday`, `time` and `getcpu` there. The page has no code that can be executed: the kernel
//! catches the fault of the fetch and emulates the call (`emulate_vsyscall` in Linux). This module
//! does the same for the guest.
//!
//! Data: whether this kernel has the page, looked up once. No lock: the dispatcher calls
//! [`System::vsyscall`] on the guest's thread.
//!
//! Example: the guest calls 0xffff_ffff_ff60_0400. `time` is made with rdi as its argument, rax
//! gets the result, the return address is popped, and the guest continues there.

use std::sync::OnceLock;

use dynasour_guest::ThreadContext;
use dynasour_guest::space::{self, page_down};

use crate::kernel::entry::{self, Call};
use crate::kernel::process::guest_access::guest_read;
use crate::kernel::process::{Outcome, System};
use crate::kernel::signal::frame::RESUME_FLAG;

/// The addresses of the three functions, and the system calls that they make
/// (Linux, asm/vsyscall.h).
const FUNCTIONS: [(u64, i64); 3] = [
    (0xffff_ffff_ff60_0000, libc::SYS_gettimeofday),
    (0xffff_ffff_ff60_0400, libc::SYS_time),
    (0xffff_ffff_ff60_0800, libc::SYS_getcpu),
];

// Indices in `ThreadContext::gpr`.
const RAX: usize = 0;
const RSP: usize = 4;
const RSI: usize = 6;
const RDI: usize = 7;

/// Whether this kernel has the page.
fn is_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    let looked =
        || space::maps().is_ok_and(|maps| maps.iter().any(|map| map.range.start == FUNCTIONS[0].0));
    *THERE.get_or_init(looked)
}

impl System {
    /// Does what the kernel does when the guest executes at `pc` in the vsyscall page: makes the
    /// call and returns to the caller, or raises a signal. `None`: `pc` is not in the page.
    pub(crate) fn vsyscall(&mut self, context: &mut ThreadContext, pc: u64) -> Option<Outcome> {
        if page_down(pc) != FUNCTIONS[0].0 || !is_there() {
            return None;
        }
        let Some(back) = emulate(context, pc) else {
            // The kernel records no new fault here, so the fault information that the handler sees
            // is that of the previous fault.
            return Some(self.force_segv(context, context.rflags | RESUME_FLAG));
        };
        context.gpr[RSP] = context.gpr[RSP].wrapping_add(8);
        context.rip = back;
        Some(Outcome::Continue)
    }
}

/// Makes the call of the function at `pc`, and returns the return address. `None`: there is no such
/// function, or the stack or a pointer argument cannot be accessed.
fn emulate(context: &mut ThreadContext, pc: u64) -> Option<u64> {
    let (_, nr) = FUNCTIONS.iter().find(|(address, _)| *address == pc)?;
    let back = guest_read(context.gpr[RSP]).ok()?;
    // SAFETY: the kernel checks the guest's pointers and writes the answers there.
    let result = unsafe { entry::raw(&Call::new(*nr, &[context.gpr[RDI], context.gpr[RSI], 0])) };
    if result == -i64::from(libc::EFAULT) {
        return None;
    }
    context.gpr[RAX] = result as u64;
    Some(u64::from_le_bytes(back))
}
