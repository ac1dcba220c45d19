//! The host's heap: the C library's, with a clear end where it has no memory left. Limits that the
//! user set (`ulimit -d`, `ulimit -v`) hold for guest and host together.

use crate::kernel::process;
use std::alloc::{GlobalAlloc, Layout, System};

/// How the process ends: the guest cannot be run.
const NOT_RUNNABLE: i32 = 126;

const MESSAGE: &str =
    "dynasour: no memory left for the translator itself (see `ulimit -d` and `ulimit -v`)\n";

/// To be made the global allocator of a program that runs guests.
pub struct Heap;

fn checked(memory: *mut u8) -> *mut u8 {
    if memory.is_null() {
        // Nothing here may allocate.
        process::write_all(libc::STDERR_FILENO, MESSAGE.as_bytes());
        process::exit(NOT_RUNNABLE);
    }
    memory
}

// SAFETY: the system's allocator, of whose results some are not returned.
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
