//! Threads that wait for a blocked signal of the five, and sending such a signal to one of them.
//!
//! The kernel gives a signal of the five that was sent to the process to any thread, because the
//! host never blocks the five. If the guest of that thread blocks the signal, the handler gives it
//! to a thread that is in a call which may take it, or [holds](held) it for the process.
//!
//! Data: [`WAITING`], the threads in such calls. It is written by each thread for itself (by
//! [`Waiting`]) and read by the signal handler. No lock.
//!
//! Example: thread 1 reads a signalfd of SIGSEGV, and thread 2 accepts a SIGSEGV that was sent by
//! `kill`. Thread 2's handler finds thread 1 in [`WAITING`] and sends the signal there.

use std::sync::atomic::{AtomicU64, Ordering};

use super::held::{self, Mark};
use super::{FIVE, SigInfo, SigSet, own_pid, own_tid, set_of};
use crate::kernel::entry::{self, Call};

/// Threads in a call that may take some of the five although their guest blocks these: the thread
/// in the upper half, the set in the lower; 0 for none. If more threads than this (guess) wait at
/// once, the rest do not get signals that are sent to the process while they wait.
static WAITING: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// An entry in [`WAITING`] while it lives.
pub(crate) struct Waiting(Option<&'static AtomicU64>);

impl Waiting {
    /// This thread may take `signals` of the five from now on. After this call it must look for
    /// those that were [held] before.
    pub(crate) fn begin(signals: SigSet) -> Waiting {
        let entry = (own_tid() as u64) << 32 | signals & FIVE;
        Waiting(WAITING.iter().find(|place| {
            place.compare_exchange(0, entry, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        }))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.into_iter().for_each(|place| place.store(0, Ordering::SeqCst));
    }
}

/// Makes a signal pending for thread `tid` of this process, as it was sent. A thread may claim any
/// sender for itself, and for others only codes of `sigqueue` and its like (rt_sigqueueinfo(2)), so
/// that a signal sent by `kill` gets a [mark](Mark::ByKill). Async-signal-safe.
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
            // The limit on queued signals is reached: `tgkill` sends without a siginfo.
            || entry::raw(&Call::new(libc::SYS_tgkill, &args[..3])) == 0
    }
}

/// One of the five was sent to the process and came to this thread, whose guest blocks it: another
/// thread that waits for it gets it, else it is held for the process. `false`: it cannot be held.
/// Async-signal-safe.
pub(super) fn hold_for_process(signo: i32, info: &SigInfo) -> bool {
    if !held::hold(signo, info) {
        return false;
    }
    // A thread that begins to wait after this has seen the signal in its slot.
    let own = own_tid();
    let waits = |entry: &u64| (entry >> 32) as i32 != own && entry & set_of(signo) != 0;
    if let Some(entry) = WAITING.iter().map(|p| p.load(Ordering::SeqCst)).find(waits)
        && let Some((_, info)) = held::take(set_of(signo))
        && !send_to((entry >> 32) as i32, signo, &info)
    {
        held::hold(signo, &info);
    }
    true
}
