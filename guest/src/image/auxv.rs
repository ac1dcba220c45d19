//! The auxiliary vector: what the kernel tells a new program (getauxval(3)), in the kernel's order.
//!
//! Entries that describe the machine or the process are the host's own values. Entries that
//! describe the program are the guest's. AT_RSEQ_* is left out, so that the guest's C library runs
//! without restartable sequences.

use super::stack::Value;
use crate::space::PAGE;

/// Ends the vector.
pub(super) const AT_NULL: u64 = 0;
const AT_PHDR: u64 = 3;
const AT_PHENT: u64 = 4;
const AT_PHNUM: u64 = 5;
const AT_PAGESZ: u64 = 6;
const AT_BASE: u64 = 7;
const AT_FLAGS: u64 = 8;
const AT_ENTRY: u64 = 9;
const AT_UID: u64 = 11;
const AT_EUID: u64 = 12;
const AT_GID: u64 = 13;
const AT_EGID: u64 = 14;
const AT_PLATFORM: u64 = 15;
const AT_HWCAP: u64 = 16;
const AT_CLKTCK: u64 = 17;
const AT_SECURE: u64 = 23;
const AT_RANDOM: u64 = 25;
const AT_HWCAP2: u64 = 26;
const AT_HWCAP3: u64 = 29;
const AT_HWCAP4: u64 = 30;
const AT_EXECFN: u64 = 31;
const AT_SYSINFO_EHDR: u64 = 33;
const AT_MINSIGSTKSZ: u64 = 51;

/// Size of a program header, for AT_PHENT.
const PROGRAM_HEADER_SIZE: u64 = 56;

/// What the vector says about the program; addresses are relocated.
pub(super) struct Program {
    pub(super) program_headers: u64,
    pub(super) program_header_count: u16,
    /// Load bias of the dynamic linker, 0 without one.
    pub(super) interpreter_base: u64,
    pub(super) entry: u64,
}

/// The vector without its final AT_NULL.
pub(super) fn build(program: &Program) -> Vec<(u64, Value)> {
    let own = Host::read();
    let host = |kind| own.entry(kind);
    let number = |kind, value| Some((kind, Value::Number(value)));
    [
        host(AT_SYSINFO_EHDR),
        host(AT_MINSIGSTKSZ),
        host(AT_HWCAP),
        number(AT_PAGESZ, PAGE),
        host(AT_CLKTCK),
        number(AT_PHDR, program.program_headers),
        number(AT_PHENT, PROGRAM_HEADER_SIZE),
        number(AT_PHNUM, u64::from(program.program_header_count)),
        number(AT_BASE, program.interpreter_base),
        number(AT_FLAGS, 0),
        number(AT_ENTRY, program.entry),
        host(AT_UID),
        host(AT_EUID),
        host(AT_GID),
        host(AT_EGID),
        host(AT_SECURE),
        Some((AT_RANDOM, Value::RandomBytes)),
        host(AT_HWCAP2),
        host(AT_HWCAP3),
        host(AT_HWCAP4),
        Some((AT_EXECFN, Value::FileName)),
        Some((AT_PLATFORM, Value::Platform)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The host's own vector as the kernel made it. (getauxval is not enough: glibc changes some of its
/// answers.)
struct Host(Vec<u64>);

impl Host {
    fn read() -> Host {
        let bytes = match ask_kernel() {
            none if none.is_empty() => std::fs::read("/proc/self/auxv").unwrap_or_default(),
            bytes => bytes,
        };
        Host(
            bytes
                .chunks_exact(8)
                .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
                .collect(),
        )
    }

    /// The host's entry of this kind, if it has one.
    fn entry(&self, kind: u64) -> Option<(u64, Value)> {
        let entries = self.0.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        let entry =
            entries.take_while(|&(kind, _)| kind != AT_NULL).find(|entry| entry.0 == kind)?;
        Some((kind, Value::Number(entry.1)))
    }
}

/// The vector by prctl (Linux 6.4), which needs no /proc and is faster; empty on older kernels.
fn ask_kernel() -> Vec<u8> {
    const PR_GET_AUXV: libc::c_int = 0x4155_5856;
    let mut bytes = vec![0u8; 1024];
    // SAFETY: the kernel writes at most the given length into the buffer.
    let len = unsafe { libc::prctl(PR_GET_AUXV, bytes.as_mut_ptr(), bytes.len(), 0, 0) };
    bytes.truncate(usize::try_from(len).unwrap_or(0));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sources_agree() {
        let from_kernel = ask_kernel();
        let from_file = std::fs::read("/proc/self/auxv").expect("auxv");
        if !from_kernel.is_empty() {
            assert!(from_kernel.starts_with(&from_file) || from_file.starts_with(&from_kernel));
        }
    }

    #[test]
    fn the_program_has_its_own_values() {
        let program =
            Program { program_headers: 1, program_header_count: 2, interpreter_base: 3, entry: 4 };
        let vector = build(&program);
        let value = |kind| vector.iter().find(|entry| entry.0 == kind).map(|entry| entry.1);
        assert_eq!(value(AT_PHDR), Some(Value::Number(1)));
        assert_eq!(value(AT_PHNUM), Some(Value::Number(2)));
        assert_eq!(value(AT_BASE), Some(Value::Number(3)));
        assert_eq!(value(AT_ENTRY), Some(Value::Number(4)));
        assert_eq!(value(AT_PAGESZ), Some(Value::Number(4096)));
        assert_eq!(value(AT_RANDOM), Some(Value::RandomBytes));
        assert!(matches!(value(AT_HWCAP), Some(Value::Number(hwcap)) if hwcap != 0));
        assert!(matches!(value(AT_SYSINFO_EHDR), Some(Value::Number(vdso)) if vdso % 4096 == 0));
        let kinds: Vec<u64> = vector.iter().map(|entry| entry.0).collect();
        assert!(
            !kinds.contains(&AT_NULL) && !kinds.contains(&27) && !kinds.contains(&28),
            "{kinds:?}"
        );
    }
}
