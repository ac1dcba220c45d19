//! Gates: they count how often the guest comes to a head as a block, or to what the head dispatches to,
//! while a race judges the head's trace ([`crate::emitter::race`]).
//!
//! A *gate* is code in front of a place's block, as a counter is ([`super::head_counters`]), but it
//! never leaves. It adds one to a word of data memory if the guest starts the iteration that is
//! counted, and goes on to the block, all registers and flags in place. The words are the thread's
//! ([`RaceWord`]): no thread disturbs the counts of another. Counting takes time itself;
//! how much is measured by counting twice, the second time nothing, or in a word that nobody reads:
//!
//! ```text
//!  count                       one more start
//!  rcx = [twice]; jrcxz ──┐    is the thread to measure counting?
//!  count nothing          │
//!  jmp block           ◄──┘
//! ```
//!
//! Data: [`Blocks::gate_keys`]. Invariant: a gate's link leads to the body of its place's block, so that
//! no gate is part of a cycle without a guest instruction. The caller holds the emitter.
//!
//! Example: a trace of the loop at 0x1000 was made. While the race measures the blocks, links to
//! 0x1000 lead to the gate.

use super::head_counters::{Front, NO_COUNTER};
use super::removal::{Doomed, Key};
use super::{Blocks, NONE};
use crate::asm::{Assembler, RCX};
use crate::cache::{Cache, CacheError};
use crate::codegen::count::{self, KeyRegister, RaceWord};
use crate::fragment::Fragment;
use crate::transfers::indirect::{Indirect, SAVE_RCX};
use dynasour_guest::context::offset;

impl Blocks {
    /// Gives the block of `place` a gate, which counts the starts at which the register of `key` has
    /// its value, unless it has one already.
    pub(crate) fn gate(
        &mut self,
        place: u32,
        key: Option<KeyRegister>,
        (indirect, cache): (&Indirect, &mut Cache),
        fragments: &[Fragment],
    ) -> Result<(), CacheError> {
        let gate = self.places[place as usize].made[2];
        if gate != NONE {
            if self.gate_keys.get(&gate) == Some(&key) {
                return Ok(());
            }
            self.drop_gate(place, indirect, cache, fragments);
        }
        let mut code = match key {
            None => each_start(),
            Some(key) => starts_of(key),
        };
        code.jmp();
        let field = code.len() - 4;
        let size = Key::of_gate(code.len());
        let front = Front { code, field, words: &[], key: size, number: NO_COUNTER };
        let (_, index) = self.put_in_front(place, front, cache)?;
        self.places[place as usize].made[2] = index;
        self.gate_keys.insert(index, key);
        Ok(())
    }

    /// Drops the gate of `place`. Its memory is used again later, as that of a stale block.
    fn drop_gate(
        &mut self,
        place: u32,
        indirect: &Indirect,
        cache: &Cache,
        fragments: &[Fragment],
    ) {
        let start = self.gate_of(place);
        let p = &mut self.places[place as usize];
        let (gate, block) = (std::mem::replace(&mut p.made[2], NONE), p.block);
        if start == Some(p.entry) {
            self.lead(place, block, cache, fragments);
        }
        self.unlink(gate, indirect, cache);
        let generation = self.generation;
        self.stale.get_or_insert_with(|| Doomed::new(generation)).blocks.push(gate);
    }

    /// The offset of the gate of `place`.
    pub(crate) fn gate_of(&self, place: u32) -> Option<u32> {
        let gate = self.places.get(place as usize)?.made[2];
        (gate != NONE).then(|| self.blocks[gate as usize].start)
    }
}

/// Counts each execution. In a short loop each count waits for the one before, through the word, so the
/// second count of an execution goes through the same word, and adds nothing.
fn each_start() -> Vec<u8> {
    let saved = offset::STUB_SAVE + 8 * SAVE_RCX;
    let mut code = Vec::with_capacity(80);
    code.store(RCX, saved);
    count::add(&mut code, 1, RaceWord::Floor);
    code.load(RCX, RaceWord::Twice.field());
    let mut again = Vec::with_capacity(24);
    count::add(&mut again, 0, RaceWord::Floor);
    code.jrcxz_over(i8::try_from(again.len()).expect("counting takes few bytes"));
    code.extend(&again);
    code.load(RCX, saved);
    code
}

/// Counts the executions at which the register of `key` has its value.
fn starts_of(key: KeyRegister) -> Vec<u8> {
    let saved = offset::STUB_SAVE + 8 * SAVE_RCX;
    let mut code = count::starts_if(Some(key), RaceWord::Floor);
    code.store(RCX, saved);
    code.load(RCX, RaceWord::Twice.field());
    let mut twice_more: Vec<u8> = Vec::with_capacity(100);
    twice_more.load(RCX, saved);
    twice_more.extend(count::starts_if(Some(key), RaceWord::Second));
    twice_more.store(RCX, saved);
    code.jrcxz_over(i8::try_from(twice_more.len()).expect("counting takes few bytes"));
    code.extend(&twice_more);
    code.load(RCX, saved);
    code
}
