//! Measures how often the guest keeps to a recorded loop, before the loop is compiled.
//!
//! If everything else runs natively, a trace must pay for its entry and exits; a loop that leaves
//! after half an iteration never does. So after a loop has been recorded the interpreter continues
//! for a while. [`Survival`] counts how often the guest reaches the head, how often it then
//! completes the path, and how often it is back at the head soon after leaving the path. A path
//! that is left in few ways and soon reached again can have side traces.
//!
//! **Data.** [`Survival`] owns the recording, the current position on the path and the ways in
//! which it was left. **Invariant.** The counts influence only whether the path is compiled.
//! **Callers.** The interpreter of the recording thread calls [`Survival::arrive`] before each
//! block; no lock.
//!
//! ```text
//! path a b c      a b c a b c a d  a b e …      begun twice, completed twice, back once
//! ```

use crate::build::{Path, TraceShape};
use crate::recorder::EndReason;

/// Runs of the path that are observed at most (guess; more delay the trace, fewer judge by chance).
const RUNS: u32 = 50;
/// Blocks that are observed at most (guess: bounds the time in the interpreter).
const PATIENCE: u32 = 2000;
/// Ways out of the path that are told apart (guess: as many as may get side traces).
const WAYS: usize = 6;
/// Blocks off the path after which a return to the head no longer counts as soon (guess).
const BACK: u32 = 40;

/// The result of observing a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Runs {
    /// How often the guest reached the head otherwise than along the path.
    pub begun: u32,
    /// How often it completed the path.
    pub whole: u32,
    /// How often it left the path in a known way and was back at the head within [`BACK`] blocks.
    pub back: u32,
}

/// Observes how the guest keeps to a recorded path.
#[derive(Debug)]
pub struct Survival {
    path: Path,
    end: EndReason,
    /// The number of steps of the path that have been executed, if the guest is on it.
    gone: Option<usize>,
    /// The ways in which the path was left: step and pc.
    ways: Vec<(usize, u64)>,
    /// The number of blocks within which a return to the head counts; 0 if the guest left in an
    /// unknown way.
    off: u32,
    runs: Runs,
    patience: u32,
}

impl Survival {
    /// Starts at the end of the recording.
    pub fn new(path: Path, end: EndReason) -> Survival {
        let ways = Vec::with_capacity(WAYS);
        Survival { path, end, gone: None, ways, off: 0, runs: Runs::default(), patience: PATIENCE }
    }

    /// The path's head.
    pub fn head(&self) -> u64 {
        self.path.head
    }

    /// Reports that the block at `pc` is executed next. Returns whether enough has been observed.
    pub fn arrive(&mut self, pc: u64) -> bool {
        self.patience = self.patience.saturating_sub(1);
        self.off = self.off.saturating_sub(1);
        if let Some(n) = self.gone {
            let kept = self.path.steps.get(n).is_some_and(|step| step.next == pc);
            self.gone = kept.then_some(n + 1);
            if !kept {
                self.leave((n, pc));
            }
        }
        if self.gone == Some(self.path.steps.len()) {
            self.runs.whole += 1;
            self.gone = (self.path.shape == TraceShape::Loop).then_some(0);
        }
        if self.gone.is_none() && pc == self.path.head {
            self.runs.begun += 1;
            self.runs.back += u32::from(self.off > 0);
            self.gone = Some(0);
        }
        self.patience == 0 || self.runs.begun >= RUNS
    }

    fn leave(&mut self, way: (usize, u64)) {
        let known = self.ways.contains(&way);
        if !known && self.ways.len() < WAYS {
            self.ways.push(way);
        }
        self.off = if known { BACK } else { 0 };
    }

    /// Reports that the runtime interrupts the guest, which is no longer on the path.
    pub fn interrupted(&mut self) {
        (self.gone, self.off) = (None, 0);
    }

    /// The recording, with the counts.
    pub fn into_recording(mut self) -> (Path, EndReason) {
        self.path.runs = Some(self.runs);
        (self.path, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Step;
    use dynasour_guest::lift::{Bytes, MAX_BLOCK, lift_block};
    use std::rc::Rc;

    const HEAD: u64 = 0x1000;

    /// The path from the head over 0x2000 and back.
    fn survival() -> Survival {
        let code = Bytes { start: HEAD, bytes: &[0xff, 0xc8, 0x75, 0xfc] };
        let block = Rc::new(lift_block(HEAD, &code, MAX_BLOCK));
        let step = |next| Step { block: Rc::clone(&block), next, observed: None };
        let steps = vec![step(0x2000), step(HEAD)];
        let path = Path {
            head: HEAD,
            shape: TraceShape::Loop,
            steps,
            stable: Vec::new(),
            guest: None,
            runs: None,
        };
        Survival::new(path, EndReason::Cycle)
    }

    fn runs(survival: &mut Survival, pcs: &[u64]) -> Option<Runs> {
        assert!(!pcs.iter().any(|pc| survival.arrive(*pc)), "there is more to come");
        Some(survival.runs)
    }

    #[test]
    fn whole_rounds_and_ways_back_are_counted() {
        let mut s = survival();
        let seen = runs(&mut s, &[HEAD, 0x2000, HEAD, 0x2000, HEAD, 0x3000, HEAD]);
        assert_eq!(seen, Some(Runs { begun: 2, whole: 2, back: 0 }), "a way is new at first");
        let seen = runs(&mut s, &[0x3000, HEAD, 0x2000, HEAD]);
        assert_eq!(seen, Some(Runs { begun: 3, whole: 3, back: 1 }));
        s.interrupted();
        assert_eq!(runs(&mut s, &[0x2000, HEAD]), Some(Runs { begun: 4, whole: 3, back: 1 }));
    }

    #[test]
    fn watching_ends() {
        let mut s = survival();
        assert!((0..PATIENCE).any(|_| s.arrive(0x9000)));
        let mut s = survival();
        assert!((0..2 * RUNS).any(|n| s.arrive(if n % 2 == 0 { HEAD } else { 0x9000 })));
        assert_eq!(s.into_recording().0.runs.map(|r| r.begun), Some(RUNS));
    }
}
