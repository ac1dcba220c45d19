//! The verifier: checks every rule that a version must keep. It runs before and after each pass in
//! debug builds, and in tests.
//!
//! The rules, by the name that an error carries:
//! * **shape** The version has an entry block and an identifier for a name. It is either `base`
//!   (one block, no parameters, no anchors, ends in guest control flow, `get`/`put`/`at` allowed,
//!   every instruction belongs to an `at`) or a trace (`get`/`put`/`at` and guest terminators not
//!   allowed). A trace's entry parameters are distinct SSA locations, typed as those, and nothing
//!   jumps to the entry block.
//! * **op** An instruction has the operands, results, type suffix, address and native that its
//!   operation asks for.
//! * **type** Operands have the types of [`crate::Op::signature`]; constants fit their type.
//!   Vectors are not values.
//! * **ssa** Each value is defined once, and its definition dominates every use.
//! * **jump** A jump's target exists and gets one operand of the right type for each parameter.
//! * **native** A native's operands and results are those it declares; what it writes in place is
//!   in its effects.
//! * **anchor** In a trace every `assume`, every `poll` and every instruction that may fault names
//!   an anchor, and no other does.
//! * **varmap** Sorted by location without repetition, typed, SSA locations only.
//! * **total** All used anchors name the same locations. So a location that the version writes is
//!   in place for none of them.
//! * **position** An operand of an anchor is available at the anchor's position (see
//!   [`crate::reach`]).
//! * **reach** An anchor is used only where it is in reach: no effect outside SSA since its
//!   position, on any path.
//! * **deferred** Deferred stores (docs/design.md, "The IR"): (a) a return address pushed on the
//!   stack, unless `private_memory` holds; (b) while one is pending, every access is known to miss
//!   its bytes, and no access of unknown extent, no fence and no locked operation runs. Rule (c),
//!   the page is accessible, is checked by the evaluator:
//!   [`crate::eval::EvalError::DeferredStore`].
//!
//! A deferred store is *pending* from the anchor's position on. A version does not say when the
//! store was due before that. The same text can be right for a program that loads a slot and then
//! stores to it, and wrong for one that stores first (`tests/verify.rs` has both). So the pass that
//! defers a store checks the accesses between the store and the anchor itself; afterwards only the
//! checker, which has the program, can.
//!
//! Unused anchors may hold stale operands (of values that exist), so a pass that removes the last
//! use need not clean up. Unreachable blocks are checked for everything but dominance.
//!
//! [`verify`] reads a version and returns errors; no data between calls, no lock.
//!
//! ```text
//! b0(v0: i64 = rax): assume v0 else a0       b0[0]: operand 1: v0 is i64, i1 is expected [type]
//! ```

mod anchors;
mod insts;

pub use insts::suffix_allowed;

use crate::reach::{Cfg, Point};
use crate::types::{AnchorId, BlockId, NativeId, Operand, Ty, Value};
use crate::version::{Term, Version};
use std::fmt;

/// The rules. See the module's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the module's header documents them")]
pub enum Rule {
    Shape,
    Op,
    Type,
    Ssa,
    Jump,
    Native,
    Anchor,
    Varmap,
    Total,
    Position,
    Reach,
    Deferred,
}

impl Rule {
    /// The rule in a line.
    pub const fn about(self) -> &'static str {
        match self {
            Rule::Shape => {
                "a version is `base` (one block of guest code) or a trace (no guest locations, \
                    leaves by anchors)"
            }
            Rule::Op => {
                "an instruction has the operands, results, type, address and native that its \
                    operation asks for"
            }
            Rule::Type => "operands have the types of their operation, and constants fit them",
            Rule::Ssa => "a value is defined once, and its definition dominates every use",
            Rule::Jump => {
                "a jump's target exists and gets one operand of the right type for each parameter"
            }
            Rule::Native => {
                "a native has the operands and results that it declares, and its effects say what \
                    it writes in place"
            }
            Rule::Anchor => {
                "assume, poll and whatever may fault name an anchor, and nothing else does"
            }
            Rule::Varmap => "a varmap is sorted by location, typed, and names SSA locations only",
            Rule::Total => {
                "all anchors in use name the same locations: what a version writes is in place \
                    for none of them"
            }
            Rule::Position => {
                "what an anchor names is available where the first of its uses can be reached from"
            }
            Rule::Reach => {
                "no effect outside SSA (store, fence, event, state in place) lies between an \
                    anchor and its use"
            }
            Rule::Deferred => {
                "a deferred store waits only under `private_memory` or as a pushed return \
                    address, and nothing touches it"
            }
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_ascii_lowercase())
    }
}

/// Where a rule is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Where {
    /// In the version as a whole.
    Version,
    /// At a block's parameters.
    Block(BlockId),
    /// At an instruction or terminator.
    Point(Point),
    /// In an anchor.
    Anchor(AnchorId),
    /// In the table of natives.
    Native(NativeId),
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Where::Version => f.write_str("version"),
            Where::Block(b) => b.fmt(f),
            Where::Point(p) => p.fmt(f),
            Where::Anchor(a) => a.fmt(f),
            Where::Native(n) => n.fmt(f),
        }
    }
}

/// A broken rule.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{at}: {what} [{rule}]{}", line(.text))]
pub struct VerifyError {
    /// Which rule.
    pub rule: Rule,
    /// Where.
    pub at: Where,
    /// What is wrong.
    pub what: String,
    /// The line of the text form that is meant, if there is one.
    pub text: Option<String>,
}

fn line(text: &Option<String>) -> String {
    text.as_ref().map_or(String::new(), |t| format!("\n    {t}"))
}

/// Checks every rule; the errors come in the order of the text form, whole-version ones first.
pub fn verify(version: &Version) -> Result<(), Vec<VerifyError>> {
    let mut checker = Checker { version, errors: Vec::new() };
    checker.shape();
    checker.natives();
    checker.insts();
    // The data-flow analyses need valid block numbers and operand counts.
    if checker.errors.is_empty() {
        let cfg = Cfg::new(version);
        checker.ssa(&cfg);
        checker.anchors(&cfg);
    }
    if checker.errors.is_empty() { Ok(()) } else { Err(checker.errors) }
}

/// [`verify`] for tests and debug builds: panics with the errors and the version in text form.
#[track_caller]
pub fn assert_valid(version: &Version) {
    if let Err(errors) = verify(version) {
        let errors: Vec<String> = errors.iter().map(|e| e.to_string()).collect();
        panic!("version does not verify:\n{}\n{version}", errors.join("\n"));
    }
}

struct Checker<'v> {
    version: &'v Version,
    errors: Vec<VerifyError>,
}

impl Checker<'_> {
    fn error(&mut self, rule: Rule, at: Where, what: impl Into<String>) {
        let text = match at {
            Where::Version | Where::Block(_) => None,
            Where::Point(point) => self.version.blocks.get(point.block.index()).map(|block| {
                block
                    .insts
                    .get(point.inst)
                    .map_or_else(|| block.term.to_string(), |inst| inst.to_string())
            }),
            Where::Anchor(a) => {
                self.version.anchors.get(a.index()).map(|anchor| format!("anchor {a} = {anchor}"))
            }
            Where::Native(n) => {
                self.version.natives.get(n.index()).map(|native| format!("native {n} = {native}"))
            }
        };
        self.errors.push(VerifyError { rule, at, what: what.into(), text });
    }

    /// The type of a value, if there is such a value.
    fn value_ty(&self, v: Value) -> Option<Ty> {
        self.version.types.get(v.index()).copied()
    }

    /// Does `operand` have type `want`? If not, what is wrong.
    fn operand_ty(&self, operand: Operand, want: Ty) -> Result<(), String> {
        match operand {
            Operand::Value(v) => match self.value_ty(v) {
                Some(ty) if ty == want => Ok(()),
                Some(ty) => Err(format!("{v} is {ty}, {want} is expected")),
                None => Err(format!("{v} does not exist")),
            },
            Operand::Const(c) => {
                let mask =
                    if want == Ty::Flags { crate::semantics::ARITH_FLAGS } else { want.mask() };
                if c & !mask == 0 {
                    Ok(())
                } else {
                    Err(format!("constant {operand} does not fit {want}"))
                }
            }
        }
    }

    fn check_ty(
        &mut self,
        rule: Rule,
        at: Where,
        operand: Operand,
        want: Ty,
        role: fmt::Arguments<'_>,
    ) {
        if let Err(what) = self.operand_ty(operand, want) {
            self.error(rule, at, format!("{role}: {what}"));
        }
    }

    fn shape(&mut self) {
        let version = self.version;
        if !crate::version::is_identifier(&version.name) {
            self.error(
                Rule::Shape,
                Where::Version,
                format!("the name {:?} is not an identifier", version.name),
            );
        }
        let Some(entry) = version.blocks.first() else {
            return self.error(Rule::Shape, Where::Version, "there is no entry block");
        };
        if version.context.facts.windows(2).any(|w| w[0] >= w[1]) {
            self.error(Rule::Shape, Where::Version, "the context is not sorted or repeats a fact");
        }
        if version.entry_locs.len() != entry.params.len() {
            let (locs, params) = (version.entry_locs.len(), entry.params.len());
            let what = format!("{params} entry parameters but {locs} entry locations");
            self.error(Rule::Shape, Where::Block(BlockId(0)), what);
        }
        for (i, (loc, param)) in version.entry_locs.iter().zip(&entry.params).enumerate() {
            let at = Where::Block(BlockId(0));
            if loc.ssa_index().is_none() {
                self.error(Rule::Shape, at, format!("entry location {loc} is not an SSA location"));
            }
            if version.entry_locs[..i].contains(loc) {
                self.error(Rule::Shape, at, format!("entry location {loc} appears twice"));
            }
            self.check_ty(
                Rule::Type,
                at,
                Operand::Value(*param),
                loc.ty(),
                format_args!("entry parameter"),
            );
        }
        if version.is_base() {
            let one = version.blocks.len() == 1 && matches!(entry.term, Term::Guest(_));
            if !one {
                self.error(
                    Rule::Shape,
                    Where::Version,
                    "a base version is one block that ends in guest control flow",
                );
            }
            if !entry.params.is_empty() || !version.anchors.is_empty() {
                self.error(
                    Rule::Shape,
                    Where::Version,
                    "a base version has neither parameters nor anchors",
                );
            }
        }
    }
}
