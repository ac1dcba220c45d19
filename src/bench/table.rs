//! The results for people, and as comma-separated values.
//!
//! A report of one workload has a line for each launcher; one of several has a line for each
//! workload. Below the table stand notes: what was skipped, what is too short, which runs are
//! outliers, how long start-up takes. No data, no lock. The tests have an example of each form.

use crate::bench::Clock;
use crate::bench::report::{Cell, Report, Row};
use crate::bench::summary::{FEWEST_FOR_INTERVAL, Ratio, median};
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeSet;

/// Outliers that are named one by one; of more, the number (guess: a line of the terminal).
const NAMED_OUTLIERS: usize = 3;

impl Report {
    /// The table. With `earlier`, each ratio stands beside the earlier one.
    pub fn table(&self, earlier: Option<&Report>) -> String {
        let notes: String = self.notes().into_iter().map(|note| note + "\n").collect();
        let head = match self.rows.as_slice() {
            [row] => format!("{}\n", row.name),
            _ => String::new(),
        };
        let lines = self.lines(earlier);
        let table = if lines.is_empty() { String::new() } else { head + &aligned(&lines) };
        let steady = self.steady().map_or(String::new(), |lines| aligned(&lines));
        table + &steady + &notes
    }

    /// The same as a table of Markdown.
    pub fn markdown(&self, earlier: Option<&Report>) -> String {
        let escaped = |cell: &String| cell.replace('|', "\\|");
        let mut out = String::new();
        if let [row] = self.rows.as_slice() {
            out += &format!("`{}`\n\n", row.name);
        }
        let table = |lines: &[Vec<String>]| {
            let mut out = String::new();
            for (i, line) in lines.iter().enumerate() {
                let cells: Vec<String> = line.iter().map(escaped).collect();
                out += &format!("| {} |\n", cells.join(" | "));
                if i == 0 {
                    out += &format!("| --- |{}\n", " ---: |".repeat(cells.len() - 1));
                }
            }
            out
        };
        out += &table(&self.lines(earlier));
        if let Some(lines) = self.steady() {
            out += "\n";
            out += &table(&lines);
        }
        let notes = self.notes();
        if !notes.is_empty() {
            out += "\n";
        }
        out + &notes.iter().map(|note| format!("* {note}\n")).collect::<String>()
    }

    /// The cells of the table, its heading first.
    fn lines(&self, earlier: Option<&Report>) -> Vec<Vec<String>> {
        match self.rows.as_slice() {
            [row] if row.skipped.is_some() => Vec::new(),
            [row] => one(row, earlier),
            _ => self.many(earlier),
        }
    }

    /// The second table of one workload at two lengths: steady state and warm-up.
    fn steady(&self) -> Option<Vec<Vec<String>>> {
        let [row] = self.rows.as_slice() else { return None };
        row.longer.as_ref().filter(|_| row.native.trouble.is_none())?;
        let heading = ["", "steady / native", "95 %", "warm-up s", "95 %"];
        let mut lines = vec![heading.map(str::to_string).to_vec()];
        for cell in row.cells.iter().filter(|cell| cell.trouble.is_none()) {
            let figures = match (cell.steady, cell.warm_up) {
                (Some(steady), Some(warm_up)) => [
                    format!("{:.2}", steady.median),
                    steady.interval(2),
                    format!("{:.3}", warm_up.median),
                    warm_up.interval(3),
                ],
                _ => ["n.d.", "", "n.d.", ""].map(str::to_string),
            };
            lines.push([cell.launcher.clone()].into_iter().chain(figures).collect());
        }
        (lines.len() > 1).then_some(lines)
    }

    /// One line for each workload, and means.
    fn many(&self, earlier: Option<&Report>) -> Vec<Vec<String>> {
        let mut lines = vec![self.header(earlier.is_some())];
        let measured = self.rows.iter().filter(|row| row.skipped.is_none());
        lines.extend(measured.map(|row| self.line(row, earlier)));
        let classes: BTreeSet<&str> = self.rows.iter().map(|row| row.class.as_str()).collect();
        if classes.len() > 1 {
            lines.extend(
                classes
                    .iter()
                    .map(|class| self.mean_line(&format!("mean: {class}"), Some(class), earlier)),
            );
        }
        lines.push(self.mean_line("mean: all", None, earlier));
        lines
    }

    fn header(&self, compared: bool) -> Vec<String> {
        let mut line = vec!["workload".to_string(), "native s".to_string()];
        for column in self.columns() {
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
        let seconds = row.native.seconds.map_or("-".to_string(), |s| format!("{:.3}", s.median));
        let mut line = vec![row.name.clone(), row.native.trouble.clone().unwrap_or(seconds)];
        for cell in &row.cells {
            line.extend(ratio(cell));
            if let Some(earlier) = earlier {
                line.push(was(earlier, row, cell));
            }
            line.push(mebibytes(cell));
        }
        line
    }

    fn mean_line(&self, name: &str, class: Option<&str>, earlier: Option<&Report>) -> Vec<String> {
        let shown = |mean: Option<f64>| mean.map_or("-".to_string(), |mean| format!("{mean:.2}"));
        let mut line = vec![name.to_string(), String::new()];
        for column in self.columns() {
            line.extend([shown(self.mean(column, class)), String::new()]);
            if let Some(earlier) = earlier {
                line.push(shown(earlier.mean(column, class)));
            }
            line.push(String::new());
        }
        line
    }

    /// What a reader of the table must know besides.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let measured = || self.rows.iter().filter(|row| row.skipped.is_none());
        for row in &self.rows {
            if let Some(why) = &row.skipped {
                notes.push(format!("skipped {}: {why}", row.name));
            }
            notes.extend(too_short(row));
            notes.extend(
                [&row.native]
                    .into_iter()
                    .chain(&row.cells)
                    .filter_map(|cell| outliers(&row.name, cell, cell.times(row.clock))),
            );
        }
        for row in measured() {
            notes.extend(steady(row));
        }
        let few = |row: &Row| row.native.seconds.is_some_and(|s| s.low.is_none());
        if measured().any(few) {
            notes.push(format!("fewer than {FEWEST_FOR_INTERVAL} runs have no 95 % interval (-)"));
        }
        if let Some(row) = measured().next() {
            let starts = [&row.native]
                .into_iter()
                .chain(&row.cells)
                .filter_map(|cell| Some(format!("{} {:.1}", cell.launcher, cell.start_up? * 1e3)));
            let starts: Vec<String> = starts.collect();
            if !starts.is_empty() {
                notes.push(format!(
                    "start-up (a run of /bin/true, ms): {}; it is part of the times",
                    starts.join(", ")
                ));
            }
        }
        notes
    }
}

/// The table of one workload: a line for each launcher.
fn one(row: &Row, earlier: Option<&Report>) -> Vec<Vec<String>> {
    let mut heading: Vec<&str> = vec!["", "seconds", "95 %", "/ native", "95 %"];
    heading.extend(earlier.map(|_| "was"));
    heading.extend(["fastest", "slowest", "runs", "MiB"]);
    let mut lines = vec![heading.into_iter().map(str::to_string).collect::<Vec<String>>()];
    for cell in [&row.native].into_iter().chain(&row.cells) {
        let times = cell.times(row.clock);
        let shown = |seconds: Option<f64>| seconds.map_or("-".to_string(), |s| format!("{s:.4}"));
        let mut line = vec![
            cell.launcher.clone(),
            shown(cell.seconds.map(|s| s.median)),
            cell.seconds.map_or("-".to_string(), |s| s.interval(4)),
        ];
        line.extend(if cell.launcher == row.native.launcher {
            [cell.trouble.clone().unwrap_or_default(), String::new()]
        } else {
            ratio(cell)
        });
        line.extend(earlier.map(|earlier| was(earlier, row, cell)));
        line.extend([
            shown(times.iter().copied().min_by(f64::total_cmp)),
            shown(times.iter().copied().max_by(f64::total_cmp)),
            times.len().to_string(),
            mebibytes(cell),
        ]);
        lines.push(line);
    }
    lines
}

/// The ratio of a cell and its interval, or what went wrong.
fn ratio(cell: &Cell) -> [String; 2] {
    match (&cell.trouble, cell.ratio) {
        (Some(trouble), _) => [trouble.clone(), String::new()],
        (None, Some(ratio)) => [format!("{:.2}", ratio.median), ratio.interval(2)],
        (None, None) => ["-".to_string(), String::new()],
    }
}

/// The ratio in the earlier report.
fn was(earlier: &Report, row: &Row, cell: &Cell) -> String {
    let was = earlier.cell(&row.name, &cell.launcher).and_then(|cell| cell.ratio);
    was.map_or("-".to_string(), |ratio| format!("{:.2}", ratio.median))
}

fn mebibytes(cell: &Cell) -> String {
    if cell.memory == 0 {
        return "-".to_string();
    }
    format!("{:.0}", cell.memory as f64 / f64::from(1 << 20))
}

/// The note on a workload whose time is mostly start-up.
fn too_short(row: &Row) -> Option<String> {
    let seconds = row.too_short?;
    let shares = row.cells.iter().filter(|cell| cell.trouble.is_none()).filter_map(|cell| {
        let share = 100.0 * cell.start_up? / cell.seconds?.median;
        Some(format!("{:.0} % ({})", share.min(100.0), cell.launcher))
    });
    let native = median(row.native.times(row.clock)).unwrap_or_default();
    let longer = if native > 0.0 {
        format!(", about {:.0} times as long", (seconds / native).ceil())
    } else {
        String::new()
    };
    Some(format!(
        "too short to compare: {}: start-up is {} of the time; let it run at least {seconds:.1} s natively{longer}",
        row.name,
        shares.collect::<Vec<_>>().join(", ")
    ))
}

/// The notes on steady state: how it is computed, and why it is not determined.
fn steady(row: &Row) -> Vec<String> {
    let Some(longer) = &row.longer else { return Vec::new() };
    let seconds = median(match row.clock {
        Clock::Wall => &row.native.longer_wall,
        Clock::Cpu => &row.native.longer_cpu,
    });
    let seconds = seconds.map_or(String::new(), |s| format!(", natively {s:.4} s"));
    let mut notes = vec![format!(
        "steady: what the longer run takes more ({longer}{seconds}); warm-up: the rest"
    )];
    notes.extend(row.cells.iter().filter_map(|cell| {
        Some(format!("n.d.: {}: {}", cell.launcher, cell.not_determined.as_ref()?))
    }));
    notes
}

/// The note on the outliers of a cell.
fn outliers(name: &str, cell: &Cell, times: &[f64]) -> Option<String> {
    if cell.outliers.is_empty() || cell.trouble.is_some() {
        return None;
    }
    let named = cell.outliers.iter().take(NAMED_OUTLIERS);
    let named: Vec<String> = named
        .filter_map(|at| Some(format!("run {} took {:.4} s", at + 1, times.get(*at)?)))
        .collect();
    let more = match cell.outliers.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let hint = if cell.outliers == [0] { "; a larger --warmup may help" } else { "" };
    Some(format!(
        "outliers: {name}, {}: {}{more}, of {} (median {:.4} s){hint}",
        cell.launcher,
        named.join(", "),
        times.len(),
        median(times)?
    ))
}

/// One line of the comma-separated values.
#[derive(Serialize)]
struct CsvLine<'a> {
    index: usize,
    suite: &'a str,
    name: &'a str,
    class: &'a str,
    launcher: &'a str,
    clock: &'a str,
    host: &'a str,
    runs: usize,
    seconds: Option<f64>,
    seconds_low: Option<f64>,
    seconds_high: Option<f64>,
    ratio: Option<f64>,
    ratio_low: Option<f64>,
    ratio_high: Option<f64>,
    steady: Option<f64>,
    steady_low: Option<f64>,
    steady_high: Option<f64>,
    warm_up: Option<f64>,
    warm_up_low: Option<f64>,
    warm_up_high: Option<f64>,
    outliers: usize,
    memory: u64,
    start_up: Option<f64>,
    too_short: Option<f64>,
    trouble: &'a str,
    skipped: &'a str,
}

/// The names of the columns.
pub const CSV_HEADING: &str = "index,suite,name,class,launcher,clock,host,runs,seconds,seconds_low,seconds_high,ratio,\
     ratio_low,ratio_high,steady,steady_low,steady_high,warm_up,warm_up_low,warm_up_high,outliers,memory,start_up,too_short,trouble,skipped\n";

/// The lines of one row; a skipped row has one, of the launcher `native`.
///
/// # Errors
/// None is expected: the values are plain.
pub fn csv_lines(row: &Row) -> Result<String> {
    let mut writer = csv::WriterBuilder::new().has_headers(false).from_writer(Vec::new());
    let cells = row.cells.iter().filter(|_| row.skipped.is_none());
    for cell in [&row.native].into_iter().chain(cells) {
        let part = |value: Option<Ratio>| {
            (value.map(|v| v.median), value.and_then(|v| v.low), value.and_then(|v| v.high))
        };
        let (seconds, seconds_low, seconds_high) = part(cell.seconds);
        let (ratio, ratio_low, ratio_high) = part(cell.ratio);
        let (steady, steady_low, steady_high) = part(cell.steady);
        let (warm_up, warm_up_low, warm_up_high) = part(cell.warm_up);
        let line = CsvLine {
            index: row.index,
            suite: row.suite.as_deref().unwrap_or_default(),
            name: &row.name,
            class: &row.class,
            launcher: &cell.launcher,
            clock: row.clock.name(),
            host: &row.host,
            runs: cell.times(row.clock).len(),
            seconds,
            seconds_low,
            seconds_high,
            ratio,
            ratio_low,
            ratio_high,
            steady,
            steady_low,
            steady_high,
            warm_up,
            warm_up_low,
            warm_up_high,
            outliers: cell.outliers.len(),
            memory: cell.memory,
            start_up: cell.start_up,
            too_short: row.too_short,
            trouble: cell.trouble.as_deref().unwrap_or_default(),
            skipped: row.skipped.as_deref().unwrap_or_default(),
        };
        writer.serialize(line).context("cannot write comma-separated values")?;
    }
    let bytes = writer.into_inner().context("cannot write comma-separated values")?;
    String::from_utf8(bytes).context("cannot write comma-separated values")
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
            text += &if i == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") };
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::examples::row;

    fn report(first: f64) -> Report {
        let native = [0.5; 6];
        let mut rows = vec![
            row(0, "one", &native, &[("dynamo", &[0.5 * first; 6])]),
            row(1, "two", &native, &[("dynamo", &[1.8, 1.9, 2.0, 2.0, 2.1, 2.2])]),
            row(2, "three", &native, &[("dynamo", &[4.5; 6])]),
            row(3, "lua", &[], &[("dynamo", &[])]),
        ];
        rows[0].class = "a".to_string();
        rows[2].cells[0].trouble = Some("DIFFERS".to_string());
        rows[3].skipped = Some("not found".to_string());
        Report::new(rows)
    }

    #[test]
    fn the_table_has_rows_means_and_what_was_skipped() {
        let table = report(1.0).table(Some(&report(2.25)));
        let expected = "\
workload   native s  dynamo / native       95 %   was  MiB
one           0.500             1.00  1.00-1.00  2.25    5
two           0.500             4.00  3.60-4.40  4.00    5
three         0.500          DIFFERS             9.00    5
mean: a                         1.00             2.25
mean: all                       4.00             4.00
mean: all                       2.00             3.00
skipped lua: not found
";
        assert_eq!(table, expected);
        assert!(!report(1.0).all_agree());
    }

    #[test]
    fn one_workload_has_a_line_for_each_launcher() {
        let mut only = row(
            0,
            "./a.out 7|8",
            &[0.1, 0.11, 0.1, 0.1, 0.5],
            &[("copy", &[0.2; 5]), ("full", &[0.15; 5])],
        );
        (only.native.start_up, only.cells[0].start_up) = (Some(0.001), Some(0.05));
        only.cells[1].trouble = Some("DIFFERS".to_string());
        only.finish();
        let report = Report::new(vec![only]);
        let expected = "\
./a.out 7|8
        seconds  95 %  / native  95 %  fastest  slowest  runs  MiB
native   0.1000     -                   0.1000   0.5000     5    5
copy     0.2000     -      2.00     -   0.2000   0.2000     5    5
full     0.1500     -   DIFFERS         0.1500   0.1500     5    5
too short to compare: ./a.out 7|8: start-up is 25 % (copy) of the time; let it run at least 0.5 s natively, \
about 5 times as long
outliers: ./a.out 7|8, native: run 2 took 0.1100 s, run 5 took 0.5000 s, of 5 (median 0.1000 s)
fewer than 6 runs have no 95 % interval (-)
start-up (a run of /bin/true, ms): native 1.0, copy 50.0; it is part of the times
";
        assert_eq!(report.table(None), expected);
        let markdown = report.markdown(None);
        let lines: Vec<&str> = markdown.lines().collect();
        assert_eq!(lines[0], "`./a.out 7|8`");
        assert_eq!(lines[3], format!("| --- |{}", " ---: |".repeat(8)));
        assert!(lines.iter().filter(|l| l.starts_with("| ")).all(|l| l.matches('|').count() == 10));
        assert!(markdown.contains("\n* outliers: "), "{markdown}");
    }

    #[test]
    fn two_lengths_give_a_second_table() {
        let mut only = row(0, "./a.out 1", &[1.0; 6], &[("copy", &[1.3; 6]), ("full", &[1.3; 6])]);
        only.longer = Some("./a.out 2".to_string());
        only.native.longer_wall = vec![2.0; 6];
        only.cells[0].longer_wall = vec![2.1; 6];
        only.cells[1].longer_wall = vec![1.2; 6];
        only.finish();
        let table = Report::new(vec![only.clone()]).table(None);
        let expected = "
      steady / native       95 %  warm-up s         95 %
copy             0.80  0.80-0.80      0.500  0.500-0.500
full             n.d.                  n.d.
steady: what the longer run takes more (./a.out 2, natively 2.0000 s); warm-up: the rest
n.d.: full: the longer run did not take longer in each round
";
        assert!(table.contains(expected), "{table}");
        assert!(table.lines().take(7).all(|line| line.chars().count() <= 100), "{table}");
        let csv = CSV_HEADING.to_string() + &csv_lines(&only).expect("plain values");
        let mut reader = csv::Reader::from_reader(csv.as_bytes());
        let names = reader.headers().expect("a heading").clone();
        let lines: Vec<csv::StringRecord> = reader.records().map(|r| r.expect("a line")).collect();
        let at = |line: usize, name: &str| {
            lines[line][names.iter().position(|n| n == name).expect("a column")].parse::<f64>()
        };
        assert!((at(1, "steady").expect("a number") - 0.8).abs() < 1e-9, "{csv}");
        assert!(at(2, "warm_up").is_err(), "{csv}");
        let markdown = Report::new(vec![only]).markdown(None);
        assert!(markdown.contains("|  | steady / native | 95 % |"), "{markdown}");
    }

    #[test]
    fn values_stand_under_their_names() {
        let mut named = report(1.5);
        named.rows[0].name = "say \"x\", y".to_string();
        let lines = named.rows.iter().map(|row| csv_lines(row).expect("plain values"));
        let csv = CSV_HEADING.to_string() + &lines.collect::<String>();
        let mut reader = csv::Reader::from_reader(csv.as_bytes());
        let names = reader.headers().expect("a heading").clone();
        let lines: Vec<csv::StringRecord> = reader.records().map(|r| r.expect("a line")).collect();
        let at = |line: usize, name: &str| {
            &lines[line][names.iter().position(|n| n == name).expect("a column")]
        };
        assert_eq!(lines.len(), 2 * 3 + 1, "{csv}");
        assert_eq!((at(0, "launcher"), at(1, "launcher")), ("native", "dynamo"));
        assert_eq!((at(1, "name"), at(1, "ratio"), at(1, "runs")), ("say \"x\", y", "1.5", "6"));
        assert_eq!(
            (at(5, "trouble"), at(6, "skipped"), at(6, "ratio")),
            ("DIFFERS", "not found", "")
        );
    }
}
