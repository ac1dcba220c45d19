//! `cargo bench --bench table`: native, interpreted and traced times of the kernels and of programs of the system.
//!
//! Times are CPU seconds (user and system) of the process and its children, medians over interleaved rounds. The
//! interpreter runs a smaller size; its ratio is against native at that size. Outputs are compared, always.

mod workloads;

use anyhow::{Context, Result};
use clap::Parser;
use dynasour_testkit::run::{Invocation, Outcome, Status};
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use workloads::Workload;

/// Measure the benchmark kernels and real programs, native and under each tier.
#[derive(Parser)]
struct Options {
    /// Only workloads whose name contains one of these
    #[arg(long, value_name = "TEXT,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Interleaved rounds per workload; medians are shown
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Print JSON instead of a Markdown table
    #[arg(long)]
    json: bool,
    /// Leave the interpreter out
    #[arg(long)]
    no_interp: bool,
    /// Use the interpreter's size for dynamo too
    #[arg(long)]
    small: bool,
    /// Seconds after which a run is killed
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    limit: u64,
    /// The dynasour to measure
    #[arg(long, default_value = env!("CARGO_BIN_EXE_dynasour"), value_name = "FILE")]
    dynasour: PathBuf,
    /// Cargo says so
    #[arg(long, hide = true)]
    bench: bool,
}

/// One way to run a workload, and what its runs took.
#[derive(Default)]
struct Series {
    seconds: Vec<f64>,
    /// Why there is no time, or why it does not count.
    trouble: Option<String>,
}

impl Series {
    fn median(&self) -> Option<f64> {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }

    fn cell(&self) -> String {
        match (&self.trouble, self.median()) {
            (Some(trouble), _) => trouble.clone(),
            (None, Some(seconds)) => format!("{seconds:.3}"),
            (None, None) => "-".to_string(),
        }
    }
}

/// All that is known of one workload.
struct Row {
    name: String,
    native: Series,
    native_small: Series,
    interp: Series,
    dynamo: Series,
    /// `--stats-json` of the last traced run.
    stats: Value,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("table");
    let workloads = workloads::prepare(&directory, &options.only)?;
    let mut rows = Vec::new();
    if !options.json {
        println!("{HEADER}");
    }
    for workload in &workloads {
        let row = measure(workload, &options, &directory)?;
        if !options.json {
            println!("{}", row.line());
        }
        rows.push(row);
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&rows.iter().map(Row::json).collect::<Vec<_>>())?);
    } else {
        println!("\nGeometric means over {} rows: {}", rows.len(), means(&rows));
    }
    Ok(())
}

fn measure(workload: &Workload, options: &Options, directory: &Path) -> Result<Row> {
    let statistics = directory.join("stats.json");
    let [full, small] = [&workload.full, &workload.small];
    let traced = if options.small { small } else { full };
    let mut row = Row {
        name: workload.name.clone(),
        native: Series::default(),
        native_small: Series::default(),
        interp: Series::default(),
        dynamo: Series::default(),
        stats: Value::Null,
    };
    let stats_option = [OsString::from("--stats-json"), statistics.clone().into()];
    for _ in 0..options.rounds {
        let expected = timed(traced, options, &mut row.native, None)?;
        let dynamo = translated(traced, options, "dynamo", &stats_option);
        timed(&dynamo, options, &mut row.dynamo, Some(&expected))?;
        if !options.no_interp {
            let expected = timed(small, options, &mut row.native_small, None)?;
            timed(&translated(small, options, "interp", &[]), options, &mut row.interp, Some(&expected))?;
        }
    }
    if row.dynamo.trouble.is_none() {
        let text = std::fs::read(&statistics).with_context(|| format!("no {}", statistics.display()))?;
        row.stats = serde_json::from_slice(&text).context("statistics")?;
    }
    Ok(row)
}

/// The same command under a tier.
fn translated(guest: &Invocation, options: &Options, tier: &str, more: &[OsString]) -> Invocation {
    let mut run = Invocation { program: options.dynasour.clone(), args: Vec::new(), ..guest.clone() };
    run = run.args(["run", "--tier", tier]).args(more.iter().cloned()).args(["--"]);
    run.args([guest.program.clone()]).args(guest.args.iter().cloned())
}

/// Runs once more, unless this series already failed; a wrong run says so and ends the series.
fn timed(run: &Invocation, options: &Options, series: &mut Series, expected: Option<&Outcome>) -> Result<Outcome> {
    let run = Invocation { limit: Duration::from_secs(options.limit), ..run.clone() };
    let before = children_seconds()?;
    let outcome = run.run();
    let seconds = children_seconds()? - before;
    let trouble = match (outcome.status, expected) {
        (Status::TimedOut, _) => Some(format!("over {} s", options.limit)),
        (Status::Killed(signal), _) => Some(format!("SIGNAL {signal}")),
        (status, None) if !workloads::ended_well(status) => Some(format!("{status}")),
        (status, Some(e)) if status != e.status || outcome.stdout != e.stdout => Some("DIFFERS".to_string()),
        _ => None,
    };
    if let Some(trouble) = &trouble {
        eprintln!("{trouble}: {run}\n{}", String::from_utf8_lossy(&outcome.stderr));
        series.trouble = Some(trouble.clone());
    }
    series.seconds.push(seconds);
    Ok(outcome)
}

/// CPU seconds of all children that were waited for.
fn children_seconds() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let [user, system] = [usage.user_time(), usage.system_time()];
    Ok((user.tv_sec() + system.tv_sec()) as f64 + (user.tv_usec() + system.tv_usec()) as f64 / 1e6)
}

const HEADER: &str = "\
| workload | native s | dynamo s | dynamo / native | interp / native | fragments | loops | entries | deopts | compile ms |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |";

impl Row {
    fn ratio(&self) -> Option<f64> {
        self.dynamo.trouble.is_none().then(|| Some(self.dynamo.median()? / self.native.median()?))?
    }

    fn interp_ratio(&self) -> Option<f64> {
        self.interp.trouble.is_none().then(|| Some(self.interp.median()? / self.native_small.median()?))?
    }

    fn line(&self) -> String {
        let number = |key: &str| self.stats[key].as_u64().map_or("-".to_string(), |n| n.to_string());
        let times = |ratio: Option<f64>| ratio.map_or("-".to_string(), |r| format!("{r:.2}"));
        let mut deopts = String::new();
        for (reason, count) in self.stats["deopts"].as_object().into_iter().flatten() {
            let _ = write!(deopts, "{}{reason} {count}", if deopts.is_empty() { "" } else { ", " });
        }
        format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {deopts} | {} |",
            self.name,
            self.native.cell(),
            self.dynamo.cell(),
            times(self.ratio()),
            self.interp.trouble.clone().unwrap_or_else(|| times(self.interp_ratio())),
            number("fragments"),
            number("loop_fragments"),
            number("fragment_entries"),
            self.stats["compile_nanoseconds"].as_f64().map_or("-".to_string(), |n| format!("{:.1}", n / 1e6)),
        )
    }

    fn json(&self) -> Value {
        let series = |s: &Series| json!({ "seconds": s.seconds, "median": s.median(), "trouble": s.trouble });
        json!({
            "workload": self.name,
            "native": series(&self.native),
            "dynamo": series(&self.dynamo),
            "native_small": series(&self.native_small),
            "interp": series(&self.interp),
            "dynamo_ratio": self.ratio(),
            "interp_ratio": self.interp_ratio(),
            "stats": self.stats,
        })
    }
}

fn means(rows: &[Row]) -> String {
    let mean = |ratios: Vec<f64>| {
        let logarithms: f64 = ratios.iter().map(|r| r.ln()).sum();
        if ratios.is_empty() {
            "-".to_string()
        } else {
            format!("{:.2} ({})", (logarithms / ratios.len() as f64).exp(), ratios.len())
        }
    };
    let dynamo = mean(rows.iter().filter_map(Row::ratio).collect());
    let interp = mean(rows.iter().filter_map(Row::interp_ratio).collect());
    format!("dynamo / native {dynamo}, interp / native {interp}")
}
