//! Transitions between Rust and fragments: the generated stubs `enter`, `leave` and `abort`.
//!
//! * **enter** saves the host's callee-saved registers, stack pointer and FS base, restores the guest's FS base, flags
//!   and general registers, and jumps to a fragment. The guest's extended state stays in memory until a fragment that
//!   uses it loads it (`extended_away`); leaving saves it only then. Both cost some hundred nanoseconds. What is in
//!   its initial state in the XSAVE image stays so in hardware (DESIGN section 12, "a trap").
//! * **leave, canonical**: registers are the guest's; they go to `gpr` and `rflags`.
//! * **leave, raw**: registers are a fragment's own; they go to `raw` and `raw_flags`, and a deopt record tells
//!   what they mean.
//! * **abort**: nothing of the guest has run; its state in memory is still exact.
//!
//! Flags are read only after switching to the host stack: the guest's stack and red zone are never touched.
//! A signal handler that finds its rip within `enter_window` redirects it to `abort`; elsewhere on the way in the
//! check of `pending` is still to come, and on the way out the caller checks.

use crate::cache::{Cache, CacheError};
use crate::cpu::Cpu;
use dynasour_guest::context::{ThreadContext, offset};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use std::ops::Range;

/// The value of `exit_site` after `enter` left at once because the runtime wanted control.
pub const ABORTED: u64 = u64::MAX;

/// The user-visible rflags that `enter` loads: the arithmetic flags, DF, AC and ID.
const LOADED_FLAGS: i32 = 0x24_0cd5;

/// Why the stubs could not be generated.
#[derive(thiserror::Error, Debug)]
pub enum StubError {
    /// The processor or kernel lacks what the transition contract needs.
    #[error("this machine lacks {0}")]
    Missing(&'static str),
    /// No memory.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The assembler refused.
    #[error("cannot assemble the transition stubs: {0}")]
    Assemble(#[from] IcedError),
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
/// FSGSBASE must be enabled (the stubs' generation checks it), and nothing else on the thread may use GS.
pub unsafe fn set_gs(ctx: *mut ThreadContext) {
    // SAFETY: the caller vouches for FSGSBASE; Rust and libc do not use GS on x86-64 Linux.
    unsafe { std::arch::asm!("wrgsbase {}", in(reg) ctx as u64, options(nomem, nostack)) };
}

const REGISTERS: [AsmRegister64; 16] = [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15];
const CALLEE_SAVED: [AsmRegister64; 6] = [rbx, rbp, r12, r13, r14, r15];
const RSP: usize = 4;

fn field(at: usize) -> AsmMemoryOperand {
    qword_ptr(at as u64).gs()
}

impl Stubs {
    /// Generates the stubs into the cache.
    pub fn generate(cache: &mut Cache, cpu: &Cpu) -> Result<Stubs, StubError> {
        if !cpu.fsgsbase {
            return Err(StubError::Missing("user-mode FSGSBASE instructions"));
        }
        if cpu.xstate_mask & 3 != 3 || cpu.xstate_size > dynasour_guest::context::XSTATE_SIZE {
            return Err(StubError::Missing("XSAVE with a known state size"));
        }
        let mut a = CodeAssembler::new(64)?;
        let [mut enter, mut window, mut window_end, mut abort, mut canonical, mut raw, mut save, mut host] =
            std::array::from_fn(|_| a.create_label());
        let mask = |a: &mut CodeAssembler| -> Result<(), IcedError> {
            a.mov(eax, cpu.xstate_mask as u32)?;
            a.mov(edx, (cpu.xstate_mask >> 32) as u32)
        };

        a.set_label(&mut enter)?;
        for r in CALLEE_SAVED {
            a.push(r)?;
        }
        a.mov(field(offset::HOST_RSP), rsp)?;
        a.rdfsbase(rax)?;
        a.mov(field(offset::HOST_FS_BASE), rax)?;
        a.mov(field(offset::STUB_SAVE), rsi)?;
        a.mov(field(offset::EXTENDED_AWAY), 1)?;
        a.mov(rax, field(offset::FS_BASE))?;
        a.wrfsbase(rax)?;
        a.set_label(&mut window)?;
        a.cmp(dword_ptr(offset::PENDING as u64).gs(), 0)?;
        a.jne(abort)?;
        a.mov(rax, field(offset::RFLAGS))?;
        a.and(eax, LOADED_FLAGS)?;
        a.or(eax, 0x202)?;
        a.push(rax)?;
        a.popfq()?;
        for (i, r) in REGISTERS.into_iter().enumerate().filter(|(i, _)| *i != RSP) {
            a.mov(r, field(offset::GPR + 8 * i))?;
        }
        a.mov(rsp, field(offset::GPR + 8 * RSP))?;
        a.jmp(field(offset::STUB_SAVE))?;
        a.set_label(&mut window_end)?;
        a.nop()?;

        for (label, registers, flags) in
            [(&mut canonical, offset::GPR, offset::RFLAGS), (&mut raw, offset::RAW, offset::RAW_FLAGS)]
        {
            a.set_label(label)?;
            for (i, r) in REGISTERS.into_iter().enumerate() {
                a.mov(field(registers + 8 * i), r)?;
            }
            a.mov(rsp, field(offset::HOST_RSP))?;
            a.pushfq()?;
            a.pop(field(flags))?;
            a.jmp(save)?;
        }

        a.set_label(&mut save)?;
        a.cmp(field(offset::EXTENDED_AWAY), 0)?;
        a.jne(host)?;
        mask(&mut a)?;
        a.mov(rdi, field(offset::THIS))?;
        a.xsave64(ptr(rdi + offset::XSTATE as i32))?;
        if cpu.avx {
            a.vzeroupper()?;
        }
        a.fninit()?;
        a.push(0x1f80)?;
        a.ldmxcsr(dword_ptr(rsp))?;
        a.pop(rax)?;
        a.set_label(&mut host)?;
        a.push(0x202)?;
        a.popfq()?;
        a.mov(rax, field(offset::HOST_FS_BASE))?;
        a.wrfsbase(rax)?;
        a.mov(rax, field(offset::EXIT_SITE))?;
        for r in CALLEE_SAVED.into_iter().rev() {
            a.pop(r)?;
        }
        a.ret()?;

        a.set_label(&mut abort)?;
        a.mov(rsp, field(offset::HOST_RSP))?;
        a.mov(field(offset::EXIT_SITE), -1)?;
        a.jmp(host)?;

        // Short and near branches may change the size; two assemblies at the final address settle it.
        let size = a.assemble(0x2000_0000)?.len();
        let base = cache.alloc_hot(size + 16, 64)?;
        let result = a.assemble_options(base, iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)?;
        let bytes = &result.inner.code_buffer;
        cache.write(base, bytes);
        let at = |l: &CodeLabel| result.label_ip(l);
        Ok(Stubs {
            enter: at(&enter)?,
            enter_window: at(&window)?..at(&window_end)?,
            abort: at(&abort)?,
            leave_canonical: at(&canonical)?,
            leave_raw: at(&raw)?,
            range: base..base + bytes.len() as u64,
        })
    }

    /// Runs the fragment code at `entry` with the guest state in `ctx` until it leaves; returns `exit_site`.
    ///
    /// # Safety
    /// `entry` is a fragment's entry in the cache of these stubs, `ctx` is this thread's context and GS points to
    /// it ([`set_gs`]). The code then runs with the guest's authority over the whole address space.
    pub unsafe fn enter(&self, ctx: *mut ThreadContext, entry: u64) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { enter(self.enter, ctx, entry) }
    }
}

/// As [`Stubs::enter`], for the stub at `stub`.
///
/// # Safety
/// As there.
pub(crate) unsafe fn enter(stub: u64, ctx: *mut ThreadContext, entry: u64) -> u64 {
    // SAFETY: the address of a stub generated above with exactly this signature; the rest is the caller's promise.
    unsafe {
        let f: unsafe extern "sysv64" fn(*mut ThreadContext, u64) -> u64 = std::mem::transmute(stub);
        f(ctx, entry)
    }
}
