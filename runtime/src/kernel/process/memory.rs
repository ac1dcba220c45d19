//! The guest's view of its address space: which ranges are the host's, where the guest's program
//! break is, and what `/proc/self/maps` shows.
//!
//! Data: [`Memory`], one for each address space, behind the lock of `Process::memory`.
//!
//! Invariant: a range that the host uses is *protected*: it looks unmapped to the guest's system
//! calls. Host memory that is mapped later must be told to [`Memory::protect`] before the guest can
//! run again.
//!
//! Example: the host has 0x2000..0x3000. The guest unmaps 0x1000..0x4000: [`Memory::guest_parts`]
//! gives 0x1000..0x2000 and 0x3000..0x4000, and only these are unmapped. A line of
//! `/proc/self/maps` with 0x1000..0x4000 becomes two lines.

use std::ops::Range;

use dynasour_guest::image::StackPlace;
use dynasour_guest::space::{self, Brk, page_down, page_up};

use crate::kernel::entry::{self, Call};

/// `PROT_GROWSDOWN` of mprotect(2).
const GROWS_DOWN: u64 = 0x0100_0000;
/// `PROT_GROWSUP` of mprotect(2).
const GROWS_UP: u64 = 0x0200_0000;

/// The guest's view of the address space.
pub(crate) struct Memory {
    pub(crate) brk: Brk,
    /// The first thread's stack. For the guest it is a mapping that grows downwards; for the kernel
    /// it is not.
    stack: StackPlace,
    /// The host's ranges: sorted, disjoint.
    protected: Vec<Range<u64>>,
}

impl Memory {
    pub(crate) fn new(brk: Brk, stack: StackPlace) -> Memory {
        Memory { brk, stack, protected: Vec::new() }
    }

    /// Where the first thread's stack is.
    pub(crate) fn stack(&self) -> &StackPlace {
        &self.stack
    }

    /// The first thread's stack has another size.
    pub(crate) fn set_stack(&mut self, stack: StackPlace) {
        self.stack = stack;
    }

    /// If the mprotect `call` with `PROT_GROWSDOWN` is about the first thread's stack: a call
    /// without that flag for the whole stack up to the end of `range`. The kernel would refuse the
    /// flag, because its mapping does not grow.
    pub(crate) fn growing_down(&self, call: &Call, range: &Range<u64>) -> Option<Call> {
        let is_meant = call.args[2] & (GROWS_DOWN | GROWS_UP) == GROWS_DOWN;
        if !is_meant
            || call.args[0] != range.start
            || range.is_empty()
            || !self.stack.range.contains(&range.start)
        {
            return None;
        }
        let mut call = *call;
        call.args[0] = self.stack.range.start;
        call.args[1] = range.end - self.stack.range.start;
        call.args[2] &= !GROWS_DOWN;
        Some(call)
    }

    /// The host uses these addresses: whole pages of them are protected.
    pub(crate) fn protect(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.protected.push(whole_pages(&range));
        self.protected.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(self.protected.len());
        for range in self.protected.drain(..) {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        self.protected = merged;
    }

    /// The host uses these addresses no more.
    pub(crate) fn unprotect(&mut self, range: &Range<u64>) {
        let range = whole_pages(range);
        let outside = |own: Range<u64>| {
            let parts = [own.start..own.end.min(range.start), own.start.max(range.end)..own.end];
            parts.into_iter().filter(|part| part.start < part.end)
        };
        self.protected = self.protected.drain(..).flat_map(outside).collect();
    }

    pub(crate) fn is_protected(&self, range: &Range<u64>) -> bool {
        self.protected.iter().any(|own| own.start < range.end && range.start < own.end)
    }

    /// Leaves the host out of a core file of this process (manual: madvise(2), MADV_DONTDUMP).
    pub(crate) fn hide_from_core_file(&self) {
        for range in &self.protected {
            let len = range.end - range.start;
            let args = [range.start, len, libc::MADV_DONTDUMP as u64];
            // Part of the range may be unmapped; the rest is left out all the same.
            // SAFETY: no access changes.
            unsafe { entry::raw(&Call::new(libc::SYS_madvise, &args)) };
        }
    }

    /// `/proc/self/maps` as the guest should see it: without the host, and with `[heap]` as the
    /// name of the guest's break. `text` is the kernel's.
    pub(crate) fn guest_maps(&self, text: &[u8]) -> Vec<u8> {
        /// The column of a mapping's name (kernel: `show_vma_header_prefix`).
        const NAME_COLUMN: usize = 73;
        let mut out = Vec::with_capacity(text.len());
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            let line = line.trim_ascii_end();
            let Some(mapping) = space::parse_line(line) else { continue };
            let Some(space) = line.iter().position(|&byte| byte == b' ') else { continue };
            let name =
                mapping.path.as_deref().map_or(b"".as_slice(), |path| path.as_encoded_bytes());
            // vDSO and vvar belong to every process, so the guest sees them. Of other lines it sees
            // only its own parts: the kernel joins anonymous neighbours, so one line may be in part
            // the host's.
            let whole = name.starts_with(b"[v") || !self.is_protected(&mapping.range);
            let parts = if whole {
                vec![mapping.range.clone()]
            } else {
                self.guest_parts(mapping.range.clone())
            };
            for part in parts {
                let start = out.len();
                out.extend_from_slice(format!("{:08x}-{:08x}", part.start, part.end).as_bytes());
                out.extend_from_slice(&line[space..]);
                if name.is_empty() && (self.brk.start()..self.brk.current()).contains(&part.start) {
                    out.resize((start + NAME_COLUMN).max(out.len() + 1), b' ');
                    out.extend_from_slice(b"[heap]");
                } else if name.is_empty() {
                    // The kernel writes a blank behind the inode if there is no name.
                    out.push(b' ');
                }
                out.push(b'\n');
            }
        }
        out
    }

    /// Bytes that the guest has mapped outside the range `without`.
    pub(crate) fn guest_size(&self, without: &Range<u64>) -> u64 {
        let outside = |part: Range<u64>| {
            let common = part.end.min(without.end).saturating_sub(part.start.max(without.start));
            part.end - part.start - common
        };
        let maps = space::maps().unwrap_or_default();
        maps.into_iter().flat_map(|mapping| self.guest_parts(mapping.range)).map(outside).sum()
    }

    /// The parts of `range` that are not protected.
    pub(crate) fn guest_parts(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut parts = Vec::new();
        let mut start = range.start;
        for own in
            self.protected.iter().filter(|own| own.start < range.end && range.start < own.end)
        {
            if start < own.start {
                parts.push(start..own.start);
            }
            start = start.max(own.end);
        }
        if start < range.end {
            parts.push(start..range.end);
        }
        parts
    }
}

/// The pages that `range` is part of.
fn whole_pages(range: &Range<u64>) -> Range<u64> {
    page_down(range.start)..page_up(range.end).unwrap_or(range.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(protected: &[Range<u64>]) -> Memory {
        let mut memory = Memory::new(Brk::new(0).expect("room for a break"), StackPlace::default());
        protected.iter().for_each(|range| memory.protect(range.clone()));
        memory
    }

    #[test]
    fn protected_ranges_merge() {
        let memory = memory(&[
            0x5000..0x6000,
            0x1000..0x2000,
            0x2000..0x3000,
            0x5800..0x7000,
            0x9000..0x9000,
        ]);
        assert_eq!(memory.protected, [0x1000..0x3000, 0x5000..0x7000]);
        assert!(memory.is_protected(&(0x2fff..0x3000)));
        assert!(!memory.is_protected(&(0x3000..0x5000)));
        assert!(!memory.is_protected(&(0x7000..0x8000)));
    }

    #[test]
    fn what_is_left_is_protected_no_more() {
        let mut memory = memory(&[0x1000..0x5000, 0x7000..0x9000]);
        memory.unprotect(&(0x2000..0x3000));
        memory.unprotect(&(0x6000..0x8000));
        assert_eq!(memory.protected, [0x1000..0x2000, 0x3000..0x5000, 0x8000..0x9000]);
        memory.unprotect(&(0..0x9000));
        assert!(memory.protected.is_empty());
        memory.protect(0x1000..0x2040);
        memory.protect(0x5000..0x6001);
        assert_eq!(memory.protected, [0x1000..0x3000, 0x5000..0x7000]);
        memory.unprotect(&(0x1000..0x5040));
        assert_eq!(memory.protected, [0x6000..0x7000; 1]);
    }

    #[test]
    fn unmapping_spares_the_host() {
        let memory = memory(&[0x2000..0x3000, 0x5000..0x6000]);
        assert_eq!(
            memory.guest_parts(0x1000..0x7000),
            [0x1000..0x2000, 0x3000..0x5000, 0x6000..0x7000]
        );
        assert_eq!(memory.guest_parts(0x2000..0x3000), []);
        assert_eq!(memory.guest_parts(0x2800..0x4000).first(), Some(&(0x3000..0x4000)));
        assert_eq!(memory.guest_parts(0x7000..0x8000).first(), Some(&(0x7000..0x8000)));
    }

    #[test]
    fn the_list_of_mappings_is_the_guests() {
        let mut memory = memory(&[0x1000..0x2000, 0x7000..0x9000, 0xb000..0xc000]);
        let start = memory.brk.start();
        memory.brk.set(start + 4096);
        let brk = format!("{start:x}-{:x} rw-p 00000000 00:00 0 \n", start + 4096);
        let text = format!(
            "00001000-00002000 r-xp 00000000 fe:00 1  /dynasour\n\
             00003000-00004000 r-xp 00000000 fe:00 1  /guest\n{brk}\
             00007000-00008000 r--p 00000000 00:00 0  [vvar]\n\
             00008000-00009000 rw-p 00000000 00:00 0 \n\
             0000a000-0000d000 rw-p 00000000 00:00 0 \n"
        );
        let shown = String::from_utf8(memory.guest_maps(text.as_bytes())).expect("text");
        let lines: Vec<_> = shown.lines().collect();
        assert_eq!(lines.len(), 5, "{shown}");
        assert_eq!(
            lines[3..],
            [
                "0000a000-0000b000 rw-p 00000000 00:00 0 ",
                "0000c000-0000d000 rw-p 00000000 00:00 0 "
            ]
        );
        assert!(lines[0].ends_with("/guest") && lines[2].ends_with("[vvar]"), "{shown}");
        assert_eq!((lines[1].find("[heap]"), &lines[1][..20]), (Some(73), &brk[..20]));
        memory.brk.set(start);
    }
}
