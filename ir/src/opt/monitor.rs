//! Pass `monitor`: turns a guard on the content of memory into a monitored fact of the context
//! (sourir 7.2: dependencies instead of checks).
//!
//! ```text
//! version t1 {                                version t1 context load.i64 [0x600000] == 5 {
//!   v1 = load.i64 [0x600000] !a0
//!   v2 = eq.i64 v1, 5
//!   assume v2 else a0
//!   print v1                                    print 5
//! ```
//!
//! The fact is checked once, when the version is entered. From then on a write to these bytes is an
//! event. While the version runs, such a write falls back to its anchor *before* it is performed,
//! as a write to a protected page does, so the fact holds throughout. A write outside the version
//! makes the context false. The hot path has no check.
//!
//! Side conditions: the address is a constant without a segment, and the load has the type
//! of the fact. Every load of exactly these bytes is replaced, also before the guard, because the
//! fact holds from the entry on. What pays: the version has no store that certainly hits the bytes.
//!
//! For the evaluator only: `dynasour run` does not monitor such facts. The caller owns the version;
//! no data between runs, no lock.

use super::OptOptions;
use crate::alias::{Access, Addresses, Location, Overlap, Values, access};
use crate::defs::Defs;
use crate::op::Op;
use crate::side_conditions::{SideCondition, holds};
use crate::types::{Operand, Ty};
use crate::version::rename;
use crate::version::{Fact, Inst, Version};
use rustc_hash::FxHashMap;

/// Most facts about memory in one context (guess: each makes entry dearer and protects a page).
const MAX_FACTS: usize = 8;

/// Runs the pass; returns the number of loads that became constants.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    if version.is_base() {
        return 0;
    }
    let mut replaced = 0;
    while let Some(fact) = candidate(version) {
        replaced += rely_on(version, &[fact]);
    }
    replaced
}

/// The bytes of a load from a constant address.
pub(super) fn fixed(inst: &Inst) -> Option<(Ty, u64)> {
    (inst.op == Op::Load).then(|| fixed_address(inst)).flatten().map(|address| (inst.ty, address))
}

/// The address of an instruction, if it is a constant.
pub(super) fn fixed_address(inst: &Inst) -> Option<u64> {
    let mem = inst.mem.filter(|m| m.seg.is_none())?;
    let number = |o: Operand| {
        o.as_const().or_else(|| holds(SideCondition::MonitorFixed, false).then_some(0))
    };
    let (base, index) = (number(*inst.args.first()?)?, number(*inst.args.get(1)?)?);
    let scaled = index.wrapping_mul(u64::from(mem.scale));
    Some(base.wrapping_add(scaled).wrapping_add(mem.disp as u64))
}

/// The fact that a guard of a load from a constant address states.
fn candidate(version: &Version) -> Option<Fact> {
    let known =
        version.context.facts.iter().filter(|f| matches!(f, Fact::MemEquals { .. })).count();
    if known >= MAX_FACTS {
        return None;
    }
    let defs = Defs::of(version);
    let insts = || version.blocks.iter().flat_map(|b| &b.insts);
    insts().filter(|i| i.op == Op::Assume).find_map(|assume| {
        let predicate = defs.get(assume.args[0]).filter(|e| e.op == Op::Eq)?;
        let (v, value) = (predicate.args[0], predicate.args[1].as_const()?);
        let load = insts().find(|i| i.def().map(Operand::Value) == Some(v))?;
        let (ty, address) = fixed(load)?;
        let fact = Fact::MemEquals { ty, address, value };
        (!writes(version, &defs, load)).then_some(fact)
    })
}

/// Is there a store that certainly hits the bytes of `load`?
fn writes(version: &Version, defs: &Defs, load: &Inst) -> bool {
    let values = Values { defs, replaced: &[] };
    let mut addresses = Addresses::default();
    let Some(bytes) = addresses.locate(&values, load, load.ty.bytes()) else { return true };
    let mut hits = |inst: &Inst| match access(version, inst) {
        Access::Write(size) => {
            let here: Option<Location> = addresses.locate(&values, inst, size);
            here.is_some_and(|here| {
                matches!(addresses.overlap(&bytes, &here), Overlap::Covered | Overlap::Partial)
            })
        }
        Access::None | Access::Read(_) | Access::ReadUnknown | Access::Barrier => false,
    };
    version.blocks.iter().flat_map(|b| &b.insts).any(&mut hits)
}

/// Replaces the loads of the bytes that the facts are about by their values, adds the facts to the context,
/// and removes assumes that have become trivial. Returns the number of loads.
pub(super) fn rely_on(version: &mut Version, facts: &[Fact]) -> usize {
    let known: FxHashMap<(u64, Ty), u64> = facts
        .iter()
        .filter_map(|fact| match *fact {
            Fact::MemEquals { ty, address, value } => Some(((address, ty), value)),
            _ => None,
        })
        .collect();
    if known.is_empty() {
        return 0;
    }
    version.context.facts.extend_from_slice(facts);
    version.context.facts.sort_unstable();
    version.context.facts.dedup();
    let mut table: Vec<Option<Operand>> = vec![None; version.types.len()];
    let mut removed = 0;
    for block in &mut version.blocks {
        block.insts.retain(|inst| {
            let value = fixed(inst).and_then(|(ty, address)| known.get(&(address, ty)));
            if let (Some(def), Some(value)) = (inst.def(), value) {
                table[def.index()] = Some(Operand::Const(*value));
                removed += 1;
            }
            value.is_none()
        });
    }
    version.for_each_operand(|o| *o = rename(&table, *o));
    let held: Vec<Operand> = {
        let defs = Defs::of(version);
        let trivial = |o: Operand| {
            defs.get(o).is_some_and(|e| {
                e.op == Op::Eq && e.args[0] == e.args[1] && e.args[0].as_const().is_some()
            })
        };
        let predicates = version
            .blocks
            .iter()
            .flat_map(|b| &b.insts)
            .filter(|i| i.op == Op::Assume)
            .map(|i| i.args[0]);
        predicates.filter(|p| trivial(*p)).collect()
    };
    for block in &mut version.blocks {
        block.insts.retain(|inst| inst.op != Op::Assume || !held.contains(&inst.args[0]));
    }
    removed
}
