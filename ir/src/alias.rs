//! The alias oracle: may two memory accesses of one version touch the same byte?
//!
//! The verifier and the passes ask the same oracle, so what a pass proves the verifier accepts
//! (docs/design.md, "The IR").
//!
//! **Data.** [`Addresses`] numbers the addresses of one version and holds the alias guards passed
//! so far. An address is a linear form: `segment + sum of coefficient*value + offset`, modulo 2^64.
//! Two accesses with the same segment and the same terms lie at a known distance. For any other
//! pair the answer comes from an *alias guard*, which is an assume of this form:
//!
//! ```text
//! assume le.u N, X else aK        with X = (sum of coefficient*value) + k
//! ```
//!
//! Let D be the difference of two addresses whose terms are exactly these. After the guard, D + k
//! lies in [N, 2^64). Take an access A of w bytes and an access B of z bytes with A - B = D + s.
//! They share no byte if and only if `(D + s + w - 1) >= z + w - 1`, unsigned. With
//! `e = k - (s + w - 1)`, modulo 2^64, the condition is `((D + k) - e) >= z + w - 1`, and the guard
//! implies it if `e + z + w - 1 <= N`, computed without overflow: then the difference does not wrap.
//! So one guard serves every slot of the group that it was made for ([`crate::opt`], pass `alias`).
//! N may be almost 2^64: then the guard says that A lies in a gap between slots.
//!
//! A guard whose terms are all those of an address says where the address lies: the sum of the terms
//! is in [N - k, 2^64 - k). Two addresses in ranges that do not overlap need no guard of their
//! difference.
//!
//! **Invariants.** The oracle never assumes that a stack slot and a pointer differ: that takes a
//! guard. A guard speaks of SSA values, so it holds at every point that it dominates.
//!
//! **Callers.** A pass or the verifier, on a version that it owns or borrows; no lock. The caller
//! walks the blocks in dominance order and passes each assume that it meets to
//! [`Addresses::learn`].

use crate::defs::{Defs, Expr};
use crate::op::Op;
use crate::side_conditions::{SideCondition, holds};
use crate::types::{Operand, Ty, Value};
use crate::version::rename;
use crate::version::{Effects, Inst, Mem, Segment, Version};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::cell::RefCell;

/// Values with their coefficients, sorted, none zero.
pub(crate) type Terms = SmallVec<[(Value, u64); 3]>;

/// A sum of terms and a constant.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Linear {
    pub terms: Terms,
    pub offset: u64,
}

/// Largest number of terms of a linear form (guess). A value whose form has more is one term
/// itself; too low makes fewer addresses comparable, too high makes the oracle slow.
const MAX_TERMS: usize = 4;
/// Deepest nesting of sums that is followed; adding a constant does not count (guess, as for
/// [`MAX_TERMS`]).
const MAX_DEPTH: u32 = 6;
/// Longest chain of added constants that is followed. Definitions of a verified version form no
/// cycle; the bound keeps a long chain from taking quadratic time.
const MAX_CHAIN: u32 = 200;

impl Linear {
    fn value(v: Value) -> Linear {
        Linear { terms: SmallVec::from_slice(&[(v, 1)]), offset: 0 }
    }

    fn scaled(mut self, factor: u64) -> Linear {
        self.terms.iter_mut().for_each(|(_, c)| *c = c.wrapping_mul(factor));
        self.terms.retain(|(_, c)| *c != 0);
        self.offset = self.offset.wrapping_mul(factor);
        self
    }

    fn plus(&self, other: &Linear) -> Linear {
        let mut sum =
            Linear { terms: Terms::new(), offset: self.offset.wrapping_add(other.offset) };
        let (mut a, mut b) = (self.terms.iter().peekable(), other.terms.iter().peekable());
        loop {
            let term = match (a.peek(), b.peek()) {
                (Some((x, p)), Some((y, q))) if x == y => {
                    let both = (*x, p.wrapping_add(*q));
                    a.next();
                    b.next();
                    both
                }
                (Some((x, p)), Some((y, _))) if x < y => {
                    a.next();
                    (*x, *p)
                }
                (_, Some((y, q))) => {
                    b.next();
                    (*y, *q)
                }
                (Some((x, p)), None) => {
                    a.next();
                    (*x, *p)
                }
                (None, None) => return sum,
            };
            if term.1 != 0 {
                sum.terms.push(term);
            }
        }
    }

    /// `self - other`
    pub(crate) fn minus(&self, other: &Linear) -> Linear {
        self.plus(&other.clone().scaled(u64::MAX))
    }
}

/// Definitions, seen through replacements: the input of linear forms.
pub(crate) struct Values<'a> {
    pub defs: &'a Defs,
    pub replaced: &'a [Option<Operand>],
}

impl Values<'_> {
    /// The linear form of an i64 operand.
    pub(crate) fn linear(&self, o: Operand) -> Linear {
        self.at_depth(o, 0)
    }

    /// The operand as another one plus a constant, as far as additions of constants go.
    pub(crate) fn root(&self, mut o: Operand) -> (Operand, u64) {
        let mut offset = 0u64;
        for _ in 0..MAX_CHAIN {
            o = rename(self.replaced, o);
            let (operand, constant) = match self.defs.get(o) {
                Some(Expr { op: Op::Add, ty: Ty::I64, args: [x, Operand::Const(c), _] })
                | Some(Expr { op: Op::Add, ty: Ty::I64, args: [Operand::Const(c), x, _] }) => {
                    (x, c)
                }
                Some(Expr { op: Op::Sub, ty: Ty::I64, args: [x, Operand::Const(c), _] }) => {
                    (x, c.wrapping_neg())
                }
                _ => break,
            };
            o = operand;
            offset = offset.wrapping_add(constant);
        }
        match o {
            Operand::Const(c) => (Operand::Const(0), offset.wrapping_add(c)),
            Operand::Value(_) => (o, offset),
        }
    }

    fn at_depth(&self, o: Operand, depth: u32) -> Linear {
        let (o, offset) = self.root(o);
        let Operand::Value(v) = o else { return Linear { terms: Terms::new(), offset } };
        let mut linear = self.sum(v, depth).unwrap_or_else(|| Linear::value(v));
        linear.offset = linear.offset.wrapping_add(offset);
        linear
    }

    /// The linear form of a value that a sum, difference, negation, shift or multiplication by a
    /// constant defines.
    fn sum(&self, v: Value, depth: u32) -> Option<Linear> {
        let Expr { op, ty: Ty::I64, args: [a, b, _] } =
            self.defs.get(v.into()).filter(|_| depth < MAX_DEPTH)?
        else {
            return None;
        };
        let go = |o| self.at_depth(o, depth + 1);
        let form = match (op, rename(self.replaced, b)) {
            (Op::Add, _) => go(a).plus(&go(b)),
            (Op::Sub, _) => go(a).minus(&go(b)),
            (Op::Neg, _) => go(a).scaled(u64::MAX),
            (Op::Shl, Operand::Const(k)) => go(a).scaled(1 << (k & 63)),
            (Op::Mul, Operand::Const(k)) => go(a).scaled(k),
            _ => return None,
        };
        (form.terms.len() <= MAX_TERMS).then_some(form)
    }

    /// An address without its segment.
    fn address(&self, mem: &Mem, base: Operand, index: Operand) -> Linear {
        let mut sum = self.linear(base).plus(&self.linear(index).scaled(u64::from(mem.scale)));
        sum.offset = sum.offset.wrapping_add(mem.disp as u64);
        sum
    }
}

/// The bytes of one access: the number of its segment and terms, an offset from them, and a size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Location {
    /// Number of the segment and terms in [`Addresses`].
    pub key: u32,
    pub offset: u64,
    pub size: u32,
}

impl Location {
    /// Does `self` contain all bytes of `other`? (Both have the same key.)
    pub(crate) fn contains(&self, other: &Location) -> bool {
        let start = other.offset.wrapping_sub(self.offset);
        self.key == other.key
            && start < u64::from(self.size)
            && start + u64::from(other.size) <= u64::from(self.size)
    }
}

/// The relation of a second location to a first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Overlap {
    /// No byte in common.
    Disjoint,
    /// The second covers the first.
    Covered,
    /// At least one byte in common, but the second does not cover the first.
    Partial,
    /// Nothing is known.
    Unknown,
}

/// How the memory access of an instruction reaches memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// No access.
    None,
    /// Reads the bytes of its memory operand.
    Read(u32),
    /// Writes (and maybe reads) the bytes of its memory operand.
    Write(u32),
    /// Reads memory somewhere.
    ReadUnknown,
    /// Writes memory somewhere, or orders memory.
    Barrier,
}

/// What an instruction does to memory.
pub(crate) fn access(version: &Version, inst: &Inst) -> Access {
    match inst.op {
        Op::Load => Access::Read(inst.ty.bytes()),
        Op::Store => Access::Write(inst.ty.bytes()),
        // The observer of an event may read memory, so all earlier stores must have been performed.
        Op::Print | Op::Read => Access::Barrier,
        Op::Native => {
            let Some(native) = inst.native.and_then(|n| version.natives.get(n.index())) else {
                return Access::Barrier;
            };
            let effects = native.effects;
            let extent = native.mem_size.filter(|size| {
                *size > 0
                    && inst.mem.is_some()
                    && !effects.intersects(Effects::UNKNOWN_EXTENT | Effects::RESTARTABLE)
            });
            let (writes, reads) =
                (effects.contains(Effects::WRITE), effects.contains(Effects::READ));
            match extent {
                _ if effects.intersects(Effects::FENCE | Effects::LOCKED) => Access::Barrier,
                Some(size) if writes => Access::Write(size),
                Some(size) if reads => Access::Read(size),
                None if writes => Access::Barrier,
                None if reads || effects.contains(Effects::UNKNOWN_EXTENT) => Access::ReadUnknown,
                Some(_) | None => Access::None,
            }
        }
        _ => Access::None,
    }
}

/// What passed alias guards imply for two addresses with the difference D: pairs (k, N) such that
/// D + k lies in [N, 2^64). N is not 0.
type Implied = SmallVec<[(u64, u64); 2]>;

/// The differences of addresses that alias guards speak of, by number, with what passed guards
/// imply.
#[derive(Clone, Default)]
pub(crate) struct Guards {
    numbers: FxHashMap<Terms, u32>,
    implied: Vec<Implied>,
    any: bool,
    /// The number of the difference of two keys; `None`: they are in different segments.
    pairs: FxHashMap<(u32, u32), Option<u32>>,
    /// The number of the terms of a key.
    own: FxHashMap<u32, u32>,
}

impl Guards {
    fn number(&mut self, terms: Terms) -> u32 {
        let next = self.implied.len() as u32;
        let number = *self.numbers.entry(terms).or_insert(next);
        if number == next {
            self.implied.push(Implied::new());
        }
        number
    }
}

/// The addresses of a version by number, and the alias guards passed so far.
#[derive(Clone, Default)]
pub(crate) struct Addresses {
    numbers: FxHashMap<(Option<Segment>, Terms), u32>,
    keys: Vec<(Option<Segment>, Terms)>,
    /// The alias guards that hold at the current point of the walk. In a cell because the numbers of
    /// differences are found when they are first asked for.
    guards: RefCell<Guards>,
}

impl Addresses {
    /// The alias guards that hold at the current point of the walk.
    pub(crate) fn guards(&self) -> Guards {
        self.guards.borrow().clone()
    }

    /// Continues the walk at a point where these guards hold.
    pub(crate) fn continue_with(&mut self, guards: Guards) {
        *self.guards.get_mut() = guards;
    }

    /// The location of an access of `size` bytes by `inst`.
    pub(crate) fn locate(&mut self, values: &Values, inst: &Inst, size: u32) -> Option<Location> {
        let mem = inst.mem.as_ref()?;
        Some(self.locate_parts(values, mem, *inst.args.first()?, *inst.args.get(1)?, size))
    }

    /// The location of an access of `size` bytes.
    pub(crate) fn locate_parts(
        &mut self,
        values: &Values,
        mem: &Mem,
        base: Operand,
        index: Operand,
        size: u32,
    ) -> Location {
        let linear = values.address(mem, base, index);
        let key = (mem.seg, linear.terms);
        let next = self.keys.len() as u32;
        let number = *self.numbers.entry(key.clone()).or_insert(next);
        if number == next {
            self.keys.push(key);
        }
        Location { key: number, offset: linear.offset, size }
    }

    /// The terms a location is relative to.
    pub(crate) fn terms(&self, location: &Location) -> &Terms {
        &self.keys[location.key as usize].1
    }

    /// Is the location in the FS or GS segment?
    pub(crate) fn has_segment(&self, location: &Location) -> bool {
        self.keys[location.key as usize].0.is_some()
    }

    /// The difference of two addresses, if they are in one address space.
    pub(crate) fn difference(&self, a: &Location, b: &Location) -> Option<Linear> {
        let (x, y) = (&self.keys[a.key as usize], &self.keys[b.key as usize]);
        if !holds(SideCondition::AliasSegment, x.0 == y.0) {
            return None;
        }
        let form = |terms: &Terms, offset| Linear { terms: terms.clone(), offset };
        Some(form(&x.1, a.offset).minus(&form(&y.1, b.offset)))
    }

    /// The relation of `b` to `a`.
    pub(crate) fn overlap(&self, a: &Location, b: &Location) -> Overlap {
        if self.disjoint(a, b) {
            Overlap::Disjoint
        } else if a.key != b.key {
            Overlap::Unknown
        } else if b.contains(a) {
            Overlap::Covered
        } else {
            Overlap::Partial
        }
    }

    /// Is it certain that the two have no byte in common?
    pub(crate) fn disjoint(&self, a: &Location, b: &Location) -> bool {
        if a.key == b.key {
            let (forward, backward) =
                (b.offset.wrapping_sub(a.offset), a.offset.wrapping_sub(b.offset));
            return holds(
                SideCondition::AliasDistance,
                forward >= u64::from(a.size) && backward >= u64::from(b.size),
            );
        }
        let mut guards = self.guards.borrow_mut();
        guards.any
            && (self.guarded(&mut guards, a, b)
                || self.guarded(&mut guards, b, a)
                || self.apart(&mut guards, a, b))
    }

    /// Do the guards say of each of the two where it lies, and are these ranges disjoint?
    fn apart(&self, guards: &mut Guards, a: &Location, b: &Location) -> bool {
        let [seg_a, seg_b] = [a, b].map(|l| self.keys[l.key as usize].0);
        if !holds(SideCondition::AliasSegment, seg_a == seg_b) {
            return false;
        }
        let [of_a, of_b] = [a, b].map(|l| match guards.own.get(&l.key) {
            Some(number) => *number as usize,
            None => {
                let number = guards.number(self.terms(l).clone());
                guards.own.insert(l.key, number);
                number as usize
            }
        });
        // The first byte and the length of all that an access may touch.
        let range = |(k, n): &(u64, u64), l: &Location| {
            let from = n.wrapping_sub(*k).wrapping_add(l.offset);
            Some((from, n.wrapping_neg().checked_add(u64::from(l.size) - 1)?))
        };
        let ranges_of_b = || guards.implied[of_b].iter().filter_map(|g| range(g, b));
        guards.implied[of_a].iter().filter_map(|g| range(g, a)).any(|(from_a, len_a)| {
            ranges_of_b().any(|(from_b, len_b)| {
                let distances = [from_b.wrapping_sub(from_a), from_a.wrapping_sub(from_b)];
                holds(SideCondition::AliasRanges, distances[0] >= len_a && distances[1] >= len_b)
            })
        })
    }

    fn guarded(&self, guards: &mut Guards, a: &Location, b: &Location) -> bool {
        let number = match guards.pairs.get(&(a.key, b.key)) {
            Some(number) => *number,
            None => {
                let number = self.difference(a, b).map(|d| guards.number(d.terms));
                guards.pairs.insert((a.key, b.key), number);
                number
            }
        };
        let Some(number) = number else { return false };
        let (w, z) = (u64::from(a.size), u64::from(b.size));
        let distance = a.offset.wrapping_sub(b.offset);
        guards.implied[number as usize].iter().any(|(k, n)| {
            let e = k.wrapping_sub(distance.wrapping_add(w - 1));
            let least = e.checked_add(z + w - 1);
            holds(SideCondition::AliasGuardSize, least.is_some_and(|least| least <= *n))
        })
    }

    /// Learns from a passed predicate, if it is an alias guard or a conjunction with some.
    pub(crate) fn learn(&mut self, values: &Values, predicate: Operand) {
        let Some(Expr { op, ty, args: [a, b, _] }) = values.defs.get(predicate) else { return };
        if (op, ty) == (Op::And, Ty::I1) {
            self.learn(values, a);
            return self.learn(values, b);
        }
        if ty != Ty::I64 {
            return;
        }
        let (n, x) = match (op, a, b) {
            (Op::LeU, Operand::Const(n), x) => (n, x),
            (Op::LtU, Operand::Const(n), x) if n < u64::MAX => (n + 1, x),
            (Op::Ne, x, Operand::Const(0)) => (1, x),
            _ => return,
        };
        let linear = values.linear(x);
        // `0 <= X` says nothing.
        let says_something = holds(SideCondition::AliasSaysSomething, n != 0);
        if says_something && !linear.terms.is_empty() {
            let guards = self.guards.get_mut();
            guards.any = true;
            let number = guards.number(linear.terms);
            guards.implied[number as usize].push((linear.offset, n));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small addresses exhaustively: whenever a guard's fact makes the oracle say "disjoint", no
    /// distance that passes the guard makes the ranges overlap.
    #[test]
    fn guards_imply_disjointness() {
        let mut addresses = Addresses::default();
        for terms in [SmallVec::from_slice(&[(Value(0), 1)]), Terms::new()] {
            addresses.keys.push((None, terms));
        }
        let mut proved = 0;
        let bounds = (1..24u64).chain((1..24).map(|gap| 0u64.wrapping_sub(gap)));
        for (k, n) in (0..12u64).flat_map(|k| bounds.clone().map(move |n| (k, n))) {
            let mut guards = Guards::default();
            guards.number(SmallVec::from_slice(&[(Value(0), 1)]));
            guards.implied[0].push((k, n));
            guards.any = true;
            addresses.guards = RefCell::new(guards);
            for (s, w, z) in [(0, 4, 4), (0, 8, 1), (3, 1, 8), (u64::MAX - 2, 2, 4), (5, 8, 8)] {
                let a = Location { key: 0, offset: s, size: w };
                let b = Location { key: 1, offset: 0, size: z };
                if !addresses.disjoint(&a, &b) {
                    continue;
                }
                proved += 1;
                for d in -40i64..40 {
                    if (d as u64).wrapping_add(k) < n {
                        continue;
                    }
                    let start = d + s as i64;
                    assert!(
                        start + i64::from(w) <= 0 || start >= i64::from(z),
                        "k {k} n {n} s {s} w {w} z {z} d {d}"
                    );
                }
            }
        }
        assert!(proved > 100);
    }

    /// As above, for two guards that each speak of one address.
    #[test]
    fn guards_imply_ranges() {
        let terms = [0, 1].map(|v| SmallVec::from_slice(&[(Value(v), 1)]));
        let mut addresses = Addresses::default();
        terms.iter().for_each(|t| addresses.keys.push((None, t.clone())));
        let near = |n: u64| (0..n).chain((0..n).map(|i| 0u64.wrapping_sub(i + 1)));
        let mut proved = 0;
        for (k, gap, other) in near(6).flat_map(|k| {
            (1..5u64).flat_map(move |gap| (1..5u64).map(move |other| (k, gap, other)))
        }) {
            let mut guards = Guards { any: true, ..Guards::default() };
            for (t, guard) in terms.iter().zip([(k, gap), (3, other)]) {
                let number = guards.number(t.clone()) as usize;
                guards.implied[number].push((guard.0, guard.1.wrapping_neg()));
            }
            addresses.guards = RefCell::new(guards);
            let a = Location { key: 0, offset: 0, size: 2 };
            let b = Location { key: 1, offset: 1, size: 3 };
            if !addresses.disjoint(&a, &b) {
                continue;
            }
            proved += 1;
            let passes = |v: u64, k: u64, gap: u64| v.wrapping_add(k) >= gap.wrapping_neg();
            for (v, u) in near(20).flat_map(|v| near(20).map(move |u| (v, u))) {
                if passes(v, k, gap) && passes(u, 3, other) {
                    let (at, to) = (v, u.wrapping_add(1));
                    let apart = to.wrapping_sub(at) >= 2 && at.wrapping_sub(to) >= 3;
                    assert!(apart, "k {k} gap {gap} other {other}: {v} and {u}");
                }
            }
        }
        assert!(proved > 20, "{proved}");
    }

    #[test]
    fn distances_wrap() {
        let addresses = Addresses { keys: vec![(None, Terms::new())], ..Addresses::default() };
        let at = |offset: i64, size| Location { key: 0, offset: offset as u64, size };
        assert!(addresses.disjoint(&at(-8, 8), &at(0, 8)));
        assert!(!addresses.disjoint(&at(-8, 9), &at(0, 8)));
        assert!(!addresses.disjoint(&at(-1, 2), &at(0, 1)));
        assert!(at(-8, 8).contains(&at(-4, 4)));
        assert!(!at(-8, 8).contains(&at(-4, 8)));
    }
}
