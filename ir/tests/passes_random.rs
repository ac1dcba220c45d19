//! Random sequences of passes over random traces. Traces of programs stay equivalent to `base` and
//! transparent; arbitrary versions still do what they did. A failure is shrunk to a small program
//! and printed in the text form.
//!
//! `IR_SEEDS=from..to` runs other seeds, more of them or one.

use dynasour_ir::Version;
use dynasour_ir::eval::ModelMachine;
use dynasour_ir::eval::check::same_result;
use dynasour_ir::opt::{OptOptions, PIPELINE, Shape, normalise, optimise, optimise_with};
use dynasour_ir::random::cases::{case, holds, passes};
use dynasour_ir::random::{Rng, generate, version as arbitrary};
use dynasour_ir::verify::assert_valid;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

fn seeds(default: Range<u64>) -> Range<u64> {
    let given = std::env::var("IR_SEEDS").ok();
    let parsed =
        given.as_deref().and_then(|s| s.split_once("..")).map(|(a, b)| (a.parse(), b.parse()));
    match parsed {
        Some((Ok(from), Ok(to))) => from..to,
        _ => default,
    }
}

/// In CI 50,000 programs, each trace of which goes through its own passes (issue 4, item 5).
#[test]
fn optimised_traces_are_equivalent_and_transparent() {
    let range = seeds(0..if std::env::var_os("CI").is_some() { 50_000 } else { 4_000 });
    let (next, evaluations) = (AtomicU64::new(range.start), AtomicU64::new(0));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= range.end {
                return;
            }
            match holds(&generate::program(&mut Rng::new(seed)), seed) {
                Ok(n) => evaluations.fetch_add(n, Ordering::Relaxed),
                Err(failure) => panic!("IR_SEEDS={seed}..{}\n{}", seed + 1, failure.shrunk()),
            };
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let (evaluations, count) = (evaluations.into_inner(), range.end.saturating_sub(range.start));
    assert!(evaluations >= 10 * count, "{evaluations} evaluations of {count} programs");
}

/// The passes of the pipeline do something to loops with several paths, too.
#[test]
fn loops_with_several_paths_are_among_the_traces() {
    let mut changes = BTreeMap::<&str, u64>::new();
    let mut trees = 0;
    for seed in 0..2_000 {
        let program = generate::program(&mut Rng::new(seed));
        for head in generate::heads(&program) {
            let Some(mut case) = case(&mut program.clone(), head, seed) else { continue };
            if normalise(&mut case.trace) != Some(Shape::Tree) {
                continue;
            }
            trees += 1;
            for stat in optimise(&mut case.trace, &OptOptions::default()).passes {
                *changes.entry(stat.name).or_default() += u64::from(stat.changes > 0);
            }
        }
    }
    assert!(trees > 200, "{trees}");
    let idle = ["peel", "chain", "readonly"];
    for name in PIPELINE.iter().filter(|name| !idle.contains(name)) {
        let changed = changes.get(name).copied().unwrap_or(0);
        assert!(changed >= 5, "{name}: {changes:?} of {trees}");
    }
}

#[test]
fn arbitrary_versions_do_what_they_did() {
    for seed in seeds(0..1_000) {
        let mut rng = Rng::new(seed);
        let original: Version = arbitrary::trace(&mut rng);
        assert_valid(&original);
        let mut version = original.clone();
        // A new guard, or a guard or load that has moved, may leave earlier or later than the
        // original, and anchors of arbitrary versions need not be transparent.
        let moving = ["hoist", "licm", "merge", "delay", "slots"];
        let passes: Vec<&str> =
            passes(&mut rng).into_iter().filter(|name| !moving.contains(name)).collect();
        optimise_with(
            &mut version,
            &passes,
            &OptOptions { alias_guards: false, ..OptOptions::default() },
        );
        assert_valid(&version);
        for round in 0..4 {
            let machine =
                if round < 3 { ModelMachine::boundless(seed) } else { generate::machine(&mut rng) };
            let mut state = generate::state(&mut rng);
            state.fit(&original.context);
            // A deferred store that faults is a fault of the original; nothing is required of the
            // passes then.
            if same_result(&original, &original, &state, &machine, 500).is_err() {
                continue;
            }
            if let Err(what) = same_result(&original, &version, &state, &machine, 500) {
                panic!(
                    "IR_SEEDS={seed}..{}: {passes:?}: {what}\nfrom {state}\n{original}{version}",
                    seed + 1
                );
            }
        }
    }
}
