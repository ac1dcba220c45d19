//! Loops of machine code: which register or spill slot holds which value of the version at a loop's head.
//!
//! Nobody says so; it is found. When control first comes to a head, each value of the version is taken to be in each
//! place that holds the same term, and places that hold the same are taken to do so at each arrival. Later arrivals
//! drop what does not hold; then the segments are followed again with less, until nothing is dropped. Values
//! and places that are the same term at all arrivals keep it.
//!
//! **Data.** A [`CodeCut`] for each head. **Callers.** [`CodeProof`].
//!
//! ```text
//! first arrival     v7 = rdi, rbx = rdi, slot 3 = rdi       v7 in {rbx, slot 3}, slot 3 = rbx
//! way back          v7 = v9, rbx = v9, slot 3 = rdi         v7 in {rbx}; slot 3 keeps rdi
//! ```

use super::code::{CodeProof, Place, Way};
use super::facts::Facts;
use super::frame::{Frame, Position, Stuck};
use super::spec::Spec;
use super::term::{MemoryNode, Symbol, Term};
use crate::op::{FlagOp, Op};
use crate::semantics::ARITH_FLAGS;
use crate::types::{Loc, Ty, Value};

/// What is known at a head.
#[derive(Default)]
pub struct CodeCut {
    /// The states with which control first came here.
    first: Option<(Frame, Facts, Spec)>,
    /// For each place.
    places: Vec<Held>,
    /// The values of the version that it had then.
    values: Vec<(Value, Kept)>,
}

/// What a place holds.
#[derive(Clone, PartialEq, Debug)]
struct Held {
    /// What it held at the first arrival.
    first: Term,
    /// The same at each arrival?
    is_same: bool,
    /// The first of the places that hold the same at each arrival.
    like: usize,
    /// Is its lowest byte 0 or 1?
    is_bit: bool,
}

/// Where a value of the version is.
#[derive(Clone, PartialEq, Debug)]
struct Kept {
    first: Term,
    is_same: bool,
    /// The places that hold it at each arrival; found when it is not the same.
    places: Option<Vec<usize>>,
}

impl CodeProof<'_> {
    /// Control comes to a head.
    pub fn arrive(&mut self, mut way: Way) -> Result<(), Stuck> {
        let head = way.at;
        // A loop that comes round without progress of the version would not be equivalent.
        let least = usize::from(way.cut.is_some());
        let landing = self.landing(head).ok_or("there is no way out of a loop")?;
        let wanted = self
            .way_out(landing, &mut way, least)
            .map_err(|why| format!("the head at {head:#x}: {why}"))?;
        let first = self.cuts[&head].first.as_ref().map(|(.., spec)| spec.clone());
        let Way { frame, facts, spec, .. } = &mut way;
        let right = (&mut self.reference, &mut *spec);
        self.world.come_to_head(right, facts, first.as_ref(), &wanted, least)?;
        let theirs = spec.frame();
        if theirs.in_place != frame.in_place || !self.world.private && theirs.loads != frame.loads {
            return Err("the state that is not SSA differs at a loop's head".to_string());
        }
        self.world.same_memory(facts, theirs.memory, frame.memory)?;
        let held: Result<Vec<Term>, Stuck> =
            self.places.clone().into_iter().map(|place| self.held(frame, facts, place)).collect();
        let (held, values) = (held?, spec.values());
        match self.cuts[&head].first.is_some() {
            true => self.drop_what_differs(&way, &held, &values),
            false => self.first_arrival(way, held, &values),
        }
    }

    fn first_arrival(
        &mut self,
        way: Way,
        held: Vec<Term>,
        values: &[Option<Term>],
    ) -> Result<(), Stuck> {
        let places = (held.iter().enumerate())
            .map(|(i, first)| Held {
                first: *first,
                is_same: true,
                like: held.iter().position(|other| other == first).unwrap_or(i),
                is_bit: self.is_bit(&way.facts, *first),
            })
            .collect();
        let values = values.iter().enumerate().filter_map(|(i, value)| {
            let kept = Kept { first: (*value)?, is_same: true, places: None };
            Some((Value(i as u32), kept))
        });
        let cut = self.cuts.get_mut(&way.at).ok_or("a head that is none")?;
        cut.places = places;
        cut.values = values.collect();
        cut.first = Some((way.frame, way.facts, way.spec));
        self.again = true;
        Ok(())
    }

    fn is_bit(&mut self, facts: &Facts, word: Term) -> bool {
        let terms = &mut self.world.terms;
        let (byte, bit) = (terms.slice(word, 0, 8), terms.slice(word, 0, 1));
        let wide = terms.pure(Op::Zext(Ty::I1), Ty::I8, &[bit]);
        !terms.differ(byte, wide) && self.world.equal(facts, byte, wide)
    }

    /// Another arrival: drops what does not hold here.
    fn drop_what_differs(
        &mut self,
        way: &Way,
        held: &[Term],
        values: &[Option<Term>],
    ) -> Result<(), Stuck> {
        let cut = &self.cuts[&way.at];
        let (before, mut kept) = (cut.places.clone(), cut.values.clone());
        let mut places = before.clone();
        for (i, term) in held.iter().enumerate() {
            let like = before[i].like;
            places[i].is_same &= before[i].first == *term;
            if held[like] != *term {
                // The first of those that were like it, and still are.
                let alike = |j: &usize| before[*j].like == like && held[*j] == *term;
                places[i].like = (0..i).find(alike).unwrap_or(i);
            }
            places[i].is_bit = places[i].is_bit && self.is_bit(&way.facts, *term);
        }
        let version = self.version();
        for (value, kept) in &mut kept {
            let Some(term) = values[value.index()] else {
                (kept.is_same, kept.places) = (false, Some(Vec::new()));
                continue;
            };
            kept.is_same &= way.facts.seen(&mut self.world.terms, term) == kept.first;
            if kept.is_same {
                continue;
            }
            let ty = version.ty(*value);
            let first = kept.first;
            let before = match kept.places.take() {
                Some(places) => places,
                None => {
                    let all: Vec<Term> = places.iter().map(|place| place.first).collect();
                    self.places_of(&Facts::default(), &all, (0..all.len()).collect(), first, ty)
                }
            };
            kept.places = Some(self.places_of(&way.facts, held, before, term, ty));
        }
        let is_outside = way.cut != Some(way.at);
        let cut = self.cuts.get_mut(&way.at).ok_or("a head that is none")?;
        let mut less = cut.places != places || cut.values != kept;
        (cut.places, cut.values) = (places, kept);
        if let (true, Some((_, both, _))) = (is_outside, &mut cut.first) {
            less |= both.meet(&way.facts);
        }
        self.again |= less;
        Ok(())
    }

    /// Those of the places that hold a value of this type.
    fn places_of(
        &mut self,
        facts: &Facts,
        held: &[Term],
        among: Vec<usize>,
        value: Term,
        ty: Ty,
    ) -> Vec<usize> {
        let decoded: Vec<(usize, Term)> =
            among.into_iter().filter_map(|i| Some((i, self.decoded(held[i], i, ty)?))).collect();
        let at_sight: Vec<usize> =
            decoded.iter().filter(|(_, term)| *term == value).map(|(i, _)| *i).collect();
        if !at_sight.is_empty() {
            return at_sight;
        }
        let same = |(i, term): (usize, Term)| {
            let same = match ty {
                Ty::Flags => self.world.equal_flags(facts, term, value),
                _ => !self.world.terms.differ(term, value) && self.world.equal(facts, term, value),
            };
            same.then_some(i)
        };
        decoded.into_iter().filter_map(same).collect()
    }

    /// What a place holds, as a value of a type.
    fn decoded(&mut self, word: Term, place: usize, ty: Ty) -> Option<Term> {
        let terms = &mut self.world.terms;
        let is_flags = self.places[place] == Place::Register(Loc::SSA_COUNT - 1);
        match ty {
            Ty::Flags if is_flags => Some(word),
            _ if is_flags => None,
            Ty::Flags => {
                // SF, ZF, AF, PF and CF in the second byte, OF in the first.
                let eight = terms.number(8, 8);
                let high = terms.pure(Op::Shr, Ty::I64, &[word, eight]);
                let mask = terms.number(ARITH_FLAGS & 0xff, 64);
                let low = terms.pure(Op::And, Ty::I64, &[high, mask]);
                let one = terms.number(1, 64);
                let bit = terms.pure(Op::And, Ty::I64, &[word, one]);
                let eleven = terms.number(11, 8);
                let overflow = terms.pure(Op::Shl, Ty::I64, &[bit, eleven]);
                let image = terms.pure(Op::Or, Ty::I64, &[low, overflow]);
                Some(terms.pure(Op::Flags(FlagOp::FromBits), Ty::I64, &[image]))
            }
            Ty::I1 | Ty::I8 | Ty::I16 | Ty::I32 | Ty::I64 => Some(terms.slice(word, 0, ty.bits())),
            Ty::V128 | Ty::V256 | Ty::V512 => None,
        }
    }

    /// The segment that begins at a head, if control has come there.
    pub fn head(&mut self, head: u64) -> Result<Option<Way>, Stuck> {
        let cut = &self.cuts[&head];
        let Some((first, facts, right)) = cut.first.clone() else { return Ok(None) };
        let (held, kept) = (cut.places.clone(), cut.values.clone());
        let mut heads: Vec<u64> = self.cuts.keys().copied().collect();
        heads.sort_unstable();
        let number = heads.iter().position(|h| *h == head).unwrap_or(0) as u32 + 1;
        let mut facts = facts;
        let memory = self.world.terms.memory(MemoryNode::Initial(number));
        let in_place = self.world.terms.initial_in_place(number);
        let mut words = self.world.terms.memory(MemoryNode::Initial(u32::MAX - number));
        let mut frame = Frame { memory, in_place, loads: in_place, ..first };
        let mut now = Vec::new();
        for (i, place) in self.places.clone().into_iter().enumerate() {
            let term = match &held[i] {
                Held { is_same: true, first, .. } => *first,
                Held { like, is_bit, .. } => {
                    let terms = &mut self.world.terms;
                    let any = terms.symbol(Symbol::Host(*like as u32, number), 64);
                    let any = match is_bit {
                        true => {
                            let bit = terms.slice(any, 0, 1);
                            let low = terms.pure(Op::Zext(Ty::I1), Ty::I8, &[bit]);
                            let high = (1..8).map(|byte| terms.slice(any, 8 * byte, 8));
                            let bytes: Vec<Term> = high.collect();
                            terms.bytes(&[&[low], &bytes[..]].concat())
                        }
                        false => any,
                    };
                    match place {
                        Place::Register(index) if index == Loc::SSA_COUNT - 1 => {
                            terms.pure(Op::Flags(FlagOp::FromBits), Ty::I64, &[any])
                        }
                        _ => any,
                    }
                }
            };
            match place {
                Place::Register(index) => frame.locs[index] = term,
                Place::Word(address) => {
                    let address = self.world.terms.number(address, 64);
                    words = self.world.store(words, address, term);
                }
            }
            now.push(term);
        }
        frame.context = Some(words);
        let mut values = vec![None; right.values().len()];
        for (value, kept) in kept {
            values[value.index()] = match (kept.is_same, kept.places.as_deref()) {
                (true, _) => Some(kept.first),
                (false, Some([place, ..])) => {
                    let ty = self.version().ty(value);
                    self.decoded(now[*place], *place, ty)
                }
                _ => None,
            };
        }
        let pc = self.world.terms.number(head, 64);
        let start = Position { pc, locs: frame.locs, memory, in_place, loads: in_place };
        let spec = right.resumed(&mut self.world, &mut facts, values, &start)?;
        let (at, cut, begins) = (head, Some(head), true);
        Ok(Some(Way { at, frame, facts, spec, cut, begins }))
    }
}
