//! The page at the top of the address space where programs older than the vDSO call `gettimeofday`,
//! `time` and `getcpu`. There is nothing to be executed: the kernel notices the attempt to fetch,
//! and does what was meant (`emulate_vsyscall`).

use std::sync::OnceLock;

use dynasour_guest::ThreadContext;
use dynasour_guest::space::{self, page_down};

use crate::kernel::entry::{self, Call};
use crate::kernel::process::guest_access::guest_read;
use crate::kernel::process::{Outcome, System};
use crate::kernel::signal::frame::RESUME_FLAG;

/// The three entries, and the calls that they stand for.
const ENTRIES: [(u64, i64); 3] = [
    (0xffff_ffff_ff60_0000, libc::SYS_gettimeofday),
    (0xffff_ffff_ff60_0400, libc::SYS_time),
    (0xffff_ffff_ff60_0800, libc::SYS_getcpu),
];

/// In the general registers.
const RAX: usize = 0;
const RSP: usize = 4;
const RSI: usize = 6;
const RDI: usize = 7;

/// Whether this kernel has the page.
fn is_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    let looked = || {
        space::maps().is_ok_and(|maps| maps.iter().any(|entry| entry.range.start == ENTRIES[0].0))
    };
    *THERE.get_or_init(looked)
}

impl System {
    /// Whatever the kernel does about an attempt to execute something at `pc`, if that is in the
    /// page: makes the call and returns from there, or raises a signal.
    pub(crate) fn vsyscall(&mut self, context: &mut ThreadContext, pc: u64) -> Option<Outcome> {
        if page_down(pc) != ENTRIES[0].0 || !is_there() {
            return None;
        }
        let Some(back) = emulate(context, pc) else {
            // Not a fault of its own: what the handler is told of one is about the last one.
            return Some(self.force_segv(context, context.rflags | RESUME_FLAG));
        };
        context.gpr[RSP] = context.gpr[RSP].wrapping_add(8);
        context.rip = back;
        Some(Outcome::Continue)
    }
}

/// Makes the call for which `pc` stands, and says where the caller is. None if there is no such
/// call, or its arguments or the stack are nowhere.
fn emulate(context: &mut ThreadContext, pc: u64) -> Option<u64> {
    let (_, nr) = ENTRIES.iter().find(|(entry, _)| *entry == pc)?;
    let back = guest_read(context.gpr[RSP]).ok()?;
    // SAFETY: the kernel checks the pointers, which are the guest's, and writes the answers there.
    let result = unsafe { entry::raw(&Call::new(*nr, &[context.gpr[RDI], context.gpr[RSI], 0])) };
    if result == -i64::from(libc::EFAULT) {
        return None;
    }
    context.gpr[RAX] = result as u64;
    Some(u64::from_le_bytes(back))
}
