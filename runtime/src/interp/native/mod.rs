//! Natives: original instructions executed on the guest's state by small generated functions,
//! *thunks*.
//!
//! A thunk is `extern "sysv64" fn(context, address) -> faulted`. It loads the registers that its
//! instruction reads from their slots and from the extended state, runs the instruction with the
//! memory operand rewritten to `[register]` (so segment bases, RIP and address-size prefixes are
//! the interpreter's affair), and stores what was written. The x87 state is swapped with the host's
//! around instructions that use it; MXCSR is the guest's while the interpreter runs.
//!
//! In front of the instruction stands `nop [rax + disp32]`, whose displacement leads from the
//! instruction to its *landing*: the signal handler finds it with [`fixup`] by reading four bytes,
//! without tables. After a fault nothing that the instruction writes is stored, except by
//! restartable instructions, whose registers say how far they came, and except x87, which records
//! the exception itself.
//!
//! Vector registers are moved one by one, which must not make unused upper halves count as used:
//! see [`super::xstate`]. `vzeroupper` ends each thunk that used VEX or EVEX.

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

/// The six arithmetic flags in iced's bits.
pub const ARITHMETIC: u32 = RflagsBits::OF
    | RflagsBits::SF
    | RflagsBits::ZF
    | RflagsBits::AF
    | RflagsBits::CF
    | RflagsBits::PF;
/// `nop dword [rax + disp32]`
const LANDING_MARK: [u8; 3] = [0x0f, 0x1f, 0x80];

/// Why a native could not be prepared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NativeError {
    /// The pool of generated code is full: drop all blocks and try again.
    #[error("the pool of native instructions is full")]
    Full,
    /// No executable memory.
    #[error("no memory for native instructions: {0}")]
    Memory(String),
    /// The instruction cannot be encoded with a rewritten memory operand.
    #[error("cannot encode a native instruction: {0}")]
    Encode(String),
    /// It uses so many registers that none is left for the context.
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

type Thunk = unsafe extern "sysv64" fn(*mut ThreadContext, u64) -> u32;

#[derive(Clone, Copy)]
enum Action {
    Thunk(Thunk),
    /// `vzeroupper` puts upper halves into their initial state: their bits are cleared, nothing is
    /// loaded.
    ZeroUpper,
    ZeroAll,
}

/// A native as the interpreter executes it.
pub struct NativeOp {
    action: Action,
    /// Components of the extended state whose bytes must be valid.
    components: u64,
    /// Set if the instruction sets the x87 pointers.
    x87: Option<X87>,
}

/// An instruction that sets the x87 pointers.
#[derive(Clone, Copy)]
struct X87 {
    pc: u64,
    has_memory: bool,
}

impl X87 {
    /// Behind the instruction, whose memory operand is at `address`. In the state the processor has
    /// noted the address of the copy in the thunk.
    fn behind(self, context: &mut ThreadContext, address: u64) {
        if self.has_memory {
            context.x87_data = address;
        } else if context.x87_data_after != context.x87_pc {
            context.x87_data = 0;
        }
        context.x87_pc = self.pc;
        context.x87_data_after = self.pc;
    }
}

/// Where to continue after a fault of the host instruction at `host_rip`, if it is a native in a
/// thunk. May be called in a signal handler.
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

/// The 64-bit register with this number.
fn full(number: usize) -> Register {
    Register::RAX + number as u32
}

/// Slots of the operands, and the instruction itself: equal keys have equal thunks.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    inst: Instruction,
    slots: SmallVec<[u16; 12]>,
    flags_in: Option<u16>,
    flags_out: Option<u16>,
}

/// Thunks by what they do.
pub struct NativePool {
    pool: Option<Pool>,
    /// Addresses of the thunks.
    thunks: FxHashMap<Key, u64>,
}

impl NativePool {
    /// A pool that takes memory at its first native.
    pub fn new() -> NativePool {
        NativePool { pool: None, thunks: FxHashMap::default() }
    }

    /// The pool's memory.
    pub fn reserved(&self) -> Vec<std::ops::Range<u64>> {
        self.pool.as_ref().map_or_else(Vec::new, |pool| pool.ranges().into())
    }

    /// Drops all thunks.
    ///
    /// # Errors
    /// What the kernel said; no thunk can be made then.
    pub fn clear(&mut self) -> io::Result<()> {
        self.thunks.clear();
        self.pool.as_mut().map_or(Ok(()), Pool::clear)
    }

    /// Gets the memory that thunks will need, which otherwise comes with the first.
    ///
    /// # Errors
    /// See [`Pool::new`].
    pub fn reserve(&mut self) -> io::Result<()> {
        if self.pool.is_none() {
            self.pool = Some(Pool::new()?);
        }
        Ok(())
    }

    /// In a forked child: takes the thunks over from the parent.
    ///
    /// # Errors
    /// What the kernel said; the thunks must not be used then.
    pub fn unshare_after_fork(&mut self) -> io::Result<()> {
        self.pool.as_mut().map_or(Ok(()), Pool::unshare_after_fork)
    }
}

impl Default for NativePool {
    fn default() -> NativePool {
        NativePool::new()
    }
}

impl NativeOp {
    /// Prepares `native`: `inputs` and `outputs` are the slots of its general registers, in order.
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
                let code = plan.generate(pool.next_address())?;
                let thunk = pool.append(&code).ok_or(NativeError::Full)?;
                natives.thunks.insert(key, thunk);
                thunk
            }
        };
        // SAFETY: the address is that of a complete thunk, which has this signature.
        let thunk = unsafe { std::mem::transmute::<u64, Thunk>(thunk) };
        let (pc, has_memory) = (native.inst.ip(), native.mem_size.is_some());
        let x87 = sets_x87_pointer(native.inst.code()).then_some(X87 { pc, has_memory });
        Ok(NativeOp { action: Action::Thunk(thunk), components: plan.components, x87 })
    }

    /// Executes the instruction on the context's state; `addr` is the address of its memory
    /// operand. Returns whether it faulted.
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
                    if self.x87.is_some() {
                        // The instruction may raise an exception, which makes the pointers visible.
                        (&mut *context).put_x87_data();
                    }
                    let faulted = thunk(context, addr) != 0;
                    if let (Some(x87), false) = (self.x87, faulted) {
                        x87.behind(&mut *context, addr);
                    }
                    faulted
                }
                Action::ZeroUpper => {
                    xstate::set_valid(&mut *context, have & !(xstate::AVX | xstate::ZMM_HIGH));
                    false
                }
                Action::ZeroAll => {
                    let gone = xstate::SSE | xstate::AVX | xstate::ZMM_HIGH;
                    xstate::set_valid(&mut *context, have & !gone);
                    false
                }
            }
        }
    }
}
