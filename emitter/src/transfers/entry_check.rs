//! The comparison at checked entries and landings: is this destination the one that was meant? It
//! changes no flags.
//!
//! Two x86 jumps test rcx and no flag: `jrcxz` jumps if rcx is 0, `loop` falls through if rcx is 1.
//! Neither falls through for one value of rcx and jumps for all others, so rcx is prepared first:
//!
//! ```text
//! Loop:   lea  rcx, [rcx + 1 - PC]          Pext:   lea  rcx, [rcx - PC]
//!         loop out                                  pext rcx, rcx, rcx         2^(number of ones) - 1
//!                                                   shrx ecx, gs:[one], ecx    1 if that is 0, else 0
//!                                                   jrcxz out
//! ```
//!
//! `loop` is one operation on AMD's processors. Intel's make seven or more of it, and a check then
//! costs 2.2 ns instead of 0.5. Measured on Sapphire Rapids, copied code, time relative to native,
//! by `loop` and by `pext`: a bytecode interpreter 2.17 and 1.03; recursive `fib` 2.16 and 1.54;
//! virtual calls 2.45 and 1.54; perl 1.91 and 1.41. A third way, a `jrcxz` over a jump, is taken in
//! the common case, in which `pext` falls through. Taken branches use up the predictors' history.
//! Measured with it: 1.24, 1.60, 2.17 and 1.46.
//!
//! The module owns no data: [`EntryCheck`] is chosen once, when the emitter is made. Invariant: the
//! branch is the last instruction of a check, and its displacement the last byte.
//!
//! Example: at the entry of 0x401000, `pext` falls through if `next_pc` is 0x401000. If it is
//! 0x401008, rcx becomes 8, then 1, then 0, and `jrcxz` goes to the miss stub.

use crate::asm::{Assembler, Mem, RCX};
use crate::codegen::piece::Piece;
use crate::cpu::Cpu;
use dynasour_guest::context::offset;
use smallvec::SmallVec;
use std::fmt;
use std::str::FromStr;

/// The instructions by which entries compare.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryCheck {
    /// By `loop`.
    Loop,
    /// By `pext`, `shrx` and `jrcxz`, where there is BMI2.
    Pext,
}

impl EntryCheck {
    /// The check that was asked for, if this processor can execute it; else the fastest check that
    /// it can execute.
    pub(crate) fn on(cpu: &Cpu, wanted: Option<EntryCheck>) -> EntryCheck {
        match wanted {
            _ if !cpu.bmi2 => EntryCheck::Loop,
            Some(wanted) => wanted,
            None if cpu.has_fast_loop => EntryCheck::Loop,
            None => EntryCheck::Pext,
        }
    }

    /// Falls through if `next_pc` is `pc`; else jumps to the piece's first instruction. Changes rcx
    /// and no flags.
    pub(crate) fn compare(self, piece: &mut Piece, pc: u64) {
        let less = |half: u32| Mem::at(RCX).plus(self.goes_on().wrapping_sub(half) as i32).wide();
        let (low, high) = (less(pc as u32), less((pc >> 32) as u32));
        if i32::try_from(pc).is_ok() {
            piece.load(RCX, offset::NEXT_PC);
            piece.lea(RCX, low);
            self.back_unless(piece);
        } else {
            // No displacement has 64 bits, so the halves are compared one after the other.
            piece.load_half(RCX, offset::NEXT_PC);
            piece.lea_32(RCX, low);
            self.back_unless(piece);
            piece.load_half(RCX, offset::NEXT_PC + 4);
            piece.lea_32(RCX, high);
            self.back_unless(piece);
        }
    }

    /// Jumps to the piece's first instruction unless rcx is [`EntryCheck::goes_on`].
    fn back_unless(self, piece: &mut Piece) {
        let back = -(piece.len() as isize);
        piece.put(&self.unless(back));
    }

    /// The value of rcx, after the constant was subtracted, for which [`EntryCheck::unless`] falls
    /// through.
    pub(crate) fn goes_on(self) -> u32 {
        match self {
            EntryCheck::Loop => 1,
            EntryCheck::Pext => 0,
        }
    }

    /// Jumps `to` bytes from its own start unless rcx is [`EntryCheck::goes_on`]; clobbers rcx. The
    /// branch's opcode and displacement come last.
    pub(crate) fn unless(self, to: isize) -> SmallVec<[u8; 24]> {
        let mut code: SmallVec<[u8; 24]> = SmallVec::new();
        // The branch has two bytes, and its distance counts from its end.
        let distance = |code: &SmallVec<[u8; 24]>| (to - code.len() as isize - 2) as i8;
        match self {
            EntryCheck::Loop => code.loop_over(distance(&code)),
            EntryCheck::Pext => {
                code.pext(RCX, RCX, RCX);
                code.shrx_32(RCX, Mem::context(offset::ONE), RCX);
                code.jrcxz_over(distance(&code));
            }
        }
        code
    }
}

impl fmt::Display for EntryCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EntryCheck::Loop => "loop",
            EntryCheck::Pext => "pext",
        })
    }
}

impl FromStr for EntryCheck {
    type Err = String;

    fn from_str(s: &str) -> Result<EntryCheck, String> {
        match s {
            "loop" => Ok(EntryCheck::Loop),
            "pext" => Ok(EntryCheck::Pext),
            _ => Err("expected loop or pext".to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::ThreadContext;
    use iced_x86::{Decoder, DecoderOptions, FlowControl, Formatter, Mnemonic, NasmFormatter};

    #[test]
    fn a_branch_comes_last_and_flags_are_left() {
        for check in [EntryCheck::Loop, EntryCheck::Pext] {
            let bytes = check.unless(-17);
            let all: Vec<_> =
                Decoder::with_ip(64, &bytes, 0x1000, DecoderOptions::NONE).into_iter().collect();
            assert!(
                all.iter().all(|inst| !inst.is_invalid() && inst.rflags_modified() == 0),
                "{all:?}"
            );
            let last = all.last().unwrap();
            assert_eq!((last.flow_control(), last.len()), (FlowControl::ConditionalBranch, 2));
            assert_eq!(last.near_branch64(), 0x1000 - 17);
            assert_eq!(check.to_string().parse(), Ok(check));
        }
        let bytes = EntryCheck::Pext.unless(0);
        let mut decoder = Decoder::with_ip(64, &bytes, 0, DecoderOptions::NONE);
        assert_eq!(decoder.decode().mnemonic(), Mnemonic::Pext);
        let shift = decoder.decode();
        assert_eq!(
            (shift.mnemonic(), shift.memory_displacement64()),
            (Mnemonic::Shrx, offset::ONE as u64)
        );
        assert_eq!(ThreadContext::new().one, 1);
    }

    #[test]
    fn comparisons_read_as_meant() {
        let text = |check: EntryCheck, pc: u64| {
            let mut piece = Piece::default();
            check.compare(&mut piece, pc);
            let (mut formatter, mut text) = (NasmFormatter::new(), String::new());
            for inst in &mut Decoder::with_ip(64, &piece.bytes, 0, DecoderOptions::NONE) {
                formatter.format(&inst, &mut text);
                text.push('\n');
            }
            text
        };
        let checked = text(EntryCheck::Loop, 0x40_1000);
        assert!(
            checked.contains("lea rcx,[rcx-400FFFh]") && checked.contains("loop 0"),
            "{checked}"
        );
        let checked = text(EntryCheck::Pext, 0x40_1000);
        assert!(
            checked.contains("lea rcx,[rcx-401000h]") && checked.contains("jrcxz 0"),
            "{checked}"
        );
        let checked = text(EntryCheck::Loop, 0x7fff_f234_5678);
        assert!(
            checked.contains("lea ecx,[rcx+0DCBA989h]") && checked.contains("lea ecx,[rcx-7FFEh]"),
            "{checked}"
        );
    }

    #[test]
    fn what_is_chosen() {
        let cpu = |has_fast_loop, bmi2| Cpu { has_fast_loop, bmi2, ..Cpu::detect() };
        assert_eq!(EntryCheck::on(&cpu(true, true), None), EntryCheck::Loop);
        assert_eq!(EntryCheck::on(&cpu(false, true), None), EntryCheck::Pext);
        assert_eq!(EntryCheck::on(&cpu(true, true), Some(EntryCheck::Pext)), EntryCheck::Pext);
        assert_eq!(EntryCheck::on(&cpu(false, true), Some(EntryCheck::Loop)), EntryCheck::Loop);
        assert_eq!(EntryCheck::on(&cpu(false, false), Some(EntryCheck::Pext)), EntryCheck::Loop);
    }
}
