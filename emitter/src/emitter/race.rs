//! Races: a trace and the blocks that it replaces run by turns, and what both have done is counted.
//!
//! What is counted is *starts*: how often the guest comes to the trace's head or, if the trace is a
//! loop of an interpreted program, to the head at the loop's place in that program, which the value
//! of a register tells. The trace counts them at its entry and at the head of its loop, the blocks in
//! a gate ([`crate::blocks::gates`]). Before and after the race the trace does not count.
//!
//! ```text
//!                     ┌──► trace: entered + 1, looped + 1 …     lead_to
//! links to the head ──┤
//!                     └──► gate: floor + 1 ──► block            lead_to_floor
//! ```
//!
//! Data: [`RaceWord`]s, of which there is one set, so there is one race at a time; the places of the
//! counting code in the fragment. The caller holds the emitter.
//!
//! Example: in 4 ms of the thread's time the trace has counted 40,000 starts: 100 ns each. In the
//! next 4 ms the gate counts 32,000: 125 ns.

use crate::asm::Assembler;
use crate::blocks::gates::RaceWord;
use crate::codegen::Request;
use crate::codegen::count::Starts;
use crate::codegen::encoded::Encoded;
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{FragmentId, FragmentRole, LinkKind, StartCounts};
use dynasour_ir::Gpr;

/// What tells the start of an iteration: a register and its value.
pub type StartKey = (Gpr, u64);

impl Emitter {
    /// Lets the trace that is compiled for `request` count its starts. False if that cannot be done.
    pub fn count_starts(&self, request: &mut Request, key: Option<StartKey>) -> bool {
        let words = [RaceWord::Entered, RaceWord::Looped].map(|word| self.blocks.race_word(word));
        let ([Some(entered), Some(looped)], true) =
            (words, key.is_none_or(|(g, _)| can_tell_start(g)))
        else {
            return false;
        };
        let key = key.map(|(g, value)| (g.number() as u8, value));
        request.host.starts = Some(Starts { key, entered, looped });
        true
    }

    /// Makes the gate that counts the starts of the block at `pc`, unless there is one. False if
    /// there is no block, or if nothing can be counted.
    ///
    /// # Errors
    /// [`EmitError::is_full`] asks the caller to [`Emitter::flush_all`].
    pub fn make_gate(&mut self, pc: u64, key: Option<StartKey>) -> Result<bool, EmitError> {
        let Some((place, block)) = self.blocks.place_and_block(pc) else { return Ok(false) };
        if block == 0 || !key.is_none_or(|(g, _)| can_tell_start(g)) {
            return Ok(false);
        }
        if self.blocks.gate_of(place).is_some() {
            return Ok(true);
        }
        let key = key.map(|(g, value)| (g.number() as u8, value));
        Ok(self.blocks.gate(place, key, &mut self.cache)?.is_some())
    }

    /// Links to `pc` lead to the block there by way of its gate, which counts once or twice. False
    /// if there is no gate.
    pub fn lead_to_floor(&mut self, pc: u64, twice: bool) -> bool {
        let place = self.blocks.place_and_block(pc).map(|(place, _)| place);
        let Some((place, gate)) = place.and_then(|p| Some((p, self.blocks.gate_of(p)?))) else {
            return false;
        };
        self.blocks.write_race_word(RaceWord::Twice, u64::from(twice));
        self.lead_place(place, gate);
        true
    }

    /// The starts that the trace and the gate have counted together.
    pub fn starts(&self) -> u64 {
        let words = [RaceWord::Entered, RaceWord::Looped, RaceWord::Floor];
        words.into_iter().map(|word| self.blocks.read_race_word(word)).fold(0, u64::wrapping_add)
    }

    /// The code that counts the starts of a fragment whose code stands at `hot`.
    pub(crate) fn start_counts(&self, code: &Encoded, hot: u64) -> StartCounts {
        let piece = |&(at, len): &(u32, u32)| {
            let at = hot + u64::from(at);
            (at, self.cache.read(at, len as usize).into())
        };
        let pieces: Box<[_]> = code.starts.iter().map(piece).collect();
        StartCounts { is_counting: !pieces.is_empty(), pieces }
    }

    /// The trace counts its starts from now on, or does not any more. No thread executes it.
    pub fn let_count_starts(&mut self, fragment: FragmentId, counts: bool) {
        let Some(f) = self.fragments.get_mut(fragment.0 as usize) else { return };
        if f.starts.is_counting == counts || f.starts.pieces.is_empty() {
            return;
        }
        f.starts.is_counting = counts;
        for (at, code) in &f.starts.pieces {
            if counts {
                self.cache.write(*at, code);
            } else {
                let mut nothing = Vec::with_capacity(code.len());
                nothing.nop(code.len());
                self.cache.write(*at, &nothing);
            }
        }
        if counts {
            // It counts where it is entered in canonical state.
            let borrowed = self.links_into(&[fragment]).into_iter().filter_map(|(owner, link)| {
                let is_passage = matches!(self.fragment(owner)?.role, FragmentRole::Passage(_));
                match link.kind {
                    LinkKind::Borrowed(exit) if !is_passage => Some(exit),
                    _ => None,
                }
            });
            borrowed.for_each(|exit| self.unlink_borrowed(exit));
        }
    }
}

/// Can the code that counts compare this register of a key? It uses rcx itself, and rsp is no index.
pub fn can_tell_start(register: Gpr) -> bool {
    register != Gpr::RCX && register != Gpr::RSP
}
