//! Continuations: a version that starts at an anchor in the middle of another version (sourir 7.3,
//! hot-loop transfer).
//!
//! An anchor's varmap gives the guest's state in terms of the version's values. Read backwards it
//! gives the values in terms of a guest state. This makes a version of the region at the anchor's
//! target, which runs the same code from the anchor's position on.
//!
//! ```text
//! stuck     b0(v0 = rax, v1 = rbx): …; jump b1(v0)
//!           b1(v2): poll else a0                          a0 = base.0x1010 [rax = v2]
//!                   v3 = ne.i64 v1, 0; branch v3 then …
//!
//! from a0   b0(v4 = rax, v5 = rbx): jump b1(v4)           region 0x1010, its own entry
//!           b1(v2): poll else a0; v3 = ne.i64 v5, 0; branch v3 then …
//! ```
//!
//! A live value is found in one of three ways: as the content of a location that is mapped to it;
//! as the entry value of a location that the version never writes; or by repeating the pure
//! operations that compute it from such values. What else the varmap says is checked on entry by
//! guards that fall back to the state at entry: a location mapped to a constant must hold it, and
//! two locations mapped to one value must be equal.
//!
//! Side conditions:
//! * The version is *fresh*: no pass has used a fact that holds only because control came from the
//!   version's entry (facts of its context, guards before the anchor, results of loads). A state
//!   that enters in the middle need not satisfy such a fact. Passes that use one set
//!   [`Version::optimised`]. So continuations are made of fresh versions, and assumptions are
//!   injected afterwards.
//! * Of the old context only monitored facts are kept.
//! * The anchor defers no stores.
//!
//! No data between calls; the caller owns the versions, no lock.

use super::OptOptions;
use super::closed_form::close;
use super::speculation::Assumption;
use super::unreachable;
use crate::op::Op;
use crate::origin::{Origin, OriginKind, Origins};
use crate::reach::{Cfg, Def, Reach, definitions};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{AnchorId, BlockId, Loc, Operand, Ty, Value};
use crate::version::{Anchor, Block, Fact, Inst, Term, Version};
use rustc_hash::FxHashMap;

/// Why a version cannot be entered at an anchor.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ContinuationError {
    /// Nothing uses the anchor, or there is no such anchor.
    #[error("{0} is not in use")]
    NoAnchor(AnchorId),
    /// A pass has used facts that hold only on the way from the version's entry.
    #[error("{0} is optimised: only a fresh version can be entered in the middle")]
    Optimised(String),
    /// The anchor's target is not a constant.
    #[error("{0} leads to no fixed point")]
    NoRegion(AnchorId),
    /// The anchor defers stores.
    #[error("{0} defers stores")]
    Deferred(AnchorId),
    /// A value neither is in the guest's state nor can be computed from it.
    #[error("{0} is not in the guest's state")]
    NotInState(Value),
}

/// The version of region `anchor.target` that continues `version` at the position of `anchor`.
pub fn continuation(
    version: &Version,
    anchor: AnchorId,
    name: &str,
) -> Result<Version, ContinuationError> {
    continue_under(version, anchor, name, &[])
}

/// The same, under assumptions about `version`. Those whose values the guest's state determines are
/// checked on entry.
pub(super) fn continue_under(
    version: &Version,
    anchor: AnchorId,
    name: &str,
    assumptions: &[Assumption],
) -> Result<Version, ContinuationError> {
    if !holds(SideCondition::ContinuationFresh, !version.optimised) {
        return Err(ContinuationError::Optimised(version.name.clone()));
    }
    let cfg = Cfg::new(version);
    let point = Reach::new(version, &cfg).positions.get(anchor.index()).copied().flatten();
    let point = point.ok_or(ContinuationError::NoAnchor(anchor))?;
    let at = &version.anchors[anchor.index()];
    let Operand::Const(region) = at.target else { return Err(ContinuationError::NoRegion(anchor)) };
    if !at.stores.is_empty() {
        return Err(ContinuationError::Deferred(anchor));
    }
    let mut made = version.clone();
    (made.name, made.region) = (name.to_string(), region);
    made.context.facts.retain(|f| matches!(f, Fact::PrivateMemory | Fact::MemEquals { .. }));
    made.anchors.iter_mut().for_each(|a| a.via = None);
    // The position becomes the start of a block of its own. In closed form this block takes the
    // values that are live there as parameters.
    let middle = BlockId(made.blocks.len() as u32);
    let before = &mut made.blocks[point.block.index()];
    let insts = before.insts.split_off(point.inst);
    let term = std::mem::replace(&mut before.term, Term::Jump { to: middle, args: Vec::new() });
    made.blocks.push(Block { params: Vec::new(), insts, term });
    let needed = close(&mut made);

    // Nothing leads to the old entry any more; the new entry replaces it.
    let mut entry = EntryBuilder::new(version, at, &mut made);
    let args: Result<Vec<Operand>, ContinuationError> =
        needed[middle.index()].iter().map(|v| entry.operand(Operand::Value(*v))).collect();
    let args = args?;
    entry.check(region)?;
    entry.assume(region, assumptions);
    let EntryBuilder { params, insts, .. } = entry;
    made.entry_locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index).collect();
    made.blocks[0] = Block { params, insts, term: Term::Jump { to: middle, args } };
    unreachable::run(&mut made, &OptOptions::default());
    super::params::run(&mut made, &OptOptions::default());
    super::dce::run(&mut made, &OptOptions::default());
    Ok(made)
}

/// Builds the new entry: computes values of the old version from the guest's state.
struct EntryBuilder<'a> {
    old: &'a Version,
    defs: Vec<Option<Def>>,
    at: &'a Anchor,
    made: &'a mut Version,
    /// One parameter for each SSA location, by its index.
    params: Vec<Value>,
    insts: Vec<Inst>,
    known: FxHashMap<Value, Operand>,
}

impl<'a> EntryBuilder<'a> {
    fn new(old: &'a Version, at: &'a Anchor, made: &'a mut Version) -> EntryBuilder<'a> {
        let params: Vec<Value> =
            (0..Loc::SSA_COUNT).map(|i| made.value(Loc::from_ssa_index(i).ty())).collect();
        let mut entry = EntryBuilder {
            old,
            defs: definitions(old),
            at,
            made,
            params,
            insts: Vec::new(),
            known: FxHashMap::default(),
        };
        for (loc, operand) in &at.varmap {
            if let (Operand::Value(v), Some(param)) = (operand, entry.param(*loc)) {
                entry.known.entry(*v).or_insert(param);
            }
        }
        for (loc, v) in old.entry_locs.iter().zip(&old.blocks[0].params) {
            let in_place = !at.varmap.iter().any(|(l, _)| l == loc);
            if let Some(param) = entry.param(*loc).filter(|_| in_place) {
                entry.known.insert(*v, param);
            }
        }
        entry
    }

    fn param(&self, loc: Loc) -> Option<Operand> {
        Some(self.params[loc.ssa_index()?].into())
    }

    fn push(&mut self, op: Op, ty: Ty, result: Ty, args: &[Operand]) -> Operand {
        let v = self.made.value(result);
        self.insts.push(Inst::new(op, ty, Some(v), args));
        v.into()
    }

    /// An operand of the old version, computed from the guest's state.
    fn operand(&mut self, o: Operand) -> Result<Operand, ContinuationError> {
        let Operand::Value(v) = o else { return Ok(o) };
        if let Some(known) = self.known.get(&v) {
            return Ok(*known);
        }
        let inst = match self.defs[v.index()] {
            Some(Def::Inst(point)) => &self.old.blocks[point.block.index()].insts[point.inst],
            Some(Def::Param(..)) | None => return Err(ContinuationError::NotInState(v)),
        };
        if !inst.op.is_pure() {
            return Err(ContinuationError::NotInState(v));
        }
        let args: Result<Vec<Operand>, ContinuationError> =
            inst.args.iter().map(|a| self.operand(*a)).collect();
        let again = self.push(inst.op, inst.ty, self.old.ty(v), &args?);
        self.known.insert(v, again);
        Ok(again)
    }

    /// Adds a guard that falls back to the state at entry.
    fn guard(&mut self, region: u64, predicate: Operand) {
        let varmap =
            self.at.varmap.iter().filter_map(|(loc, _)| Some((*loc, self.param(*loc)?))).collect();
        let anchor = self.made.anchor(Anchor::new(Operand::Const(region), varmap));
        let origin = Origin { kind: OriginKind::Context, pc: region, step: None };
        self.insts.push(Inst::assume(predicate, Some(anchor), Origins::of(origin)));
    }

    /// Checks the assumptions whose values can be computed from the state.
    fn assume(&mut self, region: u64, assumptions: &[Assumption]) {
        for assumption in assumptions {
            let computed = self.insts.len();
            match self.operand(assumption.value.into()) {
                Ok(operand) => {
                    let ty = self.old.ty(assumption.value);
                    let compare = assumption.compare(self.made, operand, ty);
                    let predicate = compare.def();
                    self.insts.push(compare);
                    predicate.into_iter().for_each(|p| self.guard(region, p.into()));
                }
                // The operations computed so far remain, because others may use them already; they
                // are pure.
                Err(_) => debug_assert!(self.insts[computed..].iter().all(|i| i.op.is_pure())),
            }
        }
    }

    /// Adds guards for the statements of the varmap from which no value was taken.
    fn check(&mut self, region: u64) -> Result<(), ContinuationError> {
        for (loc, operand) in &self.at.varmap {
            let Some(mut held) = self.param(*loc) else { continue };
            let mut mapped = self.operand(*operand)?;
            if holds(SideCondition::ContinuationCheck, mapped == held) {
                continue;
            }
            if loc.ty() == Ty::Flags {
                held = self.push(Op::FlagBits, Ty::I64, Ty::I64, &[held]);
                mapped = match mapped {
                    Operand::Const(_) => mapped,
                    Operand::Value(_) => self.push(Op::FlagBits, Ty::I64, Ty::I64, &[mapped]),
                };
            }
            let equal = self.push(Op::Eq, Ty::I64, Ty::I1, &[held, mapped]);
            self.guard(region, equal);
        }
        Ok(())
    }
}
