//! Threads of the guest: making and ending them. Each is one host thread.
//!
//! A host thread runs on a *seat*: a host stack, an alternate signal stack and a [`ThreadContext`]
//! that are made once and used by one thread after the other. It is a thread of the host's C
//! library, so that thread-local storage, the allocator and locks work. The C library does nothing
//! that the guest can see. Thread ids, the word that is cleared at the end of a thread, and the
//! robust list are dealt with here.
//!
//! **The end of a thread** has the kernel's order: robust futexes that it owns are marked, the word
//! for `pthread_join` is cleared and its waiters are woken, the thread is gone. The host thread
//! ends a little later; the thread that takes its seat next waits for that. The first thread, whose
//! stack the C library did not make, ends by the raw system call and leaves a process that goes on
//! without it. The last thread ends the process.
//!
//! **Standing still**: a thread stands still while it waits and holds no lock of the translator's.
//! Before a thread leaves memory that other processes use ([`Threads::stop_others`]), it makes all
//! other threads of its process stand still, since its leaving ends them.
//!
//! Data: [`Threads`]. Free seats are shared by all processes of an address space, the counters
//! belong to one process. Invariant: `still` + 1 < `hosts` as long as a host thread other than the
//! caller of `stop_others` may hold a lock.
//!
//! Called on guest threads, outside native code, with no lock held. The list of free seats has a
//! lock; everything else is atomic.
//!
//! Example: `pthread_create` in the guest calls `clone`, and `System::make_thread` takes a free
//! seat, puts the new thread's registers into its context, and makes the host thread. `start` runs
//! there: it writes the thread id for the guest, sets the mask and runs the guest until the thread
//! exits. Then it puts the seat back into the list.

use std::mem::size_of;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use dynasour_guest::ThreadContext;

use crate::kernel::entry::{self, Call};
use crate::kernel::process::Death;
use crate::kernel::process::System;
use crate::kernel::process::guest_access::{guest_read, guest_write};
use crate::kernel::signal;
use crate::memory;
use crate::sync::lock;

/// Bytes of a thread's host stack (guess). Only touched pages cost memory. If the host needs more,
/// the guard page below ends the process by SIGSEGV.
pub(super) const STACK: usize = 4 << 20;
/// Bytes of the inaccessible page below each stack.
pub(super) const GUARD: usize = 4096;

/// Signals for which the C library installs handlers when it makes its first thread: SIGCANCEL and
/// SIGSETXID (nptl(7)).
pub(super) const LIBRARY_SIGNALS: [i32; 2] = [32, 33];

unsafe extern "C" {
    /// pthread_attr_setstack(3), which the libc crate does not have.
    fn pthread_attr_setstack(
        attributes: *mut libc::pthread_attr_t,
        stack: *mut libc::c_void,
        size: libc::size_t,
    ) -> libc::c_int;
}

/// Why the guest's code in a thread has ended. The host thread is still there.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum Ending {
    /// The thread asked to exit, with this status; others go on.
    Thread(i32),
    /// The process, or its last thread, asked to exit with this status.
    Process(i32),
    /// A signal kills the process.
    Killed(Death),
}

impl Ending {
    /// Ends the host thread or the process.
    pub fn finish(self) -> ! {
        match self {
            Ending::Thread(status) => exit_first(status),
            Ending::Process(status) => super::exit(status),
            Ending::Killed(death) => death.happen(),
        }
    }
}

/// Runs the guest in a new thread: implemented by dispatchers.
pub trait ThreadBody: Send {
    /// Runs the guest from `context` until the thread or the process ends.
    fn run(&mut self, context: &mut ThreadContext, system: &mut System) -> Ending;

    /// Makes the body available for another thread. The thread that ran it is about to end, or has
    /// gone in an execve.
    fn park(self: Box<Self>);
}

/// The threads of a process.
pub(crate) struct Threads {
    /// Threads that the guest can see.
    live: AtomicU32,
    /// Seats of the address space that no guest thread runs on. The host thread may still be about
    /// to end there ([`Seat::vacate`]).
    free: Arc<Mutex<Vec<Seat>>>,
    /// 1 after the first call of [`System::make_thread`] or [`Threads::share_memory`].
    made: AtomicU32,
    /// Host threads that may still access the translator's data: the live ones, and those that have
    /// not called [`Threads::leave`] yet.
    hosts: AtomicU32,
    /// Those of `hosts` that stand still, or sleep while a vfork child runs.
    still: AtomicU32,
    /// 1 while one thread wants the others to stand still; a futex.
    stop: AtomicU32,
}

impl Threads {
    /// The only thread of a new process.
    pub(crate) fn new() -> Threads {
        Threads {
            live: AtomicU32::new(1),
            free: Arc::default(),
            made: AtomicU32::new(0),
            hosts: AtomicU32::new(1),
            still: AtomicU32::new(0),
            stop: AtomicU32::new(0),
        }
    }

    /// The only thread of a new process that shares these threads' memory.
    pub(crate) fn of_companion(&self) -> Threads {
        Threads { free: self.free.clone(), made: AtomicU32::new(1), ..Threads::new() }
    }

    /// Notes that from now on another process runs in the same memory, which counts as another
    /// thread.
    pub(crate) fn share_memory(&self) {
        self.made.store(1, Ordering::Relaxed);
    }

    /// Whether there has ever been a second thread.
    pub(crate) fn ever(&self) -> bool {
        self.made.load(Ordering::Relaxed) != 0
    }

    /// Whether there is only one live thread.
    pub(crate) fn is_alone(&self) -> bool {
        self.live.load(Ordering::Relaxed) == 1
    }

    /// Calls `f` while no thread can take a seat or put one back.
    pub(crate) fn while_locked<R>(&self, f: impl FnOnce() -> R) -> R {
        let _free = lock(&self.free);
        f()
    }

    /// In a forked child: there is one thread, and no host threads end on the free seats.
    pub(crate) fn after_fork_child(&self) {
        self.live.store(1, Ordering::Relaxed);
        self.hosts.store(1, Ordering::Relaxed);
        self.still.store(0, Ordering::Relaxed);
        self.stop.store(0, Ordering::Relaxed);
        for seat in lock(&self.free).iter_mut() {
            seat.thread = None;
        }
    }

    /// Calls `sleep`, during which this thread counts as standing still: it must hold no lock and
    /// take none. Returns when no thread wants the others to stand still.
    pub(crate) fn stand_still<R>(&self, sleep: impl FnOnce() -> R) -> R {
        self.still.fetch_add(1, Ordering::SeqCst);
        let result = sleep();
        while self.is_stopping() {
            let args = [&raw const self.stop as u64, libc::FUTEX_WAIT as u64, 1, 0];
            // SAFETY: sleeps while the word is 1.
            unsafe { entry::raw(&Call::new(libc::SYS_futex, &args)) };
        }
        self.still.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Whether another thread wants this one to stand still.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst) != 0
    }

    /// Makes all other threads of the process stand still: the process is about to leave memory
    /// that other processes use. `call` makes the threads come out of guest code and system calls.
    pub(crate) fn stop_others(&self, mut call: impl FnMut()) {
        /// Between two calls of the threads (guess; a longer pause delays the end of the process).
        const PAUSE: std::time::Duration = std::time::Duration::from_micros(100);
        while self.stop.swap(1, Ordering::SeqCst) != 0 {
            self.stand_still(|| ());
        }
        while self.still.load(Ordering::SeqCst) + 1 < self.hosts.load(Ordering::SeqCst) {
            call();
            std::thread::sleep(PAUSE);
        }
        // Threads that have called `leave` still run code of the C library, which has locks of its
        // own.
        let mut free = lock(&self.free);
        free.iter_mut().for_each(Seat::vacate);
    }

    /// Lets the other threads go on, because the process has not left memory.
    pub(crate) fn release_others(&self) {
        self.stop.store(0, Ordering::SeqCst);
        wake(&raw const self.stop as u64, i32::MAX as u64);
    }

    /// The last access of a host thread to the translator's data.
    pub(crate) fn leave(&self) {
        self.hosts.fetch_sub(1, Ordering::SeqCst);
    }

    /// Takes a free seat or makes one; `None` if there is no memory for it.
    fn take_seat(&self) -> Option<Seat> {
        // The lock is not held during `vacate`, which waits for the end of a host thread.
        let seat = lock(&self.free).pop();
        match seat {
            Some(mut seat) => {
                seat.vacate();
                Some(seat)
            }
            None => Seat::new(),
        }
    }
}

/// The memory on which a host thread runs (see the module's header).
struct Seat {
    /// The address of what [`map_stacks`] mapped.
    mapping: u64,
    context: Box<ThreadContext>,
    /// The last host thread that ran on this seat, until it is joined.
    thread: Option<libc::pthread_t>,
}

/// Bytes of what [`map_stacks`] maps; as many as it takes to align the alternate stack.
pub(super) const STACKS: usize = 2 * GUARD + STACK + 2 * signal::ALTERNATE_STACK;

/// The alternate stack in what [`map_stacks`] has mapped at `mapping`.
pub(super) fn alternate_stack_in(mapping: u64) -> u64 {
    (mapping + (2 * GUARD + STACK) as u64).next_multiple_of(signal::ALTERNATE_STACK as u64)
}

/// Maps this many bytes of stack above an inaccessible page ([`GUARD`]); returns the page's address.
pub(super) fn map_above_guard(size: usize) -> Option<u64> {
    // SAFETY: a fresh mapping, of which the lowest page is made inaccessible.
    unsafe {
        let mapping = libc::mmap(
            std::ptr::null_mut(),
            GUARD + size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        if mapping == libc::MAP_FAILED {
            return None;
        }
        libc::mprotect(mapping, GUARD, libc::PROT_NONE);
        Some(mapping as u64)
    }
}

/// Maps a host stack and an alternate stack above it, each with an inaccessible page below.
pub(super) fn map_stacks() -> Option<u64> {
    let mapping = map_above_guard(STACKS - GUARD)?;
    let guard = alternate_stack_in(mapping) - GUARD as u64;
    // SAFETY: a page of the fresh mapping.
    unsafe { libc::mprotect(guard as *mut _, GUARD, libc::PROT_NONE) };
    Some(mapping)
}

impl Seat {
    fn new() -> Option<Seat> {
        Some(Seat { mapping: map_stacks()?, context: ThreadContext::new(), thread: None })
    }

    fn range(&self) -> Range<u64> {
        self.mapping..self.mapping + STACKS as u64
    }

    fn stack(&self) -> u64 {
        self.mapping + GUARD as u64
    }

    fn alternate_stack(&self) -> u64 {
        alternate_stack_in(self.mapping)
    }

    /// Waits until the last host thread on this seat has ended. It is about to.
    fn vacate(&mut self) {
        if let Some(thread) = self.thread.take() {
            // SAFETY: a joinable thread, which is joined only here.
            unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
        }
    }
}

/// What the guest has asked for about the id and the sharing of a new thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Identity {
    /// Addresses at which the thread's id is written before the thread runs: the parent's and the
    /// child's. 0 for none.
    pub write_to: [u64; 2],
    /// The address of a word that is cleared, and whose waiters are woken, when the thread ends; 0
    /// for none.
    pub clear_at_end: u64,
    /// Flags for `unshare(2)`: what the thread does not share with its maker.
    pub unshared: i32,
}

/// How a new thread tells its maker its id, which is 0 until then.
#[derive(Default)]
struct Started {
    tid: Mutex<i32>,
    changed: Condvar,
}

/// The argument of [`start`].
struct Start {
    seat: Seat,
    system: System,
    body: Box<dyn ThreadBody>,
    identity: Identity,
    started: Arc<Started>,
}

/// The function of a new host thread.
extern "C" fn start(argument: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: the maker leaked this box for this thread.
    let start = unsafe { Box::from_raw(argument.cast::<Start>()) };
    let Start { mut seat, mut system, mut body, identity, started } = *start;
    // SAFETY: plain calls about this thread; the seat outlives it.
    unsafe {
        seat.thread = Some(libc::pthread_self());
        entry::set_gs_base(&*seat.context);
        signal::use_alternate_stack(seat.alternate_stack(), &seat.context);
        // Replaces the C library's robust list, which the guest must not see; the guest registers
        // its own.
        entry::raw(&Call::new(libc::SYS_set_robust_list, &[0, ROBUST_HEAD as u64]));
        if identity.unshared != 0 {
            entry::raw(&Call::new(libc::SYS_unshare, &[identity.unshared as u64]));
        }
    }
    system.attach(&mut seat.context);
    let tid = own_tid();
    for address in identity.write_to.into_iter().filter(|address| *address != 0) {
        // The kernel ignores a bad address, too.
        let _ = guest_write(address, &tid.to_le_bytes());
    }
    *lock(&started.tid) = tid;
    started.changed.notify_one();
    drop(started);
    signal::set_kernel_mask(signal::host_mask(system.mask));
    let ending = body.run(&mut seat.context, &mut system);
    // The data that the signal handler reads is given away below. So no signal may come any more.
    signal::set_kernel_mask(!0);
    body.park();
    let process = system.process.clone();
    drop(system);
    lock(&process.threads().free).push(seat);
    match ending {
        Ending::Thread(_) => {
            process.threads().leave();
            std::ptr::null_mut()
        }
        _ => ending.finish(),
    }
}

/// Bytes of the kernel's `struct robust_list_head`.
const ROBUST_HEAD: usize = 24;

fn own_tid() -> i32 {
    // SAFETY: asks only.
    unsafe { entry::raw(&Call::new(libc::SYS_gettid, &[])) as i32 }
}

impl System {
    /// Makes a thread that begins with a copy of `context` as `enter` changes it; returns its id or
    /// an errno.
    ///
    /// The caller has blocked all asynchronous signals, so the host thread begins with them
    /// blocked.
    pub(crate) fn make_thread(
        &self,
        context: &ThreadContext,
        body: Box<dyn ThreadBody>,
        identity: Identity,
        enter: impl FnOnce(&mut ThreadContext),
    ) -> Result<i32, i32> {
        let threads = self.process.threads();
        let mut seat = threads.take_seat().ok_or(libc::EAGAIN)?;
        self.protect(seat.range());
        seat.context.clear();
        super::clone::copy_registers(context, &mut seat.context);
        enter(&mut seat.context);
        let system = self.for_thread(identity.clear_at_end);
        let started = Arc::new(Started::default());
        let stack = seat.stack();
        let start_with = Box::into_raw(Box::new(Start {
            seat,
            system,
            body,
            identity,
            started: started.clone(),
        }));
        threads.live.fetch_add(1, Ordering::SeqCst);
        threads.hosts.fetch_add(1, Ordering::SeqCst);
        // The new thread cannot run the guest before `wait` or the return below releases this lock.
        let mut tid = lock(&started.tid);
        if create(stack, STACK, start, start_with.cast()).is_err() {
            threads.live.fetch_sub(1, Ordering::SeqCst);
            threads.leave();
            // SAFETY: no thread has been made that would free the box.
            let unused = unsafe { Box::from_raw(start_with) };
            lock(&threads.free).push(unused.seat);
            return Err(libc::EAGAIN);
        }
        if threads.made.swap(1, Ordering::Relaxed) == 0 {
            self.take_back_library_signals();
        }
        while *tid == 0 {
            tid = started.changed.wait(tid).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        Ok(*tid)
    }

    /// Puts the guest's dispositions back after the C library has installed handlers of its own,
    /// which it does when it makes its first thread.
    pub(super) fn take_back_library_signals(&self) {
        let actions = self.process.actions();
        for signo in LIBRARY_SIGNALS {
            signal::set_kernel_action(signo, &self.mirror(signo, &actions[signo as usize]));
        }
    }

    /// Does everything that the guest can see of the end of this thread, whose asynchronous signals
    /// are blocked. Returns whether it was the last one.
    pub(crate) fn end_thread(&mut self) -> bool {
        end_robust_list();
        // Counted before the word is cleared: a thread that sees the cleared word may end at once
        // and must find that it is the last one.
        let is_last = self.process.threads().live.fetch_sub(1, Ordering::SeqCst) == 1;
        // Only other processes can wait for the last thread.
        if !is_last || self.process.shares_memory() {
            self.clear_tid();
        }
        is_last
    }

    /// Clears the word that the guest wants cleared at the end of this thread, and wakes a waiter.
    pub(crate) fn clear_tid(&mut self) {
        let word = std::mem::take(&mut self.clear_at_end);
        if word != 0 && guest_write(word, &0u32.to_le_bytes()).is_ok() {
            wake(word, 1);
        }
    }
}

/// Makes a thread of the C library's that runs `function` on the `size` bytes at `stack`. Nothing
/// else uses these bytes until the thread has ended. The error is an errno.
pub(super) fn create(
    stack: u64,
    size: usize,
    function: extern "C" fn(*mut libc::c_void) -> *mut libc::c_void,
    argument: *mut libc::c_void,
) -> Result<libc::pthread_t, i32> {
    // SAFETY: the attributes are initialised before use; the caller promises that the stack is
    // free.
    let (failed, thread) = unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        let mut thread: libc::pthread_t = std::mem::zeroed();
        let mut failed = libc::pthread_attr_init(&mut attributes);
        if failed == 0 {
            failed = pthread_attr_setstack(&mut attributes, stack as *mut libc::c_void, size);
            if failed == 0 {
                failed = libc::pthread_create(&mut thread, &attributes, function, argument);
            }
            libc::pthread_attr_destroy(&mut attributes);
        }
        (failed, thread)
    };
    if failed == 0 { Ok(thread) } else { Err(failed) }
}

/// Ends the first thread of a process that goes on, or a donor.
pub(crate) fn exit_first(status: i32) -> ! {
    loop {
        // SAFETY: ends this thread; its stack stays.
        unsafe { entry::raw(&Call::new(libc::SYS_exit, &[status as u64])) };
    }
}

fn wake(word: u64, count: u64) {
    // SAFETY: wakes waiters; the kernel checks the address.
    unsafe { entry::raw(&Call::new(libc::SYS_futex, &[word, libc::FUTEX_WAKE as u64, count])) };
}

/// Marks the futexes of this thread's robust list as owned by a dead thread, as the kernel does at
/// the end of a thread (`exit_robust_list`). Then the kernel must forget the list, because the
/// guest may free it as soon as it sees the end of the thread.
fn end_robust_list() {
    /// Nodes that are visited at most (kernel: `ROBUST_LIST_LIMIT`).
    const MOST: usize = 2048;
    let (mut head, mut len) = (0u64, 0u64);
    let ask = [0, &raw mut head as u64, &raw mut len as u64];
    // SAFETY: writes the two variables.
    let asked = unsafe { entry::raw(&Call::new(libc::SYS_get_robust_list, &ask)) };
    if asked != 0 || head == 0 {
        return;
    }
    // SAFETY: makes the kernel forget the list.
    unsafe { entry::raw(&Call::new(libc::SYS_set_robust_list, &[0, ROBUST_HEAD as u64])) };
    let word = |address: u64| guest_read::<8>(address).map(u64::from_le_bytes);
    let (Ok(first), Ok(offset), Ok(pending)) =
        (word(head), word(head.wrapping_add(8)), word(head.wrapping_add(16)))
    else {
        return;
    };
    // The lowest bit of a pointer marks a priority-inheritance futex.
    let (at, is_inheriting) = (|pointer: u64| pointer & !1, |pointer: u64| pointer & 1 != 0);
    let tid = own_tid() as u32;
    let mut node = first;
    for _ in 0..MOST {
        if at(node) == head {
            break;
        }
        let next = word(at(node));
        if at(node) != at(pending)
            && !owner_died(at(node).wrapping_add(offset), tid, is_inheriting(node), false)
        {
            return;
        }
        match next {
            Ok(next) => node = next,
            Err(_) => return,
        }
    }
    if at(pending) != 0 {
        owner_died(at(pending).wrapping_add(offset), tid, is_inheriting(pending), true);
    }
}

/// Marks one futex as the kernel's `handle_futex_death` does. Returns `false` if the list must not
/// be followed further.
fn owner_died(futex: u64, tid: u32, is_inheriting: bool, is_pending: bool) -> bool {
    if !futex.is_multiple_of(size_of::<u32>() as u64) {
        return false;
    }
    // SAFETY: the guest's own list names the word.
    let Ok(mut value) = (unsafe { memory::load::<u32>(futex) }) else { return false };
    loop {
        if is_pending && !is_inheriting && value == 0 {
            // The thread had unlocked the futex, but not yet woken a waiter.
            wake(futex, 1);
            return true;
        }
        if value & libc::FUTEX_TID_MASK != tid {
            return true;
        }
        let dead = value & libc::FUTEX_WAITERS | libc::FUTEX_OWNER_DIED;
        // SAFETY: as above.
        match unsafe { memory::compare_exchange(futex, value, dead) } {
            Err(_) => return false,
            Ok(now) if now == value => break,
            Ok(now) => value = now,
        }
    }
    if !is_inheriting && value & libc::FUTEX_WAITERS != 0 {
        wake(futex, 1);
    }
    true
}
