//! Tools outside the process that are told of native code when it is made: `perf`, by a file
//! ([`jitdump`]), and GDB, by a list in memory ([`gdb`]).
//!
//! | file | |
//! | --- | --- |
//! | [`jitdump`] | the file of `--jitdump` |
//! | [`gdb`] | the list of `--gdb`; [`elf`] makes its entries |
//! | [`guest_pcs`] | for which guest instruction native code is |
//! | [`source_lines`] | source lines of guest instructions |
//!
//! Names are those of the [perf map](super::perf_map). The symbols are those of the files that are mapped
//! when the code is made.
//!
//! Data: [`Watchers`], part of the fragments; the caller holds their lock. Invariants: each fragment and each
//! block is announced once, before a thread can execute it for long. Between two calls no descriptor is open.
//! (While a call reads symbols or writes the file, one is, which another thread of the guest could notice.)
//!
//! Only traces are announced at once. Copied blocks are many, so they wait for the next trace, or for
//! [`ENOUGH`] bytes; their records have the time at which they were made.
//!
//! Example: trace `t12` is made from the loop at `work+0x28`. The file gets two records, of its path and of
//! its exits, and GDB a file in memory with the symbols `dynasour:t12:work+0x28` and
//! `dynasour:t12:work+0x28:exits`.

mod elf;
mod gdb;
mod guest_pcs;
mod jitdump;
mod source_lines;

use crate::config::RunConfig;
use crate::observe::census::{self, Image};
use crate::observe::perf_map::NamedCode;
use dynasour_guest::symbols::Symbols;
use gdb::Gdb;
pub use guest_pcs::GuestPcs;
use jitdump::Jitdump;
pub use jitdump::path;
use source_lines::SourceLines;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use thiserror::Error;

/// Bytes of code of blocks that wait (guess: more are lost if the process is killed, fewer make more
/// system calls).
const ENOUGH: usize = 64 << 10;

/// The file of `--jitdump` cannot be made or written.
#[derive(Debug, Error)]
#[error("cannot write {}: {error}", path.display())]
pub struct WatchError {
    path: PathBuf,
    error: io::Error,
}

/// Code that was made.
pub struct Made<'a> {
    /// Its addresses.
    pub code: Range<u64>,
    /// Its bytes.
    pub bytes: &'a [u8],
    /// The name of its version, or `copy`.
    pub what: &'a str,
    /// The guest pc at which it starts.
    pub pc: u64,
    /// Is it the code of exits, off the path?
    pub cold: bool,
}

/// A block that waits to be announced.
struct Waiting {
    time: u64,
    code: NamedCode,
    bytes: Vec<u8>,
}

/// The tools that are told of new code.
pub struct Watchers {
    jitdump: Option<Jitdump>,
    gdb: Option<Gdb>,
    blocks: Vec<Waiting>,
    /// Bytes of code in `blocks`.
    waiting: usize,
    /// Number of fragments that were announced since everything was dropped.
    fragments: usize,
    names: Names,
}

impl Watchers {
    /// What `config` asks for; none if it asks for nothing. Makes the file of `--jitdump`.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn start(config: &RunConfig) -> Result<Option<Watchers>, WatchError> {
        if !config.is_watched() {
            return Ok(None);
        }
        let jitdump = config.jitdump.as_deref().map(Jitdump::create).transpose()?;
        Ok(Some(Watchers {
            jitdump,
            gdb: config.gdb.then(Gdb::default),
            blocks: Vec::new(),
            waiting: 0,
            fragments: 0,
            names: Names::default(),
        }))
    }

    /// The number of fragments that were announced since everything was dropped.
    pub fn fragments(&self) -> usize {
        self.fragments
    }

    /// A block was made.
    pub fn block(&mut self, block: Made<'_>) {
        if self.jitdump.is_none() {
            return;
        }
        self.waiting += block.bytes.len();
        self.blocks.push(Waiting {
            time: jitdump::now(),
            bytes: block.bytes.to_vec(),
            code: named(&block),
        });
        if self.waiting >= ENOUGH {
            self.write_blocks();
        }
    }

    /// A fragment was made: its code on the path and off it. `pcs` are of the former.
    pub fn fragment(&mut self, parts: [Made<'_>; 2], pcs: &GuestPcs) {
        self.fragments += 1;
        self.write_blocks();
        self.names.refresh();
        let Names { symbols, lines, .. } = &mut self.names;
        let [hot, cold] = parts;
        if let Some(gdb) = &mut self.gdb {
            let part = |made: &Made<'_>| (named(made).name(symbols), made.code.clone());
            gdb.register(&[part(&hot), part(&cold)]);
        }
        if let Some(jitdump) = &mut self.jitdump {
            let time = jitdump::now();
            let known = |&(offset, pc): &(u32, u64)| {
                Some((hot.code.start + u64::from(offset), lines.at(pc, symbols)?))
            };
            let lines: Vec<_> = pcs.iter().filter_map(known).collect();
            jitdump.lines(time, hot.code.start, &lines);
            for part in [&hot, &cold] {
                let name = named(part).name(symbols);
                jitdump.load(time, part.code.start, &name, part.bytes);
            }
            jitdump.write();
        }
    }

    /// All code is dropped.
    pub fn dropped(&mut self) {
        self.write_blocks();
        self.fragments = 0;
        self.gdb.iter_mut().for_each(Gdb::unregister_all);
    }

    /// The process ends.
    ///
    /// # Errors
    /// The file of `--jitdump` could not be written, now or before.
    pub fn end(&mut self) -> Result<(), WatchError> {
        self.write_blocks();
        self.jitdump.as_mut().map_or(Ok(()), Jitdump::end)
    }

    /// The process is a forked child: it does not write to its parent's file.
    pub fn stop_jitdump(&mut self) {
        self.jitdump = None;
        self.blocks.clear();
        self.waiting = 0;
    }

    fn write_blocks(&mut self) {
        let Some(jitdump) = self.jitdump.as_mut().filter(|_| !self.blocks.is_empty()) else {
            return;
        };
        self.names.refresh();
        for block in self.blocks.drain(..) {
            let name = block.code.name(&self.names.symbols);
            jitdump.load(block.time, block.code.code.start, &name, &block.bytes);
        }
        self.waiting = 0;
        jitdump.write();
    }
}

fn named(made: &Made<'_>) -> NamedCode {
    NamedCode { code: made.code.clone(), what: made.what.to_string(), pc: made.pc, cold: made.cold }
}

/// Symbols and source lines of the files that are mapped.
#[derive(Default)]
struct Names {
    images: Vec<Image>,
    symbols: Symbols,
    lines: SourceLines,
}

impl Names {
    /// Reads them again if other files are mapped.
    fn refresh(&mut self) {
        let images = census::images();
        if images != self.images {
            self.symbols = Symbols::read(images.iter().cloned().map(Into::into));
            self.images = images;
        }
    }
}
