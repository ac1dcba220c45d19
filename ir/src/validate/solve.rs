//! Which change of a case gives a value of a run another content.
//!
//! A value is followed back through its pure definitions, and out of a loop as in its first iteration, to
//! one *leaf*: a register at entry, a load, or a native's result. Operations on the way are inverted. A load
//! of what was stored in the run leads to the operand that was stored. The result is a proposal: the leaf
//! may occur elsewhere, too. The next run shows what comes of it.
//!
//! Data: [`Sources`], the definitions of one version. Invariant: none; a wrong proposal costs a case. No
//! lock.
//!
//! ```text
//! v1 = load.i32 [v0]   v2 = add.i32 v1, 4   v3 = flags.sub.i32 v2, 9   assume cond.e v3
//! to fail: v2 = 10, so v1 = 6: Change::Memory(content of v0, 4, 6)
//! ```

use super::case::Change;
use super::content;
use crate::defs::{Defs, Expr};
use crate::op::Op;
use crate::semantics::{self, AF, ARITH_FLAGS, CF, OF, PF, SF, ZF};
use crate::types::{Loc, Operand, Ty};
use crate::version::{Mem, Split, Version};
use std::cell::{Cell, RefCell};

/// Operations that are looked at for one value (guess: unrolled loops count down in long chains).
const MOST_STEPS: u32 = 200;

/// Where a value that is not computed comes from.
#[derive(Clone, Copy)]
enum Leaf {
    Entry(Loc),
    Load(Mem, [Operand; 2], Ty),
    Native(u64, usize),
    /// What the first way into a block passes: a loop's parameter in the first iteration.
    Argument(Operand),
}

/// Where the values of a version come from.
pub(super) struct Sources<'v> {
    version: &'v Version,
    defs: Defs,
    leaves: Vec<Option<Leaf>>,
    /// What was stored in the run under way, oldest first.
    stored: RefCell<Vec<Stored>>,
    /// Operations that may still be looked at.
    steps: Cell<u32>,
}

/// A store of a run.
#[derive(Clone, Copy)]
struct Stored {
    address: u64,
    size: u32,
    what: What,
}

/// What is stored.
#[derive(Clone, Copy)]
pub(super) enum What {
    /// This operand.
    Operand(Operand),
    /// The result of the native at this pc.
    Native(u64),
}

impl<'v> Sources<'v> {
    pub fn new(version: &'v Version) -> Sources<'v> {
        let mut leaves = vec![None; version.types.len()];
        if let Some(entry) = version.blocks.first() {
            for (param, loc) in entry.params.iter().zip(&version.entry_locs) {
                leaves[param.index()] = Some(Leaf::Entry(*loc));
            }
        }
        for (to, args) in version.blocks.iter().flat_map(|b| b.term.edges()) {
            for (param, arg) in version.blocks[to.index()].params.iter().zip(args) {
                leaves[param.index()].get_or_insert(Leaf::Argument(*arg));
            }
        }
        for inst in version.blocks.iter().flat_map(|b| &b.insts) {
            match (inst.op, inst.mem, inst.def()) {
                (Op::Load, Some(mem), Some(v)) if mem.seg.is_none() => {
                    leaves[v.index()] =
                        Some(Leaf::Load(mem, [inst.args[0], inst.args[1]], inst.ty));
                }
                (Op::Native, ..) => {
                    let ip = inst
                        .native
                        .and_then(|n| version.natives.get(n.index()))
                        .filter(|n| n.split == Split::No)
                        .map(|n| n.inst.ip());
                    for (i, v) in inst.defs.iter().enumerate() {
                        leaves[v.index()] = ip.map(|ip| Leaf::Native(ip, i));
                    }
                }
                _ => {}
            }
        }
        let (stored, steps) = Default::default();
        Sources { version, defs: Defs::of(version), leaves, stored, steps }
    }

    /// A run begins.
    pub fn begin(&self) {
        self.stored.borrow_mut().clear();
    }

    /// The run stores something.
    pub fn store(&self, address: u64, size: u32, what: What) {
        self.stored.borrow_mut().push(Stored { address, size, what });
    }

    /// The last store of the run that touches these bytes.
    fn last_store(&self, address: u64, size: u32) -> Option<Stored> {
        let touches = |s: &&Stored| {
            let after = address.wrapping_sub(s.address) < u64::from(s.size);
            after || s.address.wrapping_sub(address) < u64::from(size)
        };
        self.stored.borrow().iter().rev().find(touches).copied()
    }

    /// A change that lets the operand, of this type, have the content `wanted`. `values` are those of a
    /// run.
    pub fn set(&self, operand: Operand, ty: Ty, wanted: u64, values: &[u64]) -> Option<Change> {
        self.steps.set(MOST_STEPS);
        self.invert(operand, ty, wanted & ty.mask(), values)
    }

    fn invert(&self, operand: Operand, ty: Ty, wanted: u64, values: &[u64]) -> Option<Change> {
        let value = operand.as_value()?;
        self.steps.set(self.steps.get().checked_sub(1)?);
        if let Some(leaf) = self.leaves[value.index()] {
            return Some(match leaf {
                Leaf::Entry(loc) => Change::Loc(loc, wanted),
                Leaf::Native(ip, output) => Change::Native(ip, output, wanted),
                Leaf::Argument(operand) => {
                    return self.invert(operand, ty, wanted, values);
                }
                Leaf::Load(mem, [base, index], ty) => {
                    let [base, index] = [base, index].map(|o| content(values, o));
                    let scaled = index.wrapping_mul(u64::from(mem.scale));
                    let address = base.wrapping_add(scaled).wrapping_add(mem.disp as u64);
                    let size = ty.bytes();
                    match self.last_store(address, size) {
                        None => Change::Memory(address, size, wanted),
                        Some(stored) => {
                            let offset = address.wrapping_sub(stored.address);
                            let rest = u64::from(stored.size).checked_sub(offset);
                            let is_inside = rest.is_some_and(|rest| u64::from(size) <= rest);
                            return match stored.what {
                                What::Operand(operand) if is_inside => {
                                    // Perhaps a part of what was stored.
                                    let whole = Ty::int_of_bytes(stored.size)?;
                                    let shift = 8 * offset;
                                    let others = !(ty.mask() << shift) & whole.mask();
                                    let wanted =
                                        content(values, operand) & others | wanted << shift;
                                    self.invert(operand, whole, wanted, values)
                                }
                                What::Native(ip) if is_inside => {
                                    Some(Change::Stored(ip, offset, size, wanted))
                                }
                                _ => None,
                            };
                        }
                    }
                }
            });
        }
        let expr = self.defs.get(operand)?;
        if ty == Ty::I1 {
            return self.decide(&expr, wanted != 0, values);
        }
        let has = |i: usize| content(values, expr.args[i]);
        let then = |i: usize, wanted: u64, from: Ty| {
            self.invert(expr.args[i], from, wanted & from.mask(), values)
        };
        let same = expr.ty;
        let count = || has(1) as u32 & if same.bits() == 64 { 63 } else { 31 };
        match expr.op {
            Op::Add => then(0, wanted.wrapping_sub(has(1)), same)
                .or_else(|| then(1, wanted.wrapping_sub(has(0)), same)),
            Op::Sub => then(0, wanted.wrapping_add(has(1)), same)
                .or_else(|| then(1, has(0).wrapping_sub(wanted), same)),
            Op::Xor => then(0, wanted ^ has(1), same).or_else(|| then(1, wanted ^ has(0), same)),
            Op::And if wanted & !has(1) == 0 => then(0, has(0) & !has(1) | wanted, same),
            Op::And if wanted & !has(0) == 0 => then(1, has(1) & !has(0) | wanted, same),
            Op::Or if wanted & has(1) == has(1) => then(0, wanted, same),
            Op::Or if wanted & has(0) == has(0) => then(1, wanted, same),
            Op::Not => then(0, !wanted, same),
            Op::Neg => then(0, wanted.wrapping_neg(), same),
            Op::Bswap => then(0, wanted.swap_bytes() >> (64 - same.bits()), same),
            Op::Mul if has(1) & 1 == 1 => then(0, wanted.wrapping_mul(inverse(has(1))), same),
            Op::Shl if count() < same.bits() => {
                let lost = !(same.mask() >> count()) & same.mask();
                then(0, wanted >> count() | has(0) & lost, same)
            }
            Op::Shr | Op::Sar if count() < same.bits() => {
                let lost = !(same.mask() << count()) & same.mask();
                then(0, wanted << count() | has(0) & lost, same)
            }
            Op::Zext(from) | Op::Sext(from) => then(0, wanted, from),
            Op::Trunc => {
                let from = self.ty(expr.args[0])?;
                then(0, has(0) & !ty.mask() | wanted, from)
            }
            Op::Insert8Low => then(1, wanted, Ty::I8),
            Op::Insert8High => then(1, wanted >> 8, Ty::I8),
            Op::Insert16 => then(1, wanted, Ty::I16),
            Op::Ctz if wanted < u64::from(same.bits()) => then(0, 1 << wanted, same),
            Op::Clz if wanted < u64::from(same.bits()) => {
                then(0, 1 << (u64::from(same.bits()) - 1 - wanted), same)
            }
            Op::Popcnt if wanted < u64::from(same.bits()) => then(0, (1 << wanted) - 1, same),
            Op::Select => then(if has(0) != 0 { 1 } else { 2 }, wanted, same),
            _ => None,
        }
    }

    /// Are the operands the same by their definitions?
    fn is_same(&self, one: Operand, two: Operand) -> bool {
        let both = self.defs.get(one).zip(self.defs.get(two));
        one == two || both.is_some_and(|(one, two)| one == two)
    }

    fn ty(&self, operand: Operand) -> Option<Ty> {
        operand.as_value().map(|v| self.version.ty(v))
    }

    /// A change that gives a predicate the other outcome.
    pub fn flip(&self, predicate: Operand, values: &[u64]) -> Option<Change> {
        let holds = content(values, predicate) != 0;
        self.set(predicate, Ty::I1, u64::from(!holds), values)
    }

    /// A change that lets a predicate be `wanted`.
    fn decide(&self, expr: &Expr, wanted: bool, values: &[u64]) -> Option<Change> {
        match expr.op {
            Op::Cond(_) => {
                let flags = expr.args[0];
                let Some(by) = self.defs.get(flags).filter(|by| matches!(by.op, Op::Flags(_)))
                else {
                    // Flags from outside: any that decide.
                    let all = [0, CF, PF, AF, ZF, SF, OF, SF | OF, CF | ZF, ARITH_FLAGS];
                    let image = all.into_iter().find(|image| {
                        (semantics::eval(expr.op, expr.ty, &[*image]) != 0) == wanted
                    })?;
                    return self.invert(flags, Ty::Flags, image, values);
                };
                let outcome = |args: &[u64]| {
                    let image = semantics::eval(by.op, by.ty, args);
                    semantics::eval(expr.op, expr.ty, &[image]) != 0
                };
                self.replace(&by, values, |args| outcome(args) == wanted)
            }
            _ => self.replace(expr, values, |args| {
                (semantics::eval(expr.op, expr.ty, args) != 0) == wanted
            }),
        }
    }

    /// Gives one operand of an expression another content, so that `is_wanted` of its operands.
    fn replace(
        &self,
        expr: &Expr,
        values: &[u64],
        is_wanted: impl Fn(&[u64]) -> bool,
    ) -> Option<Change> {
        let contents: Vec<u64> = expr.operands().iter().map(|o| content(values, *o)).collect();
        for (i, operand) in expr.operands().iter().enumerate() {
            let Some(ty) = self.ty(*operand).filter(|ty| *ty != Ty::Flags) else { continue };
            let other = contents[if i == 0 { contents.len().min(2) - 1 } else { 0 }];
            let sign = 1u64 << (ty.bits() - 1);
            let candidates = [
                other,
                other.wrapping_add(1),
                other.wrapping_sub(1),
                other.wrapping_neg(),
                !other,
                contents[i] ^ other,
                contents[i].wrapping_add(1),
                contents[i] ^ 1,
                contents[i] ^ sign,
                0,
                1,
                sign,
                sign - 1,
                ty.mask(),
            ];
            for candidate in candidates {
                // `test rax, rax` has its operand twice.
                let mut args = contents.clone();
                for (arg, other) in args.iter_mut().zip(expr.operands()) {
                    if self.is_same(*operand, *other) {
                        *arg = candidate & ty.mask();
                    }
                }
                if is_wanted(&args)
                    && let Some(change) = self.invert(*operand, ty, args[i], values)
                {
                    return Some(change);
                }
            }
        }
        None
    }
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration.
fn inverse(odd: u64) -> u64 {
    (0..6).fold(odd, |x, _| x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x))))
}
