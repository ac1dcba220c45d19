//! Folders of a crate import each other in one direction only.
//!
//! A *unit* is a folder or a file directly below a crate's `src/`. The test reads the paths
//! `crate::unit` of all source files, without comments, and fails if they form a circle. `lib.rs`
//! is no unit: what it re-exports is found by the name of the unit that defines it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Which unit imports which, with one file as the witness of each import.
type Imports = BTreeMap<String, BTreeMap<String, PathBuf>>;

/// All Rust files below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found
}

/// The names after `crate::` in a line of source; of a group in braces all.
fn imported(text: &str) -> Vec<String> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let name = |path: &str| path.split(|c| !is_name(c)).next().unwrap_or_default().to_owned();
    let mut names = Vec::new();
    for path in text.split("crate::").skip(1) {
        let Some(group) = path.strip_prefix('{') else {
            names.push(name(path));
            continue;
        };
        let (mut depth, mut start) = (0, 0);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    names.push(name(group[start..at].trim_start()));
                    start = at + 1;
                }
                _ => {}
            }
            if c == '}' && depth == 0 && at + 1 == start {
                break;
            }
        }
    }
    names
}

/// The imports between the units of the crate at `root`.
fn imports(root: &Path) -> Imports {
    let src = root.join("src");
    let mut imports = Imports::new();
    for file in sources(&src) {
        let within = file.strip_prefix(&src).expect("below src");
        let first = within.iter().next().expect("a file has a name");
        let unit = Path::new(first).file_stem().expect("a name").to_string_lossy().into_owned();
        let text = fs::read_to_string(&file).expect("text");
        let code: Vec<&str> =
            text.lines().map(|line| line.split("//").next().unwrap_or(line)).collect();
        let units = imports.entry(unit.clone()).or_default();
        for other in imported(&code.join("\n")) {
            if other != unit {
                units.entry(other).or_insert_with(|| within.to_owned());
            }
        }
    }
    imports.remove("lib");
    let known: BTreeSet<String> = imports.keys().cloned().collect();
    imports.values_mut().for_each(|units| units.retain(|unit, _| known.contains(unit)));
    imports
}

/// A path of imports from `unit` back to `goal`, if there is one.
fn path_to(imports: &Imports, unit: &str, goal: &str, seen: &mut Vec<String>) -> bool {
    seen.push(unit.to_owned());
    for next in imports[unit].keys() {
        if next == goal || (!seen.contains(next) && path_to(imports, next, goal, seen)) {
            return true;
        }
    }
    false
}

#[test]
fn no_circle_of_imports() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut edges = 0;
    for name in ["emitter", "guest"] {
        let imports = imports(&repository.join(name));
        edges += imports.values().map(BTreeMap::len).sum::<usize>();
        for (unit, others) in &imports {
            for (other, file) in others {
                let back = path_to(&imports, other, unit, &mut Vec::new());
                assert!(
                    !back,
                    "{name}: {unit} imports {other} ({}), which imports it",
                    file.display()
                );
            }
        }
    }
    assert!(edges > 25, "{edges}");
}

#[test]
fn names_are_found_in_all_forms_of_paths() {
    assert_eq!(imported("use crate::asm::{Mem, RAX};"), ["asm"]);
    assert_eq!(
        imported("use crate::{asm::Mem, cache::{Cache, words}, cpu};"),
        ["asm", "cache", "cpu"]
    );
    assert_eq!(imported("fn f(_: &crate::cpu::Cpu) -> crate::cache::Cache"), ["cpu", "cache"]);
}
