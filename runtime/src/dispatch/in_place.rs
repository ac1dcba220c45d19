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
//! guest code sends it a signal ([`super::peers::Peers::await_out_of_place`]).
//!
//! Used by the thread of the dispatcher only; no lock.
//!
//! Example: `true` runs in place from its first instruction. At each of its `syscall`
//! instructions the kernel raises SIGSYS; [`Dispatcher::run_in_place`] performs the call and runs
//! on behind it.

use super::Dispatcher;
use crate::changes::patches::{self, Trapped};
use crate::config::{Stage, Tier};
use crate::interp::{Stop, noncanonical};
use crate::kernel::entry::call_stubs::SYSCALL;
use crate::kernel::entry::in_place::{self, Left};
use crate::kernel::process::{Outcome, System};
use crate::kernel::signal::GuestFault;
use crate::kernel::{x87_pointer, xstate};
use crate::memory;
use dynasour_guest::ThreadContext;
use dynasour_guest::context::TRAP_FLAG;
use dynasour_ir::Trap;
use dynasour_tracer::Selected;

/// Bytes of `int 0x80`.
const INT_80: u64 = 2;
/// Bytes of `int3`.
const INT3: u64 = 1;
/// The exception number of `int3`.
const BREAKPOINT: u64 = 3;

/// Whether a thread runs guest code in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum InPlace {
    /// Syscall user dispatch is off: the thread has just begun, or is a fork's child.
    #[default]
    Off,
    /// It is on, and the calls of stubs are allowed.
    WithStubs,
    /// It is on, and all calls are blocked.
    Alone,
    /// The kernel does not have it; the thread runs copied blocks.
    Impossible,
}

/// Turns syscall user dispatch on.
fn turned_on(context: &ThreadContext, with_stubs: bool) -> InPlace {
    match (in_place::turn_on(context, with_stubs), with_stubs) {
        (false, _) => InPlace::Impossible,
        (true, true) => InPlace::WithStubs,
        (true, false) => InPlace::Alone,
    }
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
            self.in_place = match in_place::prepare(features, layout.size) {
                true => turned_on(context, !self.machine.call_sites.is_closed()),
                false => InPlace::Impossible,
            };
        }
        // GS is the host's while guest code runs in place. The trap flag is the interpreter's.
        self.in_place != InPlace::Impossible
            && context.gs_base == 0
            && context.rflags & TRAP_FLAG == 0
    }

    /// Runs guest code in place until a signal interrupts it, and handles the reason. The thread is
    /// outside.
    pub(super) fn run_in_place(
        &mut self,
        context: &mut ThreadContext,
        system: &mut System,
    ) -> Outcome {
        self.machine.call_sites.close_if_watched(system);
        if noncanonical::is_noncanonical(context.rip) {
            // A signal frame has named this address. The jump there would fault in the host.
            let stop = Stop::Trap { pc: context.rip, trap: Trap::Fetch };
            return self.handle_stop::<Selected>(context, system, stop);
        }
        self.peer.enter_in_place();
        if self.in_place == InPlace::WithStubs && self.machine.call_sites.is_closed() {
            self.peer.leave_in_place();
            self.in_place = turned_on(context, false);
            return Outcome::Continue;
        }
        // SAFETY: the context is this thread's, GS points to it, and dispatch is on.
        let left = unsafe { in_place::run(context) };
        self.peer.leave_in_place();
        if left != Left::Aborted {
            x87_pointer::loaded(context);
        }
        match left {
            Left::Aborted | Left::Interrupted => system.deliver_pending(context),
            Left::Call => {
                // The call may be logged, which only the runtime does.
                if !self.machine.config.log.contains(&Stage::Syscall) {
                    let pc = context.rip - SYSCALL;
                    let (sites, pages) = (&self.machine.call_sites, &self.machine.pages);
                    sites.trapped(pc, context.gpr[0], system, pages);
                }
                self.handle_stop(context, system, Stop::<Selected>::Syscall)
            }
            Left::Call32 => {
                let pc = context.rip - INT_80;
                self.handle_stop(context, system, Stop::<Selected>::Special { pc })
            }
            Left::Fault => {
                let info = memory::last_fault();
                let site = context.rip.wrapping_sub(INT3);
                if info.trapno == BREAKPOINT && patches::trapped(site) == Trapped::Passing {
                    context.rip = site;
                    return Outcome::Continue;
                }
                if self.opened_by_fault(&info) {
                    return Outcome::Continue;
                }
                let fault = GuestFault::at(context.rip, &info);
                system.raise(context, fault)
            }
        }
    }
}
