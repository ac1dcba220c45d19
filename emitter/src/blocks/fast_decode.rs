//! A fast decoder of the commonest instructions: those that are copied byte for byte, except for a
//! displacement relative to rip, and the commonest transfers.
//!
//! Nine of ten instructions are *plain*, and full decoding takes several times as long as copying
//! them. [`plain`] finds the length of an instruction and that it is plain, and nothing else. It
//! knows only common instructions that every x86-64 processor has. For any other instruction it
//! answers `None`, and the caller decodes it with iced-x86. Tests compare the answers with iced's
//! over all opcodes.
//!
//! An instruction is plain if it transfers no control, needs nothing of the runtime, has no segment
//! prefix, and has no prefix without a meaning (Intel SDM vol. 2, 2.1 and 2.2, and the opcode maps
//! in its appendix A).
//!
//! The module owns no data but constant tables. Any thread may call it.
//!
//! Example: `48 8b 05 disp32` (`mov rax, [rip + disp]`) is plain, has 7 bytes, and its displacement
//! is at offset 3.

use dynasour_guest::decode::MAX_LENGTH;

/// Bits of an opcode's entry. The opcode is plain without a prefix; with 66; with f2; with f3.
const BARE: u16 = 1;
const P66: u16 = 2;
const PF2: u16 = 4;
const PF3: u16 = 8;
/// It has a ModRM byte.
const MODRM: u16 = 16;
/// It has an immediate of one byte.
const BYTE: u16 = 32;
/// It has an immediate of two or four bytes, depending on the width of its operands.
const WIDE: u16 = 64;
/// It has an immediate of two, four or eight bytes.
const WIDEST: u16 = 128;
/// The unit of a number from 1: the ModRM byte's middle field belongs to the opcode, and [`GROUPS`]
/// has its plain values under that number.
const GROUP: u16 = 256;
/// Its operand must be memory.
const MEMORY: u16 = 8 * GROUP;

/// For each group: a bit for each value of the middle field that is plain.
const GROUPS: [u8; 4] = [
    0b0000_0001, // mov m, imm
    0b1111_1101, // test, not, neg, mul, …
    0b0000_0011, // inc, dec of bytes
    0b0100_0011, // inc, dec, push
];
/// The number of the group in which only the value 0 has an immediate.
const TEST: u16 = 2;

const SIZED: u16 = BARE | P66;

const FIRST: [u16; 256] = {
    let mut t = [0; 256];
    let mut i = 0;
    while i < 0x40 {
        t[i] = match i & 7 {
            0 | 2 => BARE | MODRM,
            1 | 3 => SIZED | MODRM,
            4 => BARE | BYTE,
            5 => SIZED | WIDE,
            _ => 0,
        };
        i += 1;
    }
    while i < 0xc0 {
        t[i] = match i {
            0x50..=0x5f => BARE,
            0x63 => BARE | MODRM,
            0x68 => BARE | WIDE,
            0x69 | 0x81 => SIZED | MODRM | WIDE,
            0x6a => BARE | BYTE,
            0x6b | 0x83 => SIZED | MODRM | BYTE,
            0x80 => BARE | MODRM | BYTE,
            0x84 | 0x86 | 0x88 | 0x8a => BARE | MODRM,
            0x85 | 0x87 | 0x89 | 0x8b => SIZED | MODRM,
            0x8d => SIZED | MODRM | MEMORY,
            0x90 => BARE,
            0x91..=0x99 => SIZED,
            0xa8 => BARE | BYTE,
            0xa9 => SIZED | WIDE,
            0xb0..=0xb7 => BARE | BYTE,
            0xb8..=0xbf => SIZED | WIDEST,
            _ => 0,
        };
        i += 1;
    }
    t[0xc0] = BARE | MODRM | BYTE;
    t[0xc1] = SIZED | MODRM | BYTE;
    t[0xc6] = BARE | MODRM | BYTE | GROUP;
    t[0xc7] = SIZED | MODRM | WIDE | GROUP;
    t[0xc9] = BARE;
    t[0xd0] = BARE | MODRM;
    t[0xd1] = SIZED | MODRM;
    t[0xd2] = BARE | MODRM;
    t[0xd3] = SIZED | MODRM;
    t[0xf6] = BARE | MODRM | BYTE | (GROUP * TEST);
    t[0xf7] = SIZED | MODRM | WIDE | (GROUP * TEST);
    t[0xfe] = BARE | MODRM | (3 * GROUP);
    t[0xff] = SIZED | MODRM | (4 * GROUP);
    t
};

/// Opcodes behind 0f.
const SECOND: [u16; 256] = {
    let mut t = [0; 256];
    let mut i = 0;
    while i < 256 {
        t[i] = match i {
            0x10 | 0x11 | 0x51 | 0x58 | 0x59 | 0x5a | 0x5c..=0x5f => BARE | P66 | PF2 | PF3 | MODRM,
            0x12 | 0x16 => BARE | MODRM,
            0x14 | 0x15 | 0x28 | 0x29 | 0x2e | 0x2f | 0x54..=0x57 => BARE | P66 | MODRM,
            0x1f => SIZED | MODRM,
            0x2a | 0x2c | 0x2d => PF2 | PF3 | MODRM,
            // cmov
            0x40..=0x4f => SIZED | MODRM,
            0x5b | 0x6f | 0x7f => (if i == 0x5b { BARE } else { 0 }) | P66 | PF3 | MODRM,
            0x60..=0x6e | 0x74..=0x76 => P66 | MODRM,
            0x70 => P66 | PF2 | PF3 | MODRM | BYTE,
            0x7e => P66 | PF3 | MODRM,
            // setcc
            0x90..=0x9f => BARE | MODRM,
            // bt, shld, shrd, bts, imul, btr, bsf, bsr, btc
            0xa3 | 0xa5 | 0xab | 0xad | 0xaf | 0xb3 | 0xbb..=0xbd => SIZED | MODRM,
            0xa4 | 0xac => SIZED | MODRM | BYTE,
            // movzx, movsx
            0xb6 | 0xb7 | 0xbe | 0xbf => SIZED | MODRM,
            0xc6 => BARE | P66 | MODRM | BYTE,
            // bswap
            0xc8..=0xcf => BARE,
            0xd4 | 0xd6 | 0xd8..=0xdf | 0xe0..=0xe5 | 0xe8..=0xef | 0xf4..=0xf6 | 0xf8..=0xfe => {
                P66 | MODRM
            }
            _ => 0,
        };
        i += 1;
    }
    t
};

/// A plain instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Plain {
    pub len: usize,
    /// The offset of its displacement if it is relative to rip; else 0.
    pub relative: usize,
}

/// A transfer of control without a prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Transfer {
    /// On this condition, in the processor's order, to this address.
    Branch(u8, u64),
    /// To this address.
    Jump(u64),
    /// To this address.
    Call(u64),
    Return,
}

/// The transfer at the beginning of `code`, which stands at `pc`, and its length; `None` for any
/// other instruction.
pub(super) fn transfer(code: &[u8; MAX_LENGTH], pc: u64) -> Option<(Transfer, usize)> {
    let near = |at: usize| {
        let field = code[at..].first_chunk().map_or(0, |field| i32::from_le_bytes(*field));
        pc.wrapping_add(at as u64 + 4).wrapping_add(i64::from(field) as u64)
    };
    let short = || pc.wrapping_add(2).wrapping_add(i64::from(code[1] as i8) as u64);
    Some(match (code[0], code[1]) {
        (first @ 0x70..=0x7f, _) => (Transfer::Branch(first & 15, short()), 2),
        (0x0f, second @ 0x80..=0x8f) => (Transfer::Branch(second & 15, near(2)), 6),
        (0xe8, _) => (Transfer::Call(near(1)), 5),
        (0xe9, _) => (Transfer::Jump(near(1)), 5),
        (0xeb, _) => (Transfer::Jump(short()), 2),
        (0xc3, _) => (Transfer::Return, 1),
        _ => return None,
    })
}

/// The instruction at the beginning of `code` if it is known to be plain.
pub(super) fn plain(code: &[u8; MAX_LENGTH]) -> Option<Plain> {
    let (mut at, mut relative) = (0, 0);
    let prefix = match code[0] {
        0x66 => P66,
        0xf2 => PF2,
        0xf3 => PF3,
        _ => BARE,
    };
    at += usize::from(prefix != BARE);
    let rex = code[at];
    let has_rex = rex & 0xf0 == 0x40;
    let is_64 = rex & 0xf8 == 0x48;
    at += usize::from(has_rex);
    let mut opcode = code[at];
    at += 1;
    let kind = if opcode == 0x0f {
        opcode = code[at];
        at += 1;
        SECOND[usize::from(opcode)]
    } else {
        FIRST[usize::from(opcode)]
    };
    if kind & prefix == 0 {
        return None;
    }
    let mut immediates = kind & (BYTE | WIDE | WIDEST);
    if kind & MODRM != 0 {
        let modrm = code[at];
        let group = (kind / GROUP) & 7;
        let middle = modrm >> 3 & 7;
        if group != 0 {
            if GROUPS[usize::from(group - 1) & 3] & 1 << middle == 0 {
                return None;
            }
            if group == TEST && middle != 0 {
                immediates = 0;
            }
        }
        at += 1;
        if modrm >= 0xc0 {
            if kind & MEMORY != 0 {
                return None;
            }
        } else {
            let has_sib = modrm & 7 == 4;
            at += match modrm >> 6 {
                0 if modrm & 7 == 5 => {
                    relative = at;
                    4
                }
                0 if has_sib && code[at] & 7 == 5 => 5,
                0 => usize::from(has_sib),
                1 => 1 + usize::from(has_sib),
                _ => 4 + usize::from(has_sib),
            };
        }
    }
    let immediate = match immediates {
        0 => 0,
        BYTE => 1,
        WIDEST if is_64 => 8,
        _ if prefix == P66 && !is_64 => 2,
        _ => 4,
    };
    Some(Plain { len: at + immediate, relative })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::decode::{Bytes, Decoded, Reader};
    use dynasour_guest::lift::{class::Class, classify};
    use iced_x86::{FlowControl, Instruction, Register};

    const PC: u64 = 0x1000;

    /// What the decoder says.
    fn decoded(code: &[u8; MAX_LENGTH]) -> Option<(Instruction, usize)> {
        let bytes = Bytes { start: PC, bytes: code };
        let mut reader = Reader::new(&bytes);
        match reader.decode(PC) {
            Decoded::Inst(inst) => Some((inst, reader.displacement_offset())),
            _ => None,
        }
    }

    fn check(code: &[u8; MAX_LENGTH]) -> Option<Plain> {
        let found = plain(code)?;
        let (inst, displacement) =
            decoded(code).unwrap_or_else(|| panic!("{code:02x?} is no instruction"));
        assert_eq!(found.len, inst.len(), "{code:02x?} {inst}");
        assert!(matches!(classify(&inst), Class::Modelled | Class::Native), "{code:02x?} {inst}");
        assert_eq!(inst.flow_control(), FlowControl::Next, "{code:02x?} {inst}");
        assert_eq!(inst.segment_prefix(), Register::None, "{code:02x?} {inst}");
        assert_eq!(found.relative != 0, inst.memory_base() == Register::RIP, "{code:02x?} {inst}");
        if found.relative != 0 {
            assert_eq!(found.relative, displacement, "{code:02x?} {inst}");
        }
        Some(found)
    }

    fn code(bytes: &[u8]) -> [u8; MAX_LENGTH] {
        let mut code = [0x22; MAX_LENGTH];
        code[..bytes.len()].copy_from_slice(bytes);
        code
    }

    #[test]
    fn whatever_is_plain_the_decoder_says_so_too() {
        let mut found = 0;
        let rexes = [None, Some(0x40), Some(0x41), Some(0x42), Some(0x44), Some(0x48), Some(0x4f)];
        for prefix in [None, Some(0x66), Some(0xf2), Some(0xf3)] {
            for (rex, escape) in rexes.into_iter().flat_map(|rex| [(rex, None), (rex, Some(0x0f))])
            {
                for (opcode, modrm) in
                    (0..=255).flat_map(|opcode| (0..=255).map(move |modrm| (opcode, modrm)))
                {
                    let has_sib = modrm & 7 == 4 && modrm < 0xc0;
                    let sibs: &[u8] = if has_sib { &[0, 0x25, 0x64, 0xe5] } else { &[0x11] };
                    for sib in sibs {
                        let bytes = [prefix, rex, escape, Some(opcode), Some(modrm), Some(*sib)];
                        let bytes: Vec<u8> = bytes.into_iter().flatten().collect();
                        found += u32::from(check(&code(&bytes)).is_some());
                    }
                }
            }
        }
        assert!(found > 500_000, "{found}");
    }

    #[test]
    fn what_has_more_prefixes_is_left_to_the_decoder() {
        for first in [
            [0x66, 0x66],
            [0xf2, 0x66],
            [0x48, 0x66],
            [0x48, 0x48],
            [0x2e, 0x8b],
            [0x65, 0x8b],
            [0xf0, 0x01],
        ] {
            for opcode in [0x89, 0x8b, 0xb8, 0x01] {
                assert_eq!(check(&code(&[first[0], first[1], opcode])), None);
            }
        }
    }

    #[test]
    fn most_of_a_program_is_plain() {
        // mov, lea, add, movzx, test, movss, push
        let ordinary: [&[u8]; 7] = [
            &[0x48, 0x8b, 0x44, 0x24, 0x08],
            &[0x48, 0x8d, 0x84, 0xc8, 1, 2, 3, 4],
            &[0x48, 0x81, 0xc4, 1, 0, 0, 0],
            &[0x0f, 0xb6, 0x07],
            &[0xf6, 0xc3, 0x01],
            &[0xf3, 0x0f, 0x10, 0x45, 0xfc],
            &[0x41, 0x57],
        ];
        ordinary.iter().for_each(|bytes| {
            assert_eq!(check(&code(bytes)), Some(Plain { len: bytes.len(), relative: 0 }))
        });
        let mov = [0x48, 0x8b, 0x05, 0, 0, 0, 0];
        assert_eq!(check(&code(&mov)), Some(Plain { len: 7, relative: 3 }));
        let others: [&[u8]; 3] =
            [&[0x74, 0x10], &[0x64, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0], &[0xc3]];
        others.iter().for_each(|bytes| assert_eq!(check(&code(bytes)), None));
    }

    #[test]
    fn transfers_are_what_the_decoder_says() {
        let mut found = 0;
        for (first, second) in
            (0..=255).flat_map(|first| (0..=255).map(move |second| (first, second)))
        {
            let code = code(&[first, second, 0x80, 0xf0, 0xff, 0xfe]);
            let Some((transfer, len)) = transfer(&code, PC) else { continue };
            let (inst, _) =
                decoded(&code).unwrap_or_else(|| panic!("{code:02x?} is no instruction"));
            assert_eq!((len, classify(&inst)), (inst.len(), Class::Modelled), "{inst}");
            let (flow, target) = match transfer {
                Transfer::Branch(condition, to) => {
                    assert_eq!(inst.condition_code() as u8, condition + 1);
                    (FlowControl::ConditionalBranch, to)
                }
                Transfer::Jump(to) => (FlowControl::UnconditionalBranch, to),
                Transfer::Call(to) => (FlowControl::Call, to),
                Transfer::Return => (FlowControl::Return, 0),
            };
            assert_eq!((inst.flow_control(), inst.near_branch_target()), (flow, target), "{inst}");
            found += 1;
        }
        assert_eq!(found, 256 * (16 + 4) + 16);
    }
}
