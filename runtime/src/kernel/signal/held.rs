//! Signals of the five that were sent to a whole process, and that the thread which the kernel
//! chose blocks: they stay pending for the process, as natively.
//!
//! The kernel cannot keep them, because the host never blocks the five while it runs code
//! ([`super`]). So the handler records them here instead of with its thread. Any thread of that
//! process takes one when its guest waits for it, unblocks it, or makes a call that may read it
//! from a signalfd.
//!
//! **Data.** One slot per signal, of this address space: natively, too, only one instance of such a
//! signal is pending. Processes that share memory share the slots, so each names its process; a
//! signal that finds its slot taken by another process stays with its thread.
//!
//! **Marks.** A signal's siginfo does not always say what it was sent to. Eight bytes of it that no
//! sender uses and that the kernel keeps say it then ([`Mark`]); the guest never sees them.
//!
//! **Invariant.** Only the thread that has changed a slot's state to `BUSY` touches its siginfo.
//! There are no locks: everything here may run in a signal handler, and on any thread.
//!
//! Example: two threads block SIGSEGV, and one of them computes. `kill` makes the kernel call that
//! thread's handler, which records the signal here. The other thread polls a signalfd: before the
//! call it takes the signal and sends it to itself, where it is blocked now, so the file is
//! readable.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{FIVE_SIGNALS, SigInfo, SigSet, set_of};

/// A slot is empty.
const EMPTY: u64 = 0;
/// A thread or its handler reads or writes the slot.
const BUSY: u64 = 1;

struct Slot {
    /// [`EMPTY`], [`BUSY`], or the process to which the signal was sent, times two.
    state: AtomicU64,
    info: UnsafeCell<SigInfo>,
}

// SAFETY: the invariant of the module: `state` says which thread may touch `info`.
unsafe impl Sync for Slot {}

static SLOTS: [Slot; FIVE_SIGNALS.len()] =
    [const { Slot { state: AtomicU64::new(EMPTY), info: UnsafeCell::new(SigInfo([0; 128])) } };
        FIVE_SIGNALS.len()];

fn slots() -> impl Iterator<Item = (i32, &'static Slot)> {
    FIVE_SIGNALS.into_iter().zip(&SLOTS)
}

fn own_state() -> u64 {
    super::own_pid() as u64 * 2
}

/// Records a signal for the process. If one of that number is recorded already, this one is
/// dropped, as the kernel does. `false`: another process has the slot.
pub fn hold(signo: i32, info: &SigInfo) -> bool {
    let own = own_state();
    let Some((_, slot)) = slots().find(|(number, _)| *number == signo) else { return false };
    match slot.state.compare_exchange(EMPTY, BUSY, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => {
            // SAFETY: the state is `BUSY` by this thread.
            unsafe { slot.info.get().write(*info) };
            slot.state.store(own, Ordering::SeqCst);
            true
        }
        Err(state) => state == own,
    }
}

/// Takes one of `signals` that this process has.
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
    // SAFETY: the state is `BUSY` by this thread.
    let info = unsafe { slot.info.get().read() };
    slot.state.store(EMPTY, Ordering::SeqCst);
    Some((signo, info))
}

/// The signals that this process has.
pub fn pending() -> SigSet {
    let taken = slots().filter(|(_, slot)| slot.state.load(Ordering::SeqCst) > BUSY);
    let mut own = None;
    taken
        .filter(|(_, slot)| slot.state.load(Ordering::SeqCst) == *own.get_or_insert_with(own_state))
        .fold(0, |set, (signo, _)| set | set_of(signo))
}

/// Drops this process's `signals`.
pub fn forget(signals: SigSet) {
    while take(signals).is_some() {}
}

/// In a fork's child, which has memory of its own and one thread: the slots are its parent's.
pub fn clear() {
    slots().for_each(|(_, slot)| slot.state.store(EMPTY, Ordering::SeqCst));
}

/// What a siginfo does not say of a signal by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Mark {
    /// It was sent to a thread, by `rt_tgsigqueueinfo`.
    ForThread = 0x6479_6e61_736f_7501,
    /// It was sent to the process by `kill`. Its code is SI_QUEUE because the kernel lets no thread
    /// claim SI_USER to another one.
    ByKill = 0x6479_6e61_736f_7502,
}

impl Mark {
    /// Where it is in a siginfo: the last of the bytes that the kernel keeps, of which `kill` and
    /// `sigqueue` use none.
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

/// Was a signal with this siginfo sent to the process, not to one thread?
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
            // A fork's child has another number, so the signal is not its own.
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
