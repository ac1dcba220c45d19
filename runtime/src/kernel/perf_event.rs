//! Events of the kernel that count a thread's processor time (`perf_event_open(2)`).
//!
//! An event needs a descriptor only until its memory is mapped: the mapping keeps it alive, so the
//! guest does not notice a descriptor. Where the call is forbidden (`kernel.perf_event_paranoid`,
//! seccomp) there are no events.
//!
//! Data: [`Event`], the shared memory of one event. No lock. Called by the thread that is counted.
//!
//! Example: `Event::start(&Attributes { period: 1_000_000, ..Attributes::default() }, 0)` counts
//! the milliseconds that the calling thread spends in user code.

use super::release;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of a page.
pub const PAGE: usize = 4096;

// Values of `linux/perf_event.h`.
const TYPE_SOFTWARE: u32 = 1;
const CONFIG_TASK_CLOCK: u64 = 1;
/// Bits of `perf_event_attr`: no samples in the kernel or in a hypervisor.
const EXCLUDE_KERNEL_AND_HYPERVISOR: u64 = 1 << 5 | 1 << 6;
/// The event ends when the thread executes another program, as [`SIGTRAP`] requires.
const REMOVE_ON_EXEC: u64 = 1 << 36;
/// Each period ends with a signal to the thread itself.
const SIGTRAP: u64 = 1 << 37;
/// Times are of the clock that `clock` names.
const USE_CLOCKID: u64 = 1 << 25;
const FLAG_CLOEXEC: u64 = 8;

/// In [`Attributes::records`]: each record has the time, by `CLOCK_MONOTONIC`.
pub const SAMPLE_TIME: u64 = 4;

/// What an event is for.
#[derive(Clone, Copy, Default)]
pub struct Attributes {
    /// Nanoseconds of the thread's time from one sample to the next.
    pub period: u64,
    /// What a record contains: bits of `sample_type`.
    pub records: u64,
    /// If each sample is a SIGTRAP: what its `si_perf_data` is.
    pub signal: Option<u64>,
}

/// `struct perf_event_attr` in the size of Linux 5.13, which has `sig_data`.
#[repr(C)]
#[derive(Default)]
struct KernelAttributes {
    kind: u32,
    size: u32,
    config: u64,
    period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    unused: [u64; 5],
    unused_half: u32,
    clock: i32,
    unused_behind: [u64; 3],
    signal_data: u64,
}

/// Where the next event's memory is tried: below the translator's program, where nothing else is placed.
static NEXT: AtomicUsize = AtomicUsize::new(0x5554_0000_0000);

/// A running event of one thread.
#[derive(Debug)]
pub struct Event {
    memory: *mut u8,
    size: usize,
}

// SAFETY: the memory may be read by any thread, and unmapped by any.
unsafe impl Send for Event {}

impl Event {
    /// Starts to count the calling thread's time in user code, with `pages` pages for records (0 or
    /// a power of two). None if that is not allowed.
    pub fn start(attributes: &Attributes, pages: usize) -> Option<Event> {
        if attributes.signal.is_some() && !release::event_signals_wait() {
            return None;
        }
        let signal = attributes.signal.map_or(0, |_| SIGTRAP | REMOVE_ON_EXEC);
        let clock = if attributes.records & SAMPLE_TIME == 0 { 0 } else { USE_CLOCKID };
        let attributes = KernelAttributes {
            kind: TYPE_SOFTWARE,
            size: size_of::<KernelAttributes>() as u32,
            config: CONFIG_TASK_CLOCK,
            period: attributes.period,
            sample_type: attributes.records,
            flags: EXCLUDE_KERNEL_AND_HYPERVISOR | signal | clock,
            clock: if clock == 0 { 0 } else { libc::CLOCK_MONOTONIC },
            signal_data: attributes.signal.unwrap_or(0),
            ..KernelAttributes::default()
        };
        // SAFETY: the attributes are valid for the call, which makes a descriptor.
        let fd = unsafe {
            libc::syscall(libc::SYS_perf_event_open, &raw const attributes, 0, -1, -1, FLAG_CLOEXEC)
        };
        if fd < 0 {
            return None;
        }
        let size = (1 + pages) * PAGE;
        // Without an address the kernel would take the first hole, which the guest may have made a moment ago,
        // and expects to fault.
        let at = NEXT.fetch_add(size, Ordering::Relaxed) as *mut libc::c_void;
        // SAFETY: a fresh mapping of the descriptor, which belongs to this function and is closed
        // here.
        let memory = unsafe {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let memory = libc::mmap(at, size, prot, libc::MAP_SHARED, fd as i32, 0);
            libc::close(fd as i32);
            memory
        };
        (memory != libc::MAP_FAILED).then_some(Event { memory: memory.cast(), size })
    }

    /// The memory that the kernel shares: a page of its own, then the pages of records.
    pub fn memory(&self) -> *mut u8 {
        self.memory
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and no reference into it is left.
        unsafe { libc::munmap(self.memory.cast(), self.size) };
    }
}
