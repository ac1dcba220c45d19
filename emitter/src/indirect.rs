//! Indirect jumps, calls and returns between pieces of generated code (DESIGN section 6).
//!
//! Modern processors predict an indirect jump well when it has an address of its own, and badly when all go through
//! one shared routine. So each *site* has its own jump, unseen, to whatever the first table of [`crate::lookup`] says
//! for the low bits of the target; and each possible destination begins with a *checked entry*, which goes on to the
//! *miss stub* unless it is what was meant.
//!
//! ```text
//! site's tail:    mov gs:[exit_site], SITE        checked entry of pc:  mov rcx, gs:[next_pc]
//!                 mov gs:[save], rcx                                    lea rcx, [rcx - PC]
//!                 movzx ecx, word gs:[next_pc]                          jrcxz ok
//!                 jmp [TABLE + rcx*8]                                   jmp miss
//!                                                                 ok:   mov rcx, gs:[save]
//!                                                                       (the destination's code)
//! ```
//!
//! The target is in `next_pc` and all else canonical: the guest's registers in their homes, flags untouched throughout.
//! The miss stub searches the second table and jumps to the checked entry that it finds there; else it leaves, with the
//! guest's registers in place and `exit_site` naming the site. Returns are sites like any other.
//!
//! **Pieces** are bytes to be copied anywhere in the code cache. Templates are assembled once; making one is a copy and
//! two or three stores.
//!
//! **Signals.** A thread that is interrupted between a site and its destination is beyond what unlinking reaches. It is
//! sent out: registers that are displaced are in `stub_save` ([`Displaced`]), and where nothing is displaced yet or any
//! more, what `stub_save` holds is still right.

use crate::cache::Cache;
use crate::lookup::{ENTRIES, HIGH_WEIGHT, Lookup, PROBES};
use crate::stubs::StubError;
use dynasour_guest::context::offset;
use iced_x86::code_asm::*;
use iced_x86::{Code, Encoder, IcedError, Instruction, MemoryOperand, Register};
use smallvec::SmallVec;
use std::ops::Range;

/// Where registers are while stubs use them: indices into `stub_save`. That of rcx is for sites to know.
pub const SAVE_RCX: usize = 2;
const SAVE_RAX: usize = 1;
const SAVE_RDX: usize = 3;
const SAVE_RSI: usize = 4;
const FOUND: usize = 5;

/// Registers that are not where the guest has them, but in `stub_save`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Displaced {
    /// None.
    None,
    /// Only rcx.
    Rcx,
    /// rcx, rax and rdx.
    Three,
    /// Those of the miss stub.
    Four,
}

impl Displaced {
    /// Pairs of a register's number and the index into `stub_save` where its value is.
    pub fn places(self) -> &'static [(usize, usize)] {
        const ALL: [(usize, usize); 4] = [(1, SAVE_RCX), (0, SAVE_RAX), (2, SAVE_RDX), (6, SAVE_RSI)];
        match self {
            Displaced::None => &[],
            Displaced::Rcx => &ALL[..1],
            Displaced::Three => &ALL[..3],
            Displaced::Four => &ALL,
        }
    }
}

/// Where a tail finds its target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// In `next_pc`. Nothing is displaced before the tail.
    Stored,
    /// There and in rcx, whose own value is in its place in `stub_save` ([`SAVE_RCX`]).
    Rcx,
}

/// Code to be copied into the cache.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Its bytes.
    pub bytes: SmallVec<[u8; 64]>,
    /// The offset of a rel32 field that must be made to lead to [`Indirect::miss`].
    pub miss: Option<usize>,
    /// The offset of the first instruction before which rcx is displaced.
    pub displaced: usize,
}

/// A piece with places to fill in.
#[derive(Debug, Default)]
struct Template {
    bytes: Vec<u8>,
    miss: Option<usize>,
    displaced: usize,
    /// Fields of 32 bits.
    holes: SmallVec<[usize; 2]>,
}

impl Template {
    fn fill<const N: usize>(&self, values: [u32; N]) -> Piece {
        let mut bytes = SmallVec::from_slice(&self.bytes);
        for (at, value) in self.holes.iter().zip(values) {
            bytes[*at..*at + 4].copy_from_slice(&value.to_le_bytes());
        }
        Piece { bytes, miss: self.miss, displaced: self.displaced }
    }
}

/// What sites and destinations share: tables, miss stub, templates.
pub struct Indirect {
    lookup: Lookup,
    miss: u64,
    /// The miss stub's addresses, up to where registers other than rcx are displaced and from there on.
    miss_range: [Range<u64>; 2],
    tail_stored: Template,
    tail_rcx: Template,
    near: Template,
    far: Template,
}

fn context(field: usize, size: usize) -> MemoryOperand {
    debug_assert!(field + size <= offset::SCRATCH);
    MemoryOperand::new(Register::None, Register::None, 1, field as i64, 8, false, Register::GS)
}

fn save(n: usize) -> MemoryOperand {
    context(offset::STUB_SAVE + 8 * n, 8)
}

/// Assembles a template.
struct Draft {
    encoder: Encoder,
    t: Template,
}

impl Draft {
    fn new() -> Draft {
        Draft { encoder: Encoder::new(64), t: Template::default() }
    }

    fn len(&self) -> usize {
        self.t.bytes.len()
    }

    fn put(&mut self, inst: Instruction) -> Result<(), IcedError> {
        self.encoder.encode(&inst, 0)?;
        self.t.bytes.extend(self.encoder.take_buffer());
        Ok(())
    }

    /// An instruction whose last four bytes are to be filled in.
    fn hole(&mut self, inst: Instruction) -> Result<(), IcedError> {
        self.put(inst)?;
        self.t.holes.push(self.len() - 4);
        Ok(())
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.t.bytes.extend_from_slice(bytes);
    }

    /// A jump with a rel32 field to the miss stub.
    fn miss(&mut self, opcode: &[u8]) {
        self.bytes(opcode);
        self.t.miss = Some(self.len());
        self.bytes(&[0; 4]);
    }

    /// `jrcxz` over `n` bytes.
    fn skip_if_zero(&mut self, n: u8) {
        self.bytes(&[0xe3, n]);
    }

    fn done(self) -> Template {
        self.t
    }
}

/// `mov ecx/rcx, gs:[field]`
fn load(code: Code, register: Register, field: usize) -> Result<Instruction, IcedError> {
    Instruction::with2(code, register, context(field, 8))
}

/// `lea register, [rcx + disp32]`, the displacement to be filled in.
fn lea(code: Code, register: Register) -> Result<Instruction, IcedError> {
    let sum = MemoryOperand::new(Register::RCX, Register::None, 1, 0x1000_0000, 8, false, Register::None);
    Instruction::with2(code, register, sum)
}

fn restore_rcx() -> Result<Instruction, IcedError> {
    Instruction::with2(Code::Mov_r64_rm64, Register::RCX, save(SAVE_RCX))
}

/// `mov gs:[save], rcx`
fn save_rcx() -> Result<Instruction, IcedError> {
    Instruction::with2(Code::Mov_rm64_r64, save(SAVE_RCX), Register::RCX)
}

fn tail(source: Source, table: Option<i32>) -> Result<Template, IcedError> {
    use Register::{CX, ECX, RCX};
    let mut d = Draft::new();
    let site = Instruction::with2(Code::Mov_rm64_imm32, context(offset::EXIT_SITE, 8), 0x1000_0000)?;
    let next_pc = context(offset::NEXT_PC, 8);
    match source {
        Source::Stored => {
            d.hole(site)?;
            d.put(save_rcx()?)?;
            d.t.displaced = d.len();
            d.put(Instruction::with2(Code::Movzx_r32_rm16, ECX, next_pc)?)?;
        }
        Source::Rcx => {
            d.hole(site)?;
            d.put(Instruction::with2(Code::Movzx_r32_rm16, ECX, CX)?)?;
        }
    }
    match table {
        Some(table) => {
            let word = MemoryOperand::new(Register::None, RCX, 8, i64::from(table), 8, false, Register::None);
            d.put(Instruction::with1(Code::Jmp_rm64, word)?)?;
        }
        // Without a table within reach every jump is searched for.
        None => d.miss(&[0xe9]),
    }
    Ok(d.done())
}

/// For a pc below 2 GiB.
fn near() -> Result<Template, IcedError> {
    let mut d = Draft::new();
    d.put(load(Code::Mov_r64_rm64, Register::RCX, offset::NEXT_PC)?)?;
    d.hole(lea(Code::Lea_r64_m, Register::RCX)?)?;
    d.skip_if_zero(5);
    d.miss(&[0xe9]);
    d.put(restore_rcx()?)?;
    Ok(d.done())
}

/// For any pc: its halves one after the other.
fn far() -> Result<Template, IcedError> {
    let mut d = Draft::new();
    d.put(load(Code::Mov_r32_rm32, Register::ECX, offset::NEXT_PC)?)?;
    d.hole(lea(Code::Lea_r32_m, Register::ECX)?)?;
    d.skip_if_zero(5);
    let miss = d.len();
    d.miss(&[0xe9]);
    d.put(load(Code::Mov_r32_rm32, Register::ECX, offset::NEXT_PC + 4)?)?;
    d.hole(lea(Code::Lea_r32_m, Register::ECX)?)?;
    d.skip_if_zero(2);
    let back = miss as isize - (d.len() as isize + 2);
    d.bytes(&[0xeb, back as i8 as u8]);
    d.put(restore_rcx()?)?;
    Ok(d.done())
}

impl Indirect {
    /// Empty tables, and the miss stub in the cache.
    pub(crate) fn new(cache: &mut Cache, leave_canonical: u64) -> Result<Indirect, StubError> {
        let mut lookup = None;
        // The stub needs the table's address, the table the stub's.
        let (miss, miss_range) = miss_stub(cache, leave_canonical, |cache, miss| {
            let tables = Lookup::new(&cache.range(), miss).map_err(crate::cache::CacheError::Map)?;
            let second = tables.second_table();
            lookup = Some(tables);
            Ok(second)
        })?;
        let lookup = lookup.expect("made on the way");
        let table = lookup.first_table();
        Ok(Indirect {
            miss,
            miss_range,
            tail_stored: tail(Source::Stored, table)?,
            tail_rcx: tail(Source::Rcx, table)?,
            near: near()?,
            far: far()?,
            lookup,
        })
    }

    /// In a forked child whose cache is fresh: the miss stub once more, at the same address, and empty tables.
    pub(crate) fn reset_after_fork(&mut self, cache: &mut Cache, leave_canonical: u64) -> Result<(), StubError> {
        let second = self.lookup.second_table();
        let (miss, _) = miss_stub(cache, leave_canonical, |_, _| Ok(second))?;
        assert_eq!(miss, self.miss, "the stubs of a child differ from its parent's");
        self.lookup.clear();
        Ok(())
    }

    /// The addresses of the tables.
    pub(crate) fn memory(&self) -> [std::ops::Range<u64>; 2] {
        self.lookup.memory()
    }

    /// The miss stub: where a checked entry that is not meant leads, with the site in `exit_site`, the target in
    /// `next_pc` and rcx in its place in `stub_save`.
    pub fn miss(&self) -> u64 {
        self.miss
    }

    /// The tail of a site that is `exit_site` to the runtime when it misses.
    pub fn tail(&self, source: Source, exit_site: u32) -> Piece {
        match source {
            Source::Stored => self.tail_stored.fill([exit_site]),
            Source::Rcx => self.tail_rcx.fill([exit_site]),
        }
    }

    /// The checked entry of the code for `pc`; it falls through into that code, all registers in place. It compares
    /// without flags even if that code has no use for them: who was meant may have.
    pub fn checked_entry(&self, pc: u64) -> Piece {
        let (low, high) = (pc as u32, (pc >> 32) as u32);
        match i32::try_from(pc) {
            Ok(_) => self.near.fill([low.wrapping_neg()]),
            Err(_) => self.far.fill([low.wrapping_neg(), high.wrapping_neg()]),
        }
    }

    /// Lets sites that jump to `pc` arrive at its checked entry at `entry`. Takes effect for all threads at once.
    pub fn insert(&mut self, pc: u64, entry: u64) {
        self.lookup.insert(pc, entry);
    }

    /// Sites that jump to `pc` miss from now on. Threads may still be on the way to its checked entry.
    pub fn remove(&mut self, pc: u64) {
        self.lookup.remove(pc);
    }

    /// All sites miss from now on.
    pub fn clear(&mut self) {
        self.lookup.clear();
    }

    /// What is displaced in the miss stub, if `host_rip` is there. Async-signal-safe.
    pub fn in_miss_stub(&self, host_rip: u64) -> Option<Displaced> {
        let [before, after] = &self.miss_range;
        before.contains(&host_rip).then_some(Displaced::Rcx).or(after.contains(&host_rip).then_some(Displaced::Four))
    }
}

/// Generates the miss stub; `second_table` is told its address and says that of the table. Returns the address, and the
/// ranges where rcx and where four registers are displaced.
fn miss_stub(
    cache: &mut Cache,
    leave_canonical: u64,
    second_table: impl FnOnce(&Cache, u64) -> Result<u64, StubError>,
) -> Result<(u64, [Range<u64>; 2]), StubError> {
    const ROOM: usize = 512;
    let base = cache.alloc_hot(ROOM, 64)?;
    let table = second_table(cache, base)?;
    let mut a = CodeAssembler::new(64)?;
    let field = |at: usize| qword_ptr(at as u64).gs();
    let saved = |n: usize| field(offset::STUB_SAVE + 8 * n);
    let [mut four, mut found, mut none] = std::array::from_fn(|_| a.create_label());
    const OTHERS: [(AsmRegister64, usize); 3] = [(rax, SAVE_RAX), (rdx, SAVE_RDX), (rsi, SAVE_RSI)];
    for (r, n) in OTHERS {
        a.mov(saved(n), r)?;
    }
    a.set_label(&mut four)?;
    // eax = the low half + HIGH_WEIGHT * the next, in 16 bits
    a.movzx(eax, word_ptr(offset::NEXT_PC as u64).gs())?;
    a.movzx(edx, word_ptr(offset::NEXT_PC as u64 + 2).gs())?;
    const { assert!(HIGH_WEIGHT == 9 * 8) };
    a.lea(edx, ptr(rdx + rdx * 8))?;
    a.lea(eax, ptr(rax + rdx * 8))?;
    a.movzx(eax, ax)?;
    a.mov(rsi, field(offset::NEXT_PC))?;
    a.mov(rdx, table)?;
    a.lea(rdx, ptr(rdx + rax * 8))?;
    let mut hits: [CodeLabel; PROBES] = std::array::from_fn(|_| a.create_label());
    for (n, hit) in hits.iter().enumerate() {
        a.mov(rcx, ptr(rdx + 8 * n as i32))?;
        a.lea(rcx, ptr(rcx + rsi + 1))?;
        a.jrcxz(*hit)?;
    }
    a.jmp(none)?;
    for (n, hit) in hits.iter_mut().enumerate() {
        a.set_label(hit)?;
        a.mov(rcx, ptr(rdx + (8 * n + ENTRIES) as i32))?;
        if n + 1 < PROBES {
            a.jmp(found)?;
        }
    }
    a.set_label(&mut found)?;
    a.jrcxz(none)?;
    a.mov(saved(FOUND), rcx)?;
    for (r, n) in OTHERS {
        a.mov(r, saved(n))?;
    }
    a.jmp(saved(FOUND))?;
    a.set_label(&mut none)?;
    for (r, n) in OTHERS {
        a.mov(r, saved(n))?;
    }
    a.mov(rcx, saved(SAVE_RCX))?;
    a.jmp(leave_canonical)?;
    let result = a.assemble_options(base, iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)?;
    let bytes = &result.inner.code_buffer;
    assert!(bytes.len() <= ROOM, "the miss stub takes {} bytes", bytes.len());
    cache.write(base, bytes);
    let four = result.label_ip(&four)?;
    Ok((base, [base..four, four..base + bytes.len() as u64]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Formatter, NasmFormatter};

    fn indirect() -> (Cache, Indirect) {
        let mut cache = Cache::new(1 << 16).unwrap();
        let made = Indirect::new(&mut cache, 0x2000_0000).unwrap();
        (cache, made)
    }

    fn text(piece: &Piece) -> String {
        let mut formatter = NasmFormatter::new();
        let mut text = String::new();
        for inst in &mut Decoder::with_ip(64, &piece.bytes, 0, DecoderOptions::NONE) {
            assert!(!inst.is_invalid());
            formatter.format(&inst, &mut text);
            text.push('\n');
        }
        text
    }

    #[test]
    fn pieces_read_as_meant() {
        let (_cache, indirect) = indirect();
        let near = indirect.checked_entry(0x40_1000);
        assert!(text(&near).contains("lea rcx,[rcx-401000h]"), "{}", text(&near));
        let far = indirect.checked_entry(0x7fff_f234_5678);
        assert!(text(&far).contains("lea ecx,[rcx+0DCBA988h]"), "{}", text(&far));
        assert!(text(&far).contains("lea ecx,[rcx-7FFFh]"), "{}", text(&far));
        let tail = indirect.tail(Source::Stored, 0x1234);
        assert!(text(&tail).contains("1234h"), "{}", text(&tail));
        for piece in [near, far] {
            let field = piece.miss.unwrap();
            assert_eq!(piece.bytes[field..field + 4], [0; 4]);
            assert_eq!(piece.displaced, 0);
        }
        assert!(tail.displaced > 0);
        assert_eq!(indirect.tail(Source::Rcx, 1).displaced, 0);
    }

    #[test]
    fn what_is_displaced_in_the_miss_stub() {
        let (_cache, indirect) = indirect();
        assert_eq!(indirect.in_miss_stub(indirect.miss()), Some(Displaced::Rcx));
        assert_eq!(indirect.in_miss_stub(indirect.miss() - 1), None);
        let last = indirect.miss_range[1].end - 1;
        assert_eq!(indirect.in_miss_stub(last), Some(Displaced::Four));
        assert_eq!(indirect.in_miss_stub(last + 1), None);
    }
}
