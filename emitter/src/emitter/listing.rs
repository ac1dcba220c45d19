//! Disassembly of fragments, for `--log code` and failed tests.
//!
//! The module owns no data and changes nothing. The caller holds the emitter.
//!
//! Example line: `20001040  mov     rax,rcx`.

use crate::emitter::Emitter;
use crate::fragment::FragmentId;
use iced_x86::{Decoder, DecoderOptions, Formatter, NasmFormatter};
use std::fmt::Write;
use std::ops::Range;

impl Emitter {
    /// The host code of a fragment, hot part first, one instruction a line.
    pub fn listing(&self, id: FragmentId) -> Option<String> {
        let f = self.fragment(id)?;
        let mut text = String::new();
        for (name, range) in [("hot", &(f.entry..f.hot.end)), ("cold", &f.cold)] {
            let _ = writeln!(text, "; {name}, {} bytes", range.end - range.start);
            self.disassemble(range, &mut text);
        }
        Some(text)
    }

    fn disassemble(&self, range: &Range<u64>, text: &mut String) {
        let bytes = self.cache().read(range.start, (range.end - range.start) as usize);
        let mut formatter = NasmFormatter::new();
        formatter.options_mut().set_first_operand_char_index(8);
        for inst in &mut Decoder::with_ip(64, bytes, range.start, DecoderOptions::NONE) {
            let _ = write!(text, "{:8x}  ", inst.ip());
            formatter.format(&inst, text);
            text.push('\n');
        }
    }
}
