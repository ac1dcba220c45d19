//! Copied blocks against the interpreter: the random programs of this directory, from random
//! states.
//!
//! The program runs as blocks that link to each other, until an instruction is left to the
//! interpreter or faults. The interpreter must reach the same pc with the same state. Sometimes
//! links are cut, as a signal's handler cuts them, and the cache is flushed during a run.

use super::program::{Pools, Program};
use super::world::{State, World};
use dynasour_emitter::ExitReason;
use dynasour_emitter::blocks::{BlockId, Copied};
use dynasour_guest::lift::Fetch;
use dynasour_runtime::interp::Stop;
use dynasour_testkit::code::Random;

/// Runs of one program.
const RUNS: u32 = 8;
/// Number of programs after which the cache is flushed (guess; more often than a real cache would
/// be).
const FLUSH: u64 = 50;

/// Counts of what a campaign covered.
#[derive(Default, Debug)]
pub struct Tally {
    pub programs: u32,
    pub runs: u32,
    pub ends: u32,
    pub faults: u32,
    pub exits: u32,
    pub indirect: u32,
    pub cuts: u32,
    pub blocks: u64,
}

/// Compares `cases` programs from `first` on.
///
/// # Errors
/// The report of the first difference.
pub fn campaign(first: u64, cases: u64) -> Result<Tally, String> {
    let pools = Pools::new();
    let mut world = World::new();
    let mut tally = Tally::default();
    for seed in first..first + cases {
        if std::env::var_os("DYNASOUR_FRAGMENTS_TRACE").is_some() {
            eprintln!("seed {seed}");
        }
        let random = &mut Random(seed.wrapping_mul(0x9876_5432_1abc_def1) | 1);
        let Some(program) = Program::random(&pools, random) else { continue };
        world.load(&program);
        // The bytes have changed: all blocks are stale.
        world.emitter.flush_all();
        tally.programs += 1;
        for run in 0..RUNS {
            let mut start = State::new();
            start.random(program.heads[0], random);
            if world.ends(&start) {
                tally.runs += 1;
                compare(&mut world, &start, random, &mut tally).map_err(|report| {
                    format!("seed {seed}, run {run}: {report}\n{}", program.listing())
                })?;
            }
        }
        if seed % FLUSH == 0 {
            world.emitter.flush_all();
        }
    }
    tally.blocks = world.emitter.copy_figures().blocks;
    Ok(tally)
}

/// Is the instruction at `pc` a repeated `cmps` or `scas`?
fn is_string_comparison(code: &dyn Fetch, pc: u64) -> bool {
    let mut bytes = [0; 4];
    code.fetch(pc, &mut bytes);
    let opcode = if bytes[1] & 0xf0 == 0x40 { bytes[2] } else { bytes[1] };
    matches!(bytes[0], 0xf2 | 0xf3) && matches!(opcode, 0xa6 | 0xa7 | 0xae | 0xaf)
}

fn compare(
    world: &mut World,
    start: &State,
    random: &mut Random,
    tally: &mut Tally,
) -> Result<(), String> {
    let code = world.code();
    world.native.copy_from(start);
    world.begin(start);
    let mut indirect = None;
    loop {
        let pc = world.native.context.rip;
        if let Some(via) = indirect {
            world.emitter.expect_indirect(pc, via);
        }
        let entry = match world.emitter.copy(pc, &code) {
            Ok(Copied::Entry(entry)) => entry,
            Ok(Copied::Instruction | Copied::Writable) => {
                tally.ends += 1;
                break;
            }
            Err(error) => return Err(error.to_string()),
        };
        if let Some(via) = indirect {
            world.emitter.register_copy(pc, via).map_err(|e| e.to_string())?;
        }
        let cut = if random.one_in(8) { world.emitter.block_at(entry) } else { None };
        cut.iter().for_each(|block: &BlockId| world.emitter.unlink_block(*block));
        // SAFETY: GS points to this context; the programs access only the arena, or fault.
        let left = unsafe { world.emitter.enter_copy(&mut *world.native.context, entry) };
        if let Some(block) = cut {
            world.emitter.relink_block(block);
            tally.cuts += 1;
        }
        indirect = None;
        let context = &mut *world.native.context;
        match left {
            ExitReason::Block(link) => {
                context.rip = world.emitter.copy_exit(link).ok_or("an exit that leads nowhere")?.0;
                tally.exits += 1;
            }
            ExitReason::Indirect(via) => {
                context.rip = context.next_pc;
                indirect = Some(via);
                tally.indirect += 1;
            }
            ExitReason::Fault => {
                if !world.emitter.copy_state(context, &code) {
                    return Err(format!("a fault at {:#x} in no block", context.fault_rip));
                }
                tally.faults += 1;
                break;
            }
            ExitReason::Exit(_)
            | ExitReason::Hot(_)
            | ExitReason::Stale
            | ExitReason::InPlace
            | ExitReason::Aborted => {
                return Err(format!("left by {left:?}"));
            }
        }
    }
    world.native_ran();
    // The interpreter continues until it stops or reaches the pc at which the blocks stopped.
    world.begin(start);
    let end = world.native.context.rip;
    let stopped = loop {
        if let Some(stop) = world.interpret() {
            break Some(stop);
        }
        let pc = world.ours.context.rip;
        if pc == end && matches!(world.emitter.copy(pc, &code), Ok(Copied::Instruction)) {
            break None;
        }
    };
    if matches!(stopped, Some(Stop::Syscall)) {
        // The interpreter stops after a system call instruction, the blocks before it.
        world.ours.context.rip -= 2;
    }
    world.interpreted_ran();
    if matches!(stopped, Some(Stop::Fault { .. })) && is_string_comparison(&code, end) {
        // The processor leaves the flags of the last element compared, the interpreter those before
        // the first.
        world.ours.context.rflags = world.native.context.rflags;
    }
    let differences = world.native.differences(&world.ours);
    if differences.is_empty() {
        Ok(())
    } else {
        Err(format!("stopped by {stopped:?}\n{}", differences.join("\n")))
    }
}
