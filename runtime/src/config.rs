//! The configuration of a run: what the user asked for on the command line, as plain values.
//!
//! Data: one [`RunConfig`] for the process. The command line makes it, and nothing changes it after
//! that. The options of a program that the guest executes are in it as text
//! ([`RunConfig::child_options`]), so that this program gets the same configuration.
//!
//! No lock: once the guest runs, the configuration is only read.
//!
//! Example: `--tier dynamo` alone interprets code until it is warm and then copies it
//! ([`RunConfig::interprets_first`]). `--tier dynamo --threshold 50` is a study: it interprets
//! whatever is not a trace, and records each head at its 50th execution.

use dynasour_ir::opt;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

pub use crate::kernel::process::limits::Limit;
pub use dynasour_emitter::{EntryCheck, Returns};
use dynasour_tracer::Bounded;
pub use dynasour_tracer::placement::{self, Placement};
pub use dynasour_tracer::{DefaultPolicy, HEAD_THRESHOLD, SpeculationPolicy};

/// Which executable forms of guest code are used (docs/design.md, "Tiers").
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Tier {
    /// Everything is interpreted.
    Interp,
    /// Code is interpreted; hot traces are recorded and run natively. This is the structure of
    /// Dynamo. Warm code that is not worth a trace runs as copied blocks, except in a study of
    /// traces ([`RunConfig::interprets_first`]).
    Dynamo,
    /// Blocks are copied at their first execution.
    Copy,
    /// Blocks are copied at their first execution; hot traces are recorded and linked with them.
    #[default]
    Full,
    /// Guest code runs in place, where it stands; hot traces are patched into it.
    Direct,
}

/// Executions of a head before it is recorded, in tiers that copy every block (guess). It is higher
/// than [`HEAD_THRESHOLD`], because a trace then replaces copied blocks and not the interpreter, so
/// each execution gains less. Too low a number compiles traces that do not pay for themselves; too
/// high a number delays those that do.
pub const NATIVE_HEAD_THRESHOLD: u32 = 25_000;

/// Executions of a head in guest code that was sampled before it is recorded (guess): at each
/// sample [`SAMPLED_EDGES`] edges are looked at, so the head of a short loop is recorded at the
/// second sample of it. Too low records what is not hot; too high delays traces of long loops.
pub const SAMPLED_HEAD_THRESHOLD: u32 = 200;

/// Edges between blocks that are executed by the interpreter at each sample (guess: some microseconds;
/// too few do not find the heads of long loops).
pub const SAMPLED_EDGES: u32 = 160;

/// How threads are sampled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sampling {
    /// This many times in a second of a thread's processor time: by events of the kernel's if it
    /// allows them, by timers otherwise.
    Hz(u32),
    /// The same by timers.
    Timer(u32),
    /// This many times in a second of real time, also while a thread sleeps in a system call. For
    /// tests: a call with a relative timeout begins anew at each sample.
    Real(u32),
    /// Each time that the guest has come to the runtime this many times, which does not depend on
    /// time.
    Every(u32),
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling::Hz(250)
    }
}

impl fmt::Display for Sampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sampling::Hz(hz) => write!(f, "hz={hz}"),
            Sampling::Timer(hz) => write!(f, "timer={hz}"),
            Sampling::Real(hz) => write!(f, "real={hz}"),
            Sampling::Every(n) => write!(f, "every={n}"),
        }
    }
}

impl FromStr for Sampling {
    type Err = String;

    fn from_str(s: &str) -> Result<Sampling, String> {
        const FORM: &str =
            "expected hz=N, timer=N or real=N (N from 1 to 10000), or every=N (N at least 1)";
        let (kind, n) = s.split_once('=').ok_or(FORM)?;
        match (kind, n.parse().map_err(|_| FORM)?) {
            ("hz", hz @ 1..=10_000) => Ok(Sampling::Hz(hz)),
            ("timer", hz @ 1..=10_000) => Ok(Sampling::Timer(hz)),
            ("real", hz @ 1..=10_000) => Ok(Sampling::Real(hz)),
            ("every", n @ 1..) => Ok(Sampling::Every(n)),
            _ => Err(FORM.to_string()),
        }
    }
}

/// The name of a value on the command line; empty if it has none.
fn name_of<T: PartialEq>(names: &[(T, &'static str)], value: &T) -> &'static str {
    names.iter().find(|(named, _)| named == value).map_or("", |(_, name)| name)
}

/// The value of this name.
fn named<T: Copy>(names: &[(T, &str)], name: &str) -> Option<T> {
    names.iter().find(|(_, known)| *known == name).map(|(value, _)| *value)
}

/// Who compiles recorded paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompileThreads {
    /// The thread that has recorded them.
    None,
    /// A helper thread, while guest code goes on.
    One,
    /// For tests: a helper thread that is slow.
    Slow,
    /// For tests: a helper thread, for which the guest waits.
    Wait,
}

impl CompileThreads {
    const NAMES: [(CompileThreads, &str); 4] = [
        (CompileThreads::None, "0"),
        (CompileThreads::One, "1"),
        (CompileThreads::Slow, "slow"),
        (CompileThreads::Wait, "wait"),
    ];
}

impl fmt::Display for CompileThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&CompileThreads::NAMES, self))
    }
}

impl FromStr for CompileThreads {
    type Err = String;

    fn from_str(s: &str) -> Result<CompileThreads, String> {
        named(&CompileThreads::NAMES, s)
            .ok_or_else(|| "expected 0 or 1, or for tests: slow or wait".to_string())
    }
}

/// How a new trace races with the code that it replaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RaceMode {
    /// Both run by turns, and the faster one stays.
    #[default]
    Measured,
    /// The same, after so many rounds and no sooner or later.
    Rounds(NonZeroU32),
    /// There are no races: every trace stays.
    Off,
    /// For tests: there is a race, and the trace wins.
    Trace,
    /// For tests: there is a race, and the trace loses.
    Floor,
    /// For tests: the race never ends. The sides change at each visit of the runtime.
    Swap,
}

impl RaceMode {
    const NAMES: [(RaceMode, &str); 5] = [
        (RaceMode::Measured, "measured"),
        (RaceMode::Off, "off"),
        (RaceMode::Trace, "trace"),
        (RaceMode::Floor, "floor"),
        (RaceMode::Swap, "swap"),
    ];
}

impl fmt::Display for RaceMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let RaceMode::Rounds(rounds) = self {
            return rounds.fmt(f);
        }
        f.write_str(name_of(&RaceMode::NAMES, self))
    }
}

impl FromStr for RaceMode {
    type Err = String;

    fn from_str(s: &str) -> Result<RaceMode, String> {
        named(&RaceMode::NAMES, s)
            .or_else(|| s.parse().ok().map(RaceMode::Rounds))
            .ok_or_else(|| "expected measured, a number, off, trace, floor or swap".to_string())
    }
}

impl RaceMode {
    /// Does the verdict depend on what was measured?
    pub fn measures(self) -> bool {
        matches!(self, RaceMode::Measured | RaceMode::Rounds(_))
    }

    /// The number of rounds, if it is fixed.
    pub fn rounds(self) -> Option<usize> {
        match self {
            RaceMode::Rounds(rounds) => Some(rounds.get() as usize),
            _ => None,
        }
    }
}

impl Tier {
    /// Executions of a trace head before it is recorded, if the user gives no threshold.
    pub fn head_threshold(self) -> u32 {
        match self {
            Tier::Interp | Tier::Dynamo => HEAD_THRESHOLD,
            Tier::Copy | Tier::Full => NATIVE_HEAD_THRESHOLD,
            Tier::Direct => SAMPLED_HEAD_THRESHOLD,
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Interp => "interp",
            Tier::Dynamo => "dynamo",
            Tier::Copy => "copy",
            Tier::Full => "full",
            Tier::Direct => "direct",
        })
    }
}

impl FromStr for Tier {
    type Err = String;

    fn from_str(s: &str) -> Result<Tier, String> {
        match s {
            "interp" => Ok(Tier::Interp),
            "dynamo" => Ok(Tier::Dynamo),
            "copy" => Ok(Tier::Copy),
            "full" => Ok(Tier::Full),
            "direct" => Ok(Tier::Direct),
            _ => Err("expected interp, dynamo, copy, full or direct".to_string()),
        }
    }
}

/// Deoptimisation at random (`--chaos`): each guard is made to fail with probability 1/n. Which
/// guards fail is drawn anew at each entry of a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chaos {
    /// The n of the probability 1/n; at least 1.
    pub one_in: u32,
    /// Seed of the generator, so that a run can be repeated.
    pub seed: u64,
}

impl fmt::Display for Chaos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1/{},{}", self.one_in, self.seed)
    }
}

impl FromStr for Chaos {
    type Err = String;

    fn from_str(s: &str) -> Result<Chaos, String> {
        const FORM: &str = "expected 1/N or 1/N,SEED with N at least 1";
        let n_and_seed = s.strip_prefix("1/").ok_or(FORM)?;
        let (n, seed) = match n_and_seed.split_once(',') {
            Some((n, seed)) => (n, seed.parse().map_err(|_| FORM)?),
            None => (n_and_seed, 1),
        };
        match n.parse() {
            Ok(one_in) if one_in > 0 => Ok(Chaos { one_in, seed }),
            _ => Err(FORM.to_string()),
        }
    }
}

/// A stage of the pipeline that `--log` can show.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Stage {
    /// Recordings: where they start, how they end, why they abort.
    Record,
    /// The IR of each trace as built.
    Trace,
    /// The IR of each trace after the optimiser.
    Opt,
    /// The native code of each fragment.
    Code,
    /// Entries into fragments, exits from them, and links.
    Exit,
    /// System calls.
    Syscall,
    /// Signals.
    Signal,
}

impl Stage {
    /// Every stage with its name on the command line.
    pub const ALL: [(Stage, &'static str); 7] = [
        (Stage::Record, "record"),
        (Stage::Trace, "trace"),
        (Stage::Opt, "opt"),
        (Stage::Code, "code"),
        (Stage::Exit, "exit"),
        (Stage::Syscall, "syscall"),
        (Stage::Signal, "signal"),
    ];
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&Stage::ALL, self))
    }
}

impl FromStr for Stage {
    type Err = String;

    fn from_str(s: &str) -> Result<Stage, String> {
        named(&Stage::ALL, s).ok_or_else(|| {
            let names: Vec<_> = Stage::ALL.iter().map(|(_, name)| *name).collect();
            format!("unknown stage; expected one of {}", names.join(", "))
        })
    }
}

/// Checks the name of an optimiser pass.
///
/// # Errors
/// No pass has this name. The message lists all names.
pub fn parse_pass(name: &str) -> Result<String, String> {
    match opt::pass(name) {
        Some(_) => Ok(name.to_string()),
        None => {
            let names: Vec<_> = opt::PASSES.iter().map(|pass| pass.name).collect();
            Err(format!("unknown pass; expected one of {}", names.join(", ")))
        }
    }
}

/// The options of a counting run (`--count`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Count {
    /// The file to which the [census](crate::observe::census) is written.
    pub file: PathBuf,
    /// Does the census contain the text of versions and their native code?
    pub detail: bool,
}

/// Checks the name of an optimiser pass that traces can go through.
///
/// # Errors
/// As [`parse_pass`]. Also if only the evaluator can run the versions that the pass makes.
pub fn parse_trace_pass(name: &str) -> Result<String, String> {
    match opt::pass(name) {
        Some(pass) if pass.evaluator_only => {
            Err(format!("{name} makes traces that only the evaluator runs: see `dynasour ir opt`"))
        }
        _ => parse_pass(name),
    }
}

/// Iterations of a loop that one trace holds by default (guess: each repeats what comes behind the place
/// where it parts from others).
const MOST_ITERATIONS: u32 = 8;

/// Makes the [`SpeculationPolicy`] of a thread from the default one, which has the threshold and the placement of the
/// run.
#[derive(Clone)]
pub struct Speculation(Arc<MakePolicy>);

type MakePolicy = dyn Fn(DefaultPolicy) -> Box<dyn SpeculationPolicy> + Send + Sync;

impl Speculation {
    /// That of `make`, which is called once in each thread.
    pub fn new(
        make: impl Fn(DefaultPolicy) -> Box<dyn SpeculationPolicy> + Send + Sync + 'static,
    ) -> Speculation {
        Speculation(Arc::new(make))
    }
}

impl fmt::Debug for Speculation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Speculation")
    }
}

/// A run of one guest program.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// Which executable forms of guest code are used.
    pub tier: Tier,
    /// Executions of a trace head before it is recorded, as the user gave them. `None` means the
    /// tier's default ([`Tier::head_threshold`]).
    pub threshold: Option<u32>,
    /// The size of the code cache in bytes.
    pub cache_size: usize,
    /// How copied blocks return.
    pub returns: Returns,
    /// How checked entries compare the target of an indirect jump with their own pc. `None` means
    /// the form that is fastest on this processor.
    pub entry_check: Option<EntryCheck>,
    /// Decides what traces assume and where their guards stand.
    pub placement: &'static dyn Placement,
    /// Makes the policy of each thread that says what is hot, if it is not the default one.
    pub speculation: Option<Speculation>,
    /// The passes that names mean.
    pub registry: Arc<opt::Registry>,
    /// Guards that are made to fail at random; `None` forces none.
    pub chaos: Option<Chaos>,
    /// How threads are sampled, if they are.
    pub sampling: Sampling,
    /// How traces race with what they replace.
    pub race: RaceMode,
    /// Who compiles recorded paths, if the user says so.
    pub compile_threads: Option<CompileThreads>,
    /// The most iterations of a loop that one trace holds, if the user says so.
    pub iterations: Option<u32>,
    /// Are traces made of guest code in place?
    pub traces_in_place: bool,
    /// Stages whose messages are written to stderr.
    pub log: BTreeSet<Stage>,
    /// The optimiser passes in the order to run them, instead of the default pipeline.
    pub passes: Option<Vec<String>>,
    /// Names of optimiser passes that are not run.
    pub skip_passes: Vec<String>,
    /// Is each trace compared with the recorded code before it is published
    /// ([`crate::dispatch::validation`])?
    pub verify_traces: bool,
    /// Is each trace to be proven right before it is published? Needs the feature `prove`.
    pub prove_traces: bool,
    /// Only the traces with these numbers are compiled, counted from 1 in the order in which they
    /// are recorded. For bisecting.
    pub only_traces: Option<std::ops::RangeInclusive<u32>>,
    /// Print statistics to stderr at the end.
    pub stats: bool,
    /// Write statistics as JSON to this file at the end.
    pub stats_json: Option<PathBuf>,
    /// Whether statistics include the time in each phase over the run.
    pub timeline: bool,
    /// Name the code in the cache for `perf`, in /tmp/perf-PID.map.
    pub perf_map: bool,
    /// If set, code is recorded for `perf inject --jit` when it is made, in the file `jit-PID.dump` of this
    /// directory.
    pub jitdump: Option<PathBuf>,
    /// Is GDB told of each trace when it is made?
    pub gdb: bool,
    /// If set, fragments count how often each part of them runs, and a census is written to a file
    /// at the end.
    pub count: Option<Count>,
    /// Does a program that the guest executes run under dynasour, too?
    pub follow: bool,
    /// The command that runs such a program; `None` means the executable of this process.
    pub translator: Option<PathBuf>,
    /// The guest's argv\[0\], if it differs from [`RunConfig::program`].
    pub argv0: Option<OsString>,
    /// A descriptor of the file that holds the seccomp filters that the guest inherits.
    pub seccomp: Option<i32>,
    /// The limit on the size of the address space (RLIMIT_AS) that the guest is shown, if it
    /// differs from the kernel's.
    pub address_space: Option<Limit>,
    /// The program, as the user named it.
    pub program: OsString,
    /// The program's arguments, without argv\[0\].
    pub args: Vec<OsString>,
    /// The options that give a child process the same configuration.
    pub child_options: Vec<OsString>,
    /// Further options for the next program if the process that the user started executes one. A
    /// child process does not get them: the report is about the first process, and the last program
    /// of that process writes it.
    pub own_options: Vec<OsString>,
}

impl RunConfig {
    /// A new thread's policy that says what is hot.
    pub fn policy(&self) -> Box<dyn SpeculationPolicy> {
        let default = DefaultPolicy { head_threshold: self.threshold(), placement: self.placement };
        match &self.speculation {
            Some(Speculation(make)) => Box::new(Bounded::new(make(default))),
            None => Box::new(default),
        }
    }

    /// Does code of the program that runs the guest change versions?
    pub fn has_own_code(&self) -> bool {
        let is_built_in = placement::PLACEMENTS.iter().any(|p| p.name() == self.placement.name());
        !is_built_in || !self.registry.own().is_empty()
    }

    /// Is a trace made only if it should be faster than the blocks that it replaces, and only
    /// within a budget of compile time? A user who asks for early traces gets all of them.
    pub fn weighs_traces(&self) -> bool {
        self.measures_paths() || self.interprets_first()
    }

    /// Do new traces race with what they replace? Those of a user who asks for particular traces or
    /// counts do not, unless the race is asked for, too.
    pub fn races(&self) -> bool {
        match self.race {
            RaceMode::Off => false,
            RaceMode::Measured | RaceMode::Rounds(_) => {
                self.measures_paths() && self.count.is_none()
            }
            RaceMode::Trace | RaceMode::Floor | RaceMode::Swap => {
                matches!(self.tier, Tier::Full | Tier::Direct)
                    && self.chaos.is_none()
                    && self.count.is_none()
            }
        }
    }

    /// Before a trace is made, is it measured how often the guest follows the recorded path?
    pub fn measures_paths(&self) -> bool {
        let is_default = match self.tier {
            Tier::Full => self.threshold.is_none_or(|t| t >= NATIVE_HEAD_THRESHOLD),
            Tier::Direct => self.threshold.is_none(),
            Tier::Interp | Tier::Dynamo | Tier::Copy => false,
        };
        is_default && self.chaos.is_none()
    }

    /// The most iterations of a loop that one trace holds. They are recorded while it is observed how often
    /// the guest keeps to the path. A counting run has one: its report is about single paths.
    pub fn iterations(&self) -> u32 {
        let several = self.measures_paths() && self.count.is_none();
        self.iterations.unwrap_or(if several { MOST_ITERATIONS } else { 1 })
    }

    /// Who compiles recorded paths? By default a helper thread, if there is another processor for it,
    /// unless the user asks for particular traces, counts or rounds, for which it must not depend on time
    /// when a trace is ready.
    pub fn compile_threads(&self) -> CompileThreads {
        let depends_on_time = self.measures_paths()
            && self.race == RaceMode::Measured
            && self.count.is_none()
            && self.only_traces.is_none()
            && !matches!(self.sampling, Sampling::Every(_));
        match self.compile_threads {
            Some(threads) => threads,
            None if depends_on_time && processors() > 1 => CompileThreads::One,
            None => CompileThreads::None,
        }
    }

    /// Is a tool told of native code when it is made?
    pub fn is_watched(&self) -> bool {
        self.jitdump.is_some() || self.gdb
    }

    /// Are blocks of guest code copied and run natively?
    pub fn copies_blocks(&self) -> bool {
        matches!(self.tier, Tier::Copy | Tier::Full | Tier::Direct) || self.interprets_first()
    }

    /// Is code interpreted until it is warm, and copied then? This is so in the tier `dynamo`,
    /// except for a study of traces: options that ask for particular traces or counts interpret all
    /// code that is not in a trace.
    pub fn interprets_first(&self) -> bool {
        let study = self.threshold.is_some()
            || self.chaos.is_some()
            || self.count.is_some()
            || self.only_traces.is_some();
        self.tier == Tier::Dynamo && !study
    }

    /// Executions of a trace head before it is recorded: the user's number or the tier's default.
    pub fn threshold(&self) -> u32 {
        let default = match self.samples() {
            true => SAMPLED_HEAD_THRESHOLD,
            false => self.tier.head_threshold(),
        };
        self.threshold.unwrap_or(default)
    }

    /// Are threads sampled, to find what is hot? If not, code in place gets no traces, and copied
    /// blocks count the executions of heads, as for a user who asks for particular traces or counts.
    pub fn samples(&self) -> bool {
        match self.tier {
            Tier::Direct => self.traces_in_place,
            Tier::Full => self.threshold.is_none() && self.chaos.is_none() && self.count.is_none(),
            Tier::Interp | Tier::Dynamo | Tier::Copy => false,
        }
    }
}

/// The processors on which this process may run.
fn processors() -> i32 {
    // SAFETY: an empty set, which the kernel fills. If it does not, one processor is counted.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
        libc::CPU_COUNT(&set).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chaos_is_parsed_strictly() {
        assert_eq!("1/7,9".parse(), Ok(Chaos { one_in: 7, seed: 9 }));
        assert_eq!("1/1".parse(), Ok(Chaos { one_in: 1, seed: 1 }));
        for bad in ["", "7", "1/0", "1/x", "2/3", "1/3,", "1/3,x", "1/-1"] {
            assert!(bad.parse::<Chaos>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sampling_is_parsed_strictly() {
        assert_eq!("every=7".parse(), Ok(Sampling::Every(7)));
        assert_eq!("hz=100".parse(), Ok(Sampling::Hz(100)));
        assert_eq!("real=100".parse(), Ok(Sampling::Real(100)));
        assert_eq!(Sampling::default().to_string().parse(), Ok(Sampling::default()));
        for bad in ["", "7", "every", "every=", "every=0", "every=-1", "hz=0", "hz=10001", "at=3"] {
            assert!(bad.parse::<Sampling>().is_err(), "{bad}");
        }
    }

    #[test]
    fn compile_threads_are_parsed_strictly() {
        for (threads, name) in CompileThreads::NAMES {
            assert_eq!(name.parse(), Ok(threads));
            assert_eq!(threads.to_string(), name);
        }
        for bad in ["", "2", "-1", "fast"] {
            assert!(bad.parse::<CompileThreads>().is_err(), "{bad}");
        }
    }

    #[test]
    fn pass_names_are_checked() {
        for pass in opt::PASSES {
            assert_eq!(parse_pass(pass.name).as_deref(), Ok(pass.name));
        }
        assert!(parse_pass("nothing").is_err_and(|message| message.contains(opt::PASSES[0].name)));
        assert!(parse_trace_pass("nothing").is_err() && parse_trace_pass("licm").is_ok());
        assert!(parse_trace_pass("monitor").is_err_and(|message| message.contains("evaluator")));
    }

    #[test]
    fn stage_names_round_trip() {
        for (stage, name) in Stage::ALL {
            assert_eq!(name.parse(), Ok(stage));
            assert_eq!(stage.to_string(), name);
        }
        assert!("nothing".parse::<Stage>().is_err());
    }
}
