//! File tests of the optimiser: `tests/opt/*.ir` and `tests/figures/*.ir` hold a program, the passes
//! or commands that change it, and, after a line `---`, the expected result
//! ([`dynasour_ir::opt::golden`]).
//!
//! A version changed by passes that do not move exits is also run beside its original.
//! `OPT_BLESS=1 cargo test -p dynasour-ir --test opt_files` writes the results into the files: read
//! the diff.

use dynasour_ir::eval::ModelMachine;
use dynasour_ir::eval::check::same_result;
use dynasour_ir::opt::golden::{self, split};
use dynasour_ir::opt::{OptOptions, PASSES, optimise_with};
use dynasour_ir::random::{Rng, generate};
use dynasour_ir::setup::read_only_words;
use dynasour_ir::{Version, text};
use std::fs;
use std::path::{Path, PathBuf};

/// From random states both versions do the same.
fn compare(name: &str, before: &Version, after: &Version, constant: &[(u64, u32, u64)]) {
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let (mut state, mut machine) = (generate::state(&mut rng), ModelMachine::boundless(seed));
        state.fit(&before.context);
        for (address, bytes, word) in constant {
            machine.write(*address, &word.to_le_bytes()[..*bytes as usize]);
        }
        if let Err(what) = same_result(before, after, &state, &machine, 2_000) {
            panic!("{name}: from {state}: {what}");
        }
    }
}

/// Passes after which a version may leave at other anchors than before.
const MOVING: [&str; 7] = ["hoist", "licm", "merge", "delay", "alias", "monitor", "slots"];

fn result(path: &Path, source: &str) -> String {
    let name = path.display().to_string();
    let result = golden::run(source).unwrap_or_else(|e| panic!("{name}: {e}"));
    let passes = golden::passes(source).unwrap_or_default();
    if !passes.is_empty() && passes != ["default"] && !passes.iter().any(|p| MOVING.contains(p)) {
        let mut file = text::file(source).expect("it has been parsed");
        let after = text::version(&result).expect("it has been printed");
        compare(&name, &file.regions[0].versions.remove(0), &after, &read_only_words(&file.setups));
    }
    result
}

fn paths() -> Vec<PathBuf> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let folders = ["opt", "figures"].map(|folder| fs::read_dir(tests.join(folder)).unwrap());
    let entries = folders.into_iter().flatten().map(|e| e.unwrap().path());
    let mut paths: Vec<_> = entries.filter(|p| p.extension().is_some_and(|e| e == "ir")).collect();
    paths.sort();
    paths
}

#[test]
fn files() {
    let bless = std::env::var_os("OPT_BLESS").is_some();
    let mut failures = Vec::new();
    for path in paths() {
        let content = fs::read_to_string(&path).unwrap();
        let (source, expected) = split(&content);
        let result = result(&path, source);
        if bless {
            fs::write(&path, format!("{source}---\n{result}")).unwrap();
        } else if expected != Some(&result) {
            let expected = expected.unwrap_or_default();
            failures.push(format!("{}:\nexpected\n{expected}\nfound\n{result}", path.display()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Every pass has a file in which it changes something.
#[test]
fn every_pass_has_a_file() {
    let files: Vec<String> = paths().iter().map(|p| fs::read_to_string(p).unwrap()).collect();
    for pass in PASSES {
        let shows = |content: &String| {
            let (source, _) = split(content);
            let Ok(file) = text::file(source) else { return false };
            let words = read_only_words(&file.setups);
            let read = |address: u64, size: u32| {
                words.iter().find(|(a, s, _)| (*a, *s) == (address, size)).map(|word| word.2)
            };
            let options = OptOptions { constant_memory: Some(&read), ..OptOptions::default() };
            let Some(mut version) = file.regions.into_iter().flat_map(|r| r.versions).next() else {
                return false;
            };
            golden::passes(source).unwrap_or_default().into_iter().any(|name| {
                let stats = optimise_with(&mut version, &[name], &options);
                name == pass.name && stats.passes.iter().any(|p| p.changes > 0)
            })
        };
        assert!(files.iter().any(shows), "{} has no file in tests/opt", pass.name);
    }
}
