//! Guest state in a form that can be compared and printed.
//!
//! Compared: the general registers, rip, rflags, FS and GS base, and of the extended state the x87
//! control, status and tag words, its eight registers, MXCSR, all vector and mask registers.
//!
//! Not compared, and why:
//! * rflags' TF and RF: `ptrace` steps by TF, and the processor reports RF inside a repeated string
//!   instruction.
//! * The x87's last opcode, instruction and data pointer: AMD processors save them only while an
//!   exception is pending, and the interpreter executes x87 instructions elsewhere than where the
//!   guest has them.
//! * Which components count as in use (XSTATE_BV): a component in its initial state equals one that
//!   is not in use.
//! * PKRU: the guests of the oracle do not use protection keys.

use std::arch::x86_64::__cpuid_count;
use std::fmt;
use std::sync::LazyLock;

use dynasour_guest::ThreadContext;
use libc::user_regs_struct;

use crate::native::{TRAP_FLAG, gprs};

const RESUME_FLAG: u64 = 1 << 16;

const NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];

/// Registers, flags and segment bases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registers {
    pub gpr: [u64; 16],
    pub rip: u64,
    pub rflags: u64,
    pub fs_base: u64,
    pub gs_base: u64,
}

impl Registers {
    pub fn native(r: &user_regs_struct) -> Registers {
        let rflags = r.eflags & !(TRAP_FLAG | RESUME_FLAG);
        Registers { gpr: gprs(r), rip: r.rip, rflags, fs_base: r.fs_base, gs_base: r.gs_base }
    }

    pub fn interpreted(context: &ThreadContext) -> Registers {
        Registers {
            gpr: context.gpr,
            rip: context.rip,
            rflags: context.rflags & !(TRAP_FLAG | RESUME_FLAG),
            fs_base: context.fs_base,
            gs_base: context.gs_base,
        }
    }

    fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let rest = [self.rip, self.rflags, self.fs_base, self.gs_base];
        let names = NAMES.into_iter().chain(["rip", "rflags", "fs_base", "gs_base"]);
        names.zip(self.gpr.into_iter().chain(rest))
    }

    /// The differences, one line each.
    pub fn differences(&self, interpreted: &Registers) -> Vec<String> {
        let pairs = self.named().zip(interpreted.named());
        let unequal = pairs.filter(|((_, native), (_, ours))| native != ours);
        unequal
            .map(|((name, native), (_, ours))| {
                format!("{name}: native {native:#x}, interpreted {ours:#x}")
            })
            .collect()
    }
}

impl fmt::Display for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, value)) in self.named().enumerate() {
            let separator = if index % 4 == 3 { "\n" } else { "  " };
            write!(f, "{name:>7} {value:#018x}{separator}")?;
        }
        Ok(())
    }
}

/// Position of a component in the standard XSAVE format, and its bit in XSTATE_BV.
struct Component {
    bit: u32,
    offset: usize,
}

/// AVX, mask registers, upper halves of zmm0 to zmm15, zmm16 to zmm31.
static COMPONENTS: LazyLock<[Component; 4]> = LazyLock::new(|| [2, 5, 6, 7].map(Component::number));

impl Component {
    fn number(bit: u32) -> Component {
        let leaf = __cpuid_count(0xd, bit);
        Component { bit, offset: if leaf.eax == 0 { usize::MAX } else { leaf.ebx as usize } }
    }

    /// `len` bytes at index `index`; zero if the component is in its initial state or the processor
    /// does not have it.
    fn bytes<'a>(&self, area: &'a [u8], index: usize, len: usize) -> &'a [u8] {
        const ZERO: [u8; 64] = [0; 64];
        let bits = u64::from_le_bytes(area[512..520].try_into().expect("eight bytes"));
        let start = self.offset.saturating_add(index * len);
        match area.get(start..start.saturating_add(len)) {
            Some(bytes) if bits >> self.bit & 1 != 0 => bytes,
            _ => &ZERO[..len],
        }
    }
}

/// The extended state.
#[derive(Clone, PartialEq, Eq)]
pub struct Extended {
    x87_control: u16,
    x87_status: u16,
    x87_tags: u8,
    mxcsr: u32,
    x87: [[u8; 10]; 8],
    zmm: [[u8; 64]; 32],
    mask: [[u8; 8]; 8],
}

impl Extended {
    /// From an XSAVE area in the standard format.
    pub fn from_area(area: &[u8]) -> Extended {
        let in_use = u64::from_le_bytes(area[512..520].try_into().expect("eight bytes"));
        let mut state = Extended {
            x87_control: 0x37f,
            x87_status: 0,
            x87_tags: 0,
            mxcsr: u32::from_le_bytes(area[24..28].try_into().expect("four bytes")),
            x87: [[0; 10]; 8],
            zmm: [[0; 64]; 32],
            mask: [[0; 8]; 8],
        };
        if in_use & 1 != 0 {
            state.x87_control = u16::from_le_bytes([area[0], area[1]]);
            state.x87_status = u16::from_le_bytes([area[2], area[3]]);
            state.x87_tags = area[4];
            for (index, register) in state.x87.iter_mut().enumerate() {
                register.copy_from_slice(&area[32 + 16 * index..][..10]);
            }
        }
        let sse = Component { bit: 1, offset: 160 };
        let [avx, opmask, zmm_high, high_16] = &*COMPONENTS;
        for index in 0..16 {
            state.zmm[index][..16].copy_from_slice(sse.bytes(area, index, 16));
            state.zmm[index][16..32].copy_from_slice(avx.bytes(area, index, 16));
            state.zmm[index][32..].copy_from_slice(zmm_high.bytes(area, index, 32));
            state.zmm[index + 16].copy_from_slice(high_16.bytes(area, index, 64));
        }
        for index in 0..8 {
            state.mask[index].copy_from_slice(opmask.bytes(area, index, 8));
        }
        state
    }

    fn named(&self) -> impl Iterator<Item = (String, &[u8])> {
        let registers =
            |prefix: &'static str| move |(index, bytes)| (format!("{prefix}{index}"), bytes);
        let x87 = self.x87.iter().map(|r| &r[..]).enumerate().map(registers("st"));
        let zmm = self.zmm.iter().map(|r| &r[..]).enumerate().map(registers("zmm"));
        let mask = self.mask.iter().map(|r| &r[..]).enumerate().map(registers("k"));
        x87.chain(zmm).chain(mask)
    }

    /// The differences, one line each.
    pub fn differences(&self, interpreted: &Extended) -> Vec<String> {
        let words = |s: &Extended| {
            let x87 = [u32::from(s.x87_control), s.x87_status.into(), s.x87_tags.into()];
            [
                ("x87 control", x87[0]),
                ("x87 status", x87[1]),
                ("x87 tags", x87[2]),
                ("mxcsr", s.mxcsr),
            ]
        };
        let mut out = Vec::new();
        for ((name, native), (_, ours)) in words(self).into_iter().zip(words(interpreted)) {
            if native != ours {
                out.push(format!("{name}: native {native:#x}, interpreted {ours:#x}"));
            }
        }
        for ((name, native), (_, ours)) in self.named().zip(interpreted.named()) {
            if native != ours {
                out.push(format!(
                    "{name}: native {}, interpreted {}",
                    number(native),
                    number(ours)
                ));
            }
        }
        out
    }
}

/// Little-endian bytes as a hexadecimal number, in groups of 64 bits.
pub fn number(bytes: &[u8]) -> String {
    let words = bytes
        .chunks(8)
        .rev()
        .map(|chunk| chunk.iter().rev().map(|b| format!("{b:02x}")).collect::<String>());
    words.collect::<Vec<_>>().join("_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_register_is_compared() {
        let mut context = ThreadContext::new();
        let start = Registers::interpreted(&context);
        assert!(start.differences(&start).is_empty());
        for index in 0..16 {
            context.gpr[index] = 1 + index as u64;
        }
        context.rip = 20;
        context.rflags |= 1 | TRAP_FLAG;
        context.fs_base = 30;
        context.gs_base = 40;
        let differences = start.differences(&Registers::interpreted(&context));
        assert_eq!(differences.len(), 20, "{differences:?}");
        assert_eq!(differences[17], "rflags: native 0x202, interpreted 0x203");
    }

    #[test]
    fn extended_state_is_compared_where_it_counts() {
        let mut context = ThreadContext::new();
        let area = &mut context.xstate.0;
        area[160] = 9;
        let start = Extended::from_area(area);
        assert!(start.zmm[0] == [0; 64], "stale bytes are not the state");
        area[512] = 3;
        area[8] = 7;
        area[33] = 1;
        area[26] = 1;
        let now = Extended::from_area(area);
        let zeros = ["0000000000000000"; 7].join("_");
        assert_eq!(
            start.differences(&now),
            [
                "mxcsr: native 0x1f80, interpreted 0x11f80".to_owned(),
                "st0: native 0000_0000000000000000, interpreted 0000_0000000000000100".to_owned(),
                format!(
                    "zmm0: native {zeros}_0000000000000000, interpreted {zeros}_0000000000000009"
                ),
            ]
        );
    }
}
