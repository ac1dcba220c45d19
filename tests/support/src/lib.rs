//! Support for the end-to-end tests: builds guest programs, runs them natively and under dynasour,
//! and reports exactly where two runs differ.
//!
//! Words: a **guest** is a small program of `tests/guests/`; a **mode** is one way to launch a
//! program (native, or dynasour with certain flags); an **outcome** is all that a run shows to the
//! outside: stdout, stderr, exit status or killing signal; a **scratch** directory is where a run
//! may leave files, which are then compared, too.
//!
//! Invariants:
//! * A run never outlives its timeout, nor do its descendants (they share one process group, which
//!   is killed).
//! * No run is repeated to make a test pass.
//! * Each reported difference comes with a command line that replays it.
//!
//! Environment variables for manual runs:
//! * `DYNASOUR_LAUNCHER=CMD` runs `CMD PROG ARGS` instead of `dynasour run FLAGS -- PROG ARGS`
//!   (`env` runs the program natively);
//! * `DYNASOUR_MODES=interp,dynamo` restricts the matrix to these modes;
//! * `DYNASOUR_CHAOS_SEED=N` changes the seed of the modes that force guards to fail;
//! * `DYNASOUR_TEST_TIMEOUT=SECONDS` changes the time limit of one run (default 120).

pub mod build;
pub mod code;
pub mod hangs;
pub mod list;
pub mod mode;
pub mod program;
pub mod run;
pub mod scratch;
pub mod selection;
pub mod workloads;

use std::path::{Path, PathBuf};

use build::Guest;
use mode::{Launcher, Mode};
use run::{Invocation, Outcome};

/// The surroundings of a test: the translator under test and a directory for its files.
#[derive(Debug, Clone)]
pub struct Lab {
    /// How programs are started under dynasour.
    pub launcher: Launcher,
    /// Directory for built guests and scratch directories, kept between test runs (`target/tmp`).
    pub tmp: PathBuf,
}

impl Lab {
    /// The laboratory of an integration test: pass `env!("CARGO_BIN_EXE_dynasour")` and
    /// `env!("CARGO_TARGET_TMPDIR")`.
    pub fn new(dynasour: &str, tmp: &str) -> Lab {
        run::disable_core_dumps();
        Lab { launcher: Launcher::from_environment(Path::new(dynasour)), tmp: PathBuf::from(tmp) }
    }

    /// Runs `guest` natively and in each of `modes`, from the same directory with the same
    /// environment.
    ///
    /// # Errors
    /// A report for people: the guest does not build, or its native status is not the declared one,
    /// or some modes differ.
    pub fn compare_guest(&self, guest: &Guest, modes: &[Mode]) -> Result<(), String> {
        let built = build::build(guest, &self.tmp)?;
        let invocation = built.invocation(guest);
        let native = run_native(&invocation);
        if native.status != guest.expect {
            return Err(format!(
                "guest `{}` is declared to end with {}, natively it ended with {}\n{}\n  replay: \
                    {invocation}",
                guest.name,
                guest.expect,
                native.status,
                native.excerpt()
            ));
        }
        let time = |mode: &str, outcome: &Outcome| {
            println!(
                "{:<24} {mode:<18} {:>9.1} ms",
                guest.name,
                outcome.elapsed.as_secs_f64() * 1e3
            );
        };
        time("native", &native);
        let mut failures = Vec::new();
        for mode in modes {
            let translated = self.launcher.wrap(mode, &invocation);
            let outcome = translated.run();
            time(mode.name, &outcome);
            if let Some(difference) = native.difference(&outcome) {
                failures.push(format!(
                    "guest `{}` under `{}` differs from native: {difference}\n  replay: \
                        {translated}",
                    guest.name, mode.name
                ));
            }
        }
        if failures.is_empty() { Ok(()) } else { Err(failures.join("\n\n")) }
    }
}

/// Runs the invocation as it is, without a launcher.
pub fn run_native(invocation: &Invocation) -> Outcome {
    invocation.run()
}
