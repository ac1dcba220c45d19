//! `dynasour guards`: one program under several guard placements, and the cost of a deoptimisation.
//!
//! Counts come from a counting run of each policy. Times come from runs that count nothing: each
//! round runs the program natively and once under each policy, so that a disturbance of the machine
//! affects all of them. A run whose output or status differs from native is not a measurement; its
//! row says so.
//!
//! [`compare`] measures policies, [`sweep`] rates of failing guards. Both use a [`Session`], which
//! runs the program and checks its output. [`counts`], [`fit`] and [`report`] make numbers of it.
//! One thread runs everything; no lock.
//!
//! ```text
//! dynasour guards --policies eager,default --runs 3 -- ./a.out
//! native, native (must agree), eager counted, default counted,
//! 3 x (native, eager, default; the next round begins with default), 3 x costs of deoptimisations
//! ```

mod compare;
mod counts;
mod fit;
mod report;
mod sweep;

pub use report::Report;
pub use sweep::Curve;

use crate::bench::Clock;
use crate::bench::measure::{Invocation, Sample};
use crate::bench::{plan, progress};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dynasour_runtime::config::{Placement, Tier, placement};
use indicatif::ProgressBar;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Options of `guards`.
#[derive(Args, Debug)]
pub struct GuardsArgs {
    /// Policies to compare; all if not given
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',',
          value_parser = placement::placement)]
    policies: Vec<&'static dyn Placement>,
    /// Rounds; medians are shown
    #[arg(long, default_value_t = 5, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Measure instead the slowdown for several rates of failing guards, and the cost of one
    /// deoptimisation
    #[arg(long)]
    chaos_sweep: bool,
    /// Rates of the sweep: each guard fails with probability 1/N
    #[arg(long, value_name = "N,...", value_delimiter = ',', requires = "chaos_sweep",
          default_values_t = sweep::RATES, value_parser = clap::value_parser!(u32).range(1..))]
    rates: Vec<u32>,
    /// Tier to run under: dynamo or full
    #[arg(long, default_value_t = Tier::Dynamo, value_name = "TIER")]
    tier: Tier,
    /// Executions of a trace head before it is compiled [default: the tier's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    threshold: Option<u32>,
    /// Compare each trace with the code that was recorded, as for `run`, in the run of each policy that
    /// is not timed
    #[arg(long, conflicts_with = "chaos_sweep")]
    verify_traces: bool,
    /// Prove that each trace does what was recorded, as for `run`, in the run of each policy that is not
    /// timed
    #[arg(long, conflicts_with = "chaos_sweep")]
    prove_traces: bool,
    /// The time that is measured
    #[arg(long, value_enum, default_value_t = Clock::Cpu)]
    clock: Clock,
    /// The program's standard input [default: /dev/null]
    #[arg(long, value_name = "FILE")]
    stdin: Option<PathBuf>,
    /// Do not measure the cost of a deoptimisation under each policy
    #[arg(long)]
    no_deopt_cost: bool,
    /// Seconds after which a run is killed
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    limit: u64,
    /// Print JSON instead of a table
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print comma-separated values instead of a table
    #[arg(long)]
    csv: bool,
    /// Also write the output to FILE
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Overwrite the file given to --save
    #[arg(long, requires = "save")]
    force: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROG")]
    command: Vec<OsString>,
}

/// Runs the command. The exit status is 1 if some run differs from native.
///
/// # Errors
/// Why nothing was measured.
pub fn run(args: &GuardsArgs) -> Result<i32> {
    if let Some(save) = args.save.as_ref().filter(|save| !args.force && save.exists()) {
        bail!("{} exists; --force overwrites it", save.display());
    }
    if let Some(parent) = args.save.as_ref().and_then(|save| save.parent()) {
        let there = parent.as_os_str().is_empty() || parent.is_dir();
        ensure!(there, "cannot save there: {} is no directory", parent.display());
    }
    match args.tier {
        Tier::Dynamo | Tier::Full => {}
        Tier::Direct => bail!(
            "the tier direct makes its traces where samples happen to fall, so that the counts of two \
             runs cannot be compared; dynamo and full repeat theirs"
        ),
        tier @ (Tier::Interp | Tier::Copy) => {
            bail!("the tier {tier} makes no traces, so it has no guards")
        }
    }
    if args.prove_traces {
        crate::solver::needed()?;
    }
    let session = Session::new(args)?;
    let expected = session.expected()?;
    let (text, agree) = if args.chaos_sweep {
        sweep::run(&session, &expected)?
    } else {
        compare::run(&session, &expected)?
    };
    session.bar.finish_and_clear();
    if let Some(save) = &args.save {
        std::fs::write(save, &text).with_context(|| format!("cannot write {}", save.display()))?;
    }
    let mut stdout = std::io::stdout();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write the results")?;
    Ok(i32::from(!agree))
}

/// Processor seconds of a native run below which the program hardly reaches its hot code (guess).
/// The command then warns that it measures start-up.
const START_UP: f64 = 0.02;

/// The fields of `--stats-json` that are used here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
struct RunStats {
    fragments: u64,
    fragment_entries: u64,
    deopts: BTreeMap<String, u64>,
    code_bytes: u64,
    compile_nanoseconds: u64,
}

impl RunStats {
    fn all_deopts(&self) -> u64 {
        self.deopts.values().sum()
    }
}

/// A run under dynasour whose output and status equal the native ones.
struct Run {
    sample: Sample,
    stats: RunStats,
}

/// The state of one study.
struct Session<'a> {
    args: &'a GuardsArgs,
    own: PathBuf,
    /// Directory for statistics and censuses.
    scratch: tempfile::TempDir,
    guest: Invocation,
    bar: ProgressBar,
}

impl<'a> Session<'a> {
    fn new(args: &'a GuardsArgs) -> Result<Session<'a>> {
        plan::find(&args.command[0].to_string_lossy())?;
        if let Some(stdin) = &args.stdin {
            std::fs::File::open(stdin)
                .with_context(|| format!("cannot read {}", stdin.display()))?;
        }
        Ok(Session {
            args,
            own: std::env::current_exe().context("cannot find this program")?,
            scratch: tempfile::tempdir().context("cannot make a temporary directory")?,
            guest: Invocation { argv: args.command.clone(), stdin: args.stdin.clone() },
            bar: progress(),
        })
    }

    fn program(&self) -> String {
        self.guest.argv[0].to_string_lossy().into_owned()
    }

    fn threshold(&self) -> u32 {
        self.args.threshold.unwrap_or(self.args.tier.head_threshold())
    }

    fn clock(&self, sample: &Sample) -> f64 {
        match self.args.clock {
            Clock::Wall => sample.wall,
            Clock::Cpu => sample.cpu,
        }
    }

    fn run_once(&self, run: &Invocation) -> Result<Sample> {
        let sample = run.run(Path::new("."), Duration::from_secs(self.args.limit))?;
        self.bar.inc(1);
        Ok(sample)
    }

    /// The native output and status, after two native runs agreed.
    fn expected(&self) -> Result<Sample> {
        self.bar.set_message("native");
        let (first, second) = (self.run_once(&self.guest)?, self.run_once(&self.guest)?);
        let program = self.program();
        for sample in [&first, &second] {
            ensure!(!sample.timed_out, "{program}: natively over {} s", self.args.limit);
        }
        if first.status != second.status {
            bail!(
                "{program}: two native runs end differently ({}, {}): nothing can be compared",
                first.status,
                second.status
            );
        }
        if let Some(at) = difference(&first.stdout, &second.stdout) {
            bail!(
                "{program}: two native runs print different things (from byte {at} on): nothing \
                 can be compared"
            );
        }
        if first.cpu < START_UP {
            self.bar.suspend(|| {
                let milliseconds = first.cpu * 1e3;
                eprintln!(
                    "dynasour: {program}: {milliseconds:.0} ms natively: the measurement is mostly \
                     start-up"
                );
            });
        }
        if !first.status.success() {
            self.bar.suspend(|| {
                eprintln!(
                    "dynasour: {program}: ends natively with {}; measured nonetheless",
                    first.status
                )
            });
        }
        Ok(first)
    }

    /// The command line of the program under dynasour with these options, and the file of its
    /// statistics.
    fn launch(&self, options: &[&str]) -> (Invocation, PathBuf) {
        let stats = self.scratch.path().join("stats.json");
        let threshold = self.threshold().to_string();
        let fixed = ["run", "--tier", &self.args.tier.to_string(), "--threshold", &threshold]
            .map(OsString::from);
        let argv = [OsString::from(&self.own)]
            .into_iter()
            .chain(fixed)
            .chain(options.iter().map(OsString::from))
            .chain(["--stats-json".into(), stats.clone().into(), "--".into()])
            .chain(self.guest.argv.iter().cloned())
            .collect();
        (Invocation { argv, stdin: self.guest.stdin.clone() }, stats)
    }

    /// Runs the program with these options of `run`. The outer error means that nothing could be
    /// run; the inner one says what went wrong with the guest.
    fn run_with(&self, options: &[&str], expected: &Sample) -> Result<Result<Run, String>> {
        let (invocation, file) = self.launch(options);
        let _ = std::fs::remove_file(&file);
        let sample = self.run_once(&invocation)?;
        if let Some(trouble) = trouble(&sample, expected, self.args.limit) {
            let line = invocation.line();
            self.bar.suspend(|| eprintln!("dynasour: {}: {trouble}: {line}", options.join(" ")));
            return Ok(Err(trouble));
        }
        let stats = std::fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok());
        Ok(stats.map(|stats| Run { sample, stats }).ok_or_else(|| "no statistics".to_string()))
    }

    /// The message for a program in which nothing is hot.
    fn never_hot(&self, expected: &Sample) -> String {
        format!(
            "{} never gets hot: no trace was made in a run of {:.3} s natively (--threshold {}), \
             so there are no guards; a longer input, or a lower --threshold, may help",
            self.program(),
            expected.cpu,
            self.threshold()
        )
    }
}

/// What is wrong with a run; `None` if nothing is.
fn trouble(sample: &Sample, expected: &Sample, limit: u64) -> Option<String> {
    if sample.timed_out {
        return Some(format!("over {limit} s"));
    }
    if sample.status != expected.status {
        return Some(match sample.status.signal() {
            Some(signal) => format!("SIGNAL {signal}"),
            None => format!("STATUS {}", sample.status.code().unwrap_or(-1)),
        });
    }
    (sample.stdout != expected.stdout).then(|| "DIFFERS".to_string())
}

/// The first byte at which two outputs differ.
fn difference(a: &[u8], b: &[u8]) -> Option<usize> {
    let common = a.iter().zip(b).position(|(a, b)| a != b);
    common.or_else(|| (a.len() != b.len()).then_some(a.len().min(b.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found() {
        assert_eq!(difference(b"abc", b"abc"), None);
        assert_eq!(difference(b"abc", b"abd"), Some(2));
        assert_eq!(difference(b"abc", b"ab"), Some(2));
        assert_eq!(difference(b"", b"x"), Some(0));
    }
}
