//! The normal forms of terms: what each operation makes of its operands.
//!
//! Sums are linear forms; comparisons are `eq`, `lt.s` and `lt.u` or the negation of one; conditions of flags
//! are comparisons where that is exact; the low bits of sums and products are those of the low bits. Each
//! rule is checked with values, and proven by the solver, in `tests`.
//!
//! ```text
//! le.s a b                       not (lt.s b a)
//! cond.b (flags.add a b)         lt.u (a + b) a
//! ```

use super::term::{Node, Term, Terms, int, mask};
use crate::op::{Cond, FlagOp, Op};
use crate::semantics;
use crate::types::Ty;
use smallvec::{SmallVec, smallvec};

/// How deep the low bits of sums and products are normalised (guess; what is deeper is left to the solver).
const DEEPEST: u32 = 64;

/// The operands of an operation of bits that are put in order together (guess: more take time in long chains, and
/// only chains that are grouped differently need it).
const MOST_JOINED: usize = 16;

type Parts = SmallVec<[Term; 4]>;

/// Removes pairs of equal terms from a sorted list.
fn cancel(parts: &mut Parts) {
    let mut kept = Parts::new();
    for part in parts.drain(..) {
        match kept.last() == Some(&part) {
            true => drop(kept.pop()),
            false => kept.push(part),
        }
    }
    *parts = kept;
}

impl Terms {
    /// The bits from `low` on.
    pub fn slice(&mut self, of: Term, low: u32, bits: u32) -> Term {
        self.slice_within(of, low, bits, DEEPEST)
    }

    /// The same, normalised to this depth.
    fn slice_within(&mut self, of: Term, low: u32, bits: u32, depth: u32) -> Term {
        if low == 0 && bits == self.bits(of) {
            return of;
        }
        if let Some(done) = self.slices.get(&(of, low, bits)) {
            return *done;
        }
        let slice = match depth {
            0 => self.intern(Node::Slice(of, low), bits),
            _ => self.normal_slice(of, low, bits, depth - 1),
        };
        self.slices.insert((of, low, bits), slice);
        slice
    }

    fn normal_slice(&mut self, of: Term, low: u32, bits: u32, depth: u32) -> Term {
        match self.node(of).clone() {
            Node::Const(c) => self.number(if low < 64 { c >> low } else { 0 }, bits),
            Node::Slice(inner, offset) => self.slice_within(inner, offset + low, bits, depth),
            Node::Pure(Op::Zext(_), _, args) => {
                let inner = self.bits(args[0]);
                if low + bits <= inner {
                    self.slice_within(args[0], low, bits, depth)
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
                self.slice_within(args[0], low, bits, depth)
            }
            Node::Pure(Op::Sext(from), _, args) if low == 0 && int(bits).is_some() => {
                self.pure(Op::Sext(from), int(bits).unwrap_or(Ty::I64), &args)
            }
            Node::Pure(Op::Insert8Low, _, args) if low + bits <= 8 => {
                self.slice_within(args[1], low, bits, depth)
            }
            Node::Pure(Op::Insert8Low, _, args) if low >= 8 => {
                self.slice_within(args[0], low, bits, depth)
            }
            Node::Pure(Op::Insert8High, _, args) if low >= 8 && low + bits <= 16 => {
                self.slice_within(args[1], low - 8, bits, depth)
            }
            Node::Pure(Op::Insert8High, _, args) if low + bits <= 8 || low >= 16 => {
                self.slice_within(args[0], low, bits, depth)
            }
            Node::Pure(Op::Insert16, _, args) if low + bits <= 16 => {
                self.slice_within(args[1], low, bits, depth)
            }
            Node::Pure(Op::Insert16, _, args) if low >= 16 => {
                self.slice_within(args[0], low, bits, depth)
            }
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
                        let term = self.slice_within(term, 0, bits, depth);
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
                let left = self.slice_within(args[0], 0, bits, depth);
                let right = self.slice_within(args[1], 0, bits, depth);
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
        let value = offset.wrapping_neg().wrapping_mul(factor) & mask(bits);
        if let Node::Pure(Op::Zext(from), _, inner) = self.node(side) {
            let (inner, width) = (inner[0], from.bits());
            if value > mask(width) {
                return self.truth(false);
            }
            let value = self.number(value, width);
            return self.equal(inner, value);
        }
        let constant = self.number(value, bits);
        let ty = int(bits).unwrap_or(Ty::I64);
        self.intern(Node::Pure(Op::Eq, ty, smallvec![side, constant]), 1)
    }

    /// Do two accesses share no byte: `one - two + bytes - 1 >= size + bytes - 1`, unsigned?
    pub fn apart(&mut self, (one, bytes): (Term, u32), (two, size): (Term, u32)) -> Term {
        let difference = self.minus(one, two);
        let shifted = self.plus(difference, u64::from(bytes) - 1);
        let least = self.number(u64::from(size + bytes) - 1, 64);
        self.pure(Op::LeU, Ty::I64, &[least, shifted])
    }

    /// Are two images of the flags equal?
    pub fn equal_flags(&mut self, left: Term, right: Term) -> Term {
        if left == right {
            return self.truth(true);
        }
        let (a, b) = (left.min(right), left.max(right));
        self.intern(Node::Pure(Op::Eq, Ty::Flags, smallvec![a, b]), 1)
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
            Op::Insert8Low if one(self, 0).is_some_and(|c| c <= 0xff) => {
                self.pure(Op::Zext(Ty::I8), ty, &args[1..])
            }
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
                _ => match self.image_of(args[0]) {
                    Some(flags) => flags,
                    None => self.plain(op, ty, args),
                },
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

    /// What an operation of bits joins, in one order: `a ^ (b ^ a)` is `b`.
    fn bitwise(&mut self, op: Op, ty: Ty, args: &[Term]) -> Term {
        let neutral = if op == Op::And { ty.mask() } else { 0 };
        let (mut constant, mut parts) = (neutral, Parts::new());
        for part in self.joined(op, ty, args) {
            match self.constant(part) {
                Some(c) => constant = semantics::eval(op, ty, &[constant, c]),
                None => parts.push(part),
            }
        }
        parts.sort();
        match op {
            Op::Xor => cancel(&mut parts),
            _ => parts.dedup(),
        }
        let Some((first, others)) = parts.split_first() else {
            return self.number(constant, ty.bits());
        };
        let other = others.iter().fold(*first, |all, part| self.commutative(op, ty, &[all, *part]));
        match (op, constant) {
            (_, c) if c == neutral => other,
            (Op::And, 0) => self.number(0, ty.bits()),
            (Op::Or, c) if c == ty.mask() => self.number(c, ty.bits()),
            (Op::Xor, c) if c == ty.mask() => self.pure(Op::Not, ty, &[other]),
            (Op::And, c @ (0xff | 0xffff | 0xffff_ffff)) => {
                let width = 64 - c.leading_zeros();
                let low = self.slice(other, 0, width);
                self.pure(Op::Zext(int(width).unwrap_or(Ty::I32)), ty, &[low])
            }
            (_, c) => {
                let c = self.number(c, ty.bits());
                self.commutative(op, ty, &[other, c])
            }
        }
    }

    /// What an operation of bits joins, those joined before included; its operands as they are, if that is much.
    fn joined(&self, op: Op, ty: Ty, args: &[Term]) -> Parts {
        let (mut work, mut parts) = (Parts::from_slice(args), Parts::new());
        while let Some(part) = work.pop() {
            match self.node(part) {
                Node::Pure(of, wide, inner) if (*of, *wide) == (op, ty) => {
                    work.extend_from_slice(inner)
                }
                _ => parts.push(part),
            }
            if work.len() + parts.len() > MOST_JOINED {
                return Parts::from_slice(args);
            }
        }
        parts
    }

    /// A condition of flags: a comparison where there is one.
    fn condition(&mut self, cond: Cond, flags: Term) -> Term {
        if cond as u8 % 2 == 1 {
            let opposite = self.condition(cond.negate(), flags);
            return self.not(opposite);
        }
        let mut flags = flags;
        // What an operation keeps is that of the flags before.
        while let Node::Pure(Op::Flags(flag_op), _, args) = self.node(flags) {
            flags = match (flag_op, cond) {
                (FlagOp::Inc | FlagOp::Dec, Cond::B) => args[1],
                (FlagOp::SetCf, Cond::B | Cond::Be) => break,
                (FlagOp::SetCf, _) => args[0],
                _ => break,
            };
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
            // At these widths an index and a count are taken modulo the same.
            FlagOp::Bt if cond == Cond::B && matches!(ty, Ty::I32 | Ty::I64) => {
                let index = self.slice(args[1], 0, 8);
                let shifted = self.pure(Op::Shr, ty, &[args[0], index]);
                return self.slice(shifted, 0, 1);
            }
            FlagOp::SetCf => {
                if cond == Cond::B {
                    return args[1];
                }
                let equal = self.condition(Cond::E, args[0]);
                return self.pure(Op::Or, Ty::I1, &[args[1], equal]);
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
            _ => plain(self),
        }
    }
}
