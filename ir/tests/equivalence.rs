//! Traces of random programs are equivalent to `base` and transparent, and the checker notices when
//! a trace is broken on purpose.

use dynasour_ir::eval::check::{Checked, Limits, check, run_base};
use dynasour_ir::eval::{Hooks, Machine, ModelMachine, State};
use dynasour_ir::random::program::Program;
use dynasour_ir::random::trace::{Options, Path, build, record};
use dynasour_ir::random::{Rng, generate, shrink};
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{Op, Operand, Version};

const LIMITS: Limits = Limits { steps: 3_000, forced: 12 };

/// Stops at a pc.
struct StopAt(u64);

impl<M: Machine> Hooks<M> for StopAt {
    fn at(&mut self, pc: u64, _state: &State, _machine: &M) -> bool {
        pc == self.0
    }
}

/// A path that starts at `head`, at its first visit if the program gets there, and the state there.
fn path_at(
    program: &mut Program,
    head: u64,
    state: &State,
    machine: &ModelMachine,
) -> Option<(Path, (State, ModelMachine))> {
    let (mut state, mut machine) = (state.clone(), machine.clone());
    let start = Program::pc(0);
    let left =
        run_base(program, start, &mut state, &mut machine, &mut StopAt(head), &mut 5_000).ok()?;
    let arrived = left == dynasour_ir::eval::Leave::Stopped { pc: head };
    let at_head = (state.clone(), machine.clone());
    let path = if arrived { record(program, head, &mut state, &mut machine, 12) } else { None };
    path.map(|p| (p, at_head))
}

/// The traces of one program, each with the states to check it on.
fn traces(program: &mut Program, rng: &mut Rng) -> Vec<(Version, Vec<(State, ModelMachine)>)> {
    let machine = generate::machine(rng);
    let state = generate::state(rng);
    let mut out = Vec::new();
    for head in generate::heads(program) {
        let Some((path, at_head)) = path_at(program, head, &state, &machine) else { continue };
        for peel in [false, true] {
            if peel && !path.is_loop {
                continue;
            }
            let options = Options { peel, older_anchor: rng.below(4) };
            let trace = build(&path, "t1", options, rng).expect("one effect an instruction");
            assert_valid(&trace);
            let others = (0..2).map(|_| (generate::state(rng), machine.clone()));
            let states = std::iter::once(at_head.clone()).chain(others).collect();
            out.push((trace, states));
        }
    }
    out
}

/// Checks every trace of the program; returns the numbers of evaluations and opportunities.
fn check_program(program: &Program, seed: u64) -> Result<(u64, u64), String> {
    let mut program = program.clone();
    let mut rng = Rng::new(seed ^ 0x5eed);
    let mut counts = (0, 0);
    for (trace, states) in traces(&mut program, &mut rng) {
        for (state, machine) in states {
            match check(&mut program, &trace, &state, &machine, LIMITS) {
                Ok(Checked::Compared { evaluations, opportunities }) => {
                    counts = (counts.0 + evaluations, counts.1 + opportunities);
                }
                Ok(Checked::ContextFails) => {}
                Err(mismatch) => return Err(mismatch.to_string()),
            }
        }
    }
    Ok(counts)
}

#[test]
fn reference_traces_are_equivalent_and_transparent() {
    let mut total = (0, 0);
    for seed in 0..400 {
        let program = generate::program(&mut Rng::new(seed));
        match check_program(&program, seed) {
            Ok(counts) => total = (total.0 + counts.0, total.1 + counts.1),
            Err(_) => {
                let small = shrink(&program, |p| check_program(p, seed).is_err());
                panic!(
                    "seed {seed}\n{small:?}\n{}",
                    check_program(&small, seed).expect_err("still fails")
                );
            }
        }
    }
    assert!(total.0 > 10_000 && total.1 > 20_000, "too little was checked: {total:?}");
}

/// Breaks a trace in one of the ways in which a wrong pass would. `None` if the trace has no such
/// point.
fn sabotage(trace: &Version, kind: usize, rng: &mut Rng) -> Option<Version> {
    let mut broken = trace.clone();
    let block = rng.below(broken.blocks.len());
    let insts = &mut broken.blocks[block].insts;
    let mut points: Vec<usize> = (0..insts.len()).collect();
    match kind {
        // A lost store.
        0 => {
            points.retain(|i| insts[*i].op == Op::Store);
            insts.remove(*points.get(rng.below(points.len().max(1)))?);
        }
        // A guard that always holds.
        1 => {
            points.retain(|i| insts[*i].op == Op::Assume);
            insts[*points.get(rng.below(points.len().max(1)))?].args[0] = Operand::Const(1);
        }
        // A register that is stale or wrong in a varmap.
        2 => {
            let anchor = rng.below(broken.anchors.len());
            let varmap = &mut broken.anchors[anchor].varmap;
            let slot = rng.below(varmap.len().max(1));
            let (loc, operand) = varmap.get_mut(slot)?;
            if loc.ty() == dynasour_ir::Ty::Flags {
                return None;
            }
            *operand = Operand::Const(0xdead_beef);
        }
        // A wrong target.
        3 => {
            let anchor = rng.below(broken.anchors.len());
            broken.anchors[anchor].target = Operand::Const(Program::pc(1));
        }
        // An anchor from before a store, used after it.
        4 => {
            points.retain(|i| insts[*i].op == Op::Store);
            let store = *points.get(rng.below(points.len().max(1)))?;
            let later = (store + 1..insts.len()).find(|i| insts[*i].anchor.is_some())?;
            insts[later].anchor = insts[store].anchor;
        }
        // A load from another address.
        5 => {
            points.retain(|i| insts[*i].op == Op::Load);
            insts[*points.get(rng.below(points.len().max(1)))?].mem.as_mut()?.disp += 8;
        }
        // A store moved down to the end of its block.
        _ => {
            points.retain(|i| insts[*i].op == Op::Store);
            let store = insts.remove(*points.get(rng.below(points.len().max(1)))?);
            insts.push(store);
        }
    }
    Some(broken)
}

#[test]
fn broken_traces_are_noticed() {
    const KINDS: usize = 7;
    let (mut tried, mut caught) = ([0; KINDS], [0; KINDS]);
    for seed in 0..250 {
        let mut program = generate::program(&mut Rng::new(seed));
        let mut rng = Rng::new(seed ^ 0x5eed);
        for (trace, states) in traces(&mut program, &mut rng) {
            let kind = rng.below(KINDS);
            let Some(broken) = sabotage(&trace, kind, &mut rng) else { continue };
            tried[kind] += 1;
            let noticed = |(state, machine): &(State, ModelMachine)| {
                check(&mut program, &broken, state, machine, LIMITS).is_err()
            };
            caught[kind] += u32::from(states.iter().any(noticed));
        }
    }
    // Some changes have no effect (a value that is never read, a branch that always goes one way, a
    // store of an equal value). Most must be noticed.
    let rates: Vec<u32> =
        tried.iter().zip(&caught).map(|(t, c): (&u32, &u32)| c * 100 / t.max(&1)).collect();
    let least = [65, 35, 80, 75, 55, 35, 65];
    assert!(tried.iter().all(|t| *t > 5), "tried {tried:?}");
    assert!(
        rates.iter().zip(least).all(|(r, l)| *r >= l),
        "tried {tried:?}, caught {caught:?}, percent {rates:?}"
    );
}
