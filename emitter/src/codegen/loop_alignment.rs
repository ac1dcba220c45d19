//! At which offset in a line of the instruction cache a short loop should begin.
//!
//! Measured on Zen 5, with loops of no-operations and of mixed instructions at all offsets: decoded
//! instructions are delivered in entries of up to six. An entry holds instructions of one 64-byte
//! line, and begins anew where control enters the line. Two entries go out each cycle, but a line
//! with three or more entries gives one each cycle. A branch whose bytes cross into the next line
//! needs an entry there as well. The vectorised inner loop of a stencil, 14 instructions in 60
//! bytes, takes 2.4 cycles at offset 20, 3.3 at offset 0 and 4.3 at offset 16. On other processors
//! the offset makes no measurable difference.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};

/// Bytes of a line.
pub const LINE: usize = 64;
/// Instructions of an entry.
const ENTRY: usize = 6;
/// Longer loops are not aligned: other limits of the processor bound them (guess).
const LONGEST: usize = 4 * LINE;

/// The offset within a line, a multiple of four, at which this loop is delivered fastest. Its last
/// instruction is the back edge, which is padded such that its rel32 field lies within eight
/// aligned bytes.
pub fn offset(code: &[u8]) -> usize {
    offset_among(code, (0..LINE).step_by(4)).unwrap_or(0)
}

/// As [`offset`], the best of these; none if it does not matter.
pub fn offset_among(code: &[u8], offsets: impl Iterator<Item = usize>) -> Option<usize> {
    if code.len() > LONGEST {
        return None;
    }
    let decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let mut body: Vec<Instruction> = decoder.into_iter().collect();
    let back_edge = body.pop()?;
    while body.last().is_some_and(|i| i.mnemonic() == Mnemonic::Nop) {
        body.pop();
    }
    offsets.min_by_key(|at| cycles(&body, &back_edge, *at))
}

/// Cycles that the delivery of an iteration takes, and lines that it touches.
fn cycles(body: &[Instruction], back_edge: &Instruction, at: usize) -> (usize, usize) {
    let mut counts = [0usize; LONGEST / LINE + 2];
    let mut position = at;
    for inst in body {
        counts[position / LINE] += 1;
        position += inst.len();
    }
    let field = (position + back_edge.len() - 4) % 8;
    let padding = if field > 4 { 8 - field } else { 0 };
    counts[position / LINE] += usize::from(padding > 0);
    let last = position + padding;
    let end = last + back_edge.len();
    let fused = padding == 0
        && !last.is_multiple_of(LINE)
        && body.last().is_some_and(|i| fuses(i, back_edge));
    counts[last / LINE] += usize::from(!fused);
    if (end - 1) / LINE != last / LINE {
        counts[(end - 1) / LINE] += 1;
    }
    let entries = counts.map(|n| n.div_ceil(ENTRY));
    let slow: usize = entries.iter().filter(|n| **n > 2).sum();
    let fast: usize = entries.iter().filter(|n| **n <= 2).sum();
    (slow + fast.div_ceil(2), (end - 1) / LINE)
}

/// Do an instruction and a conditional branch behind it count as one?
fn fuses(inst: &Instruction, branch: &Instruction) -> bool {
    use Mnemonic::{Add, And, Cmp, Dec, Inc, Or, Sub, Test, Xor};
    branch.flow_control() == FlowControl::ConditionalBranch
        && inst.code() != Code::INVALID
        && matches!(inst.mnemonic(), Add | And | Cmp | Dec | Inc | Or | Sub | Test | Xor)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `n` no-operations of four bytes, `dec eax`, `jne` back.
    fn no_operations(n: usize) -> Vec<u8> {
        let mut code = [0x0f, 0x1f, 0x40, 0].repeat(n);
        code.extend([0xff, 0xc8, 0x0f, 0x85, 0, 0, 0, 0]);
        code
    }

    fn cycles_at(n: usize, at: usize) -> usize {
        let code = no_operations(n);
        let mut insts: Vec<Instruction> =
            Decoder::new(64, &code, DecoderOptions::NONE).into_iter().collect();
        let back_edge = insts.pop().unwrap();
        cycles(&insts, &back_edge, at).0
    }

    /// What was measured, in cycles.
    #[test]
    fn the_model_says_what_was_measured() {
        assert_eq!(cycles_at(4, 0), 1);
        assert_eq!(cycles_at(8, 0), 1);
        assert_eq!(cycles_at(8, 32), 2);
        assert_eq!(cycles_at(12, 0), 3);
        assert_eq!(cycles_at(12, 24), 2);
    }

    #[test]
    fn loops_go_where_they_are_fast() {
        assert_eq!(offset(&no_operations(4)), 0);
        let dense = no_operations(12);
        assert_ne!(offset(&dense), 0);
        assert_eq!(offset(&[0x90; 2 * LONGEST]), 0);
        assert_eq!(offset(&[]), 0);
    }
}
