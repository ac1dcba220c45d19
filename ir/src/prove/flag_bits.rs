//! Flags that have been taken apart into bits and put together again, as machine code keeps them in a
//! register (`lahf; seto al`).
//!
//! Each of the six bits is followed through masks, shifts, and moves of bytes to where it comes from. If they are the
//! six flags of one image, the result is that image. `super::tests` proves it with the solver.
//!
//! **Data.** None. **Callers.** [`super::normal`].
//!
//! ```text
//! frombits (or (and (shr r 8) 0xd5) (2048 * (and r 1)))      with r = … (byte 1 of flagbits f) (zext (cond.o f)):  f
//! ```

use super::term::{Node, Term, Terms};
use crate::op::{Cond, FlagOp, Op};
use crate::semantics::{ARITH_FLAGS, OF};
use crate::types::Ty;

/// Where a bit comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bit {
    /// It is this.
    Is(bool),
    /// Bit n of a term.
    Of(Term, u32),
}

/// Operations through which a bit is followed (guess; the longest way has a dozen).
const DEEPEST: u32 = 64;

impl Terms {
    /// The flags whose image this is, if it was made of the bits of one.
    pub fn image_of(&mut self, image: Term) -> Option<Term> {
        let lowest = ARITH_FLAGS.trailing_zeros();
        let Bit::Of(from, bit) = self.bit(image, lowest, DEEPEST) else { return None };
        let flags = match self.node(from) {
            Node::Pure(Op::FlagBits, _, args) if bit == lowest => args[0],
            _ => return None,
        };
        let overflow = self.pure(Op::Cond(Cond::O), Ty::I64, &[flags]);
        let is_its = |n: u32| match self.bit(image, n, DEEPEST) {
            Bit::Of(term, bit) if term == from => bit == n,
            Bit::Of(term, bit) => 1 << n == OF && (term, bit) == (overflow, 0),
            Bit::Is(value) => 1 << n == OF && self.constant(overflow) == Some(u64::from(value)),
        };
        (0..64).filter(|n| ARITH_FLAGS >> n & 1 != 0).all(is_its).then_some(flags)
    }

    /// Where a bit of a term comes from.
    fn bit(&self, term: Term, n: u32, depth: u32) -> Bit {
        if n >= self.bits(term) {
            return Bit::Is(false);
        }
        let Some(depth) = depth.checked_sub(1) else { return Bit::Of(term, n) };
        let either = |neutral: bool, args: &[Term]| match (
            self.bit(args[0], n, depth),
            self.bit(args[1], n, depth),
        ) {
            (Bit::Is(value), _) | (_, Bit::Is(value)) if value != neutral => Bit::Is(value),
            (Bit::Is(_), other) | (other, Bit::Is(_)) => other,
            (one, other) if one == other => one,
            _ => Bit::Of(term, n),
        };
        match self.node(term) {
            Node::Const(c) => Bit::Is(c >> n & 1 != 0),
            Node::Slice(of, low) => self.bit(*of, low + n, depth),
            Node::Bytes(parts) => self.bit(parts[n as usize / 8], n % 8, depth),
            Node::Sum(parts, 0) => match parts[..] {
                [(part, factor)] if factor.is_power_of_two() => {
                    match n.checked_sub(factor.trailing_zeros()) {
                        Some(n) => self.bit(part, n, depth),
                        None => Bit::Is(false),
                    }
                }
                _ => Bit::Of(term, n),
            },
            Node::Pure(Op::Zext(_), _, args) => self.bit(args[0], n, depth),
            Node::Pure(Op::And, _, args) => either(true, args),
            Node::Pure(Op::Or, _, args) => either(false, args),
            Node::Pure(Op::Shr, _, args) => match self.constant(args[1]) {
                Some(count) if count < 64 => self.bit(args[0], n + count as u32, depth),
                _ => Bit::Of(term, n),
            },
            Node::Pure(Op::FlagBits, _, args) if 1 << n == OF => {
                match self.overflow(args[0], depth) {
                    Some(bit) => bit,
                    None => Bit::Of(term, n),
                }
            }
            Node::Pure(Op::Insert8Low, _, args) if n < 8 => self.bit(args[1], n, depth),
            Node::Pure(Op::Insert8High, _, args) if (8..16).contains(&n) => {
                self.bit(args[1], n - 8, depth)
            }
            Node::Pure(Op::Insert16, _, args) if n < 16 => self.bit(args[1], n, depth),
            Node::Pure(Op::Insert8Low | Op::Insert8High | Op::Insert16, _, args) => {
                self.bit(args[0], n, depth)
            }
            _ => Bit::Of(term, n),
        }
    }

    /// The overflow of `add.i8 b, 127` with b = 0 or 1, by which code sets OF: it is b.
    fn overflow(&self, flags: Term, depth: u32) -> Option<Bit> {
        let Node::Pure(Op::Flags(FlagOp::Add), Ty::I8, args) = self.node(flags) else {
            return None;
        };
        let sum = [[args[0], args[1]], [args[1], args[0]]];
        let [byte, _] = sum.into_iter().find(|sum| self.constant(sum[1]) == Some(127))?;
        let is_zero = |n| self.bit(byte, n, depth) == Bit::Is(false);
        (1..8).all(is_zero).then(|| self.bit(byte, 0, depth))
    }
}
