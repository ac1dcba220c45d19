//! Where a result goes: a file, standard output, or a pager; and how wide it may be.
//!
//! Data: [`Output`], an open file ([`crate::bench::output`]). [`Terminal`], what the output can show.
//!
//! Invariants: the file is opened before a guest starts, and an existing one keeps its contents until the
//! result is there. If there is no result, a file that was made for it is removed when the output is
//! dropped. A reader that ends early is no error. No lock: one thread writes.
//!
//! Example: `dynasour explain ./a.out` on a terminal with 40 lines: a text of 60 lines goes to
//! `less -FRX`, one of 30 directly to the terminal.

use crate::bench::output;
use anyhow::{Context, Result};
use std::io::{BufWriter, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Columns of a text that goes to no terminal.
const WIDTH: usize = 100;
/// Fewest columns that a text is made for.
const NARROWEST: usize = 40;
/// The pager, if neither $DYNASOUR_PAGER nor $PAGER names another.
const PAGER: &str = "less -FRX";

/// Where a result goes.
pub struct Output(output::Output);

impl Output {
    /// Opens a file, or standard output for none.
    ///
    /// # Errors
    /// The file has contents and `force` is not given, or it cannot be written.
    pub fn open(path: Option<&Path>, force: bool) -> Result<Output> {
        path.map_or_else(output::Output::stdout, |path| output::Output::open(path, force))
            .map(Output)
    }

    /// The file; none for standard output.
    pub fn path(&self) -> Option<&Path> {
        self.0.path()
    }

    /// Writes what `make` writes.
    ///
    /// # Errors
    /// That of `make`, or the file cannot be written.
    pub fn write(&mut self, make: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
        let name = self.0.cannot_write();
        let mut out = BufWriter::new(self.0.file().with_context(|| name.clone())?);
        match make(&mut out).and_then(|()| out.flush().context(name)) {
            Err(error) if is_closed(&error) => Ok(()),
            written => written,
        }
    }

    /// Writes a text for people: by a pager, if it is longer than the terminal and `pages`.
    ///
    /// # Errors
    /// The text cannot be written.
    pub fn show(&mut self, text: &str, terminal: &Terminal, pages: bool) -> Result<()> {
        let is_long = terminal.height.is_some_and(|height| text.lines().count() > height);
        if self.path().is_none() && pages && is_long && page(text) {
            return Ok(());
        }
        self.write(|out| Ok(out.write_all(text.as_bytes())?))
    }
}

/// Has the reader of the output ended?
fn is_closed(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        let json = cause.downcast_ref::<serde_json::Error>().and_then(|e| e.io_error_kind());
        io.or(json) == Some(ErrorKind::BrokenPipe)
    })
}

/// Shows a text by a pager; false if there is none.
fn page(text: &str) -> bool {
    let named = |name| std::env::var(name).ok().filter(|pager| !pager.trim().is_empty());
    let pager = named("DYNASOUR_PAGER").or_else(|| named("PAGER"));
    let words = match shell_words::split(pager.as_deref().unwrap_or(PAGER)) {
        Ok(words) if !words.is_empty() => words,
        _ => return false,
    };
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).stdin(Stdio::piped());
    if std::env::var_os("LESS").is_none() {
        // A `less` that was named without options must show colours, too.
        command.env("LESS", "FRX");
    }
    let Ok(mut pager) = command.spawn() else { return false };
    if let Some(mut stdin) = pager.stdin.take() {
        // A pager that ends early has shown enough.
        let _ = stdin.write_all(text.as_bytes());
    }
    pager.wait().is_ok()
}

/// What the output can show.
#[derive(Clone, Copy, Debug)]
pub struct Terminal {
    /// Columns.
    pub width: usize,
    /// Lines; none if it is no terminal.
    pub height: Option<usize>,
    /// Does the locale have all characters?
    pub is_unicode: bool,
}

impl Terminal {
    /// Of an output.
    pub fn of(output: &Output) -> Terminal {
        let size = match output.path() {
            None if std::io::stdout().is_terminal() => terminal_size::terminal_size(),
            _ => None,
        };
        let (width, height) = match size {
            Some((width, height)) => (usize::from(width.0), Some(usize::from(height.0))),
            None => (WIDTH, None),
        };
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
            .into_iter()
            .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
        let locale = locale.unwrap_or_default().to_uppercase();
        let is_unicode = locale.contains("UTF-8") || locale.contains("UTF8");
        Terminal { width: width.max(NARROWEST), height, is_unicode }
    }

    /// A bar of `cells` characters, of which a share is filled.
    pub fn bar(&self, share: f64, cells: usize) -> String {
        let eighths = (share.clamp(0.0, 1.0) * cells as f64 * 8.0).round() as usize;
        if !self.is_unicode {
            let filled = (eighths + 4) / 8;
            return "#".repeat(filled) + &" ".repeat(cells - filled.min(cells));
        }
        let mut bar = "█".repeat(eighths / 8);
        if !eighths.is_multiple_of(8) {
            bar.extend(char::from_u32(0x2590 - (eighths % 8) as u32));
        }
        let used = eighths.div_ceil(8);
        bar + &" ".repeat(cells - used.min(cells))
    }

    /// A text in the characters that the output has.
    pub fn text(&self, text: String) -> String {
        if self.is_unicode || text.is_ascii() {
            return text;
        }
        text.replace('…', "...").replace('±', "+-").replace('µ', "u")
    }
}

/// From here on, a pipe without a reader is an error of a write and does not end this process. The
/// programs that it starts are not affected.
pub fn ignore_broken_pipes() {
    // SAFETY: no handler is installed, and no other thread changes this signal's disposition.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_the_width_that_was_asked_for() {
        let unicode = Terminal { width: 80, height: None, is_unicode: true };
        let plain = Terminal { is_unicode: false, ..unicode };
        for share in [0.0, 0.01, 0.06, 0.5, 0.99, 1.0, 2.0, f64::NAN] {
            assert_eq!(unicode.bar(share, 8).chars().count(), 8, "{share}");
            assert_eq!(plain.bar(share, 8).len(), 8, "{share}");
        }
        assert_eq!((unicode.bar(0.5, 4), plain.bar(0.5, 4)), ("██  ".into(), "##  ".into()));
        assert_eq!(unicode.bar(1.0 / 16.0, 2), "▏ ");
        assert_eq!(plain.text("± 3 µs…".into()), "+- 3 us...");
    }

    #[test]
    fn a_result_that_is_not_there_leaves_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("x");
        drop(Output::open(Some(&file), false).expect("opened"));
        assert!(!file.exists());
        std::fs::write(&file, "mine").expect("written");
        assert!(Output::open(Some(&file), false).is_err());
        drop(Output::open(Some(&file), true).expect("opened"));
        assert_eq!(std::fs::read_to_string(&file).expect("there"), "mine");
        let mut output = Output::open(Some(&file), true).expect("opened");
        output.write(|out| Ok(out.write_all(b"x")?)).expect("written");
        assert_eq!(std::fs::read_to_string(&file).expect("there"), "x");
    }
}
