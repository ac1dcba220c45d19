//! The body of a trace: the blocks of a path, translated one after the other into SSA.
//!
//! **Data.** [`Body`] owns the instructions until the caller takes them, and the map from guest
//! location to SSA operand. `get` reads the map and `put` writes it; neither becomes an
//! instruction.
//!
//! **Invariants.** The map at the start of a guest instruction ([`Body::at_start`]) has all effects
//! of the instructions before it and none of its own, so an anchor there may name it. The latest
//! anchor is forgotten at each effect that ends its reach ([`ENDS_REACH`]).
//!
//! **Callers.** [`super::assemble`]; no lock.
//!
//! The example is in [`super`]: `load` uses the anchor `a1`, which was in reach; the branch gets
//! the anchor `a2` of its own.

use super::{BuildError, Origins, Path, State, Step, TraceShape, base_insts, calls, varmap};
use crate::placement::BranchAnchor;
use crate::recorder::AbortReason;
use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::predict::{NativeResults, Prediction};
use dynasour_ir::{
    Anchor, AnchorId, Builder, Effects, Gpr, GuestTerm, Inst, Loc, Mem, NativeId, Op, Operand,
    Origin, OriginKind, Term, Ty, Value, Version,
};
use std::sync::Arc;

/// The translation of a path into SSA.
pub(super) struct Body<'v, 'w> {
    /// The instructions so far, and the version that they belong to.
    pub builder: Builder<'v>,
    /// Which locations the varmaps name.
    pub written: &'w [bool; Loc::SSA_COUNT],
    /// The operand that each location holds now.
    pub state: State,
    /// The operand that each location held at the start of the current guest instruction.
    at_start: State,
    /// The address of the current guest instruction.
    pc: u64,
    /// For each instruction of the builder up to the last call of [`Body::note_pcs`]: the address of the
    /// guest instruction that it is for.
    pcs: Vec<u64>,
    /// The same of the blocks that are complete, in their order.
    pub block_pcs: Vec<Vec<u64>>,
    /// Has an effect outside SSA happened since the start of the current guest instruction?
    effect_since_start: bool,
    /// See [`Anchor::passes`].
    passes: u32,
    /// The latest anchor, if it is still in reach.
    reach: Option<AnchorId>,
    /// The operand that the flags held at the start of the trace's block.
    first_flags: Operand,
    /// The index of the current step.
    pub step_index: usize,
    /// The instructions whose results are assumed to be the observed ones.
    promoted: &'w Origins,
    /// See [`super::Notes::jumps`].
    pub jumps: Vec<(Operand, usize)>,
    /// See [`super::Notes::origins`].
    pub origins: Vec<(Value, (usize, usize))>,
    /// What natives were observed to compute.
    pub results: NativeResults,
    /// The anchor to which guards of branches fall back.
    pub branch_anchor: BranchAnchor,
}

/// A place in the guest's code, and the state there.
#[derive(Clone, Copy)]
pub(super) struct Place {
    state: State,
    at_start: State,
    pc: u64,
    effect_since_start: bool,
    passes: u32,
}

/// A step's block of which the first instructions are translated.
#[derive(Clone)]
pub(super) struct Partial {
    block: Arc<LiftedBlock>,
    /// The operands that its values became.
    map: Vec<Option<Operand>>,
    /// The number of the instruction that comes next.
    pub next: usize,
}

impl Partial {
    /// None of its instructions is translated.
    pub fn of(step: &Step) -> Partial {
        let map = vec![None; step.block.version.types.len()];
        Partial { block: Arc::clone(&step.block), map, next: 0 }
    }

    /// Is this the step's block, too? Not if the guest has changed its code in between.
    pub fn is_of(&self, step: &Step) -> bool {
        let (a, b) = (&*self.block, &*step.block);
        std::ptr::eq(a, b)
            || a.checked == b.checked
                && a.version.types == b.version.types
                && a.version.blocks == b.version.blocks
    }

    /// The result of the instruction of this number is `value`.
    pub fn set_result(&mut self, step: &Step, index: usize, value: u64) {
        if let Some(def) = base_insts(step)[index].def() {
            self.map[def.index()] = Some(Operand::Const(value));
        }
    }

    /// The end of the block in terms of the trace, if all its instructions are translated.
    pub fn end(&self, step: &Step) -> GuestTerm {
        let Term::Guest(term) = &step.block.version.blocks[0].term else {
            unreachable!("base blocks end in guest control flow")
        };
        let mut term = term.clone();
        match &mut term {
            GuestTerm::Goto(o)
            | GuestTerm::Ret(o)
            | GuestTerm::Branch { cond: o, .. }
            | GuestTerm::Call { target: o, .. } => *o = translate(&self.map, *o),
            GuestTerm::Syscall { .. } | GuestTerm::Special { .. } | GuestTerm::Trap { .. } => {}
        }
        term
    }
}

/// The operand that one of a base block became.
fn translate(map: &[Option<Operand>], o: Operand) -> Operand {
    match o {
        Operand::Const(_) => o,
        Operand::Value(v) => map[v.index()].expect("a base block defines before it uses"),
    }
}

impl<'v, 'w> Body<'v, 'w> {
    /// An empty body that begins in `state`.
    pub fn new(
        version: &'v mut Version,
        state: State,
        written: &'w [bool; Loc::SSA_COUNT],
        promoted: &'w Origins,
    ) -> Self {
        Body {
            builder: Builder::new(version),
            written,
            state,
            at_start: state,
            pc: 0,
            pcs: Vec::new(),
            block_pcs: Vec::new(),
            effect_since_start: false,
            passes: 0,
            reach: None,
            first_flags: state[Loc::Flags.ssa_index().expect("flags are an SSA location")],
            step_index: 0,
            promoted,
            jumps: Vec::new(),
            origins: Vec::new(),
            results: NativeResults::default(),
            branch_anchor: BranchAnchor::Own,
        }
    }

    /// An anchor at `target` with the varmap of `state`.
    fn new_anchor(&mut self, target: Operand, state: &State) -> AnchorId {
        let varmap = varmap(self.written, state);
        let anchor = Anchor { passes: self.passes, ..Anchor::new(target, varmap) };
        self.builder.version.anchor(anchor)
    }

    /// An anchor at the target of the current guest instruction, which is a transfer.
    fn anchor_behind(&mut self, target: Operand, state: &State) -> AnchorId {
        let anchor = self.new_anchor(target, state);
        if target.as_const().is_none() {
            self.builder.version.anchors[anchor.index()].after = Some(self.pc);
        }
        anchor
    }

    /// A new anchor at the start of the current guest instruction. There is none if the instruction
    /// has already had an effect outside SSA.
    fn anchor_here(&mut self) -> Result<AnchorId, BuildError> {
        if self.effect_since_start {
            return Err(BuildError(AbortReason::NoAnchor));
        }
        let state = self.at_start;
        let anchor = self.new_anchor(Operand::Const(self.pc), &state);
        self.reach = Some(anchor);
        Ok(anchor)
    }

    /// The latest anchor in reach. A new anchor is made instead if the latest one names the flags
    /// of the block's start although they have been overwritten since. Those flags would have to be
    /// kept as data, while the current flags are the result of an operation.
    fn anchor_in_reach(&mut self) -> Result<AnchorId, BuildError> {
        let flags = Loc::Flags.ssa_index().expect("flags are an SSA location");
        let (first, now) = (self.first_flags, self.at_start[flags]);
        let stale = |anchor: &Anchor| {
            anchor.varmap.iter().any(|(loc, o)| *loc == Loc::Flags && *o == first)
        };
        match self.reach {
            Some(anchor)
                if self.effect_since_start
                    || now == first
                    || !stale(&self.builder.version.anchors[anchor.0 as usize]) =>
            {
                Ok(anchor)
            }
            _ => self.anchor_here(),
        }
    }

    /// The guest instruction at `pc` begins, or one of its block's checks.
    fn begin(&mut self, pc: u64) {
        self.note_pcs();
        self.pc = pc;
        self.at_start = self.state;
        self.effect_since_start = false;
    }

    /// The instructions that were added since the last call are for the current guest instruction.
    fn note_pcs(&mut self) {
        self.pcs.resize(self.builder.insts.len(), self.pc);
    }

    /// Takes the instructions of a block that is complete, with the addresses of the guest instructions
    /// that they are for.
    pub fn take_insts(&mut self) -> (Vec<Inst>, Vec<u64>) {
        self.note_pcs();
        (std::mem::take(&mut self.builder.insts), std::mem::take(&mut self.pcs))
    }

    /// The loop's head begins: adds its `poll`, with an anchor there.
    pub fn enter_loop(&mut self, head: u64) {
        self.pc = head;
        let state = self.state;
        self.first_flags = state[Loc::Flags.ssa_index().expect("flags are an SSA location")];
        let anchor = self.new_anchor(Operand::Const(head), &state);
        let mut poll = Inst::new(Op::Poll, Ty::I64, None, &[]);
        poll.anchor = Some(anchor);
        self.builder.insts.push(poll);
        self.reach = Some(anchor);
    }

    /// Translates the path. Returns the exit's anchor, or `None` if the path closes a loop.
    pub fn path(&mut self, path: &Path) -> Result<Option<AnchorId>, BuildError> {
        for (index, step) in path.steps.iter().enumerate() {
            let last = index + 1 == path.steps.len();
            self.step_index = index;
            if let Some(exit) = self.block(step, last && path.shape == TraceShape::Linear)? {
                return Ok(Some(exit));
            }
            if path.shape == TraceShape::Linear {
                self.note_pass(step);
            }
        }
        Ok(None)
    }

    /// The step is translated, and goes on to the next one of a path without a loop.
    pub fn note_pass(&mut self, step: &Step) {
        self.passes += u32::from(calls(step, self.builder.version.region));
    }

    /// Assumes that the code of the block at `pc` still has these bytes. The loads stand where the
    /// block begins, so they see every earlier store of the path.
    fn check_code(&mut self, pc: u64, bytes: &[u8]) -> Result<(), BuildError> {
        self.begin(pc);
        let anchor = self.anchor_here()?;
        let mut remaining = bytes;
        while !remaining.is_empty() {
            let (ty, len) = match remaining.len() {
                8.. => (Ty::I64, 8),
                4.. => (Ty::I32, 4),
                2.. => (Ty::I16, 2),
                _ => (Ty::I8, 1),
            };
            let (these, others) = remaining.split_at(len);
            let expected = these.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
            let address = Operand::Const(pc.wrapping_add((bytes.len() - remaining.len()) as u64));
            let found = self.builder.load(
                ty,
                Mem { seg: None, scale: 1, disp: 0 },
                address,
                Operand::Const(0),
            );
            self.builder.insts.last_mut().expect("just built").anchor = Some(anchor);
            let holds = self.builder.binary(Op::Eq, ty, found, Operand::Const(expected));
            self.assume(OriginKind::Code, holds, anchor);
            remaining = others;
        }
        Ok(())
    }

    /// Translates the block of one step. Returns the exit's anchor if the trace ends with the
    /// block.
    pub fn block(&mut self, step: &Step, ends: bool) -> Result<Option<AnchorId>, BuildError> {
        let mut part = Partial::of(step);
        self.instructions_until(step, &mut part, None)?;
        self.terminator(&part.end(step), step.next, ends)
    }

    /// Translates the next instructions of a step's block, up to the one of this number and without assuming
    /// its result; or all of them.
    pub fn instructions_until(
        &mut self,
        step: &Step,
        part: &mut Partial,
        last: Option<usize>,
    ) -> Result<(), BuildError> {
        if part.next == 0
            && let Some(bytes) = &step.block.checked
        {
            self.check_code(step.block.pc, bytes)?;
        }
        let base = &step.block.version;
        let insts = base_insts(step);
        let end = last.map_or(insts.len(), |last| last + 1);
        let map = &mut part.map;
        for (index, inst) in insts.iter().enumerate().take(end).skip(part.next) {
            match inst.op {
                Op::At => {
                    self.begin(inst.args[0].as_const().expect("at names a constant pc"));
                }
                Op::Get(loc) => {
                    let index =
                        loc.ssa_index().ok_or(BuildError(AbortReason::UnsupportedLocation))?;
                    map[inst.def().expect("get has a result").index()] = Some(self.state[index]);
                }
                Op::Put(loc) => {
                    let index =
                        loc.ssa_index().ok_or(BuildError(AbortReason::UnsupportedLocation))?;
                    self.state[index] = translate(map, inst.args[0]);
                }
                _ => {
                    self.instruction(base, inst, map, translate)?;
                    if let Some(observed) = &step.observed {
                        self.note_results(inst, observed);
                        if last != Some(index) {
                            self.promote(inst, index, observed, map)?;
                        }
                    }
                }
            }
        }
        part.next = end;
        Ok(())
    }

    /// Assumes the observed result of the instruction of this number, which was translated last.
    pub fn promote_last(
        &mut self,
        step: &Step,
        part: &mut Partial,
        index: usize,
    ) -> Result<(), BuildError> {
        match &step.observed {
            Some(observed) => {
                self.promote(&base_insts(step)[index], index, observed, &mut part.map)
            }
            None => Ok(()),
        }
    }

    /// Is the result of this instruction of the current step assumed?
    pub fn is_promoted(&self, index: usize) -> bool {
        self.promoted.contains(&(self.step_index, index))
    }

    /// A condition that tells whether the result of the instruction of this number, which was translated last,
    /// is `value`.
    pub fn is_result(
        &mut self,
        step: &Step,
        part: &Partial,
        index: usize,
        value: u64,
    ) -> Result<Operand, BuildError> {
        let def = base_insts(step)[index].def();
        match def.and_then(|def| part.map[def.index()]) {
            Some(Operand::Value(v)) if !self.effect_since_start => Ok(self.is_value(v, value)),
            // It follows from what was assumed before, or no iteration could be left here.
            _ => Err(BuildError(AbortReason::Inconsistent)),
        }
    }

    /// A condition that tells whether an integer is `value`.
    fn is_value(&mut self, v: Value, value: u64) -> Operand {
        match (self.builder.version.ty(v), value & 1) {
            (Ty::I1, 1) => v.into(),
            (Ty::I1, _) => self.negate(v.into()),
            (ty, _) => self.builder.binary(Op::Eq, ty, v.into(), Operand::Const(value)),
        }
    }

    /// Where the translation is.
    pub fn place(&self) -> Place {
        let Body { state, at_start, pc, effect_since_start, passes, .. } = *self;
        Place { state, at_start, pc, effect_since_start, passes }
    }

    /// The translation goes on at another place, in a new block.
    pub fn go_to(&mut self, place: Place) {
        let Place { state, at_start, pc, effect_since_start, passes } = place;
        (self.state, self.at_start) = (state, at_start);
        self.passes = passes;
        (self.pc, self.effect_since_start) = (pc, effect_since_start);
        self.forget_anchor();
    }

    /// What comes next uses no earlier anchor.
    pub fn forget_anchor(&mut self) {
        self.reach = None;
    }

    /// Notes what a native, which has just been added, was observed to compute.
    fn note_results(&mut self, inst: &Inst, observed: &Prediction) {
        let Some(number) = self.builder.version.natives.len().checked_sub(1) else { return };
        if inst.native.is_some() {
            let results = inst.defs.iter().enumerate();
            self.results
                .extend(results.filter_map(|(n, v)| Some(((number, n), observed[v.index()]?))));
        }
    }

    /// Notes an observed value; if it is to be promoted, assumes that the value is the observed
    /// one.
    fn promote(
        &mut self,
        inst: &Inst,
        index: usize,
        observed: &Prediction,
        map: &mut [Option<Operand>],
    ) -> Result<(), BuildError> {
        let Some(def) = inst.def().filter(|_| inst.op == Op::Load || inst.op.is_pure()) else {
            return Ok(());
        };
        let (Some(Operand::Value(v)), Some(value)) = (map[def.index()], observed[def.index()])
        else {
            return Ok(());
        };
        let ty = self.builder.version.ty(v);
        if !matches!(ty, Ty::I1 | Ty::I8 | Ty::I16 | Ty::I32 | Ty::I64) {
            return Ok(());
        }
        let origin = (self.step_index, index);
        self.origins.push((v, origin));
        if self.is_promoted(index) {
            // If the instruction has had an effect already, there is no anchor here and nothing is
            // assumed.
            let Ok(anchor) = self.anchor_in_reach() else { return Ok(()) };
            let holds = self.is_value(v, value);
            let is_load = inst.op == Op::Load;
            let kind = if is_load { OriginKind::Memory } else { OriginKind::Value };
            self.assume(kind, holds, anchor);
            map[def.index()] = Some(Operand::Const(value));
        }
        Ok(())
    }

    /// At the end of a loop, assumes that the greens have the values that they had at its head.
    pub fn assume_greens(&mut self, head: u64, greens: &[(Gpr, u64)]) -> Result<(), BuildError> {
        let state = self.state;
        let mut anchor = None;
        for (g, value) in greens {
            match state[g.number()] {
                Operand::Const(c) if c == *value => continue,
                Operand::Const(_) => return Err(BuildError(AbortReason::Inconsistent)),
                Operand::Value(_) => {}
            }
            let anchor =
                *anchor.get_or_insert_with(|| self.new_anchor(Operand::Const(head), &state));
            let holds =
                self.builder.binary(Op::Eq, Ty::I64, state[g.number()], Operand::Const(*value));
            self.assume(OriginKind::Context, holds, anchor);
            self.state[g.number()] = Operand::Const(*value);
        }
        Ok(())
    }

    /// Translates one IR instruction that is neither `at`, `get` nor `put`.
    fn instruction(
        &mut self,
        base: &Version,
        inst: &Inst,
        map: &mut [Option<Operand>],
        translate: impl Fn(&[Option<Operand>], Operand) -> Operand,
    ) -> Result<(), BuildError> {
        let args: smallvec::SmallVec<[Operand; 3]> =
            inst.args.iter().map(|&a| translate(map, a)).collect();
        if inst.op.is_pure() {
            let def = inst.def().expect("pure operations have a result");
            map[def.index()] = Some(self.builder.pure(inst.op, inst.ty, &args));
            return Ok(());
        }
        let mut copy = inst.clone();
        copy.args = args;
        let effects =
            inst.native.map(|n| base.natives[n.index()].effects).unwrap_or_else(|| match inst.op {
                Op::Store => Effects::WRITE,
                _ => Effects::READ,
            });
        if effects.intersects(Effects::READ | Effects::WRITE | Effects::MAY_TRAP) {
            // Two kinds of instructions need an anchor at their own pc, because they have had an
            // effect when they fault. A restartable instruction (`rep movs`) that faults half done
            // continues from the registers as they are. A floating-point instruction that traps has
            // set flags in MXCSR.
            let here = effects.contains(Effects::RESTARTABLE)
                || effects.contains(Effects::MAY_TRAP | Effects::STATE);
            copy.anchor = Some(if here { self.anchor_here()? } else { self.anchor_in_reach()? });
        }
        if let Some(id) = inst.native {
            copy.native = Some(NativeId(self.builder.version.natives.len() as u32));
            self.builder.version.natives.push(base.natives[id.index()].clone());
        }
        for def in &mut copy.defs {
            let v = self.builder.version.value(base.ty(*def));
            map[def.index()] = Some(v.into());
            *def = v;
        }
        self.builder.insts.push(copy);
        if effects.intersects(ENDS_REACH) {
            self.reach = None;
            self.effect_since_start = true;
        }
        Ok(())
    }

    /// The guest goes where `target`, a value, says: assumes that this is `next`.
    pub fn assume_target(&mut self, kind: OriginKind, target: Operand, next: u64) {
        let state = self.state;
        let anchor = self.anchor_behind(target, &state);
        let holds = self.builder.binary(Op::Eq, Ty::I64, target, Operand::Const(next));
        self.assume(kind, holds, anchor);
    }

    /// Assumes a predicate for the sake of the current guest instruction.
    fn assume(&mut self, kind: OriginKind, holds: Operand, anchor: AnchorId) {
        let origin = Origin { kind, pc: self.pc, step: Some(self.step_index as u32) };
        self.builder.assume(origin, holds, anchor);
    }

    /// Translates the end of a block, after which the guest went to `next`. If the trace `ends`
    /// here, the result is the exit's anchor; otherwise the recorded direction or target is
    /// assumed.
    pub fn terminator(
        &mut self,
        term: &GuestTerm,
        next: u64,
        ends: bool,
    ) -> Result<Option<AnchorId>, BuildError> {
        match *term {
            GuestTerm::Goto(target) | GuestTerm::Ret(target) | GuestTerm::Call { target, .. } => {
                if !matches!(term, GuestTerm::Ret(_)) {
                    self.jumps.push((target, self.step_index));
                }
                if ends {
                    let state = self.state;
                    return Ok(Some(self.anchor_behind(target, &state)));
                }
                if target.as_const().is_some_and(|c| c != next) {
                    return Err(BuildError(AbortReason::Inconsistent));
                }
                if target.as_const().is_none() {
                    self.assume_target(target_kind(term), target, next);
                }
            }
            GuestTerm::Branch { cond, taken, fall } => {
                if taken != fall && cond.as_const().is_some_and(|c| (c & 1 != 0) != (next == taken))
                {
                    return Err(BuildError(AbortReason::Inconsistent));
                }
                if taken != fall && cond.as_const().is_none() {
                    let holds = if next == taken { cond } else { self.negate(cond) };
                    let anchor = match self.branch_anchor {
                        BranchAnchor::Own => self.anchor_here()?,
                        BranchAnchor::InReach => self.anchor_in_reach()?,
                    };
                    self.assume(OriginKind::Branch, holds, anchor);
                }
                if ends {
                    let state = self.state;
                    return Ok(Some(self.new_anchor(Operand::Const(next), &state)));
                }
            }
            GuestTerm::Syscall { .. } | GuestTerm::Special { .. } | GuestTerm::Trap { .. } => {
                // The runtime executes this instruction, so the trace ends just before it.
                let state = self.at_start;
                return Ok(Some(self.new_anchor(Operand::Const(self.pc), &state)));
            }
        }
        Ok(None)
    }

    /// The negation of a condition: the opposite comparison if the condition was computed last.
    pub fn negate(&mut self, cond: Operand) -> Operand {
        let defined =
            self.builder.insts.last().filter(|i| i.def().map(Operand::from) == Some(cond));
        match defined.map(|i| (i.op, i.args[0])) {
            Some((Op::Cond(c), flags)) => self.builder.cond(c.negate(), flags),
            _ => self.builder.binary(Op::Xor, Ty::I1, cond, Operand::Const(1)),
        }
    }
}

/// Effects that end the reach of earlier anchors (docs/design.md, "The IR").
const ENDS_REACH: Effects = Effects::WRITE
    .union(Effects::FENCE)
    .union(Effects::LOCKED)
    .union(Effects::NO_REPEAT)
    .union(Effects::STATE);

/// What an assumption about the target of a transfer is about.
pub(super) fn target_kind(term: &GuestTerm) -> OriginKind {
    match term {
        GuestTerm::Ret(_) => OriginKind::Return,
        _ => OriginKind::Target,
    }
}
