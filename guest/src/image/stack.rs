//! The initial stack, as the kernel's binfmt_elf makes it (System V ABI for x86-64, 3.4.1).
//!
//! ```text
//! top   8 zero bytes
//!       file name of the program (AT_EXECFN)
//!       environment strings, last one highest
//!       argument strings, last one highest
//!       -- aligned down to 16
//!       "x86_64" (AT_PLATFORM)
//!       16 random bytes (AT_RANDOM)
//!       padding
//!       auxiliary vector, ended by AT_NULL
//!       environment pointers, ended by 0
//!       argument pointers, ended by 0
//! rsp   argument count, 16-byte aligned
//! ```
//!
//! [`Contents::lay_out`] computes it as bytes for a given top; nothing is written anywhere.

use std::ffi::{CStr, CString};
use std::ops::Range;

use nix::sys::mman::{MapFlags, ProtFlags};

use super::error::Reason;
use crate::space::{PAGE, Reservation, page_up, soft_limit};

/// Longest single string, NUL included (the kernel's MAX_ARG_STRLEN).
const MAX_STRING: usize = 32 * PAGE as usize;

/// What strings and pointers may always take, and what they may take at most (ARG_MAX; 3/4 of the default stack).
const ARGUMENT_SPACE: Range<u64> = 128 << 10..6 << 20;

/// Sizes that a guest's stack can have.
const STACK_SIZE: Range<u64> = 256 << 10..1 << 30;

/// Unmapped for the guest below its stack (the kernel's stack_guard_gap).
const GUARD: u64 = 256 * PAGE;

/// Ends the auxiliary vector.
const AT_NULL: u64 = 0;

const PLATFORM: &CStr = c"x86_64";

/// Bytes that AT_RANDOM points to.
pub(super) const RANDOM_LEN: usize = 16;

/// The value of an auxiliary vector entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Value {
    Number(u64),
    RandomBytes,
    FileName,
    Platform,
}

/// What goes on the stack.
pub(super) struct Contents<'a> {
    pub(super) arguments: &'a [CString],
    pub(super) environment: &'a [CString],
    pub(super) file_name: &'a CStr,
    pub(super) random: [u8; RANDOM_LEN],
    /// Without the final AT_NULL.
    pub(super) auxiliary: &'a [(u64, Value)],
}

/// Bytes for the addresses from the stack pointer up to the stack's end.
pub(super) struct Layout {
    pub(super) stack_pointer: u64,
    pub(super) bytes: Vec<u8>,
}

impl Contents<'_> {
    fn strings(&self) -> impl Iterator<Item = &CStr> {
        self.arguments.iter().chain(self.environment).map(CString::as_c_str).chain([self.file_name])
    }

    /// The kernel's limits on arguments and environment for a stack limit of `stack_limit` bytes.
    pub(super) fn check_size(&self, stack_limit: u64) -> Result<(), Reason> {
        let space = (stack_limit / 4).clamp(ARGUMENT_SPACE.start, ARGUMENT_SPACE.end);
        let pointers = 8 * (self.arguments.len().max(1) + self.environment.len());
        let strings: usize = self.strings().map(|string| string.count_bytes() + 1).sum();
        let too_long = self.strings().any(|string| string.count_bytes() + 1 > MAX_STRING);
        if too_long || (pointers + strings) as u64 > space { Err(Reason::ArgumentsTooLong) } else { Ok(()) }
    }

    /// The stack's contents if its end is `top`, a page boundary.
    pub(super) fn lay_out(&self, top: u64) -> Layout {
        let strings_len: u64 = self.strings().map(|string| string.count_bytes() as u64 + 1).sum();
        let strings = top - 8 - strings_len;
        let platform = (strings & !15) - PLATFORM.count_bytes() as u64 - 1;
        let random = platform - RANDOM_LEN as u64;
        let auxiliary_len = 16 * (self.auxiliary.len() as u64 + 1);
        let pointers_len = 8 * (1 + self.arguments.len() as u64 + 1 + self.environment.len() as u64 + 1);
        let stack_pointer = (random - auxiliary_len - pointers_len) & !15;

        let mut words = vec![self.arguments.len() as u64];
        let mut address = strings;
        for list in [self.arguments, self.environment] {
            for string in list {
                words.push(address);
                address += string.count_bytes() as u64 + 1;
            }
            words.push(0);
        }
        let file_name = address;
        for &(kind, value) in self.auxiliary {
            words.push(kind);
            words.push(match value {
                Value::Number(number) => number,
                Value::RandomBytes => random,
                Value::FileName => file_name,
                Value::Platform => platform,
            });
        }
        words.extend([AT_NULL, 0]);

        let mut bytes = vec![0; (top - stack_pointer) as usize];
        let mut put = |address: u64, data: &[u8]| {
            let at = (address - stack_pointer) as usize;
            bytes[at..at + data.len()].copy_from_slice(data);
        };
        for (i, word) in words.iter().enumerate() {
            put(stack_pointer + 8 * i as u64, &word.to_le_bytes());
        }
        put(random, &self.random);
        put(platform, PLATFORM.to_bytes());
        let mut address = strings;
        for string in self.strings() {
            put(address, string.to_bytes());
            address += string.count_bytes() as u64 + 1;
        }
        Layout { stack_pointer, bytes }
    }
}

/// A stack that is mapped, and unmapped again unless committed.
pub(super) struct Stack {
    pub(super) range: Range<u64>,
    reservation: Reservation,
}

impl Stack {
    /// Maps an empty stack of about `limit` bytes, with a guard below. Memory is used only where it is touched.
    pub(super) fn map(limit: u64, executable: bool) -> Result<Stack, Reason> {
        let size = limit.clamp(STACK_SIZE.start, STACK_SIZE.end);
        let size = page_up(size).unwrap_or(STACK_SIZE.end);
        let failed = |errno| Reason::CannotMap { what: format!("a stack of {size} bytes"), errno };
        let mut reservation = Reservation::anywhere(GUARD + size, PAGE).map_err(failed)?;
        let range = reservation.start() + GUARD..reservation.end();
        let mut prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        prot.set(ProtFlags::PROT_EXEC, executable);
        let flags = MapFlags::MAP_NORESERVE | MapFlags::MAP_STACK;
        reservation.map_zeroed(range.clone(), prot, flags).map_err(failed)?;
        Ok(Stack { range, reservation })
    }

    /// Fills in the initial contents; returns the stack pointer.
    pub(super) fn fill(&mut self, contents: &Contents) -> Result<u64, Reason> {
        let layout = contents.lay_out(self.range.end);
        if layout.stack_pointer < self.range.start {
            return Err(Reason::ArgumentsTooLong);
        }
        self.reservation.write(layout.stack_pointer, &layout.bytes).map_err(|_| Reason::ArgumentsTooLong)?;
        Ok(layout.stack_pointer)
    }

    /// Leaves the stack to the guest.
    pub(super) fn commit(self) {
        self.reservation.commit();
    }
}

/// The soft RLIMIT_STACK.
pub(super) fn stack_limit() -> u64 {
    soft_limit(libc::RLIMIT_STACK)
}
