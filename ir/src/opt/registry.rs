//! Passes of a program's own, beside those of [`PASSES`].
//!
//! Data: a [`Registry`], which whoever runs passes hands over in [`OptOptions::registry`]. It is made before the
//! first pass runs, and is only read then, by any thread.
//!
//! Invariants: a name means one pass. [`run_pipeline`](super::run_pipeline) verifies the version after each own pass,
//! in release builds, too, and goes no further if the pass has broken it ([`OptStats::broken`](super::OptStats)):
//! such a version must not be used.
//!
//! ```
//! use dynasour_ir::opt::{OptOptions, OwnPass, Position, Registry};
//!
//! let mut registry = Registry::default();
//! registry.add(OwnPass::new("count", "counts", Position::End, |version, _| {
//!     println!("{} has {} blocks", version.name, version.blocks.len());
//!     0 // it has changed nothing
//! }))?;
//! let options = OptOptions { registry: Some(&registry), ..OptOptions::default() };
//! # let _ = options;
//! # Ok::<(), dynasour_ir::opt::RegistryError>(())
//! ```

use super::{OptOptions, PASSES, Pass, pass};
use crate::verify::verify;
use crate::version::Version;
use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use thiserror::Error;

/// What an own pass does: it changes the version, and returns how many changes it has made.
type Run = dyn Fn(&mut Version, &OptOptions) -> usize + Send + Sync;

/// Where an own pass stands in a pipeline that does not name it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Position {
    /// Before the first pass of this name.
    Before(&'static str),
    /// Behind the last pass of this name.
    After(&'static str),
    /// Behind all other passes.
    End,
    /// Nowhere: it runs where a pipeline names it.
    Named,
}

/// A pass of a program's own.
#[derive(Clone)]
pub struct OwnPass {
    name: &'static str,
    about: &'static str,
    position: Position,
    run: Arc<Run>,
}

/// The message of an own pass that broke a version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BrokenPass {
    /// The pass.
    pub pass: &'static str,
    /// The version that it was given.
    pub version: String,
    /// What is wrong, one line for each rule that is broken.
    pub why: String,
}

impl fmt::Display for BrokenPass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the pass `{}` leaves {} invalid: {}", self.pass, self.version, self.why)
    }
}

/// Why a pass is not added to a registry.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum RegistryError {
    /// Another pass has this name.
    #[error("there is a pass `{0}` already; give yours another name")]
    Taken(&'static str),
    /// The name could not be written in a list of passes.
    #[error("`{0}` is no name of a pass: use lower-case letters, digits, `-` and `_`")]
    Name(&'static str),
}

impl OwnPass {
    /// A pass with a name for `--passes` and reports, one line about it, its place, and what it does.
    pub fn new(
        name: &'static str,
        about: &'static str,
        position: Position,
        run: impl Fn(&mut Version, &OptOptions) -> usize + Send + Sync + 'static,
    ) -> OwnPass {
        OwnPass { name, about, position, run: Arc::new(run) }
    }

    /// The name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// One line of description.
    pub fn about(&self) -> &'static str {
        self.about
    }

    /// Where it stands in a pipeline that does not name it.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Runs the pass; returns how many changes it made.
    ///
    /// # Errors
    /// As [`guarded`].
    pub(super) fn run(
        &self,
        version: &mut Version,
        options: &OptOptions,
    ) -> Result<usize, BrokenPass> {
        let context = version.context.clone();
        let changes = guarded(self.name, version, |version| (self.run)(version, options))?;
        if version.context == context {
            return Ok(changes);
        }
        // Nobody would see to it that a new fact holds.
        let why = "its context has changed".to_string();
        Err(BrokenPass { pass: self.name, version: version.name.clone(), why })
    }
}

thread_local! {
    /// Does [`guarded`] catch a panic of this thread?
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Is a panic of this thread caught and reported as a [`BrokenPass`], so that a panic hook need not report it?
pub fn is_guarded() -> bool {
    IS_GUARDED.get()
}

/// Lets `run`, which belongs to the pass or the placement `name`, change a version; returns how many changes it made.
///
/// # Errors
/// The version is invalid now, or another one, or `run` has panicked. The version must not be used.
pub fn guarded(
    name: &'static str,
    version: &mut Version,
    run: impl FnOnce(&mut Version) -> usize,
) -> Result<usize, BrokenPass> {
    let given = (version.name.clone(), version.region, version.context.private_memory());
    let broken = |why| BrokenPass { pass: name, version: given.0.clone(), why };
    // A version with wrong numbers in it may be more than the verifier can read.
    let outer = IS_GUARDED.replace(true);
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let changes = run(version);
        (changes, verify(version))
    }));
    IS_GUARDED.set(outer);
    let (changes, verified) =
        ran.map_err(|panic| broken(format!("it panicked: {}", text_of(&*panic))))?;
    // What it knows may hold only because control came from the entry.
    version.optimised |= changes > 0;
    let changed = [
        (version.name != given.0, "name"),
        (version.region != given.1, "region"),
        (version.context.private_memory() && !given.2, "context"),
    ];
    if let Some((_, what)) = changed.iter().find(|(changed, _)| *changed) {
        return Err(broken(format!("its {what} has changed")));
    }
    verified.map_err(|errors| {
        broken(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    })?;
    Ok(changes)
}

impl fmt::Debug for OwnPass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnPass")
            .field("name", &self.name)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

/// What a panic says.
fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// A pass that a name means.
#[derive(Clone, Copy)]
pub(super) enum Known<'a> {
    /// One of [`PASSES`].
    BuiltIn(&'static Pass),
    /// One of the registry's own.
    Own(&'a OwnPass),
}

impl Known<'_> {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Known::BuiltIn(pass) => pass.name,
            Known::Own(pass) => pass.name,
        }
    }
}

/// All passes: those of [`PASSES`], and a program's own.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    own: Vec<OwnPass>,
}

impl Registry {
    /// Adds a pass. Passes with the same place stand in the order in which they were added.
    ///
    /// # Errors
    /// Its name is taken, or is none.
    pub fn add(&mut self, own: OwnPass) -> Result<(), RegistryError> {
        let is_plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
        if own.name.is_empty() || !own.name.bytes().all(is_plain) {
            return Err(RegistryError::Name(own.name));
        }
        if self.has(own.name) {
            return Err(RegistryError::Taken(own.name));
        }
        self.own.push(own);
        Ok(())
    }

    /// The own passes, in the order in which they were added.
    pub fn own(&self) -> &[OwnPass] {
        &self.own
    }

    /// Is there a pass of this name?
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The names of all passes, the built-in ones first.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        PASSES.iter().map(|pass| pass.name).chain(self.own.iter().map(|pass| pass.name))
    }

    pub(super) fn find(&self, name: &str) -> Option<Known<'_>> {
        let own = || self.own.iter().find(|own| own.name == name).map(Known::Own);
        pass(name).map(Known::BuiltIn).or_else(own)
    }

    /// The passes of a pipeline, with the own passes that it does not name where they belong. Names of no pass are
    /// left out, and so is an own pass that is to stand beside a pass which is not in the pipeline.
    pub fn arranged<'n>(&self, pipeline: &[&'n str]) -> Vec<&'n str> {
        let mut names: Vec<&'n str> =
            pipeline.iter().copied().filter(|name| self.has(name)).collect();
        for own in self.own.iter().filter(|own| !pipeline.contains(&own.name)) {
            let at = match own.position {
                Position::Before(name) => names.iter().position(|other| *other == name),
                Position::After(name) => {
                    names.iter().rposition(|other| *other == name).map(|at| {
                        // Behind the own passes that were put there before.
                        let rest = names[at + 1..].iter();
                        at + 1 + rest.take_while(|n| self.follows(n, name, pipeline)).count()
                    })
                }
                Position::End => Some(names.len()),
                Position::Named => None,
            };
            if let Some(at) = at {
                names.insert(at, own.name);
            }
        }
        names
    }

    /// Was the own pass `name` put behind `other`?
    fn follows(&self, name: &str, other: &'static str, pipeline: &[&str]) -> bool {
        let is_it = |own: &OwnPass| own.name == name && own.position == Position::After(other);
        !pipeline.contains(&name) && self.own.iter().any(is_it)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{OptStats, run_pipeline};
    use super::*;
    use crate::text;

    const LOOP: &str = "region 0x1000 { version t1 {
    anchor a0 = base.0x1000 [rax = v1]
    anchor a1 = base.0x1008 [rax = v2]
    b0(v0: i64 = rax):
      jump b1(v0)
    b1(v1: i64):
      poll else a0
      v2 = add.i64 v1, 1
      v3 = lt.u.i64 v2, 100
      assume v3 else a1
      jump b1(v2)
    } }";

    fn version() -> Version {
        text::version(LOOP).expect("valid")
    }

    fn optimised(passes: impl IntoIterator<Item = OwnPass>, pipeline: &[&str]) -> OptStats {
        let registry = registry(passes);
        let options = OptOptions { registry: Some(&registry), ..OptOptions::default() };
        run_pipeline(&mut version(), pipeline, &options)
    }

    fn idle(name: &'static str, position: Position) -> OwnPass {
        OwnPass::new(name, "does nothing", position, |_, _| 0)
    }

    fn registry(passes: impl IntoIterator<Item = OwnPass>) -> Registry {
        let mut registry = Registry::default();
        passes.into_iter().for_each(|own| registry.add(own).expect("a new name"));
        registry
    }

    #[test]
    fn a_name_means_one_pass() {
        let mut registry = registry([idle("mine", Position::End)]);
        assert_eq!(registry.add(idle("mine", Position::Named)), Err(RegistryError::Taken("mine")));
        assert_eq!(registry.add(idle("licm", Position::End)), Err(RegistryError::Taken("licm")));
        for name in ["", "a b", "a,b", "Mine"] {
            assert_eq!(registry.add(idle(name, Position::End)), Err(RegistryError::Name(name)));
        }
        assert_eq!(registry.own().len(), 1);
    }

    #[test]
    fn own_passes_stand_where_they_belong() {
        let own = [
            idle("first", Position::Before("dce")),
            idle("p", Position::After("dce")),
            idle("q", Position::After("dce")),
            idle("last", Position::End),
            idle("lost", Position::After("monitor")),
            idle("quiet", Position::Named),
        ];
        let registry = registry(own);
        assert_eq!(
            registry.arranged(&["dce", "nothing", "licm", "dce", "simplify"]),
            ["first", "dce", "licm", "dce", "p", "q", "simplify", "last"]
        );
        assert_eq!(
            registry.arranged(&["last", "quiet", "dce"]),
            ["last", "quiet", "first", "dce", "p", "q"]
        );
    }

    #[test]
    fn they_run_there() {
        let stats = optimised([idle("seen", Position::After("dce"))], &["simplify", "dce"]);
        let names: Vec<_> = stats.passes.iter().map(|pass| pass.name).collect();
        assert_eq!((names.as_slice(), stats.broken), (&["simplify", "dce", "seen"][..], None));
    }

    /// What a pass that breaks the version so is told.
    fn refused(run: impl Fn(&mut Version) + Send + Sync + 'static) -> String {
        let bad = OwnPass::new("bad", "breaks", Position::Before("dce"), move |version, _| {
            run(version);
            1
        });
        let stats = optimised([bad], &["simplify", "dce"]);
        assert_eq!(stats.passes.last().map(|pass| pass.name), Some("simplify"));
        let broken = stats.broken.expect("broken");
        assert_eq!((broken.pass, broken.version.as_str()), ("bad", "t1"));
        broken.why
    }

    #[test]
    fn a_version_that_is_broken_goes_no_further() {
        assert!(!refused(|version| version.blocks[1].insts.truncate(1)).is_empty());
        assert!(refused(|version| version.blocks.clear()).len() > 3);
        assert!(refused(|version| version.region = 7).contains("region"));
        assert!(refused(|version| version.name = "base".into()).contains("name"));
        assert_eq!(refused(|_| panic!("at {}", 7)), "it panicked: at 7");
    }

    #[test]
    fn a_built_in_pass_has_work_again_after_an_own_one() {
        let own = OwnPass::new("own", "changes", Position::Named, |_, _| 1);
        let stats = optimised([own], &["dce", "own", "dce"]);
        assert_eq!(stats.passes.len(), 3);
        let idle = optimised([idle("own", Position::Named)], &["dce", "own", "dce"]);
        assert_eq!(idle.passes.len(), 2);
    }
}
