//! `dynasour completions`: prints a script by which a shell completes dynasour's command lines.
//!
//! The script is made by clap_complete from the parser of the command line. Many options have
//! parsers of their own that do not list what they take, so [`with_values`] adds the names of tiers,
//! policies, passes and log stages, with a line about each. It changes only the parser of which the
//! script is made: `--help` and the start of `dynasour run` stay as they are.
//!
//! No data, no lock. Example: `dynasour completions bash` prints a function `_dynasour`; with it,
//! `dynasour run --tier d` and the tabulator key offer `direct` and `dynamo`.

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Arg, Args, Command, ValueHint};
use clap_complete::Shell;
use dynasour_ir::opt::PASSES;
use dynasour_runtime::config::{Stage, placement};
use std::ffi::c_int;
use std::io::Write;

/// Options of `completions`.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// The values of options that take one of a few names, by the option's identifier, each with what
/// `--help` says of it.
const NAMES: &[(&str, &[(&str, &str)])] = &[
    (
        "tier",
        &[
            ("interp", "interpreter"),
            ("dynamo", "interpreter first, then native copies of blocks and traces"),
            ("copy", "native copies of blocks"),
            ("full", "native copies of blocks, and traces"),
            ("direct", "where it stands; hot traces are patched into it"),
        ],
    ),
    (
        "returns",
        &[
            ("auto", "stack in programs with many calls"),
            ("table", "as indirect jumps"),
            ("stack", "by the processor's return stack"),
        ],
    ),
    ("entry_check", &[("loop", "by a loop instruction"), ("pext", "by a pext instruction")]),
    (
        "race",
        &[
            ("measured", "the faster of trace and old code stays"),
            ("off", "every trace stays"),
            ("trace", "for tests: the trace wins"),
            ("floor", "for tests: the trace loses"),
            ("swap", "for tests: the race never ends"),
        ],
    ),
    (
        "compile_threads",
        &[
            ("0", "the thread that needs a trace compiles it"),
            ("1", "a helper thread"),
            ("slow", "for tests: a slow helper thread"),
            ("wait", "for tests: a helper thread for which the program waits"),
        ],
    ),
];

/// Prints the script for a shell; `command` is the parser of the command line.
pub fn run(args: &CompletionsArgs, command: Command) -> c_int {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut with_values(command), "dynasour", &mut script);
    let mut stdout = std::io::stdout().lock();
    // A reader that closes the pipe early is no error.
    let _ = stdout.write_all(&script).and_then(|()| stdout.flush());
    0
}

/// The parser with the values that its options take.
fn with_values(command: Command) -> Command {
    // Only the evaluator runs what some passes make.
    let evaluates = command.get_name() == "opt";
    command.mut_args(|arg| arg_with_values(arg, evaluates)).mut_subcommands(with_values)
}

fn arg_with_values(arg: Arg, evaluates: bool) -> Arg {
    let describe =
        |(name, about): (&'static str, &'static str)| PossibleValue::new(name).help(about);
    let values: Vec<PossibleValue> = match arg.get_id().as_str() {
        "passes" | "skip_pass" => PASSES
            .iter()
            .filter(|pass| evaluates || !pass.evaluator_only)
            .map(|pass| describe((pass.name, pass.about)))
            .collect(),
        "policy" | "policies" => {
            placement::PLACEMENTS.iter().map(|p| describe((p.name(), p.about()))).collect()
        }
        "log" => Stage::ALL.iter().map(|(_, name)| PossibleValue::new(*name)).collect(),
        "command" => return arg.value_hint(ValueHint::CommandWithArguments),
        id => match NAMES.iter().find(|(option, _)| *option == id) {
            Some((_, values)) => values.iter().copied().map(describe).collect(),
            None => return arg,
        },
    };
    arg.value_parser(PossibleValuesParser::new(values))
}
