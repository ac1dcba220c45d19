//! `--verify-traces`: every trace of real programs, and its machine code, agrees with what was recorded;
//! the figures are in the statistics and in `explain`.
//!
//! `cargo test --release --test verify_traces -- --nocapture` prints the table of docs/proof.md.

use dynasour_testkit::run::{Invocation, Outcome, Status, text};
use dynasour_testkit::scratch;
use dynasour_testkit::workloads::{PROGRAMS, installed, lines};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("verify_traces").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is a number"))
}

/// The statistics of a verified run, whose output and status are those of the native run.
fn statistics(directory: &Path, options: &[&str], command: &[&str], native: &Outcome) -> Value {
    let outcome = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), directory)
        .args(["run", "--verify-traces", "--stats-json", "s.json"])
        .args(options)
        .args(["--"])
        .args(command)
        .run();
    assert_eq!(native.difference(&outcome), None, "{command:?}: {}", text(&outcome.stderr));
    let json = fs::read_to_string(directory.join("s.json")).expect("the file");
    serde_json::from_str(&json).expect("JSON")
}

#[test]
fn traces_of_real_programs_agree_with_what_was_recorded() {
    let directory = directory("programs");
    fs::write(directory.join("lines"), lines()).expect("a file");
    println!(
        "{:<10}{:>8}{:>8}{:>10}{:>10}{:>8}{:>8}{:>8}{:>8}",
        "program", "traces", "whole", "states", "of code", "guards", "failed", "exits", "taken"
    );
    let mut programs = 0;
    for command in PROGRAMS {
        let Some(file) = installed(command[0]) else {
            assert!(std::env::var_os("DYNASOUR_REQUIRE_PROGRAMS").is_none(), "{}", command[0]);
            eprintln!("skipped: {} is not installed", command[0]);
            continue;
        };
        let file = file.to_str().expect("UTF-8");
        let command = [&[file], &command[1..]].concat();
        let native = Invocation::new(file, &directory).args(&command[1..]).run();
        let options = ["--tier", "dynamo", "--threshold", "1000"];
        let stats = statistics(&directory, &options, &command, &native);
        let [version, code] = [&stats["verified"], &stats["verified_code"]];
        let of = |value: &Value, name: &str| number(&value[name]);
        assert_eq!(of(version, "traces"), of(code, "traces"), "{command:?}");
        assert!(of(version, "traces") >= number(&stats["fragments"]), "{command:?}: {stats}");
        assert!(2 * of(version, "whole") > of(version, "traces"), "{command:?}: {version}");
        assert!(of(version, "states") > 100 * of(version, "traces"), "{command:?}: {version}");
        println!(
            "{:<10}{:>8}{:>8}{:>10}{:>10}{:>8}{:>8}{:>8}{:>8}",
            Path::new(file).file_name().expect("a name").display(),
            of(version, "traces"),
            of(version, "whole"),
            of(version, "states"),
            of(code, "states"),
            number(&version["guards"][0]),
            number(&version["guards"][2]),
            number(&code["exits"][0]),
            number(&code["exits"][1]),
        );
        programs += 1;
    }
    assert!(programs > 0, "none of the programs is installed");
}

/// A small loop: all is executed, and each guard fails in some case.
#[test]
fn explain_shows_the_certificates() {
    let directory = directory("explain");
    let source = format!("{}/tests/explain/thousand.c", env!("CARGO_MANIFEST_DIR"));
    let program = directory.join("program");
    let compiled = Command::new("cc").arg("-O1").arg("-o").arg(&program).arg(source).status();
    assert!(compiled.expect("a C compiler").success());
    let program = program.to_str().expect("UTF-8");
    let explain = |options: &[&str]| {
        let outcome = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), &directory)
            .args(["explain", "--discard-output", "--tier", "dynamo", "--threshold", "1000"])
            .args(["--show", "guards"])
            .args(options)
            .args(["--", program, "1000000"])
            .run();
        assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
        text(&outcome.stdout)
    };
    let report = explain(&["--verify-traces"]);
    assert!(report.contains("  version verified: "), "{report}");
    assert!(report.contains("  code verified: "), "{report}");
    assert!(!explain(&[]).contains("verified"), "nobody has asked for it");
    let json: Value = serde_json::from_str(&explain(&["--verify-traces", "--json"])).expect("JSON");
    let [version, code] = [0, 1].map(|i| &json["regions"][0]["versions"][0]["certificates"][i]);
    assert_eq!((&version["whole"], &code["whole"]), (&Value::from(true), &Value::from(true)));
    let [guards, held, failed] = [0, 1, 2].map(|i| number(&version["guards"][i]));
    assert!(guards > 0 && held == guards && failed == guards, "{version}");
    let [exits, taken] = [0, 1].map(|i| number(&code["exits"][i]));
    assert!(exits > 0 && taken == exits, "{code}");
}
