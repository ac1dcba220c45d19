//! A scheduler for tests: real threads go one at a time, and another one may go on only at a
//! [`SyncPoint`].
//!
//! [`explore`] runs a set of threads again and again, each time under another schedule, until all
//! schedules with at most so many preemptions have been seen. (Most bugs of protocols need one or
//! two: Musuvathi and Qadeer, PLDI 2007.) A preemption is a switch away from a thread that could go
//! on; a thread at [`SyncPoint::Wait`] cannot, until another one has taken a step.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

use super::schedule::SyncPoint;

/// One of the threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It runs, or is about to begin.
    Running,
    /// It is at a step.
    Ready,
    /// It waits, and no thread has taken a step since.
    Waiting,
    Ended,
}

struct Inner {
    states: Vec<State>,
    /// The thread whose turn it is.
    turn: Option<usize>,
}

/// See the module.
pub struct Scheduler {
    inner: Mutex<Inner>,
    changed: Condvar,
}

thread_local! {
    static SELF: RefCell<Option<(Arc<Scheduler>, usize)>> = const { RefCell::new(None) };
    static PERFORMED: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// See [`super::schedule`].
pub fn sync_point(point: SyncPoint) {
    let own = SELF.with_borrow(Clone::clone);
    if let Some((scheduler, thread)) = own {
        scheduler
            .pause(thread, if point == SyncPoint::Wait { State::Waiting } else { State::Ready });
        if point == SyncPoint::Perform {
            PERFORMED.with_borrow_mut(|performed| {
                performed.iter_mut().for_each(|performed| performed())
            });
        }
    }
}

/// Calls `f` whenever this thread is about to make a change.
pub fn when_performing(f: impl FnMut() + 'static) {
    PERFORMED.set(Some(Box::new(f)));
}

/// See [`super::schedule`].
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    loop {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) if SELF.with_borrow(Option::is_none) => {
                return guard(mutex);
            }
            Err(TryLockError::WouldBlock) => sync_point(SyncPoint::Wait),
        }
    }
}

impl Scheduler {
    /// For this many threads.
    pub fn new(threads: usize) -> Arc<Scheduler> {
        let inner = Inner { states: vec![State::Running; threads], turn: None };
        Arc::new(Scheduler { inner: Mutex::new(inner), changed: Condvar::new() })
    }

    /// Runs `f` as one of the threads.
    pub fn run(self: &Arc<Scheduler>, thread: usize, f: impl FnOnce()) {
        SELF.set(Some((self.clone(), thread)));
        self.pause(thread, State::Ready);
        f();
        SELF.set(None);
        self.end(thread);
    }

    fn end(&self, thread: usize) {
        let mut inner = guard(&self.inner);
        inner.states[thread] = State::Ended;
        inner.turn = None;
        self.changed.notify_all();
    }

    fn pause(&self, thread: usize, state: State) {
        let mut inner = guard(&self.inner);
        inner.states[thread] = state;
        if inner.turn == Some(thread) {
            inner.turn = None;
        }
        self.changed.notify_all();
        while inner.turn != Some(thread) {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.states[thread] = State::Running;
    }

    /// Lets one thread after the other go on, as `choices` says as far as it goes. `watch` is
    /// called whenever all of them stand still. An error: none can go on.
    fn drive(&self, path: &mut Vec<Choice>, watch: &mut dyn FnMut()) -> Result<(), String> {
        let mut last = 0;
        for taken in 0.. {
            let mut inner = guard(&self.inner);
            while inner.turn.is_some() || inner.states.contains(&State::Running) {
                inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
            }
            watch();
            let mut ready: Vec<usize> =
                (0..inner.states.len()).filter(|t| inner.states[*t] == State::Ready).collect();
            if ready.is_empty() {
                let stuck = inner.states.contains(&State::Waiting);
                return if stuck {
                    Err(format!("nobody can go on: {:?}", inner.states))
                } else {
                    Ok(())
                };
            }
            // The first choice is to go on with the same thread.
            let preempts = ready.contains(&last);
            ready.sort_by_key(|t| (*t != last, *t));
            if path.len() == taken {
                path.push(Choice { taken: 0, options: ready.len(), preempts });
            }
            let Some(next) = ready.get(path[taken].taken) else {
                return Err(format!(
                    "the threads are not deterministic: {ready:?} at step {taken}"
                ));
            };
            last = *next;
            for state in inner.states.iter_mut().filter(|state| **state == State::Waiting) {
                *state = State::Ready;
            }
            inner.states[last] = State::Running;
            inner.turn = Some(last);
            self.changed.notify_all();
        }
        Ok(())
    }
}

/// Which thread went on at one place.
struct Choice {
    taken: usize,
    options: usize,
    /// Is every choice but the first a preemption?
    preempts: bool,
}

/// Calls `begin` once for each schedule of at most `preemptions`: it makes a scheduler's threads
/// run, and gives back what to call when all stand still. Returns how many schedules there were.
///
/// # Errors
/// In some schedule no thread could continue: a deadlock.
pub fn explore(
    preemptions: usize,
    mut begin: impl FnMut() -> (Arc<Scheduler>, Box<dyn FnMut()>),
    mut end: impl FnMut() -> Result<(), String>,
) -> Result<usize, String> {
    let mut path: Vec<Choice> = Vec::new();
    for schedules in 1.. {
        let (scheduler, mut watch) = begin();
        let told = |path: &[Choice]| path.iter().map(|choice| choice.taken).collect::<Vec<_>>();
        scheduler
            .drive(&mut path, &mut watch)
            .map_err(|what| format!("{what}, in schedule {:?}", told(&path)))?;
        end().map_err(|what| format!("{what}, in schedule {:?}", told(&path)))?;
        // The next one: the last choice that has another, within the budget.
        loop {
            let Some(mut last) = path.pop() else { return Ok(schedules) };
            let spent = path.iter().filter(|choice| choice.preempts && choice.taken > 0).count();
            last.taken += 1;
            if last.taken < last.options && (!last.preempts || spent < preemptions) {
                path.push(last);
                break;
            }
        }
    }
    unreachable!("the number of schedules is finite")
}
