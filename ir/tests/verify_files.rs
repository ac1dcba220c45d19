//! File tests of the verifier: `tests/verify/RULE.ir` hold versions that break the rule, one at a
//! time, and versions that just keep it. Behind the line with an error stands `; error: ` and the
//! verifier's message.
//!
//! `VERIFY_BLESS=1 cargo test -p dynasour-ir --test verify_files` writes the comments: read the
//! diff.

use dynasour_ir::text::file;
use dynasour_ir::verify::{Rule, verify};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const MARK: &str = "; error: ";

fn paths() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/verify");
    let mut paths: Vec<_> = fs::read_dir(&directory).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

/// The verifier's messages for a file, by line.
fn errors(path: &Path, text: &str) -> BTreeMap<usize, Vec<String>> {
    let file = file(text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut found: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for (region, spots) in file.regions.iter().zip(&file.spots) {
        for (version, spots) in region.versions.iter().zip(spots) {
            for e in verify(version).err().unwrap_or_default() {
                found
                    .entry(spots.of(e.at).line)
                    .or_default()
                    .push(format!("{} [{}]", e.what, e.rule));
            }
        }
    }
    found
}

fn without_mark(line: &str) -> &str {
    line.split(MARK).next().unwrap_or(line).trim_end()
}

#[test]
fn errors_stand_on_their_lines() {
    let bless = std::env::var_os("VERIFY_BLESS").is_some();
    let mut failures = Vec::new();
    for path in paths() {
        let text = fs::read_to_string(&path).unwrap();
        let found = errors(&path, &text);
        let line = |(i, line): (usize, &str)| match found.get(&(i + 1)) {
            Some(errors) => format!("{} {MARK}{}\n", without_mark(line), errors.join("; ")),
            None => format!("{}\n", without_mark(line)),
        };
        let marked: String = text.lines().enumerate().map(line).collect();
        if bless {
            fs::write(&path, &marked).unwrap();
        } else if let Some((i, (is, should))) =
            text.lines().zip(marked.lines()).enumerate().find(|(_, (a, b))| a != b)
        {
            failures.push(format!(
                "{}:{}:\n  the file says {is}\n  the verifier  {should}",
                path.display(),
                i + 1
            ));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The file named after a rule has a program that breaks this rule, and a program that breaks none.
#[test]
fn every_rule_has_a_file() {
    let rules = [
        Rule::Shape,
        Rule::Op,
        Rule::Type,
        Rule::Ssa,
        Rule::Jump,
        Rule::Native,
        Rule::Anchor,
        Rule::Varmap,
        Rule::Total,
        Rule::Position,
        Rule::Reach,
        Rule::Deferred,
    ];
    let names: BTreeSet<String> = rules.iter().map(Rule::to_string).collect();
    let files: BTreeSet<String> =
        paths().iter().map(|p| p.file_stem().unwrap().to_string_lossy().into_owned()).collect();
    assert_eq!(names, files);
    for path in paths() {
        let text = fs::read_to_string(&path).unwrap();
        let rule = format!("[{}]", path.file_stem().unwrap().to_string_lossy());
        let errors = errors(&path, &text);
        assert!(
            errors.values().flatten().any(|e| e.ends_with(&rule)),
            "{} breaks other rules only",
            path.display()
        );
        let versions = file(&text).unwrap().regions.into_iter().flat_map(|r| r.versions);
        assert!(
            versions.into_iter().any(|v| verify(&v).is_ok()),
            "{} has no right version",
            path.display()
        );
    }
}
