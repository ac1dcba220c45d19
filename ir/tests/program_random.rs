//! Whole random programs, with several versions of every hot region, run to their end. Whichever
//! versions dispatch enters and whichever anchor is taken, the events and the final state are those
//! of `base` (sourir 5.4).
//!
//! Each head gets a trace, and a copy of it with more assumptions, optimised by a random sequence
//! of passes, whose anchors lead to the trace. `IR_SEEDS=from..to` runs other seeds.

use dynasour_ir::eval::check::Code;
use dynasour_ir::eval::program::{Program as Whole, Route, check_program};
use dynasour_ir::opt::OptOptions;
use dynasour_ir::opt::pass;
use dynasour_ir::random::cases::{case, passes};
use dynasour_ir::random::program::Program;
use dynasour_ir::random::{Rng, generate, shrink};
use dynasour_ir::region::{Region, verify_region};
use dynasour_ir::{Fact, Gpr};
use std::ops::Range;

fn seeds(default: Range<u64>) -> Range<u64> {
    let given = std::env::var("IR_SEEDS").ok();
    let parsed =
        given.as_deref().and_then(|s| s.split_once("..")).map(|(a, b)| (a.parse(), b.parse()));
    match parsed {
        Some((Ok(from), Ok(to))) => from..to,
        _ => default,
    }
}

/// The program's regions: `base` everywhere, and two more versions at each head.
fn regions(program: &mut Program, seed: u64) -> Vec<Region> {
    let heads = generate::heads(program);
    let mut out = Vec::new();
    for i in 0..program.insts.len() {
        let pc = Program::pc(i);
        let mut region = Region::new(pc);
        if heads.contains(&pc)
            && let Some(case) = case(program, pc, seed)
        {
            let mut rng = Rng::new(seed ^ pc ^ 0xc0de);
            region.insert(case.trace).expect("the first");
            let mut copy = region.copy("t1", "t2").expect("t1 is there");
            if rng.one_in(2) {
                // Sorted as in a context: registers come before memory.
                let value = case.states[0].0.gpr[Gpr::RBX.number()];
                copy.context.facts.insert(0, Fact::RegEquals(Gpr::RBX, value));
            }
            for name in passes(&mut rng) {
                let pass = pass(name).expect("a pass");
                pass.run(&mut copy, &OptOptions::default());
            }
            region.insert(copy).expect("the second");
        }
        region
            .insert(program.block(pc).expect("a block at every instruction").clone())
            .expect("base is new");
        out.push(region);
    }
    out
}

fn holds(program: &Program, seed: u64) -> Result<(u64, u64), String> {
    let regions = regions(&mut program.clone(), seed);
    for region in &regions {
        verify_region(region).map_err(|e| format!("{}\n{region}", e[0]))?;
    }
    let whole = Whole::new(&regions);
    let mut rng = Rng::new(seed);
    let (state, machine) = (generate::state(&mut rng), generate::machine(&mut rng));
    let mut counts = (0, 0);
    for follow in [false, true] {
        let route = Route { follow, ..Route::default() };
        let checked =
            check_program(&whole, Program::pc(0), &route, (&state, &machine), (20_000, 12));
        let checked = checked.map_err(|e| {
            let hot = regions.iter().filter(|r| r.versions.len() > 1).map(|r| r.to_string());
            format!("{e}\nfollowing labels: {follow}\nfrom {state}\n{}", hot.collect::<String>())
        })?;
        counts = (counts.0 + checked.runs, counts.1 + checked.opportunities);
    }
    Ok(counts)
}

#[test]
fn programs_of_many_versions_do_what_base_does() {
    let range = seeds(0..if std::env::var_os("CI").is_some() { 1_500 } else { 300 });
    let count = range.end.saturating_sub(range.start);
    let mut total = (0, 0);
    for seed in range {
        let program = generate::program(&mut Rng::new(seed));
        match holds(&program, seed) {
            Ok(counts) => total = (total.0 + counts.0, total.1 + counts.1),
            Err(_) => {
                let small = shrink(&program, |p| holds(p, seed).is_err());
                panic!(
                    "IR_SEEDS={seed}..{}\n{small:?}\n{}",
                    seed + 1,
                    holds(&small, seed).expect_err("it fails")
                );
            }
        }
    }
    assert!(total.0 > 8 * count && total.1 > 20 * count, "too little was run: {total:?}");
}
