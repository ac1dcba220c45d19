//! The layout of the address space that guest and host share (docs/design.md, "Running a guest").
//!
//! ```text
//! 0x0001_0000 .. 0x2000_0000   guest images and file-backed code: [`LOW`]
//! 0x2000_0000 .. 0x4000_0000   the code cache's executable view ([`Layout`])
//! 0x4000_0000 .. 0x8000_0000   left to guests that ask for MAP_32BIT
//! high                         stack, brk, the cache's writable view, everything of the host
//! ```
//!
//! If a program has its break behind its data ([`Brk::behind`]), everything of ours lies as high as it can below 2
//! GiB, so that the break can grow ([`Layout`]):
//!
//! ```text
//! behind the data .. 0x7000_0000   the break
//! .. 0x7800_0000                   the code cache's executable view, which ends there
//! 0x7800_0000 .. 0x7f00_0000       images that are placed after the program
//! 0x7f00_0000 .. 0x8000_0000       stubs of system calls
//! ```
//!
//! Images are placed low for two reasons: code made from them reaches their RIP-relative operands
//! from the cache, and a return address is a 32-bit immediate. Correctness does not depend on it:
//! where there is no room the kernel chooses the address, and generated code uses its general
//! forms.
//!
//! A computed place is only a suggestion; `MAP_FIXED_NOREPLACE` decides whether a range is free.
//! [`map_low`] therefore tries the address after the last image first ([`LOW`]'s start before the
//! first), reads `/proc/self/maps` only when that is taken, and never maps over anything. Any thread may call these functions; they
//! share one atomic address and the list of the holes in images, which has a lock.

mod brk;
#[cfg(test)]
pub(crate) mod forked;
mod mappings;
mod maps;
mod reservation;
mod views;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::sys::mman::{self, MapFlags, ProtFlags};

pub use brk::Brk;
pub use mappings::{FileRange, Mapping, Mappings};
pub use maps::{MapEntry, maps, maps_file, parse_line};
pub use reservation::Reservation;
pub use views::Views;

/// Bytes in a page.
pub const PAGE: u64 = 4096;

/// Addresses of guest images and file-backed code.
pub const LOW: Range<u64> = Layout::Usual.images();

/// Where a break behind a program's data ends. A cache of usual size lies above it; a larger one takes some of the
/// break's room.
const BREAK_END: u64 = 0x7000_0000;

/// Which addresses below 2 GiB are for what. See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// That of most processes.
    Usual,
    /// The break lies behind the program's data.
    BreakBehind,
}

impl Layout {
    /// That of this process. It is known once the program is loaded.
    pub fn current() -> Layout {
        if IS_BREAK_BEHIND.load(Ordering::Relaxed) { Layout::BreakBehind } else { Layout::Usual }
    }

    /// Addresses of guest images and file-backed code.
    pub const fn images(self) -> Range<u64> {
        match self {
            Layout::Usual => 0x1_0000..0x2000_0000,
            Layout::BreakBehind => 0x7800_0000..0x7f00_0000,
        }
    }

    /// Where `size` bytes for the code cache's executable view and its constant tables are tried first.
    pub const fn cache(self, size: u64) -> u64 {
        match self {
            Layout::Usual => Layout::Usual.images().end,
            Layout::BreakBehind => Layout::BreakBehind.images().start - size,
        }
    }

    /// Where stubs of system calls are tried first: apart from the code cache.
    pub const fn stubs(self) -> u64 {
        match self {
            Layout::Usual => 0x2f00_0000,
            Layout::BreakBehind => Layout::BreakBehind.images().end,
        }
    }
}

/// One past the last user address (four-level paging, less the guard page).
pub const USER_END: u64 = (1 << 47) - PAGE;

/// Bytes left unmapped between images placed low.
const GAP: u64 = PAGE;

/// Attempts to place a mapping when another thread takes the suggested range in between (guess; if
/// all fail the kernel chooses the address).
const ATTEMPTS: usize = 8;

/// The unmapped ranges between the segments of images, and the one behind an image for a break. The
/// lock is held only to look or to add, by callers that keep other threads from forking meanwhile.
static HOLES: Mutex<Vec<Range<u64>>> = Mutex::new(Vec::new());

/// Is the layout [`Layout::BreakBehind`]?
static IS_BREAK_BEHIND: AtomicBool = AtomicBool::new(false);

/// The address to try for the next image.
static NEXT_LOW: AtomicU64 = AtomicU64::new(LOW.start);

/// `address` rounded down to its page.
pub const fn page_down(address: u64) -> u64 {
    address & !(PAGE - 1)
}

/// `address` rounded up to a page boundary, if that is still a 64-bit number.
pub const fn page_up(address: u64) -> Option<u64> {
    match address.checked_add(PAGE - 1) {
        Some(sum) => Some(page_down(sum)),
        None => None,
    }
}

/// Images are placed as [`Layout::BreakBehind`] has it from now on. No image but the program was placed yet.
fn leave_room_to_break() {
    IS_BREAK_BEHIND.store(true, Ordering::Relaxed);
    NEXT_LOW.store(Layout::BreakBehind.images().start, Ordering::Relaxed);
}

/// The first address for images at which this system lets us map (`vm.mmap_min_addr`).
fn low_start() -> u64 {
    let minimum = std::fs::read_to_string("/proc/sys/vm/mmap_min_addr")
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok())
        .and_then(page_up)
        .unwrap_or(0);
    Layout::current().images().start.max(minimum)
}

/// The lowest free range of `len` bytes for an image, aligned to `align` (a power of two, at least a
/// page), with an unmapped page on either side; `None` when there is no room. The range is a
/// suggestion: map it with `MAP_FIXED_NOREPLACE` and ask again on `EEXIST`. [`map_low`] does that
/// for a file.
pub fn place_low_aligned(len: u64, align: u64) -> Option<u64> {
    let mut taken: Vec<Range<u64>> = maps().ok()?.into_iter().map(|entry| entry.range).collect();
    taken.extend(holes().iter().cloned());
    taken.sort_unstable_by_key(|range| range.start);
    first_gap(&taken, low_start()..Layout::current().images().end, len, align)
}

/// [`place_low_aligned`] with page alignment.
pub fn place_low(len: u64) -> Option<u64> {
    place_low_aligned(len, PAGE)
}

/// The lowest address within `bounds` for `len` bytes between the sorted `taken` ranges.
fn first_gap(taken: &[Range<u64>], bounds: Range<u64>, len: u64, align: u64) -> Option<u64> {
    let len = page_up(len).filter(|&len| len > 0)?;
    let align_up = |address: u64| address.checked_add(align - 1).map(|sum| sum & !(align - 1));
    let mut candidate = align_up(bounds.start)?;
    for range in taken {
        let end = candidate.checked_add(len)?;
        if end.checked_add(GAP)? <= range.start {
            break;
        }
        if range.end.checked_add(GAP)? > candidate {
            candidate = align_up(candidate.max(range.end + GAP))?;
        }
    }
    (candidate.checked_add(len)? <= bounds.end).then_some(candidate)
}

fn holes() -> MutexGuard<'static, Vec<Range<u64>>> {
    HOLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the holes of an image free: its segments would not be neighbours any more if another image
/// lay between them, and the C library looks for the image of an address by its first and last
/// address.
pub(crate) fn keep_holes_free(new: impl IntoIterator<Item = Range<u64>>) {
    holes().extend(new);
}

/// Is part of `range` kept free, for an image or a break? As for [`map_low`], the caller keeps other
/// threads from forking.
pub fn is_kept_free(range: &Range<u64>) -> bool {
    holes().iter().any(|hole| range.start < hole.end && hole.start < range.end)
}

/// Calls `map_at` with low addresses for `len` bytes until one is free. `None` when the low region
/// has no room; the caller then lets the kernel choose.
///
/// `map_at` maps exactly at the address it is given, and answers `EEXIST` when that range is in
/// use.
pub(crate) fn try_low<T>(
    len: u64,
    align: u64,
    mut map_at: impl FnMut(u64) -> Result<T, Errno>,
) -> Option<Result<T, Errno>> {
    let end = Layout::current().images().end;
    let len = page_up(len).filter(|&len| len > 0 && len <= end)?;
    let align = align.max(PAGE);
    for attempt in 0..ATTEMPTS {
        let next = NEXT_LOW.load(Ordering::Relaxed);
        let candidate =
            (attempt == 0).then(|| next.next_multiple_of(align)).filter(|start| start + len <= end);
        let candidate = match candidate.filter(|start| !is_kept_free(&(*start..start + len))) {
            Some(candidate) => candidate,
            None => place_low_aligned(len, align)?,
        };
        match map_at(candidate) {
            Err(Errno::EEXIST) => continue,
            // Below `vm.mmap_min_addr`, which was not asked yet.
            Err(Errno::EPERM) if attempt == 0 && candidate == LOW.start => continue,
            Ok(mapped) => {
                NEXT_LOW.store(candidate + len + GAP, Ordering::Relaxed);
                return Some(Ok(mapped));
            }
            Err(errno) => return Some(Err(errno)),
        }
    }
    None
}

/// Maps part of a file as an image: low if there is room, else at an address that the kernel
/// chooses. The runtime uses it for an `mmap` without address that passes `MAP_DENYWRITE`, which
/// only the dynamic linker does when it maps a library. `flags` must hold no `MAP_FIXED` kind; the
/// caller handles those.
pub fn map_low(
    len: u64,
    prot: ProtFlags,
    flags: MapFlags,
    fd: BorrowedFd,
    offset: u64,
) -> Result<u64, Errno> {
    let offset = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW)?;
    let size = usize::try_from(len).ok().and_then(NonZeroUsize::new).ok_or(Errno::EINVAL)?;
    let low = try_low(len, PAGE, |start| {
        reservation::map_file_exactly(start, size, prot, flags, fd, offset)
    });
    low.unwrap_or_else(|| {
        // SAFETY: without an address the kernel takes unused address space, so no memory in use
        // changes.
        let mapped = unsafe { mman::mmap(None, size, prot, flags, fd, offset)? };
        Ok(mapped.as_ptr() as u64)
    })
}

/// The soft limit of `resource`, `u64::MAX` when unlimited or unknown.
pub fn soft_limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is a valid place for the answer.
    unsafe { libc::getrlimit(resource, &mut limit) };
    limit.rlim_cur
}

/// Whether the kernel chooses addresses of this process at random (manual: personality(2)).
pub(crate) fn is_randomised() -> bool {
    /// Asks for the personality without changing it.
    const ASK: libc::c_ulong = 0xffff_ffff;
    // SAFETY: this only asks.
    let personality = unsafe { libc::personality(ASK) };
    personality & libc::ADDR_NO_RANDOMIZE == 0
}

/// Whether the page at `page` has no mapping.
fn is_unmapped(page: u64) -> bool {
    let mut residency = 0u8;
    // SAFETY: mincore only reports on the page and writes one byte per page into `residency`.
    let result = unsafe { libc::mincore(page as *mut libc::c_void, PAGE as usize, &mut residency) };
    result != 0 && Errno::last() == Errno::ENOMEM
}

#[cfg(test)]
mod tests {
    use super::forked::in_child;
    use super::*;
    use std::fs::File;

    #[test]
    fn rounding() {
        assert_eq!(page_down(0x1fff), 0x1000);
        assert_eq!(page_up(0x1001), Some(0x2000));
        assert_eq!(page_up(0x1000), Some(0x1000));
        assert_eq!(page_up(u64::MAX), None);
    }

    #[test]
    fn gaps_keep_a_page_on_either_side() {
        let taken = [0x20000..0x30000, 0x33000..0x40000, 0x7000_0000..0x7000_1000];
        let bounds = 0x10000..0x50000;
        // 0x10000..0x1f000 fits before the first mapping with one page to spare.
        assert_eq!(first_gap(&taken, bounds.clone(), 0xf000, PAGE), Some(0x10000));
        // 0x10000..0x20000 would touch it; the hole at 0x31000 holds a page only.
        assert_eq!(first_gap(&taken, bounds.clone(), PAGE, 0x10000), Some(0x10000));
        assert_eq!(first_gap(&taken, 0x20000..0x50000, PAGE, PAGE), Some(0x31000));
        assert_eq!(first_gap(&taken, 0x20000..0x50000, 2 * PAGE, PAGE), Some(0x41000));
        assert_eq!(first_gap(&taken, bounds.clone(), 0x10000, PAGE), None);
        assert_eq!(first_gap(&taken, bounds.clone(), 0, PAGE), None);
        assert_eq!(first_gap(&taken, bounds.clone(), u64::MAX, PAGE), None);
        assert_eq!(first_gap(&taken, bounds, PAGE, 1 << 63), None);
        assert_eq!(first_gap(&[], 0x10000..0x11000, PAGE, PAGE), Some(0x10000));
    }

    #[test]
    fn a_mapping_that_ends_before_the_bounds_does_not_push() {
        let taken = [0x1000..0x2000, 0x8000..0x9000];
        assert_eq!(first_gap(&taken, 0x10000..0x20000, PAGE, PAGE), Some(0x10000));
    }

    #[test]
    fn low_mappings_land_low_and_do_not_collide() {
        in_child(|| {
            let file = File::open("/proc/self/exe").expect("own executable");
            let fd = std::os::fd::AsFd::as_fd(&file);
            let places: Vec<u64> = (0..4)
                .map(|_| {
                    map_low(3 * PAGE, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE, fd, 0)
                        .expect("mapped")
                })
                .collect();
            for (i, &place) in places.iter().enumerate() {
                assert!(LOW.contains(&place), "{place:#x}");
                assert!(!is_unmapped(place));
                for &other in &places[..i] {
                    assert!(place.abs_diff(other) >= 4 * PAGE, "{place:#x} and {other:#x}");
                }
            }
            for place in places {
                Reservation::adopt(place, 3 * PAGE);
                assert!(is_unmapped(place));
            }
        });
    }

    #[test]
    fn errors_of_the_file_are_reported_not_retried() {
        let directory = File::open("/").expect("root");
        let fd = std::os::fd::AsFd::as_fd(&directory);
        assert_eq!(
            map_low(PAGE, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE, fd, 0),
            Err(Errno::ENODEV)
        );
        let file = File::open("/proc/self/exe").expect("own executable");
        let fd = std::os::fd::AsFd::as_fd(&file);
        assert_eq!(
            map_low(PAGE, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE, fd, 1),
            Err(Errno::EINVAL)
        );
        assert_eq!(
            map_low(0, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE, fd, 0),
            Err(Errno::EINVAL)
        );
    }
}
