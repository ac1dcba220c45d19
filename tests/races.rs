//! Traces that race with what they replace: whatever the verdict, the guest does the same; and
//! guest code in place enters its traces by itself.

use dynasour_testkit::run::{Invocation, Outcome, Status, text};
use dynasour_testkit::scratch;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A fresh directory for a test, and this guest there.
fn guest(name: &str, guest: &str) -> (PathBuf, String) {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("races").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    let file = directory.join(guest);
    let source = format!("{}/tests/races/{guest}.c", env!("CARGO_MANIFEST_DIR"));
    let status = Command::new("cc").args(["-O0", "-pthread", "-o"]).arg(&file).arg(source).status();
    assert!(status.expect("cc").success());
    (directory, file.into_os_string().into_string().expect("UTF-8"))
}

/// The statistics of the last run.
fn statistics(directory: &Path) -> Value {
    let json = fs::read_to_string(directory.join("s.json")).expect("the file");
    serde_json::from_str(&json).expect("JSON")
}

/// Runs the guest with these options, and returns the races of its statistics.
fn races(directory: &Path, options: &[&str], command: &[&str], native: &Outcome) -> Vec<Value> {
    let outcome = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), directory)
        .args(["run", "--stats-json", "s.json"])
        .args(options)
        .args(["--"])
        .args(command)
        .run();
    assert_eq!(native.difference(&outcome), None, "{options:?}");
    let json = statistics(directory);
    let [races, heads] = ["races", "heads"].map(|name| json[name].as_array().expect("a list"));
    for race in races {
        let head =
            heads.iter().find(|head| head["pc"] == race["pc"]).expect("each racer is listed");
        assert!(head["tries"].as_u64() > Some(0), "{head}");
    }
    races.clone()
}

/// The trace of this guest wins, loses, or never does either; the guest does the same. Forced races count visits
/// of the runtime, so they do not depend on time. Returns as [`guest`] does.
fn force_verdicts(name: &str, source: &str) -> (PathBuf, String) {
    let (directory, program) = guest(name, source);
    let native = Invocation::new(&program, &directory).run();
    assert_eq!(native.status, Status::Exited(0));
    let tiers: [&[&str]; 2] = [&["--tier", "full"], &["--tier", "direct", "--sample", "every=1"]];
    for tier in tiers {
        for (mode, verdict) in
            [("trace", Some("trace")), ("floor", Some("floor")), ("swap", None), ("off", None)]
        {
            let options = [tier, &["--threshold", "50", "--race", mode]].concat();
            let races = races(&directory, &options, &[&program], &native);
            assert_eq!(races.is_empty(), verdict.is_none(), "{options:?}: {races:?}");
            assert!(races.iter().all(|race| race["verdict"].as_str() == verdict), "{races:?}");
        }
    }
    (directory, program)
}

#[test]
fn forced_verdicts_change_nothing_but_speed() {
    force_verdicts("forced", "interpreter");
}

/// A race that is measured ends with a verdict that agrees with what was measured.
#[test]
fn verdicts_agree_with_the_times() {
    let (directory, program) = guest("measured", "interpreter");
    // Some tenths of a second: the traces have time to race.
    let command = [program.as_str(), "200000", "plain"];
    let native = Invocation::new(&program, &directory).args(&command[1..]).run();
    for tier in ["full", "direct"] {
        races(&directory, &["--tier", tier], &command, &native).iter().for_each(agrees);
    }
}

/// Does the verdict follow from the times?
fn agrees(race: &Value) {
    let [trace, floor, error] =
        ["trace", "floor", "error"].map(|name| race[name].as_i64().expect("a number"));
    match race["verdict"].as_str() {
        // After the most rounds half of the interval suffices.
        Some("trace") if race["rounds"].as_u64() >= Some(60) => {
            assert!(floor - trace > error / 2, "{race}");
        }
        Some("trace") => assert!(floor - trace > error, "{race}"),
        Some("floor") => assert!(floor - trace - error <= floor / 100, "{race}"),
        Some("cold") => {}
        _ => panic!("{race}"),
    }
}

/// Where there are threads, one of them races; the others go where it leads. Threads that end or sleep leave
/// their races to others.
#[test]
fn threads_race() {
    let (directory, program) = force_verdicts("threads", "threads");
    let command = [program.as_str(), "60000"];
    let native = Invocation::new(&program, &directory).args(&command[1..]).run();
    for options in [["--tier", "full"], ["--tier", "direct"]] {
        races(&directory, &options, &command, &native).iter().for_each(agrees);
    }
}

/// Children that are forked while a trace races make traces of their own, which race on clocks that have
/// begun again.
#[test]
fn children_race() {
    let (directory, program) = force_verdicts("forks", "forks");
    // The race is under way whenever the guest forks.
    let command = [program.as_str(), "400000"];
    let native = Invocation::new(&program, &directory).args(&command[1..]).run();
    for tier in ["full", "direct"] {
        races(&directory, &["--tier", tier, "--race", "1000000"], &command, &native);
        races(&directory, &["--tier", tier], &command, &native);
    }
}

/// When the target of a loop's call changes, the loop's trace races again: it was judged when the guest
/// did something else. If it loses, another one is made at once, which follows the new target.
#[test]
fn a_trace_races_again_when_the_guest_changes() {
    let (directory, program) = guest("changed", "phases");
    let native = Invocation::new(&program, &directory).run();
    assert_eq!(native.status, Status::Exited(0));
    let tiers: [&[&str]; 2] = [&["--tier", "full"], &["--tier", "direct", "--sample", "every=1"]];
    for (tier, mode) in tiers.into_iter().flat_map(|tier| [(tier, "trace"), (tier, "floor")]) {
        let options = [tier, &["--threshold", "50", "--race", mode]].concat();
        let races = races(&directory, &options, &[&program], &native);
        let mut heads: Vec<&Value> = races.iter().map(|race| &race["pc"]).collect();
        let all = heads.len();
        heads.sort_by_key(|pc| pc.as_u64());
        heads.dedup();
        // A head whose trace has lost at once rests for a second, and this takes less.
        assert_eq!(heads.len() < all, mode == "trace", "{options:?}: {races:?}");
    }
}

/// A loop that goes other ways than when it was recorded is recorded anew, with those iterations in it.
#[test]
fn a_loop_that_goes_other_ways_is_recorded_anew() {
    let (directory, program) = guest("ways", "ways");
    let native = Invocation::new(&program, &directory).run();
    assert_eq!(native.status, Status::Exited(0));
    let tiers: [&[&str]; 2] = [&["--tier", "full"], &["--tier", "direct", "--sample", "every=1"]];
    for tier in tiers {
        let options = ["--threshold", "500", "--race", "trace", "--iterations", "4"];
        races(&directory, &[tier, &options].concat(), &[&program], &native);
        let json = statistics(&directory);
        assert!(json["outdated"].as_u64() > Some(0), "{tier:?}");
        assert!(json["branching_loops"].as_u64() > Some(0), "{tier:?}");
    }
}

/// The trace of a recursive function holds several of its executions. It races as others do, and is what was recorded.
#[test]
fn executions_of_recursive_functions_become_one_trace() {
    let (directory, program) = force_verdicts("functions", "functions");
    let native = Invocation::new(&program, &directory).run();
    for mode in ["trace", "swap", "off"] {
        let options = ["--threshold", "70", "--iterations", "8", "--verify-traces", "--race", mode];
        races(&directory, &options, &[&program], &native);
        let json = statistics(&directory);
        assert!(json["branching_functions"].as_u64() > Some(0), "{mode}: {json}");
    }
}

/// An interpreter is done with one program and executes another. The loop of the first one is not tried before that of
/// the second any more. Both loops start at the same head, and the interpreter keeps its position in memory.
#[test]
fn a_loop_that_is_not_executed_any_more_is_tried_last() {
    let (directory, program) = guest("set_back", "programs");
    let command = [program.as_str(), "10000000"];
    let native = Invocation::new(&program, &directory).args(&command[1..]).run();
    assert_eq!(native.status, Status::Exited(0));
    let options = ["--race", "off", "--compile-threads", "0", "--sample", "hz=10000"];
    races(&directory, &options, &command, &native);
    assert_eq!(statistics(&directory)["set_back"], 1);
}

/// What a trace assumes changes once and for all: an operand of an interpreted program, or a register
/// at a loop's head. The next trace does not assume that one, and stays.
#[test]
fn one_assumption_is_undone() {
    let tiers: [&[&str]; 3] = [
        &["--tier", "full", "--race", "trace"],
        &["--tier", "direct", "--race", "trace", "--sample", "every=1"],
        &["--tier", "dynamo"],
    ];
    for name in ["operands", "shifts"] {
        let (directory, program) = guest(&format!("undone_{name}"), name);
        let native = Invocation::new(&program, &directory).run();
        assert_eq!(native.status, Status::Exited(0));
        for tier in tiers {
            let options = [tier, &["--threshold", "50"]].concat();
            races(&directory, &options, &[&program], &native);
            let json = statistics(&directory);
            assert_eq!(json["undone"].as_u64(), Some(1), "{name} {options:?}");
            let guards = json["deopts"]["guard"].as_u64().unwrap_or(0);
            // The guard of a trace that was kept would fail in each of 6,000 runs, and the runtime would
            // see each without copied blocks.
            assert!(guards < 5000, "{name} {options:?}: {guards}");
        }
    }
}

/// Guest code in place enters a trace by the patch at its head. (Before, patches led to the displaced
/// instructions, and only the runtime entered traces.)
#[test]
fn patches_lead_to_traces() {
    let (directory, program) = guest("entries", "interpreter");
    let outcome = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), &directory)
        .args([
            "explain",
            "--tier",
            "direct",
            "--json",
            "--discard-output",
            "--",
            &program,
            "200000",
        ])
        .run();
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    let json: Value = serde_json::from_slice(&outcome.stdout).expect("JSON and nothing else");
    let entered = entries(&json);
    // The runtime has entered traces at most once for each of some hundred samples.
    assert!(entered > 20_000, "200,000 runs entered traces {entered} times");
}

/// The jump that closes a long loop with a short head leads to the loop's trace.
#[test]
fn back_edges_lead_to_traces() {
    let (directory, program) = guest("edges", "edges");
    let native = Invocation::new(&program, &directory).run();
    assert_eq!(native.status, Status::Exited(0));
    for race in ["trace", "swap", "floor"] {
        let options =
            ["--tier", "direct", "--sample", "every=1", "--threshold", "50", "--race", race];
        races(&directory, &options, &[&program], &native);
        let json = statistics(&directory);
        assert!(json["back_edges"].as_u64() > Some(0), "--race {race}: {}", json["back_edges"]);
    }
}

/// The sum of all entries of versions.
fn entries(value: &Value) -> u64 {
    match value {
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| match value.as_u64() {
                Some(n) if name == "entered" => n,
                _ => entries(value),
            })
            .sum(),
        Value::Array(all) => all.iter().map(entries).sum(),
        _ => 0,
    }
}
