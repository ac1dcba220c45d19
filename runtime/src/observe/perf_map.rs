//! `/tmp/perf-PID.map`: names of what is in the code cache, for `perf report`
//! (tools/perf/Documentation/jit-interface.txt).
//!
//! A line is an address, a size and a name. Fragments are called after their version and where in
//! the guest they start: `dynasour:t12:work+0x28`, with `:exits` for the code off the path; stubs
//! are `dynasour:stub:…`, copied blocks `dynasour:copy:…`. The file is written at the end of the
//! run; code that was dropped before is in it, and so may be under the addresses of what came
//! after.

use crate::observe::census;
use dynasour_guest::symbols::Symbols;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// One piece of code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where it is.
    pub code: Range<u64>,
    /// What it is: a version's name, `stub`, `copy`.
    pub what: String,
    /// Where it starts in the guest.
    pub pc: u64,
    /// Is it off the path?
    pub cold: bool,
}

/// The file of this process.
pub fn path() -> PathBuf {
    format!("/tmp/perf-{}.map", std::process::id()).into()
}

/// Writes it.
///
/// # Errors
/// It cannot be written; for one that is there and not ours, or a link, that is so.
pub fn write(pieces: &[Piece]) -> io::Result<()> {
    let symbols = Symbols::read(census::images().into_iter().map(Into::into));
    let text = lines(pieces, &symbols);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options.open(path())?.write_all(text.as_bytes())
}

fn lines(pieces: &[Piece], symbols: &Symbols) -> String {
    let mut text = String::new();
    for piece in pieces.iter().filter(|p| !p.code.is_empty()) {
        let (start, size) = (piece.code.start, piece.code.end - piece.code.start);
        let exits = if piece.cold { ":exits" } else { "" };
        let _ = writeln!(
            text,
            "{start:x} {size:x} dynasour:{}:{}{exits}",
            piece.what,
            symbols.name(piece.pc)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_a_piece() {
        let piece =
            |cold| Piece { code: 0x2000_0000..0x2000_0040, what: "t1".into(), pc: 0x1234, cold };
        let empty = Piece { code: 5..5, ..piece(false) };
        let text = lines(&[piece(false), empty, piece(true)], &Symbols::default());
        assert_eq!(text, "20000000 40 dynasour:t1:0x1234\n20000000 40 dynasour:t1:0x1234:exits\n");
    }
}
