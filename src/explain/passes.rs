//! The IR before and after each pass, obtained by optimising the version as built once more.
//!
//! The optimiser is a function of the version and its options, so the repetition gives what it gave
//! in the run. If the result differs nevertheless, [`changes`] is empty, and the report shows only
//! the version as built and the emitted one.
//!
//! No data, no lock. Example: the pass `dce` has removed one instruction; [`difference`] of the two
//! texts has one [`Edit::Gone`] among lines that are the [`Edit::Same`].

use dynasour_ir::opt::OptOptions;
use dynasour_ir::text;
use dynasour_runtime::config::placement;
use dynasour_runtime::observe::census::{Census, Detail};
use dynasour_runtime::observe::guest_code::Origins;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;

/// The effect of one pass on the version.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The pass.
    pub pass: String,
    /// The version before it.
    pub before: String,
    /// The version after it.
    pub after: String,
}

/// The passes that changed the version, in order, and what each line of the IR is for; nothing if the
/// optimisation cannot be repeated.
pub fn changes(detail: &Detail, census: &Census) -> (Vec<Change>, Origins) {
    let Ok(mut version) = text::version(&detail.built) else { return Default::default() };
    let last = RefCell::new(version.to_string());
    let origins = RefCell::new(Origins::built(&version, &detail.pcs));
    let changes = RefCell::new(Vec::new());
    let after_pass = |pass: &str, version: &dynasour_ir::Version| {
        let after = version.to_string();
        let before = last.replace(after.clone());
        if before != after {
            origins.borrow_mut().after(version);
            changes.borrow_mut().push(Change { pass: pass.to_string(), before, after });
        }
    };
    let options = OptOptions {
        passes: census.passes.clone(),
        skip: census.skipped_passes.clone(),
        alias_guards: detail.alias_guards,
        after_pass: Some(&after_pass),
        ..OptOptions::default()
    };
    let Ok(placement) = placement::placement(&census.policy) else { return Default::default() };
    placement.optimise(&mut version, &options);
    let same = last.borrow().as_str() == detail.optimised;
    if same { (changes.into_inner(), origins.into_inner()) } else { Default::default() }
}

/// A line of the comparison of two texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edit<'a> {
    /// In both.
    Same(&'a str),
    /// Only in the first.
    Gone(&'a str),
    /// Only in the second.
    New(&'a str),
}

/// The lines of two texts, by a longest common subsequence.
pub fn difference<'a>(before: &'a str, after: &'a str) -> Vec<Edit<'a>> {
    let (a, b): (Vec<&str>, Vec<&str>) = (before.lines().collect(), after.lines().collect());
    let head = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    let tail =
        a[head..].iter().rev().zip(b[head..].iter().rev()).take_while(|(x, y)| x == y).count();
    let (inner_a, inner_b) = (&a[head..a.len() - tail], &b[head..b.len() - tail]);
    let mut longest = vec![vec![0u32; inner_b.len() + 1]; inner_a.len() + 1];
    for (i, x) in inner_a.iter().enumerate().rev() {
        for (j, y) in inner_b.iter().enumerate().rev() {
            longest[i][j] = if x == y {
                longest[i + 1][j + 1] + 1
            } else {
                longest[i + 1][j].max(longest[i][j + 1])
            };
        }
    }
    let mut out: Vec<Edit<'_>> = a[..head].iter().map(|line| Edit::Same(line)).collect();
    let (mut i, mut j) = (0, 0);
    while i < inner_a.len() || j < inner_b.len() {
        if i < inner_a.len() && j < inner_b.len() && inner_a[i] == inner_b[j] {
            out.push(Edit::Same(inner_a[i]));
            (i, j) = (i + 1, j + 1);
        } else if j == inner_b.len() || i < inner_a.len() && longest[i + 1][j] >= longest[i][j + 1]
        {
            out.push(Edit::Gone(inner_a[i]));
            i += 1;
        } else {
            out.push(Edit::New(inner_b[j]));
            j += 1;
        }
    }
    out.extend(a[a.len() - tail..].iter().map(|line| Edit::Same(line)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_keep_what_is_common() {
        let edits = difference("a\nb\nc\nd", "a\nc\nx\nd");
        assert_eq!(
            edits,
            [Edit::Same("a"), Edit::Gone("b"), Edit::Same("c"), Edit::New("x"), Edit::Same("d")]
        );
        assert_eq!(difference("", "x"), [Edit::New("x")]);
        assert!(difference("a\nb", "a\nb").iter().all(|e| matches!(e, Edit::Same(_))));
    }
}
