//! Natives: original instructions executed on the guest's state by small generated functions, *thunks*.
//!
//! A thunk is `extern "sysv64" fn(context, address) -> faulted`. It loads the registers that its instruction reads from
//! their slots and from the extended state, runs the instruction with the memory operand rewritten to `[register]`
//! (so segment bases, RIP and address-size prefixes are the interpreter's affair), and stores what was written. MXCSR and
//! the x87 state are swapped with the host's around instructions that use them.
//!
//! In front of the instruction stands `nop [rax + disp32]`, whose displacement leads from the instruction to its *landing*:
//! the signal handler finds it with [`fixup`] by reading four bytes, without tables. After a fault nothing that
//! the instruction writes is stored, except by restartable instructions, whose registers say how far they came, and
//! except MXCSR and x87, which record the exception itself.
//!
//! Vector registers are moved one by one, which must not make unused upper halves count as used: see
//! [`super::xstate`]. `vzeroupper` ends each thunk that used VEX or EVEX.

use super::code;
use super::pool::{self, Pool};
use super::xstate::{self, Layout};
use dynasour_guest::context::{ThreadContext, offset};
use dynasour_ir::{Effects, Loc, Native};
use iced_x86::{
    Code, Encoder, EncodingKind, IcedError, Instruction, MemoryOperand, Mnemonic, OpKind, Register, RflagsBits,
};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::io;

/// The six arithmetic flags in iced's bits.
pub const ARITHMETIC: u32 =
    RflagsBits::OF | RflagsBits::SF | RflagsBits::ZF | RflagsBits::AF | RflagsBits::CF | RflagsBits::PF;
const ARITHMETIC_BITS: i32 = dynasour_ir::semantics::ARITH_FLAGS as i32;
const DIRECTION_BIT: i32 = 1 << 10;
const HOST_MXCSR: i32 = 0x1f80;
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
    /// `vzeroupper` puts upper halves into their initial state: their bits are cleared, nothing is loaded.
    ZeroUpper,
    ZeroAll,
}

/// A native as the interpreter executes it.
pub struct NativeOp {
    action: Action,
    /// Components of the extended state whose bytes must be valid.
    components: u64,
    /// For x87: the instruction's address in the thunk and in the guest.
    x87: Option<(u64, u64)>,
}

/// Where to continue after a fault of the host instruction at `host_rip`, if it is a native in a thunk. May be
/// called in a signal handler.
pub fn fixup(host_rip: u64) -> Option<u64> {
    if !pool::contains(host_rip) || !pool::contains(host_rip.wrapping_sub(7)) {
        return None;
    }
    let mut mark = [0; 7];
    // SAFETY: the bytes lie in a pool, which is readable.
    unsafe { std::ptr::copy_nonoverlapping((host_rip - 7) as *const u8, mark.as_mut_ptr(), 7) };
    let [m0, m1, m2, d @ ..] = mark;
    ([m0, m1, m2] == LANDING_MARK).then(|| host_rip.wrapping_add_signed(i64::from(i32::from_le_bytes(d))))
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
    /// Address of the thunk and of the instruction in it.
    thunks: FxHashMap<Key, (u64, u64)>,
}

impl NativePool {
    /// A pool that takes memory at its first native.
    pub fn new() -> NativePool {
        NativePool { pool: None, thunks: FxHashMap::default() }
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
        let key = Key { inst: plan.inst, slots: inputs.iter().chain(outputs).copied().collect(), flags_in, flags_out };
        let (thunk, instruction) = match natives.thunks.get(&key) {
            Some(found) => *found,
            None => {
                let pool = match &mut natives.pool {
                    Some(pool) => pool,
                    none => none.insert(Pool::new()?),
                };
                let (code, at) = plan.generate(pool.next_address())?;
                let thunk = pool.append(&code).ok_or(NativeError::Full)?;
                natives.thunks.insert(key, (thunk, at));
                (thunk, at)
            }
        };
        // SAFETY: the address is that of a complete thunk, which has this signature.
        let thunk = unsafe { std::mem::transmute::<u64, Thunk>(thunk) };
        let x87 = plan.x87.then_some((instruction, native.inst.ip()));
        Ok(NativeOp { action: Action::Thunk(thunk), components: plan.components, x87 })
    }

    /// Executes the instruction on the context's state; `addr` is the address of its memory operand. Returns
    /// whether it faulted.
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
                    let faulted = thunk(context, addr) != 0;
                    if let Some((host, guest)) = self.x87 {
                        // The processor noted where the last x87 instruction stood: in the thunk.
                        let ip = &mut (&mut *context).xstate.0[8..16];
                        if ip == host.to_le_bytes() {
                            ip.copy_from_slice(&guest.to_le_bytes());
                        }
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

/// What a thunk has to do.
struct Plan<'n> {
    native: &'n Native,
    /// The instruction with its memory operand rewritten.
    inst: Instruction,
    inputs: &'n [u16],
    outputs: &'n [u16],
    flags_in: Option<u16>,
    flags_out: Option<u16>,
    /// Holds the context.
    context: Register,
    /// Holds the address of the memory operand, if there is one.
    address: Option<Register>,
    /// The slot with the base of the segment that implicit memory is addressed in, other than the flat one. FS stands
    /// in for it while the instruction runs.
    segment: Option<u16>,
    /// VEX or EVEX on vector or mask registers.
    wide: bool,
    /// Bytes of the widest vector operand.
    width: u32,
    load_vectors: u32,
    masks: u8,
    x87: bool,
    mxcsr: bool,
    reads_direction: bool,
    writes_direction: bool,
    components: u64,
}

fn vector_width(reg: Register) -> u32 {
    if reg.is_vector_register() { reg.size() as u32 } else { 0 }
}

/// Reads MXCSR without writing it: stores of it, and approximations, which obey its denormal controls but
/// raise nothing.
fn reads_mxcsr(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(mnemonic, M::Stmxcsr | M::Vstmxcsr)
        || matches!(mnemonic, M::Rcpps | M::Rcpss | M::Rsqrtps | M::Rsqrtss)
        || matches!(mnemonic, M::Vrcpps | M::Vrcpss | M::Vrsqrtps | M::Vrsqrtss)
        || matches!(mnemonic, M::Vrcp14ps | M::Vrcp14pd | M::Vrcp14ss | M::Vrcp14sd)
        || matches!(mnemonic, M::Vrsqrt14ps | M::Vrsqrt14pd | M::Vrsqrt14ss | M::Vrsqrt14sd)
        || matches!(mnemonic, M::Vrcpph | M::Vrcpsh | M::Vrsqrtph | M::Vrsqrtsh)
}

fn full(number: usize) -> Register {
    Register::RAX + number as u32
}

impl<'n> Plan<'n> {
    fn new(
        native: &'n Native,
        inputs: &'n [u16],
        outputs: &'n [u16],
        flags_in: Option<u16>,
        flags_out: Option<u16>,
    ) -> Result<Plan<'n>, NativeError> {
        let mut inst = native.inst;
        let operands: SmallVec<[Register; 8]> = (0..inst.op_count())
            .filter(|i| inst.op_kind(*i) == OpKind::Register)
            .map(|i| inst.op_register(i))
            .chain([inst.op_mask(), inst.memory_index()])
            .collect();
        let mut busy: SmallVec<[Register; 16]> =
            native.gpr_in.iter().chain(&native.gpr_out).map(|g| full(g.number())).collect();
        busy.extend(operands.iter().filter(|r| r.is_gpr()).map(|r| r.full_register()));
        if native.mem_size.is_none() {
            busy.push(inst.memory_base().full_register());
        }

        // Registers that need no REX prefix first: AH to DH cannot be encoded with one. rax, rcx and rdx are
        // scratch registers of the thunk.
        const ADDRESS: [Register; 5] = [Register::RSI, Register::RDI, Register::RBX, Register::RBP, Register::R8];
        const CONTEXT: [Register; 9] = [
            Register::RDI,
            Register::R8,
            Register::R9,
            Register::R10,
            Register::R11,
            Register::RBX,
            Register::R12,
            Register::R13,
            Register::R14,
        ];
        let mut address = None;
        if native.mem_size.is_some() {
            let reg = ADDRESS.into_iter().find(|r| !busy.contains(r)).ok_or(NativeError::Registers)?;
            address = Some(reg);
            busy.push(reg);
            inst.set_memory_base(reg);
            inst.set_memory_index(Register::None);
            inst.set_memory_index_scale(1);
            inst.set_memory_displacement64(0);
            inst.set_memory_displ_size(0);
            inst.set_segment_prefix(Register::None);
        }
        let segment = match inst.segment_prefix() {
            Register::FS => Some(code::FS_BASE),
            Register::GS => Some(code::GS_BASE),
            _ => None,
        };
        if segment.is_some() {
            inst.set_segment_prefix(Register::FS);
        }
        let context = CONTEXT.into_iter().find(|r| !busy.contains(r)).ok_or(NativeError::Registers)?;

        let restartable = native.effects.contains(Effects::RESTARTABLE);
        let layout = Layout::get();
        let vectors = native.vec_read | native.vec_write;
        let mut masks = 0u8;
        for reg in operands.iter().filter(|r| r.is_k()) {
            masks |= 1 << reg.number();
        }
        for loc in &native.writes {
            if let Loc::Mask(n) = loc {
                masks |= 1 << n;
            }
        }
        let encoded_wide = !matches!(inst.code().encoding(), EncodingKind::Legacy | EncodingKind::D3NOW);
        let wide = encoded_wide && (vectors != 0 || masks != 0);
        let mut width = operands.iter().map(|r| vector_width(*r)).max().unwrap_or(0);
        if restartable && vectors != 0 {
            // After a fault everything is stored, so everything must have been loaded.
            width = if layout.has_avx512() { 64 } else { 32 };
        }
        let mut components = 0;
        let x87 = native.writes.contains(&Loc::X87);
        for (used, component) in [
            (x87, xstate::X87),
            (vectors & 0xffff != 0, xstate::SSE),
            (wide && vectors & 0xffff != 0 && width >= 32, xstate::AVX),
            (wide && vectors & 0xffff != 0 && width >= 64, xstate::ZMM_HIGH),
            (vectors >> 16 != 0, xstate::HIGH_16),
            (masks != 0, xstate::OPMASK),
        ] {
            if used {
                components |= component;
            }
        }
        let mxcsr = native.writes.contains(&Loc::Mxcsr) || reads_mxcsr(inst.mnemonic());
        Ok(Plan {
            native,
            inst,
            inputs,
            outputs,
            flags_in,
            flags_out,
            context,
            address,
            segment,
            wide,
            width,
            load_vectors: if restartable { vectors } else { native.vec_read },
            masks,
            x87,
            mxcsr,
            reads_direction: inst.rflags_read() & RflagsBits::DF != 0,
            writes_direction: native.writes.contains(&Loc::Df),
            components,
        })
    }

    /// The thunk's code for the address `base`, and the address of the instruction in it.
    fn generate(&self, base: u64) -> Result<(Vec<u8>, u64), NativeError> {
        let mut asm = Asm { encoder: Encoder::new(64), base, len: 0 };
        let saved = self.saved();
        for reg in &saved {
            asm.emit(Instruction::with1(Code::Push_r64, *reg)?)?;
        }
        self.load(&mut asm)?;

        let mut code = asm.encoder.take_buffer();
        code.extend(LANDING_MARK);
        let mark = code.len();
        code.extend([0; 4]);
        asm.len += 7;
        asm.encoder.set_buffer(code);
        let instruction = asm.here();
        asm.emit(self.inst)?;

        self.store(&mut asm)?;
        asm.emit(Instruction::with2(Code::Mov_r32_imm32, Register::ECX, 0)?)?;
        let common = asm.here();
        self.leave(&mut asm)?;
        for reg in saved.iter().rev() {
            asm.emit(Instruction::with1(Code::Pop_r64, *reg)?)?;
        }
        asm.emit(Instruction::with2(Code::Mov_rm32_r32, Register::EAX, Register::ECX)?)?;
        asm.emit(Instruction::with(Code::Retnq))?;

        let landing = asm.here();
        if self.native.effects.contains(Effects::RESTARTABLE) {
            self.store(&mut asm)?;
        }
        asm.emit(Instruction::with2(Code::Mov_r32_imm32, Register::ECX, 1)?)?;
        asm.emit(Instruction::with_branch(Code::Jmp_rel32_64, common)?)?;

        let mut code = asm.encoder.take_buffer();
        let distance = (landing - instruction) as i32;
        code[mark..mark + 4].copy_from_slice(&distance.to_le_bytes());
        Ok((code, instruction))
    }

    /// Host registers that the thunk must restore.
    fn saved(&self) -> SmallVec<[Register; 8]> {
        const CALLEE_SAVED: [Register; 6] =
            [Register::RBX, Register::RBP, Register::R12, Register::R13, Register::R14, Register::R15];
        let used = |r: &Register| {
            self.context == *r
                || self.address == Some(*r)
                || self.native.gpr_in.iter().chain(&self.native.gpr_out).any(|g| full(g.number()) == *r)
        };
        CALLEE_SAVED.into_iter().filter(used).collect()
    }

    fn at(&self, offset: usize) -> MemoryOperand {
        MemoryOperand::with_base_displ(self.context, offset as i64)
    }

    fn slot(&self, slot: u16) -> MemoryOperand {
        self.at(slot as usize * 8)
    }

    fn xstate(&self, offset: usize) -> MemoryOperand {
        self.at(offset::XSTATE + offset)
    }

    fn load(&self, asm: &mut Asm) -> Result<(), NativeError> {
        if self.context != Register::RDI {
            asm.emit(Instruction::with2(Code::Mov_r64_rm64, self.context, Register::RDI)?)?;
        }
        if let Some(address) = self.address
            && address != Register::RSI
        {
            asm.emit(Instruction::with2(Code::Mov_r64_rm64, address, Register::RSI)?)?;
        }
        if self.x87 {
            asm.emit(Instruction::with2(Code::Mov_r32_imm32, Register::EAX, xstate::X87 as u32)?)?;
            asm.emit(Instruction::with2(Code::Xor_r32_rm32, Register::EDX, Register::EDX)?)?;
            asm.emit(Instruction::with1(Code::Xrstor64_mem, self.xstate(0))?)?;
        }
        if self.mxcsr {
            asm.emit(Instruction::with1(Code::Ldmxcsr_m32, self.xstate(xstate::MXCSR))?)?;
        }
        for n in (0..32).filter(|n| self.load_vectors >> n & 1 != 0) {
            self.load_vector(asm, n)?;
        }
        for n in (0..8).filter(|n| self.masks >> n & 1 != 0) {
            let at = self.xstate(Layout::get().opmask + 8 * n);
            asm.emit(Instruction::with2(Code::VEX_Kmovq_kr_km64, Register::K0 + n as u32, at)?)?;
        }
        if let Some(segment) = self.segment {
            asm.emit(Instruction::with1(Code::Rdfsbase_r64, Register::RAX)?)?;
            asm.emit(Instruction::with1(Code::Push_r64, Register::RAX)?)?;
            asm.emit(Instruction::with2(Code::Mov_r64_rm64, Register::RAX, self.slot(segment))?)?;
            asm.emit(Instruction::with1(Code::Wrfsbase_r64, Register::RAX)?)?;
        }
        if self.flags_in.is_some() || self.reads_direction {
            let (image, other) = (Register::RAX, Register::RCX);
            match self.flags_in {
                Some(slot) => {
                    asm.emit(Instruction::with2(Code::Mov_r64_rm64, image, self.slot(slot))?)?;
                    asm.emit(Instruction::with2(Code::And_rm64_imm32, image, ARITHMETIC_BITS)?)?;
                }
                None => asm.emit(Instruction::with2(Code::Xor_r32_rm32, Register::EAX, Register::EAX)?)?,
            }
            if self.reads_direction {
                asm.emit(Instruction::with2(Code::Mov_r64_rm64, other, self.at(offset::RFLAGS))?)?;
                asm.emit(Instruction::with2(Code::And_rm64_imm32, other, DIRECTION_BIT)?)?;
                asm.emit(Instruction::with2(Code::Or_r64_rm64, image, other)?)?;
            }
            asm.emit(Instruction::with2(Code::Or_rm64_imm32, image, 0x202)?)?;
            asm.emit(Instruction::with1(Code::Push_r64, image)?)?;
            asm.emit(Instruction::with(Code::Popfq))?;
        }
        for (gpr, slot) in self.native.gpr_in.iter().zip(self.inputs) {
            asm.emit(Instruction::with2(Code::Mov_r64_rm64, full(gpr.number()), self.slot(*slot))?)?;
        }
        if self.native.effects.contains(Effects::RESTARTABLE) {
            // A fault stores what is written even where nothing has been written yet (eax of lodsd).
            for gpr in self.native.gpr_out.iter().filter(|g| !self.native.gpr_in.contains(g)) {
                let home = self.slot(gpr.number() as u16);
                asm.emit(Instruction::with2(Code::Mov_r64_rm64, full(gpr.number()), home)?)?;
            }
        }
        Ok(())
    }

    fn load_vector(&self, asm: &mut Asm, n: usize) -> Result<(), NativeError> {
        let layout = Layout::get();
        let (xmm, ymm, zmm) = (Register::XMM0 + n as u32, Register::YMM0 + n as u32, Register::ZMM0 + n as u32);
        if n >= 16 {
            let at = self.xstate(layout.high_16 + 64 * (n - 16));
            return asm.emit(Instruction::with2(Code::EVEX_Vmovups_zmm_k1z_zmmm512, zmm, at)?);
        }
        let low = self.xstate(xstate::LEGACY_VECTORS + 16 * n);
        if !self.wide {
            return asm.emit(Instruction::with2(Code::Movups_xmm_xmmm128, xmm, low)?);
        }
        asm.emit(Instruction::with2(Code::VEX_Vmovups_xmm_xmmm128, xmm, low)?)?;
        if self.width >= 32 {
            let at = self.xstate(layout.avx + 16 * n);
            asm.emit(Instruction::with4(Code::VEX_Vinsertf128_ymm_ymm_xmmm128_imm8, ymm, ymm, at, 1)?)?;
        }
        if self.width >= 64 {
            let at = self.xstate(layout.zmm_high + 32 * n);
            asm.emit(Instruction::with4(Code::EVEX_Vinsertf64x4_zmm_k1z_zmm_ymmm256_imm8, zmm, zmm, at, 1)?)?;
        }
        Ok(())
    }

    /// Stores everything the instruction writes. Afterwards all registers but the context's are free.
    fn store(&self, asm: &mut Asm) -> Result<(), NativeError> {
        for (gpr, slot) in self.native.gpr_out.iter().zip(self.outputs) {
            asm.emit(Instruction::with2(Code::Mov_rm64_r64, self.slot(*slot), full(gpr.number()))?)?;
        }
        if self.flags_out.is_some() || self.writes_direction {
            let (image, other) = (Register::RAX, Register::RDX);
            asm.emit(Instruction::with(Code::Pushfq))?;
            asm.emit(Instruction::with1(Code::Pop_r64, image)?)?;
            if let Some(slot) = self.flags_out {
                asm.emit(Instruction::with2(Code::Mov_rm64_r64, self.slot(slot), image)?)?;
            }
            if self.writes_direction {
                let rflags = self.at(offset::RFLAGS);
                asm.emit(Instruction::with2(Code::And_rm64_imm32, image, DIRECTION_BIT)?)?;
                asm.emit(Instruction::with2(Code::Mov_r64_rm64, other, rflags)?)?;
                asm.emit(Instruction::with2(Code::And_rm64_imm32, other, !DIRECTION_BIT)?)?;
                asm.emit(Instruction::with2(Code::Or_r64_rm64, other, image)?)?;
                asm.emit(Instruction::with2(Code::Mov_rm64_r64, rflags, other)?)?;
            }
        }
        for n in (0..32).filter(|n| self.native.vec_write >> n & 1 != 0) {
            self.store_vector(asm, n)?;
        }
        for n in (0..8).filter(|n| self.masks >> n & 1 != 0) {
            let at = self.xstate(Layout::get().opmask + 8 * n);
            asm.emit(Instruction::with2(Code::VEX_Kmovq_m64_kr, at, Register::K0 + n as u32)?)?;
        }
        Ok(())
    }

    /// A legacy instruction keeps the upper parts. After VEX and EVEX the whole register is stored: parts beyond
    /// the operand's width have become zero, and where they are in their initial state the zeros do no harm.
    fn store_vector(&self, asm: &mut Asm, n: usize) -> Result<(), NativeError> {
        let layout = Layout::get();
        let (xmm, ymm, zmm) = (Register::XMM0 + n as u32, Register::YMM0 + n as u32, Register::ZMM0 + n as u32);
        if n >= 16 {
            let at = self.xstate(layout.high_16 + 64 * (n - 16));
            return asm.emit(Instruction::with2(Code::EVEX_Vmovups_zmmm512_k1z_zmm, at, zmm)?);
        }
        let low = self.xstate(xstate::LEGACY_VECTORS + 16 * n);
        if !self.wide {
            return asm.emit(Instruction::with2(Code::Movups_xmmm128_xmm, low, xmm)?);
        }
        asm.emit(Instruction::with2(Code::VEX_Vmovups_xmmm128_xmm, low, xmm)?)?;
        let at = self.xstate(layout.avx + 16 * n);
        asm.emit(Instruction::with3(Code::VEX_Vextractf128_xmmm128_ymm_imm8, at, ymm, 1)?)?;
        if layout.has_avx512() {
            let at = self.xstate(layout.zmm_high + 32 * n);
            asm.emit(Instruction::with3(Code::EVEX_Vextractf64x4_ymmm256_k1z_zmm_imm8, at, zmm, 1)?)?;
        }
        Ok(())
    }

    /// Back to the host's state, on success and after a fault; ecx is kept.
    fn leave(&self, asm: &mut Asm) -> Result<(), NativeError> {
        if self.segment.is_some() {
            asm.emit(Instruction::with1(Code::Pop_r64, Register::RAX)?)?;
            asm.emit(Instruction::with1(Code::Wrfsbase_r64, Register::RAX)?)?;
        }
        if self.reads_direction || self.writes_direction {
            asm.emit(Instruction::with(Code::Cld))?;
        }
        if self.mxcsr {
            asm.emit(Instruction::with1(Code::Stmxcsr_m32, self.xstate(xstate::MXCSR))?)?;
            asm.emit(Instruction::with1(Code::Pushq_imm32, HOST_MXCSR)?)?;
            asm.emit(Instruction::with1(Code::Ldmxcsr_m32, MemoryOperand::with_base(Register::RSP))?)?;
            asm.emit(Instruction::with1(Code::Pop_r64, Register::RAX)?)?;
        }
        if self.x87 {
            asm.emit(Instruction::with2(Code::Mov_r32_imm32, Register::EAX, xstate::X87 as u32)?)?;
            asm.emit(Instruction::with2(Code::Xor_r32_rm32, Register::EDX, Register::EDX)?)?;
            asm.emit(Instruction::with1(Code::Xsave64_mem, self.xstate(0))?)?;
            asm.emit(Instruction::with(Code::Fninit))?;
        }
        if self.wide {
            asm.emit(Instruction::with(Code::VEX_Vzeroupper))?;
        }
        Ok(())
    }
}

struct Asm {
    encoder: Encoder,
    base: u64,
    len: usize,
}

impl Asm {
    fn here(&self) -> u64 {
        self.base + self.len as u64
    }

    fn emit(&mut self, inst: Instruction) -> Result<(), NativeError> {
        self.len += self.encoder.encode(&inst, self.here())?;
        Ok(())
    }
}
