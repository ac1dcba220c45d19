//! Inlining: replaces an exit by the version of the region to which the exit leads (sourir 4.3,
//! 6.3).
//!
//! A guest call pushes a return address and goes to the callee's pc. A version that ends there ends
//! in an exit whose target is the callee's region. [`inline`] copies the callee's version into the
//! caller; its entry parameters become the operands of the exit's varmap. The same step inlines the
//! code after the return, once `forward` has replaced the popped return address by the constant
//! that was pushed. So calls of any depth can be inlined.
//!
//! ```text
//! caller  a1 = base.0x2000 [rax = v5, rsp = v4] stores [store.i64 [v4], 0x1010]
//!         b0: …; exit a1
//! callee  a0 = base.0x2008 [rax = v2]
//!         b0(v0: i64 = rdi): v1 = ne.i64 v0, 0; assume v1 else a0; …
//! inlined a2 = base.0x2008 [rax = v9, rsp = v4] stores [store.i64 [v4], 0x1010]
//! ```
//!
//! *Frames.* An anchor of the callee does not know the caller's frame. The inlined anchor therefore
//! takes two things from the exit: the operand of each location that the callee leaves alone, and
//! the stores that the exit defers, among them the return address. So it rebuilds the callee's
//! state *and* the caller's frame on the guest's stack (sourir's extra continuations); with several
//! levels, each level's.
//!
//! Side conditions:
//! * The exit's target is the constant pc of the callee's region.
//! * The callee's context holds there: facts about registers are checked by guards on the exit's
//!   own anchor, and monitored facts must be in the caller's context.
//! * Stores that the caller defers may stay deferred through the callee: each access there
//!   certainly misses them, nothing is of unknown extent, and no fence, locked operation or event
//!   makes memory visible. Otherwise nothing is inlined.
//! * Labels of the callee's anchors into other versions of the callee's region are dropped; the way
//!   to `base` is always right.
//!
//! The caller of [`inline`] owns both versions; no lock.

use crate::alias::{Access, Addresses, Location, Values, access};
use crate::defs::Defs;
use crate::op::Op;
use crate::origin::{Origin, OriginKind, Origins};
use crate::reach::{Cfg, ends_reach};
use crate::side_conditions::{SideCondition, holds};
use crate::types::{AnchorId, BlockId, Loc, NativeId, Operand, Ty, Value};
use crate::version::rename;
use crate::version::{Anchor, Context, DeferredStore, Fact, Inst, Term, Version};

/// Why a version is not inlined.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InlineError {
    /// The block does not end in an exit to the callee's region.
    #[error("{0} does not exit to the callee")]
    NotACall(BlockId),
    /// A base version has no SSA form.
    #[error("a base version cannot be inlined")]
    IsBase,
    /// The callee relies on a monitored fact that the caller does not assume.
    #[error("the callee assumes {0}")]
    Context(Context),
    /// An instruction of the callee may touch a store that the caller defers.
    #[error("stores that the caller defers cannot wait through {0}")]
    Pending(String),
}

/// Replaces the exit of `block` by the version `callee`. On an error the caller is unchanged.
pub fn inline(caller: &mut Version, block: BlockId, callee: &Version) -> Result<(), InlineError> {
    if callee.is_base() || caller.is_base() {
        return Err(InlineError::IsBase);
    }
    let exit = match caller.blocks.get(block.index()).map(|b| &b.term) {
        Some(Term::Exit(a))
            if caller.anchors[a.index()].target == Operand::Const(callee.region) =>
        {
            *a
        }
        _ => return Err(InlineError::NotACall(block)),
    };
    let monitored = callee
        .context
        .facts
        .iter()
        .filter(|f| matches!(f, Fact::PrivateMemory | Fact::MemEquals { .. }));
    let monitored = Context { facts: monitored.copied().collect() };
    if !caller.context.implies(&monitored) {
        return Err(InlineError::Context(monitored));
    }
    let mut inlined = caller.clone();
    splice(&mut inlined, block, exit, callee);
    let disturbed = disturbs(&inlined, caller.blocks.len(), &caller.anchors[exit.index()].stores);
    if let Some(what) = disturbed.filter(|_| !holds(SideCondition::InlinePending, false)) {
        return Err(InlineError::Pending(what));
    }
    *caller = inlined;
    Ok(())
}

/// The first instruction of the blocks from `first` on that may touch a pending store or makes
/// memory visible.
fn disturbs(version: &Version, first: usize, pending: &[DeferredStore]) -> Option<String> {
    if pending.is_empty() {
        return None;
    }
    let defs = Defs::of(version);
    // The callee's entry parameters are the operands that the caller passes.
    let mut replaced: Vec<Option<Operand>> = vec![None; version.types.len()];
    let edges = version.blocks[..first]
        .iter()
        .flat_map(|b| b.term.edges())
        .filter(|(to, _)| to.index() == first);
    for (param, arg) in
        edges.flat_map(|(to, args)| version.blocks[to.index()].params.iter().zip(args))
    {
        replaced[param.index()] = Some(*arg);
    }
    let values = Values { defs: &defs, replaced: &replaced };
    let mut addresses = Addresses::default();
    let waiting: Vec<Location> = pending
        .iter()
        .map(|s| addresses.locate_parts(&values, &s.mem, s.args[0], s.args[1], s.ty.bytes()))
        .collect();
    let mut touches = |inst: &Inst| match access(version, inst) {
        _ if ends_reach(version, inst) && !matches!(access(version, inst), Access::Write(_)) => {
            true
        }
        Access::None => false,
        Access::ReadUnknown | Access::Barrier => true,
        Access::Read(size) | Access::Write(size) => match addresses.locate(&values, inst, size) {
            Some(here) => waiting.iter().any(|w| !addresses.disjoint(w, &here)),
            None => true,
        },
    };
    let found = version.blocks[first..].iter().flat_map(|b| &b.insts).find(|inst| touches(inst));
    found.map(|inst| inst.to_string())
}

fn splice(caller: &mut Version, block: BlockId, exit: AnchorId, callee: &Version) {
    let frame = caller.anchors[exit.index()].clone();
    // From now on every anchor names each location that an anchor of either version names.
    let named = union(&named_locs(caller), &named_locs(callee));
    for i in 0..caller.anchors.len() {
        let missing: Vec<Loc> = named
            .iter()
            .copied()
            .filter(|l| !caller.anchors[i].varmap.iter().any(|(m, _)| m == l))
            .collect();
        for loc in missing {
            let before = at_entry(caller, loc);
            caller.anchors[i].varmap.push((loc, before));
        }
        caller.anchors[i].varmap.sort_by_key(|(loc, _)| *loc);
    }
    let frame = Anchor { varmap: caller.anchors[exit.index()].varmap.clone(), ..frame };
    check_context(caller, block, exit, &frame, &callee.context);

    let (first_value, first_block) = (caller.types.len(), caller.blocks.len());
    let (first_anchor, first_native) = (caller.anchors.len(), caller.natives.len());
    caller.types.extend(&callee.types);
    caller.natives.extend(callee.natives.iter().cloned());
    let table: Vec<Option<Operand>> = (0..callee.types.len())
        .map(|v| Some(Operand::Value(Value((first_value + v) as u32))))
        .collect();
    for anchor in &callee.anchors {
        let mut anchor = anchor.clone();
        anchor.via = None;
        Version::for_each_anchor_operand(&mut anchor, |o| *o = rename(&table, *o));
        for (loc, operand) in &frame.varmap {
            if !anchor.varmap.iter().any(|(l, _)| l == loc) {
                anchor.varmap.push((*loc, *operand));
            }
        }
        anchor.varmap.sort_by_key(|(loc, _)| *loc);
        anchor.stores.splice(0..0, frame.stores.iter().cloned());
        caller.anchors.push(anchor);
    }
    for body in &callee.blocks {
        let mut body = body.clone();
        body.params.iter_mut().for_each(|p| p.0 += first_value as u32);
        for inst in &mut body.insts {
            inst.defs.iter_mut().for_each(|d| d.0 += first_value as u32);
            inst.args.iter_mut().for_each(|o| *o = rename(&table, *o));
            inst.anchor.iter_mut().for_each(|a| a.0 += first_anchor as u32);
            inst.native.iter_mut().for_each(|NativeId(n)| *n += first_native as u32);
        }
        Version::for_each_term_operand(&mut body.term, |o| *o = rename(&table, *o));
        body.term.edges_mut().for_each(|(to, _)| to.0 += first_block as u32);
        if let Term::Exit(a) = &mut body.term {
            a.0 += first_anchor as u32;
        }
        caller.blocks.push(body);
    }
    let args = callee.entry_locs.iter().map(|loc| in_frame(caller, &frame, *loc)).collect();
    caller.blocks[block.index()].term = Term::Jump { to: BlockId(first_block as u32), args };
}

/// The locations that the anchors in use name.
fn named_locs(version: &Version) -> Vec<Loc> {
    let uses = crate::reach::anchor_uses(version, &Cfg::new(version));
    let used = version.anchors.iter().zip(uses).filter(|(_, uses)| !uses.is_empty());
    let mut locs: Vec<Loc> = used.flat_map(|(a, _)| a.varmap.iter().map(|(loc, _)| *loc)).collect();
    locs.sort_unstable();
    locs.dedup();
    locs
}

fn union(a: &[Loc], b: &[Loc]) -> Vec<Loc> {
    let mut both: Vec<Loc> = a.iter().chain(b).copied().collect();
    both.sort_unstable();
    both.dedup();
    both
}

/// The operand that a location holds at the entry of a version.
fn at_entry(version: &mut Version, loc: Loc) -> Operand {
    let at = version.entry_locs.iter().position(|l| *l == loc).unwrap_or_else(|| {
        let param = version.value(loc.ty());
        version.entry_locs.push(loc);
        version.blocks[0].params.push(param);
        version.entry_locs.len() - 1
    });
    version.blocks[0].params[at].into()
}

/// The operand that a location holds at the caller's exit.
fn in_frame(caller: &mut Version, frame: &Anchor, loc: Loc) -> Operand {
    match frame.varmap.iter().find(|(l, _)| *l == loc) {
        Some((_, operand)) => *operand,
        None => at_entry(caller, loc),
    }
}

/// Adds guards, on the exit's own anchor, for the callee's facts about registers.
fn check_context(
    caller: &mut Version,
    block: BlockId,
    exit: AnchorId,
    frame: &Anchor,
    context: &Context,
) {
    for fact in &context.facts {
        let Some(gpr) = fact.register() else { continue };
        let operand = in_frame(caller, frame, Loc::Gpr(gpr));
        if holds(
            SideCondition::InlineContext,
            operand.as_const().is_some_and(|c| Fact::RegEquals(gpr, c).implies(fact)),
        ) {
            continue;
        }
        let mut add = |op: Op, result: Ty, args: &[Operand]| -> Operand {
            let v = caller.value(result);
            caller.blocks[block.index()].insts.push(Inst::new(op, Ty::I64, Some(v), args));
            v.into()
        };
        let predicate = match *fact {
            Fact::RegInRange { min, max, .. } if min != max => {
                let above = add(Op::Sub, Ty::I64, &[operand, Operand::Const(min)]);
                add(Op::LeU, Ty::I1, &[above, Operand::Const(max.wrapping_sub(min))])
            }
            Fact::RegBits { mask, value, .. } => {
                let bits = add(Op::And, Ty::I64, &[operand, Operand::Const(mask)]);
                add(Op::Eq, Ty::I1, &[bits, Operand::Const(value)])
            }
            Fact::RegEquals(_, value) | Fact::RegInRange { min: value, .. } => {
                add(Op::Eq, Ty::I1, &[operand, Operand::Const(value)])
            }
            Fact::PrivateMemory | Fact::MemEquals { .. } => continue,
        };
        let pc = caller.anchors[exit.index()].target.as_const().unwrap_or(caller.region);
        let origin = Origin { kind: OriginKind::Context, pc, step: None };
        let assume = Inst::assume(predicate, Some(exit), Origins::of(origin));
        caller.blocks[block.index()].insts.push(assume);
    }
}
