//! The time of one thread in each phase, over the run (`--timeline`).
//!
//! The run is divided into at most [`BUCKETS`] buckets of equal width. When the run gets longer than all
//! buckets, pairs of them are added up and the width doubles, so the memory does not grow and the
//! buckets always cover the whole run.
//!
//! Data: [`Buckets`], the ticks of the time stamp counter in each bucket and phase. [`Timeline`] is what
//! the statistics show, for all threads.
//!
//! Invariant: only its own thread writes the buckets. No lock: while the thread adds up pairs,
//! [`Buckets::merges`] is odd, and readers wait for a while; a bucket that is being written may miss that time.
//!
//! Example: with a width of 5 ms, a stay in a phase from 12 ms to 17 ms adds 3 ms to the third bucket,
//! and 2 ms to the fourth.

use super::Phase;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Buckets of a thread (guess: more than a plot has pixels for is of no use).
const BUCKETS: usize = 256;
/// Binary logarithm of the ticks of the first buckets: some 6 ms at 3 GHz (guess; with narrower ones
/// short runs have more details, and long ones are added up more often).
const FIRST_SHIFT: u32 = 24;
/// Attempts to read while the thread adds up pairs; then it is taken for one that has ended while it did, and
/// its times are those of some of the buckets.
const MOST_ATTEMPTS: u32 = 1000;
/// Number of phases.
const PHASES: usize = Phase::ALL.len();

/// Ticks in each phase, by bucket.
pub type Ticks = Vec<[u64; PHASES]>;

/// The time of one thread.
#[derive(Debug)]
pub struct Buckets {
    /// The tick at which the first bucket begins.
    start: u64,
    /// Number of times that adding up pairs has begun or ended.
    merges: AtomicU32,
    /// Binary logarithm of the width of a bucket.
    shift: AtomicU32,
    spent: Box<[[AtomicU64; PHASES]; BUCKETS]>,
}

impl Buckets {
    /// Empty buckets for a run that began at the tick `start`.
    pub fn new(start: u64) -> Buckets {
        let none = || std::array::from_fn(|_| AtomicU64::new(0));
        Buckets {
            start,
            merges: AtomicU32::new(0),
            shift: AtomicU32::new(FIRST_SHIFT),
            spent: Box::new(std::array::from_fn(|_| none())),
        }
    }

    /// The thread was in `phase` from one tick to the other.
    pub fn add(&self, phase: Phase, from: u64, to: u64) {
        let (from, to) = (from.saturating_sub(self.start), to.saturating_sub(self.start));
        while to >> self.shift.load(Ordering::Relaxed) >= BUCKETS as u64 {
            self.add_up_pairs();
        }
        let shift = self.shift.load(Ordering::Relaxed);
        spread(shift, from, to, |bucket, ticks| {
            let spent = &self.spent[bucket][phase as usize];
            spent.store(spent.load(Ordering::Relaxed) + ticks, Ordering::Relaxed);
        });
    }

    fn add_up_pairs(&self) {
        self.merges.fetch_add(1, Ordering::AcqRel);
        fence(Ordering::Release);
        for bucket in 0..BUCKETS {
            for phase in 0..PHASES {
                let of = |bucket: usize| {
                    self.spent.get(bucket).map_or(0, |b| b[phase].load(Ordering::Relaxed))
                };
                let pair = of(2 * bucket) + of(2 * bucket + 1);
                self.spent[bucket][phase].store(pair, Ordering::Relaxed);
            }
        }
        self.shift.fetch_add(1, Ordering::Relaxed);
        self.merges.fetch_add(1, Ordering::Release);
    }

    /// The binary logarithm of the width of a bucket, and the ticks so far. `running` is the current
    /// stay in a phase, from its first tick to now.
    pub fn read(&self, running: (Phase, u64, u64)) -> (u32, Ticks) {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let before = self.merges.load(Ordering::Acquire);
            let shift = self.shift.load(Ordering::Relaxed);
            let mut ticks: Ticks = self
                .spent
                .iter()
                .map(|bucket| std::array::from_fn(|phase| bucket[phase].load(Ordering::Relaxed)))
                .collect();
            fence(Ordering::Acquire);
            let is_torn = before % 2 == 1 || self.merges.load(Ordering::Relaxed) != before;
            if is_torn && attempts < MOST_ATTEMPTS {
                std::thread::yield_now();
                continue;
            }
            let (phase, from, to) = running;
            let (from, to) = (from.saturating_sub(self.start), to.saturating_sub(self.start));
            let buckets = (to >> shift) as usize + 1;
            ticks.resize(buckets.max(BUCKETS), [0; PHASES]);
            spread(shift, from, to, |bucket, n| ticks[bucket][phase as usize] += n);
            ticks.truncate(buckets);
            return (shift, ticks);
        }
    }
}

/// Calls `f` with each bucket of a stay, and the ticks in it.
fn spread(shift: u32, from: u64, to: u64, mut f: impl FnMut(usize, u64)) {
    let mut at = from;
    while at < to {
        let bucket = at >> shift;
        let end = ((bucket + 1) << shift).min(to);
        f(bucket as usize, end - at);
        at = end;
    }
}

/// The time of all threads over the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Timeline {
    /// Nanoseconds of a bucket.
    pub bucket_nanoseconds: u64,
    /// Nanoseconds in each phase, by bucket.
    pub phases: BTreeMap<String, Vec<u64>>,
    /// Samples of native code by its kind, by bucket.
    pub native_samples: BTreeMap<String, Vec<u64>>,
}

impl Timeline {
    /// Adds up the buckets of all threads. `nanoseconds` converts ticks.
    pub fn of(threads: Vec<(u32, Ticks)>, nanoseconds: impl Fn(u64) -> u64) -> Timeline {
        let shift = threads.iter().map(|(shift, _)| *shift).max().unwrap_or(FIRST_SHIFT);
        let mut sums: Ticks = Vec::new();
        for (narrow, ticks) in threads {
            for (n, bucket) in ticks.iter().enumerate() {
                let wide = n >> (shift - narrow);
                sums.resize(sums.len().max(wide + 1), [0; PHASES]);
                sums[wide].iter_mut().zip(bucket).for_each(|(sum, ticks)| *sum += ticks);
            }
        }
        let mut phases = BTreeMap::new();
        for (phase, name) in Phase::COUNTED {
            let times: Vec<u64> = sums.iter().map(|b| nanoseconds(b[phase as usize])).collect();
            if times.iter().any(|ns| *ns > 0) {
                phases.insert(name.to_string(), times);
            }
        }
        let bucket_nanoseconds = nanoseconds(1 << shift).max(1);
        Timeline { bucket_nanoseconds, phases, native_samples: BTreeMap::new() }
    }

    /// Adds a sample of native code of this kind, taken so many nanoseconds after the start.
    pub fn sampled(&mut self, kind: &str, nanoseconds: u64) {
        let length = self.phases.values().map(Vec::len).max().unwrap_or(0);
        let bucket = (nanoseconds / self.bucket_nanoseconds.max(1)) as usize;
        let samples =
            self.native_samples.entry(kind.to_string()).or_insert_with(|| vec![0; length]);
        if let Some(samples) = samples.get_mut(bucket.min(length.saturating_sub(1))) {
            *samples += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: u64 = 1 << FIRST_SHIFT;

    fn sum(ticks: &Ticks, phase: Phase) -> u64 {
        ticks.iter().map(|bucket| bucket[phase as usize]).sum()
    }

    #[test]
    fn stays_are_spread_over_the_buckets() {
        let buckets = Buckets::new(1000);
        buckets.add(Phase::Native, 1000 + WIDTH / 2, 1000 + 2 * WIDTH + 5);
        let (shift, ticks) = buckets.read((Phase::Syscall, 1000 + 2 * WIDTH + 5, 1000 + 3 * WIDTH));
        assert_eq!((shift, ticks.len()), (FIRST_SHIFT, 4));
        let native: Vec<u64> = ticks.iter().map(|b| b[Phase::Native as usize]).collect();
        assert_eq!(native, [WIDTH / 2, WIDTH, 5, 0]);
        assert_eq!(sum(&ticks, Phase::Syscall), WIDTH - 5);
    }

    #[test]
    fn long_runs_keep_their_sums() {
        let buckets = Buckets::new(0);
        let mut at = 0;
        for n in 0..3000 {
            let phase = if n % 3 == 0 { Phase::Interpret } else { Phase::Native };
            buckets.add(phase, at, at + WIDTH);
            at += WIDTH;
        }
        let (shift, ticks) = buckets.read((Phase::Native, at, at));
        assert_eq!(sum(&ticks, Phase::Interpret), 1000 * WIDTH);
        assert_eq!(sum(&ticks, Phase::Native), 2000 * WIDTH);
        assert!(ticks.len() <= BUCKETS && shift == FIRST_SHIFT + 4, "{} {shift}", ticks.len());
        // A stay that is longer than all buckets.
        let (_, ticks) = buckets.read((Phase::Native, at, 9 * at));
        assert_eq!(sum(&ticks, Phase::Native), 2000 * WIDTH + 8 * at);
    }

    #[test]
    fn threads_of_different_widths_are_added_up() {
        let one = (FIRST_SHIFT, vec![[1; PHASES]; 5]);
        let two = (FIRST_SHIFT + 1, vec![[10; PHASES]; 2]);
        let mut timeline = Timeline::of(vec![one, two], |ticks| ticks);
        assert_eq!(timeline.bucket_nanoseconds, 2 * WIDTH);
        assert_eq!(timeline.phases["native"], [12, 12, 1]);
        timeline.sampled("in traces", 2 * WIDTH);
        timeline.sampled("in traces", 100 * WIDTH);
        assert_eq!(timeline.native_samples["in traces"], [0, 1, 1]);
        assert_eq!(Timeline::of(Vec::new(), |t| t).phases.len(), 0);
    }
}
