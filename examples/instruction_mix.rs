//! Counts what the traces of a program execute: IR instructions by operation, each with how often it ran.
//!
//! ```text
//! cargo run --example instruction_mix -- ./thousand
//! instructions of IR executed in 12 traces: 9023641
//!     2998895  33.2 %  assume
//!     1999774  22.2 %  add.i64
//! …
//! ```
//!
//! *How.* A pass that changes nothing stands behind all others and tells the subscriber which operations each block
//! of a trace has. At the end the census of the run says how often each guard was reached, and so how often the
//! instructions between it and the guard before were executed. A block without guards counts as often as the trace was
//! entered, or its loop went round. What the guest executes outside traces is not in the figures.
//!
//! The table goes to standard error; standard output and the exit status are the program's.

use dynasour::census::{Census, Fragment};
use dynasour::events;
use dynasour::ir::Version;
use dynasour::{Event, OwnPass, Position, Session, SessionError, Tier};
use std::collections::{BTreeMap, HashMap};
use std::process::ExitCode;

/// The operations of each block of a version.
type Blocks = Vec<Vec<String>>;

/// What the pass says about a version: its name, and a line for each block.
fn described(version: &Version) -> String {
    let blocks = version.blocks.iter().map(|block| {
        let operations: Vec<String> = block.insts.iter().map(|i| i.op.to_string()).collect();
        operations.join(",")
    });
    std::iter::once(version.name.clone()).chain(blocks).collect::<Vec<_>>().join("\n")
}

fn understood(text: &str) -> Option<(String, Blocks)> {
    let (name, blocks) = text.split_once('\n')?;
    let operations =
        |line: &str| line.split(',').filter(|o| !o.is_empty()).map(String::from).collect();
    Some((name.to_string(), blocks.split('\n').map(operations).collect()))
}

/// How often the instruction at this place of a fragment was executed.
fn executed(fragment: &Fragment, block: u32, index: u32) -> u64 {
    let guards = || fragment.guards.iter().filter(|guard| guard.position.0 == block);
    let next = guards().filter(|guard| guard.position.1 >= index).min_by_key(|g| g.position.1);
    if let Some(next) = next {
        return next.executed;
    }
    match guards().max_by_key(|guard| guard.position.1) {
        Some(last) => last.executed - last.failed,
        None if block == 0 => fragment.entered,
        None => fragment.iterations.unwrap_or(fragment.entered),
    }
}

/// The number of executions of each operation.
fn mix(census: &Census, versions: &HashMap<String, Blocks>) -> BTreeMap<String, u64> {
    let mut mix = BTreeMap::new();
    for fragment in &census.fragments {
        for (block, operations) in (0..).zip(versions.get(&fragment.name).into_iter().flatten()) {
            for (index, operation) in (0..).zip(operations) {
                let times = executed(fragment, block, index);
                *mix.entry(operation.clone()).or_default() += times;
            }
        }
    }
    mix
}

fn print(mix: BTreeMap<String, u64>, traces: usize) {
    let all: u64 = mix.values().sum();
    eprintln!("instructions of IR executed in {traces} traces: {all}");
    let mut sorted: Vec<_> = mix.into_iter().collect();
    sorted.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    for (operation, times) in sorted {
        let share = 100.0 * times as f64 / all.max(1) as f64;
        eprintln!("{times:>12}  {share:4.1} %  {operation}");
    }
}

fn main() -> ExitCode {
    let mut command = std::env::args_os().skip(1);
    let Some(program) = command.next() else {
        eprintln!("usage: instruction_mix PROGRAM [ARG]…");
        return ExitCode::from(2);
    };
    let pass =
        OwnPass::new("mix", "tells what a trace consists of", Position::End, |version, _| {
            events::note(described(version));
            0
        });
    let mut versions = HashMap::new();
    let ran = Session::builder(program)
        .args(command)
        .tier(Tier::Dynamo)
        .threshold(100)
        .count(false)
        .pass(pass)
        .subscriber(|event| {
            if let Event::Note { text } = event {
                versions.extend(understood(text));
            }
        })
        .run();
    match ran {
        Ok(outcome) => {
            match &outcome.census {
                Some(census) => print(mix(census, &versions), versions.len()),
                None => eprintln!("instruction_mix: the program ended without a census"),
            }
            ExitCode::from(outcome.status.code().unwrap_or(1) as u8)
        }
        Err(error) => {
            eprintln!("instruction_mix: {error}");
            match error {
                SessionError::NotStarted { status, .. } => ExitCode::from(status as u8),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
