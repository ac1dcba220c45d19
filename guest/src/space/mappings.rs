//! A model of the guest's mappings, so that the runtime need not ask the kernel.
//!
//! Reading `/proc/self/maps` costs tens of microseconds. So its answer is kept in [`Mappings`] and
//! updated with the guest's own calls. An effect that is not simple to compute (a mapping of a
//! file, a call that failed half way) makes the model *forget* the range; the next question about
//! it reads the kernel's list again.
//!
//! *Invariant.* Every range that is known is described correctly: it holds the protection that the
//! guest has set. Where the translator has removed write permission from a page, the kernel's list
//! shows less; [`Mappings::refresh`] is told of those pages.
//!
//! *Access.* The model takes no lock; its owner, the runtime, protects it with a lock.
//!
//! *Example.* After `set(0x1000..0x3000, anonymous(RW))` and `forget(0x2000..0x3000)`, `at(0x1000)`
//! is known and `at(0x2000)` is `None`.

use std::collections::BTreeMap;
use std::ops::Range;

use nix::sys::mman::ProtFlags;

use super::{MapEntry, PAGE};

/// One mapping, or a part of one with the same properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The protection that the guest has set.
    pub prot: ProtFlags,
    /// Whether it is `MAP_SHARED`.
    pub shared: bool,
    /// Device and inode of its file, and the offset in it of the first byte; none for anonymous
    /// private memory.
    pub file: Option<FileRange>,
}

/// Which part of a file a mapping shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRange {
    /// Major and minor number.
    pub device: (u32, u32),
    /// The inode on that device.
    pub inode: u64,
    /// Offset in the file of the mapping's first byte, in bytes.
    pub offset: u64,
}

impl Mapping {
    /// Private anonymous memory.
    pub fn anonymous(prot: ProtFlags) -> Mapping {
        Mapping { prot, shared: false, file: None }
    }

    /// May instructions be fetched from it?
    pub fn is_executable(&self) -> bool {
        self.prot.contains(ProtFlags::PROT_EXEC)
    }

    /// May it be written to through this mapping?
    pub fn is_writable(&self) -> bool {
        self.prot.contains(ProtFlags::PROT_WRITE)
    }

    /// The part of this mapping from `bytes` after its start on.
    fn skip(mut self, bytes: u64) -> Mapping {
        if let Some(file) = &mut self.file {
            file.offset += bytes;
        }
        self
    }
}

/// The mappings that are known, by address.
#[derive(Clone, Debug, Default)]
pub struct Mappings {
    /// First address -> one past the last, and what it is. Disjoint.
    known: BTreeMap<u64, (u64, Mapping)>,
}

impl Mappings {
    /// Replaces the model by the kernel's list. `taken` are the pages from which the translator has
    /// removed write permission.
    pub fn refresh(&mut self, entries: &[MapEntry], taken: impl IntoIterator<Item = u64>) {
        self.known.clear();
        for entry in entries {
            let file = (entry.inode != 0 || entry.shared).then_some(FileRange {
                device: entry.device,
                inode: entry.inode,
                offset: entry.offset,
            });
            let mapping = Mapping { prot: entry.prot, shared: entry.shared, file };
            self.known.insert(entry.range.start, (entry.range.end, mapping));
        }
        for page in taken {
            if let Some(mapping) = self.at(page) {
                self.set_protection(page..page + PAGE, mapping.prot | ProtFlags::PROT_WRITE);
            }
        }
    }

    /// The mapping at `address`, if there is one and it is known.
    pub fn at(&self, address: u64) -> Option<Mapping> {
        let (start, (end, mapping)) = self.known.range(..=address).next_back()?;
        (address < *end).then(|| mapping.skip(address - start))
    }

    /// The number of bytes from `address` on for which `holds` is true without a gap.
    pub fn extent(&self, address: u64, holds: impl Fn(&Mapping) -> bool) -> u64 {
        let first = self.known.range(..=address).next_back().map_or(address, |(start, _)| *start);
        let mut end = address;
        for (start, (stop, mapping)) in self.known.range(first..) {
            if *start > end || *stop <= end || !holds(mapping) {
                if *stop <= end {
                    continue;
                }
                break;
            }
            end = *stop;
        }
        end
    }

    /// The parts of `range` that are known.
    pub fn parts(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, Mapping)> {
        let first =
            self.known.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        self.known.range(first..range.end.max(first)).filter_map(move |(start, (end, mapping))| {
            let part = range.start.max(*start)..range.end.min(*end);
            (!part.is_empty()).then(|| (part.clone(), mapping.skip(part.start - start)))
        })
    }

    /// Removes `range` from the model: nothing is known of it from now on.
    pub fn forget(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let touched: Vec<_> = {
            let first = self
                .known
                .range(..=range.start)
                .next_back()
                .map_or(range.start, |(start, _)| *start);
            let inside =
                self.known.range(first..range.end).filter(|(_, (end, _))| *end > range.start);
            inside.map(|(start, (end, mapping))| (*start..*end, *mapping)).collect()
        };
        for (old, mapping) in touched {
            self.known.remove(&old.start);
            if old.start < range.start {
                self.known.insert(old.start, (range.start, mapping));
            }
            if range.end < old.end {
                self.known.insert(range.end, (old.end, mapping.skip(range.end - old.start)));
            }
        }
    }

    /// Records that `range` consists of this mapping now.
    pub fn set(&mut self, range: Range<u64>, mapping: Mapping) {
        if range.is_empty() {
            return;
        }
        self.forget(range.clone());
        let Range { mut start, mut end } = range;
        let mut mapping = mapping;
        let joins = |first: &Mapping, len: u64, second: &Mapping| first.skip(len) == *second;
        if let Some((before, (stop, other))) =
            self.known.range(..start).next_back().map(|(s, v)| (*s, *v))
            && stop == start
            && joins(&other, start - before, &mapping)
        {
            self.known.remove(&before);
            (start, mapping) = (before, other);
        }
        if let Some((stop, other)) = self.known.get(&end).copied()
            && joins(&mapping, end - start, &other)
        {
            self.known.remove(&end);
            end = stop;
        }
        self.known.insert(start, (end, mapping));
    }

    /// Records that the guest has set the protection of `range`.
    pub fn set_protection(&mut self, range: Range<u64>, prot: ProtFlags) {
        let parts: Vec<_> = self.parts(range).filter(|(_, mapping)| mapping.prot != prot).collect();
        for (part, mapping) in parts {
            self.set(part, Mapping { prot, ..mapping });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: ProtFlags = ProtFlags::PROT_READ;
    const WRITE: ProtFlags = ProtFlags::PROT_WRITE;
    const EXEC: ProtFlags = ProtFlags::PROT_EXEC;

    fn list(mappings: &Mappings) -> Vec<(Range<u64>, ProtFlags)> {
        mappings.parts(0..u64::MAX).map(|(range, mapping)| (range, mapping.prot)).collect()
    }

    #[test]
    fn mappings_are_cut_and_join() {
        let mut m = Mappings::default();
        m.set(0x1000..0x5000, Mapping::anonymous(READ));
        m.set_protection(0x2000..0x3000, READ | EXEC);
        assert_eq!(
            list(&m),
            [(0x1000..0x2000, READ), (0x2000..0x3000, READ | EXEC), (0x3000..0x5000, READ)]
        );
        m.set_protection(0x2000..0x3000, READ);
        assert_eq!(list(&m), [(0x1000..0x5000, READ)]);
        m.forget(0x2000..0x3000);
        assert_eq!((m.at(0x2fff), m.at(0x3000)), (None, Some(Mapping::anonymous(READ))));
        // A range that is not known stays unknown.
        m.set_protection(0..0x10000, WRITE);
        assert_eq!(list(&m), [(0x1000..0x2000, WRITE), (0x3000..0x5000, WRITE)]);
        m.set(0..0x6000, Mapping::anonymous(EXEC));
        assert_eq!(list(&m), [(0..0x6000, EXEC)]);
        m.forget(0..u64::MAX);
        assert_eq!(list(&m), []);
    }

    #[test]
    fn files_keep_their_offsets_and_join_only_in_order() {
        let part = |offset| Some(FileRange { device: (1, 2), inode: 3, offset });
        let mut m = Mappings::default();
        let text = Mapping { prot: READ | EXEC, shared: false, file: part(0x4000) };
        m.set(0x10000..0x18000, text);
        m.forget(0x12000..0x13000);
        assert_eq!(m.at(0x13010).and_then(|m| m.file), part(0x7010));
        m.set(0x12000..0x13000, Mapping { file: part(0x6000), ..text });
        assert_eq!(m.parts(0..u64::MAX).count(), 1);
        m.set(0x18000..0x19000, text);
        assert_eq!(m.parts(0..u64::MAX).count(), 2);
        let whole: Vec<_> = m.parts(0x11000..0x18800).map(|(range, m)| (range, m.file)).collect();
        assert_eq!(whole, [(0x11000..0x18000, part(0x5000)), (0x18000..0x18800, part(0x4000))]);
    }

    #[test]
    fn an_extent_ends_where_the_property_does() {
        let mut m = Mappings::default();
        m.set(0x1000..0x2000, Mapping::anonymous(READ | EXEC));
        m.set(0x2000..0x3000, Mapping::anonymous(EXEC));
        m.set(0x3000..0x4000, Mapping::anonymous(READ));
        m.set(0x5000..0x6000, Mapping::anonymous(EXEC));
        let extent = |address| m.extent(address, Mapping::is_executable);
        assert_eq!([0xfff, 0x1000, 0x1800, 0x2fff].map(extent), [0xfff, 0x3000, 0x3000, 0x3000]);
        assert_eq!([0x3000, 0x4800, 0x5001, 0x6000].map(extent), [0x3000, 0x4800, 0x6000, 0x6000]);
    }

    #[test]
    fn a_refresh_knows_what_was_taken() {
        let entry = |range: Range<u64>, prot| MapEntry {
            range,
            prot,
            shared: false,
            offset: 0,
            device: (0, 0),
            inode: 0,
            path: None,
        };
        let mut m = Mappings::default();
        m.set(0..0x1000, Mapping::anonymous(READ));
        let entries = [
            entry(0x1000..0x2000, READ | WRITE | EXEC),
            entry(0x2000..0x3000, READ | EXEC),
            entry(0x3000..0x4000, READ | EXEC),
        ];
        m.refresh(&entries, [0x2000, 0x9000]);
        assert_eq!(
            list(&m),
            [(0x1000..0x3000, READ | WRITE | EXEC), (0x3000..0x4000, READ | EXEC)]
        );
    }

    /// Compares with a byte-wise model.
    #[test]
    fn random_changes() {
        let mut m = Mappings::default();
        let mut pages = [None; 64];
        let mut seed = 9u64;
        let mut random = |n: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % n
        };
        for _ in 0..20_000 {
            let start = random(64);
            let end = start + random(65 - start);
            let range = start * PAGE..end * PAGE;
            let prot = [READ, WRITE, EXEC][random(3) as usize];
            let model = &mut pages[start as usize..end as usize];
            match random(3) {
                0 => {
                    m.set(range, Mapping::anonymous(prot));
                    model.fill(Some(prot));
                }
                1 => {
                    m.forget(range);
                    model.fill(None);
                }
                _ => {
                    m.set_protection(range, prot);
                    model.iter_mut().flatten().for_each(|old| *old = prot);
                }
            }
            let at = random(64);
            assert_eq!(m.at(at * PAGE + 5).map(|m| m.prot), pages[at as usize]);
            let run = pages[at as usize..].iter().take_while(|p| **p == Some(EXEC)).count() as u64;
            let extent = m.extent(at * PAGE, Mapping::is_executable);
            assert_eq!(extent, (at + run) * PAGE);
        }
    }
}
