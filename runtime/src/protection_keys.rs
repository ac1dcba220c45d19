//! The processor's register of protection-key rights, PKRU (Intel SDM vol. 3, 4.6.2).
//!
//! This module holds the instructions that read and write the register. When the register holds the
//! guest's rights is described in [`crate::kernel::entry::rights`]. No lock: each thread has its
//! own register, and each function reads or changes that of the calling thread only.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::LazyLock;

/// CPUID.7.0:ECX.OSPKE: the processor has keys and the kernel has enabled them.
static EXIST: LazyLock<bool> = LazyLock::new(|| __cpuid_count(7, 0).ecx & (1 << 4) != 0);

/// Whether the processor has protection keys and the kernel has enabled them.
pub fn exist() -> bool {
    *EXIST
}

/// Runs `work`, which belongs to the host, with the rights to all memory; then restores the rights.
/// `work` must not unwind, because the rights would not be restored. It must not run guest code.
pub fn with_all_rights<R>(work: impl FnOnce() -> R) -> R {
    if !exist() {
        return work();
    }
    let rights = read();
    write(0);
    let result = work();
    write(rights);
    result
}

/// The value of the register. To be called only if [`exist`] returns true.
pub fn read() -> u32 {
    let rights;
    // SAFETY: the caller knows that the instruction exists; it reads a register.
    unsafe {
        asm!("rdpkru", in("ecx") 0, out("eax") rights, out("edx") _,
            options(nostack, preserves_flags))
    };
    rights
}

/// Sets the register. To be called only if [`exist`] returns true; `rights` must allow key 0. The
/// compiler moves no access to memory across the call.
pub fn write(rights: u32) {
    // SAFETY: the caller knows that the instruction exists. The host's memory has key 0, which
    // `rights` allow, so the host keeps access to its memory.
    unsafe {
        asm!("wrpkru", in("eax") rights, in("ecx") 0, in("edx") 0,
            options(nostack, preserves_flags))
    };
}
