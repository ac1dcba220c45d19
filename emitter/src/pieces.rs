//! Small pieces of code that are made often: bytes to be copied anywhere in the code cache.
//!
//! Assembled by hand, since one is needed for every block that is returned to, and a translated block has to cost less
//! than a microsecond. Registers are given by their numbers.

use crate::entry_check::EntryCheck;
use crate::indirect::SAVE_RCX;
use dynasour_guest::context::offset;
use smallvec::SmallVec;

/// The number of rcx.
pub(crate) const RCX: u8 = 1;

/// `jmp [table + r*8]` in eight bytes, the field last.
pub(crate) fn through(r: u8, table: u32) -> [u8; 8] {
    let [a, b, c, d] = table.to_le_bytes();
    [0x40 | (r >> 3) << 1, 0xff, 0x24, 0xc5 | (r & 7) << 3, a, b, c, d]
}

/// `jmp` over so many bytes, likewise. (The prefixes mean nothing.)
pub(crate) fn directly(relative: u32) -> [u8; 8] {
    let [a, b, c, d] = relative.to_le_bytes();
    [0x2e, 0x2e, 0x2e, 0xe9, a, b, c, d]
}

/// Code to be copied into the cache.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    /// Its bytes.
    pub bytes: SmallVec<[u8; 64]>,
    /// The offset of a rel32 field that must be made to lead to [`Piece::leads`].
    pub jump: Option<usize>,
    /// Where that leads.
    pub leads: u64,
    /// The offset of the 32-bit field with a table's address, in a tail that refers to one.
    pub table: Option<usize>,
    /// The offset of the first instruction before which a register is displaced.
    pub displaced: usize,
}

impl Piece {
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// `mov gs:[field], r`
    pub(crate) fn store(&mut self, r: u8, field: usize) {
        self.gs(0x48, 0x89, r, field);
    }

    /// `mov r, gs:[field]`
    pub(crate) fn load(&mut self, r: u8, field: usize) {
        self.gs(0x48, 0x8b, r, field);
    }

    /// `mov r32, gs:[field]`, for the lower eight.
    fn load_half(&mut self, r: u8, field: usize) {
        self.put(&[0x65, 0x8b, 0x04 | r << 3, 0x25]);
        self.put(&(field as u32).to_le_bytes());
    }

    fn gs(&mut self, rex: u8, opcode: u8, r: u8, field: usize) {
        self.put(&[0x65, rex | (r >> 3) << 2, opcode, 0x04 | (r & 7) << 3, 0x25]);
        self.put(&(field as u32).to_le_bytes());
    }

    /// `mov qword gs:[field], value`
    pub(crate) fn store_constant(&mut self, field: usize, value: u32) {
        self.put(&[0x65, 0x48, 0xc7, 0x04, 0x25]);
        self.put(&(field as u32).to_le_bytes());
        self.put(&value.to_le_bytes());
    }

    /// As [`Piece::store_constant`], of any value.
    pub(crate) fn store_word(&mut self, field: usize, value: u64) {
        if let Ok(low) = i32::try_from(value) {
            return self.store_constant(field, low as u32);
        }
        for (half, field) in [(value as u32, field), ((value >> 32) as u32, field + 4)] {
            // mov dword gs:[field], half
            self.put(&[0x65, 0xc7, 0x04, 0x25]);
            self.put(&(field as u32).to_le_bytes());
            self.put(&half.to_le_bytes());
        }
    }

    pub(crate) fn save_rcx(&mut self) {
        self.store(RCX, offset::STUB_SAVE + 8 * SAVE_RCX);
    }

    pub(crate) fn restore_rcx(&mut self) {
        self.load(RCX, offset::STUB_SAVE + 8 * SAVE_RCX);
    }

    /// Adds one to the word at `address`, by way of `r`; no flags are touched.
    pub(crate) fn count(&mut self, r: u8, address: u32) {
        let (reg, low) = ((r >> 3) << 2, (r & 7) << 3);
        self.put(&[0x48 | reg, 0x8b, 0x04 | low, 0x25]);
        self.put(&address.to_le_bytes());
        self.put(&[0x48 | reg | r >> 3, 0x8d, 0x40 | low | r & 7]);
        if r & 7 == 4 {
            self.put(&[0x24]);
        }
        self.put(&[1, 0x48 | reg, 0x89, 0x04 | low, 0x25]);
        self.put(&address.to_le_bytes());
    }

    /// `mov to, from`
    pub(crate) fn copy(&mut self, to: u8, from: u8) {
        self.put(&[0x48 | (from >> 3) << 2 | to >> 3, 0x89, 0xc0 | (from & 7) << 3 | to & 7]);
    }

    /// `mov r, value`
    pub(crate) fn constant(&mut self, r: u8, value: u64) {
        match u32::try_from(value) {
            Ok(low) => {
                if r >= 8 {
                    self.put(&[0x41]);
                }
                self.put(&[0xb8 | r & 7]);
                self.put(&low.to_le_bytes());
            }
            Err(_) => {
                self.put(&[0x48 | r >> 3, 0xb8 | r & 7]);
                self.put(&value.to_le_bytes());
            }
        }
    }

    /// `jmp [table + 8 * the low 16 bits of r]`
    pub(crate) fn jump_through(&mut self, r: u8, table: u32) {
        if r >= 8 {
            self.put(&[0x45]);
        }
        // movzx r32, r16
        self.put(&[0x0f, 0xb7, 0xc0 | (r & 7) << 3 | r & 7]);
        if r >= 8 {
            self.put(&[0x42]);
        }
        self.put(&[0xff, 0x24, 0xc5 | (r & 7) << 3]);
        self.table = Some(self.len());
        self.put(&table.to_le_bytes());
    }

    /// As [`Piece::jump_through`], the jump as in [`through`].
    pub(crate) fn jump_by_carrier(&mut self, r: u8, table: u32) {
        if r >= 8 {
            self.put(&[0x45]);
        }
        self.put(&[0x0f, 0xb7, 0xc0 | (r & 7) << 3 | r & 7]);
        self.table = Some(self.len() + 4);
        self.put(&through(r, table));
    }

    /// `movzx ecx, word gs:[next_pc]; jmp [table + rcx*8]`
    pub(crate) fn jump_to_stored(&mut self, table: u32) {
        self.put(&[0x65, 0x0f, 0xb7, 0x0c, 0x25]);
        self.put(&(offset::NEXT_PC as u32).to_le_bytes());
        self.put(&[0xff, 0x24, 0xcd]);
        self.table = Some(self.len());
        self.put(&table.to_le_bytes());
    }

    /// `jmp to`
    pub(crate) fn jump(&mut self, to: u64) {
        self.put(&[0xe9]);
        self.jump = Some(self.len());
        self.leads = to;
        self.put(&[0; 4]);
    }

    /// Goes on if `next_pc` is `pc`, else to the piece's first instruction; no flags are touched, but rcx.
    pub(crate) fn check(&mut self, pc: u64, how: EntryCheck) {
        let goes_on = how.goes_on();
        let (low, high) = (goes_on.wrapping_sub(pc as u32), goes_on.wrapping_sub((pc >> 32) as u32));
        if i32::try_from(pc).is_ok() {
            self.load(RCX, offset::NEXT_PC);
            self.put(&[0x48]);
            self.lea(low);
            self.back_unless(how);
        } else {
            // Its halves one after the other.
            self.load_half(RCX, offset::NEXT_PC);
            self.lea(low);
            self.back_unless(how);
            self.load_half(RCX, offset::NEXT_PC + 4);
            self.lea(high);
            self.back_unless(how);
        }
    }

    /// To the piece's first instruction unless rcx is what `how` goes on for.
    fn back_unless(&mut self, how: EntryCheck) {
        let back = -(self.len() as isize);
        self.put(&how.unless(back));
    }

    /// `lea ecx, [rcx + sum]`
    fn lea(&mut self, sum: u32) {
        self.put(&[0x8d, 0x89]);
        self.put(&sum.to_le_bytes());
    }

    /// Its bytes at address `at`, when it stays there as it is.
    pub(crate) fn placed(mut self, at: u64) -> SmallVec<[u8; 64]> {
        if let Some(field) = self.jump {
            let relative = self.leads.wrapping_sub(at + field as u64 + 4) as u32;
            self.bytes[field..field + 4].copy_from_slice(&relative.to_le_bytes());
        }
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Formatter, NasmFormatter};

    fn text(make: impl Fn(&mut Piece)) -> String {
        let mut piece = Piece::default();
        make(&mut piece);
        let mut formatter = NasmFormatter::new();
        let mut text = String::new();
        for inst in &mut Decoder::with_ip(64, &piece.bytes, 0, DecoderOptions::NONE) {
            assert!(!inst.is_invalid());
            formatter.format(&inst, &mut text);
            text.push('\n');
        }
        text
    }

    #[test]
    fn instructions_read_as_meant() {
        assert_eq!(text(|p| p.store(9, 0x80)), "mov [gs:80h],r9\n");
        assert_eq!(text(|p| p.load(0, 0x80)), "mov rax,[gs:80h]\n");
        assert_eq!(text(|p| p.load_half(1, 0x80)), "mov ecx,[gs:80h]\n");
        assert_eq!(text(|p| p.store_constant(0x80, 7)), "mov qword [gs:80h],7\n");
        assert_eq!(text(|p| p.store_word(0x80, 7)), "mov qword [gs:80h],7\n");
        let halves = "mov dword [gs:80h],0F2345678h\nmov dword [gs:84h],7FFFh\n";
        assert_eq!(text(|p| p.store_word(0x80, 0x7fff_f234_5678)), halves);
        assert_eq!(text(|p| p.copy(1, 12)), "mov rcx,r12\n");
        assert_eq!(text(|p| p.copy(12, 1)), "mov r12,rcx\n");
        for (r, name) in [(1, "rcx"), (12, "r12"), (13, "r13")] {
            let counted = format!("mov {name},[4000h]\nlea {name},[{name}+1]\nmov [4000h],{name}\n");
            assert_eq!(text(|p| p.count(r, 0x4000)), counted);
        }
        assert_eq!(text(|p| p.constant(9, 0x1234)), "mov r9d,1234h\n");
        assert_eq!(text(|p| p.constant(3, 0x1_0000_0000)), "mov rbx,100000000h\n");
        assert_eq!(text(|p| p.jump_through(0, 0x4000)), "movzx eax,ax\njmp qword [rax*8+4000h]\n");
        assert_eq!(text(|p| p.jump_through(12, 0x4000)), "movzx r12d,r12w\njmp qword [r12*8+4000h]\n");
        for (r, name) in [(0, "rax"), (7, "rdi"), (8, "r8"), (12, "r12")] {
            let short = text(|p| p.jump_through(r, 0x4000));
            assert_eq!(text(|p| p.jump_by_carrier(r, 0x4000)), short);
            assert!(short.contains(&format!("[{name}*8+4000h]")), "{short}");
        }
        assert_eq!(text(|p| p.put(&directly(0x100))), "jmp 0000000000000108h\n");
        let checked = text(|p| p.check(0x40_1000, EntryCheck::Loop));
        assert!(checked.contains("lea rcx,[rcx-400FFFh]") && checked.contains("loop 0"), "{checked}");
        let checked = text(|p| p.check(0x40_1000, EntryCheck::Pext));
        assert!(checked.contains("lea rcx,[rcx-401000h]") && checked.contains("jrcxz 0"), "{checked}");
        let checked = text(|p| p.check(0x7fff_f234_5678, EntryCheck::Loop));
        assert!(checked.contains("lea ecx,[rcx+0DCBA989h]") && checked.contains("lea ecx,[rcx-7FFEh]"), "{checked}");
        let stored = text(|p| p.jump_to_stored(0x4000));
        assert!(stored.contains("movzx ecx,word [gs:") && stored.contains("jmp qword [rcx*8+4000h]"), "{stored}");
    }
}
