//! Natural loops of a version, and their preheaders, in which passes compute values that do not
//! vary.
//!
//! [`loops`] computes the loops from the control-flow graph; the list is invalid once the blocks
//! change. [`make_preheaders`] gives each loop a block that all edges from outside go through.
//! `hoist` and `licm` call both on a version that they own; no lock.
//!
//! ```text
//! b0: branch v1 then b1(v2) else b1(v3)  b0: branch v1 then b3(v2) else b3(v3)
//! b1(v4): … jump b1(v5)                  b3(v6): jump b1(v6)            the preheader
//!                                        b1(v4): … jump b1(v5)
//! ```

use crate::reach::{Cfg, Point, definitions};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{BlockId, Operand, Ty, Value};
use crate::version::{Block, Term, Version};

/// A natural loop: all back edges to one header.
pub(super) struct Loop {
    pub header: BlockId,
    /// For each block of the version: is it in the loop?
    pub contains: Vec<bool>,
    /// The blocks with an edge back to the header.
    pub latches: Vec<BlockId>,
    /// The only block outside with an edge to the header, if that is its only edge.
    pub preheader: Option<BlockId>,
}

impl Loop {
    /// The end of the preheader.
    pub(super) fn before(&self, version: &Version) -> Option<Point> {
        let block = self.preheader?;
        Some(Point { block, inst: version.blocks[block.index()].insts.len() })
    }

    /// Is a block executed in every iteration?
    pub(super) fn always_runs(&self, cfg: &Cfg, block: BlockId) -> bool {
        self.latches.iter().all(|latch| cfg.dominates(block, *latch))
    }

    /// For each value: is it defined in the loop?
    pub(super) fn varying(&self, version: &Version) -> Vec<bool> {
        let inside = |def: &Option<crate::reach::Def>| match def {
            Some(crate::reach::Def::Param(block, _)) => self.contains[block.index()],
            Some(crate::reach::Def::Inst(point)) => self.contains[point.block.index()],
            None => false,
        };
        definitions(version).iter().map(inside).collect()
    }
}

/// Is an operand the same in every iteration?
pub(super) fn is_steady(varying: &[bool], o: Operand) -> bool {
    holds(SideCondition::LoopsSteady, o.as_value().is_none_or(|v: Value| !varying[v.index()]))
}

/// Gives each loop without a preheader one: an empty block on all edges from outside.
pub(super) fn make_preheaders(version: &mut Version) {
    let cfg = Cfg::new(version);
    for l in loops(version, &cfg).into_iter().filter(|l| l.preheader.is_none()) {
        let new = BlockId(version.blocks.len() as u32);
        let types: Vec<Ty> =
            version.blocks[l.header.index()].params.iter().map(|p| version.ty(*p)).collect();
        let params: Vec<Value> = types.into_iter().map(|ty| version.value(ty)).collect();
        for (b, block) in version.blocks.iter_mut().enumerate() {
            if !l.contains.get(b).is_some_and(|inside| *inside) {
                block
                    .term
                    .edges_mut()
                    .filter(|(to, _)| **to == l.header)
                    .for_each(|(to, _)| *to = new);
            }
        }
        let args = params.iter().map(|p| Operand::Value(*p)).collect();
        version.blocks.push(Block {
            params,
            insts: Vec::new(),
            term: Term::Jump { to: l.header, args },
        });
    }
}

/// The loops of a version; an inner loop comes before the loops that contain it.
pub(super) fn loops(version: &Version, cfg: &Cfg) -> Vec<Loop> {
    let mut found: Vec<Loop> = Vec::new();
    for latch in &cfg.order {
        for (header, _) in version.blocks[latch.index()].term.edges() {
            if !cfg.dominates(header, *latch) {
                continue;
            }
            match found.iter_mut().find(|l| l.header == header) {
                Some(known) => known.latches.push(*latch),
                None => {
                    let contains = vec![false; version.blocks.len()];
                    found.push(Loop { header, contains, latches: vec![*latch], preheader: None });
                }
            }
        }
    }
    for l in &mut found {
        l.contains[l.header.index()] = true;
        let mut work = l.latches.clone();
        while let Some(block) = work.pop() {
            if !std::mem::replace(&mut l.contains[block.index()], true) {
                work.extend(cfg.preds[block.index()].iter().filter(|p| cfg.is_reachable(**p)));
            }
        }
        let mut outside = cfg.preds[l.header.index()]
            .iter()
            .filter(|p| !l.contains[p.index()] && cfg.is_reachable(**p));
        l.preheader = match (outside.next(), outside.next()) {
            (Some(only), None)
                if matches!(version.blocks[only.index()].term, Term::Jump { .. }) =>
            {
                Some(*only)
            }
            _ => None,
        };
    }
    found.sort_by_key(|l| l.contains.iter().filter(|c| **c).count());
    found
}
