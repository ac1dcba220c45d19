//! Random programs, traces and versions, from a seed: the input of property tests and fuzz targets.
//!
//! * [`program`]: a small guest instruction set, lifted to `base` blocks in the way of the real
//!   lifter; [`generate`] makes programs with loops, calls, memory and flags, and states to run
//!   them on.
//! * [`trace`]: the reference trace builder. It records a path of `base` and turns it into a trace
//!   without any optimisation. The trace is equivalent to the program by construction, so
//!   [`crate::eval::check`] finds a pass that breaks it.
//! * [`cases`]: the property that passes must keep, over all of these; [`whole`]: whole programs as
//!   versions with branches.
//! * [`damage`]: damaged versions, for the verifier.
//! * [`version`]: arbitrary well-formed versions without meaning, for the text form and for tests
//!   against crashes.
//!
//! Invariant: everything is a function of a seed, so a failure is reproduced by its seed;
//! [`shrink`] makes a failing program small. The module owns no global state and takes no lock.
//!
//! ```text
//! let mut program = generate::program(&mut Rng::new(17));
//! let case = cases::case(&mut program, 0x1000, 17);
//! ```

pub mod cases;
pub mod damage;
pub mod generate;
pub mod program;
pub mod trace;
pub mod version;
pub mod whole;

use program::{GuestInst, Program};

/// A seeded source of numbers (SplitMix64: Steele, Lea, Flood, 2014). It may be given a tape of
/// bytes that are used up first.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
    /// The tape of choices, and the number of its bytes used up.
    tape: Vec<u8>,
    at: usize,
}

impl Rng {
    /// The same seed gives the same numbers.
    pub const fn new(seed: u64) -> Rng {
        Rng { state: seed, tape: Vec::new(), at: 0 }
    }

    /// Choices that follow `tape` until it is used up, so that a fuzzer's change of one byte
    /// changes one choice.
    pub fn from_tape(tape: &[u8]) -> Rng {
        Rng { state: tape.len() as u64, tape: tape.to_vec(), at: 0 }
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = self.tape.get(self.at).copied()?;
        self.at += 1;
        Some(byte)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        if let Some(bytes) = self.tape.get(self.at..).and_then(|bytes| bytes.first_chunk()) {
            self.at += 8;
            return u64::from_le_bytes(*bytes);
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `n`, which must not be 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n <= 256
            && let Some(byte) = self.byte()
        {
            return usize::from(byte) % n;
        }
        (self.bits() % n as u64) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of `items`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// A number that is likely to show bugs: small, a power of two or one of its neighbours, or any
    /// number.
    pub fn interesting(&mut self) -> u64 {
        match self.below(4) {
            0 => self.below(17) as u64,
            1 => (self.below(17) as u64).wrapping_neg(),
            2 => (1u64 << self.below(64)).wrapping_add(self.below(3) as u64).wrapping_sub(1),
            _ => self.bits(),
        }
    }
}

/// Replaces instructions by no-operations as long as `fails` still holds. It must hold for
/// `program` itself.
pub fn shrink(program: &Program, mut fails: impl FnMut(&Program) -> bool) -> Program {
    let mut best = program.clone();
    let mut chunk = best.insts.len();
    while chunk > 0 {
        let mut start = 0;
        while start < best.insts.len() {
            let end = (start + chunk).min(best.insts.len());
            let mut smaller = best.clone();
            smaller.insts[start..end].fill(GuestInst::Nop);
            if smaller != best && fails(&smaller) {
                best = smaller;
            }
            start = end;
        }
        chunk /= 2;
    }
    best
}
