//! Stores of the host's own into guest memory, where a page of code is guarded.
//!
//! The host stores into guest memory on behalf of one guest thread: results of emulated calls,
//! frames of signals, deferred stores of a trace. It may hold locks then, so it cannot wait until
//! no other thread executes what was made from the page. What it has written to is noted instead,
//! and dropped before that guest thread goes on ([`CodePages::take_written`]).
//!
//! * With one thread the page is opened.
//! * With several threads it must stay guarded: another thread could store to it unnoticed, and
//!   execute what was made from it. The kernel writes past the guard then (`/proc/self/mem` ignores
//!   protections of private memory, proc(5)). A deferred store of native code is performed in the
//!   same way: the signal handler decodes it and skips it ([`stored_for_native`]). Where that file
//!   cannot be opened, the page stays open after the store, and a store of another thread to it is
//!   not noticed until the page is guarded again.

use std::sync::{Arc, OnceLock};

use dynasour_guest::space::{PAGE, page_down};

use super::CodePages;
use crate::host_call::{Call, raw};
use crate::memory::{self, FaultInfo};
use crate::protection_keys::with_all_rights;

/// The code pages of this process.
static CURRENT: OnceLock<Arc<CodePages>> = OnceLock::new();

/// Makes these the code pages of the process, for good.
pub fn install(pages: &Arc<CodePages>) {
    let _ = CURRENT.set(pages.clone());
}

/// The code pages of this process, for tests in a process of their own.
#[cfg(test)]
pub(crate) fn installed() -> &'static CodePages {
    CURRENT.get_or_init(Arc::default)
}

/// A store of the host's to guest memory faulted: can it be repeated?
///
/// Takes the lock of the code pages, and allocates. The signal handler may call it only if the
/// faulting instruction is in the code cache, where a thread holds no lock. A fault in the host's
/// own code may have interrupted a thread that holds this lock, or the allocator's.
pub fn opened_for_host(fault: &FaultInfo) -> bool {
    CURRENT.get().is_some_and(|pages| pages.open_for_host(fault))
}

/// A deferred store faulted in native code, which cannot leave there. If several threads run and
/// each page of `address` and the `bytes` behind it is guarded, or writable for the guest, the
/// bytes are written without opening a page. `false`: nothing has been written.
///
/// For the signal handler, under the same condition as [`opened_for_host`].
pub fn stored_for_native(fault: &FaultInfo, address: u64, bytes: &[u8]) -> bool {
    CURRENT.get().is_some_and(|pages| pages.store_for_native(fault, address, bytes))
}

/// Writes the bytes at `address`, where a store of the host's faulted; how many could be written:
/// at most as far as the end of the page.
pub fn write_for_host(fault: &FaultInfo, address: u64, bytes: &[u8]) -> usize {
    let Some(pages) = CURRENT.get() else { return 0 };
    let len = bytes.len().min((PAGE - address % PAGE) as usize);
    if pages.write_guarded(fault, address, &bytes[..len]) { len } else { 0 }
}

/// Copies `bytes` to guest memory at `addr`; returns the length of the prefix that could be
/// written, in pages of code that are guarded, too.
///
/// # Safety
/// As for [`memory::store`].
pub unsafe fn copy_out(addr: u64, bytes: &[u8]) -> usize {
    let mut done = 0;
    loop {
        // SAFETY: the caller's promise.
        done += unsafe { memory::copy_out_open(addr.wrapping_add(done as u64), &bytes[done..]) };
        if done == bytes.len() {
            return done;
        }
        // Code may have been made from the page: it is to be noticed that it changes.
        match write_for_host(&memory::last_fault(), addr.wrapping_add(done as u64), &bytes[done..])
        {
            0 => return done,
            written => done += written,
        }
    }
}

impl CodePages {
    /// Opens the page of this fault, if that is guarded or was a moment ago.
    pub(super) fn open_for_host(&self, fault: &FaultInfo) -> bool {
        if !fault.is_denied_write() {
            return false;
        }
        let page = page_down(fault.addr);
        let mut state = self.state();
        if state.guards.contains(page) {
            state.count_flips(page..page + PAGE);
            state.open(page..page + PAGE);
            self.set_written(&mut state, page..page + PAGE);
            return true;
        }
        state.is_writable(page)
    }

    /// See [`stored_for_native`].
    pub(super) fn store_for_native(&self, fault: &FaultInfo, address: u64, bytes: &[u8]) -> bool {
        if !fault.is_denied_write() || bytes.is_empty() || !self.is_threaded() {
            return false;
        }
        let Some(last) = address.checked_add(bytes.len() as u64 - 1) else { return false };
        let range = page_down(address)..page_down(last).saturating_add(PAGE);
        let mut state = self.state();
        let mut pages = range.clone().step_by(PAGE as usize);
        if !pages.all(|page| state.guards.contains(page) || state.is_writable(page))
            || !write_past_protection(address, bytes)
        {
            return false;
        }
        self.set_written(&mut state, range);
        true
    }

    /// Writes to one page, in which a store of the host's faulted.
    pub(super) fn write_guarded(&self, fault: &FaultInfo, address: u64, bytes: &[u8]) -> bool {
        if !fault.is_denied_write() {
            return false;
        }
        let page = page_down(address);
        if self.is_threaded() {
            let mut state = self.state();
            if state.guards.contains(page) && write_past_protection(address, bytes) {
                self.set_written(&mut state, page..page + PAGE);
                return true;
            }
        }
        // SAFETY: the guest's memory, where the host was asked to store.
        self.open_for_host(fault) && unsafe { memory::copy_out_open(address, bytes) } == bytes.len()
    }
}

/// Writes to private code that can be read and executed but not written. False if it cannot be
/// written. The caller has the exclusive right to change code, or a lock that keeps others from
/// writing there.
pub fn write_code(address: u64, bytes: &[u8]) -> bool {
    CodeWriter::open().write(address, bytes)
}

/// Writes to private memory as if it were writable. False if it cannot be written.
pub fn write_past_protection(address: u64, bytes: &[u8]) -> bool {
    CodeWriter::open().write_past_protection(address, bytes)
}

/// Writes to code several times: it opens the process's memory once, which takes 10 µs.
pub struct CodeWriter {
    /// A descriptor of `/proc/self/mem`, or the negative errno.
    fd: i64,
}

impl CodeWriter {
    /// A process in a jail has no `/proc`; there [`CodeWriter::write`] changes protections.
    pub fn open() -> CodeWriter {
        let flags = (libc::O_WRONLY | libc::O_CLOEXEC) as u64;
        let args = [libc::AT_FDCWD as u64, c"/proc/self/mem".as_ptr() as u64, flags, 0];
        // SAFETY: opens a descriptor, which is closed by `drop`.
        CodeWriter { fd: unsafe { raw(&Call::new(libc::SYS_openat, &args)) } }
    }

    /// As [`write_code`].
    pub fn write(&self, address: u64, bytes: &[u8]) -> bool {
        if self.write_past_protection(address, bytes) {
            return true;
        }
        let start = page_down(address);
        let len = page_down(address + bytes.len() as u64 - 1) + PAGE - start;
        let protect = |prot: i32| {
            // SAFETY: the pages are there, and have these rights except for a moment.
            unsafe { raw(&Call::new(libc::SYS_mprotect, &[start, len, prot as u64])) == 0 }
        };
        let code = libc::PROT_READ | libc::PROT_EXEC;
        protect(code | libc::PROT_WRITE)
            // SAFETY: bytes of the guest's code, where the host has been asked to write. The page may
            // be hidden by a key.
            && with_all_rights(|| unsafe { memory::copy_out_open(address, bytes) }) == bytes.len()
            && protect(code)
    }

    fn write_past_protection(&self, address: u64, bytes: &[u8]) -> bool {
        let args = [self.fd as u64, bytes.as_ptr() as u64, bytes.len() as u64, address];
        // SAFETY: the write goes where the caller was asked to store.
        self.fd >= 0 && unsafe { raw(&Call::new(libc::SYS_pwrite64, &args)) } == bytes.len() as i64
    }
}

impl Drop for CodeWriter {
    fn drop(&mut self) {
        if self.fd >= 0 {
            // SAFETY: the descriptor is this value's own.
            unsafe { raw(&Call::new(libc::SYS_close, &[self.fd as u64])) };
        }
    }
}
