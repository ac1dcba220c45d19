//! Random instructions and random register contents, for comparing executions of the same code.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;

use dynasour_guest::lift::class::Class;
use dynasour_guest::lift::classify;
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind, Register,
};

/// A small seeded generator.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Any 64 bits.
    #[expect(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Less than `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A random number: small, at an edge, or any.
    pub fn word(&mut self) -> u64 {
        const EDGES: [u64; 10] = [
            0,
            1,
            u64::MAX,
            1 << 31,
            (1 << 31) - 1,
            1 << 63,
            (1 << 63) - 1,
            0x8000,
            0x80,
            0xffff_ffff,
        ];
        match self.below(4) {
            0 => self.below(256),
            1 => EDGES[self.below(10) as usize],
            2 => self.next() >> self.below(64),
            _ => self.next(),
        }
    }

    /// A float64, or a pair of float32, that is often ordinary and sometimes an edge case.
    pub fn float(&mut self) -> u64 {
        match self.below(4) {
            0 => ((self.below(2000) as f64 - 1000.0) / 8.0).to_bits(),
            1 => {
                let one = |r: &mut Random| ((r.below(2000) as f32 - 1000.0) / 8.0).to_bits();
                u64::from(one(self)) << 32 | u64::from(one(self))
            }
            2 => [f64::INFINITY, f64::NAN, -0.0, f64::MIN_POSITIVE / 4.0, f64::MAX]
                [self.below(5) as usize]
                .to_bits(),
            _ => self.next(),
        }
    }
}

/// Instructions whose results change when they are executed again, or whose memory access is not an
/// explicit operand.
fn excluded(inst: &Instruction) -> bool {
    use Mnemonic as M;
    matches!(
        inst.mnemonic(),
        M::Rdtsc
            | M::Rdtscp
            | M::Rdrand
            | M::Rdseed
            | M::Rdpid
            | M::Cpuid
            | M::Xgetbv
            | M::Rdpmc
            | M::Rdpru
            | M::Rdpkru
            | M::Wrpkru
    ) || matches!(
        inst.mnemonic(),
        M::Leave | M::Enter | M::Wait | M::Pause | M::Umwait | M::Tpause | M::Mwaitx
    ) || matches!(
        inst.mnemonic(),
        M::Fnstenv | M::Fnsave | M::Monitorx | M::Clzero | M::Xlatb | M::Ud0 | M::Ud1 | M::Ud2
    ) || matches!(inst.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc)
        && inst.op0_kind() == OpKind::Memory
}

/// All usable instructions in the executable mappings of this process (the test itself, libc,
/// libm), each once.
pub fn harvest() -> Vec<Instruction> {
    // SAFETY: loads a library that exists on every glibc system and is only read.
    unsafe { libc::dlopen(c"libm.so.6".as_ptr(), libc::RTLD_NOW) };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let mut factory = InstructionInfoFactory::new();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for line in maps.lines().filter(|l| l.contains("r-xp") && l.contains('/')) {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split_once(' ').unwrap().0;
        let parse = |s: &str| u64::from_str_radix(s, 16).unwrap();
        let (start, end) = (parse(start), parse(end));
        let mut bytes = vec![0; ((end - start) as usize).min(4 << 20)];
        let n = memory.read_at(&mut bytes, start).unwrap_or(0);
        let mut decoder = Decoder::with_ip(64, &bytes[..n], start, DecoderOptions::NONE);
        let mut inst = Instruction::default();
        while decoder.can_decode() {
            decoder.decode_out(&mut inst);
            if usable(&inst, &mut factory) && seen.insert(format!("{:?}{inst:?}", inst.code())) {
                found.push(inst);
            }
        }
    }
    found
}

/// Random bytes that decode as instructions: most encodings never occur in the libraries. The
/// result depends on `random` only.
pub fn synthesise(random: &mut Random, attempts: u32) -> Vec<Instruction> {
    const STARTS: [&[u8]; 14] = [
        &[0x0f],
        &[0x66, 0x0f],
        &[0xf2, 0x0f],
        &[0xf3, 0x0f],
        &[0x66, 0x4d, 0x0f],
        &[0x66, 0x0f, 0x38],
        &[0x66, 0x0f, 0x3a],
        &[0x0f, 0x38],
        &[0xf3, 0x48, 0x0f],
        &[0xc5],
        &[0xc4],
        &[0x62],
        &[0xf0],
        &[],
    ];
    let mut factory = InstructionInfoFactory::new();
    let mut found = Vec::new();
    for _ in 0..attempts {
        let start = STARTS[random.below(14) as usize];
        let mut bytes = [0; 15];
        bytes.iter_mut().for_each(|b| *b = random.next() as u8);
        bytes[..start.len()].copy_from_slice(start);
        match start {
            // The register extension and map bits that exist.
            [0xc4] => bytes[1] = bytes[1] & 0xe0 | (1 + random.below(3) as u8),
            [0x62] => {
                bytes[1] = bytes[1] & 0xf0 | (1 + random.below(3) as u8);
                bytes[2] |= 4;
            }
            [] if random.one_in(2) => bytes[0] = 0xd8 + random.below(8) as u8,
            _ => {}
        }
        let inst =
            Decoder::with_ip(64, &bytes, 0, dynasour_guest::decode::decoder_options()).decode();
        if usable(&inst, &mut factory) {
            found.push(inst);
        }
    }
    found
}

/// May `inst` stand in a random program? It must go on to the next instruction, do the same when
/// executed again, and have at most one explicit memory operand. It must keep r13 and r14, and
/// (except by push and pop) rsp.
pub fn usable(inst: &Instruction, factory: &mut InstructionInfoFactory) -> bool {
    if inst.is_invalid()
        || inst.flow_control() != FlowControl::Next
        || excluded(inst)
        || inst.is_vsib()
        || !matches!(classify(inst), Class::Modelled | Class::Native)
        || matches!(inst.segment_prefix(), Register::FS | Register::GS)
    {
        return false;
    }
    if inst.is_string_instruction() {
        return true;
    }
    let explicit = (0..inst.op_count()).any(|i| inst.op_kind(i) == OpKind::Memory);
    let info = factory.info(inst);
    let stack = inst.stack_pointer_increment() != 0;
    let implicit =
        info.used_memory().iter().filter(|m| !(stack && m.base() == Register::RSP)).count();
    let writes_fixed = info.used_registers().iter().any(|u| {
        let fixed = matches!(u.register().full_register(), Register::R13 | Register::R14)
            || u.register().full_register() == Register::RSP && !stack;
        fixed && !matches!(u.access(), OpAccess::Read | OpAccess::CondRead)
    });
    let pops_rsp =
        stack && (0..inst.op_count()).any(|i| inst.op_register(i).full_register() == Register::RSP);
    implicit <= usize::from(explicit) && !writes_fixed && !pops_rsp
}

/// Random bytes that are integer instructions of the kinds that compilers use, at every width. The
/// result depends on `random` only.
pub fn synthesise_integer(random: &mut Random, attempts: u32) -> Vec<Instruction> {
    let mut factory = InstructionInfoFactory::new();
    let mut found = Vec::new();
    for _ in 0..attempts {
        let mut bytes = Vec::with_capacity(24);
        if random.one_in(5) {
            bytes.push(0x66);
        }
        if !random.one_in(3) {
            bytes.push(0x40 | random.below(16) as u8);
        }
        match random.below(12) {
            0..4 => bytes.push((8 * random.below(8) + random.below(6)) as u8),
            4 => bytes.extend([0x0f, 0x40 + random.below(16) as u8]),
            5 => bytes.extend([0x0f, 0x90 + random.below(16) as u8]),
            6 => bytes.push([0xc0, 0xc1, 0xd0, 0xd1, 0xd2, 0xd3][random.below(6) as usize]),
            7 => bytes.push([0x80, 0x81, 0x83, 0xf6, 0xf7, 0xfe, 0xff][random.below(7) as usize]),
            8 => bytes.push(
                [0x84, 0x85, 0x86, 0x87, 0x63, 0x69, 0x6b, 0x98, 0x99, 0x8d, 0x50, 0x58]
                    [random.below(12) as usize],
            ),
            9 => {
                const SECOND: [u8; 20] = [
                    0xa3, 0xab, 0xb3, 0xbb, 0xba, 0xa4, 0xa5, 0xac, 0xad, 0xaf, 0xb6, 0xb7, 0xbe,
                    0xbf, 0xc8, 0xcb, 0xc0, 0xc1, 0xb0, 0xb1,
                ];
                bytes.extend([0x0f, SECOND[random.below(20) as usize]]);
            }
            _ => bytes.push([0x88, 0x89, 0x8a, 0x8b, 0xc6, 0xc7][random.below(6) as usize]),
        }
        bytes.push(random.next() as u8);
        bytes.extend(random.word().to_le_bytes());
        bytes.extend(random.word().to_le_bytes());
        let inst =
            Decoder::with_ip(64, &bytes, 0, dynasour_guest::decode::decoder_options()).decode();
        if usable(&inst, &mut factory) {
            found.push(inst);
        }
    }
    found
}

/// Fills an XSAVE area (standard format) with values at which arithmetic has edge cases: every
/// register of the components up to AVX-512, a control word, a status word without pending
/// exceptions, and an MXCSR that seldom unmasks an exception. The header marks no component as
/// valid.
pub fn randomise_extended(bytes: &mut [u8], random: &mut Random) {
    for word in bytes.chunks_exact_mut(8).take(2696 / 8) {
        word.copy_from_slice(&random.float().to_le_bytes());
    }
    // x87: control word, status word without pending exceptions, abridged tags, no instruction
    // pointers.
    bytes[..32].fill(0);
    let control = [0x37fu16, 0x27f, 0x77f, 0xf7f][random.below(4) as usize];
    bytes[0..2].copy_from_slice(&control.to_le_bytes());
    bytes[2..4].copy_from_slice(&(random.next() as u16 & 0x7f00).to_le_bytes());
    bytes[4] = if random.one_in(2) { 0 } else { random.next() as u8 };
    for register in 0..8 {
        let at = 32 + 16 * register;
        let exponent = (0x3fffu16 - 20 + random.below(40) as u16) | (random.next() as u16 & 0x8000);
        bytes[at + 7] |= 0x80;
        bytes[at + 8..at + 10].copy_from_slice(&exponent.to_le_bytes());
        bytes[at + 10..at + 16].fill(0);
    }
    let mut mxcsr = 0x1f80 | (random.next() as u32 & 0xe040);
    if random.one_in(64) {
        mxcsr &= !(0x80 << random.below(6));
    }
    bytes[24..28].copy_from_slice(&mxcsr.to_le_bytes());
    bytes[28..32].copy_from_slice(&0xffffu32.to_le_bytes());
    bytes[512..576].fill(0);
}

/// The instructions on one line.
pub fn listing(code: &[Instruction]) -> String {
    code.iter().map(|inst| format!("{inst}; ")).collect()
}
