//! `dynasour bench`: its output, its files, shards, and the input that it refuses before it runs
//! anything. No test asserts a time, except that of launchers which make it themselves, in wide bounds.

use dynasour_testkit::run::{Invocation, Outcome, Status, refused, text};
use dynasour_testkit::scratch;
use serde_json::Value;
use std::collections::BTreeSet;
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

/// The same; it must succeed. Returns standard output.
fn succeeds(directory: &Path, words: &[&str]) -> String {
    let outcome = bench(directory, words);
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    text(&outcome.stdout)
}

/// The values in the lines of a text.
fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
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
    let varies = format!("['/bin/sh', '-c', 'echo x >> {0}; wc -l < {0}']", counter.display());
    let mine = suite(
        &directory,
        &[
            ("good", "['/bin/echo', '{n}']"),
            ("differs", "['/bin/sh', '-c', 'echo $UNDER']"),
            ("varies", &varies),
            ("fails", "['/bin/false']"),
            ("missing", "['no-such-program']"),
        ],
    );
    let outcome = bench(&directory, &[&mine, "--runs", "1", "--peer", "again=env UNDER=x {}"]);
    let table = text(&outcome.stdout);
    assert_eq!(outcome.status, Status::Exited(1), "{table}");
    let line = |name: &str| {
        table.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{name}: {table}"))
    };
    let heading = table.lines().next().unwrap_or_default();
    for column in ["copy", "full", "direct", "again"] {
        assert!(heading.contains(&format!("{column} / native")), "{table}");
    }
    assert_eq!(line("good").split_whitespace().count(), 2 + 4 * 3, "{table}");
    assert_eq!(line("differs").matches("DIFFERS").count(), 1, "{table}");
    assert!(line("varies").contains("VARIES") && !line("varies").contains("DIFFERS"), "{table}");
    assert!(line("fails").contains("status 1"), "{table}");
    assert!(line("skipped missing").contains("package somewhere"), "{table}");
    let errors = text(&outcome.stderr);
    for message in ["differs: DIFFERS (standard output, from byte 0 on)", "--ignore-failure"] {
        assert!(errors.contains(message), "{message}: {errors}");
    }
}

/// A program that prints something else when it is translated, which it knows by the number of its
/// runs.
#[test]
fn tiers_that_differ_are_named() {
    let directory = directory("differs");
    let script =
        "echo x >> runs; if [ $(wc -l < runs) -eq 2 ]; then echo other; else echo same; fi";
    let words = [
        "--warmup",
        "0",
        "--runs",
        "2",
        "--tiers",
        "copy,interp",
        "--json",
        "--",
        "sh",
        "-c",
        script,
    ];
    let outcome = bench(&directory, &words);
    assert_eq!(outcome.status, Status::Exited(1), "{}", text(&outcome.stderr));
    let report: Value = serde_json::from_slice(&outcome.stdout).expect("JSON");
    let row = &report["rows"][0];
    assert_eq!(row["cells"][0]["trouble"], "DIFFERS");
    assert_eq!(row["cells"][1]["trouble"], Value::Null);
    assert_eq!(row["cells"][1]["wall"].as_array().map(Vec::len), Some(2));
    assert_eq!(row["native"]["trouble"], Value::Null);
    assert!(
        text(&outcome.stderr).contains("run --tier copy -- sh -c"),
        "{}",
        text(&outcome.stderr)
    );
}

#[test]
fn a_program_is_measured_without_a_suite() {
    let directory = directory("program");
    fs::write(directory.join("words"), "a b c\n").expect("written");
    let exports = ["--export-json", "r.json", "--export-csv", "r.csv", "--export-md", "r.md"];
    let words =
        ["--runs", "6", "--warmup", "2", "--input", "words", "--run-options", "--policy merged"];
    let program = ["--", "sh", "-c", "wc -c; echo $#", "x", "--runs"];
    let table = succeeds(&directory, &[&words[..], &exports, &program].concat());
    let launchers: Vec<&str> =
        table.lines().skip(2).take(4).filter_map(|l| l.split_whitespace().next()).collect();
    assert_eq!(launchers, ["native", "copy", "full", "direct"], "{table}");
    assert!(table.starts_with("sh -c 'wc -c; echo $#' x --runs < words\n"), "{table}");
    // Start-up is most of the time of a program this short.
    assert!(
        table.contains("too short to compare") && table.contains("start-up (a run of"),
        "{table}"
    );
    let report: Value =
        serde_json::from_str(&fs::read_to_string(directory.join("r.json")).expect("saved"))
            .expect("JSON");
    let row = &report["rows"][0];
    assert_eq!(row["run_options"], serde_json::json!(["--policy", "merged"]));
    for cell in row["cells"].as_array().expect("cells").iter().chain([&row["native"]]) {
        assert_eq!(cell["wall"].as_array().map(Vec::len), Some(6), "{cell}");
        let part = |name: &str| cell["seconds"][name].as_f64().expect("a number");
        assert!(part("low") <= part("median") && part("median") <= part("high"), "{cell}");
        assert!(cell["start_up"].as_f64() > Some(0.0), "{cell}");
    }
    let csv = fs::read_to_string(directory.join("r.csv")).expect("saved");
    assert_eq!(csv.lines().count(), 1 + 4, "{csv}");
    let markdown = fs::read_to_string(directory.join("r.md")).expect("saved");
    assert_eq!(markdown.lines().filter(|l| l.starts_with("| ")).count(), 2 + 4, "{markdown}");
    let message = bench(&directory, &[&words[..], &exports, &program].concat());
    refused(&message, &["r.json exists", "--force"]);
    succeeds(&directory, &[&words[..], &exports, &["--force"], &program].concat());
}

#[test]
fn few_runs_have_no_interval_and_time_ends_the_rounds() {
    let directory = directory("rounds");
    let program = ["--tiers", "copy", "--json", "--", "true"];
    let report = |words: &[&str]| -> Value {
        serde_json::from_str(&succeeds(&directory, &[words, &program].concat())).expect("JSON")
    };
    let runs = |report: &Value| {
        report["rows"][0]["native"]["wall"].as_array().map(Vec::len).expect("runs")
    };
    let few = report(&["--runs", "5"]);
    let ratio = &few["rows"][0]["cells"][0]["ratio"];
    assert!(ratio["median"].is_f64() && ratio["low"].is_null() && ratio["high"].is_null(), "{few}");
    assert_eq!(runs(&few), 5);
    assert_eq!(runs(&report(&["--max-time", "0.000001"])), 1);
    // Half of the interval is less than a thousand times the median after ten rounds.
    assert_eq!(runs(&report(&["--precision", "100000"])), 10);
}

/// A list of five programs, one of which is missing.
fn list(directory: &Path) {
    let text = "# five\necho 1\necho '2  2'\n\nno-such-program\necho 4\nsh -c 'echo 5'\n";
    fs::write(directory.join("list"), text).expect("written");
}

/// What does not depend on time in a row.
fn identity(row: &Value) -> Value {
    let cells = row["cells"].as_array().expect("cells").iter();
    let cells: Vec<Value> = cells
        .map(|c| {
            serde_json::json!([c["launcher"], c["trouble"], c["wall"].as_array().map(Vec::len)])
        })
        .collect();
    serde_json::json!([
        row["index"],
        row["total"],
        row["name"],
        row["command"],
        row["skipped"],
        cells
    ])
}

#[test]
fn shards_make_the_same_rows_as_the_whole() {
    let directory = directory("shards");
    list(&directory);
    let words = ["--list", "list", "--runs", "1", "--warmup", "0", "--tiers", "copy"];
    let whole = lines(&succeeds(&directory, &[&words[..], &["--jsonl"]].concat()));
    let names: Vec<&str> = whole.iter().filter_map(|row| row["name"].as_str()).collect();
    assert_eq!(names, ["echo 1", "echo '2  2'", "no-such-program", "echo 4", "sh -c 'echo 5'"]);
    for shard in ["1/2", "2/2"] {
        let file = format!("{}.jsonl", &shard[..1]);
        let outcome = [&words[..], &["--shard", shard, "--export-jsonl", &file]].concat();
        succeeds(&directory, &outcome);
    }
    let merged = lines(&succeeds(&directory, &["--jsonl", "--merge", "2.jsonl", "1.jsonl"]));
    let identities = |rows: &[Value]| rows.iter().map(identity).collect::<Vec<_>>();
    assert_eq!(identities(&merged), identities(&whole));
    // All other forms are made of shards, too, and their figures do not change.
    let table =
        succeeds(&directory, &["--merge", "1.jsonl", "2.jsonl", "--export-json", "all.json"]);
    assert!(table.contains("skipped no-such-program") && table.contains("mean: all"), "{table}");
    let again = lines(&succeeds(&directory, &["--jsonl", "--merge", "all.json"]));
    assert_eq!(again, merged);
    assert_eq!(
        succeeds(&directory, &["--csv", "--merge", "all.json"]).lines().count(),
        1 + 4 * 2 + 1
    );
    let part = bench(&directory, &["--merge", "1.jsonl"]);
    assert_eq!(part.status, Status::Exited(1));
    assert!(text(&part.stderr).contains("2 of 5 rows missing: 1, 3"), "{}", text(&part.stderr));
    refused(&bench(&directory, &["--merge", "1.jsonl", "all.json"]), &["both have row 0"]);
    let none = [&words[..], &["--shard", "9/9", "--jsonl", "--export-jsonl", "9.jsonl"]].concat();
    assert_eq!(succeeds(&directory, &none), "");
    let all = succeeds(&directory, &["--jsonl", "--merge", "9.jsonl", "1.jsonl", "2.jsonl"]);
    assert_eq!(lines(&all), merged);
}

/// The lines of docs/studies.md from the first that begins with `first` on, as far as they are
/// indented, without the indentation.
fn shown(first: &str) -> Vec<String> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/studies.md");
    let page = fs::read_to_string(page).expect("docs/studies.md");
    let from = page.lines().skip_while(|line| !line.starts_with(first));
    from.map_while(|line| line.strip_prefix("    ")).map(str::to_string).collect()
}

/// Runs a shell script in which `dynasour` is this one; it must succeed. Returns standard output.
fn script_succeeds(directory: &Path, script: &str, task: &str) -> String {
    let own = Path::new(env!("CARGO_BIN_EXE_dynasour")).parent().expect("a folder");
    let mut run = Invocation::new("/bin/sh", directory).args(["-e", "-c", script]);
    run.environment.retain(|(name, _)| name != "PATH");
    run.environment.push(("PATH".into(), format!("{}:/usr/bin:/bin", own.display()).into()));
    run.environment.push(("SLURM_ARRAY_TASK_ID".into(), task.into()));
    let outcome = run.run();
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    text(&outcome.stdout)
}

/// Runs the lines of docs/studies.md that use GNU parallel, as they stand there.
#[test]
fn a_study_runs_under_gnu_parallel() {
    if std::process::Command::new("parallel").arg("--version").output().is_err() {
        assert!(std::env::var_os("DYNASOUR_REQUIRE_PROGRAMS").is_none(), "parallel");
        eprintln!("skipped: parallel is not installed");
        return;
    }
    let directory = directory("parallel");
    list(&directory);
    fs::rename(directory.join("list"), directory.join("programs.txt")).expect("renamed");
    let lines = shown("    $ seq ");
    let commands: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("$ ")).collect();
    assert_eq!(commands.len(), 2, "{lines:?}");
    let table = script_succeeds(&directory, &commands.join("\n"), "");
    for name in ["echo 1", "echo '2  2'", "skipped no-such-program", "echo 4", "sh -c 'echo 5'"] {
        assert!(table.lines().any(|line| line.starts_with(name)), "{name}: {table}");
    }
    let csv = fs::read_to_string(directory.join("all.csv")).expect("exported");
    assert_eq!(csv.lines().count(), 1 + 4 * 4 + 1, "{csv}");
}

/// Runs the script of docs/studies.md for Slurm as three tasks of the array, without Slurm.
#[test]
fn the_script_for_slurm_measures_the_shard_of_its_task() {
    let directory = directory("slurm");
    list(&directory);
    fs::rename(directory.join("list"), directory.join("programs.txt")).expect("renamed");
    let lines = shown("    $ cat study.sh");
    let script: Vec<&str> =
        lines[1..].iter().map(String::as_str).take_while(|line| !line.starts_with('$')).collect();
    assert!(script[0].starts_with("#!") && script.len() >= 3, "{lines:?}");
    for (task, rows) in [("1", 1), ("3", 1), ("40", 0)] {
        script_succeeds(&directory, &script.join("\n"), task);
        let file = directory.join(format!("{task}.jsonl"));
        let file = fs::read_to_string(file).expect("written, even without rows");
        assert_eq!(file.lines().count(), rows, "task {task}");
    }
}

/// The figures of two lengths follow from the times of the runs.
#[test]
fn steady_state_is_told_from_warm_up() {
    let directory = directory("steady");
    let work = |n: u32| format!("i=0; while [ $i -lt {n} ]; do i=$((i+1)); done; echo {n}");
    let (short, longer) = (work(30_000), format!("sh -c '{}'", work(90_000)));
    let words = ["--runs", "6", "--clock", "cpu", "--tiers", "copy", "--longer", &longer];
    let words = [&words[..], &["--jsonl", "--", "sh", "-c", &short]].concat();
    let row = &lines(&succeeds(&directory, &words))[0];
    assert!(row["longer"].as_str().is_some_and(|line| line.starts_with("sh -c")), "{row}");
    let times = |cell: &Value, name: &str| -> Vec<f64> {
        let times = cell[name].as_array().expect("times").iter();
        times.map(|time| time.as_f64().expect("seconds")).collect()
    };
    let [native, copy] = [&row["native"], &row["cells"][0]];
    let [of_native, of_copy] =
        [native, copy].map(|cell| [times(cell, "cpu"), times(cell, "longer_cpu")]);
    assert_eq!(of_copy.each_ref().map(Vec::len), [6, 6], "{copy}");
    let ratios: Vec<f64> = (0..6)
        .map(|n| (of_copy[1][n] - of_copy[0][n]) / (of_native[1][n] - of_native[0][n]))
        .collect();
    let warm_ups: Vec<f64> = (0..6).map(|n| of_copy[0][n] - ratios[n] * of_native[0][n]).collect();
    // On a busy machine the figures may not be determined, and then it says why.
    for (name, mut expected) in [("steady", ratios), ("warm_up", warm_ups)] {
        expected.sort_by(f64::total_cmp);
        let median = (expected[2] + expected[3]) / 2.0;
        match copy[name]["median"].as_f64() {
            Some(found) => assert!((found - median).abs() < 1e-6, "{name}: {median}, {copy}"),
            None => assert!(copy["not_determined"].is_string(), "{copy}"),
        }
    }
    // The same length twice determines nothing.
    let same = ["--runs", "3", "--tiers", "copy", "--longer", "true", "--", "true"];
    let table = succeeds(&directory, &same);
    let line = table.lines().find(|line| line.starts_with("copy") && line.contains("n.d."));
    assert!(line.is_some_and(|line| line.matches("n.d.").count() == 2), "{table}");
    assert!(table.contains("n.d.: copy: "), "{table}");
    for bad in [&["--longer", "true"][..], &["--longer", "no-such-program", "--", "true"]] {
        assert_eq!(bench(&directory, bad).status, Status::Exited(2), "{bad:?}");
    }
}

#[test]
fn lines_have_what_the_schema_says() {
    let directory = directory("schema");
    let schema: Value = serde_json::from_str(&succeeds(&directory, &["--schema"])).expect("JSON");
    let program = ["--runs", "1", "--tiers", "copy", "--jsonl", "--", "true"];
    let row = &lines(&succeeds(&directory, &program))[0];
    let properties = schema["properties"].as_object().expect("properties");
    let keys = |value: &Value| {
        value.as_object().expect("an object").keys().cloned().collect::<BTreeSet<_>>()
    };
    assert_eq!(keys(row), properties.keys().cloned().collect());
    assert_eq!(properties["format"]["const"], row["format"]);
    assert_eq!(keys(&row["native"]), keys(&schema["$defs"]["Cell"]["properties"]));
    let published = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/data/bench-1.schema.json");
    let published = fs::read_to_string(published).expect("docs/data/bench-1.schema.json");
    let published: Value = serde_json::from_str(&published).expect("JSON");
    assert_eq!(
        published, schema,
        "write it by --schema; a changed meaning needs a new number and a new file"
    );
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
        text(&second.stdout).lines().nth(1).is_some_and(|l| l.contains("was")),
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
    refused(&bench(&directory, &[]), &["SUITE", "--list"]);
    refused(&bench(&directory, &[&mine, "--", "true"]), &["cannot be used with"]);
    refused(&bench(&directory, &["--", "no-such-program"]), &["no-such-program"]);
    refused(&bench(&directory, &["/bin/true"]), &["/bin/true", "bench -- PROG"]);
    let touch = ["--", "/usr/bin/touch", witness.to_str().expect("UTF-8")];
    for (words, message) in [
        (&["--shard", "3/2"][..], "expected I/N"),
        (&["--precision", "0"], "above 0"),
        (&["--runs", "3", "--max-time", "1"], "cannot be used with"),
        (&["--json", "--csv"], "cannot be used with"),
        (&["--input", "nothing"], "nothing"),
        (&["--run-options", "--polic merged"], "--policy"),
        (&["--run-options", "'"], "--run-options"),
        (&["--peer", "copy=env {}"], "another column"),
        (&["--export-json", "nowhere/r.json"], "nowhere/r.json"),
        (&["--export-json", "r", "--export-csv", "r"], "r is given for two outputs"),
    ] {
        refused(&bench(&directory, &[words, &touch].concat()), &[message]);
    }
    assert!(!directory.join("r").exists());
    fs::write(directory.join("list"), "true\n'\n").expect("written");
    refused(&bench(&directory, &["--list", "list"]), &["list, line 2"]);
    refused(&bench(&directory, &["--list", "none"]), &["none"]);
    refused(&bench(&directory, &["--merge", "list"]), &["list", "dynasour-bench-1"]);
    fs::write(directory.join("old.json"), "{}").expect("written");
    refused(&bench(&directory, &[&mine, "--compare", "old.json"]), &["old.json"]);
    let broken = directory.join("broken.toml");
    fs::write(&broken, "name = 'x'\n\n[[workload]]\nname = 'a'\n").expect("written");
    refused(&bench(&directory, &["broken.toml"]), &["broken.toml", "line 3", "class"]);
    assert!(!witness.exists());
}
