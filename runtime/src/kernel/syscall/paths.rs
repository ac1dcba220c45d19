//! Calls with paths. Two files of `/proc/self` describe the translator to the kernel's callers:
//! `exe` and `maps`. The guest gets its own executable and a list of its own mappings instead, and for the `exe` of
//! another guest that one's executable. Before it reads about its threads, the helper thread is turned off.
//!
//! No data, no locks of its own: the functions run on the guest's thread, and the caller holds no
//! lock. They also tell [`super::process_memory`] of each file that was opened.
//!
//! Example: `open("/proc/self/maps", O_RDONLY)` returns the descriptor of a new memfd, which holds
//! the list without the host's mappings and with the protections that the guest has set.

use crate::kernel::entry::{self, Call};
use crate::kernel::process::guest_access::guest_write;
use crate::kernel::process::helper;
use crate::kernel::process::own_files::{Own, own_file_at};
use crate::kernel::process::{Done, Engine, System};

impl System {
    /// Performs a call with a path. A path that leads to `/proc/self/exe`, or to that of another guest, is replaced
    /// by the path of the guest's executable; the list of mappings is replaced by a copy without the host's.
    pub(super) fn path_call(&mut self, engine: &mut dyn Engine, nr: i64, call: &Call) -> Done {
        let no_follow = |at: usize, flag: i32| call.args[at] as i32 & flag != 0;
        // The index of the path among the arguments; whether the call is about the link itself.
        let (path, is_about_link) = match nr {
            libc::SYS_open => (0, no_follow(1, libc::O_NOFOLLOW)),
            libc::SYS_stat | libc::SYS_access => (0, false),
            libc::SYS_openat => (1, no_follow(2, libc::O_NOFOLLOW)),
            libc::SYS_newfstatat | libc::SYS_faccessat2 => {
                (1, no_follow(3, libc::AT_SYMLINK_NOFOLLOW))
            }
            libc::SYS_statx => (1, no_follow(2, libc::AT_SYMLINK_NOFOLLOW)),
            libc::SYS_readlink => (0, false),
            _ => (1, false),
        };
        let descriptor = if path == 0 { libc::AT_FDCWD } else { call.args[0] as i32 };
        let own = own_file_at(descriptor, call.args[path], nr == libc::SYS_readlinkat);
        if own == Some(Own::Threads) && !self.process.is_borrower() {
            helper::turn_off();
        }
        let executable = own.as_ref().and_then(|own| own.executable(self.process.executable()));
        match (own, executable) {
            (Some(Own::Maps), _) => match nr {
                libc::SYS_open => self.open_maps(call, call.args[1] as i32),
                libc::SYS_openat => self.open_maps(call, call.args[2] as i32),
                _ => self.pass(call),
            },
            (_, Some(executable)) if matches!(nr, libc::SYS_readlink | libc::SYS_readlinkat) => {
                readlink(executable.to_bytes(), call.args[path + 1], call.args[path + 2] as i32)
            }
            (_, Some(executable)) if !is_about_link => {
                let mut call = *call;
                call.args[path] = executable.as_ptr() as u64;
                self.pass(&call)
            }
            _ => match nr {
                libc::SYS_open => self.opened_file(engine, self.pass(call), call.args[1] as i32),
                libc::SYS_openat => self.opened_file(engine, self.pass(call), call.args[2] as i32),
                libc::SYS_openat2 => self.opened_file(engine, self.pass(call), libc::O_RDWR),
                _ => self.pass(call),
            },
        }
    }

    /// Opens a copy of the current list of mappings instead of the kernel's file.
    fn open_maps(&mut self, call: &Call, flags: i32) -> Done {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return self.pass(call);
        }
        let Ok(text) = std::fs::read("/proc/thread-self/maps") else { return self.pass(call) };
        let text = self.process.pages().listing(&text);
        let text = self.process.memory().guest_maps(&text);
        if text.len() as u64 > file_size_limit() {
            return self.pass(call);
        }
        let close_on_exec = if flags & libc::O_CLOEXEC != 0 { libc::MFD_CLOEXEC } else { 0 };
        let name = c"maps".as_ptr() as u64;
        // SAFETY: makes a descriptor, which belongs to the guest from here on.
        let fd = unsafe {
            entry::raw(&Call::new(libc::SYS_memfd_create, &[name, u64::from(close_on_exec)]))
        };
        if fd < 0 {
            return Done::Value(fd);
        }
        crate::kernel::process::write_all(fd as i32, &text);
        // SAFETY: concerns the new descriptor only.
        unsafe { entry::raw(&Call::new(libc::SYS_lseek, &[fd as u64, 0, libc::SEEK_SET as u64])) };
        Done::Value(fd)
    }
}

/// What `readlink` of a link to `path` does with the guest's buffer.
fn readlink(path: &[u8], buffer: u64, size: i32) -> Done {
    match usize::try_from(size) {
        Ok(size) if size > 0 => {
            let part = &path[..path.len().min(size)];
            guest_write(buffer, part).map_or_else(Done::error, |()| Done::Value(part.len() as i64))
        }
        _ => Done::error(libc::EINVAL),
    }
}

/// The size in bytes of the largest file that this process may write. A longer write would send
/// SIGXFSZ to the guest.
fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes `limit`.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    limit.rlim_cur
}
