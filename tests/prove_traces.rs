//! `--prove-traces`: most traces of real programs are proven to do what was recorded, from every state, most machine
//! code to do what its trace does, and none is refuted. Needs a solver: `cargo test --release --features prove --test prove_traces`.
//!
//! With `-- --nocapture` it prints a table; with `DYNASOUR_PROVE_ALL=1` it takes all programs and the guests of the
//! matrix, which is the table of docs/proof.md and takes nine minutes.

#![cfg(feature = "prove")]

use dynasour_testkit::build;
use dynasour_testkit::list::GUESTS;
use dynasour_testkit::mode::{Launcher, Mode};
use dynasour_testkit::run::{Invocation, text};
use dynasour_testkit::scratch;
use dynasour_testkit::workloads::{PROGRAMS, installed, lines};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What was shown of the traces of one program, or of all.
#[derive(Clone, Copy, Default)]
struct Shown {
    /// Of the traces of one path and of the loops: all, and those that were proven.
    linear: [u64; 2],
    loops: [u64; 2],
    /// The same of the machine code.
    linear_code: [u64; 2],
    loop_code: [u64; 2],
    questions: u64,
    milliseconds: u64,
}

impl Shown {
    fn counts(&mut self) -> [&mut [u64; 2]; 4] {
        [&mut self.linear, &mut self.loops, &mut self.linear_code, &mut self.loop_code]
    }

    fn add(&mut self, other: &Shown) {
        let mut other = *other;
        for (sum, counts) in self.counts().into_iter().zip(other.counts()) {
            sum[0] += counts[0];
            sum[1] += counts[1];
        }
        self.questions += other.questions;
        self.milliseconds += other.milliseconds;
    }

    fn print(&self, name: &str) {
        let Shown { linear, loops, linear_code, loop_code, questions, milliseconds } = self;
        println!(
            "{name:<10}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}{questions:>11}{:>10}",
            linear[0],
            linear[1],
            linear_code[1],
            loops[0],
            loops[1],
            loop_code[1],
            milliseconds / (linear[0] + loops[0]).max(1)
        );
    }

    /// Measured: more than 95 % of linear traces and of their code, 90 % of loops, 85 % of their code. On a slow machine
    /// a few more run out of time.
    fn check(&self) {
        let Shown { linear, loops, linear_code, loop_code, .. } = self;
        let is_most = |[all, proven]: [u64; 2], percent: u64| 100 * proven > percent * all;
        assert!(is_most(*linear, 90), "{linear:?} of linear traces");
        assert!(is_most(*loops, 80), "{loops:?} of loops");
        assert!(is_most(*linear_code, 90), "{linear_code:?} of the code of linear traces");
        assert!(is_most(*loop_code, 65), "{loop_code:?} of the code of loops");
    }
}

fn print_head() {
    println!(
        "{:<10}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}{:>11}{:>10}",
        "program", "linear", "proven", "code", "loops", "proven", "code", "questions", "ms/trace"
    );
}

fn print_reasons(reasons: BTreeMap<String, u64>) {
    let mut reasons: Vec<(String, u64)> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    for (reason, count) in reasons.iter().take(12) {
        println!("{count:>5} {reason}");
    }
}

/// The programs whose traces are proven in little time.
const QUICK: [&str; 7] = ["perl", "lua5.4", "mawk", "gzip", "bzip2", "sha256sum", "sort"];

fn directory() -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("prove_traces");
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is a number"))
}

/// The kinds of reasons for which a trace was not proven: a reason without its numbers and names.
fn kind(why: &str) -> String {
    let why = why.split(": ").last().unwrap_or(why);
    let words = why.split_whitespace().filter(|word| word.chars().all(|c| c.is_ascii_lowercase()));
    words.take(8).collect::<Vec<_>>().join(" ")
}

/// A guest that sees what the options do: it measures how much memory the process takes, and each thread that proves
/// has a Z3 context of its own, which lives as long as the process.
const SEES_THE_OPTIONS: &str = "threads_many";

/// Programs with a thousand traces take minutes.
const LIMIT: Duration = Duration::from_secs(900);

/// What was shown of a run, by its statistics and its census; reasons are counted.
fn shown(directory: &Path, name: &str, reasons: &mut BTreeMap<String, u64>) -> Option<Shown> {
    let json = |name: &str| -> Option<Value> {
        let text = fs::read_to_string(directory.join(name)).ok()?;
        Some(serde_json::from_str(&text).expect("JSON"))
    };
    let stats = json("s.json")?;
    let (proofs, code) = (&stats["proofs"], &stats["code_proofs"]);
    assert_eq!(number(&proofs["refuted"]), 0, "{name}");
    let mut shown = Shown {
        questions: number(&proofs["questions"]) + number(&code["questions"]),
        milliseconds: (number(&proofs["nanoseconds"]) + number(&code["nanoseconds"])) / 1_000_000,
        ..Shown::default()
    };
    for fragment in json("census.json")?["fragments"].as_array().expect("a list") {
        let [version, code] = [&fragment["proofs"][0], &fragment["proofs"][1]];
        let Shown { linear, loops, linear_code, loop_code, .. } = &mut shown;
        let [of_version, of_code] = match fragment["kind"] == "loop" {
            true => [loops, loop_code],
            false => [linear, linear_code],
        };
        for (what, proof, kinds) in [("version", version, of_version), ("code", code, of_code)] {
            if proof.is_null() {
                continue;
            }
            kinds[0] += 1;
            kinds[1] += u64::from(proof["proven"] == true);
            if let Some(why) = proof["why"].as_str() {
                *reasons.entry(format!("{what}: {}", kind(why))).or_default() += 1;
                println!("    {name}, {what}: {why}");
            }
        }
    }
    Some(shown)
}

/// The same for the guests of the matrix, with `DYNASOUR_PROVE_ALL=1`.
#[test]
fn traces_of_guests_are_proven() {
    if std::env::var_os("DYNASOUR_PROVE_ALL").is_none() {
        return;
    }
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (mut all, mut reasons) = (Shown::default(), BTreeMap::new());
    for guest in GUESTS.iter().filter(|guest| guest.name != SEES_THE_OPTIONS) {
        let built = build::build(guest, tmp).unwrap_or_else(|e| panic!("{e}"));
        let invocation = built.invocation(guest);
        let native = invocation.run();
        let [stats, census] = ["s.json", "census.json"].map(|name| tmp.join(name));
        for file in [&stats, &census] {
            let _ = fs::remove_file(file);
        }
        let flags = format!(
            "--tier dynamo --threshold 1000 --prove-traces --stats-json {} --count {}",
            stats.display(),
            census.display()
        );
        let launcher = Launcher::from_environment(Path::new(env!("CARGO_BIN_EXE_dynasour")));
        let mut proving = launcher.wrap(&Mode::new("proven", &flags), &invocation);
        proving.limit = LIMIT;
        let outcome = proving.run();
        assert_eq!(native.difference(&outcome), None, "{}: {}", guest.name, text(&outcome.stderr));
        // A guest that is killed, or that ends without its last system call, leaves no statistics.
        if let Some(shown) = shown(tmp, guest.name, &mut reasons) {
            all.add(&shown);
        }
    }
    print_head();
    all.print("guests");
    print_reasons(reasons);
    all.check();
}

#[test]
fn traces_of_real_programs_are_proven() {
    let directory = directory();
    fs::write(directory.join("lines"), lines()).expect("a file");
    let (mut all, mut reasons) = (Shown::default(), BTreeMap::<String, u64>::new());
    print_head();
    let is_all = std::env::var_os("DYNASOUR_PROVE_ALL").is_some();
    for command in PROGRAMS.iter().filter(|command| is_all || QUICK.contains(&command[0])) {
        let Some(file) = installed(command[0]) else {
            assert!(std::env::var_os("DYNASOUR_REQUIRE_PROGRAMS").is_none(), "{}", command[0]);
            eprintln!("skipped: {} is not installed", command[0]);
            continue;
        };
        let file = file.to_str().expect("UTF-8");
        let native = Invocation::new(file, &directory).args(&command[1..]).run();
        let mut proving = Invocation::new(env!("CARGO_BIN_EXE_dynasour"), &directory)
            .args(["run", "--prove-traces", "--stats-json", "s.json", "--count", "census.json"])
            .args(["--tier", "dynamo", "--threshold", "1000", "--", file])
            .args(&command[1..]);
        proving.limit = LIMIT;
        let outcome = proving.run();
        assert_eq!(native.difference(&outcome), None, "{command:?}: {}", text(&outcome.stderr));
        let shown = shown(&directory, command[0], &mut reasons).expect("statistics");
        shown.print(command[0]);
        all.add(&shown);
    }
    all.print("all");
    print_reasons(reasons);
    assert!(all.linear[0] + all.loops[0] > 100, "there are traces");
    all.check();
}
