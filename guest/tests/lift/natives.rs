//! Natives: their declared effects against the processor's.
//!
//! Every instruction is executed twice, from two states. The states agree on everything that the
//! lifted block reads and differ in everything else. What the block declares as written must come
//! out the same in both runs, and the rest must be unchanged.

use crate::arena::{Arena, End, Extended, Registers, SCRATCH_BYTES, XSAVE_BYTES, arena};
use crate::generate::{Sample, Space, State};
use crate::rng::{Rng, setting};
use dynasour_guest::lift::class::Class;
use dynasour_guest::lift::{Bytes, LiftedBlock, classify, lift_block};
use dynasour_ir::semantics::ARITH_FLAGS;
use dynasour_ir::{Effects, GuestTerm, Loc, Native, Op, Term};
use iced_x86::{Code, Encoder, Instruction, Mnemonic as M, OpKind, Register};
use std::arch::x86_64::__cpuid_count;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

const ZMM_BYTES: usize = 64;
/// Extended state offsets of the legacy area.
const MXCSR: usize = 24;
const X87_REGISTERS: usize = 32;
const XMM: usize = 160;
const XSTATE_BV: usize = 512;

/// Offsets of the parts of the extended state in an XSAVE area on this processor; none for those
/// that it lacks, or that the kernel has not switched on.
struct Layout {
    /// XCR0, as far as this test knows its bits.
    components: u8,
    avx: Option<usize>,
    masks: Option<usize>,
    zmm_high: Option<usize>,
    zmm_16_to_31: Option<usize>,
}

/// x87, SSE, AVX, and the three parts of AVX-512 (SDM vol. 1, 13.1).
const KNOWN_COMPONENTS: u8 = 0xe7;

impl Layout {
    fn new() -> Layout {
        let xcr0: u32;
        // SAFETY: the lifter's tests need XSAVE, which comes with `xgetbv`.
        unsafe { std::arch::asm!("xgetbv", in("ecx") 0, out("eax") xcr0, out("edx") _) };
        let components = xcr0 as u8 & KNOWN_COMPONENTS;
        let offset = |component: u32| {
            (components >> component & 1 != 0).then(|| __cpuid_count(0xd, component).ebx as usize)
        };
        let (avx, masks, zmm_high, zmm_16_to_31) = (offset(2), offset(5), offset(6), offset(7));
        assert!(zmm_16_to_31.is_none_or(|at| at + 16 * ZMM_BYTES <= XSAVE_BYTES));
        Layout { components, avx, masks, zmm_high, zmm_16_to_31 }
    }

    /// The pieces of a zmm register in the area, lowest first; empty where the processor has none.
    fn zmm_parts(&self, n: usize) -> [Range<usize>; 3] {
        let part = |start: Option<usize>, n: usize, size: usize| {
            start.map_or(0..0, |start| start + n * size..start + (n + 1) * size)
        };
        match n {
            16.. => [part(self.zmm_16_to_31, n - 16, ZMM_BYTES), 0..0, 0..0],
            _ => [part(Some(XMM), n, 16), part(self.avx, n, 16), part(self.zmm_high, n, 32)],
        }
    }

    fn zmm(&self, area: &Extended, n: usize) -> Vec<u8> {
        self.zmm_parts(n).into_iter().flat_map(|r| area.0[r].to_vec()).collect()
    }

    fn set_zmm(&self, area: &mut Extended, n: usize, bytes: &[u8; ZMM_BYTES]) {
        let mut at = 0;
        for part in self.zmm_parts(n) {
            let len = part.len();
            area.0[part].copy_from_slice(&bytes[at..at + len]);
            at += len;
        }
    }

    fn mask<'a>(&self, area: &'a Extended, n: usize) -> &'a [u8] {
        self.masks.map_or(&[], |masks| &area.0[masks + 8 * n..masks + 8 * (n + 1)])
    }

    fn random(&self, rng: &mut Rng) -> Extended {
        let mut area = Extended([0; XSAVE_BYTES]);
        area.0[0..2].copy_from_slice(&0x37fu16.to_le_bytes());
        area.0[4] = 0xff;
        area.0[MXCSR..MXCSR + 4].copy_from_slice(&0x1f80u32.to_le_bytes());
        for r in 0..8 {
            let at = X87_REGISTERS + 16 * r;
            area.0[at..at + 8].copy_from_slice(&(rng.next() | 1 << 63).to_le_bytes());
            let exponent = 0x3fff - 20 + rng.below(40) as u16;
            area.0[at + 8..at + 10].copy_from_slice(&exponent.to_le_bytes());
        }
        area.0[XSTATE_BV] = self.components;
        for n in 0..32 {
            self.set_zmm(&mut area, n, &random_vector(rng));
        }
        for (n, masks) in (0..8).zip(self.masks.into_iter().cycle()) {
            let at = masks + 8 * n;
            area.0[at..at + 8].copy_from_slice(&rng.interesting().to_le_bytes());
        }
        area
    }
}

fn random_vector(rng: &mut Rng) -> [u8; ZMM_BYTES] {
    let mut bytes = [0; ZMM_BYTES];
    for chunk in bytes.chunks_exact_mut(8) {
        let double = (rng.below(2000) as f64 / 7.0).to_bits();
        let v = if rng.chance(30) { double } else { rng.interesting() };
        chunk.copy_from_slice(&v.to_le_bytes());
    }
    bytes
}

/// The native of a block that consists of one instruction, and the locations that the block reads
/// and writes.
struct Declared<'b> {
    native: &'b Native,
    gpr_read: u16,
    gpr_written: u16,
    flags_read: bool,
    flags_written: bool,
}

impl Declared<'_> {
    fn of(block: &LiftedBlock) -> Option<Declared<'_>> {
        let [native] = &block.version.natives[..] else { return None };
        let mut d = Declared {
            native,
            gpr_read: 0,
            gpr_written: 0,
            flags_read: false,
            flags_written: false,
        };
        for inst in &block.version.blocks[0].insts {
            match inst.op {
                Op::Get(Loc::Gpr(g)) => d.gpr_read |= 1 << g.number(),
                Op::Put(Loc::Gpr(g)) => d.gpr_written |= 1 << g.number(),
                Op::Get(Loc::Flags) => d.flags_read = true,
                Op::Put(Loc::Flags) => d.flags_written = true,
                _ => {}
            }
        }
        Some(d)
    }

    /// A second state that agrees with `state` on everything that is read.
    fn disagree(
        &self,
        rng: &mut Rng,
        layout: &Layout,
        state: &Registers,
        area: &Extended,
    ) -> (Registers, Extended) {
        let (mut registers, mut vectors) = (*state, *area);
        for (n, g) in registers.gpr.iter_mut().enumerate() {
            if self.gpr_read >> n & 1 == 0 {
                *g = rng.next();
            }
        }
        if !self.flags_read {
            registers.flags ^= rng.next() & ARITH_FLAGS;
        }
        for n in (0..32).filter(|n| self.native.vec_read >> n & 1 == 0) {
            layout.set_zmm(&mut vectors, n, &random_vector(rng));
        }
        (registers, vectors)
    }
}

struct Run {
    input: Registers,
    vectors_in: Extended,
    output: Registers,
    vectors_out: Extended,
    memory: Vec<u8>,
    end: End,
}

struct Checker {
    layout: Layout,
    memory: Vec<u8>,
}

impl Checker {
    fn run(&self, arena: &mut Arena, input: Registers, vectors_in: Extended, state: &State) -> Run {
        arena.memory().copy_from_slice(&self.memory);
        let mut vectors_out = vectors_in;
        let (output, end) =
            arena.run_with_vectors(&input, &mut vectors_out, state.fs_base, state.gs_base);
        Run { input, vectors_in, output, vectors_out, memory: arena.memory().to_vec(), end }
    }

    /// Checks that nothing changed that is not declared as written.
    fn unchanged(
        &self,
        d: &Declared<'_>,
        run: &Run,
        arena: &Arena,
        operand: u64,
    ) -> Result<(), String> {
        let n = d.native;
        for i in (0..16).filter(|i| d.gpr_written >> i & 1 == 0) {
            if run.input.gpr[i] != run.output.gpr[i] {
                return Err(format!(
                    "register {i} changes: {:#x} {:#x}",
                    run.input.gpr[i], run.output.gpr[i]
                ));
            }
        }
        if !d.flags_written && (run.input.flags ^ run.output.flags) & ARITH_FLAGS != 0 {
            return Err("flags change".to_string());
        }
        let direction = 1 << 10;
        if !n.writes.contains(&Loc::Df) && (run.input.flags ^ run.output.flags) & direction != 0 {
            return Err("the direction flag changes".to_string());
        }
        for i in (0..32).filter(|i| !n.writes.contains(&Loc::Vec(*i))) {
            if self.layout.zmm(&run.vectors_in, i.into())
                != self.layout.zmm(&run.vectors_out, i.into())
            {
                return Err(format!("zmm{i} changes"));
            }
        }
        for i in (0..8).filter(|i| !n.writes.contains(&Loc::Mask(*i))) {
            if self.layout.mask(&run.vectors_in, i.into())
                != self.layout.mask(&run.vectors_out, i.into())
            {
                return Err(format!("k{i} changes"));
            }
        }
        let same =
            |range: Range<usize>| run.vectors_in.0[range.clone()] == run.vectors_out.0[range];
        if !n.writes.contains(&Loc::Mxcsr) && !same(MXCSR..MXCSR + 4) {
            return Err("mxcsr changes".to_string());
        }
        let x87_same = same(0..MXCSR) && same(X87_REGISTERS..XMM);
        if !n.writes.contains(&Loc::X87) && !x87_same {
            return Err("x87 state changes".to_string());
        }
        let written = match n.mem_size {
            _ if !n.effects.contains(Effects::WRITE) => 0..0,
            _ if n.effects.contains(Effects::UNKNOWN_EXTENT) => 0..SCRATCH_BYTES,
            Some(size) => {
                let start = (operand - arena.scratch()) as usize;
                start..start + size as usize
            }
            None => 0..0,
        };
        let changed = |i: &usize| self.memory[*i] != run.memory[*i];
        match (0..SCRATCH_BYTES).filter(changed).find(|i| !written.contains(i)) {
            Some(i) => Err(format!("memory at {i:#x} changes, declared {written:x?}")),
            None => Ok(()),
        }
    }

    fn agree(&self, d: &Declared<'_>, a: &Run, b: &Run) -> Result<(), String> {
        if a.end != b.end {
            return Err(format!("ends with {:?} and {:?}", a.end, b.end));
        }
        if let End::Signal(signal) = a.end {
            let trap = matches!(signal, libc::SIGILL | libc::SIGFPE | libc::SIGTRAP);
            if trap && !d.native.effects.contains(Effects::MAY_TRAP) {
                return Err(format!("an undeclared signal {signal}"));
            }
            return Ok(());
        }
        if d.native.effects.contains(Effects::NO_REPEAT) {
            return Ok(());
        }
        for i in (0..16).filter(|i| d.gpr_written >> i & 1 != 0) {
            if a.output.gpr[i] != b.output.gpr[i] {
                return Err(format!(
                    "register {i} depends on more: {:#x} {:#x}",
                    a.output.gpr[i], b.output.gpr[i]
                ));
            }
        }
        if d.flags_written && (a.output.flags ^ b.output.flags) & ARITH_FLAGS != 0 {
            return Err(format!(
                "flags depend on more: {:#x} {:#x}",
                a.output.flags, b.output.flags
            ));
        }
        for i in (0..32).filter(|i| d.native.vec_write >> i & 1 != 0) {
            if self.layout.zmm(&a.vectors_out, i) != self.layout.zmm(&b.vectors_out, i) {
                return Err(format!("zmm{i} depends on more"));
            }
        }
        if a.memory != b.memory {
            return Err("memory depends on more".to_string());
        }
        Ok(())
    }

    /// Checks that an instruction whose rsp was renamed does the same with the replacing register.
    fn renamed(
        &self,
        arena: &mut Arena,
        d: &Declared<'_>,
        run: &Run,
        state: &State,
    ) -> Result<(), String> {
        let inst = &d.native.inst;
        let rsp = Register::RSP.number();
        let outputs: u16 = d.native.gpr_out.iter().map(|g| 1 << g.number()).sum();
        let inputs: u16 = d.native.gpr_in.iter().map(|g| 1 << g.number()).sum();
        let uses_rsp = (d.gpr_read | d.gpr_written) >> rsp & 1 != 0;
        let Some(stand_in) =
            (0..16).find(|n| (outputs | inputs) & !(d.gpr_read | d.gpr_written) & 1 << n != 0)
        else {
            return Ok(());
        };
        assert!(uses_rsp && d.native.mem_size.is_none());
        let mut encoder = Encoder::new(64);
        encoder.encode(inst, arena.slot()).map_err(|e| format!("{inst} cannot be encoded: {e}"))?;
        arena.install(&encoder.take_buffer());
        let mut input = run.input;
        input.gpr.swap(rsp, stand_in);
        let second = self.run(arena, input, run.vectors_in, state);
        let mut expected = run.output.gpr;
        expected.swap(rsp, stand_in);
        if second.output.gpr != expected
            || (second.output.flags ^ run.output.flags) & ARITH_FLAGS != 0
        {
            return Err(format!("{inst} differs: {:x?}, {expected:x?}", second.output.gpr));
        }
        Ok(())
    }
}

/// Makes implicit memory operands and vector indices point into scratch memory.
fn place_implicit(
    rng: &mut Rng,
    arena: &Arena,
    layout: &Layout,
    inst: &Instruction,
    state: &mut State,
    area: &mut Extended,
) {
    let middle = arena.scratch() + SCRATCH_BYTES as u64 / 2;
    let gpr = &mut state.registers.gpr;
    let number = |r: Register| r.full_register().number();
    if inst.is_string_instruction() {
        gpr[number(Register::RSI)] = middle - 512 + rng.below(1024);
        gpr[number(Register::RDI)] = middle - 512 + rng.below(1024);
        gpr[number(Register::RCX)] = rng.below(32);
        state.registers.flags |= rng.below(2) << 10;
    }
    match inst.mnemonic() {
        M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu => gpr[number(Register::RDI)] = middle,
        M::Clzero | M::Monitorx => gpr[number(Register::RAX)] = middle,
        M::Movdir64b => gpr[number(inst.op0_register())] = middle / 64 * 64,
        _ => {}
    }
    if (0..inst.op_count()).all(|i| inst.is_vsib() || inst.op_kind(i) != OpKind::Memory) {
        (state.fs_base, state.gs_base) = (0, 0);
    }
    if inst.is_vsib() {
        gpr[number(inst.memory_base())] = middle.wrapping_sub(inst.memory_displacement64());
        let mut indices = [0; ZMM_BYTES];
        let element = if inst.is_vsib64() { 8 } else { 4 };
        for chunk in indices.chunks_exact_mut(element) {
            chunk[0] = rng.next() as u8 & 0x7f;
        }
        layout.set_zmm(area, inst.memory_index().number(), &indices);
    }
}

/// Address of the explicit memory operand; for a bit string, address of the element that holds the
/// bit.
fn element(inst: &Instruction, state: &State) -> u64 {
    let changes_bit = matches!(inst.mnemonic(), M::Bts | M::Btr | M::Btc);
    if !changes_bit || inst.op0_kind() != OpKind::Memory || inst.op1_kind() != OpKind::Register {
        return state.operand;
    }
    let register = inst.op1_register();
    let index = state.registers.gpr[register.full_register().number()];
    let size = register.size() as i64;
    let unused = 64 - 8 * size as u32;
    let index = (index << unused) as i64 >> unused;
    state.operand.wrapping_add_signed(index.div_euclid(8 * size) * size)
}

fn is_testable(inst: &Instruction) -> bool {
    // These wait for an event that does not come.
    let waits = matches!(inst.mnemonic(), M::Mwaitx | M::Umwait | M::Tpause);
    let base_needed = !inst.is_vsib() || inst.memory_base() != Register::None;
    classify(inst) == Class::Native && !waits && base_needed
}

#[test]
fn natives_do_what_they_declare() {
    let seed = setting("DYNASOUR_SEED", 0x5eed_1001);
    let cases = setting("DYNASOUR_CASES", 120_000);
    let mut arena = arena();
    let mut checker = Checker { layout: Layout::new(), memory: vec![0; SCRATCH_BYTES] };
    let mut seen: HashSet<Code> = HashSet::new();
    let mut completed: HashSet<Code> = HashSet::new();
    let mut failures: BTreeMap<M, (u64, String)> = BTreeMap::new();
    for i in 0..cases {
        let case_seed = seed.wrapping_add(i);
        let mut rng = Rng::new(case_seed);
        for chunk in checker.memory.chunks_exact_mut(8) {
            chunk.copy_from_slice(&rng.interesting().to_le_bytes());
        }
        let sample = Sample::random(&mut rng, &arena, Space::All, is_testable);
        let code = Bytes { start: sample.inst.ip(), bytes: sample.bytes() };
        let block = lift_block(sample.inst.ip(), &code, 1);
        dynasour_ir::verify::assert_valid(&block.version);
        let Some(declared) = Declared::of(&block) else {
            let special =
                matches!(block.version.blocks[0].term, Term::Guest(GuestTerm::Special { .. }));
            assert!(special, "{} {:x?}: neither native nor special", sample.inst, sample.bytes());
            continue;
        };
        let Some(mut state) = sample.state(&mut rng, &arena) else { continue };
        let mut vectors = checker.layout.random(&mut rng);
        place_implicit(&mut rng, &arena, &checker.layout, &sample.inst, &mut state, &mut vectors);
        arena.install(sample.bytes());
        let first = checker.run(&mut arena, state.registers, vectors, &state);
        let (registers, vectors) =
            declared.disagree(&mut rng, &checker.layout, &state.registers, &vectors);
        let second = checker.run(&mut arena, registers, vectors, &state);
        seen.insert(sample.inst.code());
        let mut outcome = checker.agree(&declared, &first, &second);
        if !matches!(first.end, End::Signal(_)) {
            completed.insert(sample.inst.code());
            outcome = outcome
                .and_then(|()| {
                    checker.unchanged(&declared, &first, &arena, element(&sample.inst, &state))
                })
                .and_then(|()| {
                    checker.unchanged(&declared, &second, &arena, element(&sample.inst, &state))
                });
            let has_memory = sample.inst.op_kinds().any(|k| k == OpKind::Memory);
            if !has_memory && !declared.native.effects.contains(Effects::NO_REPEAT) {
                outcome =
                    outcome.and_then(|()| checker.renamed(&mut arena, &declared, &first, &state));
            }
        }
        if let Err(difference) = outcome {
            let entry = failures.entry(sample.inst.mnemonic()).or_insert_with(|| {
                let report = format!(
                    "{} {:x?}: {difference}\n    {:x?}\n    replay: DYNASOUR_SEED={case_seed:#x} \
                        DYNASOUR_CASES=1",
                    sample.inst,
                    sample.bytes(),
                    state.registers
                );
                (0, report)
            });
            entry.0 += 1;
        }
    }
    println!(
        "{cases} natives over {} codes, {} of them without a signal",
        seen.len(),
        completed.len()
    );
    for (mnemonic, (count, first)) in &failures {
        println!("{mnemonic:?}: {count} differences, first: {first}");
    }
    assert!(failures.is_empty());
}
