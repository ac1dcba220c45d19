//! File tests of the optimiser: `tests/opt/*.ir` hold the start of a transformation and, after a
//! line `---`, the expected result.
//!
//! The first line is `; passes: a, b`, or `; passes: default`, for the only version of the file. Or
//! the first lines are commands:
//!
//! ```text
//! ; do: optimise t1 simplify, dce                passes over a version
//! ; do: inline t1 b0 0x2000.t2                   that version replaces the exit of b0
//! ; do: continue t1 a0 c1                        c1 continues t1 at its anchor a0
//! ; do: specialise t1 t2 a0 eq v1 7, a0 ne v2 0  a copy under assumptions
//! ; do: resume t1 a0 t3 1 a0 eq v1 7, a0 ne v2 0 continues when assumption 1 failed
//! ; do: copy t1 t2, bypass t1, tidy              3.3, composition (4.6), removal of unused
//! ```
//!
//! Commands work on the first region; afterwards its versions other than `base` are compared with
//! the expected result. A version changed by passes that do not move exits is also run beside its
//! original. `OPT_BLESS=1 cargo test -p dynasour-ir --test opt_files` writes the results into the
//! files: read the diff.

use dynasour_ir::eval::ModelMachine;
use dynasour_ir::eval::check::same_result;
use dynasour_ir::opt::{
    Assumption, OptOptions, continuation, inline, optimise, optimise_with, resume, specialise,
};
use dynasour_ir::random::{Rng, generate};
use dynasour_ir::region::verify_region;
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{AnchorId, BlockId, Op, Region, Value, Version, text};
use std::fs;
use std::path::{Path, PathBuf};

/// A word that can only be read: address and content.
const READ_ONLY: (u64, u64) = (0x5a40, 0x2c470);

fn read_only(address: u64, size: u32) -> Option<u64> {
    (address == READ_ONLY.0 && size == 8).then_some(READ_ONLY.1)
}

fn options() -> OptOptions<'static> {
    OptOptions { constant_memory: Some(&read_only), ..OptOptions::default() }
}

/// The number that follows a prefix in a word.
fn number(word: &str, prefix: &str) -> u64 {
    let digits =
        word.strip_prefix(prefix).unwrap_or_else(|| panic!("{word} is not {prefix} and a number"));
    digits.parse().unwrap_or_else(|_| panic!("{word} is not {prefix} and a number"))
}

fn assumptions(words: &[&str]) -> Vec<Assumption> {
    let one = |words: &[&str]| Assumption {
        anchor: AnchorId(number(words[0], "a") as u32),
        op: [Op::Eq, Op::Ne, Op::LtU]
            .into_iter()
            .find(|op| op.to_string() == words[1])
            .expect("a comparison"),
        value: Value(number(words[2], "v") as u32),
        constant: number(words[3], ""),
    };
    words.chunks(4).map(one).collect()
}

fn named<'r>(region: &'r mut Region, name: &str) -> &'r mut Version {
    region.version_mut(name).unwrap_or_else(|| panic!("there is no version {name}"))
}

/// Executes one command; versions of other regions are in `others`.
fn step(region: &mut Region, others: &[Region], line: &str) {
    let words: Vec<&str> = line.split([' ', ',']).filter(|w| !w.is_empty()).collect();
    match words[..] {
        ["optimise", name, ref passes @ ..] => {
            optimise_with(named(region, name), passes, &options());
        }
        ["inline", name, block, callee] => {
            let (pc, version) = callee.split_once('.').expect("a region and a version");
            let pc = u64::from_str_radix(pc.trim_start_matches("0x"), 16).expect("a pc");
            let callee = others
                .iter()
                .find(|r| r.pc == pc)
                .and_then(|r| r.version(version))
                .expect("the callee is there");
            inline(named(region, name), BlockId(number(block, "b") as u32), callee)
                .unwrap_or_else(|e| panic!("{e}"));
        }
        ["continue", name, anchor, new] => {
            let anchor = AnchorId(number(anchor, "a") as u32);
            let made = continuation(named(region, name), anchor, new);
            region.versions.push(made.unwrap_or_else(|e| panic!("{e}")));
        }
        ["specialise", name, new, ref rest @ ..] => {
            let made = specialise(named(region, name), new, &assumptions(rest));
            region.versions.push(made.expect("they can be checked"));
        }
        ["resume", name, anchor, new, failed, ref rest @ ..] => {
            let anchor = AnchorId(number(anchor, "a") as u32);
            let made = resume(
                named(region, name),
                anchor,
                new,
                &assumptions(rest),
                number(failed, "") as usize,
            );
            region.versions.push(made.unwrap_or_else(|e| panic!("{e}")));
        }
        ["copy", from, to] => {
            let copy = region.copy(from, to).unwrap_or_else(|e| panic!("{e}"));
            region.insert(copy).unwrap_or_else(|e| panic!("{e}"));
        }
        ["bypass", name] => assert!(region.bypass(name) > 0, "nothing leads to {name}"),
        ["tidy"] => assert!(!region.remove_unreferenced().is_empty(), "everything is referred to"),
        _ => panic!("unknown step {line:?}"),
    }
}

/// From random states both versions do the same.
fn compare(name: &str, before: &Version, after: &Version) {
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let (state, mut machine) = (generate::state(&mut rng), ModelMachine::boundless(seed));
        machine.write(READ_ONLY.0, &READ_ONLY.1.to_le_bytes());
        if let Err(what) = same_result(before, after, &state, &machine, 2_000) {
            panic!("{name}: from {state}: {what}");
        }
    }
}

/// Passes after which a version may leave at other anchors than before.
const MOVING: [&str; 7] = ["hoist", "licm", "merge", "delay", "alias", "monitor", "slots"];

fn result(path: &Path, source: &str) -> String {
    let name = path.display().to_string();
    let steps: Vec<&str> = source.lines().map_while(|l| l.strip_prefix("; do: ")).collect();
    if !steps.is_empty() {
        let mut regions = text::regions(source).unwrap_or_else(|e| panic!("{name}: {e}"));
        regions.iter().flat_map(|r| &r.versions).for_each(assert_valid);
        let mut region = regions.remove(0);
        steps.iter().for_each(|line| step(&mut region, &regions, line));
        // A continuation is a version of another region.
        let ours = |v: &&Version| v.region == region.pc;
        let own = Region {
            versions: region.versions.iter().filter(ours).cloned().collect(),
            ..region.clone()
        };
        verify_region(&own).unwrap_or_else(|e| panic!("{name}: {}", e[0]));
        region.versions.iter().for_each(assert_valid);
        return region.versions.iter().filter(|v| !v.is_base()).map(|v| format!("{v:#}")).collect();
    }
    let passes = source.lines().next().and_then(|l| l.strip_prefix("; passes: "));
    let passes: Vec<&str> = passes
        .unwrap_or_else(|| panic!("{name}: the first line names no passes"))
        .split(", ")
        .collect();
    let is_known = |pass: &str| dynasour_ir::opt::PASSES.iter().any(|known| known.name == pass);
    let unknown = passes.iter().find(|pass| **pass != "default" && !is_known(pass));
    assert_eq!(unknown, None, "{name}: no such pass");
    let before = text::version(source).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_valid(&before);
    let mut version = before.clone();
    match passes[..] {
        ["default"] => optimise(&mut version, &options()),
        ref names => optimise_with(&mut version, names, &options()),
    };
    assert_valid(&version);
    if passes != ["default"] && !passes.iter().any(|pass| MOVING.contains(pass)) {
        compare(&name, &before, &version);
    }
    version.to_string()
}

fn paths() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/opt");
    let mut paths: Vec<_> = fs::read_dir(&directory).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn files() {
    let bless = std::env::var_os("OPT_BLESS").is_some();
    let mut failures = Vec::new();
    for path in paths() {
        let content = fs::read_to_string(&path).unwrap();
        let (source, expected) = content.split_once("---\n").unwrap_or((&content, ""));
        let result = result(&path, source);
        if bless {
            fs::write(&path, format!("{source}---\n{result}")).unwrap();
        } else if result != expected {
            failures.push(format!("{}:\nexpected\n{expected}\nfound\n{result}", path.display()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Every pass has a file in which it changes something.
#[test]
fn every_pass_has_a_file() {
    let files: Vec<String> = paths().iter().map(|p| fs::read_to_string(p).unwrap()).collect();
    for pass in dynasour_ir::opt::PASSES {
        let shows = |content: &String| {
            let passes = content
                .lines()
                .next()
                .and_then(|l| l.strip_prefix("; passes: "))
                .unwrap_or_default();
            let mut passes = passes.split(", ");
            let source = content.split("---\n").next().unwrap_or_default();
            let Ok(mut version) = text::version(source) else { return false };
            passes.any(|name| {
                let stats = optimise_with(&mut version, &[name], &options());
                name == pass.name && stats.passes.iter().any(|p| p.changes > 0)
            })
        };
        assert!(files.iter().any(shows), "{} has no file in tests/opt", pass.name);
    }
}
