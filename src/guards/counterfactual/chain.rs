//! A trace of a counting run as a chain of points with frequencies, and its predicates with the points
//! at which they could be checked.
//!
//! *Points.* Each instruction of the optimised version is a point: just before it. A guard has been
//! counted, so its point has the executions of the guard; what stands behind it has those that did not
//! fail. The first point of the entry block has the entries of the trace, that of the loop's head
//! the iterations.
//!
//! *Where a predicate may be checked.* The operations that compute it are pure, so they may stand
//! wherever their operands are known: behind the last parameter, load or other impure result among
//! these (its *source*). An assume may be added at any point that an anchor reaches,
//! or for which one can be made (transparency: sourir-popl18, 5.4), so all such points between the source and the guard are
//! possible. A guard may also move down, as the pass `delay` moves it, over what neither has an effect
//! nor may fault, up to the next such instruction; other guards are no obstacle, because guards
//! that share an anchor may stand in any order.
//!
//! Data: [`Chain`]. Invariant: each predicate's own point lies between its source and its latest point.
//! A trace that branches inside, and one whose guards were not all found in its text, is no chain. No lock.
//!
//! ```text
//! b0(v0): assume v0 …         point 0, 10 executions
//! b1(v1): v2 = load [v0]      point 1, 1,000
//!         assume v2 != v1 …   point 2, 1,000: source 2, because of the load
//! ```

use crate::guards::counterfactual::cut::{Check, Place, Points, cheapest_together};
use dynasour_ir::opt::anchor_for;
use dynasour_ir::reach::{Cfg, Def, Point, Reach, definitions, ends_reach, may_fault, successors};
use dynasour_ir::{BlockId, Inst, Op, Operand, Version, text};
use dynasour_runtime::observe::census::Fragment;

/// A predicate that a guard of the trace checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Predicate {
    /// The first point at which its operands are known.
    source: usize,
    /// The point of its guard.
    at: usize,
    /// The last point at which it may join another guard.
    latest: usize,
    /// Executions of its guard.
    executed: u64,
    /// Failures of its guard.
    failed: u64,
}

/// A trace (see the module's header).
#[derive(Debug, Clone)]
pub struct Chain {
    /// The points in the order of the path, with the executions of each where an anchor reaches it.
    points: Points,
    /// The number of the loop's first point; of all points if there is no loop.
    head: usize,
    /// Entries of the trace, and starts of iterations.
    flows: [u64; 2],
    /// The predicates, in the order of their guards.
    predicates: Vec<Predicate>,
}

impl Chain {
    /// The chain of a trace; none if it branches, or has no text.
    pub fn of(fragment: &Fragment) -> Option<Chain> {
        let detail = fragment.detail.as_ref()?;
        let version = text::version(&detail.optimised).ok()?;
        let cfg = Cfg::new(&version);
        let order = order(&version)?;
        let reach = Reach::new(&version, &cfg);
        let frequencies = frequencies(&version, &order, fragment)?;
        // A pass may make an anchor where none reaches.
        let mut scratch = version.clone();
        let mut first = vec![0; version.blocks.len()];
        let mut points = Points::default();
        for block in &order {
            first[block.index()] = points.costs.len();
            for (inst, executed) in frequencies[block.index()].iter().enumerate() {
                let point = Point { block: *block, inst };
                let is_reached = !reach.anchors_at(point).is_empty()
                    || anchor_for(&mut scratch, &cfg, point).is_some();
                scratch.anchors.truncate(version.anchors.len());
                points.costs.push(is_reached.then_some(*executed));
            }
        }
        for block in &order {
            let (start, body) = (first[block.index()], &version.blocks[block.index()]);
            let end = start + body.insts.len();
            points.next.extend((start..end).map(|point| vec![point + 1]));
            points.next.push(successors(&body.term).map(|to| first[to.index()]).collect());
        }
        let number = |point: Point| first[point.block.index()] + point.inst;
        let defs = definitions(&version);
        let mut predicates = Vec::new();
        for guard in &fragment.guards {
            let at = Point { block: BlockId(guard.position.0), inst: guard.position.1 as usize };
            let assume = version.blocks.get(at.block.index())?.insts.get(at.inst)?;
            let source = source(&version, &defs, assume.args[0], &number).min(number(at));
            let latest = number(Point { inst: latest(&version, at), ..at });
            let (executed, failed) = (guard.executed, guard.failed);
            predicates.push(Predicate { source, at: number(at), latest, executed, failed });
        }
        let head = head(&version, &order).map_or(points.costs.len(), |head| first[head.index()]);
        let flows = [fragment.entered, fragment.iterations.unwrap_or_default()];
        Some(Chain { points, head, flows, predicates })
    }

    /// Executions of guards if each predicate is checked by itself, at its cheapest points before its
    /// guard, while the others stay where they are.
    pub fn separate(&self) -> u64 {
        let cheapest = |p: &Predicate| {
            // The guard's own place is possible, whatever the graph says.
            self.points.cheapest(p.source, p.at).map_or(p.executed, |cost| cost.min(p.executed))
        };
        self.predicates.iter().map(cheapest).sum()
    }

    /// Executions of guards if predicates that are checked at one point become one guard.
    pub fn joined(&self) -> u64 {
        let part = |point: usize| usize::from(point >= self.head);
        let place = |(point, cost): (usize, &Option<u64>)| Place {
            flow: cost.map(|_| self.flows[part(point)]),
            part: part(point),
        };
        let check = |p: &Predicate| Check {
            first: p.source,
            last: p.latest,
            failed: p.failed,
            part: part(p.at),
        };
        let places: Vec<Place> = self.points.costs.iter().enumerate().map(place).collect();
        let checks: Vec<Check> = self.predicates.iter().map(check).collect();
        let separate = self.separate();
        cheapest_together(&places, &checks).map_or(separate, |joined| joined.min(separate))
    }
}

/// The loop's first block, if the last block of the chain jumps back.
fn head(version: &Version, order: &[BlockId]) -> Option<BlockId> {
    successors(&version.blocks[order.last()?.index()].term).next()
}

/// The blocks in the order in which control goes through them; none if it branches.
fn order(version: &Version) -> Option<Vec<BlockId>> {
    let mut order = vec![BlockId(0)];
    loop {
        let mut next = successors(&version.blocks[order.last()?.index()].term);
        match (next.next(), next.next()) {
            (None, _) => return Some(order),
            (Some(to), None) if order.contains(&to) => return Some(order),
            (Some(to), None) => order.push(to),
            (Some(_), Some(_)) => return None,
        }
    }
}

/// The executions of each point, by block. None if a guard is missing in the text.
fn frequencies(version: &Version, order: &[BlockId], fragment: &Fragment) -> Option<Vec<Vec<u64>>> {
    let head = head(version, order);
    let mut frequencies = vec![Vec::new(); version.blocks.len()];
    let mut flow = fragment.entered;
    let mut found = 0;
    for block in order {
        if head == Some(*block) {
            flow = fragment.iterations?;
        }
        let insts = &version.blocks[block.index()].insts;
        for inst in 0..=insts.len() {
            let position = (block.index() as u32, inst as u32);
            let guard = fragment.guards.iter().find(|guard| guard.position == position);
            // Signals and faults leave between guards, so what a guard has counted is the better number.
            flow = guard.map_or(flow, |guard| guard.executed);
            frequencies[block.index()].push(flow);
            if let Some(guard) = guard {
                insts.get(inst).filter(|inst| inst.op == Op::Assume)?;
                flow = flow.saturating_sub(guard.failed);
                found += 1;
            }
        }
    }
    (found == fragment.guards.len()).then_some(frequencies)
}

/// The number of the first point at which all operands of the pure operations that compute `predicate` are
/// known.
fn source(
    version: &Version,
    defs: &[Option<Def>],
    predicate: Operand,
    number: &dyn Fn(Point) -> usize,
) -> usize {
    let (mut source, mut work) = (0, vec![predicate]);
    let mut seen = vec![false; version.types.len()];
    while let Some(operand) = work.pop() {
        let Some(value) = operand.as_value().filter(|v| !seen[v.index()]) else { continue };
        seen[value.index()] = true;
        match defs[value.index()] {
            Some(Def::Param(block, _)) => source = source.max(number(Point { block, inst: 0 })),
            Some(Def::Inst(at)) => {
                let inst = &version.blocks[at.block.index()].insts[at.inst];
                if inst.op.is_pure() {
                    work.extend(inst.args.iter().copied());
                } else {
                    source = source.max(number(Point { inst: at.inst + 1, ..at }));
                }
            }
            None => {}
        }
    }
    source
}

/// The index of the last instruction that the guard at a point may pass: where it can join the guard there, or one
/// before it.
fn latest(version: &Version, at: Point) -> usize {
    let insts = &version.blocks[at.block.index()].insts;
    let deferring = version.defers_stores();
    let passes = |inst: &&Inst| {
        inst.op == Op::Assume
            || inst.op != Op::Poll
                && inst.anchor.is_none()
                && !ends_reach(version, inst)
                && !may_fault(version, inst)
                && !(deferring && inst.mem.is_some())
    };
    at.inst + insts[at.inst + 1..].iter().take_while(passes).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_predicate_is_known_behind_its_loads_and_moves_down_to_the_next_effect() {
        let version = text::version(
            "region 0x1000 {
               version t1 {
                 anchor a0 = base.0x1000 []
                 b0(v0: i64 = rax):
                   jump b1(v0)
                 b1(v1: i64):
                   poll else a0
                   v2 = load.i64 [v0] !a0
                   v3 = eq.i64 v0, 5
                   v4 = eq.i64 v2, v1
                   assume v3 else a0 from branch 0x1000 step 0
                   assume v4 else a0 from branch 0x1004 step 1
                   v5 = add.i64 v1, 1
                   store.i64 [v0], v5 !a0
                   jump b1(v5)
               }
             }",
        );
        let version = version.expect("a version");
        let order = order(&version).expect("a chain");
        assert_eq!(order, [BlockId(0), BlockId(1)]);
        let defs = definitions(&version);
        // The entry block is one point.
        let number = |point: Point| point.block.index() + point.inst;
        let guard = |inst: usize| {
            let predicate = version.blocks[1].insts[inst].args[0];
            let at = Point { block: BlockId(1), inst };
            (source(&version, &defs, predicate, &number), latest(&version, at))
        };
        // v3 is known at the entry, v4 behind the load; both may pass the addition, not the store.
        assert_eq!((guard(4), guard(5)), ((0, 6), (3, 6)));
    }
}
