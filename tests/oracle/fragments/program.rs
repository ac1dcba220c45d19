//! Random guest programs: real machine code with branches, calls, computed jumps and memory
//! operands that overlap.
//!
//! A program is a sequence of segments. Each consists of random instructions and a control transfer
//! to a later segment. The last segment counts down and goes back to the first, or ends. Random
//! instructions do not write registers that have a fixed use:
//!
//! | register | task |
//! | --- | --- |
//! | r15 | iterations left |
//! | r14, r12, rbp, rsp | point into the arena, often at the same bytes |
//! | r13 | small index |

use dynasour_testkit::code::{Random, synthesise, synthesise_integer};
use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, Decoder, DecoderOptions, Instruction,
    InstructionBlock, InstructionInfoFactory, MemoryOperand, Mnemonic, OpAccess, OpKind, Register,
};
use std::collections::BTreeMap;

/// Address of the programs.
pub const CODE: u64 = 0x5000_0000;

const JCC: [Code; 16] = [
    Code::Jo_rel32_64,
    Code::Jno_rel32_64,
    Code::Jb_rel32_64,
    Code::Jae_rel32_64,
    Code::Je_rel32_64,
    Code::Jne_rel32_64,
    Code::Jbe_rel32_64,
    Code::Ja_rel32_64,
    Code::Js_rel32_64,
    Code::Jns_rel32_64,
    Code::Jp_rel32_64,
    Code::Jnp_rel32_64,
    Code::Jl_rel32_64,
    Code::Jge_rel32_64,
    Code::Jle_rel32_64,
    Code::Jg_rel32_64,
];

/// Opcodes of movs, cmps, stos, lods and scas.
const STRING: [u8; 10] = [0xa4, 0xa5, 0xa6, 0xa7, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf];

const POINTERS: [Register; 4] = [Register::R14, Register::R12, Register::RBP, Register::RSP];
/// Registers that random code may write.
const FREE: [Register; 10] = [
    Register::RAX,
    Register::RCX,
    Register::RDX,
    Register::RBX,
    Register::RSI,
    Register::RDI,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
];

/// Address of a loop's counter in memory, relative to r14: beyond the bytes that other operands
/// usually reach.
pub const COUNTER: u64 = 0x100;

/// Instructions to choose from. They depend on nothing but this file, so a seed gives the same
/// program on every machine.
pub struct Pools {
    integer: Vec<Instruction>,
    /// Grouped by encoding, so that rare encodings are chosen as often as common ones.
    all: Vec<Vec<Instruction>>,
}

impl Pools {
    pub fn new() -> Pools {
        let mut random = Random(0xf1a9);
        let mut factory = InstructionInfoFactory::new();
        let mut keep = |mut list: Vec<Instruction>| {
            list.retain(|inst| {
                !inst.is_string_instruction() && !writes_reserved(inst, &mut factory)
            });
            list
        };
        let integer = keep(synthesise_integer(&mut random, 60_000));
        let mut groups: BTreeMap<u32, Vec<Instruction>> = BTreeMap::new();
        for inst in keep(synthesise(&mut random, 300_000)) {
            groups.entry(inst.code() as u32).or_default().push(inst);
        }
        Pools { integer, all: groups.into_values().collect() }
    }

    /// Number of encodings.
    pub fn encodings(&self) -> usize {
        self.all.len()
    }

    fn pick(&self, random: &mut Random, integer_percent: u64) -> Instruction {
        if random.below(100) < integer_percent {
            return self.integer[random.below(self.integer.len() as u64) as usize];
        }
        let group = &self.all[random.below(self.all.len() as u64) as usize];
        group[random.below(group.len() as u64) as usize]
    }
}

fn writes_reserved(inst: &Instruction, factory: &mut InstructionInfoFactory) -> bool {
    factory.info(inst).used_registers().iter().any(|used| {
        let reserved = matches!(
            used.register().full_register(),
            Register::R12 | Register::R15 | Register::RBP
        );
        reserved && !matches!(used.access(), OpAccess::Read | OpAccess::CondRead)
    })
}

/// A position in the program, which may not have been emitted yet.
#[derive(Clone, Copy)]
struct Label(usize);

/// A program.
pub struct Program {
    /// Its bytes, at [`CODE`].
    pub bytes: Vec<u8>,
    /// Addresses of the segments: the first is the loop's head.
    pub heads: Vec<u64>,
}

/// The program under construction. Its instructions have provisional addresses, which the encoder
/// replaces.
struct Builder<'p, 'r> {
    pools: &'p Pools,
    random: &'r mut Random,
    integer_percent: u64,
    /// Base registers of operands: fewer registers give more loads of stored values.
    pointers: &'static [Register],
    /// Number of slots in which operands lie.
    slots: u64,
    /// Whether operands may overlap in part.
    unaligned: bool,
    insts: Vec<Instruction>,
    labels: Vec<Option<usize>>,
    fixups: Vec<(usize, Label)>,
}

impl Program {
    /// A random program; `None` if an instruction cannot be encoded at its address.
    pub fn random(pools: &Pools, random: &mut Random) -> Option<Program> {
        let integer_percent = [100, 90, 60, 20][random.below(4) as usize];
        let pointers =
            [&POINTERS, &POINTERS[..1], &POINTERS[2..], &POINTERS[1..3]][random.below(4) as usize];
        let slots = 1 + random.below(8);
        let unaligned = random.one_in(2);
        let (insts, labels, fixups) = (Vec::new(), Vec::new(), Vec::new());
        let mut builder = Builder {
            pools,
            random,
            integer_percent,
            pointers,
            slots,
            unaligned,
            insts,
            labels,
            fixups,
        };
        let heads = builder.build();
        let Builder { mut insts, labels, fixups, .. } = builder;
        let provisional = |index: usize| CODE + 16 * index as u64;
        for (index, label) in fixups {
            let target = provisional(labels[label.0].expect("every label is placed"));
            let inst = &mut insts[index];
            if inst.mnemonic() == Mnemonic::Lea {
                inst.set_memory_displacement64(target);
            } else {
                inst.set_near_branch64(target);
            }
        }
        for (index, inst) in insts.iter_mut().enumerate() {
            inst.set_ip(provisional(index));
        }
        let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let encoded =
            BlockEncoder::encode(64, InstructionBlock::new(&insts, CODE), options).ok()?;
        let address = |label: &Label| {
            let offset =
                encoded.new_instruction_offsets[labels[label.0].expect("every label is placed")];
            CODE + u64::from(offset)
        };
        Some(Program { heads: heads.iter().map(address).collect(), bytes: encoded.code_buffer })
    }

    /// The program of these bytes, whose head is its first instruction.
    pub fn from_hex(text: &str) -> Program {
        let digits: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
        let byte = |pair: &[char]| {
            u8::from_str_radix(&pair.iter().collect::<String>(), 16).expect("hexadecimal")
        };
        Program { bytes: digits.chunks(2).map(byte).collect(), heads: vec![CODE] }
    }

    /// One line for each instruction, with its bytes, as in memory.
    pub fn listing(&self) -> String {
        let mut decoder = Decoder::with_ip(64, &self.bytes, CODE, DecoderOptions::NONE);
        let mut text = String::new();
        while decoder.can_decode() {
            let start = decoder.position();
            let inst = decoder.decode();
            let bytes: String =
                self.bytes[start..decoder.position()].iter().map(|b| format!("{b:02x}")).collect();
            text.push_str(&format!("  {:#x}  {bytes:<30} {inst}\n", inst.ip()));
        }
        text
    }
}

impl Builder<'_, '_> {
    fn below(&mut self, n: u64) -> u64 {
        self.random.below(n)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.random.one_in(n)
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.random.below(list.len() as u64) as usize]
    }

    fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    fn place(&mut self, label: Label) {
        self.labels[label.0] = Some(self.insts.len());
    }

    fn emit(&mut self, inst: Instruction) {
        self.insts.push(inst);
    }

    fn emit2(&mut self, code: Code, a: Register, b: Register) {
        self.emit(Instruction::with2(code, a, b).expect("operands that the code takes"));
    }

    fn branch(&mut self, code: Code, to: Label) {
        self.fixups.push((self.insts.len(), to));
        self.emit(Instruction::with_branch(code, CODE).expect("a branch"));
    }

    fn address_of(&mut self, register: Register, label: Label) {
        self.fixups.push((self.insts.len(), label));
        let operand = MemoryOperand::with_base_displ(Register::RIP, CODE as i64);
        self.emit(Instruction::with2(Code::Lea_r64_m, register, operand).expect("lea"));
    }

    fn build(&mut self) -> Vec<Label> {
        let count = 1 + self.below(5) as usize;
        let heads: Vec<Label> = (0..count).map(|_| self.label()).collect();
        let end = self.label();
        let functions: Vec<Label> = (0..self.below(3)).map(|_| self.label()).collect();
        for (index, &head) in heads.iter().enumerate() {
            self.place(head);
            let length = if self.one_in(4) { self.below(14) } else { self.below(6) };
            for _ in 0..length {
                self.instruction();
            }
            let later = &heads[index + 1..];
            let next = if later.is_empty() { end } else { self.pick(later) };
            self.transfer(next, &functions);
        }
        self.place(end);
        if !self.one_in(4) {
            self.back_edge(heads[0]);
        }
        self.emit(Instruction::with(Code::Syscall));
        for function in functions {
            self.function(function);
        }
        heads
    }

    /// Counts r15 or a word in memory down and jumps to `head` until it is zero.
    fn back_edge(&mut self, head: Label) {
        let counter = MemoryOperand::with_base_displ(Register::R14, COUNTER as i64);
        match self.below(6) {
            0 => self.emit(Instruction::with1(Code::Dec_rm64, Register::R15).expect("dec")),
            1 => self.emit(Instruction::with2(Code::Sub_rm64_imm8, Register::R15, 1).expect("sub")),
            2 => {
                self.emit(Instruction::with2(Code::Add_rm32_imm8, Register::R15D, -1).expect("add"))
            }
            3 => self.emit(Instruction::with2(Code::Sub_rm32_imm8, counter, 1).expect("sub")),
            4 => {
                // The counter stays in memory, as in unoptimised code.
                self.emit(Instruction::with2(Code::Add_rm64_imm8, counter, -1).expect("add"));
                self.emit(Instruction::with2(Code::Cmp_rm64_imm8, counter, 0).expect("cmp"));
            }
            _ => {
                let operand = MemoryOperand::with_base_displ(Register::R15, -1);
                self.emit(
                    Instruction::with2(Code::Lea_r64_m, Register::R15, operand).expect("lea"),
                );
                self.emit2(Code::Test_rm64_r64, Register::R15, Register::R15);
            }
        }
        self.branch(Code::Jne_rel32_64, head);
    }

    fn function(&mut self, label: Label) {
        self.place(label);
        let frame = self.one_in(3);
        if frame {
            self.emit(Instruction::with1(Code::Push_r64, Register::RBP).expect("push"));
            self.emit2(Code::Mov_r64_rm64, Register::RBP, Register::RSP);
        }
        for _ in 0..self.below(4) {
            self.instruction();
        }
        if frame {
            self.emit(Instruction::with(Code::Leaveq));
        }
        self.emit(Instruction::with(Code::Retnq));
    }

    fn transfer(&mut self, next: Label, functions: &[Label]) {
        match self.below(10) {
            0..5 => {
                self.condition();
                let code = self.pick(&JCC);
                self.branch(code, next);
            }
            5 if !functions.is_empty() => {
                let function = self.pick(functions);
                self.branch(Code::Call_rel32_64, function);
            }
            6 if !functions.is_empty() => {
                let (register, function) = (self.pick(&FREE), self.pick(functions));
                self.address_of(register, function);
                self.emit(Instruction::with1(Code::Call_rm64, register).expect("call"));
            }
            7 => {
                // A computed jump to one of two segments.
                let near = self.label();
                let (a, b) = (Register::RAX, Register::R8);
                self.address_of(a, near);
                self.address_of(b, next);
                self.condition();
                let code =
                    self.pick(&[Code::Cmovb_r64_rm64, Code::Cmove_r64_rm64, Code::Cmovs_r64_rm64]);
                self.emit2(code, a, b);
                self.emit(Instruction::with1(Code::Jmp_rm64, a).expect("jmp"));
                self.place(near);
                self.instruction();
            }
            8 => {
                let code = self.pick(&[
                    Code::Jrcxz_rel8_64,
                    Code::Loop_rel8_64_RCX,
                    Code::Loopne_rel8_64_RCX,
                ]);
                self.branch(code, next);
            }
            _ => self.branch(Code::Jmp_rel32_64, next),
        }
    }

    /// Sets the flags by a comparison with an unknown result, or keeps the flags that are there.
    fn condition(&mut self) {
        let register = self.pick(&FREE);
        match self.below(6) {
            0 => self.emit2(Code::Cmp_r64_rm64, register, Register::RDX),
            1 => self.emit(Instruction::with2(Code::Test_rm64_imm32, register, 1).expect("test")),
            2 => {
                let immediate = self.below(256) as i32 - 128;
                self.emit(
                    Instruction::with2(Code::Cmp_rm32_imm8, register.full_register32(), immediate)
                        .expect("cmp"),
                );
            }
            3 => {
                let operand = self.operand(1, false);
                let immediate = self.below(128) as i32;
                self.emit(Instruction::with2(Code::Cmp_rm8_imm8, operand, immediate).expect("cmp"));
            }
            4 => self.emit2(
                Code::Test_rm32_r32,
                register.full_register32(),
                register.full_register32(),
            ),
            _ => {}
        }
    }

    /// A memory operand in the arena that often overlaps other operands.
    fn operand(&mut self, size: u64, without_rex: bool) -> MemoryOperand {
        let base = if without_rex {
            self.pick(&[Register::RBP, Register::RSP])
        } else {
            self.pick(self.pointers)
        };
        let index = if !without_rex && self.one_in(5) { Register::R13 } else { Register::None };
        let scale = if index == Register::None { 1 } else { self.pick(&[1, 2, 4, 8]) };
        let mut displacement = if size >= 16 { 16 } else { 8 } * self.below(self.slots);
        if self.unaligned && self.one_in(4) {
            displacement += self.below(8);
        }
        MemoryOperand::new(base, index, scale, displacement as i64, 1, false, Register::None)
    }

    fn instruction(&mut self) {
        if self.one_in(12) {
            return self.pointer_or_string();
        }
        let mut inst = self.pools.pick(self.random, self.integer_percent);
        let operands = 0..inst.op_count();
        if operands.clone().any(|i| inst.op_kind(i) == OpKind::Memory) {
            let high = [Register::AH, Register::BH, Register::CH, Register::DH];
            let without_rex = operands.clone().any(|i| high.contains(&inst.op_register(i)));
            let operand = self.operand(inst.memory_size().size() as u64, without_rex);
            inst.set_memory_base(operand.base);
            inst.set_memory_index(operand.index);
            inst.set_memory_index_scale(operand.scale);
            inst.set_memory_displacement64(operand.displacement as u64);
            inst.set_memory_displ_size(operand.displ_size);
            inst.set_segment_prefix(Register::None);
        }
        self.emit(inst);
    }

    /// Moves pointers, spills and reloads them, or gives a string instruction addresses and a
    /// count.
    fn pointer_or_string(&mut self) {
        let pointer = self.pick(&[Register::R12, Register::RBP]);
        match self.below(8) {
            0 | 1 => {
                let step = self.pick(&[8, 16, 4, -8, 64]);
                let operand = MemoryOperand::with_base_displ(pointer, step);
                self.emit(Instruction::with2(Code::Lea_r64_m, pointer, operand).expect("lea"));
            }
            2 => {
                let step = self.pick(&[8, 1, -8]);
                self.emit(Instruction::with2(Code::Add_rm64_imm8, pointer, step).expect("add"));
            }
            3 => {
                let from = self.pick(&POINTERS);
                self.emit2(Code::Mov_r64_rm64, pointer, from);
            }
            4 => {
                let operand = MemoryOperand::with_base_displ(Register::R14, 24);
                self.emit(Instruction::with2(Code::Mov_rm64_r64, operand, pointer).expect("mov"));
                if self.one_in(2) {
                    self.emit(
                        Instruction::with2(Code::Mov_r64_rm64, pointer, operand).expect("mov"),
                    );
                }
            }
            _ => {
                let (from, to) = (self.pick(&POINTERS), self.pick(&POINTERS));
                self.emit2(Code::Mov_r64_rm64, Register::RSI, from);
                self.emit2(Code::Mov_r64_rm64, Register::RDI, to);
                let count = self.below(12) as u32;
                self.emit(
                    Instruction::with2(Code::Mov_r32_imm32, Register::ECX, count).expect("mov"),
                );
                let prefix: &[u8] = self.pick(&[&[], &[0xf3], &[0xf2], &[0xf3]]);
                let width: &[u8] = self.pick(&[&[], &[0x66], &[0x48]]);
                let bytes = [prefix, width, &[self.pick(&STRING)]].concat();
                let inst = Decoder::new(64, &bytes, DecoderOptions::NONE).decode();
                self.emit(inst);
            }
        }
    }
}
