//! File tests: `tests/opt/*.ir` hold a version, the passes to run, and what must come out.
//!
//! The first line is `; passes: a, b`, or `; passes: default`; behind a line `---` stands the expected result.
//! `OPT_BLESS=1 cargo test -p dynasour-ir --test opt_files` writes the results into the files: read the diff.

use dynasour_ir::opt::{OptOptions, optimise, optimise_with};
use dynasour_ir::{Version, text};
use std::fs;
use std::path::Path;

fn optimised(path: &Path, source: &str) -> Version {
    let name = path.display();
    let passes = source.lines().next().and_then(|l| l.strip_prefix("; passes: "));
    let passes = passes.unwrap_or_else(|| panic!("{name}: the first line names no passes"));
    let mut version = text::version(source).unwrap_or_else(|e| panic!("{name}: {e}"));
    match passes {
        "default" => optimise(&mut version, &OptOptions::default()),
        names => optimise_with(&mut version, &names.split(", ").collect::<Vec<&str>>(), &OptOptions::default()),
    };
    version
}

#[test]
fn files() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/opt");
    let mut paths: Vec<_> = fs::read_dir(&directory).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 3, "the file tests are missing");
    let bless = std::env::var_os("OPT_BLESS").is_some();
    let mut failures = Vec::new();
    for path in paths {
        let content = fs::read_to_string(&path).unwrap();
        let (source, expected) = content.split_once("---\n").unwrap_or((&content, ""));
        let result = optimised(&path, source).to_string();
        if bless {
            fs::write(&path, format!("{source}---\n{result}")).unwrap();
        } else if result != expected {
            failures.push(format!("{}:\nexpected\n{expected}\nfound\n{result}", path.display()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
