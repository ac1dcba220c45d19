//! The exploration: depth first over all interleavings, each state once.

use rustc_hash::FxHashSet;

use super::state::{Page, Program, State, THREADS};
use super::steps::Transition;

/// States in which a page was guarded more often than this are not explored further, since other
/// threads can open a page for ever (guess; each bug is found with fewer).
const MOST_GUARDS: u8 = 20;

/// The result of an exploration.
#[derive(Debug)]
pub struct Found {
    /// Different states.
    pub states: usize,
    /// The first violation, and the threads that took the steps to it.
    pub violation: Option<(&'static str, Vec<usize>)>,
}

/// Explores all interleavings of a program, until an invariant does not hold.
pub fn explore(program: &Program) -> Found {
    let first = State::new(program);
    let mut seen = FxHashSet::default();
    seen.insert(first.clone());
    // A state, the thread to try next, and whether any thread could take a step.
    let mut path = vec![(first, 0, false)];
    let mut steps = Vec::new();
    while let Some((state, thread, moved)) = path.last_mut() {
        if *thread == THREADS {
            let stuck = !*moved
                && !(0..THREADS).all(|t| state.has_ended(program, t) || !state.threads[t].begun);
            if stuck {
                return Found { states: seen.len(), violation: Some(("nobody can go on", steps)) };
            }
            path.pop();
            steps.pop();
            continue;
        }
        let t = *thread;
        *thread += 1;
        match state.step(program, t) {
            Transition::Blocked => {}
            Transition::Violation(what) => {
                steps.push(t);
                return Found { states: seen.len(), violation: Some((what, steps)) };
            }
            Transition::Next(next) if next.pages.iter().any(Page::has_stale_patch) => {
                steps.push(t);
                let what = "a patch stands in code that changes";
                return Found { states: seen.len(), violation: Some((what, steps)) };
            }
            Transition::Next(next) => {
                *moved = true;
                if next.moment <= MOST_GUARDS && seen.insert((*next).clone()) {
                    path.push((*next, 0, false));
                    steps.push(t);
                }
            }
        }
    }
    Found { states: seen.len(), violation: None }
}
