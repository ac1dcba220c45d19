//! Random guest programs through the optimiser: every pass alone, random sequences, and the default pipeline
//! must keep version equivalence and assumption transparency, checked against `base` by the evaluator.

mod support;

use dynasour_ir::Version;
use dynasour_ir::eval::check::{Limits, check};
use dynasour_ir::opt::{OptOptions, PASSES, PIPELINE, optimise, optimise_with};
use support::{Program, Random, entry, program, trace};

/// How many programs each test runs; `OPT_PROGRAMS` asks for a longer soak.
fn programs(default: u64) -> u64 {
    std::env::var("OPT_PROGRAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

fn first_seed() -> u64 {
    std::env::var("OPT_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

fn agrees(program: &mut Program, version: &Version, random: &mut Random, what: &str) {
    for _ in 0..3 {
        let (state, machine) = entry(random, program);
        let limits = Limits { steps: 100_000, forced: 24 };
        if let Err(mismatch) = check(&mut program.blocks, version, &state, &machine, limits) {
            panic!("{what}: {mismatch}");
        }
    }
}

fn run(seeds: std::ops::Range<u64>, sequence: impl Fn(&mut Random) -> Vec<&'static str>) {
    for seed in seeds {
        let mut random = Random::new(seed);
        let (blocks, loops) = (1 + random.below(4), random.chance(70));
        let mut program = program(&mut random, blocks, 7, loops);
        let original = trace(&program, random.chance(80));
        agrees(&mut program, &original, &mut random, &format!("seed {seed}, not optimised"));
        let names = sequence(&mut random);
        let mut version = original.clone();
        if names == PIPELINE {
            // The pipeline itself leaves out what has nothing to do.
            optimise(&mut version, &OptOptions::default());
        } else {
            optimise_with(&mut version, &names, &OptOptions::default());
        }
        let what = format!("seed {seed}, passes {names:?}, from\n{original}");
        agrees(&mut program, &version, &mut random, &what);
    }
}

#[test]
fn default_pipeline() {
    let first = first_seed();
    run(first..first + programs(3000), |_| PIPELINE.to_vec());
}

#[test]
fn each_pass_alone() {
    for (i, pass) in PASSES.iter().enumerate() {
        let first = first_seed() + 1_000_000 * (i as u64 + 1);
        run(first..first + programs(300), |_| vec![pass.name]);
    }
}

#[test]
fn random_sequences() {
    let first = first_seed() + 500_000_000;
    run(first..first + programs(2000), |random| {
        let count = 1 + random.below(8);
        (0..count).map(|_| PASSES[random.below(PASSES.len() as u64) as usize].name).collect()
    });
}

/// Every pass of the pipeline must have something to do in these programs, or they test nothing.
#[test]
fn every_pass_finds_work() {
    let mut changes: std::collections::BTreeMap<&str, usize> = PIPELINE.iter().map(|name| (*name, 0)).collect();
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let program = program(&mut random, 3, 7, true);
        let mut version = trace(&program, true);
        let stats = optimise(&mut version, &OptOptions::default());
        for pass in stats.passes {
            *changes.get_mut(pass.name).unwrap() += pass.changes;
        }
    }
    println!("{changes:?}");
    // Hardly any of these programs compares one value twice: `merge` has its work in those with random assumptions.
    changes.remove("merge");
    assert!(changes.values().all(|n| *n >= 20), "{changes:?}");
}
