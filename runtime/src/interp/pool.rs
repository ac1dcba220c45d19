//! Executable memory of the interpreter's own: one memfd mapped twice, writable and executable, never both.
//!
//! Code is appended and never changed. A forked child shares the memory at first: [`Pool::unshare_after_fork`] copies
//! it to memory of its own at the same addresses. So that the parent, which may run on meanwhile, does not pull
//! the code away, emptying a pool takes fresh memory too.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
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

const WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const EXECUTE: i32 = libc::PROT_READ | libc::PROT_EXEC;

/// Memory for a pool, not mapped yet.
fn memory() -> io::Result<OwnedFd> {
    const NAME: &CStr = c"dynasour-natives";
    // SAFETY: system calls with a valid name and, as soon as there is one, a descriptor that is owned here.
    unsafe {
        let descriptor = libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC);
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        let descriptor = OwnedFd::from_raw_fd(descriptor);
        match libc::ftruncate(descriptor.as_raw_fd(), POOL_SIZE as libc::off_t) {
            0 => Ok(descriptor),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn map(memory: &OwnedFd, protection: i32, at: *mut u8) -> io::Result<*mut u8> {
    let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED };
    // SAFETY: a fixed mapping only ever replaces a view that this pool owns.
    let p = unsafe { libc::mmap(at.cast(), POOL_SIZE, protection, libc::MAP_SHARED | fixed, memory.as_raw_fd(), 0) };
    if p == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(p.cast()) }
}

/// Drops a view.
fn unmap(view: *mut u8) {
    // SAFETY: it is a pool's own, and nobody runs or writes code in it any more.
    unsafe { libc::munmap(view.cast(), POOL_SIZE) };
}

impl Pool {
    /// An empty pool.
    ///
    /// # Errors
    /// What memfd_create, ftruncate or mmap said, or [`io::ErrorKind::QuotaExceeded`] if there are eight pools already.
    pub fn new() -> io::Result<Pool> {
        let memory = memory()?;
        let writable = map(&memory, WRITE, std::ptr::null_mut())?;
        let executable = map(&memory, EXECUTE, std::ptr::null_mut()).inspect_err(|_| unmap(writable))?;
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
    ///
    /// # Errors
    /// As [`Pool::new`]; the pool is then as it was.
    pub fn clear(&mut self) -> io::Result<()> {
        self.renew(0)
    }

    /// In a forked child: memory of its own under both views, with the same code.
    ///
    /// # Errors
    /// As [`Pool::new`]; the pool then still shares the parent's memory and must not be used.
    pub fn unshare_after_fork(&mut self) -> io::Result<()> {
        self.renew(self.used)
    }

    /// Fresh memory at the same executable address, with the first `keep` bytes of the old.
    fn renew(&mut self, keep: usize) -> io::Result<()> {
        let descriptor = memory()?;
        let mapped = map(&descriptor, WRITE, std::ptr::null_mut()).and_then(|writable| {
            // SAFETY: both ranges are mapped, and nobody changes code that has been appended.
            unsafe { std::ptr::copy_nonoverlapping(self.executable, writable, keep) };
            let executable = map(&descriptor, EXECUTE, self.executable);
            if executable.is_err() {
                unmap(writable);
            }
            executable.map(|_| writable)
        });
        unmap(std::mem::replace(&mut self.writable, mapped?));
        self.used = keep;
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let start = self.executable as usize;
        if let Some(view) = VIEWS.iter().find(|view| view.load(Ordering::Acquire) == start) {
            view.store(0, Ordering::Release);
        }
        unmap(self.writable);
        unmap(self.executable);
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
    fn a_forked_child_goes_on_in_memory_of_its_own() {
        let mut pool = Pool::new().unwrap();
        let five = pool.append(&mov(5)).unwrap();
        let six = pool.next_address();
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        // SAFETY: the child makes system calls and changes its own copy of the pool, then exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let unshared = pool.unshare_after_fork().is_ok();
            let appended = pool.append(&mov(7)) == Some(six);
            let read = std::io::Read::read(&mut &theirs, &mut [0]).is_ok();
            let right = unshared && appended && read && call(five) == 5 && call(six) == 7;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!right)) };
        }
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
