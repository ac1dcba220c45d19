//! For how much a head is counted while a sample is looked at.
//!
//! In a loop that calls functions, each function is passed as often as the loop's head, or several times as often
//! if it is called several times. But traces of functions are entered and left at each call; it is the loop that pays. So
//! a passage of a loop's head counts as one more for each call since the passage before. A call belongs to the innermost
//! loop around it.
//!
//! Data: [`SampledCalls`], of one thread; no lock. Invariant: each call counts for one loop at most.
//!
//! Example: a loop calls two functions, the first of which calls the second. Each of its iterations has three
//! calls: its head is counted four times, the second function twice.

use rustc_hash::FxHashMap;

/// The calls in the edges that were looked at for one sample.
#[derive(Debug, Default)]
pub struct SampledCalls {
    /// Calls that belong to no loop yet.
    open: u32,
    /// How many of those there were when this head was passed last.
    at_head: FxHashMap<u64, u32>,
}

impl SampledCalls {
    /// Another sample is looked at.
    pub fn begin(&mut self) {
        self.open = 0;
        self.at_head.clear();
    }

    /// The guest calls a function.
    pub fn call(&mut self) {
        self.open += 1;
    }

    /// The guest goes back to the head of a loop. Returns the calls in the iteration that ends there.
    pub fn pass(&mut self, head: u64) -> u32 {
        let before = self.at_head.get(&head).copied().unwrap_or(self.open);
        let calls = self.open.saturating_sub(before);
        self.open -= calls;
        self.at_head.insert(head, self.open);
        calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_belong_to_the_innermost_loop() {
        let mut calls = SampledCalls::default();
        let (outer, inner) = (0x1000, 0x2000);
        calls.call();
        assert_eq!(calls.pass(outer), 0, "the loop was not seen from its head");
        for _ in 0..3 {
            calls.call();
            for n in 0..4 {
                calls.call();
                assert_eq!(calls.pass(inner), u32::from(n > 0));
            }
            // The first calls of the loops are not between two passages of the inner head.
            assert_eq!(calls.pass(outer), 2);
        }
        calls.begin();
        assert_eq!(calls.pass(outer), 0);
    }
}
