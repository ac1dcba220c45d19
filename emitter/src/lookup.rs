//! The tables that indirect jumps consult: guest pc -> checked entry (see [`crate::indirect`]).
//!
//! * **first**, one for each [`Via`]: 65,536 words, indexed by the pc's low 16 bits, each the address of a checked entry, or of
//!   a stub. A site jumps through it unseen. It lies in the low 2 GiB, so that its address is a displacement. Behind it lies
//!   another one, all of whose words lead out: sites that are to leave jump through that. Each is filled when it is needed
//!   first.
//! * **second**: a hash table for pcs that share their word with another. Two arrays, of complemented pcs and of checked
//!   entries; a pc stands in one of [`PROBES`] neighbouring slots. The miss stub searches it.
//!
//! Writers hold the emitter; readers are generated code on any thread. Every word is written in one aligned store, and
//! what a reader finds it never trusts: a checked entry verifies that it is meant, so that a pc and an entry that do not
//! belong together, read while somebody wrote, are no more than a miss.

use crate::indirect::Via;
use dynasour_guest::space::{CACHE, Reservation};
use rustc_hash::FxHashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Words of the first table.
pub(crate) const SLOTS: usize = 1 << 16;
/// Slots of the second table that one pc may stand in.
pub(crate) const PROBES: usize = 4;
/// Bytes from a slot's pc to its entry in the second table.
pub(crate) const ENTRIES: usize = 8 * (SLOTS + PROBES);

/// Bytes of a first table, without the one that leads out.
const TABLE_BYTES: usize = 8 * SLOTS;
/// Bytes of all first tables.
const FIRST_BYTES: usize = 2 * TABLE_BYTES * Via::COUNT;
const SECOND_BYTES: usize = 2 * ENTRIES;
/// Addresses of the first table end at or below this one.
const LAST: u64 = 0x7fff_0000;
/// Distance of the addresses tried for it.
const STEP: usize = 16 << 20;

/// All tables.
pub(crate) struct Lookup {
    /// The first tables, each with the one that leads out behind it.
    memory: *mut u64,
    firsts: [First; Via::COUNT],
    second: *mut u64,
    /// In which slot of the second table a pc is.
    places: FxHashMap<u64, u32>,
}

/// What is known of a first table.
#[derive(Default)]
struct First {
    /// What a word holds that belongs to nobody; 0 before the table is filled.
    free: u64,
    /// Is the one that leads out filled?
    leads_out: AtomicBool,
    /// Whose the other words are.
    owners: FxHashMap<u16, u64>,
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
    /// Empty tables, the first ones near `cache`, or else wherever they can be reached by a displacement, or else anywhere.
    pub fn new(cache: &Range<u64>) -> io::Result<Lookup> {
        let low = (CACHE.start..LAST - FIRST_BYTES as u64).step_by(STEP);
        let mut places = std::iter::once(cache.end).chain(low).filter(|p| p + FIRST_BYTES as u64 <= LAST);
        let place = places.find_map(|p| Reservation::at(p, FIRST_BYTES as u64).ok());
        let place = place.map(|reservation| {
            let start = reservation.start();
            reservation.commit();
            start
        });
        let memory = map(place, FIRST_BYTES)?;
        let second = map(None, SECOND_BYTES)?;
        Ok(Lookup { memory, firsts: Default::default(), second, places: FxHashMap::default() })
    }

    /// Fills a first table with `free`, if that has not been done.
    pub fn prepare(&mut self, via: Via, free: u64) {
        if self.firsts[via.index()].free == 0 {
            self.firsts[via.index()].free = free;
            self.fill(via, 0, free);
        }
    }

    /// Fills the table that leads out with `out`, if that has not been done. Async-signal-safe.
    pub fn prepare_out(&self, via: Via, out: u64) {
        if !self.firsts[via.index()].leads_out.swap(true, Ordering::AcqRel) {
            self.fill(via, SLOTS, out);
        }
    }

    fn fill(&self, via: Via, from: usize, value: u64) {
        // SAFETY: the table's own memory. It is faster than a fault for each page; older kernels do not know it.
        unsafe {
            let table = self.memory.add(2 * SLOTS * via.index() + from);
            libc::madvise(table.cast(), TABLE_BYTES, libc::MADV_POPULATE_WRITE);
        }
        (from..from + SLOTS).for_each(|n| self.first_word(via, n).store(value, Ordering::Relaxed));
    }

    /// The addresses of a first table and of the one that leads out, if they are displacements.
    pub fn first_tables(&self, via: Via) -> Option<[u32; 2]> {
        displacements(self.memory as u64 + (2 * TABLE_BYTES * via.index()) as u64)
    }

    /// The second table's address.
    pub fn second_table(&self) -> u64 {
        self.second as u64
    }

    /// The addresses of all tables.
    pub fn memory(&self) -> [Range<u64>; 2] {
        let range = |start: *mut u64, bytes: usize| start as u64..start as u64 + bytes as u64;
        [range(self.memory, FIRST_BYTES), range(self.second, SECOND_BYTES)]
    }

    /// Words from [`SLOTS`] on are those of the table that leads out.
    fn first_word(&self, via: Via, i: usize) -> &AtomicU64 {
        assert!(i < 2 * SLOTS);
        // SAFETY: within the mapping, aligned, and only used atomically.
        unsafe { AtomicU64::from_ptr(self.memory.add(2 * SLOTS * via.index() + i)) }
    }

    /// The complemented pc and the entry in a slot of the second table.
    fn second_words(&self, slot: usize) -> [&AtomicU64; 2] {
        assert!(slot < SLOTS + PROBES);
        // SAFETY: within the mapping, aligned, and only used atomically.
        [slot, slot + ENTRIES / 8].map(|i| unsafe { AtomicU64::from_ptr(self.second.add(i)) })
    }

    /// Lets jumps to `pc` arrive at the checked entry `entry`. In the first table, which must have been made, it takes the place
    /// of what shares its word; in the second, which only the [`Via::Memory`] kind uses, only if there is none free.
    pub fn insert(&mut self, via: Via, pc: u64, entry: u64) {
        // Its complement is what an empty slot holds. There is no code there.
        if pc == u64::MAX {
            return;
        }
        self.first_word(via, usize::from(pc as u16)).store(entry, Ordering::Release);
        self.firsts[via.index()].owners.insert(pc as u16, pc);
        if via != Via::Memory {
            return;
        }
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
        for via in (0..Via::COUNT).filter_map(Via::from_index) {
            let first = &mut self.firsts[via.index()];
            if first.owners.get(&(pc as u16)) == Some(&pc) {
                first.owners.remove(&(pc as u16));
                let free = first.free;
                self.first_word(via, usize::from(pc as u16)).store(free, Ordering::Release);
            }
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
        for via in (0..Via::COUNT).filter_map(Via::from_index) {
            let First { free, owners, .. } = &mut self.firsts[via.index()];
            let (free, owners) = (*free, std::mem::take(owners));
            for (word, _) in owners {
                self.first_word(via, usize::from(word)).store(free, Ordering::Release);
            }
        }
        for (_, slot) in std::mem::take(&mut self.places) {
            self.empty(slot);
        }
    }
}

/// `start`, where a first table lies, and the end of that table, if the one behind it can be reached by a displacement, too.
fn displacements(start: u64) -> Option<[u32; 2]> {
    let end = i32::try_from(start + 2 * TABLE_BYTES as u64).ok()?;
    Some([start as u32, (end - TABLE_BYTES as i32) as u32])
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
            libc::munmap(self.memory.cast(), FIRST_BYTES);
            libc::munmap(self.second.cast(), SECOND_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MISS: u64 = 99;

    fn table() -> Lookup {
        let mut table = Lookup::new(&(0x2000_0000..0x2000_0000)).unwrap();
        table.prepare(Via::Memory, MISS);
        table
    }

    #[test]
    fn only_tables_in_the_low_half_are_displacements() {
        let high = |low: u64| 0x7f12_0000_0000 + low;
        assert_eq!(displacements(0x2000_0000), Some([0x2000_0000, 0x2008_0000]));
        // Where the sum of 32 bits would not be one any more.
        assert_eq!(displacements(high(0xffff_f000)), None);
        assert_eq!(displacements(high(0x2000_0000)), None);
        assert_eq!(displacements(0x7ff0_0000), None);
        assert_eq!(displacements(0x7fef_f000), Some([0x7fef_f000, 0x7ff7_f000]));
    }

    fn first(t: &Lookup, pc: u64) -> u64 {
        t.first_word(Via::Memory, usize::from(pc as u16)).load(Ordering::Relaxed)
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
            t.insert(Via::Memory, *pc, i as u64 + 1);
            assert_eq!((first(&t, *pc), second(&t, *pc)), (i as u64 + 1, Some(i as u64 + 1)));
        }
        for (i, pc) in pcs.iter().enumerate() {
            assert_eq!(second(&t, *pc), Some(i as u64 + 1), "{pc:#x}");
        }
        // Not the owner of the word.
        t.remove(0x40_1234);
        assert_eq!((first(&t, 0x40_1234), second(&t, 0x40_1234)), (PROBES as u64, None));
        t.insert(Via::Memory, 0x41_1234, 77);
        assert_eq!((first(&t, 0x41_1234), second(&t, 0x41_1234)), (77, Some(77)));
        t.remove(0x41_1234);
        assert_eq!((first(&t, 0x41_1234), second(&t, 0x41_1234)), (MISS, None));
        t.clear();
        for pc in pcs {
            assert_eq!((first(&t, pc), second(&t, pc)), (MISS, None));
        }
        t.insert(Via::Memory, u64::MAX, 5);
        assert_eq!((first(&t, u64::MAX), second(&t, u64::MAX)), (MISS, Some(0)));
    }

    #[test]
    fn tables_of_carriers_are_told_apart() {
        let mut t = table();
        let via = Via::Register(3);
        t.prepare(via, 7);
        t.prepare_out(via, 8);
        t.insert(via, 0x40_1234, 1);
        assert_eq!((first(&t, 0x40_1234), second(&t, 0x40_1234)), (MISS, None));
        assert_eq!(t.first_word(via, 0x1234).load(Ordering::Relaxed), 1);
        assert_eq!(t.first_word(via, SLOTS + 0x1234).load(Ordering::Relaxed), 8);
        t.prepare(via, 9);
        assert_eq!(t.first_word(via, 0x1234).load(Ordering::Relaxed), 1);
        t.remove(0x40_1234);
        assert_eq!(t.first_word(via, 0x1234).load(Ordering::Relaxed), 7);
        let [one, out] = t.first_tables(via).unwrap();
        assert_eq!(u64::from(out), u64::from(one) + TABLE_BYTES as u64);
    }

    #[test]
    fn a_full_neighbourhood_evicts() {
        let mut t = table();
        // The same low bits, and high bits that weigh nothing: the same hash.
        let pcs: Vec<u64> = (0..20).map(|i| 0x7000_1000 + (i << 32)).collect();
        for pc in &pcs {
            t.insert(Via::Memory, *pc, *pc + 1);
            assert_eq!(second(&t, *pc), Some(*pc + 1));
        }
        let found = pcs.iter().filter(|pc| second(&t, **pc) == Some(**pc + 1)).count();
        assert_eq!((found, t.places.len()), (PROBES, PROBES));
        t.clear();
        assert!(pcs.iter().all(|pc| second(&t, *pc).is_none()));
    }
}
