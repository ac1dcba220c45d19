//! The table from IR operations to handlers: for an operation, a type and a form of operands it
//! instantiates one of the generic handlers of [`super::code`].
//!
//! The functions are pure and own no data; the lowering calls them. Example: `binary(Op::Add,
//! Ty::I32, true)` is the handler `code::binary::<Add, u32, true>`, which adds the constant `imm`.

use super::code::{self, Binary, Handler, Int};
use dynasour_ir::{Op, Ty};

/// Evaluates `$e` with `$t` as the Rust integer type for the IR type `$ty`: u8 for i1, and u64 for
/// all types wider than i32.
macro_rules! at_type {
    ($ty:expr, $t:ident => $e:expr) => {
        match $ty {
            Ty::I1 | Ty::I8 => {
                type $t = u8;
                $e
            }
            Ty::I16 => {
                type $t = u16;
                $e
            }
            Ty::I32 => {
                type $t = u32;
                $e
            }
            _ => {
                type $t = u64;
                $e
            }
        }
    };
}

fn two<B: Binary>(ty: Ty, imm: bool) -> Handler {
    at_type!(ty, T => if imm { code::binary::<B, T, true> } else { code::binary::<B, T, false> })
}

fn two_branch<B: Binary>(ty: Ty, imm: bool) -> Handler {
    at_type!(ty, T => if imm {
        code::branch_compare::<B, T, true>
    } else {
        code::branch_compare::<B, T, false>
    })
}

/// The handler of a two-operand operation, if there is one. With `imm` the second operand is a
/// constant.
pub fn binary(op: Op, ty: Ty, imm: bool) -> Option<Handler> {
    Some(match op {
        Op::Add => two::<code::Add>(ty, imm),
        Op::Sub => two::<code::Sub>(ty, imm),
        Op::And => two::<code::And>(ty, imm),
        Op::Or => two::<code::Or>(ty, imm),
        Op::Xor => two::<code::Xor>(ty, imm),
        Op::Mul => two::<code::Mul>(ty, imm),
        Op::Shl if shifts_fit(ty) => two::<code::Shl>(ty, imm),
        Op::Shr if shifts_fit(ty) => two::<code::Shr>(ty, imm),
        Op::Sar if shifts_fit(ty) => two::<code::Sar>(ty, imm),
        Op::Insert8Low if imm => code::insert::<u8, true>,
        Op::Insert8Low => code::insert::<u8, false>,
        Op::Insert8High if imm => code::insert_high::<(), true>,
        Op::Insert8High => code::insert_high::<(), false>,
        Op::Insert16 if imm => code::insert::<u16, true>,
        Op::Insert16 => code::insert::<u16, false>,
        Op::Eq | Op::Ne | Op::LtS | Op::LtU | Op::LeS | Op::LeU => compare(op, false, ty, imm),
        _ => return None,
    })
}

/// The handlers of shifts take every type but i1.
fn shifts_fit(ty: Ty) -> bool {
    ty != Ty::I1
}

/// The handler of a comparison, with its operands exchanged if `swapped`.
pub fn compare(op: Op, swapped: bool, ty: Ty, imm: bool) -> Handler {
    match (op, swapped) {
        (Op::Eq, _) => two::<code::Eq>(ty, imm),
        (Op::LtU, false) => two::<code::LtU>(ty, imm),
        (Op::LtU, true) => two::<code::GtU>(ty, imm),
        (Op::LeU, false) => two::<code::LeU>(ty, imm),
        (Op::LeU, true) => two::<code::GeU>(ty, imm),
        (Op::LtS, false) => two::<code::LtS>(ty, imm),
        (Op::LtS, true) => two::<code::GtS>(ty, imm),
        (Op::LeS, false) => two::<code::LeS>(ty, imm),
        (Op::LeS, true) => two::<code::GeS>(ty, imm),
        _ => two::<code::Ne>(ty, imm),
    }
}

/// The handler of a branch on a comparison.
pub fn branch(op: Op, swapped: bool, ty: Ty, imm: bool) -> Handler {
    match (op, swapped) {
        (Op::Eq, _) => two_branch::<code::Eq>(ty, imm),
        (Op::LtU, false) => two_branch::<code::LtU>(ty, imm),
        (Op::LtU, true) => two_branch::<code::GtU>(ty, imm),
        (Op::LeU, false) => two_branch::<code::LeU>(ty, imm),
        (Op::LeU, true) => two_branch::<code::GeU>(ty, imm),
        (Op::LtS, false) => two_branch::<code::LtS>(ty, imm),
        (Op::LtS, true) => two_branch::<code::GtS>(ty, imm),
        (Op::LeS, false) => two_branch::<code::LeS>(ty, imm),
        (Op::LeS, true) => two_branch::<code::GeS>(ty, imm),
        _ => two_branch::<code::Ne>(ty, imm),
    }
}

/// The handler of `select`.
pub fn select(ty: Ty) -> Handler {
    at_type!(ty, T => code::select::<T>)
}

fn sext_from<F: Int>(to: Ty) -> Handler {
    at_type!(to, T => code::sext::<F, T>)
}

/// The handler of a one-operand operation, if there is one. `ty` is the result's type.
pub fn unary(op: Op, ty: Ty) -> Option<Handler> {
    Some(match op {
        Op::Not => at_type!(ty, T => code::not::<T>),
        Op::Neg => at_type!(ty, T => code::neg::<T>),
        Op::Zext(from) => at_type!(from, T => code::zext::<T>),
        Op::Sext(Ty::I8) => sext_from::<u8>(ty),
        Op::Sext(Ty::I16) => sext_from::<u16>(ty),
        Op::Sext(Ty::I32) => sext_from::<u32>(ty),
        _ => return None,
    })
}

/// The handler of a load, if the type can be loaded.
pub fn load(ty: Ty, indexed: bool) -> Option<Handler> {
    if !ty.is_machine_int() {
        return None;
    }
    Some(at_type!(ty, T => if indexed { code::load_indexed::<T> } else { code::load::<T> }))
}

/// The handler of a load at `from` that is sign-extended to `to`.
pub fn load_sext(from: Ty, to: Ty) -> Option<Handler> {
    match from {
        Ty::I8 => Some(at_type!(to, T => code::load_sext::<u8, T>)),
        Ty::I16 => Some(at_type!(to, T => code::load_sext::<u16, T>)),
        Ty::I32 => Some(at_type!(to, T => code::load_sext::<u32, T>)),
        _ => None,
    }
}

/// The handler of a store, if the type can be stored.
pub fn store(ty: Ty, indexed: bool) -> Option<Handler> {
    if !ty.is_machine_int() {
        return None;
    }
    Some(at_type!(ty, T => if indexed { code::store_indexed::<T> } else { code::store::<T> }))
}

/// The handler of a store of a constant.
pub fn store_constant(ty: Ty) -> Option<Handler> {
    if !ty.is_machine_int() {
        return None;
    }
    Some(at_type!(ty, T => code::store_constant::<T>))
}
