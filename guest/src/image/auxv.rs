//! The auxiliary vector: what the kernel tells a new program (getauxval(3)), in the kernel's order.
//!
//! The host's own values are passed on where they describe the machine or the process; what describes the program
//! is the guest's. AT_RSEQ_* is left out, so that the guest's C library does without restartable sequences.

use nix::errno::Errno;

use super::stack::Value;
use crate::space::PAGE;

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

/// The host's own entry of this kind, if it has one.
fn host(kind: u64) -> Option<(u64, Value)> {
    Errno::clear();
    // SAFETY: getauxval has no preconditions.
    let value = unsafe { libc::getauxval(kind) };
    (value != 0 || Errno::last() != Errno::ENOENT).then_some((kind, Value::Number(value)))
}
