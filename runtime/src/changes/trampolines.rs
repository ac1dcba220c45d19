//! Jumps between patches and what they lead to, for patches over several instructions: the bytes of
//! such a jump at the inner boundaries are fixed, so that only some addresses can be reached
//! ([`super::patches::displacements`]; the technique is called instruction punning).
//!
//! ```text
//!  0   jmp  TARGET
//!  8   SITE          the address of the patch
//! ```
//!
//! A trampoline changes nothing, so a thread that is interrupted there is at SITE.
//!
//! Data: [`PAGES`], the pages with trampolines, in the low 2 GiB; [`USED`], their addresses, behind
//! a lock of its own that is held only in this file (number 10 in the order of `crate::sync`). A
//! trampoline is never used again for another site. The caller tells the guest's address space of
//! new pages.
//!
//! Example: `dec ecx; jne` at 0x401010 (two bytes each) and three bytes more. The jump's bytes are
//! e9 ?? cc ?? ??, with traps at offset 2 and 4. The trampoline at 0x740dd25 is one that it can
//! reach.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dynasour_guest::space::{PAGE, is_kept_free, page_down};

use super::host;
use super::patches::{self, LEN};
use crate::sync::lock;

/// Bytes of a trampoline.
const SIZE: u64 = 16;
/// The offset of SITE.
const SITE: u64 = 8;
/// The most pages (guess; each holds some dozens of trampolines, and a head without one is entered
/// only from the runtime).
const MOST: usize = 256;
/// The top byte of a displacement that leads from an image to behind the code cache.
const FAR: u32 = 0x40;
/// How many top bytes lead forward; the last of them leads past [`ROOM`].
const FORWARD: u32 = 0x7f;
/// The addresses at which pages may lie: near the code cache, and not where guests expect nothing.
const ROOM: Range<u64> = 0x1_0000..0x7f00_0000;

static PAGES: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
/// How many of them there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static USED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

fn pages() -> impl Iterator<Item = u64> {
    PAGES[..COUNT.load(Ordering::Acquire)].iter().map(|page| page.load(Ordering::Relaxed))
}

/// A new trampoline for a patch at `site` with these inner boundaries ([`patches::write`]); none if
/// there is no room. If a page was mapped for it, calls `protect` with its addresses. The caller keeps
/// other threads from forking.
pub fn reserve(site: u64, inner: u8, protect: impl FnOnce(Range<u64>)) -> Option<u64> {
    let mut used = lock(&USED);
    let known = patches::displacements(inner, |mask, value| {
        pages().find_map(|page| free_slot(&used, site, page, (mask, value)))
    });
    let (at, page) = match known {
        Some(at) => (at, None),
        None => {
            let at = patches::displacements(inner, |mask, value| map_near(site, (mask, value)))?;
            (at, Some(page_down(at)))
        }
    };
    used.insert(at);
    if let Some(page) = page {
        let count = COUNT.load(Ordering::Relaxed);
        PAGES[count].store(page, Ordering::Relaxed);
        COUNT.store(count + 1, Ordering::Release);
        protect(page..page + PAGE);
    }
    Some(at)
}

/// A free slot in `page` that a jump at `site` reaches whose displacement has these bits of `mask`.
fn free_slot(used: &BTreeSet<u64>, site: u64, page: u64, bits: (u32, u32)) -> Option<u64> {
    let fits = |at: u64| at.wrapping_sub(site + LEN as u64) as u32 & bits.0 == bits.1;
    let mut at = page;
    while at <= page + PAGE - SIZE {
        if !fits(at) {
            at += 1;
        } else if let Some(taken) = used.range(at.saturating_sub(SIZE - 1)..at + SIZE).next_back() {
            at = taken + SIZE;
        } else {
            return Some(at);
        }
    }
    None
}

/// Maps a page with an address that a jump at `site` reaches whose displacement has these bits of
/// `mask`. Returns the address.
fn map_near(site: u64, (mask, value): (u32, u32)) -> Option<u64> {
    if COUNT.load(Ordering::Relaxed) == MOST {
        return None;
    }
    // The bytes that are not fixed: the top one decides how far away the page is, the next one which
    // of many there.
    let is_free = |byte: u32| mask >> (8 * byte) & 0xff == 0;
    // Far from images first: a guest may look for gaps near those (opcache does).
    let (first_top, tops) = if is_free(3) { (FAR, FORWARD) } else { (0, 1) };
    let seconds = if is_free(2) { 0..0x100 } else { 0..1 };
    // A site near the end of a page: to the beginning of the next one.
    let low = match value & 0xffff {
        low if (site + LEN as u64 + u64::from(low)) % PAGE <= PAGE - SIZE => 0,
        _ if is_free(0) => SIZE as u32,
        _ if is_free(1) => 0x100,
        _ => 0,
    };
    let mut tries = 0;
    for second in seconds.step_by(0x11) {
        for top in (0..tops).map(|n| (first_top + n) % FORWARD) {
            let displacement = value | top << 24 | second << 16 | low;
            let at = (site + LEN as u64).wrapping_add(i64::from(displacement as i32) as u64);
            let page = page_down(at);
            let outside = page < ROOM.start || page + PAGE > ROOM.end;
            if at + SIZE > page + PAGE || outside || is_kept_free(&(page..page + PAGE)) {
                continue;
            }
            if map(page) {
                return Some(at);
            }
            tries += 1;
            if tries == 64 {
                return None;
            }
        }
    }
    None
}

/// Maps this page, if nothing is there.
fn map(page: u64) -> bool {
    // SAFETY: a fresh mapping where nothing is mapped.
    let mapped = unsafe {
        libc::mmap(
            page as *mut libc::c_void,
            PAGE as usize,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
    };
    mapped as u64 == page
}

/// Makes the reserved trampoline `at` lead to `to`, for the patch at `site`. False if it cannot.
pub fn write(at: u64, site: u64, to: u64) -> bool {
    let Ok(distance) = i32::try_from(to.wrapping_sub(at + LEN as u64) as i64) else { return false };
    let mut bytes = [0xcc; SIZE as usize];
    bytes[0] = 0xe9;
    bytes[1..LEN].copy_from_slice(&distance.to_le_bytes());
    bytes[SITE as usize..].copy_from_slice(&site.to_le_bytes());
    host::write_code(at, &bytes)
}

/// The site of the trampoline that a thread executes at `rip`; none if it executes none.
/// Async-signal-safe.
pub fn site_at(rip: u64) -> Option<u64> {
    // SAFETY: the thread executes this trampoline, so it is complete.
    pages()
        .any(|page| page == page_down(rip))
        .then(|| unsafe { ((rip + SITE) as *const u64).read_unaligned() })
}

/// Is there a page with trampolines in `range`?
pub fn are_in(range: &Range<u64>) -> bool {
    pages().any(|page| page < range.end && range.start < page + PAGE)
}

/// Unmaps all pages, and returns their addresses. Nothing leads there, and no thread is there.
pub fn unmap() -> Vec<Range<u64>> {
    let mut used = lock(&USED);
    let ranges: Vec<_> = pages().map(|page| page..page + PAGE).collect();
    COUNT.store(0, Ordering::Release);
    used.clear();
    for range in &ranges {
        // SAFETY: the pages are this module's own, and not used any more.
        unsafe { libc::munmap(range.start as *mut libc::c_void, PAGE as usize) };
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trampoline_is_where_the_jump_traps_inside() {
        let site = 0x40_1010;
        let mut protected = Vec::new();
        for inner in [0b00100, 0b01000, 0b10000, 0b10110, 0b11110, 0b10100] {
            let at = reserve(site, inner, |range| protected.push(range)).expect("room");
            let displacement = (at as i64 - site as i64 - 5) as i32;
            let bytes = displacement.to_le_bytes();
            for offset in (1..5).filter(|n| inner >> n & 1 != 0) {
                let byte = bytes[offset - 1];
                assert!(byte == 0xcc || offset == 4 && byte < 0x40, "{inner:#b} {bytes:x?}");
            }
            assert!(protected.iter().any(|range| range.contains(&at)));
            assert!(write(at, site, 0x2000_0000));
            assert_eq!(site_at(at), Some(site));
        }
        assert_eq!(site_at(site), None);
        let page = protected[0].clone();
        assert!(are_in(&page) && !are_in(&(0..0x1000)));
        // A second site shares a page.
        let before = protected.len();
        let at = reserve(site + 0x40, 0b00100, |range| protected.push(range)).expect("room");
        assert!(protected.len() == before && site_at(at).is_some());
        // No slot fits between the instruction behind this patch and the end of its page.
        for inner in [0b10000, 0b10010, 0b10100] {
            assert!(reserve(0x40_1ff0, inner, |_| {}).is_some(), "{inner:#b}");
        }
    }
}
