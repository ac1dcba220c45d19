//! What is said to be known at a version's exits, and needed at its entry, holds of random traces after
//! random passes: whenever the evaluator leaves one, the facts are compared with the guest's registers.
//!
//! `IR_SEEDS=from..to` runs other seeds, more of them or one.

use dynasour_ir::eval::check::context_holds;
use dynasour_ir::eval::{Leave, ModelMachine, NoHooks, Reason, State, run};
use dynasour_ir::opt::contexts::{Contexts, contexts};
use dynasour_ir::random::cases::{case, optimised, passes};
use dynasour_ir::random::{Rng, generate};
use dynasour_ir::{
    Anchor, BlockId, Context, Fact, Gpr, Inst, Loc, Op, Operand, Origins, Ty, Value, Version,
};

/// What the test has seen.
#[derive(Default, Debug)]
struct Seen {
    /// Facts that were compared at exits by which a failing guard left.
    facts: u32,
    /// Of these, those that are not about constants.
    others: u32,
    /// Runs that left at the entry, as the needs say.
    refused: u32,
    /// Runs with needs that hold, which the guards at the entry let pass.
    passed: u32,
}

fn holds(context: &Context, state: &State) -> bool {
    let mut fitting = state.clone();
    fitting.fit(context);
    fitting == *state
}

/// Where `version` leaves, and the state there; none if the evaluation takes too long.
fn leave(version: &Version, entry: &(State, ModelMachine)) -> Option<(Leave, State)> {
    let (mut state, mut machine) = entry.clone();
    let leave = run(version, &mut state, &mut machine, &mut NoHooks, &mut 3_000).ok()?;
    Some((leave, state))
}

fn compare(version: &Version, known: &Contexts, entry: &(State, ModelMachine), seen: &mut Seen) {
    let fits = holds(&known.entry, &entry.0);
    let Some((Leave::Anchor { anchor, reason, point, pc }, state)) = leave(version, entry) else {
        assert!(fits, "it goes on, although {} does not hold\n{version}", known.entry);
        return;
    };
    if matches!(reason, Reason::Fault(_)) {
        assert!(fits || point.block == BlockId(0), "{} is not needed\n{version}", known.entry);
        return;
    }
    let facts = &known.exits[anchor.index()];
    assert!(
        holds(facts, &state),
        "{facts} at {anchor} ({reason:?}), but\n{state}\nfrom {}\n{version}",
        entry.0
    );
    let is_guard = reason == Reason::Assume;
    if is_guard {
        seen.facts += facts.facts.len() as u32;
        seen.others +=
            facts.facts.iter().filter(|f| !matches!(f, Fact::RegEquals(..))).count() as u32;
    }
    let block = &version.blocks[0];
    let is_entry = point.block == BlockId(0)
        && is_guard
        && pc == version.region
        && block.insts[..point.inst].iter().all(|inst| {
            inst.op.is_pure()
                || matches!(inst.op, Op::Load | Op::Assume)
                    && inst.anchor.is_some_and(|a| {
                        version.anchors[a.index()].target == Operand::Const(version.region)
                    })
        });
    if !fits {
        assert!(is_entry, "{} is not needed: left at {point:?}\n{version}", known.entry);
        seen.refused += 1;
    } else if known.is_sufficient {
        assert!(!is_entry, "{} is not sufficient\n{version}", known.entry);
        seen.passed += u32::from(!known.entry.facts.is_empty());
    }
}

/// Lets the version check a register at its entry, as traces check the registers that they take for
/// constant.
fn add_check(version: &mut Version, state: &State, rng: &mut Rng) {
    let entry = version.entry_locs.iter().zip(&version.blocks[0].params);
    let registers: Vec<(Gpr, Value)> = entry
        .filter_map(|(loc, v)| if let Loc::Gpr(gpr) = loc { Some((*gpr, *v)) } else { None })
        .collect();
    if registers.is_empty() {
        return;
    }
    let (gpr, v) = rng.pick(&registers);
    let value = Operand::Const(state.gpr[gpr.number()]);
    let anchor = version.anchor(Anchor::new(Operand::Const(version.region), Vec::new()));
    let op = rng.pick(&[Op::Eq, Op::LeU]);
    let holds = version.value(Ty::I1);
    let check = Inst::new(op, Ty::I64, Some(holds), &[v.into(), value]);
    let assume = Inst::assume(holds.into(), Some(anchor), Origins::default());
    version.blocks[0].insts.splice(0..0, [check, assume]);
}

#[test]
fn facts_hold_where_they_are_said_to() {
    let given = std::env::var("IR_SEEDS").ok();
    let range = given.as_deref().and_then(|s| s.split_once(".."));
    let range = range.and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?)).unwrap_or(0..3_000);
    let is_default = given.is_none();
    let mut seen = Seen::default();
    for seed in range {
        let mut program = generate::program(&mut Rng::new(seed));
        for head in generate::heads(&program) {
            let Some(case) = case(&mut program, head, seed) else { continue };
            let mut rng = Rng::new(seed ^ head);
            let Ok(mut version) = optimised(&case, &passes(&mut rng)) else { continue };
            if rng.one_in(2) {
                add_check(&mut version, &case.states[0].0, &mut rng);
            }
            let known = contexts(&version);
            for (state, machine) in &case.states {
                for changed in 0..6 {
                    let mut entry = (state.clone(), machine.clone());
                    if changed > 0 {
                        let gpr = rng.below(16);
                        if gpr != Gpr::RSP.number() {
                            entry.0.gpr[gpr] = rng.interesting();
                        }
                    }
                    if context_holds(&version, &entry.0, &mut entry.1) {
                        compare(&version, &known, &entry, &mut seen);
                    }
                }
            }
        }
    }
    let enough =
        seen.facts > 10_000 && seen.others > 1_000 && seen.refused > 1_000 && seen.passed > 1_000;
    assert!(!is_default || enough, "{seen:?}");
}
