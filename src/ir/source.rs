//! Files in the text form, and error messages that quote the faulty line.
//!
//! Data: [`SourceText`] has the text of one file, [`Problem`] one error at a position of it. No lock.
//!
//! A golden file has two parts with a line `---` between them ([`golden`]): a program and what
//! passes make of it. The program is the part that commands work on.
//!
//! Example: a text that does not parse gives one problem of the rule `syntax`; one that breaks
//! rules of the verifier gives a problem for each of them.

use anyhow::{Context, Result};
use dynasour_ir::opt::golden;
use dynasour_ir::region::{RegionRule, verify_region};
use dynasour_ir::text::{File, ParseError, Position, file};
use dynasour_ir::verify::{VerifyError, Where, verify};
use miette::{
    Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, NamedSource, Severity,
    SourceCode,
};
use std::fmt;
use std::io::{IsTerminal, Read};
use std::path::Path;

/// A file and its text.
pub struct SourceText {
    /// As the user named it.
    pub name: String,
    /// Its content.
    pub text: String,
}

/// An error at a position of a file.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The message, one line.
    pub message: String,
    /// The position.
    pub at: Position,
    /// The note beside the position.
    pub label: String,
    /// The rule that is broken; `syntax` if the text does not parse.
    pub rule: String,
    /// A hint for the user.
    pub help: Option<String>,
}

impl SourceText {
    /// Reads a file; `-` is standard input.
    pub fn read(path: &Path) -> Result<SourceText> {
        let name =
            if path == Path::new("-") { "<stdin>".to_string() } else { path.display().to_string() };
        let mut bytes = Vec::new();
        if path == Path::new("-") {
            std::io::stdin().read_to_end(&mut bytes).context("cannot read the standard input")?;
        } else {
            bytes = std::fs::read(path).with_context(|| format!("cannot read {name}"))?;
        }
        // Bytes that are not UTF-8 become replacement characters, which the parser then reports.
        Ok(SourceText { name, text: String::from_utf8_lossy(&bytes).into_owned() })
    }

    /// Parses the program.
    pub fn parse(&self) -> Result<File, Problem> {
        file(golden::split(&self.text).0).map_err(|e| Problem::syntax(&e))
    }

    /// Parses the second part of a golden file; none if the file has no second part.
    pub fn parse_expected(&self) -> Option<Result<File, Problem>> {
        let (program, expected) = golden::split(&self.text);
        // Blank lines in place of the first part and the line `---` keep positions right.
        let above = "\n".repeat(program.lines().count() + 1);
        Some(file(&format!("{above}{}", expected?)).map_err(|e| Problem::syntax(&e)))
    }

    /// Parses the program and verifies every version; returns all problems found.
    pub fn load(&self) -> Result<File, Vec<Problem>> {
        let file = self.parse().map_err(|problem| vec![problem])?;
        let problems = problems(&file);
        if problems.is_empty() { Ok(file) } else { Err(problems) }
    }

    /// As [`SourceText::load`], for the second part of a golden file. It holds versions as the printer
    /// writes them, each in a region of its own, so the rules of regions do not apply.
    pub fn load_expected(&self) -> Option<Result<File, Vec<Problem>>> {
        let load = |file: File| {
            let versions = file.regions.iter().flat_map(|r| &r.versions);
            let spots = file.spots.iter().flatten();
            let problems: Vec<Problem> = versions
                .zip(spots)
                .flat_map(|(version, spots)| {
                    let broken = verify(version).err().unwrap_or_default();
                    broken.into_iter().map(|e| Problem::rule(&e, spots.of(e.at)))
                })
                .collect();
            if problems.is_empty() { Ok(file) } else { Err(problems) }
        };
        Some(self.parse_expected()?.map_err(|problem| vec![problem]).and_then(load))
    }

    /// Byte offset of a position, and the length of the text to underline: up to a comment or the
    /// end of the line, or only the first word.
    fn span(&self, at: Position, whole_line: bool) -> (usize, usize) {
        let before: usize = self.text.split_inclusive('\n').take(at.line - 1).map(str::len).sum();
        let line = self.text[before..].split('\n').next().unwrap_or("");
        let column = line.char_indices().nth(at.column - 1).map_or(line.len(), |(i, _)| i);
        let code = line[column..].split(';').next().unwrap_or("").trim_end();
        let word = code.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(code.len());
        let len = if whole_line {
            code.len()
        } else {
            word.max(code.chars().next().map_or(0, char::len_utf8))
        };
        (before + column, len)
    }

    /// Prints a problem to standard error.
    pub fn show(&self, problem: &Problem) {
        let terminal = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let theme = if terminal { GraphicalTheme::unicode() } else { GraphicalTheme::none() };
        let report = Report {
            problem: problem.clone(),
            span: self.span(problem.at, problem.rule != "syntax"),
            source: NamedSource::new(&self.name, self.text.clone()),
        };
        let mut out = String::new();
        if GraphicalReportHandler::new_themed(theme).render_report(&mut out, &report).is_err() {
            out = format!(
                "{}:{}:{}: {}",
                self.name, problem.at.line, problem.at.column, problem.message
            );
        }
        eprintln!("{}", out.trim_end());
    }
}

impl Problem {
    fn syntax(e: &ParseError) -> Problem {
        Problem {
            message: format!("expected {}, found {}", e.expected, e.found),
            at: Position { line: e.line, column: e.column },
            label: format!("expected {}", e.expected),
            rule: "syntax".to_string(),
            help: None,
        }
    }

    fn rule(e: &VerifyError, at: Position) -> Problem {
        Problem {
            message: e.what.clone(),
            at,
            label: format!("breaks the rule `{}`", e.rule),
            rule: e.rule.to_string(),
            help: Some(e.rule.about().to_string()),
        }
    }

    fn region(what: &str, at: Position) -> Problem {
        Problem {
            message: what.to_string(),
            at,
            label: "breaks the rules of regions".to_string(),
            rule: "region".to_string(),
            help: Some(
                "the versions of a region have names of their own, and labels fit the version they \
                 name"
                    .to_string(),
            ),
        }
    }
}

/// All broken rules of a file.
fn problems(file: &File) -> Vec<Problem> {
    let mut out = Vec::new();
    for (i, (region, spots)) in file.regions.iter().zip(&file.spots).enumerate() {
        if file.regions[..i].iter().any(|r| r.pc == region.pc) {
            let at = spots.first().map_or(Position { line: 1, column: 1 }, |first| first.version);
            let what = format!(
                "there is a region {:#x} already: all its versions stand in one",
                region.pc
            );
            out.push(Problem::region(&what, at));
        }
        let spots_of = |name: &str| {
            region.versions.iter().rposition(|v| v.name == name).and_then(|i| spots.get(i))
        };
        for broken in verify_region(region).err().unwrap_or_default() {
            let (name, at) = match &broken {
                RegionRule::Version { version, error } => (version, error.at),
                RegionRule::Label { version, anchor, .. } => (version, Where::Anchor(*anchor)),
                RegionRule::Listing { version, .. } => (version, Where::Version),
            };
            let at = spots_of(name).map_or(Position { line: 1, column: 1 }, |spots| spots.of(at));
            out.push(match &broken {
                RegionRule::Version { error, .. } => Problem::rule(error, at),
                RegionRule::Label { what, .. } => Problem::region(what, at),
                RegionRule::Listing { what, .. } => Problem::region(what, at),
            });
        }
    }
    out
}

/// A problem in the form that miette prints.
#[derive(Debug)]
struct Report {
    problem: Problem,
    span: (usize, usize),
    source: NamedSource<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem.message)
    }
}

impl std::error::Error for Report {}

impl Diagnostic for Report {
    fn severity(&self) -> Option<Severity> {
        Some(Severity::Error)
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(self.problem.help.as_ref()?))
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        Some(&self.source)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let (offset, len) = self.span;
        Some(Box::new(std::iter::once(LabeledSpan::new(
            Some(self.problem.label.clone()),
            offset,
            len,
        ))))
    }
}
