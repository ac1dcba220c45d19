//! The definitions of the values of straight-line code, by which targets of dispatches are followed
//! backwards.
//!
//! Some values are a register's at the start plus a constant. A load from such an address reads what was stored
//! last at the same one, so values that a handler saves on the stack are followed, too.
//!
//! ```text
//!   v1 = rsp - 8; store [v1], rbx; v2 = load [v1]      v2 comes from rbx
//! ```
//!
//! Data: [`Definitions`], for one path. Invariant: the instructions are in order, each value is defined before it
//! is used. Callers: [`crate::guests`], [`crate::positions`] and [`crate::build`]; no lock.

use crate::guests::Green;
use dynasour_ir::{Gpr, Inst, Loc, Mem, Op, Operand, Ty, Value};
use rustc_hash::{FxHashMap, FxHashSet};

/// The definitions of the values of straight-line code.
pub(crate) struct Definitions<'v> {
    insts: &'v [Inst],
    /// For each value the index of the instruction that defines it.
    at: FxHashMap<Value, usize>,
    /// The values that exist at the start, with their locations.
    params: FxHashMap<Value, Loc>,
    /// The values that are a register's value at the start plus a constant.
    based: FxHashMap<Value, (Gpr, i64)>,
    /// The stores to such addresses, in order.
    stores: FxHashMap<(Gpr, i64, Ty), Vec<usize>>,
}

/// What may be assumed of the state from which a dispatch follows.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    /// The registers that are the same at each passage of the head: bit n is register n.
    pub stable: u16,
    /// The greens of the head.
    pub greens: &'a [Green],
    /// The positions in the interpreted program.
    pub positions: &'a FxHashSet<Value>,
}

impl Given<'_> {
    /// May what is at this place be assumed: the register's value at the head plus a constant? A word there
    /// that is no green is an object of the interpreted program, such as its stack's top, which may be another
    /// one the next time.
    fn may_assume(&self, (base, disp): (Gpr, i64), ty: Ty) -> bool {
        let is_green = || self.greens.contains(&Green::Slot(base, disp, ty));
        self.stable & 1 << base.number() != 0 && (ty != Ty::I64 || is_green())
    }
}

impl<'v> Definitions<'v> {
    /// For instructions that start with these values in these locations.
    pub fn new(insts: &'v [Inst], params: impl Iterator<Item = (Value, Loc)>) -> Self {
        let at = insts
            .iter()
            .enumerate()
            .flat_map(|(i, inst)| inst.defs.iter().map(move |d| (*d, i)))
            .collect();
        let (based, stores) = (FxHashMap::default(), FxHashMap::default());
        let mut defs = Definitions { insts, at, params: params.collect(), based, stores };
        let registers = defs.params.iter().filter_map(|(v, loc)| match loc {
            Loc::Gpr(g) => Some((*v, (*g, 0))),
            _ => None,
        });
        defs.based = registers.collect();
        for (n, inst) in insts.iter().enumerate() {
            if let Some(based) = defs.sum(inst) {
                defs.based.extend(inst.def().map(|v| (v, based)));
            }
            if inst.op == Op::Store
                && let Some((g, disp)) = inst.mem.and_then(|mem| defs.slot(inst, &mem))
            {
                defs.stores.entry((g, disp, inst.ty)).or_default().push(n);
            }
        }
        defs
    }

    /// What the instruction adds to a register's value at the start, if that is a constant.
    fn sum(&self, inst: &Inst) -> Option<(Gpr, i64)> {
        if !matches!(inst.op, Op::Add | Op::Sub) || inst.ty != Ty::I64 {
            return None;
        }
        let c = inst.args[1].as_const()? as i64;
        let (g, d) = self.based(inst.args[0])?;
        Some((g, if inst.op == Op::Add { d.wrapping_add(c) } else { d.wrapping_sub(c) }))
    }

    /// The instruction that defines a value.
    pub fn inst(&self, v: Value) -> Option<&'v Inst> {
        self.at.get(&v).map(|i| &self.insts[*i])
    }

    /// The location of a value that exists at the start.
    pub fn param(&self, v: Value) -> Option<Loc> {
        self.params.get(&v).copied()
    }

    /// An operand that is a register's value at the start plus a constant.
    fn based(&self, operand: Operand) -> Option<(Gpr, i64)> {
        self.based.get(&operand.as_value()?).copied()
    }

    /// The address of a load, if it is a register's value at the start plus a constant.
    pub fn slot(&self, inst: &Inst, mem: &Mem) -> Option<(Gpr, i64)> {
        let index = inst.args[1].as_const()?;
        if mem.seg.is_some() {
            return None;
        }
        let (g, d) = self.based(inst.args[0])?;
        Some((
            g,
            d.wrapping_add(mem.disp).wrapping_add(index.wrapping_mul(u64::from(mem.scale)) as i64),
        ))
    }

    /// Is this value one of the `positions`, loaded from a field of an object that is none?
    pub fn is_loaded_position(&self, v: Value, positions: &FxHashSet<Value>) -> bool {
        self.inst(v).is_some_and(|inst| {
            inst.op == Op::Load
                && inst.ty == Ty::I64
                && positions.contains(&v)
                && inst.args[1].as_const().is_some()
                && self.root(inst.args[0]).is_none_or(|from| !positions.contains(&from))
        })
    }

    /// The value to which constants were added.
    pub fn root(&self, operand: Operand) -> Option<Value> {
        let mut v = operand.as_value()?;
        while let Some(inst) = self.inst(v)
            && matches!(inst.op, Op::Add | Op::Sub)
            && inst.ty == Ty::I64
            && inst.args[1].as_const().is_some()
        {
            v = inst.args[0].as_value()?;
        }
        Some(v)
    }

    /// What the path has stored last where this load reads, if both addresses are the same register's value at
    /// the start plus the same constant; for example a register that a handler saves on the stack. It is not
    /// looked at whether a store between them may have changed it.
    pub fn stored_before(&self, load: Value) -> Option<Operand> {
        let at = *self.at.get(&load)?;
        let (g, disp) = self.slot(&self.insts[at], &self.insts[at].mem?)?;
        let stores = self.stores.get(&(g, disp, self.insts[at].ty))?;
        let before = stores.partition_point(|store| *store < at).checked_sub(1)?;
        Some(self.insts[stores[before]].args[2])
    }

    /// Does `operand` follow from constants if the values in `assumed` are assumed, and no others?
    /// Visits at most `budget` values, which it counts down.
    pub fn is_known(
        &self,
        operand: Operand,
        assumed: &FxHashSet<Value>,
        budget: &mut usize,
    ) -> bool {
        let Operand::Value(v) = operand else { return true };
        if assumed.contains(&v) {
            return true;
        }
        if *budget == 0 {
            return false;
        }
        *budget -= 1;
        self.inst(v)
            .filter(|i| i.op.is_pure())
            .is_some_and(|i| i.args.iter().all(|a| self.is_known(*a, assumed, budget)))
    }

    /// Does `operand` follow from constants if the values in `found` are assumed? Adds to `found` the loads and
    /// conditions that must be assumed too. Visits at most `budget` values, which it counts down.
    pub fn follows(
        &self,
        operand: Operand,
        given: Given<'_>,
        found: &mut FxHashSet<Value>,
        budget: &mut usize,
    ) -> bool {
        let Operand::Value(v) = operand else { return true };
        if found.contains(&v) {
            return true;
        }
        if *budget == 0 {
            return false;
        }
        *budget -= 1;
        let Some(inst) = self.inst(v).filter(|i| i.op == Op::Load || i.op.is_pure()) else {
            return false;
        };
        match (inst.op, inst.mem) {
            (Op::Load, Some(mem)) => {
                let known = match (self.stored_before(v), self.slot(inst, &mem)) {
                    (Some(stored), _) => self.follows(stored, given, found, budget),
                    (None, Some(slot)) if given.may_assume(slot, inst.ty) => true,
                    _ => {
                        mem.seg.is_none()
                            && (self.is_loaded_position(v, given.positions)
                                || inst.args.iter().all(|a| self.follows(*a, given, found, budget)))
                    }
                };
                if known {
                    found.insert(v);
                }
                known
            }
            (Op::Select, _) => {
                // If the condition does not follow from constants, the condition itself is assumed.
                // Both choices must follow.
                let mut with_condition = found.clone();
                if !self.follows(inst.args[0], given, &mut with_condition, budget) {
                    with_condition.clone_from(found);
                    with_condition.extend(inst.args[0].as_value());
                }
                *found = with_condition;
                inst.args[1..].iter().all(|a| self.follows(*a, given, found, budget))
            }
            _ => inst.args.iter().all(|a| self.follows(*a, given, found, budget)),
        }
    }
}
