//! Runs whole programs of many regions and versions to their end, and checks the two properties of
//! versions on whole runs (sourir 5.4).
//!
//! *Equivalence*: whichever versions are entered, the events and the final state are those of
//! `base`. *Transparency*: the same holds if the run takes the anchor at any one opportunity.
//!
//! [`super::check`] is stricter about one version: each state that it leaves with must be one that
//! `base` passes. This module checks what a user of the program sees. It also follows labels into
//! other versions, and needs no guest program besides the file. A `base` version provides a block
//! for its own pc, and one for each later `at` across which no value is live.
//!
//! **Data.** [`Program`] borrows the regions and owns the `base` block of each pc. [`Outcome`] owns
//! the final state and machine. **Invariant.** After an anchor is taken other than at a version's
//! end, `base` runs at least one block before a version is entered again (docs/design.md, "The
//! IR"). **Callers.** `dynasour ir eval`, `dynasour ir diff` and tests; no lock.
//!
//! ```text
//! 0x100 t2: through a1 to 0x108 (a failed assumption)  the trace t2 of region 0x100 leaves
//! 0x108 base: to 0x110                                 base runs a block; 0x110 has no code
//! ```

use super::check::{Code, Comparable, context_holds};
use super::{EvalError, Hooks, Leave, Machine, Reason, State, resume, run};
use crate::op::Op;
use crate::reach::{Cfg, Point, Reach};
use crate::region::Region;
use crate::types::{AnchorId, Operand, Value};
use crate::version::{Version, Via};
use std::collections::BTreeMap;
use std::fmt;

/// The regions of a program, and the `base` block at every pc that they have code for.
pub struct Program<'r> {
    regions: &'r [Region],
    blocks: BTreeMap<u64, Version>,
}

impl<'r> Program<'r> {
    /// A program of these regions. If two regions have the same pc the first is used.
    pub fn new(regions: &'r [Region]) -> Program<'r> {
        let mut blocks = BTreeMap::new();
        let bases = || regions.iter().filter_map(|r| r.versions.iter().find(|v| v.is_base()));
        for base in bases() {
            blocks.entry(base.region).or_insert_with(|| base.clone());
        }
        for base in bases() {
            for (pc, suffix) in suffixes(base) {
                blocks.entry(pc).or_insert(suffix);
            }
        }
        Program { regions, blocks }
    }

    /// The region at a pc.
    pub fn region(&self, pc: u64) -> Option<&'r Region> {
        self.regions.iter().find(|r| r.pc == pc)
    }
}

impl Code for Program<'_> {
    fn block(&mut self, pc: u64) -> Option<&Version> {
        self.blocks.get(&pc)
    }
}

/// The blocks that begin at a later guest instruction of a `base` block.
fn suffixes(base: &Version) -> Vec<(u64, Version)> {
    let [body] = &base.blocks[..] else { return Vec::new() };
    let mut out = Vec::new();
    // Values that are used after the current instruction and defined before it, in a backward
    // walk.
    let mut open = vec![false; base.types.len()];
    let note = |operands: &[Operand], open: &mut Vec<bool>| {
        for v in operands.iter().filter_map(|o| o.as_value()) {
            if let Some(slot) = open.get_mut(v.index()) {
                *slot = true;
            }
        }
    };
    note(&Version::term_operands(&body.term), &mut open);
    for (i, inst) in body.insts.iter().enumerate().rev() {
        inst.defs
            .iter()
            .filter(|v| v.index() < base.types.len())
            .for_each(|v| open[v.index()] = false);
        note(&inst.args, &mut open);
        if inst.op == Op::At
            && i > 0
            && let Some(pc) = inst.args[0].as_const()
            && !open.contains(&true)
        {
            let mut suffix = base.clone();
            suffix.region = pc;
            suffix.blocks[0].insts.drain(..i);
            out.push((pc, suffix));
        }
    }
    out
}

/// The rule for which version is entered.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// Those that dispatch chooses.
    #[default]
    Dispatch,
    /// `base` only.
    Base,
    /// The version of this name wherever a region has it and its context holds, else `base`.
    Named(String),
}

/// How to run a program.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Route {
    /// Which versions are entered.
    pub choice: Choice,
    /// Go on in another version where an anchor has a label there, instead of in `base`.
    pub follow: bool,
    /// The opportunity, counted over the whole run, whose anchor is taken.
    pub force: Option<u64>,
}

/// One version that control passed through.
#[derive(Clone, PartialEq, Debug)]
pub struct Visit {
    /// pc of the region or block.
    pub pc: u64,
    /// Its name.
    pub version: String,
    /// How it left; `None` if it went on in another version by a label.
    pub leave: Option<Leave>,
}

impl fmt::Display for Visit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} {}: ", self.pc, self.version)?;
        match &self.leave {
            None => f.write_str("by a label"),
            Some(leave) => leave.fmt(f),
        }
    }
}

/// Where an event happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventSpot {
    /// pc of the region.
    pub region: u64,
    /// Name of the version.
    pub version: String,
    /// The `print` or `read`.
    pub point: Point,
}

/// A run and its end.
#[derive(Clone, Debug)]
pub struct Outcome<M> {
    /// The last [`MAX_VISITS`] versions that control passed through.
    pub visits: Vec<Visit>,
    /// The point of each event, in order.
    pub events: Vec<EventSpot>,
    /// The opportunities seen.
    pub opportunities: u64,
    /// How the last version left: to a pc without code, by something that only the runtime can do
    /// (such as a system call), or by [`Leave::Budget`].
    pub end: Leave,
    /// The guest state then.
    pub state: State,
    /// The machine then.
    pub machine: M,
}

/// Visits kept in an [`Outcome`]; older ones are dropped (guess; it bounds memory).
pub const MAX_VISITS: usize = 10_000;

/// Why a program cannot be run.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProgramError {
    /// A version does something that no verified version does.
    #[error("region {region:#x}, version {version}: {error}")]
    Eval {
        /// Its region.
        region: u64,
        /// Its name.
        version: String,
        /// What is wrong.
        error: EvalError,
    },
    /// A label leads nowhere.
    #[error("region {region:#x}: there is no {version}.{anchor} in use")]
    Label {
        /// The region.
        region: u64,
        /// The version named.
        version: String,
        /// The anchor named.
        anchor: AnchorId,
    },
}

/// A point in another version, and the values to continue with.
struct Label {
    version: String,
    anchor: AnchorId,
    values: Vec<(Value, u64)>,
}

struct Watch<'r> {
    region: Option<&'r Region>,
    at: (u64, String),
    follow: bool,
    seen: u64,
    force: Option<u64>,
    label: Option<Label>,
    events: Vec<EventSpot>,
}

impl<M: Machine> Hooks<M> for Watch<'_> {
    fn force(&mut self, _anchor: AnchorId, _point: Point) -> bool {
        let force = self.force == Some(self.seen);
        self.seen += 1;
        force
    }

    fn event(&mut self, point: Point) {
        let (region, version) = self.at.clone();
        self.events.push(EventSpot { region, version, point });
    }

    fn label(&mut self, via: &Via, values: &[(Value, u64)]) -> Option<usize> {
        let target = self.region.filter(|_| self.follow)?.version(&via.version)?;
        let waiting = target.anchors.get(via.anchor.index())?.stores.len();
        let version = via.version.clone();
        self.label = Some(Label { version, anchor: via.anchor, values: values.to_vec() });
        Some(waiting)
    }
}

/// Runs the program from `pc` until it ends or `steps` IR instructions have been executed.
pub fn run_program<M: Machine>(
    program: &Program,
    mut pc: u64,
    route: &Route,
    mut state: State,
    mut machine: M,
    mut steps: u64,
) -> Result<Outcome<M>, ProgramError> {
    let mut watch = Watch {
        region: None,
        at: (pc, String::new()),
        follow: route.follow,
        seen: 0,
        force: route.force,
        label: None,
        events: Vec::new(),
    };
    let mut visits: Vec<Visit> = Vec::new();
    let mut base_next = false;
    let mut end = Leave::Goto(pc);
    loop {
        let region = program.region(pc);
        let chosen = if base_next {
            None
        } else {
            region.and_then(|r| choose(r, route, &state, &mut machine))
        };
        let Some(mut version) = chosen.or_else(|| program.blocks.get(&pc)) else { break };
        watch.region = region;
        watch.at = (pc, version.name.clone());
        let mut result = run(version, &mut state, &mut machine, &mut watch, &mut steps);
        while let (Ok(_), Some(label)) = (&result, watch.label.take()) {
            visits.push(Visit { pc, version: version.name.clone(), leave: None });
            let found = region
                .and_then(|r| r.version(&label.version))
                .and_then(|v| Some((v, position(v, label.anchor)?)));
            let Some((target, point)) = found else {
                return Err(ProgramError::Label {
                    region: pc,
                    version: label.version,
                    anchor: label.anchor,
                });
            };
            version = target;
            watch.at.1.clone_from(&version.name);
            result = resume(
                version,
                point,
                &label.values,
                &mut state,
                &mut machine,
                &mut watch,
                &mut steps,
            );
        }
        let error = |error| ProgramError::Eval { region: pc, version: version.name.clone(), error };
        let leave = result.map_err(error)?;
        if visits.len() == MAX_VISITS {
            visits.remove(0);
        }
        visits.push(Visit { pc, version: version.name.clone(), leave: Some(leave.clone()) });
        end = leave;
        match end {
            Leave::Goto(next) => (pc, base_next) = (next, false),
            Leave::Anchor { pc: next, reason, .. } => {
                (pc, base_next) = (next, reason != Reason::End)
            }
            _ => break,
        }
    }
    let Watch { seen, events, .. } = watch;
    Ok(Outcome { visits, events, opportunities: seen, end, state, machine })
}

fn choose<'r, M: Machine>(
    region: &'r Region,
    route: &Route,
    state: &State,
    machine: &mut M,
) -> Option<&'r Version> {
    let mut enterable = |v: &&Version| !v.is_base() && context_holds(v, state, machine);
    match &route.choice {
        Choice::Base => None,
        Choice::Dispatch => region.versions.iter().find(&mut enterable),
        Choice::Named(name) => region.version(name).filter(&mut enterable),
    }
}

fn position(version: &Version, anchor: AnchorId) -> Option<Point> {
    Reach::new(version, &Cfg::new(version)).positions.get(anchor.index()).copied().flatten()
}

/// The first difference of two runs, in words: an event, the end, or the final state. `None` if
/// either run has not ended.
pub fn difference<M: Comparable>(one: &Outcome<M>, two: &Outcome<M>) -> Option<String> {
    let pc = |leave: &Leave| match leave {
        Leave::Anchor { pc, .. } | Leave::Goto(pc) => Some(*pc),
        _ => None,
    };
    if one.end == Leave::Budget || two.end == Leave::Budget {
        return None;
    }
    let same_end = one.end == two.end || (pc(&one.end).is_some() && pc(&one.end) == pc(&two.end));
    if let Some(what) = one.machine.difference(&two.machine) {
        return Some(what);
    }
    if !same_end {
        return Some(format!("the end: {} and {}", one.end, two.end));
    }
    one.state.difference(&two.state)
}

/// A run that has not ended after this many times the steps within which `base` ends counts as one
/// that never ends (guess; too low reports correct versions).
const HASTE: u64 = 8;

/// What [`check_program`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Checked {
    /// Runs that were compared with that of `base`.
    pub runs: u64,
    /// Opportunities of the run that nothing forced.
    pub opportunities: u64,
}

/// A run that is not like that of `base`.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Diverged {
    /// The program does not run.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// It runs differently.
    #[error("{}{what}", forced(.route))]
    Run {
        /// How it was run.
        route: Route,
        /// What differs, `base` first.
        what: String,
    },
}

fn forced(route: &Route) -> String {
    route.force.map_or(String::new(), |n| format!("with the anchor of opportunity {n} taken: "))
}

/// Compares a run with that of `base`, and again with single opportunities forced (at most `forks`,
/// spread evenly), each to the end.
pub fn check_program<M: Comparable>(
    program: &Program,
    pc: u64,
    route: &Route,
    entry: (&State, &M),
    (steps, forks): (u64, u64),
) -> Result<Checked, Diverged> {
    let go = |route: &Route, steps| {
        run_program(program, pc, route, entry.0.clone(), entry.1.clone(), steps)
    };
    let base = go(&Route { choice: Choice::Base, ..Route::default() }, steps)?;
    let compare = |route: &Route| -> Result<u64, Diverged> {
        let mut outcome = go(route, steps)?;
        if outcome.end == Leave::Budget && base.end != Leave::Budget {
            outcome = go(route, steps.saturating_mul(HASTE))?;
            if outcome.end == Leave::Budget {
                let what = format!("base comes to its end ({}), this goes on and on", base.end);
                return Err(Diverged::Run { route: route.clone(), what });
            }
        }
        match difference(&base, &outcome) {
            None => Ok(outcome.opportunities),
            Some(what) => Err(Diverged::Run { route: route.clone(), what }),
        }
    };
    let opportunities = compare(&Route { force: None, ..route.clone() })?;
    let forks = opportunities.min(forks);
    for i in 0..forks {
        let nth = (u128::from(i) * u128::from(opportunities) / u128::from(forks)) as u64;
        compare(&Route { force: Some(nth), ..route.clone() })?;
    }
    Ok(Checked { runs: 1 + forks, opportunities })
}
