//! `/proc/self/exe` names the guest's executable, not the translator's.

use std::ffi::CStr;

use super::{Done, System, guest_write};
use crate::entry::{self, Call};

/// Longer paths cannot be one of ours.
const LONGEST: usize = 64;

/// Whether `path` names the executable link of the process `pid`, whose only thread is `tid`.
fn names_own_executable(path: &[u8], pid: u32, tid: u32) -> bool {
    let Some(rest) = path.strip_prefix(b"/proc/") else { return false };
    let Some(rest) = rest.strip_suffix(b"/exe") else { return false };
    let is = |text: &[u8], id: u32| text == id.to_string().as_bytes();
    match rest.iter().position(|&byte| byte == b'/') {
        None => rest == b"self" || rest == b"thread-self" || is(rest, pid),
        Some(slash) => {
            let (process, task) = (&rest[..slash], &rest[slash..]);
            (process == b"self" || is(process, pid)) && task.strip_prefix(b"/task/").is_some_and(|t| is(t, tid))
        }
    }
}

/// Whether the string at `address` names this process's executable link.
pub(crate) fn is_own_executable(address: u64) -> bool {
    let mut bytes = [0; LONGEST];
    let got = crate::memory::copy_in(address, &mut bytes[..6]);
    if got < 6 || &bytes[..6] != b"/proc/" {
        return false;
    }
    let got = crate::memory::copy_in(address, &mut bytes);
    let Ok(path) = CStr::from_bytes_until_nul(&bytes[..got]) else { return false };
    // SAFETY: neither call has effects.
    let (pid, tid) = unsafe {
        (entry::raw(&Call::new(libc::SYS_getpid, &[])) as u32, entry::raw(&Call::new(libc::SYS_gettid, &[])) as u32)
    };
    names_own_executable(path.to_bytes(), pid, tid)
}

impl System {
    /// Calls with a path: the executable link is replaced by what it leads to for the guest.
    pub(super) fn path_call(&mut self, nr: i64, call: &Call) -> Done {
        let no_follow = |at: usize, flag: i32| call.args[at] as i32 & flag != 0;
        // Which argument is the path, and whether the link itself is meant.
        let (path, itself) = match nr {
            libc::SYS_open => (0, no_follow(1, libc::O_NOFOLLOW)),
            libc::SYS_stat | libc::SYS_access => (0, false),
            libc::SYS_openat => (1, no_follow(2, libc::O_NOFOLLOW)),
            libc::SYS_newfstatat | libc::SYS_faccessat2 => (1, no_follow(3, libc::AT_SYMLINK_NOFOLLOW)),
            libc::SYS_statx => (1, no_follow(2, libc::AT_SYMLINK_NOFOLLOW)),
            libc::SYS_readlink => (0, false),
            _ => (1, false),
        };
        if itself || !is_own_executable(call.args[path]) {
            return self.pass(call);
        }
        if matches!(nr, libc::SYS_readlink | libc::SYS_readlinkat) {
            return self.readlink_own(call.args[path + 1], call.args[path + 2] as i32);
        }
        let executable = self.executable.clone();
        let mut call = *call;
        call.args[path] = executable.as_ptr() as u64;
        self.pass(&call)
    }

    fn readlink_own(&self, buffer: u64, size: i32) -> Done {
        let path = self.executable.to_bytes();
        match usize::try_from(size) {
            Ok(size) if size > 0 => {
                let part = &path[..path.len().min(size)];
                guest_write(buffer, part).map_or_else(Done::error, |()| Done::Value(part.len() as i64))
            }
            _ => Done::error(libc::EINVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_own_link_counts() {
        for own in ["self", "thread-self", "42", "self/task/43", "42/task/43"] {
            assert!(names_own_executable(format!("/proc/{own}/exe").as_bytes(), 42, 43), "{own}");
        }
        for other in ["43", "self/task/42", "4", "", "self/", "self/fd", "self/task/"] {
            assert!(!names_own_executable(format!("/proc/{other}/exe").as_bytes(), 42, 43), "{other}");
        }
        assert!(!names_own_executable(b"/proc/self/maps", 42, 43));
        assert!(!names_own_executable(b"/proc/exe", 42, 43));
    }

    #[test]
    fn strings_are_compared_whole() {
        assert!(is_own_executable(c"/proc/self/exe".as_ptr() as u64));
        assert!(!is_own_executable(c"/proc/self/exe2".as_ptr() as u64));
        assert!(!is_own_executable(c"/etc/passwd".as_ptr() as u64));
        let own = format!("/proc/{}/exe\0", std::process::id());
        assert!(is_own_executable(own.as_ptr() as u64));
    }
}
