//! Pass `params`: removes parameters of the loop block that are invariant or duplicates.
//!
//! A parameter is invariant if its argument on each back edge is itself or equal to its entry argument;
//! then it is the entry argument. Two parameters with equal arguments are one. Both facts are found
//! optimistically, by partition: at first all parameters of one type with the same entry argument
//! are one class; then classes are split until the members of each have arguments of one class on each
//! back edge.
//!
//! ```text
//! b0: … jump b1(v1, v2, v2)                  b0: … jump b1(v2)
//! b1(v3, v4, v5): … jump b1(v3, v5, v4)      b1(v4): … jump b1(v4)  next round: v4 is v2
//! ```
//!
//! In a version with other branches ([`super::shape`]) only the simplest case is found: a parameter to which every edge
//! passes the same operand or the parameter itself. That operand is available at the end of every
//! predecessor, so it is available wherever the parameter is.
//!
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use super::shape::{BODY, Shape, normalise};
use super::tree::{args, to_head};
use crate::side_conditions::{SideCondition, holds};
use crate::types::Operand;
use crate::version::Version;
use crate::version::rename;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// For each back edge the class of the argument, or the argument.
type BackKeys = SmallVec<[Result<usize, Operand>; 2]>;

/// Runs the pass; returns the number of parameters removed.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    match normalise(version) {
        Some(Shape::Loop | Shape::Tree) => {}
        Some(Shape::Linear) => return 0,
        None => return trivial(version),
    }
    let from = to_head(version);
    let (entry, back) = (args(version, from[0]), &from[1..]);
    let back: Vec<&[Operand]> = back.iter().map(|leaf| args(version, *leaf)).collect();
    let params = &version.blocks[BODY].params;
    let position: FxHashMap<Operand, usize> =
        params.iter().enumerate().map(|(i, p)| (Operand::Value(*p), i)).collect();

    // class[i]: the number of parameter i's class.
    let mut first: FxHashMap<(Operand, u8), usize> = FxHashMap::default();
    let mut class: Vec<usize> = Vec::with_capacity(params.len());
    for (param, arg) in params.iter().zip(entry) {
        let next = first.len();
        class.push(*first.entry((*arg, version.ty(*param) as u8)).or_insert(next));
    }
    let mut classes = first.len();
    // The loop ends when a round splits nothing, after at most as many rounds as there are
    // parameters.
    loop {
        // The members of a class that is its entry argument may also have that argument on a back edge.
        let back_key = |back: &&[Operand], i: usize| match position.get(&back[i]) {
            Some(p) => Ok(class[*p]),
            None if back[i] == entry[i] => Ok(class[i]),
            None => Err(back[i]),
        };
        let mut split: FxHashMap<(usize, BackKeys), usize> = FxHashMap::default();
        let mut refined = Vec::with_capacity(params.len());
        for (i, class) in class.iter().enumerate() {
            let keys = back.iter().map(|back| back_key(back, i)).collect();
            let next = split.len();
            refined.push(*split.entry((*class, keys)).or_insert(next));
        }
        let count = split.len();
        if holds(SideCondition::ParamsSplit, count == classes) {
            break;
        }
        class = refined;
        classes = count;
    }
    // A class is its entry argument if all its back-edge arguments stay in the class or are that
    // argument.
    let mut invariant = vec![true; classes];
    for i in 0..params.len() {
        let stays = |back: &&[Operand]| {
            position.get(&back[i]).map_or(back[i] == entry[i], |p| class[*p] == class[i])
        };
        let stays = back.iter().all(stays);
        invariant[class[i]] &= holds(SideCondition::ParamsInvariant, stays);
    }
    let mut leader: Vec<Option<Operand>> = vec![None; classes];
    let mut table = vec![None; version.types.len()];
    let mut keep = vec![true; params.len()];
    for i in 0..params.len() {
        let replacement = if invariant[class[i]] { Some(entry[i]) } else { leader[class[i]] };
        match replacement {
            Some(o) => {
                table[params[i].index()] = Some(o);
                keep[i] = false;
            }
            None => leader[class[i]] = Some(params[i].into()),
        }
    }
    let removed = keep.iter().filter(|k| !**k).count();
    if removed > 0 {
        drop_params(version, BODY, &keep);
        version.for_each_operand(|o| *o = rename(&table, *o));
    }
    removed
}

/// Removes, in a version with branches, parameters that are always the same operand.
fn trivial(version: &mut Version) -> usize {
    if version.is_base() {
        return 0;
    }
    let mut removed = 0;
    loop {
        // For each block's parameters: the operands that the edges pass.
        let mut passed: Vec<Vec<Passed>> =
            version.blocks.iter().map(|b| vec![Passed::Nothing; b.params.len()]).collect();
        for (to, args) in version.blocks.iter().flat_map(|b| b.term.edges()) {
            let params = &version.blocks[to.index()].params;
            for ((slot, param), arg) in passed[to.index()].iter_mut().zip(params).zip(args) {
                *slot = match *slot {
                    _ if *arg == Operand::Value(*param) => *slot,
                    Passed::Nothing => Passed::Always(*arg),
                    Passed::Always(known) if holds(SideCondition::ParamsTrivial, known == *arg) => {
                        *slot
                    }
                    Passed::Always(_) | Passed::Several => Passed::Several,
                };
            }
        }
        // One at a time, because the replacement may be another parameter that is replaced too.
        let found = passed.iter().enumerate().find_map(|(b, list)| {
            let always = |(i, p): (usize, &Passed)| {
                if let Passed::Always(o) = p { Some((b, i, *o)) } else { None }
            };
            list.iter().enumerate().find_map(always)
        });
        let Some((block, i, operand)) = found else { return removed };
        let mut keep = vec![true; version.blocks[block].params.len()];
        keep[i] = false;
        let param = version.blocks[block].params[i];
        drop_params(version, block, &keep);
        version.for_each_operand(|o| {
            if *o == Operand::Value(param) {
                *o = operand;
            }
        });
        removed += 1;
    }
}

/// The operands that the edges to a block pass to one parameter.
#[derive(Clone, Copy)]
enum Passed {
    /// No edge, or only the parameter itself.
    Nothing,
    Always(Operand),
    Several,
}

/// Removes the parameters of a block for which `keep` is false, with their arguments.
pub(super) fn drop_params(version: &mut Version, block: usize, keep: &[bool]) {
    fn retain<T>(list: &mut Vec<T>, keep: &[bool]) {
        let mut flags = keep.iter();
        list.retain(|_| *flags.next().unwrap_or(&true));
    }
    retain(&mut version.blocks[block].params, keep);
    for from in &mut version.blocks {
        from.term
            .edges_mut()
            .filter(|(to, _)| to.index() == block)
            .for_each(|(_, args)| retain(args, keep));
    }
}
