//! Threads of the guest: one host thread each.
//!
//! A host thread runs on a *seat*: a host stack, an alternate signal stack and a [`ThreadContext`]
//! that are made once and used by one thread after the other. It is created by the C library, so
//! that thread-local storage, the allocator and locks work. Everything that the guest can see is
//! done here: thread ids, the clearing write at its end, the robust list.
//!
//! **The end of a thread**, in the kernel's order: owners of robust futexes are marked dead, the
//! word for `pthread_join` is cleared and woken, the thread no longer exists for the guest. The
//! host thread itself ends a moment later; the next thread on its seat waits for that. The first
//! thread, whose stack the C library does not own, ends by the raw system call, and the process
//! continues without it. The last thread ends the process.
//!
//! Data: [`Threads`], a part of the process, with a lock for the free seats and atomic counters.
//!
//! Example: a guest makes a thread; it takes a free seat, or a new one is mapped; the host thread
//! runs the guest from a copy of its maker's context; at its end the seat is free again.

use std::mem::size_of;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use dynasour_guest::ThreadContext;

use crate::kernel::entry::{self, Call};
use crate::kernel::process::System;
use crate::kernel::process::guest_access::{guest_read, guest_write};
use crate::kernel::signal;
use crate::memory;
use crate::sync::lock;

/// Bytes of a thread's host stack; only what is used is ever there.
pub(super) const STACK: usize = 4 << 20;
/// Inaccessible, below each stack.
pub(super) const GUARD: usize = 4096;

unsafe extern "C" {
    /// pthread_attr_setstack(3), which the libc crate does not have.
    fn pthread_attr_setstack(
        attributes: *mut libc::pthread_attr_t,
        stack: *mut libc::c_void,
        size: libc::size_t,
    ) -> libc::c_int;
}

/// Why the guest's code in a thread has ended. The host thread still runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Ending {
    /// The thread asked to exit, with this status; the process goes on.
    Thread(i32),
    /// The process, or its last thread, asked to exit with this status.
    Process(i32),
    /// A signal kills the process.
    Killed(i32),
}

impl Ending {
    /// Ends the host thread or the process.
    pub fn finish(self) -> ! {
        match self {
            Ending::Thread(status) => exit_first(status),
            Ending::Process(status) => super::exit(status),
            Ending::Killed(signo) => signal::die(signo),
        }
    }
}

/// What runs the guest in a new thread.
pub trait ThreadBody: Send {
    /// Runs the guest from `context` until the thread or the process ends.
    fn run(&mut self, context: &mut ThreadContext, system: &mut System) -> Ending;

    /// The thread is at its end, or was ended by an execve.
    fn rest(self: Box<Self>);
}

/// The data for making and ending threads of a process.
pub(crate) struct Threads {
    live: AtomicU32,
    /// Seats that are free, or whose thread is about to end.
    free: Arc<Mutex<Vec<Seat>>>,
    made: AtomicU32,
    /// Host threads that have not finished the runtime's code yet; some of them have already ended
    /// for the guest.
    hosts: AtomicU32,
    /// The threads among them that stand still, or sleep while a vfork child runs.
    still: AtomicU32,
    /// 1 while one thread wants all other threads to stand still.
    stop: AtomicU32,
}

impl Threads {
    /// One thread.
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

    /// From now on another process runs in the same memory, which is as if there were another
    /// thread.
    pub(crate) fn share_memory(&self) {
        self.made.store(1, Ordering::Relaxed);
    }

    /// Has there ever been a second thread?
    pub(crate) fn ever(&self) -> bool {
        self.made.load(Ordering::Relaxed) != 0
    }

    /// Is there one thread?
    pub(crate) fn is_alone(&self) -> bool {
        self.live.load(Ordering::Relaxed) == 1
    }

    /// Calls `f` with the seats locked: no thread is made, and none leaves its seat.
    pub(crate) fn held<R>(&self, f: impl FnOnce() -> R) -> R {
        let _free = lock(&self.free);
        f()
    }

    /// In a forked child: there is one thread, and no thread uses the free seats.
    pub(crate) fn after_fork_child(&self) {
        self.live.store(1, Ordering::Relaxed);
        self.hosts.store(1, Ordering::Relaxed);
        self.still.store(0, Ordering::Relaxed);
        self.stop.store(0, Ordering::Relaxed);
        for seat in lock(&self.free).iter_mut() {
            seat.thread = None;
        }
    }

    /// Calls `sleep` while this thread, which holds no lock, needs none. It does not go on before
    /// it may.
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

    /// Must this thread stand still?
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst) != 0
    }

    /// Makes all other threads of the process stand still, none with a lock: it is about to leave
    /// memory that other processes use. `call` makes the threads leave guest code and system calls.
    pub(crate) fn stop_others(&self, mut call: impl FnMut()) {
        const PAUSE: std::time::Duration = std::time::Duration::from_micros(100);
        while self.stop.swap(1, Ordering::SeqCst) != 0 {
            self.stand_still(|| ());
        }
        while self.still.load(Ordering::SeqCst) + 1 < self.hosts.load(Ordering::SeqCst) {
            call();
            std::thread::sleep(PAUSE);
        }
        // Threads that have left the runtime's code still execute the C library's.
        let mut free = lock(&self.free);
        free.iter_mut().for_each(Seat::vacate);
    }

    /// The process goes on: the threads may move again.
    pub(crate) fn release_others(&self) {
        self.stop.store(0, Ordering::SeqCst);
        wake(&raw const self.stop as u64, i32::MAX as u64);
    }

    /// The calling host thread leaves the runtime's code.
    pub(crate) fn leave(&self) {
        self.hosts.fetch_sub(1, Ordering::SeqCst);
    }

    fn seat(&self) -> Option<Seat> {
        // Not under the lock: the thread that is leaving the seat may need it for nothing, but
        // takes its time.
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

/// See the module.
struct Seat {
    mapping: u64,
    context: Box<ThreadContext>,
    /// The last thread that used the seat.
    thread: Option<libc::pthread_t>,
}

/// Bytes of what [`map_stacks`] maps.
pub(super) const STACKS: usize = 2 * GUARD + STACK + signal::ALTERNATE_STACK;

/// Maps a host stack and an alternate stack above it, each with an inaccessible page below.
pub(super) fn map_stacks() -> Option<u64> {
    // SAFETY: a fresh mapping, two pages of which are made inaccessible.
    unsafe {
        let mapping = libc::mmap(
            std::ptr::null_mut(),
            STACKS,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        if mapping == libc::MAP_FAILED {
            return None;
        }
        libc::mprotect(mapping, GUARD, libc::PROT_NONE);
        libc::mprotect(mapping.byte_add(GUARD + STACK), GUARD, libc::PROT_NONE);
        Some(mapping as u64)
    }
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
        self.stack() + (STACK + GUARD) as u64
    }

    /// Waits until the host thread that used the seat has ended.
    fn vacate(&mut self) {
        if let Some(thread) = self.thread.take() {
            // SAFETY: a joinable thread that only the seat's owner joins.
            unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
        }
    }
}

/// The words about its id that a new thread writes, and its flags.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Identity {
    /// Where the thread's id is to be written before it runs; 0 for nowhere.
    pub write_to: [u64; 2],
    /// The word to clear and wake at its end; 0 for none.
    pub clear_at_end: u64,
    /// What it does not share with its maker, as flags for `unshare`.
    pub unshared: i32,
}

/// The new thread's message to its maker: its id.
#[derive(Default)]
struct Started {
    tid: Mutex<i32>,
    changed: Condvar,
}

struct Start {
    seat: Seat,
    system: System,
    body: Box<dyn ThreadBody>,
    identity: Identity,
    started: Arc<Started>,
}

/// The host thread's function.
extern "C" fn start(argument: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: the maker leaked this box for us.
    let start = unsafe { Box::from_raw(argument.cast::<Start>()) };
    let Start { mut seat, mut system, mut body, identity, started } = *start;
    // SAFETY: plain calls about this thread; the seat outlives it.
    unsafe {
        seat.thread = Some(libc::pthread_self());
        entry::set_gs_base(&*seat.context);
        signal::use_alternate_stack(seat.alternate_stack() as *mut libc::c_void);
        // The C library's own robust list is empty; the guest sets its list itself.
        entry::raw(&Call::new(libc::SYS_set_robust_list, &[0, ROBUST_HEAD as u64]));
        if identity.unshared != 0 {
            entry::raw(&Call::new(libc::SYS_unshare, &[identity.unshared as u64]));
        }
    }
    system.attach(&mut seat.context);
    let tid = own_tid();
    for place in identity.write_to.into_iter().filter(|place| *place != 0) {
        // The kernel, too, ignores a bad address here.
        let _ = guest_write(place, &tid.to_le_bytes());
    }
    *lock(&started.tid) = tid;
    started.changed.notify_one();
    drop(started);
    signal::set_kernel_mask(signal::host_mask(system.mask));
    let ending = body.run(&mut seat.context, &mut system);
    // The handler finds nothing here any more.
    signal::set_kernel_mask(!0);
    body.rest();
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
    /// All asynchronous signals are blocked, so the host thread begins with them blocked.
    pub(crate) fn make_thread(
        &self,
        context: &ThreadContext,
        body: Box<dyn ThreadBody>,
        identity: Identity,
        enter: impl FnOnce(&mut ThreadContext),
    ) -> Result<i32, i32> {
        let threads = self.process.threads();
        let mut seat = threads.seat().ok_or(libc::EAGAIN)?;
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
        // The thread does not go on before this is released.
        let mut tid = lock(&started.tid);
        if create(stack, STACK, start, start_with.cast()).is_err() {
            threads.live.fetch_sub(1, Ordering::SeqCst);
            threads.leave();
            // SAFETY: no thread took it.
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

    /// The C library has installed handlers of its own for its thread making: puts the guest's
    /// dispositions back.
    pub(super) fn take_back_library_signals(&self) {
        const LIBRARY_SIGNALS: [i32; 2] = [32, 33];
        let actions = self.process.actions();
        for signo in LIBRARY_SIGNALS {
            signal::set_kernel_action(signo, &self.mirror(signo, &actions[signo as usize]));
        }
    }

    /// The thread ends by itself; its asynchronous signals are blocked. Does what the guest can see
    /// of it. Was it the last one?
    pub(crate) fn end_thread(&mut self) -> bool {
        end_robust_list();
        // Before the word is cleared: a thread that sees it cleared may end, too, and must then
        // find itself the last one.
        let is_last = self.process.threads().live.fetch_sub(1, Ordering::SeqCst) == 1;
        // No thread waits for the last one, but other processes may.
        if !is_last || self.process.shares_memory() {
            self.clear_tid();
        }
        is_last
    }

    /// Clears and wakes the word that the guest wants cleared at the end of this thread.
    pub(crate) fn clear_tid(&mut self) {
        let word = std::mem::take(&mut self.clear_at_end);
        if word != 0 && guest_write(word, &0u32.to_le_bytes()).is_ok() {
            wake(word, 1);
        }
    }
}

/// Makes a thread by the C library that runs `function` on the `size` bytes at `stack`, which no
/// other code uses until the thread has been joined.
pub(super) fn create(
    stack: u64,
    size: usize,
    function: extern "C" fn(*mut libc::c_void) -> *mut libc::c_void,
    argument: *mut libc::c_void,
) -> Result<(), i32> {
    // SAFETY: the attributes are initialised before use; the rest is the caller's promise.
    let failed = unsafe {
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
        failed
    };
    if failed == 0 { Ok(()) } else { Err(failed) }
}

/// Ends the first thread of a process that goes on.
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

/// Marks the futexes of this thread's robust list as those of a dead owner, as the kernel does at
/// the end of a thread (`exit_robust_list`), and takes the list away from it: the guest may free
/// the list when it hears of the thread's end.
fn end_robust_list() {
    /// The kernel's limit, too.
    const MOST: usize = 2048;
    let (mut head, mut len) = (0u64, 0u64);
    let ask = [0, &raw mut head as u64, &raw mut len as u64];
    // SAFETY: writes the two variables.
    let asked = unsafe { entry::raw(&Call::new(libc::SYS_get_robust_list, &ask)) };
    if asked != 0 || head == 0 {
        return;
    }
    // SAFETY: takes the list away.
    unsafe { entry::raw(&Call::new(libc::SYS_set_robust_list, &[0, ROBUST_HEAD as u64])) };
    let word = |address: u64| guest_read::<8>(address).map(u64::from_le_bytes);
    let (Ok(first), Ok(offset), Ok(pending)) =
        (word(head), word(head.wrapping_add(8)), word(head.wrapping_add(16)))
    else {
        return;
    };
    // The lowest bit says that it is a priority-inheritance futex.
    let (at, is_inheriting) = (|entry: u64| entry & !1, |entry: u64| entry & 1 != 0);
    let tid = own_tid() as u32;
    let mut entry = first;
    for _ in 0..MOST {
        if at(entry) == head {
            break;
        }
        let next = word(at(entry));
        if at(entry) != at(pending)
            && !owner_died(at(entry).wrapping_add(offset), tid, is_inheriting(entry), false)
        {
            return;
        }
        match next {
            Ok(next) => entry = next,
            Err(_) => return,
        }
    }
    if at(pending) != 0 {
        owner_died(at(pending).wrapping_add(offset), tid, is_inheriting(pending), true);
    }
}

/// As the kernel's `handle_futex_death`; `false` if the list cannot be followed further.
fn owner_died(futex: u64, tid: u32, is_inheriting: bool, is_pending: bool) -> bool {
    if !futex.is_multiple_of(size_of::<u32>() as u64) {
        return false;
    }
    // SAFETY: the guest's own list names the word.
    let Ok(mut value) = (unsafe { memory::load::<u32>(futex) }) else { return false };
    loop {
        if is_pending && !is_inheriting && value == 0 {
            // The thread had unlocked it, but not yet woken a waiter.
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
