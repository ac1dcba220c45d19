//! The write-protected pages, and the system call that protects them.
//!
//! How many there are in the whole process is also kept in an atomic word: most guests never have any, and the ways that
//! ask are hot.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use dynasour_guest::space::PAGE;
use nix::sys::mman::ProtFlags;

use crate::entry::{self, Call};

/// Each guarded page may cost the kernel a mapping, of which a process has 65,530.
const LIMIT: usize = 16_384;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Is no page guarded?
pub fn none() -> bool {
    COUNT.load(Ordering::Acquire) == 0
}

/// Addresses of the guarded pages.
#[derive(Debug, Default)]
pub struct Guards {
    pages: BTreeSet<u64>,
}

impl Guards {
    pub fn contains(&self, page: u64) -> bool {
        self.pages.contains(&page)
    }

    pub fn pages(&self) -> impl Iterator<Item = u64> {
        self.pages.iter().copied()
    }

    /// Those in `range`.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        // A range that begins inside a page means all of it.
        let start = range.start & !(PAGE - 1);
        self.pages.range(start..range.end.max(start)).copied()
    }

    /// Takes the right to write away from `page`, of which the guest has `prot`. False if that cannot be.
    pub fn take(&mut self, page: u64, prot: ProtFlags) -> bool {
        if self.pages.len() >= LIMIT || !protect(page, prot - ProtFlags::PROT_WRITE) {
            return false;
        }
        self.insert(page);
        true
    }

    /// Gives it back.
    pub fn give_back(&mut self, page: u64, prot: ProtFlags) {
        if self.remove(page) {
            // Fails only where the mapping has gone.
            protect(page, prot);
        }
    }

    /// The guest's own call has replaced the protections in `range`.
    pub fn lose(&mut self, range: Range<u64>) {
        let lost: Vec<u64> = self.within(range).collect();
        for page in lost {
            self.remove(page);
        }
    }

    fn insert(&mut self, page: u64) {
        if self.pages.insert(page) {
            COUNT.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn remove(&mut self, page: u64) -> bool {
        let was = self.pages.remove(&page);
        if was {
            COUNT.fetch_sub(1, Ordering::AcqRel);
        }
        was
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        COUNT.fetch_sub(self.pages.len(), Ordering::AcqRel);
    }
}

/// mprotect keeps a page's protection key.
fn protect(page: u64, prot: ProtFlags) -> bool {
    let call = Call::new(libc::SYS_mprotect, &[page, PAGE, prot.bits() as u64]);
    // SAFETY: a page of the guest's, to which it gets no rights that it did not ask for.
    unsafe { entry::raw(&call) == 0 }
}
