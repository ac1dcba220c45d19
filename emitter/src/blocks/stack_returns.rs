//! Calls and returns of copied blocks through the processor's return stack. The protocol is
//! described in [`crate::transfers::stack_returns`].
//!
//! Data: [`Wanted`], which counts the places to return to, and [`Landings`] in each block, which
//! say where signal handlers find a thread that no link reaches. Invariant: returns go through the
//! stack either in all blocks or in none; [`Blocks::choose_returns`] decides when there are no
//! blocks. The caller holds the emitter; [`Blocks::diversion_of_return`] is async-signal-safe.
//!
//! Example: the 20,000th block with a call is made. [`Blocks::wants_stack`] is true from then on,
//! so the next copy asks for a flush, and after it all blocks call and return through the stack.

use super::translate::{Leads, Referent, Rules, Translated, Translation, Translator};
use super::{Block, Blocks};
use crate::asm::{Assembler, Mem, RCX, RSP};
use crate::cache::{Cache, writer};
use crate::transfers::entry_check::EntryCheck;
use crate::transfers::indirect::{Diversion, Indirect, NAMING, SAVE_RCX, TargetSource};
use crate::transfers::stack_returns::{LAST, Returns};
use dynasour_guest::context::offset;
use dynasour_guest::decode::MAX_LENGTH;
use std::ops::Range;

/// From this number of places to return to on, returns go through the stack (guess, between
/// recursive `fib`, which has two, and compilers, which have tens of thousands). If it is too low,
/// small programs get slower; if too high, large ones miss in the predictors.
const MANY: u32 = 20_000;

/// When copied blocks return through the stack.
pub(super) struct Wanted {
    how: Returns,
    /// Places to return to since everything was dropped.
    places: u32,
}

impl Wanted {
    pub fn new(how: Returns) -> Wanted {
        Wanted { how, places: 0 }
    }
}

/// The most bytes of an instruction's copy, except for calls and for tails that count or name
/// themselves.
pub(super) const STEP: usize = 64;
/// The most bytes of any copy that does not name itself.
const COUNTED_STEP: usize = 96;
/// Bytes from the field of a short branch to the farthest address that it reaches.
const SHORT: usize = 128;
/// Bytes of a jump over misses.
const OVER: usize = 2;

/// The most bytes of an instruction's copy.
pub(super) fn most_bytes(indirect: &Indirect) -> usize {
    COUNTED_STEP + if indirect.names_transfers() { NAMING } else { 0 }
}

/// The target of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Called {
    Known(u64),
    /// The address in `next_pc` and rcx. The guest's rcx is in `stub_save`.
    InRcx,
}

/// A call under translation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pc: u64,
    returns_to: u64,
    called: Called,
    landing: Landing,
}

/// The landing of a block's call, right behind the host's call. If `start` is 0 there is none.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Landing {
    /// Offset in the block.
    start: u16,
    len: u8,
    /// Offset from `start` of the branch that leads to the miss.
    branch: u8,
}

/// A block's call, and how it returns.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Landings {
    landing: Landing,
    /// Where its return by the stack ends; 0 if it has none.
    returns: u16,
}

impl Landing {
    /// Offsets in the block.
    fn code(self) -> Range<usize> {
        let start = usize::from(self.start);
        start..start + usize::from(self.len)
    }
}

impl Landings {
    pub(super) fn of(block: &Translation) -> Landings {
        let landing = block.call.map(|call| call.landing).unwrap_or_default();
        Landings { landing, returns: block.returns as u16 }
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.landing.start == 0
    }
}

impl Translator {
    /// `ret`
    pub(super) fn return_by_stack(&mut self, pc: u64, indirect: &Indirect) {
        let returns = indirect.returns();
        let count = indirect.count_transfer(RCX);
        if count.is_some() || indirect.names_transfers() {
            self.reach_misses(indirect, most_bytes(indirect));
        }
        self.name(pc, indirect);
        self.save(RCX, SAVE_RCX);
        self.mark(pc, Some((RCX, SAVE_RCX)));
        self.mov_from(RCX, Mem::at(RSP));
        self.store(RCX, offset::NEXT_PC);
        if let Some(count) = count {
            self.put(&count.bytes);
            self.load(RCX, offset::NEXT_PC);
        }
        self.lea_32(RCX, Mem::at(RSP).plus(8));
        self.pext_32(RCX, RCX, Mem::relative());
        self.refer(0, Referent::Address(returns.mask()));
        let looks = returns.looks(false);
        self.pad_instruction(4);
        self.put(&looks);
        self.add_exit(Leads::Return);
        self.mov_to(Mem::at(RSP), RCX);
        self.ret();
        self.out.returns = self.out.bytes.len() as u32;
    }

    /// Writes a call of the host's and the landing for returns to `address`. The code that replaces
    /// the pushed host address by the guest's stands behind the block
    /// ([`Translator::finish_call`]).
    pub(super) fn call_by_stack(
        &mut self,
        pc: u64,
        address: u64,
        called: Called,
        rules: &Rules<'_>,
    ) -> Translated {
        let immediate = i32::try_from(address as i64).ok();
        let check = rules.indirect.entry_check();
        if called != Called::InRcx {
            self.save(RCX, SAVE_RCX);
        }
        self.pext_32(RCX, RSP, Mem::relative());
        self.refer(0, Referent::Address(rules.indirect.returns().mask()));
        self.mov_to_imm_32(Mem::context(offset::LANDINGS).index(RCX, 2), 0);
        let keeps = self.out.relatives.len();
        self.refer(0, Referent::Own(0));
        let has_rcx = called != Called::InRcx && immediate.is_some();
        if has_rcx {
            self.restore(RCX, SAVE_RCX);
        }
        self.mark(pc, (!has_rcx).then_some((RCX, SAVE_RCX)));
        self.call();
        let start = self.out.bytes.len();
        self.out.relatives[keeps].to = Referent::Own(start as u32);
        self.mark(address, Some((RCX, SAVE_RCX)));
        if immediate.is_some() {
            self.load(RCX, offset::NEXT_PC);
            self.lea(RCX, Self::unless_it_is(address as u32, check));
            self.miss_unless(check);
        } else {
            for (n, half) in [address as u32, (address >> 32) as u32].into_iter().enumerate() {
                self.load_half(RCX, offset::NEXT_PC + 4 * n);
                self.lea_32(RCX, Self::unless_it_is(half, check));
                self.miss_unless(check);
            }
        }
        self.put_return_address(Mem::at(RSP).plus(-8), address);
        self.restore(RCX, SAVE_RCX);
        let (len, branch) = (self.out.bytes.len() - start, self.misses[0] - 1 - start);
        let landing = Landing { start: start as u16, len: len as u8, branch: branch as u8 };
        self.out.call = Some(Call { pc, returns_to: address, called, landing });
        if !rules.compares {
            return Translated::Called;
        }
        // The guest code behind the call may have changed when the call returns.
        self.mark(address, None);
        self.exit(Leads::To(address));
        Translated::End
    }

    /// Writes the code that the block's call leads to, behind all its other code.
    pub(super) fn finish_call(&mut self, indirect: &Indirect) {
        self.place_misses(indirect, false);
        let Some(Call { pc, returns_to, called, landing }) = self.out.call else { return };
        let (here, landing) = (self.out.bytes.len(), usize::from(landing.start));
        self.out.bytes[landing - 4..landing]
            .copy_from_slice(&((here - landing) as u32).to_le_bytes());
        let immediate = i32::try_from(returns_to as i64).ok();
        let has_rcx = called != Called::InRcx && immediate.is_some();
        self.mark_pushed(pc, (!has_rcx).then_some((RCX, SAVE_RCX)));
        self.put_return_address(Mem::at(RSP), returns_to);
        match called {
            Called::Known(target) => {
                if !has_rcx {
                    self.restore(RCX, SAVE_RCX);
                }
                self.exit_to_called(target);
            }
            Called::InRcx => {
                self.load(RCX, offset::NEXT_PC);
                self.tail(pc, indirect, TargetSource::Rcx);
            }
        }
    }

    /// The number of bytes that may still be written before misses have to be placed.
    pub(super) fn room_before_misses(&self) -> usize {
        let first =
            self.misses.first().map_or(usize::MAX, |field| field + SHORT - OVER - MAX_LENGTH);
        first.saturating_sub(self.out.bytes.len())
    }

    /// Places the misses of landings here, if their branches would not reach them behind this many
    /// more bytes.
    pub(super) fn reach_misses(&mut self, indirect: &Indirect, bytes: usize) {
        if self
            .misses
            .first()
            .is_some_and(|field| self.out.bytes.len() + OVER + bytes > field + SHORT)
        {
            self.place_misses(indirect, true);
        }
    }

    /// Places the misses of landings here. If control arrives here from above (`comes_by`), a jump
    /// leads over them.
    fn place_misses(&mut self, indirect: &Indirect, comes_by: bool) {
        const JUMP: i8 = 5;
        if self.misses.is_empty() {
            return;
        }
        if comes_by {
            self.jmp_over(JUMP);
        }
        let miss = self.out.bytes.len();
        for field in self.misses.drain(..) {
            let distance = i8::try_from(miss - field - 1);
            self.out.bytes[field] =
                distance.unwrap_or_else(|_| unreachable!("a landing's miss is out of reach")) as u8;
        }
        self.jmp();
        self.refer(0, Referent::Address(indirect.returns().miss()));
    }

    /// Stores a return address of the guest's on its stack; rcx may be anything then.
    fn put_return_address(&mut self, at: Mem, address: u64) {
        match i32::try_from(address as i64) {
            Ok(immediate) => self.mov_to_imm(at, immediate),
            Err(_) => {
                self.mov_imm_64(RCX, address);
                self.mov_to(at, RCX);
            }
        }
    }

    /// The operand of a `lea` after which [`Translator::miss_unless`] goes on if rcx was `low`.
    fn unless_it_is(low: u32, check: EntryCheck) -> Mem {
        Mem::at(RCX).plus(check.goes_on().wrapping_sub(low) as i32).wide()
    }

    /// Jumps to the miss unless rcx is the value for which `check` goes on.
    fn miss_unless(&mut self, check: EntryCheck) {
        self.put(&check.unless(0));
        self.misses.push(self.out.bytes.len() - 1);
    }
}

impl Blocks {
    /// Counts a block with a call, that is, a place to return to.
    pub(super) fn note_return_place(&mut self) {
        self.returns.places += 1;
    }

    /// Are there enough return sites to drop all blocks and copy them again, with returns through
    /// the stack?
    pub(super) fn wants_stack(&self, indirect: &Indirect) -> bool {
        let returns = indirect.returns();
        self.returns.how == Returns::Auto
            && self.returns.places >= MANY
            && returns.is_possible()
            && !returns.is_on()
    }

    /// Decides whether returns go through the stack from now on. There are no blocks.
    pub(super) fn choose_returns(&mut self, indirect: &mut Indirect) {
        let forced = self.returns.how == Returns::Stack && !indirect.returns().is_on();
        if forced || self.wants_stack(indirect) {
            indirect.returns_mut().turn_on();
        }
        self.returns.places = 0;
        let returns = indirect.returns();
        self.ways.returns = returns.is_on().then(|| [returns.looks(false), returns.looks(true)]);
    }

    /// The address of the branch by which a block's landing misses, if it has one.
    pub(crate) fn landing_branch(&self, block: u32) -> Option<u64> {
        let block = self.blocks.get(block as usize).filter(|block| !block.landings.is_empty())?;
        let Landing { start, branch, .. } = block.landings.landing;
        Some(self.base + u64::from(block.start) + u64::from(start) + u64::from(branch))
    }

    /// How the configuration wants copied blocks to return.
    pub(crate) fn wanted_returns(&self) -> Returns {
        self.returns.how
    }

    /// From now on returns to this block's landing miss.
    pub(super) fn close_landing(&self, block: u32, cache: &Cache) {
        if let Some(branch) = self.landing_branch(block) {
            writer::always_take(cache, branch);
        }
    }

    /// The way out of a thread that is `at` bytes within this block, if it has passed the block's
    /// links. Async-signal-safe.
    pub(super) fn diversion_of_return(
        &self,
        block: u32,
        at: u32,
        indirect: &Indirect,
        cache: &Cache,
    ) -> Option<Diversion> {
        let Block { start, len, landings, .. } = &self.blocks[block as usize];
        let at = at as usize;
        let lands = !landings.is_empty() && landings.landing.code().contains(&at);
        let misses = || {
            let here = self.base + u64::from(*start) + at as u64;
            let is_jump = !landings.is_empty() && at + 5 <= usize::from(*len);
            is_jump && leads_by_jump(cache.read(here, 5), here) == Some(indirect.returns().miss())
        };
        if lands || misses() {
            return Some(indirect.returns().diversion_in_landing());
        }
        let end = usize::from(landings.returns);
        (at < end && at + LAST >= end).then(|| indirect.returns().diversion_before_return())
    }
}

/// The target of the jump of five bytes at `here`, if these bytes are one.
fn leads_by_jump(code: &[u8], here: u64) -> Option<u64> {
    match code {
        [0xe9, relative @ ..] => {
            let relative = i32::from_le_bytes(*relative.first_chunk()?);
            Some(here.wrapping_add(5).wrapping_add(i64::from(relative) as u64))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use dynasour_guest::decode::Bytes;
    use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic};

    /// Translates `code` for the address `pc`; the offsets of the instructions, and what they are.
    fn translated(
        pc: u64,
        code: &[u8],
        check: EntryCheck,
    ) -> (Translator, Vec<(usize, Instruction)>) {
        let mut cache = Cache::new(1 << 16).unwrap();
        let mut indirect = Indirect::new(&mut cache, 0x2000_0000, false, check, true).unwrap();
        indirect.returns_mut().turn_on();
        let mut translator = Translator::new(cache.range());
        let source = Bytes { start: pc, bytes: code };
        assert!(translator.translate(pc, &source, &indirect, None, None).unwrap());
        let decoder = Decoder::with_ip(64, &translator.out.bytes, 0, DecoderOptions::NONE);
        let all = decoder.into_iter().map(|inst| (inst.ip() as usize, inst)).collect();
        (translator, all)
    }

    /// A place to return to, and how it is checked there, in how many parts and by which branch.
    const PLACES: [(u64, EntryCheck, usize, Mnemonic); 4] = [
        (0x40_1000, EntryCheck::Loop, 1, Mnemonic::Loop),
        (0x40_1000, EntryCheck::Pext, 1, Mnemonic::Jrcxz),
        (0x7fff_f234_5678, EntryCheck::Loop, 2, Mnemonic::Loop),
        (0x7fff_f234_5678, EntryCheck::Pext, 2, Mnemonic::Jrcxz),
    ];

    /// Where each instruction is, by its offset.
    fn at(all: &[(usize, Instruction)], offset: usize) -> &Instruction {
        let n = all
            .binary_search_by_key(&offset, |(at, _)| *at)
            .unwrap_or_else(|_| panic!("{offset}: {all:?}"));
        &all[n].1
    }

    #[test]
    fn landings_stand_behind_calls_and_check_without_flags() {
        // call rax; call [rcx]; call to somewhere
        for code in [&[0xff, 0xd0][..], &[0xff, 0x11], &[0xe8, 0, 1, 0, 0]] {
            for (pc, check, _, branch) in PLACES {
                let (translator, all) = translated(pc, &[code, &[0x0f, 0x05]].concat(), check);
                let call = translator.out.call.unwrap();
                let Range { start, end } = call.landing.code();
                assert_eq!(at(&all, start - 5).mnemonic(), Mnemonic::Call);
                assert_eq!(at(&all, start + usize::from(call.landing.branch)).mnemonic(), branch);
                // It goes on where the call returns to.
                assert_eq!((call.pc, call.returns_to), (pc, pc + code.len() as u64));
                let exit = translator.out.exits[0];
                assert_eq!(exit.leads, Leads::To(call.returns_to));
                assert!((end..end + 8).contains(&(exit.field as usize - 1)), "{all:?}");
                let touches_none = [
                    Mnemonic::Mov,
                    Mnemonic::Lea,
                    Mnemonic::Loop,
                    Mnemonic::Jrcxz,
                    Mnemonic::Shrx,
                    Mnemonic::Jmp,
                    Mnemonic::Call,
                    Mnemonic::Movzx,
                    Mnemonic::Pext,
                ];
                assert!(
                    all.iter().all(|(_, what)| touches_none.contains(&what.mnemonic())),
                    "{all:?}"
                );
            }
        }
    }

    #[test]
    fn blocks_go_on_behind_calls_and_landings_reach_their_misses() {
        // `before` instructions of six bytes, a call, `behind` of them, and another call.
        let (add, call) = ([0x48, 0x05, 1, 2, 3, 4], [0xe8, 0, 1, 0, 0]);
        for (before, behind) in (0..30).flat_map(|n| [(n, 1), (0, n), (5, n)]) {
            let code = [&add.repeat(before)[..], &call, &add.repeat(behind), &call].concat();
            for (pc, check, parts, branch) in PLACES {
                let (translator, all) = translated(pc, &code, check);
                let adds = all.iter().filter(|(_, inst)| inst.mnemonic() == Mnemonic::Add).count();
                assert_eq!(
                    (adds, translator.out.count as usize),
                    (before + behind, before + behind + 1),
                    "{all:?}"
                );
                let start = translator.out.call.unwrap().landing.code().start;
                let second = translator.out.exits[0];
                assert_eq!(second.leads, Leads::To(pc + code.len() as u64 - 5));
                let misses: Vec<usize> = all
                    .iter()
                    .filter(|(_, inst)| inst.mnemonic() == branch)
                    .map(|(_, inst)| inst.near_branch64() as usize)
                    .collect();
                assert_eq!(misses.len(), parts);
                for miss in misses {
                    assert_eq!(at(&all, miss).mnemonic(), Mnemonic::Jmp);
                    let field = miss as u32 + 1;
                    assert!(translator.out.relatives.iter().any(|r| r.field == field), "{all:?}");
                    assert!(translator.out.exits.iter().all(|exit| exit.field != field), "{all:?}");
                }
                let rest = at(&all, start - 5).near_branch64() as usize;
                assert_eq!(at(&all, rest).mnemonic(), Mnemonic::Mov);
                let keeps = |to: Referent| matches!(to, Referent::Own(at) if at as usize == start);
                assert!(translator.out.relatives.iter().any(|r| keeps(r.to)));
            }
        }
    }

    #[test]
    fn returns_end_where_they_have_looked_into_the_table() {
        for before in 0..8 {
            let code: Vec<u8> =
                [0x90].repeat(before).into_iter().chain([0xc3]).chain([0xcc; 32]).collect();
            let (translator, all) = translated(0x40_1000, &code, EntryCheck::Loop);
            let (at, store) = all[all.len() - 2];
            assert_eq!((translator.out.bytes.len() - at, store.mnemonic()), (LAST, Mnemonic::Mov));
            let last: Vec<Mnemonic> =
                all[all.len() - 4..].iter().map(|(_, what)| what.mnemonic()).collect();
            assert_eq!(last, [Mnemonic::Pext, Mnemonic::Mov, Mnemonic::Mov, Mnemonic::Ret]);
            let field = translator.out.exits[0].field;
            assert!(
                field % 8 == 4 && translator.out.returns as usize == translator.out.bytes.len(),
                "{field}"
            );
        }
    }

    #[test]
    fn misses_are_told_by_their_jumps() {
        assert_eq!(leads_by_jump(&[0xe9, 0x10, 0, 0, 0], 0x1000), Some(0x1015));
        assert_eq!(leads_by_jump(&[0xe9, 0xfb, 0xff, 0xff, 0xff], 0x1000), Some(0x1000));
        assert_eq!(leads_by_jump(&[0xe8, 0, 0, 0, 0], 0x1000), None);
    }
}
