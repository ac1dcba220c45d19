//! Scratch directories, and the comparison of the files that programs leave in them.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// One directory entry, without times and inode numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A directory and its permission bits.
    Directory(u32),
    /// A symbolic link's target.
    Link(PathBuf),
    /// A regular file's permission bits and contents.
    File(u32, Vec<u8>),
    /// A fifo, socket or device.
    Other,
}

/// All entries below a directory, by relative path.
pub type Tree = BTreeMap<PathBuf, Entry>;

/// Empties or makes a directory. It has the same path for each run, because programs print paths.
///
/// # Errors
/// The system's message with the path.
pub fn fresh(directory: &Path) -> Result<(), String> {
    let fail = |error: std::io::Error| format!("{}: {error}", directory.display());
    if directory.exists() {
        fs::remove_dir_all(directory).map_err(fail)?;
    }
    fs::create_dir_all(directory).map_err(fail)
}

/// Writes a file that is to be executed, with these permission bits. Another process does, since a file
/// that is open for writing cannot be executed, and a child that another test has just made has all
/// open files of this process until it executes its program.
///
/// # Errors
/// The system's message with the path.
pub fn write_program(path: &Path, bytes: &[u8], mode: u32) -> Result<(), String> {
    let fail = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut of = OsString::from("of=");
    of.push(path);
    let mut writer = Command::new("dd")
        .args([OsStr::new("status=none"), &of])
        .stdin(Stdio::piped())
        .spawn()
        .map_err(fail)?;
    let written = writer.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(bytes));
    let status = writer.wait().map_err(fail)?;
    written.map_err(fail)?;
    if !status.success() {
        return Err(format!("{}: dd: {status}", path.display()));
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(fail)
}

/// Reads everything below `directory`, except paths that `ignored` accepts.
///
/// # Errors
/// The system's message with the path that cannot be read.
pub fn snapshot(directory: &Path, ignored: &dyn Fn(&Path) -> bool) -> Result<Tree, String> {
    let mut tree = Tree::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(relative) = pending.pop() {
        let here = directory.join(&relative);
        for item in fs::read_dir(&here).map_err(|error| format!("{}: {error}", here.display()))? {
            let item = item.map_err(|error| format!("{}: {error}", here.display()))?;
            let name = relative.join(item.file_name());
            if ignored(&name) {
                continue;
            }
            let entry = read_entry(&item.path())
                .map_err(|error| format!("{}: {error}", item.path().display()))?;
            if matches!(entry, Entry::Directory(_)) {
                pending.push(name.clone());
            }
            tree.insert(name, entry);
        }
    }
    Ok(tree)
}

fn read_entry(path: &Path) -> std::io::Result<Entry> {
    let metadata = fs::symlink_metadata(path)?;
    let mode = metadata.permissions().mode() & 0o7777;
    Ok(if metadata.is_symlink() {
        Entry::Link(fs::read_link(path)?)
    } else if metadata.is_dir() {
        Entry::Directory(mode)
    } else if metadata.is_file() {
        Entry::File(mode, fs::read(path)?)
    } else {
        Entry::Other
    })
}

/// The first few differences between two trees; `None` if there are none.
pub fn difference(native: &Tree, other: &Tree) -> Option<String> {
    let mut lines = Vec::new();
    for (path, entry) in native {
        match other.get(path) {
            None => lines.push(format!("file {} is missing", path.display())),
            Some(here) if here != entry => {
                lines.push(format!("file {} {}", path.display(), unlike(entry, here)))
            }
            Some(_) => {}
        }
    }
    for path in other.keys().filter(|path| !native.contains_key(*path)) {
        lines.push(format!("file {} exists, natively it does not", path.display()));
    }
    if lines.is_empty() {
        return None;
    }
    let total = lines.len();
    lines.truncate(5);
    if total > lines.len() {
        lines.push(format!("and {} more", total - lines.len()));
    }
    Some(lines.join("\n  "))
}

fn unlike(native: &Entry, here: &Entry) -> String {
    match (native, here) {
        (Entry::File(a, _), Entry::File(b, _)) if a != b => {
            format!("has mode {b:o}, natively {a:o}")
        }
        (Entry::File(_, a), Entry::File(_, b)) => {
            let at = a.iter().zip(b).position(|(x, y)| x != y).unwrap_or(a.len().min(b.len()));
            format!("differs at byte {at} ({} bytes, natively {})", b.len(), a.len())
        }
        (Entry::Directory(a), Entry::Directory(b)) => format!("has mode {b:o}, natively {a:o}"),
        (Entry::Link(a), Entry::Link(b)) => {
            format!("points to {}, natively to {}", b.display(), a.display())
        }
        _ => "is of another kind".to_owned(),
    }
}
