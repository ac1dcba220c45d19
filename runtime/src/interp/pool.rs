//! The interpreter's own executable memory, for the thunks of natives.
//!
//! Data: a [`Pool`] owns memory with two views, one writable and one executable. A global list
//! holds the addresses of the executable views, for [`contains`].
//!
//! Invariants:
//! * No view is both writable and executable.
//! * Code is appended and never changed.
//! * A forked child shares the memory with its parent. It executes the code that it knows, which
//!   nobody changes, and copies it to memory of its own, at the same addresses, before it appends
//!   ([`Pool::make_own`]): most children of a shell never do, and the copy takes 40 µs (measured).
//!   [`Pool::clear`] takes fresh memory, so that a parent that clears its pool does not overwrite
//!   the child's code.
//!
//! A pool belongs to one guest thread, which calls it without a lock. [`contains`] may be called by
//! any thread, also in a signal handler.
//!
//! Example: `append(&[0xc3])` returns the executable address A of a `ret`. The next code goes to A
//! + 16. After `clear` the first code is at A again.

use dynasour_guest::space::Views;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of code that a pool can hold (guess: memory that is not used costs only addresses; a full
/// pool makes the interpreter drop all its blocks).
pub const POOL_SIZE: usize = 32 << 20;

/// Greatest number of pools, one for each guest thread that exists at a time (guess: a guest gets
/// no further thread beyond it).
const MOST: usize = 4096;

/// Start addresses of the executable views of live pools, for the signal handler; 0 is a free
/// entry.
static VIEWS: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];
/// One past the highest entry of [`VIEWS`] that was ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Is `addr` inside the executable view of a pool? May be called in a signal handler.
pub fn contains(addr: u64) -> bool {
    VIEWS[..USED.load(Ordering::Acquire)].iter().any(|view| {
        let start = view.load(Ordering::Acquire) as u64;
        start != 0 && (start..start + POOL_SIZE as u64).contains(&addr)
    })
}

/// Two views of one memory, filled from its start.
pub struct Pool {
    views: Views,
    used: usize,
    /// The memory is another process's, too, which appends to it.
    is_inherited: bool,
}

impl Pool {
    /// An empty pool.
    ///
    /// # Errors
    /// The kernel's error, or [`io::ErrorKind::QuotaExceeded`] if there are [`MOST`] pools already.
    pub fn new() -> io::Result<Pool> {
        let views = Views::new(POOL_SIZE, [])?;
        let pool = Pool { views, used: 0, is_inherited: false };
        let start = pool.views.executable() as usize;
        let free = |view: &&AtomicUsize| {
            view.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        match VIEWS.iter().position(|view| free(&view)) {
            Some(at) => {
                USED.fetch_max(at + 1, Ordering::AcqRel);
                Ok(pool)
            }
            None => Err(io::ErrorKind::QuotaExceeded.into()),
        }
    }

    /// The addresses of both views.
    pub fn ranges(&self) -> [std::ops::Range<u64>; 2] {
        [self.views.writable(), self.views.executable()]
            .map(|view| view as u64..view as u64 + POOL_SIZE as u64)
    }

    /// The address at which the next code will be executed.
    pub fn next_address(&self) -> u64 {
        self.views.executable() as u64 + self.used as u64
    }

    /// Appends `code` and returns its address, or `None` if the pool is full.
    pub fn append(&mut self, code: &[u8]) -> Option<u64> {
        let address = self.next_address();
        let end = self.used.checked_add(code.len())?;
        assert!(!self.is_inherited, "memory of another process");
        if end > POOL_SIZE {
            return None;
        }
        // SAFETY: the range is inside the writable view, and no code executes there yet.
        unsafe {
            std::ptr::copy_nonoverlapping(
                code.as_ptr(),
                self.views.writable().add(self.used),
                code.len(),
            )
        };
        self.used = end.next_multiple_of(16).min(POOL_SIZE);
        Some(address)
    }

    /// Removes all code. The caller must not run any of it again.
    ///
    /// # Errors
    /// As [`Pool::new`]; the pool is then unchanged.
    pub fn clear(&mut self) -> io::Result<()> {
        self.renew(0)
    }

    /// In a forked child: the memory is the parent's.
    pub fn inherit(&mut self) {
        self.is_inherited = true;
    }

    /// Makes sure that the memory is this process's own. To be called before code is appended.
    ///
    /// # Errors
    /// As [`Pool::new`]; the memory is then still the parent's.
    pub fn make_own(&mut self) -> io::Result<()> {
        if self.is_inherited { self.renew(self.used) } else { Ok(()) }
    }

    /// Puts fresh memory under both views, with the first `keep` bytes of the old.
    fn renew(&mut self, keep: usize) -> io::Result<()> {
        self.views.renew(keep)?;
        self.used = keep;
        self.is_inherited = false;
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let start = self.views.executable() as usize;
        if let Some(view) = VIEWS.iter().find(|view| view.load(Ordering::Acquire) == start) {
            view.store(0, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(address: u64) -> u32 {
        // SAFETY: the tests put functions there: mov eax, N; ret.
        unsafe { std::mem::transmute::<u64, extern "C" fn() -> u32>(address)() }
    }

    fn mov(value: u8) -> [u8; 6] {
        [0xb8, value, 0, 0, 0, 0xc3]
    }

    #[test]
    fn code_runs_and_a_cleared_pool_starts_again() {
        let mut pool = Pool::new().unwrap();
        let five = pool.append(&mov(5)).unwrap();
        assert!(contains(five) && contains(five + 5) && !contains(five + POOL_SIZE as u64));
        assert_eq!(call(five), 5);
        pool.clear().unwrap();
        assert_eq!(pool.append(&mov(6)), Some(five));
        assert_eq!(call(five), 6);
        assert_eq!(pool.append(&vec![0; POOL_SIZE]), None);
    }

    #[test]
    fn a_forked_child_runs_in_memory_of_its_own() {
        let mut pool = Pool::new().unwrap();
        let five = pool.append(&mov(5)).unwrap();
        let six = pool.next_address();
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        // SAFETY: the child makes system calls and changes its own copy of the pool, then exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            pool.inherit();
            let read = || std::io::Read::read(&mut &theirs, &mut [0]).is_ok();
            let known = read() && call(five) == 5;
            let appended = pool.make_own().is_ok() && pool.append(&mov(7)) == Some(six);
            let right = known && appended && read() && call(five) == 5 && call(six) == 7;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!right)) };
        }
        // The child reads twice: after this process has appended, and after it has cleared.
        assert_eq!(pool.append(&mov(10)), Some(six));
        std::io::Write::write(&mut &ours, &[0]).unwrap();
        pool.clear().unwrap();
        pool.append(&mov(8)).unwrap();
        pool.append(&mov(9)).unwrap();
        std::io::Write::write(&mut &ours, &[0]).unwrap();
        let mut status = 0;
        // SAFETY: a system call with a pointer to a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!((call(five), call(six)), (8, 9));
    }
}
