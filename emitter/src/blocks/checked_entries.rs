//! Checked entries of copied blocks: where indirect transfers arrive
//! ([`crate::transfers::indirect`]).
//!
//! A block begins with its checked entry if a call returns there, or if it was first reached by an
//! indirect transfer. Any other place gets a checked entry *apart*, a piece of code that goes on by
//! a link to where the place leads. That is needed if an existing block turns out to be a target,
//! and if the place leads to a counter.
//!
//! Data: [`Blocks::checks`] and [`Blocks::apart`]. Invariant: a place is in the table of a carrier
//! if and only if its bit in `registered` is set. When the place's entry changes it is noted in
//! [`Blocks::moved`], and [`Blocks::register_moved`] writes the tables before the emitter is given
//! back. The caller holds the emitter; [`Blocks::diversion`] is async-signal-safe.
//!
//! Example: the block at 0x2000 was reached by a branch. Then `jmp rax` goes there. The runtime
//! calls [`Blocks::register`]`(0x2000, rax)`: a checked entry apart is made, whose link leads to
//! the block, and the table of rax leads to that entry.

use super::removal::Key;
use super::{Blocks, FIRST_LINK, Link, STUB};
use crate::cache::{Cache, CacheError};
use crate::transfers::indirect::{Diversion, InCheck, Indirect, Via};

/// Bytes of the jump behind a checked entry apart.
const JUMP: u8 = 5;

/// A checked entry that belongs to no block.
pub(crate) struct Check {
    /// Offset in the cache.
    start: u32,
    len: u8,
    pub via: Via,
    /// Its link.
    pub link: u32,
}

impl Check {
    /// Offset in the cache.
    pub fn start(&self) -> u32 {
        self.start
    }

    /// The key by which its memory is used again.
    pub fn key(&self) -> Key {
        Key::of_check(self.len, self.via)
    }
}

impl Blocks {
    /// Makes a checked entry apart.
    fn check(
        &mut self,
        place: u32,
        via: Via,
        indirect: &Indirect,
        cache: &mut Cache,
    ) -> Result<u32, CacheError> {
        let mut piece = indirect.checked_entry(self.places[place as usize].pc, via);
        let miss = (piece.jump, piece.leads);
        piece.jump(0);
        let jump = piece.len() - 4;
        (piece.jump, piece.leads) = miss;
        let slot = self.free.slot(Key::of_check(piece.len() as u8, via));
        let (start, cold, number) = match slot.and_then(|slot| self.checks.get(slot as usize)) {
            Some(gone) => {
                let out = self.links[gone.link as usize].out;
                (self.base + u64::from(gone.start), self.base + u64::from(out), gone.link)
            }
            None => {
                let start =
                    cache.alloc_hot_where(piece.len(), |start| (start + jump as u64) % 8 <= 4)?;
                (start, cache.alloc_cold(STUB)?, self.links.len() as u32)
            }
        };
        let offset = (start - self.base) as u32;
        let link = Link::new(offset + jump as u32, (cold - self.base) as u32, place);
        let mut bytes = piece.placed(start);
        let relative = self.target(&link).wrapping_sub(start + jump as u64 + 4) as u32;
        bytes[jump..].copy_from_slice(&relative.to_le_bytes());
        cache.write(cold, &self.stub_bytes(link.out, FIRST_LINK + number));
        cache.write(start, &bytes);
        match self.links.get_mut(number as usize) {
            Some(gone) => *gone = link,
            None => self.links.push(link),
        }
        self.join(number);
        let check = Check { start: offset, len: bytes.len() as u8, via, link: number };
        match slot {
            Some(slot) => self.checks[slot as usize] = check,
            None => self.checks.push(check),
        }
        self.places[place as usize].has_checks = true;
        self.apart.insert((place, via), offset);
        Ok(offset)
    }
}

impl Blocks {
    /// A block that is made at `pc` from now on begins with a checked entry for this carrier,
    /// unless another carrier was expected first.
    pub(crate) fn expect(&mut self, pc: u64, via: Via) {
        let place = self.place(pc);
        self.places[place as usize].expected.get_or_insert(via);
    }

    /// Enters the code at `pc` in the table of this carrier. Without code at `pc`, or while the
    /// table of a register is not in use, this does nothing.
    pub(crate) fn register(
        &mut self,
        pc: u64,
        via: Via,
        indirect: &mut Indirect,
        cache: &mut Cache,
    ) -> Result<(), CacheError> {
        if self.ways.in_use >> via.index() & 1 == 0 {
            if !indirect.asked(via) {
                return Ok(());
            }
            indirect.prepare(via);
            self.use_table(via, cache);
        }
        let place = self.place(pc);
        let p = &self.places[place as usize];
        if p.entry == 0 {
            return Ok(());
        }
        let begins_so = p.prefix != 0 && p.expected == Some(via) && p.entry == p.block;
        let checked = match self.apart.get(&(place, via)) {
            _ if begins_so => p.prefix,
            Some(checked) => *checked,
            None => self.check(place, via, indirect, cache)?,
        };
        self.places[place as usize].registered |= 1 << via.index();
        indirect.insert(via, pc, self.base + u64::from(checked));
        Ok(())
    }

    /// The table of [`Via::Memory`] does not lead to the block at `pc` any more.
    pub(crate) fn forget_registered(&mut self, pc: u64) {
        if let Some(place) = self.by_pc.get(&pc) {
            self.places[*place as usize].registered &= !(1 << Via::Memory.index());
        }
    }

    /// Enters each place whose entry has changed in the tables once more.
    pub(crate) fn register_moved(&mut self, indirect: &mut Indirect, cache: &mut Cache) {
        while let Some(place) = self.moved.pop() {
            let Some(p) = self.places.get(place as usize) else { continue };
            let (pc, expected) =
                (p.pc, p.expected.filter(|via| p.registered & 1 << via.index() != 0));
            if let Some(via) = expected
                && self.register(pc, via, indirect, cache).is_err()
            {
                // Without room for a checked entry, transfers to `pc` come to the runtime.
                indirect.remove(pc);
                self.places[place as usize].registered = 0;
            }
        }
    }

    /// The way out of a thread that is in the blocks' stubs, in a checked entry or in a landing.
    /// Async-signal-safe.
    pub(crate) fn diversion(
        &self,
        host_rip: u64,
        indirect: &Indirect,
        cache: &Cache,
    ) -> Option<Diversion> {
        if let Some(diversion) = self.stubs.diversion(host_rip) {
            return Some(diversion);
        }
        let offset = u32::try_from(host_rip.wrapping_sub(self.base)).ok()?;
        let (start, len, passed, via) = match self.at(host_rip) {
            Some(index) => {
                let at = offset - self.blocks[index as usize].start;
                if let Some(diversion) = self.diversion_of_return(index, at, indirect, cache) {
                    return Some(diversion);
                }
                let block = &self.blocks[index as usize];
                (block.start, block.prefix, block.prefix, Via::from_index(block.via.into())?)
            }
            None => {
                let i = self.checks.partition_point(|c| c.start <= offset).checked_sub(1)?;
                let Check { start, len, via, .. } = self.checks[i];
                (start, len, len - JUMP, via)
            }
        };
        let at = offset - start;
        let within = || InCheck::new(at.into(), passed.into());
        (at < u32::from(len)).then(|| indirect.diversion_in_check(within(), via))
    }
}
