//! The proof itself: the version against `base`, from cut to cut.
//!
//! **Data.** A [`Proof`] owns terms and facts of one version. **Callers.** [`prove`].
//!
//! ```text
//! segment 0 (entry)     paths to a0, a1 and to head b1: 12 opportunities, all found in base
//! segment 1 (b1)        known at the head: [rsp + 8] = v7; paths to a3 and back to b1
//! ```

use super::cuts::Cut;
use super::facts::{Contents, Facts, Known};
use super::frame::{Frame, Position, Side, Stuck, World};
use super::questions::Questions;
use super::refute::refute;
use super::solver::Solver;
use super::spec::{Reference, Spec};
use super::stopwatch::Stopwatch;
use super::term::{MemoryNode, Node, Symbol, Terms};
use crate::eval::check::Code;
use crate::op::Op;
use crate::reach::Cfg;
use crate::setup::Setup;
use crate::types::{AnchorId, BlockId, Loc, Operand, Ty};
use crate::validate::Tables;
use crate::version::{Fact, Term as End, Version};
use rustc_hash::FxHashMap;
use std::time::Duration;

/// What is to be proven.
pub struct Claim<'a> {
    /// What is right.
    pub right: Right<'a>,
    /// The version that is to do the same.
    pub version: &'a Version,
    /// Address, bytes and value of read-only memory.
    pub constants: &'a [(u64, u32, u64)],
}

/// What a version is compared with.
pub enum Right<'a> {
    /// A program, from the version's region on.
    Program(&'a mut dyn Code),
    /// A trace of the same region. What lies behind its exits is not known.
    Trace(&'a Version),
}

/// When a proof is given up.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// After this processor time.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { time: Duration::from_secs(2) }
    }
}

/// What came of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The version does what is right, from every state.
    Proven,
    /// It does not, from this one.
    Refuted {
        /// A counterexample, as text that `dynasour ir eval` and `diff` read.
        setup: Setup,
        /// What is wrong from there.
        what: String,
    },
    /// Not decided: what could not be shown.
    Unknown {
        /// In words.
        why: String,
    },
}

/// A verdict, and what it took.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// What came of it.
    pub verdict: Verdict,
    /// Opportunities and exits whose states were shown to be right.
    pub states: u64,
    /// Questions to the solver.
    pub questions: u64,
    /// Processor time.
    pub time: Duration,
}

/// A proof under way.
pub struct Proof<'a> {
    pub world: World<'a>,
    reference: Reference<'a>,
    pub version: &'a Version,
    pub cuts: FxHashMap<BlockId, Cut>,
    states: u64,
    /// What is known at a head has changed since its segment was followed.
    pub again: bool,
}

/// Where the version is on one of its ways, what is known there, and what is right beside it.
#[derive(Clone)]
struct Way {
    block: BlockId,
    from: usize,
    frame: Frame,
    facts: Facts,
    spec: Spec,
    /// The head where the segment began; none at the entry.
    cut: Option<BlockId>,
}

/// Tries to prove a claim.
pub fn prove<'a>(claim: Claim<'a>, solver: &'a mut dyn Solver, limits: Limits) -> Outcome {
    let since = Stopwatch::start();
    let contents = Contents { initial: FxHashMap::default(), constant: claim.constants.to_vec() };
    let world = World {
        terms: Terms::default(),
        contents,
        questions: Questions::new(solver, since, limits.time),
        private: claim.version.context.private_memory(),
        fetches: true,
        executed: FxHashMap::default(),
        tables: Tables::default(),
    };
    let mut proof = Proof {
        world,
        reference: Reference::new(claim.right),
        version: claim.version,
        cuts: FxHashMap::default(),
        states: 0,
        again: true,
    };
    let verdict = match proof.run() {
        Ok(()) => Verdict::Proven,
        Err(why) => {
            let (late, suspects) = proof.world.questions.given_up();
            let why = if late { format!("out of time: {why}") } else { why };
            match refute(&mut proof.reference, claim.version, claim.constants, &suspects) {
                Some((setup, what)) => Verdict::Refuted { setup, what },
                None => Verdict::Unknown { why },
            }
        }
    };
    let questions = proof.world.questions.asked;
    Outcome { verdict, states: proof.states, questions, time: since.elapsed() }
}

/// The heads of a version's loops.
fn heads(version: &Version) -> Vec<BlockId> {
    let cfg = Cfg::new(version);
    let is_head = |b: &&BlockId| {
        cfg.preds[b.index()].iter().any(|p| cfg.is_reachable(*p) && cfg.dominates(**b, *p))
    };
    cfg.order.iter().filter(is_head).copied().collect()
}

/// Does each way back lead to one of the heads? Else a loop has more than one entry.
fn is_reducible(version: &Version, heads: &[BlockId]) -> bool {
    let order = Cfg::new(version).order;
    let rank = |block: BlockId| order.iter().position(|b| *b == block);
    order.iter().enumerate().all(|(at, block)| {
        let mut edges = version.blocks[block.index()].term.edges();
        edges.all(|(to, _)| rank(to).is_some_and(|to| to > at) || heads.contains(&to))
    })
}

/// The instruction of a head that is its safe point.
fn safe_point(version: &Version, head: BlockId) -> Result<(usize, AnchorId), Stuck> {
    let insts = &version.blocks[head.index()].insts;
    let at = insts.iter().position(|i| !i.op.is_pure());
    let poll = at.map(|at| (at, &insts[at])).filter(|(_, inst)| inst.op == Op::Poll);
    match poll {
        Some((at, inst)) => Ok((at, inst.anchor.ok_or("a safe point without an anchor")?)),
        None => Err(format!("the loop at {head} has no safe point at its head")),
    }
}

impl Proof<'_> {
    fn run(&mut self) -> Result<(), Stuck> {
        let version = self.version;
        if version.is_base() {
            return Err("a base version is not a trace".to_string());
        }
        let heads = heads(version);
        if !is_reducible(version, &heads) {
            return Err("a loop has more than one entry".to_string());
        }
        for head in &heads {
            safe_point(version, *head)?;
            self.cuts.insert(*head, Cut::default());
        }
        self.entry()?;
        // Each round drops at least one thing that was taken to be known at a head.
        while std::mem::take(&mut self.again) {
            for head in &heads {
                self.head(*head)?;
            }
        }
        Ok(())
    }

    /// The facts of the context about memory, at each cut.
    fn monitored(&mut self) -> Vec<Known> {
        let mut known = Vec::new();
        for fact in &self.version.context.facts {
            if let Fact::MemEquals { ty, address, value } = *fact {
                let address = self.world.terms.number(address, 64);
                let value = self.world.terms.number(value, ty.bits());
                known.push(Known { address, bytes: ty.bytes(), value });
            }
        }
        known
    }

    fn entry(&mut self) -> Result<(), Stuck> {
        let version = self.version;
        let mut facts = Facts::default();
        let locs = std::array::from_fn(|i| {
            self.world.terms.symbol(Symbol::Entry(Loc::from_ssa_index(i)), 64)
        });
        self.world.assume_context(&mut facts, version, &locs);
        let known = self.monitored();
        for known in &known {
            facts.access(known.address, known.bytes, false);
        }
        for (address, bytes, _) in self.world.contents.constant.clone() {
            let address = self.world.terms.number(address, 64);
            facts.access(address, bytes, false);
        }
        self.world.contents.initial.insert(0, known);
        let memory = self.world.terms.memory(MemoryNode::Initial(0));
        let in_place = self.world.terms.initial_in_place(0);
        let loads = in_place;
        let pc = self.world.terms.number(version.region, 64);
        let start = Position { pc, locs, memory, in_place, loads };
        let mut frame = Frame::new(&start);
        frame.values = vec![None; version.types.len()];
        let entry = version.blocks.first().ok_or("there is no entry block")?;
        for (loc, param) in version.entry_locs.iter().zip(&entry.params) {
            let index = loc.ssa_index().ok_or("an entry location")?;
            frame.values[param.index()] = Some(locs[index]);
        }
        let spec = Spec::new(&self.reference, &start)?;
        self.follow(Way { block: BlockId(0), from: 0, frame, facts, spec, cut: None })
    }

    /// The segment that begins at a loop's head.
    fn head(&mut self, head: BlockId) -> Result<(), Stuck> {
        let version = self.version;
        let number = head.0 + 1;
        let cut = &self.cuts[&head];
        let Some((mut frame, facts, right)) = cut.first.clone() else { return Ok(()) };
        let (mut known, relations) = (cut.known.clone(), cut.relations.clone());
        known.extend(self.monitored());
        frame.memory = self.world.terms.memory(MemoryNode::Initial(number));
        frame.in_place = self.world.terms.initial_in_place(number);
        frame.loads = frame.in_place;
        for param in &version.blocks[head.index()].params {
            let bits = version.ty(*param).bits();
            frame.values[param.index()] = Some(self.world.terms.symbol(Symbol::Head(*param), bits));
        }
        for relation in relations {
            relation.establish(&mut self.world.terms, &mut frame);
        }
        for known in &mut known {
            if let Node::Symbol(Symbol::Head(value)) = *self.world.terms.node(known.value) {
                known.value = frame.values[value.index()].unwrap_or(known.value);
            }
        }
        self.world.contents.initial.insert(number, known);
        let (poll, anchor) = safe_point(version, head)?;
        let mut facts = facts;
        for inst in &version.blocks[head.index()].insts[..poll] {
            self.world.step(&mut frame, &mut facts, version, inst, Side::Claims)?;
        }
        let start = self.rebuilt(&frame, &facts, anchor)?;
        let spec = right.again(&mut self.world, &self.reference, &start)?;
        let (from, cut) = (poll + 1, Some(head));
        self.follow(Way { block: head, from, frame, facts, spec, cut })
    }

    /// The state that an anchor of the version rebuilds.
    fn rebuilt(
        &mut self,
        frame: &Frame,
        facts: &Facts,
        anchor: AnchorId,
    ) -> Result<Position, Stuck> {
        self.world.rebuilt(frame, facts, self.version, anchor, Side::Claims)
    }

    /// Follows a way and those that part from it, each to an exit or to a head.
    fn follow(&mut self, way: Way) -> Result<(), Stuck> {
        let mut ways = vec![way];
        while let Some(way) = ways.pop() {
            self.path(way, &mut ways)?;
        }
        Ok(())
    }

    /// Follows a way to its end; those that part from it are left to be followed.
    fn path(&mut self, mut way: Way, parted: &mut Vec<Way>) -> Result<(), Stuck> {
        let version = self.version;
        loop {
            let block = way.block;
            let body = &version.blocks[block.index()];
            for (i, inst) in body.insts.iter().enumerate().skip(way.from) {
                if way.facts.contradict {
                    return Ok(());
                }
                if self.world.questions.is_late() {
                    return Err(format!("at {block}[{i}]"));
                }
                if let Some(anchor) = inst.anchor {
                    self.opportunity(&mut way, anchor, 0)
                        .map_err(|why| format!("{anchor} at {block}[{i}]: {why}"))?;
                }
                let Way { frame, facts, .. } = &mut way;
                if inst.op == Op::Assume {
                    let cond = self.world.operand(frame, inst.args[0], Ty::I1)?;
                    let cond = facts.seen(&mut self.world.terms, cond);
                    facts.learn(&mut self.world.terms, cond);
                } else {
                    self.world.step(frame, facts, version, inst, Side::Claims)?;
                }
            }
            if way.facts.contradict {
                return Ok(());
            }
            let next = match &body.term {
                End::Jump { to, args } => self.edge(*to, args, way)?,
                End::Branch { cond, then, otherwise } => {
                    let cond = self.world.operand(&way.frame, *cond, Ty::I1)?;
                    let cond = way.facts.seen(&mut self.world.terms, cond);
                    let opposite = self.world.terms.not(cond);
                    for (edge, fact) in [(otherwise, opposite), (then, cond)] {
                        let mut way = way.clone();
                        way.facts.learn(&mut self.world.terms, fact);
                        if !way.facts.contradict {
                            parted.extend(self.edge(edge.to, &edge.args, way)?);
                        }
                    }
                    None
                }
                End::Exit(anchor) => {
                    let at = body.insts.len();
                    self.opportunity(&mut way, *anchor, 0)
                        .map_err(|why| format!("{anchor} at {block}[{at}]: {why}"))?;
                    None
                }
                End::Guest(_) => return Err("a trace that ends as base does".to_string()),
            };
            match next {
                Some(next) => way = next,
                None => return Ok(()),
            }
        }
    }

    /// Goes over an edge. At a loop's head the way ends.
    fn edge(&mut self, to: BlockId, args: &[Operand], mut way: Way) -> Result<Option<Way>, Stuck> {
        let version = self.version;
        self.world.enter(&mut way.frame, version, to, args)?;
        if !self.cuts.contains_key(&to) {
            return Ok(Some(Way { block: to, from: 0, ..way }));
        }
        let (poll, anchor) = safe_point(version, to)?;
        let arrived = way.frame.clone();
        for inst in &version.blocks[to.index()].insts[..poll] {
            self.world.step(&mut way.frame, &mut way.facts, version, inst, Side::Claims)?;
        }
        // A loop that comes round without progress of base would not be equivalent.
        let least = usize::from(way.cut.is_some());
        self.opportunity(&mut way, anchor, least)
            .map_err(|why| format!("{anchor} on the way to {to}: {why}"))?;
        if matches!(self.reference, Reference::Trace(_)) {
            let wanted = self.rebuilt(&way.frame, &way.facts, anchor)?;
            let first = self.cuts[&to].first.as_ref().map(|(.., spec)| spec.clone());
            let Way { facts, spec, .. } = &mut way;
            let right = (&mut self.reference, spec);
            self.world.come_to_head(right, facts, first.as_ref(), &wanted, least)?;
        }
        match way.cut == Some(to) {
            true => self.keeps(to, &way.frame, &way.facts)?,
            false => self.arrive(to, arrived, way.facts, way.spec)?,
        }
        Ok(None)
    }

    /// Shows that what is right passes the state that an anchor rebuilds.
    fn opportunity(&mut self, way: &mut Way, anchor: AnchorId, least: usize) -> Result<(), Stuck> {
        self.states += 1;
        let wanted = self.rebuilt(&way.frame, &way.facts, anchor)?;
        let Way { facts, spec, .. } = way;
        self.world.passes((&mut self.reference, spec), facts, &wanted, least)
    }
}
