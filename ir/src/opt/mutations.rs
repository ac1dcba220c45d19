//! Mutation tests: every side condition of the passes is needed, and a pass that ignores it is
//! caught.
//!
//! A test switches each side condition off in turn ([`crate::side_conditions`]) and runs programs
//! through the passes until the verifier or the checker complains. Most are caught in random
//! programs ([`super::mutations_random`]). The others have a witness, `tests/mutations/NAME.ir`.
//! Its first line names the passes to run. If the file has the guest's `base` blocks, the version
//! is compared with them, with every anchor taken; otherwise with the version before the passes.
//! With the condition on, every `state` of the file gives the right result; with it off, at least
//! one does not.
//!
//! The switch is local to the thread, so the tests may run in parallel; no lock.
//!
//! ```text
//! ; passes: sink                     tests/mutations/SinkBarrier.ir: the native may read [v0]
//! SinkBarrier: the checker, witness  printed when the checker has caught the change
//! ```

use super::mutations_random::{by_continuation, by_inlining, by_passes};
use super::{OptOptions, inline, pass};
use crate::eval::check::{Limits, check, same_result};
use crate::random::cases::Wrong;
use crate::side_conditions::SideCondition;
use crate::side_conditions::tests::without;
use crate::text::{File, file};
use crate::types::BlockId;
use crate::verify::{assert_valid, verify};
use crate::version::Version;
use std::collections::BTreeMap;
use std::path::Path;

/// Most random programs tried before a side condition counts as missed (measured: each is caught in
/// fewer).
const PROGRAMS: u64 = 4_000;

/// The first complaint in random programs, and the number of programs tried.
fn hunt(condition: SideCondition) -> Option<(u64, Wrong)> {
    let attempt: fn(SideCondition, u64) -> Result<(), Wrong> = match condition {
        SideCondition::ContinuationCheck | SideCondition::ContinuationFresh => by_continuation,
        SideCondition::InlineContext | SideCondition::InlinePending => by_inlining,
        _ => by_passes,
    };
    (0..PROGRAMS).find_map(|seed| Some((seed + 1, attempt(condition, seed).err()?)))
}

/// The first complaint about the traces of a witness after the passes that its first line names.
/// The name `inline` puts the second trace in place of the first one's exit.
fn judge(file: &File, names: &[&str]) -> Result<(), Wrong> {
    let versions = || file.regions.iter().flat_map(|r| &r.versions).cloned();
    versions().for_each(|v| assert_valid(&v));
    let mut guest: BTreeMap<u64, Version> =
        versions().filter(Version::is_base).map(|v| (v.region, v)).collect();
    let mut originals: Vec<Version> = versions().filter(|v| !v.is_base()).collect();
    let callee = names.contains(&"inline").then(|| originals.remove(1));
    for original in &originals {
        let mut version = original.clone();
        for name in names {
            match (&callee, pass(name)) {
                (Some(callee), None) => {
                    inline(&mut version, BlockId(0), callee).expect("it can be inlined")
                }
                (_, pass) => {
                    pass.unwrap_or_else(|| panic!("there is no pass {name}"))
                        .run(&mut version, &OptOptions::default());
                }
            }
            verify(&version).map_err(|e| Wrong::Verifier(e[0].to_string()))?;
        }
        for setup in &file.setups {
            let (state, machine) = setup.build();
            if guest.is_empty() {
                same_result(original, &version, &state, &machine, 10_000)
                    .map_err(Wrong::Checker)?;
                continue;
            }
            // A peer may change a byte between two loads, so repeating a load is not wrong there:
            // with a peer nothing is forced.
            let limits = Limits { steps: 1_000, forced: if machine.has_peer() { 0 } else { 16 } };
            check(&mut guest, &version, &state, &machine, limits)
                .map_err(|m| Wrong::Checker(m.to_string()))?;
        }
    }
    Ok(())
}

/// The complaint about the witness of a side condition when the condition is off.
fn witness(condition: SideCondition, path: &Path) -> Option<Wrong> {
    let text = std::fs::read_to_string(path).unwrap();
    let names = text
        .lines()
        .next()
        .and_then(|l| l.strip_prefix("; passes: "))
        .expect("the first line names passes");
    let names: Vec<&str> = names.split(',').collect();
    let file = file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(!file.setups.is_empty(), "{}: there is no state to try", path.display());
    if let Err(wrong) = judge(&file, &names) {
        panic!("{}: with the condition: {wrong}", path.display());
    }
    let (result, hits) = without(condition, || judge(&file, &names));
    assert!(hits > 0, "{}: the condition does not matter here", path.display());
    result.err()
}

#[test]
fn every_side_condition_is_needed() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mutations");
    let mut missed = Vec::new();
    for condition in SideCondition::ALL {
        let path = directory.join(format!("{condition:?}.ir"));
        let noticed = if path.exists() {
            witness(*condition, &path).map(|wrong| (0, wrong))
        } else {
            hunt(*condition)
        };
        match noticed {
            Some((programs, wrong)) => {
                let who = if matches!(wrong, Wrong::Verifier(_)) { "verifier" } else { "checker" };
                let how = if programs == 0 {
                    "witness".to_string()
                } else {
                    format!("program {programs}")
                };
                println!("{condition:?}: the {who}, {how}");
            }
            None => missed.push(condition),
        }
    }
    assert!(missed.is_empty(), "nobody noticed the loss of {missed:?}");
}
