//! The guarded (write-protected) pages, and the system call that protects them.
//!
//! Data: [`Guards`], a field of the state of [`super::CodePages`], under its lock. An atomic word
//! holds the number of guarded pages of the whole process, because hot code asks whether there are
//! any, and most guests never have one.
//!
//! Invariant: each page in [`Guards`] is write-protected in the kernel, though the guest has the
//! right to write it.
//!
//! Example: code is made from a page that the guest mapped RWX. The page is protected R-X and noted
//! here with the moment; a store of the guest's faults, and [`super::transaction`] opens the page.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use dynasour_guest::decode::Moment;
use dynasour_guest::space::PAGE;
use nix::sys::mman::ProtFlags;

use crate::host_call::{Call, raw};

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
    /// The moment at which each page was guarded.
    pages: BTreeMap<u64, Moment>,
    /// The moment of the last guard or publication.
    last: Moment,
    /// The moment at which a change of mappings was published last.
    published: Moment,
}

impl Guards {
    pub fn contains(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    /// The moment since which the page has been guarded; none if it is not guarded.
    pub fn since(&self, page: u64) -> Option<Moment> {
        self.pages.get(&page).copied()
    }

    /// The present moment: whatever is guarded or published from now on has a later one.
    pub fn now(&self) -> Moment {
        self.last
    }

    pub fn pages(&self) -> impl Iterator<Item = u64> {
        self.pages.keys().copied()
    }

    /// A change of mappings is published: bytes that were fetched until now may be old.
    pub fn publish(&mut self) {
        self.last.0 += 1;
        self.published = self.last;
    }

    /// Was a change of mappings published after `since`?
    pub fn has_published(&self, since: Moment) -> bool {
        self.published > since
    }

    /// The guarded pages in `range`.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        // A range that begins inside a page means all of it.
        let start = range.start & !(PAGE - 1);
        self.pages.range(start..range.end.max(start)).map(|(page, _)| *page)
    }

    /// Takes the right to write away from `page`, on which the guest has the rights `prot`. False
    /// if the kernel refuses.
    pub fn take(&mut self, page: u64, prot: ProtFlags) -> bool {
        // Without the right to read, the kernel would make the page execute-only where there are
        // protection keys (pkeys(7)); natively the guest can read what it can write.
        let guarded = (prot - ProtFlags::PROT_WRITE) | ProtFlags::PROT_READ;
        if self.pages.len() >= LIMIT || !protect(page, guarded) {
            return false;
        }
        self.insert(page);
        true
    }

    /// Gives the right to write back.
    pub fn give_back(&mut self, page: u64, prot: ProtFlags) {
        if self.remove(page) {
            // It fails only if the page is no longer mapped.
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
        self.last.0 += 1;
        if self.pages.insert(page, self.last).is_none() {
            COUNT.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn remove(&mut self, page: u64) -> bool {
        let was = self.pages.remove(&page).is_some();
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

/// mprotect keeps a page's protection key, except that a page with PROT_EXEC alone gets the key of
/// execute-only memory.
fn protect(page: u64, prot: ProtFlags) -> bool {
    let call = Call::new(libc::SYS_mprotect, &[page, PAGE, prot.bits() as u64]);
    // SAFETY: a page of the guest's, to which it gets no rights that it did not ask for.
    unsafe { raw(&call) == 0 }
}
