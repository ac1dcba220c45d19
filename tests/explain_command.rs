//! `dynasour explain`: its counts match what the guest does, its report has all parts, and bad
//! input gets an error.

use dynasour_testkit::run::{Invocation, Outcome, Status, refused, text};
use dynasour_testkit::scratch;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the guest prints for 1,000,000 iterations.
const RESULT: &str = "500000480000";

fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("explain_command").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

/// The guest: a loop with a branch that is taken every 1,000 iterations.
fn guest(directory: &Path, level: &str) -> String {
    program(directory, level, "tests/explain/thousand.c")
}

/// A program of this source.
fn program(directory: &Path, level: &str, source: &str) -> String {
    let file = directory.join(format!("program{level}"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let status = Command::new("cc")
        .arg(level)
        .arg("-o")
        .arg(&file)
        .arg(source)
        .status()
        .expect("a C compiler");
    assert!(status.success());
    file.into_os_string().into_string().expect("UTF-8")
}

fn explain(directory: &Path, words: &[&str]) -> Outcome {
    Invocation::new(env!("CARGO_BIN_EXE_dynasour"), directory).args(["explain"]).args(words).run()
}

#[track_caller]
fn json(directory: &Path, words: &[&str]) -> Value {
    let outcome = explain(directory, words);
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    serde_json::from_slice(&outcome.stdout).expect("JSON and nothing else")
}

fn array<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value[name].as_array().unwrap_or_else(|| panic!("{name} is an array"))
}

#[track_caller]
fn count(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("{name} is a number"))
}

fn sum(values: &[Value], name: &str) -> u64 {
    values.iter().map(|v| count(v, name)).sum()
}

/// Relations that hold for any version that is shown in full.
fn reconcile(version: &Value) {
    let guards = array(&version["body"], "guards");
    for guard in guards {
        let (executed, failed) = (count(guard, "executed"), count(guard, "failed"));
        assert!(failed <= executed, "{guard}");
        assert_eq!(sum(array(guard, "went"), "times"), failed, "{guard}");
    }
    // The executions that a guard lets pass reach the next guard.
    let (before, inside): (Vec<Value>, Vec<Value>) =
        guards.iter().cloned().partition(|g| g["in_loop"] == false);
    for part in [&before, &inside] {
        for pair in part.windows(2) {
            assert_eq!(
                count(&pair[1], "executed"),
                count(&pair[0], "executed") - count(&pair[0], "failed")
            );
        }
    }
    if let (Some(iterations), Some(first), Some(last)) =
        (version["iterations"].as_u64(), inside.first(), inside.last())
    {
        let came = count(version, "entered") - sum(&before, "failed");
        let back = count(last, "executed") - count(last, "failed");
        assert_eq!(
            (iterations, iterations - count(version, "polls")),
            (came + back, count(first, "executed"))
        );
    }
}

/// The loop of `work`, and the side trace of its rare branch.
fn work(explanation: &Value) -> (&Value, &Value) {
    let regions = array(explanation, "regions");
    let region =
        regions.iter().find(|r| r["symbol"].as_str().is_some_and(|s| s.starts_with("work")));
    let versions = array(region.expect("work is hot"), "versions");
    let looping = versions.iter().find(|v| v["kind"] == "loop").expect("it has a loop");
    let side = versions.iter().find(|v| v["kind"] == "side").expect("its branch has a trace");
    (looping, side)
}

fn counts_are_exact(level: &str, tier: &str) {
    let directory = directory(&format!("exact{level}{tier}"));
    let guest = guest(&directory, level);
    let words =
        ["--json", "--at", "work", "--tier", tier, "--threshold", "100", "--", &guest, "1000000"];
    let explanation = json(&directory, &words);
    assert_eq!(
        (&explanation["exact"], &explanation["status"]),
        (&Value::Bool(true), &Value::from(0))
    );
    for version in array(&explanation, "regions").iter().flat_map(|r| array(r, "versions")) {
        if !version["body"].is_null() {
            reconcile(version);
        }
    }
    let (looping, side) = work(&explanation);
    // Every execution of the rare branch failed its guard; none occurred before the loop was hot.
    let rare = |g: &&Value| count(g, "failed") > 10;
    let guards: Vec<Value> =
        array(&looping["body"], "guards").iter().filter(rare).cloned().collect();
    let pc = count(guards.first().expect("a guard fails"), "pc");
    assert!(guards.iter().all(|g| count(g, "pc") == pc && g["kind"] == "branch"), "{guards:?}");
    assert_eq!(sum(&guards, "failed"), 1000);
    let all = array(&looping["body"], "guards").iter().filter(|g| count(g, "pc") == pc);
    let checked: u64 = all.map(|g| count(g, "executed")).sum();
    assert!((999_000..1_000_000).contains(&checked), "{checked} of 1,000,000 iterations");
    // All failures but the first few went to the side trace, which returned to the loop.
    let to_side = |g: &Value| -> u64 {
        let to = array(g, "went").iter().filter(|w| w["fragment"] == side["id"]);
        to.map(|w| count(w, "times")).sum()
    };
    assert_eq!(guards.iter().map(to_side).sum::<u64>(), count(side, "entered"));
    assert!((900..1000).contains(&count(side, "entered")), "{side}");
    assert_eq!(side["from"]["fragment"], looping["id"]);
}

#[test]
fn counts_are_exact_without_optimisation() {
    counts_are_exact("-O0", "dynamo");
}

#[test]
fn counts_are_exact_with_optimisation() {
    counts_are_exact("-O2", "dynamo");
}

#[test]
fn counts_are_exact_among_copied_blocks() {
    counts_are_exact("-O2", "full");
}

/// A block that stands eight times on the path of a loop is executed eight times in each iteration.
#[test]
fn inlined_calls_are_counted_once_for_each_place_on_the_path() {
    const ITERATIONS: u64 = 1_000_000;
    let directory = directory("inlined");
    let guest = program(&directory, "-O2", "tests/explain/inlined.c");
    let iterations = ITERATIONS.to_string();
    let words = ["--discard-output", "--json", "--at", "step", "--tier", "dynamo"];
    let program = ["--threshold", "100", "--", &guest, &iterations];
    let explanation = json(&directory, &[&words[..], &program].concat());
    let versions = array(&explanation, "regions").iter().flat_map(|r| array(r, "versions"));
    let bodies: Vec<&Value> = versions.map(|v| &v["body"]).filter(|b| !b.is_null()).collect();
    let blocks: Vec<&Value> = bodies.iter().flat_map(|body| array(body, "path")).collect();
    let of_step = |block: &&&Value| block["symbol"] == "step";
    let (places, executed) = (
        blocks.iter().filter(of_step).count(),
        blocks.iter().filter(of_step).map(|block| count(block, "executed")).sum::<u64>(),
    );
    assert!(places >= 8, "the path of the loop has all calls: {places}");
    let calls = 8 * ITERATIONS;
    assert!((calls * 99 / 100..=calls).contains(&executed), "{executed} of {calls} calls");
    // No guard is shown at another place than its own.
    for body in bodies {
        let instructions =
            || array(body, "path").iter().flat_map(|block| array(block, "instructions"));
        for guard in array(body, "guards").iter().filter(|guard| guard["kind"] == "branch") {
            let shown = instructions().filter(|i| array(i, "guards").contains(&guard["index"]));
            assert_eq!(shown.count(), array(guard, "origins").len(), "{guard}");
        }
    }
}

/// Everything, of a run that does not depend on time.
const FULL: [&str; 5] = ["--tier", "dynamo", "--threshold", "100", "--full"];

#[test]
fn the_report_has_all_its_parts() {
    let directory = directory("report");
    let guest = guest(&directory, "-O0");
    let outcome =
        explain(&directory, &[&FULL[..], &["--top", "1", "--", &guest, "1000000"]].concat());
    let report = text(&outcome.stdout);
    assert_eq!(outcome.status, Status::Exited(0), "{report}");
    assert!(text(&outcome.stderr).contains(RESULT), "the guest's output is on standard error");
    assert!(!report.contains(RESULT) && !report.contains('\u{1b}'));
    for part in [
        "#1 region work",
        "recorded path",
        "work:",
        "assumes",
        "guards",
        "anchors: what the guest's state is",
        "on to work+",
        "rflags = flags.",
        "then stores i64 [rbp@entry - 16]",
        "changed by simplify",
        "changed by sink",
        "\n    +",
        "\n    -",
        "IR as built",
        "IR as emitted",
        "native code\n",
        "loop:",
        "; guard g",
        " failed:",
        "leaves for t",
    ] {
        assert!(report.contains(part), "{part} is missing in\n{report}");
    }
    // No counter is shown, and each guard has its jump.
    let versions = report.matches("native code\n").count();
    assert!(versions >= 1 && !report.contains("the thread's context"), "{report}");

    let some = explain(
        &directory,
        &[
            "--tier",
            "dynamo",
            "--threshold",
            "100",
            "--show",
            "guards",
            "--color",
            "always",
            &guest,
        ],
    );
    let some = text(&some.stdout);
    assert!(
        some.contains("\u{1b}[") && some.contains("predicate") && !some.contains("native code"),
        "{some}"
    );
}

#[test]
fn json_has_what_the_report_has() {
    let directory = directory("json");
    let guest = guest(&directory, "-O2");
    let explanation = json(
        &directory,
        &[
            "--json",
            "--discard-output",
            "--tier",
            "dynamo",
            "--threshold",
            "100",
            "--",
            &guest,
            "200000",
        ],
    );
    assert_eq!(
        (&explanation["schema"], &explanation["tier"]),
        (&Value::from(4), &Value::from("dynamo"))
    );
    let all = array(&explanation, "regions").iter().flat_map(|region| array(region, "versions"));
    assert!(all.clone().count() > 1 && all.into_iter().all(|v| v["body"].is_object()), "complete");
    assert_eq!(array(&explanation, "args"), ["200000"]);
    let region = &array(&explanation, "regions")[0];
    assert!(region["share"].as_f64().is_some_and(|share| share > 0.5 && share <= 1.0));
    let version = &array(region, "versions")[0];
    for name in [
        "name",
        "kind",
        "pc",
        "symbol",
        "entered",
        "executed",
        "failed",
        "code_bytes",
        "compile_ns",
        "ends",
    ] {
        assert!(!version[name].is_null(), "{name}");
    }
    let body = &version["body"];
    let instructions: Vec<&Value> =
        array(body, "path").iter().flat_map(|b| array(b, "instructions")).collect();
    assert_eq!(instructions.len() as u64, count(version, "guest_instructions"));
    assert!(
        instructions.iter().any(|i| i["text"].as_str().is_some_and(|t| t.starts_with("imul rax")))
    );
    assert!(instructions.iter().any(|i| !array(i, "guards").is_empty()));
    let passes = array(body, "passes");
    assert_eq!(
        (&passes[0]["before"], &passes[passes.len() - 1]["after"]),
        (&body["built"], &body["optimised"])
    );
    assert!(passes.windows(2).all(|pair| pair[0]["after"] == pair[1]["before"]));
    let native = array(body, "native");
    let marks = |name: &str| {
        let all = native.iter().flat_map(|line| array(line, "marks"));
        all.filter(|m| m["mark"] == name).count()
    };
    let guards = array(body, "guards");
    assert_eq!(
        (marks("guard"), marks("exit"), marks("loop-head")),
        (guards.len(), guards.len(), 1)
    );
    for guard in guards {
        assert!(guard["anchor"]["text"].as_str().is_some_and(|t| t.starts_with("anchor a")));
        assert!(!array(&guard["anchor"], "english").is_empty());
        assert!(guard["english"].is_string() && guard["predicate"].is_string());
    }
}

/// The first run is as `run`, so a program that never gets hot there is told from one whose traces were
/// tried.
#[test]
fn heads_come_first_with_what_became_of_them() {
    let directory = directory("attempts");
    let guest = guest(&directory, "-O0");
    // Sampled often enough that a short run gets hot.
    let words = ["--discard-output", "--race", "trace", "--sample-hz", "2000"];
    let program = ["--", &guest, "100000000"];
    let explanation = json(&directory, &[&words[..], &["--json", "--top", "1"], &program].concat());
    assert_eq!(explanation["tier"], "full", "as `run`");
    let heads = array(&explanation, "attempts");
    let of_work =
        heads.iter().find(|head| head["symbol"].as_str().is_some_and(|s| s.contains("work")));
    let outcome = of_work.expect("a head in work")["outcome"].as_str().expect("text");
    let expected = match outcome {
        "made" | "trace" | "cold" => "kept",
        "floor" => "slower",
        _ => "refused",
    };
    assert!(expected != "refused" || outcome.starts_with("refused: "), "{outcome}");
    let regions = array(&explanation, "regions").iter();
    let mut regions = regions.filter(|region| heads.iter().any(|head| head["pc"] == region["pc"]));
    assert_eq!(regions.next().expect("a region of a head")["in_run"], expected);
    let report = explain(&directory, &[&words[..], &program].concat());
    let report = text(&report.stdout);
    for part in ["`run` tries traces at", "heads in `run`", "#1 region work+", "in `run`: "] {
        assert!(report.contains(part), "{part} is missing in\n{report}");
    }
    // With --threshold, and with --no-attempts, the program runs once.
    for option in [&["--threshold", "1000"][..], &["--no-attempts"]] {
        let once = json(&directory, &[option, &["--json", &guest, "200000"]].concat());
        assert!(once["attempts"].is_null() && once["timeline"].is_null());
    }
    let cold = explain(&directory, &["--discard-output", &guest, "10"]);
    let cold = text(&cold.stdout);
    assert!(cold.contains("nothing gets hot") || cold.contains("never got hot"), "{cold}");
}

#[test]
fn the_first_screen_is_one() {
    let directory = directory("screen");
    let guest = guest(&directory, "-O2");
    let words = ["--discard-output", "--tier", "dynamo", "--threshold", "100"];
    let shown = explain(&directory, &[&words[..], &["--", &guest, "1000000"]].concat());
    let shown = text(&shown.stdout);
    assert!(shown.lines().count() <= 55, "{shown}");
    // Without a locale there is no character that is not ASCII.
    assert!(shown.is_ascii() && shown.lines().all(|line| line.len() <= 100), "{shown}");
    for part in ["#1 region work", "##########", " fails ", "costs: ", "assumes ", "--show path"] {
        assert!(shown.contains(part), "{part} is missing in\n{shown}");
    }
    assert!(!shown.contains("IR as built") && !shown.contains("native code\n"), "{shown}");
    // The dynamic linker's traces are summed up, unless they are asked for.
    assert!(shown.contains("ld.so: "), "{shown}");
    let all = explain(
        &directory,
        &[&words[..], &["--ld-so", "--top", "all", "--show", "guards", &guest]].concat(),
    );
    let all = text(&all.stdout);
    assert!(!all.contains("ld.so: ") && all.contains("region"), "{all}");
    assert!(all.matches("region ").count() > shown.matches("region ").count());
    let mut unicode = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), &directory)
        .args(["explain"])
        .args(words)
        .args([&guest]);
    unicode.environment.push(("LC_ALL".into(), "C.UTF-8".into()));
    assert!(text(&unicode.run().stdout).contains("█"));
}

/// Both runs read the same, from a pipe and from the middle of a file.
#[test]
fn both_runs_get_the_same_input() {
    let directory = directory("input");
    let lines: String = (0..100_000).map(|n| format!("{n}\n")).collect();
    fs::write(directory.join("lines"), &lines).expect("written");
    let own = env!("CARGO_BIN_EXE_dynasour");
    let explained = format!("{own} explain --json --attempts --output /dev/null --force -- cksum");
    for script in [
        format!("cat lines | {explained}"),
        format!("{{ head -c 6 >/dev/null; {explained}; }} < lines"),
        format!("yes | {own} explain --attempts --output /dev/null --force -- head -1"),
    ] {
        let outcome = Command::new("sh")
            .args(["-c", &script])
            .current_dir(&directory)
            .output()
            .expect("a shell");
        let said = text(&outcome.stderr);
        let said: Vec<&str> = said.lines().collect();
        assert!(said.len() == 2 && said[0] == said[1] && !said[0].is_empty(), "{script}: {said:?}");
    }
}

#[test]
fn a_long_text_goes_to_the_pager() {
    let directory = directory("pager");
    let guest = guest(&directory, "-O0");
    let own = env!("CARGO_BIN_EXE_dynasour");
    let on_terminal = |options: &str, pager: &str| {
        let line = format!(
            "stty cols 60 rows 10; DYNASOUR_PAGER='{pager}' {own} explain --threshold 1000 \
             --discard-output {options} {guest} 200000; echo status $?"
        );
        let outcome = Command::new("script")
            .args(["-qec", &line, "/dev/null"])
            .stdin(std::process::Stdio::null())
            .output();
        outcome.ok().map(|outcome| text(&outcome.stdout))
    };
    let Some(paged) = on_terminal("", "sed s/^/PAGED:/") else {
        eprintln!("skipped: no script(1)");
        return;
    };
    assert!(paged.contains("PAGED:--tier") && paged.contains("status 0"), "{paged}");
    // A pager that is not there, one that ends early, and none.
    let plain = on_terminal("", "/nonexistent/pager").expect("script");
    assert!(plain.contains("--tier full") && plain.contains("status 0"), "{plain}");
    let early = on_terminal("--full", "true").expect("script");
    assert!(!early.contains("--tier full") && early.contains("status 0"), "{early}");
    let without = on_terminal("--no-pager", "sed s/^/PAGED:/").expect("script");
    assert!(!without.contains("PAGED:") && without.contains("--tier full"), "{without}");
}

#[test]
fn lines_and_rows_have_what_json_has() {
    let directory = directory("lines");
    let guest = guest(&directory, "-O2");
    let words = ["--discard-output", "--tier", "dynamo", "--threshold", "100", "--top", "2"];
    let printed = |format: &str| {
        let outcome = explain(&directory, &[&words[..], &[format, &guest, "200000"]].concat());
        assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
        text(&outcome.stdout)
    };
    let whole: Value = serde_json::from_str(&printed("--json")).expect("JSON");
    let lines: Vec<Value> = printed("--jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON in each line"))
        .collect();
    let of =
        |record: &str| lines.iter().filter(|line| line["record"] == record).collect::<Vec<_>>();
    assert_eq!((of("run").len(), of("sources").len(), of("region").len()), (1, 1, 2));
    assert_eq!((&lines[0]["record"], &lines[1]["record"]), (&"run".into(), &"region".into()));
    let versions: Vec<&Value> =
        array(&whole, "regions").iter().flat_map(|r| array(r, "versions")).collect();
    assert_eq!(of("version").len(), versions.len());
    for (line, version) in of("version").into_iter().zip(&versions) {
        assert_eq!((&line["name"], &line["entered"]), (&version["name"], &version["entered"]));
    }
    let guards: usize = versions.iter().map(|v| array(&v["body"], "guards").len()).sum();
    let rows = printed("--csv");
    assert!(rows.starts_with("region,region_symbol,version,"), "{rows}");
    assert_eq!(rows.lines().count(), guards + 1);

    let schema = text(&explain(&directory, &["--schema"]).stdout);
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    let shapes = array(&schema, "oneOf");
    for line in &lines {
        let is_of = |shape: &&Value| shape["properties"]["record"]["const"] == line["record"];
        let shape = shapes.iter().find(is_of).expect("the schema has each record");
        let reference = shape["$ref"].as_str().map(|r| r.trim_start_matches("#/$defs/"));
        let known = |name: &str| {
            let of = reference.map(|name| &schema["$defs"][name]["properties"]);
            shape["properties"].get(name).or_else(|| of.and_then(|of| of.get(name))).is_some()
        };
        for name in line.as_object().expect("an object").keys() {
            assert!(known(name), "{name} of {} is not in the schema", line["record"]);
        }
    }
    let published = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/data/explain-4.schema.json");
    let published = fs::read_to_string(published).expect("docs/data/explain-4.schema.json");
    let published: Value = serde_json::from_str(&published).expect("JSON");
    assert_eq!(
        published, schema,
        "write it by --schema; a changed meaning needs a new number and a new file"
    );
}

#[test]
fn loops_of_interpreted_programs_are_named_by_their_keys() {
    let directory = directory("interpreted");
    let guest = program(&directory, "-O2", "benches/suites/interpreters/switch.c");
    let words = ["--discard-output", "--tier", "full", "--threshold", "1000"];
    let program = ["--", &guest, "sieve", "60"];
    let explanation = json(&directory, &[&words[..], &["--json"], &program].concat());
    let versions =
        array(&explanation, "regions").iter().flat_map(|region| array(region, "versions"));
    let mut loops = versions.clone().filter(|v| !v["interpreted"].is_null());
    assert!(!array(&loops.next().expect("a loop")["interpreted"], "key").is_empty());
    // Also colder versions, among which side traces are.
    let report = explain(&directory, &[&words[..], &["--full"], &program].concat());
    let report = text(&report.stdout);
    assert!(report.contains("a loop of the interpreted program, where "));

    // What they need at their entry is told, and what the exits of side traces know.
    let facts = |v: &Value, of: &str| array(&v["entrance"], of).len();
    let needing = versions.clone().filter(|v| facts(v, "needs") > 0);
    let needing = needing.inspect(|v| {
        let refused = v["entrance"]["refused"].as_u64().expect("a number");
        assert!(facts(v, "known") == 0 && Some(refused) <= v["entered"].as_u64(), "{v}");
    });
    assert!(needing.count() > 0 && versions.filter(|v| facts(v, "known") > 0).count() > 0);
    assert!(report.contains("number 1 in its region; needs "), "{report}");
    assert!(report.contains(" entries passed its entry\n") && report.contains("its exit knows: "));
}

#[test]
fn places_that_are_not_there_list_what_is_near() {
    let directory = directory("places");
    let guest = guest(&directory, "-O0");
    let at = |place: &str| {
        let words = ["--discard-output", "--tier", "dynamo", "--threshold", "100"];
        explain(&directory, &[&words[..], &["--show", "path", "--at", place, &guest]].concat())
    };
    refused(&at("wrok"), &["no function or version is called wrok", "near:", "work"]);
    refused(
        &at("qqqqqqqqqqqqqqqq"),
        &["is called qqqqqqqqqqqqqqqq", "traces were made in", "work"],
    );
    refused(&at("0x12"), &["no trace passes 0x12", "the nearest start at 0x", "work"]);
    refused(&at("main"), &["no trace passes main (main)", "nearest", "work"]);
    refused(&at("t9999"), &["no function or version is called t9999"]);

    let by_name = text(&at("work").stdout);
    let pc = by_name
        .lines()
        .find_map(|l| l.strip_prefix("#1 region work")?.split(" at ").nth(1))
        .expect("a region");
    let pc = pc.split(' ').next().expect("a pc");
    let by_pc = text(&at(pc).stdout);
    assert!(by_pc.contains(&format!("at {pc} ")), "{by_pc}");
    assert!(text(&at("t1").stdout).contains("  t1 ("));
}

#[test]
fn what_cannot_be_explained_is_said() {
    let directory = directory("bad");
    let path = ("PATH".into(), std::env::var_os("PATH").expect("a PATH"));
    let cold = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), &directory).args([
        "explain",
        "--threshold",
        "1000000000",
        "--at",
        "main",
        "/bin/true",
    ]);
    let outcome = cold.run();
    assert_eq!(outcome.status, Status::Exited(0));
    assert!(text(&outcome.stdout).contains("/bin/true never got hot"), "{}", text(&outcome.stdout));
    assert_eq!(
        array(&json(&directory, &["--json", "--threshold", "1000000000", "/bin/true"]), "regions"),
        [] as [Value; 0]
    );

    refused(
        &explain(&directory, &["/nonexistent/program"]),
        &["/nonexistent/program", "was not run"],
    );
    refused(
        &explain(&directory, &["--tier", "interp", "/bin/true"]),
        &["expected dynamo, full or direct"],
    );
    refused(
        &explain(&directory, &["--tier", "copy", "/bin/true"]),
        &["--tier copy makes no traces"],
    );
    refused(
        &explain(&directory, &["--threshold", "9", "--sample-hz", "9", "/bin/true"]),
        &["--sample-hz has no meaning"],
    );
    refused(&explain(&directory, &["--at-least", "101", "/bin/true"]), &["from 0 to 100"]);
    refused(&explain(&directory, &["--json", "--csv", "/bin/true"]), &["cannot be used with"]);
    refused(&explain(&directory, &["--top", "0", "/bin/true"]), &["--top"]);
    refused(&explain(&directory, &["--skip-pass", "nothing", "/bin/true"]), &["unknown pass"]);
    refused(&explain(&directory, &[]), &["PROG"]);

    // A guest that fails is explained, too. Options after the program belong to `explain` if it
    // knows them.
    let mut failing = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), &directory).args([
        "explain",
        "sh",
        "-c",
        "i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done; kill -9 $$",
        "--threshold",
        "20",
        "--top",
        "1",
    ]);
    failing.environment.retain(|(name, _)| name != "PATH");
    failing.environment.push(path);
    let outcome = failing.run();
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    let said = text(&outcome.stderr);
    assert!(said.contains("killed by signal 9"), "{said}");
    let shown = text(&outcome.stdout);
    assert!(shown.contains("#1 region") && !shown.contains("#2 region"), "{shown}");

    // After `--`, all options are the guest's.
    let outcome =
        explain(&directory, &["--threshold", "1", "--", "/bin/echo", "--top", "1", "--json"]);
    assert_eq!(outcome.status, Status::Exited(0));
    assert!(text(&outcome.stderr).contains("--top 1 --json"));
}

#[test]
fn nothing_is_overwritten() {
    let directory = directory("overwrite");
    let guest = guest(&directory, "-O2");
    let file = directory.join("report");
    fs::write(&file, "mine").expect("written");
    let name = file.to_str().expect("UTF-8");
    let outcome = explain(&directory, &["--output", name, &guest]);
    refused(&outcome, &[name, "--force"]);
    assert!(!text(&outcome.stderr).contains(RESULT), "nothing ran");
    assert_eq!(fs::read_to_string(&file).expect("readable"), "mine");
    let outcome = explain(&directory, &["--force", "--output", name, &guest]);
    assert_eq!((outcome.status, text(&outcome.stdout)), (Status::Exited(0), String::new()));
    assert!(fs::read_to_string(&file).expect("readable").contains("#1 region work"));
    refused(
        &explain(&directory, &["--output", "/nonexistent/x", &guest]),
        &["cannot write /nonexistent/x"],
    );
}

/// `--passes` replaces the passes of the policy: the report has these and no others.
#[test]
fn passes_can_be_chosen() {
    let directory = directory("passes");
    let program = guest(&directory, "-O2");
    let words = [
        "--passes",
        "simplify,dce",
        "--threshold",
        "100",
        "--no-attempts",
        "--json",
        "--",
        &program,
    ];
    let explanation = json(&directory, &words).to_string();
    assert!(explanation.contains("\"pass\":\"simplify\""), "{explanation}");
    for other in ["peel", "sink", "params"] {
        assert!(!explanation.contains(&format!("\"pass\":\"{other}\"")), "{other}");
    }
    refused(&explain(&directory, &["--passes", "monitor", "/bin/true"]), &["only the evaluator"]);
}
