//! The global allocator of a program that runs guests: the C library's allocator, except that a
//! failed allocation ends the process with a message and exit status 126.
//!
//! An allocation can fail because the user's limits (`ulimit -d`, `ulimit -v`) apply to the
//! process, that is to guest and host together.
//!
//! The module owns no data. No lock of ours: the C library's allocator locks for itself.

use crate::kernel::process;
use std::alloc::{GlobalAlloc, Layout, System};

/// Exit status of the process: the guest cannot be run.
const NOT_RUNNABLE: i32 = 126;

const MESSAGE: &str =
    "dynasour: no memory left for the translator itself (see `ulimit -d` and `ulimit -v`)\n";

/// The allocator; a program that runs guests declares one as its `#[global_allocator]`.
pub struct Heap;

/// Returns `memory`, the result of an allocation; ends the process if the allocation failed.
fn checked(memory: *mut u8) -> *mut u8 {
    if memory.is_null() {
        // Nothing here may allocate.
        process::write_all(libc::STDERR_FILENO, MESSAGE.as_bytes());
        process::exit(NOT_RUNNABLE);
    }
    memory
}

// SAFETY: each method forwards to the system's allocator. A null result ends the process.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.realloc(memory, layout, size) })
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}
