//! Companions: processes that share their maker's memory and run at the same time (`CLONE_VM`
//! without `CLONE_VFORK` and without `CLONE_THREAD`).
//!
//! To the translator, whose heap, locks and code cache lie in the shared memory, a companion is one
//! more thread: it has a dispatcher and a peer, and takes part in every handshake. To the kernel
//! and to the guest it is a process: it has a [`Process`](super::Process) of its own, with copies
//! of what the kernel copies, and ends alone.
//!
//! A companion runs on a *place*: a host stack, an alternate signal stack, a [`ThreadContext`] and
//! thread-local storage. The C library makes thread-local storage only for threads of its own. So
//! each new place is given to such a thread, the *donor*, which ends at once by the raw system
//! call: for the C library it lives on, and its storage stays. A companion takes that storage over
//! by `CLONE_SETTLS`. Places are used by one companion after the other and never unmapped.
//!
//! The kernel clears [`Place::occupied`] when the donor or the companion ends in any way, and when
//! the companion executes another program (`set_tid_address(2)`). Only then the place is free. The
//! kernel knows one such word for each thread, so the word that the guest names
//! (`CLONE_CHILD_CLEARTID`) is cleared by [`System::clear_tid`](crate::kernel::process::System).
//!
//! Invariant: a process leaves shared memory only while it holds no lock of the translator's. So
//! signals that would end it are caught by the host
//! ([`Process::shares_memory`](super::Process::shares_memory)). SIGKILL from outside is the
//! exception.

use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dynasour_guest::ThreadContext;

use super::thread::{Ending, GUARD, STACK, STACKS, ThreadBody, map_stacks};
use crate::kernel::entry::{self, Call, SpawnStart};
use crate::kernel::process::{Done, System};
use crate::kernel::signal;
use crate::sync::lock;

/// The alignment of the stack pointer with which a companion starts (the C calling convention wants
/// 16).
const ALIGNMENT: u64 = 64;

/// The places of an address space.
#[derive(Default)]
pub(crate) struct Places {
    all: Mutex<Vec<Arc<Place>>>,
}

impl Places {
    /// A place for a new companion, which is occupied from now on. `protect` is told of memory that
    /// the guest must not touch.
    ///
    /// All signals are blocked: the donor has no context.
    pub(crate) fn take(&self, protect: impl FnOnce(Range<u64>)) -> Option<Arc<Place>> {
        let taken = lock(&self.all).iter().find(|place| place.occupy()).cloned();
        match taken {
            Some(place) => {
                place.clear();
                Some(place)
            }
            None => {
                let place = Arc::new(Place::new()?);
                protect(place.range());
                place.make_donor().then(|| lock(&self.all).push(place.clone()))?;
                Some(place)
            }
        }
    }

    /// Calls `f` with the list of places locked, so that no companion is made meanwhile.
    pub(crate) fn held<R>(&self, f: impl FnOnce() -> R) -> R {
        let _all = lock(&self.all);
        f()
    }

    /// In a forked child: the companions have stayed with the parent, but the only thread may run
    /// on the copy of a place.
    pub(crate) fn after_fork_child(&self) {
        let local = 0u8;
        let here = &raw const local as u64;
        for place in lock(&self.all).iter() {
            // In the parent their companions may be anywhere in the host.
            place.start.store(std::ptr::null_mut(), Ordering::Relaxed);
            if !place.range().contains(&here) {
                place.occupied.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// See the module.
pub(crate) struct Place {
    mapping: u64,
    context: AtomicPtr<ThreadContext>,
    /// The FS base that names the donor's thread-local storage.
    fs_base: AtomicU64,
    /// One past the highest byte of the stack that a companion uses: below what the donor's storage
    /// needs.
    top: AtomicU64,
    /// 1 while something runs here; cleared by the kernel.
    occupied: AtomicU32,
    /// The companion's start data, until the companion has returned from guest code.
    start: AtomicPtr<Start>,
}

impl Place {
    fn new() -> Option<Place> {
        let mapping = map_stacks()?;
        Some(Place {
            mapping,
            // Contexts are never unmapped: other threads may be about to look at them.
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
        self.stack() + (STACK + GUARD) as u64
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

    /// Nothing runs here. (Until the kernel says so when it does.)
    pub(crate) fn release(&self) {
        self.clear();
        self.occupied.store(0, Ordering::SeqCst);
    }

    /// Frees the start data of a companion that has not returned, since it executed another
    /// program.
    fn clear(&self) {
        let left = self.start.swap(std::ptr::null_mut(), Ordering::SeqCst);
        if !left.is_null() {
            // SAFETY: [`System::settle_in`] leaked this box, and the companion that used it has
            // ended.
            unsafe { Box::from_raw(left) }.body.rest();
        }
    }

    /// Gives the place thread-local storage. On return nothing runs here.
    fn make_donor(&self) -> bool {
        let place = std::ptr::from_ref(self).cast_mut().cast();
        if super::thread::create(self.stack(), STACK, donate, place).is_err() {
            return false;
        }
        while self.occupied.load(Ordering::SeqCst) != 0 {
            let args = [&raw const self.occupied as u64, libc::FUTEX_WAIT as u64, 1, 0];
            // SAFETY: sleeps while the word is 1. (The kernel's wake is not a private one either.)
            unsafe { entry::raw(&Call::new(libc::SYS_futex, &args)) };
        }
        self.occupy()
    }
}

/// The donor's function.
extern "C" fn donate(place: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: the maker waits, with the place, until this thread has ended.
    let place = unsafe { &*place.cast::<Place>() };
    let local = 0u8;
    // Frames from here on are not needed any more; those above belong to the C library.
    place.top.store(&raw const local as u64 & !(ALIGNMENT - 1), Ordering::Relaxed);
    place.fs_base.store(entry::fs_base(), Ordering::Relaxed);
    // SAFETY: the word is the place's, which stays.
    unsafe {
        entry::raw(&Call::new(libc::SYS_set_tid_address, &[&raw const place.occupied as u64]))
    };
    super::exit_first(0)
}

/// The data that a companion starts with.
#[repr(C)]
pub(crate) struct Start {
    start: SpawnStart,
    place: Arc<Place>,
    system: System,
    body: Box<dyn ThreadBody>,
    /// CLONE_CLEAR_SIGHAND
    clear_handlers: bool,
    /// A descriptor of the host's, of which the companion has a copy that it has no use for.
    unwanted: Option<i32>,
}

impl System {
    /// Prepares `place` for a companion that begins with this system and, by `enter`, with a copy
    /// of `context`. Returns what [`entry::spawn`] needs.
    pub(crate) fn settle_in(
        mut self,
        place: &Arc<Place>,
        body: Box<dyn ThreadBody>,
        clear_handlers: bool,
        unwanted: Option<i32>,
        enter: impl FnOnce(&mut ThreadContext),
    ) -> *const SpawnStart {
        let context = place.context.load(Ordering::Relaxed);
        // SAFETY: this thread has taken the place, so no other thread uses the context.
        let prepared = unsafe { &mut *context };
        prepared.clear();
        enter(prepared);
        let start = SpawnStart { context, entry: companion_main };
        self.place = Some(place.clone());
        let start =
            Start { start, place: place.clone(), system: self, body, clear_handlers, unwanted };
        let start = Box::into_raw(Box::new(start));
        place.start.store(start, Ordering::SeqCst);
        start.cast()
    }

    /// Performs an execve. If the first thread of a companion is to clear a word of the guest's at
    /// its end, only the kernel can do that when the call succeeds. (The place is then occupied for
    /// ever.)
    pub(crate) fn pass_exec(&self, call: &Call) -> Done {
        let Some(place) = self.place.as_ref().filter(|_| self.clear_at_end != 0) else {
            return self.pass(call);
        };
        set_tid_address(self.clear_at_end);
        let done = self.pass(call);
        set_tid_address(&raw const place.occupied as u64);
        done
    }
}

fn set_tid_address(word: u64) {
    // SAFETY: the word is one that the guest named, or a place's, which is never unmapped.
    unsafe { entry::raw(&Call::new(libc::SYS_set_tid_address, &[word])) };
}

/// A companion's first function.
///
/// # Safety
/// `start` is the first field of a [`Start`] that [`System::settle_in`] made, and all signals are
/// blocked.
unsafe extern "C" fn companion_main(start: *mut SpawnStart) -> ! {
    let start = start.cast::<Start>();
    // SAFETY: the caller's promise. The place and its context stay; the rest stays until it is
    // freed below, or by the next thread that takes the place, after this process has ended.
    let (companion, context) = unsafe { (&mut *start, &mut *(*start).start.context) };
    let place = companion.place.clone();
    set_tid_address(&raw const place.occupied as u64);
    // SAFETY: the stack is the place's; the descriptor is the copy that this process got.
    unsafe {
        signal::use_alternate_stack(place.alternate_stack() as *mut libc::c_void);
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
    // The handler finds nothing here any more.
    signal::set_kernel_mask(!0);
    // Other threads may still need it; the last one to end frees it.
    let process = matches!(ending, Ending::Thread(_))
        .then(|| std::mem::ManuallyDrop::new(system.process.clone()));
    place.clear();
    drop(place);
    if let Some(process) = process {
        process.threads().leave();
    }
    ending.finish()
}
