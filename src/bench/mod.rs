//! `dynasour bench`: runs programs natively and under each tier, side by side.
//!
//! What is measured is a program (`-- PROG ARGS`), a list of command lines (`--list`), or suites of
//! workloads. Each round runs a workload once natively and once under every launcher (the tiers,
//! and peers), one after the other. So a disturbance of the machine affects all of them, and ratios
//! compare neighbouring runs. A run whose output or status differs from native is not a
//! measurement; its row says so.
//!
//! *The default tiers* are those that users run, `full` and `direct`, and `copy`, which shows what
//! translation costs without traces.
//!
//! *Start-up* is shown beside the times, as the time of a program that does nothing, and is part of
//! them. It does not contain the translation of the program's own code: one run has one time. With
//! `--longer` a second, longer run in each round tells warm-up from steady state ([`steady`]). A
//! workload whose time is too much start-up is named, with the time to try.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`suite`] | reads the TOML files that list workloads |
//! | [`study`] | lists of command lines, shards |
//! | [`inputs`] | generates input files |
//! | [`plan`] | turns a suite's entries into command lines: builds kernels, finds programs |
//! | [`session`] | the rounds of a workload |
//! | [`rounds`] | how many rounds |
//! | [`measure`] | runs one command |
//! | [`steady`] | steady state apart from warm-up, by two lengths of a program |
//! | [`summary`] | medians, ratios, intervals, outliers |
//! | [`report`] | rows, as they are written |
//! | [`table`] | tables, comma-separated values |
//! | [`output`] | files that are opened before anything runs |
//! | [`merge`] | reads rows back, puts shards together |
//!
//! One thread runs everything, so there is no lock.
//!
//! ```text
//! dynasour bench --runs 2 --tiers copy,full -- ./a.out 1000
//! (native, copy, full), measured rounds: (native, copy, full), (copy, full, native)
//! ```

mod inputs;
pub mod measure;
pub mod merge;
pub mod output;
pub mod plan;
pub mod report;
pub mod rounds;
mod session;
pub mod steady;
pub mod study;
mod suite;
pub mod summary;
pub mod table;

use anyhow::{Context, Result, ensure};
use clap::{ArgGroup, Args, ValueEnum};
use dynasour_runtime::config::Tier;
use indicatif::{ProgressBar, ProgressStyle};
use measure::{Invocation, Sample};
use merge::Line;
use output::{Form, Output, Sink};
use plan::{Peer, Workload, Workshop};
use report::{Report, Row};
use rounds::Rounds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use session::Session;
use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;
use study::Shard;
use suite::Suite;

/// Options of `bench`.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("what").required(true)
    .args(["suites", "command", "list", "merge", "schema"])))]
#[command(group(ArgGroup::new("form").args(["json", "jsonl", "csv"])))]
pub struct BenchArgs {
    /// Suites: TOML files such as benches/suites/kernels.toml
    #[arg(value_name = "SUITE")]
    suites: Vec<PathBuf>,
    /// A program and its arguments
    #[arg(last = true, value_name = "PROG")]
    command: Vec<OsString>,
    /// A file of command lines, one in each line
    #[arg(long, value_name = "FILE")]
    list: Option<PathBuf>,
    /// Measure nothing: put the results of shards together (files of --jsonl or --json), and print
    /// them
    #[arg(long, value_name = "FILE", num_args = 1..)]
    merge: Vec<PathBuf>,
    /// Print the JSON Schema of a line of --jsonl
    #[arg(long)]
    schema: bool,
    /// Only workloads whose name contains one of these
    #[arg(long, value_name = "TEXT,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Only part I of N of the workloads: every N-th, from the I-th on
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Rounds that run first and are not measured
    #[arg(long, default_value_t = 1, value_name = "N")]
    warmup: u32,
    #[command(flatten)]
    rounds: Rounds,
    /// Tiers to measure. The default ones are those that users run, and copy, which has no traces
    /// (interp is much slower than the others: with suites, use --small)
    #[arg(
        long,
        value_name = "TIER,...",
        value_delimiter = ',',
        default_value = "copy,full,direct"
    )]
    tiers: Vec<Tier>,
    /// Options of `run` for every tier, in words as for a shell (to compare several, use --peer)
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    run_options: Option<String>,
    /// Another launcher, measured beside the tiers: NAME='COMMAND {}'
    #[arg(long, value_name = "NAME=CMD")]
    peer: Vec<Peer>,
    /// The time from which ratios are computed
    #[arg(long, value_enum, default_value_t = Clock::Wall)]
    clock: Clock,
    /// Standard input of a program or of all programs of a list [default: /dev/null]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["suites", "merge", "schema"])]
    input: Option<PathBuf>,
    /// The same program with more of the same to do, in words as for a shell: each round runs it, too. What it
    /// takes longer is steady state, and what steady state does not explain of PROG's time is warm-up
    #[arg(long, value_name = "COMMAND", requires = "command")]
    longer: Option<String>,
    /// Also measure programs that end natively with an error
    #[arg(long)]
    ignore_failure: bool,
    /// With suites: use the small sizes, for slow launchers (start-up then has more weight)
    #[arg(long)]
    small: bool,
    /// Seconds after which a run is killed
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    limit: u64,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Print JSON Lines: each row as soon as it is measured
    #[arg(long)]
    jsonl: bool,
    /// Print comma-separated values: each row as soon as it is measured
    #[arg(long)]
    csv: bool,
    /// Write JSON to FILE, for --compare and --merge
    #[arg(long, visible_alias = "save", value_name = "FILE")]
    export_json: Option<PathBuf>,
    /// Write JSON Lines to FILE, each row as soon as it is measured
    #[arg(long, value_name = "FILE")]
    export_jsonl: Option<PathBuf>,
    /// Write comma-separated values to FILE
    #[arg(long, value_name = "FILE")]
    export_csv: Option<PathBuf>,
    /// Write a table of Markdown to FILE
    #[arg(long, value_name = "FILE")]
    export_md: Option<PathBuf>,
    /// Overwrite the files that results are written to
    #[arg(long)]
    force: bool,
    /// Show the ratios of an earlier JSON file beside the new ones
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// With suites: keep built kernels and inputs in DIR, and reuse those that exist there
    #[arg(long, value_name = "DIR")]
    work_dir: Option<PathBuf>,
}

/// Which time is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// From start to end.
    Wall,
    /// Processor time, user and system.
    Cpu,
}

impl Clock {
    /// `wall` or `cpu`.
    pub fn name(self) -> &'static str {
        match self {
            Clock::Wall => "wall",
            Clock::Cpu => "cpu",
        }
    }

    /// This time of a run.
    pub fn of(self, sample: &Sample) -> f64 {
        match self {
            Clock::Wall => sample.wall,
            Clock::Cpu => sample.cpu,
        }
    }
}

impl Line for Row {
    const FORMAT: &'static str = report::FORMAT;
    const ALL: &'static str = "rows";

    fn index(&self) -> usize {
        self.index
    }

    fn total(&self) -> usize {
        self.total
    }

    fn setting(&self) -> Option<String> {
        let launchers: Vec<&str> = self.cells.iter().map(|cell| cell.launcher.as_str()).collect();
        let options = shell_words::join(&self.run_options);
        Some(format!(
            "dynasour {}, {} clock, tiers {} with options '{options}'",
            self.version,
            self.clock.name(),
            launchers.join(",")
        ))
    }
}

/// Runs the command. The exit status is 1 if some row differs from native, or if rows of a merged
/// study are missing.
///
/// # Errors
/// Why nothing was measured.
pub fn run(args: &BenchArgs) -> Result<i32> {
    if args.schema {
        let schema = serde_json::to_string_pretty(&schemars::schema_for!(Row)).context("schema")?;
        Output::stdout()?.write(&(schema + "\n"))?;
        return Ok(0);
    }
    let earlier = args.compare.as_deref().map(earlier).transpose()?;
    if !args.merge.is_empty() {
        let (rows, problems) = merge::merge::<Row>(&args.merge)?;
        let mut sinks = args.sinks()?;
        for row in &rows {
            sinks.iter_mut().try_for_each(|sink| sink.row(row))?;
        }
        let report = Report::new(rows);
        finish(&mut sinks, &report, earlier.as_ref())?;
        problems.iter().for_each(|problem| eprintln!("dynasour: {problem}"));
        return Ok(i32::from(!report.all_agree() || !problems.is_empty()));
    }
    let suites = args.suites.iter().map(|path| Suite::read(path)).collect::<Result<Vec<_>>>()?;
    args.peer.iter().try_for_each(Peer::check)?;
    if let Some(input) = &args.input {
        File::open(input).with_context(|| format!("cannot read {}", input.display()))?;
    }
    let commands = args.commands()?;
    let bar = progress();
    let mut session = Session::new(args, &bar)?;
    let mut sinks = args.sinks()?;
    let workshop = Shop::open(args)?;
    bar.set_message("preparing");
    let (workloads, total) = args.prepare(&suites, commands, &workshop.directory)?;
    if workloads.is_empty() {
        eprintln!("dynasour: the study has {total} rows, and none in this shard");
    } else {
        session.start_up()?;
    }
    let runnable = workloads.iter().filter(|w| w.native.is_ok()).count() as u64;
    bar.set_length(runnable * session.steps());
    bar.set_position(0);
    let mut rows = Vec::new();
    for workload in &workloads {
        let row = session.measure(workload, total)?;
        bar.suspend(|| sinks.iter_mut().try_for_each(|sink| sink.row(&row)))?;
        rows.push(row);
    }
    bar.finish_and_clear();
    let report = Report::new(rows);
    finish(&mut sinks, &report, earlier.as_ref())?;
    Ok(i32::from(!report.all_agree()))
}

/// Ends all outputs. Notes that a table would have go to standard error if standard output has
/// none.
fn finish(sinks: &mut [Sink], report: &Report, earlier: Option<&Report>) -> Result<()> {
    if sinks.iter().all(|sink| sink.form != Form::Table) {
        report.notes().iter().for_each(|note| eprintln!("dynasour: {note}"));
    }
    sinks.iter_mut().try_for_each(|sink| sink.finish(report, earlier))
}

fn earlier(path: &Path) -> Result<Report> {
    let (rows, incomplete) = merge::read::<Row>(path)?;
    if let Some(incomplete) = incomplete {
        eprintln!("dynasour: {incomplete}");
    }
    Ok(Report::new(rows))
}

/// A progress bar whose length is not known yet.
pub fn progress() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} (left {eta}) {prefix}{msg}")
    {
        bar.set_style(style);
    }
    // Redrawn also while one run takes long.
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

/// The directory of built kernels and inputs.
struct Shop {
    directory: PathBuf,
    /// Removes the directory at the end, unless it is the user's.
    _temporary: Option<tempfile::TempDir>,
}

impl Shop {
    fn open(args: &BenchArgs) -> Result<Shop> {
        let (directory, temporary) = match &args.work_dir {
            Some(directory) => {
                let directory = std::path::absolute(directory)
                    .context("cannot resolve the path given to --work-dir")?;
                // Shards that run at the same time must not write the same inputs.
                let shard = args.shard.map(|s| format!("shard-{s}").replace('/', "-of-"));
                (directory.join(shard.unwrap_or_default()), None)
            }
            None => {
                let temporary = tempfile::tempdir().context("cannot make a temporary directory")?;
                (temporary.path().to_path_buf(), Some(temporary))
            }
        };
        std::fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        Ok(Shop { directory, _temporary: temporary })
    }
}

impl BenchArgs {
    /// Standard output and the files, all open.
    fn sinks(&self) -> Result<Vec<Sink>> {
        let form = match () {
            () if self.json => Form::Json,
            () if self.jsonl => Form::JsonLines,
            () if self.csv => Form::Csv,
            () => Form::Table,
        };
        let mut sinks = vec![Sink::new(form, Output::stdout()?)];
        let files = [
            (Form::Json, &self.export_json),
            (Form::JsonLines, &self.export_jsonl),
            (Form::Csv, &self.export_csv),
            (Form::Markdown, &self.export_md),
        ];
        for (form, path) in files {
            if let Some(path) = path {
                sinks.push(Sink::new(form, Output::open(path, self.force)?));
            }
        }
        output::check_distinct(sinks.iter().map(Sink::output))?;
        Ok(sinks)
    }

    /// The command lines of the list, or the one of the command line.
    fn commands(&self) -> Result<Vec<Vec<OsString>>> {
        if let Some(list) = &self.list {
            return study::read_list(list);
        }
        let Some(program) = self.command.first() else { return Ok(Vec::new()) };
        plan::find(&program.to_string_lossy())?;
        self.longer()?;
        Ok(vec![self.command.clone()])
    }

    /// The command line of `--longer`.
    fn longer(&self) -> Result<Option<Invocation>> {
        let Some(text) = &self.longer else { return Ok(None) };
        let words = shell_words::split(text).context("--longer")?;
        let program = words.first().context("--longer: no program")?;
        plan::find(program).context("--longer")?;
        let argv = words.iter().map(OsString::from).collect();
        Ok(Some(Invocation { argv, stdin: self.input.clone() }))
    }

    /// The workloads that `--only` accepts and that are of the shard, and the number of all that
    /// `--only` accepts.
    fn prepare(
        &self,
        suites: &[Suite],
        commands: Vec<Vec<OsString>>,
        directory: &Path,
    ) -> Result<(Vec<Workload>, usize)> {
        let shard = self.shard.unwrap_or_default();
        let (total, indices) = (RefCell::new(0), RefCell::new(Vec::new()));
        let wanted = |name: &str| {
            let only = self.only.is_empty() || self.only.iter().any(|text| name.contains(text));
            let index = *total.borrow();
            *total.borrow_mut() += usize::from(only);
            let here = only && shard.has(index);
            indices.borrow_mut().extend(here.then_some(index));
            here
        };
        let workshop = Workshop { directory, small: self.small };
        let mut workloads = Vec::new();
        for suite in suites {
            for entry in &suite.entries {
                workloads.extend(workshop.prepare(suite, entry, wanted)?);
            }
        }
        for argv in commands {
            let run = Invocation { argv, stdin: self.input.clone() };
            if wanted(&run.line()) {
                workloads.push(Workload { longer: self.longer()?, ..Workload::of_command(run) });
            }
        }
        for (workload, index) in workloads.iter_mut().zip(indices.into_inner()) {
            workload.index = index;
        }
        let total = total.into_inner();
        ensure!(total > 0, "no workload's name contains one of {:?}", self.only);
        Ok((workloads, total))
    }
}
