//! Loops with several paths, and lines that branch: the shape [`Shape::Tree`](super::Shape::Tree), and what passes
//! need to walk it.
//!
//! ```text
//! b0: … jump b1(…)                      b0 is the entry
//! b1(…): poll; … branch v1 then b2() else b4()
//! b2(): … branch v2 then b3() else …    the main path comes first: `then` is the next block
//! b3(): … jump b1(…)                    a leaf closes the loop, or ends in an exit
//! b4(): … jump b1(…)
//! ```
//!
//! Invariants of a version in this shape:
//! * b1 has the entry and the leaves as predecessors, every later block only its parent.
//! * Blocks stand in preorder: a parent before its children, and the `then` of a branch directly
//!   behind it. So the ancestors of a block dominate it, and a walk in order has met them.
//! * Only b0 and b1 have parameters. If no leaf returns to b1, the tree is no loop, and b1 follows b0 alone.
//! * All uses of an anchor are in one block.
//!
//! What a walk knows in a block holds in the block's descendants, and nowhere else: at a branch the walk
//! saves what it knows for the second child ([`Saved`]).
//!
//! The caller owns the version; no data between runs, no lock.

use super::shape::{BODY, ENTRY};
use crate::op::Op;
use crate::types::{BlockId, Operand};
use crate::version::{Block, Term, Version};

/// What a walk knew at branches, for their second children.
pub(super) struct Saved<T>(Vec<Option<T>>);

impl<T> Saved<T> {
    /// For a walk over `version`.
    pub fn new(version: &Version) -> Saved<T> {
        Saved(version.blocks.iter().map(|_| None).collect())
    }

    /// The walk has come to the end of `block` in the state that `state` returns.
    pub fn leave(&mut self, version: &Version, block: usize, state: impl FnOnce() -> T) {
        if let Term::Branch { otherwise, .. } = &version.blocks[block].term {
            self.0[otherwise.to.index()] = Some(state());
        }
    }

    /// The state in which the walk goes on at `block`; none if it is the state in which it is.
    pub fn enter(&mut self, block: usize) -> Option<T> {
        self.0[block].take()
    }
}

/// The blocks from which control goes to the loop's head: the entry, and then the leaves that close
/// the loop. Of a `Loop`, too.
pub(super) fn to_head(version: &Version) -> Vec<usize> {
    let jumps =
        |b: &usize| matches!(version.blocks[*b].term, Term::Jump { to, .. } if to.index() == BODY);
    (0..version.blocks.len()).filter(jumps).collect()
}

/// The arguments with which a block jumps to the loop's head.
pub(super) fn args(version: &Version, block: usize) -> &[Operand] {
    match &version.blocks[block].term {
        Term::Jump { args, .. } => args,
        Term::Branch { .. } | Term::Exit(_) | Term::Guest(_) => &[],
    }
}

/// Adds an argument for a new parameter of the loop's head to each jump there; `from` are the blocks of
/// [`to_head`].
pub(super) fn add_args(
    version: &mut Version,
    from: &[usize],
    args: impl IntoIterator<Item = Operand>,
) {
    for (block, arg) in from.iter().zip(args) {
        if let Term::Jump { args, .. } = &mut version.blocks[*block].term {
            args.push(arg);
        }
    }
}

/// Brings a version with branches into the shape; false, and changes nothing, if it cannot have it.
pub(super) fn normalise(version: &mut Version) -> bool {
    let Some(head) = head(version) else { return false };
    split_edges(version, head);
    let chains = chains(version, head);
    let is_normal = chains.len() == version.blocks.len()
        && chains.iter().enumerate().all(|(b, chain)| chain[..] == [b])
        && version.blocks.iter().skip(BODY + 1).all(|block| block.params.is_empty());
    if !is_normal {
        rebuild(version, &chains);
    }
    separate_anchors(version);
    true
}

/// The head of the loop, if the blocks that control can reach are such a tree.
fn head(version: &Version) -> Option<usize> {
    let count = version.blocks.len();
    let mut entries = vec![0usize; count];
    let mut reached = vec![false; count];
    let mut work = vec![ENTRY];
    while let Some(b) = work.pop() {
        if std::mem::replace(reached.get_mut(b)?, true) {
            continue;
        }
        if matches!(version.blocks[b].term, Term::Guest(_)) {
            return None;
        }
        for (to, args) in version.blocks[b].term.edges() {
            if version.blocks.get(to.index())?.params.len() != args.len() {
                return None;
            }
            entries[to.index()] += 1;
            work.push(to.index());
        }
    }
    // The head is the only block with several ways in, and the entry leads to it without a branch.
    let heads: Vec<usize> = (0..count).filter(|b| entries[*b] > 1).collect();
    let head = match heads[..] {
        [head] => head,
        // No loop: the tree begins behind the entry.
        [] => match &version.blocks[ENTRY].term {
            Term::Jump { to, .. } => to.index(),
            _ => return None,
        },
        _ => return None,
    };
    let mut at = ENTRY;
    while at != head {
        let Term::Jump { to, .. } = &version.blocks[at].term else { return None };
        at = to.index();
    }
    // No way leads back to the entry, and the head's other ways in come from its own tree.
    (entries[ENTRY] == 0).then_some(head)
}

/// Puts an empty block on each way from a branch to the head.
fn split_edges(version: &mut Version, head: usize) {
    let first = version.blocks.len();
    let mut added: Vec<Block> = Vec::new();
    let branches = version.blocks.iter_mut().filter(|b| matches!(b.term, Term::Branch { .. }));
    for (to, args) in branches.flat_map(|b| b.term.edges_mut()).filter(|(to, _)| to.index() == head)
    {
        let term = Term::Jump { to: *to, args: std::mem::take(args) };
        *to = BlockId((first + added.len()) as u32);
        added.push(Block { params: Vec::new(), insts: Vec::new(), term });
    }
    version.blocks.extend(added);
}

/// The chains of blocks of which each becomes one block, in preorder.
fn chains(version: &Version, head: usize) -> Vec<Vec<usize>> {
    let mut chains = Vec::new();
    let mut work = vec![head, ENTRY];
    while let Some(first) = work.pop() {
        let mut chain = vec![first];
        let mut at = first;
        loop {
            match &version.blocks[at].term {
                Term::Jump { to, .. } if to.index() != head => {
                    at = to.index();
                    chain.push(at);
                    continue;
                }
                Term::Branch { then, otherwise, .. } => {
                    work.extend([otherwise.to.index(), then.to.index()]);
                }
                Term::Jump { .. } | Term::Exit(_) | Term::Guest(_) => {}
            }
            break;
        }
        chains.push(chain);
    }
    chains
}

/// Makes one block of each chain.
fn rebuild(version: &mut Version, chains: &[Vec<usize>]) {
    let mut old: Vec<Option<Block>> =
        std::mem::take(&mut version.blocks).into_iter().map(Some).collect();
    let mut number = vec![BlockId(0); old.len()];
    chains.iter().enumerate().for_each(|(n, chain)| number[chain[0]] = BlockId(n as u32));
    let head = chains[BODY][0];
    // The parameters of all blocks but the entry and the head are the arguments of the only way there.
    let mut table: Vec<Option<Operand>> = vec![None; version.types.len()];
    let ways = chains.iter().flatten().filter_map(|b| old[*b].as_ref());
    for (to, args) in ways.flat_map(|block| block.term.edges()).filter(|(to, _)| to.index() != head)
    {
        let params = old[to.index()].iter().flat_map(|block| &block.params);
        params.zip(args).for_each(|(param, arg)| table[param.index()] = Some(*arg));
    }
    for (n, chain) in chains.iter().enumerate() {
        let mut parts = chain.iter().filter_map(|b| old[*b].take());
        let Some(mut block) = parts.next() else { continue };
        for mut part in parts {
            // Nothing closes a loop there, so it needs no safe point.
            part.insts.retain(|inst| inst.op != Op::Poll);
            block.insts.append(&mut part.insts);
            block.term = part.term;
        }
        if n > BODY {
            block.params.clear();
        }
        for (to, args) in block.term.edges_mut() {
            *to = number[to.index()];
            if to.index() != BODY {
                args.clear();
            }
        }
        version.blocks.push(block);
    }
    version.for_each_operand(|o| {
        // An argument may be a parameter that is replaced, too.
        while let Operand::Value(v) = *o
            && let Some(next) = table[v.index()]
        {
            *o = next;
        }
    });
}

/// Gives each block an anchor of its own where several blocks use one.
fn separate_anchors(version: &mut Version) {
    let mut user: Vec<Option<usize>> = vec![None; version.anchors.len()];
    for b in 0..version.blocks.len() {
        let mut copies: Vec<(u32, u32)> = Vec::new();
        let mut block = std::mem::replace(
            &mut version.blocks[b],
            Block { params: Vec::new(), insts: Vec::new(), term: Term::Exit(crate::AnchorId(0)) },
        );
        let exit = match &mut block.term {
            Term::Exit(anchor) => Some(anchor),
            _ => None,
        };
        for anchor in block.insts.iter_mut().filter_map(|i| i.anchor.as_mut()).chain(exit) {
            match user.get(anchor.index()).copied().flatten() {
                Some(other) if other != b => {
                    let known =
                        copies.iter().find(|(old, _)| *old == anchor.0).map(|(_, new)| *new);
                    anchor.0 = known.unwrap_or_else(|| {
                        let copy = version.anchor(version.anchors[anchor.index()].clone());
                        copies.push((anchor.0, copy.0));
                        user.push(Some(b));
                        copy.0
                    });
                }
                _ => user[anchor.index()] = Some(b),
            }
        }
        version.blocks[b] = block;
    }
}
