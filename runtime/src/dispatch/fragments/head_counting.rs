//! Counts the executions of heads among copied blocks, with pauses
//! ([`dynasour_tracer::head_pauses`]).
//!
//! No timer ends a pause, since a guest could notice a timer. Pauses end when a thread comes to the
//! runtime for another reason. To make sure that one does, one head is the *sentinel*: instead of
//! pausing, it continues to be counted, for about as many executions as its pause would last. When
//! another head's pause is to begin, the one of the two that is executed less often is the sentinel,
//! and the pause of the other begins.
//!
//! Targets of indirect jumps are heads, too, unless they look like places where functions return to.
//!
//! Data: [`HeadCounting`], part of [`Fragments`]. Invariant: links to a head in the queue of pauses
//! lead to its block, past its counter, unless the block is gone. The caller holds the lock of the
//! fragments.
//!
//! Example: A's interval ends and A will not be hot soon: A is the sentinel. Then B's interval
//! ends, which is executed less often: B is the sentinel, and links to A lead past its counter. B's
//! counter runs out two seconds later. A's pause is over by then, and links to A lead to its counter again.

use super::Fragments;
use crate::memory;
use dynasour_emitter::blocks::{CounterId, HeadCounts};
use dynasour_emitter::ticks;
use dynasour_tracer::head_pauses::{HeadCount, INTERVAL, LONGEST, Next, PAUSE, SOON};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The head that is counted although its pause should have begun.
#[derive(Clone, Copy)]
struct Sentinel {
    pc: u64,
    /// The length of its pause in ticks of the time stamp counter.
    time: u64,
}

impl Sentinel {
    /// Is this head a better sentinel than one with a pause of `time` ticks? One that is executed
    /// seldom costs less, because it is counted seldom. But one that is executed so seldom that its
    /// pause has the greatest length may not be executed any more.
    fn is_better_than(&self, time: u64) -> bool {
        let rank = |time: u64| (time < LONGEST, time);
        rank(self.time) > rank(time)
    }
}

/// The heads that are counted with pauses.
#[derive(Default)]
pub struct HeadCounting {
    /// The number of executions that makes a new head hot; none if heads are counted without
    /// pauses.
    wanted: Option<u64>,
    /// The count of each head, by its pc.
    heads: FxHashMap<u64, HeadCount>,
    /// The pauses: the time stamp of the end, in ticks, and the head's pc. The pause that ends
    /// first is on top.
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
    /// Makes copied blocks count the heads that `heads` names, with pauses or without.
    pub fn count_heads(&mut self, mut heads: HeadCounts, with_pauses: bool) {
        if with_pauses {
            self.counting.wanted = Some(heads.threshold);
            heads.threshold = heads.threshold.min(INTERVAL);
        }
        self.heads = heads;
        self.emitter.count_heads(heads);
    }

    /// Are heads counted with pauses, so that it depends on time when they are hot?
    pub(super) fn counts_with_pauses(&self) -> bool {
        self.counting.wanted.is_some()
    }

    /// Is the head at `pc` a head because it is called?
    pub fn is_function(&self, pc: u64) -> bool {
        self.emitter.is_called(pc)
    }

    /// The counter of the head at `pc` has left after `executions` of the head, in `took` ticks. If
    /// the head is hot, returns how often it has been executed. Otherwise sets the counter again or
    /// begins a pause.
    pub fn is_hot(
        &mut self,
        pc: u64,
        counter: CounterId,
        executions: u64,
        took: u64,
    ) -> Option<u64> {
        let Some(wanted) =
            self.counting.wanted.filter(|_| !self.retired && self.first_version(pc).is_none())
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

    /// Sets the counter of the head at `pc`, which is hot again after `n` more executions.
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

    /// The head at `pc` is hot, after `executions` executions, but no time may be spent on traces
    /// now. It will be hot again after a pause, or without pauses after twice as many executions.
    pub fn postpone(&mut self, pc: u64, counter: CounterId, executions: u64) {
        match self.counting.heads.get_mut(&pc) {
            Some(head) => {
                let factor = head.postpone();
                self.pause(pc, counter, SOON * factor, executions.saturating_mul(factor));
            }
            None => self.emitter.set_counter(counter, executions.saturating_mul(2)),
        }
    }

    /// The head at `pc`, whose trace was dropped, is counted again.
    pub fn count_head_again(&mut self, pc: u64) {
        if self.retired || self.first_version(pc).is_some() {
            return;
        }
        let wanted = match self.counting.wanted {
            Some(wanted) => {
                self.counting.heads.insert(pc, HeadCount::new(wanted));
                wanted.min(INTERVAL)
            }
            None => self.heads.threshold,
        };
        self.emitter.count_again(pc, wanted);
        self.links_changed();
    }

    /// The pause of the head at `pc`, of `time` ticks, is to begin. Of this head and the sentinel, the
    /// one that is executed less often is the sentinel from now on, for `executions` executions; the
    /// pause of the other begins.
    fn pause(&mut self, pc: u64, counter: CounterId, time: u64, executions: u64) {
        if self.retired {
            return;
        }
        let paused = match self.counting.sentinel {
            Some(other) if other.pc != pc && other.is_better_than(time) => Sentinel { pc, time },
            before => {
                self.emitter.set_counter(counter, executions);
                self.counting.sentinel = Some(Sentinel { pc, time });
                match before {
                    Some(before) if before.pc != pc => before,
                    _ => return,
                }
            }
        };
        if self.emitter.pause_counting(paused.pc) {
            self.counting.pauses.push(Reverse((ticks().saturating_add(paused.time), paused.pc)));
        }
    }

    /// Counts those heads again whose pauses are over.
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

/// Do the bytes before `pc` look like a call, so that `pc` is probably where a function returns to?
pub(super) fn follows_call(pc: u64) -> bool {
    let mut before = [0; 7];
    let start = pc.wrapping_sub(before.len() as u64);
    memory::fetch_code(start, &mut before) == before.len() && ends_in_call(&before)
}

/// Do the bytes end in `call rel32` or `call r/m64`?
fn ends_in_call(bytes: &[u8; 7]) -> bool {
    let is_indirect = |len: usize| {
        let [opcode, modrm, ..] = bytes[7 - len..] else { return false };
        let (mode, memory) = (modrm >> 6, modrm & 7);
        let address = match (mode, memory) {
            (3, _) => 0,
            (0, 5) => 4,
            (0, 4) => 1,
            (0, _) => 0,
            (1, 4) => 2,
            (1, _) => 1,
            (_, 4) => 5,
            (_, _) => 4,
        };
        opcode == 0xff && modrm >> 3 & 7 == 2 && len == 2 + address
    };
    bytes[2] == 0xe8 || (2..=7).any(is_indirect)
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::code_asm::*;

    #[test]
    fn the_sentinel_is_executed_seldom_but_executed() {
        let sentinel = |time| Sentinel { pc: 0x1000, time };
        assert!(sentinel(SOON * 2).is_better_than(SOON), "it is executed less often");
        assert!(!sentinel(SOON).is_better_than(SOON * 2));
        assert!(!sentinel(LONGEST).is_better_than(SOON), "perhaps it is not executed any more");
        assert!(sentinel(SOON).is_better_than(LONGEST));
    }

    #[test]
    fn calls_are_known_by_their_last_bytes() {
        type Add = fn(&mut CodeAssembler) -> Result<(), IcedError>;
        let ends: [(Add, bool); 10] = [
            (|a| a.call(0x1234), true),
            (|a| a.call(rax), true),
            (|a| a.call(r11), true),
            (|a| a.call(qword_ptr(rbx)), true),
            (|a| a.call(qword_ptr(rbx + 8)), true),
            (|a| a.call(qword_ptr(r12 + 0x1000)), true),
            (|a| a.call(qword_ptr(rax + rcx * 8 + 0x1000)), true),
            (|a| a.jmp(rax), false),
            (|a| a.jmp(qword_ptr(rax)), false),
            (|a| a.ret(), false),
        ];
        for (n, (add, is_call)) in ends.into_iter().enumerate() {
            let mut a = CodeAssembler::new(64).unwrap();
            (0..7).for_each(|_| a.nop().unwrap());
            add(&mut a).unwrap();
            let code = a.assemble(0x1000).unwrap();
            let end = code[code.len() - 7..].try_into().unwrap();
            assert_eq!(ends_in_call(&end), is_call, "{n}: {code:x?}");
        }
    }
}
