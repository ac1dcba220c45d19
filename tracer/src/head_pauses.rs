//! When a head's executions are counted, and when counting pauses.
//!
//! A counter costs each execution of its head as much for a head that is not worth a trace as for
//! one that is. A program that spends its time on thousands of loops, none of which gets hot soon,
//! would pay for all of them (measured: stockfish 9 %, nec2c 30 %, cc1 20 %). So a head is counted
//! for an *interval* of at most [`INTERVAL`] executions first. If at that rate it gets hot soon,
//! counting continues. Otherwise counting *pauses*, for a multiple of the time that the interval
//! took. Executions during the pause are estimated from the slower of the rates before and after.
//!
//! Data: [`HeadCount`], what is known of one head. Invariant: a wrong estimate only changes when a
//! trace is made. The runtime owns the counters and the clock, and calls this module under the lock
//! of its fragments.
//!
//! Example: a head must be executed 25,000 times. Its first 1,000 executions take a second: at that
//! rate it is hot in 24 s, which is not soon. Counting pauses for three seconds. The next 1,000
//! take half a second: the pause is estimated at the slower rate, as 3,000 executions.

/// The most executions that are counted without a pause, unless the head gets hot soon (guess; more
/// cost heads that never get hot, fewer estimate rates by chance).
pub const INTERVAL: u64 = 1000;
/// Ticks of the time stamp counter, some 50 ms at 2.5 GHz (guess). A head that will be hot within
/// this time is counted without a pause. Too few delay traces, too many count heads that are not
/// hot.
pub const SOON: u64 = 1 << 27;
/// A pause is this many times as long as the last interval (guess: counting then costs about 1 % of
/// what it would cost without pauses).
pub const PAUSE: u64 = 100;
/// Ticks of the longest pause, some three seconds at 2.5 GHz (guess: by this time the trace of a
/// head that gets hot later is delayed).
pub const LONGEST: u64 = 1 << 33;
/// If a hot head cannot be recorded because the budget is spent, its pause is [`SOON`], doubled
/// each time, but at most this often (guess, as for [`LONGEST`]).
const MOST_DOUBLINGS: u32 = 6;

/// What is known of one head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeadCount {
    /// Executions since the count began, some of them estimated.
    seen: u64,
    /// The number of executions that makes the head hot.
    wanted: u64,
    /// How often the head was hot, but not recorded because the budget was spent.
    postponements: u32,
    /// The last interval, if counting has paused since.
    paused: Option<Interval>,
}

/// An interval of counting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Interval {
    /// Time stamp of its end.
    end: u64,
    /// Executions in it.
    executions: u64,
    /// Its length.
    ticks: u64,
}

impl Interval {
    /// How many executions there are in `ticks` at this interval's rate.
    fn executions_in(&self, ticks: u64) -> u128 {
        u128::from(self.executions) * u128::from(ticks) / u128::from(self.ticks.max(1))
    }
}

/// What the caller does about a head after an interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// It records the head, which is hot.
    Hot,
    /// It counts this many executions more.
    Count(u64),
    /// It does not count for this many ticks.
    Pause(u64),
}

impl HeadCount {
    /// A head that is hot after `wanted` executions.
    pub fn new(wanted: u64) -> HeadCount {
        HeadCount { seen: 0, wanted, postponements: 0, paused: None }
    }

    /// Executions so far, some of them estimated.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Executions until it is hot.
    pub fn left(&self) -> u64 {
        self.wanted.saturating_sub(self.seen)
    }

    /// Notes that an interval has ended at the time stamp `end`, and says what comes next.
    pub fn interval(&mut self, executions: u64, ticks: u64, end: u64) -> Next {
        let this = Interval { end, executions, ticks };
        let during_pause = self.paused.take().map_or(0, |before| {
            let pause = end.saturating_sub(ticks).saturating_sub(before.end);
            let estimate = before.executions_in(pause).min(this.executions_in(pause));
            u64::try_from(estimate).unwrap_or(u64::MAX)
        });
        self.seen = self.seen.saturating_add(executions).saturating_add(during_pause);
        let left = self.left();
        if left == 0 {
            return Next::Hot;
        }
        if u128::from(left) * u128::from(ticks) <= u128::from(SOON) * u128::from(executions) {
            return Next::Count(left);
        }
        self.paused = Some(this);
        Next::Pause(ticks.saturating_mul(PAUSE).min(LONGEST))
    }

    /// Notes that the head is hot but is not recorded, because the budget is spent. Returns the
    /// factor by which its pause is longer than [`SOON`] ticks this time.
    pub fn postpone(&mut self) -> u64 {
        let factor = 1 << self.postponements.min(MOST_DOUBLINGS);
        self.postponements += 1;
        factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gets_hot_soon_is_counted_to_the_end() {
        let mut soon = HeadCount::new(25_000);
        assert_eq!(soon.interval(1000, SOON / 100, SOON), Next::Count(24_000));
        assert_eq!(soon.interval(24_000, u64::MAX, u64::MAX), Next::Hot);
    }

    #[test]
    fn executions_in_a_pause_are_estimated_from_the_slower_rate() {
        // A thousandth of an execution a tick, twice as many, half as many.
        for (second, took, estimate) in
            [(1000, SOON, 10_000), (2000, SOON, 10_000), (1000, 2 * SOON, 5_000)]
        {
            let mut late = HeadCount::new(100_000);
            assert_eq!(late.interval(1000, SOON, SOON), Next::Pause((SOON * PAUSE).min(LONGEST)));
            let now = 11 * SOON + took;
            assert!(matches!(late.interval(second, took, now), Next::Pause(_)));
            assert_eq!(late.seen(), 1000 + second + estimate);
        }
    }

    #[test]
    fn a_head_that_is_counted_on_is_not_estimated() {
        let mut late = HeadCount::new(1_000_000);
        assert_eq!(late.interval(1000, SOON, SOON), Next::Pause(LONGEST));
        assert_eq!(late.interval(100_000, 100 * SOON, 101 * SOON), Next::Pause(LONGEST));
        assert_eq!(late.seen(), 101_000);
        assert_eq!(late.interval(899_000, u64::MAX, u64::MAX), Next::Hot);
    }

    #[test]
    fn a_head_is_postponed_longer_each_time() {
        let mut head = HeadCount::new(1);
        assert_eq!([head.postpone(), head.postpone(), head.postpone()], [1, 2, 4]);
        (0..10).for_each(|_| _ = head.postpone());
        assert_eq!(head.postpone(), 64);
    }
}
