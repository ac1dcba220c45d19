//! Decides whether a trace is worth having where the code that it replaces runs as copied blocks.
//!
//! Copied code runs at the speed of the guest's own code, except for its indirect transfers. A
//! trace that saves less than its entries and exits cost makes the guest slower, and making it
//! costs as much as executing it some hundred thousand times. So a recorded path is judged three
//! times, each time with more knowledge:
//! * as it was recorded, by what a trace could save at best ([`Judge::promises`]); most paths of
//!   optimised code are refused here;
//! * by how often the guest was seen to keep to the path ([`crate::survival`]);
//! * as a fragment, by the cost of its code and of the blocks' ([`dynasour_guest::cost`]):
//!   [`Judge::pays`].
//!
//! A path that is left by few exits, and whose head is reached again soon, will have side traces.
//! Together they are a *tree*. What a tree saves on accesses to memory counts little, because such
//! loops spend their time on mispredicted branches.
//!
//! Where code is interpreted until it is executed often, traces are made early and only the last
//! judgement is made. Linear traces of unoptimised code pay together if at all: each continues in
//! others, and without it the others would have to leave to the runtime. So such a trace is taken
//! if it costs no more than its blocks.
//!
//! Data: none. Any thread may call these functions; they take no lock. Invariant: all arithmetic is
//! in whole numbers, because inexact results would show in the guest's MXCSR, which the processor
//! has while this code runs.
//!
//! Example: the blocks of a loop cost 40, of which 30 access the frame. At best a trace may save
//! those 30 and 15 % of the other 10, which is more than 4 % of 40: it promises something. Its
//! code costs 15, and the guest was seen to go round 50 times per entry: it pays.

use crate::build::{Path, Step, TraceShape, instructions};
use crate::survival::Runs;
use dynasour_guest::cost::{self, Cost};
use dynasour_ir::{GuestTerm, Term};

/// Copies guest memory at an address to a buffer. Returns the number of bytes copied.
pub type Read = fn(u64, &mut [u8]) -> usize;

// Costs are in the unit of `dynasour_guest::cost`: a register operation. All are guesses that were
// tuned on the suites of `benches/suites`. If a cost or a share that must be saved is too low,
// traces are kept that make the guest slower; if it is too high, traces are refused that would make
// it faster.

/// Cost of an indirect transfer of copied blocks beyond the instruction: jump and checked entry.
const INDIRECT: i64 = 8;
/// Cost of an indirect transfer of the guest's own code beyond the instruction.
const INDIRECT_IN_PLACE: i64 = 2;
/// The same if the trace is going to race with the code that it replaces: what the transfer costs if the
/// processor does not predict its target. Whether it does, the race finds out.
const INDIRECT_RACING: i64 = 20;
/// Cost of entering and leaving a fragment.
const ENTRY_AND_EXIT: i64 = 30;
/// Cost of an entry that is left at the first guard, because an interpreted program is elsewhere.
const PASSING: i64 = 10;
/// Cost of an exit to a side trace.
const SIDE_EXIT: i64 = 8;
/// Percent of the blocks' cost that a loop must save. The unit does not know that a value which goes through
/// memory around a loop comes late, so a loop may save more than that: the race finds out. (Measured on the
/// kernel `sieve` at -O0, one of whose loops saves 6 %: .84 of the native time with its trace, .90 without.)
const LEAST: i64 = 4;
/// The same for a tree.
const LEAST_TREE: i64 = 10;
/// Percent of the blocks' cost that a linear trace must save. It is more than for a loop, because
/// the trace is entered and left at each execution.
const LEAST_LINEAR: i64 = 25;
/// Percent that a trace may save of the cost that is neither an access to a frame nor an indirect
/// transfer.
const ORDINARY: i64 = 15;
/// The same for a loop of an interpreted program, whose dispatches and decoding may disappear.
const ORDINARY_GUEST: i64 = 50;
/// Percent that counts of what a tree saves otherwise than on indirect transfers.
const TREE: i64 = 30;
/// Code with at least this percentage of its cost in accesses to frames has not been optimised.
const UNOPTIMISED: i64 = 50;
/// Assumed for a loop that was not observed: 50 iterations per entry.
const UNOBSERVED_LOOP: Runs = Runs { entered: 1, completed: 50, returned: 0, passed: 0 };
/// Assumed for a linear path that was not observed: each entry completes it.
const UNOBSERVED_LINE: Runs = Runs { entered: 1, completed: 1, returned: 0, passed: 0 };

/// May a trace of the function at `pc` be worth making? Such a trace is entered and left at each
/// call. Only a function that keeps its variables in a frame saves more than that costs.
pub fn keeps_a_frame(pc: u64, read: Read) -> bool {
    const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
    // push rbp; mov rbp, rsp
    const FRAME: [u8; 4] = [0x55, 0x48, 0x89, 0xe5];
    let mut bytes = [0; 8];
    let len = read(pc, &mut bytes);
    let bytes = &bytes[..len];
    bytes.strip_prefix(&ENDBR64).unwrap_or(bytes).starts_with(&FRAME)
}

/// Judges paths and their traces.
#[derive(Clone, Copy, Debug)]
pub struct Judge {
    /// Reads guest code.
    pub read: Read,
    /// Do traces replace the guest's own code, where it stands? Otherwise they replace copied
    /// blocks.
    pub in_place: bool,
}

impl Judge {
    /// May a trace of this path be worth making?
    pub fn promises(&self, path: &Path) -> bool {
        let (cost, indirect) = self.of_blocks(path, false);
        let (all, frames) = (i64::from(cost.all), i64::from(cost.frames));
        let percent = if path.guest.is_some() { ORDINARY_GUEST } else { ORDINARY };
        suffices(path, all + indirect, frames + (all - frames) * percent / 100, indirect)
    }

    /// Is a fragment of this cost worth having? A side trace (`side`) and a linear fragment of
    /// unoptimised code are linked to other fragments, so entering and leaving them costs little. One that
    /// `races` is dropped if it is not.
    pub fn pays(&self, path: &Path, cost: u32, side: bool, races: bool) -> bool {
        let (blocks, indirect) = self.of_blocks(path, races);
        let linked = side || is_unoptimised(path, blocks);
        let (blocks, cost) = (i64::from(blocks.all), i64::from(of_one(path, cost)));
        if linked {
            cost < blocks + indirect + SIDE_EXIT
        } else {
            suffices(path, blocks + indirect, blocks - cost, indirect)
        }
    }

    /// The figures by which [`Judge::pays`] judges, for the log.
    pub fn figures(&self, path: &Path, cost: u32) -> String {
        let (blocks, indirect) = self.of_blocks(path, false);
        format!("costs {cost}, its blocks {} + {indirect}, {:?}", blocks.all, path.runs)
    }

    /// The cost of the copied blocks of a path, and the additional cost of those of their indirect
    /// transfers that a trace does not perform. For several executions of a function the mean.
    fn of_blocks(&self, path: &Path, races: bool) -> (Cost, i64) {
        let (mut sum, mut indirect) = (Cost::default(), 0);
        let executions = executions(path);
        for steps in &executions {
            let (cost, of_transfers) = self.of_steps(steps, path.shape, races);
            sum.all += cost.all;
            sum.frames += cost.frames;
            indirect += of_transfers;
        }
        let count = executions.len() as u32;
        (Cost { all: sum.all / count, frames: sum.frames / count }, indirect / i64::from(count))
    }

    /// The same for these steps.
    fn of_steps(&self, steps: &[Step], shape: TraceShape, races: bool) -> (Cost, i64) {
        let (mut sum, mut indirect) = (Cost::default(), 0);
        let each = match self.in_place {
            _ if races => INDIRECT_RACING,
            true => INDIRECT_IN_PLACE,
            false => INDIRECT,
        };
        for (n, step) in steps.iter().enumerate() {
            let block = &step.block;
            let mut bytes = vec![0; (block.end - block.pc) as usize];
            let len = (self.read)(block.pc, &mut bytes);
            let cost = cost::of_code(&bytes[..len]);
            sum.all += cost.all;
            sum.frames += cost.frames;
            let is_indirect = match &block.version.blocks[0].term {
                Term::Guest(GuestTerm::Goto(to) | GuestTerm::Call { target: to, .. }) => {
                    to.as_const().is_none()
                }
                Term::Guest(GuestTerm::Ret(_)) => true,
                _ => false,
            };
            // A linear trace performs the transfer that it ends with.
            if is_indirect && (n + 1 < steps.len() || shape == TraceShape::Loop) {
                indirect += each;
            }
        }
        (sum, indirect)
    }
}

/// The executions of a function that the path holds, or only the path.
fn executions(path: &Path) -> Vec<&[Step]> {
    let others = path.others.iter().filter(|_| path.shape == TraceShape::Linear);
    std::iter::once(&path.steps[..]).chain(others.map(|steps| &steps[..])).collect()
}

/// Of the cost of a fragment that holds several executions of a function, about what one of them takes.
fn of_one(path: &Path, cost: u32) -> u32 {
    let executions = executions(path);
    if executions.len() == 1 {
        return cost;
    }
    let executed: u64 = executions.iter().map(|steps| instructions(steps)).sum();
    let held = path.instructions().max(1) * executions.len() as u64;
    (u64::from(cost) * executed / held) as u32
}

/// Is this a linear path of unoptimised code? Only paths that were recorded early count; those are
/// not observed.
fn is_unoptimised(path: &Path, blocks: Cost) -> bool {
    let early = path.runs.is_none() && path.shape == TraceShape::Linear;
    early && 100 * i64::from(blocks.frames) >= UNOPTIMISED * i64::from(blocks.all)
}

/// Does a trace of a path that costs `all` save enough, if each execution saves `indirect` on
/// indirect transfers and `ordinary` on everything else?
fn suffices(path: &Path, all: i64, ordinary: i64, indirect: i64) -> bool {
    let unobserved =
        if path.shape == TraceShape::Linear { UNOBSERVED_LINE } else { UNOBSERVED_LOOP };
    let runs = path.runs.unwrap_or(unobserved);
    let [entered, completed, returned, passed] =
        [runs.entered, runs.completed, runs.returned, runs.passed].map(i64::from);
    let exceeds = |saved: i64, percent: i64, times: i64| 100 * saved > percent * times * all;
    if path.shape == TraceShape::Linear {
        return exceeds(
            completed * (ordinary + indirect / 2) - entered.max(1) * ENTRY_AND_EXIT,
            LEAST_LINEAR,
            completed,
        );
    }
    let entries = entered.max(1) * ENTRY_AND_EXIT + passed * PASSING;
    let saved = completed * (ordinary + indirect) - entries;
    let pays_alone = exceeds(saved, LEAST, completed);
    if path.guest.is_some() {
        // Its exits lead on in the interpreted program; few of them lead back to this loop.
        return pays_alone;
    }
    // In a tree, a way out that returns to the head is a side trace, so it is not a new entry.
    let (rounds, entries) = (entered + completed, (entered - returned).max(1));
    let tree = rounds * (100 * indirect + TREE * ordinary) / 100;
    pays_alone
        || exceeds(tree - returned * SIDE_EXIT - entries * ENTRY_AND_EXIT, LEAST_TREE, rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(shape: TraceShape, runs: Option<Runs>) -> Path {
        Path {
            head: 0x1000,
            shape,
            steps: Vec::new(),
            stable: Vec::new(),
            guest: None,
            entry: Box::default(),
            others: Vec::new(),
            runs,
        }
    }

    fn runs(entered: u32, completed: u32, returned: u32) -> Option<Runs> {
        Some(Runs { entered, completed, returned, passed: 0 })
    }

    #[test]
    fn loops_must_save_something_and_go_round() {
        let pays = |runs, saved| suffices(&path(TraceShape::Loop, runs), 50, saved, 0);
        assert!(pays(runs(1, 100, 0), 10));
        assert!(!pays(runs(1, 100, 0), 2), "too little");
        assert!(!pays(runs(50, 25, 0), 25), "hardly ever all the way");
        assert!(pays(None, 10));
    }

    #[test]
    fn loops_that_are_left_and_come_back_save_on_indirect_transfers() {
        let pays = |back, ordinary, indirect| {
            suffices(&path(TraceShape::Loop, runs(50, 25, back)), 80, ordinary, indirect)
        };
        assert!(pays(48, 0, 24));
        assert!(!pays(48, 32, 0));
        assert!(!pays(0, 0, 24), "they do not come back");
    }

    #[test]
    fn what_ends_must_save_more() {
        let pays = |saved| suffices(&path(TraceShape::Linear, None), 200, saved, 0);
        assert!(pays(100) && !pays(70));
    }

    #[test]
    fn unoptimised_code_is_known_by_its_frames() {
        let blocks = |frames| Cost { all: 40, frames };
        assert!(is_unoptimised(&path(TraceShape::Linear, None), blocks(20)));
        assert!(!is_unoptimised(&path(TraceShape::Linear, None), blocks(19)));
        assert!(
            !is_unoptimised(&path(TraceShape::Loop, None), blocks(30)),
            "loops pay by themselves"
        );
        assert!(
            !is_unoptimised(&path(TraceShape::Linear, runs(1, 1, 0)), blocks(30)),
            "this one was observed"
        );
    }

    #[test]
    fn functions_with_frames_are_known_by_how_they_begin() {
        const CODE: [[u8; 8]; 3] = [
            [0x55, 0x48, 0x89, 0xe5, 0x90, 0x90, 0x90, 0x90],
            [0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0x48, 0x89, 0xe5],
            [0x41, 0x57, 0x41, 0x56, 0x90, 0x90, 0x90, 0x90],
        ];
        let read: Read = |pc, buffer| {
            buffer.copy_from_slice(&CODE[pc as usize]);
            buffer.len()
        };
        assert_eq!([0, 1, 2].map(|pc| keeps_a_frame(pc, read)), [true, true, false]);
    }
}
