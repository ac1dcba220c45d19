//! The x87 instruction pointer of copied blocks.
//!
//! The processor notes the address of each x87 instruction that is not a control instruction: in a
//! block, that of the copy. So a block stores the guest's pc in the context
//! (`ThreadContext::x87_pc`). One store behind the last instruction of a run of x87 instructions is
//! enough; if one of the run faults, the block's marks say which instruction was before it.
//!
//! `fnstenv` in a run is copied, and the pointer in the guest's memory is replaced. Elsewhere, and
//! for the other instructions that show or load the pointer, the block ends: the runtime executes
//! them.
//!
//! The module's data is [`Translator::x87_pc`]. Invariant: it is `None` where the block can be
//! left.
//!
//! Example: `fldz` at 0x1000, `fld1` at 0x1002, `fnstenv [rsp - 0x1c]`, `pop rax` become the copies
//! of the first three, `mov dword [rsp - 0x10], 0x1002`, `mov qword gs:[x87_pc], 0x1002` and the
//! copy of `pop rax`.

use super::gs_operands::is_relative_to_gs;
use super::translate::{Translated, Translator};
use crate::asm::Assembler;
use dynasour_guest::context::offset;
use dynasour_guest::decode::Reader;
use dynasour_guest::lift::class::sets_x87_pointer;
use iced_x86::{Code, IcedError, Instruction, MemoryOperand, Register};

/// Where `fnstenv` of 28 bytes stores the lower half of the instruction pointer (Intel SDM vol. 1,
/// figure 8-9).
const POINTER: i64 = 12;

/// Does a run of x87 instructions go on with the instruction that these bytes begin? One with
/// prefixes ends it.
pub(super) fn may_continue(code: &[u8]) -> bool {
    matches!(code.first(), Some(0x9b | 0xd8..=0xdf))
}

impl Translator {
    /// Notes that `inst` has been copied.
    pub(super) fn note_x87(&mut self, inst: &Instruction) {
        if sets_x87_pointer(inst.code()) {
            self.x87_pc = Some(inst.ip());
        }
    }

    /// Ends a run of x87 instructions.
    pub(super) fn store_x87_pc(&mut self) {
        if let Some(pc) = self.x87_pc.take() {
            self.store_word(offset::X87_PC, pc);
        }
    }

    /// `fnstenv` of 28 bytes.
    pub(super) fn x87_environment(
        &mut self,
        inst: &Instruction,
        reader: &Reader<'_>,
    ) -> Result<Translated, IcedError> {
        let is_address = |r: Register| r == Register::None || r.is_gpr64();
        let (base, index) = (inst.memory_base(), inst.memory_index());
        let Some(pc) = self
            .x87_pc
            .filter(|_| is_address(base) && is_address(index) && !is_relative_to_gs(inst))
        else {
            return Ok(Translated::Refused);
        };
        let displacement = (inst.memory_displacement64() as i64).wrapping_add(POINTER);
        if i32::try_from(displacement).is_err() {
            return Ok(Translated::Refused);
        }
        self.put(reader.raw());
        let pointer = MemoryOperand::new(
            base,
            index,
            inst.memory_index_scale(),
            displacement,
            8,
            false,
            inst.segment_prefix(),
        );
        self.encode(&Instruction::with2(Code::Mov_rm32_imm32, pointer, pc as u32)?)?;
        Ok(Translated::Next)
    }
}
