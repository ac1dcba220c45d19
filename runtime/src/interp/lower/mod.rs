//! Lowering: one `base` block of IR to a list of [`Code`], once per block.
//!
//! * A `get` emits nothing: its value *is* the register's slot. When the register is overwritten
//!   while such a value is still to be read, it is copied aside first (`protect`).
//! * A result that a later `put` of the same instruction writes to a register goes there at once
//!   (`destination`); nothing between the two may fault or read the register.
//! * Truncations and zero extensions of clean values emit nothing either: handlers cut what they
//!   read.
//! * Flags stay descriptions ([`FlagState`]) over slots and constants, looked at by conditions, by
//!   faults (through the table of [`Site`]s), and at the block's end, where they go to the record,
//!   if possible within the branch itself. Flags that nobody can see any more get no description at
//!   all.
//!
//! Files: `uses` (what is read where), `slots` (where values are), this one (moves and pure
//! operations), `conditions` (flags), `memory` (what can fault), `end`.
//!
//! Invariant: at each operation that may fault, the registers' slots hold the state before its
//! guest instruction, and the site's description gives that state's flags.

mod conditions;
mod end;
mod memory;
mod slots;
mod uses;

use super::code::{self, Code, CodeBytes, FlagState, PureOp, Source};
use super::flags::{Form, Kind};
use super::native::{NativeError, NativeOp, NativePool};
use super::select;
use dynasour_ir::op::ArgTy;
use dynasour_ir::{Cond, Inst, Loc, Op, Operand, Term, Trap, Ty, Value, Version};

/// The flags of a call's edge.
const CALL_FLAGS: u16 = code::ANY_EDGE | code::HEAD_EDGE;

/// Why a block could not be lowered. Each is a broken invariant of whoever made the block, or a
/// full table.
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
    /// Its flags before, or what a fault in the middle leaves.
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

/// Lists that are filled anew for each block: kept from one to the next.
#[derive(Default)]
pub struct Workspace {
    vals: Vec<Val>,
    /// The last position at which each value is read; `None` if never.
    last_use: Vec<Option<usize>>,
    uses: Vec<u32>,
    /// For flags: the operation of the same guest instruction whose result gives them cheaply.
    results: Vec<Option<Value>>,
    /// Instructions that were merged into an earlier one.
    merged: Vec<bool>,
    /// Values that live in each register's slot.
    in_gpr: [Vec<Value>; 16],
    descs: Vec<Desc>,
    code: Vec<Code>,
    sites: Vec<Site>,
}

impl Workspace {
    /// Makes room for a block of `insts` instructions over `values` values.
    fn prepare(&mut self, insts: usize, values: usize) {
        fn refill<T: Clone>(list: &mut Vec<T>, item: T, len: usize) {
            list.clear();
            list.resize(len, item);
        }
        refill(&mut self.vals, Val::Unset, values);
        refill(&mut self.last_use, None, values);
        refill(&mut self.uses, 0, values);
        refill(&mut self.results, None, insts);
        refill(&mut self.merged, false, insts);
        self.in_gpr.iter_mut().for_each(Vec::clear);
        self.descs.clear();
        self.descs.push(Desc { state: FlagState::Record, until: usize::MAX });
        self.code.clear();
        self.sites.clear();
    }
}

struct Lowerer<'a> {
    version: &'a Version,
    insts: &'a [Inst],
    natives: &'a mut NativePool,
    work: &'a mut Workspace,
    /// The description of the guest's current flags.
    pending: usize,
    tables: Tables,
    next_temp: u16,
    pc: u64,
    /// Has the current guest instruction written state already?
    dirty: bool,
}

/// Lowers the only block of `version`. With `bytes`, the block begins with a check that they are
/// still there.
///
/// # Errors
/// See [`LowerError`].
pub fn lower(
    version: &Version,
    bytes: Option<CodeBytes>,
    natives: &mut NativePool,
    work: &mut Workspace,
) -> Result<Lowered, LowerError> {
    let [block] = &version.blocks[..] else { return Err(LowerError::NotBase) };
    let Term::Guest(term) = &block.term else { return Err(LowerError::NotBase) };
    work.prepare(block.insts.len(), version.types.len());
    let mut lowerer = Lowerer {
        version,
        insts: &block.insts,
        natives,
        work,
        pending: 0,
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
        if !lowerer.work.merged[i] {
            lowerer.inst(i)?;
        }
    }
    let end = lowerer.term(term)?;
    Ok(Lowered {
        code: lowerer.work.code.as_slice().into(),
        sites: lowerer.work.sites.as_slice().into(),
        end,
        last_pc: lowerer.pc,
        _tables: lowerer.tables,
    })
}

fn can_fault(inst: &Inst) -> bool {
    matches!(inst.op, Op::Load | Op::Store | Op::Native)
}

impl Lowerer<'_> {
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
            Op::Assume | Op::Poll | Op::Print | Op::Read => return Err(unsupported()),
            _ => {}
        }
        let v = inst.def().ok_or_else(unsupported)?;
        if self.work.last_use[v.index()].is_none() {
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
                // The aliased register may be overwritten before the alias is read, so both are
                // watched.
            }
            Source::Const(c) => {
                self.work.vals[v.index()] = Val::Const(c & self.version.ty(v).mask())
            }
        }
        Ok(())
    }

    fn get(&mut self, loc: Loc, v: Value) -> Result<(), LowerError> {
        match loc {
            Loc::Gpr(g) => self.place(v, g.number() as u16, true),
            Loc::FsBase => self.work.vals[v.index()] = Val::Slot(code::FS_BASE, true),
            Loc::GsBase => self.work.vals[v.index()] = Val::Slot(code::GS_BASE, true),
            Loc::Flags => {
                if let Some(until) = self.work.last_use[v.index()] {
                    let d = &mut self.work.descs[self.pending];
                    d.until = d.until.max(until);
                    self.work.vals[v.index()] = Val::Flags(self.pending);
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
                let Operand::Value(v) = operand else {
                    return Err(LowerError::Operand(operand.to_string()));
                };
                let until = self.observed_until(i);
                match self.work.vals[v.index()] {
                    Val::Flags(d) => {
                        self.work.descs[d].until = self.work.descs[d].until.max(until);
                        self.pending = d;
                    }
                    // Flags that nobody sees: any description will do.
                    Val::Unset if until == i => {
                        self.work.descs.push(Desc {
                            state: FlagState::Known(
                                Kind::new(Form::Bits, Ty::I64),
                                [Source::Const(0); 3],
                            ),
                            until: i,
                        });
                        self.pending = self.work.descs.len() - 1;
                    }
                    _ => return Err(LowerError::Operand(v.to_string())),
                }
                Ok(())
            }
            Loc::Vec(_)
            | Loc::Mask(_)
            | Loc::X87
            | Loc::Mxcsr
            | Loc::Df
            | Loc::FsBase
            | Loc::GsBase => Err(LowerError::Unsupported(format!("put {loc}"))),
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
                // The first operand may be protected together with the destination: look at it
                // again.
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
}
