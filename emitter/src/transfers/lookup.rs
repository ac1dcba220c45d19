//! The tables that indirect jumps consult: guest pc -> checked entry (see
//! [`crate::transfers::indirect`]).
//!
//! * **first**, one for each [`Via`]: 65,536 words, indexed by the pc's low 16 bits. Each holds the
//!   address of a checked entry, or of a stub. A site jumps through the table without a comparison.
//!   It lies in the low 2 GiB, so that its address is a displacement. Behind the first table of
//!   [`Via::Memory`] lies another one, all of whose words lead out: sites that are to leave jump
//!   through it. Each table is filled at its first use, because filling takes as long as
//!   translating a hundred blocks.
//! * **second**: a hash table for pcs whose word in the first table of [`Via::Memory`] was taken by
//!   another pc. Two arrays, of complemented pcs and of checked entries; a pc stands in one of
//!   [`PROBES`] neighbouring slots. The miss stub searches it.
//!
//! Data: [`Lookup`]. Writers hold the emitter; generated code on any thread reads. Invariant: every
//! word is written by one aligned store. A reader may still see a pc and an entry that do not
//! belong together, because it read between two stores. The checked entry finds that out, so such a
//! read is no more than a miss.
//!
//! Example: 0x401234 is inserted, then 0x411234, which has the same low bits. The word in the first
//! table now leads to the entry of 0x411234, and 0x401234 stands in the second table.

use crate::transfers::indirect::Via;
use dynasour_guest::space::{Layout, Reservation};
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

/// Bytes of a first table.
const TABLE_BYTES: usize = 8 * SLOTS;
/// Bytes of all first tables and the table that leads out.
const FIRST_BYTES: usize = TABLE_BYTES * (Via::COUNT + 1);
const SECOND_BYTES: usize = 2 * ENTRIES;
/// Addresses of the first table end at or below this one.
const LAST: u64 = 0x7fff_0000;
/// Distance of the addresses tried for it.
const STEP: usize = 16 << 20;

/// All tables.
pub(crate) struct Lookup {
    /// The first tables. Number [`LEADS_OUT`] is the table that leads out.
    memory: *mut u64,
    firsts: [First; Via::COUNT],
    /// Is the table that leads out filled?
    leads_out: AtomicBool,
    second: *mut u64,
    /// The slot of each pc in the second table.
    places: FxHashMap<u64, u32>,
}

/// Bookkeeping of a first table.
#[derive(Default)]
struct First {
    /// The value of words that belong to no pc; 0 before the table is filled.
    free: u64,
    /// The pcs to which the other words belong, by their low 16 bits.
    owners: FxHashMap<u16, u64>,
}

/// A table's number among the first ones.
fn number(via: Via) -> usize {
    match via {
        Via::Memory => 0,
        Via::Register(_) => 1 + via.index(),
    }
}

/// The number of the table that leads out.
const LEADS_OUT: usize = 1;

// SAFETY: the memory is only accessed through atomics, and by generated code with aligned loads.
unsafe impl Send for Lookup {}
// SAFETY: as above.
unsafe impl Sync for Lookup {}

/// The slot of the second table where the search for `pc` begins: the same in the miss stub.
pub(crate) fn hash(pc: u64) -> usize {
    let (low, high) = (pc as u16, (pc >> 16) as u16);
    usize::from(low.wrapping_add(high.wrapping_mul(HIGH_WEIGHT)))
}

/// The factor of bits 16 to 31 of a pc in [`hash`]: 9 * 8, which two `lea` compute (see `search` in
/// [`crate::transfers::miss_stubs`]).
pub(crate) const HIGH_WEIGHT: u16 = 72;

impl Lookup {
    /// Empty tables. The first tables lie right behind `cache` if there is room, else anywhere in
    /// the low 2 GiB. If there is no room there either, they lie elsewhere and no site uses them.
    pub fn new(cache: &Range<u64>) -> io::Result<Lookup> {
        let low = (Layout::current().cache(0)..LAST - FIRST_BYTES as u64).step_by(STEP);
        let mut places =
            std::iter::once(cache.end).chain(low).filter(|p| p + FIRST_BYTES as u64 <= LAST);
        let place = places.find_map(|p| Reservation::at(p, FIRST_BYTES as u64).ok());
        let place = place.map(|reservation| {
            let start = reservation.start();
            reservation.commit();
            start
        });
        let memory = map(place, FIRST_BYTES)?;
        let second = map(None, SECOND_BYTES)?;
        let leads_out = AtomicBool::new(false);
        Ok(Lookup {
            memory,
            firsts: Default::default(),
            leads_out,
            second,
            places: FxHashMap::default(),
        })
    }

    /// Fills a first table with `free`, if that has not been done.
    pub fn prepare(&mut self, via: Via, free: u64) {
        if self.firsts[via.index()].free == 0 {
            self.firsts[via.index()].free = free;
            self.fill(number(via), free);
        }
    }

    /// Fills the table that leads out with `out`, if that has not been done. Async-signal-safe.
    pub fn prepare_out(&self, out: u64) {
        if !self.leads_out.swap(true, Ordering::AcqRel) {
            self.fill(LEADS_OUT, out);
        }
    }

    fn fill(&self, number: usize, value: u64) {
        // SAFETY: the table's own memory. It is faster than a fault for each page; older kernels do
        // not know it.
        unsafe {
            libc::madvise(
                self.memory.add(SLOTS * number).cast(),
                TABLE_BYTES,
                libc::MADV_POPULATE_WRITE,
            );
        }
        (0..SLOTS).for_each(|n| self.table_word(number, n).store(value, Ordering::Relaxed));
    }

    /// The address of a first table, if it fits into a 32-bit displacement.
    pub fn first_table(&self, via: Via) -> Option<u32> {
        displacement(self.memory as u64 + (TABLE_BYTES * number(via)) as u64)
    }

    /// The address of the table that leads out, if it fits into a 32-bit displacement.
    pub fn out_table(&self) -> Option<u32> {
        displacement(self.memory as u64 + (TABLE_BYTES * LEADS_OUT) as u64)
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

    fn table_word(&self, number: usize, i: usize) -> &AtomicU64 {
        assert!(number <= Via::COUNT && i < SLOTS);
        // SAFETY: within the mapping, aligned, and only used atomically.
        unsafe { AtomicU64::from_ptr(self.memory.add(SLOTS * number + i)) }
    }

    fn first_word(&self, via: Via, pc: u64) -> &AtomicU64 {
        self.table_word(number(via), usize::from(pc as u16))
    }

    /// The complemented pc and the entry in a slot of the second table.
    fn second_words(&self, slot: usize) -> [&AtomicU64; 2] {
        assert!(slot < SLOTS + PROBES);
        // SAFETY: within the mapping, aligned, and only used atomically.
        [slot, slot + ENTRIES / 8].map(|i| unsafe { AtomicU64::from_ptr(self.second.add(i)) })
    }

    /// Lets jumps to `pc` arrive at the checked entry `entry`. The carrier's first table must have
    /// been filled. The pc takes over its word there from any pc that shares it; if the carrier is
    /// [`Via::Memory`], the evicted pc goes to the second table.
    pub fn insert(&mut self, via: Via, pc: u64, entry: u64) {
        // The complement of this pc is the key of an empty slot. There is no guest code there.
        if pc == u64::MAX {
            return;
        }
        let owner = self.firsts[via.index()].owners.insert(pc as u16, pc);
        let word = self.first_word(via, pc);
        if via != Via::Memory {
            return word.store(entry, Ordering::Release);
        }
        let before = word.load(Ordering::Relaxed);
        if let Some(evicted) = owner.filter(|owner| *owner != pc) {
            self.put_second(evicted, before);
        }
        if self.first_table(via).is_none() || self.places.contains_key(&pc) {
            self.put_second(pc, entry);
        }
        self.first_word(via, pc).store(entry, Ordering::Release);
    }

    /// Puts a pc into the second table. It evicts another pc only if none of its slots is free.
    fn put_second(&mut self, pc: u64, entry: u64) {
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

    /// The slot of the second table that `pc` should take.
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
                self.first_word(via, pc).store(free, Ordering::Release);
            }
        }
        if let Some(slot) = self.places.remove(&pc) {
            self.empty(slot);
        }
    }

    /// Empties a slot. Its key 0 is the complement of the pc that is all ones, which is never
    /// looked up; its entry 0 means a miss.
    fn empty(&self, slot: u32) {
        self.second_words(slot as usize).iter().for_each(|w| w.store(0, Ordering::Release));
    }

    /// All entries of the tables: carrier, pc and checked entry.
    pub fn entries(&self) -> impl Iterator<Item = (Via, u64, u64)> + '_ {
        let firsts = (0..Via::COUNT).filter_map(Via::from_index).flat_map(move |via| {
            let owners = self.firsts[via.index()].owners.values();
            owners.map(move |pc| (via, *pc, self.first_word(via, *pc).load(Ordering::Relaxed)))
        });
        let second = self.places.iter().map(|(pc, slot)| {
            let [_, entry] = self.second_words(*slot as usize);
            (Via::Memory, *pc, entry.load(Ordering::Relaxed))
        });
        firsts.chain(second)
    }

    /// The value of a word that breaks the bookkeeping, if there is one: the word belongs to no pc
    /// and does not hold the free value, or its key is not the pc to which it belongs.
    pub fn unowned(&self) -> Option<u64> {
        let filled = (0..Via::COUNT)
            .filter_map(Via::from_index)
            .filter(|via| self.firsts[via.index()].free != 0);
        let mut first = filled.flat_map(|via| {
            let First { free, owners } = &self.firsts[via.index()];
            let words = (0..SLOTS).filter(|n| !owners.contains_key(&(*n as u16)));
            words
                .map(move |n| self.table_word(number(via), n).load(Ordering::Relaxed))
                .filter(move |word| word != free)
        });
        let mut second = (0..SLOTS + PROBES).filter_map(|slot| {
            let [key, entry] = self.second_words(slot).map(|word| word.load(Ordering::Relaxed));
            let owned = self.places.get(&!key) == Some(&(slot as u32));
            (!owned && (key != 0 || entry != 0)).then_some(entry)
        });
        first.next().or_else(|| second.next())
    }

    /// In a forked child: as [`Lookup::clear`], and the memory of the registers' tables is given
    /// back until they are filled again.
    pub fn clear_after_fork(&mut self) {
        self.clear();
        for via in (0..Via::COUNT).filter_map(Via::from_index).filter(|via| *via != Via::Memory) {
            if std::mem::take(&mut self.firsts[via.index()].free) != 0 {
                // SAFETY: the table's own memory, which is filled again before it is used.
                unsafe {
                    libc::madvise(
                        self.memory.add(SLOTS * number(via)).cast(),
                        TABLE_BYTES,
                        libc::MADV_DONTNEED,
                    );
                }
            }
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        for via in (0..Via::COUNT).filter_map(Via::from_index) {
            let First { free, owners, .. } = &mut self.firsts[via.index()];
            let (free, owners) = (*free, std::mem::take(owners));
            for (_, pc) in owners {
                self.first_word(via, pc).store(free, Ordering::Release);
            }
        }
        for (_, slot) in std::mem::take(&mut self.places) {
            self.empty(slot);
        }
    }
}

/// The address `start` of a first table as a displacement, if the whole table lies in the low 2
/// GiB.
fn displacement(start: u64) -> Option<u32> {
    i32::try_from(start + TABLE_BYTES as u64).ok()?;
    Some(start as u32)
}

/// Zeroed memory, over `place`, which the caller has reserved, or at an address that the kernel
/// chooses.
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
        // SAFETY: this type mapped them; code that knows the addresses was dropped with the cache.
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
        assert_eq!(displacement(0x2000_0000), Some(0x2000_0000));
        // The low 32 bits of the end would overflow.
        assert_eq!(displacement(high(0xffff_f000)), None);
        assert_eq!(displacement(high(0x2000_0000)), None);
        assert_eq!(displacement(0x7ff8_0000), None);
        assert_eq!(displacement(0x7ff7_f000), Some(0x7ff7_f000));
    }

    fn first(t: &Lookup, pc: u64) -> u64 {
        t.first_word(Via::Memory, pc).load(Ordering::Relaxed)
    }

    /// Searches as the miss stub does.
    fn second(t: &Lookup, pc: u64) -> Option<u64> {
        let mut slots = (hash(pc)..hash(pc) + PROBES).map(|s| t.second_words(s));
        slots
            .find(|[key, _]| key.load(Ordering::Relaxed) == !pc)
            .map(|[_, value]| value.load(Ordering::Relaxed))
    }

    #[test]
    fn the_last_one_has_the_word_and_all_are_found() {
        let mut t = table();
        let pcs: Vec<u64> =
            (0..PROBES as u64 + 1).map(|i| 0x40_1234 + (i << 16)).chain([0, 1 << 63]).collect();
        let found = |t: &Lookup, pc: u64| {
            if t.firsts[0].owners.get(&(pc as u16)) == Some(&pc) {
                Some(first(t, pc))
            } else {
                second(t, pc)
            }
        };
        for (i, pc) in pcs.iter().enumerate() {
            t.insert(Via::Memory, *pc, i as u64 + 1);
            // Only a pc that has lost its word is in the second table.
            assert_eq!((first(&t, *pc), second(&t, *pc)), (i as u64 + 1, None));
        }
        for (i, pc) in pcs.iter().enumerate() {
            assert_eq!(found(&t, *pc), Some(i as u64 + 1), "{pc:#x}");
        }
        // This pc does not own the word.
        t.remove(0x40_1234);
        assert_eq!((first(&t, 0x40_1234), second(&t, 0x40_1234)), (PROBES as u64 + 1, None));
        // This pc stands in both tables then, and is removed from both.
        t.insert(Via::Memory, 0x41_1234, 77);
        assert_eq!((first(&t, 0x41_1234), second(&t, 0x41_1234)), (77, Some(77)));
        assert_eq!(second(&t, pcs[PROBES]), Some(PROBES as u64 + 1));
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
    fn words_that_belong_to_no_pc_are_found() {
        let mut t = table();
        t.insert(Via::Memory, 0x40_1234, 5);
        t.insert(Via::Memory, 0x41_1234, 6);
        assert_eq!(t.unowned(), None);
        let mut entries: Vec<_> = t.entries().collect();
        entries.sort_unstable_by_key(|(_, pc, _)| *pc);
        assert_eq!(entries, [(Via::Memory, 0x40_1234, 5), (Via::Memory, 0x41_1234, 6)]);
        t.table_word(0, 77).store(7, Ordering::Relaxed);
        assert_eq!(t.unowned(), Some(7));
        t.table_word(0, 77).store(MISS, Ordering::Relaxed);
        t.places.clear();
        assert_eq!(t.unowned(), Some(5));
    }

    #[test]
    fn tables_of_carriers_are_told_apart() {
        let mut t = table();
        let via = Via::Register(3);
        let word = |t: &Lookup| t.first_word(via, 0x40_1234).load(Ordering::Relaxed);
        t.prepare(via, 7);
        t.prepare_out(8);
        t.insert(via, 0x40_1234, 1);
        assert_eq!((first(&t, 0x40_1234), second(&t, 0x40_1234), word(&t)), (MISS, None, 1));
        assert_eq!(t.table_word(LEADS_OUT, 0x1234).load(Ordering::Relaxed), 8);
        t.prepare(via, 9);
        assert_eq!(word(&t), 1);
        t.remove(0x40_1234);
        assert_eq!(word(&t), 7);
        t.insert(via, 0x40_1234, 1);
        t.clear_after_fork();
        assert_eq!(first(&t, 0x40_1234), MISS);
        t.prepare(via, 9);
        assert_eq!(word(&t), 9);
        let tables: Vec<u32> =
            (0..Via::COUNT).filter_map(|n| t.first_table(Via::from_index(n)?)).collect();
        let out = t.out_table().unwrap();
        assert!(
            tables.iter().chain([&out]).all(|a| tables
                .iter()
                .filter(|b| a.abs_diff(**b) < TABLE_BYTES as u32)
                .count()
                <= 1)
        );
        assert!(!tables.contains(&out));
    }

    #[test]
    fn a_full_neighbourhood_evicts() {
        let mut t = table();
        // The same low bits, and high bits that weigh nothing: the same hash.
        let pcs: Vec<u64> = (0..20).map(|i| 0x7000_1000 + (i << 32)).collect();
        for pc in &pcs {
            t.insert(Via::Memory, *pc, *pc + 1);
            assert_eq!(first(&t, *pc), *pc + 1);
        }
        let found = pcs.iter().filter(|pc| second(&t, **pc) == Some(**pc + 1)).count();
        assert_eq!((found, t.places.len()), (PROBES, PROBES));
        t.clear();
        assert!(pcs.iter().all(|pc| second(&t, *pc).is_none()));
    }
}
