//! Where results go: standard output, and files that are opened before anything is measured. `explain` and `report`
//! write by an [`Output`], too.
//!
//! Data: a [`Sink`] is a form and a place. JSON Lines and comma-separated values are written row by
//! row as rows are measured, the other forms at the end.
//!
//! *Invariants.* A file with contents is not changed without `--force`, and with it only when there
//! is something to write. A file that was created and not written to is removed. One file is not
//! opened twice. No lock.
//!
//! ```text
//! Output::open("r.json", false)   creates r.json, or: r.json exists; --force overwrites it
//! ```

use crate::bench::report::{Report, Row};
use crate::bench::table;
use anyhow::{Context, Result, bail};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A place to write to.
#[derive(Debug)]
pub struct Output {
    /// `None`: standard output.
    path: Option<PathBuf>,
    to: File,
    created: bool,
    written: bool,
}

impl Output {
    /// Standard output.
    ///
    /// # Errors
    /// It is closed.
    pub fn stdout() -> Result<Output> {
        use std::os::fd::AsFd;
        let to = std::io::stdout().as_fd().try_clone_to_owned().context(RESULTS)?;
        Ok(Output { path: None, to: to.into(), created: false, written: true })
    }

    /// A file. It is emptied when it is first written to.
    ///
    /// # Errors
    /// It cannot be written, or has contents and `force` is not set.
    pub fn open(path: &Path, force: bool) -> Result<Output> {
        let cannot = || format!("cannot write {}", path.display());
        let (to, created) = match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let meta = path.metadata().with_context(cannot)?;
                if !(force || meta.is_file() && meta.len() == 0) {
                    bail!("{} exists; --force overwrites it", path.display());
                }
                (OpenOptions::new().write(true).open(path).with_context(cannot)?, false)
            }
            Err(error) => return Err(error).with_context(cannot),
        };
        Ok(Output { path: Some(path.to_path_buf()), to, created, written: false })
    }

    /// The file's path; none of standard output.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The file to write to, emptied before the first time.
    ///
    /// # Errors
    /// The system's.
    pub fn file(&mut self) -> std::io::Result<&File> {
        let is_first = !std::mem::replace(&mut self.written, true);
        if is_first && self.to.metadata()?.is_file() {
            self.to.set_len(0)?;
        }
        Ok(&self.to)
    }

    /// Appends to what was written so far.
    ///
    /// # Errors
    /// The system's, with the name of the file.
    pub fn write(&mut self, text: &str) -> Result<()> {
        let written = self.file().and_then(|mut file| file.write_all(text.as_bytes()));
        written.with_context(|| self.cannot_write())
    }

    /// The message of a failed write.
    pub fn cannot_write(&self) -> String {
        match &self.path {
            Some(path) => format!("cannot write {}", path.display()),
            None => RESULTS.to_string(),
        }
    }
}

const RESULTS: &str = "cannot write the results to standard output";

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(path) = self.path.as_ref().filter(|_| self.created && !self.written) {
            // Nobody needs an empty file; if it cannot be removed, it does no harm.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Refuses two outputs that are the same file.
///
/// # Errors
/// Names the file.
pub fn check_distinct<'a>(outputs: impl IntoIterator<Item = &'a Output>) -> Result<()> {
    let mut seen = Vec::new();
    for output in outputs {
        let Some(path) = &output.path else { continue };
        let meta =
            output.to.metadata().with_context(|| format!("cannot read {}", path.display()))?;
        let file = (meta.dev(), meta.ino());
        if meta.is_file() && seen.contains(&file) {
            bail!("{} is given for two outputs", path.display());
        }
        seen.push(file);
    }
    Ok(())
}

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// For people.
    Table,
    /// One value.
    Json,
    /// One value in each line.
    JsonLines,
    /// Comma-separated values.
    Csv,
    /// A table of Markdown.
    Markdown,
}

/// Results in one form at one place.
#[derive(Debug)]
pub struct Sink {
    /// The form.
    pub form: Form,
    output: Output,
    /// Whether a heading was written.
    begun: bool,
}

impl Sink {
    /// Writes nothing yet.
    pub fn new(form: Form, output: Output) -> Sink {
        Sink { form, output, begun: false }
    }

    /// Takes a row that was just measured.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn row(&mut self, row: &Row) -> Result<()> {
        match self.form {
            Form::JsonLines => self.output.write(&line(row)?),
            Form::Csv => {
                if !std::mem::replace(&mut self.begun, true) {
                    self.output.write(table::CSV_HEADING)?;
                }
                self.output.write(&table::csv_lines(row)?)
            }
            Form::Table | Form::Json | Form::Markdown => Ok(()),
        }
    }

    /// Ends, with all rows.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn finish(&mut self, report: &Report, earlier: Option<&Report>) -> Result<()> {
        match self.form {
            // A study without rows leaves a file without rows, not an older one.
            Form::Csv if !self.begun => self.output.write(table::CSV_HEADING),
            Form::JsonLines | Form::Csv => self.output.write(""),
            Form::Table => self.output.write(&report.table(earlier)),
            Form::Markdown => self.output.write(&report.markdown(earlier)),
            Form::Json => {
                let text = serde_json::to_string_pretty(report).context("results")?;
                self.output.write(&(text + "\n"))
            }
        }
    }

    /// The output, to compare it with others.
    pub fn output(&self) -> &Output {
        &self.output
    }
}

/// A value as a line of JSON.
///
/// # Errors
/// None is expected: the values are plain.
pub fn line(value: &impl serde::Serialize) -> Result<String> {
    Ok(serde_json::to_string(value).context("results")? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn contents_stay_until_there_is_something_to_write() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("r");
        drop(Output::open(&path, false).expect("new"));
        assert!(!path.exists());
        fs::write(&path, "old contents").expect("written");
        let message = Output::open(&path, false).expect_err("it exists").to_string();
        assert!(message.ends_with("r exists; --force overwrites it"), "{message}");
        drop(Output::open(&path, true).expect("forced"));
        assert_eq!(fs::read(&path).expect("there"), b"old contents");
        let mut output = Output::open(&path, true).expect("forced");
        output.write("a").expect("written");
        output.write("b").expect("written");
        drop(output);
        assert_eq!(fs::read(&path).expect("there"), b"ab");
        fs::write(&path, "").expect("written");
        drop(Output::open(&path, false).expect("empty files have nothing to lose"));
        assert!(path.exists());
        assert!(Output::open(&directory.path().join("none/r"), false).is_err());
    }

    #[test]
    fn one_file_is_not_written_twice() {
        let directory = tempfile::tempdir().expect("a directory");
        let (one, two) = (directory.path().join("one"), directory.path().join("two"));
        let open = |path: &Path| Output::open(path, true).expect("it opens");
        assert!(check_distinct([&open(&one), &open(&two)]).is_ok());
        let twice = [open(&one), open(&directory.path().join("./one"))];
        assert!(check_distinct(&twice).is_err());
        let null = Path::new("/dev/null");
        assert!(check_distinct([&open(null), &open(null)]).is_ok());
    }
}
