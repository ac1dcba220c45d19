//! Hit rates: how indirect transfers found their destinations, for `--stats`.
//!
//! Under [`Config::rates`](crate::Config::rates) generated code adds one to a word of data memory
//! in three places: each tail ([`crate::transfers::indirect`]); the miss stub, if the second table
//! has the target; and each jump that has found its target by a comparison, which does so instead
//! of its tail. Transfers that leave are counted by the runtime. All others were found by the first
//! table. Without that setting no byte of the code is different.
//!
//! Data: [`RateWords`]. Threads add without a lock, so they may lose counts. The words lie in the
//! low 2 GiB, because generated code names them by 32-bit addresses; without room there nothing is
//! counted.
//!
//! Example: 1,000 executed, 30 in the second table, 5 came to the runtime: the first table found
//! 965.

use crate::cache::words::Words;
use std::ops::Range;

/// Indices of the words.
const EXECUTED: usize = 0;
const SECOND: usize = 1;
const COMPARED: usize = 2;
/// A page, the least that can be mapped.
const WORDS: usize = 512;

/// Counts of indirect transfers. A transfer that a trace follows inside is a guard and is not among
/// them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rates {
    /// Transfers, those that left among them.
    pub executed: u64,
    /// Found in the second table.
    pub second: u64,
    /// Found by a comparison, beside [`Rates::executed`].
    pub compared: u64,
}

/// The words of an emitter.
pub(crate) struct RateWords {
    words: Words,
}

impl RateWords {
    /// None if there is no room in the low 2 GiB.
    pub fn new(cache: &Range<u64>) -> Option<RateWords> {
        let words = Words::new(cache, WORDS)?;
        i32::try_from(words.range().end).is_ok().then_some(RateWords { words })
    }

    /// The address of the word in which tails count.
    pub fn executed(&self) -> u32 {
        self.words.address(EXECUTED) as u32
    }

    /// The address of the word in which the miss stub counts.
    pub fn second(&self) -> u32 {
        self.words.address(SECOND) as u32
    }

    /// The address of the word in which jumps count that have found their target by a comparison.
    pub fn compared(&self) -> u32 {
        self.words.address(COMPARED) as u32
    }

    /// Counts so far.
    pub fn rates(&self) -> Rates {
        let [executed, second, compared] = [EXECUTED, SECOND, COMPARED].map(|n| self.words.get(n));
        Rates { executed, second, compared }
    }

    /// The addresses of the words.
    pub fn memory(&self) -> Range<u64> {
        self.words.range()
    }
}
