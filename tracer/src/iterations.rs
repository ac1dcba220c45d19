//! Records the iterations of a loop that leave its recorded path and come back to its head, while it is
//! observed how often the guest keeps to the path ([`crate::survival`]); or the executions of a function that
//! leave its path and return.
//!
//! An iteration *parts* from the path behind one of its steps. From there on its blocks are recorded. If
//! it reaches the head it is complete, and is compared with those recorded before. Those that come often
//! become part of the trace ([`crate::build`]). The values that blocks compute may differ even where an
//! iteration goes the path's way. So those of a loop of an interpreted program, which the trace may assume,
//! are observed from the head on.
//!
//! An execution of a function is complete when the function returns, to whichever caller. Calls of the function
//! itself are part of it, up to some depth ([`crate::calls`]); an execution that calls deeper is not recorded.
//!
//! ```text
//! path a b c      a b c, a b d, a e, a b d      a b d came twice, a e once
//! ```
//!
//! Data: [`Iterations`], part of the observation. Invariant: the steps of a complete iteration are the
//! blocks that the guest executed from the head to the head. Callers: the observation, on the recording
//! thread; no lock.

use crate::build::{self, Path, Step};
use crate::calls::Calls;
use crate::recorder::{Transfer, note_results, observe};
use crate::selector::NextBlock;
use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::predict::{Prediction, Surroundings};
use std::sync::Arc;

/// Most different iterations that are told apart (guess: a loop with more has no hot paths).
const MOST_KNOWN: usize = 32;
/// One in this many iterations must be the same for it to become part of the trace (guess: a rarer one
/// costs code and compile time, and saves a side trace's way back into the loop).
const RARE: u32 = 25;
/// Most guest instructions of an iteration behind the place where it parts (guess, as for
/// [`MOST_INSTRUCTIONS`]).
const MOST_BEHIND: usize = 2000;
/// Most guest instructions of a trace with several iterations (guess: bounds the time to compile it).
const MOST_INSTRUCTIONS: u64 = 12_000;

/// An iteration that was seen.
#[derive(Debug)]
struct Seen {
    /// The step of the path behind which it parts, and where it goes from there.
    parts: (usize, u64),
    /// What the blocks before were observed to compute; empty if that is not observed.
    before: Vec<Prediction>,
    /// The steps from there on.
    steps: Vec<Step>,
    times: u32,
    /// How often it came back to the head soon.
    returned: u32,
    /// How often the guest passed the head on the way, elsewhere in an interpreted program; in all its
    /// times.
    passed: u32,
}

impl Seen {
    /// Does it go the same way?
    fn is_like(&self, other: &Seen) -> bool {
        self.parts == other.parts
            && self.steps.len() == other.steps.len()
            && build::parts_at(&self.steps, &other.steps).is_none()
    }

    /// With the steps of the path before it parts.
    fn whole(self, path: &Path) -> Often {
        let Seen { parts: (n, next), times, returned, passed, .. } = self;
        let mut steps = path.steps[..=n].to_vec();
        steps[n].next = next;
        for (step, observed) in steps.iter_mut().zip(self.before) {
            step.observed = Some(observed);
        }
        steps.extend(self.steps);
        Often { steps, times, returned, passed }
    }
}

/// The iteration under way.
#[derive(Debug)]
struct Current {
    parts: (usize, u64),
    /// See [`Seen`].
    before: Vec<Prediction>,
    steps: Vec<Step>,
    instructions: usize,
    /// See [`Seen`].
    passed: u32,
    /// The block that is being executed, and what it was predicted to compute.
    block: Arc<LiftedBlock>,
    observation: Option<Prediction>,
    /// The functions that are active, in an execution of a function.
    calls: Option<Calls>,
}

impl Current {
    /// The last step leads here. Does it complete an execution of a function? Nothing if the path does not
    /// follow it.
    fn transfers(&mut self, to: u64) -> Option<bool> {
        let (Some(calls), Some(step)) = (&mut self.calls, self.steps.last()) else {
            return Some(false);
        };
        transfers(calls, step, to)
    }
}

/// A step leads here, in an execution of a function. Is the execution complete? Nothing if a path does not follow
/// the step.
fn transfers(calls: &mut Calls, step: &Step, to: u64) -> Option<bool> {
    match Transfer::of(&step.block, to) {
        Transfer::Call if !calls.may_follow(to) => return None,
        Transfer::Call => calls.call(to),
        Transfer::Return => return Some(calls.ret()),
        _ => {}
    }
    Some(false)
}

/// The functions that are active where an execution parts behind the n-th step, and goes on here. None if a path
/// does not follow it.
fn calls_until(path: &Path, n: usize, to: u64) -> Option<Calls> {
    let mut calls = Calls::new(path.head, true);
    for (at, step) in path.steps[..=n].iter().enumerate() {
        let next = if at == n { to } else { step.next };
        transfers(&mut calls, step, next).filter(|complete| !complete)?;
    }
    Some(calls)
}

/// An iteration that came often.
pub(crate) struct Often {
    /// All its steps.
    pub steps: Vec<Step>,
    /// How often it came.
    pub times: u32,
    /// How often it came back to the head soon.
    pub returned: u32,
    /// How often the guest passed the head on the way, in all its times.
    pub passed: u32,
}

/// The iterations that have left a path.
#[derive(Debug)]
pub(crate) struct Iterations {
    /// The most iterations that are chosen.
    most: usize,
    /// Are they executions of a function?
    pub is_function: bool,
    /// Where the last step of each execution of the function is said to lead: to the caller that was seen first.
    returns_to: Option<u64>,
    seen: Vec<Seen>,
    /// What the blocks of the iteration under way were observed to compute, as long as it keeps to the path.
    before: Vec<Prediction>,
    current: Option<Current>,
}

impl Iterations {
    /// None yet. At most so many are chosen in the end, the path among them.
    pub fn of_loop(most: usize) -> Iterations {
        let (is_function, returns_to) = (false, None);
        Iterations {
            most,
            is_function,
            returns_to,
            seen: Vec::new(),
            before: Vec::new(),
            current: None,
        }
    }

    /// The same for executions of a function; that of the path returns there, if it returns.
    pub fn of_function(most: usize, returns_to: Option<u64>) -> Iterations {
        Iterations { is_function: true, returns_to, ..Iterations::of_loop(most) }
    }

    /// Is an execution of a function under way that has left the path?
    pub fn is_in_function(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.calls.is_some())
    }

    /// The guest keeps to the path, a loop of an interpreted program. Its n-th step's block is executed next,
    /// in the state `around`.
    pub fn keep(&mut self, path: &Path, n: usize, around: &Surroundings<'_>) {
        self.before.truncate(n);
        // The observation may have begun after the head's block was executed.
        if self.most < 2 || self.before.len() != n {
            return;
        }
        self.note_results(path, around);
        if let Some(step) = path.steps.get(n) {
            self.before.push(observe(&step.block, around));
        }
    }

    /// The block that was observed last has been executed, and this is the state after it.
    fn note_results(&mut self, path: &Path, around: &Surroundings<'_>) {
        if let Some(n) = self.before.len().checked_sub(1) {
            note_results(&path.steps[n].block, &mut self.before[n], around);
        }
    }

    /// The guest leaves the path behind its n-th step and executes the block `to` next. If the path is a
    /// loop of an interpreted program, the values of the blocks are observed.
    pub fn begin(&mut self, path: &Path, n: usize, to: &NextBlock<'_>, around: &Surroundings<'_>) {
        self.note_results(path, around);
        let before = std::mem::take(&mut self.before);
        let is_guest = path.guest.is_some();
        if to.refused.is_some() || self.most < 2 || is_guest && before.len() != n + 1 {
            return;
        }
        let block = (to.lifted)();
        let observation = is_guest.then(|| observe(&block, around));
        let parts = (n, to.pc);
        let (steps, instructions, passed) = (Vec::new(), 0, 0);
        let calls = match self.is_function {
            true => calls_until(path, n, to.pc),
            false => None,
        };
        if self.is_function && calls.is_none() {
            return;
        }
        self.current =
            Some(Current { parts, before, steps, instructions, passed, block, observation, calls });
    }

    /// The block `to` is executed next.
    pub fn go_on(&mut self, to: &NextBlock<'_>, around: &Surroundings<'_>) {
        let Some(current) = &mut self.current else { return };
        current.instructions += current.block.count as usize;
        let is_guest = current.observation.is_some();
        let mut observed = current.observation.take();
        if let Some(observed) = &mut observed {
            note_results(&current.block, observed, around);
        }
        current.steps.push(Step { block: Arc::clone(&current.block), next: to.pc, observed });
        match current.transfers(to.pc) {
            Some(true) => {
                let returns_to = *self.returns_to.get_or_insert(to.pc);
                if let Some(last) = current.steps.last_mut() {
                    last.next = returns_to;
                }
                return self.complete(false);
            }
            Some(false) if to.refused.is_none() && current.instructions <= MOST_BEHIND => {}
            _ => return self.interrupted(),
        }
        current.block = (to.lifted)();
        current.observation = is_guest.then(|| observe(&current.block, around));
    }

    /// The guest passes the head elsewhere in an interpreted program.
    pub fn pass(&mut self) {
        if let Some(current) = &mut self.current {
            current.passed += 1;
        }
    }

    /// The iteration is not recorded any further.
    pub fn interrupted(&mut self) {
        self.before.clear();
        self.current = None;
    }

    /// The guest is at the head of the loop, to which it has come back `soon`, or the function returns.
    pub fn complete(&mut self, soon: bool) {
        let Some(current) = self.current.take() else { return };
        let Current { parts, before, steps, passed, .. } = current;
        let new = Seen { parts, before, steps, times: 1, returned: u32::from(soon), passed };
        let has_room = self.seen.len() < MOST_KNOWN;
        match self.seen.iter_mut().find(|seen| seen.is_like(&new)) {
            Some(seen) => {
                seen.times += 1;
                seen.returned += new.returned;
                seen.passed += new.passed;
            }
            None if has_room => self.seen.push(new),
            None => {}
        }
    }

    /// The iterations that came often among `all`, the most frequent first, as far as they fit into one
    /// trace. The path itself, which came `completed` times, may be among them. Empty if no other came
    /// often.
    pub fn often(&mut self, path: &Path, completed: u32, all: u32) -> Vec<Often> {
        let comes_often = |times: u32| times > 1 && times * RARE >= all;
        let mut often: Vec<Often> = std::mem::take(&mut self.seen)
            .into_iter()
            .filter(|seen| comes_often(seen.times))
            .map(|seen| seen.whole(path))
            .collect();
        if often.is_empty() {
            return often;
        }
        if comes_often(completed) {
            let steps = path.steps.clone();
            often.insert(0, Often { steps, times: completed, returned: 0, passed: 0 });
        }
        often.sort_by_key(|often| std::cmp::Reverse(often.times));
        often.truncate(self.most);
        let mut instructions = 0;
        let fits = (0..often.len()).take_while(|&n| {
            let steps = &often[n].steps;
            let shared = often[..n].iter().filter_map(|o| build::parts_at(&o.steps, steps)).max();
            instructions += match shared {
                Some(at) => build::instructions(&steps[at + 1..]),
                // The first one stands before the loop, too.
                None => 2 * build::instructions(steps),
            };
            n == 0 || instructions <= MOST_INSTRUCTIONS
        });
        let fits = fits.count();
        often.truncate(fits);
        often
    }
}
