//! Random sequences of passes over versions that hold a whole random program with its branches and loops: they must stay
//! equivalent to `base` and transparent. Failures shrink to a small program.
//!
//! `IR_SEEDS=from..to` runs other seeds, more of them or one.

use dynasour_ir::eval::check::{Checked, Limits, check};
use dynasour_ir::opt::{OptOptions, PASSES, optimise_with};
use dynasour_ir::random::program::Program;
use dynasour_ir::random::trace::{Options, build_all};
use dynasour_ir::random::{Rng, generate, shrink};
use dynasour_ir::verify::verify;
use dynasour_ir::{Fact, Term};
use std::ops::Range;

const LIMITS: Limits = Limits { steps: 2_000, forced: 12 };

fn seeds(default: Range<u64>) -> Range<u64> {
    let given = std::env::var("IR_SEEDS").ok();
    let parsed = given.as_deref().and_then(|s| s.split_once("..")).map(|(a, b)| (a.parse(), b.parse()));
    match parsed {
        Some((Ok(from), Ok(to))) => from..to,
        _ => default,
    }
}

/// What was seen: evaluations compared, versions with branches, changes that passes made.
#[derive(Default, Debug)]
struct Seen {
    evaluations: u64,
    branching: u64,
    changes: usize,
}

fn check_program(program: &Program, seed: u64, seen: &mut Seen) -> Result<(), String> {
    let mut program = program.clone();
    let mut rng = Rng::new(seed ^ 0x5eed);
    let options = Options { peel: false, older_anchor: rng.below(4) };
    let limit = 2 + rng.below(8);
    let Some(original) = build_all(&mut program, Program::pc(0), "t1", limit, options, &mut rng) else { return Ok(()) };
    verify(&original).map_err(|e| format!("built: {}\n{original}", e[0]))?;
    seen.branching += u64::from(original.blocks.iter().any(|b| matches!(b.term, Term::Branch { .. })));
    let mut version = original.clone();
    if rng.one_in(2) {
        version.context.facts.push(Fact::PrivateMemory);
    }
    let passes: Vec<&str> = (0..1 + rng.below(6)).map(|_| PASSES[rng.below(PASSES.len())].name).collect();
    for name in &passes {
        let stats = optimise_with(&mut version, &[name], &OptOptions::default());
        seen.changes += stats.passes.iter().map(|p| p.changes).sum::<usize>();
        verify(&version).map_err(|e| format!("after {name} of {passes:?}: {}\n{version}\nfrom\n{original}", e[0]))?;
    }
    for _ in 0..3 {
        let machine = generate::machine(&mut rng);
        let state = generate::state(&mut rng);
        match check(&mut program, &version, &state, &machine, LIMITS) {
            Ok(Checked::Compared { evaluations, .. }) => seen.evaluations += evaluations,
            Ok(Checked::ContextFails) => {}
            Err(mismatch) => return Err(format!("after {passes:?}: {mismatch}\nfrom\n{original}")),
        }
    }
    Ok(())
}

#[test]
fn whole_programs_stay_equivalent_and_transparent() {
    let range = seeds(0..400);
    let count = range.end.saturating_sub(range.start);
    let mut seen = Seen::default();
    for seed in range {
        let program = generate::program(&mut Rng::new(seed));
        if check_program(&program, seed, &mut seen).is_err() {
            let fails = |p: &Program| check_program(p, seed, &mut Seen::default()).err();
            let small = shrink(&program, |p| fails(p).is_some());
            panic!("IR_SEEDS={seed}..{}\n{small:?}\n{}", seed + 1, fails(&small).expect("it fails"));
        }
    }
    let Seen { evaluations, branching, changes } = seen;
    assert!(
        evaluations >= 5 * count && branching >= count / 3 && changes as u64 >= count,
        "{seen:?} of {count} programs"
    );
}
