//! How many rounds are measured: a given number, or as many as make the figures precise.
//!
//! Data: [`Rounds`] are the options, which `bench` and `guards` share. Without `--runs`, at least
//! [`ENOUGH`] rounds are measured, and more until each interval is small (`--precision`) or the
//! time is up (`--max-time`); the time ends rounds below [`ENOUGH`], too. No lock.
//!
//! *Stopping has a price.* Rounds that end as soon as an interval is small end preferably at
//! moments at which it is small by chance, so that fewer than 95 % of such intervals hold the true
//! median. With [`ENOUGH`] rounds as the least, 93 % do in the worst case simulated (a test here
//! repeats it).
//!
//! ```text
//! --runs 3          3 rounds, no interval
//! (no option)       10 rounds; then until ± 2 % or 60 s
//! ```

use clap::Args;
use std::time::{Duration, Instant};

/// Rounds before which precision does not end the measurement (guess, as in other tools; see the
/// module's header for what a simulation says of it).
pub const ENOUGH: u32 = 10;
/// The most rounds without `--runs` (guess; more make large results for programs of milliseconds).
const MOST: u32 = 1_000;

/// Options for the number of rounds.
#[derive(Args, Debug, Clone)]
pub struct Rounds {
    /// Measure exactly N rounds [default: at least 10, and more until --precision or --max-time].
    /// Fewer than 6 have no 95 % intervals
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: Option<u32>,
    /// Stop when half of the 95 % interval of each ratio is below this percentage of the ratio
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, conflicts_with = "runs",
          value_parser = positive)]
    precision: f64,
    /// Begin no further round of a program after this time
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, conflicts_with = "runs",
          value_parser = positive)]
    max_time: f64,
}

/// Parses a number above 0 (and below a billion: a duration must hold it).
fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|n| *n > 0.0 && *n < 1e9);
    number.ok_or_else(|| "expected a number above 0".to_string())
}

impl Rounds {
    /// Begins the rounds of one program.
    pub fn begin(&self) -> Counter<'_> {
        Counter { rounds: self, done: 0, start: Instant::now() }
    }

    /// The expected number of rounds, for a progress bar.
    pub fn expected(&self) -> u64 {
        u64::from(self.runs.unwrap_or(ENOUGH))
    }
}

/// Counts the rounds of one program.
pub struct Counter<'a> {
    rounds: &'a Rounds,
    done: u32,
    start: Instant,
}

impl Counter<'_> {
    /// The number of the next round, from 0; `None` if no more is needed. `uncertainty` is the
    /// largest share of a median that half of its interval is, after the rounds so far; `None` if
    /// there is no interval.
    pub fn next(&mut self, uncertainty: impl FnOnce() -> Option<f64>) -> Option<usize> {
        self.next_after(self.start.elapsed(), uncertainty)
    }

    fn next_after(
        &mut self,
        elapsed: Duration,
        uncertainty: impl FnOnce() -> Option<f64>,
    ) -> Option<usize> {
        let Rounds { runs, precision, max_time } = *self.rounds;
        let more = match (runs, self.done) {
            (Some(runs), done) => done < runs,
            (None, 0) => true,
            (None, _) if elapsed >= Duration::from_secs_f64(max_time) => false,
            (None, done) if done < ENOUGH => true,
            (None, done) => {
                done < MOST && uncertainty().is_none_or(|share| share > precision / 100.0)
            }
        };
        self.done += u32::from(more);
        more.then(|| self.done as usize - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::summary::Ratio;
    use proptest::prelude::Rng;
    use proptest::test_runner::{RngAlgorithm, TestRng};
    use statrs::distribution::{ContinuousCDF, LogNormal};

    fn count(rounds: &Rounds, elapsed: u64, uncertainty: Option<f64>) -> u32 {
        let mut counter = rounds.begin();
        while counter.next_after(Duration::from_secs(elapsed), || uncertainty).is_some() {}
        counter.done
    }

    #[test]
    fn rounds_end_by_number_precision_or_time() {
        let automatic = Rounds { runs: None, precision: 2.0, max_time: 60.0 };
        assert_eq!(count(&automatic, 1, Some(0.019)), ENOUGH);
        assert_eq!(count(&automatic, 1, Some(0.021)), MOST);
        assert_eq!(count(&automatic, 1, None), MOST);
        assert_eq!(count(&automatic, 60, Some(0.5)), 1);
        let fixed = Rounds { runs: Some(3), ..automatic };
        assert_eq!(count(&fixed, 1000, None), 3);
        for bad in ["0", "-1", "nan", "inf", "1e300", "", "2%"] {
            assert!(positive(bad).is_err(), "{bad}");
        }
    }

    /// The share of 95 % intervals that hold the true median (1) when rounds end by precision. The
    /// noise is such that some studies end at [`ENOUGH`] rounds, and others much later.
    #[test]
    fn intervals_stay_nearly_right_when_precision_ends_the_rounds() {
        const STUDIES: usize = 4_000;
        const LAST: usize = 100;
        let noise = LogNormal::new(0.0, 0.05).expect("a distribution");
        let mut random = TestRng::from_seed(RngAlgorithm::XorShift, &[7; 16]);
        let holds = (0..STUDIES).filter(|_| {
            let mut values = Vec::new();
            loop {
                let uniform = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
                values.push(noise.inverse_cdf(uniform.clamp(1e-12, 1.0 - 1e-12)));
                if values.len() < ENOUGH as usize {
                    continue;
                }
                let ratio = Ratio::among(&values).expect("values");
                if ratio.uncertainty().is_some_and(|share| share <= 0.02) || values.len() >= LAST {
                    return ratio.low.expect("enough") <= 1.0 && 1.0 <= ratio.high.expect("enough");
                }
            }
        });
        let share = holds.count() as f64 / STUDIES as f64;
        assert!((0.915..0.95).contains(&share), "{share}");
    }
}
