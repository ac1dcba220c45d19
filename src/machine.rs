//! The options of `run` that `explain` and `guards` take, too: how guest code is executed
//! ([`MachineArgs`]), and how traces are made ([`TraceArgs`]).
//!
//! No data, no lock. Doc comments are the texts that `--help` shows.
//!
//! Example: `--tier full --race 40` becomes `["--tier", "full", "--race", "40"]` on the command line of the run
//! that `explain` starts.

use clap::Args;
use dynasour_runtime::config::{
    CompileThreads, EntryCheck, NATIVE_HEAD_THRESHOLD, Placement, RaceMode, Returns, Sampling,
    Tier, parse_pass, parse_trace_pass, placement,
};
use std::ffi::OsString;

/// Bytes of code cache unless the user gives another size; also in the option's attributes.
pub const DEFAULT_CACHE: usize = 64 << 20;

/// How guest code is executed.
#[derive(Args, Debug, Clone)]
pub struct MachineArgs {
    /// How guest code is executed: interp (interpreter), dynamo (interpreter first, then native
    /// copies of blocks and traces), copy (native copies of blocks), full (native copies and
    /// traces), direct (where it stands; hot traces are patched into it)
    #[arg(long, default_value_t = Tier::default(), value_name = "TIER")]
    pub tier: Tier,
    /// Executions of a trace head before it is compiled [default: 1000 in dynamo; in full and
    /// direct, 200 at samples]. With the default, only traces are kept that promise to be faster
    /// than copied blocks. With N, full counts all executions and does not sample; with N (in full:
    /// below 25000) all traces are kept, and dynamo copies no blocks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub threshold: Option<u32>,
    /// Size of the code cache in bytes; suffixes K and M
    #[arg(long, default_value = "64M", value_name = "SIZE", value_parser = parse_size)]
    pub cache_size: usize,
    /// How returns of copied blocks are executed: table (as indirect jumps), stack (by the
    /// processor's return stack), auto (stack in programs with many calls)
    #[arg(long, default_value_t = Returns::Auto, value_name = "WAY")]
    pub returns: Returns,
    /// Instruction by which the code at the target of an indirect jump or return compares the
    /// address: loop or pext [default: the faster one on this processor, pext if it is there and
    /// the processor is not AMD's]
    #[arg(long, value_name = "WAY")]
    pub entry_check: Option<EntryCheck>,
    /// With --tier full without --threshold or --chaos, or direct: when a thread is sampled, to find
    /// what is hot: hz=N (N times in a second
    /// of its processor time), timer=N (the same by signals of timers, as where perf_event_open is
    /// not allowed), every=N (each Nth time that it comes to the runtime, which does not depend on
    /// time), or real=N (N times in a second of real time, for tests)
    #[arg(long, default_value_t = Sampling::default(), value_name = "WHEN")]
    pub sample: Sampling,
    /// Short for --sample hz=N
    #[arg(long, value_name = "N", conflicts_with = "sample",
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub sample_hz: Option<u32>,
    /// With --tier full or direct: how a new trace races with the code that it replaces, before it is
    /// kept: measured (the faster of the two stays), N (the same, after N rounds), off (every trace
    /// stays), or for tests: trace, floor (the verdict is forced), swap (the race never ends)
    #[arg(long, default_value_t = RaceMode::default(), value_name = "MODE")]
    pub race: RaceMode,
    /// Who compiles traces: 0 (the thread that needs them), 1 (a helper thread, while the program goes
    /// on), or for tests: slow, wait (a slow one; one for which the program waits) [default: 1 where
    /// there are two processors; 0 with options by which the result must not depend on time]
    #[arg(long, value_name = "N")]
    pub compile_threads: Option<CompileThreads>,
    /// The most iterations of a loop, which go different ways, that one trace holds; 1: only the one that
    /// was recorded [default: 8; 1 with --tier dynamo, --chaos or a small --threshold]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub iterations: Option<u32>,
}

/// What traces assume, and which passes make them.
#[derive(Args, Debug, Clone)]
pub struct TraceArgs {
    /// What traces assume and where their guards stand: eager, anchored, hoisted, merged,
    /// control-only, default, combined
    #[arg(long, default_value = placement::DEFAULT.name(), value_name = "POLICY",
          value_parser = placement::placement)]
    pub policy: &'static dyn Placement,
    /// Run these optimiser passes, in this order, instead of the default pipeline (`dynasour ir opt
    /// --list` lists them)
    #[arg(long, value_name = "PASS,...", value_delimiter = ',', value_parser = parse_trace_pass)]
    pub passes: Option<Vec<String>>,
    /// Do not run these optimiser passes
    #[arg(long, value_name = "PASS,...", value_delimiter = ',', value_parser = parse_pass)]
    pub skip_pass: Vec<String>,
}

/// An option with its value.
fn option(name: &str, value: impl ToString) -> [OsString; 2] {
    [name.into(), value.to_string().into()]
}

impl MachineArgs {
    /// What `run` does without options.
    pub fn new() -> MachineArgs {
        MachineArgs {
            tier: Tier::default(),
            threshold: None,
            cache_size: DEFAULT_CACHE,
            returns: Returns::Auto,
            entry_check: None,
            sample: Sampling::default(),
            sample_hz: None,
            race: RaceMode::default(),
            compile_threads: None,
            iterations: None,
        }
    }

    /// The threshold of [`MachineArgs::counting`]. From its own one on, `full` would choose among traces.
    pub fn counting_threshold(&self) -> u32 {
        let highest = self.tier.head_threshold().min(NATIVE_HEAD_THRESHOLD - 1);
        self.threshold.unwrap_or(highest)
    }

    /// The same machine for runs that are compared by counts: all executions of heads count, and all traces are
    /// kept, so that nothing depends on time.
    pub fn counting(&self) -> MachineArgs {
        let mut machine = self.clone();
        machine.threshold = Some(self.counting_threshold());
        if self.tier != Tier::Direct {
            // Executions are counted, so nothing is sampled.
            (machine.sample, machine.sample_hz) = (Sampling::default(), None);
        }
        machine
    }

    /// When threads are sampled.
    pub fn sampling(&self) -> Sampling {
        self.sample_hz.map_or(self.sample, Sampling::Hz)
    }

    /// An option that the user has given and the tier does not have. `counts`: do all executions of heads count,
    /// so that nothing is sampled in `full`?
    pub fn option_without_meaning(&self, counts: bool) -> Option<&'static str> {
        let is_direct = self.tier == Tier::Direct;
        let is_sampled = is_direct || self.tier == Tier::Full && !counts;
        let has_traces = !matches!(self.tier, Tier::Interp | Tier::Copy);
        let given = [
            // `direct` copies no blocks.
            (is_direct && self.returns != Returns::Auto, "--returns"),
            (is_direct && self.entry_check.is_some(), "--entry-check"),
            (!is_sampled && self.sample != Sampling::default(), "--sample"),
            (!is_sampled && self.sample_hz.is_some(), "--sample-hz"),
            (!has_traces && self.compile_threads.is_some(), "--compile-threads"),
            (!has_traces && self.iterations.is_some(), "--iterations"),
            (
                !matches!(self.tier, Tier::Direct | Tier::Full) && self.race != RaceMode::default(),
                "--race",
            ),
        ];
        given.into_iter().find(|(is_given, _)| *is_given).map(|(_, option)| option)
    }

    /// These options as a command line of `run` has them.
    pub fn options(&self) -> Vec<OsString> {
        let mut out = Vec::from(option("--tier", self.tier));
        out.extend(self.threshold.iter().flat_map(|n| option("--threshold", n)));
        out.extend(option("--cache-size", self.cache_size));
        if self.returns != Returns::Auto {
            out.extend(option("--returns", self.returns));
        }
        out.extend(self.entry_check.iter().flat_map(|check| option("--entry-check", check)));
        if self.sampling() != Sampling::default() {
            out.extend(option("--sample", self.sampling()));
        }
        if self.race != RaceMode::default() {
            out.extend(option("--race", self.race));
        }
        out.extend(self.compile_threads.iter().flat_map(|n| option("--compile-threads", n)));
        out.extend(self.iterations.iter().flat_map(|n| option("--iterations", n)));
        out
    }
}

impl TraceArgs {
    /// What `run` does without options.
    pub fn new() -> TraceArgs {
        TraceArgs { policy: placement::DEFAULT, passes: None, skip_pass: Vec::new() }
    }

    /// These options as a command line of `run` has them.
    pub fn options(&self) -> Vec<OsString> {
        let mut out = Vec::from(option("--policy", self.policy.name()));
        out.extend(self.passes.iter().flat_map(|passes| option("--passes", passes.join(","))));
        if !self.skip_pass.is_empty() {
            out.extend(option("--skip-pass", self.skip_pass.join(",")));
        }
        out
    }
}

/// Parses a number of bytes, with a suffix K or M.
pub fn parse_size(text: &str) -> Result<usize, String> {
    /// Bytes of the smallest cache (guess; too few do not hold the stubs and a trace).
    const SMALLEST: usize = 16 << 10;
    /// Bytes of the largest cache, the emitter's `cache::MAX_SIZE`.
    const LARGEST: usize = 512 << 20;
    let (digits, unit) = match text.trim_end_matches(['K', 'k', 'M', 'm']) {
        digits if digits.len() == text.len() => (digits, 1),
        digits if text.ends_with(['K', 'k']) => (digits, 1 << 10),
        digits => (digits, 1 << 20),
    };
    digits
        .parse::<usize>()
        .ok()
        .and_then(|n| n.checked_mul(unit))
        .filter(|size| (SMALLEST..=LARGEST).contains(size))
        .ok_or_else(|| "expected a size from 16K to 512M".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("64K"), Ok(64 << 10));
        assert_eq!(parse_size("65536"), Ok(65536));
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        for bad in ["", "K", "1", "513M", "64KB", "-1", "99999999999999999999M"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
