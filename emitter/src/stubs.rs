//! Transitions between Rust and generated code: the stubs `enter`, `leave` and `abort`.
//!
//! * **enter** saves the host's callee-saved registers, stack pointer and FS base, loads the
//!   guest's FS base, flags and general registers, and jumps to a fragment. The guest's extended
//!   state stays in memory until a fragment that uses it loads it (`extended_away`). Loading and
//!   saving it cost some hundred nanoseconds each. A component that is in its initial state in the
//!   XSAVE image stays in its initial state in hardware (docs/design.md, "Running a guest").
//! * **leave, canonical**: registers are the guest's. They go to `gpr` and `rflags`. The extended
//!   state is saved if it was loaded.
//! * **leave, raw**: registers are a fragment's own. They go to `raw` and `raw_flags`, and a deopt
//!   record says what they mean.
//! * **abort**: no guest code has run. The guest's state in memory is exact.
//!
//! **Invariants.** (1) Flags are read and written only on the host's stack: the guest's stack and
//! red zone are never touched. (2) A signal handler that finds its rip within `enter_window`
//! redirects it to `abort`. Before the window the check of `pending` is still to come; on the way
//! out the caller checks.
//!
//! (3) Both ways of leaving first let the thread make system calls: guest code that runs in place
//! may have entered the fragment, and has its calls blocked (`dispatch_selector`).
//!
//! **Data.** [`Stubs`], addresses that are the same after a fork.
//!
//! **Who calls.** [`crate::EntryPoint::run`], without any lock. A context is only used by its own
//! thread.
//!
//! Example: a thread enters a fragment. After the check of `pending` a signal arrives; the handler
//! sets `pending`, finds rip within `enter_window` and sets it to `abort`. `enter` returns
//! [`ABORTED`], and the runtime delivers the signal.

use crate::asm::{Asm, Assembler, EQUAL, Label, Mem, NOT_EQUAL, RAX, RBP, RBX, RDI, RDX, RSI, RSP};
use crate::cache::{Cache, CacheError};
use crate::cpu::Cpu;
use dynasour_guest::context::{
    HOST_FLAGS, HOST_MXCSR, LOADED_FLAGS, ThreadContext, XSTATE_SIZE, offset,
};
use std::ops::Range;

/// The value of `exit_site` after `enter` left at once because the runtime wanted control.
pub const ABORTED: u64 = u64::MAX;

/// Why the stubs could not be generated.
#[derive(thiserror::Error, Debug)]
pub enum StubError {
    /// The processor or kernel lacks what the transition contract needs.
    #[error("this machine lacks {0}")]
    Missing(&'static str),
    /// No memory.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Addresses of the generated stubs.
#[derive(Clone, Debug)]
pub struct Stubs {
    /// `extern "sysv64" fn(ctx: *mut ThreadContext, entry: u64) -> exit_site`
    pub enter: u64,
    /// From the check of `pending` to the jump into the fragment: redirect a rip inside to `abort`.
    pub enter_window: Range<u64>,
    /// Back to Rust with nothing changed and `exit_site` = [`ABORTED`].
    pub abort: u64,
    /// Leave with the guest's registers in place.
    pub leave_canonical: u64,
    /// Leave with a fragment's registers.
    pub leave_raw: u64,
    /// All of the stubs.
    pub range: Range<u64>,
}

/// Points this thread's GS base at its context. Once per host thread, before it enters a fragment.
///
/// # Safety
/// FSGSBASE must be enabled (the stubs' generation checks it), and nothing else on the thread may
/// use GS.
pub unsafe fn set_gs(ctx: *mut ThreadContext) {
    // SAFETY: the caller vouches for FSGSBASE; Rust and libc do not use GS on x86-64 Linux.
    unsafe { std::arch::asm!("wrgsbase {}", in(reg) ctx as u64, options(nomem, nostack)) };
}

impl Stubs {
    /// Generates the stubs into the cache.
    pub fn generate(cache: &mut Cache, cpu: &Cpu) -> Result<Stubs, StubError> {
        if !cpu.fsgsbase {
            return Err(StubError::Missing("user-mode FSGSBASE instructions"));
        }
        if cpu.xstate_mask & 3 != 3 || cpu.xstate_size > XSTATE_SIZE {
            return Err(StubError::Missing("XSAVE with a known state size"));
        }
        let mut code = Asm::new();
        let (save, host, abort) = (code.label(), code.label(), code.label());
        let enter = code.bound();
        let window = enter_stub(&mut code, abort);
        let window_end = code.bound();
        code.nop(1);
        let canonical = code.bound();
        leave(&mut code, offset::GPR, offset::RFLAGS);
        code.jmp_near(save);
        let raw = code.bound();
        leave(&mut code, offset::RAW, offset::RAW_FLAGS);
        code.bind(save);
        save_extended(&mut code, cpu);
        code.bind(host);
        host_state(&mut code);
        code.bind(abort);
        code.load(RSP, offset::HOST_RSP);
        code.store_constant(offset::EXIT_SITE, ABORTED as u32);
        code.jmp_short(host);
        let end = code.bound();
        let placed = cache.put_stubs(code)?;
        Ok(Stubs {
            enter: placed.at(enter),
            enter_window: placed.range(window, window_end),
            abort: placed.at(abort),
            leave_canonical: placed.at(canonical),
            leave_raw: placed.at(raw),
            range: placed.range(enter, end),
        })
    }

    /// Runs the fragment code at `entry` with the guest state in `ctx` until it leaves; returns
    /// `exit_site`.
    ///
    /// # Safety
    /// `entry` is a fragment's entry in the cache of these stubs, `ctx` is this thread's context
    /// and GS points to it ([`set_gs`]). The code then runs with the guest's authority over the
    /// whole address space.
    pub unsafe fn enter(&self, ctx: *mut ThreadContext, entry: u64) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { enter(self.enter, ctx, entry) }
    }
}

/// The callee-saved registers of the host's calling convention.
const CALLEE_SAVED: [u8; 6] = [RBX, RBP, 12, 13, 14, 15];

/// All registers but the stack pointer.
fn general_registers() -> impl Iterator<Item = u8> {
    (0..16).filter(|r| *r != RSP)
}

/// From the host to the fragment at rsi. Returns the start of the window, which ends with the jump
/// there.
fn enter_stub(code: &mut Asm<u64>, abort: Label) -> Label {
    CALLEE_SAVED.into_iter().for_each(|r| code.push(r));
    code.store(RSP, offset::HOST_RSP);
    code.rdfsbase(RAX);
    code.store(RAX, offset::HOST_FS_BASE);
    code.store(RSI, offset::STUB_SAVE);
    code.store_constant(offset::EXTENDED_AWAY, 1);
    code.load(RAX, offset::FS_BASE);
    code.wrfsbase(RAX);
    let window = code.bound();
    code.cmp_zero(false, Mem::context(offset::PENDING));
    code.jcc_to(NOT_EQUAL, abort);
    code.load(RAX, offset::RFLAGS);
    code.and_eax(LOADED_FLAGS);
    code.or_eax(HOST_FLAGS);
    code.push(RAX);
    code.popfq();
    general_registers().for_each(|r| code.load(r, offset::GPR + 8 * usize::from(r)));
    code.load(RSP, offset::GPR + 8 * usize::from(RSP));
    code.jmp_through(Mem::context(offset::STUB_SAVE));
    window
}

/// Stores the registers from the field `registers` on, and the flags, which are read on the host's
/// stack.
fn leave(code: &mut Asm<u64>, registers: usize, flags: usize) {
    // Host code may make system calls.
    code.store_byte(offset::DISPATCH_SELECTOR, 0);
    (0..16).for_each(|r| code.store(r, registers + 8 * usize::from(r)));
    code.load(RSP, offset::HOST_RSP);
    code.pushfq();
    code.pop_to(Mem::context(flags));
}

/// Saves the guest's extended state unless memory still holds it, and loads the host's.
fn save_extended(code: &mut Asm<u64>, cpu: &Cpu) {
    let is_away = code.label();
    code.cmp_zero(true, Mem::context(offset::EXTENDED_AWAY));
    code.jcc_short(NOT_EQUAL, is_away);
    code.mov_imm_32(RAX, cpu.xstate_mask as u32);
    code.mov_imm_32(RDX, (cpu.xstate_mask >> 32) as u32);
    code.load(RDI, offset::THIS);
    code.xsave64(Mem::at(RDI).plus(offset::XSTATE as i32));
    if cpu.avx {
        code.vzeroupper();
    }
    // `fninit` takes 25 ns (measured), and most guests do not use the x87.
    code.store_constant(offset::X87_IS_INITIAL, 1);
    code.test_lowest_bit(Mem::at(RDI).plus(offset::XSTATE_BV as i32));
    code.jcc_short(EQUAL, is_away);
    // It keeps the contents of the registers.
    code.store_constant(offset::X87_IS_INITIAL, 0);
    code.fninit();
    // A signal may have interrupted the thread while it loaded the guest's state.
    code.bind(is_away);
    code.push_imm(HOST_MXCSR as i32);
    code.ldmxcsr(Mem::at(RSP));
    code.pop(RAX);
}

/// The host's flags, FS base and callee-saved registers, and back to Rust.
fn host_state(code: &mut Asm<u64>) {
    code.push_imm(HOST_FLAGS as i32);
    code.popfq();
    code.load(RAX, offset::HOST_FS_BASE);
    code.wrfsbase(RAX);
    code.load(RAX, offset::EXIT_SITE);
    CALLEE_SAVED.into_iter().rev().for_each(|r| code.pop(r));
    code.ret();
}

/// As [`Stubs::enter`], for the stub at `stub`.
///
/// # Safety
/// The promise of [`Stubs::enter`]; `stub` is that emitter's stub.
pub(crate) unsafe fn enter(stub: u64, ctx: *mut ThreadContext, entry: u64) -> u64 {
    // SAFETY: the address of a stub generated above with exactly this signature; the rest is the
    // caller's promise.
    unsafe {
        let f: unsafe extern "sysv64" fn(*mut ThreadContext, u64) -> u64 =
            std::mem::transmute(stub);
        f(ctx, entry)
    }
}
