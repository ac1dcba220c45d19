//! The guest's protection-key rights (PKRU; Intel SDM vol. 3, 4.6.2).
//!
//! **Where they are.** While a guest thread runs, the processor's register holds the guest's
//! rights, in guest code and in the host's: interpreted accesses and system calls are checked with
//! them without any work of ours, `clone` and `fork` inherit them, and what the kernel changes
//! (`pkey_alloc`, `mprotect` to execute only) needs no copying. Nothing switches the register when
//! native code is entered.
//!
//! **Key 0** is the exception. The host's own memory has key 0, so the register never denies it.
//! What the guest has denied itself of key 0 is in [`ThreadContext::withheld_rights`]; it is shown
//! wherever the guest reads its rights, and denies nothing (docs/limits.md).
//!
//! **Invariants.** (1) Outside [`with_all_rights`](crate::protection_keys::with_all_rights), signal
//! handlers, and the one instruction that [`super::run_xsave`] runs for the guest, the register is
//! the guest's rights without key 0's bits. (2) The PKRU component of `ThreadContext::xstate` means
//! nothing, except between [`to_state`] and a read of it, and between a write and [`from_state`].
//! Code that saves or loads extended state leaves that component out.
//!
//! **Signal handlers** of the host begin with the kernel's initial rights, which allow key 0, and
//! touch the host's memory only. The kernel puts the interrupted rights back.
//!
//! **Who calls.** Only the thread of the context, without any lock. Where there are no keys every
//! function returns at once.
//!
//! *Example.* `wrpkru` with eax = 0x55555555 loads 0x55555554 and withholds 1. A later `rdpkru`
//! shows 0x55555555. A signal frame holds 0x55555555; the handler starts with 0x55555554, nothing
//! withheld.

use dynasour_guest::ThreadContext;

use crate::kernel::xstate;
use crate::protection_keys::{exist, read, write};

/// The two bits of key 0.
const KEY_0: u32 = 3;

/// The guest's rights. `None`: there are no protection keys here.
pub fn of(context: &ThreadContext) -> Option<u32> {
    exist().then(|| read() | context.withheld_rights)
}

/// Gives the guest these rights, where there are protection keys.
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
            // No keys here: nothing may be executed that the processor does not know.
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
