//! The files that the page is made from. A file is recognised by its content, not by its name.
//!
//! A file of the wrong form is refused with the form that it seems to have. Everything is checked
//! here, so that the scripts of the page can rely on the fields.
//!
//! Data: [`Input`], one checked file. No lock.
//!
//! Example: an object with `policies` and `command` is what `guards --json` prints. It must have
//! the fields of [`crate::guards::Report`].

use crate::bench::report::Report as Bench;
use crate::explain::model::{Assembly, Explanation, Record, SCHEMA};
use crate::guards::{Curve, Report as Comparison};
use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// One file, checked.
pub enum Input {
    /// Of `explain --json` or `--jsonl`.
    Explanation {
        /// The file's name, or the command line of the program.
        name: String,
        /// Its content.
        explanation: Box<Explanation>,
    },
    /// What the scripts of the page read as it is.
    Study {
        /// Which part of the page shows it.
        kind: Study,
        /// The file's name.
        name: String,
        /// Its content.
        content: Value,
    },
}

/// Measurements of several runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Study {
    /// Of `guards --json`.
    Comparison,
    /// Of `guards --chaos-sweep --json`.
    Sweep,
    /// Of `bench --json` or `bench --save`.
    Bench,
}

/// Each form that is not accepted, by fields that only it has, with what to do.
const OTHERS: [(&[&str], &str); 2] = [
    (
        &["fragments", "images"],
        "is the census of `run --count`; give the output of `explain --json` instead",
    ),
    (
        &["fragments", "native_entries"],
        "is the statistics of `run --stats-json`; give the output of `explain --json --attempts` \
         instead",
    ),
];

/// What a file is.
///
/// # Errors
/// It is none of the known forms, or of another version.
pub fn recognise(name: &str, bytes: &[u8]) -> Result<Input> {
    if let Some(explanation) = lines(name, bytes)? {
        let (name, explanation) = (name.to_string(), Box::new(explanation));
        return Ok(Input::Explanation { name, explanation });
    }
    let content: Value =
        serde_json::from_slice(bytes).with_context(|| format!("{name} is not JSON"))?;
    let has = |fields: &[&str]| fields.iter().all(|field| content.get(field).is_some());
    if let Some((_, what)) = OTHERS.iter().find(|(fields, _)| has(fields)) {
        bail!("{name} {what}");
    }
    if has(&["schema", "regions"]) {
        has_schema(name, &content)?;
        let explanation = Box::new(check(name, "explain --json", content)?);
        return Ok(Input::Explanation { name: name.to_string(), explanation });
    }
    let kind = if has(&["command", "policies"]) {
        check::<Comparison>(name, "guards --json", content.clone())?;
        Study::Comparison
    } else if has(&["command", "rates", "unlinked"]) {
        check::<Curve>(name, "guards --chaos-sweep --json", content.clone())?;
        Study::Sweep
    } else if has(&["format", "rows"]) {
        check::<Bench>(name, "bench --json", content.clone())?;
        Study::Bench
    } else {
        bail!("{name} is not the JSON of explain, guards or bench")
    };
    Ok(Input::Study { kind, name: name.to_string(), content })
}

/// Is the explanation of the form that this dynasour reads?
fn has_schema(name: &str, content: &Value) -> Result<()> {
    let schema = content["schema"].as_u64();
    if schema == Some(u64::from(SCHEMA)) {
        return Ok(());
    }
    let schema = schema.map_or("unknown".to_string(), |schema| schema.to_string());
    bail!(
        "{name} has schema {schema} of `explain --json`, and this dynasour reads {SCHEMA}; run \
         `explain` again with this dynasour"
    )
}

/// The explanation, if these are lines of `explain --jsonl`.
fn lines(name: &str, bytes: &[u8]) -> Result<Option<Explanation>> {
    let mut lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let Some(first) = lines.next() else { return Ok(None) };
    match serde_json::from_slice::<Value>(first) {
        Ok(run) if run["record"] == "run" => has_schema(name, &run)?,
        _ => return Ok(None),
    }
    const FORM: &str = "explain --jsonl";
    let mut assembly = Assembly::default();
    let mut is_whole = false;
    for (n, line) in std::iter::once(first).chain(lines).enumerate() {
        let place = || format!("{name}, line {}, is not what `{FORM}` writes", n + 1);
        let record = Record::of(line).with_context(place)?.with_context(place)?;
        is_whole = matches!(record, Record::Sources { .. });
        assembly.add(record).with_context(place)?;
    }
    ensure!(is_whole, "{name} ends before the last line of `{FORM}`; was explain killed?");
    assembly.whole().map(Some)
}

/// The content, if it has all fields of its form.
fn check<T: DeserializeOwned>(name: &str, form: &str, content: Value) -> Result<T> {
    serde_json::from_value(content).with_context(|| {
        format!(
            "{name} is not what `{form}` of this dynasour ({}) writes",
            env!("CARGO_PKG_VERSION")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        match recognise("f", text.as_bytes()) {
            Ok(_) => panic!("{text} was accepted"),
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn files_are_recognised_by_content() {
        let sweep = r#"{"command": [], "rates": [], "unlinked": {}}"#;
        let bench = r#"{"format": "dynasour-bench-1", "rows": []}"#;
        let Ok(Input::Study { kind, .. }) = recognise("f", bench.as_bytes()) else {
            panic!("a bench")
        };
        assert_eq!(kind, Study::Bench);
        assert!(refusal(sweep).contains("guards --chaos-sweep --json"));
        assert!(refusal(r#"{"schema": 1, "regions": []}"#).contains("has schema 1"));
        let schema = format!(r#"{{"schema": {SCHEMA}, "regions": []}}"#);
        assert!(refusal(&schema).contains("missing field"));
        assert!(refusal(r#"{"record": "run", "schema": 1}"#).contains("has schema 1"));
        let cut = format!(r#"{{"record": "run", "schema": {SCHEMA}}}"#);
        assert!(refusal(&cut).contains("missing field"));
        assert!(refusal(r#"{"fragments": 1, "images": []}"#).contains("census"));
        assert!(refusal("[]").contains("not the JSON of"));
        assert!(refusal("{").contains("not JSON"));
    }
}
