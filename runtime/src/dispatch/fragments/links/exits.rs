//! The state of each exit: what the runtime has decided about it, and how that changes.
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
//! Data: [`Exits`]: the states, the resolved stubs with the exits that they were made for, and the
//! votes on computed targets. Fragments and exits are numbered anew after a flush, so all of it is
//! cleared then.
//!
//! Invariant: the state is changed first, then the link in memory. If writing code fails for lack
//! of memory, [`Event::Unlinked`] undoes the change. The caller holds the lock of the fragments
//! over both.
//!
//! An exit may come to the runtime although its state says that it is linked: its fragment was
//! unlinked for a signal, or another guard with the same anchor, and so with the same link, was
//! unlinked. Such an exit is counted anew.
//!
//! Example: a guard fails 16 times and gets a stub with a counter (`Counted`). The counter runs out
//! and no fragment starts at the target, so a side trace is recorded (`Recording`) and attached
//! (`Attached`). The page that the trace was made from is written to (`Resting`).

use super::computed::Votes;
use dynasour_emitter::{ExitId, FragmentId};
use rustc_hash::FxHashMap;

/// What the runtime has decided about an exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExitState {
    /// It leads to the runtime, to which it has come this many times.
    Counting(u32),
    /// It leads to a resolved stub that counts it and leads to the block at its target.
    Counted,
    /// It is hot; a side trace is being recorded for it.
    Recording,
    /// It leads by a resolved stub to a fragment, a place or the tables.
    Linked,
    /// No side trace will be made for it: it leads by a resolved stub to the place or the block at
    /// its target.
    Settled,
    /// It leads to a side trace of its own.
    Attached,
    /// Its own side trace rests; the exit leads to the runtime.
    Resting,
}

/// What happens to an exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// It came to the runtime.
    Left,
    /// A resolved stub with a counter is made for it.
    CounterMade,
    /// A side trace from its target is wanted.
    Record,
    /// A resolved stub is made for it that leads to native code.
    Link,
    /// It is decided that no side trace will be made for it.
    Settle,
    /// A side trace was made for it.
    Attach,
    /// Its own side trace begins to rest, since its code was touched.
    Rest,
    /// Its own side trace is live again.
    Woke,
    /// The code that it led to is gone, or could not be made.
    Unlinked,
}

impl ExitState {
    /// The state after an event; none if the event cannot happen in this state.
    pub fn after(self, event: Event) -> Option<ExitState> {
        use ExitState::*;
        match (event, self) {
            (Event::Left, Counting(taken)) => Some(Counting(taken.saturating_add(1))),
            (Event::Left, _) => Some(Counting(1)),
            (Event::Unlinked, _) => Some(Counting(0)),
            // An exit that has a counter gets no second one: when the counter runs out, the exit is
            // recorded, linked or settled.
            (Event::CounterMade, Counting(_)) => Some(Counted),
            (Event::CounterMade, _) => None,
            // A hot exit has been counted, by the runtime or by its counter. Another thread may be
            // recording a trace for it.
            (Event::Record, Counting(_) | Counted | Recording) => Some(Recording),
            (Event::Record, _) => None,
            // The stub of a linked exit may be made to lead elsewhere.
            (Event::Link, Counting(_) | Counted | Recording | Linked) => Some(Linked),
            (Event::Link, _) => None,
            (Event::Settle, Counting(_) | Counted | Recording) => Some(Settled),
            (Event::Settle, _) => None,
            (Event::Rest, Attached) => Some(Resting),
            (Event::Rest, state) => Some(state),
            // The exit may have been linked meanwhile. Its own side trace replaces that link, since
            // it needs no moves.
            (Event::Attach | Event::Woke, _) => Some(Attached),
        }
    }
}

/// What is known of a resolved stub.
#[derive(Clone, Copy)]
pub struct Stub {
    /// The exit that it was made for.
    pub origin: ExitId,
    /// It leads to the block at its target, not to the place.
    pub to_body: bool,
}

/// The states of all exits. An exit without an entry has never come to the runtime.
#[derive(Default)]
pub struct Exits {
    states: FxHashMap<ExitId, ExitState>,
    stubs: FxHashMap<FragmentId, Stub>,
    pub votes: Votes,
}

impl Exits {
    /// Forgets everything, since all fragments are dropped.
    pub fn clear(&mut self) {
        self.states.clear();
        self.stubs.clear();
        self.votes.clear();
    }

    /// The state of an exit.
    pub fn state(&self, exit: ExitId) -> ExitState {
        self.states.get(&exit).copied().unwrap_or(ExitState::Counting(0))
    }

    /// Can this event happen to an exit in its present state?
    pub fn can(&self, exit: ExitId, event: Event) -> bool {
        self.state(exit).after(event).is_some()
    }

    /// Changes the state of an exit by an event. The caller changes the link after this. False if
    /// the event cannot happen: then the caller changes nothing.
    pub fn change(&mut self, exit: ExitId, event: Event) -> bool {
        let state = self.states.entry(exit).or_insert(ExitState::Counting(0));
        let next = state.after(event);
        debug_assert!(next.is_some(), "{event:?} of {exit:?}, which is {state:?}");
        *state = next.unwrap_or(*state);
        next.is_some()
    }

    /// Counts that an exit came to the runtime. Returns how often it has, since it was linked last.
    pub fn count_left(&mut self, exit: ExitId) -> u32 {
        self.change(exit, Event::Left);
        match self.state(exit) {
            ExitState::Counting(taken) => taken,
            _ => 0,
        }
    }

    /// Takes back the last [`Exits::count_left`]: the block that the exit is to lead to is not
    /// copied yet.
    pub fn uncount(&mut self, exit: ExitId) {
        if let Some(ExitState::Counting(taken)) = self.states.get_mut(&exit) {
            *taken = taken.saturating_sub(1);
        }
    }

    /// Notes a new resolved stub.
    pub fn add_stub(&mut self, fragment: FragmentId, stub: Stub) {
        self.stubs.insert(fragment, stub);
    }

    /// What is known of a resolved stub; none if the fragment is not one.
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
