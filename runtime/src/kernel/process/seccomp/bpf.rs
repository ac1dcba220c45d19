//! Classic BPF of `seccomp(2)`: accepts exactly the programs that the kernel accepts, and executes
//! them as the kernel does.
//!
//! Data: [`Program`], immutable once it is made, so there is no lock. Invariant: a program jumps
//! only forwards and ends with a return, so it terminates; it reads scratch memory only where it
//! has written before.
//!
//! Example: the instruction `[6, 0, 0, 0, k…]` returns the constant k for every call.

use super::DATA_SIZE;

/// Words of scratch memory (kernel: `BPF_MEMWORDS`).
const MEMORY: usize = 16;
/// Instructions of one program at most (kernel: `BPF_MAXINSNS`).
pub(super) const LONGEST: usize = 4096;
/// Bytes of one instruction (`struct sock_filter`): code, two distances, constant.
pub(super) const INSTRUCTION_SIZE: usize = 8;

/// The bytes of a `struct seccomp_data`.
pub(super) type Data = [u8; DATA_SIZE];

/// The second operand of an operation or a test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Operand {
    Constant(u32),
    X,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Alu {
    Add,
    Sub,
    Mul,
    Div,
    And,
    Or,
    Xor,
    Lsh,
    Rsh,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Test {
    Equal,
    Greater,
    GreaterOrEqual,
    Set,
}

/// An instruction; `A` is the accumulator, `X` the index register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Op {
    /// A = the 32-bit word of the data at this offset.
    LoadData(usize),
    SetA(u32),
    SetX(u32),
    /// A = this word of scratch memory.
    LoadA(usize),
    LoadX(usize),
    StoreA(usize),
    StoreX(usize),
    MoveToX,
    MoveToA,
    Alu(Alu, Operand),
    Negate,
    /// Skips this number of instructions.
    Jump(usize),
    /// Skips the first number of instructions if the test of A holds, else the second.
    Branch(Test, Operand, usize, usize),
    Return(u32),
    ReturnA,
}

/// A program that the kernel would accept.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Program {
    ops: Vec<Op>,
    /// The instructions as the guest passed them.
    bytes: Vec<u8>,
}

impl Program {
    /// The program of these bytes, [`INSTRUCTION_SIZE`] for each instruction. `None` if the kernel
    /// would refuse it.
    pub(super) fn new(bytes: Vec<u8>) -> Option<Program> {
        let (instructions, incomplete) = bytes.as_chunks::<INSTRUCTION_SIZE>();
        let is_sized = incomplete.is_empty() && (1..=LONGEST).contains(&instructions.len());
        let ops: Vec<Op> = instructions.iter().map(decode).collect::<Option<_>>()?;
        (is_sized && ends(&ops) && reads_what_it_wrote(&ops)).then_some(Program { ops, bytes })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.ops.len()
    }

    /// Executes the program for a call and returns its result.
    pub(super) fn run(&self, data: &Data) -> u32 {
        let (mut a, mut x, mut memory, mut at) = (0u32, 0u32, [0u32; MEMORY], 0);
        loop {
            let op = self.ops[at];
            at += 1;
            let value = |operand| match operand {
                Operand::Constant(k) => k,
                Operand::X => x,
            };
            match op {
                Op::LoadData(offset) => {
                    a = data[offset..].first_chunk().map_or(0, |word| u32::from_ne_bytes(*word));
                }
                Op::SetA(k) => a = k,
                Op::SetX(k) => x = k,
                Op::LoadA(k) => a = memory[k],
                Op::LoadX(k) => x = memory[k],
                Op::StoreA(k) => memory[k] = a,
                Op::StoreX(k) => memory[k] = x,
                Op::MoveToX => x = a,
                Op::MoveToA => a = x,
                Op::Alu(Alu::Add, operand) => a = a.wrapping_add(value(operand)),
                Op::Alu(Alu::Sub, operand) => a = a.wrapping_sub(value(operand)),
                Op::Alu(Alu::Mul, operand) => a = a.wrapping_mul(value(operand)),
                // Dividing by an X of zero ends the program with 0.
                Op::Alu(Alu::Div, operand) => match a.checked_div(value(operand)) {
                    Some(quotient) => a = quotient,
                    None => return 0,
                },
                Op::Alu(Alu::And, operand) => a &= value(operand),
                Op::Alu(Alu::Or, operand) => a |= value(operand),
                Op::Alu(Alu::Xor, operand) => a ^= value(operand),
                Op::Alu(Alu::Lsh, operand) => a = a.wrapping_shl(value(operand)),
                Op::Alu(Alu::Rsh, operand) => a = a.wrapping_shr(value(operand)),
                Op::Negate => a = a.wrapping_neg(),
                Op::Jump(distance) => at += distance,
                Op::Branch(test, operand, yes, no) => {
                    let other = value(operand);
                    let holds = match test {
                        Test::Equal => a == other,
                        Test::Greater => a > other,
                        Test::GreaterOrEqual => a >= other,
                        Test::Set => a & other != 0,
                    };
                    at += if holds { yes } else { no };
                }
                Op::Return(k) => return k,
                Op::ReturnA => return a,
            }
        }
    }
}

/// Decodes an instruction. `None` for those that `seccomp_check_filter` and `bpf_check_classic` of
/// the kernel refuse.
fn decode(bytes: &[u8; INSTRUCTION_SIZE]) -> Option<Op> {
    const BY_X: u16 = 0x08;
    let [low, high, yes, no, k @ ..] = *bytes;
    let (code, k) = (u16::from_le_bytes([low, high]), u32::from_le_bytes(k));
    let operand = if code & BY_X != 0 { Operand::X } else { Operand::Constant(k) };
    let slot = || usize::try_from(k).ok().filter(|&slot| slot < MEMORY);
    let alu = |op| Some(Op::Alu(op, operand));
    let shift = |op| if operand == Operand::X || k < u32::BITS { alu(op) } else { None };
    let branch = |test| Some(Op::Branch(test, operand, yes.into(), no.into()));
    match code {
        0x20 if k.is_multiple_of(4) && (k as usize) < DATA_SIZE => Some(Op::LoadData(k as usize)),
        0x80 => Some(Op::SetA(DATA_SIZE as u32)),
        0x81 => Some(Op::SetX(DATA_SIZE as u32)),
        0x00 => Some(Op::SetA(k)),
        0x01 => Some(Op::SetX(k)),
        0x60 => slot().map(Op::LoadA),
        0x61 => slot().map(Op::LoadX),
        0x02 => slot().map(Op::StoreA),
        0x03 => slot().map(Op::StoreX),
        0x07 => Some(Op::MoveToX),
        0x87 => Some(Op::MoveToA),
        0x04 | 0x0c => alu(Alu::Add),
        0x14 | 0x1c => alu(Alu::Sub),
        0x24 | 0x2c => alu(Alu::Mul),
        0x34 if k == 0 => None,
        0x34 | 0x3c => alu(Alu::Div),
        0x44 | 0x4c => alu(Alu::Or),
        0x54 | 0x5c => alu(Alu::And),
        0x64 | 0x6c => shift(Alu::Lsh),
        0x74 | 0x7c => shift(Alu::Rsh),
        0x84 => Some(Op::Negate),
        0xa4 | 0xac => alu(Alu::Xor),
        0x05 => usize::try_from(k).ok().map(Op::Jump),
        0x15 | 0x1d => branch(Test::Equal),
        0x25 | 0x2d => branch(Test::Greater),
        0x35 | 0x3d => branch(Test::GreaterOrEqual),
        0x45 | 0x4d => branch(Test::Set),
        0x06 => Some(Op::Return(k)),
        0x16 => Some(Op::ReturnA),
        _ => None,
    }
}

/// Whether every jump stays inside the program and the last instruction is a return.
fn ends(ops: &[Op]) -> bool {
    let stays = |(at, op): (usize, &Op)| {
        let left = ops.len() - at - 1;
        match *op {
            Op::Jump(distance) => distance < left,
            Op::Branch(_, _, yes, no) => yes < left && no < left,
            _ => true,
        }
    };
    matches!(ops.last(), Some(Op::Return(_) | Op::ReturnA)) && ops.iter().enumerate().all(stays)
}

/// Whether each word of scratch memory that is read has been written before on every path. Jumps
/// go forwards only, so one pass in program order visits all predecessors first.
fn reads_what_it_wrote(ops: &[Op]) -> bool {
    const ALL: u16 = !0;
    let mut reaching = vec![ALL; ops.len()];
    let mut written = 0u16;
    for (at, op) in ops.iter().enumerate() {
        written &= reaching[at];
        match *op {
            Op::StoreA(slot) | Op::StoreX(slot) => written |= 1 << slot,
            Op::LoadA(slot) | Op::LoadX(slot) if written & 1 << slot == 0 => return false,
            Op::Jump(distance) => {
                reaching[at + 1 + distance] &= written;
                written = ALL;
            }
            Op::Branch(_, _, yes, no) => {
                reaching[at + 1 + yes] &= written;
                reaching[at + 1 + no] &= written;
                written = ALL;
            }
            _ => {}
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(instructions: &[(u16, u8, u8, u32)]) -> Option<Program> {
        let bytes = |&(code, yes, no, k): &(u16, u8, u8, u32)| {
            let ([low, high], k) = (code.to_le_bytes(), k.to_le_bytes());
            [low, high, yes, no, k[0], k[1], k[2], k[3]]
        };
        Program::new(instructions.iter().flat_map(bytes).collect())
    }

    #[test]
    fn computes() {
        let mut data = [0; DATA_SIZE];
        data[16..20].copy_from_slice(&1000u32.to_ne_bytes());
        let value = |rest: &[(u16, u8, u8, u32)]| {
            let all = [&[(0x20, 0, 0, 16)], rest, &[(0x16, 0, 0, 0)]].concat();
            program(&all).expect("a program").run(&data)
        };
        assert_eq!(value(&[]), 1000);
        assert_eq!(value(&[(0x04, 0, 0, 5), (0x24, 0, 0, 3), (0x34, 0, 0, 2)]), 1507);
        assert_eq!(
            value(&[(0x07, 0, 0, 0), (0x64, 0, 0, 31), (0x1c, 0, 0, 0)]),
            0u32.wrapping_sub(1000)
        );
        assert_eq!(
            value(&[(0x02, 0, 0, 15), (0x00, 0, 0, 7), (0x61, 0, 0, 15), (0xac, 0, 0, 0)]),
            1000 ^ 7
        );
        assert_eq!(value(&[(0x01, 0, 0, 0), (0x3c, 0, 0, 0), (0x00, 0, 0, 9)]), 0);
        assert_eq!(
            value(&[(0x45, 1, 0, 8), (0x00, 0, 0, 1), (0x84, 0, 0, 0)]),
            0u32.wrapping_sub(1000)
        );
        assert_eq!(value(&[(0x25, 0, 1, 1000), (0x00, 0, 0, 1), (0x80, 0, 0, 0)]), 64);
    }

    #[test]
    fn refuses_what_the_kernel_refuses() {
        const END: (u16, u8, u8, u32) = (0x06, 0, 0, 0);
        assert!(program(&[END]).is_some());
        assert!(program(&[]).is_none());
        assert!(
            program(&vec![END; LONGEST]).is_some() && program(&vec![END; LONGEST + 1]).is_none()
        );
        assert!(Program::new(vec![6, 0, 0, 0, 0, 0, 0, 0, 0]).is_none());
        for refused in [
            (0x00, 0, 0, 1),  // does not end
            (0x05, 0, 0, 1),  // jumps out
            (0x05, 0, 0, !0), // far out
            (0x15, 1, 0, 0),
            (0x20, 0, 0, 64), // not in the data
            (0x20, 0, 0, 2),
            (0x28, 0, 0, 0), // a half word
            (0x94, 0, 0, 3), // a remainder
            (0x34, 0, 0, 0),
            (0x64, 0, 0, 32),
            (0x60, 0, 0, 0), // never written
            (0x02, 0, 0, 16),
        ] {
            let ended: &[_] = if refused.0 == 0 { &[refused] } else { &[refused, END] };
            assert!(program(ended).is_none(), "{refused:x?}");
        }
        // Written on one of two paths.
        let half = [(0x15, 1, 0, 0), (0x02, 0, 0, 3), (0x60, 0, 0, 3), END];
        assert!(program(&half).is_none());
    }
}
