//! Guest threads as the others see them: who is where, and how one thread makes the others notice
//! something.
//!
//! A thread is at one of three *places*: *interpreting*; *in the cache* while it runs fragments, or
//! has just left one and still needs what is known of it; or *outside*, where it performs system
//! calls and compiles.
//!
//! **Handshake.** Whoever takes something away first makes it unreachable, and then waits
//! ([`Peers::settle`]): for fragments, until each thread that was in the cache has come out, which
//! it does since fragments that go away lead nowhere else; for guest code, until each thread that
//! was interpreting has stopped, which it does since its `pending` is set. What has to be forgotten
//! is posted before that. A thread looks at what was posted after it has said that it interprets,
//! and if there is anything goes outside again to attend to it: so either the poster sees it
//! interpret and waits, or it sees what was posted. Who waits is outside and holds no lock: two
//! that wait do not wait for each other.
//!
//! **Calls.** Where only some fragments go, a thread in others would never come out: it is called
//! by a signal ([`signal::call_out`]), whose handler treats it as an asynchronous one. It must
//! never interrupt a system call of the guest's: nobody is called who is seen not to be in the
//! cache, and who leaves the cache while a call is being made waits until it has arrived.

use crate::changes::schedule::{Step, step};
use crate::kernel::entry::{self, Call};
use crate::kernel::signal;
use crate::kernel::syscall::tracing::Registers;
use crate::observe::profile::sampling::Samples;
use crate::observe::profile::{self, Clock};
use crate::sync::lock;
use dynasour_guest::ThreadContext;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// More ranges than this are not remembered one by one.
const MAX_STALE_RANGES: usize = 64;

/// Where a thread is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ThreadState {
    Outside,
    Interpreting,
    Cache,
}

impl ThreadState {
    /// The low bits of [`Peer::moves`] that say so.
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
    /// Counts the thread's moves from place to place, above two bits that say where it is.
    moves: AtomicU64,
    /// The context with which it runs guest code.
    context: AtomicPtr<ThreadContext>,
    /// Whether there is anything in `stale`.
    posted: AtomicBool,
    /// Guest code that may have changed.
    stale: Mutex<Vec<Range<u64>>>,
    /// The thread's number, and its process's.
    tid: AtomicI32,
    /// See [`Peer::tid`].
    pid: AtomicI32,
    /// How many are about to call it, above a bit that says that somebody has.
    calls: AtomicU32,
    /// System calls it made.
    pub syscalls: AtomicU64,
    /// Blocks it interpreted, and heads it gave up, when it last said so.
    pub blocks: AtomicU64,
    /// See [`Peer::blocks`].
    pub blacklisted: AtomicU64,
    /// Where its time goes.
    pub clock: Arc<Clock>,
    samples: Mutex<Vec<Samples>>,
}

/// A thread cannot be called.
#[derive(Debug)]
pub struct CallFailed;

/// In [`Peer::calls`].
const CALLED: u32 = 1;
/// One who is about to call.
const CALLING: u32 = 2;

impl Peer {
    /// It is this thread that runs from now on.
    pub fn attach(&self) {
        // SAFETY: gettid has no arguments and cannot fail.
        let tid = unsafe { entry::raw(&Call::new(libc::SYS_gettid, &[])) };
        self.tid.store(tid as i32, Ordering::SeqCst);
        self.pid.store(std::process::id() as i32, Ordering::SeqCst);
    }

    /// Makes it come out of the cache, if it is there, by a signal: then how it has moved so far.
    /// An error: that cannot be sent.
    fn call(&self) -> Result<Option<u64>, CallFailed> {
        self.calls.fetch_add(CALLING, Ordering::SeqCst);
        let moves = self.moves.load(Ordering::SeqCst);
        let there = ThreadState::of(moves) == ThreadState::Cache;
        if there {
            // Before the signal, so that it does not come while there is nothing to leave yet.
            self.interrupt();
            self.calls.fetch_or(CALLED, Ordering::SeqCst);
        }
        let sent = !there
            || signal::call_out(self.pid.load(Ordering::SeqCst), self.tid.load(Ordering::SeqCst));
        self.calls.fetch_sub(CALLING, Ordering::SeqCst);
        if sent { Ok(there.then_some(moves)) } else { Err(CallFailed) }
    }

    /// It has left the cache: calls arrive here, and not in what it does next.
    fn accept_calls(&self) {
        if self.calls.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut backoff = Backoff::default();
        while self.calls.load(Ordering::SeqCst) >= CALLING {
            backoff.wait();
        }
        self.calls.fetch_and(!CALLED, Ordering::SeqCst);
        // A signal that was sent is delivered at the end of any call.
        // SAFETY: getpid has no arguments and no effect.
        unsafe { entry::raw(&Call::new(libc::SYS_getpid, &[])) };
    }

    /// This thread is sampled from now on, if runs are timed.
    pub fn sample(&self) {
        if profile::is_enabled() {
            lock(&self.samples).extend(Samples::start());
        }
    }

    /// Calls `f` with each sample.
    pub fn for_each_sample(&self, mut f: impl FnMut(u64)) {
        lock(&self.samples).iter().for_each(|samples| samples.for_each(&mut f));
    }

    fn state(&self) -> ThreadState {
        ThreadState::of(self.moves.load(Ordering::Relaxed))
    }

    fn moved(&self, to: ThreadState) -> u64 {
        let before = self.moves.load(Ordering::Relaxed);
        (before & !ThreadState::BITS) + (ThreadState::BITS + 1) + to as u64
    }

    /// The thread is about to interpret with `context`, from outside or from the cache. If not
    /// `true`, it is outside and must first [`Peer::take_stale`].
    pub fn enter(&self, context: &mut ThreadContext) -> bool {
        self.context.store(context, Ordering::Relaxed);
        step(Step::Enter);
        let before = self.moves.swap(self.moved(ThreadState::Interpreting), Ordering::SeqCst);
        if ThreadState::of(before) == ThreadState::Cache {
            self.accept_calls();
        }
        step(Step::Enter);
        let free = !self.posted.load(Ordering::SeqCst);
        if !free {
            self.leave();
        }
        free
    }

    /// The thread is about to run fragments. It has the fragments' lock, and so finds none that
    /// somebody has taken away.
    pub fn enter_cache(&self) {
        debug_assert_eq!(self.state(), ThreadState::Interpreting);
        self.moves.store(self.moved(ThreadState::Cache), Ordering::Release);
    }

    /// The thread has finished with guest code for now.
    pub fn leave(&self) {
        debug_assert_ne!(self.state(), ThreadState::Outside);
        step(Step::Leave);
        let before = self.moves.swap(self.moved(ThreadState::Outside), Ordering::SeqCst);
        if ThreadState::of(before) == ThreadState::Cache {
            self.accept_calls();
        }
    }

    /// A child that borrowed this thread's place is gone, wherever it was.
    pub fn reset_after_vfork(&self) {
        if self.state() != ThreadState::Outside {
            self.leave();
        }
        self.context.store(std::ptr::null_mut(), Ordering::Relaxed);
    }

    /// The ranges of guest code that this thread has to forget.
    pub fn take_stale(&self) -> Vec<Range<u64>> {
        let mut stale = lock(&self.stale);
        self.posted.store(false, Ordering::SeqCst);
        std::mem::take(&mut stale)
    }

    /// Has something been posted that the thread has not attended to?
    pub fn is_posted(&self) -> bool {
        self.posted.load(Ordering::SeqCst)
    }

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

    /// Waits until it has moved.
    fn await_move(&self, moves: u64) {
        let mut backoff = Backoff::default();
        while self.moves.load(Ordering::Acquire) == moves {
            backoff.wait();
        }
    }

    /// Makes the interpreter come back, if it runs.
    fn interrupt(&self) {
        // SAFETY: contexts of threads are never unmapped, and those of vfork children not before
        // `take_back`.
        if let Some(context) = unsafe { self.context.load(Ordering::Relaxed).as_ref() } {
            context.pending.store(1, Ordering::SeqCst);
        }
    }
}

/// All guest threads of a process, and those that rest.
#[derive(Default)]
pub struct Peers {
    all: Mutex<Vec<Arc<Peer>>>,
}

impl Peers {
    /// Adds a thread.
    pub fn add(&self, peer: Arc<Peer>) {
        lock(&self.all).push(peer);
    }

    /// Calls `f` on every thread.
    pub fn for_each(&self, f: impl FnMut(&Peer)) {
        lock(&self.all).iter().map(|peer| &**peer).for_each(f);
    }

    /// Waits until every thread but `own` has left the cache, if it was there: fragments were made
    /// unreachable.
    pub fn await_out_of_cache(&self, own: &Peer) {
        wait(&self.others(own), ThreadState::Cache);
    }

    /// Makes every thread but `own` leave the cache, if it is there, and waits until it has: some
    /// fragments were made unreachable. Who comes back meanwhile does not find them.
    pub fn call_out(&self, own: &Peer) -> Result<(), CallFailed> {
        let others = self.others(own);
        let called: Vec<_> = others
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

    /// The registers of the thread with this number, which does not run, unless it is in the cache.
    pub fn registers_of(&self, tid: i32) -> Option<Registers> {
        let all = lock(&self.all);
        let peer = all.iter().find(|peer| peer.tid.load(Ordering::SeqCst) == tid)?;
        if peer.state() == ThreadState::Cache {
            return None;
        }
        // SAFETY: contexts of threads are never unmapped; their thread, which does not run, may be
        // about to write to this one, so it is read without a reference.
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
            // One that has gone cannot be called, and need not be.
            signal::call_out(pid, peer.tid.load(Ordering::SeqCst));
        }
    }

    /// Makes every thread but `own` forget its blocks made from `range` before it interprets or
    /// compiles anything else.
    pub fn post_to_others(&self, own: &Peer, range: &Range<u64>) -> Posted {
        let others = self.others(own);
        step(Step::DropCode);
        others.iter().for_each(|peer| peer.post(range));
        Posted(others)
    }

    fn others(&self, own: &Peer) -> Vec<Arc<Peer>> {
        lock(&self.all).iter().filter(|peer| !std::ptr::eq(&***peer, own)).cloned().collect()
    }

    /// In a forked child: these are left.
    pub fn keep_only<'a>(&self, left: impl Iterator<Item = &'a Arc<Peer>>) {
        *lock(&self.all) = left.cloned().collect();
    }

    /// Calls `f` while no thread comes or goes, or posts anything.
    pub fn while_locked(&self, f: &mut dyn FnMut()) {
        let all = lock(&self.all);
        let _posted: Vec<_> = all.iter().map(|peer| lock(&peer.stale)).collect();
        f();
    }
}

/// Threads that have been told to forget something.
#[must_use]
pub struct Posted(Vec<Arc<Peer>>);

impl Posted {
    /// Waits until those that were interpreting have stopped. The caller is outside and holds no
    /// lock.
    pub fn await_interpreters(self) {
        wait(&self.0, ThreadState::Interpreting);
    }
}

/// Waits until each of these threads that is at `place` has moved. The caller is outside and holds
/// no lock.
fn wait(peers: &[Arc<Peer>], state: ThreadState) {
    let there = |peer: &Arc<Peer>| {
        Some(peer.moves.load(Ordering::SeqCst)).filter(|moves| ThreadState::of(*moves) == state)
    };
    let there: Vec<_> =
        peers.iter().filter_map(|peer| there(peer).map(|moves| (peer, moves))).collect();
    there.iter().for_each(|(peer, _)| peer.interrupt());
    there.into_iter().for_each(|(peer, moves)| peer.await_move(moves));
}

/// Waits a little longer each time.
#[derive(Default)]
struct Backoff {
    rounds: u32,
}

impl Backoff {
    fn wait(&mut self) {
        const SPINS: u32 = 100;
        const YIELDS: u32 = 200;
        step(Step::Wait);
        self.rounds += 1;
        match self.rounds {
            rounds if rounds <= SPINS => std::hint::spin_loop(),
            rounds if rounds <= YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
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
    fn who_is_in_the_cache_is_not_kept_there_by_changes_of_code() {
        let (peers, own, other) = two();
        let mut context = ThreadContext::new();
        assert!(other.enter(&mut context));
        other.enter_cache();
        peers.post_to_others(&own, &(0x1000..0x2000)).await_interpreters();
        // It sees what was posted when it goes on to interpret.
        assert!(!other.enter(&mut context));
        other.take_stale();
        assert!(other.enter(&mut context));
        // Nor does who interprets keep fragments.
        peers.await_out_of_cache(&own);
        assert_eq!(context.pending.load(Ordering::SeqCst), 0);
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
    fn waits_end_when_everybody_has_moved() {
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
