//! Pass `peel`: puts a copy of the loop's body, one iteration, before the loop.
//!
//! Everything that the first iteration establishes then dominates the loop: values, passed guards,
//! content of memory that was read or written, pages that are accessible. So value numbering
//! removes invariant code and invariant guards from the loop, and forwarding knows the content of
//! memory at the loop's entry. Peeling is how the pipeline hoists.
//!
//! ```text
//! b0: jump b1(x)                          b0: <body of b1, v0 := x> jump b1(…)
//! b1(v0): poll !a0; body; jump b1(…)      b1(v0): poll !a0; body; jump b1(…)
//! ```
//!
//! The copy has its own values and anchors, and no `poll`, because the entry is not a back edge.
//! The caller owns the version; no data between runs, no lock.

use super::OptOptions;
use super::shape::{BODY, ENTRY, Shape, normalise};
use crate::op::Op;
use crate::types::{AnchorId, Operand};
use crate::version::rename;
use crate::version::{Term, Version};

/// Runs the pass on a loop of at most `options.peel_limit` instructions; returns the number of
/// instructions copied. Running it again peels another iteration.
pub(super) fn run(version: &mut Version, options: &OptOptions) -> usize {
    if normalise(version) != Some(Shape::Loop)
        || version.blocks[BODY].insts.len() > options.peel_limit
    {
        return 0;
    }
    let Term::Jump { args, .. } = version.blocks[ENTRY].term.clone() else { return 0 };
    let mut table: Vec<Option<Operand>> = vec![None; version.types.len()];
    for (param, arg) in version.blocks[BODY].params.iter().zip(args) {
        table[param.index()] = Some(arg);
    }
    let mut copies = version.blocks[BODY].insts.clone();
    copies.retain(|i| i.op != Op::Poll);
    for inst in &mut copies {
        for def in &mut inst.defs {
            let copy = version.value(version.ty(*def));
            table[def.index()] = Some(copy.into());
            *def = copy;
        }
    }
    let mut anchor_copy: Vec<Option<AnchorId>> = vec![None; version.anchors.len()];
    for inst in &mut copies {
        inst.args.iter_mut().for_each(|o| *o = rename(&table, *o));
        if let Some(anchor) = &mut inst.anchor {
            let old = anchor.index();
            *anchor = *anchor_copy[old].get_or_insert_with(|| {
                let mut copy = version.anchors[old].clone();
                Version::for_each_anchor_operand(&mut copy, |o| *o = rename(&table, *o));
                version.anchor(copy)
            });
        }
    }
    let mut term = version.blocks[BODY].term.clone();
    Version::for_each_term_operand(&mut term, |o| *o = rename(&table, *o));
    let copied = copies.len();
    version.blocks[ENTRY].insts.extend(copies);
    version.blocks[ENTRY].term = term;
    copied
}
