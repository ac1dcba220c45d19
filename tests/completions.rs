//! `dynasour completions` and `dynasour man`: bash completes subcommands, tiers, policies and passes;
//! other shells accept their scripts; groff renders each page without a warning. What is not
//! installed is skipped with a message.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn dynasour(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dynasour")).args(args).output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The script for a shell.
fn script(shell: &str) -> String {
    let output = dynasour(&["completions", shell]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    text(&output.stdout)
}

/// Is the program installed? If it is not, the test says so.
fn installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
    if !found {
        eprintln!("skipped: there is no {program}");
    }
    found
}

/// Runs a shell with a script as its input.
fn shell(program: &str, args: &[&str], script: &str) -> Output {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it is installed");
    let mut input = child.stdin.take().expect("a pipe");
    let script = script.to_owned();
    let writer = std::thread::spawn(move || drop(input.write_all(script.as_bytes())));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("the writer ends");
    output
}

/// What bash offers behind these words, the last of which is being typed.
fn offered(words: &[&str]) -> Vec<String> {
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
    let question = format!(
        "{}\nCOMP_WORDS=({})\nCOMP_CWORD={}\n_dynasour dynasour '{last}' '{before}'\n\
         printf '%s\\n' \"${{COMPREPLY[@]}}\"\ncomplete -p dynasour >&2\n",
        script("bash"),
        quoted.join(" "),
        words.len() - 1
    );
    let output = shell("bash", &["--norc", "-s"], &question);
    let error = text(&output.stderr);
    assert!(output.status.success() && error.starts_with("complete "), "{error}");
    text(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_subcommands_options_and_names() {
    for (words, expected) in [
        (&["dynasour", "ex"][..], &["explain"][..]),
        (&["dynasour", "ir", "ch"], &["check"]),
        (&["dynasour", "run", "--only"], &["--only-trace"]),
        (&["dynasour", "run", "--tier", "d"], &["dynamo", "direct"]),
        (&["dynasour", "explain", "--tier", "fu"], &["full"]),
        (&["dynasour", "run", "--policy", "h"], &["hoisted"]),
        (&["dynasour", "guards", "--policies", "a"], &["anchored"]),
        (&["dynasour", "run", "--passes", "pe"], &["peel"]),
        (&["dynasour", "run", "--skip-pass", "ma"], &[]),
        (&["dynasour", "run", "--log", "sy"], &["syscall"]),
        (&["dynasour", "run", "--race", "me"], &["measured"]),
        // A pass for the evaluator only.
        (&["dynasour", "run", "--passes", "moni"], &[]),
        (&["dynasour", "ir", "opt", "--passes", "moni"], &["monitor"]),
        (&["dynasour", "completions", "z"], &["zsh"]),
    ] {
        let mut offered = offered(words);
        offered.retain(|word| !word.is_empty());
        assert_eq!(offered, expected, "{words:?}");
    }
}

/// The names that are offered are those that the options take, and all of them.
#[test]
fn names_are_those_that_the_options_take() {
    for (option, about) in [
        ("--tier", "expected interp, dynamo, copy, full or direct"),
        ("--returns", "expected auto, table or stack"),
        ("--race", "expected measured, a number, off, trace, floor or swap"),
    ] {
        let names = offered(&["dynasour", "run", option, ""]);
        for name in &names {
            assert!(about.contains(name.as_str()), "{option} {name}");
        }
        let error = text(&dynasour(&["run", option, "nonsense", "--", "true"]).stderr);
        assert!(error.contains(about), "{error}");
        let said = about.trim_start_matches("expected ").replace(" or ", ", ");
        let said = said.split(", ").filter(|name| *name != "a number").count();
        assert_eq!(names.len(), said, "{option}: {names:?}");
    }
    for option in ["--tier", "--returns", "--entry-check", "--race", "--compile-threads"] {
        for name in offered(&["dynasour", "run", option, ""]) {
            // A tier that has no such option refuses it for that reason, not for its value.
            let error = text(&dynasour(&["run", option, &name, "--", "/nonexistent"]).stderr);
            assert!(!error.contains("invalid value"), "{option} {name}: {error}");
        }
    }
}

#[test]
fn other_shells_accept_their_scripts() {
    let zsh = script("zsh");
    assert!(zsh.starts_with("#compdef dynasour\n"), "{zsh}");
    if installed("zsh") {
        let output = shell("zsh", &["-f", "-n", "-s"], &zsh);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    let fish = script("fish");
    assert!(fish.contains("complete -c dynasour"), "{fish}");
    if installed("fish") {
        let output = shell("fish", &["--no-config", "--no-execute"], &fish);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    // Names come with a line about each.
    assert!(zsh.contains("full\\:\"native copies of blocks, and traces\""), "{zsh}");
    assert!(script("elvish").contains("edit:completion:arg-completer[dynasour]"));
    assert!(script("powershell").contains("Register-ArgumentCompleter"));
    let output = dynasour(&["completions", "zhs"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("zsh"), "{error}");
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    folder
}

#[test]
fn pages_are_rendered_without_warnings() {
    let folder = folder("man");
    let output = dynasour(&["man", folder.to_str().expect("text")]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let pages: Vec<PathBuf> =
        fs::read_dir(&folder).expect("the folder").map(|e| e.expect("readable").path()).collect();
    assert!(pages.len() >= 14, "{pages:?}");
    let run = fs::read_to_string(folder.join("dynasour-run.1")).expect("the page of run");
    assert!(run.contains("\\fB\\-\\-tier\\fR") && run.contains(".SH NOTES\nExamples:\n.nf\n"));
    assert!(!run.contains("\\-\\-seccomp"), "hidden options stay hidden");
    if !installed("groff") {
        return;
    }
    for page in pages {
        let output = Command::new("groff")
            .args(["-man", "-ww", "-Tascii", "-P-cbou"])
            .arg(&page)
            .output()
            .expect("it is installed");
        let (shown, warnings) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && warnings.is_empty(), "{}: {warnings}", page.display());
        assert!(shown.contains("SYNOPSIS"), "{}: {shown}", page.display());
        if page.ends_with("dynasour-run.1") {
            let example = "dynasour run --tier interp -- ./a.out        interpret everything\n";
            assert!(shown.contains(example), "{shown}");
        }
    }
}

#[test]
fn pages_are_overwritten_on_request_only() {
    let folder = folder("man_twice");
    fs::create_dir_all(&folder).expect("a folder");
    let page = folder.join("dynasour-ir.1");
    fs::write(&page, "mine").expect("a file");
    let path = folder.to_str().expect("text");
    let output = dynasour(&["man", path]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("dynasour-ir.1 exists already; --force overwrites it"), "{error}");
    assert_eq!(fs::read_dir(&folder).expect("the folder").count(), 1, "nothing is written");
    assert!(dynasour(&["man", "--force", path]).status.success());
    assert_ne!(fs::read_to_string(&page).expect("the page"), "mine");
    let output = dynasour(&["man", page.to_str().expect("text")]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("cannot create"), "{error}");
}
