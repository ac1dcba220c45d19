//! Terms: what values of a version are, as expressions over the entry state.
//!
//! Terms are hash-consed: equal terms have equal numbers, so most of what has to be proven equal is
//! recognised by comparing numbers. The constructors keep a few normal forms, in which a guest
//! instruction and what the passes have made of it meet: sums are linear forms, comparisons are `eq`,
//! `lt.s` and `lt.u` or the negation of one, conditions of flags are comparisons where that is exact.
//! They share no code with the passes, so that a mistake there is not repeated here; a test compares
//! each with [`crate::semantics`], and the solver with both.
//!
//! **Data.** [`Terms`] owns all terms and memories of one proof. **Invariants.** Operands have smaller
//! numbers than the term that reads them. **Callers.** One proof; no lock.
//!
//! ```text
//! cond.ne (flags.sub.i64 (rcx + 4), 64)      not (eq rcx, 60)
//! trunc.i32 (zext32.i64 v)                   v
//! ```

use crate::op::{Cond, FlagOp, Op};
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
    /// Of each term, what it is for arbitrary values of what it is made of.
    samples: Vec<[u64; SAMPLES]>,
}

/// Arbitrary values that are tried before a solver is asked (guess).
const SAMPLES: usize = 3;

/// The largest value of so many bits.
pub fn mask(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}

/// The integer type of this width.
fn int(bits: u32) -> Option<Ty> {
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
    fn intern(&mut self, node: Node, bits: u32) -> Term {
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
            Node::Sum(terms, offset) => (terms.clone(), *offset),
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
    fn linear_term(
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

    /// The bits from `low` on.
    pub fn slice(&mut self, of: Term, low: u32, bits: u32) -> Term {
        let width = self.bits(of);
        if low == 0 && bits == width {
            return of;
        }
        match self.node(of).clone() {
            Node::Const(c) => self.number(if low < 64 { c >> low } else { 0 }, bits),
            Node::Slice(inner, offset) => self.slice(inner, offset + low, bits),
            Node::Pure(Op::Zext(_), _, args) => {
                let inner = self.bits(args[0]);
                if low + bits <= inner {
                    self.slice(args[0], low, bits)
                } else if low >= inner {
                    self.number(0, bits)
                } else {
                    match (low, int(inner), int(bits)) {
                        (0, Some(from), Some(to)) => self.pure(Op::Zext(from), to, &args),
                        _ => self.intern(Node::Slice(of, low), bits),
                    }
                }
            }
            Node::Pure(Op::Sext(_), _, args) if low + bits <= self.bits(args[0]) => {
                self.slice(args[0], low, bits)
            }
            Node::Pure(Op::Sext(from), _, args) if low == 0 && int(bits).is_some() => {
                self.pure(Op::Sext(from), int(bits).unwrap_or(Ty::I64), &args)
            }
            Node::Pure(Op::Insert8Low, _, args) if low + bits <= 8 => {
                self.slice(args[1], low, bits)
            }
            Node::Pure(Op::Insert8Low, _, args) if low >= 8 => self.slice(args[0], low, bits),
            Node::Pure(Op::Insert8High, _, args) if low >= 8 && low + bits <= 16 => {
                self.slice(args[1], low - 8, bits)
            }
            Node::Pure(Op::Insert8High, _, args) if low + bits <= 8 || low >= 16 => {
                self.slice(args[0], low, bits)
            }
            Node::Pure(Op::Insert16, _, args) if low + bits <= 16 => self.slice(args[1], low, bits),
            Node::Pure(Op::Insert16, _, args) if low >= 16 => self.slice(args[0], low, bits),
            Node::Bytes(parts) if low.is_multiple_of(8) && bits.is_multiple_of(8) => {
                let parts = parts[(low / 8) as usize..((low + bits) / 8) as usize].to_vec();
                self.bytes(&parts)
            }
            // The low bits of a sum, a product and the like are those of the low bits.
            Node::Sum(terms, offset) if low == 0 && int(bits).is_some() => {
                let mut low_terms: SmallVec<[(Term, u64); 3]> = SmallVec::new();
                let mut rest = offset;
                for (term, factor) in terms {
                    let (inner, constant) = {
                        let term = self.slice(term, 0, bits);
                        self.linear(term)
                    };
                    rest = rest.wrapping_add(constant.wrapping_mul(factor));
                    low_terms.extend(inner.iter().map(|(t, c)| (*t, c.wrapping_mul(factor))));
                }
                low_terms.sort_by_key(|(t, _)| *t);
                self.linear_term(low_terms, rest, bits)
            }
            Node::Pure(op @ (Op::And | Op::Or | Op::Xor | Op::Mul), _, args)
                if low == 0 && int(bits).is_some() =>
            {
                let left = self.slice(args[0], 0, bits);
                let right = self.slice(args[1], 0, bits);
                self.pure(op, int(bits).unwrap_or(Ty::I64), &[left, right])
            }
            _ => self.intern(Node::Slice(of, low), bits),
        }
    }

    /// Bytes one after another, the lowest first.
    pub fn bytes(&mut self, parts: &[Term]) -> Term {
        let bits = 8 * parts.len() as u32;
        if let [only] = parts {
            return *only;
        }
        // Adjacent bytes of one term are a slice of it.
        let of = |part: Term| match *self.node(part) {
            Node::Slice(of, low) => Some((of, low)),
            Node::Const(_) => None,
            _ => Some((part, 0)),
        };
        if let Some((first, low)) = of(parts[0])
            && (parts.iter().zip(0..)).all(|(part, i)| of(*part) == Some((first, low + 8 * i)))
        {
            return self.slice(first, low, bits);
        }
        let numbers: Option<Vec<u64>> = parts.iter().map(|p| self.constant(*p)).collect();
        if let Some(numbers) = numbers.filter(|n| n.len() <= 8) {
            let value = numbers.iter().rev().fold(0, |value, byte| value << 8 | byte);
            return self.number(value, bits);
        }
        self.intern(Node::Bytes(parts.iter().copied().collect()), bits)
    }

    /// `not`
    pub fn not(&mut self, term: Term) -> Term {
        match self.node(term) {
            Node::Const(c) => {
                let value = *c == 0;
                self.truth(value)
            }
            Node::Pure(Op::Not, _, args) => args[0],
            _ => self.intern(Node::Pure(Op::Not, Ty::I1, smallvec![term]), 1),
        }
    }

    /// Are two terms of one width equal?
    pub fn equal(&mut self, left: Term, right: Term) -> Term {
        if left == right {
            return self.truth(true);
        }
        let bits = self.bits(left);
        if bits > 64 {
            let (a, b) = (left.min(right), left.max(right));
            return self.intern(Node::Pure(Op::Eq, Ty::V512, smallvec![a, b]), 1);
        }
        if bits == 1 {
            return match (self.constant(left), self.constant(right)) {
                (Some(1), _) => right,
                (_, Some(1)) => left,
                (Some(_), _) => self.not(right),
                (_, Some(_)) => self.not(left),
                _ => {
                    let (a, b) = (left.min(right), left.max(right));
                    self.intern(Node::Pure(Op::Eq, Ty::I1, smallvec![a, b]), 1)
                }
            };
        }
        // As "terms = constant", the first coefficient below half.
        let difference = self.minus(left, right);
        let (terms, offset) = self.linear(difference);
        let Some((_, first)) = terms.first() else { return self.truth(offset == 0) };
        let negative = *first > mask(bits) / 2;
        let factor = if negative { u64::MAX } else { 1 };
        let zero = self.number(0, bits);
        let without = self.sum((difference, 1), (zero, 0), offset.wrapping_neg());
        let side = self.sum((without, factor), (zero, 0), 0);
        let constant = self.number(offset.wrapping_neg().wrapping_mul(factor), bits);
        let ty = int(bits).unwrap_or(Ty::I64);
        self.intern(Node::Pure(Op::Eq, ty, smallvec![side, constant]), 1)
    }

    /// Are two images of the flags equal?
    pub fn equal_flags(&mut self, left: Term, right: Term) -> Term {
        if left == right {
            return self.truth(true);
        }
        let (a, b) = (left.min(right), left.max(right));
        self.intern(Node::Pure(Op::Eq, Ty::Flags, smallvec![a, b]), 1)
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

    fn less(&mut self, op: Op, ty: Ty, left: Term, right: Term) -> Term {
        if left == right {
            return self.truth(false);
        }
        if let (Some(a), Some(b)) = (self.constant(left), self.constant(right)) {
            return self.truth(semantics::eval(op, ty, &[a, b]) != 0);
        }
        if op == Op::LtU {
            match (self.constant(left), self.constant(right)) {
                // Below 1 is 0; above 0 is not 0.
                (_, Some(1)) => {
                    let zero = self.number(0, ty.bits());
                    return self.equal(left, zero);
                }
                (Some(0), _) => {
                    let zero = self.number(0, ty.bits());
                    let equal = self.equal(right, zero);
                    return self.not(equal);
                }
                (_, Some(0)) => return self.truth(false),
                (Some(c), _) if c == ty.mask() => return self.truth(false),
                _ => {}
            }
        }
        self.intern(Node::Pure(op, ty, smallvec![left, right]), 1)
    }

    /// A pure operation.
    pub fn pure(&mut self, op: Op, ty: Ty, args: &[Term]) -> Term {
        let bits = ty.bits();
        let constants: Option<SmallVec<[u64; 3]>> =
            args.iter().map(|a| self.constant(*a)).collect();
        if let Some(constants) = constants {
            let value = semantics::eval(op, ty, &constants);
            return self.number(value, Self::result_bits(op, ty));
        }
        let one = |terms: &Terms, i: usize| terms.constant(args[i]);
        match op {
            Op::Add => self.sum((args[0], 1), (args[1], 1), 0),
            Op::Sub => self.minus(args[0], args[1]),
            Op::Neg => self.sum((args[0], u64::MAX), (args[0], 0), 0),
            Op::Not if ty == Ty::I1 => self.not(args[0]),
            // not x = -1 - x
            Op::Not => self.sum((args[0], u64::MAX), (args[0], 0), u64::MAX),
            Op::Mul => match (one(self, 0), one(self, 1)) {
                (Some(c), _) => self.sum((args[1], c), (args[1], 0), 0),
                (_, Some(c)) => self.sum((args[0], c), (args[0], 0), 0),
                _ => self.commutative(op, ty, args),
            },
            Op::Shl => match one(self, 1) {
                Some(count) => {
                    let factor = semantics::eval(op, ty, &[1, count]);
                    self.sum((args[0], factor), (args[0], 0), 0)
                }
                None => self.plain(op, ty, args),
            },
            Op::Shr | Op::Sar | Op::Rol | Op::Ror => {
                let modulus = match op {
                    Op::Shr | Op::Sar if bits < 64 => 32,
                    Op::Shr | Op::Sar => 64,
                    _ => u64::from(bits),
                };
                match one(self, 1) {
                    Some(count) if count % modulus == 0 => args[0],
                    Some(count) => {
                        let count = self.number(count % modulus, 8);
                        self.plain(op, ty, &[args[0], count])
                    }
                    None => self.plain(op, ty, args),
                }
            }
            Op::And | Op::Or | Op::Xor => self.bitwise(op, ty, args),
            Op::Zext(_) => match self.node(args[0]).clone() {
                Node::Pure(Op::Zext(from), _, inner) => self.plain(Op::Zext(from), ty, &inner),
                _ => self.plain(op, ty, args),
            },
            Op::Sext(_) => match self.node(args[0]).clone() {
                Node::Pure(Op::Sext(from), _, inner) => self.plain(Op::Sext(from), ty, &inner),
                Node::Pure(Op::Zext(from), _, inner) => self.plain(Op::Zext(from), ty, &inner),
                _ => self.plain(op, ty, args),
            },
            Op::Trunc => self.slice(args[0], 0, bits),
            Op::Eq => self.equal(args[0], args[1]),
            Op::Ne => {
                let equal = self.equal(args[0], args[1]);
                self.not(equal)
            }
            Op::LtS | Op::LtU => self.less(op, ty, args[0], args[1]),
            Op::LeS | Op::LeU => {
                let strict = if op == Op::LeS { Op::LtS } else { Op::LtU };
                let more = self.less(strict, ty, args[1], args[0]);
                self.not(more)
            }
            Op::Select => match (one(self, 0), self.node(args[0]).clone()) {
                (Some(c), _) => args[if c != 0 { 1 } else { 2 }],
                _ if args[1] == args[2] => args[1],
                (None, Node::Pure(Op::Not, Ty::I1, inner)) => {
                    self.pure(op, ty, &[inner[0], args[2], args[1]])
                }
                _ => self.plain(op, ty, args),
            },
            Op::Cond(cond) => self.condition(cond, args[0]),
            Op::Flags(FlagOp::FromBits) => match self.node(args[0]).clone() {
                Node::Pure(Op::FlagBits, _, inner) => inner[0],
                _ => self.plain(op, ty, args),
            },
            Op::Flags(_) if op.is_commutative() => self.commutative(op, ty, args),
            _ => self.plain(op, ty, args),
        }
    }

    /// A pure operation as it stands, in no normal form.
    #[cfg(test)]
    pub fn raw(&mut self, op: Op, ty: Ty, args: &[Term]) -> Term {
        self.plain(op, ty, args)
    }

    /// The width of an operation's result.
    pub fn result_bits(op: Op, ty: Ty) -> u32 {
        match op.signature().1 {
            crate::op::ResultTy::Is(ty) => ty.bits(),
            _ => ty.bits(),
        }
    }

    fn plain(&mut self, op: Op, ty: Ty, args: &[Term]) -> Term {
        let node = Node::Pure(op, ty, args.iter().copied().collect());
        self.intern(node, Self::result_bits(op, ty))
    }

    fn commutative(&mut self, op: Op, ty: Ty, args: &[Term]) -> Term {
        self.plain(op, ty, &[args[0].min(args[1]), args[0].max(args[1])])
    }

    fn bitwise(&mut self, op: Op, ty: Ty, args: &[Term]) -> Term {
        let [a, b] = [args[0], args[1]];
        if a == b {
            return if op == Op::Xor { self.number(0, ty.bits()) } else { a };
        }
        let (constant, other) = match (self.constant(a), self.constant(b)) {
            (Some(c), _) => (Some(c), b),
            (_, c) => (c, a),
        };
        match (op, constant) {
            (Op::And, Some(0)) => self.number(0, ty.bits()),
            (Op::And, Some(c)) if c == ty.mask() => other,
            (Op::Or, Some(c)) if c == ty.mask() => self.number(c, ty.bits()),
            (Op::Or | Op::Xor, Some(0)) => other,
            (Op::Xor, Some(c)) if c == ty.mask() => self.pure(Op::Not, ty, &[other]),
            (Op::And, Some(c @ (0xff | 0xffff | 0xffff_ffff))) => {
                let width = 64 - c.leading_zeros();
                let low = self.slice(other, 0, width);
                self.pure(Op::Zext(int(width).unwrap_or(Ty::I32)), ty, &[low])
            }
            _ => self.commutative(op, ty, args),
        }
    }

    /// A condition of flags: a comparison where there is one.
    fn condition(&mut self, cond: Cond, flags: Term) -> Term {
        if cond as u8 % 2 == 1 {
            let opposite = self.condition(cond.negate(), flags);
            return self.not(opposite);
        }
        let plain = |terms: &mut Terms| terms.plain(Op::Cond(cond), Ty::I64, &[flags]);
        let Node::Pure(Op::Flags(flag_op), ty, args) = self.node(flags).clone() else {
            return plain(self);
        };
        let zero = self.number(0, ty.bits());
        let result = match flag_op {
            FlagOp::Sub => self.pure(Op::Sub, ty, &args),
            FlagOp::Add => self.pure(Op::Add, ty, &args),
            FlagOp::And => self.pure(Op::And, ty, &args),
            FlagOp::Or => self.pure(Op::Or, ty, &args),
            FlagOp::Xor => self.pure(Op::Xor, ty, &args),
            FlagOp::Inc => self.plus(args[0], 1),
            FlagOp::Dec => self.plus(args[0], u64::MAX),
            // A count of zero keeps all flags.
            FlagOp::Shl | FlagOp::Shr | FlagOp::Sar
                if matches!(cond, Cond::E | Cond::S)
                    && self
                        .constant(args[1])
                        .is_some_and(|c| c & if ty == Ty::I64 { 63 } else { 31 } != 0) =>
            {
                let op = match flag_op {
                    FlagOp::Shl => Op::Shl,
                    FlagOp::Shr => Op::Shr,
                    _ => Op::Sar,
                };
                self.pure(op, ty, &args[..2])
            }
            FlagOp::SetCf => {
                return match cond {
                    Cond::B => args[1],
                    Cond::Be => {
                        let equal = self.condition(Cond::E, args[0]);
                        self.pure(Op::Or, Ty::I1, &[args[1], equal])
                    }
                    _ => self.condition(cond, args[0]),
                };
            }
            _ => return plain(self),
        };
        let logic = matches!(flag_op, FlagOp::And | FlagOp::Or | FlagOp::Xor);
        match (cond, flag_op) {
            (Cond::E, _) => self.equal(result, zero),
            (Cond::S, _) => self.less(Op::LtS, ty, result, zero),
            (Cond::O | Cond::B, _) if logic => self.truth(false),
            (Cond::Be, _) if logic => self.equal(result, zero),
            (Cond::L, _) if logic => self.less(Op::LtS, ty, result, zero),
            (Cond::Le, _) if logic => {
                let more = self.less(Op::LtS, ty, zero, result);
                self.not(more)
            }
            (Cond::B, FlagOp::Sub) => self.less(Op::LtU, ty, args[0], args[1]),
            (Cond::Be, FlagOp::Sub) => {
                let more = self.less(Op::LtU, ty, args[1], args[0]);
                self.not(more)
            }
            (Cond::L, FlagOp::Sub) => self.less(Op::LtS, ty, args[0], args[1]),
            (Cond::Le, FlagOp::Sub) => {
                let more = self.less(Op::LtS, ty, args[1], args[0]);
                self.not(more)
            }
            (Cond::B, FlagOp::Add) => self.less(Op::LtU, ty, result, args[0]),
            (Cond::B, FlagOp::Inc | FlagOp::Dec) => self.condition(cond, args[1]),
            _ => plain(self),
        }
    }
}
