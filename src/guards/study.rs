//! The results of one program, as a line of a study of many.
//!
//! A [`Study`] is what `--json` prints and a line of `--jsonl`. Invariant: it says everything that
//! is needed to read it alone, so that the files of shards can be put together. No lock.
//!
//! ```text
//! {"format":"dynasour-guards-1", "index":0, "total":9, …, "policies":[…]}       a comparison
//! {"format":"dynasour-guards-1", "index":1, "total":9, …, "rates":[…]}          with --chaos-sweep
//! {"format":"dynasour-guards-1", "index":2, "total":9, …, "refused":"… never gets hot …"}
//! ```

use crate::bench::merge::Line;
use crate::explain::paint::Paint;
use crate::guards::report::Report;
use crate::guards::sweep::Curve;
use anyhow::{Context, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;

/// The name of this form. Its number changes when a field changes its meaning or goes.
const FORMAT: &str = "dynasour-guards-1";

/// One program.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "dynasour-guards-1")]
pub struct Study {
    /// `dynasour-guards-1`.
    #[schemars(extend("const" = FORMAT))]
    format: String,
    /// Place in the list, from 0.
    index: usize,
    /// Programs of the list.
    total: usize,
    /// The command line, for a shell.
    line: String,
    /// If start-up is most of a native run: native seconds that the program should take at least.
    pub too_short: Option<f64>,
    /// What was measured.
    #[serde(flatten)]
    pub found: Found,
}

/// The results.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Found {
    /// Of policies.
    Comparison(Box<Report>),
    /// Of rates of failing guards.
    Sweep(Box<Curve>),
    /// Nothing could be measured.
    Refused {
        /// Why.
        refused: String,
    },
}

impl Study {
    /// A program of which nothing is known yet.
    pub fn new(index: usize, total: usize, command: &[OsString]) -> Study {
        let words = command.iter().map(|word| word.to_string_lossy());
        Study {
            format: FORMAT.to_string(),
            index,
            total,
            line: shell_words::join(words),
            too_short: None,
            found: Found::Refused { refused: "not measured".to_string() },
        }
    }

    /// Did every run agree with native?
    pub fn all_agree(&self) -> bool {
        match &self.found {
            Found::Comparison(report) => report.all_agree(),
            Found::Sweep(curve) => curve.all_agree(),
            Found::Refused { .. } => true,
        }
    }

    /// The tables.
    pub fn table(&self, paint: Paint) -> String {
        match &self.found {
            Found::Comparison(report) => report.table(paint),
            Found::Sweep(curve) => curve.table(paint),
            Found::Refused { refused } => format!("refused {}: {refused}\n", self.line),
        }
    }

    /// Comma-separated values, with or without their heading. A program that was refused has none.
    pub fn csv(&self, heading: bool) -> String {
        let text = match &self.found {
            Found::Comparison(report) => report.csv(),
            Found::Sweep(curve) => curve.csv(),
            Found::Refused { .. } => return String::new(),
        };
        match text.split_once('\n') {
            Some((_, lines)) if !heading => lines.to_string(),
            _ => text,
        }
    }
}

impl Line for Study {
    const FORMAT: &'static str = FORMAT;
    const ALL: &'static str = "studies";

    fn index(&self) -> usize {
        self.index
    }

    fn total(&self) -> usize {
        self.total
    }

    fn setting(&self) -> Option<String> {
        let common = |version: &str, tier: &str, threshold: u32, clock: &str| {
            format!("dynasour {version}, --tier {tier} --threshold {threshold}, {clock} clock")
        };
        match &self.found {
            Found::Comparison(r) => {
                let policies: Vec<&str> = r.policies.iter().map(|p| p.policy.as_str()).collect();
                let common = common(&r.version, &r.tier, r.threshold, &r.clock);
                let timed = &r.options;
                Some(format!("{common}, timed with {timed}, policies {}", policies.join(",")))
            }
            Found::Sweep(c) => {
                let common = common(&c.version, &c.tier, c.threshold, &c.clock);
                Some(format!("{common}, --chaos-sweep of policy {}", c.policy))
            }
            Found::Refused { .. } => None,
        }
    }
}

/// The schema of a line.
///
/// # Errors
/// None is expected: it is plain data.
pub fn schema() -> Result<String> {
    let schema = schemars::schema_for!(Study);
    Ok(serde_json::to_string_pretty(&schema).context("schema")? + "\n")
}
