//! Guest threads as the other threads see them: what each is doing, and how one thread makes the
//! others drop code.
//!
//! A thread is in one of three states. It is *interpreting*. It is *in the cache* while it runs
//! native code or guest code in place, or has just left native code and still needs the record of
//! the exit. It is
//! *outside* while it performs system calls and compiles.
//!
//! **Handshake.** A thread that takes something away (the *poster*) first makes it unreachable.
//! Then it waits for the other threads, outside and holding no lock, so that two posters do not
//! wait for each other.
//! * For native code it waits until each thread that was in the cache has left it
//!   ([`Peers::await_out_of_cache`]). That happens soon, since native code that is taken away leads
//!   only to the runtime.
//! * For guest code it first posts the range to each thread ([`Peers::post_to_others`]), then waits
//!   until each thread that was interpreting has stopped. That happens soon, since the poster sets
//!   `pending` in that thread's context.
//!
//! A thread first enters the state *interpreting*, then looks at what was posted ([`Peer::enter`]).
//! If there is anything, it goes outside and drops its blocks. So of poster and thread at least one
//! notices the other: either the poster sees the thread interpreting and waits, or the thread sees
//! what was posted.
//!
//! **Calls.** If only some fragments go, a thread that runs others would never come out. So it is
//! *called*: sent a signal ([`signal::call_out`]), whose handler treats it as an asynchronous
//! signal of the guest's. Such a signal must never interrupt a system call of the guest's. So only
//! a thread that is seen in the cache is called, and a thread that leaves the cache while a call is
//! under way waits until the signal has arrived.
//!
//! **Served faults.** A thread in the cache may wait in a fault until another thread of the guest's fills
//! the page (userfaultfd(2)). A signal interrupts that; the access then faults once more, and who fills
//! the pages reads of the same fault twice. So once the guest can do that
//! ([`Peers::faults_are_served`]), native code is dropped as a whole, and a thread is called only if it
//! does not come out by itself for [`PATIENCE`]: the poster may be who fills the page.
//!
//! **Notes.** What the helper thread has compiled for a thread lies in an inbox. A *note* makes the thread
//! come outside and look there ([`Peer::notify`]); the model of it is in `peers/notes.rs`.
//!
//! **Tracers.** A process in the same memory that stops a thread by `ptrace` makes it come out first
//! ([`parking`]).
//!
//! Data: [`Peer`], one for each thread; [`Peers`], the list of them. Invariant: only the thread
//! itself changes its state (or a vfork child that runs while the thread sleeps). The list's lock
//! and those of the `stale` ranges are number 9 in the order of `crate::sync`.
//!
//! Example: thread A changes code at 0x1000 while B interprets. A posts the range to B, sees B
//! interpreting, sets B's `pending` and waits. B's interpreter stops and B leaves, which ends A's
//! wait. When B enters again, it finds the range and drops its blocks first.

#[cfg(test)]
mod notes;
mod parking;

use crate::changes::schedule::{SyncPoint, sync_point};
use crate::kernel::entry::{self, Call};
use crate::kernel::process::Registers;
use crate::kernel::signal;
use crate::observe::profile::sampling::{Sample, Samples};
use crate::observe::profile::{self, Clock};
use crate::sync::lock;
use dynasour_guest::ThreadContext;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The most ranges that are posted to a thread one by one (guess). When there are more, one range
/// replaces them all that covers them; too low drops blocks that have not changed.
const MAX_STALE_RANGES: usize = 64;

/// How long a thread that may wait in a served fault is not called (guess). Too high makes changes of
/// code slow if the thread waits for the one that makes them; too low interrupts threads that the
/// machine does not run just now.
const PATIENCE: Duration = Duration::from_millis(50);

/// What a thread is doing; see the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ThreadState {
    Outside,
    Interpreting,
    Cache,
}

impl ThreadState {
    /// The low bits of [`Peer::moves`] that hold the state.
    const BITS: u64 = 3;

    fn of(moves: u64) -> ThreadState {
        match moves & ThreadState::BITS {
            0 => ThreadState::Outside,
            1 => ThreadState::Interpreting,
            _ => ThreadState::Cache,
        }
    }
}

/// One guest thread, as the others see it.
#[derive(Default)]
pub struct Peer {
    /// The number of the thread's changes of state, above two bits that hold its [`ThreadState`].
    moves: AtomicU64,
    /// The context with which it runs guest code.
    context: AtomicPtr<ThreadContext>,
    /// Is there anything in `stale`?
    posted: AtomicBool,
    /// Is something ready for the thread that the helper has done? It comes outside to take it.
    notified: AtomicBool,
    /// Ranges of guest code that have changed. The thread drops its blocks made from them.
    stale: Mutex<Vec<Range<u64>>>,
    /// The kernel's id of the thread.
    tid: AtomicI32,
    /// The kernel's id of the thread's process.
    pid: AtomicI32,
    /// The number of threads that are about to call this one, in units of [`CALLING`], and the bit
    /// [`CALLED`].
    calls: AtomicU32,
    /// Whether a tracer is about to stop the thread.
    parking: parking::Parking,
    /// The number of the guest's system calls that it has made.
    pub syscalls: AtomicU64,
    /// The number of its samples in guest code in place, and of those that were events.
    pub sampled: [AtomicU64; 2],
    /// The number of blocks that it has interpreted, at the last `Dispatcher::publish_counts`.
    pub blocks: AtomicU64,
    /// The number of heads that it has given up, at the last call of the same.
    pub blacklisted: AtomicU64,
    /// The time that it has spent in each phase.
    pub clock: Arc<Clock>,
    samples: Mutex<Vec<Samples>>,
}

/// Tells one thread from the others; its dispatcher's next thread has the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerId(usize);

/// A thread cannot be called: the signal could not be sent, or might interrupt a served fault.
#[derive(Debug)]
pub struct CallFailed;

/// In [`Peer::calls`]: a signal was sent, or is being sent, that the thread has not accepted yet.
const CALLED: u32 = 1;
/// In [`Peer::calls`], added by each thread that is about to send the signal.
const CALLING: u32 = 2;

impl Peer {
    /// What tells it from the others.
    pub fn id(&self) -> PeerId {
        PeerId(std::ptr::from_ref(self) as usize)
    }

    /// The calling host thread is the one that this describes, from now on.
    pub fn attach(&self) {
        // SAFETY: gettid has no arguments and cannot fail.
        let tid = unsafe { entry::raw(&Call::new(libc::SYS_gettid, &[])) };
        self.tid.store(tid as i32, Ordering::SeqCst);
        self.pid.store(std::process::id() as i32, Ordering::SeqCst);
    }

    /// Makes the thread come out of the cache by a signal, if it is there. Returns its `moves` in
    /// that case, for [`Peer::await_move`].
    fn call(&self) -> Result<Option<u64>, CallFailed> {
        self.calls.fetch_add(CALLING, Ordering::SeqCst);
        let moves = self.moves.load(Ordering::SeqCst);
        let there = ThreadState::of(moves) == ThreadState::Cache;
        if there {
            // `pending` is set first, so that the thread leaves native code even if the signal
            // arrives before it has entered any.
            self.interrupt();
            self.calls.fetch_or(CALLED, Ordering::SeqCst);
        }
        let sent = !there
            || signal::call_out(self.pid.load(Ordering::SeqCst), self.tid.load(Ordering::SeqCst));
        self.calls.fetch_sub(CALLING, Ordering::SeqCst);
        if sent { Ok(there.then_some(moves)) } else { Err(CallFailed) }
    }

    /// The thread has left the cache: waits until all calls under way have arrived, so that their
    /// signals do not interrupt what it does next.
    fn accept_calls(&self) {
        if self.calls.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut backoff = Backoff::default();
        while self.calls.load(Ordering::SeqCst) >= CALLING {
            backoff.wait();
        }
        self.calls.fetch_and(!CALLED, Ordering::SeqCst);
        // The kernel delivers a pending signal at the end of any system call.
        // SAFETY: getpid has no arguments and no effect.
        unsafe { entry::raw(&Call::new(libc::SYS_getpid, &[])) };
    }

    /// Samples this thread's host rip from now on, if phases are timed.
    pub fn sample(&self) {
        if profile::is_enabled() {
            lock(&self.samples).extend(Samples::start(profile::has_timeline()));
        }
    }

    /// Calls `f` with each sample of its host rip.
    pub fn for_each_sample(&self, mut f: impl FnMut(Sample)) {
        lock(&self.samples).iter().for_each(|samples| samples.for_each(&mut f));
    }

    fn state(&self) -> ThreadState {
        ThreadState::of(self.moves.load(Ordering::Relaxed))
    }

    /// The value of `moves` after a change to the state `to`.
    fn moved(&self, to: ThreadState) -> u64 {
        let before = self.moves.load(Ordering::Relaxed);
        (before & !ThreadState::BITS) + (ThreadState::BITS + 1) + to as u64
    }

    /// The thread is about to interpret with `context`, from outside or from the cache. On `false`
    /// ranges were posted, or it was notified, or was asked to park: it is outside and has to
    /// [`Peer::accept_note`] and [`Peer::take_stale`] first.
    pub fn enter(&self, context: &mut ThreadContext) -> bool {
        self.context.store(context, Ordering::Relaxed);
        sync_point(SyncPoint::Enter);
        let before = self.moves.swap(self.moved(ThreadState::Interpreting), Ordering::SeqCst);
        if ThreadState::of(before) == ThreadState::Cache {
            self.accept_calls();
        }
        sync_point(SyncPoint::Enter);
        let free = !self.posted.load(Ordering::SeqCst)
            && !self.notified.load(Ordering::SeqCst)
            && !self.parking.is_requested();
        if !free {
            self.leave();
            self.parking.park();
        }
        free
    }

    /// The thread is about to run native code. It holds the lock of the fragments, under which code
    /// is made unreachable, so the code that it has found is still there.
    pub fn enter_cache(&self) {
        debug_assert_eq!(self.state(), ThreadState::Interpreting);
        self.moves.store(self.moved(ThreadState::Cache), Ordering::Release);
    }

    /// The thread is about to run guest code in place, which may lead it into native code. What it
    /// reads afterwards is not older than what another thread has written that does not wait for it.
    pub fn enter_in_place(&self) {
        debug_assert_eq!(self.state(), ThreadState::Interpreting);
        self.moves.store(self.moved(ThreadState::Cache), Ordering::SeqCst);
    }

    /// The thread executes no guest code from now on: it is outside.
    pub fn leave(&self) {
        debug_assert_ne!(self.state(), ThreadState::Outside);
        sync_point(SyncPoint::Leave);
        let before = self.moves.swap(self.moved(ThreadState::Outside), Ordering::SeqCst);
        if ThreadState::of(before) == ThreadState::Cache {
            self.accept_calls();
        }
    }

    /// A vfork child that used this while its parent slept is gone. It may have ended in any state;
    /// the parent is outside.
    pub fn reset_after_vfork(&self) {
        if self.state() != ThreadState::Outside {
            self.leave();
        }
        self.context.store(std::ptr::null_mut(), Ordering::Relaxed);
    }

    /// Takes the ranges of guest code that were posted. The thread drops its blocks made from them.
    pub fn take_stale(&self) -> Vec<Range<u64>> {
        let mut stale = lock(&self.stale);
        self.posted.store(false, Ordering::SeqCst);
        std::mem::take(&mut stale)
    }

    /// The thread is about to take what is ready for it. (If it took that first, it would miss what becomes
    /// ready in between.)
    pub fn accept_note(&self) {
        self.notified.store(false, Ordering::SeqCst);
    }

    /// Something is ready for the thread, which it takes when it comes outside.
    pub fn leave_note(&self) {
        self.notified.store(true, Ordering::SeqCst);
    }

    /// On the helper thread: something is ready for the thread. Returns when it is outside, or will come
    /// there without delay. (A thread that interprets stops soon, because it looks for what is ready
    /// before it runs native code.)
    pub fn notify(&self) {
        self.leave_note();
        loop {
            let moves = self.moves.load(Ordering::SeqCst);
            match ThreadState::of(moves) {
                ThreadState::Outside => return,
                ThreadState::Interpreting => self.await_move(moves),
                // If no signal can be sent, the thread comes out by itself some time.
                ThreadState::Cache => return drop(self.call()),
            }
        }
    }

    /// Has the thread been notified, and has not come outside since?
    pub fn is_notified(&self) -> bool {
        self.notified.load(Ordering::Relaxed)
    }

    /// Has something been posted that the thread has not taken yet?
    pub fn is_posted(&self) -> bool {
        self.posted.load(Ordering::SeqCst)
    }

    /// Tells the thread that the code in `range` has changed.
    fn post(&self, range: &Range<u64>) {
        let mut stale = lock(&self.stale);
        if stale.len() == MAX_STALE_RANGES {
            let (start, end) =
                stale.drain(..).fold((u64::MAX, 0), |(s, e), r| (s.min(r.start), e.max(r.end)));
            stale.push(start..end);
        }
        stale.push(range.clone());
        self.posted.store(true, Ordering::SeqCst);
    }

    /// Waits until the thread's state has changed since [`Peer::moves`] was `moves`.
    fn await_move(&self, moves: u64) {
        self.await_move_until(moves, None);
    }

    /// The same, but not longer than until `end`. Returns whether the state has changed.
    fn await_move_until(&self, moves: u64, end: Option<Instant>) -> bool {
        let mut backoff = Backoff::default();
        while self.moves.load(Ordering::Acquire) == moves {
            if end.is_some_and(|end| Instant::now() >= end) {
                return false;
            }
            backoff.wait();
        }
        true
    }

    /// Makes the thread stop interpreting, and leave native code at its next poll.
    fn interrupt(&self) {
        // SAFETY: contexts of threads are never unmapped, and a vfork child's is not unmapped
        // before `reset_after_vfork`.
        if let Some(context) = unsafe { self.context.load(Ordering::Relaxed).as_ref() } {
            context.pending.store(1, Ordering::SeqCst);
        }
    }
}

/// All guest threads of a process, and those of idle dispatchers.
#[derive(Default)]
pub struct Peers {
    all: Mutex<Vec<Arc<Peer>>>,
    /// May threads run guest code in place?
    in_place: AtomicBool,
    /// May threads wait in faults that other threads serve?
    serves_faults: AtomicBool,
}

impl Peers {
    /// Adds a new thread.
    pub fn add(&self, peer: Arc<Peer>) {
        lock(&self.all).push(peer);
    }

    /// Calls `f` on every thread.
    pub fn for_each(&self, f: impl FnMut(&Peer)) {
        lock(&self.all).iter().map(|peer| &**peer).for_each(f);
    }

    /// Waits until every thread but `own` that was in the cache has left it. The caller has made
    /// all native code lead to the runtime, so this happens soon.
    pub fn await_out_of_cache(&self, own: &Peer) {
        let others = self.others(own);
        let serves_faults = self.serves_faults();
        if serves_faults || !self.in_place.load(Ordering::Relaxed) {
            let end = serves_faults.then(|| Instant::now() + PATIENCE);
            if wait(&others, ThreadState::Cache, end) {
                return;
            }
        }
        let mut backoff = Backoff::default();
        while call_out(&others).is_err() {
            backoff.wait();
        }
    }

    /// Makes every thread but `own` leave the cache, if it is there, by a signal, and waits until
    /// it has. The caller has made some code unreachable. A thread that enters the cache again
    /// meanwhile does not find that code.
    ///
    /// # Errors
    /// A thread cannot be called, or should not be: it may wait in a served fault.
    pub fn call_out(&self, own: &Peer) -> Result<(), CallFailed> {
        if self.serves_faults() { Err(CallFailed) } else { call_out(&self.others(own)) }
    }

    /// From now on threads may wait in faults that other threads serve, which signals would
    /// interrupt. Direct execution ends before the caller's guest goes on.
    pub fn faults_are_served(&self) {
        self.serves_faults.store(true, Ordering::SeqCst);
    }

    /// May threads wait in faults that other threads serve?
    pub fn serves_faults(&self) -> bool {
        self.serves_faults.load(Ordering::SeqCst)
    }

    /// From now on threads may run guest code in place. They count as in the cache, and do not
    /// leave it unless they are called.
    pub fn set_in_place(&self) {
        self.in_place.store(true, Ordering::SeqCst);
    }

    /// The registers of the thread with this kernel id; none if there is no such thread, if it has
    /// not run yet, or if it is in the cache, where its context does not hold them. The thread does
    /// not run at the moment.
    pub fn registers_of(&self, tid: i32) -> Option<Registers> {
        let peer = self.with_tid(tid)?;
        if peer.state() == ThreadState::Cache {
            return None;
        }
        // SAFETY: contexts of threads are never unmapped. The thread does not run, but may be about
        // to write to its context, so the context is read without making a reference.
        unsafe {
            let context = peer.context.load(Ordering::SeqCst);
            (!context.is_null()).then(|| Registers {
                gpr: (&raw const (*context).gpr).read_volatile(),
                rip: (&raw const (*context).rip).read_volatile(),
                rflags: (&raw const (*context).rflags).read_volatile(),
                bases: [
                    (&raw const (*context).fs_base).read_volatile(),
                    (&raw const (*context).gs_base).read_volatile(),
                ],
            })
        }
    }

    /// Makes every thread of the same process but `own` come out of guest code and system calls.
    pub fn call_process(&self, own: &Peer) {
        let pid = own.pid.load(Ordering::SeqCst);
        for peer in self.others(own).iter().filter(|peer| peer.pid.load(Ordering::SeqCst) == pid) {
            peer.interrupt();
            // A thread that has ended cannot be called, and need not be, so errors do not matter.
            signal::call_out(pid, peer.tid.load(Ordering::SeqCst));
        }
    }

    /// Posts `range` to every thread but `own`: each drops its blocks made from `range` before it
    /// interprets or compiles anything else.
    pub fn post_to_others(&self, own: &Peer, range: &Range<u64>) -> Posted {
        let others = self.others(own);
        sync_point(SyncPoint::DropCode);
        others.iter().for_each(|peer| peer.post(range));
        Posted(others)
    }

    /// All threads but `own`. The list's lock is free again, so the caller may wait.
    fn others(&self, own: &Peer) -> Vec<Arc<Peer>> {
        lock(&self.all).iter().filter(|peer| !std::ptr::eq(&***peer, own)).cloned().collect()
    }

    /// In a forked child: only these threads exist.
    pub fn keep_only<'a>(&self, left: impl Iterator<Item = &'a Arc<Peer>>) {
        *lock(&self.all) = left.cloned().collect();
    }

    /// Calls `f` with the locks held: no thread is added or removed, and no range is posted.
    pub fn while_locked(&self, f: &mut dyn FnMut()) {
        let all = lock(&self.all);
        let _posted: Vec<_> = all.iter().map(|peer| lock(&peer.stale)).collect();
        f();
    }
}

/// Threads to which a range was posted.
#[must_use]
pub struct Posted(Vec<Arc<Peer>>);

impl Posted {
    /// Waits until those threads that were interpreting have stopped. The caller is outside and
    /// holds no lock.
    pub fn await_interpreters(self) {
        wait(&self.0, ThreadState::Interpreting, None);
    }
}

/// See [`Peers::call_out`].
fn call_out(peers: &[Arc<Peer>]) -> Result<(), CallFailed> {
    let called: Vec<_> = peers
        .iter()
        .map(|peer| peer.call().map(|moves| (peer, moves)))
        .collect::<Result<_, _>>()?;
    for (peer, moves) in called {
        if let Some(moves) = moves {
            peer.await_move(moves);
        }
    }
    Ok(())
}

/// Interrupts those of `peers` that are in `state`, and waits until each has changed its state, but not
/// longer than until `end`. Returns whether they have. The caller is outside and holds no lock.
fn wait(peers: &[Arc<Peer>], state: ThreadState, end: Option<Instant>) -> bool {
    let there = |peer: &Arc<Peer>| {
        Some(peer.moves.load(Ordering::SeqCst)).filter(|moves| ThreadState::of(*moves) == state)
    };
    let there: Vec<_> =
        peers.iter().filter_map(|peer| there(peer).map(|moves| (peer, moves))).collect();
    there.iter().for_each(|(peer, _)| peer.interrupt());
    there.into_iter().all(|(peer, moves)| peer.await_move_until(moves, end))
}

/// A wait loop's pauses: it spins, then yields, then sleeps.
#[derive(Default)]
struct Backoff {
    rounds: u32,
}

impl Backoff {
    fn wait(&mut self) {
        /// Rounds that spin, and rounds up to which the thread yields (guesses). Too high wastes
        /// the processor time that the awaited thread may need; too low makes short waits sleep.
        const SPINS: u32 = 100;
        const YIELDS: u32 = 200;
        /// The sleep of later rounds (guess).
        const SLEEP: Duration = Duration::from_micros(50);
        sync_point(SyncPoint::Wait);
        self.rounds += 1;
        match self.rounds {
            rounds if rounds <= SPINS => std::hint::spin_loop(),
            rounds if rounds <= YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(SLEEP),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> (Peers, Arc<Peer>, Arc<Peer>) {
        let peers = Peers::default();
        let (own, other) = (Arc::new(Peer::default()), Arc::new(Peer::default()));
        peers.add(own.clone());
        peers.add(other.clone());
        (peers, own, other)
    }

    #[test]
    fn what_is_posted_is_seen_before_guest_code_runs() {
        let (peers, own, other) = two();
        let mut context = ThreadContext::new();
        assert!(other.enter(&mut context));
        other.leave();
        peers.post_to_others(&own, &(0x1000..0x2000)).await_interpreters();
        assert!(!other.enter(&mut context));
        assert!(other.take_stale().iter().eq([&(0x1000..0x2000)]));
        assert!(other.enter(&mut context) && !own.is_posted());
    }

    #[test]
    fn a_change_of_code_does_not_wait_for_threads_in_the_cache() {
        let (peers, own, other) = two();
        let mut context = ThreadContext::new();
        assert!(other.enter(&mut context));
        other.enter_cache();
        peers.post_to_others(&own, &(0x1000..0x2000)).await_interpreters();
        // The thread sees what was posted when it begins to interpret.
        assert!(!other.enter(&mut context));
        other.take_stale();
        assert!(other.enter(&mut context));
        // Dropping native code does not wait for threads that interpret.
        peers.await_out_of_cache(&own);
        assert_eq!(context.pending.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn threads_that_may_wait_in_served_faults_are_not_called() {
        let (peers, own, other) = two();
        let mut context = ThreadContext::new();
        assert!(other.enter(&mut context));
        other.enter_cache();
        peers.set_in_place();
        peers.faults_are_served();
        assert!(peers.call_out(&own).is_err());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while context.pending.load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                other.leave();
            });
            peers.await_out_of_cache(&own);
        });
        // It came out because it looked at `pending`.
        assert_eq!(other.calls.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn many_ranges_become_one() {
        let peer = Peer::default();
        for page in 0..1000u64 {
            peer.post(&(page << 12..(page + 1) << 12));
        }
        let stale = peer.take_stale();
        assert!(stale.len() <= MAX_STALE_RANGES);
        assert!((0..1000u64).all(|page| stale.iter().any(|r| r.contains(&(page << 12)))));
    }

    #[test]
    fn waits_end_when_every_thread_has_moved() {
        for in_cache in [false, true] {
            let (peers, own, other) = two();
            let (ready, is_ready) = std::sync::mpsc::channel();
            let left = Arc::new(AtomicBool::new(false));
            let said = left.clone();
            let thread = std::thread::spawn(move || {
                let mut context = ThreadContext::new();
                assert!(other.enter(&mut context));
                if in_cache {
                    other.enter_cache();
                }
                ready.send(()).expect("the test waits");
                while context.pending.load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                said.store(true, Ordering::SeqCst);
                other.leave();
                // The context must outlive the interruption.
                context
            });
            is_ready.recv().expect("the thread started");
            if in_cache {
                peers.await_out_of_cache(&own)
            } else {
                peers.post_to_others(&own, &(0..1)).await_interpreters()
            }
            assert!(left.load(Ordering::SeqCst));
            drop(thread.join().expect("no panic"));
        }
    }
}
