//! Golden files: `dynasour ir opt --golden` and `dynasour ir check --golden`.
//!
//! `opt` runs the passes or commands of the file's first lines and compares the result with the part
//! after `---` ([`dynasour_ir::opt::golden`]). `check` expects the errors of a file to be those that
//! its comments name, each on its line:
//!
//! ```text
//!       poll ; error: an anchor to fall back to is missing [anchor]
//! ```
//!
//! No data, no lock. The answer to `ir opt --golden ir/tests/opt/peel.ir` is `peel, simplify, dce:
//! the result is as expected`.

use super::source::{Problem, SourceText};
use super::{WRONG, out, plural, refuse};
use anyhow::{Context, Result, bail};
use dynasour_ir::opt::golden;
use similar::TextDiff;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::path::PathBuf;

/// What stands before the expected errors of a line.
const MARK: &str = "; error: ";

/// Lines of context around a difference.
const CONTEXT: usize = 3;

/// `ir opt --golden`: does the file's second part hold?
pub(super) fn optimise(source: &SourceText) -> Result<c_int> {
    if let Err(problems) = source.load() {
        return Ok(refuse(source, &problems));
    }
    let (program, expected) = golden::split(&source.text);
    let Some(expected) = expected else {
        bail!("{} is no golden file: it has no line `---` with a result after it", source.name);
    };
    let found = golden::run(program).with_context(|| source.name.clone())?;
    let commands = match golden::passes(program) {
        Some(passes) => passes.join(", "),
        None => plural(program.lines().take_while(|l| l.starts_with("; do: ")).count(), "command"),
    };
    if found == expected {
        out(format_args!("{commands}: the result is as expected\n"));
        return Ok(0);
    }
    let difference = TextDiff::from_lines(expected, &found);
    let mut unified = difference.unified_diff();
    out(unified.context_radius(CONTEXT).header("expected", "found"));
    eprintln!("dynasour: {}: {commands}: the result differs from what is expected", source.name);
    Ok(WRONG)
}

/// `ir check --golden`: are the errors those that comments name?
pub(super) fn check(files: &[PathBuf]) -> Result<c_int> {
    let (mut marks, mut differences) = (0, 0);
    for path in files {
        let source = SourceText::read(path)?;
        let parts = std::iter::once(source.load()).chain(source.load_expected());
        let mut found: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for Problem { at, message, rule, .. } in parts.filter_map(Result::err).flatten() {
            found.entry(at.line).or_default().push(format!("{message} [{rule}]"));
        }
        for (i, line) in source.text.lines().enumerate() {
            let expected = line.split_once(MARK).map(|(_, errors)| errors.trim());
            let found = found.remove(&(i + 1)).map(|errors| errors.join("; "));
            marks += usize::from(expected.is_some());
            if expected != found.as_deref() {
                differences += 1;
                let (none, place) = ("no error", format!("{}:{}", source.name, i + 1));
                let (expected, found) = (expected.unwrap_or(none), found.as_deref());
                eprintln!("{place}: expected {expected}\n    found {}", found.unwrap_or(none));
            }
        }
        // An error behind the last line: the text ends too early.
        for (line, errors) in found {
            differences += 1;
            eprintln!("{}:{line}: expected no error\n    found {}", source.name, errors.join("; "));
        }
    }
    if differences > 0 {
        eprintln!("{}", plural(differences, "difference"));
        return Ok(WRONG);
    }
    out(format_args!("{} with errors, each as the file says: all right\n", plural(marks, "line")));
    Ok(0)
}
