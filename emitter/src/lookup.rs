//! The table that indirect trace ends consult: guest pc -> fragment entry, direct-mapped by the pc's low 16 bits.
//!
//! Two arrays of 65,536 words in ordinary (high, writable) memory: the negated pc, so that generated code compares
//! with `lea` and `jrcxz` and touches no flags, and the entry address. An entry is written before its pc, so
//! a reader that finds the pc finds its entry.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

const SLOTS: usize = 1 << 16;
const BYTES: usize = 2 * 8 * SLOTS;

/// The table.
pub(crate) struct Lookup {
    memory: *mut u64,
}

// SAFETY: the memory is only accessed through atomics, and by generated code with aligned loads.
unsafe impl Send for Lookup {}
// SAFETY: as above.
unsafe impl Sync for Lookup {}

impl Lookup {
    /// An empty table.
    pub fn new() -> io::Result<Lookup> {
        // SAFETY: a fresh private mapping.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if p == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let table = Lookup { memory: p.cast() };
        table.reserve_zero();
        Ok(table)
    }

    /// Addresses of the array of negated pcs and of the array of entries.
    pub fn addresses(&self) -> (u64, u64) {
        (self.memory as u64, self.memory as u64 + 8 * SLOTS as u64)
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        debug_assert!(i < 2 * SLOTS);
        // SAFETY: within the mapping, aligned, and only used atomically.
        unsafe { AtomicU64::from_ptr(self.memory.add(i)) }
    }

    /// A zero word would name pc 0 in slot 0, where pc 0 belongs: let that slot name pc -1 while it is empty.
    fn reserve_zero(&self) {
        self.word(0).store(1, Ordering::Release);
    }

    /// Maps `pc` to `entry`, evicting what shares its slot.
    pub fn insert(&self, pc: u64, entry: u64) {
        let slot = pc as usize % SLOTS;
        self.remove_slot(slot);
        self.word(SLOTS + slot).store(entry, Ordering::Release);
        self.word(slot).store(pc.wrapping_neg(), Ordering::Release);
    }

    /// Forgets `pc`.
    pub fn remove(&self, pc: u64) {
        let slot = pc as usize % SLOTS;
        if self.word(slot).load(Ordering::Relaxed) == pc.wrapping_neg() {
            self.remove_slot(slot);
        }
    }

    fn remove_slot(&self, slot: usize) {
        self.word(slot).store(u64::from(slot == 0), Ordering::Release);
    }

    /// Forgets everything.
    pub fn clear(&self) {
        // SAFETY: our own private anonymous memory reads as zero afterwards.
        unsafe { libc::madvise(self.memory.cast(), BYTES, libc::MADV_DONTNEED) };
        self.reserve_zero();
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        // SAFETY: ours; generated code that knows the address is gone with the cache.
        unsafe { libc::munmap(self.memory.cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_slots_name_no_pc_of_their_slot() {
        let t = Lookup::new().unwrap();
        for slot in [0, 1, SLOTS - 1] {
            let named = t.word(slot).load(Ordering::Relaxed).wrapping_neg();
            assert_ne!(named as usize % SLOTS, slot);
        }
        t.insert(0, 7);
        assert_eq!(t.word(0).load(Ordering::Relaxed), 0);
        t.remove(0);
        t.insert(SLOTS as u64 * 3 + 5, 9);
        assert_eq!(t.word(SLOTS + 5).load(Ordering::Relaxed), 9);
        t.clear();
        assert_eq!(t.word(5).load(Ordering::Relaxed), 0);
        assert_eq!(t.word(0).load(Ordering::Relaxed), 1);
    }
}
