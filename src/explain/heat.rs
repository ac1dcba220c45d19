//! Which regions are hot: the number of guest instructions executed in traces, from the counts of
//! their guards.
//!
//! A path is executed as a whole until a guard fails. So the counts of the guards give the
//! executions of each recorded block: a block that ends in a guarded branch is executed as often as
//! that guard. A block between two guards is executed as often as the guard before it held.
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

use dynasour_runtime::observe::census::{Fragment, GuardKind};
use std::collections::HashMap;

/// Executions of each block of a fragment's path, in the order of the path.
pub fn executions(fragment: &Fragment) -> Vec<u64> {
    let peeled = fragment.guards.iter().any(|g| !g.in_loop && g.kind == GuardKind::Branch);
    let mut running = match fragment.iterations {
        // Before the loop there may be one peeled iteration.
        Some(n) if peeled => n + fragment.entered,
        Some(n) => n,
        None => fragment.entered,
    };
    let count = |step: &dynasour_runtime::observe::census::PathStep| {
        let of_step = |g: &&dynasour_runtime::observe::census::Guard| {
            g.pc == step.last && g.kind != GuardKind::Alias
        };
        let (mut executed, mut failed, mut any) = (0, 0, false);
        for guard in fragment.guards.iter().filter(of_step) {
            (executed, failed, any) = (executed + guard.executed, failed + guard.failed, true);
        }
        if any {
            running = executed;
        }
        let here = running;
        running -= failed.min(running);
        here
    };
    fragment.path.iter().map(count).collect()
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
