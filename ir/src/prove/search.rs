//! Where what is right passes a state in which a version, or its machine code, may leave.
//!
//! The states that have been passed are compared first, then what is right goes on, as far as the facts show
//! the way. A state that arbitrary values tell apart from the wanted one is asked about last.
//!
//! **Callers.** The proofs: of a version, and of machine code. No data.
//!
//! ```text
//! wanted: pc 0x14, rax = v3      base is at 0x10; goes on to 0x14, where rax = rbx + 1: is v3 = rbx + 1?
//! ```

use super::facts::Facts;
use super::frame::{Position, Stuck, World};
use super::spec::{Reference, Spec};
use super::term::Term;
use crate::types::Loc;

/// How often `base` may come to a pc in another state than the one that is looked for (guess; an inner loop
/// of a recorded path passes its head many times).
const ARRIVALS: u32 = 64;

/// What is right, and where it is.
pub type Followed<'s, 'a> = (&'s mut Reference<'a>, &'s mut Spec);

impl World<'_> {
    /// Goes on to where the other trace is at its own head, in this state. The first time says at which.
    pub fn come_to_head(
        &mut self,
        (reference, spec): Followed<'_, '_>,
        facts: &mut Facts,
        first: Option<&Spec>,
        wanted: &Position,
        least: usize,
    ) -> Result<(), Stuck> {
        for _ in 0..ARRIVALS {
            if spec.is_at_head(first)
                && spec.passed.len() > least
                && let Some(position) = spec.passed.last().cloned()
                && self.is_pc(facts, position.pc, wanted.pc)
                && self.same(facts, &position, wanted).is_ok()
            {
                return Ok(());
            }
            spec.advance(self, reference, facts)?;
        }
        Err("the other trace does not come to its head".to_string())
    }

    /// Shows that what is right passes a state, the first `least` states apart.
    pub fn passes(
        &mut self,
        (reference, spec): Followed<'_, '_>,
        facts: &mut Facts,
        wanted: &Position,
        least: usize,
    ) -> Result<(), Stuck> {
        // The states passed, the current one first.
        let passed = spec.passed.len();
        for at in (least..passed).rev() {
            if is_same_at_sight(&spec.passed[at], wanted)
                && self.is_pc(facts, spec.passed[at].pc, wanted.pc)
            {
                return Ok(());
            }
        }
        let mut why = None;
        if passed > least && self.is_pc(facts, spec.passed[passed - 1].pc, wanted.pc) {
            match self.same(facts, &spec.passed[passed - 1].clone(), wanted) {
                Ok(()) => {
                    spec.adopt(wanted);
                    return Ok(());
                }
                Err(difference) => why = Some(difference),
            }
        }
        let mut ahead = spec.clone();
        // The first state at the pc that arbitrary values tell apart; facts may make it the same.
        let mut unlikely = None;
        let mut arrivals = 0;
        while arrivals < ARRIVALS {
            match ahead.advance(self, reference, facts) {
                Ok(()) => {}
                Err(stuck) => {
                    why = why.or(Some(stuck));
                    break;
                }
            }
            let Some(position) = ahead.passed.last().cloned() else { break };
            if !self.is_pc(facts, position.pc, wanted.pc) {
                continue;
            }
            arrivals += 1;
            if !self.is_likely(facts, &position, wanted) {
                unlikely = unlikely.or_else(|| Some((ahead.clone(), position)));
                continue;
            }
            match self.same(facts, &position, wanted) {
                Ok(()) => {
                    ahead.adopt(wanted);
                    *spec = ahead;
                    return Ok(());
                }
                Err(difference) => why = Some(difference),
            }
        }
        if let Some((mut ahead, position)) = unlikely {
            match self.same(facts, &position, wanted) {
                Ok(()) => {
                    ahead.adopt(wanted);
                    *spec = ahead;
                    return Ok(());
                }
                Err(difference) => why = why.or(Some(difference)),
            }
        }
        for at in (least..passed.saturating_sub(1)).rev() {
            let position = spec.passed[at].clone();
            if self.is_pc(facts, position.pc, wanted.pc)
                && self.same(facts, &position, wanted).is_ok()
            {
                return Ok(());
            }
        }
        let pc = self.terms.words(wanted.pc, 2);
        Err(format!("base at {pc}: {}", why.unwrap_or_else(|| "never comes there".to_string())))
    }

    /// Is it the same pc? A constant and another term are not compared further.
    fn is_pc(&mut self, facts: &Facts, one: Term, two: Term) -> bool {
        let one = facts.seen(&mut self.terms, one);
        let two = facts.seen(&mut self.terms, two);
        let terms = &self.terms;
        match (terms.constant(one), terms.constant(two)) {
            (None, None) => self.equal(facts, one, two),
            _ => one == two,
        }
    }

    /// Are two states equal for arbitrary values of what they are made of?
    fn is_likely(&mut self, facts: &Facts, one: &Position, two: &Position) -> bool {
        let terms = &mut self.terms;
        let registers = one.locs.iter().zip(&two.locs).take(Loc::SSA_COUNT - 1);
        for (one, two) in registers {
            let (one, two) = (facts.rewritten(terms, *one), facts.rewritten(terms, *two));
            if terms.differ(one, two) {
                return false;
            }
        }
        one.in_place == two.in_place
    }

    /// Are two states equal?
    fn same(&mut self, facts: &Facts, base: &Position, ours: &Position) -> Result<(), Stuck> {
        for index in 0..Loc::SSA_COUNT {
            let loc = Loc::from_ssa_index(index);
            let (theirs, ours) = (base.locs[index], ours.locs[index]);
            let same = match loc {
                Loc::Flags => self.equal_flags(facts, theirs, ours),
                _ => self.equal(facts, theirs, ours),
            };
            if !same {
                let terms = &self.terms;
                let (theirs, ours) = (terms.words(theirs, 4), terms.words(ours, 4));
                return Err(format!("{loc}: base {theirs}, version {ours}"));
            }
        }
        if base.in_place != ours.in_place {
            return Err("the state that is not SSA".to_string());
        }
        self.same_memory(facts, base.memory, ours.memory)
    }
}

/// Are two states made of the same terms?
fn is_same_at_sight(one: &Position, two: &Position) -> bool {
    one.locs == two.locs && one.memory == two.memory && one.in_place == two.in_place
}
