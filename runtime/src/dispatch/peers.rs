//! Guest threads as the others see them: who is where, and how one thread makes the others notice something.
//!
//! A thread is *inside* while it interprets, runs fragments, or has just left one and still needs what is known of it; it
//! is *outside* while it performs system calls and compiles. [`Peer::enter`] and [`Peer::leave`] mark the passages.
//!
//! **Handshake.** Whoever takes something away ([`Peers::settle`]) first makes it unreachable, then posts what the others
//! have to forget, and waits until every other thread has been outside once. A thread looks at what was posted after it has
//! said that it enters, and then goes outside again to attend to it: so either the poster sees it inside and waits, or it sees
//! what was posted. Who waits is outside and holds no lock: two that wait do not wait for each other.
//!
//! Threads inside come out because their `pending` is set, which the interpreter looks at between blocks, and because
//! fragments that go away lead nowhere but out.

use crate::sync::lock;
use dynasour_guest::ThreadContext;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// More ranges than this are not remembered one by one.
const MOST_RANGES: usize = 64;

/// One guest thread, as the others see it.
#[derive(Default)]
pub struct Peer {
    /// Odd while the thread is inside.
    passages: AtomicU64,
    /// The context with which it is inside.
    context: AtomicPtr<ThreadContext>,
    /// Whether there is anything in `stale`.
    posted: AtomicBool,
    /// Guest code that may have changed.
    stale: Mutex<Vec<Range<u64>>>,
    /// System calls it made.
    pub syscalls: AtomicU64,
    /// Blocks it interpreted, and heads it gave up, when it last said so.
    pub blocks: AtomicU64,
    /// See [`Peer::blocks`].
    pub blacklisted: AtomicU64,
}

impl Peer {
    /// The thread is about to run guest code with `context`. If not `true`, it must first [`Peer::take_stale`].
    pub fn enter(&self, context: &mut ThreadContext) -> bool {
        self.context.store(context, Ordering::Relaxed);
        self.passages.fetch_add(1, Ordering::SeqCst);
        let free = !self.posted.load(Ordering::SeqCst);
        if !free {
            self.leave();
        }
        free
    }

    /// The thread has finished with guest code for now.
    pub fn leave(&self) {
        let inside = self.passages.load(Ordering::Relaxed);
        debug_assert!(inside % 2 == 1);
        self.passages.store(inside + 1, Ordering::Release);
    }

    /// A child that borrowed this thread's place is gone, wherever it was.
    pub fn take_back(&self) {
        if self.passages.load(Ordering::Relaxed) % 2 == 1 {
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
        if stale.len() == MOST_RANGES {
            let (start, end) = stale.drain(..).fold((u64::MAX, 0), |(s, e), r| (s.min(r.start), e.max(r.end)));
            stale.push(start..end);
        }
        stale.push(range.clone());
        self.posted.store(true, Ordering::SeqCst);
    }

    /// Makes the interpreter come back, if it runs.
    fn interrupt(&self) {
        // SAFETY: contexts of threads are never unmapped, and those of vfork children not before `take_back`.
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

    /// Makes all threads but `own` forget code in `range`, if one is given, and waits until each has been outside since the
    /// call. The caller is outside, holds no lock, and has made unreachable what it wants the others to have left.
    pub fn settle(&self, own: &Peer, range: Option<&Range<u64>>) {
        let others: Vec<Arc<Peer>> = {
            let all = lock(&self.all);
            if all.len() == 1 {
                return;
            }
            all.iter().filter(|peer| !std::ptr::eq(&***peer, own)).cloned().collect()
        };
        if let Some(range) = range {
            others.iter().for_each(|peer| peer.post(range));
        }
        let inside: Vec<_> = others
            .iter()
            .map(|peer| (peer, peer.passages.load(Ordering::SeqCst)))
            .filter(|(_, passages)| passages % 2 == 1)
            .collect();
        inside.iter().for_each(|(peer, _)| peer.interrupt());
        for (peer, passages) in inside {
            let mut patience = Patience::default();
            while peer.passages.load(Ordering::Acquire) == passages {
                patience.wait();
            }
        }
    }

    /// In a forked child: these are left.
    pub fn keep_only<'a>(&self, left: impl Iterator<Item = &'a Arc<Peer>>) {
        *lock(&self.all) = left.cloned().collect();
    }

    /// Calls `f` while no thread comes or goes, or posts anything.
    pub fn held(&self, f: &mut dyn FnMut()) {
        let all = lock(&self.all);
        let _posted: Vec<_> = all.iter().map(|peer| lock(&peer.stale)).collect();
        f();
    }
}

/// Waits a little longer each time.
#[derive(Default)]
struct Patience {
    rounds: u32,
}

impl Patience {
    fn wait(&mut self) {
        const SPINS: u32 = 100;
        const YIELDS: u32 = 200;
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

    #[test]
    fn what_is_posted_is_seen_before_guest_code_runs() {
        let peers = Peers::default();
        let (own, other) = (Arc::new(Peer::default()), Arc::new(Peer::default()));
        peers.add(own.clone());
        peers.add(other.clone());
        let mut context = ThreadContext::new();
        assert!(other.enter(&mut context));
        other.leave();
        peers.settle(&own, Some(&(0x1000..0x2000)));
        assert!(!other.enter(&mut context));
        assert!(other.take_stale().iter().eq([&(0x1000..0x2000)]));
        assert!(other.enter(&mut context) && !own.is_posted());
    }

    #[test]
    fn many_ranges_become_one() {
        let peer = Peer::default();
        for page in 0..1000u64 {
            peer.post(&(page << 12..(page + 1) << 12));
        }
        let stale = peer.take_stale();
        assert!(stale.len() <= MOST_RANGES);
        assert!((0..1000u64).all(|page| stale.iter().any(|r| r.contains(&(page << 12)))));
    }

    #[test]
    fn settling_waits_for_who_is_inside() {
        let peers = Peers::default();
        let (own, other) = (Arc::new(Peer::default()), Arc::new(Peer::default()));
        peers.add(own.clone());
        peers.add(other.clone());
        let (ready, is_ready) = std::sync::mpsc::channel();
        let left = Arc::new(AtomicBool::new(false));
        let (inside, said) = (other, left.clone());
        let thread = std::thread::spawn(move || {
            let mut context = ThreadContext::new();
            assert!(inside.enter(&mut context));
            ready.send(()).expect("the test waits");
            while context.pending.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            said.store(true, Ordering::SeqCst);
            inside.leave();
            // The context must outlive the interruption.
            context
        });
        is_ready.recv().expect("the thread started");
        peers.settle(&own, None);
        assert!(left.load(Ordering::SeqCst));
        drop(thread.join().expect("no panic"));
    }
}
