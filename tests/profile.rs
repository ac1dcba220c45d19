//! `run --stats` reports where the time went and how the targets of indirect transfers were found;
//! `run --perf-map` names the code in the code cache.

use dynasour_testkit::scratch;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("profile").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

/// A guest that spends its time in the function `work`.
fn guest(directory: &Path) -> PathBuf {
    let file = directory.join("thousand");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/explain/thousand.c");
    let status = Command::new("cc")
        .args(["-O1", "-o"])
        .arg(&file)
        .arg(source)
        .status()
        .expect("a C compiler");
    assert!(status.success());
    file
}

fn dynasour() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynasour"));
    command.arg("run");
    command
}

/// The lines of the map of a run: start, size, name.
fn map(guest: &Path, tier: &str) -> Vec<(u64, u64, String)> {
    let mut run = dynasour();
    run.args(["--perf-map", "--tier", tier, "--threshold", "500", "--"])
        .arg(guest)
        .stdout(Stdio::null());
    let mut child = run.spawn().expect("it starts");
    let path = PathBuf::from(format!("/tmp/perf-{}.map", child.id()));
    assert!(child.wait().expect("it ends").success());
    let text = fs::read_to_string(&path).expect("a map");
    fs::remove_file(path).expect("it is ours");
    let hex = |text: &str| u64::from_str_radix(text, 16).expect("hexadecimal");
    let line = |line: &str| {
        let mut words = line.splitn(3, ' ');
        let mut word = || words.next().expect("three words");
        (hex(word()), hex(word()), word().to_string())
    };
    text.lines().map(line).collect()
}

#[test]
fn the_perf_map_names_traces_and_blocks() {
    let directory = directory("map");
    let guest = guest(&directory);
    for tier in ["dynamo", "full"] {
        let lines = map(&guest, tier);
        assert!(lines.iter().all(|(start, size, name)| *start > 0x1000_0000
            && *size > 0
            && name.starts_with("dynasour:")));
        let trace = |name: &str| name.starts_with("dynasour:t") && name.contains(":work+0x");
        assert!(
            lines.iter().any(|(_, _, name)| trace(name) && !name.ends_with(":exits")),
            "{tier}: {lines:?}"
        );
        assert!(lines.iter().any(|(_, _, name)| trace(name) && name.ends_with(":exits")), "{tier}");
        let copied = lines.iter().any(|(_, _, name)| name.starts_with("dynasour:copy:main"));
        assert_eq!(copied, tier == "full");
        let mut code: Vec<(u64, u64)> =
            lines.iter().map(|(start, size, _)| (*start, start + size)).collect();
        code.sort_unstable();
        assert!(code.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{tier}: pieces lie apart");
    }
}

#[test]
fn statistics_say_where_the_time_went() {
    let directory = directory("time");
    let guest = guest(&directory);
    let run = |tier: &str, iterations: &str| -> (Value, String, f64) {
        let file = directory.join("stats.json");
        let start = Instant::now();
        let output = dynasour()
            // With its default threshold, `full` would first estimate whether a trace pays.
            .args(["--stats", "--threshold", "1000", "--tier", tier, "--stats-json"])
            .args([&file, Path::new("--"), &guest, Path::new(iterations)])
            .output()
            .expect("it runs");
        assert!(output.status.success());
        let wall = start.elapsed().as_secs_f64();
        let json = fs::read_to_string(&file).expect("statistics");
        (
            serde_json::from_str(&json).expect("JSON"),
            String::from_utf8_lossy(&output.stderr).into_owned(),
            wall,
        )
    };
    let seconds = |stats: &Value, phase: &str| {
        stats["time_nanoseconds"][phase].as_f64().expect("a number") / 1e9
    };
    for (tier, phase, iterations) in [
        ("interp", "interpreting", "1000000"),
        ("dynamo", "native", "100000000"),
        ("full", "native", "100000000"),
    ] {
        let (stats, table, wall) = run(tier, iterations);
        let times = stats["time_nanoseconds"].as_object().expect("an object");
        let all: f64 = times.values().filter_map(Value::as_f64).sum::<f64>() / 1e9;
        assert!(all > 0.0 && all <= wall, "{tier}: {all} s of {wall} s");
        assert!(seconds(&stats, phase) > 0.5 * all, "{tier}: {stats}");
        assert!(table.contains("time of its threads (ms)") && table.contains(phase), "{table}");
        if tier == "dynamo" {
            // The dynamic linker has loops of its own, which are counted and listed apart.
            let count = |field: &str| stats[field].as_u64().expect("a number");
            assert!((1..count("fragments")).contains(&count("linker_fragments")), "{stats}");
            let heads = stats["heads"].as_array().expect("a list");
            let apart: Vec<bool> =
                heads.iter().map(|head| head["in_linker"] == Value::Bool(true)).collect();
            assert!(apart.is_sorted() && apart.contains(&true) && apart.contains(&false));
            let of_work =
                |head: &&Value| head["symbol"].as_str().is_some_and(|s| s.starts_with("work"));
            assert!(
                heads.iter().filter(of_work).all(|head| head["in_linker"] == Value::Bool(false))
            );
            assert!(
                table.contains("\n    in the dynamic linker")
                    && table.contains("\n  in the dynamic linker (")
            );
            for phase in [
                "interpreting",
                "translating",
                "recording",
                "optimising",
                "emitting",
                "dispatching",
            ] {
                assert!(seconds(&stats, phase) > 0.0, "{phase}: {stats}");
            }
        }
        // Where the kernel delivers samples, they fall into a trace of the loop.
        let samples = |part: &str| stats["native_samples"][part].as_u64().unwrap_or(0);
        if samples("in traces") + samples("in copied blocks") > 20 {
            assert!(
                tier == "full" && samples("in traces") > samples("in copied blocks"),
                "{stats}"
            );
        }
    }
    // Without the option, nothing is timed.
    let quiet = dynasour().arg("--").arg(&guest).output().expect("it runs");
    assert!(quiet.stderr.is_empty());
}

#[test]
fn statistics_say_how_indirect_transfers_were_found() {
    const CALLS: u64 = 1_000_000;
    /// An upper limit of the transfers that a C program makes outside the loop.
    const OTHERS: u64 = 20_000;
    let directory = directory("indirect");
    let (source, guest) = (directory.join("calls.c"), directory.join("calls"));
    let text = "static unsigned one(unsigned a) { return a + 1; }
        static unsigned two(unsigned a) { return a ^ 5; }
        unsigned (*volatile functions[])(unsigned) = {one, two};
        int main(void) {
            unsigned sum = 0;
            for (unsigned i = 0; i < CALLS; i++) sum = functions[i & 1](sum);
            static volatile unsigned result;
            result = sum;
            return 0;
        }";
    fs::write(&source, text).expect("room");
    let compiled = Command::new("cc")
        .arg(format!("-DCALLS={CALLS}"))
        .arg("-o")
        .args([&guest, &source])
        .status();
    assert!(compiled.expect("a C compiler").success());
    let file = directory.join("stats.json");
    let run = |options: &[&str]| -> (Value, String) {
        let mut run = dynasour();
        run.args(["--tier", "copy"]).args(options).arg("--stats-json").args([
            &file,
            Path::new("--"),
            &guest,
        ]);
        let output = run.output().expect("it runs");
        assert!(output.status.success());
        let json: Value =
            serde_json::from_str(&fs::read_to_string(&file).expect("statistics")).expect("JSON");
        (json["indirect"].clone(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (counts, table) = run(&["--stats"]);
    let number = |name: &str| counts[name].as_u64().expect("a number");
    // The executed transfers are the calls and returns of the loop.
    assert!((2 * CALLS..2 * CALLS + OTHERS).contains(&number("executed")), "{counts}");
    assert!(number("second") + number("missed") < OTHERS && number("missed") > 0, "{counts}");
    assert!(
        table.contains("indirect transfers") && table.contains("in the first table"),
        "{table}"
    );
    let (uncounted, _) = run(&[]);
    assert!(
        uncounted["executed"].is_null() && uncounted["missed"].as_u64() > Some(0),
        "{uncounted}"
    );
}
