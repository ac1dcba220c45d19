//! Where the guest's dynamic linker lies: the image that the program's PT_INTERP names. What runs there is
//! the start of nearly every program, so reports count it apart.
//!
//! Data: the range, set once before the guest starts; empty for a program without a dynamic linker, and for a
//! dynamic linker that the user runs as a program. No lock.
//!
//! Example: `/bin/ls` is loaded with `/lib64/ld-linux-x86-64.so.2` at 0x5000..0x3c000. The head of the
//! loop in `_dl_lookup_symbol_x` is [in it](has), one in libc is not.

use std::ops::Range;
use std::sync::OnceLock;

static LINKER: OnceLock<Range<u64>> = OnceLock::new();

/// The dynamic linker lies there. Only the first call has an effect.
pub fn set(range: Range<u64>) {
    LINKER.get_or_init(|| range);
}

/// Is the guest address in the dynamic linker?
pub fn has(pc: u64) -> bool {
    LINKER.get().is_some_and(|range| range.contains(&pc))
}
