//! Golden files: a program, the passes or commands that change it, and the result that is expected.
//!
//! ```text
//! ; passes: peel, simplify, dce                  or `default`: over the only version of the file
//! region 0x1000 { version t1 { … } }
//! ---
//! region 0x1000 { version t1 optimised { … } }   what the printer makes of the result
//! ```
//!
//! Or the first lines are commands. They change the first region of the file; the result is all its
//! versions other than `base`, or those that `show` names:
//!
//! ```text
//! ; do: optimise t1 simplify, dce                passes over a version
//! ; do: inline t1 b0 0x2000.t2                   that version replaces the exit of b0
//! ; do: continue t1 a0 c1                        c1 continues t1 at its anchor a0
//! ; do: context c1 rbx == 0                      the version's context
//! ; do: speculate t1 b0 3 ne v2 0                before instruction 3 of b0: assume v2 != 0
//! ; do: guard t1 b1 2 v10                        before instruction 2 of b1: assume v10
//! ; do: specialise t1 t2 a0 eq v1 7, a0 ne v2 0  a copy under assumptions
//! ; do: resume t1 a0 t3 1 a0 eq v1 7, a0 ne v2 0 continues when assumption 1 has failed
//! ; do: copy t1 t2                               a copy whose anchors lead to t1 (sourir 3.3)
//! ; do: rename t1 t2
//! ; do: bypass t1                                composition (4.6): anchors to t1 lead past it
//! ; do: tidy                                     removes versions that nothing leads to
//! ; do: show t2, t3
//! ```
//!
//! Memory that a `state` of the file declares `read_only` is constant for the pass `readonly`.
//!
//! Invariant: whatever the text, the answer is a result or a [`GoldenError`]. Versions are verified
//! before the first command and after each. No data between calls, no lock. `dynasour ir opt
//! --golden` and the tests `opt_files` call this module.

use super::{
    Assumption, OptOptions, continuation, inject, inline, optimise, optimise_with, pass, resume,
    specialise,
};
use crate::op::Op;
use crate::reach::Point;
use crate::region::{Region, verify_region};
use crate::setup::read_only_words;
use crate::text::{self, File, ParseError};
use crate::types::{AnchorId, BlockId, Operand, Ty, Value};
use crate::verify::{VerifyError, verify};
use crate::version::{Context, Inst, Version};
use std::fmt::{Display, Write};

/// Why a golden file has no result.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GoldenError {
    /// The program is not in the text form.
    #[error(transparent)]
    Text(#[from] ParseError),
    /// The file does not say what is to be done.
    #[error(
        "the file does not say how its result is made: it begins neither with `; passes: ` nor with `; do: `"
    )]
    NoCommands,
    /// `; passes: ` is for one version.
    #[error(
        "`; passes: ` is for a file with one version, which this one has not: write `; do: optimise NAME …`"
    )]
    NotOneVersion,
    /// A command cannot be carried out.
    #[error("line {line}: {what}")]
    Command {
        /// From 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// A version breaks a rule before the first command.
    #[error("version {version}: {error}")]
    Rule {
        /// Its name.
        version: String,
        /// The first broken rule.
        error: VerifyError,
    },
}

/// The part of a file before the line `---`, and the part after it if there is such a line.
pub fn split(text: &str) -> (&str, Option<&str>) {
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if line.trim_end() == "---" {
            return (&text[..at], Some(&text[at + line.len()..]));
        }
        at += line.len();
    }
    (text, None)
}

/// The passes that the first line of a file names.
pub fn passes(source: &str) -> Option<Vec<&str>> {
    let names = source.lines().next()?.strip_prefix("; passes: ")?;
    Some(names.split(',').map(str::trim).collect())
}

/// The result of the file's passes or commands in the printer's form. `source` is the part before
/// `---`.
///
/// # Errors
/// The text does not parse or verify, names no commands, or one of them cannot be carried out.
pub fn run(source: &str) -> Result<String, GoldenError> {
    let file = text::file(source)?;
    for version in file.regions.iter().flat_map(|r| &r.versions) {
        valid(version)
            .map_err(|error| GoldenError::Rule { version: version.name.clone(), error })?;
    }
    let words = read_only_words(&file.setups);
    let read = |address: u64, size: u32| {
        let word = words.iter().find(|(at, bytes, _)| (*at, *bytes) == (address, size))?;
        Some(word.2)
    };
    let options = OptOptions { constant_memory: Some(&read), ..OptOptions::default() };
    match passes(source) {
        Some(names) => over_one(file, &names, &options),
        None => Steps::new(file).run(source, &options),
    }
}

fn valid(version: &Version) -> Result<(), VerifyError> {
    verify(version).map_err(|mut errors| errors.remove(0))
}

/// Runs passes over the only version of a file.
fn over_one(file: File, names: &[&str], options: &OptOptions) -> Result<String, GoldenError> {
    let mut versions = file.regions.into_iter().flat_map(|r| r.versions);
    let (Some(mut version), None) = (versions.next(), versions.next()) else {
        return Err(GoldenError::NotOneVersion);
    };
    match names {
        ["default"] => {
            optimise(&mut version, options);
        }
        _ => run_passes(&mut version, names, options)
            .map_err(|what| GoldenError::Command { line: 1, what })?,
    }
    Ok(version.to_string())
}

fn run_passes(version: &mut Version, names: &[&str], options: &OptOptions) -> Result<(), String> {
    if let Some(unknown) = names.iter().find(|name| pass(name).is_none()) {
        return Err(format!("there is no pass {unknown}; `dynasour ir opt --list` lists them"));
    }
    if version.is_base() {
        return Err("passes leave base versions alone".to_string());
    }
    optimise_with(version, names, options);
    Ok(())
}

/// The program while commands change it.
struct Steps {
    /// The first region of the file.
    region: Region,
    others: Vec<Region>,
    shown: Option<Vec<String>>,
}

impl Steps {
    fn new(file: File) -> Steps {
        let mut regions = file.regions.into_iter();
        let region = regions.next().unwrap_or_else(|| Region::new(0));
        Steps { region, others: regions.collect(), shown: None }
    }

    fn run(mut self, source: &str, options: &OptOptions) -> Result<String, GoldenError> {
        let commands = source.lines().map_while(|l| l.strip_prefix("; do: ")).enumerate();
        let mut last = 0;
        for (i, command) in commands {
            last = i + 1;
            let fail = |what: String| GoldenError::Command { line: last, what };
            let words: Vec<&str> = command.split([' ', ',']).filter(|w| !w.is_empty()).collect();
            self.step(&words, options).map_err(fail)?;
            for version in &self.region.versions {
                valid(version).map_err(|error| fail(format!("{}: {error}", version.name)))?;
            }
        }
        if last == 0 {
            return Err(GoldenError::NoCommands);
        }
        let fail = |what: String| GoldenError::Command { line: last, what };
        // A continuation is a version of another region.
        let mut own = self.region.clone();
        own.versions.retain(|v| v.region == own.pc);
        verify_region(&own).map_err(|broken| fail(broken[0].to_string()))?;
        let mut out = String::new();
        let mut show = |version: &Version| {
            let _ = write!(out, "{version:#}");
        };
        match &self.shown {
            Some(names) => {
                for name in names {
                    show(self.version(name).map_err(fail)?);
                }
            }
            None => self.region.versions.iter().filter(|v| !v.is_base()).for_each(show),
        }
        Ok(out)
    }

    fn step(&mut self, words: &[&str], options: &OptOptions) -> Result<(), String> {
        match words {
            ["optimise", name, passes @ ..] => run_passes(self.named(name)?, passes, options),
            ["inline", name, block, callee] => {
                let (pc, version) =
                    callee.split_once('.').ok_or_else(|| expected("REGION.VERSION", callee))?;
                let pc = constant(pc)?;
                let callee = self.others.iter().find(|r| r.pc == pc);
                let callee = callee.and_then(|r| r.version(version)).cloned();
                let callee = callee.ok_or_else(|| format!("there is no {version} in {pc:#x}"))?;
                let block = BlockId(number(block, "b")?);
                inline(self.named(name)?, block, &callee).map_err(text)
            }
            ["continue", name, anchor, new] => {
                let anchor = AnchorId(number(anchor, "a")?);
                let made = continuation(self.trace(name)?, anchor, new).map_err(text)?;
                self.add(made)
            }
            ["context", name, facts @ ..] => {
                self.named(name)?.context = context(&facts.join(" "))?;
                Ok(())
            }
            ["speculate", name, block, at, op, value, right] => {
                let version = self.named(name)?;
                let mut point = point(version, block, at)?;
                let (value, ty) = integer(version, value)?;
                let args = [value.into(), Operand::Const(constant(right)?)];
                let predicate = version.value(Ty::I1);
                let compare = Inst::new(comparison(op)?, ty, Some(predicate), &args);
                version.blocks[point.block.index()].insts.insert(point.inst, compare);
                valid(version).map_err(text)?;
                point.inst += 1;
                guard(version, point, predicate)
            }
            ["guard", name, block, at, predicate] => {
                let version = self.named(name)?;
                let point = point(version, block, at)?;
                guard(version, point, value(version, predicate)?)
            }
            ["specialise", name, new, rest @ ..] => {
                let parent = self.trace(name)?;
                let made = specialise(parent, new, &assumptions(parent, rest)?);
                self.add(made.ok_or("an assumption cannot be checked at its anchor")?)
            }
            ["resume", name, anchor, new, failed, rest @ ..] => {
                let parent = self.trace(name)?;
                let all = assumptions(parent, rest)?;
                let failed = number(failed, "")? as usize;
                if failed >= all.len() {
                    return Err(format!("there is no assumption {failed}; the first is 0"));
                }
                let anchor = AnchorId(number(anchor, "a")?);
                let made = resume(parent, anchor, new, &all, failed).map_err(text)?;
                self.add(made)
            }
            ["copy", from, to] => {
                let copy = self.region.copy(from, to).map_err(text)?;
                check_name(to)?;
                self.region.insert(copy).map_err(text)
            }
            ["rename", from, to] => {
                self.free(to)?;
                self.named(from)?.name = to.to_string();
                Ok(())
            }
            ["bypass", name] => match self.region.bypass(name) {
                0 => Err(format!("no anchor leads to {name}")),
                _ => Ok(()),
            },
            ["tidy"] => match self.region.remove_unreferenced().is_empty() {
                true => Err("something leads to every version".to_string()),
                false => Ok(()),
            },
            ["show", names @ ..] if !names.is_empty() => {
                self.shown = Some(names.iter().map(|n| n.to_string()).collect());
                Ok(())
            }
            [command, ..] => Err(format!(
                "`{command}` with {} words after it is no command; ir/README.md lists them",
                words.len() - 1
            )),
            [] => Err("a command is missing".to_string()),
        }
    }

    fn version(&self, name: &str) -> Result<&Version, String> {
        let pc = self.region.pc;
        self.region.version(name).ok_or_else(|| format!("region {pc:#x} has no version {name}"))
    }

    /// A version that has the form of traces.
    fn trace(&self, name: &str) -> Result<&Version, String> {
        match self.version(name)? {
            version if version.is_base() => Err(format!("{name} is a base version")),
            version => Ok(version),
        }
    }

    fn named(&mut self, name: &str) -> Result<&mut Version, String> {
        self.trace(name)?;
        self.region.version_mut(name).ok_or_else(|| format!("there is no version {name}"))
    }

    fn free(&self, name: &str) -> Result<(), String> {
        check_name(name)?;
        match self.region.version(name) {
            Some(_) => Err(format!("there is a version {name} already")),
            None => Ok(()),
        }
    }

    fn add(&mut self, version: Version) -> Result<(), String> {
        self.free(&version.name)?;
        self.region.versions.push(version);
        Ok(())
    }
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn expected(what: &str, found: &str) -> String {
    format!("expected {what}, found {found}")
}

fn check_name(name: &str) -> Result<(), String> {
    let is_word = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if is_word && name != "base" { Ok(()) } else { Err(expected("a name for a trace", name)) }
}

/// The number behind a prefix.
fn number(word: &str, prefix: &str) -> Result<u32, String> {
    let digits = word.strip_prefix(prefix).and_then(|digits| digits.parse().ok());
    digits.ok_or_else(|| expected(&format!("{prefix}N"), word))
}

fn constant(word: &str) -> Result<u64, String> {
    let parsed = match word.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => word.parse().ok(),
    };
    parsed.ok_or_else(|| expected("a number", word))
}

fn value(version: &Version, word: &str) -> Result<Value, String> {
    let value = Value(number(word, "v")?);
    match version.types.get(value.index()) {
        Some(_) => Ok(value),
        None => Err(format!("{} has no value {word}", version.name)),
    }
}

/// A value that can be compared with a constant, and its type.
fn integer(version: &Version, word: &str) -> Result<(Value, Ty), String> {
    let value = value(version, word)?;
    match version.ty(value) {
        ty if ty.is_machine_int() => Ok((value, ty)),
        ty => Err(format!("{word} is {ty}, which is not compared with numbers")),
    }
}

fn comparison(word: &str) -> Result<Op, String> {
    let ops = [Op::Eq, Op::Ne, Op::LtU, Op::LeU, Op::LtS, Op::LeS];
    let found = ops.into_iter().find(|op| op.to_string() == word);
    found.ok_or_else(|| expected("eq, ne, lt.u, le.u, lt.s or le.s", word))
}

/// Before instruction `at` of a block.
fn point(version: &Version, block: &str, at: &str) -> Result<Point, String> {
    let id = BlockId(number(block, "b")?);
    let inst = number(at, "")? as usize;
    match version.blocks.get(id.index()) {
        Some(b) if inst <= b.insts.len() => Ok(Point { block: id, inst }),
        Some(b) => Err(format!("{block} has {} instructions", b.insts.len())),
        None => Err(format!("{} has no block {block}", version.name)),
    }
}

fn guard(version: &mut Version, point: Point, predicate: Value) -> Result<(), String> {
    match inject(version, point, predicate.into()) {
        Some(_) => Ok(()),
        None => Err(format!("{predicate} cannot be assumed there: no anchor reaches the place")),
    }
}

fn assumptions(parent: &Version, words: &[&str]) -> Result<Vec<Assumption>, String> {
    let one = |words: &[&str]| match words {
        [anchor, op, value, right] => Ok(Assumption {
            anchor: AnchorId(number(anchor, "a")?),
            op: comparison(op)?,
            value: integer(parent, value)?.0,
            constant: constant(right)?,
        }),
        _ => Err(expected("an assumption as `a0 eq v1 7`", &words.join(" "))),
    };
    words.chunks(4).map(one).collect()
}

/// A context in the text form.
fn context(facts: &str) -> Result<Context, String> {
    let version = format!(
        "region 0 {{ version t context {facts} {{ anchor a0 = base.0 []\n b0:\n exit a0\n }} }}"
    );
    let version = text::version(&version).map_err(|e| expected(&e.expected, &e.found))?;
    Ok(version.context)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: &str = "region 0x1000 {
      version t1 {
        anchor a0 = base.0x1000 [rax = v0]
        anchor a1 = base.0x1008 [rax = v1]
        b0(v0: i64 = rax):
          poll else a0
          v1 = add.i64 v0, 1
          exit a1
      }
      version base { b0:
        at 0x1000
        goto 0x1008
      }
    }
";

    #[test]
    fn the_parts_are_told_apart() {
        assert_eq!(split("a\n---\nb\n---\n"), ("a\n", Some("b\n---\n")));
        assert_eq!(split("a\n--- \n"), ("a\n", Some("")));
        assert_eq!(split("; a --- b\n"), ("; a --- b\n", None));
        assert_eq!(passes("; passes: a,b, c\n"), Some(vec!["a", "b", "c"]));
        assert_eq!(passes(" ; passes: a\n"), None);
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        for (commands, error) in [
            ("", "begins neither with"),
            ("; passes: dce\n", "a file with one version"),
            ("; do: optimise t1 dec\n", "line 1: there is no pass dec"),
            (
                "; do: copy t1 t2\n; do: optimise t3 dce\n",
                "line 2: region 0x1000 has no version t3",
            ),
            ("; do: optimise base dce\n", "base is a base version"),
            ("; do: copy t1 t1\n", "t1"),
            ("; do: copy t1 base\n", "base"),
            ("; do: rename t1 a/b\n", "expected a name"),
            ("; do: inline t1 b0 0x2000.t1\n", "there is no t1 in 0x2000"),
            ("; do: inline t1 b0 t1\n", "expected REGION.VERSION"),
            ("; do: continue t1 a7 t2\n", "a7 is not in use"),
            ("; do: continue t1 b0 t2\n", "expected aN, found b0"),
            ("; do: context t1 rax = 0\n", "expected"),
            ("; do: speculate t1 b9 0 eq v0 1\n", "no block b9"),
            ("; do: speculate t1 b0 9 eq v0 1\n", "b0 has 2 instructions"),
            ("; do: speculate t1 b0 0 eq v9 1\n", "no value v9"),
            ("; do: speculate t1 b0 0 eq v1 1\n", "v1 is used where its definition does not reach"),
            ("; do: speculate t1 b0 0 add v0 1\n", "expected eq, ne"),
            ("; do: guard t1 b0 0 v0\n", "cannot be assumed there"),
            ("; do: specialise t1 t2 a0 eq v0\n", "expected an assumption"),
            ("; do: specialise t1 t2 a9 eq v0 1\n", "cannot be checked"),
            ("; do: resume t1 a0 t2 1 a0 eq v0 1\n", "no assumption 1"),
            ("; do: bypass t1\n", "no anchor leads to t1"),
            ("; do: tidy\n", "something leads to every version"),
            ("; do: show t2\n", "no version t2"),
            ("; do: frobnicate\n", "`frobnicate` with 0 words after it is no command"),
            ("; do: \n", "a command is missing"),
            ("; do: tidy\nregion {", "expected"),
        ] {
            let found = run(&format!("{commands}{PROGRAM}")).expect_err(commands).to_string();
            assert!(found.contains(error), "{commands}: {found}");
        }
        let broken = PROGRAM.replace("poll else a0", "poll");
        let error = run(&format!("; do: tidy\n{broken}")).expect_err("no anchor").to_string();
        assert!(error.starts_with("version t1: "), "{error}");
    }

    #[test]
    fn commands_change_the_first_region() {
        let shown = run(&format!(
            "; do: copy t1 t2\n; do: speculate t2 b0 1 eq v0 7\n; do: show t2\n{PROGRAM}"
        ))
        .expect("a result");
        assert!(shown.contains("version t2 {") && !shown.contains("version t1 {"), "{shown}");
        assert!(shown.contains("= eq.i64 v0, 7\n") && shown.contains("else a0\n"), "{shown}");
        let named = run(&format!("; do: rename t1 x\n; do: context x rbx == 1\n{PROGRAM}"));
        assert!(named.expect("a result").contains("version x context rbx == 1 {"));
    }
}
