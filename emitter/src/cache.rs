//! The code cache: W^X memory for generated code, seen through two mappings of one memory file.
//!
//! The *executable view* (read + execute) lies low, in `[0x2000_0000, 0x4000_0000)` where that is free, so that
//! generated code reaches guest images with 32-bit displacements (DESIGN section 6). The *writable view* (read +
//! write) lies wherever the kernel likes. No page is ever both writable and executable, and the descriptor is
//! closed at once, so nobody can open a third view.
//!
//! Hot code is bump-allocated upwards from the start, cold code (exits) downwards from the end; the cache is full
//! when they would meet. There is no freeing of single fragments: [`Cache::flush`] drops everything but the stubs.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// The lowest address tried for the executable view.
const LOW: usize = 0x2000_0000;
/// The executable view ends at or below this address when it can be placed low.
const HIGH: usize = 0x4000_0000;
/// The largest cache.
pub const MAX_SIZE: usize = 512 << 20;

/// Why the cache could not be made or an allocation not served.
#[derive(thiserror::Error, Debug)]
pub enum CacheError {
    /// The kernel refused memory.
    #[error("cannot map the code cache: {0}")]
    Map(#[from] io::Error),
    /// No room is left: flush.
    #[error("the code cache is full")]
    Full,
}

/// The two views of the cache and its allocation pointers (offsets from the start of a view).
pub struct Cache {
    rx: usize,
    rw: *mut u8,
    size: usize,
    /// Where the stubs end and fragments may begin.
    floor: usize,
    hot: usize,
    cold: usize,
}

// SAFETY: the views are plain shared memory owned by this struct; writes go through `&mut self` or single atomic stores.
unsafe impl Send for Cache {}
// SAFETY: as above; `&self` only offers atomic stores.
unsafe impl Sync for Cache {}

impl Cache {
    /// Maps a cache of `size` bytes (rounded up to pages, at most [`MAX_SIZE`]).
    pub fn new(size: usize) -> Result<Cache, CacheError> {
        let size = size.clamp(4096, MAX_SIZE).next_multiple_of(4096);
        let fd = memory_file(size)?;
        let mapped = map_executable(fd, size).and_then(|rx| Ok((rx, map_writable(fd, size, None)?)));
        // SAFETY: `fd` is ours and not used afterwards; the mappings keep the memory alive.
        unsafe { libc::close(fd) };
        let (rx, rw) = mapped?;
        Ok(Cache { rx, rw, size, floor: 0, hot: 0, cold: size })
    }

    /// The addresses of the executable view.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.rx as u64..(self.rx + self.size) as u64
    }

    /// Bytes of hot and of cold code in use (stubs count as hot).
    pub fn used(&self) -> (usize, usize) {
        (self.hot, self.size - self.cold)
    }

    /// Room for `bytes` of hot code aligned to `align`; returns its address in the executable view.
    pub fn alloc_hot(&mut self, bytes: usize, align: usize) -> Result<u64, CacheError> {
        let start = self.hot.next_multiple_of(align);
        let end = start.checked_add(bytes).filter(|end| *end <= self.cold).ok_or(CacheError::Full)?;
        self.hot = end;
        Ok((self.rx + start) as u64)
    }

    /// Room for `bytes` of cold code aligned to 16; returns its address in the executable view.
    pub fn alloc_cold(&mut self, bytes: usize) -> Result<u64, CacheError> {
        let start = self.cold.checked_sub(bytes).map(|s| s & !15).filter(|s| *s >= self.hot).ok_or(CacheError::Full)?;
        self.cold = start;
        Ok((self.rx + start) as u64)
    }

    /// A point to return to when a fragment turns out not to fit.
    pub fn mark(&self) -> (usize, usize) {
        (self.hot, self.cold)
    }

    /// Gives back everything allocated since `mark`.
    pub fn rewind(&mut self, mark: (usize, usize)) {
        (self.hot, self.cold) = mark;
    }

    /// Declares all that is allocated so far permanent (the stubs).
    pub fn set_floor(&mut self) {
        self.floor = self.hot;
    }

    /// Drops all code above the floor.
    pub fn flush(&mut self) {
        self.hot = self.floor;
        self.cold = self.size;
    }

    /// Copies code to `address` of the executable view, which must have been allocated.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        let offset = self.offset(address, bytes.len());
        // SAFETY: `offset` checked the range against the mapping; the source is an ordinary slice elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.rw.add(offset), bytes.len()) };
    }

    /// Makes the rel32 field at `field`, which lies within eight aligned bytes, lead to `target`: in one store, so that
    /// whoever executes it sees the old or the new target (Intel SDM vol. 3, 9.1.1). Async-signal-safe.
    pub fn patch_rel32(&self, field: u64, target: u64) {
        let shift = 8 * (field % 8);
        assert!(shift <= 32);
        let offset = self.offset(field & !7, 8);
        let rel = u64::from(target.wrapping_sub(field + 4) as u32) << shift;
        // SAFETY: in range and aligned; code is only read through the other view, by instruction fetch.
        let word = unsafe { AtomicU64::from_ptr(self.rw.add(offset).cast()) };
        // A signal handler may patch another field of the same word in between.
        let patched =
            word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |old| Some(old & !(0xffff_ffff << shift) | rel));
        debug_assert!(patched.is_ok());
    }

    /// Replaces the two opcode bytes at `address`, which need not be aligned: nobody may be executing there.
    pub fn patch_opcode(&self, address: u64, bytes: [u8; 2]) {
        let offset = self.offset(address, 2);
        // SAFETY: in range; no Rust reference to the bytes exists, and the caller keeps threads away from them.
        unsafe { self.rw.add(offset).cast::<[u8; 2]>().write_volatile(bytes) };
    }

    /// The code at `address` of the executable view.
    pub fn read(&self, address: u64, len: usize) -> &[u8] {
        let offset = self.offset(address, len);
        // SAFETY: in range and mapped readable; nobody writes while `&self` is borrowed but for single patched fields.
        unsafe { std::slice::from_raw_parts(self.rw.add(offset), len) }
    }

    fn offset(&self, address: u64, len: usize) -> usize {
        let offset = (address as usize).wrapping_sub(self.rx);
        assert!(offset <= self.size && len <= self.size - offset, "address outside the code cache");
        offset
    }

    /// In a forked child: fresh memory over both views, nothing allocated. The parent's cache is not touched.
    pub fn replace_after_fork(&mut self) -> Result<(), CacheError> {
        let fd = memory_file(self.size)?;
        let prot = libc::PROT_READ | libc::PROT_EXEC;
        // SAFETY: replaces exactly our own executable view.
        let rx = unsafe { libc::mmap(self.rx as *mut _, self.size, prot, libc::MAP_SHARED | libc::MAP_FIXED, fd, 0) };
        let rx_error = (rx == libc::MAP_FAILED).then(io::Error::last_os_error);
        let rw = map_writable(fd, self.size, Some(self.rw));
        // SAFETY: `fd` is ours and not used afterwards.
        unsafe { libc::close(fd) };
        if let Some(e) = rx_error {
            return Err(e.into());
        }
        rw?;
        (self.floor, self.hot, self.cold) = (0, 0, self.size);
        Ok(())
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: both views are ours; whoever drops the cache has left the code in it.
        unsafe {
            libc::munmap(self.rx as *mut _, self.size);
            libc::munmap(self.rw.cast(), self.size);
        }
    }
}

fn memory_file(size: usize) -> io::Result<libc::c_int> {
    // SAFETY: plain system calls on a descriptor of our own.
    unsafe {
        let fd = libc::memfd_create(c"dynasour-cache".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::ftruncate(fd, size as libc::off_t) != 0 {
            let error = io::Error::last_os_error();
            libc::close(fd);
            return Err(error);
        }
        Ok(fd)
    }
}

fn map_executable(fd: libc::c_int, size: usize) -> io::Result<usize> {
    let step = 16 << 20;
    let low = (LOW..=HIGH.saturating_sub(size)).step_by(step);
    for (hint, flag) in low.map(|a| (a, libc::MAP_FIXED_NOREPLACE)).chain([(0, libc::MAP_32BIT), (0, 0)]) {
        // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping; the other attempts let the kernel choose.
        let p = unsafe {
            libc::mmap(hint as *mut _, size, libc::PROT_READ | libc::PROT_EXEC, libc::MAP_SHARED | flag, fd, 0)
        };
        if p != libc::MAP_FAILED {
            return Ok(p as usize);
        }
    }
    Err(io::Error::last_os_error())
}

fn map_writable(fd: libc::c_int, size: usize, at: Option<*mut u8>) -> io::Result<*mut u8> {
    let (hint, fixed) = at.map_or((std::ptr::null_mut(), 0), |p| (p, libc::MAP_FIXED));
    // SAFETY: with an address, it replaces our own writable view; without, the kernel chooses.
    let p =
        unsafe { libc::mmap(hint.cast(), size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | fixed, fd, 0) };
    if p == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(p.cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_and_cold_meet() {
        let mut cache = Cache::new(8192).unwrap();
        let hot = cache.alloc_hot(5000, 16).unwrap();
        let cold = cache.alloc_cold(3000).unwrap();
        assert!(hot + 5000 <= cold);
        assert!(matches!(cache.alloc_hot(400, 16), Err(CacheError::Full)));
        assert!(matches!(cache.alloc_cold(400), Err(CacheError::Full)));
        cache.flush();
        assert_eq!(cache.alloc_hot(5000, 16).unwrap(), hot);
    }

    #[test]
    fn no_page_is_writable_and_executable() {
        let mut cache = Cache::new(1 << 20).unwrap();
        let code = cache.alloc_hot(16, 16).unwrap();
        cache.write(code, &[0xb8, 42, 0, 0, 0, 0xc3]);
        // SAFETY: the bytes are `mov eax, 42; ret`.
        let f: extern "sysv64" fn() -> u32 = unsafe { std::mem::transmute(code) };
        assert_eq!(f(), 42);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps.lines().any(|l| l.contains("dynasour-cache") && l.contains("r-xs")));
        assert!(!maps.lines().any(|l| l.split_whitespace().nth(1).unwrap().contains("wx")));
    }

    #[test]
    fn replaced_after_fork_is_empty_and_at_the_same_place() {
        let mut cache = Cache::new(65536).unwrap();
        let a = cache.alloc_hot(64, 16).unwrap();
        cache.write(a, &[0xc3; 64]);
        cache.replace_after_fork().unwrap();
        let b = cache.alloc_hot(64, 16).unwrap();
        assert_eq!(a, b);
        assert_eq!(cache.read(b, 64), &[0; 64]);
    }
}
