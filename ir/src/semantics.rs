//! The result of each pure operation, on values kept zero-extended in 64 bits.
//!
//! The evaluator, constant folding, the interpreter's slow paths and deoptimisation all call
//! [`eval`], so that there is one meaning. Flags are rflags images of the six arithmetic flags; the
//! host processor computes them ([`crate::hostflags`]).
//!
//! No data and no lock; every function is pure. Invariant: operands and results have no bits set
//! above their type.
//!
//! ```text
//! eval(Op::Add, Ty::I8, &[0xff, 1])       0
//! eval(Op::LtS, Ty::I8, &[0xff, 1])       1: -1 < 1
//! ```

use crate::hostflags;
pub use crate::hostflags::{AF, ARITH_FLAGS, CF, OF, PF, SF, ZF};
use crate::op::{Cond, Op};
use crate::types::Ty;

/// Does `cond` hold of these flag bits? (Intel SDM vol. 1, appendix B.)
pub const fn cond_holds(cond: Cond, flags: u64) -> bool {
    let sf_ne_of = (flags & SF != 0) != (flags & OF != 0);
    match cond {
        Cond::O => flags & OF != 0,
        Cond::No => flags & OF == 0,
        Cond::B => flags & CF != 0,
        Cond::Ae => flags & CF == 0,
        Cond::E => flags & ZF != 0,
        Cond::Ne => flags & ZF == 0,
        Cond::Be => flags & (CF | ZF) != 0,
        Cond::A => flags & (CF | ZF) == 0,
        Cond::S => flags & SF != 0,
        Cond::Ns => flags & SF == 0,
        Cond::P => flags & PF != 0,
        Cond::Np => flags & PF == 0,
        Cond::L => sf_ne_of,
        Cond::Ge => !sf_ne_of,
        Cond::Le => flags & ZF != 0 || sf_ne_of,
        Cond::G => flags & ZF == 0 && !sf_ne_of,
    }
}

/// The result of a pure operation.
///
/// `args` are zero-extended from their types, and so is the result. Panics on an operation that is
/// not pure or on too few operands: both are broken invariants of the caller, which the verifier
/// checks.
pub fn eval(op: Op, ty: Ty, args: &[u64]) -> u64 {
    let mask = ty.mask();
    let bits = ty.bits();
    let signed = |i: usize| ty.sext(args[i]);
    // x86 masks shift counts to 6 bits for 64-bit operands and to 5 bits for all others.
    let count = || (args[1] as u32) & if bits == 64 { 63 } else { 31 };
    match op {
        Op::Add => args[0].wrapping_add(args[1]) & mask,
        Op::Sub => args[0].wrapping_sub(args[1]) & mask,
        Op::And => args[0] & args[1],
        Op::Or => args[0] | args[1],
        Op::Xor => args[0] ^ args[1],
        Op::Mul => args[0].wrapping_mul(args[1]) & mask,
        Op::MulHighU => ((u128::from(args[0]) * u128::from(args[1])) >> bits) as u64 & mask,
        Op::MulHighS => ((i128::from(signed(0)) * i128::from(signed(1))) >> bits) as u64 & mask,
        Op::Shl => args[0].checked_shl(count()).unwrap_or(0) & mask,
        Op::Shr => args[0] >> count(),
        Op::Sar => (signed(0) >> count().min(63)) as u64 & mask,
        Op::Rol | Op::Ror => {
            let right = (args[1] as u32) % bits;
            let right = if op == Op::Rol { (bits - right) % bits } else { right };
            if right == 0 { args[0] } else { (args[0] >> right | args[0] << (bits - right)) & mask }
        }
        Op::Not => !args[0] & mask,
        Op::Neg => args[0].wrapping_neg() & mask,
        Op::Bswap => args[0].swap_bytes() >> (64 - bits),
        Op::Popcnt => u64::from(args[0].count_ones()),
        Op::Clz => u64::from(args[0].leading_zeros() - (64 - bits)),
        Op::Ctz => u64::from(args[0].trailing_zeros().min(bits)),
        Op::Zext(_) => args[0],
        Op::Sext(from) => from.sext(args[0]) as u64 & mask,
        Op::Trunc => args[0] & mask,
        Op::Insert8Low => args[0] & !0xff | args[1],
        Op::Insert8High => args[0] & !0xff00 | args[1] << 8,
        Op::Insert16 => args[0] & !0xffff | args[1],
        Op::Eq => u64::from(args[0] == args[1]),
        Op::Ne => u64::from(args[0] != args[1]),
        Op::LtS => u64::from(signed(0) < signed(1)),
        Op::LtU => u64::from(args[0] < args[1]),
        Op::LeS => u64::from(signed(0) <= signed(1)),
        Op::LeU => u64::from(args[0] <= args[1]),
        Op::Select => args[if args[0] != 0 { 1 } else { 2 }],
        Op::Cond(cond) => u64::from(cond_holds(cond, args[0])),
        Op::Flags(flag_op) => hostflags::flags(flag_op, ty, args),
        Op::FlagBits => args[0] & ARITH_FLAGS,
        Op::Load
        | Op::Store
        | Op::Get(_)
        | Op::Put(_)
        | Op::At
        | Op::Assume
        | Op::Poll
        | Op::Print
        | Op::Read
        | Op::Native => {
            panic!("{op} is not a pure operation")
        }
    }
}
