//! How indirect transfers found where they went, for who asks: hit rates.
//!
//! Under [`Config::rates`](crate::Config::rates) each tail ([`crate::transfers::indirect`]) adds
//! one to a word of data memory, and so does the miss stub where the second table has what it looks
//! for, and, in place of its tail, each jump that has found its target by a comparison; who leaves
//! is counted by the runtime. The rest has been found by the first table. Without that setting no
//! byte of the code is different. Threads that do it at once lose counts.

use crate::cache::words::Words;
use std::ops::Range;

/// The words.
const EXECUTED: usize = 0;
const SECOND: usize = 1;
const COMPARED: usize = 2;
const WORDS: usize = 512;

/// What indirect transfers have done, traces followed inside not among them: those are guards.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rates {
    /// Transfers, those that left among them.
    pub executed: u64,
    /// Found in the second table.
    pub second: u64,
    /// Found by a comparison, beside [`Rates::executed`].
    pub compared: u64,
}

/// See the module.
pub(crate) struct RateWords {
    words: Words,
}

impl RateWords {
    /// None if there is no room for the words where their addresses are displacements.
    pub fn new(cache: &Range<u64>) -> Option<RateWords> {
        let words = Words::new(cache, WORDS)?;
        i32::try_from(words.range().end).is_ok().then_some(RateWords { words })
    }

    /// The address of what tails count in.
    pub fn executed(&self) -> u32 {
        self.words.address(EXECUTED) as u32
    }

    /// The address of what the miss stub counts in.
    pub fn second(&self) -> u32 {
        self.words.address(SECOND) as u32
    }

    /// The address of what jumps count in that have compared.
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
