//! How many guards would be executed under a placement, from the outcomes of each predicate in the run of
//! another one.
//!
//! The base run has recorded, for each trace, how often it was entered, how often its loop was begun, and how
//! often each predicate failed: the predicates are told apart by their origins (kind, guest
//! instruction, step of the path), which all passes keep. A placement is a list of guards in the order in
//! which control passes them. Walking along it with the entries of the base run, and taking out at each guard
//! what its predicates have failed, gives the executions of each guard.
//!
//! *One iteration in front of the loop* (the pass `peel`): a predicate that stands there and in the loop
//! fails in the first iteration as often as in others (an assumption: the base run does not tell the
//! first iteration from others). A predicate that stands only before the loop does not vary in it, so all its failures
//! are there.
//!
//! A trace of the other run is told by its pc and its recorded path. One that the base run has not made
//! has no prediction. Side traces differ most: they begin where guards fail.
//!
//! Data: [`Outcomes`]. No lock.
//!
//! ```text
//! base: entered 10, iterations 1,000, branch@40.1 failed 10       other: the guard before the loop: 10
//! ```

use dynasour_runtime::observe::census::{Fragment, Guard, GuardOrigin, Kind};
use std::collections::{BTreeMap, BTreeSet};

/// A trace in any run: its head, and the blocks of its path with their successors.
type Key = (u64, Vec<(u64, u64)>);

/// What a trace of the base run has recorded.
#[derive(Debug, Clone, Default)]
struct Outcome {
    entered: u64,
    /// Starts of iterations.
    iterations: u64,
    /// Entries that came to the loop.
    reached: u64,
    /// Failures by the origin of the predicate: before the loop, and in it.
    failed: [BTreeMap<GuardOrigin, u64>; 2],
}

/// The outcomes of a base run.
#[derive(Debug, Default)]
pub struct Outcomes(BTreeMap<Key, Vec<Outcome>>);

/// What the outcomes say about another run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Executions of guards in the traces that the base run has, too.
    pub predicted: u64,
    /// What these traces have executed in fact.
    pub measured: u64,
}

fn key(fragment: &Fragment) -> Key {
    (fragment.pc, fragment.path.iter().map(|step| (step.pc, step.next)).collect())
}

fn is_loop(fragment: &Fragment) -> bool {
    matches!(fragment.kind, Kind::Loop | Kind::SideLoop)
}

/// The traces of a census, each with its number among those of the same key.
fn traces(fragments: &[Fragment]) -> impl Iterator<Item = (Key, usize, &Fragment)> {
    let mut seen: BTreeMap<Key, usize> = BTreeMap::new();
    fragments.iter().filter(|fragment| fragment.kind != Kind::Stub).map(move |fragment| {
        let key = key(fragment);
        let number = seen.entry(key.clone()).or_default();
        *number += 1;
        (key, *number - 1, fragment)
    })
}

impl Outcomes {
    /// The outcomes of a run.
    pub fn of(fragments: &[Fragment]) -> Outcomes {
        let mut outcomes = Outcomes::default();
        for (key, _, fragment) in traces(fragments) {
            let mut outcome = Outcome { entered: fragment.entered, ..Outcome::default() };
            for guard in &fragment.guards {
                // All predicates of a merged guard fail at once: none is told from the others.
                if let Some(origin) = guard.origins.first() {
                    let failed = &mut outcome.failed[usize::from(guard.in_loop)];
                    *failed.entry(*origin).or_default() += guard.failed;
                }
            }
            let before: u64 = outcome.failed[0].values().sum();
            outcome.reached = fragment.entered.saturating_sub(before);
            outcome.iterations = fragment.iterations.unwrap_or(0);
            outcomes.0.entry(key).or_default().push(outcome);
        }
        outcomes
    }

    /// Predicts the executions of the guards of another run.
    pub fn predict(&self, fragments: &[Fragment]) -> Prediction {
        let mut all = Prediction::default();
        for (key, number, fragment) in traces(fragments) {
            let Some(outcome) = self.0.get(&key).and_then(|all| all.get(number)) else { continue };
            all.predicted += outcome.predict(fragment);
            all.measured += fragment.guards.iter().map(|guard| guard.executed).sum::<u64>();
        }
        all
    }
}

impl Outcome {
    /// Executions of the guards of a placement.
    fn predict(&self, fragment: &Fragment) -> u64 {
        let mut guards: Vec<&Guard> = fragment.guards.iter().collect();
        guards.sort_by_key(|guard| guard.position);
        let (before, inside): (Vec<&Guard>, Vec<&Guard>) =
            guards.into_iter().partition(|guard| !guard.in_loop);
        let origins = |guards: &[&Guard]| -> BTreeSet<GuardOrigin> {
            guards.iter().flat_map(|guard| guard.origins.iter().copied()).collect()
        };
        let (in_front, in_loop) = (origins(&before), origins(&inside));
        let is_peeled = is_loop(fragment) && in_front.intersection(&in_loop).next().is_some();
        // The share of iterations that are the first of an entry.
        let first = match self.iterations {
            0 => 1.0,
            all => self.reached as f64 / all as f64,
        };
        let [failed_before, failed_inside] = &self.failed;
        fn of(failed: &BTreeMap<GuardOrigin, u64>, origin: &GuardOrigin) -> f64 {
            failed.get(origin).copied().unwrap_or(0) as f64
        }
        let fails_before = |origin: &GuardOrigin| {
            let inside = of(failed_inside, origin);
            let share = if in_loop.contains(origin) { first } else { 1.0 };
            of(failed_before, origin) + share * inside
        };
        let fails_inside = |origin: &GuardOrigin| {
            let share = if in_front.contains(origin) { 1.0 - first } else { 1.0 };
            share * of(failed_inside, origin)
        };
        let (executed, left) = walk(&before, self.entered as f64, &fails_before);
        if !is_loop(fragment) {
            return executed.round() as u64;
        }
        let iterations = self.iterations.saturating_sub(if is_peeled { self.reached } else { 0 });
        let entries = if self.reached == 0 { 0.0 } else { left / self.reached as f64 };
        // In a placement that fails before the loop where the base fails inside, fewer entries come to the
        // loop; iterations are taken to be shared evenly among those that do.
        let scale = if is_peeled { 1.0 } else { entries.min(1.0) };
        let (repeated, _) = walk(&inside, iterations as f64 * scale, &fails_inside);
        (executed + repeated).round() as u64
    }
}

/// Passes guards in order; returns the number of executions, and how often control passed all.
fn walk(guards: &[&Guard], entries: f64, fails: &dyn Fn(&GuardOrigin) -> f64) -> (f64, f64) {
    let (mut executed, mut flow) = (0.0, entries);
    let mut spent: BTreeSet<GuardOrigin> = BTreeSet::new();
    for guard in guards {
        executed += flow;
        for origin in &guard.origins {
            if spent.insert(*origin) {
                flow = (flow - fails(origin)).max(0.0);
            }
        }
    }
    (executed, flow)
}
