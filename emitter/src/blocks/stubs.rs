//! Code that all copied blocks share.
//!
//! * **load**: the way in. It loads the extended state and jumps to the block at `stub_save[6]`.
//! * **fault_out**: leaves with [`FAULT`]; registers are as the faulting instruction found them.
//! * **stale**: leaves with [`STALE`] from a block whose guest code has changed
//!   ([`super::self_checking`]).
//!
//! No flags are changed. Unlinking blocks does not reach a thread that a signal interrupts in here;
//! [`CopyStubs::diversion`] does. Data: [`CopyStubs`], addresses that are the same after a fork.
//! The stubs are made with the emitter and never changed.
//!
//! Example: the dispatcher enters the block at host address 0x2000_5000. It puts that into
//! `stub_save[6]` and enters *load*, which restores the vector registers and jumps there.

use super::self_checking::SAVED;
use crate::asm::{Asm, Assembler, Mem, RAX, RCX, RDX};
use crate::cache::Cache;
use crate::cpu::Cpu;
use crate::stubs::{ABORTED, StubError, Stubs};
use crate::transfers::indirect::{Displaced, Diversion};
use dynasour_guest::context::offset;
use std::ops::Range;

/// The `exit_site` of exits of blocks: this plus the number of the link.
pub(crate) const FIRST_LINK: u32 = 1 << 30;
/// The `exit_site` of counters at zero: this plus the number of the counter.
pub(crate) const FIRST_COUNTER: u32 = 0x6000_0000;
/// The `exit_site` after a fault.
pub(crate) const FAULT: u32 = 0x7fff_fff1;
/// The `exit_site` of a block whose guest bytes have changed, with its pc in `next_pc`.
pub(crate) const STALE: u32 = 0x7fff_fff2;

/// The `exit_site` of guest code that ran in place.
pub const IN_PLACE_LEFT: u32 = 0x7fff_fff3;

/// The word of `stub_save` that holds the address at which `load` goes on.
pub(crate) const LOADED: usize = 6;

/// Addresses of the stubs.
#[derive(Clone, Debug)]
pub(super) struct CopyStubs {
    pub load: u64,
    pub fault_out: u64,
    pub stale: u64,
    load_out: u64,
    /// The addresses at which the guest's rax, rcx and rdx are in `stub_save[1..4]`.
    loading: Range<u64>,
}

impl CopyStubs {
    /// Generates the stubs.
    pub fn generate(cache: &mut Cache, cpu: &Cpu, stubs: &Stubs) -> Result<CopyStubs, StubError> {
        let kept = [RAX, RCX, RDX].map(|r| (r, offset::STUB_SAVE + 8 * (1 + usize::from(r))));
        let mut code = Asm::new();
        let load = code.bound();
        kept.into_iter().for_each(|(r, field)| code.store(r, field));
        let loading = code.bound();
        code.mov_imm_32(RAX, cpu.xstate_mask as u32);
        code.mov_imm_32(RDX, (cpu.xstate_mask >> 32) as u32);
        code.load(RCX, offset::THIS);
        code.xrstor64(Mem::at(RCX).plus(offset::XSTATE as i32));
        code.store_constant(offset::EXTENDED_AWAY, 0);
        kept.into_iter().for_each(|(r, field)| code.load(r, field));
        code.jmp_through(Mem::context(offset::STUB_SAVE + 8 * LOADED));
        let load_out = code.bound();
        code.store_constant(offset::EXIT_SITE, ABORTED as u32);
        code.jmp_to(stubs.leave_canonical);

        let fault_out = code.bound();
        code.store_constant(offset::EXIT_SITE, FAULT);
        code.jmp_to(stubs.leave_canonical);

        let stale = code.bound();
        code.store(RCX, offset::NEXT_PC);
        code.store_constant(offset::EXIT_SITE, STALE);
        code.unpack_flags();
        code.load(RAX, offset::STUB_SAVE + 8 * SAVED[0]);
        code.load(RCX, offset::STUB_SAVE + 8 * SAVED[1]);
        code.jmp_to(stubs.leave_canonical);

        let placed = cache.put_stubs(code)?;
        Ok(CopyStubs {
            load: placed.at(load),
            fault_out: placed.at(fault_out),
            stale: placed.at(stale),
            load_out: placed.at(load_out),
            loading: placed.range(loading, load_out),
        })
    }

    /// The way out of a thread that a signal has interrupted in here. Async-signal-safe.
    pub fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        let displaced =
            if host_rip >= self.loading.start { Displaced::Three } else { Displaced::None };
        let inside = (self.load..self.load_out).contains(&host_rip);
        inside.then_some(Diversion { rip: self.load_out, displaced })
    }
}
