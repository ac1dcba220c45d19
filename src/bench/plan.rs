//! Turns suites into runs: builds kernels, generates inputs, finds programs, writes the command
//! lines.
//!
//! Data: [`Workshop`] names the directory of built kernels and inputs. A kernel is built again only
//! if its source is newer. Invariant: a workload whose program is not installed is a row with a
//! reason; a kernel that does not compile is an error. No lock.
//!
//! Example: the entry `sieve` with the levels `-O0` and `-O2` becomes the workloads `sieve-O0` and
//! `sieve-O2`, each with the command `DIRECTORY/sieve-O0 2000`.

use crate::bench::measure::Invocation;
use crate::bench::suite::{Suite, WorkloadEntry};
use anyhow::{Context, Result, ensure};
use dynasour_guest::image;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One row to be measured.
#[derive(Debug)]
pub struct Workload {
    /// Its place in the study, from 0.
    pub index: usize,
    /// The suite that it is of.
    pub suite: Option<String>,
    /// Its name.
    pub name: String,
    /// Its class.
    pub class: String,
    /// The working directory of its runs.
    pub directory: PathBuf,
    /// The native command line, or why the workload cannot run here.
    pub native: Result<Invocation, String>,
    /// The same program with more to do (`--longer`).
    pub longer: Option<Invocation>,
}

impl Workload {
    /// A command line of the user, which runs in the current directory.
    pub fn of_command(run: Invocation) -> Workload {
        let found = find(&run.argv[0].to_string_lossy());
        Workload {
            index: 0,
            suite: None,
            name: run.line(),
            class: "program".to_string(),
            directory: PathBuf::from("."),
            native: found.map(|_| run).map_err(|error| format!("{error:#}")),
            longer: None,
        }
    }
}

/// Another launcher: `NAME='CMD {}'`.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Name of its column.
    pub name: String,
    argv: Vec<String>,
}

impl std::str::FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Peer, String> {
        const FORM: &str = "expected NAME='COMMAND {}' with the program's place marked by {}";
        let (name, command) = text.split_once('=').ok_or(FORM)?;
        let argv: Vec<String> = command.split_whitespace().map(str::to_string).collect();
        let markers = argv.iter().filter(|word| *word == "{}").count();
        if name.is_empty() || markers != 1 || argv[0] == "{}" {
            return Err(FORM.to_string());
        }
        Ok(Peer { name: name.to_string(), argv })
    }
}

impl Peer {
    /// Checks that the launcher's program exists.
    ///
    /// # Errors
    /// It does not exist.
    pub fn check(&self) -> Result<()> {
        find(&self.argv[0]).map(|_| ()).with_context(|| format!("peer '{}'", self.name))
    }

    /// The guest's command under this launcher.
    pub fn launch(&self, guest: &Invocation) -> Invocation {
        let argv = self.argv.iter().flat_map(|word| match word.as_str() {
            "{}" => guest.argv.clone(),
            word => vec![OsString::from(word)],
        });
        Invocation { argv: argv.collect(), stdin: guest.stdin.clone() }
    }
}

/// Directories and choices for building kernels and generating inputs.
pub struct Workshop<'a> {
    /// Directory of built kernels and inputs.
    pub directory: &'a Path,
    /// Whether to use the small sizes.
    pub small: bool,
}

impl Workshop<'_> {
    /// The rows of an entry whose names `wanted` accepts.
    ///
    /// # Errors
    /// A kernel could not be built, or an input not generated.
    pub fn prepare(
        &self,
        suite: &Suite,
        entry: &WorkloadEntry,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<Workload>> {
        let n = entry.small.filter(|_| self.small).unwrap_or(entry.n);
        let mut names: Vec<(String, Option<&str>)> = entry
            .levels
            .iter()
            .map(|level| (format!("{}{level}", entry.name), Some(level.as_str())))
            .collect();
        if names.is_empty() {
            names.push((entry.name.clone(), None));
        }
        names.retain(|(name, _)| wanted(name));
        let mut rows = Vec::new();
        for (name, level) in names {
            let native = self
                .command(suite, entry, n, &name, level)
                .with_context(|| format!("workload '{name}'"))?;
            rows.push(Workload {
                index: 0,
                suite: Some(suite.name.clone()),
                name,
                class: entry.class.clone(),
                directory: self.directory.to_path_buf(),
                native,
                longer: None,
            });
        }
        Ok(rows)
    }

    /// The native command line of one row. The outer error means that a kernel or an input could
    /// not be made, the inner one that the program is not installed.
    fn command(
        &self,
        suite: &Suite,
        entry: &WorkloadEntry,
        n: u64,
        name: &str,
        level: Option<&str>,
    ) -> Result<Result<Invocation, String>> {
        let mut values = BTreeMap::from([("n".to_string(), OsString::from(n.to_string()))]);
        let program = match (&entry.source, level) {
            (Some(source), Some(level)) => self
                .build(&suite.directory.join(source), level, &entry.flags, name)?
                .into_os_string(),
            _ => {
                let word = &entry.command[0];
                // The program may be an input of kind `path`, which is known only now.
                match find(word) {
                    Ok(path) => path.into_os_string(),
                    Err(_) if word.starts_with('{') => OsString::from(word),
                    Err(error) => {
                        return Ok(Err(match &entry.package {
                            Some(package) => format!("{error:#}; it is in package {package}"),
                            None => format!("{error:#}"),
                        }));
                    }
                }
            }
        };
        let inputs = self.directory.join(format!("{}-{n}", entry.name));
        std::fs::create_dir_all(&inputs)
            .with_context(|| format!("cannot create {}", inputs.display()))?;
        for (input, how) in &entry.inputs {
            let path = how
                .make(input, n, &inputs, &suite.directory)
                .with_context(|| format!("input '{input}'"))?;
            values.insert(input.clone(), path.into_os_string());
        }
        let stdin = entry.stdin.as_ref().and_then(|name| values.get(name)).map(PathBuf::from);
        let default = ["{n}".to_string()];
        let args: &[String] = match (&entry.source, &entry.args) {
            (Some(_), Some(args)) => args,
            (Some(_), None) => &default,
            (None, _) => &entry.command[1..],
        };
        let program = program.to_str().map_or(program.clone(), |text| fill(text, &values));
        let argv =
            std::iter::once(program).chain(args.iter().map(|word| fill(word, &values))).collect();
        Ok(Ok(Invocation { argv, stdin }))
    }

    /// Builds a kernel, unless it was built after its source was last changed.
    fn build(&self, source: &Path, level: &str, flags: &[String], name: &str) -> Result<PathBuf> {
        let program = self.directory.join(name);
        let modified = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified());
        let made = modified(source).with_context(|| format!("cannot read {}", source.display()))?;
        if modified(&program).is_ok_and(|built| built > made) {
            return Ok(program);
        }
        let compiler = if source.extension().is_some_and(|e| e == "c") { "cc" } else { "c++" };
        let output = Command::new(compiler)
            .args([level, "-o"])
            .arg(&program)
            .arg(source)
            .args(flags)
            .output()
            .with_context(|| format!("cannot run {compiler}"))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{compiler} {level} {}:\n{errors}", source.display());
        Ok(program)
    }
}

/// The file of a program, found as a shell would find it.
///
/// # Errors
/// No such program exists.
pub fn find(program: &str) -> Result<PathBuf> {
    let path = image::resolve_command(OsStr::new(program), std::env::var_os("PATH").as_deref())?;
    ensure!(path.is_file(), "{program} is not there");
    Ok(path)
}

/// Replaces `{name}` by the value of `name`; braces around other text stay.
fn fill(text: &str, values: &BTreeMap<String, OsString>) -> OsString {
    let mut out = OsString::new();
    let mut remaining = text;
    while let Some(open) = remaining.find('{') {
        out.push(&remaining[..open]);
        remaining = &remaining[open..];
        let value =
            remaining.find('}').and_then(|close| Some((close, values.get(&remaining[1..close])?)));
        match value {
            Some((close, value)) => {
                out.push(OsStr::from_bytes(value.as_bytes()));
                remaining = &remaining[close + 1..];
            }
            None => {
                out.push("{");
                remaining = &remaining[1..];
            }
        }
    }
    out.push(remaining);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_names_are_filled_in() {
        let values = BTreeMap::from([
            ("n".to_string(), OsString::from("7")),
            ("f".to_string(), "/x y".into()),
        ]);
        for (text, filled) in [
            ("{n}", "7"),
            ("a{f}b{n}", "a/x yb7"),
            ("{ print {n} }", "{ print 7 }"),
            ("${h}{k} {", "${h}{k} {"),
            ("", ""),
        ] {
            assert_eq!(fill(text, &values), filled);
        }
    }

    #[test]
    fn peers_have_one_place_for_the_program() {
        let peer: Peer = "v=valgrind -q {}".parse().expect("valid");
        let guest = Invocation { argv: vec!["ls".into(), "-l".into()], stdin: None };
        assert_eq!(peer.launch(&guest).argv, ["valgrind", "-q", "ls", "-l"]);
        for bad in ["", "x", "x=valgrind", "x={}", "=a {}", "x=a {} {}"] {
            assert!(bad.parse::<Peer>().is_err(), "{bad}");
        }
        assert!("x=/nonexistent/launcher {}".parse::<Peer>().expect("valid").check().is_err());
    }
}
