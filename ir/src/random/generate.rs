//! Random programs of the small guest, and random states to run them on.
//!
//! The programs have the shape of compiled code: one or two loops with a counter, forward branches,
//! calls to leaf functions placed after the end, two pointers into one array so that accesses
//! often overlap, and a stack. A pointer is seldom wild, so that some programs fault. Everything is
//! a function of the random source; [`super::cases`] and [`super::whole`] call this module; no
//! lock.
//!
//! ```text
//! 0x1000 mov rbx, 5  0x1010 add rax, [rsi + rbx*8]    0x1020 dec rbx    0x1030 jne 0x1010
//! ```

use super::Rng;
use super::program::{Address, Alu, GuestInst, NativeKind, Program, ValueSource};
use crate::eval::{Machine, ModelMachine, State};
use crate::op::{Cond, Op};
use crate::semantics::ARITH_FLAGS;
use crate::types::{Gpr, Loc, Ty};

/// Registers that random instructions write: not the stack pointer, the loop counter, or the
/// pointers.
const SCRATCH: [u8; 8] = [0, 1, 2, 5, 8, 9, 10, 11];
/// Loop counter.
const COUNTER: Gpr = Gpr::RBX;
/// The mapped memory: an array, and the stack at higher addresses.
const MEMORY: (u64, u64) = (ARRAY, 0x2000);
/// Address of the array, which has a page of its own.
pub const ARRAY: u64 = 0x1_0000;

fn scratch(rng: &mut Rng) -> Gpr {
    Gpr::new(rng.pick(&SCRATCH))
}

fn any_source(rng: &mut Rng) -> Gpr {
    if rng.one_in(4) { rng.pick(&[COUNTER, Gpr::RSI, Gpr::RDI, Gpr::RSP]) } else { scratch(rng) }
}

fn width(rng: &mut Rng) -> Ty {
    rng.pick(&[Ty::I64, Ty::I64, Ty::I32, Ty::I32, Ty::I16, Ty::I8])
}

fn address(rng: &mut Rng) -> Address {
    let base = rng.pick(&[Gpr::RSI, Gpr::RSI, Gpr::RDI, Gpr::RSP]);
    let index = rng.one_in(4).then(|| (COUNTER, rng.pick(&[1, 2, 4, 8])));
    let disp = rng.pick(&[0, 0, 4, 8, 8, 12, 16, -8]);
    Address { base, index, disp, fs: rng.one_in(16) }
}

fn source(rng: &mut Rng) -> ValueSource {
    match rng.below(6) {
        0 | 1 => ValueSource::Imm(rng.interesting()),
        2 => ValueSource::Mem(address(rng)),
        _ => ValueSource::Reg(any_source(rng)),
    }
}

fn straight(rng: &mut Rng) -> GuestInst {
    let alu =
        [Alu::Add, Alu::Sub, Alu::And, Alu::Or, Alu::Xor, Alu::Adc, Alu::Sbb, Alu::Cmp, Alu::Test];
    let (ty, dst) = (width(rng), scratch(rng));
    match rng.below(26) {
        0..=4 => GuestInst::Alu { op: rng.pick(&alu), ty, dst, src: source(rng) },
        5 => GuestInst::AluMem { op: rng.pick(&alu), ty, mem: address(rng), src: any_source(rng) },
        6 => GuestInst::IncDec { dec: rng.one_in(2), ty, dst },
        7 | 8 => {
            let op = rng.pick(&[Op::Shl, Op::Shr, Op::Sar, Op::Rol, Op::Ror]);
            let count = (!rng.one_in(3)).then(|| rng.below(70) as u8);
            GuestInst::Shift { op, ty, dst, count }
        }
        9 => GuestInst::Not { ty, dst },
        10 => GuestInst::Neg { ty, dst },
        11 => GuestInst::Mul { ty, dst, src: source(rng) },
        12 => GuestInst::Lea { dst, mem: address(rng) },
        13..=15 => GuestInst::Mov { ty, dst, src: source(rng) },
        16 => {
            let from = rng.pick(&[Ty::I8, Ty::I16, Ty::I32]);
            GuestInst::Extend { signed: rng.one_in(2), from, dst, src: source(rng) }
        }
        17..=20 => {
            let src = if rng.one_in(3) {
                ValueSource::Imm(rng.interesting())
            } else {
                ValueSource::Reg(any_source(rng))
            };
            GuestInst::Store { ty, mem: address(rng), src }
        }
        21 => GuestInst::Cmov { cond: rng.pick(&Cond::ALL), dst, src: any_source(rng) },
        22 => GuestInst::Set { cond: rng.pick(&Cond::ALL), dst },
        23 => GuestInst::Push(any_source(rng)),
        24 if rng.one_in(3) => GuestInst::Read(dst),
        24 => GuestInst::Print(any_source(rng)),
        _ => {
            let kinds = [
                NativeKind::Pure,
                NativeKind::Vector,
                NativeKind::NoRepeat,
                NativeKind::VectorLoad,
                NativeKind::ScalarLoad,
            ];
            let rare = [
                NativeKind::VectorStore,
                NativeKind::ScalarStore,
                NativeKind::Fence,
                NativeKind::Scan,
                NativeKind::Fill,
            ];
            GuestInst::Native(if rng.one_in(3) { rng.pick(&rare) } else { rng.pick(&kinds) })
        }
    }
}

/// Appends straight-line code with a few forward branches over parts of itself.
fn body(rng: &mut Rng, insts: &mut Vec<GuestInst>, len: usize, calls: &mut Vec<usize>) {
    let end = insts.len() + len;
    while insts.len() < end {
        if rng.one_in(8) {
            let to = insts.len() + 1 + rng.below(end - insts.len());
            insts.push(GuestInst::Jcc { cond: rng.pick(&Cond::ALL), to });
        } else if rng.one_in(10) {
            calls.push(insts.len());
            insts.push(GuestInst::Nop);
        } else {
            insts.push(straight(rng));
        }
    }
}

/// A random program. It ends in a system call, unless it faults or returns to a wrong address
/// before.
pub fn program(rng: &mut Rng) -> Program {
    let mut insts = Vec::new();
    let mut calls = Vec::new();
    for _ in 0..1 + rng.below(2) {
        let len = rng.below(4);
        body(rng, &mut insts, len, &mut calls);
        let count = ValueSource::Imm(1 + rng.below(12) as u64);
        insts.push(GuestInst::Mov { ty: Ty::I64, dst: COUNTER, src: count });
        let head = insts.len();
        let len = 1 + rng.below(12);
        body(rng, &mut insts, len, &mut calls);
        if rng.one_in(3) {
            let step = ValueSource::Imm(rng.pick(&[4, 8]));
            insts.push(GuestInst::Alu { op: Alu::Add, ty: Ty::I64, dst: Gpr::RSI, src: step });
        }
        insts.push(GuestInst::IncDec {
            dec: true,
            ty: rng.pick(&[Ty::I64, Ty::I32]),
            dst: COUNTER,
        });
        insts.push(GuestInst::Jcc { cond: Cond::Ne, to: head });
    }
    let len = rng.below(3);
    body(rng, &mut insts, len, &mut calls);
    insts.push(GuestInst::Syscall);
    let mut functions = vec![insts.len()];
    for _ in 0..1 + rng.below(2) {
        let saved = scratch(rng);
        let saves = rng.one_in(2);
        if saves {
            insts.push(GuestInst::Push(saved));
        }
        for _ in 0..rng.below(5) {
            let inst = straight(rng);
            insts.push(if matches!(inst, GuestInst::Push(_)) { GuestInst::Nop } else { inst });
        }
        if saves {
            insts.push(GuestInst::Pop(saved));
        }
        insts.push(GuestInst::Ret);
        functions.push(insts.len());
    }
    functions.pop();
    for call in calls {
        insts[call] = GuestInst::Call(rng.pick(&functions));
    }
    Program::new(insts)
}

/// The pcs where a trace may start: the program's start, loop heads, functions.
pub fn heads(program: &Program) -> Vec<u64> {
    let mut heads = vec![Program::pc(0)];
    for (i, inst) in program.insts.iter().enumerate() {
        match inst {
            GuestInst::Jcc { to, .. } if *to <= i => heads.push(Program::pc(*to)),
            GuestInst::Call(to) => heads.push(Program::pc(*to)),
            _ => {}
        }
    }
    heads.sort_unstable();
    heads.dedup();
    heads
}

/// A random state. Most pointers point into mapped memory.
pub fn state(rng: &mut Rng) -> State {
    let mut state = State::default();
    for gpr in &mut state.gpr {
        *gpr = rng.interesting();
    }
    let array = MEMORY.0 + 64 + 8 * rng.below(8) as u64;
    state.gpr[Gpr::RSI.number()] = array;
    state.gpr[Gpr::RDI.number()] = if rng.one_in(3) { array } else { array + rng.below(64) as u64 };
    state.gpr[Gpr::RSP.number()] = MEMORY.0 + 0x1800 + 8 * rng.below(16) as u64;
    state.gpr[COUNTER.number()] = 1 + rng.below(9) as u64;
    if rng.one_in(8) {
        let wild = rng.pick(&[Gpr::RSI, Gpr::RDI, Gpr::RSP]);
        state.gpr[wild.number()] = MEMORY.0.wrapping_sub(rng.below(32) as u64);
    }
    if rng.one_in(8) {
        // The stack in the array.
        state.gpr[Gpr::RSP.number()] = array + 8 * rng.below(4) as u64;
    }
    state.flags = rng.bits() & ARITH_FLAGS;
    state
}

/// A machine with random memory at the addresses to which [`state`]'s pointers point.
pub fn machine(rng: &mut Rng) -> ModelMachine {
    let mut machine = ModelMachine::new();
    let words = (0..MEMORY.1 / 8)
        .flat_map(|_| if rng.one_in(3) { rng.interesting() } else { rng.bits() }.to_le_bytes());
    machine.write(MEMORY.0, &words.collect::<Vec<u8>>());
    machine.put(Loc::FsBase, 16 * rng.below(3) as u64);
    machine.put(Loc::Vec(0), rng.bits());
    machine.put(Loc::Vec(1), rng.bits());
    (0..rng.below(6)).for_each(|_| machine.input.push_back(rng.interesting()));
    machine
}
