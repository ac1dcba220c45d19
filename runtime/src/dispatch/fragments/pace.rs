//! Heads are not counted all the time.
//!
//! A counter costs a head that is not worth a trace as much at each execution as one that is: a program whose time is spread
//! over thousands of loops, none of which gets hot soon, would pay for them all, and longest for those that matter least
//! (stockfish: 9 %, nec2c: 30, cc1: 20). So a head is counted a *step* of executions at first. If it gets hot soon at that pace, counting
//! goes on. Else its links lead to its block, past the counter, for a *nap* that is so many times as long as the step took; what is
//! executed meanwhile is reckoned by the pace of the step.
//!
//! Nobody is woken by a clock, for there is none that a guest could not notice: naps end when a thread comes to the
//! runtime for some reason. One that never does is in a loop that gets hot soon, or in a head's that has not napped yet.

use super::Fragments;
use dynasour_emitter::copy::CounterId;
use dynasour_emitter::ticks;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The most executions of a head that are counted at a time.
pub const STEP: u64 = 1000;
/// Ticks of the time stamp counter, some fifty milliseconds: a head that is hot within that does not nap.
const SOON: u64 = 1 << 27;
/// How many times as long as its last step a nap is.
const NAP: u64 = 100;

/// The longest nap of one for which there is no time is [`SOON`] times two to this power.
const MOST_PUT_OFF: u32 = 10;

/// What is known of one head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pace {
    /// Executions since it was last wanted, some of them reckoned.
    seen: u64,
    /// How many make it hot.
    wanted: u64,
    /// How often it was hot in vain.
    put_off: u32,
}

/// What is done about a head whose step is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Then {
    /// It is hot.
    Hot,
    /// It is counted for so many executions more.
    Count(u64),
    /// It naps for so many ticks.
    Nap(u64),
}

impl Pace {
    /// The last `executions` took so many ticks.
    fn step(&mut self, executions: u64, ticks: u64) -> Then {
        self.seen = self.seen.saturating_add(executions);
        let left = self.wanted.saturating_sub(self.seen);
        if left == 0 {
            return Then::Hot;
        }
        if u128::from(left) * u128::from(ticks) <= u128::from(SOON) * u128::from(executions) {
            return Then::Count(left);
        }
        self.seen = self.seen.saturating_add(executions.saturating_mul(NAP));
        Then::Nap(ticks.saturating_mul(NAP))
    }
}

/// The heads that are counted step by step.
#[derive(Default)]
pub struct Paces {
    /// Executions that make a head hot of which nothing else is known; none if heads are counted without a break.
    wanted: Option<u64>,
    heads: FxHashMap<u64, Pace>,
    /// When who is woken.
    naps: BinaryHeap<Reverse<(u64, u64)>>,
}

impl Paces {
    /// Forgets all heads.
    pub fn clear(&mut self) {
        self.heads.clear();
        self.naps.clear();
    }
}

impl Fragments {
    /// From now on heads are counted step by step, until they have been executed `wanted` times.
    pub fn pace_heads(&mut self, wanted: u64) {
        self.paces.wanted = Some(wanted);
    }

    /// A head's counter has left after so many executions, which took so many ticks. How often it has been executed, if it is hot.
    pub fn is_hot(&mut self, pc: u64, counter: CounterId, executions: u64, took: u64) -> Option<u64> {
        let Some(wanted) = self.paces.wanted else { return Some(executions) };
        let pace = self.paces.heads.entry(pc).or_insert(Pace { seen: 0, wanted, put_off: 0 });
        match pace.step(executions, took) {
            Then::Hot => return Some(pace.seen),
            Then::Count(n) => self.emitter.set_counter(counter, n),
            Then::Nap(time) => self.nap(pc, time),
        }
        None
    }

    /// A head is hot once more after `n` executions.
    pub fn set_counter(&mut self, pc: u64, counter: CounterId, n: u64) {
        let step = match self.paces.wanted {
            Some(_) => {
                self.paces.heads.insert(pc, Pace { seen: 0, wanted: n, put_off: 0 });
                n.min(STEP)
            }
            None => n,
        };
        self.emitter.set_counter(counter, step);
    }

    /// There is no time for a hot head now, which was executed so many times: it is hot again after a nap, or as many more.
    pub fn put_off(&mut self, pc: u64, counter: CounterId, executions: u64) {
        match self.paces.heads.get_mut(&pc) {
            Some(pace) => {
                let time = SOON << pace.put_off.min(MOST_PUT_OFF);
                pace.put_off += 1;
                self.nap(pc, time);
            }
            None => self.emitter.set_counter(counter, executions.saturating_mul(2)),
        }
    }

    fn nap(&mut self, pc: u64, time: u64) {
        if !self.retired {
            self.emitter.stop_counting(pc);
            self.paces.naps.push(Reverse((ticks().saturating_add(time), pc)));
        }
    }

    /// Counts heads again whose naps are over.
    pub fn end_naps(&mut self) {
        if self.retired || self.paces.naps.is_empty() {
            return;
        }
        let now = ticks();
        while let Some(&Reverse((time, pc))) = self.paces.naps.peek()
            && time <= now
        {
            self.paces.naps.pop();
            let left = self.paces.heads.get(&pc).map_or(STEP, |pace| pace.wanted.saturating_sub(pace.seen));
            self.emitter.count_again(pc, left.clamp(1, STEP));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(seen: u64) -> Pace {
        Pace { seen, wanted: 25_000, put_off: 0 }
    }

    #[test]
    fn what_gets_hot_soon_is_counted_to_the_end() {
        let mut soon = pace(0);
        assert_eq!(soon.step(1000, SOON / 100), Then::Count(24_000));
        assert_eq!(soon.step(24_000, u64::MAX), Then::Hot);
    }

    #[test]
    fn what_does_not_naps_and_is_hot_all_the_same_in_the_end() {
        let mut late = pace(0);
        assert_eq!(late.step(100, SOON), Then::Nap(NAP * SOON));
        assert_eq!(late.seen, 100 + 100 * NAP);
        assert_eq!(late.step(100, u64::MAX), Then::Nap(u64::MAX));
        assert_eq!(late.step(1000, u64::MAX), Then::Nap(u64::MAX));
        assert_eq!(late.step(1, 1), Then::Hot);
    }
}
