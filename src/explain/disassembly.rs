//! Guest instructions as text: by the separate program `dynasour-capstone`, or by iced-x86 where
//! that program is not installed or fails. `src/bin/dynasour-capstone.rs` says why it is separate,
//! and describes the protocol.
//!
//! Data: [`Disassembler`] owns the child process, and ends it when it is dropped. No lock.
//!
//! Example: `48 89 c8 c3` at 0x1000 becomes `(3, "mov rax, rcx"), (1, "ret")`.

use super::guest::hex;
use iced_x86::{Decoder, DecoderOptions, Formatter, NasmFormatter};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The file name of the program with capstone. It is looked for in the directory of `dynasour`.
const HELPER: &str = "dynasour-capstone";

/// Turns guest code into text.
pub struct Disassembler {
    capstone: Option<Capstone>,
}

/// The running program, and both ends of the conversation with it.
struct Capstone {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Disassembler {
    /// Uses capstone if its program is installed.
    pub fn new() -> Disassembler {
        let own = std::env::current_exe().unwrap_or_default();
        let child = Command::new(own.with_file_name(HELPER))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let capstone = child.ok().and_then(|mut child| {
            let (to, from) = (child.stdin.take()?, BufReader::new(child.stdout.take()?));
            Some(Capstone { child, to, from })
        });
        Disassembler { capstone }
    }

    /// The lengths and texts of the instructions of `code`. The last entry covers trailing bytes
    /// that are no instruction.
    pub fn instructions(&mut self, pc: u64, code: &[u8]) -> Vec<(usize, String)> {
        let asked = self.capstone.as_mut().map(|capstone| capstone.ask(pc, code));
        let mut out = match asked {
            Some(Ok(instructions)) => instructions,
            Some(Err(_)) => {
                self.capstone = None;
                by_iced(pc, code)
            }
            None => by_iced(pc, code),
        };
        let known: usize = out.iter().map(|(len, _)| *len).sum();
        if known < code.len() {
            out.push((code.len() - known, "(not known to the disassembler)".to_string()));
        }
        out
    }
}

impl Capstone {
    /// Sends one request, and returns the answer. An error means that the program has ended or
    /// answered what it should not.
    fn ask(&mut self, pc: u64, code: &[u8]) -> std::io::Result<Vec<(usize, String)>> {
        writeln!(self.to, "{pc:x} {}", hex(code))?;
        self.to.flush()?;
        let (mut out, mut total, mut line) = (Vec::new(), 0, String::new());
        loop {
            line.clear();
            if self.from.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let Some((len, text)) = line.trim_end().split_once('\t') else { return Ok(out) };
            let len = len.parse().ok().filter(|len| (1..=code.len() - total).contains(len));
            let len = len.ok_or(std::io::ErrorKind::InvalidData)?;
            total += len;
            out.push((len, text.to_string()));
        }
    }
}

impl Drop for Capstone {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn by_iced(pc: u64, code: &[u8]) -> Vec<(usize, String)> {
    let mut formatter = NasmFormatter::new();
    let options = formatter.options_mut();
    options.set_hex_prefix("0x");
    options.set_hex_suffix("");
    options.set_uppercase_hex(false);
    options.set_branch_leading_zeros(false);
    options.set_show_branch_size(false);
    options.set_space_after_operand_separator(true);
    options.set_space_between_memory_add_operators(true);
    options.set_rip_relative_addresses(true);
    let decoder = Decoder::with_ip(64, code, pc, DecoderOptions::NONE);
    let known = decoder.into_iter().take_while(|inst| !inst.is_invalid());
    known
        .map(|inst| {
            let mut text = String::new();
            formatter.format(&inst, &mut text);
            (inst.len(), text)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_capstone_the_text_is_much_the_same() {
        let mut d = Disassembler { capstone: None };
        let code = [0x48, 0x8b, 0x05, 0x10, 0, 0, 0, 0x75, 0xf7, 0xff, 0xff];
        let texts: Vec<String> =
            d.instructions(0x1000, &code).into_iter().map(|(_, text)| text).collect();
        assert_eq!(texts[1..], ["jne 0x1000", "(not known to the disassembler)"]);
        assert!(texts[0].starts_with("mov rax") && texts[0].contains("rip + 0x10"), "{}", texts[0]);
    }
}
