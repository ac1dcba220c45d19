//! The system calls about signals. The guest's actions and masks are emulated, and the kernel's
//! follow them ([`mirror`]).
//!
//! *The six* ([`SYNCHRONOUS`]) are the signals that a fault of generated code or of the host may raise,
//! such as SIGSEGV. The host never blocks them while it runs code, and their handler is always the
//! host's. If the guest blocks one that is sent, the handler *accepts* and *holds* it until the
//! guest unblocks or takes it ([`crate::kernel::signal`]): for the thread in `System::signals`, for
//! the process in [`held`].
//!
//! Data: [`READ_FROM_FILE`]. The guest's actions are in the process, its mask in [`System`].
//!
//! Each call runs on the guest's own thread, outside native code. The caller holds no lock; the
//! calls take the lock of the actions while an action changes. A call that may take a blocked
//! signal of the six registers itself for the handlers of the other threads, by [`Waiting`].
//!
//! Example: a guest that blocks SIGSEGV polls a signalfd. [`System::with_held_pending`] blocks
//! SIGSEGV in the kernel, sends the held SIGSEGVs to this thread again, makes the call, and
//! unblocks SIGSEGV. The handler then accepts those that the guest has not read.

#[cfg(test)]
mod tests;
mod wait;

use std::sync::atomic::{AtomicBool, Ordering};

use dynasour_guest::ThreadContext;

use crate::kernel::entry::{self, Call};
use crate::kernel::process::guest_access::{guest_read, guest_write};
use crate::kernel::process::{Done, Engine, System};
use crate::kernel::signal::altstack::StackT;
use crate::kernel::signal::held::{self, Mark};
use crate::kernel::signal::waiting::{Waiting, send_to};
use crate::kernel::signal::{
    DEADLY, MAX_SIGNAL, SIG_DFL, SIG_IGN, SYNCHRONOUS, SYNCHRONOUS_SIGNALS, SigAction, SigInfo,
    SigSet, UNBLOCKABLE, action_call, host_mask, mirror, ours, sa, set_of,
};

/// The size of the kernel's signal set in bytes.
const SET_SIZE: u64 = 8;

/// Reads a signal set of the guest's.
fn read_set(address: u64) -> Result<SigSet, i32> {
    guest_read::<8>(address).map(|bytes| u64::from_le_bytes(bytes) & !UNBLOCKABLE)
}

/// An address at which no signal set can be read. A call with a bad mask is made with it, so that
/// the kernel chooses the error: it may check other arguments before the mask.
const NO_SET: u64 = -4096i64 as u64;

/// The mask at `address`, if it can be read and its size is right.
fn read_mask(address: u64, size: u64) -> Option<SigSet> {
    if size == SET_SIZE { read_set(address).ok() } else { None }
}

/// Whether the guest has made a signalfd of one of the six, or may have inherited one. Never
/// cleared.
static READ_FROM_FILE: AtomicBool = AtomicBool::new(false);

/// Calls by which a guest may read from a signalfd or learn that it can be read.
fn may_read_signals(nr: u64) -> bool {
    const EPOLL_PWAIT2: i64 = 441;
    matches!(
        nr as i64,
        libc::SYS_read
            | libc::SYS_readv
            | libc::SYS_preadv2
            | libc::SYS_splice
            | libc::SYS_poll
            | libc::SYS_ppoll
            | libc::SYS_select
            | libc::SYS_pselect6
            | libc::SYS_epoll_wait
            | libc::SYS_epoll_pwait
            | EPOLL_PWAIT2
            | libc::SYS_io_uring_enter
            | libc::SYS_io_submit
            | libc::SYS_io_getevents
            | libc::SYS_rt_sigtimedwait
    )
}

/// Blocks or unblocks signals of this thread in the kernel.
fn change_kernel_mask(how: i32, set: SigSet) {
    let call =
        Call::new(libc::SYS_rt_sigprocmask, &[how as u64, std::ptr::from_ref(&set) as u64, 0, 8]);
    // SAFETY: reads `set`; which signals are blocked is part of our own protocol.
    unsafe { entry::raw(&call) };
}

impl System {
    /// `rt_sigaction`
    pub(crate) fn rt_sigaction(&mut self, engine: &mut dyn Engine, call: &Call) -> Done {
        let [signo, new, old, size, ..] = call.args;
        let signo = signo as i32;
        if size != SET_SIZE {
            return Done::error(libc::EINVAL);
        }
        let action = match new {
            0 => None,
            address => match guest_read::<32>(address) {
                Ok(bytes) => Some(parse_action(&bytes)),
                Err(errno) => return Done::error(errno),
            },
        };
        if !(1..=MAX_SIGNAL).contains(&signo)
            || (action.is_some() && UNBLOCKABLE & set_of(signo) != 0)
        {
            return Done::error(libc::EINVAL);
        }
        if signo == libc::SIGSEGV && action.is_some_and(|new| new.handler > SIG_IGN) {
            engine.faults_are_handled();
        }
        // The lock is held while the kernel's action is set, so that both change together.
        let mut actions = self.process.actions();
        let before = actions[signo as usize];
        if let Some(mut action) = action {
            action.flags &= sa::KNOWN;
            action.mask &= !UNBLOCKABLE;
            let kernel = self.mirror(signo, &action);
            // The kernel often has that already: the host catches signals of faults in any case. To set
            // a handler again has no effect. (Setting SIG_IGN again discards signals.)
            if !kernel.is_caught() || kernel != self.mirror(signo, &before) {
                // SAFETY: reads `kernel`.
                let result = unsafe { entry::windowed(&action_call(signo, &kernel)) };
                if result == entry::NOT_ENTERED {
                    return Done::Restart;
                }
                if result < 0 {
                    return Done::Value(result);
                }
            }
            actions[signo as usize] = action;
            if action.handler == SIG_IGN {
                self.signals.forget(set_of(signo) & SYNCHRONOUS);
                held::forget(set_of(signo) & SYNCHRONOUS);
            }
        }
        drop(actions);
        if old != 0
            && let Err(errno) = guest_write(old, &action_bytes(&before))
        {
            return Done::error(errno);
        }
        Done::Value(0)
    }

    /// `rt_sigprocmask`
    pub(crate) fn rt_sigprocmask(&mut self, context: &ThreadContext, call: &Call) -> Done {
        let [how, new, old, size, ..] = call.args;
        if size != SET_SIZE {
            return Done::error(libc::EINVAL);
        }
        let before = self.mask;
        if new != 0 {
            let set = match read_set(new) {
                Ok(set) => set,
                Err(errno) => return Done::error(errno),
            };
            let mask = match how as i32 {
                libc::SIG_BLOCK => before | set,
                libc::SIG_UNBLOCK => before & !set,
                libc::SIG_SETMASK => set,
                _ => return Done::error(libc::EINVAL),
            };
            if !self.change_mask(context, mask) {
                return Done::Restart;
            }
        }
        if old != 0
            && let Err(errno) = guest_write(old, &before.to_le_bytes())
        {
            return Done::error(errno);
        }
        Done::Value(0)
    }

    /// `rt_sigpending`: the signals that are pending in the kernel, and those that are held.
    pub(crate) fn rt_sigpending(&mut self, call: &Call) -> Done {
        let [out, size, ..] = call.args;
        if size > SET_SIZE {
            return Done::error(libc::EINVAL);
        }
        let mut pending: SigSet = 0;
        let own = Call::new(libc::SYS_rt_sigpending, &[std::ptr::from_mut(&mut pending) as u64, 8]);
        // SAFETY: writes `pending`.
        let result = unsafe { entry::raw(&own) };
        if result < 0 {
            return Done::Value(result);
        }
        pending |= (self.signals.accepted() | held::pending()) & self.mask;
        match guest_write(out, &pending.to_le_bytes()[..size as usize]) {
            Ok(()) => Done::Value(0),
            Err(errno) => Done::error(errno),
        }
    }

    /// `rt_sigsuspend`
    pub(crate) fn rt_sigsuspend(&mut self, context: &mut ThreadContext, call: &Call) -> Done {
        let [set, size, ..] = call.args;
        if size != SET_SIZE {
            return Done::error(libc::EINVAL);
        }
        match read_set(set) {
            Ok(mask) => self.with_mask(context, mask, |kernel_mask| {
                Call::new(libc::SYS_rt_sigsuspend, &[kernel_mask, SET_SIZE])
            }),
            Err(errno) => Done::error(errno),
        }
    }

    /// `ppoll` and `epoll_pwait(2)`: argument `at` is the address of a mask, the next its size.
    pub(crate) fn with_mask_argument(
        &mut self,
        context: &mut ThreadContext,
        call: &Call,
        at: usize,
    ) -> Done {
        let (address, size) = (call.args[at], call.args[at + 1]);
        if address == 0 {
            return self.pass(call);
        }
        let with = |mask| {
            let mut call = *call;
            call.args[at] = mask;
            call
        };
        match read_mask(address, size) {
            Some(mask) => self.with_mask(context, mask, with),
            None => self.pass(&with(NO_SET)),
        }
    }

    /// `pselect6`: argument 5 names a pair of mask address and size.
    pub(crate) fn pselect6(&mut self, context: &mut ThreadContext, call: &Call) -> Done {
        let pair = match call.args[5] {
            0 => return self.pass(call),
            address => match guest_read::<16>(address) {
                Ok(bytes) => bytes,
                Err(errno) => return Done::error(errno),
            },
        };
        let (low, high) = pair.split_at(8);
        let (address, size) = (word(low), word(high));
        if address == 0 {
            return self.pass(call);
        }
        let mut pair = [NO_SET, size];
        let pair_address = std::ptr::from_mut(&mut pair);
        let with = |mask| {
            // SAFETY: `pair` lives until the call is over.
            unsafe { (*pair_address)[0] = mask };
            let mut call = *call;
            call.args[5] = pair_address as u64;
            call
        };
        match read_mask(address, size) {
            Some(mask) => self.with_mask(context, mask, with),
            None => self.pass(&with(NO_SET)),
        }
    }

    /// `io_uring_enter`. A call that waits may name a mask: by argument 4, or in the structure to
    /// which argument 4 points.
    pub(crate) fn io_uring_enter(&mut self, context: &mut ThreadContext, call: &Call) -> Done {
        const GET_EVENTS: u64 = 1;
        const EXTENDED: u64 = 1 << 3;
        const REGISTERED: u64 = 1 << 6;
        /// Bytes of `struct io_uring_getevents_arg` (linux/io_uring.h): the mask's address, its
        /// size, two more fields.
        const ARGUMENT: usize = 24;
        let [_, _, _, flags, address, size] = call.args;
        if flags & GET_EVENTS == 0 || flags & REGISTERED != 0 {
            return self.pass(call);
        }
        if flags & EXTENDED == 0 {
            return self.with_mask_argument(context, call, 4);
        }
        let Ok(mut argument) = guest_read::<ARGUMENT>(address) else { return self.pass(call) };
        let (mask, mask_size) = (word(&argument[..8]), word(&argument[8..12]) as u32);
        if mask == 0 || size != ARGUMENT as u64 {
            return self.pass(call);
        }
        let argument_address = argument.as_mut_ptr();
        let with = |mask: u64| {
            // SAFETY: `argument` lives until the call is over, and begins with the mask's address.
            unsafe { argument_address.cast::<u64>().write_unaligned(mask) };
            let mut call = *call;
            call.args[4] = argument_address as u64;
            call
        };
        match read_mask(mask, mask_size.into()) {
            Some(mask) => self.with_mask(context, mask, with),
            None => self.pass(&with(NO_SET)),
        }
    }

    /// `signalfd`. If one of the six can be read from the descriptor, held signals must be pending
    /// in the kernel during calls that may read it; [`READ_FROM_FILE`] says so.
    pub(crate) fn signalfd(&self, call: &Call) -> Done {
        if read_mask(call.args[1], call.args[2]).is_some_and(|set| set & SYNCHRONOUS != 0) {
            READ_FROM_FILE.store(true, Ordering::Relaxed);
        }
        self.pass(call)
    }

    /// May there be a signalfd of one of the six?
    pub(super) fn reads_from_file() -> bool {
        READ_FROM_FILE.load(Ordering::Relaxed)
    }

    /// Calls `f`, which makes the system call `nr`, such that a signalfd shows the held signals.
    ///
    /// During the call the kernel blocks those of the six that are in `mask`, and the held ones
    /// of them are pending there. The host must not fault in this time. The system call itself
    /// cannot fault, since the kernel answers EFAULT. Afterwards the kernel delivers the signals
    /// that are still pending to the handler again.
    ///
    /// This costs two more system calls. So it is only done if there may be a signalfd of one of
    /// the six and `nr` may read it; else `f` is called and nothing more.
    pub(crate) fn with_held_pending<R>(&self, nr: u64, mask: SigSet, f: impl FnOnce() -> R) -> R {
        let held = mask & SYNCHRONOUS;
        if held == 0 || !READ_FROM_FILE.load(Ordering::Relaxed) || !may_read_signals(nr) {
            return f();
        }
        let paused = self.samples.pause(held);
        change_kernel_mask(libc::SIG_BLOCK, held);
        let waiting = Waiting::begin(held);
        self.send_held_again(held);
        let result = f();
        drop(waiting);
        change_kernel_mask(libc::SIG_UNBLOCK, held);
        drop(paused);
        result
    }

    /// Makes the signals among `held` that are held for this thread or the process pending in the
    /// kernel, which must block them now.
    pub(crate) fn send_held_again(&self, held: SigSet) {
        while let Some((signo, info)) = self.take_held(held) {
            send_to(crate::kernel::signal::own_tid(), signo, &info);
        }
    }

    /// Takes a signal out of `signals` that was accepted by this thread, or that is held for the
    /// process. The order is the kernel's: signals that were sent to the thread come before those
    /// that were sent to the process, and in each group the six come first.
    pub(crate) fn take_held(&self, signals: SigSet) -> Option<(i32, SigInfo)> {
        let is_for_thread = |(signo, info): (i32, SigInfo)| {
            set_of(signo) & SYNCHRONOUS != 0 || info.code() == libc::SI_TKILL
        };
        match self.signals.first(!signals) {
            Some(first) if is_for_thread(first) => self.signals.take(!signals),
            _ => held::take(signals).or_else(|| self.signals.take(!signals)),
        }
    }

    /// The signals that [`System::take_held`] finds.
    pub(crate) fn held(&self) -> SigSet {
        self.signals.accepted() | held::pending()
    }

    /// To be called at the guest's start: it may have inherited a signalfd of the signals that were
    /// blocked when it was executed.
    pub(crate) fn inherits_blocked(&self) {
        if self.mask & SYNCHRONOUS != 0 {
            READ_FROM_FILE.store(true, Ordering::Relaxed);
        }
    }

    /// `rt_tgsigqueueinfo`. The siginfo of a signal that is sent to a thread looks like that of one
    /// that is sent to its process, so a signal of the six gets a [mark](Mark::ForThread).
    pub(crate) fn rt_tgsigqueueinfo(&self, call: &Call) -> Done {
        let [pid, _, signo, address, ..] = call.args;
        let is_synchronous = SYNCHRONOUS_SIGNALS.contains(&(signo as i32));
        if !is_synchronous || pid as i32 != crate::kernel::signal::own_pid() {
            return self.pass(call);
        }
        let Ok(bytes) = guest_read::<128>(address) else { return self.pass(call) };
        let mut info = SigInfo(bytes);
        if !held::is_for_process(&info) || info.code() == libc::SI_USER {
            return self.pass(call);
        }
        Mark::ForThread.put(&mut info);
        let mut marked = *call;
        marked.args[3] = std::ptr::from_ref(&info) as u64;
        self.pass(&marked)
    }

    /// Performs a call during which `mask` replaces the guest's mask. `call_with` makes the call
    /// from the address of the mask for the kernel.
    fn with_mask(
        &mut self,
        context: &mut ThreadContext,
        mask: SigSet,
        call_with: impl FnOnce(u64) -> Call,
    ) -> Done {
        let kernel = if READ_FROM_FILE.load(Ordering::Relaxed) { mask } else { host_mask(mask) };
        self.signals.set_effective_mask(mask);
        if self.held() & !mask != 0 {
            // The new mask lets a held signal in. (A signal that the guest's own mask lets in was
            // delivered before the call.)
            self.delivery_mask = Some(mask);
            context.pending.store(1, std::sync::atomic::Ordering::Relaxed);
            return Done::error(libc::EINTR);
        }
        let call = call_with(std::ptr::from_ref(&kernel) as u64);
        // SAFETY: the guest's own call. The kernel blocks the six during the call at most, and the
        // host does not fault in it.
        let result = self.with_held_pending(call.nr, mask, || unsafe { entry::windowed(&call) });
        if result == -i64::from(libc::EINTR) && self.signals.accepted() & !mask != 0 {
            self.delivery_mask = Some(mask);
        } else {
            self.signals.set_effective_mask(self.mask);
        }
        match result {
            entry::NOT_ENTERED => Done::Restart,
            result => Done::Value(result),
        }
    }

    /// `rt_sigtimedwait`: takes a held signal if one is wanted; else the kernel waits.
    pub(crate) fn rt_sigtimedwait(&mut self, call: &Call) -> Done {
        let [set, out, _, size, ..] = call.args;
        if size != SET_SIZE {
            return Done::error(libc::EINVAL);
        }
        let wanted = match read_set(set) {
            Ok(wanted) => wanted,
            Err(errno) => return Done::error(errno),
        };
        // From here on a wanted signal that the handler accepts keeps the call from being made. The
        // guest repeats the call, and the signal is found then.
        self.signals.set_waiting(wanted);
        let waiting = (wanted & SYNCHRONOUS != 0).then(|| Waiting::begin(wanted));
        let paused = self.samples.pause(wanted);
        let mut wait = wait::Wait::new(call);
        let done = loop {
            match self.take_held(wanted) {
                Some((_, info))
                    if out != 0 && guest_write(out, &held::unmarked(&info).0).is_err() =>
                {
                    break Done::error(libc::EFAULT);
                }
                Some((signo, _)) => break Done::Value(i64::from(signo)),
                None => {}
            }
            let done = without_mark(self.pass(&wait.call()), out);
            // The kernel wakes this thread for a signal of the six that was sent to the process.
            // Another thread, which cannot block it, may take it first. Its handler sends the
            // signal here; until then this thread waits for the rest of the time.
            let is_taken_away = done == Done::error(libc::EINTR)
                && wanted & SYNCHRONOUS != 0
                && self.signals.accepted() & !self.mask & !wanted == 0;
            if !is_taken_away || !wait.continues() {
                break done;
            }
        };
        drop(waiting);
        drop(paused);
        self.signals.set_waiting(0);
        done
    }

    /// `sigaltstack`, emulated: the kernel's alternate stack is the host's.
    pub(crate) fn sigaltstack(&mut self, context: &ThreadContext, call: &Call) -> Done {
        let [new, old, ..] = call.args;
        let sp = context.gpr[4];
        let before = self.altstack.query(sp);
        if new != 0 {
            let stack = match guest_read::<24>(new) {
                Ok(bytes) => StackT::from_bytes(&bytes),
                Err(errno) => return Done::error(errno),
            };
            if let Err(errno) = self.altstack.set(stack, sp) {
                return Done::error(errno);
            }
        }
        if old != 0 && guest_write(old, &before.to_bytes()).is_err() {
            return Done::error(libc::EFAULT);
        }
        Done::Value(0)
    }

    /// In the child of a fork: forgets the signals that were sent to its parent.
    pub(crate) fn forget_accepted(&mut self, context: &ThreadContext) {
        self.signals.forget(!0);
        held::clear();
        self.delivery_mask = None;
        context.pending.store(0, std::sync::atomic::Ordering::Relaxed);
    }

    /// In the child of a fork: gives signals that end the process back to the kernel. The parent
    /// may catch them, to print its report or because another process shares its memory. The child
    /// has no report, and memory of its own.
    pub(crate) fn forget_report(&self) {
        if !self.process.become_child() {
            return;
        }
        for signo in (1..=MAX_SIGNAL).filter(|&signo| DEADLY & !SYNCHRONOUS & set_of(signo) != 0) {
            let action = self.process.action(signo);
            if action.handler == SIG_DFL {
                crate::kernel::signal::set_kernel_action(signo, &action);
            }
        }
    }

    /// The action that the kernel gets for an action of the guest. The host also catches a signal
    /// that would kill the process, if the process must end by the host's own code: to print its
    /// report, or because another process shares its memory.
    pub(crate) fn mirror(&self, signo: i32, action: &SigAction) -> SigAction {
        let must_end_itself = self.process.reports() || self.process.shares_memory();
        let is_deadly = DEADLY & set_of(signo) != 0 && action.handler == SIG_DFL;
        if must_end_itself && is_deadly { ours(action) } else { mirror(signo, action) }
    }

    /// From now on another process runs in the same memory. The host catches the signals that end
    /// this process, so that it always ends by its own code.
    pub(crate) fn share_memory(&self) {
        // The lock is held while the mirrored actions change: what the kernel has is always that of the
        // guest's action.
        let actions = self.process.actions();
        if !self.process.share_memory() {
            for signo in (1..=MAX_SIGNAL).filter(|&signo| DEADLY & set_of(signo) != 0) {
                crate::kernel::signal::set_kernel_action(
                    signo,
                    &self.mirror(signo, &actions[signo as usize]),
                );
            }
        }
    }

    /// Gives the kernel the actions of all signals for which the mirrored action is a handler.
    pub(crate) fn mirror_all(&self) {
        for signo in (1..=MAX_SIGNAL).filter(|&signo| UNBLOCKABLE & set_of(signo) == 0) {
            let action = self.mirror(signo, &self.process.action(signo));
            if action.is_caught() {
                crate::kernel::signal::set_kernel_action(signo, &action);
            }
        }
    }

    /// CLONE_CLEAR_SIGHAND: in the child every signal with a handler has its default action again.
    pub(crate) fn clear_handlers(&self) {
        for action in self.process.actions().iter_mut().filter(|action| action.is_caught()) {
            *action = SigAction { handler: SIG_DFL, ..SigAction::default() };
        }
        self.mirror_all();
    }
}

/// After `rt_sigtimedwait`: the siginfo that the kernel has written at `out` without our mark.
fn without_mark(done: Done, out: u64) -> Done {
    let is_synchronous =
        matches!(done, Done::Value(signo) if SYNCHRONOUS_SIGNALS.contains(&(signo as i32)));
    if is_synchronous && let Ok(bytes) = guest_read::<128>(out) {
        let info = SigInfo(bytes);
        if Mark::of(&info).is_some() {
            // The kernel has just written there, so an error means that the buffer is gone.
            let _ = guest_write(out, &held::unmarked(&info).0);
        }
    }
    done
}

/// The little-endian number in up to eight bytes.
fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

/// An action from the kernel's `struct sigaction`: four words of 8 bytes.
fn parse_action(bytes: &[u8; 32]) -> SigAction {
    SigAction {
        handler: word(&bytes[0..8]),
        flags: word(&bytes[8..16]),
        restorer: word(&bytes[16..24]),
        mask: word(&bytes[24..32]),
    }
}

fn action_bytes(action: &SigAction) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (i, word) in [action.handler, action.flags, action.restorer, action.mask].iter().enumerate()
    {
        bytes[8 * i..8 * i + 8].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}
