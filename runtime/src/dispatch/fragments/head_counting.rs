//! Heads among copied blocks are counted, with pauses ([`dynasour_tracer::head_pauses`]).
//!
//! No clock ends a pause, since a guest could notice a timer: pauses end when a thread comes to the
//! runtime for another reason. To make sure that one does, the head whose pause was to begin last
//! is the *sentinel*: it continues to be counted, for as many executions as its pause is estimated
//! to have, until another head's pause is to begin.
//!
//! Data: [`HeadCounting`], part of [`Fragments`]. Invariant: the head of each pause in the queue has its
//! links past its counter, unless its block is gone. The caller holds the lock of the fragments.
//!
//! Example: A's interval ends and it is not hot soon: A is the sentinel. Then B's interval ends: B
//! becomes the sentinel, links to A lead past its counter. B's counter runs out three seconds later;
//! A's pause is over, and links to A lead to its counter again.

use super::Fragments;
use dynasour_emitter::blocks::{CounterId, HeadCounts};
use dynasour_emitter::ticks;
use dynasour_tracer::head_pauses::{HeadCount, INTERVAL, Next, PAUSE, SOON};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The head that is counted although its pause should have begun.
#[derive(Clone, Copy)]
struct Sentinel {
    pc: u64,
    /// Ticks of its pause.
    time: u64,
}

/// The heads that are counted with pauses.
#[derive(Default)]
pub struct HeadCounting {
    /// Executions that make a head hot of which nothing else is known; none if heads are counted
    /// without pauses.
    wanted: Option<u64>,
    heads: FxHashMap<u64, HeadCount>,
    /// For each pause the time stamp of its end and its head's pc.
    pauses: BinaryHeap<Reverse<(u64, u64)>>,
    sentinel: Option<Sentinel>,
}

impl HeadCounting {
    /// Forgets all heads.
    pub fn clear(&mut self) {
        self.heads.clear();
        self.pauses.clear();
        self.sentinel = None;
    }
}

impl Fragments {
    /// Which heads are counted from now on, and whether with pauses.
    pub fn count_heads(&mut self, mut heads: HeadCounts, with_pauses: bool) {
        if with_pauses {
            self.counting.wanted = Some(heads.threshold);
            heads.threshold = heads.threshold.min(INTERVAL);
        }
        self.heads = heads;
        self.emitter.count_heads(heads);
    }

    /// Is the head at `pc` one because it is called?
    pub fn is_function(&self, pc: u64) -> bool {
        self.emitter.is_called(pc)
    }

    /// The counter of the head at `pc` has left after `executions`, which took `took` ticks. How
    /// often the head has been executed, if it is hot.
    pub fn is_hot(
        &mut self,
        pc: u64,
        counter: CounterId,
        executions: u64,
        took: u64,
    ) -> Option<u64> {
        let Some(wanted) =
            self.counting.wanted.filter(|_| !self.retired && self.first(pc).is_none())
        else {
            return Some(executions);
        };
        let head = self.counting.heads.entry(pc).or_insert(HeadCount::new(wanted));
        match head.interval(executions, took, ticks()) {
            Next::Hot => return Some(head.seen()),
            Next::Count(n) => self.emitter.set_counter(counter, n),
            Next::Pause(time) => self.pause(pc, counter, time, executions.saturating_mul(PAUSE)),
        }
        None
    }

    /// The head at `pc` is hot again after `n` executions.
    pub fn set_counter(&mut self, pc: u64, counter: CounterId, n: u64) {
        let interval = match self.counting.wanted {
            Some(_) if !self.retired => {
                self.counting.heads.insert(pc, HeadCount::new(n));
                n.min(INTERVAL)
            }
            _ => n,
        };
        self.emitter.set_counter(counter, interval);
    }

    /// There is no time now for the hot head at `pc`, which was executed `executions` times: it is
    /// hot again after a pause, or after as many executions more.
    pub fn put_off(&mut self, pc: u64, counter: CounterId, executions: u64) {
        match self.counting.heads.get_mut(&pc) {
            Some(head) => {
                let factor = head.put_off();
                self.pause(pc, counter, SOON * factor, executions.saturating_mul(factor));
            }
            None => self.emitter.set_counter(counter, executions.saturating_mul(2)),
        }
    }

    /// The head at `pc` becomes the sentinel, for `executions`; its pause of `time` ticks begins when
    /// another head becomes the sentinel.
    fn pause(&mut self, pc: u64, counter: CounterId, time: u64, executions: u64) {
        if self.retired {
            return;
        }
        self.emitter.set_counter(counter, executions);
        let before = self.counting.sentinel.replace(Sentinel { pc, time });
        if let Some(before) = before.filter(|before| before.pc != pc)
            && self.emitter.pause_counting(before.pc)
        {
            self.counting.pauses.push(Reverse((ticks().saturating_add(before.time), before.pc)));
        }
    }

    /// Counts heads again whose pauses are over.
    pub fn end_pauses(&mut self) {
        if self.retired || self.counting.pauses.is_empty() {
            return;
        }
        let now = ticks();
        while let Some(&Reverse((time, pc))) = self.counting.pauses.peek()
            && time <= now
        {
            self.counting.pauses.pop();
            let left = self.counting.heads.get(&pc).map_or(INTERVAL, HeadCount::left);
            if !self.emitter.count_again(pc, left.clamp(1, INTERVAL)) {
                self.counting.heads.remove(&pc);
            }
        }
        self.links_changed();
    }
}
