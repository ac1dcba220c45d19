//! The time that a proof takes: processor time of its thread, so that a verdict does not depend on what else the
//! machine does.
//!
//! Data: the clock's value at the start. No lock; one thread uses it.
//!
//! Example: `Stopwatch::start().elapsed()` is a microsecond or less.

use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// A point in the processor time of the thread that has made it.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Duration);

impl Stopwatch {
    /// Starts.
    pub fn start() -> Stopwatch {
        Stopwatch(time())
    }

    /// The thread's processor time since the start.
    pub fn elapsed(self) -> Duration {
        time().saturating_sub(self.0)
    }
}

/// The thread's processor time.
fn time() -> Duration {
    // Linux has this clock since 2.6.12.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_time_and_sleep_does_not() {
        let stopwatch = Stopwatch::start();
        std::thread::sleep(Duration::from_millis(50));
        assert!(stopwatch.elapsed() < Duration::from_millis(50));
        let since = stopwatch.elapsed();
        while stopwatch.elapsed() == since {
            std::hint::spin_loop();
        }
    }
}
