//! Counts the iterations of a loop in a value of its own, for a race ([`crate::emitter::race`]).
//!
//! To count in memory at the head of a loop takes some five cycles, because each count waits for the
//! one before; a short loop would lose its race by that alone. So the count is a parameter of the loop's
//! head, which the allocator keeps in a register if it can. Every exit of the loop defers a store of it:
//!
//! ```text
//! b0(…): …; jump b1(v1)                       b0(…): v7 = load.i64 [word]; …; v8 = add.i64 v7, 1
//!                                                    jump b1(v1, v8)
//! b1(v2): poll else a0; …                →    b1(v2, v9): poll else a0; …
//!         jump b1(v3)                                v10 = add.i64 v9, 1; jump b1(v3, v10)
//! a0 = base.0x1000 [rax = v2]                 a0 = base.0x1000 [rax = v2] stores [store.i64 [word], v9]
//! ```
//!
//! The word belongs to the trace and the thread alone, so it may count on after the race, and on other
//! threads: it is in the thread's context ([`crate::context_words`]).
//!
//! Side conditions: everything but the entry block is in the loop, the loop is short (in a long one
//! counting takes no time that matters, and a register is missed), no anchor is used in both, and no access of
//! the version's own has such an address.
//!
//! No data, no lock; only the compilation of a trace uses it.

use crate::codegen::count::Starts;
use crate::context_words;
use dynasour_ir::version::DeferredStore;
use dynasour_ir::{
    Anchor, AnchorId, BlockId, Inst, Loc, Mem, Op, Operand, Term, Ty, Value, Version,
};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// Instructions of the longest loop that is counted so (guess: five cycles are a twentieth of what so many
/// take).
const LONGEST: usize = 250;

/// Instructions that are put before those of the entry block.
pub(crate) const ADDED: u32 = 1;

/// Does the version itself access memory at such an address?
pub(crate) fn names_a_word(version: &Version) -> bool {
    let insts = version.blocks.iter().flat_map(|block| &block.insts).filter_map(|inst| inst.mem);
    let deferred = version.anchors.iter().flat_map(|a| &a.stores).map(|store| store.mem);
    insts.chain(deferred).any(|mem| context_words::field(mem.disp as u64).is_some())
}

/// The same version with a loop that counts its iterations, `starts.each` for each, in the trace's own
/// word. None if it has no such loop, or the trace has no such word.
pub(crate) fn counting(version: &Version, starts: &Starts) -> Option<Version> {
    let word = context_words::address(starts.own?);
    let head = head(version)?;
    let in_loop = &version.blocks[1..];
    if in_loop.iter().map(|block| block.insts.len()).sum::<usize>() > LONGEST {
        return None;
    }
    let [before, inside] = [&version.blocks[..1], in_loop].map(|blocks| {
        let insts = blocks.iter().flat_map(|block| &block.insts).filter_map(|inst| inst.anchor);
        let ends = blocks.iter().filter_map(|block| match block.term {
            Term::Exit(anchor) => Some(anchor),
            _ => None,
        });
        insts.chain(ends).collect::<BTreeSet<AnchorId>>()
    });
    let leads_elsewhere = |anchor: &AnchorId| version.anchors[anchor.index()].via.is_some();
    if !before.is_disjoint(&inside) || inside.iter().any(leads_elsewhere) {
        return None;
    }
    let entry = at_entry(version)?;

    let mut new = version.clone();
    let count = new.value(Ty::I64);
    new.blocks[head.index()].params.push(count);
    let word = Mem::disp(word as i64);
    for anchor in inside {
        new.anchors[anchor.index()].stores.push(DeferredStore {
            ty: Ty::I64,
            mem: word,
            args: [Operand::Const(0), Operand::Const(0), count.into()],
        });
    }
    let first = new.value(Ty::I64);
    let entry = new.anchor(entry);
    let mut load =
        Inst::new(Op::Load, Ty::I64, Some(first), &[Operand::Const(0), Operand::Const(0)]);
    (load.mem, load.anchor) = (Some(word), Some(entry));
    new.blocks[0].insts.insert(0, load);
    for block in 0..new.blocks.len() {
        let so_far = if block == 0 { first } else { count };
        pass_on(&mut new, block, head, so_far, starts.each);
    }
    Some(new)
}

/// An anchor for the state at entry.
fn at_entry(version: &Version) -> Option<Anchor> {
    let written: BTreeSet<Loc> =
        version.anchors.iter().flat_map(|a| &a.varmap).map(|(loc, _)| *loc).collect();
    let params = version.blocks[0].params.iter().zip(&version.entry_locs);
    let there: FxHashMap<Loc, Operand> = params.map(|(p, loc)| (*loc, (*p).into())).collect();
    let varmap = written.into_iter().map(|loc| there.get(&loc).map(|at| (loc, *at)));
    Some(Anchor {
        target: Operand::Const(version.region),
        after: None,
        varmap: varmap.collect::<Option<_>>()?,
        stores: Vec::new(),
        via: None,
        passes: 0,
    })
}

/// The head of the loop that is everything but the entry block.
fn head(version: &Version) -> Option<BlockId> {
    let Term::Jump { to: head, .. } = version.blocks.first()?.term else { return None };
    let leads_back = |block: &dynasour_ir::Block| block.term.edges().any(|(to, _)| to == head);
    (head.index() != 0 && version.blocks[1..].iter().any(leads_back)).then_some(head)
}

/// The edges of a block to the head pass on a count that is `each` higher.
fn pass_on(version: &mut Version, block: usize, head: BlockId, so_far: Value, each: i32) {
    if !version.blocks[block].term.edges().any(|(to, _)| to == head) {
        return;
    }
    let next = version.value(Ty::I64);
    let block = &mut version.blocks[block];
    let args = [so_far.into(), Operand::Const(each as u64)];
    block.insts.push(Inst::new(Op::Add, Ty::I64, Some(next), &args));
    for (_, args) in block.term.edges_mut().filter(|(to, _)| **to == head) {
        args.push(next.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::context::offset;
    use dynasour_ir::text::version;
    use dynasour_ir::verify::verify;

    const LOOP: &str = "region 0x1000 { version t1 context private_memory {
        anchor a0 = base.0x1000 [rax = v0]
        anchor a1 = base.0x1000 [rax = v2]
        anchor a2 = base.0x1004 [rax = v3]
        b0(v0: i64 = rax, v1: i64 = rdx, v6: i64 = rcx):
          v5 = load.i64 [v1] !a0
          jump b1(v5)
        b1(v2: i64):
          poll else a1
          v3 = add.i64 v2, 3
          v4 = lt.u.i64 v3, v1
          assume v4 else a2
          jump b1(v3)
      } }";

    fn starts(own: Option<u32>) -> Starts {
        Starts { key: None, each: 2, own }
    }

    #[test]
    fn every_exit_of_the_loop_stores_the_count() {
        let before = version(LOOP).expect("a version");
        let after = counting(&before, &starts(Some(6))).expect("a loop");
        assert!(names_a_word(&after) && !names_a_word(&before));
        let load = after.blocks[0].insts[0].mem.expect("the count so far");
        assert_eq!(context_words::field(load.disp as u64), Some(offset::LOOP_STARTS + 48));
        assert_eq!(verify(&after), Ok(()));
        let stores: Vec<usize> = after.anchors.iter().map(|anchor| anchor.stores.len()).collect();
        assert_eq!(stores, [0, 1, 1, 0], "not those before it");
        assert_eq!(after.blocks[1].params.len(), 2);
        let adds = |block: usize| {
            after.blocks[block].insts.last().filter(|i| i.op == Op::Add).map(|i| i.args[1])
        };
        assert_eq!([adds(0), adds(1)], [Some(Operand::Const(2)); 2]);
    }

    #[test]
    fn others_are_left_alone() {
        let of = |text: &str| counting(&version(text).expect("a version"), &starts(Some(6)));
        assert!(counting(&version(LOOP).expect("a version"), &starts(None)).is_none());
        assert!(of(&LOOP.replace("else a2", "else a0").replace("rax = v0", "rdx = v1")).is_none());
        assert!(of(&LOOP.replace("jump b1(v3)", "exit a2")).is_none(), "no loop");
    }
}
