//! `dynasour explain`: shows the hottest regions of a run, their traces, and what the guards did.
//!
//! The program runs once under `run --count --count-detail` ([`counting`]). The census of that run
//! and the symbols of the mapped files ([`dynasour_guest::symbols`]) give the explanation
//! ([`model`]), which is printed as text ([`text`]) or as JSON. With `--attempts` the program runs
//! once more without counters, because traces that count do not race.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`counting`] | runs the program and reads the census that the run writes |
//! | [`heat`] | which regions are hot |
//! | [`locate`] | the fragments that `--at` means |
//! | [`model`] | puts everything together that the report and its JSON show |
//! | [`guest`] | the recorded path: guest blocks with symbols and counts |
//! | [`disassembly`] | guest instructions as text |
//! | [`source_lines`] | the source lines of guest instructions |
//! | [`passes`] | the IR before and after each pass |
//! | [`origins`] | for which guest instruction each line of the IR is |
//! | [`native`] | the native code, with the purpose of each instruction |
//! | [`text`], [`paint`] | the report, and its colours |
//!
//! No module has global state or takes a lock: the command has one thread, and the guest runs in a
//! process of its own.
//!
//! Exit status: 0 if the run was explained, or if no code was hot (the report says so); 2 if there
//! is nothing to explain, with the reason. The guest's own end is reported, but does not become our
//! exit status.

mod counting;
mod disassembly;
pub mod guest;
mod heat;
mod locate;
pub mod model;
pub mod native;
mod origins;
pub mod paint;
mod passes;
pub mod source_lines;
mod text;

use anyhow::{Context, Result, ensure};
use clap::Args;
use counting::{Plan, ended};
use dynasour_guest::symbols::Symbols;
use dynasour_runtime::config::{Placement, Tier, parse_pass, parse_trace_pass, placement};
use dynasour_runtime::observe::attempts;
use model::{Explanation, Wanted};
use paint::{Paint, When};
use std::ffi::{OsString, c_int};
use std::io::Write;
use std::path::PathBuf;
use text::{Part, Reporter, number};

/// Options of `explain`.
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// Explain the traces through a function (SYMBOL or SYMBOL+0xOFFSET), through a guest pc (a
    /// number), or one version (its name, such as t12)
    #[arg(long, value_name = "SYMBOL|PC")]
    at: Option<String>,
    /// How many regions to show, the hottest first
    #[arg(long, value_name = "N", default_value_t = 3, conflicts_with = "at",
          value_parser = clap::value_parser!(u32).range(1..))]
    top: u32,
    /// Which parts of a version to show
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART,...",
          default_values_t = [Part::Path, Part::Guards, Part::Anchors, Part::Passes, Part::Ir,
                              Part::Native])]
    show: Vec<Part>,
    /// Run the program once more, without counters, and list the heads at which traces were tried:
    /// their share of the time, why none was made, or how the trace's race has ended
    #[arg(long)]
    attempts: bool,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
    /// Write to FILE instead of standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Overwrite the file given to --output
    #[arg(long)]
    force: bool,
    /// Use colours
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = When::Auto)]
    color: When,
    /// Discard the program's standard output and error instead of passing both to standard error
    #[arg(long)]
    discard_output: bool,
    /// Tier to run under: dynamo, full or direct
    #[arg(long, value_name = "TIER", default_value_t = Tier::Dynamo, value_parser = parse_tier)]
    tier: Tier,
    /// Executions of a trace head before it is compiled, as for `run`
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    threshold: Option<u32>,
    /// Guard placement, as for `run`; `dynasour guards --help` lists them
    #[arg(long, value_name = "NAME", value_parser = placement::placement,
          default_value = "default")]
    policy: &'static dyn Placement,
    /// Run these optimiser passes, in this order, instead of those of the policy, as for `run`
    #[arg(long, value_name = "PASS,...", value_delimiter = ',', value_parser = parse_trace_pass)]
    passes: Vec<String>,
    /// Do not run these optimiser passes
    #[arg(long, value_name = "PASS,...", value_delimiter = ',', value_parser = parse_pass)]
    skip_pass: Vec<String>,
    /// Compare each trace with the code that was recorded, as for `run`, and show what was compared
    #[arg(long)]
    verify_traces: bool,
    /// Prove that each trace does what was recorded, as for `run`, and show which were proven
    #[arg(long)]
    prove_traces: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROG")]
    command: Vec<OsString>,
}

fn parse_tier(text: &str) -> Result<Tier, String> {
    match text.parse() {
        Ok(tier @ (Tier::Dynamo | Tier::Full | Tier::Direct)) => Ok(tier),
        Ok(_) | Err(_) => Err("expected dynamo, full or direct, which make traces".to_string()),
    }
}

/// Runs the command; returns the exit status.
///
/// # Errors
/// Why there is nothing to explain.
pub fn run(args: &ExplainArgs) -> Result<c_int> {
    if let Some(output) = &args.output {
        ensure!(
            args.force || !output.exists(),
            "{} exists; --force overwrites it",
            output.display()
        );
    }
    if args.prove_traces {
        crate::solver::needed()?;
    }
    let plan = plan(args);
    let counted = plan.run()?;
    let attempts = if args.attempts { Some(plan.attempts()?) } else { None };
    let census = &counted.census;
    let symbols = Symbols::read(census.images.iter().cloned().map(Into::into));
    let program = args.command[0].display();
    if !counted.status.success() {
        eprintln!("dynasour: {program} {}", ended(counted.status));
    }
    let wanted = match &args.at {
        Some(asked) if !census.fragments.is_empty() => {
            Wanted::These(locate::fragments(asked, census, &symbols)?)
        }
        _ => Wanted::Hottest(args.top as usize),
    };
    let explanation = model::explain(&counted, &symbols, &wanted, attempts);
    let listed = explanation.attempts.as_deref().map_or(String::new(), attempts::lines);
    let text = if args.json {
        serde_json::to_string_pretty(&explanation).context("an explanation")? + "\n"
    } else if explanation.regions.is_empty() {
        without_traces(&explanation) + &listed
    } else {
        let mut parts = args.show.clone();
        parts.sort();
        parts.dedup();
        let paint = Paint::new(args.color, args.output.is_some());
        Reporter { paint, census, symbols: &symbols, parts: &parts }.report(&explanation)
            + if listed.is_empty() { "" } else { "\n" }
            + &listed
    };
    match &args.output {
        Some(file) => std::fs::write(file, text)
            .with_context(|| format!("cannot write {}", file.display()))?,
        None => {
            // A reader that closes the pipe early is no error.
            let mut stdout = std::io::stdout().lock();
            let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        }
    }
    Ok(0)
}

/// How the program is run: under the tier and the options of this command line.
fn plan(args: &ExplainArgs) -> Plan<'_> {
    let mut options: Vec<OsString> = vec!["--tier".into(), args.tier.to_string().into()];
    options.extend(["--policy".into(), args.policy.name().into()]);
    if !args.passes.is_empty() {
        options.extend(["--passes".into(), args.passes.join(",").into()]);
    }
    // Always passed, so that the result does not depend on timing.
    let threshold = args.threshold.unwrap_or(args.tier.head_threshold());
    options.extend(["--threshold".into(), threshold.to_string().into()]);
    if !args.skip_pass.is_empty() {
        options.extend(["--skip-pass".into(), args.skip_pass.join(",").into()]);
    }
    options.extend(args.verify_traces.then(|| "--verify-traces".into()));
    options.extend(args.prove_traces.then(|| "--prove-traces".into()));
    Plan { options, detail: true, discard: args.discard_output, command: &args.command }
}

/// The report for a program without hot code.
fn without_traces(e: &Explanation) -> String {
    let (at_samples, remedy) = match e.tier == Tier::Direct.to_string() {
        true => (" at its samples", "A longer run or a lower --threshold helps"),
        false => ("", "A lower --threshold makes traces earlier"),
    };
    format!(
        "{} never got hot: no loop or function of it was executed {} times{at_samples}, so no trace \
         was made.\n{remedy}; a program that executes others is explained as the last of them.\n",
        e.program,
        number(e.threshold.into())
    )
}
