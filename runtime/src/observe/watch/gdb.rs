//! GDB's JIT interface (GDB manual, "JIT Compilation Interface"): a list of ELF files in memory, and a
//! function at which GDB sets a breakpoint to learn that the list has changed.
//!
//! Data: [`Gdb`], the entries of the list, and [`__jit_debug_descriptor`], which GDB reads. There is one
//! `Gdb` in a process. The caller holds the lock of the fragments.
//!
//! Invariants: an entry and its file do not move while they are in the list; the list is whole whenever
//! [`__jit_debug_register_code`] is called. A fragment that rests stays in the list, since it may be woken.
//!
//! Example: `info symbol $pc` in a trace prints `dynasour:t12:work+0x28 + 4 in section .text0 of <in-memory…>`.

#![allow(non_upper_case_globals, reason = "GDB looks for these names")]

use super::elf;
use std::ops::Range;
use std::ptr;

/// What has happened to [`Descriptor::relevant`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
enum Action {
    None = 0,
    Register = 1,
    Unregister = 2,
}

/// An entry of the list, in the layout that GDB reads.
#[repr(C)]
pub struct Entry {
    next: *mut Entry,
    previous: *mut Entry,
    file: *const u8,
    size: u64,
}

/// The list, in the layout that GDB reads.
#[repr(C)]
pub struct Descriptor {
    version: u32,
    action: Action,
    relevant: *mut Entry,
    first: *mut Entry,
}

/// The descriptor, by the name that GDB looks for.
#[unsafe(no_mangle)]
pub static mut __jit_debug_descriptor: Descriptor = Descriptor {
    version: 1,
    action: Action::None,
    relevant: ptr::null_mut(),
    first: ptr::null_mut(),
};

/// GDB stops here, by this name, and reads the descriptor.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn __jit_debug_register_code() {
    // SAFETY: no instruction. Without it the calls could be removed.
    unsafe { std::arch::asm!("/* {} */", in(reg) &raw const __jit_debug_descriptor) };
}

/// A registered file. Its entry has its own place in memory.
struct Registered {
    entry: Box<Entry>,
    _file: Box<[u8]>,
}

// SAFETY: the pointers lead to other entries of the list and to `_file`. Only the holder of the
// fragments' lock follows them, and GDB, which has stopped all threads.
unsafe impl Send for Registered {}

/// The files that GDB knows.
#[derive(Default)]
pub struct Gdb {
    registered: Vec<Registered>,
}

impl Gdb {
    /// Tells GDB the names of these pieces of code.
    pub fn register(&mut self, pieces: &[(String, Range<u64>)]) {
        // Names that do not fit the format give no entry; GDB then shows no name.
        let Ok(file) = elf::file(pieces).map(Vec::into_boxed_slice) else { return };
        let before = self.registered.last_mut().map(|last| &raw mut *last.entry);
        let previous = before.unwrap_or(ptr::null_mut());
        let mut entry = Box::new(Entry {
            next: ptr::null_mut(),
            previous,
            file: file.as_ptr(),
            size: file.len() as u64,
        });
        let this = &raw mut *entry;
        // SAFETY: the entry before, if there is one, is in the list and lives; the caller has the lock, so no
        // other thread uses the list.
        unsafe {
            match before {
                Some(before) => (*before).next = this,
                None => __jit_debug_descriptor.first = this,
            }
        }
        self.registered.push(Registered { entry, _file: file });
        announce(Action::Register, this);
    }

    /// Tells GDB that all code is dropped.
    pub fn unregister_all(&mut self) {
        while let Some(mut last) = self.registered.pop() {
            let previous = last.entry.previous;
            // SAFETY: as in `register`. `last` lives until GDB has been told.
            unsafe {
                match previous.as_mut() {
                    Some(previous) => previous.next = ptr::null_mut(),
                    None => __jit_debug_descriptor.first = ptr::null_mut(),
                }
            }
            announce(Action::Unregister, &raw mut *last.entry);
        }
    }
}

/// Tells GDB what has happened to an entry.
fn announce(action: Action, entry: *mut Entry) {
    // SAFETY: the caller has the lock of the fragments.
    unsafe {
        __jit_debug_descriptor.relevant = entry;
        __jit_debug_descriptor.action = action;
    }
    __jit_debug_register_code();
    // SAFETY: as above.
    unsafe {
        __jit_debug_descriptor.action = Action::None;
        __jit_debug_descriptor.relevant = ptr::null_mut();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes of the files in the list, forwards; checks the way back.
    fn list() -> Vec<u64> {
        let mut sizes = Vec::new();
        // SAFETY: the list is whole, and this is the only test that uses it.
        unsafe {
            let (mut entry, mut previous) = (__jit_debug_descriptor.first, ptr::null_mut());
            while let Some(e) = entry.as_ref() {
                assert_eq!(e.previous, previous);
                sizes.push(e.size);
                (previous, entry) = (entry, e.next);
            }
        }
        sizes
    }

    #[test]
    fn the_list_has_what_is_registered() {
        let mut gdb = Gdb::default();
        for n in 1..4u64 {
            gdb.register(&[("a".repeat(1000 * n as usize), 0x1000 * n..0x1000 * n + 8)]);
            assert_eq!(list().len() as u64, n);
        }
        assert!(list().is_sorted());
        gdb.unregister_all();
        assert!(list().is_empty());
        gdb.register(&[("b".into(), 0..1)]);
        assert_eq!(list().len(), 1);
        gdb.unregister_all();
        assert!(list().is_empty());
    }
}
