//! Every `.ir` file of the repository under `dynasour ir check`, `print`, `opt` and `eval`: what each
//! command says of it, and which files a command refuses, with the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folders of programs that are to be refused: each line with an error says so.
const WRONG: &str = "ir/tests/verify/";

/// Folders of golden files.
const GOLDEN: [&str; 2] = ["ir/tests/opt/", "ir/tests/figures/"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Exit status, standard output and standard error of `dynasour ir`.
fn ir(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_dynasour"))
        .arg("ir")
        .args(args)
        .current_dir(root())
        .output()
        .expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().expect("no signal"), text(&output.stdout), text(&output.stderr))
}

/// The `.ir` files of the repository by their paths in it.
fn files() -> BTreeSet<String> {
    fn search(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("readable").path();
            let name = path.file_name().expect("a name");
            if path.is_dir() && name != "target" && name != ".git" {
                search(&path, found);
            } else if path.extension().is_some_and(|e| e == "ir") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    search(root(), &mut found);
    let short = |path: &PathBuf| path.strip_prefix(root()).expect("inside").display().to_string();
    let files: BTreeSet<String> = found.iter().map(short).collect();
    assert!(files.len() >= 90, "{files:?}");
    files
}

fn is_wrong(file: &str) -> bool {
    file.starts_with(WRONG)
}

fn is_golden(file: &str) -> bool {
    GOLDEN.iter().any(|folder| file.starts_with(folder))
}

/// The lines of a file that say which errors they have.
fn marked(file: &str) -> usize {
    let text = fs::read_to_string(root().join(file)).expect("text");
    text.lines().filter(|line| line.contains("; error: ")).count()
}

#[test]
fn check_accepts_all_but_those_that_are_wrong() {
    for file in files() {
        let (status, out, err) = ir(&["check", &file]);
        if is_wrong(&file) {
            assert_eq!((status, out.as_str()), (1, ""), "{file}: {err}");
            assert!(err.contains("breaks the rule `"), "{file}: {err}");
            assert!(!err.contains("rules of regions"), "{file}: {err}");
        } else {
            assert_eq!((status, err.as_str()), (0, ""), "{file}");
            assert!(out.ends_with(": all right\n"), "{file}: {out}");
        }
        // The golden form accepts the wrong ones, too.
        let (status, out, err) = ir(&["check", "--golden", &file]);
        assert_eq!((status, err.as_str()), (0, ""), "{file}");
        let lines = marked(&file);
        assert_eq!(lines > 0, is_wrong(&file), "{file}");
        assert!(out.starts_with(&format!("{lines} line")), "{file}: {out}");
    }
}

#[test]
fn print_gives_a_text_that_check_accepts() {
    for file in files() {
        let (status, printed, err) = ir(&["print", &file]);
        assert_eq!((status, err.as_str()), (0, ""), "{file}");
        let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("printed.ir");
        fs::write(&copy, &printed).expect("written");
        let copy = copy.to_str().expect("text");
        assert_eq!(ir(&["print", copy]).1, printed, "{file}");
        assert_eq!(ir(&["check", copy]).0, i32::from(is_wrong(&file)), "{file}");
        assert_eq!(printed.contains("\n---\n"), is_golden(&file), "{file}");
    }
}

/// `opt` and `eval` refuse wrong programs as `check` does, and nothing else.
#[test]
fn opt_and_eval_accept_all_but_those_that_are_wrong() {
    for file in files() {
        for args in [&["opt", &file][..], &["eval", "--steps", "10000", &file]] {
            let (status, out, err) = ir(args);
            if is_wrong(&file) {
                assert_eq!((status, out.as_str()), (1, ""), "{args:?}: {err}");
                assert!(err.contains("breaks the rule `"), "{args:?}: {err}");
            } else {
                assert_eq!((status, err.as_str()), (0, ""), "{args:?}: {out}");
                let part = if args[0] == "opt" { " after: " } else { "opportunities: " };
                assert!(out.contains(part), "{args:?}: {out}");
            }
        }
    }
}

/// What `opt --golden` says of each file: the golden ones hold, and others say what they lack.
#[test]
fn opt_golden_runs_what_golden_files_say() {
    let mut answers: BTreeMap<&str, usize> = BTreeMap::new();
    for file in files() {
        let (status, out, err) = ir(&["opt", "--golden", &file]);
        let (expected, answer) = match file.as_str() {
            golden if is_golden(golden) => (0, "the result is as expected"),
            wrong if is_wrong(wrong) => (1, "breaks the rule `"),
            // Programs with a state, for `eval` and for the side conditions of passes.
            _ => (2, "is no golden file: it has no line `---` with a result after it"),
        };
        assert_eq!(status, expected, "{file}: {out}{err}");
        assert!(format!("{out}{err}").contains(answer), "{file}: {out}{err}");
        *answers.entry(answer).or_default() += 1;
    }
    assert!(answers["the result is as expected"] >= 51, "{answers:?}");
}

/// A golden file with a change, under a name of its own.
fn changed(name: &str, file: &str, from: &str, to: &str) -> String {
    let text = fs::read_to_string(root().join(file)).expect("text");
    assert!(text.contains(from), "{from}");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, text.replacen(from, to, 1)).expect("written");
    path.to_str().expect("text").to_owned()
}

#[test]
fn opt_golden_shows_how_the_result_differs() {
    let merge = "ir/tests/opt/redundant.ir";
    let file = changed("without_pass.ir", merge, "; passes: redundant", "; passes: dce");
    let (status, out, err) = ir(&["opt", "--golden", &file]);
    assert_eq!(status, 1, "{out}{err}");
    assert!(out.starts_with("--- expected\n+++ found\n@@ "), "{out}");
    assert!(out.lines().any(|l| l.starts_with("+      assume ")), "{out}");
    assert!(
        err.contains("without_pass.ir: dce: the result differs from what is expected"),
        "{err}"
    );

    for (from, to, status, part) in [
        ("redundant\n", "redundnat\n", 2, "line 1: there is no pass redundnat"),
        ("; passes: redundant\n", "", 2, "begins neither with `; passes: ` nor with `; do: `"),
        ("; passes: redundant\n", "; do: optimise t7 dce\n", 2, "line 1: region 0x"),
        ("---\n", "; no result\n", 1, "there is a region 0x"),
    ] {
        let file = changed("changed.ir", merge, from, to);
        let (found, out, err) = ir(&["opt", "--golden", &file]);
        assert_eq!(found, status, "{from}: {out}{err}");
        assert!(err.contains(part), "{part} in {err}");
    }
    // An error behind `---` is shown on its line.
    let file = changed("second.ir", merge, "\n---\nregion", "\n---\n; two\nregoin");
    let (status, _, err) = ir(&["check", &file]);
    let text = fs::read_to_string(&file).expect("text");
    let line = text.lines().position(|l| l.starts_with("regoin")).expect("it is there") + 1;
    assert_eq!(status, 1);
    assert!(err.contains(&format!("second.ir:{line}:1]")), "{err}");
    let (status, _, err) = ir(&["opt", merge, "--golden", "--each"]);
    assert!(status == 2 && err.contains("cannot be used with"), "{err}");
    let (status, _, err) = ir(&["opt", merge, "--passes", "redundent"]);
    assert!(status == 2 && err.contains("did you mean redundant?"), "{err}");
}

#[test]
fn check_golden_names_the_lines_that_are_not_as_expected() {
    let file = "ir/tests/verify/anchor.ir";
    for (from, to, part) in [
        (
            "poll ; error: an anchor to fall back to is missing [anchor]",
            "poll",
            "expected no error\n    found an anchor to fall back to is missing [anchor]",
        ),
        ("poll ; error", "poll else a0 ; error", "[anchor]\n    found no error"),
        ("missing [anchor]", "lost [anchor]", "is lost [anchor]\n    found an anchor"),
    ] {
        let file = changed("marks.ir", file, from, to);
        let (status, out, err) = ir(&["check", "--golden", &file]);
        assert_eq!((status, out.as_str()), (1, ""), "{err}");
        assert!(err.contains(part) && err.ends_with("1 difference\n"), "{part} in {err}");
    }
}

/// The pass `readonly` learns from the file's state what memory holds.
#[test]
fn opt_takes_read_only_memory_from_the_state() {
    let file = "ir/tests/opt/readonly.ir";
    let (status, out, _) = ir(&["opt", file, "--passes", "readonly", "--quiet"]);
    assert_eq!(status, 0);
    assert!(out.contains("context load.i64 [0x5a40] == 0x2c470"), "{out}");
    let file = changed("writable.ir", file, "  read_only 0x5a40\n", "");
    let (_, out, _) = ir(&["opt", &file, "--passes", "readonly", "--quiet"]);
    assert!(!out.contains("context"), "{out}");
}
