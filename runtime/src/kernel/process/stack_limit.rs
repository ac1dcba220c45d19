//! `RLIMIT_STACK` of the first thread's stack, when the guest changes it.
//!
//! The kernel's own stack grows when it is used, up to the limit that holds then. The guest's is mapped as
//! large as its limit ([`StackPlace`]), so it is made larger or smaller when the limit changes. What the guest
//! has used already stays, as it would with the kernel's.
//!
//! A limit that another process sets is not noticed.
//!
//! Called for system calls, on the guest's own thread, with no lock. The lock of `Process::memory` is held
//! meanwhile, as in a call of `brk`.
//!
//! Example: the stack is 0x7f0000800000..0x7f0001000000 (8 MiB). The guest sets 16 MiB: the stack begins at
//! 0x7f0000000000. It uses 3 MiB and sets 1 MiB: the stack begins at 0x7f0000d00000.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use dynasour_guest::image::StackPlace;
use dynasour_guest::space::{self, MapEntry, Mapping, PAGE, page_down};
use nix::sys::mman::ProtFlags;

use super::System;
use super::system::Engine;
use crate::changes::News;

/// Entries of `/proc/self/pagemap` that are read at once.
const ENTRIES: usize = 512;

impl System {
    /// The soft limit of this process's stack may have changed: makes the first thread's stack so large.
    pub(crate) fn fit_stack(&mut self, engine: &mut dyn Engine) {
        if self.process.shares_memory() {
            // Another process's limit holds for the stack.
            return;
        }
        // The lock is held while `quiesce` waits for other threads. They need no lock of this rank
        // to leave guest code, so the wait ends.
        let mut memory = self.process.memory();
        let mut place = memory.stack().clone();
        let Some((start, prot)) = new_start(&place) else { return };
        let before = place.range.start;
        let (changed, grows) = (start.min(before)..start.max(before), start < before);
        let change = self.process.pages().announce([changed.clone()]).quiesce(engine);
        // SAFETY: the pages that the stack loses had not been used when the limit sank; an access since then
        // would have been a fault with the kernel's stack.
        let (performed, resized) = change.perform(|| unsafe { place.resize(start, prot) });
        match resized {
            Err(_) => performed.publish(engine, [News::Unknown(changed)]),
            Ok(()) if grows => {
                memory.set_stack(place);
                memory.unprotect(&changed);
                let mapping = Some(Mapping::anonymous(prot));
                performed.publish(engine, [News::Mapped(changed, mapping)]);
            }
            Ok(()) => {
                memory.set_stack(place);
                memory.protect(changed.clone());
                performed.publish(engine, [News::Unmapped(changed)]);
            }
        }
    }
}

/// Where the stack is to begin now, and its protection; none if where it does.
fn new_start(place: &StackPlace) -> Option<(u64, ProtFlags)> {
    let range = &place.range;
    let start = place.start_for(space::soft_limit(libc::RLIMIT_STACK));
    let maps = space::maps().ok()?;
    // The guest may have mapped something else there.
    let is_lowest = |entry: &MapEntry| entry.range.contains(&range.start) && entry.inode == 0;
    let lowest = maps.into_iter().find(is_lowest)?;
    let start = start.min(lowest.range.end);
    // A page may be guarded against stores.
    let prot = lowest.prot | ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let start = match start > range.start {
        true => first_used(range.start..start)?,
        false => start,
    };
    (start != range.start).then_some((start, prot))
}

/// The first page of this range that was ever used, or its end; none if that is not known.
fn first_used(range: Range<u64>) -> Option<u64> {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    let pagemap = File::open("/proc/self/pagemap").ok()?;
    let mut at = page_down(range.start);
    while at < range.end {
        let mut entries = [0; 8 * ENTRIES];
        let wanted = ENTRIES.min(((range.end - at) / PAGE) as usize);
        pagemap.read_exact_at(&mut entries[..8 * wanted], at / PAGE * 8).ok()?;
        for entry in entries[..8 * wanted].as_chunks().0 {
            if u64::from_le_bytes(*entry) & (PRESENT | SWAPPED) != 0 {
                return Some(at);
            }
            at += PAGE;
        }
    }
    Some(range.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::space::Reservation;
    use nix::sys::mman::MapFlags;

    #[test]
    fn the_first_page_that_was_used_is_found() {
        let mut pages = Reservation::anywhere(1024 * PAGE, PAGE).expect("address space");
        let (start, end) = (pages.start(), pages.end());
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        pages.map_zeroed(start..end, prot, MapFlags::empty()).expect("memory");
        assert_eq!(first_used(start..end), Some(end));
        pages.write(start + 700 * PAGE + 5, b"x").expect("memory");
        assert_eq!(first_used(start..end), Some(start + 700 * PAGE));
        assert_eq!(first_used(start..start + 700 * PAGE), Some(start + 700 * PAGE));
    }
}
