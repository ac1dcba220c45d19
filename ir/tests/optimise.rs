//! Random guest programs through the optimiser: each pass alone, random sequences, and the default
//! pipeline keep version equivalence and assumption transparency, checked against `base` by the
//! evaluator.

mod support;

use dynasour_ir::eval::ModelMachine;
use dynasour_ir::eval::check::{Limits, check, same_result};
use dynasour_ir::opt::{OptOptions, PASSES, PIPELINE, optimise, optimise_with};
use dynasour_ir::random::{Rng, generate};
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{Version, text};
use support::{Program, Random, entry, program, tree};

/// The number of programs of each test; `OPT_PROGRAMS` sets another.
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
        let private = random.chance(80);
        let original = tree(&program, private, |_| random.chance(70));
        agrees(&mut program, &original, &mut random, &format!("seed {seed}, not optimised"));
        let names = sequence(&mut random);
        let mut version = original.clone();
        if names == PIPELINE {
            // The pipeline itself leaves out passes that have nothing to do.
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

/// Every pass of the pipeline must change something in these programs; otherwise they do not test
/// it.
#[test]
fn every_pass_finds_work() {
    let mut changes: std::collections::BTreeMap<&str, usize> =
        PIPELINE.iter().map(|name| (*name, 0)).collect();
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let program = program(&mut random, 3, 7, true);
        let mut version = tree(&program, true, |_| false);
        let stats = optimise(&mut version, &OptOptions::default());
        for pass in stats.passes {
            *changes.get_mut(pass.name).unwrap() += pass.changes;
        }
    }
    println!("{changes:?}");
    // Few of these programs compare one value twice, so `merge` is tested in those with random
    // assumptions. None is limited by a chain, so `chain` is tested by
    // `chains_around_random_loops`; none has memory that can only be read, so `readonly` is tested
    // by `random_loads_of_tables`; and none has natives, so `split` is tested by the programs of
    // `random`.
    changes.remove("split");
    changes.remove("merge");
    changes.remove("chain");
    changes.remove("readonly");
    assert!(changes.values().all(|n| *n >= 20), "{changes:?}");
}

/// A loop of two values, a counter and random operations, mostly of one kind and width.
fn chains(random: &mut Random) -> Version {
    let (kind, ty) =
        (random.pick(&["add", "xor", "or"]), random.pick(&["i64", "i64", "i32", "i8"]));
    let narrow = |name: u64, of: u64| match ty {
        "i64" => format!("      v{name} = add.i64 v{of}, 0\n"),
        _ => format!("      v{name} = trunc.{ty} v{of}\n"),
    };
    let mut body = String::new();
    // Values 5 and 6 are carried around the loop, 7 counts, 8 and 9 do not change.
    let mut values = vec![5, 6, 8, 9];
    let count = 2 + random.below(6);
    for v in 20..20 + count {
        let op = if random.chance(70) { kind } else { random.pick(&["mul", "and", "sub", "xor"]) };
        let last = *values.last().unwrap();
        let (a, b) =
            (if random.chance(50) { last } else { random.pick(&values) }, random.pick(&values));
        let b = if random.chance(20) { random.below(100).to_string() } else { format!("v{b}") };
        let (a, b) = if random.chance(30) && b.starts_with('v') {
            (b, format!("v{a}"))
        } else {
            (format!("v{a}"), b)
        };
        body += &format!("      v{v} = {op}.{ty} {a}, {b}\n");
        values.push(v);
    }
    let (last, other) = (19 + count, random.pick(&values));
    let wide = |name: u64, of: u64| match ty {
        "i64" => format!("      v{name} = add.i64 v{of}, 0\n"),
        _ => format!("      v{name} = zext{}.i64 v{of}\n", &ty[1..]),
    };
    let source = format!(
        "region 0x1000 {{\n  version t1 {{\n    anchor a0 = base.0x1000 [rax = v40, rcx = v41]\n\
         \x20   b0(v0: i64 = rax, v1: i64 = rcx, v2: i64 = rdx, v3: i64 = rbx):\n{}{}{}{}      \
         jump b1(v30, v31, 0)\n\
         \x20   b1(v5: {ty}, v6: {ty}, v7: i64):\n{}{}      poll else a0\n{body}      v45 = \
         add.i64 v7, 1\n\
         \x20     v46 = lt.u.i64 v7, 6\n      assume v46 else a0\n      jump b1(v{last}, \
         v{other}, v45)\n  }}\n}}\n",
        narrow(30, 0),
        narrow(31, 1),
        narrow(8, 2),
        narrow(9, 3),
        wide(40, 5),
        wide(41, 6),
    );
    text::version(&source).unwrap_or_else(|e| panic!("{e}:\n{source}"))
}

#[test]
fn chains_around_random_loops() {
    let options = OptOptions { chain_width: usize::MAX, ..OptOptions::default() };
    let mut regrouped = 0;
    for seed in 0..programs(2000) {
        let original = chains(&mut Random::new(first_seed() + seed));
        assert_valid(&original);
        let mut version = original.clone();
        regrouped += optimise_with(&mut version, &["chain"], &options).passes[0].changes;
        assert_valid(&version);
        let mut rng = Rng::new(seed);
        for _ in 0..3 {
            let (state, machine) = (generate::state(&mut rng), ModelMachine::boundless(seed));
            if let Err(what) = same_result(&original, &version, &state, &machine, 500) {
                panic!("seed {seed}: {what}\n{original}{version}");
            }
        }
    }
    assert!(regrouped > 200, "{regrouped}");
}

/// A table that can only be read, and its size in bytes.
const TABLE: (u64, u64) = (0x5000, 64);

/// What the table holds: each byte is its offset times 37.
fn table(address: u64, size: u32) -> Option<u64> {
    let offset = address.checked_sub(TABLE.0)?;
    let bytes = (offset..offset + u64::from(size)).map(|at| (at as u8).wrapping_mul(37));
    (offset + u64::from(size) <= TABLE.1)
        .then(|| bytes.rev().fold(0, |word, byte| word << 8 | u64::from(byte)))
}

/// A loop that loads from and around the table, stores elsewhere, and guards what it has loaded.
fn lookups(random: &mut Random) -> Version {
    let mut body = String::new();
    let (mut sum, mut v) = (5, 20);
    for _ in 0..2 + random.below(6) {
        let bits = random.pick(&[8u32, 16, 32, 64]);
        let address = TABLE.0 - 8 + random.below(TABLE.1 + 8);
        let guess = table(address, bits / 8).filter(|_| random.chance(80)).unwrap_or(7);
        body += &format!("      v{v} = load.i{bits} [{address}] !a0\n");
        if random.chance(40) {
            body += &format!(
                "      v{} = eq.i{bits} v{v}, {guess}\n      assume v{} else a0\n",
                v + 1,
                v + 1
            );
        }
        let wide = if bits == 64 { "add.i64".into() } else { format!("zext{bits}.i64") };
        let zero = if bits == 64 { ", 0" } else { "" };
        body += &format!("      v{} = {wide} v{v}{zero}\n", v + 2);
        body += &format!("      v{} = add.i64 v{sum}, v{}\n", v + 3, v + 2);
        (sum, v) = (v + 3, v + 4);
    }
    let source = format!(
        "region 0x1000 {{\n  version t1 {{\n    anchor a0 = base.0x1000 [rax = v5, rcx = v7]\n\
         \x20   b0(v0: i64 = rax, v1: i64 = rcx):\n      jump b1(v0, 0)\n\
         \x20   b1(v5: i64, v7: i64):\n      poll else a0\n{body}      v8 = add.i64 v7, 1\n\
         \x20     v9 = lt.u.i64 v7, 4\n      assume v9 else a0\n      jump b1(v{sum}, v8)\n  }}\n}}\n"
    );
    text::version(&source).unwrap_or_else(|e| panic!("{e}:\n{source}"))
}

#[test]
fn random_loads_of_tables() {
    let options = OptOptions { constant_memory: Some(&table), ..OptOptions::default() };
    let mut replaced = 0;
    for seed in 0..programs(500) {
        let original = lookups(&mut Random::new(first_seed() + seed));
        assert_valid(&original);
        let mut version = original.clone();
        replaced += optimise_with(&mut version, &["readonly"], &options).passes[0].changes;
        assert_valid(&version);
        let mut machine = ModelMachine::boundless(seed);
        for address in TABLE.0..TABLE.0 + TABLE.1 {
            machine.write(address, &[table(address, 1).expect("in the table") as u8]);
        }
        let mut rng = Rng::new(seed);
        for _ in 0..3 {
            let state = generate::state(&mut rng);
            if let Err(what) = same_result(&original, &version, &state, &machine, 500) {
                panic!("seed {seed}: {what}\n{original}{version}");
            }
        }
    }
    assert!(replaced > 200, "{replaced}");
}
