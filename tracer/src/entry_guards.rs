//! Assumptions at a trace's entry: registers that keep their values.
//!
//! A register is *stable* if it held one value at every sampled execution of the head. The
//! placement decides which stable registers a trace assumes, from how the path uses them. The
//! guards come before everything else, on an anchor with the state at entry; behind them the
//! register is a constant. The greens of an interpreter's loop ([`crate::guests`] defines the word)
//! are assumed in the same way. Those in memory are loaded for that, although the path loads them later: an entry
//! that they refuse leads to the next loop that starts at the head, as one that is left later does not.
//!
//! The module has no data. Invariant: the map from location to operand changes only for guarded
//! registers. [`crate::build`] is the only caller and owns the version; no lock.
//!
//! ```text
//! stable: rcx = 3, a shift count        v20 = eq.i64 v1, 3; assume v20 else a0; from here rcx is 3
//! ```

use crate::assumptions::{Assumption, Place};
use crate::build::{Path, State, base_insts, varmap};
use crate::guests::Green;
use crate::policy::{RegisterUse, SpeculationPolicy};
use dynasour_ir::{
    Anchor, Builder, Gpr, Inst, Loc, Mem, Op, Operand, Origin, OriginKind, Ty, Version,
};

/// The registers that the path's blocks read with `get`, and how they use them.
fn register_uses(path: &Path, written: &[bool; Loc::SSA_COUNT]) -> [Option<RegisterUse>; 16] {
    let mut uses = [None; 16];
    for step in path.all_steps() {
        let mut held = rustc_hash::FxHashMap::default();
        for inst in base_insts(step) {
            if let (Op::Get(Loc::Gpr(g)), Some(v)) = (inst.op, inst.def()) {
                held.insert(v, g);
                uses[g.number()]
                    .get_or_insert(RegisterUse { written: written[g.number()], expensive: false });
            }
            let expensive = match inst.op {
                Op::Mul | Op::MulHighS | Op::MulHighU => &inst.args[..],
                Op::Shl | Op::Shr | Op::Sar | Op::Rol | Op::Ror => &inst.args[1..],
                // A shift count reaches its shift through the truncation to i8.
                Op::Trunc => {
                    if let Some(g) = inst.args[0].as_value().and_then(|v| held.get(&v).copied()) {
                        held.insert(inst.def().expect("trunc has a result"), g);
                    }
                    &[]
                }
                _ => &[],
            };
            for g in expensive.iter().filter_map(|a| held.get(&a.as_value()?)) {
                if let Some(usage) = &mut uses[g.number()] {
                    usage.expensive = true;
                }
            }
        }
    }
    uses
}

/// Assumes at entry that stable registers keep their values. The guards come before everything
/// else, on an anchor with the state at entry. Returns the guards, and which stable registers were
/// assumed.
pub(crate) fn speculate_registers(
    path: &Path,
    version: &mut Version,
    state: &mut State,
    written: &[bool; Loc::SSA_COUNT],
    policy: &dyn SpeculationPolicy,
) -> (Vec<Inst>, Vec<Assumption>) {
    let uses = register_uses(path, written);
    let wanted = |g: &Gpr, value: u64| {
        uses[g.number()].is_some_and(|u| policy.placement().speculate_register(*g, value, u))
    };
    let mut chosen = path.stable.clone();
    // What the context says of a register need not be assumed.
    let is_known = |g: &Gpr| state[g.number()].as_const().is_some();
    chosen.retain(|(g, value)| !is_known(g) && wanted(g, *value));
    let assumed = chosen.iter().map(|&(g, value)| Assumption { place: Place::Register(g), value });
    let assumed = assumed.collect();
    let greens = path.guest.iter().flat_map(|g| &g.registers).copied();
    chosen.extend(greens.filter(|(g, _)| !is_known(g)));
    // Where other threads write, each load of the path stays, and would be tested once more.
    let slots = if version.context.private_memory() { slots_of(path) } else { Vec::new() };
    if chosen.is_empty() && slots.is_empty() {
        return (Vec::new(), assumed);
    }
    let at_entry = Anchor::new(Operand::Const(path.head), varmap(written, state));
    let anchor = version.anchor(at_entry.clone());
    // No guard of a register moves down over a load with another anchor. With other registers the load might fault.
    let behind = if chosen.is_empty() { anchor } else { version.anchor(at_entry) };
    let mut builder = Builder::new(version);
    let interpreted: &[(Gpr, u64)] = path.guest.as_ref().map_or(&[], |guest| &guest.registers);
    for (gpr, value) in chosen {
        let slot = &mut state[gpr.number()];
        let holds = builder.binary(Op::Eq, Ty::I64, *slot, Operand::Const(value));
        let is_key = interpreted.contains(&(gpr, value));
        let kind = if is_key { OriginKind::Context } else { OriginKind::Value };
        builder.assume(Origin { kind, pc: path.head, step: Some(0) }, holds, anchor);
        *slot = Operand::Const(value);
    }
    for (gpr, disp, ty, value) in slots {
        let now = builder.load(ty, Mem::disp(disp), state[gpr.number()], Operand::Const(0));
        builder.insts.last_mut().expect("the load").anchor = Some(behind);
        let holds = builder.binary(Op::Eq, ty, now, Operand::Const(value));
        let origin = Origin { kind: OriginKind::Context, pc: path.head, step: Some(0) };
        builder.assume(origin, holds, behind);
    }
    (builder.insts, assumed)
}

/// The greens of a path in memory: the register and what is added to it, and the value at the head.
fn slots_of(path: &Path) -> Vec<(Gpr, i64, Ty, u64)> {
    let greens = path.guest.iter().flat_map(|guest| guest.greens.iter().zip(&guest.key));
    let slots = greens.filter_map(|(green, value)| match *green {
        Green::Slot(g, disp, ty) => Some((g, disp, ty, *value)),
        Green::Register(_) => None,
    });
    slots.collect()
}
