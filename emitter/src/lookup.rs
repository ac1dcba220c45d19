//! The tables that indirect jumps consult: guest pc -> checked entry (see [`crate::indirect`]).
//!
//! * **first**: 65,536 words, indexed by the pc's low 16 bits, each the address of a checked entry, or of the miss stub.
//!   A site jumps through it unseen. It lies in the low 2 GiB, so that its address is a displacement.
//! * **second**: a hash table for pcs that share their word with another. Two arrays, of complemented pcs and of checked
//!   entries; a pc stands in one of [`PROBES`] neighbouring slots. The miss stub searches it.
//!
//! Writers hold the emitter; readers are generated code on any thread. Every word is written in one aligned store, and
//! what a reader finds it never trusts: a checked entry verifies that it is meant, so that a pc and an entry that do not
//! belong together, read while somebody wrote, are no more than a miss.

use dynasour_guest::space::{CACHE, Reservation};
use rustc_hash::FxHashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of the first table.
pub(crate) const SLOTS: usize = 1 << 16;
/// Slots of the second table that one pc may stand in.
pub(crate) const PROBES: usize = 4;
/// Bytes from a slot's pc to its entry in the second table.
pub(crate) const ENTRIES: usize = 8 * (SLOTS + PROBES);

const FIRST_BYTES: usize = 8 * SLOTS;
const SECOND_BYTES: usize = 2 * ENTRIES;
/// Addresses of the first table end at or below this one.
const LAST: u64 = 0x7fff_0000;
/// Distance of the addresses tried for it.
const STEP: usize = 16 << 20;

/// Both tables.
pub(crate) struct Lookup {
    first: *mut u64,
    second: *mut u64,
    /// What a word of the first table holds that leads nowhere.
    miss: u64,
    /// Whose the words of the first table are that do not.
    owners: FxHashMap<u16, u64>,
    /// In which slot of the second table a pc is.
    places: FxHashMap<u64, u32>,
}

// SAFETY: the memory is only accessed through atomics, and by generated code with aligned loads.
unsafe impl Send for Lookup {}
// SAFETY: as above.
unsafe impl Sync for Lookup {}

/// The slot of the second table where the search for `pc` begins: the same in the miss stub.
pub(crate) fn hash(pc: u64) -> usize {
    let (low, high) = (pc as u16, (pc >> 16) as u16);
    usize::from(low.wrapping_add(high.wrapping_mul(HIGH_WEIGHT)))
}

/// What bits 16 to 31 of a pc count in [`hash`].
pub(crate) const HIGH_WEIGHT: u16 = 72;

impl Lookup {
    /// Empty tables, the first one near `cache`, or else wherever it can be reached by a displacement, or else anywhere.
    pub fn new(cache: &Range<u64>, miss: u64) -> io::Result<Lookup> {
        let low = (CACHE.start..LAST - FIRST_BYTES as u64).step_by(STEP);
        let mut places = std::iter::once(cache.end).chain(low).filter(|p| p + FIRST_BYTES as u64 <= LAST);
        let place = places.find_map(|p| Reservation::at(p, FIRST_BYTES as u64).ok());
        let place = place.map(|reservation| {
            let start = reservation.start();
            reservation.commit();
            start
        });
        let first = map(place, FIRST_BYTES)?;
        let second = map(None, SECOND_BYTES)?;
        let table = Lookup { first, second, miss, owners: FxHashMap::default(), places: FxHashMap::default() };
        (0..SLOTS).for_each(|i| table.first_word(i).store(miss, Ordering::Relaxed));
        Ok(table)
    }

    /// The first table's address, if it is a displacement.
    pub fn first_table(&self) -> Option<i32> {
        i32::try_from(self.first as u64).ok()
    }

    /// The second table's address.
    pub fn second_table(&self) -> u64 {
        self.second as u64
    }

    /// The addresses of both tables.
    pub fn memory(&self) -> [Range<u64>; 2] {
        let range = |start: *mut u64, bytes: usize| start as u64..start as u64 + bytes as u64;
        [range(self.first, FIRST_BYTES), range(self.second, SECOND_BYTES)]
    }

    fn first_word(&self, i: usize) -> &AtomicU64 {
        assert!(i < SLOTS);
        // SAFETY: within the mapping, aligned, and only used atomically.
        unsafe { AtomicU64::from_ptr(self.first.add(i)) }
    }

    /// The complemented pc and the entry in a slot of the second table.
    fn second_words(&self, slot: usize) -> [&AtomicU64; 2] {
        assert!(slot < SLOTS + PROBES);
        // SAFETY: within the mapping, aligned, and only used atomically.
        [slot, slot + ENTRIES / 8].map(|i| unsafe { AtomicU64::from_ptr(self.second.add(i)) })
    }

    /// Lets jumps to `pc` arrive at the checked entry `entry`. In the first table it takes the place of what shares its
    /// word; in the second, only if there is none free.
    pub fn insert(&mut self, pc: u64, entry: u64) {
        // Its complement is what an empty slot holds. There is no code there.
        if pc == u64::MAX {
            return;
        }
        self.first_word(usize::from(pc as u16)).store(entry, Ordering::Release);
        self.owners.insert(pc as u16, pc);
        let slot = self.places.get(&pc).map_or_else(|| self.free_slot(pc), |slot| *slot as usize);
        self.places.insert(pc, slot as u32);
        let [key, value] = self.second_words(slot);
        let evicted = !key.swap(0, Ordering::AcqRel);
        value.store(entry, Ordering::Release);
        key.store(!pc, Ordering::Release);
        if evicted != pc && evicted != !0 {
            self.places.remove(&evicted);
        }
    }

    /// Where in the second table `pc` should go.
    fn free_slot(&self, pc: u64) -> usize {
        let mut candidates = hash(pc)..hash(pc) + PROBES;
        let any = candidates.start + (pc >> 4) as usize % PROBES;
        candidates.find(|s| self.second_words(*s)[0].load(Ordering::Relaxed) == 0).unwrap_or(any)
    }

    /// Forgets `pc`.
    pub fn remove(&mut self, pc: u64) {
        if self.owners.get(&(pc as u16)) == Some(&pc) {
            self.owners.remove(&(pc as u16));
            self.first_word(usize::from(pc as u16)).store(self.miss, Ordering::Release);
        }
        if let Some(slot) = self.places.remove(&pc) {
            self.empty(slot);
        }
    }

    /// A slot without a pc has no entry either: its key is that of the pc that is all ones.
    fn empty(&self, slot: u32) {
        self.second_words(slot as usize).iter().for_each(|w| w.store(0, Ordering::Release));
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        for (word, _) in std::mem::take(&mut self.owners) {
            self.first_word(usize::from(word)).store(self.miss, Ordering::Release);
        }
        for (_, slot) in std::mem::take(&mut self.places) {
            self.empty(slot);
        }
    }
}

/// Zeroed memory, over `place`, which is ours, or where the kernel likes.
fn map(place: Option<u64>, bytes: usize) -> io::Result<*mut u64> {
    let fixed = if place.is_some() { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    let at = place.unwrap_or(0) as *mut libc::c_void;
    // SAFETY: a fresh mapping, which replaces nothing but what the caller reserved.
    let p = unsafe { libc::mmap(at, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if p == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(p.cast()) }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        // SAFETY: ours; generated code that knows the addresses is gone with the cache.
        unsafe {
            libc::munmap(self.first.cast(), FIRST_BYTES);
            libc::munmap(self.second.cast(), SECOND_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MISS: u64 = 99;

    fn table() -> Lookup {
        Lookup::new(&(0x2000_0000..0x2000_0000), MISS).unwrap()
    }

    fn first(t: &Lookup, pc: u64) -> u64 {
        t.first_word(usize::from(pc as u16)).load(Ordering::Relaxed)
    }

    /// As the miss stub searches.
    fn second(t: &Lookup, pc: u64) -> Option<u64> {
        let mut slots = (hash(pc)..hash(pc) + PROBES).map(|s| t.second_words(s));
        slots.find(|[key, _]| key.load(Ordering::Relaxed) == !pc).map(|[_, value]| value.load(Ordering::Relaxed))
    }

    #[test]
    fn the_last_one_has_the_word_and_all_are_found() {
        let mut t = table();
        let pcs: Vec<u64> = (0..PROBES as u64).map(|i| 0x40_1234 + (i << 16)).chain([0, 1 << 63]).collect();
        for (i, pc) in pcs.iter().enumerate() {
            t.insert(*pc, i as u64 + 1);
            assert_eq!((first(&t, *pc), second(&t, *pc)), (i as u64 + 1, Some(i as u64 + 1)));
        }
        for (i, pc) in pcs.iter().enumerate() {
            assert_eq!(second(&t, *pc), Some(i as u64 + 1), "{pc:#x}");
        }
        // Not the owner of the word.
        t.remove(0x40_1234);
        assert_eq!((first(&t, 0x40_1234), second(&t, 0x40_1234)), (PROBES as u64, None));
        t.insert(0x41_1234, 77);
        assert_eq!((first(&t, 0x41_1234), second(&t, 0x41_1234)), (77, Some(77)));
        t.remove(0x41_1234);
        assert_eq!((first(&t, 0x41_1234), second(&t, 0x41_1234)), (MISS, None));
        t.clear();
        for pc in pcs {
            assert_eq!((first(&t, pc), second(&t, pc)), (MISS, None));
        }
        t.insert(u64::MAX, 5);
        assert_eq!((first(&t, u64::MAX), second(&t, u64::MAX)), (MISS, Some(0)));
    }

    #[test]
    fn a_full_neighbourhood_evicts() {
        let mut t = table();
        // The same low bits, and high bits that weigh nothing: the same hash.
        let pcs: Vec<u64> = (0..20).map(|i| 0x7000_1000 + (i << 32)).collect();
        for pc in &pcs {
            t.insert(*pc, *pc + 1);
            assert_eq!(second(&t, *pc), Some(*pc + 1));
        }
        let found = pcs.iter().filter(|pc| second(&t, **pc) == Some(**pc + 1)).count();
        assert_eq!((found, t.places.len()), (PROBES, PROBES));
        t.clear();
        assert!(pcs.iter().all(|pc| second(&t, *pc).is_none()));
    }
}
