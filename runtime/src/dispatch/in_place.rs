//! Runs guest code in place (tier `direct`; `crate::kernel::entry::in_place`).
//!
//! ```text
//!   run ──► guest code ──► Left ──┬─ Call, Call32 ──► System::syscall
//!    ▲                            ├─ Fault ─────────► System::raise
//!    │                            └─ Interrupted ───► System::deliver_pending
//!    └────────────────────────────────┘
//! ```
//!
//! Data: [`InPlace`], the dispatcher's part. Invariants: a thread that runs in place is *outside*
//! ([`super::peers`]): nothing was made from the code that it executes, so a change of guest code
//! need not wait for it, and the processor notices the change. Another thread that needs it outside
//! guest code sends it a signal.
//!
//! Used by the thread of the dispatcher only; no lock.
//!
//! Example: `true` runs in place from its first instruction. At each `syscall` of its the kernel
//! raises SIGSYS; [`Dispatcher::run_in_place`] performs the call and runs on behind it.

use super::{Dispatcher, TRAP_FLAG};
use crate::config::Tier;
use crate::interp::{Stop, noncanonical};
use crate::kernel::entry::in_place::{self, Left};
use crate::kernel::process::{Outcome, System};
use crate::kernel::signal::GuestFault;
use crate::kernel::{x87_pointer, xstate};
use crate::memory;
use dynasour_guest::ThreadContext;
use dynasour_ir::Trap;
use dynasour_tracer::Selected;

/// Bytes of `int 0x80`.
const INT_80: u64 = 2;

/// Whether a thread runs guest code in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum InPlace {
    /// Syscall user dispatch is off: the thread has just begun, or is a fork's child.
    #[default]
    Off,
    /// It is on.
    On,
    /// The kernel does not have it; the thread runs copied blocks.
    Impossible,
}

impl Dispatcher {
    /// May the guest code at rip run in place now? Turns syscall user dispatch on if it is off.
    pub(super) fn may_run_in_place(&mut self, context: &ThreadContext) -> bool {
        if self.machine.config.tier != Tier::Direct {
            return false;
        }
        if self.in_place == InPlace::Off {
            let layout = xstate::layout();
            let features = layout.xcr0 & !xstate::PKRU;
            let possible = in_place::prepare(features, layout.size) && in_place::turn_on(context);
            self.in_place = if possible { InPlace::On } else { InPlace::Impossible };
        }
        // GS is the host's while guest code runs in place. The trap flag is the interpreter's.
        self.in_place == InPlace::On && context.gs_base == 0 && context.rflags & TRAP_FLAG == 0
    }

    /// Runs guest code in place until a signal interrupts it, and handles the reason. The thread is
    /// outside.
    pub(super) fn run_in_place(
        &mut self,
        context: &mut ThreadContext,
        system: &mut System,
    ) -> Outcome {
        if noncanonical::is_noncanonical(context.rip) {
            // A signal frame has named this address. The jump there would fault in the host.
            let stop = Stop::Trap { pc: context.rip, trap: Trap::Fetch };
            return self.handle_stop::<Selected>(context, system, stop);
        }
        // SAFETY: the context is this thread's, GS points to it, and dispatch is on.
        let left = unsafe { in_place::run(context) };
        if left != Left::Aborted {
            x87_pointer::loaded(context);
        }
        match left {
            Left::Aborted | Left::Interrupted => system.deliver_pending(context),
            Left::Call => self.handle_stop(context, system, Stop::<Selected>::Syscall),
            Left::Call32 => {
                let pc = context.rip - INT_80;
                self.handle_stop(context, system, Stop::<Selected>::Special { pc })
            }
            Left::Fault => {
                let info = memory::last_fault();
                if self.opened_by_fault(&info) {
                    return Outcome::Continue;
                }
                let fault = GuestFault::at(context.rip, &info);
                system.raise(context, fault)
            }
        }
    }
}
