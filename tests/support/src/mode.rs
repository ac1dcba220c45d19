//! The modes in which a program is run under dynasour: a name and command-line flags each.
//!
//! The modes of [`Mode::all`] are described, in the same order, in `tests/README.md`; a test in
//! `tests/docs.rs` compares the two.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::run::Invocation;

/// One column of the matrix: a name and the flags of `dynasour run`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mode {
    /// Short name, as accepted by `DYNASOUR_MODES`.
    pub name: &'static str,
    /// Flags between `dynasour run` and `--`.
    pub flags: Vec<String>,
}

impl Mode {
    /// A mode with these flags, separated by spaces.
    pub fn new(name: &'static str, flags: &str) -> Mode {
        Mode { name, flags: flags.split_whitespace().map(str::to_owned).collect() }
    }

    /// The modes of the matrix that `DYNASOUR_MODES` selects (default all): each guest must behave
    /// natively in all of them.
    pub fn matrix() -> Vec<Mode> {
        selected(Mode::all())
    }

    /// All modes of the matrix, in the order of the table in `tests/README.md`.
    pub fn all() -> Vec<Mode> {
        let seed = seed();
        vec![
            Mode::new("interp", "--tier interp"),
            Mode::new("dynamo", "--tier dynamo --threshold 50"),
            Mode::new("dynamo-mixed", "--tier dynamo"),
            Mode::new("copy", "--tier copy"),
            Mode::new("tiny-copy", "--tier copy --entry-check pext --cache-size 65536"),
            Mode::new("direct", "--tier direct"),
            Mode::new("direct-timer", "--tier direct --sample timer=1000 --threshold 1"),
            Mode::new("direct-eager", "--tier direct --sample every=1 --threshold 1"),
            Mode::new("direct-swap", "--tier direct --sample every=7 --threshold 1 --race swap"),
            Mode::new(
                "direct-helper",
                "--tier direct --sample every=1 --threshold 1 --compile-threads 1",
            ),
            Mode::new(
                "direct-slow",
                "--tier direct --sample every=2 --threshold 1 --compile-threads slow",
            ),
            Mode::new("full-helper", "--tier full --threshold 1 --compile-threads 1"),
            Mode::new("full-swap", "--tier full --threshold 1 --race swap --compile-threads wait"),
            Mode::new(
                "direct-iterations",
                "--tier direct --sample every=2 --threshold 1 --iterations 8",
            ),
            Mode::new("full-iterations", "--tier full --threshold 3 --iterations 8"),
            Mode::new("full-verified", "--tier full --threshold 20 --iterations 8 --verify-traces"),
            Mode::new(
                "chaos-iterations",
                &format!("--tier dynamo --threshold 2 --chaos 1/3,{seed} --iterations 8"),
            ),
            Mode::new(
                "direct-chaos",
                &format!("--tier direct --sample every=1 --threshold 2 --chaos 1/3,{seed}"),
            ),
            Mode::new("stack", "--tier copy --returns stack"),
            Mode::new(
                "tiny-stack",
                "--tier copy --returns stack --entry-check loop --cache-size 131072",
            ),
            Mode::new("full", "--tier full --threshold 50"),
            Mode::new(
                "full-stack",
                "--tier full --threshold 50 --returns stack --entry-check pext",
            ),
            Mode::new("full-judging", "--tier full --threshold 25000"),
            Mode::new("full-samples", "--tier full --sample hz=10000"),
            Mode::new("full-chaos", &format!("--tier full --threshold 5 --chaos 1/3,{seed}")),
            Mode::new(
                "tiny-full",
                "--tier full --threshold 5 --entry-check loop --cache-size 131072",
            ),
            Mode::new("counted", "--tier full --threshold 20 --count /dev/null --count-detail"),
            Mode::new("threshold-1", "--tier dynamo --threshold 1"),
            Mode::new("chaos-all", "--tier dynamo --threshold 2 --chaos 1/1"),
            Mode::new("chaos-7", &format!("--tier dynamo --threshold 2 --chaos 1/7,{seed}")),
            Mode::new("tiny-cache", "--tier dynamo --threshold 1 --cache-size 65536"),
        ]
    }

    /// The tiers, for real programs. These execute so much code that a lower threshold would make traces
    /// for a minute and more (python3: 3000 traces at 50, 1100 at 300).
    pub fn tiers() -> Vec<Mode> {
        selected(vec![
            Mode::new("interp", "--tier interp"),
            Mode::new("dynamo", "--tier dynamo --threshold 300"),
            Mode::new("copy", "--tier copy"),
            Mode::new("direct", "--tier direct"),
            Mode::new("full", "--tier full --threshold 300"),
        ])
    }

    /// The tiers that run code natively from its first execution, for large programs. The flags are
    /// the defaults that users get. `dynamo` takes a minute for each program, so it is included
    /// only if `DYNASOUR_MODES` names it.
    pub fn native_tiers() -> Vec<Mode> {
        let mut modes = vec![
            Mode::new("copy", "--tier copy"),
            Mode::new("direct", "--tier direct"),
            Mode::new("full", "--tier full"),
        ];
        if std::env::var_os("DYNASOUR_MODES").is_some() {
            modes.push(Mode::new("dynamo", "--tier dynamo"));
        }
        selected(modes)
    }

    /// The tiers and random deoptimisation, for real programs that run quickly.
    pub fn tiers_and_chaos() -> Vec<Mode> {
        let mut modes = Mode::tiers();
        modes.extend(selected(vec![Mode::new(
            "chaos-100",
            &format!("--tier dynamo --threshold 50 --chaos 1/100,{}", seed()),
        )]));
        modes
    }
}

/// The seed of the chaos modes (`DYNASOUR_CHAOS_SEED`, else 1); it is part of each replay line.
fn seed() -> u64 {
    match std::env::var("DYNASOUR_CHAOS_SEED") {
        Ok(text) => text.parse().expect("DYNASOUR_CHAOS_SEED must be a number"),
        Err(_) => 1,
    }
}

fn selected(modes: Vec<Mode>) -> Vec<Mode> {
    match std::env::var("DYNASOUR_MODES") {
        Ok(names) => modes
            .into_iter()
            .filter(|mode| names.split(',').any(|name| name == mode.name))
            .collect(),
        Err(_) => modes,
    }
}

/// The words before the guest's own command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Launcher {
    /// The dynasour binary at this path, with the flags of the mode.
    Dynasour(PathBuf),
    /// Another command, used in place of `dynasour run FLAGS --`; `env` runs the program natively.
    Substitute(Vec<OsString>),
}

impl Launcher {
    /// `DYNASOUR_LAUNCHER` if set, else the given binary.
    pub fn from_environment(dynasour: &Path) -> Launcher {
        match std::env::var("DYNASOUR_LAUNCHER") {
            Ok(command) if !command.trim().is_empty() => {
                Launcher::Substitute(command.split_whitespace().map(OsString::from).collect())
            }
            _ => Launcher::Dynasour(dynasour.to_owned()),
        }
    }

    /// The invocation that runs `native` under this launcher in the given mode.
    pub fn wrap(&self, mode: &Mode, native: &Invocation) -> Invocation {
        let mut words: Vec<OsString> = match self {
            Launcher::Dynasour(binary) => {
                let mut words = vec![binary.clone().into_os_string(), "run".into()];
                words.extend(mode.flags.iter().map(OsString::from));
                words.push("--".into());
                words
            }
            Launcher::Substitute(command) => command.clone(),
        };
        words.push(native.program.clone().into_os_string());
        words.extend(native.args.iter().cloned());
        let program = PathBuf::from(words.remove(0));
        Invocation { program, args: words, ..native.clone() }
    }
}
