//! Finds short inner loops that always run the same number of times.
//!
//! A fragment for such a loop spends its time on being entered and left. The loop is better
//! unrolled into the traces of the loop around it; their guards on the number of iterations then
//! hold. So before the first trace of a small loop is compiled, the interpreter observes a few of
//! its runs ([`Probe`]). If all are short and equally long, the loop's head is postponed for as
//! many executions as the loop around it needs to become hot
//! ([`crate::heads::HeadTable::postpone`]), and recordings go through it.
//!
//! **Data.** [`Probe`] owns the recording and counts the iterations of the current run.
//! **Invariant.** The verdict influences only what is compiled. **Callers.** The interpreter of the
//! recording thread calls [`Probe::arrive`] before each block; no lock.
//!
//! ```text
//! do { for (k = 0; k < 3; k++) sum += d[k]; } while (…)  runs of 3, 3, 3: unrolled
//! ```

use crate::build::{Path, TraceShape};
use crate::recorder::{EndReason, Transfer};
use std::ops::Range;

/// Runs that are observed, where a run is all iterations of the loop from its entry to its exit
/// (guess; fewer take irregular loops for regular ones).
const RUNS: u32 = 3;
/// Most iterations of a short loop (guess; too high makes the traces around it too long).
pub(crate) const MOST_ITERATIONS: u32 = 12;
/// Most guest instructions of one run (guess, as for [`MOST_ITERATIONS`]).
const MOST_INSTRUCTIONS: usize = 150;
/// The observation ends after this many blocks (guess: bounds the time in the interpreter).
const MOST_BLOCKS: u32 = 4000;

/// The state of a probe after a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Not enough runs have been observed.
    Undecided,
    /// All runs had this many iterations.
    Short(u32),
    /// The loop is not a short one, so it gets a fragment of its own.
    Long,
}

/// Observes the runs of a loop whose trace has been recorded.
#[derive(Debug)]
pub struct Probe {
    path: Path,
    end: EndReason,
    /// The addresses of the loop's code.
    code: Range<u64>,
    /// Guest instructions of one iteration.
    instructions: usize,
    /// Is the guest in the loop?
    inside: bool,
    /// Has the current run been observed from its beginning?
    from_start: bool,
    /// Iterations of the current run.
    iterations: u32,
    /// Runs that were observed from their beginning to their end.
    runs: u32,
    /// The number of iterations of each of them.
    length: u32,
    blocks_left: u32,
}

impl Probe {
    /// A probe for a recorded loop.
    ///
    /// # Errors
    /// The recording, if the loop cannot be a short one: its path has calls, returns or indirect
    /// jumps, or is too long.
    pub fn new(path: Path, end: EndReason) -> Result<Probe, Box<(Path, EndReason)>> {
        let instructions: usize = path.steps.iter().map(|s| s.block.count as usize).sum();
        let plain = path
            .steps
            .iter()
            .all(|s| matches!(Transfer::of(&s.block, s.next), Transfer::Jump { .. }));
        if path.shape != TraceShape::Loop || !plain || 2 * instructions > MOST_INSTRUCTIONS {
            return Err(Box::new((path, end)));
        }
        let start = path.steps.iter().map(|s| s.block.pc).min().unwrap_or(path.head);
        let stop = path.steps.iter().map(|s| s.block.end).max().unwrap_or(path.head);
        Ok(Probe {
            path,
            end,
            code: start..stop,
            instructions,
            inside: true,
            from_start: false,
            iterations: 0,
            runs: 0,
            length: 0,
            blocks_left: MOST_BLOCKS,
        })
    }

    /// The loop's head.
    pub fn head(&self) -> u64 {
        self.path.head
    }

    /// The recording, to be compiled now.
    pub fn into_recording(self) -> (Path, EndReason) {
        (self.path, self.end)
    }

    /// Reports that the block at `pc` is executed next.
    pub fn arrive(&mut self, pc: u64) -> Verdict {
        self.blocks_left -= 1;
        if pc == self.path.head {
            if self.inside {
                self.iterations += 1;
            } else {
                (self.inside, self.from_start, self.iterations) = (true, true, 1);
            }
        } else if self.inside && !self.code.contains(&pc) {
            self.inside = false;
            if self.from_start {
                if self.runs > 0 && self.length != self.iterations {
                    return Verdict::Long;
                }
                self.length = self.iterations;
                self.runs += 1;
            }
        }
        let length = self.iterations as usize * self.instructions;
        if self.iterations > MOST_ITERATIONS || length > MOST_INSTRUCTIONS || self.blocks_left == 0
        {
            Verdict::Long
        } else if self.runs == RUNS {
            Verdict::Short(self.length)
        } else {
            Verdict::Undecided
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Step;
    use dynasour_guest::lift::{Bytes, MAX_BLOCK, lift_block};
    use std::sync::Arc;

    const HEAD: u64 = 0x1000;
    const AFTER: u64 = 0x1004;

    /// A probe for the loop `dec eax; jne` to itself.
    fn probe() -> Probe {
        let code = Bytes { start: HEAD, bytes: &[0xff, 0xc8, 0x75, 0xfc] };
        let block = Arc::new(lift_block(HEAD, &code, MAX_BLOCK));
        let steps = vec![Step { block, next: HEAD, observed: None }];
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
        Probe::new(path, EndReason::Cycle).expect("a small loop is observed")
    }

    /// The verdict after the last iteration of a run that began earlier, and runs of these lengths.
    fn verdict(lengths: &[usize]) -> Verdict {
        let mut probe = probe();
        let runs =
            lengths.iter().flat_map(|n| std::iter::repeat_n(HEAD, *n).chain([AFTER, 0x2000]));
        for pc in [HEAD, AFTER].into_iter().chain(runs) {
            let verdict = probe.arrive(pc);
            if verdict != Verdict::Undecided {
                return verdict;
            }
        }
        Verdict::Undecided
    }

    #[test]
    fn short_and_regular_loops_are_told_from_others() {
        assert_eq!(verdict(&[3, 3]), Verdict::Undecided);
        assert_eq!(verdict(&[3, 3, 3]), Verdict::Short(3));
        assert_eq!(verdict(&[3, 3, 4]), Verdict::Long);
        assert_eq!(verdict(&[13]), Verdict::Long);
        assert_eq!(verdict(&[12, 12, 12]), Verdict::Short(12));
    }
}
