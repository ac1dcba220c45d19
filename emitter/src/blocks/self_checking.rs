//! Self-checking blocks: they compare their own guest code, which lies in pages that may change
//! unseen.
//!
//! Pages are of this kind if several mappings show them, or if they are written too often to be
//! guarded. A block of such code begins with a comparison of its guest bytes, and ends at the first
//! instruction that may write memory; the next block compares again. It is made from one range of
//! guest code.
//!
//! If a comparison fails the block leaves by the stub *stale*, with registers and flags in place
//! and the pc in `next_pc`. The block is then copied anew from the bytes that are there
//! ([`Blocks::drop_stale`]). After [`MOST_CHANGES`] changes the code at a pc is interpreted.
//!
//! ```text
//! mov gs:[save], rax         cmp dword [rcx], 0x…        add al, 0x7f
//! mov gs:[save2], rcx        jne stale                   sahf
//! lahf                       cmp dword [rcx + 4], 0x…    mov rax, gs:[save]
//! seto al                    jne stale                   mov rcx, gs:[save2]
//! mov rcx, PC                …                           (the guest's code)
//! ```
//!
//! Data: [`Blocks::own`], the bytes of each such block, because the state at a fault in the block
//! is found by translating them again; and [`Blocks::changes`], how often they have changed. The
//! caller holds the emitter.
//!
//! Example: a JIT compiler maps a page twice and patches `mov eax, 1` to `mov eax, 2` through the
//! other mapping. The next execution of the block finds another byte and leaves by *stale*; the
//! block is removed, and the new one moves 2.

use super::{Blocks, Doomed, NONE};
use crate::asm::{Assembler, Mem, NOT_EQUAL, RAX, RCX, Width};
use crate::cache::Cache;
use crate::fragment::Fragment;
use crate::transfers::indirect::Indirect;
use dynasour_guest::ThreadContext;
use dynasour_guest::context::offset;
use dynasour_guest::decode::{Bytes, Decoded, Fetch, Reader};
use dynasour_guest::lift::{class::Class, classify};
use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess};

/// The most guest bytes of a block: each is compared through an 8-bit displacement.
const MOST_BYTES: usize = 100;
/// After this many changes of the bytes at a pc only the interpreter runs them (guess; too high and
/// code that is rewritten all the time is copied all the time).
pub(super) const MOST_CHANGES: u8 = 16;

/// The words of `stub_save` for rax and rcx. Code before and behind the comparison uses these words
/// for other purposes.
pub(super) const SAVED: [usize; 2] = [5, 0];
/// Offset of the first instruction at which ax holds the flags.
const FLAGS_SAVED: u32 = 22;

/// A comparison of guest code.
pub(super) struct Check {
    pub bytes: Vec<u8>,
    /// The offsets of the rel32 fields that lead to the stub.
    pub fields: Vec<u32>,
}

impl Check {
    /// Falls through if the bytes at `pc` are `own`.
    pub fn new(pc: u64, own: &[u8]) -> Check {
        let mut code =
            Vec::with_capacity(FLAGS_SAVED as usize + 10 + 14 * own.len().div_ceil(4) + 21);
        let mut fields = Vec::new();
        code.store(RAX, saved(0));
        code.store(RCX, saved(1));
        code.pack_flags();
        debug_assert_eq!(code.len() as u32, FLAGS_SAVED);
        code.mov_imm_64(RCX, pc);
        let mut at = 0;
        while at < own.len() {
            let (width, len) = match own.len() - at {
                4.. => (Width::Dword, 4),
                2.. => (Width::Word, 2),
                _ => (Width::Byte, 1),
            };
            let mut value = [0; 4];
            value[..len].copy_from_slice(&own[at..at + len]);
            code.cmp_imm(width, Mem::at(RCX).plus(at as i32), u32::from_le_bytes(value));
            code.jcc(NOT_EQUAL);
            fields.push(code.len() as u32 - 4);
            at += len;
        }
        code.unpack_flags();
        code.load(RAX, saved(0));
        code.load(RCX, saved(1));
        Check { bytes: code, fields }
    }
}

/// The field with a register that the comparison uses.
fn saved(n: usize) -> usize {
    offset::STUB_SAVE + 8 * SAVED[n]
}

/// Makes the state in `ctx` the guest's, after a fault `at` bytes within a check.
pub(super) fn state_in_check(ctx: &mut ThreadContext, at: u32) {
    const OVERFLOW: u64 = 1 << 11;
    const IN_AH: u64 = 0xd5;
    if at < FLAGS_SAVED {
        return;
    }
    let [al, ah, ..] = ctx.gpr[usize::from(RAX)].to_le_bytes();
    ctx.rflags = ctx.rflags & !(OVERFLOW | IN_AH)
        | u64::from(ah) & IN_AH
        | if al & 1 != 0 { OVERFLOW } else { 0 };
    ctx.gpr[usize::from(RAX)] = ctx.stub_save[SAVED[0]];
    ctx.gpr[usize::from(RCX)] = ctx.stub_save[SAVED[1]];
}

/// The guest bytes of the self-checking block at `pc`; `None` if the block would have no
/// instruction.
pub(super) fn bytes(
    pc: u64,
    code: &dyn Fetch,
    info: &mut InstructionInfoFactory,
) -> Option<Box<[u8]>> {
    let mut reader = Reader::new(code);
    let mut bytes = Vec::with_capacity(MOST_BYTES);
    let mut here = pc;
    while let Decoded::Inst(inst) = reader.decode(here) {
        let is_copied = inst.mnemonic() != Mnemonic::Syscall
            && matches!(classify(&inst), Class::Modelled | Class::Native);
        if !is_copied || bytes.len() + inst.len() > MOST_BYTES {
            break;
        }
        bytes.extend_from_slice(reader.raw());
        if inst.flow_control() != FlowControl::Next || writes_memory(&inst, info) {
            break;
        }
        here = reader.next_pc();
    }
    (!bytes.is_empty()).then(|| bytes.into())
}

fn writes_memory(inst: &Instruction, info: &mut InstructionInfoFactory) -> bool {
    let reads = [OpAccess::None, OpAccess::Read, OpAccess::CondRead, OpAccess::NoMemAccess];
    info.info(inst).used_memory().iter().any(|used| !reads.contains(&used.access()))
}

/// The code that a block at `pc` with these bytes is made from.
pub(super) fn source(pc: u64, bytes: &[u8]) -> Bytes<'_> {
    Bytes { start: pc, bytes }
}

impl Blocks {
    /// The place at `pc`, if its block is one that compares its bytes; counts a change.
    fn stale_place(&mut self, pc: u64) -> Option<u32> {
        let place = *self.by_pc.get(&pc)?;
        let made = self.places[place as usize].made[0];
        if made == NONE || !self.own.contains_key(&made) {
            return None;
        }
        let changes = self.changes.entry(pc).or_default();
        *changes = changes.saturating_add(1);
        Some(place)
    }

    /// Have the bytes at `pc` changed so often that the interpreter should execute them?
    pub(super) fn changes_often(&self, pc: u64) -> bool {
        self.changes.get(&pc).is_some_and(|changes| *changes >= MOST_CHANGES)
    }
}

impl Blocks {
    /// A block has left because its guest bytes have changed: drops it, so that the next one at
    /// this pc is made from the bytes that are there.
    pub(crate) fn drop_stale(
        &mut self,
        pc: u64,
        indirect: &mut Indirect,
        cache: &Cache,
        fragments: &[Fragment],
    ) {
        if let Some(place) = self.stale_place(pc) {
            let mut stale = self.stale.take().unwrap_or_else(|| Doomed::new(self.generation));
            let made = self.places[place as usize].made[0];
            self.forget_pages(made);
            self.remove_place(place, &mut stale, indirect, cache, fragments);
            self.stale = Some(stale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Formatter, NasmFormatter};

    fn text(code: &[u8]) -> Vec<String> {
        let mut formatter = NasmFormatter::new();
        let all = Decoder::with_ip(64, code, 0, DecoderOptions::NONE).into_iter().map(|inst| {
            assert!(!inst.is_invalid());
            let mut text = String::new();
            formatter.format(&inst, &mut text);
            text
        });
        all.collect()
    }

    #[test]
    fn all_bytes_are_compared() {
        let own = [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77];
        let check = Check::new(0x7f00_1234_5678, &own);
        let text = text(&check.bytes);
        assert_eq!(text[2..5], ["lahf", "seto al", "mov rcx,7F0012345678h"]);
        let compares: Vec<&String> = text.iter().filter(|line| line.starts_with("cmp")).collect();
        assert_eq!(
            compares,
            ["cmp dword [rcx],44332211h", "cmp word [rcx+4],6655h", "cmp byte [rcx+6],77h"]
        );
        assert_eq!(check.fields.len(), 3);
        assert_eq!(text[11..13], ["add al,7Fh", "sahf"]);
    }

    #[test]
    fn they_end_at_stores_and_jumps() {
        let mut info = InstructionInfoFactory::new();
        let mut of = |code: &[u8]| {
            bytes(0x1000, &Bytes { start: 0x1000, bytes: code }, &mut info).map(|b| b.len())
        };
        // mov eax, [rdi]; mov [rdi], eax; inc eax
        assert_eq!(of(&[0x8b, 0x07, 0x89, 0x07, 0xff, 0xc0, 0xcc]), Some(4));
        // push rax; inc eax
        assert_eq!(of(&[0x50, 0xff, 0xc0]), Some(1));
        // inc eax; jmp
        assert_eq!(of(&[0xff, 0xc0, 0xeb, 0x10, 0xff, 0xc0]), Some(4));
        // nop; syscall
        assert_eq!(of(&[0x90, 0x0f, 0x05]), Some(1));
        assert_eq!(of(&[0x0f, 0x05]), None);
        assert_eq!(of(&[0x90; 300]), Some(MOST_BYTES));
    }
}
