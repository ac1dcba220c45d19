//! The code that all copied blocks share.
//!
//! * **load**: the way in. The extended state is loaded and the block at `stub_save[6]` entered.
//! * **lookup**: an indirect transfer to `next_pc`, guest rcx in `stub_save[2]`: to what the table knows, else out.
//! * **indirect_out**: leaves with [`INDIRECT`].
//! * **fault_out**: leaves with [`FAULT`]; registers are as the faulting instruction found them.
//!
//! No flags are touched. A signal that arrives in here is beyond the links of blocks: [`CopyStubs::diversion`].

use crate::cache::Cache;
use crate::cpu::Cpu;
use crate::emitter::Diversion;
use crate::stubs::{StubError, Stubs};
use dynasour_guest::context::offset;
use iced_x86::BlockEncoderOptions;
use iced_x86::code_asm::*;
use std::ops::Range;

/// The `exit_site` of exits of blocks: this plus the number of the link.
pub(crate) const FIRST_LINK: u32 = 1 << 30;
/// The `exit_site` of an indirect transfer that found nothing.
pub(crate) const INDIRECT: u32 = 0x7fff_fff0;
/// The `exit_site` after a fault.
pub(crate) const FAULT: u32 = 0x7fff_fff1;

/// The word of `stub_save` that says where `load` goes on.
pub(super) const LOADED: usize = 6;

/// Addresses.
#[derive(Clone, Debug)]
pub(super) struct CopyStubs {
    pub load: u64,
    pub lookup: u64,
    pub indirect_out: u64,
    pub fault_out: u64,
    load_out: u64,
    /// From where on rax, rcx and rdx are in `stub_save[1..4]`, in `load` and in `lookup`.
    loading: Range<u64>,
    looking: Range<u64>,
}

fn field(at: usize) -> AsmMemoryOperand {
    qword_ptr(at as u64).gs()
}

fn save(word: usize) -> AsmMemoryOperand {
    field(offset::STUB_SAVE + 8 * word)
}

impl CopyStubs {
    /// Generates the stubs. `lookup` has the addresses of the arrays of [`crate::lookup`].
    pub fn generate(cache: &mut Cache, cpu: &Cpu, stubs: &Stubs, lookup: (u64, u64)) -> Result<CopyStubs, StubError> {
        let mut a = CodeAssembler::new(64)?;
        let [mut load, mut loading, mut load_out, mut find, mut looking, mut hit, mut indirect_out, mut fault_out] =
            std::array::from_fn(|_| a.create_label());

        a.set_label(&mut load)?;
        a.mov(save(1), rax)?;
        a.mov(save(2), rcx)?;
        a.mov(save(3), rdx)?;
        a.set_label(&mut loading)?;
        a.mov(eax, cpu.xstate_mask as u32)?;
        a.mov(edx, (cpu.xstate_mask >> 32) as u32)?;
        a.mov(rcx, field(offset::THIS))?;
        a.xrstor64(ptr(rcx + offset::XSTATE as i32))?;
        a.mov(field(offset::EXTENDED_AWAY), 0)?;
        a.mov(rax, save(1))?;
        a.mov(rcx, save(2))?;
        a.mov(rdx, save(3))?;
        a.jmp(save(LOADED))?;
        a.set_label(&mut load_out)?;
        a.mov(field(offset::EXIT_SITE), -1)?;
        a.jmp(stubs.leave_canonical)?;

        a.set_label(&mut find)?;
        a.mov(save(1), rax)?;
        a.mov(save(3), rdx)?;
        a.set_label(&mut looking)?;
        a.movzx(eax, cx)?;
        a.mov(rdx, lookup.0)?;
        a.mov(rdx, qword_ptr(rdx + rax * 8))?;
        a.lea(rcx, qword_ptr(rcx + rdx))?;
        a.jrcxz(hit)?;
        a.mov(rax, save(1))?;
        a.mov(rdx, save(3))?;
        a.jmp(indirect_out)?;
        a.set_label(&mut hit)?;
        a.mov(rdx, lookup.1)?;
        a.mov(rdx, qword_ptr(rdx + rax * 8))?;
        a.mov(save(4), rdx)?;
        a.mov(rax, save(1))?;
        a.mov(rcx, save(2))?;
        a.mov(rdx, save(3))?;
        a.jmp(save(4))?;
        a.set_label(&mut indirect_out)?;
        a.mov(rcx, save(2))?;
        a.mov(field(offset::EXIT_SITE), INDIRECT as i32)?;
        a.jmp(stubs.leave_canonical)?;

        a.set_label(&mut fault_out)?;
        a.mov(field(offset::EXIT_SITE), FAULT as i32)?;
        a.jmp(stubs.leave_canonical)?;

        // As in `Stubs::generate`.
        let size = a.assemble(stubs.range.end)?.len();
        let base = cache.alloc_hot(size + 16, 64)?;
        let result = a.assemble_options(base, BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)?;
        cache.write(base, &result.inner.code_buffer);
        let at = |l: &CodeLabel| result.label_ip(l);
        Ok(CopyStubs {
            load: at(&load)?,
            lookup: at(&find)?,
            indirect_out: at(&indirect_out)?,
            fault_out: at(&fault_out)?,
            load_out: at(&load_out)?,
            loading: at(&loading)?..at(&load_out)?,
            looking: at(&looking)?..at(&indirect_out)?,
        })
    }

    /// Where a thread that a signal found in here goes on. Async-signal-safe.
    pub fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        if (self.load..self.load_out).contains(&host_rip) {
            return Some(Diversion { rip: self.load_out, restore: host_rip >= self.loading.start });
        }
        if (self.lookup..self.indirect_out).contains(&host_rip) {
            return Some(Diversion { rip: self.indirect_out, restore: host_rip >= self.looking.start });
        }
        None
    }
}
