//! Named counters that the guest's process increments, and that the process which has started it reads.
//!
//! Data: [`Counters`], a shared mapping of numbers, and their names, which stay in the process that made them. A
//! [`Counter`] is one of the numbers, for code that runs in the guest's process: a pass, a policy.
//!
//! Invariant: a counter is made before the guest's process is, so that both have it. Any thread of any process may
//! add to it, without a lock. Processes that the guest forks add to the same numbers.
//!
//! ```
//! let counters = dynasour_runtime::observe::counters::Counters::new()?;
//! let loads = counters.counter("loads")?;
//! loads.add(3);
//! assert_eq!(counters.read()["loads"], 3);
//! # Ok::<(), std::io::Error>(())
//! ```

use super::channel::Mapping;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The most counters of one set.
pub const MOST: usize = 4096;

type Numbers = Mapping<[AtomicU64; MOST]>;

/// A set of counters.
#[derive(Clone)]
pub struct Counters {
    numbers: Arc<Numbers>,
    names: Arc<Mutex<Vec<String>>>,
}

/// One counter of a set.
#[derive(Clone)]
pub struct Counter {
    numbers: Arc<Numbers>,
    index: usize,
}

impl Counters {
    /// A set without counters.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new() -> io::Result<Counters> {
        // SAFETY: numbers.
        let numbers = Arc::new(unsafe { Mapping::zeroed() }?);
        Ok(Counters { numbers, names: Arc::default() })
    }

    /// The counter with this name, which begins at 0. The same name always means the same counter.
    ///
    /// # Errors
    /// There are [`MOST`] counters already.
    pub fn counter(&self, name: &str) -> io::Result<Counter> {
        let mut names = lock(&self.names);
        let index = match names.iter().position(|known| known == name) {
            Some(index) => index,
            None if names.len() == MOST => {
                let all = format!("there are {MOST} counters already: no room for `{name}`");
                return Err(io::Error::other(all));
            }
            None => {
                names.push(name.to_string());
                names.len() - 1
            }
        };
        Ok(Counter { numbers: self.numbers.clone(), index })
    }

    /// All counters, by name.
    pub fn read(&self) -> BTreeMap<String, u64> {
        let names = lock(&self.names);
        let value = |n: &AtomicU64| n.load(Ordering::Relaxed);
        names.iter().cloned().zip(self.numbers.iter().map(value)).collect()
    }

    /// Makes all counters 0.
    pub fn reset(&self) {
        self.numbers.iter().for_each(|n| n.store(0, Ordering::Relaxed));
    }
}

impl Counter {
    /// Adds to the counter, which wraps around at 2^64.
    pub fn add(&self, n: u64) {
        self.numbers[self.index].fetch_add(n, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_child;

    #[test]
    fn another_process_counts() {
        let counters = Counters::new().expect("memory");
        let (a, b) = (counters.counter("a").expect("room"), counters.counter("b").expect("room"));
        a.add(1);
        let status = in_child(|| {
            a.add(2);
            b.add(5);
            0
        });
        assert_eq!(status, 0);
        counters.counter("a").expect("the same").add(4);
        assert_eq!(counters.read(), [("a".to_string(), 7), ("b".to_string(), 5)].into());
        counters.reset();
        assert!(counters.read().values().all(|n| *n == 0));
    }

    #[test]
    fn there_are_so_many_and_no_more() {
        let counters = Counters::new().expect("memory");
        (0..MOST).for_each(|n| counters.counter(&n.to_string()).expect("room").add(1));
        assert!(counters.counter("7").is_ok());
        assert!(counters.counter("one more").is_err_and(|e| e.to_string().contains("one more")));
        assert_eq!(counters.read().len(), MOST);
    }
}
