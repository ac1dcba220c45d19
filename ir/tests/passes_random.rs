//! Random sequences of passes over random traces: traces of programs stay equivalent to `base` and transparent;
//! arbitrary versions still do what they did. Failures shrink to a small program.
//!
//! `IR_SEEDS=from..to` runs other seeds, more of them or one.

use dynasour_ir::eval::check::{Checked, Limits, check, run_base, same_result};
use dynasour_ir::eval::{Hooks, Leave, Machine, ModelMachine, State};
use dynasour_ir::opt::{OptOptions, PASSES, optimise_with};
use dynasour_ir::random::program::Program;
use dynasour_ir::random::trace::{Options, build, record};
use dynasour_ir::random::{Rng, generate, shrink, version as arbitrary};
use dynasour_ir::verify::{assert_valid, verify};
use dynasour_ir::{Fact, Version};
use std::ops::Range;

const LIMITS: Limits = Limits { steps: 3_000, forced: 16 };

fn seeds(default: Range<u64>) -> Range<u64> {
    let given = std::env::var("IR_SEEDS").ok();
    let parsed = given.as_deref().and_then(|s| s.split_once("..")).map(|(a, b)| (a.parse(), b.parse()));
    match parsed {
        Some((Ok(from), Ok(to))) => from..to,
        _ => default,
    }
}

/// Stops at a pc.
struct StopAt(u64);

impl<M: Machine> Hooks<M> for StopAt {
    fn at(&mut self, pc: u64, _state: &State, _machine: &M) -> bool {
        pc == self.0
    }
}

fn sequence(rng: &mut Rng) -> Vec<&'static str> {
    (0..1 + rng.below(6)).map(|_| PASSES[rng.below(PASSES.len())].name).collect()
}

/// Optimises every trace of the program and checks it; counts the evaluations.
fn check_program(program: &Program, seed: u64) -> Result<u64, String> {
    let mut program = program.clone();
    let mut evaluations = 0;
    for head in generate::heads(&program) {
        // Each head has dice of its own, so that shrinking one part leaves the others as they were.
        let mut rng = Rng::new(seed ^ head);
        let mut machine = generate::machine(&mut rng);
        let mut state = generate::state(&mut rng);
        let stopped = run_base(&mut program, Program::pc(0), &mut state, &mut machine, &mut StopAt(head), &mut 5_000);
        if stopped != Ok(Leave::Stopped { pc: head }) {
            continue;
        }
        let at_head = (state.clone(), machine.clone());
        let Some(path) = record(&mut program, head, &mut state, &mut machine, 12) else { continue };
        let options = Options { peel: rng.one_in(2), older_anchor: rng.below(4) };
        let Some(original) = build(&path, "t1", options, &mut rng) else { continue };
        let mut trace = original.clone();
        if rng.one_in(2) {
            trace.context.facts.push(Fact::PrivateMemory);
        }
        let passes = sequence(&mut rng);
        for name in &passes {
            optimise_with(&mut trace, &[name], &OptOptions::default());
            verify(&trace).map_err(|e| format!("after {name} of {passes:?}: {}\n{trace}\nfrom\n{original}", e[0]))?;
        }
        let others = (0..2).map(|_| (generate::state(&mut rng), at_head.1.clone()));
        for (state, machine) in std::iter::once(at_head.clone()).chain(others.collect::<Vec<_>>()) {
            match check(&mut program, &trace, &state, &machine, LIMITS) {
                Ok(Checked::Compared { evaluations: n, .. }) => evaluations += n,
                Ok(Checked::ContextFails) => {}
                Err(mismatch) => return Err(format!("after {passes:?}: {mismatch}\nfrom\n{original}")),
            }
        }
    }
    Ok(evaluations)
}

#[test]
fn optimised_traces_are_equivalent_and_transparent() {
    let range = seeds(0..400);
    let count = range.end.saturating_sub(range.start);
    let mut evaluations = 0;
    for seed in range {
        let program = generate::program(&mut Rng::new(seed));
        match check_program(&program, seed) {
            Ok(n) => evaluations += n,
            Err(_) => {
                let small = shrink(&program, |p| check_program(p, seed).is_err());
                panic!(
                    "IR_SEEDS={seed}..{}\n{small:?}\n{}",
                    seed + 1,
                    check_program(&small, seed).expect_err("it fails")
                );
            }
        }
    }
    assert!(evaluations >= 5 * count, "{evaluations} evaluations of {count} programs");
}

#[test]
fn arbitrary_versions_do_what_they_did() {
    for seed in seeds(0..1_000) {
        let mut rng = Rng::new(seed);
        let original: Version = arbitrary::trace(&mut rng);
        assert_valid(&original);
        let mut version = original.clone();
        let passes = sequence(&mut rng);
        // A new guard may leave earlier than the original would, and nothing says that anchors of arbitrary versions
        // are transparent.
        optimise_with(&mut version, &passes, &OptOptions { alias_guards: false, ..OptOptions::default() });
        assert_valid(&version);
        for round in 0..4 {
            let machine = if round < 3 { ModelMachine::boundless(seed) } else { generate::machine(&mut rng) };
            let mut state = generate::state(&mut rng);
            for fact in &original.context.facts {
                if let Fact::RegEquals(gpr, value) = fact {
                    state.gpr[gpr.number()] = *value;
                }
            }
            // A deferred store that faults is the original's own fault; nothing is asked of the passes then.
            if same_result(&original, &original, &state, &machine, 500).is_err() {
                continue;
            }
            if let Err(what) = same_result(&original, &version, &state, &machine, 500) {
                panic!("IR_SEEDS={seed}..{}: {passes:?}: {what}\nfrom {state}\n{original}{version}", seed + 1);
            }
        }
    }
}
