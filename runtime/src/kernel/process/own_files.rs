//! Recognises paths of files of `/proc/self` that must not show the translator to the guest: `exe` and
//! `maps`, and those that tell the number of threads; and the `exe` of other processes that the translator runs.
//!
//! Owns no data. Invariant: a path of another process's file is never taken for an own one. The
//! opposite happens: links outside `/proc` that lead to these files are not followed.
//!
//! Called for system calls with a path (`open`, `readlink`, `execve`, …), on any thread. No lock:
//! only guest memory and the kernel are asked.
//!
//! Example: in process 42, whose thread 43 calls, `/proc/self/exe`, `/proc/42/maps` and
//! `/proc/self/task/43/exe` are own files; `/proc/1/exe` and `/proc/self/task/42/exe` are not.

use std::ffi::{CStr, CString};
use std::sync::Arc;

use super::others_executable;
use crate::kernel::entry::{self, Call};

/// Bytes of a path that are looked at (guess; the longest plain form, `/proc/PID/task/TID/maps`
/// with ids of seven digits, has 31). A longer path, such as one with many `/./`, is not
/// recognised.
const LONGEST: usize = 64;

/// A file of `/proc` that must not show the translator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Own {
    Executable,
    Maps,
    /// It tells of the threads of the process.
    Threads,
    /// The link to the executable of another process, or of another thread: its guest's executable.
    OthersExecutable(CString),
}

impl Own {
    /// The guest's file that the link leads to, if it is one to an executable; `own` is that of this process.
    pub(crate) fn executable(&self, own: &Arc<CStr>) -> Option<Arc<CStr>> {
        match self {
            Own::Executable => Some(own.clone()),
            Own::OthersExecutable(path) => Some(path.as_c_str().into()),
            Own::Maps | Own::Threads => None,
        }
    }
}

/// Which own file of the thread `tid` of the process `pid` the normalised `path` names.
fn own_file(path: &[u8], pid: u32, tid: u32) -> Option<Own> {
    let below_proc = path.strip_prefix(b"/proc/")?;
    let name_at = below_proc.iter().rposition(|&byte| byte == b'/')?;
    let file = match &below_proc[name_at + 1..] {
        b"exe" => Own::Executable,
        b"maps" => Own::Maps,
        b"task" | b"status" | b"stat" => Own::Threads,
        _ => return None,
    };
    let directory = &below_proc[..name_at];
    let is = |text: &[u8], id: u32| text == id.to_string().as_bytes();
    let own = match directory.iter().position(|&byte| byte == b'/') {
        None => directory == b"self" || directory == b"thread-self" || is(directory, pid),
        Some(slash) => {
            let (process, task) = (&directory[..slash], &directory[slash..]);
            (process == b"self" || is(process, pid))
                && task.strip_prefix(b"/task/").is_some_and(|t| is(t, tid))
        }
    };
    own.then_some(file)
}

/// The path without empty components, `.` and `..`. A `..` behind a link is wrong in general, but
/// right in `/proc`: there `self` and its target have the same parent.
fn normalised(path: &[u8]) -> Vec<u8> {
    let mut components: Vec<&[u8]> = Vec::new();
    for component in path.split(|&byte| byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => drop(components.pop()),
            name => components.push(name),
        }
    }
    components.iter().flat_map(|name| [b"/", *name]).flatten().copied().collect()
}

/// The directory from which a relative path starts: that of the descriptor, or the working
/// directory.
fn start_of_path(descriptor: i32) -> Option<Vec<u8>> {
    let link = match descriptor {
        libc::AT_FDCWD => c"/proc/self/cwd".to_owned(),
        fd => CString::new(format!("/proc/self/fd/{fd}")).ok()?,
    };
    let mut target = [0; LONGEST];
    let call = Call::new(
        libc::SYS_readlink,
        &[link.as_ptr() as u64, target.as_mut_ptr() as u64, LONGEST as u64],
    );
    // SAFETY: writes `target`.
    let length = usize::try_from(unsafe { entry::raw(&call) }).ok()?;
    Some(target[..length].to_vec())
}

/// Which of this process's own files, or which other guest's executable, the string at `address` names, seen from
/// the directory `descriptor`. If `empty` is set, an empty string means the descriptor itself.
pub(crate) fn own_file_at(descriptor: i32, address: u64, empty: bool) -> Option<Own> {
    let mut bytes = [0; LONGEST];
    let got = crate::memory::copy_in(address, &mut bytes);
    let path = CStr::from_bytes_until_nul(&bytes[..got]).ok()?.to_bytes();
    const NAMES: [&[u8]; 6] = [b"exe", b"maps", b"task", b"task/", b"status", b"stat"];
    let could_be = NAMES.iter().any(|name| path.ends_with(name)) || empty && path.is_empty();
    if !could_be || path.first() == Some(&b'/') && !path.starts_with(b"/proc/") {
        return None;
    }
    let path = match path.first() {
        Some(b'/') => path.to_vec(),
        _ => [start_of_path(descriptor)?, b"/".to_vec(), path.to_vec()].concat(),
    };
    // SAFETY: neither call has effects.
    let (pid, tid) = unsafe {
        (
            entry::raw(&Call::new(libc::SYS_getpid, &[])) as u32,
            entry::raw(&Call::new(libc::SYS_gettid, &[])) as u32,
        )
    };
    let path = normalised(&path);
    own_file(&path, pid, tid).or_else(|| others_executable::named(&path).map(Own::OthersExecutable))
}

/// The guest's file that the link leads to which the string at `address` names, if that is a link to an executable
/// that the kernel takes for the translator; `own` is the executable of this process.
pub(crate) fn executable_named(address: u64, own: &Arc<CStr>) -> Option<Arc<CStr>> {
    own_file_at(libc::AT_FDCWD, address, false)?.executable(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_files_count() {
        for own in ["self", "thread-self", "42", "self/task/43", "42/task/43"] {
            assert_eq!(
                own_file(format!("/proc/{own}/exe").as_bytes(), 42, 43),
                Some(Own::Executable),
                "{own}"
            );
            assert_eq!(
                own_file(format!("/proc/{own}/maps").as_bytes(), 42, 43),
                Some(Own::Maps),
                "{own}"
            );
            assert_eq!(
                own_file(format!("/proc/{own}/task").as_bytes(), 42, 43),
                Some(Own::Threads),
                "{own}"
            );
        }
        for other in ["43", "self/task/42", "4", "", "self/", "self/fd", "self/task/"] {
            assert_eq!(own_file(format!("/proc/{other}/exe").as_bytes(), 42, 43), None, "{other}");
        }
        assert_eq!(own_file(b"/proc/self/mem", 42, 43), None);
        assert_eq!(own_file(b"/proc/exe", 42, 43), None);
    }

    #[test]
    fn paths_are_made_absolute() {
        assert_eq!(normalised(b"/proc//self/./fd/../exe"), b"/proc/self/exe");
        assert_eq!(normalised(b"/../x/"), b"/x");
        let seen_from = |directory: &CStr, path: &CStr| {
            // SAFETY: opens and closes a directory.
            let fd = unsafe { libc::open(directory.as_ptr(), libc::O_PATH | libc::O_NOFOLLOW) };
            let own = own_file_at(fd, path.as_ptr() as u64, true);
            // SAFETY: as above.
            unsafe { libc::close(fd) };
            own
        };
        let process = CString::new(format!("/proc/{}", std::process::id())).expect("no NUL");
        assert_eq!(seen_from(&process, c"exe"), Some(Own::Executable));
        assert_eq!(seen_from(&process, c"maps"), Some(Own::Maps));
        assert_eq!(seen_from(&process, c"fd"), None);
        assert_eq!(seen_from(c"/proc", c"self/../self/exe"), Some(Own::Executable));
        assert_eq!(
            seen_from(c"/proc/self/exe", c""),
            Some(Own::Executable),
            "the link itself, opened"
        );
        assert_eq!(seen_from(c"/tmp", c"exe"), None);
        assert_eq!(seen_from(c"/proc/1", c"exe"), None);
        assert_eq!(own_file_at(-1, c"exe".as_ptr() as u64, false), None);
    }

    #[test]
    fn strings_are_compared_whole() {
        let own: Arc<CStr> = c"/guest".into();
        let named = |path: &CStr| executable_named(path.as_ptr() as u64, &own);
        assert_eq!(named(c"/proc/self/exe"), Some(own.clone()));
        assert_eq!(named(c"/proc/self/exe2"), None);
        assert_eq!(named(c"/proc/self/maps"), None);
        assert_eq!(named(c"/etc/passwd"), None);
        let path = CString::new(format!("/proc/{}/exe", std::process::id())).expect("no NUL");
        assert_eq!(named(&path), Some(own.clone()));
    }
}
