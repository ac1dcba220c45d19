//! Threads that a process in the same memory is about to stop by `ptrace`.
//!
//! A stopped thread must hold no lock and must be outside, because the tracing process runs the
//! translator, too: it would wait for that lock, or for that thread to leave the cache, for ever.
//! So the tracer first asks the thread to park ([`Peers::park`]). The thread comes out, and *parks*
//! before it would execute guest code again. Then the tracer stops it
//! ([`crate::kernel::syscall::tracing`]), and accepts the stop only if the thread is parked or
//! sleeps in a system call of the guest's. Otherwise the thread may hold a lock: it runs on for a
//! moment, and is stopped again. When the stop is accepted, the tracer withdraws its request
//! ([`Peers::unpark`]), and the thread goes on once it is no longer stopped.
//!
//! Data: [`Parking`], in each [`Peer`]. Invariant: a thread is parked only while it is
//! outside and holds no lock. The list's lock is taken to find the thread, and is free again while
//! the tracer waits. The tests explore every interleaving of a tracer and a thread.
//!
//! Example: thread A compiles a trace when companion B calls `ptrace(PTRACE_ATTACH, A)`. B asks A to
//! park, and stops it; A holds the lock of the fragments, so B lets it run. A finishes the trace,
//! sees the request, and parks. B stops it there.

use super::{Backoff, CallFailed, Peer, Peers, ThreadState};
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long the tracer waits for a thread to come out (guess). It does not if it is stopped already,
/// by a debugger for instance; then the tracer goes on without.
const PATIENCE: Duration = Duration::from_secs(1);

/// A thread's part of the protocol.
#[derive(Default)]
pub(super) struct Parking {
    /// The number of tracers that ask it to park.
    requests: AtomicU32,
    is_parked: AtomicBool,
}

impl Parking {
    pub(super) fn is_requested(&self) -> bool {
        self.requests.load(Ordering::SeqCst) != 0
    }

    /// Waits until nobody asks the thread to park. It is outside and holds no lock.
    pub(super) fn park(&self) {
        if !self.is_requested() {
            return;
        }
        self.is_parked.store(true, Ordering::SeqCst);
        let mut backoff = Backoff::default();
        while self.is_requested() {
            backoff.wait();
        }
        self.is_parked.store(false, Ordering::SeqCst);
    }
}

impl Peers {
    /// Makes the thread with this kernel id come out and park before it executes guest code again.
    /// Returns the id of its process; none if there is no such thread. The caller is outside and
    /// holds no lock.
    pub fn park(&self, tid: i32) -> Option<i32> {
        let peer = self.with_tid(tid)?;
        peer.parking.requests.fetch_add(1, Ordering::SeqCst);
        let start = Instant::now();
        let mut backoff = Backoff::default();
        let mut called = None;
        // A thread that is seen outside parks before it comes in.
        while peer.state() != ThreadState::Outside && start.elapsed() < PATIENCE {
            let moves = peer.moves.load(Ordering::SeqCst);
            if called.replace(moves) != Some(moves) {
                peer.interrupt();
                if let Err(CallFailed) = peer.call() {
                    break;
                }
            }
            backoff.wait();
        }
        Some(peer.pid.load(Ordering::SeqCst))
    }

    /// Is the thread with this kernel id parked?
    pub fn is_parked(&self, tid: i32) -> bool {
        self.with_tid(tid).is_some_and(|peer| peer.parking.is_parked.load(Ordering::SeqCst))
    }

    /// Withdraws the request of [`Peers::park`], which has found the thread.
    pub fn unpark(&self, tid: i32) {
        if let Some(peer) = self.with_tid(tid) {
            peer.parking.requests.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The thread with this kernel id.
    pub(super) fn with_tid(&self, tid: i32) -> Option<Arc<Peer>> {
        let has_tid = |tid_of: &AtomicI32| tid_of.load(Ordering::SeqCst) == tid;
        lock(&self.all).iter().find(|peer| has_tid(&peer.tid)).cloned()
    }
}

/// A model of a thread and a tracer. The thread goes around: it enters, interprets, comes out,
/// perhaps takes and releases a lock, perhaps makes a call in which it sleeps. The kernel stops it
/// at any moment after the request. Every interleaving is explored.
#[cfg(test)]
mod model {
    use std::collections::HashSet;

    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    enum Thread {
        Outside,
        /// In [`super::Peer::enter`], before it looks for a request.
        Entering,
        Interpreting,
        Leaving,
        Parked,
        WithLock,
        Asleep,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    enum Tracer {
        Requests,
        AwaitsOutside,
        Stops,
        AwaitsStop,
        Accepted,
        Done,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    struct State {
        thread: Thread,
        tracer: Tracer,
        is_requested: bool,
        stop_requested: bool,
        is_stopped: bool,
    }

    /// A rule of the protocol that is left out.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Bug {
        /// A stop is accepted wherever the thread is.
        AnyStop,
        /// A thread that is asked to park enters all the same.
        EntersAsked,
        /// Asleep in a call is no place to stop at.
        NotAsleep,
    }

    /// What the thread does between two entries; a thread may do nothing but compute.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Program {
        Computes,
        SleepsForEver,
        Mixed,
    }

    fn thread_steps(state: State, program: Program, bug: Option<Bug>) -> Vec<State> {
        let to = |thread| State { thread, ..state };
        if state.is_stopped {
            return Vec::new();
        }
        let mut next = match state.thread {
            Thread::Outside if program == Program::Computes => vec![to(Thread::Entering)],
            Thread::Outside if program == Program::SleepsForEver => vec![to(Thread::Asleep)],
            Thread::Outside => {
                vec![to(Thread::Entering), to(Thread::WithLock), to(Thread::Asleep)]
            }
            Thread::Entering if state.is_requested && bug != Some(Bug::EntersAsked) => {
                vec![to(Thread::Leaving)]
            }
            Thread::Entering => vec![to(Thread::Interpreting)],
            Thread::Interpreting => vec![to(Thread::Outside)],
            Thread::Leaving => vec![to(Thread::Parked)],
            Thread::Parked if state.is_requested => Vec::new(),
            Thread::Parked | Thread::WithLock => vec![to(Thread::Outside)],
            Thread::Asleep if program == Program::SleepsForEver => Vec::new(),
            Thread::Asleep => vec![to(Thread::Outside)],
        };
        if state.stop_requested {
            next.push(State { is_stopped: true, stop_requested: false, ..state });
        }
        next
    }

    fn is_outside(thread: Thread) -> bool {
        !matches!(thread, Thread::Entering | Thread::Interpreting | Thread::Leaving)
    }

    fn tracer_step(state: State, bug: Option<Bug>) -> Option<State> {
        let is_safe = match state.thread {
            Thread::Parked => true,
            Thread::Asleep => bug != Some(Bug::NotAsleep),
            _ => bug == Some(Bug::AnyStop),
        };
        let to = |tracer| State { tracer, ..state };
        match state.tracer {
            Tracer::Requests => Some(State { is_requested: true, ..to(Tracer::AwaitsOutside) }),
            Tracer::AwaitsOutside => is_outside(state.thread).then(|| to(Tracer::Stops)),
            Tracer::Stops => Some(State { stop_requested: true, ..to(Tracer::AwaitsStop) }),
            Tracer::AwaitsStop if !state.is_stopped => None,
            Tracer::AwaitsStop if is_safe => {
                Some(State { is_requested: false, ..to(Tracer::Accepted) })
            }
            Tracer::AwaitsStop => Some(State { is_stopped: false, ..to(Tracer::Stops) }),
            Tracer::Accepted => Some(State { is_stopped: false, ..to(Tracer::Done) }),
            Tracer::Done => None,
        }
    }

    /// Explores every state; returns their number, or what is wrong.
    fn explore(program: Program, bug: Option<Bug>) -> Result<usize, String> {
        let start = State {
            thread: Thread::Outside,
            tracer: Tracer::Requests,
            is_requested: false,
            stop_requested: false,
            is_stopped: false,
        };
        let mut seen = HashSet::from([start]);
        let mut edges = Vec::new();
        let mut todo = vec![start];
        while let Some(state) = todo.pop() {
            if state.tracer == Tracer::Accepted
                && (!is_outside(state.thread) || state.thread == Thread::WithLock)
            {
                return Err(format!("the tracer goes on with {state:?}"));
            }
            let steps = thread_steps(state, program, bug);
            for next in steps.into_iter().chain(tracer_step(state, bug)) {
                edges.push((state, next));
                if seen.insert(next) {
                    todo.push(next);
                }
            }
        }
        // From every state the tracer can still come to its end.
        let mut ends: HashSet<State> =
            seen.iter().filter(|s| s.tracer == Tracer::Done).copied().collect();
        loop {
            let before = ends.len();
            let more = edges.iter().filter(|(_, to)| ends.contains(to)).map(|(from, _)| *from);
            let more: Vec<State> = more.collect();
            ends.extend(more);
            if ends.len() == before {
                break;
            }
        }
        match seen.iter().find(|state| !ends.contains(state)) {
            Some(state) => Err(format!("no way on from {state:?}")),
            None => Ok(seen.len()),
        }
    }

    #[test]
    fn a_stop_is_accepted_only_where_the_thread_holds_nothing() {
        for program in [Program::Computes, Program::SleepsForEver, Program::Mixed] {
            let states = explore(program, None).unwrap_or_else(|e| panic!("{program:?}: {e}"));
            assert!(states > 8, "{program:?}: {states} states");
        }
    }

    #[test]
    fn each_rule_is_needed() {
        let broken = [
            (Program::Mixed, Bug::AnyStop),
            (Program::Computes, Bug::EntersAsked),
            (Program::SleepsForEver, Bug::NotAsleep),
        ];
        for (program, bug) in broken {
            assert!(explore(program, Some(bug)).is_err(), "{bug:?} is not noticed");
        }
    }
}
