//! Statistics of repeated runs: medians, ratios, intervals, outliers. No data, no lock.
//!
//! An interval is of the median, by order statistics: it assumes nothing of the distribution of
//! times, which is skewed. The true median lies below all of n values, or above all, with a
//! probability of 2 / 2^n. That is below 5 % from six values on, so fewer have no interval.
//!
//! Example: runs of 2, 3 and 4 s beside native runs of 1 s give the ratio 3 without an interval.
//! With six runs of 2 to 4 s it is the whole range, 2 to 4.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use statrs::distribution::{Binomial, DiscreteCDF};

/// The fewest values that have a 95 % interval (see the module's header).
pub const FEWEST_FOR_INTERVAL: usize = 6;

/// The median of `values`; for an even number, the mean of the two middle values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The median of several values, often of ratios of two ways to run one workload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Ratio {
    /// The median; of ratios, those of neighbouring runs.
    pub median: f64,
    /// Lower end of its 95 % interval by order statistics; none if there are fewer than six values.
    pub low: Option<f64>,
    /// Upper end of the same interval.
    pub high: Option<f64>,
}

impl Ratio {
    /// Ratios of `runs` to the neighbouring runs `base`, in the same order.
    pub fn of(runs: &[f64], base: &[f64]) -> Option<Ratio> {
        let pairs = runs.iter().zip(base).filter(|(_, base)| **base > 0.0);
        Ratio::among(&pairs.map(|(run, base)| run / base).collect::<Vec<f64>>())
    }

    /// The median of these values, with its interval.
    pub fn among(values: &[f64]) -> Option<Ratio> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = median(&sorted)?;
        let outside = outside_interval(sorted.len());
        Some(Ratio {
            median,
            low: outside.map(|outside| sorted[outside]),
            high: outside.map(|outside| sorted[sorted.len() - 1 - outside]),
        })
    }

    /// Half the width of the interval as a share of the median; `None` without an interval.
    pub fn uncertainty(&self) -> Option<f64> {
        let (low, high) = (self.low?, self.high?);
        (self.median > 0.0).then(|| (high - low) / 2.0 / self.median)
    }

    /// The interval for a table, `0.98-1.04`; `-` if there is none.
    pub fn interval(&self, digits: usize) -> String {
        match (self.low, self.high) {
            (Some(low), Some(high)) => format!("{low:.digits$}-{high:.digits$}"),
            _ => "-".to_string(),
        }
    }
}

/// The number of sorted values that lie outside the 95 % interval of their median, on each side. It
/// is the largest k such that at most k of `count` values lie below the true median with a
/// probability of at most 2.5 %; `None` if there is no such k.
fn outside_interval(count: usize) -> Option<usize> {
    let below = Binomial::new(0.5, count as u64).expect("one half is a probability");
    (0..count as u64).take_while(|k| below.cdf(*k) <= 0.025).count().checked_sub(1)
}

/// The positions of values that are far from the median of all: more than 3.5 standard deviations,
/// as they are estimated by the median absolute deviation (Iglewicz and Hoaglin, "How to Detect and
/// Handle Outliers", 1993), and more than 5 % of it.
pub fn outliers(values: &[f64]) -> Vec<usize> {
    /// With fewer values, most of them may be disturbed (guess).
    const FEWEST: usize = 5;
    const DEVIATIONS: f64 = 3.5;
    /// The standard deviation of a normal distribution, over its median absolute deviation.
    const STANDARD_OVER_MEDIAN: f64 = 1.4826;
    /// Runs that are nearer to the median, as a share of it, are not named (guess: they change no
    /// conclusion).
    const NEGLIGIBLE: f64 = 0.05;
    let Some(middle) = median(values).filter(|_| values.len() >= FEWEST) else { return Vec::new() };
    let distances: Vec<f64> = values.iter().map(|value| (value - middle).abs()).collect();
    let Some(deviation) = median(&distances) else { return Vec::new() };
    let bound = (DEVIATIONS * STANDARD_OVER_MEDIAN * deviation).max(NEGLIGIBLE * middle);
    (0..values.len()).filter(|at| distances[*at] > bound).collect()
}

/// The geometric mean.
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (count, sum) =
        values.into_iter().fold((0, 0.0), |(count, sum), value| (count + 1, sum + value.ln()));
    (count > 0).then(|| (sum / f64::from(count)).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_means() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(geometric_mean([]), None);
        assert!((geometric_mean([1.0, 4.0]).expect("two") - 2.0).abs() < 1e-12);
    }

    #[test]
    fn an_interval_holds_its_median() {
        let base = [1.0; 20];
        let runs: Vec<f64> = (0..20).map(|i| 2.0 + 0.01 * f64::from(i)).collect();
        let ratio = Ratio::of(&runs, &base).expect("runs");
        assert_eq!((ratio.low, ratio.high), (Some(runs[5]), Some(runs[14])));
        assert!((ratio.uncertainty().expect("an interval") - 0.045 / 2.095).abs() < 1e-9);
        // From tables of the sign test: 20 values give the 6th to the 15th.
        assert_eq!((outside_interval(20), outside_interval(9)), (Some(5), Some(1)));
        assert_eq!(Ratio::of(&runs, &[]), None);
    }

    #[test]
    fn few_values_have_no_interval() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let few = Ratio::among(&values[..FEWEST_FOR_INTERVAL - 1]).expect("values");
        assert_eq!((few.median, few.low, few.high, few.uncertainty()), (3.0, None, None, None));
        assert_eq!(few.interval(2), "-");
        let enough = Ratio::among(&values[..FEWEST_FOR_INTERVAL]).expect("values");
        assert_eq!((enough.low, enough.high), (Some(1.0), Some(6.0)));
        assert_eq!(enough.interval(1), "1.0-6.0");
    }

    #[test]
    fn outliers_are_far_from_the_others() {
        assert_eq!(outliers(&[1.00, 1.02, 0.99, 1.5, 1.01, 0.98]), [3]);
        assert_eq!(outliers(&[1.0, 1.0, 1.0, 1.0, 1.005]), [0; 0]);
        assert_eq!(outliers(&[1.0, 1.0, 1.0, 1.0, 0.5]), [4]);
        assert_eq!(outliers(&[1.0, 1.0, 1.0, 9.0]), [0; 0]);
        assert_eq!(outliers(&[]), [0; 0]);
    }
}
