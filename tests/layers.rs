//! Folders of a crate import each other in one direction only.
//!
//! A *unit* is a folder or a file directly below a crate's `src/`, or directly below a folder that
//! [`FOLDERS`] names. The test reads the paths `crate::unit` (or `crate::folder::unit`) of all
//! source files, without comments, and fails if they form a circle. `lib.rs` and `mod.rs` are no units:
//! what they re-export is found by the name of the unit that defines it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Which unit imports which, with one file as the witness of each import.
type Imports = BTreeMap<String, BTreeMap<String, PathBuf>>;

/// The modules that the source `text` declares for tests only, in files of their own.
fn test_modules(text: &str) -> impl Iterator<Item = &str> {
    text.split("#[cfg(test)]\n").skip(1).filter_map(|after| {
        let declaration = after.split("mod ").nth(1)?;
        declaration.split_once(';').map(|(name, _)| name)
    })
}

/// The source without comments and without the test modules, which are at its end.
fn code(text: &str) -> String {
    let begins_module = |at: &(usize, &str)| {
        let line = text[at.0..].lines().nth(1).unwrap_or_default();
        line.contains("mod ") && line.ends_with('{')
    };
    let end = text.match_indices("#[cfg(test)]\n").find(begins_module).map_or(text.len(), |m| m.0);
    let lines = text[..end].lines().map(|line| line.split("//").next().unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

/// All Rust files below `folder`, except those of modules for tests only.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = all_sources(folder);
    let mut of_tests = Vec::new();
    for file in &found {
        let text = fs::read_to_string(file).expect("text");
        let stem = file.file_stem().expect("a name");
        let is_root = ["mod", "lib", "main"].iter().any(|root| stem == *root);
        let below = if is_root {
            file.parent().expect("a folder").to_owned()
        } else {
            file.with_extension("")
        };
        of_tests.extend(test_modules(&text).map(|name| below.join(name)));
    }
    found.retain(|file| {
        !of_tests
            .iter()
            .any(|module| file.starts_with(module) || *file == module.with_extension("rs"))
    });
    found
}

fn all_sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            found.extend(all_sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found
}

/// The folders whose units are looked at, each with the path that its units begin with.
/// (`tracer/src` is one folder of files that know each other.)
const FOLDERS: [(&str, &str); 7] = [
    ("guest/src", "crate::"),
    ("ir/src", "crate::"),
    ("emitter/src", "crate::"),
    ("runtime/src", "crate::"),
    ("runtime/src/kernel", "crate::kernel::"),
    ("runtime/src/dispatch", "crate::dispatch::"),
    ("src", "crate::"),
];

/// The names after `prefix` in a source text; of a group in braces all.
fn imported(text: &str, prefix: &str) -> Vec<String> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let name = |path: &str| path.split(|c| !is_name(c)).next().unwrap_or_default().to_owned();
    let mut names = Vec::new();
    for path in text.split(prefix).skip(1) {
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

/// The imports between the units of the folder `src`.
fn imports(src: &Path, prefix: &str) -> Imports {
    let mut imports = Imports::new();
    for file in sources(src) {
        let within = file.strip_prefix(src).expect("below src");
        let first = within.iter().next().expect("a file has a name");
        let unit = Path::new(first).file_stem().expect("a name").to_string_lossy().into_owned();
        let text = fs::read_to_string(&file).expect("text");
        let units = imports.entry(unit.clone()).or_default();
        for other in imported(&code(&text), prefix) {
            if other != unit {
                units.entry(other).or_insert_with(|| within.to_owned());
            }
        }
    }
    for none in ["lib", "mod", "main"] {
        imports.remove(none);
    }
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
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut edges = 0;
    for (name, prefix) in FOLDERS {
        let imports = imports(&repository.join(name), prefix);
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
    assert_eq!(imported("use crate::asm::{Mem, RAX};", "crate::"), ["asm"]);
    assert_eq!(
        imported("use crate::{asm::Mem, cache::{Cache, words}, cpu};", "crate::"),
        ["asm", "cache", "cpu"]
    );
    assert_eq!(
        imported("fn f(_: &crate::cpu::Cpu) -> crate::cache::Cache", "crate::"),
        ["cpu", "cache"]
    );
}
