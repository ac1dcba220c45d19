//! The x86 side of selection: operand sizes, registers, and the iced-x86 [`Code`] of each operation
//! at each size. Tables are indexed by [`Size`].
//!
//! Constants and pure functions: no data, no lock. Example: `INC[Size::B4 as usize]` is the code of
//! `inc r/m32`.

use dynasour_ir::Ty;
use iced_x86::{Code, Register};

/// The size of a register or memory operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// 8 bits
    B1,
    /// 16 bits
    B2,
    /// 32 bits
    B4,
    /// 64 bits
    B8,
}

impl Size {
    /// The exact size of an integer type; `i1` is kept as a byte.
    pub fn of(ty: Ty) -> Size {
        match ty.bits() {
            1 | 8 => Size::B1,
            16 => Size::B2,
            32 => Size::B4,
            _ => Size::B8,
        }
    }

    /// The size in which arithmetic is done when upper bits do not matter: never below 32 bits.
    pub fn wide(ty: Ty) -> Size {
        if ty.bits() > 32 { Size::B8 } else { Size::B4 }
    }
}

/// The register with encoding number `number` at a size.
pub fn register(number: usize, size: Size) -> Register {
    let first = match size {
        Size::B1 => [
            Register::AL,
            Register::CL,
            Register::DL,
            Register::BL,
            Register::SPL,
            Register::BPL,
            Register::SIL,
            Register::DIL,
            Register::R8L,
            Register::R9L,
            Register::R10L,
            Register::R11L,
            Register::R12L,
            Register::R13L,
            Register::R14L,
            Register::R15L,
        ][number],
        Size::B2 => Register::AX + number as u32,
        Size::B4 => Register::EAX + number as u32,
        Size::B8 => Register::RAX + number as u32,
    };
    debug_assert!(number < 16);
    first
}

/// The two-operand arithmetic of the classic encoding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the instructions' own")]
pub enum Alu {
    Add,
    Or,
    Adc,
    Sbb,
    And,
    Sub,
    Xor,
    Cmp,
}

/// Shifts and rotates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the instructions' own")]
pub enum Shift {
    Rol,
    Ror,
    Shl,
    Shr,
    Sar,
}

/// `op r, r/m`
pub fn alu_r_rm(op: Alu, size: Size) -> Code {
    use Code::*;
    let table = match op {
        Alu::Add => [Add_r8_rm8, Add_r16_rm16, Add_r32_rm32, Add_r64_rm64],
        Alu::Or => [Or_r8_rm8, Or_r16_rm16, Or_r32_rm32, Or_r64_rm64],
        Alu::Adc => [Adc_r8_rm8, Adc_r16_rm16, Adc_r32_rm32, Adc_r64_rm64],
        Alu::Sbb => [Sbb_r8_rm8, Sbb_r16_rm16, Sbb_r32_rm32, Sbb_r64_rm64],
        Alu::And => [And_r8_rm8, And_r16_rm16, And_r32_rm32, And_r64_rm64],
        Alu::Sub => [Sub_r8_rm8, Sub_r16_rm16, Sub_r32_rm32, Sub_r64_rm64],
        Alu::Xor => [Xor_r8_rm8, Xor_r16_rm16, Xor_r32_rm32, Xor_r64_rm64],
        Alu::Cmp => [Cmp_r8_rm8, Cmp_r16_rm16, Cmp_r32_rm32, Cmp_r64_rm64],
    };
    table[size as usize]
}

/// `op r/m, r`
pub fn alu_rm_r(op: Alu, size: Size) -> Code {
    use Code::*;
    let table = match op {
        Alu::Add => [Add_rm8_r8, Add_rm16_r16, Add_rm32_r32, Add_rm64_r64],
        Alu::Or => [Or_rm8_r8, Or_rm16_r16, Or_rm32_r32, Or_rm64_r64],
        Alu::Adc => [Adc_rm8_r8, Adc_rm16_r16, Adc_rm32_r32, Adc_rm64_r64],
        Alu::Sbb => [Sbb_rm8_r8, Sbb_rm16_r16, Sbb_rm32_r32, Sbb_rm64_r64],
        Alu::And => [And_rm8_r8, And_rm16_r16, And_rm32_r32, And_rm64_r64],
        Alu::Sub => [Sub_rm8_r8, Sub_rm16_r16, Sub_rm32_r32, Sub_rm64_r64],
        Alu::Xor => [Xor_rm8_r8, Xor_rm16_r16, Xor_rm32_r32, Xor_rm64_r64],
        Alu::Cmp => [Cmp_rm8_r8, Cmp_rm16_r16, Cmp_rm32_r32, Cmp_rm64_r64],
    };
    table[size as usize]
}

/// `op r/m, imm` with the full immediate (32 bits at most)
pub fn alu_rm_imm(op: Alu, size: Size) -> Code {
    use Code::*;
    let table = match op {
        Alu::Add => [Add_rm8_imm8, Add_rm16_imm16, Add_rm32_imm32, Add_rm64_imm32],
        Alu::Or => [Or_rm8_imm8, Or_rm16_imm16, Or_rm32_imm32, Or_rm64_imm32],
        Alu::Adc => [Adc_rm8_imm8, Adc_rm16_imm16, Adc_rm32_imm32, Adc_rm64_imm32],
        Alu::Sbb => [Sbb_rm8_imm8, Sbb_rm16_imm16, Sbb_rm32_imm32, Sbb_rm64_imm32],
        Alu::And => [And_rm8_imm8, And_rm16_imm16, And_rm32_imm32, And_rm64_imm32],
        Alu::Sub => [Sub_rm8_imm8, Sub_rm16_imm16, Sub_rm32_imm32, Sub_rm64_imm32],
        Alu::Xor => [Xor_rm8_imm8, Xor_rm16_imm16, Xor_rm32_imm32, Xor_rm64_imm32],
        Alu::Cmp => [Cmp_rm8_imm8, Cmp_rm16_imm16, Cmp_rm32_imm32, Cmp_rm64_imm32],
    };
    table[size as usize]
}

/// `op r/m, imm8` sign-extended
pub fn alu_rm_imm8(op: Alu, size: Size) -> Code {
    use Code::*;
    let table = match op {
        Alu::Add => [Add_rm8_imm8, Add_rm16_imm8, Add_rm32_imm8, Add_rm64_imm8],
        Alu::Or => [Or_rm8_imm8, Or_rm16_imm8, Or_rm32_imm8, Or_rm64_imm8],
        Alu::Adc => [Adc_rm8_imm8, Adc_rm16_imm8, Adc_rm32_imm8, Adc_rm64_imm8],
        Alu::Sbb => [Sbb_rm8_imm8, Sbb_rm16_imm8, Sbb_rm32_imm8, Sbb_rm64_imm8],
        Alu::And => [And_rm8_imm8, And_rm16_imm8, And_rm32_imm8, And_rm64_imm8],
        Alu::Sub => [Sub_rm8_imm8, Sub_rm16_imm8, Sub_rm32_imm8, Sub_rm64_imm8],
        Alu::Xor => [Xor_rm8_imm8, Xor_rm16_imm8, Xor_rm32_imm8, Xor_rm64_imm8],
        Alu::Cmp => [Cmp_rm8_imm8, Cmp_rm16_imm8, Cmp_rm32_imm8, Cmp_rm64_imm8],
    };
    table[size as usize]
}

/// `op r/m, imm8`
pub fn shift_imm(op: Shift, size: Size) -> Code {
    use Code::*;
    let table = match op {
        Shift::Rol => [Rol_rm8_imm8, Rol_rm16_imm8, Rol_rm32_imm8, Rol_rm64_imm8],
        Shift::Ror => [Ror_rm8_imm8, Ror_rm16_imm8, Ror_rm32_imm8, Ror_rm64_imm8],
        Shift::Shl => [Shl_rm8_imm8, Shl_rm16_imm8, Shl_rm32_imm8, Shl_rm64_imm8],
        Shift::Shr => [Shr_rm8_imm8, Shr_rm16_imm8, Shr_rm32_imm8, Shr_rm64_imm8],
        Shift::Sar => [Sar_rm8_imm8, Sar_rm16_imm8, Sar_rm32_imm8, Sar_rm64_imm8],
    };
    table[size as usize]
}

/// `op r/m, cl`
pub fn shift_cl(op: Shift, size: Size) -> Code {
    use Code::*;
    let table = match op {
        Shift::Rol => [Rol_rm8_CL, Rol_rm16_CL, Rol_rm32_CL, Rol_rm64_CL],
        Shift::Ror => [Ror_rm8_CL, Ror_rm16_CL, Ror_rm32_CL, Ror_rm64_CL],
        Shift::Shl => [Shl_rm8_CL, Shl_rm16_CL, Shl_rm32_CL, Shl_rm64_CL],
        Shift::Shr => [Shr_rm8_CL, Shr_rm16_CL, Shr_rm32_CL, Shr_rm64_CL],
        Shift::Sar => [Sar_rm8_CL, Sar_rm16_CL, Sar_rm32_CL, Sar_rm64_CL],
    };
    table[size as usize]
}

/// `test r/m, r`
pub const TEST: [Code; 4] = {
    use Code::*;
    [Test_rm8_r8, Test_rm16_r16, Test_rm32_r32, Test_rm64_r64]
};

/// `test r/m, imm`
pub const TEST_IMM: [Code; 4] = {
    use Code::*;
    [Test_rm8_imm8, Test_rm16_imm16, Test_rm32_imm32, Test_rm64_imm32]
};

/// `mov r/m, r`
pub const STORE: [Code; 4] = {
    use Code::*;
    [Mov_rm8_r8, Mov_rm16_r16, Mov_rm32_r32, Mov_rm64_r64]
};

/// `mov r/m, imm`
pub const STORE_IMM: [Code; 4] = {
    use Code::*;
    [Mov_rm8_imm8, Mov_rm16_imm16, Mov_rm32_imm32, Mov_rm64_imm32]
};

/// `not r/m`
pub const NOT: [Code; 4] = {
    use Code::*;
    [Not_rm8, Not_rm16, Not_rm32, Not_rm64]
};

/// `neg r/m`
pub const NEG: [Code; 4] = {
    use Code::*;
    [Neg_rm8, Neg_rm16, Neg_rm32, Neg_rm64]
};

/// `inc r/m`
pub const INC: [Code; 4] = {
    use Code::*;
    [Inc_rm8, Inc_rm16, Inc_rm32, Inc_rm64]
};

/// `dec r/m`
pub const DEC: [Code; 4] = {
    use Code::*;
    [Dec_rm8, Dec_rm16, Dec_rm32, Dec_rm64]
};

/// `mul r/m`
pub const MUL: [Code; 4] = {
    use Code::*;
    [Mul_rm8, Mul_rm16, Mul_rm32, Mul_rm64]
};

/// A load or move that fills at least 32 bits (narrow ones are zero-extended).
pub const LOAD: [Code; 4] =
    [Code::Movzx_r32_rm8, Code::Movzx_r32_rm16, Code::Mov_r32_rm32, Code::Mov_r64_rm64];

/// `imul`; there is no 8-bit form, the 16-bit one stands in.
pub const IMUL: [Code; 4] = {
    use Code::*;
    [Imul_r16_rm16, Imul_r16_rm16, Imul_r32_rm32, Imul_r64_rm64]
};

/// `bt`; there is no 8-bit form, the 16-bit one stands in.
pub const BT: [Code; 4] = {
    use Code::*;
    [Bt_rm16_r16, Bt_rm16_r16, Bt_rm32_r32, Bt_rm64_r64]
};

/// `bsf`; there is no 8-bit form, the 16-bit one stands in.
pub const BSF: [Code; 4] = {
    use Code::*;
    [Bsf_r16_rm16, Bsf_r16_rm16, Bsf_r32_rm32, Bsf_r64_rm64]
};

/// `bsr`; there is no 8-bit form, the 16-bit one stands in.
pub const BSR: [Code; 4] = {
    use Code::*;
    [Bsr_r16_rm16, Bsr_r16_rm16, Bsr_r32_rm32, Bsr_r64_rm64]
};

/// `tzcnt`; there is no 8-bit form, the 16-bit one stands in.
pub const TZCNT: [Code; 4] = {
    use Code::*;
    [Tzcnt_r16_rm16, Tzcnt_r16_rm16, Tzcnt_r32_rm32, Tzcnt_r64_rm64]
};

/// `lzcnt`; there is no 8-bit form, the 16-bit one stands in.
pub const LZCNT: [Code; 4] = {
    use Code::*;
    [Lzcnt_r16_rm16, Lzcnt_r16_rm16, Lzcnt_r32_rm32, Lzcnt_r64_rm64]
};

/// `popcnt`; there is no 8-bit form, the 16-bit one stands in.
pub const POPCNT: [Code; 4] = {
    use Code::*;
    [Popcnt_r16_rm16, Popcnt_r16_rm16, Popcnt_r32_rm32, Popcnt_r64_rm64]
};

/// `setcc r/m8` by condition.
pub const SETCC: [Code; 16] = {
    use Code::*;
    [
        Seto_rm8, Setno_rm8, Setb_rm8, Setae_rm8, Sete_rm8, Setne_rm8, Setbe_rm8, Seta_rm8,
        Sets_rm8, Setns_rm8, Setp_rm8, Setnp_rm8, Setl_rm8, Setge_rm8, Setle_rm8, Setg_rm8,
    ]
};

/// `cmovcc r32, r/m32` and `cmovcc r64, r/m64` by condition.
pub const CMOVCC: [[Code; 16]; 2] = {
    use Code::*;
    [
        [
            Cmovo_r32_rm32,
            Cmovno_r32_rm32,
            Cmovb_r32_rm32,
            Cmovae_r32_rm32,
            Cmove_r32_rm32,
            Cmovne_r32_rm32,
            Cmovbe_r32_rm32,
            Cmova_r32_rm32,
            Cmovs_r32_rm32,
            Cmovns_r32_rm32,
            Cmovp_r32_rm32,
            Cmovnp_r32_rm32,
            Cmovl_r32_rm32,
            Cmovge_r32_rm32,
            Cmovle_r32_rm32,
            Cmovg_r32_rm32,
        ],
        [
            Cmovo_r64_rm64,
            Cmovno_r64_rm64,
            Cmovb_r64_rm64,
            Cmovae_r64_rm64,
            Cmove_r64_rm64,
            Cmovne_r64_rm64,
            Cmovbe_r64_rm64,
            Cmova_r64_rm64,
            Cmovs_r64_rm64,
            Cmovns_r64_rm64,
            Cmovp_r64_rm64,
            Cmovnp_r64_rm64,
            Cmovl_r64_rm64,
            Cmovge_r64_rm64,
            Cmovle_r64_rm64,
            Cmovg_r64_rm64,
        ],
    ]
};
