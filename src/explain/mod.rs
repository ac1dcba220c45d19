//! `dynasour explain`: shows the hottest regions of a run, their traces, and what the guards did.
//!
//! The program runs twice: first as `run` with the same options runs it, which gives the list of heads and what
//! became of their traces; then with counters ([`counting`]). Traces that count do not race, so a head whose
//! trace `run` drops has one in the second run. The census of the second run
//! and the symbols of the mapped files ([`dynasour_guest::symbols`]) give the explanation
//! ([`model`]), which is printed as text ([`screen`]), JSON, JSON Lines or CSV. With --threshold the run that
//! counts is the same as `run`, so the first is left out.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`counting`], [`stdin`] | the two runs, and what they read from standard input |
//! | [`heat`] | which regions are hot |
//! | [`locate`] | the fragments that `--at` means |
//! | [`model`] | puts everything together that the report and its JSON show |
//! | [`guest`] | the recorded path: guest blocks with symbols and counts |
//! | [`disassembly`] | guest instructions as text |
//! | [`source_lines`] | the source lines of guest instructions |
//! | [`passes`] | the IR before and after each pass |
//! | [`native`] | the native code, with the purpose of each instruction |
//! | [`screen`], [`heads`] | the first screen, and its table of heads |
//! | [`text`], [`paint`] | parts of versions, and colours |
//! | [`rows`] | CSV |
//! | [`output`], [`progress`] | where the result goes, and a line on the terminal meanwhile |
//!
//! No module has global state. The command has one thread, but for the one that draws and those that pass
//! standard input on; the guest runs in a process of its own.
//!
//! Exit status: 0 if the run was explained, or if no code was hot (the report says so); 2 if there
//! is nothing to explain, with the reason. The guest's own end is reported, but does not become our
//! exit status.
//!
//! ```text
//! dynasour explain -- ls     dynasour run --stats-json FILE -- ls; dynasour run --threshold 24999 --count FILE -- ls
//! ```

mod counting;
mod disassembly;
pub mod guest;
mod heads;
mod heat;
mod locate;
pub mod model;
pub mod native;
pub mod output;
pub mod paint;
mod passes;
mod progress;
mod rows;
mod screen;
pub mod source_lines;
mod stdin;
mod text;

use crate::machine::{MachineArgs, TraceArgs};
use anyhow::{Context, Result, bail};
use clap::Args;
use counting::{Counted, Plan, Uncounted, ended};
use dynasour_guest::symbols::Symbols;
use dynasour_runtime::config::{NATIVE_HEAD_THRESHOLD, RaceMode, Tier};
use model::{Explainer, Record, Wanted};
use output::{Output, Terminal};
use paint::{Paint, When};
use progress::Progress;
use screen::Screen;
use std::ffi::{OsString, c_int};
use std::io::IsTerminal;
use std::path::PathBuf;
use stdin::Input;
use text::{Part, Reporter};

/// Percent of its region's instructions from which a version is shown whole in the text (guess; lower makes
/// texts longer).
const WORTH_SHOWING: f64 = 5.0;

/// Options of `explain`.
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// Explain the traces through a function (SYMBOL or SYMBOL+0xOFFSET), through a guest pc (a
    /// number), or one version (its name, such as t12)
    #[arg(long, value_name = "SYMBOL|PC")]
    at: Option<String>,
    /// How many regions to show, the hottest first: a number, or all
    #[arg(long, value_name = "N", default_value = "3", conflicts_with = "at", value_parser = parse_top)]
    top: usize,
    /// Show these parts of versions instead of a summary
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART,...")]
    show: Vec<Part>,
    /// Show all parts, and fold nothing: also cold versions, and exits that were never taken
    #[arg(long, conflicts_with = "show")]
    full: bool,
    /// Details only of versions with at least this share of their region's instructions [default: 5 in
    /// the text, 0 in other formats]
    #[arg(long, value_name = "PERCENT", conflicts_with = "at", value_parser = parse_percent)]
    at_least: Option<f64>,
    /// List the regions of the dynamic linker, too, which are summed up otherwise
    #[arg(long)]
    ld_so: bool,
    /// Also with --threshold: first run the program as `run` does, without counters, and list the heads at
    /// which traces were tried
    #[arg(long)]
    attempts: bool,
    /// Run the program only once, with counters, and list no heads
    #[arg(long, conflicts_with = "attempts")]
    no_attempts: bool,
    /// Print everything as JSON, in one value
    #[arg(long)]
    json: bool,
    /// Print everything as JSON Lines: the run, each region, each version, the sources. A line is written as
    /// soon as it is known
    #[arg(long, conflicts_with = "json")]
    jsonl: bool,
    /// Print a table of guards as CSV
    #[arg(long, conflicts_with_all = ["json", "jsonl"])]
    csv: bool,
    /// Print the JSON schema of a line of --jsonl, and end
    #[arg(long, conflicts_with_all = ["json", "jsonl", "csv"])]
    schema: bool,
    /// Write to FILE instead of standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Overwrite the file given to --output
    #[arg(long)]
    force: bool,
    /// Use colours
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = When::Auto)]
    color: When,
    /// Do not use a pager for long texts on a terminal ($DYNASOUR_PAGER, $PAGER, or less)
    #[arg(long)]
    no_pager: bool,
    /// Discard the program's standard output and error instead of passing both to standard error
    #[arg(long)]
    discard_output: bool,
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    traces: TraceArgs,
    /// Compare each trace with the code that was recorded, as for `run`, and show what was compared
    #[arg(long)]
    verify_traces: bool,
    /// Prove that each trace does what was recorded, as for `run`, and show which were proven
    #[arg(long)]
    prove_traces: bool,
    /// The program and its arguments
    #[arg(required_unless_present = "schema", trailing_var_arg = true, value_name = "PROG")]
    command: Vec<OsString>,
}

/// Parses `--top`.
fn parse_top(text: &str) -> Result<usize, String> {
    match (text, text.parse()) {
        ("all", _) => Ok(usize::MAX),
        (_, Ok(n)) if n > 0 => Ok(n),
        _ => Err("expected a number from 1, or all".to_string()),
    }
}

/// Parses a percentage.
fn parse_percent(text: &str) -> Result<f64, String> {
    let percent = text.trim_end_matches('%').trim().parse().ok();
    percent
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or_else(|| "expected a number from 0 to 100".to_string())
}

/// Runs the command; returns the exit status.
///
/// # Errors
/// Why there is nothing to explain.
pub fn run(args: &ExplainArgs) -> Result<c_int> {
    output::ignore_broken_pipes();
    if !args.schema {
        args.check()?;
    }
    let mut output = Output::open(args.output.as_deref(), args.force)?;
    match args.schema {
        true => schema(&mut output)?,
        false => explain(args, &mut output)?,
    }
    Ok(0)
}

fn schema(output: &mut Output) -> Result<()> {
    let schema = schemars::schema_for!(Record);
    output.write(|out| {
        serde_json::to_writer_pretty(&mut *out, &schema)?;
        Ok(writeln!(out)?)
    })
}

fn explain(args: &ExplainArgs, output: &mut Output) -> Result<()> {
    let (uncounted, counted) = args.runs()?;
    let census = &counted.census;
    let symbols = Symbols::read(census.images.iter().cloned().map(Into::into));
    if !counted.status.success() {
        eprintln!("dynasour: {} {}", args.command[0].display(), ended(counted.status));
    }
    let wanted = match &args.at {
        Some(asked) if !census.fragments.is_empty() => {
            Wanted::These(locate::fragments(asked, census, &symbols)?)
        }
        _ => args.hottest(),
    };
    let progress = Progress::new("explaining the traces".to_string());
    let explainer = Explainer::new(&counted, &symbols, wanted, uncounted);
    if args.json {
        let explanation = explainer.whole()?;
        return output.write(|out| {
            serde_json::to_writer_pretty(&mut *out, &explanation)?;
            Ok(writeln!(out)?)
        });
    }
    if args.jsonl {
        return output.write(|out| {
            explainer.records(|record| {
                serde_json::to_writer(&mut *out, &record)?;
                writeln!(out)?;
                Ok(out.flush()?)
            })
        });
    }
    if args.csv {
        return output.write(|out| rows::write(explainer, out));
    }
    let explanation = explainer.whole()?;
    drop(progress);
    let terminal = Terminal::of(output);
    let was_tried = explanation.header.attempts.as_ref().is_some_and(|heads| !heads.is_empty());
    let text = if explanation.header.traces == 0 && !was_tried {
        terminal.text(screen::without_traces(&explanation))
    } else {
        let paint = Paint::new(args.color, args.output.is_some());
        let parts = args.parts();
        let reporter =
            Reporter { paint, census, symbols: &symbols, parts: &parts, unfolded: args.full };
        screen::page(&reporter, &explanation, Screen::new(terminal, paint))
    };
    output.show(&text, &terminal, !args.no_pager)
}

impl ExplainArgs {
    /// Do the options fit together?
    fn check(&self) -> Result<()> {
        let tier = self.machine.tier;
        if matches!(tier, Tier::Interp | Tier::Copy) {
            bail!("--tier {tier} makes no traces to explain; expected dynamo, full or direct");
        }
        if let Some(option) = self.machine.option_without_meaning(self.machine.threshold.is_some())
        {
            bail!("{option} has no meaning with --tier {tier} and these options");
        }
        if self.prove_traces {
            crate::solver::needed()?;
        }
        Ok(())
    }

    /// The parts of versions that are shown.
    fn parts(&self) -> Vec<Part> {
        let all = self.full || self.show.contains(&Part::All);
        let is_shown = |part: &Part| all || self.show.contains(part);
        Part::EACH.into_iter().filter(is_shown).collect()
    }

    /// The hottest regions.
    fn hottest(&self) -> Wanted {
        let is_text = !(self.json || self.jsonl || self.csv);
        let percent = match is_text && !self.full {
            true => WORTH_SHOWING,
            false => 0.0,
        };
        Wanted::Hottest {
            regions: self.top,
            with_linker: self.ld_so,
            at_least: self.at_least.unwrap_or(percent) / 100.0,
        }
    }

    /// Does the program also run without counters?
    fn runs_twice(&self) -> bool {
        // `full` chooses among traces with a threshold from this on, too.
        let keeps_all = match (self.machine.tier, self.machine.threshold) {
            (_, None) => false,
            (Tier::Full, Some(threshold)) => threshold < NATIVE_HEAD_THRESHOLD,
            (_, Some(_)) => true,
        };
        let is_raced =
            matches!(self.machine.race, RaceMode::Trace | RaceMode::Floor | RaceMode::Swap);
        self.attempts || !self.no_attempts && (!keeps_all || is_raced)
    }

    /// Runs the program.
    fn runs(&self) -> Result<(Option<Uncounted>, Counted)> {
        let options = |machine: &MachineArgs| {
            let mut options = machine.options();
            options.extend(self.traces.options());
            options.extend(self.verify_traces.then(|| "--verify-traces".into()));
            options.extend(self.prove_traces.then(|| "--prove-traces".into()));
            options
        };
        let plan = Plan {
            options: options(&self.machine),
            counting: options(&self.machine.counting()),
            discard: self.discard_output,
            input: Input::new(self.runs_twice())?,
            command: &self.command,
        };
        // The guest's output would be mixed with the line that says what is done.
        let is_quiet = self.discard_output || !std::io::stderr().is_terminal();
        let says = |what: &str| {
            let program = self.command[0].display();
            is_quiet.then(|| Progress::new(format!("running {program} {what}")))
        };
        let uncounted = match self.runs_twice() {
            true => {
                let _progress = says("as `run` does");
                Some(plan.uncounted()?)
            }
            false => None,
        };
        let _progress = says("with counters");
        plan.counted().map(|counted| (uncounted, counted)).context("the run with counters")
    }
}
