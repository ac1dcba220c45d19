//! Runs guest code in place (tier `direct`; `crate::kernel::entry::in_place`).
//!
//! ```text
//!   run ──► guest code ──► Left ──┬─ Call, Brought, Call32 ──► System::syscall
//!    ▲        ▲      │            ├─ Fault ─────────► System::raise, or the guest's own bytes
//!    │        │      ▼ patch      ├─ Interrupted ───► System::deliver_pending
//!    │     exit ◄─ trace          └─ Sample ────────► interpret some edges, count heads
//!    └────────────────────────────────┘
//! ```
//!
//! Data: [`InPlace`], the dispatcher's part. Invariants: a thread that runs guest code in place
//! counts as *in the cache* ([`super::peers`]), since it may enter a trace at any time; it comes
//! out when it is called. A change of guest code that no trace was made from need not wait for it:
//! the processor notices the change.
//!
//! A hot site of a system call may have to be *observed* before it is rewritten
//! ([`super::call_sites`]): the thread is interpreted until it comes there again
//! ([`Dispatcher::approach`]).
//!
//! What direct execution cannot share (a GS base of the guest's own, faults that the guest serves,
//! addresses that the guest wants) ends it for the whole process: [`Machine::leave_direct`](super::Machine::leave_direct).
//!
//! Used by the thread of the dispatcher only; no lock.
//!
//! Example: `true` runs in place from its first instruction. At each of its `syscall` instructions
//! the kernel raises SIGSYS; [`Dispatcher::left_in_place`] performs the call, and the next stretch
//! runs on behind it.

use super::Dispatcher;
use super::call_sites::{Approach, Traps};
use super::sampling::Sampled;
use crate::changes::hiding;
use crate::changes::patches::{self, Trapped};
use crate::config::Stage;
use crate::interp::{Stop, noncanonical};
use crate::kernel::entry::call_stubs::SYSCALL;
use crate::kernel::entry::in_place::{self, Left};
use crate::kernel::process::{Moved, Outcome, System};
use crate::kernel::signal::GuestFault;
use crate::kernel::{x87_pointer, xstate};
use crate::memory::{self, FaultInfo};
use dynasour_guest::ThreadContext;
use dynasour_guest::context::TRAP_FLAG;
use dynasour_guest::decode::{Decoded, MAX_LENGTH, Reader};
use dynasour_ir::Trap;
use dynasour_tracer::Selected;
use std::sync::atomic::Ordering;

/// Bytes of `int 0x80`.
const INT_80: u64 = 2;
/// Bytes of `int3`.
const INT3: u64 = 1;
/// The exception numbers of `int3` and of an undefined opcode.
const BREAKPOINT: u64 = 3;
const UNDEFINED: u64 = 6;
const PROTECTION: u64 = 13;

/// Whether a thread runs guest code in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Dispatch {
    /// Syscall user dispatch is off: the thread has just begun, or is a fork's child.
    #[default]
    Off,
    /// It is on, and the calls of stubs are allowed.
    WithStubs,
    /// It is on, and all calls are blocked.
    Alone,
    /// The kernel does not let this thread have it.
    Impossible,
}

/// What a thread needs to run guest code in place.
#[derive(Debug, Default)]
pub(super) struct InPlace {
    dispatch: Dispatch,
    /// The hot site that is observed.
    approach: Option<Approach>,
    /// How the thread is sampled, also in copied blocks.
    pub sampling: Sampled,
}

impl InPlace {
    /// Turns syscall user dispatch on.
    fn turn_on(&mut self, context: &ThreadContext, with_stubs: bool) {
        self.dispatch = match (in_place::turn_on(context, with_stubs), with_stubs) {
            (false, _) => Dispatch::Impossible,
            (true, true) => Dispatch::WithStubs,
            (true, false) => Dispatch::Alone,
        };
    }

    /// For a vfork child: is dispatch on, with the stubs' calls allowed or not? Turns it on if it is
    /// not.
    pub(super) fn is_on(&mut self, context: &ThreadContext, with_stubs: bool) -> bool {
        let wanted = if with_stubs { Dispatch::WithStubs } else { Dispatch::Alone };
        if self.dispatch != wanted && self.dispatch != Dispatch::Impossible {
            self.turn_on(context, with_stubs);
        }
        self.dispatch != Dispatch::Impossible
    }

    /// Is the thread interpreted until it comes to a hot site?
    pub fn is_approaching(&self) -> bool {
        self.approach.is_some()
    }
}

/// The trap of the `syscall` that the guest has executed last.
pub(super) fn trap(context: &ThreadContext) -> Traps {
    Traps { call: context.rip.wrapping_sub(SYSCALL), nr: context.gpr[0] as u32, times: 1 }
}

impl Dispatcher {
    /// May guest code run in place now? Turns syscall user dispatch on if it is off. The thread is
    /// outside.
    pub(super) fn prepare_in_place(&mut self, context: &ThreadContext, system: &System) {
        if !self.machine.is_direct() {
            return self.sample_copies(context, system);
        }
        let sites = &self.machine.call_sites;
        sites.close_if_watched(system);
        if self.in_place.dispatch == Dispatch::Off {
            let features = xstate::enabled() & !xstate::PKRU;
            match in_place::prepare(features, xstate::area_size()) {
                true => self.in_place.turn_on(context, !sites.is_closed()),
                false => self.in_place.dispatch = Dispatch::Impossible,
            }
            self.start_samples(context, system);
        }
        if self.in_place.dispatch == Dispatch::WithStubs && sites.is_closed() {
            self.in_place.turn_on(context, false);
        }
        // GS is the host's while guest code runs in place. Only signals make a thread leave such code.
        let shares = context.gs_base == 0 && !self.machine.peers.serves_faults();
        if self.in_place.dispatch == Dispatch::Impossible || !shares {
            let made = self.machine.leave_direct(&self.peer);
            self.fragments_made(made, system);
            self.forget_fragments();
        }
        self.patch_head(system);
        self.note_sample(context);
        self.sample_visits(system);
    }

    /// Why guest code at rip cannot be jumped to: none if it can.
    pub(super) fn unreachable(context: &ThreadContext) -> Option<Stop<Selected>> {
        // A signal frame has named this address. The jump there would fault in the host.
        noncanonical::is_noncanonical(context.rip)
            .then_some(Stop::Trap { pc: context.rip, trap: Trap::Fetch })
    }

    /// Guest code in place was left: makes the guest's state exact.
    pub(super) fn after_in_place(&self, context: &mut ThreadContext) -> Left {
        let left = in_place::left(context);
        x87_pointer::loaded(context);
        left
    }

    /// Handles the reason why guest code in place was left. The thread is outside.
    pub(super) fn left_in_place(
        &mut self,
        context: &mut ThreadContext,
        system: &mut System,
        left: Left,
    ) -> Outcome {
        match left {
            Left::Interrupted => system.deliver_pending(context),
            Left::Sample => {
                self.sampled(system);
                Outcome::Continue
            }
            Left::Call => {
                // The call may be logged, which only the runtime does.
                if !self.machine.config.log.contains(&Stage::Syscall) {
                    let (sites, pages) = (&self.machine.call_sites, &self.machine.pages);
                    for trapped in self.child_calls.take() {
                        // How to observe it was for the child.
                        let _ = sites.trapped(trapped, system, pages);
                    }
                    self.in_place.approach = sites.trapped(trap(context), system, pages);
                }
                self.handle_stop(context, system, Stop::<Selected>::Syscall)
            }
            Left::Brought => {
                self.brought(context, system);
                self.handle_stop(context, system, Stop::<Selected>::Syscall)
            }
            Left::BroughtInside => {
                let behind = context.rip;
                self.brought(context, system);
                let outcome = self.handle_stop(context, system, Stop::<Selected>::Syscall);
                let goes_on = matches!(outcome, Outcome::Continue) && context.rip == behind;
                if goes_on
                    && !is_interrupted(context)
                    && let Some(start) = self.machine.call_sites.start_of(behind - SYSCALL)
                {
                    self.drop_written();
                    return self.interpret_patch(context, system, start);
                }
                outcome
            }
            Left::Call32 => {
                let pc = context.rip - INT_80;
                self.handle_stop(context, system, Stop::<Selected>::Special { pc })
            }
            Left::Fault => self.faulted_in_place(context, system),
        }
    }

    /// The guest's call was brought by a stub.
    fn brought(&self, context: &ThreadContext, system: &System) {
        self.machine.call_sites.brought(trap(context), system, &self.machine.pages);
    }

    /// Interprets one instruction on the way to a hot site, and patches that if it has come there.
    /// The thread has entered.
    pub(super) fn approach(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        let Some(approach) = self.in_place.approach.take() else {
            self.peer.leave();
            return Outcome::Continue;
        };
        let pending = context.pending.load(Ordering::Relaxed) != 0;
        let pc = context.rip;
        let stop = if pending { None } else { self.interp.run_one(context) };
        self.peer.leave();
        match stop {
            None if pending => system.deliver_pending(context),
            None => {
                self.in_place.approach = approach.passed(pc);
                Outcome::Continue
            }
            Some(stop) => {
                let is_call = matches!(stop, Stop::Syscall);
                if is_call && pc == approach.call {
                    let (sites, pages) = (&self.machine.call_sites, &self.machine.pages);
                    sites.observed(approach, system, pages);
                } else if is_call || matches!(stop, Stop::Special { .. }) {
                    self.in_place.approach = approach.passed(pc);
                }
                self.handle_stop(context, system, stop)
            }
        }
    }

    /// The fragments were made just now, if `made` says so.
    pub(super) fn fragments_made(&mut self, made: Option<Moved>, system: &System) {
        if let Some(moved) = made {
            system.host_moved(moved);
            self.count_heads();
        }
    }

    /// An instruction of the guest's in place has faulted or trapped.
    fn faulted_in_place(&mut self, context: &mut ThreadContext, system: &mut System) -> Outcome {
        // What the kernel reports there is about the host's last fault, not the guest's.
        if let Some(outcome) = system.vsyscall(context, context.rip) {
            return outcome;
        }
        let info = memory::last_fault();
        match Self::trapped_by_patch(context, &info) {
            Some((site, Trapped::Passing)) => {
                context.rip = site;
                return Outcome::Continue;
            }
            Some((site, Trapped::Inside { start })) => {
                context.rip = site;
                return self.interpret_patch(context, system, start);
            }
            _ => {}
        }
        if self.opened_by_fault(&info) {
            return Outcome::Continue;
        }
        if info.trapno == PROTECTION && self.shows_to_kernel(context.rip) {
            return Outcome::Continue;
        }
        let fault = GuestFault::at(context.rip, &info);
        system.raise(context, fault)
    }

    /// The kernel emulates some instructions where the processor refuses them, if it can read them (Linux,
    /// `arch/x86/kernel/umip.c`). Could it not read that at `pc`, and can it now?
    fn shows_to_kernel(&self, pc: u64) -> bool {
        use iced_x86::Mnemonic as M;
        let bytes = pc..pc.saturating_add(MAX_LENGTH as u64);
        hiding::any()
            && matches!(Reader::new(&*self.interp.code()).decode(pc), Decoded::Inst(inst)
                if matches!(inst.mnemonic(), M::Sgdt | M::Sidt | M::Sldt | M::Str | M::Smsw))
            && hiding::show(std::slice::from_ref(&bytes))
    }

    /// The pc at which the guest has trapped, and why, if the trap may be that of a patch.
    fn trapped_by_patch(context: &ThreadContext, info: &FaultInfo) -> Option<(u64, Trapped)> {
        let site = match info.trapno {
            BREAKPOINT => context.rip.wrapping_sub(INT3),
            UNDEFINED => context.rip,
            _ => return None,
        };
        Some((site, patches::trapped(site)))
    }

    /// The guest is inside the patch at `start`: executes its own instructions, up to the end of
    /// the patch. A system call may be among them.
    fn interpret_patch(
        &mut self,
        context: &mut ThreadContext,
        system: &mut System,
        start: u64,
    ) -> Outcome {
        self.jumped_into_patch(start);
        let patch = start..start + patches::LEN as u64;
        while patch.contains(&context.rip) {
            if !self.peer.enter(context) {
                self.forget_posted();
                return Outcome::Continue;
            }
            let stop = self.interp.run_one(context);
            self.peer.leave();
            let Some(stop) = stop else { continue };
            let is_call = matches!(stop, Stop::Syscall);
            let outcome = self.handle_stop(context, system, stop);
            if !is_call || is_interrupted(context) || !matches!(outcome, Outcome::Continue) {
                return outcome;
            }
            // Code that the call has written to is not executed.
            self.drop_written();
        }
        Outcome::Continue
    }
}

/// Is something to be done before the thread's next instruction?
fn is_interrupted(context: &ThreadContext) -> bool {
    context.pending.load(Ordering::Relaxed) != 0 || context.rflags & TRAP_FLAG != 0
}
