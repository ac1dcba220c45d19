//! The recorded guest code of a fragment: its blocks, disassembled, with symbols and execution
//! counts.
//!
//! No data, no lock. Example: the block `cmp rcx, rdx; jae 0x401150` was executed 100 times; its
//! second instruction has the note `main+0x30` and the number of the guard that checks it.

use super::disassembly::Disassembler;
use super::heat::{self, Place};
use super::source_lines::{Source, SourceLines};
use dynasour_guest::symbols::Symbols;
use dynasour_runtime::observe::census::{Fragment, PathStep, Transfer};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A recorded block.
#[derive(Serialize, Deserialize, JsonSchema, Debug)]
pub struct Block {
    /// Address of its first instruction.
    pub pc: u64,
    /// The same address as symbol and offset.
    pub symbol: String,
    /// Executions in this version, except those that were repeated because a guard failed.
    pub executed: u64,
    /// Its instructions.
    pub instructions: Vec<Instruction>,
    /// How control left it.
    pub transfer: Transfer,
    /// Guest pc of the next block.
    pub next: u64,
}

/// A guest instruction.
#[derive(Serialize, Deserialize, JsonSchema, Debug)]
pub struct Instruction {
    /// Its address.
    pub pc: u64,
    /// Its bytes in hexadecimal.
    pub bytes: String,
    /// As text.
    pub text: String,
    /// Symbol of its target or operand address, if it has one.
    pub note: Option<String>,
    /// Numbers of the guards that check this instruction.
    pub guards: Vec<u32>,
    /// Its source line, if the file has debug information.
    pub source: Option<Source>,
}

/// The recorded path of a fragment.
pub fn path(
    fragment: &Fragment,
    symbols: &Symbols,
    sources: &mut SourceLines<'_>,
    disassembler: &mut Disassembler,
) -> Vec<Block> {
    let places = heat::places(fragment);
    let blocks = fragment.path.iter().zip(heat::executions(fragment));
    blocks
        .enumerate()
        .map(|(n, (step, executed))| Block {
            pc: step.pc,
            symbol: symbols.name(step.pc),
            executed,
            instructions: instructions(
                disassembler,
                step,
                &guards_of(fragment, &places, n),
                symbols,
                sources,
            ),
            transfer: step.transfer,
            next: step.next,
        })
        .collect()
}

/// The guards with an origin in a step of the path: pc of the instruction, and number of the guard.
fn guards_of(fragment: &Fragment, places: &[Place], step: usize) -> Vec<(u64, u32)> {
    let mut out = Vec::new();
    for (guard, place) in fragment.guards.iter().zip(places) {
        for (origin, of) in guard.origins.iter().zip(&place.origins) {
            if *of == Some(step) && !out.contains(&(origin.pc, guard.index)) {
                out.push((origin.pc, guard.index));
            }
        }
    }
    out
}

fn instructions(
    disassembler: &mut Disassembler,
    step: &PathStep,
    guards: &[(u64, u32)],
    symbols: &Symbols,
    sources: &mut SourceLines<'_>,
) -> Vec<Instruction> {
    let bytes = step.code.as_deref().map_or(Vec::new(), unhex);
    let mut at = 0;
    let mut out = Vec::new();
    for (len, text) in disassembler.instructions(step.pc, &bytes) {
        let pc = step.pc + at as u64;
        let guards = guards.iter().filter(|(at, _)| *at == pc).map(|(_, guard)| *guard).collect();
        let note = target(&text, pc + len as u64)
            .map(|target| symbols.name(target))
            .filter(|n| !n.starts_with("0x"));
        let (bytes, source) = (hex(&bytes[at..at + len]), sources.at(pc));
        out.push(Instruction { pc, bytes, text, note, guards, source });
        at += len;
    }
    out
}

/// The address that an instruction's text names: the target of a direct transfer, or an address
/// relative to the next instruction.
fn target(text: &str, next: u64) -> Option<u64> {
    let (mnemonic, operands) = text.split_once(' ')?;
    if let Some(at) = operands.find("[rip ") {
        let displacement = &operands[at + 5..operands[at..].find(']').map(|end| at + end)?];
        let (sign, digits) = displacement.split_once(' ')?;
        let offset = number(digits)?;
        return Some(if sign == "-" {
            next.wrapping_sub(offset)
        } else {
            next.wrapping_add(offset)
        });
    }
    let transfers = mnemonic.starts_with('j') || mnemonic == "call" || mnemonic.starts_with("loop");
    if transfers { number(operands) } else { None }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Bytes from hexadecimal text, up to the first character that is no digit.
pub fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().map_while(|c| c.to_digit(16)).map(|d| d as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_found_in_text() {
        assert_eq!(target("jne 0x1150", 0), Some(0x1150));
        assert_eq!(target("call qword ptr [rip + 0x2fe2]", 0x1000), Some(0x3fe2));
        assert_eq!(target("lea rax, [rip - 0x10]", 0x1000), Some(0xff0));
        assert_eq!(target("mov eax, 5", 0), None);
        assert_eq!(target("jmp rax", 0), None);
        assert_eq!(target("ret", 0), None);
    }

    #[test]
    fn hexadecimal_goes_both_ways() {
        assert_eq!(unhex(&hex(&[0, 0x7f, 0xff])), [0, 0x7f, 0xff]);
        assert_eq!(unhex("0fz1"), [0x0f]);
    }
}
