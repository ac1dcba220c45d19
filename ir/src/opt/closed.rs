//! Closed form: every block takes all it needs as parameters.
//!
//! In this form no value crosses a block's boundary except as an argument, so control may be led to any block from
//! anywhere that has the values: it is how loops get new entries. [`params`](super::params) undoes what was not needed.
//!
//! An anchor that is used in several blocks becomes one for each, on that block's names. Nothing is lost: each says what
//! the one said, as long as it reached.

use super::shape::rename;
use crate::live::Live;
use crate::reach::{Cfg, Place};
use crate::types::{AnchorId, BlockId, Operand, Value};
use crate::version::{Block, Term, Version};

/// Brings a version into closed form. Returns, for each block, the values that its new parameters stand for; they come
/// behind those that it had.
pub(super) fn close(version: &mut Version) -> Vec<Vec<Value>> {
    let cfg = Cfg::new(version);
    let needed: Vec<Vec<Value>> = {
        let live = Live::new(version, &cfg);
        let blocks = (0..version.blocks.len()).map(|b| BlockId(b as u32));
        let needed = |block: BlockId| {
            let own = &version.blocks[block.index()].params;
            let live = live.at(Place { block, inst: 0 });
            live.into_iter().filter(|v| !own.contains(v)).collect()
        };
        // The entry needs nothing; what control cannot reach has nothing.
        blocks.map(|b| if b.index() == 0 || !cfg.is_reachable(b) { Vec::new() } else { needed(b) }).collect()
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

/// Renames what a block uses and gives its anchors names of their own; its edges pass what their targets need.
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
