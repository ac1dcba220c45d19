//! Samples of a thread's program counter, taken by the kernel (`perf_event_open(2)`).
//!
//! After every [`PERIOD`] of the thread's processor time the kernel writes the program counter of
//! the user code into memory that it shares with this process ([`crate::kernel::perf_event`]). That needs no
//! signal and no thread, so the guest cannot notice it. When the memory is full, the kernel stops
//! sampling. Where events are forbidden there are no samples.
//!
//! Data: [`Samples`], the shared memory of one thread: a page of the kernel's, then [`PAGES`] pages
//! of records.
//!
//! Invariant: nothing is ever taken out of the memory, so the kernel never overwrites a record that
//! it has published. No lock: any thread may read the samples while the kernel adds more.
//!
//! Example: a thread that computes for 100 ms leaves some 50 samples, each with a program counter
//! in the code that it executed.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::kernel::perf_event::{Attributes, Event, PAGE, SAMPLE_TIME};

/// Nanoseconds of processor time from one sample to the next (guess; fewer disturb the guest and
/// fill the memory sooner, more divide the time of short runs badly).
const PERIOD: u64 = 2_000_000;
/// Pages of records; the kernel requires a power of two (guess: 16,384 samples, which is 32 s of
/// processor time; later time is not sampled).
const PAGES: usize = 64;
/// The same with `--timeline`, where records are larger: 54 s in all.
const TIMED_PERIOD: u64 = 5_000_000;
const SAMPLE_IP: u64 = 1;
const RECORD_SAMPLE: u32 = 9;
/// Byte offset of `data_head` in the first page.
const DATA_HEAD: usize = 1024;

/// The samples of one thread.
pub struct Samples {
    event: Event,
    /// Does each record have a time?
    timed: bool,
}

/// A sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// The program counter.
    pub pc: u64,
    /// When it was taken, by [`monotonic`]; none if samples have no times.
    pub time: Option<u64>,
}

/// Nanoseconds of the clock by which samples are timed.
pub fn monotonic() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes a time.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Samples {
    /// Starts to sample the calling thread, with the time of each sample if it is to be `timed`. None
    /// if that is not allowed.
    pub fn start(timed: bool) -> Option<Samples> {
        let (period, records) =
            if timed { (TIMED_PERIOD, SAMPLE_IP | SAMPLE_TIME) } else { (PERIOD, SAMPLE_IP) };
        let attributes = Attributes { period, records, signal: None };
        Event::start(&attributes, PAGES).map(|event| Samples { event, timed })
    }

    /// Calls `f` with each sample so far.
    pub fn for_each(&self, mut f: impl FnMut(Sample)) {
        const WORDS: usize = PAGES * PAGE / 8;
        // SAFETY: within the mapping and aligned; the kernel writes the word atomically, after the
        // records that it publishes.
        let head = unsafe { AtomicU64::from_ptr(self.event.memory().add(DATA_HEAD).cast()) }
            .load(Ordering::Acquire);
        let word = |n: usize| {
            // SAFETY: within the mapping and aligned, and published.
            unsafe { self.event.memory().add(PAGE + 8 * (n % WORDS)).cast::<u64>().read() }
        };
        // No record was overwritten, because none was ever taken out. A record is a header of one
        // word and then the fields that were asked for: the program counter, then the time.
        let fields = if self.timed { 2 } else { 1 };
        let (mut n, end) = (0, (head / 8) as usize);
        while n < end.min(WORDS) {
            let header = word(n);
            let words = (header >> 48) as usize / 8;
            if header as u32 == RECORD_SAMPLE && n + fields < end {
                f(Sample { pc: word(n + 1), time: self.timed.then(|| word(n + 2)) });
            }
            n += words.max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn processor_time() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes a time.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[inline(never)]
    fn busy(time: Duration) {
        let start = processor_time();
        let mut n = 0u64;
        while processor_time() - start < time {
            for _ in 0..10_000 {
                n = std::hint::black_box(n.wrapping_mul(31) + 1);
            }
        }
    }

    #[test]
    fn a_busy_thread_is_sampled() {
        let Some(samples) = Samples::start(false) else { return };
        busy(Duration::from_millis(100));
        let mut all = Vec::new();
        samples.for_each(|sample| all.push(sample));
        // The kernel may be late, but is not early.
        assert!((5..=60).contains(&all.len()), "{}", all.len());
        assert!(all.iter().all(|s| s.pc != 0 && s.pc < 1 << 47 && s.time.is_none()));
    }

    #[test]
    fn samples_have_times_in_order() {
        let start = monotonic();
        let Some(samples) = Samples::start(true) else { return };
        busy(Duration::from_millis(100));
        let mut times = vec![start];
        samples.for_each(|sample| times.extend(sample.time));
        times.push(monotonic());
        assert!((5..=24).contains(&times.len()), "{}", times.len());
        assert!(times.is_sorted(), "{times:?}");
    }
}
