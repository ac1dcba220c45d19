//! The guest's protection-key rights (PKRU; Intel SDM vol. 3, 4.6.2).
//!
//! **Data.** While a guest thread runs, the processor's register PKRU holds the guest's rights, in
//! guest code and in the host's. So the processor checks interpreted accesses and system calls with
//! them, `clone` and `fork` inherit them, and changes by the kernel (`pkey_alloc`, `mprotect` to
//! execute only) need no copying. Entering native code does not switch the register.
//!
//! **Key 0** is the exception. The host's own memory has key 0, so the register never denies it.
//! The rights of key 0 that the guest has denied itself are in
//! [`ThreadContext::withheld_rights`]. The guest sees them when it reads its rights, but they deny
//! nothing (docs/limits.md).
//!
//! **Invariants.**
//! 1. The register holds the guest's rights without the bits of key 0. Exceptions:
//!    [`with_all_rights`](crate::protection_keys::with_all_rights), signal handlers, and the one
//!    instruction that [`super::run_xsave`] runs for the guest.
//! 2. The PKRU component of `ThreadContext::xstate` is valid only between [`to_state`] and a read
//!    of it, and between a write of it and [`from_state`]. Code that saves or loads extended state
//!    leaves that component out.
//!
//! **Signal handlers** of the host begin with the kernel's initial rights, which allow key 0, and
//! access only the host's memory. The kernel restores the interrupted rights when they return.
//!
//! **Callers.** Only the thread of the context, without a lock. On processors without protection
//! keys every function returns at once.
//!
//! *Example.* `wrpkru` with eax = 0x55555555 loads 0x55555554 and withholds 1. A later `rdpkru`
//! shows 0x55555555. A signal frame contains 0x55555555; the handler starts with 0x55555554 and
//! withholds nothing.

use dynasour_guest::ThreadContext;

use crate::kernel::xstate;
use crate::protection_keys::{exist, read, write};

/// The two bits of key 0: access and write disabled.
const KEY_0: u32 = 3;

/// The guest's rights. `None` if the processor has no protection keys.
pub fn of(context: &ThreadContext) -> Option<u32> {
    exist().then(|| read() | context.withheld_rights)
}

/// Gives the guest these rights. Does nothing if the processor has no protection keys.
pub fn set(context: &mut ThreadContext, rights: u32) {
    if exist() {
        context.withheld_rights = rights & KEY_0;
        write(rights & !KEY_0);
    }
}

/// Puts the guest's rights into its extended state.
pub fn to_state(context: &mut ThreadContext) {
    if let (Some(offset), Some(rights)) = (xstate::layout().pkru_offset(), of(context)) {
        xstate::set_pkru(&mut context.xstate, offset, rights);
    }
}

/// Gives the guest the rights that its extended state has.
pub fn from_state(context: &mut ThreadContext) {
    if let Some(rights) = xstate::pkru(&context.xstate) {
        set(context, rights);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protection_keys::with_all_rights;

    #[test]
    fn what_is_set_is_shown_and_key_0_stays_accessible() {
        let mut context = ThreadContext::new();
        let Some(before) = of(&context) else {
            // No keys here: none of these calls may execute an instruction of protection keys.
            set(&mut context, 0x5555_5555);
            to_state(&mut context);
            assert_eq!((context.withheld_rights, xstate::pkru(&context.xstate)), (0, None));
            assert_eq!(with_all_rights(|| 7), 7);
            return;
        };
        for own in 0..4 {
            set(&mut context, 0x5555_5550 | own);
            assert_eq!((read(), of(&context)), (0x5555_5550, Some(0x5555_5550 | own)));
            assert_eq!(with_all_rights(read), 0);
            to_state(&mut context);
            set(&mut context, 0);
            from_state(&mut context);
            assert_eq!((read(), of(&context)), (0x5555_5550, Some(0x5555_5550 | own)));
        }
        set(&mut context, before);
    }
}
