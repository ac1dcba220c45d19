//! The assembly through which the host makes system calls for the guest.
//!
//! * [`windowed`]: a system call on behalf of the guest, inside a *window*: the instructions from
//!   the check of `ThreadContext::pending` up to and including `syscall`. If a signal is accepted
//!   while rip is inside, the handler makes the thread continue behind the window, at the *way
//!   out*. So a thread never sleeps in a call after it has accepted a signal (docs/design.md,
//!   "Running a guest"). If the kernel restarts an interrupted call, it moves rip back onto
//!   `syscall`, which is inside the window, too.
//! * [`windowed_32`]: the same by `int 0x80`, in a window of its own.
//! * [`spawn`]: `clone` of a child that shares this memory and runs on a host stack of its own.
//!
//! A call that ended early only because of a signal of the host's is made once more ([`again`]):
//! behind the `syscall` its number is on the stack.
//!
//! Owns no data and takes no lock. Invariant: the GS base points to the thread's `ThreadContext`.
//! [`windowed`] and [`spawn`] are called by guest threads outside native code; the functions that
//! classify addresses are also called by the signal handler.
//!
//! Example: the guest calls `read` on an empty pipe, and SIGALRM comes just before `syscall`. The
//! handler accepts it and sets rip to the way out; [`windowed`] returns [`NOT_ENTERED`], the signal
//! is delivered, and then the guest makes the call again.

pub mod call_stubs;
pub mod in_place;
pub mod rights;
pub mod ways_out;
mod xsave;

use std::arch::{asm, global_asm};

use dynasour_guest::context::{ThreadContext, offset};

pub use crate::host_call::{Call, raw};
pub use xsave::{XsaveForm, fixup, run as run_xsave};

global_asm!(
    r#"
    .pushsection .text.dynasour_windowed, "ax", @progbits
    .p2align 4
    .hidden dynasour_windowed
    .globl dynasour_windowed
dynasour_windowed:
    mov rax, [rdi]
    push rax
    mov rsi, [rdi + 16]
    mov rdx, [rdi + 24]
    mov r10, [rdi + 32]
    mov r8, [rdi + 40]
    mov r9, [rdi + 48]
    mov rdi, [rdi + 8]
    call dynasour_window_start
    pop rcx
    ret
    .hidden dynasour_window_start
    .globl dynasour_window_start
dynasour_window_start:
    cmp dword ptr gs:[{pending}], 0
    jne dynasour_window_interrupted
    .hidden dynasour_window_call
    .globl dynasour_window_call
dynasour_window_call:
    syscall
    .hidden dynasour_window_end
    .globl dynasour_window_end
dynasour_window_end:
    ret
    .hidden dynasour_window_interrupted
    .globl dynasour_window_interrupted
dynasour_window_interrupted:
    mov rax, {not_entered}
    ret

    .p2align 4
    .hidden dynasour_windowed_32
    .globl dynasour_windowed_32
dynasour_windowed_32:
    push rbx
    push rbp
    mov eax, [rdi]
    mov ebx, [rdi + 8]
    mov ecx, [rdi + 16]
    mov edx, [rdi + 24]
    mov esi, [rdi + 32]
    mov ebp, [rdi + 48]
    mov edi, [rdi + 40]
    push rax
    call dynasour_window_32_start
    pop rcx
    pop rbp
    pop rbx
    ret
    .hidden dynasour_window_32_start
    .globl dynasour_window_32_start
dynasour_window_32_start:
    cmp dword ptr gs:[{pending}], 0
    jne dynasour_window_interrupted
    .hidden dynasour_window_32_call
    .globl dynasour_window_32_call
dynasour_window_32_call:
    int 0x80
    .hidden dynasour_window_32_end
    .globl dynasour_window_32_end
dynasour_window_32_end:
    ret
    .hidden dynasour_window_32_missing
    .globl dynasour_window_32_missing
dynasour_window_32_missing:
    mov rax, {no_calls_32}
    ret

    .p2align 4
    .hidden dynasour_spawn
    .globl dynasour_spawn
dynasour_spawn:
    push rbx
    mov rbx, rsi
    mov rax, [rdi]
    mov rsi, [rdi + 16]
    mov rdx, [rdi + 24]
    mov r10, [rdi + 32]
    mov r8, [rdi + 40]
    mov r9, [rdi + 48]
    mov rdi, [rdi + 8]
    syscall
    test rax, rax
    jz 2f
    pop rbx
    ret
2:  xor ebp, ebp
    mov rdi, [rbx]
    wrgsbase rdi
    mov rdi, rbx
    call [rbx + 8]
    ud2
    .popsection
    "#,
    pending = const offset::PENDING,
    not_entered = const NOT_ENTERED,
    no_calls_32 = const NO_CALLS_32,
);

unsafe extern "C" {
    fn dynasour_windowed(call: *const Call) -> i64;
    fn dynasour_spawn(call: *const Call, start: *const SpawnStart) -> i64;
    fn dynasour_window_start();
    fn dynasour_window_call();
    fn dynasour_window_end();
    fn dynasour_window_interrupted();
    fn dynasour_windowed_32(call: *const Call) -> i64;
    fn dynasour_window_32_start();
    fn dynasour_window_32_call();
    fn dynasour_window_32_end();
    fn dynasour_window_32_missing();
}

/// The result of [`windowed`] if a signal is pending and the call was not made. It is the kernel's
/// ERESTARTSYS, which no system call returns to a process.
pub const NOT_ENTERED: i64 = -512;

/// The result of [`windowed_32`] if the kernel has no 32-bit system calls. It is the kernel's
/// ERESTARTNOINTR, which no system call returns to a process.
pub const NO_CALLS_32: i64 = -513;

/// The data with which a child made by [`spawn`] starts.
#[repr(C)]
pub struct SpawnStart {
    /// The child's context, which becomes its GS base.
    pub context: *mut ThreadContext,
    /// Called on the child's stack with the address of this structure.
    pub entry: unsafe extern "C" fn(*mut SpawnStart) -> !,
}

/// Performs a system call of the guest's. If a signal is pending, it does nothing and returns
/// [`NOT_ENTERED`].
///
/// # Safety
/// The call must not harm the host: the caller has checked the guest's arguments.
pub unsafe fn windowed(call: &Call) -> i64 {
    // SAFETY: the routine keeps the C calling convention; the caller answers for the call's
    // effects.
    unsafe { dynasour_windowed(call) }
}

/// As [`windowed`], by `int 0x80`. `call` has a number of the i386 table; the lower halves of its
/// arguments become ebx, ecx, edx, esi, edi and ebp. The kernel converts the structures. Returns
/// [`NO_CALLS_32`] if the kernel was built or started without 32-bit calls.
///
/// # Safety
/// As for [`windowed`].
pub unsafe fn windowed_32(call: &Call) -> i64 {
    // SAFETY: the routine keeps the C calling convention; the caller answers for the call's
    // effects.
    unsafe { dynasour_windowed_32(call) }
}

/// Performs a `clone` call whose child runs `start.entry` on the stack named in the call, with its
/// own GS base. Asynchronous signals must be blocked: before the child has set its GS base, the
/// handler would record a signal of the child in the parent's context.
///
/// # Safety
/// `call` must be a clone or clone3 with a stack that nothing else uses, and `start` must live
/// until the child is gone.
pub unsafe fn spawn(call: &Call, start: *const SpawnStart) -> i64 {
    // SAFETY: the parent's side keeps the C calling convention; the child's never returns.
    unsafe { dynasour_spawn(call, start) }
}

/// Where a host instruction pointer stands relative to the windows of [`windowed`] and
/// [`windowed_32`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Window {
    /// In no window.
    Outside,
    /// Between the check for signals and the call, which has not been made. If a signal is accepted
    /// here, the thread must continue at the way out.
    Before,
    /// On the `syscall` or `int 0x80` instruction: the call has not been made, or the kernel is
    /// about to restart it.
    AtCall,
}

/// The addresses of one window.
struct Bounds {
    start: u64,
    call: u64,
    end: u64,
    /// The kernel's number of `restart_syscall` for the instruction at `call`.
    restart: i64,
}

impl Bounds {
    fn all() -> [Bounds; 2] {
        [
            Bounds {
                start: dynasour_window_start as *const () as u64,
                call: dynasour_window_call as *const () as u64,
                end: dynasour_window_end as *const () as u64,
                restart: libc::SYS_restart_syscall,
            },
            Bounds {
                start: dynasour_window_32_start as *const () as u64,
                call: dynasour_window_32_call as *const () as u64,
                end: dynasour_window_32_end as *const () as u64,
                restart: 0,
            },
        ]
    }
}

/// Classifies a host instruction pointer.
pub fn window(host_rip: u64) -> Window {
    let within = |bounds: &Bounds| (bounds.start..bounds.end).contains(&host_rip);
    match Bounds::all().iter().find(|bounds| within(bounds)) {
        Some(bounds) if bounds.call == host_rip => Window::AtCall,
        Some(_) => Window::Before,
        None => Window::Outside,
    }
}

/// Whether `host_rip` is the instruction of a call or the one behind it. Apart from
/// [`missing_calls_32`] these cannot fault, so a synchronous signal there was sent by a process.
pub fn is_at_call(host_rip: u64) -> bool {
    Bounds::all().iter().any(|bounds| host_rip == bounds.call || host_rip == bounds.end)
}

/// If the kernel is about to continue an interrupted call with a timeout by `restart_syscall`: the
/// address behind the call.
pub fn behind_restart(host_rip: u64, rax: i64) -> Option<u64> {
    let bounds = Bounds::all();
    let is_due = |bounds: &&Bounds| bounds.call == host_rip && bounds.restart == rax;
    bounds.iter().find(is_due).map(|bounds| bounds.end)
}

/// If a call has just ended with EINTR, at `host_rip`, only because of a signal that is not the
/// guest's: the address at which it is made again, and its number. `stack` is the stack pointer.
///
/// # Safety
/// The thread was interrupted at `host_rip` with this stack pointer.
pub unsafe fn again(host_rip: u64, rax: i64, stack: u64) -> Option<(u64, i64)> {
    let bounds = Bounds::all();
    let ended = bounds.iter().find(|bounds| bounds.end == host_rip)?;
    // SAFETY: there the stack has the return address, and the call's number above it.
    let number = || unsafe { ((stack + 8) as *const i64).read() };
    (rax == -i64::from(libc::EINTR)).then(|| (ended.start, number()))
}

/// Was a thread that a tracer has stopped at `host_rip` asleep in a call of the guest's? Then the
/// kernel has ended the call with EINTR, or with one of its codes for a restart, which the thread
/// does not see (`include/linux/errno.h`).
pub fn was_asleep(host_rip: u64, rax: i64) -> bool {
    const RESTARTS: [i64; 4] = [-512, -513, -514, -516];
    let is_interrupted = rax == -i64::from(libc::EINTR) || RESTARTS.contains(&rax);
    is_interrupted && Bounds::all().iter().any(|bounds| bounds.end == host_rip)
}

/// If this fault of the `int 0x80` means that the kernel has no 32-bit calls: the address at which
/// the thread continues.
pub fn missing_calls_32(host_rip: u64, trapno: u64, error: u64) -> Option<u64> {
    /// General protection: the gate of vector 0x80 in the interrupt table is missing.
    const MISSING_GATE: (u64, u64) = (13, MISSING_GATE_ERROR);
    (host_rip == dynasour_window_32_call as *const () as u64 && (trapno, error) == MISSING_GATE)
        .then_some(dynasour_window_32_missing as *const () as u64)
}

/// The error code of `int 0x80` without a gate: the vector, and "in the interrupt table" (Intel SDM
/// vol. 3, "Error Code").
pub const MISSING_GATE_ERROR: u64 = 0x80 << 3 | 1 << 1;

/// The way out: the address at which a thread continues that a signal has kept from making a call.
pub fn window_interrupted() -> u64 {
    dynasour_window_interrupted as *const () as u64
}

/// The FS base.
pub fn fs_base() -> u64 {
    let base;
    // SAFETY: reads a register.
    unsafe { asm!("rdfsbase {}", out(reg) base, options(nostack, nomem, preserves_flags)) };
    base
}

/// The GS base.
pub fn gs_base() -> u64 {
    let base;
    // SAFETY: reads a register.
    unsafe { asm!("rdgsbase {}", out(reg) base, options(nostack, nomem, preserves_flags)) };
    base
}

/// Makes `context` the thread's context, by setting the GS base.
///
/// # Safety
/// `context` must stay valid while guest code, system calls or signal handlers run on this thread.
pub unsafe fn set_gs_base(context: *const ThreadContext) {
    // SAFETY: only code that expects the context there uses GS.
    unsafe { asm!("wrgsbase {}", in(reg) context, options(nostack, preserves_flags)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_ends_behind_the_two_bytes_of_syscall() {
        let call = dynasour_window_call as *const () as u64;
        assert_eq!(dynasour_window_end as *const () as u64, call + 2);
        assert_eq!(window(call), Window::AtCall);
        assert_eq!(window(dynasour_window_start as *const () as u64), Window::Before);
        assert_eq!(window(call - 1), Window::Before);
        assert_eq!(window(call + 2), Window::Outside);
        assert_eq!(window(window_interrupted()), Window::Outside);
        // SAFETY: reads two bytes of this module's code.
        assert_eq!(unsafe { (call as *const [u8; 2]).read() }, [0x0f, 0x05]);

        let call_32 = dynasour_window_32_call as *const () as u64;
        assert_eq!(dynasour_window_32_end as *const () as u64, call_32 + 2);
        assert_eq!((window(call_32), window(call_32 - 1)), (Window::AtCall, Window::Before));
        assert_eq!(window(call_32 + 2), Window::Outside);
        // SAFETY: as above.
        assert_eq!(unsafe { (call_32 as *const [u8; 2]).read() }, [0xcd, 0x80]);
        assert_eq!(behind_restart(call, 219), Some(call + 2));
        assert_eq!(behind_restart(call_32, 0), Some(call_32 + 2));
        assert_eq!((behind_restart(call, 0), behind_restart(call_32, 219)), (None, None));
        assert!(missing_calls_32(call_32, 13, 0x402).is_some());
        assert_eq!(
            (missing_calls_32(call_32, 13, 0), missing_calls_32(call, 13, 0x402)),
            (None, None)
        );
    }

    #[test]
    fn a_pending_signal_keeps_the_call_from_being_made() {
        let context = ThreadContext::new();
        // SAFETY: the context outlives its use as GS base; getpid has no effects.
        unsafe {
            set_gs_base(&*context);
            let call = Call::new(libc::SYS_getpid, &[]);
            assert_eq!(windowed(&call), i64::from(libc::getpid()));
            context.pending.store(1, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(windowed(&call), NOT_ENTERED);
            assert_eq!(raw(&call), i64::from(libc::getpid()));
            set_gs_base(std::ptr::null());
        }
    }
}
