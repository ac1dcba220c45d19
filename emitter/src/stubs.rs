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
use crate::template::{Label, Template};
use dynasour_guest::context::{ThreadContext, offset};
use std::arch::global_asm;
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

/// What stands where in the assembled stubs. Fields end at their labels.
#[repr(C)]
struct Labels {
    enter: Label,
    window: Label,
    window_end: Label,
    canonical: Label,
    raw: Label,
    mask_low: Label,
    mask_high: Label,
    vzeroupper: Label,
    abort: Label,
    end: Label,
}

unsafe extern "C" {
    #[link_name = "dynasour_stubs"]
    static CODE: u8;
    #[link_name = "dynasour_stubs_labels"]
    static LABELS: Labels;
}

/// Stores all registers from `gs:[AT]` on.
macro_rules! store_registers {
    ($at:literal) => {
        concat!(
            "mov gs:[",
            $at,
            " + 8 * 0], rax\n mov gs:[",
            $at,
            " + 8 * 1], rcx\n mov gs:[",
            $at,
            " + 8 * 2], rdx\n",
            "mov gs:[",
            $at,
            " + 8 * 3], rbx\n mov gs:[",
            $at,
            " + 8 * 4], rsp\n mov gs:[",
            $at,
            " + 8 * 5], rbp\n",
            "mov gs:[",
            $at,
            " + 8 * 6], rsi\n mov gs:[",
            $at,
            " + 8 * 7], rdi\n mov gs:[",
            $at,
            " + 8 * 8], r8\n",
            "mov gs:[",
            $at,
            " + 8 * 9], r9\n mov gs:[",
            $at,
            " + 8 * 10], r10\n mov gs:[",
            $at,
            " + 8 * 11], r11\n",
            "mov gs:[",
            $at,
            " + 8 * 12], r12\n mov gs:[",
            $at,
            " + 8 * 13], r13\n mov gs:[",
            $at,
            " + 8 * 14], r14\n",
            "mov gs:[",
            $at,
            " + 8 * 15], r15",
        )
    };
}

global_asm!(
    ".pushsection .rodata.dynasour_stubs, \"a\", @progbits",
    ".globl dynasour_stubs, dynasour_stubs_labels",
    ".hidden dynasour_stubs, dynasour_stubs_labels",
    "dynasour_stubs:",

    ".Lenter:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov gs:[{HOST_RSP}], rsp",
    "rdfsbase rax",
    "mov gs:[{HOST_FS_BASE}], rax",
    "mov gs:[{STUB_SAVE}], rsi",
    "mov qword ptr gs:[{EXTENDED_AWAY}], 1",
    "mov rax, gs:[{FS_BASE}]",
    "wrfsbase rax",
    ".Lwindow:",
    "cmp dword ptr gs:[{PENDING}], 0",
    "jne .Labort",
    "mov rax, gs:[{RFLAGS}]",
    "and eax, {LOADED_FLAGS}",
    "or eax, 0x202",
    "push rax",
    "popfq",
    "mov rax, gs:[{GPR} + 8 * 0]",
    "mov rcx, gs:[{GPR} + 8 * 1]",
    "mov rdx, gs:[{GPR} + 8 * 2]",
    "mov rbx, gs:[{GPR} + 8 * 3]",
    "mov rbp, gs:[{GPR} + 8 * 5]",
    "mov rsi, gs:[{GPR} + 8 * 6]",
    "mov rdi, gs:[{GPR} + 8 * 7]",
    "mov r8, gs:[{GPR} + 8 * 8]",
    "mov r9, gs:[{GPR} + 8 * 9]",
    "mov r10, gs:[{GPR} + 8 * 10]",
    "mov r11, gs:[{GPR} + 8 * 11]",
    "mov r12, gs:[{GPR} + 8 * 12]",
    "mov r13, gs:[{GPR} + 8 * 13]",
    "mov r14, gs:[{GPR} + 8 * 14]",
    "mov r15, gs:[{GPR} + 8 * 15]",
    "mov rsp, gs:[{GPR} + 8 * 4]",
    "jmp qword ptr gs:[{STUB_SAVE}]",
    ".Lwindow_end:",
    "nop",

    ".Lcanonical:",
    store_registers!("{GPR}"),
    "mov rsp, gs:[{HOST_RSP}]",
    "pushfq",
    "pop qword ptr gs:[{RFLAGS}]",
    "jmp .Lsave",

    ".Lraw:",
    store_registers!("{RAW}"),
    "mov rsp, gs:[{HOST_RSP}]",
    "pushfq",
    "pop qword ptr gs:[{RAW_FLAGS}]",

    ".Lsave:",
    "cmp qword ptr gs:[{EXTENDED_AWAY}], 0",
    "jne .Lhost",
    "mov eax, 0x11111111",
    ".Lmask_low:",
    "mov edx, 0x11111111",
    ".Lmask_high:",
    "mov rdi, gs:[{THIS}]",
    "xsave64 [rdi + {XSTATE}]",
    ".byte 0xc5, 0xf8, 0x77", // vzeroupper, where there is that
    ".Lvzeroupper:",
    "fninit",
    "push 0x1f80",
    "ldmxcsr [rsp]",
    "pop rax",
    ".Lhost:",
    "push 0x202",
    "popfq",
    "mov rax, gs:[{HOST_FS_BASE}]",
    "wrfsbase rax",
    "mov rax, gs:[{EXIT_SITE}]",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",

    ".Labort:",
    "mov rsp, gs:[{HOST_RSP}]",
    "mov qword ptr gs:[{EXIT_SITE}], -1",
    "jmp .Lhost",
    ".Lend:",

    ".balign 4",
    "dynasour_stubs_labels:",
    ".long .Lenter - dynasour_stubs, .Lwindow - dynasour_stubs, .Lwindow_end - dynasour_stubs",
    ".long .Lcanonical - dynasour_stubs, .Lraw - dynasour_stubs",
    ".long .Lmask_low - dynasour_stubs, .Lmask_high - dynasour_stubs, .Lvzeroupper - dynasour_stubs",
    ".long .Labort - dynasour_stubs, .Lend - dynasour_stubs",
    ".popsection",
    GPR = const offset::GPR,
    RFLAGS = const offset::RFLAGS,
    FS_BASE = const offset::FS_BASE,
    THIS = const offset::THIS,
    HOST_RSP = const offset::HOST_RSP,
    HOST_FS_BASE = const offset::HOST_FS_BASE,
    EXIT_SITE = const offset::EXIT_SITE,
    RAW = const offset::RAW,
    RAW_FLAGS = const offset::RAW_FLAGS,
    PENDING = const offset::PENDING,
    EXTENDED_AWAY = const offset::EXTENDED_AWAY,
    STUB_SAVE = const offset::STUB_SAVE,
    XSTATE = const offset::XSTATE,
    LOADED_FLAGS = const LOADED_FLAGS,
);

impl Stubs {
    /// Generates the stubs into the cache.
    pub fn generate(cache: &mut Cache, cpu: &Cpu) -> Result<Stubs, StubError> {
        if !cpu.fsgsbase {
            return Err(StubError::Missing("user-mode FSGSBASE instructions"));
        }
        if cpu.xstate_mask & 3 != 3 || cpu.xstate_size > dynasour_guest::context::XSTATE_SIZE {
            return Err(StubError::Missing("XSAVE with a known state size"));
        }
        // SAFETY: constants, made above.
        let (labels, mut code) = unsafe { (&LABELS, Template::new(&raw const CODE, LABELS.end)) };
        code.fill(labels.mask_low, cpu.xstate_mask as u32);
        code.fill(labels.mask_high, (cpu.xstate_mask >> 32) as u32);
        if !cpu.avx {
            code.drop_three(labels.vzeroupper);
        }
        let placed = code.place(cache)?;
        code.write(placed, cache);
        Ok(Stubs {
            enter: placed.at(labels.enter),
            enter_window: placed.at(labels.window)..placed.at(labels.window_end),
            abort: placed.at(labels.abort),
            leave_canonical: placed.at(labels.canonical),
            leave_raw: placed.at(labels.raw),
            range: placed.base..placed.at(labels.end),
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
