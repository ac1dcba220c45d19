//! In-process comparison of blocks in bulk (DESIGN section 10): runs of instructions taken from real code are executed once
//! natively and once interpreted, from the same state, and *all* state is compared.
//!
//! The instructions come from the executable mappings of this process (the test itself, libc, libm, …). Control transfers
//! are left out; memory operands are redirected to `[r14 + r13*scale + disp]` in scratch memory; rsp points into it.
//! Both runs use the same bytes at the same address, faults included. `DYNASOUR_SEED` replays a run, `DYNASOUR_CASES`
//! makes it longer.

use super::pool::Pool;
use super::xstate::Layout;
use super::*;
use crate::memory::test_handler;
use dynasour_guest::context::{XSTATE_SIZE, offset};
use dynasour_guest::lift::class::Class;
use dynasour_guest::lift::classify;
use iced_x86::code_asm::*;
use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Decoder, DecoderOptions, FlowControl, InstructionBlock, InstructionInfoFactory,
    Mnemonic, OpAccess, OpKind, Register,
};
use iced_x86::{Formatter, Instruction, NasmFormatter};
use std::collections::BTreeSet;

const SCRATCH_SIZE: usize = 16 << 10;
/// x87, SSE, AVX, mask registers, AVX-512.
const COMPONENTS: u64 = xstate::X87 | xstate::SSE | xstate::AVX | xstate::OPMASK | xstate::ZMM_HIGH | xstate::HIGH_16;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Small, an edge, or anything.
    fn word(&mut self) -> u64 {
        const EDGES: [u64; 10] =
            [0, 1, u64::MAX, 1 << 31, (1 << 31) - 1, 1 << 63, (1 << 63) - 1, 0x8000, 0x80, 0xffff_ffff];
        match self.below(4) {
            0 => self.below(256),
            1 => EDGES[self.below(10) as usize],
            2 => self.next() >> self.below(64),
            _ => self.next(),
        }
    }

    /// A float64 or float32 pair that is often ordinary, sometimes an edge.
    fn float(&mut self) -> u64 {
        match self.below(4) {
            0 => ((self.below(2000) as f64 - 1000.0) / 8.0).to_bits(),
            1 => {
                let one = |r: &mut Random| ((r.below(2000) as f32 - 1000.0) / 8.0).to_bits();
                u64::from(one(self)) << 32 | u64::from(one(self))
            }
            2 => [f64::INFINITY, f64::NAN, -0.0, f64::MIN_POSITIVE / 4.0, f64::MAX][self.below(5) as usize].to_bits(),
            _ => self.next(),
        }
    }
}

/// Instructions that give other results when executed again, or whose memory is not an explicit operand.
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
    ) || matches!(inst.mnemonic(), M::Leave | M::Enter | M::Wait | M::Pause | M::Umwait | M::Tpause | M::Mwaitx)
        || matches!(
            inst.mnemonic(),
            M::Fnstenv | M::Fnsave | M::Monitorx | M::Clzero | M::Xlatb | M::Ud0 | M::Ud1 | M::Ud2
        )
        || matches!(inst.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc) && inst.op0_kind() == OpKind::Memory
}

/// All usable instructions in the executable mappings of this process, each encoding about once for rare mnemonics.
fn harvest() -> Vec<Instruction> {
    // SAFETY: loads a library that is there on every glibc system, for its code only.
    unsafe { libc::dlopen(c"libm.so.6".as_ptr(), libc::RTLD_NOW) };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut factory = InstructionInfoFactory::new();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for line in maps.lines().filter(|l| l.contains("r-xp") && l.contains('/')) {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split_once(' ').unwrap().0;
        let parse = |s: &str| u64::from_str_radix(s, 16).unwrap();
        let (start, end) = (parse(start), parse(end));
        let mut bytes = vec![0; ((end - start) as usize).min(4 << 20)];
        let n = memory::fetch_code(start, &mut bytes);
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

/// Random bytes that happen to be instructions: most encodings never occur in the libraries.
fn synthesise(random: &mut Random, attempts: u32) -> Vec<Instruction> {
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
        let inst = Decoder::with_ip(64, &bytes, 0, dynasour_guest::decode::decoder_options()).decode();
        if usable(&inst, &mut factory) {
            found.push(inst);
        }
    }
    found
}

fn usable(inst: &Instruction, factory: &mut InstructionInfoFactory) -> bool {
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
    let implicit = info.used_memory().iter().filter(|m| !(stack && m.base() == Register::RSP)).count();
    let writes_fixed = info.used_registers().iter().any(|u| {
        let fixed = matches!(u.register().full_register(), Register::R13 | Register::R14)
            || u.register().full_register() == Register::RSP && !stack;
        fixed && !matches!(u.access(), OpAccess::Read | OpAccess::CondRead)
    });
    let pops_rsp = stack && (0..inst.op_count()).any(|i| inst.op_register(i).full_register() == Register::RSP);
    implicit <= usize::from(explicit) && !writes_fixed && !pops_rsp
}

/// Redirects the memory operand into scratch memory.
fn redirect(inst: &mut Instruction, random: &mut Random) {
    if !(0..inst.op_count()).any(|i| inst.op_kind(i) == OpKind::Memory) {
        return;
    }
    let scale = inst.memory_index_scale();
    let high_byte = (0..inst.op_count())
        .any(|i| matches!(inst.op_register(i), Register::AH | Register::BH | Register::CH | Register::DH));
    if high_byte {
        // No REX prefix, so no r14: an absolute address cannot reach, but the stack can.
        inst.set_memory_base(Register::RSP);
        inst.set_memory_index(Register::None);
    } else {
        inst.set_memory_base(Register::R14);
        inst.set_memory_index(if random.one_in(2) { Register::R13 } else { Register::None });
        inst.set_memory_index_scale(scale);
    }
    let mut displacement = 64 * random.below(32);
    if random.one_in(8) {
        displacement += random.below(64);
    }
    inst.set_memory_displacement64(displacement);
    inst.set_memory_displ_size(8);
    inst.set_segment_prefix(Register::None);
}

/// A function that runs `code` on the state in `context`: address, and where its parts lie.
struct Native {
    entry: u64,
    body: u64,
    end: u64,
}

fn native_copy(pool: &mut Pool, code: &[Instruction], context: &ThreadContext) -> Option<Native> {
    let address = std::ptr::from_ref(context) as u64;
    let all = COMPONENTS as i32;
    let gprs = [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15];
    let saved = [rbx, rbp, r12, r13, r14, r15];
    let gpr = |n: usize| (offset::GPR + 8 * n) as i32;

    let mut asm = CodeAssembler::new(64).unwrap();
    saved.iter().for_each(|r| asm.push(*r).unwrap());
    asm.mov(rdi, address).unwrap();
    asm.mov(eax, all).unwrap();
    asm.xor(edx, edx).unwrap();
    asm.xrstor64(ptr(rdi + offset::XSTATE as i32)).unwrap();
    asm.mov(qword_ptr(rdi + offset::HOST_RSP as i32), rsp).unwrap();
    asm.push(qword_ptr(rdi + offset::RFLAGS as i32)).unwrap();
    asm.popfq().unwrap();
    for (n, r) in gprs.iter().enumerate().filter(|(n, _)| *n != 7) {
        asm.mov(*r, qword_ptr(rdi + gpr(n))).unwrap();
    }
    asm.mov(rdi, qword_ptr(rdi + gpr(7))).unwrap();
    let prologue = asm.assemble(pool.next_address()).unwrap();

    let body = pool.next_address() + prologue.len() as u64;
    let encoded = BlockEncoder::encode(64, InstructionBlock::new(code, body), BlockEncoderOptions::NONE).ok()?;
    let end = body + encoded.code_buffer.len() as u64;

    let mut asm = CodeAssembler::new(64).unwrap();
    asm.mov(qword_ptr(address + offset::GPR as u64), rax).unwrap();
    asm.mov(rax, address).unwrap();
    for (n, r) in gprs.iter().enumerate().skip(1) {
        asm.mov(qword_ptr(rax + gpr(n)), *r).unwrap();
    }
    asm.mov(rsp, qword_ptr(rax + offset::HOST_RSP as i32)).unwrap();
    asm.pushfq().unwrap();
    asm.pop(qword_ptr(rax + offset::RFLAGS as i32)).unwrap();
    asm.cld().unwrap();
    asm.mov(rcx, rax).unwrap();
    asm.mov(eax, all).unwrap();
    asm.xor(edx, edx).unwrap();
    asm.xsave64(ptr(rcx + offset::XSTATE as i32)).unwrap();
    asm.fninit().unwrap();
    asm.push(0x1f80).unwrap();
    asm.ldmxcsr(dword_ptr(rsp)).unwrap();
    asm.pop(rax).unwrap();
    asm.vzeroupper().unwrap();
    saved.iter().rev().for_each(|r| asm.pop(*r).unwrap());
    asm.ret().unwrap();
    let epilogue = asm.assemble(end).unwrap();

    let code = [prologue, encoded.code_buffer, epilogue].concat();
    pool.append(&code).map(|entry| Native { entry, body, end })
}

/// Guest code that ends, for the interpreter, in a `syscall` where the native copy leaves.
struct UntilEnd(std::rc::Rc<std::cell::Cell<u64>>);

impl Fetch for UntilEnd {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        let n = memory::fetch_code(addr, buf);
        for (i, byte) in [0x0f, 0x05].into_iter().enumerate() {
            let at = self.0.get().wrapping_add(i as u64).wrapping_sub(addr);
            if at < n as u64 {
                buf[at as usize] = byte;
            }
        }
        n
    }
}

fn randomise(context: &mut ThreadContext, scratch: u64, first: &Instruction, random: &mut Random) {
    for gpr in &mut context.gpr {
        *gpr = random.word();
    }
    context.gpr[4] = scratch + SCRATCH_SIZE as u64 / 2;
    context.gpr[13] = 64 * random.below(16);
    context.gpr[14] = scratch + 1024;
    let direction = if random.one_in(16) { 1 << 10 } else { 0 };
    context.rflags = 0x202 | random.next() & ARITH_FLAGS | direction;
    if first.is_string_instruction() {
        context.gpr[1] = random.below(40);
        context.gpr[6] = scratch + 2048 + random.below(4096);
        context.gpr[7] = scratch + 4096 + random.below(4096);
    }
    let bytes = &mut context.xstate.0;
    for word in bytes[..XSTATE_SIZE].chunks_exact_mut(8).take(2696 / 8) {
        word.copy_from_slice(&random.float().to_le_bytes());
    }
    // x87: control word, status word without pending exceptions, abridged tags, no instruction pointers.
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
    let mut valid = COMPONENTS & Layout::get().enabled;
    if random.one_in(4) {
        valid &= random.next() | xstate::X87;
    }
    xstate::set_valid(context, valid);
}

fn copy(from: &ThreadContext, to: &mut ThreadContext) {
    to.gpr = from.gpr;
    to.rflags = from.rflags;
    to.xstate.0 = from.xstate.0;
}

/// What differs between two contexts.
fn differences(native: &mut ThreadContext, ours: &mut ThreadContext) -> Vec<String> {
    let mut out = Vec::new();
    for n in 0..16 {
        if native.gpr[n] != ours.gpr[n] {
            out.push(format!("gpr {n}: native {:#x}, interpreted {:#x}", native.gpr[n], ours.gpr[n]));
        }
    }
    let visible = ARITH_FLAGS | 1 << 10;
    if (native.rflags ^ ours.rflags) & visible != 0 {
        out.push(format!("flags: native {:#x}, interpreted {:#x}", native.rflags & visible, ours.rflags & visible));
    }
    let enabled = COMPONENTS & Layout::get().enabled;
    xstate::initialise(native, enabled);
    xstate::initialise(ours, enabled);
    // Not compared: opcode, instruction and data pointer of the last x87 instruction, which AMD processors save
    // only while an exception is pending (and which fnstenv and fnsave show); the mask of MXCSR.
    for at in (0..6).chain(24..28).chain(32..416).chain(576..2696) {
        if native.xstate.0[at] != ours.xstate.0[at] {
            let around = at & !7..(at & !7) + 8;
            let (a, b) = (&native.xstate.0[around.clone()], &ours.xstate.0[around]);
            out.push(format!("xstate byte {at}: native {a:02x?}, interpreted {b:02x?}"));
        }
    }
    out.truncate(12);
    out
}

fn listing(code: &[Instruction]) -> String {
    let mut formatter = NasmFormatter::new();
    let mut text = String::new();
    for inst in code {
        formatter.format(inst, &mut text);
        text.push_str("; ");
    }
    text
}

fn environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|s| s.parse().ok()).unwrap_or(default)
}

#[test]
fn real_code_interpreted_equals_native() {
    test_handler::install();
    if !Layout::get().has_avx512() {
        println!("compared without the AVX-512 components of this machine");
    }
    let cases = environment("DYNASOUR_CASES", 60_000);
    let first_seed = environment("DYNASOUR_SEED", 1);
    let mut instructions = harvest();
    assert!(instructions.len() > 10_000, "{}", instructions.len());
    instructions.extend(synthesise(&mut Random(first_seed), 400_000));
    // Rare instructions shall be met as often as mov.
    let mut by_code: std::collections::BTreeMap<u32, Vec<&Instruction>> = Default::default();
    for inst in &instructions {
        by_code.entry(inst.code() as u32).or_default().push(inst);
    }
    let groups: Vec<_> = by_code.into_values().collect();

    let mut pool = Pool::new().unwrap();
    let end = std::rc::Rc::new(std::cell::Cell::new(0));
    let mut interp = Interp::with_code(Box::new(UntilEnd(end.clone())));
    let (mut native, mut ours, mut start) = (ThreadContext::new(), ThreadContext::new(), ThreadContext::new());
    let mut memory = vec![0u64; SCRATCH_SIZE / 8 + 8];
    let scratch = (memory.as_mut_ptr() as u64).next_multiple_of(64);
    let bytes = || {
        // SAFETY: the vector is longer than the part in use, and lives through the test.
        unsafe { std::slice::from_raw_parts_mut(scratch as *mut u8, SCRATCH_SIZE) }
    };
    let pattern: Vec<u8> = {
        let mut random = Random(7);
        (0..SCRATCH_SIZE / 8).flat_map(|_| random.float().to_le_bytes()).collect()
    };
    let (mut run, mut faults) = (0, 0);
    let mut failures = Vec::new();
    for seed in first_seed..first_seed + cases {
        let mut random = Random(seed.wrapping_mul(0x1234_5678_9abc_def1));
        let count = 1 + random.below(8) as usize;
        let mut code: Vec<Instruction> = Vec::new();
        while code.len() < count {
            let inst = if random.one_in(2) {
                let group = &groups[random.below(groups.len() as u64) as usize];
                *group[random.below(group.len() as u64) as usize]
            } else {
                instructions[random.below(instructions.len() as u64) as usize]
            };
            if !inst.is_string_instruction() || code.is_empty() {
                code.push(inst);
            }
        }
        code.iter_mut().for_each(|inst| redirect(inst, &mut random));
        if pool.next_address() > 0 && interp.block_count() > 20_000 {
            pool.clear().unwrap();
            interp.invalidate_all();
        }
        let Some(copy_of) = native_copy(&mut pool, &code, &native) else { continue };
        end.set(copy_of.end);
        randomise(&mut start, scratch, &code[0], &mut random);
        copy(&start, &mut native);
        copy(&start, &mut ours);

        bytes().copy_from_slice(&pattern);
        test_handler::expect_faults(copy_of.body..copy_of.end, copy_of.end);
        // SAFETY: a complete function made above, which restores the host's state; faults land in its epilogue.
        unsafe { std::mem::transmute::<u64, extern "C" fn()>(copy_of.entry)() };
        let native_memory = bytes().to_vec();
        let native_fault = test_handler::faulted_at();

        bytes().copy_from_slice(&pattern);
        ours.rip = copy_of.body;
        let stop = interp.run(&mut ours, &mut NoPolicy);
        let our_fault = match stop {
            Stop::Syscall => None,
            Stop::Fault { pc, .. } => Some(pc),
            ref other => panic!("seed {seed}: {other:?} of {}", listing(&code)),
        };
        run += 1;
        faults += u32::from(our_fault.is_some());
        let mut out = differences(&mut native, &mut ours);
        if native_fault != our_fault {
            out.push(format!("fault: native {native_fault:x?}, interpreted {our_fault:x?}"));
        }
        if native_memory[..] != *bytes() {
            out.push("memory".to_string());
        }
        if !out.is_empty() {
            failures.push(format!("seed {seed}: {}\n    {}", listing(&code), out.join("\n    ")));
            if failures.len() >= 12 {
                break;
            }
        }
    }
    println!("{run} blocks compared, {faults} of them with a fault, from {} encodings", groups.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(run as u64 * 10 > cases * 9);
}
