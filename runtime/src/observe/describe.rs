//! Describes the path and the guards of a trace for the census ([`crate::observe::census`]).
//!
//! What a guard checks is what the origins of its `assume` say ([`dynasour_ir::origin`]), which every pass keeps.
//!
//! Data: none. No lock: the functions are pure, but for the bytes of guest code that [`steps`] reads.
//!
//! Example: `assume v35 else a4 from branch 0x401136 step 3` is a guard of kind branch, its site `branch@401136.3`.

use crate::memory;
use crate::observe::census::{Anchor, Guard, GuardKind, GuardOrigin, PathStep, Transfer};
use dynasour_ir::expressions::Expressions;
use dynasour_ir::{BlockId, GuestTerm, Op, Operand, Origin, Origins, Term, Version};
use dynasour_tracer::{Path, Step};
use std::fmt::Write;

/// The recorded blocks of `path`; with their bytes if `with_code`.
pub fn steps(path: &Path, with_code: bool) -> Vec<PathStep> {
    let step = |step: &Step| PathStep {
        pc: step.block.pc,
        last: last(step),
        end: step.block.end,
        instructions: step.block.count,
        transfer: transfer(step),
        next: step.next,
        code: with_code.then(|| code(step)),
    };
    path.steps.iter().map(step).collect()
}

/// The bytes of a block in hexadecimal.
fn code(step: &Step) -> String {
    let mut bytes = vec![0; step.block.end.saturating_sub(step.block.pc) as usize];
    let len = memory::fetch_code(step.block.pc, &mut bytes);
    hex(&bytes[..len])
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    let mut hex = String::with_capacity(2 * bytes.len());
    for b in bytes {
        let _ = write!(hex, "{b:02x}");
    }
    hex
}

/// The pc of the last instruction of a block.
fn last(step: &Step) -> u64 {
    let insts = &step.block.version.blocks[0].insts;
    let at = insts.iter().rev().find(|i| i.op == Op::At).and_then(|i| i.args[0].as_const());
    at.unwrap_or(step.block.pc)
}

fn transfer(step: &Step) -> Transfer {
    match &step.block.version.blocks[0].term {
        Term::Guest(term) => match term {
            GuestTerm::Goto(Operand::Const(_)) => Transfer::Direct,
            GuestTerm::Goto(_) => Transfer::Indirect,
            GuestTerm::Branch { .. } => Transfer::Branch,
            GuestTerm::Call { target: Operand::Const(_), .. } => Transfer::Call,
            GuestTerm::Call { .. } => Transfer::IndirectCall,
            GuestTerm::Ret(_) => Transfer::Return,
            GuestTerm::Syscall { .. } | GuestTerm::Special { .. } | GuestTerm::Trap { .. } => {
                Transfer::Runtime
            }
        },
        Term::Jump { .. } | Term::Branch { .. } | Term::Exit(_) => Transfer::Direct,
    }
}

/// The census record of the guard that was made of the `assume` at `position` (block and index),
/// with all counts zero. None if there is no `assume` at `position`.
pub fn guard(
    version: &Version,
    expressions: &Expressions<'_>,
    position: (u32, u32),
) -> Option<Guard> {
    let block = version.blocks.get(position.0 as usize)?;
    let assume = block.insts.get(position.1 as usize).filter(|i| i.op == Op::Assume)?;
    let (anchor, predicate) = (assume.anchor?, assume.args[0]);
    let origins: Vec<GuardOrigin> = (assume.origins.iter())
        .map(|o| GuardOrigin { kind: o.kind.into(), pc: o.pc, step: o.step })
        .collect();
    let kinds = origins.iter().map(|origin| origin.kind);
    let kind = kinds.reduce(|a, b| if a == b { a } else { GuardKind::Mixed });
    let a = &version.anchors[anchor.index()];
    let text = expressions.anchor(anchor);
    Some(Guard {
        index: 0,
        kind: kind.unwrap_or(GuardKind::Mixed),
        pc: origins.first().map_or(version.region, |origin| origin.pc),
        site: site(&assume.origins),
        origins,
        in_loop: expressions.is_loop(BlockId(position.0)),
        position,
        predicate: expressions.text(predicate),
        english: expressions.predicate(predicate),
        anchor: Anchor {
            name: anchor.to_string(),
            target: a.target.as_const(),
            text: format!("anchor {anchor} = {a}"),
            english: text,
            stores: a.stores.len() as u32,
        },
        executed: 0,
        failed: 0,
        went: Vec::new(),
        host: (0, 0),
    })
}

/// The name of a guard: `branch@401136.3+alias@40114a`
pub fn site(origins: &Origins) -> String {
    let mut site = String::new();
    for Origin { kind, pc, step } in origins.iter() {
        let separator = if site.is_empty() { "" } else { "+" };
        let _ = write!(site, "{separator}{}@{pc:x}", kind.name());
        let _ = step.map_or(Ok(()), |step| write!(site, ".{step}"));
    }
    site
}
