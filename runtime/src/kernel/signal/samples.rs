//! Samples: signals that interrupt a thread in guest code in place from time to time, so that the
//! dispatcher learns what is hot.
//!
//! A thread is sampled in one of two ways, which it sets up itself; there is no thread of the
//! host's.
//! * By a *timer* on its own processor time (manual: timer_create(2)). The timer first expires when
//!   the thread has used [`FIRST`], so most threads and processes are never sampled.
//! * By an *event* of the kernel's that counts its time in user code ([`crate::kernel::perf_event`]), from
//!   the first sample on, if the kernel allows it. Its signal never arrives during a system call.
//!
//! The signals are two of the six that are never blocked while the guest runs. A sample is told from
//! a fault, and from what the guest sends, by its code and value.
//!
//! Data: [`Sampler`], one for each thread. Invariant: a sample ends no call of the guest's: an event
//! does not interrupt calls; a call that a timer ends is restarted by the kernel, or the signal
//! handler has it made again ([`super::super::entry::again`],
//! [`super::super::entry::call_stubs::before_call`]).
//!
//! Example: a thread computes for a second. Its timer expires after 50 ms, and the thread opens an
//! event, which ends a period every 4 ms of its time. Each time the handler makes it leave guest
//! code with [`Left::Sample`](super::super::entry::in_place::Left::Sample).

use dynasour_guest::ThreadContext;

use super::SigInfo;
use crate::kernel::entry::{Call, raw};
use crate::kernel::perf_event::{Attributes, Event};

/// Nanoseconds of a thread's processor time before its first sample (guess: shorter processes gain
/// nothing by traces; too high delays what gains).
const FIRST: u64 = 50_000_000;
/// The signal of timers: one of the six, which are never blocked while the guest runs. The kernel
/// keeps one signal of a kind for a thread. So it must not be that of a trap, which would be lost
/// while a sample is pending (a fault happens again), nor that of [`super::call_out`].
const TIMER_SIGNAL: i32 = libc::SIGBUS;
/// The code of a SIGTRAP from an event (asm-generic/siginfo.h). It is delivered before the thread
/// executes another instruction of user code, so no trap is lost.
const TRAP_PERF: i32 = 6;

/// Where a sample comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// It may have ended a system call.
    Timer,
    /// It has ended no system call.
    Event,
}

/// How a thread is sampled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Clock {
    /// By the thread's processor time: by an event if the kernel allows it.
    Thread,
    /// By the thread's processor time, without events.
    ThreadTimer,
    /// By real time.
    Real,
}

/// What samples one thread.
#[derive(Debug)]
pub struct Sampler {
    running: Running,
    /// The nanoseconds between samples of an event, which is not open yet; none if none is to be
    /// opened.
    event: Option<u64>,
}

/// It samples until it is dropped.
#[derive(Debug)]
enum Running {
    Timer { _timer: Timer },
    Event { _event: Event },
}

impl Sampler {
    /// Starts to sample the calling thread, whose context is `context`, `hz` times in a second.
    /// None if the kernel refuses.
    pub fn start(context: &ThreadContext, clock: Clock, hz: u32) -> Option<Sampler> {
        let period = 1_000_000_000 / u64::from(hz.max(1));
        let running = Running::Timer { _timer: Timer::start(context, clock, period)? };
        Some(Sampler { running, event: (clock == Clock::Thread).then_some(period) })
    }

    /// The calling thread, whose context is `context`, was sampled: goes over to an event.
    pub fn sampled(&mut self, context: &ThreadContext) {
        let Some(period) = self.event.take() else { return };
        let signal = Some(std::ptr::from_ref(context) as u64);
        if let Some(event) = Event::start(&Attributes { period, records: 0, signal }, 0) {
            self.running = Running::Event { _event: event };
        }
    }

    /// Are its samples events?
    pub fn is_by_events(&self) -> bool {
        matches!(self.running, Running::Event { .. })
    }

    /// In a forked child, which has neither timers nor events: forgets this one.
    pub fn forget(self) {
        std::mem::forget(self);
    }
}

/// A timer of one thread.
#[derive(Debug)]
struct Timer(i32);

impl Timer {
    fn start(context: &ThreadContext, clock: Clock, period: u64) -> Option<Timer> {
        let clock = match clock {
            Clock::Thread | Clock::ThreadTimer => libc::CLOCK_THREAD_CPUTIME_ID as u64,
            Clock::Real => libc::CLOCK_MONOTONIC as u64,
        };
        // SAFETY: gettid has no arguments.
        let thread = unsafe { raw(&Call::new(libc::SYS_gettid, &[])) } as i32;
        // The kernel's `sigevent`: value, signal, kind, thread; 64 bytes.
        let mut event = [0u32; 16];
        let value = std::ptr::from_ref(context) as u64;
        (event[0], event[1]) = (value as u32, (value >> 32) as u32);
        (event[2], event[3], event[4]) =
            (TIMER_SIGNAL as u32, libc::SIGEV_THREAD_ID as u32, thread as u32);
        let mut id = 0i32;
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
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer is this value's own.
        unsafe { raw(&Call::new(libc::SYS_timer_delete, &[self.0 as u64])) };
    }
}

/// The source of this signal, if it is a sample of the thread whose context this is.
pub fn source(signo: i32, info: &SigInfo, context: &ThreadContext) -> Option<Source> {
    let source = match (signo, info.code()) {
        (TIMER_SIGNAL, libc::SI_TIMER) => Source::Timer,
        (libc::SIGTRAP, TRAP_PERF) => Source::Event,
        _ => return None,
    };
    (info.value() == std::ptr::from_ref(context) as u64).then_some(source)
}
