//! The three shapes of a trace's control flow, and a function that brings every trace into one of
//! them.
//!
//! A block of one recorded path ends in a `jump` or in an `exit`. So the blocks that control can
//! reach from the entry are a chain that either ends or returns to one of its own blocks. Several
//! recorded iterations of a loop, or executions of a function, are a tree ([`super::tree`]). [`normalise`] merges chains.
//! Afterwards the trace has one of three shapes, on which the passes rely:
//!
//! ```text
//! Linear   b0: … exit aN
//! Loop     b0: … jump b1(…)      b1(…): … jump b1(…)
//! Tree     b0: … jump b1(…)      b1(…): … branch v1 then b2() else b3()
//!                                b2(): … jump b1(…)      b3(): … exit aN
//! ```
//!
//! Everything in b0 dominates b1. A version with other branches has none of these shapes. Passes that call
//! this module leave such a version alone; passes that work on any control flow use
//! [`crate::reach::Cfg`]. The module has no data; the caller owns the version, no lock.

use super::{tree, unreachable};
use crate::op::Op;
use crate::types::{BlockId, Operand, Value};
use crate::version::rename;
use crate::version::{Block, Term, Version};

/// One of the three shapes a normalised trace has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// One block that ends in an exit.
    Linear,
    /// An entry block and a block that jumps to itself.
    Loop,
    /// An entry block and a tree of blocks whose root is the head of the loop, if there is one. See [`super::tree`].
    Tree,
}

/// The entry block.
pub(super) const ENTRY: usize = 0;
/// The loop block of a [`Shape::Loop`], and the loop's head of a [`Shape::Tree`].
pub(super) const BODY: usize = 1;

/// Merges the blocks of `version` into one of the shapes. Returns `None` and removes no more than
/// unreachable blocks for a `base` version, for a version with other branches, and for one whose jumps have
/// no valid target.
pub fn normalise(version: &mut Version) -> Option<Shape> {
    if version.blocks.iter().any(|b| matches!(b.term, Term::Branch { .. })) {
        unreachable::remove(version);
        if version.blocks.iter().any(|b| matches!(b.term, Term::Branch { .. })) {
            return tree::normalise(version).then_some(Shape::Tree);
        }
    }
    if let [block] = &version.blocks[..]
        && matches!(block.term, Term::Exit(_))
    {
        return Some(Shape::Linear);
    }
    if let [entry, body] = &version.blocks[..]
        && let (Term::Jump { to: BlockId(1), .. }, Term::Jump { to: BlockId(1), .. }) =
            (&entry.term, &body.term)
    {
        return Some(Shape::Loop);
    }
    let (chain, head) = chain(version)?;
    let mut blocks: Vec<Option<Block>> =
        std::mem::take(&mut version.blocks).into_iter().map(Some).collect();
    let mut table: Vec<Option<Operand>> = vec![None; version.types.len()];
    let mut merge = |part: &[usize]| -> Option<Block> {
        let mut merged: Option<Block> = None;
        for &b in part {
            let mut block = blocks[b].take().expect("a chain visits a block once");
            match &mut merged {
                None => merged = Some(block),
                Some(before) => {
                    if let Term::Jump { args, .. } = &before.term {
                        for (param, arg) in block.params.iter().zip(args) {
                            table[param.index()] = Some(rename(&table, *arg));
                        }
                    }
                    before.insts.append(&mut block.insts);
                    before.term = block.term;
                    // The arguments of a later jump may name parameters that have just been
                    // replaced.
                    Version::for_each_term_operand(&mut before.term, |o| *o = rename(&table, *o));
                }
            }
        }
        merged
    };
    let shape = match head {
        None => {
            let mut line = merge(&chain);
            // A loop that has become a line needs no safe point.
            line.iter_mut().for_each(|block| block.insts.retain(|inst| inst.op != Op::Poll));
            version.blocks.extend(line);
            Shape::Linear
        }
        Some(head) => {
            let entry = merge(&chain[..head]);
            let body = merge(&chain[head..]);
            let entry = entry.or_else(|| {
                // The entry is the loop's head: a new entry block passes the guest state on.
                let params: Vec<Value> = version.blocks_entry_copy(body.as_ref()?);
                let args = params.iter().map(|v| Operand::Value(*v)).collect();
                Some(Block { params, insts: Vec::new(), term: Term::Jump { to: BlockId(1), args } })
            });
            version.blocks.extend(entry);
            version.blocks.extend(body);
            for block in &mut version.blocks {
                if let Term::Jump { to, .. } = &mut block.term {
                    *to = BlockId(1);
                }
            }
            Shape::Loop
        }
    };
    version.for_each_operand(|o| *o = rename(&table, *o));
    Some(shape)
}

impl Version {
    /// Fresh values of the types of `block`'s parameters.
    fn blocks_entry_copy(&mut self, block: &Block) -> Vec<Value> {
        block.params.iter().map(|p| self.value(self.ty(*p))).collect()
    }
}

/// The blocks in the order in which control passes them, and the position to which control returns,
/// if it does.
fn chain(version: &Version) -> Option<(Vec<usize>, Option<usize>)> {
    let mut position = vec![None; version.blocks.len()];
    let mut chain = Vec::new();
    let mut at = 0;
    loop {
        let block = version.blocks.get(at)?;
        position[at] = Some(chain.len());
        chain.push(at);
        match &block.term {
            Term::Exit(_) => return Some((chain, None)),
            Term::Branch { .. } | Term::Guest(_) => return None,
            Term::Jump { to, args } => {
                let target = version.blocks.get(to.index())?;
                if target.params.len() != args.len() {
                    return None;
                }
                at = to.index();
                if position[at].is_some() {
                    return Some((chain, position[at]));
                }
            }
        }
    }
}
