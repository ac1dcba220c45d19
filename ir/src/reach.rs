//! Analyses that the verifier and the passes share: dominance, points of definitions, positions and
//! reach of anchors.
//!
//! Definitions:
//! * A [`Point`] is the point just before an instruction, or before the terminator, of a block.
//! * An anchor is *used* where an instruction or a terminator names it.
//! * An anchor's *position* is the latest point that comes before all its uses: its first use in
//!   the nearest block that dominates all uses, or the end of that block if it has no use there.
//!   Each time control passes the position, the anchor is set anew from the values of that moment.
//! * An anchor is *in reach* at a point if, on every path to it, no effect outside SSA lies after
//!   the last pass of the position (docs/design.md, "The IR"). The data-flow includes back edges.
//!
//! An operand of an anchor must dominate the anchor's position. This is enough, for the following
//! reason. Suppose that a value could change, by a back edge to its definition, between the
//! position and a use without another pass of the position. Then a path from the entry to the use
//! would avoid the position. But the position dominates the use.
//!
//! An anchor without uses has no position; its operands may be stale.
//!
//! **Data.** [`Cfg`] and [`Reach`] hold tables for one version; they are invalid once its blocks
//! change. **Callers.** Passes, the verifier and regions, each on tables of their own; no lock.
//!
//! ```text
//! b1: poll else a0              position of a0; in reach: a0
//!     v1 = load.i64 [v0] !a0    in reach: a0
//!     store.i64 [v0], 1 !a0     in reach before it: a0; after it: none
//!     assume v2 else a1         position of a1
//! ```

use crate::op::Op;
use crate::types::{AnchorId, BlockId, Loc, Operand, Value};
use crate::version::{Effects, Inst, Term, Version};
use std::fmt;

/// The point just before an instruction; `inst == insts.len()` is the point before the terminator.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Point {
    /// The block.
    pub block: BlockId,
    /// Index into the block's instructions.
    pub inst: usize,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.block, self.inst)
    }
}

/// The blocks to which a terminator may go.
pub fn successors(term: &Term) -> impl Iterator<Item = BlockId> {
    term.edges().map(|(to, _)| to)
}

/// Does this instruction end the reach of every anchor before it?
pub fn ends_reach(version: &Version, inst: &Inst) -> bool {
    const ENDING: Effects = Effects::WRITE
        .union(Effects::FENCE)
        .union(Effects::LOCKED)
        .union(Effects::NO_REPEAT)
        .union(Effects::STATE);
    match inst.op {
        Op::Store | Op::Print | Op::Read => true,
        Op::Native => match inst.native.and_then(|n| version.natives.get(n.index())) {
            Some(native) => native.effects.intersects(ENDING),
            None => true,
        },
        _ => false,
    }
}

/// May this instruction fault, so that it needs an anchor in a trace?
pub fn may_fault(version: &Version, inst: &Inst) -> bool {
    match inst.op {
        Op::Load | Op::Store => true,
        Op::Native => match inst.native.and_then(|n| version.natives.get(n.index())) {
            Some(native) => {
                let faulting =
                    Effects::READ | Effects::WRITE | Effects::UNKNOWN_EXTENT | Effects::MAY_TRAP;
                native.effects.intersects(faulting)
            }
            None => true,
        },
        _ => false,
    }
}

/// Control flow between the blocks of a version. Jumps to blocks that do not exist are left out.
pub struct Cfg {
    /// Predecessors of each block.
    pub preds: Vec<Vec<BlockId>>,
    /// The reachable blocks in reverse post-order; the first is the entry.
    pub order: Vec<BlockId>,
    /// Position of each block in `order`; `None` if unreachable.
    rank: Vec<Option<usize>>,
    /// Immediate dominators by rank (the entry's is itself).
    idom: Vec<usize>,
}

impl Cfg {
    /// Analyses `version`.
    pub fn new(version: &Version) -> Cfg {
        let count = version.blocks.len();
        let mut preds = vec![Vec::new(); count];
        let targets = |b: usize| successors(&version.blocks[b].term).filter(|t| t.index() < count);
        for b in 0..count {
            targets(b).for_each(|t| preds[t.index()].push(BlockId(b as u32)));
        }
        let mut order = Vec::new();
        let mut seen = vec![false; count];
        // (block, its successors that are not visited yet)
        let mut stack: Vec<(usize, Vec<BlockId>)> = Vec::new();
        if count > 0 {
            seen[0] = true;
            stack.push((0, targets(0).collect()));
        }
        while let Some((block, unvisited)) = stack.last_mut() {
            let block = *block;
            match unvisited.pop() {
                Some(next) if !seen[next.index()] => {
                    seen[next.index()] = true;
                    stack.push((next.index(), targets(next.index()).collect()));
                }
                Some(_) => {}
                None => {
                    order.push(BlockId(block as u32));
                    stack.pop();
                }
            }
        }
        order.reverse();
        let mut rank = vec![None; count];
        for (i, b) in order.iter().enumerate() {
            rank[b.index()] = Some(i);
        }
        let idom = Self::dominators(&order, &rank, &preds);
        Cfg { preds, order, rank, idom }
    }

    /// Immediate dominators (Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm).
    fn dominators(order: &[BlockId], rank: &[Option<usize>], preds: &[Vec<BlockId>]) -> Vec<usize> {
        let mut idom: Vec<Option<usize>> = vec![None; order.len()];
        if let Some(entry) = idom.first_mut() {
            *entry = Some(0);
        }
        let mut changed = true;
        while changed {
            changed = false;
            for (i, block) in order.iter().enumerate().skip(1) {
                let known = preds[block.index()]
                    .iter()
                    .filter_map(|p| rank[p.index()])
                    .filter(|p| idom[*p].is_some());
                let new = known.reduce(|a, b| common(&|r| idom[r].unwrap_or(0), a, b));
                if idom[i] != new {
                    idom[i] = new;
                    changed = true;
                }
            }
        }
        idom.into_iter().map(|d| d.unwrap_or(0)).collect()
    }

    /// Can control reach this block?
    pub fn is_reachable(&self, block: BlockId) -> bool {
        self.rank[block.index()].is_some()
    }

    /// The immediate dominator of a reachable block; none of the entry.
    pub fn parent(&self, block: BlockId) -> Option<BlockId> {
        let rank = self.rank[block.index()].filter(|r| *r > 0)?;
        Some(self.order[self.idom[rank]])
    }

    /// Does every path from the entry to `b` pass `a`? (Both must be reachable.)
    pub fn dominates(&self, a: BlockId, b: BlockId) -> bool {
        let (Some(a), Some(mut b)) = (self.rank[a.index()], self.rank[b.index()]) else {
            return false;
        };
        while b > a {
            b = self.idom[b];
        }
        a == b
    }

    /// Does every path from the entry to `b` pass `a` (a point dominates itself)?
    pub fn point_dominates(&self, a: Point, b: Point) -> bool {
        if a.block == b.block { a.inst <= b.inst } else { self.dominates(a.block, b.block) }
    }

    /// The nearest block that dominates both. Both must be reachable.
    fn common_dominator(&self, a: BlockId, b: BlockId) -> BlockId {
        match (self.rank[a.index()], self.rank[b.index()]) {
            (Some(a), Some(b)) => self.order[common(&|r| self.idom[r], a, b)],
            _ => a,
        }
    }
}

/// The nearest common ancestor in a dominator tree whose nodes are numbered in reverse post-order.
fn common(idom: &dyn Fn(usize) -> usize, mut a: usize, mut b: usize) -> usize {
    while a != b {
        while a > b {
            a = idom(a);
        }
        while b > a {
            b = idom(b);
        }
    }
    a
}

/// The point of a value's definition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Def {
    /// The n-th parameter of a block.
    Param(BlockId, usize),
    /// A result of the instruction at a point.
    Inst(Point),
}

/// The definition of each value; `None` for a dead value. If a value has several definitions the
/// first is used.
pub fn definitions(version: &Version) -> Vec<Option<Def>> {
    let mut defs = vec![None; version.types.len()];
    let mut define = |v: Value, def: Def| {
        if let Some(slot @ None) = defs.get_mut(v.index()) {
            *slot = Some(def);
        }
    };
    for (block, body) in version.blocks.iter().enumerate() {
        let block = BlockId(block as u32);
        body.params.iter().enumerate().for_each(|(i, v)| define(*v, Def::Param(block, i)));
        for (inst, i) in body.insts.iter().enumerate() {
            i.defs.iter().for_each(|v| define(*v, Def::Inst(Point { block, inst })));
        }
    }
    defs
}

/// Is a value with definition `def` available at `point`?
pub fn available(cfg: &Cfg, def: Def, point: Point) -> bool {
    match def {
        Def::Param(block, _) => cfg.dominates(block, point.block),
        Def::Inst(at) => cfg.point_dominates(Point { inst: at.inst + 1, ..at }, point),
    }
}

/// The points that use each anchor, by anchor; unreachable blocks are left out.
pub fn anchor_uses(version: &Version, cfg: &Cfg) -> Vec<Vec<Point>> {
    let mut uses = vec![Vec::new(); version.anchors.len()];
    for block in &cfg.order {
        let body = &version.blocks[block.index()];
        let mut note = |anchor: AnchorId, inst: usize| {
            if let Some(list) = uses.get_mut(anchor.index()) {
                list.push(Point { block: *block, inst });
            }
        };
        for (i, inst) in body.insts.iter().enumerate() {
            if let Some(anchor) = inst.anchor {
                note(anchor, i);
            }
        }
        if let Term::Exit(anchor) = body.term {
            note(anchor, body.insts.len());
        }
    }
    uses
}

/// A set of anchors.
#[derive(Clone, PartialEq, Eq)]
pub struct AnchorSet(Vec<u64>);

impl AnchorSet {
    fn filled(anchors: usize, with: u64) -> AnchorSet {
        AnchorSet(vec![with; anchors.div_ceil(64)])
    }

    fn insert(&mut self, a: AnchorId) {
        self.0[a.index() / 64] |= 1 << (a.index() % 64);
    }

    /// Is `a`, an anchor of the version, in the set?
    pub fn contains(&self, a: AnchorId) -> bool {
        self.0[a.index() / 64] & 1 << (a.index() % 64) != 0
    }

    fn intersect(&mut self, other: &AnchorSet) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a &= b);
    }

    fn clear(&mut self) {
        self.0.fill(0);
    }
}

/// Positions and reach of every anchor of a version.
pub struct Reach<'v> {
    version: &'v Version,
    /// The position of each anchor; `None` if nothing uses it.
    pub positions: Vec<Option<Point>>,
    /// The uses of each anchor.
    pub uses: Vec<Vec<Point>>,
    /// Anchors by the block of their position.
    starting: Vec<Vec<(usize, AnchorId)>>,
    /// In reach at the start of each block.
    at_start: Vec<AnchorSet>,
}

impl<'v> Reach<'v> {
    /// Analyses `version`.
    pub fn new(version: &'v Version, cfg: &Cfg) -> Reach<'v> {
        let uses = anchor_uses(version, cfg);
        let positions: Vec<Option<Point>> =
            uses.iter().map(|u| position(version, cfg, u)).collect();
        let mut starting = vec![Vec::new(); version.blocks.len()];
        for (a, point) in positions.iter().enumerate() {
            if let Some(point) = point {
                starting[point.block.index()].push((point.inst, AnchorId(a as u32)));
            }
        }
        let anchors = version.anchors.len();
        let at_start = vec![AnchorSet::filled(anchors, u64::MAX); version.blocks.len()];
        let mut reach = Reach { version, positions, uses, starting, at_start };
        reach.solve(cfg, anchors);
        reach
    }

    /// Forward data-flow: in reach at a block's start is what is in reach at the end of *every*
    /// predecessor.
    fn solve(&mut self, cfg: &Cfg, anchors: usize) {
        let mut changed = true;
        while changed {
            changed = false;
            for (i, block) in cfg.order.iter().enumerate() {
                let mut set = AnchorSet::filled(anchors, if i == 0 { 0 } else { u64::MAX });
                for pred in cfg.preds[block.index()].iter().filter(|p| cfg.is_reachable(**p)) {
                    let end = self.version.blocks[pred.index()].insts.len();
                    set.intersect(&self.set_at(Point { block: *pred, inst: end }));
                }
                if self.at_start[block.index()] != set {
                    self.at_start[block.index()] = set;
                    changed = true;
                }
            }
        }
    }

    fn set_at(&self, point: Point) -> AnchorSet {
        let mut set = self.at_start[point.block.index()].clone();
        let starting = &self.starting[point.block.index()];
        let body = &self.version.blocks[point.block.index()];
        // An anchor whose position is before the last effect is not in reach, so find that effect
        // first.
        let last_effect = (0..point.inst).rev().find(|i| ends_reach(self.version, &body.insts[*i]));
        if last_effect.is_some() {
            set.clear();
        }
        for (inst, anchor) in starting {
            if *inst <= point.inst && last_effect.is_none_or(|e| *inst > e) {
                set.insert(*anchor);
            }
        }
        set
    }

    /// Calls `f` with each point of a reachable block, in order, terminator included, and what is
    /// in reach there.
    pub fn walk(&self, block: BlockId, mut f: impl FnMut(Point, &AnchorSet)) {
        let mut set = self.at_start[block.index()].clone();
        let body = &self.version.blocks[block.index()];
        let mut starting = self.starting[block.index()].clone();
        starting.sort_unstable();
        let mut starting = starting.into_iter().peekable();
        for i in 0..=body.insts.len() {
            while let Some((_, anchor)) = starting.next_if(|(inst, _)| *inst == i) {
                set.insert(anchor);
            }
            f(Point { block, inst: i }, &set);
            if body.insts.get(i).is_some_and(|inst| ends_reach(self.version, inst)) {
                set.clear();
            }
        }
    }

    /// Is `anchor` in reach just before the instruction at `point` (in a reachable block)?
    pub fn covers(&self, anchor: AnchorId, point: Point) -> bool {
        anchor.index() < self.positions.len() && self.set_at(point).contains(anchor)
    }

    /// The anchors in reach just before the instruction at `point` (in a reachable block).
    pub fn anchors_at(&self, point: Point) -> Vec<AnchorId> {
        let set = self.set_at(point);
        (0..self.positions.len() as u32).map(AnchorId).filter(|a| set.contains(*a)).collect()
    }
}

/// The position of an anchor with these uses.
fn position(version: &Version, cfg: &Cfg, uses: &[Point]) -> Option<Point> {
    let block = uses.iter().map(|u| u.block).reduce(|a, b| cfg.common_dominator(a, b))?;
    let inst = uses.iter().filter(|u| u.block == block).map(|u| u.inst).min();
    Some(Point { block, inst: inst.unwrap_or(version.blocks[block.index()].insts.len()) })
}

/// The SSA locations that the version writes: a used anchor maps them to an operand other than
/// their value at entry. Indexed by [`Loc::ssa_index`].
pub fn written_locs(version: &Version, cfg: &Cfg) -> [bool; Loc::SSA_COUNT] {
    let mut written = [false; Loc::SSA_COUNT];
    for (anchor, uses) in version.anchors.iter().zip(anchor_uses(version, cfg)) {
        if uses.is_empty() {
            continue;
        }
        for (loc, operand) in &anchor.varmap {
            if let Some(i) = loc.ssa_index()
                && !is_entry_value(version, *loc, *operand)
            {
                written[i] = true;
            }
        }
    }
    written
}

/// Is `operand` the value that `loc` has at entry?
pub fn is_entry_value(version: &Version, loc: Loc, operand: Operand) -> bool {
    let Some(entry) = version.blocks.first() else { return false };
    let mut params = version.entry_locs.iter().zip(&entry.params);
    params.any(|(l, v)| *l == loc && operand == Operand::Value(*v))
}
