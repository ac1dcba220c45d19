//! The code that all copied blocks share.
//!
//! * **load**: the way in. The extended state is loaded and the block at `stub_save[6]` entered.
//! * **fault_out**: leaves with [`FAULT`]; registers are as the faulting instruction found them.
//! * **stale**: leaves with [`STALE`] from a block that is not what stands in memory ([`super::own`]).
//!
//! No flags are touched. A signal that arrives in here is beyond the links of blocks: [`CopyStubs::diversion`].

use super::own::SAVED;
use crate::cache::Cache;
use crate::cpu::Cpu;
use crate::emitter::Diversion;
use crate::indirect::Displaced;
use crate::stubs::{StubError, Stubs};
use dynasour_guest::context::offset;
use iced_x86::BlockEncoderOptions;
use iced_x86::code_asm::*;
use std::ops::Range;

/// The `exit_site` of exits of blocks: this plus the number of the link.
pub(crate) const FIRST_LINK: u32 = 1 << 30;
/// The `exit_site` of counters at zero: this plus the number of the counter.
pub(crate) const FIRST_COUNTER: u32 = 0x6000_0000;
/// The `exit_site` after a fault.
pub(crate) const FAULT: u32 = 0x7fff_fff1;
/// The `exit_site` of a block whose guest bytes have changed, with its pc in `next_pc`.
pub(crate) const STALE: u32 = 0x7fff_fff2;

/// The word of `stub_save` that says where `load` goes on.
pub(crate) const LOADED: usize = 6;

/// Addresses.
#[derive(Clone, Debug)]
pub(super) struct CopyStubs {
    pub load: u64,
    pub fault_out: u64,
    pub stale: u64,
    load_out: u64,
    /// From where on rax, rcx and rdx are in `stub_save[1..4]`.
    loading: Range<u64>,
}

fn field(at: usize) -> AsmMemoryOperand {
    qword_ptr(at as u64).gs()
}

fn save(word: usize) -> AsmMemoryOperand {
    field(offset::STUB_SAVE + 8 * word)
}

impl CopyStubs {
    /// Generates the stubs.
    pub fn generate(cache: &mut Cache, cpu: &Cpu, stubs: &Stubs) -> Result<CopyStubs, StubError> {
        let mut a = CodeAssembler::new(64)?;
        let [mut load, mut loading, mut load_out, mut fault_out, mut stale] = std::array::from_fn(|_| a.create_label());

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

        a.set_label(&mut fault_out)?;
        a.mov(field(offset::EXIT_SITE), FAULT as i32)?;
        a.jmp(stubs.leave_canonical)?;

        a.set_label(&mut stale)?;
        a.mov(field(offset::NEXT_PC), rcx)?;
        a.mov(field(offset::EXIT_SITE), STALE as i32)?;
        a.add(al, 0x7f)?;
        a.sahf()?;
        a.mov(rax, save(SAVED[0]))?;
        a.mov(rcx, save(SAVED[1]))?;
        a.jmp(stubs.leave_canonical)?;

        // As in `Stubs::generate`.
        let size = a.assemble(stubs.range.end)?.len();
        let base = cache.alloc_hot(size + 16, 64)?;
        let result = a.assemble_options(base, BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)?;
        cache.write(base, &result.inner.code_buffer);
        let at = |l: &CodeLabel| result.label_ip(l);
        Ok(CopyStubs {
            load: at(&load)?,
            fault_out: at(&fault_out)?,
            stale: at(&stale)?,
            load_out: at(&load_out)?,
            loading: at(&loading)?..at(&load_out)?,
        })
    }

    /// Where a thread that a signal found in here goes on. Async-signal-safe.
    pub fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        let displaced = if host_rip >= self.loading.start { Displaced::Three } else { Displaced::None };
        let inside = (self.load..self.load_out).contains(&host_rip);
        inside.then_some(Diversion { rip: self.load_out, displaced })
    }
}
