//! Executes the instructions of the XSAVE family and of the x87 environment for the guest, on the
//! guest's state and the guest's memory.
//!
//! The routine loads the guest's extended state, executes the same instruction on the guest's
//! address, stores the state back if the instruction has changed it, and loads the host's initial
//! state. The instruction is in a fix-up table, so [`run`] returns an error if it faults. Then the
//! guest's state has not changed, except for memory that the processor wrote before the fault. The
//! guest may repeat the instruction.
//!
//! Owns no data, takes no lock. [`run`] is called by the guest's own thread outside native code,
//! [`fixup`] by the signal handler.
//!
//! Invariant: protection-key rights are not among the state that is loaded and stored, because the
//! register PKRU holds the guest's anyway ([`super::rights`]). Only for the one instruction the
//! register also denies the rights of key 0 that the guest has denied itself. Then no memory of the
//! host's can be accessed, not even its stack.
//!
//! Example: `xsave [rdi]` with rdi = 0x1000, which is not mapped: the instruction at
//! `dynasour_do_xsave` faults, the handler continues at `dynasour_xsave_faulted`, and [`run`]
//! returns an error from which the runtime raises the guest's SIGSEGV.

use std::arch::global_asm;

use dynasour_guest::context::XState;

use crate::memory::Fault;

/// One instruction of the family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XsaveForm {
    /// `xsave`
    Xsave,
    /// `xsave64`
    Xsave64,
    /// `xsaveopt`
    Xsaveopt,
    /// `xsaveopt64`
    Xsaveopt64,
    /// `xsavec`
    Xsavec,
    /// `xsavec64`
    Xsavec64,
    /// `xrstor`
    Xrstor,
    /// `xrstor64`
    Xrstor64,
    /// `fxsave`
    Fxsave,
    /// `fxsave64`
    Fxsave64,
    /// `fxrstor`
    Fxrstor,
    /// `fxrstor64`
    Fxrstor64,
    /// `fnstenv` of 28 bytes
    Fnstenv,
    /// `fnstenv` of 14 bytes
    Fnstenv16,
    /// `fnsave` of 108 bytes
    Fnsave,
    /// `fnsave` of 94 bytes
    Fnsave16,
    /// `fldenv` of 28 bytes
    Fldenv,
    /// `fldenv` of 14 bytes
    Fldenv16,
    /// `frstor` of 108 bytes
    Frstor,
    /// `frstor` of 94 bytes
    Frstor16,
    /// `fninit`
    Fninit,
}

// rdi = guest's extended state, rsi = guest address, edx:ecx = requested components, r8 = mask of
// all, r9 = number of the form. On the stack: the address of the guest's protection-key rights, 0
// if there are none. The host's callee-saved state is general registers plus MXCSR and the x87
// control word; the routine leaves MXCSR and the control word as a new process has them. r10 =
// result of the instruction: 0, it stored; 1, it faulted; 2, it may have changed the state.
global_asm!(
    r#"
    .text
    .p2align 4
    .hidden dynasour_xsave
    .globl dynasour_xsave
dynasour_xsave:
    push rbx
    push rbp
    push r12
    mov r12, [rsp + 32]
    mov ebp, edx
    mov ebx, ecx
    mov eax, r8d
    mov rdx, r8
    shr rdx, 32
    xrstor64 [rdi]
    lea r11, [rip + 9f]
    movsxd r10, dword ptr [r11 + r9*4]
    add r11, r10
    test r12, r12
    jz 3f
    mov eax, [r12]
    xor ecx, ecx
    xor edx, edx
    wrpkru
3:  mov eax, ebx
    mov edx, ebp
    jmp r11
    .irp form, xsave, xsave64, xsaveopt, xsaveopt64, xsavec, xsavec64, fxsave, fxsave64
    .hidden dynasour_do_\form
    .globl dynasour_do_\form
dynasour_do_\form:
    \form [rsi]
    jmp 7f
    .endr
    .irp form, xrstor, xrstor64, fxrstor, fxrstor64, fnstenv, fnsave, fldenv, frstor
    .hidden dynasour_do_\form
    .globl dynasour_do_\form
dynasour_do_\form:
    \form [rsi]
    jmp 6f
    .endr
    .irp form, fnstenv, fnsave, fldenv, frstor
    .hidden dynasour_do_\form\()16
    .globl dynasour_do_\form\()16
dynasour_do_\form\()16:
    .byte 0x66
    \form [rsi]
    jmp 6f
    .endr
    .hidden dynasour_do_fninit
    .globl dynasour_do_fninit
dynasour_do_fninit:
    fninit
6:  mov r10d, 2
    jmp 8f
7:  xor r10d, r10d
    jmp 8f
    .hidden dynasour_xsave_faulted
    .globl dynasour_xsave_faulted
dynasour_xsave_faulted:
    mov r10d, 1
8:  test r12, r12
    jz 4f
    xor ecx, ecx
    rdpkru
    mov r11d, eax
    and eax, ~3
    wrpkru
    mov [r12], r11d
4:  mov eax, r8d
    mov rdx, r8
    shr rdx, 32
    cmp r10d, 2
    jne 5f
    xsave64 [rdi]
    // Loads the host's state, in which every component is initial.
5:  xrstor64 [rip + dynasour_initial_xstate]
    xor eax, eax
    cmp r10d, 1
    sete al
    pop r12
    pop rbp
    pop rbx
    ret
    .p2align 2
9:
    .irp form, xsave, xsave64, xsaveopt, xsaveopt64, xsavec, xsavec64, xrstor, xrstor64
    .long dynasour_do_\form - 9b
    .endr
    .irp form, fxsave, fxsave64, fxrstor, fxrstor64
    .long dynasour_do_\form - 9b
    .endr
    .irp form, fnstenv, fnstenv16, fnsave, fnsave16, fldenv, fldenv16, frstor, frstor16, fninit
    .long dynasour_do_\form - 9b
    .endr

    .section .rodata
    .p2align 6
dynasour_initial_xstate:
    .word 0x37f
    .zero 22
    .long 0x1f80
    .zero 4
    .zero 480
    .zero 64
    .text
    "#
);

unsafe extern "C" {
    fn dynasour_xsave(
        state: *mut XState,
        address: u64,
        high: u32,
        low: u32,
        all: u64,
        form: u64,
        rights: *mut u32,
    ) -> u32;
    fn dynasour_xsave_faulted();
}

macro_rules! instructions {
    ($($name:ident)*) => {
        unsafe extern "C" { $(fn $name();)* }
        /// The addresses of the instructions.
        fn instructions() -> [u64; 21] {
            [$($name as *const () as u64),*]
        }
    };
}

instructions!(
    dynasour_do_xsave dynasour_do_xsave64 dynasour_do_xsaveopt dynasour_do_xsaveopt64
    dynasour_do_xsavec dynasour_do_xsavec64 dynasour_do_xrstor dynasour_do_xrstor64
    dynasour_do_fxsave dynasour_do_fxsave64 dynasour_do_fxrstor dynasour_do_fxrstor64
    dynasour_do_fnstenv dynasour_do_fnstenv16 dynasour_do_fnsave dynasour_do_fnsave16
    dynasour_do_fldenv dynasour_do_fldenv16 dynasour_do_frstor dynasour_do_frstor16
    dynasour_do_fninit);

/// The address at which to continue after a fault at `host_rip`, if that is one of this module's
/// instructions. May be called in a signal handler.
pub fn fixup(host_rip: u64) -> Option<u64> {
    instructions().contains(&host_rip).then_some(dynasour_xsave_faulted as *const () as u64)
}

/// Executes one instruction of the family. `components` is the guest's edx:eax. `all` is the set of
/// components that `state` holds: XCR0 without protection keys. `rights` are the guest's
/// protection-key rights, which the instruction may change; `None` if there are no protection keys.
///
/// # Errors
/// The instruction faulted; `memory::last_fault` has the cause.
///
/// # Safety
/// `address` must be one that the guest computed: the instruction may write there. The processor
/// must know the form. `rights` must be `None` if the processor has no protection keys.
pub unsafe fn run(
    form: XsaveForm,
    state: &mut XState,
    address: u64,
    components: u64,
    all: u64,
    rights: Option<&mut u32>,
) -> Result<(), Fault> {
    let (high, low) = ((components >> 32) as u32, components as u32);
    let rights = rights.map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // SAFETY: the state is an XSAVE area, and a fault at the guest's address is in the fix-up
    // table. The routine leaves the extended state as the calling convention requires; the vector
    // registers are caller-saved.
    match unsafe { dynasour_xsave(state, address, high, low, all, form as u64, rights) } {
        0 => Ok(()),
        _ => Err(Fault),
    }
}
