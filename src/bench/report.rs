//! The results of a bench run, as they are written: one [`Row`] for each workload.
//!
//! Data: a [`Row`] has a [`Cell`] for the native runs and one for each launcher. A row says
//! everything that is needed to read it alone, so that lines of several files can be put together
//! ([`super::merge`]). Invariants: all rows of a [`Report`] have the same launchers in the same
//! order; a skipped row has no measurement; the runs of a cell without trouble are beside the
//! native runs of the same rounds. No lock.
//!
//! ```text
//! {"format":"dynasour-bench-1", …, "index":0, "total":2, "name":"./a.out", …,
//!  "native":{"launcher":"native", …}, "cells":[{"launcher":"full", …}]}
//! ```

use crate::bench::Clock;
use crate::bench::steady::{Steady, Times};
use crate::bench::summary::{Ratio, geometric_mean, median, outliers};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The name of this form. Its number changes when a field changes its meaning or goes.
pub const FORMAT: &str = "dynasour-bench-1";

/// The largest share of a run's time that may be start-up before the workload counts as too short
/// (guess: a tenth changes a ratio less than machines differ).
const START_SHARE: f64 = 0.1;

/// All rows of a run: what `--json` prints and `--export-json` writes.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// `dynasour-bench-1`.
    pub format: String,
    /// One for each workload.
    pub rows: Vec<Row>,
}

/// One workload: one line of `--jsonl`.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "dynasour-bench-1")]
pub struct Row {
    /// `dynasour-bench-1`.
    #[schemars(extend("const" = FORMAT))]
    pub format: String,
    /// Version of the dynasour that measured.
    pub version: String,
    /// Name of the machine.
    pub host: String,
    /// Model of its processor.
    pub processor: String,
    /// The time from which ratios are computed.
    pub clock: Clock,
    /// Options of `run` with which the tiers ran.
    pub run_options: Vec<String>,
    /// Place in the study, from 0. Shards of a study have different ones.
    pub index: usize,
    /// Rows of the whole study.
    pub total: usize,
    /// The suite, if it is of one.
    pub suite: Option<String>,
    /// Name of the workload; the command line if it is of no suite.
    pub name: String,
    /// Class of the workload. Tables have a mean for each class.
    pub class: String,
    /// The native command line, for a shell.
    pub command: Option<String>,
    /// The command line of the longer runs (`--longer`).
    #[serde(default)]
    pub longer: Option<String>,
    /// Why it was not measured.
    pub skipped: Option<String>,
    /// If too much of the time under some tier is start-up: native seconds that the workload should
    /// take at least.
    pub too_short: Option<f64>,
    /// The native runs.
    pub native: Cell,
    /// The runs under each launcher (tiers, then peers).
    pub cells: Vec<Cell>,
}

/// One workload under one launcher.
#[derive(Debug, Default, Clone, Serialize, Deserialize, JsonSchema)]
pub struct Cell {
    /// `native`, a tier, or the name of a peer.
    pub launcher: String,
    /// Seconds of each run from start to end.
    pub wall: Vec<f64>,
    /// Processor seconds of each run, user and system, with children.
    pub cpu: Vec<f64>,
    /// Seconds of each longer run from start to end, in the same rounds.
    #[serde(default)]
    pub longer_wall: Vec<f64>,
    /// Processor seconds of each longer run.
    #[serde(default)]
    pub longer_cpu: Vec<f64>,
    /// Ratio to native in steady state: in each round, what the longer run takes more, divided by what it takes
    /// more natively.
    #[serde(default)]
    pub steady: Option<Ratio>,
    /// Seconds of the shorter run that its steady state does not explain: in each round, its time without `steady`
    /// times the native time. Start-up is part of them.
    #[serde(default)]
    pub warm_up: Option<Ratio>,
    /// Why steady state and warm-up are not determined.
    #[serde(default)]
    pub not_determined: Option<String>,
    /// Seconds by the row's clock.
    pub seconds: Option<Ratio>,
    /// Ratio to native: each run is divided by the native run of its round.
    pub ratio: Option<Ratio>,
    /// Runs, counted from 0, whose time is far from the median of all.
    pub outliers: Vec<usize>,
    /// Peak resident bytes of the largest process.
    pub memory: u64,
    /// Median seconds of a run of `/bin/true` under this launcher, by the row's clock. They are
    /// part of the times above.
    pub start_up: Option<f64>,
    /// What went wrong: `DIFFERS`, `VARIES`, a signal, a status, a timeout.
    pub trouble: Option<String>,
}

impl Cell {
    /// The times of a clock.
    pub fn times(&self, clock: Clock) -> &[f64] {
        match clock {
            Clock::Wall => &self.wall,
            Clock::Cpu => &self.cpu,
        }
    }

    /// The times of a clock at both lengths.
    fn lengths(&self, clock: Clock) -> Times<'_> {
        match clock {
            Clock::Wall => [&self.wall, &self.longer_wall],
            Clock::Cpu => [&self.cpu, &self.longer_cpu],
        }
    }
}

impl Row {
    /// Computes the figures from the times of the runs.
    pub fn finish(&mut self) {
        let base = self.native.times(self.clock).to_vec();
        for cell in self.cells.iter_mut().chain([&mut self.native]) {
            let times = cell.times(self.clock);
            let (seconds, ratio, far) =
                (Ratio::among(times), Ratio::of(times, &base), outliers(times));
            (cell.seconds, cell.ratio, cell.outliers) = (seconds, ratio, far);
        }
        self.too_short = self.native_seconds_to_try();
        if self.longer.is_some() {
            let sound = self.cells.iter_mut().filter(|cell| cell.trouble.is_none());
            for cell in sound {
                let (native, clock) = (self.native.lengths(self.clock), self.clock);
                match Steady::of(cell.lengths(clock), native) {
                    Ok(Steady { ratio, warm_up }) => {
                        (cell.steady, cell.warm_up) = (Some(ratio), Some(warm_up));
                    }
                    Err(why) => cell.not_determined = Some(why.to_string()),
                }
            }
        }
    }

    /// The largest share of a ratio that half of its interval is, those of steady state among them; `None`
    /// while a ratio has no interval, or is not determined.
    pub fn uncertainty(&self) -> Option<f64> {
        let base = self.native.times(self.clock);
        let of = |cell: &Cell| {
            let share = Ratio::of(cell.times(self.clock), base)?.uncertainty()?;
            if self.longer.is_none() {
                return Some(share);
            }
            let native = self.native.lengths(self.clock);
            let steady = Steady::of(cell.lengths(self.clock), native).ok()?;
            Some(share.max(steady.ratio.uncertainty()?))
        };
        let sound = self.cells.iter().filter(|cell| cell.trouble.is_none());
        sound.map(of).try_fold(0.0, |most, share| Some(share?.max(most)))
    }

    /// Native seconds from which on start-up is at most [`START_SHARE`] of the time, if the rest
    /// takes about as long as natively; `None` if it is that already.
    fn native_seconds_to_try(&self) -> Option<f64> {
        let starts = self.cells.iter().filter(|cell| cell.trouble.is_none()).filter_map(|cell| {
            let (start, seconds) = (cell.start_up?, median(cell.times(self.clock))?);
            (start > START_SHARE * seconds).then_some(start)
        });
        starts.map(|start| start * (1.0 / START_SHARE - 1.0)).max_by(f64::total_cmp)
    }
}

impl Report {
    /// A report of these rows.
    pub fn new(rows: Vec<Row>) -> Report {
        Report { format: FORMAT.to_string(), rows }
    }

    /// Names of the launchers after native.
    pub fn columns(&self) -> Vec<&str> {
        let first = self.rows.first();
        first.map_or(Vec::new(), |row| row.cells.iter().map(|c| c.launcher.as_str()).collect())
    }

    /// Did every measured row agree with native?
    pub fn all_agree(&self) -> bool {
        self.rows.iter().all(|row| {
            row.native.trouble.is_none() && row.cells.iter().all(|cell| cell.trouble.is_none())
        })
    }

    /// The cell of a workload under a launcher.
    pub fn cell(&self, name: &str, launcher: &str) -> Option<&Cell> {
        let row = self.rows.iter().find(|row| row.name == name)?;
        row.cells.iter().find(|cell| cell.launcher == launcher)
    }

    /// The geometric mean of a launcher's ratios over the rows of a class, or over all.
    pub fn mean(&self, launcher: &str, class: Option<&str>) -> Option<f64> {
        let rows = self.rows.iter().filter(|row| class.is_none_or(|class| row.class == class));
        let cells = rows.flat_map(|row| &row.cells);
        let sound = cells.filter(|cell| cell.launcher == launcher && cell.trouble.is_none());
        geometric_mean(sound.filter_map(|cell| Some(cell.ratio?.median)))
    }
}

#[cfg(test)]
pub mod examples {
    use super::*;

    /// A row with these seconds natively, and under each launcher.
    pub fn row(index: usize, name: &str, native: &[f64], under: &[(&str, &[f64])]) -> Row {
        let cell = |launcher: &str, times: &[f64]| Cell {
            launcher: launcher.to_string(),
            wall: times.to_vec(),
            cpu: times.to_vec(),
            memory: 5 << 20,
            ..Cell::default()
        };
        let mut row = Row {
            format: FORMAT.to_string(),
            version: "0".to_string(),
            host: "here".to_string(),
            processor: "x".to_string(),
            clock: Clock::Wall,
            run_options: Vec::new(),
            index,
            total: 4,
            suite: None,
            name: name.to_string(),
            class: "all".to_string(),
            command: Some(name.to_string()),
            longer: None,
            skipped: None,
            too_short: None,
            native: cell("native", native),
            cells: under.iter().map(|(launcher, times)| cell(launcher, times)).collect(),
        };
        row.finish();
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_as_uncertain_as_its_worst_ratio() {
        let times = [1.0; 10];
        let mut wide = times;
        wide[..4].copy_from_slice(&[0.9, 0.9, 1.1, 1.1]);
        let row = examples::row(0, "p", &times, &[("copy", &times), ("full", &wide)]);
        assert!((row.uncertainty().expect("enough runs") - 0.1).abs() < 1e-9);
        let few = examples::row(0, "p", &times[..5], &[("copy", &times[..5])]);
        assert_eq!(few.uncertainty(), None);
        let mut differs = row.clone();
        differs.cells[1].trouble = Some("DIFFERS".to_string());
        assert_eq!(differs.uncertainty(), Some(0.0));
    }

    #[test]
    fn short_programs_are_mostly_start_up() {
        let mut row = examples::row(0, "p", &[0.1], &[("copy", &[0.15]), ("full", &[0.2])]);
        (row.cells[0].start_up, row.cells[1].start_up) = (Some(0.014), Some(0.05));
        row.finish();
        assert!((row.too_short.expect("a quarter is start-up") - 0.45).abs() < 1e-9);
        row.cells[1].start_up = Some(0.02);
        row.finish();
        assert_eq!(row.too_short, None);
    }

    #[test]
    fn rows_are_read_back() {
        let row = examples::row(3, "p", &[0.1; 6], &[("copy", &[0.15; 6])]);
        let written = serde_json::to_string(&row).expect("plain data");
        let read: Row = serde_json::from_str(&written).expect("the same form");
        assert_eq!(serde_json::to_string(&read).expect("plain data"), written);
    }
}
