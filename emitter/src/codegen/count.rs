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
    code_adding(1)
}

/// As [`code`], but adds this number.
pub(crate) fn code_adding(n: i32) -> (Vec<u8>, [usize; 2]) {
    let saved = offset::STUB_SAVE + 8 * SAVE;
    let mut code = Vec::with_capacity(36);
    code.store(RCX, saved);
    let fields = add(&mut code, n);
    code.load(RCX, saved);
    (code, fields)
}

/// rcx and the word become the word and this number. Returns the offsets of the fields.
pub(crate) fn add(code: &mut Vec<u8>, n: i32) -> [usize; 2] {
    code.mov_from(RCX, Mem::relative());
    let load = code.len() - 4;
    code.lea(RCX, Mem::at(RCX).plus(n));
    code.mov_to(Mem::relative(), RCX);
    [load, code.len() - 4]
}

/// A register of the guest's and the value that it has where an iteration starts: its number and the
/// value. It is neither rcx nor rsp.
pub(crate) type KeyRegister = (u8, u64);

/// As [`code`], but counts only if the register of `key` has its value.
pub(crate) fn code_if(key: Option<KeyRegister>) -> (Vec<u8>, [usize; 2]) {
    let Some((register, value)) = key else { return code() };
    let saved = offset::STUB_SAVE + 8 * SAVE;
    let mut counting = Vec::with_capacity(18);
    let fields = add(&mut counting, 1);
    let mut code = Vec::with_capacity(64);
    code.store(RCX, saved);
    code.mov_imm_64(RCX, value.wrapping_neg());
    code.lea(RCX, Mem::at(RCX).index(register, 0));
    // Equal: to the counting. Not equal: over it.
    code.jrcxz_over(2);
    code.jmp_over(counting.len() as i8);
    let before = code.len();
    code.extend(&counting);
    code.load(RCX, saved);
    (code, fields.map(|field| before + field))
}

/// How a trace counts the starts of iterations, for a race.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Starts {
    /// The trace is entered at the start of an iteration if this register has its value; always if
    /// there is none.
    pub key: Option<KeyRegister>,
    /// The address of the word that counts starts at the entry.
    pub entered: u64,
    /// The address of the word that counts starts at the head of the loop.
    pub looped: u64,
    /// As many starts are counted there.
    pub each: i32,
    /// The address of a word of the trace's own in which the loop counts instead, if it can
    /// ([`super::loop_starts`]).
    pub own: Option<u64>,
}

/// The length of the code that counts, if `bytes` start with it.
pub fn length_at(bytes: &[u8]) -> Option<usize> {
    let (code, fields) = code();
    let is_field = |at: usize| fields.iter().any(|field| (*field..field + 4).contains(&at));
    let same = bytes.len() >= code.len()
        && (0..code.len()).all(|at| is_field(at) || code[at] == bytes[at]);
    same.then_some(code.len())
}
