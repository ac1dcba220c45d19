//! The command line: subcommands, options and help texts, and the [`RunConfig`] that `run`'s
//! options describe.
//!
//! *Data.* [`Cli`] is the whole command line as clap parses it. [`RunArgs`] are the options of
//! `run`; some of them
//! belong to `explain` and `guards`, too ([`crate::machine`]). The other subcommands define theirs in their own modules. Doc comments of options are the
//! texts that `--help` shows.
//!
//! *Invariants.* Arguments after the guest's program belong to the guest. Only `explain` and
//! `guards` also accept their own options there, unless a `--` stands before the program. The
//! options that a run passes on to the programs that its guest executes (`child_options`, and
//! `own_options` in the first process only) describe the same configuration.
//!
//! *Speed.* When the guest executes a program, dynasour is started again for it. So the command
//! lines of such starts have a parser of their own ([`plain`]), and other lines of `run` a small one
//! of clap. The full parser is built only for other subcommands, for errors and for help.
//!
//! `main` is the only caller; the process has one thread then, so there is no lock.
//!
//! ```text
//! dynasour run --tier full -- ls -l     RunConfig { tier: Full, program: "ls", args: ["-l"], … }
//! dynasour explain ls --top 1           parsed as `dynasour explain --top 1 ls`
//! ```

mod plain;

use crate::bench::BenchArgs;
use crate::completions::CompletionsArgs;
use crate::explain::ExplainArgs;
use crate::guards::GuardsArgs;
use crate::ir::IrArgs;
use crate::machine::{MachineArgs, TraceArgs};
use crate::manual::ManArgs;
use crate::report::ReportArgs;
use crate::solver;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use dynasour_runtime::config::{Chaos, Count, Limit, RunConfig, Stage, Tier};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Run unmodified x86-64 Linux programs under a speculative trace JIT.
#[derive(Parser, Debug)]
#[command(name = "dynasour", version, arg_required_else_help = true)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Parses a command line; the first argument is dynasour's own name.
    ///
    /// # Errors
    /// A usage error, or the text for `--help` or `--version`.
    pub fn of(line: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Cli, clap::Error> {
        let line: Vec<OsString> = line.into_iter().map(Into::into).collect();
        if let [own, subcommand, options @ ..] = &line[..]
            && subcommand == "run"
            && let Some(args) = plain::parse(options).or_else(|| {
                let line = std::iter::once(own).chain(options);
                Run::try_parse_from(line).ok().map(|run| run.args)
            })
        {
            if let Some(option) = args.option_without_meaning() {
                let text = format!("{option} has no meaning with --tier {}", args.machine.tier);
                return Err(Cli::command().error(ErrorKind::ArgumentConflict, text));
            }
            if args.prove_traces && solver::needed().is_err() {
                return Err(Cli::command().error(ErrorKind::InvalidValue, solver::MISSING));
            }
            return Ok(Cli { command: Command::Run(args) });
        }
        Cli::try_parse_from(options_first(line))
    }
}

/// The parser of `dynasour run` alone. It starts every program that a guest executes, and building
/// the parser of all subcommands takes longer than parsing. On an error, or for help, [`Cli`]
/// parses again and reports.
#[derive(Parser, Debug)]
struct Run {
    #[command(flatten)]
    args: RunArgs,
}

/// Reorders `dynasour explain PROG ARGS --top 1` for clap: options of `explain` and `guards` that
/// stand after the program move before it. Arguments after `--` are not moved.
fn options_first(line: Vec<OsString>) -> Vec<OsString> {
    let subcommand = match line.get(1).and_then(|argument| argument.to_str()) {
        Some(name @ ("explain" | "guards")) => name,
        _ => return line,
    };
    let cli = Cli::command();
    let arguments = cli.find_subcommand(subcommand).expect("a subcommand").get_arguments();
    // The most values of each option.
    let values: BTreeMap<&str, usize> = arguments
        .filter_map(|a| {
            let one = usize::from(a.get_action().takes_values());
            Some((a.get_long()?, a.get_num_args().map_or(one, |range| range.max_values())))
        })
        .collect();
    let (mut ours, mut program) = (Vec::new(), Vec::new());
    let mut remaining = line.into_iter().peekable();
    ours.extend(remaining.by_ref().take(2));
    while let Some(argument) = remaining.next() {
        if argument == "--" {
            program.push(argument);
            break;
        }
        let text = argument.to_str().and_then(|text| text.strip_prefix("--"));
        let (name, value) = text.map_or((None, false), |t| match t.split_once('=') {
            Some((name, _)) => (Some(name), true),
            None => (Some(t), false),
        });
        match name.and_then(|name| values.get(name)) {
            Some(most) => {
                let separate = if value { 0 } else { *most };
                ours.push(argument);
                let is_value =
                    |argument: &OsString| !argument.as_encoded_bytes().starts_with(b"--");
                let mut next = || match separate {
                    0 | 1 => remaining.next(),
                    _ => remaining.next_if(is_value),
                };
                ours.extend((0..separate).map_while(|_| next()));
            }
            None => program.push(argument),
        }
    }
    ours.into_iter().chain(program).chain(remaining).collect()
}

/// The subcommands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run a program under the translator; its exit status becomes ours
    #[command(after_help = "\
Examples:
  dynasour run -- /bin/ls -l /
  dynasour run --stats -- python3 -c 'print(sum(range(100000)))'
  dynasour run --tier interp -- ./a.out        interpret everything
  dynasour run --chaos 1/100,7 -- ./a.out      make guards fail at random: the output must not \
change

Exit status: the program's own. 127: the program does not exist. 126: it cannot be run. \
70: --verify-traces has found a wrong trace. 2: usage error. If signal N kills the program, dynasour dies of the same signal (a shell reports \
128+N).")]
    Run(RunArgs),
    /// Measure programs, or suites of workloads: native, tiers and other launchers side by side
    #[command(
        override_usage = "dynasour bench [OPTIONS] -- PROG [ARGS]...\n       \
                          dynasour bench [OPTIONS] --list FILE\n       \
                          dynasour bench [OPTIONS] SUITE...\n       \
                          dynasour bench [OPTIONS] --merge FILE...",
        after_help = "\
Examples:
  dynasour bench -- ./a.out 1000                     natively and under each tier
  dynasour bench --runs 20 --warmup 3 --input data --export-md result.md -- sort -n
  dynasour bench --tiers full --run-options '--threshold 50' -- ./a.out 1000
  dynasour bench --list commands.txt --shard 3/8 --export-jsonl 3.jsonl
  dynasour bench --merge *.jsonl --export-csv all.csv
  dynasour bench benches/suites/kernels.toml --only O2
  dynasour bench benches/suites/*.toml --runs 3 --export-json before.json
  dynasour bench benches/suites/*.toml --runs 3 --compare before.json
  dynasour bench benches/suites/programs.toml --peer valgrind='valgrind --tool=none -q {}'

Output and standard error of the programs are hidden; standard output and the exit status must be those of native \
runs. Ratios are medians over rounds, each to the native run of its round; their 95 % intervals need 6 rounds. \
Times contain start-up, which is shown; it should be a small part.

A row says DIFFERS if its output or exit status differs from native, VARIES if the native runs differ from each \
other; the exit status of bench is then 1, as with --merge if rows are missing. Exit status 2: usage errors, and files that cannot be read or written."
    )]
    Bench(BenchArgs),
    /// Show the hottest regions of a run: guest code, traces, guards and what became of them
    #[command(after_help = "\
Examples:
  dynasour explain ./a.out                        the three hottest regions in full
  dynasour explain ./a.out 1000000 --at work      the traces through the function work
  dynasour explain --at 0x401136 --show guards,native ./a.out
  dynasour explain --attempts --tier direct ./a.out   also which heads got no trace, and why
  dynasour explain --json --discard-output -- python3 -c 'sum(range(10**6))' | \
jq '.regions[0].symbol'

The program runs once, with counters in its traces; with --attempts once more without. Its standard output goes to our standard \
error. If it executes other programs, the last one is explained; child processes are not. For \
each version of a region:
  recorded path   guest instructions as they were recorded, with the number of executions of each \
block
  guards          what each guard checks (rcx@loop: rcx at the loop's head; rcx@entry: at the \
entry), its executions and failures,
                  and where control went after a failure: to the interpreter, or to a side trace \
(t13) made for it
  anchors         the guest state that a failing guard restores, and the stores that are performed \
only then
  changed by P    the changes of each optimiser pass to the IR, as a difference; ir/README.md \
explains the notation
  native code     the emitted code, with guards, loop heads, spills and exits marked

Options of explain may also stand after the program. After `--`, all options are the program's.

Exit status: 0, also if no code was hot (the report says so); 2 if there is nothing to explain.")]
    Explain(ExplainArgs),
    /// Compare guard placements on one program, or measure what a deoptimisation costs
    #[command(after_help = "\
Examples:
  dynasour guards ./a.out 1000                    every policy, on the default tier
  dynasour guards --policies eager,default --runs 11 --csv -- ./a.out 1000
  dynasour guards --threshold 1000 ./a.out 1000   keep and time every trace that is made
  dynasour guards --counterfactual ./a.out 1000   how far is each policy from the best placement?
  dynasour guards --by-site 10 ./a.out 1000       where the policies differ, guard by guard
  dynasour guards --chaos-sweep -- ./a.out 1000
  dynasour guards --list commands.txt --shard 3/8 --jsonl --save 3.jsonl
  dynasour guards --merge *.jsonl --csv
  dynasour guards --policies default --pipeline mine=simplify,licm,dce ./a.out
  dynasour guards -- sort --csv                   after --, all options are the program's

Policies:
  eager         each guard stands where its branch was, and is executed in every iteration
  anchored      a guard stands at the first use of its value, after the latest anchor that it may \
fall back to
  hoisted       predicates that do not change in a loop are checked before the loop
  merged        all guards on one value, then all guards of one anchor, become one guard
  control-only  as default, but without assumptions about values
  default       one iteration is peeled; its checks are not repeated in the loop
  combined      as default, then all guards of one anchor become one guard

The program runs many times and must print the same each time. Counts cover the process that is \
started, and the last program that it executes. They come from a run of each policy that keeps all \
traces of heads that are executed often (in full 24999 times), so that the policies have the same traces. Times \
are those of `dynasour run` with your options: without --threshold it keeps only traces that are faster than the code \
that they replace, and the header says how many. With --threshold N (in full: below 25000) the traces that \
are counted are timed, too.

--counterfactual: `best` is the fewest executions of guards with which each predicate of a policy could be \
checked by itself, by a minimum cut over the measured frequencies; `best joined` the fewest if predicates that are \
checked at one point become one guard. `predicted` is what the outcomes of the policy eager say about the \
policy; the error against the count says how good the model is. docs/studies.md has more.

Exit status: 1 if a run differs from native, or programs of a merged \
study are missing; 2 if nothing was measured.")]
    Guards(GuardsArgs),
    /// Make one HTML page of what explain, guards and bench have found, or of a program
    #[command(after_help = "\
Examples:
  dynasour report -- ./a.out 1000000              explain a program, and show that
  dynasour report --tier full --top 40 --output run.html -- gzip -9 -c big.txt
  dynasour explain --json --attempts ./a.out | dynasour report -
  dynasour guards --json ./a.out >policies.json; dynasour guards --chaos-sweep --json ./a.out >rates.json
  dynasour report policies.json rates.json --output guards.html
  dynasour report before.json --force             before.json: from bench --save

Files are recognised by their content. The page needs no network and no other file; open it in a browser. \
docs/report.md describes it.

Exit status: 0, or 2 if there is no page.")]
    Report(ReportArgs),
    /// Check, print, optimise, evaluate and compare programs in the IR's text form
    #[command(after_help = "ir/README.md has the grammar with a worked example.")]
    Ir(IrArgs),
    /// Print a script by which a shell completes command lines of dynasour
    #[command(after_help = "\
Examples:
  dynasour completions bash > ~/.local/share/bash-completion/completions/dynasour
  dynasour completions fish > ~/.config/fish/completions/dynasour.fish
  dynasour completions zsh > ~/.zfunc/_dynasour        with `fpath+=~/.zfunc` before compinit
  eval \"$(dynasour completions bash)\"                  for this shell only

Completed are subcommands, options, and names of tiers, policies, passes and log stages.")]
    Completions(CompletionsArgs),
    /// Write manual pages, one for each subcommand
    #[command(after_help = "\
Examples:
  dynasour man ~/.local/share/man/man1         then `man dynasour-run`
  dynasour man pages && man -l pages/dynasour-ir-opt.1

Nothing is written if one of the pages exists, unless --force.")]
    Man(ManArgs),
}

/// Options of `run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    traces: TraceArgs,
    /// Make each guard fail with probability 1/N, to test deoptimisation (SEED chooses the random
    /// numbers)
    #[arg(long, value_name = "1/N[,SEED]")]
    chaos: Option<Chaos>,
    /// With --tier direct: make no traces
    #[arg(long)]
    no_traces: bool,
    /// Print statistics to stderr at the end of the process (of its last program, if it executes
    /// others). Counting indirect transfers for it takes time, which --stats-json alone does not
    #[arg(long)]
    stats: bool,
    /// Write statistics as JSON to FILE at the end
    #[arg(long, value_name = "FILE")]
    stats_json: Option<PathBuf>,
    /// In the statistics of --stats-json: also when, over the run, threads were in each phase
    #[arg(long, requires = "stats_json")]
    timeline: bool,
    /// Write /tmp/perf-PID.map at the end, so that `perf report` names traces and copied blocks by
    /// guest symbol
    #[arg(long)]
    perf_map: bool,
    /// Log these stages to stderr: record, trace, opt, code, exit, syscall, signal
    #[arg(long, value_name = "STAGE,...", value_delimiter = ',')]
    log: Vec<Stage>,
    /// Compare each trace with the code that was recorded, before it is used, from some hundred states
    /// in the evaluator (about 2 ms for each trace). A trace that differs ends the program with status
    /// 70 and a report
    #[arg(long)]
    verify_traces: bool,
    /// Prove that each trace does what was recorded, from every state, and that its machine code does
    /// the same, before it is used (up to two seconds for each of the two). A trace that is refuted is reported and not used. Needs a build with
    /// `--features prove`
    #[arg(long)]
    prove_traces: bool,
    /// Compile only the traces numbered FIRST to LAST in the order of their making, to find a
    /// faulty one by bisection
    #[arg(long, value_name = "FIRST[-LAST]", value_parser = parse_range)]
    only_trace: Option<RangeInclusive<u32>>,
    /// Count what fragments execute, and write the census to FILE at the end (`explain` and
    /// `guards` read it)
    #[arg(long, value_name = "FILE", hide = true)]
    count: Option<PathBuf>,
    /// With --count: include the text of versions and native code
    #[arg(long, requires = "count", hide = true)]
    count_detail: bool,
    /// Run the programs that the guest executes natively, not under the translator
    #[arg(long)]
    no_follow: bool,
    /// The guest's `argv[0]`
    #[arg(long, value_name = "NAME", hide = true)]
    argv0: Option<OsString>,
    /// Descriptor of a file with the system call filters that the guest inherits
    #[arg(long, value_name = "FD", hide = true)]
    seccomp: Option<i32>,
    /// The guest's limit on its address space
    #[arg(long, value_name = "SOFT:HARD", hide = true)]
    address_space: Option<Limit>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROG")]
    command: Vec<OsString>,
}

/// Parses `N` or `FIRST-LAST`.
fn parse_range(text: &str) -> Result<RangeInclusive<u32>, String> {
    const FORM: &str = "expected N or FIRST-LAST";
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = first.parse().map_err(|_| FORM)?..=last.parse().map_err(|_| FORM)?;
    if range.is_empty() { Err(FORM.to_string()) } else { Ok(range) }
}

impl RunArgs {
    /// An option that the user has given and the tier does not have.
    fn option_without_meaning(&self) -> Option<&'static str> {
        let is_direct = self.machine.tier == Tier::Direct;
        if !is_direct && self.no_traces {
            return Some("--no-traces");
        }
        let counts = self.machine.threshold.is_some() || self.chaos.is_some();
        self.machine.option_without_meaning(counts)
    }

    /// The configuration of the run that these options describe.
    pub fn into_config(self) -> RunConfig {
        let (machine, traces) = (&self.machine, &self.traces);
        let mut child_options = machine.options();
        child_options.extend(traces.options());
        if let Some(chaos) = self.chaos {
            child_options.extend(["--chaos".into(), chaos.to_string().into()]);
        }
        if self.no_traces {
            child_options.push("--no-traces".into());
        }
        if self.verify_traces {
            child_options.push("--verify-traces".into());
        }
        if self.prove_traces {
            child_options.push("--prove-traces".into());
        }
        // A relative path must not depend on the guest's working directory at its end.
        let stats_json = self.stats_json.map(|path| std::path::absolute(&path).unwrap_or(path));
        let mut own_options: Vec<OsString> = Vec::new();
        for stage in &self.log {
            own_options.extend(["--log".into(), stage.to_string().into()]);
        }
        if let Some(range) = &self.only_trace {
            own_options.extend([
                "--only-trace".into(),
                format!("{}-{}", range.start(), range.end()).into(),
            ]);
        }
        if self.stats {
            own_options.push("--stats".into());
        }
        if self.perf_map {
            own_options.push("--perf-map".into());
        }
        if let Some(path) = &stats_json {
            own_options.extend(["--stats-json".into(), path.into()]);
        }
        if self.timeline {
            own_options.push("--timeline".into());
        }
        let count = self.count.map(|file| Count {
            file: std::path::absolute(&file).unwrap_or(file),
            detail: self.count_detail,
        });
        if let Some(count) = &count {
            own_options.extend(["--count".into(), count.file.clone().into()]);
            if count.detail {
                own_options.push("--count-detail".into());
            }
        }
        let mut command = self.command.into_iter();
        RunConfig {
            tier: machine.tier,
            threshold: machine.threshold,
            cache_size: machine.cache_size,
            returns: machine.returns,
            entry_check: machine.entry_check,
            placement: traces.policy,
            chaos: self.chaos,
            sampling: machine.sampling(),
            race: machine.race,
            compile_threads: machine.compile_threads,
            iterations: machine.iterations,
            traces_in_place: machine.tier == Tier::Direct && !self.no_traces,
            log: self.log.into_iter().collect::<BTreeSet<_>>(),
            passes: traces.passes.clone(),
            skip_passes: traces.skip_pass.clone(),
            verify_traces: self.verify_traces,
            prove_traces: self.prove_traces,
            only_traces: self.only_trace,
            stats: self.stats,
            stats_json,
            timeline: self.timeline,
            perf_map: self.perf_map,
            count,
            follow: !self.no_follow,
            argv0: self.argv0,
            seccomp: self.seccomp,
            address_space: self.address_space,
            program: command.next().expect("clap requires a program"),
            args: command.collect(),
            child_options,
            own_options,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn ranges() {
        assert_eq!(parse_range("3"), Ok(3..=3));
        assert_eq!(parse_range("3-9"), Ok(3..=9));
        assert!(parse_range("9-3").is_err());
    }

    fn run_config(line: impl IntoIterator<Item = impl Into<OsString>>) -> RunConfig {
        match Cli::of(line).expect("valid").command {
            Command::Run(args) => args.into_config(),
            other => panic!("{other:?} is not a run"),
        }
    }

    #[test]
    fn unknown_options_are_not_programs() {
        assert!(Cli::of(["dynasour", "run", "--frobnicate", "--", "ls"]).is_err());
        let config = run_config(["dynasour", "run", "ls", "-l", "--stats", "--", "x"]);
        assert_eq!(config.args, ["-l", "--stats", "--", "x"]);
        assert_eq!(run_config(["dynasour", "run", "--", "-odd"]).program, "-odd");
    }

    #[test]
    fn everything_after_the_program_is_the_programs() {
        let config = run_config(["dynasour", "run", "--stats", "--", "ls", "--tier", "x"]);
        assert_eq!(config.program, "ls");
        assert_eq!(config.args, ["--tier", "x"]);
        assert_eq!(config.own_options, ["--stats"]);
    }

    #[test]
    fn options_of_explain_and_guards_may_stand_behind_the_program() {
        let order = |text: &str| {
            let line = options_first(text.split(' ').map(OsString::from).collect());
            line.join(OsStr::new(" ")).into_string().expect("text")
        };
        assert_eq!(
            order("d explain p -x --top 2 y --at=f --json"),
            "d explain --top 2 --at=f --json p -x y"
        );
        assert_eq!(order("d guards --runs 3 p --other --csv"), "d guards --runs 3 --csv p --other");
        assert_eq!(order("d explain --top 2 -- p --top 3"), "d explain --top 2 -- p --top 3");
        assert_eq!(order("d explain p --json -- --at x"), "d explain --json p -- --at x");
        assert_eq!(order("d explain p --top"), "d explain --top p");
        assert_eq!(order("d guards --merge a b --csv"), "d guards --merge a b --csv");
        assert_eq!(order("d run p --stats"), "d run p --stats");
        assert_eq!(order("d"), "d");
    }

    #[test]
    fn options_that_are_passed_on_mean_the_same() {
        let line = "dynasour run --tier dynamo --threshold 7 --cache-size 1M --policy merged \
                    --chaos 1/9,3 --log record,exit --only-trace 2-5 --passes simplify,licm,dce \
                    --skip-pass dce,peel --verify-traces --stats --stats-json /x --timeline --perf-map --count /y \
                    --count-detail -- p";
        let first = run_config(line.split(' '));
        let mut again = vec![OsString::from("dynasour"), "run".into()];
        again.extend(first.child_options.iter().chain(&first.own_options).cloned());
        again.extend(["--".into(), "p".into()]);
        assert_eq!(format!("{:?}", run_config(again)), format!("{first:?}"));
    }
}
