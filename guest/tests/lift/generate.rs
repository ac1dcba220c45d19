//! Random instructions and states whose memory operands lie in the scratch memory.
//!
//! Instructions are random bytes shaped like instructions (prefixes, opcode, ModRM, immediates), so
//! encodings that are valid but rare occur too. Displacements of branches, and of operands without
//! a base register, are replaced afterwards.

use crate::arena::{Arena, Registers, SCRATCH_BYTES};
use crate::rng::Rng;
use dynasour_guest::decode::{Bytes, Decoded, Reader, decoder_options};
use iced_x86::{Decoder, Instruction, Mnemonic as M, OpKind, Register};

/// An instruction at the arena's slot.
#[derive(Clone, Copy)]
pub struct Sample {
    pub inst: Instruction,
    bytes: [u8; 16],
}

/// The opcode maps to choose from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Opcodes that compilers use for integers.
    Integer,
    /// Every opcode map.
    All,
}

/// A state in which an instruction runs.
#[derive(Clone, Copy)]
pub struct State {
    pub registers: Registers,
    pub fs_base: u64,
    pub gs_base: u64,
    /// Address of the explicit memory operand.
    pub operand: u64,
    /// Where to store the target of an indirect control transfer, if the instruction reads it from
    /// memory.
    pub target_at: Option<u64>,
}

const REX_PERCENT: u64 = 55;

fn random_bytes(rng: &mut Rng, space: Space) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut len = 0;
    let mut push = |b: u8| {
        if len < 16 {
            bytes[len] = b;
            len += 1;
        }
    };
    for (prefix, percent) in [
        (0x66, 18),
        (0x67, 8),
        (0xf3, 6),
        (0xf2, 4),
        (0x64, 3),
        (0x65, 3),
        (0x2e, 1),
        (0xf0, 1),
        (0x66, 1),
    ] {
        if rng.chance(percent) {
            push(prefix);
        }
    }
    // Instructions with one source need all bits of vvvv (and V' of EVEX) set.
    let no_second_source = if rng.chance(40) { (0x78, 8) } else { (0, 0) };
    let escape = rng.below(100);
    let vector_bounds = if space == Space::All { (35, 65) } else { (8, 8) };
    if escape < vector_bounds.0 && (space == Space::All || escape < 8) {
        // VEX: C4 with a random map, or C5.
        if space == Space::All && rng.chance(30) {
            push(0xc5);
        } else {
            push(0xc4);
            let map = if space == Space::All { 1 + rng.below(3) } else { 2 + rng.below(2) };
            push((rng.next() as u8 & 0xe0) | map as u8);
        }
        push(rng.next() as u8 | no_second_source.0);
        push(if space == Space::All {
            rng.next() as u8
        } else {
            [0xf2, 0xf7, 0xf0][rng.below(3) as usize]
        });
    } else if escape < vector_bounds.1 {
        push(0x62);
        if rng.chance(8) {
            // Gathers and scatters, which need a mask and an index.
            push((rng.next() as u8 & 0xf0) | 2);
            push(rng.next() as u8 & 0x80 | 0x7d);
            push(rng.next() as u8 & 0x68 | (1 + rng.below(7) as u8));
            push([0x90, 0xa0][rng.below(2) as usize] + rng.below(4) as u8);
            push(rng.next() as u8 & 0xf8 | 4);
        } else {
            push((rng.next() as u8 & 0xf0) | (1 + rng.below(3)) as u8);
            push(rng.next() as u8 | 4 | no_second_source.0);
            let mask = if rng.chance(30) { !0x87 } else { !0 };
            push(rng.next() as u8 & mask | no_second_source.1);
            push(rng.next() as u8);
        }
    } else {
        if rng.chance(REX_PERCENT) {
            push(0x40 | rng.next() as u8 & 15);
        }
        match rng.below(100) {
            0..45 => {}
            45..90 => push(0x0f),
            90..96 => {
                push(0x0f);
                push(0x38);
            }
            _ => {
                push(0x0f);
                push(0x3a);
            }
        }
        push(rng.next() as u8);
    }
    // ModRM: a register operand as often as a memory operand.
    push(if rng.chance(50) { 0xc0 | rng.next() as u8 } else { rng.next() as u8 });
    push(rng.next() as u8);
    let mut tail = rng.interesting();
    if rng.chance(50) {
        tail = rng.next();
    }
    while len < 16 {
        bytes[len] = tail as u8;
        tail = tail.rotate_right(8);
        len += 1;
    }
    bytes
}

impl Sample {
    /// The instruction that starts with `bytes`, if any.
    pub fn decode(bytes: [u8; 16], pc: u64) -> Option<Sample> {
        match Reader::new(&Bytes { start: pc, bytes: &bytes }).decode(pc) {
            Decoded::Inst(inst) => Some(Sample { inst, bytes }),
            _ => None,
        }
    }

    /// A random instruction that `accept` takes, memory and branch displacements patched.
    pub fn random(
        rng: &mut Rng,
        arena: &Arena,
        space: Space,
        accept: impl Fn(&Instruction) -> bool,
    ) -> Sample {
        loop {
            let Some(mut sample) = Sample::decode(random_bytes(rng, space), arena.slot()) else {
                continue;
            };
            if accept(&sample.inst) && sample.patch(rng, arena) {
                return sample;
            }
        }
    }

    /// The instruction's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.inst.len()]
    }

    /// Points branches at the arena's `taken`, and operands without a base register into scratch
    /// memory.
    fn patch(&mut self, rng: &mut Rng, arena: &Arena) -> bool {
        let inst = self.inst;
        let mut decoder = Decoder::with_ip(64, &self.bytes[..15], inst.ip(), decoder_options());
        let _ = decoder.decode();
        let offsets = decoder.get_constant_offsets(&inst);
        let next = inst.next_ip();
        let patch = if inst.op_kind(0) == OpKind::NearBranch64 {
            let size = offsets.immediate_size();
            Some((offsets.immediate_offset(), size, arena.taken().wrapping_sub(next)))
        } else if inst.op_kinds().any(|k| k == OpKind::Memory) {
            let middle = middle(rng, arena);
            match (inst.memory_base(), inst.memory_index()) {
                (Register::RIP | Register::EIP, _) => Some((
                    offsets.displacement_offset(),
                    offsets.displacement_size(),
                    middle.wrapping_sub(next),
                )),
                (Register::None, _) => {
                    Some((offsets.displacement_offset(), offsets.displacement_size(), middle))
                }
                _ => None,
            }
        } else {
            None
        };
        if let Some((offset, size, v)) = patch {
            self.bytes[offset..offset + size].copy_from_slice(&v.to_le_bytes()[..size]);
        }
        match Sample::decode(self.bytes, inst.ip()) {
            Some(patched) if patched.inst.code() == inst.code() => {
                *self = patched;
                true
            }
            _ => false,
        }
    }

    /// A random state in which the memory operands of the instruction lie in scratch memory; `None`
    /// if the operands make that impossible.
    pub fn state(&self, rng: &mut Rng, arena: &Arena) -> Option<State> {
        let inst = &self.inst;
        let mut registers = Registers::default();
        for g in &mut registers.gpr {
            *g = rng.interesting();
        }
        registers.flags = 0x202 | rng.next() & dynasour_ir::semantics::ARITH_FLAGS;
        let mut state = State {
            registers,
            fs_base: rng.below(1 << 46),
            gs_base: rng.below(1 << 46),
            operand: 0,
            target_at: None,
        };
        if inst.is_stack_instruction() || inst.mnemonic() == M::Leave {
            state.registers.gpr[4] = middle(rng, arena);
        }
        if inst.mnemonic() == M::Leave {
            state.registers.gpr[5] = middle(rng, arena);
        }
        let gpr = &mut state.registers.gpr;
        let has_memory = inst.op_kinds().any(|k| k == OpKind::Memory);
        if has_memory && has_bit_offset(inst) {
            let bits = i64::from(inst.op1_register().size() as u32) * 8;
            let index = rng.below(16000) as i64 - 8000;
            let index = if bits == 16 { index % 8000 } else { index };
            let upper = if bits == 64 { 0 } else { rng.next() << bits };
            let mask = if bits == 64 { u64::MAX } else { (1 << bits) - 1 };
            gpr[inst.op1_register().full_register().number()] = index as u64 & mask | upper;
        }
        if has_memory && !inst.is_vsib() && inst.mnemonic() != M::Lea {
            state.place_operand(rng, arena, inst)?;
            if !arena.is_walled_in(state.operand.wrapping_add_signed(state.bit_offset(inst) >> 3)) {
                return None;
            }
        }
        let gpr = &mut state.registers.gpr;
        match inst.mnemonic() {
            M::Ret => state.target_at = Some(gpr[4]),
            M::Call | M::Jmp if inst.op0_kind() == OpKind::Register => {
                let reg = inst.op0_register().number();
                if reg == 4 {
                    return None;
                }
                gpr[reg] = arena.taken();
            }
            M::Call | M::Jmp if inst.op0_kind() == OpKind::Memory => {
                state.target_at = Some(state.operand)
            }
            _ => {}
        }
        Some(state)
    }
}

/// Whether a register holds an offset in bits from the memory operand.
fn has_bit_offset(inst: &Instruction) -> bool {
    matches!(inst.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc)
        && inst.op1_kind() == OpKind::Register
}

/// An address well inside the scratch memory.
fn middle(rng: &mut Rng, arena: &Arena) -> u64 {
    let quarter = SCRATCH_BYTES as u64 / 4;
    let align = [1, 1, 8, 64][rng.below(4) as usize];
    (arena.scratch() + quarter + rng.below(2 * quarter)) / align * align
}

impl State {
    /// The distance in bits from the memory operand that the instruction reaches: 0 unless a
    /// register holds an offset. (The register may have been taken for the address.)
    fn bit_offset(&self, inst: &Instruction) -> i64 {
        if !has_bit_offset(inst) {
            return 0;
        }
        let register = inst.op1_register();
        let unused = 64 - 8 * register.size() as u32;
        (self.registers.gpr[register.full_register().number()] << unused) as i64 >> unused
    }

    /// Chooses base, index and segment base so that the explicit memory operand lies in scratch
    /// memory.
    fn place_operand(&mut self, rng: &mut Rng, arena: &Arena, inst: &Instruction) -> Option<()> {
        let (base, index) = (inst.memory_base(), inst.memory_index());
        let disp = inst.memory_displacement64();
        let scale = u64::from(inst.memory_index_scale());
        let narrow = base.is_gpr32() || index.is_gpr32();
        let mask = if narrow { u64::from(u32::MAX) } else { u64::MAX };
        let segment = inst.memory_segment();
        let has_segment = matches!(segment, Register::FS | Register::GS);
        let wanted = middle(rng, arena);
        let number = |r: Register| r.full_register().number();
        let gpr = &mut self.registers.gpr;
        let set = |gpr: &mut [u64; 16], rng: &mut Rng, r: Register, v: u64| {
            gpr[number(r)] = if narrow { v & mask | rng.next() << 32 } else { v };
        };
        let value = |gpr: &[u64; 16], r: Register| match r {
            Register::AL => gpr[0] & 0xff,
            _ => gpr[number(r)] & mask,
        };
        let offset = match (base, index) {
            (Register::RIP | Register::EIP, _) | (Register::None, Register::None) => disp,
            (Register::None, index) => {
                let v = rng.below(SCRATCH_BYTES as u64 / 4) / scale;
                set(gpr, rng, index, v);
                v.wrapping_mul(scale).wrapping_add(disp) & mask
            }
            (base, index) if base == index => {
                let v = wanted.wrapping_sub(disp) / (1 + scale);
                set(gpr, rng, base, v);
                v.wrapping_mul(1 + scale).wrapping_add(disp) & mask
            }
            (base, index) => {
                let scaled =
                    if index == Register::None { 0 } else { value(gpr, index).wrapping_mul(scale) };
                let offset = if has_segment { rng.below(1 << 31) } else { wanted };
                set(gpr, rng, base, offset.wrapping_sub(disp).wrapping_sub(scaled) & mask);
                offset
            }
        };
        match segment {
            Register::FS => self.fs_base = wanted.wrapping_sub(offset),
            Register::GS => self.gs_base = wanted.wrapping_sub(offset),
            _ => {}
        }
        self.operand = if has_segment { wanted } else { offset };
        // A segment base must be canonical, and the operand must lie inside the scratch memory.
        let canonical = |a: u64| (a as i64) << 16 >> 16 == a as i64;
        let inside = self.operand.wrapping_sub(arena.scratch()) < SCRATCH_BYTES as u64;
        (canonical(self.fs_base) && canonical(self.gs_base) && inside).then_some(())
    }
}
