//! Measures how often the guest keeps to a recorded loop, before the loop is compiled.
//!
//! If all other code runs as copied blocks, a trace must save what its entries and exits cost; a
//! loop that the guest leaves after half an iteration never does. So after a path has been recorded
//! the interpreter continues for a while. [`Survival`] counts how often the guest reaches the head,
//! how often it then completes the path, and how often it returns to the head soon after it has
//! left the path. A path that is left by few exits and soon reached again can have side traces.
//!
//! If the path is a loop, the iterations that leave it and come back to the head are recorded meanwhile
//! ([`crate::iterations`]). Those that come often become part of the trace; then they count as completed. So do
//! other executions if the path is that of a function.
//!
//! **Data.** [`Survival`] owns the recording, the current position on the path and the exits by
//! which the guest has left it. **Invariant.** The counts influence only whether the path is
//! compiled, and with which other iterations. **Callers.** The interpreter of the recording thread calls
//! [`Survival::arrive`] before each block; no lock.
//!
//! ```text
//! path a b c      a b c a b c a d  a b e …      entered twice, completed twice
//! ```

use crate::build::{Path, TraceShape};
use crate::guests::GuestLoop;
use crate::iterations::Iterations;
use crate::recorder::EndReason;
use crate::selector::NextBlock;
use dynasour_ir::predict::Surroundings;

/// The observation ends when the path has been entered this often (guess; more delay the trace,
/// fewer judge by chance).
const RUNS: u32 = 50;
/// The observation ends when the guest has passed the head this often elsewhere in an interpreted program
/// (guess: that program has left the loop, or goes round it on other ways than the path).
const MOST_PASSED: u32 = 400;
/// The observation ends after this many blocks (guess: bounds the time in the interpreter).
const MOST_BLOCKS: usize = 2000;
/// If the path is longer, the observation ends after this many times its blocks (guess: enough to
/// tell a loop that is left at once from one that is not).
const MOST_ROUNDS: usize = 24;
/// Exits of the path that are told apart (guess: as many as may get side traces).
const MOST_EXITS: usize = 6;
/// A return to the head counts as soon within this many blocks (guess; too many count returns that
/// have nothing to do with the exit).
const RETURN_LIMIT: u32 = 40;

/// The guest stays in a path if it went round so often for each time that it came in (guess).
const STAYS: u32 = 16;

/// The result of observing a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Runs {
    /// How often the guest entered the path: it reached the head otherwise than along the path.
    pub entered: u32,
    /// How often it completed the path.
    pub completed: u32,
    /// How often it left the path by a known exit and reached the head within [`RETURN_LIMIT`]
    /// blocks.
    pub returned: u32,
    /// How often it reached the head of a loop of an interpreted program elsewhere in that program, so
    /// that it would leave a trace at once.
    pub passed: u32,
}

impl Runs {
    /// Did the guest go round often for each time that it came in?
    pub fn stays(&self) -> bool {
        self.completed >= STAYS * self.entered.max(1)
    }
}

/// Observes how the guest keeps to a recorded path.
#[derive(Debug)]
pub struct Survival {
    path: Path,
    end: EndReason,
    /// The number of steps of the path that have been executed; `None` if the guest is not on it.
    completed_steps: Option<usize>,
    /// The exits by which the path was left: index of the step, and pc after it.
    exits: Vec<(usize, u64)>,
    /// The number of blocks within which a return to the head still counts; 0 if the guest left by
    /// an exit that was not known.
    may_return: u32,
    runs: Runs,
    blocks_left: usize,
    /// The observation ends when the path has been entered this often.
    most_entered: u32,
    /// The iterations that have left the path.
    iterations: Iterations,
}

impl Survival {
    /// An observation that starts at the end of the recording. A trace of the path may hold so many
    /// iterations of it, or executions if the path `is_function`. It takes so many times as long as usual at most.
    pub fn new(
        path: Path,
        end: EndReason,
        iterations: usize,
        times: u32,
        is_function: bool,
    ) -> Survival {
        let exits = Vec::with_capacity(MOST_EXITS);
        let blocks_left = MOST_BLOCKS.max(MOST_ROUNDS * path.steps.len()) * times as usize;
        let returns_to =
            path.steps.last().filter(|_| end == EndReason::Return).map(|last| last.next);
        // The guest is at the head of a loop of an interpreted program, with the loop's key.
        let is_guest_loop = path.guest.is_some();
        let runs = Runs { entered: u32::from(is_guest_loop), ..Runs::default() };
        Survival {
            path,
            end,
            completed_steps: is_guest_loop.then_some(0),
            exits,
            may_return: 0,
            runs,
            blocks_left,
            most_entered: RUNS * times,
            iterations: if is_function {
                Iterations::of_function(iterations, returns_to)
            } else {
                Iterations::of_loop(iterations)
            },
        }
    }

    /// The path's head.
    pub fn head(&self) -> u64 {
        self.path.head
    }

    /// The path of a loop of an interpreted program, with the head's key; none for other paths.
    pub fn guest(&self) -> Option<&GuestLoop> {
        self.path.guest.as_deref()
    }

    /// Reports that the block `to` is executed next in the state `around`; `same_key` is false if that is
    /// the head of a loop of an interpreted program, and the program is elsewhere. Returns whether enough
    /// has been observed.
    pub fn arrive(
        &mut self,
        to: &NextBlock<'_>,
        same_key: bool,
        around: &Surroundings<'_>,
    ) -> bool {
        let pc = to.pc;
        self.blocks_left = self.blocks_left.saturating_sub(1);
        self.may_return = self.may_return.saturating_sub(1);
        self.iterations.go_on(to, around);
        if let Some(n) = self.completed_steps {
            let kept = self.path.steps.get(n).is_some_and(|step| step.next == pc)
                || self.iterations.is_function
                    && self.ends_in_return()
                    && n + 1 == self.path.steps.len();
            self.completed_steps = kept.then_some(n + 1);
            if !kept {
                self.leave((n, pc));
                if self.path.shape == TraceShape::Loop || self.iterations.is_function {
                    self.iterations.begin(&self.path, n, to, around);
                }
            }
        }
        if self.completed_steps == Some(self.path.steps.len()) {
            self.runs.completed += 1;
            let again = self.path.shape == TraceShape::Loop && same_key;
            self.completed_steps = again.then_some(0);
        }
        let is_entered = self.completed_steps.is_none() && !self.iterations.is_in_function();
        if is_entered && pc == self.path.head {
            self.runs.entered += u32::from(same_key);
            if !same_key {
                self.runs.passed += 1;
                self.iterations.pass();
            }
            self.runs.returned += u32::from(self.may_return > 0);
            self.completed_steps = same_key.then_some(0);
            if same_key && !self.iterations.is_function {
                self.iterations.complete(self.may_return > 0);
            }
        }
        if let Some(n) = self.completed_steps
            && self.path.guest.is_some()
        {
            self.iterations.keep(&self.path, n, around);
        }
        self.blocks_left == 0
            || self.runs.entered >= self.most_entered
            || self.runs.passed >= MOST_PASSED
    }

    /// Notes that the guest has left the path. An exit is known from the second time on.
    fn leave(&mut self, exit: (usize, u64)) {
        let known = self.exits.contains(&exit);
        if !known && self.exits.len() < MOST_EXITS {
            self.exits.push(exit);
        }
        self.may_return = if known { RETURN_LIMIT } else { 0 };
    }

    /// Reports that the runtime executes an instruction, so the guest is no longer on the path.
    pub fn interrupted(&mut self) {
        (self.completed_steps, self.may_return) = (None, 0);
        self.iterations.interrupted();
    }

    /// Does the path end where its function returns?
    fn ends_in_return(&self) -> bool {
        self.end == EndReason::Return
    }

    /// The recording, with the counts. The iteration of a loop that came most often becomes its path, and so does
    /// the execution of a function.
    pub fn into_recording(mut self) -> (Path, EndReason) {
        let Runs { entered, completed, .. } = self.runs;
        let all = if self.iterations.is_function { entered } else { entered + completed };
        let is_among_them = !self.iterations.is_function || self.ends_in_return();
        let often =
            self.iterations.often(&self.path, if is_among_them { completed } else { 0 }, all);
        if !often.is_empty() {
            if self.iterations.is_function {
                self.end = EndReason::Return;
            }
            self.runs.completed = often.iter().map(|often| often.times).sum();
            if !self.iterations.is_function {
                self.runs.entered = all.saturating_sub(self.runs.completed);
            }
            let returned: u32 = often.iter().map(|often| often.returned).sum();
            self.runs.returned = self.runs.returned.saturating_sub(returned);
            let passed: u32 = often.iter().map(|often| often.passed).sum();
            self.runs.passed = self.runs.passed.saturating_sub(passed);
            let mut steps = often.into_iter().map(|often| often.steps);
            self.path.steps = steps.next().unwrap_or_default();
            self.path.others = steps.collect();
        }
        self.path.runs = Some(self.runs);
        (self.path, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Step;
    use crate::recorder::TargetKind;
    use dynasour_guest::lift::{Bytes, LiftedBlock, MAX_BLOCK, lift_block};
    use std::sync::Arc;

    const HEAD: u64 = 0x1000;

    /// An observation of the path from the head over 0x2000 and back.
    fn survival() -> Survival {
        let step = |next| Step { block: block(), next, observed: None };
        let steps = vec![step(0x2000), step(HEAD)];
        let path = Path {
            head: HEAD,
            shape: TraceShape::Loop,
            steps,
            stable: Vec::new(),
            guest: None,
            entry: Box::default(),
            others: Vec::new(),
            runs: None,
        };
        Survival::new(path, EndReason::Cycle, 8, 1, false)
    }

    fn block() -> Arc<LiftedBlock> {
        let code = Bytes { start: HEAD, bytes: &[0xff, 0xc8, 0x75, 0xfc] };
        Arc::new(lift_block(HEAD, &code, MAX_BLOCK))
    }

    /// The block at `pc` is executed next.
    fn arrive(survival: &mut Survival, pc: u64, same_key: bool) -> bool {
        let to = NextBlock { pc, target: TargetKind::Ordinary, refused: None, lifted: &block };
        let gpr = [0; 16];
        let around = Surroundings { gpr: &gpr, rflags: 0, segments: [0; 2], read: &|_, _| Some(0) };
        survival.arrive(&to, same_key, &around)
    }

    fn runs(survival: &mut Survival, pcs: &[u64]) -> Option<Runs> {
        assert!(!pcs.iter().any(|pc| arrive(survival, *pc, true)), "there is more to come");
        Some(survival.runs)
    }

    #[test]
    fn completed_rounds_and_returns_are_counted() {
        let mut s = survival();
        let seen = runs(&mut s, &[HEAD, 0x2000, HEAD, 0x2000, HEAD, 0x3000, HEAD]);
        assert_eq!(
            seen,
            Some(Runs { entered: 2, completed: 2, returned: 0, passed: 0 }),
            "an exit is new at first"
        );
        let seen = runs(&mut s, &[0x3000, HEAD, 0x2000, HEAD]);
        assert_eq!(seen, Some(Runs { entered: 3, completed: 3, returned: 1, passed: 0 }));
        s.interrupted();
        assert_eq!(
            runs(&mut s, &[0x2000, HEAD]),
            Some(Runs { entered: 4, completed: 3, returned: 1, passed: 0 })
        );
    }

    #[test]
    fn arrivals_elsewhere_in_the_interpreted_program_are_no_entries() {
        let mut s = survival();
        for same_key in [false, true, false] {
            arrive(&mut s, HEAD, same_key);
            arrive(&mut s, 0x2000, true);
        }
        assert_eq!(s.runs, Runs { entered: 1, completed: 1, returned: 0, passed: 2 });
    }

    #[test]
    fn iterations_that_come_often_become_part_of_the_path() {
        let mut s = survival();
        runs(&mut s, &[HEAD]);
        for _ in 0..4 {
            runs(&mut s, &[0x2000, HEAD, 0x3000, 0x4000, HEAD]);
        }
        runs(&mut s, &[0x5000, HEAD, 0x2000, 0x6000, 0x7000]);
        s.interrupted();
        assert_eq!(s.runs, Runs { entered: 6, completed: 4, returned: 3, passed: 0 });
        let (path, _) = s.into_recording();
        let nexts: Vec<Vec<u64>> =
            path.others.iter().map(|steps| steps.iter().map(|s| s.next).collect()).collect();
        assert_eq!(nexts, [[0x3000, 0x4000, HEAD]], "0x5000 came once, 0x6000 did not come back");
        assert_eq!(path.runs, Some(Runs { entered: 2, completed: 8, returned: 0, passed: 0 }));
    }

    /// A function that calls itself, as its caller at 0x5000 executes it: test edi, edi; je 0x100a; call 0x1000;
    /// ret; ret.
    const FUNCTION: [u8; 11] = [0x85, 0xff, 0x74, 0x06, 0xe8, 0xf7, 0xff, 0xff, 0xff, 0xc3, 0xc3];
    const SHALLOW: [u64; 3] = [HEAD, 0x100a, 0x5000];
    const DEEPER: [u64; 6] = [HEAD, 0x1004, HEAD, 0x100a, 0x1009, 0x6000];

    fn block_at(pc: u64) -> Arc<LiftedBlock> {
        let code = Bytes { start: HEAD, bytes: &FUNCTION };
        Arc::new(lift_block(pc, &code, MAX_BLOCK))
    }

    /// An observation of the shallow execution.
    fn of_function() -> Survival {
        let step = |pc: &[u64]| Step { block: block_at(pc[0]), next: pc[1], observed: None };
        let path = Path {
            shape: TraceShape::Linear,
            steps: SHALLOW.windows(2).map(step).collect(),
            ..survival().path
        };
        Survival::new(path, EndReason::Return, 8, 1, true)
    }

    fn executes(survival: &mut Survival, pcs: &[u64]) {
        let gpr = [0; 16];
        let around = Surroundings { gpr: &gpr, rflags: 0, segments: [0; 2], read: &|_, _| Some(0) };
        for &pc in pcs {
            let lifted = &|| block_at(pc);
            let to = NextBlock { pc, target: TargetKind::Ordinary, refused: None, lifted };
            assert!(!survival.arrive(&to, true, &around), "there is more to come");
        }
    }

    #[test]
    fn executions_of_a_function_that_come_often_become_part_of_the_path() {
        let mut s = of_function();
        for _ in 0..2 {
            executes(&mut s, &SHALLOW);
            executes(&mut s, &DEEPER);
        }
        executes(&mut s, &[HEAD, 0x100a, 0x7000]);
        let (path, end) = s.into_recording();
        assert_eq!(end, EndReason::Return);
        let nexts = |steps: &[Step]| steps.iter().map(|step| step.next).collect::<Vec<_>>();
        assert_eq!(nexts(&path.steps), SHALLOW[1..], "it came three times, from two callers");
        let others: Vec<_> = path.others.iter().map(|steps| nexts(steps)).collect();
        assert_eq!(
            others,
            [[0x1004, HEAD, 0x100a, 0x1009, 0x5000]],
            "all are said to return to one"
        );
        assert_eq!(path.runs, Some(Runs { entered: 5, completed: 5, returned: 1, passed: 0 }));
    }

    #[test]
    fn a_call_that_is_too_deep_is_an_execution_of_its_own() {
        let mut s = of_function();
        for _ in 0..10 {
            executes(&mut s, &[HEAD, 0x1004]);
        }
        executes(&mut s, &SHALLOW[..2]);
        assert_eq!(s.runs.entered, 2);
        executes(&mut s, &[0x1009; 10]);
        executes(&mut s, &SHALLOW);
        assert_eq!((s.runs.entered, s.runs.completed), (3, 1), "the second one has returned");
    }

    #[test]
    fn observations_end() {
        let mut s = survival();
        assert!((0..MOST_BLOCKS).any(|_| arrive(&mut s, 0x9000, true)));
        let mut s = survival();
        assert!((0..2 * RUNS).any(|n| arrive(
            &mut s,
            if n % 2 == 0 { HEAD } else { 0x9000 },
            true
        )));
        assert_eq!(s.runs.entered, RUNS);
    }
}
