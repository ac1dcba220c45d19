//! The host's signal handler. The kernel calls it, through `dynasour_signal_entry`
//! (`host_entry.rs`), for each signal whose action is [`super::ours`].
//!
//! A **synchronous fault** is expected if its instruction is a guest access of the interpreter, an
//! instruction that runs for the guest, or an access of a fragment. A table or a hook then names
//! the host address at which the thread continues; the handler notes the cause and sets rip. Every
//! other fault is a bug of the translator: the handler reports it in one line and the process dies
//! of the signal.
//!
//! An **asynchronous signal** is accepted: the handler records it in [`SignalState`], blocks every
//! other one in the interrupted frame's mask, sets `ThreadContext::pending` and makes native code
//! leave at its next safe point. If the thread is about to make a system call for the guest, it
//! continues at the way out of the window instead.
//!
//! A thread is **called out** by another thread ([`call_out`]) that needs it outside native code:
//! the handler of the call signal makes it leave as for an asynchronous signal, but records
//! nothing.
//!
//! Data: [`HOOKS`], set once. Everything here runs in the signal handler: on the host's alternate
//! stack, with all signals blocked, without panics.
//!
//! **Locks.** The handler takes two: that of the fragments (in the hooks), and that of the code
//! pages (in [`host::opened_for_host`] and [`host::stored_for_native`]); the latter allocate, too.
//! It takes them only if the interrupted instruction is in the code cache, where a thread holds no
//! lock and is not in the allocator. A fault of the translator's own code is reported without a
//! lock, so the report does not wait. A fault inside the handler kills the process at once, because
//! its signal is blocked.
//!
//! Example: `mov rax, [rdi]` of the interpreter faults at guest address 0x10. `memory::fixup` knows
//! rip and names the address behind the access; the access returns an error there, and the
//! interpreter raises the guest's SIGSEGV ([`GuestFault::from_host_fault`]).

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use dynasour_guest::ThreadContext;

use dynasour_emitter::Diversion;

use super::samples::{self, Source};
use super::{
    SYNCHRONOUS, SigInfo, SignalState, UNBLOCKABLE, held, native_store, precise, set_of, waiting,
};
use crate::changes::host;
use crate::kernel::entry::in_place::{self, Interrupted, Left};
use crate::kernel::entry::{self, Call, Window};
use crate::memory::{self, FaultInfo};

/// The signal of [`call_out`]: one of the six, which are never blocked while the guest runs.
const CALL_SIGNAL: i32 = libc::SIGFPE;
/// The `si_code` of [`call_out`]: negative like those of user space, and used by no library.
const CALL_CODE: i32 = -0x6479_6e61;

/// The `si_code` of a blocked system call (the kernel's `SYS_USER_DISPATCH`).
const SYS_USER_DISPATCH: i32 = 2;
/// The `si_arch` of a call by `int 0x80` (the kernel's `AUDIT_ARCH_I386`).
const AUDIT_ARCH_I386: u32 = 0x4000_0003;

/// Bytes of the host's alternate signal stack, and its alignment (guess; a power of two). If the
/// handler needs more, it faults at the inaccessible page below, and the process dies. The lowest
/// word is the address of the thread's context, for `host_entry.rs`.
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
    /// The page fault address. `None` for other faults; frames then show that of the last page
    /// fault.
    pub cr2: Option<u64>,
    /// `si_pkey`, if a protection key denied the access; else 0.
    pub key: u32,
}

impl GuestFault {
    /// Exception numbers (Intel SDM vol. 3, 6.3.1).
    const DEBUG: u64 = 1;
    const BREAKPOINT: u64 = 3;
    const UNDEFINED: u64 = 6;
    const PROTECTION: u64 = 13;
    const PAGE_FAULT: u64 = 14;

    /// An undefined instruction at `pc`.
    pub fn undefined(pc: u64) -> GuestFault {
        let code = 2; // ILL_ILLOPN, which the kernel uses for every #UD
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

    /// The trap of `int3`; rip is already behind the instruction.
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

    /// The fault of fetching instruction bytes at `addr`. `fault` is the fault of reading them.
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

    /// The fault of fetching instruction bytes at `addr` that can be read but not executed.
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

    /// The guest's fault at `pc`, from the `fault` that the handler has noted at the host
    /// instruction that was executed for it. `context` holds the state before the guest's
    /// instruction.
    pub fn from_host_fault(context: &ThreadContext, pc: u64, fault: &FaultInfo) -> GuestFault {
        GuestFault::at(pc, &precise::of_guest(context, pc, *fault))
    }

    /// The fault that the guest's own instruction at `pc` has caused.
    pub fn at(pc: u64, fault: &FaultInfo) -> GuestFault {
        let page_fault = fault.trapno == Self::PAGE_FAULT;
        // SIGFPE and SIGILL have the instruction's address in `si_addr`: the guest must see its
        // own.
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

    /// The part of the report that says which access was denied, and why.
    pub fn access(&self) -> FaultInfo {
        FaultInfo {
            signal: self.signo,
            code: self.code,
            addr: self.addr,
            error: self.err,
            key: self.key,
            ..FaultInfo::default()
        }
    }
}

/// Functions of the interpreter and of the dispatcher that the handler calls. Each runs in the
/// signal handler.
#[derive(Clone, Copy)]
pub struct FaultHooks {
    /// The address at which to continue after a fault at `host_rip`, if that is in the
    /// interpreter's code for a native instruction.
    pub thunk: fn(host_rip: u64) -> Option<u64>,
    /// The address at which to continue after a fault at `host_rip`, if that is an access of a
    /// fragment that may fault.
    pub fragment: fn(host_rip: u64) -> Option<u64>,
    /// The end of the code cache, if `host_rip` is in it.
    pub cache_end: fn(host_rip: u64) -> Option<u64>,
    /// Called when an asynchronous signal was accepted or the thread was called out, just before
    /// the instruction at `host_rip`. Makes native code leave at its next safe point, or returns
    /// how the thread leaves at once.
    pub accepted: fn(host_rip: u64, context: &ThreadContext) -> Option<Diversion>,
}

static HOOKS: OnceLock<FaultHooks> = OnceLock::new();

/// Gives this thread, whose context is `context`, an alternate signal stack. The first call sets
/// the handler's hooks.
///
/// # Errors
/// There is no memory.
pub fn install(hooks: FaultHooks, context: &ThreadContext) -> std::io::Result<()> {
    let _ = HOOKS.set(hooks);
    let guard = 4096;
    // SAFETY: a fresh mapping, never unmapped, of which the lowest page is made inaccessible.
    unsafe {
        let stack = libc::mmap(
            std::ptr::null_mut(),
            guard + 2 * ALTERNATE_STACK,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        if stack == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let aligned = (stack as u64 + guard as u64).next_multiple_of(ALTERNATE_STACK as u64);
        libc::mprotect((aligned - guard as u64) as *mut _, guard, libc::PROT_NONE);
        use_alternate_stack(aligned, context);
    }
    Ok(())
}

/// Makes the [`ALTERNATE_STACK`] bytes at `stack`, which is aligned to as many, the alternate
/// signal stack of this thread, whose context is `context`.
///
/// # Safety
/// Nothing else may use these bytes while the thread lives.
pub unsafe fn use_alternate_stack(stack: u64, context: &ThreadContext) {
    debug_assert_eq!(stack % ALTERNATE_STACK as u64, 0);
    let ss_sp = stack as *mut libc::c_void;
    // SAFETY: the caller's promise.
    unsafe { ss_sp.cast::<u64>().write(std::ptr::from_ref(context) as u64) };
    let stack = libc::stack_t { ss_sp, ss_flags: 0, ss_size: ALTERNATE_STACK };
    // SAFETY: the caller's promise. It cannot fail: the stack is large, and the thread is not on
    // another one.
    unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) };
}

/// The handler, called by the assembly entry with the host's FS base in place.
///
/// # Safety
/// The arguments are those of the kernel, and the context to which the GS base points.
pub unsafe extern "C" fn on_signal(
    signo: i32,
    info: *const SigInfo,
    frame: *mut libc::ucontext_t,
    context: *const ThreadContext,
) {
    // SAFETY: the kernel passes valid pointers, and the GS base names this thread's context.
    let (info, frame, context) = unsafe { (&*info, &mut *frame, &*context) };
    let rip = rip_of(frame);
    match in_place::interrupted(rip, context) {
        Interrupted::Host => handle(signo, info, frame, context),
        // A trace that guest code in place has entered.
        Interrupted::Guest if is_in_cache(rip) => handle(signo, info, frame, context),
        Interrupted::Entering => {
            in_place::abort(&mut frame.uc_mcontext.gregs[libc::REG_RIP as usize]);
            handle(signo, info, frame, context);
        }
        Interrupted::Guest => {
            let left = left_by(signo, info, frame, context);
            if left == Left::Interrupted {
                handle(signo, info, frame, context);
            }
            let is_timer = samples::source(signo, info, context) == Some(Source::Timer);
            let is_own = is_timer || is_call(signo, info);
            in_place::leave(&mut frame.uc_mcontext.gregs, context, left, is_own);
        }
    }
}

fn rip_of(frame: &libc::ucontext_t) -> u64 {
    frame.uc_mcontext.gregs[libc::REG_RIP as usize] as u64
}

/// Is `rip` in the code cache?
fn is_in_cache(rip: u64) -> bool {
    HOOKS.get().is_some_and(|hooks| (hooks.cache_end)(rip).is_some())
}

/// Is this the signal of [`call_out`]?
fn is_call(signo: i32, info: &SigInfo) -> bool {
    (signo, info.code()) == (CALL_SIGNAL, CALL_CODE)
}

/// Why guest code that ran in place is left by this signal. A fault is noted.
fn left_by(signo: i32, info: &SigInfo, frame: &libc::ucontext_t, context: &ThreadContext) -> Left {
    if signo == libc::SIGSYS && info.code() == SYS_USER_DISPATCH {
        let is_32 = info.architecture() == AUDIT_ARCH_I386;
        return if is_32 { Left::Call32 } else { Left::Call };
    }
    if samples::source(signo, info, context).is_some() {
        return Left::Sample;
    }
    if SYNCHRONOUS & set_of(signo) != 0 && info.code() > 0 {
        memory::note_fault(fault_of(signo, info, &frame.uc_mcontext.gregs));
        return Left::Fault;
    }
    Left::Interrupted
}

/// Handles a signal that has not interrupted guest code in place, or is no reason of its own to
/// leave it.
fn handle(signo: i32, info: &SigInfo, frame: &mut libc::ucontext_t, context: &ThreadContext) {
    // SAFETY: set before handlers were installed; the state lives as long as the context.
    let state = unsafe { &*(context.signals as *const SignalState) };
    if is_call(signo, info) {
        come_out(frame, context);
        return;
    }
    let source = samples::source(signo, info, context);
    if source.is_some() {
        context.sampled.store(rip_of(frame), Ordering::Relaxed);
    }
    match source {
        Some(Source::Event) if context.comes_out.load(Ordering::Relaxed) => {
            return come_out(frame, context);
        }
        Some(Source::Event) => return,
        Some(Source::Timer) if context.pending.load(Ordering::Relaxed) == 0 => {
            if context.comes_out.load(Ordering::Relaxed) && is_in_cache(rip_of(frame)) {
                return divert(frame, context);
            }
            return call_again(frame);
        }
        // A signal of the guest's may have ended the call; or another thread has called this one.
        Some(Source::Timer) => return come_out(frame, context),
        None => {}
    }
    // The kernel's codes for faults are positive. A signal that a process has sent has such a code
    // only if the sender has forged it.
    let is_fault = SYNCHRONOUS & set_of(signo) != 0 && info.code() > 0;
    if !is_fault || !synchronous(signo, info, frame, context, state) {
        asynchronous(signo, info, frame, context, state);
    }
}

/// The kernel's report of a synchronous fault.
fn fault_of(signo: i32, info: &SigInfo, regs: &[i64; 23]) -> FaultInfo {
    FaultInfo {
        signal: signo,
        code: info.code(),
        addr: u64::from_le_bytes(info.0[16..24].try_into().unwrap_or_default()),
        trapno: regs[libc::REG_TRAPNO as usize] as u64,
        error: regs[libc::REG_ERR as usize] as u64,
        cr2: regs[libc::REG_CR2 as usize] as u64,
        key: info.key(),
    }
}

/// Makes the thread continue where a table or a hook says. Returns `false` if none expects a fault
/// at this instruction: the signal may have been sent by a process.
fn synchronous(
    signo: i32,
    info: &SigInfo,
    frame: &mut libc::ucontext_t,
    context: &ThreadContext,
    state: &SignalState,
) -> bool {
    let regs = &mut frame.uc_mcontext.gregs;
    let rip = regs[libc::REG_RIP as usize] as u64;
    let fault = fault_of(signo, info, regs);
    let mut continuation = memory::fixup(rip)
        .or_else(|| entry::fixup(rip))
        .or_else(|| entry::missing_calls_32(rip, fault.trapno, fault.error));
    if let Some(hooks) = HOOKS.get() {
        continuation =
            continuation.or_else(|| (hooks.thunk)(rip)).or_else(|| (hooks.fragment)(rip));
    }
    match continuation {
        Some(continuation) => {
            memory::note_fault(fault);
            regs[libc::REG_RIP as usize] = continuation as i64;
            true
        }
        None if is_store_of_exit(&fault, regs) => {
            context.pending.store(1, Ordering::Relaxed);
            true
        }
        // An unexpected signal is first taken for a forged one, and accepted. If it was a fault of
        // the translator, the same instruction faults again before the signal is delivered; then
        // the next arm reports it.
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

/// Handles the fault of a deferred store that an exit of a fragment performs. The fragment has
/// written to the page before, so the store can fault only because code was translated from the
/// page since. Returns `true` if this was such a store: it has been performed, or is repeated on
/// the page, which is open now.
fn is_store_of_exit(fault: &FaultInfo, regs: &mut [i64; 23]) -> bool {
    let rip = regs[libc::REG_RIP as usize] as u64;
    let Some(end) = HOOKS.get().and_then(|hooks| (hooks.cache_end)(rip)) else { return false };
    let register = |number: usize| {
        let slot = super::frame::ORDER.iter().position(|register| *register == number);
        slot.map_or(0, |slot| regs[slot] as u64)
    };
    // SAFETY: the instruction was executed, and the mapping of the code cache extends to `end`.
    if let Some(store) = unsafe { native_store::at(rip, end, register) }
        && host::stored_for_native(fault, store.address, store.bytes())
    {
        regs[libc::REG_RIP as usize] = store.next as i64;
        return true;
    }
    host::opened_for_host(fault)
}

/// Accepts a signal, or holds it for the process, and makes the thread come out if it can be
/// delivered.
fn asynchronous(
    signo: i32,
    info: &SigInfo,
    frame: &mut libc::ucontext_t,
    context: &ThreadContext,
    state: &SignalState,
) {
    let is_held = SYNCHRONOUS & state.effective_mask() & !state.waiting() & set_of(signo) != 0;
    if is_held && held::is_for_process(info) && waiting::hold_for_process(signo, info) {
        return;
    }
    state.accept(signo, info);
    if SYNCHRONOUS & set_of(signo) != 0 {
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
        // The process was stopped during a call with a timeout (such as nanosleep), and the kernel
        // is about to continue the call by `restart_syscall`. A handler makes the call end with
        // EINTR.
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

/// If a call that the host made for the guest has ended only because of a signal of the host's: has
/// it made again.
fn call_again(frame: &mut libc::ucontext_t) {
    let regs = &mut frame.uc_mcontext.gregs;
    let register = |number: i32| regs[number as usize];
    let (rip, rax) = (register(libc::REG_RIP) as u64, register(libc::REG_RAX));
    // SAFETY: the registers of the interrupted thread.
    let again = unsafe { entry::again(rip, rax, register(libc::REG_RSP) as u64) };
    if let Some((rip, number)) = again {
        regs[libc::REG_RIP as usize] = rip as i64;
        regs[libc::REG_RAX as usize] = number;
    }
}

/// Makes a thread that was called out leave native code. If its caller has also set `pending`, the
/// thread does not make the system call that it is about to make or to restart.
fn come_out(frame: &mut libc::ucontext_t, context: &ThreadContext) {
    let regs = &mut frame.uc_mcontext.gregs;
    let is_outside = entry::window(regs[libc::REG_RIP as usize] as u64) == Window::Outside;
    if is_outside || context.pending.load(Ordering::Relaxed) == 0 {
        divert(frame, context);
    } else {
        regs[libc::REG_RIP as usize] = entry::window_interrupted() as i64;
    }
}

/// Makes the thread leave native code, if it was interrupted there.
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

/// Calls out thread `tid` of process `pid`, which shares this one's memory: makes it leave native
/// code if it is there. `false` if the signal cannot be sent.
pub fn call_out(pid: i32, tid: i32) -> bool {
    let info = SigInfo::of_fault(CALL_SIGNAL, CALL_CODE, 0);
    // SAFETY: reads `info`; the handler of this signal is always the host's.
    unsafe {
        let args = [pid as u64, tid as u64, CALL_SIGNAL as u64, std::ptr::from_ref(&info) as u64];
        entry::raw(&Call::new(libc::SYS_rt_tgsigqueueinfo, &args)) == 0
    }
}

/// Blocks every asynchronous signal when the handler returns.
fn block_asynchronous(frame: &mut libc::ucontext_t) {
    // The kernel's frame has 8 bytes of mask. libc's type is longer, so only its first word may be
    // written.
    let mask = (&raw mut frame.uc_sigmask).cast::<u64>();
    // SAFETY: the word is inside the frame.
    unsafe { mask.write(!SYNCHRONOUS & !UNBLOCKABLE) };
}

/// Writes one line to stderr, without allocating.
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

/// Text in a fixed buffer; what does not fit is dropped. 160 bytes hold the longest report.
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
