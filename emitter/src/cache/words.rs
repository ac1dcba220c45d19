//! Words of data memory within reach of the cache's code, in which generated code counts.

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
    /// `len` words, all zero, within reach of the cache's code; none if there is no room.
    pub fn new(cache: &Range<u64>, len: usize) -> Option<Words> {
        const STEP: usize = 16 << 20;
        const FARTHEST: u64 = 1 << 30;
        let places = (cache.end..cache.end.saturating_add(FARTHEST)).step_by(STEP);
        places.into_iter().find_map(|place| {
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

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The addresses of all.
    pub fn range(&self) -> Range<u64> {
        self.address(0)..self.address(self.len)
    }

    /// Where word `n` is.
    pub fn address(&self, n: usize) -> u64 {
        self.memory as u64 + 8 * n as u64
    }

    /// What word `n` holds.
    pub fn get(&self, n: usize) -> u64 {
        self.word(n).load(Ordering::Relaxed)
    }

    /// Makes word `n` hold `value`.
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
        // SAFETY: ours; generated code that knows the address is gone with the cache.
        unsafe { libc::munmap(self.memory.cast(), 8 * self.len) };
    }
}
