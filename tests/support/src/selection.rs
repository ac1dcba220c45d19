//! Selections of optimiser passes that programs run under: no pass, each pass alone, the pipeline
//! without each, all passes, and random sequences.
//!
//! `DYNASOUR_PASS_SETS=N` chooses the number of random sequences (default 6),
//! `DYNASOUR_PASS_SEED=N` their seed (default 1).

use dynasour_ir::opt::{PASSES, PIPELINE};
use dynasour_ir::random::Rng;

use crate::mode::Mode;

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable} must be a number")),
        Err(_) => default,
    }
}

/// The names of the passes that can run on traces.
fn passes() -> Vec<&'static str> {
    PASSES.iter().filter(|pass| !pass.evaluator_only).map(|pass| pass.name).collect()
}

/// Which traces go through the selections: those of one tier, compiled at one threshold.
#[derive(Debug, Clone, Copy)]
pub struct Traces {
    /// `dynamo` or `full`.
    pub tier: &'static str,
    /// Executions of a trace head before it is compiled.
    pub threshold: u32,
}

/// The mode in which these traces go through this selection.
fn mode(name: &'static str, traces: Traces, option: &str, passes: &[&str]) -> Mode {
    let flags = [
        "--tier",
        traces.tier,
        "--threshold",
        &traces.threshold.to_string(),
        option,
        &passes.join(","),
    ];
    Mode { name, flags: flags.into_iter().map(str::to_owned).collect() }
}

/// The passes that `run` uses, each once.
pub fn pipeline() -> Vec<&'static str> {
    let mut pipeline = PIPELINE.to_vec();
    pipeline.sort_unstable();
    pipeline.dedup();
    pipeline
}

/// No pass, each pass alone, the pipeline without each of its passes, and all passes.
pub fn fixed(traces: Traces) -> Vec<Mode> {
    let pipeline = pipeline();
    let mut modes = vec![mode("none", traces, "--skip-pass", &pipeline)];
    modes.extend(passes().iter().map(|pass| mode("alone", traces, "--passes", &[pass])));
    modes.extend(pipeline.iter().map(|pass| mode("without", traces, "--skip-pass", &[pass])));
    // The passes outside the pipeline run before and after the one that defers stores: some of them
    // change nothing while stores are deferred.
    let rest: Vec<&str> = passes().into_iter().filter(|pass| !PIPELINE.contains(pass)).collect();
    let defers = PIPELINE.iter().position(|pass| *pass == "sink").expect("a pass of the pipeline");
    let (before, after) = PIPELINE.split_at(defers);
    let all = [before, &rest, after, &rest, &["simplify", "params", "dce"]].concat();
    modes.push(mode("all", traces, "--passes", &all));
    modes
}

/// Random sequences of passes, different for each name.
pub fn random(name: &str, traces: Traces) -> Vec<Mode> {
    let salt =
        name.bytes().fold(0u64, |salt, byte| salt.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let mut rng = Rng::new(number("DYNASOUR_PASS_SEED", 1) ^ salt);
    let all = passes();
    let mut sequence = || -> Vec<&str> { (0..1 + rng.below(10)).map(|_| rng.pick(&all)).collect() };
    (0..number("DYNASOUR_PASS_SETS", 6))
        .map(|_| mode("random", traces, "--passes", &sequence()))
        .collect()
}
