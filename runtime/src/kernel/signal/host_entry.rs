//! The code that the kernel calls for each signal with a host handler, and the host's restorer.
//!
//! A signal may interrupt guest code, which has the guest's FS base and flags. Rust code needs the
//! host's. So `dynasour_signal_entry` sets the host's FS base and clears AC and TF, calls
//! [`on_signal`](super::on_signal) with the thread's context, and restores the interrupted FS base.
//! The kernel's frame restores the flags.
//!
//! Owns no data, takes no lock. Invariant: whenever a signal with a host handler can arrive, the GS
//! base points to the thread's `ThreadContext`, except while guest code runs in place, which may
//! change it. The entry then finds the context through the lowest word of the alternate stack,
//! stores the guest's GS base to the context, and restores the host's.
//!
//! Example: SIGALRM interrupts a trace. The kernel switches to the host's alternate stack and calls
//! `dynasour_signal_entry`; its `ret` leads to `dynasour_restorer`, which calls `rt_sigreturn`.

use std::arch::global_asm;

use dynasour_guest::context::offset;

global_asm!(
    r#"
    .pushsection .text.dynasour_signal_entry, "ax", @progbits
    .p2align 4
    .hidden dynasour_signal_entry
    .globl dynasour_signal_entry
dynasour_signal_entry:
    push rbx
    pushfq
    and qword ptr [rsp], ~0x40100
    popfq
    mov rcx, rsp
    and rcx, -{stack}
    mov rcx, [rcx]
    cmp byte ptr [rcx + {selector}], 0
    je 2f
    rdgsbase rax
    cmp rax, rcx
    je 2f
    mov [rcx + {gs_base}], rax
    wrgsbase rcx
2:  rdfsbase rbx
    mov rcx, gs:[{host_fs_base}]
    wrfsbase rcx
    mov rcx, gs:[{this}]
    call {on_signal}
    wrfsbase rbx
    pop rbx
    ret

    .p2align 4
    .hidden dynasour_restorer
    .globl dynasour_restorer
dynasour_restorer:
    mov eax, {rt_sigreturn}
    syscall
    ud2
    .popsection
    "#,
    host_fs_base = const offset::HOST_FS_BASE,
    this = const offset::THIS,
    selector = const offset::DISPATCH_SELECTOR,
    gs_base = const offset::GS_BASE,
    stack = const super::ALTERNATE_STACK,
    on_signal = sym super::on_signal,
    rt_sigreturn = const libc::SYS_rt_sigreturn,
);

unsafe extern "C" {
    fn dynasour_signal_entry();
    fn dynasour_restorer();
}

/// The address the kernel calls for each signal with a host handler.
pub fn signal_entry() -> u64 {
    dynasour_signal_entry as *const () as u64
}

/// The address of the host's signal restorer.
pub fn restorer() -> u64 {
    dynasour_restorer as *const () as u64
}
