//! Assumptions as data: specialises a fresh version under several assumptions, and undoes one of
//! them (sourir 7.4).
//!
//! An optimised version does not record which of its code depends on which assumption, so an
//! assumption cannot be taken out of it. Instead the caller keeps the fresh parent and the list of
//! assumptions. When one fails, [`specialise`] makes a version under the others, for the next
//! entry. [`resume`] makes a *continuation* under the others, which goes on where the failing
//! version left. So only the failed assumption, and the code that depends on it, is lost.
//!
//! ```text
//! spec123   specialise(parent, [e1, e2, e3])
//! spec13    specialise(parent, [e1, e3])             for the next call
//! cont13    resume(parent, anchor, [e1, e2, e3], 1)  for this one: starts at the anchor
//! ```
//!
//! Invariant: the parent is fresh ([`Version::optimised`] is false). No data, no lock; `dynasour
//! ir` and tests call this module.

use super::continuation::{ContinuationError, continue_under};
use super::inject::inject;
use crate::op::Op;
use crate::reach::{Cfg, Reach};
use crate::types::{AnchorId, Operand, Ty, Value};
use crate::version::{Inst, Version};

/// An assumption about a fresh version: at an anchor of it, a comparison of one of its values with
/// a constant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Assumption {
    /// Checked at this anchor's position.
    pub anchor: AnchorId,
    /// `eq`, `ne` or an order.
    pub op: Op,
    /// The value; it must be available at the anchor's position.
    pub value: Value,
    /// What it is compared with, of the value's type.
    pub constant: u64,
}

impl Assumption {
    /// The comparison of the assumption, with `operand` in place of the value.
    pub(super) fn compare(&self, version: &mut Version, operand: Operand, ty: Ty) -> Inst {
        let predicate = version.value(Ty::I1);
        Inst::new(self.op, ty, Some(predicate), &[operand, Operand::Const(self.constant)])
    }
}

/// A copy of the parent with these assumptions injected, under a new name; passes that use them run
/// afterwards. `None` if an assumption cannot be checked at its anchor.
pub fn specialise(parent: &Version, name: &str, assumptions: &[Assumption]) -> Option<Version> {
    let mut version = parent.clone();
    version.name = name.to_string();
    for assumption in assumptions {
        let cfg = Cfg::new(&version);
        let mut point = Reach::new(&version, &cfg)
            .positions
            .get(assumption.anchor.index())
            .copied()
            .flatten()?;
        let ty = *version.types.get(assumption.value.index())?;
        let compare = assumption.compare(&mut version, assumption.value.into(), ty);
        let predicate = compare.def()?;
        version.blocks[point.block.index()].insts.insert(point.inst, compare);
        point.inst += 1;
        inject(&mut version, point, predicate.into())?;
    }
    Some(version)
}

/// The continuation of the fresh parent at an anchor through which a version under `assumptions`
/// has left because assumption number `failed` failed. It is made under the other assumptions.
/// Those that were checked before the anchor are checked on entry, if the guest's state determines
/// their values.
pub fn resume(
    parent: &Version,
    anchor: AnchorId,
    name: &str,
    assumptions: &[Assumption],
    failed: usize,
) -> Result<Version, ContinuationError> {
    let kept: Vec<Assumption> =
        assumptions.iter().enumerate().filter(|(i, _)| *i != failed).map(|(_, a)| *a).collect();
    continue_under(parent, anchor, name, &kept)
}
