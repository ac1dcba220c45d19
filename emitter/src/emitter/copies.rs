//! Copied blocks as the runtime uses them: made, entered, removed, counted.
//!
//! [`crate::blocks`] does the work. It knows neither the tables of indirect jumps nor the cache nor
//! the fragments of its emitter; each method here passes what is needed. This module owns no data.
//!
//! The caller holds the emitter, except where a method is marked async-signal-safe.
//!
//! Example: [`Emitter::copy`]`(0x1000, code)` gives the host address of the block at 0x1000, and
//! [`Emitter::copy_entry_point`] says how to enter it without the emitter. The guest's page at
//! 0x1000 changes: [`Emitter::remove_copied`] makes nothing lead to the block. When all threads
//! have been outside, [`Emitter::reclaim`] lets its memory be used again.

use crate::blocks::{BlockId, Copied, CopyFigures, Count, CounterId, Doomed, HeadCounts, LinkId};
use crate::emitter::{EmitError, Emitter, EntryPoint, ExitReason};
use crate::transfers::indirect::Via;
use crate::transfers::stack_returns::Returns;
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use std::ops::Range;

/// Making, entering and leaving blocks.
impl Emitter {
    /// The code for the block at `pc`, copied now if need be. [`EmitError::is_full`] asks the
    /// caller to [`Emitter::flush_all`] and try again.
    pub fn copy(&mut self, pc: u64, code: &dyn Fetch) -> Result<Copied, EmitError> {
        self.copied(pc, false, code)
    }

    /// As [`Emitter::copy`], but always the block itself, past counters and fragments.
    pub fn copy_block(&mut self, pc: u64, code: &dyn Fetch) -> Result<Copied, EmitError> {
        self.copied(pc, true, code)
    }

    fn copied(&mut self, pc: u64, want_block: bool, code: &dyn Fetch) -> Result<Copied, EmitError> {
        let Emitter { blocks, indirect, cache, fragments, .. } = self;
        blocks.copied(pc, want_block, code, indirect, cache, fragments)
    }

    /// Guest code does not run in place any more: its blocks are copied. The caller has retired
    /// everything, and all threads are outside.
    pub fn stop_in_place(&mut self) {
        self.blocks.stop_in_place();
    }

    /// The address to which a patch at `pc` of the guest's code is to jump, so that the guest comes
    /// to whatever links to `pc` lead to. The patch replaces the instructions up to `end`. None if
    /// these cannot be copied, or if guest code does not run in place.
    ///
    /// # Errors
    /// [`EmitError::is_full`] asks the caller to [`Emitter::flush_all`].
    pub fn entrance(
        &mut self,
        pc: u64,
        end: u64,
        code: &dyn Fetch,
    ) -> Result<Option<u64>, EmitError> {
        let Emitter { blocks, indirect, cache, fragments, .. } = self;
        blocks.entrance((pc, end), code, indirect, cache, fragments)
    }

    /// As [`Emitter::entrance`], for a jump of the guest's to `pc` that is made to lead here: no
    /// instruction is replaced.
    ///
    /// # Errors
    /// [`EmitError::is_full`] asks the caller to [`Emitter::flush_all`].
    pub fn entrance_beside(&mut self, pc: u64, code: &dyn Fetch) -> Result<Option<u64>, EmitError> {
        let Emitter { blocks, indirect, cache, fragments, .. } = self;
        blocks.entrance_beside(pc, code, indirect, cache, fragments)
    }

    /// Where to enter the code that [`Emitter::copy`] gave since the last flush.
    pub fn copy_entry_point(&self, entry: u64) -> EntryPoint {
        EntryPoint {
            stubs: self.stubs.enter,
            code: self.blocks.way_in(),
            loaded: entry,
            kept: self.indirect.returns().kept(),
        }
    }

    /// Runs the code at `entry` and all code that it leads to, on the guest state in `ctx`, until
    /// it leaves.
    ///
    /// # Safety
    /// As [`Emitter::enter`], and `entry` is what [`Emitter::copy`] said since the last flush.
    pub unsafe fn enter_copy(&self, ctx: *mut ThreadContext, entry: u64) -> ExitReason {
        // SAFETY: the caller's promise.
        unsafe { self.copy_entry_point(entry).run(ctx) }
    }

    /// The guest pc that a block's exit leads to, and whether it leads to the block there, whatever
    /// other links to that pc lead to.
    pub fn copy_exit(&self, link: LinkId) -> Option<(u64, bool)> {
        self.blocks.target_of(link)
    }

    /// After a run that left with a fault: makes `rip` of `ctx` the pc of the guest instruction
    /// that faulted, and every register what it was before that instruction. False if the guest's
    /// code has changed since the block was copied.
    pub fn copy_state(&mut self, ctx: &mut ThreadContext, code: &dyn Fetch) -> bool {
        self.blocks.state_at_fault(ctx, code, &self.indirect)
    }

    /// Figures about the copy tier.
    pub fn copy_figures(&self) -> CopyFigures {
        self.blocks.figures
    }

    /// The block whose code contains a host address. Async-signal-safe.
    pub fn block_at(&self, host_rip: u64) -> Option<BlockId> {
        self.blocks.at(host_rip).map(BlockId)
    }

    /// The guest pc of the block, counter or gate that `host_rip` is in.
    pub fn pc_of_block_at(&self, host_rip: u64) -> Option<u64> {
        self.blocks.pc_at(host_rip)
    }

    /// The guest pc and the host code of each block, counters among them.
    pub fn all_blocks(&self) -> impl Iterator<Item = (u64, Range<u64>)> {
        self.blocks.all()
    }

    /// As [`Emitter::all_blocks`], of the blocks made since the last call. None are noted unless the emitter
    /// [is watched](crate::Config::is_watched).
    pub fn take_new_blocks(&mut self) -> Vec<(u64, Range<u64>)> {
        self.blocks.take_new()
    }

    /// The code of the block at `pc`, whatever links to that pc lead to.
    pub fn block_entry(&self, pc: u64) -> Option<u64> {
        let (_, block) = self.blocks.place_and_block(pc)?;
        (block != 0).then(|| self.blocks.base + u64::from(block))
    }

    /// How the configuration wants copied blocks to return.
    pub fn wanted_returns(&self) -> Returns {
        self.blocks.wanted_returns()
    }
}

/// Targets of indirect transfers.
impl Emitter {
    /// The guest came to `pc` by an indirect transfer. If the code there is [copied](Emitter::copy)
    /// now, it begins with a checked entry.
    pub fn expect_indirect(&mut self, pc: u64, via: Via) {
        self.blocks.expect(pc, via);
    }

    /// Lets indirect transfers whose targets are carried in this way find the code at `pc`, which
    /// was [copied](Emitter::copy). [`EmitError::is_full`] asks the caller to
    /// [`Emitter::flush_all`].
    pub fn register_copy(&mut self, pc: u64, via: Via) -> Result<(), EmitError> {
        Ok(self.blocks.register(pc, via, &mut self.indirect, &mut self.cache)?)
    }

    /// Lets indirect transfers find where places lead now.
    pub(crate) fn register_moved(&mut self) {
        self.blocks.register_moved(&mut self.indirect, &mut self.cache);
    }
}

/// Removing blocks.
impl Emitter {
    /// Is some block made from a page with bytes in this range?
    pub fn is_copied_from(&self, range: &Range<u64>) -> bool {
        self.blocks.are_made_from(range)
    }

    /// Bytes of removed blocks that no new block has taken yet.
    pub fn copied_garbage(&self) -> usize {
        self.blocks.garbage()
    }

    /// Makes nothing lead into the blocks made from pages with bytes in `range`, and makes threads
    /// inside come out. When every thread has been outside, the caller
    /// [reclaims](Emitter::reclaim) the blocks.
    pub fn remove_copied(&mut self, range: &Range<u64>) -> Doomed {
        self.blocks.remove(range, &mut self.indirect, &self.cache, &self.fragments)
    }

    /// Lets the memory of the doomed be used again: every thread has been outside since they were
    /// removed.
    pub fn reclaim(&mut self, doomed: Doomed) {
        self.blocks.reclaim(doomed);
    }

    /// A block has left because its guest bytes have changed: drops it, so that the next one at
    /// this pc is made from the bytes that are there.
    pub fn copied_stale(&mut self, pc: u64) {
        self.blocks.drop_stale(pc, &mut self.indirect, &self.cache, &self.fragments);
    }
}

/// Counting heads.
impl Emitter {
    /// Sets which heads get counters from now on.
    pub fn count_heads(&mut self, counts: HeadCounts) {
        self.blocks.heads.count(counts);
    }

    /// The executions that a counter has counted since it was set last. The counter has left.
    pub fn counted(&self, counter: CounterId) -> Option<Count> {
        self.blocks.heads.counted(counter)
    }

    /// Lets a counter leave at the `n`th execution from now. A counter that has left must be set
    /// again.
    pub fn set_counter(&self, counter: CounterId, n: u64) {
        self.blocks.heads.set(counter, n);
    }

    /// Is the place at `pc` a head because of a call?
    pub fn is_called(&self, pc: u64) -> bool {
        self.blocks.is_called(pc)
    }

    /// The head at `pc` is not counted any more: links lead to its block.
    pub fn stop_counting(&mut self, pc: u64) {
        if let Some((place, block)) = self.blocks.place_and_block(pc) {
            self.lead_place(place, block);
        }
    }

    /// If links to the head at `pc` lead to its counter, they lead to its block from now on.
    /// Returns whether they led to the counter.
    pub fn pause_counting(&mut self, pc: u64) -> bool {
        let Some((place, block)) = self.blocks.counted_place(pc) else { return false };
        self.lead_place(place, block);
        true
    }

    /// If links to the head at `pc` lead to its block, they lead to its counter from now on, which
    /// leaves at the `n`th execution. Returns whether they led to the block.
    pub fn count_again(&mut self, pc: u64, n: u64) -> bool {
        let Some((place, counter, start)) = self.blocks.paused_place(pc) else { return false };
        self.set_counter(counter, n);
        self.lead_place(place, start);
        true
    }

    /// The place at `pc` is a head from now on: a trace goes on there, and not by a link.
    pub fn make_head(&mut self, pc: u64) {
        if self.blocks.heads.are_counted() {
            let place = self.blocks.place(pc);
            self.blocks.found_head(place, false);
            self.blocks.count_found(&mut self.cache, &self.fragments);
            self.register_moved();
        }
    }
}
