//! What is asked of the solver, and what it has answered.
//!
//! **Data.** [`Questions`] owns the answers of one proof. A goal is asked with the facts that share a value
//! with it, directly or through other facts: the others cannot matter much, and cost time. **Callers.**
//! One proof.
//!
//! ```text
//! goal  eq (zext32 v) (and w 0xffffffff)       asked with loads as any values; then with memory as arrays
//! ```

use super::facts::Facts;
use super::solver::{Answer, Depth, Solver, State};
use super::stopwatch::Stopwatch;
use super::term::{Memory, MemoryNode, Node, Term, Terms};
use rustc_hash::{FxHashMap, FxHashSet};
use std::rc::Rc;
use std::time::Duration;

/// How often facts are added that share a value with those found (guess).
const ROUNDS: u32 = 3;
/// Questions whether two accesses overlap that may be answered with no (guess: each costs some
/// milliseconds).
const MOST_OVERLAPS: u32 = 8;

/// States in which a goal does not follow that are kept (guess: the last ones belong to what could not be
/// shown).
const MOST_SUSPECTS: usize = 4;

/// The questions of a proof.
pub struct Questions<'a> {
    solver: &'a mut dyn Solver,
    since: Stopwatch,
    limit: Duration,
    /// True whatever the facts are.
    proven: FxHashSet<Term>,
    /// Not shown with this many facts.
    open: FxHashMap<Term, usize>,
    leaves: FxHashMap<Term, Rc<[Term]>>,
    overlaps: u32,
    /// How many the solver was asked.
    pub asked: u64,
    /// Was the time up?
    late: bool,
    /// The last states in which a goal does not follow.
    suspects: Vec<State>,
}

impl<'a> Questions<'a> {
    /// None yet.
    pub fn new(solver: &'a mut dyn Solver, since: Stopwatch, limit: Duration) -> Questions<'a> {
        Questions {
            solver,
            since,
            limit,
            proven: FxHashSet::default(),
            open: FxHashMap::default(),
            leaves: FxHashMap::default(),
            overlaps: 0,
            asked: 0,
            late: false,
            suspects: Vec::new(),
        }
    }

    /// Is the time up?
    pub fn is_late(&mut self) -> bool {
        self.late |= self.since.elapsed() > self.limit;
        self.late
    }

    /// Was the time up, and the last states in which a goal did not follow.
    pub fn given_up(&mut self) -> (bool, Vec<State>) {
        (self.late, std::mem::take(&mut self.suspects))
    }

    /// Is the goal true wherever the facts are?
    pub fn follows(&mut self, terms: &mut Terms, facts: &Facts, goal: Term) -> bool {
        self.decide(terms, facts, goal, Depth::Arrays)
    }

    fn decide(&mut self, terms: &mut Terms, facts: &Facts, goal: Term, deepest: Depth) -> bool {
        if facts.contradict || facts.has(terms, goal) || self.proven.contains(&goal) {
            return true;
        }
        let goal = facts.rewritten(terms, goal);
        if facts.has(terms, goal) || self.proven.contains(&goal) {
            return true;
        }
        if terms.constant(goal).is_some() || self.open.get(&goal) == Some(&facts.hold.len()) {
            return false;
        }
        let hold = self.related(terms, facts, goal);
        // What arbitrary values refute can only follow from facts, or from what memory is.
        let truth = terms.truth(true);
        if hold.is_empty()
            && terms.differ(goal, truth)
            && !(deepest == Depth::Arrays && self.loads(terms, goal, &hold))
        {
            return false;
        }
        let mut answer = Answer::Unknown;
        let depths = match deepest {
            Depth::Arrays => &[Depth::Atoms, Depth::Terms, Depth::Arrays][..],
            // Whether accesses overlap is a question about sums.
            _ => &[Depth::Terms],
        };
        for depth in depths.iter().copied() {
            if self.is_late() || depth == Depth::Arrays && !self.loads(terms, goal, &hold) {
                break;
            }
            self.asked += 1;
            answer = self.solver.follows(terms, &hold, goal, depth);
            if answer == Answer::Follows {
                if hold.is_empty() {
                    self.proven.insert(goal);
                }
                return true;
            }
        }
        if let (Answer::Refuted(state), Depth::Arrays) = (answer, deepest) {
            if self.suspects.len() == MOST_SUSPECTS {
                self.suspects.remove(0);
            }
            self.suspects.push(state);
        }
        self.open.insert(goal, facts.hold.len());
        false
    }

    /// Do two accesses share no byte?
    pub fn apart(
        &mut self,
        terms: &mut Terms,
        facts: &Facts,
        one: (Term, u32),
        two: (Term, u32),
    ) -> bool {
        let goal = terms.apart(one, two);
        if self.overlaps > MOST_OVERLAPS {
            return facts.has(terms, goal);
        }
        let asked = self.asked;
        let apart = self.decide(terms, facts, goal, Depth::Terms);
        self.overlaps += u32::from(!apart && self.asked > asked);
        apart
    }

    /// Is a term made of what is loaded?
    pub fn has_loads(&mut self, terms: &Terms, term: Term) -> bool {
        self.leaves(terms, term).iter().any(|leaf| matches!(terms.node(*leaf), Node::Load(..)))
    }

    /// Are two terms made of the same values? Then facts about these may make them equal.
    pub fn of_the_same(&mut self, terms: &Terms, one: Term, two: Term) -> bool {
        let [one, two]: [FxHashSet<Term>; 2] =
            [one, two].map(|term| self.leaves(terms, term).iter().copied().collect());
        one == two
    }

    /// Does it matter what stores have made of memory?
    fn loads(&mut self, terms: &Terms, goal: Term, hold: &[Term]) -> bool {
        let mut loads = Vec::new();
        for term in hold.iter().chain([&goal]) {
            for leaf in self.leaves(terms, *term).iter() {
                if let Node::Load(memory, _) = terms.node(*leaf) {
                    loads.push((*leaf, *memory));
                }
            }
        }
        loads.sort();
        loads.dedup();
        let stored =
            |memory: &Memory| matches!(terms.memory_node(*memory), MemoryNode::Store { .. });
        loads.len() > 1 && loads.iter().any(|(_, memory)| stored(memory))
    }

    /// The facts that have to do with a goal.
    fn related(&mut self, terms: &Terms, facts: &Facts, goal: Term) -> Vec<Term> {
        let mut values: FxHashSet<Term> = self.leaves(terms, goal).iter().copied().collect();
        let mut taken = vec![false; facts.hold.len()];
        for _ in 0..ROUNDS {
            let before = values.len();
            for (fact, taken) in facts.hold.iter().zip(&mut taken) {
                let leaves = self.leaves(terms, *fact);
                if !*taken && leaves.iter().any(|leaf| values.contains(leaf)) {
                    *taken = true;
                    values.extend(leaves.iter());
                }
            }
            if values.len() == before {
                break;
            }
        }
        facts.hold.iter().zip(taken).filter(|(_, taken)| *taken).map(|(fact, _)| *fact).collect()
    }

    /// The values that a term is made of, loads among them with those of their addresses.
    fn leaves(&mut self, terms: &Terms, term: Term) -> Rc<[Term]> {
        if let Some(leaves) = self.leaves.get(&term) {
            return leaves.clone();
        }
        let (mut work, mut seen, mut found) = (vec![term], FxHashSet::default(), Vec::new());
        while let Some(next) = work.pop() {
            if !seen.insert(next) {
                continue;
            }
            match terms.node(next) {
                Node::Const(_) => {}
                Node::Symbol(_) | Node::Output(..) => found.push(next),
                Node::Load(_, address) => {
                    found.push(next);
                    work.push(*address);
                }
                Node::Pure(_, _, args) => work.extend(args),
                Node::Sum(parts, _) => work.extend(parts.iter().map(|(t, _)| *t)),
                Node::Slice(of, _) => work.push(*of),
                Node::Bytes(parts) => work.extend(parts),
            }
        }
        let leaves: Rc<[Term]> = found.into();
        self.leaves.insert(term, leaves.clone());
        leaves
    }
}
