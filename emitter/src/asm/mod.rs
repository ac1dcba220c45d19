//! The assembler: the only code of the emitter that encodes instructions.
//!
//! [`Assembler`] has a function for each instruction form that is needed, over any buffer of bytes:
//! a copied block, a piece, a fragment's code, a stub. [`Asm`] is a buffer with labels, jumps that
//! are resolved when their label is bound, and relocations, which are resolved when the code has an
//! address. Forms are added as they are needed; tests compare each with the decoder of iced-x86.
//! Instructions that come from outside, those of the guest's that are encoded anew with another
//! address and those that selection names by their iced [`Code`](iced_x86::Code), go through iced's
//! encoder: [`Asm::instruction`].
//!
//! There is no general encoder behind these functions because of copied blocks: a block has to take
//! less than 0.6 µs to make, while iced's encoder takes some hundred nanoseconds for an instruction
//! and half a millisecond for its tables.
//!
//! **Words.** A register is its number in instructions (0 is rax, 15 is r15). A *field* is the
//! offset of a word in the thread's context, which `gs` points to. `here` is the offset behind what
//! has been written.
//!
//! **Invariants.** An instruction has the length that its function says, whatever its operands are,
//! where callers rely on it: those with a field that is patched, and [`Mem::wide`] displacements.
//! All jumps of an [`Asm`] are resolved when it is finished. A buffer belongs to the thread that
//! writes it; no lock is needed.
//!
//! ```text
//! let mut asm = Asm::new();
//! let live = asm.label();
//! asm.load(RCX, offset::EXTENDED_AWAY);          // mov rcx, gs:[…]
//! asm.jrcxz(live);
//! …
//! asm.bind(live);
//! ```

mod buffer;
mod memory;
#[cfg(test)]
mod tests;

pub(crate) use buffer::{Asm, Label, Placed};
pub(crate) use memory::Mem;
use memory::{Inst, Opcode};

use iced_x86::{Encoder, IcedError, Instruction};
use smallvec::SmallVec;

/// Numbers of registers.
pub(crate) const RAX: u8 = 0;
pub(crate) const RCX: u8 = 1;
pub(crate) const RDX: u8 = 2;
pub(crate) const RBX: u8 = 3;
pub(crate) const RSP: u8 = 4;
pub(crate) const RBP: u8 = 5;
pub(crate) const RSI: u8 = 6;
pub(crate) const RDI: u8 = 7;

/// The condition "equal", as instructions number it.
pub(crate) const EQUAL: u8 = 4;
/// The condition "not equal".
pub(crate) const NOT_EQUAL: u8 = 5;

/// A rel32 field that may be patched lies within this many aligned bytes: it is then written by one
/// store.
pub(crate) const FIELD: usize = 8;

/// The width of a comparison's operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Width {
    Byte,
    Word,
    Dword,
}

/// Instruction forms over a buffer. A function that leaves a field to be filled in later says so.
pub(crate) trait Assembler {
    /// Appends bytes.
    fn put(&mut self, bytes: &[u8]);

    /// The offset of the next byte.
    fn here(&self) -> usize;

    // Fields of the context. These are the commonest, so they are written in one go.

    /// `mov gs:[field], r`
    #[inline]
    fn store(&mut self, r: u8, field: usize) {
        let [a, b, c, d] = (field as u32).to_le_bytes();
        self.put(&[0x65, 0x48 | (r >> 3) << 2, 0x89, 0x04 | (r & 7) << 3, 0x25, a, b, c, d]);
    }

    /// `mov r, gs:[field]`
    #[inline]
    fn load(&mut self, r: u8, field: usize) {
        let [a, b, c, d] = (field as u32).to_le_bytes();
        self.put(&[0x65, 0x48 | (r >> 3) << 2, 0x8b, 0x04 | (r & 7) << 3, 0x25, a, b, c, d]);
    }

    /// `mov r32, gs:[field]`
    fn load_half(&mut self, r: u8, field: usize) {
        self.mov_from_32(r, Mem::context(field));
    }

    /// `mov qword gs:[field], value`, sign-extended. The value is the last four bytes.
    #[inline]
    fn store_constant(&mut self, field: usize, value: u32) {
        let ([a, b, c, d], [e, f, g, h]) = ((field as u32).to_le_bytes(), value.to_le_bytes());
        self.put(&[0x65, 0x48, 0xc7, 0x04, 0x25, a, b, c, d, e, f, g, h]);
    }

    /// `mov byte gs:[field], value`
    fn store_byte(&mut self, field: usize, value: u8) {
        let [a, b, c, d] = (field as u32).to_le_bytes();
        self.put(&[0x65, 0xc6, 0x04, 0x25, a, b, c, d, value]);
    }

    /// `mov qword gs:[field], value`, in two halves if the value is not a sign-extended one of 32
    /// bits.
    fn store_word(&mut self, field: usize, value: u64) {
        if let Ok(low) = i32::try_from(value) {
            return self.store_constant(field, low as u32);
        }
        self.mov_to_imm_32(Mem::context(field), value as u32);
        self.mov_to_imm_32(Mem::context(field + 4), (value >> 32) as u32);
    }

    // Moves.

    /// `mov to, from`
    #[inline]
    fn mov(&mut self, to: u8, from: u8) {
        self.put(&[0x48 | (from >> 3) << 2 | to >> 3, 0x89, 0xc0 | (from & 7) << 3 | to & 7]);
    }

    /// `mov r, value`, in the shortest form.
    fn constant(&mut self, r: u8, value: u64) {
        if let Ok(low) = u32::try_from(value) {
            self.mov_imm_32(r, low);
        } else if let Ok(low) = i32::try_from(value as i64) {
            let [a, b, c, d] = low.to_le_bytes();
            self.put(&[0x48 | r >> 3, 0xc7, 0xc0 | r & 7, a, b, c, d]);
        } else {
            self.mov_imm_64(r, value);
        }
    }

    /// `mov r32, value`. The value is the last four bytes.
    fn mov_imm_32(&mut self, r: u8, value: u32) {
        let [a, b, c, d] = value.to_le_bytes();
        let code = [0x41, 0xb8 | r & 7, a, b, c, d];
        self.put(if r >= 8 { &code } else { &code[1..] });
    }

    /// `mov r, value`, in ten bytes. The value is the last eight.
    fn mov_imm_64(&mut self, r: u8, value: u64) {
        self.put(&[0x48 | r >> 3, 0xb8 | r & 7]);
        self.put(&value.to_le_bytes());
    }

    /// `mov r, [memory]`
    fn mov_from(&mut self, r: u8, memory: Mem) {
        self.put(&Inst::memory(Opcode::wide(0x8b), r, memory));
    }

    /// `mov r32, [memory]`
    fn mov_from_32(&mut self, r: u8, memory: Mem) {
        self.put(&Inst::memory(Opcode::one(0x8b), r, memory));
    }

    /// `mov [memory], r`
    fn mov_to(&mut self, memory: Mem, r: u8) {
        self.put(&Inst::memory(Opcode::wide(0x89), r, memory));
    }

    /// `mov qword [memory], value`, sign-extended. The value is the last four bytes.
    fn mov_to_imm(&mut self, memory: Mem, value: i32) {
        self.put(Inst::memory(Opcode::wide(0xc7), 0, memory).imm(&value.to_le_bytes()));
    }

    /// `mov dword [memory], value`. The value is the last four bytes.
    fn mov_to_imm_32(&mut self, memory: Mem, value: u32) {
        self.put(Inst::memory(Opcode::one(0xc7), 0, memory).imm(&value.to_le_bytes()));
    }

    /// `movzx r32, r16`
    fn movzx_16(&mut self, r: u8) {
        self.put(&Inst::register(Opcode::two(0xb7), r, r));
    }

    /// `movzx r32, byte [memory]`
    fn load_8(&mut self, r: u8, memory: Mem) {
        self.put(&Inst::memory(Opcode::two(0xb6), r, memory));
    }

    /// `movzx r32, word [memory]`
    fn load_16(&mut self, r: u8, memory: Mem) {
        self.put(&Inst::memory(Opcode::two(0xb7), r, memory));
    }

    /// `lea r, [memory]`
    fn lea(&mut self, r: u8, memory: Mem) {
        self.put(&Inst::memory(Opcode::wide(0x8d), r, memory));
    }

    /// `lea r32, [memory]`
    fn lea_32(&mut self, r: u8, memory: Mem) {
        self.put(&Inst::memory(Opcode::one(0x8d), r, memory));
    }

    // Stack.

    /// `push r`
    fn push(&mut self, r: u8) {
        let code = [0x41, 0x50 | r & 7];
        self.put(if r >= 8 { &code } else { &code[1..] });
    }

    /// `pop r`
    fn pop(&mut self, r: u8) {
        let code = [0x41, 0x58 | r & 7];
        self.put(if r >= 8 { &code } else { &code[1..] });
    }

    /// `push value`, sign-extended, in five bytes.
    fn push_imm(&mut self, value: i32) {
        let [a, b, c, d] = value.to_le_bytes();
        self.put(&[0x68, a, b, c, d]);
    }

    /// `push qword [memory]`
    fn push_from(&mut self, memory: Mem) {
        self.put(&Inst::memory(Opcode::one(0xff), 6, memory));
    }

    /// `pop qword [memory]`
    fn pop_to(&mut self, memory: Mem) {
        self.put(&Inst::memory(Opcode::one(0x8f), 0, memory));
    }

    /// `pushfq`
    fn pushfq(&mut self) {
        self.put(&[0x9c]);
    }

    /// `popfq`
    fn popfq(&mut self) {
        self.put(&[0x9d]);
    }

    // Flags and arithmetic.

    /// `lahf; seto al`: the arithmetic flags in ax, in their packed form
    /// ([`crate::record::unpack_flags`]).
    fn pack_flags(&mut self) {
        self.put(&[0x9f, 0x0f, 0x90, 0xc0]);
    }

    /// `add al, 0x7f; sahf`: the opposite of [`Assembler::pack_flags`]. The sum overflows if al is
    /// 1.
    fn unpack_flags(&mut self) {
        self.put(&[0x04, 0x7f, 0x9e]);
    }

    /// `and eax, value`
    fn and_eax(&mut self, value: u32) {
        let [a, b, c, d] = value.to_le_bytes();
        self.put(&[0x25, a, b, c, d]);
    }

    /// `or eax, value`
    fn or_eax(&mut self, value: u32) {
        let [a, b, c, d] = value.to_le_bytes();
        self.put(&[0x0d, a, b, c, d]);
    }

    /// `cmp [memory], value`; the value is truncated to the width of the operands.
    fn cmp_imm(&mut self, width: Width, memory: Mem, value: u32) {
        let value = value.to_le_bytes();
        match width {
            Width::Byte => self.put(Inst::memory(Opcode::one(0x80), 7, memory).imm(&value[..1])),
            Width::Word => {
                self.put(Inst::memory(Opcode::one(0x81).with_66(), 7, memory).imm(&value[..2]))
            }
            Width::Dword => self.put(Inst::memory(Opcode::one(0x81), 7, memory).imm(&value)),
        }
    }

    /// `cmp dword [memory], 0`, or `qword`
    fn cmp_zero(&mut self, is_wide: bool, memory: Mem) {
        let opcode = if is_wide { Opcode::wide(0x83) } else { Opcode::one(0x83) };
        self.put(Inst::memory(opcode, 7, memory).imm(&[0]));
    }

    /// `test byte [memory], 1`
    fn test_lowest_bit(&mut self, memory: Mem) {
        self.put(Inst::memory(Opcode::one(0xf6), 0, memory).imm(&[1]));
    }

    /// `pext to, from, mask`
    fn pext(&mut self, to: u8, from: u8, mask: u8) {
        self.put(&Inst::vex_register(Opcode::VEX_PEXT, true, to, from, mask));
    }

    /// `pext to32, from32, [mask]`
    fn pext_32(&mut self, to: u8, from: u8, mask: Mem) {
        self.put(&Inst::vex_memory(Opcode::VEX_PEXT, to, from, mask));
    }

    /// `shrx to32, [memory], count32`
    fn shrx_32(&mut self, to: u8, memory: Mem, count: u8) {
        self.put(&Inst::vex_memory(Opcode::VEX_SHRX, to, count, memory));
    }

    // Transfers. Fields of 32 bits are 0: they are to be filled in, and are the last four bytes.

    /// `jmp` of five bytes.
    #[inline]
    fn jmp(&mut self) {
        self.put(&[0xe9, 0, 0, 0, 0]);
    }

    /// `jcc` of six bytes.
    #[inline]
    fn jcc(&mut self, condition: u8) {
        self.put(&[0x0f, 0x80 | condition, 0, 0, 0, 0]);
    }

    /// `call` of five bytes.
    fn call(&mut self) {
        self.put(&[0xe8, 0, 0, 0, 0]);
    }

    /// `jmp` over this many bytes.
    fn jmp_over(&mut self, distance: i8) {
        self.put(&[0xeb, distance as u8]);
    }

    /// `jrcxz` over this many bytes.
    fn jrcxz_over(&mut self, distance: i8) {
        self.put(&[0xe3, distance as u8]);
    }

    /// `loop` over this many bytes.
    fn loop_over(&mut self, distance: i8) {
        self.put(&[0xe2, distance as u8]);
    }

    /// `jmp qword [memory]`
    fn jmp_through(&mut self, memory: Mem) {
        self.put(&Inst::memory(Opcode::one(0xff), 4, memory));
    }

    /// `ret`
    fn ret(&mut self) {
        self.put(&[0xc3]);
    }

    // The thread's state.

    /// `rdfsbase r`
    fn rdfsbase(&mut self, r: u8) {
        self.put(&Inst::register(Opcode::wide_two(0xae).with_f3(), 0, r));
    }

    /// `wrfsbase r`
    fn wrfsbase(&mut self, r: u8) {
        self.put(&Inst::register(Opcode::wide_two(0xae).with_f3(), 2, r));
    }

    /// `xsave64 [memory]`
    fn xsave64(&mut self, memory: Mem) {
        self.put(&Inst::memory(Opcode::wide_two(0xae), 4, memory));
    }

    /// `xrstor64 [memory]`
    fn xrstor64(&mut self, memory: Mem) {
        self.put(&Inst::memory(Opcode::wide_two(0xae), 5, memory));
    }

    /// `movups xmm, [memory]`
    fn load_xmm(&mut self, r: u8, memory: Mem) {
        self.put(&Inst::memory(Opcode::two(0x10), r, memory));
    }

    /// `kmovq k, [rdx + displacement]`
    fn load_mask_at_rdx(&mut self, r: u8, displacement: u32) {
        self.put(&[0xc4, 0xe1, 0xf8, 0x90, 0x82 | r << 3]);
        self.put(&displacement.to_le_bytes());
    }

    /// `vmovdqu64 zmm, [rdx + displacement]` with a register from 16 on.
    fn load_high_zmm_at_rdx(&mut self, r: u8, displacement: u32) {
        debug_assert!((16..32).contains(&r), "R' is set");
        let bit_3 = if r & 8 == 0 { 0x80 } else { 0 };
        self.put(&[0x62, 0x61 | bit_3, 0xfe, 0x48, 0x6f, 0x82 | (r & 7) << 3]);
        self.put(&displacement.to_le_bytes());
    }

    /// `ldmxcsr [memory]`
    fn ldmxcsr(&mut self, memory: Mem) {
        self.put(&Inst::memory(Opcode::two(0xae), 2, memory));
    }

    /// `fninit`
    fn fninit(&mut self) {
        self.put(&[0xdb, 0xe3]);
    }

    /// `vzeroupper`
    fn vzeroupper(&mut self) {
        self.put(&[0xc5, 0xf8, 0x77]);
    }

    // Nothing.

    /// No-operations of this many bytes together, as few as possible (Intel SDM vol. 2, NOP).
    fn nop(&mut self, mut bytes: usize) {
        const NOPS: [&[u8]; 10] = [
            &[],
            &[0x90],
            &[0x66, 0x90],
            &[0x0f, 0x1f, 0x00],
            &[0x0f, 0x1f, 0x40, 0x00],
            &[0x0f, 0x1f, 0x44, 0x00, 0x00],
            &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00],
            &[0x0f, 0x1f, 0x80, 0x00, 0x00, 0x00, 0x00],
            &[0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
            &[0x66, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
        ];
        while bytes > 0 {
            let n = bytes.min(9);
            self.put(NOPS[n]);
            bytes -= n;
        }
    }

    /// `int3`, this many times. Control never arrives there.
    fn int3(&mut self, times: usize) {
        for _ in 0..times {
            self.put(&[0xcc]);
        }
    }

    /// Pads so that a field of four bytes, which begins `lead` bytes from here, lies within eight
    /// aligned bytes.
    fn align_field(&mut self, lead: usize) {
        let at = (self.here() + lead) % FIELD;
        if at > FIELD - 4 {
            self.nop(FIELD - at);
        }
    }
}

impl Assembler for Vec<u8> {
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }

    #[inline]
    fn here(&self) -> usize {
        self.len()
    }
}

impl<const N: usize> Assembler for SmallVec<[u8; N]>
where
    [u8; N]: smallvec::Array<Item = u8>,
{
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }

    #[inline]
    fn here(&self) -> usize {
        self.len()
    }
}

/// Encodes an instruction of iced's. The encoder is made at its first use.
///
/// # Errors
/// It cannot be encoded.
pub(crate) fn encode(
    encoder: &mut Option<Encoder>,
    inst: &Instruction,
    put: impl FnOnce(&[u8]),
) -> Result<(), IcedError> {
    let encoder = encoder.get_or_insert_with(|| Encoder::new(64));
    let encoded = encoder.encode(inst, 0);
    let mut bytes = encoder.take_buffer();
    if encoded.is_ok() {
        put(&bytes);
    }
    bytes.clear();
    encoder.set_buffer(bytes);
    encoded.map(|_| ())
}
