//! The results of a bench run: as a table, as JSON, and beside an earlier run.
//!
//! Data: [`Report`] has a [`Row`] for each workload and a [`Cell`] for each launcher. Invariant:
//! cells are in the order of the columns; a skipped row has no measurement. No lock. The tests have
//! an example of a table.

use crate::bench::summary::{Ratio, geometric_mean};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// What `--json` prints and `--save` writes.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// Version of the dynasour that measured.
    pub version: String,
    /// Names of the suites.
    pub suites: Vec<String>,
    /// `wall` or `cpu`: the time from which ratios are computed.
    pub clock: String,
    /// Names of the columns after native.
    pub columns: Vec<String>,
    /// One for each workload.
    pub rows: Vec<Row>,
}

/// One workload.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its class.
    pub class: String,
    /// Why it was not measured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub skipped: Option<String>,
    /// The native runs.
    pub native: Cell,
    /// The runs under each launcher, in the order of [`Report::columns`].
    pub cells: Vec<Cell>,
}

/// One workload under one launcher.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Cell {
    /// Seconds of each run.
    pub wall: Vec<f64>,
    /// Processor seconds of each run.
    pub cpu: Vec<f64>,
    /// Median of the seconds by the chosen clock.
    pub seconds: Option<f64>,
    /// Ratio to native.
    pub ratio: Option<Ratio>,
    /// Peak resident bytes.
    pub memory: u64,
    /// What went wrong: `DIFFERS`, a signal, a status, a timeout.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub trouble: Option<String>,
}

impl Report {
    /// Did every measured row agree with native?
    pub fn all_agree(&self) -> bool {
        self.rows.iter().all(|row| {
            row.native.trouble.is_none() && row.cells.iter().all(|cell| cell.trouble.is_none())
        })
    }

    /// The table. With `earlier`, each ratio stands beside the earlier one.
    pub fn table(&self, earlier: Option<&Report>) -> String {
        let mut lines = vec![self.header(earlier.is_some())];
        lines.extend(
            self.rows.iter().filter(|row| row.skipped.is_none()).map(|row| self.line(row, earlier)),
        );
        let classes: BTreeSet<&str> = self.rows.iter().map(|row| row.class.as_str()).collect();
        if classes.len() > 1 {
            lines.extend(
                classes
                    .iter()
                    .map(|class| self.mean_line(&format!("mean: {class}"), Some(class), earlier)),
            );
        }
        lines.push(self.mean_line("mean: all", None, earlier));
        let mut out = aligned(&lines);
        for row in &self.rows {
            if let Some(why) = &row.skipped {
                let _ = writeln!(out, "skipped {}: {why}", row.name);
            }
        }
        out
    }

    fn header(&self, compared: bool) -> Vec<String> {
        let mut line = vec!["workload".to_string(), "native s".to_string()];
        for column in &self.columns {
            line.push(format!("{column} / native"));
            line.push("95 %".to_string());
            if compared {
                line.push("was".to_string());
            }
            line.push("MiB".to_string());
        }
        line
    }

    fn line(&self, row: &Row, earlier: Option<&Report>) -> Vec<String> {
        let seconds = row.native.seconds.map_or("-".to_string(), |s| format!("{s:.3}"));
        let mut line = vec![row.name.clone(), row.native.trouble.clone().unwrap_or(seconds)];
        for (column, cell) in self.columns.iter().zip(&row.cells) {
            match (&cell.trouble, cell.ratio) {
                (Some(trouble), _) => line.extend([trouble.clone(), String::new()]),
                (None, Some(r)) => {
                    line.extend([format!("{:.2}", r.median), format!("{:.2}-{:.2}", r.low, r.high)])
                }
                (None, None) => line.extend(["-".to_string(), String::new()]),
            }
            if let Some(earlier) = earlier {
                let was = earlier.cell(&row.name, column).and_then(|cell| cell.ratio);
                line.push(was.map_or("-".to_string(), |r| format!("{:.2}", r.median)));
            }
            line.push(format!("{:.0}", cell.memory as f64 / f64::from(1 << 20)));
        }
        line
    }

    fn mean_line(&self, name: &str, class: Option<&str>, earlier: Option<&Report>) -> Vec<String> {
        let shown = |mean: Option<f64>| mean.map_or("-".to_string(), |mean| format!("{mean:.2}"));
        let mut line = vec![name.to_string(), String::new()];
        for column in &self.columns {
            line.extend([shown(self.mean(column, class)), String::new()]);
            if let Some(earlier) = earlier {
                line.push(shown(earlier.mean(column, class)));
            }
            line.push(String::new());
        }
        line
    }

    fn cell(&self, name: &str, column: &str) -> Option<&Cell> {
        let index = self.columns.iter().position(|c| c == column)?;
        self.rows.iter().find(|row| row.name == name)?.cells.get(index)
    }

    /// The geometric mean of a column's ratios over the rows of a class, or over all.
    pub fn mean(&self, column: &str, class: Option<&str>) -> Option<f64> {
        let index = self.columns.iter().position(|c| c == column)?;
        let rows = self.rows.iter().filter(|row| class.is_none_or(|class| row.class == class));
        geometric_mean(rows.filter_map(|row| {
            let cell = row.cells.get(index).filter(|cell| cell.trouble.is_none())?;
            cell.ratio.map(|ratio| ratio.median)
        }))
    }
}

/// Pads columns to their widest cell: the first is left-aligned, the others right-aligned.
pub fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |i: usize| {
        lines.iter().filter_map(|l| l.get(i)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for line in lines {
        let mut text = String::new();
        for (i, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let _ = if i == 0 {
                write!(text, "{cell:<width$}")
            } else {
                write!(text, "  {cell:>width$}")
            };
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(ratio: f64) -> Cell {
        let ratio = Ratio { median: ratio, low: ratio - 0.1, high: ratio + 0.1 };
        Cell { ratio: Some(ratio), seconds: Some(1.0), memory: 5 << 20, ..Cell::default() }
    }

    fn report(first: f64) -> Report {
        let row = |name: &str, class: &str, cells| Row {
            name: name.to_string(),
            class: class.to_string(),
            skipped: None,
            native: Cell { seconds: Some(0.5), ..Cell::default() },
            cells,
        };
        let mut missing = row("lua", "b", Vec::new());
        missing.skipped = Some("not found".to_string());
        let differs = Cell { trouble: Some("DIFFERS".to_string()), ..cell(9.0) };
        Report {
            version: String::new(),
            suites: Vec::new(),
            clock: "wall".to_string(),
            columns: vec!["dynamo".to_string()],
            rows: vec![
                row("one", "a", vec![cell(first)]),
                row("two", "b", vec![cell(4.0)]),
                row("three", "b", vec![differs]),
                missing,
            ],
        }
    }

    #[test]
    fn the_table_has_rows_means_and_what_was_skipped() {
        let table = report(1.0).table(Some(&report(2.25)));
        let expected = "\
workload   native s  dynamo / native       95 %   was  MiB
one           0.500             1.00  0.90-1.10  2.25    5
two           0.500             4.00  3.90-4.10  4.00    5
three         0.500          DIFFERS             9.00    5
mean: a                         1.00             2.25
mean: b                         4.00             4.00
mean: all                       2.00             3.00
skipped lua: not found
";
        assert_eq!(table, expected);
        assert!(!report(1.0).all_agree());
    }

    #[test]
    fn saved_reports_are_read_back() {
        let saved = serde_json::to_string(&report(1.0)).expect("plain data");
        let read: Report = serde_json::from_str(&saved).expect("the same form");
        assert_eq!(read.table(None), report(1.0).table(None));
    }
}
