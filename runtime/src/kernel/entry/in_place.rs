//! Guest code that runs *in place*: natively, where it stands in the guest's own mappings
//! (docs/design.md, "Tiers"; the kernel's `Documentation/admin-guide/syscall-user-dispatch.rst`).
//!
//! ```text
//!   host ──run──► enter ──► guest code ──► signal ──► handler ──► left ──► host
//!  (allows)          (blocks calls)        SIGSYS: a call         (allows)
//!                                          a fault, or another signal
//! ```
//!
//! The ways out of such code are a signal, a stub that brings a system call
//! ([`super::call_stubs`]), and a trace that a patch leads to, which leaves by the
//! stubs of the emitter: `enter` of the emitter and `enter` here make the same frame on the host's
//! stack, so that each may be left by the way out of the other. While it runs, the *selector* of
//! syscall user dispatch says that calls are blocked, so that each `syscall` and `int 0x80` of the guest raises
//! SIGSYS before the kernel does anything; calls of [`super::call_stubs`] are allowed. The signal
//! handler notes why the guest was interrupted and makes the thread continue at `left`, which
//! stores the guest's registers. Since a signal frame holds all registers, the guest's state is
//! exact wherever it was interrupted.
//!
//! Data: the fields `dispatch_selector` and `in_place_*` of the thread's [`ThreadContext`], written
//! by this thread and by its signal handler; [`XSTATE_MASK`] and [`LIGHT`], set
//! once. No lock.
//!
//! Invariants. (1) The selector allows calls whenever host code runs, except between the first and
//! the last instruction of the *window*, which makes none. (2) The handler allows calls before it
//! does anything else, and a thread that was interrupted while they were blocked never returns to
//! guest code without passing the host: else its own `rt_sigreturn` would be blocked. (3) If guest
//! code changes the GS base, the handler's entry stores it to the context and restores the host's;
//! as long as it is not 0 the thread does not run in place.
//!
//! Example: the guest executes `syscall` at 0x401000. The handler gets SIGSYS, notes
//! [`Left::Call`] and 0x401002, and returns to `left`. [`run`] returns, the dispatcher has the
//! kernel perform the call, and runs the guest from 0x401002.

use std::arch::global_asm;
use std::sync::atomic::{AtomicU64, Ordering};

use dynasour_guest::ThreadContext;
use dynasour_guest::context::{
    HOST_FLAGS, HOST_MXCSR, LOADED_FLAGS, NESTED_TASK_FLAG, TRAP_FLAG, XSTATE_SIZE, offset,
};

use super::call_stubs::GuestState;
use super::{Call, call_stubs, raw};
use crate::changes::trampolines;
use dynasour_emitter::blocks::IN_PLACE_LEFT;
use dynasour_emitter::{ExitReason, LightState};

/// `PR_SET_SYSCALL_USER_DISPATCH` and `PR_SYS_DISPATCH_ON` (manual: prctl(2)).
const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;
const PR_SYS_DISPATCH_ON: u64 = 1;
/// The values of the selector: `SYSCALL_DISPATCH_FILTER_ALLOW` and `_BLOCK`.
pub(super) const ALLOW: u8 = 0;
pub(super) const BLOCK: u8 = 1;

/// The extended-state components that are loaded and saved; 0 before [`prepare`].
static XSTATE_MASK: AtomicU64 = AtomicU64::new(0);

/// [`LightState`]: its components, a value that XSTATE_BV never has if there is none, and where AVX-512's masks and
/// registers stand.
static LIGHT: AtomicU64 = AtomicU64::new(u64::MAX);
static MASKS: AtomicU64 = AtomicU64::new(0);
static HIGH: AtomicU64 = AtomicU64::new(0);
/// The bit of XSTATE_BV of SSE: all that is light without AVX-512.
const SSE: u32 = 1 << 1;

/// Why guest code that ran in place was left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Left {
    /// A signal was accepted, or the thread was called out.
    Interrupted = 1,
    /// It executed `syscall`; rip is behind it.
    Call = 2,
    /// It executed `int 0x80`; rip is behind it.
    Call32 = 3,
    /// An instruction of it faulted or trapped: see [`crate::memory::last_fault`].
    Fault = 4,
    /// It was sampled ([`super::super::signal::samples`]).
    Sample = 5,
    /// A stub brought a call ([`super::call_stubs`]); rip is behind the guest's `syscall`.
    Brought = 6,
    /// As [`Left::Brought`], and the patch begins with the `syscall`: rip is inside it.
    BroughtInside = 7,
}

/// Where a signal interrupted a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interrupted {
    /// In the host.
    Host,
    /// On the way into guest code; no guest instruction has been executed.
    Entering,
    /// In guest code.
    Guest,
}

global_asm!(
    r#"
    .pushsection .text.dynasour_run_in_place, "ax", @progbits
    .p2align 4
    .hidden dynasour_run_in_place
    .globl dynasour_run_in_place
dynasour_run_in_place:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    mov gs:[{host_rsp}], rsp
    rdfsbase rax
    mov gs:[{host_fs_base}], rax
    cmp qword ptr gs:[{x87_is_initial}], 0
    je 2f
    // The other bits are those of protection keys, at most, which XRSTOR does not look at here.
    movzx eax, byte ptr [rdi + {xstate_bv}]
    cmp rax, [rip + {light}]
    jne 2f
    ldmxcsr [rdi + {mxcsr}]
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
    movups xmm\n, [rdi + {xmm} + 16 * \n]
    .endr
    vzeroupper
    cmp rax, {sse}
    je 3f
    mov rax, [rip + {masks}]
    add rax, rdi
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7
    kmovq k\n, [rax + {xstate} + 8 * \n]
    .endr
    mov rax, [rip + {high}]
    add rax, rdi
    .irp n, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
    vmovdqu64 zmm\n, [rax + {xstate} + 64 * (\n - 16)]
    .endr
    jmp 3f
2:  mov qword ptr gs:[{x87_is_initial}], 0
    mov rax, [rip + {mask}]
    mov rdx, rax
    shr rdx, 32
    xrstor64 [rdi + {xstate}]
3:  mov qword ptr gs:[{extended_away}], 0
    mov rax, gs:[{fs_base}]
    wrfsbase rax
    .hidden dynasour_in_place_window
    .globl dynasour_in_place_window
dynasour_in_place_window:
    mov byte ptr gs:[{selector}], {block}
    cmp dword ptr gs:[{pending}], 0
    jne dynasour_in_place_aborted
    mov rax, gs:[{rflags}]
    and rax, {loaded_flags}
    or rax, {host_flags}
    push rax
    popfq
    mov rax, gs:[{gpr}]
    mov rcx, gs:[{gpr} + 8]
    mov rdx, gs:[{gpr} + 16]
    mov rbx, gs:[{gpr} + 24]
    mov rbp, gs:[{gpr} + 40]
    mov rsi, gs:[{gpr} + 48]
    mov rdi, gs:[{gpr} + 56]
    mov r8, gs:[{gpr} + 64]
    mov r9, gs:[{gpr} + 72]
    mov r10, gs:[{gpr} + 80]
    mov r11, gs:[{gpr} + 88]
    mov r12, gs:[{gpr} + 96]
    mov r13, gs:[{gpr} + 104]
    mov r14, gs:[{gpr} + 112]
    mov r15, gs:[{gpr} + 120]
    mov rsp, gs:[{gpr} + 32]
    jmp qword ptr gs:[{rip}]
    .hidden dynasour_in_place_window_end
    .globl dynasour_in_place_window_end
dynasour_in_place_window_end:
    .hidden dynasour_in_place_left
    .globl dynasour_in_place_left
dynasour_in_place_left:
    mov gs:[{gpr}], rax
    mov gs:[{gpr} + 8], rcx
    mov gs:[{gpr} + 16], rdx
    mov gs:[{gpr} + 24], rbx
    mov gs:[{gpr} + 32], rsp
    mov gs:[{gpr} + 40], rbp
    mov gs:[{gpr} + 48], rsi
    mov gs:[{gpr} + 56], rdi
    mov gs:[{gpr} + 64], r8
    mov gs:[{gpr} + 72], r9
    mov gs:[{gpr} + 80], r10
    mov gs:[{gpr} + 88], r11
    mov gs:[{gpr} + 96], r12
    mov gs:[{gpr} + 104], r13
    mov gs:[{gpr} + 112], r14
    mov gs:[{gpr} + 120], r15
    mov rsp, gs:[{host_rsp}]
    pushfq
    pop qword ptr gs:[{rflags}]
    rdfsbase rax
    mov gs:[{fs_base}], rax
    mov rax, [rip + {mask}]
    mov rdx, rax
    shr rdx, 32
    mov rdi, gs:[{this}]
    xsave64 [rdi + {xstate}]
    mov qword ptr gs:[{exit_site}], {left}
    jmp 2f
    .hidden dynasour_in_place_aborted
    .globl dynasour_in_place_aborted
dynasour_in_place_aborted:
    mov rsp, gs:[{host_rsp}]
    mov byte ptr gs:[{selector}], {allow}
    mov qword ptr gs:[{exit_site}], {aborted}
2:  push {host_flags}
    popfq
    test byte ptr [rip + {mask}], 4
    jz 3f
    vzeroupper
3:  mov rdi, gs:[{this}]
    mov qword ptr gs:[{x87_is_initial}], 1
    test byte ptr [rdi + {xstate_bv}], 1
    jz 4f
    // It keeps the contents of the registers.
    mov qword ptr gs:[{x87_is_initial}], 0
    fninit
4:  push {host_mxcsr}
    ldmxcsr [rsp]
    pop rax
    mov rax, gs:[{host_fs_base}]
    wrfsbase rax
    mov rax, gs:[{exit_site}]
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret
    .popsection
    "#,
    mask = sym XSTATE_MASK,
    light = sym LIGHT,
    masks = sym MASKS,
    high = sym HIGH,
    sse = const SSE,
    x87_is_initial = const offset::X87_IS_INITIAL,
    mxcsr = const offset::MXCSR,
    xmm = const offset::XMM,
    selector = const offset::DISPATCH_SELECTOR,
    allow = const ALLOW,
    block = const BLOCK,
    pending = const offset::PENDING,
    gpr = const offset::GPR,
    rip = const offset::RIP,
    rflags = const offset::RFLAGS,
    fs_base = const offset::FS_BASE,
    host_rsp = const offset::HOST_RSP,
    host_fs_base = const offset::HOST_FS_BASE,
    this = const offset::THIS,
    xstate = const offset::XSTATE,
    xstate_bv = const offset::XSTATE_BV,
    extended_away = const offset::EXTENDED_AWAY,
    exit_site = const offset::EXIT_SITE,
    left = const IN_PLACE_LEFT,
    aborted = const -1,
    loaded_flags = const LOADED_FLAGS | NESTED_TASK_FLAG as u32,
    host_flags = const HOST_FLAGS,
    host_mxcsr = const HOST_MXCSR,
);

unsafe extern "C" {
    fn dynasour_run_in_place(context: *mut ThreadContext) -> u64;
    fn dynasour_in_place_window();
    fn dynasour_in_place_window_end();
    fn dynasour_in_place_left();
    fn dynasour_in_place_aborted();
}

/// Makes this processor's extended state known: `features` are all of XCR0 but protection keys,
/// whose register holds the guest's rights while the host runs, too. False if the state does not
/// fit into a context.
pub fn prepare(features: u64, size: usize) -> bool {
    XSTATE_MASK.store(features, Ordering::Relaxed);
    if let Some(light) = LightState::of(features) {
        let (masks, high) = light.avx512.unwrap_or_default();
        MASKS.store(u64::from(masks), Ordering::Relaxed);
        HIGH.store(u64::from(high), Ordering::Relaxed);
        LIGHT.store(light.components, Ordering::Relaxed);
    }
    size <= XSTATE_SIZE
}

/// Does the kernel have syscall user dispatch (Linux 5.11), and let this process use it?
pub fn is_available() -> bool {
    const PR_SYS_DISPATCH_OFF: u64 = 0;
    let args = [PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_OFF, 0, 0, 0];
    // SAFETY: turns off what is off.
    unsafe { raw(&Call::new(libc::SYS_prctl, &args)) == 0 }
}

/// Turns syscall user dispatch on for this thread; a thread, a forked child and a program start
/// without it. `context` is the thread's. Are the calls of stubs allowed ([`super::call_stubs`])?
/// False if the kernel refuses.
pub fn turn_on(context: &ThreadContext, with_stubs: bool) -> bool {
    let selector = context.dispatch_selector.as_ptr() as u64;
    let allowed = if with_stubs { call_stubs::range() } else { 0..0 };
    let length = allowed.end - allowed.start;
    let args = [PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, allowed.start, length, selector];
    // SAFETY: the selector allows calls, and lives as long as the thread.
    unsafe { raw(&Call::new(libc::SYS_prctl, &args)) == 0 }
}

/// Runs guest code in place, from `context.rip` on, until a signal interrupts it
/// ([`ExitReason::InPlace`]), or until a trace that it has entered leaves to the runtime. The
/// guest's state in `context` is exact before.
///
/// # Safety
/// `context` is this thread's, the GS base points to it, and [`turn_on`] and [`prepare`] have
/// returned true. The guest then has the authority that native code has. Native code to which
/// patches lead is not dropped while the thread is in it.
pub unsafe fn run(context: &mut ThreadContext) -> ExitReason {
    // SAFETY: the routine keeps the C calling convention; the rest is the caller's promise.
    ExitReason::of(unsafe { dynasour_run_in_place(context) })
}

/// After [`ExitReason::InPlace`]: makes the guest's state in `context` exact. Returns why the guest
/// was interrupted.
pub fn left(context: &mut ThreadContext) -> Left {
    use Left::{Brought, BroughtInside, Call, Call32, Fault, Interrupted, Sample};
    let all = [Interrupted, Call, Call32, Fault, Sample, Brought, BroughtInside];
    let left = context.in_place_left.load(Ordering::Relaxed);
    context.rip = context.in_place_rip.load(Ordering::Relaxed);
    // A debugger that steps through the way out leaves its TF in the flags.
    context.rflags &= !TRAP_FLAG;
    context.rflags |= context.in_place_flags.load(Ordering::Relaxed);
    all.into_iter().find(|known| *known as u64 == left).unwrap_or(Interrupted)
}

/// The address of the code that stores the guest's registers and returns from [`run`].
pub(super) fn left_address() -> u64 {
    dynasour_in_place_left as *const () as u64
}

/// For the signal handler, before anything else: where the signal has interrupted the thread, by
/// its rip. The thread's calls are allowed from now on.
pub fn interrupted(rip: u64, context: &ThreadContext) -> Interrupted {
    let was_allowed = context.dispatch_selector.swap(ALLOW, Ordering::Relaxed) == ALLOW;
    if guest_state(rip, 0).is_some() {
        return Interrupted::Guest;
    }
    if was_allowed {
        return Interrupted::Host;
    }
    let window = dynasour_in_place_window as *const () as u64
        ..dynasour_in_place_window_end as *const () as u64;
    let aborted = dynasour_in_place_aborted as *const () as u64;
    if window.contains(&rip) || rip == aborted || rip == aborted + ABORTED_SELECTOR {
        Interrupted::Entering
    } else {
        Interrupted::Guest
    }
}

/// For the signal handler, after [`interrupted`] has found guest code: makes the thread leave it
/// for this reason. `registers` are those of the interrupted thread. If the signal is not the
/// guest's, no call of the guest's ends because of it.
pub fn leave(registers: &mut [i64; 23], context: &ThreadContext, left: Left, is_own: bool) {
    let rip = registers[libc::REG_RIP as usize] as u64;
    let rax = registers[libc::REG_RAX as usize];
    let rcx = registers[libc::REG_RCX as usize] as u64;
    let state = Some(is_own)
        .filter(|is_own| *is_own)
        .and_then(|_| call_stubs::before_call(rip, rax))
        .or_else(|| guest_state(rip, rcx));
    if let Some(rax) = state.and_then(|state| state.rax) {
        registers[libc::REG_RAX as usize] = rax as i64;
    }
    if let Some(rcx) = state.and_then(|state| state.rcx) {
        registers[libc::REG_RCX as usize] = rcx as i64;
    }
    context.in_place_left.store(left as u64, Ordering::Relaxed);
    context.in_place_rip.store(state.map_or(rip, |state| state.rip), Ordering::Relaxed);
    let rflags = &mut registers[libc::REG_EFL as usize];
    // The host must not be single-stepped, and the kernel does not give NT back.
    let own = *rflags as u64 & (TRAP_FLAG | NESTED_TASK_FLAG);
    context.in_place_flags.store(own, Ordering::Relaxed);
    *rflags &= !(TRAP_FLAG as i64);
    registers[libc::REG_RIP as usize] = left_address() as i64;
}

/// The guest's state if the thread is in code that stands for an instruction of the guest's, with
/// this value of rcx.
fn guest_state(rip: u64, rcx: u64) -> Option<GuestState> {
    let at = |pc: u64| GuestState { rip: pc, rax: None, rcx: None };
    call_stubs::guest_state(rip, rcx).or_else(|| trampolines::site_at(rip).map(at))
}

/// For the signal handler, after [`interrupted`] has found a thread entering: makes it not enter.
pub fn abort(rip: &mut i64) {
    *rip = dynasour_in_place_aborted as *const () as i64;
}

/// The offset from `aborted` of the instruction that allows calls: the length of
/// `mov rsp, gs:[disp32]`.
const ABORTED_SELECTOR: u64 = 9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_abort_allows_calls_by_its_second_instruction() {
        let second = dynasour_in_place_aborted as *const () as u64 + ABORTED_SELECTOR;
        // SAFETY: reads bytes of this module's code: `mov byte ptr gs:[disp32], imm8`.
        let bytes = unsafe { (second as *const [u8; 4]).read() };
        assert_eq!(bytes, [0x65, 0xc6, 0x04, 0x25]);
    }
}
