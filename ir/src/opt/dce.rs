//! Dead code, dead flags, dead and duplicate block parameters, dead anchors and natives.
//!
//! What is live: instructions with an effect, whatever they use, and what their anchors' varmaps name (a varmap
//! is just a use). Everything else goes. Three things are *not* dead although nobody reads their result: a load
//! (it may fault, and some guests rely on that: null checks, safe points), a native that may trap or that
//! repeats differently, and an `assume`.
//!
//! Parameters of the loop block: one whose back-edge argument is itself, or equal to its entry argument, is that
//! entry argument; two with equal arguments are one. Both facts are found optimistically, by partition: at first
//! all parameters of one type with the same entry argument count as equal, then classes split until each agrees
//! on the class of its back-edge argument (two induction variables that start and step alike are one).

use super::OptOptions;
use super::shape::{BODY, ENTRY, Shape, normalise, rename};
use crate::op::Op;
use crate::types::{AnchorId, NativeId, Operand};
use crate::version::{Effects, Inst, Term, Version};
use rustc_hash::FxHashMap;

/// Runs the pass; returns how many instructions, parameters, anchors and natives went.
pub(super) fn run(version: &mut Version, _options: &OptOptions) -> usize {
    let Some(shape) = normalise(version) else { return 0 };
    let mut changes = 0;
    if shape == Shape::Loop {
        changes += merge_params(version);
    }
    changes += remove_dead(version);
    changes + remove_unused_tables(version)
}

/// Must this instruction stay although nobody uses its results?
pub(super) fn has_effect(version: &Version, inst: &Inst) -> bool {
    const HARMLESS: Effects = Effects::READ_STATE;
    match inst.op {
        Op::Native => match inst.native.and_then(|n| version.natives.get(n.index())) {
            Some(native) => !HARMLESS.contains(native.effects) || !native.writes.is_empty(),
            None => true,
        },
        _ => !inst.op.is_pure(),
    }
}

/// Removes parameters of the loop that are equal to another one or to their entry argument.
fn merge_params(version: &mut Version) -> usize {
    let Term::Jump { args: entry, .. } = &version.blocks[ENTRY].term else { return 0 };
    let Term::Jump { args: back, .. } = &version.blocks[BODY].term else { return 0 };
    let params = &version.blocks[BODY].params;
    let position: FxHashMap<Operand, usize> = params.iter().enumerate().map(|(i, p)| (Operand::Value(*p), i)).collect();

    // class[i]: the number of parameter i's class.
    let mut first: FxHashMap<(Operand, u8), usize> = FxHashMap::default();
    let mut class: Vec<usize> = Vec::with_capacity(params.len());
    for (param, arg) in params.iter().zip(entry) {
        let next = first.len();
        class.push(*first.entry((*arg, version.ty(*param) as u8)).or_insert(next));
    }
    let mut classes = first.len();
    // Splitting is bounded by the number of parameters; a round that splits nothing ends it.
    loop {
        let mut split: FxHashMap<(usize, Result<usize, Operand>), usize> = FxHashMap::default();
        let mut refined = Vec::with_capacity(params.len());
        for i in 0..params.len() {
            // A class that has collapsed to its entry argument agrees with that argument on the back edge.
            let back_key = match position.get(&back[i]) {
                Some(p) => Ok(class[*p]),
                None if back[i] == entry[i] => Ok(class[i]),
                None => Err(back[i]),
            };
            let next = split.len();
            refined.push(*split.entry((class[i], back_key)).or_insert(next));
        }
        let count = split.len();
        class = refined;
        if count == classes {
            break;
        }
        classes = count;
    }
    // A class is its entry argument if all its back-edge arguments stay in the class or are that argument.
    let mut invariant = vec![true; classes];
    for i in 0..params.len() {
        let stays = position.get(&back[i]).map_or(back[i] == entry[i], |p| class[*p] == class[i]);
        invariant[class[i]] &= stays;
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
        drop_params(version, &keep);
        version.for_each_operand(|o| *o = rename(&table, *o));
    }
    removed
}

/// Removes the parameters of the loop block that `keep` does not name, with their arguments.
pub(super) fn drop_params(version: &mut Version, keep: &[bool]) {
    fn retain<T>(list: &mut Vec<T>, keep: &[bool]) {
        let mut flags = keep.iter();
        list.retain(|_| *flags.next().unwrap_or(&true));
    }
    retain(&mut version.blocks[BODY].params, keep);
    for block in [ENTRY, BODY] {
        if let Term::Jump { args, .. } = &mut version.blocks[block].term {
            retain(args, keep);
        }
    }
}

/// Where a value comes from.
#[derive(Clone, Copy)]
enum Source {
    Nowhere,
    Inst(usize, usize),
    LoopParam(usize),
}

fn remove_dead(version: &mut Version) -> usize {
    let mut source = vec![Source::Nowhere; version.types.len()];
    for (b, block) in version.blocks.iter().enumerate() {
        if b == BODY {
            block.params.iter().enumerate().for_each(|(i, p)| source[p.index()] = Source::LoopParam(i));
        }
        for (i, inst) in block.insts.iter().enumerate() {
            inst.defs.iter().for_each(|d| source[d.index()] = Source::Inst(b, i));
        }
    }
    let mut live: Vec<Vec<bool>> = version.blocks.iter().map(|b| vec![false; b.insts.len()]).collect();
    let mut live_value = vec![false; version.types.len()];
    let mut live_anchor = vec![false; version.anchors.len()];
    let mut work: Vec<Operand> = Vec::new();

    let mut mark_inst = |version: &Version, work: &mut Vec<Operand>, b: usize, i: usize| {
        if !std::mem::replace(&mut live[b][i], true) {
            let inst = &version.blocks[b].insts[i];
            work.extend(inst.args.iter().copied());
            if let Some(a) = inst.anchor
                && !std::mem::replace(&mut live_anchor[a.index()], true)
            {
                work.extend(version.anchors[a.index()].operands());
            }
        }
    };
    for (b, block) in version.blocks.iter().enumerate() {
        for (i, inst) in block.insts.iter().enumerate() {
            if has_effect(version, inst) {
                mark_inst(version, &mut work, b, i);
            }
        }
        match &block.term {
            Term::Exit(a) => work.extend(version.anchors[a.index()].operands()),
            Term::Guest(_) => work.extend(Version::term_operands(&block.term)),
            Term::Jump { .. } => {}
        }
    }
    while let Some(o) = work.pop() {
        let Operand::Value(v) = o else { continue };
        if std::mem::replace(&mut live_value[v.index()], true) {
            continue;
        }
        match source[v.index()] {
            Source::Nowhere => {}
            Source::Inst(b, i) => mark_inst(version, &mut work, b, i),
            Source::LoopParam(i) => {
                for block in &version.blocks {
                    if let Term::Jump { args, .. } = &block.term {
                        work.push(args[i]);
                    }
                }
            }
        }
    }
    let mut removed = 0;
    for (block, live) in version.blocks.iter_mut().zip(&live) {
        let before = block.insts.len();
        let mut flags = live.iter();
        block.insts.retain(|_| *flags.next().unwrap_or(&true));
        removed += before - block.insts.len();
    }
    if version.blocks.len() > BODY {
        let keep: Vec<bool> = version.blocks[BODY].params.iter().map(|p| live_value[p.index()]).collect();
        removed += keep.iter().filter(|k| !**k).count();
        drop_params(version, &keep);
    }
    removed
}

/// Renumbers anchors and natives so that only used ones remain, in order of use.
fn remove_unused_tables(version: &mut Version) -> usize {
    let mut anchor_map: Vec<Option<AnchorId>> = vec![None; version.anchors.len()];
    let mut native_map: Vec<Option<NativeId>> = vec![None; version.natives.len()];
    let mut anchors = Vec::new();
    let mut natives = Vec::new();
    let (old_anchors, old_natives) = (&mut version.anchors, &mut version.natives);
    let mut rename_anchor = |a: &mut AnchorId| {
        let old = a.index();
        *a = *anchor_map[old].get_or_insert_with(|| {
            anchors.push(old_anchors[old].clone());
            AnchorId((anchors.len() - 1) as u32)
        });
    };
    let mut rename_native = |n: &mut NativeId| {
        let old = n.index();
        *n = *native_map[old].get_or_insert_with(|| {
            natives.push(old_natives[old].clone());
            NativeId((natives.len() - 1) as u32)
        });
    };
    for block in &mut version.blocks {
        for inst in &mut block.insts {
            inst.anchor.iter_mut().for_each(&mut rename_anchor);
            inst.native.iter_mut().for_each(&mut rename_native);
        }
        if let Term::Exit(a) = &mut block.term {
            rename_anchor(a);
        }
    }
    let removed = version.anchors.len() - anchors.len() + version.natives.len() - natives.len();
    version.anchors = anchors;
    version.natives = natives;
    removed
}
