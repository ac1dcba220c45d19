//! Samples: signals that interrupt a thread in guest code in place, or in copied blocks, from time to
//! time, so that the dispatcher learns what is hot.
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
//! Data: [`Samples`], one for each thread. Invariants:
//! * A sample ends no call of the guest's: an event does not interrupt calls; a call that a timer ends
//!   is restarted by the kernel, or the signal handler has it made again ([`super::super::entry::again`],
//!   [`super::super::entry::call_stubs::before_call`]).
//! * The guest reads no sample: during a call that may take the signal itself there are none
//!   ([`Samples::pause`]).
//!
//! Example: a thread computes for a second. Its timer expires after 50 ms, and the thread opens an
//! event, which ends a period every 4 ms of its time. Each time the handler makes it leave guest
//! code with [`Left::Sample`](super::super::entry::in_place::Left::Sample).

use std::cell::RefCell;

use dynasour_guest::ThreadContext;

use super::{SigInfo, SigSet, set_of};
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

/// What samples one thread; used by that thread only.
#[derive(Debug, Default)]
pub struct Samples(RefCell<Option<Sampler>>);

#[derive(Debug)]
struct Sampler {
    running: Running,
    /// The nanoseconds between samples.
    period: u64,
    /// Is an event to be opened, which is not open yet?
    wants_event: bool,
    /// The value of its signals: the address of the thread's context.
    value: u64,
}

/// It samples until it is dropped.
#[derive(Debug)]
enum Running {
    Timer(Timer),
    Event { _event: Event },
}

impl Samples {
    /// Starts to sample the calling thread, whose context is `context`, `hz` times in a second, if
    /// the kernel allows it.
    pub fn start(&self, context: &ThreadContext, clock: Clock, hz: u32) {
        let period = period(hz);
        let value = std::ptr::from_ref(context) as u64;
        let sampler = Timer::new(value, clock).map(|timer| {
            timer.set(FIRST, period);
            let wants_event = clock == Clock::Thread;
            Sampler { running: Running::Timer(timer), period, wants_event, value }
        });
        *self.0.borrow_mut() = sampler;
    }

    /// Starts to sample the calling thread from now on: by an event, if it may have a descriptor for a
    /// moment and the kernel allows it, else by a timer. False if neither can be had.
    pub fn start_now(&self, context: &ThreadContext, hz: u32, may_open: bool) -> bool {
        let period = period(hz);
        let value = std::ptr::from_ref(context) as u64;
        let attributes = Attributes { period, records: 0, signal: Some(value) };
        let event = if may_open { Event::start(&attributes, 0) } else { None };
        let timer = || {
            let timer = Timer::new(value, Clock::ThreadTimer)?;
            timer.set(period, period);
            Some(Running::Timer(timer))
        };
        let running = event.map(|event| Running::Event { _event: event }).or_else(timer);
        let sampler = running.map(|running| Sampler { running, period, wants_event: false, value });
        *self.0.borrow_mut() = sampler;
        self.are_running()
    }

    /// Is the thread sampled?
    pub fn are_running(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Stops.
    pub fn stop(&self) {
        *self.0.borrow_mut() = None;
    }

    /// The calling thread was sampled: goes over to an event, if it may have a descriptor for a moment.
    /// (Another thread of the guest's would notice it.) Was it by an event?
    pub fn sampled(&self, may_open: bool) -> bool {
        let mut sampler = self.0.borrow_mut();
        let Some(sampler) = &mut *sampler else { return false };
        if matches!(sampler.running, Running::Event { .. }) {
            return true;
        }
        if may_open && std::mem::take(&mut sampler.wants_event) {
            let (period, signal) = (sampler.period, Some(sampler.value));
            if let Some(event) = Event::start(&Attributes { period, records: 0, signal }, 0) {
                sampler.running = Running::Event { _event: event };
            }
        }
        false
    }

    /// Until the result is dropped, no sample makes any of `signals` pending for the calling thread.
    /// Before that the kernel does not block them.
    pub fn pause(&self, signals: SigSet) -> Paused<'_> {
        let mut borrowed = self.0.borrow_mut();
        let Some(sampler) = &mut *borrowed else { return Paused(None) };
        // An event cannot be paused: from now on a timer does its work.
        if matches!(sampler.running, Running::Event { .. }) && signals & set_of(libc::SIGTRAP) != 0
        {
            let Some(timer) = Timer::new(sampler.value, Clock::ThreadTimer) else {
                *borrowed = None;
                return Paused(None);
            };
            timer.set(sampler.period, sampler.period);
            sampler.running = Running::Timer(timer);
        }
        match &sampler.running {
            Running::Timer(timer) if signals & set_of(TIMER_SIGNAL) != 0 => {
                let first = timer.set(0, 0);
                drop(borrowed);
                Paused(Some((self, first)))
            }
            _ => Paused(None),
        }
    }

    /// In a forked child, which has neither timers nor events: forgets its parent's.
    pub fn forget(&self) {
        std::mem::forget(self.0.take());
    }
}

/// Nanoseconds between so many samples in a second.
fn period(hz: u32) -> u64 {
    1_000_000_000 / u64::from(hz.max(1))
}

/// A timer that is stopped for a while.
pub struct Paused<'a>(Option<(&'a Samples, u64)>);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        if let Some((samples, first)) = self.0
            && let Some(Sampler { running: Running::Timer(timer), period, .. }) =
                &*samples.0.borrow()
        {
            timer.set(first.max(1), *period);
        }
    }
}

/// A timer of one thread.
#[derive(Debug)]
struct Timer(i32);

impl Timer {
    /// A timer that sends its signal, with this value, to the calling thread. It is not set.
    fn new(value: u64, clock: Clock) -> Option<Timer> {
        let clock = match clock {
            Clock::Thread | Clock::ThreadTimer => libc::CLOCK_THREAD_CPUTIME_ID as u64,
            Clock::Real => libc::CLOCK_MONOTONIC as u64,
        };
        let thread = super::own_tid();
        // The kernel's `sigevent`: value, signal, kind, thread; 64 bytes.
        let mut event = [0u32; 16];
        (event[0], event[1]) = (value as u32, (value >> 32) as u32);
        (event[2], event[3], event[4]) =
            (TIMER_SIGNAL as u32, libc::SIGEV_THREAD_ID as u32, thread as u32);
        let mut id = 0i32;
        let (event, id_at) = (event.as_ptr() as u64, &raw mut id as u64);
        // SAFETY: the kernel reads the event, and writes the id.
        let made = unsafe { raw(&Call::new(libc::SYS_timer_create, &[clock, event, id_at])) };
        (made == 0).then_some(Timer(id))
    }

    /// Lets it expire `first` nanoseconds from now and then after each `period`; never if both are
    /// 0. Returns after how many nanoseconds it would have expired.
    fn set(&self, first: u64, period: u64) -> u64 {
        let seconds = |time: u64| [time / 1_000_000_000, time % 1_000_000_000];
        let ([a, b], [c, d]) = (seconds(period), seconds(first));
        let (new, mut old) = ([a, b, c, d], [0u64; 4]);
        let args = [self.0 as u64, 0, new.as_ptr() as u64, old.as_mut_ptr() as u64];
        // SAFETY: the kernel reads `new` and writes `old`.
        unsafe { raw(&Call::new(libc::SYS_timer_settime, &args)) };
        old[2] * 1_000_000_000 + old[3]
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
