//! Steady state apart from warm-up (`--longer`): a program is measured at two lengths of its work.
//!
//! The time that the longer run takes more than the shorter one is *steady state*, for both have started, and
//! made their traces, before. In one round, with the times N and N' of the two native runs, and L and L' under
//! a launcher:
//!
//! ```text
//! steady  = (L' - L) / (N' - N)      ratio to native in steady state
//! warm-up = L - steady * N           seconds of the shorter run that its steady state does not explain
//! ```
//!
//! Both are medians over the rounds. Warm-up contains start-up; for native it is zero by definition. The
//! premises are the user's: the additional work is of the same kind, and the shorter run is long enough for
//! all traces to be made. If traces are still made in the additional time, steady is too large and warm-up too
//! small.
//!
//! What noise could explain is not determined (`n.d.`), see [`Steady::of`]. No data, no lock.
//!
//! Example: natively 1.0 and 2.0 s, under a tier 1.3 and 2.1 s: steady 0.8, warm-up 0.5 s.

use crate::bench::summary::{Ratio, median};

/// The additional native time must be at least this share of the shorter run's (guess: a change of the
/// machine's speed by a few percent then changes the ratio by less than a third).
const LEAST_SHARE: f64 = 0.1;
/// Half of the interval of the ratio may be this share of it (guess).
const MOST_UNCERTAINTY: f64 = 0.5;

/// Times of runs at the two lengths, shorter first, by rounds.
pub type Times<'a> = [&'a [f64]; 2];

/// What two lengths tell of a launcher.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Steady {
    /// Ratio to native in steady state.
    pub ratio: Ratio,
    /// Seconds of warm-up.
    pub warm_up: Ratio,
}

impl Steady {
    /// The figures of a launcher.
    ///
    /// # Errors
    /// Why they are not determined: the longer run does not take longer in each round, takes less than a tenth
    /// longer natively, or the interval of the ratio is wider than the ratio.
    pub fn of(launched: Times, native: Times) -> Result<Steady, &'static str> {
        let rounds = launched.iter().chain(&native).map(|times| times.len()).min().unwrap_or(0);
        let (mut ratios, mut warm_ups) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let [more, more_native] = [launched, native].map(|t| t[1][round] - t[0][round]);
            if more <= 0.0 || more_native <= 0.0 {
                return Err("the longer run did not take longer in each round");
            }
            let ratio = more / more_native;
            ratios.push(ratio);
            warm_ups.push(launched[0][round] - ratio * native[0][round]);
        }
        let (Some(ratio), Some(warm_up)) = (Ratio::among(&ratios), Ratio::among(&warm_ups)) else {
            return Err("there are no runs of both lengths");
        };
        let [short, long] = native.map(|times| median(times).unwrap_or_default());
        if long < (1.0 + LEAST_SHARE) * short {
            return Err("the longer run takes less than a tenth longer natively");
        }
        if ratio.uncertainty().is_some_and(|share| share > MOST_UNCERTAINTY) {
            return Err("half of its interval is more than half of the ratio");
        }
        Ok(Steady { ratio, warm_up })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_lengths_give_both_figures() {
        let (short, long) = ([1.3, 1.32, 1.28], [2.1, 2.12, 2.08]);
        let steady = Steady::of([&short, &long], [&[1.0; 3], &[2.0; 3]]).expect("determined");
        assert!((steady.ratio.median - 0.8).abs() < 1e-9, "{steady:?}");
        assert!((steady.warm_up.median - 0.5).abs() < 1e-9, "{steady:?}");
        // Warm-up has an interval from six rounds on, which may hold zero.
        let (short, long) = ([1.0, 1.01, 0.99, 1.0, 1.01, 0.99], [2.0; 6]);
        let steady = Steady::of([&short, &long], [&[1.0; 6], &[2.0; 6]]).expect("determined");
        assert!(steady.warm_up.low < Some(0.0) && steady.warm_up.high > Some(0.0), "{steady:?}");
    }

    #[test]
    fn what_noise_explains_is_not_determined() {
        let native: Times = [&[1.0; 6], &[2.0; 6]];
        let why = |launched: Times, native: Times| Steady::of(launched, native).expect_err("n.d.");
        let backwards = why([&[1.0; 6], &[2.0, 2.0, 0.9, 2.0, 2.0, 2.0]], native);
        assert!(backwards.contains("longer in each round"), "{backwards}");
        let little = why([&[1.0; 6], &[1.5; 6]], [&[1.0; 6], &[1.05; 6]]);
        assert!(little.contains("a tenth"), "{little}");
        let wide = why([&[1.0; 6], &[1.1, 1.2, 2.0, 2.0, 3.9, 4.0]], native);
        assert!(wide.contains("interval"), "{wide}");
        assert!(why([&[], &[]], native).contains("no runs"));
    }
}
