//! Pass `simplify`: simplification and global value numbering in one forward walk, with facts from
//! passed guards.
//!
//! For each instruction the walk replaces the operands by what they are known to be, applies the
//! rules of [`super::rules`], [`super::conditions`] and [`super::address`] until none fits, and
//! looks the result up among the expressions already computed. It visits the blocks in dominance
//! order (see [`super::shape`]), so every value that it has seen is available. In a loop with several
//! paths, what it knows holds in the descendants of a block only ([`super::tree`]).
//!
//! A passed guard is a fact from there on. After `assume p` the value `p` is 1 and its negation 0;
//! after `assume eq v, 7` every later use of `v` is 7. So speculative constant propagation and the
//! removal of redundant guards are the same step. A fact also holds in the varmap of an anchor
//! whose *first* use lies after the guard, because the first use dominates the others. The condition of a
//! branch is such a fact in the one child, and its opposite in the other. Facts are
//! kept apart from equivalences (`replaced`), which hold everywhere and are applied to all anchors.
//!
//! ```text
//! assume eq.i64 v1, 7 else a0                 assume eq.i64 v1, 7 else a0
//! v2 = add.i64 v1, 1                          v4 = mul.i64 v0, 8
//! v4 = mul.i64 v0, v2
//! ```
//!
//! Parameters of the loop block are opaque: the walk does not look at their arguments.
//! [`Numbering`] owns the tables of one walk; the caller owns the version, no lock.

use super::OptOptions;
use super::bounds::Bounds;
use super::shape::{ENTRY, normalise};
use super::tree::Saved;
use super::{address, rules};
use crate::defs::{Defs, Expr};
use crate::op::{Op, ResultTy};
use crate::semantics;
use crate::side_conditions::{SideCondition, holds};
use crate::types::{AnchorId, Loc, Operand, Ty, Value};
use crate::version::{Anchor, Fact, Inst, Term, Version};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// The answer of a rule about an expression.
pub(super) enum Rewrite {
    /// It equals this operand.
    Done(Operand),
    /// It equals this other expression.
    Again(Expr),
    /// No rule fits.
    Keep,
}

/// Most rules applied to one expression (guess). Each application makes it simpler; the bound stops
/// a cycle of rules.
const MAX_REWRITES: usize = 12;

/// What is known from here on.
#[derive(Clone, Default)]
struct Knowledge {
    /// Value -> the constant it is known to be.
    facts: Vec<Option<u64>>,
    /// Value -> the range it is known to lie in.
    ranges: FxHashMap<Value, Bounds>,
    /// Parameter of the entry -> some of its bits, and what they are.
    bits: FxHashMap<Value, (u64, u64)>,
    /// Expression -> the operand that holds it.
    known: FxHashMap<Expr, Operand>,
}

/// The state of the walk.
pub(super) struct Numbering<'v> {
    pub version: &'v mut Version,
    defs: Defs,
    /// Value -> its replacement, everywhere.
    replaced: Vec<Option<Operand>>,
    here: Knowledge,
    out: Vec<Inst>,
    anchor_seen: Vec<bool>,
    /// The block being walked.
    block: usize,
    changes: usize,
}

/// Runs the pass; returns the number of instructions changed or removed.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if normalise(version).is_none() {
        return 0;
    }
    let values = version.types.len();
    let mut numbering = Numbering {
        defs: Defs::empty(version),
        replaced: vec![None; values],
        here: Knowledge { facts: vec![None; values], ..Knowledge::default() },
        out: Vec::new(),
        anchor_seen: vec![false; version.anchors.len()],
        block: 0,
        changes: 0,
        version,
    };
    numbering.learn_context();
    let count = numbering.version.blocks.len();
    let mut saved = Saved::new(numbering.version);
    // An `assume 0`, and a branch on a constant, make blocks unreachable.
    let mut reached = vec![false; count];
    reached[ENTRY] = true;
    for block in 0..count {
        if let Some((knowledge, cond)) = saved.enter(block) {
            numbering.here = knowledge;
            numbering.learn_false(cond);
        }
        if !reached[block] {
            continue;
        }
        numbering.walk(block);
        let Numbering { version, here, .. } = &numbering;
        version.blocks[block].term.edges().for_each(|(to, _)| reached[to.index()] = true);
        if let Term::Branch { cond, .. } = version.blocks[block].term {
            saved.leave(version, block, || (here.clone(), cond));
            numbering.learn(cond);
        }
    }
    numbering.apply_equivalences();
    let changes = numbering.changes;
    if reached.contains(&false) {
        normalise(version);
    }
    changes
}

impl Numbering<'_> {
    /// The replacement or constant that `o` is known to be here.
    pub(super) fn known(&self, o: Operand) -> Operand {
        let Operand::Value(v) = o else { return o };
        let o = self.replaced.get(v.index()).copied().flatten().unwrap_or(o);
        let Operand::Value(v) = o else { return o };
        if let Some(c) = self.here.facts.get(v.index()).copied().flatten() {
            return Operand::Const(c);
        }
        o
    }

    /// The definition of `o`, with the known replacements of its operands.
    pub(super) fn def(&self, o: Operand) -> Option<Expr> {
        let mut expr = self.defs.get(o)?;
        let arity = expr.arity();
        expr.args[..arity].iter_mut().for_each(|a| *a = self.known(*a));
        Some(expr)
    }

    /// The type of an operand that is a value.
    pub(super) fn ty(&self, v: Value) -> Ty {
        self.version.ty(v)
    }

    /// The range facts about a value.
    pub(super) fn range(&self, v: Value) -> Option<Bounds> {
        self.here.ranges.get(&v).copied()
    }

    /// What the bits of `mask` are in a parameter of the entry, or in the low part of one, if the
    /// context says it.
    pub(super) fn bits(&self, o: Operand, mask: u64) -> Option<u64> {
        let whole = match self.def(o) {
            Some(Expr { op: Op::Trunc, args: [x, ..], .. }) => x,
            _ => o,
        };
        let Operand::Value(v) = whole else { return None };
        let (known, value) = self.here.bits.get(&v)?;
        (mask & !known == 0).then_some(value & mask)
    }

    /// Notes what the context says of the entry's parameters.
    fn learn_context(&mut self) {
        let version = &*self.version;
        let Knowledge { ranges, bits, .. } = &mut self.here;
        for (loc, v) in version.entry_locs.iter().zip(&version.blocks[ENTRY].params) {
            for fact in &version.context.facts {
                match *fact {
                    Fact::RegInRange { gpr, min, max } if *loc == Loc::Gpr(gpr) => {
                        let range = Bounds { umin: min, umax: max, ..Bounds::all(Ty::I64) };
                        ranges.insert(*v, range.agree(Ty::I64));
                    }
                    Fact::RegBits { gpr, mask, value } if *loc == Loc::Gpr(gpr) => {
                        bits.insert(*v, (mask, value));
                    }
                    _ => {}
                }
            }
        }
    }

    /// The operand that already holds this expression, if there is one. No rules are applied.
    pub(super) fn computed(&self, op: Op, ty: Ty, args: &[Operand]) -> Option<Operand> {
        self.here.known.get(&canonical(Expr::new(op, ty, args))).map(|o| self.known(*o))
    }

    /// The operand that holds this expression, computing it here if it is new.
    pub(super) fn build(&mut self, op: Op, ty: Ty, args: &[Operand]) -> Operand {
        self.number(Expr::new(op, ty, args), None)
    }

    fn number(&mut self, expr: Expr, name: Option<Value>) -> Operand {
        let mut expr = expr;
        for _ in 0..MAX_REWRITES {
            if let Some(c) = fold(&expr) {
                return Operand::Const(c);
            }
            expr = canonical(expr);
            match rules::rewrite(self, &expr) {
                Rewrite::Done(o) => return self.known(o),
                Rewrite::Again(next) => expr = next,
                Rewrite::Keep => break,
            }
        }
        expr = canonical(expr);
        if let Some(o) = self.here.known.get(&expr) {
            return self.known(*o);
        }
        let result = match expr.op.signature().1 {
            ResultTy::Is(t) => t,
            ResultTy::Same | ResultTy::None => expr.ty,
        };
        let v = name.unwrap_or_else(|| self.version.value(result));
        self.out.push(Inst::new(expr.op, expr.ty, Some(v), expr.operands()));
        self.defs.set(v, expr);
        self.here.known.insert(expr, v.into());
        v.into()
    }

    /// Walks a block.
    fn walk(&mut self, block: usize) {
        self.block = block;
        let insts = std::mem::take(&mut self.version.blocks[block].insts);
        self.out = Vec::with_capacity(insts.len());
        for mut inst in insts {
            inst.args.iter_mut().for_each(|a| *a = self.known(*a));
            if let Some(anchor) = inst.anchor {
                self.see_anchor(anchor);
            }
            match Expr::of(&inst) {
                Some(expr) => self.pure(expr, &inst),
                None if inst.op == Op::Assume => {
                    if !self.assume(inst) {
                        self.version.blocks[block].insts = std::mem::take(&mut self.out);
                        return;
                    }
                }
                None => {
                    if let Some(mem) = &mut inst.mem
                        && let [base, index, ..] = &mut inst.args[..]
                        && address::fold(self, mem, base, index)
                    {
                        self.changes += 1;
                    }
                    self.out.push(inst);
                }
            }
        }
        let mut term = self.version.blocks[block].term.clone();
        Version::for_each_term_operand(&mut term, |o| *o = self.known(*o));
        match &mut term {
            Term::Exit(anchor) => self.see_anchor(*anchor),
            Term::Branch { cond: Operand::Const(c), then, otherwise } => {
                let taken = if *c == 0 { otherwise } else { then };
                term = Term::Jump { to: taken.to, args: std::mem::take(&mut taken.args) };
                self.changes += 1;
            }
            Term::Branch { .. } | Term::Jump { .. } | Term::Guest(_) => {}
        }
        self.version.blocks[block].term = term;
        self.version.blocks[block].insts = std::mem::take(&mut self.out);
    }

    fn pure(&mut self, expr: Expr, inst: &Inst) {
        let Some(def) = inst.def() else { return };
        let before = self.out.len();
        let o = self.number(expr, Some(def));
        let unchanged = o == Operand::Value(def)
            && self.out.len() == before + 1
            && self.out.last().is_some_and(|new| new.op == inst.op && new.args == inst.args);
        if !unchanged {
            self.changes += 1;
        }
        if o != Operand::Value(def) {
            self.replaced[def.index()] = Some(o);
        }
    }

    /// Keeps or removes a guard and learns from it; false if it always fails.
    fn assume(&mut self, mut inst: Inst) -> bool {
        loop {
            let predicate = inst.args[0];
            match predicate {
                Operand::Const(0) => {
                    let Some(anchor) = inst.anchor else { return true };
                    self.version.blocks[self.block].term = Term::Exit(anchor);
                    self.changes += 1;
                    return false;
                }
                Operand::Const(_) => {
                    self.changes += 1;
                    return true;
                }
                Operand::Value(_) => {}
            }
            // `assume and(p, q)` becomes two guards on one anchor; each can then be removed alone.
            if let Some(Expr { op: Op::And, ty: Ty::I1, args: [p, q, _] }) = self.def(predicate) {
                let mut first = inst.clone();
                first.args[0] = p;
                self.changes += 1;
                if !self.assume(first) {
                    return false;
                }
                inst.args[0] = self.known(q);
                continue;
            }
            self.out.push(inst);
            self.learn(predicate);
            return true;
        }
    }

    /// Notes what follows if `predicate` is false.
    fn learn_false(&mut self, predicate: Operand) {
        let Operand::Value(p) = predicate else { return };
        let expr = self.def(predicate);
        self.fact(p, 0);
        let Some(Expr { op, ty, args: [a, b, _] }) = expr else { return };
        let (op, args) = match op {
            Op::Eq => (Op::Ne, [a, b]),
            Op::Ne => (Op::Eq, [a, b]),
            Op::LtS => (Op::LeS, [b, a]),
            Op::LtU => (Op::LeU, [b, a]),
            Op::LeS => (Op::LtS, [b, a]),
            Op::LeU => (Op::LtU, [b, a]),
            Op::Cond(cc) => {
                let negated = Expr::new(Op::Cond(cc.negate()), Ty::I64, &[a]);
                self.here.known.insert(negated, Operand::Const(1));
                return;
            }
            Op::Not if ty == Ty::I1 => {
                if let Operand::Value(v) = a {
                    self.fact(v, 1);
                }
                return;
            }
            _ => return,
        };
        self.learn_comparison(Expr::new(op, ty, &args));
        let opposite = canonical(Expr::new(op, ty, &args));
        self.here.known.insert(opposite, Operand::Const(1));
    }

    /// Notes what follows if `predicate` is true.
    fn learn(&mut self, predicate: Operand) {
        let Operand::Value(p) = predicate else { return };
        let expr = self.def(predicate);
        self.fact(p, 1);
        if let Some(expr) = expr {
            self.learn_comparison(expr);
        }
    }

    /// Notes what follows if `expr` is true, besides that it is.
    fn learn_comparison(&mut self, expr: Expr) {
        let [a, b, _] = expr.args;
        let mut implied: SmallVec<[(Op, Operand, Operand, u64); 6]> = SmallVec::new();
        match expr.op {
            Op::Eq => {
                implied.push((Op::Ne, a, b, 0));
                if let (Operand::Value(v), Some(c)) = (a, b.as_const()) {
                    self.fact(v, c);
                }
            }
            Op::Ne => {
                implied.push((Op::Eq, a, b, 0));
                if let (Operand::Value(v), Some(c)) = (a, b.as_const()) {
                    self.narrow(v, expr.ty, |bounds| bounds.exclude(c, expr.ty));
                    if expr.ty == Ty::I1 {
                        self.fact(v, 1 - c);
                    }
                }
            }
            Op::LtS | Op::LtU => {
                let le = if expr.op == Op::LtS { Op::LeS } else { Op::LeU };
                implied.push((expr.op, b, a, 0));
                implied.push((le, a, b, 1));
                implied.push((le, b, a, 0));
                implied.push((Op::Eq, a, b, 0));
                implied.push((Op::Ne, a, b, 1));
            }
            Op::LeS => implied.push((Op::LtS, b, a, 0)),
            Op::LeU => implied.push((Op::LtU, b, a, 0)),
            Op::Cond(cc) => {
                let negated = Expr::new(Op::Cond(cc.negate()), Ty::I64, &[a]);
                self.here.known.insert(negated, Operand::Const(0));
            }
            Op::Not if expr.ty == Ty::I1 => {
                if let Operand::Value(v) = a {
                    self.fact(v, 0);
                }
            }
            _ => {}
        }
        for (op, a, b, truth) in implied {
            self.here
                .known
                .insert(canonical(Expr::new(op, expr.ty, &[a, b])), Operand::Const(truth));
        }
        self.learn_range(expr.op, expr.ty, a, b);
    }

    fn learn_range(&mut self, op: Op, ty: Ty, a: Operand, b: Operand) {
        if !matches!(op, Op::LtS | Op::LtU | Op::LeS | Op::LeU) {
            return;
        }
        match (a, b) {
            (Operand::Value(v), Operand::Const(c)) => {
                self.narrow(v, ty, |bounds| bounds.below(op, c, ty))
            }
            (Operand::Const(c), Operand::Value(v)) => {
                self.narrow(v, ty, |bounds| bounds.above(op, c, ty))
            }
            _ => {}
        }
    }

    fn narrow(&mut self, v: Value, ty: Ty, change: impl Fn(Bounds) -> Bounds) {
        let now = rules::bounds(self, v.into(), ty);
        let narrowed = change(now);
        if narrowed != now {
            self.here.ranges.insert(v, narrowed);
            if let Some(c) = narrowed.single() {
                self.fact(v, c);
            }
        }
    }

    fn fact(&mut self, v: Value, c: u64) {
        if v.index() >= self.here.facts.len() {
            self.here.facts.resize(v.index() + 1, None);
        }
        self.here.facts[v.index()] = Some(c);
    }

    /// Called at each use of an anchor. At the first use, what is known here holds at every use.
    fn see_anchor(&mut self, anchor: AnchorId) {
        let first = !std::mem::replace(&mut self.anchor_seen[anchor.index()], true);
        if !holds(SideCondition::SimplifyFirstUse, first) {
            return;
        }
        let placeholder = Anchor::new(Operand::Const(0), Vec::new());
        let mut body = std::mem::replace(&mut self.version.anchors[anchor.index()], placeholder);
        Version::for_each_anchor_operand(&mut body, |o| *o = self.known(*o));
        for store in &mut body.stores {
            let [base, index, _] = &mut store.args;
            address::fold(self, &mut store.mem, base, index);
        }
        self.version.anchors[anchor.index()] = body;
    }

    /// Applies the equivalences to anchors that the walk has not met.
    fn apply_equivalences(&mut self) {
        let Numbering { version, replaced, .. } = self;
        for anchor in &mut version.anchors {
            Version::for_each_anchor_operand(anchor, |o| *o = crate::version::rename(replaced, *o));
        }
    }
}

/// One of the equal ways to write an expression: constants last, values in order.
fn canonical(mut expr: Expr) -> Expr {
    if expr.op.is_commutative() && rank(expr.args[0]) > rank(expr.args[1]) {
        expr.args.swap(0, 1);
    }
    expr
}

fn rank(o: Operand) -> u64 {
    match o {
        Operand::Value(v) => u64::from(v.0),
        Operand::Const(_) => u64::MAX,
    }
}

/// The constant that an expression over constants equals. Flags stay instructions, because the
/// emitter and the evaluator execute them and a flags constant has no instruction to execute.
pub(super) fn fold(expr: &Expr) -> Option<u64> {
    if matches!(expr.op, Op::Flags(_)) {
        return None;
    }
    let mut consts: SmallVec<[u64; 3]> = SmallVec::new();
    for o in expr.operands() {
        consts.push(o.as_const()?);
    }
    Some(semantics::eval(expr.op, expr.ty, &consts))
}
