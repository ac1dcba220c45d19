//! Random traces natively against the evaluator: the optimiser's random guest programs, optimised
//! by random passes, are run in process, and after both have left, `base` goes on from where each
//! of them is. Guards are forced at random, too.

mod harness;
#[path = "../../ir/tests/support/mod.rs"]
mod support;

use dynasour_emitter::{EntryState, ExitId, SiteKind, StubTarget};
use dynasour_ir::eval::check::run_base;
use dynasour_ir::eval::{Hooks, Leave, ModelMachine, NoHooks, State, run};
use dynasour_ir::opt::{OptOptions, PASSES, optimise_with};
use dynasour_ir::{Anchor, AnchorId, Block, Loc, Operand, Term, Version};
use harness::{Area, Bench};
use support::{ARRAY, HEAD, Program, Random, STACK, entry, program, tree};

fn programs(default: u64) -> u64 {
    std::env::var("EMIT_PROGRAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

fn first_seed() -> u64 {
    std::env::var("EMIT_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

struct World {
    bench: Bench,
    areas: [Area; 2],
}

/// Looks for a state among those that `base` passes through.
struct Search<'a> {
    pc: u64,
    state: &'a State,
    machine: &'a ModelMachine,
    found: bool,
}

impl Hooks<ModelMachine> for Search<'_> {
    fn at(&mut self, pc: u64, state: &State, machine: &ModelMachine) -> bool {
        self.found |= pc == self.pc
            && state == self.state
            && machine.first_difference(self.machine).is_none();
        self.found
    }
}

impl World {
    fn new(bench: Bench) -> World {
        World { bench, areas: [Area::new(STACK - 4096, 8192), Area::new(ARRAY, 8192)] }
    }

    fn load(&mut self, machine: &ModelMachine) {
        use dynasour_ir::eval::Machine;
        let mut machine = machine.clone();
        for area in &mut self.areas {
            area.protect(0, area.len, true);
            let start = area.start;
            for (i, chunk) in area.bytes_mut().chunks_exact_mut(8).enumerate() {
                chunk
                    .copy_from_slice(&machine.load(start + 8 * i as u64, 8).unwrap().to_le_bytes());
            }
        }
        let protected = machine.store(STACK, 1, u64::from(self.areas[0].bytes()[4096])).is_err();
        self.areas[0].protect(4096, 4096, !protected);
    }

    fn native(
        &mut self,
        version: &Version,
        fragment: dynasour_emitter::FragmentId,
        entry: &(State, ModelMachine),
    ) -> (u64, State, ModelMachine, ExitId) {
        self.load(&entry.1);
        let out = self.bench.run(fragment, &entry.0);
        let _ = version;
        let mut machine = entry.1.clone();
        for area in &self.areas {
            machine.write(area.start, area.bytes());
        }
        (out.pc, out.state, machine, out.deopt.exit)
    }
}

/// Does `base`, started from `entry`, pass through this state?
fn passes_through(
    program: &mut Program,
    entry: &(State, ModelMachine),
    pc: u64,
    state: &State,
    machine: &ModelMachine,
) -> bool {
    let mut search = Search { pc, state, machine, found: false };
    let (mut at, mut memory) = entry.clone();
    let mut budget = 100_000;
    let leave = run_base(&mut program.blocks, HEAD, &mut at, &mut memory, &mut search, &mut budget)
        .unwrap();
    search.found
        || leave == Leave::Goto(pc) && at == *state && memory.first_difference(machine).is_none()
}

fn check(
    world: &mut World,
    program: &mut Program,
    version: &Version,
    random: &mut Random,
    what: &str,
) {
    let fragment = world.bench.compile(version);
    let guards: Vec<ExitId> = {
        let f = world.bench.emitter.fragment(fragment).unwrap();
        f.exits
            .clone()
            .map(ExitId)
            .filter(|e| world.bench.emitter.exit(*e).unwrap().kind == SiteKind::Guard)
            .collect()
    };
    for round in 0..6 {
        if round == 4 {
            link_all(world, &guards);
        }
        let entry = entry(random, program);
        let mut state = entry.0.clone();
        let mut machine = entry.1.clone();
        let mut budget = 100_000;
        let leave = run(version, &mut state, &mut machine, &mut NoHooks, &mut budget).unwrap();
        let Leave::Anchor { pc, anchor, reason, .. } = leave else { panic!("{what}: {leave:?}") };
        let forced = (matches!(round, 3 | 5) && !guards.is_empty()).then(|| random.pick(&guards));
        if let Some(guard) = forced {
            let _ = world.bench.emitter.force_guard(guard, true);
        }
        let (mut native_pc, native_state, native_machine, exit) =
            world.native(version, fragment, &entry);
        if let Some(guard) = forced {
            let _ = world.bench.emitter.force_guard(guard, false);
        }
        let last = world.bench.emitter.exit(exit).unwrap().fragment;
        if world.bench.emitter.fragment(last).unwrap().version == "catch" {
            native_pc ^= CAUGHT;
        }
        if !passes_through(program, &entry, native_pc, &native_state, &native_machine) {
            let e = world.bench.emitter.exit(exit);
            panic!(
                "{what} round {round} forced {forced:?}\nentry {}\nevaluator left by {anchor} \
                    {reason:?} to {pc:#x}\n  {state}\nnative left by {e:?} to {native_pc:#x}\n  \
                    {native_state}\n\
                 memory: {:?}\n{version}\n{}",
                entry.0,
                native_machine.first_difference(&machine),
                world.bench.emitter.listing(fragment).unwrap()
            );
        }
    }
}

/// Bit of the pc that shows that a resolved stub led to a canonical fragment.
const CAUGHT: u64 = 1 << 40;

/// Lets every guard's exit continue in a fragment that does nothing but leave: by a resolved stub,
/// or compiled for the exit's state, which it names in full or not at all.
fn link_all(world: &mut World, guards: &[ExitId]) {
    for (n, guard) in guards.iter().enumerate() {
        let Some(pc) = world.bench.emitter.exit(*guard).unwrap().target else { continue };
        let mut catcher = Version::new("catch", pc);
        let mut params = Vec::new();
        let mut varmap = Vec::new();
        if n % 3 == 2 {
            for loc in (0..Loc::SSA_COUNT).map(Loc::from_ssa_index) {
                let v = catcher.value(loc.ty());
                params.push(v);
                varmap.push((loc, v.into()));
                catcher.entry_locs.push(loc);
            }
        }
        catcher.anchor(Anchor::new(Operand::Const(pc ^ CAUGHT), varmap));
        catcher.blocks.push(Block { params, insts: Vec::new(), term: Term::Exit(AnchorId(0)) });
        if n % 3 == 0 {
            let target = world.bench.compile(&catcher);
            world.bench.emitter.resolve_exit(*guard, StubTarget::Fragment(target)).unwrap();
        } else {
            let side = world.bench.emitter.compile(&catcher, EntryState::FromExit(*guard)).unwrap();
            world.bench.emitter.attach(*guard, side).unwrap();
        }
    }
}

fn campaign(bench: Bench, seeds: std::ops::Range<u64>, length: u64) {
    let mut world = World::new(bench);
    for seed in seeds {
        let mut random = Random::new(seed);
        let (blocks, loops) = (1 + random.below(4), random.chance(70));
        let mut program = program(&mut random, blocks, length, loops);
        let private = random.chance(80);
        let mut version = tree(&program, private, |_| random.chance(70));
        // What a pass for the evaluator only makes is refused elsewhere.
        let passes: Vec<&'static str> =
            PASSES.iter().filter(|p| !p.evaluator_only).map(|p| p.name).collect();
        let names: Vec<&'static str> = (0..random.below(8)).map(|_| random.pick(&passes)).collect();
        optimise_with(&mut version, &names, &OptOptions::default());
        let what = format!("seed {seed}, passes {names:?}");
        if world.bench.emitter.fragments().len() > 200 {
            world.bench.emitter.flush_all();
        }
        check(&mut world, &mut program, &version, &mut random, &what);
    }
}

#[test]
fn random_traces() {
    let first = first_seed();
    campaign(Bench::new(), first..first + programs(3000), 7);
    campaign(Bench::counting(), first..first + programs(3000) / 5, 7);
}
