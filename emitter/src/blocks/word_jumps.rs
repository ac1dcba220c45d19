//! Jumps and calls through words of memory that the dynamic linker fills in.
//!
//! In a program linked with `-z now` the linker fills all words in and then protects them. Such a
//! word can only be changed by a system call, so its value is as good as a direct target.
//!
//! In other programs functions are bound when they are first called. Their words seldom change
//! after that. A jump through one compares the word with the value that it had when the jump was
//! copied:
//!
//! ```text
//!       mov gs:[save], rcx
//!       mov rcx, [word]
//!       lea rcx, [rcx - TARGET]
//!       unless rcx is 0: other
//!       mov rcx, gs:[save]
//!       jmp <the block at TARGET>
//! other: mov rcx, [word]
//!       (the tail of an indirect jump)
//! ```
//!
//! While the word has that value, the jump reaches its target without the tables and the check
//! behind them. Only a jump that is the first instruction of its block is copied like this, as in a
//! table of linkage, so one word is kept for a block. A jump to a function that is not bound yet is
//! left to the interpreter once; it is copied the next time.
//!
//! Data: [`Word`], one for such a block ([`super::Blocks`] keeps them), because the translation
//! that finds the state at a fault must use the same value. The caller holds the emitter.
//!
//! Example: `jmp [puts@got]` is copied when the word holds 0x7f00_1000. The block compares the word
//! with that and jumps to the block of `puts`. If the guest stores another address there, the block
//! goes on at `other`, through the tables.

use super::translate::{Leads, Translated, Translator};
use crate::asm::{Assembler, Mem, RCX};
use crate::transfers::indirect::{Indirect, SAVE_RCX, TargetSource};
use dynasour_guest::context::offset;
use dynasour_guest::decode::Reader;
use iced_x86::{Code, Instruction, Register};

/// A word of the guest's as it was when the block that goes through it was copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word {
    pub slot: u64,
    pub value: u64,
    /// A change of the word invalidates the block, so it does not change while the block exists.
    pub is_constant: bool,
}

/// The memory that a jump or call goes through, if its address is known.
pub(super) fn slot(inst: &Instruction) -> Option<u64> {
    let is_plain = matches!(inst.code(), Code::Jmp_rm64 | Code::Call_rm64)
        && inst.memory_base() == Register::RIP
        && inst.memory_segment() != Register::FS;
    is_plain.then(|| inst.ip_rel_memory_address())
}

impl Translator {
    /// The target of a jump or call through a word that cannot change without a system call.
    pub(super) fn constant_target(
        &mut self,
        inst: &Instruction,
        slot: u64,
        reader: &Reader<'_>,
    ) -> Option<u64> {
        /// The first address beyond user space.
        const END: u64 = 1 << 47;
        let value = reader.constant(inst.ip(), slot).filter(|target| *target < END)?;
        self.out.sources.push(slot..slot.wrapping_add(8));
        self.out.word = Some(Word { slot, value, is_constant: true });
        Some(value)
    }

    /// A jump through a word that may change at any time.
    pub(super) fn jump_by_word(
        &mut self,
        inst: &Instruction,
        slot: u64,
        reader: &mut Reader<'_>,
        indirect: &Indirect,
    ) -> Translated {
        if self.out.count > 0 {
            return Translated::Refused;
        }
        let pc = inst.ip();
        let known = reader
            .word(slot)
            .and_then(|value| i32::try_from(value).ok())
            .filter(|value| *value >= 0);
        let target = match known {
            // The translation that finds the state at a fault must be the same as the first.
            Some(target) if !self.marking && is_unbound(target as u64, reader) => {
                if self.unbound.insert(pc) {
                    return Translated::Refused;
                }
                None
            }
            target => target,
        };
        self.save(RCX, SAVE_RCX);
        self.mark(pc, Some((RCX, SAVE_RCX)));
        self.load_target(inst, reader);
        if let Some(target) = target {
            self.unbound.remove(&pc);
            let check = indirect.entry_check();
            self.lea(
                RCX,
                Mem::at(RCX).plus(check.goes_on().wrapping_sub(target as u32) as i32).wide(),
            );
            self.put(&check.unless(0));
            let branch = self.out.bytes.len();
            if let Some(count) = indirect.count_compared(RCX) {
                self.put(&count.bytes);
            }
            self.restore(RCX, SAVE_RCX);
            self.exit(Leads::To(target as u64));
            let distance = i8::try_from(self.out.bytes.len() - branch);
            self.out.bytes[branch - 1] =
                distance.unwrap_or_else(|_| unreachable!("a jump's other way is near")) as u8;
            self.out.word = Some(Word { slot, value: target as u64, is_constant: false });
            self.load_target(inst, reader);
        }
        self.store(RCX, offset::NEXT_PC);
        self.tail(pc, indirect, TargetSource::Rcx);
        Translated::End
    }
}

/// Does the code at `target` look as if it bound a function that is called for the first time:
/// `push` of a number and `jmp`, as in a table of linkage?
fn is_unbound(target: u64, reader: &Reader<'_>) -> bool {
    const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
    let mut bytes = [0; 11];
    let len = reader.fetch(target, &mut bytes);
    let code = &bytes[..len];
    let code = code.strip_prefix(&ENDBR64).unwrap_or(code);
    matches!(code, [0x68, _, _, _, _, 0xe9 | 0xf2, ..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::transfers::entry_check::EntryCheck;
    use dynasour_guest::decode::{Bytes, Fetch};
    use iced_x86::{Decoder, DecoderOptions, Mnemonic};

    const PC: u64 = 0x40_1000;
    const WORD: u64 = PC + 6 + 0x100;

    /// `jmp [WORD]`, and what stands there.
    struct Linkage {
        word: u64,
        bound: bool,
    }

    impl Fetch for Linkage {
        fn fetch(&self, address: u64, buffer: &mut [u8]) -> usize {
            let code = [0xff, 0x25, 0, 1, 0, 0, 0x68, 1, 0, 0, 0, 0xe9, 0, 0, 0, 0];
            let target = if self.bound { &code[..6] } else { &code };
            Bytes { start: PC, bytes: target }.fetch(address, buffer)
        }

        fn word(&self, address: u64) -> Option<u64> {
            (address == WORD).then_some(self.word)
        }
    }

    fn translated(
        linkage: &Linkage,
        translator: &mut Translator,
        check: EntryCheck,
        cache: &mut Cache,
    ) -> bool {
        let indirect = Indirect::new(cache, 0x2000_0000, false, check, true).unwrap();
        translator.translate(PC, linkage, &indirect, None, None).unwrap()
    }

    #[test]
    fn a_bound_function_is_compared_with() {
        for (check, branch) in
            [(EntryCheck::Loop, Mnemonic::Loop), (EntryCheck::Pext, Mnemonic::Jrcxz)]
        {
            let mut cache = Cache::new(1 << 16).unwrap();
            let mut translator = Translator::new(cache.range());
            let linkage = Linkage { word: 0x7654_3210, bound: true };
            assert!(translated(&linkage, &mut translator, check, &mut cache));
            let out = &translator.out;
            let leads: Vec<_> = out.exits.iter().map(|exit| exit.leads).collect();
            assert!(matches!(leads[..], [Leads::To(0x7654_3210), Leads::Indirect(_)]), "{leads:?}");
            assert_eq!(out.word, Some(Word { slot: WORD, value: 0x7654_3210, is_constant: false }));
            // The branch leads behind the direct jump, and no flags are touched.
            let all: Vec<_> =
                Decoder::with_ip(64, &out.bytes, 0, DecoderOptions::NONE).into_iter().collect();
            assert!(all.iter().all(|inst| inst.rflags_modified() == 0), "{all:?}");
            let other = all.iter().find(|inst| inst.mnemonic() == branch).unwrap().near_branch64();
            assert_eq!(other, u64::from(out.exits[0].field) + 4);
        }
    }

    #[test]
    fn an_unbound_function_is_left_to_the_interpreter_once() {
        let mut cache = Cache::new(1 << 16).unwrap();
        let mut translator = Translator::new(cache.range());
        let linkage = Linkage { word: PC + 6, bound: false };
        assert!(!translated(&linkage, &mut translator, EntryCheck::Loop, &mut cache));
        assert!(translated(&linkage, &mut translator, EntryCheck::Loop, &mut cache));
        let leads = translator.out.exits.iter().map(|exit| exit.leads).collect::<Vec<_>>();
        assert!(matches!(leads[..], [Leads::Indirect(_)]));
        assert_eq!(translator.out.word, None);
        // A value that does not fit into the comparison gets none.
        let far = Linkage { word: 0x7fff_1234_5678, bound: true };
        assert!(translated(&far, &mut translator, EntryCheck::Loop, &mut cache));
        assert_eq!((translator.out.exits.len(), translator.out.word), (1, None));
    }
}
