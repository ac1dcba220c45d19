//! The processor's register of protection-key rights, PKRU (Intel SDM vol. 3, 4.6.2).
//!
//! Whose rights it holds, and when, is described in [`crate::kernel::entry::rights`]; here are the
//! instructions. Each function concerns the calling thread only.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::LazyLock;

/// CPUID.7.0:ECX.OSPKE: the processor has keys and the kernel has enabled them.
static EXIST: LazyLock<bool> = LazyLock::new(|| __cpuid_count(7, 0).ecx & (1 << 4) != 0);

/// Are there protection keys?
pub fn exist() -> bool {
    *EXIST
}

/// Does something of the host's with the rights to all memory. It must not unwind or run guest
/// code.
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

/// The register. Only where there are protection keys.
pub fn read() -> u32 {
    let rights;
    // SAFETY: the caller knows that the instruction exists; it reads a register.
    unsafe {
        asm!("rdpkru", in("ecx") 0, out("eax") rights, out("edx") _, options(nostack, preserves_flags))
    };
    rights
}

/// Changes the register; `rights` allow key 0. Accesses to memory do not move across.
pub fn write(rights: u32) {
    // SAFETY: as in `read`. The host's memory has key 0, so nothing of the host's is denied.
    unsafe {
        asm!("wrpkru", in("eax") rights, in("ecx") 0, in("edx") 0, options(nostack, preserves_flags))
    };
}
