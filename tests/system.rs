//! What a process shows to the system besides its output: the report at its end, its address space,
//! its descriptors, job control.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use dynasour_testkit::run::{self, Invocation, Outcome, Status};
use dynasour_testkit::scratch;
use dynasour_testkit::{Lab, build, list};

/// The properties tested here hold in all tiers, and each tier has statistics.
const TIERS: [&str; 5] = ["interp", "dynamo", "copy", "direct", "full"];

fn temporary(name: &str) -> PathBuf {
    run::disable_core_dumps();
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("system").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

/// `dynasour run --tier TIER OPTIONS -- COMMAND` in `directory`.
fn translated(directory: &Path, tier: &str, options: &[&str], command: &[&str]) -> Outcome {
    Invocation::new(env!("CARGO_BIN_EXE_dynasour"), directory)
        .args(["run", "--tier", tier])
        .args(options)
        .args(["--"])
        .args(command)
        .run()
}

const HEADING: &str = "dynasour statistics\n";

/// The output before the statistics at the end of stderr, and the number of reports.
fn split_report(outcome: &Outcome) -> (String, usize) {
    let stderr = String::from_utf8_lossy(&outcome.stderr).into_owned();
    let reports = stderr.matches(HEADING).count();
    let before = stderr.split(HEADING).next().unwrap_or_default().to_owned();
    (before, reports)
}

/// However the process ends that the user started, it prints exactly one report.
#[test]
fn each_end_is_reported_once() {
    let directory = temporary("ends");
    let ends: [(&str, &[&str], Status); 9] = [
        ("exit", &["sh", "-c", "exit 3"], Status::Exited(3)),
        ("standard error closed", &["ls", "-d", "/"], Status::Exited(0)),
        (
            "all descriptors closed",
            &["bash", "-c", "exec 0<&- 1>&- 2>&-; exit 4"],
            Status::Exited(4),
        ),
        ("fault", &["sh", "-c", "kill -SEGV $$"], Status::Killed(11)),
        ("default action", &["sh", "-c", "kill -TERM $$; echo survived"], Status::Killed(15)),
        ("real-time signal", &["bash", "-c", "kill -40 $$; echo survived"], Status::Killed(40)),
        ("SIGKILL to itself", &["sh", "-c", "kill -KILL $$; echo survived"], Status::Killed(9)),
        (
            "children",
            &["bash", "-c", "(exit 1); (kill -PIPE $BASHPID); true | cat"],
            Status::Exited(0),
        ),
        ("another program", &["sh", "-c", "exec sh -c 'exec ls -d /'"], Status::Exited(0)),
    ];
    for tier in TIERS {
        for (name, command, status) in ends {
            let outcome = translated(&directory, tier, &["--stats"], command);
            let (before, reports) = split_report(&outcome);
            assert_eq!(
                (outcome.status, reports),
                (status, 1),
                "{tier}, {name}: {}",
                outcome.excerpt()
            );
            assert_eq!(before, "", "{tier}, {name}");
        }
    }
}

/// The report does not change how the guest's signals behave.
#[test]
fn watched_signals_stay_the_guests() {
    let directory = temporary("watched");
    let script = "trap 'echo caught' USR1; kill -USR1 $$; trap '' TERM; kill -TERM $$; \
                  sh -c 'kill -TERM $$; trap - TERM; kill -HUP $$'; echo $?; trap - USR1; kill \
                  -USR1 $$; echo survived";
    let native = Invocation::new("/bin/sh", &directory).args(["-c", script]).run();
    assert_eq!(native.status, Status::Killed(libc::SIGUSR1));
    let watched = translated(&directory, "interp", &["--stats"], &["sh", "-c", script]);
    assert_eq!(
        (watched.status, &watched.stdout),
        (native.status, &native.stdout),
        "{}",
        watched.excerpt()
    );
}

/// A relative file name means the directory in which the user started dynasour, and the last
/// program of the process writes the report.
#[test]
fn statistics_go_to_the_file_that_the_user_named() {
    let directory = temporary("json");
    let command = ["sh", "-c", "cd /; exec sh -c 'kill -TERM $$'"];
    let outcome = translated(&directory, "interp", &["--stats-json", "s.json"], &command);
    assert_eq!((outcome.status, outcome.stderr.as_slice()), (Status::Killed(15), b"".as_slice()));
    let json = fs::read_to_string(directory.join("s.json")).expect("the file");
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert!(json["syscalls"].as_u64() > Some(5), "{json}");
    // A file that cannot be written is noticed before the program runs.
    for option in ["--stats-json", "--count"] {
        let outcome =
            translated(&directory, "interp", &[option, "/no/such/file"], &["echo", "ran"]);
        assert_eq!(
            (outcome.status, outcome.stdout.as_slice()),
            (Status::Exited(2), b"".as_slice())
        );
        assert!(
            String::from_utf8_lossy(&outcome.stderr).contains("cannot write /no/such/file"),
            "{}",
            outcome.excerpt()
        );
    }
    // The check leaves nothing, and what was there stays.
    fs::write(directory.join("old.json"), "old").expect("a file");
    for file in ["new.json", "old.json"] {
        let outcome = translated(&directory, "interp", &["--stats-json", file], &["/no/such/file"]);
        assert_eq!(outcome.status, Status::Exited(127));
    }
    assert!(!directory.join("new.json").exists());
    assert_eq!(fs::read(directory.join("old.json")).expect("it stays"), b"old");
}

/// With `--no-follow` the report covers the translated program, and is printed before the other
/// program starts.
#[test]
fn a_program_run_natively_is_preceded_by_the_report() {
    let directory = temporary("native");
    let command = ["bash", "-c", "exec /no/such/file; exec true"];
    let outcome = translated(&directory, "interp", &["--stats", "--no-follow"], &command);
    let script = "shopt -s execfail; exec /no/such/file 2>/dev/null; exec echo native";
    assert_eq!(outcome.status, Status::Exited(127), "{}", outcome.excerpt());
    let outcome =
        translated(&directory, "interp", &["--stats", "--no-follow"], &["bash", "-c", script]);
    let (before, reports) = split_report(&outcome);
    assert_eq!(
        (before.as_str(), reports, outcome.stdout.as_slice()),
        ("", 1, b"native\n".as_slice())
    );
}

/// Where syscall user dispatch is denied, `direct` says so once and runs the program all the same;
/// the programs that it executes say nothing.
#[test]
fn without_syscall_user_dispatch_another_tier_runs() {
    const DENY: &str = r#"
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
/* Executes its arguments where prctl(PR_SET_SYSCALL_USER_DISPATCH) fails. */
int main(int argc, char **argv) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 59, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 99;
    execv(argv[1], argv + 1);
    return 98;
}
"#;
    let directory = temporary("denied");
    fs::write(directory.join("deny.c"), DENY).expect("write the source");
    let compiler = Invocation::new("/usr/bin/cc", &directory).args(["-o", "deny", "deny.c"]).run();
    assert_eq!(compiler.status, Status::Exited(0), "{}", compiler.excerpt());
    let outcome = Invocation::new(directory.join("deny"), &directory)
        .args([env!("CARGO_BIN_EXE_dynasour"), "run", "--tier", "direct", "--"])
        .args(["sh", "-c", "sh -c 'echo one'; echo two; exit 5"])
        .run();
    assert_eq!(
        (outcome.status, &outcome.stdout[..]),
        (
            Status::Exited(5),
            &b"one
two
"[..]
        )
    );
    let message = String::from_utf8_lossy(&outcome.stderr);
    assert_eq!(message.matches("syscall user dispatch").count(), 1, "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
}

/// The dynamic linker's settings in the environment apply to the guest; dynasour itself has no
/// dynamic linker.
#[test]
fn dynamic_linker_settings_reach_the_guest_alone() {
    let directory = temporary("linker");
    let source = directory.join("preloaded.c");
    let code = "#include <unistd.h>\n__attribute__((constructor)) static void announce(void) { \
        write(1, \"here\\n\", 5); }\n";
    fs::write(&source, code).expect("write the source");
    let library = directory.join("preloaded.so");
    let compiler = Invocation::new("/usr/bin/cc", &directory)
        .args(["-shared", "-fPIC", "-w", "-o"])
        .args([&library, &source])
        .run();
    assert_eq!(compiler.status, Status::Exited(0), "{}", compiler.excerpt());
    let settings: [(&str, &str); 4] = [
        ("LD_PRELOAD", library.to_str().expect("a plain path")),
        ("LD_LIBRARY_PATH", "/nonexistent"),
        ("LD_TRACE_LOADED_OBJECTS", "1"),
        ("LD_DEBUG", "files"),
    ];
    for (name, value) in settings {
        let mut native = Invocation::new("/bin/ls", &directory).args(["-d", "/"]);
        let mut translated = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), &directory)
            .args(["run", "--tier", "interp", "--", "/bin/ls", "-d", "/"]);
        for invocation in [&mut native, &mut translated] {
            invocation.environment.push((name.into(), value.into()));
        }
        let (native, translated) =
            (lines_without_addresses(&native.run()), lines_without_addresses(&translated.run()));
        assert_eq!(native, translated, "{name}");
        assert!(!native.is_empty());
    }
}

/// The lines of the output with all numbers made equal, since they may be addresses or process ids.
fn lines_without_addresses(outcome: &Outcome) -> Vec<String> {
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&outcome.stdout),
        String::from_utf8_lossy(&outcome.stderr)
    );
    let is_number =
        |word: &str| word.trim_matches(['(', ')', ':']).starts_with("0x") || word.ends_with(':');
    let line = |line: &str| {
        line.split_whitespace().filter(|word| !is_number(word)).collect::<Vec<_>>().join(" ")
    };
    text.lines().map(line).collect()
}

/// A program inherits what the process was given, both as the first translated program and when a
/// translated program executes it.
#[test]
fn what_a_process_inherits_is_untouched() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    let guest = list::guest("inherited").expect("a guest of the list");
    let built = build::build(guest, &lab.tmp).expect("the guest builds");
    let invocation = built.invocation(guest);
    let program = invocation.program.clone().into_os_string();
    let dynasour = |options: &[&str]| {
        let words = [env!("CARGO_BIN_EXE_dynasour"), "run"].iter().chain(options).chain(&["--"]);
        words.map(OsString::from).collect::<Vec<_>>()
    };
    let run = |words: Vec<OsString>| {
        let mut words = words.into_iter();
        let program = PathBuf::from(words.next().expect("a program"));
        Invocation { program, args: words.collect(), ..invocation.clone() }.run()
    };
    let under = |launcher: Vec<OsString>| {
        [vec![program.clone(), "under".into()], launcher, vec![program.clone()]].concat()
    };
    let native = run(under(vec![]));
    assert_eq!(native.status, Status::Exited(0), "{}", native.excerpt());
    for options in
        [&["--tier", "interp"][..], &["--tier", "dynamo"], &["--tier", "interp", "--no-follow"]]
    {
        let first = run(under(dynasour(options)));
        let second = run([dynasour(options), under(vec![])].concat());
        assert_eq!(native.difference(&first), None, "{options:?}");
        assert_eq!(native.difference(&second), None, "{options:?}");
    }
}

/// Samples of guest code in place end no call of the guest's, however often they come: here some
/// thousands of times in a second of real time, while threads sleep in calls, too.
#[test]
fn samples_end_no_call_early() {
    let lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    let guest = list::guest("calls_sampled").expect("a guest of the list");
    let built = build::build(guest, &lab.tmp).expect("the guest builds");
    let invocation = built.invocation(guest);
    let native = invocation.run();
    assert!(native.stdout.starts_with(b"read: 0 of 10\n"), "{}", native.excerpt());
    for sampling in ["real=2000", "real=7000"] {
        let mut args: Vec<OsString> =
            ["run", "--tier", "direct", "--sample", sampling, "--"].map(OsString::from).to_vec();
        args.push(invocation.program.clone().into_os_string());
        args.extend(invocation.args.iter().cloned());
        let program = PathBuf::from(env!("CARGO_BIN_EXE_dynasour"));
        let sampled = Invocation { program, args, ..invocation.clone() }.run();
        assert_eq!(native.difference(&sampled), None, "{sampling}");
    }
}

/// A busy thread in place is sampled: by timers if the user wants them, otherwise by events, where
/// the kernel allows them.
#[test]
fn a_busy_thread_is_sampled() {
    let directory = temporary("sampled");
    let script = "i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done; echo $i";
    for (sampling, by_events) in [("timer=1000", false), ("hz=1000", true)] {
        let options = ["--sample", sampling, "--stats-json", "s.json"];
        let outcome = translated(&directory, "direct", &options, &["sh", "-c", script]);
        assert_eq!(
            (outcome.status, outcome.stdout.as_slice()),
            (Status::Exited(0), b"400000\n".as_slice())
        );
        let json = fs::read_to_string(directory.join("s.json")).expect("the file");
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let (all, events) = (json["guest_samples"].as_u64(), json["event_samples"].as_u64());
        assert!(all > Some(3), "{json}");
        // All but the first sample are events, or none is.
        assert!(events == Some(0) || by_events && events == all.map(|n| n - 1), "{json}");
    }
}

/// Limits on open files and file sizes do not prevent translation, nor that of the guest's
/// children.
#[test]
fn limits_of_the_guest_are_not_the_translators() {
    let directory = temporary("limits");
    let scripts = [
        "ulimit -f 1; /bin/echo small; (echo subshell)",
        "ulimit -n 4; (echo subshell); exec 3</dev/null; (echo no descriptor left; exit 3); echo \
            $?",
        "ulimit -c 0; ulimit -s 512; /bin/echo stack",
        "ulimit -v 1000000; /bin/echo space",
    ];
    for script in scripts {
        let command = ["bash", "-c", script];
        let native = Invocation::new("/bin/bash", &directory).args(["-c", script]).run();
        for tier in TIERS {
            let outcome = translated(&directory, tier, &[], &command);
            assert_eq!(native.difference(&outcome), None, "{tier}: {script}");
        }
    }
}

/// With too little memory for the translator it prints an error line and never crashes. (No limit is here with which
/// only the guest's C library has too little, some 5 MiB more: its message is another.)
#[test]
fn limits_of_memory_are_named() {
    let directory = temporary("memory_limits");
    for limit in
        ["-d 2000", "-d 5000", "-d 10000", "-v 60000", "-v 120000", "-v 150000", "-v 200000"]
    {
        for tier in ["interp", "dynamo", "copy", "full"] {
            let dynasour = env!("CARGO_BIN_EXE_dynasour");
            let script =
                format!("ulimit {limit}; exec {dynasour} run --tier {tier} -- /bin/echo here");
            let outcome = Invocation::new("/bin/bash", &directory).args(["-c", &script]).run();
            let line = String::from_utf8_lossy(&outcome.stderr);
            match outcome.status {
                Status::Exited(0) => {
                    assert_eq!((&outcome.stdout[..], &*line), (&b"here\n"[..], ""), "{script}")
                }
                Status::Exited(126) => assert!(
                    line.starts_with("dynasour: ")
                        && line.lines().count() == 1
                        && outcome.stdout.is_empty(),
                    "{script}: {line}"
                ),
                _ => panic!("{script}: {}\n{}", outcome.status, outcome.excerpt()),
            }
        }
    }
}
