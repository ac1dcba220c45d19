//! Memory for generated code, seen through two mappings: one to write it, one to execute it. No
//! page is both writable and executable.
//!
//! It is shared anonymous memory, of which `mremap(2)` with an old size of zero makes a second
//! mapping. A memory file (memfd) would do as well, but needs a descriptor and counts against the
//! limit on file sizes. The guest may have used up either of them when it forks and the child needs
//! code of its own.

use std::io;
use std::ptr;

use super::Reservation;

/// The two views, unmapped when dropped. Their addresses never change.
#[derive(Debug)]
pub struct Views {
    writable: *mut u8,
    executable: *mut u8,
    len: usize,
}

// SAFETY: plain memory that belongs to the struct; its owner orders the writes through the
// pointers.
unsafe impl Send for Views {}
// SAFETY: as above.
unsafe impl Sync for Views {}

const WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const EXECUTE: i32 = libc::PROT_READ | libc::PROT_EXEC;

impl Views {
    /// Zeroed memory of `len` bytes (a multiple of a page). The executable view is placed at the
    /// first free address of `places`, else where the kernel chooses.
    ///
    /// # Errors
    /// The error of mmap or mremap.
    pub fn new(len: usize, places: impl IntoIterator<Item = usize>) -> io::Result<Views> {
        let writable = fresh(len)?;
        let mut views = Views { writable, executable: ptr::null_mut(), len };
        let at = places.into_iter().find_map(|place| reserve(place, len));
        // On an error the reserved range stays reserved; the process cannot go on after that.
        views.executable = second(writable, len, at)?;
        Ok(views)
    }

    /// Fresh memory at the same addresses, shared with no other process; it begins with the first
    /// `keep` bytes of the old.
    ///
    /// # Errors
    /// As [`Views::new`]; after an error the views must not be used.
    pub fn renew(&mut self, keep: usize) -> io::Result<()> {
        assert!(keep <= self.len);
        let new = fresh(self.len)?;
        // SAFETY: both ranges are mapped, and the fresh one overlaps nothing.
        unsafe { ptr::copy_nonoverlapping(self.executable, new, keep) };
        let moved = second(new, self.len, Some(self.executable)).and_then(|_| {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: moves our own mapping over our own view.
            succeeded(unsafe { libc::mremap(new.cast(), self.len, self.len, flags, self.writable) })
        });
        if moved.is_err() {
            unmap(new, self.len);
        }
        moved.map(drop)
    }

    /// Start of the writable view.
    pub fn writable(&self) -> *mut u8 {
        self.writable
    }

    /// Start of the executable view, which can also be read.
    pub fn executable(&self) -> *mut u8 {
        self.executable
    }
}

impl Drop for Views {
    fn drop(&mut self) {
        unmap(self.writable, self.len);
        if !self.executable.is_null() {
            unmap(self.executable, self.len);
        }
    }
}

/// New shared writable memory.
fn fresh(len: usize) -> io::Result<*mut u8> {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    succeeded(unsafe { libc::mmap(ptr::null_mut(), len, WRITE, flags, -1, 0) })
}

/// Reserves the address space at `place` if it is free.
fn reserve(place: usize, len: usize) -> Option<*mut u8> {
    let reservation = Reservation::at(place as u64, len as u64).ok()?;
    let start = reservation.start() as *mut u8;
    reservation.commit();
    Some(start)
}

/// A second, executable view of the shared memory at `first`: over `place`, which this process has
/// reserved, or where the kernel chooses.
fn second(first: *mut u8, len: usize, place: Option<*mut u8>) -> io::Result<*mut u8> {
    let fixed = if place.is_some() { libc::MREMAP_FIXED } else { 0 };
    let flags = libc::MREMAP_MAYMOVE | fixed;
    // SAFETY: an old size of zero keeps the first view; the caller owns the range that is replaced.
    let view = succeeded(unsafe {
        libc::mremap(first.cast(), 0, len, flags, place.unwrap_or(ptr::null_mut()))
    })?;
    // SAFETY: the view is ours, and nothing is executed in it yet.
    if unsafe { libc::mprotect(view.cast(), len, EXECUTE) } != 0 {
        let error = io::Error::last_os_error();
        unmap(view, len);
        return Err(error);
    }
    Ok(view)
}

fn succeeded(mapped: *mut libc::c_void) -> io::Result<*mut u8> {
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(mapped.cast()) }
}

fn unmap(start: *mut u8, len: usize) {
    // SAFETY: the range is one of our views, and nothing uses it any more.
    unsafe { libc::munmap(start.cast(), len) };
}

#[cfg(test)]
mod tests {
    use super::super::forked::in_child;
    use super::super::maps;
    use super::*;
    use nix::sys::mman::ProtFlags;

    const LEN: usize = 64 << 10;

    fn put(views: &Views, bytes: &[u8]) {
        // SAFETY: the writable view is mapped and longer than that.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), views.writable(), bytes.len()) };
    }

    fn call(views: &Views) -> u32 {
        // SAFETY: the tests put `mov eax, N; ret` there.
        unsafe { std::mem::transmute::<*mut u8, extern "C" fn() -> u32>(views.executable())() }
    }

    #[test]
    fn what_is_written_is_executed_and_renewed_in_place() {
        let mut views = Views::new(LEN, []).expect("memory");
        put(&views, &[0xb8, 5, 0, 0, 0, 0xc3]);
        assert_eq!(call(&views), 5);
        let before = (views.writable(), views.executable());
        views.renew(6).expect("memory");
        assert_eq!((views.writable(), views.executable(), call(&views)), (before.0, before.1, 5));
        put(&views, &[0xb8, 6]);
        assert_eq!(call(&views), 6);
        views.renew(0).expect("memory");
        // SAFETY: the view is readable.
        assert_eq!(unsafe { views.executable().read() }, 0);
        for entry in maps().expect("maps") {
            assert!(
                !entry.prot.contains(ProtFlags::PROT_WRITE | ProtFlags::PROT_EXEC),
                "{entry:?}"
            );
        }
    }

    #[test]
    fn the_first_free_place_is_taken_and_given_back() {
        in_child(|| {
            let wanted = 0x2_0000_0000usize;
            let first = Views::new(LEN, [wanted]).expect("memory");
            let second = Views::new(LEN, [wanted, wanted + LEN]).expect("memory");
            assert_eq!(
                (first.executable() as usize, second.executable() as usize),
                (wanted, wanted + LEN)
            );
            drop(first);
            let third = Views::new(LEN, [wanted, wanted + LEN]).expect("memory");
            assert_eq!(third.executable() as usize, wanted);
        });
    }

    #[test]
    fn neither_descriptors_nor_room_for_files_are_needed() {
        in_child(|| {
            let mut views = Views::new(LEN, []).expect("memory");
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            for resource in [libc::RLIMIT_FSIZE, libc::RLIMIT_NOFILE] {
                // SAFETY: reads `none`; it concerns this child only.
                assert_eq!(unsafe { libc::setrlimit(resource, &none) }, 0);
            }
            views.renew(LEN).expect("memory");
            assert!(Views::new(LEN, []).is_ok());
        });
    }
}
