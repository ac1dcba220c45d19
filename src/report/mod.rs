//! `dynasour report`: one HTML page that shows what ran.
//!
//! The page is made from JSON that other commands have written, or from a program that is explained
//! first. It has everything that it needs in itself, so it can be kept, sent and opened anywhere.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`input`] | recognises and checks the JSON of `explain`, `guards` and `bench` |
//! | [`compact`] | what the page shows of an explanation, in a bounded size |
//! | [`page`] | the page: template, styles, scripts and the data |
//! | `assets/` | the front end |
//! | `vendor/` | parts of the front end that others maintain; its README has their versions |
//!
//! *Invariants.* The output is opened before a guest starts, and is complete or not there. The page
//! refers to nothing outside of itself. No lock: the command has one thread, and a guest runs in a
//! process of its own.
//!
//! ```text
//! dynasour report -- ./a.out             dynasour explain --jsonl --attempts … -- ./a.out; the page of that
//! dynasour report a.json b.json          the page of both files
//! ```
//!
//! Exit status: 0, or 2 if there is no page, with the reason.

mod compact;
mod input;
mod page;

use crate::explain::output::{Output, ignore_broken_pipes};
use anyhow::{Context, Result, ensure};
use clap::Args;
use dynasour_runtime::config::{Placement, Tier, placement};
use input::Input;
use std::ffi::{OsString, c_int};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Percent of its region's instructions from which the page of a program has the details of a version (guess:
/// the details of colder ones take time and are left out first).
const WORTH_SHOWING: &str = "5";

/// Options of `report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// JSON that `explain --json` or `--jsonl`, `guards --json` (also with --chaos-sweep), `bench --json` or `bench
    /// --save` has written; - is standard input
    #[arg(value_name = "FILE", required_unless_present = "command")]
    files: Vec<PathBuf>,
    /// Write the page to FILE; - is standard output
    #[arg(long, value_name = "FILE", default_value = "dynasour-report.html")]
    output: PathBuf,
    /// Overwrite the file given to --output
    #[arg(long)]
    force: bool,
    /// With a program: how many regions to show, the hottest first
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..))]
    top: u32,
    /// With a program: the tier to run under, as for `explain`
    #[arg(long, value_name = "TIER", requires = "command")]
    tier: Option<Tier>,
    /// With a program: executions of a trace head before it is compiled, as for `explain`
    #[arg(long, value_name = "N", requires = "command",
          value_parser = clap::value_parser!(u32).range(1..))]
    threshold: Option<u32>,
    /// With a program: guard placement, as for `explain`
    #[arg(long, value_name = "NAME", requires = "command", value_parser = placement::placement)]
    policy: Option<&'static dyn Placement>,
    /// With a program: discard its standard output and error instead of passing both to standard
    /// error
    #[arg(long, requires = "command")]
    discard_output: bool,
    /// A program and its arguments: it is explained, and the page shows the result
    #[arg(last = true, value_name = "PROG")]
    command: Vec<OsString>,
}

/// Runs the command; returns the exit status.
///
/// # Errors
/// Why there is no page.
pub fn run(args: &ReportArgs) -> Result<c_int> {
    let mut inputs = Vec::new();
    for file in &args.files {
        inputs.push(input::recognise(&name_of(file), &read(file)?)?);
    }
    ignore_broken_pipes();
    let mut output = Output::open(Some(&*args.output).filter(|path| !is_dash(path)), args.force)?;
    inputs.extend(explained(args)?);
    let page = page::page(&inputs)?;
    output.write(|out| Ok(out.write_all(page.as_bytes())?))?;
    if let Some(path) = output.path() {
        eprintln!("dynasour: {}: {} kB", path.display(), page.len().div_ceil(1000));
    }
    Ok(0)
}

/// The contents of an input file.
fn read(file: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if is_dash(file) {
        std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
    } else {
        bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    }
    Ok(bytes)
}

fn is_dash(file: &Path) -> bool {
    file == Path::new("-")
}

/// An input file in messages and on the page.
fn name_of(file: &Path) -> String {
    if is_dash(file) { "standard input".to_string() } else { file.display().to_string() }
}

/// The explanation of the program on the command line; none if there is no program.
fn explained(args: &ReportArgs) -> Result<Option<Input>> {
    let Some(program) = args.command.first() else { return Ok(None) };
    let own = std::env::current_exe().context("cannot find this program")?;
    let directory = tempfile::tempdir().context("cannot make a temporary directory")?;
    let file = directory.path().join("explanation.jsonl");
    let mut explain = Command::new(own);
    explain.args(["explain", "--jsonl", "--attempts", "--top", &args.top.to_string()]);
    explain.args(["--at-least", WORTH_SHOWING, "--output"]).arg(&file);
    if let Some(tier) = args.tier {
        explain.args(["--tier", &tier.to_string()]);
    }
    if let Some(threshold) = args.threshold {
        explain.args(["--threshold", &threshold.to_string()]);
    }
    if let Some(policy) = args.policy {
        explain.args(["--policy", policy.name()]);
    }
    if args.discard_output {
        explain.arg("--discard-output");
    }
    let status = explain.arg("--").args(&args.command).status().context("cannot run explain")?;
    // `explain` has already printed the reason.
    ensure!(status.success(), "{} was not explained, so there is no page", program.display());
    let words = args.command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>();
    input::recognise(&words.join(" "), &read(&file)?).map(Some)
}
