//! The reference trace builder: turns a recorded path of `base` into a trace without any
//! optimisation.
//!
//! Registers and flags become SSA values. An instruction that may fault, and every guard, gets an
//! anchor at its own guest instruction; if the random source says so, an older anchor that is still
//! in reach (unrestricted deoptimisation). A path that returns to its start becomes a loop, with
//! one iteration peeled if the options ask for it. [`build_all`] makes one version of many blocks
//! with their branches.
//!
//! The builder owns the version until it is finished. Invariant: the trace is equivalent to `base`
//! and transparent by construction. Tests and the mutation tests call it; no lock.
//!
//! ```text
//! at 0x1010; v0 = get.i64 rax; put.i64 rax, v0 + 1  v20 = add.i64 v0, 1        (rax is v20 now)
//! at 0x1020; branch v3 then 0x1000 else 0x1030      assume v21 else a1         (a1 is at 0x1020)
//! ```

use super::Rng;
use crate::eval::check::Code;
use crate::eval::{Leave, Machine, NoHooks, State, run};
use crate::op::Op;
use crate::origin::{Origin, OriginKind, Origins};
use crate::reach::{ends_reach, may_fault};
use crate::types::{AnchorId, BlockId, Loc, NativeId, Operand, Ty, Value};
use crate::version::{Anchor, Block, Edge, GuestTerm, Inst, Term, Version};

/// A path through `base`.
#[derive(Clone)]
pub struct Path {
    /// The blocks, and the pc to which each went.
    pub blocks: Vec<(Version, u64)>,
    /// Did it come back to its start?
    pub is_loop: bool,
}

/// Runs the program from `pc` and records the blocks. Ends when the path returns to its start, when
/// a block leaves otherwise than to a pc, or after `limit` blocks. `None` if the first block cannot
/// be recorded.
pub fn record<M: Machine>(
    code: &mut dyn Code,
    start: u64,
    state: &mut State,
    machine: &mut M,
    limit: usize,
) -> Option<Path> {
    let mut path = Path { blocks: Vec::new(), is_loop: false };
    let mut pc = start;
    while path.blocks.len() < limit {
        let Some(block) = code.block(pc) else { break };
        let block = block.clone();
        let Ok(Leave::Goto(next)) = run(&block, state, machine, &mut NoHooks, &mut 10_000) else {
            break;
        };
        path.blocks.push((block, next));
        pc = next;
        if pc == start {
            path.is_loop = true;
            break;
        }
    }
    (!path.blocks.is_empty()).then_some(path)
}

/// How to build a trace.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// For a loop: peel the first iteration.
    pub peel: bool,
    /// Use an older anchor in reach in one of this many cases; 0: never.
    pub older_anchor: usize,
}

struct TraceBuilder<'a> {
    version: Version,
    insts: Vec<Inst>,
    /// The guest state, by SSA index.
    env: [Operand; Loc::SSA_COUNT],
    /// The locations that the path writes.
    written: [bool; Loc::SSA_COUNT],
    /// The guest instruction being translated, and the state before it; `None` after an effect of
    /// it.
    here: Option<(u64, [Operand; Loc::SSA_COUNT])>,
    /// The anchor at `here`, once made.
    own_anchor: Option<AnchorId>,
    in_reach: Vec<AnchorId>,
    options: Options,
    rng: &'a mut Rng,
}

/// The trace of a path. `None` if an instruction may fault after an effect of its own, which the
/// builder does not support.
pub fn build(path: &Path, name: &str, options: Options, rng: &mut Rng) -> Option<Version> {
    build_tree(std::slice::from_ref(path), name, options, rng)
}

/// The trace of several paths from one start, the first of which is the main path. If that is a loop, the
/// trace branches where the others leave it; else it is built alone. `None` as for [`build`].
pub fn build_tree(paths: &[Path], name: &str, options: Options, rng: &mut Rng) -> Option<Version> {
    let path = paths.first()?;
    let (first, _) = path.blocks.first()?;
    let mut version = Version::new(name, first.region);
    let mut written = [false; Loc::SSA_COUNT];
    let blocks = paths.iter().flat_map(|path| &path.blocks);
    for inst in blocks.flat_map(|(b, _)| &b.blocks[0].insts) {
        if let Op::Put(loc) = inst.op {
            written[loc.ssa_index()?] = true;
        }
    }
    version.entry_locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index).collect();
    let params: Vec<Value> =
        (0..Loc::SSA_COUNT).map(|i| version.value(Loc::from_ssa_index(i).ty())).collect();
    let mut env = [Operand::Const(0); Loc::SSA_COUNT];
    env.iter_mut().zip(&params).for_each(|(slot, v)| *slot = (*v).into());
    let mut b = TraceBuilder {
        version,
        insts: Vec::new(),
        env,
        written,
        here: None,
        own_anchor: None,
        in_reach: Vec::new(),
        options,
        rng,
    };
    if !path.is_loop {
        b.path(path)?;
        let (_, end) = path.blocks.last()?;
        let anchor = b.new_anchor(*end, b.env);
        b.finish(params, Term::Exit(anchor));
        return Some(b.version);
    }
    if options.peel {
        b.path(path)?;
    }
    let args = b.written_operands();
    b.finish(params, Term::Jump { to: BlockId(1), args });
    let params = b.fresh_params();
    b.in_reach.clear();
    let head = b.new_anchor(first.region, b.env);
    let mut poll = Inst::new(Op::Poll, Ty::I64, None, &[]);
    poll.anchor = Some(head);
    b.insts.push(poll);
    b.in_reach.push(head);
    let paths: Vec<&Path> = paths.iter().collect();
    b.grow(params, &paths, 0)?;
    Some(b.version)
}

/// A version of all blocks that control may reach from `start` (at most `limit`), with their
/// branches. Every block takes all locations that the version writes as parameters and polls at its
/// start, so that it has an anchor there. Control leaves to other blocks through exits. `None` as
/// for [`build`], or if there is no block.
pub fn build_all(
    code: &mut dyn Code,
    start: u64,
    name: &str,
    limit: usize,
    options: Options,
    rng: &mut Rng,
) -> Option<Version> {
    let (pcs, blocks) = reachable(code, start, limit)?;
    let mut version = Version::new(name, start);
    version.entry_locs = (0..Loc::SSA_COUNT).map(Loc::from_ssa_index).collect();
    let params: Vec<Value> =
        (0..Loc::SSA_COUNT).map(|i| version.value(Loc::from_ssa_index(i).ty())).collect();
    let mut env = [Operand::Const(0); Loc::SSA_COUNT];
    env.iter_mut().zip(&params).for_each(|(slot, v)| *slot = (*v).into());
    let mut written = [false; Loc::SSA_COUNT];
    for inst in blocks.iter().flat_map(|b| &b.blocks[0].insts) {
        if let Op::Put(loc) = inst.op {
            written[loc.ssa_index()?] = true;
        }
    }
    let (insts, in_reach) = (Vec::new(), Vec::new());
    let mut b = TraceBuilder {
        version,
        insts,
        env,
        written,
        here: None,
        own_anchor: None,
        in_reach,
        options,
        rng,
    };
    let args = b.written_operands();
    b.finish(params, Term::Jump { to: BlockId(1), args });
    // Exits are blocks that come after the others.
    let mut exits: Vec<u64> = Vec::new();
    for (i, base) in blocks.iter().enumerate() {
        let params = b.fresh_params();
        b.in_reach.clear();
        let head = b.new_anchor(pcs[i], b.env);
        let mut poll = Inst::new(Op::Poll, Ty::I64, None, &[]);
        poll.anchor = Some(head);
        b.insts.push(poll);
        b.in_reach.push(head);
        let mut map = vec![Operand::Const(0); base.types.len()];
        b.body(base, &mut map)?;
        let mut edge = |pc: u64| {
            let to = pcs.iter().position(|p| *p == pc).map(|p| p + 1).unwrap_or_else(|| {
                let known = exits.iter().position(|p| *p == pc);
                1 + pcs.len()
                    + known.unwrap_or_else(|| {
                        exits.push(pc);
                        exits.len() - 1
                    })
            });
            Edge { to: BlockId(to as u32), args: b.written_operands() }
        };
        let term = match &base.blocks[0].term {
            Term::Guest(GuestTerm::Branch { cond, taken, fall }) => Term::Branch {
                cond: renamed(&map, *cond),
                then: edge(*taken),
                otherwise: edge(*fall),
            },
            Term::Guest(
                GuestTerm::Goto(o) | GuestTerm::Ret(o) | GuestTerm::Call { target: o, .. },
            ) => match renamed(&map, *o) {
                Operand::Const(to) => {
                    let Edge { to, args } = edge(to);
                    Term::Jump { to, args }
                }
                target => {
                    let anchor = b.new_anchor(0, b.env);
                    b.version.anchors[anchor.index()].target = target;
                    Term::Exit(anchor)
                }
            },
            // Any other block is left before its last instruction, which must not have had an
            // effect yet.
            _ => {
                let (pc, env) = b.here?;
                Term::Exit(b.new_anchor(pc, env))
            }
        };
        b.finish(params, term);
    }
    for pc in exits {
        let params = b.fresh_params();
        let anchor = b.new_anchor(pc, b.env);
        b.finish(params, Term::Exit(anchor));
    }
    Some(b.version)
}

/// The blocks that control may reach from `start`, at most `limit`, with their pcs, in order of
/// discovery: block i of the version is the i-th, after the entry.
fn reachable(code: &mut dyn Code, start: u64, limit: usize) -> Option<(Vec<u64>, Vec<Version>)> {
    let mut pcs = vec![start];
    let mut blocks: Vec<Version> = Vec::new();
    while let Some(pc) = pcs.get(blocks.len()).copied() {
        let block = code.block(pc)?.clone();
        let targets = match &block.blocks[0].term {
            Term::Guest(GuestTerm::Branch { taken, fall, .. }) => vec![*taken, *fall],
            Term::Guest(GuestTerm::Goto(Operand::Const(to))) => vec![*to],
            Term::Guest(GuestTerm::Call { target: Operand::Const(to), .. }) => vec![*to],
            _ => Vec::new(),
        };
        for target in targets {
            if pcs.len() < limit && !pcs.contains(&target) && code.block(target).is_some() {
                pcs.push(target);
            }
        }
        blocks.push(block);
    }
    Some((pcs, blocks))
}

/// A value of the base block as an operand of the trace.
fn renamed(map: &[Operand], o: Operand) -> Operand {
    match o {
        Operand::Value(v) => map[v.index()],
        Operand::Const(_) => o,
    }
}

impl TraceBuilder<'_> {
    fn finish(&mut self, params: Vec<Value>, term: Term) {
        let insts = std::mem::take(&mut self.insts);
        self.version.blocks.push(Block { params, insts, term });
    }

    /// Gives every written location a new value, a parameter of the block that is being filled.
    fn fresh_params(&mut self) -> Vec<Value> {
        let mut params = Vec::new();
        for i in (0..Loc::SSA_COUNT).filter(|i| self.written[*i]) {
            let param = self.version.value(Loc::from_ssa_index(i).ty());
            self.env[i] = param.into();
            params.push(param);
        }
        params
    }

    fn written_operands(&self) -> Vec<Operand> {
        (0..Loc::SSA_COUNT).filter(|i| self.written[*i]).map(|i| self.env[i]).collect()
    }

    fn new_anchor(&mut self, pc: u64, env: [Operand; Loc::SSA_COUNT]) -> AnchorId {
        let mut varmap: Vec<(Loc, Operand)> = (0..Loc::SSA_COUNT)
            .filter(|i| self.written[*i])
            .map(|i| (Loc::from_ssa_index(i), env[i]))
            .collect();
        varmap.sort_by_key(|(loc, _)| *loc);
        self.version.anchor(Anchor::new(Operand::Const(pc), varmap))
    }

    /// An anchor for the instruction being translated.
    fn anchor(&mut self) -> Option<AnchorId> {
        let older = self.options.older_anchor;
        if older > 0 && !self.in_reach.is_empty() && self.rng.one_in(older) {
            let in_reach = std::mem::take(&mut self.in_reach);
            let anchor = self.rng.pick(&in_reach);
            self.in_reach = in_reach;
            return Some(anchor);
        }
        if let Some(anchor) = self.own_anchor {
            return Some(anchor);
        }
        let (pc, env) = self.here?;
        let anchor = self.new_anchor(pc, env);
        self.own_anchor = Some(anchor);
        self.in_reach.push(anchor);
        Some(anchor)
    }

    fn assume(&mut self, predicate: Operand) -> Option<()> {
        let step = self.version.anchors.len();
        let kind = OriginKind::ALL[step % OriginKind::ALL.len()];
        let origin = Origin { kind, pc: self.version.region, step: Some(step as u32) };
        let anchor = self.anchor()?;
        self.insts.push(Inst::assume(predicate, Some(anchor), Origins::of(origin)));
        Some(())
    }

    fn pure(&mut self, op: Op, ty: Ty, result: Ty, args: &[Operand]) -> Operand {
        let v = self.version.value(result);
        self.insts.push(Inst::new(op, ty, Some(v), args));
        v.into()
    }

    fn path(&mut self, path: &Path) -> Option<()> {
        path.blocks.iter().try_for_each(|(block, next)| self.block(block, *next))
    }

    /// Builds what the paths, which have the same blocks so far, do from the n-th block on.
    fn grow(&mut self, params: Vec<Value>, paths: &[&Path], from: usize) -> Option<()> {
        let main = paths[0];
        for n in from..main.blocks.len() {
            let (base, next) = &main.blocks[n];
            let (same, others): (Vec<&Path>, Vec<&Path>) =
                paths.iter().partition(|path| path.blocks.get(n).is_some_and(|b| b.1 == *next));
            let Some((_, other)) = others.first().and_then(|path| path.blocks.get(n)) else {
                self.block(base, *next)?;
                continue;
            };
            let mut map = vec![Operand::Const(0); base.types.len()];
            self.body(base, &mut map)?;
            let cond = match &base.blocks[0].term {
                Term::Guest(GuestTerm::Branch { cond, taken, .. }) if next == taken => {
                    renamed(&map, *cond)
                }
                Term::Guest(GuestTerm::Branch { cond, .. }) => {
                    let cond = renamed(&map, *cond);
                    self.pure(Op::Eq, Ty::I1, Ty::I1, &[cond, Operand::Const(0)])
                }
                Term::Guest(GuestTerm::Goto(o) | GuestTerm::Ret(o)) => {
                    let target = renamed(&map, *o);
                    self.pure(Op::Eq, Ty::I64, Ty::I1, &[target, Operand::Const(*next)])
                }
                _ => return None,
            };
            let this = self.version.blocks.len();
            let edge = |to: usize| Edge { to: BlockId(to as u32), args: Vec::new() };
            let term = Term::Branch { cond, then: edge(this + 1), otherwise: edge(0) };
            self.finish(params, term);
            let (env, here) = (self.env, self.here);
            self.start_child();
            self.grow(Vec::new(), &same, n + 1)?;
            let second = self.version.blocks.len() as u32;
            if let Term::Branch { otherwise, .. } = &mut self.version.blocks[this].term {
                otherwise.to = BlockId(second);
            }
            (self.env, self.here) = (env, here);
            self.start_child();
            // After an indirect jump the other path's target is assumed.
            if let Term::Guest(GuestTerm::Goto(o) | GuestTerm::Ret(o)) = &base.blocks[0].term {
                let target = renamed(&map, *o);
                let holds = self.pure(Op::Eq, Ty::I64, Ty::I1, &[target, Operand::Const(*other)]);
                self.assume(holds)?;
            }
            let others: Vec<&Path> = others
                .into_iter()
                .filter(|path| path.blocks.get(n).is_some_and(|b| b.1 == *other))
                .collect();
            return self.grow(Vec::new(), &others, n + 1);
        }
        let term = match main.is_loop {
            true => Term::Jump { to: BlockId(1), args: self.written_operands() },
            false => Term::Exit(self.new_anchor(main.blocks.last()?.1, self.env)),
        };
        self.finish(params, term);
        Some(())
    }

    /// A block behind a branch begins. It has its own anchors.
    fn start_child(&mut self) {
        self.in_reach.clear();
        self.own_anchor = None;
    }

    fn block(&mut self, base: &Version, next: u64) -> Option<()> {
        let mut map = vec![Operand::Const(0); base.types.len()];
        self.body(base, &mut map)?;
        let rename = renamed;
        match &base.blocks[0].term {
            Term::Guest(GuestTerm::Branch { cond, taken, fall }) if taken != fall => {
                let cond = rename(&map, *cond);
                let flip = u64::from(next != *taken);
                let holds = if flip == 0 {
                    cond
                } else {
                    self.pure(Op::Eq, Ty::I1, Ty::I1, &[cond, Operand::Const(0)])
                };
                self.assume(holds)
            }
            Term::Guest(
                GuestTerm::Goto(o) | GuestTerm::Ret(o) | GuestTerm::Call { target: o, .. },
            ) => match rename(&map, *o) {
                Operand::Const(_) => Some(()),
                target => {
                    let holds = self.pure(Op::Eq, Ty::I64, Ty::I1, &[target, Operand::Const(next)]);
                    self.assume(holds)
                }
            },
            _ => Some(()),
        }
    }

    /// Translates the instructions of a base block; `map` holds its values as operands of the
    /// trace.
    fn body(&mut self, base: &Version, map: &mut [Operand]) -> Option<()> {
        for inst in &base.blocks[0].insts {
            match inst.op {
                Op::At => {
                    self.here = inst.args[0].as_const().map(|pc| (pc, self.env));
                    self.own_anchor = None;
                }
                Op::Get(loc) => map[inst.defs[0].index()] = self.env[loc.ssa_index()?],
                Op::Put(loc) => self.env[loc.ssa_index()?] = renamed(map, inst.args[0]),
                _ => self.inst(base, inst, map, renamed)?,
            }
        }
        Some(())
    }

    /// Copies one instruction under the renaming.
    fn inst(
        &mut self,
        base: &Version,
        inst: &Inst,
        map: &mut [Operand],
        rename: impl Fn(&[Operand], Operand) -> Operand,
    ) -> Option<()> {
        let mut copy = inst.clone();
        copy.args.iter_mut().for_each(|o| *o = rename(map, *o));
        for def in &mut copy.defs {
            let new = self.version.value(base.ty(*def));
            map[def.index()] = new.into();
            *def = new;
        }
        if may_fault(base, inst) {
            copy.anchor = Some(self.anchor()?);
        }
        if let Some(n) = inst.native {
            copy.native = Some(NativeId(self.version.natives.len() as u32));
            self.version.natives.push(base.natives[n.index()].clone());
        }
        self.insts.push(copy);
        if ends_reach(base, inst) {
            self.in_reach.clear();
            self.own_anchor = None;
            self.here = None;
        }
        Some(())
    }
}
