//! Assumptions as data: specialising a fresh version under several, and undoing one of them (sourir 7.4).
//!
//! A version that was optimised under an assumption cannot be rid of it: nobody knows any more what rests on it. What can
//! be done is to keep the fresh parent and the list. When one assumption fails, a version under the others is made anew;
//! and a *continuation* under the others takes up where the failing one left, so that only the failed assumption
//! and what rested on it is lost.
//!
//! ```text
//! spec123   specialise(parent, [e1, e2, e3])
//! spec13    specialise(parent, [e1, e3])                 for the next call
//! cont13    resume(parent, anchor, [e1, e3])             for this one: entered in the state the anchor leaves
//! ```

use super::continuation::{ContinuationError, continue_under};
use super::inject::inject;
use crate::op::Op;
use crate::reach::{Cfg, Reach};
use crate::types::{AnchorId, Operand, Ty, Value};
use crate::version::{Inst, Version};

/// An assumption about a fresh version: at an anchor of it, a comparison of one of its values with a constant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Assumption {
    /// Checked at this anchor's position.
    pub anchor: AnchorId,
    /// `eq`, `ne` or an order.
    pub op: Op,
    /// The value, which is available there.
    pub value: Value,
    /// What it is compared with, of the value's type.
    pub constant: u64,
}

impl Assumption {
    /// The comparison of `operand` in place of the value.
    pub(super) fn compare(&self, version: &mut Version, operand: Operand, ty: Ty) -> Inst {
        let predicate = version.value(Ty::I1);
        Inst::new(self.op, ty, Some(predicate), &[operand, Operand::Const(self.constant)])
    }
}

/// The parent with these assumptions injected, under a new name; the passes that use them come afterwards. `None` if one cannot be
/// checked where it says.
pub fn specialise(parent: &Version, name: &str, assumptions: &[Assumption]) -> Option<Version> {
    let mut version = parent.clone();
    version.name = name.to_string();
    for assumption in assumptions {
        let cfg = Cfg::new(&version);
        let mut place = Reach::new(&version, &cfg).positions.get(assumption.anchor.index()).copied().flatten()?;
        let ty = *version.types.get(assumption.value.index())?;
        let compare = assumption.compare(&mut version, assumption.value.into(), ty);
        let predicate = compare.def()?;
        version.blocks[place.block.index()].insts.insert(place.inst, compare);
        place.inst += 1;
        inject(&mut version, place, predicate.into())?;
    }
    Some(version)
}

/// Takes up where an anchor of a version under `assumptions` leaves because one of them failed: the continuation of the
/// fresh parent at that anchor, under the others. Those that were checked before the anchor are checked on entry, as far as
/// the guest's state tells.
pub fn resume(
    parent: &Version,
    anchor: AnchorId,
    name: &str,
    assumptions: &[Assumption],
    failed: usize,
) -> Result<Version, ContinuationError> {
    let kept: Vec<Assumption> = assumptions.iter().enumerate().filter(|(i, _)| *i != failed).map(|(_, a)| *a).collect();
    continue_under(parent, anchor, name, &kept)
}
