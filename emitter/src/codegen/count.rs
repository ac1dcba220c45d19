//! The instructions by which a fragment counts (see [`crate::fragment::counting`]), and the events
//! that they count.
//!
//! No data, no lock; the encoder uses it if the emitter counts, and for races, for which gates use it, too.

use crate::asm::{Assembler, Mem, RCX};
use dynasour_guest::ThreadContext;
use dynasour_guest::context::{RACE_WORDS, offset};
use std::sync::atomic::AtomicU64;

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

/// The words of a race, in [`ThreadContext::race`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RaceWord {
    /// Starts at the entry of the trace.
    Entered,
    /// Starts at the head of its loop.
    Looped,
    /// Starts of the block.
    Floor,
    /// Not 0: the gate counts twice.
    Twice,
    /// The second count of a gate.
    Second,
}

const _: () = assert!(RaceWord::Second as usize + 1 == RACE_WORDS);

impl RaceWord {
    /// Its offset in the thread's context.
    pub fn field(self) -> usize {
        offset::RACE + 8 * self as usize
    }

    /// The word of this thread.
    pub fn of(self, context: &ThreadContext) -> &AtomicU64 {
        &context.race[self as usize]
    }
}

/// Adds this number to a word of the thread's.
pub(crate) fn starts(n: i32, word: RaceWord) -> Vec<u8> {
    let saved = offset::STUB_SAVE + 8 * SAVE;
    let mut code = Vec::with_capacity(40);
    code.store(RCX, saved);
    add(&mut code, n, word);
    code.load(RCX, saved);
    code
}

/// rcx and a word of the thread's become the word and this number.
pub(crate) fn add(code: &mut Vec<u8>, n: i32, word: RaceWord) {
    code.load(RCX, word.field());
    code.lea(RCX, Mem::at(RCX).plus(n));
    code.store(RCX, word.field());
}

/// A register of the guest's and the value that it has where an iteration starts: its number and the
/// value. It is neither rcx nor rsp.
pub(crate) type KeyRegister = (u8, u64);

/// Adds one to a word of the thread's; only if the register of `key` has its value, if there is one.
pub(crate) fn starts_if(key: Option<KeyRegister>, word: RaceWord) -> Vec<u8> {
    let Some((register, value)) = key else { return starts(1, word) };
    let saved = offset::STUB_SAVE + 8 * SAVE;
    let mut counting = Vec::with_capacity(24);
    add(&mut counting, 1, word);
    let mut code = Vec::with_capacity(80);
    code.store(RCX, saved);
    code.mov_imm_64(RCX, value.wrapping_neg());
    code.lea(RCX, Mem::at(RCX).index(register, 0));
    // Equal: to the counting. Not equal: over it.
    code.jrcxz_over(2);
    code.jmp_over(counting.len() as i8);
    code.extend(&counting);
    code.load(RCX, saved);
    code
}

/// How a trace counts the starts of iterations, for a race.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Starts {
    /// The trace is entered at the start of an iteration if this register has its value; always if
    /// there is none.
    pub key: Option<KeyRegister>,
    /// As many starts are counted at the head of the loop.
    pub each: i32,
    /// The number of the trace's own word ([`ThreadContext::loop_starts`]), in which the loop counts instead,
    /// if it can ([`super::loop_starts`]).
    pub own: Option<u32>,
}

/// The length of the code that counts, if `bytes` start with it.
pub fn length_at(bytes: &[u8]) -> Option<usize> {
    let (code, fields) = code();
    let is_field = |at: usize| fields.iter().any(|field| (*field..field + 4).contains(&at));
    let same = bytes.len() >= code.len()
        && (0..code.len()).all(|at| is_field(at) || code[at] == bytes[at]);
    same.then_some(code.len())
}
