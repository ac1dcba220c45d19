//! Addresses that stand for words of the running thread's context: those in which loops count their starts
//! ([`ThreadContext::loop_starts`](dynasour_guest::ThreadContext)).
//!
//! The IR has no address for a word that each thread has for itself. So an address stands for it that is not
//! canonical: no access of the guest's there succeeds, and a version that has one is refused
//! ([`crate::codegen`]). Native code names the word by its offset from GS, and what performs the stores of a record
//! by the context's address.
//!
//! No data, no lock.
//!
//! Example: word 6 is `0x8000_0000_0000_0030`, and `gs:[loop_starts + 48]` in native code.

use dynasour_guest::context::{LOOP_WORDS, offset};

/// The address of word 0.
const WORDS: u64 = 1 << 63;

/// The address that stands for word `n`.
pub(crate) fn address(n: u32) -> u64 {
    WORDS + 8 * u64::from(n)
}

/// The offset in the thread's context of the word that this address stands for, if it is one.
pub(crate) fn field(address: u64) -> Option<usize> {
    let word = address.wrapping_sub(WORDS) / 8;
    (word < LOOP_WORDS as u64).then(|| offset::LOOP_STARTS + 8 * word as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_words_are_not_canonical() {
        let last = address(LOOP_WORDS as u32 - 1);
        assert_eq!(field(address(0)), Some(offset::LOOP_STARTS));
        assert_eq!(field(last), Some(offset::LOOP_STARTS + 8 * (LOOP_WORDS - 1)));
        assert_eq!([0, WORDS - 8, last + 8, u64::MAX].map(field), [None; 4]);
    }
}
