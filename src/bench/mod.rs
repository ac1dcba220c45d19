//! `dynasour bench`: runs workloads natively and under each tier, side by side.
//!
//! Each round runs each workload once natively and once under every launcher (the tiers, and
//! peers), one after the other. So a disturbance of the machine affects all of them, and ratios
//! compare neighbouring runs. A run whose output or status differs from native is not a
//! measurement; its row says so.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`suite`] | reads the TOML files that list workloads |
//! | [`inputs`] | generates input files |
//! | [`plan`] | turns a suite's entries into command lines: builds kernels, finds programs |
//! | [`measure`] | runs one command |
//! | [`summary`] | medians, ratios, intervals |
//! | [`report`] | the table, the JSON, the comparison with an earlier run |
//!
//! One thread runs everything, so there is no lock; nothing else should load the machine meanwhile.
//!
//! ```text
//! dynasour bench kernels.toml --only sieve-O2 --runs 2 --tiers copy,full
//! sieve-O2: native, copy, full, native, copy, full   one row; ratios are to the native run before
//! ```

mod inputs;
pub mod measure;
pub mod plan;
pub mod report;
mod suite;
pub mod summary;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use dynasour_runtime::config::Tier;
use indicatif::{ProgressBar, ProgressStyle};
use measure::{Invocation, Sample};
use plan::{Peer, Workload, Workshop};
use report::{Cell, Report, Row};
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use suite::Suite;
use summary::{Ratio, median};

/// Options of `bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// Suites: TOML files such as benches/suites/kernels.toml
    #[arg(required = true, value_name = "SUITE")]
    suites: Vec<PathBuf>,
    /// Only workloads whose name contains one of these
    #[arg(long, value_name = "TEXT,...", value_delimiter = ',')]
    only: Vec<String>,
    /// Rounds; medians are shown
    #[arg(long, default_value_t = 5, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Tiers to measure (interp is much slower than the others: use it with --small)
    #[arg(
        long,
        value_name = "TIER,...",
        value_delimiter = ',',
        default_value = "dynamo,copy,full"
    )]
    tiers: Vec<Tier>,
    /// Another launcher, measured beside the tiers: NAME='COMMAND {}'
    #[arg(long, value_name = "NAME=CMD")]
    peer: Vec<Peer>,
    /// The time from which ratios are computed
    #[arg(long, value_enum, default_value_t = Clock::Wall)]
    clock: Clock,
    /// Use the small sizes, for slow launchers (start-up then has more weight)
    #[arg(long)]
    small: bool,
    /// Seconds after which a run is killed
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    limit: u64,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Write the results to FILE, for --compare
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Overwrite the file given to --save
    #[arg(long)]
    force: bool,
    /// Show the ratios of an earlier --save file beside the new ones
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Keep built kernels and inputs in DIR, and reuse those that exist there
    #[arg(long, value_name = "DIR")]
    work_dir: Option<PathBuf>,
}

/// Which time is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Clock {
    /// From start to end.
    Wall,
    /// Processor time, user and system.
    Cpu,
}

/// One column of the table.
enum Launcher {
    Tier(Tier),
    Peer(Peer),
}

impl Launcher {
    fn name(&self) -> String {
        match self {
            Launcher::Tier(tier) => tier.to_string(),
            Launcher::Peer(peer) => peer.name.clone(),
        }
    }

    /// The command line of the guest under this launcher; `own` is dynasour's file.
    fn launch(&self, guest: &Invocation, own: &Path) -> Invocation {
        match self {
            Launcher::Peer(peer) => peer.launch(guest),
            Launcher::Tier(tier) => {
                let head = [
                    own.into(),
                    "run".into(),
                    "--tier".into(),
                    OsString::from(tier.to_string()),
                    "--".into(),
                ];
                Invocation {
                    argv: head.into_iter().chain(guest.argv.clone()).collect(),
                    stdin: guest.stdin.clone(),
                }
            }
        }
    }
}

/// Runs the command. The exit status is 1 if some row differs from native.
///
/// # Errors
/// Why nothing was measured.
pub fn run(args: &BenchArgs) -> Result<i32> {
    let suites = args.suites.iter().map(|path| Suite::read(path)).collect::<Result<Vec<_>>>()?;
    args.peer.iter().try_for_each(Peer::check)?;
    let earlier = args.compare.as_deref().map(read_report).transpose()?;
    if let Some(save) = args.save.as_ref().filter(|save| !args.force && save.exists()) {
        bail!("{} exists; --force overwrites it", save.display());
    }
    let temporary;
    let directory = match &args.work_dir {
        Some(directory) => {
            std::path::absolute(directory).context("cannot resolve the path given to --work-dir")?
        }
        None => {
            temporary = tempfile::tempdir().context("cannot make a temporary directory")?;
            temporary.path().to_path_buf()
        }
    };
    std::fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    let bar = progress();
    bar.set_message("preparing");
    let workloads = prepare(args, &suites, &directory)?;
    let runnable = workloads.iter().filter(|w| w.native.is_ok()).count() as u64;
    let tiers = args.tiers.iter().copied().map(Launcher::Tier);
    let launchers: Vec<Launcher> =
        tiers.chain(args.peer.iter().cloned().map(Launcher::Peer)).collect();
    bar.set_length(runnable * u64::from(args.runs) * (launchers.len() as u64 + 1));
    let own = std::env::current_exe().context("cannot find this program")?;
    let session =
        Session { args, launchers: &launchers, own: &own, directory: &directory, bar: &bar };
    let rows =
        workloads.iter().map(|workload| session.measure(workload)).collect::<Result<Vec<_>>>()?;
    bar.finish_and_clear();
    let report = Report {
        version: env!("CARGO_PKG_VERSION").to_string(),
        suites: suites.into_iter().map(|suite| suite.name).collect(),
        clock: args
            .clock
            .to_possible_value()
            .map_or_else(String::new, |v| v.get_name().to_string()),
        columns: launchers.iter().map(Launcher::name).collect(),
        rows,
    };
    let json = serde_json::to_string_pretty(&report).context("results")? + "\n";
    if let Some(save) = &args.save {
        std::fs::write(save, &json).with_context(|| format!("cannot write {}", save.display()))?;
    }
    print!("{}", if args.json { json } else { report.table(earlier.as_ref()) });
    Ok(i32::from(!report.all_agree()))
}

fn read_report(path: &Path) -> Result<Report> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not what --save writes", path.display()))
}

/// A progress bar whose length is not known yet.
pub fn progress() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} (left {eta}) {msg}")
    {
        bar.set_style(style);
    }
    bar
}

/// The workloads whose names `--only` accepts.
fn prepare(args: &BenchArgs, suites: &[Suite], directory: &Path) -> Result<Vec<Workload>> {
    let wanted = |name: &str| {
        args.only.is_empty() || args.only.iter().any(|text| name.contains(text.as_str()))
    };
    let workshop = Workshop { directory, small: args.small };
    let mut workloads = Vec::new();
    for suite in suites {
        for entry in &suite.entries {
            workloads.extend(workshop.prepare(suite, entry, wanted)?);
        }
    }
    ensure!(!workloads.is_empty(), "no workload's name contains one of {:?}", args.only);
    Ok(workloads)
}

/// The state of one bench run.
struct Session<'a> {
    args: &'a BenchArgs,
    launchers: &'a [Launcher],
    own: &'a Path,
    directory: &'a Path,
    bar: &'a ProgressBar,
}

impl Session<'_> {
    /// Measures one workload in all rounds.
    fn measure(&self, workload: &Workload) -> Result<Row> {
        let mut row = Row {
            name: workload.name.clone(),
            class: workload.class.clone(),
            skipped: None,
            native: Cell::default(),
            cells: self.launchers.iter().map(|_| Cell::default()).collect(),
        };
        let native = match &workload.native {
            Ok(native) => native,
            Err(why) => {
                row.skipped = Some(why.clone());
                return Ok(row);
            }
        };
        for _ in 0..self.args.runs {
            let expected = self.once(&workload.name, native, &mut row.native, None)?;
            if row.native.trouble.is_some() {
                // Without a native run there is nothing to compare with.
                self.bar.inc(u64::from(self.args.runs) * (self.launchers.len() as u64 + 1) - 1);
                return Ok(row);
            }
            for (launcher, cell) in self.launchers.iter().zip(&mut row.cells) {
                if cell.trouble.is_some() {
                    self.bar.inc(1);
                    continue;
                }
                self.once(
                    &workload.name,
                    &launcher.launch(native, self.own),
                    cell,
                    Some(&expected),
                )?;
            }
        }
        let base = self.clock(&row.native).to_vec();
        row.native.seconds = median(&base);
        for cell in &mut row.cells {
            cell.seconds = median(self.clock(cell));
            cell.ratio = Ratio::of(self.clock(cell), &base);
        }
        Ok(row)
    }

    fn clock<'c>(&self, cell: &'c Cell) -> &'c [f64] {
        match self.args.clock {
            Clock::Wall => &cell.wall,
            Clock::Cpu => &cell.cpu,
        }
    }

    /// Runs a workload once and adds the result to `cell`. `expected` is the native run to compare
    /// with; `None` for the native run itself.
    fn once(
        &self,
        name: &str,
        run: &Invocation,
        cell: &mut Cell,
        expected: Option<&Sample>,
    ) -> Result<Sample> {
        self.bar.set_message(name.to_string());
        let sample = run.run(self.directory, Duration::from_secs(self.args.limit))?;
        self.bar.inc(1);
        cell.wall.push(sample.wall);
        cell.cpu.push(sample.cpu);
        cell.memory = cell.memory.max(sample.memory);
        cell.trouble = self.trouble(&sample, expected);
        if let Some(trouble) = &cell.trouble {
            self.bar.suspend(|| eprintln!("dynasour: {name}: {trouble}: {}", run.line()));
        }
        Ok(sample)
    }

    /// What is wrong with a run; `None` if nothing is.
    fn trouble(&self, sample: &Sample, expected: Option<&Sample>) -> Option<String> {
        if sample.timed_out {
            return Some(format!("over {} s", self.args.limit));
        }
        match expected {
            None if sample.status.success() => None,
            Some(e) if e.status == sample.status && e.stdout == sample.stdout => None,
            _ => Some(match (sample.status.signal(), expected) {
                (Some(signal), _) => format!("SIGNAL {signal}"),
                (None, Some(_)) => "DIFFERS".to_string(),
                (None, None) => format!("status {}", sample.status.code().unwrap_or(-1)),
            }),
        }
    }
}
