//! ELF64 headers, parsed with goblin and then validated.
//!
//! *Invariants.* The loader relies on these facts, which this module establishes, so that mapping
//! is plain arithmetic:
//! * program headers lie within the file and have the size this format says;
//! * the file part of each segment lies within the file, is not longer than the memory part, and is
//!   congruent with its address modulo the page size;
//! * addresses do not wrap and do not leave user space;
//! * segments do not overlap; the entry point lies in an executable one;
//! * an interpreter's name is a NUL-terminated string within the file.
//!
//! Everything that this module accepts, the kernel accepts. Some files that the kernel accepts are
//! refused here: the kernel finds their fault only after the old program is gone, and kills the
//! process.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use goblin::container::Endian;
use goblin::elf::header as elf;
use goblin::elf64::header::{Header as RawHeader, SIZEOF_EHDR};
use goblin::elf64::program_header::{self as phdr, ProgramHeader, SIZEOF_PHDR};
use nix::sys::mman::ProtFlags;

use super::error::Reason;
use crate::space::{PAGE, USER_END, page_down, page_up};

/// Bytes of program headers that the kernel reads at most.
const MAX_PROGRAM_HEADERS: usize = 65536;

/// Longest interpreter name, NUL included (PATH_MAX).
const MAX_INTERPRETER: u64 = 4096;

/// A checked ELF executable or dynamic linker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Headers {
    /// Whether the image may be placed anywhere (ET_DYN) or needs its linked addresses (ET_EXEC).
    pub(super) relocatable: bool,
    /// Entry point, before relocation.
    pub(super) entry: u64,
    /// Number of program headers.
    pub(super) program_header_count: u16,
    /// Address of the program headers in memory, before relocation; 0 if no segment holds them.
    pub(super) program_headers: u64,
    /// The segments to map, in file order; none is empty.
    pub(super) segments: Vec<Segment>,
    /// Position of the interpreter's name in the file, NUL included.
    pub(super) interpreter: Option<Range<u64>>,
    /// Whether PT_GNU_STACK asks for an executable stack.
    pub(super) executable_stack: bool,
    /// The largest alignment that a segment asks for: a power of two, at least a page.
    pub(super) alignment: u64,
}

/// A PT_LOAD program header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    /// First address, before relocation.
    pub(super) address: u64,
    /// Bytes in memory.
    pub(super) memory_size: u64,
    /// Offset in the file.
    pub(super) offset: u64,
    /// Bytes from the file; the rest is zero.
    pub(super) file_size: u64,
    /// Permissions.
    pub(super) prot: ProtFlags,
}

impl Segment {
    /// The addresses it names.
    pub(super) fn addresses(&self) -> Range<u64> {
        self.address..self.address + self.memory_size
    }

    /// The end of the bytes that come from the file.
    fn file_end(&self) -> u64 {
        self.address + self.file_size
    }

    /// The pages it needs.
    pub(super) fn pages(&self) -> Range<u64> {
        page_down(self.address)..self.page_end(self.memory_size)
    }

    /// The pages that come from the file; empty when none do.
    pub(super) fn file_pages(&self) -> Range<u64> {
        let start = page_down(self.address);
        start..if self.file_size == 0 { start } else { self.page_end(self.file_size) }
    }

    /// End of the page that holds the last of the segment's first `size` bytes. Checked headers
    /// stay below [`USER_END`].
    fn page_end(&self, size: u64) -> u64 {
        page_up(self.address + size).unwrap_or(USER_END)
    }
}

fn malformed<T>(what: impl Into<String>) -> Result<T, Reason> {
    Err(Reason::Malformed(what.into()))
}

impl Headers {
    /// Reads and checks the headers of an open file.
    pub(super) fn read(file: &File) -> Result<Headers, Reason> {
        let size = file.metadata().map_err(|error| Reason::io("look up", &error))?.len();
        let mut start = [0; SIZEOF_EHDR];
        let got = read_up_to(file, 0, &mut start)?;
        let header = FileHeader::parse(&start[..got])?;
        let mut table = vec![0; header.count as usize * SIZEOF_PHDR];
        let got = read_up_to(file, header.offset, &mut table)?;
        header.check(&table[..got], size)
    }

    /// The pages of all segments, as disjoint ascending ranges.
    pub(super) fn page_clusters(&self) -> Vec<Range<u64>> {
        let mut pages: Vec<_> = self.segments.iter().map(Segment::pages).collect();
        pages.sort_by_key(|range| range.start);
        let mut clusters: Vec<Range<u64>> = Vec::with_capacity(pages.len());
        for range in pages {
            match clusters.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => clusters.push(range),
            }
        }
        clusters
    }

    /// Initialised data as the kernel counts it for RLIMIT_DATA: from the highest segment's start
    /// to the end of what comes from the file.
    pub(super) fn data(&self) -> Range<u64> {
        let start = self.segments.iter().map(|segment| segment.address).max().unwrap_or(0);
        let end = self.segments.iter().map(Segment::file_end).max().unwrap_or(0);
        start..end.max(start)
    }

    /// The address behind everything that the segments name.
    pub(super) fn end(&self) -> u64 {
        self.segments.iter().map(|segment| segment.addresses().end).max().unwrap_or(0)
    }

    /// Code as the kernel counts it: from the first to the last byte of executable segments. (The
    /// entry point lies in one.)
    pub(super) fn code(&self) -> Range<u64> {
        let executable =
            || self.segments.iter().filter(|segment| segment.prot.contains(ProtFlags::PROT_EXEC));
        let start = executable().map(|segment| segment.address).min().unwrap_or(0);
        start..executable().map(Segment::file_end).max().unwrap_or(0).max(start)
    }
}

/// Fills `buffer` from `offset` on, up to the end of the file; returns the number of bytes read.
pub(super) fn read_up_to(file: &File, offset: u64, buffer: &mut [u8]) -> Result<usize, Reason> {
    let mut filled = 0;
    while filled < buffer.len() {
        let Some(at) = offset.checked_add(filled as u64).filter(|&at| i64::try_from(at).is_ok())
        else {
            break;
        };
        match file.read_at(&mut buffer[filled..], at) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Reason::io("read", &error)),
        }
    }
    Ok(filled)
}

/// What the ELF header proper says.
#[derive(Debug)]
struct FileHeader {
    relocatable: bool,
    entry: u64,
    offset: u64,
    count: u16,
}

impl FileHeader {
    /// Checks the file's first bytes, which may be fewer than a header.
    fn parse(bytes: &[u8]) -> Result<FileHeader, Reason> {
        if bytes.len() < elf::SELFMAG || &bytes[..elf::SELFMAG] != elf::ELFMAG {
            return Err(Reason::UnknownFormat);
        }
        if bytes.len() >= elf::SIZEOF_IDENT {
            match bytes[elf::EI_CLASS] {
                elf::ELFCLASS64 => {}
                elf::ELFCLASS32 => {
                    return Err(Reason::Foreign(
                        "a 32-bit ELF file; only 64-bit ones run here".into(),
                    ));
                }
                class => return malformed(format!("unknown class {class}")),
            }
            if bytes[elf::EI_DATA] != elf::ELFDATA2LSB {
                return Err(Reason::Foreign("an ELF file for a big-endian machine".into()));
            }
        }
        if bytes.len() < SIZEOF_EHDR {
            return malformed("truncated header");
        }
        let Ok(raw) = RawHeader::parse(bytes) else { return malformed("unreadable header") };
        if raw.e_machine != elf::EM_X86_64 {
            let machine = elf::machine_to_str(raw.e_machine);
            return Err(Reason::Foreign(format!(
                "an ELF file for another machine ({machine}), not x86-64"
            )));
        }
        let relocatable = match raw.e_type {
            elf::ET_EXEC => false,
            elf::ET_DYN => true,
            other => {
                return Err(Reason::Foreign(format!(
                    "not an executable ELF file ({})",
                    elf::et_to_str(other)
                )));
            }
        };
        if usize::from(raw.e_phentsize) != SIZEOF_PHDR {
            return malformed(format!("program headers of {} bytes", raw.e_phentsize));
        }
        if raw.e_phnum == 0 {
            return malformed("no program headers");
        }
        if usize::from(raw.e_phnum) * SIZEOF_PHDR > MAX_PROGRAM_HEADERS {
            return malformed(format!("too many program headers ({})", raw.e_phnum));
        }
        Ok(FileHeader { relocatable, entry: raw.e_entry, offset: raw.e_phoff, count: raw.e_phnum })
    }

    /// Checks the program headers, of which `table` may hold only a part.
    fn check(&self, table: &[u8], file_size: u64) -> Result<Headers, Reason> {
        let count = usize::from(self.count);
        if table.len() < count * SIZEOF_PHDR {
            return malformed("program headers beyond the end of the file");
        }
        let Ok(raw) = ProgramHeader::parse(table, 0, count, Endian::Little) else {
            return malformed("unreadable program headers");
        };
        let mut headers = Headers {
            relocatable: self.relocatable,
            entry: self.entry,
            program_header_count: self.count,
            program_headers: 0,
            segments: Vec::new(),
            interpreter: None,
            executable_stack: false,
            alignment: PAGE,
        };
        for header in &raw {
            match header.p_type {
                phdr::PT_LOAD if header.p_memsz > 0 || header.p_filesz > 0 => {
                    headers.segments.push(check_segment(header, file_size)?);
                    if header.p_align.is_power_of_two() {
                        headers.alignment = headers.alignment.max(header.p_align);
                    }
                }
                // The kernel uses only the first of these.
                phdr::PT_INTERP if headers.interpreter.is_none() => {
                    headers.interpreter = Some(check_interpreter(header, file_size)?);
                }
                // The kernel uses the last of these. Without one, an x86-64 stack is not
                // executable.
                phdr::PT_GNU_STACK => headers.executable_stack = header.p_flags & phdr::PF_X != 0,
                _ => {}
            }
        }
        headers.check_overlap()?;
        headers.check_entry()?;
        headers.program_headers = self.program_headers_in_memory(&headers.segments);
        Ok(headers)
    }

    /// The address that AT_PHDR names: in the first segment whose file part has the table's start.
    fn program_headers_in_memory(&self, segments: &[Segment]) -> u64 {
        segments
            .iter()
            .find(|segment| {
                segment.offset <= self.offset && self.offset - segment.offset < segment.file_size
            })
            .map_or(0, |segment| segment.address + (self.offset - segment.offset))
    }
}

impl Headers {
    fn check_overlap(&self) -> Result<(), Reason> {
        let mut addresses: Vec<_> = self.segments.iter().map(Segment::addresses).collect();
        addresses.sort_by_key(|range| range.start);
        match addresses.windows(2).find(|pair| pair[1].start < pair[0].end) {
            Some(pair) => malformed(format!(
                "segments at {:#x} and {:#x} overlap",
                pair[0].start, pair[1].start
            )),
            None => Ok(()),
        }
    }

    fn check_entry(&self) -> Result<(), Reason> {
        if self.segments.is_empty() {
            return malformed("no loadable segment");
        }
        let home = self.segments.iter().find(|segment| segment.addresses().contains(&self.entry));
        match home {
            Some(segment) if segment.prot.contains(ProtFlags::PROT_EXEC) => Ok(()),
            _ => {
                malformed(format!("entry point {:#x} is not in an executable segment", self.entry))
            }
        }
    }
}

/// A loadable segment's sizes and addresses.
fn check_segment(header: &ProgramHeader, file_size: u64) -> Result<Segment, Reason> {
    let at = format!("segment at {:#x}", header.p_vaddr);
    if header.p_filesz > header.p_memsz {
        return malformed(format!("{at} is longer in the file than in memory"));
    }
    match header.p_offset.checked_add(header.p_filesz) {
        Some(end) if end <= file_size => {}
        _ => return malformed(format!("{at} extends beyond the end of the file")),
    }
    match header.p_vaddr.checked_add(header.p_memsz).and_then(page_up) {
        Some(end) if end <= USER_END => {}
        _ => return malformed(format!("{at} extends beyond the address space")),
    }
    if header.p_filesz > 0 && header.p_vaddr % PAGE != header.p_offset % PAGE {
        return malformed(format!(
            "{at} is not aligned with its file offset {:#x}",
            header.p_offset
        ));
    }
    let mut prot = ProtFlags::PROT_NONE;
    prot.set(ProtFlags::PROT_READ, header.p_flags & phdr::PF_R != 0);
    prot.set(ProtFlags::PROT_WRITE, header.p_flags & phdr::PF_W != 0);
    prot.set(ProtFlags::PROT_EXEC, header.p_flags & phdr::PF_X != 0);
    Ok(Segment {
        address: header.p_vaddr,
        memory_size: header.p_memsz,
        offset: header.p_offset,
        file_size: header.p_filesz,
        prot,
    })
}

fn check_interpreter(header: &ProgramHeader, file_size: u64) -> Result<Range<u64>, Reason> {
    if !(2..=MAX_INTERPRETER).contains(&header.p_filesz) {
        return malformed(format!("interpreter name of {} bytes", header.p_filesz));
    }
    match header.p_offset.checked_add(header.p_filesz) {
        Some(end) if end <= file_size => Ok(header.p_offset..end),
        _ => malformed("interpreter name beyond the end of the file"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXECUTABLE: u32 = phdr::PF_R | phdr::PF_X;

    /// A small executable's headers, to be spoilt.
    #[derive(Clone)]
    struct Sample {
        header: [u8; SIZEOF_EHDR],
        table: Vec<ProgramHeader>,
        file_size: u64,
    }

    fn load(
        p_vaddr: u64,
        p_offset: u64,
        p_filesz: u64,
        p_memsz: u64,
        p_flags: u32,
    ) -> ProgramHeader {
        ProgramHeader {
            p_type: phdr::PT_LOAD,
            p_flags,
            p_offset,
            p_vaddr,
            p_paddr: 0,
            p_filesz,
            p_memsz,
            p_align: PAGE,
        }
    }

    impl Sample {
        fn new(table: Vec<ProgramHeader>) -> Sample {
            let mut header = [0; SIZEOF_EHDR];
            header[..6].copy_from_slice(b"\x7fELF\x02\x01");
            let mut sample = Sample { header, table, file_size: 0x3000 };
            sample.put16(0x10, elf::ET_DYN);
            sample.put16(0x12, elf::EM_X86_64);
            sample.put64(0x18, 0x1100);
            sample.put64(0x20, SIZEOF_EHDR as u64);
            sample.put16(0x36, SIZEOF_PHDR as u16);
            sample
        }

        fn ordinary() -> Sample {
            Sample::new(vec![
                load(0, 0, 0x1800, 0x1800, EXECUTABLE),
                load(0x2800, 0x1800, 0x800, 0x2000, phdr::PF_R | phdr::PF_W),
            ])
        }

        fn put16(&mut self, at: usize, value: u16) {
            self.header[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }

        fn put64(&mut self, at: usize, value: u64) {
            self.header[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }

        fn check(&self) -> Result<Headers, Reason> {
            let mut sample = self.clone();
            if sample.header[0x38..0x3a] == [0, 0] {
                sample.put16(0x38, self.table.len() as u16);
            }
            // SAFETY: program headers are plain numbers without padding.
            let table: Vec<u8> =
                sample.table.iter().flat_map(|header| unsafe { plain_bytes(header) }).collect();
            FileHeader::parse(&sample.header)?.check(&table, sample.file_size)
        }

        fn with(&self, change: impl FnOnce(&mut Sample)) -> Result<Headers, Reason> {
            let mut sample = self.clone();
            change(&mut sample);
            sample.check()
        }
    }

    /// The bytes of a header as they stand in a file.
    ///
    /// # Safety
    /// `T` must have no padding.
    unsafe fn plain_bytes<T>(value: &T) -> Vec<u8> {
        // SAFETY: the bytes of a value without padding are all initialised.
        unsafe {
            std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>())
        }
        .to_vec()
    }

    fn assert_malformed(result: Result<Headers, Reason>, part: &str) {
        match result {
            Err(Reason::Malformed(what)) => {
                assert!(what.contains(part), "{what:?} does not say {part:?}")
            }
            other => panic!("expected a complaint about {part:?}, got {other:?}"),
        }
    }

    fn assert_foreign(result: Result<Headers, Reason>, part: &str) {
        match result {
            Err(Reason::Foreign(what)) => {
                assert!(what.contains(part), "{what:?} does not say {part:?}")
            }
            other => panic!("expected a complaint about {part:?}, got {other:?}"),
        }
    }

    #[test]
    fn an_ordinary_file() {
        let headers = Sample::ordinary().check().expect("accepted");
        assert!(headers.relocatable && !headers.executable_stack);
        assert_eq!(
            (headers.entry, headers.program_headers, headers.program_header_count),
            (0x1100, 0x40, 2)
        );
        assert_eq!(headers.alignment, PAGE);
        assert_eq!(headers.interpreter, None);
        let [text, data] = &headers.segments[..] else { panic!("two segments") };
        assert_eq!((text.pages(), text.file_pages()), (0..0x2000, 0..0x2000));
        assert_eq!((data.pages(), data.file_pages()), (0x2000..0x5000, 0x2000..0x3000));
        assert_eq!(headers.page_clusters(), vec![0..0x5000; 1]);
        assert_eq!((headers.code(), headers.data()), (0..0x1800, 0x2800..0x3000));
    }

    #[test]
    fn files_that_are_not_for_us() {
        let good = Sample::ordinary();
        assert_eq!(good.with(|s| s.header[1] = b'e'), Err(Reason::UnknownFormat));
        assert_eq!(FileHeader::parse(b"").expect_err("empty"), Reason::UnknownFormat);
        assert_eq!(FileHeader::parse(b"\x7fEL").expect_err("short"), Reason::UnknownFormat);
        assert_foreign(good.with(|s| s.header[elf::EI_CLASS] = 1), "32-bit");
        assert_malformed(good.with(|s| s.header[elf::EI_CLASS] = 7), "class 7");
        assert_foreign(good.with(|s| s.header[elf::EI_DATA] = 2), "big-endian");
        assert_foreign(good.with(|s| s.put16(0x12, elf::EM_AARCH64)), "AARCH64");
        assert_foreign(good.with(|s| s.put16(0x10, elf::ET_REL)), "REL");
        assert_foreign(good.with(|s| s.put16(0x10, elf::ET_CORE)), "CORE");
        for len in 4..SIZEOF_EHDR {
            let result = FileHeader::parse(&good.header[..len]);
            assert!(matches!(result, Err(Reason::Malformed(_))), "{len}: {result:?}");
        }
    }

    #[test]
    fn bad_tables() {
        let good = Sample::ordinary();
        assert_malformed(good.with(|s| s.put16(0x36, 32)), "32 bytes");
        assert_malformed(good.with(|s| s.put16(0x38, 3)), "beyond the end");
        assert_malformed(good.with(|s| s.put16(0x38, 0xffff)), "too many");
        assert_malformed(good.with(|s| s.table.clear()), "no program headers");
        assert_malformed(
            good.with(|s| s.table.iter_mut().for_each(|h| h.p_type = phdr::PT_NOTE)),
            "no loadable",
        );
    }

    #[test]
    fn bad_segments() {
        let good = Sample::ordinary();
        assert_malformed(good.with(|s| s.table[1].p_filesz = 0x2001), "longer in the file");
        assert_malformed(good.with(|s| s.file_size = 0x1fff), "end of the file");
        assert_malformed(good.with(|s| s.table[1].p_offset = u64::MAX - 0x7ff), "end of the file");
        assert_malformed(good.with(|s| s.table[1].p_vaddr = u64::MAX - 0x7ff), "address space");
        assert_malformed(good.with(|s| s.table[1].p_memsz = u64::MAX), "address space");
        assert_malformed(good.with(|s| s.table[1].p_memsz = USER_END), "address space");
        assert_malformed(good.with(|s| s.table[1].p_vaddr += 1), "not aligned");
        assert_malformed(good.with(|s| s.table[1].p_vaddr = 0x1000 - 0x800), "overlap");
        assert_malformed(good.with(|s| s.table[1].p_vaddr = 0x800), "overlap");
        // Two segments may share a page: the later one is mapped over it, as by the kernel.
        let shared = good.with(|s| s.table[1].p_vaddr = 0x1800).expect("accepted");
        assert_eq!(shared.page_clusters(), vec![0..0x4000; 1]);
        // A segment without bytes in the file may have any offset.
        assert!(good.with(|s| (s.table[1].p_filesz, s.table[1].p_offset) = (0, 0x1801)).is_ok());
    }

    #[test]
    fn entry_points() {
        let good = Sample::ordinary();
        assert_malformed(good.with(|s| s.put64(0x18, 0x1800)), "entry point 0x1800");
        assert_malformed(good.with(|s| s.put64(0x18, 0x2800)), "entry point");
        assert_malformed(good.with(|s| s.put64(0x18, u64::MAX)), "entry point");
        assert_malformed(good.with(|s| s.table[0].p_flags = phdr::PF_R), "entry point");
        assert!(good.with(|s| s.put64(0x18, 0x17ff)).is_ok());
    }

    #[test]
    fn other_headers() {
        let note = |p_type, p_flags, p_offset, p_filesz| ProgramHeader {
            p_type,
            ..load(0, p_offset, p_filesz, p_filesz, p_flags)
        };
        let add = |extra: Vec<ProgramHeader>| Sample::ordinary().with(|s| s.table.extend(extra));
        let stack = |flags| note(phdr::PT_GNU_STACK, flags, 0, 0);
        assert!(add(vec![stack(phdr::PF_X)]).expect("accepted").executable_stack);
        assert!(
            !add(vec![stack(phdr::PF_X), stack(phdr::PF_R)]).expect("accepted").executable_stack
        );
        let linker = |offset, size| note(phdr::PT_INTERP, 0, offset, size);
        let two = add(vec![linker(0x200, 28), linker(0x300, 10)]).expect("accepted");
        assert_eq!(two.interpreter, Some(0x200..0x21c));
        assert_malformed(add(vec![linker(0x200, 1)]), "interpreter name of 1 bytes");
        assert_malformed(add(vec![linker(0x200, 4097)]), "interpreter name of 4097 bytes");
        assert_malformed(add(vec![linker(0x2fff, 2)]), "beyond the end");
        assert_malformed(add(vec![linker(u64::MAX, 2)]), "beyond the end");
        let aligned = Sample::ordinary().with(|s| s.table[0].p_align = 1 << 21).expect("accepted");
        assert_eq!(aligned.alignment, 1 << 21);
        assert_eq!(
            Sample::ordinary().with(|s| s.table[0].p_align = 3 << 20).expect("accepted").alignment,
            PAGE
        );
        let no_table = Sample::ordinary().with(|s| s.put64(0x20, 0x2fff)).expect("accepted");
        assert_eq!(no_table.program_headers, 0);
    }
}
