//! The instructions by which a fragment counts (see [`crate::fragment::counting`]), and the events
//! that they count.
//!
//! No data, no lock; only the encoder uses it, if the emitter counts.

use crate::asm::{Assembler, Mem, RCX};
use dynasour_guest::context::offset;

/// The word of `stub_save` that rcx is in meanwhile; nothing else uses it.
const SAVE: usize = 7;

/// What of a fragment is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What {
    Entered,
    Iterations,
    Executed(u32),
    Left(u32),
}

impl What {
    /// The number of its word among the fragment's.
    pub fn index(self) -> u32 {
        match self {
            What::Entered => 0,
            What::Iterations => 1,
            What::Executed(site) => 2 + 2 * site,
            What::Left(site) => 3 + 2 * site,
        }
    }
}

/// The code that counts, and the offsets of its fields that are relative to their ends and lead to
/// the word.
pub(crate) fn code() -> (Vec<u8>, [usize; 2]) {
    let saved = offset::STUB_SAVE + 8 * SAVE;
    let mut code = Vec::with_capacity(36);
    code.store(RCX, saved);
    code.mov_from(RCX, Mem::relative());
    let load = code.len() - 4;
    code.lea(RCX, Mem::at(RCX).plus(1));
    code.mov_to(Mem::relative(), RCX);
    let store = code.len() - 4;
    code.load(RCX, saved);
    (code, [load, store])
}

/// The length of the code that counts, if `bytes` start with it.
pub fn length_at(bytes: &[u8]) -> Option<usize> {
    let (code, fields) = code();
    let is_field = |at: usize| fields.iter().any(|field| (*field..field + 4).contains(&at));
    let same = bytes.len() >= code.len()
        && (0..code.len()).all(|at| is_field(at) || code[at] == bytes[at]);
    same.then_some(code.len())
}
