//! Turns a recorded path into a trace version.
//!
//! The base blocks of the path are concatenated. `get` and `put` disappear into a map from guest
//! location to SSA operand, and each fact that the path depends on becomes an `assume`:
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
//! even if the predicate holds, and it is possible even if the instruction has pushed a return
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
//! **Shapes.** A path that has returned to its head becomes a loop: `b0: jump b1(…)` and `b1`,
//! whose parameters are the written locations and whose first instruction is the `poll`. With other
//! iterations it becomes a loop with several paths ([`iterations`]). Any other path is one block that
//! ends in `exit`; with other executions of its function, a tree of blocks with an `exit` for each.
//!
//! **Data.** The builder owns the version until it returns it. **Invariant.** The version is
//! equivalent to `base` and transparent, whatever was observed; an observation decides only what is
//! assumed. **Callers.** The thread that compiles a recording calls [`build`]; no lock.

mod body;
mod iterations;
mod promoted;

use crate::assumptions::{Assumption, Place};
use crate::definitions::{Definitions, Given};
use crate::entry_guards::speculate_registers;
use crate::guests::{self, GuestLoop, ObservedLoad};
use crate::policy::SpeculationPolicy;
use crate::recorder::{AbortReason, Transfer};
use crate::survival::Runs;
use body::Body;
use dynasour_guest::lift::LiftedBlock;
use dynasour_guest::lift::class::sets_x87_pointer;
use dynasour_ir::predict::{NativeResults, Prediction, Registers, value_of};
use dynasour_ir::{
    AnchorId, Block, BlockId, Context, Fact, Gpr, Inst, Loc, Op, Operand, Term, Value, Version,
};
use iterations::Iterations;
pub(crate) use iterations::parts_at;
use promoted::Promoted;
use rustc_hash::{FxHashMap, FxHashSet};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use thiserror::Error;

/// One block of a path and the pc to which control went from it.
#[derive(Clone, Debug)]
pub struct Step {
    /// The lifted block.
    pub block: Arc<LiftedBlock>,
    /// The pc after it.
    pub next: u64,
    /// The values that it was predicted to compute, if the recorder searched for a loop of an
    /// interpreted program.
    pub observed: Option<Prediction>,
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
    /// The pc where it starts.
    pub head: u64,
    /// How it ends.
    pub shape: TraceShape,
    /// The blocks, in order.
    pub steps: Vec<Step>,
    /// Other iterations of the loop, or other executions of the function, which part from the path and from
    /// each other somewhere.
    pub others: Vec<Vec<Step>>,
    /// Registers that held the same value at each sampled execution of the head.
    pub stable: Vec<(Gpr, u64)>,
    /// Set if the path is a loop of the program that the guest interprets.
    pub guest: Option<Box<GuestLoop>>,
    /// The state at the head when it was recorded.
    pub entry: Box<Registers>,
    /// How often the guest kept to the path after the recording, if that was observed.
    pub runs: Option<Runs>,
}

impl Path {
    /// The number of guest instructions that a trace of it holds.
    pub fn instructions(&self) -> u64 {
        instructions(&self.steps) + iterations::extra_instructions(self)
    }

    /// The same with these steps only.
    fn with_steps(&self, steps: &[Step]) -> Path {
        Path {
            steps: steps.to_vec(),
            others: Vec::new(),
            stable: self.stable.clone(),
            guest: self.guest.clone(),
            entry: self.entry.clone(),
            ..*self
        }
    }

    /// All its blocks, those of other iterations too.
    pub fn all_steps(&self) -> impl Iterator<Item = &Step> {
        self.steps.iter().chain(self.others.iter().flatten())
    }

    /// Does the path call the function that it begins with?
    pub(crate) fn calls_itself(&self) -> bool {
        self.steps.iter().any(|step| calls(step, self.head))
    }

    /// Does the path go through an indirect jump or an indirect call?
    pub fn jumps_indirectly(&self) -> bool {
        self.steps.iter().any(guests::dispatches)
    }

    /// The pc to which its first indirect jump or call leads, and what the registers hold there, as far
    /// as that was observed. A loop of an interpreted program always goes there from its head, because
    /// the target follows from its key.
    pub fn first_target(&self) -> Option<(u64, [Option<u64>; 16])> {
        let mut gpr = self.entry.gpr.map(Some);
        for step in &self.steps {
            let observed = step.observed.as_ref()?;
            for inst in base_insts(step) {
                match inst.op {
                    _ if inst.native.is_some() => gpr = [None; 16],
                    Op::Put(Loc::Gpr(g)) => gpr[g.number()] = value_of(observed, inst.args[0]),
                    _ => {}
                }
            }
            if guests::dispatches(step) {
                return Some((step.next, gpr));
            }
        }
        None
    }

    /// Does it execute x87 instructions that note where they are?
    pub fn sets_x87_pointer(&self) -> bool {
        let natives = self.all_steps().flat_map(|step| &step.block.version.natives);
        natives.into_iter().any(|native| sets_x87_pointer(native.inst.code()))
    }
}

/// Does the step end in a call of this function?
pub(crate) fn calls(step: &Step, function: u64) -> bool {
    step.next == function && Transfer::of(&step.block, step.next) == Transfer::Call
}

/// Guest instructions of steps.
pub(crate) fn instructions(steps: &[Step]) -> u64 {
    steps.iter().map(|step| u64::from(step.block.count)).sum()
}

/// The path cannot become a trace.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[error("the path cannot become a trace: {0:?}")]
pub struct BuildError(pub AbortReason);

/// The operand that each SSA location holds, by the location's SSA index.
pub(crate) type State = [Operand; Loc::SSA_COUNT];

/// A trace version, and what it assumes beyond its path.
#[derive(Debug)]
pub struct Built {
    /// The version.
    pub version: Version,
    /// What its guards check besides the path, the path's code and the loop's key.
    pub assumptions: Vec<Assumption>,
    /// What its natives were observed to compute.
    pub native_results: NativeResults,
    /// By block and instruction: the address of the guest instruction that it was made for.
    pub pcs: Vec<Vec<u64>>,
}

/// Builds the trace version `name` of `path` under the assumptions of `context`. Other iterations that
/// cannot be part of it are left out.
///
/// # Errors
/// The path uses a location that traces do not keep, needs an anchor where none is possible, or
/// contradicts the observed values.
pub fn build(
    path: &Path,
    name: &str,
    context: Context,
    policy: &dyn SpeculationPolicy,
) -> Result<Built, BuildError> {
    let mut path = Cow::Borrowed(path);
    let mut promoted = promoted_by_iterations(&mut path, &context, policy)?;
    loop {
        match build_all(&path, &promoted, name, &context, policy) {
            Err(_) if !path.others.is_empty() => {
                path.to_mut().others.pop();
                promoted.pop();
            }
            result => return result,
        }
    }
}

/// As [`build`], with all iterations, of which each assumes what it has `promoted`.
fn build_all(
    path: &Path,
    promoted: &[Promoted],
    name: &str,
    context: &Context,
    policy: &dyn SpeculationPolicy,
) -> Result<Built, BuildError> {
    let (mut origins, mut assumptions) = (Origins::default(), Vec::new());
    for ((_, first), promoted) in Iterations::of(path).all().zip(promoted) {
        let all = promoted.keys.iter().chain(promoted.operands.keys());
        origins.extend(all.map(|(step, inst)| (first + step, *inst)));
        assumptions.extend(promoted.operands.values());
    }
    let (version, notes) = assemble(path, name, context.clone(), policy, &origins)?;
    let Notes { registers, native_results, pcs, .. } = notes;
    if path.guest.is_none() {
        assumptions = registers;
    }
    Ok(Built { version, assumptions, native_results, pcs })
}

/// What each iteration of a loop of an interpreted program assumes. Others than the main one are taken out of
/// the path if they contradict themselves.
fn promoted_by_iterations(
    path: &mut Cow<'_, Path>,
    context: &Context,
    policy: &dyn SpeculationPolicy,
) -> Result<Vec<Promoted>, BuildError> {
    let Some(guest) = &path.guest else { return Ok(Vec::new()) };
    let iterations: Vec<&[Step]> = Iterations::of(path).all().map(|(steps, _)| steps).collect();
    let (mut kept, mut all) = (Vec::new(), Vec::new());
    for (n, steps) in iterations.iter().enumerate() {
        match promoted_alone(&path.with_steps(steps), guest, context, policy) {
            Ok(promoted) => {
                kept.push(n);
                all.push(promoted);
            }
            Err(error) if n == 0 => return Err(error),
            Err(_) => {}
        }
    }
    let steps: Vec<&[Step]> = kept.iter().map(|n| iterations[*n]).collect();
    promoted::reconcile(&steps, &mut all);
    if kept.len() < iterations.len() {
        let others = kept[1..].iter().map(|n| path.others[n - 1].clone()).collect();
        path.to_mut().others = others;
    }
    Ok(all)
}

/// What a path without other iterations assumes, which is a loop of an interpreted program.
fn promoted_alone(
    path: &Path,
    guest: &GuestLoop,
    context: &Context,
    policy: &dyn SpeculationPolicy,
) -> Result<Promoted, BuildError> {
    let (draft, notes) = assemble(path, "draft", context.clone(), policy, &Origins::default())?;
    let body = draft.blocks.last().expect("every version has a block");
    let locations = notes.parameters.iter().map(|(v, loc)| (*v, *loc));
    let defs = Definitions::new(&body.insts, locations);
    let is_dispatch = |step: &Step| {
        let call = Transfer::of(&step.block, step.next) == Transfer::Call;
        !call || step.block.pc == guest.dispatch
    };
    let jumps: Vec<Operand> =
        notes.jumps.iter().filter(|j| is_dispatch(&path.steps[j.1])).map(|j| j.0).collect();
    let positions = guests::positions_if(guest.is_by_position, &defs, &jumps);
    let given = Given { stable: guest.stable, greens: &guest.greens, positions: &positions };
    let mut promoted = guests::promotions(&defs, &jumps, given);
    let origins: FxHashMap<Value, (usize, usize)> = notes.origins.iter().copied().collect();
    let origin_of = |v: &Value| origins.get(v).copied();
    let keys: Origins = promoted.iter().filter_map(origin_of).collect();
    let mut operands = BTreeMap::new();
    if guest.assumes_operands {
        let (loads, stores) = observed_accesses(path, &notes.origins);
        let may_change = |address: u64| {
            guest.undone.contains(&address)
                || stores
                    .range(..=address + 7)
                    .next_back()
                    .is_some_and(|(at, len)| at + len > address)
        };
        for load in guests::promote_operands(&defs, &positions, &loads, may_change, &mut promoted) {
            let place = Place::Memory { address: load.address, ty: load.ty };
            let assumption = Assumption { place, value: load.observed };
            operands.extend(origin_of(&load.value).map(|at| (at, assumption)));
        }
    }
    Ok(Promoted { keys, operands })
}

/// The loads of these origins, with the addresses that they were observed to read; and the stores of
/// the path, address and length of each.
fn observed_accesses(
    path: &Path,
    origins: &[(Value, (usize, usize))],
) -> (Vec<ObservedLoad>, BTreeMap<u64, u64>) {
    let address = |step: usize, inst: &Inst| {
        let observed = path.steps[step].observed.as_ref()?;
        let mem = inst.mem.filter(|mem| mem.seg.is_none())?;
        let base = value_of(observed, inst.args[0])?;
        let index = value_of(observed, inst.args[1])?;
        Some(base.wrapping_add(index.wrapping_mul(mem.scale.into())).wrapping_add(mem.disp as u64))
    };
    let loads = origins.iter().filter_map(|&(value, (step, index))| {
        let inst = &base_insts(&path.steps[step])[index];
        let address = address(step, inst).filter(|_| inst.op == Op::Load)?;
        let result = path.steps[step].observed.as_ref()?[inst.def()?.index()]?;
        Some(ObservedLoad { value, address, ty: inst.ty, observed: result & inst.ty.mask() })
    });
    let steps = path.steps.iter().enumerate();
    let stores = steps.flat_map(|(n, step)| base_insts(step).iter().map(move |inst| (n, inst)));
    let stores = stores
        .filter(|(_, inst)| inst.op == Op::Store)
        .filter_map(|(n, inst)| Some((address(n, inst)?, u64::from(inst.ty.bytes()))));
    (loads.collect(), stores.collect())
}

/// The version of a linear path, with the targets of its indirect jumps and calls and their steps. It
/// serves to find the greens of a dispatch head and is not executed.
pub(crate) fn with_targets(
    path: &Path,
    policy: &dyn SpeculationPolicy,
) -> Result<(Version, Vec<(Operand, usize)>), BuildError> {
    let (version, notes) =
        assemble(path, "greens", Context::default(), policy, &Origins::default())?;
    let jumps = notes.jumps.into_iter().filter(|(target, _)| target.as_const().is_none()).collect();
    Ok((version, jumps))
}

/// Instructions of a path: index of the step, and index of the instruction in its block.
type Origins = FxHashSet<(usize, usize)>;

/// What the second build of a loop of an interpreted program must know about the first.
#[derive(Debug, Default)]
struct Notes {
    /// The parameters of the block that the path became, and their locations.
    parameters: Vec<(Value, Loc)>,
    /// Targets of indirect jumps and calls, and the steps that end in them.
    jumps: Vec<(Operand, usize)>,
    /// The instructions of the path from which loads and conditions come.
    origins: Vec<(Value, (usize, usize))>,
    /// The registers that were assumed because they were stable.
    registers: Vec<Assumption>,
    /// What natives were observed to compute.
    native_results: NativeResults,
    /// See [`Built::pcs`].
    pcs: Vec<Vec<u64>>,
}

/// Builds the version. It assumes the observed results of the `promoted` instructions.
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
        let known = version.context.facts.iter().find_map(|fact| match *fact {
            Fact::RegEquals(gpr, value) if loc == Loc::Gpr(gpr) => Some(Operand::Const(value)),
            _ => None,
        });
        *slot = known.unwrap_or(v.into());
        entry_params.push(v);
        version.entry_locs.push(loc);
    }
    version.blocks.push(Block {
        params: entry_params,
        insts: Vec::new(),
        term: Term::Exit(AnchorId(0)),
    });

    let mut state = entry_state;
    let (entry_guards, registers) =
        speculate_registers(path, &mut version, &mut state, &written, policy);
    let mut notes = Notes { registers, ..Notes::default() };
    let mut body = Body::new(&mut version, state, &written, promoted);
    body.branch_anchor = policy.placement().branch_anchor();
    body.builder.insts = entry_guards;
    match path.shape {
        TraceShape::Linear if path.others.is_empty() => {
            let exit = body.path(path)?.expect("a linear path ends in an exit");
            let (insts, pcs) = body.take_insts();
            notes.pcs = vec![pcs];
            notes.jumps = body.jumps;
            notes.native_results = body.results;
            version.blocks[0].insts = insts;
            version.blocks[0].term = Term::Exit(exit);
        }
        TraceShape::Linear => {
            let (entry, pcs) = body.take_insts();
            body.block_pcs.push(pcs);
            let before = &mut body.builder.version.blocks[0];
            (before.insts, before.term) = (entry, Term::Jump { to: BlockId(1), args: Vec::new() });
            body.iterations(Vec::new(), &Iterations::of(path))?;
            notes.jumps = body.jumps;
            notes.pcs = body.block_pcs;
            notes.native_results = body.results;
        }
        TraceShape::Loop => {
            let iterations = Iterations::of(path);
            let greens = path.guest.as_ref().map_or(&[][..], |g| &g.registers);
            if !path.others.is_empty() {
                body.path(path)?;
                body.assume_greens(path.head, greens)?;
            }
            let args = written_operands(&written, &body.state);
            let (entry, pcs) = body.take_insts();
            body.block_pcs.push(pcs);
            let before = &mut body.builder.version.blocks[0];
            (before.insts, before.term) = (entry, Term::Jump { to: BlockId(1), args });
            let mut params = Vec::new();
            for index in (0..Loc::SSA_COUNT).filter(|&i| written[i]) {
                let v = body.builder.version.value(Loc::from_ssa_index(index).ty());
                body.state[index] = v.into();
                params.push(v);
                notes.parameters.push((v, Loc::from_ssa_index(index)));
            }
            for (g, value) in greens {
                body.state[g.number()] = Operand::Const(*value);
            }
            for index in (0..Loc::SSA_COUNT).filter(|&i| !written[i]) {
                let value = body.state[index].as_value();
                notes.parameters.extend(value.map(|v| (v, Loc::from_ssa_index(index))));
            }
            body.enter_loop(path.head);
            body.iterations(params, &iterations)?;
            notes.jumps = body.jumps;
            notes.origins = body.origins;
            notes.pcs = body.block_pcs;
            notes.native_results = body.results;
        }
    }
    Ok((version, notes))
}

/// The operands of the written locations, in the order of the loop's parameters.
fn written_operands(written: &[bool; Loc::SSA_COUNT], state: &State) -> Vec<Operand> {
    (0..Loc::SSA_COUNT).filter(|&i| written[i]).map(|i| state[i]).collect()
}

/// The instructions of the step's base block.
pub(crate) fn base_insts(step: &Step) -> &[Inst] {
    &step.block.version.blocks[0].insts
}

/// For each SSA location, whether the path writes it.
fn written_locations(path: &Path) -> [bool; Loc::SSA_COUNT] {
    let mut written = [false; Loc::SSA_COUNT];
    for inst in path.all_steps().flat_map(base_insts) {
        if let Op::Put(loc) = inst.op
            && let Some(index) = loc.ssa_index()
        {
            written[index] = true;
        }
    }
    written
}

/// The varmap of an anchor in `state`: it names every location that the path writes.
pub(crate) fn varmap(written: &[bool; Loc::SSA_COUNT], state: &State) -> Vec<(Loc, Operand)> {
    let mut map = Vec::with_capacity(written.iter().filter(|w| **w).count());
    let places = (0..Loc::SSA_COUNT).filter(|&i| written[i]);
    map.extend(places.map(|i| (Loc::from_ssa_index(i), state[i])));
    map
}
