//! What the iterations of an interpreted program's loop assume of the values that they compute.
//!
//! Each iteration is looked at by itself first ([`super::promoted_alone`]). Where several still go the same way, they
//! have to agree:
//!
//! ```text
//! keys, from which dispatches follow    what one promotes all do; where their values differ they part
//! operands                              what differs is no operand: none of them assumes it
//! ```
//!
//! Data: [`Promoted`]. Callers: [`super::promoted_by_iterations`]; no lock.
//!
//! Example: two iterations execute the return of an interpreted function, one to 0x10, one to 0x24. The load
//! of that address is a key of both. They part there, and what they promote behind it is their own.

use super::iterations::{parts_at, result};
use super::{Origins, Step};
use crate::assumptions::Assumption;
use std::collections::BTreeMap;

/// What an iteration of a loop of an interpreted program assumes. Instructions are named by step, and number in
/// its block.
#[derive(Debug)]
pub(super) struct Promoted {
    /// The instructions from whose results dispatches follow.
    pub keys: Origins,
    /// The loads of operands, with what is assumed of the memory.
    pub operands: BTreeMap<(usize, usize), Assumption>,
}

/// Makes the iterations agree where they go the same way.
pub(super) fn reconcile(iterations: &[&[Step]], all: &mut [Promoted]) {
    let pairs = |len: usize| (0..len).flat_map(move |b| (0..b).map(move |a| (a, b)));
    // A key that one iteration takes over from another may be one for a third.
    loop {
        let before: usize = all.iter().map(|promoted| promoted.keys.len()).sum();
        for (a, b) in pairs(all.len()) {
            let end = parting(iterations, all, (a, b));
            let shared: Vec<_> =
                all[a].keys.union(&all[b].keys).copied().filter(|at| *at < end).collect();
            all[a].keys.extend(&shared);
            all[b].keys.extend(&shared);
        }
        if before == all.iter().map(|promoted| promoted.keys.len()).sum() {
            break;
        }
    }
    for (a, b) in pairs(all.len()) {
        let end = parting(iterations, all, (a, b));
        for one in [a, b] {
            all[one].operands.retain(|at, _| *at >= end || agree(iterations, (a, b), *at));
        }
    }
}

/// The end of what two iterations have in common: behind the first key that differs, or the step with whose
/// end they part.
fn parting(iterations: &[&[Step]], all: &[Promoted], (a, b): (usize, usize)) -> (usize, usize) {
    let (x, y) = (iterations[a], iterations[b]);
    let steps = parts_at(x, y).map_or(x.len().min(y.len()), |n| n + 1);
    let keys = all[a].keys.union(&all[b].keys).copied();
    let differing = keys.filter(|at| at.0 < steps && !agree(iterations, (a, b), *at)).min();
    differing.map_or((steps, 0), |(step, inst)| (step, inst + 1))
}

/// Has this instruction computed the same in two iterations that both execute it?
fn agree(iterations: &[&[Step]], (a, b): (usize, usize), (step, inst): (usize, usize)) -> bool {
    match (result(&iterations[a][step], inst), result(&iterations[b][step], inst)) {
        (Some(x), Some(y)) => x == y,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assumptions::Place;
    use dynasour_guest::lift::{Bytes, MAX_BLOCK, lift_block};
    use dynasour_ir::{Op, Ty};
    use std::sync::Arc;

    /// `mov rax, [rbx]; mov rcx, [rdx]; jmp rax`, whose loads have read this; and the numbers of the loads.
    fn step(read: [u64; 2]) -> (Step, [usize; 2]) {
        let bytes = &[0x48, 0x8b, 0x03, 0x48, 0x8b, 0x0a, 0xff, 0xe0];
        let block = Arc::new(lift_block(0x1000, &Bytes { start: 0x1000, bytes }, MAX_BLOCK));
        let version = &block.version;
        let insts = version.blocks[0].insts.iter().enumerate();
        let loads: Vec<usize> = insts.filter(|(_, i)| i.op == Op::Load).map(|(n, _)| n).collect();
        let mut observed = vec![None; version.types.len()];
        for (n, value) in loads.iter().zip(read) {
            let def = version.blocks[0].insts[*n].def().expect("a load has a result");
            observed[def.index()] = Some(value);
        }
        (Step { block, next: 0x9000, observed: Some(observed) }, [loads[0], loads[1]])
    }

    /// What two iterations of one step, whose loads have read this, promote in the end: keys, operands.
    fn reconciled(a: [u64; 2], b: [u64; 2], key: usize) -> [(usize, usize); 2] {
        let ((a, loads), (b, _)) = (step(a), step(b));
        let operand = (0, loads[1 - key]);
        let place = Place::Memory { address: 0x2000, ty: Ty::I64 };
        let assumed = |value| BTreeMap::from([(operand, Assumption { place, value })]);
        let keys: Origins = [(0, loads[key])].into_iter().collect();
        let mut all = [
            Promoted { keys, operands: assumed(1) },
            Promoted { keys: Origins::default(), operands: assumed(2) },
        ];
        reconcile(&[&[a], &[b]], &mut all);
        all.map(|promoted| (promoted.keys.len(), promoted.operands.len()))
    }

    #[test]
    fn iterations_share_keys_and_no_operand_that_differs() {
        assert_eq!(reconciled([1, 5], [1, 5], 0), [(1, 1); 2], "nothing differs");
        assert_eq!(reconciled([1, 5], [2, 6], 0), [(1, 1); 2], "they part before the operand");
        assert_eq!(reconciled([1, 5], [1, 6], 0), [(1, 0); 2], "the operand differs");
        assert_eq!(reconciled([5, 1], [6, 2], 1), [(1, 0); 2], "they part behind the operand");
        assert_eq!(reconciled([5, 1], [5, 2], 1), [(1, 1); 2], "the operand is the same");
    }
}
