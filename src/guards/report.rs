//! The results of a comparison of policies, as JSON and CSV.
//!
//! [`Report`] is what `--json` prints: the command, its native time, and one [`Row`] for each
//! policy. The tables ([`super::text`]) and the CSV show the same numbers, rounded. A row in which a run failed keeps
//! its counts, and says in `trouble` what went wrong. The tests have an example of each form. No
//! lock.

use crate::bench::summary::{Ratio, median};
use crate::guards::Session;
use crate::guards::counterfactual::Placed;
use crate::guards::counts::Counts;
use crate::guards::sites::Site;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// The structure that `--json` prints.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// Version of the dynasour that measured.
    pub version: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The tier.
    pub tier: String,
    /// Executions of a trace head before it is compiled, in the runs that are not timed. These keep
    /// every trace.
    pub threshold: u32,
    /// The same in timed runs. `null`: they are what `run` does without `--threshold`, which keeps only
    /// traces that are faster than the code that they replace.
    #[serde(default)]
    pub timed_threshold: Option<u32>,
    /// The options of `run` in timed runs, but for the policy.
    #[serde(default)]
    pub options: String,
    /// `wall` or `cpu`.
    pub clock: String,
    /// Median seconds of the native runs.
    pub native: Option<f64>,
    /// One for each policy.
    pub policies: Vec<Row>,
    /// With `--by-site`: the sites in which the policies differ most.
    #[serde(default)]
    pub sites: Option<Vec<Site>>,
}

/// One policy.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    /// Its name.
    pub policy: String,
    /// Its description.
    pub about: String,
    /// What went wrong: `DIFFERS`, a signal, a status, a timeout.
    pub trouble: Option<String>,
    /// Counts of the counting run.
    pub counts: Counts,
    /// With `--counterfactual`: its placement beside the best one.
    #[serde(default)]
    pub placed: Option<Placed>,
    /// Bytes of native code of the traces of a timed run.
    pub code_bytes: u64,
    /// Median milliseconds of building, optimising and emitting.
    pub compile_ms: Option<f64>,
    /// The same of each timed run.
    pub compile_times: Vec<f64>,
    /// Seconds of each timed run.
    pub times: Vec<f64>,
    /// Traces that each timed run kept to its end.
    #[serde(default)]
    pub kept: Vec<u64>,
    /// The median of `times`.
    pub seconds: Option<Ratio>,
    /// Ratio to native.
    pub to_native: Option<Ratio>,
    /// Ratio to the policy `default`.
    pub to_default: Option<Ratio>,
    /// Cost of one deoptimisation in nanoseconds, of each round with enough of them. Noise can make
    /// it negative.
    pub deopt_costs: Vec<f64>,
    /// Their median; none if it is not determined.
    pub deopt_ns: Option<Ratio>,
}

impl Row {
    /// The row of a policy before anything is measured.
    pub fn new(policy: &str, about: &str) -> Row {
        Row {
            policy: policy.to_string(),
            about: about.to_string(),
            trouble: None,
            counts: Counts::default(),
            placed: None,
            code_bytes: 0,
            compile_ms: None,
            compile_times: Vec::new(),
            times: Vec::new(),
            kept: Vec::new(),
            seconds: None,
            to_native: None,
            to_default: None,
            deopt_costs: Vec::new(),
            deopt_ns: None,
        }
    }
}

impl Row {
    /// The median number of traces that a timed run kept.
    pub fn typical_kept(&self) -> Option<u64> {
        median(&self.kept.iter().map(|kept| *kept as f64).collect::<Vec<_>>()).map(|m| m as u64)
    }
}

impl Report {
    /// The report of a session's measurements.
    pub(super) fn new(
        session: &Session,
        native: Option<f64>,
        policies: Vec<Row>,
        sites: Option<Vec<Site>>,
    ) -> Report {
        let clock = clap::ValueEnum::to_possible_value(&session.args.clock);
        Report {
            version: env!("CARGO_PKG_VERSION").to_string(),
            command: session
                .guest
                .argv
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            tier: session.args.machine.tier.to_string(),
            threshold: session.threshold(),
            timed_threshold: session.args.machine.threshold,
            options: session.timed_options(),
            clock: clock.map_or_else(String::new, |v| v.get_name().to_string()),
            native,
            policies,
            sites,
        }
    }

    /// Did every run agree with native?
    pub fn all_agree(&self) -> bool {
        self.policies.iter().all(|row| row.trouble.is_none())
    }

    /// CSV: one line for each policy; times in seconds, intervals of 95 %.
    pub fn csv(&self) -> String {
        const KINDS: [&str; 6] = ["branch", "target", "value", "alias", "code", "mixed"];
        let mut out = String::from(
            "program,policy,trouble,traces,guards,guards_in_loops,guards_per_trace,executed,failed,\
             left,deopts,deopt_ns,deopt_ns_low,deopt_ns_high,code_bytes,compile_ms,seconds,\
             seconds_low,seconds_high,native_seconds,to_native,to_native_low,to_native_high,\
             to_default,to_default_low,to_default_high",
        );
        for kind in KINDS {
            let _ = write!(out, ",{kind}_executed,{kind}_failed");
        }
        out += ",separate,joined,modelled,predicted,compared,kept\n";
        for row in &self.policies {
            let c = &row.counts;
            let number = |value: Option<f64>| value.map_or(String::new(), |v| format!("{v:.6}"));
            let ratio = |r: Option<Ratio>| {
                [r.map(|r| r.median), r.and_then(|r| r.low), r.and_then(|r| r.high)].map(number)
            };
            let mut cells = vec![
                field(&self.command.join(" ")),
                row.policy.clone(),
                row.trouble.clone().unwrap_or_default(),
                c.traces.to_string(),
                c.guards.to_string(),
                c.guards_in_loops.to_string(),
                format!("{:.3}", c.guards_per_trace()),
                c.executed.to_string(),
                c.failed.to_string(),
                c.left.to_string(),
                c.all_deopts().to_string(),
            ];
            cells.extend(ratio(row.deopt_ns));
            cells.extend([row.code_bytes.to_string(), number(row.compile_ms)]);
            cells.extend(ratio(row.seconds));
            cells.push(number(self.native));
            cells.extend(ratio(row.to_native));
            cells.extend(ratio(row.to_default));
            for kind in KINDS {
                let k = c.kinds.get(kind).copied().unwrap_or_default();
                cells.extend([k.executed.to_string(), k.failed.to_string()]);
            }
            cells.extend(match row.placed {
                Some(p) => [p.separate, p.joined, p.modelled, p.predicted, p.compared]
                    .map(|count| count.to_string()),
                None => Default::default(),
            });
            cells.push(row.typical_kept().map_or(String::new(), |kept| kept.to_string()));
            out += &cells.join(",");
            out.push('\n');
        }
        out
    }
}

/// Quotes a field of CSV where necessary.
pub fn field(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_string()
    }
}

/// A count in at most five characters: 1234, 12.3k, 4.56M.
pub fn short(count: u64) -> String {
    let scaled = |unit: f64, suffix: char| {
        let v = count as f64 / unit;
        let digits = if v < 9.995 { 2 } else { usize::from(v < 99.95) };
        format!("{v:.digits$}{suffix}")
    };
    match count {
        0..10_000 => count.to_string(),
        10_000..1_000_000 => scaled(1e3, 'k'),
        1_000_000..1_000_000_000 => scaled(1e6, 'M'),
        _ => scaled(1e9, 'G'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guards::text::examples::report;

    #[test]
    fn counts_are_short() {
        let cases = [
            (0, "0"),
            (9_999, "9999"),
            (10_000, "10.0k"),
            (123_456, "123k"),
            (1_234_567, "1.23M"),
            (99_960_000, "100M"),
        ];
        for (count, text) in cases {
            assert_eq!(short(count), text);
        }
        assert_eq!(field("a b"), "a b");
        assert_eq!(field("say \"x\", y"), "\"say \"\"x\"\", y\"");
    }

    #[test]
    fn values_stand_under_their_names() {
        let csv = report().csv();
        let lines: Vec<Vec<&str>> = csv
            .lines()
            .map(|l| l.trim_start_matches("\"prog a,b\",").split(',').collect())
            .collect();
        let value =
            |name: &str| lines[1][lines[0].iter().position(|n| *n == name).expect("a column") - 1];
        assert_eq!(
            (value("policy"), value("failed"), value("deopt_ns"), value("branch_executed")),
            ("default", "3", "900.000000", "20000")
        );
        assert!(lines.iter().skip(1).all(|l| l.len() + 1 == lines[0].len()), "{csv}");
        let read: Report =
            serde_json::from_str(&serde_json::to_string(&report()).expect("plain data"))
                .expect("the same form");
        assert_eq!(format!("{read:?}"), format!("{:?}", report()));
    }
}
