//! Whole programs in the text form: dispatch, labels, events, divergence, forks at every anchor.

use dynasour_ir::eval::Leave;
use dynasour_ir::eval::program::{
    Choice, Diverged, Program, Route, check_program, difference, run_program,
};
use dynasour_ir::text::{File, file};
use dynasour_ir::verify::assert_valid;

/// Prints rdi, rdi - 1, … 1. Two traces: t1 as recorded, t2 a copy that assumes rsi == 7 and prints
/// 7s.
const COUNTDOWN: &str = include_str!("programs/countdown.ir");

fn load(text: &str) -> File {
    let file = file(text).unwrap_or_else(|e| panic!("{e}"));
    file.regions.iter().flat_map(|r| &r.versions).for_each(assert_valid);
    file
}

fn go(
    file: &File,
    route: &Route,
) -> dynasour_ir::eval::program::Outcome<dynasour_ir::eval::ModelMachine> {
    let (state, machine) = file.setups[0].build();
    run_program(&Program::new(&file.regions), file.regions[0].pc, route, state, machine, 10_000)
        .unwrap()
}

#[test]
fn versions_do_what_base_does() {
    let file = load(COUNTDOWN);
    let base = go(&file, &Route { choice: Choice::Base, ..Route::default() });
    assert_eq!(base.machine.printed, [3, 2, 1]);
    assert_eq!(base.end, Leave::Syscall { next: 0x112 });
    for choice in [Choice::Dispatch, Choice::Named("t1".into()), Choice::Named("t2".into())] {
        for follow in [false, true] {
            let route = Route { choice: choice.clone(), follow, force: None };
            let outcome = go(&file, &route);
            assert_eq!(difference(&base, &outcome), None, "{route:?}");
            assert!(outcome.opportunities >= 3);
            let (state, machine) = file.setups[0].build();
            let checked = check_program(
                &Program::new(&file.regions),
                0x100,
                &route,
                (&state, &machine),
                (10_000, 100),
            )
            .unwrap();
            assert_eq!(checked.runs, 1 + outcome.opportunities);
        }
    }
}

#[test]
fn labels_are_followed() {
    let file = load(COUNTDOWN);
    let route = |follow| Route { choice: Choice::Named("t2".into()), follow, force: Some(1) };
    let names = |follow| {
        go(&file, &route(follow)).visits.iter().map(|v| v.version.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(false), ["t2", "base", "t2", "base", "base"]);
    assert_eq!(names(true), ["t2", "t1", "base", "base"]);
}

#[test]
fn a_wrong_version_is_found() {
    let file = load(COUNTDOWN);
    let (state, machine) = file.setups[0].build();
    let wrong = |from: &str, to: &str| {
        assert!(COUNTDOWN.contains(from), "{from}");
        let file = load(&COUNTDOWN.replace(from, to));
        let route = Route { choice: Choice::Named("t1".into()), ..Route::default() };
        check_program(
            &Program::new(&file.regions),
            0x100,
            &route,
            (&state, &machine),
            (10_000, 100),
        )
    };
    // Equivalence: the events, and then the state.
    let Err(Diverged::Run { what, route }) = wrong("print v4", "print 5") else { panic!() };
    assert!(what.starts_with("printed: [3, 2, 1] and ") && route.force.is_none(), "{what}");
    // Transparency: only a run that takes the anchor is wrong.
    let Err(Diverged::Run { what, route }) =
        wrong("a0 = base.0x100 [rdi = v4", "a0 = base.0x100 [rdi = 1")
    else {
        panic!()
    };
    assert!(what.starts_with("printed: ") && route.force.is_some(), "{what} {route:?}");
}
