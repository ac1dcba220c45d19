//! The property that passes must keep, and its test cases: after a sequence of passes a trace
//! verifies, is equivalent to `base` and is transparent.
//!
//! A [`Case`] is a trace recorded at one head of a random program, with states to check it on. Half
//! of the traces assume `private_memory`. Of the others half run beside a simulated *peer*
//! ([`ModelMachine::share`]), which shows a load that is left out and a store that is deferred or
//! lost. It also shows a load that is repeated because a guard after it falls back to an anchor
//! before it, although that is correct. So in cases with a peer every guard has its own anchor, no
//! anchor is forced, and the stack is not shared (`ret` loads before its guard).
//!
//! All data is a function of the seed. Property tests, the fuzz target `passes` and the mutation
//! tests call this module on values that they own; no lock.
//!
//! ```text
//! holds(&program, 17)  Ok(112 evaluations), or Err(Failure { seed: 17, passes: ["peel"], … })
//! ```

use super::program::Program;
use super::trace::{Options, build_tree, record};
use super::{Rng, generate, shrink};
use crate::eval::check::{Checked, Limits, check, run_base};
use crate::eval::{Hooks, Leave, Machine, ModelMachine, State};
use crate::opt::{OptOptions, PASSES, PIPELINE, pass};
use crate::types::Gpr;
use crate::verify::verify;
use crate::version::{Fact, Version};
use std::fmt;

/// A trace of a program, and where to try it.
pub struct Case {
    /// The trace, not optimised.
    pub trace: Version,
    /// Entry states: the one it was recorded in, and others.
    pub states: Vec<(State, ModelMachine)>,
    /// How much to evaluate.
    pub limits: Limits,
}

/// Most iterations of a loop that become one trace, besides the first.
const MORE_ITERATIONS: usize = 5;

/// Stops at a pc.
struct StopAt(u64);

impl<M: Machine> Hooks<M> for StopAt {
    fn at(&mut self, pc: u64, _state: &State, _machine: &M) -> bool {
        pc == self.0
    }
}

/// A random state. If the array is shared with a peer, the stack lies outside it.
fn entry_state(rng: &mut Rng, shared: bool) -> State {
    let mut state = generate::state(rng);
    let rsp = &mut state.gpr[Gpr::RSP.number()];
    if shared && *rsp < generate::ARRAY + 0x1000 {
        *rsp += 0x1800;
    }
    state
}

/// The case of one head; `None` if the program does not get there or nothing can be recorded there.
pub fn case(program: &mut Program, head: u64, seed: u64) -> Option<Case> {
    // Each head has a random sequence of its own, so that shrinking one part leaves the others as
    // they were.
    let mut rng = Rng::new(seed ^ head);
    let mut machine = generate::machine(&mut rng);
    let private = rng.one_in(2);
    let shared = !private && rng.one_in(2);
    let mut state = entry_state(&mut rng, shared);
    if shared {
        machine.share(generate::ARRAY);
    }
    let stopped =
        run_base(program, Program::pc(0), &mut state, &mut machine, &mut StopAt(head), &mut 5_000);
    if stopped != Ok(Leave::Stopped { pc: head }) {
        return None;
    }
    let mut other = || (entry_state(&mut rng, shared), machine.clone());
    let others = [other(), other()];
    let states = std::iter::once((state.clone(), machine.clone())).chain(others).collect();
    let path = record(program, head, &mut state, &mut machine, 12)?;
    let options =
        Options { peel: rng.one_in(2), older_anchor: if shared { 0 } else { rng.below(4) } };
    let mut paths = vec![path];
    if paths[0].is_loop && rng.one_in(2) {
        // More iterations, which may go other ways.
        for _ in 0..MORE_ITERATIONS {
            let Some(path) = record(program, head, &mut state, &mut machine, 12) else { break };
            let is_loop = path.is_loop;
            paths.push(path);
            if !is_loop {
                break;
            }
        }
    }
    let mut trace = build_tree(&paths, "t1", options, &mut rng)?;
    trace.context.facts.extend(private.then_some(Fact::PrivateMemory));
    Some(Case {
        trace,
        states,
        limits: Limits { steps: 3_000, forced: if shared { 0 } else { 12 } },
    })
}

/// A random sequence of passes; in one of four cases the pipeline.
pub fn passes(rng: &mut Rng) -> Vec<&'static str> {
    if rng.one_in(4) {
        return PIPELINE.to_vec();
    }
    (0..1 + rng.below(6)).map(|_| PASSES[rng.below(PASSES.len())].name).collect()
}

/// What is wrong with a version after the passes.
#[derive(Clone, Debug)]
pub enum Wrong {
    /// The verifier refuses it.
    Verifier(String),
    /// It behaves differently from `base`.
    Checker(String),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Verifier(what) => write!(f, "verifier: {what}"),
            Wrong::Checker(what) => write!(f, "checker: {what}"),
        }
    }
}

/// Runs the passes on a copy of the case's trace, verifying after each.
pub fn optimised(case: &Case, passes: &[&str]) -> Result<Version, Wrong> {
    let mut version = case.trace.clone();
    for pass in passes.iter().filter_map(|name| pass(name)) {
        pass.run(&mut version, &OptOptions::default());
        verify(&version)
            .map_err(|e| Wrong::Verifier(format!("after {}: {}\n{version}", pass.name, e[0])))?;
    }
    Ok(version)
}

/// Compares a version of the case's trace with `base` on every state; counts the evaluations.
pub fn agrees(program: &mut Program, case: &Case, version: &Version) -> Result<u64, Wrong> {
    let mut evaluations = 0;
    for (state, machine) in &case.states {
        match check(program, version, state, machine, case.limits) {
            Ok(Checked::Compared { evaluations: n, .. }) => evaluations += n,
            Ok(Checked::ContextFails) => {}
            Err(mismatch) => return Err(Wrong::Checker(mismatch.to_string())),
        }
    }
    Ok(evaluations)
}

/// A failure, with all that is needed to reproduce it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Of the program and the dice.
    pub seed: u64,
    /// The program.
    pub program: Program,
    /// The trace before the passes, as text.
    pub trace: String,
    /// The passes.
    pub passes: Vec<&'static str>,
    /// What is wrong after them.
    pub wrong: Wrong,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let passes = self.passes.join(",");
        writeln!(
            f,
            "seed {}: after --passes {passes}\n{}\nthe program:\n{:?}",
            self.seed, self.wrong, self.program
        )?;
        write!(f, "before the passes:\n{}", self.trace)
    }
}

/// Checks every case of one program, each with its own passes. Returns the number of evaluations.
///
/// A failure is returned as it was found; [`Failure::shrunk`] makes it small.
pub fn holds(program: &Program, seed: u64) -> Result<u64, Box<Failure>> {
    let mut evaluations = 0;
    for head in generate::heads(program) {
        evaluations += holds_at(program, head, seed, &passes(&mut Rng::new(!seed ^ head)))?;
    }
    Ok(evaluations)
}

fn holds_at(
    program: &Program,
    head: u64,
    seed: u64,
    passes: &[&'static str],
) -> Result<u64, Box<Failure>> {
    let mut program = program.clone();
    let Some(case) = case(&mut program, head, seed) else { return Ok(0) };
    let result = optimised(&case, passes).and_then(|version| agrees(&mut program, &case, &version));
    result.map_err(|wrong| {
        Box::new(Failure {
            seed,
            program,
            trace: case.trace.to_string(),
            passes: passes.to_vec(),
            wrong,
        })
    })
}

impl Failure {
    /// The same failure with as few instructions and passes as possible.
    pub fn shrunk(self) -> Failure {
        let seed = self.seed;
        let program = shrink(&self.program, |p| holds(p, seed).is_err());
        let Err(mut best) = holds(&program, seed) else { return self };
        let Some(head) = generate::heads(&best.program)
            .into_iter()
            .find(|head| holds_at(&best.program, *head, seed, &best.passes).is_err())
        else {
            return *best;
        };
        let mut i = 0;
        while i < best.passes.len() {
            let mut fewer = best.passes.clone();
            fewer.remove(i);
            match holds_at(&best.program, head, seed, &fewer) {
                Err(smaller) => best = smaller,
                Ok(_) => i += 1,
            }
        }
        *best
    }
}
