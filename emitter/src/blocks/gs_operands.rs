//! Operands relative to the guest's GS base. The host's GS leads to the thread's context, in which
//! the guest's base is a word.
//!
//! ```text
//!     mov gs:[save], r
//!     mov r, gs:[the guest's base]
//!     lea r, [r + base]
//!     lea r, [r + index*scale]
//!     op  [r + displacement]
//!     mov r, gs:[save]
//! ```
//!
//! `r` is a register that the instruction does not use. The interpreter executes transfers, and
//! instructions with several or unusual operands in memory (strings, vectors of addresses, 32-bit
//! addresses).
//!
//! The module owns no data. Invariant: the guest's value of `r` is in `stub_save` from the first
//! instruction of the sequence to the last one, and the block's marks say so. The translator calls
//! it.
//!
//! Example: `add gs:[rsi + rdi*4 + 0x10], rbx` borrows rax: `mov gs:[save], rax; mov rax,
//! gs:[the guest's base]; lea rax, [rax + rsi]; lea rax, [rax + rdi*4]; add [rax + 0x10], rbx;
//! mov rax, gs:[save]`.

use super::translate::{BORROWED, Translated, Translator};
use crate::asm::Assembler;
use dynasour_guest::context::offset;
use dynasour_guest::decode::Reader;
use iced_x86::{Code, IcedError, Instruction, MemoryOperand, Mnemonic as M, OpKind, Register};

/// Is the guest's GS base added to the address of this instruction's operand?
pub(super) fn is_relative_to_gs(inst: &Instruction) -> bool {
    inst.memory_segment() == Register::GS || inst.segment_prefix() == Register::GS
}

/// Can the operand be addressed through a register instead?
fn is_plain(inst: &Instruction) -> bool {
    let operands = || (0..inst.op_count()).map(|n| inst.op_kind(n));
    let is_address = |r: Register| r == Register::None || r.is_gpr64();
    let (base, index) = (inst.memory_base(), inst.memory_index());
    let is_absolute = base == Register::None && index == Register::None;
    let is_moved = operands().filter(|kind| *kind == OpKind::Memory).count() == 1
        && inst.memory_segment() == Register::GS
        && is_address(base)
        && is_address(index)
        && (!is_absolute || inst.memory_displ_size() == 8);
    // `pop` computes the address with the new rsp.
    let is_usual = !matches!(inst.mnemonic(), M::Jmp | M::Call | M::Ret | M::Pop | M::Xlatb);
    // These forms have an absolute address of eight bytes and no registers.
    let has_modrm = !matches!(
        inst.code(),
        Code::Mov_AL_moffs8
            | Code::Mov_AX_moffs16
            | Code::Mov_EAX_moffs32
            | Code::Mov_RAX_moffs64
            | Code::Mov_moffs8_AL
            | Code::Mov_moffs16_AX
            | Code::Mov_moffs32_EAX
            | Code::Mov_moffs64_RAX
    );
    is_moved && is_usual && has_modrm
}

impl Translator {
    /// An instruction that is relative to the guest's GS base.
    pub(super) fn relative_to_gs(
        &mut self,
        inst: &Instruction,
        reader: &Reader<'_>,
    ) -> Result<Translated, IcedError> {
        if matches!(inst.mnemonic(), M::Lea | M::Nop) && !inst.is_ip_rel_memory_operand() {
            // These instructions ignore the segment.
            self.out.bytes.extend_from_slice(reader.raw());
            return Ok(Translated::Next);
        }
        let Some(borrowed) = self.unused_register(inst).filter(|_| is_plain(inst)) else {
            return Ok(Translated::Refused);
        };
        let number = borrowed.number() as u8;
        let sum = |base: Register, index: Register, scale: u32| {
            let sum = MemoryOperand::new(base, index, scale, 0, 0, false, Register::None);
            Instruction::with2(Code::Lea_r64_m, borrowed, sum)
        };
        self.save(number, BORROWED);
        self.load(number, offset::GS_BASE);
        if inst.memory_base() != Register::None {
            // The base may be rsp, which cannot be an index.
            self.encode(&sum(inst.memory_base(), borrowed, 1)?)?;
        }
        if inst.memory_index() != Register::None {
            self.encode(&sum(borrowed, inst.memory_index(), inst.memory_index_scale())?)?;
        }
        let mut moved = *inst;
        moved.set_segment_prefix(Register::None);
        moved.set_memory_base(borrowed);
        moved.set_memory_index(Register::None);
        moved.set_memory_displ_size(if inst.memory_displacement64() == 0 { 0 } else { 8 });
        self.mark(inst.ip(), Some((number, BORROWED)));
        self.encode(&moved)?;
        self.mark(inst.ip(), None);
        self.restore(number, BORROWED);
        self.note_x87(inst);
        Ok(Translated::Next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::transfers::entry_check::EntryCheck;
    use crate::transfers::indirect::Indirect;
    use dynasour_guest::decode::Bytes;
    use iced_x86::{Decoder, DecoderOptions};

    const PC: u64 = 0x40_1000;

    /// The copy of an instruction, without the exit behind it; `None` if the interpreter executes
    /// the instruction.
    fn copied(code: &[u8]) -> Option<Vec<Instruction>> {
        let mut cache = Cache::new(1 << 16).unwrap();
        let indirect =
            Indirect::new(&mut cache, 0x2000_0000, false, EntryCheck::Pext, true).unwrap();
        let mut translator = Translator::new(cache.range());
        let code = [code, &[0x0f, 0x05]].concat();
        let is_copied = translator
            .translate(PC, &Bytes { start: PC, bytes: &code }, &indirect, None, None)
            .unwrap();
        let all = Decoder::with_ip(64, &translator.out.bytes, 0, DecoderOptions::NONE).into_iter();
        let all: Vec<_> = all.take_while(|inst| inst.code() != Code::Jmp_rel32_64).collect();
        is_copied.then_some(all)
    }

    #[test]
    fn addresses_are_sums_in_a_register_that_nobody_else_uses() {
        // add gs:[rsi + rdi*4 + 0x10], rbx
        let all = copied(&[0x65, 0x48, 0x01, 0x5c, 0xbe, 0x10]).expect("a copy");
        let [save, base, first, second, op, restore] = all[..] else { panic!("{all:?}") };
        assert_eq!((save.op1_register(), base.op0_register()), (Register::RDX, Register::RDX));
        assert_eq!(base.memory_displacement64(), offset::GS_BASE as u64);
        assert_eq!((first.memory_base(), first.memory_index()), (Register::RSI, Register::RDX));
        assert_eq!((second.memory_index(), second.memory_index_scale()), (Register::RDI, 4));
        assert_eq!(
            (op.mnemonic(), op.memory_base(), op.memory_index()),
            (M::Add, Register::RDX, Register::None)
        );
        assert_eq!((op.memory_displacement64(), op.memory_segment()), (0x10, Register::DS));
        assert_eq!(
            (restore.op0_register(), restore.memory_segment()),
            (Register::RDX, Register::GS)
        );
        assert!(
            [save, base, first, second, restore].iter().all(|inst| inst.rflags_modified() == 0)
        );
    }

    #[test]
    fn what_has_no_single_wide_address_is_left_alone() {
        let left: [(&[u8], &str); 7] = [
            (&[0x65, 0xa4], "movsb"),
            (&[0x65, 0xd7], "xlatb"),
            (&[0x65, 0x8f, 0x00], "pop gs:[rax]"),
            (&[0x65, 0xff, 0x20], "jmp gs:[rax]"),
            (&[0x65, 0x67, 0x8b, 0x00], "mov eax, gs:[eax]"),
            (&[0x65, 0x67, 0x8b, 0x04, 0x25, 0, 1, 0, 0], "mov eax, gs:[0x100], of 32 bits"),
            (&[0x65, 0x48, 0xa1, 0, 1, 0, 0, 0, 0, 0, 0], "mov rax, gs:[0x100], of 64 bits"),
        ];
        for (code, name) in left {
            assert_eq!(copied(code), None, "{name}");
        }
        // mov rax, gs:[rsp + 8]; mov eax, gs:[0x100]; lea rax, gs:[rbx], which has no use for it
        assert_eq!(
            copied(&[0x65, 0x48, 0x8b, 0x44, 0x24, 8]).map(|all| all[2].memory_base()),
            Some(Register::RSP)
        );
        assert_eq!(copied(&[0x65, 0x8b, 0x04, 0x25, 0, 1, 0, 0]).map(|all| all.len()), Some(4));
        assert_eq!(copied(&[0x65, 0x48, 0x8d, 0x03]).map(|all| all.len()), Some(1));
    }
}
