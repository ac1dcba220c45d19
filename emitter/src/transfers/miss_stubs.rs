//! The stubs that indirect transfers share: the search of the second table, and the ways out.
//!
//! * **miss**: the checked entry of another target leads here, with the target in `next_pc` and rcx
//!   in its place in `stub_save`. The stub looks for the target in the second table
//!   ([`crate::transfers::lookup`]) and jumps to the checked entry that it finds.
//! * **out**, **out_from_rcx**: leave with [`MISSED`], the guest's registers in place.
//! * for each register that carries targets, a [`RegisterStub`].
//!
//! No flags are touched. Data: [`MissStubs`], the addresses, which are the same after a fork.
//! Invariant: [`MissStubs::ranges`] tells signal handlers which registers are displaced at each
//! address. The stubs are made with the emitter and never changed.
//!
//! Example: `jmp [rbx]` goes to 0x401234, whose word in the first table belongs to 0x411234. The
//! checked entry of 0x411234 leads to *miss*, which finds 0x401234 in one of four slots of the
//! second table.

use crate::asm::{Asm, Assembler, Label, Mem, RAX, RCX, RDX, RSI};
use crate::cache::Cache;
use crate::codegen::piece::Piece;
use crate::stubs::StubError;
use crate::transfers::hit_rates::RateWords;
use crate::transfers::indirect::Via;
use crate::transfers::indirect::{
    MISSED, RSP, RegisterStub, SAVE_RAX, SAVE_RCX, SAVE_RDX, SAVE_RSI,
};
use crate::transfers::lookup::{ENTRIES, HIGH_WEIGHT, Lookup, PROBES};
use dynasour_guest::context::offset;
use std::ops::Range;

/// The word of `stub_save` that holds the entry that was found.
const FOUND: usize = 5;

/// Addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MissStubs {
    pub(crate) miss: u64,
    /// Leaves with [`MISSED`], nothing displaced; and with rcx displaced.
    pub(crate) outs: [u64; 2],
    /// The miss stub's addresses: first the part where only rcx is displaced, then the part where
    /// the registers of [`KEPT`] are displaced, too.
    pub(crate) ranges: [Range<u64>; 2],
    /// Stubs of registers, [`RegisterStub::ROOM`] bytes each.
    pub(crate) registers: u64,
}

/// The registers that the miss stub uses beside rcx, and the words of `stub_save` that hold their
/// values meanwhile.
const KEPT: [(u8, usize); 3] = [(RAX, SAVE_RAX), (RDX, SAVE_RDX), (RSI, SAVE_RSI)];

/// The code that adds one to the word at `address`.
pub(crate) fn counting(scratch: u8, address: u32) -> Piece {
    let mut piece = Piece::default();
    piece.count(scratch, address);
    piece
}

/// Generates the stubs.
pub(crate) fn miss_stubs(
    cache: &mut Cache,
    leave_canonical: u64,
    rates: Option<&RateWords>,
    lookup: &Lookup,
) -> Result<MissStubs, StubError> {
    let mut code = Asm::new();
    let out_from_rcx = code.bound();
    code.load(RCX, save(SAVE_RCX));
    let out = code.bound();
    code.store_constant(offset::EXIT_SITE, MISSED);
    code.jmp_to(leave_canonical);
    code.int3(code.here().next_multiple_of(64) - code.here());
    let miss = code.bound();
    KEPT.into_iter().for_each(|(r, word)| code.store(r, save(word)));
    let four = code.bound();
    search(&mut code, lookup.second_table(), rates, out_from_rcx);
    let end = code.bound();
    let placed = cache.put_stubs(code)?;
    let ranges = [placed.range(miss, four), placed.range(four, end)];
    let registers = cache.alloc_hot(16 * RegisterStub::ROOM as usize, 64)?;
    if let Some(table) = lookup.first_table(Via::Memory) {
        for register in (0..16).filter(|r| *r != RSP) {
            let stub = RegisterStub {
                start: registers + RegisterStub::ROOM * u64::from(register),
                register,
            };
            cache.write(stub.start, &stub.generate(table, leave_canonical));
        }
    }
    Ok(MissStubs {
        miss: placed.at(miss),
        outs: [placed.at(out), placed.at(out_from_rcx)],
        ranges,
        registers,
    })
}

/// The field of a word of `stub_save`.
fn save(word: usize) -> usize {
    offset::STUB_SAVE + 8 * word
}

/// The miss stub's search. It goes on at the entry that it finds in the second table, else at
/// `none`. Either way the registers that it used have their values back.
fn search(code: &mut Asm<u64>, table: u64, rates: Option<&RateWords>, none: Label) {
    let give_back =
        |code: &mut Asm<u64>| KEPT.into_iter().for_each(|(r, word)| code.load(r, save(word)));
    // eax = the low half + HIGH_WEIGHT * the next, in 16 bits
    const _: () = assert!(HIGH_WEIGHT == 9 * 8);
    code.load_16(RAX, Mem::context(offset::NEXT_PC));
    code.load_16(RDX, Mem::context(offset::NEXT_PC + 2));
    code.lea_32(RDX, Mem::at(RDX).index(RDX, 3));
    code.lea_32(RAX, Mem::at(RAX).index(RDX, 3));
    code.movzx_16(RAX);
    code.load(RSI, offset::NEXT_PC);
    code.mov_imm_64(RDX, table);
    code.lea(RDX, Mem::at(RDX).index(RAX, 3));
    // A slot holds the complement of its pc, so that the sum with the pc and 1 is 0.
    let hits: [Label; PROBES] = std::array::from_fn(|_| code.label());
    for (probe, hit) in (0..).zip(hits) {
        code.mov_from(RCX, Mem::at(RDX).plus(8 * probe));
        code.lea(RCX, Mem::at(RCX).index(RSI, 0).plus(1));
        code.jrcxz(hit);
    }
    let is_none = code.bound();
    give_back(code);
    code.jmp_near(none);
    let found = code.label();
    for (probe, hit) in (0..).zip(hits) {
        code.bind(hit);
        code.mov_from(RCX, Mem::at(RDX).plus(ENTRIES as i32 + 8 * probe));
        if probe as usize + 1 < PROBES {
            code.jmp_short(found);
        }
    }
    code.bind(found);
    code.jrcxz(is_none);
    code.store(RCX, save(FOUND));
    if let Some(words) = rates {
        code.put(&counting(RAX, words.second()).bytes);
    }
    give_back(code);
    code.jmp_through(Mem::context(save(FOUND)));
}
