//! Every placement on random traces: the result verifies, is equivalent to `base` and transparent;
//! and no two placements give the same result for all of them.

use dynasour_ir::eval::check::{Checked, check};
use dynasour_ir::opt::OptOptions;
use dynasour_ir::random::cases::{Case, case};
use dynasour_ir::random::{Rng, generate};
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{Op, Version};
use dynasour_tracer::Placement;
use dynasour_tracer::placement::{PLACEMENTS, placement};

fn optimised(case: &Case, placement: &dyn Placement) -> Version {
    let mut version = case.trace.clone();
    placement.optimise(&mut version, &OptOptions::default());
    assert_valid(&version);
    version
}

#[test]
fn placed_traces_are_equivalent_and_transparent() {
    let mut compared = 0;
    for seed in 0..400 {
        let mut program = generate::program(&mut Rng::new(seed));
        for head in generate::heads(&program) {
            let Some(case) = case(&mut program, head, seed) else { continue };
            for placement in PLACEMENTS {
                let version = optimised(&case, *placement);
                for (state, machine) in &case.states {
                    match check(&mut program, &version, state, machine, case.limits) {
                        Ok(Checked::Compared { .. }) => compared += 1,
                        Ok(Checked::ContextFails) => {}
                        Err(wrong) => {
                            panic!(
                                "seed {seed}, {}: {wrong}\n{}\nfrom\n{}",
                                placement.name(),
                                version,
                                case.trace
                            )
                        }
                    }
                }
            }
        }
    }
    assert!(compared > 5_000, "{compared}");
}

/// Two placements with the same result for every trace would be one.
#[test]
fn no_two_placements_are_the_same() {
    let mut cases = Vec::new();
    for seed in 0..150 {
        let mut program = generate::program(&mut Rng::new(seed));
        for head in generate::heads(&program) {
            cases.extend(case(&mut program, head, seed));
        }
    }
    for (i, one) in PLACEMENTS.iter().enumerate() {
        for other in &PLACEMENTS[i + 1..] {
            let built_alike = one.branch_anchor() == other.branch_anchor();
            let differs = cases.iter().any(|case| optimised(case, *one) != optimised(case, *other));
            assert!(differs || !built_alike, "{} and {}", one.name(), other.name());
        }
    }
}

/// The statements of the module's table about guards in loops.
#[test]
fn guards_stand_where_the_placement_says() {
    let in_loops = |version: &Version| -> usize {
        let loops = version.blocks.iter().skip(1);
        loops.flat_map(|block| &block.insts).filter(|inst| inst.op == Op::Assume).count()
    };
    let mut sums = std::collections::BTreeMap::new();
    for seed in 0..150 {
        let mut program = generate::program(&mut Rng::new(seed));
        for head in generate::heads(&program) {
            let Some(case) = case(&mut program, head, seed) else { continue };
            // A guard that moves down a loop with several paths becomes several guards.
            if case.trace.blocks.len() > 2 {
                continue;
            }
            for placement in PLACEMENTS {
                *sums.entry(placement.name()).or_insert(0) +=
                    in_loops(&optimised(&case, *placement));
            }
        }
    }
    assert_eq!(sums["eager"], sums["anchored"], "anchored moves guards down, not out: {sums:?}");
    assert!(sums["hoisted"] < sums["eager"], "{sums:?}");
    assert!(sums["merged"] < sums["anchored"], "{sums:?}");
    assert!(sums["default"] < sums["eager"], "{sums:?}");
    assert!(sums["combined"] < sums["default"], "{sums:?}");
}

#[test]
fn placements_are_found_by_name() {
    for known in PLACEMENTS {
        assert_eq!(placement(known.name()).map(|p| p.name()), Ok(known.name()));
    }
    let message = placement("eagre").map(|p| p.name()).unwrap_err();
    assert!(PLACEMENTS.iter().all(|known| message.contains(known.name())), "{message}");
}
