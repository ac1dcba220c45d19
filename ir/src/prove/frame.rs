//! Symbolic execution of the instructions of a version: terms instead of numbers.
//!
//! One function serves both sides of a proof. The version that is proven *claims*: what it accesses can be
//! accessed, what it assumes holds, or it would have left. The version that it is compared with must be
//! *shown* to come as far: what it accesses has been accessed, what it assumes is known.
//!
//! **Data.** A [`Frame`] is the state of an execution. **Callers.** One proof.
//!
//! ```text
//! v3 = load.i64 [v1 + 8]      claims: 8 bytes at rdi + 8 are accessible; v3 is the load
//! store.i64 [v1], v3          memory is what it was, after a store of v3 at rdi
//! ```

use super::facts::{Contents, Facts, read};
use super::questions::Questions;
use super::term::{App, AppNode, InPlace, Memory, MemoryNode, Symbol, Term, Terms};
use crate::eval::natives::STORED;
use crate::op::{ArgTy, Op};
use crate::origin::OriginKind;
use crate::reach::may_fault;
use crate::types::{AnchorId, BlockId, Gpr, Loc, Operand, Ty, Value};
use crate::validate::Tables;
use crate::version::{Effects, Fact, Inst, Mem, Segment, Split, Version};
use rustc_hash::FxHashMap;

/// Pseudo instructions without a pc of their own, by these numbers.
const PRINT: u64 = 1;
const READ: u64 = 2;
const GET: u64 = 0x100;
const PUT: u64 = 0x200;
/// Accesses that another thread may see, or whose memory it may have changed.
const LOAD: u64 = 3;
const STORE: u64 = 4;
/// A read of guest code by a guard that compares it with what was recorded.
const FETCH: u64 = 5;
/// The position of a native's flags among its results.
const FLAGS: u32 = 1 << 15;

/// The state of an execution.
#[derive(Clone)]
pub struct Frame {
    /// The values of the version.
    pub values: Vec<Option<Term>>,
    /// Guest registers and flags; of a trace, those at the entry.
    pub locs: [Term; Loc::SSA_COUNT],
    /// Memory.
    pub memory: Memory,
    /// What is not SSA, and the stores that other threads see.
    pub in_place: InPlace,
    /// What has been loaded that other threads may change.
    pub loads: InPlace,
    /// The words of the thread's context, if machine code is executed. GS points to them.
    pub context: Option<Memory>,
}

impl Frame {
    /// At the entry, with no value yet.
    pub fn new(start: &Position) -> Frame {
        let Position { locs, memory, in_place, loads, .. } = *start;
        Frame { values: Vec::new(), locs, memory, in_place, loads, context: None }
    }

    /// Forgets the values in which another execution differs. Are there any?
    pub fn meet(&mut self, other: &Frame) -> bool {
        let mut less = false;
        for (ours, theirs) in self.values.iter_mut().zip(&other.values) {
            if ours.is_some() && ours != theirs {
                *ours = None;
                less = true;
            }
        }
        less
    }
}

/// A state before a guest instruction, or where a version may leave.
#[derive(Clone, Debug)]
pub struct Position {
    pub pc: Term,
    pub locs: [Term; Loc::SSA_COUNT],
    pub memory: Memory,
    pub in_place: InPlace,
    /// Not part of the state: what was loaded may be loaded again.
    pub loads: InPlace,
}

/// Which side of a proof an execution is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// What is executed did not leave.
    Claims,
    /// What is executed must be shown not to leave.
    Shown,
}

/// What both executions share.
pub struct World<'a> {
    pub terms: Terms,
    pub contents: Contents,
    pub questions: Questions<'a>,
    /// Does no other thread write memory? If one may, what is loaded is anything, unless it was stored here,
    /// and the order of accesses counts.
    pub private: bool,
    /// Are guards that read guest code told from other accesses? Those of machine code cannot be.
    pub fetches: bool,
    /// The natives that the version that is proven has executed, by their pc.
    pub executed: FxHashMap<u64, Vec<App>>,
    /// Of the machine code that is proven.
    pub tables: Tables,
}

/// Why an execution cannot go on, in words.
pub type Stuck = String;

impl World<'_> {
    /// An operand of this type.
    pub fn operand(&mut self, frame: &Frame, operand: Operand, ty: Ty) -> Result<Term, Stuck> {
        match operand {
            Operand::Const(c) => Ok(self.terms.number(c, ty.bits())),
            Operand::Value(v) => frame
                .values
                .get(v.index())
                .copied()
                .flatten()
                .ok_or_else(|| format!("{v} differs between the ways to a loop's head")),
        }
    }

    /// A linear address.
    pub fn address(
        &mut self,
        frame: &Frame,
        facts: &Facts,
        mem: &Mem,
        base: Operand,
        index: Operand,
    ) -> Result<Term, Stuck> {
        let base = self.operand(frame, base, Ty::I64)?;
        let index = self.operand(frame, index, Ty::I64)?;
        let factor = u64::from(mem.scale);
        let mut address = self.terms.sum((base, 1), (index, factor), mem.disp as u64);
        if let Some(segment) = mem.seg {
            let start = self.base(frame, segment);
            address = self.terms.sum((address, 1), (start, 1), 0);
        }
        Ok(facts.seen(&mut self.terms, address))
    }

    /// The base of a segment, which nothing in a version changes.
    fn base(&mut self, frame: &Frame, segment: Segment) -> Term {
        match (frame.context, segment) {
            (Some(_), Segment::Gs) => self.terms.number(self.tables.context.start, 64),
            _ => self.terms.symbol(Symbol::Base(segment), 64),
        }
    }

    /// The words of the context, if machine code is executed and the address is one of theirs.
    pub fn context(&self, frame: &Frame, address: Term) -> Option<Memory> {
        let is_within = |at| self.tables.context.contains(&at);
        frame.context.filter(|_| self.terms.constant(address).is_some_and(is_within))
    }

    /// What a version assumes of the registers that it is entered with.
    pub fn assume_context(
        &mut self,
        facts: &mut Facts,
        version: &Version,
        locs: &[Term; Loc::SSA_COUNT],
    ) {
        for fact in &version.context.facts {
            let terms = &mut self.terms;
            match *fact {
                Fact::RegEquals(gpr, value) => {
                    let value = terms.number(value, 64);
                    let fact = terms.equal(locs[gpr.number()], value);
                    facts.learn(terms, fact);
                }
                Fact::RegInRange { gpr, min, max } => {
                    let (min, max) = (terms.number(min, 64), terms.number(max, 64));
                    let low = terms.pure(Op::LeU, Ty::I64, &[min, locs[gpr.number()]]);
                    let high = terms.pure(Op::LeU, Ty::I64, &[locs[gpr.number()], max]);
                    facts.learn(terms, low);
                    facts.learn(terms, high);
                }
                Fact::RegBits { gpr, mask, value } => {
                    let (mask, value) = (terms.number(mask, 64), terms.number(value, 64));
                    let bits = terms.pure(Op::And, Ty::I64, &[locs[gpr.number()], mask]);
                    let fact = terms.equal(bits, value);
                    facts.learn(terms, fact);
                }
                Fact::PrivateMemory | Fact::MemEquals { .. } => {}
            }
        }
    }

    /// What is in memory at an address.
    pub fn read(&mut self, facts: &Facts, memory: Memory, address: Term, bytes: u32) -> Term {
        let World { terms, contents, questions, .. } = self;
        let mut ask = |terms: &mut Terms, facts: &Facts, one: (Term, u32), two: (Term, u32)| {
            questions.apart(terms, facts, one, two)
        };
        let value = read(terms, facts, contents, memory, (address, bytes), &mut ask);
        facts.seen(terms, value)
    }

    /// Memory after a store.
    pub fn store(&mut self, below: Memory, address: Term, value: Term) -> Memory {
        let bytes = self.terms.bits(value).div_ceil(8);
        if let MemoryNode::Store { below: under, address: last, bytes: size, .. } =
            *self.terms.memory_node(below)
            && (last, size) == (address, bytes)
        {
            return self.store(under, address, value);
        }
        self.terms.memory(MemoryNode::Store { below, address, bytes, value })
    }

    /// Notes an access, or shows that it does not fault; the address as the version has it.
    fn access(
        &mut self,
        facts: &mut Facts,
        side: Side,
        (address, bytes): (Term, u32),
        write: bool,
    ) -> Result<Term, Stuck> {
        if side == Side::Claims {
            facts.access(address, bytes, write);
            return Ok(address);
        }
        if facts.accessible(&mut self.terms, address, bytes, write) || facts.contradict {
            return Ok(address);
        }
        let mut alike: Vec<Term> =
            facts.accessed().filter(|(_, size)| *size == bytes).map(|(at, _)| at).collect();
        alike.reverse();
        alike.dedup();
        let address = facts.rewritten(&mut self.terms, address);
        for other in alike {
            let theirs = facts.rewritten(&mut self.terms, other);
            let alike = !self.terms.differ(address, theirs)
                || self.questions.of_the_same(&self.terms, address, theirs);
            if alike
                && facts.accessible(&mut self.terms, other, bytes, write)
                && self.equal(facts, address, other)
            {
                return Ok(other);
            }
        }
        let what = if write { "writes" } else { "reads" };
        let at = self.terms.words(address, 4);
        Err(format!("{what} {bytes} bytes that the version has not accessed, at {at}"))
    }

    /// Executes an instruction that is no guard and no mark.
    pub fn step(
        &mut self,
        frame: &mut Frame,
        facts: &mut Facts,
        version: &Version,
        inst: &Inst,
        side: Side,
    ) -> Result<(), Stuck> {
        let value = match inst.op {
            Op::Load | Op::Store => {
                let mem = inst.mem.ok_or("an access without an address")?;
                let address = self.address(frame, facts, &mem, inst.args[0], inst.args[1])?;
                let bytes = inst.ty.bytes();
                if let Some(words) = self.context(frame, address) {
                    if inst.op == Op::Store {
                        let value = self.operand(frame, inst.args[2], inst.ty)?;
                        frame.context = Some(self.store(words, address, value));
                    } else if let Some(def) = inst.def() {
                        frame.values[def.index()] = Some(self.read(facts, words, address, bytes));
                    }
                    return Ok(());
                }
                let address = self.access(facts, side, (address, bytes), inst.op == Op::Store)?;
                if inst.op == Op::Store {
                    let value = self.operand(frame, inst.args[2], inst.ty)?;
                    let value = facts.seen(&mut self.terms, value);
                    self.watch(facts, version, address, bytes, side);
                    frame.memory = self.store(frame.memory, address, value);
                    if !self.may_wait(address, value) {
                        self.seen_by_others(frame, facts, STORE, vec![address, value], side);
                    }
                    return Ok(());
                }
                let value = self.read(facts, frame.memory, address, bytes);
                match self.private || !self.questions.has_loads(&self.terms, value) {
                    true => value,
                    // The processor reads the code, too. What is found there says nothing about what other
                    // accesses find.
                    false if self.fetches && is_fetch(version, inst) => {
                        let node = AppNode {
                            ip: FETCH,
                            inputs: vec![address],
                            in_place: Some(frame.loads),
                            memory: None,
                        };
                        let app = self.execution(facts, node, side);
                        self.terms.output(app, 0, 8 * bytes)
                    }
                    false => {
                        let app = self.seen_by_others(frame, facts, LOAD, vec![address], side);
                        self.terms.output(app, 0, 8 * bytes)
                    }
                }
            }
            Op::Get(loc) => match (loc.ssa_index(), loc) {
                (Some(index), _) => frame.locs[index],
                (None, Loc::FsBase) => self.base(frame, Segment::Fs),
                (None, Loc::GsBase) => self.base(frame, Segment::Gs),
                (None, _) => {
                    let in_place = Some(frame.in_place);
                    let ip = GET + loc_number(loc);
                    let app = self.app(ip, Vec::new(), in_place, None);
                    self.terms.output(app, 0, 64)
                }
            },
            Op::Put(loc @ (Loc::FsBase | Loc::GsBase)) => {
                return Err(format!("{loc} is changed"));
            }
            Op::Put(loc) => {
                let value = self.operand(frame, inst.args[0], inst.ty)?;
                match loc.ssa_index() {
                    Some(index) => frame.locs[index] = value,
                    None => {
                        let app = self.app(PUT + loc_number(loc), vec![value], None, None);
                        frame.in_place = self.terms.in_place_after(frame.in_place, app);
                    }
                }
                return Ok(());
            }
            Op::Print | Op::Read => {
                let printed = inst.args.iter().map(|a| self.operand(frame, *a, Ty::I64));
                let inputs = printed.collect::<Result<Vec<_>, _>>()?;
                let ip = if inst.op == Op::Print { PRINT } else { READ };
                let app = self.app(ip, inputs, Some(frame.in_place), None);
                frame.in_place = self.terms.in_place_after(frame.in_place, app);
                if inst.op == Op::Print {
                    return Ok(());
                }
                self.terms.output(app, 0, 64)
            }
            Op::Native => return self.native(frame, facts, version, inst, side),
            Op::At | Op::Assume | Op::Poll => return Ok(()),
            op => {
                let (types, _) = op.signature();
                let mut args = Vec::with_capacity(inst.args.len());
                for (operand, ty) in inst.args.iter().zip(types) {
                    let ty = match ty {
                        ArgTy::Same => inst.ty,
                        ArgTy::Is(ty) => *ty,
                    };
                    let arg = self.operand(frame, *operand, ty)?;
                    args.push(facts.seen(&mut self.terms, arg));
                }
                self.terms.pure(op, inst.ty, &args)
            }
        };
        let value = facts.seen(&mut self.terms, value);
        if let Some(def) = inst.def() {
            frame.values[def.index()] = Some(value);
        }
        Ok(())
    }

    /// A version that goes on after a store has not written what its context assumes not to be written.
    fn watch(
        &mut self,
        facts: &mut Facts,
        version: &Version,
        address: Term,
        bytes: u32,
        side: Side,
    ) {
        if side == Side::Shown {
            return;
        }
        for fact in &version.context.facts {
            if let Fact::MemEquals { ty, address: watched, .. } = *fact {
                let watched = self.terms.number(watched, 64);
                let apart = self.terms.apart((address, bytes), (watched, ty.bytes()));
                facts.learn(&mut self.terms, apart);
            }
        }
    }

    /// Gives a block's parameters their values.
    pub fn enter(
        &mut self,
        frame: &mut Frame,
        version: &Version,
        to: BlockId,
        args: &[Operand],
    ) -> Result<(), Stuck> {
        let params = &version.blocks.get(to.index()).ok_or("a block that does not exist")?.params;
        let values: Result<Vec<Term>, Stuck> = params
            .iter()
            .zip(args)
            .map(|(param, arg)| self.operand(frame, *arg, version.ty(*param)))
            .collect();
        for (param, value) in params.iter().zip(values?) {
            frame.values[param.index()] = Some(value);
        }
        Ok(())
    }

    /// The state that an anchor of a version rebuilds.
    pub fn rebuilt(
        &mut self,
        frame: &Frame,
        facts: &Facts,
        version: &Version,
        anchor: AnchorId,
        side: Side,
    ) -> Result<Position, Stuck> {
        let anchor = &version.anchors[anchor.index()];
        let pc = self.operand(frame, anchor.target, Ty::I64)?;
        let pc = facts.seen(&mut self.terms, pc);
        let mut locs = frame.locs;
        for (loc, operand) in &anchor.varmap {
            let index = loc.ssa_index().ok_or("a varmap of what is in place")?;
            let value = self.operand(frame, *operand, loc.ty())?;
            locs[index] = facts.seen(&mut self.terms, value);
        }
        let mut memory = frame.memory;
        for store in &anchor.stores {
            let [base, index, value] = store.args;
            let address = self.address(frame, facts, &store.mem, base, index)?;
            let value = self.operand(frame, value, store.ty)?;
            let value = facts.seen(&mut self.terms, value);
            let bytes = store.ty.bytes();
            if side == Side::Claims && !facts.accessible(&mut self.terms, address, bytes, true) {
                return Err("a deferred store may fault".to_string());
            }
            memory = self.store(memory, address, value);
        }
        Ok(Position { pc, locs, memory, in_place: frame.in_place, loads: frame.loads })
    }

    /// May a store be later than the guest's? That of a return address may, whoever shares memory
    /// (docs/design.md, "The IR"): a constant, at a distance from where the stack was at the entry.
    fn may_wait(&mut self, address: Term, value: Term) -> bool {
        let rsp = self.terms.symbol(Symbol::Entry(Loc::Gpr(Gpr::RSP)), 64);
        let pushes = self.terms.linear(address).0[..] == [(rsp, 1)];
        self.private || pushes && self.terms.constant(value).is_some()
    }

    /// An access that counts among those of other threads.
    fn seen_by_others(
        &mut self,
        frame: &mut Frame,
        facts: &Facts,
        kind: u64,
        inputs: Vec<Term>,
        side: Side,
    ) -> App {
        let before = if kind == LOAD { &mut frame.loads } else { &mut frame.in_place };
        let node = AppNode { ip: kind, inputs, in_place: Some(*before), memory: None };
        let app = self.execution(facts, node, side);
        *before = self.terms.in_place_after(*before, app);
        app
    }

    /// The execution of a native, which the version claims, or which is that of the version if it can be shown.
    fn execution(&mut self, facts: &Facts, node: AppNode, side: Side) -> App {
        match side {
            Side::Claims => {
                let ip = node.ip;
                let app = self.terms.app(node);
                self.executed.entry(ip).or_default().push(app);
                app
            }
            Side::Shown => self.same_app(facts, node),
        }
    }

    fn app(
        &mut self,
        ip: u64,
        inputs: Vec<Term>,
        in_place: Option<InPlace>,
        memory: Option<Memory>,
    ) -> App {
        self.terms.app(AppNode { ip, inputs, in_place, memory })
    }

    fn native(
        &mut self,
        frame: &mut Frame,
        facts: &mut Facts,
        version: &Version,
        inst: &Inst,
        side: Side,
    ) -> Result<(), Stuck> {
        let native = inst.native.and_then(|n| version.natives.get(n.index()));
        let native = native.ok_or("a native without its instruction")?;
        if let Some(loc) = native.writes.iter().find(|l| matches!(l, Loc::FsBase | Loc::GsBase)) {
            return Err(format!("{loc} is changed"));
        }
        let effects = native.effects;
        let (address, rest) = match &inst.mem {
            Some(mem) => {
                let address = self.address(frame, facts, mem, inst.args[0], inst.args[1])?;
                (Some(address), &inst.args[2..])
            }
            None => (None, &inst.args[..]),
        };
        let (loaded, rest) = match (native.split, rest) {
            (Split::Loaded, [value, rest @ ..]) => {
                let ty = native.split_ty().ok_or("a native without the type of its operand")?;
                (Some(self.operand(frame, *value, ty)?), rest)
            }
            _ => (None, rest),
        };
        let mut inputs = Vec::new();
        for (i, operand) in rest.iter().enumerate() {
            let ty = if i < native.gpr_in.len() { Ty::I64 } else { Ty::Flags };
            let input = self.operand(frame, *operand, ty)?;
            inputs.push(facts.seen(&mut self.terms, input));
        }
        // Machine code may have the guest's instruction with other registers.
        let host = frame.context.and_then(|_| self.tables.natives.get(&native.inst.ip())).cloned();
        if let Some(host) = &host {
            let flags = inputs.get(native.gpr_in.len()).copied().filter(|_| host.guest.flags_in);
            let own = host.inputs.iter().filter_map(|i| inputs.get(*i).copied());
            inputs = own.chain(flags).collect();
        }
        let ip = host.as_ref().map_or(native.inst.ip(), |host| host.guest.inst.ip());
        let size = native.mem_size.unwrap_or(0);
        let accesses = effects.intersects(Effects::READ | Effects::WRITE);
        let mut memory = address.filter(|_| accesses && size > 0);
        let unknown = effects.contains(Effects::UNKNOWN_EXTENT);
        if let Some(address) = memory {
            let writes = effects.contains(Effects::WRITE);
            let address = self.access(facts, side, (address, size), writes)?;
            memory = Some(address);
            if effects.contains(Effects::READ) {
                let content = self.read(facts, frame.memory, address, size);
                inputs.push(content);
            }
        } else {
            inputs.extend(address);
        }
        inputs.extend(loaded);
        let is_read = effects.contains(Effects::READ) && !self.private;
        let is_written = effects.contains(Effects::WRITE) && !self.private;
        if is_read {
            let from = Vec::from_iter(address);
            let loaded = self.seen_by_others(frame, facts, LOAD, from, side);
            inputs.push(self.terms.output(loaded, 0, 64));
        }
        let reads_state =
            native.vec_read != 0 || effects.intersects(Effects::READ_STATE | Effects::NO_REPEAT);
        let node = AppNode {
            ip,
            inputs,
            in_place: (reads_state || is_written).then_some(frame.in_place),
            memory: (accesses && (unknown || memory.is_none())).then_some(frame.memory),
        };
        let app = self.execution(facts, node, side);
        if side == Side::Claims {
            facts.ran.insert(app);
        }
        let traps = effects.intersects(Effects::MAY_TRAP | Effects::UNKNOWN_EXTENT);
        if side == Side::Shown && traps && may_fault(version, inst) && !facts.ran.contains(&app) {
            return Err("executes a native that the version has not".to_string());
        }
        if effects.contains(Effects::WRITE) {
            match memory.filter(|_| !unknown) {
                Some(address) => {
                    self.watch(facts, version, address, size, side);
                    let value = self.terms.output(app, STORED as u32, 8 * size);
                    frame.memory = self.store(frame.memory, address, value);
                }
                None => {
                    // The evaluator leaves where it may write what the context assumes not to be written.
                    facts.contradict |= side == Side::Claims && version.context.watched().is_some();
                    frame.memory = self.terms.memory(MemoryNode::After(app));
                }
            }
        }
        let writes_state = native.vec_write != 0
            || !native.writes.is_empty()
            || effects.intersects(Effects::NO_REPEAT | Effects::STATE);
        if writes_state || is_written {
            frame.in_place = self.terms.in_place_after(frame.in_place, app);
        }
        if native.split == Split::Stored {
            let value = self.terms.output(app, STORED as u32, 8 * size);
            if let Some(def) = inst.def() {
                frame.values[def.index()] = Some(facts.seen(&mut self.terms, value));
            }
            return Ok(());
        }
        for (i, def) in inst.defs.iter().enumerate() {
            let index = match &host {
                _ if i >= native.gpr_out.len() => FLAGS,
                None => i as u32,
                Some(host) => match host.outputs.iter().position(|o| *o == i) {
                    Some(index) => index as u32,
                    // The guest's has no such result; nobody may read it.
                    None => continue,
                },
            };
            let output = self.terms.output(app, index, 64);
            frame.values[def.index()] = Some(facts.seen(&mut self.terms, output));
        }
        Ok(())
    }
}

fn loc_number(loc: Loc) -> u64 {
    match loc {
        Loc::Gpr(_) | Loc::Flags => 0,
        Loc::X87 => 1,
        Loc::Mxcsr => 2,
        Loc::Df => 3,
        Loc::FsBase => 4,
        Loc::GsBase => 5,
        Loc::Mask(n) => 16 + u64::from(n),
        Loc::Vec(n) => 32 + u64::from(n),
    }
}

/// Does a guard compare what this instruction loads with guest code that was recorded?
fn is_fetch(version: &Version, load: &Inst) -> bool {
    let insts = || version.blocks.iter().flat_map(|block| &block.insts);
    let uses = |inst: &Inst, def: Option<Value>| {
        inst.args.iter().any(|arg| arg.as_value().is_some() && arg.as_value() == def)
    };
    let is_about_code = |inst: &Inst| {
        let mut origins = inst.origins.iter().peekable();
        inst.op == Op::Assume
            && origins.peek().is_some()
            && origins.all(|o| o.kind == OriginKind::Code)
    };
    let compares = |inst: &Inst| inst.op == Op::Eq && uses(inst, load.def());
    insts()
        .filter(|inst| compares(inst))
        .any(|eq| insts().any(|assume| is_about_code(assume) && uses(assume, eq.def())))
}
