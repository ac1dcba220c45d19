//! Pass `constants`: speculative constant propagation (sourir 4.1) over any control flow.
//!
//! An operand that [`super::facts`] knows to be one constant at its use becomes that constant. This
//! holds for the operands of instructions, terminators and anchors alike, because a varmap is an
//! ordinary use.
//!
//! ```text
//! assume eq.i64 v1, 42 else a0          assume eq.i64 v1, 42 else a0
//! print.i64 v1                          print.i64 42
//! ```
//!
//! Side conditions:
//! * An operand of an instruction is replaced if it is known *just before* that instruction.
//! * An operand of an anchor is replaced if it is known at the anchor's *position*, the point that
//!   all its uses share. A guard between the position and a use does not count, because the anchor
//!   may be taken in a state that has not passed the guard (Fig. 6 of sourir: a varmap that says 42
//!   because the *next* assume checks it is wrong).
//! * No anchor defers a store. Otherwise the addresses and the guards that prove that an access
//!   misses the store would be written in different values.
//!
//! The analysis lives for one run; the caller owns the version, no lock.

use super::OptOptions;
use super::facts::{Env, Facts};
use crate::reach::{Cfg, Point, Reach};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{AnchorId, Operand};
use crate::version::Version;

/// Runs the pass; returns how many operands became constants.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    let nothing_waits = !version.defers_stores();
    if version.is_base()
        || version.blocks.is_empty()
        || !holds(SideCondition::ConstantsNothingWaits, nothing_waits)
    {
        return 0;
    }
    let cfg = Cfg::new(version);
    let mut after = version.clone();
    let facts = Facts::new(version, &cfg);
    let reach = Reach::new(version, &cfg);
    let mut anchors_at: Vec<Vec<(usize, AnchorId)>> = vec![Vec::new(); version.blocks.len()];
    for (i, position) in reach.positions.iter().enumerate() {
        let last = || reach.uses[i].iter().max().copied();
        let point = if holds(SideCondition::ConstantsPosition, false) { last() } else { *position };
        if let Some(Point { block, inst }) = point {
            anchors_at[block.index()].push((inst, AnchorId(i as u32)));
        }
    }
    anchors_at.iter_mut().for_each(|list| list.sort_unstable());
    let mut changes = 0;
    for block in &cfg.order {
        let mut anchors = anchors_at[block.index()].iter().peekable();
        facts.walk(*block, |point, env| {
            let mut replace = |o: &mut Operand| changes += usize::from(constant(&facts, env, o));
            let body = &mut after.blocks[block.index()];
            match body.insts.get_mut(point.inst) {
                Some(inst) => inst.args.iter_mut().for_each(&mut replace),
                None => Version::for_each_term_operand(&mut body.term, &mut replace),
            }
            while let Some((_, anchor)) = anchors.next_if(|(inst, _)| *inst == point.inst) {
                Version::for_each_anchor_operand(&mut after.anchors[anchor.index()], &mut replace);
            }
        });
    }
    *version = after;
    changes
}

/// Replaces a value by the constant that it is known to be.
fn constant(facts: &Facts<'_>, env: &Env, o: &mut Operand) -> bool {
    match (*o, facts.constant(env, *o)) {
        (Operand::Value(_), Some(c)) => {
            *o = Operand::Const(c);
            true
        }
        _ => false,
    }
}
