//! Which pages of guest code any thread has read, so that a change of other pages disturbs no
//! thread.
//!
//! Data: [`Footprint`], one for the process, a set of page numbers behind its own lock;
//! [`NotedCode`], one for each thread, through which that thread's translators read guest code.
//!
//! Invariant: a page is noted before it is read. So when a page changes and [`Footprint::forget`]
//! is called afterwards, a read before the change has been noted and `forget` reports it. A read
//! after the change sees the new bytes, and notes the page again.
//!
//! Any thread may call this. Its lock is number 8 in the order of `crate::sync`.
//!
//! Example: a thread copies a block at 0x1000, which notes page 1. The guest stores to page 2,
//! which holds data only: `forget(0x2000..0x3000)` returns false, so no thread is told. After a
//! store to page 1 `forget` returns true, and the other threads drop their blocks made from it.

use crate::changes::CodePages;
use crate::interp::ExecutableCode;
use crate::sync::lock;
use dynasour_guest::decode::{Fetch, Moment, Watched};
use rustc_hash::FxHashSet;
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Bits of an address below its page number (manual: SDM volume 3A, pages of 4 KiB).
const PAGE_SHIFT: u32 = 12;

/// The pages that were read. They are named by their numbers.
#[derive(Debug, Default)]
pub struct Footprint {
    pages: Mutex<FxHashSet<u64>>,
    /// The number of calls of [`Footprint::forget`] that have removed a page.
    forgotten: AtomicU64,
}

impl Footprint {
    /// Calls `f` with the lock held: no page is noted or forgotten meanwhile.
    pub fn while_locked(&self, f: impl FnOnce()) {
        let _pages = lock(&self.pages);
        f();
    }

    /// The bytes of `range` have changed: forgets its pages, and returns whether any thread had
    /// read one of them.
    pub fn forget(&self, range: &Range<u64>) -> bool {
        if range.is_empty() {
            return false;
        }
        let gone = range.start >> PAGE_SHIFT..=(range.end - 1) >> PAGE_SHIFT;
        let mut pages = lock(&self.pages);
        let before = pages.len();
        if gone.end() - gone.start() > before as u64 {
            pages.retain(|page| !gone.contains(page));
        } else {
            gone.for_each(|page| {
                pages.remove(&page);
            });
        }
        let any = pages.len() != before;
        if any {
            self.forgotten.fetch_add(1, Ordering::SeqCst);
        }
        any
    }
}

/// Guest code as one thread's translators read it. Each page is noted before it is read.
#[derive(Debug)]
pub struct NotedCode {
    code: ExecutableCode,
    footprint: &'static Footprint,
    /// The page that was noted last, and the value of [`Footprint::forgotten`] at that time.
    /// Reading the same page again then needs no lock.
    last: Cell<(u64, u64)>,
}

impl NotedCode {
    /// All executable memory of the guest.
    pub fn new(footprint: &'static Footprint, pages: Arc<CodePages>) -> NotedCode {
        NotedCode { code: ExecutableCode::new(pages), footprint, last: Cell::new((u64::MAX, 0)) }
    }

    /// Up to eight bytes at `address` in memory that only calls can change, as read by `read`, if code at
    /// `pc` refers to them; see [`CodePages::is_known_constant`].
    pub fn constant_by(
        &self,
        pc: u64,
        (address, size): (u64, u32),
        read: fn(u64, u32) -> Option<u64>,
    ) -> Option<u64> {
        let range = address..address.checked_add(size.into())?;
        // Pages of data are not noted: they change often. What is constant is noted before it is read, and
        // may have changed until then.
        let is_constant = || self.code.is_known_constant(pc, range.clone());
        if !is_constant() {
            return None;
        }
        self.note(range.clone());
        if is_constant() { read(address, size) } else { None }
    }

    fn note(&self, range: Range<u64>) {
        let forgotten = self.footprint.forgotten.load(Ordering::SeqCst);
        for page in
            range.start >> PAGE_SHIFT..=range.end.saturating_sub(1).max(range.start) >> PAGE_SHIFT
        {
            if self.last.replace((page, forgotten)) != (page, forgotten) {
                lock(&self.footprint.pages).insert(page);
            }
        }
    }
}

impl Fetch for NotedCode {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        self.note(addr..addr.saturating_add(buf.len() as u64));
        self.code.fetch(addr, buf)
    }

    fn is_writable(&self, range: Range<u64>) -> bool {
        self.code.is_writable(range)
    }

    fn constant(&self, pc: u64, address: u64) -> Option<u64> {
        self.note(address..address.saturating_add(8));
        self.code.constant(pc, address)
    }

    fn word(&self, address: u64) -> Option<u64> {
        self.code.word(address)
    }

    fn moment(&self) -> Moment {
        self.code.moment()
    }

    fn watch(&self, range: Range<u64>, since: Moment) -> Watched {
        self.code.watch(range, since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_page_is_noted_until_it_is_forgotten() {
        let footprint: &'static Footprint = Box::leak(Box::default());
        let code = NotedCode::new(footprint, Arc::default());
        let function = a_read_page_is_noted_until_it_is_forgotten as *const () as u64;
        let page = function >> PAGE_SHIFT << PAGE_SHIFT;
        for _ in 0..2 {
            assert!(!footprint.forget(&(page..page + 4096)));
            assert_ne!(code.fetch(function, &mut [0; 8]), 0);
            assert!(!footprint.forget(&(0..page)));
            assert!(!footprint.forget(&(page + 8192..u64::MAX)));
            assert!(footprint.forget(&(0..u64::MAX)));
        }
        code.fetch(page - 4, &mut [0; 8]);
        assert!(footprint.forget(&(page - 1..page)) && footprint.forget(&(page..page + 1)));
    }
}
