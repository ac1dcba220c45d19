//! What the page shows of an explanation.
//!
//! An explanation may have a hundred megabytes, most of it the IR before and after each pass and
//! predicates that were written out. Here each version of the IR is given by its difference from the one
//! before, long texts are cut, and the details of versions are kept, the hottest first, until
//! [`BUDGET`] is used up.
//!
//! Data: [`Run`] and what it contains; the fields are those that `assets/*.js` read. Addresses are
//! hexadecimal text, because a number of JavaScript has 53 bits. No lock.
//!
//! ```text
//! a b c, then a x c             stages: [{lines: [a, b, c]}, {edits: [1, -1, [x], 1]}]
//! ```

use crate::explain::guest::Block;
use crate::explain::model::{Body, Explanation, Region, Version};
use crate::explain::native::Mark;
use crate::explain::source_lines::{Source, SourceFile};
use anyhow::{Context, Result};
use dynasour_runtime::observe::attempts::Attempt;
use dynasour_runtime::observe::census::{
    CompileTimes, End, From, Guard, GuardKind, Kind, To, Transfer, Went,
};
use dynasour_runtime::observe::profile::timeline::Timeline;
use serde::Serialize;
use similar::{Algorithm, DiffOp, capture_diff_slices};
use std::collections::BTreeMap;

/// Bytes of a run's data. With them the page stays below 5 MB. What is there without the details of
/// versions may be more, if thousands of regions were asked for.
const BUDGET: usize = 4_300_000;
/// Heads that are kept, the hottest first.
const MOST_HEADS: usize = 500;
/// Characters of a text that are shown (guess; longer ones are predicates and varmaps with the
/// expressions of a whole path).
const LONGEST: usize = 320;
/// Lines of a list that are shown.
const MOST_LINES: usize = 48;

/// A run.
#[derive(Serialize)]
pub struct Run<'a> {
    name: &'a str,
    program: &'a str,
    args: &'a [String],
    status: Option<i32>,
    signal: Option<i32>,
    tier: &'a str,
    threshold: u32,
    exact: bool,
    instructions: u64,
    traces: usize,
    regions_in_all: usize,
    regions: Vec<RegionView<'a>>,
    attempts: Option<&'a [Attempt]>,
    timeline: Option<&'a Timeline>,
    sources: &'a [SourceFile],
    /// Versions whose details the explanation has and the page does not.
    left_out: usize,
}

#[derive(Serialize)]
struct RegionView<'a> {
    pc: String,
    symbol: &'a str,
    instructions: u64,
    share: f64,
    versions: Vec<VersionView<'a>>,
}

#[derive(Serialize)]
struct VersionView<'a> {
    id: u32,
    name: &'a str,
    kind: Kind,
    pc: String,
    symbol: &'a str,
    from: Option<&'a From>,
    instructions: u64,
    share: f64,
    guest_instructions: u64,
    interpreted: bool,
    entered: u64,
    iterations: Option<u64>,
    executed: u64,
    failed: u64,
    hot_bytes: u64,
    cold_bytes: u64,
    spill_slots: u32,
    moves: u32,
    compile_ns: CompileTimes,
    /// What was verified and proven, in words.
    shown: Vec<String>,
    polls: u64,
    faults: u64,
    dropped: bool,
    ends: Vec<EndView>,
    body: Option<BodyView<'a>>,
}

#[derive(Serialize)]
struct EndView {
    target: Option<String>,
    executed: u64,
    went: Vec<WentView>,
}

#[derive(Serialize)]
struct WentView {
    /// `runtime`, or a name: of a fragment, or of a block.
    to: String,
    /// If it is a fragment: its number.
    fragment: Option<u32>,
    times: u64,
}

#[derive(Serialize)]
struct BodyView<'a> {
    path: Vec<BlockView<'a>>,
    guards: Vec<GuardView<'a>>,
    stages: Vec<Stage>,
    origins: BTreeMap<&'a str, String>,
    native: Vec<NativeView<'a>>,
}

#[derive(Serialize)]
struct BlockView<'a> {
    pc: String,
    symbol: &'a str,
    executed: u64,
    transfer: Transfer,
    next: String,
    instructions: Vec<InstructionView<'a>>,
}

#[derive(Serialize)]
struct InstructionView<'a> {
    pc: String,
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'a str>,
    #[serde(skip_serializing_if = "<[u32]>::is_empty")]
    guards: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<Source>,
}

#[derive(Serialize)]
struct GuardView<'a> {
    index: u32,
    kind: GuardKind,
    pc: String,
    in_loop: bool,
    position: (u32, u32),
    predicate: String,
    english: String,
    anchor: &'a str,
    target: Option<String>,
    /// What the anchor restores.
    restores: Vec<String>,
    executed: u64,
    failed: u64,
    went: Vec<WentView>,
}

/// The IR after one pass.
#[derive(Serialize)]
struct Stage {
    pass: String,
    /// Of the first stage: all lines.
    #[serde(skip_serializing_if = "Option::is_none")]
    lines: Option<Vec<String>>,
    /// Of the others: the difference from the stage before.
    #[serde(skip_serializing_if = "Option::is_none")]
    edits: Option<Vec<Edit>>,
}

/// One step of a difference.
#[derive(Serialize, PartialEq, Debug)]
#[serde(untagged)]
enum Edit {
    /// So many lines stay, or if negative, are gone.
    Count(i64),
    /// These are new.
    New(Vec<String>),
}

#[derive(Serialize)]
struct NativeView<'a> {
    at: String,
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pc: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    cold: bool,
    #[serde(skip_serializing_if = "<[Mark]>::is_empty")]
    marks: &'a [Mark],
}

/// What the page shows of an explanation.
///
/// # Errors
/// The data cannot be written as JSON.
pub fn run<'a>(name: &'a str, e: &'a Explanation) -> Result<Run<'a>> {
    let mut bodies: Vec<(usize, usize, u64, &Body)> = Vec::new();
    for (r, region) in e.regions.iter().enumerate() {
        for (v, version) in region.versions.iter().enumerate() {
            bodies.extend(version.body.as_ref().map(|body| (r, v, version.instructions, body)));
        }
    }
    bodies.sort_by_key(|(.., instructions, _)| std::cmp::Reverse(*instructions));
    let mut run = Run {
        name,
        program: &e.header.program,
        args: &e.header.args,
        status: e.header.status,
        signal: e.header.signal,
        tier: &e.header.tier,
        threshold: e.header.threshold,
        exact: e.header.exact,
        instructions: e.header.instructions,
        traces: e.header.traces,
        regions_in_all: e.header.regions_in_all,
        regions: e.regions.iter().map(region).collect(),
        attempts: e.header.attempts.as_deref().map(|all| &all[..all.len().min(MOST_HEADS)]),
        timeline: e.header.timeline.as_ref(),
        sources: &e.sources,
        left_out: 0,
    };
    let mut used = size(&run)?;
    for (r, v, _, body) in bodies {
        let view = body_view(body);
        let more = size(&view)?;
        if used + more > BUDGET {
            run.left_out += 1;
            continue;
        }
        used += more;
        run.regions[r].versions[v].body = Some(view);
    }
    Ok(run)
}

/// Bytes that a value has in the page, where `<` is written as an escape of six.
fn size(value: &impl Serialize) -> Result<usize> {
    let json = serde_json::to_string(value).context("an explanation")?;
    Ok(json.len() + 5 * json.matches('<').count())
}

fn region(r: &Region) -> RegionView<'_> {
    RegionView {
        pc: hex(r.head.pc),
        symbol: &r.head.symbol,
        instructions: r.head.instructions,
        share: r.head.share,
        versions: r.versions.iter().map(version).collect(),
    }
}

fn version(v: &Version) -> VersionView<'_> {
    let [of_version, of_code] = &v.certificates;
    let mut shown: Vec<String> = of_version.iter().map(|c| c.to_string()).collect();
    shown.extend(of_code.iter().map(|c| format!("code {c}")));
    shown.extend(v.proofs.iter().flatten().map(|proof| clipped(&proof.to_string())));
    VersionView {
        id: v.id,
        name: &v.name,
        kind: v.kind,
        pc: hex(v.pc),
        symbol: &v.symbol,
        from: v.from.as_ref(),
        instructions: v.instructions,
        share: v.share,
        guest_instructions: v.guest_instructions,
        interpreted: v.interpreted.is_some(),
        entered: v.entered,
        iterations: v.iterations,
        executed: v.executed,
        failed: v.failed,
        hot_bytes: v.code_bytes.hot,
        cold_bytes: v.code_bytes.cold,
        spill_slots: v.spill_slots,
        moves: v.moves,
        compile_ns: v.compile_ns,
        shown,
        polls: v.polls,
        faults: v.faults,
        dropped: v.dropped,
        ends: v.ends.iter().map(end).collect(),
        body: None,
    }
}

fn end(end: &End) -> EndView {
    EndView { target: end.target.map(hex), executed: end.executed, went: went(&end.went) }
}

fn went(went: &[Went]) -> Vec<WentView> {
    let view = |w: &Went| {
        let (to, fragment) = match w.to {
            To::Runtime => ("runtime".to_string(), None),
            To::Fragment { fragment } => (format!("fragment {fragment}"), Some(fragment)),
            To::Block { pc } => (format!("the block at {}", hex(pc)), None),
        };
        WentView { to, fragment, times: w.times }
    };
    went.iter().map(view).collect()
}

fn body_view(body: &Body) -> BodyView<'_> {
    BodyView {
        path: body.path.iter().map(block).collect(),
        guards: body.guards.iter().map(guard).collect(),
        stages: stages(body),
        origins: body.origins.iter().map(|(line, pc)| (line.as_str(), hex(*pc))).collect(),
        native: body
            .native
            .iter()
            .map(|line| NativeView {
                at: hex(line.at),
                text: &line.text,
                pc: line.pc.map(hex),
                cold: line.cold,
                marks: &line.marks,
            })
            .collect(),
    }
}

fn block(b: &Block) -> BlockView<'_> {
    let instructions = b.instructions.iter().map(|i| InstructionView {
        pc: hex(i.pc),
        text: &i.text,
        note: i.note.as_deref(),
        guards: &i.guards,
        source: i.source,
    });
    BlockView {
        pc: hex(b.pc),
        symbol: &b.symbol,
        executed: b.executed,
        transfer: b.transfer,
        next: hex(b.next),
        instructions: instructions.collect(),
    }
}

fn guard(g: &Guard) -> GuardView<'_> {
    let mut restores: Vec<String> =
        g.anchor.english.iter().take(MOST_LINES).map(|line| clipped(line)).collect();
    if g.anchor.english.len() > MOST_LINES {
        restores.push(format!("… and {} more", g.anchor.english.len() - MOST_LINES));
    }
    GuardView {
        index: g.index,
        kind: g.kind,
        pc: hex(g.pc),
        in_loop: g.in_loop,
        position: g.position,
        predicate: clipped(&g.predicate),
        english: clipped(&g.english),
        anchor: &g.anchor.name,
        target: g.anchor.target.map(hex),
        restores,
        executed: g.executed,
        failed: g.failed,
        went: went(&g.went),
    }
}

/// The IR as built, after each pass, and as it was emitted.
fn stages(body: &Body) -> Vec<Stage> {
    let mut texts = vec![("as built".to_string(), &body.built)];
    texts.extend(body.passes.iter().map(|change| (change.pass.clone(), &change.after)));
    if texts.last().is_some_and(|(_, text)| **text != body.optimised) {
        texts.push(("as emitted".to_string(), &body.optimised));
    }
    let mut before: Option<Vec<String>> = None;
    let mut stages = Vec::new();
    for (pass, text) in texts {
        let lines: Vec<String> = text.lines().map(clipped).collect();
        stages.push(match &before {
            None => Stage { pass, lines: Some(lines.clone()), edits: None },
            Some(before) => Stage { pass, lines: None, edits: Some(difference(before, &lines)) },
        });
        before = Some(lines);
    }
    stages
}

fn difference(before: &[String], after: &[String]) -> Vec<Edit> {
    let mut edits = Vec::new();
    for op in capture_diff_slices(Algorithm::Myers, before, after) {
        match op {
            DiffOp::Equal { len, .. } => edits.push(Edit::Count(len as i64)),
            DiffOp::Delete { old_len, .. } => edits.push(Edit::Count(-(old_len as i64))),
            DiffOp::Insert { new_index, new_len, .. } => {
                edits.push(Edit::New(after[new_index..new_index + new_len].to_vec()));
            }
            DiffOp::Replace { old_len, new_index, new_len, .. } => {
                edits.push(Edit::Count(-(old_len as i64)));
                edits.push(Edit::New(after[new_index..new_index + new_len].to_vec()));
            }
        }
    }
    edits
}

fn hex(address: u64) -> String {
    format!("{address:#x}")
}

/// The beginning of a text that is too long.
fn clipped(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        None => text.to_string(),
        Some((end, _)) => {
            format!("{}… ({} characters)", &text[..end], text.chars().count())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_short() {
        let lines = |text: &str| text.split(' ').map(str::to_string).collect::<Vec<_>>();
        assert_eq!(
            difference(&lines("a b c"), &lines("a x c")),
            [Edit::Count(1), Edit::Count(-1), Edit::New(vec!["x".to_string()]), Edit::Count(1)]
        );
        let json = serde_json::to_string(&difference(&lines("a"), &lines("a b"))).expect("JSON");
        assert_eq!(json, r#"[1,["b"]]"#);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(clipped("äö"), "äö");
        let long = "ä".repeat(LONGEST + 1);
        let cut = clipped(&long);
        assert!(
            cut.starts_with(&"ä".repeat(LONGEST)) && cut.ends_with("(321 characters)"),
            "{cut}"
        );
    }
}
