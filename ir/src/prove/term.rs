//! Terms: what values of a version are, as expressions over the entry state.
//!
//! Terms are hash-consed: equal terms have equal numbers, so most of what has to be proven equal is
//! recognised by comparing numbers. [`super::normal`] makes them, in a few normal forms, in which a guest
//! instruction and what the passes have made of it meet. It shares no code with the passes, so that a mistake
//! there is not repeated here.
//!
//! **Data.** [`Terms`] owns all terms and memories of one proof. **Invariants.** Operands have smaller
//! numbers than the term that reads them. **Callers.** One proof; no lock.
//!
//! ```text
//! cond.ne (flags.sub.i64 (rcx + 4), 64)      not (eq rcx, 60)
//! trunc.i32 (zext32.i64 v)                   v
//! ```

use crate::op::Op;
use crate::semantics;
use crate::types::{Loc, Ty, Value};
use crate::version::Segment;
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

/// A term by its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Term(u32);

/// The content of memory at some time, by its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Memory(u32);

/// The state that is not SSA at some time, by its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct InPlace(u32);

/// An execution of a native instruction, by its number: the function of what it reads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct App(u32);

/// What a term without operands stands for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Symbol {
    /// A register or the flags at the entry.
    Entry(Loc),
    /// A parameter of a loop's head, in an arbitrary iteration.
    Head(Value),
    /// The same of the trace that a version is compared with.
    Right(Value),
    /// A register or a word of machine code's context, by its place among them, at this loop's head in an
    /// arbitrary iteration.
    Host(u32, u32),
    /// The base of a segment.
    Base(Segment),
}

/// An expression.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Node {
    /// A constant of at most 64 bits.
    Const(u64),
    /// Anything.
    Symbol(Symbol),
    /// A pure operation. There are none that a sum, a slice or a comparison's negation says as well.
    Pure(Op, Ty, SmallVec<[Term; 3]>),
    /// The sum of terms with their coefficients, sorted, and a constant.
    Sum(SmallVec<[(Term, u64); 3]>, u64),
    /// Bits of a term, from this one on.
    Slice(Term, u32),
    /// Bytes one after another, the lowest first.
    Bytes(SmallVec<[Term; 8]>),
    /// What is in memory at an address.
    Load(Memory, Term),
    /// A result of a native instruction.
    Output(App, u32),
}

/// A memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum MemoryNode {
    /// That of the entry, or of a loop's head in an arbitrary iteration.
    Initial(u32),
    /// Another one after a store of this many bytes.
    Store { below: Memory, address: Term, bytes: u32, value: Term },
    /// What a native of unknown extent leaves.
    After(App),
}

/// What a native instruction reads.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AppNode {
    /// Its pc; events of programs in the text form have small numbers.
    pub ip: u64,
    /// Registers and flags, the address that it computes with, the content of its memory operand.
    pub inputs: Vec<Term>,
    /// The state that is not SSA, if it reads any.
    pub in_place: Option<InPlace>,
    /// All of memory, if it is not known what it reads.
    pub memory: Option<Memory>,
}

/// The state that is not SSA.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum InPlaceNode {
    Initial(u32),
    After(InPlace, App),
}

/// All terms of a proof.
#[derive(Default)]
pub struct Terms {
    nodes: Vec<(Node, u32)>,
    numbers: FxHashMap<(Node, u32), Term>,
    memories: Vec<MemoryNode>,
    memory_numbers: FxHashMap<MemoryNode, Memory>,
    apps: Vec<AppNode>,
    app_numbers: FxHashMap<AppNode, App>,
    in_places: Vec<InPlaceNode>,
    in_place_numbers: FxHashMap<InPlaceNode, InPlace>,
    /// Slices that have been normalised.
    pub slices: FxHashMap<(Term, u32, u32), Term>,
    /// Of each term, what it is for arbitrary values of what it is made of.
    samples: Vec<[u64; SAMPLES]>,
}

/// Arbitrary values that are tried before a solver is asked (guess).
const SAMPLES: usize = 3;

/// A sum of more terms counts as one term (guess; without a bound a long chain of sums would take quadratic
/// memory).
const LONGEST: usize = 32;

/// The largest value of so many bits.
pub fn mask(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}

/// The integer type of this width.
pub fn int(bits: u32) -> Option<Ty> {
    match bits {
        1 => Some(Ty::I1),
        8 => Some(Ty::I8),
        16 => Some(Ty::I16),
        32 => Some(Ty::I32),
        64 => Some(Ty::I64),
        _ => None,
    }
}

impl Terms {
    pub fn intern(&mut self, node: Node, bits: u32) -> Term {
        let next = Term(self.nodes.len() as u32);
        let key = (node, bits);
        if let Some(term) = self.numbers.get(&key) {
            return *term;
        }
        let samples = std::array::from_fn(|nth| self.sample(next, &key.0, key.1, nth));
        self.samples.push(samples);
        self.nodes.push(key.clone());
        self.numbers.insert(key, next);
        next
    }

    /// What a new term is for arbitrary values of what it is made of.
    fn sample(&self, term: Term, node: &Node, bits: u32, nth: usize) -> u64 {
        let of = |term: &Term| self.samples[term.0 as usize][nth];
        let any = || {
            let seed = (u64::from(term.0) << 8 | nth as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (seed ^ seed >> 29).wrapping_mul(0xff51_afd7_ed55_8ccd)
        };
        let value = match node {
            _ if bits > 64 => any(),
            Node::Const(c) => *c,
            Node::Symbol(Symbol::Entry(Loc::Flags)) => any() & semantics::ARITH_FLAGS,
            Node::Symbol(_) | Node::Load(..) | Node::Output(..) => any(),
            // Flags compare as wholes, which do not fit.
            Node::Pure(Op::Eq, _, args) if self.bits(args[0]) > 64 => any(),
            Node::Pure(op, ty, args) => {
                let args: SmallVec<[u64; 3]> = args.iter().map(of).collect();
                match (op, ty) {
                    (Op::Not, Ty::I1) => 1 - args[0],
                    _ => semantics::eval(*op, *ty, &args),
                }
            }
            Node::Sum(parts, offset) => {
                parts.iter().fold(*offset, |sum, (t, c)| sum.wrapping_add(of(t).wrapping_mul(*c)))
            }
            Node::Slice(of_wide, _) if self.bits(*of_wide) > 64 => any(),
            Node::Slice(inner, low) => of(inner) >> low,
            Node::Bytes(parts) => parts.iter().rev().fold(0, |sum, part| sum << 8 | of(part)),
        };
        value & mask(bits)
    }

    /// What a term is for the first arbitrary values.
    #[cfg(test)]
    pub fn first_sample(&self, term: Term) -> u64 {
        self.samples[term.0 as usize][0]
    }

    /// Are two terms different for some arbitrary values?
    pub fn differ(&self, one: Term, two: Term) -> bool {
        self.samples[one.0 as usize] != self.samples[two.0 as usize]
    }

    /// How many terms there are.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The expression.
    pub fn node(&self, term: Term) -> &Node {
        &self.nodes[term.0 as usize].0
    }

    /// Its width.
    pub fn bits(&self, term: Term) -> u32 {
        self.nodes[term.0 as usize].1
    }

    /// The constant, if it is one.
    pub fn constant(&self, term: Term) -> Option<u64> {
        match self.node(term) {
            Node::Const(c) => Some(*c),
            _ => None,
        }
    }

    /// A constant of at most 64 bits.
    pub fn number(&mut self, value: u64, bits: u32) -> Term {
        self.intern(Node::Const(value & mask(bits)), bits)
    }

    /// A truth value.
    pub fn truth(&mut self, value: bool) -> Term {
        self.number(u64::from(value), 1)
    }

    /// A symbol.
    pub fn symbol(&mut self, symbol: Symbol, bits: u32) -> Term {
        self.intern(Node::Symbol(symbol), bits)
    }

    /// A memory.
    pub fn memory(&mut self, node: MemoryNode) -> Memory {
        let next = Memory(self.memories.len() as u32);
        let number = *self.memory_numbers.entry(node.clone()).or_insert(next);
        if number == next {
            self.memories.push(node);
        }
        number
    }

    /// What a memory is.
    pub fn memory_node(&self, memory: Memory) -> &MemoryNode {
        &self.memories[memory.0 as usize]
    }

    /// An execution of a native.
    pub fn app(&mut self, node: AppNode) -> App {
        let next = App(self.apps.len() as u32);
        let number = *self.app_numbers.entry(node.clone()).or_insert(next);
        if number == next {
            self.apps.push(node);
        }
        number
    }

    /// What it reads.
    pub fn app_node(&self, app: App) -> &AppNode {
        &self.apps[app.0 as usize]
    }

    fn in_place(&mut self, node: InPlaceNode) -> InPlace {
        let next = InPlace(self.in_places.len() as u32);
        let number = *self.in_place_numbers.entry(node.clone()).or_insert(next);
        if number == next {
            self.in_places.push(node);
        }
        number
    }

    /// The state that is not SSA at the entry, or at a loop's head in an arbitrary iteration.
    pub fn initial_in_place(&mut self, number: u32) -> InPlace {
        self.in_place(InPlaceNode::Initial(number))
    }

    /// The same after a native.
    pub fn in_place_after(&mut self, before: InPlace, app: App) -> InPlace {
        self.in_place(InPlaceNode::After(before, app))
    }

    /// A result of a native.
    pub fn output(&mut self, app: App, index: u32, bits: u32) -> Term {
        self.intern(Node::Output(app, index), bits)
    }

    /// What is in memory at an address, where nothing more is known of it.
    pub fn load(&mut self, memory: Memory, address: Term, bits: u32) -> Term {
        self.intern(Node::Load(memory, address), bits)
    }

    /// The sum as terms with coefficients, and the constant.
    pub fn linear(&self, term: Term) -> (SmallVec<[(Term, u64); 3]>, u64) {
        match self.node(term) {
            Node::Const(c) => (SmallVec::new(), *c),
            Node::Sum(terms, offset) if terms.len() <= LONGEST => (terms.clone(), *offset),
            _ => (smallvec![(term, 1)], 0),
        }
    }

    /// `a * left + b * right + offset`
    pub fn sum(&mut self, (left, a): (Term, u64), (right, b): (Term, u64), offset: u64) -> Term {
        let bits = self.bits(left);
        let ((x, p), (y, q)) = (self.linear(left), self.linear(right));
        let mut terms: SmallVec<[(Term, u64); 3]> = x
            .into_iter()
            .map(|(t, c)| (t, c.wrapping_mul(a)))
            .chain(y.into_iter().map(|(t, c)| (t, c.wrapping_mul(b))))
            .collect();
        terms.sort_by_key(|(t, _)| *t);
        let offset = p.wrapping_mul(a).wrapping_add(q.wrapping_mul(b)).wrapping_add(offset);
        self.linear_term(terms, offset, bits)
    }

    /// The term of a sum; the terms are sorted.
    pub fn linear_term(
        &mut self,
        mut terms: SmallVec<[(Term, u64); 3]>,
        offset: u64,
        bits: u32,
    ) -> Term {
        terms.dedup_by(|later, kept| {
            let same = later.0 == kept.0;
            if same {
                kept.1 = kept.1.wrapping_add(later.1);
            }
            same
        });
        terms.iter_mut().for_each(|(_, c)| *c &= mask(bits));
        terms.retain(|(_, c)| *c != 0);
        match (&terms[..], offset & mask(bits)) {
            ([], offset) => self.number(offset, bits),
            ([(term, 1)], 0) => *term,
            (_, offset) => self.intern(Node::Sum(terms, offset), bits),
        }
    }

    /// `term + offset`
    pub fn plus(&mut self, term: Term, offset: u64) -> Term {
        self.sum((term, 1), (term, 0), offset)
    }

    /// `left - right`
    pub fn minus(&mut self, left: Term, right: Term) -> Term {
        self.sum((left, 1), (right, u64::MAX), 0)
    }

    /// A term in words, to this depth.
    pub fn words(&self, term: Term, depth: u32) -> String {
        let list = |terms: &mut dyn Iterator<Item = Term>| {
            terms.map(|t| self.words(t, depth - 1)).collect::<Vec<_>>().join(" ")
        };
        match self.node(term) {
            Node::Const(c) => format!("{c:#x}"),
            Node::Symbol(Symbol::Entry(loc)) => loc.to_string(),
            Node::Symbol(Symbol::Head(value)) => value.to_string(),
            Node::Symbol(Symbol::Right(value)) => format!("right {value}"),
            Node::Symbol(Symbol::Host(place, _)) => format!("host {place}"),
            Node::Symbol(Symbol::Base(segment)) => format!("{segment:?}"),
            _ if depth == 0 => "…".to_string(),
            Node::Pure(op, ty, args) => format!("({op}.{ty} {})", list(&mut args.iter().copied())),
            Node::Sum(parts, offset) => {
                let parts: Vec<String> = parts
                    .iter()
                    .map(|(t, factor)| match (*factor, self.words(*t, depth - 1)) {
                        (1, term) => term,
                        (factor, term) => format!("{}*{term}", factor as i64),
                    })
                    .collect();
                format!("({} + {:#x})", parts.join(" + "), offset)
            }
            Node::Slice(of, low) => {
                let bits = self.bits(term);
                format!("{}[{low}+{bits}]", self.words(*of, depth - 1))
            }
            Node::Bytes(parts) => format!("({})", list(&mut parts.iter().copied())),
            Node::Load(memory, address) => {
                format!("{memory:?}[{}]", self.words(*address, depth - 1))
            }
            Node::Output(app, index) => {
                format!("{:#x}.{index}", self.app_node(*app).ip)
            }
        }
    }
}
