//! Lowering: one `base` block of IR to a list of [`Code`], once per block.
//!
//! * A `get` emits nothing: its value *is* the register's slot. When the register is overwritten while such a value is
//!   still to be read, it is copied aside first (`protect`).
//! * A result that a later `put` of the same instruction writes to a register goes there at once (`destination`); nothing
//!   between the two may fault or read the register.
//! * Truncations and zero extensions of clean values emit nothing either: handlers cut what they read.
//! * Flags stay descriptions ([`FlagState`]) over slots and constants, looked at by conditions, by faults (through the
//!   table of [`Site`]s), and at the block's end, where they go to the record, if possible within the branch itself.
//!   Flags that nobody can see any more get no description at all.
//!
//! Invariant: at each operation that may fault, the registers' slots hold the state before its guest instruction, and
//! the site's description gives that state's flags.

use super::code::{self, Code, CodeBytes, FlagState, Handler, PureOp, Source};
use super::flags::{Form, Kind, shift_ignores_old};
use super::native::{NativeError, NativeOp, NativePool};
use super::select;
use dynasour_ir::op::ArgTy;
use dynasour_ir::{
    Cond, Effects, FlagOp, GuestTerm, Inst, Loc, Mem, Native, Op, Operand, Segment, Term, Trap, Ty, Value, Version,
};
use smallvec::SmallVec;

/// The flags of a call's edge.
const CALL_FLAGS: u16 = code::ANY_EDGE | code::HEAD_EDGE;

/// Why a block could not be lowered. Each is a broken invariant of whoever made the block, or a full table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// Not exactly one block with a guest terminator.
    #[error("not a base block")]
    NotBase,
    /// An operation that has no place in a base block.
    #[error("operation {0} cannot stand in a base block")]
    Unsupported(String),
    /// An operand has no value yet, or not of the kind its use needs.
    #[error("operand {0} is not available")]
    Operand(String),
    /// A register is written before something that can fault in the same instruction.
    #[error("state is written before a possible fault at {0:#x}")]
    Imprecise(u64),
    /// The block needs more temporaries than there are.
    #[error("too many temporaries")]
    TooLarge,
    /// A native instruction could not be generated.
    #[error(transparent)]
    Native(#[from] NativeError),
}

/// What is known about an operation that may fault.
#[derive(Clone, Copy, Debug)]
pub struct Site {
    /// Index of the operation.
    pub op: u32,
    /// The guest instruction.
    pub pc: u64,
    /// Its flags before.
    pub flags: FlagState,
}

/// How a block ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// To a constant pc.
    Goto(u64),
    /// To one of two pcs; the exit word is nonzero for the first.
    Branch(u64, u64),
    /// A call of a constant pc.
    Call(u64),
    /// A call of the pc in the exit word.
    CallIndirect,
    /// A return to the pc in the exit word.
    Ret,
    /// A jump to the pc in the exit word.
    Indirect,
    /// `syscall`; the pc after it.
    Syscall(u64),
    /// An instruction for the runtime.
    Special(u64),
    /// An instruction that traps.
    Trap(u64, Trap),
}

/// A lowered block.
pub struct Lowered {
    /// The operations.
    pub code: Box<[Code]>,
    /// Operations that may fault, in order.
    pub sites: Box<[Site]>,
    /// How it ends.
    pub end: End,
    /// pc of the last guest instruction.
    pub last_pc: u64,
    /// Side tables that the operations point into; boxes do not move.
    _tables: Tables,
}

#[derive(Default)]
#[allow(clippy::vec_box, reason = "operations hold pointers to the elements")]
struct Tables {
    states: Vec<Box<FlagState>>,
    pures: Vec<Box<PureOp>>,
    natives: Vec<Box<NativeOp>>,
    bytes: Option<Box<CodeBytes>>,
}

/// Where a value is.
#[derive(Clone, Copy)]
enum Val {
    Unset,
    /// In a slot; clean means zero above its type.
    Slot(u16, bool),
    Const(u64),
    Flags(usize),
    /// A condition that only the terminator reads.
    Cond(Cond, usize),
}

/// A description of flags and how long it is needed.
struct Desc {
    state: FlagState,
    until: usize,
}

/// A comparison that decides a condition.
struct Compare {
    op: Op,
    /// Exchange the operands of `op`.
    swapped: bool,
    ty: Ty,
    a: Source,
    b: Source,
}

enum Plan {
    Compare(Compare),
    Always(bool),
    State,
}

struct Lowerer<'a> {
    version: &'a Version,
    insts: &'a [Inst],
    natives: &'a mut NativePool,
    vals: Vec<Val>,
    /// The last position at which each value is read; `None` if never.
    last_use: Vec<Option<usize>>,
    uses: Vec<u32>,
    /// For flags: the operation of the same guest instruction whose result gives them cheaply.
    results: Vec<Option<Value>>,
    /// Instructions that were merged into an earlier one.
    merged: Vec<bool>,
    /// Values that live in each register's slot.
    in_gpr: [SmallVec<[Value; 8]>; 16],
    descs: Vec<Desc>,
    /// The description of the guest's current flags.
    pending: usize,
    code: Vec<Code>,
    sites: Vec<Site>,
    tables: Tables,
    next_temp: u16,
    pc: u64,
    /// Has the current guest instruction written state already?
    dirty: bool,
}

/// Lowers the only block of `version`. With `bytes`, the block begins with a check that they are still there.
///
/// # Errors
/// See [`LowerError`].
pub fn lower(version: &Version, bytes: Option<CodeBytes>, natives: &mut NativePool) -> Result<Lowered, LowerError> {
    let [block] = &version.blocks[..] else { return Err(LowerError::NotBase) };
    let Term::Guest(term) = &block.term else { return Err(LowerError::NotBase) };
    let n = version.types.len();
    let mut lowerer = Lowerer {
        version,
        insts: &block.insts,
        natives,
        vals: vec![Val::Unset; n],
        last_use: vec![None; n],
        uses: vec![0; n],
        results: vec![None; block.insts.len()],
        merged: vec![false; block.insts.len()],
        in_gpr: Default::default(),
        descs: vec![Desc { state: FlagState::Record, until: usize::MAX }],
        pending: 0,
        code: Vec::with_capacity(block.insts.len()),
        sites: Vec::new(),
        tables: Tables::default(),
        next_temp: code::TEMPS,
        pc: version.region,
        dirty: false,
    };
    lowerer.find_uses(term)?;
    if let Some(bytes) = bytes {
        let table = lowerer.tables.bytes.insert(Box::new(bytes));
        let table = std::ptr::from_ref(&**table) as u64;
        lowerer.emit(code::check_bytes, 0, 0, 0, 0, table);
    }
    for i in 0..block.insts.len() {
        if !lowerer.merged[i] {
            lowerer.inst(i)?;
        }
    }
    let end = lowerer.term(term)?;
    Ok(Lowered {
        code: lowerer.code.into_boxed_slice(),
        sites: lowerer.sites.into_boxed_slice(),
        end,
        last_pc: lowerer.pc,
        _tables: lowerer.tables,
    })
}

fn can_fault(inst: &Inst) -> bool {
    matches!(inst.op, Op::Load | Op::Store | Op::Native)
}

impl Lowerer<'_> {
    // ---- what is used where ----

    /// The position of the terminator.
    fn end(&self) -> usize {
        self.insts.len()
    }

    fn mark(&mut self, operand: Operand, at: usize) -> Result<(), LowerError> {
        if let Operand::Value(v) = operand {
            let slot = self.last_use.get_mut(v.index()).ok_or_else(|| LowerError::Operand(v.to_string()))?;
            *slot = Some(slot.map_or(at, |u| u.max(at)));
            self.uses[v.index()] += 1;
        }
        Ok(())
    }

    /// One backward walk: the flags that nobody sees get no uses, and neither do their operands.
    fn find_uses(&mut self, term: &GuestTerm) -> Result<(), LowerError> {
        let end = self.end();
        for operand in Version::term_operands(&Term::Guest(term.clone())) {
            self.mark(operand, end)?;
        }
        let mut flags_seen = true;
        for i in (0..end).rev() {
            let inst = &self.insts[i];
            match inst.op {
                Op::Put(Loc::Flags) => {
                    if flags_seen {
                        self.mark(inst.args[0], i)?;
                    }
                    flags_seen = false;
                    continue;
                }
                Op::Flags(op) => {
                    if self.used(inst) {
                        let result = self.result_of(i);
                        self.results[i] = result;
                        match result {
                            Some(_) if matches!(op, FlagOp::And | FlagOp::Or | FlagOp::Xor) => {}
                            Some(_) => self.mark(inst.args[1], i)?,
                            None => inst.args.iter().try_for_each(|a| self.mark(*a, i))?,
                        }
                        if let Some(result) = result {
                            self.mark(result.into(), i)?;
                        }
                    }
                    continue;
                }
                // A condition that only the terminator reads is decided there.
                Op::Cond(_) if self.used(inst) => {
                    let only_end =
                        inst.def().is_some_and(|v| self.uses[v.index()] == 1 && self.last_use[v.index()] == Some(end));
                    self.mark(inst.args[0], if only_end { end } else { i })?;
                    continue;
                }
                _ => {}
            }
            let wanted = !inst.op.is_pure() && !matches!(inst.op, Op::Get(_)) || self.used(inst);
            if wanted {
                inst.args.iter().try_for_each(|a| self.mark(*a, i))?;
            }
            if self.sees_flags(inst) {
                flags_seen = true;
            }
        }
        Ok(())
    }

    /// Is a result of `inst` read?
    fn used(&self, inst: &Inst) -> bool {
        inst.defs.iter().any(|v| self.last_use[v.index()].is_some())
    }

    /// Does `inst` look at the guest's current flags: by reading them, or because it may fault?
    fn sees_flags(&self, inst: &Inst) -> bool {
        can_fault(inst) || inst.op == Op::Get(Loc::Flags) && self.used(inst)
    }

    /// The guest instruction's operation whose result gives the flags of instruction `i` cheaply.
    fn result_of(&self, i: usize) -> Option<Value> {
        let inst = &self.insts[i];
        let Op::Flags(flag_op) = inst.op else { return None };
        let (op, b) = match flag_op {
            FlagOp::Add => (Op::Add, inst.args[1]),
            FlagOp::Sub => (Op::Sub, inst.args[1]),
            FlagOp::And => (Op::And, inst.args[1]),
            FlagOp::Or => (Op::Or, inst.args[1]),
            FlagOp::Xor => (Op::Xor, inst.args[1]),
            FlagOp::Inc => (Op::Add, Operand::Const(1)),
            FlagOp::Dec => (Op::Sub, Operand::Const(1)),
            _ => return None,
        };
        let same = |k: &&Inst| k.op == op && k.ty == inst.ty && k.args[..] == [inst.args[0], b];
        let found = self.insts[..i].iter().rev().take_while(|k| k.op != Op::At).find(same)?.def()?;
        // A result that only flags would read is not worth computing.
        self.last_use[found.index()].is_some().then_some(found)
    }

    /// The last position at which flags put at `i` may be looked at.
    fn observed_until(&self, i: usize) -> usize {
        let mut last = i;
        for (k, inst) in self.insts.iter().enumerate().skip(i + 1) {
            if inst.op == Op::Put(Loc::Flags) {
                return last;
            }
            if self.sees_flags(inst) {
                last = k;
            }
        }
        self.end()
    }

    // ---- emitting ----

    fn temp(&mut self) -> Result<u16, LowerError> {
        if self.next_temp >= code::TEMPS_END {
            return Err(LowerError::TooLarge);
        }
        self.next_temp += 1;
        Ok(self.next_temp - 1)
    }

    fn emit(&mut self, run: Handler, d: u16, a: u16, b: u16, c: u16, imm: u64) {
        self.code.push(Code { run, imm, d, a, b, c });
    }

    /// Emits an operation that may fault.
    fn emit_faulting(&mut self, code: Code) -> Result<(), LowerError> {
        if self.dirty {
            return Err(LowerError::Imprecise(self.pc));
        }
        let site = Site { op: self.code.len() as u32, pc: self.pc, flags: self.descs[self.pending].state };
        self.sites.push(site);
        self.code.push(code);
        Ok(())
    }

    fn source(&self, operand: Operand) -> Result<Source, LowerError> {
        match operand {
            Operand::Const(c) => Ok(Source::Const(c)),
            Operand::Value(v) => match self.vals.get(v.index()) {
                Some(Val::Slot(s, _)) => Ok(Source::Slot(*s)),
                Some(Val::Const(c)) => Ok(Source::Const(*c)),
                _ => Err(LowerError::Operand(v.to_string())),
            },
        }
    }

    fn slot_of(&mut self, source: Source) -> Result<u16, LowerError> {
        match source {
            Source::Slot(s) => Ok(s),
            Source::Const(0) => Ok(code::ZERO),
            Source::Const(c) => {
                let t = self.temp()?;
                self.emit(code::constant, t, 0, 0, 0, c);
                Ok(t)
            }
        }
    }

    fn slot(&mut self, operand: Operand) -> Result<u16, LowerError> {
        let source = self.source(operand)?;
        self.slot_of(source)
    }

    fn is_clean(&self, operand: Operand) -> bool {
        match operand {
            Operand::Const(_) => true,
            Operand::Value(v) => matches!(self.vals[v.index()], Val::Slot(_, true) | Val::Const(_)),
        }
    }

    /// Records where `v` lives from now on.
    fn place(&mut self, v: Value, slot: u16, clean: bool) {
        self.vals[v.index()] = Val::Slot(slot, clean);
        if slot < 16 && !self.in_gpr[slot as usize].contains(&v) {
            self.in_gpr[slot as usize].push(v);
        }
    }

    /// Before register `g` is overwritten at position `at`: saves what is still to be read from its slot.
    fn protect(&mut self, g: u16, at: usize) -> Result<(), LowerError> {
        let reads_slot =
            |d: &Desc| d.until > at && matches!(d.state, FlagState::Known(_, s) if s.contains(&Source::Slot(g)));
        let values = std::mem::take(&mut self.in_gpr[g as usize]);
        let live: SmallVec<[Value; 8]> =
            values.into_iter().filter(|v| self.last_use[v.index()].is_some_and(|u| u > at)).collect();
        if live.is_empty() && !self.descs.iter().any(reads_slot) {
            return Ok(());
        }
        let t = self.temp()?;
        self.emit(code::zext::<u64>, t, g, 0, 0, 0);
        for v in live {
            if let Val::Slot(_, clean) = self.vals[v.index()] {
                self.vals[v.index()] = Val::Slot(t, clean);
            }
        }
        for d in self.descs.iter_mut().filter(|d| reads_slot(d)) {
            if let FlagState::Known(_, sources) = &mut d.state {
                sources.iter_mut().filter(|s| **s == Source::Slot(g)).for_each(|s| *s = Source::Slot(t));
            }
        }
        Ok(())
    }

    /// The register to which a result computed at `i` may go at once because it is put there by the same instruction.
    fn home(&self, i: usize, v: Value) -> Option<u16> {
        let mut same: SmallVec<[Value; 4]> = SmallVec::from_slice(&[v]);
        let mut read = 0u16;
        let mut written = 0u16;
        for inst in &self.insts[i + 1..] {
            match inst.op {
                Op::At | Op::Load | Op::Store | Op::Native => return None,
                Op::Get(Loc::Gpr(g)) => read |= 1 << g.number(),
                Op::Zext(_) if matches!(inst.args[0], Operand::Value(a) if same.contains(&a)) => {
                    same.extend(inst.def())
                }
                Op::Put(Loc::Gpr(g)) => {
                    if matches!(inst.args[0], Operand::Value(a) if same.contains(&a)) {
                        let bit = 1 << g.number();
                        return ((read | written) & bit == 0).then_some(g.number() as u16);
                    }
                    written |= 1 << g.number();
                }
                _ => {}
            }
        }
        None
    }

    /// Where the result `v` of the operation at `i` goes: a register or a temporary. Clean by construction.
    fn destination(&mut self, i: usize, v: Value) -> Result<u16, LowerError> {
        let slot = match self.home(i, v) {
            Some(g) => {
                self.protect(g, i)?;
                g
            }
            None => self.temp()?,
        };
        Ok(slot)
    }

    // ---- instructions ----

    fn inst(&mut self, i: usize) -> Result<(), LowerError> {
        let insts = self.insts;
        let inst = &insts[i];
        let unsupported = || LowerError::Unsupported(inst.op.to_string());
        match inst.op {
            Op::At => {
                self.pc = inst.args.first().and_then(|a| a.as_const()).ok_or_else(unsupported)?;
                self.dirty = false;
                return Ok(());
            }
            Op::Get(loc) => return self.get(loc, inst.def().ok_or_else(unsupported)?),
            Op::Put(loc) => return self.put(i, loc, inst.args[0]),
            Op::Store => return self.store(inst),
            Op::Native => return self.native(i, inst),
            Op::Load => return self.load(i, inst),
            Op::Assume | Op::Poll => return Err(unsupported()),
            _ => {}
        }
        let v = inst.def().ok_or_else(unsupported)?;
        if self.last_use[v.index()].is_none() {
            return Ok(());
        }
        match inst.op {
            Op::Flags(op) => self.flags(i, op, inst, v),
            Op::Cond(cond) => self.cond(i, cond, inst, v),
            Op::FlagBits => {
                let state = self.flag_state(inst.args[0])?;
                let d = self.destination(i, v)?;
                self.emit_state(code::flag_bits, d, 0, state);
                self.place(v, d, true);
                Ok(())
            }
            Op::Trunc => self.alias(inst.args[0], v, false),
            Op::Zext(_) if self.is_clean(inst.args[0]) => self.alias(inst.args[0], v, true),
            _ => self.pure(i, inst, v),
        }
    }

    /// `v` is the same word as `operand`.
    fn alias(&mut self, operand: Operand, v: Value, clean: bool) -> Result<(), LowerError> {
        match self.source(operand)? {
            Source::Slot(s) => {
                self.place(v, s, clean);
                // The aliased register may be overwritten before the alias is read, so both are watched.
            }
            Source::Const(c) => self.vals[v.index()] = Val::Const(c & self.version.ty(v).mask()),
        }
        Ok(())
    }

    fn get(&mut self, loc: Loc, v: Value) -> Result<(), LowerError> {
        match loc {
            Loc::Gpr(g) => self.place(v, g.number() as u16, true),
            Loc::FsBase => self.vals[v.index()] = Val::Slot(code::FS_BASE, true),
            Loc::GsBase => self.vals[v.index()] = Val::Slot(code::GS_BASE, true),
            Loc::Flags => {
                if let Some(until) = self.last_use[v.index()] {
                    let d = &mut self.descs[self.pending];
                    d.until = d.until.max(until);
                    self.vals[v.index()] = Val::Flags(self.pending);
                }
            }
            Loc::Vec(_) | Loc::Mask(_) | Loc::X87 | Loc::Mxcsr | Loc::Df => {
                return Err(LowerError::Unsupported(format!("get {loc}")));
            }
        }
        Ok(())
    }

    fn put(&mut self, i: usize, loc: Loc, operand: Operand) -> Result<(), LowerError> {
        match loc {
            Loc::Gpr(g) => {
                self.dirty = true;
                let g = g.number() as u16;
                match self.source(operand)? {
                    Source::Slot(s) if s == g => {}
                    source => {
                        self.protect(g, i)?;
                        // Protecting may have moved the operand itself.
                        match (self.source(operand)?, source) {
                            (Source::Slot(s), _) => self.emit(code::zext::<u64>, g, s, 0, 0, 0),
                            (Source::Const(c), _) => self.emit(code::constant, g, 0, 0, 0, c),
                        }
                    }
                }
                Ok(())
            }
            Loc::Flags => {
                self.dirty = true;
                let Operand::Value(v) = operand else { return Err(LowerError::Operand(operand.to_string())) };
                let until = self.observed_until(i);
                match self.vals[v.index()] {
                    Val::Flags(d) => {
                        self.descs[d].until = self.descs[d].until.max(until);
                        self.pending = d;
                    }
                    // Flags that nobody sees: any description will do.
                    Val::Unset if until == i => {
                        self.descs.push(Desc {
                            state: FlagState::Known(Kind::new(Form::Bits, Ty::I64), [Source::Const(0); 3]),
                            until: i,
                        });
                        self.pending = self.descs.len() - 1;
                    }
                    _ => return Err(LowerError::Operand(v.to_string())),
                }
                Ok(())
            }
            Loc::Vec(_) | Loc::Mask(_) | Loc::X87 | Loc::Mxcsr | Loc::Df | Loc::FsBase | Loc::GsBase => {
                Err(LowerError::Unsupported(format!("put {loc}")))
            }
        }
    }

    fn pure(&mut self, i: usize, inst: &Inst, v: Value) -> Result<(), LowerError> {
        let ty = if inst.ty == Ty::I1 { Ty::I8 } else { inst.ty };
        if inst.args.len() == 2 {
            let (mut a, mut b) = (self.source(inst.args[0])?, self.source(inst.args[1])?);
            if matches!((a, b), (Source::Const(_), Source::Slot(_))) && inst.op.is_commutative() {
                std::mem::swap(&mut a, &mut b);
            }
            let insert = matches!(inst.op, Op::Insert8Low | Op::Insert8High | Op::Insert16);
            let ty = if insert { Ty::I64 } else { ty };
            if let Some(run) = select::binary(inst.op, ty, matches!(b, Source::Const(_))) {
                let a = self.slot_of(a)?;
                // The first operand may be protected together with the destination: look at it again.
                let d = self.destination(i, v)?;
                let (b, imm) = match b {
                    Source::Slot(s) => (s, 0),
                    Source::Const(c) => (0, c),
                };
                self.emit(run, d, a, b, 0, imm);
                self.place(v, d, true);
                return Ok(());
            }
        }
        match inst.op {
            Op::Not if inst.ty == Ty::I1 => {
                let a = self.slot(inst.args[0])?;
                let d = self.destination(i, v)?;
                self.emit(code::binary::<code::Xor, u8, true>, d, a, 0, 0, 1);
                self.place(v, d, true);
                return Ok(());
            }
            Op::Select => {
                let c = self.slot(inst.args[0])?;
                let (a, b) = (self.slot(inst.args[1])?, self.slot(inst.args[2])?);
                let d = self.destination(i, v)?;
                self.emit(select::select(ty), d, a, b, c, 0);
                self.place(v, d, true);
                return Ok(());
            }
            _ => {}
        }
        if let Some(run) = select::unary(inst.op, ty) {
            let a = self.slot(inst.args[0])?;
            let d = self.destination(i, v)?;
            self.emit(run, d, a, 0, 0, 0);
            self.place(v, d, true);
            return Ok(());
        }
        self.any_pure(i, inst, v)
    }

    /// An operation without a handler of its own.
    fn any_pure(&mut self, i: usize, inst: &Inst, v: Value) -> Result<(), LowerError> {
        let mut args = Vec::with_capacity(inst.args.len());
        for (k, operand) in inst.args.iter().enumerate() {
            let ty = match inst.op.signature().0.get(k) {
                Some(ArgTy::Is(t)) => *t,
                _ => inst.ty,
            };
            args.push((self.source(*operand)?, ty.mask()));
        }
        let d = self.destination(i, v)?;
        self.tables.pures.push(Box::new(PureOp { op: inst.op, ty: inst.ty, args }));
        let table = self.tables.pures.last().map_or(0, |p| std::ptr::from_ref(&**p) as u64);
        self.emit(code::pure, d, 0, 0, 0, table);
        self.place(v, d, true);
        Ok(())
    }

    // ---- flags ----

    fn flag_state(&self, operand: Operand) -> Result<FlagState, LowerError> {
        match operand {
            Operand::Value(v) => match self.vals.get(v.index()) {
                Some(Val::Flags(d)) => Ok(self.descs[*d].state),
                _ => Err(LowerError::Operand(v.to_string())),
            },
            Operand::Const(_) => Err(LowerError::Operand(operand.to_string())),
        }
    }

    /// Emits an operation over a description of flags.
    fn emit_state(&mut self, run: Handler, d: u16, c: u16, state: FlagState) {
        self.tables.states.push(Box::new(state));
        let table = self.tables.states.last().map_or(0, |s| std::ptr::from_ref(&**s) as u64);
        self.emit(run, d, 0, 0, c, table);
    }

    /// The bits of flags, in a slot.
    fn flag_bits(&mut self, operand: Operand) -> Result<Source, LowerError> {
        match self.flag_state(operand)? {
            FlagState::Known(kind, [a, _, _]) if kind.form() == Form::Bits => Ok(a),
            state => {
                let t = self.temp()?;
                self.emit_state(code::flag_bits, t, 0, state);
                Ok(Source::Slot(t))
            }
        }
    }

    fn new_desc(&mut self, v: Value, form: Form, ty: Ty, sources: [Source; 3]) {
        let until = self.last_use[v.index()].unwrap_or(0);
        self.descs.push(Desc { state: FlagState::Known(Kind::new(form, ty), sources), until });
        self.vals[v.index()] = Val::Flags(self.descs.len() - 1);
    }

    fn flags(&mut self, i: usize, op: FlagOp, inst: &Inst, v: Value) -> Result<(), LowerError> {
        let zero = Source::Const(0);
        let old_carry = |this: &mut Self| -> Result<Source, LowerError> {
            let state = this.flag_state(inst.args[1])?;
            let t = this.temp()?;
            this.emit_state(code::condition, t, Cond::B as u16, state);
            Ok(Source::Slot(t))
        };
        if let Some(result) = self.results[i] {
            let r = self.source(result.into())?;
            let (form, b) = match op {
                FlagOp::Add => (Form::AddResult, self.source(inst.args[1])?),
                FlagOp::Sub => (Form::SubResult, self.source(inst.args[1])?),
                FlagOp::Inc => (Form::Inc, old_carry(self)?),
                FlagOp::Dec => (Form::Dec, old_carry(self)?),
                _ => (Form::Logic, zero),
            };
            self.new_desc(v, form, inst.ty, [r, b, zero]);
            return Ok(());
        }
        let mut sources = [zero; 3];
        match op {
            FlagOp::Sub => {
                sources[0] = self.source(inst.args[0])?;
                sources[1] = self.source(inst.args[1])?;
                self.new_desc(v, Form::Sub, inst.ty, sources);
            }
            FlagOp::FromBits => {
                sources[0] = self.source(inst.args[0])?;
                self.new_desc(v, Form::Bits, Ty::I64, sources);
            }
            FlagOp::And if inst.args[0] == inst.args[1] => {
                sources[0] = self.source(inst.args[0])?;
                self.new_desc(v, Form::Logic, inst.ty, sources);
            }
            FlagOp::And => {
                // test: the result is worth a temporary, conditions then compare it with zero.
                let (mut a, mut b) = (self.source(inst.args[0])?, self.source(inst.args[1])?);
                if matches!(a, Source::Const(_)) {
                    std::mem::swap(&mut a, &mut b);
                }
                let a = self.slot_of(a)?;
                let t = self.temp()?;
                let run = select::binary(Op::And, inst.ty, matches!(b, Source::Const(_)));
                let run = run.ok_or_else(|| LowerError::Unsupported(inst.op.to_string()))?;
                let (b, imm) = match b {
                    Source::Slot(s) => (s, 0),
                    Source::Const(c) => (0, c),
                };
                self.emit(run, t, a, b, 0, imm);
                self.new_desc(v, Form::Logic, inst.ty, [Source::Slot(t), zero, zero]);
            }
            _ => {
                let old = op.old_operand();
                for (k, operand) in inst.args.iter().enumerate() {
                    sources[k] = if Some(k) != old {
                        self.source(*operand)?
                    } else if k == 2 && matches!(sources[1], Source::Const(n) if shift_ignores_old(op, inst.ty, n)) {
                        zero
                    } else {
                        self.flag_bits(*operand)?
                    };
                }
                self.new_desc(v, Form::Host(op), inst.ty, sources);
            }
        }
        Ok(())
    }

    /// How to decide `cond` of flags in `state`.
    fn plan(cond: Cond, state: FlagState) -> Plan {
        let FlagState::Known(kind, [a, b, _]) = state else { return Plan::State };
        let ty = kind.ty();
        let zero = Source::Const(0);
        let compare = |op, swapped, a, b| Plan::Compare(Compare { op, swapped, ty, a, b });
        let on_result = match cond {
            Cond::E => compare(Op::Eq, false, a, zero),
            Cond::Ne => compare(Op::Ne, false, a, zero),
            Cond::S => compare(Op::LtS, false, a, zero),
            Cond::Ns => compare(Op::LeS, true, a, zero),
            _ => Plan::State,
        };
        match kind.form() {
            Form::Sub => match cond {
                Cond::E => compare(Op::Eq, false, a, b),
                Cond::Ne => compare(Op::Ne, false, a, b),
                Cond::B => compare(Op::LtU, false, a, b),
                Cond::Ae => compare(Op::LeU, true, a, b),
                Cond::Be => compare(Op::LeU, false, a, b),
                Cond::A => compare(Op::LtU, true, a, b),
                Cond::L => compare(Op::LtS, false, a, b),
                Cond::Ge => compare(Op::LeS, true, a, b),
                Cond::Le => compare(Op::LeS, false, a, b),
                Cond::G => compare(Op::LtS, true, a, b),
                Cond::S if b == zero => compare(Op::LtS, false, a, zero),
                Cond::Ns if b == zero => compare(Op::LeS, true, a, zero),
                Cond::S | Cond::Ns | Cond::O | Cond::No | Cond::P | Cond::Np => Plan::State,
            },
            Form::Logic => match cond {
                Cond::E | Cond::Be => compare(Op::Eq, false, a, zero),
                Cond::Ne | Cond::A => compare(Op::Ne, false, a, zero),
                Cond::S | Cond::L => compare(Op::LtS, false, a, zero),
                Cond::Ns | Cond::Ge => compare(Op::LeS, true, a, zero),
                Cond::Le => compare(Op::LeS, false, a, zero),
                Cond::G => compare(Op::LtS, true, a, zero),
                Cond::B | Cond::O => Plan::Always(false),
                Cond::Ae | Cond::No => Plan::Always(true),
                Cond::P | Cond::Np => Plan::State,
            },
            Form::AddResult => match cond {
                Cond::B => compare(Op::LtU, false, a, b),
                Cond::Ae => compare(Op::LeU, true, a, b),
                _ => on_result,
            },
            Form::SubResult | Form::Inc | Form::Dec => on_result,
            Form::Bits | Form::Host(_) => Plan::State,
        }
    }

    fn cond(&mut self, i: usize, cond: Cond, inst: &Inst, v: Value) -> Result<(), LowerError> {
        let Operand::Value(f) = inst.args[0] else { return Err(LowerError::Operand(inst.args[0].to_string())) };
        let Val::Flags(desc) = self.vals[f.index()] else { return Err(LowerError::Operand(f.to_string())) };
        if self.uses[v.index()] == 1 && self.last_use[v.index()] == Some(self.end()) {
            self.vals[v.index()] = Val::Cond(cond, desc);
            return Ok(());
        }
        self.decide(i, cond, desc, Some(v)).map(|_| ())
    }

    /// Computes a condition into a slot.
    fn decide(&mut self, i: usize, cond: Cond, desc: usize, v: Option<Value>) -> Result<u16, LowerError> {
        let d = match v {
            Some(v) => self.destination(i, v)?,
            None => self.temp()?,
        };
        let state = self.descs[desc].state;
        match Self::plan(cond, state) {
            Plan::Always(holds) => self.emit(code::constant, d, 0, 0, 0, u64::from(holds)),
            Plan::State => self.emit_state(code::condition, d, cond as u16, state),
            Plan::Compare(Compare { op, swapped, ty, a, b }) => {
                let run = select::compare(op, swapped, ty, matches!(b, Source::Const(_)));
                let a = self.slot_of(a)?;
                let (b, imm) = match b {
                    Source::Slot(s) => (s, 0),
                    Source::Const(c) => (0, c),
                };
                self.emit(run, d, a, b, 0, imm);
            }
        }
        if let Some(v) = v {
            self.place(v, d, true);
        }
        Ok(d)
    }

    // ---- memory ----

    /// Slots and shape of an address: base, index, scale, displacement.
    fn address(&mut self, mem: Mem, base: Operand, index: Operand) -> Result<(u16, u16, u16, u64), LowerError> {
        let scale = mem.scale.trailing_zeros() as u16 & 3;
        let mut disp = mem.disp as u64;
        let base = match self.source(base)? {
            Source::Slot(s) => s,
            Source::Const(c) => {
                disp = disp.wrapping_add(c);
                code::ZERO
            }
        };
        let index = match self.source(index)? {
            Source::Slot(s) => s,
            Source::Const(c) => {
                disp = disp.wrapping_add(c << scale);
                code::ZERO
            }
        };
        let segment = match mem.seg {
            None => return Ok((base, index, scale, disp)),
            Some(Segment::Fs) => code::FS_BASE,
            Some(Segment::Gs) => code::GS_BASE,
        };
        if index == code::ZERO {
            return Ok((base, segment, 0, disp));
        }
        let t = self.temp()?;
        self.emit(code::address, t, base, index, scale, disp);
        Ok((t, segment, 0, 0))
    }

    fn operands_of(inst: &Inst) -> Result<(Mem, Operand, Operand), LowerError> {
        match (inst.mem, &inst.args[..]) {
            (Some(mem), [base, index, ..]) => Ok((mem, *base, *index)),
            _ => Err(LowerError::Unsupported(inst.op.to_string())),
        }
    }

    fn load(&mut self, i: usize, inst: &Inst) -> Result<(), LowerError> {
        let v = inst.def().ok_or_else(|| LowerError::Unsupported(inst.op.to_string()))?;
        let (mem, base, index) = Self::operands_of(inst)?;
        let (a, b, c, imm) = self.address(mem, base, index)?;
        let extension = self.merge_extension(i, v);
        let (result, run) = match extension {
            Some((wide, to)) => (wide, select::load_sext(inst.ty, to)),
            None => (v, select::load(inst.ty, b != code::ZERO)),
        };
        let run = run.ok_or_else(|| LowerError::Unsupported(format!("{}.{}", inst.op, inst.ty)))?;
        let d = self.destination(i, result)?;
        self.emit_faulting(Code { run, imm, d, a, b, c })?;
        self.place(result, d, true);
        Ok(())
    }

    /// A sign extension that is the only reader of the value loaded at `i` is done by the load.
    fn merge_extension(&mut self, i: usize, v: Value) -> Option<(Value, Ty)> {
        if self.uses[v.index()] != 1 {
            return None;
        }
        let next = self.insts.get(i + 1)?;
        match next.op {
            Op::Sext(_) if next.args[0] == Operand::Value(v) => {
                let wide = next.def()?;
                self.last_use[wide.index()]?;
                self.merged[i + 1] = true;
                Some((wide, next.ty))
            }
            _ => None,
        }
    }

    fn store(&mut self, inst: &Inst) -> Result<(), LowerError> {
        let (mem, base, index) = Self::operands_of(inst)?;
        let (a, b, c, imm) = self.address(mem, base, index)?;
        let unsupported = || LowerError::Unsupported(format!("{}.{}", inst.op, inst.ty));
        let value = *inst.args.get(2).ok_or_else(unsupported)?;
        if let Source::Const(k) = self.source(value)? {
            let k = inst.ty.sext(k);
            if let (Ok(k), Ok(disp)) = (i32::try_from(k), i32::try_from(imm as i64)) {
                let run = select::store_constant(inst.ty).ok_or_else(unsupported)?;
                let imm = (k as u32 as u64) << 32 | u64::from(disp as u32);
                return self.emit_faulting(Code { run, imm, d: 0, a, b, c });
            }
        }
        let d = self.slot(value)?;
        let run = select::store(inst.ty, b != code::ZERO).ok_or_else(unsupported)?;
        self.emit_faulting(Code { run, imm, d, a, b, c })
    }

    fn native(&mut self, i: usize, inst: &Inst) -> Result<(), LowerError> {
        let bad = || LowerError::Unsupported("native without its table entry".to_string());
        let version = self.version;
        let native: &Native = inst.native.and_then(|n| version.natives.get(n.index())).ok_or_else(bad)?;
        let mut args = inst.args.iter().copied();
        let mut next = || args.next().ok_or_else(bad);

        let addr = if native.mem_size.is_some() {
            let (base, index) = (next()?, next()?);
            match self.address(inst.mem.ok_or_else(bad)?, base, index)? {
                (a, code::ZERO, _, 0) => a,
                (a, b, c, imm) => {
                    let t = self.temp()?;
                    self.emit(code::address, t, a, b, c, imm);
                    t
                }
            }
        } else {
            code::ZERO
        };
        let mut inputs: SmallVec<[u16; 8]> = SmallVec::new();
        for _ in &native.gpr_in {
            let operand = next()?;
            inputs.push(self.slot(operand)?);
        }
        let flags_def = native.flags_out.then(|| inst.defs.last().copied()).flatten();
        let flags_wanted = flags_def.is_some_and(|v| self.last_use[v.index()].is_some());
        let flags_read = native.inst.rflags_read() & super::native::ARITHMETIC != 0;
        let flags_in = if native.flags_in && (flags_wanted || flags_read) {
            let operand = next()?;
            let source = self.flag_bits(operand)?;
            Some(self.slot_of(source)?)
        } else {
            None
        };
        let restartable = native.effects.contains(Effects::RESTARTABLE);
        let mut outputs: SmallVec<[u16; 8]> = SmallVec::new();
        for (k, gpr) in native.gpr_out.iter().enumerate() {
            let v = *inst.defs.get(k).ok_or_else(bad)?;
            if restartable {
                // After a fault the register has changed already: what the fault looks at moves out of its way.
                self.protect(gpr.number() as u16, i.saturating_sub(1))?;
            }
            let d = self.destination(i, v)?;
            if restartable && d as usize != gpr.number() {
                return Err(LowerError::Imprecise(self.pc));
            }
            outputs.push(d);
        }
        let flags_out = if flags_wanted { Some(self.temp()?) } else { None };

        // Protecting the outputs may have emitted copies, but the inputs' slots are still as they were.
        let op = NativeOp::new(native, self.natives, &inputs, &outputs, flags_in, flags_out)?;
        self.tables.natives.push(Box::new(op));
        let table = self.tables.natives.last().map_or(0, |n| std::ptr::from_ref(&**n) as u64);
        self.emit_faulting(Code { run: code::native, imm: table, d: 0, a: addr, b: 0, c: 0 })?;

        for (k, d) in outputs.iter().enumerate() {
            self.place(inst.defs[k], *d, true);
        }
        if let (Some(t), Some(v)) = (flags_out, flags_def) {
            let zero = Source::Const(0);
            self.new_desc(v, Form::Bits, Ty::I64, [Source::Slot(t), zero, zero]);
        }
        Ok(())
    }

    // ---- the end ----

    fn term(&mut self, term: &GuestTerm) -> Result<End, LowerError> {
        if let GuestTerm::Branch { cond, taken, fall } = *term {
            self.branch(cond, self.jump_flags(taken))?;
            return Ok(End::Branch(taken, fall));
        }
        self.record_pending();
        let end = match *term {
            GuestTerm::Goto(Operand::Const(to)) => End::Goto(to),
            GuestTerm::Call { target: Operand::Const(to), .. } => End::Call(to),
            GuestTerm::Goto(target) => self.indirect(target, End::Indirect)?,
            GuestTerm::Call { target, .. } => self.indirect(target, End::CallIndirect)?,
            GuestTerm::Ret(target) => self.indirect(target, End::Ret)?,
            GuestTerm::Syscall { next } => End::Syscall(next),
            GuestTerm::Special { pc } => End::Special(pc),
            GuestTerm::Trap { pc, trap } => End::Trap(pc, trap),
            GuestTerm::Branch { .. } => return Err(LowerError::NotBase),
        };
        match end {
            End::Goto(to) => self.emit(code::end, self.jump_flags(to), 0, 0, 0, 0),
            End::Call(_) => self.emit(code::end, CALL_FLAGS, 0, 0, 0, 0),
            End::Syscall(_) | End::Special(_) | End::Trap(..) => self.emit(code::end_stop, 0, 0, 0, 0, 0),
            End::Indirect | End::CallIndirect | End::Ret | End::Branch(..) => {}
        }
        Ok(end)
    }

    /// The flags of a jump to `target`.
    fn jump_flags(&self, target: u64) -> u16 {
        if target <= self.pc { code::ANY_EDGE | code::HEAD_EDGE } else { code::ANY_EDGE }
    }

    fn indirect(&mut self, target: Operand, end: End) -> Result<End, LowerError> {
        let a = self.slot(target)?;
        let flags = if end == End::CallIndirect { CALL_FLAGS } else { code::ANY_EDGE };
        self.emit(code::end_indirect, flags, a, 0, 0, 0);
        Ok(end)
    }

    /// Writes the description of the guest's flags to the record.
    fn record_pending(&mut self) {
        let state = self.descs[self.pending].state;
        match state {
            FlagState::Record => {}
            FlagState::Known(kind, [Source::Slot(a), b, _]) if !matches!(kind.form(), Form::Host(_)) => match b {
                Source::Slot(b) => self.emit(code::record::<(), false>, 0, a, b, kind.0, 0),
                Source::Const(b) => self.emit(code::record::<(), true>, 0, a, 0, kind.0, b),
            },
            FlagState::Known(..) => self.emit_state(code::record_state, 0, 0, state),
        }
    }

    /// `taken` are the flags of the edge if taken.
    fn branch(&mut self, cond: Operand, taken: u16) -> Result<(), LowerError> {
        let end = self.end();
        let i1 = match cond {
            Operand::Value(v) => match self.vals.get(v.index()) {
                Some(Val::Cond(cond, desc)) => {
                    let (cond, desc) = (*cond, *desc);
                    if self.fused_branch(cond, desc, taken)? {
                        return Ok(());
                    }
                    self.decide(end, cond, desc, None)?
                }
                _ => self.slot(cond)?,
            },
            Operand::Const(_) => self.slot(cond)?,
        };
        self.record_pending();
        self.emit(code::branch, taken, i1, 0, 0, 0);
        Ok(())
    }

    /// A branch that compares, and records the guest's flags on the way, if one operation can do both.
    fn fused_branch(&mut self, cond: Cond, desc: usize, taken: u16) -> Result<bool, LowerError> {
        let (pending, state) = (self.descs[self.pending].state, self.descs[desc].state);
        let FlagState::Known(kind, [flags_a, flags_b, _]) = pending else { return Ok(false) };
        if pending != state || matches!(kind.form(), Form::Host(_) | Form::Bits) {
            return Ok(false);
        }
        let Plan::Compare(Compare { op, swapped, ty, a, b }) = Self::plan(cond, state) else { return Ok(false) };
        let Source::Slot(slot) = a else { return Ok(false) };
        if a != flags_a {
            return Ok(false);
        }
        let fits = |source: Source| match source {
            Source::Const(c) => i32::try_from(ty.sext(c)).ok(),
            Source::Slot(_) => None,
        };
        match b {
            Source::Slot(b) if flags_b == Source::Slot(b) => {
                let run = select::branch(op, swapped, ty, false);
                self.emit(run, taken, slot, b, kind.0, 0);
            }
            _ => {
                let (Some(compared), Some(recorded)) = (fits(b), fits(flags_b)) else { return Ok(false) };
                let imm = (recorded as u32 as u64) << 32 | u64::from(compared as u32);
                self.emit(select::branch(op, swapped, ty, true), taken, slot, 0, kind.0, imm);
            }
        }
        Ok(true)
    }
}
