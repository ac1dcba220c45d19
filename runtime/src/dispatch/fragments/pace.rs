//! Heads are not counted all the time.
//!
//! A counter costs a head that is not worth a trace as much at each execution as one that is: a
//! program whose time is spread over thousands of loops, none of which gets hot soon, would pay for
//! them all, and longest for those that matter least (stockfish: 9 %, nec2c: 30, cc1: 20). So a
//! head is counted a *step* of executions at first. If it gets hot soon at that pace, counting goes
//! on. Else its links lead to its block, past the counter, for a *nap* that is so many times as
//! long as the step took. Then it is counted for another step, and what was executed meanwhile is
//! reckoned by the slower of the two.
//!
//! Nobody is woken by a clock, for there is none that a guest could not notice: naps end when a
//! thread comes to the runtime for some reason. So that one does, the head that was to nap last
//! keeps *watch*: it is counted for as many executions as it would have had, until another one is
//! to nap.

use super::Fragments;
use dynasour_emitter::blocks::CounterId;
use dynasour_emitter::ticks;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The most executions of a head that are counted at a time, unless it gets hot soon.
pub const STEP: u64 = 1000;
/// Ticks of the time stamp counter, some fifty milliseconds: a head that is hot within that does
/// not nap.
const SOON: u64 = 1 << 27;
/// How many times as long as its last step a nap is.
const NAP: u64 = 100;
/// The longest nap: some three seconds.
const LONGEST: u64 = 1 << 33;
/// The longest nap of one for which there is no time is [`SOON`] times two to this power.
const MOST_PUT_OFF: u32 = 6;

/// What is known of one head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pace {
    /// Executions since it was last wanted, some of them reckoned.
    seen: u64,
    /// How many make it hot.
    wanted: u64,
    /// How often it was hot in vain.
    put_off: u32,
    /// Since when it is not counted, after so many executions in so many ticks.
    rests: Option<(u64, u64, u64)>,
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
    fn new(wanted: u64) -> Pace {
        Pace { seen: 0, wanted, put_off: 0, rests: None }
    }

    /// The last `executions` took so many ticks until `now`.
    fn step(&mut self, executions: u64, took: u64, now: u64) -> Then {
        let credit = self.rests.take().map_or(0, |(since, before, ticks)| {
            let slept = u128::from(now.saturating_sub(took).saturating_sub(since));
            let reckoned =
                |executions, ticks: u64| u128::from(executions) * slept / u128::from(ticks.max(1));
            u64::try_from(reckoned(before, ticks).min(reckoned(executions, took)))
                .unwrap_or(u64::MAX)
        });
        self.seen = self.seen.saturating_add(executions).saturating_add(credit);
        let left = self.wanted.saturating_sub(self.seen);
        if left == 0 {
            return Then::Hot;
        }
        if u128::from(left) * u128::from(took) <= u128::from(SOON) * u128::from(executions) {
            return Then::Count(left);
        }
        self.rests = Some((now, executions, took));
        Then::Nap(took.saturating_mul(NAP).min(LONGEST))
    }
}

/// A head that keeps watch.
#[derive(Clone, Copy)]
struct Watch {
    pc: u64,
    /// How long it would nap.
    time: u64,
}

/// The heads that are counted step by step.
#[derive(Default)]
pub struct Paces {
    /// Executions that make a head hot of which nothing else is known; none if heads are counted
    /// without a break.
    wanted: Option<u64>,
    heads: FxHashMap<u64, Pace>,
    /// When who is woken.
    naps: BinaryHeap<Reverse<(u64, u64)>>,
    watch: Option<Watch>,
}

impl Paces {
    /// Forgets all heads.
    pub fn clear(&mut self) {
        self.heads.clear();
        self.naps.clear();
        self.watch = None;
    }
}

impl Fragments {
    /// From now on heads are counted step by step, until they have been executed `wanted` times.
    pub fn pace_heads(&mut self, wanted: u64) {
        self.paces.wanted = Some(wanted);
    }

    /// A head's counter has left after so many executions, which took so many ticks. How often it
    /// has been executed, if it is hot.
    pub fn is_hot(
        &mut self,
        pc: u64,
        counter: CounterId,
        executions: u64,
        took: u64,
    ) -> Option<u64> {
        let Some(wanted) = self.paces.wanted.filter(|_| !self.retired && self.first(pc).is_none())
        else {
            return Some(executions);
        };
        let pace = self.paces.heads.entry(pc).or_insert(Pace::new(wanted));
        match pace.step(executions, took, ticks()) {
            Then::Hot => return Some(pace.seen),
            Then::Count(n) => self.emitter.set_counter(counter, n),
            Then::Nap(time) => self.rest(pc, counter, time, executions.saturating_mul(NAP)),
        }
        None
    }

    /// A head is hot once more after `n` executions.
    pub fn set_counter(&mut self, pc: u64, counter: CounterId, n: u64) {
        let step = match self.paces.wanted {
            Some(_) if !self.retired => {
                self.paces.heads.insert(pc, Pace::new(n));
                n.min(STEP)
            }
            _ => n,
        };
        self.emitter.set_counter(counter, step);
    }

    /// There is no time for a hot head now, which was executed so many times: it is hot again after
    /// a nap, or as many more.
    pub fn put_off(&mut self, pc: u64, counter: CounterId, executions: u64) {
        match self.paces.heads.get_mut(&pc) {
            Some(pace) => {
                let factor = 1 << pace.put_off.min(MOST_PUT_OFF);
                pace.put_off += 1;
                self.rest(pc, counter, SOON * factor, executions.saturating_mul(factor));
            }
            None => self.emitter.set_counter(counter, executions.saturating_mul(2)),
        }
    }

    /// The head keeps watch for so many executions, and naps for so long when another one does.
    fn rest(&mut self, pc: u64, counter: CounterId, time: u64, executions: u64) {
        if self.retired {
            return;
        }
        self.emitter.set_counter(counter, executions);
        let relieved = self.paces.watch.replace(Watch { pc, time });
        if let Some(watch) = relieved.filter(|watch| watch.pc != pc)
            && self.emitter.pause_counting(watch.pc)
        {
            self.paces.naps.push(Reverse((ticks().saturating_add(watch.time), watch.pc)));
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
            let left = self
                .paces
                .heads
                .get(&pc)
                .map_or(STEP, |pace| pace.wanted.saturating_sub(pace.seen));
            if !self.emitter.count_again(pc, left.clamp(1, STEP)) {
                self.paces.heads.remove(&pc);
            }
        }
        self.links_changed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gets_hot_soon_is_counted_to_the_end() {
        let mut soon = Pace::new(25_000);
        assert_eq!(soon.step(1000, SOON / 100, SOON), Then::Count(24_000));
        assert_eq!(soon.step(24_000, u64::MAX, u64::MAX), Then::Hot);
    }

    #[test]
    fn what_is_executed_in_a_nap_is_reckoned_by_the_slower_pace() {
        // A thousandth of an execution a tick, twice as many, half as many.
        for (second, took, credit) in
            [(1000, SOON, 10_000), (2000, SOON, 10_000), (1000, 2 * SOON, 5_000)]
        {
            let mut late = Pace::new(100_000);
            assert_eq!(late.step(1000, SOON, SOON), Then::Nap((SOON * NAP).min(LONGEST)));
            let now = 11 * SOON + took;
            assert!(matches!(late.step(second, took, now), Then::Nap(_)));
            assert_eq!(late.seen, 1000 + second + credit);
        }
    }

    #[test]
    fn who_kept_watch_has_been_counted() {
        let mut late = Pace::new(1_000_000);
        assert_eq!(late.step(1000, SOON, SOON), Then::Nap(LONGEST));
        assert_eq!(late.step(100_000, 100 * SOON, 101 * SOON), Then::Nap(LONGEST));
        assert_eq!(late.seen, 101_000);
        assert_eq!(late.step(899_000, u64::MAX, u64::MAX), Then::Hot);
    }
}
