//! Every side condition of the passes is needed, and its loss is noticed: each is switched off in turn, and random
//! programs run through the passes until the verifier or the checker complains.

use super::side::Side;
use super::side::tests::without;
use crate::random::cases::{Wrong, agrees, case, optimised, passes};
use crate::random::{Rng, generate};

/// Those of passes over any control flow are [`super::mutations_whole`]'s.
fn is_ours(side: &Side) -> bool {
    !super::mutations_whole::SIDES.contains(side)
}

/// Random programs that a side condition may take to be missed.
const PROGRAMS: u64 = 1_000;

/// Which random programs hardly ever need.
const RARE: &[Side] = &[
    Side::ParamsSplit,
    Side::SinkWritten,
    Side::ForwardPrivateLoop,
    Side::ForwardBarrier,
    Side::ForwardSteady,
    Side::ForwardSurvives,
    Side::FlagsSameOperation,
    Side::SinkOnce,
    Side::SinkSharedAnchors,
    Side::SinkBarrier,
    Side::AliasSegment,
    Side::AliasGuardSize,
];

/// The first complaint, with the number of programs it took.
fn hunt(side: Side) -> Option<(u64, Wrong)> {
    for seed in 0..PROGRAMS {
        let mut program = generate::program(&mut Rng::new(seed));
        for head in generate::heads(&program) {
            let Some(case) = case(&mut program, head, seed) else { continue };
            let passes = passes(&mut Rng::new(!seed ^ head));
            let (version, hits) = without(side, || optimised(&case, &passes));
            if hits == 0 {
                continue;
            }
            if let Err(wrong) = version.and_then(|version| agrees(&mut program, &case, &version)) {
                return Some((seed + 1, wrong));
            }
        }
    }
    None
}

#[test]
fn every_side_condition_is_needed() {
    let mut missed = Vec::new();
    for side in Side::ALL.iter().filter(|side| is_ours(side) && !RARE.contains(side)) {
        match hunt(*side) {
            Some((programs, Wrong::Verifier(_))) => println!("{side:?}: the verifier, program {programs}"),
            Some((programs, Wrong::Checker(_))) => println!("{side:?}: the checker, program {programs}"),
            None => missed.push(side),
        }
    }
    assert!(missed.is_empty(), "nobody noticed the loss of {missed:?}");
}
