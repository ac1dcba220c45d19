//! Fragments against the interpreter, in bulk (docs/design.md, "Correctness").
//!
//! Random machine code is recorded, built into a trace, optimised, emitted and run. Wherever the
//! fragment leaves, the interpreter must pass through the same state: all registers, flags, the
//! extended state and memory.
//!
//! Each trace is run from the state of its recording, from states near it and from other states;
//! then with each guard forced to fail, and with the loop's poll taken. Where memory or an
//! instruction faults, the fragment must leave in a state before the fault.
//!
//! `DYNASOUR_FRAGMENTS_SEED` and `DYNASOUR_FRAGMENTS_CASES` choose the cases; a failure prints
//! everything and its seed. If a fragment hangs or crashes, `DYNASOUR_FRAGMENTS_TRACE=1` prints
//! each seed before it is tried.

pub mod copies;
mod grow;
mod program;
mod world;

use dynasour_emitter::{EntryState, ExitId, FragmentId, SiteKind};
use dynasour_guest::lift::{MAX_BLOCK, lift_block};
use dynasour_ir::opt::{OptOptions, PASSES, PIPELINE, optimise_with};
use dynasour_ir::predict::Registers;
use dynasour_ir::{Context, Fact, Gpr, Version};
use dynasour_runtime::interp::Stop;
use dynasour_testkit::code::Random;
use dynasour_tracer::{DefaultPolicy, HeadKind, Path, Recorder, Recording, TargetKind, build};
use program::{Pools, Program};
use std::collections::BTreeMap;
use std::sync::Arc;
use world::{State, World};

/// Fragments in the cache after which it is flushed (guess).
const FLUSH: usize = 400;
/// Guards of one fragment that are forced to fail, at most (guess; more take longer).
const FORCED: usize = 10;

/// Programs that once failed: a description of the bug, and the code that showed it.
const KEPT: &[(&str, &str)] = &[
    // mov rsi, r14; mov rdi, r12; mov ecx, 10; repe cmpsb; bt r10, rdi; setg [rbp]; xor [rsp], r14;
    // syscall
    (
        "bt kept the flags of the masking of its index",
        "498bf6 498bfc b90a000000 f3a6 490fa3fa 0f9f4500 4c31742400 0f05",
    ),
    // cmp rcx, rdx; jo end; vdivpd xmm0, xmm13, [r14+40h]; dec r15; jne start; end: syscall
    (
        "a trapping instruction left before the branch ahead of it",
        "483bca 700b c4c1115e4640 49ffcf 75f0 0f05",
    ),
    // A loop around rep movsq that reaches the arena's end, with a call, a computed jump and every
    // register in use.
    (
        "moves to an exit overwrote what a fault in rep movsq had left in rcx",
        "433254ae20 4d896618 4d8b6618 dfc1 49f7e4 4c8d1565000000 41ffd2 44884500 41206638 0f93c3 \
            0487 2cf2 480fad7507 498bf4 \
         498bfe b909000000 f348a5 400f91c6 0fa4f93a 480f44d1 41807e1971 7700 480f437d08 \
         488d0511000000 4c8d0512000000 \
         807d087e 490f42c0 ffe0 4d8da42400030000 4983ef01 7584 0f05 55 488bec 0fc074242e 9e c9 c3",
    ),
];

/// Counts of what a campaign covered: one that covers nothing would prove nothing.
#[derive(Default, Debug)]
pub struct Tally {
    pub programs: u32,
    pub traces: u32,
    pub loops: u32,
    /// Why paths did not become fragments.
    pub refusals: BTreeMap<String, u32>,
    pub runs: u32,
    pub forced: u32,
    pub guards: u32,
    pub polls: u32,
    pub faults: u32,
    pub ends: u32,
    pub vector: u32,
    pub linked_runs: u32,
    pub links: u32,
    pub side_traces: u32,
}

/// Compares `cases` programs from `first` on.
///
/// # Errors
/// The report of the first difference.
pub fn campaign(first: u64, cases: u64) -> Result<Tally, String> {
    let pools = Pools::new();
    assert!(pools.encodings() > 800, "{} encodings", pools.encodings());
    let mut world = World::new();
    let mut tally = Tally::default();
    for seed in first..first + cases {
        if std::env::var_os("DYNASOUR_FRAGMENTS_TRACE").is_some() {
            eprintln!("seed {seed}");
        }
        case(&pools, &mut world, seed, &mut tally)
            .map_err(|report| format!("seed {seed}: {report}"))?;
    }
    Ok(tally)
}

fn case(pools: &Pools, world: &mut World, seed: u64, tally: &mut Tally) -> Result<(), String> {
    let mut random = Random(seed.wrapping_mul(0x1234_5678_9abc_def1));
    let random = &mut random;
    let Some(program) = Program::random(pools, random) else { return Ok(()) };
    check(world, &program, random, tally)
}

/// Compares each of the programs that once failed, from many states.
///
/// # Errors
/// The report of the first difference.
pub fn kept() -> Result<(), String> {
    let mut world = World::new();
    for (what, hex) in KEPT {
        let mut tally = Tally::default();
        for seed in 0..600 {
            let report = |report| format!("{what}, seed {seed}: {report}");
            check(&mut world, &Program::from_hex(hex), &mut Random(seed), &mut tally)
                .map_err(report)?;
        }
        assert!(tally.traces > 100, "{what}: {tally:?}");
    }
    Ok(())
}

fn check(
    world: &mut World,
    program: &Program,
    random: &mut Random,
    tally: &mut Tally,
) -> Result<(), String> {
    world.load(program);
    tally.programs += 1;
    let head = if random.one_in(4) {
        program.heads[random.below(program.heads.len() as u64) as usize]
    } else {
        program.heads[0]
    };
    let mut start = State::new();
    start.random(head, random);
    let Some(path) = record(world, &start, random) else { return Ok(()) };

    let passes: Vec<&str> = match random.below(8) {
        0..5 => PIPELINE.to_vec(),
        5 => Vec::new(),
        _ => (0..random.below(10))
            .map(|_| PASSES[random.below(PASSES.len() as u64) as usize].name)
            .collect(),
    };
    let Some((built, version)) = optimised(&path, &passes, random, tally) else { return Ok(()) };
    if world.emitter.fragments().len() >= FLUSH {
        world.emitter.flush_all();
    }
    let fragment = match world.emitter.compile(&version, EntryState::Canonical) {
        Ok(fragment) => fragment,
        Err(error) => {
            assert!(!error.is_full(), "{error}");
            *tally.refusals.entry(error.to_string()).or_default() += 1;
            return Ok(());
        }
    };
    tally.traces += 1;
    tally.loops += u32::from(version.blocks.len() > 1);
    tally.vector += u32::from(world.emitter.fragment(fragment).is_some_and(|f| f.uses_vector));
    let first = State::new_from(&start);
    let mut checked =
        Checked { world, program, built: &built, version: &version, passes: &passes, fragment };
    checked.all(start, random, tally)?;
    grow::grow(world, program, fragment, &first, random, tally)
}

/// The version of a path as built, and the same after `passes`.
fn optimised(
    path: &Path,
    passes: &[&str],
    random: &mut Random,
    tally: &mut Tally,
) -> Option<(Version, Version)> {
    let facts = if random.one_in(4) { Vec::new() } else { vec![Fact::PrivateMemory] };
    let alias_guards = !random.one_in(4);
    let built = match build::build(path, "t", Context { facts }, &DefaultPolicy::default()) {
        Ok(built) => built.version,
        Err(error) => {
            *tally.refusals.entry(error.to_string()).or_default() += 1;
            return None;
        }
    };
    let mut version = built.clone();
    optimise_with(&mut version, passes, &OptOptions { alias_guards, ..OptOptions::default() });
    Some((built, version))
}

/// Interprets from `start` and records until the recorder has a complete path.
fn record(world: &mut World, start: &State, random: &mut Random) -> Option<Path> {
    let stable = if random.one_in(3) {
        Gpr::all()
            .filter(|_| random.one_in(4))
            .map(|g| (g, start.context.gpr[g.number()]))
            .collect()
    } else {
        Vec::new()
    };
    let policy = DefaultPolicy::default();
    let entry = Registers { gpr: start.context.gpr, ..Registers::default() };
    let mut recorder = Recorder::new(start.context.rip, HeadKind::Other, stable, entry, &policy);
    world.begin(start);
    loop {
        let pc = world.ours.context.rip;
        let block = Arc::new(lift_block(pc, &world.code(), MAX_BLOCK));
        let mut stop = None;
        for _ in 0..block.count {
            stop = world.interpret();
            if stop.is_some() {
                break;
            }
        }
        let recording = match stop {
            None => recorder.step(&block, world.ours.context.rip, TargetKind::Ordinary),
            Some(Stop::Syscall | Stop::Special { .. } | Stop::Trap { .. }) => {
                recorder.runtime_instruction(&block)
            }
            Some(_) => return None,
        };
        match recording {
            Recording::Continue => {}
            Recording::Done(path, _) => return Some(path),
            Recording::Aborted(_) => return None,
        }
    }
}

/// A fragment under test.
struct Checked<'a> {
    world: &'a mut World,
    program: &'a Program,
    built: &'a Version,
    version: &'a Version,
    passes: &'a [&'a str],
    fragment: FragmentId,
}

impl Checked<'_> {
    fn all(
        &mut self,
        mut start: State,
        random: &mut Random,
        tally: &mut Tally,
    ) -> Result<(), String> {
        self.run(&start, "as recorded", tally)?;
        let emitter = &self.world.emitter;
        let exits =
            emitter.fragment(self.fragment).expect("it was compiled").exits.clone().map(ExitId);
        let mut guards: Vec<ExitId> =
            exits.filter(|e| emitter.exit(*e).is_some_and(|e| e.kind == SiteKind::Guard)).collect();
        while guards.len() > FORCED {
            guards.swap_remove(random.below(guards.len() as u64) as usize);
        }
        for guard in guards {
            self.world.emitter.force_guard(guard, true).expect("a guard");
            self.run(&start, &format!("with {guard:?} forced"), tally)?;
            self.world.emitter.force_guard(guard, false).expect("it was forced");
            tally.forced += 1;
        }
        self.world.emitter.unlink_for_signal(self.fragment);
        self.run(&start, "wanted out", tally)?;
        self.world.emitter.relink(self.fragment);
        for _ in 0..3 {
            start.disturb(random);
            self.run(&start, "near the recording", tally)?;
        }
        start.random(start.context.rip, random);
        self.run(&start, "at random", tally)
    }

    fn run(&mut self, start: &State, how: &str, tally: &mut Tally) -> Result<(), String> {
        if !self.world.ends(start) {
            return Ok(());
        }
        let exit = self.world.run_native(self.fragment, start);
        tally.runs += 1;
        *match exit.kind {
            SiteKind::Guard => &mut tally.guards,
            SiteKind::Poll => &mut tally.polls,
            SiteKind::Fault => &mut tally.faults,
            SiteKind::End | SiteKind::EndIndirect => &mut tally.ends,
        } += 1;
        self.world.search(start).map(drop).map_err(|mut differences| {
            differences.truncate(16);
            let exit_details = exit.id.and_then(|id| self.world.emitter.exit(id)).cloned();
            format!(
                "{how}, passes {:?}, left by {exit_details:?}\n  {}\nregisters at the \
                    start\n{}\nprogram\n{}\nbuilt\n{}\noptimised\n{}\ncode\n{}",
                self.passes,
                differences.join("\n  "),
                crate::state::Registers::interpreted(&start.context),
                self.program.listing(),
                self.built,
                self.version,
                self.world.emitter.listing(self.fragment).unwrap_or_default()
            )
        })
    }
}
