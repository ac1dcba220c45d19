//! The code cache: memory for generated code, seen through two mappings ([`Views`]).
//!
//! **Data.** The *executable view* (read and execute) lies low ([`Layout`])
//! where that is free, so that generated code reaches guest images with 32-bit displacements
//! (docs/design.md, "Running a guest"). The *writable view* (read and write) lies wherever the
//! kernel puts it. Hot code is allocated upwards from the start, cold code (exits) downwards from
//! the end. The cache is full when they would meet.
//!
//! **Invariants.** (1) No page is both writable and executable. (2) Code that threads may be
//! executing is only changed by one store within eight aligned bytes, by [`writer`]. (3) The cache
//! frees nothing by itself: the memory of removed blocks is used again for blocks of their size
//! (`blocks/removal.rs`), and [`Cache::flush`] drops everything but the stubs.
//!
//! **Who calls.** The emitter, under its lock. Functions that say so may also be called in a signal
//! handler.
//!
//! Example: a fragment has 200 bytes of hot and 90 bytes of cold code. The emitter takes a
//! [`Cache::mark`], allocates both parts and copies the bytes there. If the cold part does not fit,
//! [`Cache::rewind`] gives the hot part back.
//!
//! The cache is flushed when it is full. Dynamo also flushes it when many new fragments come in a
//! short time, so that those of a new phase stand together. Measured on gcc's compiler, which makes
//! 103,000 blocks, that gains nothing: 1.31 s without a flush; 1.31 s with one, after which 57,000
//! blocks are copied again; 3.2 s with 25.

pub(crate) mod words;
pub(crate) mod writer;

use crate::asm::{Asm, Assembler, Placed};
use dynasour_guest::space::{Layout, Views};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use writer::Permit;

/// The executable view ends at or below this address when it can be placed low, which 32-bit displacements
/// reach.
const LAST: usize = 0x7fff_0000;
/// Bytes between the addresses that are tried (guess; smaller steps try more addresses).
const STEP: usize = 16 << 20;
/// Bytes of a line of the processor's caches, where stubs begin.
const LINE: usize = 64;
/// Bytes of the largest cache: it leaves room below 2 GiB to images and to the guest.
pub const MAX_SIZE: usize = 512 << 20;

/// The addresses that a cache of `size` bytes and its tables take where they are free.
pub fn low_range(size: usize) -> Range<u64> {
    // Bytes for the tables behind the cache (guess: twice what they take).
    const TABLES: usize = 32 << 20;
    let size = (size.clamp(4096, MAX_SIZE).next_multiple_of(STEP) + TABLES) as u64;
    let start = Layout::current().cache(size);
    start..start + size
}

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
    views: Views,
    /// Where the executable view starts.
    rx: usize,
    /// Where the writable view starts.
    rw: *mut u8,
    size: usize,
    /// Where the stubs end and fragments may begin.
    floor: usize,
    hot: usize,
    cold: usize,
}

// SAFETY: the views are plain shared memory owned by this struct; writes go through `&mut self` or
// single atomic stores.
unsafe impl Send for Cache {}
// SAFETY: the views are plain shared memory owned by this struct; `&self` only offers atomic
// stores.
unsafe impl Sync for Cache {}

impl Cache {
    /// Maps a cache of `size` bytes (rounded up to pages, at most [`MAX_SIZE`]).
    pub fn new(size: usize) -> Result<Cache, CacheError> {
        let size = size.clamp(4096, MAX_SIZE).next_multiple_of(4096);
        let places = (low_range(size).start as usize..=LAST - size).step_by(STEP);
        let views = Views::new(size, places)?;
        let (rx, rw) = (views.executable() as usize, views.writable());
        Ok(Cache { views, rx, rw, size, floor: 0, hot: 0, cold: size })
    }

    /// The addresses of the executable view.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.rx as u64..(self.rx + self.size) as u64
    }

    /// The addresses of both views.
    pub fn memory(&self) -> [std::ops::Range<u64>; 2] {
        let writable = self.rw as u64;
        [self.range(), writable..writable + self.size as u64]
    }

    /// Bytes of hot and of cold code in use (stubs count as hot).
    pub fn used(&self) -> (usize, usize) {
        (self.hot, self.size - self.cold)
    }

    /// Room for `bytes` of hot code aligned to `align`; returns its address in the executable view.
    pub fn alloc_hot(&mut self, bytes: usize, align: usize) -> Result<u64, CacheError> {
        self.alloc_hot_behind(bytes, align, 0)
    }

    /// Room for `bytes` of hot code, `offset` bytes behind a multiple of `align`.
    pub fn alloc_hot_behind(
        &mut self,
        bytes: usize,
        align: usize,
        offset: usize,
    ) -> Result<u64, CacheError> {
        let start = self.hot.saturating_sub(offset).next_multiple_of(align) + offset;
        let end =
            start.checked_add(bytes).filter(|end| *end <= self.cold).ok_or(CacheError::Full)?;
        self.hot = end;
        Ok((self.rx + start) as u64)
    }

    /// Room for `bytes` of hot code at the first acceptable address. At least one of eight
    /// consecutive addresses must be acceptable.
    pub fn alloc_hot_where(
        &mut self,
        bytes: usize,
        acceptable: impl Fn(u64) -> bool,
    ) -> Result<u64, CacheError> {
        let here = self.hot;
        let start = (here..here + 8).find(|at| acceptable((self.rx + at) as u64)).unwrap_or(here);
        let end =
            start.checked_add(bytes).filter(|end| *end <= self.cold).ok_or(CacheError::Full)?;
        self.hot = end;
        Ok((self.rx + start) as u64)
    }

    /// Room for `bytes` of cold code aligned to 16; returns its address in the executable view.
    pub fn alloc_cold(&mut self, bytes: usize) -> Result<u64, CacheError> {
        let start = self
            .cold
            .checked_sub(bytes)
            .map(|s| s & !15)
            .filter(|s| *s >= self.hot)
            .ok_or(CacheError::Full)?;
        self.cold = start;
        Ok((self.rx + start) as u64)
    }

    /// Takes room for stubs and writes them there.
    pub(crate) fn put_stubs(&mut self, code: Asm<u64>) -> Result<Placed, CacheError> {
        let base = self.alloc_hot(code.here(), LINE)?;
        let (bytes, placed) = code.finish_at(base);
        self.write(base, &bytes);
        Ok(placed)
    }

    /// A point to return to when a fragment turns out not to fit.
    pub fn mark(&self) -> (usize, usize) {
        (self.hot, self.cold)
    }

    /// Gives back everything allocated since `mark`.
    pub fn rewind(&mut self, mark: (usize, usize)) {
        (self.hot, self.cold) = mark;
    }

    /// Makes everything that was allocated so far permanent: the stubs.
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
        // SAFETY: `offset` checked the range against the mapping; the source is an ordinary slice
        // elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.rw.add(offset), bytes.len()) };
    }

    /// Makes the 32-bit field at `field`, which lies within eight aligned bytes, hold `value`, in
    /// one store: a thread that executes it sees the old or the new value (Intel SDM vol. 3,
    /// 9.1.1). Async-signal-safe.
    pub(crate) fn patch(&self, _: &Permit, field: u64, value: u32) {
        self.patch_bits(field, u64::from(value), 32);
    }

    /// Makes the byte at `address` be `value`, in one store.
    pub(crate) fn patch_byte(&self, _: &Permit, address: u64, value: u8) {
        self.patch_bits(address, u64::from(value), 8);
    }

    fn patch_bits(&self, address: u64, value: u64, bits: u32) {
        let shift = 8 * (address % 8) as u32;
        assert!(shift + bits <= 64);
        let offset = self.offset(address & !7, 8);
        let (value, mask) = (value << shift, u64::MAX >> (64 - bits) << shift);
        // SAFETY: in range and aligned; code is only read through the other view, by instruction
        // fetch.
        let word = unsafe { AtomicU64::from_ptr(self.rw.add(offset).cast()) };
        // A signal handler may patch another field of the same word in between.
        let patched =
            word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |old| Some(old & !mask | value));
        debug_assert!(patched.is_ok());
    }

    /// Replaces the instruction of eight bytes at `address`, which is a multiple of eight, in one
    /// store (AMD64 manual vol. 2, 7.6.1, "a naturally aligned quadword"). Async-signal-safe.
    pub(crate) fn patch_instruction(&self, _: &Permit, address: u64, bytes: [u8; 8]) {
        assert!(address.is_multiple_of(8));
        let offset = self.offset(address, 8);
        // SAFETY: in range and aligned; code is only read through the other view, by instruction
        // fetch.
        let word = unsafe { AtomicU64::from_ptr(self.rw.add(offset).cast()) };
        word.store(u64::from_le_bytes(bytes), Ordering::Release);
    }

    /// Replaces the two opcode bytes at `address`, which need not be aligned: no thread may be
    /// executing there.
    pub(crate) fn patch_opcode(&self, _: &Permit, address: u64, bytes: [u8; 2]) {
        let offset = self.offset(address, 2);
        // SAFETY: in range; no Rust reference to the bytes exists, and the caller keeps threads
        // away from them.
        unsafe { self.rw.add(offset).cast::<[u8; 2]>().write_volatile(bytes) };
    }

    /// The code at `address` of the executable view.
    pub fn read(&self, address: u64, len: usize) -> &[u8] {
        let offset = self.offset(address, len);
        // SAFETY: in range and mapped readable; while `&self` is borrowed only single fields are
        // patched.
        unsafe { std::slice::from_raw_parts(self.rw.add(offset), len) }
    }

    fn offset(&self, address: u64, len: usize) -> usize {
        let offset = (address as usize).wrapping_sub(self.rx);
        assert!(offset <= self.size && len <= self.size - offset, "address outside the code cache");
        offset
    }

    /// In a forked child: fresh memory over both views, nothing allocated. The parent's cache is
    /// not touched.
    pub fn replace_after_fork(&mut self) -> Result<(), CacheError> {
        self.views.renew(0)?;
        (self.floor, self.hot, self.cold) = (0, 0, self.size);
        Ok(())
    }
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
        let own = format!("{:08x}-", cache.range().start);
        assert!(maps.lines().any(|l| l.starts_with(&own) && l.contains("r-xs")), "{maps}");
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
