//! What a thunk has to do for its instruction: which state to load, what to store, which registers
//! to use for itself.

use super::{NativeError, full};
use crate::interp::code;
use crate::interp::xstate::{self, Layout};
use dynasour_ir::{Effects, Loc, Native};
use iced_x86::{EncodingKind, Instruction, OpKind, Register, RflagsBits};
use smallvec::SmallVec;

/// What a thunk has to do.
pub(super) struct Plan<'n> {
    pub native: &'n Native,
    /// The instruction with its memory operand rewritten.
    pub inst: Instruction,
    pub inputs: &'n [u16],
    pub outputs: &'n [u16],
    pub flags_in: Option<u16>,
    pub flags_out: Option<u16>,
    /// Holds the context.
    pub context: Register,
    /// Holds the address of the memory operand, if there is one.
    pub address: Option<Register>,
    /// The slot with the base of the segment that implicit memory is addressed in, other than the
    /// flat one. FS stands in for it while the instruction runs.
    pub segment: Option<u16>,
    /// VEX or EVEX on vector or mask registers.
    pub wide: bool,
    /// Bytes of the widest vector operand.
    pub width: u32,
    pub load_vectors: u32,
    pub masks: u8,
    pub x87: bool,
    pub reads_direction: bool,
    pub writes_direction: bool,
    pub components: u64,
}

fn vector_width(reg: Register) -> u32 {
    if reg.is_vector_register() { reg.size() as u32 } else { 0 }
}

impl<'n> Plan<'n> {
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
            native.gpr_in.iter().chain(&native.gpr_out).map(|g| full(g.number())).collect();
        busy.extend(operands.iter().filter(|r| r.is_gpr()).map(|r| r.full_register()));
        if native.mem_size.is_none() {
            busy.push(inst.memory_base().full_register());
        }

        // Registers that need no REX prefix first: AH to DH cannot be encoded with one. rax, rcx
        // and rdx are scratch registers of the thunk.
        const ADDRESS: [Register; 5] =
            [Register::RSI, Register::RDI, Register::RBX, Register::RBP, Register::R8];
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
        let mut masks = 0u8;
        for reg in operands.iter().filter(|r| r.is_k()) {
            masks |= 1 << reg.number();
        }
        for loc in &native.writes {
            if let Loc::Mask(n) = loc {
                masks |= 1 << n;
            }
        }
        let encoded_wide =
            !matches!(inst.code().encoding(), EncodingKind::Legacy | EncodingKind::D3NOW);
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
