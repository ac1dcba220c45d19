//! A rough cost of machine code, to tell whether a trace is worth having beside the copied blocks
//! that it would replace.
//!
//! Each instruction costs one, and each access to memory two more (guess): unoptimised code spends
//! most of its time on values that go through the stack. The cost does not include mispredictions
//! and dependencies.

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

/// Added for an access to memory (guess; too low and traces of unoptimised code are refused).
const ACCESS: u32 = 2;

/// The cost of machine code.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cost {
    /// All of it.
    pub all: u32,
    /// Of that, accesses to frames and to variables at fixed addresses, which traces may keep in
    /// registers.
    pub frames: u32,
}

/// The cost of machine code.
pub fn of_code(code: &[u8]) -> Cost {
    let mut cost = Cost::default();
    for inst in &mut Decoder::new(64, code, DecoderOptions::NONE) {
        let (all, frames) = of_instruction(&inst);
        cost.all += all;
        cost.frames += frames;
    }
    cost
}

/// All, and what may be saved of it.
fn of_instruction(inst: &Instruction) -> (u32, u32) {
    const MOST: u32 = 1 + ACCESS;
    match inst.mnemonic() {
        Mnemonic::Nop => (0, 0),
        Mnemonic::Lea => (1, 0),
        // Registers that are saved for a caller are saved by traces, too.
        Mnemonic::Push | Mnemonic::Pop => (MOST, 0),
        Mnemonic::Call | Mnemonic::Ret => (MOST, MOST),
        _ if (0..inst.op_count()).any(|n| inst.op_kind(n) == OpKind::Memory) => {
            let saved = match inst.memory_base() {
                _ if inst.memory_index() != Register::None => 0,
                Register::RBP | Register::RIP | Register::None => MOST,
                // Optimised code has its reasons to keep them there.
                Register::RSP => MOST / 2,
                _ => 0,
            };
            (MOST, saved)
        }
        _ => (1, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_cost_more_and_those_to_frames_are_told_apart() {
        assert_eq!(of_code(&[0x90]), Cost::default());
        // add eax, ecx; lea rax, [rcx]
        assert_eq!(of_code(&[0x01, 0xc8, 0x48, 0x8d, 0x01]), Cost { all: 2, frames: 0 });
        // mov eax, [rcx]; push rax; mov eax, [rbp - 4]
        assert_eq!(of_code(&[0x8b, 0x01, 0x50, 0x8b, 0x45, 0xfc]), Cost { all: 9, frames: 3 });
    }
}
