//! Counters of trace heads: decides when a head is hot.
//!
//! A trace head is the target of a backward branch, of a call or of a fragment's exit
//! (docs/design.md, "Words"). Only heads are counted.
//!
//! **Data.** [`HeadTable`] has a direct-mapped table of counters, samples of the registers of heads
//! that will soon be hot, and the failures of each head. **Invariants.** Two heads may share a
//! counter and take it from each other (HotpathVM accepts collisions); this delays a trace and
//! never makes a wrong one. Each failed recording doubles the head's threshold, until the head is
//! given up. **Callers.** Each thread has a table of its own, part of [`crate::TraceSelector`];
//! no lock.
//!
//! ```text
//! threshold 1000: executions 1 to 995 count; 996 to 1000 also sample; number 1000 is Hot
//! ```

use crate::policy::SpeculationPolicy;
use dynasour_ir::Gpr;
use rustc_hash::FxHashMap;

/// Number of counters, 256 KiB in all (guess; with fewer, hot heads take each other's counter more
/// often and get hot later).
const SLOTS: usize = 1 << 14;

/// The registers are compared at this number of executions before the head is hot (guess; with
/// fewer, registers that change count as stable, and guards on them fail).
const SAMPLES: u32 = 4;

/// One counter.
#[derive(Clone)]
struct Slot {
    /// The head that has the counter.
    pc: u64,
    count: u32,
}

/// Samples of the last executions of a head that will soon be hot.
struct Sample {
    /// Registers at the latest sample.
    gpr: [u64; 16],
    /// Bit n: register n was the same at every sample so far.
    stable: u16,
}

/// The answer of the table for one execution of a head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heat {
    /// The head is not hot yet, or has been given up.
    Cold,
    /// The head is to be recorded now. Bit n of `stable`: register n held its present value at each
    /// sampled execution.
    Hot {
        /// The stable registers.
        stable: u16,
    },
}

/// The index of the counter that `pc` uses.
fn index(pc: u64) -> usize {
    (pc as usize ^ (pc >> 14) as usize) % SLOTS
}

/// The counter of `pc`. If another head has it, that head loses its count.
fn slot<'s>(
    slots: &'s mut Vec<Slot>,
    samples: &mut FxHashMap<u64, Sample>,
    pc: u64,
) -> &'s mut Slot {
    if slots.is_empty() {
        slots.resize(SLOTS, Slot { pc: 0, count: 0 });
    }
    let slot = &mut slots[index(pc)];
    if slot.pc != pc {
        samples.remove(&slot.pc);
        *slot = Slot { pc, count: 0 };
    }
    slot
}

/// Counters of trace heads.
#[derive(Default)]
pub struct HeadTable {
    /// Empty until the first count, because many processes end before that.
    slots: Vec<Slot>,
    /// By pc; only for heads in `slots`.
    samples: FxHashMap<u64, Sample>,
    /// By pc: failed recordings and compilations.
    failures: FxHashMap<u64, u32>,
    /// By pc: the factor of the threshold until the head becomes hot once more.
    postponed: FxHashMap<u64, u32>,
    /// By pc: bit n says that register n was found to change, and does not count as stable.
    undone: FxHashMap<u64, u16>,
}

impl HeadTable {
    /// Counts one execution of the head at `pc` with registers `gpr`.
    pub fn count(&mut self, pc: u64, gpr: &[u64; 16], policy: &dyn SpeculationPolicy) -> Heat {
        if self.is_blacklisted(pc, policy) {
            return Heat::Cold;
        }
        let threshold = self.threshold(pc, policy);
        let slot = slot(&mut self.slots, &mut self.samples, pc);
        slot.count += 1;
        let left = threshold.saturating_sub(slot.count);
        if left > SAMPLES {
            return Heat::Cold;
        }
        if left == SAMPLES {
            self.samples.insert(pc, Sample { gpr: *gpr, stable: u16::MAX });
            return Heat::Cold;
        }
        // A threshold below the number of samples leaves too few samples, so no register counts as
        // stable.
        let sample = self.samples.entry(pc).or_insert(Sample { gpr: *gpr, stable: 0 });
        for g in Gpr::all() {
            if sample.gpr[g.number()] != gpr[g.number()] {
                sample.stable &= !(1 << g.number());
            }
        }
        sample.gpr = *gpr;
        let stable = sample.stable & !self.undone.get(&pc).copied().unwrap_or(0);
        if left > 0 {
            return Heat::Cold;
        }
        slot.count = 0;
        self.samples.remove(&pc);
        self.postponed.remove(&pc);
        Heat::Hot { stable }
    }

    /// Notes `n` executions of the head at `pc` that [`HeadTable::count`] did not see. They do not
    /// make the head hot: the last executions must be counted and sampled.
    pub fn skip(&mut self, pc: u64, n: u64, policy: &dyn SpeculationPolicy) {
        let most = self.threshold(pc, policy).saturating_sub(SAMPLES + 1);
        let slot = slot(&mut self.slots, &mut self.samples, pc);
        if slot.count < most {
            slot.count = u32::try_from(n).unwrap_or(u32::MAX).saturating_add(slot.count).min(most);
        }
    }

    /// The number of executions of the head at `pc` after which [`HeadTable::count`] must be
    /// called; `None` if the head has been given up.
    pub fn due(&self, pc: u64, policy: &dyn SpeculationPolicy) -> Option<u64> {
        if self.is_blacklisted(pc, policy) {
            return None;
        }
        let counted =
            self.slots.get(index(pc)).filter(|slot| slot.pc == pc).map_or(0, |slot| slot.count);
        Some(u64::from(
            self.threshold(pc, policy).saturating_sub(counted).saturating_sub(SAMPLES).max(1),
        ))
    }

    /// The executions that make the head at `pc` hot.
    fn threshold(&self, pc: u64, policy: &dyn SpeculationPolicy) -> u32 {
        let failures = self.failures.get(&pc).copied().unwrap_or(0);
        let factor = self.postponed.get(&pc).copied().unwrap_or(1);
        policy.head_threshold().saturating_mul(1 << failures.min(16)).saturating_mul(factor)
    }

    /// Multiplies the threshold of the head at `pc` until it has become hot once more.
    pub fn postpone(&mut self, pc: u64, factor: u32) {
        self.postponed.insert(pc, factor.max(1));
    }

    /// Has the head been postponed without becoming hot since?
    pub fn is_postponed(&self, pc: u64) -> bool {
        self.postponed.contains_key(&pc)
    }

    /// Notes that recording or compiling the head at `pc` failed. Its threshold doubles; after
    /// enough failures it is given up.
    pub fn penalise(&mut self, pc: u64) {
        *self.failures.entry(pc).or_default() += 1;
    }

    /// A register of the head at `pc` changes although it seemed to be stable.
    pub fn undo(&mut self, pc: u64, g: Gpr) {
        *self.undone.entry(pc).or_default() |= 1 << g.number();
    }

    /// Forgets the failures of the head at `pc`.
    pub fn forgive(&mut self, pc: u64) {
        self.failures.remove(&pc);
    }

    /// Gives the head at `pc` up.
    pub fn give_up(&mut self, pc: u64, policy: &dyn SpeculationPolicy) {
        self.failures.insert(pc, policy.max_failures());
    }

    /// Has the head been given up?
    pub fn is_blacklisted(&self, pc: u64, policy: &dyn SpeculationPolicy) -> bool {
        self.failures.get(&pc).is_some_and(|&f| f >= policy.max_failures())
    }

    /// How many heads have been given up.
    pub fn blacklisted(&self, policy: &dyn SpeculationPolicy) -> usize {
        self.failures.values().filter(|&&f| f >= policy.max_failures()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::DefaultPolicy;

    #[test]
    fn a_head_becomes_hot_at_the_threshold_and_knows_its_stable_registers() {
        let policy = DefaultPolicy { head_threshold: 10, ..DefaultPolicy::default() };
        let mut heads = HeadTable::default();
        let mut gpr = [7u64; 16];
        for i in 1..10 {
            gpr[1] = i;
            assert_eq!(heads.count(0x1000, &gpr, &policy), Heat::Cold);
        }
        assert_eq!(heads.count(0x1000, &gpr, &policy), Heat::Hot { stable: !2 });
    }

    #[test]
    fn a_postponed_head_becomes_hot_later_once() {
        let policy = DefaultPolicy { head_threshold: 10, ..DefaultPolicy::default() };
        let mut heads = HeadTable::default();
        heads.postpone(0x1000, 3);
        let mut executions =
            || (1..).find(|_| heads.count(0x1000, &[0; 16], &policy) != Heat::Cold);
        assert_eq!((executions(), executions()), (Some(30), Some(10)));
        assert!(!heads.is_postponed(0x1000));
    }

    #[test]
    fn a_register_that_was_found_to_change_is_not_stable() {
        let policy = DefaultPolicy { head_threshold: 10, ..DefaultPolicy::default() };
        let mut heads = HeadTable::default();
        heads.undo(0x1000, Gpr::all().nth(3).expect("sixteen registers"));
        let hot = (0..10).map(|_| heads.count(0x1000, &[0; 16], &policy)).last();
        assert_eq!(hot, Some(Heat::Hot { stable: !8 }));
    }

    #[test]
    fn executions_counted_elsewhere_bring_the_samples_nearer() {
        let policy = DefaultPolicy { head_threshold: 100, ..DefaultPolicy::default() };
        let mut heads = HeadTable::default();
        let due = heads.due(0x1000, &policy).expect("not given up");
        assert_eq!(due, 96);
        heads.skip(0x1000, due - 1, &policy);
        let counted = (1..).find(|_| heads.count(0x1000, &[5; 16], &policy) != Heat::Cold);
        assert_eq!(counted, Some(SAMPLES + 1));
        heads.penalise(0x1000);
        assert_eq!(heads.due(0x1000, &policy), Some(196));
        heads.skip(0x1000, 1 << 40, &policy);
        assert_eq!(heads.due(0x1000, &policy), Some(1));
        assert_eq!(heads.count(0x1000, &[5; 16], &policy), Heat::Cold);
    }

    #[test]
    fn threshold_one_is_hot_at_once_without_speculation() {
        let policy = DefaultPolicy { head_threshold: 1, ..DefaultPolicy::default() };
        let mut heads = HeadTable::default();
        assert_eq!(heads.count(0x1000, &[0; 16], &policy), Heat::Hot { stable: 0 });
    }

    #[test]
    fn failures_double_the_threshold_and_then_blacklist() {
        let policy = DefaultPolicy { head_threshold: 2, ..DefaultPolicy::default() };
        let mut heads = HeadTable::default();
        heads.penalise(0x40);
        let hot_after = (1..).find(|_| heads.count(0x40, &[0; 16], &policy) != Heat::Cold);
        assert_eq!(hot_after, Some(4));
        heads.penalise(0x40);
        heads.penalise(0x40);
        assert!(heads.is_blacklisted(0x40, &policy));
        assert!((0..1000).all(|_| heads.count(0x40, &[0; 16], &policy) == Heat::Cold));
    }
}
