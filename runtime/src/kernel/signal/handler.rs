//! The host's signal handler: what the kernel calls, through `dynasour_signal_entry`
//! ([`crate::kernel::entry`]), for every signal that has a handler of ours.
//!
//! A **synchronous fault** is expected if its instruction is a guest access of the interpreter, an
//! instruction that runs for the guest, or an access of a fragment. A table or a hook then names
//! the host address at which the thread continues; the handler notes the cause and sets rip. Every
//! other fault is a bug of ours: the handler reports it in one line and the process dies of the
//! signal.
//!
//! An **asynchronous signal** is accepted: the handler records it in [`SignalState`], blocks every
//! other one in the interrupted frame's mask, sets `ThreadContext::pending` and makes native code
//! leave at its next safe point. If the interrupted code was about to make a system call for the
//! guest, it is diverted.
//!
//! Everything here runs in a signal handler: on the host's alternate stack, with all signals
//! blocked, without panics.
//!
//! **Locks.** The handler takes two: that of the fragments (in the hooks), and that of the code
//! pages (in [`host::opened_for_host`] and [`host::stored_for_native`]); the latter allocate, too.
//! It takes them only if the interrupted instruction is in the code cache, where a thread holds no
//! lock and is not in the allocator. So a fault of our own, wherever it happens and whatever its
//! thread holds, is reported without waiting. A fault inside the handler kills the process at once,
//! because its signal is blocked.
//!
//! Example: `mov rax, [rdi]` of the interpreter faults at guest address 0x10. `memory::fixup` knows
//! rip and names the address behind the access; the access returns an error there, and the
//! interpreter raises the guest's SIGSEGV ([`GuestFault::noted`]).

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use dynasour_guest::ThreadContext;

use dynasour_emitter::Diversion;

use super::{
    FIVE, SigInfo, SignalState, UNBLOCKABLE, held, native_store, precise, set_of, waiting,
};
use crate::changes::host;
use crate::kernel::entry::{self, Call, Window};
use crate::memory::{self, FaultInfo};

/// The signal of [`call_out`]: one of those whose handler is always ours and that are never
/// blocked, that nobody sends.
const CALL_SIGNAL: i32 = libc::SIGFPE;
/// Its `si_code`: no kernel's.
const CALL_CODE: i32 = -0x6479_6e61;

/// Bytes of the host's alternate signal stack.
pub const ALTERNATE_STACK: usize = 128 << 10;

/// A fault of the guest's, as the kernel would describe it to the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestFault {
    /// The signal.
    pub signo: i32,
    /// `si_code`
    pub code: i32,
    /// `si_addr`
    pub addr: u64,
    /// The processor's exception number.
    pub trapno: u64,
    /// The processor's error code.
    pub err: u64,
    /// The page fault address, kept from the last page fault when this is none.
    pub cr2: Option<u64>,
    /// `si_pkey`, if a protection key denied the access; else 0.
    pub key: u32,
}

impl GuestFault {
    /// Exception numbers (Intel SDM vol. 3, 6.3.1).
    const DEBUG: u64 = 1;
    /// See [`GuestFault::DEBUG`].
    const BREAKPOINT: u64 = 3;
    const UNDEFINED: u64 = 6;
    const PROTECTION: u64 = 13;
    const PAGE_FAULT: u64 = 14;

    /// An undefined instruction at `pc`.
    pub fn undefined(pc: u64) -> GuestFault {
        let code = 2; // ILL_ILLOPN, what the kernel says for every #UD
        GuestFault {
            signo: libc::SIGILL,
            code,
            addr: pc,
            trapno: Self::UNDEFINED,
            err: 0,
            cr2: None,
            key: 0,
        }
    }

    /// A general protection fault with this error code.
    pub fn protection(err: u64) -> GuestFault {
        let code = 0x80; // SI_KERNEL
        GuestFault {
            signo: libc::SIGSEGV,
            code,
            addr: 0,
            trapno: Self::PROTECTION,
            err,
            cr2: None,
            key: 0,
        }
    }

    /// `int3`; rip is already behind it.
    pub fn breakpoint() -> GuestFault {
        let code = 0x80; // SI_KERNEL
        GuestFault {
            signo: libc::SIGTRAP,
            code,
            addr: 0,
            trapno: Self::BREAKPOINT,
            err: 0,
            cr2: None,
            key: 0,
        }
    }

    /// The trap behind an instruction that ran with TF set; rip is at the next one, `addr`.
    pub fn single_step(addr: u64) -> GuestFault {
        const TRAP_TRACE: i32 = 2;
        GuestFault {
            signo: libc::SIGTRAP,
            code: TRAP_TRACE,
            addr,
            trapno: Self::DEBUG,
            err: 0,
            cr2: None,
            key: 0,
        }
    }

    /// Instruction bytes at `addr` that cannot be fetched; `fault` is what reading them said.
    pub fn fetch(addr: u64, fault: &FaultInfo) -> GuestFault {
        const INSTRUCTION_FETCH: u64 = 1 << 4;
        if fault.trapno == Self::PROTECTION {
            return GuestFault::protection(0);
        }
        GuestFault {
            signo: fault.signal,
            code: fault.code,
            addr,
            trapno: Self::PAGE_FAULT,
            err: fault.error | INSTRUCTION_FETCH,
            cr2: Some(addr),
            key: 0,
        }
    }

    /// Instruction bytes at `addr` that can be read but not executed.
    pub fn not_executable(addr: u64) -> GuestFault {
        const SEGV_ACCERR: i32 = 2;
        const PRESENT_USER: u64 = 1 | 1 << 2;
        let read = FaultInfo {
            signal: libc::SIGSEGV,
            code: SEGV_ACCERR,
            trapno: Self::PAGE_FAULT,
            error: PRESENT_USER,
            ..FaultInfo::default()
        };
        GuestFault::fetch(addr, &read)
    }

    /// What the handler noted about a fault of an instruction that ran for the guest's instruction
    /// at `pc`, of which `context` holds the state before it.
    pub fn noted(context: &ThreadContext, pc: u64, fault: &FaultInfo) -> GuestFault {
        let fault = &precise::of_guest(context, pc, *fault);
        let page_fault = fault.trapno == Self::PAGE_FAULT;
        // These name the instruction, which for the guest is its own.
        let names_pc = matches!(fault.signal, libc::SIGFPE | libc::SIGILL) && fault.code != 0x80;
        GuestFault {
            signo: fault.signal,
            code: fault.code,
            addr: if names_pc { pc } else { fault.addr },
            trapno: fault.trapno,
            err: fault.error,
            cr2: page_fault.then_some(fault.cr2),
            key: fault.key,
        }
    }
}

/// What other parts contribute to the handler. Each runs in a signal handler.
#[derive(Clone, Copy)]
pub struct FaultHooks {
    /// Where to continue after a fault in the interpreter's execution of a native instruction.
    pub thunk: fn(host_rip: u64) -> Option<u64>,
    /// Where to continue after a fault of a fragment's own.
    pub fragment: fn(host_rip: u64) -> Option<u64>,
    /// The end of the code cache, if this host instruction is in it.
    pub cache_end: fn(host_rip: u64) -> Option<u64>,
    /// An asynchronous signal was accepted, or the thread is called, while this host instruction
    /// was about to run. Must the thread be sent somewhere to come out?
    pub accepted: fn(host_rip: u64, context: &ThreadContext) -> Option<Diversion>,
}

static HOOKS: OnceLock<FaultHooks> = OnceLock::new();

/// Gives this thread an alternate signal stack and, the first time, makes the handler know the
/// hooks.
pub fn install(hooks: FaultHooks) -> std::io::Result<()> {
    let _ = HOOKS.set(hooks);
    let guard = 4096;
    // SAFETY: a fresh mapping, never unmapped, of which the lowest page is made inaccessible.
    unsafe {
        let stack = libc::mmap(
            std::ptr::null_mut(),
            guard + ALTERNATE_STACK,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        if stack == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        libc::mprotect(stack, guard, libc::PROT_NONE);
        use_alternate_stack(stack.byte_add(guard));
    }
    Ok(())
}

/// Makes the [`ALTERNATE_STACK`] bytes at `stack` this thread's alternate signal stack.
///
/// # Safety
/// They must be nobody else's while the thread lives.
pub unsafe fn use_alternate_stack(stack: *mut libc::c_void) {
    let stack = libc::stack_t { ss_sp: stack, ss_flags: 0, ss_size: ALTERNATE_STACK };
    // SAFETY: the caller's promise. It cannot fail: the stack is large, and the thread is not on
    // another one.
    unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) };
}

/// The handler, called by the assembly entry with the host's FS base in place.
///
/// # Safety
/// The kernel's arguments, and the context that GS names.
pub unsafe extern "C" fn on_signal(
    signo: i32,
    info: *const SigInfo,
    frame: *mut libc::ucontext_t,
    context: *const ThreadContext,
) {
    // SAFETY: the kernel passes valid pointers, and the GS base names this thread's context.
    let (info, frame, context) = unsafe { (&*info, &mut *frame, &*context) };
    // SAFETY: set before handlers were installed; the state lives as long as the context.
    let state = unsafe { &*(context.signals as *const SignalState) };
    if (signo, info.code()) == (CALL_SIGNAL, CALL_CODE) {
        called(frame, context);
        return;
    }
    // The kernel's codes for faults are positive; signals that somebody sent have none, unless he
    // forges one.
    let is_fault = FIVE & set_of(signo) != 0 && info.code() > 0;
    if !is_fault || !synchronous(signo, info, frame, context, state) {
        asynchronous(signo, info, frame, context, state);
    }
}

/// Sends a fault to where it is expected. `false`: nobody expects it, so it may be no fault at all.
fn synchronous(
    signo: i32,
    info: &SigInfo,
    frame: &mut libc::ucontext_t,
    context: &ThreadContext,
    state: &SignalState,
) -> bool {
    let regs = &mut frame.uc_mcontext.gregs;
    let rip = regs[libc::REG_RIP as usize] as u64;
    let fault = FaultInfo {
        signal: signo,
        code: info.code(),
        addr: u64::from_le_bytes(info.0[16..24].try_into().unwrap_or_default()),
        trapno: regs[libc::REG_TRAPNO as usize] as u64,
        error: regs[libc::REG_ERR as usize] as u64,
        cr2: regs[libc::REG_CR2 as usize] as u64,
        key: info.key(),
    };
    let mut landing = memory::fixup(rip)
        .or_else(|| entry::fixup(rip))
        .or_else(|| entry::missing_calls_32(rip, fault.trapno, fault.error));
    if let Some(hooks) = HOOKS.get() {
        landing = landing.or_else(|| (hooks.thunk)(rip)).or_else(|| (hooks.fragment)(rip));
    }
    match landing {
        Some(landing) => {
            memory::note_fault(fault);
            regs[libc::REG_RIP as usize] = landing as i64;
            true
        }
        None if is_store_of_exit(&fault, regs) => {
            context.pending.store(1, Ordering::Relaxed);
            true
        }
        // A forged one is accepted. A fault of ours comes back at once, with nothing delivered in
        // between.
        None if entry::is_at_call(rip)
            || state.accepted() & set_of(signo) == 0
            || !state.repeats(rip) =>
        {
            false
        }
        None => {
            report_internal_error(signo, rip, fault.addr);
            super::die(signo);
        }
    }
}

/// Did an exit of a fragment store to a page that the fragment has written to before, and from
/// which code was translated since? Then the store has been performed, or will be when it is
/// repeated.
fn is_store_of_exit(fault: &FaultInfo, regs: &mut [i64; 23]) -> bool {
    let rip = regs[libc::REG_RIP as usize] as u64;
    let Some(end) = HOOKS.get().and_then(|hooks| (hooks.cache_end)(rip)) else { return false };
    let register = |number: usize| {
        let slot = super::frame::ORDER.iter().position(|register| *register == number);
        slot.map_or(0, |slot| regs[slot] as u64)
    };
    // SAFETY: the instruction was executed, and the code cache goes on to `end`.
    if let Some(store) = unsafe { native_store::at(rip, end, register) }
        && host::stored_for_native(fault, store.address, store.bytes())
    {
        regs[libc::REG_RIP as usize] = store.next as i64;
        return true;
    }
    host::opened_for_host(fault)
}

fn asynchronous(
    signo: i32,
    info: &SigInfo,
    frame: &mut libc::ucontext_t,
    context: &ThreadContext,
    state: &SignalState,
) {
    let is_held = FIVE & state.effective_mask() & !state.waiting() & set_of(signo) != 0;
    if is_held && held::is_for_process(info) && waiting::hold_for_process(signo, info) {
        return;
    }
    state.accept(signo, info);
    if FIVE & set_of(signo) != 0 {
        if is_held {
            return;
        }
    } else {
        block_asynchronous(frame);
    }
    context.pending.store(1, Ordering::Relaxed);
    let regs = &mut frame.uc_mcontext.gregs;
    let rip = regs[libc::REG_RIP as usize] as u64;
    if let Some(behind) = entry::behind_restart(rip, regs[libc::REG_RAX as usize]) {
        // A call that measured time was interrupted by a stop and is about to go on; a handler ends
        // it.
        regs[libc::REG_RAX as usize] = -i64::from(libc::EINTR);
        regs[libc::REG_RIP as usize] = behind as i64;
        return;
    }
    match entry::window(rip) {
        Window::Before | Window::AtCall => {
            regs[libc::REG_RIP as usize] = entry::window_interrupted() as i64;
        }
        Window::Outside => divert(frame, context),
    }
}

/// The thread is called: it comes out of native code, and out of a system call if it is about to
/// make one (again).
fn called(frame: &mut libc::ucontext_t, context: &ThreadContext) {
    let regs = &mut frame.uc_mcontext.gregs;
    let is_outside = entry::window(regs[libc::REG_RIP as usize] as u64) == Window::Outside;
    if is_outside || context.pending.load(Ordering::Relaxed) == 0 {
        divert(frame, context);
    } else {
        regs[libc::REG_RIP as usize] = entry::window_interrupted() as i64;
    }
}

/// If the thread was interrupted in native code, it comes out.
fn divert(frame: &mut libc::ucontext_t, context: &ThreadContext) {
    let regs = &mut frame.uc_mcontext.gregs;
    let rip = regs[libc::REG_RIP as usize] as u64;
    if let Some(diversion) = HOOKS.get().and_then(|h| (h.accepted)(rip, context)) {
        regs[libc::REG_RIP as usize] = diversion.rip as i64;
        for &(register, saved) in diversion.displaced.places() {
            if let Some(slot) = super::frame::ORDER.iter().position(|r| *r == register) {
                regs[slot] = context.stub_save[saved] as i64;
            }
        }
    }
}

/// Makes thread `tid` of process `pid`, which shares this one's memory, come out of native code, if
/// it is there. `false`: the signal cannot be sent.
pub fn call_out(pid: i32, tid: i32) -> bool {
    let info = SigInfo::of_fault(CALL_SIGNAL, CALL_CODE, 0);
    // SAFETY: reads `info`; the handler of this signal is ours.
    unsafe {
        let args = [pid as u64, tid as u64, CALL_SIGNAL as u64, std::ptr::from_ref(&info) as u64];
        entry::raw(&Call::new(libc::SYS_rt_tgsigqueueinfo, &args)) == 0
    }
}

/// Blocks every asynchronous signal when the handler returns.
fn block_asynchronous(frame: &mut libc::ucontext_t) {
    // The kernel's frame holds 8 bytes of mask; libc's type is longer, so only the first word may
    // be touched.
    let mask = (&raw mut frame.uc_sigmask).cast::<u64>();
    // SAFETY: the word is inside the frame.
    unsafe { mask.write(!FIVE & !UNBLOCKABLE) };
}

/// One line to stderr without allocation.
fn report_internal_error(signo: i32, rip: u64, addr: u64) {
    let mut line = Line { bytes: [0; 160], len: 0 };
    line.text("dynasour: internal error: signal ");
    line.decimal(signo as u64);
    line.text(" at 0x");
    line.hexadecimal(rip);
    line.text(", address 0x");
    line.hexadecimal(addr);
    line.text(". This is a bug of dynasour; please report it with the command line.\n");
    // SAFETY: writes bytes of a local buffer to stderr.
    unsafe {
        entry::raw(&Call::new(libc::SYS_write, &[2, line.bytes.as_ptr() as u64, line.len as u64]))
    };
}

/// Text in a fixed buffer.
struct Line {
    bytes: [u8; 160],
    len: usize,
}

impl Line {
    fn text(&mut self, text: &str) {
        for &byte in text.as_bytes() {
            if let Some(slot) = self.bytes.get_mut(self.len) {
                *slot = byte;
                self.len += 1;
            }
        }
    }

    fn number(&mut self, mut value: u64, base: u64) {
        let mut digits = [0u8; 20];
        let mut first = digits.len();
        loop {
            first -= 1;
            digits[first] = b"0123456789abcdef"[(value % base) as usize];
            value /= base;
            if value == 0 {
                break;
            }
        }
        self.text(std::str::from_utf8(&digits[first..]).unwrap_or(""));
    }

    fn decimal(&mut self, value: u64) {
        self.number(value, 10);
    }

    fn hexadecimal(&mut self, value: u64) {
        self.number(value, 16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_holds_numbers_and_never_overflows() {
        let mut line = Line { bytes: [0; 160], len: 0 };
        line.decimal(0);
        line.text(" ");
        line.decimal(u64::MAX);
        line.text(" ");
        line.hexadecimal(0xdead_beef);
        assert_eq!(&line.bytes[..line.len], b"0 18446744073709551615 deadbeef");
        for _ in 0..100 {
            line.text("xxxxxxxxxx");
        }
        assert_eq!(line.len, 160);
    }
}
