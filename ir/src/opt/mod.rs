//! The optimiser: passes over trace versions, one pass in each file, and the pipeline that recorded
//! traces go through.
//!
//! Every pass is a function from a version to a changed version that is *equivalent* (same memory,
//! same state at every exit) and *transparent* (taking any anchor at any time is right):
//! sourir-popl18, 5.4. In debug builds the verifier runs before and after each. A pass works on a
//! version that its caller owns, takes no lock, and keeps no data between runs, so passes may run
//! on any thread. A pass leaves `base` versions alone.
//!
//! | file | pass | effect |
//! | --- | --- | --- |
//! | `split` | `split` | lets loads and stores access memory for scalar SSE instructions |
//! | `simplify` | `simplify` | rewrite rules, value numbering, facts from guards |
//! | `params` | `params` | removes invariant and duplicate parameters of loops |
//! | `dce` | `dce` | removes dead code, dead parameters, unused anchors |
//! | `alias_guards` | `alias` | adds guards that stores through pointers miss the loop's slots |
//! | `forward` | `forward` | replaces loads by known content of memory, around loops too |
//! | `sink` | `sink` | moves dead stores into the varmaps of the exits |
//! | `flagparams` | `flagparams` | loop-carried flags become loop-carried operands |
//! | `loop_chain` | `chain` | regroups the chain of operations that limits a loop |
//! | `peel` | `peel` | puts a copy of one iteration before the loop |
//! | `constants` | `constants` | speculative constant propagation over any control flow |
//! | `read_only` | `readonly` | loads from read-only memory become constants |
//! | `unreachable` | `unreachable` | removes branches on constants and unreachable blocks |
//! | `redundant` | `redundant` | removes assumes whose predicate is known to hold |
//! | `hoist` | `hoist` | moves predicates that do not vary out of loops |
//! | `licm` | `licm` | moves operations and loads that do not vary out of loops |
//! | `merge` | `merge` | two guards of one value become one that implies both |
//! | `delay` | `delay` | moves guards down to the paths that need them |
//! | `conjoin` | `conjoin` | adjacent guards on one anchor become one |
//! | `frames` | `frames` | defers stores to the anchors after them: frames of inlined calls |
//! | `slot_promotion` | `slots` | promotes stack slots to SSA values over any control flow |
//! | `monitor` | `monitor` | guards on memory become facts that writes invalidate |
//! | `speculation` | | specialises under a list of assumptions, undoes one of them |
//! | `inject` | | adds assumptions at any point that an anchor reaches |
//! | `continuation` | | a version that begins at an anchor in the middle of another |
//! | `inline` | | puts another region's version in place of the exit to it |
//! | `contexts` | | what a version needs at its entry, and what is known at its exits |
//! | `golden` | | runs what a golden file says |
//! | `registry` | | passes of a program's own |
//!
//! `rules`, `conditions`, `address` and `bounds` belong to `simplify`, `alias_plan` to `alias`; `facts` and `known` to
//! `constants`, `redundant` and `contexts`; `loops` to `hoist` and `licm`; `closed_form` to `continuation`.
//!
//! The first ten, `readonly` and `merge` make up the pipeline of recorded traces ([`PIPELINE`]), which have
//! one of the shapes of `shape`; `tree` is the one with branches. `peel` and `chain` leave trees alone. The
//! other passes work on any control flow; other placements of guards use some of them
//! (`dynasour_tracer::placement`).
//!
//! The choice of the pipeline was measured on 2,251 traces of python3, which had 22,205 guards
//! after the first eight passes (131 µs for each trace):
//! * `merge` removes 1,278 of the guards and costs 5 µs for each trace.
//! * `constants` costs 73 µs and finds 4,788 constant operands, nine in ten of them in varmaps,
//!   where they save nothing on the hot path. It removes 0.2 % of the instructions and 104 guards.
//! * `redundant`, `hoist`, `licm` and `slots` find next to nothing, because peeling and value
//!   numbering have done their work.
//!
//! ```text
//! let stats = optimise(&mut trace, &OptOptions::default());  stats.passes: simplify, params, …
//! ```

mod address;
mod alias_guards;
mod alias_plan;
mod bounds;
mod closed_form;
mod conditions;
mod conjoin;
mod constants;
pub mod contexts;
mod continuation;
mod dce;
mod delay;
mod facts;
mod flagparams;
mod forward;
mod frames;
pub mod golden;
mod hoist;
mod inject;
mod inline;
mod known;
mod licm;
mod loop_chain;
mod loops;
mod merge;
mod monitor;
#[cfg(test)]
mod mutations;
#[cfg(test)]
mod mutations_random;
mod params;
mod peel;
mod read_only;
mod redundant;
mod registry;
mod rules;
mod shape;
mod simplify;
mod sink;
mod slot_promotion;
mod speculation;
mod split;
mod tree;
mod unreachable;

pub use continuation::{ContinuationError, continuation};
pub use inject::{anchor_for, inject};
pub use inline::{InlineError, inline};
pub use registry::{BrokenPass, OwnPass, Position, Registry, RegistryError, guarded, is_guarded};
pub use shape::{Shape, normalise};
pub use speculation::{Assumption, resume, specialise};

use crate::predict::{NativeResults, Surroundings};
use crate::version::Version;
use registry::Known;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Called with the pass's name and the version after it.
pub type PassHook<'a> = &'a dyn Fn(&str, &Version);

/// The options of a run of passes.
#[derive(Clone)]
pub struct OptOptions<'a> {
    /// The passes in the order to run them (`--passes`); `None`: [`PIPELINE`].
    pub passes: Option<Vec<String>>,
    /// Names of passes to leave out (`--skip-pass`).
    pub skip: Vec<String>,
    /// Called after each pass that ran.
    pub after_pass: Option<PassHook<'a>>,
    /// Loops with more instructions than this are not peeled.
    pub peel_limit: usize,
    /// Instructions that a processor is supposed to execute in a cycle beside a chain around a loop
    /// (guess: half of what current cores reach; see the pass `chain`; too high regroups fewer
    /// chains, too low costs registers).
    pub chain_width: usize,
    /// May the pipeline add guards against aliasing?
    pub alias_guards: bool,
    /// The state in which the version will probably be entered: guards that would fail in it are
    /// not added.
    pub entry: Option<Surroundings<'a>>,
    /// What natives have computed in the path.
    pub native_results: NativeResults,
    /// Reads so many bytes at an address, if the guest can only read them. Who runs the version then
    /// watches them.
    pub constant_memory: Option<&'a dyn Fn(u64, u32) -> Option<u64>>,
    /// May `delay` move guards down past instructions that may fault on the guard's anchor? Then an
    /// access that the guard was to prevent may fault. That is right, because the fault takes the
    /// same anchor, but dearer than a guard that fails.
    pub delay_past_faults: bool,
    /// The passes that names mean; `None`: those of [`PASSES`] only.
    pub registry: Option<&'a Registry>,
}

impl Default for OptOptions<'_> {
    fn default() -> Self {
        OptOptions {
            passes: None,
            skip: Vec::new(),
            after_pass: None,
            peel_limit: 1500,
            chain_width: 4,
            alias_guards: true,
            entry: None,
            native_results: NativeResults::default(),
            constant_memory: None,
            delay_past_faults: true,
            registry: None,
        }
    }
}

/// A pass: its name, what it is for, and how to run it.
pub struct Pass {
    /// The name `--skip-pass` and `dynasour ir opt --passes` use.
    pub name: &'static str,
    /// One line of description for `dynasour ir opt --list`.
    pub about: &'static str,
    /// The pipeline repeats the pass only if one of these passes has changed something since.
    again_after: &'static [&'static str],
    /// Does it use facts that hold only because control came from the version's entry? See
    /// [`Version::optimised`].
    from_entry: bool,
    /// Is it for the evaluator only, because `dynasour run` cannot do what its result requires?
    pub evaluator_only: bool,
    run: fn(&mut Version, &OptOptions) -> usize,
}

impl Pass {
    /// Runs the pass; returns how many changes it made.
    pub fn run(&self, version: &mut Version, options: &OptOptions) -> usize {
        let changes = (self.run)(version, options);
        version.optimised |= self.from_entry && changes > 0;
        changes
    }
}

/// Every pass.
pub const PASSES: &[Pass] = &[
    Pass {
        name: "simplify",
        about: "rewrite rules, value numbering, facts from guards",
        again_after: &["peel", "alias", "forward", "params", "licm", "hoist", "merge", "readonly"],
        from_entry: true,
        evaluator_only: false,
        run: simplify::run,
    },
    Pass {
        name: "params",
        about: "invariant and duplicate parameters of loops",
        again_after: &["simplify", "peel", "forward", "flagparams", "sink", "licm"],
        from_entry: false,
        evaluator_only: false,
        run: params::run,
    },
    Pass {
        name: "dce",
        about: "dead code, dead flags, dead parameters, unused anchors",
        again_after: &[
            "simplify",
            "params",
            "peel",
            "readonly",
            "alias",
            "forward",
            "flagparams",
            "sink",
            "licm",
            "hoist",
            "merge",
            "redundant",
            "conjoin",
        ],
        from_entry: false,
        evaluator_only: false,
        run: dce::run,
    },
    Pass {
        name: "alias",
        about: "guards that stores through pointers miss the loop's slots",
        again_after: &["simplify", "peel", "forward"],
        from_entry: false,
        evaluator_only: false,
        run: alias_guards::run,
    },
    Pass {
        name: "forward",
        about: "loads replaced by what memory is known to hold",
        again_after: &["simplify", "peel", "alias"],
        from_entry: true,
        evaluator_only: false,
        run: forward::run,
    },
    Pass {
        name: "flagparams",
        about: "loop-carried flags become loop-carried operands",
        again_after: &[],
        from_entry: false,
        evaluator_only: false,
        run: flagparams::run,
    },
    Pass {
        name: "sink",
        about: "dead stores move into the varmaps of the exits",
        again_after: &["forward"],
        from_entry: false,
        evaluator_only: false,
        run: sink::run,
    },
    Pass {
        name: "chain",
        about: "what comes last around a loop enters last",
        again_after: &[],
        from_entry: true,
        evaluator_only: false,
        run: loop_chain::run,
    },
    Pass {
        name: "peel",
        about: "one iteration of a loop before the loop",
        again_after: &["peel"],
        from_entry: false,
        evaluator_only: false,
        run: peel::run,
    },
    Pass {
        name: "constants",
        about: "speculative constant propagation over any control flow",
        again_after: &[],
        from_entry: true,
        evaluator_only: false,
        run: constants::run,
    },
    Pass {
        name: "unreachable",
        about: "branches on constants, failed guards, unreachable blocks",
        again_after: &[],
        from_entry: false,
        evaluator_only: false,
        run: unreachable::run,
    },
    Pass {
        name: "redundant",
        about: "assumes whose predicate is known to hold",
        again_after: &[],
        from_entry: true,
        evaluator_only: false,
        run: redundant::run,
    },
    Pass {
        name: "hoist",
        about: "predicates that do not vary move out of loops",
        again_after: &[],
        from_entry: true,
        evaluator_only: false,
        run: hoist::run,
    },
    Pass {
        name: "licm",
        about: "what does not vary moves out of loops",
        again_after: &[],
        from_entry: true,
        evaluator_only: false,
        run: licm::run,
    },
    Pass {
        name: "merge",
        about: "two guards of one value become one",
        again_after: &[],
        from_entry: true,
        evaluator_only: false,
        run: merge::run,
    },
    Pass {
        name: "delay",
        about: "guards move down to the ways that need them",
        again_after: &[],
        from_entry: false,
        evaluator_only: false,
        run: delay::run,
    },
    Pass {
        name: "conjoin",
        about: "guards in a row on one anchor become one",
        again_after: &[],
        from_entry: false,
        evaluator_only: false,
        run: conjoin::run,
    },
    Pass {
        name: "frames",
        about: "stores wait in the anchors behind them",
        again_after: &[],
        from_entry: false,
        evaluator_only: false,
        run: frames::run,
    },
    Pass {
        name: "slots",
        about: "what stack slots hold becomes SSA values",
        again_after: &[],
        from_entry: true,
        evaluator_only: false,
        run: slot_promotion::run,
    },
    Pass {
        name: "split",
        about: "loads and stores access memory for scalar SSE instructions",
        again_after: &[],
        from_entry: false,
        evaluator_only: false,
        run: split::run,
    },
    Pass {
        name: "readonly",
        about: "loads from read-only memory become constants",
        again_after: &["simplify", "forward", "params"],
        from_entry: false,
        evaluator_only: false,
        run: read_only::run,
    },
    Pass {
        name: "monitor",
        about: "guards on memory become facts that writes break",
        again_after: &[],
        from_entry: false,
        evaluator_only: true,
        run: monitor::run,
    },
];

/// The passes that recorded traces go through, in order.
pub const PIPELINE: &[&str] = &[
    // First, so that the others see all accesses.
    "split",
    // The facts within one iteration.
    "simplify",
    "readonly",
    "params",
    "forward",
    "simplify",
    "readonly",
    "dce",
    "peel",
    "params",
    "simplify",
    "params",
    "dce",
    // Memory, twice: forwarding turns loaded pointers into known values, which makes more addresses
    // comparable.
    "alias",
    "simplify",
    "forward",
    "params",
    "simplify",
    "readonly",
    "params",
    "dce",
    "alias",
    "forward",
    "params",
    "simplify",
    "params",
    "dce",
    // Two guards of one value: after all rules that may merge them otherwise, and before anchors
    // defer stores.
    "merge",
    // Last, because the loop's head must not be simplified again: see `flagparams`.
    "sink",
    "flagparams",
    "params",
    "dce",
    "chain",
];

/// The pass with this name.
pub fn pass(name: &str) -> Option<&'static Pass> {
    PASSES.iter().find(|p| p.name == name)
}

/// What one run of one pass did.
#[derive(Clone, Debug)]
pub struct PassStat {
    /// Its name.
    pub name: &'static str,
    /// Changes it made, by its own count.
    pub changes: usize,
    /// Instructions of the version afterwards.
    pub insts: usize,
    /// Time it took, without verification and hook.
    pub time: Duration,
}

/// What the pipeline did.
#[derive(Clone, Debug, Default)]
pub struct OptStats {
    /// Instructions before the first pass.
    pub insts_before: usize,
    /// Each pass that ran, in order.
    pub passes: Vec<PassStat>,
    /// The own pass that has broken the version, which must not be used then. No pass ran behind it.
    pub broken: Option<BrokenPass>,
}

impl OptStats {
    /// Time of all passes together.
    pub fn time(&self) -> Duration {
        self.passes.iter().map(|p| p.time).sum()
    }
}

/// Runs the default pipeline on a trace, unless the options name other passes.
pub fn optimise(version: &mut Version, options: &OptOptions) -> OptStats {
    run_pipeline(version, PIPELINE, options)
}

/// Runs the passes of a pipeline in order, unless the options name other passes, and the own passes of the registry
/// that belong there. Names of no pass are ignored, and a `base` version is not changed.
///
/// A built-in pass that appears again in the pipeline runs only if a pass that can give it work has changed
/// something since.
pub fn run_pipeline(version: &mut Version, pipeline: &[&str], options: &OptOptions) -> OptStats {
    let mut run = Run::new(version, options);
    if version.is_base() {
        return run.stats;
    }
    verified(version);
    let chosen: Option<Vec<&str>> =
        options.passes.as_ref().map(|names| names.iter().map(String::as_str).collect());
    for name in run.registry.arranged(chosen.as_deref().unwrap_or(pipeline)) {
        let Some(pass) = run.registry.find(name) else { continue };
        if run.has_work(&pass) && !run.pass(version, &pass) {
            return run.stats;
        }
    }
    verified(version);
    run.stats
}

/// Runs the named passes in order; names of no pass are ignored.
pub fn optimise_with(version: &mut Version, names: &[&str], options: &OptOptions) -> OptStats {
    let mut run = Run::new(version, options);
    if !version.is_base() {
        verified(version);
        for pass in names.iter().filter_map(|name| run.registry.find(name)) {
            if !run.pass(version, &pass) {
                return run.stats;
            }
        }
        verified(version);
    }
    run.stats
}

/// A run of passes.
struct Run<'a> {
    options: &'a OptOptions<'a>,
    registry: &'a Registry,
    stats: OptStats,
}

impl<'a> Run<'a> {
    fn new(version: &Version, options: &'a OptOptions<'a>) -> Run<'a> {
        static BUILT_IN: LazyLock<Registry> = LazyLock::new(Registry::default);
        let stats = OptStats { insts_before: count(version), ..OptStats::default() };
        Run { options, registry: options.registry.unwrap_or(&BUILT_IN), stats }
    }

    /// Has another pass changed something since this one ran, so that it may find something again?
    fn has_work(&self, pass: &Known) -> bool {
        let Known::BuiltIn(pass) = pass else { return true };
        let before = self.stats.passes.iter().rposition(|p| p.name == pass.name);
        let gives_work = |p: &PassStat| {
            let is_own = || self.registry.own().iter().any(|own| own.name() == p.name);
            p.changes > 0 && (pass.again_after.contains(&p.name) || is_own())
        };
        before.is_none_or(|i| self.stats.passes[i + 1..].iter().any(gives_work))
    }

    /// Runs a pass unless the options leave it out. Debug builds verify the version after each pass that
    /// changed something; the callers verify it before the first pass and after the last. False if an own pass has
    /// broken the version.
    fn pass(&mut self, version: &mut Version, pass: &Known) -> bool {
        let name = pass.name();
        if self.options.skip.iter().any(|s| s == name) {
            return true;
        }
        let start = Instant::now();
        let changes = match pass {
            Known::BuiltIn(pass) => pass.run(version, self.options),
            Known::Own(own) => match own.run(version, self.options) {
                Ok(changes) => changes,
                Err(broken) => {
                    self.stats.broken = Some(broken);
                    return false;
                }
            },
        };
        let time = start.elapsed();
        if changes > 0 {
            verified(version);
        }
        if let Some(hook) = self.options.after_pass {
            hook(name, version);
        }
        self.stats.passes.push(PassStat { name, changes, insts: count(version), time });
        true
    }
}

/// Debug builds panic if the version breaks a rule.
fn verified(version: &Version) {
    if cfg!(debug_assertions) {
        crate::verify::assert_valid(version);
    }
}

fn count(version: &Version) -> usize {
    version.blocks.iter().map(|b| b.insts.len()).sum()
}
