//! Guests under every selection of optimiser passes: no pass, each pass alone, the pipeline without
//! each, all passes, and random sequences.
//!
//! ```text
//! cargo test --test passes sorting -- --exact --nocapture   one guest, with times
//! cargo test --test passes -- --ignored                     every guest of the matrix (an hour)
//! DYNASOUR_FIRST_GUEST=NAME                                 with --ignored: from this guest on
//! DYNASOUR_PASS_SETS=100 cargo test --test passes           more random sequences
//! DYNASOUR_PASS_SEED=7 cargo test --test passes             other random sequences
//! ```
//!
//! A failure names the selection's flags and a command line that replays it.

use dynasour_testkit::list::{self, GUESTS};
use dynasour_testkit::mode::Mode;
use dynasour_testkit::{Lab, build::Guest, selection};

/// Heads are compiled after few executions, so that short guests have many traces.
const TRACES: selection::Traces = selection::Traces { tier: "dynamo", threshold: 5 };

fn compare(guest: &Guest) -> Result<(), String> {
    let lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    let modes: Vec<Mode> =
        selection::fixed(TRACES).into_iter().chain(selection::random(guest.name, TRACES)).collect();
    lab.compare_guest(guest, &modes)
}

fn check(guest: &Guest) {
    if let Err(report) = compare(guest) {
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
    flags_alu: "flags that are read",
    partial_registers: "values of every width",
    sse: "state that is in place",
    string_instructions: "accesses of unknown extent",
    segv_mprotect: "faults in the middle of traces",
    signals_context: "signals in the middle of traces",
    exceptions: "frames on the guest's stack that the unwinder reads",
    crash_hot_loop: "a loop that ends in a fault",
}

/// The log of the optimiser (`--log opt`) of a run with these flags.
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

/// The log marks a trace as optimised exactly if a pass that uses guards or loads has changed it.
#[test]
fn selections_take_effect() {
    let optimised = |flags: &[&str]| log(flags).matches(" optimised ").count();
    assert!(optimised(&[]) > 10);
    assert!(optimised(&["--passes", "simplify"]) > 10);
    assert_eq!(optimised(&["--passes", "params,dce,peel"]), 0);
    assert_eq!(optimised(&["--skip-pass", &selection::pipeline().join(",")]), 0);
}

/// All guests of the matrix, one after the other.
#[test]
#[ignore = "takes an hour"]
fn every_guest() {
    let first = std::env::var("DYNASOUR_FIRST_GUEST").unwrap_or_default();
    let reports: Vec<String> = GUESTS
        .iter()
        .skip_while(|guest| !first.is_empty() && guest.name != first)
        .filter_map(|guest| compare(guest).err())
        .collect();
    assert!(reports.is_empty(), "\n{}\n", reports.join("\n\n"));
}
