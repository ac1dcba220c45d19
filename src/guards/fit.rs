//! A straight line through measurements, when a cost is determined, and the frequency of this
//! processor.
//!
//! A deoptimisation cannot cost less than nothing. So a cost that is not above zero is noise, and
//! its interval with it: the cost is *not determined*. No data, no lock.
//!
//! Example: runs with 0, 1,000 and 2,000 deoptimisations take 1, 3 and 5 ms. The line has the
//! intercept 1 ms and the slope 2 µs, which is the cost of one deoptimisation.

use crate::bench::summary::Ratio;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// A measured value with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Estimate {
    /// The same in another unit.
    pub fn scaled(self, factor: f64) -> Estimate {
        Estimate { value: self.value * factor, low: self.low * factor, high: self.high * factor }
    }

    /// The value as a cost; `None` if its interval is not above zero.
    pub fn cost(self) -> Option<Estimate> {
        (self.low > 0.0).then_some(self)
    }

    /// Half of the interval as a share of the value; `None` if the value is not determined.
    pub fn uncertainty(self) -> Option<f64> {
        self.cost().map(|cost| (cost.high - cost.low) / 2.0 / cost.value)
    }
}

/// The median of costs that were measured one by one; `None` if it is not determined: the lower end
/// of its interval is not above zero or, with too few for an interval, some cost is not.
pub fn median_cost(costs: &[f64]) -> Option<Ratio> {
    let ratio = Ratio::among(costs)?;
    let least = ratio.low.or_else(|| costs.iter().copied().min_by(f64::total_cmp))?;
    (least > 0.0).then_some(ratio)
}

/// `y = intercept + slope * x` by least squares.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Line {
    /// At x = 0.
    pub intercept: f64,
    /// Per unit of x, with Student's interval.
    pub slope: Estimate,
    /// The share of the variance of y that the line explains.
    pub r_squared: f64,
    /// Number of points.
    pub points: usize,
}

impl Line {
    /// Fits a line to at least three points that do not all have the same x.
    pub fn through(points: &[(f64, f64)]) -> Option<Line> {
        let n = points.len() as f64;
        let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
        let (x_mean, y_mean) = (mean(|p| p.0), mean(|p| p.1));
        let sum = |f: &dyn Fn(f64, f64) -> f64| {
            points.iter().map(|(x, y)| f(x - x_mean, y - y_mean)).sum::<f64>()
        };
        let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
        if points.len() < 3 || xx <= 0.0 {
            return None;
        }
        let slope = xy / xx;
        let residual = sum(&|x, y| (y - slope * x).powi(2));
        let freedom = n - 2.0;
        let quantile = StudentsT::new(0.0, 1.0, freedom).ok()?.inverse_cdf(0.975);
        let half = quantile * (residual / freedom / xx).sqrt();
        Some(Line {
            intercept: y_mean - slope * x_mean,
            slope: Estimate { value: slope, low: slope - half, high: slope + half },
            r_squared: if yy > 0.0 { 1.0 - residual / yy } else { 1.0 },
            points: points.len(),
        })
    }
}

/// Core cycles per nanosecond under load. They are measured with a chain of multiplications (3
/// cycles, by the instruction tables of current processors) and exclusive ors (1 cycle), each of
/// which depends on the one before. The fastest of several measurements counts, because
/// disturbances only make it slower.
pub fn cycles_per_nanosecond() -> f64 {
    /// Links of the chain (guess: about a millisecond, shorter than the kernel's time slice).
    const LENGTH: u64 = 1_000_000;
    /// Measurements (guess; too few may all be disturbed, or end before the processor is at full
    /// frequency).
    const MEASUREMENTS: u32 = 40;
    const CYCLES_PER_LINK: f64 = 4.0;
    let once = || {
        let mut x: u64 = black_box(3);
        let start = Instant::now();
        for _ in 0..LENGTH {
            x = x.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ 0x14;
        }
        black_box(x);
        start.elapsed()
    };
    let best = (0..MEASUREMENTS).map(|_| once()).min().unwrap_or(Duration::from_millis(1));
    CYCLES_PER_LINK * LENGTH as f64 / best.as_nanos().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_fitted_with_an_interval_that_holds_the_truth() {
        // Residuals +1, -1, … around y = 5 + 2 x: expected values computed by hand.
        let points: Vec<(f64, f64)> = (0..8)
            .map(|i| (f64::from(i), 5.0 + 2.0 * f64::from(i) + if i % 2 == 0 { 1.0 } else { -1.0 }))
            .collect();
        let line = Line::through(&points).expect("points");
        assert!((line.slope.value - (2.0 - 4.0 / 42.0)).abs() < 1e-9, "{line:?}");
        assert!(line.slope.low < 2.0 && 2.0 < line.slope.high && line.r_squared > 0.9, "{line:?}");
        assert_eq!(Line::through(&points[..2]), None);
        assert_eq!(Line::through(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
        let exact = Line::through(&[(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]).expect("points");
        assert_eq!((exact.intercept, exact.slope.value, exact.r_squared), (1.0, 2.0, 1.0));
    }

    #[test]
    fn costs_are_above_zero_or_not_determined() {
        let estimate = |low: f64| Estimate { value: 4.0, low, high: 8.0 - low };
        assert_eq!(estimate(-0.1).cost(), None);
        assert_eq!(estimate(-0.1).uncertainty(), None);
        assert_eq!(estimate(3.0).cost(), Some(estimate(3.0)));
        assert_eq!(estimate(3.0).uncertainty(), Some(0.25));
        assert_eq!(median_cost(&[]), None);
        assert_eq!(median_cost(&[900.0, -5.0, 1000.0]), None);
        let few = median_cost(&[900.0, 5.0, 1000.0]).expect("all are above zero");
        assert_eq!((few.median, few.low), (900.0, None));
        let mut many = [1000.0; 20];
        many[0] = -7.0;
        assert_eq!(median_cost(&many).expect("its interval is above zero").low, Some(1000.0));
        many[..9].fill(-7.0);
        assert_eq!(median_cost(&many), None);
    }

    #[test]
    fn processors_tick_between_a_tenth_and_ten_times_a_nanosecond() {
        let cycles = cycles_per_nanosecond();
        assert!((0.1..10.0).contains(&cycles), "{cycles}");
    }
}
