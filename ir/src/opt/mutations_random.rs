//! The random programs of the mutation tests: traces and whole programs through random passes,
//! continuations from their anchors, and inlined callees.
//!
//! [`super::mutations`] chooses the function for a side condition and calls it with one seed after
//! another. Each function switches the condition off for the passes only, and returns the first
//! complaint of the verifier or the checker. No data between calls, no lock.
//!
//! ```text
//! by_passes(SideCondition::ForwardKill, 17)  Err(Checker("base passes 0x1040 …"))
//! ```

use super::{OptOptions, continuation, inline, optimise_with};
use crate::eval::check::{Limits, check, run_base};
use crate::eval::{Hooks, Leave, Machine, State};
use crate::random::cases::{Wrong, agrees, case, optimised, passes};
use crate::random::program::Program;
use crate::random::trace::{Options, build_all};
use crate::random::{Rng, generate, whole};
use crate::side_conditions::SideCondition;
use crate::side_conditions::tests::without;
use crate::types::{AnchorId, BlockId};
use crate::verify::verify;
use crate::version::Term;

/// Passes over whole programs and over traces.
pub(super) fn by_passes(condition: SideCondition, seed: u64) -> Result<(), Wrong> {
    let mut program = generate::program(&mut Rng::new(seed));
    let heads = generate::heads(&program);
    let whole = whole::case(&mut program, seed).map(|case| (0, case));
    let traces: Vec<_> = heads
        .into_iter()
        .filter_map(|head| Some((head, case(&mut program, head, seed)?)))
        .collect();
    for (head, case) in whole.into_iter().chain(traces) {
        let passes = passes(&mut Rng::new(!seed ^ head));
        let (version, hits) = without(condition, || optimised(&case, &passes));
        if hits > 0 {
            agrees(&mut program, &case, &version?)?;
        }
    }
    Ok(())
}

/// Continuations from every anchor of a whole program.
pub(super) fn by_continuation(condition: SideCondition, seed: u64) -> Result<(), Wrong> {
    struct StopAt(u64);
    impl<M: Machine> Hooks<M> for StopAt {
        fn at(&mut self, pc: u64, _state: &State, _machine: &M) -> bool {
            pc == self.0
        }
    }
    let mut program = generate::program(&mut Rng::new(seed));
    let mut rng = Rng::new(seed);
    let options = Options { peel: false, older_anchor: 0 };
    let Some(mut original) = build_all(&mut program, Program::pc(0), "t1", 8, options, &mut rng)
    else {
        return Ok(());
    };
    if condition == SideCondition::ContinuationFresh {
        optimise_with(&mut original, &["simplify", "constants"], &OptOptions::default());
    }
    for anchor in (0..original.anchors.len() as u32).map(AnchorId) {
        let (made, hits) = without(condition, || continuation(&original, anchor, "c1"));
        let Ok(version) = made else { continue };
        verify(&version).map_err(|e| Wrong::Verifier(e[0].to_string()))?;
        let (mut state, mut machine) = (generate::state(&mut rng), generate::machine(&mut rng));
        let mut hooks = StopAt(version.region);
        let stopped = run_base(
            &mut program,
            Program::pc(0),
            &mut state,
            &mut machine,
            &mut hooks,
            &mut 2_000,
        );
        if hits > 0 && stopped == Ok(Leave::Stopped { pc: version.region }) {
            // A state that has not passed the version's entry: all registers but rsp are random.
            let other = generate::state(&mut rng);
            state.gpr = std::array::from_fn(|i| if i == 4 { state.gpr[i] } else { other.gpr[i] });
            let limits = Limits { steps: 2_000, forced: 8 };
            check(&mut program, &version, &state, &machine, limits)
                .map_err(|m| Wrong::Checker(m.to_string()))?;
        }
    }
    Ok(())
}

/// Inlines the callees of a program's first block, after `frames` has deferred the stores of their
/// return addresses.
pub(super) fn by_inlining(condition: SideCondition, seed: u64) -> Result<(), Wrong> {
    let mut program = generate::program(&mut Rng::new(seed));
    let mut rng = Rng::new(seed);
    let options = Options { peel: false, older_anchor: 0 };
    let Some(mut version) = build_all(&mut program, Program::pc(0), "t1", 1, options, &mut rng)
    else {
        return Ok(());
    };
    version.context.facts.push(crate::Fact::PrivateMemory);
    let mut hits = 0;
    for _ in 0..4 {
        optimise_with(
            &mut version,
            &["unreachable", "simplify", "forward", "frames", "dce"],
            &OptOptions::default(),
        );
        let exit = (0..version.blocks.len()).find_map(|b| match version.blocks[b].term {
            Term::Exit(a) => {
                Some((BlockId(b as u32), version.anchors[a.index()].target.as_const()?))
            }
            _ => None,
        });
        let Some((block, pc)) = exit else { break };
        let Some(callee) = build_all(&mut program, pc, "t2", 1, options, &mut rng) else { break };
        let (done, more) = without(condition, || inline(&mut version, block, &callee));
        hits += more;
        if done.is_err() {
            break;
        }
        verify(&version).map_err(|e| Wrong::Verifier(e[0].to_string()))?;
    }
    for _ in 0..4 {
        let (state, machine) = (generate::state(&mut rng), generate::machine(&mut rng));
        let limits = Limits { steps: 2_000, forced: 24 };
        if hits > 0 {
            check(&mut program, &version, &state, &machine, limits)
                .map_err(|m| Wrong::Checker(m.to_string()))?;
        }
    }
    Ok(())
}
