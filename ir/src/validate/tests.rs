//! Validation agrees with right passes, and finds wrong ones: each side condition of the passes is
//! switched off in turn.

use super::*;
use crate::eval::check::{Limits as CheckLimits, check};
use crate::eval::{Machine, ModelMachine};
use crate::opt::pass;
use crate::random::cases::{Case as RandomCase, case, passes};
use crate::random::generate;
use crate::random::program::Program;
use crate::side_conditions::SideCondition;
use crate::side_conditions::tests::without;
use crate::verify::verify;
use crate::version::Split;
use std::cell::RefCell;

/// Calls `f` with the case's trace and an optimised one.
fn with_subject<R>(
    program: &mut Program,
    case: &RandomCase,
    optimised: &Version,
    f: impl FnOnce(Subject<'_>) -> R,
) -> R {
    let (state, machine) = &case.states[0];
    let machine: RefCell<ModelMachine> = RefCell::new(machine.clone());
    let read = |address: u64, size: u32| machine.borrow_mut().load(address, size).ok();
    f(Subject {
        code: program,
        built: &case.trace,
        optimised,
        entry: Registers { gpr: state.gpr, rflags: state.flags, segments: [0; 2] },
        results: &NativeResults::default(),
        read: &read,
        constants: &[],
        length: LENGTH,
        start: &Start::default(),
    })
}

/// Guest instructions of the longest path that a random trace is made of.
const LENGTH: u64 = 200;

/// Validates `optimised` against the case's trace.
pub(super) fn agrees(
    program: &mut Program,
    case: &RandomCase,
    optimised: &Version,
    limits: Limits,
) -> Result<Report, Box<Disagreement>> {
    with_subject(program, case, optimised, |subject| validate(subject, limits))
}

/// The cases of a program, and what passes make of their traces.
pub(super) fn each(seed: u64, mut f: impl FnMut(&mut Program, &RandomCase, u64)) {
    let mut program = generate::program(&mut Rng::new(seed));
    for head in generate::heads(&program) {
        if let Some(case) = case(&mut program, head, seed) {
            f(&mut program, &case, head);
        }
    }
}

#[test]
fn right_passes_agree() {
    let (mut total, mut whole, mut split, mut traces) = (Report::default(), 0, 0, 0);
    for seed in 0..150 {
        each(seed, |program, case, head| {
            let mut optimised = case.trace.clone();
            let mut names = passes(&mut Rng::new(!seed ^ head));
            if seed % 2 == 0 {
                names.insert(0, "split");
            }
            optimise_with(&mut optimised, &names, &OptOptions::default());
            let report = agrees(program, case, &optimised, Limits::default());
            let report = report.unwrap_or_else(|wrong| {
                panic!("seed {seed}, {names:?}: {wrong}\n{}{}{optimised}", wrong.setup, case.trace)
            });
            total.cases += report.cases;
            total.states += report.states;
            total.guards += report.guards;
            total.outcomes = std::array::from_fn(|i| total.outcomes[i] + report.outcomes[i]);
            whole += u64::from(report.whole);
            split += u64::from(optimised.natives.iter().any(|n| n.split != Split::No));
            traces += 1;
        });
    }
    assert!(traces > 300 && 10 * whole > 8 * traces, "{whole} of {traces}");
    assert!(split >= 10, "{split} of {traces}");
    assert!(total.cases > 20 * traces && total.states > 200 * traces, "{total:?}");
    let [held, failed] = total.outcomes;
    assert!(10 * held > 9 * total.guards && 4 * failed > total.guards, "{total:?}");
}

/// What validation says of a trace whose passes lack a side condition; `None` if the condition does not
/// matter, or if the verifier notices.
fn without_condition(
    condition: SideCondition,
    program: &mut Program,
    case: &RandomCase,
    names: &[&'static str],
) -> Option<(Version, Result<Report, Box<Disagreement>>)> {
    let mut optimised = case.trace.clone();
    let ((), hits) = without(condition, || {
        for pass in names.iter().filter_map(|name| pass(name)) {
            pass.run(&mut optimised, &OptOptions::default());
        }
    });
    if hits == 0 || verify(&optimised).is_err() {
        return None;
    }
    let result = agrees(program, case, &optimised, Limits::default());
    Some((optimised, result))
}

/// Calls `f` with the first trace that is wrong without the condition; false if none is found.
fn first_wrong(
    condition: SideCondition,
    mut f: impl FnMut(&mut Program, &RandomCase, &[&'static str], (&Version, &Disagreement)),
) -> bool {
    let mut found = false;
    for seed in 0..PROGRAMS {
        each(seed, |program, case, head| {
            let names = passes(&mut Rng::new(!seed ^ head));
            if !found
                && let Some((version, Err(wrong))) =
                    without_condition(condition, program, case, &names)
            {
                found = true;
                f(program, case, &names, (&version, &wrong));
            }
        });
        if found {
            break;
        }
    }
    found
}

/// Most random programs tried (measured: each is found in fewer).
const PROGRAMS: u64 = 12_000;

/// The side conditions whose loss shows in random traces. The others are noticed by the verifier, or
/// matter in programs of another form (`opt::mutations`).
const SHOWS: [SideCondition; 17] = {
    use SideCondition::*;
    [
        SimplifyFirstUse,
        DceEffects,
        ParamsInvariant,
        ParamsSplit,
        ForwardPrivateLoad,
        ForwardKill,
        ForwardBarrier,
        SinkWritten,
        ConstantsPosition,
        FactsJoin,
        RedundantKnown,
        MergeSameValue,
        DelayAnchor,
        ConjoinAnchor,
        FramesWritten,
        SlotsAlone,
        AliasDistance,
    ]
};

#[test]
fn wrong_passes_are_found() {
    let missed: Vec<_> = SHOWS.iter().filter(|c| !first_wrong(**c, |_, _, _, _| {})).collect();
    assert!(missed.is_empty(), "{missed:?}");
}

/// The text of a disagreement shows it again, and the pass that is wrong is named.
#[test]
fn a_disagreement_can_be_replayed() {
    for (condition, pass) in
        [(SideCondition::ForwardKill, "forward"), (SideCondition::RedundantKnown, "redundant")]
    {
        let found = first_wrong(condition, |program, case, names, (version, wrong)| {
            let text = wrong.setup.to_string();
            let file = crate::text::file(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            let (state, machine) = file.setups[0].build();
            let limits = CheckLimits { steps: 10_000, forced: 10_000 };
            let again = check(program, version, &state, &machine, limits);
            assert!(again.is_err(), "{wrong}\n{text}{version}");
            let (blamed, _) = without(condition, || {
                with_subject(program, case, version, |subject| {
                    blame(subject, wrong, names, &OptOptions::default())
                })
            });
            let blamed = blamed.expect("the passes show it");
            assert!(blamed.contains(&pass) && blamed.len() <= names.len(), "{blamed:?}");
        });
        assert!(found, "{condition:?}");
    }
}

/// A version that is wrong as it was built is told from one that a pass has broken.
#[test]
fn wrong_builds_are_told() {
    let mut told = 0;
    for seed in 0..20 {
        each(seed, |program, case, _| {
            let mut broken = case.trace.clone();
            let stores = broken.blocks.iter_mut().flat_map(|b| &mut b.insts);
            let Some(store) = stores.filter(|i| i.op == Op::Store).last() else { return };
            store.mem.as_mut().expect("an address").disp ^= 0x40;
            let broken = RandomCase { trace: broken, states: case.states.clone(), ..*case };
            if let Err(wrong) = agrees(program, &broken, &broken.trace, Limits::default()) {
                assert!(wrong.built, "{wrong}");
                told += 1;
            }
        });
    }
    assert!(told > 20, "{told}");
}
