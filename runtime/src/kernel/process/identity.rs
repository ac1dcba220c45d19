//! Makes the kernel show the guest instead of the translator: the name of the process,
//! `/proc/PID/cmdline`, `environ` and `auxv`, and the addresses in `/proc/PID/stat`.
//!
//! The kernel reads those files from memory of the process whose addresses it keeps. prctl(2)
//! `PR_SET_MM_MAP` sets these addresses; here they become those of the strings on the guest's
//! stack. A kernel without CONFIG_CHECKPOINT_RESTORE refuses, and the files go on showing the
//! translator.
//!
//! Owns no data. Called once, before the guest starts, by the only thread; no lock.
//!
//! Example: `dynasour run ./prog "two words"` shows `prog\0two words\0` in `cmdline`.

use dynasour_guest::image::{Loaded, StackLayout};
use std::io;
use std::ops::Range;

/// The kernel's `struct prctl_mm_map`.
#[repr(C)]
struct MemoryMap {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    auxv: u64,
    auxv_size: u32,
    exe_fd: u32,
}

/// Makes the kernel show the guest's name, arguments, environment and auxiliary vector, and where
/// its code and data are.
pub(crate) fn assume(loaded: &Loaded) {
    // SAFETY: PR_SET_NAME copies a NUL-terminated string.
    unsafe { libc::prctl(libc::PR_SET_NAME, loaded.comm.as_ptr()) };
    // An error is ignored: the guest runs all the same.
    let _ = point_to(&loaded.places, loaded.code.clone(), loaded.data.clone());
}

/// Tells the kernel the guest's addresses.
fn point_to(stack: &StackLayout, code: Range<u64>, data: Range<u64>) -> io::Result<()> {
    const PR_SET_MM: i32 = 35;
    const PR_SET_MM_MAP: u64 = 14;
    // The process's break is the host's. It only grows, so it may begin where it ends now.
    // SAFETY: sbrk(0) only asks.
    let brk = unsafe { libc::sbrk(0) } as u64;
    let map = MemoryMap {
        start_code: code.start,
        end_code: code.end,
        start_data: data.start,
        end_data: data.end,
        start_brk: brk,
        brk,
        start_stack: stack.stack_pointer,
        arg_start: stack.arguments.start,
        arg_end: stack.arguments.end,
        env_start: stack.environment.start,
        env_end: stack.environment.end,
        auxv: stack.auxiliary.start,
        auxv_size: u32::try_from(stack.auxiliary.end - stack.auxiliary.start)
            .map_err(io::Error::other)?,
        exe_fd: u32::MAX,
    };
    // SAFETY: the kernel only reads the structure and the vector.
    let result =
        unsafe { libc::prctl(PR_SET_MM, PR_SET_MM_MAP, &raw const map, size_of::<MemoryMap>(), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_child;

    #[test]
    fn proc_shows_the_strings_that_it_is_pointed_to() {
        let status = in_child(|| {
            let strings = *b"prog\0two words\0A=1\0";
            let auxiliary = [6u64, 4096, 0, 0];
            let at = strings.as_ptr() as u64;
            let vector = auxiliary.as_ptr() as u64;
            let stack = StackLayout {
                stack_pointer: vector,
                arguments: at..at + 15,
                environment: at + 15..at + 19,
                auxiliary: vector..vector + 32,
            };
            point_to(&stack, at..at + 8, vector..vector + 32)
                .expect("a kernel with CONFIG_CHECKPOINT_RESTORE");
            let stat = std::fs::read_to_string("/proc/self/stat").expect("stat");
            let fields: Vec<_> = stat.split(' ').collect();
            // Fields 26 and 27 of proc_pid_stat(5); the name has no blank here.
            assert_eq!(fields[25..27], [at, at + 8].map(|code| code.to_string()));
            assert_eq!(std::fs::read("/proc/self/cmdline").expect("cmdline"), b"prog\0two words\0");
            assert_eq!(std::fs::read("/proc/self/environ").expect("environ"), b"A=1\0");
            let vector = std::fs::read("/proc/self/auxv").expect("auxv");
            assert_eq!(vector[..16], [6u64, 4096].map(u64::to_le_bytes).concat()[..]);
            0
        });
        assert_eq!(status, 0);
    }
}
