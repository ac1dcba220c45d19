//! Calls that set registers or switches of the whole process: `arch_prctl`, `prctl` and
//! `membarrier`.
//!
//! No data, no lock: the functions run on the guest's thread and change its context only.
//!
//! Example: `arch_prctl(ARCH_SET_FS, a)` writes `a` to the context's `fs_base`; the host's FS base
//! stays as it is.

use dynasour_guest::ThreadContext;
use dynasour_guest::space::USER_END;

use crate::kernel::entry::Call;
use crate::kernel::process::Done;
use crate::kernel::process::guest_access::guest_write;
use crate::kernel::process::system::Segments;

/// Codes of `arch_prctl` (`asm/prctl.h`).
mod arch {
    pub const SET_GS: u64 = 0x1001;
    pub const SET_FS: u64 = 0x1002;
    pub const GET_FS: u64 = 0x1003;
    pub const GET_GS: u64 = 0x1004;
    pub const SET_CPUID: u64 = 0x1012;
    pub const REQ_XCOMP_PERM: u64 = 0x1023;
    pub const ENABLE_TAGGED_ADDR: u64 = 0x4002;
    pub const SHSTK_ENABLE: u64 = 0x5001;
    pub const SHSTK_DISABLE: u64 = 0x5002;
    pub const SHSTK_LOCK: u64 = 0x5003;
    pub const SHSTK_UNLOCK: u64 = 0x5004;
}

/// `arch_prctl`. The segment bases are those in the context. For a feature that the translator does
/// not support, the answer is that of a processor without the feature. `None`: the kernel is to
/// answer.
pub(super) fn arch_prctl(
    context: &mut ThreadContext,
    segments: &mut Segments,
    call: &Call,
) -> Option<Done> {
    let [code, address, ..] = call.args;
    let set = |base: &mut u64, selector: &mut u16| {
        if address >= USER_END {
            return Done::error(libc::EPERM);
        }
        (*base, *selector) = (address, 0);
        Done::Value(0)
    };
    let get = |base: u64| {
        guest_write(address, &base.to_le_bytes()).map_or_else(Done::error, |()| Done::Value(0))
    };
    Some(match code {
        arch::SET_FS => set(&mut context.fs_base, &mut segments.fs),
        arch::SET_GS => set(&mut context.gs_base, &mut segments.gs),
        arch::GET_FS => get(context.fs_base),
        arch::GET_GS => get(context.gs_base),
        // Faults of `cpuid` would hit the translator's own `cpuid`, too. A request to allow
        // `cpuid` (a nonzero address) goes to the kernel.
        arch::SET_CPUID if address == 0 => Done::error(libc::ENODEV),
        arch::ENABLE_TAGGED_ADDR => Done::error(libc::ENODEV),
        arch::REQ_XCOMP_PERM
        | arch::SHSTK_ENABLE
        | arch::SHSTK_DISABLE
        | arch::SHSTK_LOCK
        | arch::SHSTK_UNLOCK => Done::error(libc::EOPNOTSUPP),
        _ => return None,
    })
}

/// `prctl`. For a switch that would change the host, the answer is that of a kernel built without
/// the switch. `clear_at_end` is the address of the word that the guest wants cleared at the end
/// of the thread; the kernel has the address of the host's C library instead. `None`: the kernel
/// is to answer.
pub(super) fn prctl(call: &Call, clear_at_end: u64) -> Option<Done> {
    const PR_GET_TID_ADDRESS: i32 = 40;
    const PR_SET_MDWE: i32 = 65;
    match call.args[0] as i32 {
        libc::PR_SET_TSC | libc::PR_SET_MM | PR_SET_MDWE => Some(Done::error(libc::EINVAL)),
        PR_GET_TID_ADDRESS => {
            let written = guest_write(call.args[1], &clear_at_end.to_le_bytes());
            Some(written.map_or_else(Done::error, |()| Done::Value(0)))
        }
        _ => None,
    }
}

/// `membarrier`, as a kernel without restartable sequences answers it (membarrier(2)), because the
/// guest has no `rseq`. `pass` asks the kernel.
pub(super) fn membarrier(call: &Call, pass: impl FnOnce() -> Done) -> Done {
    const QUERY: i32 = 0;
    const RSEQ: i32 = 1 << 7 | 1 << 8;
    match call.args[0] as i32 {
        command if command & RSEQ != 0 => Done::error(libc::EINVAL),
        QUERY => match pass() {
            Done::Value(commands) if commands > 0 => Done::Value(commands & !i64::from(RSEQ)),
            other => other,
        },
        _ => pass(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_barrier_for_restartable_sequences() {
        let answer = |command: u64| {
            membarrier(&Call::new(libc::SYS_membarrier, &[command]), || Done::Value(0x3ff))
        };
        assert_eq!((answer(0), answer(8)), (Done::Value(0x27f), Done::Value(0x3ff)));
        assert_eq!(
            (answer(1 << 7), answer(1 << 8)),
            (Done::error(libc::EINVAL), Done::error(libc::EINVAL))
        );
        let refused =
            membarrier(&Call::new(libc::SYS_membarrier, &[0]), || Done::error(libc::ENOSYS));
        assert_eq!(refused, Done::error(libc::ENOSYS));
    }

    #[test]
    fn bases_are_the_contexts() {
        let mut context = ThreadContext::new();
        let mut out = 0u64;
        let out_address = &raw mut out as u64;
        let mut segments = Segments { fs: 0x2b, gs: 0x2b, ..Segments::default() };
        let mut call = |code, address| {
            let call = Call::new(libc::SYS_arch_prctl, &[code, address]);
            arch_prctl(&mut context, &mut segments, &call)
        };
        assert_eq!(call(arch::SET_FS, 0x1234), Some(Done::Value(0)));
        assert_eq!(call(arch::SET_GS, 1 << 63), Some(Done::error(libc::EPERM)));
        assert_eq!(call(arch::GET_FS, out_address), Some(Done::Value(0)));
        assert_eq!(call(0x1011, 0), None);
        assert_eq!((out, context.fs_base, context.gs_base), (0x1234, 0x1234, 0));
        assert_eq!((segments.fs, segments.gs), (0, 0x2b), "what is set has no selector");
    }

    #[test]
    fn harmless_switches_pass() {
        let set = |option: i32| prctl(&Call::new(libc::SYS_prctl, &[option as u64]), 0);
        assert_eq!(set(libc::PR_SET_NAME), None);
        assert_eq!(set(libc::PR_SET_TSC), Some(Done::error(libc::EINVAL)));
    }
}
