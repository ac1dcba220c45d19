//! Guests under every selection of optimiser passes: none, each alone, all without one, all there are, and random sequences.
//!
//! ```text
//! cargo test --test passes sorting -- --exact --nocapture     one guest, with the time of each selection
//! cargo test --test passes -- --ignored                       every guest of the matrix (an hour)
//! DYNASOUR_PASS_SETS=100 cargo test --test passes             more random sequences
//! DYNASOUR_PASS_SEED=7 cargo test --test passes               other ones
//! ```
//!
//! A failure names the selection's flags and a command line that replays it.

use dynasour_ir::opt::{PASSES, PIPELINE};
use dynasour_ir::random::Rng;
use dynasour_testkit::list::{self, GUESTS};
use dynasour_testkit::mode::Mode;
use dynasour_testkit::{Lab, build::Guest};

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable} must be a number")),
        Err(_) => default,
    }
}

/// The passes that real traces can go through, by name.
fn passes() -> Vec<&'static str> {
    PASSES.iter().filter(|pass| !pass.evaluator_only).map(|pass| pass.name).collect()
}

fn mode(name: &'static str, option: &str, passes: &[&str]) -> Mode {
    let flags = ["--tier", "dynamo", "--threshold", "5", option, &passes.join(",")];
    Mode { name, flags: flags.into_iter().map(str::to_owned).collect() }
}

/// The selections that every guest goes through.
fn fixed() -> Vec<Mode> {
    let mut pipeline = PIPELINE.to_vec();
    pipeline.sort_unstable();
    pipeline.dedup();
    let mut modes = vec![mode("none", "--skip-pass", &pipeline)];
    modes.extend(passes().iter().map(|pass| mode("alone", "--passes", &[pass])));
    modes.extend(pipeline.iter().map(|pass| mode("without", "--skip-pass", &[pass])));
    // What is not in the pipeline, between what cleans up and what defers stores.
    let rest = passes().into_iter().filter(|pass| !PIPELINE.contains(pass));
    let all: Vec<&str> = PIPELINE.iter().copied().chain(rest).chain(["simplify", "params", "dce"]).collect();
    modes.push(mode("all", "--passes", &all));
    modes
}

/// Random sequences of passes, other ones for each guest.
fn random(guest: &Guest) -> Vec<Mode> {
    let salt = guest.name.bytes().fold(0u64, |salt, byte| salt.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let mut rng = Rng::new(number("DYNASOUR_PASS_SEED", 1) ^ salt);
    let all = passes();
    let mut sequence = || -> Vec<&str> { (0..1 + rng.below(10)).map(|_| rng.pick(&all)).collect() };
    (0..number("DYNASOUR_PASS_SETS", 6)).map(|_| mode("random", "--passes", &sequence())).collect()
}

fn check(guest: &Guest) {
    let lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    let modes: Vec<Mode> = fixed().into_iter().chain(random(guest)).collect();
    if let Err(report) = lab.compare_guest(guest, &modes) {
        panic!("\n{report}\n");
    }
}

macro_rules! telling {
    ($($name:ident: $why:literal,)*) => {
        $(
            #[doc = $why]
            #[test]
            fn $name() {
                check(list::guest(stringify!($name)).expect("a guest of the matrix"));
            }
        )*
    };
}

telling! {
    sorting: "loops and branches over an array",
    sorting_unoptimised: "locals on the stack: forwarding, sinking, slots",
    hashing: "arithmetic whose bits are known",
    bytecode: "an indirect branch in a loop",
    recursion: "calls and returns",
    flags_alu: "flags that somebody looks at",
    partial_registers: "values of every width",
    sse: "state that is in place",
    string_instructions: "accesses of unknown extent",
    segv_mprotect: "faults in the middle of traces",
    signals_context: "signals in the middle of traces",
    exceptions: "frames on the guest's stack that somebody walks",
    crash_hot_loop: "a loop that ends in a fault",
}

/// What is said about traces after the optimiser, with these flags.
fn log(flags: &[&str]) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_dynasour"));
    command
        .args(["run", "--tier", "dynamo", "--threshold", "5", "--log", "opt"])
        .args(flags)
        .args(["--", "/bin/ls", "/"]);
    let out = command.output().expect("it runs");
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stderr).expect("text")
}

/// The flags do what they say: a trace is marked as optimised exactly if a pass that uses guards or loads has changed it.
#[test]
fn selections_take_effect() {
    let optimised = |flags: &[&str]| log(flags).matches(" optimised ").count();
    assert!(optimised(&[]) > 10);
    assert!(optimised(&["--passes", "simplify"]) > 10);
    assert_eq!(optimised(&["--passes", "params,dce,peel"]), 0);
    let all = fixed().remove(0).flags.pop().expect("the passes of the pipeline");
    assert_eq!(optimised(&["--skip-pass", &all]), 0);
}

/// The whole matrix of guests, one after the other.
#[test]
#[ignore = "takes an hour"]
fn every_guest() {
    GUESTS.iter().for_each(check);
}
