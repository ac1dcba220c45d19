//! Random sequences of passes over versions that hold a whole random program with its branches and
//! loops: they must stay equivalent to `base` and transparent. Failures shrink to a small program.
//!
//! `IR_SEEDS=from..to` runs other seeds, more of them or one.

use dynasour_ir::eval::check::{Limits, check, run_base};
use dynasour_ir::eval::{Hooks, Leave, Machine, State};
use dynasour_ir::opt::{OptOptions, continuation, inline, optimise_with};
use dynasour_ir::random::cases::{agrees, passes};
use dynasour_ir::random::program::Program;
use dynasour_ir::random::trace::{Options, build_all};
use dynasour_ir::random::{Rng, generate, shrink, whole};
use dynasour_ir::verify::verify;
use dynasour_ir::{AnchorId, BlockId, Term};
use std::collections::BTreeMap;
use std::ops::Range;

const LIMITS: Limits = Limits { steps: 2_000, forced: 12 };

fn seeds(default: Range<u64>) -> Range<u64> {
    let given = std::env::var("IR_SEEDS").ok();
    let parsed =
        given.as_deref().and_then(|s| s.split_once("..")).map(|(a, b)| (a.parse(), b.parse()));
    match parsed {
        Some((Ok(from), Ok(to))) => from..to,
        _ => default,
    }
}

/// Counts of evaluations compared, of versions with branches, and of changes by each pass.
#[derive(Default, Debug)]
struct Seen {
    evaluations: u64,
    branching: u64,
    changes: BTreeMap<&'static str, usize>,
}

fn check_program(program: &Program, seed: u64, seen: &mut Seen) -> Result<(), String> {
    let mut program = program.clone();
    let Some(case) = whole::case(&mut program, seed) else { return Ok(()) };
    let original = &case.trace;
    verify(original).map_err(|e| format!("built: {}\n{original}", e[0]))?;
    seen.branching +=
        u64::from(original.blocks.iter().any(|b| matches!(b.term, Term::Branch { .. })));
    let mut version = original.clone();
    let passes = passes(&mut Rng::new(!seed));
    for name in &passes {
        let stats = optimise_with(&mut version, &[name], &OptOptions::default());
        stats.passes.iter().for_each(|p| *seen.changes.entry(p.name).or_default() += p.changes);
        verify(&version).map_err(|e| {
            format!("after {name} of {passes:?}: {}\n{version}\nfrom\n{original}", e[0])
        })?;
    }
    let wrong = |wrong| format!("after {passes:?}: {wrong}\nfrom\n{original}");
    seen.evaluations += agrees(&mut program, &case, &version).map_err(wrong)?;
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
            panic!(
                "IR_SEEDS={seed}..{}\n{small:?}\n{}",
                seed + 1,
                fails(&small).expect("it fails")
            );
        }
    }
    assert!(
        seen.evaluations >= 5 * count && seen.branching >= count / 3,
        "{seen:?} of {count} programs"
    );
    // Passes for recorded traces, which have few branches, do little here; `merge` and `redundant`
    // have tests of their own.
    let general =
        ["simplify", "dce", "constants", "unreachable", "params", "hoist", "licm", "delay"];
    if count >= 400 {
        assert!(
            general.iter().all(|name| seen.changes.get(name).is_some_and(|n| *n > 0)),
            "{seen:?}"
        );
    }
}

/// Stops at a pc.
struct StopAt(u64);

impl<M: Machine> Hooks<M> for StopAt {
    fn at(&mut self, pc: u64, _state: &State, _machine: &M) -> bool {
        pc == self.0
    }
}

/// Makes continuations at each anchor of whole programs; returns the numbers made, and compared
/// with `base`.
fn check_continuations(program: &Program, seed: u64, seen: &mut (u64, u64)) -> Result<(), String> {
    let mut program = program.clone();
    let mut rng = Rng::new(seed ^ 0xc0de);
    let options = Options { peel: false, older_anchor: 0 };
    let Some(original) = build_all(&mut program, Program::pc(0), "t1", 8, options, &mut rng) else {
        return Ok(());
    };
    let (machine, state) = (generate::machine(&mut rng), generate::state(&mut rng));
    for anchor in (0..original.anchors.len() as u32).map(AnchorId) {
        let Ok(mut version) = continuation(&original, anchor, "c1") else { continue };
        verify(&version).map_err(|e| format!("{anchor}: {}\n{version}\nfrom\n{original}", e[0]))?;
        seen.0 += 1;
        for pass in ["constants", "unreachable", "simplify", "dce"] {
            optimise_with(&mut version, &[pass], &OptOptions::default());
            verify(&version)
                .map_err(|e| format!("{anchor}, {pass}: {}\n{version}\nfrom\n{original}", e[0]))?;
        }
        let (mut state, mut machine) = (state.clone(), machine.clone());
        let mut hooks = StopAt(version.region);
        let stopped = run_base(
            &mut program,
            Program::pc(0),
            &mut state,
            &mut machine,
            &mut hooks,
            &mut 2_000,
        );
        if stopped == Ok(Leave::Stopped { pc: version.region }) {
            check(&mut program, &version, &state, &machine, LIMITS)
                .map_err(|m| format!("{anchor}: {m}\nfrom\n{original}"))?;
            seen.1 += 1;
        }
    }
    Ok(())
}

#[test]
fn continuations_are_equivalent_and_transparent() {
    let mut seen = (0, 0);
    let range = seeds(0..300);
    let count = range.end.saturating_sub(range.start);
    for seed in range {
        let program = generate::program(&mut Rng::new(seed));
        if check_continuations(&program, seed, &mut seen).is_err() {
            let fails = |p: &Program| check_continuations(p, seed, &mut (0, 0)).err();
            let small = shrink(&program, |p| fails(p).is_some());
            panic!(
                "IR_SEEDS={seed}..{}\n{small:?}\n{}",
                seed + 1,
                fails(&small).expect("it fails")
            );
        }
    }
    assert!(
        seen.0 > 5 * count && seen.1 > 2 * count,
        "{seen:?} continuations and comparisons of {count} programs"
    );
}

/// Builds versions of single blocks and inlines the targets of their exits, several levels deep.
fn check_inlining(program: &Program, seed: u64, seen: &mut (u64, u64)) -> Result<(), String> {
    let mut program = program.clone();
    let mut rng = Rng::new(seed ^ 0x1111);
    let options = Options { peel: false, older_anchor: rng.below(3) };
    let Some(mut version) =
        build_all(&mut program, Program::pc(0), "t1", 1 + rng.below(2), options, &mut rng)
    else {
        return Ok(());
    };
    for _ in 0..4 {
        let exits = (0..version.blocks.len() as u32).map(BlockId).filter_map(|b| {
            match version.blocks[b.index()].term {
                Term::Exit(a) => Some((b, version.anchors[a.index()].target.as_const()?)),
                _ => None,
            }
        });
        let exits: Vec<(BlockId, u64)> = exits.collect();
        if exits.is_empty() {
            break;
        }
        let (block, pc) = rng.pick(&exits);
        let Some(callee) = build_all(&mut program, pc, "t2", 1 + rng.below(3), options, &mut rng)
        else {
            continue;
        };
        let before = version.clone();
        inline(&mut version, block, &callee).map_err(|e| format!("{e}\n{before}\n{callee}"))?;
        verify(&version)
            .map_err(|e| format!("{}\n{version}\nfrom\n{before}\nand\n{callee}", e[0]))?;
        seen.0 += 1;
        if rng.one_in(2) {
            for pass in ["simplify", "forward", "constants", "unreachable", "dce"] {
                optimise_with(&mut version, &[pass], &OptOptions::default());
            }
        }
    }
    for _ in 0..3 {
        let (machine, state) = (generate::machine(&mut rng), generate::state(&mut rng));
        check(&mut program, &version, &state, &machine, LIMITS).map_err(|m| m.to_string())?;
        seen.1 += 1;
    }
    Ok(())
}

#[test]
fn inlined_versions_are_equivalent_and_transparent() {
    let mut seen = (0, 0);
    let range = seeds(0..400);
    let count = range.end.saturating_sub(range.start);
    for seed in range {
        let program = generate::program(&mut Rng::new(seed));
        if check_inlining(&program, seed, &mut seen).is_err() {
            let fails = |p: &Program| check_inlining(p, seed, &mut (0, 0)).err();
            let small = shrink(&program, |p| fails(p).is_some());
            panic!(
                "IR_SEEDS={seed}..{}\n{small:?}\n{}",
                seed + 1,
                fails(&small).expect("it fails")
            );
        }
    }
    assert!(seen.0 > count && seen.1 > count, "{seen:?} inlined and compared, of {count} programs");
}
