//! Which regions are hot: the number of guest instructions executed in traces, from the counts of
//! their guards.
//!
//! A path is executed as a whole until a guard fails. So a block of the path is executed as often as
//! the path was begun, except for the failures of guards that stand before it. A path that is a loop
//! is begun in each iteration. If its first iteration was peeled off, the peeled copy is executed once
//! for each entry, and its blocks are added up with those of the loop.
//!
//! The same guest block may stand on a path many times. Therefore a guard belongs to a *step* of the
//! path, not to a pc ([`places`]). A failure is attributed to the step at which its anchor continues,
//! because what stands behind it is executed again. Faults are not: it is not known where they occur.
//!
//! A side trace belongs to the region of the fragment whose exit it was made for. That fragment may
//! be a side trace itself; the chain ends at a fragment that was made for its own trace head.
//!
//! No data, no lock.
//!
//! ```text
//! path a b c, entered 100 times; the guard at the end of a was executed 100 times, failed 10 times
//! executions: a 100, b 90, c 90
//! ```

use dynasour_runtime::observe::census::{Fragment, Guard, GuardKind};
use std::collections::{BTreeSet, HashMap};

/// Where a guard stands on the path of its fragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// For each of its origins the number of the step; none if no step of the path has its pc.
    pub origins: Vec<Option<usize>>,
    /// The first step that is not executed if it fails.
    first_lost: usize,
}

/// The places of a fragment's guards, in their order.
pub fn places(fragment: &Fragment) -> Vec<Place> {
    let mut out = Vec::new();
    // A pass that adds a guard does not say for which step. It adds it near others of the same code.
    let mut near = (false, 0);
    for guard in &fragment.guards {
        if near.0 != guard.in_loop {
            near = (guard.in_loop, 0);
        }
        let origins: Vec<Option<usize>> = (guard.origins.iter())
            .map(|origin| match origin.step {
                Some(step) => Some(step as usize).filter(|step| *step < fragment.path.len()),
                None => step_with(fragment, origin.pc, near.1),
            })
            .collect();
        let first = origins.iter().flatten().min().copied();
        near.1 = first.unwrap_or(near.1);
        let first_lost = first_lost(fragment, guard, first.unwrap_or(near.1));
        out.push(Place { origins, first_lost });
    }
    out
}

fn contains(fragment: &Fragment, step: usize, pc: u64) -> bool {
    let step = &fragment.path[step];
    (step.pc..step.end).contains(&pc)
}

/// The first step from `near` on that contains `pc`, or else the first of all.
fn step_with(fragment: &Fragment, pc: u64, near: usize) -> Option<usize> {
    let mut steps = (near..fragment.path.len()).chain(0..near.min(fragment.path.len()));
    steps.find(|step| contains(fragment, *step, pc))
}

/// The first step that is not executed if a guard of step `own` fails.
fn first_lost(fragment: &Fragment, guard: &Guard, own: usize) -> usize {
    let until_own = 0..(own + 1).min(fragment.path.len());
    let resumed = (guard.anchor.target)
        .and_then(|pc| until_own.rev().find(|step| contains(fragment, *step, pc)))
        .unwrap_or(own);
    let is_at_start = fragment.path.get(resumed).is_some_and(|s| guard.anchor.target == Some(s.pc));
    // The end of a block was computed when its transfer was checked.
    let ends_block = matches!(
        guard.kind,
        GuardKind::Branch | GuardKind::Target | GuardKind::Return | GuardKind::Mixed
    );
    match is_at_start && !(resumed == own && ends_block) {
        true => resumed,
        false => resumed + 1,
    }
}

/// Does a copy of the first iteration stand before the loop? If not, guards before the loop are
/// predicates that were hoisted, and fall back to the entry.
fn is_peeled(fragment: &Fragment) -> bool {
    let (inside, before): (Vec<&Guard>, Vec<&Guard>) =
        fragment.guards.iter().partition(|guard| guard.in_loop);
    let inside: BTreeSet<_> = inside.iter().flat_map(|guard| &guard.origins).collect();
    before.iter().any(|guard| {
        guard.anchor.target != Some(fragment.pc)
            || guard.origins.iter().any(|origin| inside.contains(origin))
    })
}

/// Executions of each block of a fragment's path, in the order of the path.
pub fn executions(fragment: &Fragment) -> Vec<u64> {
    let places = places(fragment);
    let flow = |begun: u64, in_loop: bool| -> Vec<u64> {
        let mut lost = vec![0; fragment.path.len() + 1];
        for (guard, place) in fragment.guards.iter().zip(&places) {
            if guard.in_loop == in_loop {
                lost[place.first_lost.min(fragment.path.len())] += guard.failed;
            }
        }
        let mut running = begun;
        let executed = lost[..fragment.path.len()].iter().map(|lost| {
            running = running.saturating_sub(*lost);
            running
        });
        executed.collect()
    };
    let Some(iterations) = fragment.iterations else { return flow(fragment.entered, false) };
    // The safe point is at the loop's head.
    let mut executed = flow(iterations.saturating_sub(fragment.polls), true);
    if is_peeled(fragment) {
        let peeled = flow(fragment.entered, false);
        executed.iter_mut().zip(peeled).for_each(|(sum, peeled)| *sum += peeled);
    }
    executed
}

/// Guest instructions that a fragment has executed.
pub fn instructions(fragment: &Fragment) -> u64 {
    let steps = fragment.path.iter().zip(executions(fragment));
    steps.map(|(step, n)| n * u64::from(step.instructions)).sum()
}

/// A region and its versions.
#[derive(Debug, PartialEq, Eq)]
pub struct Region {
    /// Its start address.
    pub pc: u64,
    /// Guest instructions executed in it.
    pub instructions: u64,
    /// Its fragments without stubs, in the order of their making, each with its executed
    /// instructions.
    pub versions: Vec<(u32, u64)>,
}

/// The regions of a run, the hottest first.
pub fn regions(fragments: &[Fragment]) -> Vec<Region> {
    let mut by_pc: HashMap<u64, Region> = HashMap::new();
    for fragment in fragments.iter().filter(|f| !f.path.is_empty()) {
        let pc = root(fragments, fragment).pc;
        let region =
            by_pc.entry(pc).or_insert(Region { pc, instructions: 0, versions: Vec::new() });
        let n = instructions(fragment);
        region.instructions += n;
        region.versions.push((fragment.id, n));
    }
    let mut regions: Vec<Region> = by_pc.into_values().collect();
    regions.sort_by_key(|r| (std::cmp::Reverse(r.instructions), r.pc));
    regions
}

/// The fragment at which the chain of exits ends: the first is the one that `of` was made for, the
/// next the one that the fragment of that exit was made for, and so on.
fn root<'a>(fragments: &'a [Fragment], of: &'a Fragment) -> &'a Fragment {
    let mut root = of;
    // Each fragment is younger than the one it was made for, so the loop ends.
    while let Some(from) = root.from.as_ref().and_then(|from| fragments.get(from.fragment as usize))
        && from.id < root.id
    {
        root = from;
    }
    root
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_runtime::observe::census::GuardOrigin;
    use serde_json::{Value, json};

    /// A guard of the branch at the end of a step: its step, whether it is in the loop, where a
    /// failure continues, executions and failures.
    fn guard(step: u32, in_loop: bool, target: u64, executed: u64, failed: u64) -> Value {
        let anchor = json!({"name": "a", "target": target, "text": "", "english": [], "stores": 0});
        json!({
            "index": 0, "kind": "branch", "pc": 0x13, "site": "",
            "origins": [{"kind": "branch", "pc": 0x13, "step": step}],
            "in_loop": in_loop, "position": [0, 0], "predicate": "", "english": "",
            "anchor": anchor, "executed": executed, "failed": failed, "went": [], "host": [0, 0],
        })
    }

    /// A fragment whose path is the same block three times, of two instructions at 0x10 and 0x13.
    fn fragment(entered: u64, iterations: Option<u64>, guards: &[Value]) -> Fragment {
        let step = json!({
            "pc": 0x10, "last": 0x13, "end": 0x15, "instructions": 2, "transfer": "branch",
            "next": 0x10, "code": null,
        });
        let fragment = json!({
            "id": 0, "name": "t1", "kind": "linear", "pc": 0x10, "from": null,
            "path": [step, step, step], "guest_instructions": 6,
            "code_bytes": {"hot": 0, "cold": 0}, "spill_slots": 0, "moves": 0,
            "compile_ns": {"record": 0, "build": 0, "optimise": 0, "emit": 0},
            "certificates": [null, null], "proofs": [null, null], "entered": entered,
            "iterations": iterations, "guards": guards, "ends": [], "polls": 0, "faults": 0,
            "dropped": false, "detail": null,
        });
        serde_json::from_value(fragment).expect("a fragment")
    }

    #[test]
    fn a_block_that_stands_on_the_path_several_times_is_counted_once_for_each() {
        let guards = [
            guard(0, false, 0x13, 100, 10),
            guard(1, false, 0x13, 90, 20),
            guard(2, false, 0x13, 70, 0),
        ];
        let fragment = fragment(100, None, &guards);
        assert_eq!(executions(&fragment), [100, 90, 70]);
        assert_eq!(instructions(&fragment), 2 * (100 + 90 + 70));
    }

    #[test]
    fn what_is_executed_again_is_not_counted() {
        // The guard of the last block falls back to the beginning of the second.
        let mut fragment = fragment(100, None, &[guard(2, false, 0x10, 100, 30)]);
        (fragment.path[2].pc, fragment.path[2].last, fragment.path[2].end) = (0x20, 0x23, 0x25);
        assert_eq!(executions(&fragment), [100, 70, 70]);
        // A merged guard of the last two blocks falls back to the end of the second.
        fragment.guards[0].anchor.target = Some(0x13);
        fragment.guards[0].origins.push(GuardOrigin {
            kind: GuardKind::Branch,
            pc: 0x13,
            step: Some(1),
        });
        assert_eq!(places(&fragment)[0].origins, [Some(2), Some(1)]);
        assert_eq!(executions(&fragment), [100, 100, 70]);
    }

    #[test]
    fn peeled_iterations_are_told_from_hoisted_predicates() {
        let peeled = [guard(1, false, 0x13, 50, 5), guard(1, true, 0x13, 900, 45)];
        assert_eq!(executions(&fragment(50, Some(900), &peeled)), [950, 950, 900]);
        // The guard before the loop is a predicate that does not vary in it.
        let hoisted = [guard(0, false, 0x10, 50, 5), guard(1, true, 0x13, 900, 45)];
        assert_eq!(executions(&fragment(50, Some(900), &hoisted)), [900, 900, 855]);
    }
}
