//! Liveness: which values are used at or after a point.
//!
//! A use is an operand of an instruction or a terminator. Where an instruction names an anchor, all
//! operands of the anchor are used too, because taking the anchor reads them there.
//!
//! [`Live`] borrows the version and owns a set of values for each block; it is invalid once the
//! version changes. Passes and regions build it for one question and drop it. No lock.
//!
//! ```text
//! b1(v2): v3 = add.i64 v2, 1; assume v4 else a0 [rax = v2]; jump b1(v3)  live at b1[1]: v2, v3, v4
//! ```

use crate::reach::{Cfg, Point};
use crate::types::{AnchorId, BlockId, Operand, Value};
use crate::version::{Term, Version};

/// Live values at the start of each block.
pub struct Live<'v> {
    version: &'v Version,
    at_start: Vec<Vec<bool>>,
}

impl<'v> Live<'v> {
    /// Analyses `version`: backward data-flow until nothing changes.
    pub fn new(version: &'v Version, cfg: &Cfg) -> Live<'v> {
        let at_start = vec![vec![false; version.types.len()]; version.blocks.len()];
        let mut live = Live { version, at_start };
        let mut changed = true;
        while changed {
            changed = false;
            for block in cfg.order.iter().rev() {
                let mut now = live.set_at(Point { block: *block, inst: 0 });
                version.blocks[block.index()].params.iter().for_each(|p| now[p.index()] = false);
                if live.at_start[block.index()] != now {
                    live.at_start[block.index()] = now;
                    changed = true;
                }
            }
        }
        live
    }

    /// The values live just before the instruction at `point`, in order.
    pub fn at(&self, point: Point) -> Vec<Value> {
        let set = self.set_at(point);
        (0..set.len() as u32).map(Value).filter(|v| set[v.index()]).collect()
    }

    fn set_at(&self, point: Point) -> Vec<bool> {
        let version = self.version;
        let block = &version.blocks[point.block.index()];
        let mut set = vec![false; version.types.len()];
        for (to, _) in block.term.edges() {
            self.add_block_start(&mut set, to);
        }
        Version::term_operands(&block.term).iter().for_each(|o| add(&mut set, *o));
        if let Term::Exit(anchor) = block.term {
            self.add_anchor(&mut set, anchor);
        }
        for inst in block.insts[point.inst..].iter().rev() {
            inst.defs.iter().for_each(|d| set[d.index()] = false);
            inst.args.iter().for_each(|o| add(&mut set, *o));
            if let Some(anchor) = inst.anchor {
                self.add_anchor(&mut set, anchor);
            }
        }
        set
    }

    fn add_block_start(&self, set: &mut [bool], block: BlockId) {
        set.iter_mut().zip(&self.at_start[block.index()]).for_each(|(slot, live)| *slot |= live);
    }

    fn add_anchor(&self, set: &mut [bool], anchor: AnchorId) {
        self.version.anchors[anchor.index()].operands().for_each(|o| add(set, o));
    }
}

fn add(set: &mut [bool], o: Operand) {
    if let Operand::Value(v) = o {
        set[v.index()] = true;
    }
}
