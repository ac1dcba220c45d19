//! Runs a program under three policies of guard placement, one of them its own, and compares their guards.
//!
//! ```text
//! cargo run --example policy -- ./thousand
//! policy           traces     executed     failed  deopts
//! default              10      1998896       1002     102
//! careful               9      2997851       1002     102
//! ```
//!
//! `careful` assumes nothing about values, lets each guard fall back to its own branch, and optimises a trace only
//! within one iteration. Its own policy of speculation makes a side trace only where an exit was taken 200 times. The table goes to standard error; standard output is that of
//! the program, once for each policy.

use dynasour::{
    DefaultPolicy, Gpr, Outcome, Placement, RegisterUse, Session, SessionError, SpeculationPolicy,
    Tier,
};
use std::ffi::OsString;
use std::process::ExitCode;

/// Assumes nothing about values, and moves nothing between iterations.
struct Careful;

impl Placement for Careful {
    fn name(&self) -> &'static str {
        "careful"
    }

    fn about(&self) -> &'static str {
        "nothing is assumed about values, nothing moves between iterations"
    }

    fn speculate_register(&self, _: Gpr, _: u64, _: RegisterUse) -> bool {
        false
    }

    fn speculate_aliasing(&self) -> bool {
        false
    }

    fn speculate_guest_loops(&self) -> bool {
        false
    }

    fn passes(&self) -> &'static [&'static str] {
        &["simplify", "params", "dce", "forward", "simplify", "dce"]
    }
}

/// As the default, but an exit must be taken this often before it gets a side trace.
struct Patient(DefaultPolicy, u32);

impl SpeculationPolicy for Patient {
    fn head_threshold(&self) -> u32 {
        self.0.head_threshold()
    }

    fn exit_threshold(&self) -> u32 {
        self.1
    }

    fn max_instructions(&self) -> usize {
        self.0.max_instructions()
    }

    fn max_failures(&self) -> u32 {
        self.0.max_failures()
    }

    fn max_versions(&self) -> usize {
        self.0.max_versions()
    }

    fn cache_overflowed(&mut self) {
        self.0.cache_overflowed();
    }

    fn placement(&self) -> &'static dyn Placement {
        self.0.placement()
    }
}

fn session(command: &[OsString], policy: &str) -> Result<Outcome, SessionError> {
    let session = Session::builder(&command[0])
        .args(&command[1..])
        .tier(Tier::Dynamo)
        .threshold(100)
        .count(false)
        .placement(Careful)
        .policy(policy);
    match policy {
        "careful" => session.speculation(|default| Box::new(Patient(default, 200))).run(),
        _ => session.run(),
    }
}

fn row(policy: &str, outcome: &Outcome) {
    let Some(census) = &outcome.census else {
        return eprintln!("{policy:<15} ended without a census");
    };
    let guards = || census.fragments.iter().flat_map(|fragment| &fragment.guards);
    let executed: u64 = guards().map(|guard| guard.executed).sum();
    let failed: u64 = guards().map(|guard| guard.failed).sum();
    let traces = census.fragments.iter().filter(|fragment| fragment.name != "stub").count();
    let deopts: u64 = census.deopts.values().sum();
    eprintln!("{policy:<15} {traces:>7} {executed:>12} {failed:>10} {deopts:>7}");
}

fn main() -> ExitCode {
    let command: Vec<OsString> = std::env::args_os().skip(1).collect();
    if command.is_empty() {
        eprintln!("usage: policy PROGRAM [ARG]…");
        return ExitCode::from(2);
    }
    eprintln!("policy           traces     executed     failed  deopts");
    let mut status = 0;
    for policy in ["default", "merged", "careful"] {
        match session(&command, policy) {
            Ok(outcome) => {
                row(policy, &outcome);
                status = outcome.status.code().unwrap_or(1);
            }
            Err(error) => {
                eprintln!("policy: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::from(status as u8)
}
