//! Programs in which nothing goes wrong, and programs that find each bug.

use std::time::Instant;

use super::bug::Bug;
use super::search::explore;
use super::state::{Op, Program, Rights, W, X};
use Op::{
    Fork, HostStore, Interpret, Map, Output, Patch, Protect, Refused, Remap, Run, Spawn, Store,
    Trace, Unmap,
};

const RWX: Rights = W | X;

fn program(threads: &[&[Op]], rights: Rights) -> Program {
    let threads: Vec<Vec<Op>> = threads.iter().map(|ops| ops.to_vec()).collect();
    let spawns = threads.iter().flatten().any(|op| *op == Spawn);
    Program { threads, spawns, rights: [Some(rights), Some(RWX)], bug: None }
}

fn violation(program: &Program) -> Option<&'static str> {
    explore(program).violation.map(|(what, _)| what)
}

/// The steps to a violation, for people.
fn story(program: &Program) -> String {
    let Some((what, steps)) = explore(program).violation else { return String::new() };
    let mut state = super::state::State::new(program);
    let mut story = String::new();
    for t in steps {
        let thread = &state.threads[t];
        let dropping =
            thread.dropping.map_or(String::new(), |drop| format!(", dropping {}", drop.stage));
        story += &format!("{t}: {:?} {}{dropping}\n", program.op(t, thread.at), thread.stage);
        if let super::steps::Transition::Next(next) = state.step(program, t) {
            state = *next;
        }
    }
    format!("{story}{what}\n{state:#?}")
}

/// All operations on page 0.
fn operations() -> Vec<Op> {
    let calls = [
        Protect(0, RWX),
        Protect(0, X),
        Protect(0, W),
        Refused(0),
        Unmap(0),
        Map(0, RWX),
        Map(0, W),
        Remap(0),
    ];
    let others =
        [Store(0), Interpret(0), Run(0), Trace(0), Output(0), HostStore(0), Patch(0), Fork];
    calls.into_iter().chain(others).collect()
}

/// Each operation against each other one that may meet it, with code there already and a call of it
/// afterwards.
#[test]
fn nothing_goes_wrong_between_two_threads() {
    let begin = Instant::now();
    let (mut states, mut programs) = (0, 0);
    for first in operations() {
        for second in operations() {
            for rights in [RWX, X] {
                for run in [Interpret(0), Run(0)] {
                    let program =
                        program(&[&[run, first, run], &[run, second, Store(0), run]], rights);
                    let found = explore(&program);
                    assert!(found.violation.is_none(), "{program:?}\n{}", story(&program));
                    states += found.states;
                    programs += 1;
                }
            }
        }
    }
    println!(
        "{programs} programs of two threads, {states} states, {:.1} s",
        begin.elapsed().as_secs_f64()
    );
}

#[test]
fn nothing_goes_wrong_between_three_threads() {
    let begin = Instant::now();
    let (mut states, mut programs) = (0, 0);
    let calls = [Protect(0, RWX), Unmap(0), Remap(0), Store(0), Output(0), HostStore(0)];
    for first in calls {
        for second in calls {
            let program = program(&[&[first], &[second], &[Run(0), Store(0), Run(0)]], RWX);
            let found = explore(&program);
            assert!(found.violation.is_none(), "{program:?}\n{}", story(&program));
            states += found.states;
            programs += 1;
        }
    }
    println!(
        "{programs} programs of three threads, {states} states, {:.1} s",
        begin.elapsed().as_secs_f64()
    );
}

#[test]
fn nothing_goes_wrong_on_two_pages() {
    let begin = Instant::now();
    let (mut states, mut programs) = (0, 0);
    for first in [Store(1), Protect(1, RWX), Unmap(1), Output(1), HostStore(1)] {
        for second in [Store(0), Protect(0, RWX), Unmap(0), Output(0), HostStore(0)] {
            for run in [Interpret as fn(usize) -> Op, Run] {
                let program = program(
                    &[&[run(0), first, run(0), run(1)], &[run(1), second, run(1), run(0)]],
                    RWX,
                );
                let found = explore(&program);
                assert!(found.violation.is_none(), "{program:?}\n{}", story(&program));
                states += found.states;
                programs += 1;
            }
        }
    }
    println!(
        "{programs} programs on two pages, {states} states, {:.1} s",
        begin.elapsed().as_secs_f64()
    );
}

#[test]
fn nothing_goes_wrong_when_the_first_thread_begins() {
    for before in operations() {
        for after in operations() {
            let program = program(
                &[&[Run(0), before, Spawn, after, Run(0)], &[Run(0), Store(0), Run(0)]],
                RWX,
            );
            assert_eq!(violation(&program), None, "{program:?}\n{}", story(&program));
        }
    }
}

/// For each bug a program that finds it, and what that sees.
#[test]
fn each_bug_is_found() {
    const STALE: &str = "code runs that was made before a change that has completed";
    const FAULT: &str = "a store faults that the guest's rights allow";
    const PATCH: &str = "a patch stands in code that changes";
    const DENIED: &str = "code runs that may not be executed any more";
    let cases: [(Bug, &[&[Op]], Rights, &str); 17] = [
        (Bug::ProtectOpensFirst, &[&[Run(0), Store(0), Run(0)], &[Protect(0, RWX)]], RWX, STALE),
        (
            Bug::UnmapDropsLate,
            &[&[Run(0), Unmap(0)], &[Map(0, W), Protect(0, X), Run(0)]],
            RWX,
            STALE,
        ),
        (Bug::OutputsOpenFirst, &[&[Run(0), Store(0), Run(0)], &[Output(0)]], RWX, STALE),
        (
            Bug::WakesWhileChanging,
            &[&[Run(0), Unmap(0)], &[Run(0), Map(0, W), Protect(0, X), Run(0)]],
            RWX,
            STALE,
        ),
        (
            Bug::TrustsOtherGuards,
            &[&[Interpret(0), Interpret(0)], &[Store(0), Interpret(0)]],
            RWX,
            STALE,
        ),
        (Bug::PublicationIgnored, &[&[Unmap(0)], &[Store(0)], &[Run(0)]], RWX, STALE),
        (Bug::ForgottenForbids, &[&[Run(0), Store(0)], &[Remap(0)]], RWX, FAULT),
        (Bug::SpoilsBeforeTelling, &[&[Interpret(0), Trace(0), Run(0)], &[Store(0)]], RWX, STALE),
        (Bug::DroppingNotAwaited, &[&[Run(0), HostStore(0), Run(0)], &[Remap(1)]], RWX, STALE),
        (Bug::StoreOpensFirst, &[&[Run(0), Store(0), Run(0)], &[Store(0)]], RWX, STALE),
        (Bug::HostStoreOpens, &[&[Run(0), Store(0), Run(0)], &[HostStore(0)]], RWX, STALE),
        (
            Bug::FreshLosesGuards,
            &[&[Unmap(0), Map(0, RWX)], &[Run(0), Store(0), Run(0)]],
            RWX,
            STALE,
        ),
        (Bug::AnnouncementIgnored, &[&[Run(0), Store(0), Run(0)], &[Protect(0, RWX)]], X, STALE),
        (Bug::NoSecondDrop, &[&[Run(0)], &[Protect(0, W), Run(0)]], RWX, DENIED),
        (
            Bug::NotExclusive,
            &[&[Protect(0, X), Run(0), Store(0), Run(0)], &[Protect(0, RWX)]],
            RWX,
            STALE,
        ),
        (Bug::PatchNotExclusive, &[&[Patch(0)], &[Protect(0, RWX)]], X, PATCH),
        (Bug::PatchStays, &[&[Patch(0), Protect(0, RWX)]], X, PATCH),
    ];
    for (bug, threads, rights, seen) in cases {
        let right = program(threads, rights);
        assert_eq!(violation(&right), None, "without {bug:?}");
        let wrong = Program { bug: Some(bug), ..right };
        let found = explore(&wrong);
        let (what, steps) =
            found.violation.unwrap_or_else(|| panic!("{bug:?} is not found in {wrong:?}"));
        assert_eq!(what, seen, "{bug:?}");
        println!("{bug:?}: {what}, after {} states, in {} steps", found.states, steps.len());
    }
}

/// The search notices threads that wait for each other.
#[test]
fn a_deadlock_is_found() {
    let program = program(&[&[Unmap(0)], &[Store(0)]], RWX);
    assert_eq!(violation(&program), None);
    let mut state = super::state::State::new(&program);
    state.exclusive = Some(2);
    for _ in 0..10 {
        for thread in 0..2 {
            if let super::steps::Transition::Next(next) = state.step(&program, thread) {
                state = *next;
            }
        }
    }
    assert!((0..2).all(|t| matches!(state.step(&program, t), super::steps::Transition::Blocked)
        || state.has_ended(&program, t)));
    assert_eq!(state.rights(0), Some(RWX), "nobody could unmap it");
}
