//! Guest code that is not copied but executed where it stands.
//!
//! Then native code leaves to a guest pc by the *way out* of that pc: code of the runtime's that
//! goes on with the guest's own instruction. The block of a place is a jump there:
//!
//! ```text
//!   end of a trace, exit, checked entry ──► place: entry ──► block: jmp ──IN_PLACE──► way out
//! ```
//!
//! The guest enters a trace by a jump that the runtime has *patched* into its code. It leads to an
//! *entrance*, which is a link to the place of its pc. The instructions that the patch has replaced
//! are executed by the block of the place, which copies them and nothing else:
//!
//! ```text
//!   guest's code: jmp ──► entrance ──► place: entry ──┬──► fragment
//!                                                     └──► block: displaced instructions ──► behind
//! ```
//!
//! Where not the instructions of the pc are patched but a jump to it, its back edge, the entrance is
//! *beside*: the block is the jump to the way out.
//!
//! Data: [`InPlace`], part of [`Blocks`]. Invariant: a block among displaced instructions is never a
//! jump to its way out: that would lead back to the patch without executing anything, or into the
//! middle of it, which traps. It executes the displaced instructions from its pc on. The caller holds
//! the emitter.
//!
//! Example: a trace leaves to 0x1080. The first time it comes to the runtime; `copy(0x1080)` makes
//! the block `jmp <way out of 0x1080>`, and the exit leads there from now on.

use super::places::NONE;
use super::translate::Leads;
use super::{Blocks, Copied, Doomed};
use crate::cache::{Cache, CacheError};
use crate::error::EmitError;
use crate::fragment::Fragment;
use crate::transfers::indirect::{Indirect, Via};
use dynasour_guest::decode::Fetch;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::ops::Range;

/// Makes code in the low 4 GiB that goes on with the guest's own code at `pc` in canonical state, as
/// the way out of this number (they count up from 0), and returns its address; none if there is no
/// room.
pub type WayOut = fn(number: u32, pc: u64) -> Option<u32>;

/// See the module.
pub(super) struct InPlace {
    make: WayOut,
    /// The addresses of the ways out, by their pcs. They stay for good.
    ways_out: FxHashMap<u64, u32>,
    /// The end of the instructions that a patch has replaced, by the patch's pc. They do not overlap.
    displaced: BTreeMap<u64, u64>,
    /// The address of the entrance, by its pc.
    entrances: FxHashMap<u64, u64>,
    /// The address of the entrance beside displaced instructions, by its pc.
    beside: FxHashMap<u64, u64>,
}

impl InPlace {
    pub fn new(make: WayOut) -> InPlace {
        InPlace {
            make,
            ways_out: FxHashMap::default(),
            displaced: BTreeMap::new(),
            entrances: FxHashMap::default(),
            beside: FxHashMap::default(),
        }
    }

    /// The end of the displaced instructions that `pc` is among.
    fn displaced_until(&self, pc: u64) -> Option<u64> {
        let (_, end) = self.displaced.range(..=pc).next_back()?;
        Some(*end).filter(|end| pc < *end)
    }

    /// All code is dropped, and no patch is left.
    pub fn clear(&mut self) {
        self.displaced.clear();
        self.entrances.clear();
        self.beside.clear();
    }
}

impl Blocks {
    /// The way out of `pc`, if its block is to lead there instead of being copied. None in the
    /// inner option: there is no room for it.
    pub(super) fn way_out(&mut self, pc: u64) -> Option<Option<u32>> {
        let in_place = self.in_place.as_mut()?;
        if in_place.displaced_until(pc).is_some() {
            return None;
        }
        let InPlace { make, ways_out, .. } = in_place;
        let known = ways_out.get(&pc).copied();
        Some(known.or_else(|| {
            let made = make(ways_out.len() as u32, pc)?;
            ways_out.insert(pc, made);
            Some(made)
        }))
    }

    /// From the next [`Blocks::clear`] on blocks are copied.
    pub(crate) fn stop_in_place(&mut self) {
        self.in_place = None;
    }

    /// Where the block at `pc` ends if it executes instructions that a patch has replaced. No limit
    /// if there is no patch.
    pub(super) fn displaced_until(&self, pc: u64) -> u64 {
        let displaced = self.in_place.as_ref().and_then(|in_place| in_place.displaced_until(pc));
        displaced.unwrap_or(u64::MAX)
    }

    /// Makes a block at `pc` that leads to its way out.
    pub(super) fn lead_in_place(
        &mut self,
        pc: u64,
        way_out: u32,
        via: Option<Via>,
        want_block: bool,
        (indirect, cache, fragments): (&mut Indirect, &mut Cache, &[Fragment]),
    ) -> Result<Copied, EmitError> {
        let place = self.place(pc);
        self.places[place as usize].way_out = way_out;
        self.translator.begin(pc, indirect, via, None);
        self.translator.exit(Leads::InPlace(pc));
        let start = self.emit(pc, via, cache)?;
        let prefix = self.translator.out.prefix;
        let offset = (start - self.base) as u32;
        let p = &mut self.places[place as usize];
        p.prefix = if prefix == 0 { 0 } else { offset };
        self.give(place, offset + prefix, cache, fragments);
        let p = &self.places[place as usize];
        let entry = if want_block { p.block } else { p.entry };
        Ok(Copied::Entry(self.base + u64::from(entry)))
    }

    /// The address to which a patch at `pc` is to jump that replaces the instructions up to `end`.
    /// From now on the block of `pc` executes these. None if they cannot be copied.
    ///
    /// # Errors
    /// The cache is full.
    pub(crate) fn entrance(
        &mut self,
        (pc, end): (u64, u64),
        code: &dyn Fetch,
        indirect: &mut Indirect,
        cache: &mut Cache,
        fragments: &[Fragment],
    ) -> Result<Option<u64>, EmitError> {
        let Some(in_place) = &mut self.in_place else { return Ok(None) };
        if let Some(known) = in_place.entrances.get(&pc) {
            return Ok(Some(*known));
        }
        in_place.displaced.insert(pc, end);
        for inside in pc..end {
            // It leads in place, into what is displaced from now on.
            self.drop_block(inside, indirect, cache, fragments);
        }
        let made = self.make_entrance(pc, code, indirect, cache, fragments);
        match (&made, &mut self.in_place) {
            (Ok(Some(entrance)), Some(in_place)) => drop(in_place.entrances.insert(pc, *entrance)),
            _ => self.not_displaced(|displaced| displaced.start == pc),
        }
        made
    }

    /// The address to which a jump of the guest's to `pc` is to lead, so that the guest comes to
    /// whatever links to `pc` lead to. No instruction is replaced. None if there is no room.
    ///
    /// # Errors
    /// The cache is full.
    pub(crate) fn entrance_beside(
        &mut self,
        pc: u64,
        code: &dyn Fetch,
        indirect: &mut Indirect,
        cache: &mut Cache,
        fragments: &[Fragment],
    ) -> Result<Option<u64>, EmitError> {
        let Some(in_place) = &self.in_place else { return Ok(None) };
        if let Some(known) = in_place.beside.get(&pc) {
            return Ok(Some(*known));
        }
        let made = self.make_entrance(pc, code, indirect, cache, fragments)?;
        if let Some(in_place) = &mut self.in_place {
            in_place.beside.extend(made.map(|entrance| (pc, entrance)));
        }
        Ok(made)
    }

    /// Code that jumps wherever links to `pc` lead, where there is a block from now on. None if that cannot
    /// be made.
    fn make_entrance(
        &mut self,
        pc: u64,
        code: &dyn Fetch,
        indirect: &mut Indirect,
        cache: &mut Cache,
        fragments: &[Fragment],
    ) -> Result<Option<u64>, EmitError> {
        match self.copied(pc, true, code, indirect, cache, fragments)? {
            Copied::Entry(_) => Ok(Some(self.jump_to_place(pc, indirect, cache)?)),
            Copied::Instruction | Copied::Writable => Ok(None),
        }
    }

    /// The patches are gone of whose displaced instructions `gone` is true.
    pub(super) fn not_displaced(&mut self, gone: impl Fn(&Range<u64>) -> bool) {
        let Some(InPlace { displaced, entrances, .. }) = &mut self.in_place else { return };
        displaced.retain(|pc, end| !gone(&(*pc..*end)));
        entrances.retain(|pc, _| displaced.contains_key(pc));
    }

    /// Code that jumps wherever links to `pc` lead.
    fn jump_to_place(
        &mut self,
        pc: u64,
        indirect: &Indirect,
        cache: &mut Cache,
    ) -> Result<u64, CacheError> {
        self.translator.begin(pc, indirect, None, None);
        self.translator.exit(Leads::To(pc));
        let (start, _) = self.emit_apart(pc, None, cache)?;
        Ok(start)
    }

    /// Drops the block at `pc`, if there is one. Its memory is used again later, as that of a stale
    /// one.
    fn drop_block(
        &mut self,
        pc: u64,
        indirect: &mut Indirect,
        cache: &Cache,
        fragments: &[Fragment],
    ) {
        let Some(&place) = self.by_pc.get(&pc) else { return };
        if self.places[place as usize].made[0] == NONE {
            return;
        }
        let mut stale = self.stale.take().unwrap_or_else(|| Doomed::new(self.generation));
        self.forget_pages(self.places[place as usize].made[0]);
        self.remove_place(place, &mut stale, indirect, cache, fragments);
        self.stale = Some(stale);
    }
}
