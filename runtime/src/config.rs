//! What the user asked of a run.

use dynasour_ir::opt;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

pub use crate::kernel::process::limits::Limit;
pub use dynasour_emitter::{EntryCheck, Returns};
pub use dynasour_tracer::HEAD_THRESHOLD;
pub use dynasour_tracer::placement::{self, Placement};

/// Which executable forms of guest code are used (docs/design.md, "Tiers").
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Tier {
    /// Everything is interpreted.
    Interp,
    /// Interpret, record hot traces, run them natively: Dynamo's own structure. What is warm
    /// without being worth a trace runs as copied blocks, unless a study asks for traces only
    /// ([`RunConfig::interprets_first`]).
    Dynamo,
    /// Blocks are copied at their first execution.
    Copy,
    /// Blocks are copied, hot traces are recorded and run among them.
    #[default]
    Full,
}

/// As [`HEAD_THRESHOLD`] where what is not hot runs natively: compiling a trace then has to pay for
/// itself by how much faster it is than copied blocks. At this many executions a head is judged,
/// once as a rule, which takes as long as counting them has.
pub const NATIVE_HEAD_THRESHOLD: u32 = 25_000;

impl Tier {
    /// Executions of a trace head before it is compiled, if the user does not say.
    pub fn head_threshold(self) -> u32 {
        match self {
            Tier::Interp | Tier::Dynamo => HEAD_THRESHOLD,
            Tier::Copy | Tier::Full => NATIVE_HEAD_THRESHOLD,
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
            _ => Err("expected interp, dynamo, copy or full".to_string()),
        }
    }
}

/// Deoptimisation at random: each guard is made to fail with probability 1/n, drawn anew at each
/// entry of a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chaos {
    /// One in `n`.
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
        let rest = s.strip_prefix("1/").ok_or(FORM)?;
        let (n, seed) = match rest.split_once(',') {
            Some((n, seed)) => (n, seed.parse().map_err(|_| FORM)?),
            None => (rest, 1),
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
    /// Entering and leaving fragments, links.
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
        let name = Stage::ALL.iter().find(|(stage, _)| stage == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for Stage {
    type Err = String;

    fn from_str(s: &str) -> Result<Stage, String> {
        Stage::ALL.iter().find(|(_, name)| *name == s).map(|(stage, _)| *stage).ok_or_else(|| {
            let names: Vec<_> = Stage::ALL.iter().map(|(_, name)| *name).collect();
            format!("unknown stage; expected one of {}", names.join(", "))
        })
    }
}

/// Checks the name of an optimiser pass.
///
/// # Errors
/// There is none of this name: a message with all names.
pub fn parse_pass(name: &str) -> Result<String, String> {
    match opt::pass(name) {
        Some(_) => Ok(name.to_string()),
        None => {
            let names: Vec<_> = opt::PASSES.iter().map(|pass| pass.name).collect();
            Err(format!("unknown pass; expected one of {}", names.join(", ")))
        }
    }
}

/// A counting run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Count {
    /// Where the [census](crate::observe::census) goes.
    pub file: PathBuf,
    /// With the text of versions and native code?
    pub detail: bool,
}

/// Checks the name of an optimiser pass that traces can go through.
///
/// # Errors
/// As [`parse_pass`]; or the pass makes what only the evaluator runs.
pub fn parse_trace_pass(name: &str) -> Result<String, String> {
    match opt::pass(name) {
        Some(pass) if pass.evaluator_only => {
            Err(format!("{name} makes traces that only the evaluator runs: see `dynasour ir opt`"))
        }
        _ => parse_pass(name),
    }
}

/// A run of one guest program.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// Executable forms used.
    pub tier: Tier,
    /// Executions of a trace head before it is recorded, exactly; none for as many as the tier
    /// thinks right.
    pub threshold: Option<u32>,
    /// Bytes of the code cache.
    pub cache_size: usize,
    /// How copied blocks return.
    pub returns: Returns,
    /// How entries of generated code check that they are what was meant; none for what is fastest
    /// on this processor.
    pub entry_check: Option<EntryCheck>,
    /// What traces assume and where their guards stand.
    pub placement: &'static dyn Placement,
    /// Forced deoptimisation.
    pub chaos: Option<Chaos>,
    /// Stages written to stderr.
    pub log: BTreeSet<Stage>,
    /// The optimiser passes in the order to run them, instead of the default pipeline.
    pub passes: Option<Vec<String>>,
    /// Names of optimiser passes that are not run.
    pub skip_passes: Vec<String>,
    /// Optimise only the traces with these numbers; others stay interpreted. For bisecting.
    pub only_traces: Option<std::ops::RangeInclusive<u32>>,
    /// Print statistics to stderr at the end.
    pub stats: bool,
    /// Write statistics as JSON to this file at the end.
    pub stats_json: Option<PathBuf>,
    /// Name the code in the cache for `perf`, in /tmp/perf-PID.map.
    pub perf_map: bool,
    /// Fragments count how often what of them runs, and a census is written to a file at the end.
    pub count: Option<Count>,
    /// Translate programs that the guest executes, too.
    pub follow: bool,
    /// The guest's argv\[0\], if it is not the program as named.
    pub argv0: Option<OsString>,
    /// A descriptor of a file with the filters of system calls that the guest inherits.
    pub seccomp: Option<i32>,
    /// The size of the address space that the guest is allowed, if it is to believe otherwise than
    /// the kernel.
    pub address_space: Option<Limit>,
    /// Program, as given.
    pub program: OsString,
    /// Its arguments, without argv\[0\].
    pub args: Vec<OsString>,
    /// The options that give a child process the same configuration.
    pub child_options: Vec<OsString>,
    /// What the process that the user started keeps besides when it executes another program: the
    /// report is about that process, and its last program writes it.
    pub own_options: Vec<OsString>,
}

impl RunConfig {
    /// Are traces weighed against the blocks that they replace? Whoever asks for traces early wants
    /// them all.
    pub fn weighs_traces(&self) -> bool {
        self.watches_paths() || self.interprets_first()
    }

    /// Is it watched, before a trace is made, how well the guest keeps to its path?
    pub fn watches_paths(&self) -> bool {
        self.tier == Tier::Full && self.threshold() >= NATIVE_HEAD_THRESHOLD && self.chaos.is_none()
    }

    /// Does native code run that is not traces: copied blocks?
    pub fn copies_blocks(&self) -> bool {
        matches!(self.tier, Tier::Copy | Tier::Full) || self.interprets_first()
    }

    /// Is code interpreted until it is warm, and copied then? Not for a study, which wants to see
    /// traces, and the interpreter where there are none.
    pub fn interprets_first(&self) -> bool {
        let study = self.threshold.is_some()
            || self.chaos.is_some()
            || self.count.is_some()
            || self.only_traces.is_some();
        self.tier == Tier::Dynamo && !study
    }

    /// Executions of a trace head before it is recorded, if nothing else is known of the guest.
    pub fn threshold(&self) -> u32 {
        self.threshold.unwrap_or(self.tier.head_threshold())
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
