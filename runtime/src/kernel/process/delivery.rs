//! Delivers signals to the guest: accepted ones at a safe point, the guest's own faults at once;
//! and returns from the guest's handlers (`rt_sigreturn`).
//!
//! Data: the signal fields of [`System`], which only its own thread uses, and the process's
//! actions.
//!
//! Everything here runs on the guest's own thread, outside native code and outside the signal
//! handler, with the exact guest state in `ThreadContext`. The lock of the process's actions is
//! taken to read or to set an action; no other lock is held meanwhile.
//!
//! Invariant: [`System::deliver_pending`] opens the gate ([`gate`]) only after the frames of all
//! deliverable signals are built, so no second instance of a signal is accepted while the first
//! waits.
//!
//! Example: SIGALRM is accepted in a fragment. The fragment leaves at its next safe point;
//! `deliver_pending` writes the frame to the guest's stack, sets rip to the guest's handler, and
//! unblocks what the handler's mask allows.

use std::sync::atomic::Ordering;

use dynasour_guest::ThreadContext;

use super::{Done, Outcome, System};
use crate::changes::{hiding, host};
use crate::kernel::entry::{self, Call, rights};
use crate::kernel::signal::frame::{self, Contents, RESUME_FLAG, Returned};
use crate::kernel::signal::{
    DEADLY, GuestFault, SYNCHRONOUS, SigAction, SigInfo, SigSet, UNBLOCKABLE, host_mask, sa, set_of,
};
use crate::kernel::signal::{gate, held};
use crate::kernel::xstate::{self, BadState};
use crate::kernel::{release, signal, x87_pointer};
use crate::memory;
use crate::protection_keys;

/// The number of rsp among the general registers.
const RSP: usize = 4;
/// Flags that a handler starts without: DF, RF, TF.
const CLEARED_FLAGS: u64 = 0x400 | RESUME_FLAG | 0x100;

/// The error that a frame could not be written, or that the action has no restorer.
struct NoFrame;

/// Calls `f`, which accesses a signal frame, with the protection-key rights that the kernel would
/// use.
fn with_frame_rights<T>(f: impl FnOnce() -> T) -> T {
    if release::signals_have_all_rights() { protection_keys::with_all_rights(f) } else { f() }
}

impl System {
    /// Delivers the accepted signals that the guest's mask does not block. Called at a safe point:
    /// `context` holds the exact state, and the signals arrive before the instruction at `rip`.
    pub fn deliver_pending(&mut self, context: &mut ThreadContext) -> Outcome {
        loop {
            context.pending.store(0, Ordering::Relaxed);
            while let Some((signo, info)) = self.take_held(!self.delivery_mask.unwrap_or(self.mask))
            {
                let info = held::unmarked(&info);
                let rflags = context.rflags | std::mem::take(&mut self.resume_flag);
                let outcome = self.deliver(context, signo, &info, rflags);
                if outcome != Outcome::Continue {
                    return outcome;
                }
            }
            self.delivery_mask = None;
            self.signals.set_effective_mask(self.mask);
            // If no signal was pending at first, the gate was open all the time, and one may have
            // been accepted by now.
            if gate::open(host_mask(self.mask)) && context.pending.load(Ordering::Relaxed) == 0 {
                return Outcome::Continue;
            }
        }
    }

    /// Delivers a synchronous fault of the guest's at `context.rip`: the guest's handler runs, or
    /// the guest dies as it would natively.
    pub fn raise(&mut self, context: &mut ThreadContext, fault: GuestFault) -> Outcome {
        if hiding::answered(&fault.access()) {
            // The instruction is executed again.
            return Outcome::Continue;
        }
        // Debug exceptions, breakpoints and overflow are traps: rip is behind the instruction, so
        // the frame does not have RF.
        const TRAPS: [u64; 3] = [1, 3, 4];
        self.fault = (fault.err, fault.trapno, fault.cr2.unwrap_or(self.fault.2));
        let info = SigInfo::of_fault(fault.signo, fault.code, fault.addr).with_key(fault.key);
        let resume = if TRAPS.contains(&fault.trapno) { 0 } else { RESUME_FLAG };
        self.force(context, fault.signo, &info, context.rflags | resume)
    }

    /// Delivers a signal that cannot wait. If it is blocked, ignored or has no handler, it kills.
    pub(crate) fn force(
        &mut self,
        context: &mut ThreadContext,
        signo: i32,
        info: &SigInfo,
        rflags: u64,
    ) -> Outcome {
        if !self.process.action(signo).is_caught() || self.mask & set_of(signo) != 0 {
            return self.killed(signo, info, rflags);
        }
        let outcome = self.deliver(context, signo, info, rflags);
        if outcome != Outcome::Continue {
            return outcome;
        }
        self.deliver_pending(context)
    }

    /// Delivers SIGSEGV without a faulting address: a signal frame cannot be written or read.
    pub(crate) fn force_segv(&mut self, context: &mut ThreadContext, rflags: u64) -> Outcome {
        const SI_KERNEL: i32 = 0x80;
        self.force(context, libc::SIGSEGV, &SigInfo::of_fault(libc::SIGSEGV, SI_KERNEL, 0), rflags)
    }

    fn deliver(
        &mut self,
        context: &mut ThreadContext,
        signo: i32,
        info: &SigInfo,
        rflags: u64,
    ) -> Outcome {
        let action = self.process.action(signo);
        if !action.is_caught() {
            return self.default_action(signo, &action, info, rflags);
        }
        let saved = self.mask;
        // If a call with a temporary mask was interrupted, the handler runs under that mask and
        // returns to the thread's own.
        let during = self.delivery_mask.take().unwrap_or(saved);
        if action.flags & sa::RESETHAND != 0 {
            self.set_action(signo, SigAction { handler: signal::SIG_DFL, ..action });
        }
        if self.push_frame(context, signo, &action, info, saved, rflags).is_err() {
            return match signo {
                libc::SIGSEGV => self.killed(signo, info, rflags),
                _ => self.force_segv(context, rflags),
            };
        }
        self.process.count_delivery();
        let own = if action.flags & sa::NODEFER != 0 { 0 } else { set_of(signo) };
        self.mask = (during | action.mask | own) & !UNBLOCKABLE;
        Outcome::Continue
    }

    /// Performs the action of an accepted signal for which the guest has no handler now.
    fn default_action(
        &mut self,
        signo: i32,
        action: &SigAction,
        info: &SigInfo,
        rflags: u64,
    ) -> Outcome {
        if action.handler == signal::SIG_IGN {
            return Outcome::Continue;
        }
        if DEADLY & set_of(signo) != 0 {
            return self.killed(signo, info, rflags);
        }
        // The signal is sent again: the kernel has its default action, and performs it when the
        // mask allows.
        // SAFETY: sends a signal to this thread.
        unsafe {
            let pid = entry::raw(&Call::new(libc::SYS_getpid, &[])) as u64;
            let tid = entry::raw(&Call::new(libc::SYS_gettid, &[])) as u64;
            entry::raw(&Call::new(libc::SYS_tgkill, &[pid, tid, signo as u64]));
        }
        Outcome::Continue
    }

    /// This signal kills the process, in the state of the context but with these flags.
    pub(crate) fn killed(&mut self, signo: i32, info: &SigInfo, rflags: u64) -> Outcome {
        self.killed_by = Some((*info, rflags));
        Outcome::Killed(signo)
    }

    /// Builds the frame and makes `context` start the handler (`get_sigframe` and
    /// `x64_setup_rt_frame` in the kernel).
    fn push_frame(
        &mut self,
        context: &mut ThreadContext,
        signo: i32,
        action: &SigAction,
        info: &SigInfo,
        saved: SigSet,
        rflags: u64,
    ) -> Result<(), NoFrame> {
        if action.flags & sa::RESTORER == 0 {
            return Err(NoFrame);
        }
        let old = context.gpr[RSP];
        let mut sp = old.wrapping_sub(frame::RED_ZONE);
        let mut on_alternate = self.altstack.is_in_use(old);
        if action.flags & sa::ONSTACK != 0
            && let Some(top) = self.altstack.entry(sp)
        {
            sp = top;
            on_alternate = true;
        }
        rights::to_state(context);
        x87_pointer::show(context);
        let state = xstate::save(&context.xstate);
        let fpstate = sp.wrapping_sub(state.bytes.len() as u64) & !63;
        let bottom = (fpstate.wrapping_sub(frame::SIZE as u64) & !15).wrapping_sub(8);
        if on_alternate && !self.altstack.contains(bottom) {
            return Err(NoFrame);
        }
        let bytes = frame::build(
            context,
            &Contents {
                restorer: action.restorer,
                rflags,
                fault: self.fault,
                mask: saved,
                stack: self.altstack.in_frame(),
                fpstate,
                info: (action.flags & sa::SIGINFO != 0).then_some(info),
            },
        );
        let parts = state
            .written
            .iter()
            .map(|part| (fpstate.wrapping_add(part.start as u64), &state.bytes[part.clone()]));
        for (address, bytes) in parts.chain([(bottom, &bytes[..])]) {
            // SAFETY: the guest's stack pointer says where its signal frames go.
            let written = with_frame_rights(|| unsafe { host::copy_out(address, bytes) });
            if written != bytes.len() {
                return Err(NoFrame);
            }
        }
        self.altstack.on_delivery();
        context.gpr[7] = signo as u64;
        context.gpr[0] = 0;
        context.gpr[6] = bottom.wrapping_add(frame::SIGINFO);
        context.gpr[2] = bottom.wrapping_add(frame::UCONTEXT);
        context.gpr[RSP] = bottom;
        context.rip = action.handler;
        context.rflags &= !CLEARED_FLAGS;
        xstate::reset(&mut context.xstate);
        x87_pointer::loaded(context);
        rights::from_state(context);
        Ok(())
    }

    /// `rt_sigreturn`: restores the state that the frame contains, which the guest may have edited.
    pub(crate) fn sigreturn(&mut self, context: &mut ThreadContext) -> Done {
        let sp = context.gpr[RSP];
        let bottom = sp.wrapping_sub(8);
        let mut bytes = [0; frame::SIZE];
        let needed = frame::SIGINFO as usize;
        if with_frame_rights(|| memory::copy_in(bottom, &mut bytes[..needed])) != needed {
            return self.bad_frame(context);
        }
        let returned = Returned::parse(&bytes);
        if !self.change_mask(context, returned.mask) {
            return Done::Restart;
        }
        context.gpr = returned.gpr;
        context.rip = returned.rip;
        context.rflags = returned.rflags(context.rflags);
        self.resume_flag = returned.resume_flag();
        let read = |address: u64, out: &mut [u8]| {
            let copied = with_frame_rights(|| memory::copy_in(address, out));
            if copied == out.len() { Ok(()) } else { Err(BadState) }
        };
        let restored = xstate::restore(&mut context.xstate, returned.fpstate, read);
        x87_pointer::loaded(context);
        rights::from_state(context);
        if restored.is_err() {
            return self.bad_frame(context);
        }
        // An alternate stack that cannot be installed, for example because the handler ran on it,
        // is ignored, as in the kernel.
        let sp = if release::signals_have_all_rights() { sp } else { returned.gpr[RSP] };
        let _ = self.altstack.set(returned.stack, sp);
        // The processor faults when the kernel returns to these selectors.
        if returned.cs != frame::USER_CS {
            const INDEX: u16 = !3;
            return Done::Outcome(
                self.raise(context, GuestFault::protection((returned.cs & INDEX).into())),
            );
        }
        if returned.strict_ss && returned.ss != frame::USER_DS {
            return Done::Outcome(self.raise(context, GuestFault::protection(0)));
        }
        Done::Registers
    }

    /// The end of an `rt_sigreturn` whose frame is bad: rax is 0, the other registers are as far
    /// as they have been restored, and SIGSEGV is delivered.
    fn bad_frame(&mut self, context: &mut ThreadContext) -> Done {
        context.gpr[0] = 0;
        let rflags = context.rflags | std::mem::take(&mut self.resume_flag);
        Done::Outcome(self.force_segv(context, rflags))
    }

    /// Installs a mask for the guest. If a signal is pending already, it changes nothing and
    /// returns `false`.
    pub(crate) fn change_mask(&mut self, context: &ThreadContext, mask: SigSet) -> bool {
        let mask = mask & !UNBLOCKABLE;
        // A held signal is delivered before the signals that are pending in the kernel. So the
        // kernel keeps all asynchronous signals blocked until the held one has been delivered.
        let lets_in_held = self.signals.accepted() & !SYNCHRONOUS & !mask != 0;
        let kernel = if lets_in_held { !SYNCHRONOUS } else { host_mask(mask) };
        if !gate::open(kernel) {
            return false;
        }
        self.mask = mask;
        self.signals.set_effective_mask(mask);
        self.notice_unblocked(context);
        true
    }

    /// After the mask changed: makes the thread deliver signals that were held and are now
    /// unblocked.
    pub(crate) fn notice_unblocked(&self, context: &ThreadContext) {
        if self.held() & !self.mask != 0 {
            context.pending.store(1, Ordering::Relaxed);
        }
    }

    /// Sets the guest's action and the kernel's that goes with it.
    pub(crate) fn set_action(&self, signo: i32, action: SigAction) {
        let mut actions = self.process.actions();
        signal::set_kernel_action(signo, &self.mirror(signo, &action));
        actions[signo as usize] = action;
    }
}
