//! Signals: the guest's as the kernel would deliver them, the host's as the translator needs them
//! (docs/design.md, "Running a guest").
//!
//! Words
//! * *the six*, synchronous signals: SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS. The host always has
//!   a handler for them and never blocks them while the guest runs. So the guest's dispositions and
//!   mask for them are emulated.
//! * *asynchronous*: every other signal. If the guest's disposition is `SIG_DFL` or `SIG_IGN`, the
//!   kernel has the same one, so the kernel performs default actions and job control. If the guest
//!   has a handler, the kernel calls the host's. The kernel has the guest's mask.
//! * *accepted*: the host handler has recorded the signal, but the guest has not seen it yet.
//! * *held*: accepted, but blocked by the guest. That happens to one of the six, and to an
//!   asynchronous signal if the handler of one of the six, which is delivered first, blocks it.
//!   One of the six that was sent to the process is held for the process ([`held`]), not for the
//!   thread that accepted it.
//!
//! Data: one [`SignalState`] for each guest thread, shared by the thread and the handler that
//! interrupts it; the slots of [`held`] and `waiting`, shared by all threads.
//!
//! Invariants
//! * After an asynchronous signal has been accepted, all asynchronous signals stay blocked until
//!   the guest's frame is built ([`gate`]). The kernel queues the others, so one record for each
//!   signal number is enough. A held asynchronous signal is blocked in the kernel, too. A mask that does not
//!   block it is installed only after it has been delivered.
//! * `ThreadContext::pending` is nonzero if an accepted signal can be delivered under the mask in
//!   effect. It may be nonzero without such a signal; then the delivery finds nothing.
//! * The host handler runs on the host's alternate stack with all signals blocked.
//!
//! Locks: none in this folder, because the handler may interrupt a thread that holds one. The
//! exception, and why it is safe, is in the header of `handler.rs`.
//!
//! Example: SIGALRM, for which the guest has a handler, interrupts a trace. The host handler
//! accepts it, sets `pending` and makes the trace leave at its next exit. `System::deliver_pending`
//! takes it from [`SignalState`], builds the guest's frame and lets the guest's handler run.

pub mod altstack;
pub mod frame;
pub mod gate;
mod handler;
pub(crate) mod held;
pub(crate) mod host_entry;
mod native_store;
mod precise;
pub mod samples;
pub(crate) mod waiting;

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};

pub use handler::{
    ALTERNATE_STACK, FaultHooks, GuestFault, call_out, install, on_signal, use_alternate_stack,
};

use crate::kernel::entry::{self, Call};

/// A set of signals: bit `signo - 1`.
pub type SigSet = u64;

/// The highest signal number.
pub const MAX_SIGNAL: i32 = 64;

/// The set of one signal.
pub const fn set_of(signo: i32) -> SigSet {
    1 << (signo - 1)
}

/// *The six*: the synchronous signals, whose handler is always the host's.
pub const SYNCHRONOUS: SigSet = set_of(libc::SIGSEGV)
    | set_of(libc::SIGBUS)
    | set_of(libc::SIGFPE)
    | set_of(libc::SIGILL)
    | set_of(libc::SIGTRAP)
    | set_of(libc::SIGSYS);

/// The six as numbers, in the order in which the kernel delivers them.
pub const SYNCHRONOUS_SIGNALS: [i32; 6] =
    [libc::SIGILL, libc::SIGTRAP, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV, libc::SIGSYS];

/// Signals that cannot be blocked or caught.
pub const UNBLOCKABLE: SigSet = set_of(libc::SIGKILL) | set_of(libc::SIGSTOP);

/// Signals that can be caught and whose default action ends the process: all except SIGKILL and
/// those whose default action is to do nothing, to stop or to continue.
pub const DEADLY: SigSet = !(set_of(libc::SIGCHLD)
    | set_of(libc::SIGCONT)
    | set_of(libc::SIGURG)
    | set_of(libc::SIGWINCH)
    | set_of(libc::SIGSTOP)
    | set_of(libc::SIGTSTP)
    | set_of(libc::SIGTTIN)
    | set_of(libc::SIGTTOU)
    | set_of(libc::SIGKILL));

/// `SIG_DFL`
pub const SIG_DFL: u64 = 0;
/// `SIG_IGN`
pub const SIG_IGN: u64 = 1;

/// Flags of a signal action (`sigaction(2)`), as the kernel numbers them.
pub mod sa {
    /// No SIGCHLD when children stop.
    pub const NOCLDSTOP: u64 = 1;
    /// Children do not become zombies.
    pub const NOCLDWAIT: u64 = 2;
    /// The handler wants a siginfo.
    pub const SIGINFO: u64 = 4;
    /// Do not clear tag bits of `si_addr`.
    pub const EXPOSE_TAGBITS: u64 = 0x800;
    /// The field `restorer` is valid.
    pub const RESTORER: u64 = 0x0400_0000;
    /// Run on the alternate stack.
    pub const ONSTACK: u64 = 0x0800_0000;
    /// Restart interrupted calls.
    pub const RESTART: u64 = 0x1000_0000;
    /// Do not block the signal itself.
    pub const NODEFER: u64 = 0x4000_0000;
    /// Reset the disposition to the default at delivery.
    pub const RESETHAND: u64 = 0x8000_0000;
    /// The flags that the kernel keeps; unknown ones read back as zero.
    pub const KNOWN: u64 = NOCLDSTOP
        | NOCLDWAIT
        | SIGINFO
        | EXPOSE_TAGBITS
        | RESTORER
        | ONSTACK
        | RESTART
        | NODEFER
        | RESETHAND;
}

/// A signal action in the kernel's layout (`struct kernel_sigaction`).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SigAction {
    /// `SIG_DFL`, `SIG_IGN` or the handler's address.
    pub handler: u64,
    /// [`sa`]
    pub flags: u64,
    /// The address to which the handler returns.
    pub restorer: u64,
    /// Signals that are blocked while the handler runs.
    pub mask: SigSet,
}

impl SigAction {
    /// Whether there is a handler function.
    pub fn is_caught(&self) -> bool {
        self.handler > SIG_IGN
    }
}

/// A `siginfo_t` as bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SigInfo(pub [u8; 128]);

impl SigInfo {
    /// A siginfo with the fields that faults have: signal, code and address.
    pub fn of_fault(signo: i32, code: i32, addr: u64) -> SigInfo {
        let mut info = SigInfo([0; 128]);
        info.0[0..4].copy_from_slice(&signo.to_le_bytes());
        info.0[8..12].copy_from_slice(&code.to_le_bytes());
        info.0[16..24].copy_from_slice(&addr.to_le_bytes());
        info
    }

    /// The bytes of `si_pkey`.
    const KEY: std::ops::Range<usize> = 32..36;

    /// The same siginfo with this `si_pkey`, which is 0 for faults that have none.
    pub fn with_key(mut self, key: u32) -> SigInfo {
        self.0[Self::KEY].copy_from_slice(&key.to_le_bytes());
        self
    }

    /// `si_pkey`, if this is a fault that has one; else 0.
    pub fn key(&self) -> u32 {
        let with_key = (libc::SIGSEGV, crate::memory::FaultInfo::SEGV_PKUERR);
        let word = self.0[Self::KEY].try_into().unwrap_or_default();
        if (self.signo(), self.code()) == with_key { u32::from_le_bytes(word) } else { 0 }
    }

    /// `si_arch`, if this is a SIGSYS of the kernel's.
    pub fn architecture(&self) -> u32 {
        u32::from_le_bytes([self.0[28], self.0[29], self.0[30], self.0[31]])
    }

    /// `si_signo`
    pub fn signo(&self) -> i32 {
        i32::from_le_bytes([self.0[0], self.0[1], self.0[2], self.0[3]])
    }

    /// `si_code`
    pub fn code(&self) -> i32 {
        i32::from_le_bytes([self.0[8], self.0[9], self.0[10], self.0[11]])
    }

    /// `si_value` of a timer's signal.
    pub fn value(&self) -> u64 {
        u64::from_le_bytes(self.0[24..32].try_into().unwrap_or_default())
    }
}

/// The state that a guest thread shares with the host handler that interrupts it. The handler finds
/// it through `ThreadContext::signals`.
pub struct SignalState {
    /// Signals recorded in `infos` and not yet delivered.
    accepted: AtomicU64,
    /// The guest's mask, or the temporary mask of a call in progress. It decides whether one of the
    /// six can be delivered.
    effective_mask: AtomicU64,
    /// Those of the six that a call in progress waits for although they are blocked.
    waiting: AtomicU64,
    /// The host instruction of the last fault that no table and no hook expected.
    unexpected: AtomicU64,
    /// The siginfo of each accepted signal, by signal number minus 1.
    infos: UnsafeCell<[SigInfo; MAX_SIGNAL as usize]>,
}

// SAFETY: shared only between a thread and the handlers that interrupt it. A handler writes an
// element of `infos` only while its bit of `accepted` is clear, the thread reads it only while the
// bit is set.
unsafe impl Sync for SignalState {}

impl SignalState {
    /// The state of a thread with this mask and no accepted signal.
    pub fn new(mask: SigSet) -> Box<SignalState> {
        Box::new(SignalState {
            accepted: AtomicU64::new(0),
            effective_mask: AtomicU64::new(mask),
            waiting: AtomicU64::new(0),
            unexpected: AtomicU64::new(0),
            infos: UnsafeCell::new([SigInfo([0; 128]); MAX_SIGNAL as usize]),
        })
    }

    /// Records a signal. Called in the signal handler. If an instance of the same signal is
    /// recorded already, this one is dropped, as the kernel does with standard signals.
    fn accept(&self, signo: i32, info: &SigInfo) {
        if self.accepted.load(Ordering::Relaxed) & set_of(signo) == 0 {
            // SAFETY: the slot is the handler's until the bit is set, and handlers do not nest.
            unsafe { (&raw mut (*self.infos.get())[signo as usize - 1]).write(*info) };
            self.accepted.fetch_or(set_of(signo), Ordering::Release);
        }
    }

    /// Signals accepted and not yet taken.
    pub fn accepted(&self) -> SigSet {
        self.accepted.load(Ordering::Acquire)
    }

    /// The accepted signal, not in `mask`, that the kernel would deliver first.
    pub fn first(&self, mask: SigSet) -> Option<(i32, SigInfo)> {
        let ready = self.accepted() & !mask;
        if ready == 0 {
            return None;
        }
        let first = if ready & SYNCHRONOUS != 0 { ready & SYNCHRONOUS } else { ready };
        let signo = first.trailing_zeros() as i32 + 1;
        // SAFETY: while the bit is set no handler writes the slot.
        let info = unsafe { (&raw const (*self.infos.get())[signo as usize - 1]).read() };
        Some((signo, info))
    }

    /// Removes and returns the signal that [`SignalState::first`] returns.
    pub fn take(&self, mask: SigSet) -> Option<(i32, SigInfo)> {
        let (signo, info) = self.first(mask)?;
        self.accepted.fetch_and(!set_of(signo), Ordering::AcqRel);
        Some((signo, info))
    }

    /// Forgets these accepted signals: one whose disposition became "ignore", or all in the child
    /// of a fork.
    pub fn forget(&self, signals: SigSet) {
        self.accepted.fetch_and(!signals, Ordering::AcqRel);
    }

    /// The mask that decides whether one of the six can be delivered.
    pub fn effective_mask(&self) -> SigSet {
        self.effective_mask.load(Ordering::Relaxed)
    }

    /// Those of the six that a call in progress waits for.
    pub fn waiting(&self) -> SigSet {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Sets the signals for which a call that is about to begin waits; 0 when it has ended.
    pub fn set_waiting(&self, signals: SigSet) {
        self.waiting.store(signals & SYNCHRONOUS, Ordering::Relaxed);
    }

    /// Records the host instruction of an unexpected fault. Returns whether the last unexpected
    /// fault happened at the same instruction.
    fn repeats(&self, host_rip: u64) -> bool {
        self.unexpected.swap(host_rip, Ordering::Relaxed) == host_rip
    }

    /// Sets the mask that decides whether one of the six can be delivered.
    pub fn set_effective_mask(&self, mask: SigSet) {
        self.effective_mask.store(mask, Ordering::Relaxed);
    }
}

/// The mask that the kernel has while the guest's is `guest`: the six stay unblocked.
pub const fn host_mask(guest: SigSet) -> SigSet {
    guest & !SYNCHRONOUS
}

/// Sets this thread's mask in the kernel, even if a signal is pending.
pub fn set_kernel_mask(mask: SigSet) {
    replace_kernel_mask(mask);
}

/// Sets this thread's mask in the kernel, even if a signal is pending, and returns the one before.
fn replace_kernel_mask(mask: SigSet) -> SigSet {
    let (new, mut old) = (mask, 0);
    let at = [std::ptr::from_ref(&new) as u64, std::ptr::from_mut(&mut old) as u64];
    let call = Call::new(libc::SYS_rt_sigprocmask, &[libc::SIG_SETMASK as u64, at[0], at[1], 8]);
    // SAFETY: reads `new` and writes `old`; masks are only changed as the module's invariants say.
    unsafe { entry::raw(&call) };
    old
}

/// The id of this process. Never cached, because the child of a fork has another one.
pub(crate) fn own_pid() -> i32 {
    // SAFETY: asks only.
    unsafe { entry::raw(&Call::new(libc::SYS_getpid, &[])) as i32 }
}

/// The id of this thread.
pub(crate) fn own_tid() -> i32 {
    // SAFETY: asks only.
    unsafe { entry::raw(&Call::new(libc::SYS_gettid, &[])) as i32 }
}

/// This thread's mask in the kernel.
pub fn kernel_mask() -> SigSet {
    let mut mask: SigSet = 0;
    let call =
        Call::new(libc::SYS_rt_sigprocmask, &[0, 0, std::ptr::from_mut(&mut mask) as u64, 8]);
    // SAFETY: writes `mask`.
    unsafe { entry::raw(&call) };
    mask
}

/// The kernel's action for `signo`.
pub fn kernel_action(signo: i32) -> SigAction {
    let mut action = SigAction::default();
    let call = Call::new(
        libc::SYS_rt_sigaction,
        &[signo as u64, 0, std::ptr::from_mut(&mut action) as u64, 8],
    );
    // SAFETY: writes `action`, which has the kernel's layout.
    unsafe { entry::raw(&call) };
    action
}

/// The call that sets the kernel's action for `signo`; `action` must live until it is made.
pub fn action_call(signo: i32, action: &SigAction) -> Call {
    Call::new(libc::SYS_rt_sigaction, &[signo as u64, std::ptr::from_ref(action) as u64, 0, 8])
}

/// Sets the kernel's action for `signo`.
pub fn set_kernel_action(signo: i32, action: &SigAction) {
    // SAFETY: reads `action`; its handler is the host's, `SIG_DFL` or `SIG_IGN`.
    unsafe { entry::raw(&action_call(signo, action)) };
}

/// The action that the kernel gets when the guest sets the action `guest`.
pub fn mirror(signo: i32, guest: &SigAction) -> SigAction {
    let synchronous = SYNCHRONOUS & set_of(signo) != 0;
    if !synchronous && !guest.is_caught() { *guest } else { ours(guest) }
}

/// The action that makes the kernel call the host's handler while the guest's action is `guest`.
pub fn ours(guest: &SigAction) -> SigAction {
    // A signal that the guest does not catch must not interrupt the guest's system calls.
    let restart = if guest.is_caught() { guest.flags & sa::RESTART } else { sa::RESTART };
    SigAction {
        handler: host_entry::signal_entry(),
        flags: guest.flags & (sa::NOCLDSTOP | sa::NOCLDWAIT | sa::EXPOSE_TAGBITS)
            | restart
            | sa::SIGINFO
            | sa::ONSTACK
            | sa::RESTORER,
        restorer: host_entry::restorer(),
        mask: !0,
    }
}

/// Kills the process by `signo` in the host's state. The guest dies by [`crate::kernel::process::Death`].
pub fn die(signo: i32) -> ! {
    set_kernel_action(signo, &SigAction::default());
    set_kernel_mask(!set_of(signo));
    // SAFETY: signals and exits only. If a debugger suppresses the signal, SIGKILL ends the
    // process.
    unsafe {
        let pid = entry::raw(&Call::new(libc::SYS_getpid, &[])) as u64;
        let tid = entry::raw(&Call::new(libc::SYS_gettid, &[])) as u64;
        entry::raw(&Call::new(libc::SYS_tgkill, &[pid, tid, signo as u64]));
        entry::raw(&Call::new(libc::SYS_kill, &[pid, libc::SIGKILL as u64]));
        loop {
            entry::raw(&Call::new(libc::SYS_exit_group, &[128 + signo as u64]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_six_come_first_and_each_is_taken_once() {
        let state = SignalState::new(0);
        state.accept(libc::SIGINT, &SigInfo::of_fault(libc::SIGINT, 0, 1));
        state.accept(libc::SIGSEGV, &SigInfo::of_fault(libc::SIGSEGV, 0, 2));
        state.accept(libc::SIGSEGV, &SigInfo::of_fault(libc::SIGSEGV, 0, 3));
        state.accept(64, &SigInfo::of_fault(64, 0, 4));
        assert_eq!(state.take(0), Some((libc::SIGSEGV, SigInfo::of_fault(libc::SIGSEGV, 0, 2))));
        assert_eq!(state.take(set_of(libc::SIGINT)), Some((64, SigInfo::of_fault(64, 0, 4))));
        assert_eq!(state.take(set_of(libc::SIGINT)), None);
        assert_eq!(state.take(0).map(|(signo, _)| signo), Some(libc::SIGINT));
        assert_eq!(state.accepted(), 0);
    }

    #[test]
    fn only_caught_signals_and_the_six_get_our_handler() {
        let default = SigAction { flags: sa::NOCLDWAIT, ..SigAction::default() };
        assert_eq!(mirror(libc::SIGCHLD, &default), default);
        let ignored = SigAction { handler: SIG_IGN, ..SigAction::default() };
        assert_eq!(mirror(libc::SIGINT, &ignored), ignored);
        assert_eq!(mirror(libc::SIGSEGV, &ignored).handler, host_entry::signal_entry());
        let caught = SigAction {
            handler: 0x1234,
            flags: sa::RESTART | sa::NOCLDSTOP | sa::RESETHAND,
            ..default
        };
        let host = mirror(libc::SIGCHLD, &caught);
        assert_eq!(host.handler, host_entry::signal_entry());
        assert_eq!(
            host.flags,
            sa::RESTART | sa::NOCLDSTOP | sa::SIGINFO | sa::ONSTACK | sa::RESTORER
        );
        assert_eq!(host.mask, !0);
        let plain = SigAction { flags: 0, ..caught };
        assert_eq!(mirror(libc::SIGCHLD, &plain).flags & sa::RESTART, 0);
    }

    #[test]
    fn siginfo_fields_are_where_the_kernel_has_them() {
        let info = SigInfo::of_fault(libc::SIGSEGV, 2, 0x1234);
        // SAFETY: siginfo_t is plain data of this size, and the fault fields are the ones set.
        let native: libc::siginfo_t = unsafe { std::mem::transmute(info.0) };
        assert_eq!((native.si_signo, native.si_code), (libc::SIGSEGV, 2));
        // SAFETY: the address field was set.
        assert_eq!(unsafe { native.si_addr() } as u64, 0x1234);
        assert_eq!((info.signo(), info.code()), (libc::SIGSEGV, 2));
    }
}
