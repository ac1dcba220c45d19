//! Tests of the test harness: it must accept equal runs and report each kind of difference.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dynasour_testkit::build::{self, Guest};
use dynasour_testkit::list::{self, GUESTS};
use dynasour_testkit::mode::{Launcher, Mode};
use dynasour_testkit::run::{Invocation, Status};
use dynasour_testkit::{Lab, scratch};

fn temporary(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("harness").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

/// A laboratory whose launcher is a shell script with this body; the program and its arguments are
/// in `"$@"`.
fn lab_with_launcher(name: &str, body: &str) -> Lab {
    let path = temporary(name).join("launcher");
    let text = format!("#!/bin/sh\n{body}\n");
    scratch::write_program(&path, text.as_bytes(), 0o755).expect("write the launcher");
    let mut lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    lab.launcher = Launcher::Substitute(vec![path.into_os_string()]);
    lab
}

fn one_mode() -> Vec<Mode> {
    vec![Mode { name: "substitute", flags: Vec::new() }]
}

fn named(name: &str) -> &'static Guest {
    list::guest(name).expect("a guest of the list")
}

fn report(name: &str, body: &str, guest: &Guest) -> String {
    lab_with_launcher(name, body)
        .compare_guest(guest, &one_mode())
        .expect_err("a wrong launcher must be reported")
}

#[test]
fn a_pass_through_launcher_is_accepted() {
    let lab = lab_with_launcher("pass", r#"exec "$@""#);
    for guest in ["asm_hello", "crash_null", "script", "sigpipe"] {
        lab.compare_guest(named(guest), &one_mode()).expect("equal runs");
    }
}

#[test]
fn wrong_bytes_are_reported() {
    let guest = named("asm_sieve");
    let message = report("changed", r#""$@" | sed '2s/./z/'"#, guest);
    assert!(message.contains("stdout differs at byte 17, line 2"), "{message}");
    let message = report("more", r#""$@"; echo more"#, guest);
    assert!(
        message.contains("stdout differs at byte 34, line 3 (native 34 bytes, this 39 bytes)"),
        "{message}"
    );
    let message = report("less", r#""$@" | head -1"#, guest);
    assert!(message.contains("native 34 bytes, this 17 bytes"), "{message}");
    let message = report("chatty", r#"echo warning >&2; exec "$@""#, guest);
    assert!(message.contains("stderr differs at byte 0, line 1"), "{message}");
    assert!(message.contains("replay: cd "), "{message}");
}

#[test]
fn wrong_endings_are_reported() {
    let message = report("status", r#""$@"; exit 3"#, named("asm_hello"));
    assert!(
        message.contains("native ended with exit status 42, this with exit status 3"),
        "{message}"
    );
    // A shell turns death by a signal into an exit status, which is a difference.
    let message = report("shell-status", r#""$@" 2>&-; exit $?"#, named("crash_ud2"));
    assert!(message.contains("native ended with signal 4, this with exit status 132"), "{message}");
    let message = report("signal", r#""$@" > /dev/null; kill -KILL $$"#, named("asm_hello"));
    assert!(message.contains("this with signal 9"), "{message}");
    assert!(message.contains("stdout differs"), "{message}");
}

#[test]
fn a_wrong_environment_is_reported() {
    let message = report("environment", r#"exec env EXTRA=1 "$@""#, named("start_pie"));
    assert!(message.contains("stdout differs") && message.contains("EXTRA=1"), "{message}");
    let message = report("descriptor", r#"exec "$@" 3< /dev/null"#, named("start_pie"));
    assert!(message.contains("stdout differs"), "{message}");
    let message = report("ignored-signal", r#"trap "" PIPE; exec "$@""#, named("sigpipe"));
    assert!(
        message.contains("stdout differs") && message.contains("initially default: 0"),
        "{message}"
    );
}

#[test]
fn a_missing_launcher_is_reported() {
    let mut lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    lab.launcher = Launcher::Substitute(vec!["/nonexistent/launcher".into()]);
    let message = lab.compare_guest(named("asm_sieve"), &one_mode()).expect_err("nothing was run");
    assert!(message.contains("exit status 127"), "{message}");
}

#[test]
fn a_guest_that_ends_otherwise_than_declared_is_reported() {
    let lab = lab_with_launcher("declared", r#"exec "$@""#);
    let guest = Guest { name: "asm_sieve", ..*named("asm_hello") }.exits(7);
    let message = lab.compare_guest(&guest, &one_mode()).expect_err("it exits with 42");
    assert!(
        message
            .contains("declared to end with exit status 7, natively it ended with exit status 42"),
        "{message}"
    );
}

#[test]
fn a_run_that_hangs_is_killed_with_its_children() {
    let directory = temporary("hang");
    let script =
        "(sleep 600 & echo $! > child; wait) & sleep 600 & echo $! > sibling; echo begun; wait";
    let mut invocation = Invocation::new("/bin/sh", &directory).args(["-c", script]);
    invocation.limit = Duration::from_secs(1);
    let outcome = invocation.run();
    assert_eq!(outcome.status, Status::TimedOut);
    assert_eq!(outcome.stdout, b"begun\n");
    for name in ["child", "sibling"] {
        let pid = fs::read_to_string(directory.join(name)).expect("the shell wrote it");
        ends(pid.trim());
    }
    // A child that keeps the pipes open belongs to the run, even when the command itself has ended.
    let mut invocation = Invocation::new("/bin/sh", &directory).args(["-c", "sleep 600 &"]);
    invocation.limit = Duration::from_millis(500);
    assert_eq!(invocation.run().status, Status::TimedOut);
}

/// Waits until process `pid`, which was sent SIGKILL, is gone or a zombie; panics when it lives on.
fn ends(pid: &str) {
    let lives = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains("sleep") && !status.contains("State:\tZ")
    };
    for _ in 0..300 {
        if !lives() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("process {pid}, a descendant, outlived the limit");
}

#[test]
fn differences_of_files_are_reported() {
    let directory = temporary("files");
    fs::create_dir(directory.join("d")).expect("mkdir");
    fs::write(directory.join("d/a"), "text").expect("write");
    std::os::unix::fs::symlink("a", directory.join("d/l")).expect("symlink");
    let all = |_: &Path| false;
    let before = scratch::snapshot(&directory, &all).expect("snapshot");
    assert_eq!(scratch::difference(&before, &before.clone()), None);
    fs::write(directory.join("d/a"), "teXt").expect("write");
    fs::write(directory.join("new"), "").expect("write");
    fs::remove_file(directory.join("d/l")).expect("remove");
    let after = scratch::snapshot(&directory, &all).expect("snapshot");
    let message = scratch::difference(&before, &after).expect("differences");
    assert!(message.contains("file d/a differs at byte 2"), "{message}");
    assert!(message.contains("file d/l is missing"), "{message}");
    assert!(message.contains("file new exists, natively it does not"), "{message}");
    let ignoring = |path: &Path| path.starts_with("d");
    assert_eq!(scratch::snapshot(&directory, &ignoring).expect("snapshot").len(), 1);
}

#[test]
fn replay_lines_are_quoted_for_a_shell() {
    let invocation = Invocation::new("/bin/echo", "/tmp").args(["plain", "two words", "it's", ""]);
    let line = invocation.to_string();
    let shell = Invocation::new("/bin/sh", "/").args(["-c", &line]).run();
    assert_eq!(String::from_utf8_lossy(&shell.stdout), "plain two words it's \n");
}

#[test]
fn every_source_is_in_the_matrix() {
    let mut names: Vec<_> = GUESTS.iter().map(|guest| guest.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), GUESTS.len(), "guest names are unique");
    for entry in fs::read_dir(build::sources()).expect("tests/guests") {
        let entry = entry.expect("a directory entry");
        if entry.file_type().expect("a file type").is_dir() {
            // Headers for guests without a C library.
            continue;
        }
        let file = entry.file_name();
        let file = file.to_str().expect("sources have plain names");
        let used = GUESTS.iter().any(|guest| guest.source == file || guest.library == Some(file));
        assert!(
            used || file.ends_with(".h"),
            "tests/guests/{file} is in no line of tests/support/src/list.rs"
        );
    }
}
