//! Checks that a version does what `base` does: version equivalence and assumption transparency
//! (sourir 5.4).
//!
//! The rule: a version may leave only in a state that `base` passes through. Both start from one
//! state. The state in which the version leaves (registers, flags, memory, in-place state, pc) must
//! appear in the sequence of states that `base` has before each of its guest instructions. This one
//! rule covers the end of a trace, a failed assumption, and a fault, whose anchor is earlier and
//! from which `base` replays. For *assumption transparency* it covers each anchor that is taken
//! although nothing failed.
//!
//! A version that never leaves although `base` comes to an end is not equivalent.
//!
//! **Data.** A check owns copies of the entry state and of the machine, one for each evaluation;
//! the caller's are not changed. **Callers.** The tests of the passes, on a
//! [`super::ModelMachine`], and the fuzz targets. No lock.
//!
//! ```text
//! base      0x10: rax += 1    0x14: rax *= 2    0x18: …
//! version   leaves to 0x18 with rax = 4, entered with rax = 1  correct
//! version   leaves to 0x14 with rax = 4, entered with rax = 1  wrong: base has rax = 2 there
//! ```

use super::{
    EvalError, ForceNth, Hooks, Leave, Machine, ModelMachine, NoHooks, Reason, State, run,
};
use crate::types::Loc;
use crate::version::{Fact, Version};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::BuildHasher;

/// A guest program: the `base` block at each pc.
pub trait Code {
    /// The lifted block that starts at `pc`; `None` where the program ends.
    fn block(&mut self, pc: u64) -> Option<&Version>;
}

impl<S: BuildHasher> Code for HashMap<u64, Version, S> {
    fn block(&mut self, pc: u64) -> Option<&Version> {
        self.get(&pc)
    }
}

impl Code for BTreeMap<u64, Version> {
    fn block(&mut self, pc: u64) -> Option<&Version> {
        self.get(&pc)
    }
}

/// A machine that can be copied and compared.
pub trait Comparable: Machine + Clone {
    /// The first difference to another machine, in words; `None` if there is none.
    fn difference(&self, other: &Self) -> Option<String>;
}

impl Comparable for ModelMachine {
    fn difference(&self, other: &Self) -> Option<String> {
        self.first_difference(other)
    }
}

/// The budget of a check.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// IR instructions that one evaluation may execute.
    pub steps: u64,
    /// Most opportunities that are forced. If the evaluation has more, the forced ones are spread
    /// evenly over all.
    pub forced: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { steps: 100_000, forced: 64 }
    }
}

/// What a check that found no mismatch has compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Checked {
    /// The version's context does not hold of the state: there is nothing to check.
    ContextFails,
    /// This many evaluations of the version were compared with `base`.
    Compared {
        /// evaluations that ended by themselves (0 if the budget ran out first) and forced ones
        evaluations: u64,
        /// opportunities in the evaluation that nothing forced
        opportunities: u64,
    },
}

/// A version that does not do what `base` does.
#[derive(Clone, Debug)]
pub struct Mismatch {
    /// The version in text form.
    pub version: String,
    /// The state at entry.
    pub entry: State,
    /// The opportunity that was forced, if one was.
    pub forced: Option<u64>,
    /// How the version left, if it did.
    pub leave: Option<Leave>,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.what)?;
        if let Some(n) = self.forced {
            writeln!(f, "forced opportunity: {n}")?;
        }
        if let Some(leave) = &self.leave {
            writeln!(f, "left by: {leave:?}")?;
        }
        writeln!(f, "entry state: {}", self.entry)?;
        f.write_str(&self.version)
    }
}

impl std::error::Error for Mismatch {}

/// Does the context of `version` hold in this state? The caller answers for `private_memory`, which
/// a state cannot show.
pub fn context_holds<M: Machine>(version: &Version, state: &State, machine: &mut M) -> bool {
    version.context.facts.iter().all(|fact| match (*fact, fact.register()) {
        (_, Some(gpr)) => fact.fit(state.gpr[gpr.number()]) == state.gpr[gpr.number()],
        (Fact::MemEquals { ty, address, value }, None) => {
            machine.load(address, ty.bytes()) == Ok(value)
        }
        (_, None) => true,
    })
}

/// Runs the program from `pc` in `base`. It ends when a block leaves otherwise than to another
/// block, or at a pc without a block (`Leave::Goto`).
pub fn run_base<M: Machine, H: Hooks<M>>(
    code: &mut dyn Code,
    mut pc: u64,
    state: &mut State,
    machine: &mut M,
    hooks: &mut H,
    budget: &mut u64,
) -> Result<Leave, EvalError> {
    while let Some(block) = code.block(pc) {
        match run(block, state, machine, hooks, budget)? {
            Leave::Goto(next) => pc = next,
            other => return Ok(other),
        }
    }
    Ok(Leave::Goto(pc))
}

/// Compares each state that `base` passes with the one looked for.
struct Search<'a, M> {
    pc: u64,
    state: &'a State,
    machine: &'a M,
    /// The candidate at this pc with the fewest differing locations.
    closest: Option<Candidate>,
    visits: u64,
}

/// A state that `base` passes at the right pc and that differs from the one looked for.
struct Candidate {
    /// Location, its value in `base`, its value when the version left.
    differing: Vec<(Loc, u64, u64)>,
    /// The first difference of the machines, if all locations agree.
    machine: Option<String>,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (loc, base, version)) in self.differing.iter().enumerate() {
            write!(
                f,
                "{}{loc}: base {base:#x}, version {version:#x}",
                if i > 0 { "; " } else { "" }
            )?;
        }
        self.machine.iter().try_for_each(|what| write!(f, "base and version: {what}"))
    }
}

impl<M: Comparable> Search<'_, M> {
    fn matches(&mut self, pc: u64, state: &State, machine: &M) -> bool {
        if pc != self.pc {
            return false;
        }
        self.visits += 1;
        let differs = |loc: &Loc| state.get(*loc) != self.state.get(*loc);
        let differing = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index).filter(differs);
        let count = differing.clone().count();
        let found = if count == 0 { machine.difference(self.machine) } else { None };
        if count == 0 && found.is_none() {
            return true;
        }
        if self.closest.as_ref().is_none_or(|closest| count < closest.differing.len()) {
            let value = |s: &State, loc| s.get(loc).unwrap_or(0);
            let differing =
                differing.map(|loc| (loc, value(state, loc), value(self.state, loc))).collect();
            self.closest = Some(Candidate { differing, machine: found });
        }
        false
    }
}

impl<M: Comparable> Hooks<M> for Search<'_, M> {
    fn at(&mut self, pc: u64, state: &State, machine: &M) -> bool {
        self.matches(pc, state, machine)
    }
}

/// Does `base`, started at pc, state and machine `from`, pass through pc, state and machine `to`?
/// The error names the nearest state that it passes at that pc.
pub(crate) fn passes_through<M: Comparable>(
    code: &mut dyn Code,
    from: (u64, &State, &M),
    to: (u64, &State, &M),
    steps: u64,
) -> Result<(), String> {
    let (mut state, mut machine, mut budget) = (from.1.clone(), from.2.clone(), steps);
    let mut search = Search { pc: to.0, state: to.1, machine: to.2, closest: None, visits: 0 };
    let leave = run_base(code, from.0, &mut state, &mut machine, &mut search, &mut budget);
    match leave {
        Ok(Leave::Stopped { .. }) => return Ok(()),
        // The end of the program is also a state, although no block starts there.
        Ok(Leave::Goto(pc)) if search.matches(pc, &state, &machine) => return Ok(()),
        _ => {}
    }
    Err(match search.closest {
        Some(nearest) => format!(
            "base passes {:#x} {} times, never in this state; the nearest differs in: {nearest} \
                (base then: {leave:?})",
            to.0, search.visits
        ),
        None => format!("base never comes to {:#x} (base then: {leave:?})", to.0),
    })
}

/// Checks `version` against the program from one state. The version must leave in a state that
/// `base` passes: by itself, and with each chosen opportunity forced.
pub fn check<M: Comparable>(
    code: &mut dyn Code,
    version: &Version,
    entry: &State,
    machine: &M,
    limits: Limits,
) -> Result<Checked, Box<Mismatch>> {
    if !context_holds(version, entry, &mut machine.clone()) {
        return Ok(Checked::ContextFails);
    }
    let mut one = |nth: Option<u64>| -> Result<(u64, bool), Box<Mismatch>> {
        let (mut state, mut after, mut budget) = (entry.clone(), machine.clone(), limits.steps);
        let mut hooks = ForceNth { seen: 0, nth };
        let leave = run(version, &mut state, &mut after, &mut hooks, &mut budget);
        let mismatch = |leave: Option<Leave>, what: String| {
            Box::new(Mismatch {
                version: version.to_string(),
                entry: entry.clone(),
                forced: nth,
                leave,
                what,
            })
        };
        let leave = leave.map_err(|e| mismatch(None, e.to_string()))?;
        let pc = match leave {
            Leave::Anchor { pc, .. } | Leave::Goto(pc) => pc,
            Leave::Budget => {
                return match base_ends(code, version.region, entry, machine, limits.steps / HASTE) {
                    false => Ok((hooks.seen, false)),
                    true => Err(mismatch(
                        Some(leave),
                        "base comes to its end, the version goes on and on".to_string(),
                    )),
                };
            }
            Leave::Syscall { .. }
            | Leave::Special { .. }
            | Leave::Trap { .. }
            | Leave::Fault { .. } => {
                return same_end(code, version, entry, machine, &leave, (&state, &after))
                    .map(|()| (hooks.seen, true))
                    .map_err(|what| mismatch(Some(leave.clone()), what));
            }
            Leave::Stopped { .. } => {
                return Err(mismatch(Some(leave), "stopped without being asked".to_string()));
            }
        };
        // One pass through a loop of the trace may stand for many base instructions; the factor is
        // a guess, and too low reports a correct version as a mismatch.
        let steps = limits.steps.saturating_mul(8);
        passes_through(code, (version.region, entry, machine), (pc, &state, &after), steps)
            .map_err(|what| mismatch(Some(leave), what))?;
        Ok((hooks.seen, true))
    };
    let (opportunities, ended) = one(None)?;
    let mut evaluations = u64::from(ended);
    let forced = opportunities.min(limits.forced);
    for i in 0..forced {
        // Evenly over all of them, the first included.
        let nth = (u128::from(i) * u128::from(opportunities) / u128::from(forced)) as u64;
        one(Some(nth))?;
        evaluations += 1;
    }
    Ok(Checked::Compared { evaluations, opportunities })
}

/// A version that has not left after this many times the instructions within which `base` ends
/// counts as one that never leaves (guess: guards add a few instructions, never a factor of eight;
/// too low reports correct versions).
const HASTE: u64 = 8;

/// Does the program end, from this state, within `steps` IR instructions?
fn base_ends<M: Comparable>(
    code: &mut dyn Code,
    pc: u64,
    entry: &State,
    machine: &M,
    steps: u64,
) -> bool {
    let (mut state, mut machine, mut budget) = (entry.clone(), machine.clone(), steps);
    !matches!(
        run_base(code, pc, &mut state, &mut machine, &mut NoHooks, &mut budget),
        Ok(Leave::Budget)
    )
}

/// For a `base` version that ends in a system call, a trap or the like: the program must end in the
/// same way and state.
fn same_end<M: Comparable>(
    code: &mut dyn Code,
    version: &Version,
    entry: &State,
    machine: &M,
    leave: &Leave,
    after: (&State, &M),
) -> Result<(), String> {
    let (mut state, mut base_machine, mut budget) = (entry.clone(), machine.clone(), u64::MAX);
    let base = match code.block(version.region) {
        Some(block) => run(block, &mut state, &mut base_machine, &mut NoHooks, &mut budget),
        None => return Err("the program has no block here".to_string()),
    };
    if base.as_ref() != Ok(leave) {
        return Err(format!("base leaves by {base:?}"));
    }
    if state != *after.0 {
        return Err(format!("base leaves in another state: {state}"));
    }
    base_machine.difference(after.1).map_or(Ok(()), Err)
}

/// Do two versions of one region leave in the same way from this state? Reasons and anchor numbers
/// may differ; pc, state and machine may not. If neither leaves within `steps` instructions they
/// count as equal. A version that does not leave even in [`HASTE`] times the steps counts as one
/// that never leaves. Used by `diff`, and for passes that may not move an exit.
pub fn same_result<M: Comparable>(
    one: &Version,
    two: &Version,
    entry: &State,
    machine: &M,
    steps: u64,
) -> Result<(), String> {
    let go = |version: &Version, steps: u64| {
        let (mut state, mut after, mut budget) = (entry.clone(), machine.clone(), steps);
        let leave = run(version, &mut state, &mut after, &mut NoHooks, &mut budget);
        leave.map(|l| (l, state, after)).map_err(|e| format!("{}: {e}", version.name))
    };
    let (mut first, mut second) = (go(one, steps)?, go(two, steps)?);
    match (first.0 == Leave::Budget, second.0 == Leave::Budget) {
        (true, true) => return Ok(()),
        (true, false) => first = go(one, steps.saturating_mul(HASTE))?,
        (false, true) => second = go(two, steps.saturating_mul(HASTE))?,
        (false, false) => {}
    }
    let pc = |leave: &Leave| match leave {
        Leave::Anchor { pc, .. } | Leave::Goto(pc) => Some(*pc),
        _ => None,
    };
    let same_leave =
        first.0 == second.0 || (pc(&first.0).is_some() && pc(&first.0) == pc(&second.0));
    if !same_leave {
        return Err(format!(
            "{} leaves by {:?}, {} by {:?}",
            one.name, first.0, two.name, second.0
        ));
    }
    if first.1 != second.1 {
        return Err(format!(
            "{} leaves with {}, {} with {}",
            one.name, first.1, two.name, second.1
        ));
    }
    first.2.difference(&second.2).map_or(Ok(()), Err)
}

/// Was this leave a normal end (and no deoptimisation)?
pub fn is_normal_end(leave: &Leave) -> bool {
    matches!(leave, Leave::Goto(_) | Leave::Anchor { reason: Reason::End, .. })
}
