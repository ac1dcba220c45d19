//! Indirect jumps, calls and returns between pieces of generated code (docs/design.md, "Code
//! generation").
//!
//! Modern processors predict an indirect jump well when it has an address of its own, and badly
//! when all go through one shared routine. So each *site* has its own jump. It goes, without a
//! comparison, to the address that the first table of [`crate::transfers::lookup`] holds for the
//! low bits of the target. Each possible destination begins with a *checked entry*, which goes on
//! to the
//! *miss stub* unless the destination is the one that was meant.
//!
//! ```text
//! site's tail:    mov gs:[save], rcx              checked entry of pc:  (out: jmp miss)
//!                 movzx ecx, word gs:[next_pc]                          mov rcx, gs:[next_pc]
//!                 jmp [TABLE + rcx*8]                                   lea rcx, [rcx - PC]
//!                                                                       unless rcx is 0: out
//!                                                                       mov rcx, gs:[save]
//!                                                                       (the destination's code)
//! ```
//!
//! The target is in `next_pc` and all else canonical: the guest's registers in their homes, flags
//! untouched throughout. The miss stub searches the second table and jumps to the checked entry
//! that it finds there; else it leaves with [`MISSED`], the guest's registers in place. Returns are
//! sites like any other.
//!
//! A predictor remembers the jumps that are taken on the way to an indirect one, so only the
//! guest's own jumps should be taken. A tail stands right behind the code that it belongs to. When
//! a site is to leave, its own jump is patched: it then goes through a table all of whose words
//! lead out. A check falls through at the destination that was meant
//! ([`crate::transfers::entry_check`]). Measured on Zen 5: recursive `fib`, which does nothing but
//! return, takes 1.46 times native with a jump before each tail and one behind each check, 1.03
//! without; virtual calls take 1.62 with a `jrcxz` over the way out in each check, 1.11 without.
//!
//! **Registers.** Going through memory takes rcx for as long as one iteration of a dispatch loop.
//! So if the target is in a register of the guest's, that register *carries* it: the destination
//! may clobber the register, since it knows the value. A site of `jmp rax` goes through the table
//! of rax, which leads to checked entries that park rcx in rax:
//!
//! ```text
//! site's tail:    mov gs:[next_pc], rax           checked entry of pc:  (out: jmp miss_rax)
//!                 movzx eax, ax                                         mov rax, rcx
//!                 jmp [TABLE_OF_RAX + rax*8]                            mov rcx, gs:[next_pc]
//!                                                                       lea rcx, [rcx - PC]
//!                                                                       unless rcx is 0: out
//!                                                                       mov rcx, rax
//!                                                                       mov eax, PC
//! ```
//!
//! (Measured: a bytecode interpreter takes 1.76 times native through memory, 1.07 by register.) If
//! the slot of such a table is free, the site leaves, and its target gets an entry. If the slot
//! holds another target's entry, `miss_rax` retries through the table in memory.
//!
//! Most programs execute few such jumps, and filling a table takes some time. So these tails end
//! with an instruction of eight aligned bytes, which can be replaced by one store. Until a register
//! has carried [`ASKED`] targets that instruction leads to a stub that leaves. It does so again
//! when the site is to leave.
//!
//! **Signals.** Unlinking does not reach a thread that is interrupted between a site and its
//! destination. The handler diverts it to a stub that leaves. Registers that are displaced at that
//! point are in `stub_save` ([`Displaced`]). Where nothing is displaced yet, or any more, the value
//! in `stub_save` is still the register's.
//!
//! Data: [`Indirect`]. The caller holds the emitter; functions that say so are async-signal-safe.

use crate::asm::{Assembler, RCX};
use crate::cache::Cache;
pub use crate::codegen::piece::{Piece, SAVE_RCX};
use crate::stubs::StubError;
pub use crate::transfers::diversion::{Displaced, Diversion};
use crate::transfers::entry_check::EntryCheck;
use crate::transfers::hit_rates::{RateWords, Rates};
use crate::transfers::lookup::Lookup;
use crate::transfers::miss_stubs::{MissStubs, counting, miss_stubs};
use crate::transfers::stack_returns::ReturnStack;
use dynasour_guest::context::offset;
use std::ops::Range;

/// The `exit_site` of an indirect transfer that found nothing: this plus [`Via::index`].
pub(crate) const MISSED: u32 = 0x7fff_ff00;
/// Bytes of the jump to the miss stub that a checked entry stands behind.
pub(crate) const WAY_OUT: u64 = 5;
/// The most bytes of [`Indirect::name_transfer`].
pub(crate) const NAMING: usize = 24;
/// The number of rsp, which carries no target.
pub(crate) const RSP: u8 = 4;

/// Where registers other than rcx ([`SAVE_RCX`]) are while stubs use them: indices into
/// `stub_save`.
pub(crate) const SAVE_RAX: usize = 1;
pub(crate) const SAVE_RDX: usize = 3;
pub(crate) const SAVE_RSI: usize = 4;

/// What carries the target of an indirect transfer, besides `next_pc`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Via {
    /// Nothing else.
    Memory,
    /// The guest's register of this number.
    Register(u8),
}

impl Via {
    /// The number of carriers.
    pub(crate) const COUNT: usize = 17;

    /// A number below [`Via::COUNT`].
    pub(crate) fn index(self) -> usize {
        match self {
            Via::Memory => 0,
            Via::Register(r) => 1 + usize::from(r),
        }
    }

    /// The inverse of [`Via::index`].
    pub(crate) fn from_index(index: usize) -> Option<Via> {
        match index {
            0 => Some(Via::Memory),
            n if n < Via::COUNT => Some(Via::Register(n as u8 - 1)),
            _ => None,
        }
    }
}

/// Where a tail finds its target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TargetSource {
    /// Only in `next_pc`. Nothing is displaced before the tail.
    Stored,
    /// In `next_pc` and in rcx. The guest's rcx is in its place in `stub_save` ([`SAVE_RCX`]).
    Rcx,
    /// In `next_pc` and in this register, where the guest has it.
    Register(u8),
}

impl TargetSource {
    /// The carrier of the target.
    pub fn via(self) -> Via {
        match self {
            TargetSource::Stored | TargetSource::Rcx => Via::Memory,
            TargetSource::Register(r) => Via::Register(r),
        }
    }
}

/// Where a thread is within a checked entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InCheck {
    /// At its first instruction: nothing has been parked yet.
    First,
    Inside,
    /// At the jump behind a checked entry apart: every register has its value.
    Last,
}

impl InCheck {
    /// The place `at` bytes within the checked entry (its way out included), behind which, `passed`
    /// bytes within, there may be a jump.
    pub fn new(at: u64, passed: u64) -> InCheck {
        match at {
            WAY_OUT => InCheck::First,
            _ if at >= passed => InCheck::Last,
            _ => InCheck::Inside,
        }
    }
}

/// The tables and stubs that sites and destinations share.
pub struct Indirect {
    lookup: Lookup,
    stubs: MissStubs,
    rates: Option<RateWords>,
    returns: ReturnStack,
    entry_check: EntryCheck,
    names_transfers: bool,
    /// How many transfers of each carrier have come to the runtime.
    asked: [u32; Via::COUNT],
}

/// A register gets a table after this many of its transfers came to the runtime: filling the table
/// takes about as long as they took. If this is too low, programs with few indirect jumps start
/// more slowly.
const ASKED: u32 = 256;

/// The stubs of a register that carries targets.
#[derive(Clone, Copy)]
pub(crate) struct RegisterStub {
    pub(crate) start: u64,
    pub(crate) register: u8,
}

impl RegisterStub {
    pub(crate) const ROOM: u64 = 64;
    /// Offsets: see the functions.
    const ASK: u64 = 3;
    const MISS: u64 = 30;
    /// Offset from which on only rcx is displaced.
    const MISS_ON: u64 = 48;
    const END: u64 = 64;

    /// Leaves from a checked entry in which rcx is parked.
    fn unpark(self) -> u64 {
        self.start
    }

    /// Leaves from a point where only the carrier has lost its value.
    fn ask(self) -> u64 {
        self.start + Self::ASK
    }

    /// Goes on from a checked entry of another target.
    fn miss(self) -> u64 {
        self.start + Self::MISS
    }

    /// The bytes of the stubs. `table` is the table of [`Via::Memory`]; without that table no
    /// register carries targets.
    pub(crate) fn generate(self, table: u32, leave_canonical: u64) -> Vec<u8> {
        let r = self.register;
        let mut unpark = Piece::default();
        // Nothing is parked in rcx itself: this does nothing.
        unpark.mov(RCX, r);
        unpark.load(r, offset::NEXT_PC);
        unpark.store_constant(offset::EXIT_SITE, MISSED + Via::Register(r).index() as u32);
        unpark.jump(leave_canonical);
        let mut rest = Piece::default();
        if r == RCX {
            rest.load(RCX, offset::NEXT_PC);
            rest.save_rcx();
        } else {
            rest.store(r, offset::STUB_SAVE + 8 * SAVE_RCX);
            rest.load(r, offset::NEXT_PC);
        }
        rest.jump_to_stored(table);
        let (unpark, rest) = (unpark.placed(self.start), rest.placed(self.miss()));
        assert_eq!((unpark.len() as u64, rest.len() as u64), (Self::MISS, Self::END - Self::MISS));
        [unpark, rest].concat()
    }

    /// How a thread gets out that is in the stubs. Async-signal-safe.
    fn diversion(self, host_rip: u64, out: u64) -> Option<Diversion> {
        match host_rip - self.start {
            Self::MISS_ON.. => Some(Diversion { rip: out, displaced: Displaced::Rcx }),
            Self::MISS.. => Some(Diversion { rip: self.unpark(), displaced: Displaced::None }),
            // On the way out.
            _ => None,
        }
    }
}

impl Indirect {
    /// Empty tables, and the stubs in the cache.
    pub(crate) fn new(
        cache: &mut Cache,
        leave_canonical: u64,
        rates: bool,
        entry_check: EntryCheck,
        has_pext: bool,
    ) -> Result<Indirect, StubError> {
        let lookup = Lookup::new(&cache.range()).map_err(crate::cache::CacheError::Map)?;
        let rates = if rates { RateWords::new(&cache.range()) } else { None };
        let stubs = miss_stubs(cache, leave_canonical, rates.as_ref(), &lookup)?;
        let table = lookup.first_table(Via::Memory);
        let returns = ReturnStack::new(cache, has_pext, table, stubs.miss, stubs.outs[1])?;
        let (names_transfers, asked) = (false, [0; Via::COUNT]);
        let mut indirect =
            Indirect { stubs, lookup, rates, returns, entry_check, names_transfers, asked };
        indirect.prepare(Via::Memory);
        Ok(indirect)
    }

    /// In a forked child whose cache is fresh: makes the stubs again, at the same addresses, and
    /// empties the tables.
    pub(crate) fn reset_after_fork(
        &mut self,
        cache: &mut Cache,
        leave_canonical: u64,
    ) -> Result<(), StubError> {
        let stubs = miss_stubs(cache, leave_canonical, self.rates.as_ref(), &self.lookup)?;
        assert_eq!(stubs, self.stubs, "the stubs of a child differ from its parent's");
        let table = self.table(Via::Memory);
        let [_, out_from_rcx] = self.stubs.outs;
        self.returns.reset_after_fork(cache, table, self.stubs.miss, out_from_rcx)?;
        self.lookup.clear_after_fork();
        self.asked = [0; Via::COUNT];
        Ok(())
    }

    /// The addresses of the tables and of the counters.
    pub(crate) fn memory(&self) -> impl Iterator<Item = Range<u64>> {
        let rates = self.rates.as_ref().map(RateWords::memory);
        self.lookup.memory().into_iter().chain(rates)
    }

    /// How entries and landings check.
    pub fn entry_check(&self) -> EntryCheck {
        self.entry_check
    }

    /// Do sites store which transfer they are?
    pub(crate) fn names_transfers(&self) -> bool {
        self.names_transfers
    }

    /// Sets whether sites store which transfer they are. No site has been made yet.
    pub(crate) fn name_transfers(&mut self, names: bool) {
        self.names_transfers = names;
    }

    /// The code that stores the pc of the transfer at `pc`; empty if sites do not name themselves.
    /// It has at most [`NAMING`] bytes and displaces nothing.
    pub(crate) fn name_transfer(&self, pc: u64) -> Piece {
        let mut piece = Piece::default();
        if self.names_transfers {
            piece.store_word(offset::TRANSFER, pc);
        }
        piece
    }

    /// Returns through the processor's return stack.
    pub(crate) fn returns(&self) -> &ReturnStack {
        &self.returns
    }

    pub(crate) fn returns_mut(&mut self) -> &mut ReturnStack {
        &mut self.returns
    }

    /// The code that counts a transfer, if transfers are counted. It clobbers `scratch`.
    pub(crate) fn count_transfer(&self, scratch: u8) -> Option<Piece> {
        self.rates.as_ref().map(|words| counting(scratch, words.executed()))
    }

    /// The code that counts a jump which has found its target by a comparison, if transfers are
    /// counted. It clobbers `scratch`.
    pub(crate) fn count_compared(&self, scratch: u8) -> Option<Piece> {
        self.rates.as_ref().map(|words| counting(scratch, words.compared()))
    }

    /// How transfers found their destinations, if that is counted.
    pub fn rates(&self) -> Option<Rates> {
        self.rates.as_ref().map(RateWords::rates)
    }

    /// Fills the table of a carrier, if that has not been done. Must be called before a tail refers
    /// to the table.
    pub(crate) fn prepare(&mut self, via: Via) {
        let free = match via {
            Via::Memory => self.stubs.miss,
            Via::Register(r) => self.register_stub(r).ask(),
        };
        self.lookup.prepare(via, free);
    }

    /// Counts a transfer with this carrier that has come to the runtime. True if the carrier should
    /// have a table from now on.
    pub(crate) fn asked(&mut self, via: Via) -> bool {
        let asked = &mut self.asked[via.index()];
        *asked = asked.saturating_add(1);
        *asked >= ASKED
    }

    /// Fills the table that leads out. Must be called before a tail that uses memory is made to
    /// lead out. Async-signal-safe.
    pub(crate) fn prepare_out(&self) {
        self.lookup.prepare_out(self.out_from_rcx());
    }

    fn register_stub(&self, register: u8) -> RegisterStub {
        RegisterStub {
            start: self.stubs.registers + RegisterStub::ROOM * u64::from(register),
            register,
        }
    }

    /// The miss stub. A checked entry of another target leads there, with the target in `next_pc`
    /// and rcx in its place in `stub_save`.
    pub fn miss(&self) -> u64 {
        self.stubs.miss
    }

    /// Leaves with [`MISSED`], nothing displaced.
    pub(crate) fn out(&self) -> u64 {
        self.stubs.outs[0]
    }

    /// Leaves with [`MISSED`], rcx in its place in `stub_save`.
    pub(crate) fn out_from_rcx(&self) -> u64 {
        self.stubs.outs[1]
    }

    /// The field of a tail that goes through this carrier's table, if the table is within reach.
    pub(crate) fn table(&self, via: Via) -> Option<u32> {
        self.lookup.first_table(via)
    }

    /// The field of a tail of [`Via::Memory`] that leads out, if that table is within reach.
    pub(crate) fn out_table(&self) -> Option<u32> {
        self.lookup.out_table()
    }

    /// The stub to which a tail of this register leads while the register has no table, and when
    /// the site is to leave.
    pub(crate) fn ask(&self, register: u8) -> u64 {
        self.register_stub(register).ask()
    }

    /// The carrier of a jump or call whose target is in this register.
    pub(crate) fn carrier(&self, register: u8) -> Via {
        let carries = register != RSP && self.lookup.first_table(Via::Memory).is_some();
        if carries { Via::Register(register) } else { Via::Memory }
    }

    /// The tail of a site.
    pub fn tail(&self, source: TargetSource) -> Piece {
        let mut piece = Piece::default();
        let table = self.table(source.via());
        match source {
            TargetSource::Stored => {
                piece.save_rcx();
                piece.displaced = piece.len();
            }
            TargetSource::Rcx | TargetSource::Register(_) => {}
        }
        if let Some(words) = &self.rates {
            let scratch = if let TargetSource::Register(r) = source { r } else { RCX };
            piece.count(scratch, words.executed());
            if source != TargetSource::Stored {
                piece.load(scratch, offset::NEXT_PC);
            }
        }
        match (table, source) {
            (Some(table), TargetSource::Stored) => piece.jump_to_stored(table),
            (Some(table), TargetSource::Rcx) => piece.jump_through(RCX, table),
            (Some(table), TargetSource::Register(r)) => piece.jump_by_carrier(r, table),
            // Without a table within reach the miss stub searches for every target.
            (None, _) => piece.jump(self.miss()),
        }
        piece
    }

    /// The checked entry of the code for `pc`, behind its way out. It falls through into that code,
    /// all registers in place. It leaves flags alone even if that code does not read them: if
    /// another target was meant, its code may.
    pub fn checked_entry(&self, pc: u64, via: Via) -> Piece {
        let mut piece = Piece::default();
        piece.jump(match via {
            Via::Memory => self.miss(),
            Via::Register(r) => self.register_stub(r).miss(),
        });
        match via {
            Via::Memory => {
                self.entry_check.compare(&mut piece, pc);
                piece.restore_rcx();
            }
            Via::Register(RCX) => {
                self.entry_check.compare(&mut piece, pc);
                piece.constant(RCX, pc);
            }
            Via::Register(r) => {
                piece.mov(r, RCX);
                self.entry_check.compare(&mut piece, pc);
                piece.mov(RCX, r);
                piece.constant(r, pc);
            }
        }
        piece
    }

    /// The way out of a thread that is within a checked entry. Async-signal-safe.
    pub(crate) fn diversion_in_check(&self, at: InCheck, via: Via) -> Diversion {
        let rip = match via {
            // Before its last instruction rcx is displaced; behind it the kept value is still
            // right.
            Via::Memory => return Diversion { rip: self.out(), displaced: Displaced::Rcx },
            Via::Register(r) if r == RCX || at != InCheck::Inside => self.register_stub(r).ask(),
            Via::Register(r) => self.register_stub(r).unpark(),
        };
        Diversion { rip, displaced: Displaced::None }
    }

    /// How a thread gets out that is in the stubs. Async-signal-safe.
    pub(crate) fn diversion(&self, host_rip: u64) -> Option<Diversion> {
        if let Some(displaced) = self.in_miss_stub(host_rip) {
            return Some(Diversion { rip: self.out(), displaced });
        }
        if let Some(diversion) = self.returns.diversion(host_rip) {
            return Some(diversion);
        }
        let at = host_rip.checked_sub(self.stubs.registers)?;
        let register = u8::try_from(at / RegisterStub::ROOM).ok().filter(|r| *r < 16)?;
        self.register_stub(register).diversion(host_rip, self.out())
    }

    /// Lets sites with this carrier that jump to `pc` arrive at its checked entry, the piece of
    /// code at `start`. Takes effect for all threads at once.
    pub fn insert(&mut self, via: Via, pc: u64, start: u64) {
        self.lookup.insert(via, pc, start + WAY_OUT);
    }

    /// Sites that jump to `pc` miss from now on. A thread that has read the table before may still
    /// arrive at its checked entry.
    pub fn remove(&mut self, pc: u64) {
        self.lookup.remove(pc);
    }

    /// The contents of the tables: carrier, pc, and the address behind the way out of its checked
    /// entry.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (Via, u64, u64)> + '_ {
        self.lookup.entries()
    }

    /// A word of a table that belongs to no pc and does not lead out.
    pub(crate) fn unowned(&self) -> Option<u64> {
        self.lookup.unowned()
    }

    /// All sites miss from now on.
    pub fn clear(&mut self) {
        self.returns.forget();
        self.lookup.clear();
    }

    /// The registers that are displaced at `host_rip`, if it is in the miss stub.
    /// Async-signal-safe.
    fn in_miss_stub(&self, host_rip: u64) -> Option<Displaced> {
        let [before, after] = &self.stubs.ranges;
        before
            .contains(&host_rip)
            .then_some(Displaced::Rcx)
            .or(after.contains(&host_rip).then_some(Displaced::Four))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    fn indirect() -> (Cache, Indirect) {
        let mut cache = Cache::new(1 << 16).unwrap();
        let made = Indirect::new(&mut cache, 0x2000_0000, false, EntryCheck::Pext, true).unwrap();
        (cache, made)
    }

    #[test]
    fn what_is_displaced_in_the_miss_stub() {
        let (_cache, indirect) = indirect();
        assert_eq!(indirect.in_miss_stub(indirect.miss()), Some(Displaced::Rcx));
        assert_eq!(indirect.in_miss_stub(indirect.miss() - 1), None);
        let last = indirect.stubs.ranges[1].end - 1;
        assert_eq!(indirect.in_miss_stub(last), Some(Displaced::Four));
        assert_eq!(indirect.in_miss_stub(last + 1), None);
    }

    #[test]
    fn pieces_say_where_their_fields_are() {
        let (_cache, indirect) = indirect();
        for via in
            (0..Via::COUNT).filter_map(Via::from_index).filter(|via| *via != Via::Register(RSP))
        {
            for pc in [0x40_1000, 0x7fff_f234_5678] {
                let entry = indirect.checked_entry(pc, via);
                let field = entry.jump.unwrap();
                assert_eq!(
                    (entry.bytes[field - 1], &entry.bytes[field..field + 4]),
                    (0xe9, &[0; 4][..])
                );
            }
            let source = match via {
                Via::Memory => TargetSource::Rcx,
                Via::Register(r) => TargetSource::Register(r),
            };
            let (tail, table) = (indirect.tail(source), indirect.table(via).unwrap());
            let field = tail.table.unwrap();
            assert_eq!(tail.bytes[field..field + 4], table.to_le_bytes());
        }
    }

    #[test]
    fn stubs_of_registers_are_cut_where_instructions_begin() {
        let (cache, indirect) = indirect();
        for r in (0..16).filter(|r| *r != RSP) {
            let stub = indirect.register_stub(r);
            let code = cache.read(stub.start, RegisterStub::END as usize);
            let starts: Vec<u64> = Decoder::with_ip(64, code, 0, DecoderOptions::NONE)
                .iter()
                .map(|i| i.ip())
                .collect();
            for at in [RegisterStub::ASK, RegisterStub::MISS, RegisterStub::MISS_ON] {
                assert!(starts.contains(&at), "{r}: {starts:?}");
            }
            assert_eq!(indirect.diversion(stub.ask()), None);
            assert_eq!(indirect.diversion(stub.miss()).unwrap().rip, stub.unpark());
        }
    }
}
