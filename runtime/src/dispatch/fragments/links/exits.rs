//! The state of each exit, and how it changes.
//!
//! ```text
//!                  left: n + 1
//!                   ┌──────┐
//!                   │      ▼     counter made
//!   (made) ──────► Counting(n) ───────────────► Counted      a resolved stub leads to a counter
//!                   │ ▲  │  │                     │          and on to the block
//!            record │ │  │  └─ link, settle       │ record, link, settle
//!                   ▼ │  └──────────┐             │
//!               Recording           ▼             │
//!                   │         Linked, Settled ◄───┘          a resolved stub leads to a place,
//!            attach │               │                        a fragment, a block or the tables
//!                   ▼               │ left, unlinked
//!               Attached            ▼
//!                │    ▲         Counting
//!           rest ▼    │ woke
//!               Resting
//! ```
//!
//! A state says what the runtime has decided; the link in memory follows. It is changed first, then
//! code is written, all under the lock of the fragments, and a change that then fails for want of
//! memory is undone by [`Event::Unlinked`]. An exit that comes to the runtime although it is linked
//! counts anew: its fragment was unlinked for a signal, or a guard with the same anchor, and so
//! with the same link, was unlinked.
//!
//! The module owns the states, the resolved stubs with the exits that they were made for, and the
//! votes on computed targets. Fragments and exits are numbered anew after a flush: then all is
//! cleared.
//!
//! Example: a guard fails 16 times and gets a counter (`Counted`); the counter runs out, nothing
//! starts at its target, so a trace is recorded (`Recording`) and attached (`Attached`); the page
//! it was made from is written to (`Resting`).

use super::computed::Votes;
use dynasour_emitter::{ExitId, FragmentId};
use rustc_hash::FxHashMap;

/// What is done about an exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExitState {
    /// It comes to the runtime, so many times so far.
    Counting(u32),
    /// It leads to a counter.
    Counted,
    /// It is hot; a trace is being made for it.
    Recording,
    /// It leads where [`allowed`](super::policy::allowed) says.
    Linked,
    /// No trace will be made for it: it leads to what is at its target.
    Settled,
    /// It leads to a trace of its own.
    Attached,
    /// Its own trace rests; it comes to the runtime.
    Resting,
}

/// What happens to an exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// It came to the runtime.
    Left,
    /// A counter is made for it.
    CounterMade,
    /// A trace from its target is wanted.
    Record,
    /// It is linked.
    Link,
    /// It is given up.
    Settle,
    /// A trace of its own was made.
    Attach,
    /// The code of its own trace was touched.
    Rest,
    /// That trace can be entered again.
    Woke,
    /// What it led to is gone, or could not be made.
    Unlinked,
}

impl ExitState {
    /// The state after an event; none if that cannot happen in this state.
    pub fn after(self, event: Event) -> Option<ExitState> {
        use ExitState::*;
        match (event, self) {
            (Event::Left, Counting(taken)) => Some(Counting(taken.saturating_add(1))),
            (Event::Left, _) => Some(Counting(1)),
            (Event::Unlinked, _) => Some(Counting(0)),
            // One counter: the trace that it asks for comes instead of another.
            (Event::CounterMade, Counting(_)) => Some(Counted),
            (Event::CounterMade, _) => None,
            // What is hot has been counted, by the runtime or by a counter; another thread may be
            // recording.
            (Event::Record, Counting(_) | Counted | Recording) => Some(Recording),
            (Event::Record, _) => None,
            // Of what is linked, its stub may be led elsewhere.
            (Event::Link, Counting(_) | Counted | Recording | Linked) => Some(Linked),
            (Event::Link, _) => None,
            (Event::Settle, Counting(_) | Counted | Recording) => Some(Settled),
            (Event::Settle, _) => None,
            (Event::Rest, Attached) => Some(Resting),
            (Event::Rest, state) => Some(state),
            // Whatever it was led to since: the trace that was made for it is better.
            (Event::Attach | Event::Woke, _) => Some(Attached),
        }
    }
}

/// A resolved stub.
#[derive(Clone, Copy)]
pub struct Stub {
    /// The exit it was made for.
    pub origin: ExitId,
    /// It leads to the body of the block at its target.
    pub to_body: bool,
}

/// The states of all exits. One that is not named has never come to the runtime.
#[derive(Default)]
pub struct Exits {
    states: FxHashMap<ExitId, ExitState>,
    stubs: FxHashMap<FragmentId, Stub>,
    pub votes: Votes,
}

impl Exits {
    /// Forgets everything: all fragments go.
    pub fn clear(&mut self) {
        self.states.clear();
        self.stubs.clear();
        self.votes.clear();
    }

    /// The state of an exit.
    pub fn state(&self, exit: ExitId) -> ExitState {
        self.states.get(&exit).copied().unwrap_or(ExitState::Counting(0))
    }

    /// Can this happen to an exit now?
    pub fn can(&self, exit: ExitId, event: Event) -> bool {
        self.state(exit).after(event).is_some()
    }

    /// Something happens to an exit, whose code is written after this. False if it cannot: then
    /// nothing is to be written.
    pub fn change(&mut self, exit: ExitId, event: Event) -> bool {
        let state = self.states.entry(exit).or_insert(ExitState::Counting(0));
        let next = state.after(event);
        debug_assert!(next.is_some(), "{event:?} of {exit:?}, which is {state:?}");
        *state = next.unwrap_or(*state);
        next.is_some()
    }

    /// An exit came to the runtime. How often it has, since it was linked or began to be counted.
    pub fn count_left(&mut self, exit: ExitId) -> u32 {
        self.change(exit, Event::Left);
        match self.state(exit) {
            ExitState::Counting(taken) => taken,
            _ => 0,
        }
    }

    /// The last time does not count: what the exit waits for is not there yet.
    pub fn uncount(&mut self, exit: ExitId) {
        if let Some(ExitState::Counting(taken)) = self.states.get_mut(&exit) {
            *taken = taken.saturating_sub(1);
        }
    }

    /// A stub was made.
    pub fn add_stub(&mut self, fragment: FragmentId, stub: Stub) {
        self.stubs.insert(fragment, stub);
    }

    /// What is known of a fragment that is a resolved stub.
    pub fn stub(&self, fragment: FragmentId) -> Option<Stub> {
        self.stubs.get(&fragment).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::Event::*;
    use super::ExitState::*;
    use super::*;

    #[test]
    fn the_whole_table() {
        let states = [Counting(7), Counted, Recording, Linked, Settled, Attached, Resting];
        // For each event, what each of these states becomes.
        let table = [
            (
                Left,
                [
                    Counting(8),
                    Counting(1),
                    Counting(1),
                    Counting(1),
                    Counting(1),
                    Counting(1),
                    Counting(1),
                ]
                .map(Some),
            ),
            (CounterMade, [Some(Counted), None, None, None, None, None, None]),
            (Record, [Some(Recording), Some(Recording), Some(Recording), None, None, None, None]),
            (Link, [Some(Linked), Some(Linked), Some(Linked), Some(Linked), None, None, None]),
            (Settle, [Some(Settled), Some(Settled), Some(Settled), None, None, None, None]),
            (Attach, [Some(Attached); 7]),
            (Rest, [Counting(7), Counted, Recording, Linked, Settled, Resting, Resting].map(Some)),
            (Woke, [Some(Attached); 7]),
            (Unlinked, [Some(Counting(0)); 7]),
        ];
        for (event, expected) in table {
            assert_eq!(states.map(|state| state.after(event)), expected, "{event:?}");
        }
    }

    #[test]
    fn an_exit_is_counted_until_it_is_linked() {
        let (mut exits, exit) = (Exits::default(), ExitId(3));
        assert_eq!((1..=5).map(|_| exits.count_left(exit)).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert!(
            exits.change(exit, CounterMade)
                && exits.change(exit, Record)
                && exits.change(exit, Attach)
        );
        assert_eq!(exits.state(exit), Attached);
        assert_eq!(exits.count_left(exit), 1, "it came although it is linked");
        assert_eq!(exits.state(ExitId(4)), Counting(0));
    }
}
