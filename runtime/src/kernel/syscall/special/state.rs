//! The XSAVE family and protection keys.

use dynasour_guest::ThreadContext;
use iced_x86::{Instruction, Mnemonic as M};

use super::{Refused, address, protection};
use crate::kernel::entry::{self, XsaveForm, rights};
use crate::kernel::signal::GuestFault;
use crate::kernel::xstate;

/// Executes a save or a restore on the guest's state and memory.
pub(super) fn xsave_family(context: &mut ThreadContext, inst: &Instruction) -> Result<(), Refused> {
    let form = match inst.mnemonic() {
        M::Xsave => XsaveForm::Xsave,
        M::Xsave64 => XsaveForm::Xsave64,
        M::Xsaveopt => XsaveForm::Xsaveopt,
        M::Xsaveopt64 => XsaveForm::Xsaveopt64,
        M::Xsavec => XsaveForm::Xsavec,
        M::Xsavec64 => XsaveForm::Xsavec64,
        M::Xrstor => XsaveForm::Xrstor,
        M::Xrstor64 => XsaveForm::Xrstor64,
        M::Fxsave => XsaveForm::Fxsave,
        M::Fxsave64 => XsaveForm::Fxsave64,
        M::Fxrstor => XsaveForm::Fxrstor,
        _ => XsaveForm::Fxrstor64,
    };
    let place = address(context, inst, 0)?;
    let components = context.gpr[2] << 32 | context.gpr[0] & 0xffff_ffff;
    let held = xstate::layout().xcr0 & !xstate::PKRU;
    let mut rights = rights::of(context);
    // SAFETY: the guest computed the address; a form that the processor does not know faults like
    // any other failure; there are rights where there are keys.
    let done = unsafe {
        entry::run_xsave(form, &mut context.xstate, place, components, held, rights.as_mut())
    };
    if let Some(rights) = rights {
        rights::set(context, rights);
    }
    Ok(done?)
}

/// `wrpkru`
pub(super) fn wrpkru(context: &mut ThreadContext) -> Result<(), Refused> {
    if rights::of(context).is_none() {
        return Err(Refused::Fault(GuestFault::undefined(context.rip)));
    }
    let [eax, ecx, edx] = [0, 1, 2].map(|register| context.gpr[register] as u32);
    if ecx != 0 || edx != 0 {
        return Err(protection(0));
    }
    rights::set(context, eax);
    Ok(())
}

/// `rdpkru`
pub(super) fn rdpkru(context: &mut ThreadContext) -> Result<(), Refused> {
    let Some(rights) = rights::of(context) else {
        return Err(Refused::Fault(GuestFault::undefined(context.rip)));
    };
    if context.gpr[1] as u32 != 0 {
        return Err(protection(0));
    }
    context.gpr[0] = u64::from(rights);
    context.gpr[2] = 0;
    Ok(())
}
