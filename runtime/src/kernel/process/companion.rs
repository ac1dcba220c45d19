//! Companions: processes that share their maker's memory and run at the same time (`CLONE_VM`
//! without `CLONE_VFORK` and without `CLONE_THREAD`).
//!
//! To the translator, whose heap, locks and code cache lie in the shared memory, a companion is one
//! more thread: it has a dispatcher and a peer (`dispatch/peers.rs`), so changes of code wait for
//! it as for any thread. To the kernel and to the guest it is a process: it has a
//! [`Process`](super::Process) of its own, with copies of what the kernel copies, and ends alone.
//!
//! A companion runs on a *seat* ([`CompanionSeat`]): a host stack, an alternate signal stack, a
//! [`ThreadContext`] and thread-local storage. The C library makes thread-local storage only for
//! threads of its own. So each new seat is first given to such a thread, the *donor*. The donor
//! ends at once by the raw system call `exit`: the C library believes that it lives on, and leaves
//! its storage alone. A companion takes that storage over by `CLONE_SETTLS`. A seat is used by one
//! companion after the other and is never unmapped.
//!
//! Data: [`CompanionSeats`], all seats of an address space, which all its processes share.
//!
//! Invariants:
//! * A seat is free if and only if [`CompanionSeat::occupied`] is 0. The kernel clears the word
//!   when the donor or the companion ends or executes another program, because the word is their
//!   `set_tid_address(2)`. So the kernel cannot clear a word for the guest as well
//!   (`CLONE_CHILD_CLEARTID`); `System::clear_tid` does that.
//! * A process leaves shared memory only while it holds no lock of the translator's. So signals
//!   that would end it are caught by the host
//!   ([`Process::shares_memory`](super::Process::shares_memory)). SIGKILL from another process is
//!   the exception.
//!
//! Called on guest threads with all signals blocked. The lock of [`CompanionSeats`] is held to
//! search and to extend the list; no lock of the caller's is held.
//!
//! Example: `clone(CLONE_VM | SIGCHLD, stack)`: `System::companion` takes a seat,
//! [`System::settle_in`] puts the child's registers and its `System` on it, [`entry::spawn`] makes
//! the process, which runs `companion_main`. When it has ended, the kernel clears `occupied`.

use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dynasour_guest::ThreadContext;

use super::thread::{Ending, GUARD, STACK, STACKS, ThreadBody, alternate_stack_in, map_stacks};
use crate::kernel::entry::{self, Call, SpawnStart};
use crate::kernel::process::{Done, System};
use crate::kernel::signal;
use crate::sync::lock;

/// Bytes to which the stack pointer is aligned with which a companion starts. The C calling
/// convention requires 16; 64 is a cache line.
const ALIGNMENT: u64 = 64;

/// The seats of an address space.
#[derive(Default)]
pub(crate) struct CompanionSeats {
    all: Mutex<Vec<Arc<CompanionSeat>>>,
}

impl CompanionSeats {
    /// A seat for a new companion, which is occupied from now on. `protect` is called with memory
    /// that the guest must not touch.
    ///
    /// All signals are blocked, because the donor has no context for a signal handler.
    pub(crate) fn take(&self, protect: impl FnOnce(Range<u64>)) -> Option<Arc<CompanionSeat>> {
        let taken = lock(&self.all).iter().find(|seat| seat.occupy()).cloned();
        match taken {
            Some(seat) => {
                seat.clear();
                Some(seat)
            }
            None => {
                let seat = Arc::new(CompanionSeat::new()?);
                protect(seat.range());
                seat.make_donor().then(|| lock(&self.all).push(seat.clone()))?;
                Some(seat)
            }
        }
    }

    /// Calls `f` while no thread can take a seat.
    pub(crate) fn while_locked<R>(&self, f: impl FnOnce() -> R) -> R {
        let _all = lock(&self.all);
        f()
    }

    /// In a forked child: frees the copies of all seats, except the one on which the only thread
    /// runs. The companions have stayed with the parent.
    pub(crate) fn after_fork_child(&self) {
        let local = 0u8;
        let here = &raw const local as u64;
        for seat in lock(&self.all).iter() {
            // The copies are not freed: a companion of the parent may have been changing them at
            // the time of the fork.
            seat.start.store(std::ptr::null_mut(), Ordering::Relaxed);
            if !seat.range().contains(&here) {
                seat.occupied.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// The memory on which a companion runs (see the module's header).
pub(crate) struct CompanionSeat {
    /// The address of what [`map_stacks`] mapped.
    mapping: u64,
    context: AtomicPtr<ThreadContext>,
    /// The FS base that names the donor's thread-local storage.
    fs_base: AtomicU64,
    /// One past the highest byte of the stack that a companion uses. Above it lie the donor's
    /// thread-local storage and the C library's frames.
    top: AtomicU64,
    /// 1 while a donor or a companion runs on the seat, or is about to. Cleared by the kernel.
    occupied: AtomicU32,
    /// The companion's [`Start`], until the companion has come back from the guest's code.
    start: AtomicPtr<Start>,
}

impl CompanionSeat {
    fn new() -> Option<CompanionSeat> {
        let mapping = map_stacks()?;
        Some(CompanionSeat {
            mapping,
            // Never freed: other threads may still read the context of a companion that has ended.
            context: AtomicPtr::new(Box::into_raw(ThreadContext::new())),
            fs_base: AtomicU64::new(0),
            top: AtomicU64::new(0),
            occupied: AtomicU32::new(1),
            start: AtomicPtr::new(std::ptr::null_mut()),
        })
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

    /// The stack on which a companion starts: its base, its size.
    pub(crate) fn base_and_size(&self) -> (u64, u64) {
        (self.stack(), self.top.load(Ordering::Relaxed) - self.stack())
    }

    /// The FS base of a companion.
    pub(crate) fn fs_base(&self) -> u64 {
        self.fs_base.load(Ordering::Relaxed)
    }

    fn occupy(&self) -> bool {
        self.occupied.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Frees the seat whose companion could not be made.
    pub(crate) fn release(&self) {
        self.clear();
        self.occupied.store(0, Ordering::SeqCst);
    }

    /// Frees the [`Start`] of a companion that is gone or was never made.
    fn clear(&self) {
        let left = self.start.swap(std::ptr::null_mut(), Ordering::SeqCst);
        if !left.is_null() {
            // SAFETY: [`System::settle_in`] leaked this box, and the companion that used it has
            // ended, has executed another program, or is the caller, which uses it no more.
            unsafe { Box::from_raw(left) }.body.park();
        }
    }

    /// Gives the seat thread-local storage. On success the donor has ended, and the seat is
    /// occupied for the caller.
    fn make_donor(&self) -> bool {
        let seat = std::ptr::from_ref(self).cast_mut().cast();
        if super::thread::create(self.stack(), STACK, donate, seat).is_err() {
            return false;
        }
        while self.occupied.load(Ordering::SeqCst) != 0 {
            let args = [&raw const self.occupied as u64, libc::FUTEX_WAIT as u64, 1, 0];
            // SAFETY: sleeps while the word is 1. No FUTEX_PRIVATE: the kernel's wake has none.
            unsafe { entry::raw(&Call::new(libc::SYS_futex, &args)) };
        }
        self.occupy()
    }
}

/// The donor's function.
extern "C" fn donate(seat: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: the maker waits, with the seat, until this thread has ended.
    let seat = unsafe { &*seat.cast::<CompanionSeat>() };
    let local = 0u8;
    // The companion may overwrite the frames below this address, since the donor never returns to
    // them. The frames above belong to the C library.
    seat.top.store(&raw const local as u64 & !(ALIGNMENT - 1), Ordering::Relaxed);
    seat.fs_base.store(entry::fs_base(), Ordering::Relaxed);
    // SAFETY: the word belongs to the seat, which is never freed.
    unsafe {
        entry::raw(&Call::new(libc::SYS_set_tid_address, &[&raw const seat.occupied as u64]))
    };
    super::exit_first(0)
}

/// The data with which a companion starts. It is leaked by [`System::settle_in`] and freed by
/// [`CompanionSeat::clear`].
#[repr(C)]
pub(crate) struct Start {
    start: SpawnStart,
    seat: Arc<CompanionSeat>,
    system: System,
    body: Box<dyn ThreadBody>,
    /// CLONE_CLEAR_SIGHAND
    clear_handlers: bool,
    /// The maker's descriptor for the report, if the companion has a copy of it to close.
    unwanted: Option<i32>,
}

impl System {
    /// Prepares `seat` for a companion that begins with this system and with the registers that
    /// `enter` writes into its context. Returns the argument of [`entry::spawn`].
    pub(crate) fn settle_in(
        mut self,
        seat: &Arc<CompanionSeat>,
        body: Box<dyn ThreadBody>,
        clear_handlers: bool,
        unwanted: Option<i32>,
        enter: impl FnOnce(&mut ThreadContext),
    ) -> *const SpawnStart {
        let context = seat.context.load(Ordering::Relaxed);
        // SAFETY: this thread has taken the seat, so no other thread changes the context.
        let prepared = unsafe { &mut *context };
        prepared.clear();
        enter(prepared);
        let start = SpawnStart { context, entry: companion_main };
        self.companion_seat = Some(seat.clone());
        let start =
            Start { start, seat: seat.clone(), system: self, body, clear_handlers, unwanted };
        let start = Box::into_raw(Box::new(start));
        seat.start.store(start, Ordering::SeqCst);
        start.cast()
    }

    /// Performs an execve. If the first thread of a companion has to clear a word of the guest's
    /// at its end, only the kernel can do that after a successful call. So the kernel gets that
    /// word instead of the seat's, and the seat stays occupied for ever.
    pub(crate) fn pass_exec(&self, call: &Call) -> Done {
        let Some(seat) = self.companion_seat.as_ref().filter(|_| self.clear_at_end != 0) else {
            return self.pass(call);
        };
        set_tid_address(self.clear_at_end);
        let done = self.pass(call);
        set_tid_address(&raw const seat.occupied as u64);
        done
    }
}

fn set_tid_address(word: u64) {
    // SAFETY: the word is either one that the guest has named for this purpose, or belongs to a
    // seat, which is never freed.
    unsafe { entry::raw(&Call::new(libc::SYS_set_tid_address, &[word])) };
}

/// A companion's first function.
///
/// # Safety
/// `start` is the first field of a [`Start`] that [`System::settle_in`] made, and all signals are
/// blocked.
unsafe extern "C" fn companion_main(start: *mut SpawnStart) -> ! {
    let start = start.cast::<Start>();
    // SAFETY: the caller's promise. The seat and its context are never freed. The `Start` is freed
    // below, or, when this process has gone, by the next thread that takes the seat.
    let (companion, context) = unsafe { (&mut *start, &mut *(*start).start.context) };
    let seat = companion.seat.clone();
    set_tid_address(&raw const seat.occupied as u64);
    // SAFETY: the stack belongs to the seat; the descriptor is this process's own copy.
    unsafe {
        signal::use_alternate_stack(seat.alternate_stack(), context);
        if let Some(fd) = companion.unwanted {
            entry::raw(&Call::new(libc::SYS_close, &[fd as u64]));
        }
    }
    let system = &mut companion.system;
    if companion.clear_handlers {
        system.clear_handlers();
    }
    system.attach(context);
    signal::set_kernel_mask(signal::host_mask(system.mask));
    let ending = companion.body.run(context, system);
    // `clear` frees the data that the signal handler reads. So no signal may come any more.
    signal::set_kernel_mask(!0);
    // If other threads of the companion go on, they need its `Process`. `leave` is the last access
    // of this thread to it, so the reference is leaked.
    let process = matches!(ending, Ending::Thread(_))
        .then(|| std::mem::ManuallyDrop::new(system.process.clone()));
    seat.clear();
    drop(seat);
    if let Some(process) = process {
        process.threads().leave();
    }
    ending.finish()
}
