//! Where the dynamic linker's code is. It runs before every program, so its traces are summed up apart
//! from those of the program.
//!
//! Data: [`Linker`], ranges of addresses. No lock. A mapped executable or library names the linker
//! in its PT_INTERP header; the mapped file of that name is the linker.
//!
//! Example: `/bin/ls` names `/lib64/ld-linux-x86-64.so.2`, a link to a file in
//! `/usr/lib/x86_64-linux-gnu`, which is among the images of the run.

use dynasour_runtime::observe::census::Image;
use goblin::container::{Container, Ctx};
use goblin::elf::Elf;
use goblin::elf::program_header::{PT_INTERP, ProgramHeader};
use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes at the beginning of a file that are looked at; its program headers are there.
const HEADERS: usize = 8 << 10;
/// Longest name of a linker that is followed.
const LONGEST: u64 = 4096;

/// The addresses of the dynamic linker.
#[derive(Debug, Default)]
pub struct Linker(Vec<Range<u64>>);

impl Linker {
    /// Finds the linker among the images of a run.
    pub fn of(images: &[Image]) -> Linker {
        let paths: BTreeSet<&str> = images.iter().map(|image| image.path.as_str()).collect();
        let named: BTreeSet<PathBuf> = paths
            .into_iter()
            .filter_map(|path| interpreter(Path::new(path)))
            .map(|path| path.canonicalize().unwrap_or(path))
            .collect();
        let is_linker = |image: &&Image| named.contains(Path::new(&image.path));
        Linker(images.iter().filter(is_linker).map(|image| image.start..image.end).collect())
    }

    /// Is this an address of the linker?
    pub fn contains(&self, pc: u64) -> bool {
        self.0.iter().any(|range| range.contains(&pc))
    }
}

/// The linker that an executable or library names; none for other files.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let file = File::open(path).ok()?;
    let mut bytes = vec![0; HEADERS];
    let len = file.read_at(&mut bytes, 0).ok()?;
    let bytes = &bytes[..len];
    let header = Elf::parse_header(bytes).ok()?;
    let context = Ctx::new(header.container().unwrap_or(Container::Big), header.endianness().ok()?);
    let (at, count) = (header.e_phoff as usize, usize::from(header.e_phnum));
    let segments = ProgramHeader::parse(bytes, at, count, context).ok()?;
    let named = segments.into_iter().find(|segment| segment.p_type == PT_INTERP)?;
    let mut name = vec![0; named.p_filesz.min(LONGEST) as usize];
    file.read_exact_at(&mut name, named.p_offset).ok()?;
    name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
    Some(PathBuf::from(std::ffi::OsString::from_vec(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_linker_of_a_program_is_found() {
        let image = |path: &Path, start| Image {
            path: path.to_str().expect("UTF-8").to_string(),
            start,
            end: start + 0x1000,
            offset: 0,
        };
        let program = Path::new("/bin/true").canonicalize().expect("there");
        let linker = interpreter(&program).expect("it is linked dynamically");
        let linker = linker.canonicalize().expect("there");
        let found = Linker::of(&[image(&program, 0x1000), image(&linker, 0x4000)]);
        assert!(found.contains(0x4fff) && !found.contains(0x1000) && !found.contains(0x5000));
        assert!(interpreter(Path::new("/etc/passwd")).is_none());
    }
}
