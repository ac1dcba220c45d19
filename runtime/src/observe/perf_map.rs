//! Writes `/tmp/perf-PID.map`, the names of the code in the code cache for `perf report` (Linux,
//! tools/perf/Documentation/jit-interface.txt).
//!
//! Each line is an address, a size and a name. The name of a fragment consists of its version and
//! the guest symbol at which it starts; `:exits` is appended for the code off the path. Resolved
//! stubs are named `dynasour:stub:…`, and copied blocks `dynasour:copy:…`.
//!
//! Data: none; the fragments own the list of [`NamedCode`]s. The file is written once, at the end of
//! the run. It also names code that was dropped before, so several lines may name the same addresses.
//! The caller of [`write()`] holds the lock of the fragments.
//!
//! Example: the hot code of trace 12, which starts at `work+0x28` in the guest, is the line
//! `20000000 40 dynasour:t12:work+0x28`.

use crate::observe::census;
use dynasour_guest::symbols::Symbols;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// A range of native code with its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedCode {
    /// The host addresses of the code.
    pub code: Range<u64>,
    /// The name of its version, or `stub` or `copy`.
    pub what: String,
    /// The guest pc at which it starts.
    pub pc: u64,
    /// Is it the code of exits, off the path?
    pub cold: bool,
}

impl NamedCode {
    /// Its name.
    pub fn name(&self, symbols: &Symbols) -> String {
        let exits = if self.cold { ":exits" } else { "" };
        format!("dynasour:{}:{}{exits}", self.what, symbols.name(self.pc))
    }
}

/// The path of this process's file.
pub fn path() -> PathBuf {
    format!("/tmp/perf-{}.map", std::process::id()).into()
}

/// Writes the file.
///
/// # Errors
/// The file cannot be written. This includes a file of another user at the path, and a symbolic
/// link.
pub fn write(pieces: &[NamedCode]) -> io::Result<()> {
    let symbols = Symbols::read(census::images().into_iter().map(Into::into));
    let text = lines(pieces, &symbols);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options.open(path())?.write_all(text.as_bytes())
}

fn lines(pieces: &[NamedCode], symbols: &Symbols) -> String {
    let mut text = String::new();
    for piece in pieces.iter().filter(|p| !p.code.is_empty()) {
        let (start, size) = (piece.code.start, piece.code.end - piece.code.start);
        let _ = writeln!(text, "{start:x} {size:x} {}", piece.name(symbols));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_a_piece() {
        let piece = |cold| NamedCode {
            code: 0x2000_0000..0x2000_0040,
            what: "t1".into(),
            pc: 0x1234,
            cold,
        };
        let empty = NamedCode { code: 5..5, ..piece(false) };
        let text = lines(&[piece(false), empty, piece(true)], &Symbols::default());
        assert_eq!(text, "20000000 40 dynasour:t1:0x1234\n20000000 40 dynasour:t1:0x1234:exits\n");
    }
}
