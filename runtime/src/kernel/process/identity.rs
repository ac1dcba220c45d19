//! Makes the kernel show the guest instead of the translator: the name of the process, and
//! `/proc/PID/cmdline`, `environ` and `auxv`.
//!
//! The kernel reads those files from memory of the process whose addresses it keeps. prctl(2)
//! `PR_SET_MM_MAP` sets these addresses; here they become those of the strings on the guest's
//! stack. A kernel without CONFIG_CHECKPOINT_RESTORE refuses, and the files go on showing the
//! translator.
//!
//! Owns no data. Called once, before the guest starts, by the only thread; no lock.
//!
//! Example: `dynasour run ./prog "two words"` shows `prog\0two words\0` in `cmdline`.

use dynasour_guest::image::StackLayout;
use std::ffi::CStr;
use std::io;

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

/// Makes the kernel show the guest's name, arguments, environment and auxiliary vector.
pub(crate) fn assume(name: &CStr, stack: &StackLayout) {
    // SAFETY: PR_SET_NAME copies a NUL-terminated string.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    // An error is ignored: the guest runs all the same.
    let _ = std::fs::read_to_string("/proc/self/stat").and_then(|stat| point_to(&stat, stack));
}

/// Tells the kernel the guest's addresses. Those that stay are taken from `stat`, the text of
/// `/proc/self/stat`.
fn point_to(stat: &str, stack: &StackLayout) -> io::Result<()> {
    const PR_SET_MM: i32 = 35;
    const PR_SET_MM_MAP: u64 = 14;
    let map = memory_map(stat, stack).ok_or(io::ErrorKind::InvalidData)?;
    // SAFETY: the kernel only reads the structure and the vector.
    let result =
        unsafe { libc::prctl(PR_SET_MM, PR_SET_MM_MAP, &raw const map, size_of::<MemoryMap>(), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The addresses that the kernel is to use; `None` if `stat` is not understood. Fields are numbered
/// as in proc_pid_stat(5).
fn memory_map(stat: &str, stack: &StackLayout) -> Option<MemoryMap> {
    const FIRST_BEHIND_NAME: usize = 3;
    // The name may contain spaces and parentheses, so the last parenthesis ends it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - FIRST_BEHIND_NAME)?.parse::<u64>().ok();
    // SAFETY: sbrk(0) only asks.
    let brk = unsafe { libc::sbrk(0) } as u64;
    Some(MemoryMap {
        start_code: field(26)?,
        end_code: field(27)?,
        start_data: field(45)?,
        end_data: field(46)?,
        start_brk: field(47)?,
        brk,
        start_stack: stack.stack_pointer,
        arg_start: stack.arguments.start,
        arg_end: stack.arguments.end,
        env_start: stack.environment.start,
        env_end: stack.environment.end,
        auxv: stack.auxiliary.start,
        auxv_size: u32::try_from(stack.auxiliary.end - stack.auxiliary.start).ok()?,
        exe_fd: u32::MAX,
    })
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
            let stat = std::fs::read_to_string("/proc/self/stat").expect("stat");
            point_to(&stat, &stack).expect("a kernel with CONFIG_CHECKPOINT_RESTORE");
            assert_eq!(std::fs::read("/proc/self/cmdline").expect("cmdline"), b"prog\0two words\0");
            assert_eq!(std::fs::read("/proc/self/environ").expect("environ"), b"A=1\0");
            let vector = std::fs::read("/proc/self/auxv").expect("auxv");
            assert_eq!(vector[..16], [6u64, 4096].map(u64::to_le_bytes).concat()[..]);
            assert!(memory_map("no stat", &stack).is_none());
            0
        });
        assert_eq!(status, 0);
    }
}
