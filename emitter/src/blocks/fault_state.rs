//! The guest's state at a fault in a copied block, found by translating the block once more.
//!
//! Nothing is stored about which guest instruction a host instruction belongs to, because nearly no
//! block ever faults. The block is translated again with *marks*, which say for each guest
//! instruction where its host code begins and which registers are displaced there.
//!
//! The module owns no data. Invariant: the second translation gives the same bytes as the first. It
//! sees the same guest bytes, since a block is removed when they change, and the word of a jump
//! through memory as it was then ([`Copied`]). The caller holds the emitter.
//!
//! Example: a block at 0x1000 faults at offset 23. The second translation has marks at 14 (0x1007)
//! and at 21 (0x100b). The instruction at 0x100b has faulted.

use super::Blocks;
use super::self_checking;
use super::translate::Mark;
use super::word_jumps::Word;
use crate::transfers::indirect::{Indirect, Via};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::Fetch;
use dynasour_ir::Gpr;

/// Guest code with the word that it goes through as it was when the block was copied. The word
/// itself may have changed.
struct Copied<'f> {
    code: &'f dyn Fetch,
    word: Option<Word>,
}

impl Fetch for Copied<'_> {
    fn fetch(&self, address: u64, buffer: &mut [u8]) -> usize {
        self.code.fetch(address, buffer)
    }

    fn constant(&self, _pc: u64, address: u64) -> Option<u64> {
        self.word
            .filter(|known| known.is_constant && known.slot == address)
            .map(|known| known.value)
    }

    fn word(&self, address: u64) -> Option<u64> {
        self.word
            .filter(|known| !known.is_constant && known.slot == address)
            .map(|known| known.value)
    }
}

impl Blocks {
    /// After a run that left with a fault: makes `rip` of `ctx` the pc of the guest instruction
    /// that faulted, and every register what it was before that instruction. False if the guest's
    /// code has changed since the block was copied.
    pub(crate) fn state_at_fault(
        &mut self,
        ctx: &mut ThreadContext,
        code: &dyn Fetch,
        indirect: &Indirect,
    ) -> bool {
        let Some(index) = self.at(ctx.fault_rip) else { return false };
        let block = &self.blocks[index as usize];
        let (pc, len) = (block.pc, block.len);
        let via = Via::from_index(block.via.into()).filter(|_| block.prefix != 0);
        let at = (ctx.fault_rip - self.base) as u32 - block.start;
        let until = self.displaced_until(pc);
        let translator = &mut self.translator;
        translator.until = until;
        translator.marking = true;
        let own = self.own.get(&index);
        let translated = match own {
            None => {
                let word = self.words.get(&index).copied();
                translator.translate(pc, &Copied { code, word }, indirect, via, None)
            }
            Some(own) => {
                let check = (&own[..], self.stubs.stale);
                translator.translate(
                    pc,
                    &self_checking::source(pc, own),
                    indirect,
                    via,
                    Some(check),
                )
            }
        };
        translator.marking = false;
        if !matches!(translated, Ok(true)) || translator.out.bytes.len() != len as usize {
            return false;
        }
        if translator.out.check.contains(&at) {
            self_checking::state_in_check(ctx, at - translator.out.check.start);
            ctx.rip = pc;
            return true;
        }
        let marks = &translator.out.marks;
        let Some(Mark { pc, saved, pushed, x87_pc, .. }) =
            marks[..marks.partition_point(|m| m.at <= at)].last().copied()
        else {
            return false;
        };
        ctx.rip = pc;
        if let Some((register, word)) = saved {
            ctx.gpr[usize::from(register)] = ctx.stub_save[word];
        }
        ctx.x87_pc = x87_pc.unwrap_or(ctx.x87_pc);
        if pushed {
            let rsp = &mut ctx.gpr[Gpr::RSP.number()];
            *rsp = rsp.wrapping_add(8);
        }
        true
    }
}
