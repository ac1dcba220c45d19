//! Fuzz target: the verifier answers for any version. The evaluator runs each version that it
//! accepts without a panic, and the text form round-trips it.
//! form keeps.
#![no_main]

use dynasour_ir::eval::{ForceNth, ModelMachine, run};
use dynasour_ir::random::damage::damaged;
use dynasour_ir::random::{Rng, generate};
use dynasour_ir::text::version;
use dynasour_ir::verify::verify;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|tape: &[u8]| {
    let mut rng = Rng::from_tape(tape);
    let v = damaged(&mut rng);
    if verify(&v).is_err() {
        return;
    }
    let printed = v.to_string();
    assert_eq!(version(&printed).as_ref(), Ok(&v), "{printed}");
    let mut machine = ModelMachine::boundless(rng.bits());
    let mut state = generate::state(&mut rng);
    let mut hooks = ForceNth { seen: 0, nth: Some(rng.below(64) as u64) };
    // A deferred store may fault here, because the verifier does not check rule (c); nothing else
    // may go wrong.
    let _ = run(&v, &mut state, &mut machine, &mut hooks, &mut 2_000);
});
