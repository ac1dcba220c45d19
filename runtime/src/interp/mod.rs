//! The interpreter: runs version `base` of every region (docs/design.md, "One semantics").
//!
//! A guest block is lifted once, lowered once to a list of operations ([`code`], [`lower`]) and
//! cached by pc ([`cache`]). [`Interp::run`] executes blocks until something needs the dispatcher.
//!
//! Words: *edge*, the passage from one block to the next; *link*, the pointer by which a block
//! remembers where one of its direct edges led; *native*, an original instruction that a generated
//! thunk executes ([`native`]).
//!
//! A [`Policy`] is asked about the edges: the dynamo mode counts trace heads, enters fragments and
//! records there. The policy says which edges it wants to see ([`Watch`]). All others are followed
//! from block to block without coming back to [`Interp::run`].
//!
//! Data: an [`Interp`] owns its [`Cache`], which owns the blocks and the thunks. The guest's state
//! is the caller's [`ThreadContext`]; `scratch` in it belongs to the interpreter during a run.
//!
//! Invariants:
//! * At every [`Stop`] the context holds the exact guest state.
//! * Between stops registers and memory are exact too. The arithmetic flags are in a record
//!   ([`flags`]), and rip is not kept.
//! * A block whose bytes plain stores may change ([`Fetch::is_writable`]) compares them at each
//!   entry and ends after its first store. A block whose bytes have changed is dropped and made
//!   again.
//!
//! Each guest thread has an `Interp` of its own and calls it without a lock. Only [`fixup`] may be
//! called in a signal handler.
//!
//! Example: `l: add eax, ecx; sub ecx, 1; jne l; syscall` with rip at `l`. The first run of the
//! loop's block ends with its edge to itself. Its link is still null, so `run` finds the block in
//! the cache, sets the link and asks the policy. From then on the block's last operation follows
//! the link by itself, unless the policy watches jumps backward or `pending` is set. When ecx is 0,
//! the fall-through edge leads to the block of the `syscall`, and `run` returns [`Stop::Syscall`]
//! with rip after it and the flags computed from the record.

mod cache;
mod code;
mod executable;
mod flags;
mod lower;
mod native;
pub mod noncanonical;
mod pool;
mod select;
mod xstate;

pub use cache::BlockEntry;
pub use executable::ExecutableCode;
pub use lower::LowerError;
pub use native::NativeError;
pub use native::fixup as thunk_fixup;

use crate::memory::{self, FaultInfo};
use cache::{Block, Cache, Front};
use code::{EXIT, FAULTED, RECORD, STALE};
use dynasour_guest::ThreadContext;
use dynasour_guest::lift::Fetch;
use dynasour_ir::semantics::ARITH_FLAGS;
use dynasour_ir::{Trap, Ty};
use flags::{Form, Kind};
use lower::End;
use std::convert::Infallible;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use xstate::GuestMxcsr;

/// Where to continue after a fault of the host instruction at `host_rip`, if that is a guest access
/// in [`memory`] or a native in its thunk. The handler of SIGSEGV, SIGBUS, SIGFPE and SIGILL calls
/// [`memory::note_fault`] and then sets rip to this address.
pub fn fixup(host_rip: u64) -> Option<u64> {
    memory::fixup(host_rip).or_else(|| thunk_fixup(host_rip))
}

/// Why the interpreter returned. The thread context holds the exact guest state.
#[derive(Clone, PartialEq, Debug)]
pub enum Stop<P> {
    /// `syscall`; rip is after it.
    Syscall,
    /// An instruction for the runtime; rip is at it.
    Special {
        /// The instruction.
        pc: u64,
    },
    /// An instruction that raises a signal whatever its operands are; rip is at it.
    Trap {
        /// The instruction.
        pc: u64,
        /// Which trap.
        trap: Trap,
    },
    /// An instruction faulted; rip is at it.
    Fault {
        /// The instruction.
        pc: u64,
        /// The kernel's report.
        info: FaultInfo,
    },
    /// `pending` became nonzero; rip is at the next block.
    Pending,
    /// The policy stopped at an edge; rip is at the block that the edge leads to.
    Policy(P),
    /// The block at rip cannot be interpreted: a broken invariant of dynasour.
    Broken(LowerError),
}

impl Stop<Infallible> {
    /// The same stop in the type for any policy.
    pub fn without_policy<P>(self) -> Stop<P> {
        match self {
            Stop::Syscall => Stop::Syscall,
            Stop::Special { pc } => Stop::Special { pc },
            Stop::Trap { pc, trap } => Stop::Trap { pc, trap },
            Stop::Fault { pc, info } => Stop::Fault { pc, info },
            Stop::Pending => Stop::Pending,
            Stop::Policy(never) => match never {},
            Stop::Broken(error) => Stop::Broken(error),
        }
    }
}

/// The kind of an edge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EdgeKind {
    /// A branch not taken, or the end of a block that reached its greatest length.
    FallThrough,
    /// A direct jump or a branch taken.
    Taken {
        /// The target is not after the branch.
        backward: bool,
    },
    /// A call, direct or not.
    Call,
    /// A return.
    Ret,
    /// An indirect jump.
    Indirect,
}

/// Which edges a [`Policy`] wants to see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch {
    /// None. The policy still sees an edge that is passed for the first time.
    None,
    /// Calls, jumps backward, and edges to blocks whose [`BlockEntry::user`] is not 0.
    Heads,
    /// All of them.
    All,
}

impl Watch {
    fn word(self) -> u64 {
        match self {
            Watch::None => 0,
            Watch::Heads => u64::from(code::HEAD_EDGE) | code::USER_MASK,
            Watch::All => u64::from(code::ANY_EDGE),
        }
    }
}

/// Decides at edges between blocks whether the interpreter goes on.
pub trait Policy {
    /// What [`Stop::Policy`] carries.
    type Stop;

    /// Which edges the policy wants to see. Asked when a run starts and after each
    /// [`Policy::edge`].
    fn watch(&self) -> Watch;

    /// Control goes from the block at `from` to the block `to`. If this returns `Some`,
    /// [`Interp::run`] returns before it executes `to`. An edge that is passed for the first time
    /// comes here whether it is watched or not.
    ///
    /// `context` has the exact registers, but neither rip nor the arithmetic flags.
    fn edge(
        &mut self,
        context: &ThreadContext,
        from: u64,
        to: &mut BlockEntry,
        kind: EdgeKind,
    ) -> Option<Self::Stop>;
}

/// The policy that never stops.
pub struct NoPolicy;

impl Policy for NoPolicy {
    type Stop = Infallible;

    fn watch(&self) -> Watch {
        Watch::None
    }

    fn edge(
        &mut self,
        _: &ThreadContext,
        _: u64,
        _: &mut BlockEntry,
        _: EdgeKind,
    ) -> Option<Infallible> {
        None
    }
}

/// All of guest memory, read as code.
#[derive(Clone, Copy, Debug)]
pub struct GuestCode;

impl Fetch for GuestCode {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        memory::fetch_code(addr, buf)
    }
}

/// An interpreter with its cache of blocks.
pub struct Interp {
    cache: Cache,
}

impl Interp {
    /// An interpreter that may execute all of guest memory.
    pub fn new() -> Interp {
        Interp::with_code(Box::new(GuestCode))
    }

    /// An interpreter that reads code through `code`, such as [`ExecutableCode`].
    pub fn with_code(code: Box<dyn Fetch>) -> Interp {
        Interp { cache: Cache::new(code.into()) }
    }

    /// Maps the memory for thunks now instead of at the first native. Called before the guest's
    /// first instruction, so that a failure is reported before the guest runs.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn reserve(&mut self) -> std::io::Result<()> {
        self.cache.reserve()
    }

    /// The memory that [`Interp::reserve`] mapped.
    pub fn reserved(&self) -> Vec<std::ops::Range<u64>> {
        self.cache.reserved()
    }

    /// Runs from `context.rip` until something needs the dispatcher.
    pub fn run<P: Policy>(&mut self, context: &mut ThreadContext, policy: &mut P) -> Stop<P::Stop> {
        let mxcsr = GuestMxcsr::load(context);
        let stop = self.run_blocks(context, policy);
        mxcsr.store(context);
        stop
    }

    fn run_blocks<P: Policy>(
        &mut self,
        context: &mut ThreadContext,
        policy: &mut P,
    ) -> Stop<P::Stop> {
        let mut block = match self.cache.block(context.rip) {
            Ok(block) => block,
            Err(error) => return Stop::Broken(error),
        };
        open(context, self.cache.front(), policy.watch());
        loop {
            if context.pending.load(Ordering::Relaxed) != 0 {
                // SAFETY: blocks live until they are invalidated, which takes `&mut self` and so
                // cannot happen in this loop, except by `Cache::successor`, whose result replaces
                // `block`.
                let pc = unsafe { block.as_ref() }.entry.pc;
                close(context, pc);
                return Stop::Pending;
            }
            let end = execute(context, block);
            block = current(context).unwrap_or(block);
            // SAFETY: as above.
            let from = unsafe { block.as_ref() };
            if end == FAULTED {
                return fault(context, from);
            }
            if end == STALE {
                let pc = from.entry.pc;
                self.cache.invalidate(pc, pc + 1);
                block = match self.cache.block(pc) {
                    Ok(block) => block,
                    Err(error) => {
                        close(context, pc);
                        return Stop::Broken(error);
                    }
                };
                continue;
            }
            let exit = context.scratch[(EXIT - RECORD) as usize];
            let (target, link) = match from.lowered.end {
                End::Goto(to) | End::Call(to) => (to, Some(0)),
                End::Branch(taken, _) if exit != 0 => (taken, Some(0)),
                End::Branch(_, fall) => (fall, Some(1)),
                End::CallIndirect | End::Ret | End::Indirect => (exit, None),
                End::Syscall(next) => {
                    close(context, next);
                    return Stop::Syscall;
                }
                End::Special(pc) => {
                    close(context, pc);
                    return Stop::Special { pc };
                }
                End::Trap(pc, trap) => {
                    close(context, pc);
                    return Stop::Trap { pc, trap };
                }
            };
            if link.is_none() && noncanonical::is_noncanonical(target) {
                return self.refuse(context, from.lowered.last_pc);
            }
            let kind = edge_kind(from, target, exit);
            let from = from.entry.pc;
            let mut next = match self.cache.successor(block, link, target) {
                Ok(next) => next,
                Err(error) => {
                    close(context, target);
                    return Stop::Broken(error);
                }
            };
            // SAFETY: as above; no other reference to this block exists here.
            let to = unsafe { &mut next.as_mut().entry };
            if let Some(stop) = policy.edge(context, from, to, kind) {
                close(context, target);
                return Stop::Policy(stop);
            }
            set_watch(context, policy.watch());
            block = next;
        }
    }

    /// Undoes the indirect transfer at `pc`, whose target is not canonical, and stops before it.
    #[cold]
    fn refuse<P>(&self, context: &mut ThreadContext, pc: u64) -> Stop<P> {
        close(context, pc);
        noncanonical::undo_transfer(context, pc, &*self.cache.code());
        Stop::Trap { pc, trap: Trap::Protection }
    }

    /// Executes one guest instruction. Returns `None` if it completed; rip is then at the next one.
    /// At a stop other than [`Stop::Syscall`] the instruction has not been executed. `pending` is
    /// ignored.
    pub fn run_one(&mut self, context: &mut ThreadContext) -> Option<Stop<Infallible>> {
        let mxcsr = GuestMxcsr::load(context);
        let stop = self.run_single(context);
        mxcsr.store(context);
        stop
    }

    fn run_single(&mut self, context: &mut ThreadContext) -> Option<Stop<Infallible>> {
        // With all edges watched no operation follows a link.
        open(context, self.cache.front(), Watch::All);
        let (block, end) = loop {
            let block = match self.cache.single(context.rip) {
                Ok(block) => block,
                Err(error) => {
                    close(context, context.rip);
                    return Some(Stop::Broken(error));
                }
            };
            match execute(context, block) {
                STALE => self.cache.invalidate(context.rip, context.rip + 1),
                end => break (block, end),
            };
        };
        // SAFETY: the block lives until it is invalidated, which takes `&mut self`.
        let block = unsafe { block.as_ref() };
        if end == FAULTED {
            return Some(fault(context, block));
        }
        let exit = context.scratch[(EXIT - RECORD) as usize];
        if matches!(block.lowered.end, End::CallIndirect | End::Ret | End::Indirect)
            && noncanonical::is_noncanonical(exit)
        {
            return Some(self.refuse(context, block.lowered.last_pc));
        }
        let (rip, stop) = match block.lowered.end {
            End::Goto(to) | End::Call(to) => (to, None),
            End::Branch(taken, fall) => (if exit != 0 { taken } else { fall }, None),
            End::CallIndirect | End::Ret | End::Indirect => (exit, None),
            End::Syscall(next) => (next, Some(Stop::Syscall)),
            End::Special(pc) => (pc, Some(Stop::Special { pc })),
            End::Trap(pc, trap) => (pc, Some(Stop::Trap { pc, trap })),
        };
        close(context, rip);
        stop
    }

    /// The reader of guest code that this interpreter was made with.
    pub fn code(&self) -> Rc<dyn Fetch> {
        self.cache.code()
    }

    /// The entry of the block at `pc`; the block is made if it does not exist. For the dispatcher,
    /// which enters blocks without an edge.
    ///
    /// # Errors
    /// See [`LowerError`].
    pub fn entry(&mut self, pc: u64) -> Result<&mut BlockEntry, LowerError> {
        let mut block = self.cache.block(pc)?;
        // SAFETY: the block lives until it is invalidated, which the returned borrow of `self`
        // excludes.
        Ok(unsafe { &mut block.as_mut().entry })
    }

    /// The entry of the block at `pc`, if it exists. Reads no guest code.
    pub fn known_entry(&mut self, pc: u64) -> Option<&mut BlockEntry> {
        let mut block = self.cache.known(pc)?;
        // SAFETY: as in `entry`.
        Some(unsafe { &mut block.as_mut().entry })
    }

    /// Calls `f` on the entries of all blocks, in no order. For policies that keep data in them.
    pub fn for_each_entry(&mut self, f: impl FnMut(&mut BlockEntry)) {
        self.cache.for_each_entry(f);
    }

    /// Drops the blocks that were made from bytes in `start..end`. Returns whether there were any.
    pub fn invalidate(&mut self, start: u64, end: u64) -> bool {
        self.cache.invalidate(start, end)
    }

    /// Drops all blocks and natives.
    pub fn invalidate_all(&mut self) {
        self.cache.clear();
    }

    /// In a forked child: keeps the blocks, and the memory of the thunks, which is shared with the
    /// parent until a thunk is made.
    pub fn inherit(&mut self) {
        self.cache.inherit();
    }

    /// The first byte of the instruction at `pc` that cannot be fetched, after a [`Trap::Fetch`]
    /// there.
    pub fn first_unfetchable(&self, pc: u64) -> u64 {
        self.cache.first_unfetchable(pc)
    }

    /// How many blocks are cached.
    pub fn block_count(&self) -> usize {
        self.cache.len()
    }
}

impl Default for Interp {
    fn default() -> Interp {
        Interp::new()
    }
}

/// Puts the context's arithmetic flags into the record, and sets the words of `scratch` that
/// operations rely on.
fn open(context: &mut ThreadContext, front: *const Front, watch: Watch) {
    let bits = context.rflags & ARITH_FLAGS;
    let mut set = |slot: u16, word: u64| context.scratch[(slot - RECORD) as usize] = word;
    set(RECORD, u64::from(Kind::new(Form::Bits, Ty::I64).0));
    set(RECORD + 1, bits);
    set(code::ZERO, 0);
    set(code::FRONT, front as u64);
    set_watch(context, watch);
}

fn set_watch(context: &mut ThreadContext, watch: Watch) {
    context.scratch[(code::WATCH - RECORD) as usize] = watch.word();
}

/// The block that is being executed.
fn current(context: &ThreadContext) -> Option<BlockRef> {
    NonNull::new(context.scratch[(code::CURRENT - RECORD) as usize] as *mut Block)
}

/// Puts the recorded flags and `rip` into the context.
fn close(context: &mut ThreadContext, rip: u64) {
    let record = &context.scratch;
    let bits = Kind(record[0] as u16).bits(record[1], record[2], record[3]);
    context.rflags = context.rflags & !ARITH_FLAGS | bits;
    context.rip = rip;
}

/// Executes the operations of `block`, and of the blocks that it reaches over links. Afterwards
/// [`current`] is the block that was executed last. Returns null at its end, or [`FAULTED`], or
/// [`STALE`] if its bytes have changed; then none of its operations was executed.
#[inline(always)]
fn execute(context: &mut ThreadContext, block: BlockRef) -> *const code::Code {
    context.scratch[(code::CURRENT - RECORD) as usize] = block.as_ptr() as u64;
    let words = std::ptr::from_mut(context).cast::<u64>();
    // SAFETY: the caller's block is alive.
    let mut next = unsafe { block.as_ref() }.start;
    while !code::ended(next) {
        // SAFETY: blocks keep the invariant of `code`: `next` is one of their operations.
        next = unsafe { ((*next).run)(words, next) };
    }
    next
}

#[cold]
fn fault<P>(context: &mut ThreadContext, block: &Block) -> Stop<P> {
    let op = context.scratch[(EXIT - RECORD) as usize];
    let start = block.lowered.code.as_ptr() as u64;
    let index = (op.wrapping_sub(start) / size_of::<code::Code>() as u64) as u32;
    let sites = &block.lowered.sites;
    let site = match sites.binary_search_by_key(&index, |s| s.op) {
        Ok(found) => sites[found],
        Err(_) => {
            return Stop::Broken(LowerError::Unsupported(format!("a fault of operation {index}")));
        }
    };
    // SAFETY: the words are those of the context, whose record is open.
    let bits = unsafe { site.flags.bits(std::ptr::from_ref(context).cast()) };
    context.rflags = context.rflags & !ARITH_FLAGS | bits;
    context.rip = site.pc;
    Stop::Fault { pc: site.pc, info: memory::last_fault() }
}

fn edge_kind(block: &Block, target: u64, exit: u64) -> EdgeKind {
    let taken = EdgeKind::Taken { backward: target <= block.lowered.last_pc };
    match block.lowered.end {
        End::Goto(to) if to == block.entry.end => EdgeKind::FallThrough,
        End::Goto(_) => taken,
        End::Branch(..) if exit == 0 => EdgeKind::FallThrough,
        End::Branch(..) => taken,
        End::Call(_) | End::CallIndirect => EdgeKind::Call,
        End::Ret => EdgeKind::Ret,
        End::Indirect | End::Syscall(_) | End::Special(_) | End::Trap(..) => EdgeKind::Indirect,
    }
}

/// A pointer to a block of the cache.
type BlockRef = NonNull<Block>;

#[cfg(test)]
mod bulk_tests;
#[cfg(test)]
mod tests;
