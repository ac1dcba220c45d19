//! Executes natives for the interpreter: the guest's original instructions, each in a small
//! generated function, its *thunk*.
//!
//! A thunk is `extern "sysv64" fn(context, address) -> faulted`. It loads the registers that its
//! instruction reads from their slots and from the extended state, executes the instruction, and
//! stores the registers that the instruction writes. The memory operand is rewritten to
//! `[register]`; the interpreter computes the address, with segment base, RIP and address size. If
//! the instruction uses x87, the thunk loads the guest's x87 state before it and resets the
//! processor's after it. MXCSR is the guest's while the interpreter runs.
//!
//! A fault continues at the thunk's *landing*, the code that leaves it with `faulted` = 1. In front
//! of the instruction there is a `nop [rax + disp32]`, whose displacement is the distance from the
//! instruction to the landing. So [`fixup`] needs no table.
//!
//! Data: [`NativePool`], the executable memory with all thunks, and [`NativeOp`], which an
//! operation of the interpreter points to. Equal instructions on equal slots share a thunk.
//!
//! Invariants:
//! * After a fault nothing that the instruction writes has been stored. There are two exceptions.
//!   A restartable instruction stores everything, because its registers tell how far it came. The
//!   x87 state is always stored, because it records the exception.
//! * A vector component that the guest has not used stays marked as unused ([`super::xstate`]),
//!   unless the instruction itself uses it. Each thunk that used VEX or EVEX ends with
//!   `vzeroupper`.
//! * A [`NativeOp`] is not used after its pool was cleared.
//!
//! A pool belongs to one guest thread, which calls it without a lock. [`fixup`] may be called by
//! any thread, also in a signal handler.
//!
//! Example: the thunk of `paddd xmm1, [rdi]` gets the operand's address in rsi. It loads xmm1 from
//! the extended state, executes `paddd xmm1, [rsi]`, stores xmm1 and returns 0.

mod plan;
mod thunk;

use super::pool::{self, Pool};
use super::xstate;
use dynasour_guest::ThreadContext;
use dynasour_guest::lift::class::sets_x87_pointer;
use dynasour_ir::Native;
use iced_x86::{IcedError, Instruction, Mnemonic, Register, RflagsBits};
use plan::Plan;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::io;

/// The six arithmetic flags, as bits of iced's [`RflagsBits`].
pub const ARITHMETIC: u32 = RflagsBits::OF
    | RflagsBits::SF
    | RflagsBits::ZF
    | RflagsBits::AF
    | RflagsBits::CF
    | RflagsBits::PF;
/// The first bytes of `nop dword [rax + disp32]`; the displacement follows.
const LANDING_MARK: [u8; 3] = [0x0f, 0x1f, 0x80];

/// Why a native could not be prepared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NativeError {
    /// The pool is full. The caller drops all blocks, clears the pool and tries again.
    #[error("the pool of native instructions is full")]
    Full,
    /// The kernel gave no executable memory.
    #[error("no memory for native instructions: {0}")]
    Memory(String),
    /// The instruction cannot be encoded with a rewritten memory operand.
    #[error("cannot encode a native instruction: {0}")]
    Encode(String),
    /// The instruction leaves no register for the context or for its address.
    #[error("a native instruction leaves no free register")]
    Registers,
}

impl From<IcedError> for NativeError {
    fn from(e: IcedError) -> NativeError {
        NativeError::Encode(e.to_string())
    }
}

impl From<io::Error> for NativeError {
    fn from(e: io::Error) -> NativeError {
        NativeError::Memory(e.to_string())
    }
}

/// A thunk: takes the context and the address of the memory operand; returns 1 if the instruction
/// faulted, else 0.
type Thunk = unsafe extern "sysv64" fn(*mut ThreadContext, u64) -> u32;

/// How a native is executed.
#[derive(Clone, Copy)]
enum Action {
    Thunk(Thunk),
    /// `vzeroupper`: marks the upper parts of the vector registers as in their initial state. No
    /// register is loaded.
    ZeroUpper,
    /// `vzeroall`: marks vector registers 0 to 15 as in their initial state.
    ZeroAll,
}

/// A native as the interpreter executes it.
pub struct NativeOp {
    action: Action,
    /// Components of the extended state whose bytes must be valid before the thunk runs.
    components: u64,
    /// Set if the instruction sets the x87 pointers.
    x87: Option<X87>,
}

/// An instruction that sets the x87 pointers.
#[derive(Clone, Copy)]
struct X87 {
    /// Its pc in the guest.
    pc: u64,
    /// Does it have a memory operand?
    has_memory: bool,
}

impl X87 {
    /// Sets the guest's x87 pointers after the instruction, whose memory operand is at `address`.
    /// The processor has noted the address of the instruction's copy in the thunk instead.
    fn note_executed(self, context: &mut ThreadContext, address: u64) {
        if self.has_memory {
            context.x87_data = address;
        } else if context.x87_data_after != context.x87_pc {
            context.x87_data = 0;
        }
        context.x87_pc = self.pc;
        context.x87_data_after = self.pc;
    }
}

/// The address at which to continue after a fault of the host instruction at `host_rip`; none if
/// that is not the guest's instruction in a thunk. May be called in a signal handler.
pub fn fixup(host_rip: u64) -> Option<u64> {
    if !pool::contains(host_rip) || !pool::contains(host_rip.wrapping_sub(7)) {
        return None;
    }
    let mut mark = [0; 7];
    // SAFETY: the bytes lie in a pool, which is readable.
    unsafe { std::ptr::copy_nonoverlapping((host_rip - 7) as *const u8, mark.as_mut_ptr(), 7) };
    let [m0, m1, m2, d @ ..] = mark;
    ([m0, m1, m2] == LANDING_MARK)
        .then(|| host_rip.wrapping_add_signed(i64::from(i32::from_le_bytes(d))))
}

/// The 64-bit general register with this number.
fn gpr64(number: usize) -> Register {
    Register::RAX + number as u32
}

/// A rewritten instruction with the slots of its operands. Equal keys have equal thunks.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    inst: Instruction,
    slots: SmallVec<[u16; 12]>,
    flags_in: Option<u16>,
    flags_out: Option<u16>,
}

/// The thunks of a guest thread.
pub struct NativePool {
    pool: Option<Pool>,
    /// Addresses of the thunks.
    thunks: FxHashMap<Key, u64>,
}

impl NativePool {
    /// A pool that allocates its memory when the first thunk is made.
    pub fn new() -> NativePool {
        NativePool { pool: None, thunks: FxHashMap::default() }
    }

    /// The addresses of the pool's memory.
    pub fn reserved(&self) -> Vec<std::ops::Range<u64>> {
        self.pool.as_ref().map_or_else(Vec::new, |pool| pool.ranges().into())
    }

    /// Drops all thunks.
    ///
    /// # Errors
    /// The kernel's error; no thunk can be made then.
    pub fn clear(&mut self) -> io::Result<()> {
        self.thunks.clear();
        self.pool.as_mut().map_or(Ok(()), Pool::clear)
    }

    /// Allocates the memory now, and not when the first thunk is made.
    ///
    /// # Errors
    /// See [`Pool::new`].
    pub fn reserve(&mut self) -> io::Result<()> {
        if self.pool.is_none() {
            self.pool = Some(Pool::new()?);
        }
        Ok(())
    }

    /// In a forked child: the memory is shared with the parent.
    pub fn inherit(&mut self) {
        if let Some(pool) = &mut self.pool {
            pool.inherit();
        }
    }
}

impl Default for NativePool {
    fn default() -> NativePool {
        NativePool::new()
    }
}

impl NativeOp {
    /// Prepares `native`. `inputs` and `outputs` are the slots of its general registers, in the
    /// order of [`Native::gpr_in`] and [`Native::gpr_out`]; `flags_in` and `flags_out` are the
    /// slots of the flags that it reads and writes, if they are needed.
    ///
    /// # Errors
    /// See [`NativeError`].
    pub fn new(
        native: &Native,
        natives: &mut NativePool,
        inputs: &[u16],
        outputs: &[u16],
        flags_in: Option<u16>,
        flags_out: Option<u16>,
    ) -> Result<NativeOp, NativeError> {
        let action = match native.inst.mnemonic() {
            Mnemonic::Vzeroupper => Some(Action::ZeroUpper),
            Mnemonic::Vzeroall => Some(Action::ZeroAll),
            _ => None,
        };
        if let Some(action) = action {
            return Ok(NativeOp { action, components: 0, x87: None });
        }
        let plan = Plan::new(native, inputs, outputs, flags_in, flags_out)?;
        let key = Key {
            inst: plan.inst,
            slots: inputs.iter().chain(outputs).copied().collect(),
            flags_in,
            flags_out,
        };
        let thunk = match natives.thunks.get(&key) {
            Some(found) => *found,
            None => {
                let pool = match &mut natives.pool {
                    Some(pool) => pool,
                    none => none.insert(Pool::new()?),
                };
                pool.make_own()?;
                let code = plan.generate(pool.next_address())?;
                let thunk = pool.append(&code).ok_or(NativeError::Full)?;
                natives.thunks.insert(key, thunk);
                thunk
            }
        };
        // SAFETY: at the address is a complete thunk, which has this signature.
        let thunk = unsafe { std::mem::transmute::<u64, Thunk>(thunk) };
        let (pc, has_memory) = (native.inst.ip(), native.mem_size.is_some());
        let x87 = sets_x87_pointer(native.inst.code()).then_some(X87 { pc, has_memory });
        Ok(NativeOp { action: Action::Thunk(thunk), components: plan.components, x87 })
    }

    /// Executes the instruction on the context's state; `addr` is the address of its memory
    /// operand. Returns true if the instruction faulted.
    ///
    /// # Safety
    /// `context` is valid, and the pool has not been cleared since this was made.
    #[inline]
    pub unsafe fn run(&self, context: *mut ThreadContext, addr: u64) -> bool {
        // SAFETY: the caller's promise; the borrow ends before the thunk runs.
        unsafe {
            let have = xstate::valid(&*context);
            match self.action {
                Action::Thunk(thunk) => {
                    if self.components & !have != 0 {
                        xstate::initialise(&mut *context, self.components);
                    }
                    if self.components & xstate::X87 != 0 {
                        // The thunk leaves empty registers with contents.
                        (*context).x87_is_initial = 0;
                    }
                    if self.x87.is_some() {
                        // If the instruction raises an exception, the guest sees the pointers.
                        (&mut *context).put_x87_data();
                    }
                    let faulted = thunk(context, addr) != 0;
                    if let (Some(x87), false) = (self.x87, faulted) {
                        x87.note_executed(&mut *context, addr);
                    }
                    faulted
                }
                Action::ZeroUpper => {
                    xstate::set_valid(&mut *context, have & !(xstate::AVX | xstate::ZMM_HIGH));
                    false
                }
                Action::ZeroAll => {
                    let zeroed = xstate::SSE | xstate::AVX | xstate::ZMM_HIGH;
                    xstate::set_valid(&mut *context, have & !zeroed);
                    false
                }
            }
        }
    }
}
