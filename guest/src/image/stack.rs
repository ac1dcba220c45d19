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
//! [`Contents::lay_out`] computes these bytes for a given top; it writes nothing to guest memory.

use std::ffi::{CStr, CString};
use std::ops::Range;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags};

use super::auxv::AT_NULL;
use super::error::Reason;
use crate::space::{PAGE, Reservation, page_up, soft_limit};

/// Longest single string, NUL included (the kernel's MAX_ARG_STRLEN).
const MAX_STRING: usize = 32 * PAGE as usize;

/// Bytes for strings and pointers: always allowed, and the most ever allowed (manual: execve(2):
/// ARG_MAX; 3/4 of the default stack).
const ARGUMENT_SPACE: Range<u64> = 128 << 10..6 << 20;

/// Sizes in bytes that a guest's stack can have (guess; a smaller one overflows in ordinary
/// programs, a larger one needs address space that other mappings want). There is address space for the
/// largest, if the kernel has so much.
const STACK_SIZE: Range<u64> = 256 << 10..1 << 30;

/// Bytes left unmapped below the guest's stack (the kernel's stack_guard_gap).
const GUARD: u64 = 256 * PAGE;

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

/// Addresses of the parts of the initial stack, as the kernel reports them in
/// /proc/PID/{cmdline,environ,auxv}.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StackLayout {
    /// Initial rsp.
    pub stack_pointer: u64,
    /// The argument strings.
    pub arguments: Range<u64>,
    /// The environment strings.
    pub environment: Range<u64>,
    /// The auxiliary vector with its AT_NULL.
    pub auxiliary: Range<u64>,
}

/// The bytes from the stack pointer up to the stack's end.
pub(super) struct Layout {
    pub(super) places: StackLayout,
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
        if too_long || (pointers + strings) as u64 > space {
            Err(Reason::ArgumentsTooLong)
        } else {
            Ok(())
        }
    }

    /// The stack's contents for a stack that ends at `top`, a page boundary.
    pub(super) fn lay_out(&self, top: u64) -> Layout {
        let strings_len: u64 = self.strings().map(|string| string.count_bytes() as u64 + 1).sum();
        let strings = top - 8 - strings_len;
        let platform = (strings & !15) - PLATFORM.count_bytes() as u64 - 1;
        let random = platform - RANDOM_LEN as u64;
        let auxiliary_len = 16 * (self.auxiliary.len() as u64 + 1);
        let pointers_len =
            8 * (1 + self.arguments.len() as u64 + 1 + self.environment.len() as u64 + 1);
        let stack_pointer = (random - auxiliary_len - pointers_len) & !15;

        let mut words = vec![self.arguments.len() as u64];
        let mut address = strings;
        let mut ends = [0; 2];
        for (list, end) in [self.arguments, self.environment].into_iter().zip(&mut ends) {
            for string in list {
                words.push(address);
                address += string.count_bytes() as u64 + 1;
            }
            words.push(0);
            *end = address;
        }
        let file_name = address;
        let auxiliary = stack_pointer + 8 * words.len() as u64;
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
        let places = StackLayout {
            stack_pointer,
            arguments: strings..ends[0],
            environment: ends[0]..ends[1],
            auxiliary: auxiliary..auxiliary + auxiliary_len,
        };
        Layout { places, bytes }
    }
}

/// The bytes of a stack with this limit.
fn size_for(limit: u64) -> u64 {
    let size = limit.clamp(STACK_SIZE.start, STACK_SIZE.end);
    page_up(size).unwrap_or(STACK_SIZE.end)
}

/// How a stack is mapped, besides private. The kernel never grows it, because something is mapped below; but
/// it counts what grows as stack, not as data (`RLIMIT_DATA`).
fn flags() -> MapFlags {
    MapFlags::MAP_NORESERVE | MapFlags::MAP_STACK | MapFlags::MAP_GROWSDOWN
}

/// Where the first thread's stack is, and where it may grow.
///
/// It is mapped as large as its limit, where the kernel's own would grow when it is used. The address space
/// below is kept inaccessible for a higher limit.
///
/// ```text
///    lowest              range.start                       range.end
///      │ kept inaccessible     │ the guest's                   │
/// ```
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct StackPlace {
    /// The stack's addresses, without the guard region below.
    pub range: Range<u64>,
    /// The lowest address that the stack may get.
    pub lowest: u64,
}

impl StackPlace {
    /// Where the stack begins with this limit, in bytes.
    pub fn start_for(&self, limit: u64) -> u64 {
        self.range.end.saturating_sub(size_for(limit)).max(self.lowest)
    }

    /// Makes the stack begin at the page `start`, not below [`StackPlace::lowest`]: below its present start, the new
    /// pages are zero and have this protection; above, the pages that it loses are inaccessible.
    ///
    /// # Errors
    /// The kernel's: nothing has changed then.
    ///
    /// # Safety
    /// Nothing refers to the pages that the stack loses.
    pub unsafe fn resize(&mut self, start: u64, prot: ProtFlags) -> Result<(), Errno> {
        let (range, prot) = match start < self.range.start {
            true => (start..self.range.start, prot),
            false => (self.range.start..start, ProtFlags::PROT_NONE),
        };
        if !range.is_empty() {
            let mut pages = Reservation::adopt(range.start, range.end - range.start);
            let mapped = pages.map_zeroed(range, prot, flags());
            pages.commit();
            mapped?;
        }
        self.range.start = start;
        Ok(())
    }
}

/// A stack that is mapped, and unmapped again unless committed.
pub(super) struct Stack {
    pub(super) range: Range<u64>,
    reservation: Reservation,
}

impl Stack {
    /// Maps an empty stack of about `limit` bytes, with a guard region below. The kernel allocates
    /// its pages on first use.
    pub(super) fn map(limit: u64, executable: bool) -> Result<Stack, Reason> {
        let size = size_for(limit);
        let failed = |errno| Reason::CannotMap { what: format!("a stack of {size} bytes"), errno };
        let reserve = |size| Reservation::anywhere(GUARD + size, PAGE);
        let reserved = reserve(STACK_SIZE.end).or_else(|_| reserve(size));
        let mut reservation = reserved.map_err(failed)?;
        let range = reservation.end() - size..reservation.end();
        let mut prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        prot.set(ProtFlags::PROT_EXEC, executable);
        reservation.map_zeroed(range.clone(), prot, flags()).map_err(failed)?;
        Ok(Stack { range, reservation })
    }

    /// The stack's place.
    pub(super) fn place(&self) -> StackPlace {
        StackPlace { range: self.range.clone(), lowest: self.reservation.start() + GUARD }
    }

    /// Fills in the initial contents.
    pub(super) fn fill(&mut self, contents: &Contents) -> Result<StackLayout, Reason> {
        let Layout { places, bytes } = contents.lay_out(self.range.end);
        if places.stack_pointer < self.range.start {
            return Err(Reason::ArgumentsTooLong);
        }
        self.reservation
            .write(places.stack_pointer, &bytes)
            .map_err(|_| Reason::ArgumentsTooLong)?;
        Ok(places)
    }

    /// Hands the stack over to the guest: it stays mapped.
    pub(super) fn commit(self) {
        self.reservation.commit();
    }
}

/// The soft RLIMIT_STACK.
pub(super) fn stack_limit() -> u64 {
    soft_limit(libc::RLIMIT_STACK)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: u64 = 0x7000_0000_0000;

    fn strings(list: &[&str]) -> Vec<CString> {
        list.iter().map(|&string| CString::new(string).expect("no NUL")).collect()
    }

    /// Reads a layout as a program would.
    struct View<'a>(&'a Layout);

    impl View<'_> {
        fn at(&self, address: u64) -> &[u8] {
            &self.0.bytes[(address - self.0.places.stack_pointer) as usize..]
        }

        fn word(&self, index: u64) -> u64 {
            u64::from_le_bytes(
                self.at(self.0.places.stack_pointer + 8 * index)[..8]
                    .try_into()
                    .expect("eight bytes"),
            )
        }

        fn string(&self, address: u64) -> &str {
            CStr::from_bytes_until_nul(self.at(address)).expect("ended").to_str().expect("ASCII")
        }
    }

    #[test]
    fn a_program_finds_everything() {
        let auxiliary = [
            (6, Value::Number(4096)),
            (25, Value::RandomBytes),
            (31, Value::FileName),
            (15, Value::Platform),
        ];
        for count in 0..6 {
            let arguments = strings(&["prog", "", "two words", "x", "y", "z"][..count]);
            let environment = strings(&["A=1", "EMPTY=", "PATH=/bin:/usr/bin"][..count / 2]);
            let contents = Contents {
                arguments: &arguments,
                environment: &environment,
                file_name: c"/bin/prog",
                random: *b"0123456789abcdef",
                auxiliary: &auxiliary,
            };
            let layout = contents.lay_out(TOP);
            assert_eq!(layout.places.stack_pointer % 16, 0);
            assert_eq!(layout.places.stack_pointer + layout.bytes.len() as u64, TOP);
            assert_eq!(layout.bytes[layout.bytes.len() - 8..], [0; 8]);
            let joined = |list: &[CString]| {
                list.iter().flat_map(|s| s.as_bytes_with_nul()).copied().collect::<Vec<u8>>()
            };
            let view = View(&layout);
            let StackLayout { arguments: first, environment: second, auxiliary: vector, .. } =
                &layout.places;
            assert!(
                view.at(first.start).starts_with(&joined(&arguments)) && first.end == second.start
            );
            assert_eq!(first.end - first.start, joined(&arguments).len() as u64);
            assert!(view.at(second.start).starts_with(&joined(&environment)));
            assert_eq!(second.end - second.start, joined(&environment).len() as u64);
            assert!(view.at(vector.start).starts_with(&6u64.to_le_bytes()));
            assert!(view.at(vector.end - 16).starts_with(&[0; 16]));
            assert_eq!(view.word(0), count as u64);
            let mut index = 1;
            let mut previous = 0;
            for list in [&arguments, &environment] {
                for string in list {
                    assert_eq!(view.string(view.word(index)), string.to_str().expect("ASCII"));
                    assert!(view.word(index) > previous, "strings ascend");
                    previous = view.word(index);
                    index += 1;
                }
                assert_eq!(view.word(index), 0);
                index += 1;
            }
            assert_eq!((view.word(index), view.word(index + 1)), (6, 4096));
            assert_eq!(view.word(index + 2), 25);
            assert_eq!(&view.at(view.word(index + 3))[..RANDOM_LEN], b"0123456789abcdef");
            assert_eq!(
                (view.word(index + 4), view.string(view.word(index + 5))),
                (31, "/bin/prog")
            );
            assert_eq!((view.word(index + 6), view.string(view.word(index + 7))), (15, "x86_64"));
            assert_eq!((view.word(index + 8), view.word(index + 9)), (0, 0));
            assert_eq!(view.word(index + 5), TOP - 8 - 10, "the file name is highest");
        }
    }

    #[test]
    fn limits() {
        let contents = |arguments: &[CString], limit| {
            Contents {
                arguments,
                environment: &[],
                file_name: c"f",
                random: [0; RANDOM_LEN],
                auxiliary: &[],
            }
            .check_size(limit)
        };
        let long = |len| vec![CString::new(vec![b'x'; len]).expect("no NUL")];
        assert_eq!(contents(&long(MAX_STRING - 1), 8 << 20), Ok(()));
        assert_eq!(contents(&long(MAX_STRING), 8 << 20), Err(Reason::ArgumentsTooLong));
        let many = |count| strings(&vec!["1234567"; count]);
        // 16 bytes each, pointer included; a quarter of the stack, but not below 128 KiB nor above
        // 6 MiB.
        assert_eq!(contents(&many((2 << 20) / 16 - 1), 8 << 20), Ok(()));
        assert_eq!(contents(&many((2 << 20) / 16), 8 << 20), Err(Reason::ArgumentsTooLong));
        assert_eq!(contents(&many((128 << 10) / 16 - 1), 0), Ok(()));
        assert_eq!(contents(&many((6 << 20) / 16), u64::MAX), Err(Reason::ArgumentsTooLong));
    }
}
