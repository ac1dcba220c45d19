//! Every operation of the IR, declared once: name, operand and result types, purity.
//!
//! A typed operation prints as `name.ty`. For comparisons and flag operations `ty` is the type of
//! the *operands*; for every other operation it is the type of the *result*. A value of a narrow
//! type has no defined upper bits in a machine register; the evaluator keeps it zero-extended in 64
//! bits.
//!
//! The module has no data but constant tables. Invariant: the tables stand in declaration order (a
//! test checks it). To add an operation, add it to [`Op`] and follow the compiler's exhaustiveness
//! errors.
//!
//! ```text
//! v3 = lt.s.i64 v1, v2          op LtS, ty i64 (of the operands), result i1
//! v4 = zext32.i64 v3            op Zext(I32), ty i64 (of the result)
//! v5 = flags.sub.i32 v6, 1      op Flags(Sub), ty i32 (of the operands), result flags
//! ```

use crate::types::{Loc, Ty};
use std::fmt;

/// An x86 condition (Intel SDM vol. 1, appendix B), in encoding order: `cond as u8` is the `cc`
/// field.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names are the architecture's own")]
pub enum Cond {
    O,
    No,
    B,
    Ae,
    E,
    Ne,
    Be,
    A,
    S,
    Ns,
    P,
    Np,
    L,
    Ge,
    Le,
    G,
}

impl Cond {
    /// All sixteen, in encoding order.
    pub const ALL: [Cond; 16] = [
        Cond::O,
        Cond::No,
        Cond::B,
        Cond::Ae,
        Cond::E,
        Cond::Ne,
        Cond::Be,
        Cond::A,
        Cond::S,
        Cond::Ns,
        Cond::P,
        Cond::Np,
        Cond::L,
        Cond::Ge,
        Cond::Le,
        Cond::G,
    ];

    /// The opposite condition.
    pub const fn negate(self) -> Cond {
        Cond::ALL[(self as usize) ^ 1]
    }

    /// The name in assembly and in the text form.
    pub const fn name(self) -> &'static str {
        ["o", "no", "b", "ae", "e", "ne", "be", "a", "s", "ns", "p", "np", "l", "ge", "le", "g"]
            [self as usize]
    }
}

/// Which operation's flags a `flags.*` instruction computes.
///
/// The result is *the content of the six arithmetic flags that the host processor leaves* after
/// that instruction, architecturally undefined flags included. The evaluator and the emitter both
/// execute the real instruction, shifts and rotations with their count in cl. An operation with an
/// `old` operand may keep some flags: inc/dec keep CF, rotates keep all but CF and OF, a shift by
/// zero keeps all, `bt` and the scans keep those that the processor keeps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FlagOp {
    /// `a + b`
    Add,
    /// `a - b` (also cmp, cmpxchg; neg is `0 - a`)
    Sub,
    /// `a + b + c`, c: i1
    Adc,
    /// `a - b - c`, c: i1
    Sbb,
    /// `a & b` (and, test)
    And,
    /// `a | b`
    Or,
    /// `a ^ b`
    Xor,
    /// `a + 1`, old
    Inc,
    /// `a - 1`, old
    Dec,
    /// `a << count` (count: i8), old
    Shl,
    /// logical right shift (count: i8), old
    Shr,
    /// arithmetic right shift (count: i8), old
    Sar,
    /// rotate left (count: i8), old
    Rol,
    /// rotate right (count: i8), old
    Ror,
    /// signed multiply `a * b` in the two-operand form, old (AMD keeps all but CF and OF)
    MulS,
    /// unsigned widening multiply of `a` (in the accumulator) by `b`, old (as for `MulS`)
    MulU,
    /// bit test of `a` at index `b` (already within the operand), old
    Bt,
    /// bit scan forward of `a`, old
    Bsf,
    /// bit scan reverse of `a`, old
    Bsr,
    /// tzcnt of `a`, old
    Tzcnt,
    /// lzcnt of `a`, old
    Lzcnt,
    /// popcnt of `a`
    Popcnt,
    /// the six flags out of an rflags image (i64)
    FromBits,
    /// `old` (flags) with CF replaced by an i1: operands old, cf
    SetCf,
}

/// What one operand of an operation must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArgTy {
    /// The instruction's `ty`.
    Same,
    /// Exactly this type.
    Is(Ty),
}

impl FlagOp {
    /// Every flag operation, with its name in the text form and its operand types.
    pub const TABLE: [(FlagOp, &'static str, &'static [ArgTy]); 24] = {
        use ArgTy::{Is, Same};
        const OLD: ArgTy = Is(Ty::Flags);
        const COUNT: ArgTy = Is(Ty::I8);
        const CARRY: ArgTy = Is(Ty::I1);
        [
            (FlagOp::Add, "add", &[Same, Same]),
            (FlagOp::Sub, "sub", &[Same, Same]),
            (FlagOp::Adc, "adc", &[Same, Same, CARRY]),
            (FlagOp::Sbb, "sbb", &[Same, Same, CARRY]),
            (FlagOp::And, "and", &[Same, Same]),
            (FlagOp::Or, "or", &[Same, Same]),
            (FlagOp::Xor, "xor", &[Same, Same]),
            (FlagOp::Inc, "inc", &[Same, OLD]),
            (FlagOp::Dec, "dec", &[Same, OLD]),
            (FlagOp::Shl, "shl", &[Same, COUNT, OLD]),
            (FlagOp::Shr, "shr", &[Same, COUNT, OLD]),
            (FlagOp::Sar, "sar", &[Same, COUNT, OLD]),
            (FlagOp::Rol, "rol", &[Same, COUNT, OLD]),
            (FlagOp::Ror, "ror", &[Same, COUNT, OLD]),
            (FlagOp::MulS, "muls", &[Same, Same, OLD]),
            (FlagOp::MulU, "mulu", &[Same, Same, OLD]),
            (FlagOp::Bt, "bt", &[Same, Same, OLD]),
            (FlagOp::Bsf, "bsf", &[Same, OLD]),
            (FlagOp::Bsr, "bsr", &[Same, OLD]),
            (FlagOp::Tzcnt, "tzcnt", &[Same, OLD]),
            (FlagOp::Lzcnt, "lzcnt", &[Same, OLD]),
            (FlagOp::Popcnt, "popcnt", &[Same]),
            (FlagOp::FromBits, "frombits", &[Is(Ty::I64)]),
            (FlagOp::SetCf, "setcf", &[OLD, CARRY]),
        ]
    };

    /// The name after `flags.` in the text form.
    pub const fn name(self) -> &'static str {
        Self::TABLE[self as usize].1
    }

    /// The operand types.
    pub const fn args(self) -> &'static [ArgTy] {
        Self::TABLE[self as usize].2
    }

    /// The position of the `old` flags operand, if it has one.
    pub fn old_operand(self) -> Option<usize> {
        self.args().iter().position(|a| *a == ArgTy::Is(Ty::Flags))
    }
}

/// An operation. See the module's header for how `ty` is read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    // Arithmetic and logic on i8..i64 (and/or/xor/not also on i1).
    /// Wrapping addition.
    Add,
    /// Wrapping subtraction.
    Sub,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Low half of the product.
    Mul,
    /// High half of the unsigned product.
    MulHighU,
    /// High half of the signed product.
    MulHighS,
    /// Shift left by an i8 count masked as x86 does (63 for i64, else 31); too far gives 0.
    Shl,
    /// Logical shift right, count as for `Shl`.
    Shr,
    /// Arithmetic shift right, count as for `Shl`; too far gives all sign bits.
    Sar,
    /// Rotate left by an i8 count modulo the width.
    Rol,
    /// Rotate right by an i8 count modulo the width.
    Ror,
    /// Bitwise complement.
    Not,
    /// Two's complement negation.
    Neg,
    /// Byte order reversal (i32, i64).
    Bswap,
    /// Number of set bits.
    Popcnt,
    /// Number of leading zero bits; the width for 0.
    Clz,
    /// Number of trailing zero bits; the width for 0.
    Ctz,
    /// Zero extension from the given type.
    Zext(Ty),
    /// Sign extension from the given type.
    Sext(Ty),
    /// The low bits of a wider integer.
    Trunc,
    /// i64 with its low byte replaced: operands old (i64), new (i8). The write to al.
    Insert8Low,
    /// i64 with its second byte replaced: operands old (i64), new (i8). The write to ah.
    Insert8High,
    /// i64 with its low 16 bits replaced: operands old (i64), new (i16). The write to ax.
    Insert16,
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// Signed less.
    LtS,
    /// Unsigned less.
    LtU,
    /// Signed less or equal.
    LeS,
    /// Unsigned less or equal.
    LeU,
    /// `c ? a : b`, operands c (i1), a, b.
    Select,
    /// A condition read from flags.
    Cond(Cond),
    /// The flags that an operation leaves.
    Flags(FlagOp),
    /// The six flags as an rflags image (i64, other bits 0).
    FlagBits,
    // Memory. Operands: base (i64), index (i64), and for a store the value; the rest of the address
    // is in `Inst::mem`.
    /// Read guest memory.
    Load,
    /// Write guest memory.
    Store,
    // Guest state, in `base` versions only.
    /// Read a guest location.
    Get(Loc),
    /// Write a guest location.
    Put(Loc),
    /// The start of a guest instruction: operand its pc (a constant).
    At,
    // Speculation.
    /// Predicate (i1) or fall back to the anchor.
    Assume,
    /// A safe point at a loop's head: control leaves through the anchor if the runtime has asked
    /// the thread to stop.
    Poll,
    // Observable events, for programs that are written in the text form itself; the lifter makes
    // none.
    /// Prints a number.
    Print,
    /// Takes the next number of the input.
    Read,
    /// An original guest instruction, see [`crate::Native`]. Operands: memory base and index if it
    /// has an explicit memory operand, then `gpr_in` values, then flags if `flags_in`. Results:
    /// `gpr_out`, then flags.
    Native,
}

/// The shape of an operation's result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResultTy {
    /// No result (or, for `native`, any number).
    None,
    /// The instruction's `ty`.
    Same,
    /// Exactly this type.
    Is(Ty),
}

impl Op {
    /// Operations without a payload, for parsers and random generators.
    pub const PLAIN: [Op; 40] = [
        Op::Add,
        Op::Sub,
        Op::And,
        Op::Or,
        Op::Xor,
        Op::Mul,
        Op::MulHighU,
        Op::MulHighS,
        Op::Shl,
        Op::Shr,
        Op::Sar,
        Op::Rol,
        Op::Ror,
        Op::Not,
        Op::Neg,
        Op::Bswap,
        Op::Popcnt,
        Op::Clz,
        Op::Ctz,
        Op::Trunc,
        Op::Insert8Low,
        Op::Insert8High,
        Op::Insert16,
        Op::Eq,
        Op::Ne,
        Op::LtS,
        Op::LtU,
        Op::LeS,
        Op::LeU,
        Op::Select,
        Op::FlagBits,
        Op::Load,
        Op::Store,
        Op::At,
        Op::Assume,
        Op::Poll,
        Op::Print,
        Op::Read,
        Op::Native,
        Op::Zext(Ty::I32),
    ];

    /// The operand types and the result type (`native` operands vary and give an empty slice).
    pub fn signature(self) -> (&'static [ArgTy], ResultTy) {
        use ArgTy::{Is, Same};
        use ResultTy as R;
        const I64: ArgTy = Is(Ty::I64);
        match self {
            Op::Add
            | Op::Sub
            | Op::And
            | Op::Or
            | Op::Xor
            | Op::Mul
            | Op::MulHighU
            | Op::MulHighS => (&[Same, Same], R::Same),
            Op::Shl | Op::Shr | Op::Sar | Op::Rol | Op::Ror => (&[Same, Is(Ty::I8)], R::Same),
            Op::Not | Op::Neg | Op::Bswap | Op::Popcnt | Op::Clz | Op::Ctz => (&[Same], R::Same),
            Op::Zext(from) | Op::Sext(from) => match from {
                Ty::I1 => (&[Is(Ty::I1)], R::Same),
                Ty::I8 => (&[Is(Ty::I8)], R::Same),
                Ty::I16 => (&[Is(Ty::I16)], R::Same),
                _ => (&[Is(Ty::I32)], R::Same),
            },
            // The operand is any wider integer; the verifier checks that.
            Op::Trunc => (&[I64], R::Same),
            Op::Insert8Low | Op::Insert8High => (&[I64, Is(Ty::I8)], R::Is(Ty::I64)),
            Op::Insert16 => (&[I64, Is(Ty::I16)], R::Is(Ty::I64)),
            Op::Eq | Op::Ne | Op::LtS | Op::LtU | Op::LeS | Op::LeU => {
                (&[Same, Same], R::Is(Ty::I1))
            }
            Op::Select => (&[Is(Ty::I1), Same, Same], R::Same),
            Op::Cond(_) => (&[Is(Ty::Flags)], R::Is(Ty::I1)),
            Op::Flags(f) => (f.args(), R::Is(Ty::Flags)),
            Op::FlagBits => (&[Is(Ty::Flags)], R::Is(Ty::I64)),
            Op::Load => (&[I64, I64], R::Same),
            Op::Store => (&[I64, I64, Same], R::None),
            Op::Get(_) => (&[], R::Same),
            Op::Put(_) => (&[Same], R::None),
            Op::At => (&[I64], R::None),
            Op::Assume => (&[Is(Ty::I1)], R::None),
            Op::Poll => (&[], R::None),
            Op::Print => (&[I64], R::None),
            Op::Read => (&[], R::Is(Ty::I64)),
            Op::Native => (&[], R::None),
        }
    }

    /// Is the result a function of the operands alone, with no effect and no fault?
    pub const fn is_pure(self) -> bool {
        !matches!(
            self,
            Op::Load
                | Op::Store
                | Op::Get(_)
                | Op::Put(_)
                | Op::At
                | Op::Assume
                | Op::Poll
                | Op::Print
                | Op::Read
                | Op::Native
        )
    }

    /// May the operands be exchanged?
    pub const fn is_commutative(self) -> bool {
        matches!(
            self,
            Op::Add
                | Op::And
                | Op::Or
                | Op::Xor
                | Op::Mul
                | Op::MulHighU
                | Op::MulHighS
                | Op::Eq
                | Op::Ne
                | Op::Flags(FlagOp::Add | FlagOp::And | FlagOp::Or | FlagOp::Xor)
        )
    }

    /// Does the text form carry a type suffix?
    pub const fn is_typed(self) -> bool {
        !matches!(
            self,
            Op::Insert8Low
                | Op::Insert8High
                | Op::Insert16
                | Op::Cond(_)
                | Op::Flags(FlagOp::FromBits | FlagOp::SetCf)
                | Op::FlagBits
                | Op::At
                | Op::Assume
                | Op::Poll
                | Op::Print
                | Op::Read
                | Op::Native
        )
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Op::Add => "add",
            Op::Sub => "sub",
            Op::And => "and",
            Op::Or => "or",
            Op::Xor => "xor",
            Op::Mul => "mul",
            Op::MulHighU => "mulhu",
            Op::MulHighS => "mulhs",
            Op::Shl => "shl",
            Op::Shr => "shr",
            Op::Sar => "sar",
            Op::Rol => "rol",
            Op::Ror => "ror",
            Op::Not => "not",
            Op::Neg => "neg",
            Op::Bswap => "bswap",
            Op::Popcnt => "popcnt",
            Op::Clz => "clz",
            Op::Ctz => "ctz",
            Op::Zext(from) => return write!(f, "zext{}", from.bits()),
            Op::Sext(from) => return write!(f, "sext{}", from.bits()),
            Op::Trunc => "trunc",
            Op::Insert8Low => "ins8l",
            Op::Insert8High => "ins8h",
            Op::Insert16 => "ins16",
            Op::Eq => "eq",
            Op::Ne => "ne",
            Op::LtS => "lt.s",
            Op::LtU => "lt.u",
            Op::LeS => "le.s",
            Op::LeU => "le.u",
            Op::Select => "select",
            Op::Cond(c) => return write!(f, "cond.{}", c.name()),
            Op::Flags(op) => return write!(f, "flags.{}", op.name()),
            Op::FlagBits => "flagbits",
            Op::Load => "load",
            Op::Store => "store",
            Op::Get(_) => "get",
            Op::Put(_) => "put",
            Op::At => "at",
            Op::Assume => "assume",
            Op::Poll => "poll",
            Op::Print => "print",
            Op::Read => "read",
            Op::Native => "native",
        };
        f.write_str(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_table_is_in_declaration_order() {
        for (index, (op, _, _)) in FlagOp::TABLE.iter().enumerate() {
            assert_eq!(*op as usize, index);
        }
    }

    #[test]
    fn negation_pairs_conditions() {
        for c in Cond::ALL {
            assert_eq!(c.negate().negate(), c);
            assert_ne!(c.negate(), c);
        }
        assert_eq!(Cond::L.negate(), Cond::Ge);
    }
}
