//! Interpreters as guests: loops of the program that the guest interprets (DESIGN section 6).
//!
//! In an interpreter every iteration of the hot loop passes the same *dispatch head* and goes elsewhere by an indirect
//! jump. What drives that jump, found by following its target backwards to the state at the head, are the *greens*
//! (PyPy's word): the interpreter's own program counter, in a register or a slot of memory. The values of the greens at a
//! passage are its *key*. A recording that passes the head goes on until a key comes again: then the program that is
//! interpreted has gone round a loop of its own, and that is the trace.
//!
//! ```text
//! head: mov eax, [rbx]          greens: rbx       passages: 0x10, 0x14, 0x1c, 0x14
//!       add rbx, 4                                                  └── the loop ──┘
//!       jmp [table + rax*8]
//! ```
//!
//! The trace begins by assuming the key. What the path loads by addresses that follow from it, as far as a dispatch depends
//! on it, is assumed to be what was observed ([`promotions`]), so the addresses of the next loads are known as well, and
//! the dispatches fold away. A guess that was wrong is a guard that fails, no more.

use crate::build::{self, Path, Step, TraceShape};
use crate::observe::Surroundings;
use crate::policy::DefaultPolicy;
use dynasour_ir::{Gpr, GuestTerm, Inst, Loc, Mem, Op, Operand, Term, Ty, Value};
use rustc_hash::{FxHashMap, FxHashSet};

/// Failed recordings before a head is taken to be no interpreter's.
const MAX_FAILURES: u32 = 2;
/// Failed recordings of all heads together that are free, and so many more for each loop found: a search costs as much as
/// compiling some traces.
const FREE_FAILURES: u32 = 8;
/// Most keys of one head with a trace (DESIGN section 5: at most 15 versions).
const MAX_KEYS: usize = 14;
/// Recordings that begin at the head itself as soon as the interpreter comes by.
const EAGER: u32 = 4;
/// Registers within this distance above the stack pointer hold addresses of frames.
const FRAMES: u64 = 1 << 20;
/// An interpreter's place in its program is in fewer locations than this.
const MAX_GREENS: usize = 12;
/// Longer computations of a target are not followed.
const MAX_SLICE: usize = 200;

/// What an interpreter's dispatch depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Green {
    /// A register.
    Register(Gpr),
    /// Memory at a register's value plus a displacement.
    Slot(Gpr, i64, Ty),
}

/// The values of the greens, in their order.
pub type Key = Vec<u64>;

/// What is known of one dispatch head.
#[derive(Debug, Default)]
struct Head {
    greens: Vec<Green>,
    /// Keys with a trace.
    keys: Vec<Key>,
    failures: u32,
    eager: u32,
}

/// What is known of dispatch heads.
#[derive(Debug, Default)]
pub struct DispatchHeads {
    heads: FxHashMap<u64, Head>,
    failures: u32,
    found: u32,
    off: bool,
}

impl DispatchHeads {
    /// Nothing is known yet; with `search` false, nothing will be.
    pub fn new(search: bool) -> DispatchHeads {
        DispatchHeads { off: !search, ..DispatchHeads::default() }
    }

    /// Should a recording that passes `head` go on in search of a loop?
    pub fn wants(&self, head: u64) -> bool {
        self.may_search() && self.heads.get(&head).is_none_or(|h| h.failures < MAX_FAILURES)
    }

    fn may_search(&self) -> bool {
        !self.off && self.failures < FREE_FAILURES * (1 + self.found)
    }

    /// Should a recording begin at `head` now?
    pub fn wants_now(&mut self, head: u64) -> bool {
        let may_search = self.may_search();
        let h = self.heads.entry(head).or_default();
        h.eager += 1;
        may_search && h.failures < MAX_FAILURES && h.keys.len() < MAX_KEYS && h.eager <= EAGER
    }

    /// Has `head` traces of loops?
    pub fn has_loops(&self, head: u64) -> bool {
        self.heads.get(&head).is_some_and(|h| !h.keys.is_empty())
    }

    /// The greens of `head`; empty while they are not known.
    pub fn greens(&self, head: u64) -> &[Green] {
        self.heads.get(&head).map_or(&[], |h| &h.greens)
    }

    pub(crate) fn set_greens(&mut self, head: u64, greens: Vec<Green>) {
        self.heads.entry(head).or_default().greens = greens;
    }

    /// The key of a passage of `head` in this state, if the greens are known and can be read.
    pub fn key(&self, head: u64, around: &Surroundings<'_>) -> Option<Key> {
        let greens = self.greens(head);
        let value = |green: &Green| match *green {
            Green::Register(g) => Some(around.gpr[g.number()]),
            Green::Slot(g, disp, ty) => {
                (around.read)(around.gpr[g.number()].wrapping_add(disp as u64), ty.bytes()).map(|v| v & ty.mask())
            }
        };
        if greens.is_empty() { None } else { greens.iter().map(value).collect() }
    }

    /// Is there a trace for this key?
    pub fn knows(&self, head: u64, key: &Key) -> bool {
        self.heads.get(&head).is_some_and(|h| h.keys.contains(key))
    }

    /// A trace for this key is being made. False if the head has too many.
    pub(crate) fn add(&mut self, head: u64, key: Key) -> bool {
        let h = self.heads.entry(head).or_default();
        let room = h.keys.len() < MAX_KEYS;
        if room {
            h.keys.push(key);
            self.found += 1;
        }
        room
    }

    /// A search found nothing, or the trace that was made last for `head` did not come about.
    pub fn fail(&mut self, head: u64, made: bool) {
        self.failures += 1;
        if let Some(h) = self.heads.get_mut(&head) {
            h.failures += 1;
            if made {
                h.keys.pop();
            }
            if h.keys.is_empty() {
                // Perhaps they were no good.
                h.greens.clear();
            }
        }
    }

    /// The fragments of `head` are gone.
    pub fn forget(&mut self, head: u64) {
        self.heads.remove(&head);
    }

    /// All fragments are gone.
    pub fn clear(&mut self) {
        self.heads.clear();
    }
}

/// The loop of an interpreted program.
#[derive(Clone, Debug)]
pub struct GuestLoop {
    /// Greens that are registers, with their values at the head.
    pub registers: Vec<(Gpr, u64)>,
    /// Registers that held the same at each passage of the head: bit n is register n.
    pub stable: u16,
    /// The block whose end dispatches.
    pub dispatch: u64,
}

/// Is the step's transfer indirect (and no return)?
pub(crate) fn dispatches(step: &Step) -> bool {
    match &step.block.version.blocks[0].term {
        Term::Guest(GuestTerm::Goto(target) | GuestTerm::Call { target, .. }) => target.as_const().is_none(),
        _ => false,
    }
}

/// What drives the dispatches of `steps`, which began at the head with registers `gpr`: the state there that their targets
/// follow from. The path must go through the head twice, for what the second dispatch depends on is often loaded ahead.
pub(crate) fn find_greens(steps: &[Step], gpr: &[u64; 16]) -> Vec<Green> {
    let Some(first) = steps.first() else { return Vec::new() };
    let path = Path {
        head: first.block.pc,
        shape: TraceShape::Linear,
        steps: steps.to_vec(),
        stable: Vec::new(),
        guest: None,
        runs: None,
    };
    let Ok((version, targets)) = build::with_targets(&path, &DefaultPolicy::default()) else { return Vec::new() };
    let entry = &version.blocks[0];
    let defs = Definitions::new(&entry.insts, entry.params.iter().copied().zip(version.entry_locs.iter().copied()));
    let is_frame = |g: Gpr| gpr[g.number()].wrapping_sub(gpr[Gpr::RSP.number()]) < FRAMES;
    let mut greens = Vec::new();
    let mut seen = FxHashSet::default();
    let mut work = targets;
    while let Some(operand) = work.pop() {
        let Operand::Value(v) = operand else { continue };
        if !seen.insert(v) || seen.len() > MAX_SLICE {
            continue;
        }
        if let Some(loc) = defs.param(v) {
            if let Loc::Gpr(g) = loc
                && !is_frame(g)
            {
                greens.push(Green::Register(g));
            }
            continue;
        }
        let Some(inst) = defs.inst(v).filter(|i| i.op == Op::Load || i.op.is_pure()) else { continue };
        match (inst.op, inst.mem) {
            (Op::Load, Some(mem)) => {
                if let Some((g, disp)) = defs.slot(inst, &mem) {
                    greens.push(Green::Slot(g, disp, inst.ty));
                }
                work.extend_from_slice(&inst.args);
            }
            // Which way the program goes is guarded, but not part of where it is.
            (Op::Select, _) => work.extend_from_slice(&inst.args[1..]),
            _ => work.extend_from_slice(&inst.args),
        }
    }
    greens.sort_unstable_by_key(|g| match *g {
        Green::Register(g) => (g.number(), 0),
        Green::Slot(g, disp, _) => (g.number() + 16, disp),
    });
    greens.dedup();
    if greens.len() > MAX_GREENS { Vec::new() } else { greens }
}

/// Where the values of a straight piece of a version come from.
pub(crate) struct Definitions<'v> {
    insts: &'v [Inst],
    at: FxHashMap<Value, usize>,
    params: FxHashMap<Value, Loc>,
}

impl<'v> Definitions<'v> {
    /// For instructions that begin with these values of locations.
    pub fn new(insts: &'v [Inst], params: impl Iterator<Item = (Value, Loc)>) -> Self {
        let at = insts.iter().enumerate().flat_map(|(i, inst)| inst.defs.iter().map(move |d| (*d, i))).collect();
        Definitions { insts, at, params: params.collect() }
    }

    fn inst(&self, v: Value) -> Option<&'v Inst> {
        self.at.get(&v).map(|i| &self.insts[*i])
    }

    fn param(&self, v: Value) -> Option<Loc> {
        self.params.get(&v).copied()
    }

    /// A register's value at the start plus a constant.
    fn based(&self, operand: Operand) -> Option<(Gpr, i64)> {
        let v = operand.as_value()?;
        if let Some(loc) = self.param(v) {
            return if let Loc::Gpr(g) = loc { Some((g, 0)) } else { None };
        }
        let inst = self.inst(v).filter(|i| i.ty == Ty::I64)?;
        let c = inst.args.get(1)?.as_const()? as i64;
        let (g, d) = self.based(inst.args[0])?;
        match inst.op {
            Op::Add => Some((g, d.wrapping_add(c))),
            Op::Sub => Some((g, d.wrapping_sub(c))),
            _ => None,
        }
    }

    /// The address of a load, if it is a register's value at the start plus a constant.
    fn slot(&self, inst: &Inst, mem: &Mem) -> Option<(Gpr, i64)> {
        let index = inst.args[1].as_const()?;
        if mem.seg.is_some() {
            return None;
        }
        let (g, d) = self.based(inst.args[0])?;
        Some((g, d.wrapping_add(mem.disp).wrapping_add(index.wrapping_mul(u64::from(mem.scale)) as i64)))
    }

    /// Does `operand` follow from constants, once the values in `found` are assumed? They are added to it.
    fn follows(&self, operand: Operand, stable: u16, found: &mut FxHashSet<Value>, budget: &mut usize) -> bool {
        let Operand::Value(v) = operand else { return true };
        if found.contains(&v) {
            return true;
        }
        if *budget == 0 {
            return false;
        }
        *budget -= 1;
        let Some(inst) = self.inst(v).filter(|i| i.op == Op::Load || i.op.is_pure()) else { return false };
        match (inst.op, inst.mem) {
            (Op::Load, Some(mem)) => {
                let slot = self.slot(inst, &mem).is_some_and(|(g, _)| stable & 1 << g.number() != 0);
                let known =
                    slot || mem.seg.is_none() && inst.args.iter().all(|a| self.follows(*a, stable, found, budget));
                if known {
                    found.insert(v);
                }
                known
            }
            (Op::Select, _) => {
                // A choice that does not follow is itself assumed; both ways must be known then.
                let mut own = found.clone();
                if !self.follows(inst.args[0], stable, &mut own, budget) {
                    own.clone_from(found);
                    own.extend(inst.args[0].as_value());
                }
                *found = own;
                inst.args[1..].iter().all(|a| self.follows(*a, stable, found, budget))
            }
            _ => inst.args.iter().all(|a| self.follows(*a, stable, found, budget)),
        }
    }
}

/// The values that must be assumed for the targets of `jumps` to be constants. Jumps for which that cannot be are left.
pub(crate) fn promotions(defs: &Definitions<'_>, jumps: &[Operand], stable: u16) -> FxHashSet<Value> {
    let mut all = FxHashSet::default();
    for jump in jumps {
        let mut found = all.clone();
        let mut budget = MAX_SLICE;
        if defs.follows(*jump, stable, &mut found, &mut budget) {
            all = found;
        }
    }
    all
}
