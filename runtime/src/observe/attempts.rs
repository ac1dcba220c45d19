//! The heads at which traces were tried, for `--stats` and `explain --attempts`: where each is, how much of the time is spent
//! there, and what became of it.
//!
//! Shares of the time come from samples of the program counter ([`super::profile`]): a head's own
//! traces, and the function that the head is in, as far as its symbols are known.
//!
//! Data: [`Attempts`], part of the statistics of the fragments, under their lock. Invariant: nothing
//! that the guest does depends on it.
//!
//! Example: the head 0x401136 in `work` was refused once, because a trace seemed to gain nothing;
//! 40 of 100 samples are in `work`. The table has the line
//! `work+0x10   - 40.0 %  refused: NoGain`.

use super::linker;
use super::stats::RaceResult;
use dynasour_guest::symbols::Symbols;
use dynasour_tracer::AbortReason;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Heads that the table lists.
const SHOWN: usize = 16;

/// Characters of a symbol that the table shows.
const NAME: usize = 40;

/// What became of a head in the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// No trace was made.
    Refused(AbortReason),
    /// It has a trace, which has not raced.
    Made,
    /// The last race of its trace.
    Raced(RaceResult),
}

/// A head at which a trace was tried.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Attempt {
    /// The head.
    pub pc: u64,
    /// Its symbol and offset, or its file and offset.
    pub symbol: String,
    /// How often a trace was tried here.
    pub tries: u64,
    /// Percent of the samples in its traces, side traces included. None without samples.
    pub in_traces: Option<f64>,
    /// Percent of the samples in the function that it is in, except in traces. None without samples or
    /// symbols.
    pub in_function: Option<f64>,
    /// `refused: ` and the reason; `made`, if the trace has not raced; or how the race has ended:
    /// `trace`, `floor`, `cold`.
    pub outcome: String,
    /// The last race.
    pub race: Option<RaceResult>,
    /// Is it in the dynamic linker of the program?
    #[serde(default)]
    pub in_linker: bool,
}

/// The heads by their pcs: tries, and the last outcome.
#[derive(Clone, Debug, Default)]
pub struct Attempts(BTreeMap<u64, (u64, Outcome)>);

/// Samples of the program counter, by what was executed.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// By the head of the trace.
    pub traces: BTreeMap<u64, u64>,
    /// By the pc of guest code, where it stands or copied.
    pub code: BTreeMap<u64, u64>,
    /// All samples.
    pub all: u64,
}

impl Attempts {
    /// A trace was tried at `pc`.
    pub fn tried(&mut self, pc: u64, outcome: Outcome) {
        let (tries, last) = self.0.entry(pc).or_insert((0, outcome));
        (*tries, *last) = (*tries + 1, outcome);
    }

    /// The trace at `pc` has raced.
    pub fn raced(&mut self, pc: u64, race: RaceResult) {
        self.0.entry(pc).or_insert((1, Outcome::Made)).1 = Outcome::Raced(race);
    }

    /// Has no trace been tried?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The list: first the heads outside the dynamic linker, then those in it, each the hottest first.
    pub fn list(&self, places: &Places, symbols: &Symbols) -> Vec<Attempt> {
        let share = |n: u64| (places.all > 0).then(|| (1000 * n / places.all.max(1)) as f64 / 10.0);
        let attempt = |(&pc, &(tries, outcome)): (&u64, &(u64, Outcome))| {
            let function = symbols.at(pc).map(|s| places.code.range(s.start..s.end));
            let in_function = function.map(|samples| samples.map(|(_, n)| n).sum());
            Attempt {
                pc,
                symbol: symbols.name(pc),
                tries,
                in_traces: share(places.traces.get(&pc).copied().unwrap_or(0)),
                in_function: in_function.and_then(share),
                outcome: match outcome {
                    Outcome::Refused(reason) => format!("refused: {reason:?}"),
                    Outcome::Made => "made".to_string(),
                    Outcome::Raced(race) => race.verdict.to_string(),
                },
                race: match outcome {
                    Outcome::Raced(race) => Some(race),
                    _ => None,
                },
                in_linker: linker::has(pc),
            }
        };
        let mut all: Vec<Attempt> = self.0.iter().map(attempt).collect();
        all.sort_by(|a, b| {
            let heat = |a: &Attempt| a.in_traces.unwrap_or(0.0) + a.in_function.unwrap_or(0.0);
            a.in_linker.cmp(&b.in_linker).then(heat(b).total_cmp(&heat(a)))
        });
        all
    }
}

/// The lines of the table of statistics.
pub fn lines(attempts: &[Attempt]) -> String {
    let mut out = String::new();
    if attempts.is_empty() {
        return out;
    }
    let _ = writeln!(
        out,
        "heads at which traces were tried ({}), % of the samples in their traces, in their functions",
        attempts.len()
    );
    let own = attempts.iter().filter(|attempt| !attempt.in_linker).count();
    let (own, linker) = attempts.split_at(own);
    table(own, &mut out);
    if !linker.is_empty() {
        let _ = writeln!(out, "  in the dynamic linker ({}):", linker.len());
        table(linker, &mut out);
    }
    out
}

/// The lines of some heads.
fn table(attempts: &[Attempt], out: &mut String) {
    for attempt in attempts.iter().take(SHOWN) {
        let share = |share: Option<f64>| share.map_or("-".to_string(), |s| format!("{s:.1}"));
        let (traces, function) = (share(attempt.in_traces), share(attempt.in_function));
        let outcome = match attempt.race {
            Some(race) => race.to_string(),
            None => attempt.outcome.clone(),
        };
        let name: String = attempt.symbol.chars().take(NAME).collect();
        let _ = writeln!(out, "  {name:<NAME$}{traces:>6}{function:>7}  {outcome}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_head_comes_first() {
        let mut attempts = Attempts::default();
        attempts.tried(0x1000, Outcome::Refused(AbortReason::NoGain));
        attempts.tried(0x1000, Outcome::Refused(AbortReason::LeavesEarly));
        attempts.tried(0x2000, Outcome::Made);
        let places = Places { traces: [(0x2000, 3)].into(), code: [(0x1000, 1)].into(), all: 4 };
        let list = attempts.list(&places, &Symbols::default());
        assert_eq!(
            (list[0].pc, list[0].in_traces, list[0].in_function),
            (0x2000, Some(75.0), None)
        );
        assert_eq!((list[1].tries, list[1].outcome.as_str()), (2, "refused: LeavesEarly"));
        let text = lines(&list);
        assert!(
            text.contains("0x2000") && text.contains("75.0") && text.contains("made"),
            "{text}"
        );
        let mut linker = list.clone();
        linker[1].in_linker = true;
        assert!(lines(&linker).contains("\n  in the dynamic linker (1):\n  0x1000"));
        assert_eq!(lines(&[]), "");
        assert_eq!(attempts.list(&Places::default(), &Symbols::default())[0].in_traces, None);
    }
}
