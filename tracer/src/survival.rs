//! How well a recorded loop is kept to.
//!
//! Where everything else runs natively, a trace has to pay for the way in and out, which loops that leave after half an
//! iteration never do. So when a loop has been recorded, the interpreter goes on for a while and counts how often the
//! guest comes to its head, how often it then goes all the way, and how often it is back soon after it has left
//! ([`Survival`]): what leaves by few ways and comes back can have side traces.
//!
//! ```text
//! path a b c      a b c a b c a d  a b e …      begun twice, twice all the way, back once
//! ```

use crate::build::{Path, TraceShape};
use crate::recorder::EndReason;

/// Runs that are watched at most.
const RUNS: u32 = 50;
/// Blocks that are watched at most.
const PATIENCE: u32 = 2000;
/// Ways out of the path that are told apart.
const WAYS: usize = 6;
/// Blocks after which a way back is long.
const BACK: u32 = 40;

/// What came of watching a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Runs {
    /// How often the guest came to the head otherwise than by the path.
    pub begun: u32,
    /// How often it went all the way.
    pub whole: u32,
    /// How often it left by one of the first few ways, and was back at the head soon.
    pub back: u32,
}

/// Watches what becomes of a recorded path.
#[derive(Debug)]
pub struct Survival {
    path: Path,
    end: EndReason,
    /// How many steps of the path have been gone, if the guest is on it.
    gone: Option<usize>,
    /// Where the path was left, by step and pc.
    ways: Vec<(usize, u64)>,
    /// After how many blocks off the path the guest will not have come back; 0 if it went an unknown way.
    off: u32,
    runs: Runs,
    patience: u32,
}

impl Survival {
    /// Watches from the end of the recording on.
    pub fn new(path: Path, end: EndReason) -> Survival {
        let ways = Vec::with_capacity(WAYS);
        Survival { path, end, gone: None, ways, off: 0, runs: Runs::default(), patience: PATIENCE }
    }

    /// The path's head.
    pub fn head(&self) -> u64 {
        self.path.head
    }

    /// The block at `pc` comes next. Has enough been seen?
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

    /// The runtime does something now: whatever the guest does next, it is not on the path.
    pub fn interrupted(&mut self) {
        (self.gone, self.off) = (None, 0);
    }

    /// The recording, with what was seen.
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
        let path = Path { head: HEAD, shape: TraceShape::Loop, steps, stable: Vec::new(), guest: None, runs: None };
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
