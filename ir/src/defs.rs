//! The pure definition of each value, as an expression that passes match on.
//!
//! [`Defs`] is a table from value to [`Expr`]; a value that a load, a native or a block parameter
//! defines has none. A pass builds the table from a version ([`Defs::of`]) and adds the
//! instructions that it makes ([`Defs::note`]). The table copies operands, so it does not follow
//! later replacements; a pass that replaces operands renames what it reads. No lock: the table
//! belongs to the pass.
//!
//! ```text
//! v2 = add.i64 v0, 8        Expr { op: Add, ty: I64, args: [v0, 8, 0] }        arity 2
//! ```

use crate::op::Op;
use crate::types::{Operand, Ty, Value};
use crate::version::{Inst, Version};

/// A pure operation with its operands; unused operands are `Const(0)`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Expr {
    pub op: Op,
    pub ty: Ty,
    pub args: [Operand; 3],
}

impl Expr {
    pub(crate) fn new(op: Op, ty: Ty, operands: &[Operand]) -> Expr {
        let mut args = [Operand::Const(0); 3];
        args[..operands.len()].copy_from_slice(operands);
        Expr { op, ty, args }
    }

    /// How many of `args` are used.
    pub(crate) fn arity(&self) -> usize {
        self.op.signature().0.len()
    }

    pub(crate) fn operands(&self) -> &[Operand] {
        &self.args[..self.arity()]
    }

    /// The expression of a pure instruction.
    pub(crate) fn of(inst: &Inst) -> Option<Expr> {
        (inst.op.is_pure() && inst.args.len() == inst.op.signature().0.len())
            .then(|| Expr::new(inst.op, inst.ty, &inst.args))
    }
}

/// The pure definition of each value, dense by value.
#[derive(Clone, Default)]
pub(crate) struct Defs(Vec<Option<Expr>>);

impl Defs {
    /// No definitions yet, room for the values of `version`.
    pub(crate) fn empty(version: &Version) -> Defs {
        Defs(vec![None; version.types.len()])
    }

    /// All definitions of `version`.
    pub(crate) fn of(version: &Version) -> Defs {
        let mut defs = Defs::empty(version);
        version.blocks.iter().flat_map(|b| &b.insts).for_each(|i| defs.note(i));
        defs
    }

    pub(crate) fn note(&mut self, inst: &Inst) {
        if let (Some(expr), Some(v)) = (Expr::of(inst), inst.def()) {
            self.set(v, expr);
        }
    }

    pub(crate) fn set(&mut self, v: Value, expr: Expr) {
        if v.index() >= self.0.len() {
            self.0.resize(v.index() + 1, None);
        }
        self.0[v.index()] = Some(expr);
    }

    pub(crate) fn get(&self, o: Operand) -> Option<Expr> {
        self.0.get(o.as_value()?.index()).copied().flatten()
    }
}
