//! Dropping code and waiting for other threads: `Code::drop_code` of the dispatcher,
//! `Machine::invalidate` and `Peers`.

use super::bug::Bug;
use super::state::{Drop, Program, State, THREADS, ThreadState};
use super::steps::{Transition, next};

/// Nothing was read, or all is dropped.
const TELL: u8 = 1;
const TOUCH: u8 = 2;
const BEGIN_INTERPRETERS: u8 = 3;
const AWAIT_INTERPRETERS: u8 = 4;
const BEGIN_CACHE: u8 = 5;
const AWAIT_CACHE: u8 = 6;

impl State {
    /// The thread is about to drop what was made from the page.
    pub fn drop_page(&mut self, thread: usize, page: usize) {
        self.threads[thread].dropping =
            Some(Drop { page, stage: 0, touched: false, waits: [None; THREADS] });
    }

    /// The next step of dropping.
    pub fn step_dropping(&self, program: &Program, t: usize, mut drop: Drop) -> Transition {
        let mut state = self.clone();
        let spoils_first = program.has(Bug::SpoilsBeforeTelling);
        match drop.stage {
            0 => {
                let page = &mut state.pages[drop.page];
                if !program.has(Bug::PatchStays) {
                    page.patched = None;
                }
                let read = std::mem::take(&mut page.read);
                let made = page.shared.is_some() || page.resting.is_some();
                state.threads[t].own[drop.page] = None;
                if !read && !made {
                    state.threads[t].dropping = None;
                    return next(state);
                }
                drop.stage = if spoils_first { TOUCH } else { TELL };
            }
            TELL => {
                for other in (0..THREADS).filter(|other| *other != t) {
                    state.threads[other].posted[drop.page] = true;
                }
                drop.stage = if spoils_first { BEGIN_INTERPRETERS } else { TOUCH };
            }
            TOUCH => {
                if state.fragments.is_some() {
                    return Transition::Blocked;
                }
                state.generation += 1;
                let page = &mut state.pages[drop.page];
                drop.touched = page.shared.is_some() || page.resting.is_some();
                if let Some(code) = page.shared.take() {
                    page.resting = Some(code);
                }
                drop.stage = if spoils_first { TELL } else { BEGIN_INTERPRETERS };
            }
            BEGIN_INTERPRETERS | BEGIN_CACHE => {
                let wanted = if drop.stage == BEGIN_CACHE {
                    ThreadState::Cache
                } else {
                    ThreadState::Interpreting
                };
                for other in (0..THREADS).filter(|other| *other != t) {
                    let thread = &state.threads[other];
                    drop.waits[other] =
                        (!thread.gone && thread.state == wanted).then_some(thread.moves);
                }
                drop.stage += 1;
            }
            AWAIT_INTERPRETERS | AWAIT_CACHE => {
                let moved =
                    |n: usize| drop.waits[n].is_none_or(|moves| state.threads[n].moves != moves);
                if !(0..THREADS).all(moved) {
                    return Transition::Blocked;
                }
                drop.waits = [None; THREADS];
                if drop.stage == AWAIT_CACHE || !drop.touched {
                    state.threads[t].dropping = None;
                    return next(state);
                }
                drop.stage = BEGIN_CACHE;
            }
            stage => unreachable!("no such stage of dropping: {stage}"),
        }
        state.threads[t].dropping = Some(drop);
        next(state)
    }
}
