//! Source lines of guest instructions, from the DWARF line tables of the mapped files.
//!
//! A file's tables are read when the first of its addresses is asked for. They may be in a separate
//! file that the executable names (`addr2line` follows build ids and debug links). A source file
//! that does not exist here gives a name and a line, but no text.
//!
//! Data: [`SourceLines`], the tables and the lines that were asked for. No lock.
//!
//! Example: `work+0x28` comes from `/src/thousand.c` line 12. [`SourceLines::at`] returns
//! `Source { file: 0, line: 12 }`, and [`SourceLines::files`] has the text of that line under 0.

use addr2line::Loader;
use dynasour_guest::symbols::Symbols;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Source files larger than this are not read (guess; generated files may be huge).
const LARGEST: u64 = 16 << 20;
/// Characters of a line that are kept (guess; longer lines are generated or data).
const LONGEST: usize = 240;

/// The line that an instruction comes from.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Index in [`super::model::Explanation::sources`].
    pub file: u32,
    /// The line, from 1.
    pub line: u32,
}

/// A source file, with the lines that some instruction comes from.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Its path, as the debug information names it.
    pub path: String,
    /// Texts by line number; empty if the file could not be read.
    pub lines: BTreeMap<u32, String>,
}

/// Finds source lines.
pub struct SourceLines<'a> {
    symbols: &'a Symbols,
    /// By mapped file; none where it has no debug information.
    tables: HashMap<PathBuf, Option<Loader>>,
    files: Vec<(SourceFile, Vec<String>)>,
}

impl<'a> SourceLines<'a> {
    /// Nothing is read yet.
    pub fn new(symbols: &'a Symbols) -> SourceLines<'a> {
        SourceLines { symbols, tables: HashMap::new(), files: Vec::new() }
    }

    /// The line that the instruction at `pc` comes from, if that is known.
    pub fn at(&mut self, pc: u64) -> Option<Source> {
        let (image, address) = self.symbols.in_file(pc)?;
        let table = self
            .tables
            .entry(image.to_path_buf())
            .or_insert_with(|| Loader::new(image).ok())
            .as_ref()?;
        let location = table.find_location(address).ok()??;
        let (path, line) = (location.file?, location.line.filter(|line| *line > 0)?);
        let file = match self.files.iter().position(|(file, _)| file.path == path) {
            Some(file) => file,
            None => {
                let file = SourceFile { path: path.to_string(), lines: BTreeMap::new() };
                let text = read(Path::new(path)).unwrap_or_default();
                self.files.push((file, text));
                self.files.len() - 1
            }
        };
        let (found, text) = &mut self.files[file];
        if let Some(text) = text.get(line as usize - 1) {
            found.lines.entry(line).or_insert_with(|| text.chars().take(LONGEST).collect());
        }
        Some(Source { file: file as u32, line })
    }

    /// The files of all lines that were found.
    pub fn files(self) -> Vec<SourceFile> {
        self.files.into_iter().map(|(file, _)| file).collect()
    }
}

/// The lines of a source file.
fn read(path: &Path) -> Option<Vec<String>> {
    let about = std::fs::metadata(path).ok()?;
    if !about.is_file() || about.len() > LARGEST {
        return None;
    }
    let bytes = std::fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).lines().map(str::to_string).collect())
}
