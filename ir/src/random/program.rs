//! A small guest: x86-like instructions, 16 bytes each, and their lifting to `base` blocks.
//!
//! The real lifter needs real code bytes; this one lifts [`GuestInst`] values, in the same way:
//! faults come before any `put`, flags are values, natives declare their effects. [`Program`] owns
//! the instructions and a cache of lifted blocks. Invariant: the block at a pc is a function of the
//! instructions alone. [`super::generate`] makes programs, tests evaluate them; no lock.
//!
//! ```text
//! GuestInst::IncDec { dec: true, ty: I64, dst: rbx }        at 0x1020
//!                                                           v0 = get.i64 rbx
//!                                                           v1 = get.flags rflags
//!                                                           v2 = sub.i64 v0, 1
//!                                                           v3 = flags.dec.i64 v0, v1
//!                                                           put.i64 rbx, v2
//!                                                           put.flags rflags, v3
//! ```

use crate::builder::Builder;
use crate::eval::check::Code;
use crate::op::{Cond, FlagOp, Op};
use crate::types::{Gpr, Loc, Operand, Ty};
use crate::version::{Block, Effects, GuestTerm, Mem, Native, Segment, Split, Term, Version};
use iced_x86::{Decoder, DecoderOptions};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::fmt;

/// pc of the first instruction.
pub const START: u64 = 0x1000;
/// Distance between instructions.
const STEP: u64 = 16;
/// The most instructions of one `base` block.
const MAX_BLOCK: usize = 64;

/// Two-operand arithmetic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the instructions' own")]
pub enum Alu {
    Add,
    Sub,
    And,
    Or,
    Xor,
    Adc,
    Sbb,
    Cmp,
    Test,
}

/// An address of the small guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// Base register.
    pub base: Gpr,
    /// Index register and scale.
    pub index: Option<(Gpr, u8)>,
    /// Displacement.
    pub disp: i32,
    /// Relative to the FS base?
    pub fs: bool,
}

/// A source operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum ValueSource {
    Reg(Gpr),
    Imm(u64),
    Mem(Address),
}

/// Native instructions; only their declarations matter, see [`crate::eval::ModelMachine`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NativeKind {
    /// Registers to registers and flags, no effect (`bsf rax, rcx`).
    Pure,
    /// In-place state only (`addsd xmm0, xmm1`).
    Vector,
    /// Does not repeat (`cpuid`).
    NoRepeat,
    /// Reads 16 bytes into in-place state (`movups xmm0, [rdi+16]`).
    VectorLoad,
    /// Writes 16 bytes (`movups [rsi+32], xmm0`).
    VectorStore,
    /// Reads 8 bytes into in-place state, in a way that can be split off (`addsd xmm0, [rdi+24]`).
    ScalarLoad,
    /// Writes 8 bytes, in a way that can be split off (`movsd [rdi+24], xmm0`).
    ScalarStore,
    /// A fence (`mfence`).
    Fence,
    /// Reads memory of unknown extent (`lodsd`; the small guest does not change the pointer).
    Scan,
    /// Writes memory of unknown extent (`stosd`; the small guest does not change the pointer).
    Fill,
}

/// The bytes, operands and effects of a [`NativeKind`].
struct NativeShape {
    bytes: &'static [u8],
    gpr_in: &'static [Gpr],
    gpr_out: &'static [Gpr],
    /// Base register, displacement and size of an operand.
    memory: Option<(Gpr, i64, u32)>,
    effects: Effects,
}

impl NativeKind {
    fn shape(self) -> NativeShape {
        const ACCUMULATORS: &[Gpr] = &[Gpr::RAX, Gpr::RCX, Gpr::RDX];
        let none = NativeShape {
            bytes: &[],
            gpr_in: &[],
            gpr_out: &[],
            memory: None,
            effects: Effects::empty(),
        };
        match self {
            NativeKind::Pure => NativeShape {
                bytes: &[0x48, 0x0f, 0xbc, 0xc1],
                gpr_in: &ACCUMULATORS[..2],
                gpr_out: &ACCUMULATORS[..1],
                ..none
            },
            NativeKind::Vector => NativeShape {
                bytes: &[0xf2, 0x0f, 0x58, 0xc1],
                effects: Effects::STATE | Effects::READ_STATE,
                ..none
            },
            NativeKind::NoRepeat => NativeShape {
                bytes: &[0x0f, 0xa2],
                gpr_in: &ACCUMULATORS[..2],
                gpr_out: ACCUMULATORS,
                effects: Effects::NO_REPEAT,
                ..none
            },
            NativeKind::VectorLoad => NativeShape {
                bytes: &[0x0f, 0x10, 0x47, 0x10],
                memory: Some((Gpr::RDI, 16, 16)),
                effects: Effects::READ | Effects::STATE,
                ..none
            },
            NativeKind::VectorStore => NativeShape {
                bytes: &[0x0f, 0x11, 0x46, 0x20],
                memory: Some((Gpr::RSI, 32, 16)),
                effects: Effects::WRITE | Effects::READ_STATE,
                ..none
            },
            NativeKind::ScalarLoad => NativeShape {
                bytes: &[0xf2, 0x0f, 0x58, 0x47, 0x18],
                memory: Some((Gpr::RDI, 24, 8)),
                effects: Effects::READ | Effects::STATE | Effects::READ_STATE | Effects::MAY_TRAP,
                ..none
            },
            NativeKind::ScalarStore => NativeShape {
                bytes: &[0xf2, 0x0f, 0x11, 0x47, 0x18],
                memory: Some((Gpr::RDI, 24, 8)),
                effects: Effects::WRITE | Effects::READ_STATE,
                ..none
            },
            NativeKind::Fence => {
                NativeShape { bytes: &[0x0f, 0xae, 0xf0], effects: Effects::FENCE, ..none }
            }
            NativeKind::Scan => NativeShape {
                bytes: &[0xad],
                gpr_in: &[Gpr::RSI],
                gpr_out: &ACCUMULATORS[..1],
                effects: Effects::READ | Effects::UNKNOWN_EXTENT,
                ..none
            },
            NativeKind::Fill => NativeShape {
                bytes: &[0xab],
                gpr_in: &[Gpr::RAX, Gpr::RDI],
                effects: Effects::WRITE | Effects::UNKNOWN_EXTENT,
                ..none
            },
        }
    }
}

/// One instruction. Branch targets are indices of instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the instructions' own")]
pub enum GuestInst {
    Nop,
    Alu { op: Alu, ty: Ty, dst: Gpr, src: ValueSource },
    AluMem { op: Alu, ty: Ty, mem: Address, src: Gpr },
    IncDec { dec: bool, ty: Ty, dst: Gpr },
    Shift { op: Op, ty: Ty, dst: Gpr, count: Option<u8> },
    Not { ty: Ty, dst: Gpr },
    Neg { ty: Ty, dst: Gpr },
    Mul { ty: Ty, dst: Gpr, src: ValueSource },
    Lea { dst: Gpr, mem: Address },
    Mov { ty: Ty, dst: Gpr, src: ValueSource },
    Extend { signed: bool, from: Ty, dst: Gpr, src: ValueSource },
    Store { ty: Ty, mem: Address, src: ValueSource },
    Push(Gpr),
    Pop(Gpr),
    Cmov { cond: Cond, dst: Gpr, src: Gpr },
    Set { cond: Cond, dst: Gpr },
    Native(NativeKind),
    Jcc { cond: Cond, to: usize },
    Jmp(usize),
    Call(usize),
    Ret,
    Syscall,
    Print(Gpr),
    Read(Gpr),
}

/// A program, with a cache of the blocks lifted so far.
#[derive(Clone)]
pub struct Program {
    /// The instructions; the n-th is at [`Program::pc`]`(n)`.
    pub insts: Vec<GuestInst>,
    cache: BTreeMap<u64, Version>,
}

impl PartialEq for Program {
    fn eq(&self, other: &Program) -> bool {
        self.insts == other.insts
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = self.insts.iter().enumerate().filter(|(_, inst)| **inst != GuestInst::Nop);
        listed
            .into_iter()
            .try_for_each(|(i, inst)| writeln!(f, "{i:3} {:#x} {inst:?}", Program::pc(i)))
    }
}

impl Code for Program {
    fn block(&mut self, pc: u64) -> Option<&Version> {
        let index = self.index(pc)?;
        let insts = &self.insts;
        Some(self.cache.entry(pc).or_insert_with(|| lift(insts, index)))
    }
}

impl Program {
    /// A program of these instructions.
    pub fn new(insts: Vec<GuestInst>) -> Program {
        Program { insts, cache: BTreeMap::new() }
    }

    /// The pc of the n-th instruction.
    pub const fn pc(n: usize) -> u64 {
        START + STEP * n as u64
    }

    fn index(&self, pc: u64) -> Option<usize> {
        let index = pc.checked_sub(START)? / STEP;
        (pc % STEP == START % STEP && index < self.insts.len() as u64).then_some(index as usize)
    }
}

/// Lifts from the n-th instruction to the next control transfer.
fn lift(insts: &[GuestInst], first: usize) -> Version {
    let mut version = Version::new("base", Program::pc(first));
    let mut lifter = Lifter { b: Builder::new(&mut version), pc: 0 };
    let mut at = first;
    let term = loop {
        let Some(inst) = insts.get(at).filter(|_| at - first < MAX_BLOCK) else {
            break GuestTerm::Goto(Operand::Const(Program::pc(at)));
        };
        lifter.pc = Program::pc(at);
        lifter.b.at(lifter.pc);
        at += 1;
        if let Some(term) = lifter.inst(inst, Program::pc(at)) {
            break term;
        }
    };
    let body = std::mem::take(&mut lifter.b.insts);
    version.blocks.push(Block { params: Vec::new(), insts: body, term: Term::Guest(term) });
    version
}

struct Lifter<'v> {
    b: Builder<'v>,
    pc: u64,
}

const RSP: Gpr = Gpr::RSP;

impl Lifter<'_> {
    fn read(&mut self, ty: Ty, gpr: Gpr) -> Operand {
        let whole = self.b.get_gpr(gpr);
        self.b.trunc(ty, Ty::I64, whole)
    }

    fn write(&mut self, ty: Ty, gpr: Gpr, v: Operand) {
        let whole = match ty {
            Ty::I64 => v,
            Ty::I32 => self.b.zext(Ty::I64, Ty::I32, v),
            _ => {
                let old = self.b.get_gpr(gpr);
                let op = if ty == Ty::I16 { Op::Insert16 } else { Op::Insert8Low };
                self.b.pure(op, Ty::I64, &[old, v])
            }
        };
        self.b.put(Loc::Gpr(gpr), whole);
    }

    fn address(&mut self, a: &Address) -> (Mem, Operand, Operand) {
        let base = self.b.get_gpr(a.base);
        let index = a.index.map_or(Operand::Const(0), |(gpr, _)| self.b.get_gpr(gpr));
        let scale = a.index.map_or(1, |(_, scale)| scale);
        (Mem { scale, disp: i64::from(a.disp), seg: a.fs.then_some(Segment::Fs) }, base, index)
    }

    fn source(&mut self, ty: Ty, src: &ValueSource) -> Operand {
        match src {
            ValueSource::Reg(gpr) => self.read(ty, *gpr),
            ValueSource::Imm(c) => Operand::Const(c & ty.mask()),
            ValueSource::Mem(a) => {
                let (mem, base, index) = self.address(a);
                self.b.load(ty, mem, base, index)
            }
        }
    }

    fn put_flags(&mut self, flags: Operand) {
        self.b.put(Loc::Flags, flags);
    }

    /// The result (none for comparisons) and the flags.
    fn alu(&mut self, op: Alu, ty: Ty, a: Operand, b: Operand) -> (Option<Operand>, Operand) {
        let (plain, flag_op) = match op {
            Alu::Add => (Op::Add, FlagOp::Add),
            Alu::Sub | Alu::Cmp => (Op::Sub, FlagOp::Sub),
            Alu::And | Alu::Test => (Op::And, FlagOp::And),
            Alu::Or => (Op::Or, FlagOp::Or),
            Alu::Xor => (Op::Xor, FlagOp::Xor),
            Alu::Adc => (Op::Add, FlagOp::Adc),
            Alu::Sbb => (Op::Sub, FlagOp::Sbb),
        };
        let mut result = self.b.binary(plain, ty, a, b);
        let mut args: SmallVec<[Operand; 3]> = SmallVec::from_slice(&[a, b]);
        if matches!(op, Alu::Adc | Alu::Sbb) {
            let old = self.b.get(Loc::Flags);
            let carry = self.b.cond(Cond::B, old);
            let wide = self.b.zext(ty, Ty::I1, carry);
            result = self.b.binary(plain, ty, result, wide);
            args.push(carry);
        }
        let flags = self.b.flags(flag_op, ty, &args);
        (if matches!(op, Alu::Cmp | Alu::Test) { None } else { Some(result) }, flags)
    }

    /// Lifts one instruction. Returns a terminator if it transfers control. Faults come before any
    /// `put`.
    fn inst(&mut self, inst: &GuestInst, next: u64) -> Option<GuestTerm> {
        match *inst {
            GuestInst::Nop => {}
            GuestInst::Alu { op, ty, dst, ref src } => self.alu_register(op, ty, dst, src),
            GuestInst::AluMem { op, ty, ref mem, src } => self.alu_memory(op, ty, mem, src),
            GuestInst::IncDec { dec, ty, dst } => self.inc_dec(dec, ty, dst),
            GuestInst::Shift { op, ty, dst, count } => self.shift(op, ty, dst, count),
            GuestInst::Not { ty, dst } => {
                let a = self.read(ty, dst);
                let result = self.b.pure(Op::Not, ty, &[a]);
                self.write(ty, dst, result);
            }
            GuestInst::Neg { ty, dst } => self.neg(ty, dst),
            GuestInst::Mul { ty, dst, ref src } => self.mul(ty, dst, src),
            GuestInst::Lea { dst, ref mem } => {
                let (shape, base, index) = self.address(&Address { fs: false, ..*mem });
                let scaled =
                    self.b.binary(Op::Mul, Ty::I64, index, Operand::Const(u64::from(shape.scale)));
                let sum = self.b.binary(Op::Add, Ty::I64, base, scaled);
                let sum = self.b.binary(Op::Add, Ty::I64, sum, Operand::Const(shape.disp as u64));
                self.write(Ty::I64, dst, sum);
            }
            GuestInst::Mov { ty, dst, ref src } => {
                let v = self.source(ty, src);
                self.write(ty, dst, v);
            }
            GuestInst::Extend { signed, from, dst, ref src } => {
                let v = self.source(from, src);
                let v = if signed {
                    self.b.sext(Ty::I64, from, v)
                } else {
                    self.b.zext(Ty::I64, from, v)
                };
                self.write(Ty::I64, dst, v);
            }
            GuestInst::Store { ty, ref mem, ref src } => {
                let v = self.source(ty, src);
                let (mem, base, index) = self.address(mem);
                self.b.store(ty, mem, base, index, v);
            }
            GuestInst::Push(gpr) => {
                let v = self.b.get_gpr(gpr);
                self.push(v);
            }
            GuestInst::Pop(gpr) => {
                let v = self.pop();
                self.b.put(Loc::Gpr(gpr), v);
            }
            GuestInst::Cmov { cond, dst, src } => {
                let flags = self.b.get(Loc::Flags);
                let cond = self.b.cond(cond, flags);
                let (a, b) = (self.b.get_gpr(src), self.b.get_gpr(dst));
                let v = self.b.select(Ty::I64, cond, a, b);
                self.write(Ty::I64, dst, v);
            }
            GuestInst::Set { cond, dst } => {
                let flags = self.b.get(Loc::Flags);
                let cond = self.b.cond(cond, flags);
                let v = self.b.zext(Ty::I8, Ty::I1, cond);
                self.write(Ty::I8, dst, v);
            }
            GuestInst::Native(kind) => self.native(kind),
            GuestInst::Jcc { cond, to } => {
                let flags = self.b.get(Loc::Flags);
                let cond = self.b.cond(cond, flags);
                return Some(GuestTerm::Branch { cond, taken: Program::pc(to), fall: next });
            }
            GuestInst::Jmp(to) => return Some(GuestTerm::Goto(Operand::Const(Program::pc(to)))),
            GuestInst::Call(to) => {
                self.push(Operand::Const(next));
                return Some(GuestTerm::Call {
                    target: Operand::Const(Program::pc(to)),
                    ret: next,
                });
            }
            GuestInst::Ret => return Some(GuestTerm::Ret(self.pop())),
            GuestInst::Print(gpr) => {
                let v = self.b.get_gpr(gpr);
                self.b.print(v);
            }
            GuestInst::Read(gpr) => {
                let v = self.b.read();
                self.b.put(Loc::Gpr(gpr), v);
            }
            GuestInst::Syscall => return Some(GuestTerm::Syscall { next }),
        }
        None
    }

    fn alu_register(&mut self, op: Alu, ty: Ty, dst: Gpr, src: &ValueSource) {
        let b = self.source(ty, src);
        let a = self.read(ty, dst);
        let (result, flags) = self.alu(op, ty, a, b);
        if let Some(result) = result {
            self.write(ty, dst, result);
        }
        self.put_flags(flags);
    }

    fn alu_memory(&mut self, op: Alu, ty: Ty, mem: &Address, src: Gpr) {
        let (mem, base, index) = self.address(mem);
        let a = self.b.load(ty, mem, base, index);
        let b = self.read(ty, src);
        let (result, flags) = self.alu(op, ty, a, b);
        if let Some(result) = result {
            self.b.store(ty, mem, base, index, result);
        }
        self.put_flags(flags);
    }

    fn inc_dec(&mut self, dec: bool, ty: Ty, dst: Gpr) {
        let a = self.read(ty, dst);
        let (op, flag_op) = if dec { (Op::Sub, FlagOp::Dec) } else { (Op::Add, FlagOp::Inc) };
        let old = self.b.get(Loc::Flags);
        let result = self.b.binary(op, ty, a, Operand::Const(1));
        let flags = self.b.flags(flag_op, ty, &[a, old]);
        self.write(ty, dst, result);
        self.put_flags(flags);
    }

    fn shift(&mut self, op: Op, ty: Ty, dst: Gpr, count: Option<u8>) {
        let a = self.read(ty, dst);
        let old = self.b.get(Loc::Flags);
        let count = match count {
            Some(n) => Operand::Const(u64::from(n)),
            None => self.read(Ty::I8, Gpr::RCX),
        };
        let flag_op = match op {
            Op::Shl => FlagOp::Shl,
            Op::Shr => FlagOp::Shr,
            Op::Sar => FlagOp::Sar,
            Op::Rol => FlagOp::Rol,
            _ => FlagOp::Ror,
        };
        let result = self.b.binary(op, ty, a, count);
        let flags = self.b.flags(flag_op, ty, &[a, count, old]);
        self.write(ty, dst, result);
        self.put_flags(flags);
    }

    fn neg(&mut self, ty: Ty, dst: Gpr) {
        let a = self.read(ty, dst);
        let result = self.b.pure(Op::Neg, ty, &[a]);
        let flags = self.b.flags(FlagOp::Sub, ty, &[Operand::Const(0), a]);
        self.write(ty, dst, result);
        self.put_flags(flags);
    }

    fn mul(&mut self, ty: Ty, dst: Gpr, src: &ValueSource) {
        let b = self.source(ty, src);
        let a = self.read(ty, dst);
        let old = self.b.get(Loc::Flags);
        let result = self.b.binary(Op::Mul, ty, a, b);
        let flags = self.b.flags(FlagOp::MulS, ty, &[a, b, old]);
        self.write(ty, dst, result);
        self.put_flags(flags);
    }

    fn push(&mut self, v: Operand) {
        let rsp = self.b.get_gpr(RSP);
        let new = self.b.binary(Op::Sub, Ty::I64, rsp, Operand::Const(8));
        self.b.store(Ty::I64, Mem::disp(0), new, Operand::Const(0), v);
        self.b.put(Loc::Gpr(RSP), new);
    }

    fn pop(&mut self) -> Operand {
        let rsp = self.b.get_gpr(RSP);
        let v = self.b.load(Ty::I64, Mem::disp(0), rsp, Operand::Const(0));
        let new = self.b.binary(Op::Add, Ty::I64, rsp, Operand::Const(8));
        self.b.put(Loc::Gpr(RSP), new);
        v
    }

    fn native(&mut self, kind: NativeKind) {
        let NativeShape { bytes, gpr_in, gpr_out, memory, effects } = kind.shape();
        let writes_vector = effects.contains(Effects::STATE);
        let native = Native {
            inst: Decoder::with_ip(64, bytes, self.pc, DecoderOptions::NONE).decode(),
            mem_size: memory.map(|(_, _, size)| size),
            split: Split::No,
            gpr_in: SmallVec::from_slice(gpr_in),
            gpr_out: SmallVec::from_slice(gpr_out),
            flags_in: kind == NativeKind::Pure,
            flags_out: kind == NativeKind::Pure,
            vec_read: u32::from(effects.contains(Effects::READ_STATE)) * 3,
            vec_write: u32::from(writes_vector),
            writes: if kind == NativeKind::Vector {
                SmallVec::from_slice(&[Loc::Mxcsr])
            } else {
                SmallVec::new()
            },
            effects,
        };
        let mut args: SmallVec<[Operand; 4]> = SmallVec::new();
        let mem = memory.map(|(base, disp, _)| {
            args.extend([self.b.get_gpr(base), Operand::Const(0)]);
            Mem::disp(disp)
        });
        args.extend(gpr_in.iter().map(|g| self.b.get_gpr(*g)));
        if native.flags_in {
            args.push(self.b.get(Loc::Flags));
        }
        let flags_out = native.flags_out;
        let results = self.b.native(native, mem, &args);
        for (gpr, v) in gpr_out.iter().zip(&results) {
            self.b.put(Loc::Gpr(*gpr), (*v).into());
        }
        if flags_out && let Some(flags) = results.last() {
            self.put_flags((*flags).into());
        }
    }
}
