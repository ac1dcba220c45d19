//! The `dynasour` command.
//!
//! There is no Rust `main`, because std's start-up would change what the guest inherits: it ignores
//! SIGPIPE, installs handlers and an alternate stack, and opens descriptors 0 to 2. So the C
//! runtime calls this file's `main` directly (docs/design.md, "Running a guest").
//!
//! | module | subcommand |
//! | --- | --- |
//! | [`cli`] | none: options, help texts and the configuration of `run` |
//! | [`bench`](mod@bench) | `bench`: times of workloads, natively and under each tier |
//! | [`explain`] | `explain`: what the hot traces of one run are |
//! | [`guards`] | `guards`: one program under several guard placements |
//! | [`ir`] | `ir`: tools for the IR's text form |
//! | [`completions`] | `completions`: scripts for shells |
//! | [`machine`] | none: options that `run`, `explain` and `guards` have in common |
//! | [`manual`] | `man`: manual pages |
//! | [`report`] | `report`: a page of what `explain`, `guards` and `bench` have found |
//! | [`solver`] | none: what proofs need |
//!
//! `run` itself is [`dynasour_runtime::run`], which returns only if the guest could not be started.

// Unit tests have the test harness's `main`.
#![cfg_attr(not(test), no_main)]

mod bench;
mod cli;
mod completions;
mod explain;
#[cfg(fixed_address)]
mod fixed_address;
mod guards;
mod ir;
mod machine;
mod manual;
mod report;
mod solver;

use anyhow::Context;
use clap::CommandFactory;
use cli::{Cli, Command};
use dynasour_runtime::config::RunConfig;
use std::ffi::c_int;
use std::fs::OpenOptions;

#[global_allocator]
static HEAP: dynasour_runtime::heap::Heap = dynasour_runtime::heap::Heap;

/// Exit status of a command that failed.
const FAILED: c_int = 2;

/// Called by the C runtime. glibc's initialisation makes the arguments available to `std::env`.
#[cfg(not(test))]
#[unsafe(no_mangle)]
extern "C" fn main(_argc: c_int, _argv: *const *const std::ffi::c_char) -> c_int {
    // Usage errors end here with status 2, `--help` and `--version` with 0.
    run(Cli::of(std::env::args_os()).unwrap_or_else(|error| error.exit()))
}

/// Can the files be written that a run writes at its end? A program that the guest executes is not asked: the guest
/// may have given up the right to.
fn can_report(config: &RunConfig) -> anyhow::Result<()> {
    if config.argv0.is_some() {
        return Ok(());
    }
    let files = config.stats_json.iter().chain(config.count.iter().map(|count| &count.file));
    for file in files {
        let existed = file.exists();
        let opened = OpenOptions::new().write(true).create(true).truncate(false).open(file);
        opened.with_context(|| format!("cannot write {}", file.display()))?;
        if !existed {
            // A run that is killed leaves no file.
            let _ = std::fs::remove_file(file);
        }
    }
    Ok(())
}

fn failed(error: anyhow::Error) -> c_int {
    eprintln!("dynasour: {error:#}");
    FAILED
}

/// Runs the subcommand; returns the exit status.
fn run(cli: Cli) -> c_int {
    match cli.command {
        Command::Run(args) => {
            let config = args.into_config();
            if let Err(error) = can_report(&config) {
                return failed(error);
            }
            match dynasour_runtime::run(&config) {
                Ok(never) => match never {},
                Err(error) => {
                    eprintln!("dynasour: {error}");
                    error.exit_status()
                }
            }
        }
        Command::Bench(args) => bench::run(&args).unwrap_or_else(failed),
        Command::Explain(args) => explain::run(&args).unwrap_or_else(failed),
        Command::Guards(args) => guards::run(&args).unwrap_or_else(failed),
        Command::Report(args) => report::run(&args).unwrap_or_else(failed),
        Command::Ir(args) => ir::run(&args).unwrap_or_else(failed),
        Command::Completions(args) => completions::run(&args, Cli::command()),
        Command::Man(args) => manual::run(&args, Cli::command()).unwrap_or_else(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_there_is_127() {
        let cli = Cli::of(["dynasour", "run", "--", "/nonexistent/program"]).expect("valid");
        assert_eq!(run(cli), 127);
    }
}
