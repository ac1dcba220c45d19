//! Statistics of repeated runs: medians, ratios, intervals. No data, no lock.
//!
//! Example: runs of 2, 3 and 4 s beside native runs of 1 s give the ratio 3. Three runs are too few
//! for an interval of 95 %, so it is the whole range, 2 to 4.

use serde::{Deserialize, Serialize};
use statrs::distribution::{Binomial, DiscreteCDF};

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

/// The ratio of two ways to run one workload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The median of the ratios of neighbouring runs.
    pub median: f64,
    /// Lower end of its 95 % interval by order statistics; the smallest ratio when there are too
    /// few runs for an interval.
    pub low: f64,
    /// Upper end of the same interval; the largest ratio when there are too few runs.
    pub high: f64,
}

impl Ratio {
    /// Ratios of `runs` to the neighbouring runs `base`, in the same order.
    pub fn of(runs: &[f64], base: &[f64]) -> Option<Ratio> {
        let pairs = runs.iter().zip(base).filter(|(_, base)| **base > 0.0);
        let mut ratios: Vec<f64> = pairs.map(|(run, base)| run / base).collect();
        ratios.sort_by(f64::total_cmp);
        let median = median(&ratios)?;
        let outside = outside_interval(ratios.len());
        let (low, high) = (ratios[outside], ratios[ratios.len() - 1 - outside]);
        Some(Ratio { median, low, high })
    }
}

/// The number of sorted values that lie outside the 95 % interval of their median, on each side. It
/// is the largest k such that at most k of `count` values lie below the true median with a
/// probability of at most 2.5 %; 0 if there is none.
fn outside_interval(count: usize) -> usize {
    let below = Binomial::new(0.5, count as u64).expect("one half is a probability");
    (0..count as u64).take_while(|k| below.cdf(*k) <= 0.025).count().saturating_sub(1)
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
        assert!(
            ratio.low > 2.0
                && ratio.low < ratio.median
                && ratio.median < ratio.high
                && ratio.high < 2.19,
            "{ratio:?}"
        );
        // From tables of the sign test: 20 values give the 6th to the 15th; with 5 values only the
        // whole range is left.
        assert_eq!((outside_interval(20), outside_interval(9), outside_interval(5)), (5, 1, 0));
        let few = Ratio::of(&runs[..3], &base).expect("runs");
        assert_eq!((few.low, few.high), (2.0, 2.02));
        assert_eq!(Ratio::of(&runs, &[]), None);
    }
}
