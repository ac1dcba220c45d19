//! Pass `readonly`: loads from memory that the guest may only read become constants. The fact joins
//! the context; whoever runs the version sees to it that nothing enters it when the memory may change.
//!
//! ```text
//! version t1 {                           version t1 context load.i64 [0x5a40] == 0x2c470 {
//!   v1 = load.i64 [0x5a40] !a0
//!   v2 = eq.i64 v1, 0x2c470              v2 = eq.i64 0x2c470, 0x2c470
//!   assume v2 else a1                    assume v2 else a1
//! ```
//!
//! In an interpreter's loop these are tables of handlers: once the opcode is a constant, the table's
//! entry has a constant address, and the guard on the handler goes.
//!
//! Side conditions: the address is a constant without a segment (`fixed` of the pass `monitor`), and
//! [`OptOptions::constant_memory`] knows the bytes. A store of the version to these bytes faults, so
//! it does not matter.
//!
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use super::monitor::{fixed, rely_on};
use crate::op::Op;
use crate::version::{Fact, Inst, Split, Version};

/// Most facts about memory in one context (guess: a loop of an interpreted program has one for each
/// dispatch; more take longer to be noted than they save).
const MAX_FACTS: usize = 256;

/// Runs the pass; returns the number of loads that became constants.
pub(super) fn run(version: &mut Version, options: &OptOptions) -> usize {
    let Some(read) = options.constant_memory.filter(|_| !version.is_base()) else { return 0 };
    let known = |f: &&Fact| matches!(f, Fact::MemEquals { .. });
    let room = MAX_FACTS.saturating_sub(version.context.facts.iter().filter(known).count());
    let insts = || version.blocks.iter().flat_map(|b| &b.insts);
    // A native reads its operand from memory sooner than a constant gets into a vector register.
    let mut is_operand = vec![false; version.types.len()];
    for inst in insts() {
        let native = inst.native.and_then(|n| version.natives.get(n.index()));
        if native.is_some_and(|n| n.split == Split::Loaded)
            && let Some(value) = inst.args.first().and_then(|a| a.as_value())
        {
            is_operand[value.index()] = true;
        }
    }
    let is_wanted = |i: &&Inst| i.op == Op::Load && i.def().is_some_and(|d| !is_operand[d.index()]);
    let loads = insts().filter(is_wanted);
    let mut places: Vec<_> = loads.filter(|i| i.ty.bytes() <= 8).filter_map(fixed).collect();
    places.sort_unstable_by_key(|(ty, address)| (*address, ty.bytes()));
    places.dedup();
    let facts: Vec<Fact> = places
        .into_iter()
        .filter_map(|(ty, address)| {
            let value = read(address, ty.bytes())? & ty.mask();
            Some(Fact::MemEquals { ty, address, value })
        })
        .take(room)
        .collect();
    rely_on(version, &facts)
}
