//! Names for guest addresses: the symbol tables of mapped files.
//!
//! An address is written `symbol+0x1c`, or `libfoo.so+0x1234` where the file has no symbol for it
//! (the offset then counts from the start of the mapping).

use goblin::elf::Elf;
use goblin::elf::program_header::PT_LOAD;
use goblin::elf::sym::{STT_FUNC, STT_GNU_IFUNC};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A symbol without a size is assumed to cover at most this many bytes (guess; too many, and code
/// without symbols gets the name of the function before it).
const UNSIZED: u64 = 4096;

/// Executable memory mapped from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedFile {
    /// The file.
    pub path: PathBuf,
    /// Address at which the mapping starts.
    pub start: u64,
    /// Address at which the mapping ends.
    pub end: u64,
    /// Offset in the file at which the mapping starts.
    pub offset: u64,
}

/// A function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Its name as in the file.
    pub name: String,
    /// Its first address.
    pub start: u64,
    /// One past its last address.
    pub end: u64,
}

struct Mapped {
    name: String,
    path: PathBuf,
    start: u64,
    end: u64,
    bias: u64,
}

/// All symbols of a run.
#[derive(Default)]
pub struct Symbols {
    images: Vec<Mapped>,
    /// By address.
    all: Vec<Symbol>,
    by_name: HashMap<String, Vec<usize>>,
}

impl Symbols {
    /// Reads the symbols of those files that still exist.
    pub fn read(images: impl IntoIterator<Item = MappedFile>) -> Symbols {
        let mut symbols = Symbols::default();
        images.into_iter().for_each(|image| symbols.add(&image));
        symbols.finish();
        symbols
    }

    fn add(&mut self, image: &MappedFile) {
        let name =
            image.path.file_name().unwrap_or(image.path.as_os_str()).to_string_lossy().into_owned();
        let bytes = std::fs::read(&image.path).unwrap_or_default();
        let elf = Elf::parse(&bytes).ok();
        let loaded = elf.as_ref().and_then(|elf| {
            let holds =
                |offset: u64, size: u64| (offset & !0xfff..offset + size).contains(&image.offset);
            let header = elf
                .program_headers
                .iter()
                .find(|p| p.p_type == PT_LOAD && holds(p.p_offset, p.p_filesz))?;
            Some(image.start.wrapping_sub(
                image.offset.wrapping_sub(header.p_offset).wrapping_add(header.p_vaddr),
            ))
        });
        let bias = loaded.unwrap_or(image.start.wrapping_sub(image.offset));
        let (path, start, end) = (image.path.clone(), image.start, image.end);
        self.images.push(Mapped { name, path, start, end, bias });
        let (Some(elf), true) = (elf, loaded.is_some()) else { return };
        let tables = elf
            .syms
            .iter()
            .map(|s| (s, &elf.strtab))
            .chain(elf.dynsyms.iter().map(|s| (s, &elf.dynstrtab)));
        for (symbol, strings) in tables {
            let start = symbol.st_value.wrapping_add(bias);
            let is_function =
                matches!(symbol.st_type(), STT_FUNC | STT_GNU_IFUNC) && symbol.st_shndx != 0;
            if !is_function || !(image.start..image.end).contains(&start) {
                continue;
            }
            if let Some(name) = strings.get_at(symbol.st_name).filter(|name| !name.is_empty()) {
                self.all.push(Symbol {
                    name: name.to_string(),
                    start,
                    end: start + symbol.st_size,
                });
            }
        }
    }

    fn finish(&mut self) {
        // Of several names for one address the first undecorated one in the file is preferred:
        // people know that one.
        self.all.sort_by(|a, b| {
            let rank = |s: &Symbol| (s.start, s.name.starts_with('_'), s.name.len());
            rank(a).cmp(&rank(b)).then_with(|| a.name.cmp(&b.name))
        });
        self.all.dedup_by(|a, b| a.start == b.start && a.name == b.name);
        for n in 0..self.all.len() {
            let next = self.all[n + 1..]
                .iter()
                .find(|s| s.start > self.all[n].start)
                .map_or(u64::MAX, |s| s.start);
            let symbol = &mut self.all[n];
            if symbol.end == symbol.start {
                symbol.end = next.min(symbol.start + UNSIZED);
            }
        }
        for (n, symbol) in self.all.iter().enumerate() {
            self.by_name.entry(symbol.name.clone()).or_default().push(n);
        }
    }

    /// The function that an address is in.
    pub fn at(&self, pc: u64) -> Option<&Symbol> {
        let behind = self.all.partition_point(|s| s.start <= pc);
        let start = self.all[..behind].iter().rev().find(|s| pc < s.end)?.start;
        // The preferred name stands first.
        let first = self.all.partition_point(|s| s.start < start);
        self.all[first..].iter().find(|s| pc < s.end)
    }

    /// An address as text: symbol and offset.
    pub fn name(&self, pc: u64) -> String {
        if let Some(symbol) = self.at(pc) {
            return match pc - symbol.start {
                0 => symbol.name.clone(),
                offset => format!("{}+{offset:#x}", symbol.name),
            };
        }
        match self.image(pc) {
            Some(image) => format!("{}+{:#x}", image.name, pc.wrapping_sub(image.bias)),
            None => format!("{pc:#x}"),
        }
    }

    /// The file that an address is mapped from, and the address in the terms of the file (the
    /// `p_vaddr` of its segment, and on).
    pub fn in_file(&self, pc: u64) -> Option<(&Path, u64)> {
        self.image(pc).map(|image| (image.path.as_path(), pc.wrapping_sub(image.bias)))
    }

    fn image(&self, pc: u64) -> Option<&Mapped> {
        self.images.iter().find(|image| (image.start..image.end).contains(&pc))
    }

    /// The functions of this name.
    pub fn named(&self, name: &str) -> Vec<&Symbol> {
        self.by_name.get(name).map_or(Vec::new(), |all| all.iter().map(|n| &self.all[*n]).collect())
    }

    /// All names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols(all: &[(&str, u64, u64)]) -> Symbols {
        let mut symbols = Symbols {
            images: vec![Mapped {
                name: "prog".into(),
                path: "/bin/prog".into(),
                start: 0x1000,
                end: 0x9000,
                bias: 0x1000,
            }],
            ..Symbols::default()
        };
        let all = all.iter().map(|(name, start, size)| Symbol {
            name: (*name).to_string(),
            start: *start,
            end: start + size,
        });
        symbols.all.extend(all);
        symbols.finish();
        symbols
    }

    #[test]
    fn addresses_get_the_name_people_know() {
        let s = symbols(&[
            ("__memcpy_internal", 0x2000, 0x40),
            ("memcpy", 0x2000, 0x40),
            ("outer", 0x3000, 0x100),
        ]);
        assert_eq!(s.name(0x2000), "memcpy");
        assert_eq!(s.name(0x203f), "memcpy+0x3f");
        assert_eq!(s.name(0x2040), "prog+0x1040");
        assert_eq!(s.name(0x30ff), "outer+0xff");
        assert_eq!(s.name(0xa000), "0xa000");
        assert_eq!(s.named("outer").len(), 1);
        assert!(s.named("inner").is_empty());
        assert_eq!(s.in_file(0x2040), Some((Path::new("/bin/prog"), 0x1040)));
        assert_eq!(s.in_file(0xa000), None);
    }

    #[test]
    fn symbols_without_size_end_at_the_next() {
        let s = symbols(&[("first", 0x2000, 0), ("second", 0x2010, 0)]);
        assert_eq!((s.name(0x200f), s.name(0x2010)), ("first+0xf".into(), "second".into()));
        assert_eq!(s.name(0x2010 + UNSIZED), "prog+0x2010");
    }
}
