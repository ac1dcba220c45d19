//! Writes of the guest to its own memory as a file, `/proc/self/mem`: they know no protections, so
//! code that is changed in this way has no guard that would notice.
//!
//! Whether such a file is open for writing is noticed when it is opened, by whatever path; until
//! then writes are passed through without a look. A descriptor that comes over a socket or from a
//! parent is not noticed.

use std::ops::Range;

use super::memory::inode_of;
use crate::kernel::entry::{self, Call};
use crate::kernel::process::{Done, Engine, System};

/// `statfs::f_type` of /proc.
const PROC_SUPER_MAGIC: i64 = 0x9fa0;

fn is_error(value: i64) -> bool {
    (-4095..0).contains(&value)
}

/// Does this descriptor lead to a process's memory?
fn is_memory(fd: i32) -> bool {
    let mut status = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: fills `status` in, or fails.
    let is_proc = unsafe {
        let failed =
            entry::raw(&Call::new(libc::SYS_fstatfs, &[fd as u64, status.as_mut_ptr() as u64]));
        failed == 0 && status.assume_init().f_type == PROC_SUPER_MAGIC
    };
    is_proc
        && std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|path| path.ends_with("mem"))
}

impl System {
    /// After a call that opened a file with these flags.
    pub(super) fn opened_file(&self, engine: &mut dyn Engine, done: Done, flags: i32) -> Done {
        if let Done::Value(fd) = done
            && !is_error(fd)
            && flags & libc::O_ACCMODE != libc::O_RDONLY
        {
            if is_memory(fd as i32) {
                self.process.pages().set_written_as_file();
            } else if let Some(inode) =
                inode_of(fd as i32).filter(|inode| self.process.pages().has_code_of(*inode))
            {
                self.file_may_change(engine, inode);
            }
        }
        done
    }

    /// Code of a file may change in ways that are not seen.
    pub(super) fn file_may_change(&self, engine: &mut dyn Engine, inode: u64) {
        let pages = self.process.pages();
        let code = pages.file_may_change(inode);
        if !code.is_empty() {
            pages.changed(engine, code);
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
