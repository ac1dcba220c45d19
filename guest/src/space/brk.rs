//! The guest's program break: brk(2) as the kernel does it, at an address that the loader chooses.
//!
//! The process's real break belongs to the host, whose malloc uses it. So the guest's break lies
//! elsewhere: where a kernel without address space randomisation would put it for a
//! position-independent program. Sanitizers expect it there, and terabytes above are unused.
//! Nothing is reserved; as with the kernel's own break, it cannot grow over another mapping.
//!
//! A program at fixed addresses that has address space randomisation turned off gets its break
//! directly behind its data ([`Brk::behind`]), since it may count on that: GNU Common Lisp makes itself
//! such a program, and keeps its heap there.

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags};

use super::{
    BREAK_END, MapEntry, PAGE, Reservation, USER_END, is_unmapped, keep_holes_free,
    leave_room_to_break, maps, page_up, soft_limit,
};

/// Start addresses to try, best first: above the highest break that a randomised host can have.
const CANDIDATES: [u64; 3] = [0x5660_0000_0000, 0x5200_0000_0000, 0x4200_0000_0000];

/// Free bytes that a start address must have above it (guess; a guest whose break grows further
/// runs into other mappings).
const ROOM: u64 = 64 << 30;

/// Free bytes that a break behind a program's data must have (guess: one that has less is too often
/// full).
const NEAR: u64 = 64 << 20;

/// Are the [`ROOM`] bytes from `start` on unmapped?
fn has_room(start: u64) -> bool {
    match Reservation::at(start, ROOM) {
        Ok(_unmapped_again) => true,
        Err(Errno::EEXIST) => false,
        // A limit on the address space does not allow that much.
        Err(_) => {
            let taken = maps().unwrap_or_default();
            taken.iter().all(|m| m.range.end <= start || m.range.start >= start + ROOM)
        }
    }
}

/// The program break of one guest process.
///
/// ```text
/// start        current, as the guest set it        page_up(current)
///   |  zeroed, readable, writable       |  . . . . . . |   not mapped
/// ```
#[derive(Debug, Clone)]
pub struct Brk {
    start: u64,
    current: u64,
    data_len: u64,
}

impl Brk {
    /// An empty break at `start`, a page's address behind a program's data; none if less than
    /// [`NEAR`] bytes are free there. Whatever is placed from now on leaves as much room as it can
    /// ([`super::Layout`]). No image but the program was placed yet.
    pub fn behind(start: u64, data_len: u64) -> Option<Brk> {
        let end = start.checked_add(NEAR).filter(|end| *end <= BREAK_END)?;
        let is_free = |m: &MapEntry| m.range.end <= start || m.range.start >= end;
        maps().is_ok_and(|taken| taken.iter().all(is_free)).then(|| {
            leave_room_to_break();
            keep_holes_free(std::iter::once(start..BREAK_END));
            Brk { start, current: start, data_len }
        })
    }

    /// An empty break where there is room. `data_len`, the size of the program's initialised data,
    /// counts against `RLIMIT_DATA` as well.
    pub fn new(data_len: u64) -> Result<Brk, Errno> {
        let start = match CANDIDATES.into_iter().find(|&start| has_room(start)) {
            Some(start) => start,
            // Reserving and releasing a range finds free space. Another mapping may take it later,
            // as with any break.
            None => Reservation::anywhere(ROOM, PAGE)?.start(),
        };
        Ok(Brk { start, current: start, data_len })
    }

    /// The lowest break.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The break.
    pub fn current(&self) -> u64 {
        self.current
    }

    /// What the break's memory allows.
    const PROT: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

    /// The system call: moves the break to `wanted` if that can be, and returns the break.
    pub fn set(&mut self, wanted: u64) -> u64 {
        let data = wanted.checked_sub(self.start).and_then(|size| size.checked_add(self.data_len));
        let (Some(data), Some(new_end), Some(old_end)) =
            (data, page_up(wanted), page_up(self.current))
        else {
            return self.current;
        };
        let limit = soft_limit(libc::RLIMIT_DATA);
        if (limit != libc::RLIM_INFINITY && data > limit) || new_end > USER_END {
            return self.current;
        }
        let moved = if new_end < old_end {
            // Unmapping fails if the kernel has no memory to split a mapping; the kernel's brk
            // leaves the break alone then, too.
            Reservation::adopt(new_end, old_end - new_end).release()
        } else if new_end > old_end {
            Brk::grow(old_end, new_end)
        } else {
            Ok(())
        };
        if moved.is_ok() {
            self.current = wanted;
        }
        self.current
    }

    /// Maps zeroed pages, keeping at least one unmapped page before the next mapping, as the kernel
    /// does.
    fn grow(from: u64, to: u64) -> Result<(), Errno> {
        if !is_unmapped(to) {
            return Err(Errno::ENOMEM);
        }
        let mut pages = Reservation::at(from, to - from)?;
        pages.map_zeroed(from..to, Brk::PROT, MapFlags::empty())?;
        pages.commit();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::forked::in_child;
    use super::super::{LOW, Layout, place_low};
    use super::*;

    /// A break in a hole of 32 pages.
    fn test_brk() -> (Brk, Reservation) {
        let space = Reservation::anywhere(64 * PAGE, PAGE).expect("space");
        let start = space.start() + 8 * PAGE;
        let mut space = space;
        space.unmap(start..start + 32 * PAGE).expect("hole");
        (Brk { start, current: start, data_len: 0 }, space)
    }

    fn peek(address: u64) -> u8 {
        // SAFETY: tests only read below the break they set.
        unsafe { *(address as *const u8) }
    }

    fn poke(address: u64, value: u8) {
        // SAFETY: tests only write below the break they set.
        unsafe { *(address as *mut u8) = value };
    }

    #[test]
    fn grows_shrinks_and_zeroes() {
        in_child(|| {
            let (mut brk, _space) = test_brk();
            let start = brk.start();
            assert_eq!(brk.set(0), start);
            assert_eq!(brk.set(start - 1), start);
            assert_eq!(brk.set(start + 10), start + 10);
            poke(start, 7);
            poke(start + PAGE - 1, 8);
            assert!(is_unmapped(start + PAGE));
            // Moving the break within a page zeroes nothing, as with the kernel.
            assert_eq!(brk.set(start + 1), start + 1);
            assert_eq!(brk.set(start + 3 * PAGE), start + 3 * PAGE);
            assert_eq!(
                (peek(start), peek(start + PAGE - 1), peek(start + 3 * PAGE - 1)),
                (7, 8, 0)
            );
            poke(start + 2 * PAGE, 9);
            assert_eq!(brk.set(start + PAGE), start + PAGE);
            assert!(is_unmapped(start + PAGE));
            assert_eq!(brk.set(start + 3 * PAGE), start + 3 * PAGE);
            assert_eq!((peek(start), peek(start + 2 * PAGE)), (7, 0));
            assert_eq!(brk.set(start), start);
            assert!(is_unmapped(start));
            assert_eq!(brk.current(), start);
        });
    }

    #[test]
    fn does_not_grow_over_or_up_to_a_mapping() {
        in_child(|| {
            let (mut brk, _space) = test_brk();
            let start = brk.start();
            assert_eq!(brk.set(start + 33 * PAGE), start);
            // The hole is 32 pages; its last page stays free.
            assert_eq!(brk.set(start + 32 * PAGE), start);
            assert_eq!(brk.set(start + 31 * PAGE), start + 31 * PAGE);
            assert_eq!(brk.set(u64::MAX), start + 31 * PAGE);
            assert_eq!(brk.set(USER_END), start + 31 * PAGE);
            assert_eq!(brk.set(start), start);
        });
    }

    #[test]
    fn a_fresh_break_is_far_from_everything() {
        in_child(|| {
            let mut brk = Brk::new(0).expect("placed");
            let start = brk.start();
            assert!(start > 1 << 32);
            assert!(
                maps()
                    .expect("maps")
                    .iter()
                    .all(|m| m.range.end <= start || m.range.start >= start + ROOM)
            );
            assert_eq!(brk.set(start + (1 << 20)), start + (1 << 20));
            assert_eq!(brk.set(start), start);
        });
    }

    #[test]
    fn a_break_behind_a_program_leaves_room_for_images() {
        in_child(|| {
            let images = Layout::BreakBehind.images();
            assert!(
                Brk::behind(BREAK_END - PAGE, 0).is_none() && Brk::behind(u64::MAX, 0).is_none()
            );
            assert_eq!(Layout::current(), Layout::Usual);
            let (start, mut brk) = (LOW.start..LOW.end)
                .step_by(1 << 20)
                .find_map(|start| Some((start, Brk::behind(start, 0)?)))
                .expect("room in the low addresses");
            assert_eq!((brk.start(), Layout::current()), (start, Layout::BreakBehind));
            assert_eq!(brk.set(start + NEAR), start + NEAR);
            assert!(place_low(PAGE).is_some_and(|place| images.contains(&place)));
            assert_eq!(brk.set(BREAK_END), BREAK_END);
            assert!(Brk::behind(start, 0).is_none(), "it is taken");
        });
    }

    /// Random moves of a fresh break give the same answers as the kernel's own break.
    #[test]
    fn moves_as_the_kernels_break_does() {
        in_child(|| {
            // SAFETY: brk with an address below the break, or 0, only reports.
            let native = |to: u64| unsafe { libc::syscall(libc::SYS_brk, to) } as u64;
            let mut brk = Brk::new(0).expect("placed");
            let (start, native_start) = (brk.start(), page_up(native(0)).expect("an address"));
            native(native_start);
            let mut seed = 1u64;
            for _ in 0..2000 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let offset = ((seed >> 33) % (64 << 20)) >> ((seed >> 8) % 20);
                let (ours, theirs) = (brk.set(start + offset), native(native_start + offset));
                assert_eq!(ours - start, theirs - native_start, "to {offset:#x}");
                if ours > start {
                    assert!(!is_unmapped(page_up(ours).expect("an address") - PAGE));
                }
                assert!(is_unmapped(page_up(ours).expect("an address")));
            }
        });
    }

    #[test]
    fn the_data_limit_holds() {
        in_child(|| {
            let mut brk = Brk::new(1 << 20).expect("placed");
            let start = brk.start();
            // The limit is far above what the child itself uses.
            let limit = libc::rlimit { rlim_cur: 4 << 30, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: `limit` is a valid limit; it concerns this child only.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) }, 0);
            assert_eq!(brk.set(start + (4 << 30)), start);
            assert_eq!(brk.set(start + (1 << 20)), start + (1 << 20));
            assert_eq!(brk.set(start), start);
        });
    }
}
