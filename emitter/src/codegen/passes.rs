//! Counts how often the guest comes to a trace's head on the trace's own way, for a race
//! ([`crate::emitter::race`]): by calls of a recursive function, which the trace follows
//! ([`dynasour_ir::Anchor::passes`]).
//!
//! Anchors tell how often that was. A block counts, at its start, what the block before has added, and an end
//! counts the rest. What a block has added before a guard of its own fails is not counted. So the trace is
//! charged with a little more than its time.
//!
//! ```text
//! b1: … assume v1 else a3 (passes 1); branch v2 then b2 else b4
//! b2: 1 is counted; … exit a5 (passes 4): 3 are counted
//! ```
//!
//! Side condition: a block has one predecessor; at others nothing is counted. No data, no lock; only the compilation
//! of a trace uses it.

use dynasour_ir::{Block, Term, Version};

/// What the trace counts at the start of each block, and at its end if it is the end of the trace.
pub(crate) fn of(version: &Version) -> Vec<(u32, u32)> {
    let blocks = &version.blocks;
    let mut entries = vec![0; blocks.len()];
    blocks.iter().flat_map(|b| b.term.edges()).for_each(|(to, _)| entries[to.index()] += 1);
    let mut counts = vec![(0, 0); blocks.len()];
    // By block: counted on the way to its end.
    let mut counted = vec![0; blocks.len()];
    for (b, block) in blocks.iter().enumerate() {
        let there = at_end(version, block).max(counted[b]);
        if matches!(block.term, Term::Exit(_)) {
            counts[b].1 = there - counted[b];
        }
        for (to, _) in block.term.edges().filter(|(to, _)| entries[to.index()] == 1) {
            counts[to.index()].0 = there - counted[b];
            counted[to.index()] = there;
        }
    }
    counts
}

/// The passes at the end of a block, as far as its anchors tell.
fn at_end(version: &Version, block: &Block) -> u32 {
    let exit = match block.term {
        Term::Exit(anchor) => Some(anchor),
        _ => None,
    };
    let anchors = block.insts.iter().filter_map(|inst| inst.anchor).chain(exit);
    anchors.map(|anchor| version.anchors[anchor.index()].passes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn blocks_count_what_those_before_have_added() {
        let version = dynasour_ir::text::version(
            "region 0x1000 { version t1 {
            anchor a0 = base.0x1010 [] passes 1
            anchor a1 = base.0x1020 [] passes 4
            anchor a2 = base.0x1030 [] passes 1
            b0(v0: i64 = rax, v1: i64 = rdx):
              jump b1()
            b1():
              v2 = lt.u.i64 v0, v1
              assume v2 else a0
              v3 = lt.u.i64 v1, 7
              branch v3 then b2() else b3()
            b2():
              exit a1
            b3():
              exit a2
          } }",
        );
        let counts = super::of(&version.expect("a version"));
        assert_eq!(counts, [(0, 0), (0, 0), (1, 3), (1, 0)]);
    }
}
