//! Measures workloads: natively and under each launcher, in rounds.
//!
//! Data: a [`Session`] has the launchers (tiers, then peers) and the start-up time of each. A round
//! runs a workload once natively and once under every launcher; the next round begins with another
//! of them, so that none always runs first, and what is slow for a while slows all.
//!
//! *Invariants.* The first run of a workload is native; its output and status are those that every
//! other run must show. Before a launcher is blamed for a difference, the program runs natively
//! once more: a program whose native runs differ (`VARIES`) cannot be compared. One thread runs
//! everything, so there is no lock; nothing else should load the machine meanwhile.
//!
//! ```text
//! native copy full | copy full native | full native copy     three rounds
//! ```

use crate::bench::BenchArgs;
use crate::bench::measure::{Invocation, Sample, difference};
use crate::bench::plan::{Peer, Workload};
use crate::bench::report::{Cell, FORMAT, Row};
use crate::bench::summary::median;
use anyhow::{Context, Result, bail};
use dynasour_runtime::config::Tier;
use indicatif::ProgressBar;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A program that does nothing; its time is start-up. It is linked dynamically, as most programs
/// are.
const NOTHING: &str = "/bin/true";

/// Runs of [`NOTHING`] under each launcher (guess: their median is good to a tenth, which is what
/// it is used for).
const START_UP_ROUNDS: u32 = 11;

/// One column of the table.
enum Launcher {
    Tier(Tier),
    Peer(Peer),
}

impl Launcher {
    fn name(&self) -> String {
        match self {
            Launcher::Tier(tier) => tier.to_string(),
            Launcher::Peer(peer) => peer.name.clone(),
        }
    }
}

/// The state of one bench run.
pub struct Session<'a> {
    args: &'a BenchArgs,
    /// Options of `run` for all tiers.
    options: Vec<String>,
    launchers: Vec<Launcher>,
    /// Median seconds of [`NOTHING`], natively and under each launcher.
    start_up: Vec<Option<f64>>,
    /// This program's file.
    own: PathBuf,
    host: String,
    processor: String,
    bar: &'a ProgressBar,
}

/// A workload that is being measured.
struct Current<'r> {
    row: &'r mut Row,
    directory: &'r Path,
    /// For each length of the work: the native command line, then those under the launchers.
    runs: Vec<Vec<Invocation>>,
    /// What the first native run of each length showed.
    expected: [Option<Sample>; 2],
    /// Steps that the progress bar has for this workload and that were not made.
    steps: u64,
}

impl<'a> Session<'a> {
    /// Checks that each tier works with the options for it, and measures start-up.
    ///
    /// # Errors
    /// A tier cannot run a program that does nothing.
    pub fn new(args: &'a BenchArgs, bar: &'a ProgressBar) -> Result<Session<'a>> {
        let options = args.run_options.as_deref().map(shell_words::split).transpose();
        let mut session = Session {
            args,
            options: options.context("--run-options")?.unwrap_or_default(),
            launchers: Vec::new(),
            start_up: Vec::new(),
            own: std::env::current_exe().context("cannot find this program")?,
            host: first_line("/proc/sys/kernel/hostname", ""),
            processor: first_line("/proc/cpuinfo", "model name"),
            bar,
        };
        for tier in &args.tiers {
            if session.launchers.iter().all(|known| known.name() != tier.to_string()) {
                session.launchers.push(Launcher::Tier(*tier));
            }
        }
        for peer in &args.peer {
            if peer.name == "native" || session.launchers.iter().any(|l| l.name() == peer.name) {
                bail!("--peer {}: there is another column of this name", peer.name);
            }
            session.launchers.push(Launcher::Peer(peer.clone()));
        }
        session.start_up = vec![None; session.launchers.len() + 1];
        Ok(session)
    }

    /// The command line of the guest under a launcher.
    fn launch(&self, launcher: &Launcher, guest: &Invocation) -> Invocation {
        let tier = match launcher {
            Launcher::Peer(peer) => return peer.launch(guest),
            Launcher::Tier(tier) => tier.to_string(),
        };
        let own = OsString::from(&self.own);
        let head = [own, "run".into(), "--tier".into(), tier.into()].into_iter();
        let options = self.options.iter().map(OsString::from).chain(["--".into()]);
        Invocation {
            argv: head.chain(options).chain(guest.argv.clone()).collect(),
            stdin: guest.stdin.clone(),
        }
    }

    /// All command lines of the guest: native, then under each launcher.
    fn runs(&self, guest: &Invocation) -> Vec<Invocation> {
        let launched = self.launchers.iter().map(|launcher| self.launch(launcher, guest));
        std::iter::once(guest.clone()).chain(launched).collect()
    }

    /// Checks each tier with the program that does nothing, and measures how long that takes.
    ///
    /// # Errors
    /// A tier, or the options for it, cannot run it.
    pub fn start_up(&mut self) -> Result<()> {
        if !Path::new(NOTHING).exists() {
            return Ok(());
        }
        self.bar.set_message("start-up");
        let runs = self.runs(&Invocation { argv: vec![NOTHING.into()], stdin: None });
        for (launcher, run) in self.launchers.iter().zip(&runs[1..]) {
            if matches!(launcher, Launcher::Tier(_)) {
                check(run)?;
            }
        }
        let mut times = vec![Vec::new(); runs.len()];
        let limit = Duration::from_secs(self.args.limit);
        for _ in 0..START_UP_ROUNDS {
            for (run, times) in runs.iter().zip(&mut times) {
                let sample = run.run(Path::new("."), limit)?;
                if sample.status.success() {
                    times.push(self.args.clock.of(&sample));
                }
            }
        }
        self.start_up = times.iter().map(|times| median(times)).collect();
        Ok(())
    }

    /// A row without measurements.
    fn row(&self, workload: &Workload, total: usize) -> Row {
        let cell = |launcher: String, start_up: &Option<f64>| Cell {
            launcher,
            start_up: *start_up,
            ..Cell::default()
        };
        let (native, others) = self.start_up.split_first().expect("native is always there");
        let launchers = self.launchers.iter().map(Launcher::name);
        Row {
            format: FORMAT.to_string(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            host: self.host.clone(),
            processor: self.processor.clone(),
            clock: self.args.clock,
            run_options: self.options.clone(),
            index: workload.index,
            total,
            suite: workload.suite.clone(),
            name: workload.name.clone(),
            class: workload.class.clone(),
            command: workload.native.as_ref().ok().map(Invocation::line),
            longer: workload.longer.as_ref().map(Invocation::line),
            skipped: None,
            too_short: None,
            native: cell("native".to_string(), native),
            cells: launchers.zip(others).map(|(name, start)| cell(name, start)).collect(),
        }
    }

    /// Runs of a workload that are expected, for the progress bar.
    pub fn steps(&self) -> u64 {
        let rounds = u64::from(self.args.warmup) + self.args.rounds.expected();
        let lengths = 1 + u64::from(self.args.longer.is_some());
        rounds * lengths * (self.launchers.len() as u64 + 1)
    }

    /// Measures one workload in all rounds.
    ///
    /// # Errors
    /// A command cannot be started.
    pub fn measure(&self, workload: &Workload, total: usize) -> Result<Row> {
        let mut row = self.row(workload, total);
        let native = match &workload.native {
            Ok(native) => native,
            Err(why) => {
                row.skipped = Some(why.clone());
                return Ok(row);
            }
        };
        self.bar.set_message(row.name.clone());
        let mut current = Current {
            row: &mut row,
            directory: &workload.directory,
            runs: [native].into_iter().chain(&workload.longer).map(|run| self.runs(run)).collect(),
            expected: [None, None],
            steps: self.steps(),
        };
        let mut goes_on = true;
        for _ in 0..self.args.warmup {
            goes_on = goes_on && self.round(&mut current, 0, false)?;
        }
        let mut rounds = self.args.rounds.begin();
        while goes_on && let Some(round) = rounds.next(|| current.row.uncertainty()) {
            goes_on = self.round(&mut current, round, true)?;
            let name = &current.row.name;
            self.bar.set_message(match current.row.uncertainty() {
                Some(share) => format!("{name} ± {:.1} %", share * 100.0),
                None => name.clone(),
            });
        }
        self.bar.inc(current.steps);
        row.finish();
        Ok(row)
    }

    /// One round; returns whether another would be of use. With `keep`, its times are kept. The runs of
    /// both lengths under one launcher follow each other.
    fn round(&self, current: &mut Current, round: usize, keep: bool) -> Result<bool> {
        let columns = self.launchers.len() + 1;
        for i in 0..columns {
            for length in 0..current.runs.len() {
                match (round + i) % columns {
                    0 => self.native(current, length, keep)?,
                    column => self.launched(current, (length, column), keep)?,
                }
                if current.row.native.trouble.is_some() {
                    return Ok(false);
                }
            }
        }
        Ok(current.row.cells.iter().any(|cell| cell.trouble.is_none()))
    }

    /// Runs the workload natively.
    fn native(&self, current: &mut Current, length: usize, keep: bool) -> Result<()> {
        let at = (length, 0);
        let sample = self.once(current, at)?;
        if sample.timed_out {
            current.row.native.trouble = Some(self.late());
        } else if let Some(expected) = &current.expected[length] {
            if let Some(how) = differs(&sample, expected) {
                current.row.native.trouble = Some("VARIES".to_string());
                self.complain(current, at, &format!("its native runs differ: {how}"));
                return Ok(());
            }
        } else if !sample.status.success() && !self.args.ignore_failure {
            current.row.native.trouble = Some(ended(&sample));
            self.complain(
                current,
                at,
                "native runs must succeed; --ignore-failure measures it nonetheless",
            );
            return Ok(());
        }
        if let Some(trouble) = current.row.native.trouble.clone() {
            self.complain(current, at, &trouble);
        }
        add(&mut current.row.native, &sample, length, keep);
        current.expected[length].get_or_insert(sample);
        Ok(())
    }

    /// Runs the workload under a launcher, unless an earlier run of it has failed.
    fn launched(&self, current: &mut Current, at: (usize, usize), keep: bool) -> Result<()> {
        let (length, column) = at;
        if current.row.cells[column - 1].trouble.is_some() {
            return Ok(());
        }
        let sample = self.once(current, at)?;
        let expected = current.expected[length].as_ref().context("a native run comes first")?;
        let trouble = if sample.timed_out {
            Some((self.late(), String::new()))
        } else {
            differs(&sample, expected).map(|how| match sample.status.signal() {
                Some(_) if sample.status != expected.status => (ended(&sample), how),
                _ => ("DIFFERS".to_string(), how),
            })
        };
        if let Some((trouble, how)) = trouble {
            // Only a program that repeats its output natively tells something of the launcher.
            self.native(current, length, false)?;
            if current.row.native.trouble.is_none() {
                self.complain(current, at, &format!("{trouble} {how}"));
                current.row.cells[column - 1].trouble = Some(trouble);
            }
            return Ok(());
        }
        add(&mut current.row.cells[column - 1], &sample, length, keep);
        Ok(())
    }

    /// Runs one command line of the workload.
    fn once(&self, current: &mut Current, (length, column): (usize, usize)) -> Result<Sample> {
        let limit = Duration::from_secs(self.args.limit);
        let sample = current.runs[length][column].run(current.directory, limit)?;
        if current.steps == 0 {
            self.bar.inc_length(1);
        }
        current.steps = current.steps.saturating_sub(1);
        self.bar.inc(1);
        Ok(sample)
    }

    fn late(&self) -> String {
        format!("over {} s", self.args.limit)
    }

    /// Tells what is wrong with a run, with the command line that shows it.
    fn complain(&self, current: &Current, (length, column): (usize, usize), what: &str) {
        let (name, line) = (&current.row.name, current.runs[length][column].line());
        self.bar.suspend(|| eprintln!("dynasour: {name}: {what}: {line}"));
    }
}

/// Adds a run of a length to the measurements.
fn add(cell: &mut Cell, sample: &Sample, length: usize, keep: bool) {
    cell.memory = cell.memory.max(sample.memory);
    let (wall, cpu) = match length {
        0 => (&mut cell.wall, &mut cell.cpu),
        _ => (&mut cell.longer_wall, &mut cell.longer_cpu),
    };
    if keep {
        wall.push(sample.wall);
        cpu.push(sample.cpu);
    }
}

/// How a run differs from what is expected; `None` if it does not.
fn differs(sample: &Sample, expected: &Sample) -> Option<String> {
    if sample.status != expected.status {
        return Some(format!("({}, not {})", sample.status, expected.status));
    }
    let byte = difference(&sample.stdout, &expected.stdout)?;
    Some(format!("(standard output, from byte {byte} on)"))
}

/// How a run ended, for a cell of the table.
fn ended(sample: &Sample) -> String {
    match sample.status.signal() {
        Some(signal) => format!("SIGNAL {signal}"),
        None => format!("status {}", sample.status.code().unwrap_or(-1)),
    }
}

/// Runs a command line that must succeed.
fn check(run: &Invocation) -> Result<()> {
    let output = Command::new(&run.argv[0])
        .args(&run.argv[1..])
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", run.argv[0].to_string_lossy()))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{} does not work here ({}):\n{}", run.line(), output.status, errors.trim_end());
    }
    Ok(())
}

/// The first line of a file that begins with `key`, without the key and a colon after it; empty if
/// there is none.
fn first_line(path: &str, key: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    line.trim_start_matches([' ', '\t', ':']).to_string()
}
