//! Pass `forward`: replaces loads by the value that memory is known to hold, within a block and
//! around a loop.
//!
//! The walk keeps a table of *slots*: locations with the operand that memory holds there, from a
//! store or (with `private_memory`) from a load. A load inside a slot becomes the slot's operand,
//! shifted and truncated. A store removes the slots that it may touch and makes a slot itself. A
//! fence or a locked operation empties the table.
//!
//! Forwarding from a store needs no assumption, because x86's store buffers forward too (TSO).
//! Removing a load because of an earlier load, and any forwarding around a loop, needs
//! `private_memory`. A load that is replaced cannot have faulted: its bytes were accessed earlier
//! in this entry, and mappings change only by system calls, which traces do not contain.
//!
//! What is computed from constants only is folded at once, since the address of a later access may depend on
//! it. Otherwise each run of the pass would understand one more iteration of a recorded inner loop over an array
//! whose counter is in memory.
//!
//! Around a loop (PIR 4.2, "scope resolution", applied to guest memory) the pass is optimistic. It
//! takes the slots known at the end of the peeled iteration whose address the loop does not change,
//! and *assumes* that they are known at the loop's head, each as a new parameter of the loop block.
//! Then it walks the body. If every such slot is still known at the end of the body, its operand
//! there is the back-edge argument, and the assumption holds by induction. Otherwise the lost slots
//! are dropped and the body is walked again. If the loop has several paths ([`super::tree`]), a slot
//! must be known at the end of each.
//!
//! ```text
//! b0: … store.i64 [rbp - 8], v5; jump b1()     b0: … store.i64 [rbp - 8], v5; jump b1(v5)
//! b1: v7 = load.i64 [rbp - 8]                  b1(q):
//!     v8 = add.i64 v7, 1                           v8 = add.i64 q, 1
//!     store.i64 [rbp - 8], v8; jump b1()           store.i64 [rbp - 8], v8; jump b1(v8)
//! ```
//!
//! The table lives for one run; the caller owns the version, no lock.

use super::OptOptions;
use super::shape::{BODY, ENTRY, Shape, normalise};
use super::simplify::fold;
use super::tree::{Saved, add_args, to_head};
use crate::alias::{Access, Addresses, Location, Values, access};
use crate::defs::{Defs, Expr};
use crate::op::Op;
use crate::side_conditions::{SideCondition, holds};
use crate::types::{Operand, Ty, Value};
use crate::version::rename;
use crate::version::{Inst, Term, Version};

/// Most slots in the table (guess). The oldest slot is dropped for a new one; fewer lose loads,
/// more cost time.
const MAX_SLOTS: usize = 384;
/// Most slots that become parameters of a loop (guess: each costs a register or a spill slot).
const MAX_CARRIED: usize = 256;
/// Walks of the body before the assumption about the loop is given up (guess: each walk costs the
/// time of a pass).
const MAX_ROUNDS: usize = 6;

/// Memory known to hold an operand.
#[derive(Clone, Copy)]
struct Slot {
    location: Location,
    ty: Ty,
    value: Operand,
}

struct Forward<'v> {
    version: &'v mut Version,
    defs: Defs,
    replaced: Vec<Option<Operand>>,
    addresses: Addresses,
    slots: Vec<Slot>,
    private: bool,
    removed: usize,
}

/// Runs the pass; returns the number of loads removed.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    let Some(shape) = normalise(version) else { return 0 };
    let mut pass = Forward {
        defs: Defs::of(version),
        replaced: vec![None; version.types.len()],
        addresses: Addresses::default(),
        slots: Vec::new(),
        private: version.context.private_memory(),
        removed: 0,
        version,
    };
    let insts = std::mem::take(&mut pass.version.blocks[ENTRY].insts);
    pass.version.blocks[ENTRY].insts = pass.walk(&insts);
    if shape != Shape::Linear {
        pass.body();
    }
    let Forward { version, replaced, removed, .. } = pass;
    version.for_each_operand(|o| *o = rename(&replaced, *o));
    removed
}

impl Forward<'_> {
    fn body(&mut self) {
        let may_carry = holds(SideCondition::ForwardPrivateLoop, self.private);
        let mut carried = if may_carry { self.loop_invariant_slots() } else { Vec::new() };
        let from = to_head(self.version);
        let insts: Vec<Vec<Inst>> = self.version.blocks[BODY..]
            .iter_mut()
            .map(|block| std::mem::take(&mut block.insts))
            .collect();
        let (addresses, removed) = (self.addresses.clone(), self.removed);
        for round in 0.. {
            if round == MAX_ROUNDS {
                carried.clear();
            }
            let params: Vec<Value> = carried.iter().map(|s| self.version.value(s.ty)).collect();
            let at_head =
                carried.iter().zip(&params).map(|(s, p)| Slot { value: (*p).into(), ..*s });
            self.slots = at_head.collect();
            let (out, ends) = self.walk_tree(&insts, &carried);
            let survives = |i: &usize| ends.iter().all(|end| end[*i].is_some());
            let survivors: Vec<Slot> =
                (0..carried.len()).filter(survives).map(|i| carried[i]).collect();
            if holds(SideCondition::ForwardSurvives, survivors.len() == carried.len()) {
                for (block, out) in self.version.blocks[BODY..].iter_mut().zip(out) {
                    block.insts = out;
                }
                self.version.blocks[BODY].params.extend(params);
                for (i, slot) in carried.iter().enumerate() {
                    let back = ends.iter().map(|end| end[i].unwrap_or(slot.value));
                    add_args(self.version, &from, [slot.value].into_iter().chain(back));
                }
                return;
            }
            // Undo this walk: its replacements and guards depend on an assumption that does not
            // hold.
            carried = survivors;
            self.addresses = addresses.clone();
            self.removed = removed;
            for inst in insts.iter().flatten() {
                for def in &inst.defs {
                    self.replaced[def.index()] = None;
                }
                self.defs.note(inst);
            }
        }
    }

    /// Rewrites the instructions of the loop's blocks. Returns them, and for each back edge what the
    /// `carried` slots hold there.
    fn walk_tree(
        &mut self,
        insts: &[Vec<Inst>],
        carried: &[Slot],
    ) -> (Vec<Vec<Inst>>, Vec<Vec<Option<Operand>>>) {
        let mut saved = Saved::new(self.version);
        let (mut all, mut ends) = (Vec::new(), Vec::new());
        for (block, insts) in (BODY..).zip(insts) {
            if let Some((slots, guards)) = saved.enter(block) {
                self.slots = slots;
                self.addresses.continue_with(guards);
            }
            let mut out = self.walk(insts);
            if let Term::Jump { .. } = self.version.blocks[block].term {
                let at_end = carried.iter().map(|s| self.find(&s.location, s.ty, &mut out));
                ends.push(at_end.collect());
            }
            saved.leave(self.version, block, || (self.slots.clone(), self.addresses.guards()));
            all.push(out);
        }
        (all, ends)
    }

    /// The slots known now. Their addresses are sums of values of the entry block, so they do not
    /// change in the loop.
    fn loop_invariant_slots(&self) -> Vec<Slot> {
        let touched = self.touched_in_body();
        let mut list: Vec<Slot> = Vec::new();
        for slot in self.slots.iter().rev() {
            let wanted =
                touched.iter().any(|l| slot.location.contains(l) || l.contains(&slot.location));
            let new = !list.iter().any(|s| s.location == slot.location);
            if wanted && new && slot.ty.is_machine_int() && list.len() < MAX_CARRIED {
                list.push(*slot);
            }
        }
        list
    }

    /// The locations that the body accesses, as far as they are known before the walk.
    fn touched_in_body(&self) -> Vec<Location> {
        let mut addresses = self.addresses.clone();
        let values = Values { defs: &self.defs, replaced: &self.replaced };
        let insts = self.version.blocks[BODY..].iter().flat_map(|block| &block.insts);
        insts
            .filter_map(|inst| match access(self.version, inst) {
                Access::Read(size) | Access::Write(size) => addresses.locate(&values, inst, size),
                Access::None | Access::ReadUnknown | Access::Barrier => None,
            })
            .collect()
    }

    /// Rewrites a block's instructions.
    fn walk(&mut self, insts: &[Inst]) -> Vec<Inst> {
        let mut out = Vec::with_capacity(insts.len());
        for inst in insts {
            let mut inst = inst.clone();
            inst.args.iter_mut().for_each(|a| *a = rename(&self.replaced, *a));
            if self.fold(&inst) {
                continue;
            }
            self.defs.note(&inst);
            match access(self.version, &inst) {
                Access::None | Access::ReadUnknown => {}
                Access::Barrier => self.forget_all(),
                Access::Read(size) => {
                    if inst.op == Op::Load && self.load(&inst, size, &mut out) {
                        self.removed += 1;
                        continue;
                    }
                }
                Access::Write(size) => self.store(&inst, size),
            }
            if inst.op == Op::Assume {
                let values = Values { defs: &self.defs, replaced: &self.replaced };
                self.addresses.learn(&values, inst.args[0]);
            }
            out.push(inst);
        }
        out
    }

    /// Replaces an instruction over constants by its result.
    fn fold(&mut self, inst: &Inst) -> bool {
        let constant = Expr::of(inst).and_then(|expr| fold(&expr));
        let (Some(constant), Some(def)) = (constant, inst.def()) else { return false };
        self.replaced[def.index()] = Some(Operand::Const(constant));
        true
    }

    fn locate(&mut self, inst: &Inst, size: u32) -> Option<Location> {
        self.addresses.locate(&Values { defs: &self.defs, replaced: &self.replaced }, inst, size)
    }

    /// Replaces a load from a slot; otherwise makes a slot of its result.
    fn load(&mut self, inst: &Inst, size: u32, out: &mut Vec<Inst>) -> bool {
        let (Some(location), Some(def)) = (self.locate(inst, size), inst.def()) else {
            return false;
        };
        if let Some(value) = self.find(&location, inst.ty, out) {
            self.replaced[def.index()] = Some(value);
            return true;
        }
        if holds(SideCondition::ForwardPrivateLoad, self.private) {
            self.remember(Slot { location, ty: inst.ty, value: def.into() });
        }
        false
    }

    fn store(&mut self, inst: &Inst, size: u32) {
        let Some(location) = self.locate(inst, size) else {
            self.forget_all();
            return;
        };
        let addresses = &self.addresses;
        self.slots.retain(|s| {
            holds(SideCondition::ForwardKill, addresses.disjoint(&s.location, &location))
        });
        if inst.op == Op::Store {
            self.remember(Slot { location, ty: inst.ty, value: inst.args[2] });
        }
    }

    fn forget_all(&mut self) {
        self.slots.retain(|_| holds(SideCondition::ForwardBarrier, false));
    }

    fn remember(&mut self, slot: Slot) {
        if self.slots.len() == MAX_SLOTS {
            self.slots.remove(0);
        }
        self.slots.push(slot);
    }

    /// The content of memory at `location` as a value of type `ty`; the newest slot wins.
    fn find(&mut self, location: &Location, ty: Ty, out: &mut Vec<Inst>) -> Option<Operand> {
        let exact = |s: &&Slot| s.location == *location && s.ty == ty;
        if let Some(slot) = self.slots.iter().rev().find(exact) {
            return Some(slot.value);
        }
        let holds = |s: &&Slot| {
            s.location.contains(location) && s.ty.is_machine_int() && ty.bits() < s.ty.bits()
        };
        let slot = *self.slots.iter().rev().find(holds).filter(|_| ty.is_machine_int())?;
        let shift = location.offset.wrapping_sub(slot.location.offset) * 8;
        if let Operand::Const(c) = slot.value {
            return Some(Operand::Const(c >> shift & ty.mask()));
        }
        let shifted = match shift {
            0 => slot.value,
            _ => self.push(Op::Shr, slot.ty, &[slot.value, Operand::Const(shift)], out),
        };
        Some(self.push(Op::Trunc, ty, &[shifted], out))
    }

    fn push(&mut self, op: Op, ty: Ty, args: &[Operand], out: &mut Vec<Inst>) -> Operand {
        let v = self.version.value(ty);
        let inst = Inst::new(op, ty, Some(v), args);
        self.defs.note(&inst);
        out.push(inst);
        v.into()
    }
}
