//! Translation validation by testing: does an optimised trace do what was recorded?
//!
//! Before a trace is published its version is run in the evaluator beside the recorded `base` blocks,
//! from the state in which it was recorded and from *cases* made of it: each guard's other outcome,
//! addresses that overlap, accesses that fault, boundary values. The rule is that of
//! [`crate::eval::check`]: a version may leave only in a state that `base` passes. It is checked at
//! every anchor that the run passes, taken or not, so that one run shows equivalence and assumption
//! transparency (sourir 5.4) from one entry state.
//!
//! ```text
//! base run         set of (pc, digest of registers, flags, memory, state in place)     [`Passed`]
//! optimised run    at each opportunity: the state that its anchor would rebuild is in the set
//! ```
//!
//! | module | what |
//! | --- | --- |
//! | [`case`] | an entry state: guest memory with a case's changes |
//! | [`machine`] | what a run has written, and digests of states |
//! | [`solve`] | which change of a case gives a value another content |
//! | [`lowered`] | the same for machine code, lifted back |
//! | [`cases`] | the cases: directed ones from a run, and random ones |
//!
//! **Data.** A validation owns its cases; guest memory is read, once for each word, and not written.
//! **Invariants.** A disagreement is a fault of the translator: natives are uninterpreted functions, so
//! nothing is demanded that a version could not know. Agreement says nothing about states that were not
//! tried. **Callers.** Whoever compiles a trace, with `--verify-traces`; no lock.
//!
//! Example: a loop over an array has three guards and 20 opportunities in two iterations. The recorded
//! state and 60 cases compare 900 states in 1.5 ms.

mod case;
mod cases;
#[cfg(test)]
mod faults;
mod lowered;
mod machine;
mod solve;
#[cfg(test)]
mod tests;

use crate::Op;
use crate::eval::check::{Code, passes_through, run_base};
use crate::eval::{Hooks, Leave, State, run};
use crate::opt::{OptOptions, optimise_with};
use crate::predict::{NativeResults, Registers};
use crate::random::Rng;
use crate::reach::Point;
use crate::setup::Setup;
use crate::types::{AnchorId, Operand};
use crate::version::{Inst, Version};
use case::{Case, Memory};
use cases::Cases;
pub use lowered::{Entered, HostNative, Left, Lowered, Tables, validate_code};
use machine::{Shadow, digest};
use rustc_hash::FxHashSet;
use std::cell::OnceCell;
use std::fmt;

/// What is validated.
pub struct Subject<'a> {
    /// The recorded blocks.
    pub code: &'a mut dyn Code,
    /// The version as it was built of them.
    pub built: &'a Version,
    /// The version after the passes.
    pub optimised: &'a Version,
    /// The registers with which it was recorded.
    pub entry: Registers,
    /// What natives of the version as built were observed to compute.
    pub results: &'a NativeResults,
    /// Reads guest memory: up to eight bytes, `None` if they cannot be read.
    pub read: &'a dyn Fn(u64, u32) -> Option<u64>,
    /// Address and size of what the passes took for constant.
    pub constants: &'a [(u64, u32)],
    /// Guest instructions of the longest iteration, or of the whole path.
    pub length: u64,
    /// Where the cases begin, once that has been found.
    pub start: &'a Start,
}

/// The first case of a subject, and those that its runs propose. The comparisons of a version and of its code
/// share them.
#[derive(Default)]
pub struct Start(OnceCell<Found>);

/// What a [`Start`] holds.
struct Found {
    first: Case,
    /// Does it execute the whole path?
    whole: bool,
    cases: Cases,
}

/// When a validation ends.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most cases.
    pub cases: u64,
    /// IR instructions after which no further case is begun, but for some.
    pub steps: u64,
}

impl Default for Limits {
    /// About 2 ms.
    fn default() -> Limits {
        Limits { cases: 250, steps: 50_000 }
    }
}

/// What a validation without a disagreement has compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Entry states.
    pub cases: u64,
    /// States at opportunities and exits.
    pub states: u64,
    /// Guards of the optimised version that held somewhere, and that failed somewhere.
    pub outcomes: [u64; 2],
    /// Guards of the optimised version.
    pub guards: u64,
    /// Of machine code: the instructions at which control may leave, and those at which it has left.
    pub exits: [u64; 2],
    /// Was there a case in which the whole path was executed?
    pub whole: bool,
    /// IR instructions executed.
    pub steps: u64,
}

/// A version that does not do what was recorded.
#[derive(Clone, Debug)]
pub struct Disagreement {
    /// What is wrong.
    pub what: String,
    /// The opportunity at which the state is wrong, if it is not that in which the version leaves.
    pub forced: Option<u64>,
    /// The version as built is wrong already.
    pub built: bool,
    /// The entry state, as text that `dynasour ir eval` and `diff` read.
    pub setup: Setup,
    case: Case,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        self.forced.map_or(Ok(()), |n| write!(f, " (opportunity {n})"))
    }
}

impl std::error::Error for Disagreement {}

/// Iterations of a loop, after the first, that are run of a version.
const ITERATIONS: u64 = 2;
/// The same for long paths, so that more cases can be tried.
const ITERATIONS_OF_LONG: u64 = 1;
/// Paths with more guest instructions are long (guess).
const LONG: u64 = 400;
/// Cases of each trace, however long (guess).
const LEAST_CASES: u64 = 3;
/// IR instructions of `base` in which the state that is nearest to a wrong one is looked for (guess).
const SEARCHED: u64 = 1_000_000;

/// The states that `base` passes from one entry state.
struct Passed {
    states: FxHashSet<(u64, u64)>,
    instructions: u64,
    most: u64,
}

impl Passed {
    fn contains(&self, pc: u64, digest: u64) -> bool {
        self.states.contains(&(pc, digest))
    }
}

impl Hooks<Shadow<'_>> for Passed {
    fn at(&mut self, pc: u64, state: &State, machine: &Shadow<'_>) -> bool {
        self.states.insert((pc, digest(state, machine, &[])));
        self.instructions += 1;
        self.instructions > self.most
    }
}

/// Compares each state that a version could leave in with those that `base` passes.
struct Watch<'a> {
    version: &'a Version,
    passed: &'a Passed,
    /// How often the loop's head may be passed.
    polls: u64,
    /// Opportunities so far.
    seen: u64,
    /// The first one whose state `base` does not pass.
    wrong: Option<u64>,
    outcomes: &'a mut FxHashSet<(Point, bool)>,
}

impl<'m> Hooks<Shadow<'m>> for Watch<'_> {
    fn before(&mut self, inst: &Inst, point: Point, values: &[u64], _machine: &Shadow<'m>) {
        if inst.op == Op::Assume {
            self.outcomes.insert((point, content(values, inst.args[0]) != 0));
        }
    }

    fn compares(&self) -> bool {
        true
    }

    fn rebuilt(
        &mut self,
        pc: u64,
        state: &State,
        stores: &[(u64, u32, u64)],
        machine: &Shadow<'m>,
    ) {
        let is_right = || {
            let faults =
                stores.iter().any(|(address, size, _)| !machine.can_store(*address, *size));
            !faults && self.passed.contains(pc, digest(state, machine, stores))
        };
        if self.wrong.is_none() && !is_right() {
            self.wrong = Some(self.seen);
        }
        self.seen += 1;
    }

    fn force(&mut self, _anchor: AnchorId, point: Point) -> bool {
        if is_poll(self.version, point) {
            self.polls = self.polls.saturating_sub(1);
        }
        self.wrong.is_some() || self.polls == 0
    }
}

/// The instructions and terminators of a version.
fn insts(version: &Version) -> u64 {
    version.blocks.iter().map(|b| b.insts.len() as u64 + 1).sum()
}

fn is_poll(version: &Version, point: Point) -> bool {
    version.blocks[point.block.index()].insts[point.inst].op == Op::Poll
}

/// A validation under way.
struct Validation<'a> {
    subject: Subject<'a>,
    memory: Memory<'a>,
    outcomes: FxHashSet<(Point, bool)>,
    report: Report,
}

/// Compares the optimised version with the recorded blocks.
///
/// # Errors
/// They do not agree.
pub fn validate(subject: Subject<'_>, limits: Limits) -> Result<Report, Box<Disagreement>> {
    walk(Validation::new(subject), limits, Validation::compare)
}

/// Goes through the cases.
fn walk<'a>(
    mut validation: Validation<'a>,
    limits: Limits,
    mut compare: impl FnMut(&mut Validation<'a>, &Case) -> Result<(), Box<Disagreement>>,
) -> Result<Report, Box<Disagreement>> {
    let built = validation.subject.built;
    let mut rng = Rng::new(built.region);
    let start = validation.subject.start;
    let Found { first, whole, cases } = start.0.get_or_init(|| {
        let Subject { entry, results, .. } = &validation.subject;
        let first = Case::new(entry, results, built, &validation.memory);
        let (first, whole) = cases::on_path(&mut validation, first);
        let cases = Cases::new(&mut validation, &first, &mut rng);
        Found { first, whole, cases }
    });
    let mut cases = cases.clone();
    validation.report = Report { whole: *whole, ..Report::default() };
    compare(&mut validation, first)?;
    let goes_on = |report: &Report| {
        let steps = limits.steps;
        report.cases < limits.cases && (report.steps < steps || report.cases < LEAST_CASES)
    };
    while goes_on(&validation.report) {
        let case = cases.next(&validation, first, &mut rng);
        compare(&mut validation, &case)?;
    }
    let optimised = validation.subject.optimised;
    let insts = optimised.blocks.iter().flat_map(|b| &b.insts);
    let mut report = validation.report;
    report.guards = insts.filter(|i| i.op == Op::Assume).count() as u64;
    for (_, holds) in validation.outcomes {
        report.outcomes[usize::from(!holds)] += 1;
    }
    Ok(report)
}

/// The shortest list of passes after which a version disagrees in the disagreement's case; none if
/// these passes do not show it. `passes` are those that have run.
pub fn blame(
    subject: Subject<'_>,
    disagreement: &Disagreement,
    passes: &[&'static str],
    options: &OptOptions,
) -> Option<Vec<&'static str>> {
    if disagreement.built {
        return Some(Vec::new());
    }
    let mut validation = Validation::new(subject);
    let built = validation.subject.built;
    let mut fails = |names: &[&'static str]| {
        let mut version = built.clone();
        optimise_with(&mut version, names, options);
        validation.disagrees(&version, &disagreement.case).is_some()
    };
    let first = (1..=passes.len()).find(|n| fails(&passes[..*n]))?;
    let mut fewest = passes[..first].to_vec();
    let mut at = 0;
    while at + 1 < fewest.len() {
        let mut fewer = fewest.clone();
        fewer.remove(at);
        match fails(&fewer) {
            true => fewest = fewer,
            false => at += 1,
        }
    }
    Some(fewest)
}

impl<'a> Validation<'a> {
    fn new(subject: Subject<'a>) -> Validation<'a> {
        let memory = Memory::new(subject.read, subject.constants);
        memory.fit(subject.optimised);
        Validation { subject, memory, outcomes: FxHashSet::default(), report: Report::default() }
    }

    /// Iterations after the first.
    fn iterations(&self) -> u64 {
        if self.subject.length > LONG { ITERATIONS_OF_LONG } else { ITERATIONS }
    }

    /// The states that `base` passes.
    fn base(&mut self, case: &Case) -> Passed {
        self.base_from(self.subject.built.region, case)
    }

    /// The same from this pc.
    fn base_from(&mut self, pc: u64, case: &Case) -> Passed {
        // A version is left at the head after one iteration more than it may pass it.
        let most = (self.iterations() + 2) * self.subject.length + 2;
        let mut passed = Passed { states: FxHashSet::default(), instructions: 0, most };
        let mut machine = Shadow::new(case, &self.memory, self.subject.built);
        let (mut state, mut steps) = (case.state.clone(), u64::MAX);
        let code = &mut *self.subject.code;
        let leave = run_base(code, pc, &mut state, &mut machine, &mut passed, &mut steps);
        if let Ok(Leave::Goto(pc)) = leave {
            passed.states.insert((pc, digest(&state, &machine, &[])));
        }
        self.report.steps += u64::MAX - steps;
        passed
    }

    /// Compares the optimised version with `base` from this entry state.
    fn compare(&mut self, case: &Case) -> Result<(), Box<Disagreement>> {
        self.report.cases += 1;
        let optimised = self.subject.optimised;
        let Some((forced, what)) = self.disagrees(optimised, case) else { return Ok(()) };
        let built = self.disagrees(self.subject.built, case);
        let (is_built, (forced, what)) = match built {
            Some(built) => (true, built),
            None => (false, (forced, what)),
        };
        let setup = case.setup(&self.memory);
        Err(Box::new(Disagreement { what, forced, built: is_built, setup, case: case.clone() }))
    }

    /// What is wrong with a version in this case, and the opportunity that was taken to see it.
    fn disagrees(&mut self, version: &Version, case: &Case) -> Option<(Option<u64>, String)> {
        let passed = self.base(case);
        let (mut state, mut machine) =
            (case.state.clone(), Shadow::new(case, &self.memory, version));
        let polls = self.iterations() + 1;
        // Loops end by their polls.
        let most = insts(version) * (polls + 1);
        let is_optimised = std::ptr::eq(version, self.subject.optimised);
        let mut other = FxHashSet::default();
        let outcomes = if is_optimised { &mut self.outcomes } else { &mut other };
        let mut watch = Watch { version, passed: &passed, polls, seen: 0, wrong: None, outcomes };
        let mut steps = most;
        let left = run(version, &mut state, &mut machine, &mut watch, &mut steps);
        // If a state is wrong, the version has left through its anchor.
        let (seen, wrong) = (watch.seen, watch.wrong);
        self.report.steps += most - steps;
        self.report.states += seen + 1;
        let what = match left {
            Ok(leave @ Leave::Anchor { pc, .. }) => {
                if wrong.is_none() && passed.contains(pc, digest(&state, &machine, &[])) {
                    return None;
                }
                let before = Shadow::new(case, &self.memory, self.subject.built);
                let from = (self.subject.built.region, &case.state, &before);
                let to = (pc, &state, &machine);
                let code = &mut *self.subject.code;
                format!("leaves {leave}: {}", nearest(code, from, to))
            }
            Ok(leave) => leave.to_string(),
            Err(error) => error.to_string(),
        };
        Some((wrong, format!("{}: {what}", version.name)))
    }
}

/// The state nearest to `to` that `base` passes from the state `from`, in words.
fn nearest(
    code: &mut dyn Code,
    from: (u64, &State, &Shadow<'_>),
    to: (u64, &State, &Shadow<'_>),
) -> String {
    match passes_through(code, from, to, SEARCHED) {
        Err(what) => what,
        Ok(()) => "base comes there later".to_string(),
    }
}

/// What an operand holds.
fn content(values: &[u64], operand: Operand) -> u64 {
    match operand {
        Operand::Const(c) => c,
        Operand::Value(v) => values[v.index()],
    }
}
