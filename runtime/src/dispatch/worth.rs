//! Is a trace worth having where what it replaces runs as copied blocks?
//!
//! Copied code runs at the speed of the guest's own, but for its indirect transfers. A trace that
//! saves less than its way in and out costs makes the guest slower, and making it costs as much as
//! executing it some hundred thousand times. So a recorded path is judged three times, each time by
//! more:
//! * as it was recorded, by what a trace could save at best ([`promises`]): most paths of optimised
//!   code end here;
//! * by how well the guest was seen to keep to it ([`dynasour_tracer::survival`]);
//! * as a fragment, by the weight of its code and of the blocks' ([`dynasour_emitter::cost`]):
//!   [`pays`].
//!
//! What is left and come back to by few ways will have side traces. What such a *tree* saves on
//! accesses to memory counts little, for the time of such loops goes into branches that are
//! predicted wrongly.
//!
//! Where cold code is interpreted traces are made early, and of these only the last is asked. Those
//! of unoptimised code that end pay together if at all: each goes on in others, and without it they
//! would have to leave. One that costs no more than its blocks is taken.
//!
//! And all that judging may only take a small part of the time ([`Effort`]), which gets smaller the
//! more is refused in a row: the heads that are executed most are hot first, so where none of those
//! was worth a trace the others are hardly.

use crate::config::RunConfig;
use crate::memory;
use dynasour_emitter::cost::{self, Cost};
use dynasour_ir::{GuestTerm, Term};
use dynasour_tracer::{Path, Runs, TraceShape};

/// What an indirect transfer of copied blocks costs more than the instruction: the tail and the
/// check.
const INDIRECT: i64 = 8;
/// What the way in and out costs.
const PASSAGE: i64 = 30;
/// What an exit to a side trace costs.
const SIDE: i64 = 8;
/// The part of what the blocks cost that a trace must save, in percent.
const LEAST: i64 = 10;
/// As much for a trace that ends, which is always entered by the front.
const LEAST_LINEAR: i64 = 25;
/// The part of what is neither accesses to frames nor indirect transfers that a trace may save, in
/// percent.
const ORDINARY: i64 = 15;
/// The part of what a tree saves otherwise than on indirect transfers that counts, in percent.
const TREE: i64 = 30;
/// Code of which so much are accesses to frames, in percent, has not been optimised.
const UNOPTIMISED: i64 = 50;
/// So often a loop goes round if nothing else is known.
const UNKNOWN: Runs = Runs { begun: 1, whole: 50, back: 0 };
/// And a path that ends.
const ONCE: Runs = Runs { begun: 1, whole: 1, back: 0 };

/// May a trace that begins at `pc`, which is called, be worth making? Only what keeps its variables
/// in a frame saves so much that a trace pays which is entered and left each time; and most
/// functions do not.
pub fn keeps_a_frame(pc: u64) -> bool {
    const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
    // push rbp; mov rbp, rsp
    const FRAME: [u8; 4] = [0x55, 0x48, 0x89, 0xe5];
    let mut bytes = [0; 8];
    let len = memory::fetch_code(pc, &mut bytes);
    let bytes = &bytes[..len];
    bytes.strip_prefix(&ENDBR64).unwrap_or(bytes).starts_with(&FRAME)
}

/// May a trace of this path be worth making?
pub fn promises(path: &Path) -> bool {
    let (cost, indirect) = of_blocks(path);
    let (all, frames) = (i64::from(cost.all), i64::from(cost.frames));
    suffices(path, all + indirect, frames + (all - frames) * ORDINARY / 100, indirect)
}

/// Is a fragment of this cost worth having? That of an exit has no way in and out of its own, and
/// that of unoptimised code which ends mostly goes on in another.
pub fn pays(path: &Path, cost: u32, side: bool) -> bool {
    let (copied, indirect) = of_blocks(path);
    let linked = side || is_unoptimised(path, copied);
    let (copied, cost) = (i64::from(copied.all), i64::from(cost));
    if linked {
        cost < copied + indirect + SIDE
    } else {
        suffices(path, copied + indirect, copied - cost, indirect)
    }
}

/// Is this path, which ends and was recorded early, one of unoptimised code?
fn is_unoptimised(path: &Path, blocks: Cost) -> bool {
    let early = path.runs.is_none() && path.shape == TraceShape::Linear;
    early && 100 * i64::from(blocks.frames) >= UNOPTIMISED * i64::from(blocks.all)
}

/// What a trace is judged by, for people.
pub fn figures(path: &Path, cost: u32) -> String {
    let (copied, indirect) = of_blocks(path);
    format!("costs {cost}, its blocks {} + {indirect}, {:?}", copied.all, path.runs)
}

/// Does a trace of a path that costs `all` save enough, if it saves `ordinary` and `indirect` each
/// time?
///
/// In whole numbers: the guest's MXCSR is in the processor, and inexact results would show in it.
fn suffices(path: &Path, all: i64, ordinary: i64, indirect: i64) -> bool {
    let unknown = if path.shape == TraceShape::Linear { ONCE } else { UNKNOWN };
    let runs = path.runs.unwrap_or(unknown);
    let (begun, whole, back) = (i64::from(runs.begun), i64::from(runs.whole), i64::from(runs.back));
    let exceeds = |saved: i64, percent: i64, times: i64| 100 * saved > percent * times * all;
    if path.shape == TraceShape::Linear {
        return exceeds(
            whole * (ordinary + indirect / 2) - begun.max(1) * PASSAGE,
            LEAST_LINEAR,
            whole,
        );
    }
    let (rounds, entries) = (begun + whole, (begun - back).max(1));
    let tree = rounds * (100 * indirect + TREE * ordinary) / 100;
    exceeds(whole * (ordinary + indirect) - begun.max(1) * PASSAGE, LEAST, whole)
        || exceeds(tree - back * SIDE - entries * PASSAGE, LEAST, rounds)
}

/// What the copied blocks of a path cost, and their indirect transfers that a trace need not do,
/// beyond that.
fn of_blocks(path: &Path) -> (Cost, i64) {
    let (mut sum, mut indirect) = (Cost::default(), 0);
    for (n, step) in path.steps.iter().enumerate() {
        let block = &step.block;
        let mut bytes = vec![0; (block.end - block.pc) as usize];
        let len = memory::fetch_code(block.pc, &mut bytes);
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
        // The one that a linear trace ends with is done all the same.
        if is_indirect && (n + 1 < path.steps.len() || path.shape == TraceShape::Loop) {
            indirect += INDIRECT;
        }
    }
    (sum, indirect)
}

/// Nanoseconds of processor time that may go into finding and making traces before the guest has
/// had any.
const FREE: u64 = 8_000_000;
/// One part in so many of a thread's time may.
const PART: u64 = 25;
/// The same where traces are made early.
const FREE_EARLY: u64 = 50_000_000;
/// The same where traces are made early.
const PART_EARLY: u64 = 5;
/// So many refusals in a row halve both.
const DISCOURAGING: u64 = 16;
/// More do not count.
const MOST_REFUSED: u64 = 64;

/// How much of a thread's time has gone into finding and making traces.
#[derive(Debug)]
pub struct Effort {
    spent: u64,
    /// How many attempts came to nothing in a row, more or less.
    refused: u64,
    since: Option<u64>,
    /// What may be spent before the guest has had any time, and the part of the thread's time that
    /// may, unless all may.
    limits: Option<(u64, u64)>,
}

impl Effort {
    /// None so far.
    pub fn new(config: &RunConfig) -> Effort {
        let limits =
            if config.interprets_first() { (FREE_EARLY, PART_EARLY) } else { (FREE, PART) };
        Effort {
            spent: 0,
            refused: 0,
            since: None,
            limits: config.weighs_traces().then_some(limits),
        }
    }

    /// May another trace be tried?
    pub fn is_affordable(&self) -> bool {
        self.limits.is_none_or(|(free, part)| {
            self.spent < (free + now() / part) * DISCOURAGING / (DISCOURAGING + self.refused)
        })
    }

    /// It came to a trace, or to nothing.
    pub fn came_to(&mut self, trace: bool) {
        self.refused = if trace { self.refused / 4 } else { MOST_REFUSED.min(self.refused + 1) };
    }

    /// It is tried from now on.
    pub fn begin(&mut self) {
        self.since.get_or_insert_with(now);
    }

    /// It has been made, or not.
    pub fn end(&mut self) {
        if let Some(since) = self.since.take() {
            self.spent += now().saturating_sub(since);
        }
    }
}

/// The thread's processor time.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes to `time`, which is one.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_tracer::Path;

    fn path(shape: TraceShape, runs: Option<Runs>) -> Path {
        Path { head: 0x1000, shape, steps: Vec::new(), stable: Vec::new(), guest: None, runs }
    }

    fn runs(begun: u32, whole: u32, back: u32) -> Option<Runs> {
        Some(Runs { begun, whole, back })
    }

    #[test]
    fn loops_must_save_something_and_go_round() {
        let pays = |runs, saved| suffices(&path(TraceShape::Loop, runs), 50, saved, 0);
        assert!(pays(runs(1, 100, 0), 10));
        assert!(!pays(runs(1, 100, 0), 4), "too little");
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
            "this one was watched"
        );
    }

    #[test]
    fn effort_is_limited() {
        let mut effort = Effort { spent: 0, refused: 0, since: None, limits: Some((FREE, PART)) };
        assert!(effort.is_affordable());
        effort.spent = (FREE + now() / PART) / 2;
        (0..2 * DISCOURAGING).for_each(|_| effort.came_to(false));
        assert!(!effort.is_affordable(), "nothing has come of it so far");
        effort.came_to(true);
        effort.came_to(true);
        assert!(effort.is_affordable());
        effort.spent = u64::MAX / 2;
        assert!(!effort.is_affordable());
        effort.end();
        assert_eq!(effort.spent, u64::MAX / 2, "nothing had begun");
    }

    #[test]
    fn functions_with_frames_are_known_by_how_they_begin() {
        let begins = |code: &[u8; 8]| keeps_a_frame(code.as_ptr() as u64);
        assert!(begins(&[0x55, 0x48, 0x89, 0xe5, 0x90, 0x90, 0x90, 0x90]));
        assert!(begins(&[0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0x48, 0x89, 0xe5]));
        assert!(!begins(&[0x41, 0x57, 0x41, 0x56, 0x90, 0x90, 0x90, 0x90]));
    }
}
