//! Is the guest in traces much of its time already?
//!
//! A head's threshold is meant for a guest of which nothing is known: compiling a path costs as much as interpreting it
//! some hundred times, and most paths of a large program are executed less. Where a good part of the time goes into native code,
//! the guest goes round in loops that have been found, and the rest of what they do is worth finding soon. What that costs
//! is not native: too much of it ends the haste by itself.

use crate::profile::ticks;

/// The share is looked at after so many ticks, which is some milliseconds. Each time what was before counts half.
const WINDOW: u64 = 1 << 24;

/// How much of a thread's time goes into native code.
pub struct Pace {
    since: u64,
    native: u64,
    is_native: bool,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { since: ticks(), native: 0, is_native: false }
    }
}

impl Pace {
    /// Runs native code.
    pub fn native<R>(&mut self, run: impl FnOnce() -> R) -> R {
        let entered = ticks();
        let result = run();
        let now = ticks();
        self.passed(now.saturating_sub(entered), now);
        result
    }

    /// Of the time until `now`, so much more went into native code.
    fn passed(&mut self, native: u64, now: u64) {
        self.native += native;
        let all = now.saturating_sub(self.since);
        if all >= WINDOW {
            self.is_native = self.native > all / 3;
            self.native /= 2;
            self.since = now - all / 2;
        }
    }

    /// Has more than a third of the time gone there?
    pub fn is_native(&self) -> bool {
        self.is_native
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_the_time_decides_and_the_past_is_forgotten() {
        let mut pace = Pace { since: 0, native: 0, is_native: false };
        pace.passed(WINDOW / 4, WINDOW / 2);
        assert!(!pace.is_native(), "too early");
        pace.passed(WINDOW / 8, WINDOW);
        assert!(pace.is_native());
        // Nothing native any more.
        let mut windows = 1;
        while pace.is_native() {
            windows += 1;
            pace.passed(0, windows * WINDOW);
        }
        assert!((2..6).contains(&windows), "{windows}");
    }

    #[test]
    fn what_runs_is_timed() {
        let mut pace = Pace::default();
        for _ in 0..1000 {
            let until = ticks() + WINDOW / 4;
            pace.native(|| while ticks() < until {});
            if pace.is_native() {
                return;
            }
        }
        panic!("{} of {} ticks", pace.native, ticks() - pace.since);
    }
}
