//! The copy tier: guest blocks as native code without IR (docs/design.md, "Code generation").
//!
//! A *block* is the copy of one stretch of guest code with one entry, in canonical state at both
//! ends. Its exits are links to *places*, guest pcs ([`crate::blocks::places`]). A link that has
//! nothing to lead to leads to its stub in cold memory, which leaves and says which link it was.
//!
//! All of it is in arrays that grow by some words a block; nothing is allocated per block.
//! Invariants:
//! * blocks ascend by host address, including removed ones ([`removal`]);
//! * nothing says which guest instruction a host instruction belongs to: translating again does
//!   ([`fault_state`]).
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
mod fast_decode;
mod fault_state;
pub(crate) mod gates;
mod gs_operands;
mod head_counters;
mod in_place;
mod pages;
pub(crate) mod places;
mod removal;
mod self_checking;
mod stack_returns;
mod stubs;
mod transfer;
mod translate;
mod translation;
mod word_jumps;
mod x87_pointer;

use crate::asm::Assembler;
use crate::cache::{Cache, CacheError};
use crate::codegen::count::KeyRegister;
use crate::codegen::loop_alignment;
use crate::cpu::Cpu;
use crate::error::EmitError;
use crate::fragment::Fragment;
use crate::stubs::{StubError, Stubs};
use crate::transfers::indirect::{Indirect, Via};
use crate::transfers::stack_returns::Returns;
use checked_entries::Check;
use dynasour_guest::context::offset;
use dynasour_guest::decode::{Fetch, Watched};
use head_counters::Heads;
pub use head_counters::{Count, Counted, CounterId, HeadCounts};
use in_place::InPlace;
pub use in_place::WayOut;
use pages::Pages;
use places::{ANYWHERE, BODY, IN_PLACE, Link, NONE, PLACE, Patched, Place, RETURN, Ways};
pub use removal::Doomed;
use removal::{Free, Key};
use rustc_hash::{FxBuildHasher, FxHashMap};
use smallvec::SmallVec;
use stack_returns::{Landings, Wanted};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use stubs::CopyStubs;
pub use stubs::IN_PLACE_LEFT;
pub(crate) use stubs::{FAULT, FIRST_COUNTER, FIRST_LINK, LOADED, STALE};
use translate::{Leads, Translator};
use word_jumps::Word;

/// After everything has been dropped this many times ([`Blocks::clears`]), blocks end at the first
/// branch (guess; if it is too low, a program that fills the cache once has slower blocks for
/// good).
const OFTEN: u32 = 4;
/// From the start the arrays have room for one block per this many bytes of cache (guess). Unused
/// room costs no memory; if there is too little room, growing copies the arrays.
const BYTES_PER_BLOCK: usize = 2 << 10;
/// Bytes. At least eight, because the translator pads fields relative to the block's start.
/// Measured: more than sixteen is hardly faster.
const ALIGNMENT: usize = 16;
/// Bytes of a link's stub: `mov qword gs:[exit_site], imm32; jmp leave`.
const STUB: usize = 18;

/// Identifies a block, until the next flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockId(pub u32);

/// Identifies a block's exit, until the next flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkId(pub u32);

/// The result of [`Emitter::copy`](crate::Emitter::copy).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copied {
    /// Code to enter.
    Entry(u64),
    /// The instruction cannot be copied; the interpreter executes it.
    Instruction,
    /// The code keeps changing; the interpreter executes it.
    Writable,
}

/// A copied block, or a counter before one.
pub(crate) struct Block {
    pub(crate) pc: u64,
    /// Offset in the cache.
    pub(crate) start: u32,
    pub(crate) len: u16,
    /// Bytes of the checked entry that it begins with.
    pub(crate) prefix: u8,
    /// [`Via::index`] of that entry's carrier.
    pub(crate) via: u8,
    /// The number of its links. They are consecutive, from `first_link` on.
    pub(crate) links: u8,
    pub(crate) first_link: u32,
    /// Offset of its cold memory.
    pub(crate) cold: u32,
    /// Its number among the counters, [`NONE`] if it is none.
    pub(crate) counter: u32,
    pub(crate) place: u32,
    /// The first of its nodes in [`Pages`].
    pub(crate) node: u32,
    pub(crate) landings: Landings,
    /// The sizes by which its memory is used again.
    pub(crate) key: Key,
    /// Unlinkings that have not been undone. While there are any, its links lead out.
    pub(crate) unlinked: AtomicU32,
}

impl Block {
    /// Do its links lead out at present?
    pub(crate) fn is_unlinked(&self) -> bool {
        self.unlinked.load(Ordering::Relaxed) != 0
    }
}

/// Figures about the copy tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CopyFigures {
    /// Blocks translated since the start.
    pub blocks: u64,
    /// Basic blocks of the guest's in them. A copied block goes on behind conditional branches and
    /// jumps, so it may have several.
    pub basic_blocks: u64,
    /// Guest instructions in them.
    pub instructions: u64,
    /// Bytes of code made from them, stubs included.
    pub bytes: u64,
    /// Links that were made to lead to code.
    pub links: u64,
}

/// Blocks, places and links.
pub(crate) struct Blocks {
    translator: Translator,
    stubs: CopyStubs,
    pub(crate) base: u64,
    pub(crate) leave: u64,
    pub(crate) ways: Ways,
    pub(crate) blocks: Vec<Block>,
    pub(crate) places: Vec<Place>,
    pub(crate) by_pc: FxHashMap<u64, u32>,
    pub(crate) links: Vec<Link>,
    /// Checked entries that belong to no block, ascending.
    pub(crate) checks: Vec<Check>,
    /// Offsets of checked entries that belong to no block, by place and carrier.
    pub(crate) apart: FxHashMap<(u32, Via), u32>,
    /// Places whose entry has changed, while the tables still lead to the old one.
    pub(crate) moved: Vec<u32>,
    /// The blocks of each guest page.
    pages: Pages,
    /// Memory and numbers that are free.
    pub(crate) free: Free,
    /// The guest bytes of self-checking blocks, by their indices.
    own: FxHashMap<u32, Box<[u8]>>,
    /// Changes of such bytes that were found, by guest pc.
    changes: FxHashMap<u64, u8>,
    /// The words that blocks jump or call through.
    words: FxHashMap<u32, Word>,
    /// Blocks that were removed because their bytes had changed. The next caller that waits until
    /// every thread has been outside takes them, too.
    stale: Option<Doomed>,
    pub(crate) heads: Heads,
    /// What each gate counts, by its index ([`gates`]).
    gate_keys: FxHashMap<u32, Option<KeyRegister>>,
    returns: Wanted,
    /// Bytes of stubs and constants under construction.
    cold: Vec<u8>,
    /// The number of unlinkings of all blocks that have not been undone.
    pub(crate) unlinked: AtomicU32,
    /// Times that everything was dropped, except to make blocks in another way (returns through the
    /// stack, named transfers).
    clears: u32,
    /// Times that everything was dropped for any reason. Indices are good until the next time.
    generation: u32,
    /// Do blocks name their transfers?
    named: bool,
    /// What is done instead of copying; none if blocks are copied.
    in_place: Option<InPlace>,
    /// The indices of blocks made since they were asked for, if the emitter is watched.
    new: Option<Vec<u32>>,
    pub(crate) figures: CopyFigures,
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
        way_out: Option<WayOut>,
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
            gate_keys: FxHashMap::default(),
            returns: Wanted::new(returns),
            cold: Vec::new(),
            unlinked: AtomicU32::new(0),
            clears: 0,
            generation: 0,
            named: false,
            in_place: way_out.map(InPlace::new),
            new: None,
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
        self.in_place.iter_mut().for_each(InPlace::clear);
        self.heads.clear();
        self.gate_keys.clear();
        self.new.iter_mut().for_each(Vec::clear);
        self.choose_returns(indirect);
        self.generation += 1;
        if !wanted {
            self.clears += 1;
        }
        if self.clears >= OFTEN {
            // Blocks are dropped so soon that copying code which is not executed does not pay.
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

    pub(crate) fn at(&self, host_rip: u64) -> Option<u32> {
        let offset = u32::try_from(host_rip.wrapping_sub(self.base)).ok()?;
        let i = self.blocks.partition_point(|b| b.start <= offset).checked_sub(1)?;
        (offset - self.blocks[i].start < u32::from(self.blocks[i].len)).then_some(i as u32)
    }

    /// Places the block that `translator` holds, and links it. The entry is not yet the place's.
    fn emit(&mut self, pc: u64, via: Option<Via>, cache: &mut Cache) -> Result<u64, CacheError> {
        let (start, index) = self.emit_apart(pc, via, cache)?;
        let own = self.blocks[index as usize].place;
        self.places[own as usize].made[0] = index;
        Ok(start)
    }

    /// As [`Blocks::emit`], for a block that is not its place's. Returns its index, too.
    fn emit_apart(
        &mut self,
        pc: u64,
        via: Option<Via>,
        cache: &mut Cache,
    ) -> Result<(u64, u32), CacheError> {
        let counted = self.heads.are_counted();
        let t = &mut self.translator.out;
        let own_stubs = t.exits.iter().filter(|e| e.leads.has_stub()).count();
        let constants = own_stubs * STUB;
        let key = Key::of_block(t.bytes.len(), t.exits.len(), constants + 8 * t.constants.len());
        let slot = self.free.slot(key);
        let (start, cold) = match slot.and_then(|slot| self.blocks.get(slot as usize)) {
            Some(gone) => (self.base + u64::from(gone.start), self.base + u64::from(gone.cold)),
            None => {
                let start = match t.loop_offset(pc) {
                    Some(offset) => {
                        cache.alloc_hot_behind(key.hot(), loop_alignment::LINE, offset)?
                    }
                    None => cache.alloc_hot(key.hot(), ALIGNMENT)?,
                };
                (start, cache.alloc_cold(key.cold())?)
            }
        };
        t.resolve(start, cold + constants as u64);
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
                Leads::To(to) | Leads::InPlace(to) => {
                    let out = (cold - self.base) as u32 + self.cold.len() as u32;
                    let stub = self.stub_bytes(out, FIRST_LINK + number);
                    self.cold.extend_from_slice(&stub);
                    let place = self.place(to);
                    match exit.head {
                        Some(called) if counted => self.found_head(place, called),
                        _ => {}
                    }
                    let in_place = matches!(exit.leads, Leads::InPlace(_));
                    Link::new(field, out, place | if in_place { IN_PLACE } else { 0 })
                }
            };
            self.figures.links +=
                u64::from(link.place != ANYWHERE && self.target(&link) != self.out(&link));
            self.write_jump(exit.field as usize, &link);
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
        for source in &self.translator.out.sources {
            self.blocks[index as usize].node =
                self.pages.add(index, source, self.blocks[index as usize].node);
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
        Ok((start, index))
    }

    /// Writes where a link leads into the translated bytes; its field is at this offset.
    fn write_jump(&mut self, field: usize, link: &Link) {
        match self.patched(link, false) {
            Patched::Field(value) => {
                self.translator.out.bytes[field..field + 4].copy_from_slice(&value.to_le_bytes())
            }
            Patched::Instruction(bytes) => {
                self.translator.out.bytes[field - 4..field + 4].copy_from_slice(&bytes)
            }
        }
    }

    /// Puts a block into the slot of a removed one, or behind all others. Returns its index.
    pub(super) fn put_block(&mut self, slot: Option<u32>, block: Block) -> u32 {
        let index = match slot {
            Some(slot) => {
                self.blocks[slot as usize] = block;
                slot
            }
            None => {
                self.blocks.push(block);
                self.blocks.len() as u32 - 1
            }
        };
        self.new.iter_mut().for_each(|new| new.push(index));
        index
    }

    /// From now on new blocks are noted for [`Blocks::take_new`].
    pub fn note_new(&mut self) {
        self.new.get_or_insert_default();
    }

    /// The guest pc and the host code of each block that was made since the last call and still exists.
    pub fn take_new(&mut self) -> Vec<(u64, Range<u64>)> {
        let new = self.new.as_mut().map(std::mem::take).unwrap_or_default();
        let code = |index: u32| {
            let block = self.blocks.get(index as usize).filter(|block| block.len != 0)?;
            let start = self.base + u64::from(block.start);
            Some((block.pc, start..start + u64::from(block.len)))
        };
        new.into_iter().filter_map(code).collect()
    }

    /// The bytes of a stub that leaves with `site` and will stand at offset `at`.
    pub(super) fn stub_bytes(&self, at: u32, site: u32) -> SmallVec<[u8; 24]> {
        let mut stub = SmallVec::new();
        stub.store_constant(offset::EXIT_SITE, site);
        stub.jmp();
        let relative = self.leave.wrapping_sub(self.base + u64::from(at) + STUB as u64) as u32;
        stub[STUB - 4..].copy_from_slice(&relative.to_le_bytes());
        stub
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
                // The place led to a fragment that has been dropped.
                let block = place.block;
                self.lead(number, block, cache, fragments);
                return Ok(Copied::Entry(self.base + u64::from(block)));
            }
        }
        if self.wants_stack(indirect) {
            return Err(CacheError::Full.into());
        }
        if let Some(way_out) = self.way_out(pc) {
            let Some(way_out) = way_out else { return Ok(Copied::Instruction) };
            return self.lead_in_place(pc, way_out, via, want_block, (indirect, cache, fragments));
        }
        let since = code.moment();
        self.translator.until = self.displaced_until(pc);
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
            if !self.translator.translate(
                pc,
                &self_checking::source(pc, bytes),
                indirect,
                via,
                Some(check),
            )? {
                return Ok(Copied::Instruction);
            }
        } else if again {
            // The code may have changed before its page was guarded.
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

impl Blocks {
    /// As [`Blocks::copy`]. Afterwards the tables lead to the entries of places that have changed.
    /// If the block could not be made, the memory that was taken for it is given back.
    pub(crate) fn copied(
        &mut self,
        pc: u64,
        want_block: bool,
        code: &dyn Fetch,
        indirect: &mut Indirect,
        cache: &mut Cache,
        fragments: &[Fragment],
    ) -> Result<Copied, EmitError> {
        let mark = cache.mark();
        let copied = self.copy(pc, want_block, code, indirect, cache, fragments);
        match &copied {
            Ok(_) => self.register_moved(indirect, cache),
            Err(_) => cache.rewind(mark),
        }
        copied
    }

    /// The code that loads the extended state and goes on at the word [`LOADED`].
    pub(crate) fn way_in(&self) -> u64 {
        self.stubs.load
    }

    /// The guest pc that a link leads to, and whether it leads to the block or the guest's own code
    /// there, whatever other links lead to.
    pub(crate) fn target_of(&self, link: LinkId) -> Option<(u64, bool)> {
        let place = self.links.get(link.0 as usize)?.place;
        Some((self.places.get((place & PLACE) as usize)?.pc, place & (BODY | IN_PLACE) != 0))
    }

    /// The guest pc of the code that `host_rip` is in.
    pub(crate) fn pc_at(&self, host_rip: u64) -> Option<u64> {
        self.at(host_rip).map(|block| self.blocks[block as usize].pc)
    }

    /// The guest pc and the host code of each block, counters among them.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, Range<u64>)> {
        self.blocks.iter().filter(|b| b.len != 0).map(|b| {
            let start = self.base + u64::from(b.start);
            (b.pc, start..start + u64::from(b.len))
        })
    }

    /// Where a fault at `host_rip` in a block continues, after noting it in the thread's context.
    /// Async-signal-safe.
    pub(crate) fn fault_exit(&self, host_rip: u64) -> Option<u64> {
        self.at(host_rip)?;
        // SAFETY: the code that faulted is in the cache, so GS points to this thread's context.
        unsafe {
            std::arch::asm!("mov gs:[{at}], \
                {rip}", at = const offset::FAULT_RIP, rip = in(reg) host_rip)
        };
        Some(self.stubs.fault_out)
    }
}
