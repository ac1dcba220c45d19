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
//!   protections of private memory, proc(5)). Where that file cannot be opened, the page is open
//!   just for the store.

use std::sync::{Arc, OnceLock};

use dynasour_guest::space::{PAGE, page_down};

use super::CodePages;
use crate::host_call::{Call, raw};
use crate::memory::{self, FaultInfo};

/// The code pages of this process.
static CURRENT: OnceLock<Arc<CodePages>> = OnceLock::new();

/// Makes these the code pages of the process, for good.
pub fn install(pages: &Arc<CodePages>) {
    let _ = CURRENT.set(pages.clone());
}

/// A store of the host's to guest memory faulted, in native code that cannot be stopped there: can
/// it be repeated?
///
/// Called in the signal handler, for faults of stores to guest memory only. Such an instruction
/// stands neither in the allocator nor in [`CodePages`], so the interrupted thread holds none of
/// their locks.
pub fn opened_for_host(fault: &FaultInfo) -> bool {
    CURRENT.get().is_some_and(|pages| pages.open_for_host(fault))
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

/// Writes to private memory as if it were writable.
fn write_past_protection(address: u64, bytes: &[u8]) -> bool {
    let call = |nr, args: &[u64]| {
        // SAFETY: calls about a descriptor that is opened and closed here; the write goes where the
        // caller was asked to store.
        unsafe { raw(&Call::new(nr, args)) }
    };
    let flags = (libc::O_WRONLY | libc::O_CLOEXEC) as u64;
    let fd = call(
        libc::SYS_openat,
        &[libc::AT_FDCWD as u64, c"/proc/self/mem".as_ptr() as u64, flags, 0],
    );
    if fd < 0 {
        return false;
    }
    let done =
        call(libc::SYS_pwrite64, &[fd as u64, bytes.as_ptr() as u64, bytes.len() as u64, address]);
    call(libc::SYS_close, &[fd as u64]);
    done == bytes.len() as i64
}
