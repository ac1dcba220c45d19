//! The file of `--jitdump`, from which `perf inject --jit` makes ELF files for `perf report` and
//! `perf annotate` (Linux, tools/perf/Documentation/jitdump-specification.txt, version 1).
//!
//! ```text
//! header    magic "JiTD", version, size, machine, pad, pid, time, flags
//! record    id, size, time; then
//!   load        pid, tid, address (twice), size, index, name, code
//!   debug info  address, number of lines; for each: address, line, discriminator, file
//!   close       nothing
//! ```
//!
//! `perf record` finds the file by an executable mapping of its beginning, the *marker*. Times are those of
//! CLOCK_MONOTONIC in nanoseconds, so `perf record -k mono` is needed.
//!
//! Data: [`Jitdump`]. The file is opened for each write and closed again, because an open descriptor would be
//! seen by the guest. Where the guest changes its root or its rights, or where the file is replaced, the rest
//! of the records is missing, which [`Jitdump::end`] tells. Invariants: times ascend (blocks that
//! wait are written before the next trace); nothing is written after an error. The caller holds the lock of the
//! fragments.
//!
//! A forked child of the guest writes nothing. If the process executes another program, that one
//! overwrites the file, as it does the perf map.
//!
//! Example: process 4711 is started with `--jitdump /tmp`. `/tmp/jit-4711.dump` begins with
//! `44 54 69 4a 01 00 00 00`.

use super::WatchError;
use super::source_lines::Line;
use dynasour_guest::space::PAGE;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// "JiTD" in the processor's byte order.
const MAGIC: u32 = 0x4a69_5444;
const VERSION: u32 = 1;
/// Bytes of the header.
const HEADER: u32 = 40;
/// Bytes of what all records begin with.
const PREFIX: usize = 16;
/// EM_X86_64 (ELF).
const MACHINE: u32 = 62;

/// The kind of a record.
#[derive(Clone, Copy)]
enum Id {
    Load = 0,
    DebugInfo = 2,
    Close = 3,
}

/// The path of this process's file in a directory.
pub fn path(directory: &Path) -> PathBuf {
    directory.join(format!("jit-{}.dump", std::process::id()))
}

/// The time of a record.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes a timespec to `time`.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The executable mapping of the file's beginning.
struct Marker(NonNull<libc::c_void>);

// SAFETY: nothing reads or writes through the address.
unsafe impl Send for Marker {}

impl Marker {
    fn of(file: &File) -> io::Result<Marker> {
        let prot = libc::PROT_READ | libc::PROT_EXEC;
        let (null, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { libc::mmap(null, PAGE as usize, prot, libc::MAP_PRIVATE, fd, 0) };
        match NonNull::new(at).filter(|at| at.as_ptr() != libc::MAP_FAILED) {
            Some(at) => Ok(Marker(at)),
            None => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's.
        unsafe { libc::munmap(self.0.as_ptr(), PAGE as usize) };
    }
}

/// The file.
pub struct Jitdump {
    path: PathBuf,
    /// Device and inode, by which a file that was put in its place is noticed.
    identity: (u64, u64),
    _marker: Marker,
    /// Records that are not written yet.
    pending: Vec<u8>,
    /// The number of loads.
    loads: u64,
    /// Why nothing is written any more.
    failed: Option<io::Error>,
}

impl Jitdump {
    /// Makes the file in `directory`, and the marker.
    pub fn create(directory: &Path) -> Result<Jitdump, WatchError> {
        let path = path(directory);
        let made = Jitdump::create_file(&path);
        made.map_err(|error| WatchError { path, error })
    }

    fn create_file(path: &Path) -> io::Result<Jitdump> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.custom_flags(libc::O_NOFOLLOW).open(path)?;
        let mut header = Vec::new();
        for word in [MAGIC, VERSION, HEADER, MACHINE, 0, std::process::id()] {
            header.extend(word.to_le_bytes());
        }
        header.extend([now(), 0].map(u64::to_le_bytes).as_flattened());
        file.write_all(&header)?;
        let about = file.metadata()?;
        Ok(Jitdump {
            path: path.to_path_buf(),
            identity: (about.dev(), about.ino()),
            _marker: Marker::of(&file)?,
            pending: Vec::new(),
            loads: 0,
            failed: None,
        })
    }

    /// Adds a record of code at an address. Empty code gets none.
    pub fn load(&mut self, time: u64, address: u64, name: &str, code: &[u8]) {
        if code.is_empty() {
            return;
        }
        // SAFETY: has no effect.
        let thread = unsafe { libc::gettid() } as u32;
        let mut body = Vec::with_capacity(40 + name.len() + 1 + code.len());
        body.extend(std::process::id().to_le_bytes());
        body.extend(thread.to_le_bytes());
        for word in [address, address, code.len() as u64, self.loads] {
            body.extend(word.to_le_bytes());
        }
        body.extend(text(name));
        body.extend(code);
        self.record(Id::Load, time, &body);
        self.loads += 1;
    }

    /// Adds a record of the source lines of the code at `address`, before its load. No lines get none.
    pub fn lines(&mut self, time: u64, address: u64, lines: &[(u64, Line)]) {
        if lines.is_empty() {
            return;
        }
        let mut body = Vec::new();
        body.extend([address, lines.len() as u64].map(u64::to_le_bytes).as_flattened());
        for (at, line) in lines {
            body.extend(at.to_le_bytes());
            body.extend([line.line, 0].map(u32::to_le_bytes).as_flattened());
            body.extend(text(&line.file));
        }
        self.record(Id::DebugInfo, time, &body);
    }

    fn record(&mut self, id: Id, time: u64, body: &[u8]) {
        let size = (PREFIX + body.len()) as u32;
        self.pending.extend([id as u32, size].map(u32::to_le_bytes).as_flattened());
        self.pending.extend(time.to_le_bytes());
        self.pending.extend(body);
    }

    /// Writes what was added.
    pub fn write(&mut self) {
        let records = std::mem::take(&mut self.pending);
        if self.failed.is_none() && !records.is_empty() {
            self.failed = self.append(&records).err();
        }
    }

    fn append(&self, records: &[u8]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.append(true).custom_flags(libc::O_NOFOLLOW).open(&self.path)?;
        let about = file.metadata()?;
        if (about.dev(), about.ino()) != self.identity {
            return Err(io::Error::other("another file was put in its place"));
        }
        file.write_all(records)
    }

    /// Writes what was added, and that the process ends.
    ///
    /// # Errors
    /// Some record could not be written.
    pub fn end(&mut self) -> Result<(), WatchError> {
        self.record(Id::Close, now(), &[]);
        self.write();
        match self.failed.take() {
            None => Ok(()),
            Some(error) => Err(WatchError { path: self.path.clone(), error }),
        }
    }
}

/// A string as the file has it. Names of symbols and files contain no NUL.
fn text(text: &str) -> impl Iterator<Item = u8> {
    text.bytes().filter(|byte| *byte != 0).chain([0])
}
