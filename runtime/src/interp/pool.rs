//! Executable memory of the interpreter's own: one memfd mapped twice, writable and executable, never both.
//!
//! Code is appended and never changed; the whole pool is dropped at once. [`Pool::reset_after_fork`] gives a child
//! its own memory at the same addresses, since it would share the parent's.

use std::ffi::CStr;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of code the pool can hold.
pub const POOL_SIZE: usize = 32 << 20;

/// Where executable views lie, for the signal handler: start addresses of up to eight live pools (0: none).
static VIEWS: [AtomicUsize; 8] = [const { AtomicUsize::new(0) }; 8];

/// Is `addr` inside the executable view of a pool? May be called in a signal handler.
pub fn contains(addr: u64) -> bool {
    VIEWS.iter().any(|view| {
        let start = view.load(Ordering::Acquire) as u64;
        start != 0 && (start..start + POOL_SIZE as u64).contains(&addr)
    })
}

/// The two views and how much is used.
pub struct Pool {
    writable: *mut u8,
    executable: *mut u8,
    used: usize,
}

// SAFETY: the pool owns its mappings; nothing in it depends on the thread.
unsafe impl Send for Pool {}

fn map(descriptor: i32, protection: i32, at: *mut u8) -> io::Result<*mut u8> {
    let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED };
    // SAFETY: a fixed mapping only ever replaces a view that this pool owns.
    let p = unsafe { libc::mmap(at.cast(), POOL_SIZE, protection, libc::MAP_SHARED | fixed, descriptor, 0) };
    if p == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(p.cast()) }
}

/// A fresh memfd under both views, wherever or at the given addresses.
fn map_both(writable: *mut u8, executable: *mut u8) -> io::Result<(*mut u8, *mut u8)> {
    const NAME: &CStr = c"dynasour-natives";
    // SAFETY: a system call with a valid name; the descriptor is closed below.
    let descriptor = unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    let mapped = (|| {
        // SAFETY: the descriptor is ours.
        if unsafe { libc::ftruncate(descriptor, POOL_SIZE as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((
            map(descriptor, libc::PROT_READ | libc::PROT_WRITE, writable)?,
            map(descriptor, libc::PROT_READ | libc::PROT_EXEC, executable)?,
        ))
    })();
    // SAFETY: the descriptor is ours, the mappings keep the memory.
    unsafe { libc::close(descriptor) };
    mapped
}

impl Pool {
    /// An empty pool.
    ///
    /// # Errors
    /// What memfd_create, ftruncate or mmap said, or [`io::ErrorKind::QuotaExceeded`] if there are eight pools already.
    pub fn new() -> io::Result<Pool> {
        let null = std::ptr::null_mut();
        let (writable, executable) = map_both(null, null)?;
        let pool = Pool { writable, executable, used: 0 };
        let start = executable as usize;
        let free = |view: &&AtomicUsize| view.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        match VIEWS.iter().find(free) {
            Some(_) => Ok(pool),
            None => Err(io::ErrorKind::QuotaExceeded.into()),
        }
    }

    /// The address at which the next code will be executed.
    pub fn next_address(&self) -> u64 {
        self.executable as u64 + self.used as u64
    }

    /// Appends `code`; returns its address, or none if the pool is full.
    pub fn append(&mut self, code: &[u8]) -> Option<u64> {
        let address = self.next_address();
        let end = self.used.checked_add(code.len())?;
        if end > POOL_SIZE {
            return None;
        }
        // SAFETY: the range is inside the writable view, and no code executes there yet.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), self.writable.add(self.used), code.len()) };
        self.used = end.next_multiple_of(16).min(POOL_SIZE);
        Some(address)
    }

    /// Forgets all code. The caller must not run any of it again.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// In a forked child: memory of its own under both views, empty.
    ///
    /// # Errors
    /// As [`Pool::new`]; the pool then still shares the parent's memory and must not be used.
    pub fn reset_after_fork(&mut self) -> io::Result<()> {
        map_both(self.writable, self.executable)?;
        self.used = 0;
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let start = self.executable as usize;
        if let Some(view) = VIEWS.iter().find(|view| view.load(Ordering::Acquire) == start) {
            view.store(0, Ordering::Release);
        }
        // SAFETY: both views are this pool's, and nobody runs or writes code in them any more.
        unsafe {
            libc::munmap(self.writable.cast(), POOL_SIZE);
            libc::munmap(self.executable.cast(), POOL_SIZE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_and_a_reset_gives_fresh_memory() {
        let mut pool = Pool::new().unwrap();
        let five = pool.append(&[0xb8, 5, 0, 0, 0, 0xc3]).unwrap();
        assert!(contains(five) && contains(five + 5) && !contains(five + POOL_SIZE as u64));
        // SAFETY: mov eax, 5; ret.
        let f: extern "C" fn() -> u32 = unsafe { std::mem::transmute(five) };
        assert_eq!(f(), 5);
        pool.reset_after_fork().unwrap();
        assert_eq!(pool.append(&[0xb8, 6, 0, 0, 0, 0xc3]), Some(five));
        assert_eq!(f(), 6);
        assert_eq!(pool.append(&vec![0; POOL_SIZE]), None);
    }
}
