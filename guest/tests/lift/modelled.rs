//! Modelled instructions: the lifted block's evaluation against the processor, on random operands.

use crate::arena::{Arena, End, SCRATCH_BYTES, arena};
use crate::classes::{has_short_target, is_executable};
use crate::eval::Machine;
use crate::generate::{Sample, Space, State};
use crate::rng::{Rng, setting};
use dynasour_guest::lift::class::{Class, entry, is_nop};
use dynasour_guest::lift::{Bytes, LiftedBlock, classify, lift_block};
use dynasour_ir::semantics::ARITH_FLAGS;
use dynasour_ir::{Op, verify};
use iced_x86::{Code, Instruction, Mnemonic as M};
use std::collections::{BTreeMap, HashSet};

const STATES_PER_INSTRUCTION: u64 = 8;

/// Checks that within an instruction no `put` comes before something that can fault.
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

fn is_testable(inst: &Instruction) -> bool {
    classify(inst) == Class::Modelled && inst.mnemonic() != M::Syscall
}

/// Compares lifted blocks with the processor, and counts the cases.
struct Comparison {
    values: Vec<u64>,
    before: Vec<u8>,
    expected: Vec<u8>,
    writable: bool,
    cases: u64,
    faults: u64,
    seen: HashSet<Code>,
    failures: BTreeMap<M, (u64, String)>,
}

impl Comparison {
    fn new(writable: bool) -> Comparison {
        Comparison {
            values: Vec::new(),
            before: vec![0; SCRATCH_BYTES],
            expected: vec![0; SCRATCH_BYTES],
            writable,
            cases: 0,
            faults: 0,
            seen: HashSet::new(),
            failures: BTreeMap::new(),
        }
    }

    fn fill_memory(&mut self, rng: &mut Rng) {
        for chunk in self.before.chunks_exact_mut(8) {
            let word = if rng.chance(25) { rng.interesting() } else { rng.next() };
            chunk.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Compares one instruction, derived from `seed`, on several states.
    fn instruction(&mut self, arena: &mut Arena, seed: u64) {
        let mut rng = Rng::new(seed);
        if self.writable {
            self.fill_memory(&mut rng);
        }
        let sample = Sample::random(&mut rng, arena, Space::Integer, is_testable);
        let code = Bytes { start: sample.inst.ip(), bytes: sample.bytes() };
        let block = lift_block(sample.inst.ip(), &code, 1);
        assert!(
            faults_precede_puts(&block),
            "{:x?} {}: a fault after a put",
            sample.bytes(),
            sample.inst
        );
        assert_eq!(block.end, sample.inst.next_ip());
        verify::assert_valid(&block.version);
        arena.install(sample.bytes());
        for _ in 0..STATES_PER_INSTRUCTION {
            let Some(state) = sample.state(&mut rng, arena) else { continue };
            if state.target_at.is_some() && !self.writable {
                continue;
            }
            self.cases += 1;
            self.seen.insert(sample.inst.code());
            if let Err(difference) = self.state(arena, &sample, &block, &state) {
                let entry = self.failures.entry(sample.inst.mnemonic()).or_insert_with(|| {
                    let (inst, bytes, registers) = (sample.inst, sample.bytes(), state.registers);
                    let replay = format!("DYNASOUR_SEED={seed:#x} DYNASOUR_CASES=1");
                    (
                        0,
                        format!(
                            "{inst} {bytes:x?}: {difference}\n    from {registers:x?}\n    \
                        replay: {replay}"
                        ),
                    )
                });
                entry.0 += 1;
            }
        }
    }

    fn state(
        &mut self,
        arena: &mut Arena,
        sample: &Sample,
        block: &LiftedBlock,
        state: &State,
    ) -> Result<(), String> {
        if self.writable {
            arena.memory().copy_from_slice(&self.before);
        }
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
            writable: self.writable,
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
        // An access through rsp or rbp to a non-canonical address is a stack fault: SIGBUS.
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
        match arena.memory().iter().zip(&self.expected).position(|(a, b)| a != b) {
            Some(at) => Err(format!("memory differs at {at:#x}")),
            None => Ok(()),
        }
    }

    fn conclude(&self) {
        println!("{} cases over {} codes, {} faults", self.cases, self.seen.len(), self.faults);
        for (mnemonic, (count, first)) in &self.failures {
            println!("{mnemonic:?}: {count} differences, first: {first}");
        }
        assert!(self.failures.is_empty());
    }
}

#[test]
fn agrees_with_the_processor() {
    let seed = setting("DYNASOUR_SEED", 0x5eed_0001);
    let cases = setting("DYNASOUR_CASES", 1_600_000);
    let mut arena = arena();
    let mut comparison = Comparison::new(true);
    for i in 0..cases.div_ceil(STATES_PER_INSTRUCTION) {
        comparison.instruction(&mut arena, seed.wrapping_add(i));
    }
    comparison.conclude();
    if cases >= 1_000_000 {
        let missed: Vec<Code> = Code::values()
            .filter(|c| entry(*c).class == Class::Modelled && !is_nop(c.mnemonic()))
            .filter(|c| is_executable(*c) && !has_short_target(*c))
            .filter(|c| *c != Code::Syscall && !comparison.seen.contains(c))
            .collect();
        assert!(missed.is_empty(), "not exercised: {missed:?}");
    }
}

/// An instruction that stores an unchanged value (a shift by zero, say) must still fault on
/// read-only memory, and an instruction that faults must have changed nothing.
#[test]
fn agrees_on_read_only_memory() {
    let seed = setting("DYNASOUR_SEED", 0x5eed_2001);
    let cases = setting("DYNASOUR_CASES", 200_000);
    let mut arena = arena();
    let mut comparison = Comparison::new(false);
    comparison.fill_memory(&mut Rng::new(1));
    arena.memory().copy_from_slice(&comparison.before);
    arena.set_writable(false);
    for i in 0..cases.div_ceil(STATES_PER_INSTRUCTION) {
        comparison.instruction(&mut arena, seed.wrapping_add(i));
    }
    arena.set_writable(true);
    comparison.conclude();
}
