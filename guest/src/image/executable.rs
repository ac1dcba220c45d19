//! Finding a program file and opening it, by the rules of execve(2) and execvp(3).
//!
//! [`resolve_command`] is execvp's search through PATH. `open` makes the checks of execve in the
//! kernel's order, so that a file with several faults gets the kernel's error number. A kernel
//! since 6.14 is asked for its own verdict, too (`ask_kernel`); an older one leaves some cases
//! undetected (a file open for writing, security modules).

use std::ffi::{CString, OsStr};
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::{AccessFlags, eaccess, faccessat};

use super::error::{LoadError, Reason};

/// The search path when PATH is not set (confstr(_CS_PATH)).
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// Longest file name, in bytes (NAME_MAX).
const NAME_MAX: usize = 255;

/// execveat(2)'s flag that asks whether a file might be executed, without doing so (Linux 6.14).
const AT_EXECVE_CHECK: i32 = 0x10000;

/// Finds a command as execvp(3) does. A name with a slash is a path. Any other name is looked up in
/// the directories of `search_path` (the value of PATH; an empty entry is the current directory). A
/// file without execute permission is skipped; if no other is found, it becomes the reported error.
pub fn resolve_command(name: &OsStr, search_path: Option<&OsStr>) -> Result<PathBuf, LoadError> {
    let asked = Path::new(name);
    let bytes = name.as_bytes();
    if bytes.is_empty() {
        return Err(Reason::NotFound.about(asked));
    }
    if bytes.contains(&b'/') {
        return Ok(asked.to_path_buf());
    }
    if bytes.len() > NAME_MAX {
        return Err(Reason::CommandNotFound.about(asked));
    }
    let mut refused = None;
    for directory in
        search_path.unwrap_or(OsStr::new(DEFAULT_PATH)).as_bytes().split(|&byte| byte == b':')
    {
        let candidate = Path::new(OsStr::from_bytes(directory)).join(name);
        let Err(reason) = open(&candidate, Ask::Kernel) else { return Ok(candidate) };
        match reason.errno() {
            Errno::EACCES => refused = refused.or(Some((candidate, reason))),
            Errno::ENOENT | Errno::ESTALE | Errno::ENOTDIR | Errno::ENODEV | Errno::ETIMEDOUT => {}
            // execvp tries the next directory only after certain errors of execve. Here the file
            // exists, so the loader reports what is wrong with it.
            _ => return Ok(candidate),
        }
    }
    match refused {
        Some((candidate, reason)) => Err(reason.about(&candidate)),
        None => Err(Reason::CommandNotFound.about(asked)),
    }
}

/// The dynamic linker with which this process's guest was loaded: device and inode.
static LINKER: OnceLock<(u64, u64)> = OnceLock::new();

/// Notes that the guest is loaded with the dynamic linker in `file`. The kernel is not asked about it again, which takes
/// 15 µs (measured), at each execve: nearly all programs have the same. So it is missed if somebody has that file open
/// for writing just then.
pub(super) fn loaded_with(file: &File) {
    if let Ok(metadata) = file.metadata() {
        // Only tests load several programs.
        let _ = LINKER.set((metadata.dev(), metadata.ino()));
    }
}

/// Who is asked whether a file may be executed, besides its mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ask {
    /// The kernel; see [`ask_kernel`].
    Kernel,
    /// Nobody: it was asked before.
    Nobody,
}

/// Opens a file that execve(2) would open for execution; the checks come in the kernel's order.
pub(super) fn open(path: &Path, ask: Ask) -> Result<File, Reason> {
    let metadata = std::fs::metadata(path).map_err(|error| Reason::io("look up", &error))?;
    if metadata.is_dir() {
        return Err(Reason::Directory);
    }
    if !metadata.is_file() {
        return Err(Reason::NotRegular);
    }
    may_execute(path).map_err(|errno| Reason::system("execute", errno))?;
    if ask == Ask::Kernel && LINKER.get() != Some(&(metadata.dev(), metadata.ino())) {
        ask_kernel(path)?;
    }
    // The path may have become a FIFO since the check; opening it must not block.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|error| match Reason::io("open", &error) {
        Reason::PermissionDenied => Reason::Unreadable,
        other => other,
    })?;
    let metadata = file.metadata().map_err(|error| Reason::io("look up", &error))?;
    if metadata.is_file() { Ok(file) } else { Err(Reason::NotRegular) }
}

/// May this process's effective user execute the file, by its mode and its mount?
fn may_execute(path: &Path) -> nix::Result<()> {
    match faccessat(AT_FDCWD, path, AccessFlags::X_OK, AtFlags::AT_EACCESS) {
        // The filters of some containers forbid calls that they do not know. This takes seven system calls.
        Err(Errno::EPERM) => eaccess(path, AccessFlags::X_OK),
        result => result,
    }
}

/// [`open`] for an interpreter's name. The kernel resolves that name itself and takes an empty one
/// for the current directory; for a path from a program an empty name is ENOENT.
pub(super) fn open_interpreter(path: &Path, ask: Ask) -> Result<File, Reason> {
    if path.as_os_str().is_empty() { Err(Reason::Directory) } else { open(path, ask) }
}

/// Asks the kernel whether it would execute this file (kernels since 6.14 answer). It knows what
/// access(2) does not: which processes have the file open for writing, and the decision of security
/// modules.
fn ask_kernel(path: &Path) -> Result<(), Reason> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Reason::NotFound)?;
    let arguments = [path.as_ptr(), std::ptr::null()];
    let environment: [*const libc::c_char; 1] = [std::ptr::null()];
    // SAFETY: path and both vectors are NUL-terminated and outlive the call. A kernel that knows
    // AT_EXECVE_CHECK executes nothing; one that does not answers EINVAL, since execveat refuses
    // flags that it does not know.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_execveat,
            libc::AT_FDCWD,
            path.as_ptr(),
            arguments.as_ptr(),
            environment.as_ptr(),
            AT_EXECVE_CHECK,
        )
    };
    match Errno::result(answer) {
        Ok(_) => Ok(()),
        // The kernel has no such flag or system call, or a filter forbids it. The checks before and
        // after have to suffice.
        Err(Errno::EINVAL | Errno::ENOSYS | Errno::EPERM) => Ok(()),
        Err(errno) => Err(Reason::system("execute", errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::forked::in_child;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn open(path: &Path) -> Result<File, Reason> {
        super::open(path, Ask::Kernel)
    }

    fn executable(path: &Path, mode: u32) {
        fs::write(path, "").expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode set");
    }

    fn resolve(name: &str, path: &str) -> Result<PathBuf, LoadError> {
        resolve_command(name.as_ref(), Some(path.as_ref()))
    }

    #[test]
    fn search() {
        in_child(|| {
            let directory = tempfile::tempdir().expect("directory");
            let root = directory.path();
            for sub in ["plain", "good", "other"] {
                fs::create_dir(root.join(sub)).expect("directory");
            }
            executable(&root.join("plain/tool"), 0o644);
            executable(&root.join("good/tool"), 0o755);
            executable(&root.join("other/tool"), 0o755);
            executable(&root.join("plain/data"), 0o644);
            let path = |subs: &[&str]| {
                subs.iter()
                    .map(|sub| format!("{}/{sub}", root.display()))
                    .collect::<Vec<_>>()
                    .join(":")
            };
            // Files that are not executable, files used as directories and missing directories are
            // skipped.
            let all = path(&["missing", "plain/tool", "plain", "good", "other"]);
            assert_eq!(resolve("tool", &all).expect("found"), root.join("good/tool"));
            let refused = resolve("data", &all).expect_err("not executable");
            assert_eq!(
                (refused.path.clone(), refused.errno()),
                (root.join("plain/data"), libc::EACCES)
            );
            let missing = resolve("nothing", &all).expect_err("missing");
            assert_eq!(missing.to_string(), "nothing: command not found");
            assert_eq!(missing.exit_status(), 127);
            assert_eq!(resolve("", &all).expect_err("empty").exit_status(), 127);
            assert_eq!(resolve(&"x".repeat(300), &all).expect_err("long").exit_status(), 127);
            assert_eq!(resolve("a/b", &all).expect("a path"), Path::new("a/b"));
            assert_eq!(
                resolve_command("sh".as_ref(), None).expect("default path"),
                Path::new("/bin/sh")
            );
            // An empty entry is the current directory, and the candidate is then the bare name.
            assert_eq!(Path::new("").join("tool"), Path::new("tool"));
        });
    }

    #[test]
    fn refusals() {
        in_child(|| {
            let directory = tempfile::tempdir().expect("directory");
            let root = directory.path();
            let reason = |path: &Path| open(path).expect_err("refused");
            assert_eq!(reason(&root.join("missing")), Reason::NotFound);
            assert_eq!(reason(Path::new("nul\0inside")), Reason::NotFound);
            assert_eq!(reason(root), Reason::Directory);
            assert_eq!(reason(Path::new("/dev/null")), Reason::NotRegular);
            let plain = root.join("plain");
            executable(&plain, 0o644);
            assert_eq!(reason(&plain), Reason::PermissionDenied);
            assert_eq!(reason(&plain.join("below")).errno(), Errno::ENOTDIR);
            std::os::unix::fs::symlink("loop", root.join("loop")).expect("link");
            assert_eq!(reason(&root.join("loop")).errno(), Errno::ELOOP);
            std::os::unix::fs::symlink("missing", root.join("dangling")).expect("link");
            assert_eq!(reason(&root.join("dangling")), Reason::NotFound);
            assert_eq!(reason(&root.join("x".repeat(300))).errno(), Errno::ENAMETOOLONG);
            let fifo = root.join("fifo");
            nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("fifo");
            assert_eq!(reason(&fifo), Reason::NotRegular);
            let good = root.join("good");
            executable(&good, 0o755);
            assert!(open(&good).is_ok());
        });
    }

    #[test]
    fn open_for_writing() {
        in_child(|| {
            let directory = tempfile::tempdir().expect("directory");
            let path = directory.path().join("busy");
            executable(&path, 0o755);
            let writer = OpenOptions::new().write(true).open(&path).expect("writer");
            let answer = open(&path);
            // Only kernels since 6.14 answer.
            let knows = Errno::result(ask_unknown_file()) == Err(Errno::ENOENT);
            assert_eq!(answer.err(), knows.then_some(Reason::Busy));
            assert!(super::open(&path, Ask::Nobody).is_ok());
            drop(writer);
            assert!(open(&path).is_ok());
        });
    }

    /// ENOENT from kernels that know AT_EXECVE_CHECK, EINVAL from others.
    fn ask_unknown_file() -> i64 {
        let environment: [*const libc::c_char; 1] = [std::ptr::null()];
        // SAFETY: as in `ask_kernel`; there is no file of that name.
        unsafe {
            libc::syscall(
                libc::SYS_execveat,
                libc::AT_FDCWD,
                c"/nonexistent".as_ptr(),
                environment.as_ptr(),
                environment.as_ptr(),
                AT_EXECVE_CHECK,
            )
        }
    }
}
