//! The helper thread: a host thread that works for the guest's threads and that the guest does not see.
//!
//! It lives as long as there is something to do, and not longer, so most of the time the process has the
//! threads that the guest has made. A thread that is about to do what needs exactly these [rests](rest)
//! the helper: it waits for the job under way, drops those that wait, and none is begun until it is done.
//! That is so for each fork, for calls that the kernel refuses to a process with threads (`unshare`,
//! `setns`), for those that change what a thread may do (`setuid`, `capset`, `seccomp`, …), and before a
//! core file is written. A guest that reads about its threads in `/proc`, and one whose memory another
//! process shares, has no helper any more ([`turn_off`]). The kernel counts the thread a moment longer than it
//! lives, for which `unshare` and `setns` wait ([`wait_until_alone`]).
//!
//! All signals are blocked in the helper thread. It inherits everything else from the thread that starts
//! it. Where the kernel makes no thread, there is none: the jobs are done by those who have them.
//!
//! Data: [`HELPER`], one for the process; its lock is taken by a thread that holds no other, and held
//! while the host thread is started or waited for. A forked child finds it free, because the forking
//! thread rests the helper and no other thread is in these functions ([`while_locked`]).
//!
//! Example: a thread has recorded a path and [submits](submit) its compilation. The helper compiles it,
//! notifies the thread, and ends.

mod protocol;

use super::thread::{GUARD, LIBRARY_SIGNALS, create, map_above_guard};
use crate::kernel::entry::{self, Call};
use crate::kernel::signal::{self, gate};
use crate::sync::lock;
use protocol::{Protocol, Submitted};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Bytes of the helper's stack (guess). Only touched pages cost memory.
const STACK: usize = 4 << 20;

/// How often the end of the host thread is looked for (guess: once is enough in most cases; another thread
/// may have got its id meanwhile).
const MOST_LOOKS: u32 = 1000;
/// So often it is asked whether the process has one thread, at first one question after the other (guess: a
/// helper that has ended needs the processor for some microseconds, but may have to wait for it).
const MOST_QUESTIONS: u32 = 1000;
/// The first of the questions between which the thread sleeps.
const FIRST_PATIENT: u32 = 100;
/// It sleeps so long.
const PAUSE: Duration = Duration::from_micros(200);

/// Something to do. It takes no lock that a thread holds which rests the helper.
pub trait Job: Send {
    /// Does it, on the helper thread.
    fn run(self: Box<Self>);
    /// It will not be done.
    fn drop_it(self: Box<Self>);
}

/// The helper thread of the process.
struct Helper {
    state: Mutex<State>,
    /// Where the stack is mapped, with an inaccessible page below it; 0 before [`reserve`], which is called
    /// by threads that hold locks.
    stack: AtomicU64,
    /// The host thread does not work any more.
    idle: Condvar,
    /// The kernel's id of the host thread.
    tid: AtomicI32,
}

struct State {
    protocol: Protocol<Box<dyn Job>>,
    /// The last host thread, until it is joined.
    thread: Option<libc::pthread_t>,
}

static HELPER: Helper = Helper {
    state: Mutex::new(State { protocol: Protocol::new(), thread: None }),
    stack: AtomicU64::new(0),
    idle: Condvar::new(),
    tid: AtomicI32::new(0),
};

/// Maps the helper's stack, if that has not been done. Returns where it is: the guest must not map
/// anything there. Without this there is no helper.
pub(crate) fn reserve() -> Option<Range<u64>> {
    if HELPER.stack.load(Ordering::SeqCst) != 0 {
        return None;
    }
    let stack = map_above_guard(STACK)?;
    match HELPER.stack.compare_exchange(0, stack, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => Some(stack..stack + (GUARD + STACK) as u64),
        Err(_) => {
            // SAFETY: nobody else knows this mapping.
            unsafe { libc::munmap(stack as *mut libc::c_void, GUARD + STACK) };
            None
        }
    }
}

/// Gives the helper something to do.
///
/// # Errors
/// There is no helper: the caller has to do it.
pub(crate) fn submit<J: Job + 'static>(job: J) -> Result<(), J> {
    let mut state = lock(&HELPER.state);
    let stack = HELPER.stack.load(Ordering::SeqCst);
    if stack == 0 || !state.protocol.is_open() {
        return Err(job);
    }
    let Submitted { start: starts, dropped } = state.protocol.submit(Box::new(job));
    let mut dropped = VecDeque::from_iter(dropped);
    if starts {
        join(&mut state);
        state.thread = start(stack);
        if state.thread.is_none() {
            dropped.append(&mut state.protocol.not_started());
        }
    }
    drop(state);
    dropped.into_iter().for_each(|job| job.drop_it());
    Ok(())
}

/// While it lives, there is no helper thread.
#[must_use]
pub(crate) struct Rest(());

/// Waits until there is no helper thread. The caller holds no lock.
pub(crate) fn rest() -> Rest {
    let mut state = lock(&HELPER.state);
    let dropped = state.protocol.rest();
    while state.protocol.is_working() {
        state = HELPER.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    join(&mut state);
    state.protocol.joined();
    drop(state);
    dropped.into_iter().for_each(|job| job.drop_it());
    Rest(())
}

/// Waits until the kernel does not count the helper among the process's threads: it does so for a
/// moment after the thread's id is free (`release_task` in Linux). The caller rests the helper and is
/// the guest's only thread.
pub(crate) fn wait_until_alone() {
    let is_alone = Call::new(libc::SYS_unshare, &[libc::CLONE_VM as u64]);
    for question in 0..MOST_QUESTIONS {
        // SAFETY: changes nothing in a process with one thread, and is refused to others.
        if unsafe { entry::raw(&is_alone) } != -i64::from(libc::EINVAL) {
            return;
        }
        match question < FIRST_PATIENT {
            true => std::thread::yield_now(),
            false => std::thread::sleep(PAUSE),
        }
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        lock(&HELPER.state).protocol.resume();
    }
}

/// Waits until there is no helper thread. There will be none any more.
pub(crate) fn turn_off() {
    let _rest = rest();
    lock(&HELPER.state).protocol.turn_off();
}

/// Calls `f` with the lock held, for a fork. The caller rests the helper.
pub(crate) fn while_locked<R>(f: impl FnOnce() -> R) -> R {
    let _state = lock(&HELPER.state);
    f()
}

/// Waits until the last host thread has ended, which is about to, and until its id is free.
fn join(state: &mut State) {
    let Some(thread) = state.thread.take() else { return };
    // SAFETY: a joinable thread, which is joined only here.
    unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
    let (pid, tid) = (std::process::id(), HELPER.tid.load(Ordering::SeqCst));
    let ask = Call::new(libc::SYS_tgkill, &[u64::from(pid), tid as u64, 0]);
    for _ in 0..MOST_LOOKS {
        // SAFETY: signal 0 only asks whether the thread is there.
        if unsafe { entry::raw(&ask) } != 0 {
            return;
        }
        std::thread::yield_now();
    }
}

/// Starts the host thread, in which all signals are blocked.
fn start(stack: u64) -> Option<libc::pthread_t> {
    gate::with_all_blocked(|| {
        let actions = LIBRARY_SIGNALS.map(signal::kernel_action);
        let thread = create(stack + GUARD as u64, STACK, work, std::ptr::null_mut()).ok();
        for (signo, action) in LIBRARY_SIGNALS.into_iter().zip(&actions) {
            signal::set_kernel_action(signo, action);
        }
        thread
    })
}

/// The function of the host thread.
extern "C" fn work(_: *mut libc::c_void) -> *mut libc::c_void {
    HELPER.tid.store(signal::own_tid(), Ordering::SeqCst);
    loop {
        let job = lock(&HELPER.state).protocol.next();
        match job {
            Some(job) => job.run(),
            None => break,
        }
    }
    HELPER.idle.notify_all();
    std::ptr::null_mut()
}
