//! The counts by which policies are compared, from the census of a counting run. Stubs do not count
//! as traces.
//!
//! Example: one trace with two guards that were executed 100 times each gives
//! `traces: 1, guards: 2, executed: 200`. No lock.

use dynasour_runtime::observe::census::{Census, Kind, To};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counts of the guards of one run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Counts {
    /// Traces made, side traces included.
    pub traces: u64,
    /// Guards in their code.
    pub guards: u64,
    /// Of these, guards inside loops.
    pub guards_in_loops: u64,
    /// Executions of guards.
    pub executed: u64,
    /// Failures of guards.
    pub failed: u64,
    /// Failures after which control went to the runtime; after the others it went to another trace.
    pub left: u64,
    /// Counts by kind of guard.
    pub kinds: BTreeMap<String, KindCounts>,
    /// Exits to the runtime before the end of a trace, by reason.
    pub deopts: BTreeMap<String, u64>,
    /// Whether every number is exact. (It is not where several threads ran one trace at once.)
    pub exact: bool,
}

/// The guards of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KindCounts {
    /// Number of guards in the code of traces.
    pub guards: u64,
    /// Executions.
    pub executed: u64,
    /// Failures.
    pub failed: u64,
}

impl Counts {
    /// The counts of a census.
    pub fn of(census: &Census) -> Counts {
        let mut counts =
            Counts { deopts: census.deopts.clone(), exact: census.exact, ..Counts::default() };
        for fragment in census.fragments.iter().filter(|f| f.kind != Kind::Stub) {
            counts.traces += 1;
            for guard in &fragment.guards {
                let name = serde_json::to_value(guard.kind)
                    .ok()
                    .and_then(|v| v.as_str().map(str::to_string));
                let kind = counts.kinds.entry(name.unwrap_or_default()).or_default();
                kind.guards += 1;
                kind.executed += guard.executed;
                kind.failed += guard.failed;
                counts.guards += 1;
                counts.guards_in_loops += u64::from(guard.in_loop);
                counts.executed += guard.executed;
                counts.failed += guard.failed;
                counts.left +=
                    guard.went.iter().filter(|w| w.to == To::Runtime).map(|w| w.times).sum::<u64>();
            }
        }
        counts
    }

    /// Guards in the code of a trace, on average.
    pub fn guards_per_trace(&self) -> f64 {
        if self.traces == 0 { 0.0 } else { self.guards as f64 / self.traces as f64 }
    }

    /// Exits to the runtime before the end of a trace, for all reasons.
    pub fn all_deopts(&self) -> u64 {
        self.deopts.values().sum()
    }
}
