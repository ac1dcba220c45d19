//! The statistics of a run, for `--stats` and `--stats-json`.
//!
//! Data: [`Stats`], the counters of one process. The fragments own most of them, under their lock;
//! the counters of the threads and their times are added when the statistics are read. A field's
//! name is its key in the JSON.
//!
//! Invariant: nothing that the guest does depends on a counter. No lock: these are plain values.
//!
//! Example: a guard fails and control comes to the runtime: `stats.deopt(DeoptReason::Guard)`. The
//! table has the line `deopts: guard  1`, the JSON `"deopts": {"guard": 1}`.

use crate::observe::attempts::{self, Attempt, Attempts, Outcome};
use crate::observe::certificate::{Proofs, Verified};
use crate::observe::profile::Phase;
use crate::observe::profile::timeline::Timeline;
use dynasour_emitter::Rates;
use dynasour_tracer::race::{Judgement, Verdict};
use dynasour_tracer::{AbortReason, EndReason};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write as _;

/// The kind of native code, in [`Stats::native_samples`], that traces are.
pub const IN_TRACES: &str = "in traces";

/// Why control left a fragment before its end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DeoptReason {
    /// The predicate of a guard did not hold.
    Guard,
    /// A guard was forced to fail (`--chaos`).
    Chaos,
    /// A memory access or a native instruction faulted.
    Fault,
    /// The fragment was left at a safe point because a signal had arrived.
    Poll,
}

impl DeoptReason {
    const fn name(self) -> &'static str {
        match self {
            DeoptReason::Guard => "guard",
            DeoptReason::Chaos => "chaos",
            DeoptReason::Fault => "fault",
            DeoptReason::Poll => "poll",
        }
    }
}

/// Counters of one process.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Stats {
    /// Fragments made from traces, side traces included; resolved stubs are not.
    pub fragments: u64,
    /// Of these, loops.
    pub loop_fragments: u64,
    /// Of the fragments, those whose region's head is in the dynamic linker: they are made while the
    /// program starts.
    pub linker_fragments: u64,
    /// Of the loops, those that hold iterations which go different ways.
    pub branching_loops: u64,
    /// Other fragments that hold several executions of a function.
    pub branching_functions: u64,
    /// Resolved stubs made.
    pub stubs: u64,
    /// Direct links made between fragments.
    pub links: u64,
    /// Patches in guest code that lead to traces.
    pub patches: u64,
    /// Of these, jumps of the guest's that close loops.
    pub back_edges: u64,
    /// Samples of guest code in place.
    pub guest_samples: u64,
    /// Of these, samples by events of the kernel's; the others come from timers.
    pub event_samples: u64,
    /// Number of times that the runtime entered a fragment directly. A fragment that is entered by
    /// a link or through a copied block is not counted.
    pub fragment_entries: u64,
    /// Number of times that the runtime entered native code: fragments and copied blocks.
    pub native_entries: u64,
    /// Number of times that a trace ran to its end and came to the runtime there.
    pub fragment_ends: u64,
    /// Deoptimisations by reason.
    pub deopts: BTreeMap<&'static str, u64>,
    /// Complete recordings by how they ended.
    pub recordings: BTreeMap<String, u64>,
    /// Recordings of which no trace was made, by reason.
    pub aborts: BTreeMap<String, u64>,
    /// Trace heads that were given up: no further recording is tried there.
    pub blacklisted: u64,
    /// Assumptions that did not hold any more, so that their traces were dropped.
    pub undone: u64,
    /// Loops that were recorded anew, because the guest went other ways later than when they were recorded.
    pub outdated: u64,
    /// Loops of interpreted programs that are tried after others, since no sample was in them.
    pub set_back: u64,
    /// Races between traces and what they replace, in order.
    pub races: Vec<RaceResult>,
    /// The heads at which traces were tried, the hottest first. The list is made for a report.
    pub heads: Vec<Attempt>,
    /// What the list is made from.
    #[serde(skip)]
    pub attempts: Attempts,
    /// Number of times that all native code was dropped.
    pub flushes: u64,
    /// Copied blocks that were removed because a page of their guest code was touched.
    pub removed_blocks: u64,
    /// Fragments that were put to rest because a page of their guest code was touched.
    pub rested: u64,
    /// Resting fragments that were made live again, because their guest bytes were unchanged.
    pub woken: u64,
    /// Guest instructions in all traces.
    pub trace_instructions: u64,
    /// Bytes of emitted code.
    pub code_bytes: u64,
    /// Nanoseconds spent on building, optimising and emitting traces.
    pub compile_nanoseconds: u64,
    /// What `--verify-traces` has compared.
    pub verified: Verified,
    /// The same of machine code.
    pub verified_code: Verified,
    /// What `--prove-traces` has proven.
    pub proofs: Proofs,
    /// The same of machine code.
    pub code_proofs: Proofs,
    /// Recorded paths that the helper thread compiled, whatever became of them.
    pub helped: u64,
    /// Nanoseconds that it spent on that.
    pub helper_nanoseconds: u64,
    /// Nanoseconds of wall-clock time that the guest's threads spent in each phase.
    pub time_nanoseconds: BTreeMap<&'static str, u64>,
    /// Samples of processor time in native code, by the kind of the code: traces, copied blocks, or
    /// lookups and entries.
    pub native_samples: BTreeMap<&'static str, u64>,
    /// Of the samples in traces, those in traces of the dynamic linker.
    pub linker_samples: u64,
    /// The time in each phase over the run, with `--timeline`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
    /// System calls of the guest.
    pub syscalls: u64,
    /// Signals delivered to guest handlers.
    pub signals: u64,
    /// Guest blocks lifted for the interpreter.
    pub blocks: u64,
    /// Guest blocks copied.
    pub copied_blocks: u64,
    /// Guest instructions in the copied blocks.
    pub copied_instructions: u64,
    /// Bytes of native code of the copied blocks.
    pub copied_bytes: u64,
    /// Links between copied blocks.
    pub copied_links: u64,
    /// Indirect transfers of native code.
    pub indirect: Indirect,
}

/// How a trace has done in a race with the code that it replaces, its floor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RaceResult {
    /// The trace's head.
    pub pc: u64,
    /// Which stays.
    pub verdict: RaceVerdict,
    /// Picoseconds for a start of an iteration, by the trace.
    pub trace: i64,
    /// The same by the floor.
    pub floor: i64,
    /// Half of the interval in which the difference lies with some 95 % certainty.
    pub error: i64,
    /// Rounds.
    pub rounds: usize,
}

/// Which side of a race stays.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RaceVerdict {
    /// The trace.
    Trace,
    /// What it was to replace.
    Floor,
    /// The guest went elsewhere, so the trace stays unjudged.
    Cold,
}

impl fmt::Display for RaceVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RaceVerdict::Trace => "trace",
            RaceVerdict::Floor => "floor",
            RaceVerdict::Cold => "cold",
        })
    }
}

impl RaceResult {
    /// The result of the race of the trace at `pc`.
    pub fn new(pc: u64, judged: Judgement) -> RaceResult {
        let verdict = match judged.verdict {
            Verdict::Trace => RaceVerdict::Trace,
            Verdict::Floor => RaceVerdict::Floor,
            Verdict::Cold => RaceVerdict::Cold,
        };
        let [trace, floor] = judged.times;
        RaceResult { pc, verdict, trace, floor, error: judged.error, rounds: judged.rounds }
    }
}

impl fmt::Display for RaceResult {
    /// `trace: 83.1 ns, floor 127.0 ns, ± 1.2 (6 rounds)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [trace, floor, error] = [self.trace, self.floor, self.error].map(|t| t as f64 / 1000.0);
        let (verdict, rounds) = (self.verdict, self.rounds);
        write!(
            f,
            "{verdict} stays: trace {trace:.2} ns, floor {floor:.2}, ± {error:.2} ({rounds} rounds)"
        )
    }
}

/// How indirect jumps, calls and returns found their destinations. A transfer that a trace follows
/// inside is a guard and is not counted.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Indirect {
    /// All of them. None if they were not counted, which needs `--stats` or `--count`.
    pub executed: Option<u64>,
    /// Those that found it by a comparison with the target. None if not counted.
    pub compared: Option<u64>,
    /// Those that found it in the second table. None if not counted. All others that did not miss
    /// found it in the first table.
    pub second: Option<u64>,
    /// Those that found it nowhere and came to the runtime.
    pub missed: u64,
}

impl Indirect {
    /// The sum of these numbers and those that an emitter has counted.
    pub(crate) fn and(self, rates: Option<Rates>) -> Indirect {
        let Some(rates) = rates else { return self };
        let sum = |before: Option<u64>, more: u64| Some(before.unwrap_or_default() + more);
        Indirect {
            executed: sum(self.executed, rates.executed + rates.compared),
            compared: sum(self.compared, rates.compared),
            second: sum(self.second, rates.second),
            ..self
        }
    }

    /// Names and values of the rows of the table; none if the transfers were not counted.
    fn rows(&self) -> Vec<(&'static str, String)> {
        let (Some(executed), Some(compared), Some(second)) =
            (self.executed, self.compared, self.second)
        else {
            return Vec::new();
        };
        let of = |n: u64| if executed == 0 { 0.0 } else { 100.0 * n as f64 / executed as f64 };
        let row = |name, n: u64| (name, format!("{n:>14}{:>9.3} %", of(n)));
        vec![
            ("indirect transfers", executed.to_string()),
            row("  by a comparison", compared),
            row("  in the first table", executed.saturating_sub(compared + second + self.missed)),
            row("  in the second table", second),
            row("  in the runtime", self.missed),
        ]
    }
}

impl Stats {
    /// Counts a deoptimisation.
    pub fn deopt(&mut self, reason: DeoptReason) {
        *self.deopts.entry(reason.name()).or_default() += 1;
    }

    /// Counts a complete recording.
    pub fn recorded(&mut self, end: EndReason) {
        *self.recordings.entry(format!("{end:?}")).or_default() += 1;
    }

    /// Counts a recording from `head` of which no trace was made.
    pub fn aborted(&mut self, head: Option<u64>, reason: AbortReason) {
        if let Some(head) = head {
            self.attempts.tried(head, Outcome::Refused(reason));
        }
        self.proofs.refuted += u64::from(reason == AbortReason::Refuted);
        *self.aborts.entry(format!("{reason:?}")).or_default() += 1;
    }

    /// The text that `--stats` prints.
    pub fn table(&self) -> String {
        let mut out = String::from("dynasour statistics\n");
        let mut row = |name: &str, value: String| {
            let _ = writeln!(out, "  {name:<28}{value:>14}");
        };
        row("blocks lifted", self.blocks.to_string());
        row("blocks copied", self.copied_blocks.to_string());
        row("  guest instructions", self.copied_instructions.to_string());
        row("  code bytes", self.copied_bytes.to_string());
        row("  links", self.copied_links.to_string());
        self.indirect.rows().into_iter().for_each(|(name, value)| row(name, value));
        row("fragments", self.fragments.to_string());
        row("  of which loops", self.loop_fragments.to_string());
        row("    with several iterations", self.branching_loops.to_string());
        row("  of which functions with several executions", self.branching_functions.to_string());
        row("  in the dynamic linker", self.linker_fragments.to_string());
        row("  guest instructions", self.trace_instructions.to_string());
        row("resolved exit stubs", self.stubs.to_string());
        row("patches in guest code", self.patches.to_string());
        row("  at back edges", self.back_edges.to_string());
        row("samples of guest code", self.guest_samples.to_string());
        row("  of which by events", self.event_samples.to_string());
        row("links", self.links.to_string());
        row("code bytes", self.code_bytes.to_string());
        row("compile time (ms)", format!("{:.1}", self.compile_nanoseconds as f64 / 1e6));
        for (what, verified) in [("traces", self.verified), ("code of traces", self.verified_code)]
        {
            let Verified { traces, whole, cases, states, guards, exits, .. } = verified;
            if traces == 0 {
                continue;
            }
            row(&format!("{what} verified"), traces.to_string());
            row("  executed to the end", whole.to_string());
            row("  entry states", cases.to_string());
            row("  states compared", states.to_string());
            match (guards, exits) {
                ([0, ..], [exits, taken]) => {
                    row("  exits", exits.to_string());
                    row("    that were taken", taken.to_string());
                }
                ([guards, held, failed], _) => {
                    row("  guards", guards.to_string());
                    row("    that held", held.to_string());
                    row("    that failed", failed.to_string());
                }
            }
            row("  time (ms)", format!("{:.1}", verified.nanoseconds as f64 / 1e6));
        }
        for (what, proofs) in [("traces", &self.proofs), ("machine code", &self.code_proofs)] {
            let Proofs { proven, refuted, unknown, states, questions, nanoseconds } = proofs;
            if proven + refuted + unknown == 0 {
                continue;
            }
            row(&format!("{what} proven"), proven.to_string());
            if what == "traces" {
                row("  refuted, not used", refuted.to_string());
            }
            row("  unknown", unknown.to_string());
            row("  states shown", states.to_string());
            row("  questions to the solver", questions.to_string());
            row("  time (ms)", format!("{:.1}", *nanoseconds as f64 / 1e6));
        }
        row("paths for the helper thread", self.helped.to_string());
        row("  its time (ms)", format!("{:.1}", self.helper_nanoseconds as f64 / 1e6));
        row("fragment entries", self.fragment_entries.to_string());
        row("fragment ends in the runtime", self.fragment_ends.to_string());
        for (reason, count) in &self.deopts {
            row(&format!("deopts: {reason}"), count.to_string());
        }
        for (end, count) in &self.recordings {
            row(&format!("recorded: {end}"), count.to_string());
        }
        for (reason, count) in &self.aborts {
            row(&format!("aborted: {reason}"), count.to_string());
        }
        row("races", self.races.len().to_string());
        row("assumptions undone", self.undone.to_string());
        row("loops recorded anew", self.outdated.to_string());
        row("loops set back", self.set_back.to_string());
        row("heads given up", self.blacklisted.to_string());
        row("cache flushes", self.flushes.to_string());
        row("copied blocks removed", self.removed_blocks.to_string());
        row("fragments put to rest", self.rested.to_string());
        row("  of which woken", self.woken.to_string());
        row("system calls", self.syscalls.to_string());
        row("signals delivered", self.signals.to_string());
        out.push_str(&attempts::lines(&self.heads));
        out.push_str(&self.times());
        out
    }

    /// The part of the text about times; empty if no times were measured.
    fn times(&self) -> String {
        let all: u64 = self.time_nanoseconds.values().sum();
        let mut out = String::new();
        if all == 0 {
            return out;
        }
        let _ = writeln!(out, "time of its threads (ms)");
        let mut line = |name: &str, ns: f64| {
            let _ =
                writeln!(out, "  {name:<28}{:>14.1} {:>5.1} %", ns / 1e6, 100.0 * ns / all as f64);
        };
        let samples: u64 = self.native_samples.values().sum();
        let mut times: Vec<_> = self.time_nanoseconds.iter().collect();
        times.sort_by_key(|(_, ns)| std::cmp::Reverse(**ns));
        for (name, ns) in times {
            line(name, *ns as f64);
            if *name == Phase::Native.name() && samples > 0 {
                for (part, n) in &self.native_samples {
                    let of = |n: u64| *ns as f64 * n as f64 / samples as f64;
                    line(&format!("  {part}"), of(*n));
                    if *part == IN_TRACES && self.linker_samples > 0 {
                        line("    of the dynamic linker", of(self.linker_samples));
                    }
                }
            }
        }
        if samples > 0 {
            let _ = writeln!(out, "  native time is divided by {samples} samples");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_counted_and_shown() {
        let mut stats = Stats::default();
        stats.deopt(DeoptReason::Guard);
        stats.deopt(DeoptReason::Guard);
        stats.recorded(EndReason::Cycle);
        stats.aborted(None, AbortReason::Fault);
        let table = stats.table();
        assert!(
            table.contains("deopts: guard")
                && table.contains("recorded: Cycle")
                && table.contains("aborted: Fault")
        );
        let json: serde_json::Value = serde_json::to_value(&stats).expect("plain data");
        assert_eq!(json["deopts"]["guard"], 2);
    }
}
