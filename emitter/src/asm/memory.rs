//! Instructions with a ModRM byte: opcodes, operands in memory, and their bytes (Intel SDM vol. 2,
//! 2.1 to 2.3).

use std::ops::Deref;

/// The most bytes of an instruction.
const MOST: usize = 15;

/// A segment whose base is added to the address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Segment {
    None,
    Fs,
    Gs,
}

/// The base of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Base {
    None,
    /// The end of the instruction.
    Next,
    Register(u8),
}

/// An operand in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mem {
    segment: Segment,
    base: Base,
    /// The index register, which is not rsp, and the binary logarithm of its scale.
    index: Option<(u8, u8)>,
    displacement: i32,
    /// The displacement has four bytes even if fewer would do.
    is_wide: bool,
}

impl Mem {
    const NOTHING: Mem = Mem {
        segment: Segment::None,
        base: Base::None,
        index: None,
        displacement: 0,
        is_wide: false,
    };

    /// `gs:[field]`
    pub const fn context(field: usize) -> Mem {
        Mem { segment: Segment::Gs, displacement: field as i32, ..Mem::NOTHING }
    }

    /// `[address]`, sign-extended
    pub const fn absolute(address: u32) -> Mem {
        Mem { displacement: address as i32, ..Mem::NOTHING }
    }

    /// `[rip + …]`: the displacement is to be filled in. It is the last four bytes of the
    /// instruction, or those before its immediate.
    pub const fn relative() -> Mem {
        Mem { base: Base::Next, ..Mem::NOTHING }
    }

    /// `[r]`
    pub const fn at(r: u8) -> Mem {
        Mem { base: Base::Register(r), ..Mem::NOTHING }
    }

    /// `[… + displacement]`
    pub const fn plus(self, displacement: i32) -> Mem {
        Mem { displacement: self.displacement + displacement, ..self }
    }

    /// `[… + r * 2^shift]`; the register is not rsp.
    pub const fn index(self, r: u8, shift: u8) -> Mem {
        Mem { index: Some((r, shift)), ..self }
    }

    /// `[r*8 + table]`
    pub const fn table(table: u32, r: u8) -> Mem {
        Mem::absolute(table).index(r, 3)
    }

    /// The same operand, with a displacement of four bytes even if fewer would do.
    pub const fn wide(self) -> Mem {
        Mem { is_wide: true, ..self }
    }

    /// `fs:[…]`
    pub const fn fs(self) -> Mem {
        Mem { segment: Segment::Fs, ..self }
    }
}

/// An instruction without its operands.
#[derive(Clone, Copy)]
pub(super) struct Opcode {
    /// A prefix that belongs to the opcode, or 0.
    prefix: u8,
    /// Is there 0f before it?
    is_two: bool,
    byte: u8,
    /// Operands of 64 bits.
    is_wide: bool,
}

/// A VEX opcode of map 0f38: the number of its prefix, and the byte.
#[derive(Clone, Copy)]
pub(super) struct VexOpcode(u8, u8);

impl Opcode {
    pub const VEX_PEXT: VexOpcode = VexOpcode(2, 0xf5);
    pub const VEX_SHRX: VexOpcode = VexOpcode(3, 0xf7);

    /// One byte, operands of 32 bits if nothing else is said.
    pub const fn one(byte: u8) -> Opcode {
        Opcode { prefix: 0, is_two: false, byte, is_wide: false }
    }

    /// One byte, operands of 64 bits.
    pub const fn wide(byte: u8) -> Opcode {
        Opcode { is_wide: true, ..Opcode::one(byte) }
    }

    /// 0f and a byte.
    pub const fn two(byte: u8) -> Opcode {
        Opcode { is_two: true, ..Opcode::one(byte) }
    }

    /// 0f and a byte, operands of 64 bits.
    pub const fn wide_two(byte: u8) -> Opcode {
        Opcode { is_wide: true, ..Opcode::two(byte) }
    }

    pub const fn with_66(self) -> Opcode {
        Opcode { prefix: 0x66, ..self }
    }

    pub const fn with_f3(self) -> Opcode {
        Opcode { prefix: 0xf3, ..self }
    }
}

/// The bytes of an instruction.
pub(super) struct Inst {
    bytes: [u8; MOST],
    len: usize,
}

impl Deref for Inst {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Inst {
    /// With an operand in memory; `reg` is the other operand, or a part of the opcode.
    #[inline]
    pub fn memory(opcode: Opcode, reg: u8, memory: Mem) -> Inst {
        let mut inst = Inst { bytes: [0; MOST], len: 0 };
        inst.segment(memory.segment);
        let base = if let Base::Register(r) = memory.base { r } else { 0 };
        inst.opcode(opcode, reg, memory.index.map_or(0, |(r, _)| r), base);
        inst.address(reg, memory);
        inst
    }

    /// With two registers.
    #[inline]
    pub fn register(opcode: Opcode, reg: u8, rm: u8) -> Inst {
        let mut inst = Inst { bytes: [0; MOST], len: 0 };
        inst.opcode(opcode, reg, 0, rm);
        inst.byte(0xc0 | (reg & 7) << 3 | rm & 7);
        inst
    }

    /// With three registers, VEX-encoded; `v` is encoded in the prefix.
    #[inline]
    pub fn vex_register(opcode: VexOpcode, is_wide: bool, reg: u8, v: u8, rm: u8) -> Inst {
        let mut inst = Inst { bytes: [0; MOST], len: 0 };
        inst.vex(opcode, is_wide, reg, v, 0, rm);
        inst.byte(0xc0 | (reg & 7) << 3 | rm & 7);
        inst
    }

    /// With two registers of 32 bits and an operand in memory, VEX-encoded.
    #[inline]
    pub fn vex_memory(opcode: VexOpcode, reg: u8, v: u8, memory: Mem) -> Inst {
        let mut inst = Inst { bytes: [0; MOST], len: 0 };
        inst.segment(memory.segment);
        let base = if let Base::Register(r) = memory.base { r } else { 0 };
        inst.vex(opcode, false, reg, v, memory.index.map_or(0, |(r, _)| r), base);
        inst.address(reg, memory);
        inst
    }

    /// The same with an immediate.
    #[inline]
    pub fn imm(&mut self, value: &[u8]) -> &[u8] {
        self.append(value);
        self
    }

    #[inline]
    fn byte(&mut self, byte: u8) {
        self.bytes[self.len] = byte;
        self.len += 1;
    }

    #[inline]
    fn append(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    #[inline]
    fn segment(&mut self, segment: Segment) {
        match segment {
            Segment::None => {}
            Segment::Fs => self.byte(0x64),
            Segment::Gs => self.byte(0x65),
        }
    }

    #[inline]
    fn opcode(&mut self, opcode: Opcode, reg: u8, index: u8, base: u8) {
        if opcode.prefix != 0 {
            self.byte(opcode.prefix);
        }
        let rex = u8::from(opcode.is_wide) << 3 | (reg >> 3) << 2 | (index >> 3) << 1 | base >> 3;
        if rex != 0 {
            self.byte(0x40 | rex);
        }
        if opcode.is_two {
            self.byte(0x0f);
        }
        self.byte(opcode.byte);
    }

    /// The prefix of three bytes and the opcode. Its bits of register numbers are complemented.
    fn vex(
        &mut self,
        VexOpcode(prefix, byte): VexOpcode,
        is_wide: bool,
        reg: u8,
        v: u8,
        index: u8,
        base: u8,
    ) {
        const MAP_0F38: u8 = 2;
        let extended = (reg >> 3) << 7 | (index >> 3) << 6 | (base >> 3) << 5;
        self.append(&[
            0xc4,
            extended ^ 0xe0 | MAP_0F38,
            u8::from(is_wide) << 7 | (v ^ 15) << 3 | prefix,
            byte,
        ]);
    }

    /// ModRM, SIB and displacement.
    #[inline]
    fn address(&mut self, reg: u8, memory: Mem) {
        let reg = (reg & 7) << 3;
        let displacement = memory.displacement.to_le_bytes();
        // No index has the number of rsp.
        let sib =
            |base: u8| memory.index.map_or(4 << 3, |(r, shift)| shift << 6 | (r & 7) << 3) | base;
        let base = match memory.base {
            Base::Next => {
                self.byte(reg | 5);
                return self.append(&displacement);
            }
            Base::None => {
                self.append(&[reg | 4, sib(5)]);
                return self.append(&displacement);
            }
            Base::Register(r) => r & 7,
        };
        let is_short = !memory.is_wide && i8::try_from(memory.displacement).is_ok();
        // rbp and r13 as bases need a displacement, rsp and r12 a SIB byte.
        let (mode, len) = match memory.displacement {
            0 if base != 5 && !memory.is_wide => (0, 0),
            _ if is_short => (1 << 6, 1),
            _ => (2 << 6, 4),
        };
        if memory.index.is_some() || base == 4 {
            self.append(&[mode | reg | 4, sib(base)]);
        } else {
            self.byte(mode | reg | base);
        }
        self.append(&displacement[..len]);
    }
}
