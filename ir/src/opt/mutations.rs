//! Every side condition of the passes is needed, and its loss is noticed: each is switched off in turn, and programs run
//! through the passes until the verifier or the checker complains.
//!
//! Most show in random programs. The others have a witness, `tests/mutations/NAME.ir`: versions, the passes to run, and
//! states in which the version does something else without the condition (and the same with it).

use super::side::Side;
use super::side::tests::without;
use super::{OptOptions, pass};
use crate::eval::check::same_result;
use crate::random::cases::{Wrong, agrees, case, optimised, passes};
use crate::random::{Rng, generate};
use crate::text::{File, file};
use crate::verify::{assert_valid, verify};
use crate::version::Version;
use std::path::Path;

/// Those of passes over any control flow are [`super::mutations_whole`]'s.
fn is_ours(side: &Side) -> bool {
    !super::mutations_whole::SIDES.contains(side)
}

/// Random programs that a side condition may take to be missed.
const PROGRAMS: u64 = 1_000;

/// What the evaluator cannot see.
const UNSEEN: &[Side] = &[
    // It needs somebody else's store between two rounds of a loop; the machine's peer acts only after we read.
    Side::ForwardPrivateLoop,
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

/// The first complaint about a version of the witness after the passes that its first line names.
fn judge(file: &File, names: &[&str]) -> Result<(), Wrong> {
    for original in file.regions.iter().flat_map(|r| &r.versions) {
        assert_valid(original);
        let mut version: Version = original.clone();
        for name in names {
            let pass = pass(name).unwrap_or_else(|| panic!("there is no pass {name}"));
            pass.run(&mut version, &OptOptions::default());
            verify(&version).map_err(|e| Wrong::Verifier(e[0].to_string()))?;
        }
        for setup in &file.setups {
            let (state, machine) = setup.build();
            same_result(original, &version, &state, &machine, 10_000).map_err(Wrong::Checker)?;
        }
    }
    Ok(())
}

/// What happens to the witness of a side condition without it.
fn witness(side: Side, path: &Path) -> Option<Wrong> {
    let text = std::fs::read_to_string(path).unwrap();
    let names = text.lines().next().and_then(|l| l.strip_prefix("; passes: ")).expect("the first line names passes");
    let names: Vec<&str> = names.split(',').collect();
    let file = file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    if let Err(wrong) = judge(&file, &names) {
        panic!("{}: with the condition: {wrong}", path.display());
    }
    let (result, hits) = without(side, || judge(&file, &names));
    assert!(hits > 0, "{}: the condition does not matter here", path.display());
    result.err()
}

#[test]
fn every_side_condition_is_needed() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mutations");
    let mut missed = Vec::new();
    for side in Side::ALL.iter().filter(|side| is_ours(side) && !UNSEEN.contains(side)) {
        let path = directory.join(format!("{side:?}.ir"));
        let noticed = if path.exists() { witness(*side, &path).map(|wrong| (0, wrong)) } else { hunt(*side) };
        match noticed {
            Some((programs, wrong)) => {
                let who = if matches!(wrong, Wrong::Verifier(_)) { "verifier" } else { "checker" };
                println!(
                    "{side:?}: the {who}, {}",
                    if programs == 0 { "witness".into() } else { format!("program {programs}") }
                );
            }
            None => missed.push(side),
        }
    }
    assert!(missed.is_empty(), "nobody noticed the loss of {missed:?}");
}
