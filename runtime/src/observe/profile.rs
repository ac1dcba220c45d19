//! Where the time of a run goes (`--stats`): each thread knows what it is doing, and how long it
//! has.
//!
//! A thread is in one *phase* at a time; [`during`] enters one and goes back. Entering costs a time
//! stamp (about ten nanoseconds, and nothing without `--stats`), so phases are timed, not sampled:
//! there is no signal that a guest could notice and no thread of ours that would count as one of
//! its. Times are those of the clock on the wall: what a system call waits is in there.
//!
//! What native code does it does without us. Where copied blocks and traces run among each other,
//! [`sampling`] tells them apart.

pub mod sampling;

use dynasour_emitter::ticks;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What a thread is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Nothing that is counted: there is no guest thread.
    Idle,
    /// Whatever is nothing else: finding and linking code, attending to other threads.
    Dispatch,
    /// Interpreting guest code.
    Interpret,
    /// Making guest code fit for the interpreter, or copying it.
    Translate,
    /// Interpreting what is recorded, and building versions from recordings.
    Record,
    /// Optimising versions.
    Optimise,
    /// Making native code of them.
    Emit,
    /// Running native code: traces, copied blocks.
    Native,
    /// System calls and what else the runtime does in the guest's name.
    Syscall,
}

impl Phase {
    /// Those that are counted, with their names.
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
    /// Its name.
    pub fn name(self) -> &'static str {
        Phase::COUNTED.iter().find(|(phase, _)| *phase == self).map_or("idle", |(_, name)| name)
    }

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

/// How long one thread has been in each phase, in ticks. Only that thread writes.
#[derive(Default, Debug)]
pub struct Clock {
    now: AtomicUsize,
    since: AtomicU64,
    spent: [AtomicU64; Phase::ALL.len()],
}

impl Clock {
    fn switch(&self, to: Phase) -> Phase {
        let now = ticks();
        let before = self.now.swap(to as usize, Ordering::Relaxed);
        let since = self.since.swap(now, Ordering::Relaxed);
        let spent = &self.spent[before];
        spent.store(spent.load(Ordering::Relaxed) + now.saturating_sub(since), Ordering::Relaxed);
        Phase::ALL[before]
    }

    /// Ticks in a phase so far.
    pub fn spent(&self, phase: Phase) -> u64 {
        let running = self.now.load(Ordering::Relaxed) == phase as usize;
        let since = ticks().saturating_sub(self.since.load(Ordering::Relaxed));
        self.spent[phase as usize].load(Ordering::Relaxed) + if running { since } else { 0 }
    }
}

static ENABLED: AtomicBool = AtomicBool::new(false);
/// When that was: ticks and time.
static START: OnceLock<(u64, Instant)> = OnceLock::new();

thread_local! {
    static CLOCK: Cell<*const Clock> = const { Cell::new(std::ptr::null()) };
}

/// From now on threads are timed.
pub fn enable() {
    START.get_or_init(|| (ticks(), Instant::now()));
    ENABLED.store(true, Ordering::Relaxed);
}

/// Are they?
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// How long so many ticks are.
pub fn time(n: u64) -> Duration {
    let Some((ticks_then, then)) = START.get() else { return Duration::ZERO };
    let all = ticks().saturating_sub(*ticks_then).max(1);
    Duration::from_secs_f64(then.elapsed().as_secs_f64() * (n as f64 / all as f64))
}

/// This thread's time goes to `clock` while the result lives.
pub fn attend(clock: &Arc<Clock>) -> Option<Attention> {
    if !is_enabled() {
        return None;
    }
    CLOCK.set(Arc::as_ptr(clock));
    clock.since.store(ticks(), Ordering::Relaxed);
    clock.now.store(Phase::Dispatch as usize, Ordering::Relaxed);
    Some(Attention(clock.clone()))
}

/// See [`attend`].
pub struct Attention(Arc<Clock>);

impl Drop for Attention {
    fn drop(&mut self) {
        self.0.switch(Phase::Idle);
        CLOCK.set(std::ptr::null());
    }
}

/// Does something in a phase, and goes back to the one before.
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
        enable();
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
        // Whom nobody attends to is not timed.
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
