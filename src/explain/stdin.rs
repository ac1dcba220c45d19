//! Standard input for a program that runs twice: each run reads it from the same place on.
//!
//! | standard input | what a run gets |
//! | --- | --- |
//! | a file | the file, at the offset that it had at first |
//! | a pipe or socket | a pipe, with what earlier runs have read, and then the rest |
//! | a terminal, another device, nothing | the same |
//!
//! Data: [`Input`]. What comes by a pipe is kept in a temporary file without a name. It is read only
//! when a run asks for more, so an endless input is no problem.
//!
//! Invariants: bytes are saved before any run gets them. A feeding thread holds the lock of the input
//! while it waits for more; what is saved can be read without that lock.
//!
//! Example: `seq 9 | dynasour explain head -1`: the first run gets nine lines and ends, the second run gets
//! the same nine.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that are read at once (the size of a pipe's buffer).
const CHUNK: usize = 64 << 10;

/// Our standard input.
pub enum Input {
    /// The runs inherit it.
    Inherited,
    /// A file, and the offset from which each run reads it.
    File(File, u64),
    /// A pipe.
    Pipe(Arc<Saved>),
}

/// What was read from a pipe.
pub struct Saved {
    file: File,
    /// Bytes in the file.
    length: Mutex<u64>,
    /// The pipe.
    input: Mutex<File>,
}

impl Input {
    /// Standard input, for more than one run if `again`.
    ///
    /// # Errors
    /// A temporary file is needed and cannot be made.
    pub fn new(again: bool) -> Result<Input> {
        let stdin = std::io::stdin().as_fd().try_clone_to_owned().map(File::from);
        let Some(mut file) = stdin.ok().filter(|_| again) else { return Ok(Input::Inherited) };
        let Ok(about) = file.metadata() else { return Ok(Input::Inherited) };
        if about.is_file() {
            let offset = file.stream_position().context("standard input")?;
            return Ok(Input::File(file, offset));
        }
        if about.file_type().is_fifo() || about.file_type().is_socket() {
            let saved = tempfile::tempfile().context("cannot make a temporary file")?;
            let (length, input) = (Mutex::new(0), Mutex::new(file));
            return Ok(Input::Pipe(Arc::new(Saved { file: saved, length, input })));
        }
        Ok(Input::Inherited)
    }

    /// Prepares a command whose program is about to start.
    ///
    /// # Errors
    /// The file cannot be rewound.
    pub fn prepare(&self, command: &mut Command) -> Result<()> {
        match self {
            Input::Inherited => {}
            Input::File(file, offset) => {
                let mut file = file;
                file.seek(SeekFrom::Start(*offset)).context("cannot rewind standard input")?;
            }
            Input::Pipe(_) => {
                command.stdin(Stdio::piped());
            }
        }
        Ok(())
    }

    /// Gives the input to a program that has started.
    pub fn feed(&self, stdin: Option<ChildStdin>) {
        if let (Input::Pipe(saved), Some(stdin)) = (self, stdin) {
            let saved = Arc::clone(saved);
            // The thread ends with the input, or when the program has closed its end. One that waits for
            // input at our end dies with us.
            std::thread::spawn(move || saved.copy(stdin));
        }
    }
}

impl Saved {
    /// Writes everything to `to`, from the beginning on.
    fn copy(&self, mut to: impl Write) {
        let (mut at, mut chunk) = (0, vec![0; CHUNK]);
        loop {
            match self.read(at, &mut chunk) {
                Ok(0) | Err(_) => return,
                Ok(n) if to.write_all(&chunk[..n]).is_err() => return,
                Ok(n) => at += n as u64,
            }
        }
    }

    fn length(&self) -> u64 {
        *self.length.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads bytes at an offset that is at most the saved length.
    fn read(&self, at: u64, chunk: &mut [u8]) -> std::io::Result<usize> {
        if at < self.length() {
            return self.file.read_at(chunk, at);
        }
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        // Another run may have read more while this one waited.
        if at < self.length() {
            return self.file.read_at(chunk, at);
        }
        let n = input.read(chunk)?;
        self.file.write_all_at(&chunk[..n], at)?;
        *self.length.lock().unwrap_or_else(PoisonError::into_inner) = at + n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reader_gets_everything_from_the_beginning() {
        let directory = tempfile::tempdir().expect("a directory");
        let name = directory.path().join("input");
        let text = "0123456789".repeat(CHUNK / 4);
        std::fs::write(&name, &text).expect("written");
        let saved = Saved {
            file: tempfile::tempfile().expect("a file"),
            length: Mutex::new(0),
            input: Mutex::new(File::open(&name).expect("there")),
        };
        // One that reads only the beginning, then two that read everything.
        let mut begun = [0; 10];
        saved.read(0, &mut begun).expect("readable");
        for _ in 0..2 {
            let mut copy = Vec::new();
            saved.copy(&mut copy);
            assert!(copy == text.as_bytes(), "{} bytes of {}", copy.len(), text.len());
        }
    }
}
