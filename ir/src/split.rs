//! Which natives can leave the access of their memory operand to another instruction ([`Split`]), and what
//! they look like then.
//!
//! These are the scalar instructions of SSE that read four or eight bytes, or store the low bytes of a
//! vector register. The value is an integer of the IR; it may live in a vector register of the host.
//!
//! No data, no lock.
//!
//! ```text
//! addsd xmm0, [rdi]      v1 = load.i64 [v0]; native "addsd xmm0, v1"           addsd xmm0, xmm7
//! movsd xmm0, [rdi]      v1 = load.i64 [v0]; native "movsd xmm0, v1"           movaps xmm0, xmm7
//! movsd [rdi], xmm0      v1 = native "movsd v1, xmm0"; store.i64 [v0], v1      movq xmm7, xmm0
//! ```

use crate::types::Loc;
use crate::version::{Effects, Native, Split, Version};
use iced_x86::{Code, EncodingKind, Instruction, OpKind, Register};

/// The forms of an instruction whose memory operand is split off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Reads a vector register, whose other bytes are zero, in the place of memory: this instruction.
    Vector(Code),
    /// Reads a general register in the place of memory.
    General,
    /// As [`Form::Vector`] if the value is in a vector register, as [`Form::General`] if not.
    Either(Code),
    /// Stores the low bytes of its only register.
    Store,
}

/// The form of an instruction and how it would be split, if it can be. `size` is that of its memory operand in
/// bytes.
fn split_of(inst: &Instruction, size: u32) -> Option<(Split, Form)> {
    use Code::*;
    let (wanted, form) = match inst.code() {
        Movsd_xmm_xmmm64 | Movq_xmm_xmmm64 => (8, Form::Vector(Movaps_xmm_xmmm128)),
        Movss_xmm_xmmm32 => (4, Form::Vector(Movaps_xmm_xmmm128)),
        Movq_xmm_rm64 => (8, Form::Either(Movaps_xmm_xmmm128)),
        Movd_xmm_rm32 => (4, Form::Either(Movaps_xmm_xmmm128)),
        Cvtsi2sd_xmm_rm64 | Cvtsi2ss_xmm_rm64 => (8, Form::General),
        Cvtsi2sd_xmm_rm32 | Cvtsi2ss_xmm_rm32 => (4, Form::General),
        same @ (Addsd_xmm_xmmm64
        | Subsd_xmm_xmmm64
        | Mulsd_xmm_xmmm64
        | Divsd_xmm_xmmm64
        | Minsd_xmm_xmmm64
        | Maxsd_xmm_xmmm64
        | Sqrtsd_xmm_xmmm64
        | Roundsd_xmm_xmmm64_imm8
        | Cmpsd_xmm_xmmm64_imm8
        | Comisd_xmm_xmmm64
        | Ucomisd_xmm_xmmm64
        | Cvtsd2ss_xmm_xmmm64
        | Cvttsd2si_r32_xmmm64
        | Cvttsd2si_r64_xmmm64
        | Cvtsd2si_r32_xmmm64
        | Cvtsd2si_r64_xmmm64) => (8, Form::Vector(same)),
        same @ (Addss_xmm_xmmm32
        | Subss_xmm_xmmm32
        | Mulss_xmm_xmmm32
        | Divss_xmm_xmmm32
        | Minss_xmm_xmmm32
        | Maxss_xmm_xmmm32
        | Sqrtss_xmm_xmmm32
        | Roundss_xmm_xmmm32_imm8
        | Cmpss_xmm_xmmm32_imm8
        | Comiss_xmm_xmmm32
        | Ucomiss_xmm_xmmm32
        | Cvtss2sd_xmm_xmmm32
        | Cvttss2si_r32_xmmm32
        | Cvttss2si_r64_xmmm32
        | Cvtss2si_r32_xmmm32
        | Cvtss2si_r64_xmmm32) => (4, Form::Vector(same)),
        Movsd_xmmm64_xmm | Movq_xmmm64_xmm | Movq_rm64_xmm => (8, Form::Store),
        Movss_xmmm32_xmm | Movd_rm32_xmm => (4, Form::Store),
        _ => return None,
    };
    let split = if form == Form::Store { Split::Stored } else { Split::Loaded };
    let operand = if form == Form::Store { 0 } else { 1 };
    let is_memory = inst.op_kind(operand) == OpKind::Memory;
    (is_memory && wanted == size).then_some((split, form))
}

impl Native {
    /// How its memory operand can be split off, if it can.
    pub fn may_split(&self) -> Option<Split> {
        let size = self.mem_size.filter(|_| self.split == Split::No)?;
        let others = Split::EXCLUDES - (Effects::READ | Effects::WRITE);
        if self.effects.intersects(others) {
            return None;
        }
        split_of(&self.inst, size).map(|(split, _)| split)
    }

    /// Does it copy eight bytes from a general register to an XMM register (as if it had loaded them), or the other way
    /// round (as if it stored them)? Then the general register may as well be another XMM register.
    pub fn register_move(&self) -> Option<Split> {
        let inst = &self.inst;
        match inst.code() {
            Code::Movq_xmm_rm64 if inst.op1_kind() == OpKind::Register => Some(Split::Loaded),
            Code::Movq_rm64_xmm if inst.op0_kind() == OpKind::Register => Some(Split::Stored),
            _ => None,
        }
    }

    /// What it looks like without its memory operand.
    pub fn form(&self) -> Option<Form> {
        split_of(&self.inst, self.mem_size?).map(|(_, form)| form)
    }

    /// The XMM registers that it names: bit n is register n. None if it may use other vector registers, or these
    /// in another way than the instructions of SSE do.
    fn sse_registers(&self) -> Option<u16> {
        let vectors = self.vec_read | self.vec_write;
        let in_place = vectors != 0
            || self.writes.iter().any(|loc| !matches!(loc, Loc::Df))
            || self.effects.intersects(Effects::STATE | Effects::READ_STATE);
        let is_legacy = self.inst.encoding() == EncodingKind::Legacy;
        let is_small = (0..self.inst.op_count())
            .all(|n| self.inst.op_kind(n) != OpKind::Register || !wide(self.inst.op_register(n)));
        (!in_place || is_legacy && is_small).then(|| u16::try_from(vectors).ok()).flatten()
    }
}

impl Version {
    /// The XMM registers that no native names, in which the version may keep values of its own: bit n is register n.
    /// None if a native of it uses other vector registers, or these in another way than the instructions of SSE do.
    pub fn free_sse_registers(&self) -> Option<u16> {
        let mut named = self.natives.iter().map(Native::sse_registers);
        named.try_fold(0, |all, one| Some(all | one?)).map(|named: u16| !named)
    }
}

/// What an instruction leaves in the upper bytes of an XMM register that it writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Upper {
    /// Zero above so many bytes.
    Zero(u32),
    /// What was there above so many bytes.
    Kept(u32),
    /// All of it is what the register of this number holds.
    Copied(u32),
    /// Something else.
    Other,
}

impl Native {
    /// What it does to the upper bytes of the register that it writes.
    pub fn upper(&self) -> Upper {
        use Code::*;
        let inst = &self.inst;
        match inst.code() {
            Movsd_xmm_xmmm64 | Movss_xmm_xmmm32 if inst.op1_kind() != OpKind::Memory => {
                Upper::Other
            }
            Movsd_xmm_xmmm64 | Movq_xmm_xmmm64 | Movq_xmm_rm64 => Upper::Zero(8),
            Movss_xmm_xmmm32 | Movd_xmm_rm32 => Upper::Zero(4),
            Movaps_xmm_xmmm128 | Movapd_xmm_xmmm128 | Movdqa_xmm_xmmm128
                if inst.op1_kind() == OpKind::Register =>
            {
                Upper::Copied(inst.op1_register().number() as u32)
            }
            Pxor_xmm_xmmm128 | Xorps_xmm_xmmm128 | Xorpd_xmm_xmmm128
                if inst.op1_kind() == OpKind::Register
                    && inst.op0_register() == inst.op1_register() =>
            {
                Upper::Zero(0)
            }
            Addsd_xmm_xmmm64 | Subsd_xmm_xmmm64 | Mulsd_xmm_xmmm64 | Divsd_xmm_xmmm64
            | Minsd_xmm_xmmm64 | Maxsd_xmm_xmmm64 | Sqrtsd_xmm_xmmm64 | Cvtsi2sd_xmm_rm64
            | Cvtsi2sd_xmm_rm32 | Cvtss2sd_xmm_xmmm32 => Upper::Kept(8),
            Addss_xmm_xmmm32 | Subss_xmm_xmmm32 | Mulss_xmm_xmmm32 | Divss_xmm_xmmm32
            | Minss_xmm_xmmm32 | Maxss_xmm_xmmm32 | Sqrtss_xmm_xmmm32 | Cvtsi2ss_xmm_rm64
            | Cvtsi2ss_xmm_rm32 | Cvtsd2ss_xmm_xmmm64 => Upper::Kept(4),
            _ => Upper::Other,
        }
    }
}

/// Is this a vector register of more than 16 bytes?
fn wide(register: Register) -> bool {
    register.is_vector_register() && register.size() > 16
}
