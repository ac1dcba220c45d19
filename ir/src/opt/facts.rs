//! A data-flow analysis of constants, ranges and bits: for every point of a version, what is known
//! of every value there (sourir 4.1, 6.1).
//!
//! Speculative constant propagation is constant propagation in which an `assume` contributes facts.
//! The analysis is forward, over any control flow, and optimistic (Wegman and Zadeck, conditional
//! constants): a block counts as unreachable until an edge that may be taken leads to it. The state
//! at a point ([`Env`]) maps each value that has been computed to a [`Known`]. Where paths meet the
//! sets are joined. In a loop whose ranges keep growing they are widened.
//!
//! `assume p` and the edges of `branch p` refine the state: `p` is 1 (or 0). What this implies for
//! the operands of a comparison, a masked bit, an extension or an added constant is carried to
//! them. What it implies for values computed earlier is found on demand, by evaluating their
//! definitions again. Their operands are still those of the definition, because a definition
//! dominates every point where it is available.
//!
//! [`Facts`] borrows the version and owns one state for each block; passes `constants` and
//! `redundant` build it for one run. No lock.
//!
//! ```text
//! v2 = and.i64 v1, 7; assume lt.u.i64 v2, 1 else a0  then v2 is 0, as are the low bits of v1
//! ```

use super::bounds::Bounds;
use super::known::Known;
use crate::defs::{Defs, Expr};
use crate::op::{ArgTy, Cond, FlagOp, Op};
use crate::reach::{Cfg, Point};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{AnchorId, BlockId, Loc, Operand, Ty, Value};
use crate::version::{Context, Fact, Inst, Term, Version};
use smallvec::SmallVec;

/// Definitions followed when a value is looked up (guess: deeper ones seldom add a fact, and each
/// level costs time).
const MAX_DEPTH: u32 = 4;
/// Visits of a block after which growing ranges are widened to everything (guess; higher finds more
/// ranges and costs time). Bits need no widening: they can be lost only 64 times.
const PATIENCE: u32 = 6;

/// The state at a point.
#[derive(Clone)]
pub(super) struct Env {
    /// By value; `None` for one that is not computed on every way there.
    known: Vec<Option<Known>>,
    /// What [`Env::set`] has replaced since [`Env::mark`], oldest first.
    replaced: Vec<(Value, Option<Known>)>,
    is_marked: bool,
}

impl Env {
    fn new(values: usize) -> Env {
        Env { known: vec![None; values], replaced: Vec::new(), is_marked: false }
    }

    fn get(&self, v: Value) -> Option<Known> {
        self.known[v.index()]
    }

    fn set(&mut self, v: Value, known: Option<Known>) {
        let old = std::mem::replace(&mut self.known[v.index()], known);
        if self.is_marked {
            self.replaced.push((v, old));
        }
    }

    /// From here on, what is replaced is noted.
    fn mark(&mut self) {
        self.is_marked = true;
    }

    /// As at the last [`Env::mark`].
    fn restore(&mut self) {
        while let Some((v, old)) = self.replaced.pop() {
            self.known[v.index()] = old;
        }
        self.is_marked = false;
    }
}

/// The analysis of a version.
pub(super) struct Facts<'v> {
    version: &'v Version,
    defs: Defs,
    /// At the start of each block, its parameters included; `None` if control cannot come there.
    at_start: Vec<Option<Env>>,
}

impl<'v> Facts<'v> {
    /// Analyses `version`.
    pub(super) fn new(version: &'v Version, cfg: &Cfg) -> Facts<'v> {
        let at_start = vec![None; version.blocks.len()];
        let mut facts = Facts { version, defs: Defs::of(version), at_start };
        facts.solve(cfg);
        facts
    }

    /// Calls `f` with each point of a reachable block, terminator included, and with the state
    /// there.
    pub(super) fn walk(&self, block: BlockId, mut f: impl FnMut(Point, &Env)) {
        let Some(mut env) = self.at_start[block.index()].clone() else { return };
        let body = &self.version.blocks[block.index()];
        for (i, inst) in body.insts.iter().enumerate() {
            f(Point { block, inst: i }, &env);
            if !self.apply(&mut env, inst) {
                return;
            }
        }
        f(Point { block, inst: body.insts.len() }, &env);
    }

    /// Calls `f` for each guard and safe point of a reachable block, and for its end if it leaves the
    /// version, with the anchor and the state in which control leaves there: what a guard checks does
    /// not hold.
    pub(super) fn walk_exits(&self, block: BlockId, mut f: impl FnMut(AnchorId, &Env)) {
        let Some(mut env) = self.at_start[block.index()].clone() else { return };
        let body = &self.version.blocks[block.index()];
        for inst in &body.insts {
            match (inst.op, inst.anchor) {
                (Op::Assume, Some(anchor)) => {
                    env.mark();
                    if self.refine(&mut env, inst.args[0], false) {
                        f(anchor, &env);
                    }
                    env.restore();
                }
                (Op::Poll, Some(anchor)) => f(anchor, &env),
                _ => {}
            }
            if !self.apply(&mut env, inst) {
                return;
            }
        }
        if let Term::Exit(anchor) = body.term {
            f(anchor, &env);
        }
    }

    /// The state behind the first `count` instructions of the entry block, if control comes there.
    pub(super) fn behind_entry(&self, count: usize) -> Option<Env> {
        let mut env = self.at_start[0].clone()?;
        let insts = &self.version.blocks.first()?.insts[..count];
        insts.iter().all(|inst| self.apply(&mut env, inst)).then_some(env)
    }

    /// Do these facts imply all that the first `count` instructions of the entry block check?
    pub(super) fn passes_entry(&self, count: usize, context: &Context) -> bool {
        let mut env = self.entered_with(context);
        self.version.blocks[0].insts[..count].iter().all(|inst| {
            let holds = inst.op != Op::Assume || self.constant(&env, inst.args[0]) == Some(1);
            holds && self.apply(&mut env, inst)
        })
    }

    /// What is known of a 64-bit operand in `env`, at little cost: only its own definition is
    /// evaluated again.
    pub(super) fn known_shallow(&self, env: &Env, o: Operand) -> Known {
        match o {
            Operand::Const(c) => Known::constant(c, Ty::I64),
            Operand::Value(v) => self.value(env, v, 1),
        }
    }

    /// What is known of an operand of type `ty` in `env`.
    pub(super) fn known(&self, env: &Env, o: Operand, ty: Ty) -> Known {
        match o {
            Operand::Const(c) => Known::constant(c, ty),
            Operand::Value(v) => self.value(env, v, MAX_DEPTH),
        }
    }

    /// The constant that an operand is known to be.
    pub(super) fn constant(&self, env: &Env, o: Operand) -> Option<u64> {
        match o {
            Operand::Const(c) => Some(c),
            Operand::Value(v) => match self.version.ty(v) {
                Ty::Flags | Ty::V128 | Ty::V256 | Ty::V512 => None,
                _ => self.value(env, v, MAX_DEPTH).single(),
            },
        }
    }

    fn value(&self, env: &Env, v: Value, depth: u32) -> Known {
        let ty = self.version.ty(v);
        let noted = env.get(v).unwrap_or(Known::all(ty));
        match self.defs.get(v.into()) {
            Some(expr) if depth > 0 && noted.single().is_none() => {
                let again = self.expr(env, &expr, ty, depth - 1);
                let both = noted.meet(&again, ty);
                if both.is_empty() { noted } else { both }
            }
            _ => noted,
        }
    }

    fn expr(&self, env: &Env, expr: &Expr, result: Ty, depth: u32) -> Known {
        if let Some(comparison) = self.comparison(expr) {
            return self.expr(env, &comparison, result, depth);
        }
        let signature = expr.op.signature().0;
        let mut args: SmallVec<[Known; 3]> = SmallVec::new();
        let mut types: SmallVec<[Ty; 3]> = SmallVec::new();
        for (operand, arg) in expr.operands().iter().zip(signature) {
            let ty = match (*operand, arg) {
                (Operand::Value(v), _) => self.version.ty(v),
                (_, ArgTy::Same) => expr.ty,
                (_, ArgTy::Is(ty)) => *ty,
            };
            types.push(ty);
            args.push(match *operand {
                Operand::Const(c) => Known::constant(c, ty),
                Operand::Value(v) => self.value(env, v, depth),
            });
        }
        Known::of(expr.op, expr.ty, result, &args, &types)
    }

    /// The comparison that a condition of flags stands for (Intel SDM vol. 1, appendix B).
    fn comparison(&self, expr: &Expr) -> Option<Expr> {
        let Op::Cond(cc) = expr.op else { return None };
        let Expr { op: Op::Flags(flags), ty, args: [a, b, _] } = self.defs.get(expr.args[0])?
        else {
            return None;
        };
        let (a, b) = match flags {
            FlagOp::Sub => (a, b),
            // `test x, x` compares with 0, except that it never sets CF.
            FlagOp::And if a == b && !matches!(cc, Cond::B | Cond::Ae | Cond::Be | Cond::A) => {
                (a, Operand::Const(0))
            }
            _ => return None,
        };
        let (op, args) = match cc {
            Cond::E => (Op::Eq, [a, b]),
            Cond::Ne => (Op::Ne, [a, b]),
            Cond::B => (Op::LtU, [a, b]),
            Cond::Ae => (Op::LeU, [b, a]),
            Cond::Be => (Op::LeU, [a, b]),
            Cond::A => (Op::LtU, [b, a]),
            Cond::L => (Op::LtS, [a, b]),
            Cond::Ge => (Op::LeS, [b, a]),
            Cond::Le => (Op::LeS, [a, b]),
            Cond::G => (Op::LtS, [b, a]),
            Cond::S | Cond::Ns | Cond::O | Cond::No | Cond::P | Cond::Np => return None,
        };
        Some(Expr::new(op, ty, &args))
    }

    // The data-flow.

    /// The state at the entry if these facts hold.
    fn entered_with(&self, context: &Context) -> Env {
        let version = self.version;
        let mut env = Env::new(version.types.len());
        for (loc, v) in version.entry_locs.iter().zip(&version.blocks[0].params) {
            let ty = version.ty(*v);
            let mut known = Known::all(ty);
            for fact in &context.facts {
                known = match *fact {
                    Fact::RegEquals(gpr, value) if *loc == Loc::Gpr(gpr) => {
                        Known::constant(value, ty)
                    }
                    Fact::RegInRange { gpr, min, max } if *loc == Loc::Gpr(gpr) => known
                        .within(Bounds { umin: min, umax: max, ..Bounds::all(ty) }.agree(ty), ty),
                    Fact::RegBits { gpr, mask, value } if *loc == Loc::Gpr(gpr) => {
                        known.with_bits(mask & !value, value, ty)
                    }
                    _ => known,
                };
            }
            env.set(*v, Some(known));
        }
        env
    }

    fn solve(&mut self, cfg: &Cfg) {
        let version = self.version;
        if version.blocks.is_empty() {
            return;
        }
        self.at_start[0] = Some(self.entered_with(&version.context));
        let mut visits = vec![0; version.blocks.len()];
        let mut dirty = vec![false; version.blocks.len()];
        dirty[0] = true;
        while dirty.contains(&true) {
            for block in &cfg.order {
                if std::mem::replace(&mut dirty[block.index()], false) {
                    visits[block.index()] += 1;
                    self.flow(*block, &visits, &mut dirty);
                }
            }
        }
    }

    /// Carries the state through a block and along its edges.
    fn flow(&mut self, block: BlockId, visits: &[u32], dirty: &mut [bool]) {
        let Some(mut env) = self.at_start[block.index()].clone() else { return };
        let version = self.version;
        let body = &version.blocks[block.index()];
        if !body.insts.iter().all(|inst| self.apply(&mut env, inst)) {
            return;
        }
        for (k, (to, args)) in body.term.edges().enumerate() {
            let Some(along) = self.along(&env, &body.term, k) else { continue };
            let params = &version.blocks[to.index()].params;
            let passed: Vec<Known> = params
                .iter()
                .zip(args)
                .map(|(p, a)| self.known(&along, *a, version.ty(*p)))
                .collect();
            let mut next = along;
            params.iter().zip(passed).for_each(|(p, known)| next.set(*p, Some(known)));
            dirty[to.index()] |= self.join(to, next, visits[to.index()] > PATIENCE);
        }
    }

    /// The state along the k-th edge of a terminator; `None` if it is never taken.
    fn along(&self, env: &Env, term: &Term, k: usize) -> Option<Env> {
        let Term::Branch { cond, .. } = term else { return Some(env.clone()) };
        let truth = k == 0;
        if self.constant(env, *cond).is_some_and(|c| (c != 0) != truth) {
            return None;
        }
        let mut env = env.clone();
        self.refine(&mut env, *cond, truth).then_some(env)
    }

    /// Joins a state into the state at a block's start. Returns whether that has changed.
    fn join(&mut self, block: BlockId, mut next: Env, widen: bool) -> bool {
        let slot = &mut self.at_start[block.index()];
        let Some(old) = slot else {
            *slot = Some(next);
            return true;
        };
        for (i, (new, old)) in next.known.iter_mut().zip(&old.known).enumerate() {
            *new = match (*new, old) {
                (Some(a), Some(b)) => {
                    let joined =
                        if holds(SideCondition::FactsJoin, a == *b) { *b } else { a.join(b) };
                    Some(if widen && joined != *b {
                        joined.widened(self.version.types[i])
                    } else {
                        joined
                    })
                }
                // Computed on one path only: any use is preceded by another computation.
                _ => None,
            };
        }
        let changed = next.known != old.known;
        *slot = Some(next);
        changed
    }

    /// Applies an instruction to the state; false if control never passes it.
    fn apply(&self, env: &mut Env, inst: &Inst) -> bool {
        if inst.op == Op::Assume {
            return self.constant(env, inst.args[0]) != Some(0)
                && self.refine(env, inst.args[0], true);
        }
        for def in &inst.defs {
            let ty = self.version.ty(*def);
            // A fact about the value of an earlier iteration does not hold of the new one.
            env.set(*def, None);
            let known = match Expr::of(inst) {
                Some(expr) => self.expr(env, &expr, ty, 0),
                None => Known::all(ty),
            };
            env.set(*def, Some(known));
        }
        true
    }

    /// Notes that the i1 `predicate` is `truth`; false if that is impossible.
    fn refine(&self, env: &mut Env, predicate: Operand, truth: bool) -> bool {
        let Operand::Value(p) = predicate else {
            return predicate == Operand::Const(u64::from(truth));
        };
        if !self.narrow(env, p, Known::constant(u64::from(truth), Ty::I1), MAX_DEPTH) {
            return false;
        }
        let Some(expr) = self.defs.get(predicate) else { return true };
        let expr = self.comparison(&expr).unwrap_or(expr);
        let [a, b, _] = expr.args;
        match (expr.op, truth) {
            (Op::Not, _) if expr.ty == Ty::I1 => self.refine(env, a, !truth),
            (Op::And, true) | (Op::Or, false) => {
                self.refine(env, a, truth) && self.refine(env, b, truth)
            }
            (Op::Eq, true) | (Op::Ne, false) => self.equal(env, expr.ty, a, b),
            (Op::Eq, false) | (Op::Ne, true) => {
                self.unequal(env, expr.ty, a, b) && self.unequal(env, expr.ty, b, a)
            }
            (Op::LtS | Op::LtU | Op::LeS | Op::LeU, true) => {
                self.ordered(env, expr.op, expr.ty, a, b)
            }
            (Op::LtS, false) => self.ordered(env, Op::LeS, expr.ty, b, a),
            (Op::LtU, false) => self.ordered(env, Op::LeU, expr.ty, b, a),
            (Op::LeS, false) => self.ordered(env, Op::LtS, expr.ty, b, a),
            (Op::LeU, false) => self.ordered(env, Op::LtU, expr.ty, b, a),
            _ => true,
        }
    }

    fn equal(&self, env: &mut Env, ty: Ty, a: Operand, b: Operand) -> bool {
        if ty == Ty::Flags {
            return true;
        }
        let both = self.known(env, a, ty).meet(&self.known(env, b, ty), ty);
        self.narrow_operand(env, a, both) && self.narrow_operand(env, b, both)
    }

    fn unequal(&self, env: &mut Env, ty: Ty, a: Operand, b: Operand) -> bool {
        let (Operand::Value(_), Some(c)) = (a, self.constant(env, b)) else { return true };
        let known = self.known(env, a, ty);
        if known.single() == Some(c) {
            return false;
        }
        let bounds = known.bounds.exclude(c, ty);
        self.narrow_operand(env, a, known.within(bounds, ty))
    }

    fn ordered(&self, env: &mut Env, op: Op, ty: Ty, a: Operand, b: Operand) -> bool {
        let (left, right) = (self.known(env, a, ty), self.known(env, b, ty));
        let (x, y) = (left.bounds, right.bounds);
        // The largest right value bounds the left from above, and the smallest left value bounds
        // the right from below.
        let signed = matches!(op, Op::LtS | Op::LeS);
        let (top, bottom) = if signed {
            (y.smax as u64 & ty.mask(), x.smin as u64 & ty.mask())
        } else {
            (y.umax, x.umin)
        };
        let (below, above) = (x.below(op, top, ty), y.above(op, bottom, ty));
        self.narrow_operand(env, a, left.within(below, ty))
            && self.narrow_operand(env, b, right.within(above, ty))
    }

    fn narrow_operand(&self, env: &mut Env, o: Operand, known: Known) -> bool {
        match o {
            Operand::Value(v) => self.narrow(env, v, known, MAX_DEPTH),
            Operand::Const(_) => !known.is_empty(),
        }
    }

    /// Notes that a value lies in this set too, and what this implies for its operands; false if no
    /// value does.
    fn narrow(&self, env: &mut Env, v: Value, known: Known, depth: u32) -> bool {
        let ty = self.version.ty(v);
        let met = self.value(env, v, MAX_DEPTH).meet(&known, ty);
        if met.is_empty() {
            return false;
        }
        env.set(v, Some(met));
        let Some(expr) = self.defs.get(v.into()).filter(|_| depth > 0) else { return true };
        let (Operand::Value(x), b) = (expr.args[0], expr.args[1]) else { return true };
        let from = self.version.ty(x);
        let deeper = match (expr.op, b) {
            (Op::And, Operand::Const(mask)) => {
                Known::all(from).with_bits(met.zeros & mask & from.mask(), met.ones & mask, from)
            }
            (Op::Zext(_), _) => {
                let bits = Known::all(from).with_bits(
                    met.zeros & from.mask(),
                    met.ones & from.mask(),
                    from,
                );
                bits.within(
                    Bounds {
                        umin: met.bounds.umin,
                        umax: met.bounds.umax.min(from.mask()),
                        ..Bounds::all(from)
                    }
                    .agree(from),
                    from,
                )
            }
            (Op::Sext(_) | Op::Trunc, _) => {
                let mask = from.mask() & ty.mask();
                Known::all(from).with_bits(met.zeros & mask, met.ones & mask, from)
            }
            (Op::Add, Operand::Const(c)) => match met.single() {
                Some(r) => Known::constant(r.wrapping_sub(c) & ty.mask(), ty),
                None => return true,
            },
            (Op::Xor, Operand::Const(c)) => {
                let (zeros, ones) = (met.zeros & !c | met.ones & c, met.ones & !c | met.zeros & c);
                Known::all(ty).with_bits(zeros & ty.mask(), ones & ty.mask(), ty)
            }
            _ => return true,
        };
        self.narrow(env, x, deeper, depth - 1)
    }
}
