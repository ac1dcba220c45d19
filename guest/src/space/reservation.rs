//! A range of address space with an owner, until it is handed to the guest.
//!
//! This is the only place of the loader that maps and unmaps. The invariant that makes its
//! interface safe: a [`Reservation`] covers address space that was free when it was made
//! (`MAP_FIXED_NOREPLACE`, or chosen by the kernel), and only its owner knows the address. So
//! replacing or unmapping parts of it changes no memory that other code uses. Dropping it unmaps
//! all; [`Reservation::commit`] gives it to the guest for good.

use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::sys::mman::{self, MapFlags, ProtFlags};

use super::{PAGE, page_up};

/// Address space owned by the holder. See the module's description.
#[derive(Debug)]
pub struct Reservation {
    start: u64,
    len: u64,
}

impl Reservation {
    /// Reserves exactly `start..start + len`, inaccessible; `EEXIST` when any of it is mapped.
    pub fn at(start: u64, len: u64) -> Result<Reservation, Errno> {
        let size = size(len)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED_NOREPLACE;
        let address = usize::try_from(start).ok().and_then(NonZeroUsize::new);
        // A fixed mapping at zero has no `NonZeroUsize`; no guest image may have one either.
        let address = address.ok_or(Errno::EPERM)?;
        // SAFETY: MAP_FIXED_NOREPLACE replaces nothing, so no memory in use changes.
        let mapped =
            unsafe { mman::mmap_anonymous(Some(address), size, ProtFlags::PROT_NONE, flags)? };
        exactly(mapped.as_ptr() as u64, start, len)?;
        Ok(Reservation { start, len })
    }

    /// Reserves `len` inaccessible bytes at an address that the kernel chooses, aligned to `align`
    /// (a power of two).
    pub fn anywhere(len: u64, align: u64) -> Result<Reservation, Errno> {
        let len = page_up(len).ok_or(Errno::ENOMEM)?;
        let slack = align.saturating_sub(PAGE);
        let whole_len = len.checked_add(slack).ok_or(Errno::ENOMEM)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: without an address the kernel takes unused address space, so no memory in use
        // changes.
        let mapped =
            unsafe { mman::mmap_anonymous(None, size(whole_len)?, ProtFlags::PROT_NONE, flags)? };
        let mut whole = Reservation { start: mapped.as_ptr() as u64, len: whole_len };
        let start = (whole.start + slack) & !(align.max(PAGE) - 1);
        let end = whole.end();
        whole.unmap(whole.start..start)?;
        whole.unmap(start + len..end)?;
        whole.commit();
        Ok(Reservation { start, len })
    }

    /// Takes over a mapping that no other code uses any more.
    pub(crate) fn adopt(start: u64, len: u64) -> Reservation {
        Reservation { start, len }
    }

    /// The first address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// One past the last address.
    pub fn end(&self) -> u64 {
        self.start + self.len
    }

    /// Maps `file` from `offset` over the pages of `range`, privately.
    pub fn map_file(
        &mut self,
        range: Range<u64>,
        prot: ProtFlags,
        file: &File,
        offset: u64,
    ) -> Result<(), Errno> {
        let (address, size) = self.own(&range)?;
        let offset = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
        // SAFETY: the range is inside this reservation (checked by `own`), whose memory only its
        // owner uses.
        unsafe { mman::mmap(Some(address), size, prot, flags, file, offset)? };
        Ok(())
    }

    /// Maps zeroed memory over the pages of `range`.
    pub fn map_zeroed(
        &mut self,
        range: Range<u64>,
        prot: ProtFlags,
        extra: MapFlags,
    ) -> Result<(), Errno> {
        let (address, size) = self.own(&range)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED | extra;
        // SAFETY: the range is inside this reservation (checked by `own`), whose memory only its
        // owner uses.
        unsafe { mman::mmap_anonymous(Some(address), size, prot, flags)? };
        Ok(())
    }

    /// Unmaps the pages of `range`, for good.
    pub fn unmap(&mut self, range: Range<u64>) -> Result<(), Errno> {
        if range.is_empty() {
            return Ok(());
        }
        let (address, size) = self.own(&range)?;
        let address = NonNull::new(address.get() as *mut libc::c_void).ok_or(Errno::EINVAL)?;
        // SAFETY: the range is inside this reservation (checked by `own`), whose memory only its
        // owner uses.
        unsafe { mman::munmap(address, size.get()) }
    }

    /// Unmaps all of it and returns the result. Dropping unmaps too, but ignores an error.
    pub fn release(mut self) -> Result<(), Errno> {
        let result = self.unmap(self.start..self.end());
        std::mem::forget(self);
        result
    }

    /// Copies `bytes` to `address`. The pages there must have been mapped writable by this
    /// reservation, from memory or from a file that reaches that far.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Errno> {
        if bytes.is_empty() {
            return Ok(());
        }
        let end = address.checked_add(bytes.len() as u64).ok_or(Errno::EFAULT)?;
        self.own(&(address..end))?;
        // SAFETY: the range is inside this reservation; the caller mapped it writable; `bytes` is
        // not in it, since a reservation hands out no references to its memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }

    /// Gives the memory to the guest: it stays mapped.
    pub fn commit(self) {
        std::mem::forget(self);
    }

    /// `range` as an address and a size, if it is not empty and lies within the reservation.
    fn own(&self, range: &Range<u64>) -> Result<(NonZeroUsize, NonZeroUsize), Errno> {
        let inside =
            self.start <= range.start && range.start < range.end && range.end <= self.end();
        let address = usize::try_from(range.start).ok().and_then(NonZeroUsize::new);
        match (inside, address) {
            (true, Some(address)) => Ok((address, size(range.end - range.start)?)),
            _ => Err(Errno::EFAULT),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Unmapping fails only if the kernel has no memory to split a mapping; then the range stays
        // reserved and unused.
        let _ = self.unmap(self.start..self.end());
    }
}

/// Maps a file at exactly `start`, replacing nothing; `EEXIST` when the range is in use.
pub(super) fn map_file_exactly(
    start: u64,
    size: NonZeroUsize,
    prot: ProtFlags,
    flags: MapFlags,
    fd: BorrowedFd,
    offset: i64,
) -> Result<u64, Errno> {
    let address = usize::try_from(start).ok().and_then(NonZeroUsize::new).ok_or(Errno::EPERM)?;
    let flags = flags | MapFlags::MAP_FIXED_NOREPLACE;
    // SAFETY: MAP_FIXED_NOREPLACE replaces nothing, so no memory in use changes.
    let mapped = unsafe { mman::mmap(Some(address), size, prot, flags, fd.as_fd(), offset)? };
    exactly(mapped.as_ptr() as u64, start, size.get() as u64)?;
    Ok(start)
}

/// Kernels before 4.17 treat `MAP_FIXED_NOREPLACE` as a hint; a mapping at another address is
/// unmapped again.
pub(super) fn exactly(mapped: u64, wanted: u64, len: u64) -> Result<(), Errno> {
    if mapped == wanted {
        return Ok(());
    }
    drop(Reservation::adopt(mapped, len));
    Err(Errno::EEXIST)
}

/// A mapping's size as the system call wants it.
fn size(len: u64) -> Result<NonZeroUsize, Errno> {
    usize::try_from(len).ok().and_then(NonZeroUsize::new).ok_or(Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::super::forked::in_child;
    use super::super::is_unmapped;
    use super::*;

    const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

    #[test]
    fn dropping_unmaps_and_committing_does_not() {
        in_child(|| {
            let reservation = Reservation::anywhere(4 * PAGE, PAGE).expect("reserved");
            let start = reservation.start();
            assert!(!is_unmapped(start) && !is_unmapped(start + 3 * PAGE));
            drop(reservation);
            assert!(is_unmapped(start));

            let reservation = Reservation::anywhere(PAGE, PAGE).expect("reserved");
            let start = reservation.start();
            reservation.commit();
            assert!(!is_unmapped(start));
            drop(Reservation::adopt(start, PAGE));
            assert!(is_unmapped(start));
        });
    }

    #[test]
    fn nothing_is_replaced() {
        let first = Reservation::anywhere(2 * PAGE, PAGE).expect("reserved");
        assert_eq!(Reservation::at(first.start() + PAGE, PAGE).unwrap_err(), Errno::EEXIST);
        assert_eq!(Reservation::at(0, PAGE).unwrap_err(), Errno::EPERM);
        assert_eq!(Reservation::at(first.start(), 0).unwrap_err(), Errno::EINVAL);
    }

    #[test]
    fn alignment() {
        for shift in [12, 16, 21, 24] {
            let reservation = Reservation::anywhere(3 * PAGE, 1 << shift).expect("reserved");
            assert_eq!(reservation.start() % (1 << shift), 0);
            assert_eq!(reservation.end() - reservation.start(), 3 * PAGE);
        }
    }

    #[test]
    fn ranges_outside_are_refused() {
        let mut reservation = Reservation::anywhere(2 * PAGE, PAGE).expect("reserved");
        let (start, end) = (reservation.start(), reservation.end());
        assert_eq!(
            reservation.map_zeroed(start - PAGE..end, READ_WRITE, MapFlags::empty()),
            Err(Errno::EFAULT)
        );
        assert_eq!(
            reservation.map_zeroed(start..end + PAGE, READ_WRITE, MapFlags::empty()),
            Err(Errno::EFAULT)
        );
        assert_eq!(reservation.write(end - 1, b"ab"), Err(Errno::EFAULT));
        reservation.map_zeroed(start..end, READ_WRITE, MapFlags::empty()).expect("mapped");
        reservation.write(end - 2, b"ab").expect("written");
        // SAFETY: the page was mapped readable just above.
        assert_eq!(unsafe { *((end - 1) as *const u8) }, b'b');
    }
}
