//! Modelled instructions: the lifted block's evaluation against the processor, on random operands.

use crate::arena::{Arena, End, SCRATCH_BYTES, arena};
use crate::classes::is_foreign;
use crate::eval::Machine;
use crate::generate::{Sample, Space, State};
use crate::rng::{Rng, setting};
use dynasour_guest::lift::class::{Class, entry, is_nop};
use dynasour_guest::lift::{Bytes, LiftedBlock, classify, lift_block};
use dynasour_ir::Op;
use dynasour_ir::semantics::ARITH_FLAGS;
use iced_x86::{Code, Mnemonic as M};
use std::collections::{BTreeMap, HashSet};

const STATES_PER_INSTRUCTION: u64 = 8;

fn lift(sample: &Sample) -> LiftedBlock {
    let code = Bytes { start: sample.inst.ip(), bytes: sample.bytes() };
    lift_block(sample.inst.ip(), &code, 1)
}

/// Within an instruction nothing that can fault stands behind a `put`.
fn faults_precede_puts(block: &LiftedBlock) -> bool {
    let mut put = false;
    block.version.blocks[0].insts.iter().all(|inst| {
        match inst.op {
            Op::At => put = false,
            Op::Put(_) => put = true,
            Op::Load | Op::Store | Op::Native => return !put,
            _ => {}
        }
        true
    })
}

struct Checker {
    values: Vec<u64>,
    before: Vec<u8>,
    expected: Vec<u8>,
    faults: u64,
}

impl Checker {
    fn check(&mut self, arena: &mut Arena, sample: &Sample, block: &LiftedBlock, state: &State) -> Result<(), String> {
        arena.memory().copy_from_slice(&self.before);
        if let Some(address) = state.target_at {
            let offset = (address - arena.scratch()) as usize;
            let taken = arena.taken().to_le_bytes();
            arena.memory()[offset..offset + 8].copy_from_slice(&taken);
        }
        self.expected.copy_from_slice(arena.memory());
        let mut machine = Machine {
            gpr: state.registers.gpr,
            flags: state.registers.flags & ARITH_FLAGS,
            fs_base: state.fs_base,
            gs_base: state.gs_base,
            memory: &mut self.expected,
            memory_start: arena.scratch(),
        };
        let outcome = machine.run(block, &mut self.values);
        let (gpr, flags) = (machine.gpr, machine.flags);
        let (output, end) = arena.run(&state.registers, state.fs_base, state.gs_base);

        let expected_end = match outcome {
            Ok(Some(pc)) if pc == sample.inst.next_ip() => End::Next,
            Ok(Some(pc)) if pc == arena.taken() => End::Taken,
            Ok(other) => return Err(format!("goes to {other:x?}")),
            Err(_) => {
                self.faults += 1;
                End::Signal(libc::SIGSEGV)
            }
        };
        // An access through rsp or rbp to a non-canonical address is a stack fault, SIGBUS.
        let end = if end == End::Signal(libc::SIGBUS) { End::Signal(libc::SIGSEGV) } else { end };
        if end != expected_end {
            return Err(format!("ends with {end:?}, lifted {expected_end:?}"));
        }
        for (i, (real, lifted)) in output.gpr.iter().zip(&gpr).enumerate() {
            if real != lifted {
                return Err(format!("register {i}: {real:#x}, lifted {lifted:#x}"));
            }
        }
        if output.flags & ARITH_FLAGS != flags {
            return Err(format!("flags {:#x}, lifted {flags:#x}", output.flags & ARITH_FLAGS));
        }
        if arena.memory() != &self.expected[..] {
            let at = arena.memory().iter().zip(&self.expected).position(|(a, b)| a != b);
            return Err(format!("memory differs at {at:x?}"));
        }
        Ok(())
    }
}

fn is_testable(inst: &iced_x86::Instruction) -> bool {
    classify(inst) == Class::Modelled && inst.mnemonic() != M::Syscall
}

#[test]
fn agrees_with_the_processor() {
    let seed = setting("DYNASOUR_SEED", 0x5eed_0001);
    let cases = setting("DYNASOUR_CASES", 1_600_000);
    let mut arena = arena();
    let mut checker =
        Checker { values: Vec::new(), before: vec![0; SCRATCH_BYTES], expected: vec![0; SCRATCH_BYTES], faults: 0 };
    let mut seen = HashSet::new();
    let mut failures: BTreeMap<M, (u64, String)> = BTreeMap::new();
    let mut done = 0;
    for i in 0..cases.div_ceil(STATES_PER_INSTRUCTION) {
        let case_seed = seed.wrapping_add(i);
        let mut rng = Rng::new(case_seed);
        for chunk in checker.before.chunks_exact_mut(8) {
            let word = rng.next();
            let word = if word & 3 == 0 { rng.interesting() } else { word };
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        let sample = Sample::random(&mut rng, &arena, Space::Integer, is_testable);
        let block = lift(&sample);
        assert!(faults_precede_puts(&block), "{:x?} {}: a fault after a put", sample.bytes(), sample.inst);
        assert_eq!(block.end, sample.inst.next_ip());
        dynasour_ir::verify::assert_valid(&block.version);
        arena.install(sample.bytes());
        for _ in 0..STATES_PER_INSTRUCTION {
            let Some(state) = sample.state(&mut rng, &arena) else { continue };
            done += 1;
            seen.insert(sample.inst.code());
            if let Err(difference) = checker.check(&mut arena, &sample, &block, &state) {
                let entry = failures.entry(sample.inst.mnemonic()).or_insert_with(|| {
                    let report = format!(
                        "{} {:x?}: {difference}\n    from {:x?}\n    replay: DYNASOUR_SEED={case_seed:#x} DYNASOUR_CASES=1",
                        sample.inst, sample.bytes(), state.registers
                    );
                    (0, report)
                });
                entry.0 += 1;
            }
        }
    }
    println!("{done} cases over {} codes, {} faults", seen.len(), checker.faults);
    for (mnemonic, (count, first)) in &failures {
        println!("{mnemonic:?}: {count} differences, first: {first}");
    }
    assert!(failures.is_empty());
    if cases >= 1_000_000 {
        let missed: Vec<Code> = Code::values()
            .filter(|c| entry(*c).class == Class::Modelled && !is_nop(c.mnemonic()) && !is_foreign(*c))
            .filter(|c| *c != Code::Syscall && !seen.contains(c))
            .collect();
        assert!(missed.is_empty(), "not exercised: {missed:?}");
    }
}
