//! Control transfers of copied blocks: jumps, branches, calls and returns, direct and through
//! registers and memory.
//!
//! A direct transfer is an exit of the block, or the block goes on at its target. An indirect
//! transfer stores its target in `next_pc` and ends the block with a tail
//! ([`crate::transfers::indirect`]).
//!
//! The module owns no data; it writes into the translator's `Translation`. Invariant: a transfer
//! that faults can be started over. The block's marks say which registers it has displaced and
//! whether it has pushed anything. The caller holds the emitter.
//!
//! Example: `jmp rax` becomes `mov gs:[next_pc], rax` and the tail of rax.

use super::fast_decode::Transfer;
use super::stack_returns::{self, Called};
use super::translate::{Rules, Translated, Translator};
use super::translation::{ExitJump, Leads, Referent};
use super::word_jumps;
use crate::asm::{Assembler, Mem, RCX, RSP};
use crate::transfers::indirect::{Indirect, SAVE_RCX, TargetSource, Via};
use dynasour_guest::context::offset;
use dynasour_guest::decode::Reader;
use iced_x86::{Instruction, Mnemonic as M, OpKind, Register};

impl Translator {
    /// A transfer at `pc`, with the next instruction at `behind`.
    pub(super) fn direct(
        &mut self,
        transfer: Transfer,
        pc: u64,
        behind: u64,
        rules: &Rules<'_>,
    ) -> Translated {
        self.mark(pc, None);
        match transfer {
            Transfer::Branch(condition, target) => {
                self.exit_if(condition, Leads::To(target));
                self.head_if_backward(pc);
                Translated::Branched
            }
            // A backward jump closes a loop. Other code enters the loop's head, too.
            Transfer::Jump(target) if target > pc && rules.over_jump => Translated::Goto(target),
            Transfer::Jump(target) => {
                self.exit(Leads::To(target));
                self.head_if_backward(pc);
                Translated::End
            }
            Transfer::Call(_) if self.ends_before_call() => Translated::Refused,
            Transfer::Call(target) if rules.indirect.returns().is_on() => {
                self.call_by_stack(pc, behind, Called::Known(target), rules)
            }
            Transfer::Call(target) => {
                self.push_return(behind);
                self.exit_to_called(target);
                Translated::End
            }
            Transfer::Return => self.give_back(pc, 0, rules.indirect),
        }
    }

    /// `ret`, which takes `bytes` more bytes from the stack.
    fn give_back(&mut self, pc: u64, bytes: u16, indirect: &Indirect) -> Translated {
        if bytes == 0 && indirect.returns().is_on() {
            self.return_by_stack(pc, indirect);
            return Translated::End;
        }
        self.reach_misses(indirect, stack_returns::most_bytes(indirect));
        self.save(RCX, SAVE_RCX);
        self.mark(pc, Some((RCX, SAVE_RCX)));
        self.pop(RCX);
        if bytes != 0 {
            self.lea(RSP, Mem::at(RSP).plus(bytes.into()).wide());
        }
        self.store(RCX, offset::NEXT_PC);
        self.tail(pc, indirect, TargetSource::Rcx);
        Translated::End
    }

    /// A jump to the target of a call.
    pub(super) fn exit_to_called(&mut self, target: u64) {
        self.exit(Leads::To(target));
        if let Some(exit) = self.out.exits.last_mut() {
            exit.head = Some(true);
        }
    }

    /// A block has one call by the stack at most. Code behind a call is also copied for itself,
    /// when the call returns; behind many calls it would be copied many times.
    fn ends_before_call(&self) -> bool {
        self.out.call.is_some()
    }

    /// `jmp`, `call`, `ret`.
    pub(super) fn transfer(
        &mut self,
        inst: &Instruction,
        reader: &mut Reader<'_>,
        rules: &Rules<'_>,
    ) -> Translated {
        let indirect = rules.indirect;
        if inst.mnemonic() == M::Ret {
            let bytes = if inst.op_count() == 1 { inst.immediate16() } else { 0 };
            return self.give_back(inst.ip(), bytes, indirect);
        }
        if !matches!(inst.op0_kind(), OpKind::Register | OpKind::Memory) {
            let target = inst.near_branch_target();
            let transfer = if inst.mnemonic() == M::Call {
                Transfer::Call(target)
            } else {
                Transfer::Jump(target)
            };
            return self.direct(transfer, inst.ip(), inst.next_ip(), rules);
        }
        if inst.mnemonic() == M::Call && self.ends_before_call() {
            return Translated::Refused;
        }
        let slot = word_jumps::slot(inst);
        if slot.is_some() && self.out.word.is_some_and(|known| Some(known.slot) != slot) {
            // One word is all that is kept for a block.
            return Translated::Refused;
        }
        if let Some(target) = slot.and_then(|slot| self.constant_target(inst, slot, reader)) {
            return match inst.mnemonic() {
                M::Call => self.direct(Transfer::Call(target), inst.ip(), inst.next_ip(), rules),
                _ => {
                    // A function that is called indirectly usually has many callers: its code is
                    // not copied into this block.
                    self.exit(Leads::To(target));
                    Translated::End
                }
            };
        }
        if let (Some(slot), M::Jmp) = (slot, inst.mnemonic()) {
            return self.jump_by_word(inst, slot, reader, indirect);
        }
        self.reach_misses(indirect, stack_returns::most_bytes(indirect));
        // Only jumps of dispatch loops gain by a register that carries the target. A call writes
        // memory anyway, and a function that is called seldom continues a loop.
        if inst.mnemonic() == M::Jmp
            && inst.op0_register().is_gpr64()
            && let Via::Register(r) = indirect.carrier(inst.op0_register().number() as u8)
        {
            self.store(r, offset::NEXT_PC);
            self.tail(inst.ip(), indirect, TargetSource::Register(r));
            return Translated::End;
        }
        self.save(RCX, SAVE_RCX);
        self.mark(inst.ip(), Some((RCX, SAVE_RCX)));
        self.load_target(inst, reader);
        let by_stack = inst.mnemonic() == M::Call && indirect.returns().is_on();
        if inst.mnemonic() == M::Call && !by_stack {
            self.push_return(inst.next_ip());
        }
        self.store(RCX, offset::NEXT_PC);
        if by_stack {
            return self.call_by_stack(inst.ip(), inst.next_ip(), Called::InRcx, rules);
        }
        self.tail(inst.ip(), indirect, TargetSource::Rcx);
        Translated::End
    }

    /// The tail by which the transfer at `pc` goes to the address in `next_pc`.
    pub(super) fn tail(&mut self, pc: u64, indirect: &Indirect, source: TargetSource) {
        self.name(pc, indirect);
        let piece = indirect.tail(source);
        let field = piece.table.or(piece.jump).unwrap_or_default();
        match source.via() {
            Via::Memory => self.pad(field),
            Via::Register(_) => self.pad_instruction(field),
        }
        let field = (self.out.bytes.len() + field) as u32;
        self.put(&piece.bytes);
        self.out.exits.push(ExitJump { field, leads: Leads::Indirect(source.via()), head: None });
    }

    /// Stores which transfer is executed, if transfers name themselves.
    pub(super) fn name(&mut self, pc: u64, indirect: &Indirect) {
        if indirect.names_transfers() {
            self.put(&indirect.name_transfer(pc).bytes);
        }
    }

    /// Target of an indirect jump or call to rcx.
    pub(super) fn load_target(&mut self, inst: &Instruction, reader: &Reader<'_>) {
        if inst.op0_kind() == OpKind::Register {
            let r = inst.op0_register().number() as u8;
            if r != RCX {
                self.mov(RCX, r);
            }
            return;
        }
        let in_segment = |m: Mem| if inst.memory_segment() == Register::FS { m.fs() } else { m };
        if inst.is_ip_rel_memory_operand() {
            let address = inst.ip_rel_memory_address();
            if self.reaches(address) {
                self.mov_from(RCX, in_segment(Mem::relative()));
                self.refer(0, Referent::Address(address));
            } else {
                self.mov_imm_64(RCX, address);
                self.mov_from(RCX, in_segment(Mem::at(RCX)));
            }
            return;
        }
        // `ff /2` or `ff /4` becomes `mov rcx, m`: REX.W, 8b, and 1 in the register field.
        let raw = reader.raw();
        let mut rex = 0x48;
        let mut i = 0;
        while i < raw.len() {
            match raw[i] {
                0x64 | 0x67 => self.out.bytes.push(raw[i]),
                0x40..=0x4f => rex |= raw[i] & 3,
                0xff => break,
                // Prefixes that have no meaning here.
                _ => {}
            }
            i += 1;
        }
        self.put(&[rex, 0x8b]);
        if let [_, modrm, rest @ ..] = &raw[i..] {
            self.out.bytes.push(modrm & 0xc7 | 1 << 3);
            self.out.bytes.extend_from_slice(rest);
        }
    }

    /// `push address`, in one instruction, so that it can be started over.
    fn push_return(&mut self, address: u64) {
        self.out.returns_to = Some(address);
        match i32::try_from(address as i64) {
            Ok(immediate) => self.push_imm(immediate),
            Err(_) => {
                let constant = self.out.constants.len() as u32;
                self.out.constants.push(address);
                self.push_from(Mem::relative());
                self.refer(0, Referent::Constant(constant));
            }
        }
    }
}
