//! The native code of a version, with the purpose of each instruction: guards, exits, spills, jumps
//! that leave the fragment.
//!
//! Counters are left out. So the listing is the code of a run without counting, which has it at
//! other addresses.
//!
//! Data: the census, which is only read. [`super::model`] is the only caller; no lock.
//!
//! ```text
//! cmp rcx, rdx                          no mark
//! jae 0x20001234                        Guard { guard: 0 }
//! mov [gs:0x118], rax                   Spill { slot: 3 }
//! ```

use super::guest::{hex, unhex};
use dynasour_guest::context::{SCRATCH_WORDS, offset};
use dynasour_runtime::observe::census::{Census, Code, Detail, Fragment, Kind, counter_length};
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Formatter, Instruction, NasmFormatter, OpKind, Register,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// One host instruction.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Its address.
    pub at: u64,
    /// Whether it stands off the hot path.
    pub cold: bool,
    /// Its bytes in hexadecimal.
    pub bytes: String,
    /// As text.
    pub text: String,
    /// Address of the guest instruction that it is for, if it is for one.
    pub pc: Option<u64>,
    /// The purposes of the instruction.
    pub marks: Vec<Mark>,
}

/// One purpose of an instruction.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq)]
#[serde(tag = "mark", rename_all = "kebab-case")]
pub enum Mark {
    /// The jump of a guard.
    Guard {
        /// Number of the guard.
        guard: u32,
    },
    /// The exit of a guard begins here.
    Exit {
        /// Number of the guard.
        guard: u32,
    },
    /// A back edge jumps here: head of a loop.
    LoopHead,
    /// A value is stored to a spill slot.
    Spill {
        /// Number of the slot.
        slot: u64,
    },
    /// A value is loaded from a spill slot.
    Reload {
        /// Number of the slot.
        slot: u64,
    },
    /// An access to a field of the thread's context.
    Context {
        /// Name of the field.
        field: Cow<'static, str>,
    },
    /// Control leaves the fragment.
    Leaves {
        /// The destination.
        to: String,
    },
}

/// The native code of a fragment, the hot path first; empty if the run did not keep it. `pcs` has the
/// guest address of each instruction of the optimised version, by block and index.
pub fn lines(census: &Census, fragment: &Fragment, pcs: &[Vec<Option<u64>>]) -> Vec<Line> {
    let Some(detail) = &fragment.detail else { return Vec::new() };
    let mut lines = Vec::new();
    let reader = Reader { census, fragment, detail, pcs };
    let skipped = detail.entry.saturating_sub(detail.hot.at) as usize;
    reader.disassemble(&detail.hot, skipped, false, &mut lines);
    reader.disassemble(&detail.cold, 0, true, &mut lines);
    // The targets of back edges are the heads of loops.
    let heads: Vec<u64> = lines.iter().filter_map(|l| back_edge(&l.bytes, l.at)).collect();
    let hot = detail.entry..detail.hot.at + detail.hot.hex.len() as u64 / 2;
    for head in heads.into_iter().filter(|head| hot.contains(head)) {
        // The head itself may be a counter, which is left out.
        if let Some(line) = lines.iter_mut().filter(|l| !l.cold).find(|l| l.at >= head)
            && !line.marks.contains(&Mark::LoopHead)
        {
            line.marks.insert(0, Mark::LoopHead);
        }
    }
    lines
}

/// The target of a jump instruction that jumps backwards.
fn back_edge(bytes: &str, at: u64) -> Option<u64> {
    let bytes = unhex(bytes);
    let inst = Decoder::with_ip(64, &bytes, at, DecoderOptions::NONE).decode();
    let jumps = matches!(
        inst.flow_control(),
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch
    );
    Some(inst.near_branch_target()).filter(|target| jumps && *target < at && *target != 0)
}

/// Disassembles the code of one fragment.
struct Reader<'a> {
    census: &'a Census,
    fragment: &'a Fragment,
    detail: &'a Detail,
    pcs: &'a [Vec<Option<u64>>],
}

impl Reader<'_> {
    /// Appends the instructions of `code` behind its first `skip` bytes.
    fn disassemble(&self, code: &Code, skip: usize, cold: bool, lines: &mut Vec<Line>) {
        let bytes = unhex(&code.hex);
        let mut formatter = NasmFormatter::new();
        let options = formatter.options_mut();
        options.set_space_after_operand_separator(true);
        options.set_space_between_memory_add_operators(true);
        options.set_hex_prefix("0x");
        options.set_hex_suffix("");
        options.set_uppercase_hex(false);
        options.set_branch_leading_zeros(false);
        options.set_show_branch_size(false);
        let mut at = skip;
        // The purposes of a counter that is left out move to the next instruction.
        let mut pending = Vec::new();
        while let Some(remaining) = bytes.get(at..).filter(|bytes| !bytes.is_empty()) {
            let address = code.at + at as u64;
            if cold {
                let exits = self.fragment.guards.iter().filter(|g| g.host.1 == address);
                pending.extend(exits.map(|g| Mark::Exit { guard: g.index }));
            }
            if let Some(len) = counter_length(remaining) {
                at += len;
                continue;
            }
            let inst = Decoder::with_ip(64, remaining, address, DecoderOptions::NONE).decode();
            let len = inst.len().clamp(1, remaining.len());
            at += len;
            // Alignment is filled with no-operations, and the bytes after jumps with breakpoints.
            if matches!(inst.mnemonic(), iced_x86::Mnemonic::Nop | iced_x86::Mnemonic::Int3) {
                continue;
            }
            let mut text = String::new();
            formatter.format(&inst, &mut text);
            let mut marks = std::mem::take(&mut pending);
            let guards = self.fragment.guards.iter().filter(|g| g.host.0 == address);
            marks.extend(guards.map(|g| Mark::Guard { guard: g.index }));
            marks.extend(context(&inst));
            marks.extend(self.leaves(&inst));
            let pc = if cold { None } else { self.guest_pc(address) };
            lines.push(Line { at: address, cold, bytes: hex(&remaining[..len]), text, pc, marks });
        }
    }

    /// The guest instruction that the code at a host address on the path is for.
    fn guest_pc(&self, address: u64) -> Option<u64> {
        let positions = &self.detail.positions;
        let behind = positions.partition_point(|(at, ..)| *at <= address);
        let (_, block, inst) = positions.get(behind.checked_sub(1)?)?;
        *self.pcs.get(*block as usize)?.get(*inst as usize)?
    }

    /// The mark of a jump out of the fragment; `None` for other instructions.
    fn leaves(&self, inst: &Instruction) -> Option<Mark> {
        let jumps = matches!(
            inst.flow_control(),
            FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch
        );
        let target = Some(inst.near_branch_target()).filter(|t| jumps && *t != 0)?;
        let within = |code: &Code| (code.at..code.at + code.hex.len() as u64 / 2).contains(&target);
        if within(&self.detail.hot) || within(&self.detail.cold) {
            return None;
        }
        // A live fragment may have the address of one that was dropped before. A live fragment
        // jumps to live ones; a dropped one is assumed to have jumped to another dropped one.
        let mut others =
            self.census.fragments.iter().filter(|f| f.dropped == self.fragment.dropped);
        let holds = |f: &&Fragment| {
            let hot = f.detail.as_ref().map(|d| &d.hot);
            hot.is_some_and(|hot| (hot.at..hot.at + hot.hex.len() as u64 / 2).contains(&target))
        };
        let to = match others.find(holds) {
            Some(f) if f.kind == Kind::Stub => format!("stub {}", f.id),
            Some(f) => f.name.clone(),
            None if self.census.tier == "full" => "the runtime or a copied block".to_string(),
            None => "the runtime".to_string(),
        };
        Some(Mark::Leaves { to })
    }
}

/// The context field that an instruction accesses.
fn context(inst: &Instruction) -> Option<Mark> {
    let has_memory = (0..inst.op_count()).any(|n| inst.op_kind(n) == OpKind::Memory);
    if !has_memory || inst.memory_segment() != Register::GS {
        return None;
    }
    let at = inst.memory_displacement64();
    let slots = offset::SCRATCH as u64..(offset::SCRATCH + 8 * SCRATCH_WORDS) as u64;
    if slots.contains(&at) {
        let slot = (at - slots.start) / 8;
        let stores =
            inst.op_kind(0) == OpKind::Memory && inst.mnemonic() == iced_x86::Mnemonic::Mov;
        return Some(if stores { Mark::Spill { slot } } else { Mark::Reload { slot } });
    }
    let fields = [
        (offset::EXIT_SITE, "number of the exit"),
        (offset::NEXT_PC, "where an indirect jump goes"),
        (offset::EXTENDED_AWAY, "is the vector state in memory?"),
    ];
    let field = fields.iter().find(|(field, _)| *field as u64 == at).map(|(_, name)| *name);
    Some(Mark::Context { field: field.unwrap_or("the thread's context").into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(bytes: &[u8]) -> Instruction {
        Decoder::with_ip(64, bytes, 0x1000, DecoderOptions::NONE).decode()
    }

    #[test]
    fn spills_and_reloads_are_told_apart() {
        let field = (offset::SCRATCH as u32 + 8 * 3).to_le_bytes();
        let access = |opcode: u8| {
            let mut bytes = vec![0x65, 0x48, opcode, 0x04, 0x25];
            bytes.extend(field);
            decoded(&bytes)
        };
        assert_eq!(context(&access(0x89)), Some(Mark::Spill { slot: 3 }));
        assert_eq!(context(&access(0x8b)), Some(Mark::Reload { slot: 3 }));
        assert_eq!(context(&access(0x3b)), Some(Mark::Reload { slot: 3 }));
        assert_eq!(context(&decoded(&[0x48, 0x89, 0xc8])), None);
    }

    #[test]
    fn back_edges_lead_backwards() {
        assert_eq!(back_edge("0f85f6ffffff", 0x1000), Some(0xffc));
        assert_eq!(back_edge("0f8510000000", 0x1000), None);
        assert_eq!(back_edge("90", 0x1000), None);
    }
}
