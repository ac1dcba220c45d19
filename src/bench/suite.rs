//! Suites: TOML files that list workloads. A workload is a kernel that is built here, or a command
//! of the system.
//!
//! ```toml
//! name = "example"
//!
//! [[workload]]
//! name = "sieve"                # a kernel: built once per level, run as `sieve-O2 2000`
//! class = "integer"
//! source = "../kernels/sieve.c"
//! levels = ["-O0", "-O2"]
//! n = 2000                      # {n} in `args`, `command`, input sizes; `small` under --small
//! small = 80
//!
//! [[workload]]
//! name = "gzip"                 # a program of the system
//! class = "compression"
//! command = ["gzip", "-c", "{text}"]
//! package = "gzip"              # what to install when it is missing
//! n = 12000000
//! inputs.text = { kind = "text", size = "{n}" }
//! ```
//!
//! Invariant: each [`WorkloadEntry`] of a [`Suite`] has either a source with levels or a command,
//! and its name is unique. No lock.

use crate::bench::inputs::Input;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// A suite as it is read.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    #[serde(default)]
    workload: Vec<Spanned<WorkloadEntry>>,
}

/// One `[[workload]]` of the file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadEntry {
    /// Name of its rows; a kernel's level is appended.
    pub name: String,
    /// Class of its rows; the table has a mean for each class.
    pub class: String,
    /// A C or C++ file to build, relative to the suite.
    pub source: Option<PathBuf>,
    /// Optimisation levels of the kernel, one row each.
    #[serde(default)]
    pub levels: Vec<String>,
    /// Further compiler options, placed after the source.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Arguments of a kernel; `["{n}"]` if not given.
    pub args: Option<Vec<String>>,
    /// A program of the system, and its arguments.
    #[serde(default)]
    pub command: Vec<String>,
    /// The Debian package that contains the program.
    pub package: Option<String>,
    /// The name of the input that is standard input.
    pub stdin: Option<String>,
    /// The size `{n}`.
    #[serde(default)]
    pub n: u64,
    /// The size under `--small`; `n` if not given.
    pub small: Option<u64>,
    /// Files generated before the workload runs, by the name that stands for their path in
    /// `command`.
    #[serde(default)]
    pub inputs: BTreeMap<String, Input>,
}

/// A suite whose entries are consistent.
#[derive(Debug)]
pub struct Suite {
    /// Its name.
    pub name: String,
    /// The directory that `source` is relative to.
    pub directory: PathBuf,
    /// The workloads.
    pub entries: Vec<WorkloadEntry>,
}

impl Suite {
    /// Reads and checks a suite.
    ///
    /// # Errors
    /// The file cannot be read, or an entry is wrong; the message names its line and the reason.
    pub fn read(path: &Path) -> Result<Suite> {
        let text = std::fs::read_to_string(path).with_context(|| {
            let hint = "(to measure a program: dynasour bench -- PROG ARGS)";
            format!("cannot read suite {} {hint}", path.display())
        })?;
        let directory = path.parent().unwrap_or(Path::new("")).to_path_buf();
        Suite::parse(&text, directory).with_context(|| format!("suite {}", path.display()))
    }

    fn parse(text: &str, directory: PathBuf) -> Result<Suite> {
        let file: File = toml::from_str(text)?;
        let mut entries: Vec<WorkloadEntry> = Vec::new();
        for entry in file.workload {
            let line = text[..entry.span().start].matches('\n').count() + 1;
            let entry = entry.into_inner();
            if let Err(problem) = entry.check() {
                bail!("line {line}: workload '{}': {problem}", entry.name);
            }
            if entries.iter().any(|e| e.name == entry.name) {
                bail!("line {line}: a second workload '{}'", entry.name);
            }
            entries.push(entry);
        }
        if entries.is_empty() {
            bail!("it has no [[workload]]");
        }
        Ok(Suite { name: file.name, directory, entries })
    }
}

impl WorkloadEntry {
    /// Checks what the form of the file does not; the error is for the user.
    fn check(&self) -> Result<(), String> {
        match (&self.source, self.command.is_empty()) {
            (None, true) => return Err("needs 'source' or 'command'".to_string()),
            (Some(_), false) => return Err("has both 'source' and 'command'".to_string()),
            (Some(_), true) if self.levels.is_empty() => {
                return Err("'levels' is empty".to_string());
            }
            (None, false)
                if !self.levels.is_empty() || !self.flags.is_empty() || self.args.is_some() =>
            {
                return Err("'levels', 'flags' and 'args' belong to 'source'".to_string());
            }
            _ => {}
        }
        if self.name.is_empty() || self.name.contains(['/', '\0']) {
            return Err("a name is not empty and has no '/'".to_string());
        }
        if let Some(name) = self.stdin.as_ref().filter(|name| !self.inputs.contains_key(*name)) {
            return Err(format!("'stdin' names no input: {name}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Suite> {
        Suite::parse(text, PathBuf::new())
    }

    #[test]
    fn the_example_is_a_suite() {
        let example: String = include_str!("suite.rs")
            .lines()
            .filter_map(|l| l.strip_prefix("//! "))
            .skip_while(|l| *l != "```toml")
            .skip(1)
            .take_while(|l| *l != "```")
            .flat_map(|l| [l, "\n"])
            .collect();
        let suite = parse(&example).expect("documented");
        assert_eq!(suite.entries.len(), 2);
        assert_eq!(suite.entries[0].small, Some(80));
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let entry = "[[workload]]\nname = 'a'\nclass = 'c'\n";
        for (text, line, word) in [
            ("name = 3", "line 1", "string"),
            ("name = 'x'\nfoo = 1", "line 2", "foo"),
            (&format!("name = 'x'\n{entry}"), "line 2", "needs"),
            (&format!("name = 'x'\n{entry}command = ['a']\nlevels = ['-O2']"), "line 2", "belong"),
            (
                &format!("name = 'x'\n{entry}command = ['a']\nstdin = 'i'"),
                "line 2",
                "names no input",
            ),
            (
                &format!("name = 'x'\n{entry}command = ['a']\n{entry}command = ['b']"),
                "line 6",
                "second",
            ),
            (
                "name = 'x'\n[[workload]]\nname = 'a'\nclass = 'c'\ncommand = 'a'",
                "line 5",
                "sequence",
            ),
        ] {
            let message = format!("{:#}", parse(text).expect_err(text));
            assert!(message.contains(line) && message.contains(word), "{text}: {message}");
        }
        assert!(parse("name = 'x'").is_err());
    }
}
