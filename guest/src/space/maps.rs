//! The kernel's list of mappings: `/proc/thread-self/maps`, parsed (proc_pid_maps(5)).

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::ffi::OsStringExt;

use nix::sys::mman::ProtFlags;

/// One mapping of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// Addresses, page-aligned.
    pub range: Range<u64>,
    /// Permissions.
    pub prot: ProtFlags,
    /// Whether it is `MAP_SHARED`.
    pub shared: bool,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// The file's device: major and minor number; zeros for anonymous memory.
    pub device: (u32, u32),
    /// The file's inode; zero for anonymous memory.
    pub inode: u64,
    /// The file's path, or a name in brackets such as `[heap]`.
    pub path: Option<OsString>,
}

/// The list of this process's mappings.
///
/// # Errors
/// The process has no `/proc` (in a jail), or `/proc` shows other processes, or reading is
/// forbidden.
pub fn maps_file() -> io::Result<File> {
    File::open("/proc/thread-self/maps")
}

/// The mappings of this process, ascending.
///
/// # Errors
/// As [`maps_file`].
pub fn maps() -> io::Result<Vec<MapEntry>> {
    // The file reports size 0; without reserved room `read_to_end` would read it a few bytes at a
    // time.
    let mut text = Vec::with_capacity(16 << 10);
    maps_file()?.read_to_end(&mut text)?;
    text.split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            parse_line(line)
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/thread-self/maps"))
        })
        .collect()
}

/// `start-end perms offset major:minor inode   path`; numbers but the inode are hexadecimal.
pub fn parse_line(line: &[u8]) -> Option<MapEntry> {
    let mut fields = line.splitn(6, |&byte| byte == b' ');
    let mut next = || std::str::from_utf8(fields.next()?).ok();
    let (start, end) = next()?.split_once('-')?;
    let permissions = next()?.as_bytes();
    let offset = u64::from_str_radix(next()?, 16).ok()?;
    let (major, minor) = next()?.split_once(':')?;
    let inode = next()?.parse().ok()?;
    let path = fields.next().map(<[u8]>::trim_ascii_start).filter(|path| !path.is_empty());

    let mut prot = ProtFlags::PROT_NONE;
    for (letter, flag) in
        permissions.iter().zip([ProtFlags::PROT_READ, ProtFlags::PROT_WRITE, ProtFlags::PROT_EXEC])
    {
        prot.set(flag, *letter != b'-');
    }
    Some(MapEntry {
        range: u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?,
        prot,
        shared: *permissions.get(3)? == b's',
        offset,
        device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
        inode,
        path: path.map(unescape),
    })
}

/// The kernel writes a newline inside a path as `\012`, and escapes nothing else.
fn unescape(path: &[u8]) -> OsString {
    const NEWLINE: &[u8] = b"\\012";
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(&first) = rest.first() {
        if let Some(after) = rest.strip_prefix(NEWLINE) {
            bytes.push(b'\n');
            rest = after;
        } else {
            bytes.push(first);
            rest = &rest[1..];
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let entry = parse_line(
            b"55a57d068000-55a57d06a000 r-xp 00002000 fe:10 247030   /usr/bin/a b\\012c",
        )
        .unwrap();
        assert_eq!(entry.range, 0x55a57d068000..0x55a57d06a000);
        assert_eq!(entry.prot, ProtFlags::PROT_READ | ProtFlags::PROT_EXEC);
        assert!(!entry.shared);
        assert_eq!((entry.offset, entry.device, entry.inode), (0x2000, (0xfe, 0x10), 247030));
        assert_eq!(entry.path.as_deref(), Some("/usr/bin/a b\nc".as_ref()));

        let anonymous = parse_line(b"7f6cd8209000-7f6cd822b000 -w-s 00000000 00:00 0 ").unwrap();
        assert_eq!(anonymous.prot, ProtFlags::PROT_WRITE);
        assert!(anonymous.shared);
        assert_eq!(anonymous.path, None);

        for bad in
            ["", "1-2", "1-2 r-xp 0 0:0", "12 r-xp 0 0:0 0", "1-2 r-x 0 0:0 0", "x-2 r-xp 0 0:0 0"]
        {
            assert_eq!(parse_line(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn own_maps_hold_own_code_and_ascend() {
        // The kernel does not produce the list in one step, and other tests map memory at the same
        // time. Two equal lists mean that nothing changed between them.
        let twice = || Some((maps().expect("maps"), maps().expect("maps")));
        let (maps, _) = std::iter::from_fn(twice)
            .find(|(first, second)| first == second)
            .expect("a quiet moment");
        let here = own_maps_hold_own_code_and_ascend as fn() as usize as u64;
        let entry = maps.iter().find(|entry| entry.range.contains(&here)).expect("own code");
        assert!(entry.prot.contains(ProtFlags::PROT_EXEC));
        assert!(entry.inode != 0 && entry.path.is_some());
        assert!(maps.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start));
    }
}
