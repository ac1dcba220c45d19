//! Whose turn it is to race: one trace of the process at a time, on one thread.
//!
//! ```text
//!            enter, if there is no racer; next
//!   waiting ────────────────────────────────────► racer ──► end
//!      ▲                                            │
//!      └────────────────────────────────────────────┘
//!        put off: its thread has ended, or does not look at it
//! ```
//!
//! Each trace has a thread that runs its race: the one that made it. That of a thread that has ended is
//! taken by the next thread that asks. A thread that sleeps, or executes something else for long, does not
//! come to the end of a window, and the others would stay on the side of that window; then its trace waits
//! again.
//!
//! Data: [`Turns`], part of [`super::race::Races`]. Invariants: each turn has a number of its own, so a
//! thread notices that its turn was taken away, even if the trace has got another one. A racer has a thread
//! from the first time that anybody asks for it on. The caller holds the lock of the fragments.
//!
//! Example: threads A and B have made a trace each, and A's races. A sleeps in a read for ten seconds. B asks
//! for its turn after half a second: A's trace waits, and B's has its turn. When that race is over, A's has another
//! turn, which A takes when it leaves native code. (A signal that tells A could hide one of the guest's.)

use super::race::Racer;
use crate::dispatch::peers::PeerId;
use std::collections::VecDeque;

/// The most traces that wait (guess: later ones are used and never race).
const MOST_WAITING: usize = 64;
/// A race is put off if its thread has not looked at it for so many nanoseconds of real time (guess: many
/// windows, even if the processors are busy).
const PATIENCE: u64 = 500_000_000;

/// The racer, and the traces whose turn will come.
#[derive(Debug, Default)]
pub struct Turns {
    racer: Option<Racer>,
    /// The first one first.
    waiting: VecDeque<Racer>,
    /// The number of turns so far.
    turns: u64,
    /// When the racer's thread has looked at its race last, in nanoseconds of real time.
    looked: u64,
}

impl Turns {
    /// The racer.
    pub fn racer(&self) -> Option<Racer> {
        self.racer
    }

    /// The traces that wait.
    pub fn waiting(&self) -> impl Iterator<Item = &Racer> {
        self.waiting.iter()
    }

    /// The turn is over.
    pub fn end(&mut self) -> Option<Racer> {
        self.racer.take()
    }

    /// A trace was made. Does it race now, because there is no racer? Otherwise it waits.
    pub fn enter(&mut self, new: Racer, now: u64) -> bool {
        let is_free = self.racer.is_none();
        if is_free {
            self.begin(new, now);
        } else {
            self.wait(new);
        }
        is_free
    }

    /// A trace waits for its turn.
    pub fn wait(&mut self, racer: Racer) {
        if self.waiting.len() < MOST_WAITING && !self.waiting.contains(&racer) {
            self.waiting.push_back(racer);
        }
    }

    fn begin(&mut self, mut racer: Racer, now: u64) {
        self.turns += 1;
        self.looked = now;
        racer.turn = self.turns;
        self.racer = Some(racer);
    }

    /// The traces that have no thread belong to this one.
    pub fn claim(&mut self, own: PeerId) {
        for racer in self.racer.iter_mut().chain(&mut self.waiting) {
            racer.thread.get_or_insert(own);
        }
    }

    /// This thread ends: its traces have no thread. Is one of them the racer, which is to be put off?
    pub fn leave(&mut self, own: PeerId) -> bool {
        for racer in self.racer.iter_mut().chain(&mut self.waiting) {
            racer.leave(own);
        }
        self.racer.is_some_and(|racer| racer.thread.is_none())
    }

    /// The racer's thread has looked at its race.
    pub fn looked(&mut self, now: u64) {
        self.looked = now;
    }

    /// Does another thread's trace race?
    pub fn may_be_overdue(&self, own: PeerId) -> bool {
        self.racer.is_some_and(|racer| !racer.is_of(own))
    }

    /// Has the racer's thread not looked at its race for long?
    pub fn is_overdue(&self, now: u64) -> bool {
        now.saturating_sub(self.looked) > PATIENCE
    }

    /// Something is known of a trace that was not before.
    pub fn replace(&mut self, old: &Racer, new: Racer) {
        if self.racer.as_ref() == Some(old) {
            self.racer = Some(new);
        }
    }

    /// There is no racer: the turn of the first that waits and is live begins, if there is one.
    pub fn next(
        &mut self,
        own: PeerId,
        now: impl Fn() -> u64,
        is_live: impl Fn(&Racer) -> bool,
    ) -> Option<Racer> {
        debug_assert_eq!(self.racer, None);
        loop {
            let mut next = self.waiting.pop_front()?;
            if is_live(&next) {
                next.thread.get_or_insert(own);
                self.begin(next, now());
                return self.racer;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::peers::Peer;
    use std::collections::BTreeMap;

    fn trace(pc: u64) -> Racer {
        Racer::example(pc)
    }

    #[test]
    fn a_turn_that_was_taken_away_is_told_from_the_next() {
        let [a, b] = [Peer::default(), Peer::default()];
        let mut turns = Turns::default();
        assert!(turns.enter(trace(1), 0));
        turns.claim(a.id());
        let first = turns.racer().expect("it races");
        assert!(!turns.enter(trace(2), 0), "it waits");
        turns.claim(b.id());
        assert!(!turns.may_be_overdue(a.id()), "it is its own");
        assert!(turns.may_be_overdue(b.id()) && !turns.is_overdue(PATIENCE));
        turns.looked(10);
        assert!(!turns.is_overdue(PATIENCE + 1) && turns.is_overdue(PATIENCE + 11));
        let put_off = turns.end().expect("the racer");
        turns.wait(put_off);
        let of_b = turns.next(b.id(), || 0, |_| true).expect("it waits");
        assert_eq!(of_b.pc, 2);
        turns.end();
        let again = turns.next(b.id(), || 0, |_| true).expect("it waits");
        assert!(again.pc == 1 && !again.is_of(b.id()) && again.is_of(a.id()));
        assert_ne!(again, first);
    }

    /// Three threads that end, sleep and race as they like: each turn is one thread's, nobody runs a turn that
    /// is over, and every trace gets its turn.
    #[test]
    fn every_trace_gets_its_turn() {
        const TRACES: u64 = 12;
        for seed in 1..200u64 {
            let peers = [Peer::default(), Peer::default(), Peer::default()];
            let mut turns = Turns::default();
            // What each thread believes to be its turn.
            let mut believed: [Option<Racer>; 3] = [None; 3];
            let mut ended = BTreeMap::new();
            let (mut random, mut now, mut made) = (seed, 0, 0);
            let mut below = |n: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % n
            };
            for step in 0.. {
                assert!(step < 100_000, "seed {seed}: {turns:?}");
                if ended.len() as u64 == TRACES && turns.racer().is_none() {
                    break;
                }
                now += below(PATIENCE / 2);
                // The last one mostly sleeps.
                let thread = if below(8) == 0 { 2 } else { below(2) as usize };
                let own = peers[thread].id();
                match below(6) {
                    0 if made < TRACES => {
                        turns.enter(trace(made), now);
                        turns.claim(own);
                        made += 1;
                    }
                    1 if below(4) == 0 => {
                        if turns.leave(own) {
                            let racer = turns.end().expect("the racer");
                            turns.wait(racer);
                        }
                        believed[thread] = None;
                    }
                    2 => match (believed[thread].take(), turns.racer()) {
                        (Some(mine), Some(racer)) if mine == racer => {
                            assert!(racer.is_of(own), "seed {seed}");
                            assert_eq!(ended.insert(racer.pc, racer.turn), None, "seed {seed}");
                            turns.end();
                        }
                        // It was taken away.
                        _ => {}
                    },
                    _ => {
                        if turns.may_be_overdue(own) && turns.is_overdue(now) {
                            let racer = turns.end().expect("the racer");
                            turns.wait(racer);
                        }
                        if turns.racer().is_none() {
                            turns.next(own, || now, |_| true);
                        }
                        let mine = turns.racer().filter(|racer| racer.thread == Some(own));
                        if let Some(mine) = mine {
                            turns.looked(now);
                            believed[thread] = Some(mine);
                        }
                    }
                }
                let same = believed.iter().flatten().filter(|mine| turns.racer() == Some(**mine));
                assert!(same.count() <= 1, "seed {seed}: two threads run it");
            }
        }
    }
}
