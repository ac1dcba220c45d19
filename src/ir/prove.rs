//! `dynasour ir prove`: does a version do what another one does, from every state?
//!
//! The proof is [`dynasour_ir::prove`]; here the file's regions become the program, and the verdict text or
//! JSON. Without the feature `prove` there is no solver, and the command says so.
//!
//! No data, no lock. Example: `t1opt does what base does, from every state: 14 states, 3 questions, 9.1 ms`.

use super::args::ProveArgs;
use super::source::SourceText;
use super::{WRONG, out, plural, refuse};
use crate::solver;
use anyhow::{Context, Result, bail};
use dynasour_ir::Version;
use dynasour_ir::prove::{Claim, Limits, Outcome, Right, Verdict, prove};
use dynasour_ir::setup::read_only_words;
use serde_json::json;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::time::Duration;

/// Exit status if a claim is neither proven nor refuted.
const UNKNOWN: c_int = 3;

pub(super) fn run(args: &ProveArgs) -> Result<c_int> {
    let mut solver = solver::needed()?;
    let source = SourceText::read(&args.file)?;
    let file = match source.load() {
        Ok(file) => file,
        Err(problems) => return Ok(refuse(&source, &problems)),
    };
    let has = |name: &str| {
        file.regions
            .iter()
            .find(|r| args.region.is_none_or(|pc| r.pc == pc) && r.version(name).is_some())
    };
    let missing = |name: &str| match args.region {
        Some(pc) => format!("region {pc:#x} has no version {name}"),
        None => format!("no region has a version {name}"),
    };
    let region = has(&args.two).with_context(|| missing(&args.two))?;
    let two = region.version(&args.two).with_context(|| missing(&args.two))?;
    if two.is_base() {
        bail!("{} is a base version: what is to be proven is a trace", args.two);
    }
    let one = region.version(&args.one);
    let one =
        one.with_context(|| format!("region {:#x} has no version {}", region.pc, args.one))?;
    let mut program: BTreeMap<u64, Version> = BTreeMap::new();
    for version in file.regions.iter().flat_map(|r| &r.versions).filter(|v| v.is_base()) {
        program.insert(version.region, version.clone());
    }
    let right = if one.is_base() { Right::Program(&mut program) } else { Right::Trace(one) };
    let constants = read_only_words(&file.setups);
    let claim = Claim { right, version: two, constants: &constants };
    let limits = Limits { time: Duration::from_secs_f64(args.time) };
    let outcome = prove(claim, &mut *solver, limits);
    report(args, &outcome);
    Ok(match outcome.verdict {
        Verdict::Proven => 0,
        Verdict::Refuted { .. } => WRONG,
        Verdict::Unknown { .. } => UNKNOWN,
    })
}

fn report(args: &ProveArgs, outcome: &Outcome) {
    let milliseconds = outcome.time.as_secs_f64() * 1e3;
    if args.json {
        let (verdict, why, state) = match &outcome.verdict {
            Verdict::Proven => ("proven", None, None),
            Verdict::Refuted { setup, what } => ("refuted", Some(what), Some(setup.to_string())),
            Verdict::Unknown { why } => ("unknown", Some(why), None),
        };
        let value = json!({
            "verdict": verdict, "why": why, "state": state, "states": outcome.states,
            "questions": outcome.questions, "milliseconds": milliseconds,
        });
        return out(format_args!("{value:#}\n"));
    }
    let (one, two) = (&args.one, &args.two);
    let effort = format!(
        "{}, {}, {milliseconds:.1} ms",
        plural(outcome.states as usize, "state"),
        plural(outcome.questions as usize, "question"),
    );
    match &outcome.verdict {
        Verdict::Proven => {
            out(format_args!("proven: {two} does what {one} does, from every state: {effort}\n"));
        }
        Verdict::Refuted { setup, what } => out(format_args!(
            "refuted: {two} does not do what {one} does: {what}\n; from this state:\n{setup}"
        )),
        Verdict::Unknown { why } => out(format_args!("unknown: {why}: {effort}\n")),
    }
}
