//! What is known at the heads of loops: the invariants.
//!
//! When control first comes to a head, what memory holds at the places accessed so far is taken to be so at each
//! arrival, in terms of the entry's state or as a parameter of the head. Each further arrival drops what it
//! does not keep; then the segments are followed again with less.
//!
//! ```text
//! first arrival     [rsp + 8] holds v3, and v3 is the first argument for v7:      known: [rsp + 8] = v7
//! way back          [rsp + 8] holds v9, the argument for v7 is v9:                kept
//! ```

use super::facts::{Facts, Known};
use super::frame::{Frame, Stuck};
use super::relations::Relation;
use super::simulate::Proof;
use super::spec::Spec;
use super::term::{MemoryNode, Node, Symbol, Term};
use crate::types::BlockId;

/// A loop's head.
#[derive(Default)]
pub struct Cut {
    /// The state with which control first comes here, and that of the other side.
    pub first: Option<(Frame, Facts, Spec)>,
    /// The invariants: what memory holds at each arrival.
    pub known: Vec<Known>,
    /// The parameters that are made of others at each arrival.
    pub relations: Vec<Relation>,
}

impl Proof<'_> {
    /// Control comes to a head from outside the loop.
    pub fn arrive(
        &mut self,
        head: BlockId,
        frame: Frame,
        facts: Facts,
        spec: Spec,
    ) -> Result<(), Stuck> {
        if self.cuts[&head].first.is_some() {
            return self.meet(head, &frame, &facts, &spec);
        }
        // What was accessed on the way may be the same in all iterations.
        let accessed = facts.accessed().filter(|_| self.world.private);
        let mut places: Vec<(Term, u32)> = accessed.collect();
        places.sort();
        places.dedup();
        let params = self.version.blocks[head.index()].params.clone();
        let mut known = Vec::new();
        for (address, bytes) in places {
            let value = self.world.read(&facts, frame.memory, address, bytes);
            if matches!(self.world.terms.node(value), Node::Load(memory, _)
                if matches!(self.world.terms.memory_node(*memory), MemoryNode::Store { .. }))
            {
                continue;
            }
            let carried = params.iter().find(|p| frame.values[p.index()] == Some(value));
            let value = match carried {
                Some(param) => {
                    let bits = self.version.ty(*param).bits();
                    self.world.terms.symbol(Symbol::Head(*param), bits)
                }
                None => value,
            };
            known.push(Known { address, bytes, value });
        }
        let mut relations = Relation::suggested(self.version, head);
        relations.retain(|relation| self.relates(*relation, &frame, &facts));
        let cut = self.cuts.get_mut(&head).ok_or("a head that is none")?;
        cut.relations = Relation::independent(relations);
        cut.known = known;
        cut.first = Some((frame, facts, spec));
        self.again = true;
        Ok(())
    }

    /// Control comes to a head from outside another time: what both ways know remains.
    fn meet(
        &mut self,
        head: BlockId,
        frame: &Frame,
        facts: &Facts,
        spec: &Spec,
    ) -> Result<(), Stuck> {
        let mut less = self.drop_known(head, frame, facts)?;
        let cut = self.cuts.get_mut(&head).ok_or("a head that is none")?;
        if let Some((first, both, right)) = &mut cut.first {
            less |= first.meet(frame);
            less |= both.meet(facts);
            less |= right.meet(spec);
        }
        self.again |= less;
        Ok(())
    }

    /// Control comes back to a head: drops the invariants that the iteration does not keep.
    pub fn keeps(&mut self, head: BlockId, frame: &Frame, facts: &Facts) -> Result<(), Stuck> {
        self.again |= self.drop_known(head, frame, facts)?;
        Ok(())
    }

    /// Drops the invariants that do not hold at an arrival. Are there any?
    fn drop_known(&mut self, head: BlockId, frame: &Frame, facts: &Facts) -> Result<bool, Stuck> {
        let known = self.cuts[&head].known.clone();
        let before = known.len();
        let kept: Vec<Known> =
            known.into_iter().filter(|known| self.holds(head, *known, frame, facts)).collect();
        let mut relations = self.cuts[&head].relations.clone();
        let (before, all) = (before + relations.len(), kept.len());
        relations.retain(|relation| self.relates(*relation, frame, facts));
        let less = all + relations.len() < before;
        let cut = self.cuts.get_mut(&head).ok_or("a head that is none")?;
        (cut.known, cut.relations) = (kept, relations);
        Ok(less)
    }

    /// Does a relation hold for these arguments of a head?
    fn relates(&mut self, relation: Relation, frame: &Frame, facts: &Facts) -> bool {
        let sides = relation.sides(&mut self.world.terms, frame);
        sides.is_some_and(|(one, two)| one == two || self.world.equal(facts, one, two))
    }

    /// Does memory hold what it is to hold, with these parameters of the head?
    fn holds(&mut self, head: BlockId, known: Known, frame: &Frame, facts: &Facts) -> bool {
        let params = &self.version.blocks[head.index()].params;
        let expected = match *self.world.terms.node(known.value) {
            Node::Symbol(Symbol::Head(value)) if params.contains(&value) => {
                match frame.values[value.index()] {
                    Some(value) => value,
                    None => return false,
                }
            }
            _ => known.value,
        };
        let found = self.world.read(facts, frame.memory, known.address, known.bytes);
        found == facts.seen(&mut self.world.terms, expected)
            || self.world.equal(facts, found, expected)
    }
}
