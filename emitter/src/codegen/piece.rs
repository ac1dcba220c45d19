//! Short code that is copied into the cache as a whole: checked entries and tails of indirect
//! transfers.
//!
//! A copied block begins and ends with one, so a piece is kept without an allocation. It may refer
//! to one address, relative to its place ([`Piece::leads`]), and to one table.

use crate::asm::{Assembler, Mem, RCX};
use dynasour_guest::context::offset;
use smallvec::SmallVec;

/// The word of `stub_save` in which rcx waits while an indirect transfer uses it.
pub const SAVE_RCX: usize = 2;

/// `jmp [table + r*8]` in eight bytes, the field last: it can be replaced by [`directly`] in one
/// store.
pub(crate) fn through(r: u8, table: u32) -> [u8; 8] {
    let [a, b, c, d] = table.to_le_bytes();
    [0x40 | (r >> 3) << 1, 0xff, 0x24, 0xc5 | (r & 7) << 3, a, b, c, d]
}

/// `jmp` over `relative` bytes, also in eight bytes with the field last. The prefixes mean nothing.
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

impl Assembler for Piece {
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    #[inline]
    fn here(&self) -> usize {
        self.bytes.len()
    }
}

impl Piece {
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn save_rcx(&mut self) {
        self.store(RCX, offset::STUB_SAVE + 8 * SAVE_RCX);
    }

    pub(crate) fn restore_rcx(&mut self) {
        self.load(RCX, offset::STUB_SAVE + 8 * SAVE_RCX);
    }

    /// Adds one to the word at `address`, by way of `r`; no flags are touched.
    pub(crate) fn count(&mut self, r: u8, address: u32) {
        self.mov_from(r, Mem::absolute(address));
        self.lea(r, Mem::at(r).plus(1));
        self.mov_to(Mem::absolute(address), r);
    }

    /// `jmp [table + 8 * the low 16 bits of r]`
    pub(crate) fn jump_through(&mut self, r: u8, table: u32) {
        self.movzx_16(r);
        self.jmp_through(Mem::table(table, r));
        self.table = Some(self.len() - 4);
    }

    /// As [`Piece::jump_through`], the jump as in [`through`].
    pub(crate) fn jump_by_carrier(&mut self, r: u8, table: u32) {
        self.movzx_16(r);
        self.put(&through(r, table));
        self.table = Some(self.len() - 4);
    }

    /// `movzx ecx, word gs:[next_pc]; jmp [table + rcx*8]`
    pub(crate) fn jump_to_stored(&mut self, table: u32) {
        self.load_16(RCX, Mem::context(offset::NEXT_PC));
        self.jmp_through(Mem::table(table, RCX));
        self.table = Some(self.len() - 4);
    }

    /// `jmp to`
    pub(crate) fn jump(&mut self, to: u64) {
        self.jmp();
        self.jump = Some(self.len() - 4);
        self.leads = to;
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
    fn pieces_read_as_meant() {
        for (r, name) in [(1, "rcx"), (12, "r12"), (13, "r13")] {
            let counted =
                format!("mov {name},[4000h]\nlea {name},[{name}+1]\nmov [4000h],{name}\n");
            assert_eq!(text(|p| p.count(r, 0x4000)), counted);
        }
        assert_eq!(text(|p| p.jump_through(0, 0x4000)), "movzx eax,ax\njmp qword [rax*8+4000h]\n");
        assert_eq!(
            text(|p| p.jump_through(12, 0x4000)),
            "movzx r12d,r12w\njmp qword [r12*8+4000h]\n"
        );
        for (r, name) in [(0, "rax"), (7, "rdi"), (8, "r8"), (12, "r12")] {
            let short = text(|p| p.jump_through(r, 0x4000));
            assert_eq!(text(|p| p.jump_by_carrier(r, 0x4000)), short);
            assert!(short.contains(&format!("[{name}*8+4000h]")), "{short}");
        }
        assert_eq!(text(|p| p.put(&directly(0x100))), "jmp 0000000000000108h\n");
        let stored = text(|p| p.jump_to_stored(0x4000));
        assert!(
            stored.contains("movzx ecx,word [gs:") && stored.contains("jmp qword [rcx*8+4000h]"),
            "{stored}"
        );
    }
}
