//! Blocks by pc: a hash map behind a small direct-mapped table, and links from block to block.
//!
//! Blocks are owned here and referred to by pointer; a pointer is good until the next invalidation.
//! A block that is dropped is taken out of the table and of all links, which each block knows in
//! both directions, so none ever dangles.

use super::BlockRef;
use super::code::{Code, CodeBytes};
use super::lower::{LowerError, Lowered, Workspace, lower};
use super::native::{NativeError, NativePool};
use crate::observe::profile::{Phase, during};
use dynasour_guest::decode::{MAX_LENGTH, Watched};
use dynasour_guest::lift::{Bytes, Fetch, LiftedBlock, MAX_BLOCK, lift_block, recycle};
use dynasour_ir::{Effects, GuestTerm, Inst, Op, Term};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::cell::OnceCell;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

/// What a policy sees of a block.
pub struct BlockEntry {
    /// Guest pc of the first instruction.
    pub pc: u64,
    /// First guest byte behind the block.
    pub end: u64,
    /// How many guest instructions it has.
    pub count: u32,
    /// What it was made from, if plain stores may change that: the interpreter then looks at each
    /// entry.
    checked: Option<Arc<[u8]>>,
    /// Free for the policy: initially 0 (the dynamo mode keeps a trace head's counter here).
    pub counter: u32,
    /// Free for the policy: initially 0 (the dynamo mode keeps a fragment's number here).
    pub user: u32,
    code: Rc<dyn Fetch>,
    lifted: OnceCell<Rc<LiftedBlock>>,
}

impl BlockEntry {
    /// Plain stores may change what it was made from.
    pub fn is_checked(&self) -> bool {
        self.checked.is_some()
    }

    /// The block's IR. It is not kept when the block is made, since few blocks are ever recorded,
    /// but lifted again from guest memory at the first request.
    pub fn lifted(&self) -> Rc<LiftedBlock> {
        let lift = || match &self.checked {
            None => lift_block(self.pc, &*self.code, self.count as usize),
            Some(bytes) => {
                let lifted =
                    lift_block(self.pc, &Bytes { start: self.pc, bytes }, self.count as usize);
                LiftedBlock { checked: Some(bytes.clone()), ..lifted }
            }
        };
        self.lifted.get_or_init(|| Rc::new(lift())).clone()
    }
}

/// A cached block.
pub struct Block {
    /// Its public face.
    pub entry: BlockEntry,
    /// Its first operation.
    pub start: *const Code,
    /// Where its direct edges led (the branch taken first); null if not known.
    pub links: [*const Block; 2],
    /// The blocks that link to it.
    linked_from: SmallVec<[BlockRef; 2]>,
    /// Its operations.
    pub lowered: Lowered,
    /// First guest byte behind those that made it what it is: [`BlockEntry::end`], unless it ends
    /// in a trap, which other bytes behind could make an instruction.
    depends_to: u64,
}

/// The small table in front of the map: one block for each value of some bits of a hash of the pc.
pub struct Front {
    entries: [(u64, *const Block); FRONT_SIZE],
}

// SAFETY: the only one that threads share is `EMPTY`, which nobody changes.
unsafe impl Sync for Front {}

/// Where nothing is found; takes no memory.
static EMPTY: Front = Front { entries: [(0, std::ptr::null()); FRONT_SIZE] };

const FRONT_BITS: u32 = 13;
const FRONT_SIZE: usize = 1 << FRONT_BITS;

impl Front {
    fn new() -> Box<Front> {
        // SAFETY: zeros are pcs and null pointers.
        unsafe { Box::new_zeroed().assume_init() }
    }

    #[inline(always)]
    fn slot(pc: u64) -> usize {
        (pc.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - FRONT_BITS)) as usize
    }

    /// The block at `pc`, null if it is not in the table.
    #[inline(always)]
    pub fn find(&self, pc: u64) -> *const Block {
        let (at, block) = self.entries[Front::slot(pc)];
        if at == pc { block } else { std::ptr::null() }
    }

    fn put(&mut self, pc: u64, block: BlockRef) {
        self.entries[Front::slot(pc)] = (pc, block.as_ptr());
    }

    fn remove(&mut self, pc: u64) {
        let entry = &mut self.entries[Front::slot(pc)];
        if entry.0 == pc {
            *entry = (0, std::ptr::null());
        }
    }

    fn clear(&mut self) {
        self.entries.fill((0, std::ptr::null()));
    }
}

const PAGE_SHIFT: u32 = 12;
/// More `user` words of dropped blocks are not kept.
const MOST_MARKS: usize = 1 << 14;
/// [`MAX_LENGTH`]
const LENGTH: u64 = MAX_LENGTH as u64;
const UNLINKED: [*const Block; 2] = [std::ptr::null(); 2];

/// All blocks.
pub struct Cache {
    code: Rc<dyn Fetch>,
    natives: NativePool,
    work: Workspace,
    blocks: FxHashMap<u64, BlockRef>,
    /// Blocks of one instruction, for stepping.
    singles: FxHashMap<u64, BlockRef>,
    /// Made for the first block that is not a single instruction.
    front: Option<Box<Front>>,
    /// pcs of the blocks with bytes on each page.
    pages: FxHashMap<u64, Vec<u64>>,
    /// Counts the times when blocks were dropped.
    generation: u64,
    /// The `user` words of blocks that were dropped, for those that take their place.
    marks: FxHashMap<u64, u32>,
}

impl Cache {
    /// An empty cache for the code that `code` reads.
    pub fn new(code: Rc<dyn Fetch>) -> Cache {
        Cache {
            code,
            natives: NativePool::new(),
            work: Workspace::default(),
            blocks: FxHashMap::default(),
            singles: FxHashMap::default(),
            front: None,
            pages: FxHashMap::default(),
            generation: 0,
            marks: FxHashMap::default(),
        }
    }

    /// Gets all memory that is not allocated from the heap.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn reserve(&mut self) -> std::io::Result<()> {
        self.natives.reserve()
    }

    /// That memory.
    pub fn reserved(&self) -> Vec<std::ops::Range<u64>> {
        self.natives.reserved()
    }

    /// How many blocks there are, those for stepping not counted.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// How code is read.
    pub fn code(&self) -> Rc<dyn Fetch> {
        self.code.clone()
    }

    /// The table in front of the map.
    pub fn front(&self) -> *const Front {
        self.front.as_deref().unwrap_or(&EMPTY)
    }

    /// The block at `pc`.
    pub fn block(&mut self, pc: u64) -> Result<BlockRef, LowerError> {
        let front = self.front.get_or_insert_with(Front::new);
        if let Some(block) = NonNull::new(front.find(pc).cast_mut()) {
            return Ok(block);
        }
        let block = match self.blocks.get(&pc) {
            Some(block) => *block,
            None => {
                let block = self.make(pc, Purpose::Block)?;
                self.blocks.insert(pc, block);
                block
            }
        };
        if let Some(front) = &mut self.front {
            front.put(pc, block);
        }
        Ok(block)
    }

    /// The block of the one instruction at `pc`.
    pub fn single(&mut self, pc: u64) -> Result<BlockRef, LowerError> {
        if let Some(block) = self.singles.get(&pc) {
            return Ok(*block);
        }
        let block = self.make(pc, Purpose::Single)?;
        self.singles.insert(pc, block);
        Ok(block)
    }

    /// The block at `target`, to which `block` goes by its direct edge number `link`, if it is a
    /// direct one. `block` may be dropped by this.
    pub fn successor(
        &mut self,
        mut block: BlockRef,
        link: Option<usize>,
        target: u64,
    ) -> Result<BlockRef, LowerError> {
        let generation = self.generation;
        let mut next = self.block(target)?;
        if let Some(link) = link
            && generation == self.generation
        {
            // SAFETY: nothing was dropped meanwhile, and no other reference to the block exists.
            let known =
                unsafe { std::mem::replace(&mut block.as_mut().links[link], next.as_ptr()) };
            if known.is_null() {
                // SAFETY: as above.
                unsafe { next.as_mut() }.linked_from.push(block);
            }
        }
        Ok(next)
    }

    /// The first byte from `pc` on that cannot be fetched, of the at most [`MAX_LENGTH`] bytes of
    /// an instruction.
    pub fn first_unfetchable(&self, pc: u64) -> u64 {
        let mut bytes = [0; MAX_LENGTH];
        pc.wrapping_add(self.code.fetch(pc, &mut bytes) as u64)
    }

    fn make(&mut self, pc: u64, purpose: Purpose) -> Result<BlockRef, LowerError> {
        during(Phase::Translate, || self.translate(pc, purpose))
    }

    fn translate(&mut self, pc: u64, purpose: Purpose) -> Result<BlockRef, LowerError> {
        let mut max = match purpose {
            Purpose::Block => MAX_BLOCK,
            Purpose::Single => 1,
        };
        let (lifted, lowered, checked) = loop {
            // It may be the very instruction that writes to its page.
            let may_change =
                purpose == Purpose::Single && self.code.is_writable(pc..pc.saturating_add(LENGTH));
            let since = self.code.moment();
            let mut lifted = lift_block(pc, &*self.code, max);
            let source = pc..depends_to(&lifted);
            let writable = match purpose {
                Purpose::Single => may_change,
                Purpose::Block => match self.code.watch(source.clone(), since) {
                    Watched::Already => false,
                    Watched::Now => {
                        recycle(lifted);
                        continue;
                    }
                    Watched::Impossible => true,
                },
            };
            let mut bytes = None;
            if writable {
                // What is compared is what is lifted, whatever happens to memory meanwhile.
                recycle(lifted);
                let mut code = self.bytes(pc..source.end.saturating_add(LENGTH));
                lifted = lift_block(pc, &Bytes { start: pc, bytes: &code }, max);
                let end = depends_to(&lifted);
                if end > source.end.saturating_add(LENGTH) {
                    recycle(lifted);
                    continue;
                }
                code.truncate((end - pc) as usize);
                let until_store = count_until_store(&lifted);
                if until_store < lifted.count {
                    // The store may change what follows.
                    max = until_store as usize;
                    recycle(lifted);
                    continue;
                }
                bytes = Some(CodeBytes { start: pc, bytes: code.into() });
            }
            let checked = bytes.as_ref().map(|code| code.bytes.clone());
            match lower(&lifted.version, bytes, &mut self.natives, &mut self.work) {
                Ok(lowered) => break (lifted, lowered, checked),
                Err(LowerError::TooLarge) if max > 1 => max /= 2,
                Err(LowerError::Native(NativeError::Full)) if !self.natives_are_fresh() => {
                    self.clear()
                }
                Err(error) => return Err(error),
            }
        };
        let entry = BlockEntry {
            pc,
            end: lifted.end,
            count: lifted.count,
            checked,
            counter: 0,
            user: if purpose == Purpose::Block { self.marks.remove(&pc).unwrap_or(0) } else { 0 },
            code: self.code.clone(),
            lifted: OnceCell::new(),
        };
        let depends_to = depends_to(&lifted);
        recycle(lifted);
        let first = pc >> PAGE_SHIFT;
        let last = depends_to.wrapping_sub(1).max(pc) >> PAGE_SHIFT;
        for page in first..=last {
            let pcs = self.pages.entry(page).or_default();
            if !pcs.contains(&pc) {
                pcs.push(pc);
            }
        }
        Ok(NonNull::from(Box::leak(Box::new(Block {
            entry,
            start: lowered.code.as_ptr(),
            links: UNLINKED,
            linked_from: SmallVec::new(),
            lowered,
            depends_to,
        }))))
    }

    /// Those of `source` that can be fetched.
    fn bytes(&self, source: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (source.end - source.start) as usize];
        let len = self.code.fetch(source.start, &mut bytes);
        bytes.truncate(len);
        bytes
    }

    fn natives_are_fresh(&self) -> bool {
        self.blocks.is_empty() && self.singles.is_empty()
    }

    /// Calls `f` on every entry, after which nothing is known of blocks that were dropped.
    pub fn for_each_entry(&mut self, mut f: impl FnMut(&mut BlockEntry)) {
        self.marks.clear();
        for block in self.blocks.values_mut() {
            // SAFETY: blocks in the map are alive, and `&mut self` excludes other references.
            f(unsafe { &mut block.as_mut().entry });
        }
    }

    /// Drops the blocks with bytes in `start..end`; returns whether there were any.
    pub fn invalidate(&mut self, start: u64, end: u64) -> bool {
        if start >= end {
            return false;
        }
        let pages = (start >> PAGE_SHIFT)..=((end - 1) >> PAGE_SHIFT);
        let few = (pages.end() - pages.start()) < self.pages.len() as u64;
        let mut pcs: Vec<u64> = if few {
            pages.filter_map(|p| self.pages.get(&p)).flatten().copied().collect()
        } else {
            self.pages
                .iter()
                .filter(|(p, _)| pages.contains(p))
                .flat_map(|(_, pcs)| pcs)
                .copied()
                .collect()
        };
        pcs.sort_unstable();
        pcs.dedup();
        let mut dropped: Vec<BlockRef> = Vec::new();
        for pc in pcs {
            for map in [&mut self.blocks, &mut self.singles] {
                let hit = |b: &BlockRef| {
                    // SAFETY: blocks in the maps are alive.
                    let block = unsafe { b.as_ref() };
                    block.entry.pc < end
                        && start < block.depends_to.max(block.entry.pc.saturating_add(1))
                };
                if map.get(&pc).is_some_and(hit) {
                    dropped.extend(map.remove(&pc));
                }
            }
        }
        if dropped.is_empty() {
            return false;
        }
        self.generation += 1;
        for block in dropped {
            // SAFETY: the block is alive, and `&mut self` excludes other references.
            let (pc, user, links, linked_from) = unsafe {
                let block = &mut *block.as_ptr();
                (
                    block.entry.pc,
                    block.entry.user,
                    std::mem::replace(&mut block.links, UNLINKED),
                    std::mem::take(&mut block.linked_from),
                )
            };
            if let Some(front) = &mut self.front {
                front.remove(pc);
            }
            if user != 0 && self.marks.len() < MOST_MARKS {
                self.marks.insert(pc, user);
            }
            for mut other in linked_from {
                // SAFETY: who links to a living block is alive: see below.
                let other = unsafe { other.as_mut() };
                other
                    .links
                    .iter_mut()
                    .filter(|link| std::ptr::eq(**link, block.as_ptr()))
                    .for_each(|link| *link = std::ptr::null());
            }
            for mut other in links.into_iter().filter_map(|link| NonNull::new(link.cast_mut())) {
                // SAFETY: links lead to living blocks: the loop above.
                unsafe { other.as_mut() }.linked_from.retain(|from| *from != block);
            }
            // SAFETY: it came from a box, is in no map or table any more, and no link leads to it
            // or names it.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
        }
        true
    }

    /// Drops all blocks and natives.
    pub fn clear(&mut self) {
        self.generation += 1;
        if let Some(front) = &mut self.front {
            front.clear();
        }
        self.pages.clear();
        for (_, block) in self.blocks.drain().chain(self.singles.drain()) {
            // SAFETY: it came from a box, and everything that referred to it is dropped too.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
        }
        // Without memory for a fresh pool the thunks stay where they are, and their space is lost.
        let _ = self.natives.clear();
    }

    /// In a forked child: takes the blocks over from the parent.
    ///
    /// # Errors
    /// What the kernel said; no block must be run then.
    pub fn unshare_after_fork(&mut self) -> io::Result<()> {
        self.natives.unshare_after_fork()
    }
}

/// What a block is made for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// To be run again and again.
    Block,
    /// To be run once: one instruction.
    Single,
}

/// One past the last byte that made a block what it is: its end, unless it ends in a trap, which
/// other bytes behind could make an instruction.
fn depends_to(lifted: &LiftedBlock) -> u64 {
    match lifted.version.blocks.first().map(|block| &block.term) {
        Some(Term::Guest(GuestTerm::Trap { pc, .. })) => pc.saturating_add(LENGTH).max(lifted.end),
        _ => lifted.end.max(lifted.pc),
    }
}

/// How many instructions of a block there are up to the first that writes memory, that one
/// included.
fn count_until_store(lifted: &LiftedBlock) -> u32 {
    let version = &lifted.version;
    let writes = |inst: &Inst| match inst.op {
        Op::Store => true,
        Op::Native => {
            inst.native.is_none_or(|n| version.natives[n.index()].effects.contains(Effects::WRITE))
        }
        _ => false,
    };
    let insts = version.blocks.first().map_or(&[][..], |block| &block.insts);
    let until = insts.iter().position(writes).map_or(insts.len(), |store| store + 1);
    insts[..until].iter().filter(|inst| inst.op == Op::At).count() as u32
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.clear();
    }
}
