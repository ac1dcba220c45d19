//! Machine code of a version, compared with what was recorded: the code is lifted back into IR by
//! whoever knows how, and run in the evaluator like the version itself.
//!
//! The code has registers, spill slots and records of its own, so that only the states in which it
//! leaves are compared: at ends, failed guards, faults, and at the loop's safe point. There the way out
//! is followed as the runtime follows it ([`Lowered::leave`]). Where it could leave ([`Tables::ways`]) but
//! does not, a copy of the machine leaves, so that the record of each exit is followed.
//!
//! **Data.** [`Lowered`] has the code; a run owns its machine, in which the words of the thread's context
//! are apart from guest memory ([`super::machine`]). **Invariant.** As for [`super`]. **Callers.** As for
//! [`super`].
//!
//! ```text
//! host   add rbx, gs:[slot 3]; cmp rbx, 9; jne cold         lifted: put.i64 rbx, …; branch …
//! cold   gs:[exit_site] = 2; jmp out                        leave: record of site 2 → guest state
//! ```

use super::case::Case;
use super::machine::{Shadow, digest};
use super::{Disagreement, Limits, Passed, Report, Subject, Validation, nearest, walk};
use crate::eval::check::{Code, run_base};
use crate::eval::{Hooks, Leave, Machine, NoHooks, State};
use crate::version::Native;
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Machine code of a version. Its blocks are those of the lifted code, by host addresses.
pub trait Lowered: Code {
    /// Where it is entered and left.
    fn tables(&self) -> Tables;

    /// The host's state at entry for a guest state; segments are the bases of FS and GS.
    fn enter(&self, state: &State, segments: [u64; 2]) -> Entered;

    /// The guest state when control has left the code to `at`. `load` reads words of the context.
    ///
    /// # Errors
    /// Control cannot be there.
    fn leave(&self, at: u64, state: &State, load: &dyn Fn(u64) -> u64) -> Result<Left, String>;
}

/// Addresses of machine code.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// Where it is entered.
    pub entry: u64,
    /// The addresses of the thread's context, which GS points to.
    pub context: Range<u64>,
    /// The loops' heads, and for each the address to go on at when control is to leave there.
    pub heads: Vec<(u64, u64)>,
    /// The instructions at which control may leave: guards, and what may fault. For each the address to
    /// go on at.
    pub ways: FxHashMap<u64, u64>,
    /// The natives of the version.
    pub natives: FxHashMap<u64, HostNative>,
}

/// The state in which code is entered. A side trace is entered in the state of an exit, which not every
/// guest state can have.
#[derive(Clone, Debug)]
pub struct Entered {
    /// Where the guest is, if it is not at the version's pc.
    pub pc: Option<u64>,
    /// Words of the context: address and value.
    pub words: Vec<(u64, u64)>,
    /// The host's registers and flags.
    pub host: State,
    /// The guest's registers and flags.
    pub guest: State,
    /// Stores of the guest's that have not been performed yet, oldest first: address, size, value.
    pub stores: Vec<(u64, u32, u64)>,
}

/// The guest state with which code has left.
#[derive(Clone, Debug)]
pub struct Left {
    /// The guest pc.
    pub pc: u64,
    /// Registers and flags.
    pub state: State,
    /// Deferred stores, oldest first: address, size, value.
    pub stores: Vec<(u64, u32, u64)>,
}

/// A native of a version as it stands in machine code, perhaps with other registers.
#[derive(Clone, Debug)]
pub struct HostNative {
    /// The guest's instruction.
    pub guest: Native,
    /// For each of the guest's `gpr_in`: its position among those of the host's instruction.
    pub inputs: Vec<usize>,
    /// The same for `gpr_out`.
    pub outputs: Vec<usize>,
}

/// Compares the machine code of the optimised version with the recorded blocks.
///
/// # Errors
/// They do not agree.
pub fn validate_code(
    subject: Subject<'_>,
    code: &mut dyn Lowered,
    limits: Limits,
) -> Result<Report, Box<Disagreement>> {
    let tables = code.tables();
    let mut tried = Tried { code, tables: &tables, forced: FxHashMap::default() };
    let compare =
        |validation: &mut Validation<'_>, case: &Case| validation.compare_code(&mut tried, case);
    let report = walk(Validation::new(subject), limits, compare)?;
    let exits = [tables.ways.len() as u64, tried.forced.len() as u64];
    Ok(Report { exits, guards: 0, ..report })
}

/// Stops where control may leave.
struct Ways<'a> {
    tables: &'a Tables,
    /// How often a head may still be reached.
    left: u64,
    /// How often a way may still be taken by force, if not [`MOST_FORCED`] times.
    forced: &'a mut FxHashMap<u64, u32>,
    /// The way at which control has just stopped.
    passed: Option<u64>,
    /// Has it stopped because a head was reached too often?
    is_over: bool,
}

impl Ways<'_> {
    fn is_wanted(&mut self, at: u64) -> bool {
        let left = self.forced.entry(at).or_insert(MOST_FORCED);
        let is_wanted = *left > 0;
        *left = left.saturating_sub(1);
        is_wanted
    }
}

impl Hooks<Shadow<'_>> for Ways<'_> {
    fn at(&mut self, pc: u64, _state: &State, _machine: &Shadow<'_>) -> bool {
        if self.passed.take() == Some(pc) {
            return false;
        }
        if self.left > 0 && self.tables.heads.iter().any(|(head, _)| *head == pc) {
            self.left -= 1;
            if self.left == 0 {
                self.is_over = true;
                return true;
            }
        }
        self.tables.ways.contains_key(&pc) && self.is_wanted(pc)
    }
}

/// How often each way out of the code is taken by force, in all cases together (guess: later ones show the
/// same).
const MOST_FORCED: u32 = 4;

/// Machine code, and how often each way out of it may still be taken by force.
struct Tried<'c> {
    code: &'c mut dyn Lowered,
    tables: &'c Tables,
    forced: FxHashMap<u64, u32>,
}

/// Where control is, and the state there.
type Reached<'m> = (u64, State, Shadow<'m>);

impl Validation<'_> {
    fn compare_code(
        &mut self,
        tried: &mut Tried<'_>,
        case: &Case,
    ) -> Result<(), Box<Disagreement>> {
        self.report.cases += 1;
        let entered = tried.code.enter(&case.state, case.segments);
        let version = self.subject.optimised;
        let Some(entry) = case.at(&entered.guest, &entered.stores, version, &self.memory) else {
            return Ok(());
        };
        let start = entered.pc.unwrap_or(version.region);
        let passed = self.base_from(start, &entry);
        let polls = self.iterations() + 1;
        let machine = Shadow::of_host(&entry, &self.memory, version, tried.tables);
        let begin = Entry { before: case, entered, polls };
        let (what, reached) = match run_code(tried, begin, machine, &passed) {
            Ok(Ran { states, steps }) => {
                self.report.states += states;
                self.report.steps += steps;
                return Ok(());
            }
            Err(wrong) => wrong,
        };
        let what = match reached {
            Some(reached) => {
                let (pc, state, machine) = *reached;
                let before = Shadow::new(&entry, &self.memory, self.subject.built);
                let (from, to) = ((start, &entry.state, &before), (pc, &state, &machine));
                format!("{what}: {}", nearest(&mut *self.subject.code, from, to))
            }
            None => what,
        };
        let setup = entry.setup(&self.memory);
        let what = format!("the machine code of {}: {what}", version.name);
        let case = entry.clone();
        Err(Box::new(Disagreement { what, forced: None, built: false, setup, case }))
    }
}

/// How a run begins.
struct Entry<'c> {
    /// The case before the stores that are still to be performed.
    before: &'c Case,
    entered: Entered,
    /// How often a head may be reached.
    polls: u64,
}

/// What a run has done.
#[derive(Default)]
struct Ran {
    states: u64,
    steps: u64,
}

/// What is wrong, and the guest state that was reached, if it is a wrong one.
type Wrong<'m> = (String, Option<Box<Reached<'m>>>);

/// Runs the code from its entry, and leaves by each way that it passes.
fn run_code<'m>(
    Tried { code, tables, forced }: &mut Tried<'_>,
    Entry { before, entered, polls }: Entry<'_>,
    mut machine: Shadow<'m>,
    passed: &Passed,
) -> Result<Ran, Wrong<'m>> {
    let Entered { words, host: mut state, stores, .. } = entered;
    words.into_iter().for_each(|(address, word)| machine.write_context(address, word));
    machine.undo(&stores, before);
    let code = &mut **code;
    let mut hooks = Ways { tables, left: polls, forced, passed: None, is_over: false };
    let mut ran = Ran::default();
    let (mut at, mut steps) = (tables.entry, MOST_STEPS);
    loop {
        let left =
            run_base(&mut CodeOf(code), at, &mut state, &mut machine, &mut hooks, &mut steps);
        at = match left {
            Ok(Leave::Goto(to)) => {
                leave(code, (to, state, machine), passed, &mut ran)?;
                ran.steps += MOST_STEPS - steps;
                return Ok(ran);
            }
            Ok(Leave::Stopped { pc }) if std::mem::take(&mut hooks.is_over) => {
                let landing = tables.heads.iter().find(|(head, _)| *head == pc);
                let no_landing = || ("there is no way out of a loop".to_string(), None);
                landing.map(|(_, landing)| *landing).ok_or_else(no_landing)?
            }
            Ok(Leave::Stopped { pc }) => {
                leave(code, (tables.ways[&pc], state.clone(), machine.clone()), passed, &mut ran)?;
                hooks.passed = Some(pc);
                pc
            }
            Ok(Leave::Fault { pc, fault }) => match tables.ways.get(&pc) {
                Some(out) => *out,
                None => return Err((format!("{pc:#x}: {fault}, without a record"), None)),
            },
            Ok(leave) => return Err((leave.to_string(), None)),
            Err(error) => return Err((error.to_string(), None)),
        };
    }
}

/// Goes on from where the code is left, and compares the guest state that results.
fn leave<'m>(
    code: &mut dyn Lowered,
    (from, mut state, mut machine): Reached<'m>,
    passed: &Passed,
    ran: &mut Ran,
) -> Result<(), Wrong<'m>> {
    let mut steps = MOST_STEPS;
    let left =
        run_base(&mut CodeOf(code), from, &mut state, &mut machine, &mut NoHooks, &mut steps);
    let end = match left {
        Ok(Leave::Goto(to)) => to,
        Ok(leave) => return Err((leave.to_string(), None)),
        Err(error) => return Err((error.to_string(), None)),
    };
    ran.states += 1;
    ran.steps += MOST_STEPS - steps;
    let load = |address: u64| machine.read_context(address);
    let left = code.leave(end, &state, &load);
    let Left { pc, state, stores } = left.map_err(|what| (what, None))?;
    let faults = |(address, size, _): &&(u64, u32, u64)| !machine.can_store(*address, *size);
    if let Some((address, ..)) = stores.iter().find(faults) {
        return Err((format!("its deferred store to {address:#x} faults"), None));
    }
    if passed.contains(pc, digest(&state, &machine, &stores)) {
        return Ok(());
    }
    for &(address, size, value) in &stores {
        // It succeeds, as was seen.
        let _ = machine.store(address, size, value);
    }
    let what = format!("leaves by {from:#x} to {pc:#x} in a state that base does not pass");
    Err((what, Some(Box::new((pc, state, machine)))))
}

/// IR instructions of one run of machine code (guess: more than any trace has in some iterations; loops
/// end by their heads).
const MOST_STEPS: u64 = 4_000_000;

/// The blocks of lowered code alone.
struct CodeOf<'a>(&'a mut dyn Lowered);

impl Code for CodeOf<'_> {
    fn block(&mut self, pc: u64) -> Option<&crate::Version> {
        self.0.block(pc)
    }
}
