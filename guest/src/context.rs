//! The state of one guest thread, as memory: the GS base points to it while guest code runs.
//!
//! *Data.* Each guest thread owns one [`ThreadContext`]. It holds the guest's registers, the fields
//! through which generated code and the runtime exchange values, the spill slots, and the extended
//! state (x87, SSE, AVX, AVX-512).
//!
//! *Invariants.*
//! * Outside the interpreter and outside fragments the guest's exact state is `gpr`, `rip`,
//!   `rflags`, `fs_base`, `gs_base` and `xstate`.
//! * Generated code and assembly address the fields by constant offsets (`gs:[offset]`, see
//!   [`offset`]). So the struct is `repr(C)`, and the registers stand within the first 128
//!   bytes, where a one-byte displacement reaches them.
//! * All fields are plain data for which all-zero bytes are valid.
//!
//! *Access.* Only the thread that the context belongs to uses it, without a lock. The exceptions
//! are the atomic fields, which the thread's signal handler writes, too.
//!
//! *Example.* A fragment that leaves through an indirect jump stores the target with `mov
//! gs:[NEXT_PC], rcx`; the dispatcher then reads `context.next_pc`.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Bytes reserved for the extended state: the standard (non-compacted) XSAVE layout of every user
/// component of the processors that we know, AMX tile data included (11,008 bytes by cpuid leaf
/// 0xd; rounded up). An area that is too small would be overrun by `xsave`.
pub const XSTATE_SIZE: usize = 12 * 1024;

/// Words of scratch memory: spill slots of fragments, temporaries of the interpreter (guess; a
/// trace that needs more cannot be emitted).
pub const SCRATCH_WORDS: usize = 2048;

/// Words in [`ThreadContext::landings`]: a power of two, since bits of the stack pointer index it
/// (guess; with fewer, deep call chains overwrite each other's entries and returns take the slow
/// way).
pub const LANDINGS: usize = 1 << 13;

/// Words in [`ThreadContext::race`].
pub const RACE_WORDS: usize = 5;

/// Words in [`ThreadContext::loop_starts`] (guess: a word of each trace that races; later loops count in
/// [`ThreadContext::race`]).
pub const LOOP_WORDS: usize = 1024;

/// The trap flag of rflags (manual: SDM volume 1, 3.4.3.3): a trap after each instruction.
pub const TRAP_FLAG: u64 = 0x100;
/// The nested-task flag of rflags (manual: SDM volume 1, 3.4.3.3): without effect for user code, and cleared by
/// the kernel for a signal handler and when that returns.
pub const NESTED_TASK_FLAG: u64 = 0x4000;
/// The user-visible rflags that are loaded when guest code is entered: the arithmetic flags, DF, AC
/// and ID.
pub const LOADED_FLAGS: u32 = 0x24_0cd5;
/// The flags of the host's code: IF and the bit that is always set.
pub const HOST_FLAGS: u32 = 0x202;
/// The host's MXCSR, as the ABI has it at the start of a process.
pub const HOST_MXCSR: u32 = 0x1f80;

/// An XSAVE area in the standard format (Intel SDM vol. 1, 13.4).
#[repr(C, align(64))]
pub struct XState(pub [u8; XSTATE_SIZE]);

/// The state of one guest thread.
#[repr(C, align(64))]
pub struct ThreadContext {
    /// General-purpose registers in encoding order (rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi,
    /// r8..r15).
    pub gpr: [u64; 16],
    /// The guest pc.
    pub rip: u64,
    /// The full rflags image.
    pub rflags: u64,
    /// Guest FS base.
    pub fs_base: u64,
    /// Guest GS base.
    pub gs_base: u64,
    /// This structure's own address (`mov reg, gs:[this]`).
    pub this: u64,
    /// Host stack pointer to return to when leaving guest code.
    pub host_rsp: u64,
    /// Host FS base (thread-local storage of Rust and libc).
    pub host_fs_base: u64,
    /// The exit through which a fragment left (an exit id of the emitter).
    pub exit_site: u64,
    /// Host registers as a fragment left them, in encoding order, for evaluating a deopt record.
    pub raw: [u64; 16],
    /// Host rflags as a fragment left them.
    pub raw_flags: u64,
    /// Target of the indirect exit that was taken last.
    pub next_pc: u64,
    /// The guest pc of the indirect jump, call or return that used `next_pc` last. Only code that
    /// counts indirect transfers stores it.
    pub transfer: u64,
    /// Always 1: an operand for code that must compare without changing flags.
    pub one: u64,
    /// Nonzero when the runtime wants control at the next safe point (a signal was accepted).
    pub pending: AtomicU32,
    /// The fragment or block whose links this thread's signal handler has cut; 0 if none. The
    /// runtime defines the encoding and links the code again when the thread has left it.
    pub unlinked: AtomicU32,
    /// The selector of syscall user dispatch (manual: prctl(2)): 0 allows the thread's system calls,
    /// 1 makes each raise SIGSYS. It is 1 only while guest code runs in place.
    pub dispatch_selector: AtomicU8,
    /// 1 if guest code has run in place since the runtime was left. Ways out of native code store it
    /// together with the selector and the two bytes of padding that follow.
    pub went_in_place: AtomicU8,
    /// Why guest code that ran in place was left; the runtime defines the values.
    pub in_place_left: AtomicU64,
    /// The guest pc at which it was left.
    pub in_place_rip: AtomicU64,
    /// The flags that the guest had when it was left and that the host must not have.
    pub in_place_flags: AtomicU64,
    /// The host address at which the thread was sampled in copied blocks or a trace, if that was since the runtime has
    /// looked; else 0.
    pub sampled: AtomicU64,
    /// What the thread has counted for a race, and whether it counts twice. The emitter says which word is
    /// what.
    pub race: [AtomicU64; RACE_WORDS],
    /// Does a sample bring the thread out of the code cache?
    pub comes_out: AtomicBool,
    /// Short-lived save slots of stubs.
    pub stub_save: [u64; 8],
    /// While a fragment runs: 0 if the guest's extended state is in the processor, 1 if it is still
    /// in `xstate` (it is loaded only by fragments that use it).
    pub extended_away: u64,
    /// 1 if the x87 state in the processor is certainly the initial one while the extended state is away, registers
    /// that are empty included. Then loading may leave it out.
    pub x87_is_initial: u64,
    /// Spill slots of fragments and temporaries of the interpreter.
    pub scratch: [u64; SCRATCH_WORDS],
    /// Extended state: x87, SSE, AVX, AVX-512, MXCSR.
    pub xstate: XState,
    /// The accesses that the guest has denied itself for protection key 0 (bits 0 and 1 of PKRU).
    /// The rights of the other keys are in the processor's register.
    pub withheld_rights: u32,
    /// Address of the runtime's signal state of this thread, for signal handlers; 0 before there is
    /// one.
    pub signals: u64,
    /// Address in the code cache of the instruction that faulted, as the signal handler found it.
    pub fault_rip: u64,
    /// The guest pc of the last x87 instruction that is not a control instruction: what FIP would
    /// be on the processor. The register itself, and `xstate`, may hold the address of a copy of
    /// that instruction instead. 0 after `fninit`; else what the guest loaded last.
    pub x87_pc: u64,
    /// The memory operand of the last x87 instruction that had one and that the interpreter
    /// executed. It is known as long as `x87_pc` is `x87_data_after`: no other code has executed an
    /// x87 instruction since.
    pub x87_data: u64,
    /// The x87 instruction that the interpreter executed last.
    pub x87_data_after: u64,
    /// The generation of the return stubs for which [`ThreadContext::landings`] is filled in; 0 if
    /// it is not filled in.
    pub landings_of: u64,
    /// A *landing* is the host address to which the return of a copied call goes. This table holds,
    /// indexed by some bits of the guest's stack pointer, the landings of the calls that have not
    /// returned yet.
    pub landings: [u32; LANDINGS],
    /// What loops have counted that count starts by themselves, each in a word of its own. Only
    /// differences mean something.
    pub loop_starts: [AtomicU64; LOOP_WORDS],
}

/// Memory for one context.
struct First(UnsafeCell<MaybeUninit<ThreadContext>>);

// SAFETY: `ThreadContext::first` gives out the only reference.
unsafe impl Sync for First {}

/// Byte offsets of the fields that generated code uses.
pub mod offset {
    use super::ThreadContext;
    use memoffset::offset_of;

    /// `gpr[0]`
    pub const GPR: usize = offset_of!(ThreadContext, gpr);
    /// `rip`
    pub const RIP: usize = offset_of!(ThreadContext, rip);
    /// `rflags`
    pub const RFLAGS: usize = offset_of!(ThreadContext, rflags);
    /// `fs_base`
    pub const FS_BASE: usize = offset_of!(ThreadContext, fs_base);
    /// `gs_base`
    pub const GS_BASE: usize = offset_of!(ThreadContext, gs_base);
    /// `this`
    pub const THIS: usize = offset_of!(ThreadContext, this);
    /// `host_rsp`
    pub const HOST_RSP: usize = offset_of!(ThreadContext, host_rsp);
    /// `host_fs_base`
    pub const HOST_FS_BASE: usize = offset_of!(ThreadContext, host_fs_base);
    /// `exit_site`
    pub const EXIT_SITE: usize = offset_of!(ThreadContext, exit_site);
    /// `raw[0]`
    pub const RAW: usize = offset_of!(ThreadContext, raw);
    /// `raw_flags`
    pub const RAW_FLAGS: usize = offset_of!(ThreadContext, raw_flags);
    /// `next_pc`
    pub const NEXT_PC: usize = offset_of!(ThreadContext, next_pc);
    /// `transfer`
    pub const TRANSFER: usize = offset_of!(ThreadContext, transfer);
    /// `one`
    pub const ONE: usize = offset_of!(ThreadContext, one);
    /// `x87_pc`
    pub const X87_PC: usize = offset_of!(ThreadContext, x87_pc);
    /// `pending`
    pub const PENDING: usize = offset_of!(ThreadContext, pending);
    /// `dispatch_selector`
    pub const DISPATCH_SELECTOR: usize = offset_of!(ThreadContext, dispatch_selector);
    /// `in_place_left`
    pub const IN_PLACE_LEFT: usize = offset_of!(ThreadContext, in_place_left);
    /// `in_place_rip`
    pub const IN_PLACE_RIP: usize = offset_of!(ThreadContext, in_place_rip);
    /// `in_place_flags`
    pub const IN_PLACE_FLAGS: usize = offset_of!(ThreadContext, in_place_flags);
    /// `extended_away`
    pub const EXTENDED_AWAY: usize = offset_of!(ThreadContext, extended_away);
    /// `x87_is_initial`
    pub const X87_IS_INITIAL: usize = offset_of!(ThreadContext, x87_is_initial);
    /// `race[0]`
    pub const RACE: usize = offset_of!(ThreadContext, race);
    /// `stub_save[0]`
    pub const STUB_SAVE: usize = offset_of!(ThreadContext, stub_save);
    /// `scratch[0]`
    pub const SCRATCH: usize = offset_of!(ThreadContext, scratch);
    /// `xstate`
    pub const XSTATE: usize = offset_of!(ThreadContext, xstate);
    /// MXCSR in `xstate`
    pub const MXCSR: usize = XSTATE + 24;
    /// XMM0 in `xstate`
    pub const XMM: usize = XSTATE + 160;
    /// XSTATE_BV in `xstate`, which says which components are in use. Bit 0 is clear if the x87
    /// state is the initial one (Intel SDM vol. 1, 13.4.2)
    pub const XSTATE_BV: usize = XSTATE + 512;
    /// `fault_rip`
    pub const FAULT_RIP: usize = offset_of!(ThreadContext, fault_rip);
    /// `landings[0]`
    pub const LANDINGS: usize = offset_of!(ThreadContext, landings);
    /// `loop_starts[0]`
    pub const LOOP_STARTS: usize = offset_of!(ThreadContext, loop_starts);
}

impl ThreadContext {
    /// Puts the x87 data pointer, if it is known, into the extended state, if it is not there:
    /// AMD's processors save it only while an exception is pending.
    pub fn put_x87_data(&mut self) {
        const DATA: std::ops::Range<usize> = 16..24;
        if self.x87_data_after == self.x87_pc && self.xstate.0[DATA] == [0; 8] {
            self.xstate.0[DATA].copy_from_slice(&self.x87_data.to_le_bytes());
        }
    }

    /// A context with all registers zero, rflags 0x202, and the extended state in its initial
    /// configuration (MXCSR 0x1f80, x87 control word 0x37f), which is what a new process has.
    pub fn new() -> Box<ThreadContext> {
        // SAFETY: every field is plain data for which all-zero bytes are a valid value.
        let mut context: Box<ThreadContext> =
            unsafe { Box::<ThreadContext>::new_zeroed().assume_init() };
        context.initialise();
        context
    }

    /// The context of the first thread: one of the process, as [`ThreadContext::new`] makes it. It
    /// lies in memory that the kernel zeroes when it is touched, and most of it is not touched in a
    /// short program.
    ///
    /// # Panics
    /// It was taken before.
    pub fn first() -> &'static mut ThreadContext {
        static FIRST: First = First(UnsafeCell::new(MaybeUninit::zeroed()));
        static TAKEN: AtomicBool = AtomicBool::new(false);
        assert!(!TAKEN.swap(true, Ordering::Relaxed), "there is one first thread");
        // SAFETY: nothing else refers to it, and zeros are a valid value, as in `new`.
        let context = unsafe { (*FIRST.0.get()).assume_init_mut() };
        context.initialise();
        context
    }

    /// Resets the context to the state of a new process.
    pub fn clear(&mut self) {
        // SAFETY: as in `new`. The fields from `landings` on may keep old values: `landings_of` is
        // 0 now, so nothing reads them, and of counts only differences mean something.
        unsafe {
            std::ptr::write_bytes(std::ptr::from_mut(self).cast::<u8>(), 0, offset::LANDINGS)
        };
        self.initialise();
    }

    fn initialise(&mut self) {
        self.this = std::ptr::from_mut(self) as u64;
        self.rflags = 0x202;
        self.one = 1;
        self.xstate.0[0..2].copy_from_slice(&0x37fu16.to_le_bytes());
        self.xstate.0[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xsave_area_is_aligned() {
        assert_eq!(offset::XSTATE % 64, 0);
        let context = ThreadContext::new();
        assert_eq!(context.this, std::ptr::from_ref(&*context) as u64);
    }
}
