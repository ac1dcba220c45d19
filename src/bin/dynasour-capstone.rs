//! The disassembler of `dynasour explain`, by capstone.
//!
//! It is a separate program because capstone's tables would add a millisecond (measured) to every
//! start of `dynasour`.
//!
//! *Protocol.* Each line of standard input is a pc in hexadecimal, a blank, and bytes in
//! hexadecimal. The answer on standard output has one line for each instruction (its length, a tab,
//! its text) and then an empty line. Disassembly stops before bytes that are no instruction. A line
//! of another form ends the program with a failure. `src/explain/disassembly.rs` is the other end.
//!
//! ```text
//! > 1000 4889c8c3
//! < 3    mov rax, rcx
//! < 1    ret
//! <
//! ```

use capstone::arch::x86::{ArchMode, ArchSyntax};
use capstone::prelude::*;
use std::io::{BufRead, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    let disassembler =
        Capstone::new().x86().mode(ArchMode::Mode64).syntax(ArchSyntax::Intel).build();
    let Ok(disassembler) = disassembler else { return ExitCode::FAILURE };
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let (pc, code) = line.split_once(' ').unwrap_or((&line, ""));
        let (Ok(pc), Some(code)) = (u64::from_str_radix(pc, 16), unhex(code)) else {
            return ExitCode::FAILURE;
        };
        let mut answer = String::new();
        if let Ok(all) = disassembler.disasm_all(&code, pc) {
            for inst in all.iter() {
                let text =
                    format!("{} {}", inst.mnemonic().unwrap_or(""), inst.op_str().unwrap_or(""));
                answer.push_str(&format!("{}\t{}\n", inst.bytes().len(), text.trim_end()));
            }
        }
        answer.push('\n');
        if out.write_all(answer.as_bytes()).and_then(|()| out.flush()).is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// The bytes that hexadecimal digits stand for; `None` if another character is among them.
fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect();
    digits.map(|digits| digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}
