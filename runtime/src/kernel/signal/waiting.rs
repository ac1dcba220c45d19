//! Threads that wait for a blocked signal of the six, and sending such a signal to one of them.
//!
//! If one of the six is sent to the process, the kernel may deliver it to any thread, because the
//! host never blocks the six. If the guest of that thread blocks the signal, the handler sends it
//! to a thread that is in a call which may take it, or [holds](held) it for the process.
//!
//! Data: [`WAITING`], the threads in such calls. Each thread writes its own element (by
//! [`Waiting`]), and signal handlers read all. No lock: the elements are atomic.
//!
//! Invariant: no signal is lost between a thread that begins to wait and a handler that holds a
//! signal. The thread first enters itself and then looks for held signals; the handler first holds
//! the signal and then looks for waiting threads.
//!
//! Example: thread 1 reads a signalfd of SIGSEGV, and thread 2 accepts a SIGSEGV that was sent by
//! `kill`. Thread 2's handler finds thread 1 in [`WAITING`] and sends the signal there.

use std::sync::atomic::{AtomicU64, Ordering};

use super::held::{self, Mark};
use super::{SYNCHRONOUS, SigInfo, SigSet, own_pid, own_tid, set_of};
use crate::kernel::entry::{self, Call};

/// Threads in a call that may take some of the six although their guest blocks these. The upper
/// half of an element is the thread's id, the lower half the set of signals; 0 if unused. If more
/// than 16 threads (guess) wait at once, the others do not get signals that are sent to the process
/// while they wait.
static WAITING: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// The element of [`WAITING`] that this thread uses, freed when the value is dropped. `None` if all
/// were in use.
pub(crate) struct Waiting(Option<&'static AtomicU64>);

impl Waiting {
    /// Notes that this thread may take `signals` of the six from now on. After this call the
    /// thread must look for signals that were [held] before.
    pub(crate) fn begin(signals: SigSet) -> Waiting {
        let claim = (own_tid() as u64) << 32 | signals & SYNCHRONOUS;
        Waiting(WAITING.iter().find(|slot| {
            slot.compare_exchange(0, claim, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        }))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.into_iter().for_each(|slot| slot.store(0, Ordering::SeqCst));
    }
}

/// Makes a signal pending for thread `tid` of this process, with the siginfo that it was sent with.
/// A thread may send itself any siginfo. To another thread it may send only codes of `sigqueue` and
/// the like (rt_sigqueueinfo(2)), so there a signal of `kill` gets a [mark](Mark::ByKill).
/// Async-signal-safe.
pub(crate) fn send_to(tid: i32, signo: i32, info: &SigInfo) -> bool {
    let mut info = *info;
    let own = own_tid();
    if tid != own && info.code() == libc::SI_USER {
        info.0[8..12].copy_from_slice(&libc::SI_QUEUE.to_le_bytes());
        Mark::ByKill.put(&mut info);
    } else if tid == own && Mark::of(&info) == Some(Mark::ByKill) {
        info = held::unmarked(&info);
    }
    let info = std::ptr::from_ref(&info) as u64;
    let args = [own_pid() as u64, tid as u64, signo as u64, info];
    // SAFETY: sends a signal, and reads `info`.
    unsafe {
        entry::raw(&Call::new(libc::SYS_rt_tgsigqueueinfo, &args)) == 0
            // If the limit on queued signals is reached, `tgkill` still sends, without a siginfo.
            || entry::raw(&Call::new(libc::SYS_tgkill, &args[..3])) == 0
    }
}

/// Called when one of the six was sent to the process and came to this thread, whose guest blocks
/// it. Sends it to another thread that waits for it; if there is none, holds it for the process.
/// `false` if it cannot be held. Async-signal-safe.
pub(super) fn hold_for_process(signo: i32, info: &SigInfo) -> bool {
    if !held::hold(signo, info) {
        return false;
    }
    // A thread that enters itself in WAITING after this will find the signal in its slot.
    let own = own_tid();
    let waits = |claim: &u64| (claim >> 32) as i32 != own && claim & set_of(signo) != 0;
    if let Some(claim) = WAITING.iter().map(|slot| slot.load(Ordering::SeqCst)).find(waits)
        && let Some((_, info)) = held::take(set_of(signo))
        && !send_to((claim >> 32) as i32, signo, &info)
    {
        held::hold(signo, &info);
    }
    true
}
