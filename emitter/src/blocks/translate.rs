//! Translates one guest block: its instructions are copied byte for byte, but for control transfers
//! and operands that are relative to rip or gs.
//!
//! **Data.** The [`Translation`] has no place yet: fields that depend on its place are listed in
//! it. It is a function of the guest's bytes and of what 32-bit displacements reach from the cache.
//! So translating a block again tells which guest instruction a host instruction belongs to
//! ([`Mark`]), and nothing about that is stored.
//!
//! | guest | host |
//! | --- | --- |
//! | `jcc`, `loop`, `jrcxz` | the same, over two `jmp`s or to one exit and falling into the other |
//! | `jmp` forward | nothing: the block goes on there; backward: an exit |
//! | `call f` | push of the guest's return address, an exit |
//! | the same with `[rip+d]`, a constant ([`Fetch::constant`]) | as `call f`; an exit |
//! | `call [m]`, `jmp [m]`, `ret` | rcx saved; target to rcx and `next_pc`; the push; a tail [^1] |
//! | `call`, `ret` in programs with many calls | the same; returns find a landing [^2] |
//! | `op [rip+d]` | the same with another displacement, or through a borrowed register |
//! | `op gs:[m]` | through a borrowed register, too ([`super::gs_operands`]) |
//! | what the runtime executes | an exit to that instruction, where no block starts |
//!
//! [^1]: [`crate::transfers::indirect`]
//! [^2]: [`crate::transfers::stack_returns`]
//!
//! **Invariant.** Each instruction can be started over at each point where it may fault: nothing of
//! the guest's has changed then but registers that the [`Mark`] says are saved.

use super::fast_decode::{self, Transfer};
use super::gs_operands;
use super::self_checking::{self, Check};
use super::stack_returns;
pub(super) use super::translation::{ExitJump, Leads, Mark, Referent, Relative, Translation};
use super::x87_pointer;
use crate::asm::{self, Assembler};
use crate::transfers::indirect::{Indirect, Via};
use dynasour_guest::context::offset;
use dynasour_guest::decode::{Decoded, Fetch, Reader};
use dynasour_guest::lift::{class::Class, classify};
use iced_x86::{
    Code, ConditionCode, Encoder, IcedError, Instruction, InstructionInfoFactory, Mnemonic as M,
    Register,
};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;
use std::ops::Range;

/// The most guest instructions in a block (guess; a block that is left early was copied in vain).
const MAX_INSTRUCTIONS: u32 = 64;
/// The most jumps behind which a block goes on at their targets (guess).
const MAX_JUMPS: u32 = 4;
/// The most conditional branches in a block, in programs whose code does not change often (guess).
const MAX_BRANCHES: u32 = 4;
/// A prefix that has no meaning for the instructions that it is put before.
const PADDING: u8 = 0x2e;
/// The word of `stub_save` with the guest's value of a register that is borrowed for an address.
pub(super) const BORROWED: usize = 5;

/// Translates blocks; keeps its buffers.
pub(super) struct Translator {
    pub out: Translation,
    /// The most conditional branches in a block, which ends behind the last. It only changes when
    /// there are no blocks.
    pub most_branches: u32,
    /// Are [`Translation::marks`] wanted?
    pub marking: bool,
    /// The block ends before the first instruction that does not begin below this pc.
    pub until: u64,
    /// Fields of short branches to a landing's miss that is still to be emitted.
    pub misses: SmallVec<[usize; 2]>,
    /// Jumps through a word that led to the dynamic linker when they were first seen.
    pub unbound: FxHashSet<u64>,
    /// The last x87 instruction that set the x87 pointer, if its pc has not been stored in the
    /// context yet.
    pub x87_pc: Option<u64>,
    /// Addresses that every displacement in the cache reaches.
    reach: Range<i64>,
    /// Made at its first use, because its tables take half a millisecond.
    encoder: Option<Encoder>,
    info: InstructionInfoFactory,
}

/// How the translation of an instruction ended.
pub(super) enum Translated {
    /// Copied; the next one follows.
    Next,
    /// Copied, a conditional branch; the next one follows, unless there are too many.
    Branched,
    /// Copied, a call by the stack; the next one follows behind its landing.
    Called,
    /// Copied; the block goes on elsewhere.
    Goto(u64),
    /// Copied; it ends the block.
    End,
    /// Not copied.
    Refused,
}

/// Options for the translation of an instruction.
pub(super) struct Rules<'a> {
    pub indirect: &'a Indirect,
    /// The block may go on over a jump.
    pub over_jump: bool,
    /// The block compares its own bytes, and only once.
    pub compares: bool,
}

impl Assembler for Translator {
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.out.bytes.extend_from_slice(bytes);
    }

    #[inline]
    fn here(&self) -> usize {
        self.out.bytes.len()
    }
}

impl Translator {
    /// A translator for a cache at these addresses.
    pub fn new(cache: Range<u64>) -> Translator {
        const REACH: i64 = 0x7fff_0000;
        Translator {
            out: Translation::default(),
            most_branches: MAX_BRANCHES,
            marking: false,
            until: u64::MAX,
            misses: SmallVec::new(),
            unbound: FxHashSet::default(),
            x87_pc: None,
            reach: cache.end as i64 - REACH..cache.start as i64 + REACH,
            encoder: None,
            info: InstructionInfoFactory::new(),
        }
    }

    /// The guest bytes of the self-checking block at `pc`.
    pub fn own_bytes(&mut self, pc: u64, code: &dyn Fetch) -> Option<Box<[u8]>> {
        self_checking::bytes(pc, code, &mut self.info)
    }

    /// Translates the block at `pc` into `self.out`. With `checked` it begins with a checked entry.
    /// With `own`, its guest bytes and a stub, it first compares the bytes and leads to the stub if
    /// they differ; `code` then holds no other bytes. False if not even the first instruction can
    /// be copied.
    pub fn translate(
        &mut self,
        pc: u64,
        code: &dyn Fetch,
        indirect: &Indirect,
        checked: Option<Via>,
        own: Option<(&[u8], u64)>,
    ) -> Result<bool, IcedError> {
        self.begin(pc, indirect, checked, own);
        self.follow(pc, code, indirect, own.is_some())?;
        self.finish_call(indirect);
        Ok(self.out.count > 0)
    }

    /// Clears what was translated before, and emits the entry and the comparison of the bytes.
    pub(super) fn begin(
        &mut self,
        pc: u64,
        indirect: &Indirect,
        checked: Option<Via>,
        own: Option<(&[u8], u64)>,
    ) {
        self.misses.clear();
        self.x87_pc = None;
        let out = &mut self.out;
        out.bytes.clear();
        out.marks.clear();
        out.exits.clear();
        out.relatives.clear();
        out.constants.clear();
        out.sources.clear();
        out.word = None;
        out.count = 0;
        out.basic_blocks = 1;
        out.prefix = 0;
        out.returns_to = None;
        out.call = None;
        out.returns = 0;
        if let Some(via) = checked {
            let piece = indirect.checked_entry(pc, via);
            out.bytes.extend_from_slice(&piece.bytes);
            out.prefix = piece.bytes.len() as u32;
            if let Some(field) = piece.jump {
                let field = field as u32;
                out.relatives.push(Relative {
                    field,
                    end: field + 4,
                    to: Referent::Address(piece.leads),
                });
            }
        }
        out.check = out.prefix..out.prefix;
        if let Some((own, stale)) = own {
            let check = Check::new(pc, own);
            out.bytes.extend_from_slice(&check.bytes);
            out.check.end = out.bytes.len() as u32;
            out.relatives.extend(check.fields.into_iter().map(|field| {
                let field = field + out.check.start;
                Relative { field, end: field + 4, to: Referent::Address(stale) }
            }));
        }
    }

    /// Translates the instructions from `pc` on, over forward jumps and behind calls. `compares`
    /// says that the block compares its own bytes.
    fn follow(
        &mut self,
        pc: u64,
        code: &dyn Fetch,
        indirect: &Indirect,
        compares: bool,
    ) -> Result<(), IcedError> {
        let mut reader = Reader::new(code);
        let (mut start, mut here, mut jumps, mut branches) = (pc, pc, 0, 0);
        // Where the last basic block began.
        let mut basic = pc;
        loop {
            self.reach_misses(indirect, stack_returns::STEP);
            if !x87_pointer::may_continue(reader.ahead(here)) {
                self.store_x87_pc();
            }
            if self.plain(&mut here, &mut reader) {
                continue;
            }
            let over_jump = jumps < MAX_JUMPS && self.until == u64::MAX;
            let rules = Rules { indirect, over_jump, compares };
            let is_full = self.out.count >= MAX_INSTRUCTIONS || here >= self.until;
            let (step, behind) = if is_full {
                (Translated::Refused, here)
            } else if let Some((transfer, len)) =
                reader.ahead(here).first_chunk().and_then(|c| fast_decode::transfer(c, here))
            {
                let behind = here.wrapping_add(len as u64);
                (self.direct(transfer, here, behind, &rules), behind)
            } else if let Decoded::Inst(inst) = reader.decode(here) {
                self.mark(here, None);
                (self.instruction(&inst, &mut reader, &rules)?, reader.next_pc())
            } else {
                (Translated::Refused, here)
            };
            if !matches!(step, Translated::Refused) {
                self.out.count += 1;
                here = behind;
            }
            match step {
                Translated::Next => {}
                Translated::Branched if branches + 1 < self.most_branches => {
                    branches += 1;
                    basic = here;
                    self.out.basic_blocks += 1;
                }
                Translated::Called => {
                    basic = here;
                    self.out.basic_blocks += 1;
                }
                Translated::Goto(target) => {
                    basic = target;
                    self.out.basic_blocks += 1;
                    self.out.sources.push(start..here);
                    jumps += 1;
                    start = target;
                    here = target;
                }
                Translated::End => break,
                Translated::Branched | Translated::Refused => {
                    if self.out.basic_blocks > 1 && here == basic {
                        // No instruction was copied behind the last transfer.
                        self.out.basic_blocks -= 1;
                    }
                    // The instruction that is refused may have a mark already.
                    self.store_x87_pc();
                    self.exit(Leads::To(here));
                    break;
                }
            }
        }
        if start != here {
            self.out.sources.push(start..here);
        }
        Ok(())
    }

    /// Copies the plain instructions at `here`, up to the end of the reader's window. False if the
    /// first one is not plain.
    fn plain(&mut self, here: &mut u64, reader: &mut Reader<'_>) -> bool {
        let window = reader.ahead(*here);
        let pc = |at: usize| here.wrapping_add(at as u64);
        let (mut copied, mut at) = (0, 0);
        let room = self.room_before_misses();
        while self.out.count < MAX_INSTRUCTIONS
            && at < room
            && pc(at) < self.until
            && let Some(code) = window[at..].first_chunk()
            && let Some(instruction) = fast_decode::plain(code)
        {
            let end = at + instruction.len;
            if instruction.relative != 0 {
                let field = at + instruction.relative;
                let displacement =
                    window[field..].first_chunk().map_or(0, |field| i32::from_le_bytes(*field));
                let address = pc(end).wrapping_add(i64::from(displacement) as u64);
                if !self.reaches(address) {
                    break;
                }
                self.mark_at(at - copied, pc(at));
                self.out.bytes.extend_from_slice(&window[copied..field]);
                self.displacement((end - field - 4) as u32, Referent::Address(address));
                copied = field + 4;
            } else {
                self.mark_at(at - copied, pc(at));
            }
            at = end;
            self.out.count += 1;
        }
        self.out.bytes.extend_from_slice(&window[copied..at]);
        *here = pc(at);
        at > 0
    }

    pub(super) fn mark(&mut self, pc: u64, saved: Option<(u8, usize)>) {
        if self.marking {
            let at = self.out.bytes.len() as u32;
            self.out.marks.push(Mark { at, pc, saved, pushed: false, x87_pc: self.x87_pc });
        }
    }

    /// As [`Translator::mark`], for code behind a push of the instruction.
    pub(super) fn mark_pushed(&mut self, pc: u64, saved: Option<(u8, usize)>) {
        self.mark(pc, saved);
        if let Some(mark) = self.out.marks.last_mut() {
            mark.pushed = true;
        }
    }

    /// The instruction at `pc` begins `ahead` bytes from here.
    fn mark_at(&mut self, ahead: usize, pc: u64) {
        if self.marking {
            let at = (self.out.bytes.len() + ahead) as u32;
            self.out.marks.push(Mark { at, pc, saved: None, pushed: false, x87_pc: self.x87_pc });
        }
    }

    /// Pads so that the field of four bytes that is emitted `before` bytes from here lies within
    /// eight aligned bytes. Blocks begin at a multiple of eight.
    pub(super) fn pad(&mut self, before: usize) {
        let at = (self.out.bytes.len() + before) % 8;
        if at > 4 {
            self.put(&[PADDING; 3][..8 - at]);
        }
    }

    /// Pads so that an instruction of eight bytes whose second half is `before` bytes from here is
    /// aligned.
    pub(super) fn pad_instruction(&mut self, before: usize) {
        let at = (self.out.bytes.len() + before + 4) % 8;
        self.put(&[PADDING; 7][..(8 - at) % 8]);
    }

    /// `jmp`, which leads there.
    pub(super) fn exit(&mut self, leads: Leads) {
        self.pad(1);
        self.jmp();
        self.add_exit(leads);
    }

    /// `jcc`, which leads there.
    pub(super) fn exit_if(&mut self, condition: u8, leads: Leads) {
        self.pad(2);
        self.jcc(condition);
        self.add_exit(leads);
    }

    /// The last four bytes are the field of an exit.
    pub(super) fn add_exit(&mut self, leads: Leads) {
        let field = self.out.bytes.len() as u32 - 4;
        self.out.exits.push(ExitJump { field, leads, head: None });
    }

    /// The exit made last leads to a trace head if it leads backward.
    pub(super) fn head_if_backward(&mut self, from: u64) {
        if let Some(exit) = self.out.exits.last_mut()
            && matches!(exit.leads, Leads::To(to) if to <= from)
        {
            exit.head = Some(false);
        }
    }

    fn instruction(
        &mut self,
        inst: &Instruction,
        reader: &mut Reader<'_>,
        rules: &Rules<'_>,
    ) -> Result<Translated, IcedError> {
        let modelled = match classify(inst) {
            Class::Modelled => true,
            Class::Native => false,
            Class::Special if inst.code() == Code::Fnstenv_m28byte => {
                return self.x87_environment(inst, reader);
            }
            Class::Special | Class::Unlisted | Class::Trap(_) => return Ok(Translated::Refused),
        };
        if gs_operands::is_relative_to_gs(inst) {
            return self.relative_to_gs(inst, reader);
        }
        if modelled {
            match inst.mnemonic() {
                M::Syscall => return Ok(Translated::Refused),
                M::Jmp | M::Call | M::Ret => return Ok(self.transfer(inst, reader, rules)),
                M::Jrcxz | M::Jecxz | M::Loop | M::Loope | M::Loopne => {
                    // The target of the short branch is behind the jump that it falls into.
                    self.out.bytes.extend_from_slice(reader.raw());
                    let first = self.out.bytes.len();
                    self.exit(Leads::To(inst.next_ip()));
                    self.out.bytes[first - 1] = (self.out.bytes.len() - first) as u8;
                    self.exit(Leads::To(inst.near_branch_target()));
                    self.head_if_backward(inst.ip());
                    return Ok(Translated::End);
                }
                _ => {}
            }
            let condition = inst.condition_code();
            if condition != ConditionCode::None && inst.is_jcc_short_or_near() {
                // iced numbers conditions as the processor does, from 1.
                let branch = Transfer::Branch(condition as u8 - 1, inst.near_branch_target());
                return Ok(self.direct(branch, inst.ip(), inst.next_ip(), rules));
            }
        }
        if inst.is_ip_rel_memory_operand() {
            self.relative(inst, reader)?;
        } else {
            self.out.bytes.extend_from_slice(reader.raw());
        }
        self.note_x87(inst);
        Ok(Translated::Next)
    }

    pub(super) fn reaches(&self, address: u64) -> bool {
        self.reach.contains(&(address as i64))
    }

    /// The last four bytes but `immediate` ones are a disp32 field, and they all end an
    /// instruction.
    pub(super) fn refer(&mut self, immediate: u32, to: Referent) {
        let end = self.out.bytes.len() as u32;
        self.out.relatives.push(Relative { field: end - immediate - 4, end, to });
    }

    /// A disp32 field with `behind` bytes of its instruction behind it, not emitted yet.
    fn displacement(&mut self, behind: u32, to: Referent) {
        let field = self.out.bytes.len() as u32;
        self.out.relatives.push(Relative { field, end: field + 4 + behind, to });
        self.put(&[0; 4]);
    }

    /// An instruction with a RIP-relative operand.
    fn relative(&mut self, inst: &Instruction, reader: &mut Reader<'_>) -> Result<(), IcedError> {
        let address = inst.ip_rel_memory_address();
        if inst.memory_base() == Register::RIP && self.reaches(address) {
            let at = reader.displacement_offset();
            let raw = reader.raw();
            let behind = raw.len() - at - 4;
            self.out.bytes.extend_from_slice(&raw[..at]);
            self.displacement(behind as u32, Referent::Address(address));
            self.out.bytes.extend_from_slice(&raw[at + 4..]);
            return Ok(());
        }
        if inst.code() == Code::Lea_r64_m {
            self.mov_imm_64(inst.op0_register().number() as u8, address);
            return Ok(());
        }
        let borrowed = self.unused_register(inst).unwrap_or(Register::RSI);
        let number = borrowed.number() as u8;
        let mut moved = *inst;
        moved.set_memory_base(borrowed);
        moved.set_memory_displacement64(0);
        moved.set_memory_displ_size(0);
        self.save(number, BORROWED);
        self.mov_imm_64(number, address);
        self.mark(inst.ip(), Some((number, BORROWED)));
        self.encode(&moved)?;
        self.mark(inst.ip(), None);
        self.restore(number, BORROWED);
        Ok(())
    }

    /// A register that the instruction does not use, that needs no prefix and whose default segment
    /// is the data segment.
    pub(super) fn unused_register(&mut self, inst: &Instruction) -> Option<Register> {
        const CANDIDATES: [Register; 6] = [
            Register::RSI,
            Register::RDI,
            Register::RBX,
            Register::RDX,
            Register::RCX,
            Register::RAX,
        ];
        let used = self.info.info(inst).used_registers();
        CANDIDATES.into_iter().find(|r| !used.iter().any(|u| u.register().full_register() == *r))
    }

    /// Writes an instruction that was changed and that does not depend on its address.
    pub(super) fn encode(&mut self, inst: &Instruction) -> Result<(), IcedError> {
        asm::encode(&mut self.encoder, inst, |bytes| self.out.bytes.extend_from_slice(bytes))
    }

    /// Saves a register to a word of `stub_save`.
    pub(super) fn save(&mut self, register: u8, word: usize) {
        self.store(register, offset::STUB_SAVE + 8 * word);
    }

    /// Restores a register from a word of `stub_save`.
    pub(super) fn restore(&mut self, register: u8, word: usize) {
        self.load(register, offset::STUB_SAVE + 8 * word);
    }
}
