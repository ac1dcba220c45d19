//! Records the iterations of a loop that leave its recorded path and come back to its head, while it is
//! observed how often the guest keeps to the path ([`crate::survival`]).
//!
//! An iteration *parts* from the path behind one of its steps. From there on its blocks are recorded. If
//! it reaches the head it is complete, and is compared with those recorded before. Those that come often
//! become part of the trace ([`crate::build`]). The values that blocks compute may differ even where an
//! iteration goes the path's way. So those of a loop of an interpreted program, which the trace may assume,
//! are observed from the head on.
//!
//! ```text
//! path a b c      a b c, a b d, a e, a b d      a b d came twice, a e once
//! ```
//!
//! Data: [`Iterations`], part of the observation. Invariant: the steps of a complete iteration are the
//! blocks that the guest executed from the head to the head. Callers: the observation, on the recording
//! thread; no lock.

use crate::build::{self, Path, Step};
use crate::recorder::{note_results, observe};
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
    seen: Vec<Seen>,
    /// What the blocks of the iteration under way were observed to compute, as long as it keeps to the path.
    before: Vec<Prediction>,
    current: Option<Current>,
}

impl Iterations {
    /// None yet. At most so many are chosen in the end, the path among them.
    pub fn new(most: usize) -> Iterations {
        Iterations { most, seen: Vec::new(), before: Vec::new(), current: None }
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
        self.current =
            Some(Current { parts, before, steps, instructions, passed, block, observation });
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
        if to.refused.is_some() || current.instructions > MOST_BEHIND {
            return self.interrupted();
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

    /// The guest is at the head of the loop, to which it has come back soon.
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
