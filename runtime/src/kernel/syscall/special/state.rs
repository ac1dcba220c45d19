//! The XSAVE family and protection keys.

use dynasour_guest::ThreadContext;
use iced_x86::{Instruction, Mnemonic as M};

use super::{Refused, address, protection};
use crate::kernel::entry::{self, XsaveForm};
use crate::kernel::signal::{GuestFault, xstate};
use crate::protection_keys;

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
    // SAFETY: the guest computed the address; a form that the processor does not know faults like
    // any other failure.
    unsafe {
        entry::run_xsave(form, &mut context.xstate, place, components, xstate::layout().kept())
    }?;
    Ok(())
}

/// `wrpkru`
pub(super) fn wrpkru(context: &mut ThreadContext) -> Result<(), Refused> {
    if !protection_keys::exist() {
        return Err(Refused::Fault(GuestFault::undefined(context.rip)));
    }
    let [eax, ecx, edx] = [0, 1, 2].map(|register| context.gpr[register] as u32);
    if ecx != 0 || edx != 0 {
        return Err(protection(0));
    }
    protection_keys::set_rights(eax);
    Ok(())
}
