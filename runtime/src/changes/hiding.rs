//! Hides patches from the guest: where the processor has protection keys, pages with patches can be
//! executed but not read.
//!
//! ```text
//!            first patch              a load, or a call that reads it
//!  ordinary ─────────────► hidden ─────────────────────────────────────► patches taken back
//!   ▲   ▲                     │                                            │         │
//!   │   └─────────────────────┘                           up to 15 loads   │         │
//!   │     its code changes, or its traces are dropped                      │         │
//!   └──────────────────────────────────────────────────────────────────────┘         ▼
//!                                                     16 loads, or one call: no patches any more
//! ```
//!
//! The *key* is a protection key that the host allocates. Threads start with rights that deny every
//! key but 0 (the kernel's `Documentation/core-api/protection-keys.rst`), and handlers of signals
//! and threads of `clone` get such rights, too. So each thread of a guest that does not use keys
//! is denied the key already, and no thread's rights are changed. Keys do not restrict the fetch of
//! instructions.
//!
//! A page is *read* while it is hidden in two ways. Both take its patches back first, so that the
//! guest's own bytes are read, and all threads can read the page from then on:
//!
//! * A load faults: in guest code in place, in the interpreter, or in a trace, which leaves to the
//!   interpreter. The runtime then calls [`answered`], and the instruction is executed again. After
//!   [`MOST_READS`] of these a page gets no patches any more.
//! * A system call reads the page. The runtime calls [`show`] ([`super::inputs`]). That page gets
//!   no patches any more, so a patch that comes back cannot disturb a call that lasts.
//!
//! A page is hidden if it belongs to a private mapping of a file and nobody has written to it; the
//! pages of just-in-time compilers do not. This is read from `/proc`, so in a process without
//! `/proc` no further pages are patched. A guest that makes a call about keys of its
//! own turns hiding off for good, and gets all keys ([`stop`]). Patches stay then, and can be seen,
//! as without keys.
//!
//! Data: [`Hiding`], a part of the patches, behind their lock (number 8 in the order of
//! `crate::sync`); [`COUNT`], the number of hidden pages. Invariants: (1) A page has the key only
//! if it is in [`Hiding::hidden`]. (2) A hidden page has patches, or has had some that are out for
//! a while ([`super::patches::take_out`]), unless the kernel has refused to take the key from it. (3) A page is hidden before its first patch is written, and shown after
//! its last one is taken back, so no thread can read a patch of a hidden page. Without protection
//! keys no page is hidden, and each function returns at once.
//!
//! Called by threads outside guest code.
//!
//! Example: a loop at 0x401010 has a patch. The guest computes a checksum of its code. The load
//! from 0x401000 faults with the key 15; the patch is taken back, the page loses the key, and the
//! load reads the guest's bytes. When the runtime leads a thread to the loop's trace again, the
//! patch is written again and the page is hidden again.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use dynasour_guest::space::{PAGE, page_down};
use rustc_hash::{FxHashMap, FxHashSet};

use super::patches::{PATCHES, Patches};
use crate::host_call::{Call, raw};
use crate::memory::{self, FaultInfo};
use crate::protection_keys;
use crate::sync::lock;

/// Loads from a page after which it gets no patches any more (DESIGN 13: a guess; each read costs
/// two signals and a rewriting of the page's patches).
const MOST_READS: u32 = 16;
/// The most pages that are hidden (guess). Each may cost the kernel two mappings, of which a
/// process has 65,530.
const MOST_HIDDEN: usize = 4096;
/// `PKEY_DISABLE_ACCESS` (manual: pkey_alloc(2)).
const DISABLE_ACCESS: u64 = 1;
/// `mseal`, which the libc crate does not name (asm/unistd_64.h).
const SYS_MSEAL: i64 = 462;

/// How many pages are hidden.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Has there ever been a key?
static BEGUN: AtomicBool = AtomicBool::new(false);

/// The key of hidden pages.
#[derive(Clone, Copy, Debug)]
enum Key {
    /// Nothing was to be hidden yet.
    Untried,
    Held(u32),
    /// Nothing is hidden any more; the key that was held, if one was.
    Off(Option<u32>),
}

/// Which pages are hidden. See the module.
#[derive(Debug)]
pub(super) struct Hiding {
    key: Key,
    /// The pages that have the key, by their addresses.
    hidden: BTreeSet<u64>,
    /// How often each page was read by loads while it was hidden.
    reads: FxHashMap<u64, u32>,
    /// The pages that get no patches any more.
    exposed: FxHashSet<u64>,
}

/// What reads a hidden page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reader {
    Load,
    Call,
}

impl Hiding {
    pub(super) const fn new() -> Hiding {
        Hiding {
            key: Key::Untried,
            hidden: BTreeSet::new(),
            reads: FxHashMap::with_hasher(rustc_hash::FxBuildHasher),
            exposed: FxHashSet::with_hasher(rustc_hash::FxBuildHasher),
        }
    }

    /// Is a page of `range` to have no patches any more?
    pub(super) fn is_exposed(&self, range: &Range<u64>) -> bool {
        (page_down(range.start)..range.end)
            .step_by(PAGE as usize)
            .any(|page| self.exposed.contains(&page))
    }

    /// Can a page be hidden?
    pub(super) fn is_possible(&mut self) -> bool {
        if let Key::Untried = self.key {
            self.key = match allocate() {
                Some(key) => {
                    BEGUN.store(true, Ordering::SeqCst);
                    Key::Held(key)
                }
                None => Key::Off(None),
            };
        }
        matches!(self.key, Key::Held(_)) && self.hidden.len() < MOST_HIDDEN
    }

    /// Hides a page of code, if the kernel lets it be hidden. The caller has the exclusive right to
    /// change code and has found the page to be readable, executable, and not writable.
    pub(super) fn hide(&mut self, page: u64) {
        if self.is_possible()
            && let Key::Held(key) = self.key
            && protect(page, key)
        {
            self.hidden.insert(page);
            self.counted();
        }
    }

    /// Takes the key from the page, which has no patches, if it has the key.
    pub(super) fn unhide(&mut self, page: u64) {
        if self.hidden.contains(&page) && protect(page, 0) {
            self.hidden.remove(&page);
            self.counted();
        }
    }

    fn counted(&self) {
        COUNT.store(self.hidden.len(), Ordering::SeqCst);
    }

    /// Gives this thread the right to read hidden pages. For pages that the kernel does not let be
    /// shown.
    fn allow(&self) {
        if let Key::Held(key) | Key::Off(Some(key)) = self.key {
            protection_keys::write(protection_keys::read() & !(0b11 << (2 * key)));
        }
    }
}

impl Patches {
    /// A hidden page is read: takes its patches back.
    fn expose(&mut self, page: u64, reader: Reader) {
        let reads = self.hiding.reads.entry(page).or_default();
        *reads += 1;
        if *reads >= MOST_READS || reader == Reader::Call {
            self.hiding.exposed.insert(page);
        }
        self.take_back_in(&(page..page + PAGE), |_| true);
        // It has had no patches, if the kernel would not let it be shown before.
        self.hiding.unhide(page);
        if self.hiding.hidden.contains(&page) {
            self.hiding.allow();
        }
    }

    /// Exposes these pages. Can some of them be read that could not before?
    fn expose_all(&mut self, pages: &[u64], reader: Reader) -> bool {
        let before = self.hiding.hidden.len();
        pages.iter().for_each(|page| self.expose(*page, reader));
        self.hiding.hidden.len() < before
    }
}

/// Is a page hidden?
pub fn any() -> bool {
    COUNT.load(Ordering::SeqCst) != 0
}

/// The addresses of the hidden pages, in ascending order.
pub fn pages() -> Vec<u64> {
    if !any() {
        return Vec::new();
    }
    lock(&PATCHES).hiding.hidden.iter().copied().collect()
}

/// An access of the guest has faulted. If the reason is that the page is hidden, or was a moment
/// ago, makes it readable; the instruction is then to be executed again. A store to the page faults
/// again, as it does natively.
pub fn answered(fault: &FaultInfo) -> bool {
    if !BEGUN.load(Ordering::SeqCst) || !fault.is_denied_by_key() {
        return false;
    }
    let mut patches = lock(&PATCHES);
    let is_held = match patches.hiding.key {
        Key::Held(key) if key == fault.key => true,
        // The guest may have got this key since.
        Key::Off(Some(key)) if key == fault.key => !patches.hiding.hidden.is_empty(),
        _ => return false,
    };
    let page = page_down(fault.addr);
    if patches.hiding.hidden.contains(&page) {
        patches.expose(page, Reader::Load);
        return true;
    }
    // Another thread may have shown the page since the fault. No page is hidden or shown meanwhile.
    if !is_still_denied(fault) {
        return true;
    }
    if is_held {
        patches.hiding.allow();
    }
    is_held
}

/// Would a key deny the access that has faulted now? This thread's rights are the guest's.
fn is_still_denied(fault: &FaultInfo) -> bool {
    let tried = match fault.is_write() {
        // SAFETY: the guest has just tried to read there.
        false => unsafe { memory::load::<u8>(fault.addr) }.map(drop),
        // SAFETY: the guest has just tried to write there; this changes nothing.
        true => unsafe { memory::probe_write(fault.addr) },
    };
    tried.is_err() && memory::last_fault().is_denied_by_key()
}

/// A system call is about to read these ranges: shows the pages there. Returns whether one was
/// hidden that can be read now.
pub fn show(ranges: &[Range<u64>]) -> bool {
    if !any() || ranges.is_empty() {
        return false;
    }
    let mut patches = lock(&PATCHES);
    let mut pages: Vec<u64> = ranges
        .iter()
        .flat_map(|range| {
            let start = page_down(range.start);
            patches.hiding.hidden.range(start..range.end.max(start)).copied()
        })
        .collect();
    pages.dedup();
    patches.expose_all(&pages, Reader::Call)
}

/// A system call may read anything: shows all pages, as if each had been read by a load. Returns
/// whether one was hidden that can be read now.
pub fn show_all() -> bool {
    if !any() {
        return false;
    }
    let mut patches = lock(&PATCHES);
    let pages: Vec<u64> = patches.hiding.hidden.iter().copied().collect();
    patches.expose_all(&pages, Reader::Load)
}

/// Does the guest do something by the call `nr` that hiding would disturb? Then it is to be turned
/// off before. These are calls about keys; calls after which the kernel reads memory on its own
/// account; and `mseal`, after which the kernel would not let pages be shown.
pub fn is_ended_by(nr: i64) -> bool {
    matches!(
        nr,
        libc::SYS_pkey_alloc
            | libc::SYS_pkey_free
            | libc::SYS_pkey_mprotect
            | libc::SYS_io_setup
            | libc::SYS_io_uring_setup
            | SYS_MSEAL
    )
}

/// Hides no page any more, shows all, and frees the key.
pub fn stop() {
    if !protection_keys::exist() {
        return;
    }
    let mut patches = lock(&PATCHES);
    let hiding = &mut patches.hiding;
    let key = match hiding.key {
        Key::Untried => None,
        Key::Held(key) => Some(key),
        Key::Off(_) => return,
    };
    hiding.key = Key::Off(key);
    hiding.hidden.retain(|page| !protect(*page, 0));
    hiding.counted();
    if let Some(key) = key
        && hiding.hidden.is_empty()
    {
        free(key);
    }
}

/// Gives a page of code this protection key. False if the kernel refuses.
fn protect(page: u64, key: u32) -> bool {
    let code = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    let call = Call::new(libc::SYS_pkey_mprotect, &[page, PAGE, code, u64::from(key)]);
    // SAFETY: the page is the guest's, with these rights.
    unsafe { raw(&call) == 0 }
}

/// Allocates the key with the highest number, which guests are the least likely to notice. None if
/// there is none, or if this thread's rights do not deny it.
fn allocate() -> Option<u32> {
    /// The keys of the processor.
    const KEYS: usize = 16;
    if !protection_keys::exist() {
        return None;
    }
    let rights = protection_keys::read();
    let mut keys: Vec<u32> = Vec::new();
    for _ in 0..KEYS {
        // SAFETY: allocates a key, and sets this thread's rights to it, which are restored below.
        let key = unsafe { raw(&Call::new(libc::SYS_pkey_alloc, &[0, DISABLE_ACCESS])) };
        match u32::try_from(key) {
            Ok(key) if key > 0 => keys.push(key),
            _ => break,
        }
    }
    protection_keys::write(rights);
    keys.sort_unstable();
    let key = keys.pop();
    keys.into_iter().for_each(free);
    let key = key?;
    if u64::from(rights >> (2 * key)) & DISABLE_ACCESS == 0 {
        free(key);
        return None;
    }
    Some(key)
}

fn free(key: u32) {
    // SAFETY: no page has this key.
    unsafe { raw(&Call::new(libc::SYS_pkey_free, &[u64::from(key)])) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::changes::patches::{self, LEN, NewPatch, Purpose};

    /// A page of this program's own code, in a private mapping of its file that nothing else uses.
    fn page_of_file() -> u64 {
        use std::os::fd::AsRawFd;
        let file = std::fs::File::open("/proc/self/exe").expect("this program");
        // SAFETY: a fresh mapping, never unmapped.
        let page = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_32BIT;
            let code = libc::PROT_READ | libc::PROT_EXEC;
            libc::mmap(std::ptr::null_mut(), PAGE as usize, code, flags, file.as_raw_fd(), 0)
        };
        assert_ne!(page, libc::MAP_FAILED);
        page as u64
    }

    /// A load of the host's by the function that guests' loads go by.
    fn byte(at: u64) -> Result<u8, memory::Fault> {
        // SAFETY: a page of the test.
        unsafe { memory::load(at) }
    }

    /// The last fault, with the key, which the handler of the tests does not report.
    fn fault() -> FaultInfo {
        let Key::Held(key) = lock(&PATCHES).hiding.key else { return memory::last_fault() };
        FaultInfo { key, ..memory::last_fault() }
    }

    fn show_at(range: Range<u64>) -> bool {
        show(&[range])
    }

    fn write(site: u64, own: [u8; LEN], to: u64) -> bool {
        let end = site + LEN as u64;
        patches::write(site, NewPatch { purpose: Purpose::Trace, end, own, inner: 0, to })
    }

    #[test]
    fn what_is_read_is_the_guests_own() {
        memory::test_handler::install();
        let _alone = lock(&patches::tests::HIDING);
        let page = page_of_file();
        let mut own = [0; LEN];
        assert_eq!(memory::copy_code(page, &mut own), LEN);
        let patch = || write(page, own, page + 0x1000);
        assert!(patch());
        if !any() {
            // There are no keys here, or the container forbids them.
            assert_eq!(byte(page), Ok(0xe9));
            assert!(pages().is_empty() && !show_at(page..page + 1) && !show_all());
            assert!(!answered(&FaultInfo {
                signal: libc::SIGSEGV,
                code: FaultInfo::SEGV_PKUERR,
                addr: page,
                ..FaultInfo::default()
            }));
            stop();
            patches::take_back(&(page..page + 1));
            return;
        }
        for _ in 1..MOST_READS {
            assert_eq!(pages(), [page]);
            assert_eq!(byte(page + 100), Err(memory::Fault));
            let mut read = [0; LEN];
            assert_eq!(memory::fetch_code(page, &mut read), LEN);
            assert_eq!(read, own);
            assert!(byte(page).is_err() && answered(&fault()));
            assert_eq!((byte(page), pages().len()), (Ok(own[0]), 0));
            assert!(patch());
        }
        assert!(byte(page).is_err() && answered(&fault()));
        assert!(!patch(), "it was read too often");
        let next = page_of_file();
        assert!(write(next, own, next + 0x1000));
        assert!(show_at(next + 9..next + 10) && !show_at(next..next + 10));
        assert_eq!(byte(next), Ok(own[0]));
        assert!(!write(next, own, next + 0x1000), "read by a call");
        let last = page_of_file();
        assert!(write(last, own, last + 0x1000));
        assert!(byte(last).is_err());
        let stale = fault();
        stop();
        assert!(answered(&stale) && byte(last) == Ok(0xe9));
        patches::take_back(&(last..last + 1));
        assert_eq!(byte(last), Ok(own[0]));
    }

    #[test]
    fn calls_that_end_it() {
        assert!(is_ended_by(libc::SYS_pkey_alloc) && is_ended_by(libc::SYS_io_uring_setup));
        assert!(!is_ended_by(libc::SYS_mprotect) && !is_ended_by(libc::SYS_write));
    }
}
