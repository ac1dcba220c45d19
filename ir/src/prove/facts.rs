//! What is known on the path of a proof, and what memory holds according to it.
//!
//! A version that has come to some point has passed its guards, and its accesses have not faulted. Facts
//! are about terms, which do not change, so a fact stays true on the path, in loops as well.
//!
//! **Data.** [`Facts`] belongs to one path and is copied where paths part. **Callers.** One proof.
//!
//! ```text
//! assume le.u 8, (rdi - rsi)       apart: accesses at rdi and at rsi of up to 8 bytes
//! load.i64 [rdi]                   accessible: 8 bytes at rdi
//! ```

use super::term::{App, Memory, MemoryNode, Node, Term, Terms};
use crate::op::Op;
use crate::types::Ty;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::{SmallVec, smallvec};

/// A difference of addresses that is far from zero: `sum of terms + plus` is at least `least`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Apart {
    terms: SmallVec<[(Term, u64); 3]>,
    plus: u64,
    least: u64,
}

/// Bytes that have been accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Accessed {
    address: Term,
    bytes: u32,
    written: bool,
}

/// How deep facts are written into a term (guess).
const DEEPEST: u32 = 24;
/// In how many parts of it (guess).
const LARGEST: usize = 500;

/// What is known on a path.
#[derive(Clone, Default)]
pub struct Facts {
    /// Truth values that are true, oldest first.
    pub hold: Vec<Term>,
    set: FxHashSet<Term>,
    /// What to write instead of a term.
    same: FxHashMap<Term, Term>,
    apart: Vec<Apart>,
    accessed: Vec<Accessed>,
    /// Natives that have been executed without an exception.
    pub ran: FxHashSet<App>,
    /// The facts contradict each other: control does not come here.
    pub contradict: bool,
}

impl Facts {
    /// Notes that a truth value is true.
    pub fn learn(&mut self, terms: &mut Terms, fact: Term) {
        let mut work = vec![fact];
        while let Some(fact) = work.pop() {
            match terms.constant(fact) {
                Some(0) => self.contradict = true,
                Some(_) => {}
                None => self.note(terms, fact, &mut work),
            }
        }
    }

    /// Notes a fact. What it is the conjunction of is left to be noted.
    fn note(&mut self, terms: &mut Terms, fact: Term, parts: &mut Vec<Term>) {
        if !self.set.insert(fact) {
            return;
        }
        let opposite = terms.not(fact);
        self.contradict |= self.set.contains(&opposite);
        let truth = terms.truth(true);
        self.same.insert(fact, truth);
        let falsehood = terms.truth(false);
        self.same.insert(opposite, falsehood);
        match terms.node(fact).clone() {
            Node::Pure(Op::And, Ty::I1, args) => return parts.extend(args),
            Node::Pure(Op::Eq, _, args) => {
                let (from, to) = match terms.constant(args[0]) {
                    Some(_) => (args[1], args[0]),
                    None => (args[0], args[1]),
                };
                self.same.insert(from, to);
            }
            Node::Pure(Op::LtU, Ty::I64, args) => self.bound(terms, args[0], args[1]),
            Node::Pure(Op::Not, Ty::I1, args) => match terms.node(args[0]).clone() {
                Node::Pure(Op::Or, Ty::I1, either) => {
                    return parts.extend(either.iter().map(|part| terms.not(*part)));
                }
                // Not X < N is N - 1 < X, unless N is 0, and not C < X is X < C + 1.
                Node::Pure(Op::LtU, Ty::I64, sides) => {
                    match (terms.constant(sides[0]), terms.constant(sides[1])) {
                        (_, Some(least)) => self.at_least(terms, sides[0], least),
                        (Some(most), _) => self.below(terms, sides[1], most.wrapping_add(1)),
                        _ => {}
                    }
                }
                // Not 0 is at least 1.
                Node::Pure(Op::Eq, Ty::I64, sides) => {
                    let difference = terms.minus(sides[0], sides[1]);
                    self.at_least(terms, difference, 1);
                }
                _ => {}
            },
            _ => {}
        }
        self.hold.push(fact);
    }

    /// Notes `left < right`, if one of them is a constant.
    fn bound(&mut self, terms: &Terms, left: Term, right: Term) {
        match (terms.constant(left), terms.constant(right)) {
            (_, Some(most)) => self.below(terms, left, most),
            (Some(least), _) => self.at_least(terms, right, least.wrapping_add(1)),
            _ => {}
        }
    }

    /// Notes that a term is at least a number.
    fn at_least(&mut self, terms: &Terms, term: Term, least: u64) {
        let (linear, plus) = terms.linear(term);
        self.apart.push(Apart { terms: linear, plus, least });
    }

    /// Notes that a term is below a number: X < M is X - M >= 2^64 - M.
    fn below(&mut self, terms: &Terms, term: Term, most: u64) {
        let (linear, plus) = terms.linear(term);
        if most > 0 {
            let (plus, least) = (plus.wrapping_sub(most), most.wrapping_neg());
            self.apart.push(Apart { terms: linear, plus, least });
        }
    }

    /// Is this truth value known to be true, without a proof?
    pub fn has(&self, terms: &Terms, goal: Term) -> bool {
        terms.constant(goal) == Some(1) || self.set.contains(&goal)
    }

    /// A term with what is known written into it.
    pub fn seen(&self, terms: &mut Terms, term: Term) -> Term {
        let mut term = term;
        for _ in 0..8 {
            match self.same.get(&term) {
                Some(next) => term = *next,
                None => break,
            }
        }
        match terms.node(term).clone() {
            Node::Sum(parts, offset) if parts.iter().any(|(t, _)| self.same.contains_key(t)) => {
                let zero = terms.number(0, terms.bits(term));
                let mut sum = terms.plus(zero, offset);
                for (part, factor) in parts {
                    let part = self.same.get(&part).copied().unwrap_or(part);
                    sum = terms.sum((sum, 1), (part, factor), 0);
                }
                sum
            }
            _ => term,
        }
    }

    /// A term with what is known written into all that it is made of.
    pub fn rewritten(&self, terms: &mut Terms, term: Term) -> Term {
        if self.same.is_empty() {
            return term;
        }
        self.rewrite(terms, term, &mut FxHashMap::default(), DEEPEST)
    }

    fn rewrite(
        &self,
        terms: &mut Terms,
        term: Term,
        done: &mut FxHashMap<Term, Term>,
        depth: u32,
    ) -> Term {
        if let Some(term) = done.get(&term) {
            return *term;
        }
        let seen = self.seen(terms, term);
        let result = match terms.node(seen).clone() {
            _ if depth == 0 || done.len() > LARGEST => seen,
            Node::Pure(op, ty, args) => {
                let new: SmallVec<[Term; 3]> =
                    args.iter().map(|a| self.rewrite(terms, *a, done, depth - 1)).collect();
                match (op, ty) {
                    _ if new == args => seen,
                    (Op::Eq, Ty::Flags) => terms.equal_flags(new[0], new[1]),
                    (Op::Eq, _) => terms.equal(new[0], new[1]),
                    _ => terms.pure(op, ty, &new),
                }
            }
            Node::Sum(parts, offset) => {
                let zero = terms.number(0, terms.bits(seen));
                let mut sum = terms.plus(zero, offset);
                for (part, factor) in parts {
                    let part = self.rewrite(terms, part, done, depth - 1);
                    sum = terms.sum((sum, 1), (part, factor), 0);
                }
                sum
            }
            Node::Slice(of, low) => {
                let bits = terms.bits(seen);
                let of = self.rewrite(terms, of, done, depth - 1);
                terms.slice(of, low, bits)
            }
            _ => seen,
        };
        let result = self.seen(terms, result);
        done.insert(term, result);
        result
    }

    /// Notes an access that has not faulted.
    pub fn access(&mut self, address: Term, bytes: u32, written: bool) {
        self.accessed.push(Accessed { address, bytes, written });
    }

    /// Can these bytes be accessed without a fault, because they have been?
    pub fn accessible(&self, terms: &mut Terms, address: Term, bytes: u32, write: bool) -> bool {
        // Pages are accessible as a whole: two bytes less than a page apart vouch for those between.
        let (mut below, mut above) = (None, None);
        for access in self.accessed.iter().filter(|a| a.written || !write) {
            let distance = terms.minus(address, access.address);
            let Some(distance) = terms.constant(distance) else { continue };
            let start = (distance as i64).wrapping_neg();
            let end = start.wrapping_add(i64::from(access.bytes));
            if start <= 0 && start > -2048 {
                below = Some(below.map_or(start, |b: i64| b.max(start)));
            }
            if end >= i64::from(bytes) && end < 2048 {
                above = Some(above.map_or(end, |a: i64| a.min(end)));
            }
        }
        below.is_some() && above.is_some()
    }

    /// What has been accessed: address and bytes.
    pub fn accessed(&self) -> impl Iterator<Item = (Term, u32)> + '_ {
        self.accessed.iter().map(|a| (a.address, a.bytes))
    }

    /// Keeps what the other facts know as well. Is it less?
    pub fn meet(&mut self, other: &Facts) -> bool {
        let before = (self.hold.len(), self.same.len(), self.accessed.len(), self.ran.len());
        self.hold.retain(|fact| other.set.contains(fact));
        self.set.retain(|fact| other.set.contains(fact));
        self.same.retain(|from, to| other.same.get(from) == Some(to));
        self.apart.retain(|apart| other.apart.contains(apart));
        self.accessed.retain(|access| other.accessed.contains(access));
        self.ran.retain(|app| other.ran.contains(app));
        before != (self.hold.len(), self.same.len(), self.accessed.len(), self.ran.len())
    }

    /// Was a write to these bytes seen, so that they are not read-only?
    fn written(&self, terms: &mut Terms, address: Term, bytes: u32) -> bool {
        self.accessed.iter().filter(|a| a.written).any(|access| {
            let distance = terms.minus(address, access.address);
            terms.constant(distance).is_some_and(|d| {
                d.checked_add(u64::from(bytes)).is_some_and(|end| end <= u64::from(access.bytes))
            })
        })
    }

    /// Do two accesses share no byte, by what is known?
    pub fn apart(&self, terms: &mut Terms, one: (Term, u32), two: (Term, u32)) -> bool {
        let difference = terms.minus(one.0, two.0);
        self.is_far(terms, difference, one.1, two.1)
            || {
                let difference = terms.minus(two.0, one.0);
                self.is_far(terms, difference, two.1, one.1)
            }
            || self.intervals(terms, one.0).into_iter().any(|(first, length)| {
                // Neither begins within the other.
                self.intervals(terms, two.0).into_iter().any(|(second, extent)| {
                    let ours = u128::from(length) + u128::from(one.1);
                    let theirs = u128::from(extent) + u128::from(two.1);
                    u128::from(second.wrapping_sub(first)) >= ours
                        && u128::from(first.wrapping_sub(second)) >= theirs
                })
            })
    }

    /// Where an address lies: first address, and how many follow it; they may wrap.
    fn intervals(&self, terms: &Terms, address: Term) -> SmallVec<[(u64, u64); 4]> {
        let (linear, offset) = terms.linear(address);
        if linear.is_empty() {
            return smallvec![(offset, 0)];
        }
        let apart = self.apart.iter().filter(|apart| apart.terms == linear);
        apart.map(|a| (a.least.wrapping_sub(a.plus).wrapping_add(offset), !a.least)).collect()
    }

    /// `difference + bytes - 1 >= other + bytes - 1`, unsigned?
    fn is_far(&self, terms: &Terms, difference: Term, bytes: u32, other: u32) -> bool {
        let (linear, offset) = terms.linear(difference);
        let (bytes, other) = (u64::from(bytes), u64::from(other));
        self.apart.iter().filter(|apart| apart.terms == linear).any(|apart| {
            let e = apart.plus.wrapping_sub(offset.wrapping_add(bytes - 1));
            u128::from(e) + u128::from(other + bytes - 1) <= u128::from(apart.least)
        })
    }
}

/// How an access lies to another one.
enum Lies {
    /// All its bytes are in the other, from this byte on.
    Within(u32),
    Apart,
    /// It shares some bytes.
    Across,
    Unknown,
}

/// What is known of the memory with which a segment of a proof begins.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    pub address: Term,
    pub bytes: u32,
    pub value: Term,
}

/// What is known of all memories that are not the result of a store.
#[derive(Default)]
pub struct Contents {
    /// By the number of [`MemoryNode::Initial`].
    pub initial: FxHashMap<u32, Vec<Known>>,
    /// What no store changes: read-only memory.
    pub constant: Vec<(u64, u32, u64)>,
}

/// The question whether two accesses share no byte, for a solver.
pub type IsApart<'a> = dyn FnMut(&mut Terms, &Facts, (Term, u32), (Term, u32)) -> bool + 'a;

fn lies(
    terms: &mut Terms,
    facts: &Facts,
    contents: &Contents,
    (address, bytes): (Term, u32),
    (other, size): (Term, u32),
    ask: &mut IsApart<'_>,
) -> Lies {
    let distance = terms.minus(address, other);
    if let Some(distance) = terms.constant(distance) {
        let distance = distance as i64;
        return if distance >= 0 && distance + i64::from(bytes) <= i64::from(size) {
            Lies::Within(distance as u32)
        } else if distance >= i64::from(size) || distance + i64::from(bytes) <= 0 {
            Lies::Apart
        } else {
            Lies::Across
        };
    }
    let constant = |at: u64| {
        contents.constant.iter().any(|(start, len, _)| at.wrapping_sub(*start) < u64::from(*len))
    };
    let read_only = terms.constant(address).is_some_and(constant);
    let is_apart = facts.apart(terms, (address, bytes), (other, size))
        || read_only && facts.written(terms, other, size)
        || ask(terms, facts, (address, bytes), (other, size));
    if is_apart { Lies::Apart } else { Lies::Unknown }
}

/// What is in memory at an address.
pub fn read(
    terms: &mut Terms,
    facts: &Facts,
    contents: &Contents,
    memory: Memory,
    (address, bytes): (Term, u32),
    ask: &mut IsApart<'_>,
) -> Term {
    let mut at = memory;
    loop {
        let found = match terms.memory_node(at).clone() {
            MemoryNode::Store { below, address: other, bytes: size, value } => {
                match lies(terms, facts, contents, (address, bytes), (other, size), ask) {
                    Lies::Within(byte) => Ok(terms.slice(value, 8 * byte, 8 * bytes)),
                    Lies::Apart => {
                        at = below;
                        continue;
                    }
                    Lies::Across => Err(true),
                    Lies::Unknown => Err(false),
                }
            }
            MemoryNode::Initial(number) => {
                let constants = contents.constant.clone();
                let mut result = Err(false);
                if let Some(place) = terms.constant(address) {
                    for (start, len, value) in constants {
                        let from = place.wrapping_sub(start);
                        if from < u64::from(len) && from + u64::from(bytes) <= u64::from(len) {
                            let whole = terms.number(value, 8 * len);
                            result = Ok(terms.slice(whole, 8 * from as u32, 8 * bytes));
                        }
                    }
                }
                let known = contents.initial.get(&number).map_or(&[][..], |k| k);
                for known in known {
                    let distance = terms.minus(address, known.address);
                    let Some(distance) = terms.constant(distance) else { continue };
                    if distance < u64::from(known.bytes)
                        && distance + u64::from(bytes) <= u64::from(known.bytes)
                    {
                        result = Ok(terms.slice(known.value, 8 * distance as u32, 8 * bytes));
                    } else if distance < u64::from(known.bytes)
                        || distance.wrapping_neg() < u64::from(bytes)
                    {
                        result = result.or(Err(true));
                    }
                }
                result
            }
            MemoryNode::After(_) => Err(false),
        };
        return match found {
            Ok(term) => term,
            Err(true) if bytes > 1 => {
                let parts: Vec<Term> = (0..bytes)
                    .map(|i| {
                        let byte = terms.plus(address, u64::from(i));
                        read(terms, facts, contents, memory, (byte, 1), ask)
                    })
                    .collect();
                terms.bytes(&parts)
            }
            Err(_) => terms.load(at, address, 8 * bytes),
        };
    }
}
