//! Samples of where a thread's processor time goes, from the kernel's own clock events
//! (`perf_event_open(2)`).
//!
//! The kernel writes the program counter of user code every few milliseconds of a thread's
//! processor time into memory that it shares with us: no signal, no thread, and no descriptor
//! either, once the memory is mapped. When the memory is full, the kernel stops. Where this is
//! forbidden (`kernel.perf_event_paranoid`, seccomp) there are no samples.

use std::sync::atomic::{AtomicU64, Ordering};

/// Nanoseconds of processor time from one sample to the next.
const PERIOD: u64 = 2_000_000;
/// Pages of samples, a power of two.
const PAGES: usize = 64;
const PAGE: usize = 4096;

const TYPE_SOFTWARE: u32 = 1;
const CONFIG_TASK_CLOCK: u64 = 1;
const SAMPLE_IP: u64 = 1;
/// Bits of `perf_event_attr`: the kernel's own time and a hypervisor's are left out.
const EXCLUDE_KERNEL_AND_HYPERVISOR: u64 = 1 << 5 | 1 << 6;
const FLAG_CLOEXEC: u64 = 8;
const RECORD_SAMPLE: u32 = 9;
/// Offset of `data_head` in the first page.
const DATA_HEAD: usize = 1024;

/// The beginning of `struct perf_event_attr`, in its first published size.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    more: u64,
}

/// The samples of one thread.
pub struct Samples {
    memory: *mut u8,
}

// SAFETY: the memory is only read, and what the kernel has published there does not change any
// more.
unsafe impl Send for Samples {}

impl Samples {
    /// Starts to sample this thread, if that is allowed.
    pub fn start() -> Option<Samples> {
        let attributes = Attributes {
            kind: TYPE_SOFTWARE,
            size: size_of::<Attributes>() as u32,
            config: CONFIG_TASK_CLOCK,
            period: PERIOD,
            sample_type: SAMPLE_IP,
            flags: EXCLUDE_KERNEL_AND_HYPERVISOR,
            ..Attributes::default()
        };
        // SAFETY: makes a descriptor for this thread on any processor.
        let fd = unsafe {
            libc::syscall(libc::SYS_perf_event_open, &raw const attributes, 0, -1, -1, FLAG_CLOEXEC)
        };
        if fd < 0 {
            return None;
        }
        // SAFETY: a fresh mapping of the descriptor, which is ours to close; the mapping keeps what
        // it stands for.
        let memory = unsafe {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let memory = libc::mmap(
                std::ptr::null_mut(),
                (1 + PAGES) * PAGE,
                prot,
                libc::MAP_SHARED,
                fd as i32,
                0,
            );
            libc::close(fd as i32);
            memory
        };
        (memory != libc::MAP_FAILED).then_some(Samples { memory: memory.cast() })
    }

    /// Calls `f` with the program counter of each sample so far.
    pub fn for_each(&self, mut f: impl FnMut(u64)) {
        const WORDS: usize = PAGES * PAGE / 8;
        // SAFETY: within the mapping and aligned; the kernel writes it atomically, before what it
        // publishes.
        let head = unsafe { AtomicU64::from_ptr(self.memory.add(DATA_HEAD).cast()) }
            .load(Ordering::Acquire);
        let word = |n: usize| {
            // SAFETY: within the mapping and aligned, and published.
            unsafe { self.memory.add(PAGE + 8 * (n % WORDS)).cast::<u64>().read() }
        };
        // Nothing was ever taken out, so nothing was overwritten. Records are whole words: a header
        // and what was asked for.
        let (mut n, end) = (0, (head / 8) as usize);
        while n < end.min(WORDS) {
            let header = word(n);
            let words = (header >> 48) as usize / 8;
            if header as u32 == RECORD_SAMPLE && n + 1 < end {
                f(word(n + 1));
            }
            n += words.max(1);
        }
    }
}

impl Drop for Samples {
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { libc::munmap(self.memory.cast(), (1 + PAGES) * PAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn processor_time() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes a time.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[inline(never)]
    fn busy(time: Duration) {
        let start = processor_time();
        let mut n = 0u64;
        while processor_time() - start < time {
            for _ in 0..10_000 {
                n = std::hint::black_box(n.wrapping_mul(31) + 1);
            }
        }
    }

    #[test]
    fn a_busy_thread_is_sampled() {
        let Some(samples) = Samples::start() else { return };
        busy(Duration::from_millis(100));
        let mut all = Vec::new();
        samples.for_each(|pc| all.push(pc));
        // The kernel may be late, but is not early.
        assert!((5..=60).contains(&all.len()), "{}", all.len());
        assert!(all.iter().all(|pc| *pc != 0 && *pc < 1 << 47));
    }
}
