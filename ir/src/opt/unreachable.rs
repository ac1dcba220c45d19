//! Pass `unreachable`: unreachable-code elimination (sourir 4.2, 6.2) over any control flow.
//!
//! A branch on a constant, or with two equal edges, becomes a jump. An `assume 0` becomes an exit.
//! Blocks without a path from the entry are removed. A block with a single predecessor that jumps
//! to it is merged with the predecessor.
//!
//! ```text
//! branch 1 then b1(v0) else b2()              jump b1(v0)
//! assume 0 else a1; …; jump b3()              exit a1
//! ```
//!
//! There are no side conditions beyond the constants themselves. An exit is not an edge: the code
//! to which an anchor leads is not part of the version. `dce` removes anchors and natives that lose
//! their last use here. The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use crate::op::Op;
use crate::reach::Cfg;
use crate::types::{BlockId, Operand};
use crate::version::rename;
use crate::version::{Block, Term, Version};

/// Runs the pass; returns the number of terminators changed and of blocks removed.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if version.is_base() || version.blocks.is_empty() {
        return 0;
    }
    decide(version) + remove(version) + merge(version)
}

/// Branches on constants become jumps; guards that always fail become exits.
fn decide(version: &mut Version) -> usize {
    let mut changes = 0;
    for block in &mut version.blocks {
        let fails = |i: &crate::Inst| i.op == Op::Assume && i.args[0] == Operand::Const(0);
        if let Some(at) = block.insts.iter().position(fails)
            && let Some(anchor) = block.insts[at].anchor
        {
            block.insts.truncate(at);
            block.term = Term::Exit(anchor);
            changes += 1;
        }
        let Term::Branch { cond, then, otherwise } = &mut block.term else { continue };
        let edge = match cond {
            Operand::Const(0) => otherwise,
            Operand::Const(_) => then,
            Operand::Value(_) if then == otherwise => then,
            Operand::Value(_) => continue,
        };
        block.term = Term::Jump { to: edge.to, args: std::mem::take(&mut edge.args) };
        changes += 1;
    }
    changes
}

/// Removes the blocks without a path from the entry and renumbers the others.
pub(super) fn remove(version: &mut Version) -> usize {
    let cfg = Cfg::new(version);
    if (0..version.blocks.len() as u32).all(|b| cfg.is_reachable(BlockId(b))) {
        return 0;
    }
    let mut number = vec![BlockId(0); version.blocks.len()];
    let mut kept = 0;
    for (b, slot) in number.iter_mut().enumerate() {
        *slot = BlockId(kept);
        kept += u32::from(cfg.is_reachable(BlockId(b as u32)));
    }
    let before = version.blocks.len();
    let mut b = 0;
    version.blocks.retain(|_| {
        b += 1;
        cfg.is_reachable(BlockId(b - 1))
    });
    for block in &mut version.blocks {
        block.term.edges_mut().for_each(|(to, _)| *to = number[to.index()]);
    }
    before - version.blocks.len()
}

/// Appends to each block that ends in a jump the target of the jump, if that has no other
/// predecessor.
fn merge(version: &mut Version) -> usize {
    let mut entries = vec![0; version.blocks.len()];
    version.blocks.iter().flat_map(|b| b.term.edges()).for_each(|(to, _)| entries[to.index()] += 1);
    let mut table: Vec<Option<Operand>> = vec![None; version.types.len()];
    let mut merged = 0;
    for b in 0..version.blocks.len() {
        while let Term::Jump { to, args } = &version.blocks[b].term
            && entries[to.index()] == 1
            && to.index() != b
        {
            let (to, args) = (to.index(), args.clone());
            let empty = Block {
                params: Vec::new(),
                insts: Vec::new(),
                term: Term::Jump { to: BlockId(to as u32), args: Vec::new() },
            };
            let mut next = std::mem::replace(&mut version.blocks[to], empty);
            // The emptied block jumps to itself, and no edge leads to it.
            entries[to] = 0;
            for (param, arg) in next.params.iter().zip(&args) {
                table[param.index()] = Some(resolve(&table, *arg));
            }
            // Nothing closes a loop there, so it needs no safe point.
            next.insts.retain(|inst| inst.op != Op::Poll);
            let block = &mut version.blocks[b];
            block.insts.append(&mut next.insts);
            block.term = next.term;
            merged += 1;
        }
    }
    if merged > 0 {
        version.for_each_operand(|o| *o = resolve(&table, *o));
        remove(version);
    }
    merged
}

/// Follows replacements to their end: a parameter's argument may be a parameter that is merged away
/// later.
fn resolve(table: &[Option<Operand>], mut o: Operand) -> Operand {
    loop {
        let next = rename(table, o);
        if next == o {
            return o;
        }
        o = next;
    }
}
