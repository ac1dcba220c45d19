//! Writes of the guest to its own memory as a file, `/proc/self/mem`, and to files whose code is
//! mapped. A write to `/proc/self/mem` ignores the protection of pages, so a guarded page does not
//! report that its code was changed.
//!
//! Data: none here. The code pages ([`crate::changes`]) remember whether the guest has opened such
//! a file for writing. [`System::opened_file`] sets that at the first such `open`, by whatever
//! path. Until then writes go to the kernel without a check.
//!
//! Limit: a descriptor of `/proc/self/mem` that was inherited, or received over a socket, is not
//! detected.
//!
//! The functions run on the guest's thread; the caller holds no lock.
//!
//! Example: the guest opens `/proc/self/mem` with O_RDWR and writes 4 bytes at position 0x401000.
//! After the write, code that was translated from 0x401000..0x401004 is dropped.

use std::ops::Range;

use super::memory::{inode_of, is_error};
use crate::kernel::entry::{self, Call};
use crate::kernel::process::{Done, Engine, System};

/// Does this descriptor lead to the memory of a process, its own or another's?
fn is_memory(fd: i32) -> bool {
    let mut status = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: fills `status` in, or fails.
    let is_proc = unsafe {
        let failed =
            entry::raw(&Call::new(libc::SYS_fstatfs, &[fd as u64, status.as_mut_ptr() as u64]));
        failed == 0 && status.assume_init().f_type == libc::PROC_SUPER_MAGIC
    };
    is_proc
        && std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|path| path.ends_with("mem"))
}

impl System {
    /// Examines the file that a call has opened with these flags, and returns the call's result.
    pub(super) fn opened_file(&self, engine: &mut dyn Engine, done: Done, flags: i32) -> Done {
        if let Done::Value(fd) = done
            && !is_error(fd)
            && flags & libc::O_ACCMODE != libc::O_RDONLY
        {
            if is_memory(fd as i32) {
                self.process.pages().set_written_as_file();
            } else if let Some(inode) = inode_of(fd as i32).filter(|inode| self.may_be_code(*inode))
            {
                self.file_may_change(engine, inode);
            }
        }
        done
    }

    /// Is code of this file mapped, or may what is mapped of it become code?
    fn may_be_code(&self, inode: u64) -> bool {
        let pages = self.process.pages();
        pages.has_code_of(inode) || pages.owns_file(inode)
    }

    /// What is mapped in `range` may be shown elsewhere, too, from now on.
    pub(super) fn disown(&self, engine: &mut dyn Engine, range: &Range<u64>) {
        let pages = self.process.pages();
        self.drop_shared(engine, pages.disown(range));
    }

    /// From now on another process may have this one's shared memory.
    pub(crate) fn disown_all(&self, engine: &mut dyn Engine) {
        let pages = self.process.pages();
        self.drop_shared(engine, pages.disown_all());
    }

    /// From now on the contents of a file may change without a write to a guarded page. Drops what
    /// was made from the file's code.
    pub(super) fn file_may_change(&self, engine: &mut dyn Engine, inode: u64) {
        let pages = self.process.pages();
        self.drop_shared(engine, pages.file_may_change(inode));
    }

    /// Drops what was made from these ranges, which may change unseen from now on.
    fn drop_shared(&self, engine: &mut dyn Engine, ranges: Vec<Range<u64>>) {
        if !ranges.is_empty() {
            self.process.pages().changed(engine, ranges);
        }
    }

    /// A write to a descriptor, which may be the guest's own memory.
    pub(super) fn write_call(&mut self, engine: &mut dyn Engine, nr: i64, call: &Call) -> Done {
        if !self.process.pages().is_written_as_file() || !is_memory(call.args[0] as i32) {
            return self.pass(call);
        }
        const AT_POSITION: u64 = u64::MAX;
        let from = match nr {
            libc::SYS_write | libc::SYS_writev | libc::SYS_pwritev2
                if nr != libc::SYS_pwritev2 || call.args[3] == AT_POSITION =>
            {
                // SAFETY: asks for the file's position.
                unsafe {
                    entry::raw(&Call::new(
                        libc::SYS_lseek,
                        &[call.args[0], 0, libc::SEEK_CUR as u64],
                    )) as u64
                }
            }
            _ => call.args[3],
        };
        let done = self.pass(call);
        if let Done::Value(len) = done
            && !is_error(len)
        {
            let written: Range<u64> = from..from.saturating_add(len as u64);
            self.process.pages().changed(engine, [written]);
        }
        done
    }
}
