//! Runs of the program that is explained: one under `dynasour run` with the options that the user gave, whose
//! statistics list the heads; and one with counters (`--count`), which writes a census.
//!
//! The guest's standard output goes to our standard error, so that our report can be piped. Its
//! standard input is ours, in both runs ([`super::stdin`]).
//!
//! No data outside [`Plan`] and [`Counted`]; no lock. Statistics and census come in files of a temporary
//! directory.
//!
//! Example: `Plan { options: ["--tier", "full"], command: ["ls"], … }` runs
//! `dynasour run --tier full --stats-json FILE --timeline -- ls`.

use super::stdin::Input;
use anyhow::{Context, Result, bail, ensure};
use dynasour_runtime::observe::attempts::Attempt;
use dynasour_runtime::observe::census::{Census, SCHEMA};
use dynasour_runtime::observe::profile::timeline::Timeline;
use serde::Deserialize;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

/// Exit statuses with which `dynasour run` reports that no guest ran. A guest may end with the same
/// status, but then there is a census.
const NOT_RUN: [i32; 3] = [2, 126, 127];

/// A program to run.
pub struct Plan<'a> {
    /// Options of `run`, as the user gave them.
    pub options: Vec<OsString>,
    /// Options of `run` for counting, without `--count` itself.
    pub counting: Vec<OsString>,
    /// Whether the guest's output is discarded.
    pub discard: bool,
    /// Our standard input.
    pub input: Input,
    /// The program and its arguments.
    pub command: &'a [OsString],
}

/// The result of a counting run.
pub struct Counted {
    /// The counts.
    pub census: Census,
    /// How the guest ended.
    pub status: ExitStatus,
}

impl Plan<'_> {
    /// Runs the program with counters.
    ///
    /// # Errors
    /// The program could not be run, or ended without a census.
    pub fn counted(&self) -> Result<Counted> {
        let (bytes, status) = self.run(&self.counting, "--count", "--count-detail")?;
        let census: Census = serde_json::from_slice(&bytes).context("the census is damaged")?;
        ensure!(census.schema == SCHEMA, "the census has form {}, not {SCHEMA}", census.schema);
        Ok(Counted { census, status })
    }

    /// Runs the program as `run` does, and returns the heads at which traces were tried, the hottest
    /// first, and what the time was spent on.
    ///
    /// # Errors
    /// The program could not be run, or ended without statistics.
    pub fn uncounted(&self) -> Result<Uncounted> {
        let (bytes, _) = self.run(&self.options, "--stats-json", "--timeline")?;
        serde_json::from_slice(&bytes).context("the statistics are damaged")
    }

    /// Runs the program with the option that writes a report, and returns the report.
    fn run(&self, options: &[OsString], report: &str, more: &str) -> Result<(Vec<u8>, ExitStatus)> {
        let own = std::env::current_exe().context("cannot find this program")?;
        let directory = tempfile::tempdir().context("cannot make a temporary directory")?;
        let file = directory.path().join("report.json");
        let mut command = Command::new(own);
        command.arg("run").args(options).arg(report).arg(&file).arg(more);
        command.arg("--").args(self.command);
        if self.discard {
            command.stdout(Stdio::null()).stderr(Stdio::null());
        } else {
            command.stdout(Stdio::from(std::io::stderr()));
        }
        self.input.prepare(&mut command)?;
        let mut child = command.spawn().context("cannot run this program")?;
        self.input.feed(child.stdin.take());
        let status = child.wait().context("cannot run this program")?;
        let bytes = match std::fs::read(&file) {
            Ok(bytes) => bytes,
            // `dynasour run` has already printed the reason.
            Err(_) if status.code().is_some_and(|code| NOT_RUN.contains(&code)) => {
                bail!("{} was not run", self.command[0].display())
            }
            Err(error) => bail!(
                "{} wrote no report ({error}); it {}",
                self.command[0].display(),
                ended(status)
            ),
        };
        Ok((bytes, status))
    }
}

/// The result of a run without counters: the part of `--stats-json` that is used here.
#[derive(Deserialize)]
pub struct Uncounted {
    /// The heads at which traces were tried, the hottest first.
    pub heads: Vec<Attempt>,
    /// The time in each phase over the run.
    pub timeline: Option<Timeline>,
}

/// How a process ended, in words.
pub fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".to_string(),
    }
}
