//! Races: a trace and the blocks that it replaces run by turns, and what both have done is counted.
//!
//! What is counted is *starts*: how often the guest comes to the trace's head or, if the trace is a
//! loop of an interpreted program, to the head at the loop's place in that program, if the value of a
//! register tells that; otherwise an iteration counts as often as its path passes the head. The trace
//! counts them at its entry, at the head of its loop and, if it is of a recursive function, on its way
//! ([`crate::codegen::passes`]), the blocks in a gate
//! ([`crate::blocks::gates`]), which stands at the head or *apart*, at another pc that the guest comes
//! to once for each start. Before and after the race the trace does not count.
//!
//! ```text
//!                     ┌──► trace: entered + 1, looped + 1 …
//! links to the head ──┤
//!                     └──► gate: floor + 1 ──► block            lead_to_gate
//! ```
//!
//! Data: [`RaceWord`]s, of which each thread has one set, so there is one race at a time; the places of the
//! counting code in the fragment; for short loops a word of the trace's own in each thread
//! ([`crate::codegen::loop_starts`]), which counts for as long as the trace lives. The caller holds the
//! emitter.
//!
//! Other threads may execute what counts, and what begins or ends to count: each piece of the trace that
//! counts begins with a short jump, which leads over it or to its next instruction, and only the jump's
//! distance is ever written.
//!
//! Example: in 4 ms of the thread's time the trace has counted 40,000 starts: 100 ns each. In the
//! next 4 ms the gate counts 32,000: 125 ns.

use crate::cache::writer;
use crate::codegen::Request;
use crate::codegen::count::{RaceWord, Starts};
use crate::codegen::encoded::Encoded;
use crate::emitter::{EmitError, Emitter};
use crate::fragment::{FragmentId, FragmentRole, LinkKind, StartCounts};
use dynasour_guest::ThreadContext;
use dynasour_ir::Gpr;
use std::sync::atomic::Ordering;

/// Bytes of the short jump at the beginning of what counts.
const SHORT_JUMP_LEN: u32 = 2;

/// What tells the start of an iteration: a register and its value.
pub type StartKey = (Gpr, u64);

impl Emitter {
    /// Lets the trace that is compiled for `request` count its starts, `each` for each iteration of its
    /// loop. With `own` the loop counts in a word of its own, if it is a short one. False if that cannot be
    /// done.
    pub fn count_starts(
        &mut self,
        request: &mut Request,
        key: Option<StartKey>,
        each: i32,
        own: bool,
    ) -> bool {
        if !key.is_none_or(|(g, _)| can_tell_start(g)) {
            return false;
        }
        let key = key.map(|(g, value)| (g.number() as u8, value));
        let own = if own { self.blocks.heads.new_loop_word() } else { None };
        request.host.starts = Some(Starts { key, each, own });
        true
    }

    /// Makes the gate that counts the starts of the block at `pc`. False if there is no block, or if
    /// nothing can be counted.
    ///
    /// # Errors
    /// [`EmitError::is_full`] asks the caller to [`Emitter::flush_all`].
    pub fn make_gate(&mut self, pc: u64, key: Option<StartKey>) -> Result<bool, EmitError> {
        let Some((place, block)) = self.blocks.place_and_block(pc) else { return Ok(false) };
        if block == 0 || !key.is_none_or(|(g, _)| can_tell_start(g)) {
            return Ok(false);
        }
        let key = key.map(|(g, value)| (g.number() as u8, value));
        let code = (&self.indirect, &mut self.cache);
        self.blocks.gate(place, key, code, &self.fragments)?;
        Ok(true)
    }

    /// Links to `pc` lead to the block there by way of its gate, if it has one, which counts once, or on
    /// this thread twice.
    pub fn lead_to_gate(&mut self, pc: u64, context: &ThreadContext, twice: bool) {
        RaceWord::Twice.of(context).store(u64::from(twice), Ordering::Relaxed);
        if let Some((place, _)) = self.blocks.place_and_block(pc)
            && let Some(gate) = self.blocks.gate_of(place)
        {
            self.lead_place(place, gate);
        }
    }

    /// The starts that this trace and the gate have counted together on this thread, which executes
    /// neither.
    pub fn starts(&self, trace: FragmentId, context: &ThreadContext) -> u64 {
        let words = [RaceWord::Entered, RaceWord::Looped, RaceWord::Floor];
        let own = self.fragment(trace).and_then(|f| f.starts.own_word);
        words
            .map(|word| word.of(context))
            .into_iter()
            .chain(own.and_then(|word| context.loop_starts.get(word as usize)))
            .fold(0, |sum, word| sum.wrapping_add(word.load(Ordering::Relaxed)))
    }

    /// What counts the starts of a fragment whose code stands at `hot`.
    pub(crate) fn start_counts(
        &self,
        code: &Encoded,
        hot: u64,
        own_word: Option<u32>,
    ) -> StartCounts {
        let pieces: Box<[_]> =
            code.starts.iter().map(|&(at, len)| (hot + u64::from(at), len)).collect();
        StartCounts { is_counting: !pieces.is_empty(), own_word, pieces }
    }

    /// The trace counts its starts from now on, or does not any more.
    pub fn let_count_starts(&mut self, fragment: FragmentId, counts: bool) {
        let Some(f) = self.fragments.get_mut(fragment.0 as usize) else { return };
        if f.starts.is_counting == counts || f.starts.pieces.is_empty() {
            return;
        }
        f.starts.is_counting = counts;
        for &(at, len) in &f.starts.pieces {
            let distance = if counts { 0 } else { len - SHORT_JUMP_LEN };
            writer::set_distance(&self.cache, at, distance as u8);
        }
        if counts {
            // It counts where it is entered in canonical state.
            let entry = f.entry;
            let borrowed = self.links_into(&[fragment]).into_iter().filter_map(|(owner, link)| {
                let is_passage = matches!(self.fragment(owner)?.role, FragmentRole::Passage(_));
                match link.kind {
                    LinkKind::Borrowed(exit) if !is_passage => Some(exit),
                    _ => None,
                }
            });
            for exit in borrowed {
                self.unlink_borrowed(exit);
                if let Some((e, link)) = self.exit(exit).zip(self.link_of(exit))
                    && link.target() == link.out
                {
                    self.set_link(e.fragment, link, entry);
                }
            }
        }
    }
}

/// Can the code that counts compare this register of a key? It uses rcx itself, and rsp is no index.
pub fn can_tell_start(register: Gpr) -> bool {
    register != Gpr::RCX && register != Gpr::RSP
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codegen;
    use crate::codegen::mach::SiteKind;
    use crate::emitter::{Config, EntryState};
    use crate::fragment::ExitId;
    use crate::fragment::counting::Destination;
    use dynasour_guest::decode::Bytes;
    use dynasour_ir::Version;
    use dynasour_ir::text::version;

    /// A trace at `pc` that borrows registers and ends at `target`.
    fn trace(pc: u64, target: u64) -> Version {
        let sums: String =
            (0..10).map(|i| format!("v{} = mul.i64 v{}, v1\n", i + 3, i + 2)).collect();
        let all: String =
            (0..10).map(|i| format!("v{} = xor.i64 v{}, v{}\n", i + 20, i + 19, i + 3)).collect();
        let text = format!(
            "region {pc:#x} {{ version t1 {{
    anchor a0 = base.{target:#x} [rax = v29]
    b0(v0: i64 = rax, v1: i64 = rdx):
      v2 = add.i64 v0, v1
      {sums}
      v19 = add.i64 v12, 1
      {all}
      exit a0
  }} }}"
        );
        version(&text).expect("a version")
    }

    fn place(emitter: &mut Emitter, version: &Version, counts: bool) -> FragmentId {
        let mut request =
            emitter.request(version.region, EntryState::Canonical).expect("a request");
        assert!(!counts || emitter.count_starts(&mut request, None, 1, true));
        let code = codegen::compile(version, &request, &mut Default::default()).expect("code");
        emitter.place(&request, code).expect("room")
    }

    /// A trace that counts is entered in canonical state, so that nothing comes in uncounted; an end
    /// that was linked stays linked when counting begins and ends.
    #[test]
    fn ends_stay_linked_to_what_counts() {
        let config = Config { cache_size: 1 << 20, ..Config::default() };
        let mut emitter = Emitter::new(config).expect("memory");
        let first = place(&mut emitter, &trace(0x1000, 0x2000), false);
        let second = place(&mut emitter, &trace(0x2000, 0x3000), true);
        let mut exits = emitter.fragments[first.0 as usize].exits.clone().map(ExitId);
        let end =
            exits.find(|e| emitter.exits[e.0 as usize].kind == SiteKind::End).expect("an end");
        let is_borrowed = |e: &Emitter| {
            e.borrowed_link(end).expect("it borrows").target() != e.borrowed_link(end).unwrap().out
        };
        emitter.link(end, second).expect("both are there");
        let leads = Destination::Fragment(second);
        assert_eq!((emitter.destination(end), is_borrowed(&emitter)), (leads, false), "it counts");
        emitter.let_count_starts(second, false);
        emitter.unlink(end).expect("an exit");
        emitter.link(end, second).expect("both are there");
        assert_eq!((emitter.destination(end), is_borrowed(&emitter)), (leads, true));
        emitter.let_count_starts(second, true);
        assert_eq!((emitter.destination(end), is_borrowed(&emitter)), (leads, false), "again");
    }

    /// A head races again with a trace of another loop: what tells a start may be another value.
    #[test]
    fn a_gate_counts_what_is_asked_for_last() {
        let config = Config { cache_size: 1 << 20, ..Config::default() };
        let mut emitter = Emitter::new(config).expect("memory");
        let pc = 0x1000;
        let code = [0x90, 0xeb, 0xfd];
        let copied = emitter.copy_block(pc, &Bytes { start: pc, bytes: &code });
        assert!(copied.is_ok());
        let context = ThreadContext::new();
        let mut gate = |key| {
            assert!(emitter.make_gate(pc, key).expect("room"));
            emitter.lead_to_gate(pc, &context, false);
            assert_eq!(emitter.verify_links_and_tables(), Ok(()));
            let place = emitter.blocks.place_and_block(pc).expect("a block").0;
            let gate = emitter.blocks.gate_of(place).expect("a gate");
            assert_eq!(emitter.blocks.places[place as usize].entry, gate, "links lead there");
            gate
        };
        let (any, one) = (gate(None), gate(Some((Gpr::RSI, 0x1234))));
        assert_ne!(any, one);
        assert_eq!(gate(Some((Gpr::RSI, 0x1234))), one, "it is used again");
        assert_ne!(gate(Some((Gpr::RSI, 0x1235))), one);
    }
}
