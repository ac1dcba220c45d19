//! Source lines of guest instructions, from the DWARF line tables of mapped files.
//!
//! The tables of a file are copied to the heap when the first of its addresses is asked for: a mapping
//! of them could meet one that the guest makes. Files whose tables are larger than [`LARGEST`] have no lines,
//! and neither have those whose debug information is in a separate file.
//!
//! Data: [`SourceLines`], with the tables of each file. The caller holds the lock of the fragments.
//!
//! Example: `work+0x28` comes from line 12 of `/src/thousand.c`.

use addr2line::Context;
use dynasour_guest::symbols::Symbols;
use gimli::{Dwarf, EndianArcSlice, LittleEndian, SectionId};
use object::{Object, ObjectSection, ReadCache};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes (guess; the heap of the translator is in the guest's address space).
const LARGEST: u64 = 32 << 20;

/// Bytes of a section.
type Bytes = EndianArcSlice<LittleEndian>;

/// A source file and a line in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Line {
    /// As the debug information names it.
    pub file: String,
    /// From 1.
    pub line: u32,
}

/// Finds source lines.
#[derive(Default)]
pub struct SourceLines {
    /// By mapped file; none where it has no debug information.
    tables: HashMap<PathBuf, Option<Context<Bytes>>>,
}

impl SourceLines {
    /// The line that the guest instruction at `pc` comes from, if that is known.
    pub fn at(&mut self, pc: u64, symbols: &Symbols) -> Option<Line> {
        let (image, address) = symbols.in_file(pc)?;
        if !self.tables.contains_key(image) {
            self.tables.insert(image.to_path_buf(), read(image));
        }
        let location = self.tables.get(image)?.as_ref()?.find_location(address).ok()??;
        let line = location.line.filter(|line| *line > 0)?;
        Some(Line { file: location.file?.to_string(), line })
    }
}

/// The tables of a file; none if it has none, or if they are too large.
fn read(path: &Path) -> Option<Context<Bytes>> {
    let cache = ReadCache::new(File::open(path).ok()?);
    let file = object::File::parse(&cache).ok()?;
    file.section_by_name(SectionId::DebugLine.name())?;
    let is_debug = |name: &str| name.starts_with(".debug_") || name.starts_with(".zdebug_");
    let sections = file.sections().filter(|section| section.name().is_ok_and(is_debug));
    if sections.map(|section| section.size()).sum::<u64>() > LARGEST {
        return None;
    }
    let load = |id: SectionId| -> Result<Bytes, gimli::Error> {
        let section = file.section_by_name(id.name());
        let bytes = section.and_then(|section| section.uncompressed_data().ok());
        Ok(EndianArcSlice::new(Arc::from(&*bytes.unwrap_or_default()), LittleEndian))
    };
    Context::from_dwarf(Dwarf::load(load).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_lines_has_none() {
        assert!(read(Path::new("/nonexistent")).is_none());
        assert!(read(Path::new("/etc/passwd")).is_none());
    }
}
