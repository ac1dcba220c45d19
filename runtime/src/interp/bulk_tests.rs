//! In-process comparison of the interpreter with the processor (docs/design.md, "Correctness").
//! Sequences of instructions taken from real code are executed once natively and once interpreted,
//! from the same state. Then *all* state is compared, also after a fault.
//!
//! The instructions come from the executable mappings of this process: the test itself, libc, libm
//! and others. Control transfers are left out. Memory operands are redirected to
//! `[r14 + r13*scale + disp]` in scratch memory, into which rsp points too. Both executions use the
//! same bytes at the same address. `DYNASOUR_SEED` replays a run, `DYNASOUR_CASES` makes it longer.

use super::pool::Pool;
use super::xstate::Layout;
use super::*;
use crate::memory::test_handler;
use dynasour_guest::context::offset;
use dynasour_testkit::code::{self, Random, harvest, listing, synthesise};
use iced_x86::code_asm::*;
use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Instruction, InstructionBlock, OpKind, Register,
};

const SCRATCH_SIZE: usize = 16 << 10;
/// x87, SSE, AVX, mask registers, AVX-512.
const COMPONENTS: u64 =
    xstate::X87 | xstate::SSE | xstate::AVX | xstate::OPMASK | xstate::ZMM_HIGH | xstate::HIGH_16;

/// Redirects the memory operand into scratch memory.
fn redirect(inst: &mut Instruction, random: &mut Random) {
    if !(0..inst.op_count()).any(|i| inst.op_kind(i) == OpKind::Memory) {
        return;
    }
    let scale = inst.memory_index_scale();
    let high_byte = (0..inst.op_count()).any(|i| {
        matches!(inst.op_register(i), Register::AH | Register::BH | Register::CH | Register::DH)
    });
    if high_byte {
        // AH to DH exclude a REX prefix and so r14. An absolute address does not reach the scratch
        // memory, but rsp points into it.
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

/// A generated function that runs `code` on the state in `context`, and the addresses of its parts.
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
    let encoded =
        BlockEncoder::encode(64, InstructionBlock::new(code, body), BlockEncoderOptions::NONE)
            .ok()?;
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

/// The guest code as the interpreter reads it: with a `syscall` where the native copy leaves.
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
    code::randomise_extended(&mut context.xstate.0, random);
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

/// The differences between two contexts, as text.
fn differences(native: &mut ThreadContext, ours: &mut ThreadContext) -> Vec<String> {
    let mut out = Vec::new();
    for n in 0..16 {
        if native.gpr[n] != ours.gpr[n] {
            out.push(format!(
                "gpr {n}: native {:#x}, interpreted {:#x}",
                native.gpr[n], ours.gpr[n]
            ));
        }
    }
    let visible = ARITH_FLAGS | 1 << 10;
    if (native.rflags ^ ours.rflags) & visible != 0 {
        out.push(format!(
            "flags: native {:#x}, interpreted {:#x}",
            native.rflags & visible,
            ours.rflags & visible
        ));
    }
    let enabled = COMPONENTS & Layout::get().enabled;
    xstate::initialise(native, enabled);
    xstate::initialise(ours, enabled);
    // Not compared: opcode, instruction and data pointer of the last x87 instruction, which AMD
    // processors save only while an exception is pending (and which fnstenv and fnsave show); the
    // mask of MXCSR.
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
    // Choose each instruction with the same probability, so that rare ones are tested as often as
    // mov.
    let mut by_code: std::collections::BTreeMap<u32, Vec<&Instruction>> = Default::default();
    for inst in &instructions {
        by_code.entry(inst.code() as u32).or_default().push(inst);
    }
    let groups: Vec<_> = by_code.into_values().collect();

    let mut pool = Pool::new().unwrap();
    let end = std::rc::Rc::new(std::cell::Cell::new(0));
    let mut interp = Interp::with_code(Box::new(UntilEnd(end.clone())));
    let (mut native, mut ours, mut start) =
        (ThreadContext::new(), ThreadContext::new(), ThreadContext::new());
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
        // SAFETY: a complete function made above, which restores the host's state; faults land in
        // its epilogue.
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
    println!(
        "{run} blocks compared, {faults} of them with a fault, from {} encodings",
        groups.len()
    );
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(run as u64 * 10 > cases * 9);
}
