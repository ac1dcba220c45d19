//! Turns a recorded path into a trace version.
//!
//! The base blocks of the path are concatenated. `get` and `put` disappear into a map from guest
//! location to SSA operand, and each thing that the recording took for granted becomes an `assume`:
//!
//! ```text
//! base                                trace
//!   at 0x40                             (the map at this point is what an anchor for 0x40 records)
//!   v0 = get.i64 rax
//!   v1 = load.i32 [v0]                  v7 = load.i32 [v3] !a1
//!   v2 = flags.and.i32 v1, v1           v8 = flags.and.i32 v7, v7
//!   put.flags rflags, v2
//!   at 0x44                             a2 = base.0x44 [rax = v3, rflags = v8, …]
//!   branch cond.e v2 → 0x60 | 0x46      assume cond.ne v8 else a2
//! ```
//!
//! **Anchors.** A branch is guarded on an anchor at its own pc, so that a failed guard replays one
//! instruction (unless the [placement](crate::placement) shares anchors). An indirect jump is
//! guarded on an anchor *behind* it whose target is the computed target. Such an anchor is right
//! whether or not the guess was, and is possible even if the instruction has pushed a return
//! address. An instruction that may fault uses the latest anchor still in reach. After an effect (a
//! store, a native that writes state) the next instruction that needs an anchor makes a new one, at
//! its own start. Every varmap names every location that the path writes, so it is total.
//!
//! **Code that may change unnoticed.** If stores may change a block's code without notice, the
//! trace compares the code with the recorded bytes where the block begins. Such blocks end behind
//! their first store, so the comparison sees every store.
//!
//! **Loops of interpreted programs** ([`crate::guests`]) are built twice. The first build shows
//! which values a dispatch depends on. The second build assumes that these values are the observed
//! ones as soon as they are computed; from then on they are constants.
//!
//! **Shapes.** A path that has returned to its head becomes `b0: jump b1(…)` and the loop `b1`,
//! whose parameters are the written locations and whose first instruction is the `poll`. Any other
//! path is one block that ends in `exit`.
//!
//! Invariant: the version is equivalent to `base` and transparent, whatever was observed; an
//! observation decides only what is assumed. The builder owns the version until it returns it. The
//! thread that compiles a recording calls [`build`]; the module takes no lock.

use crate::entry_guards::speculate_registers;
use crate::guests::{self, Definitions, GuestLoop};
use crate::observe::Observation;
use crate::placement::BranchAnchor;
use crate::policy::SpeculationPolicy;
use crate::recorder::{AbortReason, Transfer};
use crate::survival::Runs;
use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::{
    Anchor, AnchorId, Block, BlockId, Builder, Context, Effects, Gpr, GuestTerm, Inst, Loc, Mem,
    NativeId, Op, Operand, Term, Ty, Value, Version,
};
use rustc_hash::FxHashSet;
use std::rc::Rc;
use thiserror::Error;

/// One block of a path and the pc to which control went from it.
#[derive(Clone, Debug)]
pub struct Step {
    /// The lifted block.
    pub block: Rc<LiftedBlock>,
    /// The pc after it.
    pub next: u64,
    /// The values that it was predicted to compute, if the recorder searched for a loop of an
    /// interpreted program.
    pub observed: Option<Observation>,
}

/// What kind of trace a path makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TraceShape {
    /// The path came back to its head.
    Loop,
    /// It ends in an exit.
    Linear,
}

/// A complete recording.
#[derive(Clone, Debug)]
pub struct Path {
    /// Where it starts.
    pub head: u64,
    /// How it ends.
    pub shape: TraceShape,
    /// The blocks, in order.
    pub steps: Vec<Step>,
    /// Registers that held the same value at each sampled execution of the head.
    pub stable: Vec<(Gpr, u64)>,
    /// Set if the path is a loop of the program that the guest interprets.
    pub guest: Option<GuestLoop>,
    /// How often the guest kept to the path afterwards, if that was observed.
    pub runs: Option<Runs>,
}

impl Path {
    /// Does the path go through an indirect jump or an indirect call?
    pub fn jumps_indirectly(&self) -> bool {
        self.steps.iter().any(guests::dispatches)
    }
}

/// The path cannot become a trace.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[error("the path cannot become a trace: {0:?}")]
pub struct BuildError(pub AbortReason);

pub(crate) type State = [Operand; Loc::SSA_COUNT];

/// Builds the trace version `name` of `path` under the assumptions of `context`.
pub fn build(
    path: &Path,
    name: &str,
    context: Context,
    policy: &dyn SpeculationPolicy,
) -> Result<Version, BuildError> {
    let Some(guest) = &path.guest else {
        return Ok(assemble(path, name, context, policy, &Origins::default())?.0);
    };
    let (draft, notes) = assemble(path, name, context.clone(), policy, &Origins::default())?;
    let body = draft.blocks.last().expect("every version has a block");
    let locations = notes.parameters.iter().map(|(v, loc)| (*v, *loc));
    let defs = Definitions::new(&body.insts, locations);
    let is_dispatch = |step: &Step| {
        let call = Transfer::of(&step.block, step.next) == Transfer::Call;
        !call || step.block.pc == guest.dispatch
    };
    let jumps: Vec<Operand> =
        notes.jumps.iter().filter(|j| is_dispatch(&path.steps[j.1])).map(|j| j.0).collect();
    let promoted = guests::promotions(&defs, &jumps, guest.stable);
    let origins = notes
        .origins
        .into_iter()
        .filter(|(v, _)| promoted.contains(v))
        .map(|(_, origin)| origin)
        .collect();
    Ok(assemble(path, name, context, policy, &origins)?.0)
}

/// The version of a linear path, with the targets of its indirect jumps and calls.
pub(crate) fn with_targets(
    path: &Path,
    policy: &dyn SpeculationPolicy,
) -> Result<(Version, Vec<Operand>), BuildError> {
    let (version, notes) =
        assemble(path, "greens", Context::default(), policy, &Origins::default())?;
    let targets = notes.jumps.into_iter().map(|j| j.0).filter(|t| t.as_const().is_none()).collect();
    Ok((version, targets))
}

/// Instructions of a path: index of the step, and index of the instruction in its block.
type Origins = FxHashSet<(usize, usize)>;

/// Information about a version that assembling it yields.
#[derive(Debug, Default)]
struct Notes {
    /// The parameters of the block that the path became, and their locations.
    parameters: Vec<(Value, Loc)>,
    /// Targets of indirect jumps and calls, and the steps that end in them.
    jumps: Vec<(Operand, usize)>,
    /// The instructions of the path from which loads and conditions come.
    origins: Vec<(Value, (usize, usize))>,
}

/// Builds the version, assuming that the results of the `promoted` instructions are what was
/// observed.
fn assemble(
    path: &Path,
    name: &str,
    context: Context,
    policy: &dyn SpeculationPolicy,
    promoted: &Origins,
) -> Result<(Version, Notes), BuildError> {
    let mut version = Version::new(name, path.head);
    version.context = context;
    let written = written_locations(path);

    let mut entry_state: State = [Operand::Const(0); Loc::SSA_COUNT];
    let mut entry_params = Vec::with_capacity(Loc::SSA_COUNT);
    for (index, slot) in entry_state.iter_mut().enumerate() {
        let loc = Loc::from_ssa_index(index);
        let v = version.value(loc.ty());
        *slot = v.into();
        entry_params.push(v);
        version.entry_locs.push(loc);
    }
    version.blocks.push(Block {
        params: entry_params,
        insts: Vec::new(),
        term: Term::Exit(AnchorId(0)),
    });

    let mut state = entry_state;
    let entry = speculate_registers(path, &mut version, &mut state, &written, policy);
    let mut notes = Notes::default();
    match path.shape {
        TraceShape::Linear => {
            let mut body = Body::new(&mut version, state, &written, promoted);
            body.branch_anchor = policy.placement().branch_anchor();
            body.builder.insts = entry;
            let exit = body.path(path)?.expect("a linear path ends in an exit");
            notes.jumps = body.jumps;
            let insts = body.builder.insts;
            version.blocks[0].insts = insts;
            version.blocks[0].term = Term::Exit(exit);
        }
        TraceShape::Loop => {
            version.blocks[0].insts = entry;
            let args = written_operands(&written, &state);
            version.blocks[0].term = Term::Jump { to: BlockId(1), args };
            let mut params = Vec::new();
            for index in (0..Loc::SSA_COUNT).filter(|&i| written[i]) {
                let v = version.value(Loc::from_ssa_index(index).ty());
                state[index] = v.into();
                params.push(v);
                notes.parameters.push((v, Loc::from_ssa_index(index)));
            }
            let greens = path.guest.as_ref().map_or(&[][..], |g| &g.registers);
            for (g, value) in greens {
                state[g.number()] = Operand::Const(*value);
            }
            for index in (0..Loc::SSA_COUNT).filter(|&i| !written[i]) {
                notes
                    .parameters
                    .extend(state[index].as_value().map(|v| (v, Loc::from_ssa_index(index))));
            }
            let mut body = Body::new(&mut version, state, &written, promoted);
            body.branch_anchor = policy.placement().branch_anchor();
            body.poll(path.head);
            let exit = body.path(path)?;
            debug_assert!(exit.is_none());
            body.assume_greens(path.head, greens)?;
            let args = written_operands(&written, &body.state);
            notes.jumps = body.jumps;
            notes.origins = body.origins;
            let insts = body.builder.insts;
            version.blocks.push(Block { params, insts, term: Term::Jump { to: BlockId(1), args } });
        }
    }
    Ok((version, notes))
}

fn written_operands(written: &[bool; Loc::SSA_COUNT], state: &State) -> Vec<Operand> {
    (0..Loc::SSA_COUNT).filter(|&i| written[i]).map(|i| state[i]).collect()
}

pub(crate) fn base_insts(step: &Step) -> &[Inst] {
    &step.block.version.blocks[0].insts
}

fn written_locations(path: &Path) -> [bool; Loc::SSA_COUNT] {
    let mut written = [false; Loc::SSA_COUNT];
    for inst in path.steps.iter().flat_map(base_insts) {
        if let Op::Put(loc) = inst.op
            && let Some(index) = loc.ssa_index()
        {
            written[index] = true;
        }
    }
    written
}

pub(crate) fn varmap(written: &[bool; Loc::SSA_COUNT], state: &State) -> Vec<(Loc, Operand)> {
    (0..Loc::SSA_COUNT)
        .filter(|&i| written[i])
        .map(|i| (Loc::from_ssa_index(i), state[i]))
        .collect()
}

/// The translation of a path into SSA.
struct Body<'v, 'w> {
    builder: Builder<'v>,
    /// Which locations the varmaps name.
    written: &'w [bool; Loc::SSA_COUNT],
    /// The operand that each location holds now.
    state: State,
    /// The same, at the start of the current guest instruction.
    at_start: State,
    /// The current guest instruction.
    pc: u64,
    /// Has an effect outside SSA happened since the start of the current guest instruction?
    effect_since_start: bool,
    /// The latest anchor, if still in reach.
    reach: Option<AnchorId>,
    /// The flags at the start of the block.
    first_flags: Operand,
    /// The current step.
    step: usize,
    promoted: &'w Origins,
    jumps: Vec<(Operand, usize)>,
    origins: Vec<(Value, (usize, usize))>,
    /// The anchor to which guards of branches fall back.
    branch_anchor: BranchAnchor,
}

impl<'v, 'w> Body<'v, 'w> {
    fn new(
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
            effect_since_start: false,
            reach: None,
            first_flags: state[Loc::Flags.ssa_index().expect("flags are an SSA location")],
            step: 0,
            promoted,
            jumps: Vec::new(),
            origins: Vec::new(),
            branch_anchor: BranchAnchor::Own,
        }
    }

    fn new_anchor(&mut self, target: Operand, state: &State) -> AnchorId {
        let varmap = varmap(self.written, state);
        self.builder.version.anchor(Anchor::new(target, varmap))
    }

    /// An anchor at the place to which the current guest instruction, a transfer, leads.
    fn anchor_behind(&mut self, target: Operand, state: &State) -> AnchorId {
        let anchor = self.new_anchor(target, state);
        if target.as_const().is_none() {
            self.builder.version.anchors[anchor.index()].after = Some(self.pc);
        }
        anchor
    }

    /// An anchor at the start of the current guest instruction.
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

    fn poll(&mut self, head: u64) {
        let state = self.state;
        let anchor = self.new_anchor(Operand::Const(head), &state);
        let mut poll = Inst::new(Op::Poll, Ty::I64, None, &[]);
        poll.anchor = Some(anchor);
        self.builder.insts.push(poll);
        self.reach = Some(anchor);
    }

    /// Translates the path. Returns the exit's anchor, or `None` if the path closes a loop.
    fn path(&mut self, path: &Path) -> Result<Option<AnchorId>, BuildError> {
        for (index, step) in path.steps.iter().enumerate() {
            let last = index + 1 == path.steps.len();
            self.step = index;
            if let Some(exit) = self.step(step, last && path.shape == TraceShape::Linear)? {
                return Ok(Some(exit));
            }
        }
        Ok(None)
    }

    /// Assumes that the code of the block at `pc` still has these bytes. The loads stand where the
    /// block begins, so they see every earlier store of the path.
    fn check(&mut self, pc: u64, bytes: &[u8]) -> Result<(), BuildError> {
        self.pc = pc;
        self.at_start = self.state;
        self.effect_since_start = false;
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
            self.builder.assume(holds, anchor);
            remaining = others;
        }
        Ok(())
    }

    /// Translates one block. Returns the exit's anchor if the trace ends with it.
    fn step(&mut self, step: &Step, ends: bool) -> Result<Option<AnchorId>, BuildError> {
        if let Some(bytes) = &step.block.checked {
            self.check(step.block.pc, bytes)?;
        }
        let base = &step.block.version;
        let mut map: Vec<Option<Operand>> = vec![None; base.types.len()];
        let translate = |map: &[Option<Operand>], o: Operand| match o {
            Operand::Const(_) => o,
            Operand::Value(v) => map[v.index()].expect("a base block defines before it uses"),
        };
        for (index, inst) in base_insts(step).iter().enumerate() {
            match inst.op {
                Op::At => {
                    self.pc = inst.args[0].as_const().expect("at names a constant pc");
                    self.at_start = self.state;
                    self.effect_since_start = false;
                }
                Op::Get(loc) => {
                    let index =
                        loc.ssa_index().ok_or(BuildError(AbortReason::UnsupportedLocation))?;
                    map[inst.def().expect("get has a result").index()] = Some(self.state[index]);
                }
                Op::Put(loc) => {
                    let index =
                        loc.ssa_index().ok_or(BuildError(AbortReason::UnsupportedLocation))?;
                    self.state[index] = translate(&map, inst.args[0]);
                }
                _ => {
                    self.instruction(base, inst, &mut map, translate)?;
                    if let Some(observed) = &step.observed {
                        self.promote(inst, index, observed, &mut map)?;
                    }
                }
            }
        }
        let Term::Guest(term) = &base.blocks[0].term else {
            unreachable!("base blocks end in guest control flow")
        };
        self.terminator(term, step.next, ends, |o| translate(&map, o))
    }

    /// Notes an observed value; if it is to be promoted, assumes that the value is the observed
    /// one.
    fn promote(
        &mut self,
        inst: &Inst,
        index: usize,
        observed: &Observation,
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
        let origin = (self.step, index);
        self.origins.push((v, origin));
        if self.promoted.contains(&origin) {
            // In the middle of an instruction that has had an effect there is no anchor: assume
            // nothing.
            let Ok(anchor) = self.anchor_in_reach() else { return Ok(()) };
            let holds = match (ty, value & 1) {
                (Ty::I1, 1) => v.into(),
                (Ty::I1, _) => self.negate(v.into()),
                _ => self.builder.binary(Op::Eq, ty, v.into(), Operand::Const(value)),
            };
            self.builder.assume(holds, anchor);
            map[def.index()] = Some(Operand::Const(value));
        }
        Ok(())
    }

    /// At the end of a loop, assumes that the greens have the values that they had at its head.
    fn assume_greens(&mut self, head: u64, greens: &[(Gpr, u64)]) -> Result<(), BuildError> {
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
            self.builder.assume(holds, anchor);
            self.state[g.number()] = Operand::Const(*value);
        }
        Ok(())
    }

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
            // Some faults need an anchor at the instruction's own pc. A restartable instruction
            // that faults half done continues from the machine's state. A trapping floating-point
            // instruction has set flags in MXCSR.
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

    fn terminator(
        &mut self,
        term: &GuestTerm,
        next: u64,
        ends: bool,
        translate: impl Fn(Operand) -> Operand,
    ) -> Result<Option<AnchorId>, BuildError> {
        match *term {
            GuestTerm::Goto(target) | GuestTerm::Ret(target) | GuestTerm::Call { target, .. } => {
                let target = translate(target);
                let state = self.state;
                if !matches!(term, GuestTerm::Ret(_)) {
                    self.jumps.push((target, self.step));
                }
                if ends {
                    return Ok(Some(self.anchor_behind(target, &state)));
                }
                if target.as_const().is_some_and(|c| c != next) {
                    return Err(BuildError(AbortReason::Inconsistent));
                }
                if target.as_const().is_none() {
                    let anchor = self.anchor_behind(target, &state);
                    let holds = self.builder.binary(Op::Eq, Ty::I64, target, Operand::Const(next));
                    self.builder.assume(holds, anchor);
                }
            }
            GuestTerm::Branch { cond, taken, fall } => {
                let cond = translate(cond);
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
                    self.builder.assume(holds, anchor);
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

    fn negate(&mut self, cond: Operand) -> Operand {
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
