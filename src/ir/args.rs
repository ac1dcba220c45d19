//! The command line of `dynasour ir`: its subcommands, their options and help texts.
//!
//! Doc comments of options are the texts that `--help` shows.
//!
//! Example: `ir eval loop.ir --set 'rdi = 5'` becomes an [`EvalArgs`] whose `start.set` has one
//! setting.

use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Options of `ir`.
#[derive(Args, Debug)]
pub struct IrArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: IrCommand,
}

/// What can be done with a file in the text form.
#[derive(Subcommand, Debug)]
pub enum IrCommand {
    /// Parse and verify every version, and the labels between versions
    #[command(after_help = "\
Examples:
  dynasour ir check loop.ir
  dynasour ir check --json *.ir | jq '.errors[] | .message'
  dynasour ir check --golden wrong.ir       errors are where `; error: MESSAGE` says, nowhere else

Each broken rule is shown at its line; ir/README.md lists the rules. Of a golden file both parts are \
checked. Exit status 1 if a rule is broken.")]
    Check(CheckArgs),
    /// Print a file in the printer's canonical form of values, anchors, addresses and comments
    Print(PrintArgs),
    /// Run optimiser passes over the traces of a file and show each before and after
    #[command(after_help = "\
Examples:
  dynasour ir opt loop.ir                                the pipeline of `run`, before and after
  dynasour ir opt loop.ir --passes simplify,dce --each   after each pass that changed something
  dynasour ir opt loop.ir --skip-pass sink --quiet > new.ir
  dynasour ir opt --list                                 every pass, one on each line
  dynasour ir opt --golden ir/tests/opt/peel.ir          what the file's first lines say: is the \
result as expected?

The verifier runs after each pass. `base` versions are left as they are. A golden file holds a \
program and, after a line `---`, a result; without --golden only the program is used. ir/README.md \
explains its first lines. Memory that a `state` of the file declares `read_only` is taken for \
constant. Exit status 1: a version does not verify, or with --golden the result is another one.")]
    Opt(OptArgs),
    /// Run a program in the evaluator: shows its output, where control went, and the final state
    #[command(after_help = "\
Examples:
  dynasour ir eval loop.ir                               the first region, from the file's first \
`state`
  dynasour ir eval loop.ir --set 'rdi = 5' --set 'memory 0x1000: i64 1, 2, 3'
  dynasour ir eval loop.ir --version t1 --force 3 --trace  force a deoptimisation at the fourth \
opportunity
  dynasour ir eval loop.ir --version base --json

Control goes from region to region of the file until it reaches a pc without code, or an event \
that only a real guest can handle (a system call, a trap, a fault). `print` and `read` are the \
program's output and input. Native instructions are not executed: the result of each is a fixed \
arbitrary function of the inputs that it declares.")]
    Eval(EvalArgs),
    /// Run two versions of a region side by side and report the first difference
    #[command(after_help = "\
Examples:
  dynasour ir diff loop.ir base t1
  dynasour ir diff loop.ir base t1 --forks 50            also force a deoptimisation at each of 50 \
places of t1, and run to the end
  dynasour ir diff loop.ir t1 t2 --random 1000,7         from 1000 random states instead of the \
file's

The comparison covers what is printed and read, where the program ends, and registers, flags and \
memory at the end. A version named here is entered wherever a region has it and its context holds; \
elsewhere `base` is entered. Exit status 1: the versions differ.")]
    Diff(DiffArgs),
    /// Prove that a version does what another one does, from every state
    #[command(after_help = "\
Examples:
  dynasour ir prove loop.ir base t1opt        against the guest's code, the file's base blocks
  dynasour ir prove opt.ir t1 t1opt           against the trace before the passes

ONE says what is right: TWO may leave only in states that ONE passes, at every anchor, taken or not. \
The answer is `proven`, `refuted` with a state that `ir diff` shows to be a counterexample, or \
`unknown` with what could not be shown. It holds as long as TWO's context does. \
Memory that a `state` of the file declares `read_only` is taken for constant.

Exit status 0: proven, 1: refuted, 3: unknown. Needs a build with `--features prove` (libz3-dev).")]
    Prove(ProveArgs),
}

/// Options of `ir check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Files in the text form; `-` is the standard input
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Expect the errors that comments `; error: MESSAGE [RULE]` name on their lines, and no others
    #[arg(long, conflicts_with = "json")]
    pub golden: bool,
}

/// Options of `ir print`.
#[derive(Args, Debug)]
pub struct PrintArgs {
    /// A file in the text form; `-` is the standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Leave out the lists of undefined values
    #[arg(long)]
    pub short: bool,
}

/// Options of `ir opt`.
#[derive(Args, Debug)]
pub struct OptArgs {
    /// A file in the text form; `-` is the standard input
    #[arg(value_name = "FILE", required_unless_present = "list")]
    pub file: Option<PathBuf>,
    /// Passes in the order to run them [default: the pipeline of `run`]
    #[arg(long, value_name = "PASS,...", value_delimiter = ',')]
    pub passes: Vec<String>,
    /// Passes of the pipeline to leave out
    #[arg(long, value_name = "PASS,...", value_delimiter = ',', conflicts_with = "passes")]
    pub skip_pass: Vec<String>,
    /// Only versions with this name
    #[arg(long, value_name = "NAME")]
    pub version: Option<String>,
    /// Show the version after each pass that changed something
    #[arg(long, conflicts_with = "quiet")]
    pub each: bool,
    /// Print only the whole file with the optimised versions in it
    #[arg(long)]
    pub quiet: bool,
    /// Print the statistics of each pass as JSON
    #[arg(long, conflicts_with_all = ["quiet", "each"])]
    pub json: bool,
    /// Run what the first lines of a golden file say, and compare the result with its second part
    #[arg(long, conflicts_with_all = ["passes", "skip_pass", "version", "each", "quiet", "json"])]
    pub golden: bool,
    /// List the passes
    #[arg(long, exclusive = true)]
    pub list: bool,
}

/// The start of a run.
#[derive(Args, Debug)]
pub struct StartArgs {
    /// A file in the text form; `-` is the standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// pc of the region to start in [default: the first of the file]
    #[arg(long, value_name = "PC", value_parser = parse_pc)]
    pub region: Option<u64>,
    /// The `state` of the file to start from [default: the first, if there is one]
    #[arg(long, value_name = "NAME")]
    pub state: Option<String>,
    /// Add to the state, in the syntax of a `state` of a file: 'rdi = 5', 'memory 0x1000: i64 1,
    /// 2', 'input 3'
    #[arg(long, value_name = "SETTING")]
    pub set: Vec<String>,
    /// The most IR instructions to execute
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub steps: u64,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `ir eval`.
#[derive(Args, Debug)]
pub struct EvalArgs {
    #[command(flatten)]
    pub start: StartArgs,
    /// Enter the versions of this name where there is one, else base [default: the first version
    /// whose context holds]
    #[arg(long, value_name = "NAME")]
    pub version: Option<String>,
    /// Where an anchor has a label in another version, continue there instead of in base
    #[arg(long)]
    pub follow: bool,
    /// Force the deoptimisation at the Nth opportunity (counted from 0), although no guard failed
    #[arg(long, value_name = "N")]
    pub force: Option<u64>,
    /// Show every version that control passed through
    #[arg(long)]
    pub trace: bool,
}

/// Options of `ir diff`.
#[derive(Args, Debug)]
pub struct DiffArgs {
    #[command(flatten)]
    pub start: StartArgs,
    /// A version of the region
    #[arg(value_name = "ONE")]
    pub one: String,
    /// Another version of the region
    #[arg(value_name = "TWO")]
    pub two: String,
    /// Start from N random states, with memory at all addresses [default of N: 100, if the file has
    /// no state]
    #[arg(long, value_name = "N[,SEED]", value_parser = parse_random,
          conflicts_with_all = ["state", "set"])]
    pub random: Option<(u64, u64)>,
    /// Also force a deoptimisation at N opportunities of the second version, one in each run
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub forks: u64,
    /// Where an anchor has a label in another version, continue there instead of in base
    #[arg(long)]
    pub follow: bool,
}

/// Options of `ir prove`.
#[derive(Args, Debug)]
pub struct ProveArgs {
    /// A file in the text form; `-` is the standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// `base`, or a trace of the region
    #[arg(value_name = "ONE")]
    pub one: String,
    /// A trace of the region
    #[arg(value_name = "TWO")]
    pub two: String,
    /// pc of the region [default: the first of the file that has TWO]
    #[arg(long, value_name = "PC", value_parser = parse_pc)]
    pub region: Option<u64>,
    /// Give up after this time
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_seconds)]
    pub time: f64,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds: Option<f64> = text.parse().ok().filter(|s| (0.0..=1e6).contains(s));
    seconds.ok_or_else(|| "expected a number of seconds, at most a million".to_string())
}

fn parse_pc(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "expected a number below 2^64, decimal or 0x hexadecimal".to_string())
}

fn parse_random(text: &str) -> Result<(u64, u64), String> {
    let (count, seed) = text.split_once(',').unwrap_or((text, "1"));
    let number = |t: &str| t.parse().map_err(|_| "expected N or N,SEED".to_string());
    Ok((number(count)?, number(seed)?))
}
