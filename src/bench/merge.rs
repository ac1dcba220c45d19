//! Reads results back, and puts the shards of a study together.
//!
//! A file is what `--jsonl` writes (a value in each line), or one value with all. The last line of
//! a file may be incomplete, because its job was killed; it is reported and dropped. Generic over
//! what a line holds, because `bench` and `guards` have different lines. No data, no lock.
//!
//! *Invariant.* Merged lines are of one form, one size of study and one setting, in the order of
//! the study, each index at most once.
//!
//! ```text
//! 1.jsonl: index 0, 2      merged: 0, 2 of 3; "1 of 3 is missing: 2"
//! ```

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What a line of results must say of itself.
pub trait Line: DeserializeOwned {
    /// Name and version of the form.
    const FORMAT: &'static str;
    /// The name of the array of lines in a file that is one value.
    const ALL: &'static str;
    /// Place in the study, from 0.
    fn index(&self) -> usize;
    /// Lines of the whole study.
    fn total(&self) -> usize;
    /// What must be equal in all lines that are compared with each other; `None` for a line without
    /// measurements.
    fn setting(&self) -> Option<String>;
}

/// The lines of a file, and a message if the last one is incomplete.
///
/// # Errors
/// It cannot be read, or is not of this form.
pub fn read<T: Line>(path: &Path) -> Result<(Vec<T>, Option<String>)> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    if let Ok(Value::Object(mut whole)) = serde_json::from_str(&text)
        && let Some(Value::Array(lines)) = whole.remove(T::ALL)
    {
        check_format::<T>(whole.get("format"), path)?;
        let lines = lines.into_iter().map(serde_json::from_value).collect::<Result<_, _>>();
        let lines = lines.with_context(|| format!("{} is damaged", path.display()))?;
        return Ok((lines, None));
    }
    let (mut lines, mut incomplete) = (Vec::new(), None);
    for (number, line) in
        text.split_inclusive('\n').enumerate().filter(|(_, l)| !l.trim().is_empty())
    {
        match serde_json::from_str::<Value>(line) {
            Ok(value) => {
                check_format::<T>(value.get("format"), path)?;
                let line = serde_json::from_value(value);
                lines.push(
                    line.with_context(|| format!("{}, line {}", path.display(), number + 1))?,
                );
            }
            Err(_) if !line.ends_with('\n') && number > 0 => {
                incomplete = Some(format!("{}: the last line is incomplete", path.display()));
            }
            Err(_) => check_format::<T>(None, path)?,
        }
    }
    Ok((lines, incomplete))
}

fn check_format<T: Line>(format: Option<&Value>, path: &Path) -> Result<()> {
    match format.and_then(Value::as_str) {
        Some(format) if format == T::FORMAT => Ok(()),
        Some(format) => {
            bail!("{} is of the form {format}; this is for {}", path.display(), T::FORMAT)
        }
        None => bail!("{} does not have results of the form {}", path.display(), T::FORMAT),
    }
}

/// The lines of all files in the order of the study, and what is missing.
///
/// # Errors
/// A file cannot be read, or the files are not of one study.
pub fn merge<T: Line>(paths: &[PathBuf]) -> Result<(Vec<T>, Vec<String>)> {
    let mut merged: BTreeMap<usize, (T, &Path)> = BTreeMap::new();
    let mut problems = Vec::new();
    let mut study: Option<(usize, &Path)> = None;
    let mut measured: Option<(String, &Path)> = None;
    for path in paths {
        let (lines, incomplete) = read::<T>(path)?;
        problems.extend(incomplete);
        for line in lines {
            let (total, begin) = *study.get_or_insert((line.total(), path));
            if line.total() != total {
                bail!(
                    "{} and {} are not of one study: it has {total} rows in one, {} in the other",
                    begin.display(),
                    path.display(),
                    line.total()
                );
            }
            if let Some(other) = line.setting() {
                let (setting, begin) = measured.get_or_insert_with(|| (other.clone(), path));
                ensure!(
                    other == *setting,
                    "{} and {} cannot be compared: {setting} in one, {other} in the other",
                    begin.display(),
                    path.display()
                );
            }
            let index = line.index();
            ensure!(index < total, "{}: row {index} of {total}", path.display());
            if let Some((_, earlier)) = merged.insert(index, (line, path)) {
                bail!("{} and {} both have row {index}", earlier.display(), path.display());
            }
        }
    }
    let Some((total, _)) = study else { bail!("the files have no rows") };
    let missing: Vec<String> =
        (0..total).filter(|i| !merged.contains_key(i)).map(|i| i.to_string()).collect();
    if !missing.is_empty() {
        problems.push(format!("{} of {total} rows missing: {}", missing.len(), missing.join(", ")));
    }
    Ok((merged.into_values().map(|(line, _)| line).collect(), problems))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::output::line;
    use crate::bench::report::examples::row;
    use crate::bench::report::{Report, Row};

    fn named(index: usize) -> Row {
        row(index, &format!("p{index}"), &[0.1; 6], &[("full", &[0.2; 6])])
    }

    fn write(directory: &Path, name: &str, rows: &[Row]) -> PathBuf {
        let path = directory.join(name);
        let lines: String = rows.iter().map(|row| line(row).expect("plain")).collect();
        fs::write(&path, lines).expect("written");
        path
    }

    #[test]
    fn shards_become_the_study() {
        let directory = tempfile::tempdir().expect("a directory");
        let directory = directory.path();
        let odd = write(directory, "odd", &[named(1), named(3)]);
        let even = write(directory, "even", &[named(0), named(2)]);
        let (rows, problems) = merge::<Row>(&[odd.clone(), even.clone()]).expect("one study");
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!((names, problems), (vec!["p0", "p1", "p2", "p3"], vec![]));
        let (_, problems) = merge::<Row>(std::slice::from_ref(&odd)).expect("a part");
        assert_eq!(problems, ["2 of 4 rows missing: 0, 2"]);
        // What was merged is read again, also as one value.
        let whole = directory.join("whole");
        let json = serde_json::to_string_pretty(&Report::new(rows)).expect("plain");
        fs::write(&whole, json).expect("written");
        assert_eq!(read::<Row>(&whole).expect("the same form").0.len(), 4);
        let message = merge::<Row>(&[whole, even]).expect_err("twice").to_string();
        assert!(message.contains("both have row 0"), "{message}");
    }

    #[test]
    fn killed_jobs_leave_half_a_line() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = write(directory.path(), "part", &[named(0), named(1)]);
        let text = fs::read_to_string(&path).expect("text");
        fs::write(&path, &text[..text.len() - 10]).expect("written");
        let (rows, problems) = merge::<Row>(&[path]).expect("a part");
        assert_eq!(rows.len(), 1);
        assert!(problems[0].ends_with("the last line is incomplete"), "{problems:?}");
        assert_eq!(problems[1], "3 of 4 rows missing: 1, 2, 3");
    }

    #[test]
    fn what_does_not_belong_together_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let directory = directory.path();
        let good = write(directory, "good", &[named(0)]);
        let refused = |name: &str, change: &dyn Fn(&mut Row), word: &str| {
            let mut other = named(1);
            change(&mut other);
            let path = write(directory, name, &[other]);
            let message = merge::<Row>(&[good.clone(), path]).expect_err(name).to_string();
            assert!(message.contains(word) && message.contains(name), "{message}");
        };
        refused("size", &|row| row.total = 5, "not of one study");
        refused("clock", &|row| row.clock = crate::bench::Clock::Cpu, "clock");
        refused("tiers", &|row| row.cells[0].launcher = "copy".to_string(), "copy");
        refused("index", &|row| row.index = 9, "row 9 of 4");
        refused("form", &|row| row.format = "dynasour-bench-9".to_string(), "dynasour-bench-9");
        for text in ["", "{}", "{}\n", "not JSON", "[1]\n", "{\"rows\": []}"] {
            let path = directory.join("bad");
            fs::write(&path, text).expect("written");
            assert!(merge::<Row>(&[path]).is_err(), "{text}");
        }
        assert!(merge::<Row>(&[directory.join("none")]).is_err());
    }
}
