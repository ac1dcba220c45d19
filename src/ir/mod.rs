//! `dynasour ir`: tools for the IR's text form: check, print, optimise, evaluate and compare
//! programs.
//!
//! Exit status:
//! * 0: success.
//! * 1: the program is wrong (it does not parse or verify), or two versions differ.
//! * 2: the request could not be carried out (usage, a file that cannot be read, a version that
//!   does not exist).
//! * 3: neither proven nor refuted.
//!
//! [`source`] reads files and shows errors with the faulty line; [`args`] has the options; [`opt`],
//! [`golden`], [`eval`], [`diff`] and [`prove`] are the larger subcommands. No global data, no lock.

mod args;
mod diff;
mod eval;
mod golden;
mod opt;
mod prove;
mod source;

pub use args::IrArgs;

use anyhow::Result;
use args::{CheckArgs, IrCommand, PrintArgs};
use dynasour_ir::text::File;
use serde_json::json;
use source::{Problem, SourceText};
use std::ffi::c_int;
use std::fmt::Display;
use std::io::Write;

/// Exit status if the program is wrong or two versions differ.
const WRONG: c_int = 1;

/// Runs the command; returns the exit status.
pub fn run(args: &IrArgs) -> Result<c_int> {
    match &args.command {
        IrCommand::Check(args) => check(args),
        IrCommand::Print(args) => print(args),
        IrCommand::Opt(args) => opt::run(args),
        IrCommand::Eval(args) => eval::run(args),
        IrCommand::Diff(args) => diff::run(args),
        IrCommand::Prove(args) => prove::run(args),
    }
}

/// Prints to standard output; a reader that closes the pipe early is no error.
fn out(text: impl Display) {
    let mut stdout = std::io::stdout().lock();
    let _ = write!(stdout, "{text}").and_then(|()| stdout.flush());
}

/// Prints the problems of a file; returns the exit status for them.
fn refuse(source: &SourceText, problems: &[Problem]) -> c_int {
    problems.iter().for_each(|p| source.show(p));
    WRONG
}

fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn check(args: &CheckArgs) -> Result<c_int> {
    if args.golden {
        return golden::check(&args.files);
    }
    let mut all = Vec::new();
    let (mut regions, mut versions) = (0, 0);
    for path in &args.files {
        let source = SourceText::read(path)?;
        for part in std::iter::once(source.load()).chain(source.load_expected()) {
            match part {
                Ok(File { regions: found, .. }) => {
                    regions += found.len();
                    versions += found.iter().map(|r| r.versions.len()).sum::<usize>();
                }
                Err(problems) => {
                    if !args.json {
                        problems.iter().for_each(|p| source.show(p));
                    }
                    all.extend(problems.into_iter().map(|p| (source.name.clone(), p)));
                }
            }
        }
    }
    if args.json {
        let errors: Vec<_> = all
            .iter()
            .map(|(file, p)| {
                let (line, column) = (p.at.line, p.at.column);
                json!({
                    "file": file, "line": line, "column": column, "rule": p.rule,
                    "message": p.message,
                })
            })
            .collect();
        out(format_args!(
            "{:#}\n",
            json!({ "regions": regions, "versions": versions, "errors": errors })
        ));
    } else if all.is_empty() {
        out(format_args!(
            "{} in {}: all right\n",
            plural(versions, "version"),
            plural(regions, "region")
        ));
    } else {
        eprintln!("{}", plural(all.len(), "error"));
    }
    Ok(if all.is_empty() { 0 } else { WRONG })
}

fn print(args: &PrintArgs) -> Result<c_int> {
    let source = SourceText::read(&args.file)?;
    // A version that breaks rules of the verifier can be printed; only its syntax must be right.
    let parts: Result<Vec<File>, Problem> =
        std::iter::once(source.parse()).chain(source.parse_expected()).collect();
    match parts {
        Ok(files) => {
            let texts: Vec<String> = files.iter().map(|file| whole(file, args.short)).collect();
            out(texts.join("---\n"));
            Ok(0)
        }
        Err(problem) => Ok(refuse(&source, &[problem])),
    }
}

/// A file in the printer's form, states first.
fn whole(file: &File, short: bool) -> String {
    let mut parts: Vec<String> = file.setups.iter().map(|s| s.to_string()).collect();
    parts.extend(file.regions.iter().map(|r| if short { format!("{r:#}") } else { r.to_string() }));
    parts.join("\n")
}
