//! Words of data memory within reach of the cache's code, in which generated code counts.
//!
//! Data: [`Words`], a mapping of its own behind or before the cache, so that code names a word relative to
//! rip. Invariant: Rust reads and writes words by single atomic accesses, because generated code
//! changes them on other threads. Generated code adds without a lock, so counts may be lost. The
//! caller holds the emitter.
//!
//! Example: the counter of a head counts word 7 down from 50. [`Words::set`]`(7, 50)` starts it,
//! and [`Words::get`]`(7)` says how many executions remain.

use dynasour_guest::space::page_up;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words that generated code and Rust both change, by single stores.
pub(crate) struct Words {
    memory: *mut u64,
    len: usize,
}

// SAFETY: the memory is only accessed through atomics, and by generated code with aligned accesses.
unsafe impl Send for Words {}
// SAFETY: `&self` only offers atomic accesses.
unsafe impl Sync for Words {}

impl Words {
    /// `len` words, all zero, within reach of the cache's code; `None` if there is no room.
    pub fn new(cache: &Range<u64>, len: usize) -> Option<Words> {
        // Bytes between the addresses that are tried (guess).
        const STEP: usize = 16 << 20;
        // Bytes from the cache: with the largest cache still within reach of rip-relative operands, 2
        // GiB.
        const FARTHEST: u64 = 1 << 30;
        let behind = (cache.end..cache.end.saturating_add(FARTHEST)).step_by(STEP);
        let last = cache.start.saturating_sub(page_up(8 * len as u64)?);
        let before = (0..FARTHEST).step_by(STEP).filter_map(|back| last.checked_sub(back));
        behind.chain(before).filter(|place| *place > 0).find_map(|place| {
            // SAFETY: a fresh mapping that replaces nothing.
            let memory = unsafe {
                let prot = libc::PROT_READ | libc::PROT_WRITE;
                let flags = libc::MAP_PRIVATE
                    | libc::MAP_ANONYMOUS
                    | libc::MAP_NORESERVE
                    | libc::MAP_FIXED_NOREPLACE;
                libc::mmap(place as *mut libc::c_void, 8 * len, prot, flags, -1, 0)
            };
            (memory as u64 == place).then_some(Words { memory: memory.cast(), len })
        })
    }

    /// The number of words.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The addresses of all words.
    pub fn range(&self) -> Range<u64> {
        self.address(0)..self.address(self.len)
    }

    /// The address of word `n`.
    pub fn address(&self, n: usize) -> u64 {
        self.memory as u64 + 8 * n as u64
    }

    /// The value of word `n`.
    pub fn get(&self, n: usize) -> u64 {
        self.word(n).load(Ordering::Relaxed)
    }

    /// Sets word `n` to `value`.
    pub fn set(&self, n: usize, value: u64) {
        self.word(n).store(value, Ordering::Relaxed);
    }

    fn word(&self, n: usize) -> &AtomicU64 {
        assert!(n < self.len);
        // SAFETY: within the mapping, aligned, and only used atomically.
        unsafe { AtomicU64::from_ptr(self.memory.add(n)) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: this type mapped it; generated code that knows the address was dropped with the
        // cache.
        unsafe { libc::munmap(self.memory.cast(), 8 * self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::space::Reservation;

    #[test]
    fn words_lie_before_the_cache_where_there_is_no_room_behind() {
        const MIB: u64 = 1 << 20;
        let mut all = Reservation::anywhere(1100 * MIB, MIB).expect("address space");
        let cache = all.start() + 20 * MIB..all.start() + 36 * MIB;
        assert!(Words::new(&cache, 1000).is_none_or(|words| words.range().end <= all.start()));
        all.unmap(cache.start - 8 * MIB..cache.start).expect("it was reserved");
        let words = Words::new(&cache, 1000).expect("there is room before");
        words.set(999, 7);
        assert_eq!((words.get(0), words.get(999)), (0, 7));
        assert!((cache.start - 8 * MIB..cache.start).contains(&words.address(0)));
        assert!(words.range().end <= cache.start);
        // Another test may have mapped something in the gap by now.
        all.commit();
    }
}
