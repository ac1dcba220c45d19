//! `dynasour bench`: its output, its files, and the input that it refuses before it runs anything.

use dynasour_testkit::run::{Invocation, Outcome, Status, refused, text};
use dynasour_testkit::scratch;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const SUITES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/suites");

fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench_command").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

fn bench(directory: &Path, words: &[&str]) -> Outcome {
    let path = ("PATH".into(), std::env::var_os("PATH").expect("a PATH"));
    let mut run =
        Invocation::new(env!("CARGO_BIN_EXE_dynasour"), directory).args(["bench"]).args(words);
    run.environment.retain(|(name, _)| name != "PATH");
    run.environment.push(path);
    run.run()
}

/// Writes a suite of these commands to `directory`; returns its path.
fn suite(directory: &Path, workloads: &[(&str, &str)]) -> String {
    let mut text = "name = 'mine'\n".to_string();
    for (name, command) in workloads {
        text += &format!(
            "[[workload]]\nname = '{name}'\nclass = 'all'\ncommand = {command}\npackage = \
                'somewhere'\n"
        );
    }
    let path = directory.join("suite.toml");
    fs::write(&path, text).expect("written");
    path.into_os_string().into_string().expect("UTF-8")
}

#[test]
fn kernels_are_built_and_agree() {
    let directory = directory("kernels");
    let kernels = format!("{SUITES}/kernels.toml");
    let words = [
        &kernels,
        "--only",
        "sieve,fib-O2",
        "--small",
        "--runs",
        "2",
        "--tiers",
        "interp,dynamo",
        "--json",
    ];
    let outcome = bench(&directory, &words);
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    let report: Value = serde_json::from_slice(&outcome.stdout).expect("JSON");
    let names: Vec<&str> = report["rows"]
        .as_array()
        .expect("rows")
        .iter()
        .filter_map(|r| r["name"].as_str())
        .collect();
    assert_eq!(names, ["fib-O2", "sieve-O0", "sieve-O1", "sieve-O2", "sieve-O3"]);
    for row in report["rows"].as_array().expect("rows") {
        let cells = row["cells"].as_array().expect("cells");
        assert_eq!(cells.len(), 2);
        assert!(cells.iter().all(|c| c["ratio"]["median"].as_f64() > Some(0.0)
            && c["wall"].as_array().unwrap().len() == 2));
    }
}

#[test]
fn rows_tell_what_went_wrong_and_what_is_missing() {
    let directory = directory("rows");
    let counter = directory.join("counter");
    let differs = format!("['/bin/sh', '-c', 'echo x >> {0}; wc -l < {0}']", counter.display());
    let mine = suite(
        &directory,
        &[
            ("good", "['/bin/echo', '{n}']"),
            ("differs", &differs),
            ("fails", "['/bin/false']"),
            ("missing", "['no-such-program']"),
        ],
    );
    let outcome = bench(&directory, &[&mine, "--runs", "1", "--peer", "again=env {}"]);
    let table = text(&outcome.stdout);
    assert_eq!(outcome.status, Status::Exited(1), "{table}");
    let line = |name: &str| {
        table.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{name}: {table}"))
    };
    let heading = table.lines().next().unwrap_or_default();
    for column in ["dynamo", "copy", "full", "again"] {
        assert!(heading.contains(&format!("{column} / native")), "{table}");
    }
    assert_eq!(line("good").split_whitespace().count(), 2 + 4 * 3, "{table}");
    assert_eq!(line("differs").matches("DIFFERS").count(), 4, "{table}");
    assert!(line("fails").contains("status 1"), "{table}");
    assert!(line("skipped missing").contains("package somewhere"), "{table}");
}

#[test]
fn results_are_saved_compared_and_not_overwritten() {
    let directory = directory("saved");
    let mine = suite(&directory, &[("echo", "['/bin/echo', 'x']")]);
    let first = bench(&directory, &[&mine, "--runs", "1", "--save", "result.json"]);
    assert_eq!(first.status, Status::Exited(0), "{}", text(&first.stderr));
    refused(
        &bench(&directory, &[&mine, "--runs", "1", "--save", "result.json"]),
        &["result.json exists", "--force"],
    );
    let words =
        [&mine, "--runs", "1", "--save", "result.json", "--force", "--compare", "result.json"];
    let second = bench(&directory, &words);
    assert_eq!(second.status, Status::Exited(0), "{}", text(&second.stderr));
    assert!(
        text(&second.stdout).lines().next().is_some_and(|l| l.contains("was")),
        "{}",
        text(&second.stdout)
    );
    let left: Vec<_> = fs::read_dir(&directory)
        .expect("readable")
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn mistakes_are_refused_before_anything_runs() {
    let directory = directory("mistakes");
    let witness = directory.join("witness");
    let mine =
        suite(&directory, &[("touch", &format!("['/usr/bin/touch', '{}']", witness.display()))]);
    refused(&bench(&directory, &["none.toml"]), &["none.toml"]);
    refused(
        &bench(&directory, &[&mine, "--peer", "p=no-such-launcher {}"]),
        &["peer 'p'", "no-such-launcher"],
    );
    refused(&bench(&directory, &[&mine, "--peer", "p=valgrind"]), &["{}"]);
    refused(&bench(&directory, &[&mine, "--only", "xyz"]), &["xyz"]);
    refused(&bench(&directory, &[&mine, "--runs", "0"]), &["--runs"]);
    refused(&bench(&directory, &[&mine, "--tiers", "quick"]), &["quick"]);
    fs::write(directory.join("old.json"), "{}").expect("written");
    refused(&bench(&directory, &[&mine, "--compare", "old.json"]), &["old.json"]);
    let broken = directory.join("broken.toml");
    fs::write(&broken, "name = 'x'\n\n[[workload]]\nname = 'a'\n").expect("written");
    refused(&bench(&directory, &["broken.toml"]), &["broken.toml", "line 3", "class"]);
    assert!(!witness.exists());
}
