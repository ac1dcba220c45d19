//! Gates: they count how often the guest comes to a head as a block, or to what the head dispatches to,
//! while a race judges the head's trace ([`crate::emitter::race`]).
//!
//! A *gate* is code in front of a place's block, as a counter is ([`super::head_counters`]), but it
//! never leaves. It adds one to a word of data memory if the guest starts the iteration that is
//! counted, and goes on to the block, all registers and flags in place. Counting takes time itself;
//! how much is measured by counting twice, the second time nothing, or in a word that nobody reads:
//!
//! ```text
//!  count                       one more start
//!  rcx = [twice]; jrcxz ──┐    is counting to be measured?
//!  count nothing          │
//!  jmp block           ◄──┘
//! ```
//!
//! Data: [`Blocks::gate_keys`]; the words are behind those of the counters. Invariant: a gate's link
//! leads to the body of its place's block, so that no gate is part of a cycle without a guest
//! instruction. The caller holds the emitter.
//!
//! Example: a trace of the loop at 0x1000 was made. While the race measures the blocks, links to
//! 0x1000 lead to the gate.

use super::head_counters::{Front, NO_COUNTER};
use super::removal::{Doomed, Key};
use super::{Blocks, NONE};
use crate::asm::{Assembler, Mem, RCX};
use crate::cache::{Cache, CacheError};
use crate::codegen::count::{self, KeyRegister};
use crate::fragment::Fragment;
use crate::transfers::indirect::{Indirect, SAVE_RCX};
use dynasour_guest::context::offset;

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

/// The number of words for loops that count by themselves ([`crate::codegen::loop_starts`]), until the cache is
/// flushed (guess: a word of each trace that races; later loops count in the race's own words).
pub(crate) const LOOP_WORDS: usize = 4096;

impl Blocks {
    /// See [`super::head_counters::Heads::new_loop_word`].
    pub(crate) fn new_loop_word(&mut self) -> Option<u64> {
        self.heads.new_loop_word()
    }

    /// See [`super::head_counters::Heads::loop_word`].
    pub(crate) fn read_loop_word(&self, address: u64) -> u64 {
        self.heads.loop_word(address)
    }

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

    /// Gives the block of `place` a gate, which counts the starts at which the register of `key` has
    /// its value, unless it has one already. False if there is no memory for words.
    pub(crate) fn gate(
        &mut self,
        place: u32,
        key: Option<KeyRegister>,
        (indirect, cache): (&Indirect, &mut Cache),
        fragments: &[Fragment],
    ) -> Result<bool, CacheError> {
        let gate = self.places[place as usize].made[2];
        if gate != NONE {
            if self.gate_keys.get(&gate) == Some(&key) {
                return Ok(true);
            }
            self.drop_gate(place, indirect, cache, fragments);
        }
        let words = [RaceWord::Floor, RaceWord::Twice, RaceWord::Second];
        let [Some(floor), Some(twice), Some(second)] = words.map(|w| self.race_word(w)) else {
            return Ok(false);
        };
        let (mut code, relative) = match key {
            None => each_start([floor, twice]),
            Some(key) => starts_of(key, [floor, twice, second]),
        };
        code.jmp();
        let field = code.len() - 4;
        let size = Key::of_gate(code.len());
        let front = Front { code, field, words: &relative, key: size, number: NO_COUNTER };
        let (_, index) = self.put_in_front(place, front, cache)?;
        self.places[place as usize].made[2] = index;
        self.gate_keys.insert(index, key);
        Ok(true)
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

/// Code that counts, and the ends of its fields that are relative to them, with the words that they lead
/// to.
type Counting = (Vec<u8>, Vec<(usize, u64)>);

/// Counts each execution. In a short loop each count waits for the one before, through the word, so the
/// second count of an execution goes through the same word, and adds nothing.
fn each_start([floor, twice]: [u64; 2]) -> Counting {
    let saved = offset::STUB_SAVE + 8 * SAVE_RCX;
    let mut relative = Vec::with_capacity(5);
    let mut code = Vec::with_capacity(64);
    code.store(RCX, saved);
    relative.extend(count::add(&mut code, 1).map(|field| (field + 4, floor)));
    code.mov_from(RCX, Mem::relative());
    relative.push((code.len(), twice));
    let mut again = Vec::with_capacity(18);
    let fields = count::add(&mut again, 0);
    code.jrcxz_over(i8::try_from(again.len()).expect("counting takes few bytes"));
    relative.extend(fields.map(|field| (code.len() + field + 4, floor)));
    code.extend(&again);
    code.load(RCX, saved);
    (code, relative)
}

/// Counts the executions at which the register of `key` has its value.
fn starts_of(key: KeyRegister, [floor, twice, second]: [u64; 3]) -> Counting {
    let saved = offset::STUB_SAVE + 8 * SAVE_RCX;
    let (counting, fields) = count::code_if(Some(key));
    let mut code = Vec::with_capacity(160);
    let mut relative = Vec::with_capacity(5);
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
    (code, relative)
}
