//! The XSAVE family, the x87 environment, and protection keys.
//!
//! The guest's extended state is in the context. A stub loads it, executes the guest's instruction
//! form on it, and saves it again ([`entry::run_xsave`]). The x87 instruction pointer and opcode in
//! the state are made the guest's before ([`x87_pointer`]). Rights of protection keys are in the
//! context, too ([`rights`]).
//!
//! No data, no lock: see [`super`].
//!
//! Example: `fnstenv [rdi]` writes the environment by the host's `fnstenv`, then overwrites the
//! pointer at offset 12 with the guest's pc of the last x87 instruction.

use dynasour_guest::ThreadContext;
use iced_x86::{Code, Instruction, Mnemonic as M};

use super::{Refused, address, load, protection, store};
use crate::changes::{hiding, host};
use crate::kernel::entry::{self, XsaveForm, rights};
use crate::kernel::signal::GuestFault;
use crate::kernel::{x87_pointer, xstate};
use crate::memory;

/// Executes a save or a restore of extended state on the guest's state and memory.
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
    let area = address(context, inst, 0)?;
    let components = context.gpr[2] << 32 | context.gpr[0] & 0xffff_ffff;
    run(context, form, area, components)?;
    const X87: u64 = 1;
    let is_restore = matches!(
        form,
        XsaveForm::Xrstor | XsaveForm::Xrstor64 | XsaveForm::Fxrstor | XsaveForm::Fxrstor64
    );
    let is_fx = matches!(form, XsaveForm::Fxrstor | XsaveForm::Fxrstor64);
    if is_restore && (is_fx || components & X87 != 0) {
        x87_pointer::loaded(context);
    }
    Ok(())
}

/// Executes an instruction that stores, loads or clears the x87 environment, which has the x87
/// instruction pointer.
pub(super) fn x87_environment(
    context: &mut ThreadContext,
    inst: &Instruction,
) -> Result<(), Refused> {
    /// The offset of the instruction pointer in a 28-byte environment, in bytes (manual: Intel SDM
    /// vol. 1, figure 8-9).
    const POINTER_32: u64 = 12;
    /// The offset in a 14-byte environment (figure 8-12).
    const POINTER_16: u64 = 6;
    let (form, at, width) = match inst.code() {
        Code::Fnstenv_m28byte => (XsaveForm::Fnstenv, POINTER_32, 4),
        Code::Fnstenv_m14byte => (XsaveForm::Fnstenv16, POINTER_16, 2),
        Code::Fnsave_m108byte => (XsaveForm::Fnsave, POINTER_32, 4),
        Code::Fnsave_m94byte => (XsaveForm::Fnsave16, POINTER_16, 2),
        Code::Fldenv_m28byte => (XsaveForm::Fldenv, POINTER_32, 4),
        Code::Fldenv_m14byte => (XsaveForm::Fldenv16, POINTER_16, 2),
        Code::Frstor_m108byte => (XsaveForm::Frstor, POINTER_32, 4),
        Code::Frstor_m94byte => (XsaveForm::Frstor16, POINTER_16, 2),
        _ => {
            run(context, XsaveForm::Fninit, 0, 0)?;
            context.x87_pc = 0;
            return Ok(());
        }
    };
    let area = address(context, inst, 0)?;
    let pc = context.x87_pc;
    context.put_x87_data();
    run(context, form, area, 0)?;
    let pointer = area.wrapping_add(at);
    match inst.mnemonic() {
        M::Fnstenv => store(pointer, width, pc)?,
        M::Fnsave => {
            store(pointer, width, pc)?;
            context.x87_pc = 0;
        }
        _ => context.x87_pc = load(pointer, width)?,
    }
    Ok(())
}

/// Executes one instruction form on the guest's extended state, with the memory operand at `area`
/// and the components in edx:eax.
fn run(
    context: &mut ThreadContext,
    form: XsaveForm,
    area: u64,
    components: u64,
) -> Result<(), Refused> {
    x87_pointer::show(context);
    let held = xstate::layout().xcr0 & !xstate::PKRU;
    loop {
        let mut rights = rights::of(context);
        // SAFETY: the guest computed the address, so a fault there is the guest's. A form that the
        // processor does not have faults in the same way. `rights` is `Some` if the processor has
        // protection keys.
        let done = unsafe {
            entry::run_xsave(form, &mut context.xstate, area, components, held, rights.as_mut())
        };
        if let Some(rights) = rights {
            rights::set(context, rights);
        }
        match done {
            // The page was guarded because code was translated from it, and is open now: repeat.
            Err(_) if host::opened_for_host(&memory::last_fault()) => {}
            done => return Ok(done?),
        }
    }
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
    hiding::stop();
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
