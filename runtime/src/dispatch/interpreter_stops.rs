//! What the runtime does when the interpreter stops: system calls, instructions of the runtime,
//! traps and faults.
//!
//! Data: none of its own. The thread is outside guest code and holds no lock, and its context holds
//! the exact guest state.
//!
//! Example: the interpreter stops with a fault at a store to a page of code that dynasour has
//! guarded. A transaction of [`crate::changes`] opens the page and drops the code made from it.
//! Then the store is executed again, by itself.

use super::{Dispatcher, count};
use crate::changes::Store;
use crate::config::Stage;
use crate::interp::Stop;
use crate::kernel::process;
use crate::kernel::process::{Outcome, System};
use crate::kernel::signal::GuestFault;
use crate::kernel::syscall::int80;
use crate::memory::{self, FaultInfo};
use crate::observe::profile::{Phase, during};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::{Decoded, Reader};
use dynasour_ir::Trap;
use std::sync::atomic::Ordering;

impl Dispatcher {
    /// The address behind the `int3` at `pc`, which may have prefixes.
    fn behind_breakpoint(&self, pc: u64) -> u64 {
        let length = match Reader::new(&*self.interp.code()).decode(pc) {
            Decoded::Inst(inst) => inst.len() as u64,
            _ => 1,
        };
        pc.wrapping_add(length)
    }

    /// Handles a stop of the interpreter. Stops that the selector asked for are handled by
    /// [`Dispatcher::selected`] instead.
    pub(super) fn handle_stop<P>(
        &mut self,
        context: &mut ThreadContext,
        system: &mut System,
        stop: Stop<P>,
    ) -> Outcome {
        // A call that was refused may have overwritten its target, so it cannot be tried later.
        let may_be_retried = !matches!(stop, Stop::Trap { trap: Trap::Protection, .. });
        if let Stop::Special { pc } | Stop::Trap { pc, .. } | Stop::Fault { pc, .. } = stop
            && may_be_retried
            && context.pending.load(Ordering::Relaxed) != 0
        {
            // A signal is pending: it is delivered before the instruction, which is tried later.
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
                        context.rip = self.behind_breakpoint(pc);
                        GuestFault::breakpoint()
                    }
                    Trap::Fetch => fetch_fault(self.interp.first_unfetchable(pc)),
                };
                system.raise(context, fault)
            }
            Stop::Fault { info, .. } if self.opened_by_fault(&info) => self.repeat(context, system),
            Stop::Fault { pc, info } => {
                let fault = GuestFault::from_host_fault(context, pc, &info);
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

    /// Did this fault happen only because dynasour guards the page? Then the page is open now, and
    /// all code made from it has been dropped.
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

    /// The instruction at rip wrote to a page of code that is open now. Executes it again, by
    /// itself, since its store may change the next instruction.
    fn repeat(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        if !self.peer.enter(context) {
            // Other threads have posted ranges. The instruction is executed by the next stretch;
            // if the page is guarded again by then, it faults again.
            self.forget_posted();
            return Outcome::Continue;
        }
        let stop = self.interp.run_one(context);
        self.peer.leave();
        stop.map_or(Outcome::Continue, |stop| self.handle_stop(context, system, stop))
    }
}

/// The fault of fetching an instruction at `addr`, where none can be fetched.
fn fetch_fault(addr: u64) -> GuestFault {
    match memory::fetch_code(addr, &mut [0]) {
        0 => GuestFault::fetch(addr, &memory::last_fault()),
        // The byte can be read, so it is mapped without the right to execute it.
        _ => GuestFault::not_executable(addr),
    }
}
