//! Places and links: which copied blocks, checked entries and ends of traces lead to a guest pc.
//!
//! A *place* is a guest pc that some link leads to or that some code starts at. It knows its block,
//! where links to it lead now (to a fragment, to a head's counter, or to the block), and the list
//! of all links to it, so that they can be led elsewhere at once. A link is a member of exactly one
//! list, that of its place. A link that leads where `next_pc` says ([`ANYWHERE`]) is in no list.
//! With [`BODY`] a link leads to the place's block, whatever the place's entry is. With [`IN_PLACE`]
//! it leads to the place's way out ([`super::in_place`]). With [`FOREIGN`] it is a fragment's link;
//! the fragment keeps its target, too.
//!
//! ```text
//! link of a block ──┐                       ┌──► fragment          (the region's first version)
//! checked entry  ───┼──► place: entry ──────┼──► counter ──BODY──► block
//! end of a trace ───┘    (list of links)    └──► block
//! counter, stub of an exit without progress ──BODY───────────────► block
//! ```
//!
//! Data: [`Place`] and [`Link`], in arrays that grow by some words a block; no memory is allocated
//! for a single one. Invariants: a link's jump leads to its place's entry (or block); it leads to
//! its own stub while there is none or its owner is unlinked. A place is freed when it has no
//! block, no entry, and no link. The caller holds the emitter; [`Blocks::unlink`] is
//! async-signal-safe.
//!
//! Example: blocks A and B end with jumps to 0x2000, which has no block yet: both links lead to
//! their stubs and are in the list of the place. The block of 0x2000 is copied: [`Blocks::give`]
//! walks the list and leads both there. A trace is made of it: [`Blocks::lead`] leads both to the
//! trace.

use super::Blocks;
use crate::cache::{Cache, writer};
use crate::codegen::piece;
use crate::fragment::{Fragment, set_target};
use crate::transfers::indirect::{Indirect, Via};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// No link, place or block.
pub(crate) const NONE: u32 = u32::MAX;
/// The place of links that go where `next_pc` says.
pub(crate) const ANYWHERE: u32 = u32::MAX;
/// In [`Link::out`]: the link belongs to a return through the stack, which has no carrier.
pub(crate) const RETURN: u32 = Via::COUNT as u32;
/// A bit of [`Link::place`]: the link leads to the place's block, whatever the place's entry is.
pub(crate) const BODY: u32 = 1 << 30;
/// A bit of [`Link::place`]: the link is a fragment's, and the fragment keeps its target, too.
pub(crate) const FOREIGN: u32 = 1 << 29;
/// A bit of [`Link::place`]: the link leads to the guest's own code at the place's pc.
pub(crate) const IN_PLACE: u32 = 1 << 28;
/// The bits of [`Link::place`] that are the number of the place.
pub(crate) const PLACE: u32 = IN_PLACE - 1;

/// A guest pc with the code that stands for it.
pub(crate) struct Place {
    pub(crate) pc: u64,
    /// Offset of its block in the cache, 0 if there is none.
    pub(crate) block: u32,
    /// Where jumps to it lead: an offset in the cache, 0 if nowhere.
    pub(crate) entry: u32,
    /// The first of the links that lead to it.
    pub(crate) links: u32,
    /// Offset of the checked entry that its block begins with, 0 if there is none.
    pub(crate) prefix: u32,
    /// The carriers whose tables hold the pc: bit [`Via::index`] each.
    pub(crate) registered: u32,
    /// The carrier for which its block should begin with a checked entry.
    pub(crate) expected: Option<Via>,
    /// Is it a trace head ([`super::head_counters`])?
    pub(crate) is_head: bool,
    /// Was it found by a call?
    pub(crate) is_called: bool,
    /// The indices of its block, of its head's counter, and of its gate, [`NONE`] if there is none.
    pub(crate) made: [u32; 3],
    /// Has it checked entries that belong to no block?
    pub(crate) has_checks: bool,
    /// The address of its way out, 0 if it has none ([`super::in_place`]).
    pub(crate) way_out: u32,
}

/// A patchable jump.
pub(crate) struct Link {
    /// Offset of its rel32 field.
    pub(crate) field: u32,
    /// Offset of its stub. If the place is [`ANYWHERE`]: [`Via::index`], or [`RETURN`].
    pub(crate) out: u32,
    /// Its place, perhaps with [`BODY`] and [`FOREIGN`]; or [`ANYWHERE`].
    pub(crate) place: u32,
    /// The next link to the same place.
    pub(crate) next: u32,
    /// The link before it in the list, [`NONE`] if it is the first.
    pub(crate) before: u32,
}

impl Link {
    pub(crate) fn new(field: u32, out: u32, place: u32) -> Link {
        Link { field, out, place, next: NONE, before: NONE }
    }
}

/// The operands of tails' jumps: how they lead on, and how they lead out.
pub(crate) struct Ways {
    /// The table of each carrier, if it lies within reach.
    pub(crate) tables: [Option<u32>; Via::COUNT],
    /// Bit [`Via::index`]: the table is filled.
    pub(crate) in_use: u32,
    /// The table that leads out of tails that use memory, if that is within reach.
    pub(crate) out: Option<u32>,
    /// The addresses to which a tail that uses memory leads if there is no table within reach: to
    /// go on, and to lead out.
    pub(crate) direct: [u64; 2],
    /// The instruction of a return that looks the landing up, and the instruction that leads out
    /// instead.
    pub(crate) returns: Option<[[u8; 8]; 2]>,
    /// The stubs to which tails of registers lead while their tables are not in use, and to lead
    /// out.
    pub(crate) asks: [u64; 16],
}

/// The new contents of a link's jump.
pub(crate) enum Patched {
    /// The same instruction with this field.
    Field(u32),
    /// This instruction of eight aligned bytes, whose field comes last.
    Instruction([u8; 8]),
}

impl Blocks {
    /// The place of a guest pc, made now if need be.
    pub(crate) fn place(&mut self, pc: u64) -> u32 {
        *self.by_pc.entry(pc).or_insert_with(|| {
            let place = Place {
                pc,
                block: 0,
                entry: 0,
                links: NONE,
                prefix: 0,
                registered: 0,
                expected: None,
                is_head: false,
                is_called: false,
                made: [NONE; 3],
                has_checks: false,
                way_out: 0,
            };
            self.free.put_place(&mut self.places, place)
        })
    }

    /// Makes `number` one of the links that lead to its place.
    pub(crate) fn join(&mut self, number: u32) {
        let place = &mut self.places[(self.links[number as usize].place & PLACE) as usize];
        let next = std::mem::replace(&mut place.links, number);
        self.links[number as usize].next = next;
        if let Some(next) = self.links.get_mut(next as usize) {
            next.before = number;
        }
    }

    /// The link of a fragment's jump at this offset in the list of its place, if it is there.
    pub(crate) fn foreign_link(&self, place: u32, field: u32) -> Option<u32> {
        let next = |number: u32| Some(self.links.get(number as usize)?.next);
        let first = self.places[(place & PLACE) as usize].links;
        let mut all = std::iter::successors(Some(first), |number| next(*number))
            .take_while(|number| *number != NONE);
        all.find(|number| self.links[*number as usize].field == field)
    }

    /// Where a link to a place leads while its owner is linked.
    pub(crate) fn target(&self, link: &Link) -> u64 {
        let place = &self.places[(link.place & PLACE) as usize];
        if link.place & IN_PLACE != 0 {
            return u64::from(place.way_out);
        }
        match if link.place & BODY != 0 { place.block } else { place.entry } {
            0 => self.out(link),
            entry => self.base + u64::from(entry),
        }
    }

    /// The stub by which a link leads out.
    pub(crate) fn out(&self, link: &Link) -> u64 {
        self.base + u64::from(link.out)
    }

    /// The contents of a link's jump that leads to its target, or `out`.
    pub(crate) fn patched(&self, link: &Link, out: bool) -> Patched {
        let behind = self.base + u64::from(link.field) + 4;
        let relative = |target: u64| target.wrapping_sub(behind) as u32;
        if link.place != ANYWHERE {
            return Patched::Field(relative(if out { self.out(link) } else { self.target(link) }));
        }
        let Ways { tables, in_use, out: out_table, direct, asks, returns } = &self.ways;
        let Some(via) = Via::from_index(link.out as usize) else {
            // Without returns through the stack no block has such a link: `int3`.
            return Patched::Instruction(
                returns.map_or([0xcc; 8], |looks| looks[usize::from(out)]),
            );
        };
        match (via, tables[via.index()]) {
            (Via::Register(r), Some(table)) => {
                Patched::Instruction(match in_use >> link.out & 1 != 0 && !out {
                    true => piece::through(r, table),
                    false => piece::directly(relative(asks[usize::from(r)])),
                })
            }
            (_, Some(table)) => Patched::Field(out_table.filter(|_| out).unwrap_or(table)),
            (_, None) => Patched::Field(relative(direct[usize::from(out)])),
        }
    }

    /// Writes a link's jump, to lead out or to its target.
    pub(crate) fn set(&self, link: &Link, out: bool, cache: &Cache) {
        let field = self.base + u64::from(link.field);
        match self.patched(link, out) {
            Patched::Field(value) => writer::set_field(cache, field, value),
            Patched::Instruction(bytes) => writer::replace(cache, field - 4, bytes),
        }
    }

    /// Tails of this carrier go through its table from now on. The table is filled.
    pub(crate) fn use_table(&mut self, via: Via, cache: &Cache) {
        self.ways.in_use |= 1 << via.index();
        for link in self
            .links
            .iter()
            .filter(|link| link.place == ANYWHERE && link.out as usize == via.index())
        {
            if self.owner_is_linked(self.base + u64::from(link.field)) {
                self.set(link, false, cache);
            }
        }
    }

    pub(crate) fn links_of(&self, block: u32) -> Range<usize> {
        self.blocks.get(block as usize).map_or(0..0, |b| {
            let first = b.first_link as usize;
            first..first + usize::from(b.links)
        })
    }

    /// Makes all links to a place lead to `entry`, an offset in the cache, 0 for nowhere.
    pub(crate) fn lead(&mut self, place: u32, entry: u32, cache: &Cache, fragments: &[Fragment]) {
        let p = &mut self.places[place as usize];
        p.entry = entry;
        if p.registered != 0 && p.prefix != 0 {
            self.moved.push(place);
        }
        let mut next = self.places[place as usize].links;
        let all_linked = self.unlinked.load(Ordering::Relaxed) == 0;
        while let Some(link) = self.links.get(next as usize) {
            let field = self.base + u64::from(link.field);
            if link.place & FOREIGN != 0 {
                set_target(fragments, field, self.target(link), cache);
            } else if all_linked || self.owner_is_linked(field) {
                self.set(link, false, cache);
            }
            self.figures.links += u64::from(entry != 0);
            next = link.next;
        }
    }

    /// Is the block that a field belongs to linked?
    pub(crate) fn owner_is_linked(&self, field: u64) -> bool {
        self.at(field)
            .is_none_or(|owner| self.blocks[owner as usize].unlinked.load(Ordering::Relaxed) == 0)
    }

    pub(crate) fn unlink(&self, block: u32, indirect: &Indirect, cache: &Cache) {
        if let Some(b) = self.blocks.get(block as usize) {
            b.unlinked.fetch_add(1, Ordering::Relaxed);
            self.unlinked.fetch_add(1, Ordering::Relaxed);
            for link in &self.links[self.links_of(block)] {
                if link.place == ANYWHERE && link.out as usize == Via::Memory.index() {
                    indirect.prepare_out();
                }
                self.set(link, true, cache);
            }
        }
    }

    /// Makes threads in any block leave at its end. This is not undone.
    pub(crate) fn unlink_all(&self, indirect: &Indirect, cache: &Cache) {
        (0..self.blocks.len() as u32).for_each(|block| self.unlink(block, indirect, cache));
    }

    /// Gives a place its block, which is at this offset, and leads the links there.
    pub(crate) fn give(&mut self, place: u32, block: u32, cache: &Cache, fragments: &[Fragment]) {
        let p = &mut self.places[place as usize];
        p.block = block;
        let entry = match p.entry {
            0 => {
                if p.is_head && self.heads.are_counted() {
                    self.heads.found.push(place);
                }
                block
            }
            // There was another block before.
            entry => entry,
        };
        self.lead(place, entry, cache, fragments);
    }

    /// Takes a link away from its place.
    pub(crate) fn part(&mut self, number: u32) {
        let link = &mut self.links[number as usize];
        if link.place == ANYWHERE {
            return;
        }
        let (place, next, before) = (link.place & PLACE, link.next, link.before);
        (link.next, link.before) = (NONE, NONE);
        if let Some(next) = self.links.get_mut(next as usize) {
            next.before = before;
        }
        match self.links.get_mut(before as usize) {
            Some(before) => before.next = next,
            None => self.places[place as usize].links = next,
        }
    }

    /// Frees a place that has no block and no entry, and that no link leads to.
    pub(crate) fn drop_place(&mut self, place: u32) {
        let p = &self.places[place as usize];
        if p.block == 0 && p.entry == 0 && p.links == NONE && self.by_pc.get(&p.pc) == Some(&place)
        {
            self.by_pc.remove(&p.pc);
            self.free.places.push(place);
        }
    }
}
