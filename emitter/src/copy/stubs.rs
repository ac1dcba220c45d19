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
use crate::template::{Label, Template};
use dynasour_guest::context::offset;
use std::arch::global_asm;
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

/// What stands where in the assembled stubs. Fields end at their labels.
#[repr(C)]
struct Labels {
    load: Label,
    loading: Label,
    mask_low: Label,
    mask_high: Label,
    load_out: Label,
    load_leaves: Label,
    fault_out: Label,
    fault_leaves: Label,
    stale: Label,
    stale_leaves: Label,
    end: Label,
}

unsafe extern "C" {
    #[link_name = "dynasour_copy_stubs"]
    static CODE: u8;
    #[link_name = "dynasour_copy_stubs_labels"]
    static LABELS: Labels;
}

global_asm!(
    ".pushsection .rodata.dynasour_copy_stubs, \"a\", @progbits",
    ".globl dynasour_copy_stubs, dynasour_copy_stubs_labels",
    ".hidden dynasour_copy_stubs, dynasour_copy_stubs_labels",
    "dynasour_copy_stubs:",

    ".Lload:",
    "mov gs:[{SAVE} + 8 * 1], rax",
    "mov gs:[{SAVE} + 8 * 2], rcx",
    "mov gs:[{SAVE} + 8 * 3], rdx",
    ".Lloading:",
    "mov eax, 0x11111111",
    ".Lload_mask_low:",
    "mov edx, 0x11111111",
    ".Lload_mask_high:",
    "mov rcx, gs:[{THIS}]",
    "xrstor64 [rcx + {XSTATE}]",
    "mov qword ptr gs:[{EXTENDED_AWAY}], 0",
    "mov rax, gs:[{SAVE} + 8 * 1]",
    "mov rcx, gs:[{SAVE} + 8 * 2]",
    "mov rdx, gs:[{SAVE} + 8 * 3]",
    "jmp qword ptr gs:[{SAVE} + 8 * {LOADED}]",
    ".Lload_out:",
    "mov qword ptr gs:[{EXIT_SITE}], -1",
    ".byte 0xe9, 0, 0, 0, 0",
    ".Lload_leaves:",

    ".Lfault_out:",
    "mov qword ptr gs:[{EXIT_SITE}], {FAULT}",
    ".byte 0xe9, 0, 0, 0, 0",
    ".Lfault_leaves:",

    ".Lstale:",
    "mov gs:[{NEXT_PC}], rcx",
    "mov qword ptr gs:[{EXIT_SITE}], {STALE}",
    "add al, 0x7f",
    "sahf",
    "mov rax, gs:[{SAVE} + 8 * {SAVED_RAX}]",
    "mov rcx, gs:[{SAVE} + 8 * {SAVED_RCX}]",
    ".byte 0xe9, 0, 0, 0, 0",
    ".Lstale_leaves:",

    ".balign 4",
    "dynasour_copy_stubs_labels:",
    ".long .Lload - dynasour_copy_stubs, .Lloading - dynasour_copy_stubs",
    ".long .Lload_mask_low - dynasour_copy_stubs, .Lload_mask_high - dynasour_copy_stubs",
    ".long .Lload_out - dynasour_copy_stubs, .Lload_leaves - dynasour_copy_stubs",
    ".long .Lfault_out - dynasour_copy_stubs, .Lfault_leaves - dynasour_copy_stubs",
    ".long .Lstale - dynasour_copy_stubs, .Lstale_leaves - dynasour_copy_stubs, .Lstale_leaves - dynasour_copy_stubs",
    ".popsection",
    SAVE = const offset::STUB_SAVE,
    LOADED = const LOADED,
    SAVED_RAX = const SAVED[0],
    SAVED_RCX = const SAVED[1],
    THIS = const offset::THIS,
    XSTATE = const offset::XSTATE,
    EXTENDED_AWAY = const offset::EXTENDED_AWAY,
    EXIT_SITE = const offset::EXIT_SITE,
    NEXT_PC = const offset::NEXT_PC,
    FAULT = const FAULT,
    STALE = const STALE,
);

impl CopyStubs {
    /// Generates the stubs.
    pub fn generate(cache: &mut Cache, cpu: &Cpu, stubs: &Stubs) -> Result<CopyStubs, StubError> {
        // SAFETY: constants, made above.
        let (labels, mut code) = unsafe { (&LABELS, Template::new(&raw const CODE, LABELS.end)) };
        code.fill(labels.mask_low, cpu.xstate_mask as u32);
        code.fill(labels.mask_high, (cpu.xstate_mask >> 32) as u32);
        let placed = code.place(cache)?;
        for leaves in [labels.load_leaves, labels.fault_leaves, labels.stale_leaves] {
            code.lead(placed, leaves, stubs.leave_canonical);
        }
        code.write(placed, cache);
        Ok(CopyStubs {
            load: placed.at(labels.load),
            fault_out: placed.at(labels.fault_out),
            stale: placed.at(labels.stale),
            load_out: placed.at(labels.load_out),
            loading: placed.at(labels.loading)..placed.at(labels.load_out),
        })
    }

    /// Where a thread that a signal found in here goes on. Async-signal-safe.
    pub fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        let displaced = if host_rip >= self.loading.start { Displaced::Three } else { Displaced::None };
        let inside = (self.load..self.load_out).contains(&host_rip);
        inside.then_some(Diversion { rip: self.load_out, displaced })
    }
}
