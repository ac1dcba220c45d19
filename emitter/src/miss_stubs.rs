//! The stubs that indirect transfers share: the search of the second table, and the ways out.
//!
//! * **miss**: a checked entry that is not meant leads here, with the target in `next_pc` and rcx
//!   in its place in `stub_save`. It looks for the target in the second table ([`crate::lookup`])
//!   and jumps to the checked entry that it finds.
//! * **out**, **out_from_rcx**: leave with [`MISSED`], the guest's registers in place.
//! * for each register that carries targets, a [`RegisterStub`].
//!
//! No flags are touched. Data: [`MissStubs`], the addresses, which are the same after a fork.
//! Invariant: what is displaced at each address is what [`MissStubs::ranges`] says, for signal
//! handlers. The stubs are made with the emitter and never changed.
//!
//! Example: `jmp [rbx]` to 0x401234, whose word in the first table belongs to 0x411234: that one's
//! checked entry leads to miss, which finds 0x401234 in one of four slots of the second table.

use crate::cache::Cache;
use crate::indirect::Via;
use crate::indirect::{MISSED, RSP, RegisterStub, SAVE_RAX, SAVE_RCX, SAVE_RDX, SAVE_RSI};
use crate::lookup::{ENTRIES, HIGH_WEIGHT, Lookup, PROBES};
use crate::rates::RateWords;
use crate::stubs::StubError;
use crate::template::{Label, Template};
use dynasour_guest::context::offset;
use std::arch::global_asm;
use std::ops::Range;

/// Where the entry that was found is kept: an index into `stub_save`.
const FOUND: usize = 5;

/// Addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MissStubs {
    pub(crate) miss: u64,
    /// Leaves with [`MISSED`], nothing displaced; and with rcx displaced.
    pub(crate) outs: [u64; 2],
    /// The miss stub's addresses, up to where registers other than rcx are displaced and from there
    /// on.
    pub(crate) ranges: [Range<u64>; 2],
    /// Stubs of registers, [`RegisterStub::ROOM`] bytes each.
    pub(crate) registers: u64,
}

/// What stands where in the assembled stubs. Fields end at their labels.
#[repr(C)]
struct Labels {
    out_from_rcx: Label,
    out: Label,
    leaves: Label,
    miss: Label,
    four: Label,
    table: Label,
    counted: Label,
    count_load: Label,
    count_store: Label,
    uncounted: Label,
    end: Label,
}

unsafe extern "C" {
    #[link_name = "dynasour_miss_stubs"]
    static CODE: u8;
    #[link_name = "dynasour_miss_stubs_labels"]
    static LABELS: Labels;
}

const _: () = assert!(HIGH_WEIGHT == 9 * 8 && PROBES == 4);

global_asm!(
    ".pushsection .rodata.dynasour_miss_stubs, \"a\", @progbits",
    ".globl dynasour_miss_stubs, dynasour_miss_stubs_labels",
    ".hidden dynasour_miss_stubs, dynasour_miss_stubs_labels",
    ".balign 64",
    "dynasour_miss_stubs:",

    ".Lout_from_rcx:",
    "mov rcx, gs:[{SAVE} + 8 * {SAVE_RCX}]",
    ".Lout:",
    "mov qword ptr gs:[{EXIT_SITE}], {MISSED}",
    ".byte 0xe9, 0, 0, 0, 0",
    ".Lleaves:",

    ".balign 64",
    ".Lmiss:",
    "mov gs:[{SAVE} + 8 * {SAVE_RAX}], rax",
    "mov gs:[{SAVE} + 8 * {SAVE_RDX}], rdx",
    "mov gs:[{SAVE} + 8 * {SAVE_RSI}], rsi",
    ".Lfour:",
    // eax = the low half + HIGH_WEIGHT * the next, in 16 bits
    "movzx eax, word ptr gs:[{NEXT_PC}]",
    "movzx edx, word ptr gs:[{NEXT_PC} + 2]",
    "lea edx, [rdx + rdx * 8]",
    "lea eax, [rax + rdx * 8]",
    "movzx eax, ax",
    "mov rsi, gs:[{NEXT_PC}]",
    "movabs rdx, 0x1111111111111111",
    ".Ltable:",
    "lea rdx, [rdx + rax * 8]",
    "mov rcx, [rdx]",
    "lea rcx, [rcx + rsi + 1]",
    "jrcxz .Lhit_0",
    "mov rcx, [rdx + 8]",
    "lea rcx, [rcx + rsi + 1]",
    "jrcxz .Lhit_1",
    "mov rcx, [rdx + 16]",
    "lea rcx, [rcx + rsi + 1]",
    "jrcxz .Lhit_2",
    "mov rcx, [rdx + 24]",
    "lea rcx, [rcx + rsi + 1]",
    "jrcxz .Lhit_3",
    ".Lnone:",
    "mov rax, gs:[{SAVE} + 8 * {SAVE_RAX}]",
    "mov rdx, gs:[{SAVE} + 8 * {SAVE_RDX}]",
    "mov rsi, gs:[{SAVE} + 8 * {SAVE_RSI}]",
    "jmp .Lout_from_rcx",
    ".Lhit_0:",
    "mov rcx, [rdx + {ENTRIES}]",
    "jmp .Lfound",
    ".Lhit_1:",
    "mov rcx, [rdx + {ENTRIES} + 8]",
    "jmp .Lfound",
    ".Lhit_2:",
    "mov rcx, [rdx + {ENTRIES} + 16]",
    "jmp .Lfound",
    ".Lhit_3:",
    "mov rcx, [rdx + {ENTRIES} + 24]",
    ".Lfound:",
    "jrcxz .Lnone",
    "mov gs:[{SAVE} + 8 * {FOUND}], rcx",
    // Left out unless it is counted.
    ".Lcounted:",
    "mov rax, ds:[0x11111111]",
    ".Lcount_load:",
    "lea rax, [rax + 1]",
    "mov ds:[0x11111111], rax",
    ".Lcount_store:",
    ".Luncounted:",
    "mov rax, gs:[{SAVE} + 8 * {SAVE_RAX}]",
    "mov rdx, gs:[{SAVE} + 8 * {SAVE_RDX}]",
    "mov rsi, gs:[{SAVE} + 8 * {SAVE_RSI}]",
    "jmp qword ptr gs:[{SAVE} + 8 * {FOUND}]",
    ".Lmiss_end:",

    ".balign 4",
    "dynasour_miss_stubs_labels:",
    ".long .Lout_from_rcx - dynasour_miss_stubs, .Lout - dynasour_miss_stubs, .Lleaves - dynasour_miss_stubs",
    ".long .Lmiss - dynasour_miss_stubs, .Lfour - dynasour_miss_stubs, .Ltable - dynasour_miss_stubs",
    ".long .Lcounted - dynasour_miss_stubs, .Lcount_load - dynasour_miss_stubs",
    ".long .Lcount_store - dynasour_miss_stubs, .Luncounted - dynasour_miss_stubs, .Lmiss_end - dynasour_miss_stubs",
    ".popsection",
    SAVE = const offset::STUB_SAVE,
    SAVE_RAX = const SAVE_RAX,
    SAVE_RCX = const SAVE_RCX,
    SAVE_RDX = const SAVE_RDX,
    SAVE_RSI = const SAVE_RSI,
    FOUND = const FOUND,
    EXIT_SITE = const offset::EXIT_SITE,
    NEXT_PC = const offset::NEXT_PC,
    MISSED = const MISSED,
    ENTRIES = const ENTRIES,
);

/// Generates the stubs.
pub(crate) fn miss_stubs(
    cache: &mut Cache,
    leave_canonical: u64,
    rates: Option<&RateWords>,
    lookup: &Lookup,
) -> Result<MissStubs, StubError> {
    // SAFETY: constants, made above.
    let (labels, mut code) = unsafe { (&LABELS, Template::new(&raw const CODE, LABELS.end)) };
    match rates {
        Some(words) => [labels.count_load, labels.count_store].into_iter().for_each(|at| code.fill(at, words.second())),
        None => code.leave_out(labels.counted, labels.uncounted),
    }
    let placed = code.place(cache)?;
    code.fill_wide(labels.table, lookup.second_table());
    code.lead(placed, labels.leaves, leave_canonical);
    let miss = placed.at(labels.miss);
    let four = placed.at(labels.four);
    let ranges = [miss..four, four..placed.base + code.len() as u64];
    code.write(placed, cache);
    let registers = cache.alloc_hot(16 * RegisterStub::ROOM as usize, 64)?;
    if let Some(table) = lookup.first_table(Via::Memory) {
        for register in (0..16).filter(|r| *r != RSP) {
            let stub = RegisterStub { start: registers + RegisterStub::ROOM * u64::from(register), register };
            cache.write(stub.start, &stub.generate(table, leave_canonical));
        }
    }
    Ok(MissStubs { miss, outs: [placed.at(labels.out), placed.at(labels.out_from_rcx)], ranges, registers })
}
