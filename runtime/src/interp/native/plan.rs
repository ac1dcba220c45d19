//! Plans a thunk: which state it loads and stores, and which host registers it uses for itself.
//!
//! The thunk's own registers are one for the context, one for the address of the memory operand,
//! and rax, rcx and rdx as scratch registers outside the instruction. The first two are chosen
//! among the registers that the instruction does not use.
//!
//! Data: [`Plan`], a plain value; [`super::thunk`] generates the code from it. No lock.
//!
//! Example: `paddd xmm1, [rdi + 8]` becomes `paddd xmm1, [rsi]`. The plan has the context in rdi,
//! the address in rsi, loads vector register 1 and needs the component SSE.

use super::{NativeError, gpr64};
use crate::interp::code;
use crate::interp::xstate::{self, Layout};
use dynasour_ir::{Effects, Loc, Native};
use iced_x86::{EncodingKind, Instruction, OpKind, Register, RflagsBits};
use smallvec::SmallVec;

/// The plan of a thunk.
pub(super) struct Plan<'n> {
    pub native: &'n Native,
    /// The instruction with its memory operand rewritten.
    pub inst: Instruction,
    /// Slots of the general registers that the instruction reads.
    pub inputs: &'n [u16],
    /// Slots of the general registers that the instruction writes.
    pub outputs: &'n [u16],
    /// Slot of the arithmetic flags that are loaded before the instruction.
    pub flags_in: Option<u16>,
    /// Slot in which the flags are stored after the instruction.
    pub flags_out: Option<u16>,
    /// Holds the context's address.
    pub context: Register,
    /// Holds the address of the memory operand, if there is one.
    pub address: Option<Register>,
    /// If the instruction accesses memory without an explicit operand and has the segment prefix FS
    /// or GS: the slot with the base of the segment. The host's FS base is set to it while the
    /// instruction is executed.
    pub segment: Option<u16>,
    /// Is it a VEX or EVEX instruction that uses vector or mask registers?
    pub wide: bool,
    /// If `wide`: bytes of each of vector registers 0 to 15 that are loaded. That is the width of
    /// the widest vector operand, or all bytes for a restartable instruction.
    pub width: u32,
    /// Vector registers that are loaded, a bit for each.
    pub load_vectors: u32,
    /// Mask registers that are loaded and stored, a bit for each.
    pub masks: u8,
    /// Does it use the x87 state?
    pub x87: bool,
    /// Does it read the direction flag?
    pub reads_direction: bool,
    /// Does it write the direction flag?
    pub writes_direction: bool,
    /// Components of the extended state that it uses.
    pub components: u64,
}

/// The width of `reg` in bytes if it is a vector register, else 0.
fn vector_width(reg: Register) -> u32 {
    if reg.is_vector_register() { reg.size() as u32 } else { 0 }
}

/// Registers for the address of the memory operand, in order of preference. Those that need no REX
/// prefix come first, because AH to DH cannot be encoded with one. rax, rcx and rdx are scratch
/// registers of the thunk.
const ADDRESS: [Register; 5] =
    [Register::RSI, Register::RDI, Register::RBX, Register::RBP, Register::R8];
/// Registers for the address of the context, in order of preference.
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

/// The mask registers that a native reads or writes: bit n is kn.
fn mask_registers(operands: &[Register], native: &Native) -> u8 {
    let read = operands.iter().filter(|r| r.is_k()).map(|r| r.number());
    let written = native.writes.iter().filter_map(|loc| match loc {
        Loc::Mask(n) => Some(usize::from(*n)),
        _ => None,
    });
    read.chain(written).fold(0, |set, n| set | 1 << n)
}

impl<'n> Plan<'n> {
    /// Plans the thunk of `native`; the slots are those of [`super::NativeOp::new`].
    pub fn new(
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
            native.gpr_in.iter().chain(&native.gpr_out).map(|g| gpr64(g.number())).collect();
        busy.extend(operands.iter().filter(|r| r.is_gpr()).map(|r| r.full_register()));
        if native.mem_size.is_none() {
            busy.push(inst.memory_base().full_register());
        }

        let mut address = None;
        if native.mem_size.is_some() {
            let reg =
                ADDRESS.into_iter().find(|r| !busy.contains(r)).ok_or(NativeError::Registers)?;
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
        let context =
            CONTEXT.into_iter().find(|r| !busy.contains(r)).ok_or(NativeError::Registers)?;

        let restartable = native.effects.contains(Effects::RESTARTABLE);
        let layout = Layout::get();
        let vectors = native.vec_read | native.vec_write;
        let masks = mask_registers(&operands, native);
        let encoded_wide =
            !matches!(inst.code().encoding(), EncodingKind::Legacy | EncodingKind::D3NOW);
        let wide = encoded_wide && (vectors != 0 || masks != 0);
        let mut width = operands.iter().map(|r| vector_width(*r)).max().unwrap_or(0);
        if restartable && vectors != 0 {
            // After a fault the thunk stores all registers that the instruction writes, so it must
            // have loaded all of their bytes.
            width = if layout.has_avx512() { 64 } else { 32 };
        }
        let x87 = native.writes.contains(&Loc::X87);
        let uses = [
            (x87, xstate::X87),
            (vectors & 0xffff != 0, xstate::SSE),
            (wide && vectors & 0xffff != 0 && width >= 32, xstate::AVX),
            (wide && vectors & 0xffff != 0 && width >= 64, xstate::ZMM_HIGH),
            (vectors >> 16 != 0, xstate::HIGH_16),
            (masks != 0, xstate::OPMASK),
        ];
        let components = uses.iter().filter(|(used, _)| *used).fold(0, |all, (_, c)| all | c);
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
            reads_direction: inst.rflags_read() & RflagsBits::DF != 0,
            writes_direction: native.writes.contains(&Loc::Df),
            components,
        })
    }
}
