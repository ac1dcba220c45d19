//! Closed form: every block takes each value that it uses from outside as a parameter.
//!
//! In this form a value crosses from one block to another only as an argument. So control can be
//! led to any block from anywhere that has the values: this is how a loop gets a new entry
//! ([`mod@super::continuation`], the only caller). [`params`](super::params) removes the parameters
//! that turn out to be unnecessary.
//!
//! An anchor that is used in several blocks becomes one anchor for each block, in terms of that
//! block's values. Each copy describes the same state as the original, wherever the original was in
//! reach.
//!
//! The module has no data; the caller owns the version, no lock.
//!
//! ```text
//! b0(v0: i64 = rax): jump b1()                b0(v0: i64 = rax): jump b1(v0)
//! b1: print v0; exit a0 [rax = v0]            b1(v1): print v1; exit a1 [rax = v1]
//! ```

use crate::live::Live;
use crate::reach::{Cfg, Point};
use crate::types::{AnchorId, BlockId, Operand, Value};
use crate::version::rename;
use crate::version::{Block, Term, Version};

/// Brings a version into closed form. Returns, for each block, the values for which its new
/// parameters stand; the new parameters come after the old ones.
pub(super) fn close(version: &mut Version) -> Vec<Vec<Value>> {
    let cfg = Cfg::new(version);
    let needed: Vec<Vec<Value>> = {
        let live = Live::new(version, &cfg);
        let blocks = (0..version.blocks.len()).map(|b| BlockId(b as u32));
        let needed = |block: BlockId| {
            let own = &version.blocks[block.index()].params;
            let live = live.at(Point { block, inst: 0 });
            live.into_iter().filter(|v| !own.contains(v)).collect()
        };
        // The entry needs no parameters for values of other blocks, and neither does an unreachable
        // block.
        blocks
            .map(|b| if b.index() == 0 || !cfg.is_reachable(b) { Vec::new() } else { needed(b) })
            .collect()
    };
    for (b, values) in needed.iter().enumerate() {
        let mut table: Vec<Option<Operand>> = vec![None; version.types.len()];
        for value in values {
            let param = version.value(version.ty(*value));
            version.blocks[b].params.push(param);
            table[value.index()] = Some(param.into());
        }
        rename_block(version, b, &table, &needed);
    }
    needed
}

/// Renames the operands of a block, gives it anchors of its own, and passes on its edges the values
/// that their targets need.
fn rename_block(version: &mut Version, b: usize, table: &[Option<Operand>], needed: &[Vec<Value>]) {
    let empty = Block { params: Vec::new(), insts: Vec::new(), term: Term::Exit(AnchorId(0)) };
    let mut block = std::mem::replace(&mut version.blocks[b], empty);
    let mut copies: Vec<Option<AnchorId>> = vec![None; version.anchors.len()];
    let mut own = |version: &mut Version, anchor: &mut AnchorId| {
        let old = anchor.index();
        *anchor = *copies[old].get_or_insert_with(|| {
            let mut copy = version.anchors[old].clone();
            Version::for_each_anchor_operand(&mut copy, |o| *o = rename(table, *o));
            version.anchor(copy)
        });
    };
    for inst in &mut block.insts {
        inst.args.iter_mut().for_each(|o| *o = rename(table, *o));
        if let Some(anchor) = &mut inst.anchor {
            own(version, anchor);
        }
    }
    for (to, args) in block.term.edges_mut() {
        args.extend(needed[to.index()].iter().map(|v| Operand::Value(*v)));
    }
    Version::for_each_term_operand(&mut block.term, |o| *o = rename(table, *o));
    if let Term::Exit(anchor) = &mut block.term {
        own(version, anchor);
    }
    version.blocks[b] = block;
}
