//! A model of [`Peer::notify`](super::Peer::notify): all interleavings of a thread that goes round between
//! the runtime and native code, and of a helper that has compiled two traces for it. A trace must not lie
//! in the inbox while the thread stays in native code and nobody calls it.
//!
//! Example: the thread takes what lies in the inbox and then forgets the note. If the helper delivers in
//! between, the thread enters native code and is not called: [`Order::TakesFirst`] must be found.

use super::ThreadState;
use std::collections::HashSet;

/// How the thread takes what is ready.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Order {
    /// As the code does: it forgets the note first.
    ForgetsFirst,
    /// The mistake.
    TakesFirst,
}

/// Where the thread is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    Outside,
    /// It has changed its state to interpreting, and looks at the note next.
    Entered,
    /// It interprets, and looks at the note before it runs native code.
    Interprets,
    /// It runs native code as long as nobody calls it.
    Cache,
    /// It was notified: the two steps of taking what is ready.
    Takes(u8),
}

/// What the helper does next.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Helper {
    Delivers,
    LeavesNote,
    LooksAt,
    /// It waits until the thread has changed its state since this number of changes.
    Awaits(u8),
    /// It has seen the thread in the cache and looks once more before it sends the signal.
    Calls,
    Done,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Model {
    order: Order,
    at: At,
    state: u8,
    moves: u8,
    notified: bool,
    called: bool,
    inbox: u8,
    helper: Helper,
    left: u8,
    /// Visits of native code that end by themselves, as by a system call.
    visits: u8,
}

impl Model {
    fn move_to(&mut self, at: At, state: ThreadState) {
        (self.at, self.state) = (at, state as u8);
        self.moves += 1;
    }

    fn thread_steps(&self) -> Vec<Model> {
        let mut m = self.clone();
        match self.at {
            At::Outside => m.move_to(At::Entered, ThreadState::Interpreting),
            At::Entered if self.notified => m.move_to(At::Takes(0), ThreadState::Outside),
            At::Entered => m.at = At::Interprets,
            At::Interprets if self.notified => m.move_to(At::Outside, ThreadState::Outside),
            At::Interprets => m.move_to(At::Cache, ThreadState::Cache),
            At::Cache if self.called => {
                m.called = false;
                m.move_to(At::Outside, ThreadState::Outside);
            }
            At::Cache if self.visits > 0 => {
                m.visits -= 1;
                m.move_to(At::Outside, ThreadState::Outside);
            }
            At::Cache => return Vec::new(),
            At::Takes(step) => {
                if (step == 0) == (self.order == Order::ForgetsFirst) {
                    m.notified = false;
                } else {
                    m.inbox = 0;
                }
                m.at = if step == 0 { At::Takes(1) } else { At::Outside };
            }
        }
        vec![m]
    }

    fn helper_steps(&self) -> Vec<Model> {
        let mut m = self.clone();
        let is = |state: ThreadState| self.state == state as u8;
        let next = if self.left > 1 { Helper::Delivers } else { Helper::Done };
        match self.helper {
            Helper::Delivers => {
                m.inbox += 1;
                m.helper = Helper::LeavesNote;
            }
            Helper::LeavesNote => {
                m.notified = true;
                m.helper = Helper::LooksAt;
            }
            Helper::LooksAt if is(ThreadState::Outside) => {
                (m.helper, m.left) = (next, self.left - 1)
            }
            Helper::LooksAt if is(ThreadState::Cache) => m.helper = Helper::Calls,
            Helper::LooksAt => m.helper = Helper::Awaits(self.moves),
            Helper::Awaits(moves) if moves == self.moves => return Vec::new(),
            Helper::Awaits(_) => m.helper = Helper::LooksAt,
            Helper::Calls => {
                m.called = is(ThreadState::Cache);
                (m.helper, m.left) = (next, self.left - 1);
            }
            Helper::Done => return Vec::new(),
        }
        vec![m]
    }
}

/// Explores all interleavings; returns how many states there are, or one in which a trace lies there.
fn explore(order: Order) -> Result<usize, Model> {
    let first = Model {
        order,
        at: At::Outside,
        state: ThreadState::Outside as u8,
        moves: 0,
        notified: false,
        called: false,
        inbox: 0,
        helper: Helper::Delivers,
        left: 2,
        visits: 3,
    };
    let (mut seen, mut open) = (HashSet::from([first.clone()]), vec![first]);
    while let Some(state) = open.pop() {
        let next = [state.thread_steps(), state.helper_steps()].concat();
        if next.is_empty() && (state.inbox > 0 || state.helper != Helper::Done) {
            return Err(state);
        }
        open.extend(next.into_iter().filter(|next| seen.insert(next.clone())));
    }
    Ok(seen.len())
}

#[test]
fn no_trace_is_forgotten() {
    let states = explore(Order::ForgetsFirst).expect("all are taken");
    assert!(states > 300, "{states} states");
}

#[test]
fn a_note_that_is_forgotten_last_is_found() {
    let lost = explore(Order::TakesFirst).expect_err("the thread takes first");
    assert!(lost.inbox > 0 && lost.at == At::Cache, "{lost:?}");
}
