//! What the runtime does when the interpreter stops: system calls, instructions of the runtime,
//! traps and faults.
//!
//! The thread is outside guest code, and its context holds the exact state. No lock is held.
//!
//! Example: the interpreter stops with a fault at a store to a page of code that dynasour has
//! guarded. The page is opened and what was made from it dropped, in a transaction of
//! [`crate::changes`]; then the store is executed again, by itself.

use super::{Dispatcher, count};
use crate::changes::Store;
use crate::config::Stage;
use crate::interp::Stop;
use crate::kernel::process;
use crate::kernel::signal::GuestFault;
use crate::kernel::syscall::{Outcome, System, int80};
use crate::memory::{self, FaultInfo};
use crate::observe::profile::{Phase, during};
use dynasour_guest::ThreadContext;
use dynasour_ir::Trap;
use std::sync::atomic::Ordering;

impl Dispatcher {
    /// Does what the interpreter stopped for, other than the selector's wishes.
    pub(super) fn handle_stop<P>(
        &mut self,
        context: &mut ThreadContext,
        system: &mut System,
        stop: Stop<P>,
    ) -> Outcome {
        if let Stop::Special { pc } | Stop::Trap { pc, .. } | Stop::Fault { pc, .. } = stop
            && context.pending.load(Ordering::Relaxed) != 0
        {
            // The signal came first: the instruction is for later.
            context.rip = pc;
            return system.deliver_pending(context);
        }
        match stop {
            Stop::Syscall => {
                count(&self.peer.syscalls, 1);
                if self.machine.config.log.contains(&Stage::Syscall) {
                    let g = &context.gpr;
                    eprintln!("dynasour: syscall {} ({:#x}, {:#x}, {:#x})", g[0], g[7], g[6], g[2]);
                }
                during(Phase::Syscall, || system.syscall(context, self))
            }
            Stop::Special { pc } if int80::is_at(pc) => {
                count(&self.peer.syscalls, 1);
                during(Phase::Syscall, || system.syscall_32(context, self, pc))
            }
            Stop::Special { pc } => during(Phase::Syscall, || system.special(context, pc)),
            Stop::Trap { pc, trap } => {
                if let Trap::Fetch = trap
                    && let Some(outcome) = system.vsyscall(context, pc)
                {
                    return outcome;
                }
                let fault = match trap {
                    Trap::Undefined => GuestFault::undefined(pc),
                    Trap::Protection => GuestFault::protection(0),
                    Trap::Breakpoint => {
                        context.rip = pc + 1;
                        GuestFault::breakpoint()
                    }
                    Trap::Fetch => fetch_fault(self.interp.first_unfetchable(pc)),
                };
                system.raise(context, fault)
            }
            Stop::Fault { info, .. } if self.opened_by_fault(&info) => self.repeat(context, system),
            Stop::Fault { pc, info } => {
                let fault = GuestFault::noted(context, pc, &info);
                system.raise(context, fault)
            }
            Stop::Pending => system.deliver_pending(context),
            Stop::Policy(_) => Outcome::Continue,
            Stop::Broken(error) => {
                process::complain(&format!(
                    "internal error at guest pc {:#x}: {error}",
                    context.rip
                ));
                Outcome::Killed(libc::SIGABRT)
            }
        }
    }

    /// Was this fault only ours? Then its page is open now, and whatever was made from it is gone.
    pub(super) fn opened_by_fault(&mut self, fault: &FaultInfo) -> bool {
        let machine = self.machine;
        match machine.pages.announce_store(fault) {
            Store::Refused => false,
            Store::Open => true,
            Store::Guarded(change) => {
                change.quiesce(self).perform(|| ()).0.publish(self, []);
                true
            }
        }
    }

    /// The instruction at rip wrote to a page of code that is open now: runs it again, by itself,
    /// since it may have changed the next one.
    fn repeat(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        if !self.peer.enter(context) {
            // It faults again, or does not, when it is tried next.
            self.forget_posted();
            return Outcome::Continue;
        }
        let stop = self.interp.run_one(context);
        self.peer.leave();
        stop.map_or(Outcome::Continue, |stop| self.handle_stop(context, system, stop))
    }
}

/// What fetching an instruction at `addr`, where that is not possible, raises.
fn fetch_fault(addr: u64) -> GuestFault {
    match memory::fetch_code(addr, &mut [0]) {
        0 => GuestFault::fetch(addr, &memory::last_fault()),
        // It is there: what is missing is the right to execute it.
        _ => GuestFault::not_executable(addr),
    }
}
