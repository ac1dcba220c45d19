//! The states of the helper thread, and who may change them.
//!
//! ```text
//!                  submit                nothing waits, or somebody wants it to rest: next
//!   Absent ──────────────────► Working ────────────────────────────────────────► Ending
//!     ▲                           ▲  └─ next: a job                                │ │
//!     │                           └──────────────── submit (joined first) ─────────┘ │
//!     └──────────────────────────────── joined ──────────────────────────────────────┘
//! ```
//!
//! Data: [`Protocol`], behind the lock of [`super`]. Invariants: a host thread exists only in `Working`
//! and `Ending`, and in `Ending` it takes the lock no more. While somebody rests the thread, no job is
//! begun. Each job that was submitted is returned once: to be run, or to be dropped.
//!
//! The test explores all interleavings of two threads and the helper thread with these functions.
//!
//! Example: a thread submits a job, and is told to start the host thread. That takes the job by `next`,
//! runs it, finds nothing more and is `Ending`. Another thread is about to fork: `rest` finds nothing to
//! drop; it waits for the end of the host thread and notes it by `joined`.

use std::collections::VecDeque;

/// The most jobs that wait (guess: the oldest of them waits for about 0.1 s; too many compile what is not
/// hot any more).
const MOST_WAITING: usize = 8;

/// What the host thread is doing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// There is none.
    Absent,
    /// It runs jobs, or is about to.
    Working,
    /// It has found nothing to do and is about to end.
    Ending,
}

/// What follows when a job was submitted.
#[derive(PartialEq, Eq, Debug)]
pub struct Submitted<J> {
    /// The caller must start the host thread, after it has waited for the end of the last one.
    pub start: bool,
    /// The oldest job, if too many wait. The caller has to drop it.
    pub dropped: Option<J>,
}

/// The jobs that wait, and the state of the host thread.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Protocol<J> {
    phase: Phase,
    waiting: VecDeque<J>,
    /// How many threads want that there is no helper thread.
    resting: u32,
    /// There will be no helper thread any more.
    off: bool,
}

impl<J> Protocol<J> {
    pub const fn new() -> Protocol<J> {
        Protocol { phase: Phase::Absent, waiting: VecDeque::new(), resting: 0, off: false }
    }

    /// Is a host thread there that may run a job?
    pub fn is_working(&self) -> bool {
        self.phase == Phase::Working
    }

    /// May jobs be submitted?
    pub fn is_open(&self) -> bool {
        !self.off && self.resting == 0
    }

    /// A thread has something to do. The protocol is open.
    pub fn submit(&mut self, job: J) -> Submitted<J> {
        debug_assert!(self.is_open());
        self.waiting.push_back(job);
        let dropped =
            if self.waiting.len() > MOST_WAITING { self.waiting.pop_front() } else { None };
        let start = !self.is_working();
        self.phase = Phase::Working;
        Submitted { start, dropped }
    }

    /// The host thread could not be started, and will not be: returns the jobs, to be dropped.
    pub fn not_started(&mut self) -> VecDeque<J> {
        self.phase = Phase::Absent;
        self.off = true;
        std::mem::take(&mut self.waiting)
    }

    /// On the host thread: the next job, the newest one, which is the hottest. If there is none, the
    /// host thread ends.
    pub fn next(&mut self) -> Option<J> {
        let job = if self.resting == 0 { self.waiting.pop_back() } else { None };
        if job.is_none() {
            self.phase = Phase::Ending;
        }
        job
    }

    /// The caller wants that there is no helper thread. Returns the jobs that wait, to be dropped. The
    /// caller waits while the thread [is working](Protocol::is_working), and for its end.
    pub fn rest(&mut self) -> VecDeque<J> {
        self.resting += 1;
        std::mem::take(&mut self.waiting)
    }

    /// The last host thread has ended.
    pub fn joined(&mut self) {
        if self.phase == Phase::Ending {
            self.phase = Phase::Absent;
        }
    }

    /// A thread that called [`Protocol::rest`] has finished what it wanted to do.
    pub fn resume(&mut self) {
        self.resting -= 1;
    }

    /// There is to be no helper thread any more.
    pub fn turn_off(&mut self) {
        self.off = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// What a thread of the model does; each step is made under the lock, or is one that the kernel
    /// makes visible at once.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    enum Step {
        Submit,
        /// The thread was told to start the host thread, and waits for the end of the last one.
        Start,
        Rest,
        /// It waits until the host thread is not working.
        AwaitIdle,
        /// It waits for the end of the host thread.
        Join,
        /// It does what needs the process to have no helper thread.
        Alone,
        Resume,
    }

    /// The host threads: a process may have one that works and none else.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    enum Host {
        None,
        /// It is about to take a job.
        Takes,
        /// It runs the job.
        Runs(u8),
        /// It has left the lock for the last time.
        Ends,
        Ended,
    }

    #[derive(Clone, PartialEq, Eq, Hash, Debug)]
    struct Model {
        protocol: Protocol<u8>,
        host: Host,
        /// What is left to do for each thread.
        threads: [Vec<Step>; 2],
        /// How often each job was run, dropped or refused.
        done: [u8; 5],
        submitted: u8,
    }

    impl Model {
        fn done(&mut self, job: u8) {
            self.done[usize::from(job)] += 1;
        }

        /// The state after thread `n` has made its next step; none if it waits.
        fn thread_steps(&self, n: usize, may_fail: bool) -> Option<Model> {
            let mut m = self.clone();
            let step = m.threads[n].pop()?;
            match step {
                Step::Submit => {
                    let job = m.submitted;
                    m.submitted += 1;
                    if m.protocol.is_open() {
                        let Submitted { start, dropped } = m.protocol.submit(job);
                        dropped.into_iter().for_each(|job| m.done(job));
                        if start {
                            m.threads[n].push(Step::Start);
                        }
                    } else {
                        // The thread does it itself.
                        m.done(job);
                    }
                }
                // The lock is held from `submit` on: no other step comes between but that of a host
                // thread that ends.
                Step::Start => match m.host {
                    Host::Takes | Host::Runs(_) => panic!("two helper threads: {self:?}"),
                    Host::Ends => return None,
                    Host::None | Host::Ended if may_fail => {
                        m.host = Host::None;
                        let dropped = m.protocol.not_started();
                        dropped.into_iter().for_each(|job| m.done(job));
                    }
                    Host::None | Host::Ended => m.host = Host::Takes,
                },
                Step::Rest => {
                    let dropped = m.protocol.rest();
                    dropped.into_iter().for_each(|job| m.done(job));
                }
                Step::AwaitIdle if m.protocol.is_working() => return None,
                Step::AwaitIdle => {}
                Step::Join => match m.host {
                    Host::Takes | Host::Runs(_) => panic!("joins a thread that works: {self:?}"),
                    Host::Ends => return None,
                    Host::None | Host::Ended => {
                        m.host = Host::None;
                        m.protocol.joined();
                    }
                },
                Step::Alone => assert_eq!(m.host, Host::None, "a helper thread is there: {self:?}"),
                Step::Resume => m.protocol.resume(),
            }
            Some(m)
        }

        fn host_steps(&self) -> Option<Model> {
            let mut m = self.clone();
            m.host = match self.host {
                Host::None | Host::Ended => return None,
                Host::Takes => m.protocol.next().map_or(Host::Ends, Host::Runs),
                Host::Runs(job) => {
                    m.done(job);
                    Host::Takes
                }
                Host::Ends => Host::Ended,
            };
            Some(m)
        }

        /// Does a thread hold the lock, so that nothing else happens under it?
        fn lock_holder(&self) -> Option<usize> {
            (0..2).find(|&n| self.threads[n].last() == Some(&Step::Start))
        }

        fn next(&self, may_fail: bool) -> Vec<Model> {
            let host_may = self.lock_holder().is_none() || self.host == Host::Ends;
            let mut next: Vec<Model> = self.host_steps().filter(|_| host_may).into_iter().collect();
            for n in 0..2 {
                if self.lock_holder().is_none_or(|holder| holder == n) {
                    next.extend(self.thread_steps(n, false));
                    if may_fail {
                        next.extend(self.thread_steps(n, true));
                    }
                }
            }
            next
        }
    }

    /// Explores all interleavings; returns the number of states.
    fn explore(threads: [&[Step]; 2], may_fail: bool) -> usize {
        let last_first = |steps: &[Step]| steps.iter().rev().copied().collect();
        let first = Model {
            protocol: Protocol::new(),
            host: Host::None,
            threads: threads.map(last_first),
            done: [0; 5],
            submitted: 0,
        };
        let (mut seen, mut open) = (HashSet::from([first.clone()]), vec![first]);
        while let Some(state) = open.pop() {
            let next = state.next(may_fail);
            if next.is_empty() {
                assert!(
                    state.threads.iter().all(Vec::is_empty),
                    "a thread waits forever: {state:?}"
                );
                let jobs = usize::from(state.submitted);
                assert!(state.done[..jobs].iter().all(|n| *n == 1), "{state:?}");
            }
            open.extend(next.into_iter().filter(|next| seen.insert(next.clone())));
        }
        seen.len()
    }

    const REST: [Step; 5] = [Step::Rest, Step::AwaitIdle, Step::Join, Step::Alone, Step::Resume];

    #[test]
    fn all_interleavings_are_right() {
        let submits = [Step::Submit; 2];
        let both = [&submits[..], &REST].concat();
        let rests_first = [&REST[..], &submits].concat();
        for may_fail in [false, true] {
            let found = explore([&both, &rests_first], may_fail);
            assert!(found > 250, "{found} states");
            explore([&both, &REST], may_fail);
            explore([&submits, &submits], may_fail);
        }
    }

    #[test]
    #[should_panic(expected = "a helper thread is there")]
    fn a_thread_that_does_not_join_is_found() {
        let hasty = [Step::Rest, Step::AwaitIdle, Step::Alone, Step::Resume];
        explore([&[Step::Submit; 2], &hasty], false);
    }

    #[test]
    fn few_jobs_wait_and_the_newest_is_next() {
        let mut protocol = Protocol::new();
        assert_eq!(protocol.submit(0), Submitted { start: true, dropped: None });
        for job in 1..MOST_WAITING {
            assert_eq!(protocol.submit(job), Submitted { start: false, dropped: None });
        }
        let dropped = Some(0);
        assert_eq!(protocol.submit(MOST_WAITING), Submitted { start: false, dropped });
        assert_eq!(protocol.next(), Some(MOST_WAITING));
        assert!(protocol.is_open());
        protocol.turn_off();
        assert!(!protocol.is_open());
        assert_eq!(protocol.rest().len(), MOST_WAITING - 1);
    }
}
