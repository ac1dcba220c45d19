//! `dynasour guards`: one program under several guard placements, and the cost of a deoptimisation.
//!
//! Counts come from a counting run of each policy, in which every head is compiled at its N-th
//! execution and every trace is kept, so that the policies have the same traces. Times come from runs
//! that count nothing. They have the user's options and no others: without `--threshold`, traces
//! are found by samples and race with the code that they replace. Each
//! round runs the program natively and once under each policy, so that a disturbance of the machine
//! affects all of them. A run whose output or status differs from native is not a measurement; its
//! row says so.
//!
//! [`compare`] measures policies, [`sweep`] rates of failing guards. [`counterfactual`] and [`sites`] say
//! more of the counts. Both use a [`Session`], which
//! runs the program and checks its output. [`counts`], [`fit`] and [`report`] make numbers of it, [`text`] and [`table`] show them.
//! [`study`] is about many programs (`--list`), of which one that cannot be measured does not stop
//! the others. One thread runs everything; no lock.
//!
//! ```text
//! dynasour guards --policies eager,default --runs 3 -- ./a.out
//! native, native (must agree), eager counted, default counted,
//! 3 x (native, eager, default; the next round begins with default), 3 x costs of deoptimisations
//! ```

mod compare;
mod counterfactual;
mod counts;
mod fit;
mod pipeline;
mod report;
mod sites;
mod study;
mod sweep;
mod table;
mod text;

pub use report::Report;
pub use sweep::Curve;

use crate::bench::Clock;
use crate::bench::measure::{Invocation, Sample, difference};
use crate::bench::output::{Output, check_distinct, line};
use crate::bench::rounds::Rounds;
use crate::bench::study::{Shard, read_list};
use crate::bench::{merge, plan, progress};
use crate::explain::paint::{Paint, When};
use crate::machine::MachineArgs;
use anyhow::{Context, Result, bail, ensure};
use clap::{ArgGroup, Args};
use dynasour_runtime::config::{NATIVE_HEAD_THRESHOLD, Placement, Tier, placement};
use dynasour_runtime::observe::attempts::Attempt;
use dynasour_runtime::observe::stats::{RaceResult, RaceVerdict};
use indicatif::ProgressBar;
use pipeline::Pipeline;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use study::{Found, Study};

/// Options of `guards`.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("what").required(true).args(["command", "list", "merge", "schema"])))]
#[command(group(ArgGroup::new("form").args(["json", "jsonl", "csv"])))]
pub struct GuardsArgs {
    /// Policies to compare; all if not given
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',',
          value_parser = placement::placement)]
    policies: Vec<&'static dyn Placement>,
    /// Also compare a pipeline of your own: these passes, in this order, under the assumptions and
    /// anchors of POLICY [default of POLICY: default]. May be given several times
    #[arg(
        long = "pipeline",
        value_name = "NAME=[POLICY:]PASS,...",
        conflicts_with = "chaos_sweep"
    )]
    pipelines: Vec<Pipeline>,
    #[command(flatten)]
    rounds: Rounds,
    /// Also say how far each policy is from the best placement of its guards: the fewest executions with
    /// which what it checks could be checked, by measured frequencies
    #[arg(long, conflicts_with = "chaos_sweep")]
    counterfactual: bool,
    /// Also compare the policies guard by guard: the N sites in which their executions and failures
    /// differ most
    #[arg(long, value_name = "N", conflicts_with = "chaos_sweep",
          value_parser = clap::value_parser!(u32).range(1..))]
    by_site: Option<u32>,
    /// Measure instead the slowdown for several rates of failing guards, and the cost of one
    /// deoptimisation
    #[arg(long)]
    chaos_sweep: bool,
    /// Rates of the sweep: each guard fails with probability 1/N
    #[arg(long, value_name = "N,...", value_delimiter = ',', requires = "chaos_sweep",
          default_values_t = sweep::RATES, value_parser = clap::value_parser!(u32).range(1..))]
    rates: Vec<u32>,
    #[command(flatten)]
    machine: MachineArgs,
    /// Compare each trace with the code that was recorded, as for `run`, in the run of each policy
    /// that is not timed
    #[arg(long, conflicts_with = "chaos_sweep")]
    verify_traces: bool,
    /// Prove that each trace does what was recorded, as for `run`, in the run of each policy that
    /// is not timed
    #[arg(long, conflicts_with = "chaos_sweep")]
    prove_traces: bool,
    /// The time that is measured
    #[arg(long, value_enum, default_value_t = Clock::Cpu)]
    clock: Clock,
    /// The program's standard input [default: /dev/null]
    #[arg(long, visible_alias = "input", value_name = "FILE")]
    stdin: Option<PathBuf>,
    /// Time a program, too, that takes less than 20 ms natively, which is mostly start-up
    #[arg(long)]
    short: bool,
    /// Do not measure the cost of a deoptimisation under each policy
    #[arg(long)]
    no_deopt_cost: bool,
    /// Seconds after which a run is killed
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    limit: u64,
    /// Measure the programs of a file of command lines, one in each line
    #[arg(long, value_name = "FILE")]
    list: Option<PathBuf>,
    /// Only part I of N of the list: every N-th program, from the I-th on
    #[arg(long, value_name = "I/N", conflicts_with_all = ["command", "merge", "schema"])]
    shard: Option<Shard>,
    /// Measure nothing: put the results of shards together (files of --jsonl), and print them
    #[arg(long, value_name = "FILE", num_args = 1..)]
    merge: Vec<PathBuf>,
    /// Print the JSON Schema of a line of --jsonl
    #[arg(long)]
    schema: bool,
    /// Print JSON instead of a table
    #[arg(long, conflicts_with_all = ["list", "merge"])]
    json: bool,
    /// Print JSON Lines: a line for each program, as soon as it is measured
    #[arg(long)]
    jsonl: bool,
    /// Print comma-separated values instead of a table
    #[arg(long)]
    csv: bool,
    /// When the table has colours: differences that noise does not explain
    #[arg(long, value_enum, default_value_t = When::Auto, value_name = "WHEN")]
    color: When,
    /// Also write the output to FILE
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Overwrite the file given to --save
    #[arg(long, requires = "save")]
    force: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, value_name = "PROG")]
    command: Vec<OsString>,
}

/// Runs the command. The exit status is 1 if some run differs from native, or if programs of a
/// merged study are missing.
///
/// # Errors
/// Why nothing was measured.
pub fn run(args: &GuardsArgs) -> Result<i32> {
    if args.schema {
        Output::stdout()?.write(&study::schema()?)?;
        return Ok(0);
    }
    match args.machine.tier {
        Tier::Dynamo | Tier::Full => {}
        Tier::Direct => bail!(
            "the tier direct makes its traces where samples happen to fall, so that the counts of two \
             runs cannot be compared; with --sample every=N they repeat, but code that computes comes \
             to the runtime too seldom to get traces. dynamo and full repeat their counts"
        ),
        tier @ (Tier::Interp | Tier::Copy) => {
            bail!("the tier {tier} makes no traces, so it has no guards")
        }
    }
    if let Some(option) = args.machine.option_without_meaning(args.machine.threshold.is_some()) {
        let with = if args.machine.threshold.is_some() { " and --threshold" } else { "" };
        bail!("{option} has no meaning with --tier {}{with}", args.machine.tier);
    }
    if args.prove_traces {
        crate::solver::needed()?;
    }
    for (i, pipeline) in args.pipelines.iter().enumerate() {
        let is_new = args.pipelines[..i].iter().all(|before| before.name != pipeline.name);
        ensure!(is_new, "two pipelines have the name {}", pipeline.name);
    }
    ensure!(!args.chaos_sweep || args.policies.len() <= 1, "--chaos-sweep takes one policy");
    if let Some(stdin) = &args.stdin {
        std::fs::File::open(stdin).with_context(|| format!("cannot read {}", stdin.display()))?;
    }
    let commands = match &args.list {
        Some(list) => read_list(list)?,
        None => vec![args.command.clone()],
    };
    let mut results = Results::open(args)?;
    if !args.merge.is_empty() {
        let (studies, problems) = merge::merge::<Study>(&args.merge)?;
        studies.iter().try_for_each(|study| results.add(study))?;
        problems.iter().for_each(|problem| eprintln!("dynasour: {problem}"));
        return Ok(i32::from(!results.agree || !problems.is_empty()));
    }
    let bar = progress();
    let shard = args.shard.unwrap_or_default();
    for (index, command) in commands.iter().enumerate().filter(|(index, _)| shard.has(*index)) {
        bar.reset();
        bar.set_length(0);
        if args.list.is_some() {
            bar.set_prefix(format!("{}: ", command[0].to_string_lossy()));
        }
        let mut study = Study::new(index, commands.len(), command);
        match measure(args, command, &bar, &mut study) {
            Ok(found) => study.found = found,
            Err(error) if args.list.is_some() => {
                bar.suspend(|| eprintln!("dynasour: {error:#}"));
                study.found = Found::Refused { refused: format!("{error:#}") };
            }
            Err(error) => return Err(error),
        }
        bar.suspend(|| results.add(&study))?;
    }
    bar.finish_and_clear();
    results.finish()?;
    Ok(i32::from(!results.agree))
}

/// Measures one program.
fn measure(
    args: &GuardsArgs,
    command: &[OsString],
    bar: &ProgressBar,
    study: &mut Study,
) -> Result<Found> {
    let session = Session::new(args, command, bar)?;
    let expected = session.expected()?;
    study.too_short = session.native_seconds_to_try(&expected);
    Ok(if args.chaos_sweep {
        Found::Sweep(Box::new(sweep::run(&session, &expected)?))
    } else {
        Found::Comparison(Box::new(compare::run(&session, &expected)?))
    })
}

/// Where results go, and what they have been so far.
struct Results<'a> {
    args: &'a GuardsArgs,
    outputs: Vec<Output>,
    /// Whether something was written.
    begun: bool,
    /// Whether every run so far agreed with native.
    agree: bool,
}

impl<'a> Results<'a> {
    fn open(args: &'a GuardsArgs) -> Result<Results<'a>> {
        let mut outputs = vec![Output::stdout()?];
        if let Some(save) = &args.save {
            outputs.push(Output::open(save, args.force)?);
        }
        check_distinct(&outputs)?;
        Ok(Results { args, outputs, begun: false, agree: true })
    }

    /// Writes the results of one program.
    fn add(&mut self, study: &Study) -> Result<()> {
        let first = !self.begun;
        let gap = if first { "" } else { "\n" };
        let table = |to_file| gap.to_string() + &study.table(Paint::new(self.args.color, to_file));
        let is_table = !(self.args.jsonl || self.args.json || self.args.csv);
        let text = if self.args.jsonl {
            line(study)?
        } else if self.args.json {
            serde_json::to_string_pretty(study).context("results")? + "\n"
        } else if self.args.csv {
            study.csv(first)
        } else {
            table(false)
        };
        // Colours are for the terminal.
        let saved = if is_table && self.outputs.len() > 1 { table(true) } else { text.clone() };
        self.begun |= !text.is_empty();
        self.agree &= study.all_agree();
        let texts = std::iter::once(&text).chain(std::iter::repeat(&saved));
        self.outputs.iter_mut().zip(texts).try_for_each(|(output, text)| output.write(text))
    }

    /// Ends. A shard without programs leaves an empty file, not an older one.
    fn finish(&mut self) -> Result<()> {
        self.outputs.iter_mut().try_for_each(|output| output.write(""))
    }
}

/// Processor seconds of a native run below which the program hardly reaches its hot code (guess).
/// The command then warns that it measures start-up.
const START_UP: f64 = 0.02;

/// Processor seconds of a native run that is suggested instead (guess: start-up is a tenth then).
const LONG_ENOUGH: f64 = 10.0 * START_UP;

/// What a run is for, which decides the options of its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Its counts, or its failures, are compared: it makes the same traces under each policy.
    Compare,
    /// Its time is measured: it is what `dynasour run` does with the user's options.
    Time,
}

/// The fields of `--stats-json` that are used here.
#[derive(Debug, Clone, Default, Deserialize)]
struct RunStats {
    fragments: u64,
    undone: u64,
    outdated: u64,
    races: Vec<RaceResult>,
    heads: Vec<Attempt>,
    fragment_entries: u64,
    deopts: BTreeMap<String, u64>,
    code_bytes: u64,
    compile_nanoseconds: u64,
}

impl RunStats {
    fn all_deopts(&self) -> u64 {
        self.deopts.values().sum()
    }

    /// Traces that were made and have neither lost their race nor been dropped for a broken assumption or
    /// because the guest goes other ways.
    fn kept(&self) -> u64 {
        let lost = self.races.iter().filter(|race| race.verdict == RaceVerdict::Floor).count();
        self.fragments.saturating_sub(lost as u64 + self.undone + self.outdated)
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
    bar: &'a ProgressBar,
}

impl<'a> Session<'a> {
    fn new(
        args: &'a GuardsArgs,
        command: &[OsString],
        bar: &'a ProgressBar,
    ) -> Result<Session<'a>> {
        plan::find(&command[0].to_string_lossy())?;
        Ok(Session {
            args,
            own: std::env::current_exe().context("cannot find this program")?,
            scratch: tempfile::tempdir().context("cannot make a temporary directory")?,
            guest: Invocation { argv: command.to_vec(), stdin: args.stdin.clone() },
            bar,
        })
    }

    fn program(&self) -> String {
        self.guest.argv[0].to_string_lossy().into_owned()
    }

    /// `--threshold` of the runs that are compared by counts.
    fn threshold(&self) -> u32 {
        self.args.machine.counting_threshold()
    }

    /// The options of `run` for the machine.
    fn machine(&self, purpose: Purpose) -> Vec<OsString> {
        match purpose {
            Purpose::Compare => self.args.machine.counting().options(),
            Purpose::Time => self.args.machine.options(),
        }
    }

    /// The options of timed runs as text.
    fn timed_options(&self) -> String {
        let options = self.machine(Purpose::Time);
        shell_words::join(options.iter().map(|option| option.to_string_lossy()))
    }

    fn clock(&self, sample: &Sample) -> f64 {
        match self.args.clock {
            Clock::Wall => sample.wall,
            Clock::Cpu => sample.cpu,
        }
    }

    fn run_once(&self, run: &Invocation) -> Result<Sample> {
        let sample = run.run(Path::new("."), Duration::from_secs(self.args.limit))?;
        if self.bar.length() <= Some(self.bar.position()) {
            self.bar.inc_length(1);
        }
        self.bar.inc(1);
        Ok(sample)
    }

    /// If a native run is so short that start-up is most of it: seconds that it should take at
    /// least.
    fn native_seconds_to_try(&self, native: &Sample) -> Option<f64> {
        (native.cpu < START_UP).then_some(LONG_ENOUGH)
    }

    /// Are there to be timed runs? Those of a program that is too short would say nothing.
    fn is_timed(&self, native: &Sample) -> bool {
        self.args.short || self.native_seconds_to_try(native).is_none()
    }

    /// The native output and status, after two native runs agreed. Says if the program is too short to time.
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
        if let Some(seconds) = self.native_seconds_to_try(&first).filter(|_| !self.args.short) {
            let milliseconds = first.cpu * 1e3;
            let longer = (seconds / first.cpu.max(1e-3)).ceil();
            let refusal = format!(
                "{program} is too short to time: of {milliseconds:.0} ms natively most is start-up; let it run \
                 at least {seconds:.1} s, about {longer:.0} times as long, or time it nonetheless with --short"
            );
            if self.args.chaos_sweep {
                bail!("{refusal}");
            }
            self.bar.suspend(|| eprintln!("dynasour: {refusal}"));
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
    fn launch(&self, purpose: Purpose, options: &[&str]) -> (Invocation, PathBuf) {
        let stats = self.scratch.path().join("stats.json");
        let argv = [OsString::from(&self.own), "run".into()]
            .into_iter()
            .chain(self.machine(purpose))
            .chain(options.iter().map(OsString::from))
            .chain(["--stats-json".into(), stats.clone().into(), "--".into()])
            .chain(self.guest.argv.iter().cloned())
            .collect();
        (Invocation { argv, stdin: self.guest.stdin.clone() }, stats)
    }

    /// Runs the program with these options of `run`. The outer error means that nothing could be
    /// run; the inner one says what went wrong with the guest.
    fn run_with(
        &self,
        purpose: Purpose,
        options: &[&str],
        expected: &Sample,
    ) -> Result<Result<Run, String>> {
        let (invocation, file) = self.launch(purpose, options);
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

    /// The message for a program of which a run made no trace. `heads`: those at which one was tried.
    fn no_trace(&self, expected: &Sample, heads: &[Attempt]) -> String {
        let (program, threshold) = (self.program(), self.threshold());
        let Some(head) = heads.first() else {
            return format!(
                "{program} never gets hot: nothing was executed {threshold} times (--threshold) in a \
                 run of {:.3} s natively, so there are no guards; a longer input, or a lower \
                 --threshold, may help",
                expected.cpu,
            );
        };
        format!(
            "{program} gets hot, but no trace was made ({} at {}), so there are no guards; another \
             --threshold may help (in full, below {NATIVE_HEAD_THRESHOLD} all traces are kept)",
            head.outcome, head.symbol
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
