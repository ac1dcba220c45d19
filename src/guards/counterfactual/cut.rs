//! The cheapest places for checks: a minimum cut for one predicate, and the cheapest set of points for
//! predicates that may be checked together.
//!
//! *One predicate.* A point of the program is a node with a capacity: what a check there costs. A check
//! is needed on each way from a source, where the predicate becomes known, to the sink, where it must
//! have been checked. So the cheapest places are a minimum cut of nodes; by the theorem of Ford and
//! Fulkerson it is as large as the maximum flow ([`petgraph`] computes that). This is the cut by which
//! partial redundancies are eliminated under a profile (Cai and Xue, "Optimal and efficient
//! speculation-based partial redundancy elimination", CGO 2003).
//!
//! *Predicates together.* Where a guard checks the conjunction of all predicates that are to be checked
//! there, the cost of a point is paid once. On a chain of points each predicate is an interval, from
//! the point where it is known to the last one where it may be checked, and a set of points is right if each
//! interval has one of them. What fails at a point does not come to later ones, so it pays to check early what fails often.
//! The cheapest set is a shortest path over the points: an edge leads from one point to another if no
//! interval lies between the two, and costs what comes to the second. (On any graph this is the multicut
//! problem, which is NP-hard; on a chain it is not.)
//!
//! No data, no lock.
//!
//! ```text
//! entry (10) -> head (1000) -> body (990) -> head       known at the entry, needed in the body: 10
//! ```

use petgraph::algo::{dijkstra, dinics};
use petgraph::graph::{DiGraph, NodeIndex};
use std::collections::BTreeSet;

/// The capacity of a point where the predicate cannot be checked. The sum of some millions of them is
/// still a u64.
const NEVER: u64 = 1 << 40;

/// A graph of points, of which each may have a cost.
#[derive(Debug, Clone, Default)]
pub struct Points {
    /// What a check at a point costs; none if there cannot be one.
    pub costs: Vec<Option<u64>>,
    /// Where control goes from each point.
    pub next: Vec<Vec<usize>>,
}

impl Points {
    /// The cost of the cheapest set of points without which no way leads from `source` to `sink`, these
    /// two included; none if there is no such set.
    ///
    /// Costs are below 2^40. Control that comes to the source again must be checked again, so an edge
    /// back to it adds nothing.
    pub fn cheapest(&self, source: usize, sink: usize) -> Option<u64> {
        let mut graph: DiGraph<(), u64> = DiGraph::with_capacity(2 * self.costs.len(), 0);
        let nodes: Vec<(NodeIndex, NodeIndex)> =
            self.costs.iter().map(|_| (graph.add_node(()), graph.add_node(()))).collect();
        for (point, cost) in self.costs.iter().enumerate() {
            let (enter, leave) = nodes[point];
            graph.add_edge(enter, leave, cost.unwrap_or(NEVER));
            for next in self.next[point].iter().filter(|next| **next != source) {
                graph.add_edge(leave, nodes[*next].0, NEVER);
            }
        }
        let (cut, _) = dinics(&graph, nodes[source].0, nodes[sink].1);
        (cut < NEVER).then_some(cut)
    }
}

/// A point of a chain at which predicates may be checked together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// How often control comes here if no predicate of its part fails; none if there cannot be a check.
    pub flow: Option<u64>,
    /// The part of the chain that it is in: what fails in one part does not come to the rest of it.
    pub part: usize,
}

/// A predicate of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    /// The first point at which it may be checked.
    pub first: usize,
    /// The last one.
    pub last: usize,
    /// How often it fails, wherever it is checked.
    pub failed: u64,
    /// The part that what fails does not come to.
    pub part: usize,
}

/// The fewest executions of guards with which all checks of a chain are made, if a guard makes all checks of its
/// point; none if some check cannot be made. Each check is made at the first point that has a guard.
pub fn cheapest_together(places: &[Place], checks: &[Check]) -> Option<u64> {
    // Points between which no check begins or ends are alike: the cheapest is enough.
    let ends = checks.iter().flat_map(|check| [check.first, check.last + 1]);
    let parts = (1..places.len()).filter(|point| places[*point].part != places[point - 1].part);
    let bounds: BTreeSet<usize> = ends.chain(parts).chain([0, places.len()]).collect();
    let bounds: Vec<usize> = bounds.into_iter().collect();
    let groups: Vec<Option<Place>> = bounds
        .windows(2)
        .map(|group| {
            let possible = places[group[0]..group[1]].iter().filter(|place| place.flow.is_some());
            possible.min_by_key(|place| place.flow).copied()
        })
        .collect();
    let group = |point: usize| bounds.partition_point(|bound| *bound <= point) - 1;
    // Node i + 1 is group i; node 0 stands before all groups, the last one behind them.
    let mut graph: DiGraph<(), u64> = DiGraph::new();
    let nodes: Vec<NodeIndex> = (0..groups.len() + 2).map(|_| graph.add_node(())).collect();
    let end = groups.len() + 1;
    // From a node on, the first end of a check that begins behind it. A guard has to be there by then.
    let mut latest = vec![end; groups.len() + 2];
    for check in checks {
        let (first, last) = (group(check.first), group(check.last));
        latest[first] = latest[first].min(last + 1);
    }
    for node in (0..=groups.len()).rev() {
        latest[node] = latest[node].min(latest[node + 1]);
    }
    for from in 0..end {
        if from > 0 && groups[from - 1].is_none() {
            continue;
        }
        // What begins before the end of this group has been checked, and its failures have left.
        let begun = checks.iter().filter(|check| check.first < bounds[from]);
        let begun: Vec<(usize, u64)> = begun.map(|check| (check.part, check.failed)).collect();
        for to in from + 1..=latest[from] {
            let cost = match to == end {
                true => Some(0),
                false => groups[to - 1].and_then(|place| {
                    let left = begun.iter().filter(|(part, _)| *part == place.part);
                    let left: u64 = left.map(|(_, failed)| failed).sum();
                    Some(place.flow?.saturating_sub(left))
                }),
            };
            if let Some(cost) = cost {
                graph.add_edge(nodes[from], nodes[to], cost);
            }
        }
    }
    dijkstra(&graph, nodes[0], Some(nodes[end]), |edge| *edge.weight()).get(&nodes[end]).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Does a way lead from the source to the sink past the points of `cut`?
    fn leads(points: &Points, cut: u32, source: usize, sink: usize) -> bool {
        let is_cut = |point: usize| cut & 1 << point != 0;
        let (mut seen, mut work) = (0_u32, vec![source]);
        while let Some(point) = work.pop() {
            if is_cut(point) || seen & 1 << point != 0 {
                continue;
            }
            if point == sink {
                return true;
            }
            seen |= 1 << point;
            work.extend(&points.next[point]);
        }
        false
    }

    /// The cost of a set of points; none if one of them cannot be checked at.
    fn cost(costs: &[Option<u64>], set: u32) -> Option<u64> {
        (0..costs.len()).filter(|point| set & 1 << point != 0).map(|point| costs[point]).sum()
    }

    const POINTS: usize = 8;

    /// Executions of guards at a set of points; none if a check is not made, or a point cannot have a guard.
    fn executions(places: &[Place], checks: &[Check], set: u32) -> Option<u64> {
        let has = |point: &usize| set & 1 << point != 0;
        let made_at = |check: &Check| (check.first..=check.last).find(has);
        checks.iter().map(made_at).collect::<Option<Vec<_>>>()?;
        let executed = |point: usize| {
            let Place { flow, part } = places[point];
            let before = checks.iter().filter(|c| c.part == part && made_at(c) < Some(point));
            Some(flow?.saturating_sub(before.map(|check| check.failed).sum()))
        };
        (0..places.len()).filter(has).map(executed).sum()
    }

    fn costs() -> impl Strategy<Value = Vec<Option<u64>>> {
        prop::collection::vec(prop::option::weighted(0.8, 0..50_u64), POINTS)
    }

    proptest! {
        /// The cut costs as much as the cheapest of all 256 placements.
        #[test]
        fn a_cut_is_the_cheapest_placement(
            costs in costs(),
            next in prop::collection::vec(prop::collection::vec(0..POINTS, 0..3), POINTS),
            source in 0..POINTS,
            sink in 0..POINTS,
        ) {
            let points = Points { costs, next };
            let all = (0..1_u32 << POINTS).filter(|cut| !leads(&points, *cut, source, sink));
            let best = all.filter_map(|cut| cost(&points.costs, cut)).min();
            prop_assert_eq!(points.cheapest(source, sink), best);
        }

        /// The path costs as much as the cheapest of all 256 sets of points by which all checks are made.
        #[test]
        fn a_path_is_the_cheapest_set(
            flows in costs(),
            second in 0..=POINTS,
            checks in prop::collection::vec((0..POINTS, 0..POINTS, 0..9_u64, 0..2_usize), 0..5),
        ) {
            let place = |(point, flow)| Place { flow, part: usize::from(point >= second) };
            let places: Vec<Place> = flows.into_iter().enumerate().map(place).collect();
            let check = |(a, b, failed, part): (usize, usize, u64, usize)| {
                Check { first: a.min(b), last: a.max(b), failed, part }
            };
            let checks: Vec<Check> = checks.into_iter().map(check).collect();
            let best = (0..1_u32 << POINTS).filter_map(|set| executions(&places, &checks, set)).min();
            prop_assert_eq!(cheapest_together(&places, &checks), best);
        }
    }

    #[test]
    fn what_does_not_vary_is_checked_before_a_loop() {
        let points = Points {
            costs: vec![Some(10), Some(1000), Some(990)],
            next: vec![vec![1], vec![2], vec![1]],
        };
        assert_eq!(points.cheapest(0, 2), Some(10));
        // Known anew in each iteration.
        assert_eq!(points.cheapest(1, 2), Some(990));
    }
}
