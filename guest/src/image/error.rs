//! Why a program cannot be run: the file, the reason, execve(2)'s error number, and the exit status
//! that dynasour ends with.
//!
//! *Data.* A [`Reason`] says what is wrong. A [`LoadError`] adds the path that the user or the
//! guest asked for.
//!
//! *Invariants.* Each reason displays as one line, whatever bytes the paths in it have. Its error
//! number is the one that the kernel gives for the same file.
//!
//! *Use.* The command line prints the error and leaves with [`LoadError::exit_status`]; a guest's
//! execve fails with [`LoadError::errno`].

use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use thiserror::Error;

/// A program that cannot be run. Displays as one line that names the file and the reason.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}: {reason}", OneLine(path))]
pub struct LoadError {
    /// The path that was asked for.
    pub path: PathBuf,
    /// What is wrong with it, or with an interpreter it needs.
    pub reason: Reason,
}

/// What is wrong with a program file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Reason {
    /// No file has this path.
    #[error("no such file or directory")]
    NotFound,
    /// No directory of the search path has such a command.
    #[error("command not found")]
    CommandNotFound,
    /// The path is a directory.
    #[error("is a directory")]
    Directory,
    /// The path is a device, a socket or a FIFO.
    #[error("not a regular file")]
    NotRegular,
    /// No permission to execute the file or to search its directory, or its file system is mounted
    /// noexec.
    #[error("permission denied")]
    PermissionDenied,
    /// The kernel could execute this, but a translator has to read it.
    #[error("may be executed but not read, and a translator must read it")]
    Unreadable,
    /// Another process has the file open for writing.
    #[error("text file busy")]
    Busy,
    /// Neither ELF nor `#!`.
    #[error("neither an ELF file nor a script")]
    UnknownFormat,
    /// An ELF file of another class, byte order, machine or type.
    #[error("{0}")]
    Foreign(String),
    /// An ELF file whose headers contradict themselves, the file's size, or the machine.
    #[error("corrupt ELF file: {0}")]
    Malformed(String),
    /// A `#!` line without an interpreter's name, or with one that does not fit.
    #[error("its #! line names no interpreter")]
    BadScriptLine,
    /// A chain of scripts whose interpreters are scripts is longer than the kernel allows.
    #[error("too many levels of script interpreters")]
    ScriptDepth,
    /// The interpreter of a script cannot be run.
    #[error("script interpreter {}: {reason}", OneLine(interpreter))]
    ScriptInterpreter {
        /// The interpreter's path as the script gives it.
        interpreter: PathBuf,
        /// What is wrong with it.
        reason: Box<Reason>,
    },
    /// The dynamic linker that an ELF file asks for cannot be used.
    #[error("ELF interpreter {}: {reason}", OneLine(interpreter))]
    ElfInterpreter {
        /// The interpreter's path as the ELF file gives it.
        interpreter: PathBuf,
        /// What is wrong with it.
        reason: Box<Reason>,
    },
    /// The address space has no room for the mapping, or the system refuses it.
    #[error("cannot map {what}: {}", errno.desc())]
    CannotMap {
        /// A segment and its addresses, or the stack.
        what: String,
        /// The system's answer.
        errno: Errno,
    },
    /// Arguments and environment do not fit on the stack.
    #[error("argument list too long")]
    ArgumentsTooLong,
    /// The system refused an operation on the file.
    #[error("cannot {action}: {}", errno.desc())]
    System {
        /// What was attempted: "open", "read", …
        action: &'static str,
        /// The system's answer.
        errno: Errno,
    },
}

impl LoadError {
    /// The error number that execve(2) would return.
    pub fn errno(&self) -> i32 {
        self.reason.errno() as i32
    }

    /// The exit status of a command line that cannot run its program: 127 when the program does not
    /// exist, 126 when it exists but cannot be run.
    pub fn exit_status(&self) -> i32 {
        match self.reason {
            Reason::NotFound | Reason::CommandNotFound => 127,
            _ => 126,
        }
    }
}

impl Reason {
    /// The error number that execve(2) would return.
    pub fn errno(&self) -> Errno {
        match self {
            Reason::NotFound | Reason::CommandNotFound => Errno::ENOENT,
            Reason::Directory
            | Reason::NotRegular
            | Reason::PermissionDenied
            | Reason::Unreadable => Errno::EACCES,
            Reason::Busy => Errno::ETXTBSY,
            Reason::UnknownFormat
            | Reason::Foreign(_)
            | Reason::Malformed(_)
            | Reason::BadScriptLine => Errno::ENOEXEC,
            Reason::ScriptDepth => Errno::ELOOP,
            Reason::ScriptInterpreter { reason, .. } => reason.errno(),
            // The kernel answers ELIBBAD for a dynamic linker that it cannot load.
            Reason::ElfInterpreter { reason, .. } => match reason.errno() {
                Errno::ENOEXEC => Errno::ELIBBAD,
                errno => errno,
            },
            Reason::CannotMap { errno, .. } | Reason::System { errno, .. } => *errno,
            Reason::ArgumentsTooLong => Errno::E2BIG,
        }
    }

    /// Adds the path of the file that this reason is about.
    pub(super) fn about(self, path: &Path) -> LoadError {
        LoadError { path: path.to_path_buf(), reason: self }
    }

    /// For a system call on a path or a file.
    pub(super) fn system(action: &'static str, errno: Errno) -> Reason {
        match errno {
            Errno::ENOENT => Reason::NotFound,
            Errno::EACCES => Reason::PermissionDenied,
            Errno::ETXTBSY => Reason::Busy,
            errno => Reason::System { action, errno },
        }
    }

    /// For an I/O error of the standard library. A path that no system call can take counts as not
    /// found.
    pub(super) fn io(action: &'static str, error: &io::Error) -> Reason {
        match error.raw_os_error() {
            Some(raw) => Reason::system(action, Errno::from_raw(raw)),
            None if error.kind() == io::ErrorKind::InvalidInput => Reason::NotFound,
            None => Reason::System { action, errno: Errno::EIO },
        }
    }
}

/// Shows a path without letting it break the line or the terminal.
struct OneLine<'a>(&'a Path);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.as_os_str().as_bytes().iter().any(u8::is_ascii_control)
            || self.0.as_os_str().is_empty()
        {
            write!(f, "{:?}", self.0)
        } else {
            write!(f, "{}", self.0.display())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line() {
        let error = Reason::NotFound.about(Path::new("a\nb\x1b[31m"));
        assert_eq!(error.to_string(), "\"a\\nb\\u{1b}[31m\": no such file or directory");
        assert_eq!(
            Reason::NotFound.about(Path::new("")).to_string(),
            "\"\": no such file or directory"
        );
        let nested = Reason::ScriptInterpreter {
            interpreter: "/x".into(),
            reason: Box::new(Reason::ElfInterpreter {
                interpreter: "/y".into(),
                reason: Box::new(Reason::Directory),
            }),
        };
        assert_eq!(
            nested.about(Path::new("/s")).to_string(),
            "/s: script interpreter /x: ELF interpreter /y: is a directory"
        );
    }

    #[test]
    fn status_and_errno() {
        let interpreter =
            |reason| Reason::ElfInterpreter { interpreter: "/y".into(), reason: Box::new(reason) };
        let cases = [
            (Reason::NotFound, libc::ENOENT, 127),
            (Reason::CommandNotFound, libc::ENOENT, 127),
            (Reason::Directory, libc::EACCES, 126),
            (Reason::Busy, libc::ETXTBSY, 126),
            (Reason::Malformed(String::new()), libc::ENOEXEC, 126),
            (interpreter(Reason::NotFound), libc::ENOENT, 126),
            (interpreter(Reason::Malformed(String::new())), libc::ELIBBAD, 126),
            (Reason::ScriptDepth, libc::ELOOP, 126),
        ];
        for (reason, errno, status) in cases {
            let error = reason.about(Path::new("/p"));
            assert_eq!((error.errno(), error.exit_status()), (errno, status), "{error}");
        }
    }
}
