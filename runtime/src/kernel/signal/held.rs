//! Signals of the six that were sent to a whole process and came to a thread whose guest blocks
//! them. They stay pending for the process, as natively.
//!
//! The kernel cannot keep them pending, because the host never blocks the six while the guest runs
//! ([`super`]). So the handler records them here, and not in its thread's state. Any thread of the
//! process takes such a signal when its guest waits for it, unblocks it, or makes a call that may
//! read it from a signalfd.
//!
//! **Data.** One slot for each of the six, common to all processes that share this memory. One
//! instance is enough: natively, too, only one instance of a standard signal is pending. The slot
//! names the process to which the signal was sent. If the slot is in use by another process, the
//! thread that accepted the signal keeps it.
//!
//! **Marks.** The siginfo of a signal does not always say whether it was sent to a thread or to a
//! process. In these cases eight bytes of it contain a [`Mark`]. The kernel keeps these bytes, no
//! sender uses them, and the guest never sees the mark.
//!
//! **Invariant.** Only the thread that has changed a slot's state to `BUSY` accesses its siginfo.
//! There are no locks: every function may be called in a signal handler, and on any thread.
//!
//! Example: two threads block SIGSEGV, and one of them computes. `kill` makes the kernel call that
//! thread's handler, which records the signal here. The other thread polls a signalfd: before the
//! call it takes the signal and sends it to itself, where it is blocked now, so the file is
//! readable.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{SYNCHRONOUS_SIGNALS, SigInfo, SigSet, set_of};

/// The state of an empty slot.
const EMPTY: u64 = 0;
/// The state of a slot that a thread or its handler reads or writes.
const BUSY: u64 = 1;

struct Slot {
    /// [`EMPTY`], [`BUSY`], or twice the id of the process to which the signal was sent. (Twice, so
    /// that it is never `BUSY`.)
    state: AtomicU64,
    info: UnsafeCell<SigInfo>,
}

// SAFETY: the invariant of the module: `state` says which thread may touch `info`.
unsafe impl Sync for Slot {}

static SLOTS: [Slot; SYNCHRONOUS_SIGNALS.len()] =
    [const { Slot { state: AtomicU64::new(EMPTY), info: UnsafeCell::new(SigInfo([0; 128])) } };
        SYNCHRONOUS_SIGNALS.len()];

fn slots() -> impl Iterator<Item = (i32, &'static Slot)> {
    SYNCHRONOUS_SIGNALS.into_iter().zip(&SLOTS)
}

fn own_state() -> u64 {
    super::own_pid() as u64 * 2
}

/// Records a signal for this process. If the same signal is recorded already, this instance is
/// dropped, as the kernel does. `false` if the signal is not one of the six, or its slot is in use
/// by another process or busy.
pub fn hold(signo: i32, info: &SigInfo) -> bool {
    let own = own_state();
    let Some((_, slot)) = slots().find(|(number, _)| *number == signo) else { return false };
    match slot.state.compare_exchange(EMPTY, BUSY, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => {
            // SAFETY: this thread has set the state to `BUSY`.
            unsafe { slot.info.get().write(*info) };
            slot.state.store(own, Ordering::SeqCst);
            true
        }
        Err(state) => state == own,
    }
}

/// Removes and returns one of `signals` that is recorded for this process.
pub fn take(signals: SigSet) -> Option<(i32, SigInfo)> {
    let is_free = |slot: &Slot| slot.state.load(Ordering::SeqCst) == EMPTY;
    let (signo, slot) = slots().find(|(signo, slot)| {
        signals & set_of(*signo) != 0
            && !is_free(slot)
            && slot
                .state
                .compare_exchange(own_state(), BUSY, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
    })?;
    // SAFETY: this thread has set the state to `BUSY`.
    let info = unsafe { slot.info.get().read() };
    slot.state.store(EMPTY, Ordering::SeqCst);
    Some((signo, info))
}

/// The signals that are recorded for this process.
pub fn pending() -> SigSet {
    let taken = slots().filter(|(_, slot)| slot.state.load(Ordering::SeqCst) > BUSY);
    let mut own = None;
    taken
        .filter(|(_, slot)| slot.state.load(Ordering::SeqCst) == *own.get_or_insert_with(own_state))
        .fold(0, |set, (signo, _)| set | set_of(signo))
}

/// Drops those of `signals` that are recorded for this process.
pub fn forget(signals: SigSet) {
    while take(signals).is_some() {}
}

/// Empties all slots. Called in the child of a fork, whose copies of the slots are its parent's; it
/// has one thread.
pub fn clear() {
    slots().for_each(|(_, slot)| slot.state.store(EMPTY, Ordering::SeqCst));
}

/// How a signal was sent, where its siginfo alone does not say it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Mark {
    /// The signal was sent to a thread, by `rt_tgsigqueueinfo`.
    ForThread = 0x6479_6e61_736f_7501,
    /// The signal was sent to the process by `kill`, and then by the host to another thread. Its
    /// code is SI_QUEUE, because the kernel does not let a thread send SI_USER to another thread.
    ByKill = 0x6479_6e61_736f_7502,
}

impl Mark {
    /// The offset of the mark in a siginfo: the last eight of the 48 bytes that the kernel keeps.
    /// `kill` and `sigqueue` use none of these eight.
    pub const OFFSET: usize = 40;

    /// The mark of `info`.
    pub fn of(info: &SigInfo) -> Option<Mark> {
        let word = &info.0[Self::OFFSET..Self::OFFSET + 8];
        [Mark::ForThread, Mark::ByKill]
            .into_iter()
            .find(|mark| word == (*mark as u64).to_le_bytes())
    }

    /// Puts the mark on `info`.
    pub fn put(self, info: &mut SigInfo) {
        info.0[Self::OFFSET..Self::OFFSET + 8].copy_from_slice(&(self as u64).to_le_bytes());
    }
}

/// `info` as the kernel delivers it natively.
pub fn unmarked(info: &SigInfo) -> SigInfo {
    let mut plain = *info;
    if let Some(mark) = Mark::of(info) {
        plain.0[Mark::OFFSET..Mark::OFFSET + 8].fill(0);
        if mark == Mark::ByKill {
            plain.0[8..12].copy_from_slice(&libc::SI_USER.to_le_bytes());
        }
    }
    plain
}

/// Whether a signal with this siginfo was sent to the process and not to one thread.
pub fn is_for_process(info: &SigInfo) -> bool {
    info.code() <= 0 && info.code() != libc::SI_TKILL && Mark::of(info) != Some(Mark::ForThread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_child;

    #[test]
    fn each_signal_is_held_once_and_taken_once() {
        let status = in_child(|| {
            let info = |value| SigInfo::of_fault(libc::SIGSEGV, libc::SI_QUEUE, value);
            let segv = set_of(libc::SIGSEGV);
            assert!(hold(libc::SIGSEGV, &info(1)) && hold(libc::SIGSEGV, &info(2)));
            assert!(!hold(libc::SIGINT, &info(1)));
            assert_eq!((pending(), take(!segv)), (segv, None));
            assert_eq!(take(segv), Some((libc::SIGSEGV, info(1))));
            assert_eq!((pending(), take(segv)), (0, None));
            assert!(hold(libc::SIGFPE, &info(3)));
            // The child of a fork has another process id, so the signal is not its own.
            let child = in_child(|| {
                assert_eq!((pending(), take(!0)), (0, None));
                assert!(!hold(libc::SIGFPE, &info(4)));
                clear();
                i32::from(!hold(libc::SIGFPE, &info(4)))
            });
            forget(!0);
            i32::from(child != 0 || pending() != 0)
        });
        assert_eq!(status, 0);
    }

    #[test]
    fn marks_say_what_a_signal_was_sent_to_and_vanish() {
        let mut info = SigInfo::of_fault(libc::SIGSEGV, libc::SI_QUEUE, 7);
        let plain = info;
        assert!(is_for_process(&info));
        Mark::ForThread.put(&mut info);
        assert!(!is_for_process(&info));
        assert_eq!(unmarked(&info), plain);
        Mark::ByKill.put(&mut info);
        assert!(is_for_process(&info));
        assert_eq!(unmarked(&info).code(), libc::SI_USER);
        assert!(!is_for_process(&SigInfo::of_fault(libc::SIGSEGV, 2, 0)), "a fault");
    }
}
