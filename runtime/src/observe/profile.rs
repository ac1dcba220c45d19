//! Measures the time that each thread spends in each phase of its work (`--stats`).
//!
//! A thread is in one *phase* at a time. [`during`] enters a phase and returns to the one before.
//! A change of phase reads the time stamp counter (some ten nanoseconds; guess). Without `--stats`
//! it costs a test of a flag. Phases are timed and not sampled, so there is no signal and no thread
//! that a guest could notice. The times are wall-clock times: a system call that waits is counted
//! with its waiting.
//!
//! Native code does not report phases of its own. [`sampling`] divides the time of
//! [`Phase::Native`] between traces and copied blocks. With `--timeline` each clock also notes when its
//! time was spent ([`timeline`]), and samples have a time.
//!
//! Data: one [`Clock`] for each guest thread, and the time at which timing was [enabled](enable).
//!
//! Invariant: only its own thread writes a clock. No lock: other threads read the clock's atomics,
//! and may see the times of a phase change that is going on.
//!
//! Example: a thread attends to its clock ([`attend`]) and is in [`Phase::Dispatch`]. It calls
//! `during(Phase::Interpret, f)`; within `f` it calls `during(Phase::Translate, g)`. The time of
//! `g` counts as translation, the remaining time of `f` as interpretation.

pub mod sampling;
pub mod timeline;

use dynasour_emitter::ticks;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use timeline::{Buckets, Ticks};

/// What a thread is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// No guest thread runs; the time is not counted.
    Idle,
    /// Work of the dispatcher that no other phase names: finding and linking code, serving requests
    /// of other threads.
    Dispatch,
    /// Interpreting guest code.
    Interpret,
    /// Translating guest code for the interpreter, or copying it.
    Translate,
    /// Interpreting a path while it is recorded, and building versions from recordings.
    Record,
    /// Optimising versions.
    Optimise,
    /// Generating and installing native code of versions.
    Emit,
    /// Running native code: traces, copied blocks.
    Native,
    /// System calls, and instructions that the runtime executes for the guest.
    Syscall,
}

impl Phase {
    /// The phases that are counted, with their names in the statistics.
    pub const COUNTED: [(Phase, &'static str); 8] = [
        (Phase::Interpret, "interpreting"),
        (Phase::Translate, "translating"),
        (Phase::Record, "recording"),
        (Phase::Optimise, "optimising"),
        (Phase::Emit, "emitting"),
        (Phase::Native, "native"),
        (Phase::Dispatch, "dispatching"),
        (Phase::Syscall, "system calls"),
    ];
    /// Its name in the statistics.
    pub fn name(self) -> &'static str {
        Phase::COUNTED.iter().find(|(phase, _)| *phase == self).map_or("idle", |(_, name)| name)
    }

    /// All phases in the order of their numbers.
    const ALL: [Phase; 9] = [
        Phase::Idle,
        Phase::Dispatch,
        Phase::Interpret,
        Phase::Translate,
        Phase::Record,
        Phase::Optimise,
        Phase::Emit,
        Phase::Native,
        Phase::Syscall,
    ];
}

/// The time that one thread has spent in each phase, in ticks of the time stamp counter. Only that
/// thread writes it.
#[derive(Default, Debug)]
pub struct Clock {
    /// The number of the current phase.
    now: AtomicUsize,
    /// The tick at which it began.
    since: AtomicU64,
    /// Ticks in each phase, without the current stay.
    spent: [AtomicU64; Phase::ALL.len()],
    /// The same over the run, with `--timeline`.
    buckets: OnceLock<Buckets>,
}

impl Clock {
    /// Enters a phase; returns the one before.
    fn switch(&self, to: Phase) -> Phase {
        let now = ticks();
        let before = self.now.swap(to as usize, Ordering::Relaxed);
        let since = self.since.swap(now, Ordering::Relaxed);
        let spent = &self.spent[before];
        spent.store(spent.load(Ordering::Relaxed) + now.saturating_sub(since), Ordering::Relaxed);
        if let Some(buckets) = self.buckets.get() {
            buckets.add(Phase::ALL[before], since, now);
        }
        Phase::ALL[before]
    }

    /// Ticks spent in `phase` so far.
    pub fn spent(&self, phase: Phase) -> u64 {
        let running = self.now.load(Ordering::Relaxed) == phase as usize;
        let since = ticks().saturating_sub(self.since.load(Ordering::Relaxed));
        self.spent[phase as usize].load(Ordering::Relaxed) + if running { since } else { 0 }
    }

    /// The binary logarithm of the width of a bucket in ticks, and the ticks in each; none without
    /// `--timeline`.
    pub fn over_time(&self) -> Option<(u32, Ticks)> {
        let phase = Phase::ALL[self.now.load(Ordering::Relaxed)];
        let since = self.since.load(Ordering::Relaxed);
        self.buckets.get().map(|buckets| buckets.read((phase, since, ticks().max(since))))
    }
}

static ENABLED: AtomicBool = AtomicBool::new(false);
static TIMELINE: AtomicBool = AtomicBool::new(false);
/// Tick and time at which timing was enabled.
static START: OnceLock<Start> = OnceLock::new();

/// When timing was enabled.
struct Start {
    ticks: u64,
    time: Instant,
    /// The same by the clock of the samples.
    monotonic: u64,
}

thread_local! {
    /// The clock to which this thread attends; null if none.
    static CLOCK: Cell<*const Clock> = const { Cell::new(std::ptr::null()) };
}

/// Enables timing for the process, also over the run with `timeline`. Threads that attend to a clock
/// later are timed.
pub fn enable(timeline: bool) {
    START.get_or_init(|| Start {
        ticks: ticks(),
        time: Instant::now(),
        monotonic: sampling::monotonic(),
    });
    ENABLED.store(true, Ordering::Relaxed);
    TIMELINE.store(timeline, Ordering::Relaxed);
}

/// Is timing enabled?
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Is the time noted over the run?
pub fn has_timeline() -> bool {
    TIMELINE.load(Ordering::Relaxed)
}

/// Nanoseconds from the start to a sample's time.
pub fn since_start(monotonic: u64) -> u64 {
    START.get().map_or(0, |start| monotonic.saturating_sub(start.monotonic))
}

/// The duration of `n` ticks, by the rate of the time stamp counter since timing was enabled.
pub fn time(n: u64) -> Duration {
    let Some(start) = START.get() else { return Duration::ZERO };
    let all = ticks().saturating_sub(start.ticks).max(1);
    Duration::from_secs_f64(start.time.elapsed().as_secs_f64() * (n as f64 / all as f64))
}

/// Counts this thread's time in `clock` while the result lives. None if timing is not enabled.
pub fn attend(clock: &Arc<Clock>) -> Option<Attention> {
    if !is_enabled() {
        return None;
    }
    CLOCK.set(Arc::as_ptr(clock));
    if let Some(start) = START.get().filter(|_| has_timeline()) {
        clock.buckets.get_or_init(|| Buckets::new(start.ticks));
    }
    clock.since.store(ticks(), Ordering::Relaxed);
    clock.now.store(Phase::Dispatch as usize, Ordering::Relaxed);
    Some(Attention(clock.clone()))
}

/// Keeps a thread's clock running ([`attend`]).
pub struct Attention(Arc<Clock>);

impl Drop for Attention {
    fn drop(&mut self) {
        self.0.switch(Phase::Idle);
        CLOCK.set(std::ptr::null());
    }
}

/// Calls `f` in `phase`, and returns to the phase before.
pub fn during<R>(phase: Phase, f: impl FnOnce() -> R) -> R {
    if !is_enabled() {
        return f();
    }
    // SAFETY: null, or a clock that this thread's `Attention` keeps.
    let Some(clock) = (unsafe { CLOCK.get().as_ref() }) else { return f() };
    let before = clock.switch(phase);
    let result = f();
    clock.switch(before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_nest_and_add_up() {
        enable(true);
        let clock = Arc::new(Clock::default());
        let wait = |ms| std::thread::sleep(Duration::from_millis(ms));
        let start = Instant::now();
        {
            let _attention = attend(&clock);
            during(Phase::Interpret, || {
                wait(20);
                during(Phase::Translate, || wait(10));
                wait(20);
            });
            wait(5);
        }
        let all = start.elapsed();
        wait(10);
        let ms = |phase| time(clock.spent(phase)).as_millis();
        assert!(
            ms(Phase::Interpret) >= 39 && ms(Phase::Translate) >= 9 && ms(Phase::Dispatch) >= 4
        );
        assert_eq!(ms(Phase::Native), 0);
        let sum: Duration = Phase::COUNTED.iter().map(|(phase, _)| time(clock.spent(*phase))).sum();
        assert!(sum <= all + Duration::from_millis(2), "{sum:?} of {all:?}");
        let (_, over_time) = clock.over_time().expect("a timeline");
        let interpreted: u64 = over_time.iter().map(|b| b[Phase::Interpret as usize]).sum();
        assert_eq!(interpreted, clock.spent(Phase::Interpret));
        // A thread that attends to no clock is not timed.
        during(Phase::Native, || wait(1));
        assert_eq!(ms(Phase::Native), 0);
    }

    #[test]
    fn every_phase_has_its_place() {
        for (n, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, n);
            assert!(
                phase == Phase::Idle || Phase::COUNTED.iter().any(|(counted, _)| *counted == phase)
            );
        }
    }
}
