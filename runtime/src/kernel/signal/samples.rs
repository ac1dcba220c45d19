//! Samples: signals that interrupt a thread in guest code in place from time to time, so that the
//! dispatcher learns what is hot.
//!
//! A thread has a timer on its own processor time (manual: timer_create(2)), which it makes itself;
//! there is no thread of the host's. The timer first expires when the thread has used
//! [`FIRST`], so most threads and processes are never sampled. Its signal is one of the six that
//! are never blocked while the guest runs; a sample is told from a fault, and from what the guest
//! sends, by its code and value.
//!
//! Data: [`Timer`], one for each thread. Invariant: a sample ends no call of the guest's: the kernel
//! restarts it, or the signal handler has it made again ([`super::super::entry::again`],
//! [`super::super::entry::call_stubs::before_call`]).
//!
//! Example: a thread computes for a second. Its timer expires after 50 ms and then every 4 ms; each
//! time the handler makes it leave guest code with
//! [`Left::Sample`](super::super::entry::in_place::Left::Sample).

use dynasour_guest::ThreadContext;

use super::SigInfo;
use crate::kernel::entry::{Call, raw};

/// Nanoseconds of a thread's processor time before its first sample (guess: shorter processes gain
/// nothing by traces; too high delays what gains).
const FIRST: u64 = 50_000_000;
/// The signal of samples: one of the six, which are never blocked while the guest runs. The kernel
/// keeps one signal of a kind for a thread. So it must not be that of a trap, which would be lost
/// while a sample is pending (a fault happens again), nor that of [`super::call_out`].
const SIGNAL: i32 = libc::SIGBUS;

/// A timer of one thread.
#[derive(Debug)]
pub struct Timer(i32);

/// What the timers measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Clock {
    /// The thread's processor time.
    Thread,
    /// Real time.
    Real,
}

impl Timer {
    /// Starts to sample the calling thread, whose context is `context`, `hz` times in a second.
    /// None if the kernel refuses.
    pub fn start(context: &ThreadContext, clock: Clock, hz: u32) -> Option<Timer> {
        let clock = match clock {
            Clock::Thread => libc::CLOCK_THREAD_CPUTIME_ID as u64,
            Clock::Real => libc::CLOCK_MONOTONIC as u64,
        };
        // SAFETY: gettid has no arguments.
        let thread = unsafe { raw(&Call::new(libc::SYS_gettid, &[])) } as i32;
        // The kernel's `sigevent`: value, signal, kind, thread; 64 bytes.
        let mut event = [0u32; 16];
        let value = std::ptr::from_ref(context) as u64;
        (event[0], event[1]) = (value as u32, (value >> 32) as u32);
        (event[2], event[3], event[4]) =
            (SIGNAL as u32, libc::SIGEV_THREAD_ID as u32, thread as u32);
        let mut id = 0i32;
        let period = 1_000_000_000 / u64::from(hz.max(1));
        let times: [u64; 4] = [
            period / 1_000_000_000,
            period % 1_000_000_000,
            FIRST / 1_000_000_000,
            FIRST % 1_000_000_000,
        ];
        let (event, made) = (event.as_ptr() as u64, &raw mut id as u64);
        // SAFETY: the kernel reads the event and the times, and writes the id.
        unsafe {
            if raw(&Call::new(libc::SYS_timer_create, &[clock, event, made])) != 0 {
                return None;
            }
            let timer = Timer(id);
            let args = [id as u64, 0, times.as_ptr() as u64, 0];
            (raw(&Call::new(libc::SYS_timer_settime, &args)) == 0).then_some(timer)
        }
    }

    /// In a forked child, which has no timers: forgets this one.
    pub fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer is this value's own.
        unsafe { raw(&Call::new(libc::SYS_timer_delete, &[self.0 as u64])) };
    }
}

/// Is this signal a sample of the thread whose context this is?
pub fn is_sample(signo: i32, info: &SigInfo, context: &ThreadContext) -> bool {
    signo == SIGNAL
        && info.code() == libc::SI_TIMER
        && info.value() == std::ptr::from_ref(context) as u64
}
