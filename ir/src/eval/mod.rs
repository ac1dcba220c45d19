//! The evaluator: runs any version, `base` or trace, on a guest state and a [`Machine`]. It is the
//! executable meaning of the IR.
//!
//! A `base` version runs from one guest instruction to the next. A trace runs from its entry to an
//! anchor; taking the anchor rebuilds the guest state from the varmap and performs the deferred
//! stores. [`check`] compares the two; [`program`] runs whole programs of many versions.
//!
//! An *opportunity* is one execution of an instruction that names an anchor: an assume, a poll, or
//! an access that may fault. [`Hooks::force`] may take the anchor there although nothing failed.
//!
//! **Data.** An evaluation owns one `u64` for each value, zero-extended from the value's type;
//! vectors are not values of the evaluator but stay in the machine. **Invariants.** The version
//! satisfies the verifier; one that does not may panic here. When an anchor is taken everything is
//! read before anything is written. **Callers.** Tests and `dynasour ir`, with a state and a
//! machine that they own; no lock.
//!
//! ```text
//! t1 { anchor a0 = base.0x40 [rax = v1]     run(t1, rax = 5): v1 = 6, the assume fails,
//!   b0(v0: i64 = rax): v1 = add.i64 v0, 1   Leave::Anchor { anchor: a0, reason: Assume, pc: 0x40 }
//!     assume 0 else a0; … }                 with rax = 6
//! ```

pub mod check;
mod machine;
pub(crate) mod natives;
pub mod program;

pub use machine::{Fault, Machine, ModelMachine};
pub(crate) use natives::{InPlace, STORED, Uninterpreted, run as run_native};

use crate::op::Op;
use crate::reach::Point;
use crate::semantics::{self, ARITH_FLAGS};
use crate::types::{AnchorId, BlockId, Gpr, Loc, Operand, Value};
use crate::version::{
    Anchor, Context, DeferredStore, Effects, GuestTerm, Inst, Mem, Term, Trap, Version, Via,
};
use smallvec::SmallVec;
use std::fmt;

/// The guest state that the IR keeps as SSA values; the machine has everything else.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct State {
    /// General-purpose registers by encoding number.
    pub gpr: [u64; 16],
    /// The six arithmetic flags as an rflags image.
    pub flags: u64,
}

impl State {
    /// The value of an SSA location.
    pub fn get(&self, loc: Loc) -> Option<u64> {
        match loc {
            Loc::Gpr(g) => Some(self.gpr[g.number()]),
            Loc::Flags => Some(self.flags),
            _ => None,
        }
    }

    /// Changes the registers so that what a context says of them holds.
    pub fn fit(&mut self, context: &Context) {
        for fact in &context.facts {
            if let Some(gpr) = fact.register() {
                let register = &mut self.gpr[gpr.number()];
                *register = fact.fit(*register);
            }
        }
    }

    /// Sets an SSA location; other locations are the machine's and are left alone.
    pub fn set(&mut self, loc: Loc, value: u64) {
        match loc {
            Loc::Gpr(g) => self.gpr[g.number()] = value,
            Loc::Flags => self.flags = value & ARITH_FLAGS,
            _ => {}
        }
    }
}

impl State {
    /// The first location in which two states differ, in words.
    pub fn difference(&self, other: &State) -> Option<String> {
        let locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index);
        let mut both = locs.filter_map(|loc| Some((loc, self.get(loc)?, other.get(loc)?)));
        both.find(|(_, a, b)| a != b).map(|(loc, a, b)| format!("{loc}: {a:#x} and {b:#x}"))
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for g in Gpr::all() {
            write!(f, "{g}={:#x} ", self.gpr[g.number()])?;
        }
        write!(f, "rflags={:#x}", self.flags)
    }
}

/// Why an anchor was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// The version ends there.
    End,
    /// A predicate did not hold.
    Assume,
    /// An access or a native faulted.
    Fault(Fault),
    /// [`Hooks::force`] asked for it.
    Forced,
}

/// How an evaluation left its version. The guest state is exact in every variant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Leave {
    /// Through an anchor: the varmap is applied, the deferred stores are performed.
    Anchor {
        /// Which.
        anchor: AnchorId,
        /// Why.
        reason: Reason,
        /// Where it was taken.
        point: Point,
        /// The guest pc to continue at.
        pc: u64,
    },
    /// The end of a `base` block: continue at this pc.
    Goto(u64),
    /// A system call; continue at `next` after it.
    Syscall {
        /// pc after the instruction
        next: u64,
    },
    /// An instruction that the runtime emulates.
    Special {
        /// its pc
        pc: u64,
    },
    /// An instruction that raises a signal.
    Trap {
        /// its pc
        pc: u64,
        /// which trap
        trap: Trap,
    },
    /// A `base` instruction faulted. It has had no effect, unless it is a restartable native.
    Fault {
        /// pc of the faulting guest instruction
        pc: u64,
        /// what happened
        fault: Fault,
    },
    /// [`Hooks::at`] asked to stop at this guest instruction, which is not executed.
    Stopped {
        /// its pc
        pc: u64,
    },
    /// The step budget ran out.
    Budget,
}

impl fmt::Display for Leave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Leave::Anchor { anchor, reason, point, pc } => {
                let why = match reason {
                    Reason::End => "its end".to_string(),
                    Reason::Assume => "a failed assumption".to_string(),
                    Reason::Fault(fault) => fault.to_string(),
                    Reason::Forced => "force".to_string(),
                };
                write!(f, "through {anchor} at {point} to {pc:#x} ({why})")
            }
            Leave::Goto(pc) => write!(f, "to {pc:#x}"),
            Leave::Syscall { next } => write!(f, "system call before {next:#x}"),
            Leave::Special { pc } => write!(f, "special instruction at {pc:#x}"),
            Leave::Trap { pc, trap } => write!(f, "trap {trap} at {pc:#x}"),
            Leave::Fault { pc, fault } => write!(f, "fault at {pc:#x}: {fault}"),
            Leave::Stopped { pc } => write!(f, "stopped at {pc:#x}"),
            Leave::Budget => f.write_str("out of steps"),
        }
    }
}

/// Errors that a version which satisfies the verifier cannot cause.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EvalError {
    /// A page of a deferred store must be known to be accessible: rule (c) of docs/design.md, "The
    /// IR", deferred stores.
    #[error("deferred store {store} of {anchor} faulted: {fault}")]
    DeferredStore {
        /// The anchor taken.
        anchor: AnchorId,
        /// Index of the store.
        store: usize,
        /// The fault.
        fault: Fault,
    },
    /// The version does not verify.
    #[error("{point}: {what}")]
    Malformed {
        /// Where.
        point: Point,
        /// What is wrong.
        what: &'static str,
    },
}

/// Observation and interference during an evaluation. The defaults do nothing.
pub trait Hooks<M: Machine> {
    /// Called before each guest instruction of a `base` version; `true` stops there.
    fn at(&mut self, _pc: u64, _state: &State, _machine: &M) -> bool {
        false
    }

    /// Called before each instruction of a trace, with the values that are defined there.
    fn before(&mut self, _inst: &Inst, _point: Point, _values: &[u64], _machine: &M) {}

    /// Called before each opportunity; `true` takes the anchor.
    fn force(&mut self, _anchor: AnchorId, _point: Point) -> bool {
        false
    }

    /// Called when the predicate of an assume does not hold. `false` goes on as if it held.
    fn fails(&mut self, _inst: &Inst, _values: &[u64]) -> bool {
        true
    }

    /// Is [`Hooks::rebuilt`] to be called?
    fn compares(&self) -> bool {
        false
    }

    /// Called before each opportunity, with the guest state that taking the anchor would give, and
    /// with the stores (address, size, value) that it would perform on the machine.
    fn rebuilt(&mut self, _pc: u64, _state: &State, _stores: &[(u64, u32, u64)], _machine: &M) {}

    /// Called before each `print` and `read`.
    fn event(&mut self, _point: Point) {}

    /// Called when the anchor taken has a label in another version, with the values of that
    /// version. A caller that continues there ([`resume`]) returns the number of deferred stores,
    /// counted from the oldest, that stay deferred in the other version. The remaining stores are
    /// performed, and the guest state is left as it is. With `None` control leaves to `base`.
    fn label(&mut self, _via: &Via, _values: &[(Value, u64)]) -> Option<usize> {
        None
    }
}

/// No hooks.
pub struct NoHooks;

impl<M: Machine> Hooks<M> for NoHooks {}

/// Counts opportunities and forces at most one of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ForceNth {
    /// Opportunities seen so far.
    pub seen: u64,
    /// The opportunity (from 0) whose anchor is taken.
    pub nth: Option<u64>,
}

impl<M: Machine> Hooks<M> for ForceNth {
    fn force(&mut self, _anchor: AnchorId, _point: Point) -> bool {
        let force = self.nth == Some(self.seen);
        self.seen += 1;
        force
    }
}

/// Runs `version` from its entry on `state`. `budget` is the number of instructions that may still
/// be executed; the evaluator counts it down.
pub fn run<M: Machine, H: Hooks<M>>(
    version: &Version,
    state: &mut State,
    machine: &mut M,
    hooks: &mut H,
    budget: &mut u64,
) -> Result<Leave, EvalError> {
    let values = vec![0; version.types.len()];
    let mut frame = Frame { version, values, pc: version.region, state, machine, hooks };
    let start = Point { block: BlockId(0), inst: 0 };
    let entry = version
        .blocks
        .first()
        .ok_or(EvalError::Malformed { point: start, what: "no entry block" })?;
    for (loc, v) in version.entry_locs.iter().zip(&entry.params) {
        let value = frame
            .state
            .get(*loc)
            .ok_or(EvalError::Malformed { point: start, what: "entry location" })?;
        frame.values[v.index()] = value;
    }
    frame.run(start, budget)
}

/// Continues in `version` at a point, given its live values there. This is what taking a label does
/// ([`Hooks::label`]).
pub fn resume<M: Machine, H: Hooks<M>>(
    version: &Version,
    point: Point,
    live: &[(Value, u64)],
    state: &mut State,
    machine: &mut M,
    hooks: &mut H,
    budget: &mut u64,
) -> Result<Leave, EvalError> {
    let missing = |what| EvalError::Malformed { point, what };
    let body = version.blocks.get(point.block.index()).ok_or(missing("no such block"))?;
    if point.inst > body.insts.len() {
        return Err(missing("no such instruction"));
    }
    let mut values = vec![0; version.types.len()];
    for (v, value) in live {
        *values.get_mut(v.index()).ok_or(missing("no such value"))? = *value;
    }
    Frame { version, values, pc: version.region, state, machine, hooks }.run(point, budget)
}

/// Address, size and value of stores, oldest first.
type Stores = SmallVec<[(u64, u32, u64); 4]>;

/// One evaluation in progress.
struct Frame<'a, M, H> {
    version: &'a Version,
    values: Vec<u64>,
    /// pc of the current guest instruction of a `base` version.
    pc: u64,
    state: &'a mut State,
    machine: &'a mut M,
    hooks: &'a mut H,
}

impl<M: Machine, H: Hooks<M>> Frame<'_, M, H> {
    fn operand(&self, o: Operand) -> u64 {
        match o {
            Operand::Value(v) => self.values[v.index()],
            Operand::Const(c) => c,
        }
    }

    /// The linear address `seg:[base + index*scale + disp]`.
    fn address(&self, mem: &Mem, base: Operand, index: Operand) -> u64 {
        let segment = mem.seg.map_or(0, |s| self.machine.segment_base(s));
        segment
            .wrapping_add(self.operand(base))
            .wrapping_add(self.operand(index).wrapping_mul(u64::from(mem.scale)))
            .wrapping_add(mem.disp as u64)
    }

    fn run(mut self, start: Point, budget: &mut u64) -> Result<Leave, EvalError> {
        let version = self.version;
        let Point { mut block, inst: mut first } = start;
        loop {
            let body = &version.blocks[block.index()];
            for (i, inst) in body.insts.iter().enumerate().skip(std::mem::take(&mut first)) {
                if *budget == 0 {
                    return Ok(Leave::Budget);
                }
                *budget -= 1;
                if let Some(leave) = self.step(inst, Point { block, inst: i })? {
                    return Ok(leave);
                }
            }
            if *budget == 0 {
                return Ok(Leave::Budget);
            }
            *budget -= 1;
            let point = Point { block, inst: body.insts.len() };
            let (to, args) = match &body.term {
                Term::Jump { to, args } => (*to, args),
                Term::Branch { cond, then, otherwise } => {
                    let edge = if self.operand(*cond) != 0 { then } else { otherwise };
                    (edge.to, &edge.args)
                }
                Term::Exit(anchor) => return self.take(*anchor, Reason::End, point),
                Term::Guest(term) => return Ok(self.guest(term)),
            };
            let incoming: SmallVec<[u64; 20]> = args.iter().map(|a| self.operand(*a)).collect();
            for (param, value) in version.blocks[to.index()].params.iter().zip(incoming) {
                self.values[param.index()] = value;
            }
            block = to;
        }
    }

    fn guest(&self, term: &GuestTerm) -> Leave {
        match *term {
            GuestTerm::Goto(target) | GuestTerm::Ret(target) | GuestTerm::Call { target, .. } => {
                Leave::Goto(self.operand(target))
            }
            GuestTerm::Branch { cond, taken, fall } => {
                Leave::Goto(if self.operand(cond) != 0 { taken } else { fall })
            }
            GuestTerm::Syscall { next } => Leave::Syscall { next },
            GuestTerm::Special { pc } => Leave::Special { pc },
            GuestTerm::Trap { pc, trap } => Leave::Trap { pc, trap },
        }
    }

    /// Executes one instruction. The result is how it left the version, if it did.
    fn step(&mut self, inst: &Inst, point: Point) -> Result<Option<Leave>, EvalError> {
        self.hooks.before(inst, point, &self.values, self.machine);
        if let Some(anchor) = inst.anchor {
            if self.hooks.compares() {
                let (pc, state, stores) = self.rebuild(anchor);
                self.hooks.rebuilt(pc, &state, &stores, self.machine);
            }
            if self.hooks.force(anchor, point) {
                return self.take(anchor, Reason::Forced, point).map(Some);
            }
        }
        let args: SmallVec<[u64; 6]> = inst.args.iter().map(|a| self.operand(*a)).collect();
        match inst.op {
            Op::Load | Op::Store => {
                let mem =
                    inst.mem.as_ref().ok_or(EvalError::Malformed { point, what: "no address" })?;
                let address = self.address(mem, inst.args[0], inst.args[1]);
                let size = inst.ty.bytes();
                if inst.op == Op::Store
                    && self.version.context.broken_by_write(address, size).is_some()
                {
                    return self.fault(inst, Fault::Watched(address), point).map(Some);
                }
                let done = if inst.op == Op::Store {
                    self.machine.store(address, size, args[2])
                } else {
                    self.machine
                        .load(address, size)
                        .map(|v| self.values[inst.defs[0].index()] = v & inst.ty.mask())
                };
                match done {
                    Ok(()) => Ok(None),
                    Err(fault) => self.fault(inst, fault, point).map(Some),
                }
            }
            Op::Get(loc) => {
                let value = self.state.get(loc).unwrap_or_else(|| self.machine.get(loc));
                self.values[inst.defs[0].index()] = value;
                Ok(None)
            }
            Op::Put(loc) => {
                match loc.ssa_index() {
                    Some(_) => self.state.set(loc, args[0]),
                    None => self.machine.put(loc, args[0]),
                }
                Ok(None)
            }
            Op::At => {
                self.pc = args[0];
                Ok(self
                    .hooks
                    .at(self.pc, self.state, self.machine)
                    .then_some(Leave::Stopped { pc: self.pc }))
            }
            Op::Assume if args[0] == 0 && self.hooks.fails(inst, &self.values) => {
                let anchor = inst
                    .anchor
                    .ok_or(EvalError::Malformed { point, what: "assume without anchor" })?;
                self.take(anchor, Reason::Assume, point).map(Some)
            }
            Op::Assume | Op::Poll => Ok(None),
            Op::Print => {
                self.hooks.event(point);
                self.machine.print(args[0]);
                Ok(None)
            }
            Op::Read => {
                self.hooks.event(point);
                self.values[inst.defs[0].index()] = self.machine.read();
                Ok(None)
            }
            Op::Native => self.native(inst, &args, point),
            pure => {
                self.values[inst.defs[0].index()] = semantics::eval(pure, inst.ty, &args);
                Ok(None)
            }
        }
    }

    fn native(
        &mut self,
        inst: &Inst,
        args: &[u64],
        point: Point,
    ) -> Result<Option<Leave>, EvalError> {
        let native = inst.native.and_then(|n| self.version.natives.get(n.index()));
        let native =
            native.ok_or(EvalError::Malformed { point, what: "native without its instruction" })?;
        let (address, inputs) = match &inst.mem {
            Some(mem) => (Some(self.address(mem, inst.args[0], inst.args[1])), &args[2..]),
            None => (None, args),
        };
        let written =
            address.zip(native.mem_size).filter(|_| native.effects.contains(Effects::WRITE));
        if let Some((address, size)) = written
            && self.version.context.broken_by_write(address, size).is_some()
        {
            return self.fault(inst, Fault::Watched(address), point).map(Some);
        }
        // The extent of the write is unknown, so it may hit the address that the context assumes
        // not to be written.
        if native.effects.contains(Effects::WRITE | Effects::UNKNOWN_EXTENT)
            && let Some(address) = self.version.context.watched()
        {
            return self.fault(inst, Fault::Watched(address), point).map(Some);
        }
        let mut outputs: SmallVec<[u64; 4]> = SmallVec::from_elem(0, inst.defs.len());
        match self.machine.native(native, address, inputs, &mut outputs) {
            Ok(()) => {
                for (def, output) in inst.defs.iter().zip(outputs) {
                    let flags = self.version.ty(*def) == crate::types::Ty::Flags;
                    self.values[def.index()] = if flags { output & ARITH_FLAGS } else { output };
                }
                Ok(None)
            }
            Err(fault) => self.fault(inst, fault, point).map(Some),
        }
    }

    fn fault(&mut self, inst: &Inst, fault: Fault, point: Point) -> Result<Leave, EvalError> {
        match inst.anchor {
            Some(anchor) => self.take(anchor, Reason::Fault(fault), point),
            None => Ok(Leave::Fault { pc: self.pc, fault }),
        }
    }

    /// The address, size and value of the stores that an anchor performs, oldest first.
    fn deferred(&self, id: AnchorId) -> Stores {
        let stores = self.version.anchors[id.index()].stores.iter();
        let store = |store: &DeferredStore| {
            let [base, index, value] = store.args;
            (self.address(&store.mem, base, index), store.ty.bytes(), self.operand(value))
        };
        stores.map(store).collect()
    }

    /// What taking an anchor to `base` would give: pc, guest state, and the stores to perform.
    fn rebuild(&self, id: AnchorId) -> (u64, State, Stores) {
        let anchor = &self.version.anchors[id.index()];
        let mut state = self.state.clone();
        for (loc, operand) in &anchor.varmap {
            state.set(*loc, self.operand(*operand));
        }
        (self.operand(anchor.target), state, self.deferred(id))
    }

    /// Leaves through an anchor. All operands are read before the state is written.
    fn take(&mut self, id: AnchorId, reason: Reason, point: Point) -> Result<Leave, EvalError> {
        let anchor: &Anchor = &self.version.anchors[id.index()];
        let pc = self.operand(anchor.target);
        let mut waiting = None;
        if let Some(via) = &anchor.via {
            let values: Vec<(Value, u64)> =
                via.values.iter().map(|(v, o)| (*v, self.operand(*o))).collect();
            waiting = self.hooks.label(via, &values);
        }
        let stores = self.deferred(id);
        for (i, (address, size, value)) in stores.into_iter().enumerate().skip(waiting.unwrap_or(0))
        {
            self.machine.store(address, size, value).map_err(|fault| EvalError::DeferredStore {
                anchor: id,
                store: i,
                fault,
            })?;
        }
        for (loc, operand) in anchor.varmap.iter().filter(|_| waiting.is_none()) {
            let value = self.operand(*operand);
            self.state.set(*loc, value);
        }
        Ok(Leave::Anchor { anchor: id, reason, point, pc })
    }
}
