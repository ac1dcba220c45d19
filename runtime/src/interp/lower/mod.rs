//! Lowering: translates one `base` block of IR to a list of operations ([`Code`]) for the
//! interpreter. Each block is lowered once.
//!
//! Words: *slot*, *record* and *handler* are those of [`super::code`]. A *position* is the index of
//! an IR instruction in the block; the terminator's is the number of instructions. A value is
//! *clean* if the bits of its slot above its type are zero.
//!
//! How operations are saved:
//! * A `get` emits nothing: its value lives in the register's slot. If the register is overwritten
//!   before the last read of such a value, the value is copied to a temporary first (`protect`).
//! * A result that a later `put` of the same guest instruction writes to a register is computed in
//!   the register's slot (`destination`), unless an operation between the two may fault or uses the
//!   register.
//! * Truncations, and zero extensions of clean values, emit nothing: handlers cut their operands to
//!   their type.
//! * Flags are not computed. They are described over slots and constants ([`FlagState`]).
//!   Conditions and faults (by the table of [`AccessSite`]s) use the description. At the end of the
//!   block it is written to the record, within the branch itself if possible. Flags that are
//!   overwritten before any use get no description.
//!
//! Files: `uses` (where each value is read), `slots` (where each value lives), this one (moves and
//! pure operations), `conditions` (flags), `memory` (operations that can fault), `end`.
//!
//! Data: [`Workspace`], lists that are used again for the next block, and the [`Lowered`] block.
//!
//! Invariants:
//! * At each operation that may fault, the registers' slots hold the state before its guest
//!   instruction, and the site's description gives that state's flags. Restartable natives are the
//!   exception: the state is what the processor leaves.
//! * Pointers in the operations point into boxes that the block owns.
//!
//! A workspace and a pool of natives belong to one guest thread, which calls [`lower`] without a
//! lock.
//!
//! Example: `sub eax, 5; je l` becomes two operations. The first subtracts 5 from slot 0 (eax) in
//! place. The second compares slot 0 with zero, records the flags as those of a subtraction with
//! this result and second operand 5, and ends the block.

mod conditions;
mod end;
mod memory;
mod slots;
mod uses;

use super::code::{self, Code, CodeBytes, FlagState, OperandSource, PureOp};
use super::flags::{Form, Kind};
use super::native::{NativeError, NativeOp, NativePool};
use super::select;
use dynasour_ir::op::ArgTy;
use dynasour_ir::{Cond, Inst, Loc, Op, Operand, Term, Trap, Ty, Value, Version};

/// The flags of the edge of a call: a call makes its target a trace head.
const CALL_FLAGS: u16 = code::ANY_EDGE | code::HEAD_EDGE;

/// Why a block could not be lowered: the code that made the block broke an invariant, or a table is
/// full.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// The version is not exactly one block with a guest terminator.
    #[error("not a base block")]
    NotBase,
    /// An operation that is not allowed in a base block.
    #[error("operation {0} cannot stand in a base block")]
    Unsupported(String),
    /// An operand has no value yet, or its value is not of the kind that the operation needs.
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

/// An operation that may fault, with the guest's state before it.
#[derive(Clone, Copy, Debug)]
pub struct AccessSite {
    /// Index of the operation in [`Lowered::code`].
    pub op: u32,
    /// The pc of its guest instruction.
    pub pc: u64,
    /// The flags before the guest instruction. For a restartable native that writes flags, the
    /// flags that the fault has left.
    pub flags: FlagState,
}

/// How a block ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// A jump to a constant pc.
    Goto(u64),
    /// A jump to one of two pcs: to the first if the word at [`code::EXIT`] is not zero.
    Branch(u64, u64),
    /// A call of a constant pc.
    Call(u64),
    /// A call of the pc in the word at [`code::EXIT`].
    CallIndirect,
    /// A return to the pc in the word at [`code::EXIT`].
    Ret,
    /// A jump to the pc in the word at [`code::EXIT`].
    Indirect,
    /// `syscall`, with the pc after it.
    Syscall(u64),
    /// The instruction at this pc, which the runtime executes.
    Special(u64),
    /// The instruction at this pc, which traps.
    Trap(u64, Trap),
}

/// A lowered block.
pub struct Lowered {
    /// The operations.
    pub code: Box<[Code]>,
    /// The operations that may fault, in the order of their indices.
    pub sites: Box<[AccessSite]>,
    /// How it ends.
    pub end: End,
    /// pc of the last guest instruction.
    pub last_pc: u64,
    /// The data to which operations point. Each element is boxed, so it does not move.
    _tables: Tables,
}

/// See [`Lowered`].
#[derive(Default)]
#[allow(clippy::vec_box, reason = "operations hold pointers to the elements")]
struct Tables {
    states: Vec<Box<FlagState>>,
    pures: Vec<Box<PureOp>>,
    natives: Vec<Box<NativeOp>>,
    bytes: Option<Box<CodeBytes>>,
}

/// Where a value lives.
#[derive(Clone, Copy)]
enum Val {
    Unset,
    /// In a slot, and whether it is clean.
    Slot(u16, bool),
    Const(u64),
    /// Flags with the description of this index.
    Flags(usize),
    /// A condition of the flags with the description of this index. Only the terminator reads it.
    Cond(Cond, usize),
}

/// A description of flags.
struct Desc {
    state: FlagState,
    /// The last position at which it may be read.
    until: usize,
}

/// A comparison that decides a condition.
struct Compare {
    op: Op,
    /// Are the operands of `op` exchanged?
    swapped: bool,
    ty: Ty,
    a: OperandSource,
    b: OperandSource,
}

/// How a condition is decided.
enum Decision {
    Compare(Compare),
    /// The condition has this value whatever the operands are.
    Always(bool),
    /// By computing it from the description at run time.
    State,
}

/// Lists that are filled for each block. They are kept from block to block to save allocations.
#[derive(Default)]
pub struct Workspace {
    vals: Vec<Val>,
    /// The last position at which each value is read; `None` if never.
    last_use: Vec<Option<usize>>,
    /// How often each value is read.
    uses: Vec<u32>,
    /// For each instruction that makes flags: the result of the same guest instruction from which
    /// the flags follow cheaply, if there is one.
    results: Vec<Option<Value>>,
    /// For each instruction: was it merged into an earlier one?
    merged: Vec<bool>,
    /// For each general register: the values that live in its slot.
    in_gpr: [Vec<Value>; 16],
    descs: Vec<Desc>,
    code: Vec<Code>,
    sites: Vec<AccessSite>,
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

/// The lowering of one block.
struct Lowerer<'a> {
    version: &'a Version,
    insts: &'a [Inst],
    natives: &'a mut NativePool,
    work: &'a mut Workspace,
    /// Index of the description of the guest's current flags.
    current_flags: usize,
    tables: Tables,
    /// The first temporary that is not used.
    next_temp: u16,
    /// The pc of the current guest instruction.
    pc: u64,
    /// Has the current guest instruction written state already?
    dirty: bool,
}

/// Lowers the only block of `version`. With `bytes`, the block begins with a check that the guest
/// code still consists of these bytes.
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
        current_flags: 0,
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
                self.bind(v, d, true);
                Ok(())
            }
            Op::Trunc => self.alias(inst.args[0], v, false),
            Op::Zext(_) if self.is_clean(inst.args[0]) => self.alias(inst.args[0], v, true),
            _ => self.pure(i, inst, v),
        }
    }

    /// Makes `v` live where `operand` lives.
    fn alias(&mut self, operand: Operand, v: Value, clean: bool) -> Result<(), LowerError> {
        match self.source(operand)? {
            // If the slot is a register's, `protect` moves both values before it is overwritten.
            OperandSource::Slot(s) => self.bind(v, s, clean),
            OperandSource::Const(c) => {
                self.work.vals[v.index()] = Val::Const(c & self.version.ty(v).mask())
            }
        }
        Ok(())
    }

    fn get(&mut self, loc: Loc, v: Value) -> Result<(), LowerError> {
        match loc {
            Loc::Gpr(g) => self.bind(v, g.number() as u16, true),
            Loc::FsBase => self.work.vals[v.index()] = Val::Slot(code::FS_BASE, true),
            Loc::GsBase => self.work.vals[v.index()] = Val::Slot(code::GS_BASE, true),
            Loc::Flags => {
                if let Some(until) = self.work.last_use[v.index()] {
                    let d = &mut self.work.descs[self.current_flags];
                    d.until = d.until.max(until);
                    self.work.vals[v.index()] = Val::Flags(self.current_flags);
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
                    OperandSource::Slot(s) if s == g => {}
                    source => {
                        self.protect(g, i)?;
                        // `protect` may have moved the operand itself.
                        match (self.source(operand)?, source) {
                            (OperandSource::Slot(s), _) => {
                                self.emit(code::zext::<u64>, g, s, 0, 0, 0)
                            }
                            (OperandSource::Const(c), _) => {
                                self.emit(code::constant, g, 0, 0, 0, c)
                            }
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
                        self.current_flags = d;
                    }
                    // The flags are overwritten before any use, so any description will do.
                    Val::Unset if until == i => {
                        self.work.descs.push(Desc {
                            state: FlagState::Known(
                                Kind::new(Form::Bits, Ty::I64),
                                [OperandSource::Const(0); 3],
                            ),
                            until: i,
                        });
                        self.current_flags = self.work.descs.len() - 1;
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
            if matches!((a, b), (OperandSource::Const(_), OperandSource::Slot(_)))
                && inst.op.is_commutative()
            {
                std::mem::swap(&mut a, &mut b);
            }
            let insert = matches!(inst.op, Op::Insert8Low | Op::Insert8High | Op::Insert16);
            let ty = if insert { Ty::I64 } else { ty };
            if let Some(run) = select::binary(inst.op, ty, matches!(b, OperandSource::Const(_))) {
                let a = self.slot_of(a)?;
                // `a` is read before `destination` may move it: a copy leaves the slot unchanged.
                let d = self.destination(i, v)?;
                let (b, imm) = match b {
                    OperandSource::Slot(s) => (s, 0),
                    OperandSource::Const(c) => (0, c),
                };
                self.emit(run, d, a, b, 0, imm);
                self.bind(v, d, true);
                return Ok(());
            }
        }
        match inst.op {
            Op::Not if inst.ty == Ty::I1 => {
                let a = self.slot(inst.args[0])?;
                let d = self.destination(i, v)?;
                self.emit(code::binary::<code::Xor, u8, true>, d, a, 0, 0, 1);
                self.bind(v, d, true);
                return Ok(());
            }
            Op::Select => {
                let c = self.slot(inst.args[0])?;
                let (a, b) = (self.slot(inst.args[1])?, self.slot(inst.args[2])?);
                let d = self.destination(i, v)?;
                self.emit(select::select(ty), d, a, b, c, 0);
                self.bind(v, d, true);
                return Ok(());
            }
            _ => {}
        }
        if let Some(run) = select::unary(inst.op, ty) {
            let a = self.slot(inst.args[0])?;
            let d = self.destination(i, v)?;
            self.emit(run, d, a, 0, 0, 0);
            self.bind(v, d, true);
            return Ok(());
        }
        self.any_pure(i, inst, v)
    }

    /// Emits a pure operation without a handler of its own: the handler evaluates it by
    /// [`dynasour_ir::semantics`].
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
        self.bind(v, d, true);
        Ok(())
    }
}
