//! Which guest bytes may be executed: the processor refuses to fetch from a page without that right, so the lifter must too.
//!
//! The kernel knows the rights; asking it (`/proc/self/maps`) costs tens of microseconds, so the answer is remembered.
//! Invariant: a range remembered as executable still is. Mappings appear without notice, but nothing that is remembered
//! changes without one ([`Fetch::changed`], from the engine's invalidation): so the kernel is asked again about what is not
//! remembered, and not about what is.

use crate::memory;
use dynasour_guest::decode::Fetch;
use dynasour_guest::space;
use nix::sys::mman::ProtFlags;
use std::cell::RefCell;
use std::ops::Range;

/// Guest memory as the processor's instruction fetch sees it.
#[derive(Debug, Default)]
pub struct ExecutableCode {
    known: RefCell<Known>,
}

/// What is remembered. Ranges are ascending and disjoint, adjacent ones merged.
#[derive(Debug, Default)]
struct Known {
    executable: Vec<Range<u64>>,
    /// The part of it that stores may change, here or through another mapping.
    writable: Vec<Range<u64>>,
}

impl Fetch for ExecutableCode {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        let mut len = self.known_len(addr);
        if len < buf.len() {
            *self.known.borrow_mut() = Known::ask();
            len = self.known_len(addr);
        }
        let len = len.min(buf.len());
        memory::fetch_code(addr, &mut buf[..len])
    }

    fn changed(&self, range: Range<u64>) {
        let mut known = self.known.borrow_mut();
        remove(&mut known.executable, &range);
        remove(&mut known.writable, &range);
    }

    fn is_writable(&self, range: Range<u64>) -> bool {
        let known = self.known.borrow();
        let after = known.writable.partition_point(|writable| writable.end <= range.start);
        known.writable.get(after).is_some_and(|writable| writable.start < range.end)
    }
}

impl ExecutableCode {
    /// How many bytes from `addr` on are known to be executable.
    fn known_len(&self, addr: u64) -> usize {
        let end = end_of(&self.known.borrow().executable, addr);
        end.map_or(0, |end| usize::try_from(end - addr).unwrap_or(usize::MAX))
    }
}

/// Where the range with `addr` in it ends.
fn end_of(known: &[Range<u64>], addr: u64) -> Option<u64> {
    let after = known.partition_point(|range| range.start <= addr);
    known[..after].last().map(|range| range.end).filter(|&end| addr < end)
}

impl Known {
    /// What the kernel says now; nothing where `/proc` cannot be read.
    fn ask() -> Known {
        let mut known = Known::default();
        let executable = |entry: &space::MapEntry| entry.prot.contains(ProtFlags::PROT_EXEC);
        for entry in space::maps().unwrap_or_default().into_iter().filter(executable) {
            if entry.shared || entry.prot.contains(ProtFlags::PROT_WRITE) {
                append(&mut known.writable, entry.range.clone());
            }
            append(&mut known.executable, entry.range);
        }
        known
    }
}

fn append(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

fn remove(known: &mut Vec<Range<u64>>, gone: &Range<u64>) {
    let first = known.partition_point(|range| range.end <= gone.start);
    let last = known.partition_point(|range| range.start < gone.end);
    if first >= last {
        return;
    }
    let before = known[first].start..gone.start;
    let behind = gone.end..known[last - 1].end;
    known.splice(first..last, [before, behind].into_iter().filter(|range| !range.is_empty()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_cuts() {
        let cut = |gone: Range<u64>| {
            let mut known = vec![10..20, 30..40, 50..60];
            remove(&mut known, &gone);
            known
        };
        assert_eq!(cut(20..30), [10..20, 30..40, 50..60]);
        assert_eq!(cut(15..16), [10..15, 16..20, 30..40, 50..60]);
        assert_eq!(cut(10..20), [30..40, 50..60]);
        assert_eq!(cut(0..35), [35..40, 50..60]);
        assert_eq!(cut(35..100), [10..20, 30..35]);
        assert_eq!(cut(15..55), [10..15, 55..60]);
        assert_eq!(cut(0..100), []);
        assert_eq!(cut(60..60), [10..20, 30..40, 50..60]);
    }

    #[test]
    fn ranges_hold_their_first_byte_and_not_their_end() {
        let known = [10..20, 30..40];
        let ends: Vec<_> = [9, 10, 19, 20, 29, 30, 39, 40].map(|addr| end_of(&known, addr)).to_vec();
        assert_eq!(ends, [None, Some(20), Some(20), None, None, Some(40), Some(40), None]);
    }

    #[test]
    fn code_is_fetched_and_data_is_not() {
        let code = ExecutableCode::default();
        let function = code_is_fetched_and_data_is_not as fn() as usize as u64;
        let data = [0x90u8; 16];
        let mut bytes = [0; 16];
        assert_eq!(code.fetch(function, &mut bytes), 16);
        assert_eq!(code.fetch(data.as_ptr() as u64, &mut bytes), 0);
        assert_eq!(code.fetch(0, &mut bytes), 0);
    }

    #[test]
    fn a_page_is_code_while_it_is_executable() {
        // SAFETY: a mapping of the test's own, unmapped at the end.
        unsafe {
            let len = 2 * space::PAGE as usize;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let pages = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            let start = pages as u64;
            let second = start + space::PAGE;
            let code = ExecutableCode::default();
            let mut bytes = [0; 16];
            assert_eq!(code.fetch(second - 4, &mut bytes), 0);
            assert_eq!(libc::mprotect(pages, len / 2, libc::PROT_READ | libc::PROT_EXEC), 0);
            code.changed(start..second);
            assert_eq!(code.fetch(second - 4, &mut bytes), 4);
            assert_eq!(code.fetch(second, &mut bytes), 0);
            assert_eq!(libc::mprotect(pages.byte_add(len / 2), len / 2, libc::PROT_READ | libc::PROT_EXEC), 0);
            code.changed(second..second + space::PAGE);
            assert_eq!(code.fetch(second - 4, &mut bytes), 16);
            assert!(!code.is_writable(start..second + space::PAGE));
            let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            assert_eq!(libc::mprotect(pages.byte_add(len / 2), len / 2, all), 0);
            code.changed(second..second + space::PAGE);
            assert_eq!(code.fetch(second - 4, &mut bytes), 16);
            assert!(code.is_writable(second - 1..second + 1) && !code.is_writable(start..second));
            assert_eq!(libc::mprotect(pages, len, libc::PROT_READ), 0);
            code.changed(start..second + space::PAGE);
            assert_eq!(code.fetch(start, &mut bytes), 0);
            assert!(!code.is_writable(start..second + space::PAGE));
            libc::munmap(pages, len);
        }
    }
}
