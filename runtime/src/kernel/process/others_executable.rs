//! The executables of other processes that the translator runs.
//!
//! The kernel's `/proc/PID/exe` of such a process leads to the translator. Its guest's executable is the file
//! that is mapped where the kernel was told that the program's code begins ([`super::identity`]).
//!
//! Owns no data. Called for system calls with a path, on any thread. No lock: only files in `/proc` are read,
//! all of which need the same permission as the link. Invariant: a process that is something else, or whose guest has
//! not started or has unmapped its executable, is left to the kernel.
//!
//! Example: process 77 is `dynasour run -- /bin/sleep 9`, and `/proc/77/stat` says that its code begins at 0x12000.
//! `/proc/77/maps` has `/usr/bin/sleep` there, so that is where `/proc/77/exe` leads.

use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use dynasour_guest::space::parse_line;

/// The field `startcode` of proc_pid_stat(5), counted from the first one behind the name.
const START_CODE: usize = 26 - 3;

/// Does the normalised path of a directory stand for another process, or for a thread, by its number?
fn is_process(directory: &[u8]) -> bool {
    let is_number = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let mut parts = directory.split(|&byte| byte == b'/');
    let is_below_proc = parts.next() == Some(b"") && parts.next() == Some(b"proc");
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(process), None, ..) => is_below_proc && is_number(process),
        (Some(process), Some(b"task"), Some(task), None) => {
            is_below_proc && (is_number(process) || process == b"self") && is_number(task)
        }
        _ => false,
    }
}

/// Where the program's code begins, by the text of `/proc/PID/stat`. The name may contain blanks and parentheses.
fn start_of_code(stat: &[u8]) -> Option<u64> {
    let behind_name = &stat[stat.iter().rposition(|&byte| byte == b')')? + 1..];
    let fields = std::str::from_utf8(behind_name).ok()?;
    fields.split_ascii_whitespace().nth(START_CODE)?.parse().ok()
}

/// The file that is mapped at an address, by the text of `/proc/PID/maps`.
fn file_at(maps: &[u8], address: u64) -> Option<OsString> {
    let mut entries = maps.split(|&byte| byte == b'\n').filter_map(parse_line);
    entries.find(|entry| entry.range.contains(&address))?.path
}

/// The guest's executable, if the normalised path `/proc/…/exe` is the link of another process that the translator
/// runs, or of another thread. The kernel adds ` (deleted)` to the path of a file that is no longer there.
pub(crate) fn named(path: &[u8]) -> Option<CString> {
    let directory = path.strip_suffix(b"/exe").filter(|directory| is_process(directory))?;
    let directory = Path::new(OsStr::from_bytes(directory));
    let file = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let translator = file(Path::new("/proc/self/exe")).ok()?;
    if file(&directory.join("exe")).ok()? != translator {
        return None;
    }
    let code = start_of_code(&std::fs::read(directory.join("stat")).ok()?)?;
    let executable = file_at(&std::fs::read(directory.join("maps")).ok()?, code)?;
    let is_translator = file(Path::new(&executable)).is_ok_and(|found| found == translator);
    if is_translator { None } else { CString::new(executable.into_vec()).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_have_numbers() {
        for other in ["/proc/1", "/proc/4711", "/proc/12/task/13", "/proc/self/task/13"] {
            assert!(is_process(other.as_bytes()), "{other}");
        }
        for none in [
            "/proc/self",
            "/proc",
            "/proc/",
            "/proc/x",
            "/1",
            "/proc/1/fd/2",
            "/a/proc/1",
            "/proc/1/task/x",
        ] {
            assert!(!is_process(none.as_bytes()), "{none}");
        }
    }

    #[test]
    fn the_file_at_the_start_of_the_code_is_found() {
        let mut fields = vec!["0"; 40];
        fields[START_CODE] = "4096";
        let stat = format!("7 (a) b) {}", fields.join(" "));
        assert_eq!(start_of_code(stat.as_bytes()), Some(4096));
        assert_eq!(start_of_code(b"7 (a) S 1"), None);
        assert_eq!(start_of_code(b""), None);
        let maps =
            b"0-1000 r--p 0 0:0 0 /a\n1000-2000 r-xp 0 0:0 0 /b c\n2000-3000 rw-p 0 0:0 0 \n";
        assert_eq!(file_at(maps, 4096).as_deref(), Some("/b c".as_ref()));
        assert_eq!(file_at(maps, 0x2000), None);
        assert_eq!(file_at(maps, 0x3000), None);
    }

    #[test]
    fn what_is_no_guest_is_left_to_the_kernel() {
        assert_eq!(named(b"/proc/1/exe"), None);
        assert_eq!(named(b"/proc/0/exe"), None);
        // This process is the same program as itself, but its code is no guest's.
        assert_eq!(named(format!("/proc/{}/exe", std::process::id()).as_bytes()), None);
    }
}
