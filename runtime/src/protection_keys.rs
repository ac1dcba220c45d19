//! Protection keys: whose rights are in the thread's PKRU register, and when.
//!
//! PKRU holds, for each of 16 keys, whether this thread may access and write pages with that key
//! (Intel SDM vol. 3, 4.6.2; `pkeys(7)`). It applies to data accesses in user mode, those of
//! system calls included, and not to instruction fetches.
//!
//! **Invariant.** PKRU holds the guest's rights at all times, except
//! * in a host signal handler: the kernel starts it with the default rights and restores PKRU when
//!   it returns;
//! * inside [`with_all_rights`].
//!
//! So guest code, the interpreter's accesses for the guest and system calls of the guest are
//! checked as natively, and `rdpkru` and `pkey_alloc`, which read and write the register, need
//! nothing. The host's memory has key 0. A guest that takes away its own right to key 0, which also
//! its stack has, takes it from dynasour, too (docs/limits.md).
//!
//! PKRU is the one component of the extended state that is never kept in `ThreadContext::xstate`:
//! native code is entered and left without it, signal frames read and write the register.
//!
//! What needs [`with_all_rights`] is reading guest code: a page that may only be executed has a key
//! of the kernel's to which the thread has no rights.
//!
//! No data but the answer of CPUID; every function concerns the calling thread only.
//!
//! Example: the guest executes `wrpkru` with 0x55555558, which denies access to key 1. The runtime
//! executes it. A trace then loads from a page with key 1: the load faults, and the guest's handler
//! sees SEGV_PKUERR and key 1; it runs with the default rights, and its return restores 0x55555558
//! from the frame.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::LazyLock;

/// The rights that the kernel gives to new programs and to signal handlers: all to key 0, none to
/// the others (`init_pkru` in `arch/x86/mm/pkeys.c`; an administrator may choose others, so what
/// this process was started with counts).
static DEFAULT: LazyLock<u32> = LazyLock::new(rights);

/// CPUID.7.0:ECX.OSPKE: the processor has keys and the kernel has enabled them.
static EXIST: LazyLock<bool> = LazyLock::new(|| __cpuid_count(7, 0).ecx & (1 << 4) != 0);

/// Are there protection keys?
pub fn exist() -> bool {
    *EXIST
}

/// Remembers the rights that the kernel gives to new programs: before any guest code runs.
pub fn note_default() {
    if exist() {
        LazyLock::force(&DEFAULT);
    }
}

/// The calling thread's rights; all if there are no keys.
pub fn rights() -> u32 {
    if !exist() {
        return 0;
    }
    let pkru;
    // SAFETY: the instruction exists; it reads a register.
    unsafe {
        asm!("rdpkru", in("ecx") 0, out("eax") pkru, out("edx") _,
            options(nomem, nostack, preserves_flags));
    };
    pkru
}

/// Sets the calling thread's rights, if there are keys.
pub fn set_rights(pkru: u32) {
    if exist() {
        // SAFETY: the instruction exists. What the rights deny is the guest's affair; see the
        // module. It orders memory accesses, so the compiler may not move any across it.
        unsafe {
            asm!("wrpkru", in("ecx") 0, in("edx") 0, in("eax") pkru,
                options(nostack, preserves_flags));
        }
    }
}

/// Sets the rights that a new program and a signal handler start with.
pub fn set_default_rights() {
    if exist() {
        set_rights(*DEFAULT);
    }
}

/// Calls `f` with the right to read and write all pages whatever their key. `f` may fault where
/// that is fixed up.
pub fn with_all_rights<T>(f: impl FnOnce() -> T) -> T {
    let before = rights();
    if before == 0 {
        return f();
    }
    set_rights(0);
    let result = f();
    set_rights(before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_as_before_afterwards() {
        let before = rights();
        assert_eq!(with_all_rights(rights), 0);
        assert_eq!(rights(), before);
    }
}
