//! Machine code of a version, compared with what was recorded: the code is lifted back into IR by
//! whoever knows how, and run in the evaluator like the version itself.
//!
//! The code has registers, spill slots and records of its own, so that only the states in which it
//! leaves are compared: at ends, failed guards, faults, and at the loop's safe point. There the way out
//! is followed as the runtime follows it ([`Lowered::leave`]). Where it could leave ([`Lowered::ways`]) but
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
    /// The address at which it is entered.
    fn entry(&self) -> u64;

    /// The addresses of the thread's context, which GS points to.
    fn context(&self) -> Range<u64>;

    /// The host's state at entry for a guest state; segments are the bases of FS and GS.
    fn enter(&self, state: &State, segments: [u64; 2]) -> Entered;

    /// The loops' heads, and for each the address to go on at when control is to leave there.
    fn heads(&self) -> &[(u64, u64)];

    /// The natives of the version, by their host addresses.
    fn natives(&self) -> &FxHashMap<u64, HostNative>;

    /// The instructions at which control may leave: guards, and what may fault. For each the address to go
    /// on at.
    fn ways(&self) -> &FxHashMap<u64, u64>;

    /// The guest state when control has left the code to `at`. `load` reads words of the context.
    ///
    /// # Errors
    /// Control cannot be there.
    fn leave(&self, at: u64, state: &State, load: &dyn Fn(u64) -> u64) -> Result<Left, String>;
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
    let mut tried = Tried { code, forced: FxHashMap::default() };
    let compare =
        |validation: &mut Validation<'_>, case: &Case| validation.compare_code(&mut tried, case);
    let report = walk(Validation::new(subject), limits, compare)?;
    let taken = tried.forced.len() as u64;
    Ok(Report { exits: [tried.code.ways().len() as u64, taken], guards: 0, ..report })
}

/// Stops where control may leave.
struct Ways<'a> {
    heads: &'a [(u64, u64)],
    /// How often a head may still be reached.
    left: u64,
    ways: &'a FxHashMap<u64, u64>,
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
        if self.left > 0 && self.heads.iter().any(|(head, _)| *head == pc) {
            self.left -= 1;
            if self.left == 0 {
                self.is_over = true;
                return true;
            }
        }
        self.ways.contains_key(&pc) && self.is_wanted(pc)
    }
}

/// How often each way out of the code is taken by force, in all cases together (guess: later ones show the
/// same).
const MOST_FORCED: u32 = 4;

/// Machine code, and how often each way out of it may still be taken by force.
struct Tried<'c> {
    code: &'c mut dyn Lowered,
    forced: FxHashMap<u64, u32>,
}

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
        let (passed, _) = self.base_from(entered.pc.unwrap_or(version.region), &entry);
        let (case, before) = (&entry, case);
        let Err(what) = self.run_code(tried, (case, before), entered, &passed) else {
            return Ok(());
        };
        let setup = case.setup(&self.memory);
        let what = format!("the machine code of {}: {what}", self.subject.optimised.name);
        Err(Box::new(Disagreement { what, forced: None, built: false, setup, case: case.clone() }))
    }

    fn run_code(
        &mut self,
        Tried { code, forced }: &mut Tried<'_>,
        (case, before): (&Case, &Case),
        entered: Entered,
        passed: &Passed,
    ) -> Result<(), String> {
        let (natives, ways) = (code.natives().clone(), code.ways().clone());
        let heads = code.heads().to_vec();
        let mut machine =
            Shadow::of_host(case, &self.memory, self.subject.optimised, code.context(), &natives);
        let Entered { words, host: mut state, stores, .. } = entered;
        words.into_iter().for_each(|(address, word)| machine.write_context(address, word));
        machine.undo(&stores, before);
        let left = self.iterations() + 1;
        let mut hooks =
            Ways { heads: &heads, left, ways: &ways, forced, passed: None, is_over: false };
        let mut at = code.entry();
        let mut steps = MOST_STEPS;
        let mut others = Vec::new();
        let end = loop {
            let mut lifted = CodeOf(&mut **code);
            let left = run_base(&mut lifted, at, &mut state, &mut machine, &mut hooks, &mut steps);
            at = match left {
                Ok(Leave::Goto(to)) => break to,
                Ok(Leave::Stopped { pc }) if std::mem::take(&mut hooks.is_over) => {
                    let landing = heads.iter().find(|(head, _)| *head == pc);
                    landing.map(|(_, landing)| *landing).ok_or("no way out of a loop")?
                }
                Ok(Leave::Stopped { pc }) => {
                    others.push((ways[&pc], state.clone(), machine.clone()));
                    hooks.passed = Some(pc);
                    pc
                }
                Ok(Leave::Fault { pc, fault }) => match ways.get(&pc) {
                    Some(out) => *out,
                    None => return Err(format!("{pc:#x}: {fault}, without a record")),
                },
                Ok(leave) => return Err(leave.to_string()),
                Err(error) => return Err(error.to_string()),
            };
        };
        others.push((end, state, machine));
        for (at, mut state, mut machine) in others {
            let mut lifted = CodeOf(&mut **code);
            let left =
                run_base(&mut lifted, at, &mut state, &mut machine, &mut NoHooks, &mut steps);
            let end = match left {
                Ok(Leave::Goto(to)) => to,
                Ok(leave) => return Err(leave.to_string()),
                Err(error) => return Err(error.to_string()),
            };
            self.report.states += 1;
            let load = |address: u64| machine.read_context(address);
            let Left { pc, state, stores } = code.leave(end, &state, &load)?;
            let faults =
                |(address, size, _): &&(u64, u32, u64)| !machine.can_store(*address, *size);
            if let Some((address, ..)) = stores.iter().find(faults) {
                return Err(format!("its deferred store to {address:#x} faults"));
            }
            if !passed.contains(pc, digest(&state, &machine, &stores)) {
                for &(address, size, value) in &stores {
                    // It succeeds, as was seen.
                    let _ = machine.store(address, size, value);
                }
                let Subject { code, built, .. } = &mut self.subject;
                let before = Shadow::new(case, &self.memory, built);
                let nearest =
                    nearest(&mut **code, built, &case.state, before, (pc, &state, &machine));
                let what = "in a state that base does not pass";
                return Err(format!("leaves by {at:#x} to {pc:#x} {what}: {nearest}"));
            }
        }
        self.report.steps += MOST_STEPS - steps;
        Ok(())
    }
}

/// IR instructions of one run of machine code (guess: more than any trace has in some iterations; loops
/// end by their heads).
const MOST_STEPS: u64 = 2_000_000;

/// The blocks of lowered code alone.
struct CodeOf<'a>(&'a mut dyn Lowered);

impl Code for CodeOf<'_> {
    fn block(&mut self, pc: u64) -> Option<&crate::Version> {
        self.0.block(pc)
    }
}
