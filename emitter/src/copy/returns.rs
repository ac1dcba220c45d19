//! Calls and returns through the processor's return stack: see [`crate::returns`].

use super::Blocks;
use super::translate::{Leads, Referent, Translator};
use crate::emitter::{Diversion, Emitter};
use crate::indirect::{Indirect, SAVE_RCX};
use crate::pieces::RCX;
use crate::returns::{LAST, Returns};
use dynasour_guest::context::offset;

/// So many places to return to are many.
const MANY: u32 = 20_000;

/// When copied blocks return by the stack.
pub(super) struct Wanted {
    how: Returns,
    /// Places to return to since everything was dropped.
    places: u32,
}

impl Wanted {
    pub fn new(how: Returns) -> Wanted {
        Wanted { how, places: 0 }
    }
}

/// A block's landing, and how it returns.
#[derive(Clone, Copy, Default)]
pub(super) struct Landing {
    /// Offset in the block; 0 if it has none.
    pub start: u16,
    pub len: u8,
    /// It ends with a return by the stack.
    pub returns: bool,
}

impl Translator {
    /// `ret`
    pub(super) fn return_by_stack(&mut self, pc: u64, indirect: &Indirect) {
        let returns = indirect.returns();
        self.save(RCX, SAVE_RCX);
        self.mark(pc, Some((RCX, SAVE_RCX)));
        // mov rcx, [rsp]
        self.emit(&[0x48, 0x8b, 0x0c, 0x24]);
        self.gs(0x89, RCX, offset::NEXT_PC);
        if let Some(count) = indirect.count_transfer(RCX) {
            self.emit(&count.bytes);
            self.gs(0x8b, RCX, offset::NEXT_PC);
        }
        // pext ecx, ecx, [rip + …]
        self.emit(&[0xc4, 0xe2, 0x72, 0xf5, 0x0d]);
        self.displacement(0, Referent::Address(returns.mask()));
        // mov ecx, [table + rcx*4]; mov [rsp], rcx; ret
        self.exit(&[0x8b, 0x0c, 0x8d], Leads::Return);
        self.emit(&[0x48, 0x89, 0x0c, 0x24, 0xc3]);
        self.out.landing.returns = true;
    }

    /// A call of the host's, the landing for returns to `address`, and what makes the guest's return address of what was pushed.
    /// `through_rcx` says that the target is in rcx, whose own value is in `stub_save`.
    pub(super) fn call_by_stack(&mut self, pc: u64, address: u64, indirect: &Indirect, through_rcx: bool) {
        self.emit(&[0xe8, 0, 0, 0, 0]);
        let start = self.out.bytes.len();
        self.mark(address, Some((RCX, SAVE_RCX)));
        let mut misses: [Option<usize>; 2] = [None; 2];
        let immediate = i32::try_from(address as i64).ok();
        if immediate.is_some() {
            self.gs(0x8b, RCX, offset::NEXT_PC);
            // lea rcx, [rcx + 1 - address]
            self.emit(&[0x48]);
            misses[0] = Some(self.unless_one(1u32.wrapping_sub(address as u32)));
        } else {
            for (n, half) in [address as u32, (address >> 32) as u32].into_iter().enumerate() {
                // mov ecx, gs:[…]
                self.emit(&[0x65, 0x8b, 0x0c, 0x25]);
                self.emit(&((offset::NEXT_PC + 4 * n) as u32).to_le_bytes());
                misses[n] = Some(self.unless_one(1u32.wrapping_sub(half)));
            }
        }
        match immediate {
            // mov qword [rsp - 8], address
            Some(immediate) => {
                self.emit(&[0x48, 0xc7, 0x44, 0x24, 0xf8]);
                self.emit(&immediate.to_le_bytes());
            }
            None => {
                self.constant(RCX, address);
                self.emit(&[0x48, 0x89, 0x4c, 0x24, 0xf8]);
            }
        }
        self.gs(0x8b, RCX, offset::STUB_SAVE + 8 * SAVE_RCX);
        self.mark(address, None);
        self.exit(&[0xe9], Leads::To(address));
        let miss = self.out.bytes.len();
        for field in misses.into_iter().flatten() {
            self.out.bytes[field] = (miss - field - 1) as u8;
        }
        self.emit(&[0xe9]);
        self.displacement(0, Referent::Address(indirect.returns().miss()));
        let end = self.out.bytes.len();
        self.out.bytes[start - 4..start].copy_from_slice(&((end - start) as u32).to_le_bytes());
        (self.out.landing.start, self.out.landing.len) = (start as u16, (end - start) as u8);
        self.out.lands_for = Some(address);
        self.mark_pushed(pc, through_rcx.then_some((RCX, SAVE_RCX)));
        match immediate {
            // mov qword [rsp], address
            Some(immediate) => {
                self.emit(&[0x48, 0xc7, 0x04, 0x24]);
                self.emit(&immediate.to_le_bytes());
            }
            None => {
                if !through_rcx {
                    self.save(RCX, SAVE_RCX);
                }
                self.constant(RCX, address);
                self.emit(&[0x48, 0x89, 0x0c, 0x24]);
                let own = if through_rcx { offset::NEXT_PC } else { offset::STUB_SAVE + 8 * SAVE_RCX };
                self.gs(0x8b, RCX, own);
            }
        }
    }

    /// `lea ecx, [rcx + sum]; loop …`, or with rcx if the prefix for that is there. Where the field of the loop is.
    fn unless_one(&mut self, sum: u32) -> usize {
        self.emit(&[0x8d, 0x89]);
        self.emit(&sum.to_le_bytes());
        self.emit(&[0xe2, 0]);
        self.out.bytes.len() - 1
    }
}

impl Blocks {
    /// A block has been translated that calls from a place to return to.
    pub(super) fn note_return_place(&mut self) {
        self.returns.places += 1;
    }

    /// Has it turned out that returns had better go by the stack, so that everything is to be copied anew?
    pub(super) fn wants_stack(&self, indirect: &Indirect) -> bool {
        let returns = indirect.returns();
        self.returns.how == Returns::Auto && self.returns.places >= MANY && returns.is_possible() && !returns.is_on()
    }

    /// With nothing copied: lets returns go by the stack if they should.
    pub(super) fn choose_returns(&mut self, indirect: &mut Indirect) {
        let forced = self.returns.how == Returns::Stack && !indirect.returns().is_on();
        if forced || self.wants_stack(indirect) {
            indirect.returns_mut().turn_on();
        }
        self.returns.places = 0;
        self.ways.returns = indirect.returns().tables();
    }

    /// How a thread gets out that is `at` bytes within this block, and beyond its links. Async-signal-safe.
    pub(super) fn diversion_of_return(&self, block: u32, at: u32, indirect: &Indirect) -> Option<Diversion> {
        let block = &self.blocks[block as usize];
        let Landing { start, len, returns } = block.landing;
        let (at, start) = (at as usize, usize::from(start));
        if start != 0 && (start..start + usize::from(len)).contains(&at) {
            return Some(indirect.returns().diversion_in_landing());
        }
        (returns && at + LAST >= usize::from(block.len)).then(|| indirect.returns().diversion_before_return())
    }
}

impl Emitter {
    /// How copied blocks were to return.
    pub fn wanted_returns(&self) -> Returns {
        self.blocks.returns.how
    }

    /// No return arrives any more at the landing that this block may have.
    pub(super) fn forget_landing(&mut self, block: u32) {
        let blocks = &self.blocks;
        let Some(b) = blocks.blocks.get(block as usize).filter(|b| b.landing.start != 0) else { return };
        let landing = blocks.base + u64::from(b.start) + u64::from(b.landing.start);
        // Its first link leads to where it returns to.
        if let Some((address, _)) = self.copy_exit(super::LinkId(b.first_link)) {
            self.indirect.returns_mut().remove(address, landing);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use dynasour_guest::decode::Bytes;
    use iced_x86::{Decoder, DecoderOptions, Mnemonic};

    /// Translates `code` for the address `pc`; the offsets of the instructions, and what they are.
    fn translated(pc: u64, code: &[u8]) -> (Translator, Vec<(usize, Mnemonic)>) {
        let mut cache = Cache::new(1 << 16).unwrap();
        let mut indirect = Indirect::new(&mut cache, 0x2000_0000, false, true).unwrap();
        indirect.returns_mut().turn_on();
        let mut translator = Translator::new(cache.range());
        let source = Bytes { start: pc, bytes: code };
        assert!(translator.translate(pc, &source, &indirect, None, None).unwrap());
        let decoder = Decoder::new(64, &translator.out.bytes, DecoderOptions::NONE);
        let all = decoder.into_iter().map(|inst| (inst.ip() as usize, inst.mnemonic())).collect();
        (translator, all)
    }

    #[test]
    fn landings_stand_behind_calls_and_check_without_flags() {
        // call rax; call [rcx]; call to somewhere
        for code in [&[0xff, 0xd0][..], &[0xff, 0x11], &[0xe8, 0, 1, 0, 0]] {
            for pc in [0x40_1000, 0x7fff_f234_5678] {
                let (translator, all) = translated(pc, &[code, &[0xcc; 32]].concat());
                let Landing { start, len, returns } = translator.out.landing;
                let call = all.iter().position(|(_, what)| *what == Mnemonic::Call).unwrap();
                assert_eq!((all[call + 1].0, returns), (usize::from(start), false));
                let end = usize::from(start) + usize::from(len);
                assert!(all.iter().any(|(at, _)| *at == end), "{pc:#x}: {all:?}");
                assert_eq!(translator.out.lands_for, Some(pc + code.len() as u64));
                let touches_none =
                    [Mnemonic::Mov, Mnemonic::Lea, Mnemonic::Loop, Mnemonic::Jmp, Mnemonic::Call, Mnemonic::Movzx];
                assert!(all.iter().all(|(_, what)| touches_none.contains(what)), "{all:?}");
            }
        }
    }

    #[test]
    fn calls_have_blocks_of_their_own() {
        // inc eax; call
        let (translator, all) = translated(0x40_1000, &[&[0xff, 0xc0, 0xe8, 0, 1, 0, 0][..], &[0xcc; 32]].concat());
        assert_eq!((translator.out.count, all[1].1, translator.out.lands_for), (1, Mnemonic::Jmp, None));
    }

    #[test]
    fn returns_end_where_they_have_looked_into_the_table() {
        for before in 0..8 {
            let code: Vec<u8> = [0x90].repeat(before).into_iter().chain([0xc3]).chain([0xcc; 32]).collect();
            let (translator, all) = translated(0x40_1000, &code);
            let (at, store) = all[all.len() - 2];
            assert_eq!((translator.out.bytes.len() - at, store), (LAST, Mnemonic::Mov));
            let last: Vec<Mnemonic> = all[all.len() - 4..].iter().map(|(_, what)| *what).collect();
            assert_eq!(last, [Mnemonic::Pext, Mnemonic::Mov, Mnemonic::Mov, Mnemonic::Ret]);
            let field = translator.out.exits[0].field;
            assert!(field % 8 <= 4 && translator.out.landing.returns, "{field}");
        }
    }
}
