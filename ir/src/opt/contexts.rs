//! What is known of the guest's registers where a version is left, and what it needs where it is entered.
//!
//! Where an exit leads, all holds that the version knew there, and the opposite of what the guard
//! checked (deoptless: a continuation is made for a context). So a side trace of the exit begins with
//! these facts, and an exit whose facts exclude those that a version needs does not lead there.
//!
//! [`contexts`] is a function of the version, which it does not change: [`super::facts`] finds constants,
//! ranges and bits, here they become facts about registers. Values that the anchor does not name are
//! those of the entry. No data, no lock.
//!
//! ```text
//! b0(v0: i64, v1: i64):                              entry: rax == 7
//!   v2 = eq.i64 v0, 7; assume v2 else a0
//!   v3 = and.i64 v1, 7
//!   v4 = ne.i64 v3, 0; assume v4 else a1             a1:    rax == 7 && rcx & 0x7 == 0
//! ```

use super::facts::{Env, Facts};
use super::known::Known;
use crate::op::Op;
use crate::reach::Cfg;
use crate::types::{Gpr, Loc, Operand};
use crate::version::{Context, Fact, Inst, Version};

/// What [`contexts`] has found. No context has monitored facts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Contexts {
    /// If it does not hold, a guard at the entry leaves before the guest has executed an instruction.
    pub entry: Context,
    /// If [`Contexts::entry`] holds, none does.
    pub is_sufficient: bool,
    /// For each anchor (none of a `base` version), what holds when a guard, a safe point or the version's end leaves through it.
    pub exits: Vec<Context>,
}

/// What a version needs, and what is known at its exits.
pub fn contexts(version: &Version) -> Contexts {
    if version.is_base() || version.blocks.is_empty() {
        return Contexts::default();
    }
    let cfg = Cfg::new(version);
    let facts = Facts::new(version, &cfg);
    let mut exits: Vec<Option<Registers>> = vec![None; version.anchors.len()];
    for block in &cfg.order {
        facts.walk_exits(*block, |anchor, env| {
            let here = at_exit(version, &facts, env, &version.anchors[anchor.index()].varmap);
            let all = &mut exits[anchor.index()];
            *all = Some(
                all.map_or(here, |all| std::array::from_fn(|g| Some(all[g]?.join(&here[g]?)))),
            );
        });
    }
    let exits = exits.into_iter().map(|known| known.map_or(Context::default(), context)).collect();
    let is_check = |inst: &Inst| match inst.op {
        Op::Assume => inst.anchor.is_some_and(|anchor| {
            version.anchors[anchor.index()].target == Operand::Const(version.region)
        }),
        op => op.is_pure() || op == Op::Load,
    };
    let count = version.blocks[0].insts.iter().take_while(|inst| is_check(inst)).count();
    let Some(env) = facts.behind_entry(count) else {
        return Contexts { exits, ..Contexts::default() };
    };
    let entry = context(at_exit(version, &facts, &env, &[]));
    let is_sufficient = facts.passes_entry(count, &entry);
    Contexts { entry, is_sufficient, exits }
}

/// What is known of each register.
type Registers = [Option<Known>; 16];

/// What is known in `env` of the registers that `varmap` describes. Those that it does not name are as
/// at the entry.
fn at_exit(
    version: &Version,
    facts: &Facts<'_>,
    env: &Env,
    varmap: &[(Loc, Operand)],
) -> Registers {
    let mut registers = [None; 16];
    let entry = version.entry_locs.iter().zip(&version.blocks[0].params);
    let named = varmap.iter().map(|(loc, operand)| (*loc, *operand));
    for (loc, operand) in entry.map(|(loc, v)| (*loc, Operand::Value(*v))).chain(named) {
        if let Loc::Gpr(gpr) = loc {
            registers[gpr.number()] = Some(facts.known_shallow(env, operand));
        }
    }
    registers
}

/// The facts that say what is known of the registers.
fn context(registers: Registers) -> Context {
    let known = Gpr::all().zip(registers).filter_map(|(gpr, known)| Some((gpr, known?)));
    let mut facts: Vec<Fact> = known.flat_map(|(gpr, known)| register(gpr, &known)).collect();
    facts.sort_unstable();
    Context { facts }
}

/// The facts that say what is known of one register: its value, or its low bits and its range.
fn register(gpr: Gpr, known: &Known) -> impl Iterator<Item = Fact> + use<> {
    let low = (known.zeros | known.ones).trailing_ones();
    let mask = 1u64.checked_shl(low).map_or(u64::MAX, |bit| bit - 1);
    let (value, step) = (known.ones & mask, mask.wrapping_add(1));
    // The ends of the range have these bits, too.
    let round = |end: u64| end & !mask | value;
    let (min, max) = (round(known.bounds.umin), round(known.bounds.umax));
    let min = if min < known.bounds.umin { min.checked_add(step) } else { Some(min) };
    let max = if max > known.bounds.umax { max.checked_sub(step) } else { Some(max) };
    let (min, max) = match (min, max) {
        (Some(min), Some(max)) if min <= max => (min, max),
        // No value is possible: control does not come here.
        _ => (0, u64::MAX),
    };
    let is_one = min == max;
    let is_range = !is_one && (min > value || max < round(u64::MAX));
    [
        is_one.then_some(Fact::RegEquals(gpr, min)),
        is_range.then_some(Fact::RegInRange { gpr, min, max }),
        (!is_one && mask != 0).then_some(Fact::RegBits { gpr, mask, value }),
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opt::bounds::Bounds;
    use crate::types::Ty;

    #[test]
    fn facts_say_what_is_known() {
        let says = |known: Known| {
            let facts = register(Gpr::RAX, &known).collect();
            Context { facts }.to_string()
        };
        let all = Known::all(Ty::I64);
        assert_eq!(says(all), "true");
        assert_eq!(says(Known::constant(7, Ty::I64)), "rax == 7");
        let low = all.with_bits(7, 0, Ty::I64);
        assert_eq!(says(low), "rax & 0x7 == 0x0");
        let narrow = |known: Known, max| Known { bounds: Bounds::at_most(max, Ty::I64), ..known };
        assert_eq!(says(narrow(all, 100)), "rax in 0 .. 100");
        assert_eq!(says(narrow(low, 100)), "rax in 0 .. 96 && rax & 0x7 == 0x0");
        assert_eq!(says(narrow(all.with_bits(6, 1, Ty::I64), 8)), "rax == 1");
    }
}
