//! The copy tier: guest blocks as native code without IR (DESIGN section 6).
//!
//! A *block* is the copy of one stretch of guest code with one entry, in canonical state at both ends. A *place* is a
//! guest pc that some link leads to or that something starts at: it knows its block, where jumps to it lead now, and all
//! links to it. A *link* is the rel32 field of an exit's jump, and the stub in cold memory that it leads to while the place
//! has nothing to lead to: the stub leaves and says which link it was.
//!
//! All of it is in arrays that grow by some words a block; nothing is allocated per block. Invariants:
//! * a link's field leads to its place's entry, or to its own stub if there is none or a signal wants out;
//! * blocks ascend by host address, those that are gone ([`remove`]) among them;
//! * nothing says which guest instruction a host instruction belongs to: translating again does ([`fault_state`]).
//!
//! Example: `test rdi, rdi; je 0x1010; call 0x2000` at 0x1000 becomes two blocks,
//!
//! ```text
//! test rdi, rdi              push 0x100a
//! je   <link 0: 0x1010>      jmp <link 2: 0x2000>
//! jmp  <link 1: 0x1005>
//! ```
//!
//! and link 1 leads to the second block as soon as there is one.

mod checked_entries;
mod compared;
mod fault_state;
mod gs_operands;
mod heads;
mod plain;
mod remove;
mod returns;
mod stubs;
mod transfer;
mod translate;
mod translation;
mod word_jumps;

use crate::asm::Assembler;
use crate::cache::{Cache, CacheError};
use crate::codegen::loop_alignment;
use crate::codegen::piece;
use crate::cpu::Cpu;
use crate::emitter::{EmitError, Emitter, EntryPoint, Left};
use crate::fragment::Fragment;
use crate::indirect::{Indirect, Via};
use crate::returns::Returns;
use crate::stubs::{StubError, Stubs};
use checked_entries::Check;
use dynasour_guest::ThreadContext;
use dynasour_guest::context::offset;
use dynasour_guest::decode::{Fetch, Watched};
use heads::Heads;
pub use heads::{Count, Counted, CounterId, HeadCounts};
pub use remove::Doomed;
use remove::{Free, Key, Pages};
use returns::{Landings, Wanted};
use rustc_hash::{FxBuildHasher, FxHashMap};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use stubs::CopyStubs;
pub(crate) use stubs::{FAULT, FIRST_COUNTER, FIRST_LINK, LOADED, STALE};
use translate::{Leads, Referent, Translator};
use word_jumps::Word;

/// No link, place or block.
const NONE: u32 = u32::MAX;
/// The place of links that go where `next_pc` says.
const ANYWHERE: u32 = u32::MAX;
/// What stands for [`Via::index`] in those of returns by the stack.
const RETURN: u32 = Via::COUNT as u32;
/// With a link's place: it leads to the block there, whatever the place's entry.
const BODY: u32 = 1 << 30;
/// With a link's place: it is a fragment's, which has to know where it leads.
const FOREIGN: u32 = 1 << 29;
/// The place of a link, without these.
const PLACE: u32 = FOREIGN - 1;
/// So many times everything has been dropped when blocks become shorter.
const OFTEN: u32 = 4;
/// Room for a block in so many bytes of the cache is there from the start: untouched it costs nothing, while growing copies.
const BYTES_PER_BLOCK: usize = 2 << 10;
/// Of blocks: at least eight, so that fields lie as they were padded. At more than sixteen hardly anything is faster.
const ALIGNMENT: usize = 16;
/// Bytes of a link's stub: `mov qword gs:[exit_site], imm32; jmp leave`.
const STUB: usize = 18;

/// Identifies a block, until the next flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockId(pub u32);

/// Identifies a block's exit, until the next flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkId(pub u32);

/// What [`Emitter::copy`] finds at a guest pc.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copied {
    /// Code to enter.
    Entry(u64),
    /// An instruction that cannot be copied: the interpreter's.
    Instruction,
    /// Code that keeps changing: the interpreter's.
    Writable,
}

/// A guest pc.
struct Place {
    pc: u64,
    /// Offset of its block in the cache, 0 if there is none.
    block: u32,
    /// Where jumps to it lead: an offset in the cache, 0 if nowhere.
    entry: u32,
    /// The first of the links that lead to it.
    links: u32,
    /// Offset of the checked entry that its block begins with, 0 if there is none.
    prefix: u32,
    /// The carriers ([`Via::index`]) by which indirect transfers find it: a bit each.
    registered: u32,
    /// The carrier for which its block should begin with a checked entry.
    expected: Option<Via>,
    /// See [`heads`].
    is_head: bool,
    /// It was found by a call.
    is_called: bool,
    /// The indices of its block and of its head's counter, [`NONE`] if there is none.
    made: [u32; 2],
    /// Are there checked entries of its own that belong to no block?
    has_checks: bool,
}

/// A patchable jump.
struct Link {
    /// Offset of its rel32 field.
    field: u32,
    /// Offset of its stub; of one that goes anywhere, [`Via::index`].
    out: u32,
    /// Its place, perhaps with [`BODY`] and [`FOREIGN`]; or [`ANYWHERE`].
    place: u32,
    /// The next link to the same place.
    next: u32,
    /// The one before it, [`NONE`] if it is the first.
    before: u32,
}

impl Link {
    fn new(field: u32, out: u32, place: u32) -> Link {
        Link { field, out, place, next: NONE, before: NONE }
    }
}

/// A copied block, or a counter before one.
struct Block {
    pc: u64,
    /// Offset in the cache.
    start: u32,
    len: u16,
    /// Bytes of the checked entry that it begins with.
    prefix: u8,
    /// [`Via::index`] of that.
    via: u8,
    /// How many links it has, and the first.
    links: u8,
    first_link: u32,
    /// Offset of its cold memory.
    cold: u32,
    /// Its number among the counters, [`NONE`] if it is none.
    counter: u32,
    place: u32,
    /// The first of its nodes in [`Pages`].
    node: u32,
    landings: Landings,
    /// What it takes.
    key: Key,
    /// How many have unlinked it and not linked it again; while it is not 0 its links lead out.
    unlinked: AtomicU32,
}

/// Figures about the copy tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CopyFigures {
    /// Blocks translated since the start.
    pub blocks: u64,
    /// The guest's basic blocks that they go on through: those that end at a conditional branch or a jump count, too.
    pub basic_blocks: u64,
    /// Guest instructions in them.
    pub instructions: u64,
    /// Bytes of code made from them, stubs included.
    pub bytes: u64,
    /// Links made lead to a block.
    pub links: u64,
}

/// What tails hold.
struct Ways {
    /// For each carrier, if it has a table within reach.
    tables: [Option<u32>; Via::COUNT],
    /// Bit [`Via::index`]: the table is filled.
    in_use: u32,
    /// The table that leads out of tails that use memory, if that is within reach.
    out: Option<u32>,
    /// Where such a tail leads without tables, and to lead out.
    direct: [u64; 2],
    /// What finds landings, and leads out instead.
    returns: Option<[[u8; 8]; 2]>,
    /// Where tails of registers lead while their tables are not in use, and to lead out.
    asks: [u64; 16],
}

/// What the last instruction of a link's jump is to be.
enum Patched {
    /// The same with this in its field.
    Field(u32),
    /// This one, of eight aligned bytes, with the field last.
    Instruction([u8; 8]),
}

/// Blocks, places and links.
pub(crate) struct Blocks {
    translator: Translator,
    stubs: CopyStubs,
    base: u64,
    leave: u64,
    ways: Ways,
    blocks: Vec<Block>,
    places: Vec<Place>,
    by_pc: FxHashMap<u64, u32>,
    links: Vec<Link>,
    /// Checked entries that belong to no block, ascending.
    checks: Vec<Check>,
    /// The offset of a place's checked entry for a carrier that belongs to no block.
    apart: FxHashMap<(u32, Via), u32>,
    /// Places whose entry is not what indirect transfers find.
    moved: Vec<u32>,
    /// What was made from which guest pages.
    pages: Pages,
    /// What is free to be used again.
    free: Free,
    /// The guest bytes of blocks that compare them.
    own: FxHashMap<u32, Box<[u8]>>,
    /// How often such bytes have changed, by the guest pc.
    changes: FxHashMap<u64, u8>,
    /// The words that blocks jump or call through.
    words: FxHashMap<u32, Word>,
    /// Blocks that were removed since, for the next who waits until all threads have been outside.
    stale: Option<Doomed>,
    heads: Heads,
    returns: Wanted,
    /// Bytes of stubs and constants under construction.
    cold: Vec<u8>,
    /// How many blocks are unlinked.
    unlinked: AtomicU32,
    /// How often everything was dropped for other reasons than that blocks are to be different.
    clears: u32,
    /// Do blocks name their transfers?
    named: bool,
    figures: CopyFigures,
}

impl Blocks {
    /// The addresses of the heads' counters.
    pub fn memory(&self) -> Option<Range<u64>> {
        self.heads.memory()
    }

    /// Nothing copied; generates the stubs.
    pub fn new(
        cache: &mut Cache,
        cpu: &Cpu,
        stubs: &Stubs,
        indirect: &mut Indirect,
        returns: Returns,
    ) -> Result<Blocks, StubError> {
        let room = (cache.range().end - cache.range().start) as usize / BYTES_PER_BLOCK;
        let mut blocks = Blocks {
            translator: Translator::new(cache.range()),
            stubs: CopyStubs::generate(cache, cpu, stubs)?,
            base: cache.range().start,
            leave: stubs.leave_canonical,
            ways: Ways {
                tables: std::array::from_fn(|n| indirect.table(Via::from_index(n)?)),
                in_use: 1 << Via::Memory.index(),
                out: indirect.out_table(),
                direct: [indirect.miss(), indirect.out_from_rcx()],
                returns: None,
                asks: std::array::from_fn(|r| indirect.ask(r as u8)),
            },
            blocks: Vec::with_capacity(room),
            places: Vec::with_capacity(2 * room),
            by_pc: FxHashMap::with_capacity_and_hasher(3 << 10, FxBuildHasher),
            links: Vec::with_capacity(4 * room),
            checks: Vec::new(),
            apart: FxHashMap::default(),
            moved: Vec::new(),
            pages: Pages::with_capacity(2 * room),
            free: Free::default(),
            own: FxHashMap::default(),
            words: FxHashMap::default(),
            changes: FxHashMap::default(),
            stale: None,
            heads: Heads::new(&cache.range()),
            returns: Wanted::new(returns),
            cold: Vec::new(),
            unlinked: AtomicU32::new(0),
            clears: 0,
            named: false,
            figures: CopyFigures::default(),
        };
        blocks.choose_returns(indirect);
        Ok(blocks)
    }

    /// Forgets everything: the cache is empty.
    pub fn clear(&mut self, indirect: &mut Indirect) {
        let named = std::mem::replace(&mut self.named, indirect.names_transfers());
        let wanted = self.wants_stack(indirect) || named != self.named;
        self.blocks.clear();
        self.places.clear();
        self.by_pc.clear();
        self.links.clear();
        self.checks.clear();
        self.apart.clear();
        self.moved.clear();
        self.pages.clear();
        self.free = Free::default();
        self.own.clear();
        self.words.clear();
        self.changes.clear();
        self.stale = None;
        self.unlinked.store(0, Ordering::Relaxed);
        self.heads.clear();
        self.choose_returns(indirect);
        if !wanted {
            self.clears += 1;
        }
        if self.clears >= OFTEN {
            // What is copied lasts for so short a time that more than what is executed would not pay.
            self.translator.most_branches = 1;
        }
    }

    /// In a forked child: generates the stubs anew.
    pub fn renew(
        &mut self,
        cache: &mut Cache,
        cpu: &Cpu,
        stubs: &Stubs,
        indirect: &mut Indirect,
    ) -> Result<(), StubError> {
        self.ways.in_use = 1 << Via::Memory.index();
        self.clear(indirect);
        self.stubs = CopyStubs::generate(cache, cpu, stubs)?;
        self.leave = stubs.leave_canonical;
        Ok(())
    }

    fn place(&mut self, pc: u64) -> u32 {
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
                made: [NONE; 2],
                has_checks: false,
            };
            self.free.put_place(&mut self.places, place)
        })
    }

    /// Makes `number` one of the links that lead to its place.
    fn join(&mut self, number: u32) {
        let place = &mut self.places[(self.links[number as usize].place & PLACE) as usize];
        let next = std::mem::replace(&mut place.links, number);
        self.links[number as usize].next = next;
        if let Some(next) = self.links.get_mut(next as usize) {
            next.before = number;
        }
    }

    /// Where a link to a place leads while nothing wants out.
    fn target(&self, link: &Link) -> u64 {
        let place = &self.places[(link.place & PLACE) as usize];
        match if link.place & BODY != 0 { place.block } else { place.entry } {
            0 => self.out(link),
            entry => self.base + u64::from(entry),
        }
    }

    fn out(&self, link: &Link) -> u64 {
        self.base + u64::from(link.out)
    }

    /// What a link's jump is, if it is to lead `out`, then.
    fn patched(&self, link: &Link, out: bool) -> Patched {
        let behind = self.base + u64::from(link.field) + 4;
        let relative = |target: u64| target.wrapping_sub(behind) as u32;
        if link.place != ANYWHERE {
            return Patched::Field(relative(if out { self.out(link) } else { self.target(link) }));
        }
        let Ways { tables, in_use, out: out_table, direct, asks, returns } = &self.ways;
        let Some(via) = Via::from_index(link.out as usize) else {
            // Without such returns there is no link of theirs.
            return Patched::Instruction(returns.map_or([0xcc; 8], |looks| looks[usize::from(out)]));
        };
        match (via, tables[via.index()]) {
            (Via::Register(r), Some(table)) => Patched::Instruction(match in_use >> link.out & 1 != 0 && !out {
                true => piece::through(r, table),
                false => piece::directly(relative(asks[usize::from(r)])),
            }),
            (_, Some(table)) => Patched::Field(out_table.filter(|_| out).unwrap_or(table)),
            (_, None) => Patched::Field(relative(direct[usize::from(out)])),
        }
    }

    fn set(&self, link: &Link, out: bool, cache: &Cache) {
        let field = self.base + u64::from(link.field);
        match self.patched(link, out) {
            Patched::Field(value) => cache.patch(field, value),
            Patched::Instruction(bytes) => cache.patch_instruction(field - 4, bytes),
        }
    }

    /// From now on tails of this carrier go by its table, which is filled.
    fn use_table(&mut self, via: Via, cache: &Cache) {
        self.ways.in_use |= 1 << via.index();
        for link in self.links.iter().filter(|link| link.place == ANYWHERE && link.out as usize == via.index()) {
            if self.owner_is_linked(self.base + u64::from(link.field)) {
                self.set(link, false, cache);
            }
        }
    }

    fn links_of(&self, block: u32) -> Range<usize> {
        self.blocks.get(block as usize).map_or(0..0, |b| {
            let first = b.first_link as usize;
            first..first + usize::from(b.links)
        })
    }

    fn at(&self, host_rip: u64) -> Option<u32> {
        let offset = u32::try_from(host_rip.wrapping_sub(self.base)).ok()?;
        let i = self.blocks.partition_point(|b| b.start <= offset).checked_sub(1)?;
        (offset - self.blocks[i].start < u32::from(self.blocks[i].len)).then_some(i as u32)
    }

    /// Places the block that `translator` holds, and links it. The entry is not yet the place's.
    fn emit(&mut self, pc: u64, via: Option<Via>, cache: &mut Cache) -> Result<u64, CacheError> {
        let counted = self.heads.are_counted();
        let t = &mut self.translator.out;
        let own_stubs = t.exits.iter().filter(|e| matches!(e.leads, Leads::To(_))).count();
        let constants = own_stubs * STUB;
        let key = Key::of_block(t.bytes.len(), t.exits.len(), constants + 8 * t.constants.len());
        let slot = self.free.slot(key);
        let (start, cold) = match slot.and_then(|slot| self.blocks.get(slot as usize)) {
            Some(gone) => (self.base + u64::from(gone.start), self.base + u64::from(gone.cold)),
            None => {
                let start = match t.loop_offset(pc) {
                    Some(offset) => cache.alloc_hot_behind(key.hot(), loop_alignment::LINE, offset)?,
                    None => cache.alloc_hot(key.hot(), ALIGNMENT)?,
                };
                (start, cache.alloc_cold(key.cold())?)
            }
        };
        for r in &t.relatives {
            let target = match r.to {
                Referent::Address(address) => address,
                Referent::Constant(n) => cold + (constants + 8 * n as usize) as u64,
                Referent::Own(at) => (start + u64::from(at)).wrapping_add(start + u64::from(r.end)),
            };
            let relative = target.wrapping_sub(start + u64::from(r.end)) as u32;
            t.bytes[r.field as usize..r.field as usize + 4].copy_from_slice(&relative.to_le_bytes());
        }
        let constants = std::mem::take(&mut t.constants);
        let exits = t.exits.clone();
        let gone = slot.and_then(|slot| self.blocks.get(slot as usize));
        let first_link = gone.map_or(self.links.len() as u32, |gone| gone.first_link);
        let own = self.place(pc);
        self.cold.clear();
        for (number, exit) in (first_link..).zip(&exits) {
            let field = (start + u64::from(exit.field) - self.base) as u32;
            let link = match exit.leads {
                Leads::Indirect(via) => Link::new(field, via.index() as u32, ANYWHERE),
                Leads::Return => Link::new(field, RETURN, ANYWHERE),
                Leads::To(to) => {
                    let out = (cold - self.base) as u32 + self.cold.len() as u32;
                    let stub = self.stub_bytes(out, FIRST_LINK + number);
                    self.cold.extend_from_slice(&stub);
                    let place = self.place(to);
                    match exit.head {
                        Some(called) if counted => self.found_head(place, called),
                        _ => {}
                    }
                    Link::new(field, out, place)
                }
            };
            self.figures.links += u64::from(link.place != ANYWHERE && self.target(&link) != self.out(&link));
            let at = exit.field as usize;
            match self.patched(&link, false) {
                Patched::Field(field) => self.translator.out.bytes[at..at + 4].copy_from_slice(&field.to_le_bytes()),
                Patched::Instruction(bytes) => self.translator.out.bytes[at - 4..at + 4].copy_from_slice(&bytes),
            }
            let joins = link.place != ANYWHERE;
            match self.links.get_mut(number as usize) {
                Some(gone) => *gone = link,
                None => self.links.push(link),
            }
            if joins {
                self.join(number);
            }
        }
        for constant in constants {
            self.cold.extend_from_slice(&constant.to_le_bytes());
        }
        let t = &self.translator.out;
        let block = Block {
            pc,
            start: (start - self.base) as u32,
            len: t.bytes.len() as u16,
            prefix: t.prefix as u8,
            via: via.map_or(0, Via::index) as u8,
            links: exits.len() as u8,
            first_link,
            cold: (cold - self.base) as u32,
            counter: NONE,
            place: own,
            node: NONE,
            landings: Landings::of(t),
            key,
            unlinked: AtomicU32::new(0),
        };
        let index = self.put_block(slot, block);
        self.places[own as usize].made[0] = index;
        for source in &self.translator.out.sources {
            self.blocks[index as usize].node = self.pages.add(index, source, self.blocks[index as usize].node);
        }
        let bytes = &self.translator.out.bytes;
        cache.write(start, bytes);
        cache.write(cold, &self.cold);
        self.figures.blocks += 1;
        self.figures.basic_blocks += u64::from(self.translator.out.basic_blocks);
        self.figures.instructions += u64::from(self.translator.out.count);
        self.figures.bytes += (bytes.len() + self.cold.len()) as u64;
        if let Some(pc) = self.translator.out.returns_to {
            self.note_return_place();
            let place = self.place(pc);
            self.places[place as usize].expected.get_or_insert(Via::Memory);
        }
        Ok(start)
    }

    /// Where a block is gone, or behind all others.
    fn put_block(&mut self, slot: Option<u32>, block: Block) -> u32 {
        match slot {
            Some(slot) => {
                self.blocks[slot as usize] = block;
                slot
            }
            None => {
                self.blocks.push(block);
                self.blocks.len() as u32 - 1
            }
        }
    }

    /// A stub that will stand at offset `at`.
    fn stub_bytes(&self, at: u32, site: u32) -> SmallVec<[u8; 24]> {
        let mut stub = SmallVec::new();
        stub.store_constant(offset::EXIT_SITE, site);
        stub.jmp();
        let relative = self.leave.wrapping_sub(self.base + u64::from(at) + STUB as u64) as u32;
        stub[STUB - 4..].copy_from_slice(&relative.to_le_bytes());
        stub
    }

    /// Makes all links to a place lead to `entry`, an offset in the cache, 0 for nowhere.
    fn lead(&mut self, place: u32, entry: u32, cache: &Cache, fragments: &[Fragment]) {
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
                heads::set_target(fragments, field, self.target(link), cache);
            } else if all_linked || self.owner_is_linked(field) {
                self.set(link, false, cache);
            }
            self.figures.links += u64::from(entry != 0);
            next = link.next;
        }
    }

    /// Is the block that a field belongs to linked?
    fn owner_is_linked(&self, field: u64) -> bool {
        self.at(field).is_none_or(|owner| self.blocks[owner as usize].unlinked.load(Ordering::Relaxed) == 0)
    }

    fn unlink(&self, block: u32, indirect: &Indirect, cache: &Cache) {
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

    /// Makes whoever is in any block leave at its end, for good.
    pub fn unlink_all(&self, indirect: &Indirect, cache: &Cache) {
        (0..self.blocks.len() as u32).for_each(|block| self.unlink(block, indirect, cache));
    }

    /// A place has a block now, at this offset.
    fn give(&mut self, place: u32, block: u32, cache: &Cache, fragments: &[Fragment]) {
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

    /// The entry at `pc`, or its block, made now if need be.
    fn copy(
        &mut self,
        pc: u64,
        want_block: bool,
        code: &dyn Fetch,
        indirect: &mut Indirect,
        cache: &mut Cache,
        fragments: &[Fragment],
    ) -> Result<Copied, EmitError> {
        let found = |p: &Place| if want_block { p.block } else { p.entry };
        let mut via = None;
        if let Some(&number) = self.by_pc.get(&pc) {
            let place = &self.places[number as usize];
            if let entry @ 1.. = found(place) {
                return Ok(Copied::Entry(self.base + u64::from(entry)));
            }
            via = place.expected;
            if place.block != 0 {
                // It led to a fragment that is gone.
                let block = place.block;
                self.lead(number, block, cache, fragments);
                return Ok(Copied::Entry(self.base + u64::from(block)));
            }
        }
        if self.wants_stack(indirect) {
            return Err(CacheError::Full.into());
        }
        let since = code.moment();
        if !self.translator.translate(pc, code, indirect, via, None)? {
            return Ok(Copied::Instruction);
        }
        let (mut again, mut own) = (false, None);
        for source in &self.translator.out.sources {
            match code.watch(source.clone(), since) {
                Watched::Already => {}
                Watched::Now => again = true,
                Watched::Impossible if self.changes_often(pc) => return Ok(Copied::Writable),
                Watched::Impossible => {
                    own = self.translator.own_bytes(pc, code);
                    if own.is_none() {
                        return Ok(Copied::Instruction);
                    }
                    break;
                }
            }
        }
        if let Some(bytes) = &own {
            let check = (&bytes[..], self.stubs.stale);
            if !self.translator.translate(pc, &compared::source(pc, bytes), indirect, via, Some(check))? {
                return Ok(Copied::Instruction);
            }
        } else if again {
            // It may have changed before it was watched.
            return self.copy(pc, want_block, code, indirect, cache, fragments);
        }
        // Before it is placed, so that a loop's own link is made at once.
        let start = self.emit(pc, via, cache)?;
        let place = self.place(pc);
        let prefix = self.translator.out.prefix;
        let offset = (start - self.base) as u32;
        let p = &mut self.places[place as usize];
        p.prefix = if prefix == 0 { 0 } else { offset };
        let made = p.made[0];
        if let Some(bytes) = own {
            self.own.insert(made, bytes);
        }
        if let Some(word) = self.translator.out.word {
            self.words.insert(made, word);
        }
        self.give(place, offset + prefix, cache, fragments);
        self.count_found(cache, fragments);
        Ok(Copied::Entry(self.base + u64::from(found(&self.places[place as usize]))))
    }
}

impl Emitter {
    /// The code for the block at `pc`, copied now if need be. [`EmitError::is_full`] asks the caller to
    /// [`Emitter::flush_all`] and try again.
    pub fn copy(&mut self, pc: u64, code: &dyn Fetch) -> Result<Copied, EmitError> {
        self.copied(pc, false, code)
    }

    /// As [`Emitter::copy`], but always the block itself, past counters and fragments.
    pub fn copy_block(&mut self, pc: u64, code: &dyn Fetch) -> Result<Copied, EmitError> {
        self.copied(pc, true, code)
    }

    fn copied(&mut self, pc: u64, want_block: bool, code: &dyn Fetch) -> Result<Copied, EmitError> {
        let mark = self.cache.mark();
        let copied = self.blocks.copy(pc, want_block, code, &mut self.indirect, &mut self.cache, &self.fragments);
        match &copied {
            Ok(_) => self.register_moved(),
            Err(_) => self.cache.rewind(mark),
        }
        copied
    }

    /// Where to enter what [`Emitter::copy`] gave since the last flush.
    pub fn copy_entry_point(&self, entry: u64) -> EntryPoint {
        EntryPoint {
            stubs: self.stubs.enter,
            code: self.blocks.stubs.load,
            loaded: entry,
            kept: self.indirect.returns().kept(),
        }
    }

    /// Runs the code at `entry` and whatever it leads to, on the guest state in `ctx`, until it leaves.
    ///
    /// # Safety
    /// As [`Emitter::enter`], and `entry` is what [`Emitter::copy`] said since the last flush.
    pub unsafe fn enter_copy(&self, ctx: *mut ThreadContext, entry: u64) -> Left {
        // SAFETY: the caller's promise.
        unsafe { self.copy_entry_point(entry).run(ctx) }
    }

    /// The guest pc that a block's exit leads to, and whether it leads to the block there, whatever links lead to.
    pub fn copy_exit(&self, link: LinkId) -> Option<(u64, bool)> {
        let place = self.blocks.links.get(link.0 as usize)?.place;
        Some((self.blocks.places.get((place & PLACE) as usize)?.pc, place & BODY != 0))
    }

    /// Figures about the copy tier.
    pub fn copy_figures(&self) -> CopyFigures {
        self.blocks.figures
    }

    /// The block whose code contains a host address. Async-signal-safe.
    pub fn block_at(&self, host_rip: u64) -> Option<BlockId> {
        self.blocks.at(host_rip).map(BlockId)
    }

    /// The guest pc and the host code of each block, counters among them.
    pub fn all_blocks(&self) -> impl Iterator<Item = (u64, Range<u64>)> {
        self.blocks.blocks.iter().filter(|b| b.len != 0).map(|b| {
            let start = self.blocks.base + u64::from(b.start);
            (b.pc, start..start + u64::from(b.len))
        })
    }

    /// Makes whoever is in a block leave at its end, into the runtime, until as many have called
    /// [`Emitter::relink_block`]. Async-signal-safe.
    pub fn unlink_block(&self, block: BlockId) {
        self.blocks.unlink(block.0, &self.indirect, &self.cache);
    }

    /// Undoes [`Emitter::unlink_block`]. Async-signal-safe.
    pub fn relink_block(&self, block: BlockId) {
        let blocks = &self.blocks;
        let Some(b) = blocks.blocks.get(block.0 as usize) else { return };
        blocks.unlinked.fetch_sub(1, Ordering::Relaxed);
        if b.unlinked.fetch_sub(1, Ordering::Relaxed) == 1 {
            blocks.links[blocks.links_of(block.0)].iter().for_each(|link| blocks.set(link, false, &self.cache));
        }
    }

    /// Where a fault at `host_rip` in a block continues, after noting it in the thread's context. Async-signal-safe.
    pub(crate) fn copy_fault(&self, host_rip: u64) -> Option<u64> {
        self.blocks.at(host_rip)?;
        // SAFETY: the code that faulted is in the cache, so GS points to this thread's context.
        unsafe { std::arch::asm!("mov gs:[{at}], {rip}", at = const offset::FAULT_RIP, rip = in(reg) host_rip) };
        Some(self.blocks.stubs.fault_out)
    }
}
