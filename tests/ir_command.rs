//! `dynasour ir`: the output of its commands, their exit status, and the errors for bad input.

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const COUNTDOWN: &str = "ir/tests/programs/countdown.ir";

/// Exit status, standard output and standard error.
fn dynasour(args: &[&str], input: &[u8]) -> (i32, String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_dynasour"))
        .arg("ir")
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("COLUMNS", "100")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // The command may answer without reading all of it.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().expect("no signal"), text(output.stdout), text(output.stderr))
}

fn ok(args: &[&str]) -> String {
    let (status, out, err) = dynasour(args, b"");
    assert_eq!((status, err.as_str()), (0, ""), "{args:?}: {out}");
    out
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(args)).unwrap()
}

/// The countdown program with one text replaced, as standard input.
fn changed(from: &str, to: &str) -> Vec<u8> {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(COUNTDOWN)).unwrap();
    assert!(text.contains(from), "{from}");
    text.replace(from, to).into_bytes()
}

#[test]
fn check_shows_each_broken_rule_at_its_line() {
    assert_eq!(ok(&["check", COUNTDOWN]), "4 versions in 2 regions: all right\n");
    let (status, out, err) = dynasour(
        &["check", "-"],
        &changed(
            "assume v8 else a1\n      jump b1(v6, v7)",
            "assume v6 else a1\n      jump b1(v6)",
        ),
    );
    assert_eq!((status, out.as_str()), (1, ""));
    for part in [
        "operand 1: v6 is i64, i1 is expected",
        "[<stdin>:19:7]",
        "assume v6 else a1",
        "^^^^^^^^|^^^^^^^^",
        "breaks the rule `type`",
        "1 operands, b1 has 2 parameters",
        "4 errors",
    ] {
        assert!(err.contains(part), "{part} in\n{err}");
    }
}

#[test]
fn check_shows_where_the_syntax_is_wrong_and_what_was_expected() {
    let (status, _, err) = dynasour(&["check", "-"], &changed("print v4", "print v4,"));
    assert_eq!(status, 1);
    for part in [
        "expected a value or a number on the line of the `,`, found `v6`",
        "[<stdin>:16:7]",
        "v6 = sub.i64 v4, 1",
        "^|",
    ] {
        assert!(err.contains(part), "{part} in\n{err}");
    }
    let (status, out, _) =
        dynasour(&["check", "--json", "-", COUNTDOWN], b"region 5 {\n  version t1 {\n    b0(:\n");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((status, &report["versions"]), (1, &4.into()));
    assert_eq!(report["errors"][0]["line"], 3);
    assert_eq!(report["errors"][0]["column"], 8);
    assert_eq!(report["errors"][0]["rule"], "syntax");
}

#[test]
fn check_knows_the_rules_of_regions() {
    let (status, _, err) =
        dynasour(&["check", "-"], &changed("via t1.a1 [v1 = 7, v6", "via t9.a1 [v1 = 7, v6"));
    assert_eq!(status, 1);
    assert!(err.contains("there is no version t9") && err.contains("[<stdin>:10:5]"), "{err}");
}

#[test]
fn print_gives_what_it_is_given_in_its_usual_form() {
    let once = ok(&["print", COUNTDOWN]);
    assert!(
        once.starts_with(
            "state \"three\" {\n  rdi = 3\n  rsi = 7\n}\n\nregion 0x100 \"countdown\" {\n"
        ),
        "{once}"
    );
    let (status, twice, _) = dynasour(&["print", "-"], once.as_bytes());
    assert_eq!((status, twice), (0, once.clone()));
    // A program that breaks a rule of the verifier can be printed, too.
    let (status, broken, _) =
        dynasour(&["print", "-"], once.replace("assume v8", "assume v6").as_bytes());
    assert_eq!((status, broken), (0, once.replace("assume v8", "assume v6")));
    assert!(once.contains("dead") && !ok(&["print", "--short", COUNTDOWN]).contains("dead"));
}

#[test]
fn opt_shows_before_and_after() {
    let out = ok(&["opt", COUNTDOWN, "--version", "t1", "--passes", "peel,dce", "--each"]);
    for part in [
        "; 0x100 t1 before: 6 instructions, 2 anchors\n",
        "; after peel\n",
        "t1 after: 11 instructions, 3 anchors\n",
    ] {
        assert!(out.contains(part), "{part} in\n{out}");
    }
    assert!(!out.contains("version t2") && !out.contains("; after dce"), "{out}");
    let report = json(&["opt", COUNTDOWN, "--version", "t1", "--passes", "peel", "--json"]);
    assert_eq!(report["versions"][0]["passes"][0]["name"], "peel");
    assert_eq!(report["versions"][0]["instructions_after"], 11);
    for pass in dynasour_ir::opt::PASSES {
        assert!(ok(&["opt", "--list"]).contains(pass.name));
    }
}

#[test]
fn opt_makes_programs_that_do_the_same() {
    // Labels name values of the version they lead to. So only t2, which no label leads to, may be
    // changed.
    let new = ok(&["opt", COUNTDOWN, "--version", "t2", "--quiet"]);
    let (status, out, err) =
        dynasour(&["diff", "-", "base", "t2", "--forks", "50"], new.as_bytes());
    assert_eq!(status, 0, "{out}{err}\n{new}");
    let (status, _, err) = dynasour(&["opt", COUNTDOWN, "--passes", "dce,nonsense"], b"");
    assert_eq!(
        (status, err.starts_with("dynasour: there is no pass nonsense")),
        (2, true),
        "{err}"
    );
    let (status, _, err) = dynasour(&["opt", COUNTDOWN, "--version", "t7"], b"");
    assert_eq!((status, err.contains("no trace called t7")), (2, true), "{err}");
}

#[test]
fn eval_runs_programs() {
    let out = ok(&["eval", COUNTDOWN]);
    assert_eq!(
        out,
        "print 0x3\nprint 0x2\nprint 0x1\n0x110 base: system call before 0x112\nopportunities: \
            6\nrsi = 0x7\nrflags = 0x44\n"
    );
    let out = ok(&["eval", COUNTDOWN, "--version", "t2", "--follow", "--force", "1", "--trace"]);
    let visits: Vec<&str> = out.lines().filter(|l| l.starts_with("0x1")).collect();
    assert_eq!(visits[0], "0x100 t2: by a label");
    assert_eq!(visits[1], "0x100 t1: through a1 at b1[5] to 0x108 (a failed assumption)");
    let report = json(&["eval", COUNTDOWN, "--version", "base", "--set", "rdi = 2", "--json"]);
    assert_eq!(report["printed"], serde_json::json!(["0x2", "0x1"]));
    assert_eq!(report["registers"]["rsi"], "0x7");
}

#[test]
fn eval_reads_memory_and_input() {
    let program = b"region 1 { version base { b0:
        at 1\n v0 = load.i32 [4096]\n v1 = read\n v2 = zext32.i64 v0\n v3 = add.i64 v1, v2\n \
        print v3
        store.i16 [4100], 0x1234\n goto 2 } }";
    let (status, out, err) = dynasour(
        &["eval", "-", "--set", "memory 0x1000: i32 -1, 0", "--set", "input 1, 2"],
        program,
    );
    assert_eq!((status, err.as_str()), (0, ""));
    assert_eq!(
        out,
        "print 0x100000000\n0x1 base: to 0x2\nopportunities: 0\nmemory 0x1004: i8 0x34, 0x12\n"
    );
    let (_, out, _) = dynasour(&["eval", "-"], program);
    assert!(out.starts_with("0x1 base: fault at 0x1: cannot read 0x1000\n"), "{out}");
    let (status, _, err) = dynasour(&["eval", "-", "--set", "rdi 5"], program);
    assert_eq!(
        (status, err.contains("line 1, column 5: expected `=`, found 0x5")),
        (2, true),
        "{err}"
    );
}

#[test]
fn diff_reports_the_first_difference() {
    assert_eq!(
        ok(&["diff", COUNTDOWN, "base", "t1", "--forks", "100"]),
        "base and t1 agree: 7 runs compared\n"
    );
    assert_eq!(
        ok(&["diff", COUNTDOWN, "t1", "t2", "--random", "20,3", "--steps", "500"]).lines().count(),
        1
    );
    let (status, out, _) = dynasour(
        &["diff", "-", "base", "t1"],
        &changed(
            "print v4\n      v6 = sub.i64 v4, 1\n      v7 = flags.sub.i64 v4, 1\n      v8 = \
                cond.ne v7\n      assume v8 else a1\n      jump b1(v6, v7)\n  }\n  version base",
            "print 5\n      v6 = sub.i64 v4, 1\n      v7 = flags.sub.i64 v4, 1\n      v8 = \
                cond.ne v7\n      assume v8 else a1\n      jump b1(v6, v7)\n  }\n  version base",
        ),
    );
    assert_eq!(status, 1);
    for part in [
        "differ from state \"three\"",
        "print 1: 0x3 and 0x5",
        "base: at <stdin>:40 ",
        "t1: at <stdin>:29 ",
    ] {
        assert!(out.contains(part), "{part} in\n{out}");
    }
    // Only a forced deoptimisation shows this difference.
    let wrong = changed(
        "[rdi = v4, rflags = v5]\n    anchor a1 = base.0x108 [rdi = v6, rflags = v7]\n    b0",
        "[rdi = 1, rflags = v5]\n    anchor a1 = base.0x108 [rdi = v6, rflags = v7]\n    b0",
    );
    assert_eq!(dynasour(&["diff", "-", "base", "t1"], &wrong).0, 0);
    let (status, out, _) = dynasour(&["diff", "-", "base", "t1", "--forks", "9", "--json"], &wrong);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((status, &report["differ"], &report["forced"]), (1, &true.into(), &0.into()));
}

#[test]
fn usage_is_taught() {
    for (args, parts) in [
        (&["--help"][..], &["check", "print", "opt", "eval", "diff"][..]),
        (&["eval", "--help"], &["Examples:", "--set", "--force"]),
        (&["diff", "--help"], &["Examples:", "--forks", "Exit status 1"]),
        (&["opt", "--help"], &["--passes", "--skip-pass", "--each"]),
    ] {
        let out = ok(args);
        parts.iter().for_each(|part| assert!(out.contains(part), "{part} in\n{out}"));
    }
    for args in [
        &["check", "/nonexistent"][..],
        &["eval", COUNTDOWN, "--version", "t9"],
        &["diff", COUNTDOWN, "t1"],
        &["eval", COUNTDOWN, "--state", "x"],
    ] {
        let (status, _, err) = dynasour(args, b"");
        assert!(status == 2 && !err.is_empty(), "{args:?}: {status} {err}");
    }
}

#[test]
fn bad_input_is_answered() {
    let files: Vec<PathBuf> =
        ["ir/tests/verify", "ir/tests/opt", "ir/tests/figures", "ir/tests/programs"]
            .iter()
            .flat_map(|d| std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(d)).unwrap())
            .map(|entry| entry.unwrap().path())
            .collect();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |n: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % n
    };
    for round in 0..84 {
        let mut text = std::fs::read(&files[below(files.len())]).unwrap();
        text.truncate(3000);
        for _ in 0..below(4) {
            let at = below(text.len());
            match below(3) {
                0 => text[at] = below(256) as u8,
                1 => text.truncate(at.max(1)),
                _ => text.insert(at, b"{}[]v0a9!,=;\n"[below(13)]),
            }
        }
        let args = [
            &["check", "-"][..],
            &["print", "-"],
            &["opt", "-"],
            &["opt", "--golden", "-"],
            &["check", "--golden", "-"],
            &["eval", "-", "--steps", "1000"],
            &["diff", "-", "base", "t1", "--random", "3"],
        ];
        let args = args[round % args.len()];
        let (status, _, err) = dynasour(args, &text);
        assert!(
            (0..=2).contains(&status) && !err.contains("panicked"),
            "{args:?}: {status} {err}\n{}",
            String::from_utf8_lossy(&text)
        );
    }
}

/// Writes the programs of `ir/README.md` to files: the sum in one region, the countdown, and a golden
/// file.
fn files_of_the_page(page: &str, directory: &Path) {
    let blocks: Vec<&str> =
        page.split("```ir\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    let (base, trace) = (blocks[0], blocks[1]);
    // The braces of the first region, then the versions of both.
    let open =
        base.find("region").and_then(|at| Some(at + base[at..].find('{')?)).expect("a region") + 1;
    let versions =
        &trace[trace.find('{').expect("a region") + 1..trace.rfind('}').expect("its end")];
    std::fs::write(
        directory.join("sum.ir"),
        format!("{}{versions}{}", &base[..open], &base[open..]),
    )
    .unwrap();
    std::fs::write(directory.join("countdown.ir"), blocks[3]).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("ir/tests/opt/peel.ir");
    std::fs::copy(golden, directory.join("golden.ir")).unwrap();
}

/// Every command that `ir/README.md` shows prints the output shown there.
#[test]
fn the_page_shows_what_the_commands_print() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("ir/README.md"))
        .unwrap();
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ir_page");
    std::fs::create_dir_all(&directory).unwrap();
    files_of_the_page(&page, &directory);
    let mut shown: Vec<(&str, String)> = Vec::new();
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(command) = line.strip_prefix("    $ ") else { continue };
        let mut output = String::new();
        while let Some(more) = lines.next_if(|l| l.starts_with("    ") && !l.starts_with("    $ "))
        {
            output.push_str(&more[4..]);
            output.push('\n');
        }
        shown.push((command, output));
    }
    assert!(shown.len() >= 6, "{shown:?}");
    for (command, output) in shown {
        let dynasour = format!("'{}'", env!("CARGO_BIN_EXE_dynasour"));
        let script = command.replace("dynasour ir", &format!("{dynasour} ir"));
        let ran =
            Command::new("sh").args(["-c", &script]).current_dir(&directory).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&ran.stderr), "", "{command}");
        assert_eq!(String::from_utf8_lossy(&ran.stdout), output, "{command}");
    }
}

#[test]
fn versions_of_a_region_stand_in_one() {
    let twice = b"region 1 { version base { b0: at 1 goto 2 } }\nregion 1 {\n version t1 {\n \
        anchor a0 = base.2 []\n b0:\n exit a0\n } }";
    let twice = String::from_utf8_lossy(twice).replace("b0: at 1 goto", "b0:\nat 1\ngoto");
    let (status, _, err) = dynasour(&["check", "-"], twice.as_bytes());
    assert_eq!(status, 1);
    assert!(
        err.contains("there is a region 0x1 already") && err.contains("[<stdin>:5:2]"),
        "{err}"
    );
    let (status, _, err) = dynasour(
        &["diff", "-", "base", "t1"],
        b"region 1 { version t1 { anchor a0 = base.2 []\n b0:\n exit a0\n } }",
    );
    assert_eq!((status, err.as_str()), (2, "dynasour: region 0x1 has no version base\n"));
}

/// Without a solver a proof is refused; with one the answer is the status.
#[test]
fn prove_answers_or_says_what_it_lacks() {
    if cfg!(not(feature = "prove")) {
        let (status, out, err) = dynasour(&["prove", COUNTDOWN, "base", "t1"], b"");
        assert_eq!((status, out.as_str()), (2, ""), "{err}");
        assert!(
            err.contains("built without a solver") && err.contains("--features prove"),
            "{err}"
        );
        return;
    }
    let answer = ok(&["prove", COUNTDOWN, "base", "t1"]);
    assert!(answer.starts_with("proven: t1 does what base does, from every state: "), "{answer}");
    let value = json(&["prove", "--json", COUNTDOWN, "base", "t2"]);
    assert_eq!((&value["verdict"], &value["why"]), (&Value::from("proven"), &Value::Null));
    assert!(value["states"].as_u64() > Some(0), "{value}");
    // One trace against another.
    let answer = ok(&["prove", COUNTDOWN, "t1", "t1"]);
    assert!(answer.starts_with("proven: "), "{answer}");
    // A version that counts in the other direction is refuted, by a state that shows it.
    let wrong = changed("v6 = sub.i64 v4, 1", "v6 = sub.i64 v4, 2");
    let (status, out, err) = dynasour(&["prove", "-", "base", "t1"], &wrong);
    assert_eq!((status, err.as_str()), (1, ""), "{out}");
    assert!(out.starts_with("refuted: ") && out.contains("state \"counterexample\" {"), "{out}");
    for (args, what) in [
        (["prove", COUNTDOWN, "base", "t9"], "no region has a version t9"),
        (["prove", COUNTDOWN, "t9", "t1"], "has no version t9"),
        (["prove", COUNTDOWN, "t1", "base"], "base is a base version"),
    ] {
        let (status, out, err) = dynasour(&args, b"");
        assert_eq!((status, out.as_str()), (2, ""), "{err}");
        assert!(err.contains(what), "{err}");
    }
}
