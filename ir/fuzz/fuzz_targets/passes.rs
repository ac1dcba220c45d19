//! Fuzz target: any sequence of passes over the traces of any program keeps them equivalent to
//! `base` and transparent.
#![no_main]

use dynasour_ir::random::{Rng, cases, generate};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|tape: &[u8]| {
    let Some((seed, tape)) = tape.split_first_chunk() else { return };
    let seed = u64::from_le_bytes(*seed);
    let program = generate::program(&mut Rng::from_tape(tape));
    if let Err(failure) = cases::holds(&program, seed) {
        panic!("{}", failure.shrunk());
    }
});
