//! The lifter: the only place that says what an x86 instruction means (docs/design.md, "One
//! semantics").
//!
//! [`lift_block`] turns the guest code at a pc into one `base` block of IR. [`class`] puts each
//! instruction into one of three groups:
//! * *modelled*: IR operations (`integer`, `control`, over operands from `operand`);
//! * *native*: the original instruction with its operands made explicit (`native`);
//! * *special* or a *trap*: it ends the block, and the runtime emulates it.
//!
//! Invariants of the emitted IR:
//! * It is one block, with `at pc` before each guest instruction; it ends in a [`Term::Guest`].
//! * Within an instruction every `put` comes after everything that can fault, so an instruction
//!   that faults has changed nothing. Restartable natives are the exception: their registers say
//!   how far they came.
//! * GS never appears in a [`Mem::seg`](dynasour_ir::Mem): its base is added explicitly. FS stays.
//!
//! Each thread has its own [`Lifter`], so lifting takes no lock.
//!
//! Example: `add [rdi+8], eax` at 0x1000 becomes
//!
//! ```text
//! at 0x1000
//! v0 = get.i64 rdi
//! v1 = load.i32 [v0 + 8]
//! v2 = get.i64 rax
//! v3 = trunc.i32 v2
//! v4 = add.i32 v1, v3
//! v5 = flags.add.i32 v1, v3
//! store.i32 [v0 + 8], v4
//! put rflags, v5
//! ```

pub mod class;
mod control;
mod host;
mod integer;
mod native;
mod operand;

pub use crate::decode::{Bytes, Fetch};

use crate::decode::{Decoded, Reader};
use class::{Class, ClassEntry};
use control::Flow;
use dynasour_ir::{Block, Builder, GuestTerm, Inst, Operand, Term, Trap, Ty, Version};
use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpKind};
use operand::Emit;
use std::cell::RefCell;
use std::sync::Arc;

/// The usual limit of guest instructions in a block (guess; only speed depends on it: shorter
/// blocks cost more dispatches).
pub const MAX_BLOCK: usize = 64;

/// IR instructions for which a new block reserves room (guess; only the number of reallocations
/// depends on it).
const TYPICAL_BODY: usize = 40;

/// A guest block in the form that version `base` executes.
#[derive(Clone, Debug)]
pub struct LiftedBlock {
    /// Guest pc of its first instruction.
    pub pc: u64,
    /// One past its last guest byte: the block was made from the bytes `pc..end`.
    pub end: u64,
    /// The IR: a base version with one block.
    pub version: Version,
    /// Number of guest instructions, including the one that ends the block.
    pub count: u32,
    /// The bytes from `pc` on that the block was made from, if stores may change them without
    /// notification. Code that is kept must compare these bytes with memory before it executes the
    /// block's effects.
    pub checked: Option<Arc<[u8]>>,
}

/// Lifts blocks, and reuses the memory of blocks that were given back.
pub struct Lifter {
    info: InstructionInfoFactory,
    /// Empty lists with capacity, from a block that was given back.
    spare: Option<(Vec<Inst>, Vec<Ty>)>,
}

impl Default for Lifter {
    fn default() -> Lifter {
        Lifter::new()
    }
}

thread_local! {
    static LIFTER: RefCell<Lifter> = RefCell::new(Lifter::new());
}

/// Lifts the block at `pc` with this thread's [`Lifter`]. `max_insts` is at least 1, usually
/// [`MAX_BLOCK`].
pub fn lift_block(pc: u64, code: &dyn Fetch, max_insts: usize) -> LiftedBlock {
    LIFTER.with_borrow_mut(|lifter| lifter.lift_block(pc, code, max_insts))
}

/// Gives back a block that is no longer needed; the next block is built in its memory.
pub fn recycle(block: LiftedBlock) {
    LIFTER.with_borrow_mut(|lifter| lifter.recycle(block));
}

/// The class of `inst`, with its prefixes and operands taken into account.
pub fn classify(inst: &Instruction) -> Class {
    refine(inst, class::entry(inst.code()))
}

fn refine(inst: &Instruction, entry: ClassEntry) -> Class {
    if entry.class == Class::Modelled {
        if inst.op0_kind() == OpKind::NearBranch16 {
            // An operand-size prefix on AMD's processors: the target is truncated to 16 bits.
            return Class::Special;
        }
        let memory_xchg = inst.mnemonic() == Mnemonic::Xchg && inst.op0_kind() == OpKind::Memory;
        if inst.has_lock_prefix() || memory_xchg {
            return Class::Native;
        }
    }
    entry.class
}

impl Lifter {
    /// A lifter.
    pub fn new() -> Lifter {
        Lifter { info: InstructionInfoFactory::new(), spare: None }
    }

    /// Takes a block's memory for the next one.
    pub fn recycle(&mut self, block: LiftedBlock) {
        let Version { mut types, blocks, .. } = block.version;
        if let Some(Block { mut insts, .. }) = blocks.into_iter().next() {
            insts.clear();
            types.clear();
            self.spare = Some((insts, types));
        }
    }

    /// Lifts the block at `pc`: up to a control transfer, system call, special or trap, at most
    /// `max_insts` long.
    pub fn lift_block(&mut self, pc: u64, code: &dyn Fetch, max_insts: usize) -> LiftedBlock {
        let mut version = Version::new("base", pc);
        let mut reader = Reader::new(code);
        let (insts, types) = self.spare.take().unwrap_or_default();
        version.types = types;
        version.types.reserve(TYPICAL_BODY);
        let mut builder = Builder::new(&mut version);
        builder.insts = insts;
        builder.insts.reserve(TYPICAL_BODY);
        let mut here = pc;
        let mut count = 0;
        let term = loop {
            if count as usize >= max_insts.max(1) {
                break GuestTerm::Goto(Operand::Const(here));
            }
            let start = here;
            builder.at(start);
            count += 1;
            let mut trap = |length: usize, trap| {
                here = start.wrapping_add(length as u64);
                GuestTerm::Trap { pc: start, trap }
            };
            let inst = match reader.decode(start) {
                Decoded::Inst(inst) => inst,
                Decoded::Invalid(length) => break trap(length, Trap::Undefined),
                Decoded::TooLong => break trap(crate::decode::MAX_LENGTH, Trap::Protection),
                Decoded::Unfetchable(length) => break trap(length, Trap::Fetch),
            };
            here = inst.next_ip();
            if let Flow::End(term) = self.lift(&mut builder, &inst) {
                break term;
            }
        };
        let insts = builder.insts;
        version.blocks.push(Block { params: Vec::new(), insts, term: Term::Guest(term) });
        LiftedBlock { pc, end: here, version, count, checked: None }
    }

    fn lift(&mut self, builder: &mut Builder<'_>, inst: &Instruction) -> Flow {
        let entry = class::entry(inst.code());
        let pc = inst.ip();
        let special = Flow::End(GuestTerm::Special { pc });
        let mut emit = Emit { b: builder, inst };
        match refine(inst, entry) {
            Class::Modelled => match emit.control() {
                Some(flow) => flow,
                None if emit.integer() => Flow::Next,
                None => special,
            },
            Class::Native => match emit.native(entry, &mut self.info) {
                Ok(()) => Flow::Next,
                Err(native::NotNative) => special,
            },
            Class::Special | Class::Unlisted => special,
            Class::Trap(trap) => Flow::End(GuestTerm::Trap { pc, trap }),
        }
    }
}
