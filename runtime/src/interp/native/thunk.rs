//! Generates the code of a thunk from its [`Plan`].
//!
//! ```text
//!     push callee-saved registers
//!     load the state                 rdi: context, rsi: address of the memory operand
//!     nop [rax + landing - i]
//!  i: the instruction
//!     store the state; ecx = 0
//!  c: restore the host's state; pop; eax = ecx; ret
//! landing:
//!     store the state if restartable; ecx = 1; jmp c
//! ```
//!
//! Data: none. Invariant: the instruction does not use the register that holds the context, so the
//! code behind it and at the landing can reach the context. No lock: the functions only use their
//! arguments.

use super::plan::Plan;
use super::{LANDING_MARK, NativeError, gpr64};
use crate::interp::xstate::{self, Layout};
use dynasour_guest::context::offset;
use dynasour_ir::Effects;
use iced_x86::{Code, Encoder, Instruction, MemoryOperand, Register};
use smallvec::SmallVec;

/// The arithmetic flags in rflags.
const ARITHMETIC_BITS: i32 = dynasour_ir::semantics::ARITH_FLAGS as i32;
/// The direction flag in rflags.
const DIRECTION_BIT: i32 = 1 << 10;

impl Plan<'_> {
    /// The thunk's code, to be placed at the address `base`.
    pub fn generate(&self, base: u64) -> Result<Vec<u8>, NativeError> {
        let mut asm = Asm { encoder: Encoder::new(64), base, len: 0 };
        let saved = self.saved();
        for reg in &saved {
            asm.emit(Instruction::with1(Code::Push_r64, *reg)?)?;
        }
        self.load(&mut asm)?;

        let mut code = asm.encoder.take_buffer();
        code.extend(LANDING_MARK);
        let displacement = code.len();
        code.extend([0; 4]);
        asm.len += LANDING_MARK.len() + 4;
        asm.encoder.set_buffer(code);
        let instruction = asm.here();
        asm.emit(self.inst)?;

        self.store(&mut asm)?;
        asm.emit(Instruction::with2(Code::Mov_r32_imm32, Register::ECX, 0)?)?;
        let leave = asm.here();
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
        asm.emit(Instruction::with_branch(Code::Jmp_rel32_64, leave)?)?;

        let mut code = asm.encoder.take_buffer();
        let distance = (landing - instruction) as i32;
        code[displacement..displacement + 4].copy_from_slice(&distance.to_le_bytes());
        Ok(code)
    }

    /// The callee-saved host registers that the thunk changes.
    fn saved(&self) -> SmallVec<[Register; 8]> {
        const CALLEE_SAVED: [Register; 6] = [
            Register::RBX,
            Register::RBP,
            Register::R12,
            Register::R13,
            Register::R14,
            Register::R15,
        ];
        let used = |r: &Register| {
            self.context == *r
                || self.address == Some(*r)
                || self
                    .native
                    .gpr_in
                    .iter()
                    .chain(&self.native.gpr_out)
                    .any(|g| gpr64(g.number()) == *r)
        };
        CALLEE_SAVED.into_iter().filter(used).collect()
    }

    /// The field of the context at this byte offset.
    fn field(&self, offset: usize) -> MemoryOperand {
        MemoryOperand::with_base_displ(self.context, offset as i64)
    }

    /// A slot of the context.
    fn slot(&self, slot: u16) -> MemoryOperand {
        self.field(slot as usize * 8)
    }

    /// The bytes of the extended state from this offset on.
    fn xstate(&self, offset: usize) -> MemoryOperand {
        self.field(offset::XSTATE + offset)
    }

    /// Loads the state that the instruction reads. The scratch registers are free until the general
    /// registers are loaded, which is last.
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
                None => {
                    asm.emit(Instruction::with2(Code::Xor_r32_rm32, Register::EAX, Register::EAX)?)?
                }
            }
            if self.reads_direction {
                asm.emit(Instruction::with2(
                    Code::Mov_r64_rm64,
                    other,
                    self.field(offset::RFLAGS),
                )?)?;
                asm.emit(Instruction::with2(Code::And_rm64_imm32, other, DIRECTION_BIT)?)?;
                asm.emit(Instruction::with2(Code::Or_r64_rm64, image, other)?)?;
            }
            asm.emit(Instruction::with2(Code::Or_rm64_imm32, image, 0x202)?)?;
            asm.emit(Instruction::with1(Code::Push_r64, image)?)?;
            asm.emit(Instruction::with(Code::Popfq))?;
        }
        for (gpr, slot) in self.native.gpr_in.iter().zip(self.inputs) {
            asm.emit(Instruction::with2(
                Code::Mov_r64_rm64,
                gpr64(gpr.number()),
                self.slot(*slot),
            )?)?;
        }
        if self.native.effects.contains(Effects::RESTARTABLE) {
            // The landing stores each register that the instruction writes, even if the instruction
            // has not written it before the fault (eax of lodsd). So its old value is loaded.
            for gpr in self.native.gpr_out.iter().filter(|g| !self.native.gpr_in.contains(g)) {
                let home = self.slot(gpr.number() as u16);
                asm.emit(Instruction::with2(Code::Mov_r64_rm64, gpr64(gpr.number()), home)?)?;
            }
        }
        Ok(())
    }

    /// Loads the first [`Plan::width`] bytes of vector register `n`.
    fn load_vector(&self, asm: &mut Asm, n: usize) -> Result<(), NativeError> {
        let layout = Layout::get();
        let (xmm, ymm, zmm) =
            (Register::XMM0 + n as u32, Register::YMM0 + n as u32, Register::ZMM0 + n as u32);
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
            asm.emit(Instruction::with4(
                Code::VEX_Vinsertf128_ymm_ymm_xmmm128_imm8,
                ymm,
                ymm,
                at,
                1,
            )?)?;
        }
        if self.width >= 64 {
            let at = self.xstate(layout.zmm_high + 32 * n);
            asm.emit(Instruction::with4(
                Code::EVEX_Vinsertf64x4_zmm_k1z_zmm_ymmm256_imm8,
                zmm,
                zmm,
                at,
                1,
            )?)?;
        }
        Ok(())
    }

    /// Stores the state that the instruction writes. Afterwards all registers but the context's are
    /// free.
    fn store(&self, asm: &mut Asm) -> Result<(), NativeError> {
        for (gpr, slot) in self.native.gpr_out.iter().zip(self.outputs) {
            asm.emit(Instruction::with2(
                Code::Mov_rm64_r64,
                self.slot(*slot),
                gpr64(gpr.number()),
            )?)?;
        }
        if self.flags_out.is_some() || self.writes_direction {
            let (image, other) = (Register::RAX, Register::RDX);
            asm.emit(Instruction::with(Code::Pushfq))?;
            asm.emit(Instruction::with1(Code::Pop_r64, image)?)?;
            if let Some(slot) = self.flags_out {
                asm.emit(Instruction::with2(Code::Mov_rm64_r64, self.slot(slot), image)?)?;
            }
            if self.writes_direction {
                let rflags = self.field(offset::RFLAGS);
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

    /// Stores vector register `n`. A legacy instruction keeps the upper parts, so only the low 128
    /// bits are stored. VEX and EVEX instructions set the parts beyond the operand's width to zero,
    /// so the whole register is stored. If a component is not valid, the zeros in its bytes have no
    /// effect.
    fn store_vector(&self, asm: &mut Asm, n: usize) -> Result<(), NativeError> {
        let layout = Layout::get();
        let (xmm, ymm, zmm) =
            (Register::XMM0 + n as u32, Register::YMM0 + n as u32, Register::ZMM0 + n as u32);
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
            asm.emit(Instruction::with3(
                Code::EVEX_Vextractf64x4_ymmm256_k1z_zmm_imm8,
                at,
                zmm,
                1,
            )?)?;
        }
        Ok(())
    }

    /// Restores the host's state, on success and after a fault. Keeps ecx.
    fn leave(&self, asm: &mut Asm) -> Result<(), NativeError> {
        if self.segment.is_some() {
            asm.emit(Instruction::with1(Code::Pop_r64, Register::RAX)?)?;
            asm.emit(Instruction::with1(Code::Wrfsbase_r64, Register::RAX)?)?;
        }
        if self.reads_direction || self.writes_direction {
            asm.emit(Instruction::with(Code::Cld))?;
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

/// An assembler for code at the address `base`.
struct Asm {
    encoder: Encoder,
    base: u64,
    /// Bytes that were emitted.
    len: usize,
}

impl Asm {
    /// The address of the next instruction.
    fn here(&self) -> u64 {
        self.base + self.len as u64
    }

    fn emit(&mut self, inst: Instruction) -> Result<(), NativeError> {
        self.len += self.encoder.encode(&inst, self.here())?;
        Ok(())
    }
}
