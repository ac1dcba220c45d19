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
//! the point where it is known to that where it is needed, and a set of points is right if each
//! interval has one of them. The cheapest set is a shortest path over the points: an edge leads from
//! one point to another if no interval lies between the two. (On any graph this is the multicut
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

/// The cost of the cheapest set of points of a chain that has a point in each interval (first and last
/// point, both included); none if there is no such set. `costs` is as in [`Points`].
pub fn cheapest_together(costs: &[Option<u64>], intervals: &[(usize, usize)]) -> Option<u64> {
    if intervals.is_empty() {
        return Some(0);
    }
    // Points between which no interval begins or ends are in the same intervals: the cheapest is enough.
    let ends = intervals.iter().flat_map(|(first, last)| [*first, last + 1]);
    let bounds: BTreeSet<usize> = ends.chain([0, costs.len()]).collect();
    let bounds: Vec<usize> = bounds.into_iter().collect();
    let groups = bounds.windows(2).map(|group| costs[group[0]..group[1]].iter().flatten().min());
    let costs: Vec<Option<u64>> = groups.map(Option::<&u64>::copied).collect();
    let group = |point: usize| bounds.partition_point(|bound| *bound <= point) - 1;
    // Node i + 1 is group i; node 0 stands before all groups, the last one behind them.
    let mut graph: DiGraph<(), u64> = DiGraph::new();
    let nodes: Vec<NodeIndex> = (0..costs.len() + 2).map(|_| graph.add_node(())).collect();
    let end = costs.len() + 1;
    // From a node on, the first end of an interval that begins behind it. One has to be there by then.
    let mut latest = vec![end; costs.len() + 2];
    for &(first, last) in intervals {
        let (first, last) = (group(first), group(last));
        latest[first] = latest[first].min(last + 1);
    }
    for node in (0..=costs.len()).rev() {
        latest[node] = latest[node].min(latest[node + 1]);
    }
    for from in 0..end {
        if from > 0 && costs[from - 1].is_none() {
            continue;
        }
        for to in from + 1..=latest[from] {
            let cost = if to == end { Some(0) } else { costs[to - 1] };
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

        /// The path costs as much as the cheapest of all 256 sets with a point in each interval.
        #[test]
        fn a_path_is_the_cheapest_set(
            costs in costs(),
            intervals in prop::collection::vec((0..POINTS, 0..POINTS), 0..5),
        ) {
            let intervals: Vec<(usize, usize)> =
                intervals.into_iter().map(|(a, b)| (a.min(b), a.max(b))).collect();
            let holds = |set: &u32| {
                intervals.iter().all(|(first, last)| (*first..=*last).any(|p| set & 1 << p != 0))
            };
            let best = (0..1_u32 << POINTS).filter(holds).filter_map(|set| cost(&costs, set)).min();
            prop_assert_eq!(cheapest_together(&costs, &intervals), best);
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
