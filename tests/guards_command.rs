//! `dynasour guards`: its output, its files, and the input that it refuses.

use dynasour_testkit::run::{Invocation, Outcome, Status, refused, text};
use dynasour_testkit::{build, list, scratch};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const POLICIES: [&str; 7] =
    ["eager", "anchored", "hoisted", "merged", "control-only", "default", "combined"];

fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guards_command").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

/// A guest of the matrix.
fn guest(name: &str) -> String {
    let guest = list::guest(name).expect("a guest of the list");
    let built = build::build(guest, Path::new(env!("CARGO_TARGET_TMPDIR"))).expect("it builds");
    built.executable.into_os_string().into_string().expect("UTF-8")
}

/// A loop with three guards: the value of one does not change in the loop, and no memory access
/// separates them.
const LOOP: &str = r#"
#include <stdio.h>
#include <stdlib.h>
static long table[256];
__attribute__((noinline)) static long work(long n, long mode, unsigned long limit) {
    long sum = 0;
    for (long i = 0; i < n; i++) {
        unsigned long at = i & 255;
        if (mode == 8) table[at] ^= i;
        sum += at * (at ^ i);
        if (at >= limit) table[0]++;
    }
    return sum;
}
int main(int argc, char **argv) {
    printf("%ld\n", work(atol(argv[1]), argc + 5, 256 + (unsigned long)argc));
    return 0;
}
"#;

fn three_guards(directory: &Path) -> String {
    three_guards_linked(directory, &[])
}

fn three_guards_linked(directory: &Path, flags: &[&str]) -> String {
    let (source, program) = (directory.join("loop.c"), directory.join("loop"));
    fs::write(&source, LOOP).expect("written");
    let status =
        Command::new("cc").arg("-O1").args(flags).arg("-o").arg(&program).arg(&source).status();
    let status = status.expect("cc");
    assert!(status.success());
    program.into_os_string().into_string().expect("UTF-8")
}

fn guards(directory: &Path, words: &[&str]) -> Outcome {
    let path = ("PATH".into(), std::env::var_os("PATH").expect("a PATH"));
    let mut run = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), directory)
        .args(["guards", "--short"])
        .args(words);
    run.environment.retain(|(name, _)| name != "PATH");
    run.environment.push(path);
    run.run()
}

fn script(directory: &Path, body: &str) -> String {
    let path = directory.join("program");
    let text = format!("#!/bin/sh\n{body}\n");
    scratch::write_program(&path, text.as_bytes(), 0o755).expect("written");
    path.into_os_string().into_string().expect("UTF-8")
}

#[test]
fn every_policy_is_counted_and_timed() {
    let directory = directory("all");
    let program = three_guards(&directory);
    let words = ["--runs", "2", "--threshold", "50", "--json", "--", &program, "300000"];
    let outcome = guards(&directory, &words);
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    let report: Value = serde_json::from_slice(&outcome.stdout).expect("JSON");
    let rows = report["policies"].as_array().expect("rows");
    let names: Vec<&str> = rows.iter().filter_map(|r| r["policy"].as_str()).collect();
    assert_eq!(names, POLICIES);
    let number = |policy: &str, pointer: &str| -> f64 {
        let row = rows.iter().find(|r| r["policy"] == policy).expect("a row");
        row.pointer(pointer)
            .and_then(Value::as_f64)
            .unwrap_or_else(|| panic!("{policy} {pointer}: {row}"))
    };
    for policy in POLICIES {
        let count = |name: &str| number(policy, &format!("/counts/{name}"));
        assert!(count("traces") >= 1.0 && count("guards") >= 2.0, "{policy}");
        assert!(
            count("executed") > count("failed") && count("failed") >= count("left"),
            "{policy}"
        );
        let row = rows.iter().find(|r| r["policy"] == policy).expect("a row");
        let kinds = row["counts"]["kinds"].as_object().expect("kinds");
        let sum = |what: &str| kinds.values().filter_map(|k| k[what].as_f64()).sum::<f64>();
        assert_eq!(
            (sum("executed"), sum("failed")),
            (count("executed"), count("failed")),
            "{policy}"
        );
        assert_eq!(row["times"].as_array().map(Vec::len), Some(2));
        assert!(number(policy, "/seconds/median") > 0.0 && number(policy, "/compile_ms") > 0.0);
        assert!(number(policy, "/code_bytes") > 100.0 && number(policy, "/to_native/median") > 0.0);
    }
    assert_eq!(number("default", "/to_default/median"), 1.0);
    let executed = |policy: &str| number(policy, "/counts/executed");
    // Guards in each iteration.
    for (policy, expected) in POLICIES.iter().zip([3.0, 3.0, 2.0, 1.0, 2.0, 2.0, 1.0]) {
        let each = executed(policy) / 300_000.0;
        assert!((expected..expected + 0.2).contains(&each), "{policy}: {each}");
    }
    // The policy `control-only` has no guards on values.
    let row = rows.iter().find(|r| r["policy"] == "control-only").expect("a row");
    assert!(
        row.pointer("/counts/kinds/alias").is_none()
            && row.pointer("/counts/kinds/value").is_none(),
        "{row}"
    );
}

#[test]
fn tables_and_values_are_printed_and_saved() {
    let directory = directory("forms");
    let program = guest("sorting_unoptimised");
    let head = ["--runs", "1", "--threshold", "50", "--policies", "eager,default"];
    let with = |more: &[&str]| {
        guards(&directory, &[&head, more, &["--no-deopt-cost", "--", &program, "300"]].concat())
    };
    let table = with(&[]);
    let shown = text(&table.stdout);
    assert_eq!(table.status, Status::Exited(0), "{}", text(&table.stderr));
    let rows = |policy: &str| {
        shown.lines().filter(|l| l.split_whitespace().next() == Some(policy)).count()
    };
    assert_eq!((rows("eager"), rows("default"), rows("merged")), (4, 3, 0), "{shown}");
    assert!(shown.lines().skip(1).all(|line| line.chars().count() <= 100), "{shown}");
    let csv = with(&["--csv", "--save", "study.csv"]);
    assert_eq!(csv.status, Status::Exited(0), "{}", text(&csv.stderr));
    assert_eq!(fs::read(directory.join("study.csv")).expect("saved"), csv.stdout);
    let columns: Vec<usize> = text(&csv.stdout).lines().map(|l| l.split(',').count()).collect();
    assert!(
        columns.len() == 3 && columns.iter().all(|n| *n == columns[0] && *n > 30),
        "{columns:?}"
    );
    refused(&with(&["--csv", "--save", "study.csv"]), &["study.csv exists", "--force"]);
    assert_eq!(with(&["--csv", "--save", "study.csv", "--force"]).status, Status::Exited(0));
    refused(&with(&["--csv", "--json"]), &["--csv", "--json"]);
    refused(&with(&["--save", "nowhere/study"]), &["cannot write nowhere/study"]);
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("a full device");
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynasour"));
    let output = command
        .arg("guards")
        .args(head)
        .args(["--no-deopt-cost", "--", &program, "300"])
        .stdout(full)
        .output();
    let output = output.expect("it runs");
    assert!(
        output.status.code() == Some(2)
            && text(&output.stderr).contains("cannot write the results"),
        "{output:?}"
    );
}

/// Deoptimisations and seconds of each run of a sweep: the points through which the line is fitted.
fn points(curve: &Value) -> Vec<[f64; 2]> {
    let rows = curve["rates"].as_array().expect("rates").iter().chain([&curve["unlinked"]]);
    let runs = rows.flat_map(|row| {
        let column = |name: &str| row[name].as_array().expect("a column").clone();
        column("deopts").into_iter().zip(column("times"))
    });
    runs.map(|(deopts, seconds)| {
        [deopts.as_f64().expect("a count"), seconds.as_f64().expect("a time")]
    })
    .collect()
}

/// The slope of the least-squares line through these points.
fn slope(points: &[[f64; 2]]) -> f64 {
    let mean = |n: usize| points.iter().map(|p| p[n]).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(0), mean(1));
    let sum = |f: &dyn Fn(&[f64; 2]) -> f64| points.iter().map(f).sum::<f64>();
    sum(&|p| (p[0] - x) * (p[1] - y)) / sum(&|p| (p[0] - x).powi(2))
}

#[test]
fn the_sweep_finds_what_a_deoptimisation_costs() {
    let directory = directory("sweep");
    let program = guest("sorting_unoptimised");
    let head = ["--chaos-sweep", "--runs", "2", "--threshold", "50", "--rates", "3,30,1000000"];
    let outcome = guards(&directory, &[&head[..], &["--json", "--", &program, "400"]].concat());
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    let curve: Value = serde_json::from_slice(&outcome.stdout).expect("JSON");
    let deopts: Vec<f64> = curve["rates"]
        .as_array()
        .expect("rates")
        .iter()
        .map(|p| p["deopts"][0].as_f64().expect("a count"))
        .collect();
    assert!(deopts.len() == 3 && deopts[0] > deopts[1] && deopts[1] > deopts[2], "{deopts:?}");
    let number = |pointer: &str| curve.pointer(pointer).and_then(Value::as_f64).unwrap_or(f64::NAN);
    // The line goes through all runs, however noisy they are.
    let (low, found) = (number("/line/slope/low"), number("/line/slope/value"));
    let expected = slope(&points(&curve));
    assert!(
        (found - expected).abs() <= 1e-6 * expected.abs() && low < found,
        "{expected}: {curve}"
    );
    if low > 0.0 {
        let ns = number("/deopt_ns/value");
        assert!((ns / (1e9 * found) - 1.0).abs() < 1e-9, "{curve}");
        let cycles = ns * number("/cycles_per_nanosecond");
        assert!((number("/deopt_cycles/value") / cycles - 1.0).abs() < 1e-9, "{curve}");
    } else {
        // Noise explains the slope.
        assert!(curve["deopt_ns"].is_null() && curve["deopt_cycles"].is_null(), "{curve}");
    }
    let table = guards(&directory, &[&head[..], &["--", &program, "400"]].concat());
    let shown = text(&table.stdout);
    let conclusion = ["a deoptimisation costs", "of a deoptimisation is not determined"];
    assert!(shown.contains("1/30 ") && conclusion.iter().any(|c| shown.contains(c)), "{shown}");
    refused(
        &guards(&directory, &["--chaos-sweep", "--policies", "eager,merged", "--", &program]),
        &["one policy"],
    );
    refused(&guards(&directory, &["--rates", "3", "--", &program]), &["--chaos-sweep"]);
}

/// The values in the lines of a text.
fn lines(outcome: &Outcome) -> Vec<Value> {
    text(&outcome.stdout).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
}

#[test]
fn a_list_is_measured_in_shards_and_merged() {
    let directory = directory("list");
    let program = three_guards(&directory);
    let list =
        format!("{program} 200000\n# not there:\nno-such-program\n{program} 300000 '{{ }}'\n");
    fs::write(directory.join("list"), list).expect("written");
    let words = ["--list", "list", "--runs", "1", "--threshold", "50", "--policies", "default"];
    let words = [&words[..], &["--no-deopt-cost"]].concat();
    let whole = guards(&directory, &[&words[..], &["--jsonl"]].concat());
    assert_eq!(whole.status, Status::Exited(0), "{}", text(&whole.stderr));
    for shard in ["1/2", "2/2"] {
        let file = format!("{}.jsonl", &shard[..1]);
        let part = [&words[..], &["--shard", shard, "--jsonl", "--save", &file]].concat();
        assert_eq!(guards(&directory, &part).status, Status::Exited(0));
    }
    let none = [&words[..], &["--shard", "4/4", "--jsonl", "--save", "none.jsonl"]].concat();
    assert_eq!(guards(&directory, &none).status, Status::Exited(0));
    let merged = guards(&directory, &["--merge", "2.jsonl", "none.jsonl", "1.jsonl", "--jsonl"]);
    assert_eq!(merged.status, Status::Exited(0), "{}", text(&merged.stderr));
    // All but times.
    let identity = |study: &Value| {
        let row = &study["policies"][0];
        let parts = [&study["index"], &study["total"], &study["line"], &study["refused"]];
        serde_json::json!([parts, row["policy"], row["counts"]])
    };
    let identities = |lines: &[Value]| lines.iter().map(identity).collect::<Vec<_>>();
    let (whole, merged) = (lines(&whole), lines(&merged));
    assert_eq!(identities(&merged), identities(&whole));
    assert_eq!(merged.len(), 3);
    assert!(merged[1]["refused"].as_str().is_some_and(|why| why.contains("no-such-program")));
    assert!(merged[2]["line"].as_str().is_some_and(|line| line.ends_with("300000 '{ }'")));
    let csv = guards(&directory, &["--merge", "1.jsonl", "2.jsonl", "--csv"]);
    let csv = text(&csv.stdout);
    assert_eq!(csv.lines().count(), 1 + 2, "{csv}");
    let table = guards(&directory, &["--merge", "1.jsonl", "2.jsonl"]);
    assert!(text(&table.stdout).contains("refused no-such-program: "), "{}", text(&table.stdout));
    let part = guards(&directory, &["--merge", "2.jsonl"]);
    assert_eq!(part.status, Status::Exited(1));
    assert!(text(&part.stderr).contains("2 of 3 rows missing: 0, 2"), "{}", text(&part.stderr));
    refused(&guards(&directory, &["--merge", "1.jsonl", "1.jsonl"]), &["both have row 0"]);
    refused(&guards(&directory, &["--merge", "list"]), &["list", "dynasour-guards-1"]);
    refused(&guards(&directory, &["--list", "list", "--", "true"]), &["cannot be used with"]);
    refused(&guards(&directory, &["--shard", "1/2", "--", "true"]), &["cannot be used with"]);
    refused(&guards(&directory, &[]), &["PROG", "--list"]);
}

#[test]
fn the_published_schema_is_the_one_that_is_printed() {
    let directory = directory("schema");
    let printed = guards(&directory, &["--schema"]);
    let published = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/data/guards-1.schema.json");
    let published = fs::read_to_string(published).expect("docs/data/guards-1.schema.json");
    assert_eq!(
        published,
        text(&printed.stdout),
        "write it by --schema; a changed meaning needs a new number and a new file"
    );
}

#[test]
fn unknown_policies_and_programs_are_refused() {
    let directory = directory("unknown");
    let message = guards(&directory, &["--policies", "eager,lazy", "--", "/bin/true"]);
    refused(&message, &["lazy"]);
    refused(&message, &POLICIES);
    refused(&guards(&directory, &["--", "no-such-program"]), &["no-such-program"]);
    refused(&guards(&directory, &["--tier", "copy", "--", "/bin/true"]), &["copy", "no guards"]);
    refused(&guards(&directory, &["--stdin", "nothing", "--", "/bin/true"]), &["nothing"]);
    refused(&guards(&directory, &["/bin/true", "--runs", "0"]), &["--runs"]);
    refused(&guards(&directory, &["--tier", "direct", "--", "/bin/true"]), &["direct", "repeat"]);
    refused(
        &guards(&directory, &["--tier", "interp", "--", "/bin/true"]),
        &["interp", "no guards"],
    );
    let sampled = ["--threshold", "50", "--sample", "every=3", "--", "/bin/true"];
    refused(&guards(&directory, &sampled), &["--sample has no meaning", "--threshold"]);
    refused(&guards(&directory, &["--by-site", "0", "--", "/bin/true"]), &["--by-site"]);
}

/// Without `--threshold` the counts are of traces that are all kept, and the times are those of `run`.
#[test]
fn the_default_tier_is_that_of_run() {
    let directory = directory("default_tier");
    let program = three_guards(&directory);
    let words = ["--runs", "1", "--no-deopt-cost", "--policies", "eager,default"];
    let json = guards(&directory, &[&words[..], &["--json", "--", &program, "300000"]].concat());
    assert_eq!(json.status, Status::Exited(0), "{}", text(&json.stderr));
    let report: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!((&report["tier"], &report["threshold"]), (&"full".into(), &24_999.into()));
    assert!(report["timed_threshold"].is_null(), "{report}");
    let row = &report["policies"][0];
    assert_eq!(row["counts"]["traces"], 1, "{row}");
    assert_eq!(row["kept"].as_array().map(Vec::len), Some(1), "{row}");
    let table = guards(&directory, &[&words[..], &["--", &program, "300000"]].concat());
    let shown = text(&table.stdout);
    assert!(shown.contains("`dynasour run` keeps "), "{shown}");
    assert!(shown.contains("eager executes 50 % more guards, compared with default"), "{shown}");
    // Every trace is kept if the user asks for early ones.
    let early = ["--threshold", "50", "--json", "--", &program, "300000"];
    let json = guards(&directory, &[&words[..], &early].concat());
    let report: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(report["timed_threshold"], 50);
    let made = &report["policies"][0]["counts"]["traces"];
    assert_eq!(&report["policies"][0]["kept"][0], made, "{report}");
}

/// The three guards of each iteration: one does not vary, and all may become one. From the run of
/// `eager` the model predicts what the other policies execute.
#[test]
fn the_best_placement_is_found_and_policies_are_predicted() {
    let directory = directory("counterfactual");
    // Without the dynamic linker, whose traces are entered often, so that their first iterations are guessed.
    let program = three_guards_linked(&directory, &["-static"]);
    let words = ["--counterfactual", "--runs", "1", "--no-deopt-cost", "--threshold", "50"];
    let json = guards(&directory, &[&words[..], &["--json", "--", &program, "300000"]].concat());
    assert_eq!(json.status, Status::Exited(0), "{}", text(&json.stderr));
    let report: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    for row in report["policies"].as_array().expect("rows") {
        let number =
            |name: &str| row["placed"][name].as_f64().unwrap_or_else(|| panic!("{name}: {row}"));
        let each = |name: &str| number(name) / 300_000.0;
        assert_eq!(number("executed"), row["counts"]["executed"].as_f64().expect("a count"));
        assert_eq!(number("modelled"), number("executed"), "{row}");
        let policy = row["policy"].as_str().expect("a name");
        let separate = if ["merged", "combined"].contains(&policy) { 1.0 } else { 2.0 };
        assert!((separate..separate + 0.05).contains(&each("separate")), "{row}");
        assert!((1.0..1.05).contains(&each("joined")), "{row}");
        assert!(number("compared") > 0.99 * number("executed"), "{row}");
        let error = number("predicted") / number("compared") - 1.0;
        assert!(error.abs() < 0.0001, "{policy}: {error}: {row}");
    }
    let table = guards(&directory, &[&words[..], &["--", &program, "300000"]].concat());
    let shown = text(&table.stdout);
    assert!(shown.contains("best joined") && shown.contains("covers"), "{shown}");
    assert!(shown.lines().skip(1).all(|line| line.chars().count() <= 100), "{shown}");
    refused(
        &guards(&directory, &["--counterfactual", "--chaos-sweep", "--", &program]),
        &["cannot be used with"],
    );
}

#[test]
fn policies_are_compared_guard_by_guard() {
    let directory = directory("sites");
    let program = three_guards(&directory);
    let words = ["--by-site", "2", "--policies", "eager,hoisted", "--runs", "1", "--no-deopt-cost"];
    let json = guards(&directory, &[&words[..], &["--json", "--", &program, "300000"]].concat());
    assert_eq!(json.status, Status::Exited(0), "{}", text(&json.stderr));
    let report: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    // One predicate does not vary: it is checked in each iteration, or once before the loop.
    let site = &report["sites"][0];
    assert!(site["site"].as_str().is_some_and(|site| site.starts_with("branch@")), "{report}");
    assert!(site["symbol"].as_str().is_some_and(|symbol| symbol.starts_with("work")), "{report}");
    let executed: Vec<u64> = (site["counts"].as_array().expect("counts").iter())
        .filter_map(|counts| counts["executed"].as_u64())
        .collect();
    assert!(executed[0] > 270_000 && executed[1] <= 2, "{site}");
    let table = guards(&directory, &[&words[..], &["--", &program, "300000"]].concat());
    let shown = text(&table.stdout);
    let line = shown.lines().find(|line| line.starts_with("branch@")).expect("a site");
    assert!(line.contains("work") && line.contains("hoisted"), "{shown}");
}

#[test]
fn colours_are_for_terminals() {
    let directory = directory("colours");
    let program = three_guards(&directory);
    let words = ["--runs", "1", "--no-deopt-cost", "--policies", "default"];
    let more = ["--color", "always", "--save", "table", "--", &program, "300000"];
    let outcome = guards(&directory, &[&words[..], &more].concat());
    assert!(text(&outcome.stdout).contains("\u{1b}["), "{}", text(&outcome.stdout));
    let plain = guards(&directory, &[&words[..], &["--", &program, "300000"]].concat());
    assert!(!text(&plain.stdout).contains('\u{1b}'), "{}", text(&plain.stdout));
}

#[test]
fn programs_without_hot_code_say_so() {
    let directory = directory("cold");
    let hello = guest("asm_hello");
    refused(
        &guards(&directory, &["--runs", "1", "--", &hello]),
        &["asm_hello never gets hot: nothing was executed 24999 times", "--threshold"],
    );
    let words = ["--chaos-sweep", "--runs", "1", "--rates", "10", "--", &hello];
    refused(&guards(&directory, &words), &["asm_hello never gets hot"]);
    // A loop that is hot, of which a trace gains nothing.
    let program = three_guards(&directory);
    let words = ["--threshold", "30000", "--runs", "1", "--", &program, "3000000"];
    refused(&guards(&directory, &words), &["gets hot, but no trace was made", "below 25000"]);
    // The dynamic linker has hot loops, but the program ends too early to be measured.
    let words = ["--runs", "1", "--no-deopt-cost", "--policies", "default", "--threshold", "1000"];
    let words = [&words[..], &["--", "/bin/true"]].concat();
    let outcome = guards(&directory, &words);
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
}

/// A program that is too short is counted, not timed, and the size to try is said.
#[test]
fn short_programs_are_not_timed() {
    let directory = directory("short");
    let words = ["--runs", "2", "--policies", "default", "--threshold", "1000", "--json"];
    let unasked = |more: &[&str]| {
        Invocation::new(env!("CARGO_BIN_EXE_dynasour"), &directory)
            .args(["guards"])
            .args(words)
            .args(more)
            .args(["--", "/bin/true"])
            .run()
    };
    let seconds = |outcome: &Outcome| {
        assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
        let found: Value = serde_json::from_slice(&outcome.stdout).expect("JSON");
        assert!(found["policies"][0]["counts"]["traces"].as_u64().expect("a number") > 0);
        found["policies"][0]["seconds"].clone()
    };
    let outcome = unasked(&[]);
    assert!(seconds(&outcome).is_null());
    let errors = text(&outcome.stderr);
    assert!(errors.contains("too short to time") && errors.contains("at least 0.2 s"), "{errors}");
    assert!(!seconds(&unasked(&["--short"])).is_null());
    refused(&unasked(&["--chaos-sweep"]), &["too short to time", "--short"]);
}

#[test]
fn programs_that_do_not_repeat_are_refused_and_failing_ones_are_named() {
    let directory = directory("repeat");
    let changing = script(&directory, "echo x >> counter; wc -c < counter");
    refused(
        &guards(&directory, &["--", &changing]),
        &["two native runs print different things", "byte 0"],
    );
    let ending = script(&directory, "echo x >> lines; exit $(wc -l < lines)");
    refused(&guards(&directory, &["--", &ending]), &["two native runs end differently"]);
    let failing = script(&directory, "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done; exit 3");
    let words = [
        "--runs",
        "1",
        "--threshold",
        "50",
        "--no-deopt-cost",
        "--policies",
        "eager",
        "--",
        &failing,
    ];
    let outcome = guards(&directory, &words);
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    assert!(
        text(&outcome.stderr).contains("ends natively with exit status: 3"),
        "{}",
        text(&outcome.stderr)
    );
}

/// A program that detects that it is translated: it prints something else from its third run on.
#[test]
fn runs_that_differ_from_native_are_rows_that_say_so() {
    let directory = directory("differs");
    // The first two runs are native; later ones print something else.
    let body = "echo x >> runs; if [ $(wc -l < runs) -gt 2 ]; then echo other; else echo same; fi";
    let program = script(&directory, body);
    let outcome =
        guards(&directory, &["--runs", "1", "--policies", "eager,merged", "--", &program]);
    let shown = text(&outcome.stdout);
    assert_eq!(outcome.status, Status::Exited(1), "{shown}{}", text(&outcome.stderr));
    assert_eq!(shown.matches("DIFFERS").count(), 2, "{shown}");
    assert!(text(&outcome.stderr).contains("--policy eager"), "{}", text(&outcome.stderr));
}

/// A pipeline is a row beside the policies. With the passes of `eager` it counts what `eager` counts.
#[test]
fn pipelines_are_compared_with_policies() {
    let directory = directory("pipelines");
    let program = three_guards(&directory);
    let passes = "simplify,params,forward,simplify,params,dce,sink,flagparams,params,dce";
    let (same, none) = (format!("same=eager:{passes}"), "none=eager:dce");
    let words =
        ["--policies", "eager", "--pipeline", &same, "--pipeline", none, "--runs", "1", "--json"];
    let more = ["--no-deopt-cost", "--threshold", "50", "--", &program, "300000"];
    let outcome = guards(&directory, &[&words[..], &more].concat());
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    let report: Value = serde_json::from_slice(&outcome.stdout).expect("JSON");
    let rows = report["policies"].as_array().expect("rows");
    let names: Vec<&str> = rows.iter().filter_map(|r| r["policy"].as_str()).collect();
    assert_eq!(names, ["eager", "same", "none"]);
    let executed = |row: usize| rows[row].pointer("/counts/executed").and_then(Value::as_u64);
    let (eager, same, none) = (executed(0), executed(1), executed(2));
    assert!(eager.is_some() && eager == same, "{eager:?} {same:?}");
    assert!(none >= eager, "{none:?}: no pass removes guards");
    for (words, part) in [
        (&["--pipeline", "x=dce", "--pipeline", "x=dce", "true"][..], "two pipelines"),
        (&["--pipeline", "eager=dce", "true"], "name of a policy"),
        (&["--pipeline", "x=nothing", "true"], "unknown pass"),
        (&["--pipeline", "x=dce", "--chaos-sweep", "true"], "cannot be used with"),
    ] {
        refused(&guards(&directory, words), &[part]);
    }
}
