//! The interpreter's blocks by pc: a hash map behind a small direct-mapped table, and links from
//! block to block.
//!
//! Data: a [`Cache`] owns the blocks, the thunks of their natives, and the table ([`Front`]).
//! Others refer to blocks by pointer.
//!
//! Invariants:
//! * A pointer to a block is valid until the next invalidation, which needs `&mut Cache`.
//! * No link dangles. A block knows the blocks that it links to and those that link to it, so a
//!   block that is dropped is first removed from the table and from both kinds of lists.
//! * A block was made either from bytes that cannot change without an invalidation
//!   ([`Fetch::watch`]), or from a copy that it compares with memory at each entry
//!   ([`BlockEntry::is_checked`]).
//!
//! Only the [`Interp`](super::Interp) that owns the cache calls it, on one thread, without a lock.
//!
//! Example: block A at 0x1000 ends with `jmp 0x2000`. The first time, [`Cache::successor`] makes
//! block B, sets `A.links[0]` to B and adds A to B's `linked_from`. `invalidate(0x2000, 0x2001)`
//! sets `A.links[0]` to null again and drops B; its `user` word waits in `marks` for the next block
//! at 0x2000.

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
use std::ops::Range;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

/// What a policy sees of a block.
pub struct BlockEntry {
    /// Guest pc of the first instruction.
    pub pc: u64,
    /// First guest byte after the block.
    pub end: u64,
    /// Number of guest instructions.
    pub count: u32,
    /// The bytes that the block was made from, if plain stores may change them. The interpreter
    /// compares them with memory at each entry.
    checked: Option<Arc<[u8]>>,
    /// For the policy; initially 0. The dynamo mode keeps a trace head's counter here.
    pub counter: u32,
    /// For the policy; initially 0. The dynamo mode keeps a fragment's number here.
    pub user: u32,
    code: Rc<dyn Fetch>,
    lifted: OnceCell<Arc<LiftedBlock>>,
}

impl BlockEntry {
    /// May plain stores change the bytes that the block was made from?
    pub fn is_checked(&self) -> bool {
        self.checked.is_some()
    }

    /// The block's IR, lifted again from guest memory at the first request. It is not kept when the
    /// block is made because few blocks are ever recorded.
    pub fn lifted(&self) -> Arc<LiftedBlock> {
        let lift = || match &self.checked {
            None => lift_block(self.pc, &*self.code, self.count as usize),
            Some(bytes) => {
                let lifted =
                    lift_block(self.pc, &Bytes { start: self.pc, bytes }, self.count as usize);
                LiftedBlock { checked: Some(bytes.clone()), ..lifted }
            }
        };
        self.lifted.get_or_init(|| Arc::new(lift())).clone()
    }
}

/// A cached block.
pub struct Block {
    /// What a policy sees.
    pub entry: BlockEntry,
    /// The first operation.
    pub start: *const Code,
    /// The blocks that the direct edges lead to; the first is that of a branch taken. Null until
    /// the edge is passed.
    pub links: [*const Block; 2],
    /// The blocks that link to this one.
    linked_from: SmallVec<[BlockRef; 2]>,
    /// The operations.
    pub lowered: Lowered,
    /// See [`depends_to`].
    depends_to: u64,
}

/// The direct-mapped table in front of the map, indexed by the upper bits of a hash of the pc.
pub struct Front {
    entries: [(u64, *const Block); FRONT_SIZE],
}

// SAFETY: the only table that threads share is `EMPTY`, which is never changed.
unsafe impl Sync for Front {}

/// The table of a cache without blocks. It is all zeros and so costs no memory.
static EMPTY: Front = Front { entries: [(0, std::ptr::null()); FRONT_SIZE] };

/// Binary logarithm of the entries of [`Front`] (guess: 128 KiB for each thread; if it is too low,
/// indirect transfers miss the table and return to [`Interp::run`](super::Interp::run)).
const FRONT_BITS: u32 = 13;
const FRONT_SIZE: usize = 1 << FRONT_BITS;

impl Front {
    fn new() -> Box<Front> {
        // SAFETY: an entry of zeros is a pc and a null pointer.
        unsafe { Box::new_zeroed().assume_init() }
    }

    #[inline(always)]
    fn index(pc: u64) -> usize {
        (pc.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - FRONT_BITS)) as usize
    }

    /// The block at `pc`, null if it is not in the table.
    #[inline(always)]
    pub fn find(&self, pc: u64) -> *const Block {
        let (known, block) = self.entries[Front::index(pc)];
        if known == pc { block } else { std::ptr::null() }
    }

    fn put(&mut self, pc: u64, block: BlockRef) {
        self.entries[Front::index(pc)] = (pc, block.as_ptr());
    }

    fn remove(&mut self, pc: u64) {
        let entry = &mut self.entries[Front::index(pc)];
        if entry.0 == pc {
            *entry = (0, std::ptr::null());
        }
    }

    fn clear(&mut self) {
        self.entries.fill((0, std::ptr::null()));
    }
}

/// Binary logarithm of the bytes of a page.
const PAGE_SHIFT: u32 = 12;
/// Greatest number of `user` words kept for dropped blocks (guess: it bounds the memory for a guest
/// that changes its code all the time; a block whose word is not kept starts with 0, so edges to it
/// are not watched for its sake).
const MOST_MARKS: usize = 1 << 14;
/// [`MAX_LENGTH`] as a distance between addresses.
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
    /// For each page, the pcs of the blocks that depend on bytes of it.
    pages: FxHashMap<u64, Vec<u64>>,
    /// Incremented whenever blocks are dropped.
    generation: u64,
    /// The `user` words of dropped blocks, by pc, for the blocks that are made there later.
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

    /// See [`Interp::reserve`](super::Interp::reserve).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn reserve(&mut self) -> std::io::Result<()> {
        self.natives.reserve()
    }

    /// The memory that [`Cache::reserve`] mapped.
    pub fn reserved(&self) -> Vec<std::ops::Range<u64>> {
        self.natives.reserved()
    }

    /// Number of blocks, not counting those for stepping.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The reader of guest code.
    pub fn code(&self) -> Rc<dyn Fetch> {
        self.code.clone()
    }

    /// The table in front of the map.
    pub fn front(&self) -> *const Front {
        self.front.as_deref().unwrap_or(&EMPTY)
    }

    /// The block at `pc`, made if it does not exist. Making it may drop all other blocks, if the
    /// pool of thunks is full.
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

    /// The block at `pc`, if it exists.
    pub fn known(&self, pc: u64) -> Option<BlockRef> {
        self.blocks.get(&pc).copied()
    }

    /// The block of only the instruction at `pc`, made if it does not exist.
    pub fn single(&mut self, pc: u64) -> Result<BlockRef, LowerError> {
        if let Some(block) = self.singles.get(&pc) {
            return Ok(*block);
        }
        let block = self.make(pc, Purpose::Single)?;
        self.singles.insert(pc, block);
        Ok(block)
    }

    /// The block at `target`, which follows `block`. `link` is the number of the direct edge that
    /// leads there; it is `None` for an indirect edge. This may drop `block`.
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
            // SAFETY: no block was dropped meanwhile, and no other reference to this one exists.
            let known =
                unsafe { std::mem::replace(&mut block.as_mut().links[link], next.as_ptr()) };
            if known.is_null() {
                // SAFETY: as above.
                unsafe { next.as_mut() }.linked_from.push(block);
            }
        }
        Ok(next)
    }

    /// The first byte that cannot be fetched of the [`MAX_LENGTH`] bytes from `pc` on.
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
            // The page of a stepped instruction is not write-protected: the instruction may be the
            // one that stores to that page.
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
                // Lift the same copy that the block will compare with memory, since memory may
                // change at any time.
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
                    // The store may change the instructions after it, so the block ends there.
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

    /// The bytes of `source` up to the first that cannot be fetched.
    fn bytes(&self, source: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (source.end - source.start) as usize];
        let len = self.code.fetch(source.start, &mut bytes);
        bytes.truncate(len);
        bytes
    }

    fn natives_are_fresh(&self) -> bool {
        self.blocks.is_empty() && self.singles.is_empty()
    }

    /// Calls `f` on every entry, and forgets the `user` words of dropped blocks.
    pub fn for_each_entry(&mut self, mut f: impl FnMut(&mut BlockEntry)) {
        self.marks.clear();
        for block in self.blocks.values_mut() {
            // SAFETY: blocks in the map are alive, and `&mut self` excludes other references.
            f(unsafe { &mut block.as_mut().entry });
        }
    }

    /// Drops the blocks that depend on bytes in `start..end`; returns whether there were any.
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
                // SAFETY: a block that links to a living block is alive, because the loop below
                // removes each dropped block from `linked_from`.
                let other = unsafe { other.as_mut() };
                other
                    .links
                    .iter_mut()
                    .filter(|link| std::ptr::eq(**link, block.as_ptr()))
                    .for_each(|link| *link = std::ptr::null());
            }
            for mut other in links.into_iter().filter_map(|link| NonNull::new(link.cast_mut())) {
                // SAFETY: links lead to living blocks, because the loop above clears the links to
                // each dropped block.
                unsafe { other.as_mut() }.linked_from.retain(|from| *from != block);
            }
            // SAFETY: the block came from a box. No map, table, link or list refers to it any more.
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
            // SAFETY: the block came from a box, and everything that referred to it is dropped too.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
        }
        // If there is no memory for a fresh pool, the old thunks keep their space in it for good.
        let _ = self.natives.clear();
    }

    /// In a forked child: keeps the blocks and the thunks.
    pub fn inherit(&mut self) {
        self.natives.inherit();
    }
}

/// The purpose that a block is made for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Interpretation: as many instructions as a block may have.
    Block,
    /// Stepping: one instruction.
    Single,
}

/// One past the last byte that decides what the block is. That is its end, with one exception:
/// bytes that are no instruction (a trap) could become one if the bytes after them changed.
fn depends_to(lifted: &LiftedBlock) -> u64 {
    match lifted.version.blocks.first().map(|block| &block.term) {
        Some(Term::Guest(GuestTerm::Trap { pc, .. })) => pc.saturating_add(LENGTH).max(lifted.end),
        _ => lifted.end.max(lifted.pc),
    }
}

/// Number of the block's guest instructions up to and including the first that writes memory.
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
