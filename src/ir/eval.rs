//! `dynasour ir eval`: runs a program in the evaluator, and prints its output, the versions that
//! control passed through, and the final state. No data, no lock. `ir eval --help` has examples.

use super::args::{EvalArgs, StartArgs};
use super::source::SourceText;
use super::{WRONG, out, refuse};
use anyhow::{Context, Result, bail};
use dynasour_ir::Loc;
use dynasour_ir::eval::program::{Choice, Outcome, Program, Route, run_program};
use dynasour_ir::eval::{ModelMachine, State};
use dynasour_ir::setup::Setup;
use dynasour_ir::text::{File, settings};
use serde_json::json;
use std::ffi::c_int;
use std::fmt::Write;

pub(super) fn run(args: &EvalArgs) -> Result<c_int> {
    let source = SourceText::read(&args.start.file)?;
    let file = match source.load() {
        Ok(file) => file,
        Err(problems) => return Ok(refuse(&source, &problems)),
    };
    let pc = start_pc(&file, &args.start)?;
    let setup = setup(&file, &args.start)?;
    let choice = choice(&file, args.version.as_deref())?;
    let route = Route { choice, follow: args.follow, force: args.force };
    let (state, machine) = setup.build();
    let result = run_program(
        &Program::new(&file.regions),
        pc,
        &route,
        state,
        machine.clone(),
        args.start.steps,
    );
    let outcome = match result {
        Ok(outcome) => outcome,
        Err(error) => {
            eprintln!("dynasour: {error}");
            return Ok(WRONG);
        }
    };
    if args.force.is_some_and(|n| n >= outcome.opportunities) {
        eprintln!(
            "dynasour: there were only {} opportunities, nothing was forced",
            outcome.opportunities
        );
    }
    if args.start.json {
        out(format_args!("{:#}\n", as_json(&outcome, &machine)));
    } else {
        out(as_text(&outcome, &machine, args.trace));
    }
    Ok(0)
}

/// The pc of the region to start in.
pub(super) fn start_pc(file: &File, args: &StartArgs) -> Result<u64> {
    match args.region {
        Some(pc) if file.regions.iter().any(|r| r.pc == pc) => Ok(pc),
        Some(pc) => bail!("there is no region {pc:#x} in the file"),
        None => Ok(file.regions.first().context("there is no region in the file")?.pc),
    }
}

/// The start state that the file and the options describe.
pub(super) fn setup(file: &File, args: &StartArgs) -> Result<Setup> {
    let mut setup = match &args.state {
        Some(name) => {
            let found = file.setups.iter().find(|s| s.name.as_ref() == Some(name));
            found.with_context(|| format!("there is no state \"{name}\" in the file"))?.clone()
        }
        None => file.setups.first().cloned().unwrap_or_default(),
    };
    for text in &args.set {
        setup.settings.extend(settings(text).with_context(|| format!("--set {text:?}"))?);
    }
    Ok(setup)
}

/// The versions to enter, by name.
pub(super) fn choice(file: &File, name: Option<&str>) -> Result<Choice> {
    match name {
        None => Ok(Choice::Dispatch),
        Some("base") => Ok(Choice::Base),
        Some(name) if file.regions.iter().any(|r| r.version(name).is_some()) => {
            Ok(Choice::Named(name.to_string()))
        }
        Some(name) => bail!("there is no version {name} in the file"),
    }
}

/// The SSA locations whose value is not 0.
fn locations(state: &State) -> Vec<(Loc, u64)> {
    let locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index);
    locs.filter_map(|loc| Some((loc, state.get(loc)?))).filter(|(_, value)| *value != 0).collect()
}

fn as_text(outcome: &Outcome<ModelMachine>, before: &ModelMachine, trace: bool) -> String {
    let mut text = String::new();
    for value in &outcome.machine.printed {
        let _ = writeln!(text, "print {value:#x}");
    }
    let shown = if trace { 0 } else { outcome.visits.len().saturating_sub(1) };
    for visit in &outcome.visits[shown..] {
        let _ = writeln!(text, "{visit}");
    }
    let _ = writeln!(text, "opportunities: {}", outcome.opportunities);
    for (loc, value) in locations(&outcome.state) {
        let _ = writeln!(text, "{loc} = {value:#x}");
    }
    for (address, bytes) in outcome.machine.changes(before) {
        let hex: Vec<String> = bytes.iter().map(|b| format!("{b:#04x}")).collect();
        let _ = writeln!(text, "memory {address:#x}: i8 {}", hex.join(", "));
    }
    text
}

fn as_json(outcome: &Outcome<ModelMachine>, before: &ModelMachine) -> serde_json::Value {
    let registers: serde_json::Map<String, serde_json::Value> = locations(&outcome.state)
        .into_iter()
        .map(|(loc, v)| (loc.to_string(), format!("{v:#x}").into()))
        .collect();
    let memory: Vec<_> = outcome
        .machine
        .changes(before)
        .into_iter()
        .map(|(address, bytes)| json!({ "address": format!("{address:#x}"), "bytes": bytes }))
        .collect();
    let printed: Vec<String> = outcome.machine.printed.iter().map(|v| format!("{v:#x}")).collect();
    json!({
        "printed": printed,
        "visits": outcome.visits.iter().map(|v| v.to_string()).collect::<Vec<_>>(),
        "opportunities": outcome.opportunities,
        "registers": registers,
        "memory": memory,
    })
}
