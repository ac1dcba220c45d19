//! The gate: whether the kernel may give this thread a further asynchronous signal.
//!
//! A thread has room for one asynchronous signal that is accepted and may be delivered. So the gate
//! closes when the handler accepts one: it blocks all asynchronous signals in the kernel. The gate
//! opens, with the guest's mask, when the frame of that signal has been built. If it opened earlier,
//! a second instance of the same signal could come, and would be lost.
//!
//! A signal can be accepted at every instruction of the host while the gate is open. So the gate is
//! opened in one of two ways, and nowhere else:
//! * [`open`]: the mask is set in a window (`crate::kernel::entry`), which the thread leaves without
//!   having made the call if a signal has been accepted. The caller delivers the signal and tries
//!   again.
//! * [`Closed::open`]: by a caller that has closed the gate itself and has seen no signal after that.
//!
//! A caller for which it does not matter whether a signal has been accepted blocks all for a while
//! ([`with_all_blocked`]): then the gate is what it was.
//!
//! (A thread sets its first mask with [`super::set_kernel_mask`]: it starts with the gate closed.)
//!
//! Data: none; the state is the kernel's mask and `ThreadContext::pending`. The tests explore every
//! interleaving of the kernel, the handler and the thread.
//!
//! Example: a fault is delivered, and the gate is about to open as it was. Now SIGALRM is accepted:
//! the gate is closed, and [`open`] returns `false`. The frame of SIGALRM is built, and the next call
//! opens the gate with the mask of its handler.

use std::sync::atomic::Ordering;

use dynasour_guest::ThreadContext;

use super::{SYNCHRONOUS, SigSet, replace_kernel_mask, set_kernel_mask};
use crate::kernel::entry::{self, Call};

/// Which signals [`Closed::close`] blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extent {
    /// The asynchronous ones.
    Asynchronous,
    /// All, because a handler could not run: the thread has no context of its own for a moment. The
    /// host must not fault meanwhile.
    All,
}

/// The gate is closed, and no signal that may be delivered is accepted.
#[must_use]
pub struct Closed(());

impl Closed {
    /// Closes the gate. `None` if a signal has been accepted or is to be looked for: the gate stays
    /// closed, and the thread must deliver the signal, which opens it.
    pub fn close(context: &ThreadContext, extent: Extent) -> Option<Closed> {
        set_kernel_mask(match extent {
            Extent::Asynchronous => !SYNCHRONOUS,
            Extent::All => !0,
        });
        (context.pending.load(Ordering::Relaxed) == 0).then_some(Closed(()))
    }

    /// Opens the gate: the kernel gets `mask`.
    pub fn open(self, mask: SigSet) {
        set_kernel_mask(mask);
    }
}

/// Opens the gate, whose state is unknown: the kernel gets `mask`. Returns `false` and changes
/// nothing if a signal is pending that the thread has to deliver first.
#[must_use]
pub fn open(mask: SigSet) -> bool {
    let call = Call::new(
        libc::SYS_rt_sigprocmask,
        &[libc::SIG_SETMASK as u64, std::ptr::from_ref(&mask) as u64, 0, 8],
    );
    // SAFETY: reads `mask`; which signals are blocked is part of our own protocol.
    unsafe { entry::windowed(&call) != entry::NOT_ENTERED }
}

/// Calls `f` with all signals blocked. The mask is replaced in one step: a signal that came after the mask
/// was asked for, and before it was replaced, would find the gate open again at the end.
pub fn with_all_blocked<R>(f: impl FnOnce() -> R) -> R {
    let mask = replace_kernel_mask(!0);
    let result = f();
    set_kernel_mask(mask);
    result
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod stepped;
