//! Unreachable-code elimination (sourir 4.2, 6.2) over any control flow.
//!
//! A branch on a constant, or with two equal edges, becomes a jump; an `assume 0` becomes the exit that it always is; blocks
//! that control cannot come to any more go; a block that is the only way to another is merged with it.
//!
//! ```text
//! branch 1 then b1(v0) else b2()              jump b1(v0)
//! assume 0 else a1; …; jump b3()              exit a1
//! ```
//!
//! Side conditions: none beyond the constants themselves. Exits are not edges: what an anchor leads to is no part of
//! the version, so it needs no keeping alive. Anchors and natives that lose their last use are `dce`'s to remove.

use super::OptOptions;
use super::shape::rename;
use crate::op::Op;
use crate::reach::Cfg;
use crate::types::{BlockId, Operand};
use crate::version::{Block, Term, Version};

/// Runs the pass; returns how many terminators changed and blocks went.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if version.is_base() || version.blocks.is_empty() {
        return 0;
    }
    decide(version) + remove(version) + merge(version)
}

/// Branches on constants become jumps, failed guards exits.
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
fn remove(version: &mut Version) -> usize {
    let cfg = Cfg::new(version);
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

/// Appends to each block that ends in a jump the block that only it leads to.
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
            // The emptied block leads to itself and nothing leads to it.
            entries[to] = 0;
            for (param, arg) in next.params.iter().zip(&args) {
                table[param.index()] = Some(resolve(&table, *arg));
            }
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

/// Follows renamings to their end; a parameter's argument may be a parameter that is merged away later.
fn resolve(table: &[Option<Operand>], mut o: Operand) -> Operand {
    loop {
        let next = rename(table, o);
        if next == o {
            return o;
        }
        o = next;
    }
}
