//! Gates: they count how often the guest comes to a head as a block, while a race judges the head's
//! trace ([`crate::emitter::race`]).
//!
//! A *gate* is code in front of a place's block, as a counter is ([`super::head_counters`]), but it
//! never leaves. It adds one to a word of data memory if the guest starts the iteration that is
//! counted, and goes on to the block, all registers and flags in place. Counting takes time itself;
//! how much is measured by counting twice, the second time in a word that nobody reads:
//!
//! ```text
//!  count                       one more start
//!  rcx = [twice]; jrcxz ──┐    is counting to be measured?
//!  count                  │    in another word
//!  jmp block           ◄──┘
//! ```
//!
//! Data: none of its own; the words are behind those of the counters. Invariant: a gate's link leads
//! to the body of its place's block, so that no gate is part of a cycle without a guest instruction.
//! The caller holds the emitter.
//!
//! Example: a trace of the loop at 0x1000 was made. While the race measures the blocks, links to
//! 0x1000 lead to the gate.

use super::removal::Key;
use super::stack_returns::Landings;
use super::{BODY, Block, Blocks, Link, NONE, STUB};
use crate::asm::{Assembler, Mem, RCX};
use crate::cache::{Cache, CacheError};
use crate::codegen::count::{self, KeyRegister};
use crate::transfers::indirect::SAVE_RCX;
use dynasour_guest::context::offset;
use std::sync::atomic::AtomicU32;

/// The words of a race.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RaceWord {
    /// Starts at the entry of the trace.
    Entered,
    /// Starts at the head of its loop.
    Looped,
    /// Starts of the block.
    Floor,
    /// Not 0: the gate counts twice.
    Twice,
    /// The second count of a gate.
    Second,
}

/// The number of [`RaceWord`]s.
pub(crate) const RACE_WORDS: usize = 5;

impl Blocks {
    /// The address of a word of the race; none if there is no memory for words.
    pub(crate) fn race_word(&self, word: RaceWord) -> Option<u64> {
        self.heads.race_word(word).map(|(words, n)| words.address(n))
    }

    /// The value of a word of the race.
    pub(crate) fn read_race_word(&self, word: RaceWord) -> u64 {
        self.heads.race_word(word).map_or(0, |(words, n)| words.get(n))
    }

    /// Writes a word of the race.
    pub(crate) fn write_race_word(&self, word: RaceWord, value: u64) {
        if let Some((words, n)) = self.heads.race_word(word) {
            words.set(n, value);
        }
    }

    /// Makes a gate in front of the block of `place`, which counts the starts at which the register
    /// of `key` has its value. Returns its offset in the cache; none if there is no memory for words.
    pub(crate) fn gate(
        &mut self,
        place: u32,
        key: Option<KeyRegister>,
        cache: &mut Cache,
    ) -> Result<Option<u32>, CacheError> {
        let words = [RaceWord::Floor, RaceWord::Twice, RaceWord::Second];
        let [Some(floor), Some(twice), Some(second)] = words.map(|w| self.race_word(w)) else {
            return Ok(None);
        };
        let saved = offset::STUB_SAVE + 8 * SAVE_RCX;
        let (counting, fields) = count::code_if(key);
        let mut code = Vec::with_capacity(160);
        // Ends of fields that are relative to them, with the words that they lead to.
        let mut relative: Vec<(usize, u64)> = Vec::with_capacity(5);
        relative.extend(fields.map(|field| (field + 4, floor)));
        code.extend(&counting);
        code.store(RCX, saved);
        code.mov_from(RCX, Mem::relative());
        let flag = code.len();
        let mut twice_more: Vec<u8> = Vec::with_capacity(counting.len() + 18);
        twice_more.load(RCX, saved);
        let before = flag + 2 + twice_more.len();
        relative.extend(fields.map(|field| (before + field + 4, second)));
        twice_more.extend(&counting);
        twice_more.store(RCX, saved);
        code.jrcxz_over(i8::try_from(twice_more.len()).expect("counting takes few bytes"));
        code.extend(&twice_more);
        code.load(RCX, saved);
        relative.push((flag, twice));
        code.jmp();
        let field = code.len() - 4;
        let key = Key::of_gate(code.len());
        let slot = self.free.slot(key);
        let (start, cold, first_link) = match slot.and_then(|slot| self.blocks.get(slot as usize)) {
            Some(gone) => (
                self.base + u64::from(gone.start),
                self.base + u64::from(gone.cold),
                gone.first_link,
            ),
            None => {
                let fits = |start: u64| (start + field as u64) % 8 <= 4;
                let start = cache.alloc_hot_where(code.len(), fits)?;
                (start, cache.alloc_cold(STUB)?, self.links.len() as u32)
            }
        };
        for (end, word) in relative {
            let distance = word.wrapping_sub(start + end as u64) as u32;
            code[end - 4..end].copy_from_slice(&distance.to_le_bytes());
        }
        let start_offset = (start - self.base) as u32;
        let link = Link::new(start_offset + field as u32, (cold - self.base) as u32, place | BODY);
        let distance = self.target(&link).wrapping_sub(start + field as u64 + 4) as u32;
        code[field..field + 4].copy_from_slice(&distance.to_le_bytes());
        let out = self.stub_bytes(link.out, super::FIRST_LINK + first_link);
        cache.write(start, &code);
        cache.write(cold, &out);
        match self.links.get_mut(first_link as usize) {
            Some(gone) => *gone = link,
            None => self.links.push(link),
        }
        self.join(first_link);
        let index = self.put_block(
            slot,
            Block {
                pc: self.places[place as usize].pc,
                start: start_offset,
                len: code.len() as u16,
                prefix: 0,
                via: 0,
                links: 1,
                first_link,
                cold: (cold - self.base) as u32,
                counter: NONE,
                place,
                node: NONE,
                landings: Landings::default(),
                key,
                unlinked: AtomicU32::new(0),
            },
        );
        self.places[place as usize].made[2] = index;
        Ok(Some(start_offset))
    }

    /// The offset of the gate of `place`.
    pub(crate) fn gate_of(&self, place: u32) -> Option<u32> {
        let gate = self.places.get(place as usize)?.made[2];
        (gate != NONE).then(|| self.blocks[gate as usize].start)
    }
}
